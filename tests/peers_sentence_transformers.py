"""jaxft beside sentence-transformers 6.2 and transformers 5, on tiny models made on the spot: the same numbers.

`make test-peers` runs these tests in an environment of its own. In an environment that has both libraries, PyTorch and
jaxft, `python -m pytest tests/peers_sentence_transformers.py` does. The ordinary tests do not collect this file.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from flax import nnx
from sentence_transformers import util
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.sentence_transformer import evaluation, losses

import encoders
import evaluate
import jaxft
import peer_models
import tiny
from jaxft import training
from peer_models import PAIRS, QUERY, TEXTS, assert_close

pytestmark = pytest.mark.filterwarnings("default")
ALL = peer_models.ALL
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def test_versions_are_those_that_jaxft_follows():
    assert sentence_transformers.__version__.startswith("6.2.")
    assert transformers.__version__.startswith("5.")


def theirs(folder, family="SentenceTransformer", **options):
    return getattr(sentence_transformers, family)(str(folder), device="cpu", **options)


def ours(folder, family="SentenceTransformer", **options):
    names = {
        "SentenceTransformer": jaxft.SentenceEncoder, "CrossEncoder": jaxft.CrossEncoder,
        "SparseEncoder": jaxft.SparseEncoder, "MultiVectorEncoder": jaxft.MultiVectorEncoder,
    }  # fmt: skip
    return names[family].from_pretrained(folder, **options)


@pytest.fixture
def folder(tmp_path):
    """Returns a function from the name of a model to its folder."""
    return lambda name: peer_models.write(tmp_path / name.replace(" ", "_"), name)


@pytest.fixture
def pair(folder):
    """Returns a function from the name of a model to both libraries' encoders of it."""

    def load(name, their_options=None, **options):
        path, family = folder(name), peer_models.class_of(ALL[name])
        return theirs(path, family, **(options if their_options is None else their_options)), ours(
            path, family, **options
        )

    return load


def compare(got, expected, made):
    """Compares the results of a model's calls."""
    expected = dict(peer_models.results(expected, made))
    for call, value in peer_models.results(got, made):
        assert_close(value, expected[call], expected.get("encode"), call)


# --- Models, and both directions of saving ------------------------------------------------------------------------


@PACKED
@pytest.mark.parametrize("name", ALL)
def test_results_are_the_same(name, packed, folder):
    path, made = folder(name), ALL[name]
    compare(ours(path, peer_models.class_of(made), packed=packed), theirs(path, peer_models.class_of(made)), made)


@pytest.mark.parametrize("name", ALL)
def test_saved_folders_load_in_both_libraries(name, folder, tmp_path):
    path, made = folder(name), ALL[name]
    original = theirs(path, peer_models.class_of(made))
    ours(path, peer_models.class_of(made)).save_pretrained(tmp_path / "ours")
    read = theirs(tmp_path / "ours", peer_models.class_of(made))
    compare(read, original, made)
    assert settings(read) == settings(original)

    # And once around: what they wrote, read and written here, read there. They may read a tokenizer otherwise than they
    # wrote it (one of XLM-RoBERTa loses do_lower_case).
    original.save_pretrained(str(tmp_path / "theirs"))
    original = theirs(tmp_path / "theirs", peer_models.class_of(made))
    again = ours(tmp_path / "theirs", peer_models.class_of(made))
    compare(again, original, made | {"calls": made["calls"][:1]})
    again.save_pretrained(tmp_path / "again")
    read = theirs(tmp_path / "again", peer_models.class_of(made))
    compare(read, original, made)
    assert settings(read) == settings(original)


@pytest.mark.parametrize("name", peer_models.STORED_ALL)
def test_saved_folders_load_here(name, folder, tmp_path):
    path, made = folder(name), ALL[name]
    encoder = ours(path, peer_models.class_of(made))
    encoder.save_pretrained(tmp_path / "ours")
    compare(ours(tmp_path / "ours", peer_models.class_of(made)), encoder, made)


