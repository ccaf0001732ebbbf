"""Interface to Pallas' Triton backend, and helpers that several kernels share.

Every kernel is launched through `launch`, and every masked access goes through `load` and `store`. A move to another
backend therefore changes this file and leaves the kernels alone. (JAX deprecates the Triton backend since 0.11.)
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft import dispatch, reference
from jaxft.dropout import keep_bits, keep_threshold

try:
    from jax.experimental.pallas import triton as plgpu

    store, dot = plgpu.store, plgpu.dot
except ImportError:  # JAX for Windows has no Triton, and `dispatch.choose` no kernels there
    pass
else:
    with contextlib.suppress(ImportError, AttributeError):  # a later jaxlib: the search is slower, nothing else
        from jaxlib.mlir._mlir_libs import _mlir

        _mlir.globals.append_dialect_search_prefix("jaxft.kernels.triton.dialects")  # see its module `tt`


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
    """Launches `kernel(*operand_refs, *output_refs)` over a grid, whose first axis is the fastest. Returns the outputs.

    Refs are whole arrays. A kernel computes its own offsets and masks accesses beyond the edges of an array. An operand
    that is None has None for its ref. `aliases` maps the index of an operand to the output that reuses its memory; XLA
    copies the operand first if something else still reads it.
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
    """Returns the arguments that make the outputs vary over the mesh axes of all operands, as a shard_map requires."""
    axes = [jax.typeof(x).manual_axis_type for x in operands]
    return {"manual_axis_type": type(axes[0])(varying=frozenset().union(*(a.varying for a in axes)))}


def load(where: Any, *, mask: Array | None = None, other: float | None = 0) -> Array:
    """Loads `where`, a `ref.at[...]`. Elements that the mask excludes are `other`, or undefined if that is None."""
    if mask is None or other is None:
        return plgpu.load(where, mask=mask)
    return plgpu.load(where, mask=mask, other=jnp.full((), other, where.dtype))


def dot_in_short_chains(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False, precision: Any) -> Array:
    """Computes a float32 matmul as a sum of up to four chains of additions of at least 16 terms each.

    It is for matmuls that plain JAX computes as a matrix times a vector, where it adds the terms in a tree. A single
    chain would lose more digits. A chain is a matmul in which the terms of the other chains are 0. A loop adds up the
    chains, so that only one of them takes shared memory at a time.
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
    """Returns a slice of `size` indices, a power of two. It may extend past the end of the array: mask the access."""
    return pl.ds(jnp.int32(start), size)  # an int32 array: JAX rejects a Python int whose slice leaves the array


def place_to_store(dtype: Any, row: Array | int, column: Array | int, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the indices of the rows and columns of a tile that is stored to an array of this dtype."""
    # H100, attention 32x512, 12 heads, float8 result: 76.2 us (16 float8 per thread 93.4), 2026-11-27
    # See docs/performance-notes.md, "FP8: layouts of stores".
    if dtype != reference.FLOAT8:
        return span(row, shape[0]), span(column, shape[1])
    rows, columns = positions(row, shape[0]), by_eights(positions(column, shape[1]))
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def by_eights(columns: Array) -> Array:
    """Returns consecutive indices, computed in a way that shows Triton only 8 consecutive ones at a time.

    It is for arrays of one byte per element. Triton gives all tiles of one shape the same layout. The widest load or
    store says how many consecutive elements a thread has. Beside an access to 16 bytes, a thread would load 16
    bfloat16 in two halves, and each load of a warp would leave out every other 16 bytes.
    """
    eight = jnp.int32(8)
    return lax.div(columns, eight) * eight + lax.rem(columns, eight)


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
        """Loads the columns of the tile from the rows `numbers` of an array `[R, D]`.

        Rows that the array does not have are 0. Also returns which rows it has, bool `[rows, 1]`.
        """
        there = ((numbers >= 0) & (numbers < ref.shape[0]))[:, None]
        inside = there if self.in_width is None else there & self.in_width[None, :]
        place = jnp.broadcast_to(numbers[:, None], self.shape), jnp.broadcast_to(self.columns[None, :], self.shape)
        return load(ref.at[place], mask=jnp.broadcast_to(inside, self.shape)), there

    def store(self, ref: Any, values: Array) -> None:
        """Stores the values, cast to the dtype of `ref`, except those beyond the edges."""
        place = place_to_store(ref.dtype, self.row, self.column, self.shape)
        store(ref.at[place], values.astype(ref.dtype), mask=self.inside)


