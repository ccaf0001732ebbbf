"""Sequence classification: checkpoints of every layout against NumPy, labels, what is refused, and gradients."""

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

from cases import slow
from jaxft.checkpoint import layouts as checkpoint_layouts
from jaxft.checkpoint.files import CheckpointError
from jaxft.models import bert, heads
from jaxft.models.bert import BertConfig, BertModel
from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
from jaxft.training import accumulate_gradients
from test_checkpoint import (
    MODEL_TYPES,
    WEIGHTS,
    WIDTH,
    assert_same,
    change_json,
    forward,
    hf_config,
    hf_tensors,
    write,
    write_sharded,
)

LABELS = ["contradiction", "entailment", "neutral", "none of these", "?"]
FAMILIES = ["bert", "roberta", "distilbert"]

# The encoder's prefix, and the two dense layers of the head, as transformers writes them.
NAMES = {
    "bert": ("bert.", "bert.pooler.dense", "classifier"),
    "roberta": ("roberta.", "classifier.dense", "classifier.out_proj"),
    "xlm-roberta": ("roberta.", "classifier.dense", "classifier.out_proj"),
    "camembert": ("roberta.", "classifier.dense", "classifier.out_proj"),
    "distilbert": ("distilbert.", "pre_classifier", "classifier"),
}
ARCHITECTURES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
    "camembert": "CamembertForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
}

CONFIG = BertConfig(
    vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=20, initializer_range=0.3,
)  # fmt: skip
ROBERTA = dataclasses.replace(CONFIG, model_type="roberta", pad_token_id=1, type_vocab_size=1)
DISTILBERT = dataclasses.replace(CONFIG, model_type="distilbert", type_vocab_size=0)


def classifier_config(model_type="bert", labels=LABELS):
    names = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    return hf_config(model_type) | names | {"architectures": [ARCHITECTURES[model_type]]}


def classifier_tensors(model_type="bert", num_labels=5):
    prefix, first, last = NAMES[model_type]
    rng = np.random.default_rng(2)
    tensors = {prefix + name: value for name, value in hf_tensors(model_type, pooler=False).items()}
    for name, outputs in ((first, WIDTH), (last, num_labels)):
        tensors[name + ".weight"] = rng.normal(size=(outputs, WIDTH)).astype(np.float32) / 3
        tensors[name + ".bias"] = rng.normal(size=outputs).astype(np.float32)
    return tensors


def some_inputs(model_type="bert"):
    ids, mask = np.random.default_rng(1).integers(2, 31, (3, 7)), np.ones((3, 7), np.int64)
    mask[0, 4:], mask[1, 2] = 0, 0
    ids[0, 4:] = 1 if "roberta" in model_type else 0
    types = np.arange(21).reshape(3, 7) % 2 if model_type == "bert" else np.zeros((3, 7), np.int64)
    return ids, mask, None if model_type == "distilbert" else types


def make(config=CONFIG, **options):
    """Returns a model with random vectors."""
    model = BertForSequenceClassification(config, rngs=nnx.Rngs(0), **{"implementation": "xla"} | options)
    rng = np.random.default_rng(0)
    for _, parameter in nnx.to_flat_state(nnx.state(model)):
        if parameter.ndim == 1:
            noise = rng.normal(size=parameter.shape) * 0.3
            parameter.set_value(parameter[...] + jnp.asarray(noise, parameter.dtype))
    return model


@functools.partial(jax.jit, static_argnums=0)
def compiled(graph, params, *args):
    return nnx.merge(graph, params)(*args)


def run(model, *args):
    return compiled(*nnx.split(model), *args)