def settings(encoder):
    """Returns what a sentence-transformers model knows besides its weights."""
    names = ("default_prompt_name", "max_seq_length", "truncate_dim", "similarity_fn_name", "activation_fn")
    found = {name: str(getattr(encoder, name, None)) for name in names} | {"prompts": encoder.prompts}
    found["modules"] = [(type(m).__name__, m.get_config_dict()) for m in list(encoder)[1:]]
    ids = [encoder.tokenizer(text)["input_ids"] for text in TEXTS]
    return found | {"ids": ids, "special": encoder.tokenizer.special_tokens_map}


def test_model_card_keeps_licence_and_base_model(folder, tmp_path):
    path = folder("bert, mean")
    (path / "README.md").write_text("---\nlicense: mit\nbase_model: someone/some-model\n---\n# A card\n\nText.\n")
    ours(path).save_pretrained(tmp_path / "ours")
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "license: mit" in card and "base_model: someone/some-model" in card


@pytest.mark.parametrize("family", ["SentenceTransformer", "CrossEncoder"])
def test_models_in_float8_are_refused_there(family, tmp_path):
    """The folder has no weights under a name that the libraries know, even if it had a 16-bit model before."""
    config = tiny.config(hidden_size=128, intermediate_size=128)
    cls = jaxft.BertModel if family == "SentenceTransformer" else jaxft.BertForSequenceClassification
    cls(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    theirs(tmp_path, family)
    ours(tmp_path, family, quantization="fp8").save_pretrained(tmp_path)
    for load in (theirs, lambda folder, _: transformers.AutoModel.from_pretrained(folder)):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            load(tmp_path, family)
    ours(tmp_path, family)


def test_trained_weights_are_saved(folder, tmp_path):
    encoder = ours(folder("modules"))
    word = encoder.model.embeddings.word
    word[...] = word[...] * 2 + 0.1
    expected = encoder.encode([*TEXTS])
    encoder.save_pretrained(tmp_path / "trained")
    assert_close(theirs(tmp_path / "trained").encode([*TEXTS]), expected)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_weights_in_16_bits_round_trip(kind, folder, tmp_path):
    encoder = ours(folder("modules"), dtype=kind)
    encoder.save_pretrained(tmp_path / "half")
    read = theirs(tmp_path / "half", model_kwargs={"dtype": "float32"})
    again = ours(tmp_path / "half")
    assert_close(again.encode([*TEXTS]), read.encode([*TEXTS]))


# --- encode -------------------------------------------------------------------------------------------------------

COMBINED = [
    {"prompt_name": name, "truncate_dim": dim, "normalize_embeddings": normalize, "precision": precision}
    for name, dim, normalize, precision in itertools.product(
        (None, "long"), (None, 5), (False, True), ("float32", "int8", "ubinary")
    )
]


@pytest.mark.parametrize("name", ["all poolings without the prompt", "modules"])
def test_options_of_encode_combine(name, pair):
    them, us = pair(name, prompts=peer_models.PROMPTS)
    for options in COMBINED:
        values = them.encode([*TEXTS], **options | {"precision": "float32"})
        assert_close(us.encode([*TEXTS], **options), them.encode([*TEXTS], **options), values, str(options))


def test_float16_is_the_rounded_embedding(pair):
    them, us = pair("modules")
    got = us.encode([*TEXTS], precision="float16")
    np.testing.assert_allclose(got, them.encode([*TEXTS]).astype(np.float16), rtol=1e-3)
    assert got.dtype == np.float16


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_ranges_and_calibration_of_encode(precision, pair):
    them, us = pair("all options")
    values, other = them.encode([*TEXTS]), them.encode([QUERY, "the river", "a tree", "rain falls"])
    ranges = np.stack([other.min(axis=0), other.max(axis=0)])
    expected = util.quantize_embeddings(values, precision=precision, ranges=ranges)
    scaled = np.clip((values - ranges[0]) / ((ranges[1] - ranges[0]) / 255), 0, 255)
    near = np.abs(scaled - np.round(scaled)) <= 1e-3
    texts = [QUERY, "the river", "a tree", "rain falls"]
    for options in ({"ranges": ranges}, {"calibration": other}, {"calibration": texts}):
        got = us.encode([*TEXTS], precision=precision, **options)
        assert got.dtype == expected.dtype
        assert (np.abs(got.astype(int) - expected.astype(int)) <= near).all(), [*options]


def test_iterables_of_texts(pair):
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    them, us = pair("bert, mean")
    expected = them.encode([*TEXTS])
    column = datasets.Dataset.from_dict({"text": [*TEXTS]})["text"]
    assert_close(them.encode(column), expected)
    for inputs in (
        TEXTS, np.array(TEXTS), np.array(TEXTS, object), (text for text in TEXTS), column,
        pyarrow.array(TEXTS), pyarrow.chunked_array([TEXTS[:3], TEXTS[3:]]), iter(TEXTS),
    ):  # fmt: skip
        assert_close(us.encode(inputs), expected, what=type(inputs).__name__)
    assert_close(us.encode(sentences=TEXTS), expected)
    assert_close(us.encode_query(t for t in TEXTS), expected)


def test_results_for_the_device(pair):
    them, us = pair("modules")
    got = us.encode([*TEXTS], convert_to_numpy=False)
    assert isinstance(got, jax.Array)
    assert_close(got, them.encode([*TEXTS]))
    assert isinstance(us.encode(TEXTS[0], convert_to_numpy=False), jax.Array)
    for value in us.encode([*TEXTS], output_value="token_embeddings"):
        assert value.shape[1] == peer_models.WIDTH


def test_settings_of_the_constructor_win(pair):
    options = {"prompts": {"query": "rain ", "new": "by "}, "default_prompt_name": "new", "truncate_dim": 7,
               "similarity_fn_name": "dot"}  # fmt: skip
    them, us = pair("all poolings without the prompt", **options)
    for name in ("prompts", "default_prompt_name", "truncate_dim", "similarity_fn_name"):
        assert getattr(us, name) == getattr(them, name), name
    compare(us, them, {"family": "SentenceTransformer", "calls": ("encode", "query", "document", "similarity")})
    assert us.get_embedding_dimension() == them.get_embedding_dimension()


def test_settings_change_after_loading(pair):
    them, us = pair("all poolings without the prompt")
    for encoder in (them, us):
        encoder.max_seq_length = 9
        encoder.prompts["passage"] = "rain on the "
        encoder.default_prompt_name = "passage"
        encoder.truncate_dim = 11
        encoder.similarity_fn_name = "manhattan"
    calls = ("encode", "query", "document", "similarity", "similarity_pairwise", "everything")
    compare(us, them, {"family": "SentenceTransformer", "calls": calls})


@pytest.mark.parametrize("length", [3, 4, 7, 16, 40, 48])
def test_max_seq_length(length, folder):
    path = folder("all poolings without the prompt")
    them = theirs(path)
    us = ours(path, max_seq_length=length)
    them.max_seq_length = length
    for options in ({}, {"prompt_name": "long"}, {"prompt": "a "}):
        assert_close(us.encode([*TEXTS], **options), them.encode([*TEXTS], **options), what=str(options))


def test_wrong_arguments_are_refused_as_there(pair):
    them, us = pair("all poolings")
    for options in ({"prompt_name": "absent"}, {"precision": "int4"}, {"batch_size": 0}):
        for encoder in (them, us):
            with pytest.raises(ValueError):
                encoder.encode([*TEXTS], **options)


@pytest.mark.parametrize("name", ["bert, mean", "roberta, mean"])
def test_prompts_of_every_kind_of_dictionary(name, folder):
    path = folder(name)
    for prompts, default in itertools.product(
        ({}, {"query": "the old "}, {"passage": "by ", "corpus": "rain "}, {"corpus": "rain ", "query": ""},
         {"document": "in ", "passage": "by "}), (None, "query", "passage"),
    ):  # fmt: skip
        if default == "passage" and "passage" not in prompts:
            continue
        them, us = (load(path, prompts=prompts, default_prompt_name=default) for load in (theirs, ours))
        compare(us, them, {"family": "SentenceTransformer", "calls": ("encode", "query", "document")})


# --- CrossEncoder -------------------------------------------------------------------------------------------------


def test_options_of_the_reranker(pair):
    them, us = pair("one label", {"prompts": {"query": "rain "}, "default_prompt_name": "query", "max_length": 12},
                    prompts={"query": "rain "}, default_prompt_name="query", max_length=12)  # fmt: skip
    compare(us, them, {"family": "CrossEncoder", "calls": (*peer_models.SCORES, "rank")})
    assert us.prompts == them.prompts


@pytest.mark.parametrize("name", ["several labels", "from modules"])
def test_activations_of_predict(name, pair):
    them, us = pair(name)
    for function, torch_function in (
        (jax.nn.sigmoid, torch.sigmoid), (jnp.tanh, torch.tanh), (lambda x: x * 2, lambda x: x * 2),
        (lambda x: jax.nn.softmax(x, axis=-1), lambda x: torch.softmax(x, dim=-1)),
    ):  # fmt: skip
        assert_close(us.predict(PAIRS, activation_fn=function), them.predict(PAIRS, activation_fn=torch_function))


def test_inputs_of_predict(pair):
    them, us = pair("several labels")
    expected = them.predict(PAIRS)
    for inputs in (tuple(PAIRS), [list(p) for p in PAIRS], np.array(PAIRS), (p for p in PAIRS)):
        assert_close(us.predict(inputs), expected)
    assert_close(us.predict([*PAIRS[0]]), them.predict([*PAIRS[0]]))


def test_rank_returns_the_same_lists(pair):
    them, us = pair("one label")
    for options in ({}, {"top_k": 3}, {"return_documents": True}, {"prompt": "the old "}, {"batch_size": 2}):
        expected = them.rank(QUERY, [*TEXTS], **options)
        found = us.rank(QUERY, [*TEXTS], **options)
        assert [x["corpus_id"] for x in found] == [x["corpus_id"] for x in expected]
        assert [x.get("text") for x in found] == [x.get("text") for x in expected]
        assert_close(np.float32([x["score"] for x in found]), np.float32([x["score"] for x in expected]))
    with pytest.raises(ValueError):
        pair("several labels")[1].rank(QUERY, [*TEXTS])


# --- SparseEncoder and MultiVectorEncoder -------------------------------------------------------------------------


def write_type(folder, case, task):
    """Writes a tiny model of a type of transformers, without modules.json."""
    start, options = encoders.CASES[case]
    folder.mkdir()
    sizes = encoders.SIZES | options | {"vocab_size": peer_models.write_tokenizer(folder, "bert")}
    torch.manual_seed(0)
    model = getattr(transformers, start + task)(getattr(transformers, start + "Config")(**sizes, initializer_range=0.1))
    model.save_pretrained(folder)
    return folder


@PACKED
@pytest.mark.parametrize("case", encoders.CASES)
def test_splade_of_every_type(case, packed, tmp_path):
    path = write_type(tmp_path / "model", case, "ForMaskedLM")
    them, us = theirs(path, "SparseEncoder"), ours(path, "SparseEncoder", packed=packed)
    expected = them.encode([*TEXTS], convert_to_sparse_tensor=False).numpy()
    assert_close(us.encode([*TEXTS], convert_to_sparse_tensor=False), expected)
    us.save_pretrained(tmp_path / "ours")
    read = theirs(tmp_path / "ours", "SparseEncoder")
    assert_close(read.encode([*TEXTS], convert_to_sparse_tensor=False).numpy(), expected)


@PACKED
@pytest.mark.parametrize("attend", [False, True], ids=["not attending", "attending"])
@pytest.mark.parametrize("case", ["modernbert", "modernbert with biases", "mpnet", "nomic_bert", "albert", "electra"])
def test_colbert_of_other_types(case, attend, packed, tmp_path):
    path = write_type(tmp_path / "model", case, "Model")
    them = theirs(path, "MultiVectorEncoder", prompts={"query": "[Q] ", "document": "[D] "})
    them[0].query_expansion = {"strategy": "fixed", "attend": attend, "length": 21}
    them.save_pretrained(str(tmp_path / "theirs"))
    us = ours(tmp_path / "theirs", "MultiVectorEncoder", packed=packed)
    made = {"calls": peer_models.COLBERT_CALLS, "family": "MultiVectorEncoder"}
    compare(us, them, made)
    us.save_pretrained(tmp_path / "ours")
    compare(theirs(tmp_path / "ours", "MultiVectorEncoder"), them, made)


@pytest.mark.parametrize("metadata", [None, {"query_maxlen": 9, "doc_maxlen": 15, "dim": 8}], ids=str)
def test_colbert_of_stanford(metadata, tmp_path):
    path = peer_models.write_stanford(tmp_path / "model", metadata)
    them, us = theirs(path, "MultiVectorEncoder"), ours(path, "MultiVectorEncoder")
    made = {"calls": peer_models.COLBERT_CALLS, "family": "MultiVectorEncoder"}
    assert us.prompts == them.prompts
    compare(us, them, made)
    us.save_pretrained(tmp_path / "ours")
    compare(theirs(tmp_path / "ours", "MultiVectorEncoder"), them, made)


# --- Functions of embeddings --------------------------------------------------------------------------------------


@pytest.fixture
def embeddings():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((61, 20)).astype(np.float32)
    values[:, 3] = 0.5  # a constant component
    values[7] = 0
    values[9] = values[8]
    return values, rng.standard_normal((13, 20)).astype(np.float32)


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_quantize_embeddings(precision, embeddings):
    values, other = embeddings
    ranges = np.stack([other.min(axis=0), other.max(axis=0)])
    for options in ({}, {"ranges": ranges}, {"calibration_embeddings": other}):
        expected = util.quantize_embeddings(values, precision=precision, **options)
        for inputs in (values, [*values], jnp.asarray(values)):
            got = jaxft.quantize_embeddings(inputs, precision, **options)
            assert np.asarray(got).dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(got), expected)
    expected = util.quantize_embeddings(values[:0], precision=precision)
    got = np.asarray(jaxft.quantize_embeddings(values[:0], precision))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)


