"""LayerNorm(x @ kernel + bias + residual) in one kernel for Hopper, which does not write the product.

2 * M * K * D floating-point operations; beside the product's arrays it reads the residual, [M, D], where a LayerNorm of
its own reads two such arrays and writes one. The programs of a cluster have whole rows between them: each multiplies
for its part of the D columns and keeps the sums in registers, until it has told the others the mean and the sum of
squared deviations of its part of each row, and heard theirs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft import tuning_dense
from jaxft.kernels.mosaic_gpu import dense, dense_common
from jaxft.kernels.mosaic_gpu.dense_common import PIECE, place_of, store_piece
from jaxft.tuning_dense import MosaicDenseConfig

Array = jax.Array


def unsupported(x: Array, kernel: Array, residual: Array, **vectors: Array | None) -> str | None:
    """Why the kernel cannot take these arrays, if it cannot."""
    if x.dtype.itemsize != 2:
        return f"x is {x.dtype}, the kernel takes float16 and bfloat16"
    for name, vector in vectors.items():
        if vector is not None and vector.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
            return f"{name} is {vector.dtype}, the kernel takes float32, float16 and bfloat16"
    if not tuning_dense.tiles_of_rows(kernel.shape[1]):
        return f"D is {kernel.shape[1]}: it must be 2, 4 or 8 times 64, 128, 192 or 256"
    return dense.unsupported(x, kernel, None, residual)


def _kernel(x_ref, kernel_ref, residual_ref, vector_refs, y_ref, moments_ref, *, epsilon, config):
    tile_m, tile_n = config.tile_m, config.tile_n
    width = y_ref.shape[1]
    parts = width // tile_n
    lines, columns = range(0, tile_m, PIECE), range(0, tile_n, PIECE)
    pieces = [(m, n) for m in lines for n in columns]
    named = [name for name, ref in vector_refs.items() if ref is not None]

    def body(y_smem, residual_smem, residual_there, vectors_smem, vectors_there, own_smem, told, moments_smem, heard):
        def copy_residual(i, warps, row, column):
            if i < len(pieces):
                here = residual_ref.at[place_of(pieces[i], row, column)]
                plgpu.copy_gmem_to_smem(here, residual_smem.at[warps, i % 2], residual_there.at[2 * warps + i % 2])

        def begin(warps, row, column):
            for name, smem in zip(named, vectors_smem, strict=True):
                here = vector_refs[name].at[pl.ds(column, tile_n)]
                plgpu.copy_gmem_to_smem(here, smem.at[warps], vectors_there.at[warps])
            copy_residual(0, warps, row, column)
            copy_residual(1, warps, row, column)

        def vector(name, n, warps):
            """A piece's columns of a vector, in each of its rows."""
            values = vectors_smem[named.index(name)][warps, n : n + PIECE]
            values = plgpu.layout_cast(values, plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)
            return lax.broadcast_in_dim(values, (PIECE, PIECE), (1,))

        def each_row(numbers):
            """A number for each row of a piece, in all of its columns."""
            return lax.broadcast_in_dim(numbers, (PIECE, PIECE), (0,))

        def exchange(warps, row, column, moments):
            """Tells the other programs of the cluster about this one's part of the rows, and hears about theirs."""
            for m, numbers in moments.items():
                for k in range(2):
                    own_smem[warps, k, pl.ds(m, PIECE)] = numbers[k]
            plgpu.commit_smem()
            here = pl.ds(row, tile_m)
            plgpu.copy_smem_to_gmem(own_smem.at[warps], moments_ref.at[lax.div(column, tile_n), :, here])
            plgpu.wait_smem_to_gmem(0)  # until they are where the others read
            plgpu.barrier_arrive(told.at[warps])
            plgpu.barrier_wait(told.at[warps])
            plgpu.copy_gmem_to_smem(moments_ref.at[:, :, here], moments_smem.at[warps], heard.at[warps])
            plgpu.barrier_wait(heard.at[warps])

        def moments_of_rows(warps, m):
            """The mean and 1 / sqrt(variance + epsilon) of whole rows (Chan, Golub and LeVeque, 1979)."""

            def of_part(j, k):
                return plgpu.layout_cast(moments_smem[warps, j, k, m : m + PIECE], plgpu.Layout.WGMMA.reduce(1))

            mean = sum(of_part(j, 0) for j in range(parts)) * (1.0 / parts)
            square = sum(of_part(j, 1) + tile_n * (of_part(j, 0) - mean) ** 2 for j in range(parts))
            return mean, lax.rsqrt(square * (1.0 / width) + epsilon)

        def finish(warps, row, column, acc):
            if named:
                plgpu.barrier_wait(vectors_there.at[warps])
            total = {}
            for i, (m, n) in enumerate(pieces):
                total[m, n] = acc[m : m + PIECE, n : n + PIECE]
                if "bias" in named:
                    total[m, n] += vector("bias", n, warps)
                plgpu.barrier_wait(residual_there.at[2 * warps + i % 2])
                total[m, n] += residual_smem[warps, i % 2].astype(jnp.float32)
                copy_residual(i + 2, warps, row, column)  # where piece i lay, which all warps have read now
            moments = {}
            for m in lines:
                mean = sum(jnp.sum(total[m, n], axis=1) for n in columns) * (1.0 / tile_n)
                moments[m] = mean, sum(jnp.sum((total[m, n] - each_row(mean)) ** 2, axis=1) for n in columns)
            exchange(warps, row, column, moments)
            for stored, (m, n) in enumerate(pieces):
                if n == 0:
                    mean, scale = map(each_row, moments_of_rows(warps, m))
                values = (total[m, n] - mean) * scale
                if "gamma" in named:
                    values *= vector("gamma", n, warps)
                if "beta" in named:
                    values += vector("beta", n, warps)
                store_piece(y_smem.at[warps], stored, values, y_ref.at[place_of((m, n), row, column)])

        dense_common.multiply_tiles(x_ref, kernel_ref, config, begin, finish, beside=width // config.block[1])

    pl.run_scoped(
        body,
        y_smem=dense_common.pieces_smem(y_ref.dtype, width),
        residual_smem=dense_common.pieces_smem(y_ref.dtype, width),
        residual_there=plgpu.Barrier(num_barriers=4),
        vectors_smem=[plgpu.SMEM((2, tile_n), vector_refs[name].dtype) for name in named],
        vectors_there=plgpu.Barrier(num_arrivals=max(1, len(named)), num_barriers=2),
        own_smem=plgpu.SMEM((2, 2, tile_m), jnp.float32),
        told=plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=1, num_barriers=2),
        moments_smem=plgpu.SMEM((2, parts, 2, tile_m), jnp.float32),
        heard=plgpu.Barrier(num_barriers=2),
        collective_axes="warps",
    )


