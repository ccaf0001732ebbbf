"""Masked language modelling: checkpoints of every layout against NumPy, the loss, what is refused, and gradients."""

import dataclasses
import functools
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import jaxft
from cases import slow
from jaxft.checkpoint import layouts as checkpoint_layouts
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import bert, masked_lm
from jaxft.models.bert import BertModel
from jaxft.models.masked_lm import BertForMaskedLM
from oracle import _activate, layer_norm
from test_checkpoint import (
    MODEL_TYPES,
    VOCAB,
    WEIGHTS,
    WIDTH,
    assert_same,
    forward,
    hf_config,
    hf_tensors,
    write,
    write_sharded,
)
from test_classification import CONFIG, DISTILBERT, ROBERTA

FAMILIES = ["bert", "roberta", "distilbert"]
WORDS = "embeddings.word_embeddings.weight"

# Prefix of the encoder; dense layer, LayerNorm and bias of the head; copies with their originals, as in transformers.
ROBERTA_NAMES = (
    "roberta.", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias",
    {"lm_head.decoder.weight": "roberta." + WORDS, "lm_head.decoder.bias": "lm_head.bias"},
)  # fmt: skip
NAMES = {
    "bert": (
        "bert.", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias",
        {"cls.predictions.decoder.weight": "bert." + WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    "roberta": ROBERTA_NAMES,
    "xlm-roberta": ROBERTA_NAMES,
    "camembert": ROBERTA_NAMES,
    "distilbert": (
        "distilbert.", "vocab_transform", "vocab_layer_norm", "vocab_projector.bias",
        {"vocab_projector.weight": "distilbert." + WORDS},
    ),
}  # fmt: skip
ARCHITECTURES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
}


def lm_config(model_type="bert"):
    return hf_config(model_type) | {"architectures": [ARCHITECTURES[model_type]]}


def lm_tensors(model_type="bert"):
    prefix, linear, norm, bias, _ = NAMES[model_type]
    rng = np.random.default_rng(2)
    tensors = {prefix + name: value for name, value in hf_tensors(model_type, pooler=False).items()}
    tensors[linear + ".weight"] = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3
    for name, size in ((linear + ".bias", WIDTH), (norm + ".weight", WIDTH), (norm + ".bias", WIDTH), (bias, VOCAB)):
        tensors[name] = rng.normal(size=size).astype(np.float32)
    return tensors


def some_inputs(model_type="bert"):
    ids, mask = np.random.default_rng(1).integers(2, 31, (3, 7)), np.ones((3, 7), np.int64)
    mask[0, 4:], mask[1, 2] = 0, 0
    ids[0, 4:] = 1 if "roberta" in model_type else 0
    types = np.arange(21).reshape(3, 7) % 2 if model_type == "bert" else np.zeros((3, 7), np.int64)
    return ids, mask, None if model_type == "distilbert" else types


def some_labels():
    rng = np.random.default_rng(3)
    labels = np.where(rng.random((3, 7)) < 0.4, rng.integers(0, 31, (3, 7)), -100)
    labels[0, 4:] = -100
    return labels


def make(config=CONFIG, **options):
    """Returns a model with random vectors."""
    model = BertForMaskedLM(config, rngs=nnx.Rngs(0), **{"implementation": "xla"} | options)
    rng = np.random.default_rng(0)
    for _, parameter in nnx.to_flat_state(nnx.state(model)):
        if parameter.ndim == 1:
            noise = rng.normal(size=parameter.shape) * 0.3
            parameter.set_value(parameter[...] + jnp.asarray(noise, parameter.dtype))
    return model


@functools.partial(jax.jit, static_argnums=(0, 1))
def compiled(graph, method, params, *args):
    return getattr(nnx.merge(graph, params), method)(*args)


def run(model, *args, method="__call__"):
    graph, params = nnx.split(model)
    return compiled(graph, method, params, *args)


def cross_entropy(logits, labels):
    """Returns the sum over the labels, and the number of labels, in float64."""
    logits = np.asarray(logits, np.float64)[labels != -100]
    picked = logits[np.arange(len(logits)), labels[labels != -100]]
    return np.sum(np.log(np.exp(logits).sum(-1)) - picked), len(logits)


# --- Checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", *slow("relu")])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_match_numpy(tmp_path, model_type, activation):
    """The config names the head's activation, except in RoBERTa."""
    tensors, config = lm_tensors(model_type), lm_config(model_type)
    model = BertForMaskedLM.from_pretrained(write(tmp_path / "a", tensors, config), implementation="xla")
    if activation != "gelu":  # only the head has another activation: the encoder in NumPy has GELU
        config["activation" if model_type == "distilbert" else "hidden_act"] = activation
        other = BertForMaskedLM.from_pretrained(write(tmp_path / "b", tensors, config), implementation="xla")
        model.lm_head = other.lm_head
    ids, mask, types = some_inputs(model_type)
    prefix, linear, norm, bias, _ = NAMES[model_type]
    encoder = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    x = forward(encoder, model_type, ids, mask, types)[0][-1]
    x = x @ tensors[linear + ".weight"].T.astype(np.float64) + tensors[linear + ".bias"]
    x = _activate(x, activation if model_type in ("bert", "distilbert") else "gelu")
    epsilon = hf_config(model_type).get("layer_norm_eps", 1e-12)
    x = layer_norm(x, tensors[norm + ".weight"], tensors[norm + ".bias"], epsilon=epsilon)
    expected = x @ tensors[prefix + WORDS].T.astype(np.float64) + tensors[bias]
    logits = run(model, ids, mask, types)
    assert logits.shape == (3, 7, VOCAB) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_save_restores_the_file(tmp_path, model_type):
    tensors, config = lm_tensors(model_type), lm_config(model_type)
    model = BertForMaskedLM.from_pretrained(write(tmp_path / "a", tensors, config))
    model.save_pretrained(tmp_path / "b")
    saved = safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS)
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert config.items() <= json.loads((tmp_path / "b" / "config.json").read_text()).items()
    assert_same(model, BertForMaskedLM.from_pretrained(tmp_path / "b"))


