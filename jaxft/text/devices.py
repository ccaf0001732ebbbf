"""Distributes batches among several devices, each with its own copy of the parameters."""

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jaxft import compilation_cache, dispatch
from jaxft.kernels.mosaic_gpu import support
from jaxft.models.bundled import Bundled
from jaxft.ops.bundle import Rebuild
from jaxft.text import programs
from jaxft.text.batching import Batch, Lane, is_equal_in, is_terminal, progress_bar

Arguments = Callable[[list[Any], Rebuild, Batch], tuple[Any, ...]]  # makes the arguments of the jitted function

# Held while a thread lowers a program: Python runs one thread at a time, so two would take more time from the caller.
_LOWERING = threading.Lock()
_ENDS = threading.Event()  # set when the process ends

_log = logging.getLogger("jaxft")


class Dealer:
    """Computes batches of a model on one or several devices.

    When a shape first occurs, threads compile its program for each device. The first device computes all batches of
    that shape until another device has its program. So a call waits only for the programs of the first device, which
    the calling thread traces and lowers. Other threads lower the programs of the other devices.

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
        self._guard = threading.Lock()  # held while a program is looked up or started
        self._without_memory: list[Any] = []  # keys of programs that ran out of memory; the next call tries them again
        self._process = os.getpid()

    def lanes(
        self, where: str, devices: Any, model: Any, function: Any, arguments: Arguments, *, one: bool
    ) -> list[Lane]:
        """Returns one lane for each device that a call computes on.

        A single text for which no device is chosen may be computed with the arrays of the last call. The model is then
        compared while the device computes. If it has changed, the text is computed again.

        Args:
          where: the name of the public function, for messages.
          devices: the argument `devices` of that function. With None, parameters that are committed to devices are used
            there. Otherwise `dispatch.work_devices` chooses the devices.
          model: the model.
          function: a jitted function of the model's arrays, a batch and static arguments.
          arguments: makes the arguments of `function` from the arrays, a `Rebuild` and a batch.
          one: whether the call has a single text.

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
        call_with = functools.partial(_Call, function, arguments, model)
        # Comparing a model with its last arrays takes about 0.2 ms.
        if one and not chosen and (assumed := self._bundled.assumed(model)) is not None:
            arrays, rebuild, is_current = assumed
            guess = _Worker(self, call_with(arrays, rebuild))
            present = functools.cache(lambda: _Worker(self, call_with(*self._bundled(model))))
            return [_lane(_Speculation(guess, is_current, present), None)]
        arrays, rebuild = self._bundled(model)
        if devices is None and chosen and any(getattr(x, "committed", False) for x in arrays):
            chosen = []
        if len(chosen) > 1 and not one:
            _say(f"{where}: computes on {len(chosen)} devices: {', '.join(map(str, chosen))}")
        first = chosen[0] if chosen else None
        call = call_with(arrays, rebuild, first)
        is_home = first is None or (first == dispatch.default_device() and dispatch.homes(arrays) == {first})
        leader = _Worker(self, call, None if is_home else first)
        return [_lane(leader, first), *(_lane(_Worker(self, call, device, leader), device) for device in chosen[1:])]

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

    def _report(self, key: Any, device: jax.Device | None, program: Future[Any]) -> None:
        """Notes a program that ran out of memory. Logs the error of a compilation, unless `device` is None.

        `device`: None for the first device of a call.
        """
        if program.cancelled() or (error := program.exception()) is None:
            return
        if "RESOURCE_EXHAUSTED" in str(error):
            self._without_memory.append(key)
        if device is not None:  # on the first device, the computation itself raises the error
            _log.warning("batches of a shape are not computed on the device %s: %s", device, error)

    def wait(self) -> None:
        """Waits until all compilations that were started have ended."""
        for program in [*self._programs.values()]:
            if program is not None:
                program.exception()


class _Call(NamedTuple):
    """The function and the arrays that a call of an encoder computes with."""

    function: Any
    make_arguments: Arguments
    model: Any
    arrays: list[Any]
    rebuild: Rebuild
    first: jax.Device | None = None  # the first device of the call; None: no device is chosen

    def arguments(self, arrays: list[Any], batch: Batch) -> tuple[Any, ...]:
        """Returns the arguments of `function`. `arrays`: the model's arrays, or their copies on another device."""
        return self.make_arguments(arrays, self.rebuild, batch)


