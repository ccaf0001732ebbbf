"""Views of matrices that share one array: the ops read them in place, with the same results and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.ops import matrix_view
from jaxft.ops.matrix_view import MatrixView

K, F = 512, 32  # deep enough for split-K


def arrays(dtype="bfloat16"):
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    return normal(3, 5, K), normal(K, F), normal(F), normal(3, 5, F)


def view(kernel, before=3):
    """Returns a view of the kernel. Before and after it, there are NaN."""
    rows, columns = kernel.shape
    nan = jnp.full((before * columns,), jnp.nan, kernel.dtype)
    return MatrixView(jnp.concatenate([nan, kernel.reshape(-1), nan]), before, (rows, columns))


def dense(x, kernel, bias, residual, implementation):
    return jaxft.dense(x, kernel, bias, activation="gelu", residual=residual, implementation=implementation)


def gated(x, kernel, bias, residual, implementation):
    return jaxft.dense(x, kernel, bias, activation="silu", gate="first", implementation=implementation)


def dense_norm(x, kernel, bias, residual, implementation):
    return jaxft.dense_residual_layer_norm(x, kernel, bias, residual, bias, bias, implementation=implementation)


def feed_forward(x, kernel, bias, residual, implementation):
    back = view(kernel.array().T) if isinstance(kernel, MatrixView) else kernel.T
    return jaxft.feed_forward_residual_layer_norm(
        x, kernel, bias, back, None, None, None, activation="relu", implementation=implementation
    )  # fmt: skip


OPS = [dense, gated, dense_norm, feed_forward]


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("op", OPS)
def test_view_gives_the_bits_of_its_array(op, implementation):
    x, kernel, bias, residual = arrays()
    run = jax.jit(functools.partial(op, implementation=implementation))
    np.testing.assert_array_equal(run(x, view(kernel), bias, residual), run(x, kernel, bias, residual))


@pytest.mark.parametrize("op", OPS)
def test_kernels_read_the_joined_array(op):
    x, kernel, bias, residual = arrays()
    run = functools.partial(op, implementation="triton")
    text = str(jax.make_jaxpr(run)(x, view(kernel), bias, residual))
    rows = re.findall(r"Blocked\(block_size=(\d+)\), Blocked\(block_size=32\)", text)
    assert str(K + 6) in rows and str(K) not in rows


@pytest.mark.parametrize("op", OPS)
def test_gradient_of_a_view_is_in_the_join(op):
    x, kernel, bias, residual = arrays("float16")

    def loss(kernel, x):
        return jnp.sum(op(x, kernel, bias, residual, "triton").astype(jnp.float32) ** 2)

    (d_view, dx_view), (d_kernel, dx) = (jax.grad(loss, (0, 1))(k, x) for k in (view(kernel), kernel))
    np.testing.assert_array_equal(d_view.array(), d_kernel)
    assert not np.any(np.asarray(d_view.joined[: 3 * F])) and not np.any(np.asarray(d_view.joined[-3 * F :]))
    np.testing.assert_array_equal(dx_view, dx)


@pytest.mark.parametrize("op", [dense, dense_norm])
def test_second_derivative_of_a_view(op):
    x, kernel, bias, residual = arrays()

    def loss(x, kernel):
        return jnp.sum(op(x, kernel, bias, residual, "triton") ** 2)

    def of_gradient(x, kernel):
        return jnp.sum(jax.grad(loss)(x, kernel) ** 3)

    found, wanted = (jax.grad(of_gradient)(x, k) for k in (view(kernel), kernel))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("op", [dense, dense_norm])
def test_vmap_maps_views(op):
    x, kernel, bias, residual = arrays()
    views = view(kernel)
    pair = MatrixView(jnp.stack([views.joined, views.joined * 2]), views.first, views.shape)
    run = functools.partial(op, implementation="triton")
    found = jax.vmap(run, (None, 0, None, None))(x, pair, bias, residual)
    np.testing.assert_array_equal(found[0], run(x, kernel, bias, residual))
    np.testing.assert_array_equal(found[1], run(x, kernel * 2, bias, residual))


@pytest.mark.parametrize(
    ("sizes", "length"), [([(4, 6), (2, 2)], 30), ([(3, 2), (2, 6), (1, 4)], 24), ([(5, 1)], 5)]
)  # fmt: skip
def test_matrices_begin_at_whole_rows(sizes, length):
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal(size) for size in sizes]
    views = matrix_view.join(matrices)
    assert {id(view.joined) for view in views} == {id(views[0].joined)}
    assert views[0].joined.size == length
    for view, matrix in zip(views, matrices, strict=True):
        np.testing.assert_array_equal(view.array(), matrix)


def test_view_of_its_own_dtype_stays_a_view():
    (view,) = matrix_view.join([np.arange(6, dtype=np.float32).reshape(2, 3)])
    assert view.astype(jnp.float32) is view
    half = view.astype(jnp.float16)
    assert half.dtype == jnp.float16 and half.tolist() == [[0, 1, 2], [3, 4, 5]]