def same_hits(got, expected):
    assert len(got) == len(expected)
    for mine, peer in zip(got, expected, strict=True):
        np.testing.assert_allclose([x["score"] for x in mine], [x["score"] for x in peer], rtol=0, atol=2e-6)
        assert len({x["corpus_id"] for x in mine}) == len(mine)
        # Hits with the same score may come in any order.
        different = [(x, y) for x, y in zip(mine, peer, strict=True) if x["corpus_id"] != y["corpus_id"]]
        assert all(abs(x["score"] - y["score"]) <= 2e-6 for x, y in different)
        assert all(isinstance(x["corpus_id"], int) and isinstance(x["score"], float) for x in mine)


@pytest.mark.parametrize(("query_chunk", "corpus_chunk"), [(100, 500_000), (4, 16), (1, 7)])
def test_semantic_search(query_chunk, corpus_chunk, embeddings):
    corpus, queries = embeddings
    chunks = {"query_chunk_size": query_chunk, "corpus_chunk_size": corpus_chunk}
    for top_k in (1, 10, 100):
        same_hits(
            jaxft.semantic_search(queries, corpus, top_k=top_k, **chunks),
            util.semantic_search(torch.tensor(queries), torch.tensor(corpus), top_k=top_k, **chunks),
        )
    same_hits(jaxft.semantic_search(queries[0], corpus), util.semantic_search(queries[0], corpus))
    same_hits(
        jaxft.semantic_search(jnp.asarray(queries), jnp.asarray(corpus), score_function="dot"),
        util.semantic_search(queries, corpus, score_function=util.dot_score),
    )


