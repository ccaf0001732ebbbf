"""Search on the device, against all scores in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import tiny
from cases import slow, slow_cases
from jaxft.text import search
from jaxft.text.similarities import SIMILARITIES

RNG = np.random.default_rng(0)
CORPUS = RNG.normal(size=(203, 12)).astype(np.float32)
QUERIES = RNG.normal(size=(21, 12)).astype(np.float32)
# Small integers: equal scores are frequent, and sums are exact.
TIED_CORPUS, TIED_QUERIES = (RNG.integers(-2, 3, (n, 4)).astype(np.float32) for n in (203, 21))


def check(found, scores, top_k, tolerance=2e-6):
    """Checks ids and scores. With a tolerance, scores that are as close as that may change places."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    ids = np.array([[entry["corpus_id"] for entry in row] for row in found])
    values = np.array([[entry["score"] for entry in row] for row in found])
    np.testing.assert_allclose(values, np.take_along_axis(scores, order, axis=1), rtol=tolerance, atol=tolerance)
    if tolerance:
        np.testing.assert_allclose(values, np.take_along_axis(scores, ids, axis=1), rtol=tolerance, atol=tolerance)
        assert all(len(set(row)) == order.shape[1] for row in ids.tolist())
    else:
        np.testing.assert_array_equal(ids, order)
    for entry in itertools.chain.from_iterable(found):
        assert type(entry["corpus_id"]) is int and type(entry["score"]) is float


def exact(name, queries, corpus):
    return SIMILARITIES[name].full(np.asarray(queries, np.float32), np.asarray(corpus, np.float32))


# --- semantic_search ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.asarray, *slow(jnp.asarray, list)], ids=["numpy", "jax", "rows"])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_search_finds_the_best_scores(name, convert):
    found = jaxft.semantic_search(convert(QUERIES), convert(CORPUS), top_k=5, score_function=name)
    check(found, exact(name, QUERIES, CORPUS), 5)


def test_search_defaults_to_ten_by_cosine():
    check(jaxft.semantic_search(QUERIES, CORPUS), exact("cosine", QUERIES, CORPUS), 10)
    check(jaxft.semantic_search(QUERIES[3], CORPUS), exact("cosine", QUERIES[3:4], CORPUS), 10)


@pytest.mark.parametrize("size", [1, 7, 30, 101, 102, 202, 203, 1000])
def test_chunks_do_not_change_the_results(size):
    """Equal scores stay in the order of the corpus, within a chunk, between chunks, and where chunks overlap."""
    found = jaxft.semantic_search(
        TIED_QUERIES, TIED_CORPUS, query_chunk_size=size, corpus_chunk_size=size, top_k=40, score_function="dot"
    )
    check(found, exact("dot", TIED_QUERIES, TIED_CORPUS), 40, 0)


@pytest.mark.parametrize("count", [1, 2, 16, 33, 100, *slow(15, 17, 31, 64, 65)])
def test_corpora_of_any_size(count):
    for top_k in (1, 3, 200):
        found = jaxft.semantic_search(TIED_QUERIES, TIED_CORPUS[:count], top_k=top_k, score_function="dot")
        check(found, exact("dot", TIED_QUERIES, TIED_CORPUS[:count]), top_k, 0)


def test_integers_of_numpy_do_not_wrap_around():
    corpus = np.tile(CORPUS, (2, 1))
    sizes = {"query_chunk_size": 7, "corpus_chunk_size": 250, "top_k": 200}
    for find in (functools.partial(jaxft.semantic_search, QUERIES), jaxft.paraphrase_mining_embeddings):
        assert find(corpus, **{name: np.uint8(size) for name, size in sizes.items()}) == find(corpus, **sizes)


def test_nothing_to_search():
    assert jaxft.semantic_search(QUERIES[:0], CORPUS) == []
    assert jaxft.semantic_search(QUERIES, CORPUS[:0]) == [[]] * 21


@pytest.mark.parametrize("shape", [(3, 1), (3, 64), (2, 1000), (1, 1028)])
def test_blockwise_top_k_equals_top_k(shape):
    scores = RNG.integers(0, 50, shape).astype(np.float32)
    scores[:, ::3] = -np.inf
    for k in {1, min(10, shape[1]), shape[1]}:
        found = jax.jit(search._top_k, static_argnums=1)(jnp.asarray(scores), k)
        for values, expected in zip(found, jax.lax.top_k(scores, k), strict=True):
            np.testing.assert_array_equal(values, expected)


def test_equal_scores_of_different_blocks_keep_their_order():
    scores = np.zeros((1, 1024), np.float32)
    scores[0, [0, 1, 1000, 1001]] = 5, 3, 9, 3
    assert search._top_k(jnp.asarray(scores), 3)[1].tolist() == [[1000, 0, 1]]


