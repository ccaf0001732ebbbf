"""Helpers for tests of ops and kernels: seeds, random arrays, and the check of values and gradients."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
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


ParameterSet = type(pytest.param())


def slow(*values: Any) -> list[Any]:
    """Parameters that `make test` leaves out. Each is a value of one argument, or a `pytest.param`."""
    params = [value if isinstance(value, ParameterSet) else pytest.param(value) for value in values]
    return [pytest.param(*p.values, marks=[*p.marks, pytest.mark.slow], id=p.id) for p in params]


def slow_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """Parameters that `make test` leaves out. Each is a tuple of values of several arguments."""
    return slow(*(pytest.param(*case) for case in cases))


def seeds(count: int) -> list[Any]:
    """Seeds of random cases: `count` of them, or $JAXFT_TEST_CASES. `make test` runs the first one only."""
    first, *others = (
        pytest.param(seed, id=f"seed{seed}") for seed in range(int(os.environ.get("JAXFT_TEST_CASES", count)))
    )
    return [first, *slow(*others)]


DTYPES = [pytest.param(dtype, id=dtype.__name__) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)]
SOME_DTYPES = [DTYPES[0], DTYPES[2], *slow(DTYPES[1])]
ONE_DTYPE = [DTYPES[2], *slow(*DTYPES[:2])]


def some(rng, value, chance=0.5):
    return value if rng.random() < chance else None


def power_of_two(rng, most: int) -> int:
    return 2 ** int(rng.integers(most.bit_length()))


def normal(rng, dtype, **shapes) -> dict[str, jax.Array]:
    """Returns random arrays by name, without those whose shape is None."""
    return {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items() if s is not None}


# XLA keeps every rounding to 16 bits that the program has, in plain jnp and in ops alike. On a CPU, the other options
# halve the compile time, which is the largest part of these tests. They also make the sums of a matmul independent of
# the shape of a block, as in a GPU kernel: the backward pass recomputes exactly what the forward pass had.
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
if INTERPRET:
    COMPILER_OPTIONS |= {"xla_backend_optimization_level": 0, "xla_cpu_experimental_ynn_fusion_type": ""}
# Options for bitwise equal numbers in programs of different shapes. JAX 0.10 needs emitters that `make test` avoids.
BITWISE = COMPILER_OPTIONS | ({"xla_cpu_use_fusion_emitters": True} if jaxlib_version < (0, 11) else {})


def jit(function: Callable) -> Callable:
    return jax.jit(function, compiler_options=COMPILER_OPTIONS)


def value_and_gradients(function: Callable) -> Callable:
    """Returns (floats, cotangents) -> `function(**floats)`, and the gradients of its arguments for the cotangents."""

    @jit
    def run(floats, cotangents):
        out, pull_back = jax.vjp(lambda floats: function(**floats), floats)
        return out, pull_back(cotangents)[0]

    return run


def random_cotangents(function: Callable, floats: Mapping[str, Any]) -> Any:
    rng, out = np.random.default_rng(0), jax.eval_shape(lambda floats: function(**floats), floats)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), out)


def in_float64(run: Callable, *trees: Any) -> Any:
    """Computes `run(*trees)` on the CPU with every float array in float64."""

    def widen(leaf):
        return np.asarray(leaf).astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    cpu = jax.default_device(jax.devices("cpu")[0])
    with cpu, jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # the integers stay as they are
        return jax.tree.map(np.asarray, run(*jax.tree.map(widen, trees)))


DRAWS = 8  # draws of the numbers of a case that fails with the first draw


def shrunk(floats: Mapping[str, Any], draw: int) -> dict[str, Any]:
    """Returns the numbers up to an eighth smaller, so that all round differently."""
    rng = np.random.default_rng(draw)
    return {n: x * jnp.asarray(1 - rng.uniform(0, 0.125, x.shape), x.dtype) for n, x in floats.items()}


def check(op: Callable, plain: Callable, exact: Callable, floats: Mapping[str, Any], *,
          implementations=("triton",), gradients=True, seed=None) -> None:  # fmt: skip
    """Asserts that values and gradients of `op(implementation, **floats)` err at most twice as much as plain jnp.

    `plain(**floats)` is `jaxft.reference`, `exact(**floats)` the oracle in NumPy. The exact gradients are
    computed by `plain` in float64, which `test_reference.py` compares with the oracle's differences.

    If few numbers are large, the error of plain jnp is a matter of luck. A case that fails is therefore judged by the
    largest errors in several draws of about the same numbers.
    """
    cotangents = random_cotangents(plain, floats) if gradients else None

    def jitted(function: Callable) -> Callable:
        return value_and_gradients(function) if gradients else jit(lambda floats, _: function(**floats))

    def truth(floats: Mapping[str, Any]) -> Any:
        value = jax.tree.map(np.asarray, exact(**floats))
        return (value, in_float64(run_plain, floats, cotangents)[1]) if gradients else value

    run_plain, runs = jitted(plain), {name: jitted(functools.partial(op, name)) for name in implementations}

    @functools.cache  # a failed run is not repeated: it might pass then
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
    """Asserts that NaN, infinities and huge numbers where not `valid` change no bit, and that gradients are 0 there."""
    poison = np.array([np.nan, np.inf, -np.inf, 3e38])
    poisoned = {n: jnp.where(valid[n], x, np.resize(poison, x.shape).astype(x.dtype)) for n, x in clean.items()}
    run, cotangents = value_and_gradients(function), random_cotangents(function, clean)
    expected, got = (run(floats, cotangents) for floats in (dict(clean), poisoned))
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_equal(got, expected)
    for name, gradient in got[1].items():
        assert (np.asarray(gradient)[~np.broadcast_to(valid[name], gradient.shape)] == 0.0).all(), name


def card(
    kind: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), multiprocessors: int = 132
) -> dispatch.Device:
    """Returns the description of an NVIDIA card, whatever machine this is."""
    with dispatch.target(kind, capability, multiprocessors):
        return dispatch.device()


def pytest_on(devices: int, *arguments: str) -> str:
    """Runs pytest with these arguments in a process with this number of CPU devices. Returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider", *arguments],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def for_h200(axis: str = "x", kind: AxisType = AxisType.Auto) -> Iterator[AbstractMesh]:
    """Context in which ops and JAX lower for an H200 on any machine, with `lowering_platforms=("cuda",)`.

    A shard_map without a mesh finds a mesh with this axis and this kind of axis.
    """
    device = {}
    if jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        device = {"abstract_device": AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")}
    mesh = AbstractMesh((1,), (axis,), axis_types=(kind,), **device)
    with dispatch.target("NVIDIA H200"), jax.sharding.use_abstract_mesh(mesh):
        yield mesh


def lower(function: Callable, *arguments: Any, axis: str = "x") -> str:
    """Returns the StableHLO text of `function` for an H200. Arguments may be shapes."""
    with for_h200(axis):
        return jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
