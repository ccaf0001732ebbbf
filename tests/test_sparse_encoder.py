"""SparseEncoder: sparse results, their functions, and folders that are refused. test_peer_values.py has the numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

import peer_models
import tiny
from jaxft import SentenceEncoder, SparseEncoder
from jaxft.checkpoint.files import CheckpointError
from jaxft.text import sparse_encoder
from jaxft.text.similarities import SIMILARITIES
from peer_models import TEXTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_models.write(tmp_path_factory.mktemp("splade") / "model", "splade")


@pytest.fixture(scope="module")
def encoder(folder):
    return SparseEncoder.from_pretrained(folder)


@pytest.fixture
def copy(tmp_path):
    """Returns a function that writes a new folder and changes the JSON of one of its files."""

    def changed(file, name="splade", **changes):
        path = peer_models.write(tmp_path / "model", name)
        values = json.loads((path / file).read_text()) if (path / file).exists() else {}
        tiny.write_json(path / file, values | changes)
        return path

    return changed


def test_results_have_the_types_of_scipy_and_jax(encoder):
    found, dense = encoder.encode(TEXTS), encoder.encode(TEXTS, convert_to_sparse_tensor=False)
    assert isinstance(found, scipy.sparse.csr_array) and found.dtype == np.float32 and found.has_sorted_indices
    assert found.shape == (len(TEXTS), encoder.embedding_dimension) and 0 < found.nnz < dense.size
    np.testing.assert_array_equal(found.toarray(), dense)
    (alone,) = encoder.encode(TEXTS[1:2], convert_to_sparse_tensor=False)
    np.testing.assert_allclose(alone, dense[1], atol=2e-6)  # a batch of another shape rounds otherwise
    one = encoder.encode(TEXTS[1])
    assert one.shape == (encoder.get_embedding_dimension(),)
    np.testing.assert_array_equal(one.toarray(), alone)
    for inputs, expected in ((TEXTS, dense), (TEXTS[1], alone)):
        on_device = encoder.encode(inputs, convert_to_numpy=False)
        assert isinstance(on_device, sparse.BCOO)
        np.testing.assert_array_equal(on_device.todense(), expected)
        array = encoder.encode(inputs, convert_to_numpy=False, convert_to_sparse_tensor=False)
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(array, expected)
    assert encoder.encode([]).shape == (0, encoder.embedding_dimension)


def test_functions_take_every_kind_of_array(encoder):
    found = encoder.encode(TEXTS)
    dense = found.toarray()
    expected, tokens = encoder.similarity(found, found), encoder.decode(found, top_k=4)
    for kind in (
        dense,
        jnp.asarray(dense),
        scipy.sparse.coo_array(dense),
        sparse.BCOO.fromdense(dense, nse=dense.size),
    ):
        scores = encoder.similarity(kind, kind)
        assert isinstance(scores, jax.Array) == isinstance(kind, jax.Array | sparse.BCOO)
        np.testing.assert_allclose(scores, expected, rtol=1e-5)
        assert encoder.decode(kind, top_k=4) == tokens
        assert encoder.sparsity(kind) == encoder.sparsity(found)
        np.testing.assert_array_equal(
            encoder.intersection(kind[1], kind).toarray(), encoder.intersection(dense[1], dense).toarray()
        )
    assert encoder.similarity(found[0], found).shape == (1, len(TEXTS))
    assert np.ndim(encoder.similarity_pairwise(found[0], found[1])) == 0
    assert encoder.decode(found[0], top_k=4) == tokens[0] and len(tokens[0]) == 4
    assert encoder.intersection(found[0], found[1]).shape == found.shape[1:]


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_equal_those_of_dense_embeddings(name, encoder, folder):
    ours = SparseEncoder.from_pretrained(folder, similarity_fn_name=name)
    found = encoder.encode(TEXTS)
    dense = found.toarray()
    np.testing.assert_allclose(
        ours.similarity(found, found[:3]), SIMILARITIES[name].full(dense, dense[:3]), rtol=1e-5, atol=1e-4
    )
    expected = SIMILARITIES[name].pairwise(dense[1:], dense[:-1])
    np.testing.assert_allclose(ours.similarity_pairwise(found[1:], found[:-1]), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("most", [None, 1, 3, 10, 40])
def test_ties_keep_the_smallest_ids(most):
    rng = np.random.default_rng(0)
    for weights in rng.integers(0, 5, (50, 30)).astype(np.float32):
        order = sorted(np.flatnonzero(weights), key=lambda i: (-weights[i], i))
        ids, found = sparse_encoder._active(weights, most)
        assert [*ids] == sorted(order[:most]) and [*found] == [*weights[ids]]
        assert (ids.dtype, found.dtype) == (np.int32, np.float32)


def test_max_active_dims_keeps_the_largest(encoder, folder):
    full, found = encoder.encode(TEXTS).toarray(), encoder.encode(TEXTS, max_active_dims=3).toarray()
    assert (np.count_nonzero(found, axis=1) <= 3).all()
    np.testing.assert_array_equal(np.sort(found, axis=1)[:, -3:], np.sort(full, axis=1)[:, -3:])
    limited = SparseEncoder.from_pretrained(folder, max_active_dims=3)
    np.testing.assert_allclose(limited.encode(TEXTS).toarray(), found, atol=1e-6)
    for value in (0, True, 1.5):
        with pytest.raises(ValueError, match="encode: max_active_dims must be None or a positive integer"):
            encoder.encode(TEXTS, max_active_dims=value)


def test_wrong_embeddings_are_named(encoder):
    found = encoder.encode(TEXTS)
    with pytest.raises(
        TypeError, match="decode: embeddings must be a sparse array of SciPy or JAX or an array, got list"
    ):
        encoder.decode([1, 2])
    with pytest.raises(ValueError, match="similarity: embeddings1 and embeddings2 must fit"):
        encoder.similarity(found, found[:, :5])
    with pytest.raises(ValueError, match="similarity_pairwise: embeddings1 and embeddings2 must fit"):
        encoder.similarity_pairwise(found, found[:1])
    with pytest.raises(ValueError, match="decode: top_k"):
        encoder.decode(found, top_k=0)
    with pytest.raises(ValueError, match=r"intersection: .* got \(8, "):
        encoder.intersection(found, found)
    with pytest.raises(ValueError, match="one or two axes"):
        encoder.sparsity(np.ones((1, 2, 3)))


def test_intersection_and_sparsity_of_given_weights():
    a, b = np.float32([0, 2, -1, 3, 0]), np.float32([[1, 2, 1, 0, 0], [0, -2, -1, 1, 4]])
    both = SparseEncoder.intersection(a, b)
    np.testing.assert_array_equal(both.toarray(), [[0, 4, 0, 0, 0], [0, 0, 1, 3, 0]])
    assert both.nnz == 3
    assert SparseEncoder.sparsity(b) == {"active_dims": 3.5, "sparsity_ratio": pytest.approx(0.3)}
    assert SparseEncoder.sparsity(a) == {"active_dims": 3, "sparsity_ratio": pytest.approx(0.4)}
    assert SparseEncoder.sparsity(b[:0]) == {"active_dims": 0, "sparsity_ratio": 1}


def test_repeated_ids_count_once_and_padding_never():
    """JAX pads the indices of a sparse array with numbers beyond its shape."""
    indices = jnp.array([[0, 1], [1, 4], [0, 1], [1, 5], [2, 5], [1, 0]])
    padded = sparse.BCOO((jnp.array([2.0, 3.0, 4.0, 5.0, 6.0, 0.0]), indices), shape=(2, 5))
    repeated = scipy.sparse.csr_array((np.float32([2, 4, 3, 0]), [1, 1, 4, 0], [0, 2, 4]), shape=(2, 5))
    ones = np.ones(5, np.float32)
    for given in (padded, repeated):
        assert SparseEncoder.sparsity(given) == {"active_dims": 1, "sparsity_ratio": pytest.approx(0.8)}
        np.testing.assert_array_equal(
            SparseEncoder.intersection(ones, given).toarray(), [[0, 6, 0, 0, 0], [0, 0, 0, 0, 3]]
        )


def test_functions_of_small_and_single_weights(encoder):
    weights = np.zeros((2, encoder.embedding_dimension), np.float32)
    weights[:, 5:8] = [[1, 3, 2], [2, 0, 1]]
    tokens = [encoder.tokenizer.id_to_token(i) for i in (6, 7, 5)]
    assert encoder.decode(weights[0]) == [*zip(tokens, (3.0, 2.0, 1.0), strict=True)]
    assert encoder.decode(weights, top_k=1) == [[(tokens[0], 3.0)], [(tokens[2], 2.0)]]
    encoder.similarity_fn_name = "cosine"
    try:
        scores = encoder.similarity(weights[0] * 1e-6, weights)
        np.testing.assert_allclose(scores, encoder.similarity(weights[0], weights), rtol=1e-5)
        pair = encoder.similarity_pairwise(weights[0], weights[:1])
        assert pair.shape == (1,) and pair[0] == pytest.approx(1)
        assert encoder.similarity(0 * weights, weights).max() == 0
    finally:
        encoder.similarity_fn_name = "dot"


@pytest.mark.parametrize("name", ["convert_to_tensor", "save_to_cpu", "device", "pool"])
def test_arguments_of_sentence_transformers_are_named(name, encoder):
    with pytest.raises(TypeError, match=f"encode: {name} is an argument of sentence-transformers only: "):
        encoder.encode(TEXTS, **{name: True})


@pytest.mark.parametrize("name", ["splade", "splade, sum"])
def test_saved_folder_gives_the_same(name, tmp_path):
    encoder = SparseEncoder.from_pretrained(peer_models.write(tmp_path / "model", name))
    encoder.save_pretrained(tmp_path)
    again = SparseEncoder.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.encode(TEXTS).toarray(), encoder.encode(TEXTS).toarray())
    card = (tmp_path / "README.md").read_text()
    assert again.prompts == encoder.prompts and "SparseEncoder" in card
    assert f"maps texts to weights of {encoder.embedding_dimension} tokens" in card
    kinds = [entry["type"] for entry in json.loads((tmp_path / "modules.json").read_text())]
    package = "sentence_transformers.sparse_encoder.models"
    assert kinds == [f"{package}.MLMTransformer", f"{package}.SpladePooling"]


REFUSED = {
    "pooling": (
        "1_SpladePooling/config.json",
        {"pooling_strategy": "mean"},
        "pooling_strategy must be one of max, sum",
    ),
    "activation": ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function must be one"),
    "field": ("1_SpladePooling/config.json", {"temperature": 2}, "unknown field 'temperature'"),
    "task": ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "transformer_task 'feature-ext"),
    "no task": ("sentence_bert_config.json", {"transformer_task": None}, "transformer_task None is not supported"),
    "number": ("config_sentence_transformers.json", {"max_active_dims": 0}, "max_active_dims must be a positive"),
    "family": ("config_sentence_transformers.json", {"model_type": "ColBERT"}, "load it with jaxft.MultiVectorEncoder"),
    "tied": ("config.json", {"tie_word_embeddings": False}, "tie_word_embeddings must be true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_settings_are_refused(case, copy):
    file, changes, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        SparseEncoder.from_pretrained(copy(file, **changes))


@pytest.mark.parametrize("kind", ["SparseAutoEncoder", "SparseStaticEmbedding", "Router"])
def test_other_modules_are_refused_by_name(kind, copy):
    path = copy("config_sentence_transformers.json")
    tiny.write_modules(path, ("sentence_transformers.sparse_encoder.models." + kind, ""))
    with pytest.raises(CheckpointError, match=f"modules.json: module .*{kind}' is not supported"):
        SparseEncoder.from_pretrained(path)


def test_other_classes_name_the_class(folder, tmp_path):
    with pytest.raises(CheckpointError, match="load it with jaxft.SparseEncoder"):
        SentenceEncoder.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="architectures of config.json ends in ForMaskedLM, got"):
        SparseEncoder.from_pretrained(tiny.write_model(tmp_path))


@pytest.mark.parametrize("name", ["show_progress_bar", "convert_to_sparse_tensor", "convert_to_numpy"])
def test_flags_must_be_booleans(encoder, name):
    with pytest.raises(TypeError, match=f"encode: {name} must be True or False, got str"):
        encoder.encode_query("rain", **{name: "no"})
