"""Backward pass of flash attention. It computes the probabilities again from the inputs and the log-sum-exp.

The logits are s, the probabilities are `p = exp(s - lse)`, and delta is the sum of `dout * out` over a row minus the
gradient of the log-sum-exp of the row. The gradients are::

  dv = p^T dout
  dp = dout v^T
  ds = p * (dp - delta)    # also the gradient of the bias
  dq = scale * ds k
  dk = scale * ds^T q

The first kernel computes dq: each of its tiles holds queries and sums over the keys. The second kernel computes dk and
dv: each of its tiles holds keys and sums over the queries and over the query heads that share the keys. There are no
atomic additions. If one tile holds all keys, the second kernel alone computes all three gradients, which takes 5
matmuls of the size of the two matmuls of the forward pass instead of 7. A third kernel computes the gradient of a bias
`[B|1, N|1, T, S]`. Apart from that gradient, nothing of size `[T, S]` is stored. For a bias by relative position, a
kernel sums ds over the blocks of each diagonal of blocks, and XLA sums the diagonals of these sums.

Accuracy: with float32, with a float32 bias and with short rows, the rounding of `out` would be visible in delta. The
kernels then compute delta as the sum of `p * dp`, and divide p by its sum, which is 1 except for rounding. This takes 2
more matmuls in the kernel for queries and none in a single kernel for all three gradients, which always does it.

The gradient of a packed `[B, T, 3, N, H]` is one array of that layout, and each kernel writes its part. On Hopper,
`jaxft.kernels.mosaic_gpu.attention_backward` computes this gradient with 5 matmuls for some lengths.

Source: Dao, "FlashAttention-2" (2023), section 3.2.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import attention_problem as parts
from jaxft.kernels.triton import attention_spans, common
from jaxft.kernels.triton.attention_problem import Options, Pairs, Problem, Refs, Rules, Span
from jaxft.tuning.table import AttentionConfig

# The greatest number of keys for which delta is the sum of p * dp with 16-bit inputs. With more keys, delta from the
# 16-bit output is accurate enough: errors are a third of what the tests allow.
_SHORT = 128
_PROGRAMS = 512  # the least number of programs of a bias kernel, if there are enough sequences to split the sum
_SHARED = 3 + len(Refs._fields)  # the number of operands that are first in every attention kernel


class _Rows(NamedTuple):
    """A tile of queries with its place and its values. `total` is None if `top` is the log-sum-exp."""

    start: Any  # see `Place`, as for offset, index and batch
    offset: Any
    index: Any
    batch: Any
    head: Any
    span: Span
    in_rows: Array | None  # which rows the sequence has; None if it has all of them
    q: Array
    dout: Array
    top: Array  # the greatest logit or the log-sum-exp; inf for a row that attends to no key, so that p is 0
    total: Array | None  # base-2 logarithm of the sum of exponentials relative to `top`
    attends: Array  # which rows attend to any key
    factor: Array | None = None  # factor of the probabilities that makes their sum 1


def _rows(
    p: Problem, refs: Refs, q_ref, dout_ref, top_ref, total_ref, batch, head, tile, span: Span, block: int
) -> _Rows:
    batch, start, index, offset, length = parts.load_place(p, refs, batch, tile, block, p.query_length)
    in_rows = None
    if p.query_length % block or p.varlen:
        in_rows = common.positions(start, block) < length
    q = parts.load_tile(p, q_ref, index, offset + start, block, head, in_rows)
    dout = parts.load_tile(p, dout_ref, index, offset + start, block, head, in_rows)
    top = _load_rows(top_ref, index, head, offset + start, block, in_rows, -jnp.inf)
    total = _load_rows(total_ref, index, head, offset + start, block, in_rows, 0.0)
    attends = top != -jnp.inf
    top = jnp.where(attends, top, jnp.inf)
    return _Rows(start, offset, index, batch, head, span, in_rows, q, dout, top, total, attends)


def _load_rows(ref, index, head, row, block: int, in_rows: Array | None, other: float):
    """Loads one number for each row, `[block]`, with `other` outside of `in_rows`. Returns None if `ref` is None."""
    if ref is None:
        return None
    return common.load(ref.at[index, head, common.span(row, block)], mask=in_rows, other=other)


def _select(allowed: Any, x: Array) -> Array:
    return x if allowed is None else jnp.where(allowed, x, 0.0)


def _allowed(p: Problem, refs: Refs, pairs: Pairs, attends: Array) -> Any:
    """Returns which pairs attend, for queries that attend to any key. A key that these do not attend to may be NaN."""
    allowed = parts.allowed(p, refs, pairs)
    return attends if allowed is None else allowed & attends


def _inverse(p: Problem, total: Array) -> Array:
    return parts.reciprocal(p, jnp.where(total == 0.0, 1.0, total))


def _logit_gradient(p: Problem, refs: Refs, k_ref, v_ref, rows: _Rows, delta, j, block_k: int, **kind: bool):
    """Computes the gradient of the logits of a tile of queries and key block `j`. Returns it and the keys."""
    weights, dp, k = _probabilities(p, refs, k_ref, v_ref, rows, j, block_k, **kind)
    return weights * (dp - delta[:, None]), k


def _probabilities(
    p: Problem, refs: Refs, k_ref, v_ref, rows: _Rows, j, block_k: int, *, edge: bool, far: bool = False
):  # fmt: skip
    """Computes the probabilities of a tile of queries and key block `j`. Returns them, their gradient and the keys."""
    row, kv_head = jnp.int32(j) * block_k, rows.head // p.group
    columns, in_columns = common.positions(row, block_k), None
    if edge:
        in_columns = parts.in_span(p, rows.span, columns)
        in_columns = parts.in_key_mask(p, refs, rows.batch, columns, in_columns)
    pairs = Pairs(
        rows.batch,
        rows.head,
        common.positions(rows.start, rows.q.shape[0])[:, None],
        columns[None, :],
        None if rows.in_rows is None else rows.in_rows[:, None],
        None if in_columns is None else in_columns[None, :],
        rows.start,
        row,
        far,
    )
    allowed = _allowed(p, refs, pairs, rows.attends[:, None]) if edge else None
    k = parts.load_tile(p, k_ref, rows.index, rows.offset + row, block_k, p.k_head + kv_head, in_columns)
    v = parts.load_tile(p, v_ref, rows.index, rows.offset + row, block_k, p.v_head + kv_head, in_columns)
    if edge and p.by_pairs:  # a NaN in a key or value that no query attends to must not reach the gradients
        used = parts.any_of(allowed, axis=0)
        k, v = parts.clear(k, used), parts.clear(v, used)
    products = parts.dot(p, rows.q, k, trans_b=True)  # [block_q, block_k]
    total = None if rows.total is None else rows.total[:, None]
    weights = parts.probabilities(p, refs, pairs, products, rows.top[:, None], total)
    weights = _select(allowed, weights if rows.factor is None else weights * rows.factor[:, None])
    dp = parts.drop(p, refs, pairs, parts.dot(p, rows.dout, v, trans_b=True))
    return weights, dp * p.kept_scale if p.options.dropout_rate > 0.0 else dp, k


def _dq_kernel(*refs, p: Problem, **blocks: int):
    """Computes the gradient of the queries, and delta for the other kernels."""
    parts.for_each_tile(functools.partial(_dq_tile, refs=refs, p=p, **blocks), p, refs[_SHARED - 1])


def _dq_tile(tile, head, batch, *, refs, p: Problem, block_q: int, block_k: int):
    """Computes the gradient and delta of one tile of queries.

    Without `out_ref`, a first loop over the keys sums the probabilities and p * dp. The kernel then also stores the
    factors that make each sum of probabilities 1.
    """
    q_ref, k_ref, v_ref, *rest = refs[:_SHARED]
    dout_ref, top_ref, total_ref, out_ref, dlse_ref, dq_ref, delta_ref, *factor_ref = refs[_SHARED:]
    refs = Refs(*rest)
    span = parts.load_span(refs.spans, batch, tile, p.query_length, p.key_length, block_k, full=not p.pair_mask)
    rows = _rows(p, refs, q_ref, dout_ref, top_ref, total_ref, batch, head, tile, span, block_q)
    row = rows.offset + rows.start
    leading = p.options.window[0] is not None or refs.query_ids is not None
    near = parts.near_blocks(p, rows.start, block_q, block_k)
    if out_ref is None:

        def add(j, sums, **kind):
            weights, dp, _ = _probabilities(p, refs, k_ref, v_ref, rows, j, block_k, **kind)
            return sums[0] + jnp.sum(weights, axis=1), sums[1] + jnp.sum(weights * dp, axis=1)

        total, delta = parts.visit_all(span, block_k, leading, add, (jnp.zeros((block_q,), jnp.float32),) * 2, near)
        factor = jnp.where(rows.attends, _inverse(p, total), 1.0)  # padding rows may hold NaN
        delta = delta * factor
        rows = rows._replace(factor=factor)
        common.store(factor_ref[0].at[rows.index, head, common.span(row, block_q)], factor, mask=rows.in_rows)
    else:
        out = parts.load_tile(p, out_ref, rows.index, row, block_q, head, rows.in_rows)
        delta = jnp.sum(rows.dout.astype(jnp.float32) * out.astype(jnp.float32), axis=1)
    if dlse_ref is not None:
        delta = delta - _load_rows(dlse_ref, rows.index, head, row, block_q, rows.in_rows, 0.0)
    delta = jnp.where(rows.attends, delta, 0.0)
    common.store(delta_ref.at[rows.index, head, common.span(row, block_q)], delta, mask=rows.in_rows)

    def visit(j, dq, **kind):
        ds, k = _logit_gradient(p, refs, k_ref, v_ref, rows, delta, j, block_k, **kind)
        return parts.add(p, dq, parts.dot(p, ds.astype(k.dtype), k))

    dq = parts.visit_all(span, block_k, leading, visit, jnp.zeros((block_q, p.width), jnp.float32), near)
    dq = jnp.where(rows.attends[:, None], dq * p.options.scale, 0.0)
    parts.store_tile(p, dq_ref, rows.index, row, head, dq, rows.in_rows)


def _dkv_kernel(*refs, p: Problem, block_q: int, block_k: int, programs: int, tiles: int, with_dq: bool, **static):
    """Computes the gradients of keys and values and, with `with_dq`, of the queries too."""
    spans_ref = refs[_SHARED - 1]

    def compute(tile, head, batch):
        span = parts.load_span(spans_ref, batch, tile, p.key_length, p.query_length, block_q, full=not p.pair_mask)
        step = functools.partial(
            _dkv_tile, tile, head, batch, span, refs=refs, p=p, block_q=block_q, own_keys=block_k, with_dq=with_dq,
            **static,
        )  # fmt: skip
        # Half a tile is enough if the keys end in its first half. This is used with a single tile of keys only, whose
        # `start` is 0 for either size.
        ends = with_dq and not p.varlen and (p.rules.key_lengths is not None or p.key_mask)
        parts.fewest_keys(step, span.end if ends else p.key_length, block_k)

    parts.for_each_tile(compute, p, spans_ref, programs, tiles, p.kv_heads)


def _dkv_tile(
    tile, kv_head, batch, span: Span, *, refs, p: Problem, block_q: int, block_k: int, own_keys: int, packed: bool,
    with_dq: bool, single: bool, columns: bool, keeps_delta: bool,
):  # fmt: skip
    """Computes the gradients of one tile of keys and values.

    Of the `own_keys` keys in the tile, only the first `block_k`, all or half of them, may take part. `packed` says that
    there is one gradient in the packed layout, `with_dq` that the gradient of the queries is computed too, and `single`
    that one block holds all queries. `columns` asks for the sums over the queries of the gradient of the logits, for a
    bias that has one element for each key. `keeps_delta` asks for delta, for the kernel of a bias by relative position.
    """
    q_ref, k_ref, v_ref, *rest = refs[:_SHARED]
    dout_ref, top_ref, total_ref, factor_ref, delta_ref, dlse_ref, _, *outputs = refs[_SHARED:]
    delta_out_ref: Any = outputs.pop() if keeps_delta else None
    sums_ref: Any = outputs.pop() if columns else None
    dq_ref, dk_ref, dv_ref = outputs * 3 if packed else [None] * (not with_dq) + outputs
    refs = Refs(*rest)
    ragged = bool(p.key_length % block_k)
    batch, start, index, offset, length = parts.load_place(p, refs, batch, tile, own_keys, p.key_length)
    positions = common.positions(start, block_k)
    stored = positions < length if ragged or p.varlen else None
    unused = None if block_k == own_keys else positions + block_k < length
    in_keys = stored
    if p.rules.key_lengths is not None or p.key_mask:
        in_keys = parts.in_key_mask(p, refs, batch, positions, positions < span.end)
    k = parts.load_tile(p, k_ref, index, offset + start, block_k, p.k_head + kv_head, in_keys)
    v = parts.load_tile(p, v_ref, index, offset + start, block_k, p.v_head + kv_head, in_keys)
    # The range of queries whose gradient this program writes. A packed sequence longer than max_seqlen has several
    # tiles, and each writes the queries at its own rows.
    query_start, query_stop = jnp.int32(0), jnp.int32(p.query_length)
    if p.varlen:
        query_start, query_stop = start, jnp.minimum(length, start + block_k)
    # A single block of queries is visited even if no pair in it attends, so it may need masks.
    masked = single and refs.spans is not None
    # Whether there may be keys that no query attends to. Such keys may hold NaN.
    unused_keys = masked or p.by_pairs or p.options.window != (None, None)
    # Pairs are [block_k, block_q], so that p and ds are operands of the next matmuls without a copy in shared memory.
    # With the gradient of the queries, pairs are [block_q, block_k], so that sums over keys stay within a warp.
    query_axis, key_axis = (0, 1) if with_dq else (1, 0)

    def of_queries(x):
        return None if x is None else jnp.expand_dims(x, key_axis)

    def of_keys(x):
        return None if x is None else jnp.expand_dims(x, query_axis)

    def product(x, y):
        """Computes the matmul of a tile of queries and a tile of keys, in the layout of the pairs."""
        return parts.dot(p, x, y, trans_b=True) if with_dq else parts.dot(p, y, x, trans_b=True)

    def visit(i, carry, *, edge, head, far=False):
        dk, dv, *sums = carry
        row = jnp.int32(i) * block_q
        rows, in_rows = common.positions(row, block_q), None
        if edge:
            in_rows = (rows >= span.first) & (rows < span.last)
        top = _load_rows(top_ref, index, head, offset + row, block_q, in_rows, -jnp.inf)
        total = _load_rows(total_ref, index, head, offset + row, block_q, in_rows, 0.0)
        q = parts.load_tile(p, q_ref, index, offset + row, block_q, head, in_rows)
        dout = parts.load_tile(p, dout_ref, index, offset + row, block_q, head, in_rows)
        attends = top != -jnp.inf
        if edge:
            q, dout = parts.clear(q, attends), parts.clear(dout, attends)
        idle_rows = edge or masked or refs.bias is not None
        if idle_rows:
            top = jnp.where(attends, top, jnp.inf)
        pairs = Pairs(
            batch, head, of_queries(rows), of_keys(positions), of_queries(in_rows), of_keys(in_keys), row, start, far
        )
        allowed = None
        if edge:
            allowed = _allowed(p, refs, pairs, of_queries(attends))
        elif with_dq:
            # For the gradient of the queries, keys that do not take part need probability 0. Without that gradient,
            # their own gradients are set to 0 at the end.
            allowed = of_keys(in_keys)
        products = product(q, k)
        weights = parts.probabilities(p, refs, pairs, products, of_queries(top), of_queries(total))
        weights = _select(allowed, weights)
        if factor_ref is not None:
            weights = weights * of_queries(_load_rows(factor_ref, index, head, offset + row, block_q, in_rows, 1.0))
        elif with_dq:
            # If `top` is the greatest logit, this normalizes the weights. If `top` is the log-sum-exp, this removes a
            # rounding error, which ds would magnify.
            weights = weights * of_queries(_inverse(p, jnp.sum(weights, axis=key_axis)))
        kept = parts.drop(p, refs, pairs, weights).astype(dout.dtype)
        # The order of the next two matmuls. With dq, dp comes first, because `kept` must be copied to shared memory for
        # the other one. Without dq, dv comes first.
        # H200, without dq: dp first is 15 % slower, 2026-11-22
        if with_dq:
            dp = product(dout, v)
        dv = parts.add(p, dv, parts.dot(p, kept, dout, trans_a=with_dq))
        if not with_dq:
            dp = product(dout, v)
        dp = parts.drop(p, refs, pairs, dp)
        if p.options.dropout_rate > 0.0:
            dp = dp * p.kept_scale
        if unused_keys:
            dp = _select(allowed, dp)
        if with_dq:
            delta = jnp.sum(weights * dp, axis=key_axis)
            if dlse_ref is not None:
                delta = delta - _load_rows(dlse_ref, index, head, offset + row, block_q, in_rows, 0.0)
            if idle_rows:
                delta = jnp.where(attends, delta, 0.0)
            here = (query_start <= rows) & (rows < query_stop) if edge else None
            if delta_out_ref is not None:
                common.store(delta_out_ref.at[index, head, common.span(offset + row, block_q)], delta, mask=here)
        else:
            delta = _load_rows(delta_ref, index, head, offset + row, block_q, in_rows, 0.0)
        ds = weights * (dp - of_queries(delta))
        if columns:
            sums = [sums[0] + jnp.sum(ds, axis=query_axis)]
        ds = ds.astype(q.dtype)
        dk = parts.add(p, dk, parts.dot(p, ds, q, trans_a=with_dq))
        if with_dq:
            used_k = k
            if edge and unused_keys:
                used_k = parts.clear(k, parts.any_of(allowed, axis=query_axis))
            dq = parts.dot(p, ds, used_k) * p.options.scale
            parts.store_tile(p, dq_ref, index, offset + row, head, dq, here)
        return dk, dv, *sums

    def visit_head(g, carry):
        head = kv_head * p.group + jnp.int32(g)
        step = functools.partial(visit, head=head)
        begin = (*carry, *[jnp.zeros((block_k,), jnp.float32)] * columns)
        if single:
            full = p.query_length == block_q and (refs.spans is None or p.by_keys) and not p.pair_mask
            dk, dv, *sums = step(lax.div(query_start, jnp.int32(block_q)), begin, edge=not full)
        else:
            leading = p.options.window[1] is not None or refs.query_ids is not None
            near = parts.near_blocks(p, start, block_k, block_q)
            dk, dv, *sums = parts.visit_all(span, block_q, leading, step, begin, near)
        if columns:
            total = _select(in_keys, sums[0])
            common.store(sums_ref.at[batch, head, common.span(start, block_k)], total, mask=stored)
            if unused is not None:
                place = batch, head, common.span(start + block_k, block_k)
                common.store(sums_ref.at[place], jnp.zeros_like(total), mask=unused)
        if with_dq and refs.spans is not None and not single:  # queries outside of the span attend to no key: dq is 0

            def clear(i, _):
                row = jnp.int32(i) * block_q
                rows = common.positions(row, block_q)
                here = (query_start <= rows) & (rows < query_stop)
                zeros = jnp.zeros((block_q, p.width), dq_ref.dtype)
                parts.store_tile(p, dq_ref, index, offset + row, head, zeros, here)

            first, last = span.blocks(block_q)
            lax.fori_loop(lax.div(query_start, jnp.int32(block_q)), first, clear, None)
            last = jnp.maximum(last, lax.div(query_start, jnp.int32(block_q)))
            lax.fori_loop(last, lax.div(query_stop + jnp.int32(block_q - 1), jnp.int32(block_q)), clear, None)
        return dk, dv

    carry = (jnp.zeros((block_k, p.width), jnp.float32),) * 2
    carry = visit_head(0, carry) if p.group == 1 else lax.fori_loop(0, p.group, visit_head, carry)
    gradients = ((dk_ref, p.k_head, carry[0] * p.options.scale), (dv_ref, p.v_head, carry[1] * p.kept_scale))
    for ref, first_head, gradient in gradients:
        if in_keys is not None:
            gradient = jnp.where(in_keys[:, None], gradient, 0.0)
        parts.store_tile(p, ref, index, offset + start, first_head + kv_head, gradient, stored)
        if unused is not None:
            zeros = jnp.zeros_like(gradient)
            parts.store_tile(p, ref, index, offset + start + block_k, first_head + kv_head, zeros, unused)


def _bias_gradient(p: Problem, refs, batch, head, tile, span: Span, j, block_q: int, block_k: int) -> Array:
    """Computes the gradient of the logits of a tile of queries and key block `j`. `refs` are the kernel's refs."""
    q_ref, k_ref, v_ref, *rest = refs[:_SHARED]
    dout_ref, top_ref, total_ref, factor_ref, delta_ref, _ = refs[_SHARED:]
    refs = Refs(*rest)
    rows = _rows(p, refs, q_ref, dout_ref, top_ref, total_ref, batch, head, tile, span, block_q)
    rows = rows._replace(q=parts.clear(rows.q, rows.attends), dout=parts.clear(rows.dout, rows.attends))
    row = rows.offset + rows.start
    # The kernel for keys and values stores no delta in blocks of queries that attend to no key.
    delta = _load_rows(delta_ref, rows.index, head, row, block_q, rows.in_rows, 0.0)
    delta = jnp.where(rows.attends, delta, 0.0)
    if factor_ref is not None:
        factor = _load_rows(factor_ref, rows.index, head, row, block_q, rows.in_rows, 1.0)
        rows = rows._replace(factor=factor)
    return _logit_gradient(p, refs, k_ref, v_ref, rows, delta, j, block_k, edge=True)[0]


