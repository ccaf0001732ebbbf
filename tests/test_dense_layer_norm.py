"""dense_residual_layer_norm: LN(dropout(x @ kernel + bias) + residual)."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import INTERPRET, ONE_DTYPE, check, jit, lower, normal, seeds, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.dropout import dropout_mask
from jaxft.kernels.triton import dense, layer_norm
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import table as tuning_table
from lowered import TRITON, of, operations


def floats_of(rng, rows, depth, width, dtype=jnp.bfloat16, vectors=jnp.float32, missing=()):
    floats = normal(rng, dtype, x=(*rows, depth), kernel=(depth, width), residual=(*rows, width))
    floats |= normal(rng, vectors, **{name: (width,) for name in ("bias", "gamma", "beta") if name not in missing})
    return floats | {"kernel": floats["kernel"] * max(depth, 1) ** -0.5}


def check_op(floats, seed=None, implementations=("triton",), **options):
    missing = {name: None for name in ("bias", "gamma", "beta") if name not in floats}
    for gradients in (False, True):  # then other kernels make the same result
        check(
            lambda implementation, **f: jaxft.dense_residual_layer_norm(
                **f, **missing, **options, implementation=implementation),
            lambda **f: reference.dense_residual_layer_norm(**f, **missing, **options),
            lambda **f: oracle.bias_residual_layer_norm(
                oracle.dense(f.pop("x"), f.pop("kernel")), **f, **missing, **options),
            floats, implementations=implementations, gradients=gradients, seed=seed,
        )  # fmt: skip


def splits(rows, depth, width, itemsize=2):
    return tuning_dense.dense_split(rows, depth, width, itemsize, dispatch.device()).splits


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(
    ("rows", "depth", "width", "parts"),
    [((2, 3), 1100, 129, 4), ((5,), 40, 7, 1), *slow_cases(((37,), 600, 40, 2))],
    ids=str,
)
def test_values(rows, depth, width, parts, dtype):
    itemsize = jnp.dtype(dtype).itemsize
    assert splits(int(np.prod(rows)), depth, width, itemsize) == (parts if itemsize == 2 else 1)
    check_op(floats_of(np.random.default_rng(0), rows, depth, width, dtype), epsilon=1e-12)


@pytest.mark.parametrize("missing", [("bias",), ("bias", "gamma", "beta"), *slow(("gamma",), ("beta",))], ids=str)
def test_optional_vectors(missing):
    check_op(floats_of(np.random.default_rng(1), (5,), 520, 17, missing=missing))


@pytest.mark.parametrize(("depth", "parts"), [(1100, 4), *slow_cases((40, 1))])
def test_sum_is_returned(depth, parts):
    """The sum is the residual of the next half of a pre-norm layer, without beta as in ModernBERT."""
    floats = floats_of(np.random.default_rng(6), (2, 3), depth, 129, missing=("bias", "beta"))
    assert splits(6, depth, 129) == parts
    check_op(floats, implementations=("triton", "xla"), return_sum=True)
    y, total = jaxft.dense_residual_layer_norm(**floats, bias=None, beta=None, return_sum=True)
    assert y.shape == total.shape == (2, 3, 129)


def test_sum_changes_no_number_of_kernels():
    for rows, depth in ((128, 3072), (4096, 768)):
        arrays = [of(shape, jnp.bfloat16) for shape in ((rows, depth), (depth, 768), (768,), (rows, 768), (768,))]
        counts = []
        for return_sum in (False, True):

            def run(x, kernel, bias, residual, gamma, return_sum=return_sum):
                options = {"return_sum": return_sum}
                return jaxft.dense_residual_layer_norm(x, kernel, bias, residual, gamma, None, **options)

            found = operations(lower(run, *arrays))
            counts.append([found[name] for name in (TRITON, "custom_call @mosaic_gpu_v2", "dot_general", "add")])
        assert counts[0] == counts[1]


@pytest.mark.parametrize("seed", seeds(3))
def test_random(seed):
    rng = np.random.default_rng(seed)
    rows = tuple(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(0, 3)))
    depth, width = int(rng.choice([3, 512, 601, 1030])), int(rng.choice([1, 3, 17, 64, 100]))
    dtype, vectors = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    missing = [name for name in ("bias", "gamma", "beta") if rng.random() < 0.2]
    floats = floats_of(rng, rows, depth, width, dtype, vectors, missing)
    check_op(floats, seed, return_sum=bool(rng.random() < 0.5))


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("block_k", [16, *slow(128)])
@pytest.mark.parametrize("parts", [7, *slow(2, 3)])
def test_partial_sums(parts, block_k, dtype):
    """The number of programs does not divide the depth, or exceeds the number of blocks."""
    rng = np.random.default_rng(2)
    floats = normal(rng, dtype, x=(21, 201), kernel=(201, 40))
    config = tuning_dense.DenseConfig(16, 32, block_k, 4, 2)
    (sums,) = jit(
        lambda x, kernel: dense.forward(
            x,
            kernel,
            None,
            None,
            activation=None,
            precision="float32",
            config=config,
            interpret=INTERPRET,
            splits=parts,
        )
    )(**floats)
    assert (sums.shape, sums.dtype) == ((parts, 21, 40), jnp.float32)
    exact = oracle.dense(**floats)
    np.testing.assert_allclose(np.asarray(sums, np.float64).sum(axis=0), exact, atol=1e-4)

    residual = normal(rng, dtype, residual=(21, 40))["residual"]
    for width in (64, 16):  # widths of a block: a whole row, and a part of one
        run = jit(
            lambda x, r, width=width: layer_norm.forward(
                x, None, r, None, None, None, epsilon=1e-6, dropout_rate=0.0, return_sum=False, save=False,
                in_place=False, config=tuning_table.RowConfig(4, width, 1), interpret=INTERPRET,
            )[0]
        )  # fmt: skip
        expected = reference.bias_residual_layer_norm(
            jnp.asarray(exact.astype(np.float32), dtype), None, residual, None, None
        )
        assert_matches_oracle(
            run(sums, residual), expected, oracle.bias_residual_layer_norm(exact, None, residual, None, None)
        )


@pytest.mark.parametrize("implementation", ["triton", "xla", None])
@pytest.mark.parametrize(
    ("rows", "depth", "width"), [((0,), 3, 2), ((2, 0), 600, 2), ((2,), 0, 3), ((2,), 3, 0)], ids=str
)
def test_empty(rows, depth, width, implementation):
    floats = floats_of(np.random.default_rng(0), rows, depth, width)
    y = jaxft.dense_residual_layer_norm(**floats, implementation=implementation)
    assert (y.shape, y.dtype) == ((*rows, width), jnp.bfloat16)
    rest = {name: floats[name] for name in ("bias", "residual", "gamma", "beta")}
    if depth == 0:
        expected = reference.bias_residual_layer_norm(jnp.zeros_like(y), **rest)
        np.testing.assert_allclose(np.float32(y), np.float32(expected), atol=0.02)


def test_dropout(key):
    """The op drops the elements that `bias_residual_layer_norm` drops, forward and backward."""
    floats = floats_of(np.random.default_rng(3), (9,), 520, 40)
    options = {"dropout_rate": 0.3, "dropout_rng": key}

    def one(f):
        return jaxft.dense_residual_layer_norm(**f, **options, implementation="triton")

    def two(f):
        f = dict(f)
        y = jaxft.dense(f.pop("x"), f.pop("kernel"), implementation="triton")
        return jaxft.bias_residual_layer_norm(y, **f, **options, implementation="triton")

    def results(run):
        out, pull_back = jax.vjp(run, floats)
        return run(floats), pull_back(jnp.ones_like(out))[0]

    (value, gradients), (wanted, wanted_gradients) = jit(lambda: results(one))(), jit(lambda: results(two))()
    np.testing.assert_allclose(np.float32(value), np.float32(wanted), atol=0.05)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, wanted_gradients[name])


def test_reruns_are_bitwise_equal():
    floats = floats_of(np.random.default_rng(4), (37,), 1030, 33)
    run = jit(lambda f: jaxft.dense_residual_layer_norm(**f, implementation="triton"))
    np.testing.assert_array_equal(run(floats), run(floats))


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_lowers(dtype):
    def of(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    vector = of(768, dtype=jnp.float32)
    for rows, depth, kernels in ((128, 3072, 2), (256, 768, 2), (4, 100, 2)):
        arguments = of(rows, depth), of(depth, 768), vector, of(rows, 768), vector, vector
        for run in (
            jaxft.dense_residual_layer_norm,
            lambda *a: jax.grad(lambda *a: jaxft.dense_residual_layer_norm(*a).astype(jnp.float32).sum(), range(6))(*a),
        ):
            text = lower(run, *arguments)
            if dtype != jnp.float32 and run is jaxft.dense_residual_layer_norm:
                assert text.count("xla.gpu.triton") == kernels


@pytest.mark.parametrize(
    ("rows", "depth", "dtype", "precision", "kernels"),
    [(512, 3072, "float32", None, 0), (513, 768, "float32", None, 1), (128, 768, "float32", "highest", 1),
     (512, 3072, "bfloat16", None, 0), (256, 3072, "bfloat16", None, 2), (520, 1536, "bfloat16", None, 1),
     *slow_cases((128, 768, "float32", None, 0), (128, 3072, "bfloat16", None, 2), (512, 768, "bfloat16", None, 2),
                 (513, 1536, "bfloat16", None, 2))],
)  # fmt: skip
def test_few_rows_take_xla(rows, depth, dtype, precision, kernels):
    """XLA splits the depth, and its LayerNorm adds up the parts. Gradients use jaxft's LayerNorm."""
    arrays = [of(shape, dtype) for shape in ((rows, depth), (depth, 768), (768,), (rows, 768), (768,), (768,))]

    def run(*a):
        return jaxft.dense_residual_layer_norm(*a)

    def gradients(*a):
        return jax.value_and_grad(lambda *a: run(*a).sum(), range(6))(*a)

    with jax.default_matmul_precision(precision):
        assert operations(lower(run, *arrays))[TRITON] == kernels
        assert operations(lower(gradients, *arrays))[TRITON] >= 2
        named = operations(lower(functools.partial(jaxft.dense_residual_layer_norm, implementation="triton"), *arrays))
        assert named[TRITON] > 0


