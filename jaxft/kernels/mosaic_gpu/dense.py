"""activation(x @ kernel + bias) in one kernel for Hopper: bias and activation meet the product in registers.

2 * M * K * F floating-point operations. A program has three warp groups: one copies blocks of x and kernel into a ring
of buffers in shared memory (TMA), two multiply them (wgmma) and finish their tiles. A program works on several tiles,
one after the other, and the copies for the next begin while the last is finished.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.tuning_dense import MosaicDenseConfig

Array = jax.Array

PIECE = 64  # rows and columns of a tile that are finished and stored at a time
COPYING = 2  # the warp group that copies; 0 and 1 multiply
REGISTERS = {"copy": 40, "multiply": 232}  # for each thread, of the 65,536 that three groups of 128 have in all


def unsupported(x: Array, kernel: Array, bias: Array | None) -> str | None:
    """Why the kernel cannot take these arrays, if it cannot."""
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"x is {x.dtype}, the kernel takes float16 and bfloat16"
    if bias is not None and bias.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"bias is {bias.dtype}, the kernel takes float32, float16 and bfloat16"
    (rows, depth), width = x.shape, kernel.shape[1]
    if 0 in (rows, depth, width):
        return "an array is empty"
    if max(rows, depth, width) > 2**30:
        return f"a product of {rows}x{depth} and {depth}x{width} has a size above 2^30"
    if rows < PIECE or width <= PIECE:
        # What lies beyond the edge of an array of one line of tiles is stored at its beginning (JAX 0.11.2).
        return f"M is {rows} and F is {width}: they must be at least {PIECE} and above {PIECE}"
    if not _line(depth, width):
        return f"K is {depth} and F is {width}: above 64 they must be multiples of 16, below of 8"
    return None


def _line(*widths: int) -> int:
    """How many elements a line of shared memory holds; rows of these widths end where a line does.

    Mosaic copies an array as 8 rows x so many elements at a time. What lies beyond the array's edge comes as zeros and
    is not stored, but only from a multiple of that on.
    """
    fits = (line for line in (64, 32, 16) if all(w % 8 == 0 and (w < line or w % line == 0) for w in widths))
    return next(fits, 0)


# --- Activations: float32 in, float32 out ------------------------------------------------------------------------
#
# Each exp2, tanh or rsqrt takes as long as eight other instructions. Mosaic's minimum and maximum keep a NaN, and its
# division is slow: 1 / a is rsqrt(a)^2.


def _sigmoid(x: Array) -> Array:
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(x * -math.log2(math.e)))
    return inverse_root * inverse_root


def _gelu(x: Array) -> Array:
    """With a relative error of 3e-4, as for the Triton kernels: exp(-x^2 / 2) times a minimax fit."""
    inverse_root = lax.rsqrt(1.0 + 0.49 * jnp.abs(x))
    t = inverse_root * inverse_root
    p = ((-0.12037462 * t + 0.25018403) * t + 0.17322216) * t + 0.1970786
    half = jnp.exp2(x * x * (-0.5 * math.log2(math.e))) * (t * p)
    return x * jnp.where(x < 0.0, half, 1.0 - half)


def _by_tanh(x: Array, y: Array) -> Array:
    """x / (1 + e^-2y). The hardware's tanh gives it an absolute error of up to |x| / 4096: it is not for float16."""
    half = 0.5 * x
    return half * jnp.tanh(y) + half


def activation(name: str, x: Array, dtype: Any) -> Array:
    """The activation of float32 `x`, as accurate as an array of results that are rounded to `dtype` needs.

    In bfloat16 small negative results may have the wrong sign, which the rounding of the larger ones hides.
    """
    coarse = dtype == jnp.bfloat16
    match name:
        case "gelu":
            if not coarse:
                return _gelu(x)
            square = jnp.minimum(x * x, 16.0)  # beyond, the polynomial bends down; tanh is 1 by then
            # Minimax of the absolute error, which is 2.6e-5.
            return _by_tanh(x, x * (0.79750916 + square * (0.037004681 - 0.00035134242 * square)))
        case "gelu_tanh":
            y = x * (math.sqrt(2.0 / math.pi) + (math.sqrt(2.0 / math.pi) * 0.044715) * (x * x))
            return _by_tanh(x, y) if coarse else x * _sigmoid(2.0 * y)
        case "silu":
            return _by_tanh(x, 0.5 * x) if coarse else x * _sigmoid(x)
        case "relu":
            return jnp.maximum(x, 0.0)
        case "tanh":
            return jnp.tanh(x)
    raise ValueError(f"no kernel has the activation {name!r}")


