"""dot_product_attention, and the same from packed projections: qkv_attention, varlen_qkv_attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxft import dispatch, reference, tuning
from jaxft.kernels.triton import attention as triton
from jaxft.ops import common

Array = jax.Array


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention without the [T, S] matrix in memory: softmax(query @ key^T * scale + bias) @ value for each head.

    Equivalent, away from the edges below, to::

      jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale, ...)

    Args:
      query: `[B, T, N, H]` (or `[T, N, H]`), float32, float16 or bfloat16; logits, softmax and sums are float32.
      key, value: `[B, S, K, H]` (or `[S, K, H]`) of the dtype of `query`; N is a multiple of K (grouped-query heads).
      bias: any float dtype, broadcastable to `[B, N, T, S]`, added to the scaled logits.
      mask: bool, broadcastable to `[B, N, T, S]`, True = attend.
      scale: of the logits, a Python number; None for 1 / sqrt(H).
      is_causal: a query attends to no later key (top-left aligned: key <= query).
      query_seq_lengths, key_value_seq_lengths: integers `[B]`; what lies beyond is padding.
      query_segment_ids, key_value_segment_ids: integers `[B, T]` and `[B, S]`, both or neither; attention stays within
        equal ids.
      local_window_size: (left, right), or one number for both: query - left <= key <= query + right.
      dropout_rate: of the probabilities, in [0, 1). What is kept is a pure function of the key and the element's index.
      dropout_rng: a JAX random key, needed where the rate is not 0.
      return_residual: also return the log-sum-exp of the logits, float32 `[B, T, N]`.
      implementation: None for the fastest, "triton" or "xla".

    Returns:
      An array of the shape and dtype of `query`, with `return_residual` a pair (output, log-sum-exp).
      A query with nothing to attend to gives exactly 0 and a log-sum-exp of -inf, and its gradients are 0; what is in
      padding (NaN and Inf included) reaches no valid output or gradient. `jax.nn` differs in both.

    Raises:
      TypeError: an array has the wrong kind of dtype (an integer mask, say), or a number is not one.
      ValueError: a shape does not fit, a number is out of its range, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of query, key, value and bias. Deterministic. float32 products are TF32 on a GPU unless
    `jax.default_matmul_precision` says "highest" or "float32".
    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
    """
    op = "dot_product_attention"
    query, key, value = (common.as_float(op, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    batched = query.ndim == 4
    if not batched and query.ndim != 3:
        raise ValueError(f"{op}: query must have shape [B, T, N, H] or [T, N, H], got {query.shape}")
    for name, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim or x.shape[-1] != query.shape[-1] or x.shape[:-3] != query.shape[:-3]:
            leading, size = ("B, " if batched else ""), query.shape[-1]
            raise ValueError(
                f"{op}: {name} must have shape [{leading}S, K, H] with the batch and head size (H={size}) of query"
                f" {query.shape}, got {x.shape}"
            )
        common.check_same_dtype(op, name, x, "query", query)
    common.check_shape(op, "value", value, key.shape)
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"{op}: the heads of query must be a multiple of those of key, got {query.shape[-2]} and {key.shape[-2]}"
        )
    inputs = _Inputs(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths, query_segment_ids,
                     key_value_segment_ids, dropout_rng)  # fmt: skip
    options = (scale, is_causal, local_window_size, dropout_rate, return_residual)
    return _attend(op, inputs, options, implementation, batched)


def qkv_attention(
    qkv: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """`dot_product_attention` from the packed projection, read in place: no slice and no copy on the GPU.

    Equivalent to::

      dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, mask, ...)

    Args:
      qkv: `[B, T, 3, N, H]` (or `[T, 3, N, H]`), float32, float16 or bfloat16.
      The other arguments: as in `dot_product_attention`, with S = T and K = N.

    Returns:
      `[B, T, N, H]` of the dtype of `qkv`, with `return_residual` also the log-sum-exp, float32 `[B, T, N]`.

    Raises, gradients, edges and source: as `dot_product_attention`.
    """
    op = "qkv_attention"
    qkv = common.as_float(op, "qkv", qkv)
    if qkv.ndim not in (4, 5) or qkv.shape[-3] != 3:
        raise ValueError(f"{op}: qkv must have shape [B, T, 3, N, H] or [T, 3, N, H], got {qkv.shape}")
    inputs = _Inputs(qkv, None, None, bias, mask, query_seq_lengths, key_value_seq_lengths, query_segment_ids,
                     key_value_segment_ids, dropout_rng)  # fmt: skip
    options = (scale, is_causal, local_window_size, dropout_rate, return_residual)
    return _attend(op, inputs, options, implementation, batched=qkv.ndim == 5)


def varlen_qkv_attention(
    qkv: Array,
    cu_seqlens: Array,
    *,
    max_seqlen: int,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """`qkv_attention` within each of B sequences that lie back to back, without padding.

    Args:
      qkv: `[M, 3, N, H]`, float32, float16 or bfloat16.
      cu_seqlens: integers `[B + 1]`, ascending from 0: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] of qkv.
        Rows from cu_seqlens[B] on belong to no sequence and give 0.
      max_seqlen: a static bound of the sequences' lengths.
      dropout_rate, dropout_rng: an element's index is that in the padded [B, N, max_seqlen, max_seqlen].
      The other arguments: as in `dot_product_attention`.

    Returns:
      `[M, N, H]` of the dtype of `qkv`, with `return_residual` also the log-sum-exp, float32 `[M, N]`.

    Raises, gradients and edges: as `dot_product_attention`.
    """
    op = "varlen_qkv_attention"
    qkv = common.as_float(op, "qkv", qkv)
    if qkv.ndim != 4 or qkv.shape[1] != 3:
        raise ValueError(f"{op}: qkv must have shape [M, 3, N, H], got {qkv.shape}")
    cu_seqlens = _as_integers(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must have shape [B + 1], got {cu_seqlens.shape}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int) or max_seqlen < 0:
        raise ValueError(f"{op}: max_seqlen must be a Python integer >= 0, got {max_seqlen!r}")
    options = _Options.check(op, scale, is_causal, local_window_size, dropout_rate, dropout_rng, return_residual,
                             qkv.shape[-1])  # fmt: skip
    dispatch.choose(op, implementation, {})
    return _varlen_reference(qkv, cu_seqlens, dropout_rng, max_seqlen, options)


class _Inputs(NamedTuple):
    """The arrays of a call; key and value are None where query is a packed [..., T, 3, N, H]."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    query_segment_ids: Any
    key_value_segment_ids: Any
    dropout_rng: Any


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is static in a call."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    dropout_rate: float
    return_residual: bool

    @staticmethod
    def check(op, scale, is_causal, window, dropout_rate, dropout_rng, return_residual, head_size):
        scale = max(head_size, 1) ** -0.5 if scale is None else common.check_number(op, "scale", scale)
        pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
        if window is not None and not (len(pair) == 2 and all(_is_window(w) for w in pair)):
            raise ValueError(f"{op}: local_window_size must be an integer >= 0 or a pair of them, got {window!r}")
        # No array is longer than 2^30, and the positions are 32-bit.
        window = None if window is None else (min(int(pair[0]), 2**30), min(int(pair[1]), 2**30))
        rate = common.check_dropout(op, dropout_rate, dropout_rng)
        return _Options(scale, bool(is_causal), window, rate, bool(return_residual))


def _is_window(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _as_integers(op: str, name: str, x: Any) -> Array:
    x = common.as_array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be an array of integers, got {x.dtype}")
    return x.astype(jnp.int32)


def _attend(op, inputs, options, implementation, batched):
    """Checks what the entry points share, chooses, and runs. Arrays without a batch get one of 1."""
    scale, is_causal, window, dropout_rate, return_residual = options
    options = _Options.check(op, scale, is_causal, window, dropout_rate, inputs.dropout_rng, return_residual,
                             inputs.query.shape[-1])  # fmt: skip
    inputs = _check_masks(op, inputs if batched else _add_batch(op, inputs))
    if options.dropout_rate == 0.0:
        inputs = inputs._replace(dropout_rng=None)
    choice = dispatch.choose(op, implementation, {"triton": _triton_reason(inputs, options)})
    b, t, s, n, h = _sizes(inputs)
    if choice.name == "xla" or 0 in (b, t, s, n, h):
        out = _reference(inputs, options)
    else:
        config = tuning.attention(b * n, t, s, h, inputs.query.dtype.itemsize, dispatch.device_kind())
        out = _triton_jit(inputs, options, config, dispatch.matmul_precision(), choice.interpret)
    return out if batched else jax.tree.map(lambda x: x[0], out)


def _sizes(inputs: _Inputs) -> tuple[int, int, int, int, int]:
    b, t, *_, n, h = inputs.query.shape
    return b, t, t if inputs.key is None else inputs.key.shape[1], n, h


def _add_batch(op: str, inputs: _Inputs) -> _Inputs:
    """Every array that has a batch axis where there is a batch gets one of 1 (bias and mask broadcast anyway)."""
    names = [name for name in _Inputs._fields if name not in ("bias", "mask", "dropout_rng")]
    given = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
    return inputs._replace(**{name: common.as_array(op, name, x)[None] for name, x in given.items()})


def _check_masks(op: str, inputs: _Inputs) -> _Inputs:
    b, t, s, n, _ = _sizes(inputs)
    found: dict[str, Array] = {}
    for name, check in (("bias", common.as_float), ("mask", common.as_mask)):
        x = getattr(inputs, name)
        if x is not None:
            x = check(op, name, x)
            common.check_broadcasts(op, name, x, (b, n, t, s))
            found[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    shapes = {
        "query_seq_lengths": (b,),
        "key_value_seq_lengths": (b,),
        "query_segment_ids": (b, t),
        "key_value_segment_ids": (b, s),
    }
    for name, shape in shapes.items():
        if getattr(inputs, name) is not None:
            found[name] = _as_integers(op, name, getattr(inputs, name))
            common.check_shape(op, name, found[name], shape)
    if ("query_segment_ids" in found) != ("key_value_segment_ids" in found):
        given = next(name for name in found if name.endswith("segment_ids"))
        raise ValueError(f"{op}: query_segment_ids and key_value_segment_ids go together, got only {given}")
    return inputs._replace(**found)


def _triton_reason(inputs: _Inputs, options: _Options) -> str | None:
    """Why the Triton kernel cannot run this call, if it cannot."""
    missing = {
        "bias": inputs.bias is not None,
        "mask over queries or heads (only [B, 1, 1, S])": inputs.mask is not None and inputs.mask.shape[1:3] != (1, 1),
        "is_causal": options.is_causal,
        "query_seq_lengths": inputs.query_seq_lengths is not None,
        "segment ids": inputs.query_segment_ids is not None,
        "local_window_size": options.local_window_size is not None,
        "dropout": options.dropout_rate > 0.0,
    }
    if any(missing.values()):
        return "the kernel has no " + ", no ".join(name for name, asked in missing.items() if asked)
    return triton.unsupported(inputs.query.shape[-1], query=inputs.query)


def _plain(inputs: _Inputs, options: _Options) -> Any:
    query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, rng = inputs
    if key is None:
        query, key, value = query[:, :, 0], query[:, :, 1], query[:, :, 2]
    return reference.dot_product_attention(
        query, key, value, bias, mask, query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths,
        query_segment_ids=q_ids, key_value_segment_ids=kv_ids, dropout_rng=rng, **dataclasses.asdict(options),
    )  # fmt: skip


_reference = jax.jit(_plain, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _varlen_reference(qkv, cu_seqlens, dropout_rng, max_seqlen, options):
    return reference.varlen_qkv_attention(
        qkv, cu_seqlens, max_seqlen=max_seqlen, dropout_rng=dropout_rng, **dataclasses.asdict(options)
    )


def _key_spans(inputs: _Inputs) -> tuple[Array | None, Array | None, Array | None]:
    """`full`, `end` and `mask` of the kernel from key lengths and a key mask (see its docstring)."""
    mask, lengths = inputs.mask, inputs.key_value_seq_lengths
    batch, _, s, _, _ = _sizes(inputs)
    if lengths is not None:
        lengths = jnp.clip(lengths, 0, s)
    if mask is None:
        return lengths, lengths, None
    mask = jnp.broadcast_to(mask[:, 0, 0], (batch, s))
    position = jnp.arange(s, dtype=jnp.int32)
    if lengths is not None:
        mask = mask & (position < lengths[:, None])
    full = jnp.min(jnp.where(mask, s, position), axis=1)  # the first False
    end = jnp.max(jnp.where(mask, position + 1, 0), axis=1)  # after the last True
    return full, end, mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _triton(inputs, options, config, precision, interpret):
    out = triton.forward(
        inputs.query, inputs.key, inputs.value, *_key_spans(inputs), scale=options.scale,
        return_residual=options.return_residual, precision=precision, config=config, interpret=interpret,
    )  # fmt: skip
    return tuple(out) if options.return_residual else out[0]


def _fwd(inputs, options, config, precision, interpret):
    return _triton(inputs, options, config, precision, interpret), inputs


def _bwd(options, config, precision, interpret, inputs, d_out):
    _, vjp = jax.vjp(lambda inputs: _plain(inputs, options), inputs)
    return vjp(d_out)


_triton.defvjp(_fwd, _bwd)
_triton_jit = jax.jit(_triton, static_argnums=(1, 2, 3, 4))
