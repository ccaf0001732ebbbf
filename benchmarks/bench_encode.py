"""`SentenceEncoder.encode` on the docstrings of Python's standard library: text in, embeddings out.

The docstrings come several times over, in random order. "jaxft, padded" pads its batches, and "jaxft, padded, not
sorted" pads batches of texts in the given order, as loops without sorting do. `device_only_us` is the wall time of the
first variant's batches when they are on the device already. A second case encodes one text per call, as a search does
with its queries.
"""

import ast
import functools
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import timing
from jaxft.models.bert import BertConfig, BertModel
from jaxft.text import batching
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.tuning import profiler

CONFIGS = {
    "BERT-base": BertConfig(),
    "MiniLM-L6": BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536),
}
DTYPE = "bfloat16"
LIMIT = 512
BATCH_SIZE = 32
REPEATS = 4
LAST_STEPS = (None, False, False)  # no truncation, no normalisation, no token embeddings
Ways = dict[tuple[str, str], Callable[[], Any]]  # (implementation, metric) -> what is timed
QUERY = "How many people live in the largest city of the country, and since when?"


def docstrings() -> list[str]:
    """Returns the docstrings of modules, classes and functions of the standard library, without its tests."""
    found = []
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & {*file.relative_to(library).parts}:
            continue
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in others' strings
            tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node))
    return [text for text in found if text]


def wall_us(f: Callable[[], Any]) -> float:
    """Returns the wall time of one call, in microseconds."""
    return profiler.queued_us(f, 1)


def in_given_order(encoder: SentenceEncoder, texts: Sequence[str]) -> np.ndarray:
    """Encodes padded batches of texts in the given order, several in flight as in `encode`."""
    arrays, rebuild = encoder._bundled(encoder.embedder)
    found = []
    for first in range(0, len(texts), BATCH_SIZE):
        (batch,) = cut(encoder, texts[first : first + BATCH_SIZE])
        found.append(encoder._embed(arrays, batch.input_ids, batch.lengths, batch.longest, LAST_STEPS, rebuild))
    return np.concatenate([np.asarray(x) for x in found])


def cut(encoder: SentenceEncoder, texts: Sequence[str]) -> Iterator[batching.Batch]:
    """Yields the batches of `encode`."""
    seen: list[batching.Batch] = []

    def keep(batch: batching.Batch) -> Any:
        seen.append(batch)
        return np.zeros(len(batch.lengths))

    made = encoder._by_length[encoder.max_seq_length]
    encodings = functools.partial(made.encodings, "")
    for _ in made.batcher.run(made.batcher.tokenised(texts, encodings), BATCH_SIZE, keep):
        yield from seen
        seen.clear()
    yield from seen


def check(model: str, packed: SentenceEncoder, padded: SentenceEncoder, texts: str | list[str]) -> None:
    """Exits if packed and padded embeddings differ."""
    expected = padded.encode(texts, batch_size=BATCH_SIZE)
    error, scale = np.abs(packed.encode(texts, batch_size=BATCH_SIZE) - expected).max(), np.abs(expected).max()
    if not error < 0.02 * scale:  # a few roundings of bfloat16; tests compare float32
        raise SystemExit(f"{model}: packed and padded embeddings differ by {error}; nothing is timed")


def samples(ways: Ways, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Returns wall times of each way, which take turns."""
    times = profiler.turns([*ways], repeats, lambda way: wall_us(ways[way]))
    return {way: column.tolist() for way, column in zip(ways, times.T, strict=True)}


def run_one(model: str, packed: SentenceEncoder, padded: SentenceEncoder, args: Any) -> list[timing.Row]:
    """Checks and times one text per call."""
    check(model, packed, padded, QUERY)
    ways: Ways = {
        ("jaxft", "wall_us"): lambda: packed.encode(QUERY),
        ("jaxft, padded", "wall_us"): lambda: padded.encode(QUERY),
    }
    return timing.as_rows(
        samples(ways, 50 if args.quick else 200), 1e9, "ktext/s", args,
        op=f"encode one text {model}", direction="forward", shape=[len(packed.tokenize(QUERY)[0])], dtype=DTYPE,
    )  # fmt: skip


def run(model: str, file: Path, texts: list[str], args: Any) -> list[timing.Row]:
    """Checks and times one model."""
    bert = BertModel(CONFIGS[model], dtype=DTYPE, param_dtype=DTYPE, rngs=nnx.Rngs(0))
    tokenizer = tokenizer_files.load(tokenizer_files.Settings(file.parent))
    make = functools.partial(SentenceEncoder, bert, tokenizer, max_seq_length=LIMIT)
    packed, padded = make(packed=True), make(packed=False)
    arrays, rebuild = packed._bundled(packed.embedder)
    on_device = [jax.device_put((b.input_ids, b.lengths)) + (b.longest,) for b in cut(packed, texts)]
    tokens = sum(map(len, packed.tokenize(texts)))

    def device_only() -> None:
        jax.block_until_ready([packed._embed(arrays, *batch, LAST_STEPS, rebuild) for batch in on_device])

    check(model, packed, padded, texts)
    ways: Ways = {
        ("jaxft", "wall_us"): lambda: packed.encode(texts, batch_size=BATCH_SIZE),
        ("jaxft, padded", "wall_us"): lambda: padded.encode(texts, batch_size=BATCH_SIZE),
        ("jaxft, padded, not sorted", "wall_us"): lambda: in_given_order(padded, texts),
        ("jaxft", "device_only_us"): device_only,
    }
    for f in ways.values():
        f()  # compiles
    rows = timing.as_rows(
        samples(ways, 3 if args.quick else 5), tokens * 1e6, "Mtoken/s", args,
        op=f"encode docstrings {model}", direction="forward", shape=[len(texts)], dtype=DTYPE,
    )  # fmt: skip
    return rows + run_one(model, packed, padded, args)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json or vocab.txt of an uncased BERT")
    args = parser.parse_args(argv)
    texts = docstrings() * (1 if args.quick else REPEATS)
    random.Random(0).shuffle(texts)
    timing.print_tables([row for model in CONFIGS for row in run(model, args.tokenizer, texts, args)])


if __name__ == "__main__":
    main()
