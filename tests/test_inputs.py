"""Inputs of encoders: chunks of any number of texts, token ids in place of texts, and devices by index."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

import peer_models
import tiny
from jaxft.text.cross_encoder import CrossEncoder
from jaxft.text.multi_vector_encoder import MultiVectorEncoder
from jaxft.text.search import paraphrase_mining
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.text.sparse_encoder import SparseEncoder

TEXTS = tiny.texts(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def encoder(folder):
    return SentenceEncoder.from_pretrained(folder)


@pytest.mark.parametrize("packed", [True, False])
def test_chunks_are_encoded_like_lists(folder, packed):
    encoder = SentenceEncoder.from_pretrained(folder, packed=packed)
    read = []
    texts = TEXTS * 5
    chunks = encoder.encode_iter((read.append(text) or text for text in texts), chunk_size=70, batch_size=8)
    assert not read  # nothing is read before the first result is asked for
    found = [next(chunks)]
    assert len(read) < 10 * 70 + 32 * 8  # 32 batches are cut while a program is compiled
    found += chunks
    assert [*map(len, found)] == [70] * 21 + [30]
    for first, chunk in zip(range(0, 1500, 70), found, strict=True):
        np.testing.assert_array_equal(chunk, encoder.encode(texts[first : first + 70], batch_size=8))


def test_endless_texts_are_encoded(encoder):
    chunks = encoder.encode_iter(itertools.cycle(TEXTS), chunk_size=40)
    first = [next(chunks) for _ in range(30)]
    chunks.close()
    assert all(len(chunk) == 40 for chunk in first)


def test_chunks_are_bounded_in_characters(encoder, monkeypatch):
    monkeypatch.setattr("jaxft.text.inputs.CHUNK_CHARACTERS", 10)
    found = [*encoder.encode_iter(["a" * n for n in (4, 4, 4, 30, 1)])]
    assert [*map(len, found)] == [2, 1, 1, 1]
    assert [*encoder.encode_iter([])] == []


def test_error_of_a_chunk_names_the_text(encoder):
    with pytest.raises(TypeError, match=r"encode_iter: inputs\[72\] must be a str, got int"):
        [*encoder.encode_iter([*TEXTS[:72], 3], chunk_size=70)]
    ids = encoder.tokenize(TEXTS[:72])
    with pytest.raises(ValueError, match=r"inputs\[72\] must have at most 64 token ids, got 65"):
        [*encoder.encode_iter([*ids, [5] * 65], chunk_size=70)]
    for chunk_size in (30, 70):  # in a chunk between others, and in the last one
        with pytest.raises(TypeError, match=r"encode_iter: inputs\[42\] must be a str, got int"):
            [*encoder.encode_iter([*TEXTS[:42], 3, *TEXTS[:60]], chunk_size=chunk_size)]
        with pytest.raises(ValueError, match=r"encode_iter: inputs\[42\] must be token ids, got 2147483648"):
            [*encoder.encode_iter([*ids[:42], [5, 2**31], *ids[:60]], chunk_size=chunk_size)]
    with pytest.raises(ValueError, match="encode_iter: chunk_size must be a positive integer, got 0"):
        encoder.encode_iter(TEXTS, chunk_size=0)
    with pytest.raises(TypeError, match="encode_iter: inputs must be an iterable of str or of token ids, got str"):
        encoder.encode_iter("rain")
    with pytest.raises(ValueError, match="encode_iter: int8 needs ranges or calibration"):
        encoder.encode_iter(TEXTS, precision="int8")
    with pytest.raises(ValueError, match="prompt_name"):
        encoder.encode_iter(TEXTS, prompt_name="none")


class Table:
    """Iterates over the names of its columns, as a table of pandas does."""

    columns = ["query", "text"]
    ndim = 2

    def __iter__(self):
        return iter(self.columns)


def test_tables_are_refused(folder, tmp_path):
    encoder = SentenceEncoder.from_pretrained(folder)
    reranker = CrossEncoder.from_pretrained(peer_models.write(tmp_path / "one", "one label"))
    for call in (
        encoder.encode, encoder.encode_iter, encoder.encode_query, encoder.tokenize, reranker.predict,
        lambda table: reranker.rank("rain", table), lambda table: paraphrase_mining(encoder, table),
        lambda table: encoder.encode(TEXTS, precision="int8", calibration=table),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="got Table, a table: pass one of its columns, or .values for pairs"):
            call(Table())


class Texts:
    """A sequence without `__iter__`, like a map-style dataset of PyTorch."""

    def __getitem__(self, index):
        return TEXTS[index]


def test_sequences_without_iter_are_read(encoder):
    np.testing.assert_array_equal(encoder.encode(Texts()), encoder.encode(TEXTS))
    np.testing.assert_array_equal(next(encoder.encode_iter(Texts())), encoder.encode(TEXTS))


def test_chunks_of_other_encoders(tmp_path):
    peer_models.write(tmp_path / "splade", "splade")
    peer_models.write_stanford(tmp_path / "colbert", None)
    texts = ["a bird sings", "rain", "the old tree"]
    sparse = SparseEncoder.from_pretrained(tmp_path / "splade")
    found = [chunk.toarray() for chunk in sparse.encode_iter(texts, chunk_size=2)]
    assert [x.shape[0] for x in found] == [2, 1]
    np.testing.assert_allclose(np.concatenate(found), sparse.encode(texts).toarray(), atol=1e-5)
    colbert = MultiVectorEncoder.from_pretrained(tmp_path / "colbert")
    (chunk,) = colbert.encode_iter(texts, task="query", prompt_name="query")
    for one, other in zip(chunk, colbert.encode_query(texts), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("packed", [True, False])
def test_token_ids_replace_texts(folder, packed):
    encoder = SentenceEncoder.from_pretrained(folder, packed=packed)
    expected, ids = encoder.encode(TEXTS), encoder.tokenize(TEXTS)
    for given in (
        ids, [*map(tuple, ids)], [np.array(x, np.uint16) for x in ids], (x for x in ids), pa.array(ids),
        pa.chunked_array([ids[:100], ids[100:]]), pa.array(ids, pa.large_list(pa.int16())),
        np.array([np.array(x) for x in ids], object),
    ):  # fmt: skip
        np.testing.assert_array_equal(encoder.encode(given), expected)
    equal = [x[:3] for x in ids if len(x) >= 3]
    square = encoder.encode(np.array(equal))
    np.testing.assert_array_equal(square, encoder.encode(equal))
    np.testing.assert_array_equal(square, encoder.encode(pa.array(equal, pa.list_(pa.int32(), 3))))
    for one in (ids[0], np.array(ids[0])):
        np.testing.assert_array_equal(encoder.encode(one), encoder.encode(TEXTS[0]))
    (chunk,) = encoder.encode_iter(pa.array(ids))
    np.testing.assert_array_equal(chunk, expected)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_token_ids_replace_pairs(tmp_path, family, packed):
    encoder = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path, family), packed=packed)
    pairs = [(first[:40], second[:40]) for first, second in itertools.pairwise([*TEXTS[:20], "", "rain", ""])]
    ids = [encoder.tokenizer.encode(*pair).ids for pair in pairs]
    expected = encoder.predict(pairs)
    for given in (ids, (np.array(x) for x in ids), pa.array(ids), [(*x,) for x in ids]):
        np.testing.assert_array_equal(encoder.predict(given), expected)
    np.testing.assert_array_equal(encoder.predict(ids, prompt="query: "), expected)
    equal = [x[:4] for x in ids if len(x) >= 4]
    np.testing.assert_array_equal(encoder.predict(np.array(equal)), encoder.predict(equal))
    assert encoder.predict(ids[0]) == encoder.predict(pairs[0]) and encoder.predict(ids[0]).shape == ()
    with pytest.raises(ValueError, match=r"^predict: inputs\[1\] must have at most 64 token ids, got 65"):
        encoder.predict([ids[0], [5] * 65])
    with pytest.raises(ValueError, match=r"^predict: inputs\[1\] must have token ids below \d+, got 9999"):
        encoder.predict([ids[0], [9999]])
    with pytest.raises(TypeError, match=r"^predict: inputs\[1\] must be a sequence of token ids, got \('a', 'b'\)"):
        encoder.predict([ids[0], ("a", "b")])
    with pytest.raises(TypeError, match="rank: query must be a str, got list; predict takes token ids of pairs"):
        encoder.rank(ids[0], ["a"])


def test_token_ids_get_query_expansion(tmp_path):
    peer_models.write_stanford(tmp_path, None)
    encoder = MultiVectorEncoder.from_pretrained(tmp_path)
    assert encoder.query_expansion is not None
    texts = ["a bird sings", "rain", "a"]
    bare = [ids[: len(encoder.tokenize(text, prompt_name="query")[0])] for ids, text in zip(
        encoder.tokenize(texts, prompt_name="query"), texts, strict=True)]  # fmt: skip
    for one, other in zip(encoder.encode_query(bare), encoder.encode_query(texts), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([[2, 3], ["a"]], TypeError, r"inputs\[1\] must be a sequence of token ids, got \['a'\]"),
        ([[2, 3], [2, -1]], ValueError, r"inputs\[1\] must be token ids, got -1"),
        ([[2, 3], [], [1 << 40]], ValueError, r"inputs\[2\] must be token ids"),
        ([[2, 3], [], [5, 121]], ValueError, r"inputs\[2\] must have token ids below 121, got 121"),
        ([[2], [2] * 65], ValueError, r"inputs\[1\] must have at most 64 token ids, got 65"),
        ([[2, 3], [2.5]], TypeError, r"inputs\[1\] must be a sequence of token ids"),
        ([[True, False]], TypeError, r"inputs\[0\] must be a str"),
        ([b"a"], TypeError, r"inputs\[0\] must be a str, got bytes"),
        ([bytearray(b"a")], TypeError, r"inputs\[0\] must be a str, got bytearray"),
        ([memoryview(b"a")], TypeError, r"inputs\[0\] must be a str, got memoryview"),
    ],
)
def test_wrong_token_ids(encoder, given, error, message):
    with pytest.raises(error, match=f"^encode: {message}"):
        encoder.encode(given)


@pytest.mark.parametrize("make", [lambda: 0, lambda: np.int64(0), lambda: iter([np.int8(0)]), lambda: {0: 1}])
def test_devices_are_any_iterable(encoder, make):
    texts = ["rain", "a bird", "the old tree"]
    np.testing.assert_array_equal(encoder.encode(texts, devices=make()), encoder.encode(texts))
    options = {"precision": "int8", "calibration": texts}
    np.testing.assert_array_equal(encoder.encode(texts, devices=make(), **options), encoder.encode(texts, **options))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([99], ValueError, "devices must be indices below .*, got 99"),
        ([-1], ValueError, "devices must be indices below .*, got -1"),
        ([], ValueError, "one or more different devices of one kind"),
        ([0, 0], ValueError, "one or more different devices of one kind"),
        ("cpu", TypeError, "devices must be a list of devices of JAX or of their indices, got 'cpu'"),
        (["cpu"], TypeError, "devices of JAX or their indices, got 'cpu'"),
        ([True], TypeError, "devices of JAX or their indices, got True"),
        (1.5, TypeError, "got 1.5"),
    ],
)
def test_wrong_devices(encoder, given, error, message):
    with pytest.raises(error, match=f"^encode: .*{message}"):
        encoder.encode(["rain"], devices=given)
