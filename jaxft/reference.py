"""Reference implementation of each operation of jaxft in plain `jax.numpy`.

These functions define what every other implementation must compute. They are the "xla" implementation, and CPUs and
TPUs run them. They take checked arguments (the functions in `jaxft.ops` check them), accumulate in float32 (float64 for
float64 inputs), and get their gradients from JAX's automatic differentiation.

Letters in shapes: B batch, T query length, S key length, N heads, K key/value heads, G = N // K, H head size, D model
width, M rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxft import dispatch
from jaxft.dropout import dropout

PrecisionLike = Any

# --- Rows: layer norm, activations, softmax ----------------------------------------------------------------------


def wide_dtype(x: Array) -> Any:
    """Returns the dtype of statistics and accumulation."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def wide(x: Array) -> Array:
    """Returns `x` in the dtype of statistics and accumulation."""
    return x.astype(wide_dtype(x))


def matmul_factors(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns the factors of a matmul in dtypes whose products the device adds up in float32, also in gradients.

    XLA's CPU backend cannot run batched bfloat16 matmuls in some layouts, and adds up in bfloat16 in others, so a CPU
    multiplies in float32. The barrier keeps XLA from moving the conversion into the matmul.
    """
    if jnp.bfloat16 not in (x.dtype, y.dtype) or dispatch.platform() != "cpu":
        return x, y
    return lax.optimization_barrier(wide(x)), lax.optimization_barrier(wide(y))


def matmul(x: Array, y: Array, precision: PrecisionLike) -> Array:
    """Computes x @ y in the dtype of x. `y` may have several axes of columns."""
    return jnp.tensordot(*matmul_factors(x, y), 1, precision=precision).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_wide_sums(linear: Callable[..., Array], xs: tuple[Array, ...], *indices: Array) -> Array:
    """Computes linear(*xs, *indices), which may use an element of `xs` many times.

    The gradient of such an element is added up in float32 and rounded once, also where `linear` computes in 16 bits.
    """
    return linear(*xs, *indices)


@_with_wide_sums.defjvp
def _(linear: Callable[..., Array], primals: Any, tangents: Any) -> tuple[Array, Array]:
    xs, *indices = primals
    y = _with_wide_sums(linear, xs, *indices)  # not `linear`: second derivatives go through it
    return y, linear(*map(wide, tangents[0]), *indices).astype(y.dtype)


def one_or_nan(condition: Array, dtype: Any) -> Array:
    """Returns 1 where the condition is true, else NaN, without a NaN in between that `jax.debug_nans` would report."""
    one = condition.astype(dtype)
    return one / one


def largest(x: Array, axis: int, where: Array | None = None) -> Array:
    """Returns the maximum along an axis, -inf without elements. A NaN gives NaN; XLA's maximum may ignore it on a CPU.

    `where`, which broadcasts to the shape of `x`, is True for the elements that count.
    """
    is_nan = jnp.isnan(x) if where is None else jnp.isnan(x) & where
    top = jnp.max(x, axis=axis, where=where, initial=-jnp.inf)
    return top * one_or_nan(~jnp.any(is_nan, axis=axis), x.dtype)


def _like(x: Array, y: Array) -> Array:
    """Returns `x` in the dtype of `y`, with axes of size 1 in front up to the rank of `y`."""
    return lax.expand_dims(x.astype(y.dtype), range(y.ndim - x.ndim))


def layer_norm(x: Array, gamma: Array | None = None, beta: Array | None = None, *, epsilon: float = 1e-6) -> Array:
    """Computes (x - mean) / sqrt(variance + epsilon) * gamma + beta over the last axis, in two passes."""
    return _normalize(wide(x), gamma, beta, epsilon).astype(x.dtype)


def _normalize(x: Array, gamma: Array | None, beta: Array | None, epsilon: float, center: bool = True) -> Array:
    centered = x - jnp.mean(x, axis=-1, keepdims=True) if center else x
    y = centered * lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + epsilon)
    if gamma is not None:
        y = y * _like(gamma, y)
    if beta is not None:
        y = y + _like(beta, y)
    return y


def bias_residual_layer_norm(
    x: Array,
    bias: Array | None,
    residual: Array,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_sum: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes layer_norm(dropout(x + bias) + residual). With `return_sum`, also returns the normalised sum."""
    total = wide(x)
    if bias is not None:
        total = total + _like(bias, total)
    total = dropout(total, dropout_rate, dropout_rng) + residual.astype(total.dtype)
    y = _normalize(total, gamma, beta, epsilon).astype(x.dtype)
    return (y, total.astype(x.dtype)) if return_sum else y


def rms_norm(
    x: Array,
    gamma: Array | None = None,
    *,
    residual: Array | None = None,
    epsilon: float = 1e-6,
    return_sum: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes (x + residual) / sqrt(mean square + epsilon) * gamma. With `return_sum`, also returns the sum."""
    total = wide(x) if residual is None else wide(x) + wide(residual)
    y = _normalize(total, gamma, None, epsilon, center=False).astype(x.dtype)
    return (y, total.astype(x.dtype)) if return_sum else y


def embeddings_layer_norm(
    input_ids: Array,
    word: Array,
    position: Array,
    token_type: Array | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    position_ids: Array | None = None,
    token_type_ids: Array | None = None,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    dtype: Any = None,
) -> Array:
    """Computes dropout(layer_norm(sum)) of the rows selected by the ids. An id outside its table gives NaN."""
    dtype_of_sum = wide_dtype(word)

    def take(table: Array, ids: Array) -> Array:
        return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype_of_sum)

    def rows(table: Array, ids: Array) -> Array:
        return _with_wide_sums(take, (table,), ids)

    total = rows(word, input_ids)
    position = position[: input_ids.shape[-1]] if position_ids is None else rows(position, position_ids)
    total = total + _like(position, total)
    if token_type is not None:
        token_type = token_type[0] if token_type_ids is None else rows(token_type, token_type_ids)
        total = total + _like(token_type, total)
    y = dropout(_normalize(total, gamma, beta, epsilon), dropout_rate, dropout_rng)
    return y.astype(word.dtype if dtype is None else dtype)


@jax.custom_jvp
def _erfc(x: Array) -> Array:
    return lax.erfc(x)


# JAX 0.12's own derivative of erfc raises inside of a shard_map.
_erfc.defjvps(lambda dx, _, x: dx * (-2.0 / math.sqrt(math.pi) * jnp.exp(-x * x)))


def _gelu(x: Array) -> Array:
    return 0.5 * x * _erfc(x * -math.sqrt(0.5))  # erfc is accurate for the small values of the negative tail


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": jax.nn.relu,  # its gradient at 0 is 0
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "tanh": jnp.tanh,
}


def bias_activation(x: Array, bias: Array | None, *, activation: str = "gelu") -> Array:
    """Computes activation(x + bias)."""
    y = wide(x)
    if bias is not None:
        y = y + _like(bias, y)
    return ACTIVATIONS[activation](y).astype(x.dtype)


def gated_activation(
    x: Array, bias: Array | None = None, *, activation: str = "gelu", gate: str = "first"
) -> Array:  # fmt: skip
    """Computes activation(gate) * other of the halves of x + bias, [..., 2F] -> [..., F]."""
    y = wide(x)
    if bias is not None:
        y = y + _like(bias, y)
    return _activate(y, activation, gate).astype(x.dtype)


def _activate(y: Array, activation: str, gate: str | None) -> Array:
    """Computes activation(y) or, with a gate, activation(gate) * other of the halves of y."""
    if gate is None:
        return ACTIVATIONS[activation](y)
    first, second = jnp.split(y, 2, axis=-1)
    gated, other = (first, second) if gate == "first" else (second, first)
    return ACTIVATIONS[activation](gated) * other


def _logits(x: Array, scale: float | None, bias: Array | None) -> Array:
    logits = wide(x)
    if scale is not None:
        logits = logits * scale
    if bias is not None:
        logits = logits + _like(bias, logits)
    return logits


def _exponentials(logits: Array, allowed: Array | None) -> tuple[Array, Array, Array]:
    """Computes exp(logits - max) with 0 where not allowed, its sum over the last axis, and the max.

    The max is 0 for a row with nothing allowed.
    """
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    top = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    e = jnp.exp(logits - top)
    return e, jnp.sum(e, axis=-1, keepdims=True), top


def _row_is_empty(total: Array) -> Array:
    return total == 0.0


def softmax(x: Array, *, scale: float | None = None, bias: Array | None = None, mask: Array | None = None) -> Array:
    """Computes the softmax of x * scale + bias over the last axis, restricted to the elements whose `mask` is True.

    The other elements are 0, and so are rows without a True.
    """
    e, total, _ = _exponentials(_logits(x, scale, bias), mask)
    return (e / jnp.where(_row_is_empty(total), 1.0, total)).astype(x.dtype)


def log_softmax(x: Array, *, scale: float | None = None, bias: Array | None = None, mask: Array | None = None) -> Array:
    """Computes the logarithm of `softmax`: -inf where `mask` is False."""
    logits = _logits(x, scale, bias)
    allowed = jnp.ones((), bool) if mask is None else mask
    _, total, top = _exponentials(logits, allowed)
    log_total = jnp.log(jnp.where(_row_is_empty(total), 1.0, total))
    return jnp.where(allowed, logits - top - log_total, -jnp.inf).astype(x.dtype)


def linear_cross_entropy(
    x: Array,
    embedding: Array,
    labels: Array,
    bias: Array | None = None,
    *,
    ignore_index: int = -100,
    precision: PrecisionLike = None,
) -> tuple[Array, Array]:
    """Computes the cross-entropy of the logits x [..., D] @ embedding [V, D].T + bias, summed over the labelled rows.

    The second result is the number of these rows. A row whose label is `ignore_index` is not labelled, and has no
    effect on the sum or the gradients, whatever it holds. A label that names no class makes the sum and the gradients
    NaN.
    """
    labelled = labels != ignore_index
    x, table = jnp.where(labelled[..., None], x, 0), embedding.astype(x.dtype)
    logits = product(x, table, "...d,vd->...v", precision)
    log_p = log_softmax(_logits(logits, None, bias))
    label = labels[..., None]
    is_label = _like(jnp.arange(table.shape[0]), label) == label
    unknown = labelled & ((labels < 0) | (labels >= table.shape[0]))
    loss = -jnp.sum(jnp.where(is_label | unknown[..., None], log_p, 0.0), axis=-1)
    loss = loss * one_or_nan(~unknown, loss.dtype)
    return jnp.sum(jnp.where(labelled, loss, 0.0)), jnp.sum(labelled, dtype=jnp.int32)


# --- Layout ------------------------------------------------------------------------------------------------------


def qkv_bias_split_heads(qkv: Array, bias: Array | None, num_heads: int) -> tuple[Array, Array, Array]:
    """Adds bias [3*N*H] to qkv [B, T, 3*N*H] and splits the sum into three arrays [B, N, T, H]."""
    y = wide(qkv)
    if bias is not None:
        y = y + _like(bias, y)
    batch, length, width = qkv.shape
    y = y.astype(qkv.dtype).reshape(batch, length, 3, num_heads, width // (3 * num_heads))
    q, k, v = jnp.transpose(y, (2, 0, 3, 1, 4))
    return q, k, v


def merge_heads(x: Array) -> Array:
    """Merges heads: [B, N, T, H] -> [B, T, N*H]."""
    batch, heads, length, size = x.shape
    return jnp.transpose(x, (0, 2, 1, 3)).reshape(batch, length, heads * size)


def permute(x: Array, axes: tuple[int, ...]) -> Array:
    """Computes jnp.transpose(x, axes)."""
    return jnp.transpose(x, axes)


def rotary_frequencies(head_size: int, theta: float, scale: float, dtype: Any) -> np.ndarray:
    """Computes the angle per position of each pair, scale * theta^(-2i / H), [H // 2].

    The powers are rounded to `dtype` before the division, as in PyTorch: at long positions, frequencies that differ in
    the last bit give other angles.
    """
    exponents = np.arange(0, head_size, 2, dtype=dtype) / np.asarray(head_size, dtype)
    return np.asarray(scale, dtype) / (theta ** exponents.astype(np.float64)).astype(dtype)


def rotary(qkv: Any, positions: Array, theta: float = 10000.0, *, frequency_scale: float = 1.0) -> Any:
    """Rotates queries and keys by their positions: qkv [..., 3, N, H], or a tuple of arrays [..., N, H].

    Element i of the first half of a head and element i of the second half are one pair. `positions` broadcast to the
    leading axes.
    """
    rotate = functools.partial(_rotate, theta=theta, frequency_scale=frequency_scale)
    if isinstance(qkv, tuple):
        return tuple(rotate(x, positions) for x in qkv)
    return jnp.concatenate([rotate(qkv[..., :2, :, :], positions[..., None]), qkv[..., 2:, :, :]], axis=-3)


def _rotate(x: Array, positions: Array, theta: float, frequency_scale: float) -> Array:
    first, second = jnp.split(wide(x), 2, axis=-1)
    positions = lax.expand_dims(positions.astype(first.dtype), range(x.ndim - 2 - positions.ndim))
    frequencies = rotary_frequencies(x.shape[-1], theta, frequency_scale, first.dtype)
    angles = positions[..., None, None] * _like(jnp.asarray(frequencies), first)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# --- Attention ---------------------------------------------------------------------------------------------------


def attention_mask(
    query_length: int,
    key_length: int,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    local_window_size: tuple[int, int] | None = None,
) -> Array | None:
    """Combines all masks into one boolean array that broadcasts to [B, N, T, S], or None if there is no mask."""
    query = jnp.arange(query_length, dtype=jnp.int32)[None, None, :, None]
    key = jnp.arange(key_length, dtype=jnp.int32)[None, None, None, :]
    parts = [] if mask is None else [mask]
    if is_causal:
        parts.append(key <= query)
    if local_window_size is not None:
        left, right = local_window_size
        parts.append((key >= query - left) & (key <= query + right))
    if query_seq_lengths is not None:
        parts.append(query < query_seq_lengths[:, None, None, None])
    if key_value_seq_lengths is not None:
        parts.append(key < key_value_seq_lengths[:, None, None, None])
    if query_segment_ids is not None and key_value_segment_ids is not None:
        parts.append(query_segment_ids[:, None, :, None] == key_value_segment_ids[:, None, None, :])
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _used_rows(used: Array, heads: int) -> Array:
    """Returns which rows of [B, L, heads, H] take part in attention: [B|1, N|1, L] -> [B|1, L, heads|1, 1]."""
    batch, all_heads, length = used.shape
    if all_heads > 1:
        used = jnp.any(used.reshape(batch, heads, all_heads // heads, length), axis=2)
    return jnp.swapaxes(used, 1, 2)[..., None]


def product(x: Array, y: Array, subscripts: str, precision: PrecisionLike = None) -> Array:
    """Computes an einsum of two arrays, added up in float32 and not rounded."""
    factors = matmul_factors(x, y)
    return jnp.einsum(subscripts, *factors, precision=precision, preferred_element_type=wide_dtype(x))


def _cleared(x: Array, used: Array | None) -> Array:
    return x if used is None else jnp.where(used, x, 0)


# The gradients of queries, keys and values are float32 until the examples of a `vmap` are added up. This holds also
# where the examples share an array and use different parts of it.


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _scores(
    query: Array, key: Array, used_queries: Array | None, used_keys: Array | None, subscripts: str,
    precision: PrecisionLike,
) -> Array:  # fmt: skip
    """Computes product(query, key) of the rows that are used."""
    query, key = _cleared(query, used_queries), _cleared(key, used_keys)
    if query.shape[2] != key.shape[2]:
        query = query.reshape(*query.shape[:2], key.shape[2], query.shape[2] // key.shape[2], query.shape[3])
    return product(query, key, subscripts, precision)


@_scores.defjvp
def _(subscripts: str, precision: PrecisionLike, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (query, key, *used), (dquery, dkey, *_) = primals, tangents
    scores = functools.partial(_scores, subscripts=subscripts, precision=precision)
    return scores(query, key, *used), scores(wide(dquery), key, *used) + scores(query, wide(dkey), *used)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def weighted_sum(
    p: Array, value: Array, used: Array | None, dtype: Any, subscripts: str, precision: PrecisionLike = None
) -> Array:
    """Computes product(p, value) of p in `dtype` and the values that are used. The gradient of p is not rounded."""
    return product(p.astype(dtype), _cleared(value, used), subscripts, precision)


@weighted_sum.defjvp
def _(dtype: Any, subscripts: str, precision: PrecisionLike, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (p, value, used), (dp, dvalue, _) = primals, tangents
    weigh = functools.partial(weighted_sum, p, used=used, dtype=dtype, subscripts=subscripts, precision=precision)
    return weigh(value), weigh(wide(dvalue)) + product(dp, _cleared(value, used), subscripts, precision)


def relative_bias_of_pairs(table: Array, query_length: int, key_length: int) -> Array:
    """Returns the elements of table [N, 2R+1] at clip(key - query, -R, R) + R for all pairs: [N, T, S].

    The gradient of the table has neither atomics nor rounded sums: no element is read twice but by a broadcast.
    """
    table, (heads, width) = wide(table), table.shape  # once, so that the parts of its gradient are added in float32
    period = query_length + key_length + 1
    place = (jnp.arange(period, dtype=jnp.int32) - query_length + width // 2)[None]
    inner = table.at[:, place[0]].get(mode="fill", fill_value=0, wrap_negative_indices=False, unique_indices=True)
    low, high = table[:, :1], table[:, -1:]
    row = jnp.where(place < 0, low, jnp.where(place >= width, high, inner))  # [N, period], by key - query
    # Rows that are one element shorter than the period: each one begins one element further to the left.
    rows = jnp.broadcast_to(row[:, None], (heads, query_length, period)).reshape(heads, query_length * period)
    rows = rows[:, : query_length * (period - 1)].reshape(heads, query_length, period - 1)
    return rows[:, :, query_length:]


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    relative_bias: Array | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    dropout_length: int | None = None,
    return_residual: bool = False,
    precision: PrecisionLike = None,
    **masks: Any,
) -> Array | tuple[Array, Array]:
    """Computes softmax(query @ key^T * scale + bias) @ value: [B, T, N, H] and two [B, S, K, H] -> [B, T, N, H].

    Bias and mask (True for keys that are attended to) broadcast to [B, N, T, S]. `relative_bias` is a table as in
    `relative_bias_of_pairs`, which is added too. A scale of None is 1 / sqrt(H). A row
    with nothing to attend to gives 0, and its log-sum-exp is -inf. A query, key or value that takes part in nothing
    (padding) has no effect on any output or gradient, whatever it holds. With `return_residual`, the second result is
    the log-sum-exp [B, T, N]. Dropout counts elements as in [B, N, dropout_length, dropout_length], by default as in
    [B, N, T, S].
    """
    batch, t, n, h = query.shape
    s, k = key.shape[1:3]
    allowed = attention_mask(t, s, mask=mask, **masks)
    used_queries = used_keys = None
    if allowed is not None:
        used_keys = _used_rows(jnp.any(allowed, axis=2), k)
        used_queries = _used_rows(jnp.any(allowed, axis=3), n)
    own, shared = ("n", "n") if n == k else ("kg", "k")  # a group axis of size 1 doubles the CPU's time
    scores = _scores(query, key, used_queries, used_keys, f"bt{own}h,bs{shared}h->b{own}ts", precision)
    logits = _logits(scores.reshape(batch, n, t, s), 1.0 / math.sqrt(h) if scale is None else scale, bias)
    if relative_bias is not None:
        logits = logits + relative_bias_of_pairs(relative_bias, t, s)[None].astype(logits.dtype)
    e, total, top = _exponentials(logits, allowed)
    empty = _row_is_empty(total)
    within = None if dropout_length is None else (batch, n, dropout_length, dropout_length)
    p = dropout(e / jnp.where(empty, 1.0, total), dropout_rate, dropout_rng, within)
    p = p if n == k else p.reshape(batch, k, n // k, t, s)
    out = weighted_sum(p, value, used_keys, value.dtype, f"b{own}ts,bs{shared}h->bt{own}h", precision)
    out = _cleared(out.reshape(batch, t, n, h).astype(query.dtype), used_queries)  # stops a NaN cotangent in padding
    if not return_residual:
        return out
    lse = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1.0, total)) + top)
    return out, jnp.swapaxes(lse[..., 0], 1, 2)


def varlen_qkv_attention(
    qkv: Array, cu_seqlens: Array, *, max_seqlen: int, **kwargs: Any
) -> Array | tuple[Array, Array]:
    """Computes attention within each of B packed sequences in `qkv` [M, 3, N, H]. Rows of no sequence give 0.

    A sequence that goes beyond the M rows or is longer than `max_seqlen` is cut.
    """
    rows, dropout_length = qkv.shape[0], max_seqlen
    if isinstance(rows, int) and isinstance(max_seqlen, int):
        max_seqlen = min(max_seqlen, rows)  # saves memory
    cu_seqlens = jnp.clip(cu_seqlens, 0, rows)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    position = jnp.arange(max_seqlen, dtype=jnp.int32)[None, :]
    source = jnp.where(position < lengths[:, None], cu_seqlens[:-1, None] + position, rows)  # [B, max_seqlen]
    padded = _with_wide_sums(_take_rows, (qkv,), source)
    out = dot_product_attention(
        padded[:, :, 0], padded[:, :, 1], padded[:, :, 2],
        query_seq_lengths=lengths, key_value_seq_lengths=lengths, dropout_length=dropout_length, **kwargs,
    )  # fmt: skip

    if isinstance(out, tuple):
        return _put_rows(out[0], source, rows, 0.0), _put_rows(out[1], source, rows, -jnp.inf)
    return _put_rows(out, source, rows, 0.0)


def _take_rows(x: Array, indices: Array) -> Array:
    """Returns x[indices], with 0 for an index past the end."""
    if x.shape[0] == 0:  # JAX's gather does not accept an empty axis
        return jnp.zeros((*indices.shape, *x.shape[1:]), x.dtype)
    return x.at[indices].get(mode="fill", fill_value=0)


def _put_rows(x: Array, indices: Array, rows: int, fill: float) -> Array:
    """Returns `rows` rows with the rows of x at the indices and `fill` elsewhere. Drops an index past the end."""
    return jnp.full((rows, *x.shape[indices.ndim :]), fill, x.dtype).at[indices].set(x, mode="drop")


# --- Dense layers and padding ------------------------------------------------------------------------------------


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    gate: str | None = None,
    residual: Array | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Computes activation(x @ kernel + bias) + residual: x [..., K], kernel [K, N] -> [..., N] (gated: N / 2).

    The columns may have several axes, in kernel and bias, if they are neither activated nor added to a residual.
    """
    return dense_epilogue(matmul(x, kernel, precision), bias, activation, residual, gate)


FLOAT8 = jnp.float8_e4m3fn
LARGEST_FLOAT8 = 448.0


def to_float8(x: Array, scale: float) -> Array:
    """Rounds x / scale to float8_e4m3fn. Values beyond 448 are clipped to it, and NaN stays NaN."""
    return jnp.clip(x * (1.0 / scale), -LARGEST_FLOAT8, LARGEST_FLOAT8).astype(FLOAT8)


def float8_dense(
    x: Array, kernel: Array, kernel_scale: Array, bias: Array | None = None, residual: Array | None = None, *,
    activation: str | None = None, x_scale: float = 1.0, dtype: Any = jnp.bfloat16, float8_scale: float | None = None,
    over: tuple[str, ...] = (),
) -> Array:  # fmt: skip
    """Computes a dense layer of float8_e4m3fn x [..., K] and kernel [K, F], rounded once: to `dtype` or to float8.

    Inside a `jax.shard_map`, x and kernel may be shards of K, whose products are summed in float32 `over` mesh axes.
    """
    # The products are exact. bfloat16 holds every number of float8_e4m3fn.
    factor_dtype = jnp.float32 if dispatch.platform() == "cpu" else jnp.bfloat16
    out = jnp.matmul(
        x.astype(factor_dtype), kernel.astype(factor_dtype), precision="highest", preferred_element_type=jnp.float32
    )
    if over:
        out = lax.psum(out, over)
    out = out * _like(kernel_scale * x_scale, out)
    if bias is not None:
        out = out + _like(bias, out)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    if residual is not None:
        out = out + residual.astype(out.dtype)
    return out.astype(dtype) if float8_scale is None else to_float8(out, float8_scale)


def dense_epilogue(
    y: Array, bias: Array | None, activation: str | None, residual: Array | None, gate: str | None = None
) -> Array:
    """Computes activation(y + bias) + residual; with a gate, the activation as in `gated_activation`."""
    if activation is None and residual is None:
        # In the dtype of y, so that XLA fuses the bias into the epilogue of the GEMM.
        return y if bias is None else _with_wide_sums(lambda y, bias: y + _like(bias, y), (y, bias))
    out = wide(y)
    if bias is not None:
        out = out + _like(bias, out)
    if activation is not None:
        out = _activate(out, activation, gate)
    if residual is not None:
        out = out + residual.astype(out.dtype)
    return out.astype(y.dtype)


def dense_rotary(
    x: Array, kernel: Array, bias: Array | None, positions: Array, theta: float = 10000.0, *, num_heads: int,
    frequency_scale: float = 1.0, precision: PrecisionLike = None,
) -> Array:  # fmt: skip
    """Computes rotary of dense(x, kernel, bias) as packed queries, keys and values: [..., D] -> [..., 3, N, H]."""
    y = dense(x, kernel, bias, precision=precision)
    qkv = y.reshape(*x.shape[:-1], 3, num_heads, math.prod(kernel.shape[1:]) // (3 * num_heads))
    return rotary(qkv, positions, theta, frequency_scale=frequency_scale)


def dense_residual_layer_norm(
    x: Array, kernel: Array, bias: Array | None, residual: Array, gamma: Array | None, beta: Array | None,
    *, precision: PrecisionLike = None, **options: Any,
) -> Any:  # fmt: skip
    """Computes bias_residual_layer_norm of dense(x, kernel), with `options`."""
    y = dense(x, kernel, precision=precision)
    return bias_residual_layer_norm(y, bias, residual, gamma, beta, **options)


def feed_forward_residual_layer_norm(
    x: Array, in_kernel: Array, in_bias: Array | None, out_kernel: Array, out_bias: Array | None, gamma: Array | None,
    beta: Array | None, *, activation: str = "gelu", gate: str | None = None, residual: Array | None = None,
    precision: PrecisionLike = None, **options: Any,
) -> Any:  # fmt: skip
    """Computes dense with an activation, then dense_residual_layer_norm with x as the residual if there is no other."""
    h = dense(x, in_kernel, in_bias, activation=activation, gate=gate, precision=precision)
    residual = x if residual is None else residual
    return dense_residual_layer_norm(h, out_kernel, out_bias, residual, gamma, beta, precision=precision, **options)


def remove_padding(x: Array, mask: Array, *, capacity: int) -> tuple[Array, Array, Array]:
    """Packs the rows of x [B, T, ...] whose mask [B, T] is True.

    Returns the packed rows [capacity, ...], and the two arrays of `padding_indices`.
    """
    indices, cu_seqlens = padding_indices(mask, capacity=capacity)
    return take_tokens(x, indices), indices, cu_seqlens


def padding_indices(mask: Array, *, capacity: int) -> tuple[Array, Array]:
    """Returns the index in [B*T] of each token of mask [B, T], and the start of each sequence in the packed rows [B+1].

    The indices are int32 [capacity], and B*T in the unused tail. All are -1 if there are more tokens than `capacity`.
    """
    flat = mask.reshape(-1)
    places = jnp.arange(flat.size, dtype=jnp.int32)
    tokens = jnp.cumsum(flat, dtype=jnp.int32)
    target = jnp.where(flat, tokens - 1, capacity)
    indices = jnp.full((capacity,), flat.size, jnp.int32)
    indices = indices.at[target].set(places, mode="drop", unique_indices=True)
    ends = jnp.cumsum(jnp.sum(mask, axis=1, dtype=jnp.int32), dtype=jnp.int32)
    cu_seqlens = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    return jnp.where(cu_seqlens[-1] > capacity, -1, indices), cu_seqlens


def take_tokens(x: Array, indices: Array) -> Array:
    """Returns the rows of x [B, T, ...] at indices in [B*T]. Indices out of range are as in `_take_or_spoil`."""
    return _take_or_spoil(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), indices)


def restore_padding(x: Array, indices: Array, *, batch: int, length: int) -> Array:
    """Computes the inverse of `take_tokens`: [M, ...] -> [B, T, ...], with 0 in places without a row.

    A negative index spoils the whole result, as in `_take_or_spoil`.
    """
    source = source_rows(indices, places=batch * length)
    return _take_or_spoil(x, source).reshape(batch, length, *x.shape[1:])


def source_rows(indices: Array, *, places: int) -> Array:
    """Inverts `indices`: the row that belongs in each place, int32 [places], so that only integers are scattered.

    A place without a row has the number of rows (one past the end). All entries are -1 if any index is negative.
    """
    rows, lost = indices.shape[0], indices < 0
    source = jnp.full((places,), rows, jnp.int32)
    numbers = jnp.arange(rows, dtype=jnp.int32)
    source = source.at[jnp.where(lost, places, indices)].set(numbers, mode="drop", unique_indices=True)
    return jnp.where(jnp.any(lost), -1, source)


def _take_or_spoil(x: Array, indices: Array) -> Array:
    """Returns x[indices], with 0 for an index past the end and a spoilt value for a negative index.

    The spoilt value is NaN for float dtypes, -1 for signed integers, the largest number for unsigned integers, and True
    for booleans.
    """
    lost, rows = (indices < 0).reshape(-1, *(1,) * (x.ndim - 1)), _take_rows(x, indices)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.where(lost, one_or_nan(~lost, x.dtype), rows)  # a product would spoil a complex infinity
    spoilt = -1 if jnp.issubdtype(x.dtype, jnp.signedinteger) else x.dtype == jnp.bool or jnp.iinfo(x.dtype).max
    return jnp.where(lost, jnp.array(spoilt, x.dtype), rows)