def _dbias_kernel(*refs, p: Problem, block_q: int, block_k: int, key_tiles: int):
    """Computes a tile of the gradient of a bias `[B|1, N|1, T, S]`, summed over the sequences and heads that share it.

    The result is partial sums, `[programs, B|1, N|1, T, S]`. Program i sums over every `programs`-th sequence, from i.
    """
    dbias_ref, spans_ref = refs[-1], refs[_SHARED - 1]
    tile, j = lax.div(pl.program_id(0), jnp.int32(key_tiles)), lax.rem(pl.program_id(0), jnp.int32(key_tiles))
    programs, bias_batches, bias_heads, _, _ = dbias_ref.shape
    bias_head, program = pl.program_id(1), lax.rem(pl.program_id(2), jnp.int32(programs))
    bias_batch = lax.div(pl.program_id(2), jnp.int32(programs))
    heads, batches = (1 if bias_heads > 1 else p.heads), (1 if bias_batches > 1 else p.batch)

    def of_sequence(b, total):
        batch = bias_batch + program + jnp.int32(b) * programs
        span = parts.load_span(spans_ref, batch, tile, p.query_length, p.key_length, block_k, full=False)
        begin, end = span.blocks(block_k)

        def of_head(n, total):
            return total + _bias_gradient(p, refs, batch, bias_head + n, tile, span, j, block_q, block_k)

        return lax.fori_loop(0, jnp.where((begin <= j) & (j < end), jnp.int32(heads), 0), of_head, total)

    share = lax.div(batches + (programs - 1) - program, jnp.int32(programs))
    total = lax.fori_loop(0, share, of_sequence, jnp.zeros((block_q, block_k), jnp.float32))
    own = common.tile((p.query_length, p.key_length), tile * block_q, j * block_k, (block_q, block_k))
    place = program, bias_batch, bias_head, *own.place
    common.store(dbias_ref.at[place], total.astype(dbias_ref.dtype), mask=own.inside)


