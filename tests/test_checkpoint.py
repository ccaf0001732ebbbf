"""Checkpoints of every layout against an independent forward pass in NumPy, and all kinds of wrong checkpoints."""

import errno
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

from jaxft.checkpoint import tensors as checkpoint_tensors
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertConfig, BertModel

VOCAB, WIDTH, LAYERS, HEADS, INNER, POSITIONS = 31, 12, 2, 3, 20, 16
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_TYPES = ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"]

# Names of a layer and its parts, as transformers writes them.
BERT_NAMES = {
    "layer": "encoder.layer.{}.", "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "norm2": "output.LayerNorm",
}  # fmt: skip
DISTILBERT_NAMES = {
    "layer": "transformer.layer.{}.", "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin",
    "o": "attention.out_lin", "norm1": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2",
    "norm2": "output_layer_norm",
}  # fmt: skip


def names_of(model_type):
    return DISTILBERT_NAMES if model_type == "distilbert" else BERT_NAMES


def hf_config(model_type="bert"):
    if model_type == "distilbert":
        sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER, "activation": "gelu"}
    else:
        sizes = {
            "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu",
            "intermediate_size": INNER, "type_vocab_size": 2 if model_type == "bert" else 1,
            "layer_norm_eps": 0.05,  # large, so that another epsilon is noticed
        }  # fmt: skip
    return {"model_type": model_type, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, **sizes}


def hf_tensors(model_type="bert", dtype=np.float32, pooler=True):
    rng = np.random.default_rng(0)
    names, tensors = names_of(model_type), {}

    def random(*shape):
        return rng.normal(size=shape).astype(dtype)

    def linear(name, inputs, outputs):
        tensors[name + ".weight"] = random(outputs, inputs) / dtype(math.sqrt(inputs))
        tensors[name + ".bias"] = random(outputs)

    def norm(name):
        tensors[name + ".weight"], tensors[name + ".bias"] = random(WIDTH) + dtype(1), random(WIDTH)

    tensors["embeddings.word_embeddings.weight"] = random(VOCAB, WIDTH)
    tensors["embeddings.position_embeddings.weight"] = random(POSITIONS, WIDTH)
    if model_type != "distilbert":
        tensors["embeddings.token_type_embeddings.weight"] = random(2 if model_type == "bert" else 1, WIDTH)
    norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = names["layer"].format(i)
        for part in "qkvo":
            linear(layer + names[part], WIDTH, WIDTH)
        linear(layer + names["up"], WIDTH, INNER)
        linear(layer + names["down"], INNER, WIDTH)
        norm(layer + names["norm1"])
        norm(layer + names["norm2"])
    if pooler and model_type != "distilbert":
        linear("pooler.dense", WIDTH, WIDTH)
    return tensors


def write(folder, tensors, config=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)
    return folder


