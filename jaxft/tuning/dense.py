"""Dense layers: which implementation is the fastest, and the launch configurations of the products."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from jaxft.dispatch import Device
from jaxft.tuning.table import LARGEST, lookup, next_power_of_2


@dataclasses.dataclass(frozen=True)
class DenseChoice:
    """What `dense` takes unless one is named: "mosaic_gpu", "triton", or "xla" and then a kernel for the activation."""

    implementation: str


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A matrix product in tiles of `block_m` x `block_n`, `block_k` deep; powers of two, at least 16."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class SplitConfig(DenseConfig):
    """`splits` programs share the depth of a tile, and the result is as many partial sums; 1 for no such product."""

    splits: int


@dataclasses.dataclass(frozen=True)
class MosaicDenseConfig:
    """Each of two warp groups multiplies tiles of `tile_m` x `tile_n`, `tile_k` deep at a time.

    `split` is how the two share the work: "m", one's tile lies below the other's, and they read the same of the kernel;
    "n", beside it, and they read the same of x; "none", they take turns: one finishes its tile while the other
    multiplies. Copies for `stages` steps are on the way. `cluster_m`, 1 or 2: so many programs, one's rows below the
    other's, share copies of the kernel. Tiles are taken in bands of `group` of them along `minor` ("m" or "n"), so that
    those of the `programs` that run at once share most of what they read.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    stages: int = 4
    split: str = "m"
    cluster_m: int = 1
    minor: str = "n"
    group: int = 8
    programs: int = dataclasses.field(kw_only=True)

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns that a program computes at a time."""
        return self.tile_m * (1 + (self.split == "m")), self.tile_n * (1 + (self.split == "n"))


def dense_implementation(
    rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device, residual: bool = False,
    full: bool = False,
) -> str:  # fmt: skip
    """The fastest: see `DenseChoice`. `full`: products of float32 that are not TF32.

    Mosaic GPU is Hopper's, and has no such products, nor a residual in float32; and where the number of rows is no
    multiple of 8 it costs copies. The shipped entries, for rows rounded up, do not know of these. With a residual and
    no activation XLA has a kernel more, and so there are entries of their own.
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


def dense_implementation_candidates(
    rows: int, depth: int, width: int, activation: int, itemsize: int, device: Device, residual: int = 0
) -> Iterable[DenseChoice]:
    # Times of kernels leave out what a Mosaic one costs the host.
    mosaic = () if is_short(rows, depth, width, itemsize) else ("mosaic_gpu",)
    return map(DenseChoice, (*mosaic, "triton", "xla"))


def without_mosaic(rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device) -> str:
    """The faster of the other two."""
    return "xla" if _xla_is_faster(rows, depth, width, activation, itemsize, device) else "triton"


def _mosaic_is_faster(rows: int, depth: int, width: int, activation: str | None, itemsize: int, residual: bool) -> bool:
    """Whether the Mosaic GPU product with its epilogue is the fastest.

    On an H200 (2026-11-22), 16-bit: with GELU it takes 1.06-1.12x as long as cuBLAS without, where a second kernel
    makes that 1.3x; without activation 0.87-1.0x, but more of many rows and a depth of 1,024 or more. Up to 512 rows it
    takes 0.7-0.95x the time of the Triton product, where it has at least 60 of its smallest tiles (264x768x768 4.5 us
    for 4.9; 2026-11-23); deep ones without activation are cuBLAS's then (see `_xla_splits_depth`).

    In float32 (TF32), with the transposition of the kernel, which takes 2 to 6 us: 4096x768x3072 with GELU 64 us,
    without it XLA's alone 64; without activation 0.8-0.9x XLA's time from 4,096 rows on, at 1,024 rows 1.0-1.6x
    (2026-11-23).

    With a residual and no activation, where XLA has a kernel more for the sum: 512x768x768 5.2 us (XLA 8.2),
    1024x3072x768 14.1 (14.5), 4096x768x768 10.8 (14.3), 4096x3072x768 28.8 (31.7), 16384x768x768 36.0 (51.8), with
    `bias` (H100, 2026-11-25). No layer takes it, though a LayerNorm after it reads an array less. That gains nothing
    where no gradient is taken; a training step of BERT-base of 32x512 takes 18.65 ms for 18.98, but bias and residual
    are then rounded along with the product, and the gradient of bias errs 2.4 times as much.

    A kernel for both, the product and the LayerNorm, was slower: the four programs of a cluster have whole rows of 768
    columns between them, and an H200 has room for 30 such clusters at a time (15 of eight), on 120 of its 132
    multiprocessors. It was written for 32, and so took two rounds: 16384x768x768 75 us and 16384x3072x768 204, by two
    kernels 48 and 120. By 30 it would take half as long at best and then 1.1x for the uneven share of the rows, which
    leaves the latter without a gain (2026-11-24).

    Short ones are not its own in any case, see `is_short`.
    """
    short = is_short(rows, depth, width, itemsize)
    if short or min(depth, width) < 256 or depth % 16 or width % 16:  # others it does not take
        return False
    if itemsize > 2:
        return rows >= (4096 if activation is None else 1024) and depth % 32 == width % 32 == 0
    if _xla_splits_depth(rows, depth, width, activation):
        return False
    return activation is not None or residual or rows <= 8192 or depth < 1024


