"""Interface to Pallas' Triton backend, and helpers that several kernels share.

Every kernel is launched through `launch`, and every masked access goes through `load` and `store`. A move to another
backend therefore changes this file and leaves the kernels alone. (JAX deprecates the Triton backend since 0.11.) The
mathematics are pure functions of arrays. Activations are in `jaxft.kernels.triton.activations`.
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
interpreting = contextvars.ContextVar("interpreting", default=False)  # whether the kernel being traced is interpreted


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
    """Launches `kernel(*operand_refs, *output_refs)` over a grid.

    Refs are whole arrays. A kernel computes its own offsets and masks accesses beyond the edges of an array.

    Args:
      kernel: the kernel. It writes its results to the output refs.
      grid: the sizes of the grid axes. The first axis is the fastest.
      operands: the input arrays. An operand that is None has None for its ref.
      outputs: the shapes and dtypes of the outputs.
      name: the name of the kernel in profiles.
      num_warps: the number of warps in a program.
      num_stages: the number of stages of Triton's software pipeline.
      aliases: maps the index of an operand to the index of the output that reuses the memory of the operand. XLA copies
        the operand first if something else still reads it.
      interpret: whether to run the kernel in Pallas' interpreter.

    Returns:
      The outputs.
    """
    present = [x for x in operands if x is not None]
    place = {i: n for n, i in enumerate(i for i, x in enumerate(operands) if x is not None)}

    def body(*refs: Any) -> None:
        given = iter(refs)
        kernel(*[None if x is None else next(given) for x in operands], *given)

    body.__name__ = name
    varying = _varying(present)

    # XLA (JAX 0.11) starts a kernel before the previous one has ended, and the kernel first waits for that end. With
    # griddepcontrol.launch_dependents, a kernel could let the next one start earlier. That would be faster, but it is
    # not safe: XLA's own kernels read with ld.global.nc, which the wait does not cover, and one of them may be next.
    # See docs/performance-notes.md, "Programmatic dependent launch".
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
    """Returns the arguments that declare the mesh axes that the outputs vary over, which JAX requires in a shard_map.

    The outputs vary over every axis that an operand varies over.
    """
    axes = [jax.typeof(x).manual_axis_type for x in operands]
    return {"manual_axis_type": type(axes[0])(varying=frozenset().union(*(a.varying for a in axes)))}


def load(where: Any, *, mask: Array | None = None, other: float | None = 0) -> Array:
    """Loads values from memory.

    Args:
      where: the indexed ref, `ref.at[...]`.
      mask: bool, the elements to load. None loads all.
      other: the value of elements that the mask excludes. None leaves them undefined.

    Returns:
      The values.
    """
    if mask is None or other is None:
        return plgpu.load(where, mask=mask)
    return plgpu.load(where, mask=mask, other=jnp.full((), other, where.dtype))


def dot_in_short_chains(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False, precision: Any) -> Array:
    """Computes a matmul in full float32 as a sum of up to four shorter chains of additions.

    It is for matmuls that plain JAX computes as a matrix times a vector. Plain JAX adds their terms in a tree, and a
    single chain of additions would lose more digits. Each chain here has at least 16 terms. A chain is computed as a
    matmul in which the terms of the other chains are 0. A loop adds up the chains, so that only one of them takes
    shared memory at a time.

    Args:
      a: the left operand, `[rows, depth]`.
      b: the right operand, `[depth, columns]`.
      trans_a: whether `a` is transposed, `[depth, rows]`.
      trans_b: whether `b` is transposed, `[columns, depth]`.
      precision: the precision of the matmuls.

    Returns:
      The matmul, float32 `[rows, columns]`.
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
    """Returns the `size` indices from `start` on as int32, whatever JAX's default integer type is."""
    return start + jnp.arange(size, dtype=jnp.int32)


def span(start: Array | int, size: int) -> Any:
    """Returns a slice of `size` indices from `start` on, where `size` is a power of two.

    The slice may extend past the end of the array, so the access needs a mask.
    """
    return pl.ds(jnp.int32(start), size)  # an int32 array: JAX rejects a Python int whose slice leaves the array


