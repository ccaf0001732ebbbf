"""Launch configurations of kernels: what `autotune` found here, a tuned table for known devices, else a heuristic.

`jaxft/tuned/<device_kind>.json` (its spaces as underscores) maps op -> key -> fields of the config, and is written by
`benchmarks/tune.py`. Keys are sizes rounded up to powers of two: every shape near a tuned one finds its entry. Only the
depth and the width of a matrix product are exact. Those of `autotune` are in the user's cache directory
(`tuning_store.py`) and come first. Those of `dense` are in `tuning_dense.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, ClassVar, Protocol, TypeVar

import jax

from jaxft import tuning_store


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=_Dataclass)


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """A kernel that reduces rows: `block_rows` rows a program, `block_width` (a power of two) columns at a time."""

    block_rows: int
    block_width: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """A kernel that also sums over rows, for the gradients of vectors.

    Each of `programs` programs takes its share of the rows, `block_rows` x `block_width` elements (powers of two) at a
    time, and writes its partial sums; a small reduction adds those up, but where one program of
    `bias_activation_backward` has all rows.
    """

    block_rows: int
    block_width: int
    programs: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class ElementwiseConfig:
    """A kernel without reductions: `block_rows` x `block_width` elements a program, both powers of two."""

    block_rows: int
    block_width: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class PermuteConfig:
    """A change of layout in tiles of `elements` elements, if the shape has as many.

    `block_inner` of them lie in a line of the input, and as many in a line of the output; what is left of `elements`
    goes to further axes. Both are powers of two, and `elements` is at least the square of `block_inner`, or
    `block_inner` where the innermost axis stays and is as long.
    """

    block_inner: int
    elements: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Flash attention: tiles of `block_q` queries against `block_k` keys, both powers of two and at least 16.

    Where a block holds all keys and there is no mask, `programs` share the tiles, so that each reads its next one while
    it computes; 0 for a program a tile. In the backward pass they do only where it holds all queries too, heads are
    not grouped, and there is neither bias nor dropout nor a gradient of the log-sum-exp.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 0


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def key(variant: str = "", /, **sizes: int) -> str:
    """The table's key: `rows=4096,width=1024,itemsize=2` for rows=4000, width=1000, itemsize=2, and then `variant`.

    `rows=4096,depth=768,width=2304` for rows=4000, depth=768, width=2304: of a matrix product depth and width are a
    model's, few and fixed, and what is the fastest for 2,304 columns need not be for 3,072 or 4,096.
    """
    exact = ("depth", "width") if "depth" in sizes else ()
    parts = [f"{name}={size if name in exact else next_power_of_2(size)}" for name, size in sizes.items()]
    return ",".join([*parts, variant] if variant else parts)


@functools.lru_cache
def _table(device_kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    file = resources.files("jaxft") / "tuned" / f"{device_kind.replace(' ', '_')}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


class Trial:
    """What `autotune` traces with: some configs, in place of those that `lookup` finds, and all that it was asked for.

    Each is its own value of `trial`, and so part of the keys of JAX's caches: whatever is traced is traced anew.
    """

    def __init__(self, configs: Mapping[tuple[str, str], Any]):
        self.configs = configs
        self.asked: dict[tuple[str, str], tuple[Any, dict[str, int]]] = {}  # (op, key) -> config, sizes


trial = jax.make_user_context(None)


def lookup(
    op: str, default: Config, device_kind: str, variant: str = "", usable: Callable[[Config], bool] = lambda _: True, /,
    **sizes: int,
) -> Config:  # fmt: skip
    """The tuned config of `op` at these sizes on this device, the user's before jaxft's, else `default`.

    `variant`: what else the user's must have been tuned for, since the kernel reads other things, or takes more shared
    memory or registers; of jaxft's, those that were go first. Entries that are not `usable` do not count.
    """
    table, name = _table(device_kind).get(op, {}), key(variant, **sizes)
    shipped = dataclasses.replace(default, **table.get(name, table.get(key(**sizes), {})))
    running = trial.value
    tried = None if running is None else running.configs.get((op, name))
    found = tried, tuning_store.restore(device_kind, op, name, default), shipped, default
    config = next(config for config in found if config is not None and usable(config))
    if running is not None:
        running.asked.setdefault((op, name), (config, sizes))
    return config


def sources(device_kind: str) -> list[str]:
    """Where `lookup` looks on this device, in order, for people."""
    own = [str(tuning_store.path(device_kind))] if tuning_store.load(device_kind) else []
    return [*own, *["jaxft's table"] * bool(_table(device_kind)), "heuristics"]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `autotune` did for one kernel: its config and the time of the whole function, before and after."""

    op: str
    key: str
    before: Any
    after: Any
    us_before: float
    us_after: float


