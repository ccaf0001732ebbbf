"""softmax and log_softmax."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, check, check_padding, jit, normal, seeds, some
from jaxft import reference

pytestmark = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


def check_op(name, floats, seed=None, **options):
    check(lambda implementation, **f: getattr(jaxft, name)(**f, **options, implementation=implementation),
          lambda **f: getattr(reference, name)(**f, **options), lambda **f: getattr(oracle, name)(**f, **options),
          floats, implementations=["xla", None], seed=seed)  # fmt: skip


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3, 127), (3, 1031)], ids=str)
def test_shapes(name, shape):
    check_op(name, normal(np.random.default_rng(0), jnp.float32, x=shape))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 8), (3, 0)], ids=str)
def test_empty(name, shape):
    y = getattr(jaxft, name)(jnp.ones(shape, jnp.bfloat16), mask=jnp.ones(shape, bool))
    assert (y.shape, y.dtype) == (shape, jnp.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options(name, dtype):
    """A float32 bias on any x, and operands that broadcast."""
    rng = np.random.default_rng(1)
    floats = normal(rng, dtype, x=(2, 3, 5, 7)) | normal(rng, jnp.float32, bias=(2, 1, 5, 1))
    mask = np.arange(7) < np.array([7, 3, 1, 0, 7])[:, None]
    check_op(name, floats, scale=-1.5, mask=mask)


def test_huge_logits(name):
    check_op(name, {"x": normal(np.random.default_rng(2), jnp.float32, x=(5, 33))["x"] * 1e4})


def test_fully_masked_rows(name):
    mask = np.array([[True, True, False], [False, False, False]])
    y = getattr(jaxft, name)(jnp.ones((2, 3)), mask=mask)
    half, nothing = (0.5, 0.0) if name == "softmax" else (np.float32(np.log(0.5)), -np.inf)
    np.testing.assert_array_equal(y, [[half, half, nothing], [nothing] * 3])


def test_padding(name):
    mask = np.arange(7) < np.array([7, 3, 1, 0])[:, None]

    def function(**floats):
        y = getattr(jaxft, name)(**floats, scale=0.5, mask=mask)
        return jnp.where(mask, y, 0.0)  # log_softmax is -inf there

    clean = normal(np.random.default_rng(3), jnp.float32, x=(4, 7), bias=(4, 7))
    check_padding(function, clean, dict.fromkeys(clean, mask))


def test_reruns_are_bitwise_equal(name):
    x = normal(np.random.default_rng(4), jnp.bfloat16, x=(37, 64))["x"]
    run = jit(getattr(jaxft, name))
    np.testing.assert_array_equal(run(x), run(x))


@pytest.mark.parametrize("seed", seeds(3))
def test_random(name, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 5, 13, 100], rng.integers(1, 4)))
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))

    def broadcast():
        return tuple(n if rng.random() < 0.7 else 1 for n in shape[int(rng.integers(0, 2)) :])

    floats = normal(rng, dtype, x=shape) | normal(rng, jnp.float32, bias=some(rng, broadcast()))
    options = {"scale": some(rng, float(rng.uniform(-2.0, 2.0))), "mask": some(rng, rng.random(broadcast()) < 0.7)}
    check_op(name, floats, seed, **options)


X = np.ones((2, 3, 8), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be an array, got list"),
        ({"x": X.astype(np.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"x": np.ones((), np.float32)}, ValueError, "x must have at least one dimension, got a scalar"),
        ({"scale": None, "bias": X.astype(np.int32)}, TypeError, "bias must be an array of floats, got int32"),
        ({"bias": X[:1, :, :4]}, ValueError, "bias must broadcast to (2, 3, 8), got shape (1, 3, 4)"),
        ({"bias": X[None]}, ValueError, "bias must broadcast to (2, 3, 8), got shape (1, 2, 3, 8)"),
        ({"mask": X}, TypeError, "mask must be boolean (True = attend), got float32; write mask != 0"),
        ({"mask": X.astype(np.int32)}, TypeError, "mask must be boolean (True = attend), got int32; write mask != 0"),
        ({"mask": np.ones((3,), bool)}, ValueError, "mask must broadcast to (2, 3, 8), got shape (3,)"),
        ({"scale": "2"}, TypeError, "scale must be a Python number, got str"),
        ({"scale": jnp.ones(())}, TypeError, "scale must be a Python number, got ArrayImpl"),
        ({"implementation": "fast"}, ValueError,
         "implementation must be None or one of ('triton', 'mosaic_gpu', 'cudnn', 'xla'), got 'fast'"),
        ({"implementation": "triton"}, NotImplementedError, "there is no 'triton' implementation, only ('xla',)"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors(name, changes, error, message):
    with pytest.raises(error, match=re.escape(f"{name}: {message}")):
        getattr(jaxft, name)(**{"x": X, **changes})
