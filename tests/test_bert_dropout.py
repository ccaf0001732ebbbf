"""Dropout in the models, in training and in evaluation, and rematerialisation, which changes no number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxft
import oracle
from cases import INTERPRET, slow, slow_cases
from jaxft.dropout import dropout_mask
from jaxft.models import bert, dropout
from jaxft.models.bert import BertModel, named_parameters
from jaxft.models.classification import BertForSequenceClassification, BertForTokenClassification
from test_bert import CONFIG, DISTILBERT, ROBERTA, assert_close, make, some_ids

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "triton"])
HIDDEN, ATTENTION, HEAD = 0.25, 0.4, 0.3
RATES = {"hidden_dropout_prob": HIDDEN, "attention_probs_dropout_prob": ATTENTION}
DROPPING = dataclasses.replace(CONFIG, **RATES)
MASK = np.arange(7) < np.array([4, 7, 6])[:, None]


@functools.partial(jax.jit, static_argnums=0, static_argnames="deterministic")
def compiled(graph, params, *args, **inputs):
    return nnx.merge(graph, params)(*args, **inputs)


def run(model, *args, **inputs):
    return compiled(*nnx.split(model), *args, **inputs)


def training(config=DROPPING, **options):
    model = make(config, **options)
    model.train()
    return model


def hidden(model, *args, **inputs):
    return run(model, *args, **inputs).last_hidden_state


def keep(key, place, rate, *shape):
    """Returns the keep mask of a key. No release may change the masks: checkpointed training relies on them."""
    return {"keep": np.asarray(dropout_mask(jax.random.fold_in(key, place), rate, shape)), "rate": rate}


def expected_states(model, ids, mask, key):
    """Computes hidden states in float64, with dropout where BERT has it."""
    p = {name: np.asarray(value[...], np.float64) for name, value in named_parameters(model).items()}
    rows, inner, eps = (*ids.shape, 16), (ids.shape[0], 2, ids.shape[1], ids.shape[1]), {"epsilon": 1e-12}
    tables = [p["embeddings." + name] for name in ("word", "position", "token_type", "norm_gamma", "norm_beta")]
    first = keep(key, 2, HIDDEN, *rows)
    x = oracle.embeddings_layer_norm(ids, *tables, token_type_ids=np.zeros_like(ids), **eps, **first)
    for i, at in ((i, f"layers.{i}.") for i in range(2)):
        qkv = oracle.dense(x, p[at + "qkv_kernel"], p[at + "qkv_bias"]).reshape(*ids.shape, 3, 2, 8)
        probabilities = keep(key, 3 + 3 * i, ATTENTION, *inner)
        attended = oracle.qkv_attention(qkv, mask=mask[:, None, None], **probabilities).reshape(rows)
        vectors = p[at + "out_bias"], x, p[at + "attention_norm_gamma"], p[at + "attention_norm_beta"]
        after = keep(key, 4 + 3 * i, HIDDEN, *rows)
        x = oracle.bias_residual_layer_norm(attended @ p[at + "out_kernel"], *vectors, **eps, **after)
        h = oracle.dense(x, p[at + "ffn_in_kernel"], p[at + "ffn_in_bias"], activation="gelu")
        vectors = p[at + "ffn_out_bias"], x, p[at + "ffn_norm_gamma"], p[at + "ffn_norm_beta"]
        after = keep(key, 5 + 3 * i, HIDDEN, *rows)
        x = oracle.bias_residual_layer_norm(h @ p[at + "ffn_out_kernel"], *vectors, **eps, **after)
    return x


# --- The encoder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "remat"), [("triton", True), *slow_cases(("xla", False), ("xla", True), ("triton", False))]
)
def test_dropout_is_applied_where_bert_applies_it(implementation, remat, key):
    """The masks are the functions of the call's key that `keep` returns."""
    model, ids = training(implementation=implementation, remat=remat), some_ids()
    got, expected = hidden(model, ids, MASK, rngs=key), expected_states(model, ids, MASK, key)
    assert_close(got[MASK], expected[MASK], 1e-5)
    assert np.abs(hidden(model, ids, MASK, deterministic=True) - expected)[MASK].max() > 0.1


