"""Stores compiled programs of encoders in the folder of `use_compilation_cache`, so that later processes skip tracing.

JAX's cache finds a program by its StableHLO, so a process must trace and lower the model first. Tracing and lowering
take longer than loading the program (docs/performance-notes.md, "Start-up: what a program costs"). This module names a
program by everything that the trace depends on instead, which is known without a trace.
"""

import functools
import hashlib
import logging
import operator
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.monitoring
import jaxlib
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable

from jaxft import compilation_cache, dispatch
from jaxft.kernels.mosaic_gpu import support
from jaxft.ops.bundle import Rebuild
from jaxft.tuning import cache

_log = logging.getLogger("jaxft")
_IMPORTED = time.time()


def name(function: Any, model: nnx.Module, call: Sequence[Any]) -> str | None:
    """Returns the name under which the program of a call is stored, or None if the program must not be stored.

    Equal names mean equal programs. A program is not stored if jaxft cannot know everything that its trace depends on:
    the model has functions, modules or values that are not from jaxft, or the arrays are on several devices.

    Args:
      function: the jitted function of an encoder.
      model: the model. `call` holds the same model as arrays and a `Rebuild`.
      call: the arguments of `function`.
    """
    if compilation_cache.folder() is None:
        return None
    body: Any = getattr(function, "__wrapped__", None)
    modules = {type(module).__module__.split(".")[0] for _, module in nnx.iter_modules(model)}
    if getattr(body, "__closure__", ()) is not None or not body.__module__.startswith("jaxft.") or modules - _KNOWN:
        return None
    if len(homes := dispatch.homes(jax.tree.leaves([*call]))) != 1:
        return None
    (home,) = homes
    settings = {
        setting: getattr(jax.config, setting, value)
        for setting, value in sorted(jax.config.values.items())
        if "_cache" not in setting
    }
    if (sources := _sources()) is None or (host := _host(home)) is None:
        return None
    parts = (
        sources, host, np.__version__, jax.__version__, jaxlib.__version__, flax.__version__, home,
        home.client.platform_version, dispatch.device(), sorted(cache.load(dispatch.device_kind()).items()),
        os.environ.get("XLA_FLAGS"), settings, jax.sharding.get_abstract_mesh(), body.__module__, body.__qualname__,
        jax.tree.map(_described, [*call]),
    )  # fmt: skip
    text = repr(parts)
    # The text does not identify the program if it has an address or an array that is not printed in full.
    return None if " at 0x" in text or "..." in text else f"jaxft-{hashlib.sha256(text.encode()).hexdigest()}"


_KNOWN = {"jaxft", "flax"}


def _described(x: Any) -> Any:
    if isinstance(x, jax.Array):
        # Keys of random numbers have no `weak_type`, but their types do.
        return x.shape, x.dtype, jax.typeof(x).weak_type, x.sharding, x.committed
    return (x.shape, x.dtype) if isinstance(x, np.ndarray | np.generic) else x


