"""permute, merge_heads and qkv_bias_split_heads."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, check, jit, normal, seeds, some
from jaxft import reference


def check_op(name, floats, *arguments, seed=None):
    """Arguments after the floats go by position."""

    def call(op, **more):
        return lambda x, bias=None: op(x, *([bias] if name == "qkv_bias_split_heads" else []), *arguments, **more)

    check(lambda implementation, **f: call(getattr(jaxft, name), implementation=implementation)(**f),
          call(getattr(reference, name)), call(getattr(oracle, name)), floats, implementations=["xla", None],
          seed=seed)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (1, 1, 1, 1)], ids=str)
def test_split_and_merge_heads(shape, dtype):
    """Of [B, T, N, H]; the bias is float32 whatever the projection is."""
    b, t, n, h = shape
    rng = np.random.default_rng(0)
    floats = normal(rng, dtype, x=(b, t, 3 * n * h)) | normal(rng, jnp.float32, bias=(3 * n * h,))
    check_op("qkv_bias_split_heads", floats, n)
    check_op("merge_heads", normal(rng, dtype, x=(b, n, t, h)))


def test_without_bias():
    check_op("qkv_bias_split_heads", normal(np.random.default_rng(1), jnp.float32, x=(2, 5, 36)), 4)


def test_merging_undoes_splitting():
    qkv = normal(np.random.default_rng(2), jnp.float32, qkv=(2, 5, 36))["qkv"]
    parts = [jaxft.merge_heads(part) for part in jaxft.qkv_bias_split_heads(qkv, None, 4)]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=-1), qkv)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((), ()), ((5,), (0,)), ((3, 7), (1, 0)), ((2, 3, 5), (2, 0, 1)), ((2, 3, 1, 5, 2, 3), (5, 1, 3, 0, 4, 2))],
    ids=str,
)
def test_permute(shape, axes):
    floats = normal(np.random.default_rng(3), jnp.float32, x=shape)
    check_op("permute", floats, axes)
    np.testing.assert_array_equal(
        jaxft.permute(floats["x"], [a - len(axes) for a in axes]), np.transpose(floats["x"], axes)
    )


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int32, np.complex64])
def test_permute_of_any_dtype(dtype):
    x = np.arange(30).reshape(2, 3, 5).astype(dtype)
    y = jaxft.permute(x, (2, 0, 1))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, np.transpose(x, (2, 0, 1)))


def test_empty():
    assert jaxft.permute(jnp.ones((0, 3, 2)), (2, 1, 0)).shape == (2, 3, 0)
    assert jaxft.merge_heads(jnp.ones((2, 3, 0, 4))).shape == (2, 0, 12)
    qkv = jnp.ones((0, 5, 24), jnp.bfloat16)
    q, k, v = jaxft.qkv_bias_split_heads(qkv, jnp.ones((24,)), 2)
    assert {(x.shape, x.dtype) for x in (q, k, v)} == {((0, 2, 5, 4), qkv.dtype)}


def test_special_values_move_as_they_are():
    x = np.array([[np.nan, np.inf], [-np.inf, -0.0]], np.float32)
    y = np.asarray(jit(lambda x: jaxft.permute(x, (1, 0)))(x))
    np.testing.assert_array_equal(y.view(np.uint32), x.T.copy().view(np.uint32))


@pytest.mark.parametrize("seed", seeds(2))
def test_random(seed):
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))
    shape = [int(n) for n in rng.choice([1, 2, 3, 5, 8], rng.integers(1, 6))]
    check_op("permute", normal(rng, dtype, x=shape), tuple(int(a) for a in rng.permutation(len(shape))), seed=seed)
    b, t, n, h = (int(n) for n in rng.choice([1, 2, 5, 13], 4))
    width = 3 * n * h
    floats = normal(rng, dtype, x=(b, t, width)) | normal(rng, jnp.float32, bias=some(rng, (width,)))
    check_op("qkv_bias_split_heads", floats, n, seed=seed)


QKV, X = np.ones((2, 5, 24), np.float32), np.ones((2, 3, 5, 4), np.float32)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("qkv_bias_split_heads", (1.0, None, 2), TypeError, "qkv must be an array, got float"),
        ("qkv_bias_split_heads", (QKV.astype(np.int32), None, 2), TypeError,
         "qkv must be an array of floats, got int32"),
        ("qkv_bias_split_heads", (QKV[0], None, 2), ValueError, "qkv must have shape [B, T, 3*N*H], got (5, 24)"),
        ("qkv_bias_split_heads", (QKV, None, 5), ValueError,
         "the last axis of qkv must be a multiple of 3 * num_heads = 15, got (2, 5, 24)"),
        ("qkv_bias_split_heads", (QKV, None, 0), ValueError, "num_heads must be a positive Python integer, got 0"),
        ("qkv_bias_split_heads", (QKV, None, 2.0), ValueError, "num_heads must be a positive Python integer, got 2.0"),
        ("qkv_bias_split_heads", (QKV, None, True), ValueError,
         "num_heads must be a positive Python integer, got True"),
        ("qkv_bias_split_heads", (QKV, np.ones((8,), np.float32), 2), ValueError,
         "bias must have shape (24,), got (8,)"),
        ("qkv_bias_split_heads", (QKV, np.ones((24,), bool), 2), TypeError,
         "bias must be an array of floats, got bool"),
        ("merge_heads", (None,), TypeError, "x must be an array, got NoneType"),
        ("merge_heads", (X[0],), ValueError, "x must have shape [B, N, T, H], got (3, 5, 4)"),
        ("permute", ([[1.0]], (1, 0)), TypeError, "x must be an array, got list"),
        ("permute", (X, (0, 1, 2)), ValueError, "axes must be a permutation of the 4 axes of x, got (0, 1, 2)"),
        ("permute", (X, (0, 1, 2, 2)), ValueError, "axes must be a permutation of the 4 axes of x, got (0, 1, 2, 2)"),
        ("permute", (X, (0, 1, 2, 4)), ValueError, "axes must be a permutation of the 4 axes of x, got (0, 1, 2, 4)"),
        ("permute", (X, (0, 1, 2, -5)), ValueError, "axes must be a permutation of the 4 axes of x, got (0, 1, 2, -5)"),
        ("permute", (X, 1), TypeError, "axes must be a sequence of integers, got 1"),
        ("permute", (X, ()), ValueError, "axes must be a permutation of the 4 axes of x, got ()"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else "",
)  # fmt: skip
def test_errors(op, arguments, error, message):
    with pytest.raises(error, match=re.escape(f"{op}: {message}")):
        getattr(jaxft, op)(*arguments)


@pytest.mark.parametrize(("op", "arguments"), [("qkv_bias_split_heads", (QKV, None, 2)), ("merge_heads", (X,)),
                                               ("permute", (X, (3, 2, 1, 0)))],
                         ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_errors_of_implementations(op, arguments):
    message = f"{op}: implementation must be None or one of ('triton', 'mosaic_gpu', 'cudnn', 'xla'), got 'fast'"
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(jaxft, op)(*arguments, implementation="fast")
    message = f"{op}: there is no 'triton' implementation, only ('xla',)"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        getattr(jaxft, op)(*arguments, implementation="triton")
