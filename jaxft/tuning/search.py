"""`autotune`: traces a function with other configurations, compiles, compares the results and times them in turns."""

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import subjaxprs

from jaxft import dispatch
from jaxft.dispatch import Device
from jaxft.tuning import attention, cache, dense, layouts, profiler, rows
from jaxft.tuning import table as tuning_table
from jaxft.tuning.dense import DenseChoice, MosaicDenseConfig, SplitConfig

logger = logging.getLogger("jaxft")

Entry = tuple[str, str]  # op, key
Function = Callable[..., Any]

# A configuration is taken if it saves more than MARGIN of the time in SHARE of the rounds.
MARGIN, SHARE = 0.02, 0.8
LEAST_ROUNDS, ROUNDS, SECONDS = 5, 15, 20.0  # at least LEAST_ROUNDS, at most ROUNDS, about SECONDS
ROUGHLY = 1.15  # after two rounds, a configuration that takes ROUGHLY times the fastest time is dropped
SAMPLE_US, CALLS, BYTES = 5e3, 20, 2**30  # limits of one sample: its time, its calls, the bytes of their results
# Results may differ by ROUNDING units in the last place of the largest number. The unit of float32 is TF32's if the
# program has matmuls or 16-bit arrays. Else it is 8 units of float32: sums in another order, and the layers after them.
ROUNDING, COARSE_UNIT, FULL_UNIT = 16, 2.0**-10, 2.0**-20


