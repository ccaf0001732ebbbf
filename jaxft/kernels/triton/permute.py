"""Kernels that permute axes, and that split a packed QKV projection into heads and join the heads again.

Each kernel reads and writes every element once. A program of `permute` moves one tile: a block along the innermost axes
of the input, so that the program reads whole lines, by a block along the innermost axes of the output, so that it
writes whole lines. Between the read and the write, the tile is transposed through shared memory. If the innermost axis
stays in place and is long, the two blocks are one, and rows move unchanged through the registers of one thread. The
rest of a program's budget of elements goes to further axes, so that short axes do not make small programs.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning.table import ElementwiseConfig, GradientConfig, PermuteConfig, next_power_of_2

# Pallas indexes arrays of up to 4 GiB with signed 32-bit integers.
MAX_SIZE = 2**31
MAX_TILED_AXES = 4


# --- permute -----------------------------------------------------------------------------------------------------


def unsupported(x: Array) -> str | None:
    """Returns the reason why the `permute` kernel cannot take an array, or None if it can."""
    if reason := common.unsupported_array(x=x):
        return reason
    if _width(x.dtype) not in (8, 16, 32, 64):
        return f"x is {x.dtype}, the kernel takes types of 1, 2, 4 or 8 bytes"
    return _too_large("x", x)


def _too_large(name: str, x: Array) -> str | None:
    return f"{name} has {x.size} elements, the kernel takes at most {MAX_SIZE}" if x.size > MAX_SIZE else None


def _width(dtype: Any) -> int | None:
    """Returns the width of a dtype in bits; `itemsize` would count types below a byte as one byte."""
    if dtype == jnp.bool_:
        return 8
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 2 * jnp.finfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else None  # None: a random key.


def reduce(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the smallest shape and axes that move the same elements: fewer than two axes if nothing moves."""
    kept = [axis for axis in axes if shape[axis] != 1]
    place = {axis: i for i, axis in enumerate(sorted(kept))}
    groups: list[list[int]] = []  # Merged axes of the input, in the output's order.
    for axis in kept:
        if groups and place[axis] == place[groups[-1][-1]] + 1:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    ordered = sorted(groups)
    return tuple(math.prod(shape[a] for a in group) for group in ordered), tuple(ordered.index(g) for g in groups)


def tile(shape: Sequence[int], axes: Sequence[int], config: PermuteConfig) -> tuple[int, ...]:
    """Chooses a program's tile for a reduced shape and axes: its size, a power of two, along each axis of the input."""
    blocks = [1] * len(shape)

    def full(axis):
        return blocks[axis] == 1 and sum(block > 1 for block in blocks) == MAX_TILED_AXES

    # The output's innermost axis, then a line of the input, then a line of the output; a line may span several axes.
    for order in ((axes[-1],), range(len(shape)), axes):
        room = config.block_inner
        for axis in reversed(order):
            if full(axis):
                break
            blocks[axis] = max(blocks[axis], min(next_power_of_2(shape[axis]), room))
            room //= blocks[axis]
            if blocks[axis] < shape[axis]:
                break
    rows_move = axes[-1] == len(shape) - 1 and next_power_of_2(shape[-1]) >= config.block_inner
    for axis in _in_the_same_order(shape, axes) if rows_move else axes[::-1]:
        if not full(axis):
            block = 2 * blocks[axis]
            while math.prod(blocks) // blocks[axis] * block <= config.elements and block < 2 * shape[axis]:
                if pl.cdiv(shape[axis], block) * block <= 1.25 * shape[axis]:  # little lies beyond the edge
                    blocks[axis] = block
                block *= 2
    return tuple(blocks)


