"""What the kernels of attention share: which arrays they get, where these are masked, and how tiles are read.

What a mask excludes altogether is not visited. `spans` says for each tile which blocks of the other side those are, and
which blocks it leaves whole, so that only the others pay for masks: in every block they would cost 20-60 % (H200,
2026-11-20). What only decides about whole rows of the tile itself (its sequence's end) is left to the end, since rows
of a tile do not mix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning.table import next_power_of_2

Array = jax.Array

MAX_HEAD_SIZE = 256
LOG2_E = math.log2(math.e)
_LOG2_E_REST = 1.925963033500e-8  # what the float32 nearest to it lacks


def bias_of_pairs(bias: Array | None) -> bool:
    """Whether it has a number for each query and key, [.., T, S]."""
    return bias is not None and bias.shape[2] > 1 and bias.shape[3] > 1


def joined_residual(dtype: Any, bias: Array | None) -> bool:
    """Whether the forward pass gives the log-sum-exp as one number, to base 2; else, for more digits, as two."""
    return dtype != jnp.float32 and bias is None


class Rules(NamedTuple):
    """What is attended to, added to the logits or dropped: arrays, each None where it is not asked for."""

    bias: Array | None = None  # [B|1, N|1, T|1, S|1]
    mask: Array | None = None  # bool, the same
    query_lengths: Array | None = None  # int32 [B], as the following
    key_lengths: Array | None = None
    query_ids: Array | None = None  # [B, T]
    key_ids: Array | None = None  # [B, S]
    seed: Array | None = None  # uint32 [2]
    cu_seqlens: Array | None = None  # int32 [B + 1]: the query is a packed [M, 3, N, H]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static besides the shapes."""

    scale: float
    window: tuple[int | None, int | None] = (None, None)  # how far before and after itself a query looks
    dropout_rate: float = 0.0
    max_seqlen: int = 0  # with cu_seqlens
    precision: str = "tf32"  # of float32 products, or "float32"


def _in_full(dtype: Any, precision: str) -> bool:
    return precision == "float32" and dtype == jnp.float32


def natural_logits(dtype: Any, bias: Array | None, precision: str) -> bool:
    """Whether the kernels' logits are natural. They are in base 2 where that costs nothing.

    With a bias they might overflow in it, and in full precision they would lose digits.
    """
    return bias is not None or _in_full(dtype, precision)


def unsupported(head_size: int, positions: int, mask: Array | None, **arrays: Array | None) -> str | None:
    """Why the kernels cannot run this, if they cannot; `positions` are the most that any side has."""
    reason = common.unsupported_dtype(**arrays) or common.unsupported_array(mask=mask)
    if reason is not None:
        return reason
    if head_size > MAX_HEAD_SIZE:
        return f"the head size is {head_size}, the kernel takes at most {MAX_HEAD_SIZE}"
    if positions > 2**30:  # 32-bit, and so are those past the end of the last block
        return f"there are {positions} positions, the kernel takes at most 2^30"
    if mask is not None and mask.size > 2**31:
        return f"mask has {mask.size} elements, the kernel takes at most 2^31"  # counted in signed 32 bits
    return None


# --- What the kernels, those of the backward pass included, get --------------------------------------------------


