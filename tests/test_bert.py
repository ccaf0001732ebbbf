"""Configuration, inputs, outputs and gradients of the encoder. test_checkpoint.py checks its numbers."""

import collections
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cases import lower, slow, slow_cases
from jaxft import dispatch
from jaxft.models import bert
from jaxft.models import config as config_module
from jaxft.models.bert import BertConfig, BertModel
from jaxft.ops.bias_activation import bias_activation
from lowered import operations

CONFIG = BertConfig(
    vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=20, initializer_range=0.3,
)  # fmt: skip
ROBERTA = dataclasses.replace(CONFIG, model_type="roberta", pad_token_id=1, type_vocab_size=1)
DISTILBERT = dataclasses.replace(CONFIG, model_type="distilbert", type_vocab_size=0)
MODEL_TYPES = ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"]


def make(config=CONFIG, **options):
    """Returns a model with random vectors: with zero biases, a missing bias would go unnoticed."""
    model = BertModel(config, rngs=nnx.Rngs(0), **{"implementation": "xla"} | options)
    rng = np.random.default_rng(0)
    for _, parameter in nnx.to_flat_state(nnx.state(model)):
        if parameter.ndim == 1:
            noise = rng.normal(size=parameter.shape) * 0.3
            parameter.set_value(parameter[...] + jnp.asarray(noise, parameter.dtype))
    return model


@functools.partial(jax.jit, static_argnums=0, static_argnames="output_hidden_states")
def compiled(graph, params, *args, **inputs):
    return nnx.merge(graph, params)(*args, **inputs)


def run(model, *args, **inputs):
    """Calls a model. Models of the same configuration share the compiled program."""
    return compiled(*nnx.split(model), *args, **inputs)


@pytest.fixture(scope="module")
def model():
    return make()


def some_ids(batch=3, length=7):
    return np.random.default_rng(1).integers(2, CONFIG.vocab_size, (batch, length)).astype(np.int32)


def assert_close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max())))


# --- Configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", -1, "integer from 1 to 65536"),
        ("hidden_size", 16.0, "integer from 1 to 65536"),
        ("hidden_size", 2**16 + 8, "integer from 1 to 65536"),
        ("vocab_size", 0, "integer from 1 to 16777216"),
        ("vocab_size", "31", "integer from 1 to 16777216"),
        ("num_hidden_layers", True, "integer from 1 to 1024"),
        ("num_hidden_layers", 1025, "integer from 1 to 1024"),
        ("num_attention_heads", None, "integer from 1 to 65536"),
        ("intermediate_size", 2**18 + 1, "integer from 1 to 262144"),
        ("max_position_embeddings", 2**20 + 1, "integer from 1 to 1048576"),
        ("type_vocab_size", -1, "integer from 0 to 65536"),
        ("pad_token_id", -1, "integer from 0 to"),
        ("pad_token_id", 31, "is not below vocab_size 31"),
        ("num_attention_heads", 3, "hidden_size 16 is not divisible by num_attention_heads 3"),
        ("layer_norm_eps", 0.0, "finite number above 0"),
        ("layer_norm_eps", float("nan"), "finite number above 0"),
        ("layer_norm_eps", float("inf"), "finite number above 0"),
        ("layer_norm_eps", "1e-12", "finite number above 0"),
        pytest.param("layer_norm_eps", 10**400, "finite number above 0", id="beyond float"),
        ("initializer_range", -0.1, "finite number of at least 0"),
        ("hidden_dropout_prob", 1.5, "number from 0 to 1"),
        ("attention_probs_dropout_prob", "x", "number from 0 to 1"),
        ("hidden_act", "geglu", "must be one of gelu, gelu_new"),
        ("model_type", "gpt2", "must be one of bert, ernie, roberta, xlm-roberta, "),
    ],
)
def test_config_refuses(field, value, expected):
    with pytest.raises(ValueError, match="BertConfig: .*" + field) as caught:
        dataclasses.replace(CONFIG, **{field: value})
    assert expected in str(caught.value)


def test_config_takes_the_ends_of_ranges():
    ends = {"hidden_dropout_prob": 1, "attention_probs_dropout_prob": 0, "initializer_range": 0, "type_vocab_size": 0}
    config = dataclasses.replace(CONFIG, **ends, num_hidden_layers=1024, pad_token_id=CONFIG.vocab_size - 1)
    assert dataclasses.asdict(config).items() >= ends.items()


