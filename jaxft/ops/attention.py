"""dot_product_attention, and the same from packed projections: qkv_attention, varlen_qkv_attention."""

from __future__ import annotations

from typing import Any

import jax

from jaxft.ops import attention_vjp, checks, plans
from jaxft.ops.attention_vjp import Inputs, Options

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
      query_seq_lengths, key_value_seq_lengths: integers `[B]` (without a batch `[]` or `[1]`); what lies beyond is
        padding.
      query_segment_ids, key_value_segment_ids: integers `[B, T]` and `[B, S]` (without a batch also `[T]` and `[S]`),
        both or neither; attention stays within equal ids.
      local_window_size: (left, right), or one number for both: query - left <= key <= query + right.
      dropout_rate: of the probabilities, in [0, 1). What is kept is a pure function of the key and the element's index.
      dropout_rng: a JAX random key, needed where the rate is not 0.
      return_residual: also return the log-sum-exp of the logits, float32 `[B, T, N]`.
      implementation: None for the fastest, "triton", "xla", or "cudnn" where `jax.nn` with cuDNN can do all of this.
        None takes cuDNN on Hopper GPUs for large arrays in 16 bits, where no mask, bias, length or window is given and
        no gradient is asked for; the output then differs in its last bits from that of `jax.value_and_grad`.

    Returns:
      An array of the shape and dtype of `query`, with `return_residual` a pair (output, log-sum-exp).
      A query with nothing to attend to gives exactly 0 and a log-sum-exp of -inf, and its gradients are 0; what is in
      padding (NaN and Inf included) reaches no valid output or gradient. `jax.nn` differs in both.

    Raises:
      TypeError: an array has the wrong kind of dtype (an integer mask, say), or a number or a bool is not one.
      ValueError: a shape does not fit, a number is out of its range, or an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of query, key, value and bias, in memory that grows with T and S, not with their product (but for that
    of a bias of that size). Deterministic, bit by bit, in both directions. float32 products are TF32 on a GPU unless
    `jax.default_matmul_precision` says "highest" or "float32". With None, a kernel of Mosaic GPU computes them on
    Hopper GPUs from packed arrays (`qkv_attention`) in 16 bits, of 256, 384 or 512 positions and heads of 64, with
    nothing more than a mask of keys and dropout, where there are enough heads in all sequences to keep the card busy;
    they then differ in their last bits from those of "triton".
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
            f"{op}: the heads of query must be a multiple of those of key, got {query.shape[-2]} and {key.shape[-2]}"
        )
    inputs = Inputs(query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths, query_segment_ids,
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
    """`dot_product_attention` from the packed projection, read in place: no slice and no copy for the kernels.

    Equivalent to::

      dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, mask, ...)

    Args:
      qkv: `[B, T, 3, N, H]` (or `[T, 3, N, H]`), N >= 1, float32, float16 or bfloat16.
      implementation: as in `dot_product_attention`; None takes cuDNN, which needs copies, from 8,192 positions on.
      The other arguments: as in `dot_product_attention`, with S = T and K = N.

    Returns:
      `[B, T, N, H]` of the dtype of `qkv`, with `return_residual` also the log-sum-exp, float32 `[B, T, N]`.

    Raises, gradients, edges and source: as `dot_product_attention`.
    """
    op = "qkv_attention"
    qkv = checks.as_float(op, "qkv", qkv)
    if qkv.ndim not in (4, 5) or qkv.shape[-3] != 3 or qkv.shape[-2] < 1:
        raise ValueError(f"{op}: qkv must have shape [B, T, 3, N, H] or [T, 3, N, H] with N >= 1, got {qkv.shape}")
    inputs = Inputs(qkv, None, None, bias, mask, query_seq_lengths, key_value_seq_lengths, query_segment_ids,
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

    A sequence's result does not depend, in any bit, on what the others hold, how long they are or where it lies; with
    another number of sequences or rows the kernels may have other blocks, which round differently.

    Args:
      qkv: `[M, 3, N, H]`, N >= 1, float32, float16 or bfloat16.
      cu_seqlens: integers `[B + 1]`, ascending from 0: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] of qkv.
        Rows from cu_seqlens[B] on belong to no sequence and give 0.
      max_seqlen: a static bound of the sequences' lengths. Where `cu_seqlens` is traced (an argument of `jit`), and
        nothing can be raised, rows beyond it in a longer one take no part and give 0, and a sequence that goes beyond
        M is cut there; if `cu_seqlens` does not ascend from 0, the result is undefined.
      dropout_rate, dropout_rng: an element's index is that in the padded [B, N, max_seqlen, max_seqlen].
      The other arguments: as in `dot_product_attention`.

    Returns:
      `[M, N, H]` of the dtype of `qkv`, with `return_residual` also the log-sum-exp, float32 `[M, N]`.

    Raises: as `dot_product_attention`; ValueError also where `cu_seqlens`, unless it is traced, does not ascend from 0
      or goes beyond M, or a sequence is longer than `max_seqlen`.

    Gradients and edges: as `dot_product_attention`.
    """
    op = "varlen_qkv_attention"
    qkv = checks.as_float(op, "qkv", qkv)
    if qkv.ndim != 4 or qkv.shape[1] != 3 or qkv.shape[2] < 1:
        raise ValueError(f"{op}: qkv must have shape [M, 3, N, H] with N >= 1, got {qkv.shape}")
    if qkv.shape[0] >= 2**31:
        raise NotImplementedError(f"{op}: qkv must have fewer than 2^31 rows, whose numbers fit int32, got {qkv.shape}")
    given, cu_seqlens = cu_seqlens, checks.as_integers(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must have shape [B + 1], got {cu_seqlens.shape}")
    if not checks.is_natural(max_seqlen):
        raise ValueError(f"{op}: max_seqlen must be a Python integer >= 0, got {max_seqlen!r}")
    max_seqlen = int(max_seqlen)
    checks.check_cu_seqlens(op, given, qkv.shape[0], max_seqlen)
    options = _options(op, scale, is_causal, local_window_size, dropout_rate, dropout_rng, return_residual,
                       qkv.shape[-1], max_seqlen)  # fmt: skip
    rng = dropout_rng if options.dropout_rate > 0.0 else None
    return _run(op, Inputs(qkv, dropout_rng=rng, cu_seqlens=cu_seqlens), options, implementation)


def _options(op, scale, is_causal, window, dropout_rate, dropout_rng, return_residual, head_size, max_seqlen=None):
    scale = max(head_size, 1) ** -0.5 if scale is None else checks.check_number(op, "scale", scale)
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if window is not None and not (len(pair) == 2 and all(checks.is_natural(w) for w in pair)):
        raise ValueError(f"{op}: local_window_size must be an integer >= 0 or a pair of them, got {window!r}")
    # No array is longer than 2^30, and the positions are 32-bit.
    window = None if window is None else (min(int(pair[0]), 2**30), min(int(pair[1]), 2**30))
    rate = checks.check_dropout(op, dropout_rate, dropout_rng)
    checks.check_flag(op, "is_causal", is_causal)
    checks.check_flag(op, "return_residual", return_residual)
    return Options(scale, is_causal, window, rate, return_residual, max_seqlen)


def _attend(op, inputs, options, implementation, batched):
    """Checks what the entry points share, and runs. Arrays without a batch get one of 1."""
    scale, is_causal, window, dropout_rate, return_residual = options
    options = _options(op, scale, is_causal, window, dropout_rate, inputs.dropout_rng, return_residual,
                       inputs.query.shape[-1])  # fmt: skip
    if not batched:
        inputs = Inputs(*jax.tree.map(lambda x: x[None], inputs[:3]), *inputs[3:])
    inputs = _check_masks(op, inputs, options, batched)
    if options.dropout_rate == 0.0:
        inputs = inputs._replace(dropout_rng=None)
    out = _run(op, inputs, options, implementation)
    return out if batched else jax.tree.map(lambda x: x[0], out)


def _run(op: str, inputs: Inputs, options: Options, implementation: str | None) -> Any:
    plan = attention_vjp.plan_of(op, inputs, options, implementation)
    plans.record(op, inputs, plan)
    return attention_vjp.run(inputs, plan)


def _check_masks(op: str, inputs: Inputs, options: Options, batched: bool) -> Inputs:
    b, t, s, n, _ = attention_vjp.sizes(inputs, options)
    found: dict[str, Array] = {}
    for name, check in (("bias", checks.as_float), ("mask", checks.as_mask)):
        x = getattr(inputs, name)
        if x is not None:
            x = check(op, name, x)
            checks.check_broadcasts(op, name, x, (b, n, t, s))
            found[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    shapes = {
        "query_seq_lengths": (b,),
        "key_value_seq_lengths": (b,),
        "query_segment_ids": (b, t),
        "key_value_segment_ids": (b, s),
    }
    for name, shape in shapes.items():
        if getattr(inputs, name) is not None:
            x = checks.as_integers(op, name, getattr(inputs, name))
            if batched or x.shape != shape:  # without a batch, one of 1 is as good as none
                checks.check_shape(op, name, x, shape if batched else shape[1:])
            found[name] = x.reshape(shape)
    if ("query_segment_ids" in found) != ("key_value_segment_ids" in found):
        given = next(name for name in found if name.endswith("segment_ids"))
        raise ValueError(f"{op}: query_segment_ids and key_value_segment_ids go together, got only {given}")
    return inputs._replace(**found)