@pytest.mark.parametrize("config", [ROBERTA, DISTILBERT], ids=lambda config: config.model_type)
def test_other_model_types_drop_too(config):
    model, ids = training(dataclasses.replace(config, **RATES)), some_ids()
    outs = [hidden(model, ids, MASK, rngs=jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert np.isfinite(outs[0][MASK]).all() and np.abs(outs[0] - outs[2])[MASK].max() > 0.1


def recorded(monkeypatch, *names):
    """Returns the options of each call of these operations by the model, in order."""
    seen = []

    def recorder(original):
        def record(*args, **options):
            seen.append(options)
            return original(*args, **options)

        return record

    for name in names:
        monkeypatch.setattr(bert, name, recorder(getattr(bert, name)))
    return seen


def test_distilbert_drops_no_attention_output(monkeypatch, key):
    seen = recorded(monkeypatch, "dense_residual_layer_norm", "feed_forward_residual_layer_norm")
    hidden(training(dataclasses.replace(DISTILBERT, **RATES)), some_ids(), rngs=key)
    assert ["dropout_rng" in options for options in seen] == [False, True] * DISTILBERT.num_hidden_layers


def test_each_rate_works_alone(key):
    model, ids = training(), some_ids()
    both = hidden(model, ids, rngs=key)
    for name in RATES:
        one = training(dataclasses.replace(DROPPING, **{name: 0.0}))
        out = hidden(one, ids, rngs=key)
        assert np.abs(out - both).max() > 0.1 and np.abs(out - hidden(one, ids, deterministic=True)).max() > 0.1
    none = training(dataclasses.replace(DROPPING, **dict.fromkeys(RATES, 0.0)))
    np.testing.assert_array_equal(hidden(none, ids), hidden(model, ids, deterministic=True))  # and needs no key


def test_every_dropout_has_its_own_key(monkeypatch, key):
    calls = recorded(
        monkeypatch, "embeddings_layer_norm", "qkv_attention", "dense_residual_layer_norm",
        "feed_forward_residual_layer_norm",
    )  # fmt: skip

    def seen():
        return [(options.get("dropout_rate"), options.get("dropout_rng")) for options in calls]

    model = training()
    model(some_ids(), rngs=key)
    assert [rate for rate, _ in seen()] == [HIDDEN, *[ATTENTION, HIDDEN, HIDDEN] * 2]
    assert len({tuple(jax.random.key_data(key).tolist()) for _, key in seen()}) == 7
    calls.clear()
    model(some_ids(), deterministic=True)
    assert seen() == [(None, None)] * 7


def test_head_and_encoder_share_no_key(key):
    first, layers = dropout.encoder_keys(key, 3)
    keys = [*dropout.head_keys(key), first, *layers.reshape(-1)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 2 + 1 + 9


def test_train_and_eval():
    model, ids, key = make(DROPPING), some_ids(), jax.random.key(1)
    assert model.deterministic is True
    plain = hidden(model, ids)
    np.testing.assert_array_equal(hidden(model, ids, rngs=key), plain)  # the key is then unused
    dropped = hidden(model, ids, deterministic=False, rngs=key)
    assert np.abs(dropped - plain).max() > 0.1
    model.train()
    assert model.deterministic is False
    np.testing.assert_array_equal(hidden(model, ids, rngs=key), dropped)
    np.testing.assert_array_equal(hidden(model, ids, deterministic=True), plain)
    model.eval()
    np.testing.assert_array_equal(hidden(model, ids), plain)
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(model, nnx.Param))  # nothing else


def test_pretrained_models_start_in_evaluation(tmp_path):
    training().save_pretrained(tmp_path)
    model = BertModel.from_pretrained(tmp_path, remat=True)
    assert (model.deterministic, model.remat, model.config) == (True, True, DROPPING)
    assert BertModel.from_pretrained(tmp_path).remat is False


def test_kinds_of_rngs(key):
    """An `nnx.Rngs` gives one key per call, from its stream for dropout or from the default stream."""
    model, ids = training(), some_ids()
    for make_rngs in (lambda: nnx.Rngs(dropout=5), lambda: nnx.Rngs(5), lambda: nnx.Rngs(params=1, default=5)):
        rngs, same = make_rngs(), make_rngs()
        for _ in range(2):
            np.testing.assert_array_equal(
                model(ids, rngs=rngs).last_hidden_state, model(ids, rngs=same.dropout()).last_hidden_state
            )
    for other in (jax.random.key_data(key), jax.random.wrap_key_data(jax.random.key_data(key))):
        np.testing.assert_array_equal(hidden(model, ids, rngs=other), hidden(model, ids, rngs=key))
    assert np.isfinite(hidden(model, ids, rngs=jax.random.key(0, impl="rbg"))).all()
    untouched = nnx.Rngs(dropout=5)
    model(ids, deterministic=True, rngs=untouched)
    assert untouched.dropout.count[...] == 0


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({}, ValueError, r"hidden_dropout_prob is 0.25, attention_probs_dropout_prob is 0.4.*, so rngs must be an "
         r"nnx.Rngs such as nnx.Rngs\(dropout=0\), or a JAX random key, got None; .* model.eval\(\)"),
        ({"rngs": nnx.Rngs(params=0, noise=1)}, ValueError,
         "rngs must have a stream named dropout or default, got params, noise"),
        ({"rngs": 3}, TypeError, r"rngs must be an nnx.Rngs or one JAX random key \(jax.random.key\), got int"),
        ({"rngs": jnp.zeros(4, jnp.uint32)}, TypeError, r"one JAX random key \(jax.random.key\), got uint32\[4\]"),
        ({"rngs": jnp.zeros(3)}, TypeError, r"one JAX random key \(jax.random.key\), got float32\[3\]"),
        ({"deterministic": 0}, TypeError, "deterministic must be True or False, got int"),
    ],
)  # fmt: skip
def test_errors(inputs, error, message):
    for model in (training(), BertForTokenClassification(DROPPING, rngs=nnx.Rngs(0))):
        model.train()
        with pytest.raises(error, match="BertModel: .*" + message):
            model(some_ids(), **inputs)


