"""A matrix product on Hopper whose tiles are finished in registers: what the Mosaic GPU kernels of dense share.

A program has three warp groups: one copies blocks of x and kernel into a ring of buffers in shared memory (TMA), two
multiply them (wgmma) and finish their tiles. A program works on several tiles, one after the other, and the copies for
the next begin while the last is finished.

Mosaic adds no barriers of its own around what is read and written in shared memory. Threads commit what they have
written before it is copied out, and wait for that copy, and for products that read it, before they write there again.
What was copied in they read before a commit, and the next copy to that place follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.tuning.dense import MosaicDenseConfig

Array = jax.Array

PIECE = 64  # rows and columns of a tile that are finished and stored at a time
COPYING = 2  # the warp group that copies; 0 and 1 multiply
# For each thread, of the 65,536 that three groups of 128 have in all. A tile takes 192: the less is left for what
# finishes it, the longer that waits for its own results. Eight more make the kernel that keeps derivatives 2 % faster.
REGISTERS = {"copy": 24, "multiply": 240}


def line(dtype: Any, *widths: int) -> int:
    """How many elements a line of shared memory holds, at most a piece's; rows of these widths end where a line does.

    Mosaic copies an array as 8 rows x so many elements at a time. What lies beyond the array's edge comes as zeros and
    is not stored, but only from a multiple of that on.
    """
    lines = (min(PIECE, nbytes // dtype.itemsize) for nbytes in (128, 64, 32))
    return next((n for n in lines if all(w % 8 == 0 and (w < n or w % n == 0) for w in widths)), 0)


def beyond_lines(dtype: Any, width: int) -> int:
    """How many columns an array of 8 bits is wider in memory, for its rows to end where a line does."""
    return 0 if line(dtype, width) else -width % 32


def transforms(dtype: Any, *widths: int) -> tuple[Any, Any]:
    """How blocks of arrays with these widths lie in shared memory."""
    elements = line(dtype, *widths)
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(elements * dtype.itemsize)


def block_at(i: Any, blocks: tuple[int, int], config: MosaicDenseConfig, backwards: bool) -> tuple[Any, Any]:
    """Which of the blocks, [rows, columns], all programs together compute as the i-th.

    They begin with the first rows; `backwards` they end with them. So where the result is larger than the L2 cache, and
    the next kernel usually a product: it begins with the first rows, and finds them there. What that gains, with the
    order of the Triton kernels, is at their `program_id_from_the_end`.
    """
    i = blocks[0] * blocks[1] - 1 - i if backwards else i
    return plgpu.planar_snake(i, blocks, "mn".index(config.minor), config.group)


def multiply_tiles(
    x_ref: Any,
    kernel_ref: Any,
    config: MosaicDenseConfig,
    begin: Callable[[Any, Any, Any], None],
    finish: Callable[[Any, Any, Any, Array], None],
    *,
    transposed: bool = False,
    backwards: bool = False,
) -> None:
    """All tiles of x @ kernel (`transposed`: of x @ kernel^T), shared among the programs.

    `backwards`: they end with the first rows, see `block_at`.

    The warp group that multiplies a tile, 0 or 1, calls `begin(group, row, column)` before and `finish(group, row,
    column, tile)` after it, with the place of the tile's first element and the tile in registers, float32. `finish` may
    store through `store_pieces`.
    """
    (rows, depth), dtype = x_ref.shape, x_ref.dtype
    width = kernel_ref.shape[0 if transposed else 1]
    tile_m, tile_n, tile_k, stages = config.tile_m, config.tile_n, config.tile_k, config.stages
    block_m, block_n = config.block
    by_turns, steps = config.split == "none", pl.cdiv(depth, tile_k)
    blocks_m, blocks_n = pl.cdiv(rows, block_m * config.cluster_m), pl.cdiv(width, block_n)

    def body(x_smem, kernel_smem, filled, free):
        warps, program, programs = lax.axis_index("warps"), lax.axis_index("program"), lax.axis_size("program")
        blocks = lax.div(blocks_m * blocks_n - 1 - program, programs) + 1  # of this program

        def first(i):
            """The row and the column where this program's i-th block begins."""
            m, n = block_at(program + i * programs, (blocks_m, blocks_n), config, backwards)
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
                    at, deep, wide = buffer(i, k), pl.ds(k * tile_k, tile_k), pl.ds(column, block_n)
                    plgpu.barrier_wait(free.at[at])
                    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, block_m), deep], x_smem.at[at], arrival(i, k))
                    plgpu.copy_gmem_to_smem(
                        kernel_ref.at[wide, deep] if transposed else kernel_ref.at[deep, wide],
                        kernel_smem.at[at], arrival(i, k), collective_axes="cluster" if config.cluster_m > 1 else None,
                    )  # fmt: skip

            @pl.loop(0, stages)  # the other program of a cluster must find this one's barriers until it is done
            def _(k):
                plgpu.barrier_wait(free.at[buffer(blocks, k)])

        def multiply(i, acc_ref):
            own_m = pl.ds(warps * tile_m, tile_m) if config.split == "m" else slice(None)
            own_n = pl.ds(warps * tile_n, tile_n) if config.split == "n" else slice(None)

            @pl.loop(0, steps)
            def _(k):
                at = buffer(i, k)
                plgpu.barrier_wait(arrival(i, k))
                kernel = kernel_smem.at[at, own_n].transpose((1, 0)) if transposed else kernel_smem.at[at, :, own_n]
                plgpu.wgmma(acc_ref, x_smem.at[at, own_m], kernel)
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)
                def _():
                    plgpu.barrier_arrive(free.at[buffer(i, k - 1)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[buffer(i, steps - 1)])

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
                begin(warps, row, column)

                @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((tile_m, tile_n), jnp.float32))
                def _(acc_ref):
                    multiply(i, acc_ref)
                    finish(warps, row, column, acc_ref[...])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # One branch with two sides: the compiler ignores `set_max_registers` elsewhere.
        lax.cond(warps == COPYING, copy, compute)

    free: Any = plgpu.Barrier
    if config.cluster_m > 1:  # the copies of one program fill buffers of the other
        free = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    widths = (depth,) if transposed else (depth, width)
    block_of_kernel = (block_n, tile_k) if transposed else (tile_k, block_n)
    pl.run_scoped(
        body,
        x_smem=plgpu.SMEM((stages, block_m, tile_k), dtype, transforms=transforms(dtype, *widths)),
        kernel_smem=plgpu.SMEM((stages, *block_of_kernel), dtype, transforms=transforms(dtype, *widths)),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=stages * (1 + by_turns)),
        free=free(num_arrivals=1 if by_turns else 2, num_barriers=stages),
        collective_axes="warps",
    )


