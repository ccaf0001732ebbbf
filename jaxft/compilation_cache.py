"""Stores compiled programs in a folder for later processes, through JAX's persistent compilation cache."""

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

#: Name of the environment variable that holds the folder, or "off".
VARIABLE = "JAXFT_COMPILATION_CACHE"

_log = logging.getLogger("jaxft")
_PROGRAM = re.compile(r".+-[0-9a-f]{64}-cache")  # file name that JAX gives to a program
_PATIENCE = 10.0  # seconds to wait for the lock of the folder; JAX waits equally long
_checked: set[str] = set()  # folders that passed the checks of `use_compilation_cache`
_UNMAPPED = 65534  # owner that Linux shows for the files of root in a container that has no such user
_LAST_TO_GO = b"\xff" * 8  # time of last use for files that are no programs: JAX evicts them after all programs


def use_compilation_cache(path: str | os.PathLike[str] | None = None, *, max_bytes: int = 1 << 30) -> Path | None:
    """Stores compiled programs in a folder, so that later processes load them instead of compiling them again.

    Call this function before the first program is compiled. It sets JAX's persistent compilation cache for the whole
    process, so programs of other JAX code are stored too. The command line of jaxft calls this function. Nothing else
    in jaxft does.

    The folder holds executable code. It is created with mode 0700, and so are missing parents. A folder that another
    user can enter is refused. A folder is also refused if another user than root owns one of its parents, or can write
    to a parent that does not have the sticky bit.

    JAX finds a program by its StableHLO code, so a process must trace the function first. For text encoders of jaxft,
    the folder also holds programs that are found without a trace. Their names depend on the model, the shapes, the
    versions and jaxft's own source code.

    Programs of several versions of JAX, devices and compiler flags can share one folder. Several processes may use the
    folder at the same time. This function removes programs that were changed after JAX wrote them. It also removes
    programs that are incomplete because a process was killed or the disk was full. If a program is damaged later, JAX
    ignores the program and warns.

    Args:
      path: the folder. None takes the environment variable JAXFT_COMPILATION_CACHE. Without the variable, None takes
        the folder `jaxft/programs` in the user's cache folder, which is `~/.cache/jaxft/programs` on Linux.
      max_bytes: maximum size of all programs in bytes. Above it, the least recently used programs are removed.

    Returns:
      The folder, without symbolic links. None if `path` is None and JAXFT_COMPILATION_CACHE is "off", or if JAX's own
      setting `jax_enable_compilation_cache` is off.

    Raises:
      TypeError: `path` is not a string or path.
      ValueError: `max_bytes` is not a positive integer.
      OSError: the folder cannot be created, read or written, it belongs to another user, or other users can enter or
        replace it. The message names the folder and the reason.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"use_compilation_cache: path must be None, a str or a path, got {type(path).__name__}")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ValueError(f"use_compilation_cache: max_bytes must be a positive integer, got {max_bytes!r}")
    given = os.environ.get(VARIABLE) or None if path is None else path
    if (path is None and given == "off") or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    named = given or "in the user's cache"  # for the message
    try:
        folder = platformdirs.user_cache_path("jaxft") / "programs" if given is None else Path(given)
        named = folder = folder.expanduser().absolute()
        for parent in reversed([folder, *folder.parents]):
            parent.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve()  # a symbolic link may later point to another folder
        _check(folder)
        with _lock(folder):
            _remove_damaged(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder, or a file system without locks
        reason = getattr(error, "strerror", None) or error
        code = getattr(error, "errno", None) or errno.EIO
        raise OSError(code, f"use_compilation_cache: cannot use the folder {named}: {reason}") from error
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": max_bytes,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches are not limited by `max_bytes`, and a damaged file in them makes a compilation fail.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in options.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()
    _checked.add(str(folder))
    return folder


def folder() -> Path | None:
    """Returns the folder of `use_compilation_cache`, or None if the cache is off or JAX uses another folder."""
    used = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if used not in _checked or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    try:
        _check(Path(used))  # again, because another folder may have taken its place
    except OSError:
        return None
    return Path(used)


def is_empty() -> bool:
    """Returns whether `write` has stored nothing in the folder. True if the cache is off."""
    return (where := folder()) is None or not any(where.glob("jaxft-*-cache"))


def read(name: str) -> bytes | None:
    """Returns the content that `write` stored under a name, or None if it is missing or damaged."""
    if (where := folder()) is None:
        return None
    file = where / f"{name}-cache"
    try:
        with _lock(where, timeout=1):  # the caller waits; without it, it compiles
            digest, content = (whole := file.read_bytes())[:32], whole[32:]
            _time_of(file).write_bytes(time.time_ns().to_bytes(8, "little"))
    except OSError:
        return None
    return content if hashlib.sha256(content).digest() == digest else None


def write(name: str, content: bytes) -> None:
    """Stores `content` under a name in the folder, beside JAX's programs. Only logs an OSError, such as a full disk."""
    if (where := folder()) is None:
        return
    file = where / f"{name}-cache"
    try:
        with _lock(where):
            _remove_damaged(where)  # JAX leaves a part of a program on a full disk, and then stores no other program
            try:
                if _make_room(where, len(content) + 32):
                    file.write_bytes(hashlib.sha256(content).digest() + content)
                    _time_of(file).write_bytes(time.time_ns().to_bytes(8, "little"))
            except OSError:
                file.unlink(missing_ok=True)
                raise
    except OSError as error:
        _log.info("cannot store a compiled program in %s: %s", where, error)


