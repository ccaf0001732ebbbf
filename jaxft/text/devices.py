"""Distributes batches among several devices, each with its own copy of the parameters."""

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxft import compilation_cache, dispatch
from jaxft.kernels.mosaic_gpu import support
from jaxft.models.bundled import Bundled
from jaxft.ops.bundle import Rebuild
from jaxft.text import programs
from jaxft.text.batching import Batch, Lane, is_terminal, progress_bar

Arguments = Callable[[list[Any], Rebuild, Batch], tuple[Any, ...]]  # makes the arguments of the jitted function

_log = logging.getLogger("jaxft")


class Dealer:
    """Computes batches of a model on one or several devices.

    When a shape first occurs, threads compile its program for each device. The first device computes all batches of
    that shape until another device has its program. So a call waits only for the programs of the first device.

    XLA chooses some algorithms by timing them, once in a process for each kind of device. The program is compiled for
    the first device before it is compiled for the others. The other devices then use the same algorithms, and their
    results are bitwise equal.

    Args:
      bundled: holds the model's arrays and their copies on other devices.
    """

    def __init__(self, bundled: Bundled) -> None:
        self._bundled = bundled
        # The key is (function, device, shapes and static arguments). None: the function cannot be compiled ahead.
        self._programs: dict[Any, Future[Any] | None] = {}
        self._guard = threading.Lock()  # held while a program is traced
        self._without_memory: list[Any] = []  # keys of programs that ran out of memory; the next call tries them again
        self._process = os.getpid()

    def lanes(
        self, where: str, devices: Any, model: Any, function: Any, arguments: Arguments, *, one: bool,
        assumes: bool = True,
    ) -> list[Lane]:  # fmt: skip
        """Returns one lane for each device that a call computes on.

        Args:
          where: the name of the public function, for messages.
          devices: the argument `devices` of that function. With None, parameters that are committed to devices are used
            there. Otherwise `dispatch.work_devices` chooses the devices.
          model: the model.
          function: a jitted function of the model's arrays, a batch and static arguments.
          arguments: makes the arguments of `function` from the arrays, a `Rebuild` and a batch.
          one: whether the call has a single text.
          assumes: whether a single text may be computed with the arrays of the last call. The model is compared while
            the device computes. If it has changed, the text is computed again. It has no effect if a device is chosen.

        Raises:
          RuntimeError: the process was forked after the encoder was made.
        """
        if os.getpid() != self._process:  # JAX's threads do not survive a fork, so a computation would never end
            raise RuntimeError(
                f"{where}: this process was forked after the encoder was made, and JAX cannot compute in it: use"
                " multiprocessing.get_context('spawn'), or make the encoder in the new process"
            )
        if self._without_memory:
            with self._guard:
                for key in self._without_memory:
                    self._programs.pop(key, None)
                self._without_memory.clear()
        chosen = dispatch.work_devices(many=not one) if devices is None else dispatch.named_devices(where, devices)
        # Comparing a model with its last arrays takes about 0.2 ms.
        assumed = self._bundled.assumed(model) if one and assumes and not chosen else None
        arrays, rebuild, is_current = assumed or (*self._bundled(model), lambda: True)
        if devices is None and chosen and any(getattr(x, "committed", False) for x in arrays):
            chosen = []
        if len(chosen) > 1 and not one:
            _say(f"{where}: computes on {len(chosen)} devices: {', '.join(map(str, chosen))}")
        first = chosen[0] if chosen else None
        is_home = first is None or (first == dispatch.default_device() and dispatch.homes(arrays) == {first})

        def shape_of(batch: Batch) -> tuple[Any, ...]:
            return batch.input_ids.shape, batch.lengths.shape, batch.longest

        def lane(device: jax.Device | None, leader: Lane | None) -> Lane:
            """Returns the lane of a device. `leader`: the lane of the first device, for the other ones."""
            is_first = leader is None
            there = None if is_first and is_home else device  # None: the arrays are already there

            # The keys are the shapes of batches, which are shorter than the keys of `self._programs`.
            known: dict[Any, Future[Any] | None] = {}  # programs
            called: dict[Any, Callable[..., Any]] = {}  # what `compute` calls: a loaded program, or the function
            copies = functools.cache(lambda: arrays if there is None else self._bundled.on(there, arrays))

            def given(batch: Batch) -> tuple[Any, ...]:
                return arguments(copies(), rebuild, batch)

            def key_of(batch: Batch) -> Any:
                _, *others = arguments([], rebuild, batch)
                return (function, there, *(getattr(x, "shape", x) for x in others))

            def program(batch: Batch) -> Future[Any] | None:
                """Returns the program for the shape of a batch. The first call for a shape starts the compilation."""
                shape = shape_of(batch)
                with contextlib.suppress(KeyError):
                    return known[shape]
                key = key_of(batch)
                if leader is not None:
                    leader.is_ready(batch)  # starts the compilation for the first device
                with self._guard:
                    if key not in self._programs:
                        self._programs[key] = start(key, batch)
                    known[shape] = self._programs[key]
                return known[shape]

            def run(work: Callable[[], Any], batch: Batch) -> Any:
                if leader is not None:
                    leader.wait(batch)  # XLA has chosen its algorithms once the first device's program is compiled
                return work()

            def start(key: Any, batch: Batch) -> Future[Any] | None:
                if not hasattr(function, "lower"):  # the function is not jitted
                    return None
                compiled = Future[Any]()
                try:
                    with dispatch.traced_for(first):
                        call = given(batch)
                        name = programs.name(function, model, call)
                        kept = None if name is None else compilation_cache.read(name)
                        work: Callable[[], Any]
                        if name is None or kept is None:
                            work = functools.partial(programs.compile, function.lower(*call), name)
                            # Exported programs have been traced already.
                            if self._bundled.implementation != "xla" and hasattr(function, "trace"):
                                import_mosaic_gpu(dispatch.device())
                        else:
                            (home,) = dispatch.homes(call[0])
                            work = functools.partial(programs.load, name, kept, home, programs.state(call))
                    compiled = _compilers(is_first=is_first).submit(functools.partial(run, work, batch))
                except jax.errors.JaxRuntimeError as error:
                    compiled.set_exception(error)
                except RuntimeError:  # the main thread has ended, so the thread pool takes no more work
                    return None
                compiled.add_done_callback(functools.partial(report, key))
                return compiled

            def report(key: Any, compiled: Future[Any]) -> None:
                if compiled.cancelled() or (error := compiled.exception()) is None:
                    return
                if "RESOURCE_EXHAUSTED" in str(error):
                    self._without_memory.append(key)
                if not is_first:  # on the first device, the computation itself raises the error
                    _log.warning("batches of a shape are not computed on the device %s: %s", device, error)

            def wait(batch: Batch) -> BaseException | None:
                compiled = program(batch)
                return None if compiled is None else compiled.exception()

            def compute(batch: Batch) -> Any:
                shape, compiled = shape_of(batch), program(batch)
                # A call before the compilation ends would compile the program a second time, so wait for it.
                loaded = None if compiled is None or compiled.exception() is not None else compiled.result()
                with dispatch.traced_for(first):
                    call = given(batch)
                    if shape not in called:
                        called[shape] = loaded if loaded and loaded.fits(call) else function
                    return called[shape](*call)

            def is_ready(batch: Batch) -> bool:
                compiled = program(batch)
                if compiled is None:
                    return is_first
                return compiled.done() and (is_first or not (compiled.cancelled() or compiled.exception()))

            plain = Lane(compute, is_ready, wait, device, programs.settings)
            if assumed is None:
                return plain

            @functools.cache
            def present() -> Lane:
                """Returns a lane with the arrays that the model has now."""
                return self.lanes(where, None, model, function, arguments, one=True, assumes=False)[0]

            def fitting(batch: Batch) -> Lane:
                """Returns the lane for a batch. Programs are compiled only for arrays that the model has."""
                return plain if key_of(batch) in self._programs or is_current() else present()

            def compute_assumed(batch: Batch) -> Any:
                if (lane := fitting(batch)) is plain:
                    try:
                        result = plain.compute(batch)
                    except Exception:  # for example because arrays were deleted
                        if is_current():
                            raise
                    else:
                        if is_current():
                            return result
                    lane = present()
                return lane.compute(batch)

            return Lane(
                compute_assumed, lambda batch: fitting(batch).is_ready(batch), lambda batch: fitting(batch).wait(batch),
                device, programs.settings,
            )  # fmt: skip

        # No closure refers to the list, so that replaced arrays are freed without Python's garbage collector.
        leader = lane(first, None)
        return [leader, *(lane(device, leader) for device in chosen[1:])]

    def warm_up(self, lanes: Sequence[Lane], batches: Sequence[Batch], *, show_progress_bar: bool | None) -> None:
        """Compiles the programs of batches for all lanes. On devices other than CPUs, it also runs each program once.

        `show_progress_bar=None` shows a progress bar if stderr is a terminal.
        """
        show = is_terminal() if show_progress_bar is None else show_progress_bar
        work = [(lane, batch) for batch in reversed(batches) for lane in lanes]  # largest first: they take longest
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
        """Waits until all compilations that were started have ended."""
        for program in [*self._programs.values()]:
            if program is not None:
                program.exception()


@functools.cache
def _say(message: str) -> None:
    _log.info(message)


@functools.cache
def import_mosaic_gpu(machine: dispatch.Device) -> None:
    """Starts to import Mosaic's kernels in a thread if programs of many rows have them.

    The import takes 0.3 s. JAX imports two thirds of these modules to lower any kernel.
    """
    if dispatch.machine_reason("mosaic_gpu", machine) is None and support.missing() is None:
        threading.Thread(target=importlib.import_module, args=("jaxft.kernels.mosaic_gpu.dense",)).start()


@functools.cache
def _compilers(*, is_first: bool) -> ThreadPoolExecutor:
    """Returns a pool of threads that compile programs.

    The first device has a pool of its own, so that programs for other devices do not delay the programs that a call
    waits for.
    """
    threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="jaxft-compile")
    if not is_first:
        # At the end of the process, cancel the queued compilations instead of waiting for them. `atexit` would be too
        # late: it runs after the threads have ended.
        threading._register_atexit(  # type: ignore[attr-defined]
            functools.partial(threads.shutdown, wait=False, cancel_futures=True)
        )
    return threads