# --- Checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_match_numpy(tmp_path, model_type):
    tensors = classifier_tensors(model_type)
    folder = write(tmp_path, tensors, classifier_config(model_type))
    model = BertForSequenceClassification.from_pretrained(folder, implementation="xla")
    ids, mask, types = some_inputs(model_type)
    prefix, first, last = NAMES[model_type]
    encoder = {name.removeprefix(prefix): t for name, t in tensors.items() if not name.startswith((first, last))}
    x = forward(encoder, model_type, ids, mask, types)[0][-1][:, 0]
    x = x @ tensors[first + ".weight"].T.astype(np.float64) + tensors[first + ".bias"]
    x = np.maximum(x, 0) if model_type == "distilbert" else np.tanh(x)
    expected = x @ tensors[last + ".weight"].T.astype(np.float64) + tensors[last + ".bias"]
    logits = run(model, ids, mask, types)
    assert logits.shape == (3, 5) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_save_restores_the_file(tmp_path, model_type):
    tensors, config = classifier_tensors(model_type), classifier_config(model_type)
    config |= {"problem_type": "multi_label_classification"}
    model = BertForSequenceClassification.from_pretrained(write(tmp_path / "a", tensors, config))
    model.save_pretrained(tmp_path / "b")
    saved = safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS)
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert config.items() <= json.loads((tmp_path / "b" / "config.json").read_text()).items()
    again = BertForSequenceClassification.from_pretrained(tmp_path / "b")
    assert_same(model, again)
    assert again.id2label == dict(enumerate(LABELS))


@pytest.mark.filterwarnings("default")  # torch and transformers warn
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_reads_saved_checkpoints(tmp_path, model_type):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write(tmp_path / "a", classifier_tensors(model_type), classifier_config(model_type))
    model = BertForSequenceClassification.from_pretrained(folder)
    model.save_pretrained(tmp_path / "b")
    auto = transformers.AutoModelForSequenceClassification
    theirs, info = auto.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert type(theirs).__name__ == ARCHITECTURES[model_type]
    assert not any(info.values())  # nothing missing, unexpected or of another shape
    assert theirs.config.id2label == model.id2label
    ids, mask, _ = some_inputs(model_type)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids), torch.tensor(mask)).logits.numpy()
    np.testing.assert_allclose(run(model, ids, mask), expected, rtol=0, atol=1e-5)


def test_encoder_reads_a_classifier(tmp_path):
    """In BERT, the encoder takes the pooler of the classifier."""
    for model_type in FAMILIES:
        folder = write(tmp_path / model_type, classifier_tensors(model_type), classifier_config(model_type))
        encoder, model = BertModel.from_pretrained(folder), BertForSequenceClassification.from_pretrained(folder)
        if model_type == "bert":
            np.testing.assert_array_equal(encoder.pooler.kernel[...], model.head.dense_kernel[...])
        encoder.pooler = None
        assert_same(encoder, model.bert)


def test_shards_without_prefix_are_read(tmp_path):
    tensors, config = classifier_tensors(), classifier_config()
    single = BertForSequenceClassification.from_pretrained(write(tmp_path / "a", tensors, config))
    plain = {name.removeprefix("bert."): value for name, value in tensors.items()}
    sharded = write_sharded(tmp_path / "b", plain, config)
    assert_same(single, BertForSequenceClassification.from_pretrained(sharded))


def test_roberta_classifier_ignores_the_pooler(tmp_path):
    tensors, config = classifier_tensors("roberta"), classifier_config("roberta")
    plain = BertForSequenceClassification.from_pretrained(write(tmp_path / "a", tensors, config))
    tensors["roberta.pooler.dense.weight"] = np.ones((WIDTH, WIDTH), np.float32)
    tensors["roberta.pooler.dense.bias"] = np.ones(WIDTH, np.float32)
    assert_same(plain, BertForSequenceClassification.from_pretrained(write(tmp_path / "b", tensors, config)))


@pytest.mark.parametrize("loaded", [jnp.bfloat16, *slow(jnp.float16)])
def test_dtypes(tmp_path, loaded):
    folder = write(tmp_path, classifier_tensors(), classifier_config())
    model = BertForSequenceClassification.from_pretrained(folder, dtype=loaded, implementation="xla")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(loaded)}
    assert run(model, *some_inputs()).dtype == loaded
    kept = BertForSequenceClassification.from_pretrained(folder, dtype=loaded, param_dtype=jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(kept))} == {jnp.dtype(jnp.float32)}
    assert run(kept, *some_inputs()).dtype == loaded


# --- Labels and settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"id2label": None, "num_labels": None}, ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 1}, ["LABEL_0"]),
        ({"id2label": {"1": "b", "0": "a", "2": "c"}}, ["a", "b", "c"]),
        ({"id2label": {"0": "score"}, "num_labels": 7}, ["score"]),  # as in transformers
        ({"id2label": {str(i): f"l{i}" for i in reversed(range(11))}}, [f"l{i}" for i in range(11)]),
    ],
)
def test_labels(tmp_path, fields, names):
    folder = write(tmp_path, classifier_tensors(num_labels=len(names)), hf_config() | fields)
    model = BertForSequenceClassification.from_pretrained(folder)
    assert model.num_labels == len(names)
    assert model.id2label == dict(enumerate(names))
    assert model.head.out_kernel.shape == (WIDTH, len(names))