class Refs(NamedTuple):
    """What of the rules a kernel reads."""

    bias: Any
    mask: Any
    query_ids: Any
    key_ids: Any
    seed: Any
    spans: Any  # of this kernel's tiles


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arrays of a call as kernels see them, and its sizes."""

    query: Array  # [B, T, heads, H], or [1, M, heads, H]
    key: Array
    value: Array
    rules: Rules
    options: Options
    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_size: int
    k_head: int  # the first head of the keys in `key`
    v_head: int

    @property
    def width(self) -> int:
        return max(16, next_power_of_2(self.head_size))

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def precision(self) -> lax.Precision | None:
        """HIGHEST, of float32 alone, where no digit is to be lost."""
        return lax.Precision.HIGHEST if _in_full(self.query.dtype, self.options.precision) else None

    @property
    def natural(self) -> bool:
        return natural_logits(self.query.dtype, self.rules.bias, self.options.precision)

    @property
    def kept_scale(self) -> float:
        """Of what dropout keeps."""
        return 1.0 / (1.0 - self.options.dropout_rate)

    @property
    def key_mask(self) -> bool:
        """Whether the mask is the same for all queries and heads."""
        return self.rules.mask is not None and self.rules.mask.shape[1:3] == (1, 1)

    @property
    def key_holes(self) -> bool:
        """Whether it leaves out more than the ends of sequences."""
        return self.key_mask and self.rules.mask is not None and self.rules.mask.shape[3] > 1

    @property
    def pair_mask(self) -> bool:
        """Whether the mask is for each query or head: then every block is masked."""
        return self.rules.mask is not None and not self.key_mask

    @property
    def by_pairs(self) -> bool:
        """Whether what a query attends to is decided for each, in a way that may leave out any key."""
        return self.pair_mask or self.rules.query_ids is not None

    @property
    def by_keys(self) -> bool:
        """Whether all queries of a sequence attend to the same keys."""
        unlimited = self.options.window == (None, None) and self.rules.query_lengths is None
        return unlimited and not self.by_pairs

    @property
    def varlen(self) -> bool:
        """Whether sequences lie back to back."""
        return self.rules.cu_seqlens is not None

    def operands(self, spans: Array | None) -> list[Array | None]:
        """The arrays that all kernels begin with: query, key, value, and those of `Refs`."""
        r = self.rules
        return [self.query, self.key, self.value, r.bias, r.mask, r.query_ids, r.key_ids, r.seed, spans]

    def grid(self, length: int, heads: int, block: int) -> tuple[int, int, int]:
        """A program for each tile of queries, or of keys, of so many of them and their heads: (tile, head, sequence).

        Of sequences back to back, each tile is one that is alone in its sequence: see `attention_spans.Tiles`.
        """
        if not self.varlen:
            return pl.cdiv(length, block), heads, self.batch
        return 1, heads, self.tiles_back_to_back(block)

    def tiles_back_to_back(self, block: int) -> int:
        """As many as any sequences have."""
        return pl.cdiv(self.query.shape[1], block) + self.batch


def problem(query: Array, key: Array | None, value: Array | None, rules: Rules, options: Options) -> Problem:
    """query [B,T,N,H] with key and value [B,S,K,H], or the packed [B,T,3,N,H] or [M,3,N,H] as `query` without."""
    if key is None or value is None:
        heads, size = query.shape[-2:]
        kv_heads, k_head, v_head = heads, heads, 2 * heads  # of the packed array's heads, q's come first
        query = query.reshape(-1 if rules.cu_seqlens is None else 1, query.shape[-4], 3 * heads, size)
        key = value = query
    else:
        heads, size = query.shape[-2:]
        kv_heads, k_head, v_head = key.shape[2], 0, 0
    batch, length, key_length = query.shape[0], query.shape[1], key.shape[1]
    if rules.cu_seqlens is not None:
        # One sequence more: the rows after the last, none of which takes part, but which are to be 0.
        rows, batch, length, key_length = length, rules.cu_seqlens.shape[0], options.max_seqlen, options.max_seqlen
        offsets = jnp.append(jnp.clip(rules.cu_seqlens, 0, rows), jnp.int32(rows))
        lengths = jnp.append(jnp.clip(offsets[1:-1] - offsets[:-2], 0, length), jnp.int32(0))
        rules = rules._replace(query_lengths=lengths, key_lengths=lengths, cu_seqlens=offsets)
    before, after = options.window
    window = (
        before if before is not None and before < length - 1 else None,
        after if after is not None and after < key_length - 1 else None,
    )
    options = dataclasses.replace(options, window=window)
    return Problem(query, key, value, rules, options, batch, heads, kv_heads, length, key_length, size, k_head, v_head)


# --- Parts of kernels --------------------------------------------------------------------------------------------


def for_each_tile(
    compute: Callable[..., None], p: Problem, spans_ref, programs: int = 0, tiles: int = 1, heads: int = 1
) -> None:
    """compute(tile, head, sequence) of this program's tile, or, where so many `programs` share them all, of its tiles.

    Each of those reads its next tile while it computes one. Of sequences in a batch, [B, T], the last comes first, see
    `common.program_id_from_the_end`.
    """
    if not programs:
        tile, head = pl.program_id(0), pl.program_id(1)
        if not p.varlen:
            return compute(tile, head, common.program_id_from_the_end(2))
        batch = pl.program_id(2)  # of `Tiles`, which begin with the longest sequences
        rows = common.load(spans_ref.at[batch, tile, jnp.int32(8)])  # see `load_place`
        return pl.when(rows > 0)(lambda: compute(tile, head, batch))
    program, last = pl.program_id(0), tiles * heads * p.batch - 1

    def step(i, _):
        item = last - program - jnp.int32(i) * programs
        row = lax.div(item, jnp.int32(tiles))
        compute(lax.rem(item, jnp.int32(tiles)), lax.rem(row, jnp.int32(heads)), lax.div(row, jnp.int32(heads)))

    lax.fori_loop(0, lax.div(last - program, jnp.int32(programs)) + 1, step, None)


class Span(NamedTuple):
    """Of a tile: from where to where (rows of the other side, then blocks of them) it attends to any, and to all."""

    first: Any
    last: Any
    full_start: Any
    full_stop: Any
    end: Any  # of the rows of the tile's own side that take part

    def blocks(self, block: int) -> tuple[Any, Any]:
        if isinstance(self.last, int):
            return 0, pl.cdiv(self.last, block)
        return lax.div(self.first, jnp.int32(block)), lax.div(self.last + jnp.int32(block - 1), jnp.int32(block))


def load_span(spans_ref, batch, tile, length: int, other_length: int, other_block: int, full: bool) -> Span:
    if spans_ref is None:
        return Span(0, other_length, 0, other_length // other_block if full else 0, length)
    batch = batch if spans_ref.shape[0] > 1 else jnp.int32(0)
    span = Span(*(common.load(spans_ref.at[batch, tile, jnp.int32(i)]) for i in range(5)))
    if not full:
        start, _ = span.blocks(other_block)
        span = span._replace(full_start=start, full_stop=start)
    return span


def in_span(p: Problem, span: Span, positions: Array) -> Array:
    """Which rows of the other side are inside; keys that are the same for all queries begin at 0."""
    inside = positions < span.last
    return inside if p.by_keys else inside & (positions >= span.first)


def fewest_keys(compute: Callable[..., Any], last: Any, block_k: int) -> Any:
    """compute(block_k=block_k) of a block that holds all keys, or of its first half where no other take part.

    The backward pass of 256 x 128 keys, half of them valid, takes 207 us instead of 241 (H200, 2026-11-23).
    """
    if isinstance(last, int) or block_k < 32:  # a product has at least 16 keys
        return compute(block_k=block_k)
    half = functools.partial(compute, block_k=block_k // 2)
    return lax.cond(last <= block_k // 2, half, functools.partial(compute, block_k=block_k))


def visit_all(span: Span, block: int, leading: bool, visit: Callable[..., Any], carry: Any) -> Any:
    """carry = visit(block, carry, edge=...) for each block of the span; `leading`: some may come before the full."""
    start, stop = span.blocks(block)
    edge = functools.partial(visit, edge=True)
    if leading:
        carry = lax.fori_loop(start, span.full_start, edge, carry)
    if not (isinstance(span.full_stop, int) and span.full_stop == 0):
        carry = lax.fori_loop(span.full_start, span.full_stop, functools.partial(visit, edge=False), carry)
    if not (isinstance(span.full_stop, int) and span.full_stop == stop):
        carry = lax.fori_loop(span.full_stop, stop, edge, carry)
    return carry


class Place(NamedTuple):
    """Where a tile is."""

    batch: Any  # its sequence
    start: Any  # its first row in the sequence
    index: Any  # the sequence's place in the arrays
    offset: Any  # the sequence's first row there
    length: Any  # how many rows the sequence has there


def load_place(p: Problem, refs: Refs, batch, tile, block: int, length: int) -> Place:
    """Of a program's tile, by its place in the grid."""
    if not p.varlen:
        return Place(batch, tile * block, batch, 0, length)
    sequence, start, offset, rows = (common.load(refs.spans.at[batch, tile, jnp.int32(i)]) for i in range(5, 9))
    return Place(sequence, start, jnp.int32(0), offset, rows)


