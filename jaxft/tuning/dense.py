"""Dense layers: the choice of the fastest implementation, and the launch configurations of the matmul kernels.

A layer multiplies an input `[rows, depth]` with a kernel `[depth, width]`. In the keys of the tables, and thus in the
arguments of the candidates, `activation` is 1 without an activation and 2 with one, and `residual` is 0 or 1.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxft.dispatch import Device
from jaxft.tuning.table import LARGEST, lookup, next_power_of_2


@dataclasses.dataclass(frozen=True)
class DenseChoice:
    """The implementation of `dense`: "mosaic_gpu" or "triton" in one kernel, "xla" with an activation in two."""

    implementation: str


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Launch configuration of a Triton matmul. Block sizes are powers of two, at least 16."""

    block_m: int  # rows of a tile of the result
    block_n: int  # columns of a tile of the result
    block_k: int  # depth that a program multiplies at a time
    num_warps: int
    num_stages: int  # of Triton's software pipeline


@dataclasses.dataclass(frozen=True)
class SplitConfig(DenseConfig):
    """Launch configuration of a Triton split-K matmul, which returns partial sums. The next kernel adds them up."""

    splits: int  # programs that share the depth of a tile; 1 if split-K does not pay and is not used


@dataclasses.dataclass(frozen=True)
class MosaicDenseConfig:
    """Launch configuration of a Mosaic GPU matmul. Two warp groups of a program multiply, a third one copies."""

    tile_m: int  # rows of the tile of a warp group
    tile_n: int  # columns of the tile of a warp group
    tile_k: int = 64  # depth that is copied and multiplied at a time
    stages: int = 4  # buffers, one for each step along the depth whose copies can be under way at the same time
    # How the two warp groups share the work. "m": the tile of the second group lies below the tile of the first, and
    # both read the same block of the kernel. "n": the tiles lie next to each other, and both groups read the same block
    # of x. "none": the groups take turns, so that one finishes its tile while the other multiplies.
    split: str = "m"
    # Programs in a cluster, 1 or 2. The rows of the second program lie below the rows of the first, and the two share
    # the copies of the kernel.
    cluster_m: int = 1
    minor: str = "n"  # dimension along which the tiles of a band are taken first, "m" (rows) or "n" (columns)
    # Width of a band, in tiles along `minor`. The programs take the tiles band by band, so that tiles that are computed
    # at the same time share much of what they read.
    group: int = 8
    programs: int = dataclasses.field(kw_only=True)  # they take the tiles in turn

    @property
    def block(self) -> tuple[int, int]:
        """Returns the number of rows and columns that a program computes at a time."""
        return self.tile_m * (1 + (self.split == "m")), self.tile_n * (1 + (self.split == "n"))


def dense_implementation(
    rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device, residual: bool = False,
    full: bool = False,
) -> str:  # fmt: skip
    """Returns the fastest implementation, see `DenseChoice`. `full`: float32 matmuls are not TF32.

    Mosaic GPU runs on Hopper only. It has no full float32 matmuls and no residual in float32. If the number of rows is
    not a multiple of 8, it needs copies. The shipped entries are for rows that are rounded up, so they say nothing
    about such numbers. With a residual and no activation, XLA needs one more kernel, so these cases have entries of
    their own.
    """
    residual = residual and (activation is None or itemsize > 2)
    apart = {"full": full, "unaligned": device.is_hopper and rows % 8 > 0}
    mosaic = device.is_hopper and not (full or apart["unaligned"] or (residual and itemsize > 2))
    mosaic_is_faster = mosaic and _mosaic_is_faster(rows, depth, width, activation, itemsize, residual)
    default = DenseChoice(
        "mosaic_gpu" if mosaic_is_faster else without_mosaic(rows, depth, width, activation, itemsize, device)
    )
    sizes = {"rows": rows, "depth": depth, "width": width, "activation": 1 + (activation is not None)}
    sizes |= {"itemsize": itemsize} | ({"residual": 1} if residual else {})
    variant = ",".join(name for name, holds in apart.items() if holds)

    def usable(choice: DenseChoice) -> bool:
        return mosaic or choice.implementation != "mosaic_gpu"

    config = lookup("dense_implementation", default, device, variant, usable, **sizes)
    return config.implementation