def test_loaded_and_new_models_have_one_tree(tmp_path):
    """Other fields of config.json make no difference."""
    model = make()
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path, implementation="xla")
    assert nnx.split(loaded)[0] == nnx.split(model)[0] and jax.tree.structure(loaded) == jax.tree.structure(model)
    for same in jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), loaded, model)):
        assert same


@pytest.mark.filterwarnings("default")  # torch and transformers warn
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_reads_saved_checkpoints(tmp_path, model_type):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = BertForMaskedLM.from_pretrained(write(tmp_path / "a", lm_tensors(model_type), lm_config(model_type)))
    model.save_pretrained(tmp_path / "b")
    theirs, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert type(theirs).__name__ == ARCHITECTURES[model_type]
    assert not any(info.values())  # nothing missing, unexpected or of another shape
    (ids, mask, _), labels = some_inputs(model_type), some_labels()
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids), torch.tensor(mask), labels=torch.tensor(labels))
    keep = mask != 0
    np.testing.assert_allclose(run(model, ids, mask)[keep], expected.logits.numpy()[keep], rtol=0, atol=2e-5)
    loss = run(model, ids, labels, mask, method="loss").mean
    np.testing.assert_allclose(loss, expected.loss.numpy(), rtol=1e-5)


def test_encoder_reads_the_checkpoint(tmp_path):
    """The encoder ignores the output layer, whatever it is like."""
    for model_type in FAMILIES:
        tensors = lm_tensors(model_type)
        model = BertForMaskedLM.from_pretrained(write(tmp_path / f"{model_type}-a", tensors, lm_config(model_type)))
        tensors |= {name: np.ones((2, 3), np.int8) for name in NAMES[model_type][-1]}
        encoder = BertModel.from_pretrained(write(tmp_path / f"{model_type}-b", tensors, lm_config(model_type)))
        assert_same(encoder, model.bert)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tied_tensors(tmp_path, model_type):
    """Tied tensors may appear twice, or only under their other name."""
    tensors, config = lm_tensors(model_type), lm_config(model_type)
    plain = BertForMaskedLM.from_pretrained(write(tmp_path / "a", tensors, config))
    for copy, original in NAMES[model_type][-1].items():
        folder = write(tmp_path / f"{copy}-twice", tensors | {copy: tensors[original]}, config)
        assert_same(plain, BertForMaskedLM.from_pretrained(folder))
        moved = {copy if name == original else name: value for name, value in tensors.items()}
        assert_same(plain, BertForMaskedLM.from_pretrained(write(tmp_path / f"{copy}-moved", moved, config)))


