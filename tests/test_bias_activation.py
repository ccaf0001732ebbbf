"""bias_activation: op and kernel."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, check, jit, normal, seeds, some
from jaxft import reference
from jaxft.kernels.triton import bias_activation as kernel
from jaxft.tuning import ElementwiseConfig

ACTIVATIONS = ["gelu", "gelu_tanh", "relu", "silu", "tanh"]
TINY = float(np.finfo(np.float32).smallest_normal)  # devices may take less for 0


def check_op(floats, seed=None, implementations=("triton",), **options):
    def bind(op, **more):
        return lambda x, bias=None: op(x, bias, **options, **more)

    check(lambda implementation, **f: bind(jaxft.bias_activation, implementation=implementation)(**f),
          bind(reference.bias_activation), bind(oracle.bias_activation), floats,
          implementations=implementations, seed=seed)  # fmt: skip


def test_the_activations_are_those():
    assert list(reference.ACTIVATIONS) == ACTIVATIONS


@pytest.mark.parametrize("shape", [(1,), (3, 1), (7, 80), (2, 3, 127), (37, 64), (5, 1031)], ids=str)
def test_shapes(shape):
    check_op(normal(np.random.default_rng(0), jnp.float32, x=shape, bias=shape[-1:]))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    x = jnp.ones(shape, jnp.bfloat16)
    y = jaxft.bias_activation(x, jnp.ones(shape[-1:]), implementation=implementation)
    assert (y.shape, y.dtype) == (shape, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    """The bias is float32 whatever x is."""
    rng = np.random.default_rng(1)
    floats = normal(rng, dtype, x=(7, 80)) | normal(rng, jnp.float32, bias=(80,))
    check_op(floats | {"x": floats["x"] * 3}, activation=activation, implementations=["triton", "xla"])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dtype_of_the_bias_is_free(dtype):
    rng = np.random.default_rng(2)
    check_op(normal(rng, jnp.float32, x=(7, 80)) | normal(rng, dtype, bias=(80,)))


def test_without_bias():
    check_op(normal(np.random.default_rng(3), jnp.float32, x=(7, 80)))


def every_16bit_value(dtype):
    """[256, 256]: all finite numbers of float16 or bfloat16, with 0 for those that float32 has as subnormal numbers."""
    x = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(256, 256)
    wide = x.astype(np.float32)
    return np.where(np.isfinite(wide) & (np.abs(wide) >= TINY), x, np.zeros((), dtype))


def exact_activation(x, activation):
    """As the oracle, to float64 accuracy in the negative tails as well."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        match activation:
            case "gelu":
                return 0.5 * x * np.vectorize(math.erfc)(-x * math.sqrt(0.5))
            case "gelu_tanh":
                return x / (1.0 + np.exp(-2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return oracle.bias_activation(x, None, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_value(activation, dtype):
    """Element by element, over all 16-bit numbers; in float32 over those of bfloat16.

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


CONFIGS = [ElementwiseConfig(rows, width, warps) for rows, width, warps in
           ((1, 128, 1), (2, 1024, 4), (32, 64, 8), (64, 16, 2), (4, 1, 1))]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_config_gives_the_same_bits(dtype):
    rng = np.random.default_rng(4)
    floats = normal(rng, dtype, x=(21, 101)) | normal(rng, jnp.float32, bias=(101,))
    first, *others = (
        jit(lambda f, c=config: kernel.forward(**f, activation="gelu", config=c, interpret=INTERPRET))(floats)
        for config in CONFIGS
    )
    for other in others:
        chex.assert_trees_all_equal(other, first)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_reruns_are_bitwise_equal(implementation):
    x = normal(np.random.default_rng(5), jnp.bfloat16, x=(37, 64))["x"]
    run = jit(jax.value_and_grad(lambda x: jaxft.bias_activation(x, x[0], implementation=implementation).sum()))
    chex.assert_trees_all_equal(run(x), run(x))


@pytest.mark.parametrize("seed", seeds(6))
def test_random(seed):
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 2, 3, 17, 64, 100, 129, 384]))
    shape = (*(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3))), width)
    dtype, of_bias = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    floats = normal(rng, dtype, x=shape) | normal(rng, of_bias, bias=some(rng, (width,), 0.8))
    floats["x"] = floats["x"] * float(rng.integers(1, 6))
    check_op(floats, seed, activation=str(rng.choice(ACTIVATIONS)))


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
def test_the_kernel_refuses_float64_and_says_so(name):
    with jax.enable_x64(True):
        wide = {name: (X if name == "x" else V).astype(jnp.float64)}
        message = f"'triton' cannot be used: {name} is float64, the kernels take float32, float16 and bfloat16"
        with pytest.raises(NotImplementedError, match=message):
            jaxft.bias_activation(**{"x": X, "bias": V, **wide}, implementation="triton")
