"""Times fresh processes: the first query and 3,000 texts, with a cold and a warm compilation cache, and `warmup`.

Each case runs in a process of its own, `--repeats` times. MiniLM in bfloat16 on a GPU, in float32 elsewhere: the
checkpoint that JAXFT_TEST_CHECKPOINT names, otherwise random weights of its shape. Prints one JSON object a process;
times are in seconds. Adds the medians of the cases "cold" and "warm" to the CSV file of the device.
"""

import argparse
import collections
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import timing

_FLAG = "--xla_gpu_autotune_level=0"
# Case: (environment, arguments of the child). The second of a pair finds the programs of the first.
CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "cold": ({}, ["texts"]),
    "warm": ({}, ["texts"]),
    "cold, no autotuning": ({"XLA_FLAGS": _FLAG}, ["texts"]),
    "warmup, then texts": ({}, ["warmup", "texts"]),
    "warm warmup, then texts": ({}, ["warmup", "texts"]),
    "shapes, without a cache": ({"JAXFT_COMPILATION_CACHE": "off"}, ["shapes"]),
    "first query in parts": ({"JAXFT_COMPILATION_CACHE": "off"}, ["parts"]),
}


def texts(count: int) -> list[str]:
    """Returns texts of 1 to 60 words."""
    rng = random.Random(0)
    words = "a bird sings in the old tree rain falls on river house people live".split()
    return [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(count)]


def write_model(folder: Path) -> None:
    """Writes a model of MiniLM's shape with random weights."""
    from flax import nnx

    from jaxft.models.bert import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    BertModel(config, rngs=nnx.Rngs(0)).save_pretrained(folder)
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({w for text in texts(100) for w in text.split()})]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in known))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, allow_nan=False))


def child(folder: str, steps: list[str]) -> dict[str, Any]:
    """Runs the steps in this process and returns their times."""
    found: dict[str, Any] = {}
    begin = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        found[name] = round(time.perf_counter() - begin, 4)
        begin = time.perf_counter()

    import jax
    import jax.monitoring
    import numpy as np

    import jaxft

    spent: dict[str, list[float]] = collections.defaultdict(list)
    names = {"jaxpr_trace": "trace", "jaxpr_to_mlir_module": "lower", "backend_compile": "compile"}

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        for part, name in names.items():
            if part in event:
                spent[name].append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jaxft.use_compilation_cache()
    gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if gpu else "float32"
    lap("import")
    encoder = jaxft.SentenceEncoder.from_pretrained(folder, dtype=dtype)
    lap("load")
    given = texts(3000 if gpu else 300)

    def count(name: str) -> None:
        found[f"{name}, programs"] = len(spent["compile"])
        found[f"{name}, largest compile"] = round(max(spent["compile"], default=0.0), 3)
        found[f"{name}, lower and compile"] = [round(sum(spent[part]), 3) for part in ("lower", "compile")]
        spent.clear()

    spent.clear()
    if "warmup" in steps:
        encoder.warmup()
        lap("warmup")
        count("warmup")
    if "texts" in steps:
        begin = time.perf_counter()
        encoder.encode("how many people live in the old house?")
        lap("first query")
        count("first query")
        begin = time.perf_counter()
        encoder.encode(given)
        lap("texts")
        count("texts")
        for name in ("texts, second", "texts, third"):
            begin = time.perf_counter()
            encoder.encode(given)
            lap(name)
        times = []
        for text in given[:300]:
            start = time.perf_counter()
            encoder.encode(text)
            times.append(time.perf_counter() - start)
        found["query, p50 p95"] = np.percentile(times, (50, 95)).round(6).tolist()
    if {"shapes", "parts"} & {*steps}:
        arrays, rebuild = encoder._bundled(encoder.embedder)
        lap("bundle")
        # A short query has the smallest shape.
        batches = encoder._texts(None).batcher.blanks(32)
        for batch in batches[:1] if "parts" in steps else batches[:: 1 if gpu else 20]:
            last_steps = None, False, False, "float32"
            given_batch = arrays, batch.input_ids, batch.lengths, batch.longest, last_steps, rebuild
            times = [time.perf_counter()]
            traced = encoder._embed.trace(*given_batch)
            times.append(time.perf_counter())
            lowered = traced.lower()
            times.append(time.perf_counter())
            compiled = lowered.compile()
            times.append(time.perf_counter())
            for _ in range(2):
                jax.block_until_ready(compiled(*given_batch[:3]))
                times.append(time.perf_counter())
            shape = f"{batch.input_ids.shape} {len(batch.lengths)} {batch.longest}"
            steps_of_shape = "trace", "lower", "compile", "first run", "second run"
            found[shape] = {
                name: round(b - a, 4) for name, (a, b) in zip(steps_of_shape, itertools.pairwise(times), strict=True)
            }
            found[shape]["custom calls"] = lowered.as_text().count("custom_call")
    return found | {"count": len(given), "dtype": dtype, "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def rows(found: Mapping[str, Sequence[dict[str, Any]]]) -> "list[timing.Row]":
    """Makes rows of the results of the cases "cold" and "warm"."""
    import timing  # imports JAX, whose import `child` times

    made = []
    for case, implementation in (("warm", "jaxft"), ("cold", "jaxft, empty cache")):
        for name in ("first query", "texts"):
            if results := found.get(case):
                count = results[0]["count"] if name == "texts" else 1
                key = {"op": "start-up MiniLM-L6", "direction": "forward", "shape": str(count)}
                key["dtype"] = results[0]["dtype"]
                times = [1e6 * result[name] for result in results]
                note = f"{len(times)} processes"
                made.append(timing.as_row(key, implementation, "wall_us", times, 1e9 * count, "ktext/s", note))
    return [row | timing.origin() for row in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs="+", help="the folder and the steps, for the processes that this one starts")
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=CASES, help="names of cases")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each case (%(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the CSV file (default: benchmarks/results)"
    )
    args = parser.parse_args()
    if args.child:
        folder, *steps = args.child
        print(json.dumps(child(folder, steps), allow_nan=False))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = os.environ.get("JAXFT_TEST_CHECKPOINT", "")
        if not os.path.isdir(folder):
            folder = os.path.join(scratch, "model")
            # In a process of its own, which gives the GPU's memory back.
            code = "import sys, pathlib, startup; startup.write_model(pathlib.Path(sys.argv[1]))"
            os.mkdir(folder)
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(["benchmarks", *sys.path[1:]])}
            subprocess.run([sys.executable, "-c", code, folder], check=True, env=environment)
        cache = ""
        results: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for name in args.only * args.repeats:
            environment, steps = CASES[name]
            if "warm " not in f"{name} ":
                cache = tempfile.mkdtemp(dir=scratch)
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, __file__, "--child", folder, *steps], stdout=subprocess.PIPE, text=True,
                env=os.environ | {"JAXFT_COMPILATION_CACHE": cache} | environment,
            )  # fmt: skip
            head = {"case": name, "process": round(time.perf_counter() - start, 2)}
            found = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.returncode}
            print(json.dumps(head | found, allow_nan=False))
            sys.stdout.flush()
            if "failed" not in found:
                results[name].append(found)
    if made := rows(results):
        import timing

        timing.write_rows(made, args.out or timing.RESULTS, next(of_case[0]["device"] for of_case in results.values()))


if __name__ == "__main__":
    main()
