"""Files that appear whole or not at all, also if the process fails, gets a signal, is killed or finds the disk full.

A file is written into a temporary folder beside it, and renamed when it is complete. The process holds a lock in the
temporary folder. A lock that nobody holds shows that the process was killed: the next process that writes beside it
removes the temporary folder. A lock may be unknown on other hosts of a shared file system. So a folder that another
host has made must be a week old as well.
"""

import contextlib
import errno
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

if sys.platform != "win32":
    import fcntl

_ONE_SIGNAL = 1.0  # seconds in which further signals count as the same signal
_WEEK = 7 * 24 * 3600.0
_PATIENCE = 0.5  # seconds that the end of the process waits for what another thread does

_unfinished: dict[Path, int] = {}  # temporary folders of this process, and the descriptors of their locks
_guard = threading.Lock()  # held while files and folders get or lose their names
_holder: list[int] = []  # the thread that holds the guard


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    with _guard:
        _holder.append(threading.get_ident())
        try:
            yield
        finally:
            _holder.clear()


# --- Writing -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(*targets: Path, without: Iterable[Path] = ()) -> Iterator[list[Path]]:
    """Yields a temporary path for each target. The files that the block writes there replace the targets at its end.

    If the block raises, no target changes. A target stays as it is if the block writes no file for it. If several
    processes write the same targets, all of them are from one process at the end. The files `without` are removed when
    the targets are replaced, and so are folders that get empty.

    If the process is killed while it renames the files, the first target is missing. So the first target must be the
    one without which no reader takes the others.
    """
    folder = Path(os.path.commonpath([target.parent for target in targets]))
    with writing(targets[0]):
        remove_abandoned(folder)
        work = _claim(folder)
    try:
        files = [work / target.relative_to(folder) for target in targets]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
        yield files
        pairs: list[tuple[Path | None, Path]] = []
        for file, target in zip(files, targets, strict=True):
            if file.exists():
                pairs.append((file, target))
                with writing(target), file.open("r+b") as written:
                    os.fsync(written.fileno())  # otherwise a power cut after the renaming may leave an empty file
        pairs += [(None, file) for file in without if os.path.lexists(file)]
        several = locked(folder) if len(pairs) > 1 else contextlib.nullcontext()
        with writing(targets[0]), several, _uninterrupted():
            _rename(pairs, work)
    finally:
        with _uninterrupted():
            _remove(work)