@functools.cache
def _sources() -> str | None:
    """Returns a SHA-256 digest of jaxft's Python and JSON files, or None if one changed after this import."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for kind in ("*.py", "*.json") for file in root.rglob(kind)):
        if max((status := file.stat()).st_mtime, status.st_ctime) > _IMPORTED:
            return None
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)} ".encode() + content)
    return digest.hexdigest()


# XLA compiles some operations in several ways and times them. Programs of few tokens without matmuls of XLA are as fast
# without the timing, and are compiled sooner.
# H200, first query of MiniLM without stored programs: 1.49 s (1.73 s with the timing), 2026-11-29
# See docs/performance-notes.md, "Start-up: what a program costs".
_WITHOUT_TIMING = {"xla_gpu_autotune_level": 0}
_FEW_TOKENS = 256
_MATMULS = {"stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot"}


def compile(
    lowered: jax.stages.Lowered, name: str | None, state: Any, platform: str, tokens: int
) -> "Program | None":  # fmt: skip
    """Compiles a program and stores it under its name.

    Of the programs that JAX loads from its own cache, those for CPUs are not stored. XLA serialises them without their
    functions.

    Args:
      lowered: the program.
      name: the result of `name`.
      state: the state of the call that the program was lowered for.
      platform: the platform that the program was lowered for.
      tokens: number of tokens of the batch, with padding.

    Returns:
      The program, if it was compiled with options. Otherwise None, and JAX reuses the program when the jitted function
      is called.
    """
    options = _options(lowered, platform, tokens)
    (seen := _seen()).is_new = False
    compiled = lowered.compile(options)
    if name is not None and (seen.is_new or platform != "cpu"):
        try:
            content = pickle.dumps(("mosaic_gpu" in lowered.as_text(), *serialize_executable.serialize(compiled)))
        except Exception as error:  # many types: the program has constants, or the backend cannot serialise
            _log.info("a compiled program is not stored: %s", error)
        else:
            compilation_cache.write(name, content)
    return None if options is None else Program(compiled, state)


def _options(lowered: jax.stages.Lowered, platform: str, tokens: int) -> dict[str, Any] | None:
    """Returns XLA's options for a program that computes `tokens` tokens, or None for the defaults."""
    if platform != "cuda" or tokens > _FEW_TOKENS:
        return None

    def names(operation: Any) -> Iterator[str]:
        for inner in (inner.operation for region in operation.regions for block in region for inner in block):
            yield inner.name
            yield from names(inner)

    module: Any = lowered.compiler_ir()
    return _WITHOUT_TIMING if _MATMULS.isdisjoint(names(module.operation)) else None


@functools.cache
def _seen() -> threading.local:
    """Returns a thread-local object. `is_new` becomes True in a thread where XLA compiles a program for JAX's cache."""
    seen = threading.local()

    def listen(event: str, **_: Any) -> None:
        seen.is_new = getattr(seen, "is_new", False) or event == "/jax/compilation_cache/cache_misses"

    jax.monitoring.register_event_listener(listen)
    return seen


class Program:
    """A compiled program in place of the jitted function, for calls of one `state`, shapes and static arguments."""

    def __init__(self, compiled: Callable[..., Any], state: Any) -> None:
        self._compiled, self._state = compiled, state

    def fits(self, call: Sequence[Any]) -> bool:
        """Returns whether the jitted function would compute a call by the same program."""
        return state(call) == self._state

    def __call__(self, *call: Any) -> Any:
        """Computes a call."""
        return self._compiled(*traced(call))


def traced(call: Sequence[Any]) -> list[Any]:
    """Returns the arguments of a call that are not static."""
    return [x for x in call if not isinstance(x, int | tuple | Rebuild)]


def state(call: Sequence[Any]) -> Any:
    """Returns what may change between two calls of an encoder: the model's arrays, and JAX's settings in a thread."""
    # The types of JAX's arrays are objects that Python compares in less time than their parts.
    arrays = [(x.aval, x.sharding, x.committed) if hasattr(x, "aval") else _described(x) for x in call[0]]
    return arrays, settings()


def has_settings_of(state: Any) -> bool:
    """Returns whether the calling thread has the settings for which `state` was made."""
    return bool(settings() == state[1])


def settings() -> Any:
    """Returns the settings of this thread that a trace depends on."""
    return _settings()(jax.config), jax.sharding.get_abstract_mesh(), dispatch.device()


@functools.cache
def _settings() -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads JAX's settings as they are in a thread."""
    names = [name for name in jax.config.values if "_cache" not in name and hasattr(jax.config, name)]
    return operator.attrgetter(*names)


@functools.cache
def _host(home: jax.Device) -> str | None:
    """Returns what the programs of a device depend on beside its name. None if that is unknown."""
    if home.platform != "cpu":
        return ""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return None
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU ")))


def load(name: str, content: bytes, home: jax.Device, state: Any) -> Program | None:
    """Returns the program of calls of a `state` on the device `home`, or None if it cannot be loaded."""
    try:
        has_mosaic, program, inputs, outputs = pickle.loads(content)
        if has_mosaic:
            support.register_calls()
        compiled = serialize_executable.deserialize_and_load(
            program, inputs, outputs, backend=home.client, execution_devices=[home]
        )
    except Exception as error:  # of many types: an XLA that refuses it
        _log.warning("a compiled program is compiled again, because it cannot be loaded: %s", error)
        if "RESOURCE_EXHAUSTED" not in str(error):
            compilation_cache.remove(name)
        return None
    return Program(compiled, state)
