"""FP8 encoders: the recipe, and `quantize`, which rounds the linear layers of an encoder to float8_e4m3fn."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxft import dispatch, reference
from jaxft.models import inputs
from jaxft.ops import checks

logger = logging.getLogger("jaxft")

Model = TypeVar("Model", bound=nnx.Module)

METHOD = "jaxft_float8"  # `quant_method` in config.json
FILE = "model_float8.safetensors"  # No other library opens it, so that none takes the weights for ordinary ones.


@dataclasses.dataclass(frozen=True)
class Float8Recipe:
    """Recipe for the numbers of an FP8 encoder. Nothing is calibrated.

    - Weights: each output column of a kernel has a scale of its own, its largest magnitude / 448, in float32.
    - Activations: the inputs of all matmuls are divided by one constant, `activation_scale`, and are clipped to 448.
    - The matmuls accumulate in float32. Their scales, biases and activations are float32.
    - Embeddings, residuals, LayerNorm, attention, poolers and heads stay in 16 bits.

    The 3 bits of a float8_e4m3fn mantissa are the error, not its range: the activations of BERT models are below 30.
    `jaxft.models.count_clipped` counts the activations that are clipped.

    Attributes:
      activation_scale: the constant, above 0. Take a power of two above 1 if a model has activations beyond 448.

    Raises:
      ValueError: `activation_scale` is not a finite number above 0.
    """

    activation_scale: float = 1.0

    def __post_init__(self) -> None:
        scale = checks.check_number("Float8Recipe", "activation_scale", self.activation_scale, positive=True)
        object.__setattr__(self, "activation_scale", scale)

    def kernel(self, kernel: Array) -> tuple[Array, Array]:
        """Rounds a kernel `[K, F]`. Returns float8_e4m3fn `[F, K]`, as it is stored, and its scales, float32 `[F]`."""
        wide = kernel.astype(jnp.float32).T
        largest = jnp.max(jnp.abs(wide), axis=1, initial=0.0)
        scale = jnp.where(largest > 0.0, largest / reference.LARGEST_FLOAT8, 1.0)
        return reference.to_float8(wide / scale[:, None], 1.0), scale


def as_recipe(name: str, given: Any) -> Float8Recipe:
    """Checks an argument that is "fp8" or a recipe. `name` begins the message of the ValueError."""
    if isinstance(given, Float8Recipe):
        return given
    if given == "fp8":
        return Float8Recipe()
    raise ValueError(f"{name} must be 'fp8' or a jaxft.models.Float8Recipe, got {given!r:.100}")


def check_dtype(name: str, dtype: Any) -> None:
    """Raises a ValueError if a model in float8 cannot compute in a dtype. `name` begins the message."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name} must be bfloat16 or float16 for a model in float8, got {dtype}")


def check_load_options(dtype: Any, param_dtype: Any, implementation: Any, quantization: Any) -> Float8Recipe | None:
    """Checks arguments of `from_pretrained`, before a checkpoint is downloaded. Returns the recipe of `quantization`.

    Raises a ValueError or a TypeError that names the argument.
    """
    for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
        if given is not None:
            inputs.float_dtype("from_pretrained", name, given)
    dispatch.check_name("from_pretrained", implementation)
    return None if quantization is None else as_recipe("from_pretrained: quantization", quantization)


def load_options(
    recipe: Float8Recipe | None, saved: Float8Recipe | None, dtype: DTypeLike | None, param_dtype: DTypeLike | None
) -> tuple[Float8Recipe | None, DTypeLike, DTypeLike]:  # fmt: skip
    """Returns recipe, `dtype` and `param_dtype` of a model that `from_pretrained` loads, from its arguments.

    `saved` is the recipe of a checkpoint in float8. Raises a ValueError if the arguments do not fit it.
    """
    if saved is not None and recipe not in (None, saved):
        raise ValueError(
            f"from_pretrained: quantization must be None for a model that is saved in float8 with {saved}, got {recipe}"
        )
    recipe = recipe or saved
    if dtype is None:
        dtype = jnp.float32 if recipe is None else jnp.bfloat16
    if recipe is not None:
        check_dtype("from_pretrained: dtype", inputs.float_dtype("from_pretrained", "dtype", dtype))
    return recipe, dtype, dtype if param_dtype is None else param_dtype


def quantize(model: Model, recipe: Float8Recipe | str = "fp8") -> Model:
    """Returns a copy of a model whose linear layers are stored and multiplied in float8_e4m3fn.

    The copy shares the other arrays with `model`, which does not change. It is for inference: `train()` and gradients
    raise. On Hopper GPUs, it takes half of the memory for the weights of the layers, and matmuls of many tokens run at
    1.4 to 1.8 times the speed. docs/float8.md has the accuracy.

    Layers with norms before attention, gated feed-forward networks or disentangled attention stay in 16 bits, and so do
    layers of widths that are no multiples of 128. The log "jaxft" says so, and `jaxft.explain` shows what each matmul
    runs in. The copy of a model without a layer in float8 is an ordinary model.

    Args:
      model: a `BertModel`, or a module that contains one, such as `BertForSequenceClassification`. Its `dtype` is
        bfloat16 or float16.
      recipe: a `Float8Recipe`, or "fp8" for the default one.

    Returns:
      A model of the same class.

    Raises:
      TypeError: `model` contains no `BertModel`.
      ValueError: `model` is in float8 already or its dtype is float32, or `recipe` is something else.
    """
    found = as_recipe("quantize: recipe", recipe)
    copy = nnx.clone(model) if isinstance(model, nnx.Module) else None
    encoders = [] if copy is None else [m for _, m in nnx.iter_modules(copy) if hasattr(m, "quantize_layers")]
    if not encoders or copy is None:
        raise TypeError(
            f"quantize: model must be a BertModel or an nnx.Module that contains one, got {type(model).__name__} "
            "(from_pretrained of text encoders has the argument quantization)"
        )
    for encoder in encoders:
        encoder.quantize_layers(found)
    return copy


def read_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Float8Recipe | None]:
    """Splits the content of a config.json into what remains, and the recipe of a model that jaxft has quantized.

    Raises a ValueError if the recipe is impossible or has settings that are not known here.
    """
    rest, saved = dict(settings), settings.get("quantization_config")
    if not isinstance(saved, dict) or saved.get("quant_method") != METHOD:
        return rest, None
    del rest["quantization_config"]
    known = {"quant_method", "format", *(field.name for field in dataclasses.fields(Float8Recipe))}
    if unknown := sorted(saved.keys() - known):
        raise ValueError(f"quantization_config: {', '.join(unknown)} is not supported")
    try:
        return rest, Float8Recipe(saved.get("activation_scale", 1.0))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"quantization_config: {error}") from error


def written_settings(recipe: Float8Recipe) -> dict[str, Any]:
    """Returns the fields of config.json for a model that jaxft has quantized."""
    text = f"float8_e4m3fn kernels [F, K] as uint8, with scales [F], in {FILE}; for jaxft only"
    return {"quantization_config": {"quant_method": METHOD, "format": text, **dataclasses.asdict(recipe)}}
