"""Encoders of texts and of pairs for each model type, and folders whose tokenizer only transformers can build."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

import tiny
import tokenizer_folders
from jaxft import CrossEncoder, SentenceEncoder
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertConfig, BertModel
from jaxft.models.classification import BertForSequenceClassification
from jaxft.text import tokenizer as tokenizer_files

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 20, "initializer_range": 0.2}  # fmt: skip
DEBERTA = {"relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p", "share_att_key": True,
           "norm_rel_ebd": "layer_norm", "position_biased_input": False}  # fmt: skip
JINA = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
# Fields of config.json, the tokenizer and its class in the checkpoints of a type, and the number of token types.
KINDS = {
    "mpnet": ({}, tokenizer_folders.word_piece(tokenizer_folders.MPNET), "MPNetTokenizer", 0),
    "modernbert": ({"local_attention": 6}, tokenizer_folders.byte_level(), "PreTrainedTokenizerFast", 0),
    "nomic_bert": ({}, tokenizer_folders.word_piece(), "BertTokenizer", 2),
    "new": (
        {"type_vocab_size": 0, "rope_scaling": {"type": "ntk", "factor": 2.0}},
        tokenizer_folders.word_piece(),
        "BertTokenizer",
        0,
    ),
    "gte": ({"type_vocab_size": 1}, tokenizer_folders.unigram(), "XLMRobertaTokenizerFast", 1),
    "jina_embeddings_v3": ({}, tokenizer_folders.unigram(), "XLMRobertaTokenizer", 1),
    "bert": (JINA, tokenizer_folders.word_piece(), "BertTokenizer", 2),
    "deberta-v2": (DEBERTA, tokenizer_folders.deberta(), "DebertaV2Tokenizer", 0),
    "electra": ({"embedding_size": 8}, tokenizer_folders.word_piece(), "ElectraTokenizer", 2),
    "ernie": ({"task_type_vocab_size": 3}, tokenizer_folders.word_piece(), "BertTokenizer", 2),
    "data2vec-text": ({"type_vocab_size": 1}, tokenizer_folders.byte_level(), "RobertaTokenizer", 1),
    "albert": ({"embedding_size": 8}, tokenizer_folders.albert(), "AlbertTokenizer", 2),
}
TEXTS = ["the cat sat", "the cat, a cat and the cat", "cat", "the cat sat " * 30]
PAIRS = [("the cat", "a cat sat"), ("cat", "the"), ("the cat sat " * 9, "cat " * 20)]


def write(folder, kind, task=BertModel, longest=512, **options):
    """Writes the folder of a checkpoint, with its tokenizer."""
    fields, tokenizer, name, _ = KINDS[kind]
    config = BertConfig.from_dict({"model_type": kind, "pad_token_id": 1} | SIZES | fields)
    task(config, rngs=nnx.Rngs(0), **options).save_pretrained(folder)
    settings = {"tokenizer_class": name, "model_max_length": longest}
    if name.startswith("PreTrained"):  # the class has no defaults
        settings["pad_token"] = "<pad>"
    tokenizer_folders.write(folder, {"tokenizer.json": tokenizer, "tokenizer_config.json": settings})
    return folder


def every(quick):
    """Returns all kinds. `make test` has every other one, beginning with the first or the second."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (i % 2 != quick)) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize("kind", every(0))
def test_padded_and_packed_embeddings(tmp_path, kind):
    write(tmp_path, kind)
    padded, packed = (SentenceEncoder.from_pretrained(tmp_path, packed=packed) for packed in (False, True))
    assert padded.max_seq_length == {"mpnet": 18, "data2vec-text": 18}.get(
        kind, 20
    )  # the model's positions are fewer than 512
    assert [*map(len, padded.tokenize(TEXTS))][3] == padded.max_seq_length
    found = padded.encode(TEXTS)
    np.testing.assert_allclose(packed.encode(TEXTS), found, rtol=0, atol=3e-6 * np.abs(found).max())
    distances = np.linalg.norm(found[:, None] - found[None], axis=-1) + 9 * np.eye(len(TEXTS))
    assert distances.min() > 0.1


@pytest.mark.parametrize("kind", every(1))
def test_padded_and_packed_scores(tmp_path, kind):
    write(tmp_path, kind, BertForSequenceClassification, num_labels=1)
    padded, packed = (CrossEncoder.from_pretrained(tmp_path, packed=packed) for packed in (False, True))
    found = padded.predict(PAIRS, activation_fn=lambda x: x)
    again = packed.predict(PAIRS, activation_fn=lambda x: x)
    np.testing.assert_allclose(again, found, rtol=0, atol=3e-6 * max(1, np.abs(found).max()))
    # Token types reach the model if it has more than one of them and the tokenizer's class gives them.
    assert padded._pairs.batcher.with_types == (KINDS[kind][3] > 1 and kind != "albert")
    assert padded.model.config.type_vocab_size == KINDS[kind][3]


