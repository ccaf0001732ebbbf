"""Exported folders: the same bits, no tracing, and what is refused. On a GPU the programs have kernels."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
import peer_models
import tiny
from cases import INTERPRET, slow
from jaxft import CrossEncoder, MultiVectorEncoder, SentenceEncoder, SparseEncoder, dispatch
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import quantize
from jaxft.models.bert import BertConfig, BertModel
from jaxft.text import exported, programs
from jaxft.text.cross_encoder import ACTIVATIONS
from test_saving import PAIRS, TEXTS, bert, content, embedder, modular_scorer, scorer

pytest.importorskip("flatbuffers")

SIZE = {"batch_size": 2}


def with_instructions():
    """Returns an encoder whose pooling leaves the prompt out, so that a prompt needs another program."""
    return embedder(include_prompt=False)


def padded(**options):
    """Returns an encoder that pads batches, as `embedder()` does on a CPU. On a GPU, it packs them."""
    return embedder(packed=False, **options)


def in_float8():
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    model = quantize(BertModel(tiny.config(**sizes), dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0)))
    return SentenceEncoder(model, tiny.bert_tokenizer(), max_seq_length=16)


def packed():
    return SentenceEncoder(bert(), tiny.bert_tokenizer(), max_seq_length=64, packed=True)


def colbert(folder):
    path = peer_models.write(folder / "colbert", "colbert")
    encoder = MultiVectorEncoder.from_pretrained(path, max_seq_length=16)
    encoder.query_expansion = {"strategy": "fixed", "length": 8, "attend": False}
    return encoder


def splade(folder):
    return SparseEncoder.from_pretrained(peer_models.write(folder / "splade", "splade"), max_seq_length=16)


def numbers(encoder):
    """Returns arrays that depend on every program of an encoder."""
    if isinstance(encoder, CrossEncoder):
        return [encoder.predict(PAIRS, **SIZE), encoder.predict(PAIRS, prompt="rain ", **SIZE)]
    options = SIZE | ({"convert_to_sparse_tensor": False} if isinstance(encoder, SparseEncoder) else {})
    found = [encoder.encode(TEXTS, prompt=prompt, **options) for prompt in ("", "rain ")]
    found += [encoder.encode_query(TEXTS, **options), encoder.encode_document(TEXTS, **options)]
    return [np.asarray(x) for part in found for x in (part if isinstance(part, list) else [part])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "folder"
    padded().export(path, **SIZE)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """Returns a copy of an exported folder, which may be damaged."""
    for name, data in content(folder).items():
        if data is not None:
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / name).write_bytes(data)
    return tmp_path / "copy"


# --- What it computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [packed, scorer, colbert, in_float8, *slow(embedder, with_instructions, modular_scorer, splade)]
)
def test_exported_folder_gives_the_same_bits(make, tmp_path):
    encoder = make(tmp_path) if make in (colbert, splade) else make()
    encoder.export(tmp_path / "folder", **SIZE)
    loaded = type(encoder).from_exported(tmp_path / "folder")
    for found, expected in zip(numbers(loaded), numbers(encoder), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("make", [packed, scorer, colbert, *slow(with_instructions, splade)])
def test_exported_programs_are_compiled_without_timing(make, tmp_path, monkeypatch):
    """Programs that are compiled with options replace the exported functions, as on a GPU."""
    monkeypatch.setattr(programs, "_options", lambda *_: programs._WITHOUT_TIMING)
    encoder = make(tmp_path) if make in (colbert, splade) else make()
    encoder.export(tmp_path / "folder", **SIZE)
    loaded = type(encoder).from_exported(tmp_path / "folder")
    monkeypatch.setattr(exported.Programs, "__call__", None)
    for found, expected in zip(numbers(loaded), numbers(encoder), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_exported_reranker_takes_every_activation(num_labels, tmp_path):
    """The program computes the encoder's own activation. Others are computed from the program's logits."""
    encoder = scorer(num_labels, activation_fn=ACTIVATIONS["Tanh"])
    encoder.export(tmp_path, **SIZE)
    loaded = CrossEncoder.from_exported(tmp_path)
    with mock.patch.object(dispatch, "to_device", None):  # neither the activation nor anything else comes afterwards
        np.testing.assert_array_equal(loaded.predict(PAIRS, **SIZE), encoder.predict(PAIRS, **SIZE))
    loaded.warmup(**SIZE, activation_fn=ACTIVATIONS["Sigmoid"])
    for options in (
        {"activation_fn": ACTIVATIONS["Sigmoid"]},
        {"apply_softmax": True},
        {"activation_fn": lambda x: x + 1},
    ):
        found, expected = (x.predict(PAIRS, **options, **SIZE) for x in (loaded, encoder))
        np.testing.assert_allclose(found, expected, rtol=1e-6, strict=True)
    for x in (loaded, encoder):
        x.activation_fn = ACTIVATIONS["Identity"]
    np.testing.assert_array_equal(loaded.predict(PAIRS, **SIZE), encoder.predict(PAIRS, **SIZE))


def test_exported_options_are_those_of_encode(tmp_path):
    encoder = packed()
    for options in ({"output_value": None}, {"normalize_embeddings": True, "truncate_dim": 3}):
        encoder.export(tmp_path, **SIZE, **options)
        loaded = SentenceEncoder.from_exported(tmp_path)
        found, expected = (x.encode(TEXTS, prompt="the ", **SIZE, **options) for x in (loaded, encoder))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
        with pytest.raises(ValueError, match=r"has no program for .*: it was exported with batch_size=2, normal"):
            loaded.encode(TEXTS, **SIZE)


@pytest.mark.parametrize("precision", ["int8", "ubinary"])
def test_exported_precision(precision, tmp_path):
    """Ranges may be given, or come from the embeddings of texts, which then need the programs of float32."""
    encoder = embedder()
    encoder.export(tmp_path, **SIZE, precision=precision)
    loaded = SentenceEncoder.from_exported(tmp_path)
    calls = [{}, {"calibration": TEXTS}, {"ranges": np.stack([-np.ones(5), np.ones(5)])}]
    for options in calls if precision == "int8" else [{}]:
        found, expected = (x.encode(TEXTS, precision=precision, **options, **SIZE) for x in (loaded, encoder))
        np.testing.assert_array_equal(found, expected, strict=True)
    with pytest.raises(ValueError, match="precision must be one of .*, got 'int4'"):
        encoder.export(tmp_path, precision="int4")


def test_program_that_changes_after_loading_is_refused(copy):
    encoder = SentenceEncoder.from_exported(copy)
    padded().export(copy, **SIZE, normalize_embeddings=True)
    with pytest.raises(CheckpointError, match="has changed since the encoder was loaded"):
        encoder.encode(TEXTS, **SIZE)


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_new_weights_count(dtype, tmp_path):
    """The weights are arguments of the programs, in the dtype of the encoder."""
    model = BertModel(tiny.config(), dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    encoder = SentenceEncoder(model, tiny.bert_tokenizer(), max_seq_length=16)
    encoder.export(tmp_path, **SIZE)
    loaded = SentenceEncoder.from_exported(tmp_path)
    before = loaded.encode(TEXTS, **SIZE)
    for each in (encoder, loaded):
        word = each.model.embeddings.word
        word.set_value(word[...] * 2)
    assert not np.array_equal(loaded.encode(TEXTS, **SIZE), before)
    np.testing.assert_array_equal(loaded.encode(TEXTS, **SIZE), encoder.encode(TEXTS, **SIZE))
    assert all(file.stat().st_size < 150_000 for file in (tmp_path / "programs").iterdir())


LOAD = """
import sys
import numpy as np
from jaxft import SentenceEncoder
from jaxft.models.bert import BertModel

