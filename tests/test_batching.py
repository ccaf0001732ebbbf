"""Batches of texts, with NumPy in place of a device: every text is in exactly one batch, and there are few shapes."""

import dataclasses
import itertools
import logging
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import seeds
from jaxft import dispatch
from jaxft.text import batching
from jaxft.text.batching import Batcher, Bucket, Lane, Tokens

PADDING = 99
PACKED = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


@dataclasses.dataclass
class Text:
    """Fields that a batcher reads of an encoding of the tokenizers library."""

    ids: list[int]
    type_ids: list[int]

    def __len__(self):
        return len(self.ids)


def texts_of(lengths):
    """Returns texts of these lengths. Text i has the tokens i, i + 1, ..., and its own token types."""
    return [Text([*range(i, i + n)], [j % 2 + i for j in range(n)]) for i, n in enumerate(lengths)]


def chunked(texts, *sizes, types=False):
    """Yields chunks as `tokenised` does, with these sizes (the last one repeats) and an empty chunk at the end."""
    start = 0
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        yield start, Tokens.of(texts[start : start + size], with_types=types)
        if start >= len(texts):
            return
        start += size


def sequences(batch):
    """Returns (tokens, types) of each sequence of a batch."""
    for part in (batch.input_ids, batch.token_type_ids):
        assert part is None or (part.dtype == np.int32 and part.shape == batch.input_ids.shape)
    rows = itertools.pairwise(batch.lengths) if batch.input_ids.ndim == 1 else ((0, n) for n in batch.lengths)
    for row, (begin, end) in enumerate(rows):
        assert 0 <= end - begin <= batch.longest
        where = slice(begin, end) if batch.input_ids.ndim == 1 else (row, slice(begin, end))
        yield batch.input_ids[where], None if batch.token_type_ids is None else batch.token_type_ids[where]


