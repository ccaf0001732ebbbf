"""rms_norm: op, and the LayerNorm kernels without a mean."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, in_float64, jit, lower, normal, seeds, slow, some
from checked import checked
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.kernels.triton import layer_norm as kernel
from jaxft.tuning.table import GradientConfig, RowConfig
from lowered import TRITON, of, operations


def check_op(floats, seed=None, implementations=("triton",), in_place=False, **options):
    def bind(op, **more):
        return lambda x, gamma=None, residual=None: op(x, gamma, residual=residual, **options, **more)

    check(lambda implementation, **f: bind(jaxft.rms_norm, in_place=in_place, implementation=implementation)(**f),
          bind(reference.rms_norm), bind(oracle.rms_norm), floats, implementations=implementations,
          seed=seed)  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 127), (3, 8209), *slow((1,), (3, 1), (7, 80), (37, 64))], ids=str)
def test_shapes(shape):
    """A row of 8,209 elements does not fit into one block. The mean is not subtracted."""
    floats = normal(np.random.default_rng(0), jnp.float32, x=shape, gamma=shape[-1:], residual=shape)
    check_op(floats | {"x": floats["x"] + 3.0}, return_sum=True)


@pytest.mark.parametrize("vectors", [DTYPES[0], *slow(*DTYPES[1:])])
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_dtypes(dtype, vectors):
    rng = np.random.default_rng(1)
    gamma = normal(rng, vectors, gamma=(80,))
    check_op(normal(rng, dtype, x=(7, 80), residual=(7, 80)) | gamma, implementations=("triton", "xla"))
    check_op(normal(rng, dtype, x=(7, 80)) | gamma)


@pytest.mark.parametrize("epsilon", [1e-12, 10])
def test_epsilon(epsilon):
    x = normal(np.random.default_rng(2), jnp.float32, x=(5, 33))["x"]
    check_op({"x": x * jnp.array([1e-6, 1e-3, 1.0, 1e3, 0.0])[:, None]}, epsilon=epsilon)


def test_equals_layer_norm_of_rows_without_a_mean():
    x = normal(np.random.default_rng(3), jnp.float32, x=(7, 64))["x"]
    x = x - jnp.mean(x, axis=1, keepdims=True)
    for implementation in ("triton", "xla"):
        got, expected = (f(x, implementation=implementation) for f in (jaxft.rms_norm, jaxft.layer_norm))
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 128, 3), (2, 16, 2)], ids=str)
def test_any_config(sizes):
    """A row is one block, or several chunks."""
    rows, width, programs = sizes
    floats = normal(np.random.default_rng(4), jnp.float32, x=(11, 101), residual=(11, 101), gamma=(101,),
                    dy=(11, 101), dsum=(11, 101))  # fmt: skip

    def plain(x, residual, gamma, dy, dsum):
        run = functools.partial(reference.rms_norm, return_sum=True)
        out, pull_back = jax.vjp(lambda x, r, g: run(x, g, residual=r), x, residual, gamma)
        return out, pull_back((dy, dsum))

    def kernels(x, residual, gamma, dy, dsum, interpret=INTERPRET):
        options = {"dropout_rate": 0.0, "center": False, "interpret": interpret}
        y, total, saved = kernel.forward(
            x, None, residual, gamma, None, None, epsilon=1e-6, return_sum=True, save=True, in_place=False,
            config=RowConfig(rows, width, 1), **options,
        )  # fmt: skip
        config = GradientConfig(rows, width, programs, 1)
        dx, dresidual, found = kernel.backward(
            dy, dsum, x, None, residual, gamma, None, saved, vectors={"gamma": gamma.dtype}, config=config, **options
        )
        return (y, total), (dx, dresidual, found["gamma"])

    expected, exact = jit(plain)(**floats), in_float64(lambda f: plain(**f), floats)
    assert_matches_oracle(jit(kernels)(**floats), expected, exact)
    with checked():
        got = kernels(**floats, interpret=True)
    chex.assert_trees_all_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_op_has_one_kernel_forward_and_two_backward(dtype, caplog):
    """The second kernel of the gradient adds up partial sums of gamma's gradient."""
    for shape in ((7, 80), (4, 32, 768), (3, 20000)):
        x, gamma = of(shape, dtype), of(shape[-1:])

        def run(x, gamma, residual):
            return jaxft.rms_norm(x, gamma, residual=residual, return_sum=True)

        def gradients(x, gamma, residual):
            out, pull_back = jax.vjp(run, x, gamma, residual)  # noqa: B023
            return out, pull_back(out)

        assert operations(lower(run, x, gamma, x))[TRITON] == operations(lower(jaxft.rms_norm, x))[TRITON] == 1
        assert operations(lower(gradients, x, gamma, x))[TRITON] == 3
    assert caplog.messages == []


def test_in_place():
    x = of((7, 80), jnp.bfloat16)
    for in_place in (False, True):
        options = {"in_place": in_place, "return_sum": True}
        text = lower(lambda x: jaxft.rms_norm(x + x, residual=2 * x, **options), x)  # noqa: B023
        assert text.count("output_operand_alias<") == 2 * in_place


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    x = jnp.ones(shape, jnp.bfloat16)
    out = jaxft.rms_norm(x, jnp.ones(shape[-1:]), residual=x, return_sum=True, implementation=implementation)
    assert {(y.shape, y.dtype) for y in out} == {(shape, x.dtype)}


@pytest.mark.parametrize("seed", seeds(3))
def test_random(seed):
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 2, 3, 17, 64, 100, 129, 384]))
    shape = (*(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3))), width)
    dtype, vectors = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    floats = normal(rng, dtype, x=shape, residual=some(rng, shape))
    floats |= normal(rng, vectors, gamma=some(rng, (width,), 0.8))
    return_sum = "residual" in floats and bool(rng.random() < 0.5)
    check_op(floats, seed, return_sum=return_sum, in_place=bool(rng.random() < 0.5))


X = jnp.ones((2, 6))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxft.rms_norm(X[0, 0]), ValueError, "rms_norm: x must have at least one dimension"),
        (lambda: jaxft.rms_norm(X, X[0, :3]), ValueError, "rms_norm: gamma must have shape (6,), got (3,)"),
        (lambda: jaxft.rms_norm(X, residual=X[0]), ValueError, "residual must have shape (2, 6), got (6,)"),
        (lambda: jaxft.rms_norm(X, residual=X.astype("float16")), TypeError, "residual must have the dtype of x"),
        (lambda: jaxft.rms_norm(X, return_sum=True), ValueError, "rms_norm: return_sum needs a residual, got None"),
        (lambda: jaxft.rms_norm(X, epsilon=0), ValueError, "epsilon must be positive, got 0"),
        (lambda: jaxft.rms_norm(X, in_place=1), TypeError, "in_place must be True or False, got int"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
