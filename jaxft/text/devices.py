"""Deals batches to several devices, with a copy of the parameters on each."""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxft import compilation_cache, dispatch
from jaxft.models.bundled import Bundled
from jaxft.ops.bundle import Rebuild
from jaxft.text import programs
from jaxft.text.batching import Batch, Lane, progress_bar

Arguments = Callable[[list[Any], Rebuild, Batch], tuple[Any, ...]]  # the arguments of the function for a batch

_log = logging.getLogger("jaxft")


class Dealer:
    """Computes batches of a model on one or several devices.

    Threads compile the program of a shape when the shape first occurs. Until another device has its program, the first
    device computes the batches of that shape, so that no call waits for more programs than on one device.

    XLA chooses some algorithms by timing them, once in a process for each kind of device. A program is therefore
    compiled for the first device before the others: they take the same algorithms, and the bits are the same.

    Args:
      bundled: keeps the model's arrays, and their copies on other devices.
    """

    def __init__(self, bundled: Bundled) -> None:
        self._bundled = bundled
        # By function, device, shape and static arguments. None is a program that cannot be had.
        self._programs: dict[Any, Future[Any] | None] = {}
        self._guard = threading.Lock()  # held while a program is traced
        self._without_memory: list[Any] = []  # keys of programs that the next call tries again
        self._process = os.getpid()

    def lanes(
        self, where: str, devices: Any, model: Any, function: Any, arguments: Arguments, *, one: bool
    ) -> list[Lane]:
        """Returns the lanes of the devices that the argument `devices` of a function `where` asks for.

        `None` takes the devices where JAX computes if they are set or the parameters are committed to them, otherwise
        `dispatch.work_devices`. With `one`, there is a single text. `function` is a jitted function of the
        model's arrays, of a batch and of static arguments.

        Raises a RuntimeError in a process that was forked after the encoder was made.
        """
        if os.getpid() != self._process:  # JAX's threads are gone, and a computation would wait for ever
            raise RuntimeError(
                f"{where}: this process was forked after the encoder was made, and JAX cannot compute in it: use"
                " multiprocessing.get_context('spawn'), or make the encoder in the new process"
            )
        if self._without_memory:
            with self._guard:
                for key in self._without_memory:
                    self._programs.pop(key, None)
                self._without_memory.clear()
        arrays, rebuild = self._bundled(model)
        if devices is not None:
            chosen = dispatch.named_devices(where, devices)
        else:
            chosen = [] if any(getattr(x, "committed", False) for x in arrays) else dispatch.work_devices(many=not one)
        if len(chosen) > 1 and not one:
            _say(f"{where}: computes on {len(chosen)} devices: {', '.join(map(str, chosen))}")
        first = chosen[0] if chosen else None
        lanes: list[Lane] = []
        is_home = first is None or (first == dispatch.default_device() and dispatch.homes(arrays) == {first})

        def given(device: jax.Device | None, batch: Batch) -> tuple[Any, ...]:
            return arguments(arrays if device is None else self._bundled.on(device, arrays), rebuild, batch)

        def lane(device: jax.Device | None) -> Lane:
            is_first = device == first
            there = None if is_first and is_home else device  # None: where the arrays are

            def program(batch: Batch) -> Future[Any] | None:
                """Returns the program of a batch's shape, whose compilation the first call starts."""
                if not is_first:
                    lanes[0].is_ready(batch)  # starts the compilation for the first device
                _, *others = arguments([], rebuild, batch)
                key = (function, there, *(getattr(x, "shape", x) for x in others))
                with contextlib.suppress(KeyError):
                    return self._programs[key]
                with self._guard:
                    if key not in self._programs:
                        self._programs[key] = start(key, batch)
                    return self._programs[key]

            def run(work: Callable[[], Any], batch: Batch) -> Any:
                if not is_first:
                    lanes[0].wait(batch)  # XLA has timed its algorithms then
                return work()

            def start(key: Any, batch: Batch) -> Future[Any] | None:
                if not hasattr(function, "lower"):  # it is not jitted
                    return None
                compiled = Future[Any]()
                try:
                    with dispatch.traced_for(first):
                        call = given(there, batch)
                        name = programs.name(function, model, call)
                        kept = None if name is None else compilation_cache.read(name)
                        work: Callable[[], Any]
                        if name is None or kept is None:
                            work = functools.partial(programs.compile, function.lower(*call), name)
                        else:
                            (home,) = dispatch.homes(call[0])
                            work = functools.partial(programs.load, name, kept, home, programs.state(call))
                    compiled = _compilers(is_first=is_first).submit(functools.partial(run, work, batch))
                except jax.errors.JaxRuntimeError as error:
                    compiled.set_exception(error)
                except RuntimeError:  # the main thread has ended, and with it the threads that compile
                    return None
                compiled.add_done_callback(functools.partial(report, key))
                return compiled

            def report(key: Any, compiled: Future[Any]) -> None:
                if compiled.cancelled() or (error := compiled.exception()) is None:
                    return
                if "RESOURCE_EXHAUSTED" in str(error):
                    self._without_memory.append(key)
                if not is_first:  # the call on the first device raises the error again
                    _log.warning("batches of a shape are not computed on the device %s: %s", device, error)

            def wait(batch: Batch) -> BaseException | None:
                compiled = program(batch)
                return None if compiled is None else compiled.exception()

            def compute(batch: Batch) -> Any:
                compiled = program(batch)
                # Before the end of the compilation, the call would compile once more.
                loaded = None if compiled is None or compiled.exception() is not None else compiled.result()
                with dispatch.traced_for(first):
                    call = given(there, batch)
                    return (loaded if loaded and loaded.fits(call) else function)(*call)

            def is_ready(batch: Batch) -> bool:
                compiled = program(batch)
                if compiled is None:
                    return is_first
                return compiled.done() and (is_first or not (compiled.cancelled() or compiled.exception()))

            return Lane(compute, is_ready, wait, device)

        lanes += map(lane, chosen or [None])
        return lanes

    def warm_up(self, lanes: Sequence[Lane], batches: Sequence[Batch], *, show_progress_bar: bool | None) -> None:
        """Compiles the programs of batches for all lanes. On devices other than CPUs, it also runs each of them once.

        `show_progress_bar=None` shows progress on a terminal.
        """
        show = sys.stderr.isatty() if show_progress_bar is None else show_progress_bar
        work = [(lane, batch) for batch in reversed(batches) for lane in lanes]  # the largest take longest
        with progress_bar(len(work), "program", show) as bar:
            for lane, batch in work:
                lane.is_ready(batch)
            for lane, batch in work:
                if (error := lane.wait(batch)) is not None:
                    raise error
                if dispatch.platform() != "cpu":
                    jax.block_until_ready(lane.compute(batch))
                bar.update(1)

    def wait(self) -> None:
        """Waits until the programs that threads compile are there."""
        for program in [*self._programs.values()]:
            if program is not None:
                program.exception()


@functools.cache
def _say(message: str) -> None:
    _log.info(message)


@functools.cache
def _compilers(*, is_first: bool) -> ThreadPoolExecutor:
    """Returns the threads that compile. Programs of other devices do not delay the programs that a call waits for."""
    threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="jaxft-compile")
    if not is_first:
        # Otherwise the process ends after all compilations that are queued. `atexit` runs after the threads have ended.
        threading._register_atexit(  # type: ignore[attr-defined]
            functools.partial(threads.shutdown, wait=False, cancel_futures=True)
        )
    return threads
