"""What the tests of ops and kernels share: seeds, random arrays, and the check of values and gradients."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jaxlib.version import __version_info__ as jaxlib_version

from compare import assert_matches_oracle
from jaxft import dispatch

# Kernels that tests call directly run as the ops run them: compiled on a GPU, interpreted elsewhere.
INTERPRET = jax.default_backend() == "cpu"


def seeds(count: int) -> list[Any]:
    """The seeds of a test's random cases: 0 to count - 1, or up to $JAXFT_TEST_CASES."""
    return [pytest.param(seed, id=f"seed{seed}") for seed in range(int(os.environ.get("JAXFT_TEST_CASES", count)))]


def in_full(*values: Any) -> list[Any]:
    """`values` where $JAXFT_TEST_CASES asks for a full run, as on a GPU, else none: others test much of the same."""
    return list(values) if "JAXFT_TEST_CASES" in os.environ else []


DTYPES = [pytest.param(dtype, id=dtype.__name__) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)]
SOME_DTYPES = [DTYPES[0], DTYPES[2], *in_full(DTYPES[1])]
ONE_DTYPE = [DTYPES[2], *in_full(*DTYPES[:2])]


def some(rng, value, chance=0.5):
    return value if rng.random() < chance else None


def power_of_two(rng, most: int) -> int:
    return 2 ** int(rng.integers(most.bit_length()))


def normal(rng, dtype, **shapes) -> dict[str, jax.Array]:
    """Random arrays by name, leaving out those whose shape is None."""
    return {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items() if s is not None}


# Every rounding to 16 bits that is written happens, in plain jnp and in an op alike. And on a CPU compiling takes half
# the time, where it takes longer than anything else in these tests, and sums of products are those of a GPU's kernel,
# the same for blocks of any shape: what the backward pass computes again is what the forward pass had.
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
if INTERPRET:
    COMPILER_OPTIONS |= {"xla_backend_optimization_level": 0, "xla_cpu_experimental_ynn_fusion_type": ""}
# For the same numbers, bit for bit, of programs of other shapes: in JAX 0.10 the emitters that `make test` avoids.
BITWISE = COMPILER_OPTIONS | ({"xla_cpu_use_fusion_emitters": True} if jaxlib_version < (0, 11) else {})


def jit(function: Callable) -> Callable:
    return jax.jit(function, compiler_options=COMPILER_OPTIONS)


def value_and_gradients(function: Callable) -> Callable:
    """(floats, cotangents) -> `function(**floats)`, and what the cotangents of that result give for each argument."""

    @jit
    def run(floats, cotangents):
        out, pull_back = jax.vjp(lambda floats: function(**floats), floats)
        return out, pull_back(cotangents)[0]

    return run


def random_cotangents(function: Callable, floats: Mapping[str, Any]) -> Any:
    rng, out = np.random.default_rng(0), jax.eval_shape(lambda floats: function(**floats), floats)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), out)


def in_float64(run: Callable, *trees: Any) -> Any:
    """`run(*trees)` with every float array as float64, by the CPU."""

    def widen(leaf):
        return np.asarray(leaf).astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    cpu = jax.default_device(jax.devices("cpu")[0])
    with cpu, jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # the integers stay as they are
        return jax.tree.map(np.asarray, run(*jax.tree.map(widen, trees)))


DRAWS = 8  # of the numbers of a case that fails with the first


def shrunk(floats: Mapping[str, Any], draw: int) -> dict[str, Any]:
    """Each number up to an eighth smaller, so that all are rounded otherwise."""
    rng = np.random.default_rng(draw)
    return {n: x * jnp.asarray(1 - rng.uniform(0, 0.125, x.shape), x.dtype) for n, x in floats.items()}


def check(op: Callable, plain: Callable, exact: Callable, floats: Mapping[str, Any], *,
          implementations=("triton",), gradients=True, seed=None) -> None:  # fmt: skip
    """Values and gradients of `op(implementation, **floats)` err at most twice as much as those of plain jnp.

    `plain(**floats)` is `jaxft.reference`, `exact(**floats)` the oracle in NumPy. The exact gradients are those of
    `plain` in float64, which `test_reference.py` compares with the oracle's differences.

    Where few numbers are large, how much plain jnp errs is luck: what fails is judged by the largest errors in several
    draws of about the same numbers.
    """
    cotangents = random_cotangents(plain, floats) if gradients else None

    def jitted(function: Callable) -> Callable:
        return value_and_gradients(function) if gradients else jit(lambda floats, _: function(**floats))

    def truth(floats: Mapping[str, Any]) -> Any:
        value = jax.tree.map(np.asarray, exact(**floats))
        return (value, in_float64(run_plain, floats, cotangents)[1]) if gradients else value

    run_plain, runs = jitted(plain), {name: jitted(functools.partial(op, name)) for name in implementations}

    @functools.cache  # what has failed is not run again: it might not fail then
    def results(draw: int) -> Any:
        x = shrunk(floats, draw) if draw else dict(floats)
        return run_plain(x, cotangents), truth(x), {name: run(x, cotangents) for name, run in runs.items()}

    def assert_close(draws: int) -> None:
        expected, exact_results, got = stacked(map(results, range(draws)))
        for name in runs:
            assert_matches_oracle(got[name], expected, exact_results, seed=f"{seed}, implementation {name}")

    try:
        assert_close(1)
    except AssertionError as error:
        print(f"judged by {DRAWS} draws: {error}")
        assert_close(DRAWS)


def stacked(trees: Iterable[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def check_padding(function: Callable, clean: Mapping[str, Any], valid: Mapping[str, Any]) -> None:
    """NaN, infinities and huge numbers where not `valid` change no bit of values and gradients, which are 0 there."""
    poison = np.array([np.nan, np.inf, -np.inf, 3e38])
    poisoned = {n: jnp.where(valid[n], x, np.resize(poison, x.shape).astype(x.dtype)) for n, x in clean.items()}
    run, cotangents = value_and_gradients(function), random_cotangents(function, clean)
    expected, got = (run(floats, cotangents) for floats in (dict(clean), poisoned))
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_equal(got, expected)
    for name, gradient in got[1].items():
        assert (np.asarray(gradient)[~np.broadcast_to(valid[name], gradient.shape)] == 0.0).all(), name


@contextlib.contextmanager
def for_h200(axis: str = "x", kind: AxisType = AxisType.Auto) -> Iterator[AbstractMesh]:
    """Ops and JAX lower for an H200 in here, whatever machine this is; lower with `lowering_platforms=("cuda",)`.

    `axis` is the one of the mesh that a shard_map without a mesh finds, `kind` its kind.
    """
    device = {}
    if jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        device = {"abstract_device": AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")}
    mesh = AbstractMesh((1,), (axis,), axis_types=(kind,), **device)
    with dispatch.target("NVIDIA H200"), jax.sharding.use_abstract_mesh(mesh):
        yield mesh


def lower(function: Callable, *arguments: Any, axis: str = "x") -> str:
    """The StableHLO text of `function` for an H200. Arguments may be shapes."""
    with for_h200(axis):
        return jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