class _Worker:
    """Computes the batches of a call on one device.

    Args:
      dealer: keeps the programs for later calls.
      call: the function and the arrays.
      device: where the arrays are copied to. None: they stay where they are.
      leader: the worker of the call's first device. None: this worker is the leader.
    """

    def __init__(
        self, dealer: Dealer, call: _Call, device: jax.Device | None = None, leader: "_Worker | None" = None
    ) -> None:
        self._dealer, self._call, self._device, self._leader = dealer, call, device, leader
        self._arrays = functools.cache(
            lambda: call.arrays if device is None else dealer._bundled.on(device, call.arrays)
        )
        # The keys are the shapes of batches, which are shorter than the keys of the dealer's programs.
        self._known: dict[Any, Future[Any] | None] = {}  # programs
        self._called: dict[Any, Callable[..., Any]] = {}  # what `compute` calls: a `Program`, or the function

    def is_ready(self, batch: Batch) -> bool:
        """Returns whether a batch can start at once. The first call for a shape starts the compilation."""
        program = self._program(batch)
        if program is None:
            return self._leader is None
        return program.done() and (self._leader is None or not (program.cancelled() or program.exception()))

    def wait(self, batch: Batch) -> BaseException | None:
        """Waits until the program of a batch is compiled. Returns the error of the compilation."""
        program = self._program(batch)
        return None if program is None else program.exception()

    def compute(self, batch: Batch) -> Any:
        """Starts the computation of a batch and returns its result."""
        shape, program = _shape_of(batch), self._program(batch)
        # A call before the compilation ends would compile the program a second time, so wait for it.
        compiled = None if program is None or program.exception() is not None else program.result()
        with dispatch.traced_for(self._call.first):
            arguments = self._call.arguments(self._arrays(), batch)
            if shape not in self._called:
                self._called[shape] = compiled if compiled and compiled.fits(arguments) else self._call.function
            return self._called[shape](*arguments)

    def has_program(self, batch: Batch) -> bool:
        """Returns whether the dealer knows the shape of a batch. If it does, no compilation is started."""
        return _shape_of(batch) in self._known or self._key(batch) in self._dealer._programs

    def _key(self, batch: Batch) -> Any:
        _, *others = self._call.arguments([], batch)
        return (self._call.function, self._device, *(getattr(x, "shape", x) for x in others))

    def _program(self, batch: Batch) -> Future[Any] | None:
        shape = _shape_of(batch)
        with contextlib.suppress(KeyError):
            return self._known[shape]
        key = self._key(batch)
        first = None if self._leader is None else self._leader._program(batch)
        with self._dealer._guard:
            if key not in self._dealer._programs:
                self._dealer._programs[key] = self._start(key, batch, first)
            self._known[shape] = self._dealer._programs[key]
        return self._known[shape]

    def _start(self, key: Any, batch: Batch, first: Future[Any] | None) -> Future[Any] | None:
        """Starts to load or compile the program of a batch in a thread. Returns None if that is impossible.

        `first`: the program for the call's first device, for the other devices.
        """
        function, is_first = self._call.function, self._leader is None
        if not hasattr(function, "lower"):  # the function is not jitted
            return None
        program, chosen = Future[Any](), self._call.first
        try:
            with dispatch.traced_for(chosen):
                arguments = self._call.arguments(self._arrays(), batch)
                name = programs.name(function, self._call.model, arguments)
                kept = None if name is None else compilation_cache.read(name)
                state, machine = programs.state(arguments), dispatch.device()
            work: Callable[[], Any]
            if name is not None and kept is not None:
                (home,) = dispatch.homes(jax.tree.leaves([*arguments]))
                work = functools.partial(programs.load, name, kept, home, state)
            else:
                others = name, state, machine.platform, batch.input_ids.size
                if is_first or not _settings_are_global():  # the settings of `with` blocks hold in this thread only
                    with dispatch.traced_for(chosen):
                        work = functools.partial(programs.compile, function.lower(*arguments), *others)
                else:
                    lower = functools.partial(function.lower, *jax.tree.map(_without_data, arguments))
                    work = functools.partial(_lower_and_compile, lower, chosen, *others)
                # Exported programs have been traced already.
                if self._dealer._bundled.implementation != "xla" and hasattr(function, "trace"):
                    import_mosaic_gpu(machine)
            program = _compilers(is_first=is_first).submit(functools.partial(_after, first, work))
        except jax.errors.JaxRuntimeError as error:
            program.set_exception(error.with_traceback(None))  # the frames refer to arrays
        except RuntimeError:  # the main thread has ended, so the thread pool takes no more work
            return None
        # The program keeps this function, and an error of `_after`. They do not refer to the worker, whose arrays would
        # stay in memory.
        program.add_done_callback(functools.partial(self._dealer._report, key, None if is_first else self._device))
        return program


