"""jaxft beside what a user would otherwise run, each library with its best settings in a process of its own.

Cases: `encode` of the docstrings of Python's standard library and of one query, ranking 100 documents with a cross
encoder, and the forward pass and the training step of BERT-base's layers. All run in bfloat16. A library compares its
numbers with the numbers of the libraries before it, and is timed only if they agree. A library that is not installed is
left out. One that fails has a row that says why.

The models have the sizes of BERT-base and MiniLM-L6 and random weights, so that no weights need to be at hand.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import shapes

# A process that measures PyTorch must not import JAX, and the one that waits for it must not start JAX on the GPU. So
# modules that import JAX are imported inside of functions.

T = TypeVar("T")
RESULTS = Path(__file__).resolve().parent / "results"
SECONDS, LEAST_SECONDS = 1200, 5  # of all processes together, and of one that is started
QUERY = "How many people live in the largest city of the country, and since when?"
DOCUMENTS = 100
NOT_DONE = "not done"
#: Name in the results -> class. The class of another library is named as "module:class".
PEERS = {
    "jaxft": "peers:Jaxft",
    "sentence-transformers": "peers:SentenceTransformers",
    "transformers": "peers:Transformers",
    "torch.compile": "peers:TorchCompile",
    "tokamax": "peers:Tokamax",
}
LAYERS = ("jaxft", "transformers", "torch.compile", "tokamax")


class Case(NamedTuple):
    """A case that one process measures. `limit` is in seconds."""

    kind: str
    model: str
    peers: tuple[str, ...]
    limit: int


CASES = {
    "encode-base": Case("encode", "BERT-base", ("jaxft", "sentence-transformers"), 150),
    "encode-minilm": Case("encode", "MiniLM-L6", ("jaxft", "sentence-transformers"), 120),
    "query-base": Case("query", "BERT-base", ("jaxft", "sentence-transformers"), 60),
    "query-minilm": Case("query", "MiniLM-L6", ("jaxft", "sentence-transformers"), 60),
    "rank": Case("rank", "MiniLM-L6", ("jaxft", "sentence-transformers"), 90),
    "forward": Case("layers", "BERT-base", LAYERS, 240),
    "training": Case("training", "BERT-base", LAYERS, 540),
}


class Line(NamedTuple):
    """A measurement of a case: a row of the results without its times. `work` is as in `timing.as_row`."""

    op: str
    shape: tuple[int, ...]
    work: float
    unit: str
    direction: str = "forward"
    metric: str = "wall_us"


def lines(case: Case, texts: int, quick: bool) -> list[Line]:
    """Returns the measurements of a case. `texts` is how many texts are encoded."""
    if case.kind == "encode":
        return [Line(f"peers, encode docstrings, {case.model}", (texts,), texts * 1e9, "ktext/s")]
    if case.kind == "query":
        return [Line(f"peers, encode one query, {case.model}", (1,), 1e9, "ktext/s")]
    if case.kind == "rank":
        return [Line(f"peers, rank {DOCUMENTS} documents, {case.model}", (DOCUMENTS,), DOCUMENTS * 1e9, "kpair/s")]
    what, sizes, direction, passes = "encoder", shapes.PEERS_FORWARD, "forward", 1
    if case.kind == "training":
        what, sizes, direction, passes = "training step", shapes.PEERS_TRAINING, "value and gradient", 3
    found = []
    for batch, length in sizes[:1] if quick else sizes:
        work = passes * shapes.encoder_flops(case.model, [length] * batch)
        op = f"peers, {what}, {case.model}"
        found.append(Line(op, (batch, length), work, "TFLOP/s", direction, "queued_us"))
    return found


# --- A process that measures one library in one case ---------------------------------------------------------------


class Mismatch(RuntimeError):
    """Numbers that differ from the numbers of another library."""


class Job(NamedTuple):
    """The work of one process. `work` is the folder that `prepare` has made."""

    peer: str
    name: str
    work: Path
    quick: bool

    def check(self, what: str, numbers: np.ndarray, least: float) -> None:
        """Compares numbers with the libraries before, and leaves them for the libraries that come after.

        Raises:
          Mismatch: the cosine of a row with the same row of another library is below `least`.
        """
        numbers, folder = numbers.reshape(-1, numbers.shape[-1]).astype(np.float64), self.work / "numbers"
        for file in sorted(folder.glob(f"{self.name} {what} *.npy")):
            other, whose = np.load(file), file.stem.removeprefix(f"{self.name} {what} ")
            if other.shape != numbers.shape:
                raise Mismatch(f"{what}: shape {numbers.shape}, of {whose} {other.shape}")
            norms = np.linalg.norm(numbers, axis=1) * np.linalg.norm(other, axis=1)
            cosine = np.min(np.sum(numbers * other, axis=1) / norms)
            if not cosine >= least:  # also when it is NaN
                raise Mismatch(f"{what}: cosine {cosine:.5f} with the numbers of {whose}, below {least}")
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{self.name} {what} {self.peer.replace('/', ' ')}.npy", numbers)


def measure(job: Job, out: Path) -> None:
    """Measures one library in one case. Writes JSON to `out` after each line, so that a later failure loses none."""
    module, attribute = PEERS.get(job.peer, job.peer).split(":")
    library = getattr(importlib.import_module(module), attribute)()
    found: dict[str, Any] = {"lines": []}

    def write(**more: Any) -> None:
        found.update(more)
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(found, allow_nan=False))
        os.replace(temporary, out)

    if absent := missing(library.packages):
        return write(absent=", ".join(absent))
    write(device=library.device(), versions=versions(library.packages))
    case, texts = CASES[job.name], json.loads((job.work / "texts.json").read_text())
    kinds = {
        "encode": encode_lines, "query": query_lines, "rank": rank_lines, "layers": layer_lines,
        "training": layer_lines,
    }  # fmt: skip
    try:
        for us, setting in kinds[case.kind](library, job, case, texts):
            write(lines=[*found["lines"], {"us": us, "setting": setting}])
    except Mismatch as error:
        write(error=str(error), mismatch=True)
    except Exception as error:
        write(error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        raise
    return None


def missing(packages: Sequence[str]) -> list[str]:
    """Returns the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name.replace("-", "_")) is None]


