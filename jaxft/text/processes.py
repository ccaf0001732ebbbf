"""Processes that call a function, such as a tokenizer. Threads would wait for the interpreter lock of one process."""

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

# Cores, and threads, of each process. BERT's tokenizers take one thread of a process, others take all of them. See
# docs/performance-notes.md.
_CORES = 2
_LEAST, _MOST = 8, 16  # number of processes: fewer are slower than threads, and each has 35 to 65 MB
_PIPE = 1 << 18  # bytes of a pipe: about a chunk, so that a thread that reads or writes it seldom waits for the lock

_log = logging.getLogger("jaxft")


def suitable() -> int:
    """Returns how many processes tokenise faster than threads on this host, or 0."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a container may use less time than its cores have
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    with contextlib.suppress(ValueError):
        cores = min(cores, int(os.environ.get("RAYON_NUM_THREADS", "")) or cores)
    is_off = os.environ.get("TOKENIZERS_PARALLELISM", "on").lower() in ("false", "off", "no", "f", "n", "0", "")
    has_python = os.path.basename(sys.executable or "").startswith("python")  # not a program that embeds Python
    count = min(cores // _CORES, _MOST)
    return count if has_python and not is_off and count >= _LEAST else 0


class Processes:
    """Processes that call a function. They start in the background, and end with this object or with this process.

    After a SIGKILL of this process, they end when the children that were forked from it have ended too. A log line says
    if the function cannot be pickled or a process cannot be started.

    Args:
      function: the function. The processes import what its pickle names, but not the program of this process.
      count: number of processes.
    """

    def __init__(self, function: Any, count: int) -> None:
        self._owner = os.getpid()
        self._ended = threading.Event()
        self._started: list[subprocess.Popen[bytes]] = []
        self._alive: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        weakref.finalize(self, _end, self._owner, self._ended, self._started)
        try:
            data = pickle.dumps(function, protocol=5) if count else b""
        except Exception as error:  # parts in Python
            _log.info("threads tokenise, because processes cannot get the tokenizer: %s", error)
            return
        for _ in range(count):  # the threads hold no reference to this object, which may end first
            arguments = data, self._ended, self._started, self._alive, self._idle
            threading.Thread(target=_start, args=arguments, daemon=True).start()

    @property
    def ready(self) -> int:
        """Number of processes that take calls. A process that was forked from this one has none."""
        return len(self._alive) if os.getpid() == self._owner else 0

    def __call__(self, *arguments: Any) -> Any:
        """Returns the result of a process. Returns None if none is ready, if it ended, or if the function raised."""
        if not self.ready:
            return None
        call = pickle.dumps(arguments, protocol=5)
        if (worker := self._idle.get()) is None:
            self._idle.put(None)  # for other threads that wait
            return None
        try:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(call)
            worker.stdin.flush()
            result = pickle.load(worker.stdout)
        except BaseException as error:  # what the pipe still holds belongs to no later call
            worker.kill()
            self._alive.remove(worker)
            if not self._alive:
                self._idle.put(None)
            if not isinstance(error, Exception):
                raise
            _log.warning("a process that tokenises has ended; going on with %d of them (%r)", self.ready, error)
            return None
        self._idle.put(worker)
        return result


def _start(data: bytes, ended: threading.Event, started: Any, alive: Any, idle: Any) -> None:
    """Starts a process, and gives it the pickled function."""
    command = [sys.executable, "-P", "-c", "from jaxft.text import processes; processes.serve()"]
    worker = None
    try:
        path = os.pathsep.join(path for path in sys.path if isinstance(path, str))
        worker = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path, "RAYON_NUM_THREADS": str(_CORES)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pipesize=_PIPE,
            start_new_session=True,  # Ctrl-C does not reach it
        )  # fmt: skip
        started.append(worker)
        if ended.is_set():  # after `_end` went through the list
            return _kill(worker)
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(data)
        worker.stdin.flush()
        pickle.load(worker.stdout)
    except Exception as error:
        if worker is not None:
            _kill(worker)
        if not ended.is_set():
            _log.warning("a process that tokenises could not be started, going on without it: %r", error)
        return
    alive.append(worker)
    idle.put(worker)


def _end(owner: int, ended: threading.Event, started: "list[subprocess.Popen[bytes]]") -> None:
    if os.getpid() != owner:
        return
    ended.set()
    for worker in started:
        _kill(worker)


def _kill(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):  # what was not sent
            pipe and pipe.close()


def serve() -> None:
    """Answers the calls of another process until it closes the pipe. This is the program of a process."""
    calls, answers = sys.stdin.buffer, open(os.dup(1), "wb")
    os.dup2(2, 1)  # for what the function prints
    with contextlib.suppress(EOFError, BrokenPipeError):
        function, answer = pickle.load(calls), None
        while True:
            answers.write(pickle.dumps(answer, protocol=5))
            answers.flush()
            arguments = pickle.load(calls)
            try:
                answer = function(*arguments)
            except BaseException:  # the caller calls the function itself, and gets the error; a panic is no Exception
                answer = None
    os._exit(0)  # a failed flush of the closed pipe would be an error
