"""Files and texts that are refused by name: odd tokenizers, special files, bombs, and numbers that are not finite."""

import ast
import json
import os
import socket
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from tokenizers import Tokenizer, models, processors

import fuzz_checkpoints
import peer_models
import tiny
from jaxft import cli
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import quantize
from jaxft.models.bert import BertModel
from jaxft.models.embedding import Dense
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import TextError
from jaxft.text.cross_encoder import CrossEncoder
from jaxft.text.multi_vector_encoder import MultiVectorEncoder
from jaxft.text.sentence_encoder import SentenceEncoder
from test_atomic import names

WEIGHTS, WORDS = "model.safetensors", "embeddings.word_embeddings.weight"
TEXTS = ["a bird sings", "the old tree", "rain falls on the river"]
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def change(file, **fields):
    tiny.write_json(file, json.loads(file.read_text()) | fields)


def change_tokenizer(folder, **fields):
    """Changes tokenizer.json, and makes it count as it is, with its token types."""
    change(folder / "tokenizer.json", **fields)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["token_type_ids", "attention_mask"]}
    tiny.write_json(folder / "tokenizer_config.json", settings)


def change_weights(folder, name, value):
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    tensors[name] = np.array(tensors[name])
    tensors[name][...] = value(tensors[name])
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def refused(load, folder, *fragments):
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert time.process_time() - start < 2
    for fragment in (str(folder), *fragments):
        assert fragment in str(caught.value), str(caught.value)[:1000]
    return str(caught.value)


# --- Ids that the model lacks ------------------------------------------------------------------------------------


def template(*pieces, **special):
    """A template of "A", "B" and names of special tokens, each with its type id."""
    made = [{"Sequence" if name in "AB" else "SpecialToken": {"id": name, "type_id": kind}} for name, kind in pieces]
    pair = made if ("B", 0) in pieces or ("B", 1) in pieces or ("B", 2) in pieces else [*made, *made]
    tokens = {name: {"id": name, "ids": ids, "tokens": [name] * len(ids)} for name, ids in special.items()}
    return {"type": "TemplateProcessing", "single": made, "pair": pair, "special_tokens": tokens}


BEYOND = len(tiny.VOCAB)
SPECIAL = f"ids up to {BEYOND}, 'X', but the model's vocab_size is only {BEYOND}"
POST_PROCESSORS = [
    ({"type": "BertProcessing", "sep": ["X", BEYOND], "cls": ["[CLS]", 2]}, SPECIAL),
    ({"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["X", BEYOND], "trim_offsets": True,
      "add_prefix_space": True}, SPECIAL),
    (template(("A", 0), ("X", 0), X=[BEYOND]), SPECIAL),
    (template(("X", 0), ("A", 0), X=[2, 3, BEYOND]), SPECIAL),
    ({"type": "Sequence", "processors": [template(("A", 0), ("X", 0), X=[BEYOND])]}, SPECIAL),
    ({"type": "BertProcessing", "sep": ["X", 2**32 - 1], "cls": ["[CLS]", 2]}, "ids up to 4294967295, 'X'"),
    (template(("A", 1)), "type ids up to 1; supported are those below 1"),
    (template(("A", 0), ("[SEP]", 1), **{"[SEP]": [3]}), "type ids up to 1; supported are those below 1"),
    (template(*[("A", 0)] * 50), "must keep each text, once"),
    (template(("[SEP]", 0), **{"[SEP]": [3]}), "must keep each text, once"),
    (template(("X", 0), ("A", 0), X=[2] * 100), "max_position_embeddings must be above 100"),
    (template(("A", 0), ("X", 0)), "no entry found for key"),  # a panic
]  # fmt: skip


@pytest.mark.parametrize(("post_processor", "reason"), POST_PROCESSORS)
def test_post_processor_must_fit_the_model(tmp_path, post_processor, reason):
    tiny.write_sentence_model(tmp_path)
    change_tokenizer(tmp_path, post_processor=post_processor)
    refused(SentenceEncoder.from_pretrained, tmp_path, reason)