def test_config_refuses_two_values_of_one_field():
    with pytest.raises(ValueError, match="qkv_bias and out_bias must be equal, they are one field, attention_bias, of"):
        BertConfig("modernbert", qkv_bias=True, out_bias=False)


def test_activations_have_the_names_of_transformers():
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
             "relu": "relu", "silu": "silu", "swish": "silu"}  # fmt: skip
    assert {name: BertConfig(hidden_act=name).activation for name in names} == names
    heads = {name: BertConfig.from_dict({"model_type": "modernbert", "classifier_activation": name}) for name in names}
    assert {name: config.head_activation for name, config in heads.items()} == names


def test_config_names_all_problems_at_once():
    with pytest.raises(ValueError) as caught:
        BertConfig(hidden_size=-5, vocab_size=10**30, hidden_act="what", layer_norm_eps=-1, hidden_dropout_prob=2)
    for part in ("hidden_size", "-5", "vocab_size", "hidden_act", "'what'", "layer_norm_eps", "hidden_dropout_prob"):
        assert part in str(caught.value)


def test_config_bounds_the_number_of_parameters():
    with pytest.raises(ValueError, match="the sizes make 13[0-9]* parameters, at most 68719476736"):
        BertConfig(hidden_size=2**15, num_attention_heads=2**8, intermediate_size=2**17, num_hidden_layers=10)


def test_config_counts_parameters(monkeypatch):
    sizes = {field: 8 for field in ("vocab_size", "max_position_embeddings", "type_vocab_size")}
    config = BertConfig(hidden_size=512, num_attention_heads=8, intermediate_size=512, **sizes)
    count = sum(p.size for _, p in nnx.to_flat_state(nnx.state(BertModel(config, rngs=None))) if p.ndim == 2)
    monkeypatch.setattr(config_module, "_MAX_PARAMETERS", count)
    dataclasses.replace(config)
    monkeypatch.setattr(config_module, "_MAX_PARAMETERS", count - 1)
    with pytest.raises(ValueError, match=f"the sizes make {count} parameters"):
        dataclasses.replace(config)


def test_config_counts_parameters_of_each_kind(monkeypatch):
    monkeypatch.setattr(config_module, "_MAX_PARAMETERS", 0)

    def count(model_type, layers):
        with pytest.raises(ValueError, match="the sizes make") as caught:
            BertConfig(model_type, hidden_size=24, intermediate_size=40, num_hidden_layers=layers)
        return int(re.search(r"make (\d+) ", str(caught.value))[1])

    assert count("albert", 9) == count("albert", 1) == count("bert", 1)
    assert count("nomic_bert", 9) - count("bert", 9) == 9 * 24 * 40  # the other half of the gate


def test_roberta_config_needs_positions_after_padding():
    assert dataclasses.replace(ROBERTA, max_position_embeddings=3).max_sequence_length == 1
    with pytest.raises(ValueError, match="max_position_embeddings 2 leaves no position after pad_token_id 1"):
        dataclasses.replace(ROBERTA, max_position_embeddings=2)


def test_distilbert_config_has_fixed_fields():
    for name, value, fixed in (
        ("type_vocab_size", 2, "0"),
        ("layer_norm_eps", 1e-5, "1e-12"),
        ("norm_first", True, "False"),
    ):
        with pytest.raises(ValueError, match=f"of a distilbert model {name} is always {fixed}, got {value}"):
            dataclasses.replace(DISTILBERT, **{name: value})


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, DISTILBERT], ids=lambda config: config.model_type)
def test_config_survives_json(config):
    assert BertConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_config_defaults(model_type):
    config = BertConfig.from_dict({"model_type": model_type, "pad_token_id": None, "id2label": {}})
    assert config.pad_token_id == (0 if model_type in ("bert", "distilbert") else 1)
    assert config.type_vocab_size == (0 if model_type == "distilbert" else 2)
    assert config.num_hidden_layers == (6 if model_type == "distilbert" else 12)
    assert config.vocab_size == (50265 if model_type == "roberta" else 30522)


