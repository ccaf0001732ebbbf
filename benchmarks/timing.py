"""What the benchmarks share: correctness before speed, two ways of timing, rows in a CSV, a table on the terminal.

Metrics, in microseconds per call:

- `device_us`: how long one or more of the call's kernels are on the GPU, from JAX's profiler. Gaps between kernels, and
  copies that are no kernel (cudaMemcpy), are not in it. (Rows from before commit a358cbd have the sum of the kernels'
  times, which counts overlaps twice: 506 us for 429 of XLA's encoder of 1x128, 327 for 312 of jaxft's.)
- `queued_us`: wall time per call with many calls dispatched back to back, then one wait. This is what a loop sees.
- `blocking_us`: wall time of a call and the wait for its result, where `measure` is asked for the latency.

The variants of a case take turns in one process, so that a change of clock or temperature meets all of them.
"""

import argparse
import csv
import datetime
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxft.tuning import profiler as tuning_profiler

RESULTS = Path(__file__).resolve().parent / "results"
KEY = ("op", "implementation", "direction", "shape", "dtype", "metric")
COLUMNS = (*KEY, "p20", "p50", "p80", "rate", "unit", "jax", "commit", "date")
L2_BYTES = 60e6  # of an H100 or H200, the largest of today's cards

Row = dict[str, str]
# A jitted or compiled function and the argument tuples it is called with in turn.
Variant = tuple[jax.stages.Wrapped | jax.stages.Compiled, Sequence[tuple[Any, ...]]]


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller half of the shapes, fewer repeats")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV is (%(default)s)")
    return parser


def rotation(nbytes: float) -> int:
    """How many sets of inputs of `nbytes` to rotate through so that no call finds its inputs in the L2 cache."""
    return max(1, math.ceil(2 * L2_BYTES / nbytes)) if jax.default_backend() == "gpu" else 1


def check(name: str, got: jax.Array, plain: jax.Array, exact: jax.Array) -> None:
    """The error of `got` against `exact`, of a wider dtype, must be within 2x that of `plain` plus 2 ulp."""
    wide = exact.astype(jnp.float32)
    allowed = 2 * jnp.max(jnp.abs(plain.astype(jnp.float32) - wide))
    allowed += 2 * float(jnp.finfo(got.dtype).eps) * jnp.max(jnp.abs(wide))
    error = jnp.max(jnp.abs(got.astype(jnp.float32) - wide))
    if not error <= allowed:  # also when it is NaN
        raise SystemExit(f"{name}: error {error:.3g} is above {allowed:.3g}, twice that of plain jnp; nothing is timed")


def float64(f: Callable[..., Any], *inputs: Any) -> Any:
    """What `f` gives for inputs whose float arrays are widened to float64, as float32."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs)
        return jax.tree.map(lambda y: y.astype("float32"), f(*wide))


def check_all(name: str, ours: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """`check` of every array that `ours(*inputs)` gives, against float64: long sums of float32 err too."""
    results = (ours(*inputs), plain(*inputs), float64(plain, *inputs))
    for leaves in zip(*map(jax.tree.leaves, results), strict=True):
        check(name, *leaves)


def compile_all(
    programs: Iterable[tuple[jax.stages.Lowered, dict[str, Any] | None]],
) -> list[jax.stages.Compiled]:
    """Compiles programs at the same time, each with its options; later ones are lowered meanwhile.

    XLA locks the GPU for what its autotuning measures. A jitted function that was lowered, and is called later, finds
    the program that was compiled without options.
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

    `work` (bytes or FLOP per call) over the median time gives `rate` in `unit`; `args` are the command line's; `key`
    holds op, direction, shape and dtype.
    """
    rounds = 5 if args.quick else 9
    metrics = {"queued_us": queued_us}
    metrics |= {"blocking_us": _blocking_us} if latency else {}
    metrics |= {"device_us": device_us} if jax.default_backend() == "gpu" else {}
    repeats = {name: _calibrate(variant) for name, variant in variants.items()}
    samples: dict[tuple[str, str], list[float]] = {}
    turns = list(variants.items())[::-1]
    for metric, sample in metrics.items():
        for _ in range(5 if metric == "device_us" else rounds):  # times of kernels differ little between rounds
            turns.reverse()  # so that nobody always comes after the same one
            for name, variant in turns:
                samples.setdefault((name, metric), []).append(sample(variant, repeats[name]))
    return as_rows(samples, work, unit, args, **key)


def as_rows(
    samples: Mapping[tuple[str, str], Sequence[float]], work: float, unit: str, args: argparse.Namespace,
    **key: str | Sequence[int],
) -> list[Row]:  # fmt: skip
    """Rows of the samples of each (implementation, metric), in microseconds, which are added to the CSV at once."""
    fixed = {k: v if isinstance(v, str) else "x".join(map(str, v)) for k, v in key.items()}
    rows, source = [], origin()
    for (name, metric), values in samples.items():
        if not any(values):  # a memcpy is no kernel
            continue
        p20, p50, p80 = np.percentile(values, (20, 50, 80))
        times = {"p20": f"{p20:.2f}", "p50": f"{p50:.2f}", "p80": f"{p80:.2f}"}
        rate = {"rate": f"{work / p50 / 1e6:.4g}", "unit": unit}  # work per us -> 10^12 per s
        rows.append({**fixed, "implementation": name, "metric": metric, **times, **rate, **source})
    write_rows(rows, args.out)
    return rows


def copies(nbytes: float, buffers: int | None = None) -> dict[str, Variant]:
    """Copies that read and write `nbytes` in all: the ceiling of every kernel that is bound by memory.

    Of so many buffers in turn; None for too many for the L2 cache.
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


