"""Texts of all lengths in batches of few shapes, padded or packed, and how a device is kept busy with them."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxft import dispatch, ops

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tqdm import tqdm

# Texts that are tokenised before the device gets any, and of the largest chunk, packed and padded. Each is a quarter
# larger than the one before it. An H200, on which BERT-base is hardly slower than tokenising on 16 cores, would wait
# for one that is twice as large, and nothing overlaps with the last one; less padding, though, comes of large ones.
_CHUNKS = (512, 1024, 8192)
# Chunks on their way, packed and padded: while one waits for the interpreter's lock, the cores have another.
_AHEAD = (3, 1)
_IN_FLIGHT = 8  # batches given to the device before the oldest result is read back
_LONG_WORK = 1000  # texts from which a terminal shows a progress bar unasked
_LEAST_TOKENS, _SHORTEST = 64, 32  # of the smallest packed batch, and of its longest text

_log = logging.getLogger("jaxft")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a packed batch, for which a program is compiled.

    Attributes:
      capacity: rows, of tokens and, after the last of them, of nothing.
      count: sequences, of which the last may be empty.
      longest: the most tokens of a sequence.
    """

    capacity: int
    count: int
    longest: int


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Those of texts, back to back: few arrays, with which NumPy does what would take Python longer than the device.

    Attributes:
      begins: int64 `[texts + 1]`, where each text begins, and the last one ends.
      ids, type_ids: int32 `[begins[-1]]`; type_ids may be None.
    """

    begins: np.ndarray
    ids: np.ndarray
    type_ids: np.ndarray | None

    @classmethod
    def of(cls, texts: "Sequence[Encoding]", *, with_types: bool) -> "Tokens":
        begins = np.cumsum([0, *map(len, texts)])

        def joined(name: str) -> np.ndarray:
            parts = map(operator.attrgetter(name), texts)
            return np.fromiter(itertools.chain.from_iterable(parts), np.int32, begins[-1])

        return cls(begins, joined("ids"), joined("type_ids") if with_types else None)

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.begins)

    def __getitem__(self, texts: slice) -> "Tokens":
        first, stop, _ = texts.indices(len(self))
        begins = self.begins[first : stop + 1]
        return self._each(begins - begins[0], lambda part: part[begins[0] : begins[-1]])

    def in_order(self, order: np.ndarray) -> "Tokens":
        lengths = self.lengths[order]
        begins = np.append(0, np.cumsum(lengths))
        where = np.arange(begins[-1]) + np.repeat(self.begins[order] - begins[:-1], lengths)
        return self._each(begins, lambda part: part[where])

    def __add__(self, other: "Tokens") -> "Tokens":
        begins = np.append(self.begins, self.begins[-1] + other.begins[1:])
        types = None
        if self.type_ids is not None:
            assert other.type_ids is not None
            types = np.append(self.type_ids, other.type_ids)
        return Tokens(begins, np.append(self.ids, other.ids), types)

    def _each(self, begins: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> "Tokens":
        return Tokens(begins, change(self.ids), None if self.type_ids is None else change(self.type_ids))


class Batch(NamedTuple):
    """Texts of one program.

    Attributes:
      input_ids, token_type_ids: int32 `[rows, longest]`; packed, `[capacity]`.
      lengths: int32 `[rows]`, tokens of each sequence; packed, `[count + 1]`, the row at which each begins.
      longest: the most tokens of a sequence.
    """

    input_ids: np.ndarray
    token_type_ids: np.ndarray | None
    lengths: np.ndarray
    longest: int


def buckets(batch_size: int, limit: int) -> list[Bucket]:
    """All shapes of packed batches of at most `batch_size` texts of `limit` tokens, or as many tokens of shorter ones.

    Capacities are powers of two and batch_size * limit, lengths powers of two and `limit`. There are sequences for a
    batch whose texts have a quarter of the length of its longest, which is far from one of sorted texts.
    """
    return [*_buckets(check_batch_size("buckets", batch_size), limit)]


@functools.lru_cache
def _buckets(batch_size: int, limit: int) -> tuple[Bucket, ...]:
    budget = batch_size * limit
    return tuple(
        Bucket(capacity, min(4 * capacity // longest, capacity), longest)
        for longest in _powers(_SHORTEST, limit)
        for capacity in _powers(_LEAST_TOKENS, budget)
        if capacity >= longest
    )


def _powers(first: int, last: int) -> list[int]:
    """The powers of two from `first` that are below `last`, and `last`."""
    return [2**n for n in range(first.bit_length() - 1, last.bit_length()) if 2**n < last] + [last]


class _Work(NamedTuple):
    """A batch on its way: which texts, how large batches were then, and its result, or why there is none."""

    positions: np.ndarray
    texts: Tokens
    batch_size: int
    result: jax.Array | jax.errors.JaxRuntimeError


class Batcher:
    """Cuts texts into batches, gives them to a device ahead of reading the results, and survives a lack of memory.

    Args:
      limit: the most tokens of a text.
      padding: the token id where there is no token.
      packed: without padding, in the shapes of `buckets`; else texts of about the same length, padded to the next of a
        few lengths.
      with_types: whether batches have token types.
    """

    def __init__(self, *, limit: int, padding: int, packed: bool, with_types: bool = False) -> None:
        self.limit, self.padding, self.packed, self.with_types = limit, padding, packed, with_types
        self._lengths = padded_lengths(limit)
        self._largest: int | None = None  # batch_size, once a larger one did not fit into the memory

    def compute_all(
        self, texts: Sequence[Any], tokenise: Callable[[Sequence[Any]], "list[Encoding]"], batch_size: int,
        compute: Callable[[Batch], jax.Array], *, width: int, unit: str, show_progress_bar: bool | None,
    ) -> np.ndarray:  # fmt: skip
        """float32 `[texts, width]` in the order of the texts, with `batch_size` and `compute` as for `run`."""
        results = np.empty((len(texts), width), np.float32)

        def start(batch: Batch) -> jax.Array:
            result = compute(batch)
            result.copy_to_host_async()
            return result

        # Closed, so that no thread outlives an error.
        with (
            contextlib.closing(self.tokenised(texts, tokenise)) as chunks,
            progress_bar(len(texts), unit, show_progress_bar) as bar,
        ):
            for positions, found in self.run(chunks, batch_size, start):
                results[positions] = found
                bar.update(len(positions))
        return results

    def tokenised(
        self, texts: Sequence[Any], tokenise: Callable[[Sequence[Any]], "list[Encoding]"]
    ) -> Generator[tuple[int, Tokens]]:
        """Yields (start, tokens of texts from there on), threads being `_AHEAD` chunks ahead, and no texts at last.

        A single chunk has nothing to be ahead of: it is done here, since a thread would take longer to start and end.
        """

        def tokens(chunk: Sequence[Any]) -> Tokens:
            return Tokens.of(tokenise(chunk), with_types=self.with_types)

        start, (size, *largest) = 0, _CHUNKS
        most, ahead = largest[not self.packed], _AHEAD[not self.packed]
        coming = deque[tuple[int, Future[Tokens]]]()
        if 0 < len(texts) <= size:
            yield 0, tokens(texts)
            start = len(texts)
        with ThreadPoolExecutor(max_workers=ahead) as threads:
            while start < len(texts) or coming:
                while start < len(texts) and len(coming) <= ahead:
                    coming.append((start, threads.submit(tokens, texts[start : start + size])))
                    start, size = start + size, min(size + size // 4, most)
                first, chunk = coming.popleft()
                yield first, chunk.result()
        yield len(texts), Tokens.of([], with_types=self.with_types)

    def run(
        self, chunks: Iterator[tuple[int, Tokens]], batch_size: int, compute: Callable[[Batch], jax.Array]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (positions `[n]`, results `[n, ...]`) of all texts, longer ones first.

        Args:
          chunks: (position of the first text, texts); the last one is empty.
          batch_size: how many texts of `limit` tokens a batch may hold. Where the device's memory does not suffice, it
            is halved, from that batch on and in later calls, which the log says.
          compute: starts the computation of `[rows, ...]`, packed `[count, ...]`.
        """
        in_flight: deque[_Work] = deque()
        positions, texts = np.empty(0, np.int64), Tokens.of([], with_types=self.with_types)
        for start, chunk in chunks:
            if len(chunk):
                positions = np.append(positions, start + np.arange(len(chunk)))  # with what was left
                texts += chunk
                order = np.argsort(-texts.lengths, kind="stable")
                positions, texts = positions[order], texts.in_order(order)
            done = 0
            for stop, work in self._start(positions, texts, batch_size, compute, last=len(chunk) == 0):
                done = stop
                in_flight.append(work)
                # Where the device has refused one, it gets no other before that one is done, in smaller parts.
                while len(in_flight) > (0 if isinstance(work.result, Exception) else _IN_FLIGHT):
                    yield from self._finish(in_flight.popleft(), compute)
            positions, texts = positions[done:], texts[done:]
        while in_flight:
            yield from self._finish(in_flight.popleft(), compute)

    def _start(
        self, positions: np.ndarray, texts: Tokens, batch_size: int, compute: Callable[[Batch], jax.Array], *,
        last: bool,
    ) -> Iterator[tuple[int, _Work]]:  # fmt: skip
        """Cuts texts, the longest first, and yields (how many are done, work). Unless `last`, a rest is left."""
        # A text without tokens counts as one, or any number of them would be left.
        lengths = texts.lengths
        ends = np.append(0, np.cumsum(np.maximum(lengths, 1)))
        first = 0
        while first < len(texts):
            size = batch_size if self._largest is None else min(batch_size, self._largest)
            tokens, count = int(ends[-1] - ends[first]), len(texts) - first
            if not last and (tokens < size * self.limit if self.packed else count < size):
                return
            if self.packed:
                bucket = _bucket(_buckets(size, self.limit), int(lengths[first]), tokens)
                fitting = int(np.searchsorted(ends, ends[first] + bucket.capacity, side="right")) - 1
                part = texts[first : min(fitting, first + bucket.count)]
                batch = self._packed(part, bucket)
            else:
                part = texts[first : first + size]
                batch = self._padded(part, size)
            stop = first + len(part)
            result: Any
            try:
                result = compute(batch)
            except jax.errors.JaxRuntimeError as error:
                result = error
            yield stop, _Work(positions[first:stop], part, size, result)
            first = stop

    def _finish(self, work: _Work, compute: Callable[[Batch], jax.Array]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads the result, or computes the texts again in smaller batches where the memory did not suffice."""
        try:
            if isinstance(work.result, jax.errors.JaxRuntimeError):
                raise work.result
            result = np.asarray(work.result)[: len(work.positions)]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or work.batch_size == 1:
                raise
        else:
            yield work.positions, result
            return
        half = work.batch_size // 2
        if self._largest is None or half < self._largest:
            self._largest = half
            _log.warning(
                "the device has too little memory for batches of %d tokens; going on with %d (batch_size=%d)",
                work.batch_size * self.limit, half * self.limit, half,
            )  # fmt: skip
        for _, part in self._start(work.positions, work.texts, half, compute, last=True):
            yield from self._finish(part, compute)

    def _padded(self, texts: Tokens, batch_size: int) -> Batch:
        rows = min(batch_size, 1 << (len(texts) - 1).bit_length())
        lengths = np.ones(rows, np.int32)  # rows of padding: one token, to keep their arithmetic finite
        lengths[: len(texts)] = texts.lengths
        longest = next(length for length in self._lengths if length >= lengths[0])
        taken = np.arange(longest) < lengths[: len(texts), None]

        def padded(tokens: np.ndarray, fill: int) -> np.ndarray:
            result = np.full((rows, longest), fill, np.int32)
            result[: len(texts)][taken] = tokens
            return result

        types = None if texts.type_ids is None else padded(texts.type_ids, 0)
        return Batch(padded(texts.ids, self.padding), types, lengths, longest)

    def _packed(self, texts: Tokens, bucket: Bucket) -> Batch:
        def packed(tokens: np.ndarray, fill: int) -> np.ndarray:
            return np.pad(tokens, (0, bucket.capacity - len(tokens)), constant_values=fill)

        begins = np.full(bucket.count + 1, texts.begins[-1], np.int32)
        begins[: len(texts) + 1] = texts.begins
        types = None if texts.type_ids is None else packed(texts.type_ids, 0)
        return Batch(packed(texts.ids, self.padding), types, begins, bucket.longest)


def _bucket(all_buckets: Sequence[Bucket], longest: int, tokens: int) -> Bucket:
    """For so many tokens: the largest bucket that they fill, or the next one if they fill three quarters of that."""
    least = min(bucket.longest for bucket in all_buckets if bucket.longest >= longest)
    fitting = [bucket for bucket in all_buckets if bucket.longest == least]
    filled = [bucket for bucket in fitting if bucket.capacity <= tokens]
    if len(filled) == len(fitting):
        return filled[-1]
    following = fitting[len(filled)]
    return following if not filled or 4 * tokens > 3 * following.capacity else filled[-1]


def packs(implementation: str | None) -> bool:
    """Whether that pays without being asked for: where attention has a kernel that skips what is not there."""
    attention = "varlen_qkv_attention"
    return implementation != "xla" and dispatch.explain(attention, ops.OPS[attention])[0] != "xla"


def padded_lengths(limit: int) -> tuple[int, ...]:
    """The lengths that batches are padded to: 16, 32, 48, 64, 96, 128, 192, ... below `limit`, and `limit`."""
    lengths, power = [16], 32
    while lengths[-1] < limit:
        lengths += [power, power + power // 2]
        power *= 2
    return (*(length for length in lengths if length < limit), limit)


def is_sequence(value: Any) -> bool:
    """Of items that are texts or pairs; a text is none."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_texts(op: str, name: str, texts: Any) -> list[str]:
    """The strings of a sequence (or the only one), once each is valid Unicode."""
    if isinstance(texts, str):
        texts = [texts]
    if not is_sequence(texts):
        raise TypeError(f"{op}: {name} must be a str or a sequence of str, got {type(texts).__name__}")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{op}: {name}[{index}] must be a str, got {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{op}: {name}[{index}] is not valid Unicode: {error.reason}") from error
    return texts


def check_batch_size(op: str, batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"{op}: batch_size must be a positive integer, got {batch_size!r}")
    return int(batch_size)


def progress_bar(total: int, unit: str, show: bool | None) -> "tqdm":
    """On stderr; `show` None: for long work on a terminal."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    if show is None:
        show = total > _LONG_WORK and terminal
    # In a log file every update is a new piece of text, so they come far apart.
    return tqdm(total=total, unit=unit, disable=not show, mininterval=0.1 if terminal else 10.0)
