"""The search of `jaxft.tuning.autotune`: trace with other configs, compile, compare the results, time them in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import subjaxprs

from jaxft import dispatch, tuning, tuning_store, tuning_timing
from jaxft.tuning_candidates import candidates
from jaxft.tuning_dense import DenseChoice, MosaicDenseConfig, SplitConfig

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


def autotune(fn: Function, *args: Any, show_progress_bar: bool | None) -> list[tuning.Tuned]:
    """See `jaxft.tuning.autotune`."""
    from tqdm import tqdm

    kind = _device_kind()
    tuning_store.check_writable(kind)
    args = jax.device_put(args)
    taken: dict[Entry, Any] = {}
    traced, asked = _trace(fn, args, taken)
    unit = COARSE_UNIT if _is_coarse(traced.jaxpr.jaxpr) else FULL_UNIT
    tried = _candidates(asked)
    results: list[tuning.Tuned] = []
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
                    tuning_store.save(kind, *entry, chosen.config)
                    if entry[0] == "dense_implementation":
                        known, asked = asked, _trace(fn, args, taken)[1]
                        tried |= _candidates({entry: asked[entry] for entry in asked.keys() - known.keys()})
                        bar.total = bar.n + sum(map(len, tried.values()))
                results.append(tuning.Tuned(*entry, before, chosen.config, us_before, us_after))
    finally:
        if taken:
            jax.clear_caches()  # of what was traced with the configs before
    if not results:
        raise ValueError("autotune: fn runs no kernel of jaxft with a configuration here; `jaxft info` lists them")
    return results


def _device_kind() -> str:
    device = dispatch.device()
    if device.platform != "cuda":
        raise RuntimeError(f"autotune: it needs an NVIDIA GPU to time kernels on, this is {device.kind}")
    return device.kind


def _trace(fn: Function, args: Any, configs: Mapping[Entry, Any]) -> tuple[Any, dict[Entry, Any]]:
    """`fn` traced with these configs, and what it asked `tuning.lookup` for."""
    trial = tuning.Trial(configs)
    with tuning.trial(trial):
        traced = jax.jit(lambda *args: fn(*args)).trace(*args)
    return traced, trial.asked


def _candidates(asked: Mapping[Entry, tuple[Any, dict[str, int]]]) -> dict[Entry, list[Any]]:
    return {(op, key): candidates(op, config, **sizes) for (op, key), (config, sizes) in asked.items()}


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
        kernels = tuning_timing.kernel_times(lambda: [call(*args) for _ in range(calls)])
    except RuntimeError as error:
        logger.debug("profiler: %s", error)
        kernels = []
    return tuning_timing.busy_us(kernels) / calls if kernels else math.nan


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
