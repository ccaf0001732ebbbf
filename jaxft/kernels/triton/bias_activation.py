"""Kernels for activation(x + bias) in one pass, its gradients, and the gradient of a bias alone.

The forward kernel moves 2 * M * D elements, and each program reads the bias from the L2 cache. The backward kernel
moves 3 * M * D elements: dy, x and dx. It recomputes x + bias, so that only the inputs are kept for it.

Source: FasterTransformer's `add_bias_act` kernel.
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


def _add_bias(x, bias):
    return x.astype(jnp.float32) if bias is None else x.astype(jnp.float32) + bias


def _fwd_kernel(x_ref, bias_ref, y_ref, *, activation: str, config: ElementwiseConfig):
    block_rows, block_width = config.block_rows, config.block_width
    # Starts with the last rows: the L2 cache still holds those that a matmul has just written.
    # H200, bf16, after XLA's matmul of 16384x768x3072: 49.8 us (first rows first 51.3), 2026-11-24
    row, column = common.program_id_from_the_end(1) * block_rows, pl.program_id(0) * block_width
    tile = common.tile(x_ref.shape, row, column, (block_rows, block_width))
    bias = None if bias_ref is None else tile.load_vector(bias_ref)
    tile.store(y_ref, activations.activation(activation, _add_bias(tile.load(x_ref), bias), y_ref.dtype))


def _bwd_kernel(
    dy_ref, x_ref, bias_ref, dx_ref, sums_ref=None,
    *, activation: str, programs: int, config: GradientConfig,
):  # fmt: skip
    block_rows, block_width = config.block_rows, config.block_width
    column, program = pl.program_id(0) * block_width, pl.program_id(1)
    blocks = pl.cdiv(x_ref.shape[0], block_rows)

    def tile_of(block):
        shape = block_rows, block_width
        return common.tile(x_ref.shape, block * block_rows, column, shape, may_be_beyond=programs < blocks)

    def read(block):
        tile = tile_of(block)
        return tile.load(x_ref), tile.load(dy_ref)

    def work(block, values, total):
        x, dy = _add_bias(values[0], bias), values[1].astype(jnp.float32)
        dx = activations.activation_gradient(activation, x, dy, x_ref.dtype)
        tile_of(block).store(dx_ref, dx)
        # Beyond the last row dy is 0 and x is the bias. There dx is 0, or it is NaN in a column whose rows are all NaN.
        return total if sums_ref is None else total + dx

    first = tile_of(program)
    bias = None if bias_ref is None else first.load_vector(bias_ref)
    total = None if sums_ref is None else jnp.zeros((block_rows, block_width), jnp.float32)
    total = common.read_ahead(program, programs, blocks, read, work, total)
    if sums_ref is not None:
        sums = jnp.sum(total, axis=0).astype(sums_ref.dtype)
        common.store(sums_ref.at[program, first.place[1]], sums, mask=first.in_width)


def forward(
    x: Array,
    bias: Array | None,
    *,
    activation: str,
    in_place: bool,
    config: ElementwiseConfig,
    interpret: bool,
) -> Array:
    """Computes activation(x + bias), `[M, D]`, in the memory of `x` if `in_place`."""
    rows, width = x.shape
    (y,) = common.launch(
        functools.partial(_fwd_kernel, activation=activation, config=config),
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
    dy: Array, x: Array, bias: Array | None, *, activation: str, config: GradientConfig, interpret: bool,
    dtypes: Sequence[Any] = (None, None),
) -> tuple[Array, Array | None]:  # fmt: skip
    """Computes the gradients of x, `[M, D]`, and of the bias, `[D]` or None, from dy, `[M, D]`.

    They have the given `dtypes`, or the dtypes of x and bias. The gradient of the bias is summed in float32. If one
    program has all rows of its columns, the kernel writes the gradient itself. Otherwise XLA adds up the partial sums
    of the programs.
    """
    rows, width = x.shape
    of_x: Any = dtypes[0] or x.dtype
    of_bias: Any = dtypes[1] or (bias is not None and bias.dtype)
    programs = common.share(config.programs, pl.cdiv(rows, config.block_rows))
    outputs = [jax.ShapeDtypeStruct(x.shape, of_x)]
    if bias is not None:
        outputs.append(jax.ShapeDtypeStruct((programs, width), of_bias if programs == 1 else jnp.float32))
    dx, *sums = common.launch(
        functools.partial(_bwd_kernel, activation=activation, programs=programs, config=config),
        (pl.cdiv(width, config.block_width), programs),
        [dy, x, bias],
        outputs,
        name="bias_activation_bwd",
        num_warps=config.num_warps,
        interpret=interpret,
    )
    if bias is None:
        return dx, None
    return dx, sums[0].reshape(width) if programs == 1 else jnp.sum(sums[0], axis=0).astype(of_bias)


def _sum_kernel(x_ref, partial_ref, *, block_rows: int, block_width: int, programs: int):
    column, program = pl.program_id(0) * block_width, pl.program_id(1)
    blocks = pl.cdiv(x_ref.shape[0], block_rows)

    def tile_of(block):
        shape = block_rows, block_width
        row = common.block_from_the_end(block, blocks) * block_rows
        return common.tile(x_ref.shape, row, column, shape, may_be_beyond=programs < blocks)

    total = common.read_ahead(
        program,
        programs,
        blocks,
        lambda block: tile_of(block).load(x_ref),
        lambda block, values, total: total + values.astype(jnp.float32),
        jnp.zeros((block_rows, block_width), jnp.float32),
    )
    first = tile_of(program)
    common.store(partial_ref.at[program, first.place[1]], jnp.sum(total, axis=0), mask=first.in_width)


def sum_of_rows(x: Array, *, interpret: bool) -> Array:
    """Sums x `[M, D]` over the rows to float32 `[D]`: the gradient of a bias without an activation."""
    # H200, bf16, 4096x2304: 8 us (XLA 17 to 55), 2026-11-22
    # See docs/performance-notes.md, "Row order of kernels that read what another kernel wrote".
    rows, width = x.shape
    programs = common.share(64, pl.cdiv(rows, 8))
    kernel = functools.partial(_sum_kernel, block_rows=8, block_width=128, programs=programs)
    (partial,) = common.launch(
        kernel,
        (pl.cdiv(width, 128), programs),
        [x],
        [jax.ShapeDtypeStruct((programs, width), jnp.float32)],
        name="sum_of_rows",
        num_warps=4,
        interpret=interpret,
    )
    return jnp.sum(partial, axis=0)
