"""Token classification: checkpoints of every layout against NumPy, what is refused, packed tokens, loss and gradients.

And new heads on a checkpoint's encoder, of either classifier.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import jaxft
from cases import slow
from jaxft.checkpoint.files import CheckpointError
from jaxft.checkpoint.layouts import LAYOUTS
from jaxft.models import bert
from jaxft.models.bert import BertModel
from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
from test_checkpoint import MODEL_TYPES, WEIGHTS, WIDTH, assert_same, forward, hf_config, hf_tensors, write
from test_classification import (
    CONFIG,
    DISTILBERT,
    LABELS,
    NAMES,
    ROBERTA,
    classifier_config,
    classifier_tensors,
    run,
    some_inputs,
)
from test_masked_lm import lm_config, lm_tensors

ARCHITECTURES = {
    "bert": "BertForTokenClassification",
    "roberta": "RobertaForTokenClassification",
    "xlm-roberta": "XLMRobertaForTokenClassification",
    "camembert": "CamembertForTokenClassification",
    "distilbert": "DistilBertForTokenClassification",
}


def token_config(model_type="bert"):
    return classifier_config(model_type) | {"architectures": [ARCHITECTURES[model_type]]}


def token_tensors(model_type="bert", num_labels=5):
    rng, prefix = np.random.default_rng(2), NAMES[model_type][0]
    tensors = {prefix + name: value for name, value in hf_tensors(model_type, pooler=False).items()}
    tensors["classifier.weight"] = rng.normal(size=(num_labels, WIDTH)).astype(np.float32) / 3
    tensors["classifier.bias"] = rng.normal(size=num_labels).astype(np.float32)
    return tensors


def make(config=CONFIG, **options):
    """Returns a model with random vectors."""
    model = BertForTokenClassification(config, rngs=nnx.Rngs(0), **{"implementation": "xla"} | options)
    rng = np.random.default_rng(0)
    for _, parameter in nnx.to_flat_state(nnx.state(model)):
        if parameter.ndim == 1:
            parameter.set_value(parameter[...] + jnp.asarray(rng.normal(size=parameter.shape) * 0.3, parameter.dtype))
    return model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_match_numpy(tmp_path, model_type):
    tensors = token_tensors(model_type)
    folder = write(tmp_path, tensors, token_config(model_type))
    model = BertForTokenClassification.from_pretrained(folder, implementation="xla")
    ids, mask, types = some_inputs(model_type)
    prefix = NAMES[model_type][0]
    encoder = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    x = forward(encoder, model_type, ids, mask, types)[0][-1]
    expected = (x @ tensors["classifier.weight"].T.astype(np.float64) + tensors["classifier.bias"])[mask != 0]
    logits = run(model, ids, mask, types)
    assert logits.shape == (3, 7, 5) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[mask != 0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_save_restores_the_file(tmp_path, model_type):
    tensors, config = token_tensors(model_type), token_config(model_type)
    model = BertForTokenClassification.from_pretrained(write(tmp_path / "a", tensors, config))
    model.save_pretrained(tmp_path / "b")
    saved = safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS)
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert config.items() <= json.loads((tmp_path / "b" / "config.json").read_text()).items()
    again = BertForTokenClassification.from_pretrained(tmp_path / "b")
    assert_same(model, again)
    assert again.id2label == dict(enumerate(LABELS)) and again.settings == model.settings


@pytest.mark.filterwarnings("default")  # torch and transformers warn
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_reads_saved_checkpoints(tmp_path, model_type):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write(tmp_path / "a", token_tensors(model_type), token_config(model_type))
    model = BertForTokenClassification.from_pretrained(folder)
    model.save_pretrained(tmp_path / "b")
    auto = transformers.AutoModelForTokenClassification
    theirs, info = auto.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert type(theirs).__name__ == ARCHITECTURES[model_type]
    assert not any(info.values())  # nothing missing, unexpected or of another shape
    ids, mask, _ = some_inputs(model_type)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids), torch.tensor(mask)).logits.numpy()
    np.testing.assert_allclose(run(model, ids, mask)[mask != 0], expected[mask != 0], rtol=0, atol=1e-5)


def test_pooler_of_the_checkpoint_is_ignored(tmp_path):
    """Tensors of other heads are ignored, too, unless their names clash."""
    tensors, config = token_tensors(), token_config()
    plain = BertForTokenClassification.from_pretrained(write(tmp_path / "a", tensors, config))
    tensors["bert.pooler.dense.weight"] = np.ones((WIDTH, WIDTH), np.float32)
    tensors["bert.pooler.dense.bias"] = tensors["cls.predictions.bias"] = np.ones(WIDTH, np.float32)
    assert_same(plain, BertForTokenClassification.from_pretrained(write(tmp_path / "b", tensors, config)))
    encoder = BertModel.from_pretrained(tmp_path / "a")
    assert encoder.pooler is None
    assert_same(encoder, plain.bert)


def test_labels_of_a_new_model(tmp_path):
    assert BertForTokenClassification(CONFIG, rngs=None).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    model = make(DISTILBERT, id2label={0: "O", 1: "B", 2: "I"})
    model.save_pretrained(tmp_path)
    again = BertForTokenClassification.from_pretrained(tmp_path, implementation="xla")
    assert_same(model, again)
    assert again.id2label == {0: "O", 1: "B", 2: "I"} and again.config == DISTILBERT


@pytest.mark.parametrize(
    ("tensors", "config", "fragments"),
    [
        (hf_tensors("roberta"), hf_config("roberta"),
         ["'classifier.weight' is missing; pass rngs=nnx.Rngs(0) to the model's from_pretrained",
          "'classifier.bias' is missing"]),
        (token_tensors(), hf_config(),
         ["'classifier.weight': has shape [5, 12], expected [2, 12]; pass num_labels=5 or rngs=nnx.Rngs(0)"]),
        (token_tensors(), hf_config() | {"num_labels": 0},
         ["config.json: BertForTokenClassification: num_labels must be an integer from 1 to 1048576, got 0"]),
        (token_tensors(), token_config() | {"architectures": ["BertForSequenceClassification"]},
         ["architectures must name a class that ends in ForTokenClassification, got ['BertForSequenceC",
          "pass rngs=nnx.Rngs(0) to BertForTokenClassification.from_pretrained"]),
        (token_tensors(), token_config() | {"classifier_dropout": "0.1"},
         ["BertForTokenClassification: classifier_dropout must be None or a number in [0, 1), got '0.1'"]),
    ],
    ids=["no head", "another number of labels", "no label", "another task's head", "wrong rate"],
)  # fmt: skip
def test_wrong_checkpoints_are_refused(tmp_path, tensors, config, fragments):
    with pytest.raises(CheckpointError) as caught:
        BertForTokenClassification.from_pretrained(write(tmp_path, tensors, config))
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("config", [ROBERTA, *slow(CONFIG, DISTILBERT)], ids=lambda config: config.model_type)
def test_packed_tokens(config):
    """Logits of packed tokens equal the logits of a padded batch."""
    model, (ids, _, types) = make(config), some_inputs(config.model_type)
    lengths = np.array([7, 2, 5])
    mask = np.arange(7) < lengths[:, None]
    starts = np.append(0, np.cumsum(lengths))
    packed = (ids[mask], None, None if types is None else types[mask])
    got = jax.jit(lambda *arrays: model(*arrays, cu_seqlens=starts, max_seqlen=7))(*packed)
    assert got.shape == (14, model.num_labels)
    np.testing.assert_allclose(got, run(model, ids, mask, types)[mask], rtol=0, atol=2e-6)


@pytest.mark.parametrize("config", [CONFIG, *slow(ROBERTA, DISTILBERT)], ids=lambda config: config.model_type)
def test_loss(config):
    """The batch is padded, or packed with unused rows, whose labels remove_padding sets to 0."""
    model, (ids, _, types) = make(config, num_labels=3), some_inputs(config.model_type)
    mask = np.arange(7) < np.array([[7], [2], [5]])
    labels = np.where(mask, np.random.default_rng(4).integers(0, 3, ids.shape), -100)
    labels[0, 1:4] = -100
    used = labels != -100
    log_p = np.asarray(jax.nn.log_softmax(run(model, ids, mask, types)))[used]
    expected = -log_p[np.arange(len(log_p)), labels[used]].sum()
    loss = jax.jit(model.loss)
    found = loss(ids, labels, mask, types)
    assert (found.total.dtype, found.labelled) == (jnp.float32, used.sum())
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)
    assert np.isnan(loss(ids, np.where(used, labels, 3), mask, types).total)
    assert loss(ids, np.full(ids.shape, -100), mask, types) == (0, 0)

    (packed, _, starts), tags = (jaxft.remove_padding(jnp.asarray(x), mask, capacity=17) for x in (ids, labels))
    more = None if types is None else jaxft.remove_padding(jnp.asarray(types), mask, capacity=17).x
    found = jax.jit(lambda: model.loss(packed, tags.x, None, more, cu_seqlens=starts, max_seqlen=7))()
    assert found.labelled == used.sum()
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)


def test_loss_with_dropout(key):
    """The head has dropout, too."""
    model, (ids, mask, types) = make(num_labels=3, classifier_dropout=0.5), some_inputs()
    labels, options = np.where(mask, ids % 3, -100), {"deterministic": False, "rngs": key}
    log_p = np.asarray(jax.nn.log_softmax(jax.jit(lambda: model(ids, mask, types, **options))()))[mask != 0]
    found = jax.jit(lambda: model.loss(ids, labels, mask, types, **options))()
    np.testing.assert_allclose(found.total, -log_p[np.arange(len(log_p)), labels[mask != 0]].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.zeros((3, 6), int), ValueError, r"labels must have the shape of input_ids, \[3, 7\], got \[3, 6\]"),
        (np.zeros(3, int), ValueError, r"labels must have the shape of input_ids, \[3, 7\], got \[3\]"),
        (np.zeros((3, 7)), TypeError, "labels must be integers, got float"),
    ],
)
def test_wrong_labels_of_the_loss(monkeypatch, labels, error, message):
    model = make()
    monkeypatch.setattr(BertModel, "__call__", None)  # nothing may be computed
    with pytest.raises(error, match="BertForTokenClassification: " + message):
        model.loss(some_inputs()[0], labels)


@pytest.mark.parametrize("implementation", ["xla", *slow("triton")])
def test_gradients(implementation, key):
    """The model is in training mode, with dropout."""
    model, (ids, mask, types) = make(num_labels=3, implementation=implementation), some_inputs()
    model.train()
    labels = np.where(mask, np.random.default_rng(4).integers(0, 3, ids.shape), -100)

    def loss(model, key):
        return model.loss(ids, labels, mask, types, rngs=key).mean

    gradient = nnx.jit(nnx.grad(loss))(model, key)
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.state(model))
    for path, leaf in nnx.to_flat_state(gradient):
        assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 1e-5, path


def test_dtype_and_implementation_reach_the_head(monkeypatch):
    used = []

    def dense(x, kernel, bias, *, activation, implementation):
        used.append((implementation, x.dtype, kernel.dtype))
        return original(x, kernel, bias, implementation="xla")

    original = bert.dense
    monkeypatch.setattr(bert, "dense", dense)
    make(implementation="mosaic_gpu", dtype=jnp.bfloat16).classifier(jnp.ones((2, 3, 16), jnp.bfloat16))
    assert used == [("mosaic_gpu", jnp.bfloat16, jnp.bfloat16)]


def test_public_name():
    assert jaxft.BertForTokenClassification is BertForTokenClassification
    assert ARCHITECTURES.keys() <= LAYOUTS.keys()


def test_one_label_has_no_loss():
    with pytest.raises(ValueError, match="BertForTokenClassification: loss is for num_labels above 1, got 1"):
        make(num_labels=1).loss(some_inputs()[0], np.zeros((3, 7), int))


# --- New heads ---------------------------------------------------------------------------------------------------

CLASSES = [BertForSequenceClassification, BertForTokenClassification]


def head_of(model):
    return {path: x[...] for path, x in nnx.to_flat_state(nnx.state(model)) if path[0] != "bert"}


def last_layer(model):
    names = ("classifier", "kernel"), ("classifier", "bias"), ("head", "out_kernel"), ("head", "out_bias")
    return {path: value for path, value in head_of(model).items() if path in names}


@pytest.mark.parametrize(
    "model_type", ["bert", "distilbert", *slow(*(t for t in MODEL_TYPES if t not in ("bert", "distilbert")))]
)
@pytest.mark.parametrize("model_class", CLASSES)
def test_new_head_on_an_encoder(tmp_path, model_class, model_type):
    folder = write(tmp_path / "a", hf_tensors(model_type), hf_config(model_type) | {"initializer_range": 0.3})
    model = model_class.from_pretrained(folder, id2label=LABELS, implementation="xla", rngs=nnx.Rngs(0))
    encoder, other = BertModel.from_pretrained(folder), model_class.from_pretrained(folder, rngs=nnx.Rngs(1))
    pooler, encoder.pooler = encoder.pooler, None
    assert_same(encoder, model.bert)
    assert model.id2label == dict(enumerate(LABELS)) and other.num_labels == 2
    for path, value in head_of(model).items():
        if path[1].startswith("dense") and model_type == "bert":  # its head has the pooler
            np.testing.assert_array_equal(value, pooler.kernel[...] if value.ndim == 2 else pooler.bias[...])
        elif value.ndim == 2:
            assert 0.2 < value.std() < 0.4 and not np.array_equal(value[:, :2], head_of(other)[path][:, :2])
        else:
            assert not value.any()
    assert run(model, *some_inputs(model_type)).shape[-1] == 5
    model.save_pretrained(tmp_path / "b")
    again = model_class.from_pretrained(tmp_path / "b", implementation="xla")
    assert_same(model, again)
    assert nnx.split(model)[0] == nnx.split(again)[0]


def test_new_pooler_and_dtypes(tmp_path):
    folder = write(tmp_path, {"bert." + name: value for name, value in hf_tensors(pooler=False).items()})
    for param_dtype in (None, jnp.float32):
        options = {"num_labels": 3, "dtype": jnp.bfloat16, "param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
        model = BertForSequenceClassification.from_pretrained(folder, **options)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(param_dtype or jnp.bfloat16)}
        assert 0.01 < model.head.dense_kernel[...].std() < 0.03 and not model.head.dense_bias[...].any()


@pytest.mark.parametrize(("model_class", "make_tensors", "make_config"), [
    (BertForSequenceClassification, classifier_tensors, classifier_config),
    (BertForTokenClassification, token_tensors, token_config),
])  # fmt: skip
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_other_label_counts_need_a_new_head(tmp_path, model_class, make_tensors, make_config, model_type):
    """The last layer and the meaning of its logits are new. The rest of the head is the checkpoint's."""
    config = make_config(model_type) | {"problem_type": "multi_label_classification"}
    folder = write(tmp_path, make_tensors(model_type), config)
    plain = model_class.from_pretrained(folder)
    same = model_class.from_pretrained(folder, num_labels=5, rngs=nnx.Rngs(0))
    assert nnx.split(same)[0] == nnx.split(plain)[0]
    renamed = model_class.from_pretrained(folder, id2label=dict(enumerate("abcde")))
    assert renamed.id2label == dict(enumerate("abcde"))
    for model in (same, renamed):
        assert_same(model, plain)
    with pytest.raises(CheckpointError, match=r"has shape \[5, 12\], expected \[3, 12\]; pass num_labels=5 or rngs="):
        model_class.from_pretrained(folder, num_labels=3)
    model = model_class.from_pretrained(folder, num_labels=3, rngs=nnx.Rngs(0))
    assert_same(model.bert, plain.bert)
    assert model.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"} and "problem_type" not in model.settings
    for path, value in head_of(model).items():
        if path in last_layer(model):
            assert value.shape[-1] == 3 and value.any() == (value.ndim == 2)
        else:
            np.testing.assert_array_equal(value, head_of(plain)[path])


