"""Parts that the attention kernels share: their operands, their masks, and how they read and write tiles.

A kernel skips the blocks that a mask excludes altogether. The array `spans` says for each tile which blocks to visit,
and which of these need no mask. Only the other blocks pay for masks. A limit on rows of the tile itself, such as the
end of its sequence, is applied once at the end, since the rows of a tile are independent.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning.table import next_power_of_2

MAX_HEAD_SIZE = 256
_ALIGNED = 16  # the smallest block
LOG2_E = math.log2(math.e)
_LOG2_E_REST = 1.925963033500e-8  # log2(e) minus the nearest float32


def bias_of_pairs(bias: Array | None) -> bool:
    """Returns whether the bias has one element for each pair of a query and a key, `[..., T, S]`."""
    return bias is not None and bias.shape[2] > 1 and bias.shape[3] > 1


def joined_residual(dtype: Any, bias: Array | None) -> bool:
    """Returns whether the forward pass returns the log-sum-exp as one array to base 2, see `attention.forward`."""
    return dtype != jnp.float32 and bias is None


class Rules(NamedTuple):
    """Optional arrays that decide which pairs attend, what is added to the logits, and what dropout drops."""

    bias: Array | None = None  # [B|1, N|1, T|1, S|1]; a table [1, N|1, 1, 2R+1] if `Options.relative`
    mask: Array | None = None  # bool [B|1, N|1, T|1, S|1]
    query_lengths: Array | None = None  # int32 [B]
    key_lengths: Array | None = None  # int32 [B]
    query_ids: Array | None = None  # segment ids, int32 [B, T]
    key_ids: Array | None = None  # segment ids, int32 [B, S]
    seed: Array | None = None  # dropout seed, uint32 [2]
    cu_seqlens: Array | None = None  # int32 [B + 1]; the query then is the packed [M, 3, N, H]


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call, besides the shapes. A limit of `window` that is None is no limit."""

    scale: float
    window: tuple[int | None, int | None] = (None, None)  # how far a query attends before and after itself
    dropout_rate: float = 0.0
    max_seqlen: int = 0  # used with cu_seqlens only
    precision: str = "tf32"  # precision of float32 matmuls, "tf32" or "float32"
    relative: bool = False  # whether the bias depends on key minus query, limited to -R and R
    heads: int | None = None  # heads over which the rows of dropout are counted; None for the heads of the query


def _in_full(dtype: Any, precision: str) -> bool:
    return precision == "float32" and dtype == jnp.float32


def natural_logits(dtype: Any, bias: Array | None, precision: str) -> bool:
    """Returns whether logits are natural: base-2 ones would overflow with a bias and lose digits in full precision."""
    return bias is not None or _in_full(dtype, precision)


def unsupported(
    head_size: int, positions: Sequence[int], bias: Array | None, mask: Array | None, **arrays: Array | None
) -> str | None:
    """Returns the reason why the kernels do not support a call with these positions, or None.

    `arrays` are the other arrays by name, the query or the packed array first.
    """
    reason = common.unsupported_array(**arrays, mask=mask)
    name = next(iter(arrays))
    relative = arrays.get("relative_bias")
    if reason := reason or common.unsupported_dtype(**{name: arrays[name]}, bias=bias, relative_bias=relative):
        return reason
    if bias is not None and relative is not None:
        return "the kernel takes bias or relative_bias, not both"
    if head_size > MAX_HEAD_SIZE:
        return f"the head size is {head_size}, the kernel takes at most {MAX_HEAD_SIZE}"
    if symbolic := next(filter(jax.export.is_symbolic_dim, positions), None):
        return f"the number of positions is symbolic, {symbolic}"
    if max(positions) > 2**30:  # positions have 32 bits, also those between the end and the end of the last block
        return f"there are {max(positions)} positions, the kernel takes at most 2^30"
    for name, x in (("mask", mask), ("relative_bias", relative)):
        if x is not None and x.size > 2**31:  # offsets are signed 32-bit integers
            return f"{name} has {x.size} elements, the kernel takes at most 2^31"
    return None


# --- Operands of the forward and backward kernels ----------------------------------------------------------------