def test_checkpoint_of_pretraining(tmp_path):
    """The checkpoint has a pooler, the other head, shards, and names without prefix or with old ones."""
    tensors, config = lm_tensors(), lm_config()
    plain = BertForMaskedLM.from_pretrained(write(tmp_path / "a", tensors, config))
    tensors = {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }  # fmt: skip
    tensors["pooler.dense.weight"], tensors["pooler.dense.bias"] = np.ones((WIDTH, WIDTH)), np.ones(WIDTH)
    tensors["cls.seq_relationship.weight"], tensors["cls.seq_relationship.bias"] = np.ones((2, WIDTH)), np.ones(2)
    assert_same(plain, BertForMaskedLM.from_pretrained(write_sharded(tmp_path / "b", tensors, config)))


@pytest.mark.parametrize("loaded", [jnp.float16, jnp.bfloat16])
def test_dtypes(tmp_path, loaded):
    folder, inputs, labels = write(tmp_path, lm_tensors(), lm_config()), some_inputs(), some_labels()
    for param_dtype in (None, jnp.float32):
        model = BertForMaskedLM.from_pretrained(folder, dtype=loaded, param_dtype=param_dtype, implementation="xla")
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(param_dtype or loaded)}
        logits, loss = jax.eval_shape(lambda m=model: (m(*inputs), m.loss(inputs[0], labels).total))
        assert (logits.dtype, loss.dtype) == (loaded, jnp.float32)


# --- What is refused ---------------------------------------------------------------------------------------------


def refused(folder, *fragments):
    with pytest.raises(CheckpointError) as caught:
        BertForMaskedLM.from_pretrained(folder)
    message = str(caught.value)
    assert str(folder) in message
    rest = message.replace(str(folder), "")  # a test's folder has the test's name
    assert all(fragment in rest for fragment in fragments), message
    return message


@pytest.mark.parametrize("model_type", FAMILIES)
def test_untied_output_layer_is_refused(tmp_path, model_type):
    """It does not matter whether config.json says that the layer is untied."""
    tensors, config = lm_tensors(model_type), lm_config(model_type)
    for copy, original in NAMES[model_type][-1].items():
        other = tensors[original] + np.float32(1e-3)
        folder = write(tmp_path / copy, tensors | {copy: other}, config)
        refused(folder, f"{copy!r}: differs from {original!r}", "tie_word_embeddings false) is not supported")
        write(folder, tensors | {copy: other[:-1]}, config)
        refused(folder, f"{copy!r}: has shape")
    refused(
        write(tmp_path / "said", tensors, config | {"tie_word_embeddings": False}),
        "config.json: BertForMaskedLM: tie_word_embeddings must be true", "got False",
    )  # fmt: skip
    BertForMaskedLM.from_pretrained(write(tmp_path / "tied", tensors, config | {"tie_word_embeddings": True}))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_plain_encoder(tmp_path, model_type):
    prefix, linear, norm, bias, _ = NAMES[model_type]
    tensors = {prefix + name: value for name, value in hf_tensors(model_type, pooler=False).items()}
    names = [name + part for name in (linear, norm) for part in (".weight", ".bias")] + [bias]
    missing = [f"{WEIGHTS}: {name!r} is missing; pass rngs=nnx.Rngs(0) to the model's from_" for name in names]
    folder = write(tmp_path / "a", tensors, hf_config(model_type))
    message = refused(folder, *missing)
    assert len(message.splitlines()) == 6

    model, encoder = BertForMaskedLM.from_pretrained(folder, rngs=nnx.Rngs(0)), BertModel.from_pretrained(folder)
    assert_same(encoder, model.bert)
    head = nnx.to_pure_dict(nnx.state(model.lm_head))
    assert 0.01 < head.pop("dense_kernel").std() < 0.03 and (head.pop("norm_gamma") == 1).all()
    assert head.keys() == {"dense_bias", "norm_beta", "out_bias"} and not any(x.any() for x in head.values())
    model.save_pretrained(tmp_path / "b")
    again = BertForMaskedLM.from_pretrained(tmp_path / "b")
    assert_same(model, again)
    assert nnx.split(model)[0] == nnx.split(again)[0]


