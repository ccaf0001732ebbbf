"""The search of `jaxft.tuning.autotune`: trace with other configs, compile, compare the results, time them in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import os
import re
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

# A config is taken where it saves more than this part of the time in this share of the rounds.
MARGIN, SHARE = 0.02, 0.8
LEAST_ROUNDS, ROUNDS, SECONDS = 5, 15, 20.0  # fewer than ROUNDS where they would take longer
ROUGHLY = 1.15  # what takes longer than so many times the fastest is left out after two rounds
SAMPLE_US, CALLS, BYTES = 5e3, 20, 2**30  # of a sample: its time, and at most so many calls and bytes of results
# Results may differ by so many units in the last place of the largest number. That of float32 is TF32's where products
# are, or anything has 16 bits, and else 8 of its own: sums in another order, with what layers after them make of it.
ROUNDING, COARSE_UNIT, FULL_UNIT = 16, 2.0**-10, 2.0**-20


class Program(NamedTuple):
    config: Any
    call: Function  # compiled


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `autotune` did for one kernel: its config and the time of the whole function, before and after."""

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
    show_progress_bar: bool | None = None,
) -> list[Tuned]:
    """Finds the fastest launch configuration for each kernel that `fn(*args)` runs on this device, and keeps it.

    For one kernel after the other, it compiles `fn` with other configurations and times them in turns with the present
    one. What counts is the time of all of `fn`, so a call of a single operation is the most sensitive and the soonest
    done. A configuration is taken if it saves more than 2 % of that time in most of the rounds, and if its results
    differ from the present ones by no more than rounding does, beside the largest number of each array; one that does
    not compile is left out.

    Those that are taken are stored at once, for this kind of device and these versions of JAX and jaxft, in
    `$XDG_CACHE_HOME/jaxft` (`~/.cache/jaxft`). From then on every call with these sizes, rounded up to powers of two
    (but for depth and width of a dense layer), finds them, in this process (`jax.clear_caches()` is called, so what was
    compiled before is compiled once more) and in later ones. An interrupt keeps what was taken so far. To undo it all,
    delete that folder.

    Args:
      fn: what is to be fast: an operation, a gradient of it, or a whole model; with or without `jax.jit`. Bind what is
        no array with `functools.partial`.
      *args: arrays, or trees of them (a model, say, as `nnx.jit` takes it), for `fn`.
      table: the JSON file that stores the configurations; None for the user's cache. Only the cache is read again by
        later calls, and the tables in `jaxft/tuned`, which `benchmarks/tune.py` writes.
      show_progress_bar: None for where stderr is a terminal.

    Returns:
      An entry for each kernel; where its `after` is its `before`, nothing was faster.

    Raises:
      TypeError: `fn` is no function, there is something else than arrays in `args`, or `show_progress_bar` is neither
        None nor a bool.
      RuntimeError: this is no NVIDIA GPU.
      ValueError: `fn` runs no kernel of jaxft that has a configuration.
      OSError: the table, or the cache directory, cannot be written.
    """
    if not callable(fn):
        raise TypeError(f"autotune: fn must be a function, got {type(fn).__name__}")
    if not isinstance(show_progress_bar, bool | None):
        raise TypeError(f"autotune: show_progress_bar must be None, True or False, got {show_progress_bar!r}")
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
    tried = _candidates(asked, device)
    results: list[Tuned] = []
    hidden = None if show_progress_bar is None else not show_progress_bar  # None: where stderr is no terminal
    try:
        with tqdm(total=sum(map(len, tried.values())), desc="autotune", unit="config", disable=hidden) as bar:
            present = traced.lower().compile()
            sample = _sampler(present, args)
            # Gradients come first: whether that of queries has a kernel of its own depends on the config of the other.
            # And an implementation before the configs that it asks for.
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
                        tried |= _candidates({entry: asked[entry] for entry in asked.keys() - known.keys()}, device)
                        bar.total = bar.n + sum(map(len, tried.values()))
                results.append(Tuned(*entry, before, chosen.config, us_before, us_after))
    finally:
        if taken:
            jax.clear_caches()  # of what was traced with the configs before
    if not results:
        raise ValueError("autotune: fn runs no kernel of jaxft with a configuration here; `jaxft info` lists them")
    return results


