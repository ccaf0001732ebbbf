"""save_pretrained of SentenceEncoder and CrossEncoder: files, round trips, model cards, saves over earlier ones."""

import json
import logging
import os
import re
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from tokenizers import AddedToken

import tiny
import tokenizer_folders
from cases import slow
from jaxft import CrossEncoder, SentenceEncoder, atomic
from jaxft.checkpoint import tensors
from jaxft.models.bert import BertModel
from jaxft.models.classification import BertForSequenceClassification
from jaxft.models.embedding import Dense, Dropout, EmbeddingModel, LayerNorm, Normalize
from jaxft.text import cross_encoder
from jaxft.text import tokenizer as tokenizer_files

TEXTS = ["a bird sings", "the old tree in the rain .", "rain", "the river " * 30]
PAIRS = [("a bird sings", "in the old tree ."), ("rain", "the old river"), ("the river " * 30, "rain falls")]
ROOT_FILES = ["README.md", "config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json",
              "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"]  # fmt: skip


def bert(**options):
    return BertModel(tiny.config(**options), rngs=nnx.Rngs(0))


def dense(*sizes, seed=1, **options):
    return Dense(*sizes, **options, rngs=nnx.Rngs(seed))


def embedder(**options):
    """Returns a SentenceEncoder of two pooling modes and one module of each kind."""
    norm = LayerNorm(8)
    norm.gamma.set_value(jnp.linspace(0.5, 2, 8))
    modules = [
        dense(2 * tiny.WIDTH, 8, activation="GELU"), norm, Dropout(0.3), dense(8, 8, bias=False, activation="Identity"),
        dense(8, 6, seed=2, use_residual=True), Normalize(),
    ]  # fmt: skip
    arguments = {
        "max_seq_length": 16, "pooling": ("cls", "max"), "modules": modules, "truncate_dim": 5,
        "prompts": {"query": "rain ", "old": "the old "}, "default_prompt_name": "old", "similarity_fn_name": "dot",
    }  # fmt: skip
    return SentenceEncoder(bert(), tiny.bert_tokenizer(), **arguments | options)


def scorer(labels=1, **options):
    """Returns a CrossEncoder of a classifier."""
    model = BertForSequenceClassification(tiny.config(), num_labels=labels, rngs=nnx.Rngs(0))
    return CrossEncoder(model, tiny.bert_tokenizer(), **{"max_length": 16} | options)


def modular_scorer(labels=1, **options):
    """Returns a CrossEncoder of an encoder, pooling and dense layers."""
    modules = [dense(tiny.WIDTH, 8), dense(8, labels, seed=2, activation="Identity")]
    model = EmbeddingModel(bert(), modules=modules, include_prompt=False)
    return CrossEncoder(model, tiny.bert_tokenizer(), **{"max_length": 16} | options)


def read(folder, name):
    return json.loads((folder / name).read_text())


def content(folder):
    """Returns the bytes of all files below a folder by their path, and its folders."""
    return {str(file.relative_to(folder)): file.read_bytes() if file.is_file() else None for file in folder.rglob("*")}


def numbers(encoder):
    """Returns what an encoder computes in various ways."""
    if isinstance(encoder, SentenceEncoder):
        found = [encoder.encode(TEXTS), encoder.encode_query(TEXTS), encoder.encode(TEXTS, prompt="")]
        return [*found, encoder.similarity(found[0], found[1])]
    prompted = [encoder.predict(PAIRS, prompt_name=name) for name in sorted(encoder.prompts)]
    return [encoder.predict(PAIRS), encoder.predict(PAIRS, activation_fn=lambda x: x, prompt="a "), *prompted]


def train(encoder):
    """Changes all parameters, as training does."""
    model = encoder.embedder if isinstance(encoder, SentenceEncoder) else encoder.model
    nnx.update(model, jax.tree.map(lambda x: x * 1.25 + 0.01, nnx.state(model, nnx.Param)))


def assert_same(actual, expected):
    for one, other in zip(numbers(actual), numbers(expected), strict=True):
        np.testing.assert_array_equal(one, other)


# --- Round trips -------------------------------------------------------------------------------------------------