def _in_the_same_order(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Chooses the axes of a tile that reads and writes its rows in the same order.

    No thread then needs what another thread has read. The innermost axis comes first, then the axis before it in the
    input or in the output (the longer one first), then the others from the inside out, except those that would change
    the order.
    """
    chosen = [axes[-1]]
    for axis in (*sorted((axes[-2], len(shape) - 2), key=shape.__getitem__, reverse=True), *axes[::-1]):
        if axis not in chosen and all((axis < a) == (axes.index(axis) < axes.index(a)) for a in chosen):
            chosen.append(axis)
    return chosen


def _kernel(x_ref, y_ref, *, axes: tuple[int, ...], blocks: tuple[int, ...]):
    shape = x_ref.shape
    # Consecutive programs go along the output's innermost axis. Programs that share a line write it at about the same
    # time.
    places = _unravel(pl.program_id(0), [pl.cdiv(shape[axis], blocks[axis]) for axis in axes])
    start = {axis: place * blocks[axis] for axis, place in zip(axes, places, strict=True)}

    def access(order):
        """Returns the axes along which the tile has more than one element, its index, and the mask of the inside."""
        tiled = [axis for axis in order if blocks[axis] > 1]
        mask = None
        for place, axis in enumerate(tiled):
            if shape[axis] % blocks[axis]:
                inside = common.positions(start[axis], blocks[axis]) < shape[axis]
                inside = lax.broadcast_in_dim(inside, [blocks[a] for a in tiled], (place,))
                mask = inside if mask is None else mask & inside
        where = tuple(common.span(start[a], blocks[a]) if blocks[a] > 1 else start[a] for a in order)
        return tiled, where, mask

    read, where, mask = access(range(len(shape)))
    value = common.load(x_ref.at[where], mask=mask)  # Axes with blocks above 1, in the input's order.
    written, where, mask = access(axes)
    common.store(y_ref.at[where], lax.transpose(value, [read.index(axis) for axis in written]), mask=mask)


def _unravel(i: Array, sizes: Sequence[int]) -> list[Array]:
    """Splits a flat index into the index along each axis; the last axis varies fastest."""
    found = []
    for size in reversed(sizes):
        found.append(lax.rem(i, jnp.int32(size)))
        i = lax.div(i, jnp.int32(size))
    return found[::-1]


def forward(x: Array, axes: tuple[int, ...], *, config: PermuteConfig, interpret: bool) -> Array:
    """Permutes the axes of an array whose shape and axes `reduce` has returned. At least two axes move."""
    move = functools.partial(forward, axes=axes, config=config, interpret=interpret)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(move(x.real), move(x.imag))
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:  # Most float8 types do not lower.
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)
    blocks = tile(x.shape, axes, config)
    (y,) = common.launch(
        functools.partial(_kernel, axes=axes, blocks=blocks),
        (math.prod(pl.cdiv(size, block) for size, block in zip(x.shape, blocks, strict=True)),),
        [x],
        [jax.ShapeDtypeStruct(tuple(x.shape[axis] for axis in axes), x.dtype)],
        name="permute",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return y


# --- qkv_bias_split_heads ----------------------------------------------------------------------------------------


def split_unsupported(qkv: Array, bias: Array | None) -> str | None:
    """Returns the reason why `split_heads` and `join_heads` cannot take these arrays, or None if they can."""
    return common.unsupported_dtype(qkv=qkv, bias=bias) or _too_large("qkv", qkv)


def _split_kernel(qkv_ref, bias_ref, *part_refs, config: ElementwiseConfig):
    block_rows, block_width = config.block_rows, config.block_width
    batch, length, _, heads, size = qkv_ref.shape
    sizes = (batch, pl.cdiv(length, block_rows), heads, pl.cdiv(size, block_width))
    b, row, head, column = _unravel(pl.program_id(0), sizes)
    row, column = row * block_rows, column * block_width
    in_rows = common.positions(row, block_rows) < length
    in_width = common.positions(column, block_width) < size
    rows, columns = common.span(row, block_rows), common.span(column, block_width)
    inside = in_rows[:, None] & in_width[None, :]
    for i, part_ref in enumerate(part_refs):
        part = jnp.int32(i)  # JAX refuses a Python integer next to traced indices.
        y = common.load(qkv_ref.at[b, rows, part, head, columns], mask=inside, other=0.0)  # [block_rows, block_width]
        if bias_ref is not None:
            bias = common.load(bias_ref.at[part, head, columns], mask=in_width, other=0.0)
            y = y.astype(jnp.float32) + bias.astype(jnp.float32)[None, :]
        common.store(part_ref.at[b, head, rows, columns], y.astype(part_ref.dtype), mask=inside)


def split_heads(
    qkv: Array, bias: Array | None, num_heads: int, *, config: ElementwiseConfig, interpret: bool
) -> list[Array]:
    """Adds bias `[3*N*H]` to qkv `[B, T, 3*N*H]` and splits the sum into q, k and v, each `[B, N, T, H]`."""
    batch, length, width = qkv.shape
    size = width // (3 * num_heads)
    part = jax.ShapeDtypeStruct((batch, num_heads, length, size), qkv.dtype)
    return common.launch(
        functools.partial(_split_kernel, config=config),
        (batch * pl.cdiv(length, config.block_rows) * num_heads * pl.cdiv(size, config.block_width),),
        [qkv.reshape(batch, length, 3, num_heads, size), None if bias is None else bias.reshape(3, num_heads, size)],
        [part, part, part],
        name="qkv_bias_split_heads",
        num_warps=config.num_warps,
        interpret=interpret,
    )


def _join_kernel(q_ref, k_ref, v_ref, qkv_ref, sums_ref=None, *, programs: int, config: GradientConfig):
    block_rows, block_width = config.block_rows, config.block_width
    batch, length, _, heads, size = qkv_ref.shape
    program, head, column = _unravel(pl.program_id(0), (programs, heads, pl.cdiv(size, block_width)))
    columns = common.span(column * block_width, block_width)
    in_width = common.positions(column * block_width, block_width) < size
    blocks = (batch, pl.cdiv(length, block_rows))

    def move(i, sums):
        """Moves one block of rows and adds it to `sums`, one [block_rows, block_width] for each of q, k and v."""
        b, row = _unravel(program + jnp.int32(i) * programs, blocks)
        rows = common.span(row * block_rows, block_rows)
        inside = (common.positions(row * block_rows, block_rows) < length)[:, None] & in_width[None, :]
        added = []
        for part, part_ref in enumerate((q_ref, k_ref, v_ref)):
            y = common.load(part_ref.at[b, head, rows, columns], mask=inside, other=0.0)  # [block_rows, block_width]
            common.store(qkv_ref.at[b, rows, jnp.int32(part), head, columns], y, mask=inside)
            if sums_ref is not None:
                added.append(sums[part] + y.astype(jnp.float32))
        return added

    sums = [] if sums_ref is None else [jnp.zeros((block_rows, block_width), jnp.float32)] * 3
    share = lax.div(math.prod(blocks) + programs - 1 - program, jnp.int32(programs))
    for part, total in enumerate(lax.fori_loop(0, share, move, sums)):
        common.store(sums_ref.at[program, jnp.int32(part), head, columns], jnp.sum(total, axis=0), mask=in_width)


def join_heads(parts: Sequence[Array], *, with_sums: bool, config: GradientConfig, interpret: bool) -> list[Array]:
    """Joins q, k and v, `[B, N, T, H]` each, to `[B, T, 3*N*H]`, `with_sums` of float32 `[programs, 3*N*H]`."""
    batch, heads, length, size = parts[0].shape
    programs = common.share(config.programs, batch * pl.cdiv(length, config.block_rows))
    qkv = jax.ShapeDtypeStruct((batch, length, 3, heads, size), parts[0].dtype)
    sums = jax.ShapeDtypeStruct((programs, 3, heads, size), jnp.float32)
    found = common.launch(
        functools.partial(_join_kernel, programs=programs, config=config),
        (programs * heads * pl.cdiv(size, config.block_width),),
        parts,
        [qkv, sums] if with_sums else [qkv],
        name="qkv_bias_split_heads_backward",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    width = 3 * heads * size
    return [x.reshape(*x.shape[: x.ndim - 3], width) for x in found]