def write_sharded(folder, tensors, config=None, shards=3):
    write(folder, {}, config)
    (folder / WEIGHTS).unlink()
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        safetensors.numpy.save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def change_json(file, change):
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def forward(tensors, model_type, ids, mask, types):
    """Returns hidden states and pooler output (None without a pooler) of the encoder in NumPy, float64."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    names, epsilon = names_of(model_type), hf_config(model_type).get("layer_norm_eps", 1e-12)

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
        return x * t[name + ".weight"] + t[name + ".bias"]

    def linear(x, name):
        return x @ t[name + ".weight"].T + t[name + ".bias"]

    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    if model_type in ("roberta", "xlm-roberta", "camembert"):
        positions = np.where(ids == 1, 1, 1 + np.cumsum(ids != 1, axis=1))
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][positions]
    if model_type != "distilbert":
        x = x + t["embeddings.token_type_embeddings.weight"][types]
    states = [norm(x, "embeddings.LayerNorm")]
    for i in range(LAYERS):
        x, layer = states[-1], names["layer"].format(i)
        q, k, v = (linear(x, layer + names[part]).reshape(*ids.shape, HEADS, -1) for part in "qkv")
        scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(WIDTH // HEADS)
        scores = np.where(mask[:, None, None, :] != 0, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        a = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v).reshape(x.shape)
        x = norm(x + linear(a, layer + names["o"]), layer + names["norm1"])
        h = linear(x, layer + names["up"])
        h = 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        states.append(norm(x + linear(h, layer + names["down"]), layer + names["norm2"]))
    pooled = np.tanh(linear(states[-1][:, 0], "pooler.dense")) if "pooler.dense.weight" in t else None
    return np.stack(states), pooled


def parameters(model):
    return {path: np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(model))}


def assert_same(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype
        np.testing.assert_array_equal(value, theirs[path], err_msg=str(path))


# --- What can be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_layout_matches_numpy(tmp_path, model_type):
    tensors = hf_tensors(model_type)
    model = BertModel.from_pretrained(write(tmp_path, tensors, hf_config(model_type)), implementation="xla")
    rng = np.random.default_rng(1)
    ids, mask = rng.integers(2, VOCAB, (3, 9)), np.ones((3, 9), np.int64)
    types = rng.integers(0, tensors.get("embeddings.token_type_embeddings.weight", ids[:1]).shape[0], ids.shape)
    mask[0, 6:], mask[1, [0, 4]], mask[2, 8] = 0, 0, 0  # padding, and holes
    ids[0, 6:] = BertConfig.from_dict(hf_config(model_type)).pad_token_id
    states, pooled = forward(tensors, model_type, ids, mask, types)
    with jax.default_matmul_precision("highest"):
        out = model(ids, mask, None if model_type == "distilbert" else types, output_hidden_states=True)
    np.testing.assert_allclose(np.stack(out.hidden_states), states, rtol=0, atol=1e-5 * np.abs(states).max())
    np.testing.assert_array_equal(out.last_hidden_state, out.hidden_states[-1])
    if pooled is None:
        assert out.pooler_output is None
    else:
        np.testing.assert_allclose(out.pooler_output, pooled, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "prefix", "head"),
    [
        ("bert", "bert.", "cls.predictions.transform.dense.weight"),
        ("roberta", "roberta.", "lm_head.dense.bias"),
        ("xlm-roberta", "roberta.", "classifier.out_proj.weight"),
        ("camembert", "roberta.", "qa_outputs.weight"),
        ("distilbert", "distilbert.", "vocab_projector.bias"),
    ],
)
def test_prefixes_heads_and_buffers_are_ignored(tmp_path, model_type, prefix, head):
    tensors, config = hf_tensors(model_type), hf_config(model_type)
    tensors["embeddings.position_ids"] = np.arange(POSITIONS)[None]
    with_head = {prefix + name: value for name, value in tensors.items()}
    with_head[head] = np.ones((3, 5), np.int8)  # neither its shape nor its dtype matters
    plain = BertModel.from_pretrained(write(tmp_path / "plain", tensors, config))
    assert_same(plain, BertModel.from_pretrained(write(tmp_path / "head", with_head, config)))


def test_old_layer_norm_names(tmp_path):
    tensors = hf_tensors()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    assert old.keys() != tensors.keys()
    new = BertModel.from_pretrained(write(tmp_path / "new", tensors))
    assert_same(new, BertModel.from_pretrained(write(tmp_path / "old", old)))


def test_shards(tmp_path):
    tensors = hf_tensors()
    single = BertModel.from_pretrained(write(tmp_path / "single", tensors))
    sharded = write_sharded(tmp_path / "sharded", tensors)
    assert_same(single, BertModel.from_pretrained(str(sharded)))
    # The files in Hugging Face's cache are links to a folder of blobs.
    (tmp_path / "links").mkdir()
    for file in sharded.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert_same(single, BertModel.from_pretrained(tmp_path / "links"))


def test_checkpoint_without_pooler(tmp_path):
    model = BertModel.from_pretrained(write(tmp_path, hf_tensors(pooler=False)))
    assert model.pooler is None
    assert model(np.ones((1, 2), np.int32)).pooler_output is None


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("loaded", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_dtypes(tmp_path, stored, loaded):
    tensors = hf_tensors(dtype=stored)
    model = BertModel.from_pretrained(write(tmp_path, tensors), dtype=loaded)
    got = parameters(model)
    assert {value.dtype for value in got.values()} == {jnp.dtype(loaded)}
    layer = "encoder.layer.1.attention.self."
    packed = np.concatenate([tensors[f"{layer}{part}.weight"].T for part in ("query", "key", "value")], axis=1)
    np.testing.assert_array_equal(got["layers", 1, "qkv_kernel"], packed.astype(loaded))


# --- What is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_save_restores_the_file(tmp_path, model_type):
    tensors, config = hf_tensors(model_type), hf_config(model_type)
    model = BertModel.from_pretrained(write(tmp_path / "a", tensors, config))
    model.save_pretrained(tmp_path / "new" / "b")
    saved = safetensors.numpy.load_file(tmp_path / "new" / "b" / WEIGHTS)
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert config.items() <= json.loads((tmp_path / "new" / "b" / "config.json").read_text()).items()
    with safetensors.safe_open(tmp_path / "new" / "b" / WEIGHTS, "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # transformers insists on it
    assert_same(model, BertModel.from_pretrained(tmp_path / "new" / "b"))


@pytest.mark.filterwarnings("default")  # torch and transformers warn
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_reads_saved_checkpoints(tmp_path, model_type):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = BertModel.from_pretrained(write(tmp_path / "a", hf_tensors(model_type), hf_config(model_type)))
    model.save_pretrained(tmp_path / "b")
    theirs, info = transformers.AutoModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())  # nothing missing, unexpected or of another shape
    ids = np.random.default_rng(1).integers(5, VOCAB, (3, 9))
    mask = np.arange(9) < np.array([[9], [4], [1]])
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids), torch.tensor(mask.astype(np.int64))).last_hidden_state.numpy()
    actual = np.asarray(model(ids, mask).last_hidden_state)
    np.testing.assert_allclose(actual[mask], expected[mask], rtol=0, atol=1e-5)


def test_round_trip_of_low_precision(tmp_path):
    model = BertModel(BertConfig.from_dict(hf_config()), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path)
    assert_same(model, BertModel.from_pretrained(tmp_path, param_dtype=jnp.bfloat16))


def test_save_removes_the_weights_of_a_float8_model(tmp_path):
    (tmp_path / "model_float8.safetensors").write_bytes(b"old")
    (tmp_path / "other.safetensors").write_bytes(b"not of jaxft")
    BertModel.from_pretrained(write(tmp_path, hf_tensors())).save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {"model.safetensors", "other.safetensors"}


def test_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = BertModel.from_pretrained(write(tmp_path, hf_tensors()))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_save_on_a_full_disk_names_the_file(tmp_path):
    """A limit on the size of files stands for the full disk."""
    model = BertModel.from_pretrained(write(tmp_path, hf_tensors()))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size, name in ((1000, WEIGHTS), (10, "config.json")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match=rf"cannot write {tmp_path / name}: .*File too large") as raised:
                model.save_pretrained(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert raised.value.errno == errno.EFBIG
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_killed_saves_leave_nothing_after_the_next_one(tmp_path):
    code = """
