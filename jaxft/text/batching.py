"""Batching of texts: cuts texts of any length into padded or packed batches of few shapes, and keeps devices busy."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxft import dispatch
from jaxft.models.bert import encoder_of, named_parameters
from jaxft.ops import checks
from jaxft.text import long_texts
from jaxft.text.long_texts import TextError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tqdm import tqdm

# Texts per tokenisation chunk: the first chunk, the largest chunk with packing, the largest chunk with padding. Each
# chunk is a quarter larger than the chunk before it. An H200 would wait for chunks that double, because it runs
# BERT-base about as fast as 16 cores tokenise. Small chunks also shorten the end of a call, when the device computes
# the last chunk and nothing is left to tokenise. Large chunks need less padding.
_CHUNKS = (512, 1024, 8192)
# Number of tokenisation threads, with packing and with padding. While one thread waits for the interpreter lock, the
# tokenizer keeps the cores busy with the chunk of another thread.
_AHEAD = (3, 1)
# Threads tokenise chunks whose texts have more than this number of characters on average, also where processes
# tokenise. Such chunks keep the devices busy.
_LONG_MEAN = 2048
_MOST_HELPERS = 64  # threads that wait for processes that tokenise
_CHARACTERS = 1 << 20  # maximum per chunk of several texts; the tokenizer needs about 100 bytes for each character
_IN_FLIGHT = 8  # batches queued on the device before the caller waits for the oldest result
_CUT_AHEAD = 32  # batches that are cut in advance while the program of the first one is compiled
_LONG_WORK = 1000  # above this number of texts, a terminal shows a progress bar by default
_LEAST_TOKENS, _SHORTEST = 64, 32  # smallest `Bucket.capacity` and smallest `Bucket.longest`
_MEDIUM_TOKENS = 1024  # capacities double up to the larger of this and the limit, and quadruple after that
# Fixed cost of a packed batch, as a number of rows, and of each further shape of a part; see docs/performance-notes.md,
# "Shapes of packed batches".
_OVERHEAD = 256

# Tokenises texts. The second argument tells whether this must happen in this process.
Tokenise = Callable[[Sequence[Any], bool], "Tokens | Iterable[Encoding]"]

_log = logging.getLogger("jaxft")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Shape of a packed batch. A program is compiled for each shape."""

    capacity: int  # number of rows: the tokens, then padding rows
    count: int  # number of sequences; the last ones may be empty
    longest: int  # maximum number of tokens of a sequence


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of several texts in a few arrays. Handling Python lists instead would be slower than the device."""

    begins: np.ndarray  # int64 [texts + 1]: the first token of each text, then the number of tokens
    ids: np.ndarray  # int32 [begins[-1]]
    type_ids: np.ndarray | None  # as ids

    @classmethod
    def of(cls, texts: "Iterable[Encoding]", *, with_types: bool) -> "Tokens":
        """Concatenates encodings of the `tokenizers` library. The result holds copies of the token ids only."""
        return cls.of_arrays(*long_texts.arrays(texts, with_types=with_types))

    @classmethod
    def of_arrays(cls, begins: Any, ids: Any, type_ids: Any) -> "Tokens":
        """Copies what `long_texts.arrays` returns."""
        types = None if type_ids is None else np.array(type_ids, np.int32)
        return cls(np.array(begins, np.int64), np.array(ids, np.int32), types)

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each text, int64 `[texts]`."""
        return np.diff(self.begins)

    def __getitem__(self, texts: slice) -> "Tokens":
        first, stop, _ = texts.indices(len(self))
        begins = self.begins[first : stop + 1]
        return self._each(begins - begins[0], lambda part: part[begins[0] : begins[-1]])

    def in_order(self, order: np.ndarray) -> "Tokens":
        """Returns the texts in another order: text `i` of the result is text `order[i]`."""
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


class Features(NamedTuple):
    """Token embeddings of a text, with its tokens and its embedding."""

    ids: np.ndarray  # int32 [tokens]
    tokens: np.ndarray  # float32 [tokens, D]
    pooled: np.ndarray | None = None  # float32 [width]


class Batch(NamedTuple):
    """Model inputs of a padded or packed batch."""

    input_ids: np.ndarray  # int32 [rows, longest]; packed, [capacity]
    token_type_ids: np.ndarray | None  # as input_ids
    lengths: np.ndarray  # int32 [rows], tokens; packed, [count + 1], first row of each sequence, then the last's end
    longest: int  # length of the padded sequences; packed, maximum number of tokens of a sequence


def sequences(input_ids: jax.Array, lengths: jax.Array, longest: int) -> dict[str, Any]:
    """Returns the model arguments that describe the sequences of a padded or packed `Batch`."""
    if input_ids.ndim == 1:
        return {"cu_seqlens": lengths, "max_seqlen": longest}
    return {"attention_mask": jnp.arange(longest, dtype=lengths.dtype)[None] < lengths[:, None]}