class Refs(NamedTuple):
    """Refs of the optional arrays that a kernel reads: fields of `Rules`, and the spans. None for a missing array."""

    bias: Any
    mask: Any
    query_ids: Any
    key_ids: Any
    seed: Any
    spans: Any  # the spans of the tiles of this kernel


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arrays of a call in the layout that the kernels read, and the sizes of the call."""

    query: Array  # [B, T, heads, H], or [1, M, heads, H] for packed sequences; the packed array has 3 * heads here
    key: Array  # [B, S, kv_heads, H], or the same array as `query` if that is packed
    value: Array
    rules: Rules
    options: Options
    batch: int
    heads: int  # the number of query heads
    kv_heads: int
    query_length: int
    key_length: int
    head_size: int
    k_head: int  # index of the first key head in `key`
    v_head: int  # index of the first value head in `value`

    @property
    def width(self) -> int:
        """The number of columns of a tile: the head size, rounded up to a power of two of at least 16."""
        return max(16, next_power_of_2(self.head_size))

    @property
    def group(self) -> int:
        """The number of query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def precision(self) -> lax.Precision | None:
        """The precision of matmuls: HIGHEST for float32 inputs in full precision, otherwise None."""
        return lax.Precision.HIGHEST if _in_full(self.query.dtype, self.options.precision) else None

    @property
    def natural(self) -> bool:
        """Returns whether logits are natural rather than base 2, see `natural_logits`."""
        return natural_logits(self.query.dtype, self.rules.bias, self.options.precision)

    @property
    def kept_scale(self) -> float:
        """The factor that dropout applies to the elements it keeps."""
        return 1.0 / (1.0 - self.options.dropout_rate)

    @property
    def key_mask(self) -> bool:
        """Returns whether the mask is the same for all queries and heads."""
        return self.rules.mask is not None and self.rules.mask.shape[1:3] == (1, 1)

    @property
    def key_holes(self) -> bool:
        """Returns whether the mask is a key mask with one element for each key, which may exclude any key."""
        return self.key_mask and self.rules.mask is not None and self.rules.mask.shape[3] > 1

    @property
    def pair_mask(self) -> bool:
        """Returns whether the mask differs between queries or heads. Every block then needs the mask."""
        return self.rules.mask is not None and not self.key_mask

    @property
    def by_pairs(self) -> bool:
        """Returns whether a rule for each pair, a pair mask or segment ids, may leave any key without a query."""
        return self.pair_mask or self.rules.query_ids is not None

    @property
    def by_keys(self) -> bool:
        """Returns whether all queries of a sequence attend to the same keys."""
        unlimited = self.options.window == (None, None) and self.rules.query_lengths is None
        return unlimited and not self.by_pairs

    @property
    def varlen(self) -> bool:
        """Returns whether the input holds packed sequences."""
        return self.rules.cu_seqlens is not None

    def operands(self, spans: Array | None, block: int) -> list[Array | None]:
        """Returns the first operands of every attention kernel: query, key, value and the arrays of `Refs`.

        A table of relative biases becomes a strip, for tiles of at most `block` queries or keys.
        """
        r = self.rules
        bias = strip(r.bias, block) if self.options.relative and r.bias is not None else r.bias
        return [self.query, self.key, self.value, bias, r.mask, r.query_ids, r.key_ids, r.seed, spans]

    def grid(self, length: int, heads: int, block: int) -> tuple[int, int, int]:
        """Returns the grid (tile, head, sequence) with one program for each tile of `block` rows.

        For packed sequences it is (1, head, tile of any sequence), see `attention_spans.Tiles`.
        """
        if not self.varlen:
            return pl.cdiv(length, block), heads, self.batch
        return 1, heads, self.tiles_back_to_back(block)

    def tiles_back_to_back(self, block: int) -> int:
        """Returns an upper bound of the number of tiles of packed sequences, whatever their lengths are."""
        return pl.cdiv(self.query.shape[1], block) + self.batch