def tile(
    array: Sequence[int], row: Array | int, column: Array | int, shape: tuple[int, int], *, may_be_beyond: bool = False
) -> Tile:
    """Returns a tile of an array `[M, D]`, with masks only for the axes that need them.

    `row` and `column` are multiples of the sizes in `shape`, which are powers of two. The column must lie within the
    array, and so must the row unless `may_be_beyond`.
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
    """Applies a PTX instruction to float32 arrays. `operands` are `$1` for the first array and so on, or literals."""
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
    """Computes x * y + z of float32 with one instruction and one rounding. XLA compiles the expression to two."""
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
    """Passes a 16-bit `x` through an opaque move: the compiler recomputes what depends on it, which saves registers."""
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
    """Returns how many programs add up `blocks` blocks: `programs`, or more, so that each adds up at most 128."""
    # A longer chain of additions would lose digits.
    return min(blocks, max(programs, pl.cdiv(blocks, 128)))


def program_id_from_the_end(axis: int) -> Array:
    """Returns `pl.program_id` counted from the last program, for kernels whose input a matmul wrote.

    The order keeps rows in the L2 cache. A matmul writes its last rows last, and the kernel that follows begins with
    them. That kernel writes its first rows last, and most matmuls begin with the first rows. Mosaic GPU's matmuls with
    an activation, whose results are the largest, end with the first rows (`block_at`), with which the next matmul
    begins.
    """
    # H200, bf16, BERT-base 32x512, device time: 5.14 ms (programs in order 5.21), 2026-11-24
    # See docs/performance-notes.md, "Order of rows and the L2 cache".
    return pl.num_programs(axis) - 1 - pl.program_id(axis)


def block_from_the_end(block: Any, blocks: int) -> Array:
    """Returns a block number counted from the last block. A number past the end stays, so that it is masked."""
    return jnp.where(block < blocks, blocks - 1 - block, block)


def read_ahead(
    program: Array, programs: int, blocks: int, read: Callable[[Any], Any], work: Callable[..., Any], carry: Any = None
) -> Any:
    """Folds `work(block, read(block), carry)` over the blocks of a program, every `programs`-th, and returns the carry.

    Each block is read while the previous one is processed. `read` must also accept numbers past the last block.
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
    """Returns whether dropout keeps elements, as `jaxft.dropout.dropout_mask`. `rows` index all leading axes."""
    seed0, seed1 = (load(seed_ref.at[jnp.int32(i)]) for i in range(2))
    bits = keep_bits(seed0, seed1, rows.astype(jnp.uint32), columns.astype(jnp.uint32))
    return bits >= jnp.uint32(keep_threshold(rate))


def unsupported_array(dtypes: Sequence[Any] = (), /, **arrays: Array | None) -> str | None:
    """Returns the reason why the kernels do not support arrays, or None. An empty `dtypes` allows any dtype."""
    for name, x in ((name, x) for name, x in arrays.items() if x is not None):
        if not all(isinstance(size, int) for size in x.shape):  # symbolic sizes come from jax.export
            return f"{name} has a symbolic shape, {x.shape}"
        if axes := jax.typeof(x).sharding.mesh.explicit_axes:  # beside Manual ones: `ops.sharding` maps over all others
            return (
                f"{name} is in a mesh with Explicit axes, {axes}; a kernel runs inside of a jax.shard_map over all axes"
            )
        if dtypes and x.dtype not in dtypes:
            return f"{name} is {x.dtype}, the kernels take float32, float16 and bfloat16"
    return None


def unsupported_dtype(**arrays: Array | None) -> str | None:
    """Returns the reason why the kernels do not support floating-point arrays, or None if they do."""
    return unsupported_array((jnp.float32, jnp.float16, jnp.bfloat16), **arrays)


def to_float8(x: Array, scale: float) -> Array:
    """Rounds x / scale to float8_e4m3fn, as `jaxft.reference.to_float8` does. Triton's conversion clips."""
    x = x if scale == 1.0 else x * (1.0 / scale)
    most = reference.LARGEST_FLOAT8
    return (jnp.clip(x, -most, most) if interpreting.get() else x).astype(reference.FLOAT8)


def unsupported_float8(x: Array, kernel: Array, **others: Array | None) -> str | None:
    """Returns the reason why the kernels do not support a matmul of float8_e4m3fn x and kernel, or None if they do."""
    return (
        unsupported_by_card() or unsupported_array(x=x, kernel=kernel) or unsupported_dtype(**others)
        or unsupported_size(x)
    )  # fmt: skip


def unsupported_by_card() -> str | None:
    """Returns the reason why kernels cannot use float8_e4m3fn on this card, or None if they can."""
    have = dispatch.device().compute_capability
    if have is not None and have < (8, 9):
        return f"float8_e4m3fn needs compute capability 8.9, {dispatch.device_kind()} has {have[0]}.{have[1]}"
    return None


def unsupported_rows(x: Array, **arrays: Array | None) -> str | None:
    """Returns the reason why the kernels do not support rows x `[..., D]` and the other arrays, or None if they do."""
    return unsupported_dtype(x=x, **arrays) or unsupported_size(x)


def unsupported_size(x: Array, name: str = "x") -> str | None:
    """Returns the reason why the kernels do not support the size of `x` as `[rows, width]`, or None.

    The number of elements is not limited: Pallas uses 64-bit offsets into arrays of more than 2^32 bytes. A position in
    one dimension always has 32 bits, also a position between the end of the array and the end of the last block.
    """
    for what, length in (("rows", math.prod(x.shape[:-1])), ("columns", x.shape[-1])):
        if x.size > 0 and length > 2**30:
            return f"{name} has {length} {what}, the kernels take at most 2^30"
    return None