def buckets(batch_size: int, limit: int) -> list[Bucket]:
    """Returns the shapes of packed batches with at most `batch_size * limit` tokens, sorted by longest and capacity."""
    return [*_buckets(check_batch_size("buckets", batch_size), limit)]


@functools.lru_cache
def _buckets(batch_size: int, limit: int) -> tuple[Bucket, ...]:
    budget = batch_size * limit
    # A full batch has room for the texts even if their mean length is only longest / 4. The mean is usually much closer
    # to longest, because texts are sorted by length.
    found = [Bucket(budget, min(4 * budget // longest, budget), longest) for longest in _powers(2, _SHORTEST, limit)]
    # Smaller shapes are for the last texts of a call, and for long texts among many short ones. There are few, because
    # each costs a compilation. They have room for texts with a mean length of longest / 8. See
    # docs/performance-notes.md, "Shapes of packed batches".
    medium = max(_MEDIUM_TOKENS, 1 << limit.bit_length() - 1)
    for rows in {*_powers(2, _LEAST_TOKENS, medium), *_powers(4, medium, budget)}:
        if rows < budget:
            base = 4 if rows <= medium else 8
            lengths = _powers(base, 2 * _SHORTEST, min(rows, limit))
            found += [Bucket(rows, min(8 * rows // n, rows), n) for n in lengths]
    return tuple(sorted(found, key=lambda bucket: (bucket.longest, bucket.capacity)))


def _powers(base: int, first: int, last: int) -> list[int]:
    """Returns `first` times the powers of `base` that are below `last`, then `last`."""
    found = [first]
    while found[-1] < last:
        found.append(base * found[-1])
    return [*found[:-1], last]


class _Cut(NamedTuple):
    """A batch with the texts that it holds."""

    positions: np.ndarray  # positions of the texts of this batch among all texts
    texts: Tokens  # kept to retry the texts in smaller batches
    batch_size: int  # the value of batch_size that the batch was cut with
    batch: Batch


@dataclasses.dataclass
class _Work:
    """A batch in flight on a device."""

    cut: _Cut
    started: Future[Any]  # what `Lane.compute` returned, or the error that it raised
    reading: Future[Any] | None = None  # set if a thread reads the result


class Lane:
    """A device that computes batches, with the batches in flight on it.

    Args:
      compute: starts the computation of a batch and returns its result.
      is_ready: returns whether the device can start a batch at once. If it cannot, the first lane gets the batch. The
        first call for a shape starts the compilation of its program.
      wait: waits until the program of a batch is compiled.
      device: the device, for messages and for its limit of batch_size. None if there is only one device.
      settings: returns the settings of the current thread that `compute` depends on. If a new thread has other settings
        than the caller, for example inside of `jax.default_device`, the caller starts the batches.
    """

    def __init__(
        self,
        compute: Callable[[Batch], Any],
        is_ready: Callable[[Batch], bool] = lambda _: True,
        wait: Callable[[Batch], Any] = lambda _: None,
        device: Any = None,
        settings: Callable[[], Any] = lambda: None,
    ) -> None:
        self.compute, self.is_ready, self.wait, self.device = compute, is_ready, wait, device
        self.in_flight: deque[_Work] = deque()
        self.is_retired = False  # True once the memory of the device was too small for a single text
        self.guard = threading.Lock()  # held while a batch is started
        self._settings = settings
        self._starter: ThreadPoolExecutor | None = None  # None: the caller starts the batches
        self._reader: ThreadPoolExecutor | None = None

    @property
    def has_result(self) -> bool:
        """True if the result of the oldest batch in flight can be used without waiting."""
        return bool(self.in_flight) and self.in_flight[0].reading is not None and self.in_flight[0].reading.done()

    def add(
        self, cut: _Cut, start: Callable[[_Cut, "Lane"], Any], read: Callable[[_Work], Any], *, is_first: bool
    ) -> None:  # fmt: skip
        """Queues a batch. A thread calls `start` for it, and another thread calls `read`.

        The caller starts the first batch of a call, which a thread reads if the lane gets a second one. So a call with
        a single batch does not wait for threads to start.
        """
        with contextlib.suppress(RuntimeError):  # the main thread has ended, so no thread can start
            if self._reader is None and not is_first:
                self._reader = ThreadPoolExecutor(max_workers=1)
                for work in self.in_flight:
                    work.reading = self._reader.submit(read, work)
                starter = ThreadPoolExecutor(max_workers=1)
                if is_equal_in(starter, self._settings):
                    self._starter = starter
                else:
                    starter.shutdown()
        work = _Work(cut, self._started(cut, start))
        if self._reader is not None:
            with contextlib.suppress(RuntimeError):
                work.reading = self._reader.submit(read, work)
        self.in_flight.append(work)

    def _started(self, cut: _Cut, start: Callable[[_Cut, "Lane"], Any]) -> Future[Any]:
        if self._starter is not None:
            with contextlib.suppress(RuntimeError):
                return self._starter.submit(start, cut, self)
        return _finished(start(cut, self))

    def close(self) -> None:
        """Ends the threads."""
        for thread in (self._starter, self._reader):
            if thread is not None:
                thread.shutdown(cancel_futures=True)


def is_equal_in(threads: ThreadPoolExecutor, settings: Callable[[], Any]) -> bool:
    """Returns whether `settings` returns the same in a thread of the pool as in the calling thread."""
    return bool(threads.submit(settings).result() == settings())


def _platform(x: jax.Array | np.ndarray) -> str:
    """Returns the platform of the devices where an array is, for example "gpu"."""
    return next(iter(dispatch.homes([x]))).platform if isinstance(x, jax.Array) else "cpu"


def _to_numpy(x: jax.Array | np.ndarray) -> np.ndarray:
    """Waits for an array, and copies it to the host if it is on another device."""
    # For a result that is not ready, a CPU's thread would take Python's lock afterwards to release the array. If the
    # process ended in that moment, it would abort (JAX 0.11).
    return np.asarray(jax.block_until_ready(x) if _platform(x) == "cpu" else x)


def _start_copy(x: jax.Array | np.ndarray) -> None:
    """Starts the copy of an array to the host, unless `dispatch.on_host` has put it there."""
    if isinstance(x, jax.Array) and x.sharding.memory_kind != "pinned_host" and _platform(x) != "cpu":
        x.copy_to_host_async()


def _finished(result: Any) -> Future[Any]:
    """Returns a future that has a result."""
    future = Future[Any]()
    future.set_result(result)
    return future


@dataclasses.dataclass
class _Part:
    """A part of the texts, and its results so far."""

    first: int  # position of the part's first text among the texts of all parts
    texts: Any
    results: Any
    missing: int  # number of results that are not computed yet


def _item(texts: Any, index: int) -> Any:
    """Returns the text at an index, or its token ids if `texts` are `Tokens`."""
    return texts[index : index + 1].ids.tolist() if isinstance(texts, Tokens) else texts[index]


class Batcher:
    """Cuts texts into batches, queues several batches on the device, and retries smaller batches if memory runs out.

    Packed batches have the shapes of `buckets`. Padded batches hold texts of similar length, padded to one of the
    lengths of `padded_lengths`.

    Args:
      limit: maximum number of tokens of a text.
      padding: the id of the padding token.
      packed: whether batches are packed instead of padded.
      with_types: whether batches have token type ids.
      characters: counts the characters of a text or pair. The sum over a tokenisation chunk is limited.
    """

    def __init__(
        self, *, limit: int, padding: int, packed: bool, with_types: bool = False,
        characters: Callable[[Any], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        self.limit, self.padding, self.packed, self.with_types = limit, padding, packed, with_types
        self.characters = characters
        self.helpers = 0  # number of processes that tokenise in place of the threads
        self._lengths = padded_lengths(limit)
        self._largest: dict[Any, int] = {}  # limit of batch_size for each device where larger batches ran out of memory

    def compute_parts(
        self, parts: Iterable[Any], tokenise: Tokenise, batch_size: int,
        lanes: Sequence[Lane], *, model: nnx.Module, width: int | None, unit: str,
        show_progress_bar: bool | None, convert: Callable[[np.ndarray], Any] = lambda rows: rows,
        is_finite: Callable[[np.ndarray], np.ndarray] = lambda rows: np.isfinite(rows).all(axis=1),
        dtype: Any = np.float32, empty: Callable[[tuple[int, int], Any], np.ndarray] = np.empty,
    ) -> Generator[Any]:  # fmt: skip
        """Yields the results of each part's texts (or pairs), `[len(part), width]`, in the order of the texts.

        A batch holds texts of one part only, so the results of a part do not depend on the other parts. The devices
        compute the next part while the caller reads the results of a part.

        Args:
          parts: the parts. Each is a sequence of texts or pairs, or `Tokens`.
          tokenise: tokenises a list of texts; see `Tokenise`.
          batch_size: number of padded texts per batch. A packed batch has at most `batch_size * limit` tokens.
          lanes: the devices.
          model: the model, which is searched for the cause of a result that is not finite.
          width: the number of columns of a result. With None, the result of a part is a list. It has `Features` if
            `Lane.compute` returns a tuple. Otherwise it has the items that `convert` returns.
          unit: what the progress bar counts.
          show_progress_bar: whether to show a progress bar; see `progress_bar`.
          convert: makes rows of the results from the rows that `Lane.compute` returns.
          is_finite: returns which of the rows that `Lane.compute` returns are finite, `[n]`. Both functions run on the
            host while the device computes the next batches.
          dtype: the dtype of the results.
          empty: makes the array for the results of a part from its shape and dtype.

        Raises:
          TextError: the result of a text is not finite. The message has the cause that is found in `model`.
        """
        open_parts: tuple[_Part, ...] = ()  # each change makes a new tuple, because threads read it

        def opened() -> Iterator[Sequence[Any]]:
            nonlocal open_parts
            first = 0
            for texts in parts:
                results: Any = [None] * len(texts) if width is None else empty((len(texts), width), dtype)
                open_parts = (*open_parts, _Part(first, texts, results, len(texts)))
                first += len(texts)
                yield texts

        def receive(positions: np.ndarray, found: Any) -> _Part:
            """Checks the results of a batch and stores them in their part, which is returned."""
            part = next(part for part in open_parts if positions[0] < part.first + len(part.texts))
            if isinstance(found, list):
                finite = np.array([all(np.isfinite(x).all() for x in of[1:] if x is not None) for of in found])
            else:
                finite = is_finite(found)
            if not finite.all():
                index = int(positions[~finite].min())
                reason = f"has a result that is not finite: {_cause(model)}"
                raise TextError(index, _item(part.texts, index - part.first), reason)
            found = found if isinstance(found, list) else convert(found)
            if isinstance(found, list):
                for position, of_text in zip(positions - part.first, found, strict=True):
                    part.results[position] = of_text
            else:
                part.results[positions - part.first] = found
            return part

        total = len(parts[0]) if isinstance(parts, list) and len(parts) == 1 else None
        if total == 1 and not show_progress_bar:
            (texts,) = opened()
            self._compute_alone(texts, tokenise, batch_size, lanes[0], receive)
            yield open_parts[0].results
            return
        # If an error is raised, `closing` ends the threads that tokenise and that read results.
        with (
            contextlib.closing(self.tokenised_parts(opened(), tokenise)) as chunks,
            progress_bar(total, unit, show_progress_bar) as bar,
        ):

            def watched() -> Iterator[tuple[int, Tokens]]:
                for first, chunk in chunks:
                    bar.set_postfix_str(f"{first + len(chunk)} tokenised", refresh=False)
                    bar.update(0)
                    yield first, chunk

            with contextlib.closing(self.run_on(watched(), batch_size, lanes, receive)) as received:
                for positions, part in received:
                    part.missing -= len(positions)
                    bar.update(len(positions))
                    while open_parts and not open_parts[0].missing:
                        first, *others = open_parts
                        open_parts = (*others,)
                        yield first.results
            yield from (part.results for part in open_parts)  # parts without texts

    def tokenised(self, texts: Sequence[Any], tokenise: Tokenise) -> Generator[tuple[int, Tokens]]:
        """Yields (position of the first text, tokens) of each chunk, then (`len(texts)`, no texts)."""
        return self.tokenised_parts([texts], tokenise)

    def tokenised_parts(self, parts: Iterable[Any], tokenise: Tokenise) -> Generator[tuple[int, Tokens]]:
        """Yields (position of the first text, tokens) of each chunk. After the last chunk of a part, yields no texts.

        A part is a sequence of texts, or `Tokens`. Positions count the texts of all parts.
        """
        alone = threading.Lock()  # held to tokenise a text of megabytes; several at a time could exhaust the memory

        def tokens(first: int, texts: Any, stays: bool, is_heavy: bool) -> Tokens:
            with alone if is_heavy else contextlib.nullcontext():
                return self._tokens(first, texts, tokenise, stays)

        most, ahead = _CHUNKS[1:][not self.packed], _AHEAD[not self.packed]

        def pieces() -> Iterator[tuple[int, Sequence[Any], bool, bool]]:
            """Yields each chunk: first position, texts, whether they stay in this process, whether they are heavy."""
            first = 0
            for texts in parts:
                weights = texts.lengths if isinstance(texts, Tokens) else map(self.characters, texts)
                ends = np.append(0, np.cumsum(np.fromiter(weights, np.int64, len(texts))))
                start, size = 0, _CHUNKS[0]
                while start < len(texts):
                    fitting = int(np.searchsorted(ends, ends[start] + _CHARACTERS, side="right")) - 1
                    stop = min(max(fitting, start + 1), start + size, len(texts))
                    characters = int(ends[stop] - ends[start])
                    # The devices wait for the first chunk of the call, which all cores tokenise in this process.
                    stays = first + start == 0 or characters > _LONG_MEAN * (stop - start)
                    yield first + start, texts[start:stop], stays, characters > _CHARACTERS
                    start, size = stop, min(size + size // 4, most)
                first += len(texts)
                yield first, texts[:0], True, False

        coming = deque[tuple[int, Future[Tokens] | Tokens]]()
        waiting, nothing = pieces(), Tokens.of([], with_types=self.with_types)

        def finished(first: int, chunk: Future[Tokens] | Tokens) -> tuple[int, Tokens]:
            return first, chunk if isinstance(chunk, Tokens) else chunk.result()

        beginning = [*itertools.islice(waiting, 2)]
        if len(beginning) == 2 and not len(beginning[1][1]):
            # The first part has a single chunk. Tokenise it in this thread: nothing could overlap with it.
            yield beginning[0][0], tokens(*beginning[0])
            yield beginning[1][0], nothing
            if not (beginning := [*itertools.islice(waiting, 1)]):
                return
        with ThreadPoolExecutor(max_workers=ahead) as threads, ThreadPoolExecutor(max_workers=_MOST_HELPERS) as more:
            for piece in itertools.chain(beginning, waiting):
                pool = threads if piece[2] or not self.helpers else more
                coming.append((piece[0], pool.submit(tokens, *piece) if len(piece[1]) else nothing))
                while len(coming) > ahead + self.helpers:
                    yield finished(*coming.popleft())
            yield from itertools.starmap(finished, coming)

    def _tokens(self, first: int, texts: Any, tokenise: Tokenise, stays: bool) -> Tokens:
        """Tokenises a chunk, whose first text is at the position `first`. See `Tokenise`."""
        if isinstance(texts, Tokens):
            return texts
        try:
            found = tokenise(texts, stays)
            return found if isinstance(found, Tokens) else Tokens.of(found, with_types=self.with_types)
        except TextError as error:
            raise TextError(first + error.index, texts[error.index], error.reason) from error

    def _compute_alone(
        self, text: Any, tokenise: Tokenise, batch_size: int, lane: Lane, receive: Callable[[np.ndarray, Any], Any]
    ) -> None:  # fmt: skip
        """Computes a part of one text as `run_on` does, without threads: nothing can overlap with it.

        On the host, `run_on` takes 1.4 times as long.
        """
        tokens = self._tokens(0, text, tokenise, True)
        size = min(batch_size, self._largest.get(lane.device, batch_size))
        # The same batch as `_cut`'s, in a fifth of the time.
        if self.packed:
            batch = self._packed(tokens, _bucket_of_one(size, self.limit, int(tokens.begins[1])))
        else:
            batch = self._padded(tokens, size)
        cut = _Cut(np.zeros(1, np.int64), tokens, size, batch)
        lane.wait(batch)
        work = _Work(cut, _finished(self._start(cut, lane)))
        for _ in self._finish(work, lane, lane, functools.partial(self._read, receive)):
            pass

    def run(
        self, chunks: Iterator[tuple[int, Tokens]], batch_size: int, compute: Callable[[Batch], Any]
    ) -> Generator[tuple[np.ndarray, Any]]:
        """Yields the results of batches on one device. See `run_on`."""
        return self.run_on(chunks, batch_size, [Lane(compute)])

    def run_on(
        self, chunks: Iterator[tuple[int, Tokens]], batch_size: int, lanes: Sequence[Lane],
        receive: Callable[[np.ndarray, Any], Any] = lambda _, results: results,
    ) -> Generator[tuple[np.ndarray, Any]]:  # fmt: skip
        """Yields (positions `[n]`, `receive(positions, results)`) of each batch; results are `[n, ...]`.

        Within a chunk, longer texts come first. Two threads for each lane start its batches, and wait for their results
        and call `receive`.

        An empty chunk ends a part. Texts before it and texts after it never share a batch. The last chunk is empty.

        Each batch goes to the lane with the fewest unfinished batches. If several lanes have the fewest, the first of
        them gets the batch.

        `Lane.compute` returns `[rows, ...]` for a padded batch and `[count, ...]` for a packed batch. It may instead
        return a tuple: token embeddings, padded `[rows, longest, D]` or packed `[capacity, D]`, and optionally an array
        of embeddings. The results are then a list of `Features`.

        If a device runs out of memory, its `batch_size` is halved for this batch, the rest of the call and later calls.
        """
        read, is_first = functools.partial(self._read, receive), True
        try:
            for cut in self._compiled(self._cut_all(chunks, batch_size, lanes[0]), lanes[0]):
                for lane in lanes:
                    while lane.has_result:
                        yield from self._finish(lane.in_flight.popleft(), lane, lanes[0], read)
                for lane in sorted(lanes, key=lambda lane: len(lane.in_flight)):
                    parts = self._fitting(cut, lane)
                    # The first lane takes any batch. Another lane takes a batch only if its program is compiled.
                    if lane is lanes[0] or (not lane.is_retired and all([lane.is_ready(part.batch) for part in parts])):
                        break
                for part in parts:
                    if not lane.is_ready(part.batch):  # the caller waits, so that an interrupt does not wait
                        while lane.in_flight:
                            yield from self._finish(lane.in_flight.popleft(), lane, lanes[0], read)
                        lane.wait(part.batch)
                    lane.add(part, self._start, read, is_first=is_first)
                    is_first = False
                    while len(lane.in_flight) > _IN_FLIGHT:
                        yield from self._finish(lane.in_flight.popleft(), lane, lanes[0], read)
            for lane in lanes:
                while lane.in_flight:
                    yield from self._finish(lane.in_flight.popleft(), lane, lanes[0], read)
        finally:
            for lane in lanes:
                lane.close()

    def _cut_all(self, chunks: Iterator[tuple[int, Tokens]], batch_size: int, lane: Lane) -> Iterator[_Cut]:
        """Yields the batches of chunks, cut for a lane. Their texts do not depend on how fast anything runs."""
        positions, texts = np.empty(0, np.int64), Tokens.of([], with_types=self.with_types)
        used: set[Bucket] = set()  # shapes of the part's batches so far
        for start, chunk in chunks:
            if len(chunk):
                positions = np.append(positions, start + np.arange(len(chunk)))
                texts += chunk
                order = np.argsort(-texts.lengths, kind="stable")
                positions, texts = positions[order], texts.in_order(order)
            done = 0  # number of texts in full batches; the remaining texts wait for the next chunk
            for cut in self._cut(positions, texts, batch_size, lane, used, last=len(chunk) == 0):
                done += len(cut.texts)
                yield cut
            positions, texts = positions[done:], texts[done:]
            if not len(chunk):
                used.clear()

    def _compiled(self, cuts: Iterator[_Cut], lane: Lane) -> Iterator[_Cut]:
        """Yields the batches in order. While a program is compiled, cuts later batches and starts their compilation."""
        waiting = deque[_Cut]()
        for cut in cuts:
            is_ready = lane.is_ready(cut.batch)  # starts the compilation
            if is_ready and not waiting:
                yield cut
                continue
            waiting.append(cut)
            while waiting and (len(waiting) > _CUT_AHEAD or lane.is_ready(waiting[0].batch)):
                yield waiting.popleft()
        yield from waiting

    def _cut(
        self, positions: np.ndarray, texts: Tokens, batch_size: int, lane: Lane, used: set[Bucket], *, last: bool
    ) -> Iterator[_Cut]:  # fmt: skip
        """Cuts texts, sorted by decreasing length, into batches of up to `batch_size` or the lane's limit, if smaller.

        Packed batches prefer the shapes in `used`, to which their shapes are added. Unless `last` is true, texts that
        do not fill a batch are left over.
        """
        # A text without tokens counts as one token. Otherwise no number of such texts would fill a batch.
        lengths = texts.lengths
        ends = np.append(0, np.cumsum(np.maximum(lengths, 1)))
        first = 0
        while first < len(texts):
            tokens, count = int(ends[-1] - ends[first]), len(texts) - first
            size = min(batch_size, self._largest.get(lane.device, batch_size))
            if not last and (tokens < size * self.limit if self.packed else count < size):
                return
            if self.packed:
                bucket, stop = _bucket(_buckets(size, self.limit), int(lengths[first]), ends, first, used)
                used.add(bucket)
                part = texts[first:stop]
                batch = self._packed(part, bucket)
            else:
                part = texts[first : first + size]
                batch = self._padded(part, size)
            stop = first + len(part)
            yield _Cut(positions[first:stop], part, size, batch)
            first = stop

    def _fitting(self, cut: _Cut, lane: Lane) -> Sequence[_Cut]:
        """Returns the batch. If it exceeds the lane's limit of batch_size, returns its texts in smaller batches."""
        if cut.batch_size <= self._largest.get(lane.device, cut.batch_size):
            return [cut]
        return [*self._cut(cut.positions, cut.texts, cut.batch_size, lane, set(), last=True)]

    def _start(self, cut: _Cut, lane: Lane) -> Any:
        """Starts the computation of a batch on a lane, and the copy of its results to the host.

        Returns the result, or the error. Once memory has run out, queued batches of that size are not tried.
        """
        with lane.guard:
            if cut.batch_size > self._largest.get(lane.device, cut.batch_size):
                return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a batch of this size did not fit before")
            try:
                result = lane.compute(cut.batch)
                for x in result if isinstance(result, tuple) else (result,):
                    _start_copy(x)
                return result
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" in str(error):
                    self._halve(cut.batch_size, lane)
                return error

    def _read(self, receive: Callable[[np.ndarray, Any], Any], work: _Work) -> Any:
        """Waits for the result of a batch. Returns what `receive` makes of it, or raises the error of the batch."""
        positions, texts, _, _ = work.cut
        result = work.started.result()
        if isinstance(result, jax.errors.JaxRuntimeError):
            raise result
        if isinstance(result, tuple):
            return receive(positions, self._features(texts, *map(_to_numpy, result)))
        return receive(positions, _to_numpy(result)[: len(positions)])

    def _halve(self, batch_size: int, lane: Lane) -> None:
        """Limits the batches of a lane to half of a size that did not fit."""
        half = max(batch_size // 2, 1)
        if half < self._largest.get(lane.device, batch_size):
            self._largest[lane.device] = half
            _log.warning(
                "%s has too little memory for batches of %d tokens; going on with %d (batch_size=%d)",
                _name(lane), batch_size * self.limit, half * self.limit, half,
            )  # fmt: skip

    def _finish(
        self, work: _Work, lane: Lane, first: Lane, read: Callable[[_Work], Any]
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yields the result of a batch. If memory ran out, computes the texts of the batch again in smaller batches."""
        positions, texts, batch_size, _ = work.cut
        try:
            result = read(work) if work.reading is None else work.reading.result()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or (batch_size == 1 and lane is first):
                raise
        else:
            yield positions, result
            return
        with lane.guard:
            self._halve(batch_size, lane)
        if batch_size == 1 and not lane.is_retired:  # other batches may have been queued for it
            lane.is_retired = True
            _log.warning("%s has too little memory for one text; going on without it", _name(lane))
        lane = first if lane.is_retired else lane
        for part in self._cut(positions, texts, max(batch_size // 2, 1), lane, set(), last=True):
            again = _Work(part, _finished(self._start(part, lane)))
            yield from self._finish(again, lane, first, read)

    def _features(self, texts: Tokens, tokens: np.ndarray, *pooled: np.ndarray) -> list[Features]:
        """Splits the results of a batch by text.

        The arrays are copies, so that they can be written to and do not keep the whole batch in memory.
        """
        if self.packed:
            of_texts = [tokens[begin:end].copy() for begin, end in itertools.pairwise(texts.begins)]
        else:
            of_texts = [row[:length].copy() for row, length in zip(tokens, texts.lengths, strict=False)]
        ids = [texts.ids[begin:end].copy() for begin, end in itertools.pairwise(texts.begins)]
        return [*map(Features, ids, of_texts, *(array.copy() for array in pooled))]

    def _padded(self, texts: Tokens, batch_size: int) -> Batch:
        rows = min(batch_size, 1 << (len(texts) - 1).bit_length())
        lengths = np.ones(rows, np.int32)  # a padding row has one token, so that its softmax and mean are finite
        lengths[: len(texts)] = texts.lengths
        longest = next(length for length in self._lengths if length >= lengths[0])
        taken = np.arange(longest) < lengths[: len(texts), None]

        def padded(tokens: np.ndarray, fill: int) -> np.ndarray:
            result = np.full((rows, longest), fill, np.int32)
            result[: len(texts)][taken] = tokens
            return result

        types = None if texts.type_ids is None else padded(texts.type_ids, 0)
        return Batch(padded(texts.ids, self.padding), types, lengths, longest)

    def blanks(self, batch_size: int) -> list[Batch]:
        """Returns an empty batch of each shape that batches of up to `batch_size` can have, smallest shape first."""
        nothing = Tokens.of([], with_types=self.with_types)
        if self.packed:
            shapes = sorted(_buckets(batch_size, self.limit), key=lambda bucket: bucket.capacity)
            return [self._packed(nothing, bucket) for bucket in shapes]
        found = []
        for longest, rows in itertools.product(self._lengths, _powers(2, 1, batch_size)):
            ids = np.full((rows, longest), self.padding, np.int32)
            found.append(Batch(ids, np.zeros_like(ids) if self.with_types else None, np.ones(rows, np.int32), longest))
        return sorted(found, key=lambda batch: batch.input_ids.size)

    def _packed(self, texts: Tokens, bucket: Bucket) -> Batch:
        def packed(tokens: np.ndarray, fill: int) -> np.ndarray:
            result = np.full(bucket.capacity, fill, np.int32)
            result[: len(tokens)] = tokens
            return result

        begins = np.full(bucket.count + 1, texts.begins[-1], np.int32)
        begins[: len(texts) + 1] = texts.begins
        types = None if texts.type_ids is None else packed(texts.type_ids, 0)
        return Batch(packed(texts.ids, self.padding), types, begins, bucket.longest)


def _name(lane: Lane) -> str:
    return "the device" if lane.device is None else f"the device {lane.device}"


def _cause(model: nnx.Module) -> str:
    """Returns the reason why results of a model are not finite."""
    for name, parameter in named_parameters(model).items():
        if not jnp.isfinite(parameter.get_value()).all():
            return f"the model's parameter {name.removeprefix('encoder.')} has NaN or infinite values"
    bert = encoder_of(model)
    dtype = bert.embeddings.options.dtype
    return f"numbers overflow in {dtype}" + "; bfloat16 and float32 have a larger range" * (dtype == jnp.float16)


def _bucket(
    all_buckets: Sequence[Bucket], longest: int, ends: np.ndarray, first: int, used: Collection[Bucket]
) -> tuple[Bucket, int]:  # fmt: skip
    """Returns the shape of the batch that starts at text `first`, and the position after its last text.

    Picks the shape with the lowest cost per token; see `_OVERHEAD`. If other shapes are `used`, a new shape costs
    `_OVERHEAD` once more, and all remaining tokens share this cost.

    Args:
      all_buckets: the shapes, sorted by `longest`, then `capacity`.
      longest: the number of tokens of text `first`, which is the longest remaining text.
      ends: text `i` has the tokens `ends[i]` to `ends[i + 1]`. Texts are sorted by decreasing length.
      first: the position of the first text of the batch.
      used: the shapes of earlier batches.
    """
    shapes = {bucket.capacity: bucket for bucket in reversed(all_buckets) if bucket.longest >= longest}.values()
    fitting = np.searchsorted(ends, [ends[first] + bucket.capacity for bucket in shapes], side="right") - 1
    stops = [min(int(stop), first + bucket.count) for stop, bucket in zip(fitting, shapes, strict=True)]

    def cost(shape: tuple[Bucket, int]) -> float:
        further = _OVERHEAD / (ends[-1] - ends[first]) if used and shape[0] not in used else 0.0
        return (shape[0].capacity + _OVERHEAD) / (ends[shape[1]] - ends[first]) + further

    return min(zip(shapes, stops, strict=True), key=cost)


@functools.lru_cache
def _bucket_of_one(batch_size: int, limit: int, length: int) -> Bucket:
    """Returns the shape of a batch of one text with `length` tokens."""
    return _bucket(_buckets(batch_size, limit), length, np.array([0, max(length, 1)]), 0, ())[0]


def packs(implementation: str | None) -> bool:
    """Returns whether packing is the default. It is if variable-length attention runs as a kernel on this device."""
    return dispatch.choose("varlen_qkv_attention", implementation, {"triton": None}).name != "xla"


def padded_lengths(limit: int) -> tuple[int, ...]:
    """Returns the lengths that texts are padded to: 16, 32, 48, 64, 96, 128, 192, ... below `limit`, then `limit`."""
    lengths, power = [16], 32
    while lengths[-1] < limit:
        lengths += [power, power + power // 2]
        power *= 2
    return (*(length for length in lengths if length < limit), limit)


def is_sequence(value: Any) -> bool:
    """Returns whether `value` is a NumPy array with at least one axis, or a sequence other than a str or bytes."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def as_list(op: str, name: str, values: Any, expected: str) -> list[Any]:
    """Converts an iterable to a list. Raises a TypeError for the same values as `as_iterator`."""
    if hasattr(values, "to_pylist"):  # an Arrow array, which would iterate over Arrow scalars instead of str
        return values.to_pylist()
    return [*as_iterator(op, name, values, expected)]


def as_iterator(op: str, name: str, values: Any, expected: str) -> Iterator[Any]:
    """Returns an iterator of items. For a scalar, mapping or table, raises a TypeError that says what is `expected`.

    Mappings and tables are refused because they would iterate over their keys or column names.
    """
    is_scalar = isinstance(values, str | bytes | bytearray | memoryview | Mapping) or getattr(values, "ndim", 1) == 0
    is_table = hasattr(values, "columns")
    try:
        items = None if is_scalar or is_table else iter(values)
    except TypeError:
        items = None
    if items is None:
        advice = ", a table: pass one of its columns, or .values for pairs" * is_table
        raise TypeError(f"{op}: {name} must be {expected}, got {type(values).__name__}{advice}")
    return items


def as_texts(op: str, name: str, texts: Any) -> list[str]:
    """Converts a str or an iterable of str to a list, and checks that each text is valid Unicode."""
    texts = [texts] if isinstance(texts, str) else as_list(op, name, texts, "a str or an iterable of str")
    for index, text in enumerate(texts):
        if not (isinstance(text, str) and text.isascii()):
            as_text(op, f"{name}[{index}]", text)
    return texts


def as_text(op: str, name: str, text: Any) -> str:
    """Checks that a text is a str of valid Unicode."""
    if not isinstance(text, str):
        raise TypeError(f"{op}: {name} must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{op}: {name} is not valid Unicode: {error.reason}") from error
    return text


def check_batch_size(op: str, batch_size: Any) -> int:
    """Returns `batch_size` as a Python integer. Raises a ValueError if it is not a positive integer."""
    if not (checks.is_natural(batch_size) and batch_size > 0):
        raise ValueError(f"{op}: batch_size must be a positive integer, got {batch_size!r}")
    return int(batch_size)


def is_terminal() -> bool:
    """Returns whether stderr is a terminal. A process that was started with stderr closed has none."""
    return sys.stderr is not None and sys.stderr.isatty()


def progress_bar(total: int | None, unit: str, show: bool | None) -> "tqdm":
    """Creates a progress bar on stderr.

    With `show=None`, the bar is shown on a terminal if `total` is more than 1,000. `total=None` means that the number
    of texts is unknown; `show=None` then shows nothing.
    """
    from tqdm import tqdm

    terminal = is_terminal()
    if show is None:
        show = total is not None and total > _LONG_WORK and terminal
    # In a log file, each update appends text. So updates are rare unless stderr is a terminal.
    hidden = not show or sys.stderr is None
    return tqdm(total=total, unit=unit, disable=hidden, mininterval=0.1 if terminal else 10.0, miniters=0)