def _diagonals_kernel(*refs, p: Problem, block_q: int, block_k: int, first: int, tiles: int):
    """Sums the gradient of the logits over the square blocks of one diagonal, for a bias by relative position.

    The result is partial sums, `[programs, N, diagonals, block, block]`. The key block of a tile of queries is its own
    number plus `first` plus the number of the diagonal. Program i sums over every `programs`-th tile, from i; `tiles`
    is the number of all tiles of queries.
    """
    out_ref, spans_ref = refs[-1], refs[_SHARED - 1]
    diagonal, head, program = (pl.program_id(axis) for axis in range(3))
    programs, of_sequence = jnp.int32(out_ref.shape[0]), jnp.int32(pl.cdiv(p.query_length, block_q))

    def add(i, total):
        item = program + jnp.int32(i) * programs
        batch, tile = (item, jnp.int32(0)) if p.varlen else (lax.div(item, of_sequence), lax.rem(item, of_sequence))
        span = parts.load_span(spans_ref, batch, tile, p.query_length, p.key_length, block_k, full=False)
        start = parts.load_place(p, Refs(*refs[3:_SHARED]), batch, tile, block_q, p.query_length).start
        j = lax.div(start, jnp.int32(block_q)) + diagonal + first
        begin, end = span.blocks(block_k)

        def of_block(_, total):
            return total + _bias_gradient(p, refs, batch, head, tile, span, j, block_q, block_k)

        return lax.fori_loop(0, jnp.where((begin <= j) & (j < end), jnp.int32(1), 0), of_block, total)

    share = lax.div(jnp.int32(tiles - 1) + programs - program, programs)
    total = lax.fori_loop(0, share, add, jnp.zeros((block_q, block_k), jnp.float32))
    place = program, head, diagonal, common.span(0, block_q), common.span(0, block_k)
    common.store(out_ref.at[place], total)


