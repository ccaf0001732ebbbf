"""CrossEncoder: scores of tiny random classifiers against direct calls of the model on inputs made by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import peer_models
import tiny
from cases import slow
from jaxft import dispatch
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.models.classification import BertForSequenceClassification
from jaxft.models.embedding import Dense, EmbeddingModel
from jaxft.text import batching, cross_encoder
from jaxft.text.cross_encoder import CrossEncoder

FAMILIES = ["bert", "roberta", "distilbert"]
PAIRS = [  # all pairs have the same number of words, so that a direct call compiles once
    ("a bird sings", "in the old tree ."),
    ("rain", "the old river falls in rain ,"),
    ("the tree in the rain", "rain falls ."),
    ("rain falls .", "the tree in the rain"),
]
LONG = "the old river "


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: tiny.write_classifier(tmp_path_factory.mktemp(kind), kind) for kind in FAMILIES}


@pytest.fixture(scope="module")
def reranker(folders):
    return CrossEncoder.from_pretrained(folders["bert"])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """CrossEncoder with three labels."""
    return CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path_factory.mktemp("labels"), num_labels=3))


@nnx.jit
def call(model, ids, types):
    return model(ids, None, types)


def by_hand(model, first, second):
    """Returns the logits of a pair of words from hand-made ids without padding."""
    first, second = ([tiny.VOCAB.index(word) for word in text.split()] for text in (first, second))
    cls, sep = tiny.VOCAB.index("[CLS]"), tiny.VOCAB.index("[SEP]")
    head, tail = [cls, *first, sep], [*second, sep]
    if model.config.model_type == "roberta":
        tail = [sep, *tail]
    types = np.repeat(np.array([0, 1], np.int32), [len(head), len(tail)])[None]
    logits = call(model, np.array([head + tail], np.int32), types if model.config.model_type == "bert" else None)
    return np.asarray(logits, np.float64)[0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def close(actual, expected):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=2e-6)


# --- predict -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_models_logits(folders, family, packed):
    reranker = CrossEncoder.from_pretrained(folders[family], packed=packed)
    model = BertForSequenceClassification.from_pretrained(folders[family])
    expected = [sigmoid(by_hand(model, *pair)[0]) for pair in PAIRS]
    assert np.ptp(expected) > 0.02
    scores = reranker.predict(PAIRS)
    assert type(scores) is np.ndarray and scores.shape == (len(PAIRS),)
    close(scores, expected)
    close(reranker.predict(PAIRS[::-1]), expected[::-1])
    assert reranker.buckets(4) == (batching.buckets(4, 64) if packed else [])


def test_long_texts_have_the_scores_of_their_tokens(reranker, monkeypatch):
    long, longer, word = LONG * 200, "rain falls , " * 400, "x" * 9000 + " bird"
    pairs = [(long, longer), (longer, long), (long, long), ("rain", long), (word, longer), (long, word)]
    cut = reranker._pairs.long_texts.cut_pairs(pairs)
    assert sum(map(len, [text for pair in cut for text in pair])) < 20_000
    found = reranker.predict(pairs)
    monkeypatch.setattr(reranker._pairs.long_texts, "cut_pairs", lambda pairs: pairs)
    np.testing.assert_array_equal(found, reranker.predict(pairs))


def test_token_types_matter(reranker):
    """The two pairs have the same tokens, with the first separator in another place."""
    model = reranker.model
    types_of_one_text = by_hand(model, "rain [SEP] falls in", "the tree")
    assert abs(by_hand(model, "rain", "falls in [SEP] the tree") - types_of_one_text) > 1e-2
    close(reranker.predict(("rain [SEP] falls in", "the tree")), sigmoid(types_of_one_text[0]))


def test_padding_of_the_tokenizer_is_ignored(reranker):
    """The padding would make seven tokens of these five."""
    close(reranker.predict([("rain", "falls")]), [sigmoid(by_hand(reranker.model, "rain", "falls")[0])])
    padding = tiny.bert_tokenizer()
    padding.enable_padding(length=7)
    encoder = CrossEncoder(reranker.model, padding, max_length=20)  # from_pretrained builds a tokenizer anew
    close(encoder.predict([("rain", "falls")]), reranker.predict([("rain", "falls")]))


@pytest.mark.parametrize("batch_size", [3, *slow(1)])
def test_scores_follow_the_callers_order(reranker, monkeypatch, batch_size):
    monkeypatch.setattr(batching, "_CHUNKS", (3, 5, 5))
    texts = ["rain " * (7 * i % 31) for i in range(13)]
    pairs = [(text, "the old river") for text in texts]
    packed = CrossEncoder(reranker.model, reranker.tokenizer, max_length=20, packed=True)
    padded = CrossEncoder(reranker.model, reranker.tokenizer, max_length=20, packed=False)
    expected = padded.predict(pairs, batch_size=32)
    assert np.ptp(expected) > 0.05
    for encoder in (packed, padded):
        close(encoder.predict(pairs, batch_size=batch_size), expected)
        close(encoder.predict(pairs[::-1], batch_size=batch_size), expected[::-1])


def test_kinds_of_input(reranker):
    expected = reranker.predict(PAIRS)
    arrays = (np.array(PAIRS), np.array(PAIRS, dtype=object), np.array(PAIRS, dtype=np.dtypes.StringDType()))
    generators = (iter(PAIRS), (pair for pair in PAIRS))
    for pairs in (
        *generators,
        tuple(PAIRS),
        [list(pair) for pair in PAIRS],
        [np.array(pair) for pair in PAIRS],
        *arrays,
    ):
        close(reranker.predict(pairs), expected)
    close(reranker.predict(np.array(PAIRS[:2])), expected[:2])  # two pairs are not one


@pytest.mark.parametrize("kind", [tuple, list, np.array])
def test_one_pair_is_a_scalar(reranker, classifier, kind):
    score = reranker.predict(kind(PAIRS[0]))
    assert type(score) is np.float32
    close(score, sigmoid(by_hand(reranker.model, *PAIRS[0])[0]))
    scores = classifier.predict(kind(PAIRS[0]))
    assert scores.shape == (3,)
    close(scores, by_hand(classifier.model, *PAIRS[0]))
    assert reranker.predict([kind(PAIRS[0])]).shape == (1,)


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 2), str)])
def test_no_pairs(reranker, classifier, empty):
    for encoder, shape in ((reranker, (0,)), (classifier, (0, 3))):
        scores = encoder.predict(empty)
        assert scores.shape == shape and scores.dtype == np.float32


def test_several_labels(classifier):
    logits = np.array([by_hand(classifier.model, *pair) for pair in PAIRS])
    close(classifier.predict(PAIRS), logits)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    close(classifier.predict(PAIRS, apply_softmax=True), softmax)
    np.testing.assert_allclose(classifier.predict(PAIRS[0], apply_softmax=True).sum(), 1, rtol=1e-6)
    close(classifier.predict(PAIRS, apply_softmax=None), logits)


def test_activation_of_a_call(reranker, classifier):
    logits = np.array([by_hand(reranker.model, *pair)[0] for pair in PAIRS])
    seen = []

    def negate(x):
        seen.append((x.shape, x.dtype))
        return -x

    close(reranker.predict(PAIRS, activation_fn=negate), -logits)
    assert seen == [((4, 1), jnp.float32)]
    close(reranker.predict(PAIRS, apply_softmax=True), sigmoid(logits))  # a single label has no axis
    of_negated = jax.nn.softmax(-classifier.predict(PAIRS, convert_to_numpy=False), axis=-1)
    close(classifier.predict(PAIRS, activation_fn=negate, apply_softmax=True), of_negated)  # which comes last


def test_result_is_a_writable_copy(reranker):
    scores = reranker.predict(PAIRS)
    scores += 1
    close(scores - 1, reranker.predict(PAIRS))
    array = reranker.predict(PAIRS, convert_to_numpy=False)
    assert isinstance(array, jax.Array) and array.dtype == jnp.float32
    close(np.asarray(array), reranker.predict(PAIRS))
    assert reranker.predict(PAIRS[0], convert_to_numpy=False).shape == ()


def test_half_precision_gives_float32(folders, reranker):
    half = CrossEncoder.from_pretrained(folders["bert"], dtype="bfloat16").predict(PAIRS)
    assert half.dtype == np.float32
    assert 1e-6 < np.abs(half - reranker.predict(PAIRS)).max() < 0.05


def test_trained_parameters_are_used(folders):
    trained = CrossEncoder.from_pretrained(folders["bert"])
    before = trained.predict(PAIRS)
    nnx.update(trained.model, jax.tree.map(lambda x: x * 0.5, nnx.state(trained.model, nnx.Param)))
    scores = trained.predict(PAIRS)
    assert np.abs(scores - before).max() > 0.01
    close(scores, [sigmoid(by_hand(trained.model, *pair)[0]) for pair in PAIRS])


@pytest.mark.parametrize("packed", [True, False])
def test_pair_without_a_token(reranker, packed):
    bare = CrossEncoder(reranker.model, tiny.bare_tokenizer(), max_length=8, packed=packed)
    scores = bare.predict([("", ""), ("rain", ""), ("", "")])
    assert np.isfinite(scores).all() and scores[0] == scores[2] != scores[1]


def test_progress_bar(reranker, capsys):
    reranker.predict(PAIRS, show_progress_bar=True)
    assert "4/4" in capsys.readouterr().err
    reranker.predict(PAIRS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ("rain", "must be a pair of str or an iterable of such pairs, got str"),
        (b"ab", "must be a pair of str or an iterable of such pairs, got bytes"),
        (None, "got NoneType"),
        ({"rain": "tree", "bird": "river"}, "got dict"),
        (np.array("rain"), "got ndarray"),
        (3, "got int"),
        (["rain"], "got 'rain' at index 0"),
        (["rain", "river", "tree"], "got 'rain' at index 0"),
        ([PAIRS[0], "ab"], "got 'ab' at index 1"),
        ([PAIRS[0], ("rain",)], r"got \('rain',\) at index 1"),
        ([PAIRS[0], ("a", "b", "c")], r"got \('a', 'b', 'c'\) at index 1"),
        ([PAIRS[0], 3], "got 3 at index 1"),
        (np.array([["a", "b", "c"]]), "at index 0"),
        ([PAIRS[0], ("rain", 3)], r"second texts\[1\] must be a str, got int"),
        ([PAIRS[0], (None, "rain")], r"first texts\[1\] must be a str, got NoneType"),
        (("rain", None), r"second texts\[0\] must be a str, got NoneType"),
    ],
)
def test_inputs_that_are_no_pairs_are_refused(reranker, sentences, message):
    with pytest.raises(TypeError, match=f"^predict: .*{message}"):
        reranker.predict(sentences)


def test_wrong_values(reranker):
    with pytest.raises(ValueError, match=r"second texts\[0\] is not valid Unicode"):
        reranker.predict([("rain", "\ud800")])
    for batch_size in (0, True, 2.0, None):
        with pytest.raises(ValueError, match="predict: batch_size must be a positive integer, got"):
            reranker.predict(PAIRS, batch_size=batch_size)


# --- Prompts, arguments and modules ------------------------------------------------------------------------------


def test_prompts_come_before_the_first_text(folders, reranker, monkeypatch):
    prompts = {"tree": "the tree ", "none": ""}
    prompted = CrossEncoder.from_pretrained(folders["bert"], prompts=prompts, default_prompt_name="tree")
    assert (prompted.prompts, prompted.default_prompt_name) == (prompts, "tree")
    plain = reranker.predict(PAIRS)
    expected = reranker.predict([("the tree " + first, second) for first, second in PAIRS])
    assert np.abs(expected - plain).max() > 1e-3
    close(prompted.predict(PAIRS), expected)
    close(prompted.predict(PAIRS, prompt_name="tree"), expected)
    close(reranker.predict(PAIRS, prompt="the tree "), expected)
    close(prompted.predict(PAIRS, prompt_name="none"), plain)
    close(prompted.predict(PAIRS, prompt=""), plain)
    prompted.default_prompt_name = None
    close(prompted.predict(PAIRS), plain)
    query, texts = PAIRS[0]
    documents = [text for _, text in PAIRS]
    expected = reranker.rank("the tree " + query, documents)
    for encoder, options in ((prompted, {"prompt_name": "tree"}), (reranker, {"prompt": "the tree "})):
        assert encoder.rank(query, documents, **options) == expected


def test_prompts_of_a_folder(tmp_path):
    tiny.write_classifier(tmp_path)
    tiny.write_modules(tmp_path, (tiny.TYPES + "Transformer", ""))
    saved = {"a": "rain ", "b": "tree ", "c": None}
    family = {"model_type": "CrossEncoder", "prompts": saved, "default_prompt_name": "a"}
    tiny.write_json(tmp_path / "config_sentence_transformers.json", family)
    encoder = CrossEncoder.from_pretrained(tmp_path)
    assert (encoder.prompts, encoder.default_prompt_name) == (saved | {"c": ""}, "a")
    encoder = CrossEncoder.from_pretrained(tmp_path, prompts={"b": "", "d": "old "}, default_prompt_name="d")
    assert encoder.prompts == {"a": "rain ", "b": "", "c": "", "d": "old "} and encoder.default_prompt_name == "d"
    with pytest.raises(CheckpointError, match="default_prompt_name is 'e', but prompts has no text of that name"):
        CrossEncoder.from_pretrained(tmp_path, default_prompt_name="e")


def test_wrong_prompts(reranker):
    for call in (reranker.predict, lambda _, **options: reranker.rank("rain", DOCUMENTS, **options)):
        with pytest.raises(ValueError, match="predict: prompt_name must be the name of one of the prompts.*got 'x'"):
            call(PAIRS, prompt_name="x")
        with pytest.raises(TypeError, match="prompt"):
            call(PAIRS, prompt=3)
    for prompts, message in (
        (["a"], "prompts must be a dict"),
        ({"a": 3}, "must be a str, got int"),
        ({3: "a"}, "names of prompts must be str"),
    ):
        with pytest.raises(TypeError, match=message):
            CrossEncoder(reranker.model, reranker.tokenizer, max_length=9, prompts=prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convert_to_tensor": True}, "predict: convert_to_tensor .*: convert_to_numpy=False"),
        ({"device": "cuda"}, "predict: device .* JAX"),
        ({"pool": None}, "predict: pool "),
        ({"chunk_size": 3}, "predict: chunk_size "),
        ({"num_workers": 3}, "predict: num_workers "),
        ({"sentences": PAIRS}, "predict: sentences .*: pass inputs"),
        ({"activation_fct": None}, "predict: activation_fct .*: pass activation_fn"),
        ({"batchsize": 3}, "predict: unexpected argument 'batchsize'"),
    ],
)
def test_arguments_of_sentence_transformers_are_refused(reranker, options, message):
    with pytest.raises(TypeError, match=message):
        reranker.predict(PAIRS, **options)


def test_sentences_alone_are_refused_with_the_equivalent(reranker):
    with pytest.raises(TypeError, match="predict: sentences .*: pass inputs"):
        reranker.predict(sentences=PAIRS)


def test_arguments_of_other_calls_are_refused(reranker, folders):
    for options, message in (
        ({"apply_softmax": True}, "rank: apply_softmax .*call predict"), ({"device": "cpu"}, "rank: device "),
        ({"convert_to_numpy": True}, "rank: convert_to_numpy .*floats"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=message):
            reranker.rank("rain", DOCUMENTS, **options)
    for options in ({"trust_remote_code": True}, {"model_kwargs": {}}, {"device": "cuda"}, {"backend": "onnx"}):
        with pytest.raises(TypeError, match=f"CrossEncoder: {[*options][0]} .*sentence-transformers only: "):
            CrossEncoder(reranker.model, reranker.tokenizer, max_length=9, **options)
        with pytest.raises(TypeError, match=f"from_pretrained: {[*options][0]} .*-transformers only: "):
            CrossEncoder.from_pretrained(folders["bert"], **options)
    for call in (reranker.predict, reranker.rank):
        with pytest.raises(TypeError, match="positional argument"):
            call(PAIRS, DOCUMENTS, 3)


def test_activation_must_be_a_function_of_jax(reranker, folders):
    sigmoid_of_torch = type("Sigmoid", (), {"__module__": "torch.nn.modules.activation", "__call__": lambda self: 0})()
    for call in (reranker.predict, lambda _, **given: CrossEncoder.from_pretrained(folders["bert"], **given)):
        with pytest.raises(
            TypeError, match=r"function of a JAX array, for example .*ACTIVATIONS\['Sigmoid'\], got torch"
        ):
            call(PAIRS, activation_fn=sigmoid_of_torch)
        with pytest.raises(TypeError, match="activation_fn must be a function of a JAX array, got builtins.str"):
            call(PAIRS, activation_fn="Sigmoid")


def test_activation_of_from_pretrained_wins(tmp_path):
    tiny.write_classifier(tmp_path, **noted("torch.nn.modules.activation.Threshold"))
    encoder = CrossEncoder.from_pretrained(tmp_path, activation_fn=jnp.tanh)
    close(encoder.predict(PAIRS), np.tanh([by_hand(encoder.model, *pair)[0] for pair in PAIRS]))


def test_max_seq_length_may_be_set(folders, reranker):
    encoder = CrossEncoder.from_pretrained(folders["bert"], packed=True)
    encoder.max_seq_length = np.int64(11)
    assert encoder.max_seq_length == 11 and encoder.buckets(4) == batching.buckets(4, 11)
    close(encoder.predict((LONG * 10, "rain falls")), sigmoid(by_hand(reranker.model, LONG * 2, "rain falls")[0]))
    encoder.max_seq_length = 64
    close(encoder.predict((LONG * 10, "rain falls")), reranker.predict((LONG * 10, "rain falls")))
    for wrong, message in ((3, "must be above 3"), (65, "must be at most 64, the positions of the model, got 65")):
        with pytest.raises(ValueError, match=f"CrossEncoder: max_seq_length {message}"):
            encoder.max_seq_length = wrong
    assert encoder.max_seq_length == 64
    with pytest.raises(ValueError, match="CrossEncoder: max_length must be at most 64"):
        CrossEncoder(reranker.model, tiny.bert_tokenizer(), max_length=65)


def test_number_of_labels_must_be_the_checkpoints(folders, tmp_path):
    assert CrossEncoder.from_pretrained(folders["bert"], num_labels=1).num_labels == 1
    with pytest.raises(CheckpointError, match="num_labels=1"):
        CrossEncoder.from_pretrained(folders["bert"], num_labels=3)
    modular(3).save_pretrained(tmp_path)
    assert CrossEncoder.from_pretrained(tmp_path, num_labels=3).num_labels == 3
    with pytest.raises(CheckpointError, match="has 3 labels, not num_labels=1"):
        CrossEncoder.from_pretrained(tmp_path, num_labels=1)


def modular(labels=1, model_type="bert", packed=None, **options):
    """Returns a CrossEncoder of an encoder, pooling and a Dense module."""
    special = {"type_vocab_size": 0} if model_type == "distilbert" else {}
    encoder = BertModel(tiny.config(model_type=model_type, **special), rngs=nnx.Rngs(0))
    dense = Dense(2 * tiny.WIDTH, labels, activation="Identity", rngs=nnx.Rngs(1))
    model = EmbeddingModel(encoder, pooling=("cls", "mean"), modules=[dense], **options)
    return CrossEncoder(model, tiny.bert_tokenizer(), max_length=64, packed=packed)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("labels", "model_type"), [(1, "bert"), (3, "distilbert")])
def test_modules_give_the_scores(labels, model_type, packed):
    encoder = modular(labels, model_type, packed)
    logits = np.array([by_hand_modular(encoder.model, *pair) for pair in PAIRS])
    assert np.ptp(logits, axis=0).min() > 0.02
    scores = encoder.predict(PAIRS)
    close(scores, sigmoid(logits[:, 0]) if labels == 1 else logits)
    close(encoder.predict(PAIRS[1]), scores[1])
    if labels == 1:
        ranked = encoder.rank("rain", DOCUMENTS)
        assert [entry["score"] for entry in ranked] == sorted((e["score"] for e in ranked), reverse=True)
    else:
        softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        close(encoder.predict(PAIRS, apply_softmax=True), softmax)


def by_hand_modular(model, first, second, prompt_length=None):
    """Returns the logits of a pair of words from hand-made hidden states."""
    first, second = ([tiny.VOCAB.index(word) for word in text.split()] for text in (first, second))
    cls, sep = tiny.VOCAB.index("[CLS]"), tiny.VOCAB.index("[SEP]")
    ids = np.array([[cls, *first, sep, *second, sep]], np.int32)
    types = np.repeat(np.array([0, 1], np.int32), [len(first) + 2, len(second) + 1])[None]
    has_types = model.encoder.config.type_vocab_size > 0
    hidden = np.asarray(model.encoder(ids, None, types if has_types else None).last_hidden_state, np.float64)[0]
    kept = hidden[prompt_length or 0 :]
    dense = model.modules[0]
    pooled = np.concatenate([kept[0], kept.mean(axis=0)])
    return pooled @ np.asarray(dense.kernel[...], np.float64) + np.asarray(dense.bias[...])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_prompt_may_be_left_out_of_the_pooling(packed):
    pairs = [("the tree " + first, second) for first, second in PAIRS]
    for include, length in ((True, None), (False, 3)):  # [CLS] and two words
        encoder = modular(2, packed=packed, include_prompt=include)
        close(encoder.predict(PAIRS, prompt="the tree "), [by_hand_modular(encoder.model, *p, length) for p in pairs])
        close(encoder.predict(pairs), [by_hand_modular(encoder.model, *p) for p in pairs])


# --- rank --------------------------------------------------------------------------------------------------------

DOCUMENTS = ["rain falls .", "a bird sings", "", "rain falls .", "the old tree"]


def test_rank(reranker):
    scores = reranker.predict([("the river", text) for text in DOCUMENTS])
    ranked = reranker.rank("the river", DOCUMENTS)
    assert [entry["corpus_id"] for entry in ranked] == sorted(range(5), key=lambda i: -scores[i])
    for entry in ranked:
        assert entry.keys() == {"corpus_id", "score"}
        assert type(entry["corpus_id"]) is int and type(entry["score"]) is float
        assert abs(entry["score"] - scores[entry["corpus_id"]]) < 1e-6
    assert json.loads(json.dumps(ranked)) == ranked
    places = [entry["corpus_id"] for entry in ranked]
    assert places.index(3) == places.index(0) + 1  # equal scores keep their order
    backwards = reranker.rank("the river", np.array(DOCUMENTS), activation_fn=lambda x: -x)
    assert [DOCUMENTS[e["corpus_id"]] for e in backwards] == [DOCUMENTS[i] for i in reversed(places)]


def test_rank_returns_documents(reranker):
    ranked = reranker.rank("the river", DOCUMENTS, return_documents=True, batch_size=2)
    assert [list(entry) for entry in ranked] == [["corpus_id", "score", "text"]] * 5
    assert all(entry["text"] == DOCUMENTS[entry["corpus_id"]] for entry in ranked)


@pytest.mark.parametrize("top_k", [1, 3, 5, 9, np.int64(2)])
def test_top_k(reranker, top_k):
    whole = [entry["corpus_id"] for entry in reranker.rank("the river", DOCUMENTS)]
    assert [entry["corpus_id"] for entry in reranker.rank("the river", DOCUMENTS, top_k=top_k)] == whole[:top_k]


def test_activation_is_part_of_the_program(folders, compiled, monkeypatch):
    """A query then has one launch and one wait, and no number of pairs needs a program of its own."""
    encoder = CrossEncoder.from_pretrained(folders["bert"])
    pairs = [("the river", text) for text in (DOCUMENTS * 5)[:9]]
    expected = encoder.predict(pairs)
    compiled.clear()
    monkeypatch.setattr(dispatch, "to_device", None)
    for count in range(1, 10):
        found = encoder.predict(pairs[:count])
        assert found.shape == (count,)
        np.testing.assert_allclose(found, expected[:count], atol=1e-6)
    assert len(compiled) == 4  # 1, 2, 4 and 8 pairs, after 16


@pytest.mark.parametrize("name", cross_encoder.ACTIVATIONS)
def test_activation_of_the_program_has_the_functions_values(classifier, name):
    function, logits = cross_encoder.ACTIVATIONS[name], classifier.predict(PAIRS)
    scores = classifier.predict(PAIRS, activation_fn=function)
    np.testing.assert_allclose(scores, function(logits), rtol=1e-6, atol=1e-7)
    softmax = classifier.predict(PAIRS, activation_fn=function, apply_softmax=True)
    np.testing.assert_allclose(softmax, jax.nn.softmax(function(logits), axis=-1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Sigmoid", "Tanh"])
def test_logits_beyond_the_range_are_errors(folders, name):
    """The activation would make finite scores of infinite logits."""
    encoder = CrossEncoder.from_pretrained(folders["bert"], activation_fn=cross_encoder.ACTIVATIONS[name])
    for value in (jnp.inf, jnp.nan):
        bias = encoder.model.head.out_bias
        bias[...] = jnp.full_like(bias[...], value)
        with pytest.raises(ValueError, match=r"texts\[0\] .* is not finite: .*head.out_bias has NaN"):
            encoder.predict(PAIRS)


def test_own_activation_gets_all_logits(folders, compiled):
    encoder = CrossEncoder.from_pretrained(folders["bert"])
    pairs, given = [("the river", text) for text in (DOCUMENTS * 5)[:9]], []
    encoder.predict(pairs)
    compiled.clear()
    encoder.predict(pairs, activation_fn=lambda x: given.append(x.shape) or x)
    logits = encoder.predict(pairs, activation_fn=cross_encoder.ACTIVATIONS["Identity"])
    assert compiled == []  # each program returns the logits too
    np.testing.assert_allclose(jax.nn.sigmoid(logits), encoder.predict(pairs), rtol=1e-6)
    logits += 1
    with pytest.raises(TypeError):  # compiled programs are found by these names
        cross_encoder.ACTIVATIONS["Identity"] = jnp.tanh
    encoder.activation_fn = lambda x: given.append(x.shape) or (x > 0)
    scores = encoder.predict(pairs[:5])
    scores += 1
    assert scores.dtype == np.float32
    assert given == [(9, 1), (5, 1)]
    with pytest.raises(ValueError, match=r"predict: activation_fn must return the shape \(9, 1\), got \(9,\)"):
        encoder.predict(pairs, activation_fn=lambda x: x[:, 0])


def test_max_length_may_be_a_numpy_integer(reranker):
    encoder = CrossEncoder(reranker.model, reranker.tokenizer, max_length=np.int64(20), packed=True)
    close(encoder.predict(PAIRS), reranker.predict(PAIRS))
    assert encoder.buckets(np.int64(4)) == encoder.buckets(4)
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="buckets: batch_size must be a positive integer, got"):
            encoder.buckets(wrong)


def test_rank_of_nothing(reranker):
    assert reranker.rank("the river", []) == []


def test_rank_refuses_wrong_arguments(reranker, classifier):
    with pytest.raises(ValueError, match="rank: the model must have one label, a score, got 3 labels"):
        classifier.rank("the river", DOCUMENTS)
    for top_k in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"rank: top_k must be None or a positive integer, got {top_k}"):
            reranker.rank("the river", DOCUMENTS, top_k=top_k)
    with pytest.raises(TypeError, match=r"rank: documents\[1\] must be a str, got int"):
        reranker.rank("the river", ["rain", 3])
    with pytest.raises(TypeError, match="rank: documents must be a sequence of str, got one str"):
        reranker.rank("the river", "rain")
    with pytest.raises(TypeError, match="rank: query must be a str, got list"):
        reranker.rank(["the river"], DOCUMENTS)


# --- Folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (LONG * 10, "rain falls", (LONG * 2, "rain falls")),
        ("rain falls", LONG * 10, ("rain falls", LONG * 2)),
        (LONG * 10, "rain " * 10, ("the old river the", "rain rain rain rain")),
    ],
)
def test_longer_text_is_truncated(reranker, folders, first, second, kept):
    short = CrossEncoder.from_pretrained(folders["bert"], max_length=11)
    assert short.max_seq_length == 11
    close(short.predict([(first, second)]), [sigmoid(by_hand(reranker.model, *kept)[0])])


@pytest.mark.parametrize(
    ("family", "asked", "tokenizer_config", "expected"),
    [
        ("bert", None, {}, 64),
        ("bert", None, {"model_max_length": 40}, 40),
        ("bert", None, {"model_max_length": 1e30}, 64),
        ("bert", 50, {"model_max_length": 40}, 50),
        ("roberta", None, {"model_max_length": 512}, 64),
    ],
)
def test_max_length(tmp_path, family, asked, tokenizer_config, expected):
    tiny.write_classifier(tmp_path, family)
    tiny.write_json(tmp_path / "tokenizer_config.json", tokenizer_config)
    reranker = CrossEncoder.from_pretrained(tmp_path, max_length=asked)
    assert reranker.max_seq_length == reranker.max_length == expected
    assert len(reranker.tokenizer.encode("rain " * 100, "river").ids) == expected


def test_max_length_can_be_set(reranker):
    encoder = CrossEncoder(reranker.model, reranker.tokenizer, max_length=20)
    encoder.max_length = 12
    assert encoder.max_seq_length == 12 and len(encoder.tokenizer.encode("rain " * 100, "river").ids) == 12


def test_max_length_must_leave_room(folders):
    with pytest.raises(ValueError, match="CrossEncoder: max_length must be above 3, .* got 3"):
        CrossEncoder.from_pretrained(folders["bert"], max_length=3)
    with pytest.raises(ValueError, match="CrossEncoder: max_length must be above 4, .* got 4"):
        CrossEncoder.from_pretrained(folders["roberta"], max_length=4)
    with pytest.raises(ValueError, match="CrossEncoder: max_length must be a positive integer, got '9'"):
        CrossEncoder.from_pretrained(folders["bert"], max_length="9")
    with pytest.raises(ValueError, match="max_length must be at most 64, the positions of the model, got 65"):
        CrossEncoder.from_pretrained(folders["bert"], max_length=65)


def noted(name):
    return {"sentence_transformers": {"activation_fn": name, "version": "5.0.0"}}


@pytest.mark.parametrize(
    ("num_labels", "settings", "expected"),
    [
        (1, {}, sigmoid),
        (2, {}, lambda x: x),
        (1, noted("torch.nn.modules.linear.Identity"), lambda x: x),
        (2, noted("torch.nn.modules.activation.Sigmoid"), sigmoid),
        (1, noted("torch.nn.modules.activation.Tanh"), np.tanh),
        (1, noted("torch.nn.modules.activation.ReLU"), lambda x: np.maximum(x, 0)),
        (1, noted(None), sigmoid),
        (1, {"sentence_transformers": {"version": "5.0.0"}}, sigmoid),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        (1, {"sbert_ce_default_activation_function": None}, sigmoid),
        (1, noted("torch.nn.modules.linear.Identity")
         | {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, lambda x: x),
    ],
)  # fmt: skip
def test_activation(tmp_path, num_labels, settings, expected):
    reranker = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path, num_labels=num_labels, **settings))
    x = np.array([[-2.0] * num_labels, [0.5] * num_labels], np.float32)
    np.testing.assert_allclose(reranker.activation_fn(jnp.asarray(x)), expected(x), rtol=1e-5)


def test_unknown_activation(tmp_path):
    tiny.write_classifier(tmp_path, **noted("torch.nn.modules.activation.Threshold"))
    with pytest.raises(CheckpointError, match="config.json: .*activation.Threshold' is not supported; .*ReLU"):
        CrossEncoder.from_pretrained(tmp_path)


def test_vocab_txt_alone(tmp_path, reranker):
    """Pairs get the special tokens and the token types of BERT."""
    tiny.write_classifier(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    plain = CrossEncoder.from_pretrained(tmp_path)
    tokens = plain.tokenizer.encode("A bird", "rain falls")
    words = ["[CLS]", "a", "bird", "[SEP]", "rain", "falls", "[SEP]"]
    assert tokens.ids == [tiny.VOCAB.index(word) for word in words]
    assert tokens.type_ids == [0, 0, 0, 0, 1, 1, 1]
    close(plain.predict(PAIRS), reranker.predict(PAIRS))


def test_modules_that_do_not_fit_name_the_folder(tmp_path):
    folder = peer_models.write(tmp_path / "model", "from modules")
    peer_models.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    with pytest.raises(CheckpointError, match=r"model: EmbeddingModel: modules\[0\], a Dense module, takes vectors of"):
        CrossEncoder.from_pretrained(folder)


def test_wrong_folders(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):  # an encoder without a head
        CrossEncoder.from_pretrained(tiny.write_model(tmp_path / "encoder"))
    folder = tiny.write_classifier(tmp_path / "classifier")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["extra"] = len(tiny.VOCAB)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=f"tokenizer has ids up to {len(tiny.VOCAB)}"):
        CrossEncoder.from_pretrained(folder)
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="no tokenizer: neither"):
        CrossEncoder.from_pretrained(folder)


@pytest.mark.parametrize("name", ["show_progress_bar", "apply_softmax", "convert_to_numpy", "return_documents"])
def test_flags_must_be_booleans(reranker, name):
    call = reranker.rank if name == "return_documents" else reranker.predict
    arguments = ("a", ["b", "c"]) if name == "return_documents" else ([("a", "b")],)
    with pytest.raises(TypeError, match=f": {name} must be True or False, got str"):
        call(*arguments, **{name: "no"})


@pytest.mark.parametrize("name", ["packed", "token_types"])
def test_flags_of_the_constructor_must_be_booleans(reranker, name):
    with pytest.raises(TypeError, match=f"CrossEncoder: {name} must be True or False, got str"):
        CrossEncoder(reranker.model, reranker.tokenizer, max_length=32, **{name: "no"})
