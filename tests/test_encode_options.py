"""Options of `SentenceEncoder.encode`: prompts, lengths, dimensions, kinds of output, precisions and similarities."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from cases import slow_cases
from jaxft import CrossEncoder, MultiVectorEncoder, SentenceEncoder, SparseEncoder, paraphrase_mining
from jaxft.checkpoint.files import CheckpointError
from jaxft.text import arguments, similarities
from jaxft.text.quantization import quantize_embeddings

TEXTS = ["a bird sings in the old tree", "rain", "", "the river , the old rain .", "sings " * 100]
PROMPTS = {"query": "the river ", "passage": "old ", "long": "sings " * 70, "mask": "rain [MASK]"}
FAMILY, MODULE, POOLING = "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny.write_sentence_model(tmp_path_factory.mktemp("model"))
    tiny.write_json(folder / FAMILY, {"prompts": PROMPTS, "similarity_fn_name": "dot"})
    return folder


@pytest.fixture(scope="module")
def shared(folder):
    return SentenceEncoder.from_pretrained(folder)


@pytest.fixture
def encoder(shared):
    """The shared encoder, whose settings are restored after the test."""
    names = ("max_seq_length", "truncate_dim", "similarity_fn_name", "prompts", "default_prompt_name")
    before = {name: getattr(shared, name) for name in names}
    shared.prompts = dict(shared.prompts)
    yield shared
    for name, value in before.items():
        setattr(shared, name, value)


def close(actual, expected, atol=2e-6):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=atol)


def same(actual, expected):
    np.testing.assert_array_equal(actual, expected)
    assert type(actual) is type(expected) and actual.dtype == expected.dtype


# --- Prompts -----------------------------------------------------------------------------------------------------


def test_prompts_of_a_folder(encoder):
    assert encoder.prompts == {"query": "the river ", "document": "", **{n: PROMPTS[n] for n in list(PROMPTS)[1:]}}
    assert encoder.default_prompt_name is None


def test_prompts_go_before_every_text(encoder):
    expected = encoder.encode(["the river " + text for text in TEXTS])
    for options in ({"prompt_name": "query"}, {"prompt": "the river "}):
        same(encoder.encode(TEXTS, **options), expected)
        assert encoder.tokenize("rain", **options) == encoder.tokenize("the river rain")
    encoder.default_prompt_name = "query"
    same(encoder.encode(TEXTS), expected)
    plain = encoder.encode(TEXTS, prompt="")
    assert np.abs(plain - expected).max() > 0.1
    same(encoder.encode(TEXTS, prompt_name="document"), plain)


def test_prompt_wins_over_its_name(encoder, caplog):
    same(encoder.encode(TEXTS, prompt="old ", prompt_name="query"), encoder.encode(TEXTS, prompt_name="passage"))
    assert "prompt_name has no effect, because prompt is given" in caplog.text


def test_queries_and_documents_have_prompts_of_their_own(encoder):
    encoder.default_prompt_name = "long"  # has no effect
    query, passage, plain = (encoder.encode(TEXTS, prompt=prompt) for prompt in ("the river ", "old ", ""))
    same(encoder.encode_query(TEXTS), query)
    same(encoder.encode_query(sentences=TEXTS), query)
    same(encoder.encode_query(TEXTS, prompt_name="passage", batch_size=32), passage)
    same(encoder.encode_document(TEXTS), plain)
    same(encoder.encode_document(TEXTS, prompt="old "), passage)
    del encoder.prompts["document"]
    same(encoder.encode_document(TEXTS), passage)
    del encoder.prompts["passage"]
    encoder.prompts["corpus"] = "the river "
    same(encoder.encode_document(TEXTS), query)
    encoder.prompts.clear()
    encoder.default_prompt_name = None
    same(encoder.encode_query(TEXTS), plain)


def test_given_prompts_win_over_the_folder(folder):
    options = {"prompts": {"query": "", "own": "a "}, "default_prompt_name": "own"}
    encoder = SentenceEncoder.from_pretrained(folder, **options)
    assert encoder.prompts == PROMPTS | {"query": "", "own": "a ", "document": ""}
    assert encoder.tokenize("bird") == SentenceEncoder.from_pretrained(folder).tokenize("a bird")


@pytest.mark.parametrize(
    ("prompt", "count", "packed"),  # [CLS] counts, [SEP] does not
    [("the river ", 3, True), ("", 0, False), ("rain [MASK]", 3, False), ("sings " * 70, 63, True),
     *slow_cases(("the river ", 3, False), ("", 0, True), ("rain [MASK]", 3, True), ("sings " * 70, 63, False))],
)  # fmt: skip
def test_prompt_tokens_are_left_out_of_the_pooling(tmp_path, packed, prompt, count):
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    tiny.write_sentence_model(tmp_path, {"pooling_mode": modes, "include_prompt": False})
    encoder = SentenceEncoder.from_pretrained(tmp_path, packed=packed)
    found = encoder.encode(TEXTS, prompt=prompt)
    if not prompt:
        same(found, encoder.encode(TEXTS))
    for text, embedding in zip(TEXTS, found, strict=True):
        ids = encoder.tokenize(text, prompt=prompt)
        hidden = np.asarray(encoder.model(np.array(ids)).last_hidden_state[0], np.float64)
        weights = np.arange(1, len(hidden) + 1)[count:, None]
        kept = hidden[count:]
        weighted = (kept * weights).sum(0) / weights.sum()
        parts = [kept[0], kept.max(0), kept.mean(0), kept.sum(0) / len(kept) ** 0.5, weighted, kept[-1]]
        close(embedding, np.concatenate(parts), atol=5e-6)


def test_text_of_a_prompt_alone_keeps_its_first_token(shared):
    """Without special tokens, an empty text with a prompt has no other tokens."""
    bare = SentenceEncoder(
        shared.model, tiny.bare_tokenizer(), max_seq_length=8, pooling=("cls", "mean"), include_prompt=False
    )
    (found,) = bare.encode([""], prompt="rain")
    same(found[: tiny.WIDTH], bare.encode("rain")[: tiny.WIDTH])
    assert (found[tiny.WIDTH :] == 0).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_name": "other"}, ValueError, "prompt_name must be .* 'query', .* got 'other'"),
        ({"prompt_name": ["query"]}, ValueError, "prompt_name must be .* 'query', .* got \\['query'\\]"),
        ({"prompt": 3}, TypeError, "prompt must be a str, got int"),
        ({"prompt": "\ud800"}, ValueError, "prompt is not valid Unicode"),
    ],
)
def test_bad_prompts_are_refused(encoder, options, error, message):
    for method in (encoder.encode, encoder.encode_query, encoder.encode_document, encoder.tokenize):
        with pytest.raises(error, match=message):
            method(TEXTS, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompts": ["a"]}, TypeError, "prompts must be a dict from names to texts, got list"),
        ({"prompts": {"a": 3}}, TypeError, r"prompts\['a'\] must be a str, got int"),
        ({"prompts": {3: "a"}}, TypeError, "names of prompts must be str, got 3"),
        ({"default_prompt_name": "a"}, ValueError, "default_prompt_name is 'a', but prompts has no text of that name"),
    ],
)
def test_bad_prompts_of_an_encoder_are_refused(shared, folder, options, error, message):
    with pytest.raises(error, match=message):
        SentenceEncoder(shared.model, tiny.bert_tokenizer(), max_seq_length=8, **options)
    with pytest.raises(error, match=message):
        SentenceEncoder.from_pretrained(folder, **options)


def test_prompts_that_were_changed_are_checked(encoder):
    encoder.prompts = {"query": 3}
    with pytest.raises(TypeError, match=r"encode: prompts\['query'\] must be a str, got int"):
        encoder.encode(TEXTS, prompt_name="query")
    encoder.default_prompt_name = "other"
    with pytest.raises(ValueError, match="encode: default_prompt_name must be .* 'query', got 'other'"):
        encoder.encode(TEXTS)


# --- Lengths and dimensions --------------------------------------------------------------------------------------


def test_max_seq_length_may_be_set(encoder, folder):
    text = "a bird sings in the old tree"
    assert (len(encoder.tokenize(text)[0]), encoder.max_seq_length) == (9, 64)
    encoder.max_seq_length = np.int64(5)
    assert (len(encoder.tokenize(text)[0]), encoder.max_seq_length) == (5, 5)
    same(encoder.encode(text), SentenceEncoder.from_pretrained(folder, max_seq_length=5).encode(text))
    encoder.max_seq_length = None
    assert (len(encoder.tokenize(text)[0]), encoder.max_seq_length) == (9, 64)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2, "max_seq_length must be above 2"),
        (65, "max_seq_length must be at most 64, .* got 65"),
        ("9", "max_seq_length must be a positive integer, got '9'"),
    ],
)
def test_max_seq_length_must_fit_the_model(encoder, folder, value, message):
    with pytest.raises(ValueError, match=message):
        encoder.max_seq_length = value
    assert encoder.max_seq_length == 64
    with pytest.raises(CheckpointError, match=message):
        SentenceEncoder.from_pretrained(folder, max_seq_length=value)


def test_queries_and_documents_may_have_other_lengths(tmp_path):
    tiny.write_sentence_model(tmp_path)
    tiny.write_json(tmp_path / MODULE, {"max_seq_length": 6, "query_length": 4, "document_length": 9})
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    text = "a bird sings in the old tree ."
    found = [method(text) for method in (encoder.encode_query, encoder.encode, encoder.encode_document)]
    for length, embedding in zip((4, 6, 9), found, strict=True):
        encoder.max_seq_length = length
        same(encoder.encode(text), embedding)


def test_embeddings_may_be_truncated(encoder):
    whole = encoder.encode(TEXTS)
    same(encoder.encode(TEXTS, truncate_dim=5), np.ascontiguousarray(whole[:, :5]))
    same(encoder.encode(TEXTS, truncate_dim=99), whole)
    encoder.truncate_dim = 3
    assert encoder.embedding_dimension == encoder.get_embedding_dimension() == 3
    same(encoder.encode(TEXTS), np.ascontiguousarray(whole[:, :3]))
    assert encoder.encode(TEXTS, truncate_dim=5).shape == (5, 5)  # the call wins
    short = encoder.encode(TEXTS, normalize_embeddings=True)
    close(np.linalg.norm(short, axis=1), np.ones(5, np.float32))
    close(short, whole[:, :3] / np.linalg.norm(whole[:, :3], axis=1, keepdims=True))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "5"])
def test_truncate_dim_must_be_positive(encoder, folder, value):
    message = "truncate_dim must be None or a positive integer"
    with pytest.raises(ValueError, match=f"encode: {message}"):
        encoder.encode(TEXTS, truncate_dim=value)
    with pytest.raises(ValueError, match=message):
        encoder.truncate_dim = value
    with pytest.raises(ValueError, match=message):
        SentenceEncoder.from_pretrained(folder, truncate_dim=value)


# --- Kinds of output ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_token_embeddings_have_no_padding(folder, packed):
    encoder = SentenceEncoder.from_pretrained(folder, packed=packed)
    found = encoder.encode(TEXTS, output_value="token_embeddings", prompt_name="query", truncate_dim=3, batch_size=2)
    assert isinstance(found, list) and len(found) == len(TEXTS)
    for text, tokens in zip(TEXTS, found, strict=True):
        ids = encoder.tokenize("the river " + text)
        close(tokens, encoder.model(np.array(ids)).last_hidden_state[0], atol=5e-6)
        assert isinstance(tokens, np.ndarray) and tokens.flags.writeable
    single = encoder.encode(TEXTS[0], output_value="token_embeddings", convert_to_numpy=False)
    assert isinstance(single, jax.Array) and single.shape == (9, tiny.WIDTH)
    assert encoder.encode([], output_value="token_embeddings") == []


@pytest.mark.parametrize("packed", [True, False])
def test_output_value_none_gives_all_features(folder, packed):
    encoder = SentenceEncoder.from_pretrained(folder, packed=packed)
    options = {"prompt_name": "query", "truncate_dim": 3, "normalize_embeddings": True}
    found = encoder.encode(TEXTS, output_value=None, **options)
    names = ["input_ids", "token_type_ids", "attention_mask", "modality", "prompt_length", "token_embeddings",
             "sentence_embedding"]  # fmt: skip
    tokens = encoder.encode(TEXTS, output_value="token_embeddings", **options)
    embeddings = encoder.encode(TEXTS, prompt_name="query", truncate_dim=3)
    for i, (text, features) in enumerate(zip(TEXTS, found, strict=True)):
        assert list(features) == names
        (ids,) = encoder.tokenize(text, prompt_name="query")
        same(features["input_ids"], np.array(ids, np.int32))
        same(features["token_type_ids"], np.zeros(len(ids), np.int32))
        same(features["attention_mask"], np.ones(len(ids), np.int32))
        assert (features["modality"], features["prompt_length"]) == ("text", 3)
        same(features["token_embeddings"], tokens[i])
        close(features["sentence_embedding"], embeddings[i])
    single = encoder.encode("rain", output_value=None, convert_to_numpy=False)
    assert list(single) == [name for name in names if name != "prompt_length"]
    assert all(isinstance(value, jax.Array) for name, value in single.items() if name != "modality")


@pytest.fixture
def without_rain(folder):
    """An encoder that has a NaN for the token "rain"."""
    encoder = SentenceEncoder.from_pretrained(folder)
    word = encoder.model.embeddings.word
    word.set_value(word.get_value().at[tiny.VOCAB.index("rain")].set(jnp.nan))
    return encoder


RAIN_IS_NOT_FINITE = r"texts\[1\] \('rain'\) has a result that is not finite: .* embeddings.word"


def test_result_that_is_not_finite_is_refused_for_tokens(without_rain):
    with pytest.raises(ValueError, match=RAIN_IS_NOT_FINITE):
        without_rain.encode(["a bird", "rain"], output_value="token_embeddings")


@pytest.mark.parametrize("precision", ["float16", "int8", "binary"])
def test_result_that_is_not_finite_is_refused_in_every_precision(without_rain, precision):
    ranges = [[-1] * 16, [1] * 16] if precision == "int8" else None
    with pytest.raises(ValueError, match=RAIN_IS_NOT_FINITE):
        without_rain.encode(["a bird", "rain"], precision=precision, ranges=ranges)


def test_too_little_memory_for_tokens(folder, monkeypatch, caplog):
    encoder = SentenceEncoder.from_pretrained(folder, packed=True)
    texts = TEXTS * 4
    expected, embed = encoder.encode(texts, output_value="token_embeddings"), encoder._embed

    def refusing(arrays, input_ids, *others):
        if input_ids.size > 64:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return embed(arrays, input_ids, *others)

    monkeypatch.setattr(encoder, "_embed", refusing)
    for found, tokens in zip(encoder.encode(texts, output_value="token_embeddings"), expected, strict=True):
        close(found, tokens)
    assert "too little memory" in caplog.text


# --- Precisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float16", "int8", "uint8", "binary", "ubinary"])
def test_precisions_are_those_of_quantize_embeddings(encoder, precision):
    embeddings = encoder.encode(TEXTS, normalize_embeddings=True)
    found = encoder.encode(TEXTS, precision=precision, normalize_embeddings=True)
    same(found, quantize_embeddings(embeddings, precision))
    array = encoder.encode(TEXTS, precision=precision, normalize_embeddings=True, convert_to_numpy=False)
    assert isinstance(array, jax.Array) and array.dtype == found.dtype
    assert encoder.encode([], precision=precision).dtype == found.dtype


def test_overflow_of_float16_is_refused(folder):
    encoder = SentenceEncoder.from_pretrained(folder)
    beta = encoder.model.layers[-1].ffn_norm_beta
    beta.set_value(jnp.full_like(beta.get_value(), 1e5))
    with pytest.raises(ValueError, match="encode: embeddings must fit float16, but one has a component beyond 65504"):
        encoder.encode(TEXTS, precision="float16")
    assert encoder.encode(TEXTS).max() > 65504


def test_ranges_come_from_an_array_or_from_texts(encoder):
    embeddings = encoder.encode(TEXTS, prompt_name="query", truncate_dim=6)
    ranges = np.stack([embeddings.min(0) - 1, embeddings.max(0)])
    options = {"precision": "uint8", "prompt_name": "query", "truncate_dim": 6}
    same(encoder.encode(TEXTS, ranges=ranges, **options), quantize_embeddings(embeddings, "uint8", ranges=ranges))
    expected = quantize_embeddings(embeddings[:1], "uint8", calibration_embeddings=embeddings)
    same(encoder.encode(TEXTS[:1], calibration=embeddings, **options), expected)
    same(encoder.encode(TEXTS[:1], calibration=iter(TEXTS), **options), expected)
    same(encoder.encode(TEXTS[0], calibration=TEXTS, **options), expected[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "precision must be one of 'float32', 'float16', .* got 'int4'"),
        ({"precision": None}, "precision must be one of .* got None"),
        ({"output_value": "tokens"}, "output_value must be one of 'sentence_embedding', .* None, got 'tokens'"),
        ({"task": "search"}, "task must be one of None, 'query', 'document', got 'search'"),
        ({"output_value": None, "precision": "int8"}, "precision 'int8' needs output_value 'sentence_embedding'"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"precision": "binary", "ranges": np.zeros((2, 16))}, "encode: ranges must be None with precision 'binary'"),
        ({"calibration": TEXTS}, "encode: calibration must be None with precision 'float32'"),
    ],
)
def test_unknown_values_are_refused_before_the_work(encoder, options, message):
    with pytest.raises(ValueError, match=message):
        encoder.encode([3], **{"prompt": ""} | options) if "batch_size" in options else encoder.encode(TEXTS, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranges": np.zeros((2, 3), np.float32)}, ValueError, r"encode: ranges must have the shape \(2, 16\)"),
        ({"calibration": "a text"}, TypeError, "encode: calibration must be an iterable of str or an array of floats"),
        ({"calibration": ["a", 3]}, TypeError, r"encode: calibration\[1\] must be a str, got int"),
        ({"calibration": np.zeros((3, 16), int)}, TypeError, "encode: calibration must be floats, got int64"),
        ({}, ValueError, "encode: int8 ranges of a single text say nothing: pass ranges or calibration"),
    ],
)
def test_bad_ranges_are_refused(encoder, options, error, message):
    with pytest.raises(error, match=message):
        encoder.encode(TEXTS[:1], precision="int8", **options)


def test_calibration_may_be_a_list_of_embeddings(encoder):
    rows = encoder.encode(TEXTS)
    expected = encoder.encode(TEXTS[:1], precision="int8", calibration=rows)
    for calibration in (list(rows), rows.tolist()):
        same(encoder.encode(TEXTS[:1], precision="int8", calibration=calibration), expected)


# --- Similarities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_short_embeddings_are_normalised_too(kind):
    x = kind(np.float32([[3e-9, 4e-9], [0, 0], [30, 40]]))
    close(np.asarray(similarities.normalized(x)), [[0.6, 0.8], [0, 0], [0.6, 0.8]])
    close(np.asarray(similarities.SIMILARITIES["cosine"].full(x, x))[0], [1, 0, 1])


def test_similarity_follows_its_name(encoder, folder):
    a, b = encoder.encode(TEXTS[:2]), encoder.encode(TEXTS[2:])
    assert encoder.similarity_fn_name == "dot"  # from the folder
    np.testing.assert_allclose(encoder.similarity(a, b), a @ b.T, rtol=1e-5)
    encoder.similarity_fn_name = None
    assert encoder.similarity_fn_name == "cosine"
    cosine = (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (b / np.linalg.norm(b, axis=1, keepdims=True)).T
    np.testing.assert_allclose(encoder.similarity(a, b), cosine, rtol=1e-5)
    np.testing.assert_allclose(encoder.similarity_pairwise(a, b[:2]), np.diag(cosine), rtol=1e-5)
    encoder.similarity_fn_name = "manhattan"
    np.testing.assert_allclose(encoder.similarity_pairwise(a, b[:2]), -np.abs(a - b[:2]).sum(1), rtol=1e-5)
    assert SentenceEncoder.from_pretrained(folder, similarity_fn_name="euclidean").similarity_fn_name == "euclidean"
    with pytest.raises(ValueError, match="similarity_fn_name must be one of cosine, .* got 'maxsim'"):
        encoder.similarity_fn_name = "maxsim"


# --- Inputs and arguments ----------------------------------------------------------------------------------------


class Column:
    """A lazy column, as of `datasets`: an iterable with a length that is no sequence."""

    def __iter__(self):
        return iter(TEXTS)

    def __len__(self):
        return len(TEXTS)


class Arrow:
    """An Arrow array: its items are no str."""

    def __iter__(self):
        return iter([object()] * len(TEXTS))

    def to_pylist(self):
        return TEXTS


@pytest.mark.parametrize(
    "inputs",
    [
        tuple(TEXTS),
        iter(TEXTS),
        (text for text in TEXTS),
        np.array(TEXTS),
        Column(),
        Arrow(),
        dict.fromkeys(TEXTS).keys(),
    ],
    ids=lambda inputs: type(inputs).__name__,
)
def test_inputs_may_be_any_iterable(encoder, inputs):
    found = encoder.encode(inputs)
    same(found, encoder.encode(sentences=TEXTS))


def test_inputs_have_one_name_at_a_time(encoder):
    with pytest.raises(TypeError, match="encode: inputs and sentences are names of the same argument"):
        encoder.encode(TEXTS, sentences=TEXTS)
    with pytest.raises(TypeError, match="positional"):
        encoder.encode(TEXTS, 32)


OF_ENCODE = inspect.signature(SentenceEncoder.encode).parameters


@pytest.mark.parametrize("cls", [SentenceEncoder, SparseEncoder, MultiVectorEncoder, CrossEncoder])
def test_calls_and_exports_have_the_same_defaults(cls):
    of_call = inspect.signature(cls.predict if cls is CrossEncoder else cls.encode).parameters
    assert of_call["batch_size"].default == 32  # as in sentence-transformers
    for function in (cls.export, cls.warmup, cls.buckets, *([cls.rank] if cls is CrossEncoder else [])):
        own = inspect.signature(function).parameters
        common = (own.keys() & of_call.keys()) - {"self"}
        assert {name: own[name].default for name in common} == {name: of_call[name].default for name in common}


@pytest.mark.parametrize("name", [name for name in arguments._EQUIVALENTS if name not in OF_ENCODE])
def test_arguments_of_ported_scripts_name_the_equivalent(encoder, folder, name):
    calls = [encoder.encode, encoder.encode_query, encoder.encode_document, SentenceEncoder.from_pretrained]
    for call in calls:
        with pytest.raises(TypeError, match=f"{name} is an argument of sentence-transformers only: "):
            call(folder if call == calls[-1] else TEXTS, **{name: "cuda"})


def test_few_texts_for_the_ranges_log_a_warning(encoder, caplog):
    encoder.encode(TEXTS, precision="int8")
    assert caplog.messages == [
        "encode: int8 ranges are computed from only 5 embeddings: pass ranges, or calibration of more texts"
    ]


def test_errors_name_the_method_that_was_called(encoder):
    for name in ("encode_query", "encode_document"):
        for option in ("bach_size", "task"):
            with pytest.raises(TypeError, match=f"^{name}: unexpected argument '{option}'"):
                getattr(encoder, name)(TEXTS, **{option: "query"})
        with pytest.raises(TypeError, match=f"^{name}: pool is an argument of sentence-transformers only"):
            getattr(encoder, name)(TEXTS, pool=None)


@pytest.mark.parametrize("value", ["x", 1, 0.0, []])
def test_flags_must_be_booleans(encoder, folder, value):
    flags = ["show_progress_bar", "convert_to_numpy", "normalize_embeddings"]
    calls = [*((encoder.encode, TEXTS, name) for name in flags), (encoder.encode_query, TEXTS, flags[0])]
    calls += [(SentenceEncoder.from_pretrained, folder, name) for name in ("packed", "local_files_only")]
    calls += [(paraphrase_mining, encoder, "show_progress_bar")]

    def make(_, **options):
        SentenceEncoder(encoder.model, encoder.tokenizer, **{"max_seq_length": 32} | options)

    calls += [(make, None, name) for name in ("packed", "include_prompt", "normalize", "token_types")]
    for call, argument, name in calls:
        arguments = [argument, TEXTS] if call is paraphrase_mining else [argument]
        with pytest.raises(TypeError, match=f": {name} must be True or False, got {type(value).__name__}"):
            call(*arguments, **{name: value})
    assert len(encoder.encode(TEXTS, normalize_embeddings=np.True_, show_progress_bar=None)) == len(TEXTS)


@pytest.mark.parametrize("name", ["revision", "cache_dir"])
def test_places_of_a_checkpoint_must_be_texts(folder, name):
    with pytest.raises(TypeError, match=f"from_pretrained: {name} must be None.* a string.*, got int"):
        SentenceEncoder.from_pretrained(folder, **{name: 3})


def test_unknown_arguments_are_refused(encoder, folder):
    for call in (encoder.encode, SentenceEncoder.from_pretrained):
        with pytest.raises(TypeError, match="unexpected argument 'bach_size'"):
            call(folder, bach_size=3)


@pytest.mark.parametrize("in_tokenizer", [False, True], ids=["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["nomic_bert", "bert", "classifier"])
def test_padding_on_the_left_counts_for_some_models(kind, in_tokenizer, tmp_path):
    """Rotary positions are relative; those of BERT count from the start of a row."""
    load = SentenceEncoder.from_pretrained
    if kind == "classifier":
        load = CrossEncoder.from_pretrained
        tiny.write_classifier(tmp_path, "roberta")
    else:
        tiny.write_model(tmp_path, model_type=kind)
    expected = load(tmp_path)
    if in_tokenizer:
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
        tokenizer["padding"]["direction"] = "Left"
        tiny.write_json(tmp_path / "tokenizer.json", tokenizer)
    else:
        tiny.write_json(tmp_path / "tokenizer_config.json", {"padding_side": "left"})
    if kind == "nomic_bert":
        same(load(tmp_path).encode(TEXTS), expected.encode(TEXTS))
        return
    name = "tokenizer.json" if in_tokenizer else "tokenizer_config.json"
    with pytest.raises(CheckpointError, match=f"/{name}: padding_side 'left' is not supported: the numbers of a text"):
        load(tmp_path)


def test_cross_encoder_takes_the_default_prompt(tmp_path):
    tiny.write_classifier(tmp_path)
    tiny.write_modules(tmp_path, (tiny.TYPES + "Transformer", ""))
    settings = {"model_type": "CrossEncoder", "prompts": {"q": "rain "}, "default_prompt_name": "q"}
    tiny.write_json(tmp_path / FAMILY, settings)
    tiny.write_json(tmp_path / MODULE, {"transformer_task": "sequence-classification"})
    found = CrossEncoder.from_pretrained(tmp_path).predict([("bird", "tree")])
    tiny.write_json(tmp_path / FAMILY, {"model_type": "CrossEncoder"})
    np.testing.assert_array_equal(found, CrossEncoder.from_pretrained(tmp_path).predict([("rain bird", "tree")]))