@pytest.mark.parametrize("trace", [nnx.grad, nnx.jit], ids=["grad", "jit"])
def test_rngs_of_an_outer_trace_are_refused(trace):
    """Flax cannot count calls in an inner trace."""
    model, rngs = training(), nnx.Rngs(dropout=0)
    run = trace(lambda model: model(some_ids(), rngs=rngs).last_hidden_state.sum())
    with pytest.raises(ValueError, match=r"BertModel: rngs must not .* outside .*, key = rngs.dropout\(\), and"):
        run(model)


def test_remat_is_a_flag():
    with pytest.raises(TypeError, match="BertModel: remat must be True or False, got int"):
        BertModel(CONFIG, remat=1, rngs=None)


@pytest.mark.parametrize("implementation", ["xla", *slow("triton")])
def test_packed_sequences_drop_the_same_elements(implementation, key):
    """A single packed sequence has the element numbers of the padded one."""
    model, ids = training(implementation=implementation), some_ids(1)
    packed = jax.jit(lambda key: model(ids[0], cu_seqlens=[0, 7], max_seqlen=7, rngs=key).last_hidden_state)(key)
    assert_close(packed, hidden(model, ids, rngs=key)[0])
    ids = some_ids()
    packed = jaxft.remove_padding(jnp.asarray(ids), MASK, capacity=20)
    call = jax.jit(lambda key: model(packed.x, cu_seqlens=packed.cu_seqlens, max_seqlen=7, rngs=key).last_hidden_state)
    outs = [call(jax.random.key(seed))[: MASK.sum()] for seed in (0, 1)]
    assert np.isfinite(outs[0]).all() and np.abs(outs[0] - outs[1]).max() > 0.1


# --- Transformations, and rematerialisation ----------------------------------------------------------------------


def loss(model, ids, rngs):
    out = model(ids, MASK, rngs=rngs)
    return jnp.sum(jnp.sin(3 * out.last_hidden_state) * MASK[..., None].astype(np.float32)) + jnp.sum(out.pooler_output)


