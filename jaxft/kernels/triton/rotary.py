"""Kernel for rotary positions: rotates pairs of elements of each head by an angle that grows with the position.

The angles, their sines and their cosines are computed in float32 once for the heads of a tile. In place, the kernel
reads and writes the heads that rotate, and no others. The gradient is the rotation by minus the angle.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning.table import ElementwiseConfig, next_power_of_2

MAX_HEAD_SIZE = 2048


def unsupported(x: Array, positions: Array, name: str) -> str | None:
    """Returns the reason why the kernel cannot rotate x `[..., N, H]`, which messages call `name`, or None."""
    reason = common.unsupported_dtype(**{name: x}) or common.unsupported_array(positions=positions)
    if reason is None and x.shape[-1] > MAX_HEAD_SIZE:
        return f"the head size is {x.shape[-1]}, the kernel takes at most {MAX_HEAD_SIZE}"
    return reason or common.unsupported_size(x, name)


def _kernel(
    x_ref: Any, positions_ref: Any, frequencies_ref: Any, y_ref: Any,
    *, rotated: int, visited: int, inverse: bool, config: ElementwiseConfig,
) -> None:  # fmt: skip
    rows, _, size = x_ref.shape
    half, block_rows = size // 2, config.block_rows
    block_half = next_power_of_2(half)
    block_heads = max(1, config.block_width // block_half)
    # Starts with the last rows, which a matmul has just written.
    row, head = common.program_id_from_the_end(1) * block_rows, pl.program_id(0) * block_heads
    numbers, heads = common.positions(row, block_rows), common.positions(head, block_heads)
    in_rows, in_half = numbers < rows, common.positions(0, block_half) < half
    inside = in_rows[:, None, None] & (heads < visited)[None, :, None] & in_half[None, None, :]

    position = common.load(positions_ref.at[lax.rem(numbers, jnp.int32(positions_ref.shape[0]))], mask=in_rows)
    frequency = common.load(frequencies_ref.at[common.span(0, block_half)], mask=in_half)
    angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
    sin, cos = (f(angle)[:, None, :] for f in (jnp.sin, jnp.cos))  # [block_rows, 1, block_half]
    if inverse:
        sin = -sin

    places = [(common.span(row, block_rows), common.span(head, block_heads), common.span(start, block_half))
              for start in (0, half)]  # fmt: skip
    pair = [common.load(x_ref.at[place], mask=inside) for place in places]
    first, second = (x.astype(jnp.float32) for x in pair)
    for place, x, turned in zip(places, pair, (first * cos - second * sin, second * cos + first * sin), strict=True):
        y = turned.astype(y_ref.dtype)
        if visited > rotated:
            y = jnp.where(jnp.broadcast_to((heads < rotated)[None, :, None], x.shape), y, x)
        common.store(y_ref.at[place], y, mask=inside)


def rotate(
    x: Array, positions: Array, frequencies: Array, *, rotated: int, inverse: bool, in_place: bool,
    config: ElementwiseConfig, interpret: bool,
) -> Array:  # fmt: skip
    """Rotates the first `rotated` heads of x `[M, heads, H]`, and copies the other heads.

    Row m has the position `positions[m % len(positions)]`, int32. `frequencies`, float32 `[H // 2]`, are angles per
    position. With `inverse`, all angles are negative. With `in_place`, the result takes the memory of `x`.
    """
    rows, heads, size = x.shape
    visited = rotated if in_place else heads
    block_heads = max(1, config.block_width // next_power_of_2(size // 2))
    (y,) = common.launch(
        functools.partial(_kernel, rotated=rotated, visited=visited, inverse=inverse, config=config),
        (pl.cdiv(visited, block_heads), pl.cdiv(rows, config.block_rows)),
        [x, positions, frequencies],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="rotary",
        num_warps=config.num_warps,
        aliases={0: 0} if in_place else {},
        interpret=interpret,
    )
    return y