def autotune(fn: Callable[..., Any], *args: Any, show_progress_bar: bool | None = None) -> list[Tuned]:
    """Finds the fastest launch configuration for each kernel that `fn(*args)` runs on this device, and keeps it.

    For one kernel after the other, it compiles `fn` with other configurations and times them in turns with the present
    one. What counts is the time of all of `fn`, so a call of a single operation is the most sensitive and the soonest
    done. A configuration is taken if it saves more than 2 % of that time in most of the rounds, and if its results
    differ from the present ones by no more than rounding does, beside the largest number of each array; one that does
    not compile is left out.

    Those that are taken are stored at once, for this kind of device and these versions of JAX and jaxft, in
    `$XDG_CACHE_HOME/jaxft` (`~/.cache/jaxft`). From then on every call with these sizes, rounded up to powers of two
    (but for depth and width of a dense layer), finds them, in this process (`jax.clear_caches()` is called, so what was
    compiled before is compiled once more) and in later ones. An interrupt keeps what was taken so far. To undo it all,
    delete that folder.

    Args:
      fn: what is to be fast: an operation, a gradient of it, or a whole model; with or without `jax.jit`. Bind what is
        no array with `functools.partial`.
      *args: arrays, or trees of them (a model, say, as `nnx.jit` takes it), for `fn`.
      show_progress_bar: None for where stderr is a terminal.

    Returns:
      An entry for each kernel; where its `after` is its `before`, nothing was faster.

    Raises:
      TypeError: `fn` is no function, there is something else than arrays in `args`, or `show_progress_bar` is neither
        None nor a bool.
      RuntimeError: this is no NVIDIA GPU.
      ValueError: `fn` runs no kernel of jaxft that has a configuration.
      OSError: the cache directory cannot be written.
    """
    from jaxft import tuning_search

    if not callable(fn):
        raise TypeError(f"autotune: fn must be a function, got {type(fn).__name__}")
    if not isinstance(show_progress_bar, bool | None):
        raise TypeError(f"autotune: show_progress_bar must be None, True or False, got {show_progress_bar!r}")
    for number, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise TypeError(
                    f"autotune: args[{number}] must be arrays or trees of them, got {leaf!r}; bind what is no array "
                    "with functools.partial"
                )
    return tuning_search.autotune(fn, *args, show_progress_bar=show_progress_bar)