@pytest.mark.parametrize(
    ("model_type", "post_processor", "reason"),
    [
        ("bert", template(("A", 0), ("B", 2)), "type ids up to 2; supported are those below 2"),
        ("roberta", template(("A", 0), ("B", 1)), "type ids up to 1; supported are those below 1"),
        ("bert", template(("A", 0), ("X", 0), ("B", 1), X=[BEYOND]), SPECIAL),
        ("bert", template(("A", 0), ("B", 1), ("B", 1)), "must keep each text, once"),
    ],
)
def test_pair_template_must_fit_the_model(tmp_path, model_type, post_processor, reason):
    tiny.write_classifier(tmp_path, model_type)
    change_tokenizer(tmp_path, post_processor=post_processor)
    refused(CrossEncoder.from_pretrained, tmp_path, reason)


def test_added_token_must_fit_the_model(tmp_path):
    tiny.write_sentence_model(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [*tokenizer["added_tokens"], added | {"id": 7, "content": "[NEW]"}]
    change(tmp_path / "tokenizer.json", added_tokens=tokens)
    refused(SentenceEncoder.from_pretrained, tmp_path, f"ids up to {BEYOND}, '[NEW]'")


def test_token_types_of_a_model_without_any_are_ignored(tmp_path):
    tiny.write_classifier(tmp_path, "distilbert")
    change_tokenizer(tmp_path, post_processor=template(("A", 0), ("B", 1)))
    assert np.isfinite(CrossEncoder.from_pretrained(tmp_path).predict([("a", "bird")])).all()


def test_token_types_that_no_model_gets_are_ignored(tmp_path):
    tiny.write_sentence_model(tmp_path / "sentence")
    tiny.write_classifier(tmp_path / "cross")
    change_tokenizer(tmp_path / "sentence", post_processor=template(("A", 1)))
    change_tokenizer(tmp_path / "cross", post_processor=template(("A", 1), ("B", 2)))
    for folder in tmp_path.iterdir():
        change(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    assert np.isfinite(SentenceEncoder.from_pretrained(tmp_path / "sentence").encode("a bird")).all()
    assert np.isfinite(CrossEncoder.from_pretrained(tmp_path / "cross").predict([("a", "bird")])).all()


def test_constructor_checks_the_tokenizer(tmp_path):
    model = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path)).model
    tokenizer = tiny.bert_tokenizer()
    tokenizer.post_processor = processors.BertProcessing(("X", BEYOND), ("[CLS]", 2))
    with pytest.raises(ValueError, match=f"SentenceEncoder: the tokenizer has ids up to {BEYOND}, 'X'"):
        SentenceEncoder(model, tokenizer, max_seq_length=8)
    with pytest.raises(ValueError, match=r"SentenceEncoder: prompts\['q'\] is not valid"):
        SentenceEncoder(model, tiny.bert_tokenizer(), max_seq_length=8, prompts={"q": "\ud800"})


# --- Results that are not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    tiny.write_sentence_model(tmp_path)
    name = "encoder.layer.0.attention.self.key.weight"
    change_weights(tmp_path, name, lambda x: np.where(np.arange(16) == 3, value, x))
    refused(SentenceEncoder.from_pretrained, tmp_path, f"{WEIGHTS}: {name!r}: has NaN or infinite values")


def test_weights_beyond_float16_are_refused(tmp_path):
    tiny.write_sentence_model(tmp_path)
    change_weights(tmp_path, WORDS, lambda x: x * 1e6)
    assert np.isfinite(SentenceEncoder.from_pretrained(tmp_path).encode("a bird")).all()
    refused(
        lambda folder: SentenceEncoder.from_pretrained(folder, dtype=jnp.float16), tmp_path,
        f"{WORDS!r}: has values beyond the range of float16",
    )  # fmt: skip


@PACKED
def test_text_with_a_result_that_is_not_finite_is_named(tmp_path, packed, monkeypatch):
    encoder = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path), packed=packed)
    table = encoder.model.embeddings.word
    table.set_value(table[...].at[tiny.VOCAB.index("river")].set(jnp.nan))
    assert np.isfinite(encoder.encode(TEXTS[:2])).all()
    reason = r"texts\[2\] \('rain falls on the river'\) .* not finite: the model's parameter embeddings.* has NaN"
    with pytest.raises(ValueError, match=reason):
        encoder.encode(TEXTS)
    # The first of the batch, whose order is another one.
    with pytest.raises(ValueError, match=r"texts\[1\] \('the river'\)"):
        encoder.encode(["a bird", "the river", "rain falls on the river"] + ["river"] * 3)


