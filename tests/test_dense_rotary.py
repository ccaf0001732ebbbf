"""dense_rotary: the op, and the Mosaic GPU matmul that rotates in its epilogue.

The kernel runs compiled on a Hopper GPU, and on a CPU in Mosaic's interpreter.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import ONE_DTYPE, check, jit, lower, normal, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import dense, support
from jaxft.tuning.dense import MosaicDenseConfig
from lowered import TRITON, operations
from test_dense_mosaic import DTYPES, SPLITS, assert_no_races, finds_races, interpreted, of, run, runs

MOSAIC = "@mosaic_gpu_v2"
CONFIGS = SPLITS | {"64x192": MosaicDenseConfig(64, 192, stages=2, split="none", programs=2)}  # one tile of q, k and v


def floats_of(rng, dtype, *tokens, depth, heads, size, bias=None):
    width = 3 * heads * size
    floats = normal(rng, dtype, x=(*tokens, depth), kernel=(depth, width))
    floats["kernel"] /= 8
    return floats | {"bias": None if bias is None else normal(rng, bias, bias=(width,))["bias"]}


def ints(*shape, most=3000):
    return np.random.default_rng(7).integers(0, most, shape, dtype=np.int32)


def check_op(floats, implementations, **options):
    floats, options = {n: x for n, x in floats.items() if x is not None}, {"bias": None} | options

    def bind(op, **more):
        return lambda **f: op(**{**options, **f}, **more)

    check(lambda implementation, **f: bind(jaxft.dense_rotary, implementation=implementation)(**f),
          bind(reference.dense_rotary), bind(oracle.dense_rotary), floats,
          implementations=implementations)  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(
    ("tokens", "positions", "bias"),
    [((2, 5), np.arange(5, dtype=np.int32), jnp.float32), ((7,), ints(7), None),
     *slow_cases(((2, 5), ints(2, 5), jnp.float16), ((), ints(), None), ((3, 1, 4), ints(1, 4), jnp.float32))],
    ids=str,
)  # fmt: skip
def test_two_ops(tokens, positions, bias, dtype):
    floats = floats_of(np.random.default_rng(0), dtype, *tokens, depth=9, heads=2, size=6, bias=bias)
    options = {"num_heads": 2, "theta": 160000.0, "frequency_scale": 0.7, "positions": positions}
    check_op(floats, ("triton", "xla"), **options)


@runs
@pytest.mark.parametrize("dtype", [DTYPES[1], *slow(DTYPES[0])])
@pytest.mark.parametrize("bias", [None, jnp.float32])
@pytest.mark.parametrize(
    ("config", "rows", "heads", "positions"),
    [("128x128", 196, 2, ints(196)), ("64x192", 256, 1, ints(64)),
     *slow_cases(("m", 256, 1, ints(128)), ("none", 200, 3, ints(200)), ("n", 130, 2, ints(130)),
                 ("cluster", 384, 2, ints(192)), ("none, cluster", 384, 1, ints(64)), ("128x128", 640, 3, ints(320)))],
    ids=lambda x: str(getattr(x, "shape", x)),
)  # fmt: skip
def test_matmul_rotates(config, rows, heads, positions, bias, dtype):
    """A tile may begin anywhere in queries, keys and values. Each row has a position, or the positions repeat."""
    floats = floats_of(np.random.default_rng(1), dtype, rows, depth=80, heads=heads, size=64, bias=bias)
    assert support.dense_unsupported(**floats, head_size=64) is None
    options = {"positions": np.resize(positions, rows), "num_heads": heads}
    angles = positions[:, None].astype(np.float32) * reference.rotary_frequencies(64, 10000.0, 1.0, np.float32)
    angles = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)
    (got,) = run(**floats, activation=None, config=CONFIGS[config], angles=angles)
    plain = jit(functools.partial(reference.dense_rotary, **options))(**floats)
    assert_matches_oracle(got.reshape(plain.shape), plain, oracle.dense_rotary(**floats, **options))


def test_rows_of_angles_are_padded_to_multiples_of_8():
    """The angles of all rows are padded. Angles that repeat are not."""
    config = MosaicDenseConfig(64, 64, programs=132)
    rotate = functools.partial(dense.forward, bias=None, activation=None, config=config)
    for rows, positions, pads in ((96, 96, 0), (100, 100, 2), (100, 64, 1)):
        arrays = of((rows, 64)), of((64, 192)), of((positions, 64), jnp.float32)
        assert lower(lambda x, k, a: rotate(x, k, angles=a), *arrays).count("stablehlo.pad") == pads


@runs
def test_values_keep_their_bits():
    """NaN and infinity stay in their element of a value, and in their pair of a key."""
    (rows, depth), size = (128, 64), 64
    x, kernel = jnp.eye(rows, depth, dtype=jnp.bfloat16), normal(np.random.default_rng(2), jnp.bfloat16, k=(depth, 192))
    kernel = kernel["k"]
    angles = jnp.concatenate([jnp.cos(ints(rows, 32)), jnp.sin(ints(rows, 32))], axis=1, dtype=jnp.float32)
    rotate = functools.partial(run, activation=None, config=SPLITS["m"], angles=angles)
    bias = jnp.zeros(192).at[2 * size + 1].set(jnp.inf).at[2 * size + 40].set(jnp.nan).at[size + 3].set(jnp.inf)
    (clean,), (got,) = rotate(x, kernel, jnp.zeros(192)), rotate(x, kernel, bias)
    np.testing.assert_array_equal(clean[:depth, 2 * size :], kernel[:, 2 * size :])
    changed = np.isin(np.arange(192), [2 * size + 1, 2 * size + 40, size + 3, size + 35])
    np.testing.assert_array_equal(got[:, ~changed], clean[:, ~changed])
    assert not np.isfinite(np.asarray(got, np.float32)[:, changed]).any()


@runs
@pytest.mark.parametrize(
    ("tokens", "positions", "bias"),
    [((2, 96), np.arange(96, dtype=np.int32), jnp.float32),
     *slow_cases(((2, 64), ints(64), None), ((137,), ints(137), None))],
    ids=lambda x: str(getattr(x, "shape", x)),
)  # fmt: skip
def test_op_runs_the_kernel(tokens, positions, bias):
    """Values and gradients of the op are right, for padded and for packed tokens."""
    floats = floats_of(np.random.default_rng(3), jnp.bfloat16, *tokens, depth=64, heads=2, size=64, bias=bias)
    with interpreted():
        check_op(floats, ("mosaic_gpu",), positions=positions, num_heads=2, theta=500.0, frequency_scale=0.5)


def call(x, kernel, bias, positions, **options):
    options = {"num_heads": kernel.shape[1] // 192} | options
    return jaxft.dense_rotary(x, kernel, bias, positions, **options)


def gradients_of_sum(x, kernel, bias, positions):
    def loss(*floats):
        return jnp.sum(call(*floats, positions).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, bias)


@pytest.mark.parametrize(
    ("tokens", "positions", "depth", "heads"),
    [((32, 512), (512,), 768, 12), ((9400,), (9400,), 768, 12),
     *slow_cases(((32, 128), (128,), 1024, 16), ((2, 8192), (2, 8192), 768, 12), ((8, 100), (100,), 768, 12))],
    ids=str,
)  # fmt: skip
def test_one_kernel(tokens, positions, depth, heads):
    """The forward pass is one kernel. The gradient has two, a rotation in place and the sum for the bias."""
    width = 192 * heads
    arrays = of((*tokens, depth)), of((depth, width)), of((width,), jnp.float32), of(positions, jnp.int32)
    with jax.default_matmul_precision(None):
        text = lower(call, *arrays)
        assert text.count(MOSAIC) == 1 and operations(text)[TRITON] == 0
        gradients = lower(gradients_of_sum, *arrays)
    assert gradients.count(MOSAIC) == 0 and operations(gradients)[TRITON] == 2
    assert operations(gradients)["dot_general"] == 2


@pytest.mark.parametrize(
    ("rows", "depth", "width", "heads", "dtype", "reason"),
    [
        (128, 768, 2304, 12, jnp.bfloat16, "slower at this size"),
        (4100, 768, 2304, 12, jnp.bfloat16, "slower at this size"),
        (4096, 768, 2304, 6, jnp.bfloat16, "the head size is 128, the kernel rotates heads of 64"),
        (4096, 768, 2304, 12, jnp.float32, "it has no rotation in float32"),
        (4096, 776, 2304, 12, jnp.bfloat16, "K is 776"),
    ],
)
def test_other_cases_run_as_two_ops(rows, depth, width, heads, dtype, reason):
    arrays = of((rows, depth), dtype), of((depth, width), dtype), of((width,)), of((rows,), jnp.int32)
    op = functools.partial(call, num_heads=heads)
    with dispatch.target(), jax.default_matmul_precision(None):
        (record,) = jaxft.explain(op, *arrays)
        assert record.forward.backend == "ops" and f"mosaic_gpu: {reason}" in record.why
        if "slower" not in reason:
            message = re.escape(f"dense_rotary: implementation 'mosaic_gpu' cannot be used: {reason}")
            with pytest.raises(NotImplementedError, match=message):
                jax.eval_shape(functools.partial(op, implementation="mosaic_gpu"), *arrays)


def test_transformations_lower():
    """Second derivatives, `vmap` with a shared kernel, and `shard_map` run the Mosaic GPU kernel."""
    arrays = of((4, 512, 256)), of((256, 768)), of((768,), jnp.float32), of((512,), jnp.int32)
    op = functools.partial(call, implementation="mosaic_gpu")

    def loss(x, kernel, bias, positions):
        return jnp.sum(op(x, kernel, bias, positions).astype(jnp.float32) ** 2)

    def second(x, *others):
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, *others).astype(jnp.float32) ** 2))(x)

    assert MOSAIC in lower(second, *arrays)
    assert MOSAIC in lower(jax.vmap(op, in_axes=(0, None, None, None)), *arrays)
    rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), "x"), in_specs=(rows, whole, whole, whole), out_specs=whole
    )
    assert MOSAIC in lower(jax.grad(sharded, argnums=(0, 1)), *arrays)
    with jax.enable_x64(True):
        assert MOSAIC in lower(op, *arrays[:3], of((512,), jnp.int64))


@finds_races
@pytest.mark.parametrize("config", ["128x128", *slow("m", "none", "cluster")])
def test_kernel_has_no_races(config):
    floats = floats_of(np.random.default_rng(4), jnp.bfloat16, 264, depth=64, heads=2, size=64, bias=jnp.float32)
    angles = jnp.ones((264, 64))
    assert_no_races(functools.partial(dense.forward, **floats, activation=None, config=SPLITS[config], angles=angles))


X, KERNEL, P = jnp.ones((2, 5, 4)), jnp.ones((4, 24)), jnp.arange(5)
GOOD = {"x": X, "kernel": KERNEL, "bias": None, "positions": P, "num_heads": 2}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kernel": KERNEL[:3]}, ValueError, "kernel"),
        ({"kernel": KERNEL[:, :18]}, ValueError,
         "the last axis of kernel must be a multiple of 6 * num_heads = 12 (queries, keys and values with an even head "
         "size), got (4, 18)"),
        ({"bias": jnp.ones(23)}, ValueError, "bias must have shape (24,), got (23,)"),
        ({"num_heads": 0}, ValueError, "num_heads"),
        ({"num_heads": 2.0}, ValueError, "num_heads"),
        ({"positions": P[:4]}, ValueError, "positions must broadcast to (2, 5), got shape (4,)"),
        ({"positions": P.astype(float)}, TypeError, "positions must be an array of integers, got float32"),
        ({"theta": -1.0}, ValueError, "theta must be positive, got -1.0"),
        ({"frequency_scale": 0}, ValueError, "frequency_scale must be positive, got 0"),
        ({"implementation": "cuda"}, ValueError, "implementation"),
        ({"implementation": "cudnn"}, NotImplementedError, "there is no 'cudnn' implementation"),
    ],
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=f"dense_rotary: .*{re.escape(message)}"):
        jaxft.dense_rotary(**GOOD | changes)


@pytest.mark.parametrize("implementation", ["triton", "xla", None])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty(shape, implementation):
    x, kernel = jnp.ones(shape), jnp.ones((shape[1], 24))
    y = jaxft.dense_rotary(x, kernel, None, jnp.arange(shape[0]), num_heads=2, implementation=implementation)
    assert y.shape == (shape[0], 3, 2, 4) and not y.any()
