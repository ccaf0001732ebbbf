"""SentenceEncoder: tokens and embeddings of a real checkpoint, and the conventions of folders with a tiny one."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import pre_tokenizers

import tiny
from cases import slow, slow_cases
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.text import batching
from jaxft.text.sentence_encoder import SentenceEncoder

GOLDEN = Path(__file__).parent / "data" / "minilm_golden.npz"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TEXTS = [  # four lengths, since the expected values compile once per length
    "a bird sings in the old tree",
    "rain",
    "",
    "the river , the old rain .",
    "the river . " * 20 + "a bird",
    "rain falls on the old Bird .",
    "xylopho",  # 7 word pieces
    "sings " * 100,  # beyond the limit
]


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def encoder(folder):
    return SentenceEncoder.from_pretrained(folder)


def pooled(encoder, text, modes=("mean",), normalize=False):
    """Computes the embedding by NumPy in float64, from the hidden states of that text alone without padding."""
    ids = np.array([encoder.tokenize(text)[0]], np.int32)
    hidden = np.asarray(encoder.model(ids).last_hidden_state, np.float64)[0]
    parts = {"cls": hidden[0], "max": hidden.max(axis=0), "mean": hidden.mean(axis=0)}
    embedding = np.concatenate([parts[mode] for mode in modes])
    return embedding / np.linalg.norm(embedding) if normalize else embedding


def close(actual, expected):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=5e-6)


# --- The real checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), *slow_cases(("bfloat16", 4e-3), ("float16", 5e-4))])
def test_minilm(minilm, golden, dtype, bound):
    sentences = golden["sentences"]  # an array of strings
    encoder = SentenceEncoder.from_pretrained(minilm, dtype=dtype)
    embeddings = encoder.encode(sentences, batch_size=4)
    assert (encoder.max_seq_length, encoder.embedding_dimension) == (256, 384)
    kept = golden["attention_mask"] == 1
    assert encoder.tokenize(sentences) == [golden["input_ids"][row, kept[row]].tolist() for row in range(len(kept))]
    assert embeddings.dtype == np.float32 and embeddings.shape == (len(sentences), 384)
    assert np.abs(embeddings - golden["embeddings"]).max() <= bound


def test_demo(minilm, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)

    def run(model):
        monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(model)])
        return demo.main(), *capsys.readouterr()

    code, out, err = run(minilm)
    assert code == 0 and out.endswith("PASS\n") and err == ""
    assert "0.939  Eating more vegetables and less sugar is good for the heart." in out

    reference = np.load(EXAMPLES / "reference_embeddings.npy")
    assert reference.shape == (300, 384) and reference.dtype == np.float32
    for wrong in (reference + 3e-6, reference * np.nan):

        class Wrong:
            model = BertModel(tiny.config(max_position_embeddings=128), rngs=nnx.Rngs(0))
            from_pretrained = classmethod(lambda cls, model: cls())
            encode = staticmethod(lambda sentences, wrong=wrong: wrong)

        monkeypatch.setattr(demo, "SentenceEncoder", Wrong)
        code, out, _ = run(minilm)
        assert code == 1 and out.endswith("FAIL\n")
    monkeypatch.setattr(demo, "WEIGHTS_SHA256", "0" * 64)
    assert run(minilm)[0] == 2
    assert run(minilm / "nowhere")[0] == 2


# --- encode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 32, *slow(1, 8)])
def test_rows_keep_the_callers_order(encoder, batch_size):
    expected = [pooled(encoder, text) for text in TEXTS]
    close(encoder.encode(TEXTS, batch_size=batch_size), expected)
    close(encoder.encode(TEXTS[::-1], batch_size=batch_size), expected[::-1])


def test_many_chunks_and_batches_in_flight(encoder, monkeypatch):
    monkeypatch.setattr(batching, "_CHUNKS", (3, 8, 8))
    monkeypatch.setattr(batching, "_IN_FLIGHT", 2)
    texts = TEXTS[:5] * 10 + TEXTS[5:]
    expected = {text: pooled(encoder, text) for text in TEXTS}
    close(encoder.encode(texts, batch_size=4), [expected[text] for text in texts])


@pytest.mark.parametrize("side", ["right", "left"])
def test_long_texts_have_the_embeddings_of_their_tokens(folder, side, monkeypatch):
    """Long texts are cut, and the embeddings are those of the tokens of the whole texts, with a prompt too."""
    tokenizer = tiny.bert_tokenizer()
    tokenizer.enable_truncation(max_length=64, direction=side)
    model = BertModel.from_pretrained(folder)
    encoder = SentenceEncoder(
        model, tokenizer, max_seq_length=64, prompts={"q": "rain on the river: "}, default_prompt_name="q"
    )
    texts = [TEXTS[4] * 500, "x" * 50_000 + " bird", "\0" * 50_000 + "tree", "old", ("a bird, " * 40 + "tree ") * 300]
    found, tokens = encoder.encode(texts), encoder.tokenize(texts)
    assert tokens == [tokenizer.encode(encoder.prompts["q"] + text).ids for text in texts]
    monkeypatch.setattr(encoder._by_length[64].long_texts, "cut", lambda texts: texts)
    np.testing.assert_array_equal(found, encoder.encode(texts))


def test_kinds_of_input(encoder):
    expected = np.stack([pooled(encoder, text) for text in TEXTS[:3]])
    for sentences in (TEXTS[:3], tuple(TEXTS[:3]), np.array(TEXTS[:3]), np.array(TEXTS[:3], dtype=object)):
        close(encoder.encode(sentences), expected)
    for sentence in (TEXTS[0], np.str_(TEXTS[0])):
        assert encoder.encode(sentence).shape == (tiny.WIDTH,)
        close(encoder.encode(sentence), expected[0])


@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=str)])
def test_no_texts(encoder, empty):
    embeddings = encoder.encode(empty)
    assert embeddings.shape == (0, tiny.WIDTH) and embeddings.dtype == np.float32
    assert encoder.tokenize(empty) == []


def test_jax_array(encoder):
    embeddings = encoder.encode(TEXTS[:2], convert_to_numpy=False)
    assert isinstance(embeddings, jax.Array) and embeddings.dtype == jnp.float32
    close(np.asarray(embeddings), encoder.encode(TEXTS[:2]))
    assert encoder.encode("rain", convert_to_numpy=False).shape == (tiny.WIDTH,)


def test_normalize_embeddings(encoder):
    close(encoder.encode(TEXTS, normalize_embeddings=True), [pooled(encoder, text, normalize=True) for text in TEXTS])


@pytest.mark.parametrize("dtype", ["float16", *slow("bfloat16")])
def test_half_precision_gives_float32(folder, dtype):
    encoder = SentenceEncoder.from_pretrained(folder, dtype=dtype)
    expected = [pooled(encoder, text) for text in TEXTS[:2]]
    embeddings = encoder.encode(TEXTS[:2])
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=0.05)
    assert not np.array_equal(
        embeddings, embeddings.astype(dtype).astype(np.float32)
    )  # the mean is not a 16-bit number


def test_programs_are_bounded(folder, monkeypatch):
    encoder = SentenceEncoder.from_pretrained(folder, packed=False)
    traced = []
    call = BertModel.__call__

    def counting(self, input_ids, *args, **kwargs):
        traced.append(input_ids.shape)
        return call(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(BertModel, "__call__", counting)
    for count in (*range(1, 40), 100):
        encoder.encode(["rain " * (7 * i % 71) for i in range(count)], batch_size=8)
    assert len(traced) == len(set(traced))
    assert {length for _, length in traced} == {16, 32, 48, 64}
    assert {rows for rows, _ in traced} == {1, 2, 4, 8}
    programs = len(traced)
    encoder.encode(["the river " * (i % 40) for i in range(333)], batch_size=8)  # the shapes repeat
    assert len(traced) == programs


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (512, (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)),
        (256, (16, 32, 48, 64, 96, 128, 192, 256)),
        (100, (16, 32, 48, 64, 96, 100)),
        (17, (16, 17)),
        (5, (5,)),
    ],
)
def test_padded_lengths(limit, expected):
    assert batching.padded_lengths(limit) == expected


def test_trained_parameters_are_used(folder):
    encoder = SentenceEncoder.from_pretrained(folder)
    before = encoder.encode(TEXTS)
    nnx.update(encoder.model, jax.tree.map(lambda x: x * 0.5, nnx.state(encoder.model, nnx.Param)))
    after = encoder.encode(TEXTS)
    assert np.abs(after - before).max() > 0.1
    close(after, [pooled(encoder, text) for text in TEXTS])


@pytest.mark.parametrize(
    ("count", "show", "terminal", "expected"),
    [(3, True, False, True), (3, None, True, False), (1001, None, True, True), (1001, None, False, False),
     (1001, False, True, False)],
)  # fmt: skip
def test_progress_bar(encoder, capsys, monkeypatch, count, show, terminal, expected):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    encoder.encode(["rain"] * count, show_progress_bar=show, batch_size=256)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (f"{count}/{count}" in captured.err) == expected
    assert expected or captured.err == ""


@pytest.mark.parametrize("show", [None, True, False])
def test_progress_needs_no_stderr(encoder, monkeypatch, tmp_path, show):
    """A process that was started with stderr closed has none."""
    monkeypatch.setattr(sys, "stderr", None)
    assert encoder.encode(["rain"] * 1001, show_progress_bar=show, batch_size=256).shape == (1001, tiny.WIDTH)
    encoder.warmup(batch_size=1, show_progress_bar=show)
    encoder.export(tmp_path, batch_size=1, show_progress_bar=show)


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (["rain", 3], r"inputs\[1\] must be a str, got int"),
        ([None], r"inputs\[0\] must be a str, got NoneType"),
        (["rain", b"rain"], r"inputs\[1\] must be a str, got bytes"),
        (np.array([["rain"]]), r"inputs\[0\] must be a str, got ndarray"),
        (np.array([1.0]), r"inputs\[0\] must be a str, got float64"),
        (b"rain", "must be a str or an iterable of str, got bytes"),
        (None, "must be a str or an iterable of str, got NoneType"),
        (np.array("rain"), "must be a str or an iterable of str, got ndarray"),
        ({"rain": 1}, "must be a str or an iterable of str, got dict"),
    ],
)
def test_inputs_must_be_strings(encoder, sentences, message):
    for method in (encoder.encode, encoder.tokenize):
        with pytest.raises(TypeError, match=message):
            method(sentences)


def test_lone_surrogate(encoder):
    with pytest.raises(ValueError, match=r"inputs\[1\] is not valid Unicode"):
        encoder.encode(["rain", "\ud800"])


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, None, "8"])
def test_batch_size(encoder, batch_size):
    with pytest.raises(ValueError, match="batch_size must be a positive integer, got " + repr(batch_size)):
        encoder.encode(TEXTS, batch_size=batch_size)


def test_constructor_checks(encoder):
    parts = (encoder.model, encoder.tokenizer)
    with pytest.raises(ValueError, match="pooling must name some of .*got .'median',."):
        SentenceEncoder(*parts, max_seq_length=64, pooling=("median",))
    with pytest.raises(ValueError, match="pooling must name some of"):
        SentenceEncoder(*parts, max_seq_length=64, pooling=())
    with pytest.raises(ValueError, match="max_seq_length must be above 2, .* got 2"):
        SentenceEncoder(*parts, max_seq_length=2)


# --- Folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "modes", "normalize"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",), False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",), True),
        ({"pooling_mode_max_tokens": True}, ("max",), False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
         ("cls", "max", "mean"), True),
        ({"pooling_mode_mean_tokens": False}, ("mean",), False),
        ({"pooling_mode": "cls", "embedding_dimension": 16}, ("cls",), True),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max"), False),
    ],
)  # fmt: skip
def test_pooling(tmp_path, config, modes, normalize):
    encoder = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path, config, normalize))
    assert encoder.embedding_dimension == tiny.WIDTH * len(modes)
    close(encoder.encode(TEXTS), [pooled(encoder, text, modes, normalize) for text in TEXTS])


def test_text_without_a_token(folder):
    encoder = SentenceEncoder.from_pretrained(folder)
    bare = tiny.bare_tokenizer()
    bare = SentenceEncoder(encoder.model, bare, max_seq_length=8, pooling=("cls", "max", "mean"), normalize=True)
    embeddings = bare.encode(["", "rain"])
    assert (embeddings[0] == 0).all() and np.isfinite(embeddings).all() and (embeddings[1] != 0).any()


def test_plain_transformers_folder(tmp_path):
    encoder = SentenceEncoder.from_pretrained(tiny.write_model(tmp_path))
    assert encoder.max_seq_length == 64
    close(encoder.encode(TEXTS), [pooled(encoder, text) for text in TEXTS])


def test_transformer_may_be_in_a_subfolder(tmp_path):
    tiny.write_model(tmp_path / "0_Transformer")
    tiny.write_json(tmp_path / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 12})
    tiny.write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "max"})
    tiny.write_modules(
        tmp_path,
        ("sentence_transformers.base.modules.transformer.Transformer", "0_Transformer"),
        ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
        ("sentence_transformers.base.modules.normalize.Normalize", "2_Normalize"),
    )
    encoder = SentenceEncoder.from_pretrained(str(tmp_path))
    assert encoder.max_seq_length == 12
    close(encoder.encode(TEXTS), [pooled(encoder, text, ("max",), normalize=True) for text in TEXTS])


@pytest.mark.parametrize(
    ("settings", "tokenizer_config", "expected"),
    [
        ({"max_seq_length": 20}, {"model_max_length": 40}, 20),
        ({"max_seq_length": 20}, {"model_max_length": 12}, 20),
        ({"max_seq_length": None}, {"model_max_length": 40}, 40),
        ({}, {"model_max_length": 1e30}, 64),
        ({"max_seq_length": 512}, {}, 64),
    ],
)
def test_max_seq_length(tmp_path, settings, tokenizer_config, expected):
    tiny.write_sentence_model(tmp_path)
    tiny.write_json(tmp_path / "sentence_bert_config.json", settings)
    tiny.write_json(tmp_path / "tokenizer_config.json", tokenizer_config)
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert encoder.max_seq_length == expected
    assert [len(ids) for ids in encoder.tokenize(["rain " * 100, "rain " * 9])] == [expected, 11]
    assert encoder.encode("rain " * 100).shape == (tiny.WIDTH,)


def test_settings_file_may_be_named_after_another_model(tmp_path):
    tiny.write_sentence_model(tmp_path)
    tiny.write_json(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 8})
    assert SentenceEncoder.from_pretrained(tmp_path).max_seq_length == 8


@pytest.mark.parametrize(("own", "noted", "side"), [("left", None, "left"), ("left", "right", "right"),
                                                    ("right", "left", "left"), ("right", None, "right")])  # fmt: skip
def test_truncation_side(tmp_path, own, noted, side):
    tiny.write_sentence_model(tmp_path)
    tokenizer = tiny.bert_tokenizer()
    tokenizer.enable_truncation(max_length=7, direction=own)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tiny.write_json(tmp_path / "tokenizer_config.json", {"truncation_side": noted} if noted else {})
    tiny.write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 5})
    words = ["[CLS]", *{"left": ("the", "old", "river"), "right": ("a", "bird", "sings")}[side], "[SEP]"]
    (ids,) = SentenceEncoder.from_pretrained(tmp_path).tokenize(["a bird sings on the old river"])
    assert ids == [tiny.VOCAB.index(word) for word in words]


def test_white_space_around_texts_is_kept(tmp_path):
    """White space is text to a byte tokenizer, and sentence-transformers keeps it since 5.4."""
    tiny.write_sentence_model(tmp_path)
    tokenizer = tiny.bert_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.normalizer = None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tiny.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert encoder.tokenize([" rain\n", "rain ", "rain"]) == [[2, 1, 3], [2, 10 + 2, 1, 3], [2, 12, 3]]


def test_roberta_has_fewer_positions(tmp_path):
    tiny.write_model(tmp_path, model_type="roberta", pad_token_id=1, max_position_embeddings=20)
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert encoder.max_seq_length == 18
    texts = [TEXTS[0], "rain " * 100]
    close(encoder.encode(texts), [pooled(encoder, text) for text in texts])


def test_vocab_txt_alone(tmp_path):
    tiny.write_sentence_model(tmp_path)
    texts = [*TEXTS, "Äbtissin, [MASK] 雨 sings…"]
    expected = SentenceEncoder.from_pretrained(tmp_path).tokenize(texts)
    (tmp_path / "tokenizer.json").unlink()
    assert SentenceEncoder.from_pretrained(tmp_path).tokenize(texts) == expected
    tiny.write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": False})
    cased = SentenceEncoder.from_pretrained(tmp_path)
    assert cased.tokenize("The")[0] == [tiny.VOCAB.index(token) for token in ("[CLS]", "T", "##h", "##e", "[SEP]")]
    tiny.write_json(tmp_path / "sentence_bert_config.json", {"do_lower_case": True})
    lowered = SentenceEncoder.from_pretrained(tmp_path)
    assert lowered.tokenize("The")[0] == [tiny.VOCAB.index(token) for token in ("[CLS]", "the", "[SEP]")]


def test_default_prompt(tmp_path):
    tiny.write_sentence_model(tmp_path)
    plain = SentenceEncoder.from_pretrained(tmp_path)
    prompts = {"prompts": {"search": "the river ", "other": "rain"}}
    tiny.write_json(tmp_path / "config_sentence_transformers.json", prompts)
    assert SentenceEncoder.from_pretrained(tmp_path).tokenize("rain") == plain.tokenize("rain")
    tiny.write_json(tmp_path / "config_sentence_transformers.json", prompts | {"default_prompt_name": "search"})
    assert SentenceEncoder.from_pretrained(tmp_path).tokenize("rain") == plain.tokenize("the river rain")
    for name, prompt in (("query", "old "), ("document", "")):  # these two names have empty prompts by default
        prompts = {"prompts": {"query": "old "}, "default_prompt_name": name}
        tiny.write_json(tmp_path / "config_sentence_transformers.json", prompts)
        assert SentenceEncoder.from_pretrained(tmp_path).tokenize("rain") == plain.tokenize(prompt + "rain")


TRANSFORMER, POOLING = (tiny.TYPES + "Transformer", ""), (tiny.TYPES + "Pooling", "1_Pooling")
NORMALIZE = (tiny.TYPES + "Normalize", "2_Normalize")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([TRANSFORMER, POOLING, (tiny.TYPES + "LSTM", "2_LSTM")],
         "modules.json: module 'sentence_transformers.models.LSTM' is not supported; supported are"),
        ([TRANSFORMER, POOLING, POOLING], "module Pooling appears twice"),
        ([TRANSFORMER, TRANSFORMER, POOLING], "module Transformer appears twice"),
        ([TRANSFORMER], "expected a Transformer module, then one Pooling module .* got Transformer$"),
        ([NORMALIZE, TRANSFORMER, POOLING], "expected a Transformer .* got Normalize, Transformer, Pooling"),
        ([(TRANSFORMER[0], "../other"), POOLING], "Transformer must have a path inside the folder, got '../other'"),
        ([(TRANSFORMER[0], "/etc"), POOLING], "Transformer must have a path inside the folder, got '/etc'"),
        ([(TRANSFORMER[0], None), POOLING], "Transformer must have a path inside the folder, got None"),
        ([(TRANSFORMER[0], "elsewhere"), POOLING], "folder of module Transformer, .*elsewhere, does not exist"),
        ([(TRANSFORMER[0], "a" * 5000), POOLING], "folder of module Transformer, .*aaa, does not exist"),
        ([TRANSFORMER, (POOLING[0], "elsewhere")], "elsewhere/config.json: missing, but modules.json names it"),
        ([TRANSFORMER, (POOLING[0], "a" * 5000)], "a/config.json: missing, but modules.json names it"),
    ],
)  # fmt: skip
def test_bad_modules(tmp_path, modules, message):
    tiny.write_sentence_model(tmp_path)
    tiny.write_modules(tmp_path, *modules)
    with pytest.raises(CheckpointError, match=message):
        SentenceEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "[", "modules.json is not valid JSON"),
        ("modules.json", "[" * 100_000, "modules.json is not valid JSON"),
        ("modules.json", "{}", "modules.json: expected a list of modules, got {}"),
        ("modules.json", "[1]", "modules.json: expected a list of modules"),
        ("1_Pooling/config.json", "[]", "config.json is not a JSON object, but a list"),
        ("1_Pooling/config.json", '{"pooling_mode": "median"}', "pooling mode 'median' is not supported"),
        ("1_Pooling/config.json", '{"pooling_mode": 3}', "pooling mode 3 is not supported"),
        ("1_Pooling/config.json", '{"pooling_mode": []}', "is not supported; supported are cls, max, mean"),
        ("sentence_bert_config.json", '{"max_seq_length": "x"}', "max_seq_length must be an integer .*, got 'x'"),
        ("sentence_bert_config.json", '{"max_seq_length": NaN}', "not valid JSON: the number NaN is not finite"),
        ("sentence_bert_config.json", '{"max_seq_length": -Infinity}', "the number -Infinity is not finite"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "max_seq_length must be .* got 0"),
        ("tokenizer_config.json", '{"truncation_side": "middle"}', "truncation_side must be left or right, got 'mid"),
        ("sentence_bert_config.json", '{"max_seq_length": 2}', "max_seq_length must be above 2"),
        ("sentence_bert_config.json", b"\xff", "sentence_bert_config.json is not valid JSON"),
        ("sentence_bert_config.json", "[" * 100_000, "sentence_bert_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"model_max_length": true}', "tokenizer_config.json: model_max_length must be"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer of the tokenizers library"),
        ("tokenizer.json", None, "no tokenizer: neither tokenizer.json nor vocab.txt is there"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "'q', but prompts has no text of that"),
        ("config_sentence_transformers.json", '{"default_prompt_name": []}', r"must be a name, got \[\]"),
        ("config_sentence_transformers.json", '{"prompts": ["x"]}', "prompts must be an object .* got .'x'."),
        ("config_sentence_transformers.json", '{"prompts": {"q": 3}}', "prompts has no text of the name 'q', but 3"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, file, content, message):
    tiny.write_sentence_model(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message):
        SentenceEncoder.from_pretrained(tmp_path)


def test_bad_vocabulary(tmp_path):
    tiny.write_sentence_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nrain\n")
    with pytest.raises(
        CheckpointError, match=r"vocab.txt: not a vocabulary of BertTokenizer: \[CLS\], \[SEP\], \[MASK\] missing"
    ):
        SentenceEncoder.from_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(CheckpointError, match="vocab.txt: not a"):
        SentenceEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("option", "value"), [("strip_accents", "yes"), ("tokenize_chinese_chars", 1), ("do_lower_case", [])]
)
def test_bad_options_of_vocab_txt(tmp_path, option, value):
    tiny.write_sentence_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    tiny.write_json(tmp_path / "tokenizer_config.json", {option: value})
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {option} must be true, false or null, got"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_null_options_of_vocab_txt(tmp_path):
    tiny.write_sentence_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    expected = SentenceEncoder.from_pretrained(tmp_path).tokenize("The 雨 Ärain")
    options = dict.fromkeys(("strip_accents", "tokenize_chinese_chars", "do_lower_case"))
    tiny.write_json(tmp_path / "tokenizer_config.json", options)
    assert SentenceEncoder.from_pretrained(tmp_path).tokenize("The 雨 Ärain") == expected


def test_tokenizer_must_fit_the_model(tmp_path):
    tiny.write_sentence_model(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary, size = tokenizer["model"]["vocab"], len(tiny.VOCAB)
    del vocabulary["river"]
    for name, largest in (("extra", size), ("rain", size + 7)):  # the second has holes: fewer tokens than the model
        tokenizer["model"]["vocab"] = vocabulary | {name: largest}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(CheckpointError, match=f"tokenizer has ids up to {largest}, .* vocab_size is only {size}"):
            SentenceEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", [None, 3, b"model"])
def test_folder_must_be_a_path(name):
    with pytest.raises(TypeError, match=f"folder_or_id must be a string or a path, got {type(name).__name__}"):
        SentenceEncoder.from_pretrained(name)


def test_no_such_folder():
    with pytest.raises(CheckpointError, match="no/such/folder"):
        SentenceEncoder.from_pretrained("no/such/folder")


def test_loading_compiles_nothing(tmp_path, compiled):
    folder = tiny.write_model(tmp_path, hidden_size=26, intermediate_size=38)  # sizes of no other test
    compiled.clear()
    SentenceEncoder.from_pretrained(folder)
    assert not compiled


def test_loading_puts_parameters_on_the_mesh_that_is_set(folder):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        bias = SentenceEncoder.from_pretrained(folder).model.layers[0].out_bias.get_value()
    assert bias.sharding == jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def test_results_as_jax_arrays_compile_nothing(encoder, compiled):
    options = {"output_value": None, "batch_size": 4}
    encoder.encode(["rain", "a bird", "sings", "falls"], **options)
    compiled.clear()
    for count in (3, 4):  # batches of the same shape
        results = encoder.encode(["rain", "a bird", "sings", "a bird sings"][:count], convert_to_numpy=False, **options)
        assert len(results) == count and isinstance(results[0]["token_embeddings"], jax.Array)
    assert not compiled
