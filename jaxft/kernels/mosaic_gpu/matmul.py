"""A matmul for Hopper with an epilogue in registers, shared by the Mosaic GPU kernels of dense layers.

A program has three warp groups. One copies blocks of x and kernel into a ring of buffers in shared memory (TMA). The
other two multiply the blocks (wgmma) and finish their tiles. A program works on several tiles in turn. The copies for
the next tile begin while the last one is finished.

Mosaic inserts no barriers around accesses to shared memory (`unsafe_no_auto_barriers`). Threads commit what they have
written before it is copied out. They write to the same place again only after that copy, and the matmuls that read the
place, have ended. Threads read what was copied in before a commit, and the next copy to the same place follows that
commit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxft.kernels.mosaic_gpu.support import PIECE, line
from jaxft.tuning.dense import MosaicDenseConfig

COPYING = 2  # The warp group that copies. Groups 0 and 1 multiply.
# Per thread. Three groups of 128 threads share 65,536 registers. A tile takes 192 per thread, and the rest is for the
# epilogue: the fewer registers it has, the longer it waits for its own results.
# Dense layer that keeps derivatives: 2 % faster with 240 than with 232, 2026-11-26
REGISTERS = {"copy": 24, "multiply": 240}


def beyond_lines(dtype: Any, width: int) -> int:
    """Returns how many columns to add to 8-bit rows of this width, so that they end where a `line` ends."""
    return 0 if line(dtype, width) else -width % 32


def transforms(dtype: Any, *widths: int, most: int = PIECE) -> tuple[Any, Any]:
    """Returns the tiling and the swizzle of blocks in shared memory, for arrays with rows of these widths.

    A line of a block has at most `most` elements.
    """
    elements = line(dtype, *widths, most=most)
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(elements * dtype.itemsize)


def block_at(i: Any, blocks: tuple[int, int], config: MosaicDenseConfig, backwards: bool) -> tuple[Any, Any]:
    """Returns the index, along the rows and the columns, of the block that the programs compute as their i-th in all.

    With `backwards` the first rows come last. This is for a result that is larger than the L2 cache, if the next kernel
    is usually a matmul: the next matmul begins with the first rows, which the L2 cache still holds then. See
    `program_id_from_the_end` in jaxft/kernels/triton/common.py for the order of the Triton kernels.
    """
    i = blocks[0] * blocks[1] - 1 - i if backwards else i
    return plgpu.planar_snake(i, blocks, "mn".index(config.minor), config.group)


def buffer_at(i: Any, k: Any, steps: int, stages: int) -> Any:
    """Returns the buffer of step k of a program's block i, of `steps` steps. The next buffer is the one freed first."""
    return lax.rem(i * steps + k, stages)