def _device() -> Device:
    device = dispatch.device()
    if device.platform != "cuda":
        raise RuntimeError(f"autotune: it needs an NVIDIA GPU to time kernels on, this is {device.kind}")
    return device


def _trace(fn: Function, args: Any, configs: Mapping[Entry, Any]) -> tuple[Any, dict[Entry, Any]]:
    """`fn` traced with these configs, and what it asked `table.lookup` for."""
    trial = tuning_table.Trial(configs)
    with tuning_table.trial(trial):
        traced = jax.jit(lambda *args: fn(*args)).trace(*args)
    return traced, trial.asked


def _candidates(asked: Mapping[Entry, tuple[Any, dict[str, int]]], device: Device) -> dict[Entry, list[Any]]:
    return {(op, key): candidates(op, config, device, **sizes) for (op, key), (config, sizes) in asked.items()}


def _text(traced: Any) -> str:
    """The program with the code of its kernels, their grids, warps and stages; without addresses of Python objects."""
    return re.sub("0x[0-9a-f]+", "", str(traced.jaxpr))


def _matters(fn: Function, args: Any, taken: Mapping[Entry, Any], entry: Entry, config: Any) -> bool:
    """Whether `fn` launches a kernel with this config: ops ask for those of gradients, too, before they know."""
    if isinstance(config, DenseChoice):
        return True
    if isinstance(config, MosaicDenseConfig):
        changes = {"group": config.group + 1}
    else:
        changes = {"num_warps": config.num_warps // 2 or 2}
    if isinstance(config, SplitConfig):  # where that is 1, it is not launched
        changes["splits"] = config.splits + 1
    other = dataclasses.replace(config, **changes)
    present, changed = (_trace(fn, args, {**taken, entry: choice})[0] for choice in (config, other))
    return _text(present) != _text(changed)


def _compile(
    fn: Function, args: Any, taken: Mapping[Entry, Any], entry: Entry, configs: Sequence[Any], done: Callable[[], Any]
) -> list[Program]:
    """`fn` with each of the configs, but for those with which it does not compile or is the same as with another."""
    seen = {_text(_trace(fn, args, taken)[0])}
    traced = {}
    for config in configs:
        try:
            program = _trace(fn, args, {**taken, entry: config})[0]
        except Exception as error:  # of whatever kind: the kernel says that it cannot
            logger.debug("%s with %s: %s", entry, config, error)
            done()
            continue
        text = _text(program)
        if text in seen:
            done()
        else:
            seen.add(text)
            traced[config] = program

    def compiled(config: Any) -> Program | None:
        try:
            return Program(config, traced[config].lower().compile())
        except Exception as error:  # it needs more shared memory or registers than there are
            logger.debug("%s with %s: %s", entry, config, error)
            return None
        finally:
            done()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [program for program in pool.map(compiled, traced) if program is not None]


def _is_coarse(jaxpr: Any) -> bool:
    """Whether anything in the program, its kernels included, is rounded to less than float32."""
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
    """Those whose results are those of the first, but for rounding."""
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
                "autotune: %s %s is left out with %s: its results differ from those of %s by more than rounding",
                *entry, program.config, programs[0].config,
            )  # fmt: skip
    return alike


@functools.partial(jax.jit, static_argnums=2)
def _same(wanted: Any, got: Any, unit: float) -> jax.Array:
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