def test_new_head_excuses_no_other_problem(tmp_path):
    tensors, option = lm_tensors(), {"rngs": nnx.Rngs(0)}
    tensors["cls.predictions.bias"] = np.zeros(VOCAB - 1, np.float32)
    with pytest.raises(CheckpointError, match=r"'cls.predictions.bias': has shape \[30\], expected \[31\]$"):
        BertForMaskedLM.from_pretrained(write(tmp_path, tensors, lm_config()), **option)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_labels'"):
        BertForMaskedLM.from_pretrained(tmp_path, num_labels=2, **option)


def test_all_problems_at_once(tmp_path):
    tensors = lm_tensors("roberta")
    del tensors["lm_head.dense.bias"]
    del tensors["roberta.embeddings.LayerNorm.bias"]
    tensors["lm_head.bias"] = np.zeros(VOCAB - 1, np.float32)
    tensors["lm_head.decoder.weight"] = np.zeros((VOCAB, WIDTH), np.int32)
    tensors["roberta.something"] = np.zeros(5, np.float32)
    message = refused(
        write(tmp_path, tensors, lm_config("roberta")),
        "model.safetensors: 'lm_head.dense.bias' is missing",
        "model.safetensors: 'roberta.embeddings.LayerNorm.bias' is missing",
        "model.safetensors: 'lm_head.bias': has shape [30], expected [31]",
        "model.safetensors: 'lm_head.decoder.weight': has dtype I32, expected one of F32, F16, BF16, F64",
        "model.safetensors: 'roberta.something': is unexpected",
    )
    assert len(message.splitlines()) == 6


# --- Calls -------------------------------------------------------------------------------------------------------


def test_inputs_reach_the_encoder():
    model, (ids, mask, types) = make(), some_inputs()
    logits = run(model, ids, mask, types)
    positions = np.broadcast_to(np.arange(7), ids.shape)
    np.testing.assert_allclose(run(model, ids, mask, types, positions), logits, rtol=0, atol=4e-6)
    others = (
        (ids[:, ::-1], mask, types, positions),
        (ids, mask, 1 - types, positions),
        (ids, mask, types, positions + 3),
    )
    for other in (*others, (ids, mask[::-1], types, positions)):
        assert np.abs(run(model, *other) - logits).max() > 1e-2
    with pytest.raises(TypeError, match="BertModel: input_ids must be integers"):
        model(np.zeros((3, 7)))


@pytest.mark.parametrize("method", ["__call__", "loss"])
def test_options_reach_the_encoder(method, monkeypatch):
    model, (ids, mask, types) = make(), some_inputs()
    labels, seen = ([some_labels()] if method == "loss" else []), []
    original = BertModel.__call__

    def call(self, *args, deterministic=None, rngs=None, **options):
        seen.append((args, {"deterministic": deterministic, "rngs": rngs}, options))
        return original(self, *args, **options)

    monkeypatch.setattr(BertModel, "__call__", call)
    key = jax.random.key(0)
    jax.eval_shape(lambda: getattr(model, method)(ids, *labels, mask, types))
    jax.eval_shape(lambda: getattr(model, method)(ids, *labels, mask, deterministic=False, rngs=key))
    unpacked = {"cu_seqlens": None, "max_seqlen": None}
    assert seen[0] == ((ids, mask, types, None), {"deterministic": None, "rngs": None}, unpacked)
    assert seen[1][1:] == ({"deterministic": False, "rngs": key}, unpacked)


