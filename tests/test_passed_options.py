"""Options that a function only passes on: what they are for must happen."""

import contextlib
import functools
import io
import itertools
import sys
from typing import NamedTuple

import huggingface_hub
import jax
import numpy as np
import pytest
from flax import nnx

import jaxft
import peer_models
import tiny
from jaxft import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CrossEncoder,
    MultiVectorEncoder,
    SentenceEncoder,
    SparseEncoder,
    cli,
    dispatch,
)
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import bert
from jaxft.training import contrastive_loss


class Call(NamedTuple):
    """A program of the encoder: rows of the token ids, and options of the model."""

    rows: int
    implementation: str | None
    dtype: str


TEXTS = [*(["a bird sings"] * 5), "the old tree"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Records each program of the encoder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("".join(text + "\n" for text in TEXTS))
    call, seen = bert.BertModel.__call__, []

    def record(self, input_ids, *args, **options):
        options_of = self.embeddings.options
        seen.append(Call(input_ids.shape[0], options_of.implementation, options_of.dtype.name))
        return call(self, input_ids, *args, **options)

    monkeypatch.setattr(bert.BertModel, "__call__", record)
    return seen


COMMANDS = {"encode": ["texts.txt", "-o", "out.npy"], "similar": ["texts.txt", "a bird"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_the_command_line_reach_the_encoder(command, model, calls):
    options = ["--batch-size", "2", "--implementation", "xla", "--dtype", "bfloat16"]
    assert cli.main([command, "--model", model, *options, *COMMANDS[command]]) == 0
    assert max(call.rows for call in calls) == 2
    assert {(call.implementation, call.dtype) for call in calls} == {("xla", "bfloat16")}
    calls.clear()
    assert cli.main([command, "--model", model, *COMMANDS[command]]) == 0
    assert max(call.rows for call in calls) > 2
    assert {(call.implementation, call.dtype) for call in calls} == {(None, "float32")}


def test_options_of_similar_reach_both_sides(model, calls, monkeypatch):
    seen = {}

    def record(name, shape):
        def encode(self, texts, **options):
            seen[name] = options
            return np.ones(shape)

        monkeypatch.setattr(SentenceEncoder, name, encode)

    record("encode_query", (3,))
    record("encode_document", (6, 3))
    given = ["--devices", "0", "--batch-size", "2", "--prompt", "a "]
    assert cli.main(["similar", "--model", model, *COMMANDS["similar"], *given]) == 0
    common = {"batch_size": 2, "normalize_embeddings": True, "devices": [0]}
    assert seen["encode_query"] == common | {"prompt": "a ", "prompt_name": None}
    assert seen["encode_document"] == common | {"show_progress_bar": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["--prompt", "a ", "--precision", "int8"],
            [
                {"prompt": "a ", "precision": "int8"},
                {"prompt": "a ", "precision": "int8", "ranges": [[0] * tiny.WIDTH] * 2},
            ],
        ),
        (["--prompt-name", "b", "--normalize"], [{"prompt_name": "b", "normalize_embeddings": True}]),
        (
            ["--for", "similar", "--prompt", "a "],
            [
                {"prompt": "a ", "normalize_embeddings": True, "task": "query"},
                {"normalize_embeddings": True, "task": "document"},
            ],
        ),
    ],
    ids=str,
)
def test_options_of_warmup_reach_the_encoder(given, expected, model, monkeypatch):
    seen = []
    monkeypatch.delenv("JAXFT_COMPILATION_CACHE", raising=False)
    monkeypatch.setattr(SentenceEncoder, "warmup", lambda self, **options: seen.append(options))
    assert cli.main(["warmup", "--model", model, "--batch-size", "2", "--devices", "0", *given]) == 0
    common = {"batch_size": 2, "devices": [0], "show_progress_bar": True, "prompt": None, "prompt_name": None}
    defaults = common | {"normalize_embeddings": False, "precision": "float32"}
    assert [defaults | options for options in seen] == [defaults | options for options in expected]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rerank", "--truncate-dim", "3"], "--normalize and --truncate-dim have no meaning for rerank"),
        (["rerank", "--normalize"], "--normalize and --truncate-dim have no meaning for rerank"),
        (["rerank", "--precision", "int8"], "--precision has no meaning for rerank"),
        (["similar", "--precision", "int8"], "--precision has no meaning for similar"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused(given, message, monkeypatch, capsys):
    monkeypatch.delenv("JAXFT_COMPILATION_CACHE", raising=False)
    assert cli.main(["warmup", "--model", "m", "--for", *given]) == 2
    assert message in capsys.readouterr().err


LOADERS = [BertModel, BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification, SentenceEncoder,
           CrossEncoder, SparseEncoder, MultiVectorEncoder]  # fmt: skip


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_options_of_a_download_reach_the_hub(loader, monkeypatch, tmp_path):
    def download(name, **options):
        seen.append((name, options["revision"], str(options["cache_dir"]), options["local_files_only"]))
        raise OSError("no such model")

    seen = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for local in (True, False):
        with pytest.raises(CheckpointError, match="could not be obtained") as error:
            loader.from_pretrained("owner/name", revision="v1", cache_dir=tmp_path, local_files_only=local)
        assert ("without local_files_only" in str(error.value)) == local
    assert seen == [("owner/name", "v1", str(tmp_path), True), ("owner/name", "v1", str(tmp_path), False)]


@pytest.mark.parametrize("command", ["encode - -o out.npy", "similar texts.txt rain", "rerank rain texts.txt"])
def test_revision_of_the_command_line_reaches_the_hub(command, monkeypatch, tmp_path, capsys):
    def download(name, **options):
        seen.append((name, options["revision"]))
        raise OSError("no such model")

    seen = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("rain\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"rain\n")))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert cli.main([*command.split(), "--model", "owner/name", "--revision", "v1"]) == 2
    assert seen == [("owner/name", "v1")] and "could not be obtained" in capsys.readouterr().err


@pytest.mark.parametrize("loader", LOADERS[:4], ids=lambda loader: loader.__name__)
def test_options_of_a_folder_reach_the_model(loader, model):
    options = {"dtype": "bfloat16", "param_dtype": "float16", "implementation": "triton", "remat": True}
    head = {} if loader is BertModel else {"rngs": nnx.Rngs(0)}
    found = loader.from_pretrained(model, **options, **head)
    encoder = found if loader is BertModel else found.bert
    own = encoder.embeddings.options
    assert (own.dtype.name, own.param_dtype.name, own.implementation, encoder.remat) == (*options.values(),)
    assert {p.dtype.name for p in jax.tree.leaves(nnx.state(found, nnx.Param))} == {"float16"}


def test_options_of_the_encoders_reach_their_parts(model, tmp_path, calls):
    encoder = SentenceEncoder.from_pretrained(model, implementation="xla", dtype="bfloat16", packed=True)
    assert len(encoder.buckets(2)) > 0
    padded = SentenceEncoder.from_pretrained(model, packed=False)
    assert padded.buckets(2) == []
    np.testing.assert_allclose(np.linalg.norm(padded.encode(TEXTS, normalize_embeddings=True), axis=1), 1.0, rtol=1e-5)
    encoder.encode(TEXTS, batch_size=1)
    assert {(call.implementation, call.dtype) for call in calls} == {(None, "float32"), ("xla", "bfloat16")}
    folder = tmp_path / "cross"
    folder.mkdir()
    scorer = CrossEncoder.from_pretrained(tiny.write_classifier(folder), implementation="xla", max_length=9)
    assert scorer.max_seq_length == 9 and scorer.model.bert.embeddings.options.implementation == "xla"
    calls.clear()
    scorer.rank("a bird", TEXTS, batch_size=2)
    assert max(call.rows for call in calls) == 2


FOLDERS = {SentenceEncoder: "modules", CrossEncoder: "one label", SparseEncoder: "splade",
           MultiVectorEncoder: "colbert"}  # fmt: skip


@pytest.mark.parametrize("loader", FOLDERS, ids=lambda loader: loader.__name__)
def test_options_of_a_folder_reach_the_encoder(loader, tmp_path, calls):
    """The options win over the files, and the parameters and programs follow them."""
    folder = peer_models.write(tmp_path / "model", FOLDERS[loader])
    length = "max_length" if loader is CrossEncoder else "max_seq_length"
    options = {length: 9, "prompts": {"query": "old ", "own": "a "}, "default_prompt_name": "own", "packed": True}
    options |= {} if loader is CrossEncoder else {
        "similarity_fn_name": "meanmaxsim" if loader is MultiVectorEncoder else "manhattan"}  # fmt: skip
    encoder = loader.from_pretrained(folder, dtype="bfloat16", implementation="xla", **options)
    assert encoder.max_seq_length == 9 and encoder._packed is True
    assert (encoder.prompts["query"], encoder.prompts["own"], encoder.default_prompt_name) == ("old ", "a ", "own")
    if loader is not CrossEncoder:
        assert encoder.similarity_fn_name == options["similarity_fn_name"]
    encoder.predict([("a bird", "rain")]) if loader is CrossEncoder else encoder.encode(TEXTS)
    assert {(call.implementation, call.dtype) for call in calls} == {("xla", "bfloat16")}
    parameters = bert.named_parameters(encoder.model).items()
    assert {parameter.dtype.name for name, parameter in parameters if "modules" not in name} == {"bfloat16"}
    calls.clear()
    encoder = loader.from_pretrained(folder)
    encoder.predict([("a bird", "rain")]) if loader is CrossEncoder else encoder.encode(TEXTS)
    assert {(call.implementation, call.dtype) for call in calls} == {(None, "float32")} and encoder._packed is False


def precisions(jaxpr):
    """Yields the precision of each matmul in a program, also of those inside of other programs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in jax.tree.leaves([*equation.params.values()]):
            if hasattr(value := getattr(value, "jaxpr", value), "eqns"):
                yield from precisions(value)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jax.numpy.float32)


WITH_PRECISION = {
    "dense": (functools.partial(jaxft.dense, activation="gelu"), f32(32, 64), f32(64, 128), f32(128)),
    "dense with a gate": (functools.partial(jaxft.dense, activation="gelu", gate="first"), f32(32, 64), f32(64, 128)),
    "dense_rotary": (
        lambda *arrays, **options: jaxft.dense_rotary(*arrays, np.arange(16), num_heads=2, **options),
        f32(2, 16, 64), f32(64, 192), f32(192),
    ),
    "dense_residual_layer_norm": (
        jaxft.dense_residual_layer_norm, f32(32, 64), f32(64, 128), f32(128), f32(32, 128), f32(128), f32(128)
    ),
    "feed_forward_residual_layer_norm": (
        jaxft.feed_forward_residual_layer_norm, f32(32, 64), f32(64, 128), f32(128), f32(128, 64), f32(64), f32(64),
        f32(64),
    ),
}  # fmt: skip
OF_XLA = {
    "linear_cross_entropy": (
        lambda *arrays, **options: jaxft.linear_cross_entropy(*arrays, np.arange(32), **options).mean,
        f32(32, 64), f32(128, 64),
    ),
    "contrastive_loss": (
        lambda *arrays, implementation, **options: contrastive_loss(*arrays, **options).mean,
        f32(32, 64), f32(32, 64), f32(32, 2, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*itertools.product(WITH_PRECISION, ["xla", "triton", None]), *itertools.product(OF_XLA, ["xla"])],
)
def test_precision_reaches_every_matmul(name, implementation):
    """A CPU multiplies float32 in full precision anyway. Without an implementation, the op is traced for a GPU."""
    op, *arrays = (WITH_PRECISION | OF_XLA)[name]

    def found(precision):
        def total(*arrays):
            return jax.numpy.sum(op(*arrays, precision=precision, implementation=implementation))

        on = dispatch.target() if implementation is None else contextlib.nullcontext()
        with jax.default_matmul_precision("default"), on:
            program = jax.make_jaxpr(jax.grad(total, argnums=range(len(arrays))))(*arrays)
        return [*precisions(program.jaxpr)]

    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert len(found("highest")) > 2 and {*found("highest")} == {highest} and highest not in found(None)