class Program(NamedTuple):
    """A configuration, and the function compiled with it."""

    config: Any
    call: Function


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Result of `autotune` for one kernel.

    Attributes:
      op: the kernel's name in the tables.
      key: the sizes, as the tables have them.
      before: the configuration that `fn` had.
      after: the configuration that `fn` has now.
      us_before: the time of the whole function with `before`, in microseconds.
      us_after: the time of the whole function with `after`, in microseconds.
    """

    op: str
    key: str
    before: Any
    after: Any
    us_before: float
    us_after: float


def autotune(
    fn: Callable[..., Any],
    *args: Any,
    table: str | os.PathLike[str] | None = None,
    copies: int = 1,
    show_progress_bar: bool | None = None,
) -> list[Tuned]:
    """Finds the fastest launch configuration for each kernel that `fn(*args)` runs on this device, and stores it.

    For one kernel after the other, it compiles `fn` with other configurations and times them in turns with the present
    one. It compares times of the whole of `fn`, so a call of a single operation is the most sensitive and the soonest
    done. A configuration is taken if it saves more than 2 % of that time in most of the rounds, and if its results
    differ from the present results by no more than rounding. The largest number of each array is the measure of that.
    A configuration that does not compile is left out.

    A configuration that is taken is stored at once, for this kind of device and these versions of JAX and jaxft, in
    `$XDG_CACHE_HOME/jaxft` (`~/.cache/jaxft`). From then on every call with these sizes uses it, in this process and in
    later ones. Sizes are rounded up to powers of two, except for depth and width of a dense layer. This process
    compiles its functions again, because `autotune` calls `jax.clear_caches()`. An interrupt keeps what was taken so
    far. To undo everything, delete that folder.

    Args:
      fn: the function to make faster: an operation, a gradient of it, or a whole model; with or without `jax.jit`. Bind
        what is no array with `functools.partial`.
      *args: arrays, or trees of arrays (a model, say, as `nnx.jit` takes it), for `fn`.
      table: the JSON file that stores the configurations, or None for the user's cache. Later calls read only the cache
        and the tables in `jaxft/tuned`, which `benchmarks/tune.py` writes.
      copies: the timed calls take turns with this many copies of `args`. With one, a short kernel finds its inputs in
        the GPU's L2 cache. If it reads them from memory in your program, let the copies exceed that cache.
      show_progress_bar: None shows the bar if stderr is a terminal.

    Returns:
      An entry for each kernel. If `after` equals `before`, nothing was faster.

    Raises:
      TypeError: `fn` is no function, something in `args` is no array, or `show_progress_bar` is no bool and not None.
      RuntimeError: this is no NVIDIA GPU.
      ValueError: `fn` runs no kernel of jaxft that has a configuration, or `copies` is not a positive integer.
      OSError: the table, or the cache directory, cannot be written.
    """
    if not callable(fn):
        raise TypeError(f"autotune: fn must be a function, got {type(fn).__name__}")
    if not isinstance(show_progress_bar, bool | None):
        raise TypeError(f"autotune: show_progress_bar must be None, True or False, got {show_progress_bar!r}")
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise ValueError(f"autotune: copies must be a positive integer, got {copies!r}")
    for number, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise TypeError(
                    f"autotune: args[{number}] must be arrays or trees of them, got {leaf!r}; bind what is no array "
                    "with functools.partial"
                )

    from tqdm import tqdm

    device = _device()
    file = cache.path(device.kind) if table is None else Path(table)
    cache.check_writable(file)
    args = jax.device_put(args)
    taken: dict[Entry, Any] = {}
    traced, asked = _trace(fn, args, taken)
    unit = COARSE_UNIT if _is_coarse(traced.jaxpr.jaxpr) else FULL_UNIT
    tried = {entry: candidates(entry[0], config, device, **sizes) for entry, (config, sizes) in asked.items()}
    results: list[Tuned] = []
    # None hides the bar where stderr is no terminal. A process that was started with stderr closed has none.
    hidden = sys.stderr is None or (None if show_progress_bar is None else not show_progress_bar)
    try:
        with tqdm(total=sum(map(len, tried.values())), desc="autotune", unit="config", disable=hidden) as bar:
            present = traced.lower().compile()
            sample = _sampler(present, [args, *(jax.tree.map(jnp.copy, args) for _ in range(1, copies))])
            # Gradients come first: the configuration for keys decides whether queries have a kernel of their own. An
            # implementation comes before the configurations that it looks up.
            while waiting := [entry for entry in reversed(asked) if entry in tried]:
                entry = next((entry for entry in waiting if entry[0] == "dense_implementation"), waiting[0])
                before = asked[entry][0]
                bar.set_postfix_str(entry[0])
                configs = tried.pop(entry)
                if not _matters(fn, args, taken, entry, before):
                    bar.update(len(configs))
                    continue
                others = _compile(fn, args, taken, entry, configs, bar.update)
                programs = _alike(entry, [Program(before, present), *others], args, unit)
                chosen, us_before, us_after = _race(programs, sample)
                if chosen.config != before:
                    taken[entry], present = chosen
                    cache.save(file, *entry, chosen.config)
                    if entry[0] == "dense_implementation":
                        known, asked = asked, _trace(fn, args, taken)[1]
                        for op, key in asked.keys() - known.keys():
                            config, sizes = asked[op, key]
                            tried[op, key] = candidates(op, config, device, **sizes)
                        bar.total = bar.n + sum(map(len, tried.values()))
                results.append(Tuned(*entry, before, chosen.config, us_before, us_after))
    finally:
        if taken:
            jax.clear_caches()  # functions that were traced with the earlier configurations
    if not results:
        raise ValueError("autotune: fn runs no kernel of jaxft with a configuration here; `jaxft info` lists them")
    return results


def _device() -> Device:
    device = dispatch.device()
    if device.platform != "cuda":
        raise RuntimeError(f"autotune: it needs an NVIDIA GPU to time kernels on, this is {device.kind}")
    return device


def _trace(fn: Function, args: Any, configs: Mapping[Entry, Any]) -> tuple[Any, dict[Entry, Any]]:
    """Traces `fn` with these configurations. Returns it with everything that it looked up."""
    trial = tuning_table.Trial(configs)
    with tuning_table.trial(trial):
        traced = jax.jit(lambda *args: fn(*args)).trace(*args)
    return traced, trial.asked


def text(traced: Any) -> str:
    """Returns a traced program as text: kernels, grids, warps and stages, without addresses of Python objects."""
    return re.sub("0x[0-9a-f]+", "", str(traced.jaxpr))


def _matters(fn: Function, args: Any, taken: Mapping[Entry, Any], entry: Entry, config: Any) -> bool:
    """Returns whether `fn` launches a kernel with this configuration. Ops look up gradients' configurations, too."""
    changes: dict[str, Any]
    if isinstance(config, DenseChoice):
        changes = {"implementation": "triton" if config.implementation == "xla" else "xla"}
    elif isinstance(config, MosaicDenseConfig):
        changes = {"group": config.group + 1}
    else:
        changes = {"num_warps": config.num_warps // 2 or 2}
    if isinstance(config, SplitConfig):  # with one split, the kernel is not launched
        changes["splits"] = config.splits + 1
    other = dataclasses.replace(config, **changes)
    present, changed = (_trace(fn, args, {**taken, entry: choice})[0] for choice in (config, other))
    return text(present) != text(changed)


def _compile(
    fn: Function, args: Any, taken: Mapping[Entry, Any], entry: Entry, configs: Sequence[Any], done: Callable[[], Any]
) -> list[Program]:
    """Compiles `fn` with each configuration. Leaves out those that fail and those that give the same program."""
    seen = {text(_trace(fn, args, taken)[0])}
    traced = {}
    for config in configs:
        try:
            program = _trace(fn, args, {**taken, entry: config})[0]
        except Exception as error:  # any kind: the kernel refuses the configuration
            logger.debug("%s with %s: %s", entry, config, error)
            done()
            continue
        program_text = text(program)
        if program_text in seen:
            done()
        else:
            seen.add(program_text)
            traced[config] = program

    def compiled(config: Any) -> Program | None:
        try:
            return Program(config, traced[config].lower().compile())
        except Exception as error:  # too much shared memory or too many registers
            logger.debug("%s with %s: %s", entry, config, error)
            return None
        finally:
            done()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [program for program in pool.map(compiled, traced) if program is not None]


def _is_coarse(jaxpr: Any) -> bool:
    """Returns whether the program or one of its kernels rounds anything to less than float32."""
    for equation in jaxpr.eqns:
        dtypes = [getattr(x.aval, "dtype", jnp.int32) for x in (*equation.invars, *equation.outvars)]
        if any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes):
            return True
        if equation.primitive.name == "wgmma_ref":  # Hopper's matrix units multiply float32 as TF32
            return True
        is_product = "precision" in equation.params and dtypes[0] == jnp.float32
        if is_product and dispatch.matmul_precision(equation.params["precision"]) == "tf32":
            return True
    return any(map(_is_coarse, subjaxprs(jaxpr)))