def gated_implementation(rows: int, depth: int, width: int, itemsize: int, device: Device) -> str:
    """Returns the fastest implementation of a layer with a gate, see `DenseChoice`. The kernel has `width` columns."""
    # The kernel after XLA's matmul costs little, because it writes half of what it reads.
    if epilogue_is_faster(rows, depth, width, itemsize, device):
        return "mosaic_gpu"
    return without_mosaic(rows, depth, width, None, itemsize, device)


def epilogue_is_faster(rows: int, depth: int, width: int, itemsize: int, device: Device) -> bool:
    """Returns whether Mosaic GPU's matmul with a gate or rotary positions is faster than two kernels."""
    short = is_short(rows, depth, width, itemsize) or rows % 8 > 0 or min(depth, width) < 256
    return device.is_hopper and itemsize == 2 and not short


def dense_implementation_candidates(
    rows: int, depth: int, width: int, itemsize: int, **_: Any
) -> Iterable[DenseChoice]:
    """Returns the implementations that `autotune` tries for a dense layer."""
    # The times that autotune compares do not include what a Mosaic GPU kernel costs the host.
    mosaic = () if is_short(rows, depth, width, itemsize) else ("mosaic_gpu",)
    return map(DenseChoice, (*mosaic, "triton", "xla"))


def without_mosaic(rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device) -> str:
    """Returns the faster one of "triton" and "xla"."""
    return "xla" if _xla_is_faster(rows, depth, width, activation, itemsize, device) else "triton"


def _mosaic_is_faster(rows: int, depth: int, width: int, activation: str | None, itemsize: int, residual: bool) -> bool:
    """Returns whether the Mosaic GPU matmul with its epilogue is the fastest implementation, on Hopper.

    In 16 bits it is the fastest with an activation or a residual, because cuBLAS needs a second kernel then. With
    neither, it is the fastest up to 8,192 rows, or if the depth is at most 1,024. Exceptions are deep matmuls of few
    rows, see `_xla_splits_depth`, and short matmuls, see `is_short`. In float32 XLA must first transpose the weights,
    which takes 2 to 6 us, so that the kernel pays with many rows only.
    """
    # H200, 16 bits, with GELU: 1.06 to 1.12x cuBLAS's time without GELU (cuBLAS and a kernel for GELU 1.3x), 2026-11-22
    # See docs/performance-notes.md, "When Mosaic GPU is the fastest for a dense layer".
    # See also "Residual in the epilogue of a dense layer" and "One kernel for a dense layer and its LayerNorm".
    short = is_short(rows, depth, width, itemsize)
    if short or min(depth, width) < 256 or depth % 16 or width % 16:  # the kernel does not take others
        return False
    if itemsize > 2:
        return rows >= (4096 if activation is None else 1024) and depth % 32 == width % 32 == 0
    if _xla_splits_depth(rows, depth, width, activation):
        return False
    return activation is not None or residual or rows <= 8192 or depth <= 1024


def is_short(rows: int, depth: int, width: int, itemsize: int) -> bool:
    """Returns whether a matmul takes less time than a Mosaic GPU kernel costs the host.

    XLA captures a Mosaic GPU kernel again whenever an address has changed, and it does not launch the kernels next to
    it ahead of time. Rows are rounded up to a power of two, as in the keys of the tables.
    """
    # H100, bf16, MiniLM-L6, 8x128, calls queued: 188 us with Triton (Mosaic GPU 225), 2026-11-25
    # See docs/performance-notes.md, "Short matmuls and the host's time for Mosaic GPU".
    return rows <= 256 or next_power_of_2(rows) * min(depth, width) * itemsize <= 512 * 768 * 2


def splits_few_rows(rows: int, itemsize: int, kernel_precision: str) -> bool:
    """Returns whether XLA splits the depth of a matmul with this number of rows. It never splits full float32 matmuls.

    The kernel that adds up the parts then also computes what follows: an activation, its gradient or a LayerNorm.
    """
    # H200, tf32, 128x768x3072 with GELU: 12.0 us (bias_activation's kernel after the matmul 13.3), 2026-11-23
    # H200, tf32, 128x768x768 and a LayerNorm: 8.4 us (our LayerNorm after the matmul 9.6), 2026-11-23
    return rows <= 512 and (itemsize <= 2 or kernel_precision == "tf32")