def test_few_programs_are_compiled():
    shapes = set()

    def score(queries, corpus):
        shapes.add((queries.shape, corpus.shape))
        return queries @ corpus.T

    for count in range(900, 1000):
        jaxft.semantic_search(QUERIES[: 1 + count % 2], np.ones((count, 12), np.float32), score_function=score)
    assert len(shapes) <= 6
    shapes.clear()
    jaxft.semantic_search(QUERIES, np.ones((5000, 12), np.float32), score_function=score, corpus_chunk_size=1000)
    assert len(shapes) == 1 and shapes.pop()[1][0] <= 1000


def test_host_corpora_move_in_two_chunks_at_a_time(monkeypatch):
    put, alive, most = jax.device_put, [], 0

    def record(rows):
        assert isinstance(rows, np.ndarray)
        alive.append(put(rows))
        return alive[-1]

    merge = search._merge

    def merged(best, queries, entries, *args, **options):
        nonlocal most
        index = next(i for i, chunk in enumerate(alive) if chunk is entries)
        most = max(most, len(alive) - index)
        return merge(best, queries, entries, *args, **options)

    monkeypatch.setattr(jax, "device_put", record)
    monkeypatch.setattr(search, "_merge", merged)
    check(jaxft.semantic_search(QUERIES, CORPUS, corpus_chunk_size=40, top_k=3), exact("cosine", QUERIES, CORPUS), 3)
    assert len(alive) >= 5 and most == 2


def test_score_matrices_are_bounded(monkeypatch):
    monkeypatch.setattr(search, "_MOST_SCORES", 21 * 50)
    sizes = []

    def score(queries, corpus):
        sizes.append(queries.shape[0] * corpus.shape[0])
        return queries @ corpus.T

    check(jaxft.semantic_search(QUERIES, CORPUS, score_function=score), exact("dot", QUERIES, CORPUS), 10)
    assert max(sizes) <= 22 * 50


def test_scores_have_highest_precision():
    with jax.default_matmul_precision("bfloat16"):
        for name in ("cosine", "dot"):
            step = lambda q, c, name=name: SIMILARITIES[name].full(q, c)  # noqa: E731
            text = jax.jit(step).lower(QUERIES, CORPUS).as_text()
            assert text.count("precision = [HIGHEST, HIGHEST]") == 1
        best = jnp.zeros((21, 3)), jnp.zeros((21, 3), jnp.int32)
        for score in ("dot", lambda queries, corpus: queries @ corpus.T):
            lowered = search._merge.lower(best, QUERIES, CORPUS, 0, 0, k=3, size=len(CORPUS), score=score)
            assert "[HIGHEST, HIGHEST]" in lowered.as_text()


