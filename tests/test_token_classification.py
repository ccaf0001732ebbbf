"""Token classification: checkpoints of every layout against NumPy, what is refused, packed tokens and gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import jaxft
from cases import in_full
from jaxft.models import classification
from jaxft.models.bert import BertModel
from jaxft.models.checkpoint import LAYOUTS, CheckpointError
from jaxft.models.classification import BertForTokenClassification
from test_checkpoint import MODEL_TYPES, WEIGHTS, WIDTH, assert_same, forward, hf_config, hf_tensors, write
from test_classification import CONFIG, DISTILBERT, LABELS, NAMES, ROBERTA, classifier_config, run, some_inputs

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
    """A model whose vectors are random too."""
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
def test_save_writes_what_was_read(tmp_path, model_type):
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
    assert again.id2label == dict(enumerate(LABELS)) and again.settings["id2label"]["0"] == LABELS[0]


@pytest.mark.filterwarnings("default")  # of torch and transformers
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_reads_what_was_saved(tmp_path, model_type):
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


def test_pooler_of_the_checkpoint_is_not_read(tmp_path):
    """Nor of other heads what the names do not clash with."""
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
         ["'classifier.weight' is missing", "'classifier.bias' is missing"]),
        (token_tensors(), hf_config(), ["'classifier.weight': has shape [5, 12], expected [2, 12]"]),
        (token_tensors(), hf_config() | {"num_labels": 0},
         ["config.json: BertForTokenClassification: num_labels must be an integer from 1 to 1048576, got 0"]),
        (token_tensors(), token_config() | {"architectures": ["BertForSequenceClassification"]},
         ["architectures must name a class that ends in ForTokenClassification, got ['BertForSequenceC"]),
        (token_tensors(), token_config() | {"classifier_dropout": "0.1"},
         ["BertForTokenClassification: classifier_dropout must be None or a number in [0, 1), got '0.1'"]),
    ],
    ids=["no head", "another number of labels", "no label", "another task's head", "wrong rate"],
)  # fmt: skip
def test_refused(tmp_path, tensors, config, fragments):
    with pytest.raises(CheckpointError) as caught:
        BertForTokenClassification.from_pretrained(write(tmp_path, tensors, config))
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, DISTILBERT], ids=lambda config: config.model_type)
def test_packed_tokens(config):
    """The logits of a padded batch, token by token."""
    model, (ids, _, types) = make(config), some_inputs(config.model_type)
    lengths = np.array([7, 2, 5])
    mask = np.arange(7) < lengths[:, None]
    starts = np.append(0, np.cumsum(lengths))
    packed = (ids[mask], None, None if types is None else types[mask])
    got = jax.jit(lambda *arrays: model(*arrays, cu_seqlens=starts, max_seqlen=7))(*packed)
    assert got.shape == (14, model.num_labels)
    np.testing.assert_allclose(got, run(model, ids, mask, types)[mask], rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", *in_full("triton")])
def test_gradients(implementation, key):
    """In training mode, with dropout."""
    model, (ids, mask, types) = make(num_labels=3, implementation=implementation), some_inputs()
    model.train()
    labels = np.random.default_rng(4).integers(0, 3, ids.shape)

    def loss(model, key):
        logits = jax.nn.log_softmax(model(ids, mask, types, rngs=key))
        return -jnp.sum(jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] * mask.astype(np.float32))

    gradient = nnx.jit(nnx.grad(loss))(model, key)
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.state(model))
    for path, leaf in nnx.to_flat_state(gradient):
        assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 1e-5, path


def test_dtype_and_implementation_reach_the_head(monkeypatch):
    used = []

    def dense(x, kernel, bias, *, implementation):
        used.append((implementation, x.dtype, kernel.dtype))
        return original(x, kernel, bias, implementation="xla")

    original = classification.dense
    monkeypatch.setattr(classification, "dense", dense)
    make(implementation="named", dtype=jnp.bfloat16).classifier(jnp.ones((2, 3, 16), jnp.bfloat16))
    assert used == [("named", jnp.bfloat16, jnp.bfloat16)]


def test_public_name():
    assert jaxft.BertForTokenClassification is BertForTokenClassification
    assert LAYOUTS.keys() == ARCHITECTURES.keys()
