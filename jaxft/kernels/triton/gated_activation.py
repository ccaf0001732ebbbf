"""Kernels for activation(gate) * other, where `gate` and `other` are the halves of x + bias, and for the gradients.

The arrays are `[M, 2, F]`: the first axis after the rows tells the half. The forward kernel moves 3 * M * F elements.
The backward kernel moves 5 * M * F elements: dy, x and dx. It computes both halves again from x and the bias.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxft.kernels.triton import activations, common
from jaxft.tuning.table import ElementwiseConfig, GradientConfig

unsupported = common.unsupported_rows


def _place(tile: common.Tile, half: int) -> tuple[Any, Any, Any]:
    """Returns the index of a tile in one half of an array `[M, 2, F]`."""
    rows, columns = tile.place
    return rows, jnp.int32(half), columns


def _biases(tile: common.Tile, bias_ref: Any, halves: tuple[int, int]) -> list[Array | None]:
    """Loads the columns of the tile from the halves of the bias `[2, F]`, as float32 `[1, columns]`."""
    if bias_ref is None:
        return [None, None]
    return [
        common.load(bias_ref.at[jnp.int32(half), tile.place[1]], mask=tile.in_width).astype(jnp.float32)[None, :]
        for half in halves
    ]


def _add(x: Array, bias: Array | None) -> Array:
    return x.astype(jnp.float32) if bias is None else x.astype(jnp.float32) + bias


def _fwd_kernel(x_ref, bias_ref, y_ref, *, activation: str, halves: tuple[int, int], config: ElementwiseConfig):
    block_rows, block_width = config.block_rows, config.block_width
    # Starts with the last rows, which a matmul has just written.
    row, column = common.program_id_from_the_end(1) * block_rows, pl.program_id(0) * block_width
    tile = common.tile(y_ref.shape, row, column, (block_rows, block_width))
    parts = [common.load(x_ref.at[_place(tile, half)], mask=tile.inside) for half in halves]
    gate, other = map(_add, parts, _biases(tile, bias_ref, halves))
    tile.store(y_ref, activations.activation(activation, gate, y_ref.dtype) * other)


def _bwd_kernel(
    dy_ref, x_ref, bias_ref, dx_ref, sums_ref=None,
    *, activation: str, halves: tuple[int, int], programs: int, config: GradientConfig,
):  # fmt: skip
    block_rows, block_width = config.block_rows, config.block_width
    column, program = pl.program_id(0) * block_width, pl.program_id(1)
    blocks = pl.cdiv(dy_ref.shape[0], block_rows)
    # The gradient of a float32 bias is as accurate as float32, whatever the dtype of x.
    accuracy = x_ref.dtype if bias_ref is None or bias_ref.dtype != jnp.float32 else jnp.float32

    def tile_of(block):
        shape = block_rows, block_width
        return common.tile(dy_ref.shape, block * block_rows, column, shape, may_be_beyond=programs < blocks)

    def read(block):
        tile = tile_of(block)
        return tile.load(dy_ref), *(common.load(x_ref.at[_place(tile, h)], mask=tile.inside) for h in halves)

    def work(block, values, totals):
        tile, dy = tile_of(block), values[0].astype(jnp.float32)
        gate, other = map(_add, values[1:], biases)
        parts = [
            activations.activation_gradient(activation, gate, dy * other, accuracy),
            dy * activations.activation(activation, gate, accuracy),
        ]
        for half, d in zip(halves, parts, strict=True):
            common.store(dx_ref.at[_place(tile, half)], d.astype(dx_ref.dtype), mask=tile.inside)
        if sums_ref is None:
            return totals
        if tile.in_rows is not None:  # beyond the last row, dy is 0 and an infinite bias would give NaN
            parts = [jnp.where(tile.in_rows[:, None], d, 0.0) for d in parts]
        return tuple(total + d for total, d in zip(totals, parts, strict=True))

    first = tile_of(program)
    biases = _biases(first, bias_ref, halves)
    zeros = jnp.zeros((block_rows, block_width), jnp.float32)
    totals = common.read_ahead(program, programs, blocks, read, work, None if sums_ref is None else (zeros, zeros))
    if sums_ref is not None:
        for half, total in zip(halves, totals, strict=True):
            where = sums_ref.at[program, jnp.int32(half), first.place[1]]
            common.store(where, jnp.sum(total, axis=0).astype(sums_ref.dtype), mask=first.in_width)


def halves_of(gate: str) -> tuple[int, int]:
    """Returns the number of the half that is the gate, then of the other."""
    return (0, 1) if gate == "first" else (1, 0)


def forward(
    x: Array, bias: Array | None, *, activation: str, gate: str, config: ElementwiseConfig, interpret: bool
) -> Array:
    """Computes activation(gate) * other, `[M, F]`, of x `[M, 2 * F]` and bias `[2 * F]` or None."""
    rows, width = x.shape[0], x.shape[1] // 2
    (y,) = common.launch(
        functools.partial(_fwd_kernel, activation=activation, halves=halves_of(gate), config=config),
        (pl.cdiv(width, config.block_width), pl.cdiv(rows, config.block_rows)),
        [x.reshape(rows, 2, width), None if bias is None else bias.reshape(2, width)],
        [jax.ShapeDtypeStruct((rows, width), x.dtype)],
        name="gated_activation_fwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return y


def backward(
    dy: Array, x: Array, bias: Array | None, *, activation: str, gate: str, config: GradientConfig, interpret: bool,
    dtypes: Sequence[Any] = (None, None),
) -> tuple[Array, Array | None]:  # fmt: skip
    """Computes the gradients of x, `[M, 2 * F]`, and of the bias, `[2 * F]` or None, from dy, `[M, F]`.

    They have the given `dtypes`, or the dtypes of x and bias. The gradient of the bias is summed in float32. If one
    program has all rows of its columns, the kernel writes the gradient itself. Otherwise XLA adds up the partial sums
    of the programs.
    """
    rows, width = dy.shape
    programs = common.share(config.programs, pl.cdiv(rows, config.block_rows))
    of_x: Any = dtypes[0] or x.dtype
    of_bias: Any = dtypes[1] or (bias is not None and bias.dtype)
    outputs = [jax.ShapeDtypeStruct((rows, 2, width), of_x)]
    if bias is not None:
        outputs.append(jax.ShapeDtypeStruct((programs, 2, width), of_bias if programs == 1 else jnp.float32))
    dx, *sums = common.launch(
        functools.partial(
            _bwd_kernel, activation=activation, halves=halves_of(gate), programs=programs, config=config
        ),
        (pl.cdiv(width, config.block_width), programs),
        [dy, x.reshape(rows, 2, width), None if bias is None else bias.reshape(2, width)],
        outputs,
        name="gated_activation_bwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )  # fmt: skip
    dx = dx.reshape(x.shape)
    if bias is None:
        return dx, None
    total = sums[0][0] if programs == 1 else jnp.sum(sums[0], axis=0).astype(of_bias)
    return dx, total.reshape(bias.shape)