def in_head(p: Problem) -> Array | None:
    """[1, width], where a head has fewer columns than its tiles."""
    return None if p.width == p.head_size else (common.positions(0, p.width) < p.head_size)[None, :]


def load_tile(p: Problem, ref, index, row, block: int, head, in_rows: Array | None):
    """[block, width] of a [B, L, heads, H], 0 where not `in_rows`."""
    place = index, common.span(row, block), head, common.span(0, p.width)
    return common.load(ref.at[place], mask=tile_mask(p, block, in_rows))


def store_tile(p: Problem, ref, index, row, head, tile, in_rows: Array | None) -> None:
    block = tile.shape[0]
    place = index, common.span(row, block), head, common.span(0, p.width)
    common.store(ref.at[place], tile.astype(ref.dtype), mask=tile_mask(p, block, in_rows))


def tile_mask(p: Problem, block: int, in_rows: Array | None) -> Array | None:
    columns = in_head(p)
    if in_rows is None:
        return None if columns is None else jnp.broadcast_to(columns, (block, p.width))
    return jnp.broadcast_to(in_rows[:, None] if columns is None else in_rows[:, None] & columns, (block, p.width))


class Pairs(NamedTuple):
    """Positions of a tile of queries and of one of keys, [n, 1] and [1, n] either way, and which of them there are."""

    batch: Any
    head: Any
    rows: Array
    columns: Array
    in_rows: Array | None
    in_columns: Array | None

    def load(self, ref):
        """What a [B|1, N|1, T|1, S|1] has for these pairs, 0 where there are none; its shape broadcasts to theirs."""
        zero = jnp.int32(0)
        by_row, by_column = ref.shape[2] > 1, ref.shape[3] > 1
        masks: list[Any] = [self.in_rows] * by_row + [self.in_columns] * by_column
        masks = [x for x in masks if x is not None]
        index = [self.batch if ref.shape[0] > 1 else zero, self.head if ref.shape[1] > 1 else zero,
                 self.rows if by_row else zero, self.columns if by_column else zero]  # fmt: skip
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in index))
        index[2:] = [jnp.broadcast_to(x, shape) if jnp.ndim(x) else x for x in index[2:]]
        inside = jnp.broadcast_to(functools.reduce(operator.and_, masks), shape) if masks else None
        return common.load(ref.at[tuple(index)], mask=inside)


