"""Flash attention, forward: tiles of queries against tiles of keys with an online softmax.

Dao et al., "FlashAttention" (2022), section 3.1, and "FlashAttention-2" (2023), section 3.1. It takes the place of
FasterTransformer's split heads, two batched matrix products, masked softmax and merge heads: queries, keys and values
are read where they lie, a packed [B,T,3,N,H] included, and the output is written as [B,T,N,H].

Work: 4 * B * N * T * S * H floating-point operations. Bytes: q, k, v and the output once (k and v of a head are
re-read for every tile of queries, from the L2 cache).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning import AttentionConfig, next_power_of_2

Array = jax.Array

MAX_HEAD_SIZE = 256


def unsupported(head_size: int, **arrays: Array) -> str | None:
    if not 1 <= head_size <= MAX_HEAD_SIZE:
        return f"the head size is {head_size}, the kernel takes at most {MAX_HEAD_SIZE}"
    return common.unsupported_dtype(**arrays)


def _fwd_kernel(
    q_ref, k_ref, v_ref, full_ref, end_ref, mask_ref, out_ref, lse_ref=None,
    *, scale: float, group: int, k_head: int, v_head: int, block_q: int, block_k: int, precision,
):  # fmt: skip
    head, batch = pl.program_id(1), pl.program_id(2)
    start = pl.program_id(0) * block_q
    _, query_length, _, head_size = out_ref.shape
    key_length = k_ref.shape[1]
    width = max(16, next_power_of_2(head_size))
    in_head = None if width == head_size else (common.positions(0, width) < head_size)[None, :]
    in_queries = common.positions(start, block_q) < query_length

    def tile(row, rows, head):
        return batch, common.span(row, rows), head, common.span(0, width)

    def both(in_rows):
        return in_rows[:, None] if in_head is None else in_rows[:, None] & in_head

    q = common.load(q_ref.at[tile(start, block_q, head)], mask=both(in_queries), other=0.0)  # [block_q, width]
    # The maximum is taken before the scale, which therefore must be positive.
    if scale <= 0.0:
        q = -q if scale < 0.0 else jnp.zeros_like(q)
    to_log2 = (abs(scale) or 1.0) * math.log2(math.e)

    def visit(j, carry, *, masked):
        acc, total, top = carry
        row = jnp.int32(j) * block_k
        if masked:
            column = common.positions(row, block_k)
            if mask_ref is None:
                allowed = column < end
            else:
                allowed = common.load(
                    mask_ref.at[batch, common.span(row, block_k)], mask=column < key_length, other=False
                )
            inside = both(allowed)  # what is not attended to is not read, so a NaN there cannot spread
        else:
            inside = None if in_head is None else jnp.broadcast_to(in_head, (block_k, width))
        other = None if inside is None else 0.0
        k = common.load(k_ref.at[tile(row, block_k, k_head + head // group)], mask=inside, other=other)
        logits = common.dot(q, k, trans_b=True, precision=precision)  # [block_q, block_k], not yet scaled
        if masked:
            logits = jnp.where(allowed[None, :], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1) * to_log2)
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        p = common.exp2(logits * to_log2 - shift[:, None])
        rescale = common.exp2(top - shift)
        v = common.load(v_ref.at[tile(row, block_k, v_head + head // group)], mask=inside, other=other)
        acc = acc * rescale[:, None] + common.dot(p.astype(v.dtype), v, precision=precision)
        return acc, total * rescale + jnp.sum(p, axis=1), new_top

    if full_ref is None or end_ref is None:
        edge, stop = key_length // block_k, pl.cdiv(key_length, block_k)
        end = key_length
    else:
        end = common.load(end_ref.at[batch])
        edge = lax.div(common.load(full_ref.at[batch]), jnp.int32(block_k))
        stop = lax.div(end + jnp.int32(block_k - 1), jnp.int32(block_k))
    carry = (
        jnp.zeros((block_q, width), jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        jnp.full((block_q,), -jnp.inf, jnp.float32),
    )
    # Two loops: masks in every tile would cost 20-60 % (H200, 2026-11-20).
    carry = lax.fori_loop(0, edge, functools.partial(visit, masked=False), carry)
    if full_ref is not None or stop > edge:
        carry = lax.fori_loop(edge, stop, functools.partial(visit, masked=True), carry)
    acc, total, top = carry
    safe_total = jnp.where(total == 0.0, 1.0, total)  # a row with nothing to attend to gives 0
    out = acc / safe_total[:, None]
    common.store(out_ref.at[tile(start, block_q, head)], out.astype(out_ref.dtype), mask=both(in_queries))
    if lse_ref is not None:
        lse = jnp.where(total == 0.0, -jnp.inf, top * math.log(2.0) + jnp.log(safe_total))
        common.store(lse_ref.at[batch, common.span(start, block_q), head], lse, mask=in_queries)


def forward(
    query: Array,
    key: Array | None,
    value: Array | None,
    full: Array | None,
    end: Array | None,
    mask: Array | None,
    *,
    scale: float,
    return_residual: bool,
    precision: str,
    config: AttentionConfig,
    interpret: bool,
) -> list[Array]:
    """query [B,T,N,H], key and value [B,S,K,H], or the packed [B,T,3,N,H] as `query` with key and value None.

    full and end [B] int32: keys before full[b] are all attended to, keys from end[b] on are not, and between the two
    `mask` [B,S] bool decides (without a mask, full and end are the same; without either, all keys are attended to).
    Returns [out [B,T,N,H]] and, if asked for, the log-sum-exp
    [B,T,N] in float32. `precision` of float32 products: "tf32" or "float32".
    """
    batch, length, heads, size = (*query.shape[:2], *query.shape[-2:])
    if key is None or value is None:  # heads 0..N-1 of the packed array are q, the next N are k, the last N are v
        query = key = value = query.reshape(batch, length, 3 * heads, size)
        kv_heads, k_head, v_head = heads, heads, 2 * heads
    else:
        kv_heads, k_head, v_head = key.shape[2], 0, 0
    outputs = [jax.ShapeDtypeStruct((batch, length, heads, size), query.dtype)]
    if return_residual:
        outputs.append(jax.ShapeDtypeStruct((batch, length, heads), jnp.float32))
    kernel = functools.partial(
        _fwd_kernel,
        scale=scale,
        group=heads // kv_heads,
        k_head=k_head,
        v_head=v_head,
        block_q=config.block_q,
        block_k=config.block_k,
        precision=lax.Precision.HIGHEST if precision == "float32" else None,
    )
    return common.launch(
        kernel,
        (pl.cdiv(length, config.block_q), heads, batch),
        [query, key, value, full, end, mask],
        outputs,
        name="attention_fwd",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