@pytest.mark.parametrize("model_class", CLASSES)
def test_new_head_replaces_another_tasks_head(tmp_path, model_class):
    """The other head may have the same names and shapes. At most its pooler is kept."""
    for number, (tensors, config) in enumerate([
        (lm_tensors() | {"bert." + name: value for name, value in hf_tensors().items()}, lm_config()),
        (token_tensors(), token_config()) if model_class is CLASSES[0] else (classifier_tensors(), classifier_config()),
    ]):  # fmt: skip
        folder = write(tmp_path / str(number), tensors, config)
        with pytest.raises(CheckpointError, match=r"architectures must name .* pass rngs=nnx.Rngs\(0\)"):
            model_class.from_pretrained(folder)
        model = model_class.from_pretrained(folder, num_labels=5, rngs=nnx.Rngs(0))
        assert model.id2label[0] == "LABEL_0"
        assert model_class.from_pretrained(folder, rngs=nnx.Rngs(0)).num_labels == 2
        encoder = BertModel.from_pretrained(folder)
        if model_class is CLASSES[0] and encoder.pooler is not None:
            np.testing.assert_array_equal(model.head.dense_kernel[...], encoder.pooler.kernel[...])
        encoder.pooler = None
        assert_same(encoder, model.bert)
        for value in last_layer(model).values():
            assert not value.any() if value.ndim == 1 else value.std() < 0.03


