"""The one seam to Pallas' Triton backend, and what several kernels share; activations are in `activation_common`.

Every kernel is launched through `launch`, and every masked access goes through `load` and `store`, so that a move to
another backend (the Triton backend is deprecated in JAX since 0.11) changes this file and leaves the kernels alone.
The mathematics are pure functions of arrays.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxft.dropout import keep_bits, keep_threshold

Array = jax.Array

store, dot = plgpu.store, plgpu.dot
interpreting = contextvars.ContextVar("interpreting", default=False)  # while a kernel is traced


def launch(
    kernel: Callable[..., None],
    grid: Sequence[int],
    operands: Sequence[Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool,
) -> list[Array]:
    """Runs `kernel(*operand_refs, *output_refs)` over `grid` (the first axis fastest) and returns the outputs.

    Refs are whole arrays: a kernel computes its own offsets and masks what lies beyond an edge. An operand that is None
    has None for its ref. `aliases` maps operands to outputs (by their places) that take their memory; XLA copies an
    operand first where something else still reads it.
    """
    present = [x for x in operands if x is not None]
    place = {i: n for n, i in enumerate(i for i, x in enumerate(operands) if x is not None)}

    def body(*refs: Any) -> None:
        given = iter(refs)
        kernel(*[None if x is None else next(given) for x in operands], *given)

    body.__name__ = name
    varying = _varying(present)

    # XLA (JAX 0.11) starts a kernel before the previous one has ended, and has it wait for that one first of all. If
    # each said at its beginning that the next may start (griddepcontrol.launch_dependents), BERT-base of 1x128 took
    # 277 us on the device for 288 without, of 1x16 209 for 225 (H100, 2026-11-24). But XLA's own kernels read by
    # ld.global.nc, which that wait does not cover, and it cannot be known here that none of them is the next.
    call = pl.pallas_call(
        body,
        grid=tuple(grid),
        out_shape=[jax.ShapeDtypeStruct(o.shape, o.dtype, **varying) for o in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases={place[operand]: output for operand, output in (aliases or {}).items()},
        interpret=interpret,
        name=name,
    )
    token = interpreting.set(interpret)
    try:
        return list(call(*present))
    finally:
        interpreting.reset(token)


def _varying(operands: Sequence[Array]) -> dict[str, Any]:
    """What JAX asks about outputs inside a shard_map: they vary over the mesh axes that any operand varies over."""
    axes = [jax.typeof(x).manual_axis_type for x in operands]
    return {"manual_axis_type": type(axes[0])(varying=frozenset().union(*(a.varying for a in axes)))}


def load(where: Any, *, mask: Array | None = None, other: float | None = 0) -> Array:
    """What lies there, and `other` where the mask is False (None: undefined)."""
    if mask is None or other is None:
        return plgpu.load(where, mask=mask)
    return plgpu.load(where, mask=mask, other=jnp.full((), other, where.dtype))


def dot_in_short_chains(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False, precision: Any) -> Array:
    """`dot`, for products in full float32 that plain JAX computes as a matrix times a vector.

    It sums them up in a tree, and one chain of additions would lose more digits: these are up to four, of 16 products
    or more, with zeros for the others, added in a loop in which one of them at a time takes shared memory.
    """
    depth = a.shape[0 if trans_a else 1]
    chain = max(16, depth // 4)
    if depth <= chain:
        return dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=precision)
    place = lax.div(positions(0, depth), jnp.int32(chain))
    place = place[:, None] if trans_a else place[None, :]

    def add(i: Array, total: Array) -> Array:
        part = jnp.where(place == i, a, 0.0)
        return fma(dot(part, b, trans_a=trans_a, trans_b=trans_b, precision=precision), 1.0, total)

    shape = a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1]
    return lax.fori_loop(0, depth // chain, add, jnp.zeros(shape, jnp.float32))


def positions(start: Array | int, size: int) -> Array:
    """`size` indices from `start` on, in 32 bits whatever JAX's default integers are."""
    return start + jnp.arange(size, dtype=jnp.int32)


def span(start: Array | int, size: int) -> Any:
    """`size` (a power of two) indices from `start` on, possibly past the array's end: mask the access."""
    return pl.ds(jnp.int32(start), size)  # JAX checks a Python integer against the array's bounds, and refuses