class Tile(NamedTuple):
    """A block of rows and columns of an array `[M, D]`. The block may extend past the edges of the array."""

    row: Array  # the first row
    column: Array  # the first column
    shape: tuple[int, int]  # the numbers of rows and columns, powers of two
    in_rows: Array | None  # bool [rows], the rows that the array has; None if it has all of them
    in_width: Array | None  # bool [columns], the columns that the array has; None if it has all of them

    @property
    def rows(self) -> Array:
        """The row indices, `[rows]`."""
        return positions(self.row, self.shape[0])

    @property
    def columns(self) -> Array:
        """The column indices, `[columns]`."""
        return positions(self.column, self.shape[1])

    @property
    def place(self) -> tuple[Any, Any]:
        """The slices of rows and columns that index the array."""
        return span(self.row, self.shape[0]), span(self.column, self.shape[1])

    @property
    def inside(self) -> Array | None:
        """The elements that the array has, bool `[rows, columns]`, or None if it has all of them."""
        if self.in_rows is None and self.in_width is None:
            return None
        rows = True if self.in_rows is None else self.in_rows[:, None]
        return jnp.broadcast_to(rows if self.in_width is None else rows & self.in_width[None, :], self.shape)

    def load(self, ref: Any) -> Array:
        """Loads the tile. Elements beyond the edges are 0 and therefore add nothing to a sum."""
        return load(ref.at[self.place], mask=self.inside)

    def load_vector(self, ref: Any) -> Array:
        """Loads the columns of the tile from an array `[D]`, as float32 `[1, columns]`."""
        return load(ref.at[self.place[1]], mask=self.in_width).astype(jnp.float32)[None, :]

    def load_rows(self, ref: Any, numbers: Array) -> tuple[Array, Array]:
        """Loads the columns of the tile from selected rows of an array `[R, D]`.

        Args:
          ref: the array.
          numbers: the numbers of the rows to load, `[rows]`.

        Returns:
          The values, `[rows, columns]`, with 0 in the rows that the array does not have. And bool `[rows, 1]`, which
          rows the array has.
        """
        there = ((numbers >= 0) & (numbers < ref.shape[0]))[:, None]
        inside = there if self.in_width is None else there & self.in_width[None, :]
        place = jnp.broadcast_to(numbers[:, None], self.shape), jnp.broadcast_to(self.columns[None, :], self.shape)
        return load(ref.at[place], mask=jnp.broadcast_to(inside, self.shape)), there

    def store(self, ref: Any, values: Array) -> None:
        """Stores the values, cast to the dtype of `ref`, except those beyond the edges."""
        store(ref.at[self.place], values.astype(ref.dtype), mask=self.inside)


def tile(
    array: Sequence[int], row: Array | int, column: Array | int, shape: tuple[int, int], *, may_be_beyond: bool = False
) -> Tile:
    """Returns a tile of an array `[M, D]`, with masks only for the axes that need them.

    Args:
      array: the shape of the array, `(M, D)`.
      row: the first row, a multiple of the number of rows of the tile.
      column: the first column, a multiple of the number of columns of the tile. It must lie within the array.
      shape: the numbers of rows and columns of the tile, powers of two.
      may_be_beyond: whether the first row may lie past the end of the array.

    Returns:
      The tile.
    """
    first_row, first_column = jnp.int32(row), jnp.int32(column)
    # Omit masks that are not needed. With narrow rows they would be a large part of the instructions.
    in_rows = positions(first_row, shape[0]) < array[0] if may_be_beyond or array[0] % shape[0] else None
    in_width = positions(first_column, shape[1]) < array[1] if array[1] % shape[1] else None
    return Tile(first_row, first_column, shape, in_rows, in_width)


def exp2(x: Array) -> Array:
    """Computes 2^x of float32 with one instruction. The error is at most 2 ulp. Results below 2^-126 are 0."""
    return _instruction("ex2.approx.ftz.f32", x) if not interpreting.get() else jnp.exp2(x)


def exp(x: Array) -> Array:
    """Computes e^x of float32. The relative error grows with |x|; for x <= 0 the absolute error is below 2^-24."""
    return exp2(x * math.log2(math.e))


def reciprocal(x: Array) -> Array:
    """Computes 1 / x of float32 with one instruction. The error is at most 1 ulp. Results below 2^-126 are 0."""
    return _instruction("rcp.approx.ftz.f32", x) if not interpreting.get() else 1.0 / x


def rounded_reciprocal(x: Array) -> Array:
    """Computes 1 / x of float32, rounded to the nearest number. It takes about eight instructions."""
    return _instruction("rcp.rn.f32", x) if not interpreting.get() else 1.0 / x


