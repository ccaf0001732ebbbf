"""A folder that keeps compiled programs for later processes, by JAX's persistent compilation cache."""

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import sys
import time
from pathlib import Path

import filelock
import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache as jax_cache

#: Environment variable with the folder, or "off".
VARIABLE = "JAXFT_COMPILATION_CACHE"

_log = logging.getLogger("jaxft")
_PROGRAM = re.compile(r".+-[0-9a-f]{64}-cache")  # JAX's name for the file of a program
_PATIENCE = 10.0  # seconds to wait for the lock, as long as JAX waits
_checked: set[str] = set()  # folders that may be read
_LAST_TO_GO = b"\xff" * 8  # time of use of files that are no programs, so that JAX evicts them after all programs


def use_compilation_cache(path: str | os.PathLike[str] | None = None, *, max_bytes: int = 1 << 30) -> Path | None:
    """Keeps compiled programs in a folder, so that later processes load them instead of compiling them again.

    Call it before the first program is compiled. It sets JAX's persistent compilation cache for the whole process, so
    that programs of other JAX code are kept too. jaxft never calls it by itself, except in the command line.

    The folder holds executable code. It is created with mode 0700. A folder that another user can enter is refused, and
    so is a folder below one that all users can write to (without a sticky bit).

    JAX finds a program by its code, so a process traces the program first. For text encoders of jaxft, the folder also
    has programs that are found without a trace, by the model, the shapes, the versions and jaxft's own source code.

    Programs of other versions of JAX, other devices and other compiler flags may be in the same folder. Several
    processes may use it at the same time. This call removes programs that were changed after JAX wrote them, and
    programs that are incomplete because a process was killed or the disk was full. JAX ignores what is damaged later
    and warns.

    Args:
      path: the folder. None takes the environment variable JAXFT_COMPILATION_CACHE, or else the folder
        `jaxft/programs` of the user's cache, which is `~/.cache/jaxft/programs` on Linux.
      max_bytes: maximum size of all programs. Above it, JAX removes the programs that were not used for the longest
        time.

    Returns:
      The folder, or None if `path` is None and JAXFT_COMPILATION_CACHE is "off", or if JAX's own setting
      `jax_enable_compilation_cache` is off.

    Raises:
      TypeError: `path` is not a string or path.
      ValueError: `max_bytes` is not a positive integer.
      OSError: the folder cannot be created, read or written, belongs to another user, or others can enter or replace
        it. The message names the folder and the reason.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"use_compilation_cache: path must be None, a str or a path, got {type(path).__name__}")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ValueError(f"use_compilation_cache: max_bytes must be a positive integer, got {max_bytes!r}")
    given = os.environ.get(VARIABLE) or None if path is None else path
    if (path is None and given == "off") or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    folder = platformdirs.user_cache_path("jaxft") / "programs" if given is None else Path(given)
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(folder)
        _remove_damaged(folder)
    except (OSError, RuntimeError) as error:  # a RuntimeError says that there is no home, or that there are no locks
        reason = getattr(error, "strerror", None) or error
        code = getattr(error, "errno", None) or errno.EIO
        raise OSError(code, f"use_compilation_cache: cannot use the folder {folder}: {reason}") from error
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": max_bytes,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches do not count for `max_bytes`, and a damaged file in them is an error of the compilation.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in options.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()
    _checked.add(str(folder))
    return folder


def folder() -> Path | None:
    """Returns the folder of `use_compilation_cache`, or None if the cache is off or JAX has another folder."""
    used = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    is_on = used in _checked and jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    return Path(used) if is_on and _is_private(Path(used)) else None


def _is_private(folder: Path) -> bool:
    """Returns whether a folder that was checked is still there, and not another one in its place."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return sys.platform == "win32" or (status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077)


def read(name: str) -> bytes | None:
    """Returns what `write` has kept under a name in the folder, or None if it is missing or damaged."""
    if (where := folder()) is None:
        return None
    file = where / f"{name}-cache"
    try:
        with filelock.FileLock(where / ".lockfile", timeout=1):  # the caller waits; without it, it compiles
            digest, content = (whole := file.read_bytes())[:32], whole[32:]
            _time_of(file).write_bytes(time.time_ns().to_bytes(8, "little"))
    except OSError:
        return None
    return content if hashlib.sha256(content).digest() == digest else None