def is_short(rows: int, depth: int, width: int, itemsize: int) -> bool:
    """Whether the product takes less time than a Mosaic kernel in a program costs the host.

    XLA captures such a kernel anew whenever an address has changed, and launches no kernel next to it ahead of time. Of
    whole encoders in bfloat16, by Triton and with Mosaic, on the device and queued: BERT-base of 4x128 466 and 481 us,
    479 and 553, MiniLM-L6 (width 384) of 8x128 179 and 171, 188 and 225, of 2x512 202 and 193, 224 and 285; but of
    16x128 266 and 208, 279 and 263 (H100, 2026-11-25). BERT-base of 1x128, queued on a slow host, 435 and 582. Rows are
    rounded up, as in the keys of a table.
    """
    return rows <= 256 or next_power_of_2(rows) * min(depth, width) * itemsize <= 512 * 768 * 2


def splits_few_rows(rows: int, itemsize: int, kernel_precision: str) -> bool:
    """Returns whether XLA splits the depth of a matmul of so few rows.

    The kernel that adds up the parts then takes what follows along: an activation, its gradient, a LayerNorm. XLA does
    not do so in float32 that is not TF32.
    """
    # H200, tf32, 128x768x3072 with GELU: 12.0 us (bias_activation's kernel after the matmul 13.3), 2026-11-23
    return rows <= 512 and (itemsize <= 2 or kernel_precision == "tf32")


def _xla_is_faster(rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device) -> bool:
    """Whether XLA's product and a kernel after it are faster than the Triton product with its epilogue.

    On an H200 (2026-11-20), 16-bit: the Triton product is 1.0-1.7x as fast up to 512 rows, where cuBLAS starts too few
    blocks. At 1,024 rows it still pays where it saves the activation's kernel (12.5 us against 9.8 + 4.4), and for
    narrow outputs (6.1 against 7.1 at depth 768; 15.8 against 12.8 at depth 3,072, where XLA needs two kernels).

    Of more rows it takes as long where it saves that kernel and what it moves, of results that are wider than x, and
    rounds once instead of twice: 1025x768x3072 with GELU 14.9 us (XLA 15.4), 2047x768x3072 22.6 (23.5), 4097x768x3072
    44.7 (42.3), 16383x768x3072 172 (171), 16383x1024x4096 274 (266), 16384x128x512 15.2 (17.6); but 4097x768x768 15.6
    (14.0), 16384x768x200 22.0 (18.4) (H100, bfloat16, 2026-11-25). Cards with less bandwidth for their products, as
    those of Ada, gain more by what is not moved. Cards after Hopper have other matrix units, which the kernel does not
    use: there XLA's product stays.

    In TF32 it pays nowhere: of 128 rows it takes as long (768x2304 11.1 us for 11.0; its partial sums and
    the LayerNorm after them 768x768 7.7 for 7.4), of 256 and more 1.5x and longer (H200, 2026-11-23). Triton turns the
    weights around in shared memory, which is the limit there; three bfloat16 products instead of one take 20 us.
    """
    if itemsize > 2:
        return True
    if rows > 1024:
        return activation is None or width <= depth or device.is_after_hopper
    if _xla_splits_depth(rows, depth, width, activation):
        return True
    return rows > 512 and width > 1024 and activation is None


