"""What `jaxft.tuning.autotune` found on this machine: a JSON file in the user's cache directory.

There is one for each kind of device, version of JAX (and thereby of its compiler) and version of jaxft. It maps op ->
key -> fields of the config, as the tables that jaxft comes with. It may hold anything by the time it is read: what is
not as it should be is ignored, and said once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import jax

from jaxft._version import __version__

logger = logging.getLogger("jaxft")

T = TypeVar("T")
Table = dict[str, dict[str, dict[str, Any]]]

_WORDS = {
    "split": ("m", "n", "none"),
    "minor": ("m", "n"),
    "implementation": ("mosaic_gpu", "triton", "xla"),
}
_POWERS_OF_TWO = ("block_", "elements", "num_warps", "cluster_")
_MOST = {
    "num_warps": 32,
    "num_stages": 16,
    "stages": 16,
    "tile_m": 256,
    "tile_n": 256,
    "cluster_m": 2,
    "splits": 16,
}
_LEAST = {"stages": 2}  # with one, Mosaic's copies wait for the products and these for the copies
_TILE = 2**20  # elements, the most that Triton takes
_TILE_IN_REGISTERS = 128 * 192  # the most that a warp group of Mosaic's has registers for
_warned: set[Path] = set()


def path(device_kind: str) -> Path:
    """`$XDG_CACHE_HOME/jaxft/<device kind>-jax_<version>-jaxft_<version>.json`, by default in `~/.cache`.

    Raises:
      FileNotFoundError: neither is known, as in a container whose user has no name.
    """
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # unset, or (by the specification) to be ignored
        try:
            folder = str(Path.home() / ".cache")
        except RuntimeError as error:
            raise FileNotFoundError(f"{error} Set XDG_CACHE_HOME to a folder for tuned configs") from error
    name = f"{device_kind}-jax_{jax.__version__}-jaxft_{__version__}"
    return Path(folder, "jaxft", re.sub(r"[^\w.+-]", "_", name) + ".json")


@functools.lru_cache
def load(device_kind: str) -> Table:
    """The entries for this device, read once in a process; none where there is no such file, or a damaged one."""
    try:
        return _read(file := path(device_kind))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _warn(file, str(error))
        return {}


def _read(file: Path) -> Table:
    """What `file` has of ops, sizes and fields; ValueError or RecursionError where it is something else."""
    table = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise ValueError("it is not a table of ops, sizes and fields")
    sound = {op: entries for op, entries in table.items() if _nested(entries, depth=2)}
    if len(sound) < len(table):
        _warn(file, f"{', '.join(sorted(table.keys() - sound))}: not a table of sizes and fields")
    return sound


def restore(device_kind: str, op: str, name: str, default: T) -> T | None:
    """The entry of `op` at the sizes `name`, of the type of `default`; None where there is none, or no sound one."""
    entry = load(device_kind).get(op, {}).get(name)
    if entry is None:
        return None
    if reason := _unsound(entry, default):
        _warn(path(device_kind), f"{op} {name}: {reason}")
        return None
    return type(default)(**entry)


def save(file: Path, op: str, name: str, config: Any) -> None:
    """Adds an entry to what the file has by now; a reader sees the file before or after.

    A damaged file is kept under another name.

    Raises:
      OSError: it cannot be read or written.
    """
    with _locked(file.parent), _temporary(file) as new:
        try:
            table = _read(file)  # anew, since another process may have added its own
        except FileNotFoundError:
            table = {}
        except (ValueError, RecursionError) as error:
            _warn(file, str(error))
            os.replace(file, file.with_suffix(".damaged"))
            table = {}
        table.setdefault(op, {})[name] = dataclasses.asdict(config)
        json.dump(table, new, indent=1, sort_keys=True)
        new.write("\n")
        new.flush()
        os.replace(new.name, file)
    load.cache_clear()


def check_writable(file: Path) -> None:
    """Raises an OSError that says what to do if `save` could not read or write."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.parent), _temporary(file), contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            _read(file)
    except OSError as error:
        advice = "name another table, or set XDG_CACHE_HOME to a folder that can be written"
        raise OSError(f"autotune: cannot read and write {file} ({error}); {advice}") from error


def _warn(file: Path, reason: str) -> None:
    if file not in _warned:
        _warned.add(file)
        logger.warning("ignoring tuned configs in %s, which is damaged: %s", file, reason)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While no other process is in such a context."""
    import fcntl  # not everywhere, but wherever JAX has NVIDIA GPUs

    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


@contextlib.contextmanager
def _temporary(file: Path) -> Iterator[IO[str]]:
    """A new file beside `file`, removed if it is still there at the end."""
    temporary = file.with_name(f"{file.stem}-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as new:  # others may read it, if the umask says so
            yield new
    finally:
        temporary.unlink(missing_ok=True)


def _nested(table: Any, depth: int) -> bool:
    return isinstance(table, dict) and (depth == 1 or all(_nested(inner, depth - 1) for inner in table.values()))


def _unsound(entry: dict[str, Any], default: Any) -> str | None:
    """Why an entry is no config of the type of `default`, if it is not."""
    fields = dataclasses.fields(default)
    names = {field.name for field in fields}
    if set(entry) != names:
        return f"its fields are {sorted(entry)}, not {sorted(names)}"
    product = "block_k" in names  # of matrices, whose tiles have at least 16 rows and columns
    for field in fields:
        name, value = field.name, entry[field.name]
        if name in _WORDS:
            sound = value in _WORDS[name]
        elif name == "tile_k":  # a line of 128 bytes, whatever the dtype
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
        return f"its {entry['programs']} programs are no cluster of {entry['cluster_m']}"
    return None
