"""MultiVectorEncoder: results, MaxSim, query expansion, refused folders. test_peer_values.py has the numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import peer_models
import tiny
from jaxft import BertModel, MultiVectorEncoder, MultiVectorModel, SentenceEncoder, max_sim
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.embedding import Dense, LayerNorm, Normalize
from jaxft.text import similarities
from peer_models import TEXTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_models.write(tmp_path_factory.mktemp("colbert") / "model", "colbert")


@pytest.fixture(scope="module")
def encoder(folder):
    return MultiVectorEncoder.from_pretrained(folder)


@pytest.fixture
def copy(tmp_path):
    """Returns a function that writes a new folder and changes the JSON of one of its files."""

    def changed(file, name="colbert", **changes):
        path = peer_models.write(tmp_path / "model", name)
        values = json.loads((path / file).read_text()) if (path / file).exists() else {}
        tiny.write_json(path / file, values | changes)
        return path

    return changed


def plain(query, document):
    """Returns MaxSim of two matrices, in float64."""
    return (query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum()


def test_results_are_a_list_of_matrices(encoder):
    found = encoder.encode_document(TEXTS)
    assert isinstance(found, list) and all(x.shape[1] == encoder.embedding_dimension == 8 for x in found)
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(found), axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(encoder.encode_document(TEXTS[1]), found[1], atol=1e-6)
    assert isinstance(encoder.encode_query(TEXTS[1], convert_to_numpy=False), jax.Array)
    assert encoder.encode([]) == []


def test_queries_are_expanded(encoder):
    everything = encoder.encode_query(TEXTS, output_value=None)
    mask = encoder.tokenizer.token_to_id("[MASK]")
    for text, found in zip(TEXTS, everything, strict=True):
        own = encoder.tokenizer.encode("[Q] " + text).ids
        expected = own + [mask] * (12 - len(own))
        if len(own) <= 12:
            assert found["input_ids"].tolist() == expected
        assert len(found["input_ids"]) == 12 and found["attention_mask"].all()
    assert [len(x) for x in encoder.encode_query(TEXTS)] == [12] * len(TEXTS)


def test_no_token_attends_to_the_expansion(folder):
    encoder = MultiVectorEncoder.from_pretrained(folder)
    before = encoder.encode_query("rain")
    encoder.query_expansion = {"strategy": "fixed", "length": 20}
    longer = encoder.encode_query("rain")
    assert longer.shape == (20, 8)
    np.testing.assert_allclose(longer[:12], before, atol=1e-6)
    encoder.query_expansion = {"strategy": "fixed", "length": 20, "attend": True}
    assert np.abs(encoder.encode_query("rain")[:12] - before).max() > 1e-3
    encoder.query_expansion = None
    assert len(encoder.encode_query("rain")) < 12


def test_expansions_are_padded_if_no_token_attends(folder):
    for attend in (False, True):
        plain, packed = (MultiVectorEncoder.from_pretrained(folder, packed=packed) for packed in (False, True))
        for encoder in (plain, packed):
            encoder.query_expansion = {"strategy": "min", "length": 9, "attend": attend}
        assert packed._texts("query").batcher.packed == attend
        for x, y in zip(packed.encode_query(TEXTS), plain.encode_query(TEXTS), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_kernels_compute_the_tokens_that_nothing_attends_to(folder, encoder):
    kernels = MultiVectorEncoder.from_pretrained(folder, implementation="triton", packed=True)
    for call in ("encode_query", "encode_document"):
        for x, y in zip(getattr(kernels, call)(TEXTS[:3]), getattr(encoder, call)(TEXTS[:3]), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_strategy_min_keeps_long_queries(folder):
    encoder = MultiVectorEncoder.from_pretrained(folder)
    encoder.query_expansion = {"strategy": "min", "length": 6}
    assert [len(x) for x in encoder.encode_query(["rain", "the old " * 50])] == [6, encoder.max_seq_length]
    encoder.max_seq_length = 17
    assert len(encoder.encode_query("the old " * 50)) == 17


@pytest.mark.parametrize("changes", [{"strategy": "max"}, {"length": 0}, {"attend": 1}, {"token": 3}, {"size": 3}])
def test_wrong_expansions_are_named(changes, encoder):
    with pytest.raises(
        ValueError, match=f"MultiVectorEncoder: .*{[*changes][0] if 'size' not in changes else 'some of'}"
    ):
        encoder.query_expansion = {"strategy": "fixed", "length": 9} | changes
    with pytest.raises(ValueError, match="token of query_expansion must be in the vocabulary, got 'absent'"):
        encoder.query_expansion = {"strategy": "fixed", "length": 9, "token": "absent"}
    assert encoder.query_expansion["length"] == 12


def test_punctuation_of_documents_is_left_out(encoder):
    everything = encoder.encode_document("a bird, a tree.", output_value=None)
    kept = encoder.encode_document("a bird, a tree.")
    tokens = [encoder.tokenizer.id_to_token(int(i)) for i in everything["input_ids"]]
    assert [t for t, c in zip(tokens, everything["attention_mask"], strict=True) if not c] == ["[", "]", ",", "."]
    np.testing.assert_array_equal(kept, everything["token_embeddings"][everything["attention_mask"]])


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, "[MASK]"), ({"mask_token": None, "eos_token": "[SEP]"}, "[SEP]")], ids=str
)
def test_token_of_expansions_is_named_by_the_folder(changes, expected, copy):
    """The mask token, or else the token that ends a text."""
    encoder = MultiVectorEncoder.from_pretrained(copy("tokenizer_config.json", **changes))
    ids = encoder.encode_query("rain", output_value=None)["input_ids"]
    assert ids[-1] == encoder.tokenizer.token_to_id(expected) and len(ids) == encoder.query_expansion["length"]


@pytest.mark.parametrize("products", [1, 300, 1 << 26], ids=["one by one", "few", "all at once"])
def test_scores_are_the_sums_of_maxima(products, monkeypatch):
    monkeypatch.setattr(similarities, "_PRODUCTS", products)
    rng = np.random.default_rng(0)
    queries = [rng.standard_normal((n, 5)).astype(np.float32) for n in (3, 1, 8, 2, 5)]
    documents = [rng.standard_normal((n, 5)).astype(np.float32) - 3 for n in (4, 1, 17, 2, 9, 30, 3)]
    expected = np.array([[plain(q, d) for d in documents] for q in queries])
    bounds = {"rtol": 0, "atol": 2e-6 * np.abs(expected).max()}  # the terms of a sum may cancel
    found = similarities.max_sims(queries, documents, mean=False)
    assert isinstance(found, np.ndarray) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, **bounds)
    found = similarities.max_sims(queries, documents[:5], mean=True, pairwise=True)
    lengths = [len(query) for query in queries]
    np.testing.assert_allclose(found, np.diag(expected) / lengths, **bounds)
    on_device = similarities.max_sims([jnp.asarray(x) for x in queries], documents, mean=True)
    assert isinstance(on_device, jax.Array)
    np.testing.assert_allclose(on_device, expected / np.array(lengths)[:, None], **bounds)


@pytest.mark.parametrize("name", ["maxsim", "meanmaxsim"])
def test_pairs_have_the_scores_of_the_name(name, encoder, monkeypatch):
    monkeypatch.setattr(encoder, "similarity_fn_name", name)
    queries, documents = ([np.float32(i + np.arange(6).reshape(3, 2)) for i in (k, k + 1)] for k in (0, 5))
    both, pairs = encoder.similarity(queries, documents), encoder.similarity_pairwise(queries, documents)
    np.testing.assert_allclose(pairs, np.diag(both), rtol=1e-6)
    expected = np.array([plain(query, document) for query, document in zip(queries, documents, strict=True)])
    np.testing.assert_allclose(pairs, expected / (3 if name == "meanmaxsim" else 1), rtol=1e-6)


def test_one_query_and_empty_documents_have_scores(encoder):
    query, documents = encoder.encode_query("rain"), encoder.encode_document(TEXTS)
    assert encoder.similarity(query, documents).shape == (1, len(TEXTS))
    assert encoder.similarity(np.stack([query, query]), documents).shape == (2, len(TEXTS))
    assert encoder.similarity([query], [documents[0][:0], documents[0]])[0, 0] == -1e9
    assert encoder.similarity([], documents).shape == (0, len(TEXTS))
    assert encoder.similarity_pairwise([query[:0]], documents[:1]) == 0


def test_kept_token_ids_are_of_documents_alone(tmp_path):
    folder = peer_models.write(tmp_path / "model", "colbert")
    encoder = MultiVectorEncoder.from_pretrained(folder)
    query, document = encoder.encode_query("rain falls"), encoder.encode_document("rain falls")
    encoder.keep_only_token_ids = [encoder.tokenizer.token_to_id("rain")]
    np.testing.assert_array_equal(encoder.encode_query("rain falls"), query)
    assert len(encoder.encode_document("rain falls")) == 1 < len(document)


@pytest.mark.parametrize("pairwise", [False, True])
def test_mean_of_a_query_without_vectors_is_0(pairwise):
    empty, document = np.ones((0, 3), np.float32), np.ones((2, 3), np.float32)
    found = similarities.max_sims([empty, document], [document] * 2, mean=True, pairwise=pairwise)
    np.testing.assert_array_equal(found, [0, 3] if pairwise else [[0, 0], [3, 3]])


def test_wrong_embeddings_are_named(encoder):
    query = encoder.encode_query("rain")
    with pytest.raises(ValueError, match="must have the same width"):
        encoder.similarity(query, query[:, :3])
    with pytest.raises(ValueError, match="must have the same number of texts"):
        encoder.similarity_pairwise([query, query], [query])
    with pytest.raises(ValueError, match=r"embeddings1 must have arrays of the shape \[tokens, D\]"):
        encoder.similarity([query[0]], [query])
    with pytest.raises(TypeError, match="embeddings2 must be a list of arrays"):
        encoder.similarity(query, "rain")


def test_max_sim_of_nan_is_nan():
    queries, documents = jnp.ones((2, 33, 3)), jnp.ones((3, 33, 3)).at[1, 16].set(jnp.nan)
    mask = jnp.ones((3, 33), bool).at[1, 16].set(False)
    for scores in (max_sim(queries, documents), similarities.max_sims(queries, documents, mean=False)):
        assert np.isnan(scores[:, 1]).all() and (scores[:, ::2] == 99).all()
    assert (max_sim(queries, documents, None, mask) == 99).all()


def test_max_sim_of_16_bits_adds_in_float32():
    """All queries have the same best token of a document, whose gradient is the sum of their tokens."""
    queries, document = jnp.full((500, 10, 8), 1.01, jnp.bfloat16), jnp.ones((1, 1, 8), jnp.bfloat16)
    scores, gradient = jax.value_and_grad(lambda d: max_sim(queries, d).sum())(document)
    assert max_sim(queries, document).dtype == scores.dtype == jnp.float32
    np.testing.assert_array_equal(max_sim(queries, document), 80 * np.float32(queries[0, 0, 0]))
    assert (gradient == (5000 * queries[0, 0, 0].astype(jnp.float32)).astype(jnp.bfloat16)).all()


def test_max_sim_has_gradients():
    rng = np.random.default_rng(0)
    queries, documents = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 3, 4), (3, 5, 4)))
    mask = jnp.arange(5)[None] < jnp.array([5, 2, 0])[:, None]
    run = jax.jit(jax.value_and_grad(lambda q, d: max_sim(q, d, None, mask)[:, :2].sum(), (0, 1)))
    scores, grads = run(queries, documents)
    expected = sum(
        plain(np.asarray(q), np.asarray(d)[:n]) for q in queries for d, n in zip(documents, (5, 2), strict=False)
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert np.isfinite(grads[0]).all() and (np.asarray(grads[1])[~np.asarray(mask)] == 0).all()
    assert (np.asarray(max_sim(queries, documents, None, mask))[:, 2] == -1e9).all()
    first = jnp.array([[True, False, False]] * 2)
    np.testing.assert_allclose(max_sim(queries, documents, first), max_sim(queries[:, :1], documents), rtol=1e-5)


def test_model_is_the_same_padded_and_packed():
    bert = BertModel(tiny.config(), rngs=nnx.Rngs(0), add_pooling_layer=False)
    model = MultiVectorModel(
        bert, token_modules=[Dense(16, 4, bias=False, activation="Identity", rngs=nnx.Rngs(1)), Normalize()]
    )
    ids = np.arange(8, 20, dtype=np.int32).reshape(2, 6)
    np.testing.assert_allclose(
        model(ids).reshape(12, 4), model(ids.ravel(), cu_seqlens=np.array([0, 6, 12]), max_seqlen=6), atol=1e-5
    )
    with pytest.raises(TypeError, match=r"MultiVectorModel: token_modules\[0\] must be one of Dense, Normalize"):
        MultiVectorModel(bert, token_modules=[LayerNorm(16)])


@pytest.mark.parametrize("metadata", [None, {"query_maxlen": 9, "doc_maxlen": 15, "dim": 8, "mask_punctuation": False}])
def test_folders_of_stanford_load(metadata, tmp_path):
    encoder = MultiVectorEncoder.from_pretrained(peer_models.write_stanford(tmp_path / "model", metadata))
    assert encoder.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert encoder.encode_query("rain").shape == ((9, 8) if metadata else (32, 128))
    ids = encoder.encode_query("rain", output_value=None)["input_ids"]
    assert encoder.tokenizer.id_to_token(int(ids[1])) == "[unused0]"
    found = encoder.encode_document("the old " * 30)
    assert len(found) == 15 if metadata else len(found) > 20
    encoder.save_pretrained(tmp_path / "ours")
    again = MultiVectorEncoder.from_pretrained(tmp_path / "ours")
    np.testing.assert_array_equal(again.encode_document("the old " * 30), found)


@pytest.mark.parametrize(
    ("metadata", "config", "message"),
    [
        ({"query_token_id": 7}, {}, "artifact.metadata: query_token_id must be a token, got 7"),
        ({"dim": 0}, {}, "artifact.metadata: dim must be a positive integer, got 0"),
        ({}, {"model_type": "roberta"}, "config.json: model_type of Stanford's ColBERT must be 'bert', got 'roberta'"),
        ({}, {"architectures": ["BertModel"]}, "does not name HF_ColBERT"),
    ],
)
def test_wrong_folders_of_stanford_are_refused_by_name(metadata, config, message, tmp_path):
    folder = peer_models.write_stanford(tmp_path / "model", {"dim": 8})
    peer_models.write_json(folder / "artifact.metadata", metadata)
    peer_models.write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | config)
    with pytest.raises(CheckpointError, match=message):
        MultiVectorEncoder.from_pretrained(folder)


def test_markers_of_the_vocabulary_are_one_token(tmp_path):
    path = peer_models.write(tmp_path / "model", "colbert of pylate")
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["[unused0]"] = content["model"]["vocab"].pop("~")
    tiny.write_json(path / "tokenizer.json", content)
    encoder = MultiVectorEncoder.from_pretrained(path)
    ids = encoder.encode_query("rain", output_value=None)["input_ids"]
    assert encoder.tokenizer.id_to_token(int(ids[1])) == "[unused0]"


def test_saved_folder_gives_the_same(encoder, tmp_path):
    encoder.save_pretrained(tmp_path)
    kinds = [entry["type"] for entry in json.loads((tmp_path / "modules.json").read_text())]
    assert kinds[-2] == "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"
    assert kinds[-1].endswith(".Normalize")
    assert f"a vector of {encoder.embedding_dimension} numbers" in (tmp_path / "README.md").read_text()
    (masks,) = tmp_path.glob("*_MultiVectorMask/config.json")  # an empty list would leave out all tokens
    assert json.loads(masks.read_text())["keep_only_token_ids"] is None
    again = MultiVectorEncoder.from_pretrained(tmp_path)
    for name in ("prompts", "query_expansion", "skiplist_words", "skiplist_tasks", "similarity_fn_name"):
        assert getattr(again, name) == getattr(encoder, name), name
    for call in ("encode_query", "encode_document"):
        for x, y in zip(getattr(again, call)(TEXTS), getattr(encoder, call)(TEXTS), strict=True):
            np.testing.assert_array_equal(x, y)


def test_integers_of_numpy_are_saved(folder, tmp_path):
    expansion = {"strategy": "fixed", "length": np.uint8(9)}
    encoder = MultiVectorEncoder.from_pretrained(folder)
    encoder = MultiVectorEncoder(
        encoder.model, encoder.tokenizer, keep_only_token_ids=np.array([5, 6]), query_expansion=expansion,
        max_seq_length=np.int64(20),
    )  # fmt: skip
    encoder.save_pretrained(tmp_path)
    again = MultiVectorEncoder.from_pretrained(tmp_path)
    assert (again.keep_only_token_ids, again.query_expansion["length"], again.max_seq_length) == ([5, 6], 9, 20)


REFUSED = {
    "words": ("2_MultiVectorMask/config.json", {"skiplist_words": "a"}, "skiplist_words must be a list of str"),
    "ids": (
        "2_MultiVectorMask/config.json",
        {"keep_only_token_ids": ["a"]},
        "keep_only_token_ids must be a list of token ids",
    ),
    "negative id": (
        "2_MultiVectorMask/config.json",
        {"keep_only_token_ids": [-1]},
        r"keep_only_token_ids must be a list of token ids, got \[-1\]",
    ),
    "no room in documents": ("sentence_bert_config.json", {"document_length": 2}, "document_length must be above 2"),
    "no room in queries": (
        "sentence_bert_config.json",
        {"query_expansion": {"strategy": "fixed", "length": 2}},
        "length of query_expansion must be above 2",
    ),
    "no token": ("tokenizer_config.json", {"mask_token": ""}, "must be in the vocabulary, got ''"),
    "mask": ("2_MultiVectorMask/config.json", {"other": 1}, "unknown field 'other'"),
    "expansion": ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed"}}, "length of query_expansion"),
    "query_length": ("sentence_bert_config.json", {"query_length": 5}, "query_length must be at least the length"),
    "sentence": ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "must be token_embeddings, got"),
    "left": ("tokenizer_config.json", {"padding_side": "left"}, "padding_side 'left' is not supported"),
    "similarity": ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "with jaxft.SparseEncoder"),
    "too long": ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 49}}, "at most 48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_settings_are_refused(case, copy):
    file, changes, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        MultiVectorEncoder.from_pretrained(copy(file, **changes))


@pytest.mark.parametrize("kind", ["HierarchicalTokenPooling", "Pooling", "Router"])
def test_other_modules_are_refused_by_name(kind, copy):
    path = copy("config_sentence_transformers.json")
    tiny.write_modules(path, ("sentence_transformers.multi_vector_encoder.modules." + kind, ""))
    with pytest.raises(CheckpointError, match=f"modules.json: module .*{kind}' is not supported"):
        MultiVectorEncoder.from_pretrained(path)


def test_other_classes_and_folders_are_refused(folder, tmp_path, encoder):
    with pytest.raises(CheckpointError, match="load it with jaxft.MultiVectorEncoder"):
        SentenceEncoder.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="does not name HF_ColBERT"):
        MultiVectorEncoder.from_pretrained(tiny.write_model(tmp_path))
    with pytest.raises(TypeError, match="encode: token_pooling is an argument of sentence-transformers only"):
        encoder.encode(TEXTS, token_pooling=1)
    with pytest.raises(
        ValueError, match=r"must be one of maxsim, meanmaxsim, got 'cosine' \(only models with one vector"
    ):
        MultiVectorEncoder.from_pretrained(folder, similarity_fn_name="cosine")


@pytest.mark.parametrize("name", ["show_progress_bar", "normalize_embeddings", "convert_to_numpy"])
def test_flags_must_be_booleans(encoder, name):
    with pytest.raises(TypeError, match=f"encode: {name} must be True or False, got str"):
        encoder.encode_query("rain", **{name: "no"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skiplist_words": "the"}, "skiplist_words must be an iterable of str, got str"),
        ({"skiplist_tasks": ["query", 3]}, r"skiplist_tasks\[1\] must be a str, got int"),
        ({"keep_only_token_ids": ["the"]}, r"keep_only_token_ids must be token ids, got \['the'\]"),
    ],
)
def test_bad_lists_are_refused(encoder, options, message):
    with pytest.raises(TypeError, match=f"MultiVectorEncoder: {message}"):
        MultiVectorEncoder(encoder.model, encoder.tokenizer, max_seq_length=32, **options)
