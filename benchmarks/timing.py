"""Shared parts of the benchmarks: correctness before speed, timers, rows in a CSV file, and a table on the terminal.

Metrics, in microseconds per call:

- `device_us`: the time during which at least one of the call's kernels runs on the GPU, from JAX's profiler. Gaps
  between kernels, and copies that are no kernel (cudaMemcpy), are not in it.
- `queued_us`: wall time per call, with many calls queued and then one wait. A loop sees this time.
- `blocking_us`: wall time of a call and the wait for its result, where `measure` is asked for the latency.

The variants of a case take turns in one process, so that a change of clock or temperature affects all of them alike.
"""

import argparse
import csv
import datetime
import itertools
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxft import atomic
from jaxft.tuning import profiler

RESULTS = Path(__file__).resolve().parent / "results"
KEY = ("op", "implementation", "direction", "shape", "dtype", "metric")
COLUMNS = (*KEY, "p20", "p50", "p80", "rate", "unit", "jax", "commit", "date", "note")
L2_BYTES = 60e6  # H100 and H200: 50 and 60 MB, the largest of today's cards
DEVICE_CALLS = 20  # results of one sample of `device_us` that are held at once

Row = dict[str, str]
# A jitted or compiled function, and the argument tuples that its calls take turns with.
Variant = tuple[jax.stages.Wrapped | jax.stages.Compiled, Sequence[tuple[Any, ...]]]
Call = Callable[[], Any]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller half of the shapes, fewer repeats")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV is (%(default)s)")
    return parser


def rotation(nbytes: float) -> int:
    """Returns how many sets of inputs of `nbytes` keep every call from finding its inputs in the L2 cache."""
    return max(1, math.ceil(2 * L2_BYTES / nbytes)) if jax.default_backend() == "gpu" else 1


def check(name: str, got: jax.Array, plain: jax.Array, exact: jax.Array) -> None:
    """Exits if the error of `got` exceeds twice the error of `plain` plus 2 ulp. `exact` has a wider dtype."""
    wide = exact.astype(jnp.float32)
    allowed = 2 * jnp.max(jnp.abs(plain.astype(jnp.float32) - wide))
    allowed += 2 * float(jnp.finfo(got.dtype).eps) * jnp.max(jnp.abs(wide))
    error = jnp.max(jnp.abs(got.astype(jnp.float32) - wide))
    if not error <= allowed:  # also when it is NaN
        raise SystemExit(f"{name}: error {error:.3g} is above {allowed:.3g}, twice plain jnp's error; nothing is timed")


def float64(f: Callable[..., Any], *inputs: Any) -> Any:
    """Returns the result of `f` for inputs whose float arrays are widened to float64, as float32."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs)
        return jax.tree.map(lambda y: y.astype("float32"), f(*wide))


def check_all(name: str, ours: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Checks every array of `ours(*inputs)` against float64, because long sums of float32 err too."""
    results = (ours(*inputs), plain(*inputs), float64(plain, *inputs))
    for leaves in zip(*map(jax.tree.leaves, results), strict=True):
        check(name, *leaves)


def compile_all(
    programs: Iterable[tuple[jax.stages.Lowered, dict[str, Any] | None]],
) -> list[jax.stages.Compiled]:
    """Compiles programs in parallel, each with its options, while later ones are lowered.

    XLA locks the GPU while its autotuning measures. A jitted function that was lowered, and is called later, finds the
    program that was compiled without options.
    """
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda program: program[0].compile(program[1]), programs))