def test_remat_reaches_the_encoder(tmp_path, monkeypatch):
    original, seen = BertModel.__init__, []

    def init(self, *args, remat=False, **options):
        seen.append(remat)
        original(self, *args, **options)

    monkeypatch.setattr(BertModel, "__init__", init)
    make().save_pretrained(tmp_path)
    BertForMaskedLM(CONFIG, remat=True, rngs=None)
    BertForMaskedLM.from_pretrained(tmp_path, remat=True)
    assert seen == [False, True, True]


@pytest.mark.parametrize("config", [ROBERTA, *slow(CONFIG, DISTILBERT)], ids=lambda config: config.model_type)
def test_loss(config):
    model, (ids, mask, types), labels = make(config), some_inputs(config.model_type), some_labels()
    found = run(model, ids, labels, mask, types, method="loss")
    total, count = cross_entropy(run(model, ids, mask, types), labels)
    assert found.labelled == count > 0
    np.testing.assert_allclose(found.total, total, rtol=1e-5)
    np.testing.assert_allclose(found.mean, total / count, rtol=1e-5)
    assert jax.jit(lambda: model.loss(ids.tolist(), labels.tolist()).labelled)() == count
    unknown = np.where(labels == -100, 31, labels)
    assert np.isnan(run(model, ids, unknown, mask, types, method="loss").total)
    nothing = run(model, ids, np.full((3, 7), -100), mask, types, method="loss")
    assert nothing.mean == nothing.total == 0.0 and nothing.labelled == 0


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.zeros((3, 6), int), ValueError, "labels must have the shape of input_ids"),
        (np.zeros((3, 7)), TypeError, "labels must be integers"),
        (np.full((3, 7), 2**32 - 100), ValueError, "labels must fit int32, got 4294967196"),
        (None, TypeError, "labels must be integers"),
    ],
)
def test_wrong_labels(monkeypatch, labels, error, message):
    model = make()
    monkeypatch.setattr(BertModel, "__call__", None)  # nothing may be computed
    with pytest.raises(error, match="BertForMaskedLM: " + message):
        model.loss(some_inputs()[0], labels)


@pytest.mark.parametrize("config", [ROBERTA, *slow(CONFIG)], ids=lambda config: config.model_type)
def test_packed_tokens(config):
    """Logits and loss equal the results of a padded batch. Unused rows, which are 0, have no label."""
    model, (ids, _, types), labels = make(config), some_inputs(config.model_type), some_labels()
    mask = np.arange(7) < np.array([[7], [2], [5]])
    labels = np.where(mask, labels, -100)

    def pack(x):
        return None if x is None else jaxft.remove_padding(jnp.asarray(x), mask, capacity=17)

    packed, indices, starts = pack(ids)
    options = {"cu_seqlens": starts, "max_seqlen": 7}
    more = (None, None if types is None else pack(types).x)
    got = jax.jit(lambda: model(packed, *more, **options))()
    assert got.shape == (17, 31)
    np.testing.assert_allclose(got[:14], run(model, ids, mask, types)[mask], rtol=0, atol=4e-6)
    expected = run(model, ids, labels, mask, types, method="loss")
    for given in (pack(labels).x, pack(labels).x.astype(jnp.int8)):
        found = jax.jit(lambda given=given: model.loss(packed, given, *more, **options))()
        assert found.labelled == expected.labelled
        np.testing.assert_allclose(found.total, expected.total, rtol=1e-5)
    with pytest.raises(ValueError, match="max_seqlen"):
        model.loss(packed, given, cu_seqlens=starts)


