"""(dy @ kernel^T) * slope in one kernel for Hopper: how a gradient passes a dense layer and the activation before it.

`slope` are that activation's derivatives. 2 * M * K * F floating-point operations; beside the product's arrays it reads
`slope`, [M, F], and stores as much. Each warp group has two pieces of `slope` copied while it multiplies, the others as
it finishes those.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.kernels.mosaic_gpu import dense_common
from jaxft.kernels.mosaic_gpu.dense_common import PIECE
from jaxft.tuning_dense import MosaicDenseConfig

Array = jax.Array


def _kernel(dy_ref, kernel_ref, slope_ref, dx_ref, *, config: MosaicDenseConfig):
    pieces = [(m, n) for n in range(0, config.tile_n, PIECE) for m in range(0, config.tile_m, PIECE)]

    def body(dx_smem, slope_smem, slope_there):
        def place(i, row, column):
            """Where piece i of a tile is."""
            m, n = pieces[i]
            return pl.ds(row + m, PIECE), pl.ds(column + n, PIECE)

        def copy(i, warps, row, column):
            if i < len(pieces):
                here = slope_ref.at[place(i, row, column)]
                plgpu.copy_gmem_to_smem(here, slope_smem.at[warps, i % 2], slope_there.at[2 * warps + i % 2])

        def begin(warps, row, column):
            for i in range(2):
                copy(i, warps, row, column)

        def finish(warps, row, column, acc):
            for i, (m, n) in enumerate(pieces):
                plgpu.barrier_wait(slope_there.at[2 * warps + i % 2])
                dx = acc[m : m + PIECE, n : n + PIECE] * slope_smem[warps, i % 2].astype(jnp.float32)
                dense_common.store_piece(dx_smem.at[warps], i, dx, dx_ref.at[place(i, row, column)])
                copy(i + 2, warps, row, column)  # by now all threads have read the one in its place

        dense_common.multiply_tiles(dy_ref, kernel_ref, config, begin, finish, transposed=True)

    width, dtype = slope_ref.shape[1], slope_ref.dtype
    pl.run_scoped(
        body,
        dx_smem=dense_common.pieces_smem(dtype, width),
        slope_smem=dense_common.pieces_smem(dtype, width),
        slope_there=plgpu.Barrier(num_barriers=4),
        collective_axes="warps",
    )


def backward(dy: Array, kernel: Array, slope: Array, *, config: MosaicDenseConfig) -> Array:
    """dy [M, K], kernel [F, K], slope [M, F] -> [M, F] of their dtype, which `dense.unsupported` has been asked about.

    The sum of its rows, a bias' gradient, is left to a kernel of its own: here the reductions across warps take about
    as long (136 us with them at 16384x768x3072, 111 without; that kernel 25 at 16384x2304; H200, 2026-11-23).
    """
    rows = slope.shape[0]
    beyond = -rows % 8
    if beyond:  # see `dense.forward`
        dy, slope = (jnp.pad(x, ((0, beyond), (0, 0))) for x in (dy, slope))

    def body(*refs):  # type: ignore[no-untyped-def]
        _kernel(*refs, config=config)

    (dx,) = dense_common.launch(body, (dy, kernel, slope), [jax.ShapeDtypeStruct(slope.shape, slope.dtype)], config)
    return dx[:rows] if beyond else dx
