"""EmbeddingModel: an encoder, pooling and further modules, which compute the embeddings of sequences of tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jaxft import reference
from jaxft.dropout import dropout
from jaxft.models import inputs
from jaxft.models.bert import BertModel
from jaxft.models.dropout import module_keys
from jaxft.models.pooling import MODES, l2_normalize, pool, pool_packed
from jaxft.ops import checks

# Activations of `Dense` by the names of PyTorch's classes, with PyTorch's default arguments.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
    "Sigmoid": jax.nn.sigmoid,
    "LeakyReLU": jax.nn.leaky_relu,
    "ELU": jax.nn.elu,
    "CELU": jax.nn.celu,
    "SELU": jax.nn.selu,
    "ReLU6": jax.nn.relu6,
    "Hardtanh": jax.nn.hard_tanh,
    "Hardsigmoid": jax.nn.hard_sigmoid,
    "Hardswish": jax.nn.hard_silu,
    "Mish": jax.nn.mish,
    "Softplus": jax.nn.softplus,
    "Softsign": jax.nn.soft_sign,
    "LogSigmoid": jax.nn.log_sigmoid,
    "Tanhshrink": lambda x: x - jnp.tanh(x),
    "Hardshrink": lambda x: jnp.where(jnp.abs(x) > 0.5, x, 0),
    "Softshrink": lambda x: x - jnp.clip(x, -0.5, 0.5),
}


class Dense(nnx.Module):
    """Dense layer with an activation, the module Dense of sentence-transformers.

    Computes `activation(x @ kernel + bias)` in float32. With `use_residual` the result is added to `x`, or to
    `x @ residual_kernel` if `in_features` and `out_features` differ.

    Args:
      in_features: width of the input.
      out_features: width of the output.
      bias: whether the layer has a bias.
      activation: name of an activation of PyTorch, for example "Tanh" or "Identity".
      use_residual: whether to add the input.
      rngs: random numbers for the initial parameters, uniform in +-1 / sqrt(in_features). None creates parameters that
        have shapes only.

    Raises:
      TypeError: `bias` or `use_residual` is not a boolean, or `rngs` is not an `nnx.Rngs`.
      ValueError: a width is not a positive integer, the activation is unknown, or `rngs` has no stream for parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str = "Tanh",
        use_residual: bool = False,
        rngs: nnx.Rngs | None,
    ) -> None:
        self.in_features = checks.as_size("Dense", "in_features", in_features, positive=True)
        self.out_features = checks.as_size("Dense", "out_features", out_features, positive=True)
        checks.check_flag("Dense", "bias", bias)
        checks.check_flag("Dense", "use_residual", use_residual)
        inputs.check_initial("Dense", rngs)
        if activation not in ACTIVATIONS:
            raise ValueError(f"Dense: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation, self.use_residual = activation, bool(use_residual)

        def parameter(*shape: int) -> nnx.Param[Any]:
            if rngs is None:
                return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))
            bound = self.in_features**-0.5
            return nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))

        self.kernel = parameter(in_features, out_features)
        self.bias = parameter(out_features) if bias else None
        is_projected = use_residual and in_features != out_features
        self.residual_kernel = parameter(in_features, out_features) if is_projected else None

    def __call__(self, x: Array, dropout_rng: Array | None = None) -> Array:
        """Computes float32 `[..., out_features]` from `[..., in_features]`."""
        y = x @ self.kernel[...].astype(x.dtype)
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...], range(x.ndim - 1))
        y = ACTIVATIONS[self.activation](y)
        if not self.use_residual:
            return y
        return y + (x if self.residual_kernel is None else x @ self.residual_kernel[...].astype(x.dtype))