def strip(table: Array, block: int) -> Array:
    """Moves a table of relative biases `[1, N|1, 1, 2R+1]` to the right by one more element in each of `block` rows.

    Element (r, x) of the result `[1, N|1, block, 2D+block]` is for a key minus query of x - D - r, where D is at least
    R + block - 1. A tile of biases then is a rectangle, and loading it takes no index for each element.
    """
    # H100, 32x512x12x64, bf16, R = 128, an index for each element: 443 us (without a bias 78), 2026-11-27
    reach = table.shape[3] // 2
    farthest = pl.cdiv(reach + block - 1, _ALIGNED) * _ALIGNED
    offset = jnp.arange(2 * farthest + block)[None] - farthest - jnp.arange(block)[:, None]
    return table[:, :, 0][:, :, jnp.clip(offset, -reach, reach) + reach]


def problem(query: Array, key: Array | None, value: Array | None, rules: Rules, options: Options) -> Problem:
    """Returns the `Problem` of a call, see `attention.forward`. A window that excludes nothing becomes None."""
    if key is None or value is None:
        heads, size = query.shape[-2:]
        kv_heads, k_head, v_head = heads, heads, 2 * heads  # the packed array has query, key and then value heads
        query = query.reshape(-1 if rules.cu_seqlens is None else 1, query.shape[-4], 3 * heads, size)
        key = value = query
    else:
        heads, size = query.shape[-2:]
        kv_heads, k_head, v_head = key.shape[2], 0, 0
    batch, length, key_length = query.shape[0], query.shape[1], key.shape[1]
    if rules.cu_seqlens is not None:
        # Add a sequence of length 0 that holds the rows after the last sequence. The kernels set these rows to 0.
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
    """Calls `compute(tile, head, sequence)` for each tile of this program.

    If `programs` is not 0, that many programs share all tiles, `tiles` per sequence and head, and a program reads its
    next tile while it computes one. Otherwise a program has the tile of its place in `Problem.grid`.
    """
    if not programs:
        tile, head = pl.program_id(0), pl.program_id(1)
        if not p.varlen:
            return compute(tile, head, common.program_id_from_the_end(2))
        batch = pl.program_id(2)  # index into `Tiles`, where the longest sequences come first
        rows = common.load(spans_ref.at[batch, tile, jnp.int32(8)])  # the length of the sequence, see `load_place`
        return pl.when(rows > 0)(lambda: compute(tile, head, batch))
    program, last = pl.program_id(0), tiles * heads * p.batch - 1

    def step(i, _):
        item = last - program - jnp.int32(i) * programs
        row = lax.div(item, jnp.int32(tiles))
        compute(lax.rem(item, jnp.int32(tiles)), lax.rem(row, jnp.int32(heads)), lax.div(row, jnp.int32(heads)))

    lax.fori_loop(0, lax.div(last - program, jnp.int32(programs)) + 1, step, None)


class Span(NamedTuple):
    """Key range of a query tile, or query range of a key tile."""

    first: Any  # the first row of the other side that any row of the tile attends to
    last: Any  # one past the last such row
    full_start: Any  # the first block of the other side that all rows of the tile attend to, so that it needs no mask
    full_stop: Any  # one past the last such block
    end: Any  # one past the last row of the tile's own side that takes part, counted within the sequence

    def blocks(self, block: int) -> tuple[Any, Any]:
        """Returns the range of blocks to visit, start and stop, for blocks of `block` rows."""
        if isinstance(self.last, int):
            return 0, pl.cdiv(self.last, block)
        return lax.div(self.first, jnp.int32(block)), lax.div(self.last + jnp.int32(block - 1), jnp.int32(block))


