"""Attention: default configurations of the kernels, the candidates of `autotune`, and the choice of other backends.

`batch_heads` is the number of sequences times the number of heads. For packed sequences, a length is the length of the
longest sequence, and `average` is the average length. Packed sequences have their own keys in the tables, and the
shipped tables have no entries for them. `more` says that there is a bias, a mask or dropout, or that float32 matmuls
are not TF32: the kernel then takes more shared memory.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxft.dispatch import Device
from jaxft.tuning.table import LARGE, LARGEST, AttentionConfig, MosaicGradientConfig, lookup, next_power_of_2

# Amounts of shared memory in this file are for kernels with bias, mask and dropout, compiled by Triton 3.9 for compute
# capability 8.6, 2026-11-21.


class Call(NamedTuple):
    """Sizes, device and kind of a call of attention. The docstring of this module describes them."""

    batch_heads: int
    query_length: int
    key_length: int
    head_size: int
    itemsize: int
    device: Device
    more: bool = False
    average: int | None = None
    window: int | None = None  # the most keys that a query attends to, where a window says so
    relative: bool = False  # whether there is a table of relative biases

    @property
    def is_narrow(self) -> bool:
        """True if a query attends to the keys of a few blocks only."""
        return self.window is not None and self.window <= 256

    @property
    def is_short(self) -> bool:
        """True if packed sequences are short on average. Small blocks are then faster, because they waste less work."""
        # H200, bf16, gradient of 16,384 tokens, average length 30: 243 us in 32x32 blocks (128x128 747), 2026-11-23
        # See docs/performance-notes.md, "Attention blocks for short packed sequences".
        return self.itemsize == 2 and self.average is not None and self.average <= 32


def attention(call: Call) -> AttentionConfig:
    """Returns the launch configuration of the forward kernel."""
    rows = call.batch_heads * min(call.query_length, call.average or call.query_length)
    choices = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1))
    if rows < 64 * 64:  # < 64 tiles of 64: too few for a GPU
        choices = ((16, 128, 4, 2), *choices[1:])
    elif call.is_short:
        choices = ((64, 32, 4, 2), *choices[1:])
    elif call.is_narrow:
        # H100, bf16, 32x512, 12 heads of 64, window 64 + 64: 52.5 us (three stages 56.1), 2026-11-27
        # H100, bf16, 32x128, 12 heads of 64, window 64 + 64: 12.6 us in 128x128 blocks (64x64 13.1), 2026-11-27
        one_block = 64 < call.key_length <= 128 and call.itemsize == 2 and call.average is None
        one_block = one_block and call.device.shared_memory >= LARGE
        choices = ((128, 128, 8, 2) if one_block else (64, 64, 4, 2), *choices[1:])
    elif call.relative:
        # H200, bf16, 32x512, 12 heads of 64, float32 table: 124 us (three stages 138), 2026-11-28
        choices = ((64, 64, 4, 2), *choices[1:])
    return _attention("attention", choices, call)


def attention_dq(call: Call) -> AttentionConfig:
    """Returns the launch configuration of the kernel for the gradient of the queries."""
    choices = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 1), (32, 16, 4, 1))
    if call.is_short:
        choices = ((32, 32, 1, 2), *choices[1:])
    elif call.relative:
        # H200, bf16, 32x128, 12 heads of 64, float32 table: 25.9 us (three stages 29.6), 2026-11-28
        choices = ((64, 64, 4, 2), *choices[1:])
    if call.device.shared_memory < LARGE:  # with a mask and few keys, the blocks above take up to 160 KiB
        medium = (64, 32, 4, 2) if call.key_length <= 128 else choices[1]
        choices = (choices[0], medium, choices[3] if call.itemsize == 2 else choices[2], (16, 16, 4, 1))
    return _attention("attention_dq", choices, call)


def attention_dkv(call: Call, bias_of_pairs: bool = False) -> AttentionConfig:
    """Returns the launch configuration of the kernel for the gradients of keys and values.

    If a block holds all keys, this kernel alone computes all three gradients. There are two exceptions: many more
    queries than keys, and a bias `[..., T, S]` (`bias_of_pairs`), for which it is not tuned. See
    `attention_backward.backward`.
    """
    choices = ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 8, 1), (16, 32, 4, 1))
    alone = 64 < call.key_length <= 128 and call.query_length <= 4 * 128 and not bias_of_pairs
    if call.is_short and call.key_length > 64:
        choices = ((32, 32, 2, 2), *choices[1:])
    elif call.relative:
        # H200, bf16, 32x512, 12 heads of 64, float32 table: 224 us (three stages 271), 2026-11-28
        # H200, bf16, 32x128, 12 heads of 64, whole gradient: 71 us (one kernel in 128x128 blocks 79), 2026-11-28
        choices = ((64, 64, 4, 1), *choices[1:])
    elif alone and call.itemsize == 2 and call.device.shared_memory >= LARGEST:
        if call.average is None:
            choices = ((128, 128, 8, 1), (128, 128, 8, 1), *choices[2:])
        else:
            choices = ((32, 128, 4, 1), *choices[1:])
    if call.device.shared_memory < LARGE:
        # The choices above for large heads take 112 KiB, as does (64, 64) if this kernel computes all three gradients.
        medium = (32, 64, 4, 2) if call.key_length <= 64 else choices[1]
        choices = (choices[0], medium, (32, 32, 4, 1), (16, 16, 4, 1))
    return _attention("attention_dkv", choices, call, tuned=not bias_of_pairs)


def _attention(
    op: str, choices: tuple[tuple[int, int, int, int], ...], call: Call, tuned: bool = True
) -> AttentionConfig:
    """Returns the configuration for the width of a head, in blocks that are no longer than the sequences.

    `choices` are for heads of up to 128, 256, 512 and more bytes. If not `tuned`, the tables are not looked up.
    """
    batch_heads, query_length, key_length, head_size, itemsize, device, more, average, window, relative = call
    nbytes = next_power_of_2(head_size) * itemsize
    if itemsize > 2 and device.shared_memory < LARGE:
        nbytes *= 2  # for full float32 matmuls: with a mask and a head size of 64, blocks of 64 take 117 KiB
    given_q, given_k, num_warps, num_stages = choices[sum(nbytes > most for most in (128, 256, 512))]
    block_q, block_k = (  # the part of a block beyond the sequence is wasted work
        max(16, min(block, next_power_of_2(length)))
        for block, length in ((given_q, query_length), (given_k, key_length))
    )
    sizes = {"batch_heads": batch_heads, "query": query_length, "key": key_length, "head_size": head_size}
    if average is not None:
        sizes["average"] = average
    if op == "attention" and window is not None and call.is_narrow:
        sizes["window"] = window  # shipped entries are for calls without a window
    if relative:
        sizes["relative"] = 1  # nor are they for calls with a table
    # H200, 512 sequences of 32 tokens: 33 us (four warps 35), 2026-11-23
    # See docs/performance-notes.md, "Attention blocks for short packed sequences".
    if (block_q, block_k) == (32, 32) != (given_q, given_k) and nbytes <= 128:
        num_warps = min(num_warps, 2)
    default = AttentionConfig(block_q, block_k, num_warps, num_stages)
    if not tuned:
        return default
    return lookup(op, default, device, "more" if more else "", **sizes, itemsize=itemsize)


def attention_candidates(
    query: int, key: int, itemsize: int, device: Device, average: int = 0, **_: Any
) -> Iterable[AttentionConfig]:
    """Yields the configurations that `autotune` tries for the forward kernel."""
    blocks = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3),
              (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 32, 4, 3), (32, 64, 4, 2), (16, 64, 4, 2),
              (16, 128, 4, 2), (32, 128, 4, 2), (64, 128, 8, 2), (128, 128, 4, 2)]  # fmt: skip
    shared = [(128, 128, 8, 2, 2), (128, 128, 8, 2, 4), (128, 128, 4, 2, 2), (128, 128, 4, 2, 4), (64, 128, 4, 3, 1),
              (64, 128, 4, 2, 2), (64, 128, 4, 2, 4), (128, 128, 8, 3, 1)]  # fmt: skip
    if itemsize == 4:
        blocks = [(64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (128, 32, 8, 2), (32, 32, 4, 2)]
    if average:  # packed sequences may be short
        blocks += [(16, 16, 1, 2), (32, 32, 1, 2), (32, 32, 2, 2), (64, 32, 4, 2)]
    least = 64 if not average and max(query, key) > 1024 else 16
    for block in (*blocks, *(shared if itemsize == 2 and key <= 128 and not average else ())):
        if least <= min(block[:2]) and _fits(block, query, key):
            yield AttentionConfig(*block[:4], *(each * device.multiprocessors for each in block[4:]))


def attention_dq_candidates(
    query: int, key: int, itemsize: int, average: int = 0, **_: Any
) -> Iterable[AttentionConfig]:
    """Returns the configurations that `autotune` tries for the kernel of the queries' gradient."""
    blocks = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
              (128, 64, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 8, 2),
              (32, 64, 4, 2)]  # fmt: skip
    if itemsize == 4:
        blocks = [(64, 32, 4, 1), (64, 32, 4, 2), (64, 64, 4, 1), (32, 32, 4, 2), (64, 64, 8, 1), (128, 32, 8, 2)]
    if average:
        blocks += [(32, 32, 1, 2), (32, 32, 2, 2), (64, 32, 4, 2)]
    return (AttentionConfig(*block) for block in blocks if _fits(block, query, key))