def test_settings(tmp_path):
    ours = {
        "problem_type": "regression",
        "sentence_transformers": {"version": "5.0", "activation_fn": "torch.nn.modules.linear.Identity"},
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    }
    config = classifier_config() | ours | {"dtype": "float64", "auto_map": {"AutoModel": "elsewhere"}}
    model = BertForSequenceClassification.from_pretrained(write(tmp_path / "a", classifier_tensors(), config))
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    assert model.settings == ours | names
    model.settings.clear()  # a copy
    model.save_pretrained(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert not {"dtype", "auto_map"} & saved.keys()  # they may be wrong for the new model
    again = BertForSequenceClassification.from_pretrained(tmp_path / "b")
    assert again.settings == model.settings
    assert nnx.split(again)[0] == nnx.split(model)[0]  # the order in the files does not matter


@pytest.mark.parametrize("model_class", [BertForSequenceClassification, BertForTokenClassification])
def test_loaded_and_new_models_have_one_tree(tmp_path, model_class):
    """Other fields of config.json make no difference."""
    options = {"id2label": LABELS, "classifier_dropout": 0.3, "implementation": "xla"}
    model = model_class(CONFIG, **options, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", lambda config: config.update(transformers_version="5", problem_type=None))
    loaded = model_class.from_pretrained(tmp_path, implementation="xla")
    assert nnx.split(loaded)[0] == nnx.split(model)[0] and jax.tree.structure(loaded) == jax.tree.structure(model)
    assert_same(loaded, model)


def test_labels_of_a_new_model(tmp_path):
    assert BertForSequenceClassification(CONFIG, rngs=None).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert BertForSequenceClassification(CONFIG, num_labels=3, rngs=None).num_labels == 3
    options = {"num_labels": np.int64(3), "classifier_dropout": np.float32(0.5)}  # labels of a data set
    model = make(DISTILBERT, id2label={0: "no", 1: "maybe", 2: "yes"}, **options)
    model.save_pretrained(tmp_path)
    again = BertForSequenceClassification.from_pretrained(tmp_path, implementation="xla")
    assert_same(model, again)
    assert again.id2label == {0: "no", 1: "maybe", 2: "yes"} and again.config == DISTILBERT
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["label2id"] == {"no": 0, "maybe": 1, "yes": 2}


WRONG_LABELS = [
    ({"num_labels": 0}, "num_labels must be an integer from 1 to 1048576, got 0"),
    ({"num_labels": True}, "num_labels must be an integer from 1 to 1048576, got True"),
    ({"num_labels": "2"}, "num_labels must be an integer from 1 to 1048576, got '2'"),
    ({"num_labels": 2**20 + 1}, "num_labels must be an integer from 1 to 1048576, got 1048577"),
    ({"id2label": {}}, "id2label must name the labels from 0 on, each by a string, got {}"),
    ({"id2label": "ab"}, "id2label must name the labels from 0 on, each by a string, got 'ab'"),
    ({"id2label": []}, "id2label must name the labels from 0 on, each by a string, got []"),
    ({"id2label": ["a", 1]}, "id2label must name the labels from 0 on, each by a string, got ['a', 1]"),
    ({"id2label": {"1": "a", "2": "b"}}, "id2label must name the labels from 0 on"),
    ({"id2label": {"0": "a", "1": None}}, "id2label must name the labels from 0 on"),
    ({"id2label": {"zero": "a"}}, "id2label must name the labels from 0 on"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_LABELS)
def test_wrong_labels(tmp_path, monkeypatch, fields, message):
    monkeypatch.setattr(heads, "BertModel", None)  # nothing may be allocated
    with pytest.raises(ValueError) as caught:
        BertForSequenceClassification(CONFIG, rngs=nnx.Rngs(0), **fields)
    assert str(caught.value).startswith("BertForSequenceClassification: " + message)
    monkeypatch.setattr(BertForSequenceClassification, "__init__", None)
    refused(write(tmp_path, classifier_tensors(), hf_config() | fields), "config.json: ", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_labels": 3, "id2label": {0: "score"}}, "num_labels is 3, but id2label names 1 labels"),
        ({"classifier_dropout": 1}, r"classifier_dropout must be None or a number in \[0, 1\), got 1"),
    ],
)
def test_wrong_options_of_the_head(monkeypatch, options, message):
    monkeypatch.setattr(heads, "BertModel", None)  # nothing may be allocated
    with pytest.raises(ValueError, match=message):
        BertForSequenceClassification(CONFIG, **options, rngs=nnx.Rngs(0))


# --- What is refused ---------------------------------------------------------------------------------------------


def refused(folder, *fragments):
    with pytest.raises(CheckpointError) as caught:
        BertForSequenceClassification.from_pretrained(folder)
    message = str(caught.value)
    assert str(folder) in message
    rest = message.replace(str(folder), "")  # a test's folder has the test's name
    assert all(fragment in rest for fragment in fragments), message
    return message


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("with_prefix", [True, False])
def test_plain_encoder(tmp_path, model_type, with_prefix):
    prefix, first, last = NAMES[model_type]
    prefix = prefix if with_prefix else ""
    tensors = {prefix + name: value for name, value in hf_tensors(model_type, pooler=False).items()}
    missing = [
        f"{WEIGHTS}: {name + part!r} is missing"
        for name in (first if with_prefix else first.removeprefix("bert."), last)
        for part in (".weight", ".bias")
    ]
    message = refused(write(tmp_path, tensors, hf_config(model_type)), *missing)
    assert len(message.splitlines()) == 5


def test_all_problems_at_once(tmp_path):
    tensors = classifier_tensors("roberta")
    del tensors["classifier.dense.bias"]
    del tensors["roberta.embeddings.LayerNorm.bias"]
    tensors["classifier.out_proj.weight"] = tensors["classifier.out_proj.weight"].T.copy()
    tensors["classifier.out_proj.bias"] = np.zeros(5, np.int32)
    tensors["roberta.something"] = np.zeros(5, np.float32)
    message = refused(
        write(tmp_path, tensors, classifier_config("roberta")),
        "model.safetensors: 'classifier.dense.bias' is missing",
        "model.safetensors: 'roberta.embeddings.LayerNorm.bias' is missing",
        "model.safetensors: 'classifier.out_proj.weight': has shape [12, 5], expected [5, 12]",
        "model.safetensors: 'classifier.out_proj.bias': has dtype I32, expected one of F32, F16, BF16, F64",
        "model.safetensors: 'roberta.something': is unexpected",
    )
    assert len(message.splitlines()) == 6


def test_other_label_counts_are_refused(tmp_path):
    refused(
        write(tmp_path, classifier_tensors(), hf_config()),
        "'classifier.weight': has shape [5, 12], expected [2, 12]",
        "'classifier.bias': has shape [5], expected [2]",
    )


def test_wrong_config(tmp_path):
    refused(write(tmp_path, classifier_tensors(), classifier_config() | {"hidden_size": -1}), "config.json", "-1")
    refused(tmp_path / "nowhere")


def test_advice_on_pickles_names_the_head(tmp_path):
    """AutoModel would read and then save the encoder alone."""
    write(tmp_path, {}, classifier_config())
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    assert "AutoModel" not in refused(tmp_path, "the class that config.json names under 'architectures'")


# --- Calls -------------------------------------------------------------------------------------------------------


def test_inputs_reach_the_encoder():
    model, (ids, mask, types) = make(), some_inputs()
    logits = run(model, ids, mask, types)
    positions = np.broadcast_to(np.arange(7), ids.shape)
    np.testing.assert_allclose(run(model, ids, mask, types, positions), logits, rtol=0, atol=2e-6)
    for other in ((ids[:, ::-1], mask, types), (ids, None, types), (ids, mask), (ids, mask, types, positions + 3)):
        assert np.abs(run(model, *other) - logits).max() > 1e-2
    with pytest.raises(TypeError, match="BertModel: input_ids must be integers"):
        model(np.zeros((3, 7)))


@pytest.mark.parametrize("config", [ROBERTA, *slow(CONFIG, DISTILBERT)], ids=lambda config: config.model_type)
def test_packed_tokens(config):
    """Logits of packed sequences equal the logits of a padded batch. The last sequence has no token."""
    model, (ids, _, types) = make(config), some_inputs(config.model_type)
    lengths = np.array([7, 2, 5, 0])
    mask = np.arange(7) < lengths[:3, None]
    starts = np.append(0, np.cumsum(lengths))
    packed = (ids[mask], None, None if types is None else types[mask])
    got = jax.jit(lambda *arrays: model(*arrays, cu_seqlens=starts, max_seqlen=7))(*packed)
    np.testing.assert_allclose(got[:3], run(model, ids, mask, types), rtol=0, atol=2e-6)
    assert got.shape == (4, model.num_labels) and np.isfinite(got).all()
    with pytest.raises(ValueError, match="max_seqlen"):
        model(*packed, cu_seqlens=starts)


@pytest.mark.parametrize("config", [CONFIG, DISTILBERT, *slow(ROBERTA)], ids=lambda config: config.model_type)
def test_gradients(config):
    model, (ids, mask, types) = make(config, num_labels=3), some_inputs(config.model_type)
    labels = np.array([2, 0, 1])
    graph, params = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return nnx.merge(graph, params).loss(ids, labels, mask, types).mean

    before, gradient = loss(params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    for path, leaf in nnx.to_flat_state(gradient):
        assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 1e-5, path
    after, _ = loss(jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient))
    np.testing.assert_allclose(before - after, 1e-3 * sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)), rtol=0.1)


