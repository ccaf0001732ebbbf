"""Row ops (LayerNorm, softmax, bias + activation, losses): default configurations and the candidates of `autotune`."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from jaxft.dispatch import Device
from jaxft.tuning.table import ChunkConfig, ElementwiseConfig, GradientConfig, RowConfig, lookup, next_power_of_2


def layer_norm(rows: int, width: int, itemsize: int, device: Device, variant: str = "") -> RowConfig:
    """Returns the launch configuration of the LayerNorm kernel.

    `variant` says what the kernel reads: rows of an array (""), rows of embedding tables ("embeddings"), or partial
    sums of a split-K matmul ("sums"). `itemsize` is the size of an element of the input, the result or a partial sum,
    respectively.
    """
    # One warp per 1,024 elements: each thread has several 16-byte loads in flight, and reductions stay in the warp.
    block_width = min(next_power_of_2(width), 8192)
    block_rows = max(1, 1024 // block_width)
    default = RowConfig(block_rows, block_width, num_warps=max(1, block_width // 1024))
    if itemsize > 2 and rows * width < 2**20 and 512 < width <= 1024:  # small arrays need more warps
        default = RowConfig(2, 1024, num_warps=8)
    if variant == "sums" and block_width >= 512:
        # Few rows, each with several partial sums: one row per program.
        # H200, float32, 3 partial sums of 32x768: 1.8 us (two rows per program 2.5), 2026-11-24
        default = RowConfig(1, block_width, num_warps=8)
    return lookup("layer_norm", default, device, variant, rows=rows, width=width, itemsize=itemsize)


def layer_norm_candidates(width: int, **_: Any) -> Iterable[RowConfig]:
    """Yields the configurations that `autotune` tries for the LayerNorm kernel."""
    block_width = min(next_power_of_2(width), 8192)
    for block_rows, num_warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if 128 <= block_rows * block_width // num_warps <= 2048:
            yield RowConfig(block_rows, block_width, num_warps)


def layer_norm_backward(
    rows: int, width: int, itemsize: int, device: Device, variant: str = "", wide_dropout: bool = False
) -> GradientConfig:
    """Returns the launch configuration of the kernel for the LayerNorm gradient.

    The programs share the rows, and each writes partial sums for the gradients of bias, gamma and beta. A row that is
    longer than a block is read in chunks, and there is one program for each block of rows, whatever `programs` is.
    `wide_dropout` is dropout with 16-bit rows and a 32-bit bias or gamma. The kernel then takes the most registers, and
    has keys of its own, for which the shipped tables have no entries.
    """
    block_width = next_power_of_2(width)
    if block_width <= 8192:  # the row and the sums for three vectors fit in registers
        programs = (4 if rows * width < 2**23 else 6) * device.multiprocessors
        num_warps = 2 if block_width <= 512 else max(4, block_width // 512)
        default = GradientConfig(max(1, 1024 // block_width), block_width, programs, num_warps)
        if block_width > 1024:
            default = dataclasses.replace(default, programs=max(device.multiprocessors, programs * 512 // block_width))
        elif block_width > 512 and itemsize > 2 and rows * width >= 2**19:
            default = GradientConfig(2, block_width, 2 * device.multiprocessors, 8)
        elif block_width > 512 and rows * width >= 2**19:
            if wide_dropout:  # 396 programs of the configuration below would not all run at once
                # H200, bf16, 16384x768: 54 us (396 programs with two rows at a time 85), 2026-11-23
                default = GradientConfig(1, block_width, 4 * device.multiprocessors, 4)
            elif rows * width < 2**26:  # fewer programs write fewer partial sums
                programs = (2 if rows * width < 2**20 else 3) * device.multiprocessors
                default = GradientConfig(2, block_width, programs, 4)
    else:  # each block writes partial sums, so that larger blocks write fewer
        default = GradientConfig(8, 1024, 2 * device.multiprocessors, 8)
    sizes = {"rows": rows, "width": width, "itemsize": itemsize}
    if wide_dropout:
        sizes["dropout"] = 1
    return lookup("layer_norm_backward", default, device, variant, **sizes)


def layer_norm_backward_candidates(rows: int, width: int, device: Device, **_: Any) -> Iterable[GradientConfig]:
    """Yields the configurations that `autotune` tries for the LayerNorm gradient."""
    block_width = next_power_of_2(width)
    warps: tuple[int, ...] = (1, 2, 4, 8)
    blocks = [(block_rows, block_width) for block_rows in (1, 2)]
    if block_width > 8192:  # a block is a chunk of a row
        warps, blocks = (4, 8, 16), [(block_rows, 1024) for block_rows in (2, 4, 8)]
    elif block_width > 2048:
        warps = (4, 8, 16, 32)
    for (block_rows, block_width), num_warps, each in itertools.product(blocks, warps, (1, 2, 4, 6, 8)):
        programs = each * device.multiprocessors
        if 8 <= block_rows * block_width // (32 * num_warps) <= 32 and programs * block_rows <= rows:
            yield GradientConfig(block_rows, block_width, programs, num_warps)


def embeddings_sums(table_rows: int, width: int) -> RowConfig:
    """Returns the launch configuration of the kernels that sum rows by id, for the gradient of an embedding table.

    Not tuned. A program sums `block_width` columns, `block_rows` rows at a time. In a table with few ids, each id
    occurs often: more programs, each with fewer columns, share the long sums. In a table with many ids, most ids do not
    occur: wide programs write their rows of zeros faster.
    """
    block_width = min(next_power_of_2(width), 128 if table_rows <= 1024 else 1024)
    return RowConfig(min(4096 // block_width, 32), block_width, num_warps=4)


def softmax(rows: int, width: int, itemsize: int, device: Device) -> RowConfig:
    """Returns the launch configuration of the softmax and log_softmax kernel."""
    # As in layer_norm, but rows of up to 64 KiB stay in registers.
    warp = 1024 if itemsize <= 2 or width <= 1024 else 256
    default = _softmax(rows, width, warp, longest=16384, most_warps=8 * itemsize // 2)
    if width > 16384 and itemsize <= 2:
        default = RowConfig(1, 32768, 16) if width <= 32768 else RowConfig(1, 8192, 16)
    return lookup("softmax", default, device, rows=rows, width=width, itemsize=itemsize)


def softmax_backward(rows: int, width: int, itemsize: int, device: Device) -> RowConfig:
    """Returns the launch configuration of the kernel for the gradient of softmax and log_softmax."""
    # The kernel reads two arrays, so only shorter rows stay in registers. In 16 bits a warp has fewer bytes than in
    # float32, and the limit is 16 KiB of each array instead of 64 KiB.
    default = _softmax(rows, width, 512, 8192 if itemsize <= 2 else 16384, most_warps=8 * itemsize // 2)
    if itemsize <= 2 and 4096 < width <= 16384:
        default = RowConfig(1, 8192, 4) if width <= 8192 else RowConfig(1, 4096, 8)
    elif itemsize <= 2 and width > 16384 and next_power_of_2(rows) <= 2 * device.multiprocessors:
        # All programs run at once, two per SM.
        default = RowConfig(1, 8192, 8)
    return lookup("softmax_backward", default, device, rows=rows, width=width, itemsize=itemsize)


def _softmax(rows: int, width: int, warp: int, longest: int, most_warps: int) -> RowConfig:
    """Returns a configuration with one warp per `warp` elements, at most `most_warps`.

    A row of up to `longest` elements stays in registers. A longer row is processed in chunks of `longest` elements,
    with 512 elements per warp. Small arrays need more warps (H200, 2026-11-21).
    """
    block_width = next_power_of_2(width)
    if width > longest:
        return RowConfig(1, longest, longest // 512)
    if rows * width < 2**20:
        if block_width <= 1024:
            return RowConfig((2 * warp if block_width <= 64 else 1024) // block_width, block_width, 4)
        warp = 256
    return RowConfig(max(1, warp // block_width), block_width, min(max(1, block_width // warp), most_warps))


def softmax_candidates(width: int, arrays: int = 1, **_: Any) -> Iterable[RowConfig]:
    """Yields the candidates of `autotune` for softmax. With two input `arrays`, a warp gets fewer elements."""
    full = next_power_of_2(width)
    if full <= 1024:  # several rows or one row per program
        blocks = [(elements, full) for elements in (full, 256, 512, 1024, 2048) if elements >= full]
        warps: tuple[int, ...] = (1, 2, 4)
    else:  # one row or a chunk of it per program
        longest = min(full, 32768)
        blocks = [(chunk, chunk) for chunk in {longest, *(min(longest, n) for n in (4096, 8192, 16384))}]
        warps = (2, 4, 8, 16, 32)
    for (elements, block_width), num_warps in itertools.product(blocks, warps):
        if 256 <= elements // num_warps <= (2048 // arrays if width <= 8192 else 2048):
            yield RowConfig(elements // block_width, block_width, num_warps)


def softmax_backward_candidates(width: int, **_: Any) -> Iterable[RowConfig]:
    """Returns the configurations that `autotune` tries for the kernel of the softmax gradient."""
    return softmax_candidates(width, arrays=2)


def bias_activation(rows: int, width: int, itemsize: int, device: Device) -> ElementwiseConfig:
    """Returns the launch configuration of the kernel for activation(x + bias)."""
    block_width = _block_width(width)
    # Large arrays need more bytes in flight per program, small arrays need more programs.
    elements = 1024 if rows * width < 2**21 else 2048 if rows * width < 2**23 else 4096
    default = ElementwiseConfig(max(1, elements // block_width), block_width, num_warps=4)
    return lookup("bias_activation", default, device, rows=rows, width=width, itemsize=itemsize)


def bias_activation_candidates(width: int, **_: Any) -> Iterable[ElementwiseConfig]:
    """Yields the configurations that `autotune` tries for the kernel for activation(x + bias)."""
    for block_rows, block_width, num_warps in itertools.product(
        (1, 2, 4, 8), _divisors(width, 512, 1024, 2048), (4, 8)
    ):
        if 4 <= block_rows * block_width // (32 * num_warps) <= 32:
            yield ElementwiseConfig(block_rows, block_width, num_warps)


def bias_activation_backward(rows: int, width: int, itemsize: int, device: Device) -> GradientConfig:
    """Returns the launch configuration of the kernel for the gradient of activation(x + bias).

    For each block of columns, `programs` programs share the rows, and each writes partial sums for the gradient of the
    bias. A single program writes that gradient itself.
    """
    default = _elementwise_gradient(rows, width, min(_block_width(width), 512), 1024, itemsize, device)
    return lookup("bias_activation_backward", default, device, rows=rows, width=width, itemsize=itemsize)


def bias_activation_backward_candidates(rows: int, width: int, device: Device, **_: Any) -> Iterable[GradientConfig]:
    """Yields the configurations that `autotune` tries for the gradient of activation(x + bias)."""
    most = 2 * next_power_of_2(device.multiprocessors)
    for block_rows, block_width, programs, num_warps in itertools.product(
        (1, 2, 4), _divisors(width, 512, 1024), (most // 32, most // 8, most // 4, most // 2, most), (4, 8)
    ):
        if block_rows * block_width // (32 * num_warps) in (8, 16) and programs * block_rows <= rows:
            yield GradientConfig(block_rows, block_width, programs, num_warps)
    block_rows = next_power_of_2(rows)
    for block_width, num_warps in itertools.product(_divisors(width, 32, 64, 128), (4, 8)):  # no partial sums
        if 4 <= block_rows * block_width // (32 * num_warps) <= 32:
            yield GradientConfig(block_rows, block_width, 1, num_warps)


def _elementwise_gradient(
    rows: int, width: int, block_width: int, elements: int, itemsize: int, device: Device
) -> GradientConfig:
    """Returns the configuration of a kernel that also sums over rows, with tiles of about this many `elements`."""
    if rows <= 128:  # One program has all rows of a few columns, so that there are no partial sums.
        # H100, bf16, dense 32x768x3072 with GELU and gradients: 14.1 us (with partial sums 15.5), 2026-11-25
        # See docs/performance-notes.md, "Gradient of bias and activation with few rows".
        block_rows = next_power_of_2(rows)
        block_width = min(block_width, max(32, elements // block_rows))
        return GradientConfig(block_rows, block_width, programs=1, num_warps=4 if rows <= 16 else 8)
    programs = next_power_of_2(device.multiprocessors)
    if rows * width >= (2**22 if itemsize <= 2 else 2**23):
        programs *= 2
    return GradientConfig(elements // block_width, block_width, programs, num_warps=4)


def gated_activation(rows: int, width: int, itemsize: int, device: Device) -> ElementwiseConfig:
    """Returns the launch configuration of the kernel for a gated activation, with results of `width`. Not tuned."""
    block_width = _gated_block_width(width)
    elements = 512 if rows * width < 2**21 else 1024  # of each half
    default = ElementwiseConfig(max(1, elements // block_width), block_width, num_warps=4)
    return lookup("gated_activation", default, device, rows=rows, width=width, itemsize=itemsize)


def gated_activation_candidates(width: int, **_: Any) -> Iterable[ElementwiseConfig]:
    """Yields the configurations that `autotune` tries for the kernel for a gated activation."""
    for block_rows, block_width, num_warps in itertools.product(
        (1, 2, 4, 8, 16, 32), _divisors(width, 64, 128, 256, 512, 1024), (2, 4, 8)
    ):
        if 4 <= block_rows * block_width // (32 * num_warps) <= 16:
            yield ElementwiseConfig(block_rows, block_width, num_warps)


def gated_activation_backward(rows: int, width: int, itemsize: int, device: Device) -> GradientConfig:
    """Returns the launch configuration of the kernel for the gradient of a gated activation. Not tuned.

    `programs` share the rows of a block of columns, as in `bias_activation_backward`.
    """
    default = _elementwise_gradient(rows, width, min(_gated_block_width(width), 256), 512, itemsize, device)
    return lookup("gated_activation_backward", default, device, rows=rows, width=width, itemsize=itemsize)


def gated_activation_backward_candidates(rows: int, width: int, device: Device, **_: Any) -> Iterable[GradientConfig]:
    """Yields the configurations that `autotune` tries for the gradient of a gated activation."""
    most = 2 * next_power_of_2(device.multiprocessors)
    for block_rows, block_width, programs, num_warps in itertools.product(
        (1, 2, 4, 8), _divisors(width, 64, 128, 256, 512), (most // 8, most // 4, most // 2, most), (4, 8)
    ):
        if block_rows * block_width // (32 * num_warps) in (2, 4, 8) and programs * block_rows <= rows:
            yield GradientConfig(block_rows, block_width, programs, num_warps)


def _gated_block_width(width: int) -> int:
    """Returns the columns of a block: a divisor of the width, at least 64, or else the rounded width."""
    # Widths of gated layers have small powers of two, 1152 = 9 * 128 and 2624 = 41 * 64, and 64 columns are a line.
    divisor = width & -width
    return min(divisor if divisor >= 64 else next_power_of_2(width), 512)


def _block_width(width: int) -> int:
    """Returns the columns of a block: a divisor of the width, which avoids masked edges, or the rounded width."""
    divisor = width & -width  # the largest power of two that divides the width
    return min(divisor if divisor >= 256 else next_power_of_2(width), 1024)


def _divisors(width: int, *blocks: int) -> list[int]:
    """Returns the `blocks` that divide the width and so have no masked edge, else all, capped at the rounded width."""
    return [block for block in blocks if width % block == 0] or [min(next_power_of_2(width), block) for block in blocks]


def linear_cross_entropy(rows: int, classes: int, width: int) -> ChunkConfig:
    """Returns the chunk size of `linear_cross_entropy`: how many rows have logits at a time. Not tuned per device.

    The logits take 128 MiB, or as much as the embedding's gradient if that is more, because every chunk reads and
    writes that gradient once. A chunk has at most a quarter of the rows. Masked language modelling has labels in about
    15 % of the rows, which fill a chunk of this size well. If a size is symbolic, a chunk has 512 rows.
    """
    if not all(isinstance(size, int) for size in (rows, classes, width)):
        return ChunkConfig(512)

    def whole_tiles(n: int) -> int:
        return max(128, n // 128 * 128)

    return ChunkConfig(min(rows, whole_tiles(max(2**25 // classes, width)), whole_tiles(-(-rows // 4) + 127)))
