"""bias_activation: op and kernel."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, card, check, in_float64, jit, normal, power_of_two, seeds, slow, some
from checked import checked
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.kernels.triton import activations
from jaxft.kernels.triton import bias_activation as kernel
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning.table import ElementwiseConfig, GradientConfig

ACTIVATIONS = ["gelu", "gelu_tanh", "relu", "silu", "tanh"]
TINY = float(np.finfo(np.float32).smallest_normal)  # devices may take less for 0


def check_op(floats, seed=None, implementations=("triton",), in_place=False, **options):
    def bind(op, **more):
        return lambda x, bias=None: op(x, bias, **options, **more)

    check(lambda implementation, **f: bind(jaxft.bias_activation, in_place=in_place,
                                           implementation=implementation)(**f),
          bind(reference.bias_activation), bind(oracle.bias_activation), floats,
          implementations=implementations, seed=seed)  # fmt: skip


def test_activation_names_are_complete():
    assert list(reference.ACTIVATIONS) == ACTIVATIONS


@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 127), (5, 1031), *slow((1,), (7, 80), (37, 64))], ids=str)
def test_shapes(shape):
    check_op(normal(np.random.default_rng(0), jnp.float32, x=shape, bias=shape[-1:]))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    x = jnp.ones(shape, jnp.bfloat16)
    bias = jnp.ones(shape[-1:])
    y, pull_back = jax.vjp(lambda x, b: jaxft.bias_activation(x, b, implementation=implementation), x, bias)
    dx, dbias = pull_back(y)
    assert (y.shape, y.dtype) == (dx.shape, dx.dtype) == (shape, x.dtype)
    chex.assert_trees_all_equal(dbias, jnp.zeros_like(bias))


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    """The bias is float32, whatever the dtype of x."""
    rng = np.random.default_rng(1)
    floats = normal(rng, dtype, x=(7, 80)) | normal(rng, jnp.float32, bias=(80,))
    check_op(floats | {"x": floats["x"] * 3}, activation=activation, implementations=["triton", "xla"])


@pytest.mark.parametrize("of_bias", [DTYPES[0], *slow(*DTYPES[1:])])
@pytest.mark.parametrize("dtype", [*DTYPES[1:], *slow(DTYPES[0])])
def test_bias_may_have_another_dtype(dtype, of_bias):
    """A float32 gradient of the bias has float32's accuracy, whatever the dtype of x."""
    rng = np.random.default_rng(2)
    check_op(normal(rng, dtype, x=(300, 40)) | normal(rng, of_bias, bias=(40,)), activation="gelu")


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_bias(activation, dtype):
    check_op(normal(np.random.default_rng(3), dtype, x=(7, 80)), activation=activation)


def every_16bit_value(dtype):
    """Returns [256, 256]: all finite numbers of the dtype, with 0 in place of those that are subnormal in float32."""
    x = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(256, 256)
    wide = x.astype(np.float32)
    return np.where(np.isfinite(wide) & (np.abs(wide) >= TINY), x, np.zeros((), dtype))