@pytest.mark.parametrize("chunk", [5000, 3])
def test_paraphrase_mining(chunk, pair):
    them, us = pair("all options")
    texts = [*TEXTS, QUERY, "the river", "rain in the old tree"]
    for options in ({}, {"max_pairs": 5}, {"top_k": 2}, {"truncate_dim": 6}, {"prompt": "the old "}):
        options = options | {"query_chunk_size": chunk}
        got, expected = jaxft.paraphrase_mining(us, texts, **options), util.paraphrase_mining(them, texts, **options)
        assert len(got) == len(expected), options
        np.testing.assert_allclose([x[0] for x in got], [x[0] for x in expected], rtol=0, atol=2e-6)
        assert [x[1:] for x in got] == [x[1:] for x in expected]


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(name, pair, embeddings):
    values, other = embeddings
    them, us = pair("bert, mean", similarity_fn_name=name)
    for first, second in ((values, other), (values[0], other), (values[:1], other[0])):
        assert_close(us.similarity(first, second), np.asarray(them.similarity(first, second)))
    for first, second in ((values[:13], other), (values[0], other[0])):
        assert_close(us.similarity_pairwise(first, second), np.asarray(them.similarity_pairwise(first, second)))
    codes = [util.quantize_embeddings(x, precision="int8") for x in (values, other)]
    assert_close(us.similarity(*codes), np.asarray(them.similarity(*(c.astype(np.float32) for c in codes))))


