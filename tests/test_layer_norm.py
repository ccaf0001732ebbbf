"""layer_norm and bias_residual_layer_norm: ops and kernel."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import (
    DTYPES,
    INTERPRET,
    check,
    in_float64,
    jit,
    normal,
    power_of_two,
    seeds,
    slow,
    slow_cases,
    some,
)
from checked import checked
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.dropout import dropout_mask, dropout_seed
from jaxft.kernels.triton import layer_norm as kernel
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning.table import GradientConfig, RowConfig

# Shapes have ones, primes, no multiples of a block, and a row that does not fit into one block.
SHAPES = [(2, 3, 127), (3, 8209), *slow((1,), (1, 1), (3, 1), (7, 80), (37, 64), (1, 769))]
BOTH = ("triton", "xla")


def check_layer_norm(floats, seed=None, implementations=("triton",), in_place=False, gradients=True, **options):
    def bind(op):
        return lambda x, **vectors: op(x, vectors.get("gamma"), vectors.get("beta"), **options)

    check(lambda implementation, **f: jaxft.layer_norm(**f, **options, in_place=in_place,
                                                       implementation=implementation),
          bind(reference.layer_norm), bind(oracle.layer_norm), floats,
          implementations=implementations, gradients=gradients, seed=seed)  # fmt: skip


def check_fused(floats, seed=None, implementations=("triton",), in_place=False, gradients=True, rate=0.0, **options):
    key = jax.random.key(7)
    dropout = {"dropout_rate": rate, "dropout_rng": key if rate else None}
    keep = {"rate": rate, "keep": np.asarray(dropout_mask(key, rate, floats["x"].shape)) if rate else None}

    def bind(op, **more):
        def call(x, residual, **vectors):
            bias, gamma, beta = (vectors.get(name) for name in ("bias", "gamma", "beta"))
            return op(x, bias, residual, gamma, beta, **options, **more)

        return call

    def op(implementation, **floats):
        more = {"in_place": in_place, "implementation": implementation, **dropout}
        return bind(jaxft.bias_residual_layer_norm, **more)(**floats)

    plain, exact = bind(reference.bias_residual_layer_norm, **dropout), bind(oracle.bias_residual_layer_norm, **keep)
    check(op, plain, exact, floats, implementations=implementations, gradients=gradients, seed=seed)


def fused_floats(rng, shape, dtype=jnp.float32, vectors=jnp.float32, **absent):
    """Returns x and residual of `dtype`, and the vectors bias, gamma and beta that are not `absent`."""
    names = [name for name in ("bias", "gamma", "beta") if not absent.get(name)]
    floats = normal(rng, dtype, x=shape, residual=shape) | normal(rng, vectors, **dict.fromkeys(names, shape[-1:]))
    floats["x"] = floats["x"] * 3 + 5  # a mean that spoils one-pass variances
    return floats


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    rng = np.random.default_rng(0)
    check_fused(fused_floats(rng, shape), return_sum=True)
    check_layer_norm(normal(rng, jnp.float32, x=shape, gamma=shape[-1:], beta=shape[-1:]))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    vector = jnp.ones(shape[-1:])
    x = jnp.ones(shape, jnp.bfloat16)
    y, total = jaxft.bias_residual_layer_norm(
        x, vector, x, vector, vector, return_sum=True, implementation=implementation
    )
    plain = jaxft.layer_norm(x, vector, implementation=implementation)
    assert {(a.shape, a.dtype) for a in (y, total, plain)} == {(shape, x.dtype)}


@pytest.mark.parametrize("vectors", [DTYPES[0], *slow(*DTYPES[1:])])
@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(*DTYPES[:2])])
def test_dtypes(dtype, vectors):
    """Vectors may have another dtype, such as float32 parameters of a bfloat16 x."""
    check_fused(fused_floats(np.random.default_rng(1), (7, 80), dtype, vectors), return_sum=True, implementations=BOTH)


@pytest.mark.parametrize("absent", [["bias"], ["bias", "gamma", "beta"], *slow(["gamma"], ["beta"])], ids="+".join)
def test_optional_operands(absent):
    rng = np.random.default_rng(2)
    check_fused(fused_floats(rng, (7, 80), **dict.fromkeys(absent, True)), implementations=BOTH)
    shapes = {"x": (7, 80), **{name: (80,) for name in ("gamma", "beta") if name not in absent}}
    check_layer_norm(normal(rng, jnp.float32, **shapes), implementations=BOTH)


@pytest.mark.parametrize("epsilon", [1e-12, 10, *slow(1e-2)])
def test_epsilon(epsilon):
    floats = normal(np.random.default_rng(3), jnp.float32, x=(5, 33))
    # Rows have all magnitudes, so that each epsilon matters for one of them. The last row has no variance and gives 0.
    floats["x"] = floats["x"] * jnp.array([1e-6, 1e-3, 1.0, 1e3, 0.0])[:, None]
    check_fused(floats | {"residual": jnp.zeros((5, 33))}, epsilon=epsilon)
    check_layer_norm(floats, epsilon=epsilon)


def test_large_mean():
    """The variance is computed from the deviations from the mean, so a large mean costs no further digits."""
    floats = normal(np.random.default_rng(4), jnp.float32, x=(7, 300))
    check_layer_norm({"x": floats["x"] + 1e4})


def test_row_reaches_no_other_row():
    rng = np.random.default_rng(5)
    clean = fused_floats(rng, (37, 64))
    rows = np.array([0, 3, 36])
    poisoned = clean | {"x": clean["x"].at[rows].set(jnp.array([np.nan, np.inf, -np.inf])[:, None])}
    for implementation in ("triton", "xla"):

        @jit
        def run(floats, implementation=implementation):
            return jaxft.bias_residual_layer_norm(**floats, implementation=implementation)

        expected, got = np.asarray(run(clean)), np.asarray(run(poisoned))
        assert np.isnan(got[rows]).all()
        np.testing.assert_array_equal(np.delete(got, rows, 0), np.delete(expected, rows, 0))


# Rows, width and warps of a program's block.
CONFIGS = [(2, 128, 4), (4, 32, 2), *slow((1, 128, 1), (16, 128, 4), (64, 256, 8), (1, 16, 1))]


@pytest.mark.parametrize("sizes", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(jnp.bfloat16, 0.3), *slow_cases((jnp.float32, 0.0), (jnp.float32, 0.3), (jnp.bfloat16, 0.0))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_any_config(dtype, rate, sizes, key):
    """Blocks hold whole rows, several rows or parts of rows. Programs have one block or several."""
    rng = np.random.default_rng(6)
    floats = fused_floats(rng, (21, 101), dtype, jnp.bfloat16)
    arguments = [floats[name] for name in ("x", "bias", "residual", "gamma", "beta")]
    dy = tuple(normal(rng, dtype, y=(21, 101), sum=(21, 101)).values())
    options = {"dropout_rate": rate, "interpret": INTERPRET}
    seed = dropout_seed(key) if rate else None

    @jit
    def plain(dy, *arguments):
        run = functools.partial(reference.bias_residual_layer_norm, return_sum=True, dropout_rate=rate, dropout_rng=key)
        out, pull_back = jax.vjp(run, *arguments)
        return out, pull_back(dy)

    expected, exact = plain(dy, *arguments), in_float64(plain, dy, *arguments)
    rows, width, warps = sizes

    @jit
    def run(dy, x, bias, residual, gamma, beta):
        *y, saved = kernel.forward(
            x, bias, residual, gamma, beta, seed, epsilon=1e-6, return_sum=True, save=True, in_place=False,
            config=RowConfig(rows, width, warps), **options,
        )  # fmt: skip
        vectors = {"bias": bias.dtype, "gamma": gamma.dtype, "beta": beta.dtype}
        dx, dresidual, sums = kernel.backward(
            *dy, x, bias, residual, gamma, seed, saved, vectors=vectors,
            config=GradientConfig(rows, width, 1 + rows % 5, warps), **options,
        )  # fmt: skip
        return tuple(y), (dx, sums["bias"], dresidual, sums["gamma"], sums["beta"])

    got = run(dy, *arguments)
    assert_matches_oracle(got, expected, exact, seed=sizes)
    if rate == 0.0:  # blocks do not matter to the sum of two or three elements
        chex.assert_trees_all_equal(got[0][1], expected[0][1])


@pytest.mark.parametrize("sizes", [(2, 4, 2), *slow((2, 8, 2), (1, 8, 3), (4, 8, 9))], ids=str)
def test_kernels_stay_within_the_arrays(sizes, key):
    """Prefetches stay within the arrays, too."""
    rows, width, programs = sizes
    floats = fused_floats(np.random.default_rng(11), (7, 6))
    x, residual, bias, gamma, beta = (floats[name] for name in ("x", "residual", "bias", "gamma", "beta"))
    options, seed = {"dropout_rate": 0.3, "interpret": True}, dropout_seed(key)
    with checked():
        for in_place in (True, False):
            *y, saved = kernel.forward(
                x, bias, residual, gamma, beta, seed, epsilon=1e-6, return_sum=True, save=True, in_place=in_place,
                config=RowConfig(rows, width, 1), **options,
            )  # fmt: skip
        kernel.backward(
            *y, x, bias, residual, gamma, seed, saved, vectors=dict.fromkeys(("bias", "gamma", "beta"), jnp.float32),
            config=GradientConfig(rows, width, programs, 1), **options,
        )  # fmt: skip


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_reruns_are_bitwise_equal(implementation):
    floats = fused_floats(np.random.default_rng(7), (37, 64), jnp.bfloat16)

    @jit
    def run(floats):
        out, pull_back = jax.vjp(lambda f: jaxft.bias_residual_layer_norm(**f, implementation=implementation), floats)
        return out, pull_back(out)

    chex.assert_trees_all_equal(run(floats), run(floats))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 127), jnp.bfloat16),
     *slow_cases(((2, 3, 127), jnp.float32),
                 *((shape, dtype) for shape in ((1, 1), (3, 8209)) for dtype in (jnp.float32, jnp.float16)))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_dropout(shape, dtype):
    for rate in (0.1, 0.9):
        check_fused(fused_floats(np.random.default_rng(8), shape, dtype), rate=rate, return_sum=True)
    check_fused(fused_floats(np.random.default_rng(9), shape, dtype, bias=True, gamma=True, beta=True), rate=0.5)


def test_kernel_and_reference_drop_the_same(key):
    """The masks are bitwise equal, forward and backward, and at every block size."""
    shape, rate = (37, 300), 0.4
    x, keep = jnp.ones(shape), np.asarray(dropout_mask(key, rate, shape))

    def run(x, implementation):
        return jaxft.bias_residual_layer_norm(
            x, None, jnp.zeros(shape), None, None, dropout_rate=rate, dropout_rng=key, return_sum=True,
            implementation=implementation,
        )[1]  # fmt: skip

    for implementation in BOTH:
        total, pull_back = jax.vjp(functools.partial(run, implementation=implementation), x)
        np.testing.assert_array_equal(total != 0.0, keep)
        np.testing.assert_array_equal(pull_back(x)[0] != 0.0, keep)
    for config in (RowConfig(1, 512, 4), RowConfig(8, 64, 2)):
        options = {"epsilon": 1e-6, "dropout_rate": rate, "in_place": False, "config": config, "interpret": INTERPRET}
        seed = dropout_seed(key)
        _, total = kernel.forward(x, None, jnp.zeros(shape), None, None, seed, return_sum=True, save=False, **options)
        np.testing.assert_array_equal(total != 0.0, keep)
    jaxft.bias_residual_layer_norm(x, None, x, None, None, dropout_rate=0.0, implementation="triton")  # needs no key


@pytest.mark.parametrize("implementation", BOTH)
def test_in_place_changes_no_value(implementation, key):
    floats = fused_floats(np.random.default_rng(10), (7, 80), jnp.bfloat16)
    options = {"dropout_rate": 0.1, "dropout_rng": key, "return_sum": True, "implementation": implementation}

    def run(in_place):
        def op(floats):
            return jaxft.bias_residual_layer_norm(**floats, in_place=in_place, **options)

        out, pull_back = jax.vjp(op, floats)
        return jax.jit(op)(floats), out, pull_back(out)

    chex.assert_trees_all_equal(run(True), run(False))  # the arguments are still there


@pytest.mark.parametrize("op", ["layer_norm", "bias_residual_layer_norm"])
@pytest.mark.parametrize("name", ["in_place", "return_sum"])
def test_flags_must_be_bool(op, name):
    if (op, name) != ("layer_norm", "return_sum"):
        operands = (X, V, X, V, V)[: 1 if op == "layer_norm" else 5]
        with pytest.raises(TypeError, match=f"{op}: {name} must be True or False, got str"):
            getattr(jaxft, op)(*operands, **{name: "no"})


def test_rows_beyond_the_end_add_nothing(key):
    """An infinite bias must not spoil sums, in a column that dropout drops in every real row."""
    shape, rate = (5, 6), 0.8
    keep = np.asarray(dropout_mask(key, rate, shape))
    column = int(np.flatnonzero(~keep.any(axis=0))[0])
    floats = fused_floats(np.random.default_rng(12), shape)
    floats["bias"] = floats["bias"].at[column].set(jnp.inf)
    for implementation in BOTH:

        def run(floats, implementation=implementation):
            options = {"dropout_rate": rate, "dropout_rng": key, "implementation": implementation}
            return jaxft.bias_residual_layer_norm(**floats, **options).sum()

        gradients = jax.grad(run)(floats)
        chex.assert_tree_all_finite([gradients[name] for name in ("x", "residual", "gamma", "beta")])
        assert np.isfinite(np.delete(np.asarray(gradients["bias"]), column)).all()


@pytest.mark.skipif(INTERPRET, reason="reads a program compiled for an NVIDIA GPU")
def test_in_place_saves_a_buffer():
    """The buffer is the one of a donated argument, or of an array that is dead after the call."""
    shape = (4096, 1024)
    nbytes = 2 * 4096 * 1024

    def donated(in_place):
        run = jax.jit(lambda x: jaxft.layer_norm(x, in_place=in_place, implementation="triton"), donate_argnums=0)
        return run.lower(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).compile().memory_analysis()

    assert donated(True).alias_size_in_bytes == nbytes
    assert donated(True).temp_size_in_bytes < nbytes <= donated(False).temp_size_in_bytes

    def fused(in_place):
        options = {"return_sum": True, "in_place": in_place, "implementation": "triton"}
        run = jax.jit(
            lambda x, r: jaxft.bias_residual_layer_norm(x, None, r, None, None, **options), donate_argnums=(0, 1)
        )
        return run.lower(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 2).compile().memory_analysis()

    assert fused(True).alias_size_in_bytes == 2 * nbytes
    assert fused(True).temp_size_in_bytes < nbytes <= fused(False).temp_size_in_bytes

    def dead(in_place):
        def run(x):
            for _ in range(4):
                x = jaxft.layer_norm(x, in_place=in_place, implementation="triton")
            return x

        return jax.jit(run).lower(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).compile().memory_analysis()

    assert dead(True).temp_size_in_bytes < dead(False).temp_size_in_bytes


@pytest.mark.parametrize("op", ["bias_residual_layer_norm", *slow("layer_norm")])
@pytest.mark.parametrize("seed", seeds(2))
def test_random(seed, op, monkeypatch):
    """Launch configurations are random: rows in chunks, several rows or several blocks of rows a program."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 2, 3, 17, 64, 100, 129, 384]))
    shape = (*(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3))), width)
    dtype, vectors = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    absent = {name: bool(rng.random() < 0.25) for name in ("bias", "gamma", "beta")}
    # With so few columns, the gradient is what epsilon leaves of it, and may be rounding errors only.
    options = {
        "gradients": width > 3,
        "epsilon": float(rng.choice([1e-12, 1e-6, 0.3])),
        "in_place": bool(rng.random() < 0.5),
    }
    blocks = [(power_of_two(rng, 8), max(8, power_of_two(rng, 512)), power_of_two(rng, 4)) for _ in range(2)]
    backward = GradientConfig(*blocks[1][:2], int(rng.integers(1, 9)), blocks[1][2])
    monkeypatch.setattr(tuning_rows, "layer_norm", lambda *_: RowConfig(*blocks[0]))
    monkeypatch.setattr(tuning_rows, "layer_norm_backward", lambda *_: backward)
    if op == "bias_residual_layer_norm":
        check_fused(fused_floats(rng, shape, dtype, vectors, **absent), seed, **options,
                    rate=float(rng.choice([0.0, 0.0, 0.2])), return_sum=bool(rng.random() < 0.5))  # fmt: skip
    else:
        floats = normal(rng, dtype, x=shape)
        check_layer_norm(floats | normal(rng, vectors, gamma=some(rng, (width,)), beta=some(rng, (width,))), seed,
                         **options)  # fmt: skip


