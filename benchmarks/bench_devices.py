"""`SentenceEncoder.encode` and training on 1, 2 and 4 GPUs, beside sentence-transformers; parquet to parquet.

`--only encode` times jaxft, `--only pool` the multi-process pool of sentence-transformers, in a process of its own:
docstrings of Python's standard library in, NumPy embeddings out. Models have random weights. The embeddings on several
GPUs must equal the embeddings on one GPU to the bit. A first call, which is printed but is no row, compiles.
`--only corpus` times short texts from a parquet file to parquet parts on one GPU, beside `encode` of the same texts in
memory, and prints the largest memory of the host above its memory with the model loaded.
`--only train` times a data-parallel step of masked-language-model training with AdamW. Each GPU has the same number of
tokens, so perfect scaling keeps the time of a step. The GPUs add up their gradients in float32, or in bfloat16.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Set before JAX starts: the pool of sentence-transformers needs memory beside this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import bench_encode
import timing
from jaxft.models.bert import BertModel
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.models.partition import partition_specs
from jaxft.text import corpora
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.training import COMPILER_OPTIONS, accumulate_gradients

BATCH_SIZE = 32
BATCH_SIZES = (32, 128)  # of each library; the fastest counts
WORDS = (4, 16)  # of a short text
TRAIN_SHAPE = (32, 512)  # sequences and tokens of a GPU
QUEUED = 10  # training steps of a sample
PARTS = ("encode", "pool", "corpus", "train")


def make(model: str, tokenizer: Path) -> SentenceEncoder:
    """Returns an encoder with random weights."""
    dtype = bench_encode.DTYPE
    bert = BertModel(bench_encode.CONFIGS[model], dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    loaded = tokenizer_files.load(tokenizer_files.Settings(tokenizer.parent))
    return SentenceEncoder(bert, loaded, max_seq_length=bench_encode.LIMIT)


def short_texts(count: int) -> list[str]:
    """Returns short texts of words of the docstrings."""
    words = " ".join(bench_encode.docstrings()[:2000]).split()
    rng = random.Random(0)
    found = []
    for _ in range(count):
        first = rng.randrange(len(words))
        found.append(" ".join(words[first : first + rng.randint(*WORDS)]))
    return found


def seconds_of(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rows_of(model: str, times: dict[str, list[float]], count: int, args: Any, op: str = "encode on GPUs") -> Any:
    """Returns the rows of wall times in seconds by implementation."""
    samples = {(name, "wall_us"): [1e6 * x for x in values] for name, values in times.items()}
    return timing.as_rows(
        samples, count * 1e9, "ktext/s", args, op=f"{op} {model}", direction="forward", shape=[count],
        dtype=bench_encode.DTYPE,
    )  # fmt: skip


def run_encode(model: str, texts: list[str], args: Any) -> Any:
    """Checks and times jaxft on each number of devices. The fastest batch size counts."""
    encoder = make(model, args.tokenizer)
    calls = {
        (count, size): functools.partial(encoder.encode, texts, batch_size=size, devices=jax.local_devices()[:count])
        for size, count in itertools.product(args.batch_sizes, args.devices)
    }
    for (count, size), call in calls.items():
        first = seconds_of(call)
        encoder._dealer.wait()
        print(f"{model}, {count} devices, batch_size {size}: first call {first:.1f} s", flush=True)
        if not np.array_equal(call(), encoder.encode(texts, batch_size=size, devices=jax.local_devices()[:1])):
            raise SystemExit(f"{model}: embeddings on {count} devices differ from one device; nothing is timed")
    found: dict[tuple[int, int], list[float]] = {case: [] for case in calls}
    for _ in range(args.repeats):
        for case, call in calls.items():
            found[case].append(seconds_of(call))
    for (count, size), values in found.items():
        print(f"{model}, {count} devices, batch_size {size}: {1e3 * np.median(values):.0f} ms", flush=True)
    times = {
        f"jaxft, {count} GPU": min((found[count, size] for size in args.batch_sizes), key=np.median)
        for count in args.devices
    }
    return rows_of(model, times, len(texts), args)


def run_pool(model: str, texts: list[str], args: Any) -> Any:
    """Times sentence-transformers in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(model, args.tokenizer).save_pretrained(folder / "model")
        (folder / "texts.json").write_text(json.dumps(texts, allow_nan=False))
        lists = {"--devices": args.devices, "--batch-sizes": args.batch_sizes, "--repeats": [args.repeats]}
        options = [text for option, values in lists.items() for text in (option, *map(str, values))]
        command = [sys.executable, __file__, "--peer", name, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    return rows_of(model, found, len(texts), args)


def peer(folder: Path, args: Any) -> None:
    """Times the pool of sentence-transformers, and prints the wall times as JSON."""
    library: Any = importlib.import_module("sentence_transformers")
    torch: Any = importlib.import_module("torch")
    options = {"torch_dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    texts = json.loads((folder / "texts.json").read_text())
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    times: dict[str, list[float]] = {}
    for count in args.devices:
        devices = [f"{kind}:{index}" if kind == "cuda" else kind for index in range(count)]
        model = library.SentenceTransformer(str(folder / "model"), device=devices[0], model_kwargs=options)
        pool = model.start_multi_process_pool(devices)
        best: list[float] = []
        for size in args.batch_sizes:
            encode = functools.partial(model.encode, pool=pool, batch_size=size, show_progress_bar=False)
            encode(texts[: 1000 * count])  # warms up
            found = [seconds_of(functools.partial(encode, texts)) for _ in range(args.repeats)]
            best = min(best or found, found, key=np.median)
        times[f"sentence-transformers, {count} GPU"] = best
        model.stop_multi_process_pool(pool)
    print(json.dumps(times, allow_nan=False), flush=True)


def resident() -> int:
    """Returns the bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def largest_memory(found: list[int]) -> Iterator[None]:
    """Adds the largest memory of this process during the block to a list."""
    done = threading.Event()
    most = [resident()]

    def watch() -> None:
        while not done.wait(0.02):
            most.append(max(most.pop(), resident()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(most[0])


def run_corpus(model: str, texts: list[str], args: Any) -> Any:
    """Times parquet to parquet, and the same texts in memory, on one device."""
    pa, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    encoder = make(model, args.tokenizer)
    times: dict[str, list[float]] = {"jaxft, parquet to parquet": [], "jaxft": []}
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        data = Path(name) / "data.parquet"
        parquet.write_table(pa.table({"text": texts}), data)
        count, few = len(texts), texts[: max(len(texts) // 10, 1)]
        del texts
        out = Path(name) / "out"

        def corpus() -> None:
            corpora.encode_corpus(
                encoder, [str(data)], out, batch_size=BATCH_SIZE, devices=0, rows_per_part=args.rows_per_part
            )

        encoder.encode(few, batch_size=BATCH_SIZE, devices=0)  # compiles
        most: list[int] = []
        idle = resident()
        with largest_memory(most):
            corpus()
        print(f"{model}: {(most[0] - idle) / 2**30:.2f} GiB above the {idle / 2**30:.2f} GiB with the model loaded")
        texts = parquet.read_table(data)["text"].to_pylist()
        encoder.encode(texts, batch_size=BATCH_SIZE, devices=0)
        for _ in range(args.repeats):
            times["jaxft"].append(seconds_of(lambda: encoder.encode(texts, batch_size=BATCH_SIZE, devices=0)))
            shutil.rmtree(out)  # and not all of them at the end: a virtual machine is slow to get new memory
            times["jaxft, parquet to parquet"].append(seconds_of(corpus))
    ratio = np.median(times["jaxft"]) / np.median(times["jaxft, parquet to parquet"])
    print(f"{model}: parquet to parquet at {ratio:.1%} of the rate in memory", flush=True)
    return rows_of(model, times, count, args, "encode short texts")


def run_train(model: str, args: Any) -> Any:
    """Times training steps on each number of devices, with the same number of tokens on each device."""
    rows, length = TRAIN_SHAPE
    config = bench_encode.CONFIGS[model]
    made = BertForMaskedLM(config, dtype=bench_encode.DTYPE, rngs=nnx.Rngs(0))
    made.train()
    graph, params = nnx.split(made)
    specs, optimizer = partition_specs(made), optax.adamw(1e-4)

    def loss_fn(params: Any, one: Any) -> Any:
        ids, labels, key = one
        return nnx.merge(graph, params).loss(ids, labels, rngs=key)

    def step_on(mesh: Any, dtype: str) -> Any:
        each = functools.partial(accumulate_gradients, loss_fn, sum_dtype=dtype)
        summed = jax.shard_map(
            each, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
        )

        def step(state: Any, batch: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            params, old = state
            loss, gradients = summed(params, (*batch, jax.random.split(key, len(batch[0]))))
            updates, new = optimizer.update(gradients, old, params)
            return (optax.apply_updates(params, updates), new), loss.mean

        return step

    options = COMPILER_OPTIONS if jax.default_backend() == "gpu" else None
    cases = {f"jaxft, {count} GPU": (count, "float32") for count in args.devices}
    cases |= {f"jaxft, {count} GPU, sums in bfloat16": (count, "bfloat16") for count in args.devices if count > 1}
    inputs: dict[str, list[Any]] = {}

    def lowered() -> Iterator[Any]:
        for name, (count, dtype) in cases.items():
            mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.local_devices()[:count])
            rng = np.random.default_rng(0)
            ids = rng.integers(0, config.vocab_size, (count, rows, length), np.int32)
            labels = np.where(rng.random(ids.shape) < 0.15, ids, -100).astype(np.int32)
            batch = jax.device_put((ids, labels), NamedSharding(mesh, PartitionSpec("data")))
            placed = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
            own = jax.device_put(jax.tree.map(jnp.copy, params), placed)  # the steps overwrite it
            whole = NamedSharding(mesh, PartitionSpec())
            state = own, jax.device_put(optimizer.init(own), whole)
            inputs[name] = [state, batch, jax.device_put(jax.random.key(0), whole)]
            start = time.perf_counter()
            yield jax.jit(step_on(mesh, dtype), donate_argnums=0).lower(*inputs[name]), options
            print(f"{model}, {name}: lowered in {time.perf_counter() - start:.0f} s", flush=True)

    start = time.perf_counter()
    compiled = dict(zip(cases, timing.compile_all(lowered()), strict=True))
    print(f"{model}: lowered and compiled in {time.perf_counter() - start:.0f} s", flush=True)

    def run(name: str) -> None:
        state, *others = inputs[name]
        for _ in range(QUEUED):
            state, value = compiled[name](state, *others)
        inputs[name][0] = state
        if not np.isfinite(jax.block_until_ready(value)):
            raise SystemExit(f"{model}: the loss is {value}; nothing is timed")

    times: dict[str, list[float]] = {name: [] for name in cases}
    for name in cases:
        run(name)
    for _ in range(args.repeats):
        for name in cases:
            times[name].append(seconds_of(functools.partial(run, name)) / QUEUED)
    found = []
    for name, (count, _) in cases.items():
        samples = {(name, "wall_us"): [1e6 * x for x in times[name]]}
        found += timing.as_rows(
            samples, count * rows * length * 1e9, "ktoken/s", args, op=f"train on GPUs {model}", direction="step",
            shape=TRAIN_SHAPE, dtype=bench_encode.DTYPE,
        )  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json or vocab.txt of an uncased BERT")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="what is timed (default: all)")
    parser.add_argument("--model", choices=[*bench_encode.CONFIGS], nargs="+", default=[*bench_encode.CONFIGS])
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of GPUs (default: 1, 2, 4 as far as there)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="(default: %(default)s)")
    parser.add_argument("--copies", type=int, default=4, help="how often the docstrings come (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=1_000_000, help="short texts (default: %(default)s)")
    parser.add_argument("--rows-per-part", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder for the parquet files (default: that for temporary files)")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peer is not None:
        peer(args.peer, args)
        return
    if args.tokenizer is None and {*args.only} != {"train"}:
        parser.error("--tokenizer is missing")
    args.devices = args.devices or [count for count in (1, 2, 4) if count <= jax.local_device_count()]
    texts = []
    if {"encode", "pool"} & {*args.only}:
        texts = bench_encode.docstrings() * (1 if args.quick else args.copies)
        random.Random(0).shuffle(texts)
    rows = []
    for part, model in itertools.product(args.only, args.model):
        if part == "corpus":
            rows += run_corpus(model, short_texts(args.texts), args)
        elif part == "train":
            rows += run_train(model, args)
        else:
            rows += (run_encode if part == "encode" else run_pool)(model, texts, args)
    timing.print_tables(rows)


if __name__ == "__main__":
    main()