def exact_activation(x, activation):
    """Computes the activation to float64 accuracy, also in the negative tails, where the oracle cancels."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        match activation:
            case "gelu":
                return 0.5 * x * np.vectorize(math.erfc)(-x * math.sqrt(0.5))
            case "gelu_tanh":
                return x / (1.0 + np.exp(-2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return oracle.bias_activation(x, None, activation=activation)


@pytest.mark.parametrize("dtype", [*DTYPES[1:], *slow(DTYPES[0])])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_16_bit_value_is_accurate(activation, dtype):
    """Checks each element for all 16-bit numbers, and in float32 for all bfloat16 numbers.

    Granted are 8 ulp of float32, and where the result is x * e^-a, 2 * a more: that is what rounding a to float32 does
    to it. 16-bit results are that, GELU within what is documented, and then rounded.
    """
    half = dtype != jnp.float32
    x = every_16bit_value(dtype if half else jnp.bfloat16).astype(dtype)
    run = jit(lambda x: jaxft.bias_activation(x, None, activation=activation, implementation="triton"))
    got = np.asarray(run(x))
    exact = exact_activation(x, activation)
    size = np.maximum(np.abs(exact), TINY)
    exponent = np.abs(np.log(size / np.maximum(np.abs(x.astype(np.float64)), TINY)))
    allowed = (8.0 + 2.0 * exponent) * size * np.finfo(np.float32).eps
    allowed += 4.0 * TINY * (1.0 + np.abs(x.astype(np.float64)))  # factors that small may become 0
    if half:
        rounding = np.maximum(size, float(jnp.finfo(dtype).smallest_normal)) * float(jnp.finfo(dtype).eps)
        if activation == "gelu":
            allowed = allowed + 3.1e-4 * size
        allowed = rounding / 2 + allowed
    worst = np.abs(got.astype(np.float64) - exact) / allowed
    worst[np.isnan(worst)] = np.inf
    where = np.unravel_index(worst.argmax(), worst.shape)
    assert worst[where] <= 1.0, f"{activation}({x[where]}): got {got[where]}, expected {exact[where]}"


def ulps(actual, exact):
    """Returns errors in float32 ulp, and 0 where the exact value is not a normal number."""
    size = np.abs(exact)
    spacing = np.exp2(np.floor(np.log2(np.maximum(size, TINY))) - 23)
    return np.where(size >= TINY, np.abs(np.asarray(actual).astype(np.float64) - exact) / spacing, 0.0)


# The largest |x| without underflow, and the ulp granted. The accuracy of tanh is the device's.
@pytest.mark.parametrize(("activation", "limit", "granted"), [("gelu", 14, 2), ("gelu_tanh", 11, 3), ("silu", 95, 3)])
def test_float32_errs_by_few_ulp(activation, limit, granted):
    tiny = np.logspace(math.log10(2 * TINY), 0, 20_000)
    x = np.concatenate([np.linspace(-limit, limit, 200_001), tiny, -tiny]).astype(np.float32)
    got = jit(lambda x: jaxft.bias_activation(x, None, activation=activation, implementation="triton"))(x[None])[0]
    error = ulps(got, exact_activation(x, activation))
    assert error.max() <= granted, f"{activation}({x[error.argmax()]}): {error.max()} ulp"


def exact_gradient(x, activation):
    """Computes the derivative to float64 accuracy, also in the tails."""
    x = x.astype(np.float64)
    match activation:
        case "gelu":
            return 0.5 * np.vectorize(math.erfc)(-x * math.sqrt(0.5)) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        case "tanh":
            return 1.0 / np.cosh(x) ** 2
        case "relu":
            return np.where(x > 0.0, 1.0, 0.0)
    c, cubic = (1.0, 0.0) if activation == "silu" else (2.0 * math.sqrt(2.0 / math.pi), 0.044715)
    y = c * (x + cubic * x**3)
    return (1.0 + x * c * (1.0 + 3.0 * cubic * x**2) / (1.0 + np.exp(y))) / (1.0 + np.exp(-y))


def test_nearest_integers_equal_rint():
    x = np.linspace(-160, 160, 100_001, dtype=np.float32)
    whole, as_integers = activations._nearest(x)  # without jit, XLA simplifies nothing
    np.testing.assert_array_equal(whole, np.rint(x))
    np.testing.assert_array_equal(as_integers, np.rint(x))


@pytest.mark.parametrize("dtype", [jnp.float32, *slow(jnp.bfloat16)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(activation, dtype):
    """Derivatives are right in absolute terms everywhere, and to a few digits in the tails but for a zero crossing."""
    x = np.linspace(-20, 20, 200_001).astype(np.float32)
    config = GradientConfig(1, 8192, 1, 4)
    run = jit(functools.partial(kernel.backward, activation=activation, config=config, interpret=INTERPRET))
    # The gradient of a float32 bias, of one row of zeros, is the derivative there before it is rounded to `dtype`.
    _, gradient = run(jnp.ones((1, x.size), dtype), jnp.zeros((1, x.size), dtype), jnp.asarray(x))
    got, exact = np.asarray(gradient), exact_gradient(x, activation)
    error = np.abs(got.astype(np.float64) - exact)
    assert error.max() <= 5 * 2.0**-24, x[error.argmax()]
    if activation != "relu":
        tails = (np.abs(x) > 2.0) & (np.abs(exact) > 1e-34)
        relative = np.where(tails, error / np.abs(exact), 0.0)
        assert relative.max() <= (1e-6 if dtype == jnp.float32 else 5e-5), x[relative.argmax()]


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity(activation, implementation):
    """A NaN gives NaN, plus infinity gives the limit, and neither reaches another element."""
    x = np.ones((5, 80), np.float32)
    x[1, 3], x[2, 79] = np.nan, np.inf
    y = np.asarray(jaxft.bias_activation(jnp.asarray(x), None, activation=activation, implementation=implementation))
    assert np.isnan(y[1, 3]) and np.isnan(y).sum() == 1
    assert y[2, 79] == (1.0 if activation == "tanh" else np.inf)
    assert len(np.unique(y[np.isfinite(x)])) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_minus_infinity_gives_what_plain_jnp_gives(activation, dtype):
    """In GELU and SiLU it is a product of infinity and 0, NaN."""
    x = jnp.array([[-jnp.inf, -1.0]], dtype)
    got, plain = (
        jaxft.bias_activation(x, None, activation=activation, implementation=name) for name in ("triton", "xla")
    )
    np.testing.assert_array_equal(np.isnan(got), np.isnan(plain))
    assert np.isnan(got).any() or activation not in ("gelu", "gelu_tanh", "silu")


EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 9.0, -9.0, 40.0, -40.0, 200.0, -200.0, 6e4, -6e4, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_at_extremes(activation, dtype):
    """Gradients are NaN exactly where plain jnp in float64 has NaN, as for most activations at infinity."""
    x = np.array(EXTREMES)
    if dtype != jnp.float16:
        x = np.concatenate([x, [1e10, -1e10, 1e18, -1e18]])
    x = np.asarray(jnp.asarray(x, dtype))

    def gradient(op):
        op = functools.partial(op, bias=None, activation=activation)
        return jit(lambda x, dy: jax.vjp(op, x)[1](jnp.full_like(x, dy))[0])

    plain = gradient(reference.bias_activation)
    run = gradient(functools.partial(jaxft.bias_activation, implementation="triton"))
    for dy in (1.0, -0.0, np.inf, np.nan):
        expected, got = in_float64(plain, x, np.asarray(dy, x.dtype)), run(x, np.asarray(dy, x.dtype))
        finite = np.isfinite(expected)
        if np.isfinite(dy):  # at others, an underflow of the derivative decides between infinity and NaN
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        else:
            assert not np.isfinite(np.asarray(got, np.float32)[~finite]).any()
        np.testing.assert_allclose(np.asarray(got, np.float64)[finite], expected[finite], atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_reach_no_other_gradient(activation):
    rng = np.random.default_rng(6)
    clean = normal(rng, jnp.float32, x=(21, 37), bias=(37,))
    poisoned = clean | {"x": clean["x"].at[3, 5].set(np.nan).at[20, 36].set(-np.inf)}

    @jit
    def run(f):
        op = functools.partial(jaxft.bias_activation, activation=activation, implementation="triton")
        return jax.grad(lambda f: op(**f).sum())(f)

    expected, got = run(clean), run(poisoned)
    changed = {"x": np.zeros((21, 37), bool), "bias": np.zeros(37, bool)}
    changed["x"][[3, 20], [5, 36]] = changed["bias"][[5, 36]] = True
    for name, where in changed.items():
        np.testing.assert_array_equal(np.asarray(got[name])[~where], np.asarray(expected[name])[~where])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_gradient_handles_nan_and_infinity(activation):
    """The gradient equals the one of plain jnp, also in a block with rows beyond the end."""
    bias, dy, x = jnp.array([np.inf, np.nan, 1.0, -np.inf]), jnp.ones((3, 4)), jnp.zeros((3, 4))
    config = GradientConfig(8, 4, 1, 1)
    _, dbias = kernel.backward(dy, x, bias, activation=activation, config=config, interpret=INTERPRET)
    plain = functools.partial(reference.bias_activation, activation=activation)
    expected = in_float64(jit(lambda x, bias: jax.vjp(plain, x, bias)[1](jnp.ones_like(x))[1]), x, bias)
    np.testing.assert_allclose(dbias, expected, atol=1e-5)


CONFIGS = [ElementwiseConfig(rows, width, warps) for rows, width, warps in
           ((1, 128, 1), (2, 1024, 4), (32, 64, 8), (64, 16, 2), (4, 1, 1))]  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_any_config_gives_the_same_bits(dtype):
    rng = np.random.default_rng(4)
    floats = normal(rng, dtype, x=(21, 101)) | normal(rng, jnp.float32, bias=(101,))
    first, *others = (
        jit(lambda f, c=config: kernel.forward(**f, activation="gelu", in_place=False, config=c, interpret=INTERPRET))(
            floats
        )
        for config in CONFIGS
    )
    for other in others:
        chex.assert_trees_all_equal(other, first)


# One program for all rows with one block or many, several programs with a ragged end, more programs than blocks, and
# blocks larger than the array.
GRADIENT_CONFIGS = [GradientConfig(*sizes) for sizes in ((1, 128, 1, 1), (2, 64, 4, 4), (4, 16, 5, 1), (8, 32, 100, 2),
                                                         (64, 256, 3, 8), (1, 1, 2, 1), (16, 128, 2, 4),
                                                         (32, 32, 1, 4))]  # fmt: skip


@pytest.mark.parametrize("of_bias", [jnp.float32, *slow(None, jnp.bfloat16)], ids=str)
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_any_gradient_config(dtype, of_bias):
    rng = np.random.default_rng(7)
    x, dy = normal(rng, dtype, x=(21, 101), dy=(21, 101)).values()
    bias = None if of_bias is None else normal(rng, of_bias, bias=(101,))["bias"]

    def plain(dy, x, bias):
        return jax.vjp(functools.partial(reference.bias_activation, activation="gelu"), x, bias)[1](dy)

    expected, exact = jit(plain)(dy, x, bias), in_float64(plain, dy, x, bias)
    for config in GRADIENT_CONFIGS:

        @jit
        def run(dy, x, bias, config=config):
            return kernel.backward(dy, x, bias, activation="gelu", config=config, interpret=INTERPRET)

        got = run(dy, x, bias)
        assert_matches_oracle(got, expected, exact, seed=config)
        chex.assert_trees_all_equal(run(dy, x, bias), got)


@pytest.mark.parametrize("rows", [21, 128, *slow(1)])
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_bias_gradient_is_rounded_once(rows, dtype):
    """One program has all rows: its float32 sum is rounded to the dtype of the bias once."""
    width = 100
    x, dy, narrow = normal(np.random.default_rng(13), dtype, x=(rows, width), dy=(rows, width), bias=(width,)).values()
    config = tuning_rows.bias_activation_backward(rows, width, x.dtype.itemsize, card("a card without a table"))
    assert config.programs == 1 and rows <= config.block_rows
    run = jit(functools.partial(kernel.backward, activation="gelu_tanh", config=config, interpret=INTERPRET))
    for of_bias in (jnp.float16, jnp.bfloat16):
        narrow = narrow.astype(of_bias)
        wide = run(dy, x, narrow.astype(jnp.float32))[1]
        chex.assert_trees_all_equal(run(dy, x, narrow)[1], wide.astype(of_bias))


@pytest.mark.parametrize("sizes", [(2, 4, 3), *slow((1, 128, 1), (8, 8, 2), (16, 16, 9))], ids=str)
def test_kernels_stay_within_the_arrays(sizes):
    rows, width, programs = sizes
    floats = normal(np.random.default_rng(11), jnp.float32, dy=(11, 13), x=(11, 13), bias=(13,))
    for bias in (floats["bias"], None):

        def run(bias=bias):
            options = {"activation": "relu", "interpret": True}
            y = kernel.forward(floats["x"], bias, in_place=False, config=ElementwiseConfig(rows, width, 1), **options)
            config = GradientConfig(rows, width, programs, 1)
            return [y, *kernel.backward(floats["dy"], floats["x"], bias, config=config, **options)]

        with checked():
            got = run()
        chex.assert_trees_all_close(got, run(), rtol=1e-6, atol=1e-6)


def test_many_rows():
    """The gradient of the bias is a sum of many terms, over many programs."""
    floats = normal(np.random.default_rng(8), jnp.float32, x=(20_000, 3), bias=(3,))
    check_op(floats, activation="gelu_tanh")


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "tanh"])
def test_second_derivatives(activation):
    floats = normal(np.random.default_rng(12), jnp.float32, x=(3, 7), bias=(7,))

    def derivative(op):
        def inner(f):
            return op(**f, activation=activation).sum()

        return jit(jax.grad(lambda f: sum(jnp.sum(d * d) for d in jax.tree.leaves(jax.grad(inner)(f)))))(floats)

    op = functools.partial(jaxft.bias_activation, implementation="triton")
    chex.assert_trees_all_close(derivative(op), derivative(reference.bias_activation), rtol=1e-5, atol=1e-5)


def test_vmap_of_gradients():
    """The cases map x, both arguments, and the bias alone."""
    rng = np.random.default_rng(9)
    x, bias = normal(rng, jnp.float32, x=(3, 5, 12), bias=(3, 12)).values()

    def gradients(x, bias):
        op = functools.partial(jaxft.bias_activation, activation="silu", implementation="triton")
        return jax.grad(lambda x, b: op(x, b).sum(), (0, 1))(x, bias)

    for axes, one in (((0, 0), lambda i: (x[i], bias[i])), ((0, None), lambda i: (x[i], bias[0])),
                      ((None, 0), lambda i: (x[0], bias[i]))):  # fmt: skip
        arguments = tuple(a if axis == 0 else a[0] for a, axis in zip((x, bias), axes, strict=True))
        together = jit(jax.vmap(gradients, axes))(*arguments)
        for i in range(3):
            alone = jit(gradients)(*one(i))
            chex.assert_trees_all_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("activation", ["gelu", *slow(*(name for name in ACTIVATIONS if name != "gelu"))])
def test_reruns_are_bitwise_equal(activation, implementation):
    floats = normal(np.random.default_rng(5), jnp.bfloat16, x=(37, 64)) | {"bias": jnp.ones(64)}

    @jit
    def run(f):
        op = functools.partial(jaxft.bias_activation, activation=activation, implementation=implementation)
        return jax.value_and_grad(lambda f: op(**f).sum())(f)

    chex.assert_trees_all_equal(run(floats), run(floats))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_in_place_changes_no_value(implementation):
    floats = normal(np.random.default_rng(10), jnp.bfloat16, x=(7, 80), bias=(80,))

    def run(in_place):
        op = functools.partial(jaxft.bias_activation, in_place=in_place, implementation=implementation)
        y, pull_back = jax.vjp(op, *floats.values())
        return jax.jit(op)(*floats.values()), y, pull_back(y)

    chex.assert_trees_all_equal(run(True), run(False))  # the arguments are still there


@pytest.mark.skipif(INTERPRET, reason="reads a program compiled for an NVIDIA GPU")
def test_in_place_saves_a_buffer():
    """The buffer is the one of a donated argument, or of an array that is dead after the call."""
    x, nbytes = jax.ShapeDtypeStruct((4096, 3072), jnp.bfloat16), 2 * 4096 * 3072

    def donated(in_place):
        op = functools.partial(jaxft.bias_activation, in_place=in_place, implementation="triton")
        return jax.jit(lambda x: op(x, None), donate_argnums=0).lower(x).compile().memory_analysis()

    assert donated(True).alias_size_in_bytes == nbytes
    assert donated(True).temp_size_in_bytes < nbytes <= donated(False).temp_size_in_bytes

    def dead(in_place):
        def run(x):
            for _ in range(4):
                x = jaxft.bias_activation(x, None, in_place=in_place, implementation="triton")
            return x

        return jax.jit(run).lower(x).compile().memory_analysis()

    assert dead(True).temp_size_in_bytes < dead(False).temp_size_in_bytes


@pytest.mark.parametrize("seed", seeds(4))
def test_random(seed, monkeypatch):
    """Launch configurations are random, too."""
    rng = np.random.default_rng(seed)
    blocks = [(power_of_two(rng, 8), max(8, power_of_two(rng, 512)), power_of_two(rng, 4)) for _ in range(2)]
    backward = GradientConfig(*blocks[1][:2], int(rng.integers(1, 9)), blocks[1][2])
    monkeypatch.setattr(tuning_rows, "bias_activation", lambda *_: ElementwiseConfig(*blocks[0]))
    monkeypatch.setattr(tuning_rows, "bias_activation_backward", lambda *_: backward)
    width = int(rng.choice([1, 2, 3, 17, 64, 100, 129, 384]))
    shape = (*(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3))), width)
    dtype, of_bias = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    floats = normal(rng, dtype, x=shape) | normal(rng, of_bias, bias=some(rng, (width,), 0.8))
    floats["x"] = floats["x"] * float(rng.integers(1, 6))
    check_op(floats, seed, activation=str(rng.choice(ACTIVATIONS)), in_place=bool(rng.random() < 0.5))


X, V = jnp.ones((2, 8)), jnp.ones((8,))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": 1.0}, TypeError, "x must be an array, got float"),
        ({"x": jnp.ones((2, 8), jnp.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"x": jnp.ones(())}, ValueError, "x must have at least one dimension, got a scalar"),
        ({"bias": jnp.ones((7,))}, ValueError, "bias must have shape (8,), got (7,)"),
        ({"bias": jnp.ones((2, 8))}, ValueError, "bias must have shape (8,), got (2, 8)"),
        ({"bias": jnp.ones((8,), jnp.int32)}, TypeError, "bias must be an array of floats, got int32"),
        ({"bias": 0.0}, TypeError, "bias must be an array, got float"),
        ({"activation": "swish"}, ValueError,
         "activation must be one of ('gelu', 'gelu_tanh', 'relu', 'silu', 'tanh'), got 'swish'"),
        ({"activation": None}, ValueError, "activation must be one of ('gelu',"),
        ({"implementation": "pallas"}, ValueError, "implementation must be None or one of ('triton', 'mosaic_gpu',"
         " 'cudnn', 'xla'), got 'pallas'"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError,
         "there is no 'mosaic_gpu' implementation, only ('triton', 'xla')"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=re.escape(f"bias_activation: {message}")):
        jaxft.bias_activation(**{"x": X, "bias": V, **changes})


@pytest.mark.parametrize("name", ["x", "bias"])
def test_kernel_refuses_float64_by_name(name):
    with jax.enable_x64(True):
        wide = {name: (X if name == "x" else V).astype(jnp.float64)}
        message = f"'triton' cannot be used: {name} is float64, the kernels take float32, float16 and bfloat16"
        with pytest.raises(NotImplementedError, match=message):
            jaxft.bias_activation(**{"x": X, "bias": V, **wide}, implementation="triton")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((2**30 + 1, 1), "x has 1073741825 rows"), ((2**15, 2**15 + 1, 1), "x has 1073774592 rows"),
     ((1, 2**30 + 1), "x has 1073741825 columns"), ((2**30, 1), None), ((2**17, 2**17), None), ((0, 2**40), None)],
    ids=str,
)  # fmt: skip
def test_sizes_beyond_32_bits(shape, reason):
    """Positions beyond 32 bits are refused by name before a launch. The number of elements has no limit."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    run = functools.partial(jaxft.bias_activation, bias=None, implementation="triton")
    if reason is None:
        assert kernel.unsupported(x, bias=None) is None
        assert jax.eval_shape(run, x).shape == shape
    else:
        with pytest.raises(NotImplementedError, match=f"{reason}, the kernels take at most"):
            jax.eval_shape(run, x)
        assert jax.eval_shape(functools.partial(jaxft.bias_activation, bias=None), x).shape == shape