class Tile(NamedTuple):
    """A block of rows and columns of an array [M, D], possibly past its edges."""

    row: Array  # the first
    column: Array
    shape: tuple[int, int]  # powers of two
    in_rows: Array | None  # [rows], which of them the array has; None: all
    in_width: Array | None  # [columns], likewise

    @property
    def rows(self) -> Array:
        return positions(self.row, self.shape[0])

    @property
    def columns(self) -> Array:
        return positions(self.column, self.shape[1])

    @property
    def place(self) -> tuple[Any, Any]:
        return span(self.row, self.shape[0]), span(self.column, self.shape[1])

    @property
    def inside(self) -> Array | None:
        """[rows, columns]; None: all."""
        if self.in_rows is None and self.in_width is None:
            return None
        rows = True if self.in_rows is None else self.in_rows[:, None]
        return jnp.broadcast_to(rows if self.in_width is None else rows & self.in_width[None, :], self.shape)

    def load(self, ref: Any) -> Array:
        """0 beyond the edges, which therefore add nothing to a sum."""
        return load(ref.at[self.place], mask=self.inside)

    def load_vector(self, ref: Any) -> Array:
        """These columns of an array [D], as float32 [1, columns]."""
        return load(ref.at[self.place[1]], mask=self.in_width).astype(jnp.float32)[None, :]

    def load_rows(self, ref: Any, numbers: Array) -> tuple[Array, Array]:
        """These columns of the rows of an array [R, D] with these numbers [rows], 0 for one that it does not have.

        And which it has, [rows, 1].
        """
        there = ((numbers >= 0) & (numbers < ref.shape[0]))[:, None]
        inside = there if self.in_width is None else there & self.in_width[None, :]
        place = jnp.broadcast_to(numbers[:, None], self.shape), jnp.broadcast_to(self.columns[None, :], self.shape)
        return load(ref.at[place], mask=jnp.broadcast_to(inside, self.shape)), there

    def store(self, ref: Any, values: Array) -> None:
        store(ref.at[self.place], values.astype(ref.dtype), mask=self.inside)


def tile(
    array: Sequence[int], row: Array | int, column: Array | int, shape: tuple[int, int], *, may_be_beyond: bool = False
) -> Tile:
    """The tile of this shape at row and column, which are multiples of it, of an array [M, D].

    It must begin within the array, but for its rows where it `may_be_beyond`.
    """
    first_row, first_column = jnp.int32(row), jnp.int32(column)
    # Without masks where none are needed: in narrow rows they would be many of the instructions.
    in_rows = positions(first_row, shape[0]) < array[0] if may_be_beyond or array[0] % shape[0] else None
    in_width = positions(first_column, shape[1]) < array[1] if array[1] % shape[1] else None
    return Tile(first_row, first_column, shape, in_rows, in_width)


def exp2(x: Array) -> Array:
    """2^x of float32 by one instruction, with an error of 2 ulp; results below 2^-126 are 0."""
    return _instruction("ex2.approx.ftz.f32", x) if not interpreting.get() else jnp.exp2(x)


def exp(x: Array) -> Array:
    """e^x of float32; the relative error grows with |x|, so that the absolute one of x <= 0 stays below 2^-24."""
    return exp2(x * math.log2(math.e))


def reciprocal(x: Array) -> Array:
    """1 / x of float32 by one instruction, with an error of 1 ulp; results below 2^-126 are 0."""
    return _instruction("rcp.approx.ftz.f32", x) if not interpreting.get() else 1.0 / x


def rounded_reciprocal(x: Array) -> Array:
    """1 / x of float32 to the nearest number, by about eight instructions."""
    return _instruction("rcp.rn.f32", x) if not interpreting.get() else 1.0 / x