@pytest.mark.parametrize("entry", [("dense_split", "splits", 4), ("dense_implementation", "implementation", "triton")])
def test_tuned_entries_override_xla(entry):
    op, field, value = entry
    sizes = {"rows": 128, "depth": 768, "width": 768} | ({"activation": 1} if op == "dense_implementation" else {})
    config = dataclasses.replace(
        tuning_dense.DenseChoice("xla")
        if op == "dense_implementation"
        else tuning_dense.SplitConfig(*[64] * 3, 4, 3, 1),
        **{field: value},
    )
    arrays = [of(shape) for shape in ((128, 768), (768, 768), (768,), (128, 768), (768,), (768,))]
    with (
        jax.default_matmul_precision(None),
        tuning_table.trial(tuning_table.Trial({(op, tuning_table.key(**sizes, itemsize=4)): config})),
    ):
        assert operations(lower(jaxft.dense_residual_layer_norm, *arrays))[TRITON] == 2


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_xla_path_matches_the_oracle(rate, key):
    floats = floats_of(np.random.default_rng(5), (37,), 96, 40, jnp.float32)
    options = {"epsilon": 1e-3, "dropout_rate": rate, "dropout_rng": key if rate else None, "return_sum": True}
    keep = np.asarray(dropout_mask(key, rate, (37, 40))) if rate else None
    with dispatch.target(), jax.default_matmul_precision(None):  # no kernel, so that a CPU can run it
        got = jax.jit(lambda f: jaxft.dense_residual_layer_norm(**f, **options))(floats)
        wanted = jax.jit(lambda f: reference.dense_residual_layer_norm(**f, **options))(floats)
    y = oracle.dense(floats.pop("x"), floats.pop("kernel"))
    exact = oracle.bias_residual_layer_norm(y, **floats, epsilon=1e-3, keep=keep, rate=rate, return_sum=True)
    assert_matches_oracle(got, wanted, exact)