def test_distilbert_names():
    theirs = {
        "model_type": "distilbert", "dim": 24, "n_heads": 4, "n_layers": 3, "hidden_dim": 48, "activation": "relu",
        "dropout": 0.2, "attention_dropout": 0.3, "vocab_size": 99, "max_position_embeddings": 40,
    }  # fmt: skip
    config = BertConfig.from_dict(theirs)
    assert config == BertConfig(
        model_type="distilbert", hidden_size=24, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48,
        hidden_act="relu", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, vocab_size=99,
        max_position_embeddings=40, type_vocab_size=0,
    )  # fmt: skip
    assert theirs.items() <= config.to_dict().items()
    with pytest.raises(
        ValueError, match=r"hidden_size \(dim\) must be .* got -24; num_attention_heads \(n_heads\) must"
    ):
        BertConfig.from_dict(theirs | {"dim": -24, "n_heads": 0})


def test_config_refuses_decoders_and_relative_positions():
    refused = ("is_decoder", "add_cross_attention", "is_causal")
    config = {"model_type": "bert", "hidden_size": 0} | dict.fromkeys(refused, True)
    with pytest.raises(ValueError) as caught:
        BertConfig.from_dict(config | {"position_embedding_type": "relative_key"})
    for part in (*(f"{name} is True" for name in refused), "position_embedding_type must be 'absolute'",
                 "'relative_key'", "hidden_size"):  # fmt: skip
        assert part in str(caught.value)
    BertConfig.from_dict({"model_type": "bert", "is_decoder": False, "position_embedding_type": "absolute"})


# --- Inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": np.zeros((3, 7), np.float32)}, TypeError, "input_ids must be integers, got float32"),
        ({"input_ids": np.zeros((3, 7), bool)}, TypeError, "input_ids must be integers, got bool"),
        ({"input_ids": np.zeros(7, np.int32)}, ValueError, r"must have a shape \[batch, tokens\].* got \[7\]"),
        ({"input_ids": np.zeros((3, 0), np.int32)}, ValueError, r"tokens > 0, got \[3, 0\]"),
        ({"input_ids": None}, TypeError, "input_ids must be integers, got NoneType"),
        ({"input_ids": "abc"}, TypeError, "input_ids must be integers, got str"),
        ({"input_ids": [[1, None]]}, TypeError, "input_ids must be integers, got object"),
        ({"input_ids": [[1, 2], [3]]}, TypeError, "input_ids must be integers, got list"),
        ({"input_ids": np.full((3, 7), 2**32 + 1)}, ValueError, "input_ids must fit int32, got 4294967297"),
        ({"input_ids": [[1, -(2**31) - 1]]}, ValueError, "input_ids must fit int32, got -2147483649"),
        ({"attention_mask": np.full((3, 7), 2**32)}, ValueError, "attention_mask must fit int32, got 4294967296"),
        ({"attention_mask": np.ones((3, 7), np.float32)}, TypeError, "attention_mask must be integers or booleans"),
        ({"attention_mask": np.ones((3, 8), np.int32)}, ValueError, r"attention_mask .* \[3, 7\], got \[3, 8\]"),
        ({"token_type_ids": np.ones((1, 7), np.int32)}, ValueError, r"token_type_ids .* \[3, 7\], got \[1, 7\]"),
        ({"token_type_ids": np.ones((3, 7), bool)}, TypeError, "token_type_ids must be integers, got bool"),
        ({"position_ids": np.ones(7, np.int32)}, ValueError, r"position_ids .* \[3, 7\], got \[7\]"),
        ({"position_ids": np.ones((3, 7), np.float16)}, TypeError, "position_ids must be integers, got float16"),
    ],
)
def test_wrong_inputs(model, inputs, error, message):
    with pytest.raises(error, match="BertModel: .*" + message):
        model(**{"input_ids": some_ids()} | inputs)


def test_kinds_of_inputs(model):
    ids = some_ids()
    expected = model(ids).last_hidden_state
    for same in (ids.tolist(), tuple(map(tuple, ids.tolist())), ids.astype(np.int64), jnp.asarray(ids)):
        np.testing.assert_array_equal(model(same).last_hidden_state, expected)
    traced = jax.jit(lambda row: model([row, ids[1], ids[2]]).last_hidden_state)(ids[0])
    assert_close(traced, expected)


@pytest.mark.parametrize(("config", "most"), [(CONFIG, 20), (ROBERTA, 18)], ids=["bert", "roberta"])
def test_too_long(config, most):
    model = make(config)
    assert np.isfinite(run(model, some_ids(1, most)).last_hidden_state).all()
    with pytest.raises(ValueError, match=f"has {most + 1} tokens a sequence, .* positions for at most {most}$"):
        model(some_ids(1, most + 1))
    # Explicit positions, as of packed sequences, allow any length.
    run(model, some_ids(1, most + 1), position_ids=np.full((1, most + 1), 3))