def versions(packages: Sequence[str]) -> str:
    """Returns the packages with their versions."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def encode_lines(library: Any, job: Job, case: Case, texts: list[str]) -> Iterator[tuple[list[float], str]]:
    """Yields wall times of all texts with the best batch size."""
    encode, sizes = library.encoder(job.work / case.model), library.batch_sizes(case.model)
    job.check("embeddings", encode(texts[:256], sizes[0]), 0.999)
    size = fastest({size: functools.partial(encode, texts[:4096], size) for size in sizes})
    encode(texts, size)
    yield [wall_us(lambda: encode(texts, size)) for _ in range(1 if job.quick else 3)], f"batch size {size}"


def query_lines(library: Any, job: Job, case: Case, texts: list[str]) -> Iterator[tuple[list[float], str]]:
    """Yields wall times of one query."""
    encode, (size, *_) = library.encoder(job.work / case.model), library.batch_sizes(case.model)
    job.check("embedding", encode(QUERY, size), 0.999)
    yield [wall_us(lambda: encode(QUERY, size)) for _ in range(30 if job.quick else 320)][20:], ""


def rank_lines(library: Any, job: Job, case: Case, texts: list[str]) -> Iterator[tuple[list[float], str]]:
    """Yields wall times of a ranking with the best batch size."""
    rank, documents = library.ranker(job.work / "cross-encoder"), texts[:DOCUMENTS]
    sizes = library.batch_sizes(case.model)
    scores = rank(QUERY, documents, sizes[0])
    job.check("scores", scores - scores.mean(), 0.99)
    size = fastest({size: functools.partial(rank, QUERY, documents, size) for size in sizes})
    yield [wall_us(lambda: rank(QUERY, documents, size)) for _ in range(10 if job.quick else 40)], f"batch size {size}"


def layer_lines(library: Any, job: Job, case: Case, texts: list[str]) -> Iterator[tuple[list[float], str]]:
    """Yields queued times of the forward pass, or of the training step, of each shape, run in the fastest way."""
    for line in lines(case, len(texts), job.quick):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((*line.shape, shapes.MODELS[case.model].width), np.float32)
        weights = rng.standard_normal(x.shape, np.float32) if case.kind == "training" else None
        ways = library.layers(job.work / case.model, x, weights)
        for layers in ways.values():  # torch.compile records its CUDA graphs in the second call
            queued(layers, 3)
        name = fastest({name: functools.partial(queued, layers, 10) for name, layers in ways.items()})
        layers = ways[name]
        what = "x".join(map(str, line.shape))
        least = 0.999 if weights is None else 0.99  # bfloat16 rounds gradients more often than hidden states
        job.check(what, layers.numbers(layers.call())[:1].reshape(1, -1), least)
        yield queued_us(layers, 5 if job.quick else 9, 2e5), name if len(ways) > 1 else ""


def queued(layers: Any, calls: int) -> None:
    """Queues calls of `peers.Layers`, and waits for the last result."""
    for _ in range(calls):
        out = layers.call()
    layers.wait(out)


def queued_us(layers: Any, rounds: int, round_us: float) -> list[float]:
    """Returns the wall time per call in each round of about `round_us` microseconds, with calls queued."""
    calls = max(10, min(1000, math.ceil(round_us / wall_us(functools.partial(queued, layers, 10)) * 10)))
    many = functools.partial(queued, layers, calls)
    return [wall_us(many) / calls for _ in range(rounds)]


def wall_us(call: Callable[[], Any]) -> float:
    """Returns the wall time of a call, in microseconds."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def fastest(ways: dict[T, Callable[[], Any]]) -> T:
    """Returns the key of the fastest way: the best of three calls after a first one."""
    if len(ways) == 1:
        return next(iter(ways))
    times = {}
    for name, call in ways.items():
        call()
        times[name] = min(wall_us(call) for _ in range(3))
    return min(times, key=times.__getitem__)


