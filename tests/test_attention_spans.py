"""Blocks that tiles of attention kernels visit, and blocks that need no mask, against the mask of all pairs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import lower, seeds, slow, some
from jaxft.kernels.triton.attention_problem import Options, Rules, problem
from jaxft.kernels.triton.attention_spans import spans_of_keys, spans_of_queries
from lowered import of, operations

SIZES = [5, 48, 64, 83]


def random_window(rng, *lengths):
    """Returns a window of about whole blocks, or of about the length, beyond which it excludes nothing."""
    ends = [(16 * rng.integers(5), n) for n in lengths]
    return tuple(some(rng, max(0, int(rng.choice(end) + rng.integers(-2, 1))), 0.8) for end in ends)


def in_window(queries, keys, window):
    i, j, (before, after) = np.arange(queries)[:, None], np.arange(keys), window
    return (before is None or j >= i - before) & (after is None or j <= i + after) & np.ones((queries, keys), bool)


def assert_span(span, start, block, other_block, mask, exact=False):
    """`span` of the tile that begins at `start` of the `mask` [rows, others] of a sequence.

    A block that is not visited has no pair, one that is full has all: if `exact`, any that has all is.
    """
    first, last, full_start, full_stop, end = span
    assert not mask[end:].any()
    rows = mask[start : min(start + block, end)]
    for i, at in enumerate(range(0, mask.shape[1], other_block)):
        pairs = rows[:, at : at + other_block]
        visited, full = first // other_block <= i < -(-last // other_block), full_start <= i < full_stop
        whole = visited and pairs.shape[1] == other_block and pairs.all()
        assert visited or not pairs.any(), f"block {i} is not visited from {start} on"
        assert whole or not full, f"block {i} is not whole from {start} on"
        assert full or not (exact and whole), f"block {i} is whole from {start} on"


@pytest.mark.parametrize("rules", ["window", "query lengths", "lengths", "several", *slow("mask", "ids", "sorted ids")])
@pytest.mark.parametrize("seed", seeds(4))
def test_spans_hold_every_allowed_pair(seed, rules):
    """Windows end next to the edges of blocks. A causal window has no keys after the query.

    The spans are the same in JAX's 64-bit mode.
    """
    rng = np.random.default_rng([seed, *rules.encode()])
    batch, queries, keys, blocks = 2, *(int(n) for n in rng.choice(SIZES, 2)), [int(n) for n in rng.choice([16, 32], 2)]
    window = random_window(rng, queries, keys)
    window = (window[0], 0 if rng.random() < 0.3 else window[1])
    mask, given = np.broadcast_to(in_window(queries, keys, window), (batch, queries, keys)), {}
    if rules in ("query lengths", "lengths", "several"):
        for name, axis, size in (("query_lengths", 1, queries), ("key_lengths", 2, keys))[: 1 + ("query" not in rules)]:
            lengths = rng.integers(0, size + 3, batch, np.int32)
            mask = mask & np.expand_dims(np.arange(size) < lengths[:, None], 3 - axis)
            given[name] = lengths
    if rules in ("mask", "several"):
        given["mask"] = rng.random((int(rng.integers(1, 3)), 1, 1, keys)) < 0.95
        mask = mask & given["mask"][:, 0]
    if rules in ("ids", "sorted ids", "several"):
        ids = [np.repeat(rng.integers(0, 4, (batch, n), np.int32), 12, axis=1)[:, :n] for n in (queries, keys)]
        ids = [np.sort(x) for x in ids] if rules == "sorted ids" else ids
        mask = mask & (ids[0][:, :, None] == ids[1][:, None, :])
        given |= {"query_ids": ids[0], "key_ids": ids[1]}
    arrays = jnp.zeros((batch, queries, 1, 8)), *[jnp.zeros((batch, keys, 1, 8))] * 2
    p = problem(*arrays, Rules(**{name: jnp.asarray(x) for name, x in given.items()}), Options(1.0, window))
    for spans_of, pairs, (block, other_block) in ((spans_of_queries, mask, blocks),
                                                  (spans_of_keys, np.swapaxes(mask, 1, 2), blocks[::-1])):  # fmt: skip
        spans = spans_of(p, *blocks)
        if spans is None:
            assert mask.all()
            continue
        with jax.enable_x64(True):
            wide = spans_of(p, *blocks)
        assert wide.dtype == spans.dtype == jnp.int32 and (wide == spans).all()
        spans = np.asarray(spans)
        assert spans.shape[0] in (1, batch) and spans.shape[1] == -(-pairs.shape[1] // block)
        for sequence in range(batch):
            for tile, span in enumerate(spans[sequence % len(spans)]):
                assert_span(span, tile * block, block, other_block, pairs[sequence], exact=not given)


def check_spans(mask, blocks, window=(None, None), exact=True, **rules):
    """Checks the spans of one sequence with this mask `[T, S]` of its pairs."""
    (queries, keys), rules = mask.shape, {name: jnp.asarray(x)[None] for name, x in rules.items()}
    arrays = jnp.zeros((1, queries, 1, 8)), *[jnp.zeros((1, keys, 1, 8))] * 2
    p = problem(*arrays, Rules(**rules), Options(1.0, window))
    for spans_of, pairs, (block, other) in ((spans_of_queries, mask, blocks), (spans_of_keys, mask.T, blocks[::-1])):
        spans = spans_of(p, *blocks)
        assert spans is not None or mask.all()
        for tile, span in enumerate([] if spans is None else np.asarray(spans)[0]):
            assert_span(span, tile * block, block, other, pairs, exact)


@pytest.mark.parametrize("blocks", [(16, 16), *slow((32, 16), (16, 32))], ids=str)
def test_windows_around_the_edges_of_blocks(blocks):
    sides = (None, 0, 1, 14, 15, 16, 17)
    for window in itertools.product(sides, sides):
        check_spans(in_window(48, 40, window), blocks, window)


def test_ids_of_whole_blocks():
    """Each block has one id, and ids are in any order."""
    for ids in itertools.product(range(2), repeat=5):
        q, k = np.repeat(ids[:3], 16).astype(np.int32), np.repeat(ids[3:], 16).astype(np.int32)
        check_spans(q[:, None] == k, (16, 16), exact=False, query_ids=q, key_ids=k)


@pytest.mark.parametrize("seed", seeds(10))
def test_spans_of_packed_sequences_hold_every_pair(seed):
    """Some sequences are empty or longer than `max_seqlen`. The rows after the last sequence attend to nothing."""
    rng = np.random.default_rng(seed)
    rows, longest, blocks = 150, int(rng.choice(SIZES)), [int(n) for n in rng.choice([16, 32], 2)]
    ends = np.sort(rng.integers(0, rows + 1, 4)).astype(np.int32)
    ends[1] = ends[rng.integers(2)]
    window = random_window(rng, longest, longest)
    options = Options(1.0, window, max_seqlen=longest)
    p = problem(jnp.zeros((rows, 3, 1, 8)), None, None, Rules(cu_seqlens=jnp.asarray(ends)), options)
    places = [(ends[0], ends[1]), (ends[1], ends[2]), (ends[2], ends[3]), (ends[3], rows)]
    for spans_of, limits, (block, other_block) in ((spans_of_queries, window, blocks),
                                                   (spans_of_keys, window[::-1], blocks[::-1])):  # fmt: skip
        tiles = [tuple(map(int, tile[0])) for tile in np.asarray(spans_of(p, *blocks))]
        tiles = [tile for tile in tiles if tile[8] > 0]
        expected = [(i, at) for i, (start, stop) in enumerate(places) for at in range(0, stop - start, block)]
        assert sorted(tile[5:7] for tile in tiles) == expected
        for *span, sequence, at, offset, length in tiles:
            start, stop = places[sequence]
            assert (offset, length) == (start, stop - start)
            inside = np.arange(max(length, longest)) < (min(length, longest) if sequence < 3 else 0)
            mask = in_window(inside.size, inside.size, limits) & inside & inside[:, None]
            assert_span(span, at, block, other_block, mask[:length, :longest])


def test_spans_are_few_operations():
    """XLA compiles them for each program."""

    def spans(qkv, cu_seqlens):
        p = problem(qkv, None, None, Rules(cu_seqlens=cu_seqlens), Options(1.0, (None, None), max_seqlen=64))
        return spans_of_queries(p, 16, 64)

    assert operations(lower(spans, of((64, 3, 12, 32), jnp.bfloat16), of((9,), jnp.int32))).total() <= 200
