"""The one comparison of the test suite: against the float64 oracle, measured by what plain jnp achieves."""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def ulp(magnitude, dtype):
    """Spacing of `dtype` at `magnitude`, but no less than float32's smallest normal number (devices flush below it)."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return max(2.0**exponent * float(info.eps), float(np.finfo(np.float32).smallest_normal))


def errors(name, actual, oracle, seed=None):
    """Absolute errors (0 where both agree on a NaN or infinity); a disagreement about those is a failure."""
    with np.errstate(over="ignore"):
        expected = oracle.astype(actual.dtype).astype(np.float64)  # values that overflow in this dtype may be infinite
    actual = np.asarray(actual).astype(np.float64)
    finite = np.isfinite(expected)
    agree = np.where(finite, np.isfinite(actual), (actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if not agree.all():
        where = tuple(int(i) for i in np.argwhere(~agree)[0])
        raise AssertionError(
            f"{name}: {(~agree).sum()} of {agree.size} elements disagree with the oracle about NaN or infinity; "
            f"first at {where}: got {actual[where]}, expected {expected[where]}{_seeded(seed)}"
        )
    return np.abs(np.where(finite, actual, 0.0) - np.where(finite, oracle, 0.0))


def magnitude(oracle):
    """The largest finite magnitude of an array, 0 when there is none."""
    return float(np.abs(oracle[np.isfinite(oracle)]).max(initial=0.0))


def assert_matches_oracle(actual, reference, oracle, *, seed=None):
    """Leaf by leaf, `actual` errs at most twice as much as `reference` plus 2 ulp of its dtype.

    `actual` and `reference` are pytrees of arrays of the same shapes and dtypes (the results of a kernel and of plain
    jnp), `oracle` has the same structure in float64. NaN and infinities must be where the oracle has them. `seed` goes
    into the message.
    """
    chex.assert_trees_all_equal_structs(actual, reference, oracle)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, reference)
    chex.assert_trees_all_equal_shapes(actual, oracle)
    leaves = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(reference), jax.tree.leaves(oracle),
                 strict=True)  # fmt: skip
    for (path, got), plain, exact in leaves:
        name, exact = f"result{jax.tree_util.keystr(path)}", np.asarray(exact, np.float64)
        error = errors(name, got, exact, seed)
        reference_error = errors(f"{name} of the reference", plain, exact, seed).max(initial=0.0)
        allowed = 2.0 * reference_error + 2.0 * ulp(magnitude(exact), got.dtype)
        if error.max(initial=0.0) > allowed:
            where = np.unravel_index(error.argmax(), error.shape)
            raise AssertionError(
                f"{name} ({got.dtype}{list(got.shape)}): error {error[where]:.3e} at {tuple(int(i) for i in where)} "
                f"(got {float(got[where]):.9g}, expected {exact[where]:.9g}) is above {allowed:.3e} = "
                f"2 x {reference_error:.3e} of the reference + 2 ulp{_seeded(seed)}"
            )


def _seeded(seed):
    return "" if seed is None else f" [seed {seed}]"
