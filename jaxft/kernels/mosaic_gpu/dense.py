"""A kernel for activation(x @ kernel + bias) + residual on Hopper: a matmul with its epilogue in registers.

Takes 2 * M * K * F floating-point operations. float32 is multiplied in TF32, which has 10 bits: x is truncated, and
kernel is rounded. Hopper multiplies 32-bit blocks only in the layout of x @ kernel^T, so XLA transposes the kernel
first. float8_e4m3fn is multiplied exactly, in the same layout. Its kernel is stored as [F, K], so that the transpose
is no copy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft import reference
from jaxft.kernels.mosaic_gpu import activations as act
from jaxft.kernels.mosaic_gpu import matmul
from jaxft.kernels.mosaic_gpu.matmul import PIECE, copy_piece, place_of, store_pieces
from jaxft.kernels.mosaic_gpu.support import derivative_dtype
from jaxft.tuning.dense import MosaicDenseConfig

# Hopper multiplies blocks of these dtypes only in the layout of x @ kernel^T.
TRANSPOSED = jnp.float32, reference.FLOAT8


def _fwd_kernel(
    x_ref, kernel_ref, scale_ref, bias_ref, residual_ref, angle_ref, y_ref, also_ref=None, *, name: Any, also: Any,
    gate: str | None, x_scale: float, float8_scale: float | None, config: MosaicDenseConfig,
):  # fmt: skip
    halves, width = 1 if gate is None else 2, y_ref.shape[1]
    tile_m, tile_n = config.tile_m, config.tile_n // halves
    pieces = [(m, n) for m in range(0, tile_m, PIECE) for n in range(0, tile_n, PIECE)]

    # Pieces in shared memory for each result. With "sum", the results may be float32: with two pieces of each, fewer
    # blocks of the operands would fit.
    places = 1 if also == "sum" else 2
    middle = PIECE // 2  # of a head, if heads are rotated

    def body(
        y_smem, also_smem, scale_smem, scale_there, bias_smem, bias_there, residual_smem, residual_there, angle_smem,
        angle_there,
    ):  # fmt: skip
        def copy_angles(m, warps, row):
            if angle_ref is not None:
                block = lax.rem(lax.div(row + m, PIECE), pl.cdiv(angle_ref.shape[0], PIECE))
                here = angle_ref.at[pl.ds(block * PIECE, PIECE)]
                plgpu.copy_gmem_to_smem(here, angle_smem.at[warps, 0], angle_there.at[warps])

        def vector(smem, warps, at, shape):
            values = plgpu.layout_cast(smem[warps, at : at + PIECE], plgpu.Layout.WGMMA.reduce(0))
            return lax.broadcast_in_dim(values.astype(jnp.float32), shape, (1,))

        def copy_residual(i, warps, row, column):
            if residual_ref is not None:
                copy_piece(residual_ref, residual_smem, residual_there, pieces, i, warps, row, column)

        def begin(warps, row, column):  # Starts copies that run during the matmul.
            if scale_ref is not None:
                here = scale_ref.at[pl.ds(column, tile_n)]
                plgpu.copy_gmem_to_smem(here, scale_smem.at[warps], scale_there.at[warps])
            if bias_ref is not None:
                for half in range(halves):
                    here = bias_ref.at[pl.ds(column + half * width, tile_n)]
                    there = bias_smem.at[warps, pl.ds(half * tile_n, tile_n)]
                    plgpu.copy_gmem_to_smem(here, there, bias_there.at[warps])
            copy_residual(0, warps, row, column)
            copy_residual(1, warps, row, column)
            copy_angles(0, warps, row)

        def finish(warps, row, column, *tile):
            if scale_ref is not None:
                plgpu.barrier_wait(scale_there.at[warps])
            if bias_ref is not None:
                plgpu.barrier_wait(bias_there.at[warps])
            for i, (m, n) in enumerate(pieces):
                here, sums = place_of((m, n), row, column), []
                for half, acc in enumerate(tile):
                    values, at = acc[m : m + PIECE, n : n + PIECE], half * tile_n + n
                    if scale_ref is not None:
                        scale = vector(scale_smem, warps, at, values.shape)
                        values *= scale if x_scale == 1.0 else scale * x_scale
                    if bias_ref is not None:
                        values += vector(bias_smem, warps, at, values.shape)
                    sums.append(values)
                kept = sums
                if gate is not None:
                    gated, factor = sums if gate == "first" else sums[::-1]
                    values = act.activation(name, gated, y_ref.dtype) * factor
                elif also == "derivative":
                    values, *kept = act.activation_and_derivative(name, values, y_ref.dtype)
                elif name is not None:
                    values = act.activation(name, values, y_ref.dtype)
                if residual_ref is not None:
                    plgpu.barrier_wait(residual_there.at[2 * warps + i % 2])
                    values += residual_smem[warps, i % 2].astype(jnp.float32)
                if angle_ref is not None:
                    if n == 0:
                        plgpu.barrier_wait(angle_there.at[warps])
                        cos, sin = (angle_smem[warps, 0, :, at : at + middle] for at in (0, middle))
                    x, y = values[:, :middle], values[:, middle:]
                    turns = jnp.broadcast_to(column + n < width - width // 3, x.shape)  # The values keep their bits.
                    values = jnp.where(turns, x * cos - y * sin, x), jnp.where(turns, y * cos + x * sin, y)
                if float8_scale not in (None, 1.0):
                    values *= 1.0 / float8_scale
                stores = [(y_smem.at[warps, i % places], values, y_ref.at[here])]
                if also_ref is not None:
                    for half, other in enumerate(kept):
                        here = place_of((m, n), row, column + half * width)
                        stores.append((also_smem.at[warps, i % places * halves + half], other, also_ref.at[here]))
                store_pieces(min(i, places - 1), *stores)  # The first piece waits for all stores of the last tile.
                copy_residual(i + 2, warps, row, column)  # To the place of piece i, which all warps have read by now.
                if n == 0 and m + PIECE < tile_m:  # To the place of the angles above, likewise.
                    copy_angles(m + PIECE, warps, row)

        matmul.multiply_tiles(
            x_ref, kernel_ref, config, begin, finish,
            transposed=x_ref.dtype in TRANSPOSED,  # See `forward`.
            backwards=name is not None,  # Another dense layer usually comes next.
            halves=halves,
        )  # fmt: skip

    pl.run_scoped(
        body,
        y_smem=matmul.pieces_smem(y_ref, places, PIECE if angle_ref is None else middle),
        also_smem=None if also_ref is None else matmul.pieces_smem(also_ref, places * halves),
        scale_smem=None if scale_ref is None else plgpu.SMEM((2, config.tile_n), scale_ref.dtype),
        scale_there=None if scale_ref is None else plgpu.Barrier(num_barriers=2),
        bias_smem=None if bias_ref is None else plgpu.SMEM((2, config.tile_n), bias_ref.dtype),
        bias_there=None if bias_ref is None else plgpu.Barrier(num_arrivals=halves, num_barriers=2),
        residual_smem=None if residual_ref is None else matmul.pieces_smem(residual_ref),
        residual_there=None if residual_ref is None else plgpu.Barrier(num_barriers=4),
        angle_smem=None if angle_ref is None else matmul.pieces_smem(angle_ref, 1),
        angle_there=None if angle_ref is None else plgpu.Barrier(num_barriers=2),
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
    gate: str | None = None,
    angles: Array | None = None,
    kernel_scale: Array | None = None,
    x_scale: float = 1.0,
    dtype: Any = None,
    float8_scale: float | None = None,
) -> list[Array]:
    """Computes activation(x @ kernel + bias) + residual: x [M, K], kernel [K, F] -> a list with the result [M, F].

    With a `gate`, kernel is [K, 2 * F] and bias [2 * F]. The activation is applied to the "first" or the "second" half
    of the sum, and the result is multiplied by the other half. The sum is [M, 2 * F]. There is no derivative then.

    With `angles`, the result is packed queries, keys and values in heads of `PIECE`, and queries and keys are rotated.
    `angles`, float32 [P, PIECE], has the cosines of the angles of a head's pairs, and then their sines. Row m takes row
    m % P. P is M, or a multiple of `PIECE`.

    Callers ask `support.dense_unsupported` first. With `also`, the list has a second array [M, F]. "sum" is x @ kernel
    + bias. "derivative" is the derivative of the activation at that sum, in `support.derivative_dtype`, for float16 and
    bfloat16 only.

    Float8_e4m3fn x and kernel come with `kernel_scale` [F] and the number `x_scale`, by which x @ kernel is multiplied.
    The result then is of `dtype` or, with `float8_scale`, the result / float8_scale in float8_e4m3fn.
    """
    halves = 1 if gate is None else 2
    rows, width = x.shape[0], kernel.shape[1] // halves
    beyond = -rows % 8
    if beyond:  # Rows are copied in groups of 8, see `matmul.line`.
        x = jnp.pad(x, ((0, beyond), (0, 0)))
        residual = None if residual is None else jnp.pad(residual, ((0, beyond), (0, 0)))
        if angles is not None and angles.shape[0] == rows:
            angles = jnp.pad(angles, ((0, beyond), (0, 0)))
    dtype = x.dtype if dtype is None else dtype
    dtype = dtype if float8_scale is None else reference.FLOAT8
    results = [jax.ShapeDtypeStruct((rows + beyond, width), dtype)]
    if also == "sum":
        results.append(jax.ShapeDtypeStruct((rows + beyond, halves * width), x.dtype))
    elif also == "derivative":
        dtype = derivative_dtype(x.dtype)
        columns = width + matmul.beyond_lines(dtype, width)
        results.append(jax.ShapeDtypeStruct((rows + beyond, columns), dtype))
    if x.dtype == jnp.float32:
        kernel = lax.reduce_precision(kernel, exponent_bits=8, mantissa_bits=10)
    kernel = kernel.T if x.dtype in TRANSPOSED else kernel

    body = functools.partial(
        _fwd_kernel, name=activation, also=also, gate=gate, x_scale=x_scale, float8_scale=float8_scale, config=config
    )
    found = matmul.launch(body, (x, kernel, kernel_scale, bias, residual, angles), results, config, halves)
    widths = width, halves * width if also == "sum" else width
    return [r if r.shape == (rows, w) else r[:rows, :w] for r, w in zip(found, widths, strict=False)]