ENCODERS = {
    "modules": embedder,
    "no modules": lambda: embedder(modules=(), truncate_dim=None, default_prompt_name=None, prompts=None),
    "other order": lambda: embedder(pooling=("max", "cls"), similarity_fn_name="euclidean"),
    "no prompt pooled": lambda: embedder(pooling=("weightedmean", "lasttoken"), include_prompt=False),
    "token modules": lambda: embedder(
        pooling="mean", modules=[Normalize()], token_modules=[dense(tiny.WIDTH, 12), Normalize()]
    ),
    "scorer": lambda: scorer(prompts={"q": "rain "}, default_prompt_name="q"),
    "labels": lambda: scorer(3, activation_fn=cross_encoder.ACTIVATIONS["Softmax"]),
    "modular scorer": lambda: modular_scorer(prompts={"q": "rain falls ", "": ""}, default_prompt_name="q"),
    "modular labels": lambda: modular_scorer(3, activation_fn=cross_encoder.ACTIVATIONS["ELU"]),
}


QUICK = ("modules", "modular scorer")


def test_integers_of_numpy_are_saved(tmp_path):
    encoder = SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path / "a"), truncate_dim=np.int64(5))
    encoder.max_seq_length = np.uint8(9)
    encoder.save_pretrained(tmp_path / "b")
    loaded = SentenceEncoder.from_pretrained(tmp_path / "b")
    assert (loaded.truncate_dim, loaded.max_seq_length) == (5, 9)


@pytest.mark.parametrize("kind", [*QUICK, *slow(*(kind for kind in ENCODERS if kind not in QUICK))])
def test_saved_folder_gives_the_same_numbers(tmp_path, kind):
    encoder = ENCODERS[kind]()
    encoder.save_pretrained(tmp_path / "new" / "one")
    loaded = type(encoder).from_pretrained(tmp_path / "new" / "one")
    assert loaded.max_seq_length == encoder.max_seq_length
    assert (loaded.prompts, loaded.default_prompt_name) == (encoder.prompts, encoder.default_prompt_name)
    assert_same(loaded, encoder)
    train(loaded)
    assert np.abs(numbers(loaded)[0] - numbers(encoder)[0]).max() > 1e-4
    loaded.max_seq_length = 9
    loaded.save_pretrained(str(tmp_path / "two"))
    again = type(encoder).from_pretrained(tmp_path / "two")
    assert again.max_seq_length == 9
    assert_same(again, loaded)
    loaded.save_pretrained(tmp_path / "new" / "one")  # over the folder that it was loaded from
    assert content(tmp_path / "new" / "one") == content(tmp_path / "two")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_keep_the_dtype_of_the_parameters(tmp_path, dtype):
    embedder().save_pretrained(tmp_path / "a")
    encoder = SentenceEncoder.from_pretrained(tmp_path / "a", dtype=dtype)
    encoder.save_pretrained(tmp_path / "b")
    weights = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    assert {str(value.dtype) for value in weights.values()} == {dtype}
    for part, parameter in (("linear.weight", encoder.embedder.modules[0].kernel),):
        saved = safetensors.numpy.load_file(tmp_path / "b" / "2_Dense" / "model.safetensors")[part]
        assert saved.dtype == parameter.dtype
    assert_same(SentenceEncoder.from_pretrained(tmp_path / "b", dtype=dtype), encoder)


# --- Files -------------------------------------------------------------------------------------------------------