@pytest.mark.parametrize("config", [CONFIG, *slow(ROBERTA, DISTILBERT)], ids=lambda config: config.model_type)
def test_gradients(config):
    """The gradients equal the gradients of the logits' cross-entropy, in which the word embeddings have two uses."""
    model, (ids, mask, types), labels = make(config), some_inputs(config.model_type), some_labels()
    graph, params = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return nnx.merge(graph, params).loss(ids, labels, mask, types).mean

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        log_p = jax.nn.log_softmax(nnx.merge(graph, params)(ids, mask, types))
        used = labels != -100
        picked = jnp.take_along_axis(log_p, np.where(used, labels, 0)[..., None], axis=2)[..., 0]
        return -jnp.sum(jnp.where(used, picked, 0.0)) / used.sum().astype(np.float32)

    (value, got), (expected_value, expected) = loss(params), plain(params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    for (path, a), (_, b) in zip(nnx.to_flat_state(got), nnx.to_flat_state(expected), strict=True):
        a, b = a[...], b[...]
        assert np.abs(b).max() > 1e-5, path
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=str(path))


def test_training():
    """The example of the class docstring works, with another optimizer."""
    model, (ids, mask, types), labels = make(), some_inputs(), some_labels()

    @nnx.jit
    def train_step(model):
        loss, grads = nnx.value_and_grad(lambda m: m.loss(ids, labels, mask, types).mean)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.05 * g, nnx.state(model, nnx.Param), grads))
        return loss

    losses = [float(train_step(model)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_loss_stores_no_full_logits():
    model = make(dataclasses.replace(CONFIG, vocab_size=5000))
    ids = np.zeros((64, 20), np.int32)
    graph, params = nnx.split(model)

    def loss(params, labels):
        return nnx.merge(graph, params).loss(ids, labels).mean

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, ids))
    assert "[384,5000]" in jaxpr  # logits of a chunk
    assert "[1280,5000]" not in jaxpr and "[64,20,5000]" not in jaxpr


def test_labels_beyond_max_seqlen_are_ignored():
    """Traced `cu_seqlens` cannot be refused."""
    model, ids = make(), some_inputs()[0].reshape(-1)[:12]
    loss = jax.jit(lambda starts: model.loss(ids, np.ones_like(ids), cu_seqlens=starts, max_seqlen=4))
    assert loss(np.array([0, 7, 10])).labelled == 4 + 3


def test_triton_agrees_with_xla():
    (ids, mask, types), labels = some_inputs(), some_labels()
    models = [make(implementation=name) for name in ("xla", "triton")]
    plain, fused = (run(model, ids, mask, types) for model in models)
    np.testing.assert_allclose(fused, plain, rtol=0, atol=2e-5)
    plain, fused = (run(model, ids, labels, mask, types, method="loss").total for model in models)
    np.testing.assert_allclose(fused, plain, rtol=1e-5)


@pytest.mark.parametrize(("module", "op"), [(bert, "dense"), (masked_lm, "layer_norm")])
def test_implementation_reaches_the_head(module, op, monkeypatch):
    used = []

    def spy(*args, implementation, **options):
        used.append(implementation)
        return original(*args, implementation="xla", **options)

    original = getattr(module, op)
    model = make()
    model.lm_head.options = dataclasses.replace(model.lm_head.options, implementation="triton")
    monkeypatch.setattr(module, op, spy)
    model.lm_head(jnp.ones((2, 16)))
    assert used == ["triton"]


@pytest.mark.parametrize(
    ("model_type", "activation"),
    [("bert", "relu"), ("ernie", "relu"), ("albert", "relu"), ("roberta", "gelu"), ("electra", "gelu"),
     ("data2vec-text", "gelu"), ("mpnet", "gelu")],
)  # fmt: skip
def test_activation_of_the_head(model_type, activation):
    """transformers gives some heads the activation of the encoder, and the others GELU."""
    sizes = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = jaxft.BertConfig.from_dict(
        {"model_type": model_type, "hidden_act": "relu", "intermediate_size": 12} | sizes
    )
    assert BertForMaskedLM(config, rngs=nnx.Rngs(0)).lm_head.activation == activation


def test_signature_follows_bert_model():
    ours, theirs = (inspect.signature(cls.from_pretrained).parameters for cls in (BertForMaskedLM, BertModel))
    assert theirs.items() <= ours.items()
    assert ARCHITECTURES.keys() <= checkpoint_layouts.LAYOUTS.keys()
