"""Encoders as Flax NNX modules, built from the fused operations: BERT and its successors (see `BertConfig`)."""

import dataclasses
import functools
import logging
import os
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxft import dispatch, reference
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.dropout import dropout as drop
from jaxft.models import dropout, inputs
from jaxft.models.config import BertConfig
from jaxft.models.float8 import (
    FILE,
    Float8Recipe,
    check_dtype,
    check_load_options,
    load_options,
    read_settings,
    written_settings,
)
from jaxft.models.pooling import first_tokens, packed_rows_of, sequence_rows
from jaxft.models.positions import alibi_table, bucket_table, disentangled_attention
from jaxft.ops import checks, float8, matrix_view
from jaxft.ops.attention import qkv_attention, varlen_qkv_attention
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.dense_rotary import dense_rotary
from jaxft.ops.embeddings import embeddings_layer_norm
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm
from jaxft.ops.layer_norm import layer_norm
from jaxft.ops.matrix_view import MatrixView
from jaxft.ops.rotary import rotary

_log = logging.getLogger("jaxft")
_NO_TRAINING = "BertModel: a model in float8 cannot be trained; train in 16 or 32 bits, then quantize"
_KERNELS = "qkv", "out", "ffn_in", "ffn_out"  # of a layer, in the order of their use
# Types whose encoder has no pooler in transformers.
_WITHOUT_POOLER = ("distilbert", "modernbert", "deberta-v2", "electra")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BertOutput:
    """Result of `BertModel`; a pytree.

    Attributes:
      last_hidden_state: hidden states of the last layer, `[B, T, D]`, or `[M, D]` for packed sequences.
      pooler_output: `[B, D]`, tanh of a dense layer on the first token. None if the model has no pooler.
      hidden_states: `num_hidden_layers + 1` arrays of the shape of `last_hidden_state`: the output of the embeddings,
        then the output of each layer. None unless the call has `output_hidden_states`.
    """

    last_hidden_state: Array
    pooler_output: Array | None
    hidden_states: tuple[Array, ...] | None


@dataclasses.dataclass(frozen=True)
class _Options:
    """Options that all modules of a model share."""

    config: BertConfig
    dtype: np.dtype
    param_dtype: np.dtype
    implementation: str | None

    def dense(
        self, x: Array, kernel: nnx.Param[Any], bias: nnx.Param[Any] | None, activation: str | None = None
    ) -> Array:
        """Computes a dense layer in `dtype`."""
        matrix = kernel[...].astype(self.dtype)
        return dense(x, matrix, value(bias), activation=activation, implementation=self.implementation)

    def norm(
        self, rngs: nnx.Rngs | None, width: int, *, exists: bool = True
    ) -> tuple[nnx.Param[Any] | None, nnx.Param[Any] | None]:
        """Creates gamma and beta of a LayerNorm, or None for what does not exist."""
        gamma = self.ones(rngs, width) if exists else None
        return gamma, self.zeros(rngs, width) if exists and self.config.norm_bias else None

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


def value(parameter: nnx.Param[Any] | None) -> Array | None:
    """Returns the array of a parameter that may be absent."""
    return None if parameter is None else parameter[...]


class BertEmbeddings(nnx.Module):
    """Sum of the embeddings of words, positions and token types, LayerNorm, and a projection to the hidden size."""

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options, config, width = options, options.config, options.config.width_of_tables
        self.word = options.normal(rngs, config.vocab_size, width)
        if config.positions == "learned":
            self.position = options.normal(rngs, config.max_position_embeddings, width)
        if config.type_vocab_size:
            self.token_type = options.normal(rngs, config.type_vocab_size, width)
        self.norm_gamma, self.norm_beta = options.norm(rngs, width)
        projects = width != config.hidden_size or config.shared_layers
        self.projection_kernel = options.normal(rngs, width, config.hidden_size) if projects else None
        self.projection_bias = options.zeros(rngs, config.hidden_size) if projects else None

    def __call__(
        self,
        input_ids: Array,
        token_type_ids: Array | None,
        position_ids: Array | None,
        *,
        cu_seqlens: Array | None = None,
        max_seqlen: int = 0,
        dropout_rng: Array | None = None,
    ) -> Array:
        """Computes `[B, T, D]` from ids `[B, T]`, or `[M, D]` from packed ids `[M]`. `dropout_rng` turns dropout on."""
        config = self.options.config

        if position_ids is None and cu_seqlens is not None:
            position_ids = _packed_positions(config, input_ids, cu_seqlens, max_seqlen)
        elif position_ids is None and config.position_offset:
            kept = (input_ids != config.pad_token_id).astype(jnp.int32)
            position_ids = jnp.cumsum(kept, axis=1) * kept + config.pad_token_id
        if config.positions == "learned":
            table = self.position[...]
        else:  # a row of zeros; -1, the positions of wrong `cu_seqlens`, still gives NaN
            table = jnp.zeros((1, config.width_of_tables), self.options.param_dtype)
            position_ids = jnp.zeros_like(input_ids) if position_ids is None else jnp.minimum(position_ids, 0)
        # An id outside its table gives NaN. Nothing can be raised inside jit, and JAX's default, the nearest row, would
        # hide the error.
        x = embeddings_layer_norm(
            input_ids,
            self.word[...],
            table,
            self.token_type[...] if config.type_vocab_size else None,
            value(self.norm_gamma),
            value(self.norm_beta),
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            epsilon=config.layer_norm_eps,
            dtype=self.options.dtype,
            implementation=self.options.implementation,
            **dropout.options(config.hidden_dropout_prob, dropout_rng),
        )
        if self.projection_kernel is None:
            return x
        return self.options.dense(x, self.projection_kernel, self.projection_bias)


