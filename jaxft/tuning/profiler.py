"""Timers: kernel times from JAX's profiler, wall time per call, and variants that take turns."""

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

T = TypeVar("T")


class Kernel(NamedTuple):
    """A kernel launch on the GPU. `start` and `end` are in microseconds."""

    name: str
    start: float
    end: float


def kernel_times(run: Callable[[], Any]) -> list[Kernel]:
    """Returns the kernels that `run` launches on the GPU, without copies (cudaMemcpy).

    There are none on other devices, and where another program profiles the GPU. Raises a RuntimeError if JAX's profiler
    is running already.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return [
        Kernel(event.name, event.start_ns / 1e3, event.end_ns / 1e3)
        for plane in profile.planes if plane.name.startswith("/device:GPU")
        for line in plane.lines if line.name.startswith("Stream")
        for event in line.events if not event.name.startswith(("Memcpy", "Memset"))
    ]  # fmt: skip


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Returns how long at least one kernel runs, in microseconds. JAX 0.11 starts one before the previous one ends."""
    total, until = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def device_us(call: Callable[[], Any], calls: int) -> float:
    """Returns how long a call keeps the GPU busy: the mean of `calls` calls, or NaN if no kernel was recorded."""
    kernels = kernel_times(lambda: [call() for _ in range(calls)])
    return busy_us(kernels) / calls if kernels else math.nan


def queued_us(call: Callable[[], Any], calls: int) -> float:
    """Returns the wall time per call, in microseconds: `calls` calls in a row, then one wait for the last result."""
    start = time.perf_counter()
    for _ in range(calls):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls * 1e6


def turns(variants: Sequence[T], rounds: int, measure: Callable[[T], float]) -> np.ndarray:
    """Measures variants in turns and returns the samples `[rounds, variants]`.

    A change of clock or temperature affects all of them alike. Every other round goes backwards, so that no variant
    always follows the same one.
    """
    samples = np.empty((rounds, len(variants)))
    for i in range(rounds):
        for j in range(len(variants))[:: -1 if i % 2 else 1]:
            samples[i, j] = measure(variants[j])
    return samples
