"""`cases.check`, which judges the ops, passes exact results and fails wrong ones."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import check

X = {"x": jnp.asarray(np.random.default_rng(0).standard_normal((4, 5)), jnp.float32)}


def judge(op):
    check(lambda implementation, x: op(x), lambda x: jnp.exp(x), lambda x: np.exp(np.float64(x)), X, gradients=False)


def test_exact_results_pass():
    judge(jnp.exp)


def test_one_small_error_fails():
    with pytest.raises(AssertionError, match="is above"):
        judge(lambda x: jnp.exp(x).at[..., 0].multiply(1 + 3e-6))


def test_error_of_a_single_run_fails():
    """A race between threads may give one wrong run: right results of later runs do not hide it."""
    runs = []

    def sometimes(x):
        runs.append(0)
        return np.where(len(runs) == 1, np.float32(1e6), np.exp(x))

    with pytest.raises(AssertionError, match="error 1.000e\\+06"):
        judge(lambda x: jax.pure_callback(sometimes, x, x))
    assert len(runs) > 1


@pytest.fixture(scope="module")
def precision_of_fixture():
    return jax.config.jax_default_matmul_precision


def test_threads_and_fixtures_multiply_without_tf32(precision_of_fixture):
    found = [precision_of_fixture]
    thread = threading.Thread(target=lambda: found.append(jax.config.jax_default_matmul_precision))
    thread.start()
    thread.join()
    assert found == ["highest"] * 2