def test_files_of_an_embedder(tmp_path):
    encoder = embedder()
    encoder.save_pretrained(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Dense", "Dense", "Normalize"]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    assert read(tmp_path, "modules.json") == [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    with_weights = {"2_Dense", "3_LayerNorm", "5_Dense", "6_Dense"}
    assert {name for name, data in content(tmp_path).items() if data is not None} == {
        *ROOT_FILES, *(f"{path}/config.json" for path in paths[1:]),
        *(f"{path}/model.safetensors" for path in with_weights),
    }  # fmt: skip
    family = read(tmp_path, "config_sentence_transformers.json")
    assert family.pop("__version__").keys() == {"jaxft"}
    assert family == {
        "model_type": "SentenceTransformer", "truncate_dim": 5, "similarity_fn_name": "dot",
        "prompts": {"query": "rain ", "document": "", "old": "the old "}, "default_prompt_name": "old",
    }  # fmt: skip
    assert read(tmp_path, "sentence_bert_config.json") == {"max_seq_length": 16, "do_lower_case": False}
    pooling = read(tmp_path, "1_Pooling/config.json")
    assert pooling.pop("word_embedding_dimension") == tiny.WIDTH and pooling.pop("include_prompt") is True
    assert {name for name, flag in pooling.items() if flag} == {"pooling_mode_cls_token", "pooling_mode_max_tokens"}
    assert read(tmp_path, "2_Dense/config.json") == {
        "in_features": 2 * tiny.WIDTH, "out_features": 8, "bias": True,
        "activation_function": "torch.nn.modules.activation.GELU",
    }  # fmt: skip
    assert read(tmp_path, "5_Dense/config.json")["activation_function"] == "torch.nn.modules.linear.Identity"
    assert read(tmp_path, "6_Dense/config.json")["use_residual"] is True
    assert read(tmp_path, "3_LayerNorm/config.json") == {"dimension": 8}
    assert read(tmp_path, "4_Dropout/config.json") == {"dropout": 0.3}
    first, *_, last, _ = encoder.embedder.modules
    saved = safetensors.numpy.load_file(tmp_path / "2_Dense" / "model.safetensors")
    np.testing.assert_array_equal(saved["linear.weight"], first.kernel[...].T)
    np.testing.assert_array_equal(saved["linear.bias"], first.bias[...])
    saved = safetensors.numpy.load_file(tmp_path / "6_Dense" / "model.safetensors")
    np.testing.assert_array_equal(saved["residual.weight"], last.residual_kernel[...].T)
    saved = safetensors.numpy.load_file(tmp_path / "3_LayerNorm" / "model.safetensors")
    np.testing.assert_array_equal(saved["norm.weight"], jnp.linspace(0.5, 2, 8))


def test_files_of_token_modules(tmp_path):
    ENCODERS["token modules"]().save_pretrained(tmp_path)
    assert [read(tmp_path, f"{name}/config.json")["module_input_name"] for name in ("1_Dense", "2_Normalize")] == [
        "token_embeddings"
    ] * 2
    assert read(tmp_path, "3_Pooling/config.json")["word_embedding_dimension"] == 12


def test_pooling_modes_keep_their_order(tmp_path):
    embedder(pooling=("max", "cls"), modules=()).save_pretrained(tmp_path)
    expected = {"embedding_dimension": tiny.WIDTH, "pooling_mode": ["max", "cls"], "include_prompt": True}
    assert read(tmp_path, "1_Pooling/config.json") == expected
    assert SentenceEncoder.from_pretrained(tmp_path).embedder.pooling == ("max", "cls")


def test_files_of_a_classifier(tmp_path):
    names = ["no", "maybe", "yes"]
    model = BertForSequenceClassification(tiny.config(), id2label=names, rngs=nnx.Rngs(0))
    encoder = CrossEncoder(model, tiny.bert_tokenizer(), max_length=30, activation_fn=jnp.tanh)
    encoder.save_pretrained(tmp_path)
    assert sorted(content(tmp_path)) == ROOT_FILES
    assert [entry["type"] for entry in read(tmp_path, "modules.json")] == ["sentence_transformers.models.Transformer"]
    family, tanh = read(tmp_path, "config_sentence_transformers.json"), "torch.nn.modules.activation.Tanh"
    assert (family["model_type"], family["activation_fn"]) == ("CrossEncoder", tanh)
    assert read(tmp_path, "sentence_bert_config.json")["transformer_task"] == "sequence-classification"
    config = read(tmp_path, "config.json")
    assert config["id2label"] == {"0": "no", "1": "maybe", "2": "yes"}
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["sentence_transformers"] == {"activation_fn": tanh}  # what older versions read
    assert CrossEncoder.from_pretrained(tmp_path).model.id2label == dict(enumerate(names))


def test_a_new_activation_replaces_the_loaded_one(tmp_path):
    older = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    folder = tiny.write_classifier(tmp_path / "a", **older)
    encoder = CrossEncoder.from_pretrained(folder, activation_fn=cross_encoder.ACTIVATIONS["Identity"])
    encoder.save_pretrained(tmp_path / "b")
    assert "sbert_ce_default_activation_function" not in read(tmp_path / "b", "config.json")
    assert_same(CrossEncoder.from_pretrained(tmp_path / "b"), encoder)
    (tmp_path / "b" / "modules.json").unlink()  # as older versions read it
    assert_same(CrossEncoder.from_pretrained(tmp_path / "b"), encoder)


def test_last_module_of_a_scorer_gives_the_scores(tmp_path):
    modular_scorer().save_pretrained(tmp_path)
    assert "module_output_name" not in read(tmp_path, "2_Dense/config.json")
    assert read(tmp_path, "3_Dense/config.json")["module_output_name"] == "scores"
    assert "transformer_task" not in read(tmp_path, "sentence_bert_config.json")


def test_lengths_of_queries_and_documents_are_kept(tmp_path):
    embedder(default_prompt_name=None, prompts=None).save_pretrained(tmp_path / "a")
    settings = {"max_seq_length": 16, "query_length": 5, "document_length": 9}
    tiny.write_json(tmp_path / "a" / "sentence_bert_config.json", settings)
    encoder = SentenceEncoder.from_pretrained(tmp_path / "a")
    encoder.save_pretrained(tmp_path / "b")
    assert settings.items() <= read(tmp_path / "b", "sentence_bert_config.json").items()
    assert_same(SentenceEncoder.from_pretrained(tmp_path / "b"), encoder)


@pytest.mark.parametrize("name", [
    "options 0, tokenizer.json", "options 8, vocab.txt", "options 4, tokenizer.json", "roberta", "xlm-roberta, added",
    "camembert, added", "added, special, vocab.txt",
])  # fmt: skip
def test_saved_tokenizer_gives_the_ids_of_transformers(tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    settings = tokenizer_files.Settings(tokenizer_folders.write(tmp_path / "a", tokenizer_folders.FOLDERS[name]))
    special = {token: value.content for token, value in settings.named_tokens().items()}
    tokenizer = tokenizer_files.load(settings)
    tensors.write(tmp_path / "b", tokenizer_files.files(tokenizer, special, settings.token_types, settings.max_length))
    saved = tokenizer_files.Settings(tmp_path / "b")
    assert (saved.max_length, saved.token_types) == (settings.max_length, settings.token_types)
    assert {token: value.content for token, value in saved.named_tokens().items()} == special
    again = tokenizer_files.load(saved)
    again.enable_truncation(min(saved.max_length or 64, 64), direction=saved.side("truncation_side", None))
    expected = json.loads(tokenizer_folders.DATA.read_text())[name][: len(tokenizer_folders.TEXTS)]
    assert [again.encode(text).ids for text in tokenizer_folders.TEXTS] == expected


def test_tokenizer_without_settings_names_the_padding_token(tmp_path):
    """transformers needs it to pad a batch."""
    embedder().save_pretrained(tmp_path)
    settings = read(tmp_path, "tokenizer_config.json")
    assert settings["pad_token"] == "[PAD]" and settings["model_max_length"] == 16
    tokenizer = tiny.bert_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True)])
    tiny.write_sentence_model(tmp_path / "a")
    SentenceEncoder.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    named = read(tmp_path / "b", "tokenizer_config.json")
    assert (named["mask_token"], named["cls_token"], named["pad_token"]) == ("[MASK]", "[CLS]", "[PAD]")