# --- transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", peer_models.TOKENIZERS)
def test_encoders_equal_those_of_transformers(kind, folder):
    path = folder(f"{kind}, mean")
    them = transformers.AutoModel.from_pretrained(path).eval()
    ids = np.random.default_rng(1).integers(5, 60, (3, 11))
    mask = np.arange(11) < np.array([11, 4, 7])[:, None]
    ids = np.where(mask, ids, 1 if "roberta" in kind else 0)
    with torch.no_grad():
        expected = them(torch.tensor(ids), attention_mask=torch.tensor(mask.astype(int))).last_hidden_state.numpy()
    got = jaxft.BertModel.from_pretrained(path)(jnp.asarray(ids), jnp.asarray(mask), deterministic=True)
    assert_close(np.asarray(got.last_hidden_state)[mask], expected[mask])


# --- Losses -------------------------------------------------------------------------------------------------------

LOSSES = [
    {},
    {"similarity": "dot", "temperature": 1.0},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    {"hardness_mode": "in_batch_negatives", "hardness_strength": 3.0},
    {"hardness_mode": "hard_negatives", "hardness_strength": 3.0, "directions": ("query_to_doc", "doc_to_query")},
    {"hardness_mode": "all_negatives", "hardness_strength": 3.0, "temperature": 0.02},
]