@contextlib.contextmanager
def writing(target: Path | str) -> Iterator[None]:
    """Makes an OSError of the block say that `target` cannot be written, and why, unless it says so already."""
    try:
        yield
    except OSError as error:
        if str(error.strerror).startswith("cannot write "):
            raise
        reason = f"cannot write {target}: {error.strerror or error}"
        raise OSError(error.errno or errno.EIO, reason) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context that only one process at a time can enter for a folder. On Windows, any number can."""
    if sys.platform == "win32":
        yield
        return
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _rename(pairs: list[tuple[Path | None, Path]], work: Path) -> None:
    """Gives files their final names, and removes targets without a file. After an error, all are as they were.

    The first target is away while the others are replaced.
    """
    before = [(target, work / f"before-{number}", target.exists()) for number, (_, target) in enumerate(pairs)]
    for target, link, existed in before[1:]:
        with contextlib.suppress(OSError):  # no hard links in this file system
            if existed:
                os.link(target, link)
    new_folders = {target.parent for _, target in pairs if not target.parent.exists()}
    try:
        for new_folder in new_folders:
            new_folder.mkdir(exist_ok=True)
        for target, link, existed in before[:1]:
            if existed and len(pairs) > 1:
                os.rename(target, link)
        for file, target in [*pairs[1:], *pairs[:1]]:
            if file is None:
                target.unlink()
            else:
                os.replace(file, target)
    except BaseException:
        for target, link, existed in before[1:]:
            if link.exists():
                os.replace(link, target)
            elif not existed and os.path.lexists(target):
                target.unlink()
        for target, link, _ in before[:1]:
            if link.exists():
                os.rename(link, target)
        _remove_empty(new_folders)
        raise
    _remove_empty(target.parent for file, target in pairs if file is None)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


# --- Temporary folders -------------------------------------------------------------------------------------------


def _claim(folder: Path) -> Path:
    """Makes a temporary folder and takes its lock."""
    import tempfile

    while True:  # until no other process removes the temporary folder as an abandoned one before it is locked
        with _uninterrupted():
            work = Path(tempfile.mkdtemp(prefix=".jaxft-", suffix=".tmp", dir=folder))
            try:
                _unfinished[work] = os.open(work / "lock", os.O_CREAT | os.O_RDWR)
                os.write(_unfinished[work], socket.gethostname().encode())
            except OSError as error:
                _remove(work)
                if isinstance(error, FileNotFoundError):
                    continue
                raise
            try:
                if sys.platform != "win32":
                    fcntl.flock(_unfinished[work], fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (work / "lock").exists():
                    return work
            except BlockingIOError:
                pass
            except OSError:  # This file system has no locks, so nobody will take the folder for an abandoned one.
                return work
            _remove(work)


def remove_abandoned(folder: Path) -> None:
    """Removes the temporary folders of this user's killed processes. Where there are no locks, it removes nothing."""
    for work in folder.glob(".jaxft-*.tmp"):
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                (work / "lock").unlink()  # Windows refuses to remove a file that a process has open
                shutil.rmtree(work)
            elif work.lstat().st_uid == os.getuid() and not work.is_symlink():
                had_lock = (work / "lock").exists() or work.name.endswith("-.tmp")  # the name that `_remove` gives
                lock = os.open(work / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    here = os.read(lock, 1000) in (b"", socket.gethostname().encode())
                    if not had_lock:  # a process killed before it made the lock left no other file
                        (work / "lock").unlink()
                        work.rmdir()
                    elif here or time.time() - os.fstat(lock).st_mtime > _WEEK:
                        shutil.rmtree(work)
                finally:
                    os.close(lock)


def _remove(work: Path) -> None:
    if (lock := _unfinished.pop(work, None)) is not None:
        os.close(lock)
    # After a signal, another thread may still write there. It finds no folder of the old name.
    renamed = work.with_name(f"{work.stem}-.tmp")
    with contextlib.suppress(OSError):
        work.rename(renamed)
    for folder in (renamed, work):
        shutil.rmtree(folder, ignore_errors=True)


# --- Signals -----------------------------------------------------------------------------------------------------


def end_at_signals(
    message: Callable[[int], str], note: Callable[[int, FrameType | None], None] | None = None
) -> Callable[[], None]:
    """Makes SIGINT, SIGTERM and SIGHUP end the process within a second, without its temporary folders.

    Only programs call this, never the library. A thread of its own receives the signals. While C++ code
    compiles a program, an exception would come too late. In a callback of the garbage collector, it would be lost.

    Args:
      message: a function from the signal to the line for stderr, or "".
      note: a handler for a first signal, which then does not end the process. Signals within a second count as one.

    Returns:
      A function that restores the earlier handlers.
    """

    def wait(number: int, frame: FrameType | None) -> None:
        if _holder != [threading.get_ident()]:
            time.sleep(2 * _PATIENCE)  # until the thread ends the process, which may not end in another way meanwhile

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    numbers = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    descriptor = sender.detach()

    def listen() -> None:
        latest = None if note else -math.inf  # when signals cease to count as the first one
        while received := receiver.recv(1):
            if (number := received[0]) in numbers:  # the program may have handlers for others
                latest = latest or time.monotonic() + _ONE_SIGNAL
                if time.monotonic() > latest:
                    _end(number, message(number))
        receiver.close()

    threading.Thread(target=listen, daemon=True).start()
    wakeup = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    before = {number: signal.signal(number, note or wait) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        socket.close(descriptor)  # ends the thread

    return restore


def _end(number: int, message: str) -> NoReturn:
    """Ends the process with the exit code that shells report for a signal."""

    def say() -> None:
        if message:
            # On a line of its own: a terminal shows ^C where the cursor is, and a progress bar has no end of line.
            started = sys.stderr.isatty() or getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
            print("\n" * bool(started) + message, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()

    try:
        _guard.acquire(timeout=_PATIENCE)
        for work in [*_unfinished]:
            _remove(work)
        speaker = threading.Thread(target=say, daemon=True)  # the reader of a pipe may have stopped reading
        speaker.start()
        speaker.join(_PATIENCE)
    finally:
        os._exit(128 + number)