import os, pathlib, signal, sys
import numpy as np, safetensors.numpy
from jaxft.checkpoint import tensors
save = safetensors.numpy.save_file
def killed(*arguments, **options):
    save(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
safetensors.numpy.save_file = killed
tensors.write(pathlib.Path(sys.argv[1]), {"config.json": {}, "model.safetensors": {"a": np.zeros(1000)}})
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path])
    assert done.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    BertModel(BertConfig.from_dict(hf_config()), rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", WEIGHTS]


def test_interrupted_save_leaves_no_mixed_files(tmp_path, monkeypatch):
    """The weights of one model would load with the config.json of another model."""
    replace, model = os.replace, BertModel.from_pretrained(write(tmp_path, hf_tensors()))
    other = BertModel(BertConfig.from_dict(hf_config()), rngs=nnx.Rngs(1))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def interrupted(source, target):
        if Path(target).name == "config.json":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.save_pretrained(tmp_path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    for link in (os.link, mock.Mock(side_effect=OSError("no links"))):  # some file systems have none
        monkeypatch.setattr(os, "link", link)
        model.save_pretrained(tmp_path)
        other.save_pretrained(tmp_path)
        assert_same(other, BertModel.from_pretrained(tmp_path))
        assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_saved_files_follow_the_umask(tmp_path, umask):
    model = BertModel(BertConfig.from_dict(hf_config()), rngs=nnx.Rngs(0))
    previous = os.umask(umask)
    try:
        model.save_pretrained(tmp_path)
    finally:
        os.umask(previous)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o666 & ~umask}


def test_shapes_without_values_are_not_saved(tmp_path):
    model = BertModel(BertConfig.from_dict(hf_config()), rngs=None)
    with pytest.raises(ValueError, match=r"save_pretrained: the model's parameters have no values yet, only shapes"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_save_needs_a_folder(tmp_path):
    model, file = BertModel(BertConfig.from_dict(hf_config()), rngs=nnx.Rngs(0)), tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(TypeError, match=r"save_pretrained: folder must be a string or path, got NoneType"):
        model.save_pretrained(None)
    with pytest.raises(NotADirectoryError, match=r"save_pretrained: folder must not be a file, got .*file"):
        model.save_pretrained(file)
    assert file.read_text() == "kept"


# --- What is refused ---------------------------------------------------------------------------------------------


def refused(folder, *fragments):
    with pytest.raises(CheckpointError) as caught:
        BertModel.from_pretrained(folder)
    message = str(caught.value)
    assert str(folder) in message
    rest = message.replace(str(folder), "")  # a test's folder has the test's name
    assert all(fragment in rest for fragment in fragments), message
    return message


def test_all_problems_at_once(tmp_path):
    tensors = hf_tensors()
    del tensors["encoder.layer.1.output.dense.weight"]
    del tensors["pooler.dense.bias"]
    tensors["encoder.layer.2.output.dense.bias"] = np.zeros(WIDTH, np.float32)
    tensors["encoder.layer.0.attention.self.key.weight"] = np.zeros((WIDTH, WIDTH + 1), np.float32)
    tensors["embeddings.LayerNorm.bias"] = np.zeros(WIDTH, np.int32)
    message = refused(
        write(tmp_path, tensors),
        "model.safetensors: 'encoder.layer.1.output.dense.weight' is missing",
        "model.safetensors: 'pooler.dense.bias' is missing",
        "model.safetensors: 'encoder.layer.2.output.dense.bias': is unexpected",
        "model.safetensors: 'encoder.layer.0.attention.self.key.weight': has shape [12, 13], expected [12, 12]",
        "model.safetensors: 'embeddings.LayerNorm.bias': has dtype I32, expected one of F32, F16, BF16, F64",
    )
    assert len(message.splitlines()) == 6


def test_missing_names_carry_the_prefix(tmp_path):
    tensors = {"bert." + name: value for name, value in hf_tensors().items()}
    del tensors["bert.embeddings.LayerNorm.bias"]
    refused(write(tmp_path, tensors), "'bert.embeddings.LayerNorm.bias' is missing")


def test_weights_may_be_larger_than_other_files(tmp_path):
    size = 101_000_000
    header = json.dumps({"huge": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    file = write(tmp_path, {}) / WEIGHTS
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)
    refused(tmp_path, f"{WEIGHTS}: 'huge': is unexpected")


def test_long_lists_are_cut(tmp_path):
    tensors = hf_tensors() | {f"extra.{i}" + "x" * 5000: np.zeros(1, np.float32) for i in range(300)}
    message = refused(write(tmp_path, tensors), "... and 250 more")
    assert len(message) < 50_000


def test_duplicate_tensor_is_refused(tmp_path):
    tensors = hf_tensors()
    tensors["bert.pooler.dense.bias"] = tensors["pooler.dense.bias"]
    refused(write(tmp_path, tensors), "'pooler.dense.bias': is the same tensor as 'bert.pooler.dense.bias'")


def test_tensors_are_checked_before_any_is_read(tmp_path, monkeypatch):
    tensors = hf_tensors()
    folder = write_sharded(tmp_path, tensors)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])

    class Reader:
        def __init__(self, file, framework):
            self.inner = safe_open(file, framework=framework)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *exception):
            return self.inner.__exit__(*exception)

        def __getattr__(self, name):
            assert name != "get_tensor"
            return getattr(self.inner, name)

    safe_open = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Reader)
    message = refused(folder, last.name)
    assert "missing" not in message  # it cannot be known what the damaged file held


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1000, -1])
def test_truncated_file(tmp_path, size):
    file = write(tmp_path, hf_tensors()) / WEIGHTS
    file.write_bytes(file.read_bytes()[:size])
    refused(tmp_path, WEIGHTS)


