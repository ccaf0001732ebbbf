"""Attention: the ops `dot_product_attention`, `qkv_attention` and `varlen_qkv_attention`."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import Array

from jaxft.ops import attention_vjp, checks, float8, plans, sharding
from jaxft.ops.attention_vjp import Inputs, Options


@sharding.over_explicit_axes(
    "query: ... T n H, key: ... S n H, value: ... S n H, bias: ... n T S, mask: ... n T S, query_seq_lengths: ..., "
    "key_value_seq_lengths: ..., query_segment_ids: ... T, key_value_segment_ids: ... S, relative_bias: n R "
    "-> ... T n H"
)
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
    relative_bias: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_residual: bool = False,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Computes softmax(query @ key^T * scale + bias) @ value for each head. The kernels never hold the [T, S] matrix.

    Equivalent, except for the edge cases under Returns, to::

        jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale, ...)

    Args:
      query: `[B, T, N, H]` (or `[T, N, H]`), float32, float16 or bfloat16. Logits, softmax and sums are float32.
      key: `[B, S, K, H]` (or `[S, K, H]`) of the dtype of `query`. N is a multiple of K (grouped-query attention).
      value: the shape and dtype of `key`.
      bias: any float dtype, broadcastable to `[B, N, T, S]`, added to the scaled logits.
      mask: bool, broadcastable to `[B, N, T, S]`, True = attend.
      scale: factor of the logits, a Python number. None is 1 / sqrt(H).
      is_causal: whether a query attends to no later key (top-left aligned: key <= query).
      query_seq_lengths: integers `[B]` (without a batch `[]` or `[1]`). Queries from this length on are padding.
      key_value_seq_lengths: integers `[B]` (without a batch `[]` or `[1]`). Keys and values from this length on are
        padding.
      query_segment_ids: integers `[B, T]` (without a batch also `[T]`). A query attends only to keys with the same id.
        Give the ids of both sides or of neither.
      key_value_segment_ids: integers `[B, S]` (without a batch also `[S]`).
      local_window_size: (left, right), or one number for both: query - left <= key <= query + right.
      relative_bias: a table `[N, 2R+1]` of any float dtype, or `[1, 2R+1]` for all heads, R >= 0. The element at
        clip(key - query, -R, R) + R is added to the scaled logits, where key and query are positions in the sequence.
        It may come with a bias, which the kernels then leave to `"xla"`.
      dropout_rate: probability of dropping an attention probability, in [0, 1).
      dropout_rng: a JAX random key, required if the rate is not 0 (see `jaxft.ops`).
      return_residual: whether to also return the log-sum-exp of the logits, float32 `[B, T, N]` (or `[T, N]`).
      float8_scale: None, or a number that makes the output float8_e4m3fn: the output divided by that number, clipped to
        448. Such a call has no gradient.
      implementation: None, "triton", "xla" (see `jaxft.ops`), or "cudnn" for the attention of `jax.nn` with cuDNN.

    Returns:
      An array of the shape and dtype of `query`, or float8 (see `float8_scale`). With `return_residual`, a pair of the
      output and the log-sum-exp.

      A query with nothing to attend to gives exactly 0 and a log-sum-exp of -inf, and its gradients are 0. Values in
      padding, NaN and Inf included, reach no valid output or gradient. `jax.nn` differs in both cases.

    Raises:
      TypeError: `mask` is not boolean, or another dtype or type does not fit (see `jaxft.ops`).
      ValueError: a shape does not fit, a number is out of its range, segment ids are given for one side only, or the
        implementation is unknown.
      NotImplementedError: the named implementation does not support the call.

    Gradients: for query, key, value, bias and relative_bias. The kernels need memory that grows with T + S, not with
    T * S, except for the gradient of a bias that has this size itself.

    Determinism: bitwise, in both directions. The gradients of `"cudnn"` are an exception. Errors: as for all ops (see
    `jaxft.ops`). An integer mask is a `TypeError`.

    Accuracy: float32 matmuls are TF32 on a GPU unless `jax.default_matmul_precision` is "highest" or "float32". With
    `None`, cuDNN may compute the output if no gradient is taken. The output then differs in its last bits from the
    output of `jax.value_and_grad`. With `None`, Mosaic GPU may compute the gradients of `qkv_attention` in 16 bits on
    Hopper GPUs. These gradients differ in their last bits from the gradients of `"triton"`.

    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
    """
    op = "dot_product_attention"
    query, key, value = (checks.as_float(op, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
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
        checks.check_same_dtype(op, name, x, "query", query)
    checks.check_shape(op, "value", value, key.shape)
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"{op}: the number of query heads must be a multiple of the number of key heads, got {query.shape[-2]} and"
            f" {key.shape[-2]}"
        )
    inputs = Inputs(query, key, value, bias, relative_bias, mask, query_seq_lengths, key_value_seq_lengths,
                    query_segment_ids, key_value_segment_ids, dropout_rng)  # fmt: skip
    options = (scale, is_causal, local_window_size, dropout_rate, return_residual, float8_scale)
    return _attend(op, inputs, options, implementation, batched)


@sharding.over_explicit_axes(
    "qkv: ... T C n H, bias: ... n T S, mask: ... n T S, query_seq_lengths: ..., key_value_seq_lengths: ..., "
    "query_segment_ids: ... T, key_value_segment_ids: ... S, relative_bias: n R -> ... T n H"
)
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
    relative_bias: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_residual: bool = False,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Computes `dot_product_attention` from the packed projection.

    Equivalent to::

        dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, mask, ...)

    The kernels read the packed array in place, without slices or copies. `"cudnn"` and `"xla"` slice `qkv`, which costs
    cuDNN copies.

    Args:
      qkv: `[B, T, 3, N, H]` (or `[T, 3, N, H]`), N >= 1, float32, float16 or bfloat16. S = T in what follows.
      bias: as for `dot_product_attention`.
      mask: as for `dot_product_attention`.
      scale: as for `dot_product_attention`.
      is_causal: as for `dot_product_attention`.
      query_seq_lengths: as for `dot_product_attention`.
      key_value_seq_lengths: as for `dot_product_attention`.
      query_segment_ids: as for `dot_product_attention`.
      key_value_segment_ids: as for `dot_product_attention`.
      local_window_size: as for `dot_product_attention`.
      relative_bias: as for `dot_product_attention`.
      dropout_rate: as for `dot_product_attention`.
      dropout_rng: as for `dot_product_attention`.
      return_residual: as for `dot_product_attention`.
      float8_scale: as for `dot_product_attention`.
      implementation: as for `dot_product_attention`.

    Returns:
      `[B, T, N, H]` (or `[T, N, H]`) of the dtype of `qkv`. With `return_residual`, also the log-sum-exp, float32 `[B,
      T, N]` (or `[T, N]`). Edge cases are as in `dot_product_attention`.

    Gradients: for qkv, bias and relative_bias. Errors, determinism, accuracy and source are as in
    `dot_product_attention`.
    """
    op = "qkv_attention"
    qkv = checks.as_float(op, "qkv", qkv)
    if qkv.ndim not in (4, 5) or qkv.shape[-3] != 3 or qkv.shape[-2] < 1:
        raise ValueError(f"{op}: qkv must have shape [B, T, 3, N, H] or [T, 3, N, H] with N >= 1, got {qkv.shape}")
    inputs = Inputs(qkv, None, None, bias, relative_bias, mask, query_seq_lengths, key_value_seq_lengths,
                    query_segment_ids, key_value_segment_ids, dropout_rng)  # fmt: skip
    options = (scale, is_causal, local_window_size, dropout_rate, return_residual, float8_scale)
    return _attend(op, inputs, options, implementation, batched=qkv.ndim == 5)


@sharding.over_explicit_axes("qkv: M C n H, cu_seqlens: B, relative_bias: n R -> M n H")
def varlen_qkv_attention(
    qkv: Array,
    cu_seqlens: Array,
    *,
    max_seqlen: int,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    relative_bias: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_residual: bool = False,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Computes `qkv_attention` within each of B packed sequences, without padding.

    The result of a sequence is bitwise independent of the contents and lengths of the other sequences and of its own
    place in `qkv`. With another number of sequences or rows, the kernels may use other block sizes, which round
    differently.

    Args:
      qkv: `[M, 3, N, H]`, N >= 1, float32, float16 or bfloat16.
      cu_seqlens: integers `[B + 1]`, ascending from 0. Sequence b is rows `cu_seqlens[b]` to `cu_seqlens[b + 1]` of
        `qkv`. Rows from `cu_seqlens[B]` on belong to no sequence and give 0.
      max_seqlen: a static upper bound of the lengths of the sequences, below 2^31. If `cu_seqlens` is traced (an
        argument of `jit`), its values cannot be checked. In a longer sequence, the rows beyond `max_seqlen` then take
        no part and give 0. A sequence that goes beyond row M is cut there. If `cu_seqlens` does not ascend from 0, the
        result is undefined.
      scale: as for `dot_product_attention`.
      is_causal: as for `dot_product_attention`.
      local_window_size: as for `dot_product_attention`.
      relative_bias: as for `dot_product_attention`.
      dropout_rate: as for `dot_product_attention`. The index of an element is its index in the padded array `[B, N,
        max_seqlen, max_seqlen]`.
      dropout_rng: as for `dot_product_attention`.
      return_residual: as for `dot_product_attention`.
      float8_scale: as for `dot_product_attention`.
      implementation: None, "triton" or "xla" (see `jaxft.ops`). cuDNN does not support packed sequences.

    Returns:
      `[M, N, H]` of the dtype of `qkv`. With `return_residual`, also the log-sum-exp, float32 `[M, N]`. Rows that
      belong to no sequence have a log-sum-exp of -inf. Edge cases are as in `dot_product_attention`.

    Raises:
      ValueError: `cu_seqlens`, unless it is traced, does not ascend from 0 or goes beyond M, or a sequence is longer
        than `max_seqlen`. See `jaxft.ops` for the other errors.
      NotImplementedError: `qkv` has 2^31 rows or more.

    Gradients: for qkv and relative_bias. Determinism, accuracy and source are as in `dot_product_attention`.
    """
    op = "varlen_qkv_attention"
    qkv = checks.as_float(op, "qkv", qkv)
    if qkv.ndim != 4 or qkv.shape[1] != 3 or qkv.shape[2] < 1:
        raise ValueError(f"{op}: qkv must have shape [M, 3, N, H] with N >= 1, got {qkv.shape}")
    if checks.exceeds(qkv.shape[0], 2**31 - 1):
        raise NotImplementedError(f"{op}: qkv must have fewer than 2^31 rows, whose numbers fit int32, got {qkv.shape}")
    given, cu_seqlens = cu_seqlens, checks.as_integers(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must have shape [B + 1], got {cu_seqlens.shape}")
    max_seqlen = checks.as_size(op, "max_seqlen", max_seqlen)
    checks.check_cu_seqlens(op, given, qkv.shape[0], max_seqlen)
    options = _options(op, scale, is_causal, local_window_size, dropout_rate, dropout_rng, return_residual,
                       float8_scale, qkv.shape[-1], max_seqlen)  # fmt: skip
    rng = dropout_rng if options.dropout_rate > 0.0 else None
    table = _check_table(op, relative_bias, qkv.shape[2])
    inputs = Inputs(qkv, relative_bias=table, dropout_rng=rng, cu_seqlens=cu_seqlens)
    return _run(op, inputs, options, implementation)


def _options(
    op, scale, is_causal, window, dropout_rate, dropout_rng, return_residual, float8_scale, head_size, max_seqlen=None
):
    if scale is None and jax.export.is_symbolic_dim(head_size):
        raise ValueError(f"{op}: scale must be a number where the head size is symbolic, {head_size}, got None")
    scale = max(head_size, 1) ** -0.5 if scale is None else checks.check_number(op, "scale", scale)
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if window is not None and not (len(pair) == 2 and all(checks.is_natural(w) for w in pair)):
        raise ValueError(f"{op}: local_window_size must be an integer >= 0 or a pair of them, got {window!r}")
    # Positions are 32-bit, and no sequence is longer than 2^30: a wider window has no effect.
    window = None if window is None else (min(int(pair[0]), 2**30), min(int(pair[1]), 2**30))
    rate = checks.check_dropout(op, dropout_rate, dropout_rng)
    checks.check_flag(op, "is_causal", is_causal)
    checks.check_flag(op, "return_residual", return_residual)
    float8_scale = float8.check_scale(op, "float8_scale", float8_scale)
    return Options(scale, is_causal, window, rate, return_residual, max_seqlen, float8_scale)


def _attend(op, inputs, options, implementation, batched):
    """Checks the arguments that the two padded ops share, and runs. Arrays without a batch axis get one of size 1."""
    scale, is_causal, window, dropout_rate, return_residual, float8_scale = options
    options = _options(op, scale, is_causal, window, dropout_rate, inputs.dropout_rng, return_residual, float8_scale,
                       inputs.query.shape[-1])  # fmt: skip
    if not batched:
        inputs = Inputs(*jax.tree.map(lambda x: x.reshape(1, *x.shape), inputs[:3]), *inputs[3:])
    inputs = _check_masks(op, inputs, options, batched)
    inputs = inputs._replace(relative_bias=_check_table(op, inputs.relative_bias, inputs.query.shape[-2]))
    if options.dropout_rate == 0.0:
        inputs = inputs._replace(dropout_rng=None)
    out = _run(op, inputs, options, implementation)
    return out if batched else jax.tree.map(lambda x: x[0], out)


def _run(op: str, inputs: Inputs, options: Options, implementation: str | None) -> Any:
    plan = attention_vjp.plan_of(op, inputs, options, implementation)
    plans.record(op, inputs, plan)
    return attention_vjp.run(inputs, plan)


def _check_table(op: str, table: Any, heads: int) -> Array | None:
    """Checks the argument `relative_bias`: None, or floats `[N, 2R+1]` or `[1, 2R+1]`."""
    if table is None:
        return None
    table = checks.as_float(op, "relative_bias", table)
    if table.ndim != 2 or table.shape[0] not in (1, heads) or table.shape[1] % 2 != 1:
        raise ValueError(
            f"{op}: relative_bias must have shape [N, 2R+1] or [1, 2R+1], with N={heads} heads and an odd number of"
            f" columns, got {table.shape}"
        )
    return table


def _check_masks(op: str, inputs: Inputs, options: Options, batched: bool) -> Inputs:
    b, t, s, n, _ = attention_vjp.sizes(inputs, options)
    found: dict[str, Array] = {}
    for name, check in (("bias", checks.as_float), ("mask", checks.as_mask)):
        x = getattr(inputs, name)
        if x is not None:
            x = check(op, name, x)
            found[name] = checks.as_broadcast(op, name, x, (b, n, t, s))
    shapes = {
        "query_seq_lengths": (b,),
        "key_value_seq_lengths": (b,),
        "query_segment_ids": (b, t),
        "key_value_segment_ids": (b, s),
    }
    ids = {name: getattr(inputs, name) for name in shapes if name.endswith("segment_ids")}
    wide = [x.dtype for x in ids.values() if isinstance(x, jax.core.Tracer) and checks.may_wrap(x)]
    for name, shape in shapes.items():
        if getattr(inputs, name) is not None:
            x = checks.as_integers(op, name, getattr(inputs, name), saturate=bool(wide) and name in ids)
            if batched or x.shape != shape:  # without a batch, a batch axis of size 1 may be given too
                checks.check_shape(op, name, x, shape if batched else shape[1:])
            found[name] = x.reshape(shape)
    if ("query_segment_ids" in found) != ("key_value_segment_ids" in found):
        given = next(name for name in found if name.endswith("segment_ids"))
        raise ValueError(f"{op}: query_segment_ids and key_value_segment_ids go together, got only {given}")
    if wide:
        query, key = (x.reshape(found[name].shape) for name, x in ids.items())
        found |= zip(ids, _ranks(query, key, wide[0]), strict=True)
    return inputs._replace(**found)


def _ranks(query: Any, key: Any, dtype: Any) -> list[Array]:
    """Returns int32 ids that are equal where the ids [B, T] and [B, S] are. `dtype` is the dtype of one of the two."""
    limits = [jnp.iinfo(x.dtype) for x in (query, key)]
    low, high = max(int(limit.min) for limit in limits), min(int(limit.max) for limit in limits)
    common = [x.clip(x.dtype.type(low), x.dtype.type(high)) for x in (query, key)]
    fitting = [jnp.asarray(x.astype(dtype)) for x in common]
    every = jnp.concatenate(fitting, axis=1)
    # The rank of an id is the count of smaller ones. A number that the other dtype does not have equals no other id.
    return [
        jnp.where(x == y, jnp.sum(every[:, None] < z[:, :, None], axis=2, dtype=jnp.int32), none)
        for x, y, z, none in zip((query, key), common, fitting, (-1, -2), strict=True)
    ]