# --- Models and texts ----------------------------------------------------------------------------------------------


def prepare(work: Path, tokenizer: Path) -> None:
    """Writes random models, as folders that every library reads, and texts. Run it where JAX runs on the CPU."""
    from flax import nnx

    from bench_encode import docstrings
    from jaxft import BertConfig, BertForSequenceClassification, BertModel

    def config(model: str, **options: Any) -> BertConfig:
        layers, width, heads, inner = shapes.MODELS[model]
        return BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner, **options
        )

    rngs = nnx.Rngs(0)
    for name in ("BERT-base", "MiniLM-L6"):
        BertModel(config(name), rngs=rngs).save_pretrained(work / name)
        (work / name / "1_Pooling").mkdir()
        library = "sentence_transformers.models"
        files = {
            "modules.json": [
                {"idx": 0, "name": "0", "path": "", "type": f"{library}.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{library}.Pooling"},
            ],
            "1_Pooling/config.json": {
                "word_embedding_dimension": shapes.MODELS[name].width, "pooling_mode_mean_tokens": True,
            },
            "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        }  # fmt: skip
        for file, content in files.items():
            (work / name / file).write_text(json.dumps(content, allow_nan=False))
    # With the default range, scores hardly differ.
    reranker = BertForSequenceClassification(config("MiniLM-L6", initializer_range=0.05), num_labels=1, rngs=rngs)
    reranker.save_pretrained(work / "cross-encoder")
    for name in ("BERT-base", "MiniLM-L6", "cross-encoder"):
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, work / name)
    texts = docstrings()
    random.Random(0).shuffle(texts)
    (work / "texts.json").write_text(json.dumps(texts, allow_nan=False))


# --- The process that starts the others ----------------------------------------------------------------------------