def _instruction(name: str, *args: Array, operands: Sequence[str] = ("$1",)) -> Array:
    """Applies a PTX instruction to float32 arrays.

    Args:
      name: the name of the instruction.
      *args: the arrays.
      operands: the operands as they appear in the assembly: `$1` for the first array, or a literal.

    Returns:
      The result, float32 with the shape of the first array.
    """
    # Triton's own exp2 and division take four more instructions, which handle numbers below 2^-126.
    # H200, bf16, bias + GELU 16384x4096: 65 us (Triton's operations 76), 2026-11-20
    # See docs/performance-notes.md, "Single-instruction arithmetic".
    (y,) = plgpu.elementwise_inline_asm(
        f"{name} $0, {', '.join(operands)};",
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return y


def fma(x: Array, y: Array | float, z: Array | float) -> Array:
    """Computes x * y + z of float32 with one instruction and one rounding.

    XLA compiles the expression `x * y + z` in a kernel to two instructions.

    Args:
      x: float32.
      y: float32. It broadcasts to the shape of x.
      z: float32. It broadcasts to the shape of x.

    Returns:
      The result, float32 with the shape of x.
    """
    # H200, fp32, GELU 16384x4096: 167 us (two instructions 195), 2026-11-21
    # See docs/performance-notes.md, "Single-instruction arithmetic".
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
    """Passes a 16-bit `x` through an opaque move.

    The compiler cannot tell that the result equals `x`. It therefore recomputes values derived from the result instead
    of keeping those derived from `x` in registers.
    """
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
    """Returns the number of programs that add up `blocks` blocks, where `programs` is the preferred number.

    There are never more programs than blocks. A program adds up at most 128 blocks, since a longer chain of additions
    would lose digits.
    """
    return min(blocks, max(programs, pl.cdiv(blocks, 128)))


def program_id_from_the_end(axis: int) -> Array:
    """Returns `pl.program_id` counted from the last program, for kernels whose input a matmul wrote.

    The order keeps rows in the L2 cache from one kernel to the next:

    - A matmul writes its last rows last. The kernel that follows begins with these rows.
    - That kernel writes its first rows last. Most matmuls begin with the first rows.
    - Mosaic GPU's matmuls with an activation have the largest results. They end with the first rows (`block_at`), and
      the matmul that usually follows begins with them.
    """
    # H200, bf16, BERT-base 32x512, device time: 5.14 ms (programs in order 5.21), 2026-11-24
    # See docs/performance-notes.md, "Order of rows and the L2 cache".
    return pl.num_programs(axis) - 1 - pl.program_id(axis)


def block_from_the_end(block: Any, blocks: int) -> Array:
    """Returns a block number of `read_ahead` counted from the last block.

    `program_id_from_the_end` explains the order. A number past the last block stays unchanged, so that the masks still
    exclude the block that `read_ahead` reads past the end.
    """
    return jnp.where(block < blocks, blocks - 1 - block, block)


def read_ahead(
    program: Array, programs: int, blocks: int, read: Callable[[Any], Any], work: Callable[..., Any], carry: Any = None
) -> Any:
    """Processes the blocks of one program, and reads each block while the previous one is processed.

    The blocks of a program are `program`, `program + programs`, `program + 2 * programs` and so on.

    Args:
      program: the number of this program.
      programs: the number of programs that share the blocks.
      blocks: the number of blocks.
      read: `read(block)` returns the values of a block. It must also accept numbers past the last block.
      work: `work(block, values, carry)` returns the next carry.
      carry: the initial carry.

    Returns:
      The last carry.
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
    """Returns whether dropout keeps elements. The decision equals `jaxft.dropout.dropout_mask`.

    Args:
      seed_ref: the dropout seed, uint32 `[2]`.
      rate: the dropout rate.
      rows: the row numbers of the elements: their flat indices into the leading axes.
      columns: the indices of the elements in the last axis.

    Returns:
      A bool array in which rows and columns are broadcast.
    """
    seed0, seed1 = (load(seed_ref.at[jnp.int32(i)]) for i in range(2))
    bits = keep_bits(seed0, seed1, rows.astype(jnp.uint32), columns.astype(jnp.uint32))
    return bits >= jnp.uint32(keep_threshold(rate))


def unsupported_array(dtypes: Sequence[Any] = (), /, **arrays: Array | None) -> str | None:
    """Returns the reason why the kernels do not support arrays, or None if they do.

    Args:
      dtypes: the supported dtypes. An empty sequence allows any dtype.
      **arrays: the arrays by name. None is skipped.

    Returns:
      The reason, which names the array, or None.
    """
    for name, x in ((name, x) for name, x in arrays.items() if x is not None):
        if not all(isinstance(size, int) for size in x.shape):  # symbolic sizes come from jax.export
            return f"{name} has a symbolic shape, {x.shape}"
        if any(spec := jax.typeof(x).sharding.spec):
            return f"{name} is sharded over Explicit axes, {spec}; a kernel runs on each device inside of jax.shard_map"
        if dtypes and x.dtype not in dtypes:
            return f"{name} is {x.dtype}, the kernels take float32, float16 and bfloat16"
    return None


def unsupported_dtype(**arrays: Array | None) -> str | None:
    """Returns the reason why the kernels do not support floating-point arrays, or None if they do.

    Args:
      **arrays: the arrays by name. None is skipped.

    Returns:
      The reason, which names the array, or None.
    """
    return unsupported_array((jnp.float32, jnp.float16, jnp.bfloat16), **arrays)


def unsupported_size(x: Array) -> str | None:
    """Returns the reason why the kernels do not support the size of `x` as `[rows, width]`, or None if they do.

    Pallas uses 32-bit offsets into arrays of up to 2^32 bytes and 64-bit offsets into larger ones. The number of
    elements, which have 2 bytes or more, is therefore not limited. A position in one dimension always has 32 bits, also
    a position between the end of the array and the end of the last block.
    """
    for what, length in (("rows", math.prod(x.shape[:-1])), ("columns", x.shape[-1])):
        if x.size > 0 and length > 2**30:
            return f"x has {length} {what}, the kernels take at most 2^30"
    return None