def load_span(spans_ref, batch, tile, length: int, other_length: int, other_block: int, full: bool) -> Span:
    """Loads the span of a tile, given by its place in the grid.

    Without spans, a tile attends to all positions of the other side. If `full` is False, no block counts as full.
    """
    if spans_ref is None:
        return Span(0, other_length, 0, other_length // other_block if full else 0, length)
    batch = batch if spans_ref.shape[0] > 1 else jnp.int32(0)
    span = Span(*(common.load(spans_ref.at[batch, tile, jnp.int32(i)]) for i in range(5)))
    if not full:
        start, _ = span.blocks(other_block)
        span = span._replace(full_start=start, full_stop=start)
    return span


def in_span(p: Problem, span: Span, positions: Array) -> Array:
    """Returns which positions of the other side are in the span, which begins at 0 if `p.by_keys`."""
    inside = positions < span.last
    return inside if p.by_keys else inside & (positions >= span.first)


def fewest_keys(compute: Callable[..., Any], last: Any, block_k: int) -> Any:
    """Calls `compute` on a block of all keys, or on its first half if the last key that takes part is there."""
    # H200, backward pass, 256 sequences of 128 keys, half of the keys valid: 207 us (whole block 241), 2026-11-23
    if isinstance(last, int) or block_k < 32:  # a matmul needs at least 16 keys
        return compute(block_k=block_k)
    half = functools.partial(compute, block_k=block_k // 2)
    return lax.cond(last <= block_k // 2, half, functools.partial(compute, block_k=block_k))


def near_blocks(p: Problem, start, block: int, other_block: int) -> tuple[Any, Any] | None:
    """Returns the range of blocks of the other side that are near a tile of `block` rows from `start`.

    All pairs of the tile and of a block that is not near have one bias, an end of the table of relative biases. Returns
    None without a table, and if the sequences are too short for blocks that are not near.
    """
    if not p.options.relative or p.rules.bias is None:
        return None
    reach = p.rules.bias.shape[3] // 2
    if max(p.query_length, p.key_length) < reach + min(block, other_block):
        return None
    first = lax.div(jnp.maximum(jnp.int32(start) - (reach - 1), 0), jnp.int32(other_block))
    return first, lax.div(jnp.int32(start) + (block + reach - 2), jnp.int32(other_block)) + 1


def visit_all(
    span: Span, block: int, leading: bool, visit: Callable[..., Any], carry: Any, near: tuple[Any, Any] | None
) -> Any:
    """Folds `visit(j, carry, edge=needs_mask)` over a span's blocks. `leading`: edges may come before full blocks.

    With `near_blocks`, it visits the other full blocks with `far=True`.
    """
    # H200: masks in every block would cost 20-60 %, 2026-11-20
    start, stop = span.blocks(block)
    edge, full = functools.partial(visit, edge=True), functools.partial(visit, edge=False)
    if leading:
        carry = lax.fori_loop(start, span.full_start, edge, carry)
    if not (isinstance(span.full_stop, int) and span.full_stop == 0):
        first, last = span.full_start, span.full_stop
        if near is not None:
            first, last = (jnp.clip(j, span.full_start, span.full_stop) for j in near)
            # H200, bf16, 32x512x12x64, R = 128, float32 table: 124 us (all blocks near 129), 2026-11-28
            far = functools.partial(full, far=True)
            carry = lax.fori_loop(span.full_start, first, far, carry)
            carry = lax.fori_loop(last, span.full_stop, far, carry)
        carry = lax.fori_loop(first, last, full, carry)
    if not (isinstance(span.full_stop, int) and span.full_stop == stop):
        carry = lax.fori_loop(span.full_stop, stop, edge, carry)
    return carry


class Place(NamedTuple):
    """Position of a tile in its sequence and in the arrays."""

    batch: Any  # the sequence of the tile
    start: Any  # the first row of the tile, counted within the sequence
    index: Any  # the index into the first axis of the arrays; 0 for packed sequences
    offset: Any  # the first row of the sequence in the arrays; 0 unless sequences are packed
    length: Any  # the number of rows of the sequence in the arrays


def load_place(p: Problem, refs: Refs, batch, tile, block: int, length: int) -> Place:
    """Returns the place of a tile from its place in the grid. `length` is not used for packed sequences."""
    if not p.varlen:
        return Place(batch, tile * block, batch, 0, length)
    sequence, start, offset, rows = (common.load(refs.spans.at[batch, tile, jnp.int32(i)]) for i in range(5, 9))
    return Place(sequence, start, jnp.int32(0), offset, rows)


def in_head(p: Problem) -> Array | None:
    """Returns a mask `[1, width]` of the columns that a head has, or None if a head has all columns of its tiles."""
    return None if p.width == p.head_size else (common.positions(0, p.width) < p.head_size)[None, :]


def load_tile(p: Problem, ref, index, row, block: int, head, in_rows: Array | None):
    """Loads a tile `[block, width]` from an array `[B, L, heads, H]`, with 0 outside of `in_rows` (None: all rows)."""
    place = index, common.span(row, block), head, common.span(0, p.width)
    return common.load(ref.at[place], mask=tile_mask(p, block, in_rows))


def store_tile(p: Problem, ref, index, row, head, tile, in_rows: Array | None) -> None:
    """Stores a tile `[block, width]` into an array `[B, L, heads, H]`, only the rows `in_rows` (None: all rows)."""
    block = tile.shape[0]
    rows, columns = common.place_to_store(ref.dtype, row, 0, tile.shape)
    common.store(ref.at[index, rows, head, columns], tile.astype(ref.dtype), mask=tile_mask(p, block, in_rows))


def tile_mask(p: Problem, block: int, in_rows: Array | None) -> Array | None:
    """Returns the mask `[block, width]` of a tile's valid rows and columns, or None if all of them are valid."""
    columns = in_head(p)
    if in_rows is None:
        return None if columns is None else jnp.broadcast_to(columns, (block, p.width))
    return jnp.broadcast_to(in_rows[:, None] if columns is None else in_rows[:, None] & columns, (block, p.width))


class Pairs(NamedTuple):
    """Positions of the pairs of a query tile and a key tile: one side is `[n, 1]`, the other `[1, n]`."""

    batch: Any
    head: Any
    rows: Array  # the positions of the queries
    columns: Array  # the positions of the keys
    in_rows: Array | None  # which of the queries exist; None if all do
    in_columns: Array | None  # which of the keys exist or take part; None if all do
    first_row: Any  # the position of the first query, a multiple of 16
    first_column: Any  # the position of the first key, a multiple of 16
    far: bool = False  # whether all pairs have the same relative bias, see `near_blocks`

    def load(self, ref):
        """Loads the elements of a `[B|1, N|1, T|1, S|1]` array for these pairs, 0 where query or key does not exist."""
        zero = jnp.int32(0)
        by_row, by_column = ref.shape[2] > 1, ref.shape[3] > 1
        masks: list[Any] = [self.in_rows] * by_row + [self.in_columns] * by_column
        masks = [x for x in masks if x is not None]
        columns = common.by_eights(self.columns) if ref.dtype.itemsize == 1 else self.columns
        index = [self.batch if ref.shape[0] > 1 else zero, self.head if ref.shape[1] > 1 else zero,
                 self.rows if by_row else zero, columns if by_column else zero]  # fmt: skip
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in index))
        index[2:] = [jnp.broadcast_to(x, shape) if jnp.ndim(x) else x for x in index[2:]]
        inside = jnp.broadcast_to(functools.reduce(operator.and_, masks), shape) if masks else None
        return common.load(ref.at[tuple(index)], mask=inside)

    def load_relative(self, ref):
        """Loads the elements of a `strip` of relative biases, or the one element of a block that is far away."""
        zero, farthest = jnp.int32(0), (ref.shape[3] - ref.shape[2]) // 2 // _ALIGNED
        head = self.head if ref.shape[1] > 1 else zero
        if self.far:
            end = jnp.where(self.first_column > self.first_row, jnp.int32(ref.shape[3] - 1), zero)
            return common.load(ref.at[zero, head, zero, end])
        # Tiles that lie farther apart have the same biases as those at this distance. The multiplication tells Triton
        # that the rows of the rectangle are aligned.
        between = lax.div(jnp.int32(self.first_column - self.first_row), jnp.int32(_ALIGNED))
        start = (jnp.clip(between, -farthest, farthest) + farthest) * jnp.int32(_ALIGNED)
        index = self.rows - self.first_row, self.columns - self.first_column + start
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in index))
        place = tuple(jnp.broadcast_to(x, shape) for x in index)
        return common.load(ref.at[zero, head, *place])


