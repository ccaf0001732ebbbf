"""Deals batches to several devices, with a copy of the parameters on each."""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxft import dispatch
from jaxft.models.bundled import Bundled
from jaxft.ops.bundle import Rebuild
from jaxft.text.batching import Batch, Lane

Arguments = Callable[[list[Any], Rebuild, Batch], tuple[Any, ...]]  # the arguments of the function for a batch

_log = logging.getLogger("jaxft")


class Dealer:
    """Computes batches of a model on one or several devices.

    The first device compiles a program when its shape first occurs, as it does alone. Then threads compile the program
    for the other devices. Until it is there, the first device takes the batches of this shape, so that no call waits
    for more programs than on one device.

    Args:
      bundled: keeps the model's arrays, and their copies on other devices.
    """

    def __init__(self, bundled: Bundled) -> None:
        self._bundled = bundled
        # By function, device, shape and static arguments. None is a program that cannot be had.
        self._programs: dict[Any, Future[Any] | None] = {}

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
        is_home = first is None or (first == dispatch.default_device() and dispatch.homes(arrays) == {first})

        def given(device: jax.Device | None, batch: Batch) -> tuple[Any, ...]:
            stay = device is None or (device == first and is_home)
            return arguments(arrays if stay else self._bundled.on(device, arrays), rebuild, batch)

        def lane(device: jax.Device | None) -> Lane:
            def compute(batch: Batch) -> Any:
                with dispatch.traced_for(first):
                    return function(*given(device, batch))

            def is_ready(batch: Batch) -> bool:
                _, *others = arguments([], rebuild, batch)
                key = (function, device, *(getattr(x, "shape", x) for x in others))
                if key not in self._programs:
                    self._programs[key] = None
                    try:
                        with dispatch.traced_for(first):
                            lowered = function.lower(*given(device, batch))
                    except jax.errors.JaxRuntimeError as error:
                        _leave_out(device, error)
                        return False
                    self._programs[key] = compiled = _compilers().submit(lowered.compile)
                    compiled.add_done_callback(lambda future: _leave_out(device, future.exception()))
                program = self._programs[key]
                return program is not None and program.done() and program.exception() is None

            return Lane(compute, is_ready, device)

        return [*map(lane, chosen or [None])]

    def wait(self) -> None:
        """Waits until the programs that threads compile are there."""
        for program in [*self._programs.values()]:
            if program is not None:
                program.exception()


def _leave_out(device: jax.Device | None, error: BaseException | None) -> None:
    if error is not None:
        _log.warning("batches of a shape are not computed on the device %s: %s", device, error)


@functools.cache
def _say(message: str) -> None:
    _log.info(message)


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="jaxft-compile")