def refuse(*_, **__):
    raise AssertionError("the model was traced")

BertModel.__call__ = refuse
path, result, batch_size, *texts = sys.argv[1:]
encoder = SentenceEncoder.from_exported(path)
np.save(result, encoder.encode(texts, batch_size=int(batch_size)))
try:
    SentenceEncoder.from_pretrained(path).encode(texts)
except AssertionError:
    print("refused to trace")
"""


def in_a_new_process(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_process_computes_without_tracing(folder, tmp_path):
    assert "refused to trace" in in_a_new_process(LOAD, folder, tmp_path / "x.npy", 2, *TEXTS)
    # On a GPU, XLA times the algorithms of its matmuls in each process anew, and may choose others.
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), padded().encode(TEXTS, **SIZE), rtol=0, atol=1e-6)


@pytest.mark.parametrize("load", [lambda _: padded(), SentenceEncoder.from_exported], ids=["jitted", "exported"])
def test_threads_get_the_bits_of_one(load, folder):
    """Eight threads call one encoder that has computed nothing yet, with texts of different shapes."""
    encoder, start = load(folder), threading.Barrier(8)

    def work(i):
        start.wait()
        return [encoder.encode(TEXTS[i % 3 :], **SIZE) for _ in range(3)]

    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(work, range(8))]
    alone = padded()
    for i, results in enumerate(found):
        for result in results:
            np.testing.assert_array_equal(result, encoder.encode(TEXTS[i % 3 :], **SIZE))
        # The other encoder has compiled programs of its own, for which XLA may choose other algorithms on a GPU.
        np.testing.assert_allclose(results[0], alone.encode(TEXTS[i % 3 :], **SIZE), rtol=0, atol=1e-6)


# --- What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jaxft", "jax", "jaxlib"])
def test_other_versions_are_refused_by_name(name, folder, monkeypatch):
    if name == "jaxlib":
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9")
    else:
        monkeypatch.setattr(*{"jax": (jax, "__version__"), "jaxft": (exported, "__version__")}[name], "9.9")
    with pytest.raises(CheckpointError, match=rf"exported\.json: was exported for the {name} '.*', here is '9\.9'"):
        SentenceEncoder.from_exported(folder)


@pytest.mark.parametrize("here", ["NVIDIA H200", *[None] * INTERPRET])
def test_other_devices_are_refused_by_name(here, tmp_path):
    """`here` is the kind of the device that loads the folder. None is this CPU."""
    with dispatch.target("NVIDIA H100 80GB HBM3"):
        packed().export(tmp_path, batch_size=1)
    found = "platform 'cuda', here is 'cpu'" if here is None else f"device 'NVIDIA H100 80GB HBM3', here is '{here}'"
    with (
        contextlib.nullcontext() if here is None else dispatch.target(here),
        pytest.raises(CheckpointError, match=f"was exported for the {found}"),
    ):
        SentenceEncoder.from_exported(tmp_path)


@pytest.mark.parametrize("name", [
    "model.safetensors", "2_Dense/model.safetensors", "programs/0.stablehlo", "tokenizer.json", "config.json",
    "config_sentence_transformers.json", "exported.json",
])  # fmt: skip
def test_changed_files_are_refused_by_name(name, copy):
    data = bytearray((copy / name).read_bytes())
    data[-20] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        SentenceEncoder.from_exported(copy)
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        SentenceEncoder.from_exported(copy)


def test_a_changed_record_is_refused(copy):
    text = (copy / "exported.json").read_text()
    for old, new in (('"batch_size": 2', '"batch_size": 4'), ('"packed": false', '"packed": true')):
        (copy / "exported.json").write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match=r"exported\.json is not as export has written it"):
            SentenceEncoder.from_exported(copy)


def test_a_changed_model_card_does_not_matter(copy):
    (copy / "README.md").unlink()
    SentenceEncoder.from_exported(copy)


def test_subclass_loads_what_its_class_has_exported(folder):
    class Own(SentenceEncoder):
        pass

    loaded = Own.from_exported(folder)
    assert type(loaded) is Own
    np.testing.assert_array_equal(loaded.encode(TEXTS, **SIZE), padded().encode(TEXTS, **SIZE))


def test_wrong_arguments_are_named(folder, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"exported from SentenceEncoder, got from_exported of CrossEncoder"):
        CrossEncoder.from_exported(folder)
    with pytest.raises(TypeError, match="from_exported: path must be a string or path, got int"):
        SentenceEncoder.from_exported(3)
    with pytest.raises(CheckpointError, match=r"must be a folder that SentenceEncoder\.export has written"):
        SentenceEncoder.from_exported(tmp_path)
    for options, message in (
        ({"batch_size": 0}, "export: batch_size must be a positive integer, got 0"),
        ({"truncate_dim": 0}, "export: truncate_dim must be None or a positive integer, got 0"),
        ({"output_value": "x"}, "export: output_value must be one of .* got 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            embedder().export(tmp_path, **options)
    with pytest.raises(TypeError, match="export: path must be a string or path, got int"):
        scorer().export(3)
    with pytest.raises(NotADirectoryError, match="export: path must not be a file"):
        scorer().export(folder / "config.json")
    with pytest.raises(ValueError, match="export: activation_fn must be a function that files can name"):
        scorer(activation_fn=jnp.sin).export(tmp_path)
    encoder = SentenceEncoder(BertModel(tiny.config(), rngs=nnx.Rngs(0)), tiny.bert_tokenizer(), max_seq_length=16)
    bias = encoder.model.layers[0].out_bias
    bias.set_value(bias[...].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"export: the parameter .*out_bias must be float32, .* got bfloat16"):
        encoder.export(tmp_path)
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    model = quantize(BertModel(tiny.config(**sizes), dtype="bfloat16", rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"export: the parameter .* must be bfloat16, as it is loaded, got float32"):
        SentenceEncoder(model, tiny.bert_tokenizer(), max_seq_length=16).export(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for call, name in ((scorer().export, "export"), (SentenceEncoder.from_exported, "from_exported")):
        with pytest.raises(ImportError, match=rf"^{name} needs flatbuffers.*jaxft\[export\]"):
            call(folder)
    assert not [*tmp_path.iterdir()]


# --- Files ---------------------------------------------------------------------------------------------------------


def test_a_later_export_replaces_the_files(copy):
    encoder = padded(max_seq_length=32)
    encoder.export(copy, **SIZE)
    assert len([*(copy / "programs").iterdir()]) == 4
    encoder.export(copy, batch_size=np.int64(1))
    assert len([*(copy / "programs").iterdir()]) == 2
    assert len(SentenceEncoder.from_exported(copy).encode(TEXTS, batch_size=1)) == len(TEXTS)
    encoder.save_pretrained(copy)
    assert not {"programs", "exported.json"} & content(copy).keys()


def test_a_failed_export_changes_nothing(copy, monkeypatch):
    before = content(copy)
    monkeypatch.setattr(exported, "_sha256", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        embedder(max_seq_length=32).export(copy, **SIZE)
    assert content(copy) == before
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="cannot write .*: No space left on device"):
        embedder(max_seq_length=32).export(copy, **SIZE)
    monkeypatch.undo()
    assert content(copy) == before
    SentenceEncoder.from_exported(copy)


# --- Kernels -------------------------------------------------------------------------------------------------------


def wide_encoder(**options):
    """Returns an encoder in bfloat16 whose full batches run Mosaic GPU kernels on Hopper, and others Triton kernels."""
    config = BertConfig(
        vocab_size=len(tiny.VOCAB), hidden_size=768, num_hidden_layers=1, num_attention_heads=12,
        intermediate_size=3072, max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0))
    return SentenceEncoder(model, tiny.bert_tokenizer(), max_seq_length=32, **options)


def test_export_for_a_gpu_has_its_kernels(tmp_path):
    with dispatch.target("NVIDIA H100 80GB HBM3"):
        wide_encoder().export(tmp_path)
    programs = [jax.export.deserialize(bytearray(file.read_bytes())) for file in (tmp_path / "programs").iterdir()]
    kernels = [b"xla.gpu.triton" in x.mlir_module_serialized for x in programs]
    assert all(kernels) and all(x.platforms == ("cuda",) for x in programs)
    assert 0 < sum(b"mosaic_gpu_v2" in x.mlir_module_serialized for x in programs) < len(programs)
    load = json.loads((tmp_path / "exported.json").read_text())["load"]
    assert load == {"dtype": "bfloat16", "implementation": None, "packed": True}


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_kernels_can_be_exported_with_the_disabled_checks(implementation):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (256, 256), (256,))]

    def layer(*arrays):
        return jaxft.dense(*arrays, activation="gelu", implementation=implementation)

    with dispatch.target("NVIDIA H100 80GB HBM3"), dispatch.lowering():
        jax.export.export(jax.jit(layer), platforms=["cuda"], disabled_checks=jaxft.EXPORT_DISABLED_CHECKS)(*arrays)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX lowers for this card")
def test_cards_that_jax_cannot_lower_for_are_named(tmp_path):
    with dispatch.target("NVIDIA A100-SXM4-80GB", (8, 0), multiprocessors=108):
        with pytest.raises(NotImplementedError, match=r"NVIDIA A100-SXM4-80GB has \(8, 0\); JAX 0\.11 lowers"):
            packed().export(tmp_path, batch_size=1)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(INTERPRET, reason="runs kernels of a GPU in a new process")
@pytest.mark.parametrize("options", [{"packed": True}, *slow({"packed": False})], ids=str)
def test_a_new_process_runs_the_kernels(options, tmp_path):
    encoder = wide_encoder(**options)
    encoder.export(tmp_path / "folder")
    texts = [*TEXTS, *("the old tree in the rain " * 20,) * 60]
    in_a_new_process(LOAD, tmp_path / "folder", tmp_path / "x.npy", 32, *texts)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), encoder.encode(texts))


RUN = """
import sys
import jax
import jax.experimental.mosaic.gpu
import numpy as np