class LayerNorm(nnx.Module):
    """LayerNorm with an epsilon of 1e-5, the module LayerNorm of sentence-transformers.

    Args:
      dimension: width of the input.

    Raises:
      ValueError: `dimension` is not a positive integer.
    """

    def __init__(self, dimension: int) -> None:
        self.in_features = self.out_features = checks.as_size("LayerNorm", "dimension", dimension, positive=True)
        self.gamma, self.beta = nnx.Param(jnp.ones(dimension)), nnx.Param(jnp.zeros(dimension))

    def __call__(self, x: Array, dropout_rng: Array | None = None) -> Array:
        """Normalises `[..., dimension]` over the last axis."""
        return reference.layer_norm(x, self.gamma[...], self.beta[...], epsilon=1e-5)


class Dropout(nnx.Module):
    """Dropout in training, the module Dropout of sentence-transformers.

    Args:
      dropout: probability that an element is dropped.

    Raises:
      ValueError: `dropout` is not a number from 0 to 1.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ValueError(f"Dropout: dropout must be a number from 0 to 1, got {dropout!r:.80}")
        self.rate = float(dropout)

    def __call__(self, x: Array, dropout_rng: Array | None = None) -> Array:
        """Drops elements of `x` if there is a random key."""
        return dropout(x, self.rate, dropout_rng)


class Normalize(nnx.Module):
    """Scaling to length 1, the module Normalize of sentence-transformers."""

    def __call__(self, x: Array, dropout_rng: Array | None = None) -> Array:
        """Divides `[..., D]` by its L2 norm along the last axis, or by 1e-12 if the norm is smaller."""
        return l2_normalize(x)


Module = Dense | LayerNorm | Dropout | Normalize


class EmbeddingModel(nnx.Module):
    """An encoder, pooling and further modules: computes embeddings of sequences of tokens, and can be trained.

    A new model has no dropout. `model.train()` turns on the dropout of the encoder and of Dropout modules, and
    `model.eval()` turns it off, as for `BertModel`.

    Args:
      encoder: the encoder.
      pooling: one or more of "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean" and "lasttoken". The results
        of several modes are concatenated in the given order.
      include_prompt: whether the tokens of a prompt take part in the pooling.
      token_modules: `Dense` and `Normalize` modules that are applied to the hidden state of each token before pooling.
      modules: `Dense`, `LayerNorm`, `Dropout` and `Normalize` modules that are applied to the pooled vectors, in order.

    Attributes:
      encoder: the encoder.
      pooling: tuple of the pooling modes.
      include_prompt: as the argument.
      token_modules: as the argument, an `nnx.List`.
      modules: as the argument, an `nnx.List`.

    Raises:
      TypeError: a module has another type, or `include_prompt` is not a boolean.
      ValueError: a pooling mode is unknown, or a module takes another width than the module before gives.
    """

    def __init__(
        self,
        encoder: BertModel,
        *,
        pooling: str | Sequence[str] = ("mean",),
        include_prompt: bool = True,
        token_modules: Sequence[Module] = (),
        modules: Sequence[Module] = (),
    ) -> None:
        checks.check_flag("EmbeddingModel", "include_prompt", include_prompt)
        self.pooling = (pooling,) if isinstance(pooling, str) else tuple(pooling)
        if not self.pooling or any(mode not in MODES for mode in self.pooling):
            raise ValueError(f"EmbeddingModel: pooling must name some of {MODES}, got {self.pooling}")
        self.encoder, self.include_prompt = encoder, bool(include_prompt)
        self.token_modules, self.modules = nnx.List([*token_modules]), nnx.List([*modules])
        width = encoder.config.hidden_size
        width = check_modules("EmbeddingModel", "token_modules", Dense | Normalize, token_modules, width)
        width *= len(self.pooling)
        self.embedding_dimension = check_modules("EmbeddingModel", "modules", Module, modules, width)

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        prompt_lengths: ArrayLike | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> Array:
        """Computes the embeddings of a padded batch or, with `cu_seqlens`, of packed sequences.

        Args:
          input_ids: as for `BertModel`.
          attention_mask: as for `BertModel`. Tokens with 0 take no part in the pooling either.
          token_type_ids: as for `BertModel`.
          position_ids: as for `BertModel`.
          cu_seqlens: as for `BertModel`.
          max_seqlen: as for `BertModel`.
          prompt_lengths: number of tokens of the prompt at the start of each sequence, special tokens before it
            included: integers `[B]`, or one integer for all sequences. They take no part in the pooling if
            `include_prompt` is False. Otherwise `prompt_lengths` has no effect.
          deterministic: as for `BertModel`.
          rngs: as for `BertModel`. Dropout modules get keys of their own.

        Returns:
          float32 `[B, embedding_dimension]`. A sequence without tokens has the vector 0 after the pooling.

        Raises:
          TypeError: as for `BertModel`.
          ValueError: as for `BertModel`, or `prompt_lengths` has a wrong shape.
        """
        return self.with_tokens(
            input_ids, attention_mask, token_type_ids, position_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            prompt_lengths=prompt_lengths, deterministic=deterministic, rngs=rngs,
        )[1]  # fmt: skip

    def with_tokens(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        *ids: ArrayLike | None,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        prompt_lengths: ArrayLike | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the token embeddings, float32 `[B, T, D]` or packed `[M, D]`, and the result of `__call__`.

        The arguments are the arguments of `__call__`.
        """
        rates = {f"rate of modules[{i}]": m.rate for i, m in enumerate(self.modules) if isinstance(m, Dropout)}
        key = self.encoder._dropout_key(deterministic, rngs, **rates)
        tokens = self.encoder(
            input_ids, attention_mask, *ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, deterministic=key is None,
            rngs=key,
        ).last_hidden_state.astype(jnp.float32)  # fmt: skip
        for module in self.token_modules:
            tokens = module(tokens)
        lengths = None
        if prompt_lengths is not None and not self.include_prompt:
            lengths = inputs.as_ids("EmbeddingModel", "prompt_lengths", prompt_lengths)
        if cu_seqlens is not None and max_seqlen is not None:
            starts = inputs.as_ids("EmbeddingModel", "cu_seqlens", cu_seqlens)
            _check_lengths(lengths, starts.size - 1)
            x = pool_packed(tokens, starts, self.pooling, max_seqlen, lengths)
        else:
            mask = jnp.ones_like(tokens[:, :, 0], jnp.bool)
            if attention_mask is not None:
                mask = inputs.as_ids("EmbeddingModel", "attention_mask", attention_mask, or_bool=True).astype(jnp.bool)
            _check_lengths(lengths, tokens.shape[0])
            x = pool(tokens, mask, self.pooling, lengths)
        keys = [None] * len(self.modules) if key is None else module_keys(key, len(self.modules))
        for module, of_module in zip(self.modules, keys, strict=True):
            x = module(x, of_module)
        return tokens, x


def check_modules(owner: str, name: str, kinds: Any, modules: Sequence[Module], width: int) -> int:
    """Returns the width after the modules. Raises if a module is of another kind or takes another width."""
    for index, module in enumerate(modules):
        if not isinstance(module, kinds):
            expected = ", ".join(kind.__name__ for kind in kinds.__args__)
            raise TypeError(f"{owner}: {name}[{index}] must be one of {expected}, got {type(module).__name__}")
        if isinstance(module, Dense | LayerNorm):
            if module.in_features != width:
                raise ValueError(
                    f"{owner}: {name}[{index}], a {type(module).__name__} module, takes vectors of"
                    f" {module.in_features} components, but gets {width}"
                )
            width = module.out_features
    return width


def _check_lengths(lengths: Array | None, batch: int) -> None:
    if lengths is not None and lengths.shape not in ((), (batch,)):
        raise ValueError(
            f"EmbeddingModel: prompt_lengths must be an integer or have the shape [{batch}], got {list(lengths.shape)}"
        )
