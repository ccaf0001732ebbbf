"""A gather of rows by index, the kernel of `remove_padding` and `restore_padding`.

It takes as long as a copy of the same bytes. See docs/performance-notes.md, "Removing and restoring padding".
"""

import functools
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning.table import next_power_of_2

_ELEMENTS = 2048  # Elements in the tile of a program. H200, bf16, 9,394x768: 8.4 us (XLA 11.5), 2026-11-22
_WIDTH = 256


def unsupported(x: Array, places: int, **others: Array) -> str | None:
    """Returns the reason why the kernel cannot gather `places` rows of x `[rows, ...]`, or None if it can."""
    if reason := common.unsupported_dtype(x=x) or common.unsupported_array(**others):
        return reason
    if jax.export.is_symbolic_dim(places):
        return f"the number of rows of the result is symbolic, {places}"
    width = math.prod(x.shape[1:])
    if width * x.dtype.itemsize < 32:
        return f"a row of x has {width * x.dtype.itemsize} bytes, the kernel is for rows of at least 32"
    if max(places, x.shape[0], width) > 2**30:
        return f"there are {max(places, x.shape[0])} rows of {width}, the kernel takes at most 2^30 of each"
    return None


def _kernel(x_ref: Any, indices_ref: Any, y_ref: Any, *, block_rows: int, block_width: int) -> None:
    row, column = pl.program_id(1) * block_rows, pl.program_id(0) * block_width
    tile = common.tile(y_ref.shape, row, column, (block_rows, block_width))
    index = common.load(indices_ref.at[tile.place[0]], mask=tile.in_rows)
    values, _ = tile.load_rows(x_ref, index)
    tile.store(y_ref, jnp.where(index[:, None] < 0, jnp.full((), jnp.nan, values.dtype), values))


def take_rows(x: Array, indices: Array, *, interpret: bool) -> Array:
    """Gathers x[indices] from x `[R, W]`. An index of R or more gives a row of zeros, a negative index a row of NaN."""
    rows, width = indices.shape[0], x.shape[1]
    block_width = min(_WIDTH, next_power_of_2(width))
    block_rows = _ELEMENTS // block_width
    (y,) = common.launch(
        functools.partial(_kernel, block_rows=block_rows, block_width=block_width),
        (pl.cdiv(width, block_width), pl.cdiv(rows, block_rows)),
        [x, indices],
        [jax.ShapeDtypeStruct((rows, width), x.dtype)],
        name="take_rows",
        num_warps=4,
        interpret=interpret,
    )
    return y