def their_loss(options):
    options = dict(options)
    scale = 1 / options.pop("temperature", 0.05)
    function = util.dot_score if options.pop("similarity", "cosine") == "dot" else util.cos_sim
    return losses.MultipleNegativesRankingLoss(None, scale=scale, similarity_fct=function, **options)


@pytest.mark.parametrize("hard", [0, 1, 3])
@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_contrastive_loss_and_gradients(options, hard):
    rng = np.random.default_rng(hard)
    arrays = [rng.standard_normal((11, 16)).astype(np.float32) for _ in range(2 + hard)]
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    expected = their_loss(options).compute_loss_from_embeddings(tensors, None)
    expected.backward()

    def loss(queries, documents, *negatives):
        negatives = jnp.stack(negatives, axis=1) if negatives else None
        return training.contrastive_loss(queries, documents, negatives, **options).mean

    if options.get("hardness_mode") == "hard_negatives" and not hard:  # they ignore the mode
        with pytest.raises(ValueError, match="'hard_negatives' needs negatives"):
            loss(*arrays)
        return
    got, gradients = jax.value_and_grad(loss, argnums=tuple(range(len(arrays))))(*map(jnp.asarray, arrays))
    assert_close(got, expected.detach().numpy())
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert_close(gradient, tensor.grad.numpy())


def test_symmetric_loss(pair):
    them, us = pair("bert, mean")
    features = [them.preprocess([*texts]) for texts in (TEXTS[:4], TEXTS[4:])]
    with torch.no_grad():
        expected = losses.MultipleNegativesSymmetricRankingLoss(them)(features, None)
    got = training.contrastive_loss(
        *(jnp.asarray(us.encode(texts)) for texts in (TEXTS[:4], TEXTS[4:])),
        directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction",
    )  # fmt: skip
    assert_close(got.mean, expected.numpy())