# --- The loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, *slow(ROBERTA, DISTILBERT)], ids=lambda config: config.model_type)
def test_loss(config):
    model, (ids, mask, types) = make(config, num_labels=3), some_inputs(config.model_type)
    log_p = np.asarray(jax.nn.log_softmax(run(model, ids, mask, types)))
    loss = jax.jit(model.loss)
    found = loss(ids, np.array([2, -100, 1]), mask, types)
    assert (found.total.dtype, found.labelled) == (jnp.float32, 2)
    np.testing.assert_allclose(found.mean, -(log_p[0, 2] + log_p[2, 1]) / 2, rtol=1e-5)
    assert np.isnan(loss(ids, np.array([2, 0, 3]), mask, types).total)
    nothing = loss(ids, np.full(3, -100), mask, types)
    assert nothing.mean == nothing.total == 0.0 and nothing.labelled == 0
    assert jax.jit(lambda: model.loss(ids.tolist(), [0, 1, 2]).labelled)() == 3


@pytest.mark.parametrize("config", [CONFIG, *slow(ROBERTA, DISTILBERT)], ids=lambda config: config.model_type)
def test_loss_with_dropout(config, key):
    """The head has dropout, too."""
    model, (ids, mask, types) = make(config, num_labels=3, classifier_dropout=0.5), some_inputs(config.model_type)
    labels, options = np.array([2, 0, 1]), {"deterministic": False, "rngs": key}
    log_p = np.asarray(jax.nn.log_softmax(jax.jit(lambda: model(ids, mask, types, **options))()))
    found = jax.jit(lambda: model.loss(ids, labels, mask, types, **options))()
    np.testing.assert_allclose(found.total, -log_p[np.arange(3), labels].sum(), rtol=1e-5)


