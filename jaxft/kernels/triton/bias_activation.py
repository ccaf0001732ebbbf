"""activation(x + bias) in one pass: FasterTransformer's `add_bias_act` kernel.

Moves 2 * rows * width elements, plus the bias once a program (from the L2 cache).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning import ElementwiseConfig

Array = jax.Array


def unsupported(x: Array, bias: Array | None) -> str | None:
    return common.unsupported_dtype(x=x, bias=bias)


def _fwd_kernel(x_ref, bias_ref, y_ref, *, activation: str, block_rows: int, block_width: int):
    rows, width = x_ref.shape
    row, column = pl.program_id(1) * block_rows, pl.program_id(0) * block_width
    columns = common.positions(column, block_width) < width
    inside = (common.positions(row, block_rows) < rows)[:, None] & columns[None, :]
    tile = (common.span(row, block_rows), common.span(column, block_width))
    y = common.load(x_ref.at[tile], mask=inside, other=0.0).astype(jnp.float32)  # [block_rows, block_width]
    if bias_ref is not None:
        bias = common.load(bias_ref.at[common.span(column, block_width)], mask=columns, other=0.0)
        y = y + bias.astype(jnp.float32)[None, :]
    common.store(y_ref.at[tile], common.activation(activation, y, y_ref.dtype).astype(y_ref.dtype), mask=inside)


def forward(x: Array, bias: Array | None, *, activation: str, config: ElementwiseConfig, interpret: bool) -> Array:
    """x [M, D] and bias [D] -> [M, D]."""
    rows, width = x.shape
    kernel = functools.partial(
        _fwd_kernel, activation=activation, block_rows=config.block_rows, block_width=config.block_width
    )
    (y,) = common.launch(
        kernel,
        (pl.cdiv(width, config.block_width), pl.cdiv(rows, config.block_rows)),
        [x, bias],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="bias_activation_fwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return y