def measure(
    variants: Mapping[str, Variant],
    *,
    work: float,
    unit: str,
    args: argparse.Namespace,
    latency: bool = False,
    **key: str | Sequence[int],
) -> list[Row]:
    """Times the variants of one case, adds the rows to the CSV at once, and returns them.

    Args:
      variants: what to time, by the name of the implementation.
      work: bytes or FLOP of a call. Divided by the median time it gives the rate.
      unit: unit of the rate, as "TB/s".
      args: the command line's.
      latency: whether to measure `blocking_us` too.
      **key: op, direction, shape and dtype.

    Returns:
      The rows.
    """
    rounds = 5 if args.quick else 9
    calls = {name: rotating(*variant) for name, variant in variants.items()}
    repeats = {name: _calibrate(calls[name], len(sets)) for name, (_, sets) in variants.items()}
    samplers: dict[str, Callable[[str], float]] = {
        "queued_us": lambda name: profiler.queued_us(calls[name], repeats[name])
    }
    if latency:
        samplers["blocking_us"] = lambda name: float(
            np.mean([profiler.queued_us(calls[name], 1) for _ in range(repeats[name])])
        )
    if jax.default_backend() == "gpu":
        samplers["device_us"] = lambda name: profiler.device_us(calls[name], min(repeats[name], DEVICE_CALLS))
    samples: dict[tuple[str, str], Sequence[float]] = {}
    for metric, sample in samplers.items():
        # Kernel times differ little between rounds.
        times = profiler.turns([*calls], 5 if metric == "device_us" else rounds, sample)
        samples |= {(name, metric): column.tolist() for name, column in zip(calls, times.T, strict=True)}
    return as_rows(samples, work, unit, args, **key)