def test_model_without_token_types_refuses_them():
    with pytest.raises(ValueError, match="a distilbert model without token types takes no token_type_ids"):
        make(DISTILBERT)(some_ids(), token_type_ids=np.zeros((3, 7), np.int32))


@pytest.mark.parametrize("bad", [-1, 31, 2**31 - 1])
def test_unknown_id_makes_one_sequence_nan(model, bad):
    ids = some_ids()
    ids[1, 3] = bad
    out, good = run(model, ids).last_hidden_state, run(model, some_ids()).last_hidden_state
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[::2], good[::2])


def test_dtype_arguments():
    for name in ("dtype", "param_dtype"):
        with pytest.raises(ValueError, match=f"BertModel: {name} must be float32, float16 or bfloat16, got int8"):
            BertModel(CONFIG, rngs=None, **{name: jnp.int8})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"config": {}}, TypeError, "config must be a BertConfig, got dict"),
        ({"dtype": "foo"}, ValueError, "dtype must be float32, float16 or bfloat16, got 'foo'"),
        ({"param_dtype": None}, ValueError, "param_dtype must be float32, float16 or bfloat16, got None"),
        ({"rngs": 3}, TypeError, "rngs must be an nnx.Rngs or None, got int"),
        ({"rngs": nnx.Rngs(dropout=0)}, ValueError, "rngs must have a stream named params or default, got dropout"),
        ({"add_pooling_layer": "x"}, TypeError, "add_pooling_layer must be True or False, got str"),
        ({"remat": 1}, TypeError, "remat must be True or False, got int"),
        ({"implementation": "cuda"}, ValueError, r"implementation must be None or one of \(.*\), got 'cuda'"),
    ],
)
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=f"^BertModel: {message}$"):
        BertModel(**{"config": CONFIG, "rngs": None, **changes})


# --- What is computed --------------------------------------------------------------------------------------------


def test_explicit_defaults_change_nothing(model):
    ids = some_ids()
    out = run(model, ids)
    same = run(model, ids, np.ones_like(ids), np.zeros_like(ids), np.broadcast_to(np.arange(7), ids.shape))
    assert_close(same.last_hidden_state, out.last_hidden_state)
    assert_close(same.pooler_output, out.pooler_output)
    assert out.hidden_states is None


def test_roberta_positions():
    model, ids = make(ROBERTA), some_ids()
    ids[0, 5:], ids[1, 2], ids[2, :2] = 1, 1, 1
    position_ids = [[2, 3, 4, 5, 6, 1, 1], [2, 3, 1, 4, 5, 6, 7], [1, 1, 2, 3, 4, 5, 6]]
    out, same = run(model, ids), run(model, ids, position_ids=np.array(position_ids))
    np.testing.assert_array_equal(out.last_hidden_state, same.last_hidden_state)


def test_each_input_matters(model):
    ids = some_ids()
    out = run(model, ids).last_hidden_state
    for other in ({"token_type_ids": np.ones_like(ids)}, {"position_ids": np.ones_like(ids)}, {"input_ids": ids[::-1]}):
        assert np.abs(run(model, **{"input_ids": ids} | other).last_hidden_state - out).max() > 0.1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, bool])
def test_holes_in_the_mask(model, dtype):
    """A sequence with masked tokens equals the sequence without them, with the same positions."""
    keep = np.array([1, 1, 0, 1, 0, 1, 0])
    ids = some_ids(1)
    where = np.flatnonzero(keep)
    short = run(model, ids[:, where], position_ids=where[None])
    masked = run(model, ids, keep[None].astype(dtype))
    assert_close(masked.last_hidden_state[:, where], short.last_hidden_state)
    assert_close(masked.pooler_output, short.pooler_output)
    other = np.where(keep, ids, 5)
    np.testing.assert_array_equal(
        run(model, other, keep[None].astype(dtype)).last_hidden_state[:, where], masked.last_hidden_state[:, where]
    )


def test_sequence_without_tokens_is_finite(model):
    mask = np.ones((3, 7), np.int32)
    mask[1] = 0
    out, whole = run(model, some_ids(), mask), run(model, some_ids())
    assert np.isfinite(out.last_hidden_state).all()
    assert_close(out.last_hidden_state[::2], whole.last_hidden_state[::2])


