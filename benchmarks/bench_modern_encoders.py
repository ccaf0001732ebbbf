"""Modern encoders from ids to hidden states: jaxft beside plain JAX and transformers, in bfloat16.

Each model is made with random weights and written to a folder, from which transformers loads it. jaxft and plain JAX
(`plain_encoders.py`) take turns in one process. transformers runs in another one, with its fastest attention, without
and with torch.compile. Numbers are compared before anything is timed: jaxft's error, against float32, with twice the
error of plain JAX, and transformers' first sequence with jaxft's. What fails has a row that says why.

Training steps, the value and gradients of all parameters, run beside plain JAX alone. Their value is the sum of the
last hidden states times random weights.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bench_peers
import shapes
from bench_peers import NOT_DONE, RESULTS, Job

# As in `bench_peers.py`, the process that measures PyTorch does not import JAX.

SECONDS, LEAST_SECONDS = 560, 10
COMPILED = "torch.compile"
TORCH = ("transformers", COMPILED)


def measure_jax(job: Job, cases: Sequence[shapes.Modern], args: argparse.Namespace, out: Path) -> None:
    """Writes the model and the inputs, measures jaxft and plain JAX, and writes the rows."""
    import jax

    import plain_encoders

    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "done": []}
    write(out, found)
    plain_encoders.random_model(job.name).save_pretrained(job.work / job.name)
    for case in cases:
        ids, lengths = plain_encoders.inputs(case)
        arrays: dict[str, Any] = {"ids": ids} | ({} if lengths is None else {"lengths": lengths})
        np.savez(job.work / f"{case.label}.npz", **arrays)
    for case in plain_encoders.measure(job, cases, args):
        found["done"].append(case.label)
        write(out, found)


def measure_torch(job: Job, cases: Sequence[shapes.Modern], args: argparse.Namespace, out: Path) -> None:
    """Measures transformers. Writes JSON to `out` after each result, so that a later failure loses none."""
    import peers

    library = peers.TransformersModel()
    found: dict[str, Any] = {"lines": []}

    def add(case: shapes.Modern, name: str, result: tuple[list[float], str] | Exception) -> None:
        line: dict[str, Any] = {"label": case.label, "name": name}
        if isinstance(result, Exception):
            line["error"] = f"{type(result).__name__}: {' '.join(str(result).split())[:200]}"
        else:
            line["us"], line["setting"] = result
        found["lines"].append(line)
        write(out, found)

    if missing := bench_peers.missing(library.packages):
        return write(out, found | {"absent": ", ".join(missing)})
    found |= {"device": library.device(), "versions": bench_peers.versions(library.packages)}
    write(out, found)
    models, refused = library.models(job.work / job.name)
    if not models:
        raise SystemExit("; ".join(f"{kind}: {why}" for kind, why in refused.items()))
    print(f"left out: {refused}")

    def timed(case: shapes.Modern, name: str, model: Any, label: str) -> tuple[list[float], str]:
        with np.load(job.work / f"{case.label}.npz") as file:
            ids, lengths = file["ids"], file["lengths"] if "lengths" in file.files else None
        layers = library.forward(model, ids, lengths)
        bench_peers.queued(layers, 3)
        states = layers.numbers(layers.call())[:1]
        states[:, case.length if lengths is None else lengths[0] :] = 0.0  # jaxft's padding has zeros
        job.check(case.label, states.reshape(1, -1), 0.99)
        return bench_peers.queued_us(layers, 5 if args.quick else 9, 5e4), label

    compiled_seconds = 0.0
    for case in cases:
        results: dict[str, tuple[list[float], str] | Exception] = {}
        for kind, model in models.items():
            try:
                results[kind] = timed(case, "transformers", model, kind)
            except Exception as error:
                results[kind] = error
        best = min(results, key=lambda kind: time_of(results[kind]))
        add(case, "transformers", results[best])
        if args.compile == "none" or isinstance(results[best], Exception):
            continue
        if compiled_seconds > args.compile_seconds:
            add(case, COMPILED, TimeoutError(f"{NOT_DONE}; --compile-seconds were used up by other shapes"))
            continue
        start = time.monotonic()
        try:
            library.torch._dynamo.reset()
            model = library.torch.compile(models[best], mode=args.compile, dynamic=False)
            add(case, COMPILED, timed(case, COMPILED, model, f"{best}, {args.compile}"))
        except Exception as error:
            add(case, COMPILED, error)
        compiled_seconds += time.monotonic() - start
    return None


def write(out: Path, found: dict[str, Any]) -> None:
    """Writes JSON. A reader sees the file before or after."""
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, allow_nan=False))
    os.replace(temporary, out)


def time_of(result: tuple[list[float], str] | Exception) -> float:
    """Returns the median of the times of a result, infinite for an error."""
    return math.inf if isinstance(result, Exception) else sorted(result[0])[len(result[0]) // 2]


def torch_rows(
    cases: Sequence[shapes.Modern], found: dict[str, Any], error: str | None, args: argparse.Namespace
) -> list[dict[str, str]]:
    """Writes and returns the rows of transformers. A case without a result has a row that says why."""
    import plain_encoders
    import timing

    rows, kind, reported = [], found["device"], set()
    by_label = {case.label: case for case in cases}
    for line in found["lines"]:
        case = by_label[line["label"]]
        reported.add(line["label"])
        if "error" in line:
            rows += plain_encoders.failed(case, {line["name"]: line["error"]}, args, kind)
            continue
        key: dict[str, Any] = dict(op=case.op, direction="forward", shape=(case.batch, case.length), dtype="bfloat16")
        note = f"{line['setting']}; {found['versions']}"
        row = timing.as_row(
            key, line["name"], "queued_us", line["us"], plain_encoders.flops(case), "TFLOP/s", note
        )  # fmt: skip
        rows.append(row | timing.origin())
        print(f"{case.label}, {line['name']}: {row['p50']} us ({line['setting']})", flush=True)
    timing.write_rows(rows, args.out, kind)
    for case in cases:
        if error is not None and case.label not in reported:
            rows += plain_encoders.failed(case, {"transformers": error}, args, kind)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV is (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="cases with one of these in their name, as 'MPNet'"
    )
    parser.add_argument("--no-peers", action="store_true", help="jaxft and plain JAX alone, without transformers")
    parser.add_argument(
        "--compile", default="reduce-overhead", metavar="MODE",
        help="mode of torch.compile, or none to leave it out (%(default)s, which has CUDA graphs)",
    )  # fmt: skip
    parser.add_argument(
        "--compile-seconds", type=float, default=60, help="torch.compile of a model starts no shape after these"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything together (%(default)s)")
    process = parser.add_argument_group("what this file starts itself with")
    process.add_argument("--process", choices=["jax", "training", "torch"])
    process.add_argument("--model", choices=shapes.MODERN_CONFIGS)
    process.add_argument("--json", type=Path)
    process.add_argument("--work", type=Path, help="an empty folder in which models and logs stay")
    args = parser.parse_args(argv)
    cases = [case for case in shapes.MODERN if any(text in case.label for text in args.only)]
    if not cases:
        raise SystemExit("no case was measured: no name contains what --only says")
    if args.process:
        is_training = args.process == "training"
        mine = [case for case in cases if (case.model, case.training) == (args.model, is_training)]
        measure = measure_torch if args.process == "torch" else measure_jax
        return measure(Job(args.process, args.model, args.work, args.quick), mine, args, args.json)
    with tempfile.TemporaryDirectory() as folder:
        return compare(args, cases, args.work or Path(folder), sys.argv[1:] if argv is None else list(argv))


def compare(args: argparse.Namespace, cases: Sequence[shapes.Modern], work: Path, options: Sequence[str]) -> None:
    """Runs the processes, model by model, and prints tables."""
    import jax

    import plain_encoders
    import report
    import timing

    jax.config.update("jax_platforms", "cpu")  # of this process; the GPU's memory is for the others
    until, device = time.monotonic() + args.seconds, None
    work.mkdir(parents=True, exist_ok=True)

    def start(process: str, model: str) -> tuple[dict[str, Any], str | None]:
        out, log = (work / f"{model} {process}.{end}" for end in ("json", "log"))
        left = until - time.monotonic()
        if left < LEAST_SECONDS:
            return {}, "no time is left; run the rest with --only"
        command = [*options, "--process", process, "--model", model, "--json", out, "--work", work]
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
        error = bench_peers.run(command, log, left, script=__file__, **memory)
        print(log.read_text(errors="replace")[-20_000:] if process != "torch" or error else "")
        print(f"{model}, {process}: {error or 'done'}, {until - time.monotonic():.0f} s are left", flush=True)
        return json.loads(out.read_text()) if out.exists() else {}, error

    for model, is_training in dict.fromkeys((case.model, case.training) for case in cases):
        mine = [case for case in cases if (case.model, case.training) == (model, is_training)]
        found, error = start("training" if is_training else "jax", model)
        device = device or found.get("device")
        for case in mine:
            if error is not None and found and case.label not in found["done"]:
                plain_encoders.failed(case, {"jaxft": error}, args, device)
        if args.no_peers or is_training or not found:
            continue
        found, error = start("torch", model)
        if "absent" in found:
            print(f"{model}, transformers: left out, because {found['absent']} is not installed")
        else:
            torch_rows(mine, {"device": device, "lines": [], **found}, error, args)
    if device is None:
        raise SystemExit("nothing was measured")
    rows = timing.read_rows(args.out / f"{device.replace(' ', '_')}.csv")
    print("", *report.modern_tables([row for row in rows if report.section(row) == "modern"]), sep="\n")


if __name__ == "__main__":
    main()