def attention_dkv_candidates(
    query: int, key: int, itemsize: int, device: Device, average: int = 0, **_: Any
) -> Iterable[AttentionConfig]:
    """Yields the configurations that `autotune` tries for the kernel of the keys' and values' gradients."""
    blocks = [(64, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 4, 2), (64, 128, 4, 1),
              (64, 128, 4, 2), (128, 128, 8, 1), (128, 128, 8, 2), (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3),
              (128, 64, 4, 2), (128, 64, 8, 2), (32, 64, 4, 2), (32, 64, 4, 3), (16, 128, 4, 2), (32, 128, 4, 3),
              (32, 128, 4, 4)]  # fmt: skip
    shared = [(128, 128, 8, 1, 1), (128, 128, 8, 2, 1), (128, 128, 8, 3, 1), (64, 64, 4, 3, 2), (64, 64, 4, 2, 3)]
    if itemsize == 4:
        blocks = [(32, 64, 4, 1), (32, 64, 4, 2), (32, 32, 4, 2), (32, 128, 8, 1), (64, 64, 8, 1), (16, 64, 4, 2),
                  (64, 128, 8, 1), (32, 64, 8, 2)]  # fmt: skip
    if average:
        blocks += [(32, 32, 1, 2), (32, 32, 2, 2), (32, 128, 4, 1)]
    for block in (*blocks, *(shared if itemsize == 2 and max(query, key) <= 128 and not average else ())):
        if _fits(block, query, key):
            yield AttentionConfig(*block[:4], *(each * device.multiprocessors for each in block[4:]))