def layer_norm(rows: int, width: int, itemsize: int, device_kind: str, variant: str = "") -> RowConfig:
    """`variant`: "embeddings" where the kernel reads rows of tables, "sums" where those of a split product."""
    # A warp for 1,024 elements: each thread has several 16-byte loads in flight and the reductions stay in the warp.
    block_width = min(next_power_of_2(width), 8192)
    block_rows = max(1, 1024 // block_width)
    default = RowConfig(block_rows, block_width, num_warps=max(1, block_width // 1024))
    if itemsize > 2 and rows * width < 2**20 and 512 < width <= 1024:  # small arrays want more warps
        default = RowConfig(2, 1024, num_warps=8)
    if variant == "sums" and block_width >= 512:
        # Few rows, each of several parts: 32 x 3 x 768 in 1.8 us, with two rows a program 2.5 (H200, 2026-11-24).
        default = RowConfig(1, block_width, num_warps=8)
    return lookup("layer_norm", default, device_kind, variant, rows=rows, width=width, itemsize=itemsize)


def layer_norm_backward(
    rows: int, width: int, itemsize: int, device_kind: str, variant: str = "", wide_dropout: bool = False
) -> GradientConfig:
    """`wide_dropout`: with dropout, rows of 16 bits and vectors of 32, which take the most registers.

    It has keys of its own, for which no table that is shipped has entries.
    """
    block_width = next_power_of_2(width)
    if block_width <= 8192:  # with the sums of three vectors in registers
        programs = 528 if rows * width < 2**23 else 792
        num_warps = 2 if block_width <= 512 else max(4, block_width // 512)
        default = GradientConfig(max(1, 1024 // block_width), block_width, programs, num_warps)
        if block_width > 1024:
            default = dataclasses.replace(default, programs=max(132, programs * 512 // block_width))
        elif block_width > 512 and itemsize > 2 and rows * width >= 2**19:
            default = GradientConfig(2, block_width, 264, 8)
        elif block_width > 512 and rows * width >= 2**19:
            if wide_dropout:  # 16384 x 768 in 54 us, where 396 programs, of which not all run at once, take 85
                default = GradientConfig(1, block_width, 528, 4)
            elif rows * width < 2**26:  # fewer programs, fewer partial sums
                default = GradientConfig(2, block_width, 264 if rows * width < 2**20 else 396, 4)
    else:  # the more rows in a block, the fewer partial sums
        default = GradientConfig(8, 1024, 264, 8)
    sizes = {"rows": rows, "width": width, "itemsize": itemsize}
    if wide_dropout:
        sizes["dropout"] = 1
    return lookup("layer_norm_backward", default, device_kind, variant, **sizes)


def embeddings_sums(table_rows: int, width: int) -> RowConfig:
    """Of the kernels that add up the rows with the same id: so much at a time. Untuned.

    Few ids come often, and their sums want more programs of fewer columns. Of many ids most come never, and their rows
    of zeros want wide ones.
    """
    block_width = min(next_power_of_2(width), 128 if table_rows <= 1024 else 1024)
    return RowConfig(min(4096 // block_width, 32), block_width, num_warps=4)


def softmax(rows: int, width: int, itemsize: int, device_kind: str) -> RowConfig:
    # As for layer_norm, but rows of up to 64 KiB stay in registers.
    warp = 1024 if itemsize <= 2 or width <= 1024 else 256
    default = _softmax(rows, width, warp, longest=16384, most_warps=8 * itemsize // 2)
    if width > 16384 and itemsize <= 2:
        default = RowConfig(1, 32768, 16) if width <= 32768 else RowConfig(1, 8192, 16)
    return lookup("softmax", default, device_kind, rows=rows, width=width, itemsize=itemsize)


def softmax_backward(rows: int, width: int, itemsize: int, device_kind: str) -> RowConfig:
    # Shorter ones, since two arrays are read: 16 KiB of each in 16 bits, where a warp holds fewer bytes, 64 in float32.
    default = _softmax(rows, width, 512, 8192 if itemsize <= 2 else 16384, most_warps=8 * itemsize // 2)
    if itemsize <= 2 and 4096 < width <= 16384:
        default = RowConfig(1, 8192, 4) if width <= 8192 else RowConfig(1, 4096, 8)
    elif itemsize <= 2 and width > 16384 and rows <= 256:  # as many as run at once, two on a multiprocessor
        default = RowConfig(1, 8192, 8)
    return lookup("softmax_backward", default, device_kind, rows=rows, width=width, itemsize=itemsize)


def _softmax(rows: int, width: int, warp: int, longest: int, most_warps: int) -> RowConfig:
    """A warp for `warp` elements, rows up to `longest` in registers.

    Small arrays want more: four of 256 elements a program, half of `warp` where rows are very short (H200, 2026-11-21).
    """
    block_width = next_power_of_2(width)
    if width > longest:
        return RowConfig(1, longest, longest // 512)
    if rows * width < 2**20:
        if block_width <= 1024:
            return RowConfig((2 * warp if block_width <= 64 else 1024) // block_width, block_width, 4)
        warp = 256
    return RowConfig(max(1, warp // block_width), block_width, min(max(1, block_width // warp), most_warps))


def _block_width(width: int) -> int:
    divisor = width & -width  # the largest power of two in the width: blocks without a masked edge
    return min(divisor if divisor >= 256 else next_power_of_2(width), 1024)


def bias_activation(rows: int, width: int, itemsize: int, device_kind: str) -> ElementwiseConfig:
    block_width = _block_width(width)
    # Large arrays want more bytes in flight a program, small ones more programs.
    elements = 1024 if rows * width < 2**21 else 2048 if rows * width < 2**23 else 4096
    default = ElementwiseConfig(max(1, elements // block_width), block_width, num_warps=4)
    return lookup("bias_activation", default, device_kind, rows=rows, width=width, itemsize=itemsize)


def bias_activation_backward(rows: int, width: int, itemsize: int, device_kind: str) -> GradientConfig:
    block_width = min(_block_width(width), 512)
    if rows <= 128:
        # One program for all rows of a few columns: no partial sums. dense with GELU (of 16 rows its tanh form) and its
        # gradients, 768x3072 in bfloat16: 16 rows 13.1 us for 14.4, 32 14.1 for 15.5, 64 15.8 for 17.4, 128 19.3 for
        # 20.3 (H100, 2026-11-25).
        block_rows = next_power_of_2(rows)
        block_width = min(block_width, max(32, 1024 // block_rows))
        default = GradientConfig(block_rows, block_width, programs=1, num_warps=4 if rows <= 16 else 8)
    else:
        programs = 512 if rows * width >= (2**22 if itemsize <= 2 else 2**23) else 256
        default = GradientConfig(1024 // block_width, block_width, programs, num_warps=4)
    return lookup("bias_activation_backward", default, device_kind, rows=rows, width=width, itemsize=itemsize)


def permute(size: int, kept: int, aligned: int, itemsize: int, device_kind: str) -> PermuteConfig:
    """Of `size` elements. `kept` is the size of the innermost axis where it stays innermost, else 1; lines of the input
    and of the output start at multiples of `aligned` elements, at most 16 bytes: what a thread can move at once.
    """
    # Lines of 128 bytes, for 16 bits, on both sides; small arrays want more programs.
    line = 32 if size < 2**20 or itemsize > 4 else 64
    elements = line * line
    if kept * itemsize >= 64:  # rows move as they are
        line = min(next_power_of_2(kept), 1024)
        elements = max(line, elements)
    # A thread has 64 bytes in flight, or 16 elements where each is a load.
    per_thread = 16 if aligned * itemsize < 4 else max(8, 64 // itemsize)
    default = PermuteConfig(line, elements, num_warps=max(2, elements // (32 * per_thread)))
    return lookup("permute", default, device_kind, size=size, kept=kept, aligned=aligned, itemsize=itemsize)


def qkv_bias_split_heads(
    batch_heads: int, length: int, head_size: int, itemsize: int, device_kind: str
) -> ElementwiseConfig:
    block_width = min(next_power_of_2(head_size), 1024)
    elements = 1024 if batch_heads * length * head_size < 2**20 else 2048  # three times: of q, k and v
    block_rows = min(max(1, elements // block_width), next_power_of_2(length))
    default = ElementwiseConfig(block_rows, block_width, num_warps=4)
    sizes = {"batch_heads": batch_heads, "length": length, "head_size": head_size, "itemsize": itemsize}
    return lookup("qkv_bias_split_heads", default, device_kind, **sizes)


def qkv_bias_split_heads_backward(
    batch: int, length: int, heads: int, head_size: int, itemsize: int, device_kind: str
) -> GradientConfig:
    """`programs` of it for each head."""
    block_width = min(next_power_of_2(head_size), 1024)
    block_rows = min(max(1, 2048 // block_width), next_power_of_2(length))
    default = GradientConfig(block_rows, block_width, max(1, 1024 // next_power_of_2(heads)), num_warps=4)
    sizes = {"batch": batch, "length": length, "heads": heads, "head_size": head_size, "itemsize": itemsize}
    return lookup("qkv_bias_split_heads_backward", default, device_kind, **sizes)


# On these (compute capability 8.0, 9.0 and 10.x) a program may have 163 KiB of shared memory or more, on others 99.
# What kernels take is from Triton 3.9 for compute capability 8.6 (2026-11-21), with bias, mask and dropout.
_LARGE = re.compile(r"NVIDIA (A100|A800|A30|G?H\d+|G?B\d00)(?!\d)")
LARGEST = re.compile(r"NVIDIA G?(H\d+|B\d00)(?!\d)")  # 227 KiB


def _short(average: int | None, itemsize: int) -> bool:
    """Whether sequences back to back are so short, on `average`, that small blocks are faster.

    The gradient of 16,384 rows, 12 heads of 64, bfloat16 (H200, 2026-11-23), of sequences of up to 128, takes by one
    kernel in blocks of 32 x 128 169 us where they have 50 to 128, but 321 in pretraining (30 on average); by two in
    blocks of 32 x 32 215 and 243; and by one in blocks of 128 x 128, the fastest without gaps, 279 and 747.
    """
    return itemsize == 2 and average is not None and average <= 32


def attention(
    batch_heads: int, query_length: int, key_length: int, head_size: int, itemsize: int, device_kind: str,
    more: bool = False, average: int | None = None,
) -> AttentionConfig:  # fmt: skip
    """`average`: of sequences back to back, how many rows there are for each; `query_length` is that of the longest.

    They have keys of their own, for which no table that is shipped has entries.
    """
    few = batch_heads * min(query_length, average or query_length) < 64 * 64  # tiles of 64 queries, too few for a card
    choices = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1))
    if few:
        choices = ((16, 128, 4, 2), *choices[1:])
    elif _short(average, itemsize):
        choices = ((64, 32, 4, 2), *choices[1:])  # what a tile has beyond its sequence is work for nothing
    sizes = (batch_heads, query_length, key_length, head_size, itemsize)
    return _attention("attention", choices, *sizes, device_kind, more, average)


def attention_dq(
    batch_heads: int, query_length: int, key_length: int, head_size: int, itemsize: int, device_kind: str,
    more: bool = False, average: int | None = None,
) -> AttentionConfig:  # fmt: skip
    """Of the kernel for the gradient of queries."""
    choices = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 1), (32, 16, 4, 1))
    if _short(average, itemsize):
        choices = ((32, 32, 1, 2), *choices[1:])
    if not _LARGE.match(device_kind):  # with a mask of few keys, the others take up to 160 KiB
        medium = (64, 32, 4, 2) if key_length <= 128 else choices[1]
        choices = (choices[0], medium, choices[3] if itemsize == 2 else choices[2], (16, 16, 4, 1))
    sizes = (batch_heads, query_length, key_length, head_size, itemsize)
    return _attention("attention_dq", choices, *sizes, device_kind, more, average)


def attention_dkv(
    batch_heads: int, query_length: int, key_length: int, head_size: int, itemsize: int, device_kind: str,
    more: bool = False, bias_of_pairs: bool = False, average: int | None = None,
) -> AttentionConfig:  # fmt: skip
    """Of the kernel for the gradients of keys and values.

    Where a block holds all keys it is the only one (see `attention_backward.backward`), but with a bias [.., T, S]
    (`bias_of_pairs`), for which it is not tuned.
    """
    choices = ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 8, 1), (16, 32, 4, 1))
    alone = 64 < key_length <= 128 and query_length <= 4 * 128 and not bias_of_pairs
    if _short(average, itemsize) and key_length > 64:
        choices = ((32, 32, 2, 2), *choices[1:])
    elif alone and itemsize == 2 and LARGEST.match(device_kind):
        if average is None:
            choices = ((128, 128, 8, 1), (128, 128, 8, 1), *choices[2:])
        else:
            choices = ((32, 128, 4, 1), *choices[1:])
    if not _LARGE.match(device_kind):
        # Those for large heads take 112 KiB, and so does (64, 64) where it is the only kernel.
        medium = (32, 64, 4, 2) if key_length <= 64 else choices[1]
        choices = (choices[0], medium, (32, 32, 4, 1), (16, 16, 4, 1))
    sizes = (batch_heads, query_length, key_length, head_size, itemsize)
    return _attention("attention_dkv", choices, *sizes, device_kind, more, average, tuned=not bias_of_pairs)


def _attention(
    op: str,
    choices: tuple[tuple[int, int, int, int], ...],
    batch_heads: int,
    query_length: int,
    key_length: int,
    head_size: int,
    itemsize: int,
    device_kind: str,
    more: bool,
    average: int | None,
    tuned: bool = True,
) -> AttentionConfig:
    """Of the `choices` that for heads of up to 128 bytes, 256, 512 or more.

    `more`: with a bias, a mask or dropout, or products in full float32, which take more shared memory.
    """
    nbytes = next_power_of_2(head_size) * itemsize
    if itemsize > 2 and not _LARGE.match(device_kind):
        nbytes *= 2  # for products in full float32: with a mask, those of 64 numbers take 117 KiB in blocks of 64
    given_q, given_k, num_warps, num_stages = choices[sum(nbytes > most for most in (128, 256, 512))]
    block_q, block_k = (  # a block longer than the sequence is work on padding
        max(16, min(block, next_power_of_2(length)))
        for block, length in ((given_q, query_length), (given_k, key_length))
    )
    sizes = {"batch_heads": batch_heads, "query": query_length, "key": key_length, "head_size": head_size}
    if average is not None:
        sizes["average"] = average
    # 512 sequences of 32: 33 us for 35; back to back 59 for 79 (H200, 2026-11-23).
    if (block_q, block_k) == (32, 32) != (given_q, given_k) and nbytes <= 128:
        num_warps = min(num_warps, 2)
    default = AttentionConfig(block_q, block_k, num_warps, num_stages)
    if not tuned:
        return default
    return lookup(op, default, device_kind, "more" if more else "", **sizes, itemsize=itemsize)