def _table_gradient(sums: Array, first: int, width: int) -> Array:
    """Sums float32 `[N, diagonals, block, block]` from `_diagonals_kernel` by key minus query: `[N, width]`."""
    heads, diagonals, block, _ = sums.shape
    # Rows of twice the block's length, read with one element less, move to the right one by one: columns then hold the
    # diagonals of a block, from the last row's first element on.
    moved = jnp.pad(sums[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, block))).reshape(heads, diagonals, -1)
    moved = moved[:, :, : block * (2 * block - 1)].reshape(heads, diagonals, block, 2 * block - 1)
    halves = jnp.pad(jnp.sum(moved, axis=2), ((0, 0), (0, 0), (0, 1))).reshape(heads, diagonals, 2, block)
    # The second half of a diagonal of blocks has the same distances as the first half of the next one.
    early, late = (halves[:, :, i].reshape(heads, -1) for i in range(2))
    found = jnp.pad(early, ((0, 0), (0, block))) + jnp.pad(late, ((0, 0), (block, 0)))
    reach, nearest = width // 2, first * block - (block - 1)  # `nearest`: key minus query of the first column
    start = min(max(1 - reach - nearest, 0), found.shape[1])
    stop = min(max(reach - nearest, start), found.shape[1])
    low, high = (jnp.sum(x, axis=1, keepdims=True) for x in (found[:, :start], found[:, stop:]))
    if reach == 0:
        return low + high
    inner = found[:, start:stop]
    before = nearest + start + reach - 1
    inner = jnp.pad(inner, ((0, 0), (before, width - 2 - before - inner.shape[1])))
    return jnp.concatenate([low, inner, high], axis=1)