def test_nnx_transformations():
    """The mode is a part of the compiled program. The stream of keys goes on from call to call."""
    model, ids = make(dataclasses.replace(DROPPING, num_hidden_layers=1)), some_ids()
    by_nnx = nnx.jit(nnx.value_and_grad(loss))
    rngs, same = nnx.Rngs(dropout=4), nnx.Rngs(dropout=4)
    plain, _ = by_nnx(model, ids, rngs)
    model.train()
    graph, params = nnx.split(model)
    pure = jax.jit(jax.value_and_grad(lambda params, key: loss(nnx.merge(graph, params), ids, key)))
    losses = []
    for _ in range(2):
        value, gradient = by_nnx(model, ids, rngs)
        expected, expected_gradient = pure(params, same.dropout())
        assert_close(value, expected, 1e-5)
        for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            assert_close(got, wanted, 1e-4)
        losses.append(float(value))
    assert len({float(plain), *losses}) == 3
    model.eval()
    assert by_nnx(model, ids, rngs)[0] == plain


def test_remat_changes_no_number(key):
    config = dataclasses.replace(DROPPING, num_hidden_layers=1)
    implementation = "xla" if INTERPRET else "triton"  # on a GPU, XLA sums embeddings in another order in each run

    def results(remat):
        graph, params = nnx.split(training(config, remat=remat, implementation=implementation))
        call = jax.value_and_grad(lambda params, key: loss(nnx.merge(graph, params), some_ids(), key))
        # The operations run one by one: a compiled program would fuse them differently, which changes the last bits.
        return str(jax.make_jaxpr(call)(params, key)), call(params, key)

    (plain_text, plain), (text, remat) = results(False), results(True)
    assert ("remat" in text or "checkpoint" in text) and not ("remat" in plain_text or "checkpoint" in plain_text)
    jax.tree.map(np.testing.assert_array_equal, remat, plain)


def test_remat_works_in_a_loop(key):
    ids = np.stack([some_ids(), some_ids()[::-1]])

    @functools.partial(jax.jit, static_argnums=0)
    def each(graph, params):
        return jax.lax.map(lambda ids: nnx.merge(graph, params)(ids, rngs=key).pooler_output, ids)

    assert_close(*(each(*nnx.split(training(remat=remat))) for remat in (True, False)), 1e-6)


def gradient_memory(model_class, config, remat):
    """Returns the bytes that the compiled gradient needs beside its inputs and outputs."""
    model = model_class(config, implementation="xla", remat=remat, rngs=nnx.Rngs(0))
    model.train()
    graph, params = nnx.split(model)

    def total(params, ids, key):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(nnx.merge(graph, params)(ids, rngs=key)))

    ids = np.zeros((4, 64), np.int32)
    # On a CPU, this pass removes the barriers before XLA merges equal computations, which would undo remat.
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"} if INTERPRET else None
    compiled = jax.jit(jax.grad(total)).lower(params, ids, jax.random.key(0)).compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("model_class", [BertModel, *slow(BertForSequenceClassification, BertForTokenClassification)])
def test_remat_saves_memory(model_class):
    config = dataclasses.replace(DROPPING, num_hidden_layers=4, max_position_embeddings=64)
    plain, remat = (gradient_memory(model_class, config, remat) for remat in (False, True))
    assert remat < 0.6 * plain, (remat, plain)


# --- Heads -------------------------------------------------------------------------------------------------------


def head_parts(model, ids, key):
    """Returns the hidden states of the encoder and the parameters of the head in float64."""
    x = model.bert(ids, rngs=key).last_hidden_state.astype(jnp.float32)
    return np.asarray(x, np.float64), {n: np.asarray(v[...], np.float64) for n, v in named_parameters(model).items()}


def drop(x, key, place, rate):
    mask = keep(key, place, rate, *x.shape)["keep"]
    return np.where(mask, x / (1 - rate), 0.0)