def _sampler(present: Function, args: Any) -> Callable[[Program], float]:
    """What gives the microseconds that a call of a program takes on the device."""
    nbytes = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(present(*args)))
    measure = _device_us
    us = _device_us(present, args, 3)
    if math.isnan(us):
        logger.warning(
            "autotune: no kernel times from JAX's profiler (is one at work already?), so wall time has to do"
        )
        measure = _queued_us
        us = _queued_us(present, args, 3)
    calls = max(1, min(CALLS, int(SAMPLE_US / max(us, 1e-3)), BYTES // max(1, nbytes)))
    return lambda program: measure(program.call, args, calls)


def _device_us(call: Function, args: Any, calls: int) -> float:
    """How long each of so many calls keeps the GPU busy; NaN where JAX's profiler does not say."""
    try:
        kernels = profiler.kernel_times(lambda: [call(*args) for _ in range(calls)])
    except RuntimeError as error:
        logger.debug("profiler: %s", error)
        kernels = []
    return profiler.busy_us(kernels) / calls if kernels else math.nan


def _queued_us(call: Function, args: Any, calls: int) -> float:
    """Wall time of each of so many calls in a row."""
    jax.block_until_ready(call(*args))
    start = time.perf_counter()
    for _ in range(calls):
        out = call(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls * 1e6


def _race(programs: Sequence[Program], sample: Callable[[Program], float]) -> tuple[Program, float, float]:
    """The program to take, the first being the present one, with the time of that and of this."""
    start = time.perf_counter()
    rough = np.min(_turns(programs, 2, sample), axis=0)
    each = (time.perf_counter() - start) / (2 * len(programs))
    limit = ROUGHLY * np.nanmin(rough, initial=np.inf)
    programs = [p for p, us in zip(programs, rough, strict=True) if p is programs[0] or us <= limit]
    rounds = min(ROUNDS, max(LEAST_ROUNDS, int(SECONDS / (each * len(programs)))))
    times = _turns(programs, rounds, sample)
    ratios = times / times[:, :1]  # of neighbours in time, which a change of clock or temperature leaves as they are
    saves = np.quantile(ratios, SHARE, axis=0) < 1 - MARGIN
    best = min(np.flatnonzero(saves), key=np.median(ratios, axis=0).__getitem__, default=0)
    us = np.median(times, axis=0)
    return programs[best], float(us[0]), float(us[best])


def _turns(programs: Sequence[Program], rounds: int, sample: Callable[[Program], float]) -> np.ndarray:
    """Microseconds [rounds, programs]; every other round goes backwards, so that nobody always comes after the same."""
    times = np.empty((rounds, len(programs)))
    for i in range(rounds):
        for j in range(len(programs))[:: -1 if i % 2 else 1]:
            times[i, j] = sample(programs[j])
    return times


_CANDIDATES: dict[str, Callable[..., Iterable[Any]]] = {
    "layer_norm": rows.layer_norm_candidates,
    "layer_norm_backward": rows.layer_norm_backward_candidates,
    "softmax": rows.softmax_candidates,
    "softmax_backward": rows.softmax_backward_candidates,
    "bias_activation": rows.bias_activation_candidates,
    "bias_activation_backward": rows.bias_activation_backward_candidates,
    "permute": layouts.permute_candidates,
    "qkv_bias_split_heads": layouts.qkv_bias_split_heads_candidates,
    "qkv_bias_split_heads_backward": layouts.qkv_bias_split_heads_backward_candidates,
    "attention": attention.attention_candidates,
    "attention_dq": attention.attention_dq_candidates,
    "attention_dkv": attention.attention_dkv_candidates,
    "dense_implementation": dense.dense_implementation_candidates,
    "dense": dense.dense_candidates,
    "dense_split": dense.dense_split_candidates,
    "dense_mosaic": dense.dense_mosaic_candidates,
    "dense_mosaic_gradient": dense.dense_mosaic_gradient_candidates,
}


def candidates(op: str, present: Any, device: Device, **sizes: int) -> list[Any]:
    """The configs to compare with `present`, which is not among them."""
    found = list(_CANDIDATES[op](device=device, **sizes)) if op in _CANDIDATES else []
    return [config for config in dict.fromkeys(found or _around(present)) if config != present]


def _around(present: Any) -> Iterable[Any]:
    """Where there is no list for the op, or none for these sizes: half and twice of the rows, programs and warps."""
    fields = dataclasses.asdict(present)
    names = [name for name in ("block_rows", "programs", "num_warps") if name in fields]
    for factors in itertools.product((1, 2, 0.5), repeat=len(names)):
        changed = {name: max(1, int(fields[name] * factor)) for name, factor in zip(names, factors, strict=True)}
        if changed.get("num_warps", 1) <= 32:
            yield dataclasses.replace(present, **changed)