program, arrays, result = sys.argv[1:]
call = jax.jit(jax.export.deserialize(bytearray(open(program, "rb").read())).call)
arrays = [x.view(jax.numpy.bfloat16) for x in np.load(arrays).values()]
np.save(result, np.asarray(call(*arrays)).astype(np.float32))
"""


@pytest.mark.skipif(INTERPRET, reason="runs kernels of a GPU in a new process")
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu", "cudnn"])
def test_a_new_process_runs_each_backend(implementation, tmp_path):
    if reason := dispatch.machine_reason(implementation, dispatch.device()):
        pytest.skip(reason)
    shapes = ((2, 256, 4, 64),) * 3 if implementation == "cudnn" else ((256, 256), (256, 256), (256,))
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    op = jaxft.dot_product_attention if implementation == "cudnn" else jaxft.dense
    run = jax.jit(lambda *arrays: op(*arrays, implementation=implementation))
    program = jax.export.export(run, disabled_checks=jaxft.EXPORT_DISABLED_CHECKS)(*arrays)
    (tmp_path / "program").write_bytes(program.serialize())
    np.savez(tmp_path / "arrays.npz", *(np.asarray(x).view(np.uint16) for x in arrays))
    in_a_new_process(RUN, tmp_path / "program", tmp_path / "arrays.npz", tmp_path / "x.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), np.asarray(run(*arrays)).astype(np.float32))
