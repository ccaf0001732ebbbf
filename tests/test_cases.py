"""`cases.check`, by which ops are judged: it passes what is exact, and nothing that errs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import check

X = {"x": jnp.asarray(np.random.default_rng(0).standard_normal((4, 5)), jnp.float32)}


def judge(op):
    check(lambda implementation, x: op(x), lambda x: jnp.exp(x), lambda x: np.exp(np.float64(x)), X, gradients=False)


def test_exact():
    judge(jnp.exp)


def test_one_place_that_errs_a_little():
    with pytest.raises(AssertionError, match="is above"):
        judge(lambda x: jnp.exp(x).at[..., 0].multiply(1 + 3e-6))


def test_an_error_of_one_run():
    """As of a race between threads: it does not pass because the next runs are right."""
    runs = []

    def sometimes(x):
        runs.append(0)
        return np.where(len(runs) == 1, np.float32(1e6), np.exp(x))

    with pytest.raises(AssertionError, match="error 1.000e\\+06"):
        judge(lambda x: jax.pure_callback(sometimes, x, x))
    assert len(runs) > 1