def _instruction(name: str, *args: Array, operands: Sequence[str] = ("$1",)) -> Array:
    # Triton's own exp2 and division take four instructions more, for numbers below 2^-126. Without them bias+GELU takes
    # 65 us instead of 76, attention 198 instead of 214 (H200, bfloat16, 16384x4096 and 64x512, 2026-11-20).
    (y,) = plgpu.elementwise_inline_asm(
        f"{name} $0, {', '.join(operands)};",
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return y


def fma(x: Array, y: Array | float, z: Array | float) -> Array:
    """x * y + z of float32 by one instruction, with one rounding; y and z broadcast to x.

    Where a kernel says x * y + z, XLA's compilation of it takes two instructions. With this one GELU of float32 takes
    167 us instead of 195, attention 1,291 instead of 1,346 (H200, 16384x4096 and 2x8192, 2026-11-21).
    """
    if interpreting.get():
        return x * y + z
    arrays, operands = [], []
    for operand in (x, y, z):
        if isinstance(operand, float):
            operands.append(f"0f{np.float32(operand).view(np.uint32):08X}")
        else:
            arrays.append(jnp.broadcast_to(operand, x.shape))
            operands.append(f"${len(arrays)}")
    return _instruction("fma.rn.f32", *arrays, operands=operands)


def opaque(x: Array) -> Array:
    """x, of 16 bits, which no compiler knows to be the same: what was computed from x is computed from it once more."""
    if interpreting.get():
        return x
    (y,) = plgpu.elementwise_inline_asm(
        "mov.b32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def share(programs: int, blocks: int) -> int:
    """How many programs add up the blocks, if `programs` are wanted: more additions in a row would lose digits."""
    return min(blocks, max(programs, pl.cdiv(blocks, 128)))


def program_id_from_the_end(axis: int) -> Array:
    """`pl.program_id` counted from the last program: for kernels whose rows a matrix product wrote.

    The L2 cache holds the rows that it wrote last, and then those that this kernel writes last, with which most
    products begin. Mosaic's with an activation end with them, since their results are the largest (`block_at`). With
    all of that BERT-base of 32x512 takes 5.99 ms for 6.12 where calls are queued, and 5.14 for 5.21 on the device, of
    128x128 5.30 for 5.39 and 4.53 for 4.59 (bfloat16, H200, 2026-11-24, in turns in one process).
    """
    return pl.num_programs(axis) - 1 - pl.program_id(axis)


def block_from_the_end(block: Any, blocks: int) -> Array:
    """The same for `read_ahead`: the last of the blocks first.

    Blocks that are read ahead and are not there stay beyond the last row, where the masks are.
    """
    return jnp.where(block < blocks, blocks - 1 - block, block)


def read_ahead(
    program: Array, programs: int, blocks: int, read: Callable[[Any], Any], work: Callable[..., Any], carry: Any = None
) -> Any:
    """carry = work(block, read(block), carry) for every so many blocks, each read while the one before is worked on.

    Blocks are numbered from 0 on; `read` must give something for numbers beyond the last.
    """
    if programs == blocks:
        return work(program, read(program), carry)

    def step(i, state):  # type: ignore[no-untyped-def]
        values, carry = state
        block = program + i * programs
        return read(block + programs), work(block, values, carry)

    count = lax.div(blocks - 1 - program, jnp.int32(programs)) + 1
    return lax.fori_loop(0, count, step, (read(program), carry))[1]


def keep(seed_ref: Any, rate: float, rows: Array, columns: Array) -> Array:
    """Whether dropout keeps the elements at these places, the same as `dropout_mask` says."""
    seed0, seed1 = (load(seed_ref.at[jnp.int32(i)]) for i in range(2))
    bits = keep_bits(seed0, seed1, rows.astype(jnp.uint32), columns.astype(jnp.uint32))
    return bits >= jnp.uint32(keep_threshold(rate))


def unsupported_array(dtypes: Sequence[Any] = (), /, **arrays: Array | None) -> str | None:
    """Why the kernels cannot take these arrays, if they cannot; `dtypes` are those that they take, () for any."""
    for name, x in ((name, x) for name, x in arrays.items() if x is not None):
        if not all(isinstance(size, int) for size in x.shape):  # of jax.export
            return f"{name} has a symbolic shape, {x.shape}"
        if any(spec := jax.typeof(x).sharding.spec):
            return f"{name} is sharded over Explicit axes, {spec}; a kernel runs on each device inside of jax.shard_map"
        if dtypes and x.dtype not in dtypes:
            return f"{name} is {x.dtype}, the kernels take float32, float16 and bfloat16"
    return None


def unsupported_dtype(**arrays: Array | None) -> str | None:
    """The same of arrays that must be of floats."""
    return unsupported_array((jnp.float32, jnp.float16, jnp.bfloat16), **arrays)


def unsupported_size(x: Array) -> str | None:
    """Why the kernels cannot take x as `[rows, width]`, if they cannot.

    Pallas' offsets are 32-bit into arrays of up to 2^32 bytes and 64-bit into larger ones, so the number of elements,
    of 2 bytes or more, is free. But a position in one dimension is 32-bit, and that past the end of the last block too.
    """
    for what, length in (("rows", math.prod(x.shape[:-1])), ("columns", x.shape[-1])):
        if x.size > 0 and length > 2**30:
            return f"x has {length} {what}, the kernels take at most 2^30"
    return None
