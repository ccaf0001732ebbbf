"""Deals batches to several devices, with a copy of the parameters on each."""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxft import dispatch
from jaxft.models.bundled import Bundled
from jaxft.ops.bundle import Rebuild
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

    def lanes(
        self, where: str, devices: Any, model: Any, function: Any, arguments: Arguments, *, one: bool
    ) -> list[Lane]:
        """Returns the lanes of the devices that the argument `devices` of a function `where` asks for.

        `None` takes the devices where JAX computes if they are set or the parameters are committed to them, otherwise
        `dispatch.work_devices`. With `one`, there is a single text. `function` is a jitted function of the
        model's arrays, of a batch and of static arguments.
        """
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
                if key not in self._programs:
                    with self._guard:
                        if key not in self._programs:
                            self._programs[key] = start(batch)
                return self._programs[key]

            def compile_program(lowered: Any, batch: Batch) -> Any:
                if not is_first:
                    lanes[0].wait(batch)  # XLA has timed its algorithms then
                return lowered.compile()

            def start(batch: Batch) -> Future[Any] | None:
                if not hasattr(function, "lower"):  # it is not jitted
                    return None
                compiled = Future[Any]()
                try:
                    with dispatch.traced_for(first):
                        lowered = function.lower(*given(there, batch))
                    task = functools.partial(compile_program, lowered, batch)
                    compiled = (_first_compilers() if is_first else _compilers()).submit(task)
                except jax.errors.JaxRuntimeError as error:
                    compiled.set_exception(error)
                except RuntimeError:  # the main thread has ended, and with it the threads that compile
                    return None
                compiled.add_done_callback(lambda future: report(future.exception()))
                return compiled

            def report(error: BaseException | None) -> None:
                if error is not None and not is_first:  # the call on the first device raises the error again
                    _log.warning("batches of a shape are not computed on the device %s: %s", device, error)

            def wait(batch: Batch) -> BaseException | None:
                compiled = program(batch)
                return None if compiled is None else compiled.exception()

            def compute(batch: Batch) -> Any:
                wait(batch)  # before the end of the compilation, the call would compile once more
                with dispatch.traced_for(first):
                    return function(*given(there, batch))

            def is_ready(batch: Batch) -> bool:
                compiled = program(batch)
                if compiled is None:
                    return is_first
                return compiled.done() and (is_first or compiled.exception() is None)

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
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="jaxft-compile")


@functools.cache
def _first_compilers() -> ThreadPoolExecutor:
    # Threads of their own: the programs of other devices do not delay the programs that a call waits for.
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="jaxft-compile-first")