def test_git_lfs_pointer(tmp_path):
    write(tmp_path, hf_tensors())
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(tmp_path, WEIGHTS, "git lfs pull")


@pytest.mark.parametrize("seed", range(40))
def test_corrupted_bytes(tmp_path, seed):
    """Damage to the header is noticed or harmless. Damage to the values cannot be noticed, but changes no shape."""
    rng = np.random.default_rng(seed)
    tensors = hf_tensors()
    file = (write if seed % 2 else write_sharded)(tmp_path, tensors) / WEIGHTS
    if not seed % 2:
        file = sorted(tmp_path.glob("*.safetensors"))[seed % 3]
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.integers(1, 4)):
        data[rng.integers(0, header if seed % 4 else 8)] = rng.integers(0, 256)
    file.write_bytes(data)
    config = BertConfig.from_dict(hf_config())
    state = nnx.to_flat_state(nnx.state(BertModel(config, rngs=None)))
    shapes = {".".join(map(str, path)): parameter.shape for path, parameter in state}
    try:
        loaded = checkpoint_tensors.load(tmp_path, "bert", shapes, np.float32)
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
    else:
        assert {name: value.shape for name, value in loaded.items()} == shapes


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", "a\\b.safetensors",
     "C:x.safetensors", "model.bin", "x\0.safetensors", ".hidden.safetensors", 5, None, ["model.safetensors"]],
)  # fmt: skip
def test_shard_outside_the_folder_is_refused(tmp_path, shard):
    folder = write_sharded(tmp_path / "folder", hf_tensors())
    safetensors.numpy.save_file(hf_tensors(), tmp_path / WEIGHTS)  # the file that ".." would find
    change_json(folder / INDEX, lambda index: index["weight_map"].update({"pooler.dense.bias": shard}))
    refused(folder, INDEX, "'pooler.dense.bias'", repr(shard), "no plain name of a safetensors file")