def run(command: Sequence[Any], log: Path, limit: float, *, script: str = __file__, **environment: str) -> str | None:
    """Runs a script in a process of its own. Returns why it failed, or None. Its children end with it."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, script, *map(str, command)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, env={**os.environ, **offline, **environment},
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"{NOT_DONE} after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return None
    said = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(said) if line.strip()), f"exit code {code}")


def results(name: str, peer: str, work: Path, quick: bool, limit: float) -> dict[str, Any]:
    """Runs the process of a library and a case. Returns its JSON, with "error" if it failed."""
    stem = work / f"{name} {peer.replace('/', ' ')}"
    out, log = stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".log")
    command = ["--peer", peer, "--case", name, "--json", out, "--work", work, *["--quick"] * quick]
    error = run(command, log, limit)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"lines": []}
    if error is not None:
        found.setdefault("error", error)
    return found


def as_rows(planned: Sequence[Line], found: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Returns the rows of a case, of each line and library. A library that failed has rows that say why."""
    import timing

    first, *others = found.values()
    if any("mismatch" in each for each in others) and not any(each["lines"] for each in others):
        first |= {"lines": [], "error": "its numbers agree with the numbers of no other library"}
    rows, source = [], timing.origin()
    for number, line in enumerate(planned):
        key: dict[str, Any] = dict(op=line.op, direction=line.direction, shape=line.shape, dtype="bfloat16")
        for peer, each in found.items():
            if number < len(each["lines"]):
                us, setting = each["lines"][number]["us"], each["lines"][number]["setting"]
                note = "; ".join(filter(None, (setting, each["versions"])))
            elif "error" in each:
                us, note = [math.nan], f"failed: {each['error']}"
            else:
                continue
            rows.append(timing.as_row(key, peer, line.metric, us, line.work, line.unit, note) | source)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a checkpoint; its tokenizer (uncased BERT) is used"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats; no torch.compile")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV is (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="some cases")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help=f"some of: {'; '.join(PEERS)}; or module:class")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything together (%(default)s)")
    process = parser.add_argument_group("what this file starts itself with")
    process.add_argument("--peer", metavar="NAME")
    process.add_argument("--case", choices=CASES)
    process.add_argument("--json", type=Path)
    process.add_argument("--work", type=Path, help="an empty folder in which models and logs stay")
    process.add_argument("--prepare", action="store_true")
    args = parser.parse_args(argv)
    if args.peer:
        del sys.argv[1:]  # tokamax parses it
        return measure(Job(args.peer, args.case, args.work, args.quick), args.json)
    if args.prepare:
        return prepare(args.work, args.model)
    if args.model is None:
        parser.error("--model is needed")
    with tempfile.TemporaryDirectory() as folder:
        return compare(args, args.work or Path(folder))


def compare(args: argparse.Namespace, work: Path) -> None:
    """Runs the processes, writes rows after each case, and prints the table of the README."""
    import report
    import timing

    until, rows = time.monotonic() + args.seconds, []
    work.mkdir(parents=True, exist_ok=True)
    command = ["--prepare", "--work", work, "--model", args.model]
    if error := run(command, work / "prepare.log", args.seconds, JAX_PLATFORMS="cpu"):
        raise SystemExit(f"the models could not be made: {error}")
    texts = len(json.loads((work / "texts.json").read_text()))
    for name in args.only:
        case, found = CASES[name], dict[str, dict[str, Any]]()
        peers = args.peers or [peer for peer in case.peers if not (args.quick and peer == "torch.compile")]
        if not any(":" in peer for peer in peers):
            peers = [peer for peer in case.peers if peer in ("jaxft", *peers)]  # all are compared with jaxft
        for peer in peers:
            left, each = until - time.monotonic(), dict[str, Any](error=NOT_DONE)
            if left > LEAST_SECONDS:
                each = results(name, peer, work, args.quick, min(case.limit, left))
            said = each.get("error", "done")
            if "absent" in each:
                said = f"left out, because {each['absent']} is not installed"
            elif said.startswith(NOT_DONE) and left < case.limit:  # no fault of the library
                said = "no time is left; run the rest with --only and --peers"
                del each["error"]
            if each.get("lines") or "error" in each:
                found[peer] = each
            print(f"{name}, {peer}: {said}, {until - time.monotonic():.0f} s are left", flush=True)
        kind = next((each["device"] for each in found.values() if "device" in each), None)
        if kind is not None:
            rows += (measured := as_rows(lines(case, texts, args.quick), found))
            timing.write_rows(measured, args.out, kind)
    if not rows:
        raise SystemExit("nothing was measured")
    print("", *report.peers_table(rows), sep="\n")


if __name__ == "__main__":
    main()
