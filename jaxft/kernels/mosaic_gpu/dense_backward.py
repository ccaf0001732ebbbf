"""A kernel for (dy @ kernel^T) * derivative on Hopper: the gradient through a dense layer and the activation before it.

`derivative` holds the derivatives of that activation. Takes 2 * M * K * F floating-point operations.

Each warp group starts to copy two pieces of `derivative` before it multiplies, and every further piece once an earlier
one has been read. The sum over the rows, for the gradient of a bias, is a matmul as well: each piece is multiplied with
a constant matrix while it is stored.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.kernels.mosaic_gpu import matmul
from jaxft.kernels.mosaic_gpu.activations import kept_derivative
from jaxft.kernels.mosaic_gpu.matmul import PIECE, copy_piece, place_of, store_pieces
from jaxft.tuning.dense import MosaicDenseConfig


def _kernel(dy_ref, kernel_ref, derivative_ref, eighths_ref, dx_ref, sums_ref, *, config: MosaicDenseConfig):
    tile_m, tile_n = config.tile_m, config.tile_n
    pieces = [(m, n) for n in range(0, tile_n, PIECE) for m in range(0, tile_m, PIECE)]

    def body(dx_smem, kept_smem, kept_there, eighths_smem, eighths_there, sums_smem):
        copy = functools.partial(copy_piece, derivative_ref, kept_smem, kept_there, pieces)

        def begin(warps, row, column):
            copy(0, warps, row, column)
            copy(1, warps, row, column)

        def finish(warps, row, column, acc):
            sums = [plgpu.ACC((PIECE, 8), jnp.float32)] * (tile_n // PIECE)
            pl.run_scoped(functools.partial(finish_and_sum, warps, row, column, acc), *sums)

        def finish_and_sum(warps, row, column, acc, *sums):
            for i, (m, n) in enumerate(pieces):
                at = dx_smem.at[warps, i % 2]
                plgpu.barrier_wait(kept_there.at[2 * warps + i % 2])
                values = acc[m : m + PIECE, n : n + PIECE] * kept_derivative(kept_smem[warps, i % 2])
                if i > 1:
                    plgpu.wgmma_wait(1)  # The sum over the piece in this place is done.
                store_pieces(min(i, 1), (at, values, dx_ref.at[place_of((m, n), row, column)]))
                plgpu.wgmma(sums[n // PIECE], at.transpose((1, 0)), eighths_smem.transpose((1, 0)))
                copy(i + 2, warps, row, column)  # To the place of piece i, which all warps have read by now.
            plgpu.wgmma_wait(0)
            for n, columns in enumerate(sums):
                sums_smem[warps, pl.ds(n * PIECE, PIECE)] = jnp.sum(columns[...], axis=1)
            plgpu.commit_smem()
            here = sums_ref.at[lax.div(row, tile_m), pl.ds(column, tile_n)]
            plgpu.copy_smem_to_gmem(sums_smem.at[warps], here)

        @pl.when(lax.axis_index("warps") == 0)
        def _():
            plgpu.copy_gmem_to_smem(eighths_ref, eighths_smem, eighths_there)

        plgpu.barrier_wait(eighths_there)
        matmul.multiply_tiles(dy_ref, kernel_ref, config, begin, finish, transposed=True, backwards=True)

    dtype, as_of_a_piece = dx_ref.dtype, matmul.transforms(dx_ref.dtype, dx_ref.shape[1])
    pl.run_scoped(
        body,
        dx_smem=matmul.pieces_smem(dx_ref),
        kept_smem=matmul.pieces_smem(derivative_ref),
        kept_there=plgpu.Barrier(num_barriers=4),
        eighths_smem=plgpu.SMEM((8, PIECE), dtype, transforms=as_of_a_piece),
        eighths_there=plgpu.Barrier(),
        sums_smem=plgpu.SMEM((2, tile_n), jnp.float32),
        collective_axes="warps",
    )


def backward(dy: Array, kernel: Array, derivative: Array, *, config: MosaicDenseConfig) -> tuple[Array, Array]:
    """Computes (dy @ kernel^T) * derivative [M, F] and its sum over the rows, float32 [F]; dy [M, K], kernel [F, K]."""
    rows, width = derivative.shape
    beyond = -rows % 8
    if beyond:  # See `dense.forward`.
        dy = jnp.pad(dy, ((0, beyond), (0, 0)))
    more = beyond, matmul.beyond_lines(derivative.dtype, width)
    if any(more):
        derivative = jnp.pad(derivative, [(0, n) for n in more])
    # Eight columns are the narrowest operand. Each column gives an eighth of the sum. A numpy array is a constant, so
    # that no kernel has to fill it.
    eighths = np.full((8, PIECE), 0.125, dy.dtype)
    # The partial sums have room for whole tiles at the edges: they are not swizzled, and what a copy has beyond the end
    # of a row would overwrite the next row.
    block_m, block_n = config.block[0] * config.cluster_m, config.block[1]
    room = pl.cdiv(rows + beyond, block_m) * (block_m // config.tile_m), pl.cdiv(width, block_n) * block_n
    results = [jax.ShapeDtypeStruct((rows + beyond, width), dy.dtype), jax.ShapeDtypeStruct(room, jnp.float32)]

    body = functools.partial(_kernel, config=config)
    dx, partial = matmul.launch(body, (dy, kernel, derivative, eighths), results, config)
    return dx[:rows] if beyond else dx, jnp.sum(partial, axis=0)[:width]