# --- Errors ------------------------------------------------------------------------------------------------------

X, V = jnp.ones((2, 8)), jnp.ones((8,))
GOOD = {"x": X, "bias": V, "residual": X, "gamma": V, "beta": V}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be an array, got list"),
        ({"x": jnp.ones((2, 8), jnp.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"x": jnp.ones(())}, ValueError, "x must have at least one dimension, got a scalar"),
        ({"gamma": jnp.ones((7,))}, ValueError, "gamma must have shape (8,), got (7,)"),
        ({"gamma": jnp.ones((1, 8))}, ValueError, "gamma must have shape (8,), got (1, 8)"),
        ({"gamma": 1.0}, TypeError, "gamma must be an array, got float"),
        ({"beta": jnp.ones(())}, ValueError, "beta must have shape (8,), got ()"),
        ({"beta": jnp.ones((8,), bool)}, TypeError, "beta must be an array of floats, got bool"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be positive, got 0.0"),
        ({"epsilon": -1e-6}, ValueError, "epsilon must be positive, got -1e-06"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must be finite, got nan"),
        ({"epsilon": "1e-6"}, TypeError, "epsilon must be a Python number, got str"),
        ({"epsilon": True}, TypeError, "epsilon must be a Python number, got bool"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None or one of ('triton', 'mosaic_gpu',"
         " 'cudnn', 'xla'), got 'cuda'"),
        ({"implementation": "cudnn"}, NotImplementedError,
         "there is no 'cudnn' implementation, only ('triton', 'xla')"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
@pytest.mark.parametrize("op", ["layer_norm", "bias_residual_layer_norm"])
def test_errors(op, changes, error, message):
    good = GOOD if op == "bias_residual_layer_norm" else {name: GOOD[name] for name in ("x", "gamma", "beta")}
    with pytest.raises(error, match=re.escape(f"{op}: {message}")):
        getattr(jaxft, op)(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bias": jnp.ones((2, 8))}, ValueError, "bias must have shape (8,), got (2, 8)"),
        ({"bias": jnp.ones((8,), jnp.int8)}, TypeError, "bias must be an array of floats, got int8"),
        ({"residual": None}, TypeError, "residual must be an array, got NoneType"),
        ({"residual": jnp.ones((8,))}, ValueError, "residual must have shape (2, 8), got (8,)"),
        ({"residual": jnp.ones((2, 8), jnp.bfloat16)}, TypeError,
         "residual must have the dtype of x, float32, got bfloat16"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate is 0.1, so dropout_rng must be a JAX random key, got None"),
        ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be in [0, 1), got 1.0"),
        ({"dropout_rate": -0.1}, ValueError, "dropout_rate must be in [0, 1), got -0.1"),
        ({"dropout_rate": None}, TypeError, "dropout_rate must be a Python number, got NoneType"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors_of_the_fused_op(changes, error, message):
    with pytest.raises(error, match=re.escape(f"bias_residual_layer_norm: {message}")):
        jaxft.bias_residual_layer_norm(**{**GOOD, **changes})


@pytest.mark.parametrize("name", ["x", "bias", "gamma", "beta"])
def test_kernel_refuses_float64_by_name(name):
    with jax.enable_x64(True):
        wide = {name: jnp.ones(GOOD[name].shape, jnp.float64)}
        if name == "x":
            wide["residual"] = wide["x"]
        message = f"'triton' cannot be used: {name} is float64, the kernels take float32, float16 and bfloat16"
        with pytest.raises(NotImplementedError, match=message):
            jaxft.bias_residual_layer_norm(**{**GOOD, **wide}, implementation="triton")