def allowed(p: Problem, refs: Refs, pairs: Pairs) -> Any:
    """Returns which pairs attend to each other, given that all queries take part, or None if all pairs attend."""
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


def logits(p: Problem, refs: Refs, pairs: Pairs, products: Array, scale: float) -> Array:
    """Computes natural logits: the dot products of queries and keys times `scale`, plus the bias."""
    if refs.bias is None:
        return products * scale
    bias = pairs.load_relative(refs.bias) if p.options.relative else pairs.load(refs.bias)
    return common.fma(products, scale, bias.astype(jnp.float32))


def probabilities(p: Problem, refs: Refs, pairs: Pairs, products: Array, top: Array, total: Array | None) -> Array:
    """Computes the probabilities again. `total` is None if `top` is the log-sum-exp or the caller normalises."""
    if p.natural:
        return exponentials(p, logits(p, refs, pairs, products, p.options.scale) - top, total)
    exponent = common.fma(products, p.options.scale * LOG2_E, -top)
    return common.exp2(exponent if total is None else exponent - total)


def exponentials(p: Problem, x: Array, total: Array | None = None) -> Array:
    """Computes the exponentials of `x`, natural if `p.natural` and base 2 otherwise, divided by 2^total."""
    high = x * LOG2_E if p.natural else x
    exponent = high if total is None else high - total
    y = common.exp2(exponent)
    if p.precision is None:
        return y
    # Rounding errors of the exponent, corrected to first order.
    rest = common.fma(x, LOG2_E, -high) + x * _LOG2_E_REST  # NaN where x is -inf; y is 0 there
    if total is not None:  # add the rounding error of the difference, by Knuth's two-sum
        part = exponent - high
        rest = rest + ((high - (exponent - part)) - (total + part))
    return jnp.where(y == 0.0, y, common.fma(y, rest * math.log(2.0), y))


