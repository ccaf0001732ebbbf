"""SentenceEncoder without padding: embeddings equal padded ones, programs are few, neighbours have no effect."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny
from cases import slow
from jaxft import dispatch
from jaxft.models.bert import BertModel
from jaxft.text import batching
from jaxft.text.batching import Bucket
from jaxft.text.sentence_encoder import SentenceEncoder

MODES = ("cls", "max", "mean")
WORDS = tiny.WORDS[:11]
FAMILIES = {
    "bert": {},
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 66},
    "distilbert": {"type_vocab_size": 0},
}


def make(model, packed=True, limit=64):
    """Returns an encoder of embeddings of length 1, so that an error of 1e-6 has a meaning."""
    tokenizer = tiny.bert_tokenizer()
    return SentenceEncoder(model, tokenizer, max_seq_length=limit, pooling=MODES, normalize=True, packed=packed)


def model_of(family="bert", **options):
    return BertModel(tiny.config(model_type=family, **FAMILIES[family]), rngs=nnx.Rngs(0), **options)


@pytest.fixture(scope="module", params=["bert", *slow("roberta", "distilbert")])
def both(request):
    """Encoders of the same model with packed and with padded batches."""
    model = model_of(request.param)
    return make(model), make(model, packed=False)


@pytest.fixture(scope="module")
def encoder():
    return make(model_of())


def texts_of(*lengths, seed=0):
    """Returns texts with these numbers of random words. Special tokens add two tokens."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


@nnx.jit
def call(model, ids):
    return model(ids).last_hidden_state


def pooled(encoder, text):
    """Computes the embedding by NumPy in float64, from the hidden states of that text alone without padding."""
    hidden = np.asarray(call(encoder.model, np.array([encoder.tokenize(text)[0]], np.int32)), np.float64)[0]
    embedding = np.concatenate([hidden[0], hidden.max(axis=0), hidden.mean(axis=0)])
    return embedding / np.linalg.norm(embedding)


def close(actual, expected, atol=1e-6):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=atol)


# --- Packed is padded --------------------------------------------------------------------------------------------


def test_packed_texts_equal_padded_and_single_texts(both):
    packed, padded = both
    texts = texts_of(0, 3, 9, 62, 9, 3, 100, 62)
    embeddings = packed.encode(texts, batch_size=4)
    assert embeddings.shape == (8, 3 * tiny.WIDTH) and np.abs(embeddings[1] - embeddings[2]).max() > 0.1
    close(embeddings, padded.encode(texts, batch_size=4))
    close(embeddings, [pooled(packed, text) for text in texts])
    close(packed.encode(texts[::-1], batch_size=4), embeddings[::-1])
    close(packed.encode(texts[3]), embeddings[3])
    assert packed.encode([]).shape == (0, 3 * tiny.WIDTH)


def test_embeddings_are_normalized_only_on_request(encoder):
    plain = SentenceEncoder(encoder.model, tiny.bert_tokenizer(), max_seq_length=64, pooling=MODES, packed=True)
    texts = texts_of(3, 9)
    embeddings = plain.encode(texts)
    assert (np.linalg.norm(embeddings, axis=1) > 2).all()
    close(embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True), encoder.encode(texts))
    close(plain.encode(texts, normalize_embeddings=True), encoder.encode(texts))


def test_many_chunks_and_batches_in_flight(encoder, monkeypatch):
    monkeypatch.setattr(batching, "_CHUNKS", (3, 8, 8))
    monkeypatch.setattr(batching, "_IN_FLIGHT", 2)
    texts = texts_of(*np.random.default_rng(1).integers(0, 70, 60))
    close(encoder.encode(texts, batch_size=2), make(encoder.model, packed=False).encode(texts))


def test_text_without_a_token(encoder):
    bare = SentenceEncoder(encoder.model, tiny.bare_tokenizer(), max_seq_length=8, pooling=MODES, packed=True)
    embeddings = bare.encode(["", "rain", ""])
    assert (embeddings[[0, 2]] == 0).all() and np.isfinite(embeddings).all() and (embeddings[1] != 0).any()


def test_automatic_packing_follows_the_device(encoder):
    parts = {"max_seq_length": 64}
    assert SentenceEncoder(encoder.model, tiny.bert_tokenizer(), **parts).buckets() == (
        batching.buckets(32, 64) if dispatch.platform() == "cuda" else []
    )
    with dispatch.target("NVIDIA H200"):
        assert SentenceEncoder(encoder.model, tiny.bert_tokenizer(), **parts).buckets(2) == batching.buckets(2, 64)
    assert make(encoder.model, packed=False).buckets() == []