def allowed(p: Problem, refs: Refs, pairs: Pairs) -> Any:
    """Which pairs attend to each other, if rows take part and keys do where they are `in_columns`; None for all."""
    before, after = p.options.window
    parts = [] if pairs.in_columns is None else [pairs.in_columns]
    if before is not None:
        parts.append(pairs.columns >= pairs.rows - before)
    if after is not None:
        parts.append(pairs.columns <= pairs.rows + after)
    if refs.query_ids is not None:
        ids = []
        for ref, at, inside in ((refs.query_ids, pairs.rows, pairs.in_rows),
                                (refs.key_ids, pairs.columns, pairs.in_columns)):  # fmt: skip
            ids.append(common.load(ref.at[pairs.batch, at], mask=inside))
        parts.append(ids[0] == ids[1])
    if p.pair_mask:
        parts.append(pairs.load(refs.mask))
    return functools.reduce(operator.and_, parts) if parts else None


def logits(refs: Refs, pairs: Pairs, products: Array, scale: float) -> Array:
    """Natural ones, from the products of queries with keys."""
    if refs.bias is None:
        return products * scale
    return common.fma(products, scale, pairs.load(refs.bias).astype(jnp.float32))


def probabilities(p: Problem, refs: Refs, pairs: Pairs, products: Array, top: Array, total: Array | None) -> Array:
    """From the products of queries with keys; `top` and `total`, if any, are the log-sum-exp."""
    if p.natural:
        return exponentials(p, logits(refs, pairs, products, p.options.scale) - top, total)
    exponent = common.fma(products, p.options.scale * LOG2_E, -top)
    return common.exp2(exponent if total is None else exponent - total)


