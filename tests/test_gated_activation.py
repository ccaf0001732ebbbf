"""gated_activation: op and kernel."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, in_float64, jit, lower, normal, power_of_two, seeds, slow, some
from checked import checked, first_stores
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.kernels.triton import gated_activation as kernel
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning.table import ElementwiseConfig, GradientConfig
from lowered import TRITON, of, operations

ACTIVATIONS = list(reference.ACTIVATIONS)
GATES = ["first", "second"]


def check_op(floats, seed=None, implementations=("triton",), **options):
    def bind(op, **more):
        return lambda x, bias=None: op(x, bias, **options, **more)

    check(lambda implementation, **f: bind(jaxft.gated_activation, implementation=implementation)(**f),
          bind(reference.gated_activation), bind(oracle.gated_activation), floats,
          implementations=implementations, seed=seed)  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 254), *slow((5, 1030), (2,), (7, 80), (37, 64))], ids=str)
def test_shapes(shape):
    check_op(normal(np.random.default_rng(0), jnp.float32, x=shape, bias=shape[-1:]))


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("activation", ["gelu", "silu", *slow("gelu_tanh", "relu", "tanh")])
def test_activations_and_gates(activation, gate, dtype):
    """The bias is float32, whatever the dtype of x."""
    rng = np.random.default_rng(1)
    floats = normal(rng, dtype, x=(7, 80)) | normal(rng, jnp.float32, bias=(80,))
    floats["x"] = floats["x"] * 3
    check_op(floats, activation=activation, gate=gate, implementations=["triton", "xla"])


@pytest.mark.parametrize("of_bias", [None, DTYPES[0], *slow(*DTYPES[1:])])
@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(*DTYPES[:2])])
def test_bias_may_have_another_dtype(dtype, of_bias):
    """A float32 gradient of the bias has float32's accuracy, whatever the dtype of x."""
    rng = np.random.default_rng(2)
    bias = {} if of_bias is None else normal(rng, of_bias, bias=(40,))
    check_op(normal(rng, dtype, x=(300, 40)) | bias, activation="gelu")


