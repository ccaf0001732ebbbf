"""(dy @ kernel^T) * slope in one kernel for Hopper: how a gradient passes a dense layer and the activation before it.

`slope` are that activation's derivatives. 2 * M * K * F floating-point operations; beside the product's arrays it reads
`slope`, [M, F], and stores as much. Each warp group has three pieces of `slope` copied while it multiplies, the others
as it stores those. A sum over the rows, for the gradient of a bias, is a product as well: of each piece, while it is
stored, with a matrix of one number.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.kernels.mosaic_gpu import dense_common
from jaxft.kernels.mosaic_gpu.dense_common import PIECE, place_of
from jaxft.tuning_dense import MosaicDenseConfig

Array = jax.Array

_SLOTS = 3  # of shared memory for each warp group: a piece comes, one is finished where it lies, one is stored


def _kernel(dy_ref, kernel_ref, slope_ref, eighths_ref, dx_ref, sums_ref, *, config: MosaicDenseConfig):
    tile_m, tile_n = config.tile_m, config.tile_n
    pieces = [(m, n) for n in range(0, tile_n, PIECE) for m in range(0, tile_m, PIECE)]

    def body(smem, slope_there, eighths_smem, eighths_there, sums_smem):
        def copy(i, warps, row, column):
            if i < len(pieces):
                at = i % _SLOTS
                here = slope_ref.at[place_of(pieces[i], row, column)]
                plgpu.copy_gmem_to_smem(here, smem.at[warps, at], slope_there.at[_SLOTS * warps + at])

        def begin(warps, row, column):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what the last tile has stored
            for i in range(_SLOTS):
                copy(i, warps, row, column)

        def finish(warps, row, column, acc):
            sums = [plgpu.ACC((PIECE, 8), jnp.float32)] * (tile_n // PIECE)
            pl.run_scoped(functools.partial(finish_and_sum, warps, row, column, acc), *sums)

        def finish_and_sum(warps, row, column, acc, *sums):
            for i, (m, n) in enumerate(pieces):
                at = smem.at[warps, i % _SLOTS]
                plgpu.barrier_wait(slope_there.at[_SLOTS * warps + i % _SLOTS])
                at[...] = (acc[m : m + PIECE, n : n + PIECE] * at[...].astype(jnp.float32)).astype(dx_ref.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(at, dx_ref.at[place_of((m, n), row, column)])
                plgpu.wgmma(sums[n // PIECE], at.transpose((1, 0)), eighths_smem.transpose((1, 0)))
                if i > 0:  # where the piece before lies, once it is stored and added up
                    plgpu.wgmma_wait(1)
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    copy(i - 1 + _SLOTS, warps, row, column)
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
        dense_common.multiply_tiles(dy_ref, kernel_ref, config, begin, finish, transposed=True, backwards=True)

    width, dtype = slope_ref.shape[1], slope_ref.dtype
    pl.run_scoped(
        body,
        smem=dense_common.pieces_smem(dtype, width, _SLOTS),
        slope_there=plgpu.Barrier(num_barriers=2 * _SLOTS),
        eighths_smem=plgpu.SMEM((8, PIECE), dtype, transforms=dense_common.transforms(dtype, width)),  # as of a piece
        eighths_there=plgpu.Barrier(),
        sums_smem=plgpu.SMEM((2, tile_n), jnp.float32),
        collective_axes="warps",
    )


def backward(dy: Array, kernel: Array, slope: Array, *, config: MosaicDenseConfig) -> tuple[Array, Array]:
    """dy [M, K], kernel [F, K], slope [M, F] -> [M, F] of their dtype, and its sum over the rows [F], float32.

    `dense.unsupported` has been asked about them.
    """
    rows, width = slope.shape
    beyond = -rows % 8
    if beyond:  # see `dense.forward`
        dy, slope = (jnp.pad(x, ((0, beyond), (0, 0))) for x in (dy, slope))
    # Eight columns are the narrowest operand: each gives an eighth of the sum. A constant, which no kernel fills.
    eighths = np.full((8, PIECE), 0.125, dy.dtype)
    # With room for all of the tiles at the edges: of an array that is not swizzled, what a copy has beyond the end of a
    # row goes to the next one.
    block_m, block_n = config.block[0] * config.cluster_m, config.block[1]
    room = pl.cdiv(slope.shape[0], block_m) * (block_m // config.tile_m), pl.cdiv(width, block_n) * block_n
    results = [jax.ShapeDtypeStruct(slope.shape, slope.dtype), jax.ShapeDtypeStruct(room, jnp.float32)]

    def body(*refs):  # type: ignore[no-untyped-def]
        _kernel(*refs, config=config)

    dx, partial = dense_common.launch(body, (dy, kernel, slope, eighths), results, config)
    return dx[:rows] if beyond else dx, jnp.sum(partial, axis=0)[:width]