def _settings_are_global() -> bool:
    """Returns whether a new thread has the same settings as the calling thread."""
    with ThreadPoolExecutor(1) as threads:
        return is_equal_in(threads, programs.settings)


def _without_data(x: Any) -> Any:
    """Returns the type of a JAX array, with which a jitted function can be lowered. Returns other values unchanged."""
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=jax.typeof(x).weak_type)


def _lower_and_compile(
    lower: Callable[[], jax.stages.Lowered], chosen: jax.Device | None, name: str | None, state: Any, *others: Any
) -> Any:
    """Lowers and compiles a program in a thread.

    Args:
      lower: lowers the program.
      chosen: the first device of the call. None: no device is chosen.
      name: the name of the program, as for `programs.compile`.
      state: the state that the program is lowered for.
      others: the other arguments of `programs.compile`.

    Returns:
      The result of `programs.compile`. None if the program must not be used: the process ends, or the user has changed
      the settings since the name and the state were made. The call of the jitted function then compiles the program.
    """
    with _LOWERING, dispatch.traced_for(chosen):
        if _ENDS.is_set() or not programs.has_settings_of(state):
            return None
        lowered = lower()
        if not programs.has_settings_of(state):
            return None
    return programs.compile(lowered, name, state, *others)


def _after(first: Future[Any] | None, work: Callable[[], Any]) -> Any:
    """Does `work` once the program for the first device is compiled, for which XLA chooses its algorithms."""
    if first is not None:
        first.exception()
    return work()


class _Speculation:
    """Computes a single text with the arrays of the last call, and once more if the model has changed.

    Args:
      guess: the worker with the arrays of the last call.
      is_current: compares the model. Returns whether it still has these arrays.
      present: returns a worker with the arrays that the model has now.
    """

    def __init__(self, guess: _Worker, is_current: Callable[[], bool], present: Callable[[], _Worker]) -> None:
        self._guess, self._is_current, self._present = guess, is_current, present
        self._has_changed = False

    def is_ready(self, batch: Batch) -> bool:
        return self._worker(batch).is_ready(batch)

    def wait(self, batch: Batch) -> BaseException | None:
        return self._worker(batch).wait(batch)

    def compute(self, batch: Batch) -> Any:
        worker = self._worker(batch)
        if worker is self._guess:
            try:
                result = worker.compute(batch)
            except Exception:  # for example because arrays were deleted
                if self._is_right():
                    raise
            else:
                if self._is_right():
                    return result
            worker = self._present()
        return worker.compute(batch)

    def _worker(self, batch: Batch) -> _Worker:
        """Returns the worker for a batch. Programs are compiled only for arrays that the model has."""
        if not self._has_changed and (self._guess.has_program(batch) or self._is_right()):
            return self._guess
        return self._present()

    def _is_right(self) -> bool:
        """Returns whether the model still has the arrays of the last call. Remembers that it has others."""
        self._has_changed = self._has_changed or not self._is_current()
        return not self._has_changed


def _lane(worker: _Worker | _Speculation, device: jax.Device | None) -> Lane:
    return Lane(worker.compute, worker.is_ready, worker.wait, device, programs.settings)


def _shape_of(batch: Batch) -> tuple[Any, ...]:
    return batch.input_ids.shape, batch.lengths.shape, batch.longest


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

        def end() -> None:
            _ENDS.set()
            threads.shutdown(wait=False, cancel_futures=True)

        # At the end of the process, cancel the queued compilations instead of waiting for them. `atexit` would be too
        # late: it runs after the threads have ended.
        threading._register_atexit(end)  # type: ignore[attr-defined]
    return threads
