"""Layout changes (permute, split heads) and rotary positions: default configurations and the candidates of `autotune`.

For `permute`, `kept` is the size of the innermost axis if it stays innermost, else 1. `aligned` is the number of
elements that a thread can move at once, at most 16 bytes: lines of the input and of the output start at multiples of
it. `batch_heads` is the number of sequences times the number of heads.
"""

import itertools
from collections.abc import Iterable
from typing import Any

from jaxft.dispatch import Device
from jaxft.tuning.table import ElementwiseConfig, GradientConfig, PermuteConfig, lookup, next_power_of_2


def permute(size: int, kept: int, aligned: int, itemsize: int, device: Device) -> PermuteConfig:
    """Returns the launch configuration of the kernel that permutes axes."""
    # Lines of 64 elements of the input and of the output, 128 bytes in 16 bits. Small arrays need more programs.
    line = 32 if size < 2**20 or itemsize > 4 else 64
    elements = line * line
    if kept * itemsize >= 64:  # rows move unchanged
        line = min(next_power_of_2(kept), 1024)
        elements = max(line, elements)
    # A thread has 64 bytes in flight, or 16 elements if each element is a load of its own.
    per_thread = 16 if aligned * itemsize < 4 else max(8, 64 // itemsize)
    default = PermuteConfig(line, elements, num_warps=max(2, elements // (32 * per_thread)))
    return lookup("permute", default, device, size=size, kept=kept, aligned=aligned, itemsize=itemsize)


def permute_candidates(kept: int, aligned: int, itemsize: int, **_: Any) -> Iterable[PermuteConfig]:
    """Yields the configurations that `autotune` tries for the kernel that permutes axes."""
    if kept * itemsize >= 64:  # rows move unchanged
        line = min(next_power_of_2(kept), 1024)
        tiles = [(line, elements) for elements in (1024, 2048, 4096, 8192)]
    else:
        tiles = [(line, n * line * line) for line in (32, 64, 128)[aligned == 1 :] for n in (1, 2)]
    for (line, elements), num_warps in itertools.product(tiles, (1, 2, 4, 8, 16)):
        if (32 if aligned > 1 else 16) <= elements * itemsize // (32 * num_warps) <= 128:
            yield PermuteConfig(line, elements, num_warps)


def qkv_bias_split_heads(
    batch_heads: int, length: int, head_size: int, itemsize: int, device: Device
) -> ElementwiseConfig:
    """Returns the configuration of the kernel that splits packed QKV. A tile is for each of q, k and v."""
    block_width = min(next_power_of_2(head_size), 1024)
    elements = 1024 if batch_heads * length * head_size < 2**20 else 2048  # for each of q, k and v
    block_rows = min(max(1, elements // block_width), next_power_of_2(length))
    default = ElementwiseConfig(block_rows, block_width, num_warps=4)
    sizes = {"batch_heads": batch_heads, "length": length, "head_size": head_size, "itemsize": itemsize}
    return lookup("qkv_bias_split_heads", default, device, **sizes)


def qkv_bias_split_heads_candidates(head_size: int, itemsize: int, **_: Any) -> Iterable[ElementwiseConfig]:
    """Returns the configurations that `autotune` tries for the kernel that splits packed QKV."""
    return itertools.starmap(ElementwiseConfig, _head_tiles(head_size, itemsize))


def qkv_bias_split_heads_backward(
    batch: int, length: int, heads: int, head_size: int, itemsize: int, device: Device
) -> GradientConfig:
    """Returns the configuration of the kernel that joins heads and sums over tokens. `programs` are for each head."""
    programs = 4 * next_power_of_2(device.multiprocessors)
    block_width = min(next_power_of_2(head_size), 1024)
    block_rows = min(max(1, 2048 // block_width), next_power_of_2(length))
    default = GradientConfig(block_rows, block_width, max(1, programs // next_power_of_2(heads)), num_warps=4)
    sizes = {"batch": batch, "length": length, "heads": heads, "head_size": head_size, "itemsize": itemsize}
    return lookup("qkv_bias_split_heads_backward", default, device, **sizes)


def qkv_bias_split_heads_backward_candidates(
    batch: int, length: int, heads: int, head_size: int, itemsize: int, device: Device
) -> Iterable[GradientConfig]:
    """Yields the configurations that `autotune` tries for the kernel that joins heads."""
    most = next_power_of_2(device.multiprocessors) // 2
    for (block_rows, block_width, num_warps), programs in itertools.product(
        _head_tiles(head_size, itemsize), (most // 4, most // 2, most)
    ):
        if block_rows <= 64 and 4 <= num_warps and block_rows * programs <= batch * length:
            yield GradientConfig(block_rows, block_width, programs, num_warps)


def _head_tiles(head_size: int, itemsize: int) -> Iterable[tuple[int, int, int]]:
    """Yields (block_rows, block_width, num_warps) of tiles of a head, with 16 to 64 bytes per thread."""
    block_width = min(next_power_of_2(head_size), 1024)
    for block_rows, num_warps in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8)):
        if 16 <= block_rows * block_width * itemsize // (32 * num_warps) <= 64:
            yield block_rows, block_width, num_warps


def rotary(rows: int, heads: int, head_size: int, itemsize: int, device: Device) -> ElementwiseConfig:
    """Returns the configuration of the kernel that rotates pairs of elements of `heads` heads in each row.

    `block_width` counts pairs: half of a head, rounded up to a power of two, times the heads of a tile. Not tuned.
    """
    half = next_power_of_2(head_size // 2)
    divisor = heads & -heads  # the largest power of two that divides the heads: tiles without masked heads
    block_heads = min(divisor if divisor >= 4 else next_power_of_2(heads), max(1, 1024 // half), 8)
    elements = 2048 if itemsize == 2 and rows * heads * head_size >= 2**21 else 1024  # 2048 of float32 spill registers
    block_rows = min(max(1, elements // (block_heads * half)), next_power_of_2(rows))
    default = ElementwiseConfig(block_rows, block_heads * half, num_warps=4)
    return lookup("rotary", default, device, rows=rows, heads=heads, head_size=head_size, itemsize=itemsize)


def rotary_candidates(heads: int, head_size: int, **_: Any) -> Iterable[ElementwiseConfig]:
    """Yields the configurations that `autotune` tries for the kernel of rotary positions."""
    half = next_power_of_2(head_size // 2)
    for block_rows, block_heads, num_warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8)):
        pairs = block_rows * block_heads * half
        if block_heads < 2 * heads and 4 <= pairs // (32 * num_warps) <= 32:
            yield ElementwiseConfig(block_rows, block_heads * half, num_warps)