def epilogue_gradient_is_faster(backend: str, rows: int, itemsize: int) -> bool:
    """Returns whether a kernel computes the gradients of activation and bias sooner than XLA. `backend` ran forward.

    With few rows, XLA fuses these gradients into the kernel that adds up the parts of its split-K matmul.
    """
    # H100, tf32, 128x768x3072 tanh GELU, both directions: XLA 34.8 us (the kernel 36.5), 2026-11-25
    return backend != "xla" or itemsize == 2 or rows > 128


def _xla_is_faster(rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device) -> bool:
    """Returns whether XLA's matmul and a kernel after it are faster than the Triton matmul with its epilogue.

    - Up to 512 rows Triton is faster, because cuBLAS starts too few thread blocks, unless XLA splits the depth.
    - Up to 1,024 rows Triton is faster if it saves the kernel of an activation, or if the result is narrow.
    - With more rows Triton is as fast as XLA's two kernels if it saves the kernel of an activation and the result is
      wider than x. It rounds once instead of twice, and cards with little bandwidth for their matmuls, such as Ada,
      gain more. Cards after Hopper have other tensor cores, which the Triton kernel does not use.
    - In float32 XLA is always taken. With TF32 Triton is at best as fast, because it transposes the weights in shared
      memory.
    """
    # H100, bf16, 16384x128x512 with GELU: 15.2 us (XLA 17.6), 2026-11-25
    # See docs/performance-notes.md, "Triton or XLA for a dense layer".
    if itemsize > 2:
        return True
    if rows > 1024:
        return activation is None or width <= depth or device.is_after_hopper
    if _xla_splits_depth(rows, depth, width, activation):
        return True
    return rows > 512 and width > 1024 and activation is None


def _xla_splits_depth(rows: int, depth: int, width: int, activation: str | None) -> bool:
    """Returns whether the matmul is one of the deep ones that XLA is the fastest at, because it splits the depth."""
    # H200, bf16, 128x3072x768: 7.6 us (Triton 8.4), 2026-11-23
    # See docs/performance-notes.md, "Deep matmuls of few rows: split-K by XLA".
    # With one row Triton would be faster, but `vmap` may turn one row into many.
    return depth >= max(2048, 4 * width) and (rows <= 128 or activation is None and 256 < rows <= 512)