@pytest.mark.parametrize("shape", [(0,), (0, 6), (4, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    x, bias = jnp.ones(shape, jnp.bfloat16), jnp.ones(shape[-1:])
    y, pull_back = jax.vjp(lambda x, b: jaxft.gated_activation(x, b, implementation=implementation), x, bias)
    dx, dbias = pull_back(y)
    assert (y.shape, y.dtype, dx.shape) == ((*shape[:-1], shape[-1] // 2), x.dtype, shape)
    chex.assert_trees_all_equal(dbias, jnp.zeros_like(bias))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("gate", GATES)
def test_a_half_is_the_gate(gate, implementation):
    x = jnp.array([[-2.0, 3.0, 5.0, -7.0]])
    got = jaxft.gated_activation(x, activation="relu", gate=gate, implementation=implementation)
    np.testing.assert_array_equal(got, [[0.0, -21.0]] if gate == "first" else [[-10.0, 0.0]])


CONFIGS = [ElementwiseConfig(*sizes) for sizes in ((1, 128, 1), (2, 1024, 4), (32, 64, 8), (64, 16, 2), (4, 1, 1))]
GRADIENT_CONFIGS = [GradientConfig(*sizes) for sizes in ((1, 128, 1, 1), (4, 16, 5, 1), (8, 32, 100, 2),
                                                         (64, 256, 3, 8))]  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_any_config_gives_the_same_bits(dtype):
    rng = np.random.default_rng(4)
    floats = normal(rng, dtype, x=(21, 202)) | normal(rng, jnp.float32, bias=(202,))
    options = {"activation": "gelu", "gate": "second", "interpret": INTERPRET}
    first, *others = (jit(lambda f, c=config: kernel.forward(**f, config=c, **options))(floats) for config in CONFIGS)
    for other in others:
        chex.assert_trees_all_equal(other, first)
    for config in CONFIGS:
        run = functools.partial(kernel.forward, config=config, **options | {"interpret": False})
        assert operations(lower(run, of((21, 202), dtype), of((202,))))[TRITON] == 1


@pytest.mark.parametrize("of_bias", [jnp.float32, *slow(None, jnp.bfloat16)], ids=str)
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_any_gradient_config(dtype, of_bias):
    rng = np.random.default_rng(7)
    x, dy = normal(rng, dtype, x=(21, 202), dy=(21, 101)).values()
    bias = None if of_bias is None else normal(rng, of_bias, bias=(202,))["bias"]

    def plain(dy, x, bias):
        return jax.vjp(functools.partial(reference.gated_activation, gate="second"), x, bias)[1](dy)

    expected, exact = jit(plain)(dy, x, bias), in_float64(plain, dy, x, bias)
    for config in GRADIENT_CONFIGS:
        options = {"activation": "gelu", "gate": "second", "config": config}
        run = jit(functools.partial(kernel.backward, **options, interpret=INTERPRET))
        got = run(dy, x, bias)
        assert_matches_oracle(got, expected, exact, seed=config)
        chex.assert_trees_all_equal(run(dy, x, bias), got)
        lowered = lower(functools.partial(kernel.backward, **options, interpret=False), of(dy.shape, dtype),
                        of(x.shape, dtype), None if bias is None else of(bias.shape, bias.dtype))  # fmt: skip
        assert operations(lowered)[TRITON] == 1


@pytest.mark.parametrize("activation", ["gelu", "silu", *slow("gelu_tanh", "relu", "tanh")])
def test_bias_gradient_handles_nan_and_infinity(activation):
    """The gradient equals the one of plain jnp, also in a block with rows beyond the end."""
    bias, dy, x = jnp.array([np.inf, np.nan, 1.0, 2.0, 1.0, 2.0, np.inf, -np.inf]), jnp.ones((3, 4)), jnp.ones((3, 8))
    config = GradientConfig(8, 4, 1, 1)
    _, dbias = kernel.backward(dy, x, bias, activation=activation, gate="first", config=config, interpret=INTERPRET)
    plain = functools.partial(reference.gated_activation, activation=activation)
    expected = in_float64(lambda x, bias: jax.vjp(plain, x, bias)[1](jnp.ones((3, 4), x.dtype))[1], x, bias)
    np.testing.assert_allclose(dbias, expected, atol=1e-5)


def test_nan_and_infinity_reach_no_other_element():
    rng = np.random.default_rng(6)
    clean = normal(rng, jnp.float32, x=(21, 74), bias=(74,))
    poisoned = clean | {"x": clean["x"].at[3, 5].set(np.nan).at[20, 73].set(-np.inf)}

    @jit
    def run(f):
        op = functools.partial(jaxft.gated_activation, implementation="triton")
        return op(**f), jax.grad(lambda f: op(**f).sum())(f)

    (y, expected), (bad, got) = run(clean), run(poisoned)
    where = np.ones((21, 37), bool)
    where[3, 5] = where[20, 36] = False
    np.testing.assert_array_equal(np.asarray(bad)[where], np.asarray(y)[where])
    np.testing.assert_array_equal(np.asarray(got["x"])[np.tile(where, 2)], np.asarray(expected["x"])[np.tile(where, 2)])
    columns = np.tile(where.all(axis=0), 2)
    np.testing.assert_array_equal(np.asarray(got["bias"])[columns], np.asarray(expected["bias"])[columns])


@pytest.mark.parametrize("sizes", [(1, 8, 3), *slow((2, 4, 3), (1, 128, 1), (8, 8, 2), (16, 16, 9))], ids=str)
def test_kernels_stay_within_the_arrays(sizes):
    rows, width, programs = sizes
    floats = normal(np.random.default_rng(11), jnp.float32, dy=(11, 13), x=(11, 26), bias=(26,))
    for bias in (floats["bias"], None):

        def run(bias=bias):
            options = {"activation": "relu", "gate": "first", "interpret": True}
            y = kernel.forward(floats["x"], bias, config=ElementwiseConfig(rows, width, 1), **options)
            config = GradientConfig(rows, width, programs, 1)
            return [y, *kernel.backward(floats["dy"], floats["x"], bias, config=config, **options)]

        with checked():
            got = run()
        chex.assert_trees_all_close(got, run(), rtol=1e-6, atol=1e-6)


def test_kernel_starts_with_the_last_rows():
    options = {"activation": "gelu", "gate": "first", "config": ElementwiseConfig(2, 8, 1), "interpret": True}
    ((rows, _),) = first_stores(lambda: kernel.forward(jnp.ones((10, 16)), None, **options))
    assert set(rows) == {8, 9}


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_op_has_one_kernel_each_way(dtype, caplog):
    for shape in ((7, 80), (4, 32, 2304), (3, 20000)):

        def gradients(x, bias):
            out, pull_back = jax.vjp(jaxft.gated_activation, x, bias)
            return out, pull_back(out)

        for bias in (of(shape[-1:]), None):
            assert operations(lower(jaxft.gated_activation, of(shape, dtype), bias))[TRITON] == 1
            found = operations(lower(gradients, of(shape, dtype), bias))
            assert (found[TRITON], found["slice"], found["concatenate"]) == (2, 0, 0)
            with jax.enable_x64(True):
                assert operations(lower(gradients, of(shape, dtype), bias))[TRITON] == 2
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("rows", [21, 128])
def test_bias_gradient_is_rounded_once(rows, dtype):
    """One program has all rows: its float32 sum is rounded to the dtype of the bias once."""
    x, dy, bias = normal(np.random.default_rng(13), dtype, x=(rows, 100), dy=(rows, 50), bias=(100,)).values()
    config = tuning_rows.gated_activation_backward(rows, 50, x.dtype.itemsize, jaxft.dispatch.device())
    assert config.programs == 1 and rows <= config.block_rows
    run = functools.partial(kernel.backward, activation="tanh", gate="first", config=config, interpret=INTERPRET)
    assert "reduce_sum" not in str(jax.make_jaxpr(run)(dy, x, bias)).partition("name=gated_activation_bwd")[2]


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_second_derivatives(activation):
    floats = normal(np.random.default_rng(12), jnp.float32, x=(3, 14), bias=(14,))

    def derivative(op):
        def inner(f):
            return op(**f, activation=activation, gate="second").sum()

        return jit(jax.grad(lambda f: sum(jnp.sum(d * d) for d in jax.tree.leaves(jax.grad(inner)(f)))))(floats)

    op = functools.partial(jaxft.gated_activation, implementation="triton")
    chex.assert_trees_all_close(derivative(op), derivative(reference.gated_activation), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_reruns_are_bitwise_equal(implementation):
    floats = normal(np.random.default_rng(5), jnp.bfloat16, x=(37, 128)) | {"bias": jnp.ones(128)}
    op = functools.partial(jaxft.gated_activation, implementation=implementation)
    run = jit(jax.value_and_grad(lambda f: op(**f).sum()))
    chex.assert_trees_all_equal(run(floats), run(floats))


@pytest.mark.parametrize("seed", seeds(4))
def test_random(seed, monkeypatch):
    """Launch configurations are random, too."""
    rng = np.random.default_rng(seed)
    blocks = [(power_of_two(rng, 8), max(8, power_of_two(rng, 512)), power_of_two(rng, 4)) for _ in range(2)]
    backward = GradientConfig(*blocks[1][:2], int(rng.integers(1, 9)), blocks[1][2])
    monkeypatch.setattr(tuning_rows, "gated_activation", lambda *_: ElementwiseConfig(*blocks[0]))
    monkeypatch.setattr(tuning_rows, "gated_activation_backward", lambda *_: backward)
    width = 2 * int(rng.choice([1, 2, 3, 17, 64, 100, 129, 384]))
    shape = (*(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3))), width)
    dtype, of_bias = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    floats = normal(rng, dtype, x=shape) | normal(rng, of_bias, bias=some(rng, (width,), 0.6))
    floats["x"] = floats["x"] * float(rng.integers(1, 6))
    check_op(floats, seed, activation=str(rng.choice(ACTIVATIONS)), gate=str(rng.choice(GATES)))


X = jnp.ones((2, 6))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxft.gated_activation(X[:, :5]), ValueError, "the last axis of x must have two halves, got (2, 5)"),
        (lambda: jaxft.gated_activation(X[0, 0]), ValueError, "x must have at least one dimension, got a scalar"),
        (lambda: jaxft.gated_activation(X.astype(int)), TypeError, "gated_activation: x must be an array of floats"),
        (lambda: jaxft.gated_activation(X, X[0, :3]), ValueError, "bias must have shape (6,), got (3,)"),
        (lambda: jaxft.gated_activation(X, gate="third"), ValueError, "gate must be 'first' or 'second', got 'third'"),
        (lambda: jaxft.gated_activation(X, gate=0), ValueError, "gate must be 'first' or 'second', got 0"),
        (lambda: jaxft.gated_activation(X, activation="swish"), ValueError, "activation must be one of"),
        (lambda: jaxft.gated_activation(X, implementation="cudnn"), NotImplementedError, "gated_activation"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