def test_loss_of_packed_tokens_in_16_bits():
    model, (ids, _, types) = make(num_labels=3, dtype=jnp.bfloat16), some_inputs()
    mask, labels = np.arange(7) < np.array([[7], [2], [5]]), np.array([2, 0, 1])
    packed = jax.jit(functools.partial(model.loss, max_seqlen=7))
    found = packed(ids[mask], labels, None, types[mask], cu_seqlens=np.array([0, 7, 9, 14]))
    assert (found.total.dtype, found.labelled) == (jnp.float32, 3)
    np.testing.assert_allclose(found.total, jax.jit(model.loss)(ids, labels, mask, types).total, rtol=0.05)


def test_empty_packed_sequences_hide_no_label():
    """With more sequences than tokens, a sequence has a label where there is no row of that number."""
    model, ids = make(num_labels=3), np.array([7])
    loss = jax.jit(functools.partial(model.loss, max_seqlen=1))
    found = loss(ids, np.array([-100, -100, 1]), cu_seqlens=np.array([0, 0, 0, 1]))
    assert found.labelled == 1
    np.testing.assert_allclose(found.total, jax.jit(model.loss)(ids[None], np.array([1])).total, rtol=1e-5)


def test_loss_over_micro_batches():
    model, (ids, mask, _) = make(num_labels=3), some_inputs()
    graph, params = nnx.split(model)
    batch = {"ids": ids, "labels": np.array([2, -100, 1]), "mask": mask}

    def loss(params, batch):
        return nnx.merge(graph, params).loss(batch["ids"], batch["labels"], batch["mask"])

    parts = jax.tree.map(lambda x: x[:, None], batch)  # one row has no label
    total, gradients = jax.jit(lambda params: accumulate_gradients(loss, params, parts))(params)
    expected, of_all = jax.jit(jax.value_and_grad(lambda params: loss(params, batch).mean))(params)
    np.testing.assert_allclose(total.mean, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, abs(b).max())),
                 gradients, of_all)  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "options", "error", "message"),
    [
        (np.zeros(2, int), {}, ValueError, r"labels must have shape \(3,\), got \(2,\)"),
        (np.zeros((3, 1), int), {}, ValueError, r"labels must have shape \(3,\), got \(3, 1\)"),
        (np.zeros(3, int), {"cu_seqlens": [0, 7]}, ValueError, r"labels must have shape \(1,\), got \(3,\)"),
        (np.zeros(3), {}, TypeError, "labels must be integers, got float"),
        (np.zeros(3, int), {"cu_seqlens": [0, 3, 7]}, ValueError, r"labels must have shape \(2,\), got \(3,\)"),
        (None, {}, TypeError, "labels must be integers, got NoneType"),
        (np.array([0, 0, 2**32]), {}, ValueError, "labels must fit int32, got 4294967296"),
    ],
)
def test_wrong_labels_of_the_loss(monkeypatch, labels, options, error, message):
    model = make()
    monkeypatch.setattr(BertModel, "__call__", None)  # nothing may be computed
    with pytest.raises(error, match="BertForSequenceClassification: " + message):
        model.loss(some_inputs()[0], labels, **options)