def test_score_functions_of_users():
    def hiding(queries, corpus):
        return jnp.where(corpus[:, 0] > 0, queries @ corpus.T, -jnp.inf)

    scores = exact("dot", QUERIES, CORPUS)
    scores[:, CORPUS[:, 0] <= 0] = -np.inf
    for count in (203, 16):
        found = jaxft.semantic_search(QUERIES, CORPUS[:count], score_function=hiding, top_k=16)
        check(found, scores[:, :count], 16)
    check(
        jaxft.semantic_search(QUERIES, CORPUS, score_function=SIMILARITIES["dot"].full),
        exact("dot", QUERIES, CORPUS),
        10,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_float_dtypes_score_in_float32(dtype):
    rounded = CORPUS.astype(jnp.dtype(dtype))
    check(jaxft.semantic_search(QUERIES, rounded), exact("cosine", QUERIES, rounded), 10)


@pytest.mark.parametrize(
    ("precision", "convert"),
    [("int8", jnp.asarray), ("uint8", np.asarray), *slow_cases(("int8", np.asarray), ("uint8", jnp.asarray))],
)
def test_scalar_quantized_corpora(precision, convert):
    ranges = np.stack([CORPUS.min(axis=0), CORPUS.max(axis=0)])
    corpus = jaxft.quantize_embeddings(CORPUS, precision, ranges=ranges)
    step = (ranges[1] - ranges[0]) / 255

    def decoded(x):
        return (x.astype(np.float64) + (128 if precision == "int8" else 0)) * step + ranges[0]

    for queries in (QUERIES, jaxft.quantize_embeddings(QUERIES, precision, ranges=ranges)):
        values = QUERIES if queries is QUERIES else decoded(queries)
        for name in SIMILARITIES:
            found = jaxft.semantic_search(
                convert(queries), convert(corpus), corpus_precision=precision, ranges=ranges, score_function=name,
                corpus_chunk_size=50,
            )  # fmt: skip
            check(found, exact(name, values, decoded(corpus)), 10, 1e-5)


@pytest.mark.parametrize(
    ("precision", "convert"),
    [("binary", np.asarray), ("ubinary", jnp.asarray), *slow_cases(("binary", jnp.asarray), ("ubinary", np.asarray))],
)
def test_packed_corpora(precision, convert):
    corpus = jaxft.quantize_embeddings(CORPUS, precision)
    signs = np.where(CORPUS > 0, 1, -1)
    for name in SIMILARITIES:
        options = {"corpus_precision": precision, "score_function": name, "corpus_chunk_size": 50}
        found = jaxft.semantic_search(convert(QUERIES), convert(corpus), **options)
        check(found, exact(name, QUERIES, signs), 10, 1e-5)
    queries = jaxft.quantize_embeddings(QUERIES, precision)
    agreeing = ((QUERIES > 0)[:, None] == (CORPUS > 0)).sum(axis=2)
    found = jaxft.semantic_search(convert(queries), convert(corpus), corpus_precision=precision, score_function="dot")
    check(found, 2 * (agreeing + 4) - 16, 10, 0)  # the four bits that fill the second byte agree


def changed(x, value):
    x = x.copy()
    x[17, 3] = value
    return x


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be a positive integer, got 0"),
        ({"top_k": True}, ValueError, "top_k must be a positive integer, got True"),
        ({"query_chunk_size": 1.5}, ValueError, "query_chunk_size must be a positive integer, got 1.5"),
        ({"corpus_chunk_size": -1}, ValueError, "corpus_chunk_size must be a positive integer, got -1"),
        ({"score_function": "maxsim"}, ValueError, "score_function must be one of cosine, .*, got 'maxsim'"),
        ({"score_function": lambda a, b: a}, ValueError, r"score_function must return the shape \(22, 104\), got"),
        ({"query_embeddings": QUERIES[:, :5]}, ValueError, r"corpus_embeddings must be \[n, 5\] .*, got \[203, 12\]"),
        ({"query_embeddings": QUERIES[None]}, ValueError, r"query_embeddings must have .*, got \(1, 21, 12\)"),
        ({"query_embeddings": ["a text"]}, TypeError, "query_embeddings must be floats, .*, got <U6"),
        ({"corpus_embeddings": CORPUS[0]}, ValueError, r"corpus_embeddings must be \[n, 12\] .*, got \[12\]"),
        ({"corpus_embeddings": CORPUS.astype(int)}, TypeError, "corpus_embeddings must be floats, .*, got int64"),
        ({"corpus_embeddings": CORPUS.astype(np.int8)}, TypeError, "must be floats for corpus_precision='float32'"),
        ({"query_embeddings": QUERIES.astype(np.int8)}, TypeError, "query_embeddings must be floats"),
        ({"corpus_precision": "int8"}, TypeError, "corpus_embeddings must be int8 for .*'int8', got float32"),
        ({"corpus_precision": "int4"}, ValueError, "corpus_precision must be one of float32, .*, got 'int4'"),
        ({"ranges": np.zeros((2, 16))}, ValueError, "ranges must be None with precision 'float32'"),
        ({"corpus_precision": "int8", "corpus_embeddings": CORPUS.astype(np.int8)}, ValueError, "ranges must be the"),
        ({"corpus_precision": "ubinary", "corpus_embeddings": CORPUS.astype(np.uint8)}, ValueError,
         r"corpus_embeddings must be \[n, 2\] for these queries, got \[203, 12\]"),
        ({"corpus_embeddings": changed(CORPUS, np.nan)}, ValueError, "the score of query 0 and entry 17 is not finite"),
        ({"corpus_embeddings": changed(CORPUS, np.inf)}, ValueError, "the score of query 0 and entry 17 is not finite"),
        ({"query_embeddings": changed(QUERIES, np.nan)}, ValueError, "the score of query 17 and entry 0 is not finite"),
    ],
)  # fmt: skip
def test_bad_searches_are_refused(options, error, message):
    arguments = {"query_embeddings": QUERIES, "corpus_embeddings": CORPUS} | options
    with pytest.raises(error, match=message):
        jaxft.semantic_search(**arguments)


def test_functions_of_pytorch_are_refused_by_name():
    def dot_score(a, b):
        raise AssertionError

    dot_score.__module__ = "sentence_transformers.util.similarity"
    with pytest.raises(TypeError, match="one of cosine, dot, .* of JAX arrays, got dot_score of sentence-transformers"):
        jaxft.semantic_search(QUERIES, CORPUS, score_function=dot_score)


# --- paraphrase_mining -------------------------------------------------------------------------------------------


def mined(scores, top_k, max_pairs):
    """All pairs of an embedding and one of its `top_k` best others, in order."""
    scores = scores.copy()
    np.fill_diagonal(scores, -np.inf)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    pairs = {(min(i, j), max(i, j)) for i, row in enumerate(best.tolist()) for j in row if i != j}
    return sorted(([float(scores[i, j]), i, j] for i, j in pairs), key=lambda pair: (-pair[0], *pair[1:]))[:max_pairs]


