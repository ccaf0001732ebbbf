"""Times single queries, from a text to a NumPy array, by one caller and by several callers at the same time.

The module is also the program that times sentence-transformers in a process of its own. It loads nothing of JAX then.
"""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PEER = "sentence-transformers"
QUERIES = (
    "how to bake bread",
    "weather tomorrow",
    "What is the capital of the largest country in South America?",
    "cheap flights from London to New York in the first week of December",
    "symptoms of a cold",
    "How do I undo the last commit without losing my changes?",
    "best book on the history of mathematics",
    "How many people live in the largest city of the country, and since when has it been the largest one?",
)


class Latency(NamedTuple):
    """Percentiles of the times of calls, and how many calls all callers together finish in a second."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    per_second: float


class LatencyError(RuntimeError):
    """jaxft's embeddings differ from plain JAX's, or sentence-transformers failed."""


def measure(encode: Callable[[str], Any], callers: int, calls: int) -> Latency:
    """Times `encode` for single queries, by threads that each make `calls` calls. Raises the error of a call."""
    for query in QUERIES:  # compile
        encode(query)
    times: list[list[float]] = [[] for _ in range(callers)]
    errors: list[BaseException] = []
    start = threading.Barrier(callers + 1)

    def work(found: list[float], first: int) -> None:
        start.wait()
        try:
            for i in range(first, first + calls):
                before = time.perf_counter()
                encode(QUERIES[i % len(QUERIES)])
                found.append(time.perf_counter() - before)
        except Exception as error:  # a thread would print it and end
            errors.append(error)

    threads = [threading.Thread(target=work, args=(found, i)) for i, found in enumerate(times)]
    for thread in threads:
        thread.start()
    start.wait()
    before = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - before
    if errors:
        raise errors[0]
    every = sorted(1e3 * found for of_one in times for found in of_one)
    # The smallest time that this share of the calls does not exceed.
    p50, p95, p99 = (every[-(-len(every) * percent // 100) - 1] for percent in (50, 95, 99))
    return Latency(p50, p95, p99, len(every) / seconds)


def compare(
    folder: Path, dtype: str, callers: Sequence[int], calls: int, quantization: str | None = None
) -> dict[int, dict[str, Latency]]:  # fmt: skip
    """Returns the times of jaxft, of plain JAX, and of sentence-transformers where it is installed, by callers.

    Plain JAX is the same encoder with `implementation="xla"` and padded batches. jaxft's embeddings are checked first.
    Raises a LatencyError if one of them has a cosine below 0.98 with plain JAX's, or if sentence-transformers fails.
    """
    import numpy as np

    from jaxft.text.sentence_encoder import SentenceEncoder

    encoders = {
        "jaxft": SentenceEncoder.from_pretrained(folder, dtype=dtype, quantization=quantization),
        "xla": SentenceEncoder.from_pretrained(folder, dtype=dtype, implementation="xla", packed=False),
    }
    ours, plain = (encoder.encode([*QUERIES], normalize_embeddings=True) for encoder in encoders.values())
    if not (cosine := float(np.sum(ours * plain, axis=1).min())) >= 0.98:
        raise LatencyError(f"jaxft's embeddings have a cosine of {cosine:.4f} with plain JAX's; nothing was timed")
    found = {
        count: {name: measure(encoder.encode, count, calls) for name, encoder in encoders.items()} for count in callers
    }
    if importlib.util.find_spec("sentence_transformers") is not None:
        for count, latency in zip(callers, _peer(folder, dtype, callers, calls), strict=True):
            found[count][PEER] = latency
    return found


def _peer(folder: Path, dtype: str, callers: Sequence[int], calls: int) -> list[Latency]:
    """Returns the times of sentence-transformers in a process of its own."""
    command = [sys.executable, "-m", "jaxft.latency", str(folder), dtype, str(calls), *map(str, callers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LatencyError(f"{PEER} failed: {reason}")
    return [Latency(*times) for times in json.loads(done.stdout.splitlines()[-1])]


def table(found: Mapping[int, Mapping[str, Latency]]) -> list[str]:
    """Formats a row for each number of callers and each variant."""
    lines = [["callers", "variant", "p50 ms", "p95 ms", "p99 ms", "queries/s"]]
    for count, variants in found.items():
        for name, times in variants.items():
            lines.append([str(count), name, *(f"{ms:.2f}" for ms in times[:3]), f"{times.per_second:.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _main(folder: str, dtype: str, calls: str, *callers: str) -> None:
    """Times sentence-transformers and prints the times as JSON."""
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("sentence_transformers")
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    encoder = library.SentenceTransformer(folder, model_kwargs=options)

    def encode(query: str) -> Any:
        return encoder.encode(query, show_progress_bar=False)

    print(json.dumps([measure(encode, int(count), int(calls)) for count in callers], allow_nan=False))


if __name__ == "__main__":
    _main(*sys.argv[1:])