def pieces_smem(ref: Any, places: int = 2) -> Any:
    """For each of the two warp groups so many pieces of an array in memory."""
    return plgpu.SMEM((2, places, PIECE, PIECE), ref.dtype, transforms=transforms(ref.dtype, ref.shape[1]))


def place_of(piece: tuple[int, int], row: Any, column: Any) -> tuple[Any, Any]:
    """Where in an array a piece lies that begins at these rows and columns of the tile at `row`, `column`."""
    m, n = piece
    return pl.ds(row + m, PIECE), pl.ds(column + n, PIECE)


def copy_piece(
    ref: Any, smem: Any, there: Any, pieces: Sequence[Any], i: int, warps: Any, row: Any, column: Any
) -> None:
    """The i-th piece of a tile, if there are so many, from memory to one of the warp group's two places."""
    if i < len(pieces):
        here = ref.at[place_of(pieces[i], row, column)]
        plgpu.copy_gmem_to_smem(here, smem.at[warps, i % 2], there.at[2 * warps + i % 2])


def store_pieces(under_way: int, *stores: tuple[Any, Array, Any]) -> None:
    """Values into a piece of one or more arrays, each by way of shared memory: (place there, values, piece in memory).

    So many of a warp group's stores before, of other places, may still be under way.
    """
    plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
    for place, values, piece in stores:
        place[...] = values.astype(piece.dtype)
    plgpu.commit_smem()
    for n, (place, _, piece) in enumerate(stores, start=1):
        plgpu.copy_smem_to_gmem(place, piece, commit_group=n == len(stores))


def launch(body: Callable[..., None], inputs: Sequence[Any], results: Any, config: MosaicDenseConfig) -> Any:
    """The kernel `body` on `inputs`, whose results have the shapes and dtypes of `results`, [M, F]."""
    rows, width = results[0].shape
    block_m, block_n = config.block
    clusters = pl.cdiv(rows, block_m * config.cluster_m) * pl.cdiv(width, block_n)
    call = plgpu.kernel(
        body,
        out_type=results,
        grid=(min(config.programs // config.cluster_m, clusters),),
        grid_names=("program",),
        cluster=(config.cluster_m,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warps",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    with jax.enable_x64(False):  # or its indices are of two kinds
        return call(*inputs)