# --- Programs ----------------------------------------------------------------------------------------------------


def test_compiled_shapes_equal_the_buckets(monkeypatch):
    traced = []

    def counting(self, input_ids, mask, *, cu_seqlens, max_seqlen, **options):
        traced.append(Bucket(len(input_ids), len(cu_seqlens) - 1, max_seqlen))
        return original(self, input_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **options)

    original = BertModel.__call__
    monkeypatch.setattr(BertModel, "__call__", counting)
    encoder = make(model_of(), limit=50)
    rng = np.random.default_rng(2)
    for count in (*range(1, 20), 60, 200):
        encoder.encode(texts_of(*rng.integers(0, rng.choice([10, 60]), count)), batch_size=2)
    assert len(traced) == len(set(traced)) and set(traced) == set(encoder.buckets(2))
    encoder.encode(texts_of(*rng.integers(0, 60, 500)), batch_size=2)
    assert len(traced) == len(encoder.buckets(2))


def test_too_little_memory(encoder, monkeypatch, caplog):
    """The device has memory for 64 tokens. No text is lost."""
    embed, texts = encoder._embed, texts_of(*[50, 3, 9, 20] * 5)
    small = make(encoder.model)

    def refusing(arrays, input_ids, *others):
        if input_ids.size > 64:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return embed(arrays, input_ids, *others)

    monkeypatch.setattr(small, "_embed", refusing)
    close(small.encode(texts, batch_size=4), encoder.encode(texts, batch_size=1))
    assert [message[-14:] for message in caplog.messages] == ["(batch_size=2)", "(batch_size=1)"]


# --- Neighbours --------------------------------------------------------------------------------------------------


def differences(encoder, batch_sizes):
    """Returns how much embeddings change with their neighbours, their place and the size of the batch."""
    (text,) = texts_of(20)
    alone = encoder.encode(text)
    for seed, batch_size in enumerate(batch_sizes):
        # The neighbours are longer, shorter and as long as the text, which is sorted in between.
        lengths = np.random.default_rng(seed).integers(0, 40, 7)
        texts = texts_of(*lengths, 20, 20, seed=seed + 1)
        texts.insert(seed % 8, text)
        yield np.abs(encoder.encode(texts, batch_size=batch_size)[seed % 8] - alone).max()


@pytest.mark.parametrize("packed", [True, False])
def test_neighbours_change_no_embedding(both, packed):
    """Float32 embeddings differ by at most 1e-6, whatever the shapes of the batches."""
    assert max(differences(both[0] if packed else both[1], (4, 32))) <= 1e-6


def test_neighbours_change_no_minilm_embedding(minilm):
    assert max(differences(SentenceEncoder.from_pretrained(minilm, packed=True), (2,))) <= 1e-6


def test_leaking_neighbours_are_noticed(encoder, monkeypatch):
    """The test above can fail: here all sequences of a batch are one sequence."""

    def as_one(self, input_ids, mask, *, cu_seqlens, max_seqlen, **options):
        ends = jnp.stack([cu_seqlens[0], cu_seqlens[-1]])
        positions = jnp.arange(input_ids.size) % 64  # without it, a sequence that is too long is NaN
        return original(self, input_ids, position_ids=positions, cu_seqlens=ends, max_seqlen=64, **options)

    original = BertModel.__call__
    monkeypatch.setattr(BertModel, "__call__", as_one)
    assert max(differences(make(encoder.model), (2,))) > 1e-3


def test_neighbours_change_no_bit_of_the_kernels():
    """The batches have one shape, and so each kernel has one configuration."""
    encoder, seen = make(model_of(implementation="triton"), limit=32), set()
    embed, text = encoder._embed, texts_of(7)[0]

    def watching(arrays, input_ids, lengths, longest, *others):
        seen.add((input_ids.shape, lengths.shape, longest))
        return embed(arrays, input_ids, lengths, longest, *others)

    encoder._embed = watching
    found = []
    for seed, lengths in enumerate([(30, 12, 3, 1), (20, 7, 9, 5), (30, 7, 7, 2), (4, 4, 3, 0)]):
        texts = texts_of(*lengths, seed=seed + 1)
        texts.insert(seed, text)
        found.append(encoder.encode(texts, batch_size=2)[seed])
    assert seen == {((64,), (9,), 32)}
    for one, other in itertools.pairwise(found):
        np.testing.assert_array_equal(one, other)
    close(found[0], make(model_of(implementation="xla"), limit=32).encode(text), atol=5e-6)