@pytest.mark.parametrize("convert", [np.asarray, *slow(jnp.asarray, list)], ids=["numpy", "jax", "rows"])
@pytest.mark.parametrize("name", ["dot", "manhattan"])
@pytest.mark.parametrize(("top_k", "max_pairs"), [(3, 50), (500, 100), *slow_cases((1, 10**6), (500, 10**6))])
def test_mining_finds_the_best_pairs(name, convert, top_k, max_pairs):
    scores = exact(name, TIED_CORPUS, TIED_CORPUS)
    options = {"top_k": top_k, "max_pairs": max_pairs, "score_function": name}
    expected = mined(scores, top_k, max_pairs)
    for sizes in ({}, {"query_chunk_size": 20, "corpus_chunk_size": 64}):
        found = jaxft.paraphrase_mining_embeddings(convert(TIED_CORPUS), **options, **sizes)
        assert found == expected and all(type(i) is int and type(score) is float for score, i, _ in found)


def test_mining_scores_by_cosine():
    found = jaxft.paraphrase_mining_embeddings(CORPUS)
    expected = mined(exact("cosine", CORPUS, CORPUS), 100, 10**6)
    assert {(i, j) for _, i, j in found} == {(i, j) for _, i, j in expected}
    np.testing.assert_allclose([score for score, *_ in found], [score for score, *_ in expected], rtol=0, atol=1e-6)


def test_mining_of_equal_texts_leaves_out_the_text_itself():
    found = jaxft.paraphrase_mining_embeddings(np.ones((6, 4), np.float32), top_k=2, score_function="dot")
    # Each one is paired with the first two others, which are 0 and 1, or 1 and 2.
    assert [pair[1:] for pair in found] == [[0, 1], [0, 2], [0, 3], [0, 4], [0, 5], [1, 2], [1, 3], [1, 4], [1, 5]]


def test_mining_passes_its_options_on():
    class Encoder:
        def encode(self, texts, **options):
            seen.append((texts, options))
            return jnp.asarray(CORPUS)

    seen = []
    texts, options = ["a", "b"], {"batch_size": 7, "truncate_dim": 3, "prompt_name": "p", "prompt": "q"}
    mining = {"query_chunk_size": 20, "corpus_chunk_size": 64, "max_pairs": 9, "top_k": 3, "score_function": "dot"}
    found = jaxft.paraphrase_mining(Encoder(), texts, show_progress_bar=True, **options, **mining)
    assert seen == [(texts, options | {"show_progress_bar": True, "convert_to_numpy": False})]
    assert found == jaxft.paraphrase_mining_embeddings(CORPUS, **mining)


def test_mining_of_texts(tmp_path):
    encoder = jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    texts = ["a bird sings", "rain falls on the river", "a bird sings in the old tree", "a bird sings"]
    (score, *pair), *others = jaxft.paraphrase_mining(encoder, texts)
    assert pair == [0, 3] and score == pytest.approx(1.0, abs=1e-6) and len(others) == 5


def test_nothing_to_mine():
    assert jaxft.paraphrase_mining_embeddings(CORPUS[:0]) == []
    assert jaxft.paraphrase_mining_embeddings(CORPUS[:1]) == []


def test_bad_mining_is_refused():
    with pytest.raises(TypeError, match="paraphrase_mining: sentences must be a sequence of str, got one str"):
        jaxft.paraphrase_mining(None, "a text")
    overflowing = np.append(CORPUS, np.zeros((len(CORPUS), 1), CORPUS.dtype), axis=1)
    overflowing[17, -1] = 1e30
    for options, message in (
        ({"max_pairs": 0}, "max_pairs must be a positive integer, got 0"),
        ({"top_k": 0}, "top_k must be a positive integer, got 0"),
        ({"query_chunk_size": 0}, "query_chunk_size must be a positive integer, got 0"),
        ({"corpus_chunk_size": 0}, "corpus_chunk_size must be a positive integer, got 0"),
        ({"embeddings": CORPUS[0]}, r"embeddings must be floats \[n, D\], got float32 \[12\]"),
        ({"embeddings": CORPUS.astype(np.int8)}, r"embeddings must be floats \[n, D\], got int8"),
        ({"embeddings": changed(CORPUS, np.nan), "query_chunk_size": 5}, "score of query 0 and entry 17 is not finite"),
        ({"embeddings": overflowing, "query_chunk_size": 5, "score_function": "dot"},
         "score of query 17 and entry 17 is not finite"),
        ({"score_function": "x"}, "score_function must be one of"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"paraphrase_mining: .*{message}"):
            jaxft.paraphrase_mining_embeddings(**({"embeddings": CORPUS} | options))