def exponentials(p: Problem, x: Array, total: Array | None = None) -> Array:
    """Of differences of logits, divided by 2^total."""
    high = x * LOG2_E if p.natural else x
    exponent = high if total is None else high - total
    y = common.exp2(exponent)
    if p.precision is None:
        return y
    rest = common.fma(x, LOG2_E, -high) + x * _LOG2_E_REST  # NaN where x is -inf
    if total is not None:  # what the difference has lost: Knuth's two-sum
        part = exponent - high
        rest = rest + ((high - (exponent - part)) - (total + part))
    return jnp.where(y == 0.0, y, common.fma(y, rest * math.log(2.0), y))


def drop(p: Problem, refs: Refs, pairs: Pairs, x: Array) -> Array:
    """x where dropout keeps the pair, else 0."""
    if refs.seed is None:
        return x
    row = (pairs.batch * p.heads + pairs.head) * p.query_length + pairs.rows
    return jnp.where(common.keep(refs.seed, p.options.dropout_rate, row, pairs.columns), x, 0.0)


def in_key_mask(p: Problem, refs: Refs, batch, columns: Array, inside: Array) -> Array:
    """Which of these keys, [block], a mask of keys allows."""
    if not p.key_holes:
        return inside
    zero = jnp.int32(0)
    index = batch if refs.mask.shape[0] > 1 else zero
    return common.load(refs.mask.at[index, zero, zero, columns], mask=inside)


def dot(p: Problem, a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    """a b; in full precision by short chains where plain JAX's is a matrix times a vector."""
    thin = p.precision is not None and min(p.query_length, p.key_length, p.head_size) == 1
    multiply = common.dot_in_short_chains if thin else common.dot
    return multiply(a, b, trans_a=trans_a, trans_b=trans_b, precision=p.precision)


def add(p: Problem, total: Array, product: Array) -> Array:
    """In full precision the block is summed by itself: one chain of all blocks would lose digits."""
    return total + product if p.precision is None else common.fma(product, 1.0, total)


def reciprocal(p: Problem, x: Array) -> Array:
    """In full precision to the nearest number, which takes 7 % more of a short backward pass (H200, 2026-11-22)."""
    return 1.0 / x if p.precision is None else common.rounded_reciprocal(x)


def clear(tile: Array, used: Array) -> Array:
    """A tile [block, width] with 0, whatever is there, in the rows that are not `used`.

    Bit by bit: a choice between two operands of a product may take its condition through shared memory in the layout
    of tensor cores, where Triton has no place for single bits ("'ttg.local_alloc' op element type bit width").
    """
    bits = jnp.dtype(f"int{8 * tile.dtype.itemsize}")
    mask = jnp.where(used, jnp.full(used.shape, -1, bits), jnp.zeros(used.shape, bits))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(tile, bits) & mask[:, None], tile.dtype)


def any_of(pairs: Any, axis: int) -> Array:
    return jnp.max(pairs.astype(jnp.int32), axis=axis) > 0
