"""activation(x @ kernel + bias) + residual in one kernel for Hopper: all of it meets the product in registers.

2 * M * K * F floating-point operations. Those of float32 are TF32's: what x has beyond its 10 bits is cut off, kernel
is rounded to them. Hopper multiplies 32-bit blocks only as they lie for x @ kernel^T, so XLA transposes kernel first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft import dispatch
from jaxft.kernels.mosaic_gpu import activations as act
from jaxft.kernels.mosaic_gpu import matmul
from jaxft.kernels.mosaic_gpu.matmul import PIECE, copy_piece, place_of, store_pieces
from jaxft.tuning.dense import MosaicDenseConfig, with_room

Array = jax.Array


def unsupported(x: Array, kernel: Array, bias: Array | None, residual: Array | None = None) -> str | None:
    """Why the kernel cannot take these arrays, if it cannot."""
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"x is {x.dtype}, the kernel takes float32, float16 and bfloat16"
    if bias is not None and bias.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"bias is {bias.dtype}, the kernel takes float32, float16 and bfloat16"
    if residual is not None and x.dtype == jnp.float32:
        return "it adds no residual in float32"  # there is no shared memory left for it
    (rows, depth), width = x.shape, kernel.shape[1]
    if 0 in (rows, depth, width):
        return "an array is empty"
    if max(rows, depth, width) > 2**30:
        return f"a product of {rows}x{depth} and {depth}x{width} has a size above 2^30"
    if rows < PIECE or width <= PIECE:
        # What lies beyond the edge of an array of one line of tiles is stored at its beginning (JAX 0.11.2).
        return f"M is {rows} and F is {width}: they must be at least {PIECE} and above {PIECE}"
    if not matmul.line(x.dtype, depth, width):
        least = 32 // x.dtype.itemsize
        return f"K is {depth} and F is {width}: above {4 * least} they must be multiples of {least}, below of 8"
    return None


def _fwd_kernel(
    x_ref, kernel_ref, bias_ref, residual_ref, y_ref, also_ref, *, name: Any, also: Any, config: MosaicDenseConfig
):
    tile_m, tile_n = config.tile_m, config.tile_n
    pieces = [(m, n) for m in range(0, tile_m, PIECE) for n in range(0, tile_n, PIECE)]

    # For each array, of shared memory; of the sum, which may be float32, one, or fewer blocks of the operands fit.
    places = 1 if also == "sum" else 2

    def body(y_smem, also_smem, bias_smem, bias_there, residual_smem, residual_there):
        def copy_residual(i, warps, row, column):
            if residual_ref is not None:
                copy_piece(residual_ref, residual_smem, residual_there, pieces, i, warps, row, column)

        def begin(warps, row, column):  # what comes while the warps multiply
            if bias_ref is not None:
                here = bias_ref.at[pl.ds(column, tile_n)]
                plgpu.copy_gmem_to_smem(here, bias_smem.at[warps], bias_there.at[warps])
            copy_residual(0, warps, row, column)
            copy_residual(1, warps, row, column)

        def finish(warps, row, column, acc):
            if bias_ref is not None:
                plgpu.barrier_wait(bias_there.at[warps])
            for i, (m, n) in enumerate(pieces):
                values = acc[m : m + PIECE, n : n + PIECE]
                if bias_ref is not None:
                    bias = plgpu.layout_cast(bias_smem[warps, n : n + PIECE], plgpu.Layout.WGMMA.reduce(0))
                    values += lax.broadcast_in_dim(bias.astype(jnp.float32), values.shape, (1,))
                here, other = place_of((m, n), row, column), values
                if also == "slope":
                    values, other = act.activation_and_slope(name, values, y_ref.dtype)
                elif name is not None:
                    values = act.activation(name, values, y_ref.dtype)
                if residual_ref is not None:
                    plgpu.barrier_wait(residual_there.at[2 * warps + i % 2])
                    values += residual_smem[warps, i % 2].astype(jnp.float32)
                stores = [(y_smem.at[warps, i % places], values, y_ref.at[here])]
                if also_ref is not None:
                    stores.append((also_smem.at[warps, i % places], other, also_ref.at[here]))
                store_pieces(min(i, places - 1), *stores)  # at first also the last tile's must be done
                copy_residual(i + 2, warps, row, column)  # where piece i lay, which all warps have read now

        matmul.multiply_tiles(
            x_ref, kernel_ref, config, begin, finish,
            transposed=x_ref.dtype == jnp.float32,  # see `forward`
            backwards=name is not None,  # usually another dense layer comes next
        )  # fmt: skip

    pl.run_scoped(
        body,
        y_smem=matmul.pieces_smem(y_ref, places),
        also_smem=None if also_ref is None else matmul.pieces_smem(also_ref, places),
        bias_smem=None if bias_ref is None else plgpu.SMEM((2, tile_n), bias_ref.dtype),
        bias_there=None if bias_ref is None else plgpu.Barrier(num_barriers=2),
        residual_smem=None if residual_ref is None else matmul.pieces_smem(residual_ref),
        residual_there=None if residual_ref is None else plgpu.Barrier(num_barriers=4),
        collective_axes="warps",
    )


def forward(
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array | None = None,
    *,
    activation: str | None,
    config: MosaicDenseConfig,
    also: str | None = None,
) -> list[Array]:
    """x [M, K], kernel [K, F], bias [F], residual [M, F] (16 bits) -> a list of [M, F]: the result, of the dtype of x.

    And where `also` is "sum", x @ kernel + bias of that dtype, or (16 bits) "slope", the activation's derivatives
    there, of `activation_common.slope_dtype`.
    """
    rows, width = x.shape[0], kernel.shape[1]
    beyond = -rows % 8
    if beyond:  # see `matmul.line`; rows are copied by eights
        x = jnp.pad(x, ((0, beyond), (0, 0)))
        residual = None if residual is None else jnp.pad(residual, ((0, beyond), (0, 0)))
    results = [jax.ShapeDtypeStruct((rows + beyond, width), x.dtype)]
    if also == "sum":
        results *= 2
    elif also == "slope":
        dtype = act.slope_dtype(x.dtype)
        columns = width + matmul.beyond_lines(dtype, width)
        results.append(jax.ShapeDtypeStruct((rows + beyond, columns), dtype))
        config = with_room(config, x.dtype.itemsize, 4 + 4 * dtype.itemsize // x.dtype.itemsize, dispatch.device())
    if x.dtype == jnp.float32:
        kernel = lax.reduce_precision(kernel, exponent_bits=8, mantissa_bits=10).T

    def body(*refs):  # type: ignore[no-untyped-def]
        given = iter(refs)
        x_ref, kernel_ref = next(given), next(given)
        bias_ref = None if bias is None else next(given)
        residual_ref = None if residual is None else next(given)
        y_ref, also_ref = next(given), next(given, None)
        _fwd_kernel(
            x_ref, kernel_ref, bias_ref, residual_ref, y_ref, also_ref, name=activation, also=also, config=config
        )

    inputs = [a for a in (x, kernel, bias, residual) if a is not None]
    found = matmul.launch(body, inputs, results, config)
    return [r if r.shape == (rows, width) else r[:rows, :width] for r in found]