class Device:
    """Device whose `compute` returns length, sum of tokens and sum of types per sequence. It keeps the batches."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch):
        self.seen.append(batch)
        return np.array([(len(ids), ids.sum(), 0 if types is None else types.sum()) for ids, types in sequences(batch)])

    @property
    def shapes(self):
        return [shape_of(batch) for batch in self.seen]


def shape_of(batch):
    if batch.input_ids.ndim == 1:
        return Bucket(len(batch.input_ids), len(batch.lengths) - 1, batch.longest)
    return batch.input_ids.shape


def run(batcher, texts, batch_size, compute=None, sizes=(5, 17)):
    """Returns the results of all texts in their order. Fails unless each text came exactly once."""
    compute = compute or Device()
    chunks = chunked(texts, *sizes, types=batcher.with_types)
    found = list(batcher.run(chunks, batch_size, compute))
    positions = np.concatenate([p for p, _ in found]) if found else np.empty(0, int)
    assert sorted(positions.tolist()) == list(range(len(texts)))
    assert all(len(p) == len(results) > 0 for p, results in found)
    return {int(p): tuple(map(int, result)) for ps, results in found for p, result in zip(ps, results, strict=True)}


def expected(texts, types=False):
    return {i: (len(text), sum(text.ids), sum(text.type_ids) if types else 0) for i, text in enumerate(texts)}


def make(packed, limit=64, types=False):
    return Batcher(limit=limit, padding=PADDING, packed=packed, with_types=types)


# --- Buckets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "limit", "shapes"),
    [
        (4, 48, [(192, 24, 32), (64, 10, 48), (128, 21, 48), (192, 16, 48)]),
        (2, 64, [(128, 16, 32), (64, 8, 64), (128, 8, 64)]),
        (1, 510, [(510, 63, 32), (64, 8, 64), (128, 16, 64), (256, 32, 64), (510, 31, 64), (128, 8, 128),
                  (510, 15, 128), (256, 8, 256), (510, 7, 256), (510, 4, 510)]),
        (8, 300, [(2400, 300, 32), (64, 8, 64), (128, 16, 64), (256, 32, 64), (512, 64, 64), (1024, 128, 64),
                  (2400, 150, 64), (128, 8, 128), (2400, 75, 128), (256, 8, 256), (512, 16, 256), (1024, 32, 256),
                  (2400, 37, 256), (512, 13, 300), (1024, 27, 300), (2400, 32, 300)]),
        (1, 20, [(20, 4, 20)]),
        (7, 10, [(64, 51, 10), (70, 28, 10)]),
        (3, 1, [(3, 3, 1)]),
    ],
)  # fmt: skip
def test_buckets(batch_size, limit, shapes):
    assert batching.buckets(batch_size, limit) == [Bucket(*shape) for shape in shapes]


@pytest.mark.parametrize("limit", [1, 31, 32, 33, 510, 512])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 32, 1000])
def test_buckets_are_few_and_within_the_budget(batch_size, limit):
    found = batching.buckets(batch_size, limit)
    assert len(found) == len(set(found)) <= limit.bit_length() * (batch_size * limit).bit_length()
    assert max(bucket.capacity for bucket in found) == batch_size * limit
    assert max(bucket.longest for bucket in found) == limit
    for bucket in found:
        assert bucket.longest <= bucket.capacity and 1 <= bucket.count <= bucket.capacity


def lengths_of(kind, limit, count=1000):
    """Returns the numbers of tokens of texts of some kind."""
    rng = np.random.default_rng(limit)
    return np.minimum(limit, {
        "queries": rng.integers(4, 17, count),
        "docstrings": rng.lognormal(np.log(33), 0.5, count).astype(int),
        "documents": rng.lognormal(np.log(limit / 4), 0.8, count).astype(int) + 1,
        "uniform": rng.integers(1, limit + 1, count),
        "equal": np.full(count, limit * 5 // 8),
        "one long": np.append(rng.integers(4, 17, count - 1), limit),
    }[kind])  # fmt: skip


@pytest.mark.parametrize(("batch_size", "limit"), [(1, 8192), (64, 8192), (256, 8192), (32, 8194), (32, 5000)])
def test_long_inputs_have_at_most_45_shapes(batch_size, limit):
    assert len(batching.buckets(batch_size, limit)) <= 45


# Padding in percent of the tokens of 1,000 texts, and the number of programs. `before` is the padding when rows and
# longest sequence were powers of two, in 20, 39, 62 and 89 shapes.
@pytest.mark.parametrize(
    ("limit", "shapes", "programs", "padding", "before"),
    [
        (128, 12, [4, 4, 3, 3, 4, 4], [8.6, 0.5, 1.5, 1.0, 0.6, 5.6], [8.6, 0.5, 1.5, 1.0, 0.5, 27.2]),
        (512, 18, [2, 5, 5, 5, 4, 5], [8.4, 0.6, 0.7, 0.8, 0.6, 8.1], [6.6, 8.4, 1.2, 1.8, 0.5, 69.4]),
        (2048, 28, [4, 5, 8, 6, 3, 4], [7.8, 1.1, 0.5, 0.9, 0.5, 7.5], [7.8, 16.8, 1.3, 1.1, 0.5, 56.5]),
        (8192, 41, [3, 5, 8, 9, 3, 5], [8.2, 0.3, 0.7, 1.0, 0.5, 4.3], [8.2, 20.2, 0.7, 1.8, 0.5, 48.4]),
    ],
)
def test_shapes_are_few_and_have_little_padding(limit, shapes, programs, padding, before):
    assert len(batching.buckets(32, limit)) == shapes
    kinds = ("queries", "docstrings", "documents", "uniform", "equal", "one long")
    for kind, count, percent, most in zip(kinds, programs, padding, before, strict=True):
        lengths, seen = lengths_of(kind, limit), []
        begins = np.append(0, np.cumsum(lengths))
        texts = Tokens(begins, np.zeros(begins[-1], np.int32), None)
        chunks = iter([(0, texts[:512]), (512, texts[512:]), (len(texts), texts[:0])])

        def compute(batch, seen=seen):
            seen.append((len(batch.input_ids), len(batch.lengths), batch.longest))
            return batch.lengths[:-1]

        for _ in Batcher(limit=limit, padding=PADDING, packed=True).run(chunks, 32, compute):
            pass
        found = 100 * (sum(rows for rows, _, _ in seen) / begins[-1] - 1)
        assert found == pytest.approx(percent, abs=0.06), kind
        # Five batches in two shapes have more padding than nine batches in five shapes.
        assert found < most + (2 if (kind, limit) == ("queries", 512) else 0.15), kind
        assert len(set(seen)) == count, kind


# --- Every text, once ----------------------------------------------------------------------------------------------


@PACKED
@pytest.mark.parametrize("types", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("limit", [5, 20, 64, 510])
def test_every_text_is_in_one_batch(packed, types, batch_size, limit):
    lengths = np.random.default_rng(limit).integers(0, limit + 1, 100)
    texts = texts_of(lengths)
    assert run(make(packed, limit, types), texts, batch_size) == expected(texts, types)


@PACKED
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [64], [64, *[1] * 40], [64] * 9], ids=str)
def test_few_and_extreme_texts(packed, lengths):
    texts, device = texts_of(lengths), Device()
    assert run(make(packed), texts, 4, device) == expected(texts)
    assert bool(device.seen) == bool(lengths)


@pytest.mark.parametrize("seed", seeds(20))
def test_random_texts(seed):
    """Batches keep all promises for short, long and mixed lengths."""
    rng = np.random.default_rng(seed)
    limit, batch_size = int(rng.choice([1, 7, 32, 48, 100, 510])), int(rng.choice([1, 2, 5, 32, 100]))
    spread = rng.choice([0.02, 0.3, 1.0])
    lengths = np.minimum(rng.exponential(spread * limit, int(rng.integers(0, 400))), limit).astype(int)
    texts, types, sizes = texts_of(lengths), bool(rng.random() < 0.5), rng.integers(1, 90, 2).tolist()

    packed = Device()
    assert run(make(True, limit, types), texts, batch_size, packed, sizes) == expected(texts, types), seed
    buckets = batching.buckets(batch_size, limit)
    assert set(packed.shapes) <= set(buckets)
    for i, (batch, bucket) in enumerate(zip(packed.seen, packed.shapes, strict=True)):
        tokens, count = batch.lengths[-1], int(np.count_nonzero(np.diff(batch.lengths)))
        assert (batch.input_ids[tokens:] == PADDING).all()
        smaller = [b for b in buckets if b.longest >= batch.lengths[1] and tokens <= b.capacity < bucket.capacity]
        fitting = all(b.count < count for b in smaller)
        assert fitting or bucket in packed.shapes[:i] or 0 in lengths, (seed, tokens, bucket)

    padded = Device()
    assert run(make(False, limit, types), texts, batch_size, padded, sizes) == expected(texts, types), seed
    rows = {*batching._powers(2, 1, batch_size)}
    assert set(padded.shapes) <= set(itertools.product(rows, batching.padded_lengths(limit)))
    assert sum(shape[0] < batch_size for shape in padded.shapes) <= 1
    for batch in padded.seen:
        assert (batch.input_ids[np.arange(batch.longest) >= batch.lengths[:, None]] == PADDING).all()
        assert (batch.lengths <= batch.longest).all()


@pytest.mark.parametrize(
    ("count", "batch_size", "capacities"),
    [(1, 4, [64]), (3, 4, [64]), (6, 4, [128]), (9, 4, [256]), (13, 4, [256] * 2), (30, 4, [256] * 3),
     (103, 32, [2048, 64]), (130, 32, [2048, 512, 64]), (54, 16, [1024, 64])],
)  # fmt: skip
def test_last_batches_have_the_lowest_cost(count, batch_size, capacities):
    """A batch costs 256 rows more than it has, and the first batch of a further shape 512."""
    device = Device()
    run(make(True), texts_of([20] * count), batch_size, device, (count,))
    assert [bucket.capacity for bucket in device.shapes] == capacities


def test_shapes_of_a_part_do_not_depend_on_other_parts():
    device, alone = Device(), Device()
    texts = texts_of([20] * 33)
    parts = [(0, 30), (30, 30), (30, 33), (33, 33)]
    list(make(True).run(((i, Tokens.of(texts[i:j], with_types=False)) for i, j in parts), 4, device))
    run(make(True), texts[30:], 4, alone, (3,))
    assert [bucket.capacity for bucket in device.shapes] == [256, 256, 256, 64]
    assert device.shapes[3:] == alone.shapes


def test_longest_texts_come_first_in_stable_order():
    (positions, _), *_ = make(False).run(chunked(texts_of([3, 9, 3, 40, 9]), 5), 8, Device())
    assert positions.tolist() == [3, 1, 4, 0, 2]


@PACKED
@pytest.mark.parametrize("lengths", [[0], [1], [1, 2, 0], [64], [3, 64, 1, 30, 2]], ids=str)
def test_chunks_leave_few_texts_over(packed, lengths, monkeypatch):
    """Less than a batch is left, so that memory does not grow with the number of texts."""
    monkeypatch.setattr(batching, "_IN_FLIGHT", 0)
    texts, done, left = texts_of(lengths * 400), [], []

    def watched():
        for start, chunk in chunked(texts, 50):
            left.append(start - len(done))
            yield start, chunk

    for positions, _ in make(packed).run(watched(), 4, Device()):
        done.extend(positions)
    assert len(left) == len(texts) // 50 + 1 and max(left) < (4 * 64 if packed else 4)


def test_batches_in_flight_are_bounded():
    running = set()

    class Result:
        def __init__(self, values):
            self.values = values
            running.add(self)
            most.append(len(running))

        def __array__(self, dtype=None, copy=None):
            while len(most) <= batching._IN_FLIGHT:
                time.sleep(0.001)
            running.discard(self)
            return self.values

    device, most = Device(), []
    texts = texts_of([5] * 300)
    assert run(make(False), texts, 4, lambda batch: Result(device(batch)), (300,)) == expected(texts)
    assert max(most) == batching._IN_FLIGHT + 1 and not running


def received(batcher, texts):
    """Returns the threads in which the results of batches are received."""
    before, found = threads(), []

    def receive(positions, results):
        found.append(threading.current_thread())
        return results

    lanes = [batching.Lane(Device())]
    done = list(batcher.run_on(chunked(texts, len(texts)), 4, lanes, receive))
    assert {int(p): int(n) for ps, rows in done for p, (n, _, _) in zip(ps, rows, strict=True)} == {
        i: len(text) for i, text in enumerate(texts)
    }
    assert threads() == before
    return found


def test_thread_receives_results_of_several_batches():
    assert received(make(False), texts_of([5] * 4)) == [threading.current_thread()]
    (thread,) = {*received(make(False), texts_of([5] * 80))}
    assert thread is not threading.current_thread()


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("kind", ["array", "features"])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_results_of_a_cpu_are_awaited_and_not_copied(monkeypatch, on_cpu, kind, count):
    """Otherwise JAX 0.11 may abort at the end of the process. Results of other devices are copied while they run."""
    copied, ready, asarray, array = [], [], np.asarray, type(jnp.zeros(1))
    (cpu, *_) = jax.devices("cpu")

    def slowly(lengths):
        spent = jax.lax.fori_loop(0, 50, lambda _, x: x @ x, jnp.zeros((500, 500)))
        return lengths + spent[0, 0].astype(jnp.int32)

    def compute(batch):
        lengths = slow(batch.lengths)
        tokens = jnp.zeros((*batch.input_ids.shape, 3), device=cpu)
        return (tokens, lengths) if kind == "features" else lengths

    def read(x, *arguments, **options):
        ready.extend([x.is_ready()] if isinstance(x, array) else [])
        return asarray(x, *arguments, **options)

    with jax.default_device(cpu):
        slow = jax.jit(slowly).lower(np.ones(4, np.int32)).compile()
    if not on_cpu:
        monkeypatch.setattr(batching, "_platform", lambda _: "gpu")
    monkeypatch.setattr(array, "copy_to_host_async", lambda x: copied.append(x))
    monkeypatch.setattr(np, "asarray", read)
    texts = texts_of([5] * count)
    found = [*make(False).run(chunked(texts, count), 4, compute)]
    batches = -(-count // 4)
    assert len(found) == batches and len(copied) == (0 if on_cpu else batches * (1 + (kind == "features")))
    assert len(ready) >= batches and (all(ready) or not on_cpu)


def test_results_in_the_hosts_memory_are_not_copied(monkeypatch):
    copied, places = [], (jax.memory.Space.Host, jax.memory.Space.Device)
    monkeypatch.setattr(type(jnp.zeros(1)), "copy_to_host_async", lambda x: copied.append(x.sharding.memory_kind))
    monkeypatch.setattr(batching, "_platform", lambda _: "gpu")
    for place in places:
        [*make(False).run(chunked(texts_of([5]), 1), 4, lambda batch: jax.device_put(batch.lengths, place))]  # noqa: B023
    assert copied == [jax.devices()[0].default_memory().kind]


@pytest.mark.parametrize("packed", [False, True])
def test_one_text_is_batched_as_the_last_of_many(packed):
    batcher, seen, expected = make(packed), [], []
    lane = Lane(lambda batch: seen.append(batch) or np.zeros((len(batch.lengths), 2), np.float32))
    for length, size in itertools.product((0, 1, 31, 32, 33, 64), (1, 2, 32)):
        tokens = Tokens.of(texts_of([length]), with_types=False)
        [_] = batcher.compute_parts(
            [tokens], lambda texts, _: texts, size, [lane], model=None, width=2, unit="text", show_progress_bar=False
        )  # fmt: skip
        expected += [cut.batch for cut in batcher._cut(np.zeros(1, np.int64), tokens, size, lane, set(), last=True)]
    assert len(seen) == len(expected)
    for batch, other in zip(seen, expected, strict=True):
        for a, b in zip(batch, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("settings", [lambda: 0, threading.get_ident])
def test_thread_with_the_same_settings_starts_all_batches_but_the_first(settings):
    started, device = [], Device()
    lane = batching.Lane(lambda batch: started.append(threading.current_thread()) or device(batch), settings=settings)
    texts = texts_of([5] * 80)
    assert sum(len(positions) for positions, _ in make(False).run_on(chunked(texts, 80), 4, [lane])) == 80
    first, *others = started
    assert first is threading.current_thread() and len(others) == 19
    assert (first in others) == (settings is threading.get_ident) and len({*others}) == 1


def test_caller_waits_for_a_program():
    """Ctrl-C interrupts the caller, but not another thread. Batches in flight are finished before the caller waits."""
    ready, events, device = set(), [], Device()

    def wait(batch):
        events.append(threading.current_thread())
        ready.add(batch.input_ids.shape)

    lane = batching.Lane(device, is_ready=lambda batch: batch.input_ids.shape in ready, wait=wait)
    texts = texts_of([5] * 8 + [30] * 8)
    found = [len(positions) for positions, _ in make(False).run_on(chunked(texts, 16), 4, [lane])]
    assert sum(found) == 16 and len(ready) > 1 and {*events} == {threading.current_thread()}


def test_results_are_received_where_no_thread_can_start(monkeypatch):
    def refuse(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(batching.ThreadPoolExecutor, "submit", refuse)
    assert {*received(make(False), texts_of([5] * 80))} == {threading.current_thread()}


def test_finished_results_make_room_on_a_lane():
    lane = batching.Lane(Device())
    assert not lane.has_result
    for _ in range(2):
        lane.in_flight.append(batching._Work(None, None))
    assert not lane.has_result
    for work in lane.in_flight:
        work.reading = batching.Future()
    lane.in_flight[1].reading.set_result(None)
    assert not lane.has_result
    lane.in_flight[0].reading.set_result(None)
    assert lane.has_result


def test_batch_goes_to_the_lane_with_the_fewest_batches():
    slow, fast, release = Device(), Device(), threading.Event()

    class Held:
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            if not release.wait(5):
                raise TimeoutError("the slow lane is full")
            return self.values

    started = []
    lanes = [
        batching.Lane(lambda batch: Held(slow(batch))),
        batching.Lane(lambda batch: started.append(threading.current_thread()) or fast(batch)),
    ]
    texts = texts_of([5] * 80)

    def chunks():
        for chunk in chunked(texts, 4):
            yield chunk
            while any(work.reading and not work.reading.done() for work in lanes[1].in_flight):
                time.sleep(0.001)
        release.set()

    done = [*make(False).run_on(chunks(), 4, lanes)]
    assert sorted(int(position) for positions, _ in done for position in positions) == [*range(80)]
    assert len(slow.seen) == 1 and len(fast.seen) == 19
    assert threading.current_thread() not in started  # the caller starts the first batch of all lanes only


# --- Too little memory ---------------------------------------------------------------------------------------------


def exhausted():
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes")


class Unreadable:
    """Result of a computation that failed after it was started."""

    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


class SmallDevice(Device):
    """Device with memory for `capacity` tokens, padding included. It fails at once, or when a result is read."""

    def __init__(self, memory, when, error=None):
        super().__init__()
        self.memory, self.when, self.error, self.failures = memory, when, error or exhausted(), 0

    def __call__(self, batch):
        if batch.input_ids.size <= self.memory:
            return super().__call__(batch)
        self.failures += 1
        if self.when == "reading":
            return Unreadable(self.error)
        raise self.error


@PACKED
@pytest.mark.parametrize("when", ["dispatch", "reading"])
@pytest.mark.parametrize(("batch_size", "fitting"), [(16, 8), (16, 1), (13, 3), (32, 4)])
def test_too_little_memory(packed, when, batch_size, fitting, caplog):
    """The batch size is halved until a batch fits, with one log line each time, and stays at that size."""
    texts, batcher = texts_of([64, 60, 40, 64, 50, 33, 0] * 30), make(packed)
    device = SmallDevice(fitting * 64, when)
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert run(batcher, texts, batch_size, device, (90,)) == expected(texts)
    halvings = [batch_size >> n for n in range(1, 9) if batch_size >> n >= fitting]
    sizes = [batch_size, *halvings]
    assert caplog.messages == [
        f"the device has too little memory for batches of {size * 64} tokens; going on with {half * 64}"
        f" (batch_size={half})"
        for size, half in itertools.pairwise(sizes)
    ]
    if when == "dispatch":  # the first failure of each size is enough
        assert device.failures == len(halvings)
    failures = device.failures
    caplog.clear()
    for size in (batch_size, 2 * batch_size):
        assert run(batcher, texts, size, device) == expected(texts)
    assert device.failures == failures and not caplog.messages
    assert run(batcher, texts, 1, device) == expected(texts)


def test_failed_batches_in_flight_are_retried(caplog):
    device, texts = SmallDevice(128, "reading"), texts_of([64] * 80)
    assert run(make(True), texts, 4, device, (80,)) == expected(texts)
    assert 1 <= device.failures <= batching._IN_FLIGHT + 1 and len(caplog.messages) == 1


@PACKED
@pytest.mark.parametrize("when", ["dispatch", "reading"])
def test_no_memory_for_one_text_raises(packed, when, caplog):
    device = SmallDevice(0, when)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        run(make(packed), texts_of([64] * 20), 4, device)
    assert [message[-14:] for message in caplog.messages] == ["(batch_size=2)", "(batch_size=1)"]


@pytest.mark.parametrize("when", ["dispatch", "reading"])
@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: broken"), ValueError("broken")])
def test_other_errors_pass(when, error, caplog):
    device = SmallDevice(0, when, error)
    with pytest.raises(type(error), match="broken"):
        run(make(True), texts_of([64] * 20), 4, device)
    assert not caplog.messages


# --- One text alone ------------------------------------------------------------------------------------------------


def alone(batcher, texts, lane, **options):
    """Returns the result of a call with one text, which is its own encoding."""
    options = {"model": None, "width": 3, "unit": "text", "show_progress_bar": None, "dtype": np.int64} | options
    (found,) = batcher.compute_parts([texts], lambda texts, _: texts, 8, [lane], **options)
    return found


@PACKED
def test_text_alone_has_its_own_way(packed, monkeypatch):
    """A query waits for its result, so it pays for no thread, queue or progress bar."""
    texts, device, bar = texts_of([9]), Device(), Device()
    expected = alone(make(packed), texts, Lane(bar), show_progress_bar=True)
    monkeypatch.setattr(batching.Batcher, "run_on", None)
    monkeypatch.setattr(batching, "progress_bar", None)
    np.testing.assert_array_equal(alone(make(packed), texts, Lane(device)), expected)
    assert expected.tolist() == [[9, sum(texts[0].ids), 0]] and device.shapes == bar.shapes
    np.testing.assert_array_equal(alone(make(packed), Tokens.of(texts, with_types=False), Lane(device)), expected)


@pytest.mark.parametrize("when", ["dispatch", "reading"])
def test_text_alone_is_tried_again_with_less_memory(when, caplog):
    class BusyDevice(SmallDevice):
        def __call__(self, batch):
            self.memory = 64 * (self.failures > 1)  # another process frees memory
            return super().__call__(batch)

    texts = texts_of([64])
    found = alone(make(True), texts, Lane(BusyDevice(0, when)))
    assert found.tolist() == [[64, sum(texts[0].ids), 0]]
    assert [message[-14:] for message in caplog.messages] == ["(batch_size=4)", "(batch_size=2)"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        alone(make(True), texts, Lane(SmallDevice(0, when)))


def test_text_alone_waits_for_its_program():
    """The caller waits before the batch is started, so that an interrupt ends the call."""
    waited = []
    lane = Lane(lambda batch: waited.append("started") or Device()(batch), wait=lambda _: waited.append("waited"))
    alone(make(True), texts_of([5]), lane)
    assert waited == ["waited", "started"]


# --- Tokenising ----------------------------------------------------------------------------------------------------


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")}


@pytest.mark.parametrize("types", [True, False])
def test_tokens(types):
    """The lists of tokens are cut, reordered and packed."""
    texts = texts_of([3, 0, 7, 1, 0])
    tokens = Tokens.of(texts, with_types=types)
    order = np.array([2, 1, 4, 0, 3])
    for found, wanted in [
        (tokens, texts), (tokens[1:3], texts[1:3]), (tokens[2:], texts[2:]), (tokens[5:], []), (tokens[2:2], []),
        (tokens.in_order(order), [texts[i] for i in order]), (tokens[3:].in_order(np.array([1, 0])), texts[:2:-1]),
        (tokens[1:4] + tokens[:1], texts[1:4] + texts[:1]), (tokens[:0] + tokens[5:], []),
    ]:  # fmt: skip
        assert len(found) == len(wanted) and found.lengths.tolist() == [len(text) for text in wanted]
        for name in ("ids", "type_ids") if types else ("ids",):
            assert getattr(found, name).dtype == np.int32
            assert getattr(found, name).tolist() == [token for text in wanted for token in getattr(text, name)]
        assert types or found.type_ids is None


def of_one_token(numbers, stays=True):
    return [Text([n], [0]) for n in numbers]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 30])
def test_tokenised(monkeypatch, count):
    monkeypatch.setattr(batching, "_CHUNKS", (4, 7, 9))
    before = threads()
    where = []

    def tokenise(texts, _):
        where.append(threading.current_thread())
        return of_one_token(texts)

    found = list(make(True).tokenised(range(count), tokenise))
    assert (threading.current_thread() in where) == (0 < count <= 4)  # a single chunk is not worth a thread
    assert [n for _, chunk in found for n in chunk.ids] == list(range(count))
    assert all(chunk.ids[0] == start for start, chunk in found[:-1])
    sizes = {0: [], 1: [1], 4: [4], 5: [4, 1], 30: [4, 5, 6, 7, 7, 1]}[count]
    assert [len(chunk) for _, chunk in found] == [*sizes, 0] and found[-1][0] == count
    padded = [len(chunk) for _, chunk in make(False).tokenised(range(count), of_one_token)]
    assert count < 30 or padded == [4, 5, 6, 7, 8, 0]
    assert threads() == before


@PACKED
def test_tokenising_runs_ahead_of_the_device(packed, monkeypatch):
    monkeypatch.setattr(batching, "_CHUNKS", (3, 3, 3))
    before, ahead, done = threads(), 3 if packed else 1, []
    chunks = make(packed).tokenised(range(100), lambda texts, _: done.extend(texts) or of_one_token(texts))
    for start, chunk in itertools.islice(chunks, 5):
        assert len(done) <= start + 3 * (1 + ahead) and chunk.ids.tolist() == [*range(start, start + 3)]
        assert set(chunk.ids) <= set(done) and 0 < len(threads() - before) <= ahead
    chunks.close()  # the caller stops early
    assert len(done) <= 3 * (5 + ahead) and threads() == before


@PACKED
def test_chunks_are_bounded_in_characters(packed, monkeypatch):
    """A text above the bound is a chunk of its own, and no two of them are tokenised at the same time."""
    monkeypatch.setattr(batching, "_CHARACTERS", 100)
    monkeypatch.setattr(batching, "_CHUNKS", (8, 8, 8))
    texts, chunks, running, most = ["a" * n for n in [10, 80, 20, 1, *[500] * 6, 99, 1, 1, *[3] * 20]], [], [], []

    def tokenise(chunk, _):
        if len(chunk[0]) > 100:
            running.append(chunk)
            most.append(len(running))
            time.sleep(0.01)
            running.pop()
        return texts_of([len(text) for text in chunk])

    batcher = Batcher(limit=500, padding=PADDING, packed=packed, characters=len)
    for start, chunk in batcher.tokenised(texts, tokenise):
        chunks.append(chunk.lengths.tolist())
        assert start + len(chunk) == sum(map(len, chunks))
    assert chunks == [[10, 80], [20, 1], *[[500]] * 6, [99, 1], [1, *[3] * 7], [3] * 8, [3] * 5, []]
    assert most == [1] * 6


def test_bar_moves_while_texts_are_tokenised(monkeypatch, capsys):
    monkeypatch.setattr(batching, "_CHARACTERS", 10)
    monkeypatch.setattr(batching, "_IN_FLIGHT", 1000)  # no batch is done before all texts are tokenised

    def tokenise(chunk, _):
        time.sleep(0.15)  # the bar is drawn ten times a second
        return texts_of([1] * len(chunk))

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    batcher = Batcher(limit=64, padding=PADDING, packed=False, characters=lambda _: 9)
    lane = batching.Lane(lambda batch: jax.numpy.zeros((len(batch.lengths), 1)))
    parts = batcher.compute_parts(
        [["text"] * 5], tokenise, 4, [lane], model=None, width=1, unit="text", show_progress_bar=True
    )
    assert [part.shape for part in parts] == [(5, 1)]
    shown = capsys.readouterr().err
    assert all(f"0/5 [00:00<?, ?text/s, {n} tokenised]" in shown for n in (1, 2, 3)), shown


def test_tokenising_fails(monkeypatch):
    monkeypatch.setattr(batching, "_CHUNKS", (3, 3, 3))
    before = threads()

    def tokenise(texts, _):
        if 7 in texts:
            raise ValueError("token 7")
        return texts_of([1] * len(texts))

    with pytest.raises(ValueError, match="token 7"):
        list(make(True).run(make(True).tokenised(range(100), tokenise), 4, Device()))
    assert threads() == before


@PACKED
def test_no_thread_outlives_an_error(packed, monkeypatch):
    """Threads end even while somebody holds the exception, as notebooks do."""
    monkeypatch.setattr(batching, "_CHUNKS", (30, 30, 30))
    before, device = threads(), SmallDevice(0, "dispatch", ValueError("broken"))
    with pytest.raises(ValueError, match="broken") as error:
        next(make(packed).compute_parts(
            [range(1000)], lambda texts, _: texts_of([9] * len(texts)), 4, [batching.Lane(device)], model=None, width=3,
            unit="text", show_progress_bar=False,
        ))  # fmt: skip
    assert error.traceback and threads() == before


# --- What is packed without being asked for ----------------------------------------------------------------------


def test_packs():
    assert not batching.packs(None) or dispatch.platform() == "cuda"
    with dispatch.target("NVIDIA H200"):
        assert batching.packs(None) and batching.packs("triton") and not batching.packs("xla")
    with dispatch.target("Tesla T4", (7, 5)):  # a CPU has no kernels
        assert not batching.packs(None)