def packed_rows(rows: int, cu_seqlens: Array, max_seqlen: int) -> tuple[Array, Array, Array]:
    """Returns, for each of M packed rows, the first row of its sequence, its position there, and whether it is used."""
    row = jnp.arange(rows, dtype=jnp.int32)
    # A single reduction, so that XLA does not store the comparisons [M, B + 1].
    start = jnp.max(jnp.where(cu_seqlens[None] <= row[:, None], cu_seqlens[None], 0), axis=1)
    position = row - start
    return start, position, (row < cu_seqlens[-1]) & (position < max_seqlen)


def _packed_positions(config: BertConfig, input_ids: Array, cu_seqlens: Array, max_seqlen: int) -> Array:
    """Returns the position ids `[M]` that each packed sequence would have on its own. Unused rows get 0."""
    start, position, takes_part = packed_rows(input_ids.size, cu_seqlens, max_seqlen)
    if config.position_offset:
        kept = (input_ids != config.pad_token_id).astype(jnp.int32)
        count = jnp.cumsum(kept)
        position = (count - (count - kept)[start]) * kept + config.pad_token_id
    lengths = jnp.diff(cu_seqlens)
    # Wrong `cu_seqlens` make all ids -1. No table has a row -1, so the result is NaN.
    right = jnp.all((lengths >= 0) & (lengths <= max_seqlen)) & (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= start.size)
    return jnp.where(right, jnp.where(takes_part, position, 0), -1)


