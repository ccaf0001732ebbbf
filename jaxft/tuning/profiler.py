"""How long kernels run on the GPU, from JAX's profiler."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Kernel(NamedTuple):
    name: str
    start: float  # us
    end: float


def kernel_times(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels that `run()` launches on the GPU; it returns their results.

    Without copies that are no kernel (cudaMemcpy). None where there is no NVIDIA GPU, or another profiler has it; if
    JAX's own is at work already, it raises a RuntimeError.
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
    """How long one or more of the kernels run.

    JAX 0.11 launches a kernel before the one ahead of it ends: a sum of their times has its wait for that one twice.
    """
    total, until = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total