@pytest.mark.parametrize("name", ["modules without a limit", "all poolings, trained"])
def test_matryoshka_loss_and_gradients_of_the_model(name, folder):
    """A whole step: encoder, pooling, modules, loss, and the gradients of the tables and of Dense."""
    path = folder("all poolings" if "poolings" in name else "Dense, Tanh")
    them, us = theirs(path).eval(), ours(path)
    dims = [20, 7, 3]
    features = [them.preprocess([*texts]) for texts in (TEXTS[:4], TEXTS[4:])]
    inputs = [(jnp.asarray(f["input_ids"].numpy()), jnp.asarray(f["attention_mask"].numpy())) for f in features]
    expected = losses.MatryoshkaLoss(them, losses.MultipleNegativesRankingLoss(them), dims, [1.0, 0.5, 0.25])(
        features, None
    )
    expected.backward()
    matryoshka = training.matryoshka_loss(training.contrastive_loss, dims, weights=[1.0, 0.5, 0.25])

    def loss(model):
        embeddings = [model(ids, mask, deterministic=True) for ids, mask in inputs]
        return matryoshka(*embeddings).mean

    got, gradients = nnx.value_and_grad(loss)(us.embedder)
    assert_close(got, expected.detach().numpy())
    assert_close(
        gradients["encoder"]["embeddings"]["word"][...],
        them.transformers_model.get_input_embeddings().weight.grad.numpy(),
    )
    if "modules" in name:
        assert_close(gradients["modules"][0]["kernel"][...].T, list(them)[2].linear.weight.grad.numpy())


# --- Evaluators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a default prompt", "modules"])
def test_evaluators_give_the_same_scores(name, folder):
    path = folder(name)
    adapted, them = evaluate.Evaluated(ours(path)), theirs(path)
    for mine, peer in zip(evaluate.evaluators(30).items(), evaluate.evaluators(30).values(), strict=True):
        got, expected = mine[1](adapted), peer(them)
        assert got.keys() == expected.keys()
        for metric, value in expected.items():
            assert abs(got[metric] - value) < evaluate.SAME, (mine[0], metric)
        assert got.items() <= adapted.metrics.items()


def test_evaluation_of_one_text_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["evaluate.py", "--model", "none", "--texts", "1"])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "--texts: expected at least 2, got 1" in capsys.readouterr().err


def test_evaluators_of_translations_give_the_same_scores(pair):
    them, us = pair("a default prompt")
    rows = [{"en": text, "de": other} for text, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    for evaluator in (
        evaluation.TranslationEvaluator([*TEXTS], [*TEXTS[::-1]], write_csv=False),
        evaluation.MSEEvaluator([*TEXTS], [*TEXTS[::-1]], teacher_model=them, write_csv=False),
        evaluation.MSEEvaluatorFromDataFrame(rows, teacher_model=them, combinations=[("en", "de")], write_csv=False),
        evaluation.ParaphraseMiningEvaluator(
            dict(zip("abcdefgh", TEXTS, strict=True)), [("a", "d")], truncate_dim=9, write_csv=False
        ),
    ):  # fmt: skip
        got, expected = evaluator(evaluate.Evaluated(us)), evaluator(them)
        assert got.keys() == expected.keys()
        for metric, value in expected.items():
            assert got[metric] == pytest.approx(value, rel=evaluate.SAME), (evaluator, metric)


def test_evaluator_of_rerankers_gives_the_same_score(pair):
    them, us = pair("one label")
    samples = [{"query": QUERY, "positive": [TEXTS[1]], "negative": [TEXTS[0], TEXTS[2], TEXTS[3]]}]
    evaluators = [CrossEncoderRerankingEvaluator(samples, write_csv=False) for _ in range(2)]
    assert evaluators[0](evaluate.Evaluated(us)) == evaluators[1](them)