_Norm = tuple[Array | None, Array | None]  # gamma and beta


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Places of the tokens, for the attention of a layer.

    Attributes:
      mask: boolean `[B, 1, 1, T]`, or None.
      cu_seqlens: int32 `[B + 1]` of packed sequences, or None.
      positions: of rotary angles, int32 `[T]`, `[B, T]` or packed `[M]`, or None.
      bias: table of attention's bias by relative position, `[N, 2R+1]`, or None.
      relative: DeBERTa's embeddings of relative positions, `[2 * R, D]`, or None.
      max_seqlen: upper bound on the lengths of packed sequences.
      window: number of tokens on each side that a token attends to, or None for all.
      theta: base of the rotary angles.
    """

    mask: Array | None = None
    cu_seqlens: Array | None = None
    positions: Array | None = None
    bias: Array | None = None
    relative: Array | None = None
    max_seqlen: int = dataclasses.field(default=0, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    theta: float = dataclasses.field(default=0.0, metadata={"static": True})


class BertLayer(nnx.Module):
    """Self-attention and a feed-forward network, each with a residual connection and a LayerNorm.

    The LayerNorms follow the additions in all kinds of encoders. Where norms come first (`norm_first`), each of them
    belongs to what follows it: `__call__` gets the two norms that follow, and the residual is the sum before the norm.
    """

    def __init__(self, options: _Options, rngs: nnx.Rngs | None, *, first: bool = True) -> None:
        self.options, config = options, options.config
        width, inner = config.hidden_size, config.intermediate_size

        def bias(has: bool, size: int) -> nnx.Param[Any] | None:
            return options.zeros(rngs, size) if has else None

        # Columns in the order [3, N, H]: attention reads the result of the matmul in place.
        self.qkv_kernel, self.qkv_bias = options.normal(rngs, width, 3 * width), bias(config.qkv_bias, 3 * width)
        self.out_kernel, self.out_bias = options.normal(rngs, width, width), bias(config.out_bias, width)
        # Where norms come first, the norm of the embeddings is the first layer's.
        has_own = not (config.norm_first and first)
        self.attention_norm_gamma, self.attention_norm_beta = options.norm(rngs, width, exists=has_own)
        columns = inner if config.activated_half is None else 2 * inner
        self.ffn_in_kernel = options.normal(rngs, width, columns)
        self.ffn_in_bias = bias(config.ffn_in_bias, columns)
        self.ffn_out_kernel, self.ffn_out_bias = options.normal(rngs, inner, width), bias(config.ffn_out_bias, width)
        self.ffn_norm_gamma, self.ffn_norm_beta = options.norm(rngs, width)
        self.recipe: Float8Recipe | None = None  # of a layer in float8, which also has the scales of its kernels
        self.has_next = False
        self.views: tuple[tuple[int, tuple[int, int]], ...] = ()  # first row and shape of each of the joined kernels

    def unlike_bert(self) -> str | None:
        """Returns why the layer is not built like BERT's (its order of norms, gate or attention), or None.

        Sizes, biases and positions may differ.
        """
        config = self.options.config
        if config.norm_first:
            return "norms come before attention"
        if config.activated_half is not None:
            return "its feed-forward network is gated"
        if config.positions == "disentangled":
            return "its attention is disentangled"
        return None

    def not_in_float8(self) -> str | None:
        """Returns the reason why `quantize` leaves the layer in 16 bits, or None."""
        if reason := self.unlike_bert():
            return reason
        config = self.options.config
        for name in ("hidden_size", "intermediate_size"):
            if getattr(config, name) % 128:
                return f"{name} {getattr(config, name)} is not a multiple of 128"
        return None

    def quantize(self, recipe: Float8Recipe, *, has_next: bool) -> None:
        """Rounds the kernels to float8, stored as `[F, K]`. With `has_next`, a layer in float8 comes next."""
        self.recipe, self.has_next = recipe, has_next
        for name in _KERNELS:
            kernel, _ = matrix_view.split(self.stored_kernel(name))
            run: Any = functools.partial(jax.eval_shape, recipe.kernel) if _is_shape(kernel) else recipe.kernel
            for suffix, array in zip(("kernel", "scale"), run(kernel), strict=True):
                setattr(self, f"{name}_{suffix}", nnx.Param(array))
        if self.views:
            self.views = ()
            del self.kernels

    def join_kernels(self) -> None:
        """Replaces the four kernels by one array, see `jaxft.models.join_kernels`."""
        kernels = [] if self.views else [getattr(self, f"{name}_kernel").get_value() for name in _KERNELS]
        problem = None
        if self.views:
            problem = "are joined already"
        elif self.recipe is not None:
            problem = "are in float8"
        elif any(map(_is_shape, kernels)):
            problem = "have no values yet"
        elif len({x.dtype for x in kernels}) > 1:
            problem = "have several dtypes"
        elif any(isinstance(x, jax.core.Tracer) for x in kernels):
            problem = "are traced: join them outside of jax.jit"
        elif any(isinstance(x, Array) and len(x.sharding.device_set) > 1 for x in kernels):
            problem = "are on several devices"
        if problem is not None:
            raise ValueError(f"join_kernels: the kernels of the model {problem}")
        # On the host: XLA would compile a program for it on the device.
        views = matrix_view.join(jax.device_get(kernels))
        is_committed = isinstance(kernels[0], Array) and kernels[0].committed
        joined = jax.device_put(views[0].joined, kernels[0].device if is_committed else None)
        self.kernels, self.views = nnx.Param(joined), tuple((view.first, view.shape) for view in views)
        for name in _KERNELS:
            delattr(self, f"{name}_kernel")

    def stored_kernel(self, name: str) -> Any:
        """Returns the kernel "qkv", "out", "ffn_in" or "ffn_out" in its own dtype: an array, or a view of one."""
        if not self.views:
            return getattr(self, f"{name}_kernel").get_value()
        return MatrixView(self.kernels.get_value(), *self.views[_KERNELS.index(name)])

    def _kernel(self, name: str, dtype: DTypeLike) -> Any:
        return self.stored_kernel(name).astype(dtype)

    def _scale(self, name: str) -> Array:
        return getattr(self, f"{name}_scale")[...]

    def attention_norm(self) -> _Norm:
        """Returns gamma and beta of the norm of attention."""
        return value(self.attention_norm_gamma), value(self.attention_norm_beta)

    def ffn_norm(self) -> _Norm:
        """Returns gamma and beta of the norm of the feed-forward network."""
        return value(self.ffn_norm_gamma), value(self.ffn_norm_beta)

    def __call__(self, x: Array, mask: Array | None = None, *, dropout_rng: Array | None = None) -> Array:
        """Applies a layer of BERT to `[B, T, D]`, with a mask `[B, 1, 1, T]`. Three random keys turn dropout on."""
        x, residual = self.step(x, x, Places(mask), (self.attention_norm(), self.ffn_norm()), dropout_rng)
        return residual if float8.is_float8(x) else x

    def step(
        self, x: Array, residual: Array, places: Places, norms: tuple[_Norm, _Norm], dropout_rng: Array | None = None
    ) -> tuple[Array, Array]:
        """Applies the layer to `[B, T, D]`, or to packed `[M, D]`.

        Args:
          x: the input of attention.
          residual: the first residual: `x` itself, or the sum before the norm where norms come first.
          places: the places of the tokens.
          norms: gamma and beta of the norms after attention and after the feed-forward network.
          dropout_rng: three random keys, which turn dropout on.

        Returns:
          The pair (x, residual) of the next layer. If this layer and the next one are in float8, x is float8.
        """
        if self.recipe is not None:
            return self._float8_step(x, residual, places, norms, self.recipe.activation_scale)
        config = self.options.config
        of_probabilities, of_attention, of_ffn = (None, None, None) if dropout_rng is None else dropout_rng
        if config.model_type == "distilbert":  # it has no dropout there
            of_attention = None
        if config.model_type == "albert":  # nor here
            of_ffn = None
        rate = config.hidden_dropout_prob

        attended = self._attend(x, places, dropout.options(config.attention_probs_dropout_prob, of_probabilities))
        gamma, beta = norms[0]
        out = dense_residual_layer_norm(
            attended, self._kernel("out", x.dtype), value(self.out_bias), residual, gamma, beta,
            epsilon=config.layer_norm_eps, return_sum=config.norm_first, implementation=self.options.implementation,
            **dropout.options(rate, of_attention),
        )  # fmt: skip
        x, residual = out if config.norm_first else (out, out)
        gamma, beta = norms[1]
        if config.model_type == "gte" and of_ffn is not None:  # the gated activation has dropout too
            inner = dense(
                x, self._kernel("ffn_in", x.dtype), value(self.ffn_in_bias), activation=config.activation,
                gate=config.activated_half, implementation=self.options.implementation,
            )  # fmt: skip
            out = dense_residual_layer_norm(
                drop(inner, rate, jax.random.fold_in(of_ffn, 0)), self._kernel("ffn_out", x.dtype),
                value(self.ffn_out_bias), residual, gamma, beta, epsilon=config.layer_norm_eps,
                implementation=self.options.implementation, **dropout.options(rate, of_ffn),
            )  # fmt: skip
            return out, out
        out = feed_forward_residual_layer_norm(
            x, self._kernel("ffn_in", x.dtype), value(self.ffn_in_bias),
            self._kernel("ffn_out", x.dtype), value(self.ffn_out_bias), gamma, beta,
            activation=config.activation, gate=config.activated_half, epsilon=config.layer_norm_eps,
            residual=residual if config.norm_first else None, return_sum=config.norm_first,
            implementation=self.options.implementation, **dropout.options(rate, of_ffn),
        )  # fmt: skip
        return out if config.norm_first else (out, out)

    def _float8_step(
        self, x: Array, residual: Array, places: Places, norms: tuple[_Norm, _Norm], scale: float
    ) -> tuple[Array, Array]:
        """Computes `step` with matmuls of float8. Each kernel writes the float8 input of the next one."""
        config, implementation = self.options.config, self.options.implementation
        if not float8.is_float8(x):  # the output of the embeddings
            x = reference.to_float8(reference.wide(x), scale)
        options: dict[str, Any] = {
            "x_scale": scale, "epsilon": config.layer_norm_eps, "implementation": implementation
        }  # fmt: skip
        attended = self._attend(x, places, {"float8_scale": scale})
        gamma, beta = norms[0]
        residual, x = dense_residual_layer_norm(
            attended, self.out_kernel[...].T, value(self.out_bias), residual, gamma, beta,
            kernel_scale=self._scale("out"), float8_scale=scale, **options,
        )  # fmt: skip
        gamma, beta = norms[1]
        out = feed_forward_residual_layer_norm(
            x, self.ffn_in_kernel[...].T, value(self.ffn_in_bias), self.ffn_out_kernel[...].T,
            value(self.ffn_out_bias), gamma, beta, activation=config.activation, residual=residual,
            in_kernel_scale=self._scale("ffn_in"), out_kernel_scale=self._scale("ffn_out"), inner_scale=scale,
            float8_scale=scale if self.has_next else None, **options,
        )  # fmt: skip
        residual, x = out if self.has_next else (out, out)
        return x, residual

    def _qkv(self, x: Array) -> Array:
        if self.recipe is None:
            kernel, bias = self._kernel("qkv", self.options.dtype), value(self.qkv_bias)
            if self.views:
                return dense(x, kernel, bias, implementation=self.options.implementation)
            # In three parts, so that devices can divide the heads.
            parts = 3, kernel.shape[1] // 3
            return dense(
                x, kernel.reshape(-1, *parts), None if bias is None else bias.reshape(parts),
                implementation=self.options.implementation,
            )  # fmt: skip
        return dense(
            x, self.qkv_kernel[...].T, value(self.qkv_bias), kernel_scale=self._scale("qkv"),
            x_scale=self.recipe.activation_scale, dtype=self.options.dtype, implementation=self.options.implementation,
        )  # fmt: skip

    def _attend(self, x: Array, places: Places, options: dict[str, Any]) -> Array:
        heads = self.options.config.num_attention_heads
        size = self.options.config.hidden_size // heads
        rotation: dict[str, Any] = {
            "frequency_scale": self.options.config.rope_factor ** (-2 / size),  # NTK scaling
            "implementation": self.options.implementation,
        }
        if places.positions is not None and self.recipe is None:
            qkv = dense_rotary(
                x, self._kernel("qkv", x.dtype), value(self.qkv_bias), places.positions, places.theta,
                num_heads=heads, **rotation,
            )  # fmt: skip
        else:
            qkv = self._qkv(x).reshape(*x.shape[:-1], 3, heads, size)
            if places.positions is not None:
                qkv = rotary(qkv, places.positions, places.theta, in_place=True, **rotation)
        starts, length = places.cu_seqlens, places.max_seqlen
        if places.relative is None:
            options |= {"relative_bias": places.bias, "implementation": self.options.implementation}
            if places.window is not None:
                options |= {"local_window_size": places.window}
            if starts is None:
                return qkv_attention(qkv, None, places.mask, **options).reshape(x.shape)
            return varlen_qkv_attention(qkv, starts, max_seqlen=length, **options).reshape(x.shape)
        if starts is None:
            return self._attend_disentangled(qkv, places.relative, places.mask, options).reshape(x.shape)
        # DeBERTa's attention, and nothing else, gets padded sequences.
        padded = sequence_rows(qkv.reshape(x.shape[0], -1), starts, length)
        used = jnp.arange(length, dtype=jnp.int32)[None] < jnp.diff(starts)[:, None]
        padded = padded.reshape(*used.shape, *qkv.shape[1:])
        attended = self._attend_disentangled(padded, places.relative, used[:, None, None, :], options)
        return packed_rows_of(attended.reshape(*used.shape, -1), starts, x.shape[0])

    def _attend_disentangled(
        self, qkv: Array, relative: Array, mask: Array | None, options: dict[str, Any]
    ) -> Array:  # fmt: skip
        """Computes DeBERTa's attention of `qkv` `[B, T, 3, N, H]` and the embeddings of relative positions."""
        config = self.options.config
        two = 2 * config.hidden_size
        kernel, _ = matrix_view.split(self.stored_kernel("qkv"))
        matrix, bias = kernel[:, :two].astype(qkv.dtype), value(self.qkv_bias)
        bias = None if bias is None else bias[:two]
        key = options.get("dropout_rng")
        key = None if key is None else jax.random.fold_in(key, 0)
        embeddings = drop(relative, config.hidden_dropout_prob, key)
        relative = dense(embeddings, matrix, bias, implementation=self.options.implementation)
        return disentangled_attention(
            qkv, relative.reshape(-1, 2, *qkv.shape[-2:]), mask, config.position_buckets,
            config.max_relative_positions, options.get("dropout_rate", 0.0), options.get("dropout_rng"),
        )  # fmt: skip


