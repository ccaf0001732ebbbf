"""Times single queries, from a text to a NumPy array, by one caller and by several callers at the same time.

The module is also the program that times sentence-transformers in a process of its own. It loads nothing of JAX then.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
CALLS = 400  # of all threads together, unless the caller says otherwise
COLUMNS = "callers", "variant", ("p50 ms", "p95 ms", "p99 ms", "queries/s")
_TURNS = 5


class Latency(NamedTuple):
    """Percentiles of the times of calls, and how many calls all callers together finish in a second."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    per_second: float


class LatencyError(RuntimeError):
    """jaxft's embeddings differ from plain JAX's, or sentence-transformers failed."""


def measure(encoders: Mapping[str, Callable[[str], Any]], callers: int, calls: int | None) -> dict[str, Latency]:
    """Times single queries by threads that each make `calls` calls. Raises the error of a call.

    The encoders take turns, so that other load on the machine slows down all of them. None stands for `CALLS` calls of
    all threads together.
    """
    count = -(-CALLS // callers) if calls is None else calls
    ends = [count * i // _TURNS for i in range(_TURNS + 1)]
    seconds = dict.fromkeys(encoders, 0.0)
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for (begin, end), (name, encode) in itertools.product(itertools.pairwise(ends), encoders.items()):
        seconds[name] += _turn(encode, callers, range(begin, end), times[name])
    return {name: _latency(times[name], seconds[name]) for name in encoders}


def _turn(encode: Callable[[str], Any], callers: int, calls: range, times: list[float]) -> float:
    """Adds the times of the calls of all threads, and returns the seconds of the whole turn."""
    errors: list[BaseException] = []
    start = threading.Barrier(callers + 1)

    def work(first: int) -> None:
        try:
            start.wait()
            for i in calls:
                before = time.perf_counter()
                encode(QUERIES[(first + i) % len(QUERIES)])
                times.append(time.perf_counter() - before)
        except Exception as error:  # a thread would print it and end
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(callers)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:  # the operating system allows fewer threads
        start.abort()
        raise LatencyError(f"{callers} callers: {error}") from error
    start.wait()
    before = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - before
    if errors:
        raise errors[0]
    return seconds


def _latency(times: Sequence[float], seconds: float) -> Latency:
    every = sorted(1e3 * of_one for of_one in times)
    # The smallest time that this share of the calls does not exceed.
    p50, p95, p99 = (every[-(-len(every) * percent // 100) - 1] for percent in (50, 95, 99))
    return Latency(p50, p95, p99, len(every) / seconds)


def compare(
    folder: Path, dtype: str, callers: Sequence[int], calls: int | None, quantization: str | None = None
) -> Iterator[tuple[int, str, Latency]]:  # fmt: skip
    """Yields the number of callers, a variant and its times, as soon as they are measured.

    The variants are jaxft, plain JAX, and sentence-transformers where it is installed. Plain JAX is the same encoder
    with `implementation="xla"` and padded batches. jaxft's embeddings are checked first. Raises a LatencyError if one
    of them has a cosine below 0.98 with plain JAX's, or if sentence-transformers fails.
    """
    from jaxft.text.sentence_encoder import SentenceEncoder

    encoders = {
        "jaxft": SentenceEncoder.from_pretrained(folder, dtype=dtype, quantization=quantization),
        "xla": SentenceEncoder.from_pretrained(folder, dtype=dtype, implementation="xla", packed=False),
    }
    encode = {name: encoder.encode for name, encoder in encoders.items()}
    with ThreadPoolExecutor(len(encode) * len(QUERIES)) as threads:  # compiles all programs at the same time
        ours, plain = (np.stack([*found]) for found in [threads.map(of_one, QUERIES) for of_one in encode.values()])
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(plain, axis=1)
    if not (cosine := float(np.min(np.sum(ours * plain, axis=1) / lengths))) >= 0.98:
        raise LatencyError(f"jaxft's embeddings have a cosine of {cosine:.4f} with plain JAX's; nothing was timed")
    for count in callers:
        for name, times in measure(encode, count, calls).items():
            yield count, name, times
    if importlib.util.find_spec("sentence_transformers") is not None:
        for count, times in zip(callers, _peer(folder, dtype, callers, calls), strict=True):
            yield count, PEER, times


def _peer(folder: Path, dtype: str, callers: Sequence[int], calls: int | None) -> list[Latency]:
    """Returns the times of sentence-transformers in a process of its own."""
    arguments = [str(folder), dtype, json.dumps(calls, allow_nan=False), *map(str, callers)]
    command = [sys.executable, "-m", "jaxft.latency", *arguments]
    reader, writer = os.pipe()  # open as long as this process lives
    try:
        done = subprocess.run(command, stdin=reader, capture_output=True, text=True)
    finally:
        os.close(reader)
        os.close(writer)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LatencyError(f"{PEER} failed: {reason}")
    return [Latency(*times) for times in json.loads(done.stdout.splitlines()[-1])]


def row(callers: Any, variant: str, times: Sequence[Any]) -> str:
    """Formats a row of the table, or the names of its columns."""
    cells = [f"{x:.2f}" if isinstance(x, float) else x for x in times]
    return f"{callers:>7}  {variant:>21}  " + "  ".join(f"{cell:>9}" for cell in cells)


def _main(folder: str, dtype: str, calls: str, *callers: str) -> None:
    """Times sentence-transformers and prints the times as JSON."""
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("sentence_transformers")
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    encoder = library.SentenceTransformer(folder, model_kwargs=options)

    def encode(query: str) -> Any:
        return encoder.encode(query, show_progress_bar=False)

    for query in QUERIES:  # of several lengths
        encode(query)
    found = [measure({PEER: encode}, int(count), json.loads(calls))[PEER] for count in callers]
    print(json.dumps(found, allow_nan=False))


def _end_with_caller() -> None:
    os.read(0, 1)  # returns once the pipe is closed, because the caller has ended
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_caller, daemon=True).start()
    _main(*sys.argv[1:])