def _fits(block: tuple[int, ...], query: int, key: int) -> bool:
    """Returns whether each block is at most as long as its sequence, rounded up to a power of two, or at most 64."""
    return all(size <= max(64, next_power_of_2(n)) for size, n in zip(block, (query, key), strict=False))


# --- Other backends ----------------------------------------------------------------------------------------------


# By head size: the least key length and the least number of logits for which cuDNN is faster than Triton. cuDNN is
# slower for lengths that are no multiples of 64. It needs copies of packed arrays, and for sequence lengths.
# H200, bf16, head size 64: Triton takes 1.05 to 1.2 times cuDNN's time; 128: 1.3 to 1.8; 32: 0.8 to 0.9, 2026-11-21
# See docs/performance-notes.md, "Attention: Triton and cuDNN".
_CUDNN_FROM = {64: (1024, 2**29), 128: (512, 2**26)}
_CUDNN_FROM_PACKED = 8192  # the least length of packed arrays [B, T, 3, N, H]; both limits apply


def cudnn_is_faster(
    batch: int, query_length: int, key_length: int, heads: int, head_size: int, packed: bool, device: Device
) -> bool:
    """Returns whether cuDNN is faster for attention without masks. `packed`: q, k and v are one [B, T, 3, N, H]."""
    if head_size not in _CUDNN_FROM or not device.is_hopper:
        return False
    least_length, least_logits = _CUDNN_FROM[head_size]
    if packed:
        least_length = max(least_length, _CUDNN_FROM_PACKED)
    aligned = query_length % 64 == key_length % 64 == 0
    return aligned and key_length >= least_length and batch * heads * query_length * key_length >= least_logits


_BUSY = 0.72  # the least share of busy SMs, averaged over the rounds


def mosaic_gradient_is_faster(batch_heads: int, device: Device) -> bool:
    """Returns whether the Mosaic GPU kernel is faster than the Triton kernels for the gradient.

    An SM computes one head of a sequence at a time. A round takes the same time with few busy SMs as with all of them.
    """
    # H100, bf16, 512 tokens, 192 heads (0.73 busy): 148 us (Triton 155), 2026-11-25
    # See docs/performance-notes.md, "Gradient of attention: Triton and Mosaic GPU".
    rounds = -(-batch_heads // device.multiprocessors)
    return batch_heads >= _BUSY * rounds * device.multiprocessors


def attention_mosaic_gradient(device: Device) -> MosaicGradientConfig:
    """Returns the configuration of the Mosaic GPU gradient kernel. An SM has room for one program."""
    return MosaicGradientConfig(programs=device.multiprocessors)