def test_padding_token_is_named_by_the_folder(tmp_path):
    tiny.write_sentence_model(tmp_path / "a")
    tiny.write_json(tmp_path / "a" / "tokenizer_config.json", {"pad_token": "[UNK]"})
    SentenceEncoder.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert read(tmp_path / "b", "tokenizer_config.json")["pad_token"] == "[UNK]"


def test_padding_without_a_token_is_not_named(tmp_path):
    tokenizer = tiny.bert_tokenizer()
    config = tiny.config(vocab_size=tokenizer.get_vocab_size() + 1, pad_token_id=tokenizer.get_vocab_size())
    SentenceEncoder(BertModel(config, rngs=nnx.Rngs(0)), tokenizer, max_seq_length=16).save_pretrained(tmp_path)
    assert "pad_token" not in read(tmp_path, "tokenizer_config.json")


# --- Earlier saves -----------------------------------------------------------------------------------------------


def test_save_over_another_model_leaves_nothing_of_it(tmp_path):
    embedder().save_pretrained(tmp_path / "a")
    stale = {
        "added_tokens.json": {"rain": 7}, "special_tokens_map.json": {"additional_special_tokens": ["the"]},
        "adapter_config.json": {"peft_type": "LORA"}, "2_Dense/pytorch_model.bin": {}, "processor_config.json": {},
        "preprocessor_config.json": {}, "model_float8.safetensors": {},
    }  # fmt: skip
    own = {"notes.txt": {}, "onnx/config.json": {}, "3_LayerNorm/notes.txt": {}, "checkpoints/1/config.json": {}}
    for name, value in (stale | own).items():
        tiny.write_json(tmp_path / "a" / name, value)
    encoder = embedder(pooling="mean", modules=[Normalize()], truncate_dim=None)
    for folder in "ab":
        encoder.save_pretrained(tmp_path / folder)
    expected = content(tmp_path / "b")
    for name in own:
        expected |= {name: b"{}"} | {str(parent): None for parent in Path(name).parents if str(parent) != "."}
    assert content(tmp_path / "a") == expected
    assert_same(SentenceEncoder.from_pretrained(tmp_path / "a"), encoder)