# --- The kernel --------------------------------------------------------------------------------------------------


def _transforms(dtype: Any, *widths: int) -> tuple[Any, Any]:
    """How blocks of arrays with these widths lie in shared memory."""
    line = _line(*widths)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line * dtype.itemsize)


def _fwd_kernel(x_ref, kernel_ref, bias_ref, y_ref, product_ref, *, name: str | None, config: MosaicDenseConfig):
    (rows, depth), width, dtype = x_ref.shape, kernel_ref.shape[1], x_ref.dtype
    tile_m, tile_n, tile_k, stages = config.tile_m, config.tile_n, config.tile_k, config.stages
    block_m, block_n = config.block
    by_turns, steps = config.split == "none", pl.cdiv(depth, tile_k)
    blocks_m, blocks_n = pl.cdiv(rows, block_m * config.cluster_m), pl.cdiv(width, block_n)

    def body(x_smem, kernel_smem, y_smem, bias_smem, filled, free, bias_there):
        warps, program, programs = lax.axis_index("warps"), lax.axis_index("program"), lax.axis_size("program")
        blocks = lax.div(blocks_m * blocks_n - 1 - program, programs) + 1  # of this program

        def first(i):
            """The row and the column where this program's i-th block begins."""
            m, n = plgpu.planar_snake(
                program + i * programs, (blocks_m, blocks_n), "mn".index(config.minor), config.group
            )
            return (m * config.cluster_m + lax.axis_index("cluster")) * block_m, n * block_n

        def buffer(i, k):
            """Where step k of block i lies."""
            return lax.rem(i * steps + k, stages)

        def arrival(i, k):
            """The barrier that its copies complete."""
            # A warp group must wait for every phase of a barrier, so those that take turns have one each.
            return filled.at[buffer(i, k) + (lax.rem(i, 2) * stages if by_turns else 0)]

        def copy():
            plgpu.set_max_registers(REGISTERS["copy"], action="decrease")

            @pl.loop(0, blocks)
            def _(i):
                row, column = first(i)

                @pl.loop(0, steps)
                def _(k):
                    at, deep = buffer(i, k), pl.ds(k * tile_k, tile_k)
                    plgpu.barrier_wait(free.at[at])
                    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, block_m), deep], x_smem.at[at], arrival(i, k))
                    plgpu.copy_gmem_to_smem(
                        kernel_ref.at[deep, pl.ds(column, block_n)], kernel_smem.at[at], arrival(i, k),
                        collective_axes="cluster" if config.cluster_m > 1 else None,
                    )  # fmt: skip

            @pl.loop(0, stages)  # the other program of a cluster must find this one's barriers until it is done
            def _(k):
                plgpu.barrier_wait(free.at[buffer(blocks, k)])

        def multiply(i, acc_ref):
            own_m = pl.ds(warps * tile_m, tile_m) if config.split == "m" else slice(None)
            own_n = pl.ds(warps * tile_n, tile_n) if config.split == "n" else slice(None)

            @pl.loop(0, steps)
            def _(k):
                plgpu.barrier_wait(arrival(i, k))
                plgpu.wgmma(acc_ref, x_smem.at[buffer(i, k), own_m], kernel_smem.at[buffer(i, k), :, own_n])
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)
                def _():
                    plgpu.barrier_arrive(free.at[buffer(i, k - 1)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[buffer(i, steps - 1)])

        def finish(row, column, acc):
            stored = 0

            def store(values, m, n, ref):
                nonlocal stored
                at = y_smem.at[warps, stored % 2]
                plgpu.wait_smem_to_gmem(min(stored, 1), wait_read_only=True)  # at first for those of the last tile
                at[...] = values.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(at, ref.at[pl.ds(row + m, PIECE), pl.ds(column + n, PIECE)])
                stored += 1

            if bias_ref is not None:
                plgpu.barrier_wait(bias_there.at[warps])
            for m in range(0, tile_m, PIECE):
                for n in range(0, tile_n, PIECE):
                    values = acc[m : m + PIECE, n : n + PIECE]
                    if bias_ref is not None:
                        bias = plgpu.layout_cast(bias_smem[warps, n : n + PIECE], plgpu.Layout.WGMMA.reduce(0))
                        values += lax.broadcast_in_dim(bias.astype(jnp.float32), values.shape, (1,))
                    if product_ref is not None:
                        store(values, m, n, product_ref)
                    store(values if name is None else activation(name, values, dtype), m, n, y_ref)

        def compute():
            plgpu.set_max_registers(REGISTERS["multiply"], action="increase")

            @pl.when(warps < (1 if by_turns else 2))
            def _():
                for stage in range(stages):
                    plgpu.barrier_arrive(free.at[stage])

            @pl.loop(0, lax.div(blocks + 1 - warps, 2) if by_turns else blocks)
            def _(i):
                i = 2 * i + warps if by_turns else i
                row, column = first(i)
                row += warps * tile_m if config.split == "m" else 0
                column += warps * tile_n if config.split == "n" else 0
                if bias_ref is not None:  # while the warps multiply
                    here = bias_ref.at[pl.ds(column, tile_n)]
                    plgpu.copy_gmem_to_smem(here, bias_smem.at[warps], bias_there.at[warps])

                @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((tile_m, tile_n), jnp.float32))
                def _(acc_ref):
                    multiply(i, acc_ref)
                    finish(row, column, acc_ref[...])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # One branch with two sides: the compiler ignores `set_max_registers` elsewhere.
        lax.cond(warps == COPYING, copy, compute)

    free: Any = plgpu.Barrier
    if config.cluster_m > 1:  # the copies of one program fill buffers of the other
        free = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    pl.run_scoped(
        body,
        x_smem=plgpu.SMEM((stages, block_m, tile_k), dtype, transforms=_transforms(dtype, depth, width)),
        kernel_smem=plgpu.SMEM((stages, tile_k, block_n), dtype, transforms=_transforms(dtype, depth, width)),
        y_smem=plgpu.SMEM((2, 2, PIECE, PIECE), dtype, transforms=_transforms(dtype, width)),
        bias_smem=None if bias_ref is None else plgpu.SMEM((2, tile_n), bias_ref.dtype),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=stages * (1 + by_turns)),
        free=free(num_arrivals=1 if by_turns else 2, num_barriers=stages),
        bias_there=None if bias_ref is None else plgpu.Barrier(num_barriers=2),
        collective_axes="warps",
    )