def test_index_disagrees_with_the_shards(tmp_path):
    folder = write_sharded(tmp_path, hf_tensors())
    first, second, _ = sorted(file.name for file in folder.glob("*.safetensors"))

    def swap(index):
        names = {file: next(n for n, f in index["weight_map"].items() if f == file) for file in (first, second)}
        index["weight_map"] |= {names[first]: second}

    change_json(folder / INDEX, swap)
    refused(folder, f"{second}: lacks ", f"{INDEX} places there", f"{first}: has ", f"{INDEX} does not mention")


def test_index_names_a_missing_shard(tmp_path):
    folder = write_sharded(tmp_path, hf_tensors())
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    refused(folder, INDEX, f"names the file '{gone.name}', which does not exist")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_without_weight_map(tmp_path, content):
    folder = write_sharded(tmp_path, hf_tensors())
    (folder / INDEX).write_text(content)
    refused(folder, f"{INDEX} has no object 'weight_map'")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.ckpt"])
def test_pickles_are_never_opened(tmp_path, name):
    folder = write(tmp_path / "folder", {})
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    refused(folder, name, "never opened", "convert with transformers")
    assert not (tmp_path / "sprung").exists()
    (folder / name).rename(folder / WEIGHTS)  # the right name makes it no better
    refused(folder, WEIGHTS)
    assert not (tmp_path / "sprung").exists()


def test_folder_without_weights(tmp_path):
    write(tmp_path, {})
    (tmp_path / WEIGHTS).unlink()
    refused(tmp_path, "neither model.safetensors nor model.safetensors.index.json")


# --- config.json -------------------------------------------------------------------------------------------------


def test_missing_config(tmp_path):
    (write(tmp_path, hf_tensors()) / "config.json").unlink()
    refused(tmp_path, "config.json does not exist")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[]", "not a JSON object, but a list"),
        (b"3", "not a JSON object, but a int"),
        (b"{}", "model_type must be one of bert, ernie, roberta, xlm-roberta, "),
    ],
)
def test_invalid_config_is_refused(tmp_path, content, problem):
    write(tmp_path, hf_tensors())
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, "config.json", problem)


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": -12}, {"vocab_size": 2**40}, {"num_hidden_layers": 10**9}, {"max_position_embeddings": 0},
     {"intermediate_size": 1e300}, {"layer_norm_eps": 10**400}, {"initializer_range": 10**400},
     {"hidden_size": 2**16, "num_attention_heads": 1, "num_hidden_layers": 1024},
     {"num_attention_heads": True}, {"model_type": ["bert"]}, {"model_type": "gpt2"}, {"hidden_act": {"a": 1}}],
    ids=lambda change: f"{change!s:.60}",
)  # fmt: skip
def test_hostile_config_allocates_nothing(tmp_path, monkeypatch, change):
    folder = write(tmp_path, hf_tensors(), hf_config() | change)
    monkeypatch.setattr(BertModel, "__init__", None)
    monkeypatch.setattr(checkpoint_tensors, "load", None)
    refused(folder, "config.json", *(name for name in change if len(change) == 1))


def test_config_of_another_size(tmp_path):
    folder = write(tmp_path, hf_tensors(), hf_config() | {"num_hidden_layers": 1024, "intermediate_size": 2**18})
    message = refused(folder, "'encoder.layer.0.intermediate.dense.weight': has shape [20, 12], expected [262144, 12]")
    assert "more" in message
