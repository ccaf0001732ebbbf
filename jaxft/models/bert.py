"""BERT, RoBERTa and DistilBERT encoders as Flax NNX modules on the fused operations."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft.models import checkpoint
from jaxft.models.checkpoint import CheckpointError
from jaxft.ops.attention import qkv_attention
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.embeddings import embeddings_layer_norm

# --- Configuration -----------------------------------------------------------------------------------------------

_ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")

# Hugging Face's names of activations -> ours.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Smallest and largest values that are taken for meant. They are generous; what they keep out is a config.json whose
# sizes would exhaust the memory before anything else is noticed.
_LIMITS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**16),
    "num_hidden_layers": (1, 2**10),
    "num_attention_heads": (1, 2**16),
    "intermediate_size": (1, 2**18),
    "max_position_embeddings": (1, 2**20),
    "type_vocab_size": (0, 2**16),
    "pad_token_id": (0, 2**24),
}
_MAX_PARAMETERS = 2**36


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and options of an encoder, with Hugging Face's names; the defaults are BERT-base's.

    `model_type` is "bert", "roberta", "xlm-roberta", "camembert" or "distilbert". DistilBERT models use these names
    too (`hidden_size`, not `dim`); `from_dict` and `to_dict` translate. `from_dict({"model_type": "roberta"})` gives
    the defaults of another type. The dropout rates are kept for `to_dict`; the forward pass is deterministic.

    Raises:
      ValueError: values of a wrong type, impossible or beyond these limits, all of them at once: vocabulary 2**24,
        width 2**16, feed-forward width 2**18, 1024 layers, 2**20 positions, 2**16 token types, 2**36 parameters.
    """

    model_type: str = "bert"
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        if problems := _problems(dataclasses.asdict(self)):
            raise ValueError("BertConfig: " + "; ".join(problems))

    @property
    def position_offset(self) -> int:
        """The position of the first token: RoBERTa's come after the one that is reserved for padding."""
        return self.pad_token_id + 1 if self.model_type in _ROBERTA_TYPES else 0

    @property
    def activation(self) -> str:
        """`hidden_act` by the name that `jaxft.dense` has for it."""
        return _ACTIVATIONS[self.hidden_act]

    @property
    def max_sequence_length(self) -> int:
        """How many tokens a sequence can have."""
        return self.max_position_embeddings - self.position_offset

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """From the content of a Hugging Face `config.json`.

        A field that is absent or null has transformers' default for the model type; fields that do not concern the
        encoder are ignored.

        Raises:
          ValueError: as `BertConfig`, or the configuration is of a kind of model that this is not.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in checkpoint.LAYOUTS:
            raise ValueError(f"BertConfig: {_one_of('model_type', model_type, checkpoint.LAYOUTS)}")
        layout = checkpoint.LAYOUTS[model_type]
        values: dict[str, Any] = {**dataclasses.asdict(cls()), **layout.config_defaults}
        for name in values:
            given = config.get(layout.config_names.get(name, name))
            values[name] = values[name] if given is None else given
        problems = [
            f"{option} is {config[option]!r}; only encoders without it are supported"
            for option in ("is_decoder", "add_cross_attention")
            if config.get(option)
        ]
        if config.get("position_embedding_type") not in (None, "absolute"):
            problems.append(_one_of("position_embedding_type", config["position_embedding_type"], ["absolute"]))
        if problems := problems + _problems(values):
            raise ValueError("BertConfig: " + "; ".join(problems))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads."""
        layout = checkpoint.LAYOUTS[self.model_type]
        values = {layout.config_names.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        return values | {"architectures": [layout.architecture]}


def _one_of(name: str, value: Any, allowed: Any) -> str:
    return f"{name} must be one of {', '.join(allowed)}, got {value!r:.100}"


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with the fields of a BertConfig."""

    def is_number(value: Any) -> bool:
        # Finite also as a float: JSON has integers of any size.
        most = sys.float_info.max
        return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most

    def is_name(value: Any, names: Any) -> bool:
        return isinstance(value, str) and value in names

    if not is_name(values["model_type"], checkpoint.LAYOUTS):
        return [_one_of("model_type", values["model_type"], checkpoint.LAYOUTS)]
    names = checkpoint.LAYOUTS[values["model_type"]].config_names

    def show(name: str) -> str:
        return f"{name} ({names[name]})" if name in names else name

    problems = []
    if not is_name(values["hidden_act"], _ACTIVATIONS):
        problems.append(_one_of(show("hidden_act"), values["hidden_act"], _ACTIVATIONS))
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if not is_number(values[name]) or not 0 <= values[name] <= 1:
            problems.append(f"{show(name)} must be a number from 0 to 1, got {values[name]!r:.100}")
    if not is_number(values["initializer_range"]) or values["initializer_range"] < 0:
        given = values["initializer_range"]
        problems.append(f"initializer_range must be a finite number of at least 0, got {given!r:.100}")
    if not is_number(values["layer_norm_eps"]) or values["layer_norm_eps"] <= 0:
        problems.append(f"layer_norm_eps must be a finite number above 0, got {values['layer_norm_eps']!r:.100}")
    sizes_before = len(problems)
    for name, (least, most) in _LIMITS.items():
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            problems.append(f"{show(name)} must be an integer from {least} to {most}, got {value!r:.100}")
    if len(problems) > sizes_before:
        return problems  # the rest compares sizes

    width, inner, layers = values["hidden_size"], values["intermediate_size"], values["num_hidden_layers"]
    heads, positions, padding = values["num_attention_heads"], values["max_position_embeddings"], values["pad_token_id"]
    tables = values["vocab_size"] + positions + values["type_vocab_size"]
    parameters = width * (tables + width) + layers * width * (4 * width + 2 * inner)
    if parameters > _MAX_PARAMETERS:
        problems.append(f"the sizes make {parameters} parameters, at most {_MAX_PARAMETERS} are supported")
    if width % heads:
        problems.append(f"{show('hidden_size')} {width} is not divisible by {show('num_attention_heads')} {heads}")
    if padding >= values["vocab_size"]:
        problems.append(f"pad_token_id {padding} is not below vocab_size {values['vocab_size']}")
    if values["model_type"] in _ROBERTA_TYPES and positions <= padding + 1:
        problems.append(f"max_position_embeddings {positions} leaves no position after pad_token_id {padding}")
    if values["model_type"] == "distilbert" and (values["type_vocab_size"], values["layer_norm_eps"]) != (0, 1e-12):
        problems.append("of a DistilBERT model type_vocab_size must be 0 and layer_norm_eps 1e-12, as they are fixed")
    return problems


# --- Modules -----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BertOutput:
    """What `BertModel` returns; a pytree.

    Attributes:
      last_hidden_state: `[B, T, D]`, of the last layer.
      pooler_output: `[B, D]`, tanh of a dense layer on the first token; None for a model without pooler.
      hidden_states: `num_hidden_layers + 1` arrays `[B, T, D]`, the embeddings and each layer's; None if not asked for.
    """

    last_hidden_state: Array
    pooler_output: Array | None
    hidden_states: tuple[Array, ...] | None


@dataclasses.dataclass(frozen=True)
class _Options:
    """What all modules of a model share."""

    config: BertConfig
    dtype: np.dtype
    param_dtype: np.dtype
    implementation: str | None

    def normal(self, rngs: nnx.Rngs | None, *shape: int) -> nnx.Param[Any]:
        return self._parameter(rngs, jax.nn.initializers.normal(self.config.initializer_range), shape)

    def zeros(self, rngs: nnx.Rngs | None, size: int) -> nnx.Param[Any]:
        return self._parameter(rngs, jax.nn.initializers.zeros, (size,))

    def ones(self, rngs: nnx.Rngs | None, size: int) -> nnx.Param[Any]:
        return self._parameter(rngs, jax.nn.initializers.ones, (size,))

    def _parameter(self, rngs: nnx.Rngs | None, init: nnx.Initializer, shape: tuple[int, ...]) -> nnx.Param[Any]:
        if rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, self.param_dtype))
        return nnx.Param(init(rngs.params(), shape, self.param_dtype))


class BertEmbeddings(nnx.Module):
    """The sum of the word, position and token type embeddings, normalised."""

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options, config, width = options, options.config, options.config.hidden_size
        self.word = options.normal(rngs, config.vocab_size, width)
        self.position = options.normal(rngs, config.max_position_embeddings, width)
        if config.type_vocab_size:
            self.token_type = options.normal(rngs, config.type_vocab_size, width)
        self.norm_gamma, self.norm_beta = options.ones(rngs, width), options.zeros(rngs, width)

    def __call__(self, input_ids: Array, token_type_ids: Array | None, position_ids: Array | None) -> Array:
        config = self.options.config

        if position_ids is None and config.position_offset:
            kept = (input_ids != config.pad_token_id).astype(jnp.int32)
            position_ids = jnp.cumsum(kept, axis=1) * kept + config.pad_token_id
        # An id that is not in its table gives NaN: inside of jit nothing can be raised, and the nearest row, JAX's
        # default, would go unnoticed.
        return embeddings_layer_norm(
            input_ids,
            self.word[...],
            self.position[...],
            self.token_type[...] if config.type_vocab_size else None,
            self.norm_gamma[...],
            self.norm_beta[...],
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            epsilon=config.layer_norm_eps,
            dtype=self.options.dtype,
            implementation=self.options.implementation,
        )


class BertLayer(nnx.Module):
    """Self-attention and feed-forward network, each followed by a residual connection and LayerNorm.

    `qkv_kernel` is `[D, 3*D]`, its columns ordered as `[3, N, H]`, so that attention reads the product in place.
    """

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options = options
        width, inner = options.config.hidden_size, options.config.intermediate_size
        self.qkv_kernel, self.qkv_bias = options.normal(rngs, width, 3 * width), options.zeros(rngs, 3 * width)
        self.out_kernel, self.out_bias = options.normal(rngs, width, width), options.zeros(rngs, width)
        self.attention_norm_gamma, self.attention_norm_beta = options.ones(rngs, width), options.zeros(rngs, width)
        self.ffn_in_kernel, self.ffn_in_bias = options.normal(rngs, width, inner), options.zeros(rngs, inner)
        self.ffn_out_kernel, self.ffn_out_bias = options.normal(rngs, inner, width), options.zeros(rngs, width)
        self.ffn_norm_gamma, self.ffn_norm_beta = options.ones(rngs, width), options.zeros(rngs, width)

    def __call__(self, x: Array, mask: Array | None) -> Array:
        """`x` `[B, T, D]` and `mask` `[B, 1, 1, T]` of the keys -> `[B, T, D]`."""
        config, dtype, implementation = self.options.config, self.options.dtype, self.options.implementation
        batch, length, width = x.shape
        heads = config.num_attention_heads

        qkv = dense(x, self.qkv_kernel[...].astype(dtype), self.qkv_bias[...], implementation=implementation)
        qkv = qkv.reshape(batch, length, 3, heads, width // heads)
        attended = qkv_attention(qkv, mask=mask, implementation=implementation)
        options: dict[str, Any] = {"epsilon": config.layer_norm_eps, "implementation": implementation}
        kernel, bias = self.out_kernel[...].astype(dtype), self.out_bias[...]
        gamma, beta = self.attention_norm_gamma[...], self.attention_norm_beta[...]
        x = dense_residual_layer_norm(attended.reshape(x.shape), kernel, bias, x, gamma, beta, **options)
        kernel, bias = self.ffn_in_kernel[...].astype(dtype), self.ffn_in_bias[...]
        h = dense(x, kernel, bias, activation=config.activation, implementation=implementation)
        kernel, bias = self.ffn_out_kernel[...].astype(dtype), self.ffn_out_bias[...]
        gamma, beta = self.ffn_norm_gamma[...], self.ffn_norm_beta[...]
        return dense_residual_layer_norm(h, kernel, bias, x, gamma, beta, **options)


class BertPooler(nnx.Module):
    """tanh of a dense layer on the first token."""

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options, width = options, options.config.hidden_size
        self.kernel, self.bias = options.normal(rngs, width, width), options.zeros(rngs, width)

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...].astype(self.options.dtype)
        implementation = self.options.implementation
        return dense(x[:, 0], kernel, self.bias[...], activation="tanh", implementation=implementation)


class BertModel(nnx.Module):
    """A BERT, RoBERTa or DistilBERT encoder; on an NVIDIA GPU a layer runs as at most eight kernels.

    (In 16 bits on Hopper as seven. In float32, with about 1,000 tokens or fewer, XLA splits its products and adds the
    parts, which makes a few more.)

    Call it within `nnx.jit`, or get a pure function of parameters and inputs for `jax.jit`, `jax.grad` and the like::

        graph, params = nnx.split(model)

        @jax.jit
        def forward(params, input_ids, attention_mask):
            return nnx.merge(graph, params)(input_ids, attention_mask)

    Args:
      config: sizes and options.
      dtype: float32, float16 or bfloat16: the dtype of the computation and of the result. Statistics and sums within
        an operation are float32.
      param_dtype: the dtype in which parameters are kept; matrices are cast to `dtype` in the call.
      implementation: passed to every operation; None picks the fastest for the device, "xla" is plain JAX.
      add_pooling_layer: whether there is a pooler; DistilBERT never has one.
      rngs: random numbers for the initial parameters: `config.initializer_range` times a normal distribution,
        biases 0, LayerNorm's gamma 1. None gives parameters without values, only shapes, to be set.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        add_pooling_layer: bool = True,
        rngs: nnx.Rngs | None,
    ) -> None:
        self.config = config
        dtype, param_dtype = _float_dtype("dtype", dtype), _float_dtype("param_dtype", param_dtype)
        options = _Options(config, dtype, param_dtype, implementation)
        self.embeddings = BertEmbeddings(options, rngs)
        self.layers = nnx.List([BertLayer(options, rngs) for _ in range(config.num_hidden_layers)])
        has_pooler = add_pooling_layer and config.model_type != "distilbert"
        self.pooler = BertPooler(options, rngs) if has_pooler else None

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        output_hidden_states: bool = False,
    ) -> BertOutput:
        """Runs the encoder.

        Args:
          input_ids: `[B, T]` integers. An id outside of the vocabulary makes its sequence NaN.
          attention_mask: `[B, T]` integers or booleans, 0 for tokens that are not attended to (padding, but holes are
            fine too); None attends to all. The hidden states of masked tokens mean nothing.
          token_type_ids: `[B, T]` integers; None is all 0.
          position_ids: `[B, T]` integers; None counts from 0, in RoBERTa models from `pad_token_id + 1` and over the
            tokens that are not padding.
          output_hidden_states: whether to return the hidden states of all layers.

        Raises:
          TypeError: an input is no array of integers.
          ValueError: an input has a wrong shape or, in a list or NumPy array, an integer beyond int32, T is more than
            the model has positions, or `token_type_ids` are given to a model without token types.
        """
        input_ids = _ids("input_ids", input_ids, None)
        shape = input_ids.shape
        token_type_ids = None if token_type_ids is None else _ids("token_type_ids", token_type_ids, shape)
        position_ids = None if position_ids is None else _ids("position_ids", position_ids, shape)
        if token_type_ids is not None and not self.config.type_vocab_size:
            raise ValueError(f"BertModel: a {self.config.model_type} model without token types takes no token_type_ids")
        if position_ids is None and shape[1] > self.config.max_sequence_length:
            raise ValueError(
                f"BertModel: input_ids has {shape[1]} tokens a sequence, but the model has positions for at most "
                f"{self.config.max_sequence_length}"
            )
        mask = None
        if attention_mask is not None:
            keep = _ids("attention_mask", attention_mask, shape, or_bool=True).astype(jnp.bool)
            mask = keep[:, None, None, :]

        x = self.embeddings(input_ids, token_type_ids, position_ids)
        hidden_states = [x]
        for layer in self.layers:
            x = layer(x, mask)
            hidden_states.append(x)
        return BertOutput(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike | None = None,
        implementation: str | None = None,
    ) -> Self:
        """The encoder of a Hugging Face checkpoint of the types that `BertConfig` lists.

        Tensors of other heads are not read. A checkpoint without pooler gives a model without one.

        Args:
          folder_or_id: a folder with `config.json` and safetensors files, or the id of a model on Hugging Face.
          revision: branch, tag or commit, for an id.
          cache_dir: where downloads are kept; None is Hugging Face's default.
          local_files_only: use only what has been downloaded before.
          dtype, implementation: as for `BertModel`.
          param_dtype: the same, None for `dtype`.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used; all its problems at once.
          TypeError: `folder_or_id` is not a string or path.
        """
        param_dtype = dtype if param_dtype is None else param_dtype
        folder = checkpoint.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config_file = folder / "config.json"
        settings = checkpoint.read_json_object(config_file)
        try:
            config = BertConfig.from_dict(settings)
        except ValueError as error:
            raise CheckpointError(f"{config_file}: {error}") from error
        model = cls(config, dtype=dtype, param_dtype=param_dtype, implementation=implementation, rngs=None)
        shapes = {name: parameter.shape for name, parameter in model._parameters().items()}
        values = checkpoint.load(folder, config.model_type, shapes, param_dtype)
        if "pooler.kernel" not in values:
            model.pooler = None
        for name, parameter in model._parameters().items():
            parameter.set_value(values[name])
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which transformers reads too; existing ones are replaced."""
        checkpoint.save(folder, self.config.to_dict(), {name: p[...] for name, p in self._parameters().items()})

    def _parameters(self) -> dict[str, nnx.Param[Any]]:
        """By names such as "layers.0.out_bias"."""
        return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(self, nnx.Param))}


def _float_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f"BertModel: {name} must be float32, float16 or bfloat16, got {dtype}")
    return dtype


def _ids(name: str, value: Any, shape: tuple[int, ...] | None, *, or_bool: bool = False) -> Array:
    """`value` as an array, once its dtype and shape (None: two axes, of which the second is not empty) are right."""
    expected = f"BertModel: {name} must be integers{' or booleans' * or_bool}"
    try:
        if isinstance(value, list | tuple) and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
            value = np.asarray(value)
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{expected}, got {getattr(value, 'dtype', type(value).__name__)}") from error
    if not (jnp.issubdtype(array.dtype, jnp.integer) or (or_bool and array.dtype == jnp.bool)):
        raise TypeError(f"{expected}, got {array.dtype}")
    if isinstance(value, np.ndarray) and value.dtype != array.dtype and value.size:  # JAX lets numbers wrap around
        limits = jnp.iinfo(array.dtype)
        for extreme in (int(value.min()), int(value.max())):
            if not limits.min <= extreme <= limits.max:
                raise ValueError(f"BertModel: {name} must fit {array.dtype}, got {extreme}")
    if shape is None and (array.ndim != 2 or array.shape[1] == 0):
        raise ValueError(f"BertModel: {name} must have a shape [batch, tokens], tokens > 0, got {list(array.shape)}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"BertModel: {name} must have the shape of input_ids, {list(shape)}, got {list(array.shape)}")
    return array
