"""Locations of checkpoints: a folder, or a Hugging Face id of which the needed files are downloaded."""

import datetime
import json
import re

import huggingface_hub
import pytest

from jaxft import CrossEncoder, MultiVectorEncoder, SentenceEncoder, SparseEncoder
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
from jaxft.models.config import BertConfig
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.models.question_answering import BertForQuestionAnswering


def test_resolve_returns_a_folder(tmp_path):
    assert checkpoint_files.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "./nowhere", "../nowhere", "/nowhere/at/all", "a/b/c", "two words", "a/b\n"])
def test_resolve_refuses_impossible_ids(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match=re.escape(repr(name)) + " is neither an existing folder nor a Hugging"):
        checkpoint_files.resolve(name)


def test_resolve_refuses_overlong_names(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match="'aaa.* is neither an existing folder nor a Hugging") as caught:
        checkpoint_files.resolve("a" * 5000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", [None, 3, b"model"])
def test_resolve_refuses_values_that_are_no_names(name):
    with pytest.raises(TypeError, match=f"folder_or_id must be a string or a path, got {type(name).__name__}"):
        BertModel.from_pretrained(name)


@pytest.mark.parametrize("option", [
    {"dtype": "int32"}, {"dtype": "nonsense"}, {"param_dtype": "int32"}, {"implementation": "cuda"},
    {"quantization": "int4"},
])  # fmt: skip
@pytest.mark.parametrize("cls", [
    BertModel, BertForMaskedLM, BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification,
    CrossEncoder, MultiVectorEncoder, SentenceEncoder, SparseEncoder,
])  # fmt: skip
def test_wrong_options_are_refused_before_a_download(cls, option, monkeypatch):
    if "param_dtype" in option and cls.__name__.endswith("Encoder"):
        option = {"quantization": 8}
    monkeypatch.setattr(checkpoint_files, "resolve", None)
    with pytest.raises((TypeError, ValueError), match=f"from_pretrained: {[*option][0]} must be ") as caught:
        cls.from_pretrained("owner/model", **option)
    assert repr([*option.values()][0]).strip("'") in str(caught.value)


def test_resolve_refuses_a_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; expected the folder"):
        checkpoint_files.resolve(file)


def test_resolve_downloads_only_needed_files(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    folder = checkpoint_files.resolve("owner/model", revision="main", cache_dir="cache", local_files_only=True)
    assert folder == tmp_path
    assert (asked["name"], asked["revision"], str(asked["cache_dir"]), asked["local_files_only"]) == (
        "owner/model", "main", "cache", True,
    )  # fmt: skip
    wanted = ["config.json", "model-00001-of-00002.safetensors", "vocab.txt", "tokenizer.json",
              "sentencepiece.bpe.model", "1_Pooling/config.json", "modules.json", "chat_template.jinja", "README.md",
              "2_Dense/config.json", "2_Dense/model.safetensors"]  # fmt: skip
    taken = huggingface_hub.utils.filter_repo_objects(
        [*wanted, "pytorch_model.bin", "2_Dense/pytorch_model.bin", "onnx/config.json", "model.pkl"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(taken) == wanted


def test_resolve_reports_a_missing_download(tmp_path):
    with pytest.raises(
        CheckpointError, match="'no-owner/no-model' at revision 'v1' could not be obtained.*local_files"
    ):
        checkpoint_files.resolve("no-owner/no-model", revision="v1", cache_dir=tmp_path, local_files_only=True)


@pytest.mark.parametrize("error", [OSError("offline\nand so on"), ValueError("bad"), RuntimeError("HTTP")])
def test_resolve_reports_a_failed_download(error, monkeypatch):
    def snapshot_download(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="'owner/model' could not be obtained.*give a local folder") as caught:
        checkpoint_files.resolve("owner/model")
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def request(number, **changes):
    """Returns a pull request as the Hub describes it, by default one of its conversion to safetensors."""
    fields = {
        "title": "Adding `safetensors` variant of this model", "status": "open", "num": number,
        "repo_id": "owner/model", "repo_type": "model", "author": "SFconvertbot", "is_pull_request": True,
        "created_at": datetime.datetime(2024, 3, 1), "endpoint": "https://hub",
    }  # fmt: skip
    return huggingface_hub.Discussion(**fields | changes)


@pytest.fixture
def pickle_repository(tmp_path, monkeypatch):
    """Makes owner/model a repository without safetensors; returns a function that sets its requests."""
    (tmp_path / "config.json").write_text(json.dumps(BertConfig().to_dict()))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    asked = []

    def set_requests(requests):
        def get_repo_discussions(name, **options):
            asked.append((name, options))
            if isinstance(requests, Exception):
                raise requests
            yield from requests

        monkeypatch.setattr(huggingface_hub, "get_repo_discussions", get_repo_discussions)
        return asked

    return set_requests


def test_conversion_request_is_named(pickle_repository):
    others = [
        request(30, author="somebody"), request(31, title="Update README.md"), request(32, status="closed"),
    ]  # fmt: skip
    asked = pickle_repository([request(3), request(7), *others])
    with pytest.raises(CheckpointError, match="has no safetensors files, and pickle checkpoints are never") as caught:
        BertModel.from_pretrained("owner/model", revision="main")
    message = str(caught.value)
    assert "'owner/model' at revision 'main'" in message and message.endswith('pass revision="refs/pr/7"')
    assert "https://hub/owner/model/discussions/7" in message
    ((name, options),) = asked
    assert name == "owner/model" and options["author"] == "SFconvertbot"


@pytest.mark.parametrize("requests", [[], [request(3, author="somebody")], OSError("offline"), RuntimeError("HTTP")])
def test_without_conversion_request_the_folder_is_named(pickle_repository, requests, tmp_path):
    asked = pickle_repository(requests)
    for resolved in ("owner/model", tmp_path):
        with pytest.raises(CheckpointError, match=f"{tmp_path} has neither model.safetensors nor .*convert with"):
            BertModel.from_pretrained(resolved)
    assert len(asked) == 1
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        BertModel.from_pretrained("owner/model", local_files_only=True)
    assert len(asked) == 1


def test_a_repository_with_safetensors_is_not_asked_for_requests(pickle_repository, tmp_path):
    asked = pickle_repository([request(3)])
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "model.safetensors").touch()
    assert checkpoint_files.resolve("owner/model") == tmp_path and not asked