def test_scorer_over_an_embedder_and_back(tmp_path):
    for make in (embedder, scorer, embedder, modular_scorer, scorer, modular_scorer):
        encoder = make()
        encoder.save_pretrained(tmp_path)
        assert_same(type(encoder).from_pretrained(tmp_path), encoder)


@pytest.mark.parametrize(
    "modules", ["{", "[3]", '{"a": 1}', '[{"path": "../2_Dense"}, {"path": 3}, {"path": "/1_Dense"}]']
)
def test_strange_files_of_an_earlier_save_do_no_harm(tmp_path, modules):
    tiny.write_json(tmp_path / "2_Dense" / "config.json", {})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "modules.json").write_text(modules)
    encoder = scorer()
    encoder.save_pretrained(tmp_path / "a")
    assert (tmp_path / "2_Dense" / "config.json").exists()
    assert sorted(content(tmp_path / "a")) == ROOT_FILES


@pytest.mark.parametrize("name", ["README.md", "2_Dense/model.safetensors", "model.safetensors", "config.json"])
def test_failed_save_changes_nothing(tmp_path, monkeypatch, name):
    embedder(modules=[Normalize()], pooling="mean").save_pretrained(tmp_path)
    tiny.write_json(tmp_path / "added_tokens.json", {"rain": 7})
    before, replace, new, failed = content(tmp_path), os.replace, embedder(), []

    def interrupted(source, target):
        if Path(target) == tmp_path / name and not failed:
            failed.append(name)
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(tmp_path)
    assert content(tmp_path) == before
    new.save_pretrained(tmp_path)
    assert_same(SentenceEncoder.from_pretrained(tmp_path), new)


def test_wrong_places(tmp_path):
    (tmp_path / "file").touch()
    for make in (embedder, scorer):
        with pytest.raises(TypeError, match="save_pretrained: safe_serialization is .* always saved as safetensors"):
            make().save_pretrained(tmp_path, safe_serialization=True)
        with pytest.raises(TypeError, match="save_pretrained: folder must be a string or path, got int"):
            make().save_pretrained(3)
        with pytest.raises(NotADirectoryError, match="save_pretrained: folder must not be a file"):
            make().save_pretrained(tmp_path / "file")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1_Pooling").touch()
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/a/"):
        embedder().save_pretrained(tmp_path / "a")
    assert [*content(tmp_path / "a")] == ["1_Pooling"]


def test_activation_must_have_a_name(tmp_path):
    with pytest.raises(
        ValueError, match="save_pretrained: activation_fn must be a function that files can name, got <f"
    ):
        scorer(activation_fn=lambda x: x).save_pretrained(tmp_path)
    assert not content(tmp_path)


# --- Model cards -------------------------------------------------------------------------------------------------


def card_of(folder):
    return huggingface_hub.RepoCard.load(folder / "README.md")


