"""`SentenceEncoder.encode` on the docstrings of Python's standard library: text in, embeddings out.

The docstrings come several times over, in random order. "jaxft, padded" pads its batches, and "jaxft, padded, not
sorted" pads batches of texts in the given order, as loops without sorting do. `device_only_us` is the wall time of the
first variant's batches when they are on the device already. A second case encodes one text per call, as a search does
with its queries. A third case times what options of `encode` and a Dense module cost: all of its variants compute the
same tokens, because the plain call gets texts that start with the prompt. `--only options` runs this case alone. Its
texts have similar lengths, so that each variant compiles one or two programs and the time goes into rounds of calls.
"""

import ast
import functools
import itertools
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
from jaxft.models.embedding import Dense
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
LAST_STEPS = (None, False, False, "float32")  # no truncation, no normalisation, no token embeddings, not quantized
Ways = dict[tuple[str, str], Callable[[], Any]]  # (implementation, metric) -> what is timed
PROMPT = "query: "
# Texts of the case of options, and their least and largest number of tokens. Packed batches of them have one shape.
OPTIONS_TEXTS, OPTIONS_TOKENS = 16_384, (33, 64)
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
    chunks = made.batcher.tokenised(texts, lambda some, _: made.encodings("", some))
    for _ in made.batcher.run(chunks, BATCH_SIZE, keep):
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


def run_options(model: str, make: Callable[..., SentenceEncoder], texts: list[str], args: Any) -> list[timing.Row]:
    """Checks and times options of `encode` and a Dense module, and prints what each costs beside the plain call."""
    plain, apart = make(packed=True), make(packed=True, include_prompt=False)
    width, (least, most) = plain.embedding_dimension, OPTIONS_TOKENS
    lengths = map(len, plain.tokenize([PROMPT + text for text in texts]))
    chosen = [text for text, length in zip(texts, lengths, strict=True) if least <= length <= most]
    texts = [*itertools.islice(itertools.cycle(chosen), OPTIONS_TEXTS)]
    with_dense = make(packed=True, modules=[Dense(width, width, activation="Tanh", rngs=nnx.Rngs(0))])
    prompted = [PROMPT + text for text in texts]
    ranges = np.stack([np.full(width, -1.0, np.float32), np.full(width, 1.0, np.float32)])
    options: dict[str, Callable[[], np.ndarray | jax.Array]] = {
        "jaxft": lambda: plain.encode(prompted, batch_size=BATCH_SIZE),
        "jaxft, prompt": lambda: plain.encode(texts, batch_size=BATCH_SIZE, prompt=PROMPT),
        "jaxft, prompt not pooled": lambda: apart.encode(texts, batch_size=BATCH_SIZE, prompt=PROMPT),
        "jaxft, truncate_dim": lambda: plain.encode(
            prompted, batch_size=BATCH_SIZE, truncate_dim=width // 2, normalize_embeddings=True
        ),
        "jaxft, int8": lambda: plain.encode(prompted, batch_size=BATCH_SIZE, precision="int8", ranges=ranges),
        "jaxft, ubinary": lambda: plain.encode(prompted, batch_size=BATCH_SIZE, precision="ubinary"),
        "jaxft, Dense": lambda: with_dense.encode(prompted, batch_size=BATCH_SIZE),
    }
    found = {name: np.asarray(f()) for name, f in options.items()}  # compiles
    if not (found["jaxft"] == found["jaxft, prompt"]).all():
        raise SystemExit(f"{model}: the prompt changes embeddings of the same tokens; nothing is timed")
    tokens = sum(map(len, plain.tokenize(prompted)))
    ways: Ways = {(name, "wall_us"): f for name, f in options.items()}
    times = samples(ways, 11 if args.quick else 41)  # the time of a call varies by a few percent
    rows = timing.as_rows(
        times, tokens * 1e6, "Mtoken/s", args,
        op=f"encode options {model}", direction="forward", shape=[len(texts)], dtype=DTYPE,
    )  # fmt: skip
    base = np.array(times["jaxft", "wall_us"])
    for (name, _), sample in times.items():
        low, middle, high = 100 * (np.percentile(sample / base, (25, 50, 75)) - 1)
        print(f"{model}, {name}: {middle:+.2f} % time beside the plain call (quartiles {low:+.2f} and {high:+.2f} %)")
    return rows


def run(model: str, file: Path, texts: list[str], args: Any) -> list[timing.Row]:
    """Checks and times one model."""
    bert = BertModel(CONFIGS[model], dtype=DTYPE, param_dtype=DTYPE, rngs=nnx.Rngs(0))
    tokenizer = tokenizer_files.load(tokenizer_files.Settings(file.parent))
    make = functools.partial(SentenceEncoder, bert, tokenizer, max_seq_length=LIMIT)
    if args.only == "options":
        return run_options(model, make, texts, args)
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
    return rows + run_one(model, packed, padded, args) + run_options(model, make, texts, args)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json or vocab.txt of an uncased BERT")
    parser.add_argument("--only", choices=["options"], help="time the options of encode alone")
    args = parser.parse_args(argv)
    texts = docstrings() * (1 if args.quick or args.only else REPEATS)
    random.Random(0).shuffle(texts)
    timing.print_tables([row for model in CONFIGS for row in run(model, args.tokenizer, texts, args)])


if __name__ == "__main__":
    main()