def drop(p: Problem, refs: Refs, pairs: Pairs, x: Array) -> Array:
    """Returns `x` with 0 where dropout drops the pair. Without a dropout seed, `x` is returned unchanged."""
    if refs.seed is None:
        return x
    row = (pairs.batch * (p.options.heads or p.heads) + pairs.head) * p.query_length + pairs.rows
    return jnp.where(common.keep(refs.seed, p.options.dropout_rate, row, pairs.columns), x, 0.0)


def in_key_mask(p: Problem, refs: Refs, batch, columns: Array, inside: Array) -> Array:
    """Returns `inside`, bool `[block]`, without the keys that the key mask excludes."""
    if not p.key_holes:
        return inside
    zero = jnp.int32(0)
    index = batch if refs.mask.shape[0] > 1 else zero
    return common.load(refs.mask.at[index, zero, zero, columns], mask=inside)


def dot(p: Problem, a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    """Computes the matmul of two tiles in float32."""
    # Plain JAX multiplies a matrix and a vector in a more accurate order than a matmul.
    thin = p.precision is not None and min(p.query_length, p.key_length, p.head_size) == 1
    multiply = common.dot_in_short_chains if thin else common.dot
    return multiply(a, b, trans_a=trans_a, trans_b=trans_b, precision=p.precision)


def add(p: Problem, total: Array, product: Array) -> Array:
    """Adds the matmul of a block to the total."""
    # In full precision by an opaque addition: a single chain of additions over all blocks would lose digits.
    return total + product if p.precision is None else common.fma(product, 1.0, total)


def reciprocal(p: Problem, x: Array) -> Array:
    """Computes 1 / x, rounded to the nearest number in full precision only."""
    # H200: rounding to the nearest makes a short backward pass 7 % slower, 2026-11-22
    return 1.0 / x if p.precision is None else common.rounded_reciprocal(x)


def clear(tile: Array, used: Array) -> Array:
    """Sets the rows of a tile `[block, width]` that `used`, bool `[block]`, excludes to 0, even where they hold NaN."""
    # A bitwise AND instead of `where`. For an operand of a matmul, Triton may pass the condition of `where` through
    # shared memory in the layout of tensor cores, which fails for single bits with the error
    # "'ttg.local_alloc' op element type bit width".
    bits = jnp.dtype(f"int{8 * tile.dtype.itemsize}")
    mask = jnp.where(used, jnp.full(used.shape, -1, bits), jnp.zeros(used.shape, bits))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(tile, bits) & mask[:, None], tile.dtype)


def any_of(pairs: Any, axis: int) -> Array:
    """Returns whether any element along an axis of a bool array is True."""
    return jnp.max(pairs.astype(jnp.int32), axis=axis) > 0