def multiply_tiles(
    x_ref: Any,
    kernel_ref: Any,
    config: MosaicDenseConfig,
    begin: Callable[[Any, Any, Any], None],
    finish: Callable[..., None],
    *,
    transposed: bool = False,
    backwards: bool = False,
    halves: int = 1,
) -> None:
    """Computes all tiles of x [M, K] @ kernel [K, F] (if `transposed`, [F, K]), shared among the programs.

    With `halves` of 2, the kernel is [K, 2 * F]. A tile then is two arrays: `tile_n // 2` columns of the first half of
    the kernel, and the same columns of the second half. `split` must not be "n".

    A warp group (0 or 1) calls `begin(group, row, column)` before it multiplies the tile that begins there, and
    `finish(group, row, column, *tile)` after it, with the tile in registers, float32. `finish` may store results with
    `store_pieces`. See `block_at` for `backwards`.
    """
    (rows, depth), dtype = x_ref.shape, x_ref.dtype
    width = kernel_ref.shape[0 if transposed else 1] // halves
    tile_m, tile_n, tile_k, stages = config.tile_m, config.tile_n, config.tile_k, config.stages
    block_m, block_n = config.block
    columns = block_n // halves  # of a half
    by_turns, steps = config.split == "none", pl.cdiv(depth, tile_k)
    blocks_m, blocks_n = pl.cdiv(rows, block_m * config.cluster_m), pl.cdiv(width, columns)

    def body(x_smem, kernel_smem, filled, free):
        warps, program, programs = lax.axis_index("warps"), lax.axis_index("program"), lax.axis_size("program")
        blocks = lax.div(blocks_m * blocks_n - 1 - program, programs) + 1  # Of this program.
        buffer = functools.partial(buffer_at, steps=steps, stages=stages)

        def first(i):
            """Returns the row and the column where the i-th block of this program begins."""
            m, n = block_at(program + i * programs, (blocks_m, blocks_n), config, backwards)
            return (m * config.cluster_m + lax.axis_index("cluster")) * block_m, n * columns

        def arrival(i, k):
            """Returns the barrier that the copies of step k of block i complete."""
            # A warp group must wait for every phase of a barrier, so warp groups that take turns have their own ones.
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
                    for half in range(halves):
                        wide = pl.ds(column + half * width, columns)
                        plgpu.copy_gmem_to_smem(
                            kernel_ref.at[wide, deep] if transposed else kernel_ref.at[deep, wide],
                            kernel_smem.at[at, half], arrival(i, k),
                            collective_axes="cluster" if config.cluster_m > 1 else None,
                        )  # fmt: skip

            # Waits until the other program of a cluster is done too, which uses the barriers of this program.
            @pl.loop(0, stages)
            def _(k):
                plgpu.barrier_wait(free.at[buffer(blocks, k)])

        def multiply(i, *acc_refs):
            own_m = pl.ds(warps * tile_m, tile_m) if config.split == "m" else slice(None)
            own_n = pl.ds(warps * tile_n, tile_n) if config.split == "n" else slice(None)

            @pl.loop(0, steps)
            def _(k):
                at = buffer(i, k)
                plgpu.barrier_wait(arrival(i, k))
                for half, acc_ref in enumerate(acc_refs):
                    kernel = kernel_smem.at[at, half]
                    kernel = kernel.at[own_n].transpose((1, 0)) if transposed else kernel.at[:, own_n]
                    plgpu.wgmma(acc_ref, x_smem.at[at, own_m], kernel)
                plgpu.wgmma_wait(halves)

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

                def tile(*acc_refs):
                    multiply(i, *acc_refs)
                    finish(warps, row, column, *(acc_ref[...] for acc_ref in acc_refs))

                pl.run_scoped(tile, *[plgpu.ACC((tile_m, tile_n // halves), jnp.float32)] * halves)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Each role is one side of a branch: the compiler ignores `set_max_registers` elsewhere.
        lax.cond(warps == COPYING, copy, compute)

    free: Any = plgpu.Barrier
    if config.cluster_m > 1:  # The copies of one program also fill buffers of the other.
        free = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    of_factors = transforms(dtype, *((depth,) if transposed else (depth, width)), most=max(PIECE, tile_k))
    block_of_kernel = (columns, tile_k) if transposed else (tile_k, columns)
    pl.run_scoped(
        body,
        x_smem=plgpu.SMEM((stages, block_m, tile_k), dtype, transforms=of_factors),
        kernel_smem=plgpu.SMEM((stages, halves, *block_of_kernel), dtype, transforms=of_factors),
        filled=plgpu.Barrier(num_arrivals=1 + halves, num_barriers=stages * (1 + by_turns)),
        free=free(num_arrivals=1 if by_turns else 2, num_barriers=stages),
        collective_axes="warps",
    )


def pieces_smem(ref: Any, places: int = 2, most: int = PIECE) -> Any:
    """Describes shared memory for `places` pieces of an array per multiplying warp group.

    Lines of the memory have at most `most` elements.
    """
    lines = transforms(ref.dtype, ref.shape[1], most=most)
    return plgpu.SMEM((2, places, PIECE, PIECE), ref.dtype, transforms=lines)


def place_of(piece: tuple[int, int], row: Any, column: Any) -> tuple[Any, Any]:
    """Returns the rows and columns of a piece (its place in the tile) of the tile that begins at (row, column)."""
    m, n = piece
    return pl.ds(row + m, PIECE), pl.ds(column + n, PIECE)


def copy_piece(
    ref: Any, smem: Any, there: Any, pieces: Sequence[Any], i: int, warps: Any, row: Any, column: Any
) -> None:
    """Starts to copy piece i of a tile, if there is one, to the warp group's place i % 2 in shared memory."""
    if i < len(pieces):
        here = ref.at[place_of(pieces[i], row, column)]
        plgpu.copy_gmem_to_smem(here, smem.at[warps, i % 2], there.at[2 * warps + i % 2])


def store_pieces(under_way: int, *stores: tuple[Any, Array | tuple[Array, ...], Any]) -> None:
    """Stores a piece of each array through shared memory: (place in shared memory, values, piece in device memory).

    Values may be a tuple of parts that lie next to each other. Each part then has the columns of a line of the place.
    `under_way` earlier calls of the warp group may still have copies to device memory under way. These calls must have
    used other places.
    """
    plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
    for place, values, piece in stores:
        parts = values if isinstance(values, tuple) else (values,)
        for i, part in enumerate(parts):
            own = slice(i * part.shape[1], (i + 1) * part.shape[1])
            place[:, own] = part.astype(piece.dtype)
    plgpu.commit_smem()
    for n, (place, _, piece) in enumerate(stores, start=1):
        plgpu.copy_smem_to_gmem(place, piece, commit_group=n == len(stores))


def launch(
    kernel: Callable[..., None], inputs: Sequence[Any], results: Any, config: MosaicDenseConfig, halves: int = 1
) -> Any:
    """Launches a kernel with three warp groups per program. The first result, [M, F], determines the grid.

    See `multiply_tiles` for `halves`.

    An input that is None has None for its ref.
    """

    def body(*refs: Any) -> None:
        given = iter(refs)
        kernel(*[None if x is None else next(given) for x in inputs], *given)

    rows, width = results[0].shape
    block_m, block_n = config.block
    clusters = pl.cdiv(rows, block_m * config.cluster_m) * pl.cdiv(width, block_n // halves)
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
    with jax.enable_x64(False):  # Otherwise the kernel's indices would have two integer types.
        return call(*(x for x in inputs if x is not None))