def test_multiple_choice_head_is_not_reused(tmp_path):
    tensors = classifier_tensors() | {"classifier.weight": np.ones((1, 12)), "classifier.bias": np.ones(1)}
    folder = write(tmp_path, tensors, classifier_config() | {"architectures": ["BertForMultipleChoice"]})
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=1, rngs=nnx.Rngs(0))
    assert abs(model.head.out_kernel[...]).max() < 0.2 and not model.head.out_bias[...].any()


def test_new_layers_are_logged(tmp_path, caplog):
    tensors = classifier_tensors()
    del tensors["bert.pooler.dense.weight"]
    folder = write(tmp_path, tensors | {"classifier.weight": np.ones((7, 12), np.float32)}, classifier_config())
    with caplog.at_level("INFO", logger="jaxft"):
        model = BertForSequenceClassification.from_pretrained(folder, rngs=nnx.Rngs(0))
    assert not model.head.dense_bias[...].any() and not model.head.out_bias[...].any()
    (message,) = caplog.messages
    names = "head.dense_bias, head.dense_kernel, head.out_bias, head.out_kernel"
    assert message == f"BertForSequenceClassification: new, and not of {folder}: {names}"


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("bert.embeddings.LayerNorm.bias", None, "'bert.embeddings.LayerNorm.bias' is missing"),
        ("bert.pooler.dense.bias", np.zeros(11, np.float32), "'bert.pooler.dense.bias': has shape [11], expected [12]"),
        ("classifier.weight", np.zeros((3, 11), np.float32), "has shape [3, 11], expected [5, 12]"),
        ("classifier.weight", np.zeros((5, 12), np.int32), "has dtype I32, expected one of F32, F16, BF16, F64"),
        ("classifier.weight", np.zeros((7, 12), np.int32), "has dtype I32, expected one of F32, F16, BF16, F64"),
        ("classifier.bias", np.zeros((), np.float32), "has shape [], expected [5]"),
    ],
)
def test_new_head_excuses_no_other_problem(tmp_path, name, change, problem):
    tensors = {key: value for key, value in classifier_tensors().items() if key != name}
    folder = write(tmp_path, tensors | ({} if change is None else {name: change}), classifier_config())
    with pytest.raises(CheckpointError) as caught:
        BertForSequenceClassification.from_pretrained(folder, rngs=nnx.Rngs(0))
    assert str(caught.value).endswith(problem) and len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rngs": 0}, TypeError, "BertForTokenClassification: rngs must be an nnx.Rngs or None, got int"),
        ({"rngs": nnx.Rngs(dropout=0)}, ValueError, "rngs must have a stream named params or default, got dropout"),
        ({"num_labels": 2.0}, ValueError, "BertForTokenClassification: num_labels must be an integer from 1 to 10"),
        ({"num_labels": 0}, ValueError, "BertForTokenClassification: num_labels must be an integer from 1 to 10"),
        ({"id2label": "ab"}, ValueError, "BertForTokenClassification: id2label must name the labels from 0 on"),
        ({"num_labels": 3, "id2label": ["a"]}, ValueError, "num_labels is 3, but id2label names 1 labels"),
        ({"labels": 3}, TypeError, "unexpected keyword argument 'labels'"),
    ],
)
def test_wrong_options(tmp_path, options, error, message):
    folder = write(tmp_path, hf_tensors())
    with pytest.raises(error, match=message) as caught:
        BertForTokenClassification.from_pretrained(folder, **{"rngs": nnx.Rngs(0)} | options)
    assert not isinstance(caught.value, CheckpointError)
