"""Types of launch configurations, the tuned tables, and `lookup`, which finds the configuration of a kernel.

`jaxft/tuned/<device kind>.json` (spaces in the name become underscores) maps op -> key -> fields of the configuration.
`benchmarks/tune.py` writes it. A key holds the sizes of a case. Sizes are rounded up to powers of two, so that every
shape near a tuned shape finds its entry. Only the depth and the width of a matmul are exact. Entries that `autotune`
stored in the user's cache (`jaxft/tuning/cache.py`) take precedence.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, ClassVar, Protocol, TypeVar

import jax

from jaxft.dispatch import Device
from jaxft.tuning import cache

# Shared memory that a thread block may use, in bytes. Compute capabilities 8.0 and 8.7 have LARGE. 9.0, 10.0, 10.3 and
# 11.0 have LARGEST. Most others have 99 KiB. See `jaxft.dispatch`.
LARGE, LARGEST = 163 * 1024, 227 * 1024


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=_Dataclass)


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Launch configuration of a kernel that reduces rows."""

    block_rows: int  # rows that a program processes at a time, a power of two
    block_width: int  # columns that a program processes at a time, a power of two
    num_warps: int


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """Launch configuration of a kernel that also sums over rows. Its programs write partial sums, added up later."""

    block_rows: int  # rows that a program processes at a time, a power of two
    block_width: int  # columns that a program processes at a time, a power of two
    # Programs that share the rows: in `bias_activation_backward` the rows of a block of columns, in
    # `qkv_bias_split_heads_backward` the rows of a head.
    programs: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class ElementwiseConfig:
    """Launch configuration of a kernel without reductions."""

    block_rows: int  # rows of a program, a power of two
    block_width: int  # columns of a program, a power of two
    num_warps: int


@dataclasses.dataclass(frozen=True)
class PermuteConfig:
    """Launch configuration of a kernel that changes the layout of an array tile by tile."""

    block_inner: int  # elements of a tile along a line of the input, and of the output, a power of two
    # Elements of a tile, a power of two. It is at least `block_inner` squared, or at least `block_inner` if the
    # innermost axis stays innermost and is at least as long. The part that the two lines do not use goes to further
    # axes. If the shape has fewer elements, the tile is smaller.
    elements: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Launch configuration of a flash attention kernel."""

    block_q: int  # queries in a block, a power of two, at least 16
    block_k: int  # keys in a block, a power of two, at least 16
    num_warps: int
    num_stages: int  # of Triton's software pipeline
    # Programs that share all tiles, or 0 for one program per tile. A program that has several tiles reads its next tile
    # while it computes one. Programs share tiles only if one block holds all keys and there is no mask. In the backward
    # pass, one block must also hold all queries, heads must not be grouped, and there must be no bias, no dropout and
    # no gradient of the log-sum-exp.
    programs: int = 0


@dataclasses.dataclass(frozen=True)
class MosaicGradientConfig:
    """Launch configuration of the Mosaic GPU kernel for the gradient of attention."""

    programs: int  # they share the heads of all sequences


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Chunk size of a loss."""

    rows: int  # rows whose logits are in memory at the same time


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least `n`; 1 for 0 or less."""
    return 1 << max(0, n - 1).bit_length()


def key(variant: str = "", /, **sizes: int) -> str:
    """Returns the key of a table entry, the sizes and then the variant.

    Sizes are rounded up to powers of two: rows=4000, width=1000 gives `rows=4096,width=1024`. If `depth` is among the
    sizes (a matmul), depth and width are exact: models have few depths and widths, and the fastest configuration for
    2,304 columns may not be the fastest for 3,072 or 4,096.
    """
    exact = ("depth", "width") if "depth" in sizes else ()
    parts = [f"{name}={size if name in exact else next_power_of_2(size)}" for name, size in sizes.items()]
    return ",".join([*parts, variant] if variant else parts)


@functools.lru_cache
def _table(device_kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Reads the table that jaxft ships for a kind of device. It is empty if jaxft ships none."""
    file = resources.files("jaxft") / "tuned" / f"{device_kind.replace(' ', '_')}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


class Trial:
    """The configurations that `autotune` traces with in place of those that `lookup` finds, and the calls of `lookup`.

    Each trial is another value of `trial`, and that value is part of the keys of JAX's caches. JAX therefore traces
    everything again for each trial.
    """

    def __init__(self, configs: Mapping[tuple[str, str], Any]):
        self.configs = configs  # (op, key) -> config to use
        self.asked: dict[tuple[str, str], tuple[Any, dict[str, int]]] = {}  # (op, key) -> found config, sizes


trial = jax.make_user_context(None)


def lookup(
    op: str, default: Config, device: Device, variant: str = "", usable: Callable[[Config], bool] = lambda _: True, /,
    **sizes: int,
) -> Config:  # fmt: skip
    """Returns the first usable configuration of `op` at these sizes on this device.

    The candidates are, in this order: the configuration of a running `autotune`, the entry in the user's cache, the
    entry in the table that jaxft ships (`default` supplies fields that it lacks), and `default`. `variant` says what
    the kernel does differently at these sizes: it reads other arrays, or takes more shared memory or registers. An
    entry in the user's cache must have the same variant. In the shipped table an entry with the variant comes before an
    entry without one.
    """
    table, name = _table(device.kind).get(op, {}), key(variant, **sizes)
    shipped = dataclasses.replace(default, **table.get(name, table.get(key(**sizes), {})))
    running = trial.value
    tried = None if running is None else running.configs.get((op, name))
    found = tried, cache.restore(device.kind, op, name, default), shipped, default
    config = next(config for config in found if config is not None and usable(config))
    if running is not None:
        running.asked.setdefault((op, name), (config, sizes))
    return config


def sources(device_kind: str) -> list[str]:
    """Returns where `lookup` finds configurations for a kind of device, in its order, as text for people."""
    own = [str(cache.path(device_kind))] if cache.load(device_kind) else []
    return [*own, *["jaxft's table"] * bool(_table(device_kind)), "heuristics"]