def run_layer(layer: BertLayer, *args: Any, remat: bool) -> tuple[Array, Array]:
    """Returns `layer.step(*args)`. With `remat`, the backward pass recomputes the layer from its input."""
    if not remat:
        return layer.step(*args)
    # Not nnx.remat: it writes parameters back, which is an error in a scan whose body closes over them.
    graph, params = nnx.split(layer)
    return jax.checkpoint(lambda params, *args: nnx.merge(graph, params).step(*args))(params, *args)


class BertPooler(nnx.Module):
    """Dense layer with tanh on the first token."""

    def __init__(self, options: _Options, rngs: nnx.Rngs | None) -> None:
        self.options, width = options, options.config.hidden_size
        self.kernel, self.bias = options.normal(rngs, width, width), options.zeros(rngs, width)

    def __call__(self, x: Array, cu_seqlens: Array | None = None) -> Array:
        """Computes `[B, D]` from `x` `[B, T, D]`, or from packed `x` `[M, D]` and `cu_seqlens`."""
        return self.options.dense(first_tokens(x, cu_seqlens), self.kernel, self.bias, "tanh")


class BertModel(nnx.Module):
    """A BERT encoder, or one of its successors: RoBERTa, MPNet, ModernBERT and others that `BertConfig` lists.

    Call the model inside `nnx.jit`. For `jax.jit`, `jax.grad` and other transformations of JAX, make a pure function of
    parameters and inputs. The pure function costs the host much less per call, because `nnx.jit` walks the module in
    every call::

        arrays, rebuild = jaxft.bundle(model)

        @jax.jit
        def forward(arrays, input_ids, attention_mask):
            return rebuild(arrays)(input_ids, attention_mask)

    A new model has no dropout, and neither has a model from a checkpoint. `model.train()` turns dropout on at the rates
    of `config`: on the embeddings, on the attention probabilities, and on the two outputs of each layer (the attention
    output, except in DistilBERT, and the feed-forward output). `model.eval()` turns dropout off again. Random keys come
    with each call (`rngs`), so a module has no state but its parameters. The dropout mask depends only on the key of
    the call, the layer, the place in the layer and the index of the element, not on `implementation` or `remat`. The
    mask is not stored for the backward pass.

    Args:
      config: sizes and options of the encoder.
      dtype: dtype of the computation and of the result: float32, float16 or bfloat16. Statistics and sums inside an
        operation are float32.
      param_dtype: dtype of the stored parameters: float32, float16 or bfloat16. Each call casts matrices to `dtype`.
      implementation: passed to every operation. None picks the fastest for the device; "xla" is plain JAX.
      add_pooling_layer: whether the model has a pooler. DistilBERT, ModernBERT, DeBERTa and ELECTRA never have one.
      remat: whether the backward pass recomputes each layer from its input, the only thing that the forward pass then
        stores of it. Gradients and dropout do not change. On GPUs, training takes much less memory and about a third
        more time. On CPUs, XLA's compiler undoes the recomputation.
      rngs: random numbers for the initial parameters: `config.initializer_range` times a standard normal distribution
        for matrices and tables, 0 for biases, 1 for LayerNorm's gamma. None creates parameters that have shapes only;
        the caller sets their values later.

    Attributes:
      deterministic: whether calls run without dropout. `train()` and `eval()` set it.
      recipe: the `jaxft.models.Float8Recipe` of a model in float8, else None.

    Raises:
      TypeError: `config` is not a `BertConfig`, `remat` or `add_pooling_layer` is not a boolean, or `rngs` is not an
        `nnx.Rngs`.
      ValueError: `dtype`, `param_dtype` or `implementation` is not supported, or `rngs` has no stream for parameters.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        add_pooling_layer: bool = True,
        remat: bool = False,
        rngs: nnx.Rngs | None,
    ) -> None:
        if not isinstance(config, BertConfig):
            raise TypeError(f"BertModel: config must be a BertConfig, got {type(config).__name__}")
        checks.check_flag("BertModel", "remat", remat)
        checks.check_flag("BertModel", "add_pooling_layer", add_pooling_layer)
        inputs.check_initial("BertModel", rngs)
        dispatch.check_name("BertModel", implementation)
        self.config, self.remat = config, remat
        self.recipe: Float8Recipe | None = None
        self.deterministic = True
        dtype, param_dtype = (
            inputs.float_dtype("BertModel", *named) for named in (("dtype", dtype), ("param_dtype", param_dtype))
        )
        options = _Options(config, dtype, param_dtype, implementation)
        self.embeddings = BertEmbeddings(options, rngs)
        sets = 1 if config.shared_layers else config.num_hidden_layers
        self.layers = nnx.List([BertLayer(options, rngs, first=i == 0) for i in range(sets)])
        width = config.hidden_size
        self.final_norm_gamma, self.final_norm_beta = options.norm(rngs, width, exists=config.norm_first)
        if config.relative_bias:
            self.relative_bias = options.normal(rngs, config.relative_attention_num_buckets, config.num_attention_heads)
        if config.positions == "disentangled":
            rows = 2 * (config.position_buckets or config.max_relative_positions)
            self.relative_embeddings = options.normal(rngs, rows, config.hidden_size)
            self.relative_norm_gamma, self.relative_norm_beta = options.norm(rngs, config.hidden_size)
        has_pooler = add_pooling_layer and config.model_type not in _WITHOUT_POOLER
        self.pooler = BertPooler(options, rngs) if has_pooler else None

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool = False,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> BertOutput:
        """Runs the encoder on a padded batch or, with `cu_seqlens`, on packed sequences.

        A sequence gets the same hidden states in both cases. `jaxft.remove_padding` packs the ids of a padded batch,
        and `jaxft.restore_padding` restores the padded layout of the hidden states::

            ids, indices, cu_seqlens = jaxft.remove_padding(input_ids, attention_mask != 0, capacity=M)
            output = model(ids, cu_seqlens=cu_seqlens, max_seqlen=T)
            jaxft.restore_padding(output.last_hidden_state, indices, batch=B, length=T)

        Args:
          input_ids: integers `[B, T]`, or `[M]` for packed sequences. An id outside the vocabulary makes its sequence
            NaN.
          attention_mask: integers or booleans `[B, T]`, 0 for tokens that are not attended to (padding, or any other
            tokens). Their hidden states have no meaning. None attends to all tokens. Must be None for packed sequences.
          token_type_ids: integers of the shape of `input_ids`. None means all 0.
          position_ids: integers of the shape of `input_ids`. None counts from 0 in each sequence; in RoBERTa models
            from `pad_token_id + 1`, and only tokens that are not padding. Pass them for packed sequences whose
            positions do not count from the start of each sequence, for example because the mask of the padded batch has
            holes.
          cu_seqlens: integers `[B + 1]` that ascend from 0, for packed sequences: sequence b is
            `input_ids[cu_seqlens[b]:cu_seqlens[b + 1]]`. Rows from `cu_seqlens[B]` on belong to no sequence. Their
            hidden states have no meaning, but their ids must be in the vocabulary (for example 0). The pooler output of
            a sequence without tokens has no meaning either.
          max_seqlen: upper bound on the sequence lengths, a Python integer; required with `cu_seqlens`. If `cu_seqlens`
            is traced, nothing can be raised: all hidden states are NaN if a sequence is longer than `max_seqlen` or
            ends beyond the M rows. With explicit `position_ids`, the tokens beyond these limits are cut off instead.
          output_hidden_states: whether to return the hidden states of all layers.
          deterministic: True turns dropout off for this call, False turns it on. None keeps the setting of
            `model.eval()` or `model.train()`.
          rngs: randomness for dropout: a JAX random key, or an `nnx.Rngs` with a stream `dropout` (or `default`), from
            which the call draws a key. In a function that JAX traces, for example to take a gradient, an `nnx.Rngs`
            must be an argument of that function; otherwise draw the key outside of the function. A packed call drops
            other elements than a padded call with the same key.

        Returns:
          A `BertOutput`.

        Raises:
          TypeError: an input is not an array of integers, `deterministic` is not a Python boolean, or `rngs` has a
            wrong type.
          ValueError: an input has a wrong shape, or a list or NumPy array holds an integer beyond int32; T or
            `max_seqlen` exceeds the number of positions of the model and there are no `position_ids`; there are
            `token_type_ids` but the model has no token types; `cu_seqlens` comes with `attention_mask` or without
            `max_seqlen`, or `max_seqlen` comes alone or is not a Python integer >= 0; there is dropout but `rngs` is
            None, has no stream for dropout, or comes from outside the traced function.
        """
        input_ids = inputs.as_ids("BertModel", "input_ids", input_ids)
        shape = input_ids.shape
        packed: dict[str, Any] = {}
        if cu_seqlens is None and max_seqlen is None:
            if input_ids.ndim != 2 or shape[1] == 0:
                raise ValueError(
                    f"BertModel: input_ids must have a shape [batch, tokens], tokens > 0, got {list(shape)}"
                )
            most, given = shape[1], f"input_ids has {shape[1]} tokens a sequence"
        else:
            cu_seqlens, most = inputs.check_packed("BertModel", input_ids, attention_mask, cu_seqlens, max_seqlen)
            packed, given = {"cu_seqlens": cu_seqlens, "max_seqlen": most}, f"max_seqlen is {most}"
        token_type_ids = (
            None if token_type_ids is None else inputs.as_ids("BertModel", "token_type_ids", token_type_ids, shape)
        )
        position_ids = None if position_ids is None else inputs.as_ids("BertModel", "position_ids", position_ids, shape)
        if token_type_ids is not None and not self.config.type_vocab_size:
            raise ValueError(f"BertModel: a {self.config.model_type} model without token types takes no token_type_ids")
        if position_ids is None and checks.exceeds(most, self.config.most_tokens):
            raise ValueError(f"BertModel: {given}, but the model has positions for at most {self.config.most_tokens}")
        mask = None
        if attention_mask is not None:
            keep = inputs.as_ids("BertModel", "attention_mask", attention_mask, shape, or_bool=True).astype(jnp.bool)
            mask = keep[:, None, None, :]

        key = self._dropout_key(deterministic, rngs)
        first_key, keys = (None, None) if key is None else dropout.encoder_keys(key, self.config.num_hidden_layers)

        x = self.embeddings(input_ids, token_type_ids, position_ids, **packed, dropout_rng=first_key)
        residual, hidden_states = x, [x]
        places = self._places(input_ids, mask, position_ids, most, **packed)
        norms = self._norms()
        # A loop over separate parameters is faster than a scan over stacked ones.
        # H200, 1x128 tokens: 321 us (scan 598), 2026-11-24
        # See docs/performance-notes.md, "Encoder: loop, scan or one kernel per layer" and "Encoder: kernels per layer".
        for i in range(self.config.num_hidden_layers):
            layer, window = self.layers[i % len(self.layers)], self.config.window(i)
            layer_keys = None if keys is None else keys[i]
            x, residual = run_layer(layer, x, residual, places[window], norms[i], layer_keys, remat=self.remat)
            is_last = i + 1 == self.config.num_hidden_layers
            shows_sum = self.config.norm_first and not is_last
            hidden_states.append(residual if shows_sum or float8.is_float8(x) else x)
        last = hidden_states[-1]
        return BertOutput(
            last_hidden_state=last,
            pooler_output=None if self.pooler is None else self.pooler(last, packed.get("cu_seqlens")),
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
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
        implementation: str | None = None,
        remat: bool = False,
        quantization: str | Float8Recipe | None = None,
    ) -> Self:
        """Loads the encoder of a Hugging Face checkpoint of a type that `BertConfig` lists.

        Tensors of heads are not read. A checkpoint without a pooler gives a model without a pooler.

        Args:
          folder_or_id: a folder with `config.json` and safetensors files, or the id of a model on Hugging Face.
          revision: branch, tag or commit of the model on Hugging Face. It has no effect on a folder.
          cache_dir: folder for downloads. None is Hugging Face's default.
          local_files_only: whether to use only files that were downloaded before.
          dtype: as for `BertModel`. None is bfloat16 for a model in float8 and float32 for others.
          param_dtype: as for `BertModel`. None takes `dtype`.
          implementation: as for `BertModel`.
          remat: as for `BertModel`.
          quantization: "fp8" or a `jaxft.models.Float8Recipe` to quantize the model, see `jaxft.models.quantize`. None
            leaves it as it is saved. A model in float8 cannot compute in float32.

        Returns:
          The model, with dropout off.

        Raises:
          CheckpointError: the checkpoint cannot be found, read or used. The message lists all problems.
          TypeError: `folder_or_id` is not a string or path, or `remat` is not a boolean.
          ValueError: `dtype`, `param_dtype`, `implementation` or `quantization` is not supported.
        """
        recipe = check_load_options(dtype, param_dtype, implementation, quantization)
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )

        def parse(settings: dict[str, Any]) -> tuple[BertConfig, Float8Recipe | None]:
            settings, saved = read_settings(settings)
            return BertConfig.from_dict(settings), saved

        config, saved = checkpoint_files.read_config(folder, parse)
        recipe, dtype, param_dtype = load_options(recipe, saved, dtype, param_dtype)
        options: dict[str, Any] = {"implementation": implementation, "remat": remat}
        model = cls(config, dtype=dtype, param_dtype=param_dtype, **options, rngs=None)
        if "pooler.kernel" not in load_model(model, folder, config.model_type, param_dtype, saved, recipe):
            model.pooler = None
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which transformers can read. Existing files are replaced.

        A model in float8 is written in a format of jaxft: its weights are in `model_float8.safetensors`, which other
        libraries do not find, and `quantization_config` in `config.json` says what it is.

        Args:
          folder: folder of the files. It is created if it does not exist.

        Raises:
          TypeError: `folder` is not a string or path.
          NotADirectoryError: `folder` is a file.
          ValueError: the parameters have no values yet, or a parameter has NaN or infinite values.
        """
        checkpoint_tensors.save(folder, self._files())

    def _files(self) -> dict[str, Any]:
        """Returns the contents of the checkpoint's files by name."""
        return checkpoint_of(self, self.config.to_dict())

    @property
    def deterministic(self) -> bool:
        """True if calls run without dropout. `eval()` sets it to True, `train()` to False."""
        return self._deterministic

    @deterministic.setter
    def deterministic(self, given: bool) -> None:
        if not given and self.recipe is not None:
            raise NotImplementedError(_NO_TRAINING)
        self._deterministic = given

    def quantize_layers(self, recipe: Float8Recipe) -> None:
        """Rounds the layers to float8 as far as that covers them, see `jaxft.models.quantize`."""
        options = self.embeddings.options
        if self.recipe is not None:
            raise ValueError("quantize: the model is in float8 already")
        check_dtype("quantize: dtype of the model", options.dtype)
        if reason := self.layers[0].not_in_float8():
            _log.warning("quantize: no layer of the %s model runs in float8: %s", self.config.model_type, reason)
            return
        self.recipe, self._deterministic = recipe, True
        for layer in self.layers:
            layer.quantize(recipe, has_next=self.config.shared_layers or layer is not self.layers[-1])

    def _norms(self) -> list[tuple[_Norm, _Norm]]:
        """Returns, for each layer, the norms after attention and after the feed-forward network."""
        layers = [self.layers[i % len(self.layers)] for i in range(self.config.num_hidden_layers)]
        if not self.config.norm_first:
            return [(layer.attention_norm(), layer.ffn_norm()) for layer in layers]
        following = [layer.attention_norm() for layer in layers[1:]]
        following.append((value(self.final_norm_gamma), value(self.final_norm_beta)))
        return [(layer.ffn_norm(), norm) for layer, norm in zip(layers, following, strict=True)]

    def _places(
        self, input_ids: Array, mask: Array | None, position_ids: Array | None, longest: Any,
        cu_seqlens: Array | None = None, max_seqlen: int = 0,
    ) -> dict[int | None, Places]:  # fmt: skip
        """Returns the places of the tokens for each window of attention that layers have."""
        config, found = self.config, {}
        shared: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if config.relative_bias:
            shared["bias"] = bucket_table(self.relative_bias[...])
        elif config.positions == "alibi":
            shared["bias"] = alibi_table(config.num_attention_heads, longest)
        elif config.positions == "disentangled":
            shared["relative"] = layer_norm(
                self.relative_embeddings[...].astype(self.embeddings.options.dtype), value(self.relative_norm_gamma),
                value(self.relative_norm_beta), epsilon=config.layer_norm_eps,
                implementation=self.embeddings.options.implementation,
            )  # fmt: skip
        if config.positions == "rotary" and position_ids is None:
            if cu_seqlens is None:
                position_ids = jnp.arange(input_ids.shape[1], dtype=jnp.int32)
            else:
                position_ids = packed_rows(input_ids.size, cu_seqlens, max_seqlen)[1]
        for window in {config.window(i) for i in range(config.num_hidden_layers)}:
            theta = config.rope_theta if window is None else config.local_rope_theta
            positions = position_ids if config.positions == "rotary" else None
            found[window] = Places(**shared, positions=positions, window=window, theta=theta * config.rope_factor)
        return found

    def _dropout_key(
        self, deterministic: bool | None, rngs: nnx.Rngs | Array | None, **more_rates: float
    ) -> Array | None:
        """Returns the dropout key of a call, or None for a call without dropout, which ignores `rngs`."""
        if deterministic is not None:
            checks.check_flag("BertModel", "deterministic", deterministic)
        if self.deterministic if deterministic is None else deterministic:
            return None
        if self.recipe is not None:
            raise NotImplementedError(_NO_TRAINING)
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        rates = {name: getattr(self.config, name) for name in names}
        return dropout.call_key("BertModel", rngs, **rates, **more_rates)