@pytest.fixture
def transformers(monkeypatch):
    """Stands in for transformers, and returns the calls of AutoTokenizer."""
    calls = []

    def from_pretrained(folder, **options):
        calls.append((folder, options))
        names = ["input_ids", "token_type_ids", "attention_mask"]
        return SimpleNamespace(
            backend_tokenizer=tokenizer_folders.ends(tokenizer_folders.deberta(), "[CLS]", "[SEP]", (1, 2)),
            model_input_names=names, special_tokens_map={"cls_token": "[CLS]", "sep_token": "[SEP]"},
        )  # fmt: skip

    module = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    for name, found in {"transformers": module, "sentencepiece": 1, "google": 1, "google.protobuf": 1}.items():
        monkeypatch.setitem(sys.modules, name, found)
    return calls


# Model type, fields of tokenizer_config.json and files without which jaxft cannot build the tokenizer.
FOREIGN = {
    "spm.model": ("deberta-v2", {}, ["spm.model"]),
    "spiece.model": ("albert", {}, ["spiece.model"]),
    "sentencepiece.bpe.model": ("xlm-roberta", {}, ["sentencepiece.bpe.model"]),
    "vocab.json": ("bert", {"tokenizer_class": "BertTokenizer"}, ["vocab.json", "merges.txt"]),
    "T5Tokenizer": ("bert", {"tokenizer_class": "T5Tokenizer"}, ["tokenizer.json"]),
}


def write_foreign(folder, case):
    kind, settings, files = FOREIGN[case]
    contents = {name: tokenizer_folders.deberta() if name == "tokenizer.json" else "x" for name in files}
    tokenizer_folders.write(folder, {"config.json": {"model_type": kind}, "tokenizer_config.json": settings} | contents)
    return tokenizer_files.Settings(folder)


@pytest.mark.parametrize("case", FOREIGN)
def test_transformers_loads_what_jaxft_cannot_build(tmp_path, transformers, case):
    settings = write_foreign(tmp_path, case)
    found = tokenizer_files.load(settings)
    assert transformers == [(tmp_path, {"trust_remote_code": False, "local_files_only": True})]
    assert found.encode("the cat").ids == [1, 7, 5, 2, 2]
    assert settings.token_types and settings.content("cls_token") == "[CLS]"


@pytest.mark.parametrize("case", FOREIGN)
def test_missing_extra_is_named(tmp_path, transformers, monkeypatch, case):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    settings = write_foreign(tmp_path, case)
    with pytest.raises(CheckpointError, match=rf"{case}.*The extra jaxft\[hf\] .*, but is not installed"):
        tokenizer_files.load(settings)
    assert not transformers


def test_tokenizers_of_transformers_that_do_not_fit(tmp_path, transformers, monkeypatch):
    def fail(folder, **_):
        raise OSError("no such vocabulary")

    settings = write_foreign(tmp_path, "spm.model")
    monkeypatch.setattr(sys.modules["transformers"].AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    with pytest.raises(CheckpointError, match="transformers' object runs in Python only"):
        tokenizer_files.load(settings)
    monkeypatch.setattr(sys.modules["transformers"].AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match="transformers refuses this one: no such vocabulary"):
        tokenizer_files.load(settings)


def test_transformers_is_not_asked_without_need(tmp_path, transformers):
    write(tmp_path, "deberta-v2")
    (tmp_path / "spm.model").write_text("x")
    tokenizer_files.load(tokenizer_files.Settings(tmp_path))
    assert not transformers


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("deberta-v2", {"unk_id": "three", "unk_token": "cat"}, "unk_id must be the id of a token, got 'three'"),
        ("deberta-v2", {"unk_id": 99, "unk_token": "cat"}, "the tokenizer's files do not fit together"),
        ("deberta-v2", {"split_by_punct": "yes"}, "split_by_punct must be true, false or null, got 'yes'"),
        ("albert", {"keep_accents": 1.5}, "keep_accents must be true, false or null, got 1.5"),
        ("albert", {"cls_token": None}, "cls_token must be a token, got None"),
        ("mpnet", {"tokenizer_class": "DebertaV2Tokenizer"}, "needs a Unigram vocabulary, got WordPiece"),
        ("albert", {"tokenizer_class": "MPNetTokenizer"}, "needs a WordPiece vocabulary, got Unigram"),
    ],
)
def test_wrong_settings_are_named(tmp_path, kind, settings, message):
    write(tmp_path, kind)
    tiny.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": KINDS[kind][2]} | settings)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files.load(tokenizer_files.Settings(tmp_path))


def test_incomplete_vocabulary_of_mpnet_is_named(tmp_path):
    words = "\n".join(word for word in tokenizer_folders.MPNET if word != "</s>")
    tokenizer_folders.write(tmp_path, {"config.json": json.dumps({"model_type": "mpnet"}), "vocab.txt": words})
    with pytest.raises(CheckpointError, match="vocab.txt: not a vocabulary of MPNetTokenizer: </s> missing"):
        tokenizer_files.load(tokenizer_files.Settings(tmp_path))