def test_card_keeps_licence_and_base_model(tmp_path):
    tiny.write_sentence_model(tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text(
        "---\nlicense: other\nlicense_name: some-licence\nlicense_link: LICENSE\nbase_model:\n- owner/first\n"
        "- owner/second\nbase_model_relation: finetune\nlanguage: [en, de]\n"
        "tags:\n- mteb\nmodel-index:\n- name: x\n  results: []\npipeline_tag: x\n"
        "---\n\n# The old text\n"
    )
    kept = {
        "license": "other", "license_name": "some-licence", "license_link": "LICENSE",
        "base_model": ["owner/first", "owner/second"], "base_model_relation": "finetune", "language": ["en", "de"],
    }  # fmt: skip
    for source, target in ("ab", "bc"):
        SentenceEncoder.from_pretrained(tmp_path / source).save_pretrained(tmp_path / target)
        assert card_of(tmp_path / target).data.to_dict() == kept | {
            "library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity",
            "tags": ["sentence-transformers", "sentence-similarity", "feature-extraction", "jaxft"],
        }  # fmt: skip
        assert "https://huggingface.co/owner/second" in card_of(tmp_path / target).text


def test_card_names_the_loaded_model(tmp_path, monkeypatch):
    tiny.write_classifier(tmp_path / "a")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "a"))
    CrossEncoder.from_pretrained("owner/scorer").save_pretrained(tmp_path / "b")
    data = card_of(tmp_path / "b").data.to_dict()
    assert data == {
        "base_model": "owner/scorer", "library_name": "sentence-transformers", "pipeline_tag": "text-ranking",
        "tags": ["sentence-transformers", "cross-encoder", "reranker", "jaxft"],
    }  # fmt: skip
    (tmp_path / "a" / "README.md").write_text("---\nbase_model: owner/base\nlicense: mit\n---\n")
    CrossEncoder.from_pretrained("owner/scorer").save_pretrained(tmp_path / "b")
    assert {"base_model": "owner/base", "license": "mit"}.items() <= card_of(tmp_path / "b").data.to_dict().items()


@pytest.mark.parametrize(
    "card",
    ["---\n[\n---\n", "---\n- a\n---\n", "no metadata", "", "---\nlicense: [1, 2]\nbase_model: {a: 1}\n---\n", b"\xff",
     "---\nlicense: []\nbase_model: ''\nlanguage: [en, '']\n---\n"],
)  # fmt: skip
def test_cards_without_metadata_do_not_matter(tmp_path, card, caplog):
    tiny.write_sentence_model(tmp_path / "a")
    (tmp_path / "a" / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    with caplog.at_level(logging.WARNING, "jaxft"):
        SentenceEncoder.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert card_of(tmp_path / "b").data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    assert ("not kept" in caplog.text) == (card in ("---\n[\n---\n", "---\n- a\n---\n", b"\xff"))


@pytest.mark.parametrize(("kind", "task"), [
    ("modules", "sentence-similarity"), ("scorer", "text-ranking"), ("labels", "text-classification"),
    ("modular labels", "text-classification"),
])  # fmt: skip
def test_usage_of_the_card_runs(tmp_path, kind, task, capsys):
    encoder = ENCODERS[kind]()
    encoder.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert card.data.pipeline_tag == task
    assert f"- Maximum length: {encoder.max_seq_length} tokens" in card.text
    theirs, ours = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    family = "SentenceTransformer" if kind == "modules" else "CrossEncoder"
    assert f"from sentence_transformers import {family}\n" in theirs
    exec(ours.replace("path/to/this/folder", str(tmp_path)))
    assert "0" in capsys.readouterr().out


@pytest.mark.parametrize(("make", "lines"), [
    (embedder, ["This model maps texts to vectors of 5 numbers.", "- Similarity: dot", "- Prompt 'query': 'rain '"]),
    (lambda: embedder(truncate_dim=None), ["This model maps texts to vectors of 6 numbers."]),
    (scorer, ["This model scores pairs of texts. A pair gets 1 score."]),
    (lambda: scorer(3), ["This model scores pairs of texts. A pair gets 3 scores."]),
])  # fmt: skip
def test_card_says_what_the_model_does(tmp_path, make, lines):
    make().save_pretrained(tmp_path)
    text = card_of(tmp_path).text
    assert all(line in text for line in lines)
    assert "- Prompt 'document'" not in text  # an empty one


def test_huge_card_is_not_read(tmp_path, caplog):
    tiny.write_sentence_model(tmp_path)
    (tmp_path / "README.md").touch()
    os.truncate(tmp_path / "README.md", 100_000_001)
    with caplog.at_level(logging.WARNING, "jaxft"):
        SentenceEncoder.from_pretrained(tmp_path)
    assert "the model card is not kept" in caplog.text


def test_empty_folder_name_is_refused():
    model = BertModel(tiny.config(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="save_pretrained: folder must not be empty, got ''"):
        model.save_pretrained("")