def named_parameters(model: nnx.Module) -> dict[str, nnx.Param[Any]]:
    """Returns the parameters by name, such as "head.out_bias" or "layers.0.out_bias" (without the prefix "bert.")."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)).removeprefix("bert."): parameter for path, parameter in state}


def encoder_of(model: nnx.Module) -> BertModel:
    """Returns the `BertModel` that a model is or contains."""
    return next(module for _, module in nnx.iter_modules(model) if isinstance(module, BertModel))


def load_model(
    model: nnx.Module, folder: Path, model_type: str, dtype: DTypeLike, saved: Float8Recipe | None,
    recipe: Float8Recipe | None, *, wanted: dict[str, nnx.Param[Any]] | None = None, has_new_head: bool = False,
) -> set[str]:  # fmt: skip
    """Sets the parameters of a model, or those that are `wanted`, from a checkpoint, and returns their names.

    `saved` is the recipe of a checkpoint in float8. Other checkpoints are loaded and then quantized with `recipe`.
    """
    encoder = encoder_of(model)
    if saved is None:
        parameters = named_parameters(model) if wanted is None else wanted
        found = load_parameters(parameters, folder, model_type, dtype, has_new_head=has_new_head)
        if recipe is not None:
            encoder.quantize_layers(recipe)
        return found
    encoder.quantize_layers(saved)
    parameters = named_parameters(model)
    expected = {name: parameter.get_value() for name, parameter in parameters.items()}
    optional = {name for name in expected if name.startswith("pooler.")}
    values = checkpoint_tensors.load_float8(folder, FILE, expected, optional)
    for name, array in values.items():
        parameters[name].set_value(array)
    return {*values}


def checkpoint_of(model: nnx.Module, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the files of a checkpoint by name, from the model and the content of its config.json."""
    parameters = {name: p.get_value() for name, p in named_parameters(model).items()}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, BertLayer) and layer.views:
            prefix = ".".join(map(str, path)).removeprefix("bert.")
            del parameters[f"{prefix}.kernels"]
            for name in _KERNELS:
                parameters[f"{prefix}.{name}_kernel"], _ = matrix_view.split(layer.stored_kernel(name))
    encoder = encoder_of(model)
    if encoder.recipe is None:
        tensors = checkpoint_tensors.named_tensors(encoder.config.model_type, parameters)
        return {"config.json": config, "model.safetensors": tensors}
    return {
        "config.json": config | written_settings(encoder.recipe), FILE: checkpoint_tensors.float8_tensors(parameters)
    }  # fmt: skip


def _is_shape(array: Any) -> bool:
    return isinstance(array, jax.ShapeDtypeStruct)


def load_parameters(
    parameters: dict[str, nnx.Param[Any]],
    folder: Path,
    model_type: str,
    dtype: DTypeLike,
    *,
    has_new_head: bool = False,
) -> set[str]:
    """Sets the parameters that a checkpoint has and returns their names. It may lack the head's if `has_new_head`."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    values = checkpoint_tensors.load(folder, model_type, shapes, dtype, has_new_head=has_new_head)
    for name, value in values.items():
        parameters[name].set_value(value)
    return {*values}
