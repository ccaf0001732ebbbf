"""Launch configurations: their types, the tuned tables, and `lookup`, which every default goes through.

`jaxft/tuned/<device kind>.json` (spaces as underscores) maps op -> key -> fields of the configuration. It is written by
`benchmarks/tune.py`. A key holds the sizes of a case, rounded up to powers of two, so that every shape near a tuned one
finds its entry; only the depth and the width of a matmul are exact. Entries that `autotune` stored in the user's cache
(`tuning/cache.py`) come first.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, ClassVar, Protocol, TypeVar

import jax

from jaxft.dispatch import Device
from jaxft.tuning import cache

# Shared memory that a thread block may have, in bytes. Compute capability 8.0 has LARGE. Compute capabilities 9.0 and
# 10.x have LARGEST. Most others have 99 KiB.
LARGE, LARGEST = 163 * 1024, 227 * 1024


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


@dataclasses.dataclass(frozen=True)
class MosaicGradientConfig:
    """Attention's gradient by Mosaic GPU: `programs` share the heads of all sequences."""

    programs: int


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """A loss over `rows` rows at a time, whose logits are in memory together."""

    rows: int


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
    op: str, default: Config, device: Device, variant: str = "", usable: Callable[[Config], bool] = lambda _: True, /,
    **sizes: int,
) -> Config:  # fmt: skip
    """The tuned config of `op` at these sizes on this device, the user's before jaxft's, else `default`.

    `variant`: what else the user's must have been tuned for, since the kernel reads other things, or takes more shared
    memory or registers; of jaxft's, those that were go first. Entries that are not `usable` do not count.
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
    """Where `lookup` looks on this device, in order, for people."""
    own = [str(cache.path(device_kind))] if cache.load(device_kind) else []
    return [*own, *["jaxft's table"] * bool(_table(device_kind)), "heuristics"]