def dense(rows: int, depth: int, width: int, itemsize: int, device: Device) -> DenseConfig:
    """Returns the launch configuration of the Triton kernel of a dense layer."""
    if rows > 1024 and itemsize <= 2:
        # Not in float32: full float32 matmuls in these tiles spill registers.
        # H100, bf16, 4097x768x3072 with GELU: 44.7 us (64x64 tiles 68.9), 2026-11-25
        # See docs/performance-notes.md, "Tiles of the Triton dense kernel".
        default = DenseConfig(128, 128, 64, 8, 3)
    elif rows > 256:
        default = DenseConfig(64, 64, 64, 4, 4)
    elif width >= 2048 and (rows > 64 or width > 4096):
        # More stages if each tile has an SM to itself. With three stages, two programs fit on an SM.
        # H100, 128x768x2304: 4.5 us (three stages 4.8), 2026-11-24
        alone = _tiles(rows, width) <= device.multiprocessors and device.shared_memory >= LARGEST
        default = DenseConfig(64, 64, 128, 4, 5 if alone else 3)
    else:
        # Narrow tiles, so that there are enough of them, with many loads in flight.
        # H200, bf16, 16x768x2304: 3.9 us (the tiles above 5.0), 2026-11-24
        default = DenseConfig(64, 32, 128, 4, 5)
    default = dataclasses.replace(
        default,
        block_m=max(16, min(default.block_m, next_power_of_2(rows))),
        block_n=max(16, min(default.block_n, next_power_of_2(width))),
        block_k=max(16, min(default.block_k * 2 // itemsize, next_power_of_2(depth))),
    )
    return lookup("dense", default, device, rows=rows, depth=depth, width=width, itemsize=itemsize)


def dense_candidates(itemsize: int, **_: Any) -> Iterable[DenseConfig]:
    """Returns the configurations that `autotune` tries for the Triton kernel of a dense layer."""
    deep = 256 // itemsize
    blocks = [(64, 64, deep, 4, 3), (32, 64, deep, 4, 3), (64, 32, deep, 4, 3), (16, 64, deep, 4, 3),
              (32, 32, deep, 4, 5), (64, 32, deep, 4, 5), (32, 32, 2 * deep, 4, 2), (128, 64, deep // 2, 4, 4),
              (64, 64, deep // 2, 4, 4), (128, 128, deep // 2, 8, 3), (16, 32, deep, 4, 5), (16, 32, deep // 2, 4, 8),
              (64, 64, deep, 4, 4), (64, 64, deep, 4, 5)]  # fmt: skip
    return itertools.starmap(DenseConfig, blocks)


def dense_split(rows: int, depth: int, width: int, itemsize: int, device: Device) -> SplitConfig:
    """Returns the launch configuration of a Triton split-K matmul before a LayerNorm, which adds up the partial sums.

    `splits` is 1 if split-K does not pay: in float32, with more than 256 rows, with a depth below 512, or if the tiles
    give work to more than half of the SMs without it. With more than 128 rows of float8, a depth below 1,536 is not
    split, and tiles may give work to all SMs. At 512 rows the LayerNorm takes longer by as much as the matmul gains.
    """
    # H200, bf16, 128x768x768 with the LayerNorm: 4.8 us (XLA 6.2), 2026-11-24
    # H200, float8, 128x3072x768 with the LayerNorm: 7.0 us (one program for each tile 12.0), 2026-11-28
    # See docs/performance-notes.md, "Split-K by Triton before a LayerNorm".
    tiles, few, many_of_float8 = max(1, _tiles(rows, width)), rows <= 64, itemsize == 1 and rows > 128
    if itemsize > 2 or rows > 256:
        splits = 1
    elif many_of_float8:
        splits = min(4, 2 * device.multiprocessors // tiles, depth // 768)
    else:
        splits = min(4, device.multiprocessors // tiles, depth // 256)
    default = SplitConfig(
        block_m=max(16, min(64, next_power_of_2(rows))),
        block_n=max(16, min(32 if few or many_of_float8 else 64, next_power_of_2(width))),
        block_k=(256 if few else 128) // itemsize,
        num_warps=2 if rows <= 16 and itemsize > 1 else 4,
        num_stages=4 if few else 5,
        splits=max(1, splits),
    )
    return lookup("dense_split", default, device, rows=rows, depth=depth, width=width, itemsize=itemsize)


def dense_split_candidates(rows: int, itemsize: int, **_: Any) -> Iterable[SplitConfig]:
    """Yields the configurations that `autotune` tries for the Triton split-K matmul before a LayerNorm."""
    block_m, deep = max(16, min(64, next_power_of_2(rows))), 256 // itemsize
    blocks = [(64, deep, 4, 3), (64, deep, 4, 4), (64, deep // 2, 4, 5), (32, deep, 4, 5), (128, deep // 2, 4, 4),
              (32, deep, 4, 4)]  # fmt: skip
    if block_m == 16 or itemsize == 1:
        blocks.append((32, deep, 2, 4))
    if itemsize == 1:
        blocks.append((32, deep // 2, 4, 5))
    for block, splits in itertools.product(blocks, (1, 2, 3, 4, 6)):
        yield SplitConfig(block_m, *block, splits=splits)


def dense_mosaic(
    rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device, residual: bool = False,
    gated: bool = False, rotary: bool = False,
) -> MosaicDenseConfig:  # fmt: skip
    """Returns the launch configuration of the Mosaic GPU kernel of a dense layer.

    If `gated`, the kernel has `width` columns in two halves. A tile has 64 columns of each, and the sums may be kept.
    """
    programs, variant = device.multiprocessors, "residual" if residual else "rotary" if rotary else ""
    pieces = 8 if variant else 4
    if gated:
        return with_room(_gated(rows, width, programs), itemsize, pieces + 2, device)
    default = _in_one_round(rows, width, itemsize, programs) or _in_rounds(rows, width, itemsize, programs)
    sizes = {"rows": rows, "depth": depth, "width": width, "activation": 1 + (activation is not None)}
    return _lookup_mosaic("dense_mosaic", default, device, variant, pieces, **sizes, itemsize=itemsize)


def dense_mosaic_candidates(rows: int, itemsize: int, device: Device, **_: Any) -> Iterable[MosaicDenseConfig]:
    """Yields the configurations that `autotune` tries for the Mosaic GPU kernel of a dense layer."""
    tiles = [(64, 128, 4, "m"), (64, 192, 4, "m"), (64, 256, 4, "m"), (128, 128, 4, "n"), (128, 192, 4, "none"),
             (192, 128, 4, "none"), (128, 128, 6, "none"), (64, 192, 6, "none"), (64, 128, 6, "none"),
             (64, 64, 8, "none"), (64, 64, 8, "m"), (64, 192, 4, "none")]  # fmt: skip
    groups = (8, 16) if rows > 1024 else (8,)
    deep = tile_k_of(itemsize)
    for (m, n, k, split), group in itertools.product(tiles, groups):
        config = MosaicDenseConfig(m, n, deep, k, split, group=group, programs=device.multiprocessors)
        yield with_room(config, itemsize, 4, device)


def dense_mosaic_gradient(rows: int, depth: int, width: int, itemsize: int, device: Device) -> MosaicDenseConfig:
    """Returns the configuration of the Mosaic kernel for (dy [rows, depth] @ kernel^T) * derivatives [rows, width]."""
    # H200, bf16, 16384x768x3072, with the sum for a bias: 117 us (XLA's matmul and bias_activation 184), 2026-11-26
    # See docs/performance-notes.md, "Dense layers with activation derivatives (Mosaic GPU)".
    # One stage less, because pieces of the derivatives take shared memory.
    default = _in_rounds(rows, width, itemsize, device.multiprocessors, largest=5)
    sizes = {"rows": rows, "depth": depth, "width": width}
    return _lookup_mosaic("dense_mosaic_gradient", default, device, "", 7, **sizes, itemsize=itemsize)


def dense_mosaic_derivatives(
    forward: MosaicDenseConfig,
    rows: int,
    width: int,
    inner: int,
    itemsize: int,
    derivative_itemsize: int,
    device: Device,
) -> tuple[MosaicDenseConfig, MosaicDenseConfig]:
    """Returns the configurations of the kernels that keep the activation's derivatives and that multiply by them.

    `forward` is the first kernel's configuration without a gradient, `inner` the number of features between the layers.
    """
    saving = with_room(forward, itemsize, 4 + 4 * derivative_itemsize // itemsize, device)
    gradient = dense_mosaic_gradient(rows, width, inner, itemsize, device)
    if derivative_itemsize == itemsize:  # they need more room than entries of the tables are made for
        gradient = with_room(gradient, itemsize, 9, device)
    return saving, gradient


def dense_mosaic_gradient_candidates(device: Device, **_: Any) -> Iterable[MosaicDenseConfig]:
    """Yields the configurations that `autotune` tries for the kernel of `dense_mosaic_gradient`."""
    tiles = [(128, 192, 3), (128, 192, 4), (192, 128, 4), (128, 128, 4), (128, 128, 5), (64, 192, 5), (64, 128, 5)]
    for (m, n, k), minor in itertools.product(tiles, ("m", "n")):
        yield MosaicDenseConfig(m, n, stages=k, split="none", group=16, minor=minor, programs=device.multiprocessors)


def _lookup_mosaic(
    op: str, default: MosaicDenseConfig, device: Device, variant: str, pieces: int, *, itemsize: int, **sizes: int
) -> MosaicDenseConfig:
    """Calls `lookup`, and reduces the stages so that they fit in shared memory.

    An entry may have too many stages: it may come from a user, or from a kernel that takes less shared memory. An entry
    for which only one stage is left is skipped: the copies would wait for the matmuls, and the matmuls for the copies.
    """

    def usable(config: MosaicDenseConfig) -> bool:
        return with_room(config, itemsize, pieces, device).stages > 1

    default = with_room(default, itemsize, pieces, device)
    config = lookup(op, default, device, variant, usable, **sizes, itemsize=itemsize)
    return with_room(config, itemsize, pieces, device)


def with_room(config: MosaicDenseConfig, itemsize: int, pieces: int, device: Device) -> MosaicDenseConfig:
    """Returns the configuration with no more stages than fit in shared memory beside pieces of 64 x 64 elements.

    There are four pieces of the result, four of a residual or of the sines and cosines of angles, and four of
    derivatives, of which 8-bit ones take half the room of 16-bit ones. The gradient kernel has four pieces of the
    result, four of derivatives, and a constant of an eighth of a piece for the sum over the rows.
    """
    others = pieces * 64 * 64 * itemsize + 2 * config.tile_n * 4 + 512  # two rows of a bias or of sums, and barriers
    most = (device.shared_memory - others) // (sum(config.block) * config.tile_k * itemsize)
    return dataclasses.replace(config, stages=min(config.stages, most))


def _in_rounds(
    rows: int, width: int, itemsize: int, programs: int, largest: int = 6,
    tiles: Sequence[tuple[int, int]] = ((128, 192), (192, 128), (128, 128), (64, 192)),
) -> MosaicDenseConfig:  # fmt: skip
    """Returns the tiles with the shortest estimated time: rounds, of one tile per program, times the time of a tile."""
    tile_k = tile_k_of(itemsize)
    # Relative speed of each tile if its last round is full, H200, 2026-11-22.
    speed = {(128, 192): 1.0, (192, 128): 0.965, (128, 128): 0.95, (64, 192): 0.9}
    configs = [
        MosaicDenseConfig(m, n, tile_k, 4 if m + n > 256 else largest, split="none", group=16, programs=programs)
        for m, n in tiles
    ]

    def time(config: MosaicDenseConfig) -> float:
        return -(-_tiles(rows, width, *config.block) // programs) * config.tile_m * config.tile_n / speed[config.block]

    return min(configs, key=time)


def _in_one_round(rows: int, width: int, itemsize: int, programs: int) -> MosaicDenseConfig | None:
    """Returns the tiles that give work to the most SMs in one round, or None if all tiles need more rounds."""
    # H200, bf16, 1024x3072x768: 10.5 us in 128x64 blocks that two warp groups share (64x128 by turns 11.8), 2026-11-24
    # H200, float8, 1024x3072x768: 7.7 us in blocks of 64x128 by turns (128x64 blocks that are shared 8.3), 2026-11-28
    # See docs/performance-notes.md, "Tiles of the Mosaic GPU dense kernel".
    small = [(64, 64, 8, "none"), (64, 64, 8, "m"), (64, 128, 6, "none"), (64, 192, 4, "none"), (64, 128, 4, "m"),
             (64, 192, 4, "m")]  # fmt: skip
    if itemsize == 1:  # Of tiles that give work to equally many SMs, the first are taken: here tiles by turns.
        small = [(64, 64, 8, "none"), (64, 128, 6, "none"), (64, 192, 6, "none"), (64, 64, 8, "m"), (64, 128, 6, "m"),
                 (64, 192, 6, "m")]  # fmt: skip
    found, most = None, 0
    for m, n, k, split in small:
        candidate = MosaicDenseConfig(m, n, tile_k_of(itemsize), k, split=split, programs=programs)
        tiles = _tiles(rows, width, *candidate.block)
        if most < tiles <= programs:
            most, found = tiles, candidate
    return found


def _gated(rows: int, width: int, programs: int) -> MosaicDenseConfig:
    """Returns the tiles of a layer with a gate, see `_in_rounds`. `width` is a multiple of 128."""
    # H100, bf16, 16384x768x1152 GeGLU: 82.2 us in tiles of the first kind (second 88.8, Triton 119.2), 2026-11-27
    # H100, bf16, 4096x768x1152 GeGLU: 24.4 us in tiles of the second kind (Triton 34.4), 2026-11-27
    by_pairs = MosaicDenseConfig(128, 128, stages=4, split="m", minor="m", programs=programs)
    by_turns = MosaicDenseConfig(192, 128, stages=4, split="none", group=16, programs=programs)
    speed = {by_pairs: 1.0, by_turns: 0.93}

    def time(config: MosaicDenseConfig) -> float:
        return -(-_tiles(rows, width, *config.block) // programs) * config.block[0] / speed[config]

    return min(speed, key=time)


def float8_implementation(rows: int, depth: int, width: int) -> str:
    """Returns the fastest implementation of a dense layer of float8 on Hopper, "mosaic_gpu" or "triton"."""
    # H200, 512x768x2304: 5.3 us with Mosaic GPU (Triton 9.1), 2026-11-28
    # H200, BERT-base in FP8, 8x64, calls queued: 426 us, of which the GPU works 349 us (bf16 449, 433), 2026-11-28
    # Numbers of rows that are not a multiple of 8 need copies, as in 16 bits.
    pays = rows > 256 and rows % 8 == 0 and min(depth, width) >= 768
    return "triton" if is_short(rows, depth, width, 2) and not pays else "mosaic_gpu"


def float8_matmul_adds_residual(rows: int, depth: int, width: int) -> bool:
    """Returns whether the Mosaic GPU matmul of float8 adds a residual faster than the LayerNorm that follows."""
    # H100, 16384x1024x1024 and LayerNorm: 68.6 us if the matmul adds (LayerNorm 82.0), 2026-11-27
    # Fewer than 16,384 rows of this width were not measured.
    # See docs/performance-notes.md, "FP8: tiles and encoders", which has cases where the LayerNorm is faster.
    return rows >= 8192 and depth <= width and width >= 1024


def float8_dense_mosaic(
    rows: int, depth: int, width: int, activation: str | None, result_itemsize: int, device: Device,
    residual: bool = False,
) -> MosaicDenseConfig:  # fmt: skip
    """Returns the launch configuration of the Mosaic GPU kernel of a dense layer of float8."""
    # H100, 4096x768x3072 with GELU: 21.8 us in tiles of 128x128 by turns (64x256 below each other 22.8), 2026-11-27
    # H100, 4096x768x2304: 14.6 us in tiles of 128x192 by turns (64x192 below each other 16.4), 2026-11-27
    # See docs/performance-notes.md, "FP8: tiles and encoders".
    programs, pieces = device.multiprocessors, _float8_pieces(result_itemsize)
    if one_round := _in_one_round(rows, width, 1, programs):
        # H200, 512x768x3072 with GELU: 5.8 us in tiles of 64x192 by turns (128x128 6.2, Triton 9.8), 2026-11-28
        default = one_round
    elif activation is None and depth >= 2048:  # The epilogue is a small part, and larger blocks read less.
        pairs = [MosaicDenseConfig(64, n, tile_k_of(1), 6, "m", programs=programs) for n in (256, 192)]
        default = min(pairs, key=lambda c: -(-_tiles(rows, width, *c.block) // programs) * c.tile_n)
    else:
        # H200, 16384x1024x4096 with GELU: 122.8 us in tiles of 128x192 by turns (128x128: 158.5), 2026-11-27
        tiles = [(128, 192), (128, 128), (64, 192)]
        if activation is not None:
            tiles = tiles[:2] if depth >= 1024 else [(128, 128)]
        default = _in_rounds(rows, width, 1, programs, tiles=tiles)
    sizes = {"rows": rows, "depth": depth, "width": width, "activation": 1 + (activation is not None)}
    variant, pieces = ("residual", 2 * pieces) if residual else ("", pieces)
    return _lookup_mosaic(
        "float8_dense_mosaic", default, device, variant, pieces, **sizes, itemsize=1, result_itemsize=result_itemsize
    )


def float8_dense_mosaic_candidates(
    rows: int, result_itemsize: int, device: Device, **_: Any
) -> Iterable[MosaicDenseConfig]:
    """Yields the configurations that `autotune` tries for the Mosaic GPU kernel of a dense layer of float8."""
    tiles = [(128, 192, 6, "none"), (128, 128, 6, "none"), (64, 192, 6, "none"), (64, 256, 6, "m"), (64, 192, 6, "m"),
             (64, 128, 6, "m"), (64, 128, 6, "none"), (64, 64, 8, "none"), (64, 64, 8, "m")]  # fmt: skip
    for m, n, k, split in tiles:
        config = MosaicDenseConfig(m, n, tile_k_of(1), k, split, programs=device.multiprocessors)
        yield with_room(config, 1, _float8_pieces(result_itemsize), device)


def _float8_pieces(result_itemsize: int) -> int:
    """Returns the room, in pieces of one byte per element, for four pieces of the result and the scales of columns."""
    return 4 * result_itemsize + 1


def _tiles(rows: int, width: int, block_m: int = 64, block_n: int = 64) -> int:
    """Returns how many tiles cover `[rows, width]`."""
    return -(-rows // block_m) * -(-width // block_n)


def tile_k_of(itemsize: int) -> int:
    """Returns the depth of the blocks of the Mosaic GPU kernels: the number of elements in 128 bytes."""
    return 128 // itemsize
