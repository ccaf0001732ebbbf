"""Worker processes for a function, such as a tokenizer: threads would wait for the interpreter lock of one process.

This module is also the program of a worker: `python -m jaxft.text.processes`.
"""

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from typing import Any

_log = logging.getLogger("jaxft")


class Processes:
    """Workers that call a function. They start in the background, and end with this object or with its process.

    Args:
      function: a function that can be pickled, as its arguments and results can.
      count: the number of workers.
      environment: environment variables of the workers, added to those of this process.

    Raises an Exception if the function cannot be pickled.
    """

    def __init__(self, function: Any, count: int, **environment: str) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._environment = os.environ | environment | {"PYTHONPATH": paths}
        self._idle = queue.SimpleQueue[subprocess.Popen[bytes] | None]()
        self._guard = threading.Lock()
        self._workers: list[subprocess.Popen[bytes]] = []
        self.ready = 0  # number of workers that take calls
        data = pickle.dumps(function)
        weakref.finalize(self, _end, self._workers)
        # The thread keeps no reference to this object, which may end before the workers have started.
        threading.Thread(target=_start, args=(weakref.ref(self), data, count), daemon=True).start()

    def __call__(self, *arguments: Any) -> Any:
        """Returns the result of a call by a worker, or None: no worker is ready, has ended, or has raised an error."""
        if not self.ready or (worker := self._idle.get()) is None:
            return None
        try:
            result = _ask(worker, arguments)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            _log.warning("a process that tokenises has ended (%s); going on without it", error or "it closed its pipe")
            worker.kill()
            with self._guard:
                self.ready -= 1
                if not self.ready:
                    for _ in range(threading.active_count()):  # the threads that may wait for a worker
                        self._idle.put(None)
            return None
        self._idle.put(worker)
        return result

    def add(self) -> bool:
        """Starts a worker. Returns whether it could be started."""
        try:
            worker = subprocess.Popen(  # in a session of its own, where Ctrl-C does not reach it
                [sys.executable, "-P", "-m", "jaxft.text.processes"], env=self._environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            _log.warning("no process that tokenises could be started: %s", error)
            return False
        self._workers.append(worker)
        return True

    def greet(self, worker: "subprocess.Popen[bytes]") -> None:
        """Makes a worker that has the function take calls."""
        with self._guard:
            self._idle.put(worker)
            self.ready += 1


def _start(reference: "weakref.ref[Processes]", data: bytes, count: int) -> None:
    """Starts the workers, then gives them the function."""
    for _ in range(count):
        if (processes := reference()) is None or not processes.add():
            return
    workers = [*processes._workers]
    del processes
    for worker in workers:
        try:
            assert worker.stdin is not None
            worker.stdin.write(data)
            worker.stdin.flush()
        except (OSError, ValueError):
            continue
    for worker in workers:
        try:
            assert worker.stdout is not None
            pickle.load(worker.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            _log.warning("a process that tokenises could not be started: %s", error)
            continue
        if (processes := reference()) is None:
            return
        processes.greet(worker)
        del processes


def _ask(worker: "subprocess.Popen[bytes]", arguments: Any) -> Any:
    assert worker.stdin is not None and worker.stdout is not None
    pickle.dump(arguments, worker.stdin, protocol=5)
    worker.stdin.flush()
    return pickle.load(worker.stdout)


def _end(workers: "list[subprocess.Popen[bytes]]") -> None:
    for worker in workers:
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            try:
                assert pipe is not None
                pipe.close()
            except OSError:  # what was not sent
                pass


def _serve() -> None:
    """Answers calls until the pipe ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # for what the function prints
    function = pickle.load(requests)
    answer = None
    while True:
        pickle.dump(answer, answers, protocol=5)
        answers.flush()
        try:
            arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = function(*arguments)
        except BaseException:  # the caller calls the function itself, and gets the error; a panic is no Exception
            answer = None


if __name__ == "__main__":
    try:
        _serve()
    except (BrokenPipeError, EOFError):
        os._exit(1)