def _calibrate(variant: Variant) -> int:
    """Compiles, warms up, and returns how many calls take about 20 ms.

    At least ten: the device waits for the first, which for a training step takes the host 5 ms.
    """
    f, inputs = variant
    for args in inputs:
        jax.block_until_ready(f(*args))
    return max(10, min(1000, math.ceil(2e4 / queued_us(variant, 3))))


def queued_us(variant: Variant, repeats: int) -> float:
    f, inputs = variant
    start = time.perf_counter()
    for i in range(repeats):
        out = f(*inputs[i % len(inputs)])
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats * 1e6


def _blocking_us(variant: Variant, repeats: int) -> float:
    f, inputs = variant
    start = time.perf_counter()
    for i in range(repeats):
        jax.block_until_ready(f(*inputs[i % len(inputs)]))
    return (time.perf_counter() - start) / repeats * 1e6


def device_us(variant: Variant, repeats: int) -> float:
    """How long a call keeps the GPU busy; the mean of `repeats` calls (at most 20, whose results are held at once)."""
    repeats = min(repeats, 20)
    return tuning_profiler.busy_us(kernel_times(variant, repeats)) / repeats


def kernel_times(variant: Variant, repeats: int = 1) -> list[tuning_profiler.Kernel]:
    """The kernels that `repeats` calls launch on the GPU."""
    f, inputs = variant
    return tuning_profiler.kernel_times(lambda: [f(*inputs[i % len(inputs)]) for i in range(repeats)])


def write_rows(rows: Iterable[Row], folder: Path) -> None:
    """Appends `rows` to `folder/<device kind>.csv`."""
    path = folder / f"{jax.devices()[0].device_kind.replace(' ', '_')}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[Row], *, ours: str = "jaxft", metric: str | None = None) -> list[list[str]]:
    """A header, then a line per case: median us of each implementation; the best peer's and a copy's over `ours`."""
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
        p50 = {name: float(row["p50"]) for name, row in by_name.items()}
        copy = min((us for name, us in p50.items() if name.startswith("copy")), default=math.nan)
        peers = {name: us for name, us in p50.items() if name != ours and not name.startswith("copy")}
        # Where there are no others, jaxft in another way, as "jaxft, padded", is its own peer.
        others = [us for name, us in peers.items() if not name.startswith(f"{ours}, ")]
        peer = min(others or peers.values(), default=math.nan)
        own = p50.get(ours, math.nan)
        cells = [by_name[name]["p50"] if name in by_name else "-" for name in names]
        speedup = "-" if math.isnan(peer / own) else f"{peer / own:.2f}x"
        share = "-" if math.isnan(copy / own) else f"{copy / own:.0%}"
        lines.append([*case, *cells, speedup, *[share] * copied])
    return lines


def print_tables(rows: Sequence[Row]) -> None:
    """One table per metric."""
    if not rows:
        raise SystemExit("no case was measured: none has in its name what --only says")
    for metric in sorted({row["metric"] for row in rows}):
        lines = table(rows, metric=metric)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{metric}, median of each implementation on {jax.devices()[0].device_kind}")
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def origin() -> dict[str, str]:
    """What the rows of a results file say about where they are from."""
    return {"jax": jax.__version__, "commit": _commit(), "date": datetime.date.today().isoformat()}


def _commit() -> str:
    """The commit measured: $JAXFT_COMMIT, or git's answer, or "unknown"."""
    if commit := os.environ.get("JAXFT_COMMIT"):
        return commit
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