@pytest.mark.parametrize("kind", ["encoder", "Dense module", "classifier", "float8"])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, kind):
    """After a training that diverged: the earlier files stay, and nothing is written that from_pretrained refuses."""
    if kind == "classifier":
        saved = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path))
        spoilt = saved.model.head.out_bias
    else:
        saved = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
        spoilt = saved.model.embeddings.word
    if kind == "Dense module":
        module = Dense(tiny.WIDTH, 4, rngs=nnx.Rngs(0))
        saved = SentenceEncoder(saved.model, tiny.bert_tokenizer(), max_seq_length=8, modules=[module])
        spoilt = module.kernel
    elif kind == "float8":
        config = tiny.config(hidden_size=128, intermediate_size=128)
        saved = BertModel(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        spoilt = saved.layers[0].ffn_in_kernel
    spoilt.set_value(spoilt[...].at[0].set(jnp.nan))
    saved = quantize(saved) if kind == "float8" else saved
    before = names(tmp_path)
    with pytest.raises(ValueError, match=r"safetensors is not written: the tensor '.*' has NaN or infinite values"):
        saved.save_pretrained(tmp_path)
    assert names(tmp_path) == before


def test_overflow_of_float16_is_named(tmp_path):
    tiny.write_sentence_model(tmp_path)
    change_weights(tmp_path, "encoder.layer.0.intermediate.dense.weight", lambda x: 6e4 * np.sign(x))
    encoder = SentenceEncoder.from_pretrained(tmp_path, dtype=jnp.float16, implementation="xla")
    with pytest.raises(TextError, match=r"texts\[0\] .* numbers overflow in float16; bfloat16 and float32 have"):
        encoder.encode(TEXTS)


@PACKED
def test_score_that_is_not_finite_is_refused(tmp_path, packed):
    encoder = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path), packed=packed)
    encoder.model.head.out_bias.set_value(jnp.full(1, jnp.inf))
    reason = r"texts\[0\] \(\('a', 'bird'\)\) .* not finite: the model's parameter head.out_bias"
    with pytest.raises(ValueError, match=reason):
        encoder.predict([("a", "bird")])
    with pytest.raises(ValueError, match=reason):
        encoder.rank("a", ["bird"])


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_cli_writes_nothing_that_is_not_finite(tmp_path, capsys, name):
    tiny.write_sentence_model(tmp_path / "m")
    change_weights(tmp_path / "m", "encoder.layer.0.intermediate.dense.weight", lambda x: 1e38 * np.sign(x))
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    model = ["--model", str(tmp_path / "m"), str(tmp_path / "in.txt")]
    assert cli.main(["encode", *model, "-o", str(tmp_path / name)]) == 2
    assert "in.txt, line 1: 'a bird sings' has a result that is not finite: numbers overflow" in capsys.readouterr().err
    assert not (tmp_path / name).exists()
    (tmp_path / "in.txt").write_text("\n \n" + TEXTS[0])
    assert cli.main(["similar", *model, "bird"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "the query 'bird' has a result that is not finite" in captured.err


def test_cli_names_what_cannot_be_tokenised(tmp_path, capsys):
    tiny.write_sentence_model(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    without_unk(tokenizer)
    change_tokenizer(tmp_path, **tokenizer)
    (tmp_path / "in.txt").write_text("\nrain\n")
    assert cli.main(["similar", "--model", str(tmp_path), str(tmp_path / "in.txt"), "bird \u4e2d"]) == 2
    assert "jaxft: error: the query 'bird \u4e2d' cannot be tokenised: " in capsys.readouterr().err
    (tmp_path / "in.txt").write_text("\n \nrain \u4e2d\n")
    assert cli.main(["similar", "--model", str(tmp_path), str(tmp_path / "in.txt"), "bird"]) == 2
    assert "in.txt, line 3: 'rain \u4e2d' cannot be tokenised: " in capsys.readouterr().err


@pytest.mark.parametrize("field", ["NaN", "-Infinity", "1e999", '[{"b": NaN}]'])
def test_cli_refuses_numbers_that_are_not_finite(tmp_path, capsys, field):
    (tmp_path / "in.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "b", "score": {field}}}\n')
    arguments = ["--model", str(tmp_path), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert cli.main(["encode", *arguments]) == 2
    assert "in.jsonl, line 2: not valid JSON: the number" in capsys.readouterr().err


def test_json_writers_refuse_nan():
    root = Path(__file__).parent.parent
    for file in (f for folder in ("jaxft", "benchmarks", "examples") for f in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps"):
                assert "allow_nan=False" in ast.unparse(node), f"{file}:{node.lineno}"


# --- Errors of the tokenizers library ----------------------------------------------------------------------------

A_OR_B = {"a": 0, "b": 1}
BAD_TOKENIZERS = [
    ({"model": {"type": "BPE", "vocab": A_OR_B, "merges": [["a", "b"]]}, "added_tokens": [], "post_processor": None},
     "out of range"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}}, "precompiled_charsmap"),
    ({"model": {"type": "Unigram", "unk_id": 10**12, "vocab": [["a", -1.0]]}}, "UnkId"),
    ({"truncation": {"max_length": 2**70}}, "not a tokenizer of the tokenizers library"),
    ({"padding": {"strategy": {"Fixed": -1}}}, "not a tokenizer of the tokenizers library"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason"), BAD_TOKENIZERS)
def test_errors_of_the_tokenizers_library_name_the_file(tmp_path, fields, reason):
    tiny.write_sentence_model(tmp_path)
    change(tmp_path / "tokenizer.json", **fields)
    named = "tokenizer.json: not a tokenizer of the tokenizers library"
    refused(SentenceEncoder.from_pretrained, tmp_path, named, reason)


def test_bad_merges_are_named_in_short(tmp_path):
    fuzz_checkpoints.make(tmp_path, "cross, BPE")
    (tmp_path / "merges.txt").write_text("a" * 100_000 + " b\n")
    message = refused(CrossEncoder.from_pretrained, tmp_path, "vocab.json and merges.txt: not a vocabulary")
    assert len(message) < 1000


@pytest.mark.parametrize("field", ["in_features", "out_features"])
def test_long_values_are_shown_in_part(tmp_path, field):
    tiny.write_sentence_model(tmp_path)
    tiny.write_modules(tmp_path, *((tiny.TYPES + k, p) for k, p in (
        ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))))  # fmt: skip
    tiny.write_json(tmp_path / "2_Dense" / "config.json", {"in_features": tiny.WIDTH, "out_features": 4})
    change(tmp_path / "2_Dense" / "config.json", **{field: "x" * 900_000})
    assert len(refused(SentenceEncoder.from_pretrained, tmp_path, "2_Dense/config.json", field)) < 31_000


def without_unk(tokenizer):
    del tokenizer["model"]["vocab"]["[UNK]"]
    tokenizer["added_tokens"] = []


def with_slow_regex(tokenizer):
    pattern = {"Regex": "(([a-z ]+)+)+\\d"}
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("size", [2, 4], ids=["in a thread", "here"])  # texts of a chunk
@pytest.mark.parametrize(
    ("spoil", "text", "reason"),
    [(without_unk, "bird \u4e2d", "Missing \\[UNK\\]"), (with_slow_regex, "a" * 40 + "!", "retry-limit-in-match over")],
)
def test_text_that_cannot_be_tokenised_is_named(tmp_path, monkeypatch, spoil, text, reason, size):
    monkeypatch.setattr("jaxft.text.batching._CHUNKS", (size, size, size))
    tiny.write_classifier(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    spoil(tokenizer)
    change_tokenizer(tmp_path, **tokenizer)
    cross = CrossEncoder.from_pretrained(tmp_path)
    shown = rf"texts\[3\] \(\('a', '{text[:20]}.* cannot be tokenised: .*{reason}"
    with pytest.raises(ValueError, match=shown):
        cross.predict([("a", "bird"), ("a", "b"), ("a", "c"), ("a", text)])
    made = tokenizer_files.load(tokenizer_files.Settings(tmp_path))
    encoder = SentenceEncoder(cross.model.bert, made, max_seq_length=32, prompts={"q": "a "}, default_prompt_name="q")
    shown = rf"texts\[3\] \('{text[:20]}.* cannot be tokenised: .*{reason}"
    with pytest.raises(ValueError, match=shown):
        encoder.encode(["bird", "b", "c", text])
    assert len(encoder.tokenize(["bird", "b"])) == 2  # and others still can be


# --- Special files, JSON that is none, bombs ---------------------------------------------------------------------

FILES = [
    "config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer_config.json",
    "config_sentence_transformers.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
    "preprocessor_config.json",
]  # fmt: skip


def fifo(file):
    os.mkfifo(file)


def directory(file):
    file.mkdir()


def device(file):
    file.symlink_to("/dev/zero")


def looped(file):
    file.symlink_to(file.name)


def unix_socket(file):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(file.parent / "s"))
    (file.parent / "s").rename(file)


def sparse(file):
    with file.open("wb") as made:
        made.truncate(10**12)


@pytest.mark.parametrize("make", [fifo, directory, device, looped, unix_socket, sparse])
@pytest.mark.parametrize("name", [*FILES, "vocab.txt", WEIGHTS, WEIGHTS + ".index.json"])
def test_special_files_are_refused(tmp_path, monkeypatch, make, name):
    monkeypatch.chdir(tmp_path)  # a socket's name may have 108 characters
    folder = tiny.write_sentence_model(Path("m"))
    if name == "vocab.txt":
        (folder / "tokenizer.json").unlink()
    if name.endswith(".index.json"):
        (folder / WEIGHTS).unlink()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    refused(SentenceEncoder.from_pretrained, folder, Path(name).name)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux has these files")
@pytest.mark.parametrize("name", [*FILES, "vocab.txt", WEIGHTS, WEIGHTS + ".index.json"])
def test_files_of_the_kernel_are_refused(tmp_path, name):
    """They look regular and empty, but reading one of them may wait for ever or have no end."""
    tiny.write_sentence_model(tmp_path)
    if name == "vocab.txt":
        (tmp_path / "tokenizer.json").unlink()
    if name.endswith(".index.json"):
        (tmp_path / WEIGHTS).unlink()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/maps")
    refused(SentenceEncoder.from_pretrained, tmp_path, Path(name).name, "is not a regular file, but one of the kernel")


@pytest.mark.parametrize("name", [*FILES, WEIGHTS + ".index.json"])
@pytest.mark.parametrize(
    "content",
    [b'{"a": NaN}', b'{"a": 1e999}', b'{"a": -Infinity}', b'{"a": 1, "b": 2, "a": 1}', b'\xef\xbb\xbf{"a": 1}',
     b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1', b"",
     '{"a": 1}'.encode("utf-16")],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_json_is_strict(tmp_path, name, content):
    tiny.write_sentence_model(tmp_path)
    if name.endswith(".index.json"):
        (tmp_path / WEIGHTS).unlink()
    (tmp_path / name).write_bytes(content)
    refused(SentenceEncoder.from_pretrained, tmp_path, f"{name} is not valid JSON")


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def unigram(*tokens):
    return {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in tokens]}


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


WHITE_SPACE = {"type": "WhitespaceSplit"}
METASPACE = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "always", "split": False}


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("tokenizer.json", {"pre_tokenizer": split("[\\p{L}\\p{N}]" * 50_000)}, "characters of regular expressions"),
        ("tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [replace("a" * 10, Regex=".")] * 7}},
         "the normalizers may make a text more than 10000 times as long"),
        ("tokenizer.json", {"normalizer": replace("a" * 100_000, String="bird")}, "more than 10000 times as long"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [WHITE_SPACE, METASPACE] * 20}},
         "has 40 pre-tokenizers, at most 16"),
        ("tokenizer.json", {"model": unigram("a" * 900_000)}, "tokens of more than 1000 characters"),
        ("tokenizer.json", {"model": unigram(*(f"{i}" * 200 for i in range(1300)))}, "or of 24 on average"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean"] * 100_000}, "pooling mode 'mean', 'mean', "),
        ("modules.json", [{"type": "x", "path": "y"}] * 30_000, "module 'x' is not supported"),
        ("modules.json", [{"type": tiny.TYPES + "Transformer", "path": "../" * 300_000}],
         "must have a path inside the folder"),
        ("modules.json", [{"type": tiny.TYPES + kind, "path": "a" * 400_000} for kind in ("Transformer", "Pooling")],
         "the folder of module Transformer, "),
        ("modules.json", [{"type": tiny.TYPES + "Transformer", "path": "/etc"}],
         "must have a path inside the folder, got '/etc'"),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024"),
        ("config.json", {"vocab_size": 10**400}, "vocab_size must be an integer from 1 to 16777216"),
        ("sentence_bert_config.json", {"max_seq_length": 12.5}, "must be an integer of at least 1, got 12.5"),
    ],
)  # fmt: skip
def test_bombs_are_refused_at_once(tmp_path, file, fields, reason):
    tiny.write_sentence_model(tmp_path)
    old = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    tiny.write_json(tmp_path / file, fields if isinstance(fields, list) else old | fields)
    refused(SentenceEncoder.from_pretrained, tmp_path, reason)


MODULE, TOKENIZER, MAP = "sentence_bert_config.json", "tokenizer_config.json", "special_tokens_map.json"


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        *((MODULE, name, value) for name in ("max_seq_length", "query_length", "document_length")
          for value in (0, -1, 1.5, True, "5", 2)),
        *((file, name, value) for file in (TOKENIZER, MAP) for name in ("model_max_length", "max_len")
          for value in (0, -1, 1.5, True, "5", 2)),
        *((file, name, value) for file in (TOKENIZER, MAP) for name in ("cls_token", "mask_token", "eos_token")
          for value in (5, True, ["rain"], {"content": 5})),
        *((file, name, value) for file in (TOKENIZER, MAP) for name in ("extra_special_tokens", "do_lower_case")
          for value in (5, "rain")),
        (MAP, "additional_special_tokens", "rain"), (MAP, "truncation_side", "middle"), (MAP, "padding_side", "left"),
        (MAP, "model_input_names", ["input_ids"]), (MAP, "sep_token", None),
        ("config.json", "max_position_embeddings", 2),
    ],
)  # fmt: skip
def test_refused_value_names_file_and_field(tmp_path, file, field, value):
    tiny.write_sentence_model(tmp_path)
    if file == "config.json":
        tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
        tensors["embeddings.position_embeddings.weight"] = tensors["embeddings.position_embeddings.weight"][:2].copy()
        safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    old = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    tiny.write_json(tmp_path / file, old | {field: value})
    refused(SentenceEncoder.from_pretrained, tmp_path, f"{tmp_path / file}: ", field)