def remove(name: str) -> None:
    """Removes the content that `write` stored under a name."""
    if (where := folder()) is not None:
        with contextlib.suppress(OSError), _lock(where):
            file = where / f"{name}-cache"
            file.unlink()
            _time_of(file).unlink()


def _lock(folder: Path, timeout: float = _PATIENCE) -> filelock.BaseFileLock:
    """Returns the lock of a folder, which JAX takes too."""
    return filelock.FileLock(folder / ".lockfile", timeout=timeout)


def _make_room(where: Path, size: int) -> bool:
    """Removes the least recently used programs, as JAX does, until `size` bytes fit. Returns whether they fit."""
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
    """Returns the path of the file that holds the time when a program was last used."""
    return file.with_name(file.name.removesuffix("-cache") + "-atime")


def _check(folder: Path) -> None:
    """Raises an OSError if the folder is missing, or if another user owns it, can enter it or can replace it."""
    status = folder.lstat()
    if sys.platform == "win32":
        return
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user, and compiled programs are executable code")
    # With a umask of 002, JAX writes programs that anyone in the group who can enter the folder can change.
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise PermissionError(errno.EPERM, f"other users can enter it (mode {mode:04o}); `chmod 700` helps")
    for parent in folder.parents:
        # The owner of a parent can replace the folder. So can a user who can write to the parent, unless it has the
        # sticky bit (as /tmp has).
        if (status := parent.lstat()).st_uid not in (os.geteuid(), 0, _UNMAPPED):
            raise PermissionError(errno.EPERM, f"{parent} belongs to another user, who can replace the folder")
        mode = stat.S_IMODE(status.st_mode)
        by_group = mode & 0o020 and not _is_alone_in(status.st_gid)
        if (mode & 0o002 or by_group) and not mode & stat.S_ISVTX:
            raise PermissionError(
                errno.EPERM, f"other users can write to {parent} (mode {mode:04o}); `chmod go-w {parent}` helps"
            )


def _is_alone_in(group: int) -> bool:
    """Returns whether a group has no member but this user, as the group of the user's name on most Linux systems."""
    import grp  # not on Windows
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == user and not {*found.gr_mem} - {user}


def _remove_damaged(folder: Path) -> None:
    """Removes programs that are incomplete or changed. Marks other files, so that JAX evicts them last.

    The caller holds the lock of the folder.
    """
    for file in folder.glob("*-cache"):
        used = _time_of(file)
        if _is_complete(file, used):
            continue
        if _PROGRAM.fullmatch(file.name):
            with contextlib.suppress(OSError):
                file.unlink()
                used.unlink()
        if file.exists():  # JAX stores no more programs if a "-cache" file has no time of last use
            used.write_bytes(_LAST_TO_GO)


def _is_complete(file: Path, used: Path) -> bool:
    """Returns whether a file is unchanged since JAX wrote it.

    JAX writes the time of last use after the program, and again at each use.
    """
    try:
        program, time = file.lstat(), used.lstat()
    except FileNotFoundError:
        return False
    is_own = sys.platform == "win32" or program.st_uid == os.geteuid()
    is_time = time.st_size == len(_LAST_TO_GO) and program.st_mtime_ns <= time.st_mtime_ns
    return is_own and is_time and stat.S_ISREG(program.st_mode)