def forward(
    x: Array, kernel: Array, bias: Array | None, residual: Array, gamma: Array | None, beta: Array | None,
    *, epsilon: float, config: MosaicDenseConfig,
) -> Array:  # fmt: skip
    """x [M, K], kernel [K, D], residual [M, D], all of 16 bits, and vectors [D] -> [M, D], of the dtype of x."""
    rows, width = residual.shape
    beyond = -rows % 8
    if beyond:  # see `dense.forward`
        x, residual = (jnp.pad(a, ((0, beyond), (0, 0))) for a in (x, residual))
    y = jax.ShapeDtypeStruct(residual.shape, x.dtype)
    block_m, block_n = config.block
    room = pl.cdiv(residual.shape[0], block_m) * block_m
    moments = jax.ShapeDtypeStruct((width // config.tile_n, 2, room), jnp.float32)
    vectors = {"bias": bias, "gamma": gamma, "beta": beta}

    def body(*refs):  # type: ignore[no-untyped-def]
        given = iter(refs)
        x_ref, kernel_ref, residual_ref = (next(given) for _ in range(3))
        vector_refs = {name: None if vector is None else next(given) for name, vector in vectors.items()}
        y_ref, moments_ref = given
        _kernel(x_ref, kernel_ref, residual_ref, vector_refs, y_ref, moments_ref, epsilon=epsilon, config=config)

    inputs = [x, kernel, residual, *(vector for vector in vectors.values() if vector is not None)]
    result, _ = dense_common.launch(body, inputs, [y, moments], config, beside=width // block_n)
    return result[:rows] if beyond else result