def _alike(entry: Entry, programs: Sequence[Program], args: Any, unit: float) -> list[Program]:
    """Returns the programs whose results equal the results of the first, apart from rounding."""
    wanted, alike = programs[0].call(*args), [programs[0]]
    for program in programs[1:]:
        try:
            same = bool(_same(wanted, program.call(*args), unit))
        except jax.errors.JaxRuntimeError as error:  # the device refuses to launch it
            logger.debug("%s with %s: %s", entry, program.config, error)
            continue
        if same:
            alike.append(program)
        else:
            logger.warning(
                "autotune: %s %s is left out with %s: its results differ from the results of %s by more than rounding",
                *entry, program.config, programs[0].config,
            )  # fmt: skip
    return alike


@functools.partial(jax.jit, static_argnums=2)
def _same(wanted: Any, got: Any, unit: float) -> jax.Array:
    """Returns whether two results are equal, apart from rounding."""
    same = jnp.bool_(True)
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        units = ROUNDING * max(float(jnp.finfo(x.dtype).eps), unit)
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        allowed = units * jnp.max(jnp.abs(x), initial=0.0, where=jnp.isfinite(x))
        equal = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
        same &= jnp.all(equal | (jnp.abs(x - y) <= allowed))
    return same


def _sampler(present: Function, sets: Sequence[Any]) -> Callable[[Program], float]:
    """Returns the timer: microseconds on the device of a call of a program. The calls take turns with the sets."""
    turn = itertools.cycle(sets)

    def call(function: Function) -> Callable[[], Any]:
        return lambda: function(*next(turn))

    nbytes = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(jax.block_until_ready(call(present)())))
    measure = _device_us
    us = _device_us(call(present), 3)
    if math.isnan(us):
        logger.warning("autotune: JAX's profiler gives no kernel times (is one running already?); using wall time")
        measure = profiler.queued_us
        us = profiler.queued_us(call(present), 3)
    calls = max(1, min(CALLS, int(SAMPLE_US / max(us, 1e-3)), BYTES // max(1, nbytes)))
    return lambda program: measure(call(program.call), calls)


def _device_us(call: Callable[[], Any], calls: int) -> float:
    """Returns `profiler.device_us`, or NaN if a profiler is running already."""
    try:
        return profiler.device_us(call, calls)
    except RuntimeError as error:
        logger.debug("profiler: %s", error)
        return math.nan


def _race(programs: Sequence[Program], sample: Callable[[Program], float]) -> tuple[Program, float, float]:
    """Returns the program to take, the time of the first (the present one), and the time of the one to take."""
    start = time.perf_counter()
    rough = np.min(profiler.turns(programs, 2, sample), axis=0)
    each = (time.perf_counter() - start) / (2 * len(programs))
    limit = ROUGHLY * np.nanmin(rough, initial=np.inf)
    programs = [p for p, us in zip(programs, rough, strict=True) if p is programs[0] or us <= limit]
    rounds = min(ROUNDS, max(LEAST_ROUNDS, int(SECONDS / (each * len(programs)))))
    times = profiler.turns(programs, rounds, sample)
    ratios = times / times[:, :1]  # of neighbours in time, so that a change of clock or temperature cancels
    saves = np.quantile(ratios, SHARE, axis=0) < 1 - MARGIN
    best = min(np.flatnonzero(saves), key=np.median(ratios, axis=0).__getitem__, default=0)
    us = np.median(times, axis=0)
    return programs[best], float(us[0]), float(us[best])


def candidates(op: str, present: Any, device: Device, **sizes: int) -> list[Any]:
    """Returns the configurations to compare with `present`, which is not among them.

    A family's list is the function `<op>_candidates`. It takes what it needs of the sizes in the key, and the device.
    """
    families = rows, layouts, attention, dense
    listed = next((getattr(m, f"{op}_candidates") for m in families if hasattr(m, f"{op}_candidates")), None)
    found = [] if listed is None else list(listed(device=device, **sizes))
    return [config for config in dict.fromkeys(found or _around(present)) if config != present]


def _around(present: Any) -> Iterable[Any]:
    """Returns the neighbours of a configuration for which there is no list: half and twice rows, programs, warps."""
    fields = dataclasses.asdict(present)
    names = [name for name in ("block_rows", "programs", "num_warps") if name in fields]
    for factors in itertools.product((1, 2, 0.5), repeat=len(names)):
        changed = {name: max(1, int(fields[name] * factor)) for name, factor in zip(names, factors, strict=True)}
        if changed.get("num_warps", 1) <= 32:
            yield dataclasses.replace(present, **changed)