@pytest.mark.parametrize("value", [-1, 1.5, True, "0.5", None, 10**400])
def test_refused_dropout_of_a_module_names_the_field(tmp_path, value):
    fuzz_checkpoints.make(tmp_path, "sentence")
    file = next(tmp_path.glob("*_Dropout")) / "config.json"
    tiny.write_json(file, {"dropout": value})
    refused(SentenceEncoder.from_pretrained, tmp_path, f"{file}: Dropout: dropout must be ")


@pytest.mark.parametrize(
    ("field", "value"),
    [*((name, value) for name in ("query_length", "document_length") for value in (0, -1, 1.5, True, "5")),
     ("document_length", 2)],
)  # fmt: skip
def test_refused_length_of_pylate_names_its_file(tmp_path, field, value):
    folder = peer_models.write(tmp_path / "m", "colbert of pylate")
    file = folder / "config_sentence_transformers.json"
    change(file, **{field: value})
    refused(MultiVectorEncoder.from_pretrained, folder, f"{file}: ", field)


def test_class_in_special_tokens_map_has_no_effect(tmp_path):
    """transformers chooses the class before it reads this file."""
    expected = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path)).tokenize(TEXTS)
    tiny.write_json(tmp_path / MAP, {"tokenizer_class": "MPNetTokenizer"})
    assert SentenceEncoder.from_pretrained(tmp_path).tokenize(TEXTS) == expected


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "WordLevel"])
def test_huge_token_ids_are_refused_at_once(kind):
    """The tokenizers library takes a second to copy a tokenizer with an id of 10^8."""
    vocabulary = {"[UNK]": 0, "a": 2**31}
    options = {"merges": []} if kind == "BPE" else {"unk_token": "[UNK]"}
    model = getattr(models, kind)(vocab=vocabulary, **options)
    start = time.process_time()
    with pytest.raises(ValueError, match="the tokenizer has ids up to 2147483648, 'a', but the model's vocab_size is"):
        tokenizer_files.truncating(
            Tokenizer(model), 8, tiny.config(), owner="SentenceEncoder", argument="max_seq_length"
        )
    assert time.process_time() - start < 2


def test_many_labels_are_refused_at_once(tmp_path):
    tiny.write_classifier(tmp_path, id2label={str(i): "x" for i in range(150_000)})
    refused(CrossEncoder.from_pretrained, tmp_path, "'classifier.bias': has shape [1], expected [150000]")


def test_known_normalizers_are_no_bombs(tmp_path):
    tiny.write_sentence_model(tmp_path)
    known = [replace("\u2581", String=" "), replace(" ", Regex=" {2,}"), replace('"', String="``"), {"type": "NFKC"}]
    change(tmp_path / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": known * 3})
    SentenceEncoder.from_pretrained(tmp_path)


def test_random_damage_gives_documented_errors_only(tmp_path):
    """A sample of `make test-fuzz`."""
    for case in range(100):
        fuzz_checkpoints.run(case, tmp_path / str(case), compute=False)