def backward(
    dout: Array,
    dlse: Array | None,
    query: Array,
    key: Array | None,
    value: Array | None,
    rules: Rules,
    options: Options,
    out: Array,
    top: Array,
    total: Array | None = None,
    *,
    query_config: AttentionConfig,
    key_config: AttentionConfig,
    interpret: bool,
    dtypes: Sequence[Any] = (None, None),
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Launches the backward kernels. Returns the gradients of query, key, value and bias (None without a bias).

    The gradients of query, key and value have the first of the `dtypes`, or the dtype of the query. The gradient of the
    bias has the second one, or the dtype of the bias. For a packed query, the first is the gradient of the packed
    array, and the gradients of key and value are None. `dlse` is the gradient of the natural log-sum-exp, float32 `[B,
    N, T]` or `[N, M]`. `out`, `top` and `total` come from `attention.forward`. `query_config` is also for the kernel of
    a bias `[..., T, S]` and, with square blocks, of a bias by relative position. The kernel for keys and values
    computes dq too if one of its tiles holds all keys, unless there are many more queries than keys or the bias is
    `[..., T, S]`.
    """
    p = parts.problem(query, key, value, rules, options)
    packed, varlen = key is None, rules.cu_seqlens is not None
    if varlen:
        dout, out, top = dout[None], out[None], top[None]
        total, dlse = (None if x is None else x[None] for x in (total, dlse))
    matrix = parts.bias_of_pairs(rules.bias)
    columns = rules.bias is not None and not matrix and not options.relative and rules.bias.shape[3] > 1
    # With many queries, two kernels are faster: a single one has only one program for each head of a sequence. With
    # wide float32 heads, a single kernel would need more shared memory than most GPUs have.
    most = key_config.block_k * (4 if p.width * query.dtype.itemsize <= 512 else 1)
    alone = p.key_length <= key_config.block_k and p.query_length <= most and not matrix

    def launch(kernel, config: AttentionConfig, grid, spans, operands, outputs, name, aliases=None, **static) -> Any:
        return common.launch(
            functools.partial(kernel, p=p, block_q=config.block_q, block_k=config.block_k, **static),
            grid,
            [*p.operands(spans, max(config.block_q, config.block_k)), *operands],
            [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
            name=f"attention_{name}",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            aliases=aliases,
            interpret=interpret,
        )

    of_rows: Any = dtypes[0] or query.dtype
    of_bias: Any = dtypes[1] or (rules.bias is not None and rules.bias.dtype)
    # The float32 gradient of a bias would show the rounding of a 16-bit `out`.
    exact = jnp.float32 in (query.dtype, of_bias) or p.key_length <= _SHORT
    of_query, of_key = (p.query.shape, of_rows), (p.key.shape, of_rows)
    dq: Array | None = None
    delta: Array | None = None
    dbias: Array | None = None
    factor: list[Any] = []
    tiles = pl.cdiv(p.query_length, query_config.block_q)
    query_spans = attention_spans.spans_of_queries(p, query_config.block_q, query_config.block_k)
    if not alone:
        of_row = (top.shape, jnp.float32)
        dq, delta, *factor = launch(
            _dq_kernel, query_config, p.grid(p.query_length, p.heads, query_config.block_q), query_spans,
            [dout, top, total, None if exact else out, dlse], [of_query, of_row, *[of_row] * exact], "dq",
        )  # fmt: skip
    key_tiles = pl.cdiv(p.key_length, key_config.block_k)
    keeps_delta = alone and options.relative
    sums = [((p.batch, p.heads, p.key_length), jnp.float32)] * columns + [(top.shape, jnp.float32)] * keeps_delta
    key_spans = attention_spans.spans_of_keys(p, key_config.block_q, key_config.block_k)
    # A packed sequence may be longer than max_seqlen. The block of queries then must cover all rows of a tile of keys.
    single = alone and p.query_length <= key_config.block_q and (not varlen or key_config.block_k <= key_config.block_q)
    # Programs share tiles only if nothing else is read. A program would read these arrays ahead too, for which there is
    # not enough shared memory.
    more = (rules.mask, rules.bias, rules.seed, dlse, key_spans)
    shared = single and p.group == 1 and all(x is None for x in more)
    programs = min(key_config.programs, p.kv_heads * p.batch) if shared else 0
    found = launch(
        _dkv_kernel, key_config,
        (programs,) if programs else p.grid(p.key_length, p.kv_heads, key_config.block_k), key_spans,
        [dout, top, None if alone else total, *(factor or [None]), delta, dlse if alone else None,
         dq if packed else None],
        [*([of_query] if packed else [of_query] * alone + [of_key, of_key]), *sums],
        "dqkv" if alone else "dkv", programs=programs, tiles=key_tiles, packed=packed, with_dq=alone, single=single,
        columns=columns, keeps_delta=keeps_delta,
        aliases={_SHARED + 6: 0} if packed and not alone else None,
    )  # fmt: skip
    if keeps_delta:
        delta = found.pop()
    if rules.bias is not None:
        if matrix:
            key_tiles = pl.cdiv(p.key_length, query_config.block_k)
            bias_batches, bias_heads, _, _ = rules.bias.shape
            # A small bias that many sequences share needs partial sums, so that there are enough programs for the GPU.
            programs = min(p.batch // bias_batches, pl.cdiv(_PROGRAMS, tiles * key_tiles * bias_batches * bias_heads))
            grid = (tiles * key_tiles, bias_heads, bias_batches * programs)
            operands = [dout, top, total, *(factor or [None]), delta]
            outputs = [((programs, *rules.bias.shape), of_bias if programs == 1 else jnp.float32)]
            (dbias,) = launch(
                _dbias_kernel, query_config, grid, query_spans, operands, outputs, "dbias", key_tiles=key_tiles
            )
            dbias = jnp.sum(dbias, axis=0)
        elif options.relative:
            block = min(query_config.block_q, query_config.block_k)
            square = dataclasses.replace(query_config, block_q=block, block_k=block)
            before, after = p.options.window  # limits which diagonals any pair is on
            tiles, key_tiles = pl.cdiv(p.query_length, block), pl.cdiv(p.key_length, block)
            first = 1 - tiles if before is None else max(1 - tiles, -pl.cdiv(before, block))
            last = key_tiles - 1 if after is None else min(key_tiles - 1, pl.cdiv(after, block))
            count = last - first + 1
            every = p.tiles_back_to_back(block) if varlen else tiles * p.batch
            # More programs share the long middle diagonals, but each stores a tile of sums per diagonal.
            # H100, bf16, 32x512, 12 heads, kernel and sum: 347 us with 4,140 programs (540: 413), 2026-11-27
            most = min(every // 12, 8 * _PROGRAMS // (p.heads * count))
            programs = min(every, max(most, pl.cdiv(_PROGRAMS, p.heads * count)))
            (sums_of_diagonals,) = launch(
                _diagonals_kernel, square, (count, p.heads, programs),
                attention_spans.spans_of_queries(p, block, block),
                [dout, top, total, *(factor or [None]), delta],
                [((programs, p.heads, count, block, block), jnp.float32)], "dtable", first=first, tiles=every,
            )  # fmt: skip
            dbias = _table_gradient(jnp.sum(sums_of_diagonals, axis=0), first, rules.bias.shape[3])
            dbias = _sum_to(dbias[None, :, None], rules.bias)
        elif columns:
            dbias = _sum_to(found.pop()[:, :, None, :], rules.bias)
        else:  # the bias is constant along a row, so it affects the log-sum-exp only
            shift = jnp.zeros_like(top) if dlse is None else jnp.where(jnp.isneginf(top), 0.0, dlse)
            dbias = _sum_to(shift[..., None], rules.bias)
        dbias = dbias.astype(of_bias)
    if packed:
        return found[0].reshape(query.shape), None, None, dbias
    return (dq, *found, dbias) if dq is not None else (*found, dbias)


def _sum_to(x: Array, bias: Array) -> Array:
    """Sums `x` over the axes in which the bias has size 1."""
    axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
    return jnp.sum(x, axis=axes, keepdims=True)
