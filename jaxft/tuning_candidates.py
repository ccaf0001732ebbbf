"""The launch configurations that are worth a try, for `jaxft.tuning.autotune` and `benchmarks/tune.py`.

For each op a function of the sizes in its key; what does not compile on a device is left out by those who try them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from jaxft.tuning import (
    AttentionConfig,
    ElementwiseConfig,
    GradientConfig,
    PermuteConfig,
    RowConfig,
    next_power_of_2,
)
from jaxft.tuning_dense import (
    DenseChoice,
    DenseConfig,
    MosaicDenseConfig,
    SplitConfig,
    is_short,
    tile_k_of,
    with_room,
)


def candidates(op: str, present: Any, **sizes: int) -> list[Any]:
    """The configs to compare with `present`, which is not among them."""
    found = list(_OPS[op](**sizes)) if op in _OPS else []
    if isinstance(present, MosaicDenseConfig):  # one a multiprocessor
        found = [dataclasses.replace(config, programs=present.programs) for config in found]
    return [config for config in dict.fromkeys(found or _around(present)) if config != present]


def _around(present: Any) -> Iterable[Any]:
    """Where there is no list for the op, or none for these sizes: half and twice of the rows, programs and warps."""
    fields = dataclasses.asdict(present)
    names = [name for name in ("block_rows", "programs", "num_warps") if name in fields]
    for factors in itertools.product((1, 2, 0.5), repeat=len(names)):
        changed = {name: max(1, int(fields[name] * factor)) for name, factor in zip(names, factors, strict=True)}
        if changed.get("num_warps", 1) <= 32:
            yield dataclasses.replace(present, **changed)


def layer_norm(rows: int, width: int, itemsize: int) -> Iterable[RowConfig]:
    block_width = min(next_power_of_2(width), 8192)
    for block_rows, num_warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if 128 <= block_rows * block_width // num_warps <= 2048:
            yield RowConfig(block_rows, block_width, num_warps)


def layer_norm_backward(rows: int, width: int, itemsize: int, dropout: int = 0) -> Iterable[GradientConfig]:
    block_width = next_power_of_2(width)
    warps: tuple[int, ...] = (1, 2, 4, 8)
    blocks = [(block_rows, block_width) for block_rows in (1, 2)]
    if block_width > 8192:  # a chunk of a row
        warps, blocks = (4, 8, 16), [(block_rows, 1024) for block_rows in (2, 4, 8)]
    elif block_width > 2048:
        warps = (4, 8, 16, 32)
    for (block_rows, block_width), num_warps, programs in itertools.product(blocks, warps, (132, 264, 528, 792, 1056)):
        if 8 <= block_rows * block_width // (32 * num_warps) <= 32 and programs * block_rows <= rows:
            yield GradientConfig(block_rows, block_width, programs, num_warps)


def softmax(rows: int, width: int, itemsize: int, arrays: int = 1) -> Iterable[RowConfig]:
    full = next_power_of_2(width)
    if full <= 1024:  # rows in a warp, or in two
        blocks = [(elements, full) for elements in (full, 256, 512, 1024, 2048) if elements >= full]
        warps: tuple[int, ...] = (1, 2, 4)
    else:  # a row, or a chunk of one
        longest = min(full, 32768)
        blocks = [(chunk, chunk) for chunk in {longest, *(min(longest, n) for n in (4096, 8192, 16384))}]
        warps = (2, 4, 8, 16, 32)
    for (elements, block_width), num_warps in itertools.product(blocks, warps):
        if 256 <= elements // num_warps <= (2048 // arrays if width <= 8192 else 2048):
            yield RowConfig(elements // block_width, block_width, num_warps)


def softmax_backward(rows: int, width: int, itemsize: int) -> Iterable[RowConfig]:
    return softmax(rows, width, itemsize, arrays=2)


def _divisors(width: int, *blocks: int) -> list[int]:
    """Blocks without a masked edge, where there are any."""
    return [block for block in blocks if width % block == 0] or [min(next_power_of_2(width), block) for block in blocks]


def bias_activation(rows: int, width: int, itemsize: int) -> Iterable[ElementwiseConfig]:
    for block_rows, block_width, num_warps in itertools.product(
        (1, 2, 4, 8), _divisors(width, 512, 1024, 2048), (4, 8)
    ):
        if 4 <= block_rows * block_width // (32 * num_warps) <= 32:
            yield ElementwiseConfig(block_rows, block_width, num_warps)


def bias_activation_backward(rows: int, width: int, itemsize: int) -> Iterable[GradientConfig]:
    for block_rows, block_width, programs, num_warps in itertools.product(
        (1, 2, 4), _divisors(width, 512, 1024), (16, 64, 128, 256, 512), (4, 8)
    ):
        if block_rows * block_width // (32 * num_warps) in (8, 16) and programs * block_rows <= rows:
            yield GradientConfig(block_rows, block_width, programs, num_warps)
    block_rows = next_power_of_2(rows)
    for block_width, num_warps in itertools.product(_divisors(width, 32, 64, 128), (4, 8)):  # no partial sums
        if 4 <= block_rows * block_width // (32 * num_warps) <= 32:
            yield GradientConfig(block_rows, block_width, 1, num_warps)


def permute(size: int, kept: int, aligned: int, itemsize: int) -> Iterable[PermuteConfig]:
    if kept * itemsize >= 64:  # rows as they are
        line = min(next_power_of_2(kept), 1024)
        tiles = [(line, elements) for elements in (1024, 2048, 4096, 8192)]
    else:
        tiles = [(line, n * line * line) for line in (32, 64, 128)[aligned == 1 :] for n in (1, 2)]
    for (line, elements), num_warps in itertools.product(tiles, (1, 2, 4, 8, 16)):
        if (32 if aligned > 1 else 16) <= elements * itemsize // (32 * num_warps) <= 128:
            yield PermuteConfig(line, elements, num_warps)


def _head_tiles(head_size: int, itemsize: int) -> Iterable[tuple[int, int, int]]:
    block_width = min(next_power_of_2(head_size), 1024)
    for block_rows, num_warps in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8)):
        if 16 <= block_rows * block_width * itemsize // (32 * num_warps) <= 64:
            yield block_rows, block_width, num_warps


def qkv_bias_split_heads(batch_heads: int, length: int, head_size: int, itemsize: int) -> Iterable[ElementwiseConfig]:
    return itertools.starmap(ElementwiseConfig, _head_tiles(head_size, itemsize))


def qkv_bias_split_heads_backward(
    batch: int, length: int, heads: int, head_size: int, itemsize: int
) -> Iterable[GradientConfig]:
    for (block_rows, block_width, num_warps), programs in itertools.product(
        _head_tiles(head_size, itemsize), (32, 64, 128)
    ):
        if block_rows <= 64 and 4 <= num_warps and block_rows * programs <= batch * length:
            yield GradientConfig(block_rows, block_width, programs, num_warps)


def attention(
    batch_heads: int, query: int, key: int, head_size: int, itemsize: int, average: int = 0
) -> Iterable[AttentionConfig]:
    blocks = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3),
              (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 4, 3), (32, 64, 4, 2), (16, 64, 4, 2),
              (16, 128, 4, 2), (32, 128, 4, 2), (64, 128, 8, 2), (128, 128, 4, 2)]  # fmt: skip
    shared = [(128, 128, 8, 2, 264), (128, 128, 8, 2, 528), (128, 128, 4, 2, 264), (128, 128, 4, 2, 528),
              (64, 128, 4, 3, 132), (64, 128, 4, 2, 264), (64, 128, 4, 2, 528), (128, 128, 8, 3, 132)]  # fmt: skip
    if itemsize == 4:
        blocks = [(64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (128, 32, 8, 2), (32, 32, 4, 2)]
    if average:  # sequences back to back: tiles of short ones
        blocks += [(16, 16, 1, 2), (32, 32, 1, 2), (32, 32, 2, 2), (64, 32, 4, 2)]
    least = 64 if not average and max(query, key) > 1024 else 16
    for block in (*blocks, *(shared if itemsize == 2 and key <= 128 and not average else ())):
        if least <= min(block[:2]) and _fits(block, query, key):
            yield AttentionConfig(*block)


def _fits(block: tuple[int, ...], query: int, key: int) -> bool:
    """Whether the sequences are as long as the blocks, to the next power of two, but for small blocks."""
    return all(size <= max(64, next_power_of_2(n)) for size, n in zip(block, (query, key), strict=False))


def attention_dq(
    batch_heads: int, query: int, key: int, head_size: int, itemsize: int, average: int = 0
) -> Iterable[AttentionConfig]:
    blocks = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
              (128, 64, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 8, 2),
              (32, 64, 4, 2)]  # fmt: skip
    if itemsize == 4:
        blocks = [(64, 32, 4, 1), (64, 32, 4, 2), (64, 64, 4, 1), (32, 32, 4, 2), (64, 64, 8, 1), (128, 32, 8, 2)]
    if average:
        blocks += [(32, 32, 1, 2), (32, 32, 2, 2), (64, 32, 4, 2)]
    return (AttentionConfig(*block) for block in blocks if _fits(block, query, key))


def attention_dkv(
    batch_heads: int, query: int, key: int, head_size: int, itemsize: int, average: int = 0
) -> Iterable[AttentionConfig]:
    blocks = [(64, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 4, 2), (64, 128, 4, 1),
              (64, 128, 4, 2), (128, 128, 8, 1), (128, 128, 8, 2), (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3),
              (128, 64, 4, 2), (128, 64, 8, 2), (32, 64, 4, 2), (32, 64, 4, 3), (16, 128, 4, 2), (32, 128, 4, 3),
              (32, 128, 4, 4)]  # fmt: skip
    shared = [(128, 128, 8, 1, 132), (128, 128, 8, 2, 132), (128, 128, 8, 3, 132), (64, 64, 4, 3, 264),
              (64, 64, 4, 2, 396)]  # fmt: skip
    if itemsize == 4:
        blocks = [(32, 64, 4, 1), (32, 64, 4, 2), (32, 32, 4, 2), (32, 128, 8, 1), (64, 64, 8, 1), (16, 64, 4, 2),
                  (64, 128, 8, 1), (32, 64, 8, 2)]  # fmt: skip
    if average:
        blocks += [(32, 32, 1, 2), (32, 32, 2, 2), (32, 128, 4, 1)]
    for block in (*blocks, *(shared if itemsize == 2 and max(query, key) <= 128 and not average else ())):
        if _fits(block, query, key):
            yield AttentionConfig(*block)


def dense_implementation(
    rows: int, depth: int, width: int, activation: int, itemsize: int, residual: int = 0
) -> Iterable[DenseChoice]:
    # Times of kernels leave out what a Mosaic one costs the host.
    mosaic = () if is_short(rows, depth, width, itemsize) else ("mosaic_gpu",)
    return map(DenseChoice, (*mosaic, "triton", "xla"))


def dense(rows: int, depth: int, width: int, itemsize: int) -> Iterable[DenseConfig]:
    deep = 256 // itemsize
    blocks = [(64, 64, deep, 4, 3), (32, 64, deep, 4, 3), (64, 32, deep, 4, 3), (16, 64, deep, 4, 3),
              (32, 32, deep, 4, 5), (64, 32, deep, 4, 5), (32, 32, 2 * deep, 4, 2), (128, 64, deep // 2, 4, 4),
              (64, 64, deep // 2, 4, 4), (128, 128, deep // 2, 8, 3), (16, 32, deep, 4, 5), (16, 32, deep // 2, 4, 8),
              (64, 64, deep, 4, 4), (64, 64, deep, 4, 5)]  # fmt: skip
    return itertools.starmap(DenseConfig, blocks)


def dense_split(rows: int, depth: int, width: int, itemsize: int) -> Iterable[SplitConfig]:
    block_m = max(16, min(64, next_power_of_2(rows)))
    blocks = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 5), (32, 128, 4, 5), (128, 64, 4, 4), (32, 128, 4, 4)]
    if block_m == 16:
        blocks.append((32, 128, 2, 4))
    for block, splits in itertools.product(blocks, (1, 2, 3, 4, 6)):
        yield SplitConfig(block_m, *block, splits=splits)


def dense_mosaic(rows: int, depth: int, width: int, activation: int, itemsize: int) -> Iterable[MosaicDenseConfig]:
    tiles = [(64, 128, 4, "m"), (64, 192, 4, "m"), (64, 256, 4, "m"), (128, 128, 4, "n"), (128, 192, 4, "none"),
             (192, 128, 4, "none"), (128, 128, 6, "none"), (64, 192, 6, "none"), (64, 128, 6, "none"),
             (64, 64, 8, "none"), (64, 64, 8, "m"), (64, 192, 4, "none")]  # fmt: skip
    groups = (8, 16) if rows > 1024 else (8,)
    deep = tile_k_of(itemsize)
    found = (MosaicDenseConfig(m, n, deep, k, split, group=g) for m, n, k, split in tiles for g in groups)
    return (with_room(config, itemsize, pieces=4) for config in found)


def dense_mosaic_gradient(rows: int, depth: int, width: int, itemsize: int) -> Iterable[MosaicDenseConfig]:
    tiles = [(128, 192, 3), (128, 192, 4), (192, 128, 4), (128, 128, 4), (128, 128, 5), (64, 192, 5), (64, 128, 5)]
    for (m, n, k), minor in itertools.product(tiles, ("m", "n")):
        yield MosaicDenseConfig(m, n, stages=k, split="none", group=16, minor=minor)


_OPS: dict[str, Callable[..., Iterable[Any]]] = {
    function.__name__: function
    for function in (
        layer_norm, layer_norm_backward, softmax, softmax_backward, bias_activation, bias_activation_backward,
        permute, qkv_bias_split_heads, qkv_bias_split_heads_backward, attention, attention_dq, attention_dkv,
        dense_implementation, dense, dense_split, dense_mosaic, dense_mosaic_gradient,
    )
}  # fmt: skip
