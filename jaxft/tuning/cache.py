"""The user's cache: the configurations that `jaxft.tuning.autotune` found on this machine, in JSON files.

There is one file for each kind of device, version of JAX (which includes the version of its compiler) and version of
jaxft. A file maps op -> key -> fields of the configuration, like the tables that jaxft ships. Anything may have changed
a file before it is read, so its entries are checked. Damaged entries are ignored, and one warning says so.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxft import atomic
from jaxft._version import __version__

logger = logging.getLogger("jaxft")

T = TypeVar("T")
Table = dict[str, dict[str, dict[str, Any]]]

# The values that fields with words may have.
_WORDS = {
    "split": ("m", "n", "none"),
    "minor": ("m", "n"),
    "implementation": ("mosaic_gpu", "triton", "xla"),
}
# Prefixes of fields that must be powers of two.
_POWERS_OF_TWO = ("block_", "elements", "num_warps", "cluster_")
# The largest values of fields with numbers; 2^16 for others.
_MOST = {
    "num_warps": 32,
    "num_stages": 16,
    "stages": 16,
    "tile_m": 256,
    "tile_n": 256,
    "cluster_m": 2,
    "splits": 16,
}
# With one stage, the copies of a Mosaic GPU kernel wait for its matmuls, and the matmuls wait for the copies.
_LEAST = {"stages": 2}
_TILE = 2**20  # the most elements that a Triton tile may have
_TILE_IN_REGISTERS = 128 * 192  # the most elements that fit in the registers of a Mosaic GPU warp group
_warned: set[Path] = set()


def path(device_kind: str) -> Path:
    """Returns the file of a kind of device for these versions. Raises FileNotFoundError if there is no known home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # unset, or a relative path, which the XDG specification ignores
        try:
            folder = str(Path.home() / ".cache")
        except RuntimeError as error:
            raise FileNotFoundError(f"{error} Set XDG_CACHE_HOME to a folder for tuned configs") from error
    name = f"{device_kind}-jax_{jax.__version__}-jaxft_{__version__}"
    return Path(folder, "jaxft", re.sub(r"[^\w.+-]", "_", name) + ".json")


@functools.lru_cache
def load(device_kind: str) -> Table:
    """Returns the entries for a kind of device, read once per process or after `save`; none if the file is damaged."""
    try:
        return _read(file := path(device_kind))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _warn(file, str(error))
        return {}


def _read(file: Path) -> Table:
    """Returns the entries of a file without ops whose value is not a table of keys and fields.

    Raises ValueError if the file is not a JSON object, and RecursionError if it is nested too deeply.
    """
    table = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise ValueError("it is not a table of ops, sizes and fields")
    sound = {op: entries for op, entries in table.items() if _nested(entries, depth=2)}
    if len(sound) < len(table):
        _warn(file, f"{', '.join(sorted(table.keys() - sound))}: not a table of sizes and fields")
    return sound


def restore(device_kind: str, op: str, name: str, default: T) -> T | None:
    """Returns the entry of `op` under a `table.key`, in the type of `default`, or None if it is missing or damaged."""
    entry = load(device_kind).get(op, {}).get(name)
    if entry is None:
        return None
    if reason := _unsound(entry, default):
        _warn(path(device_kind), f"{op} {name}: {reason}")
        return None
    return type(default)(**entry)


def save(file: Path, op: str, name: str, config: Any) -> None:
    """Adds an entry to a file. Another process sees the file as it was before or after, never in between.

    A damaged file is kept under another name, which ends in `.damaged`.
    """
    with atomic.locked(file.parent), atomic.replacing(file) as (new,):
        try:
            table = _read(file)  # again, since another process may have added entries
        except FileNotFoundError:
            table = {}
        except (ValueError, RecursionError) as error:
            _warn(file, str(error))
            os.replace(file, file.with_suffix(".damaged"))
            table = {}
        table.setdefault(op, {})[name] = dataclasses.asdict(config)
        with atomic.writing(file), new.open("w", encoding="utf-8") as lines:
            json.dump(table, lines, indent=1, sort_keys=True, allow_nan=False)
            lines.write("\n")
    load.cache_clear()


def check_writable(file: Path) -> None:
    """Checks that `save` can read and write a file, and creates its directory. Raises an OSError with advice."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        missing_or_damaged = FileNotFoundError, ValueError, RecursionError
        with atomic.locked(file.parent), atomic.replacing(file), contextlib.suppress(*missing_or_damaged):
            _read(file)
    except OSError as error:
        advice = "name another table, or set XDG_CACHE_HOME to a folder that can be written"
        raise OSError(f"autotune: cannot read and write {file} ({error}); {advice}") from error


def _warn(file: Path, reason: str) -> None:
    if file not in _warned:
        _warned.add(file)
        logger.warning("ignoring tuned configs in %s, which is damaged: %s", file, reason)


def _nested(table: Any, depth: int) -> bool:
    """Returns whether `table` consists of dictionaries, `depth` levels deep."""
    return isinstance(table, dict) and (depth == 1 or all(_nested(inner, depth - 1) for inner in table.values()))


def _unsound(entry: dict[str, Any], default: Any) -> str | None:
    """Returns why an entry is not a valid configuration of the type of `default`, or None if it is valid."""
    fields = dataclasses.fields(default)
    names = {field.name for field in fields}
    if set(entry) != names:
        return f"its fields are {sorted(entry)}, not {sorted(names)}"
    product = "block_k" in names  # a matmul, whose blocks have at least 16 rows and columns
    for field in fields:
        name, value = field.name, entry[field.name]
        if name in _WORDS:
            sound = value in _WORDS[name]
        elif name == "tile_k":  # 128 bytes for every dtype
            sound = value == default.tile_k
        elif type(value) is not int:
            sound = False
        else:
            unit = 16 if product and name.startswith("block_") else 64 if name.startswith("tile_") else 1
            least = _LEAST.get(name, unit)
            sound = least <= value <= _MOST.get(name, 2**16) or value == field.default
            sound &= not (name.startswith(_POWERS_OF_TWO) and value & (value - 1)) and value % unit == 0
        if not sound:
            return f"{name} is {value!r}"
    blocks = [value for name, value in entry.items() if name.startswith("block_")]
    if math.prod(blocks) > _TILE or entry.get("elements", _TILE) < max(blocks, default=0):
        return f"its tile is of {blocks} elements"
    if entry.get("tile_m", 0) * entry.get("tile_n", 0) > _TILE_IN_REGISTERS:
        return f"its tile is of {entry['tile_m']} x {entry['tile_n']} elements"
    if entry.get("programs", 0) < entry.get("cluster_m", 0):
        return f"its {entry['programs']} programs are fewer than its cluster of {entry['cluster_m']}"
    return None
