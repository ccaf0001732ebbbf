"""Settings in a checkpoint's files: applied, refused or harmless, as docs/checkpoints.md says of each field."""

import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

import tiny
import tokenizer_folders
from jaxft import BertForMaskedLM, BertForSequenceClassification, BertModel, CrossEncoder, SentenceEncoder
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.checkpoint.layouts import LAYOUTS
from jaxft.models import classification, config, pooling
from jaxft.models.config import BertConfig
from jaxft.text import cross_encoder, module_files, sentence_encoder, tokenizer

CONFIG, TOKENIZER, MAP = "config.json", "tokenizer_config.json", "special_tokens_map.json"
FAMILY, MODULE = "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING, NORMALIZE = "1_Pooling/config.json", "2_Normalize/config.json"
DENSE, NORM, DROPOUT = "3_Dense/config.json", "4_LayerNorm/config.json", "5_Dropout/config.json"
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
TEXTS = ["The RAIN", "Äffin", "雨x", " old\n", "[Q] rain", "[MASK] rain", "rain " * 90 + "bird"]
PAIRS = [("The RAIN", "old"), ("rain " * 50, "[Q] bird " * 20)]
DECODER = {str(len(tiny.VOCAB)): tokenizer_folders.added("[Q]")}

# The tables of docs/checkpoints.md, in order, and a value of each field that is not its default. A tuple is the kind of
# folder and the value; a dictionary of files takes the place of a value for several files.
TABLES = {
    CONFIG: {
        "model_type": "electra", "vocab_size": 7, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 8, "max_position_embeddings": 8, "type_vocab_size": 1, "dim": ("distilbert", 32),
        "n_layers": ("distilbert", 2), "n_heads": ("distilbert", 4), "hidden_dim": ("distilbert", 8),
        "hidden_act": "relu", "activation": ("distilbert", "relu"), "layer_norm_eps": 0.1, "pad_token_id": 3,
        "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "dropout": ("distilbert", 0.3),
        "attention_dropout": ("distilbert", 0.3), "classifier_dropout": ("pairs", 0.3),
        "seq_classif_dropout": ("pairs, distilbert", 0.3), "initializer_range": 0.3, "id2label": ("pairs", {"0": 0}),
        "num_labels": ("pairs", {CONFIG: {"num_labels": 2, "id2label": None}}), "problem_type": ("pairs", "regression"),
        "sentence_transformers": ("pairs", {"activation_fn": TANH}),
        "sbert_ce_default_activation_function": ("pairs", TANH), "tokenizer_class": ("pairs", "DistilBertTokenizer"),
        "architectures": ("pairs", ["BertForMaskedLM"]), "is_decoder": True, "add_cross_attention": True,
        "position_embedding_type": "relative_key", "quantization_config": {"quant_method": "fp8"},
        "per_layer_config": {"0": {"hidden_act": "relu"}}, "auto_map": {"AutoModel": "own.Model"}, "dtype": "bfloat16",
        "torch_dtype": "float16", "tie_word_embeddings": False, "chunk_size_feed_forward": 2, "use_cache": False,
        "attn_implementation": "flash_attention_2", "gradient_checkpointing": True, "is_encoder_decoder": True,
        "output_hidden_states": True, "output_attentions": True, "return_dict": False, "bos_token_id": 5,
        "eos_token_id": 5, "label2id": {"score": 0}, "sinusoidal_pos_embds": ("distilbert", True), "qa_dropout": 0.3,
        "transformers_version": "4.0.0", "is_causal": True, "pruned_heads": {"0": [1]},
        "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1.0}, "sliding_window": 2,
    },
    TOKENIZER: {
        "tokenizer_class": ("pairs", "DistilBertTokenizer"), "do_lower_case": False, "strip_accents": False,
        "tokenize_chinese_chars": False, "add_prefix_space": ("roberta", True), "unk_token": "rain",
        "sep_token": "river", "pad_token": "[Q]", "cls_token": "river", "mask_token": "[Q]", "bos_token": "[Q]",
        "eos_token": "[Q]", "additional_special_tokens": ["[Q]"], "extra_special_tokens": ["[Q]"], "image_token": "[Q]",
        "model_specific_special_tokens": {"x": "[Q]"},
        "added_tokens_decoder": DECODER, "split_special_tokens": True, "model_max_length": 6, "max_len": 6,
        "truncation_side": "left", "model_input_names": ("pairs", ["input_ids", "attention_mask"]),
        "padding_side": "left", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "processor_class": "CLIP",
        "fast_tokenizer_files": ["tokenizer.4.0.0.json"], "init_inputs": ["x"], "chat_template": "{{ messages }}",
        "clean_up_tokenization_spaces": True, "name_or_path": "x", "backend": "tokenizers", "trim_offsets": False,
        "keep_accents": ("albert", True), "split_by_punct": ("deberta", True),
        "unk_id": ("deberta", {TOKENIZER: {"unk_id": 5, "unk_token": "▁cat"}}),
        "sp_model_kwargs": ("deberta", {"enable_sampling": True}), "vocab_type": ("deberta", "spm"),
        "remove_space": ("albert", False), "do_basic_tokenize": False, "never_split": ["rain"], "add_bos_token": True,
        "add_eos_token": True, "max_length": 4, "stride": 2, "legacy": False,
    },
    "": {
        "tokenizer.json": ("bert", json.loads(tiny.bert_tokenizer().to_str().replace('"rain"', '"RAIN"'))),
        "vocab.txt": ("vocab.txt", "\n".join(tiny.VOCAB).replace("rain", "snow")),
        "vocab.json": ("vocab.json", tokenizer_folders.FOLDERS["roberta, files"]["vocab.json"] | {"r": 80, "n": 80}),
        "merges.txt": ("vocab.json", "#version: 0.2\nr a\n"),
        "added_tokens.json": {"[Q]": len(tiny.VOCAB)}, "adapter_config.json": {"peft_type": "LORA"},
        "processor_config.json": {"processor_class": "CLIPProcessor"},
        "preprocessor_config.json": {"processor_class": "CLIPProcessor"},
    },
    FAMILY: {
        "type": {"modules.json": [{"type": "own.Transformer", "path": ""}]},
        "path": {"modules.json": [{"type": tiny.TYPES + "Transformer", "path": "0_Transformer"},
                                  {"type": tiny.TYPES + "Pooling", "path": "1_Pooling"}]},
        "idx": {"modules.json": [{"type": tiny.TYPES + "Transformer", "path": "", "idx": 7, "name": "x"},
                                 {"type": tiny.TYPES + "Pooling", "path": "1_Pooling", "kwargs": ["task"]},
                                 {"type": tiny.TYPES + "Normalize", "path": "2_Normalize"}]},
        "model_type": "CrossEncoder", "prompts": {"q": "rain "}, "default_prompt_name": None, "truncate_dim": 5,
        "activation_fn": ("pairs", TANH), "keep_in_fp32_modules": ("pairs", ["0.model.classifier"]),
        "similarity_fn_name": "dot", "requirements": {"torch": ">=99"},
        "__version__": {"sentence_transformers": "99.0"},
    },
    MODULE: {
        "max_seq_length": 6, "do_lower_case": ("cased", True), "transformer_task": "fill-mask",
        "modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}},
        "module_output_name": "sentence_embedding", "tokenizer_name_or_path": "other",
        **{name: {"model_max_length": 5} for name in module_files.ARGUMENTS if name != "processing_kwargs"},
        "processing_kwargs": {"text": {"max_length": 5}}, "unpad_inputs": False, "query_length": 3,
        "document_length": 3, "query_expansion": {"strategy": "min", "length": 9},
    },
    POOLING: {
        "pooling_mode": "max", "pooling_mode_cls_token": True, "pooling_mode_max_tokens": True,
        "pooling_mode_mean_tokens": ("cls", True), "pooling_mode_mean_sqrt_len_tokens": True,
        "pooling_mode_weightedmean_tokens": True, "pooling_mode_lasttoken": True,
        "include_prompt": False, "embedding_dimension": 7, "word_embedding_dimension": 7,
    },
    NORMALIZE: {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"},
    DENSE: {name: ("modules", value) for name, value in {
        "in_features": 7, "out_features": 7, "bias": False, "use_residual": True,
        "activation_function": "torch.nn.modules.activation.ReLU", "module_input_name": "token_embeddings",
        "module_output_name": "token_embeddings",
    }.items()},
    NORM: {"dimension": ("modules", 7), "dropout": ("modules", {DROPOUT: {"dropout": 0.5}})},
}  # fmt: skip
TABLES[FAMILY] |= {name: TABLES[FAMILY]["idx"] for name in ("name", "kwargs")}


def documented():
    """Returns the status of each field of each table of the page."""
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    tables, rows = page.split("|---|---|---|\n")[1:], re.compile(r"^\| (`.+?`) \| (\w+) \|", re.MULTILINE)
    return {
        name: {field: status for fields, status in rows.findall(table) for field in re.findall(r"`(\w.*?)`", fields)}
        for name, table in zip(TABLES, tables, strict=True)
    }


DOCUMENTED = documented()
ROWS = [(name, field) for name, fields in DOCUMENTED.items() for field in fields]


def write_files(folder, files):
    for name, content in files.items():
        file = folder / name
        if isinstance(content, str):
            file.write_text(content)
        else:
            update = isinstance(content, dict) and file.exists() and name not in ("tokenizer.json", "vocab.json")
            tiny.write_json(file, (json.loads(file.read_text()) if update else {}) | content if update else content)


def write_folder(folder, kind):
    """Writes a checkpoint with a tiny model. Its vocabulary has room for eight more tokens."""
    sizes = {"vocab_size": len(tiny.VOCAB) + 8}
    if kind.startswith("pairs"):
        tiny.write_classifier(
            folder, "distilbert" if kind.endswith("distilbert") else "bert", vocab_size=len(tiny.VOCAB)
        )
        tiny.write_modules(folder, (tiny.TYPES + "Transformer", ""))
        tiny.write_json(folder / FAMILY, {"model_type": "CrossEncoder"})
        tiny.write_json(folder / MODULE, {"transformer_task": "sequence-classification"})
        return folder
    if kind == "distilbert":
        sizes |= {"model_type": "distilbert", "type_vocab_size": 0}
    if kind in ("roberta", "vocab.json"):
        sizes = {"model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1, "vocab_size": 300}
    if kind in ("albert", "deberta"):
        sizes = {"model_type": "albert"} if kind == "albert" else {"model_type": "deberta-v2", "type_vocab_size": 0}
    tiny.write_model(folder, **sizes)
    tiny.bert_tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "roberta": {"tokenizer.json": tokenizer_folders.byte_level().to_str()},
        "albert": {"tokenizer.json": tokenizer_folders.albert().to_str()},
        "deberta": {"tokenizer.json": tokenizer_folders.deberta().to_str()},
        "vocab.json": tokenizer_folders.FOLDERS["roberta, files"] | {CONFIG: {}},
        "cased": {TOKENIZER: {"do_lower_case": False}},
    }
    write_files(folder, {name: content for name, content in files.get(kind, {}).items() if content})
    if kind in ("vocab.txt", "vocab.json"):
        (folder / "tokenizer.json").unlink()
    write_files(folder, {
        "modules.json": [{"type": tiny.TYPES + name, "path": path} for name, path in (
            ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"), ("Dense", "3_Dense"),
            ("LayerNorm", "4_LayerNorm"), ("Dropout", "5_Dropout"))[: None if kind == "modules" else 3]],
        POOLING: {"pooling_mode_cls_token": True} if kind == "cls" else {},
        DENSE: {"in_features": tiny.WIDTH, "out_features": tiny.WIDTH}, NORM: {"dimension": tiny.WIDTH}, DROPOUT: {},
        NORMALIZE: {}, MODULE: {}, TOKENIZER: {},
        FAMILY: {} if kind in ("no prompt", "modules") else {"prompts": {"q": "the old "}, "default_prompt_name": "q"},
    })  # fmt: skip
    ones = np.ones(tiny.WIDTH, np.float32)
    for file, tensors in (
        (DENSE, {"linear.weight": np.diag(ones), "linear.bias": ones}), (NORM, {"norm.weight": ones, "norm.bias": ones})
    ):  # fmt: skip
        safetensors.numpy.save_file(tensors, (folder / file).with_name("model.safetensors"))
    return folder


def outcome(folder, kind):
    """Returns everything about the encoder of a folder that its files decide, except for the parameters."""
    if kind.startswith("pairs"):
        scorer = CrossEncoder.from_pretrained(folder, implementation="xla")
        types, encodings = scorer._pairs.batcher.with_types, scorer.tokenizer.encode_batch([*PAIRS])
        tokens = [(encoding.ids, encoding.type_ids if types else None) for encoding in encodings]
        parts = (scorer.prompts, scorer.default_prompt_name), scorer.max_seq_length, scorer.activation_fn
        return tokens, parts, scorer.model.settings, scorer.model.config
    encoder = SentenceEncoder.from_pretrained(folder, implementation="xla")
    embedder, prompts = encoder.embedder, (encoder.prompts, encoder.default_prompt_name)
    names = ("in_features", "out_features", "activation", "use_residual", "rate")
    modules = [
        (type(module).__name__, *(getattr(module, name, None) for name in names))
        for module in (*embedder.token_modules, *embedder.modules)
    ]
    parts = embedder.pooling, embedder.include_prompt, prompts, encoder.truncate_dim, encoder.max_seq_length, modules
    parts += encoder.similarity_fn_name, encoder._task_lengths
    return encoder.tokenize(TEXTS), parts, encoder.model.config


def test_table_lists_the_fields_of_the_tests():
    assert {name: {*fields} for name, fields in DOCUMENTED.items()} == {
        name: {*fields} for name, fields in TABLES.items()
    }


def test_table_lists_the_fields_of_the_code():
    of_code = {
        CONFIG: {
            *config.REFUSED, *classification._MEANING, *config._BERT_FIELDS,
            *LAYOUTS["distilbert"].config_names.values(),
        },
        TOKENIZER: {*tokenizer.REFUSED, *tokenizer._NAMES},
        "": {name for kind in tokenizer.CLASSES.values() for name in kind.vocabulary},
        MODULE: {*module_files.TRANSFORMER_FIELDS, *module_files.ARGUMENTS}, POOLING: {*module_files.POOLING_FIELDS},
        NORM: {name for fields in module_files._FIELDS.values() for name in fields},
    }  # fmt: skip
    assert {name: fields - DOCUMENTED[name].keys() for name, fields in of_code.items()} == dict.fromkeys(of_code, set())
    assert all(DOCUMENTED[CONFIG][name] == "refused" for name in config.REFUSED)
    assert all(DOCUMENTED[TOKENIZER][name] == "refused" for name in tokenizer.REFUSED)
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    assert all(name in page for name in (*tokenizer.CLASSES, *pooling.MODES, *cross_encoder.ACTIVATIONS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Returns a function that writes a folder of some kind and computes its outcome, once."""
    folders = {}

    def of(kind):
        if kind not in folders:
            folder = write_folder(tmp_path_factory.mktemp("plain"), kind)
            folders[kind] = folder, outcome(folder, kind)
        return folders[kind]

    return of


def described(folder, **_):
    """Returns the place of an encoder that has a configuration only, for speed."""
    options = SimpleNamespace(implementation="xla")
    config = checkpoint_files.read_config(folder, BertConfig.from_dict)
    return SimpleNamespace(config=config, embeddings=SimpleNamespace(options=options))


@pytest.mark.parametrize(("name", "field"), ROWS)
def test_field_does_what_the_table_says(tmp_path, monkeypatch, plain, name, field):
    monkeypatch.setattr(sentence_encoder, "BertModel", SimpleNamespace(from_pretrained=described))
    value = TABLES[name][field]
    kind, value = value if isinstance(value, tuple) else ("bert", value)
    if not name:
        files = {field: value}
    else:
        is_files = isinstance(value, dict) and any(key.endswith(".json") for key in value)
        files = value if is_files else {name: {field: value}}
    (folder, before), status = plain(kind), DOCUMENTED[name][field]
    write_files(shutil.copytree(folder, tmp_path, dirs_exist_ok=True), files)
    try:
        after = outcome(tmp_path, kind)
    except CheckpointError as error:  # an applied size may not fit the others
        assert status != "harmless"
        assert status == "applied" or field in str(error) or "pooling mode" in str(error)
    else:
        assert (status, after == before) in (("applied", False), ("harmless", True))


@pytest.mark.parametrize("name", tokenizer_folders.FOLDERS)
def test_tokenizer_gives_the_ids_of_transformers(tmp_path, name):
    tokenizer_folders.write(tmp_path, tokenizer_folders.FOLDERS[name])
    *expected, pair, types = json.loads(tokenizer_folders.DATA.read_text())[name]
    settings = tokenizer.Settings(tmp_path)
    found = tokenizer.load(settings)
    limit = min(settings.max_length or 64, 64)
    found = tokenizer.truncating(found, limit, BertConfig(), token_types=settings.token_types, owner="", argument="")
    assert [encoding.ids for encoding in found.encode_batch([*tokenizer_folders.TEXTS])] == expected
    encoding = found.encode(*tokenizer_folders.PAIR)
    assert (encoding.ids, encoding.type_ids if settings.token_types else None) == (pair, types)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("vocab.txt", {TOKENIZER: {"tokenizer_class": "BertJapaneseTokenizer"}},
         "tokenizer_config.json: tokenizer_class 'BertJapaneseTokenizer' is not supported; supported are Bert"),
        ("bert", {CONFIG: {"tokenizer_class": "T5Tokenizer"}}, "config.json: tokenizer_class 'T5Tokenizer' is not"),
        ("bert", {TOKENIZER: {"tokenizer_class": "RobertaTokenizer"}},
         "tokenizer.json: the folder's tokenizer_class needs a BPE vocabulary, got WordPiece"),
        ("vocab.txt", {TOKENIZER: {"tokenizer_class": "PreTrainedTokenizerFast"}}, "no tokenizer: no tokenizer.json"),
        ("vocab.txt", {TOKENIZER: {"tokenizer_class": "RobertaTokenizer"}},
         "no tokenizer: neither tokenizer.json nor vocab.json nor merges.txt is there for RobertaTokenizer"),
        ("bert", {TOKENIZER: {"tokenizer_class": ""}}, "tokenizer_config.json: tokenizer_class must be a name, got ''"),
        ("bert", {TOKENIZER: {"padding_side": "up"}}, "padding_side must be left or right, got 'up'"),
        ("bert", {TOKENIZER: {"model_input_names": "input_ids"}}, "model_input_names must be a list, got 'input_ids'"),
        ("bert", {TOKENIZER: {"model_input_names": ["input_ids"]}}, "model_input_names must have .*input_ids"),
        ("pairs", {TOKENIZER: {"model_input_names": []}}, "model_input_names must have 'attention_mask', got \\[\\]"),
        ("bert", {TOKENIZER: {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder must map token ids to tokens"),
        ("bert", {MAP: {"model_max_length": "long"}}, "must be an integer of at least 1, got 'long'"),
        ("bert", {FAMILY: {"truncate_dim": 0}}, "truncate_dim must be a positive integer, got 0"),
        ("bert", {TOKENIZER: {"cls_token": None}}, "tokenizer_config.json: cls_token must be a token, got None"),
        ("bert", {TOKENIZER: {"sep_token": ""}}, "tokenizer_config.json: sep_token must be a token, got ''"),
        ("bert", {TOKENIZER: {"model_specific_special_tokens": ["[Q]"]}},
         "tokenizer_config.json: model_specific_special_tokens must map names to tokens, got"),
        ("bert", {TOKENIZER: {"unk_token": 3}}, "tokenizer_config.json: unk_token must be a token or null, got 3"),
        ("bert", {TOKENIZER: {"added_tokens_decoder": [1]}}, "added_tokens_decoder must map token ids to tokens, got"),
        ("bert", {TOKENIZER: {"added_tokens_decoder": {"9" * 5000: "rain"}}}, "added_tokens_decoder must map token i"),
        ("bert", {TOKENIZER: {"added_tokens_decoder": {"9": ["rain"]}}},
         r"tokenizer_config.json: a token of added_tokens_decoder must be a text or an object .*, got \['rain'\]"),
        ("bert", {TOKENIZER: {"extra_special_tokens": [{"content": 3}]}}, "a token of extra_special_tokens must be"),
        ("bert", {TOKENIZER: {"cls_token": {"content": "[CLS]", "lstrip": "no"}}}, "a token of cls_token must be"),
        ("bert", {"added_tokens.json": {"rain": "9"}}, "added_tokens.json: must map tokens to token ids, got"),
        ("bert", {"added_tokens.json": {"rain": -1}}, "added_tokens.json: must map tokens to token ids, got"),
        ("bert", {FAMILY: {"truncate_dim": -3}}, "truncate_dim must be a positive integer, got -3"),
        ("bert", {FAMILY: {"truncate_dim": True}}, "truncate_dim must be a positive integer, got True"),
        ("bert", {FAMILY: {"model_type": "SparseEncoder"}}, "model_type is 'SparseEncoder', expected Sentence"),
        ("bert", {FAMILY: {"model_type": "CrossEncoder"}}, "load it with jaxft.CrossEncoder"),
        ("bert", {FAMILY: {"default_prompt_name": "none"}}, "default_prompt_name is 'none', but prompts has no text"),
        ("bert", {"modules.json": [{"type": tiny.TYPES + "Transformer", "path": "", "name": "0"},
                                   {"type": tiny.TYPES + "Pooling", "path": "1_Pooling", "name": "0"}]},
         "modules.json: the names of modules must differ, got '0' twice"),
        ("bert", {MODULE: {"pooling": "cls"}}, "sentence_bert_config.json: unknown field 'pooling'; known are"),
        ("bert", {POOLING: {"weights": 1}}, "1_Pooling/config.json: unknown field 'weights'; known are"),
        ("bert", {MODULE: {"modality_config": {"message": {}, "text": {}}}}, "modality_config must take texts to"),
        ("pairs", {FAMILY: {"model_type": "SentenceTransformer"}}, "load it with jaxft.SentenceEncoder"),
        ("pairs", {FAMILY: {"activation_fn": "own.Tanh"}},
         "config_sentence_transformers.json: activation_fn: the activation function 'own.Tanh' is not supported"),
        ("pairs", {CONFIG: {"sentence_transformers": {"activation_fn": "own.Tanh"}}},
         "/config.json: activation_fn: the activation function 'own.Tanh' is not supported"),
        ("pairs", {CONFIG: {"sbert_ce_default_activation_function": "own.Tanh"}},
         "/config.json: sbert_ce_default_activation_function: the activation function 'own.Tanh' is not supported"),
        ("pairs", {"modules.json": [{"type": tiny.TYPES + name, "path": ""} for name in ("Transformer", "Dense")]},
         "modules.json: expected a Transformer module, then one Pooling module .*, got Transformer, Dense"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_by_name(tmp_path, kind, files, message):
    write_files(write_folder(tmp_path, kind), files)
    with pytest.raises(CheckpointError, match=message):
        outcome(tmp_path, kind)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({CONFIG: {"architectures": ["BertForCausalLM"]}}, "BertForCausalLM needs pooling of the last token"),
        ({TOKENIZER: {"chat_template": "{{ x }}"}}, "a chat_template is not supported"),
        ({"chat_template.jinja": "{{ x }}"}, "a chat_template is not supported"),
    ],
)
def test_folder_without_modules_is_refused_by_name(tmp_path, files, message):
    write_files(tiny.write_model(tmp_path), files)
    with pytest.raises(CheckpointError, match=f"without modules.json, {message}"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_folder_without_modules_is_logged_and_has_no_other_settings(tmp_path, caplog):
    """sentence-transformers reads neither of the two files then."""
    write_files(tiny.write_model(tmp_path), {FAMILY: {"truncate_dim": 5}, MODULE: {"max_seq_length": 5}})
    with caplog.at_level(logging.WARNING, "jaxft"):
        encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} has no modules.json: embeddings get mean pooling and no normalisation. If the model was made for"
        " sentence-transformers, the folder is not complete."
    ]
    assert encoder.embedder.pooling == ("mean",) and not encoder.embedder.modules
    assert (encoder.truncate_dim, encoder.max_seq_length) == (None, 64)


@pytest.mark.parametrize(
    "name", ["options 1, tokenizer.json", "options 4, vocab.txt", "roberta, prefix True", "map, vocab.txt"]
)
def test_saved_tokenizer_is_taken_as_it_is(tmp_path, name):
    """Without its tokenizer_config.json, a cased tokenizer would become BertTokenizer, which lower-cases."""
    source, again = tmp_path / "source", tmp_path / "again"
    source.mkdir(), again.mkdir()
    tokenizer_folders.write(source, tokenizer_folders.FOLDERS[name])
    tokenizer_folders.write(again, {CONFIG: tokenizer_folders.FOLDERS[name][CONFIG]})
    settings = tokenizer.Settings(source)
    saved = tokenizer.load(settings)
    tokenizer.save(saved, again, settings)
    found = tokenizer.load(tokenizer.Settings(again))
    texts = [*tokenizer_folders.TEXTS, tokenizer_folders.PAIR]
    assert [e.ids for e in found.encode_batch(texts)] == [e.ids for e in saved.encode_batch(texts)]
    assert tokenizer.Settings(again).token_types == settings.token_types
    assert tokenizer.Settings(again).kind.model is None


def test_split_words_of_special_tokens(tmp_path):
    """A copy of the tokenizer keeps the setting, which its JSON does not have."""
    write_files(write_folder(tmp_path, "no prompt"), {TOKENIZER: {"split_special_tokens": True}})
    (ids,) = SentenceEncoder.from_pretrained(tmp_path).tokenize("[MASK]")
    assert tiny.VOCAB.index("[MASK]") not in ids


def test_missing_default_tokens_need_no_row(tmp_path):
    """A vocabulary may lack [MASK]: it is added only if the model has a row for it."""
    words = [*tiny.VOCAB[:4], *tiny.VOCAB[5:]]
    saved = tiny.BertWordPieceTokenizer(vocab={token: i for i, token in enumerate(words)})
    saved.save(str(tiny.write_model(tmp_path, vocab_size=len(words)) / "tokenizer.json"))
    assert tokenizer.load(tokenizer.Settings(tmp_path)).token_to_id("[MASK]") is None
    write_files(tmp_path, {CONFIG: {"vocab_size": len(words) + 1}})
    assert tokenizer.load(tokenizer.Settings(tmp_path)).token_to_id("[MASK]") == len(words)


@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_are_cut_after_the_modules(tmp_path, normalize):
    """sentence-transformers 6.2 cuts after Normalize, without normalising again; `normalize_embeddings` comes last."""
    tiny.write_sentence_model(tmp_path, normalize=normalize)
    whole = SentenceEncoder.from_pretrained(tmp_path).encode(TEXTS)
    tiny.write_json(tmp_path / FAMILY, {"truncate_dim": 5})
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    cut = encoder.encode(TEXTS)
    assert encoder.embedding_dimension == 5 and cut.shape == (len(TEXTS), 5)
    np.testing.assert_allclose(cut, whole[:, :5], rtol=1e-6)
    again = encoder.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(again, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-5)
    encoder.truncate_dim = 99  # may be changed, as in sentence-transformers
    np.testing.assert_array_equal(encoder.encode(TEXTS), whole)
    assert encoder.embedding_dimension == tiny.WIDTH


@pytest.mark.parametrize("width", [0, -1, True, 2.0, "5"])
def test_truncate_dim_must_be_positive(width):
    with pytest.raises(ValueError, match="truncate_dim must be None or a positive integer, got"):
        SentenceEncoder(None, None, max_seq_length=8, truncate_dim=width)


# Activation in config_sentence_transformers.json, fields of config.json, and the activation that
# sentence-transformers 6.2 takes.
ACTIVATIONS = [
    (None, {}, "Sigmoid"),
    (IDENTITY, {}, "Identity"),
    (IDENTITY, {"sentence_transformers": {"activation_fn": TANH}}, "Identity"),
    (None, {"sentence_transformers": {"activation_fn": TANH}}, "Tanh"),
    (None, {"sbert_ce_default_activation_function": IDENTITY}, "Identity"),
    (
        None,
        {"sentence_transformers": {"activation_fn": TANH}, "sbert_ce_default_activation_function": IDENTITY},
        "Tanh",
    ),
    (None, {"sentence_transformers": {"activation_fn": None}, "sbert_ce_default_activation_function": TANH}, "Sigmoid"),
]


@pytest.mark.parametrize(("own", "fields", "expected"), ACTIVATIONS)
def test_activation_is_the_one_of_sentence_transformers(tmp_path, own, fields, expected):
    saved = write_folder(tmp_path / "saved", "pairs")
    write_files(saved, {FAMILY: {"activation_fn": own}, CONFIG: fields})
    functions = {
        "Sigmoid": lambda x: 1 / (1 + np.exp(-np.asarray(x))),
        "Identity": lambda x: x,
        "Tanh": np.tanh,
    }
    scorer = CrossEncoder.from_pretrained(saved)
    scores = scorer.predict(PAIRS)
    np.testing.assert_allclose(scores, scorer.predict(PAIRS, activation_fn=functions[expected]), atol=1e-6)
    # A saved model keeps the activation, in the place that sentence-transformers reads without modules.json.
    BertForSequenceClassification.from_pretrained(saved).save_pretrained(tmp_path / "again")
    tiny.write_tokenizer(tmp_path / "again")
    np.testing.assert_array_equal(CrossEncoder.from_pretrained(tmp_path / "again").predict(PAIRS), scores)


def test_activation_without_modules_is_not_read(tmp_path):
    write_files(tiny.write_classifier(tmp_path), {FAMILY: {"model_type": "CrossEncoder", "activation_fn": IDENTITY}})
    assert "sentence_transformers" not in BertForSequenceClassification.from_pretrained(tmp_path).settings


def test_prompt_comes_before_the_first_text_of_a_pair(tmp_path):
    plain = CrossEncoder.from_pretrained(tiny.write_classifier(tmp_path))
    write_files(write_folder(tmp_path / "prompt", "pairs"), {
        FAMILY: {"prompts": {"q": "the old "}, "default_prompt_name": "q"},
    })  # fmt: skip
    scorer = CrossEncoder.from_pretrained(tmp_path / "prompt")
    expected = plain.predict([("the old " + first, second) for first, second in PAIRS])
    np.testing.assert_array_equal(scorer.predict(PAIRS), expected)


def test_scorer_without_architecture_has_one_label(tmp_path):
    """sentence-transformers assumes one label, transformers two."""
    tiny.write_classifier(tmp_path, architectures=None, id2label=None)
    assert CrossEncoder.from_pretrained(tmp_path).predict(PAIRS).shape == (len(PAIRS),)
    tiny.write_classifier(tmp_path, num_labels=2, architectures=None)
    assert CrossEncoder.from_pretrained(tmp_path).predict(PAIRS).shape == (len(PAIRS), 2)


def test_names_of_labels_may_be_integers(tmp_path):
    tiny.write_classifier(tmp_path, num_labels=2, id2label={"0": 0, "1": "one"})
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert model.id2label == {0: "0", 1: "one"}
    assert BertForSequenceClassification.from_pretrained(tmp_path, id2label=["a", "b"]).id2label == {0: "a", 1: "b"}


@pytest.mark.parametrize("load", [BertModel, BertForSequenceClassification, BertForMaskedLM])
def test_adapters_are_refused_by_name(tmp_path, load):
    tiny.write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "x"})
    with pytest.raises(CheckpointError, match="adapter_config.json: adapters are not supported; merge it"):
        load.from_pretrained(tmp_path)


def test_distilbert_takes_the_names_of_bert():
    settings = {"model_type": "distilbert", "dim": 64, "hidden_size": 32, "num_attention_heads": 4, "n_heads": 2}
    found = BertConfig.from_dict(settings | {"num_hidden_layers": 3, "intermediate_size": 7})
    sizes = found.hidden_size, found.num_attention_heads, found.num_hidden_layers, found.intermediate_size
    assert sizes == (32, 4, 3, 3072)  # as transformers 5.24: intermediate_size has only the name hidden_dim


def test_sliding_window_is_half_of_local_attention():
    """transformers 5.24: the embeddings of a ModernBERT change with this field, which wins over local_attention."""
    fields = {"model_type": "modernbert", "local_attention": 8}
    assert BertConfig.from_dict(fields | {"sliding_window": 3}).local_attention == 6
    assert BertConfig.from_dict(fields | {"sliding_window": None}).local_attention == 8
    with pytest.raises(ValueError, match="local_attention must be an integer from 1 to 16777216, got 'all'"):
        BertConfig.from_dict(fields | {"sliding_window": "all"})


@pytest.mark.parametrize(("fields", "thetas"), [
    ({"rope_theta": 9.0}, (160_000, 10_000)),
    ({"global_rope_theta": 7.0, "local_rope_theta": 5.0}, (7, 5)),
    ({"rope_parameters": {"full_attention": {"rope_theta": 3.0}}, "local_rope_theta": 5.0}, (3, 5)),
    ({"rope_scaling": {"rope_theta": 2.0}}, (2, 2)),
    ({"rope_scaling": {"rope_theta": 2.0}, "rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, (2, 2)),
])  # fmt: skip
def test_rotary_settings_of_modernbert(fields, thetas):
    """transformers 5.24: rope_scaling changes both kinds of layers, and rope_theta none."""
    found = BertConfig.from_dict({"model_type": "modernbert"} | fields)
    assert (found.rope_theta, found.local_rope_theta) == thetas


@pytest.mark.parametrize("kind", ["nomic_bert", "gte", "jina_embeddings_v3"])
def test_rope_scaling_wins(kind):
    """transformers 5.24: rope_scaling replaces rope_parameters, with rope_theta as the default."""
    fields = {"model_type": kind, "rope_parameters": {"rope_theta": 3.0}, "rope_theta": 5.0}
    assert BertConfig.from_dict(fields).rope_theta == 3
    assert BertConfig.from_dict(fields | {"rope_scaling": {"rope_theta": 2.0}}).rope_theta == 2
    assert BertConfig.from_dict(fields | {"rope_scaling": {"rope_type": "default"}}).rope_theta == 5
    with pytest.raises(ValueError, match="rotary positions of type 'linear' are not supported"):
        BertConfig.from_dict(fields | {"rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(("kind", "fields", "message"), [
    ("modernbert", {"rope_parameters": {"rope_theta": 3.0}},
     "rope_parameters must be an object with the names full_attention and sliding_attention, got {'rope_theta': 3.0}"),
    ("modernbert", {"layer_types": {"0": "full_attention"}}, "layer_types must name 22 times one of"),
    ("deberta-v2", {"type_vocab_size": 2}, "type_vocab_size must be 0, got 2"),
])  # fmt: skip
def test_settings_that_were_ignored(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        BertConfig.from_dict({"model_type": kind} | fields)


def with_limit(folder, limit=None, positions=None, **settings):
    """Writes the number of positions into config.json, and the limits of a sentence-transformers folder."""
    if positions is not None:
        file = folder / CONFIG
        tiny.write_json(file, json.loads(file.read_text()) | {"max_position_embeddings": positions})
    tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": limit} | settings)
    tiny.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    tiny.write_modules(folder, (tiny.TYPES + "Transformer", ""), (tiny.TYPES + "Pooling", "1_Pooling"))
    return folder


@pytest.mark.parametrize(("kind", "options"), [
    ("modernbert", {"type_vocab_size": 0, "hidden_dropout_prob": 0.0}), ("nomic_bert", {}), ("jina_bert", {}),
    ("deberta-v2", {"type_vocab_size": 0, "position_buckets": 8, "max_relative_positions": 64}),
])  # fmt: skip
def test_limit_above_the_positions_is_applied_without_a_table(kind, options, tmp_path, caplog):
    """A model with 16 positions gives the embeddings of the same model with 64 positions, as in version 6.2."""
    folder = tiny.write_model(tmp_path, model_type=kind, **options)
    text = "a bird sings in the old tree " * 4
    many = SentenceEncoder.from_pretrained(with_limit(folder, 30)).encode(text)
    few = SentenceEncoder.from_pretrained(with_limit(folder, 30, 16))
    assert few.max_seq_length == 30 and not [x for x in caplog.messages if "texts are cut" in x]
    np.testing.assert_array_equal(few.encode(text), many)
    assert SentenceEncoder.from_pretrained(with_limit(folder)).max_seq_length == 16
    few.max_seq_length = 40
    assert not np.allclose(few.encode(text * 3), many)
    few.max_seq_length = None
    assert few.max_seq_length == 16
    with pytest.raises(ValueError, match="max_seq_length must be at most 1048576"):
        few.max_seq_length = 2**20 + 1
    caplog.clear()
    assert SentenceEncoder.from_pretrained(with_limit(folder, 10**9)).max_seq_length == 2**20
    assert any("though its files say 1000000000" in x for x in caplog.messages)


def test_limit_above_a_table_of_positions_is_noted(tmp_path, caplog):
    folder = with_limit(tiny.write_model(tmp_path), 100, query_length=200)
    found = SentenceEncoder.from_pretrained(folder)
    assert found.max_seq_length == 64
    assert [x.partition(": ")[2] for x in caplog.messages if "texts are cut" in x] == [
        f"texts are cut after 64 tokens, the positions of the model, though its files say {n}" for n in (100, 200)
    ]
    assert found.encode_query("bird " * 300).shape == found.encode("bird " * 300).shape
    caplog.clear()
    SentenceEncoder.from_pretrained(folder, max_seq_length=9)
    assert not any("say 100" in x for x in caplog.messages)
    caplog.clear()
    assert SentenceEncoder.from_pretrained(with_limit(folder)).max_seq_length == 64
    assert not any("texts are cut" in x for x in caplog.messages)


def test_limit_of_pairs_above_the_positions(tmp_path, caplog):
    folder = tiny.write_classifier(tmp_path, model_type="roberta")
    assert CrossEncoder.from_pretrained(folder).max_seq_length == 64
    assert any("texts are cut after 64 tokens" in x for x in caplog.messages)
    caplog.clear()
    CrossEncoder.from_pretrained(folder, max_length=9)
    assert not caplog.messages