@pytest.mark.parametrize(
    ("config", "given"),
    [(CONFIG, HEAD), (ROBERTA, None), (DISTILBERT, None),
     *slow_cases((CONFIG, None), (ROBERTA, HEAD), (DISTILBERT, HEAD))],
    ids=lambda value: getattr(value, "model_type", None),
)  # fmt: skip
def test_sequence_head_has_dropout(config, given, key):
    config = dataclasses.replace(config, hidden_dropout_prob=HIDDEN)
    model = BertForSequenceClassification(config, num_labels=5, classifier_dropout=given, rngs=nnx.Rngs(0))
    model.train()
    ids, rate = some_ids(), given or (0.2 if config.model_type == "distilbert" else HIDDEN)
    x, p = head_parts(model, ids, key)
    x = drop(x[:, 0], key, 0, rate) if config.model_type == "roberta" else x[:, 0]
    x = x @ p["head.dense_kernel"] + p["head.dense_bias"]
    x = np.maximum(x, 0.0) if config.model_type == "distilbert" else np.tanh(x)
    expected = drop(x, key, 1, rate) @ p["head.out_kernel"] + p["head.out_bias"]
    assert_close(model(ids, rngs=key), expected)
    assert np.abs(model(ids, deterministic=True) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("config", "given"),
    [(CONFIG, None), (DISTILBERT, HEAD), *slow_cases((CONFIG, HEAD), (DISTILBERT, None))],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_token_head_has_dropout(config, given, key):
    config = dataclasses.replace(config, hidden_dropout_prob=HIDDEN)
    model = BertForTokenClassification(config, num_labels=5, classifier_dropout=given, rngs=nnx.Rngs(0))
    model.train()
    x, p = head_parts(model, some_ids(), key)
    expected = drop(x, key, 0, given or HIDDEN) @ p["classifier.kernel"] + p["classifier.bias"]
    assert_close(model(some_ids(), rngs=key), expected)
    rngs = nnx.Rngs(dropout=0)
    model(some_ids(), rngs=rngs)
    assert rngs.dropout.count[...] == 1  # one for the encoder, one for the head


def test_rate_of_one_forbids_dropout_calls(key):
    """A checkpoint may have such a rate. Its model works without dropout."""
    model = BertModel(dataclasses.replace(CONFIG, attention_probs_dropout_prob=1.0), rngs=nnx.Rngs(0))
    assert np.isfinite(hidden(model, some_ids())).all()
    with pytest.raises(
        ValueError, match="BertModel: for calls with dropout attention_probs_dropout_prob must be below"
    ):
        model(some_ids(), deterministic=False, rngs=key)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_token_head_stores_no_dropout_mask(implementation, key):
    """It may store `x`, and the input of the dense layer, of which the gradient of the kernel is computed."""
    head = BertForTokenClassification(
        CONFIG, num_labels=3, implementation=implementation, rngs=nnx.Rngs(0)
    ).classifier  # fmt: skip
    x, options = jax.random.normal(key, (4, 6, CONFIG.hidden_size)), {"dropout_rate": 0.5, "dropout_rng": key}
    _, pull_back = jax.vjp(lambda x: head(x, **options), x)
    kept = [array for array in jax.tree.leaves(pull_back) if array.shape == x.shape]
    given = x, head.features(x, **options)
    assert all(any(np.array_equal(array, one) for one in given) for array in kept)


def test_dropout_in_the_head_alone_needs_a_key(key):
    """Dropout in the head needs a key even if the encoder has none."""
    config = dataclasses.replace(CONFIG, **dict.fromkeys(RATES, 0.0))
    model = BertForSequenceClassification(config, classifier_dropout=0.5, rngs=nnx.Rngs(0))
    model.train()
    with pytest.raises(ValueError, match="deterministic is False and classifier_dropout is 0.5, so rngs must"):
        model(some_ids())
    assert np.abs(model(some_ids(), rngs=key) - model(some_ids(), deterministic=True)).max() > 1e-3


@pytest.mark.parametrize("given", [-0.1, 1, 1.5, True, "0.1", float("nan")])
def test_head_refuses_wrong_rates(given):
    message = r"BertForTokenClassification: classifier_dropout must be None or a number in \[0, 1\), got"
    with pytest.raises(ValueError, match=message):
        BertForTokenClassification(CONFIG, classifier_dropout=given, rngs=None)


@pytest.mark.parametrize(
    ("model_class", "config", "field"),
    [
        (BertForSequenceClassification, CONFIG, "classifier_dropout"),
        (BertForSequenceClassification, DISTILBERT, "seq_classif_dropout"),
        (BertForTokenClassification, ROBERTA, "classifier_dropout"),
    ],
)
def test_saved_config_keeps_the_head_rate(tmp_path, model_class, config, field):
    for rate in (None, 0.0, 0.35):
        model_class(config, classifier_dropout=rate, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
        settings = model_class.from_pretrained(tmp_path).settings
        assert settings.get(field) == rate and (field in settings) == (rate is not None)
        again = model_class.from_pretrained(tmp_path, remat=True)
        assert (again.classifier_dropout, again.bert.remat, again.bert.deterministic) == (rate, True, True)