def test_split_k_is_for_few_rows():
    """With few 16-bit rows, an unsplit matmul would leave most of a card idle."""
    with dispatch.target("NVIDIA H100 80GB HBM3"):
        assert [splits(128, 768, 768), splits(128, 3072, 768), splits(256, 768, 768)] == [3, 4, 2]
    assert splits(512, 3072, 768) == splits(128, 768, 3072) == splits(128, 200, 768) == splits(128, 3072, 768, 4) == 1
    assert dispatch.platform() != "cuda" or splits(1, 4096, 16) == 4


X, KERNEL = np.ones((2, 8), np.float32), np.ones((8, 4), np.float32)
GOOD = {"x": X, "kernel": KERNEL, "bias": KERNEL[0], "residual": X[:, :4], "gamma": None, "beta": None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": X[:, :3]}, ValueError, "x and kernel must have shapes [..., K] and [K, F], got (2, 3) and (8, 4)"),
        ({"x": X.astype(np.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"kernel": KERNEL.astype(np.float16)}, TypeError, "kernel must have the dtype of x, float32, got float16"),
        ({"residual": X}, ValueError, "residual must have shape (2, 4), got (2, 8)"),
        ({"residual": KERNEL[:2].astype(np.float16)}, TypeError, "residual must have the dtype of x, float32, got"),
        ({"bias": np.ones(8, np.float32)}, ValueError, "bias must have shape (4,), got (8,)"),
        ({"gamma": [1.0] * 4}, TypeError, "gamma must be an array, got list"),
        ({"return_sum": 1}, TypeError, "return_sum must be True or False, got int"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be positive, got 0.0"),
        ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be in [0, 1), got 1.0"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate is 0.1, so dropout_rng must be a JAX random key, got None"),
        ({"precision": "nonsense"}, ValueError, "precision must be one that jnp.matmul takes, got 'nonsense'"),
        ({"precision": {}}, ValueError, "precision must be one that jnp.matmul takes, got {}"),
        ({"implementation": "cutlass"}, ValueError, "implementation must be None or one of"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, ""),
    ],
    ids=str,
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=re.escape(f"dense_residual_layer_norm: {message}") if message else "mosaic_gpu"):
        jaxft.dense_residual_layer_norm(**{**GOOD, **changes})
