"""activation(x + bias) in one pass: FasterTransformer's `add_bias_act` kernel, and its gradients.

The forward kernel moves 2 * M * D elements, plus the bias once a program (from the L2 cache). The backward kernel moves
3 * M * D, dy, x and dx: it computes x + bias again, so that nothing but the inputs is kept for it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning import ElementwiseConfig, GradientConfig

Array = jax.Array


def unsupported(x: Array, bias: Array | None) -> str | None:
    return common.unsupported_dtype(x=x, bias=bias) or common.unsupported_size(x)


def _place(shape, row, column, block_rows: int, block_width: int):
    """Where a block of the array lies, and which of it is inside."""
    rows, width = shape
    in_rows, in_width = common.positions(row, block_rows) < rows, common.positions(column, block_width) < width
    tile = (common.span(row, block_rows), common.span(column, block_width))
    return tile, in_rows[:, None] & in_width[None, :]  # [block_rows, block_width]


def _load_bias(bias_ref, column, block_width: int):
    if bias_ref is None:
        return None
    in_width = common.positions(column, block_width) < bias_ref.shape[0]
    bias = common.load(bias_ref.at[common.span(column, block_width)], mask=in_width, other=0.0)
    return bias.astype(jnp.float32)[None, :]


def _add_bias(x, bias):
    return x.astype(jnp.float32) if bias is None else x.astype(jnp.float32) + bias


def _fwd_kernel(x_ref, bias_ref, y_ref, *, activation: str, block_rows: int, block_width: int):
    row, column = pl.program_id(1) * block_rows, pl.program_id(0) * block_width
    tile, inside = _place(x_ref.shape, row, column, block_rows, block_width)
    x = common.load(x_ref.at[tile], mask=inside, other=0.0)
    y = common.activation(activation, _add_bias(x, _load_bias(bias_ref, column, block_width)), y_ref.dtype)
    common.store(y_ref.at[tile], y.astype(y_ref.dtype), mask=inside)


def _bwd_kernel(
    dy_ref, x_ref, bias_ref, dx_ref, partial_ref=None,
    *, activation: str, block_rows: int, block_width: int, programs: int,
):  # fmt: skip
    rows, width = x_ref.shape
    column, program = pl.program_id(0) * block_width, pl.program_id(1)
    bias = _load_bias(bias_ref, column, block_width)

    def place(block):
        return _place(x_ref.shape, block * block_rows, column, block_rows, block_width)

    def read(block):
        tile, inside = place(block)
        return tuple(common.load(ref.at[tile], mask=inside, other=0.0) for ref in (x_ref, dy_ref))

    def work(block, values, total):
        tile, inside = place(block)
        x, dy = _add_bias(values[0], bias), values[1].astype(jnp.float32)
        dx = common.activation_gradient(activation, x, dy, x_ref.dtype)
        common.store(dx_ref.at[tile], dx.astype(dx_ref.dtype), mask=inside)
        # Beyond the last row dy is 0 and x the bias, so that dx is 0, or NaN where all rows of the column have NaN.
        return total if partial_ref is None else total + dx

    total = None if partial_ref is None else jnp.zeros((block_rows, block_width), jnp.float32)
    total = common.read_ahead(program, programs, pl.cdiv(rows, block_rows), read, work, total)
    if partial_ref is not None:
        in_width = common.positions(column, block_width) < width
        place_of_sums = partial_ref.at[program, common.span(column, block_width)]
        common.store(place_of_sums, jnp.sum(total, axis=0), mask=in_width)


def forward(
    x: Array,
    bias: Array | None,
    *,
    activation: str,
    in_place: bool,
    config: ElementwiseConfig,
    interpret: bool,
) -> Array:
    """x [M, D] and bias [D] -> [M, D], with `in_place` in the memory of x."""
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
        aliases={0: 0} if in_place else {},
        interpret=interpret,
    )
    return y


def backward(
    dy: Array, x: Array, bias: Array | None, *, activation: str, config: GradientConfig, interpret: bool
) -> list[Array]:
    """dy and x [M, D], bias [D] -> dx [M, D], and of the bias' gradient partial sums [programs, D] in float32."""
    rows, width = x.shape
    programs = common.share(config.programs, pl.cdiv(rows, config.block_rows))
    kernel = functools.partial(
        _bwd_kernel,
        activation=activation,
        block_rows=config.block_rows,
        block_width=config.block_width,
        programs=programs,
    )
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if bias is not None:
        outputs.append(jax.ShapeDtypeStruct((programs, width), jnp.float32))
    return common.launch(
        kernel,
        (pl.cdiv(width, config.block_width), programs),
        [dy, x, bias],
        outputs,
        name="bias_activation_bwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