@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16),
     *slow_cases((jnp.float16, jnp.float16), (jnp.float16, jnp.float32))],
)  # fmt: skip
def test_dtypes(dtype, param_dtype):
    model = make(dtype=dtype, param_dtype=param_dtype)
    out = run(model, some_ids(), np.ones((3, 7), np.int32), output_hidden_states=True)
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(param_dtype)}
    exact = run(make(param_dtype=param_dtype), some_ids()).last_hidden_state
    assert_close(out.last_hidden_state.astype(jnp.float32), exact, 4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, DISTILBERT], ids=lambda config: config.model_type)
def test_outputs(config):
    out = run(make(config), some_ids(), output_hidden_states=True)
    assert out.last_hidden_state.shape == (3, 7, 16)
    assert [x.shape for x in out.hidden_states] == [(3, 7, 16)] * 3
    np.testing.assert_array_equal(out.hidden_states[-1], out.last_hidden_state)
    if config is DISTILBERT:
        assert out.pooler_output is None
    else:
        assert out.pooler_output.shape == (3, 16)
    assert run(make(config, add_pooling_layer=False), some_ids()).pooler_output is None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", functools.partial(jax.nn.gelu, approximate=False)),
        ("gelu_new", jax.nn.gelu),
        ("gelu_fast", jax.nn.gelu),
        ("gelu_pytorch_tanh", jax.nn.gelu),
        ("relu", jax.nn.relu),
        ("silu", jax.nn.silu),
        ("swish", jax.nn.silu),
    ],
)
def test_activation(name, function, monkeypatch):
    used = []

    def dense(x, kernel, bias=None, *, activation=None, implementation):
        used.append(activation)
        return bert_dense(x, kernel, bias, activation=activation, implementation=implementation)

    def feed_forward(*arrays, activation, **options):
        used.append(activation)
        return bert_feed_forward(*arrays, activation=activation, **options)

    bert_dense, bert_feed_forward = bert.dense, bert.feed_forward_residual_layer_norm
    monkeypatch.setattr(bert, "dense", dense)
    monkeypatch.setattr(bert, "feed_forward_residual_layer_norm", feed_forward)
    make(dataclasses.replace(CONFIG, hidden_act=name, num_hidden_layers=1))(some_ids())
    assert [activation is None for activation in used] == [True, False, False]  # ..., pooler
    x = jnp.linspace(-4.0, 4.0, 99)
    assert_close(bias_activation(x, None, activation=used[1], implementation="xla"), function(x))


def test_initial_values():
    config = dataclasses.replace(CONFIG, vocab_size=2000, initializer_range=0.05)
    model = BertModel(config, rngs=nnx.Rngs(params=1))
    state = {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(nnx.state(model))}
    for name, value in state.items():
        if name.endswith("gamma"):
            assert (value == 1).all()
        elif value.ndim == 1:
            assert (value == 0).all()
        else:
            assert 0.03 < value.std() < 0.07, name
    assert abs(float(state["embeddings.word"].std()) - 0.05) < 1e-3
    assert (state["layers.0.out_kernel"] != state["layers.1.out_kernel"]).all()


# --- JAX's transformations ---------------------------------------------------------------------------------------


def test_jit(model):
    ids, mask = some_ids(), np.ones((3, 7), np.int32)
    out = model(ids, mask, output_hidden_states=True)
    pure = run(model, ids, mask, output_hidden_states=True)
    by_nnx = nnx.jit(lambda model, ids, mask: model(ids, mask, output_hidden_states=True))(model, ids, mask)
    for other in (pure, by_nnx):
        assert jax.tree.structure(other) == jax.tree.structure(out)
        jax.tree.map(assert_close, other, out)
    gradient = nnx.jit(nnx.grad(lambda model, ids: jnp.sum(model(ids).last_hidden_state ** 2)))(model, ids)
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.state(model))