def _xla_splits_depth(rows: int, depth: int, width: int, activation: str | None) -> bool:
    """Whether the product is one of those that XLA is the fastest at, splitting the depth.

    128x3072x768 in 7.6 us, by Triton 8.4; 64x3072x768, of weights in the L2 cache, in 5.4, by Triton 7.9; 512x3072x768
    in 9.0, by Mosaic 10.4; 320x4096x1024 in 8.9, by Mosaic 13.0; but of 256 rows Triton is as fast, and of one row
    faster (8.1, by XLA 13.6), which in a `vmap` is many. GELU, in the kernel that adds up the parts, costs 0.1 us; with
    it 384x3072x768 takes 11.7, by Mosaic 10.2, 512x3072x768 10.0 and 10.4, 512x4096x1024 16.1 and 13.0 (H200, bfloat16,
    2026-11-23 and 24).
    """
    return depth >= max(2048, 4 * width) and (rows <= 128 or activation is None and 256 < rows <= 512)


def dense(rows: int, depth: int, width: int, itemsize: int, device: Device) -> DenseConfig:
    if rows > 1024 and itemsize <= 2:
        # With GELU 4097x768x3072 in 44.7 us, in tiles of 64x64 68.9, 16383x768x3072 172 and 250; of 128x256, which take
        # more shared memory than most cards have, 168 (H100, bfloat16, 2026-11-25). In full float32 it spills.
        default = DenseConfig(128, 128, 64, 8, 3)
    elif rows > 256:
        default = DenseConfig(64, 64, 64, 4, 4)
    elif width >= 2048 and (rows > 64 or width > 4096):
        # More stages where each tile has a multiprocessor to itself: 128x768x2304 in 4.5 us, with three, of which two
        # programs fit into one, in 4.8 (H100, 2026-11-24).
        alone = _tiles(rows, width) <= device.multiprocessors and device.shared_memory >= LARGEST
        default = DenseConfig(64, 64, 128, 4, 5 if alone else 3)
    else:
        # Narrow tiles, so that there are enough of them, and many loads in flight: 16x768x2304 in 3.9 us, with the
        # tiles above 5.0, 64x1024x4096 in 5.7 and 7.3 (H200, bfloat16, 2026-11-24).
        default = DenseConfig(64, 32, 128, 4, 5)
    default = dataclasses.replace(
        default,
        block_m=max(16, min(default.block_m, next_power_of_2(rows))),
        block_n=max(16, min(default.block_n, next_power_of_2(width))),
        block_k=max(16, min(default.block_k * 2 // itemsize, next_power_of_2(depth))),
    )
    return lookup("dense", default, device, rows=rows, depth=depth, width=width, itemsize=itemsize)


def dense_candidates(rows: int, depth: int, width: int, itemsize: int, device: Device) -> Iterable[DenseConfig]:
    deep = 256 // itemsize
    blocks = [(64, 64, deep, 4, 3), (32, 64, deep, 4, 3), (64, 32, deep, 4, 3), (16, 64, deep, 4, 3),
              (32, 32, deep, 4, 5), (64, 32, deep, 4, 5), (32, 32, 2 * deep, 4, 2), (128, 64, deep // 2, 4, 4),
              (64, 64, deep // 2, 4, 4), (128, 128, deep // 2, 8, 3), (16, 32, deep, 4, 5), (16, 32, deep // 2, 4, 8),
              (64, 64, deep, 4, 4), (64, 64, deep, 4, 5)]  # fmt: skip
    return itertools.starmap(DenseConfig, blocks)


def dense_split(rows: int, depth: int, width: int, itemsize: int, device: Device) -> SplitConfig:
    """Of a product whose partial sums the next kernel adds up; with one of them where that does not pay.

    On an H200 (2026-11-24), bfloat16, with the LayerNorm that follows: 16x768x768 3.6 us (XLA 3.4), 32x768x768 3.6
    (3.9), 128x768x768 4.8 (6.2), 16x3072x768 5.7 (6.3), 32x3072x768 6.1 (6.3), 128x3072x768 7.0 (8.5), 256x768x768 5.7
    (7.5). At 512 rows the longer LayerNorm takes what the product gains.
    """
    tiles = _tiles(rows, width)
    splits = min(4, device.multiprocessors // max(1, tiles), depth // 256) if itemsize <= 2 and rows <= 256 else 1
    few = rows <= 64
    default = SplitConfig(
        block_m=max(16, min(64, next_power_of_2(rows))),
        block_n=max(16, min(32 if few else 64, next_power_of_2(width))),
        block_k=128 if few else 64,
        num_warps=2 if rows <= 16 else 4,
        num_stages=4 if few else 5,
        splits=max(1, splits),
    )
    return lookup("dense_split", default, device, rows=rows, depth=depth, width=width, itemsize=itemsize)


def dense_split_candidates(rows: int, depth: int, width: int, itemsize: int, device: Device) -> Iterable[SplitConfig]:
    block_m = max(16, min(64, next_power_of_2(rows)))
    blocks = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 5), (32, 128, 4, 5), (128, 64, 4, 4), (32, 128, 4, 4)]
    if block_m == 16:
        blocks.append((32, 128, 2, 4))
    for block, splits in itertools.product(blocks, (1, 2, 3, 4, 6)):
        yield SplitConfig(block_m, *block, splits=splits)


def dense_mosaic(
    rows: int, depth: int, width: int, activation: str | None, itemsize: int, device: Device, residual: bool = False
) -> MosaicDenseConfig:
    programs = device.multiprocessors
    default, most = _in_rounds(rows, width, itemsize, programs), 0
    # Of 1024x3072x768, tiles of 128x64 that two warp groups share take 10.5 us, those of 64x128 of one group 11.8 (with
    # six stages instead of eight 12.6 and 11.8), all of BERT-base of 8x128 523 us instead of 538. Tiles of 96 or 160
    # columns, whose rows in shared memory have 64 bytes instead of 128, take 16 us and more, where they fill more
    # multiprocessors; two or four parts of the depth, which the LayerNorm adds up, 1 us more (H200, 2026-11-24).
    small = (
        (64, 64, 8, "none"), (64, 64, 8, "m"), (64, 128, 6, "none"), (64, 192, 4, "none"), (64, 128, 4, "m"),
        (64, 192, 4, "m"),
    )  # fmt: skip
    for m, n, k, split in small:
        # The tiles that give work to the most multiprocessors, if each gets one.
        candidate = MosaicDenseConfig(m, n, tile_k_of(itemsize), k, split=split, programs=programs)
        tiles = _tiles(rows, width, *candidate.block)
        if most < tiles <= candidate.programs:
            most, default = tiles, candidate
    sizes = {"rows": rows, "depth": depth, "width": width, "activation": 1 + (activation is not None)}
    variant, pieces = ("residual", 8) if residual else ("", 4)
    return _lookup_mosaic("dense_mosaic", default, device, variant, pieces, **sizes, itemsize=itemsize)


def dense_mosaic_candidates(
    rows: int, depth: int, width: int, activation: int, itemsize: int, device: Device
) -> Iterable[MosaicDenseConfig]:
    tiles = [(64, 128, 4, "m"), (64, 192, 4, "m"), (64, 256, 4, "m"), (128, 128, 4, "n"), (128, 192, 4, "none"),
             (192, 128, 4, "none"), (128, 128, 6, "none"), (64, 192, 6, "none"), (64, 128, 6, "none"),
             (64, 64, 8, "none"), (64, 64, 8, "m"), (64, 192, 4, "none")]  # fmt: skip
    groups = (8, 16) if rows > 1024 else (8,)
    deep = tile_k_of(itemsize)
    for (m, n, k, split), group in itertools.product(tiles, groups):
        config = MosaicDenseConfig(m, n, deep, k, split, group=group, programs=device.multiprocessors)
        yield with_room(config, itemsize, 4, device)


def dense_mosaic_gradient(rows: int, depth: int, width: int, itemsize: int, device: Device) -> MosaicDenseConfig:
    """Of the kernel that multiplies with the activation's derivatives, `[rows, width]`.

    In bfloat16, in the tiles of the forward kernel, the fastest of seven: 117 us of 16384x768x3072, the sum of the rows
    for a bias included (H200, 2026-11-26), where XLA's product and the kernel of `bias_activation`'s gradient take 184,
    and cuBLAS's product alone 99; of 4096x768x3072 34, for 54 (2026-11-23). Without that sum it would be 111 and 31,
    and a kernel of its own takes 27 and 7.

    The forward kernel that keeps the derivatives takes 126 us with tanh GELU, 106 without them, and 108 with something
    in their place that needs no arithmetic.

    All such products draw what the card may (700 W) after a fraction of a second, and take longer then, as their energy
    says: the forward kernel 116 mJ and 165 us, this one 105 mJ and 153 us, cuBLAS's product 90 mJ and 130 us.
    """
    # With a stage less, since pieces of the derivatives take shared memory.
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

    `forward` is the configuration of the first kernel where no gradient is taken. `derivative_itemsize` is the size of
    a derivative in bytes.
    """
    saving = with_room(forward, itemsize, 4 + 4 * derivative_itemsize // itemsize, device)
    gradient = dense_mosaic_gradient(rows, width, inner, itemsize, device)
    if derivative_itemsize == itemsize:  # they take more room than the table's entries were made for
        gradient = with_room(gradient, itemsize, 9, device)
    return saving, gradient


def dense_mosaic_gradient_candidates(
    rows: int, depth: int, width: int, itemsize: int, device: Device
) -> Iterable[MosaicDenseConfig]:
    tiles = [(128, 192, 3), (128, 192, 4), (192, 128, 4), (128, 128, 4), (128, 128, 5), (64, 192, 5), (64, 128, 5)]
    for (m, n, k), minor in itertools.product(tiles, ("m", "n")):
        yield MosaicDenseConfig(m, n, stages=k, split="none", group=16, minor=minor, programs=device.multiprocessors)


def _lookup_mosaic(
    op: str, default: MosaicDenseConfig, device: Device, variant: str, pieces: int, *, itemsize: int, **sizes: int
) -> MosaicDenseConfig:
    """Like `lookup`, with stages that fit: an entry may be one of a kernel that takes less shared memory, or a user's.

    With one stage, Mosaic's copies wait for the products and these for the copies.
    """

    def usable(config: MosaicDenseConfig) -> bool:
        return with_room(config, itemsize, pieces, device).stages > 1

    default = with_room(default, itemsize, pieces, device)
    config = lookup(op, default, device, variant, usable, **sizes, itemsize=itemsize)
    return with_room(config, itemsize, pieces, device)


def with_room(config: MosaicDenseConfig, itemsize: int, pieces: int, device: Device) -> MosaicDenseConfig:
    """The same with no more stages than fit into the shared memory beside `pieces` of the results and operands.

    The product has four of the results and, with a residual, four of that; with the derivatives four of each. Those of
    8 bits take half. Its gradient has four of both, and eighths.
    """
    others = pieces * 64 * 64 * itemsize + 2 * config.tile_n * 4 + 512  # two rows of a bias or sums, and barriers
    most = (device.shared_memory - others) // (sum(config.block) * config.tile_k * itemsize)
    return dataclasses.replace(config, stages=min(config.stages, most))


def _in_rounds(rows: int, width: int, itemsize: int, programs: int, largest: int = 6) -> MosaicDenseConfig:
    """Large tiles that take the fewest rounds, with up to `largest` stages."""
    tile_k = tile_k_of(itemsize)
    # How fast each is, where its last round is full (H200, 2026-11-22).
    speed = {(128, 192): 1.0, (192, 128): 0.965, (128, 128): 0.95, (64, 192): 0.9}
    configs = [
        MosaicDenseConfig(m, n, tile_k, 4 if m + n > 256 else largest, split="none", group=16, programs=programs)
        for m, n in speed
    ]

    def time(config: MosaicDenseConfig) -> float:
        return -(-_tiles(rows, width, *config.block) // programs) * config.tile_m * config.tile_n / speed[config.block]

    return min(configs, key=time)


def _tiles(rows: int, width: int, block_m: int = 64, block_n: int = 64) -> int:
    """How many it takes to cover `[rows, width]`."""
    return -(-rows // block_m) * -(-width // block_n)


def tile_k_of(itemsize: int) -> int:
    """How deep the blocks of the Mosaic kernels are: a line of 128 bytes."""
    return 128 // itemsize
