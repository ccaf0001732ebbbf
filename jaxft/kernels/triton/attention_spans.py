"""Spans of the attention kernels: the blocks of the other side that each tile visits.

For a tile of queries the other side is the keys, and for a tile of keys it is the queries. A kernel skips blocks that a
mask excludes altogether, and with packed sequences it computes only tiles that have rows. XLA computes the spans before
the kernels start: a span is a few numbers for each tile, and XLA has the masks at hand.

Each layer of a model has these operations in its program, and XLA compiles them before it finds that they are equal. So
they are few: `lax.div` of numbers from 0 on is one operation where `//` is 17.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxft.kernels.triton.attention_problem import Problem


class Side(NamedTuple):
    """One side of attention: the queries or the keys. `end` and `full` are an int or an array `[B|1, 1]`."""

    length: int  # the number of positions
    end: Any  # one past the last position that takes part
    full: Any  # all positions before this one take part
    ids: Array | None  # segment ids, [B, length]


class Tiles(NamedTuple):
    """The tiles of packed sequences, each of one sequence. Each field is int32 `[n, 1]`.

    n is `Problem.tiles_back_to_back`, an upper bound; the surplus tiles have length 0. The tiles of the longest
    sequences come first, so that the programs that start last finish soon.
    """

    # H200, 32 sequences of 54 to 512 tokens: 43.9 us (a tile for each block of max_seqlen 51.2), 2026-11-22
    batch: Array  # the sequence of the tile
    start: Array  # the first row of the tile, counted within the sequence
    offset: Array  # the first row of the sequence
    length: Array  # the number of rows of the sequence; more than `end` if the sequence is longer than max_seqlen
    end: Array  # one past the last row of the sequence that takes part, counted within the sequence


def _tiles_back_to_back(p: Problem, block: int) -> Tiles:
    offsets, ends = p.rules.cu_seqlens, p.rules.query_lengths
    assert offsets is not None and ends is not None
    lengths, index = jnp.maximum(offsets[1:] - offsets[:-1], 0), jnp.arange(p.batch, dtype=jnp.int32)[None]
    count = _div(lengths + (block - 1), block)[None]
    sooner = (ends[None] > ends[:, None]) | ((ends[None] == ends[:, None]) & (index < index.T))
    first = jnp.sum(jnp.where(sooner, count, 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(p.tiles_back_to_back(block), dtype=jnp.int32)[:, None]
    mine = (first[None] <= tile) & (tile < first[None] + count)
    batch = jnp.max(jnp.where(mine, index, -1), axis=1, keepdims=True)
    of_batch = jnp.stack([first, offsets[:-1], lengths, ends], axis=1)
    of_tile = of_batch.at[jnp.maximum(batch[:, 0], 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    start, *found = jnp.split(jnp.where(batch < 0, 0, of_tile), 4, axis=1)
    return Tiles(jnp.maximum(batch, 0), jnp.where(batch < 0, 0, (tile - start) * block), *found)


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
    """Computes the `Span` of each tile of queries, int32 `[B|1, tiles, 5]`, or None if every span covers all keys.

    For packed sequences it is `[tiles, 1, 9]`, and the last four columns are the first four fields of `Tiles`.
    """
    queries, keys = _sides(p)
    return _spans(p, queries, keys, p.options.window, block_q, block_k)


def spans_of_keys(p: Problem, block_q: int, block_k: int) -> Array | None:
    """Computes the `Span` of queries of each tile of keys, in the layout of `spans_of_queries`."""
    queries, keys = _sides(p)
    return _spans(p, keys, queries, p.options.window[::-1], block_k, block_q)


def _div(x: Array, divisor: int) -> Array:
    """Divides numbers from 0 on, rounded down. In JAX's 64-bit mode a Python number would become an int64."""
    return lax.div(x, x.dtype.type(divisor))


def _spans(p: Problem, own: Side, other: Side, window, block: int, other_block: int) -> Array | None:
    r, (before, after) = p.rules, window
    lengths = (r.query_lengths, r.key_lengths, r.query_ids, before, after)
    if not p.key_mask and all(x is None for x in lengths):
        return None
    tiles = None
    if p.varlen:  # arrays of shape [tiles, 1]; queries and keys have the same sequences
        tiles = _tiles_back_to_back(p, block)
        start, own = tiles.start, own._replace(end=tiles.end, full=tiles.end)
        other = other._replace(end=tiles.end, full=tiles.end)
    else:
        start = jnp.arange(0, own.length, block, dtype=jnp.int32)[None, :]
    stop = jnp.minimum(start + block, own.end)  # [B|1, tiles]
    first: Any = jnp.int32(0) if before is None else jnp.maximum(start - before, 0)
    last = other.end if after is None else jnp.minimum(stop + after, other.end)
    full_from = jnp.int32(0) if before is None else jnp.maximum(stop - 1 - before, 0)
    full_to = other.full if after is None else jnp.minimum(start + after + 1, other.full)
    full_to = jnp.where(stop <= own.full, full_to, jnp.int32(0))
    full_start, full_stop = _div(full_from + other_block - 1, other_block), _div(full_to, other_block)
    if own.ids is not None and other.ids is not None:
        low, high = (x[:, :, None] for x in _range_of_ids(own, block))
        other_low, other_high = (x[:, None, :] for x in _range_of_ids(other, other_block))
        index = jnp.arange(other_low.shape[2], dtype=jnp.int32)[None, None]
        near = (other_low <= high) & (low <= other_high)  # [B, tiles, blocks]
        same = near & (low == high) & (other_low == other_high)
        first = jnp.maximum(first, jnp.min(jnp.where(near, index, other.length), axis=2) * other_block)
        last = jnp.minimum(last, jnp.max(jnp.where(near, index + 1, 0), axis=2) * other_block)
        # The full blocks are the first run of blocks that hold only the id of the tile. Sorted ids have no other run.
        begin = jnp.min(jnp.where(same, index, other.length), axis=2)
        later = ~same & (index >= begin[:, :, None])
        full_start = jnp.maximum(full_start, begin)
        full_stop = jnp.minimum(full_stop, jnp.min(jnp.where(later, index, index.size), axis=2))
    last = jnp.where(stop > start, last, jnp.int32(0))
    first = jnp.minimum(first, last)
    end = _div(last + (other_block - 1), other_block)
    full_start = jnp.clip(full_start, _div(first, other_block), end)
    full_stop = jnp.clip(full_stop, full_start, end)
    columns = [first, last, full_start, full_stop, own.end, *(tiles or ())[:4]]
    return jnp.stack([jnp.broadcast_to(x, last.shape) for x in columns], axis=2)


def _range_of_ids(side: Side, block: int) -> tuple[Array, Array]:
    """Returns the least and the greatest id in each block, `[B, blocks]` each. Ids from `end` on do not count."""
    assert side.ids is not None
    inside = jnp.arange(side.length, dtype=jnp.int32)[None, :] < side.end
    pad = ((0, 0), (0, -side.length % block))
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    low = jnp.pad(jnp.where(inside, side.ids, most), pad, constant_values=most)
    high = jnp.pad(jnp.where(inside, side.ids, least), pad, constant_values=least)
    shape = (low.shape[0], -1, block)
    return jnp.min(low.reshape(shape), axis=2), jnp.max(high.reshape(shape), axis=2)