@pytest.mark.parametrize(
    ("config", "implementation"),
    [(CONFIG, "xla"), (CONFIG, "triton"), *slow_cases((ROBERTA, "xla"), (DISTILBERT, "xla"))],
)
def test_gradients(config, implementation):
    model = make(config, implementation=implementation)
    ids, mask = some_ids(), np.ones((3, 7), np.int32)
    mask[0, 4:] = 0
    graph, params = nnx.split(model)

    @jax.jit
    @jax.grad
    def gradient(params):
        out = nnx.merge(graph, params)(ids, mask)
        pooled = 0.0 if out.pooler_output is None else jnp.sum(jnp.sin(out.pooler_output))
        return pooled + jnp.sum(jnp.sin(3 * out.last_hidden_state) * mask[..., None].astype(jnp.float32))

    gradients = gradient(params)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    for path, value in nnx.to_flat_state(gradients):
        assert np.isfinite(value[...]).all(), path
        assert np.abs(value[...]).max() > 1e-3, path


# --- Implementations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float32)])
def test_triton_agrees_with_xla(dtype):
    ids, mask = some_ids(2, 11), np.ones((2, 11), np.int32)
    mask[0, 8:], mask[1, 2] = 0, 0
    plain = run(make(dtype=dtype, implementation="xla"), ids, mask)
    fused = run(make(dtype=dtype, implementation="triton"), ids, mask)
    for name in ("last_hidden_state", "pooler_output"):
        got, expected = (getattr(out, name).astype(jnp.float32) for out in (fused, plain))
        assert_close(got, expected, 1e-5 if dtype == jnp.float32 else 2e-2)


def primitives(jaxpr, dtype):
    """Counts primitives with a result of `dtype`, without those inside of kernels."""
    counts = collections.Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += equation.outvars[0].aval.dtype == dtype
        if equation.primitive.name != "pallas_call":
            for value in equation.params.values():
                value = getattr(value, "jaxpr", value)
                counts += primitives(value, dtype) if hasattr(value, "eqns") else collections.Counter()
    return counts


@pytest.mark.parametrize("length", [64, 4096])
def test_layer_copies_nothing_between_kernels(length):
    """A layer that is traced for a GPU has matmuls and kernels, and nothing else that would become a kernel."""
    layer = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, implementation=None).layers[0]
    x = jnp.zeros((1, length, 16), jnp.bfloat16)
    mask = jnp.ones((1, 1, 1, length), bool)
    with dispatch.target():
        counts = primitives(jax.make_jaxpr(layer)(x, mask).jaxpr, jnp.bfloat16)
    assert counts.pop("dot_general", 0) + counts.pop("pallas_call") <= 8
    # `add` is the bias of packed QKV, in the epilogue of XLA's matmul.
    calls = {"jit", "custom_vjp_call", "custom_jvp_call", "custom_vmap_call", "custom_partitioning"}
    assert counts.keys() <= calls | {"reshape", "broadcast_in_dim", "add"}, counts
    assert counts["add"] <= 1


@pytest.mark.parametrize("batch", [1, *slow(32)])
def test_layers_share_their_kernels(batch):
    """A GPU program contains each kernel once, however many layers call it."""
    texts = []
    for layers in (1, 3):
        make_model = functools.partial(
            BertModel, BertConfig(num_hidden_layers=layers), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
        )
        shapes, structure = jax.tree.flatten(nnx.eval_shape(lambda make=make_model: make(rngs=nnx.Rngs(0))))
        ids = jax.ShapeDtypeStruct((batch, 128), jnp.int32)

        def forward(leaves, ids, structure=structure):
            return jax.tree.unflatten(structure, leaves)(ids).last_hidden_state

        texts.append(lower(forward, shapes, ids))
    one, three = (text.count("custom_call @") for text in texts)
    assert one == three >= 4
    calls = [sum(n for name, n in operations(text).items() if "custom_call" in name) for text in texts]
    assert calls[1] > 2 * calls[0]


def test_implementation_reaches_every_operation(monkeypatch):
    seen = collections.Counter()

    def recorder(name, original):
        def record(*args, implementation, **options):
            assert implementation == "mosaic_gpu"
            seen[name] += 1
            return original(*args, implementation="xla", **options)

        return record

    for name in (
        "dense",
        "qkv_attention",
        "dense_residual_layer_norm",
        "feed_forward_residual_layer_norm",
        "embeddings_layer_norm",
    ):
        monkeypatch.setattr(bert, name, recorder(name, getattr(bert, name)))
    make(implementation="mosaic_gpu")(some_ids())
    assert seen == {
        "dense": 3, "qkv_attention": 2, "dense_residual_layer_norm": 2, "feed_forward_residual_layer_norm": 2,
        "embeddings_layer_norm": 1,
    }  # fmt: skip