def test_models_without_classes_have_no_loss(tmp_path, monkeypatch):
    config = classifier_config() | {"problem_type": "multi_label_classification"}
    several = BertForSequenceClassification.from_pretrained(write(tmp_path, classifier_tensors(), config))
    score = make(num_labels=1)
    monkeypatch.setattr(BertModel, "__call__", None)
    for model, message in ((several, "got 5 and 'multi_label_classification'; take"), (score, "got 1 and 'single_l")):
        with pytest.raises(
            ValueError, match="BertForSequenceClassification: loss is for num_labels above 1.*" + message
        ):
            model.loss(some_inputs()[0], np.zeros(3, int))


# --- Implementations ---------------------------------------------------------------------------------------------


def test_nnx_jit():
    model, inputs = make(), some_inputs()
    by_nnx = nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)
    np.testing.assert_allclose(by_nnx, run(model, *inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_labels", [3, *slow(1)])
@pytest.mark.parametrize("config", [CONFIG, *slow(DISTILBERT)], ids=["bert", "distilbert"])
def test_triton_agrees_with_xla(config, num_labels):
    inputs = some_inputs(config.model_type)
    plain, fused = (
        run(make(config, num_labels=num_labels, implementation=name), *inputs) for name in ("xla", "triton")
    )
    assert fused.shape == (3, num_labels)
    np.testing.assert_allclose(fused, plain, rtol=0, atol=1e-5)


def test_implementation_reaches_the_head(monkeypatch):
    used = []

    def dense(*args, implementation, **options):
        used.append(implementation)
        return original(*args, implementation="xla", **options)

    original = bert.dense
    monkeypatch.setattr(bert, "dense", dense)
    make(implementation="mosaic_gpu").head(jnp.ones((2, 16)))
    assert used == ["mosaic_gpu", "mosaic_gpu"]


def test_signature_follows_bert_model():
    classes = BertForSequenceClassification, BertModel
    ours, theirs = (inspect.signature(cls.from_pretrained).parameters for cls in classes)
    assert theirs.items() <= ours.items()
    assert ARCHITECTURES.keys() <= checkpoint_layouts.LAYOUTS.keys()