def rotating(f: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Call:
    """Returns a function without arguments. Each call runs `f` with the next of the sets."""
    turn = itertools.cycle(sets)
    return lambda: f(*next(turn))


def as_rows(
    samples: Mapping[tuple[str, str], Sequence[float]], work: float, unit: str, args: argparse.Namespace,
    **key: str | Sequence[int],
) -> list[Row]:  # fmt: skip
    """Makes rows of the samples of each (implementation, metric), and adds them to the CSV at once."""
    # A memcpy is no kernel and has no device time.
    measured = {names: values for names, values in samples.items() if any(values) and np.isfinite(values).all()}
    source = origin()
    rows = [as_row(key, *names, values, work, unit) | source for names, values in measured.items()]
    write_rows(rows, args.out)
    return rows


def as_row(
    key: Mapping[str, str | Sequence[int]], implementation: str, metric: str, values: Sequence[float], work: float,
    unit: str, note: str = "",
) -> Row:  # fmt: skip
    """Makes a row of samples in microseconds, without the columns of `origin`. `key`: op, direction, shape, dtype."""
    p20, p50, p80 = np.percentile(values, (20, 50, 80))
    return {
        **{name: value if isinstance(value, str) else "x".join(map(str, value)) for name, value in key.items()},
        "implementation": implementation, "metric": metric, "p20": f"{p20:.2f}", "p50": f"{p50:.2f}",
        "p80": f"{p80:.2f}", "rate": f"{work / p50 / 1e6:.4g}", "unit": unit, "note": note,
    }  # fmt: skip


def copies(nbytes: float, buffers: int | None = None) -> dict[str, Variant]:
    """Returns copies that read and write `nbytes` in all: the ceiling of every kernel that is bound by memory.

    They take turns with that many buffers, or, with None, with enough buffers to exceed the L2 cache.
    """
    block = 4096
    size = max(1, round(nbytes / 8 / block)) * block  # of float32, read once and written once
    inputs = [(jnp.full(size, i, jnp.float32),) for i in range(buffers or rotation(4 * size))]
    variants: dict[str, Variant] = {"copy (memcpy)": (jax.jit(jnp.copy), inputs)}
    if jax.default_backend() == "gpu":
        spec = pl.BlockSpec((block,), lambda i: (i,))
        variants["copy"] = (jax.jit(pl.pallas_call(
            _copy_kernel, out_shape=jax.ShapeDtypeStruct((size,), jnp.float32), grid=(size // block,), in_specs=[spec],
            out_specs=spec, compiler_params=plgpu.CompilerParams(num_warps=8),
        )), inputs)  # fmt: skip
    return variants


def _copy_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...]


def _calibrate(call: Call, sets: int) -> int:
    """Compiles, warms up, and returns how many calls take about 20 ms, at least ten and at most 1,000.

    The device waits for the first call, which takes the host 5 ms for a training step.
    """
    for _ in range(sets):
        jax.block_until_ready(call())
    return max(10, min(1000, math.ceil(2e4 / profiler.queued_us(call, 3))))


def queued_us(variant: Variant, repeats: int) -> float:
    """Returns the wall time per call of a variant, with calls queued."""
    return profiler.queued_us(rotating(*variant), repeats)


def kernel_times(variant: Variant, repeats: int = 1) -> list[profiler.Kernel]:
    """Returns the kernels that `repeats` calls launch on the GPU."""
    call = rotating(*variant)
    return profiler.kernel_times(lambda: [call() for _ in range(repeats)])


def newest(rows: Iterable[Row]) -> list[Row]:
    """Returns the newest row of each case, in the place of the case's first row.

    Rows are of the same case if the columns of `KEY` are the same. The newest row has the latest date, and is the last
    of those.
    """
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(row[column] for column in KEY)
        if key not in found or row["date"] >= found[key]["date"]:
            found[key] = row
    return list(found.values())


def read_rows(path: Path) -> list[Row]:
    """Reads a results file. Columns that it does not have are empty."""
    with path.open(newline="") as file:
        return [{**dict.fromkeys(COLUMNS, ""), **row} for row in csv.DictReader(file)]


def write_rows(rows: Iterable[Row], folder: Path, kind: str | None = None) -> None:
    """Adds `rows` to `folder/<device kind>.csv`, in place of the rows of the same cases.

    `kind` is the device that was measured, or None for JAX's default device. A reader sees the file before or after.
    """
    path = folder / f"{(kind or jax.devices()[0].device_kind).replace(' ', '_')}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    rows = newest([*(read_rows(path) if path.exists() else ()), *rows])
    with atomic.replacing(path) as (new,), new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[Row], *, ours: str = "jaxft", metric: str | None = None) -> list[list[str]]:
    """Returns a header and a line for each case: the median time of each implementation.

    Two more columns divide the time of the fastest peer, and the time of a copy, by the time of `ours`.
    """
    if metric is None:
        metric = "device_us" if any(row["metric"] == "device_us" for row in rows) else "queued_us"
    rows = [row for row in rows if row["metric"] == metric]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    names.sort(key=lambda name: not name.startswith(ours))
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        direction = "" if row["direction"] == "forward" else f", {row['direction']}"
        case = (row["op"] + direction, row["shape"], row["dtype"])
        cases.setdefault(case, {})[row["implementation"]] = row
    copied = any(name.startswith("copy") for name in names)
    lines = [["op", "shape", "dtype", *names, "speedup", *["share of copy"] * copied]]
    for case, by_name in cases.items():
        p50 = {name: us for name, row in by_name.items() if not math.isnan(us := float(row["p50"]))}
        copy = min((us for name, us in p50.items() if name.startswith("copy")), default=math.nan)
        peers = {name: us for name, us in p50.items() if name != ours and not name.startswith("copy")}
        # Without peers, jaxft in another way ("jaxft, padded") is its own peer.
        others = [us for name, us in peers.items() if not name.startswith(f"{ours}, ")]
        peer = min(others or peers.values(), default=math.nan)
        own = p50.get(ours, math.nan)
        cells = [by_name[n]["p50"] if n in p50 else "failed" if n in by_name else "-" for n in names]
        speedup = "-" if math.isnan(peer / own) else f"{peer / own:.2f}x"
        share = "-" if math.isnan(copy / own) else f"{copy / own:.0%}"
        lines.append([*case, *cells, speedup, *[share] * copied])
    return lines


def print_tables(rows: Sequence[Row]) -> None:
    """Prints a table for each metric."""
    if not rows:
        raise SystemExit("no case was measured: no name contains what --only says")
    for metric in sorted({row["metric"] for row in rows}):
        lines = table(rows, metric=metric)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{metric}, median of each implementation on {jax.devices()[0].device_kind}")
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def origin() -> dict[str, str]:
    """Returns the columns that say where a row is from."""
    return {"jax": jax.__version__, "commit": _commit(), "date": datetime.date.today().isoformat()}


def _commit() -> str:
    """Returns the measured commit: $JAXFT_COMMIT, or git's answer, or "unknown"."""
    if commit := os.environ.get("JAXFT_COMMIT"):
        return commit
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