def forward(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    activation: str | None,
    config: MosaicDenseConfig,
    with_product: bool = False,
) -> Array | tuple[Array, Array]:
    """x [M, K], kernel [K, F], bias [F] -> [M, F], and, `with_product`, x @ kernel + bias, both of the dtype of x."""
    rows, width = x.shape[0], kernel.shape[1]
    beyond = -rows % 8
    if beyond:  # see `_line`; rows are copied by eights
        x = jnp.pad(x, ((0, beyond), (0, 0)))
    y = jax.ShapeDtypeStruct((rows + beyond, width), x.dtype)

    def body(*refs):  # type: ignore[no-untyped-def]
        given = iter(refs)
        x_ref, kernel_ref = next(given), next(given)
        bias_ref = None if bias is None else next(given)
        _fwd_kernel(x_ref, kernel_ref, bias_ref, next(given), next(given, None), name=activation, config=config)

    block_m, block_n = config.block
    clusters = pl.cdiv(rows, block_m * config.cluster_m) * pl.cdiv(width, block_n)
    call = plgpu.kernel(
        body,
        out_type=[y] * (1 + with_product),
        grid=(min(config.programs // config.cluster_m, clusters),),
        grid_names=("program",),
        cluster=(config.cluster_m,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warps",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with jax.enable_x64(False):  # or its indices are of two kinds
        results = call(*(a for a in (x, kernel, bias) if a is not None))
    results = [r[:rows] if beyond else r for r in results]
    return (results[0], results[1]) if with_product else results[0]