def write(name: str, content: bytes) -> None:
    """Keeps `content` under a name in the folder, beside JAX's programs. An error, as of a full disk, is ignored."""
    if (where := folder()) is None:
        return
    file = where / f"{name}-cache"
    try:
        with filelock.FileLock(where / ".lockfile", timeout=_PATIENCE):
            try:
                if _make_room(where, len(content) + 32):
                    file.write_bytes(hashlib.sha256(content).digest() + content)
                    _time_of(file).write_bytes(time.time_ns().to_bytes(8, "little"))
            except OSError:
                file.unlink(missing_ok=True)
                raise
    except OSError as error:
        _log.info("cannot keep a compiled program in %s: %s", where, error)


def remove(name: str) -> None:
    """Removes what `write` has kept under a name."""
    if (where := folder()) is not None:
        with contextlib.suppress(OSError), filelock.FileLock(where / ".lockfile", timeout=_PATIENCE):
            file = where / f"{name}-cache"
            file.unlink()
            _time_of(file).unlink()


def _make_room(where: Path, size: int) -> bool:
    """Removes the programs that were not used for the longest time, as JAX does. Returns whether `size` bytes fit."""
    most = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]
    if size > most:
        return False
    sizes = {file: file.lstat().st_size for file in where.glob("*-cache")}
    for file in sorted(sizes, key=lambda file: int.from_bytes(_time_of(file).read_bytes(), "little")):
        if size + sum(sizes.values()) <= most:
            break
        file.unlink()
        _time_of(file).unlink()
        del sizes[file]
    return size + sum(sizes.values()) <= most


def _time_of(file: Path) -> Path:
    """Returns the file with the time when a program was last used."""
    return file.with_name(file.name.removesuffix("-cache") + "-atime")


def _check(folder: Path) -> None:
    """Raises an OSError if another user can enter the folder."""
    if sys.platform == "win32":
        return
    # A link could be another user's too.
    if {folder.lstat().st_uid, folder.stat().st_uid} != {os.geteuid()}:
        raise PermissionError(errno.EPERM, "it belongs to another user, and compiled programs are executable code")
    # Who can enter the folder can write to programs that JAX has written with a umask of 002.
    if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        raise PermissionError(errno.EPERM, f"other users can enter it (mode {mode:04o}); `chmod 700` helps")
    for parent in {*folder.parents, *folder.resolve().parents}:
        # Who can write to a parent can put another folder in its place. A sticky bit, as of /tmp, prevents that.
        if (mode := stat.S_IMODE(parent.stat().st_mode)) & 0o002 and not mode & stat.S_ISVTX:
            raise PermissionError(
                errno.EPERM, f"other users can write to {parent} (mode {mode:04o}); `chmod o-w {parent}` helps"
            )


def _remove_damaged(folder: Path) -> None:
    with filelock.FileLock(folder / ".lockfile", timeout=_PATIENCE):  # the lock that JAX takes
        for file in folder.glob("*-cache"):
            used = _time_of(file)
            if _is_complete(file, used):
                continue
            if _PROGRAM.fullmatch(file.name):
                with contextlib.suppress(OSError):
                    file.unlink()
                    used.unlink()
            if file.exists():  # JAX 0.10 keeps no programs where one of these files has no time of use
                used.write_bytes(_LAST_TO_GO)


def _is_complete(file: Path, used: Path) -> bool:
    """Returns whether a file is as JAX wrote it. JAX writes the time of use after the program, and at each use."""
    try:
        program, time = file.lstat(), used.lstat()
    except FileNotFoundError:
        return False
    is_own = sys.platform == "win32" or program.st_uid == os.geteuid()
    is_time = time.st_size == len(_LAST_TO_GO) and program.st_mtime_ns <= time.st_mtime_ns
    return is_own and is_time and stat.S_ISREG(program.st_mode)
