"""Which blocks of the other side each tile of attention's kernels visits: what XLA computes before they start.

What a mask excludes altogether is not visited, and of sequences that lie back to back there are only tiles that have
rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxft.kernels.triton.attention_problem import Problem

Array = jax.Array


class Side(NamedTuple):
    """The queries, or the keys."""

    length: int
    end: Any  # [B|1, 1] where the last that takes part ends, and where the first ends that does not
    full: Any
    ids: Array | None


class Tiles(NamedTuple):
    """The tiles of sequences that lie back to back, int32 [n, 1] each; what is too many has no rows.

    There is no tile that has nothing to write, and the longest sequences come first, so that what starts last is soon
    done: 43.9 us where a tile for each part of max_seqlen took 51.2 (32 sequences of 54 to 512; H200, 2026-11-22).
    """

    batch: Array  # its sequence
    start: Array  # its first row in the sequence
    offset: Array  # the sequence's first row
    length: Array  # the sequence's rows, more than `end` where it is longer than max_seqlen
    end: Array  # where those that take part end


def _tiles_back_to_back(p: Problem, block: int) -> Tiles:
    offsets, ends = p.rules.cu_seqlens, p.rules.query_lengths
    assert offsets is not None and ends is not None
    lengths, index = jnp.maximum(offsets[1:] - offsets[:-1], 0), jnp.arange(p.batch, dtype=jnp.int32)
    count = (lengths + (block - 1)) // block
    sooner = (ends > ends[:, None]) | ((ends == ends[:, None]) & (index < index[:, None]))
    first = jnp.sum(jnp.where(sooner, count, 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(p.tiles_back_to_back(block), dtype=jnp.int32)
    mine = (first <= tile[:, None]) & (tile[:, None] < first + count)
    batch = jnp.max(jnp.where(mine, index, -1), axis=1)
    found = [jnp.where(batch < 0, 0, x[batch]) for x in (offsets[:-1], lengths, ends)]
    start = jnp.where(batch < 0, 0, (tile - first[batch]) * block)
    return Tiles(*(x[:, None] for x in (jnp.maximum(batch, 0), start, *found)))


def _sides(p: Problem) -> tuple[Side, Side]:
    r = p.rules
    q_end: Any = p.query_length if r.query_lengths is None else jnp.clip(r.query_lengths, 0, p.query_length)[:, None]
    end: Any = p.key_length if r.key_lengths is None else jnp.clip(r.key_lengths, 0, p.key_length)[:, None]
    full = end
    if p.key_mask and r.mask is not None:
        position = jnp.arange(p.key_length, dtype=jnp.int32)[None, :]
        keep = r.mask[:, 0, 0, :] & (position < end)
        full = jnp.min(jnp.where(keep, p.key_length, position), axis=1, keepdims=True)
        end = jnp.max(jnp.where(keep, position + 1, 0), axis=1, keepdims=True)
    return Side(p.query_length, q_end, q_end, r.query_ids), Side(p.key_length, end, full, r.key_ids)


def spans_of_queries(p: Problem, block_q: int, block_k: int) -> Array | None:
    """For each tile of queries what `Span` says about the keys, int32 [B|1, tiles, 5]; None where all are attended to.

    Of sequences back to back [tiles, 1, 9], with the first four of `Tiles`. A few numbers for each tile, from a few
    for each block: XLA computes them with the masks it has at hand.
    """
    queries, keys = _sides(p)
    return _spans(p, queries, keys, p.options.window, block_q, block_k)


def spans_of_keys(p: Problem, block_q: int, block_k: int) -> Array | None:
    """The same for each tile of keys."""
    queries, keys = _sides(p)
    return _spans(p, keys, queries, p.options.window[::-1], block_k, block_q)


def _spans(p: Problem, own: Side, other: Side, window, block: int, other_block: int) -> Array | None:
    r, (before, after) = p.rules, window
    lengths = (r.query_lengths, r.key_lengths, r.query_ids, before, after)
    if not p.key_mask and all(x is None for x in lengths):
        return None
    start = jnp.arange(0, own.length, block, dtype=jnp.int32)[None, :]
    tiles = None
    if p.varlen:  # [tiles, 1] each, and the keys are the queries
        tiles = _tiles_back_to_back(p, block)
        start, own = tiles.start, own._replace(end=tiles.end, full=tiles.end)
        other = other._replace(end=tiles.end, full=tiles.end)
    stop = jnp.minimum(start + block, own.end)  # [B|1, tiles]
    first: Any = jnp.int32(0) if before is None else jnp.maximum(start - before, 0)
    last = other.end if after is None else jnp.minimum(stop + after, other.end)
    full_from = jnp.int32(0) if before is None else jnp.maximum(stop - 1 - before, 0)
    full_to = other.full if after is None else jnp.minimum(start + after + 1, other.full)
    full_to = jnp.where(stop <= own.full, full_to, 0)
    full_start, full_stop = (full_from + other_block - 1) // other_block, full_to // other_block
    if own.ids is not None and other.ids is not None:
        low, high = (x[:, :, None] for x in _range_of_ids(own, block))
        other_low, other_high = (x[:, None, :] for x in _range_of_ids(other, other_block))
        index = jnp.arange(other_low.shape[2], dtype=jnp.int32)
        near = (other_low <= high) & (low <= other_high)  # [B, tiles, blocks]
        same = near & (low == high) & (other_low == other_high)
        first = jnp.maximum(first, jnp.min(jnp.where(near, index, other.length), axis=2) * other_block)
        last = jnp.minimum(last, jnp.max(jnp.where(near, index + 1, 0), axis=2) * other_block)
        # The first run of blocks of the same id; where ids are sorted, there is no other.
        begin = jnp.min(jnp.where(same, index, other.length), axis=2)
        later = ~same & (index >= begin[:, :, None])
        full_start = jnp.maximum(full_start, begin)
        full_stop = jnp.minimum(full_stop, jnp.min(jnp.where(later, index, index.size), axis=2))
    last = jnp.where(stop > start, last, 0)
    first = jnp.minimum(first, last)
    full_start = jnp.clip(full_start, first // other_block, -(-last // other_block))
    full_stop = jnp.clip(full_stop, full_start, -(-last // other_block))
    columns = [first, last, full_start, full_stop, own.end, *(tiles or ())[:4]]
    spans = jnp.zeros((*last.shape, len(columns)), jnp.int32)
    for i, part in enumerate(columns):  # elementwise, which takes one kernel
        spans = jnp.where(jnp.arange(len(columns)) == i, jnp.broadcast_to(part, last.shape)[:, :, None], spans)
    return spans.astype(jnp.int32)


def _range_of_ids(side: Side, block: int) -> tuple[Array, Array]:
    """The least and the greatest id in each block [B, blocks]."""
    assert side.ids is not None
    inside = jnp.arange(side.length, dtype=jnp.int32)[None, :] < side.end
    pad = ((0, 0), (0, -side.length % block))
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    low = jnp.pad(jnp.where(inside, side.ids, most), pad, constant_values=most)
    high = jnp.pad(jnp.where(inside, side.ids, least), pad, constant_values=least)
    shape = (low.shape[0], -1, block)
    return jnp.min(low.reshape(shape), axis=2), jnp.max(high.reshape(shape), axis=2)
