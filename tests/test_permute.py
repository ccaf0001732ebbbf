"""permute, merge_heads and qkv_bias_split_heads."""

import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, jit, lower, normal, power_of_two, seeds, slow, slow_cases, some
from checked import checked
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.kernels.triton import permute as triton
from jaxft.tuning import layouts as tuning_layouts
from jaxft.tuning.table import ElementwiseConfig, GradientConfig, PermuteConfig

BOTH = pytest.mark.parametrize("implementation", ["triton", "xla"])


def check_op(name, floats, *arguments, seed=None):
    """Checks an op. Arguments after the floats are positional."""

    def call(op, **more):
        return lambda x, bias=None: op(x, *([bias] if name == "qkv_bias_split_heads" else []), *arguments, **more)

    check(lambda implementation, **f: call(getattr(jaxft, name), implementation=implementation)(**f),
          call(getattr(reference, name)), call(getattr(oracle, name)), floats, implementations=["triton", "xla"],
          seed=seed)  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), *slow((1, 1, 1, 1))], ids=str)
def test_split_and_merge_heads(shape, dtype):
    """The shapes are [B, T, N, H]. The bias is float32, whatever the dtype of the projection."""
    b, t, n, h = shape
    rng = np.random.default_rng(0)
    floats = normal(rng, dtype, x=(b, t, 3 * n * h)) | normal(rng, jnp.float32, bias=(3 * n * h,))
    check_op("qkv_bias_split_heads", floats, n)
    check_op("merge_heads", normal(rng, dtype, x=(b, n, t, h)))


def assert_moves(x, axes, y):
    """Asserts that `y` holds the bits of `x` in their new places."""
    expected = np.transpose(np.asarray(x), axes)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    got, wanted = (np.ascontiguousarray(a).ravel().view(np.uint8) for a in (y, expected))
    np.testing.assert_array_equal(got, wanted)


def random_bits(rng, dtype, shape):
    """Returns random bit patterns, NaN included."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.random(shape) < 0.5
    if dtype == jnp.bfloat16 and INTERPRET:  # a CPU converts to float32, which changes NaNs and subnormal numbers
        return rng.standard_normal(shape).astype(dtype)
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


@pytest.mark.parametrize("vector", [DTYPES[0], *slow(*DTYPES[1:])])
def test_dtypes_of_the_bias(vector):
    rng = np.random.default_rng(1)
    floats = normal(rng, jnp.float16, x=(2, 5, 36)) | normal(rng, vector, bias=(36,))
    check_op("qkv_bias_split_heads", floats, 4)


def test_without_bias():
    check_op("qkv_bias_split_heads", normal(np.random.default_rng(1), jnp.float32, x=(2, 5, 36)), 4)


@BOTH
@pytest.mark.parametrize("used", range(3))
def test_gradients_of_one_part(used, implementation):
    """Parts that nothing uses have no gradient."""

    def f(qkv, bias):
        return jnp.sum(jaxft.qkv_bias_split_heads(qkv, bias, 2, implementation=implementation)[used])

    dqkv, dbias = jit(jax.grad(f, (0, 1)))(jnp.ones((2, 5, 24)), jnp.ones((24,)))
    expected = np.repeat(np.arange(3) == used, 8).astype(np.float32)
    np.testing.assert_array_equal(dqkv, np.broadcast_to(expected, (2, 5, 24)))
    np.testing.assert_array_equal(dbias, 10 * expected)


@pytest.mark.parametrize("with_bias", [True, False])
def test_second_derivatives_of_splitting(with_bias):
    """The backward pass has gradients of all its results."""
    rng = np.random.default_rng(10)
    floats = normal(rng, jnp.float32, qkv=(2, 3, 12), bias=(12,) if with_bias else None)

    def second(implementation):
        def f(floats):
            q, k, v = jaxft.qkv_bias_split_heads(floats["qkv"], floats.get("bias"), 2, implementation=implementation)
            return jnp.sum(q * k * v)

        return jit(jax.grad(lambda x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(x)))))(floats)

    chex.assert_trees_all_close(second("triton"), second("xla"), rtol=1e-4, atol=1e-5)


@BOTH
def test_reruns_are_bitwise_equal(implementation):
    floats = normal(np.random.default_rng(11), jnp.bfloat16, qkv=(3, 37, 72), bias=(72,))

    @jit
    def run(floats):
        def split(qkv, bias):
            return jaxft.qkv_bias_split_heads(qkv, bias, 3, implementation=implementation)

        out, pull_back = jax.vjp(lambda f: split(**f), floats)
        return out, pull_back(out), [jaxft.merge_heads(part, implementation=implementation) for part in out]

    chex.assert_trees_all_equal(run(floats), run(floats))


@BOTH
def test_merging_undoes_splitting(implementation):
    qkv = normal(np.random.default_rng(2), jnp.float32, qkv=(2, 5, 36))["qkv"]
    parts = [
        jaxft.merge_heads(part, implementation=implementation)
        for part in jaxft.qkv_bias_split_heads(qkv, None, 4, implementation=implementation)
    ]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=-1), qkv)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((), ()), ((5,), (0,)), ((3, 7), (1, 0)), ((2, 3, 5), (2, 0, 1)), ((2, 3, 1, 5, 2, 3), (5, 1, 3, 0, 4, 2))],
    ids=str,
)
def test_permute(shape, axes):
    floats = normal(np.random.default_rng(3), jnp.float32, x=shape)
    check_op("permute", floats, axes)
    for implementation in ("triton", "xla", None):
        y = jaxft.permute(floats["x"], [a - len(axes) for a in axes], implementation=implementation)
        assert_moves(floats["x"], axes, y)


DTYPES_64 = ["int64", "uint64", "float64"]
DTYPES_TO_MOVE = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32",
                  "float8_e4m3fn", "float8_e5m2", "complex64", *DTYPES_64]  # fmt: skip
SOME_TO_MOVE = ["bool", "int16", "bfloat16", "complex64"]


@BOTH
@pytest.mark.parametrize("dtype", [*SOME_TO_MOVE, *slow(*(d for d in DTYPES_TO_MOVE if d not in SOME_TO_MOVE))])
def test_permute_of_any_dtype(dtype, implementation):
    rng = np.random.default_rng(4)
    with jax.enable_x64(dtype in DTYPES_64):
        for shape, axes in (((3, 1, 37, 5), (2, 0, 1, 3)), ((33, 70), (1, 0)), ((2, 3), (0, 1))):
            x = random_bits(rng, dtype, shape)
            assert_moves(x, axes, jaxft.permute(jnp.asarray(x), axes, implementation=implementation))


FOUR_AXES = [*itertools.permutations(range(4))]


@BOTH
@pytest.mark.parametrize(
    "axes", [*FOUR_AXES[2::6], *slow(*(axes for n, axes in enumerate(FOUR_AXES) if n % 6 != 2))], ids=str
)
def test_every_permutation_of_four_axes(axes, implementation):
    rng = np.random.default_rng(5)
    for shape in ((3, 7, 1, 5), (5, 2, 11, 3)):
        x = random_bits(rng, "float32", shape)
        assert_moves(x, axes, jaxft.permute(x, axes, implementation=implementation))


@pytest.mark.parametrize("implementation", ["triton", *slow("xla")])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((127, 131), (1, 0)), ((131, 127), (1, 0)), ((1, 129), (1, 0)), ((2, 33, 65), (2, 1, 0)), ((500, 3), (1, 0)),
     ((3, 500), (1, 0)), ((70, 3, 5), (0, 2, 1)), ((2, 40, 3, 64), (0, 2, 1, 3)), ((3, 2, 1100), (1, 0, 2)),
     ((7, 33, 2), (1, 0, 2)), ((3, 9, 5, 3), (2, 1, 0, 3)),
     ((2,) * 10, (9, 0, 8, 1, 7, 2, 6, 3, 5, 4))],
    ids=str,
)  # fmt: skip
def test_shapes_need_not_divide_blocks(shape, axes, implementation):
    x = random_bits(np.random.default_rng(6), "float16", shape)
    assert_moves(x, axes, jaxft.permute(x, axes, implementation=implementation))


@BOTH
def test_integers_have_no_gradient(implementation):
    """Floats beside them keep their gradients."""

    def f(x, order):
        return jnp.sum(x * jaxft.permute(order, (1, 0), implementation=implementation).astype(x.dtype))

    order = np.arange(15, dtype=np.int32).reshape(3, 5)
    np.testing.assert_array_equal(jit(jax.grad(f))(np.ones((5, 3), np.float32), order), order.T)
    _, pull_back = jax.vjp(lambda x: jaxft.permute(x, (1, 0), implementation=implementation), order)
    (gradient,) = pull_back(np.zeros((5, 3), jax.dtypes.float0))
    assert gradient.dtype == jax.dtypes.float0 and gradient.shape == (3, 5)


@BOTH
def test_second_derivatives(implementation):
    def f(x):
        return jnp.sum(jaxft.permute(x, (2, 0, 1), implementation=implementation) ** 3)

    x = normal(np.random.default_rng(7), jnp.float32, x=(2, 3, 5))["x"]
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(x), 6 * x, rtol=1e-6)


@BOTH
def test_empty(implementation):
    named = {"implementation": implementation}
    assert jaxft.permute(jnp.ones((0, 3, 2)), (2, 1, 0), **named).shape == (2, 3, 0)
    assert jaxft.merge_heads(jnp.ones((2, 3, 0, 4)), **named).shape == (2, 0, 12)
    qkv = jnp.ones((0, 5, 24), jnp.bfloat16)
    q, k, v = jaxft.qkv_bias_split_heads(qkv, jnp.ones((24,)), 2, **named)
    assert {(x.shape, x.dtype) for x in (q, k, v)} == {((0, 2, 5, 4), qkv.dtype)}


@BOTH
def test_special_values_move_as_they_are(implementation):
    x = np.array([[np.nan, np.inf], [-np.inf, -0.0]], np.float32)
    assert_moves(x, (1, 0), jit(lambda x: jaxft.permute(x, (1, 0), implementation=implementation))(x))


# --- The kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((), (), ((), ())),
        ((1, 1), (1, 0), ((), ())),
        ((2, 3, 5), (0, 1, 2), ((30,), (0,))),
        ((2, 1, 3), (1, 0, 2), ((6,), (0,))),
        ((5, 1), (1, 0), ((5,), (0,))),
        ((2, 3, 5), (1, 2, 0), ((2, 15), (1, 0))),
        ((2, 3, 5), (2, 0, 1), ((6, 5), (1, 0))),
        ((2, 3, 5), (2, 1, 0), ((2, 3, 5), (2, 1, 0))),
        ((32, 512, 12, 64), (0, 2, 1, 3), ((32, 512, 12, 64), (0, 2, 1, 3))),
        ((2, 1, 3, 4, 1, 5), (0, 5, 1, 2, 3, 4), ((2, 12, 5), (0, 2, 1))),
        ((2, 3, 1, 5, 2, 3), (4, 5, 2, 3, 0, 1), ((6, 5, 6), (2, 1, 0))),
    ],
    ids=str,
)
def test_reduce(shape, axes, expected):
    assert triton.reduce(shape, axes) == expected


@pytest.mark.parametrize("seed", seeds(20))
def test_reduce_random(seed):
    """The reduced permutation moves the same elements and cannot be reduced further."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3], rng.integers(0, 9)))
    axes = tuple(int(a) for a in rng.permutation(len(shape)))
    reduced, order = triton.reduce(shape, axes)
    x = np.arange(math.prod(shape))
    np.testing.assert_array_equal(x.reshape(reduced).transpose(order).ravel(), x.reshape(shape).transpose(axes).ravel())
    assert triton.reduce(reduced, order) == (reduced, order)
    assert 1 not in reduced and all(b != a + 1 for a, b in itertools.pairwise(order))


@pytest.mark.parametrize(
    ("shape", "axes", "itemsize", "blocks"),
    [
        ((8192, 8192), (1, 0), 2, (64, 64)),
        ((256, 512, 1024), (2, 1, 0), 2, (64, 1, 64)),
        ((32, 512, 12, 64), (0, 2, 1, 3), 2, (1, 64, 1, 64)),  # rows move as they are
        ((32, 12, 512, 64), (0, 2, 1, 3), 2, (1, 1, 64, 64)),
        ((1000, 3, 5000), (1, 0, 2), 4, (2, 1, 2048)),
        ((100000, 7, 5), (0, 2, 1), 2, (64, 8, 8)),  # short axes
        ((800, 1200, 2), (1, 0, 2), 2, (64, 32, 2)),  # a short one that stays
        ((3, 100000), (1, 0), 2, (4, 256)),  # a small array
    ],
    ids=str,
)
def test_tiles(shape, axes, itemsize, blocks):
    """Tiles have whole lines on both sides, and programs are not small."""
    kept = shape[-1] if axes[-1] == len(shape) - 1 else 1
    device = dispatch.Device("cuda", "a device that nobody tuned for", (8, 0))
    config = tuning_layouts.permute(math.prod(shape), kept, 1, itemsize, device)
    assert triton.tile(shape, axes, config) == blocks


def test_identity_launches_nothing(monkeypatch):
    monkeypatch.setattr(triton, "forward", None)
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 1, 3)
    assert_moves(x, (1, 2, 3, 0), jaxft.permute(x, (1, 2, 3, 0), implementation="triton"))
    with pytest.raises(TypeError, match="NoneType"):
        jaxft.permute(x, (3, 1, 0, 2), implementation="triton")


CONFIGS = [
    *(PermuteConfig(*sizes) for sizes in ((2, 4, 1), (16, 1024, 4))),
    *slow(PermuteConfig(8, 64, 2), PermuteConfig(64, 4096, 8)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((67, 35), (1, 0)), ((3, 5, 7, 6), (3, 1, 2, 0)), ((4, 6, 5, 9), (0, 2, 1, 3)), ((2, 1, 3, 2), (3, 2, 1, 0)),
     ((9, 7, 3), (1, 0, 2)), ((2,) * 6, (5, 0, 4, 1, 3, 2))],
    ids=str,
)  # fmt: skip
def test_configs(shape, axes, config):
    blocks = triton.tile(shape, axes, config)
    assert all(b & (b - 1) == 0 for b in blocks) and math.prod(blocks) <= config.elements
    x = random_bits(np.random.default_rng(8), "int16", shape)
    assert_moves(x, axes, jit(lambda x: triton.forward(x, axes, config=config, interpret=INTERPRET))(x))


@pytest.mark.parametrize("sizes", [(1, 8, 1), (4, 2, 1), (16, 8, 4)], ids=str)
@pytest.mark.parametrize("with_bias", [True, *slow(False)])
def test_split_configs(sizes, with_bias):
    rng = np.random.default_rng(9)
    floats = normal(rng, jnp.bfloat16, qkv=(2, 9, 3 * 3 * 5)) | normal(rng, jnp.float32, bias=(45,))
    arguments = {"qkv": floats["qkv"], "bias": floats["bias"] if with_bias else None, "num_heads": 3}
    got = triton.split_heads(**arguments, config=ElementwiseConfig(*sizes), interpret=INTERPRET)
    plain = jit(lambda qkv, bias: reference.qkv_bias_split_heads(qkv, bias, 3))
    expected = plain(arguments["qkv"], arguments["bias"])
    exact = oracle.qkv_bias_split_heads(**arguments)
    assert_matches_oracle(tuple(got), expected, exact)


JOIN_CONFIGS = [GradientConfig(4, 2, 3, 1), *slow(GradientConfig(1, 8, 1, 1), GradientConfig(8, 4, 100, 4))]


@pytest.mark.parametrize("config", JOIN_CONFIGS, ids=str)
def test_join_configs(config):
    """There are more programs than blocks of rows, fewer, and one."""
    parts = list(normal(np.random.default_rng(12), jnp.bfloat16, **dict.fromkeys("qkv", (2, 3, 9, 5))).values())
    qkv = jnp.transpose(jnp.stack(parts), (1, 3, 0, 2, 4)).reshape(2, 9, 45)
    got, sums = triton.join_heads(parts, with_sums=True, config=config, interpret=INTERPRET)
    np.testing.assert_array_equal(got, qkv)
    assert sums.dtype == jnp.float32 and len(sums) <= min(config.programs, 2 * 9)
    np.testing.assert_allclose(np.sum(sums, 0), np.asarray(qkv, np.float32).sum((0, 1)), atol=1e-5)
    (alone,) = triton.join_heads(parts, with_sums=False, config=config, interpret=INTERPRET)
    np.testing.assert_array_equal(alone, qkv)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((16, 8), (1, 0)), ((3, 5, 2, 7), (2, 0, 3, 1)), *slow_cases(((9, 13), (1, 0)), ((5, 3, 9), (1, 0, 2)))], ids=str,
)  # fmt: skip
def test_permute_stays_within_its_arrays(shape, axes):
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for config in (PermuteConfig(8, 64, 1), PermuteConfig(4, 32, 1), PermuteConfig(16, 16, 1)):
        with checked():
            y = triton.forward(jnp.asarray(x), axes, config=config, interpret=True)
        np.testing.assert_array_equal(y, x.transpose(axes))


@pytest.mark.parametrize("sizes", [(4, 8, 1), (2, 2, 1)], ids=str)
def test_split_heads_stays_within_its_arrays(sizes):
    qkv, bias = np.arange(2 * 5 * 18, dtype=np.float32).reshape(2, 5, 18), np.arange(18, dtype=np.float32)
    with checked():
        got = triton.split_heads(
            jnp.asarray(qkv), jnp.asarray(bias), 2, config=ElementwiseConfig(*sizes), interpret=True
        )
    np.testing.assert_array_equal(got, reference.qkv_bias_split_heads(qkv, bias, 2))


@pytest.mark.parametrize("config", JOIN_CONFIGS, ids=str)
def test_join_heads_stays_within_its_arrays(config):
    parts = np.arange(3 * 2 * 2 * 5 * 3, dtype=np.float32).reshape(3, 2, 2, 5, 3)
    with checked():
        qkv, sums = triton.join_heads([*map(jnp.asarray, parts)], with_sums=True, config=config, interpret=True)
    np.testing.assert_array_equal(reference.qkv_bias_split_heads(qkv, None, 2), parts)
    np.testing.assert_array_equal(np.sum(sums, 0), np.sum(qkv, (0, 1)))


def unsupported(op, x, *arguments):
    """Returns why the kernel cannot move an array of this shape and dtype, which need not exist."""
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(lambda x: getattr(jaxft, op)(x, *arguments, implementation="triton"), x)
    return str(error.value)


def test_kernels_refuse_unsupported_arrays():
    of, prefix = jax.ShapeDtypeStruct, "implementation 'triton' cannot be used:"
    size = 2**31 + 2**16
    for dtype in ("int8", "float16", "float32"):
        message = f"{prefix} x has {size} elements, the kernel takes at most {2**31}"
        assert unsupported("permute", of((2**15 + 1, 2**16), dtype), (1, 0)) == f"permute: {message}"
        assert unsupported("merge_heads", of((2**15 + 1, 2, 2**14, 2), dtype)) == f"merge_heads: {message}"
    large = of((2**15 + 1, 2**10, 192), "bfloat16")
    message = f"{prefix} qkv has {math.prod(large.shape)} elements, the kernel takes at most {2**31}"
    assert unsupported("qkv_bias_split_heads", large, None, 1) == f"qkv_bias_split_heads: {message}"
    with jax.enable_x64(True):
        for dtype in ("complex128", "int4", "uint4", "float4_e2m1fn"):
            message = f"permute: {prefix} x is {dtype}, the kernel takes types of 1, 2, 4 or 8 bytes"
            assert unsupported("permute", of((2, 3), dtype), (1, 0)) == message
        assert "qkv is float64" in unsupported("qkv_bias_split_heads", of((2, 3, 6), "float64"), None, 1)
    keys = jax.random.split(jax.random.key(0), (2, 3))
    assert "x is key<" in unsupported("permute", keys, (1, 0))
    assert jaxft.permute(keys, (1, 0)).shape == (3, 2)


def test_xla_takes_over_beyond_the_limit(caplog):
    """Unsupported arrays launch nothing, named or automatic."""
    of = jax.ShapeDtypeStruct
    dispatch.log_once.cache_clear()
    for op, x, arguments in (
        ("permute", of((2**15 + 1, 2**16), "int8"), ((1, 0),)),
        ("merge_heads", of((2**15 + 1, 2, 2**14, 2), "float32"), ()),
        ("qkv_bias_split_heads", of((2**15 + 1, 2**10, 192), "bfloat16"), (None, 1)),
    ):
        text = lower(lambda x, op=op, arguments=arguments: getattr(jaxft, op)(x, *arguments), x)
        assert "gpu.triton" not in text and "stablehlo.transpose" in text
        argument = "qkv" if op == "qkv_bias_split_heads" else "x"
        (message,) = [message for message in caplog.messages if message.startswith(f"{op} falls back to XLA")]
        assert f"{argument} has {math.prod(x.shape)} elements, the kernel takes at most {2**31}" in message
    dispatch.log_once.cache_clear()


def test_largest_supported_size_lowers():
    """The array has 2^31 elements: bytes are counted in 32 bits, 4-byte elements in 64."""
    for dtype in ("int8", "float16", "float32"):
        assert "gpu.triton" in lower(lambda x: jaxft.permute(x, (1, 0)), jax.ShapeDtypeStruct((2**15, 2**16), dtype))


# --- Any case ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(3))
def test_random_heads(seed, monkeypatch):
    """Splitting and merging are exact, except for the sums, so NumPy gives the expected results."""
    rng = np.random.default_rng(seed)
    blocks = [(power_of_two(rng, 16), power_of_two(rng, 64), power_of_two(rng, 4)) for _ in range(2)]
    backward = GradientConfig(*blocks[1][:2], int(rng.integers(1, 9)), blocks[1][2])
    monkeypatch.setattr(tuning_layouts, "qkv_bias_split_heads", lambda *_: ElementwiseConfig(*blocks[0]))
    monkeypatch.setattr(tuning_layouts, "qkv_bias_split_heads_backward", lambda *_: backward)
    dtype, vector = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    sizes = rng.choice([1, 2, 3, 5], 4)
    sizes[rng.integers(4)] = rng.choice([8, 13, 33, 64])
    b, t, n, h = map(int, sizes)
    width = 3 * n * h
    floats = normal(rng, dtype, qkv=(b, t, width)) | normal(rng, vector, bias=some(rng, (width,)))
    dy = tuple(normal(rng, dtype, **dict.fromkeys("qkv", (b, n, t, h)), merged=(b, t, n * h)).values())

    @jit
    def run(floats, dy):
        def split(qkv, bias=None):
            q, k, v = jaxft.qkv_bias_split_heads(qkv, bias, n, implementation="triton")
            return q, k, v, jaxft.merge_heads(q, implementation="triton")

        out, pull_back = jax.vjp(lambda floats: split(**floats), floats)
        return out, pull_back(dy)[0]

    out, gradients = run(floats, dy)
    y = np.asarray(floats["qkv"], np.float32)
    if "bias" in floats:
        y = y + np.asarray(floats["bias"], np.float32)
    q, k, v = y.astype(dtype).reshape(b, t, 3, n, h).transpose(2, 0, 3, 1, 4)
    wanted = (q, k, v, q.transpose(0, 2, 1, 3).reshape(b, t, n * h))
    chex.assert_trees_all_equal(out, wanted, custom_message=f"seed {seed}")

    dq, dk, dv, merged = map(np.asarray, dy)
    dq = dq + merged.reshape(b, t, n, h).transpose(0, 2, 1, 3)
    packed = np.stack([dq, dk, dv]).transpose(1, 3, 0, 2, 4).reshape(b, t, width)
    wanted, exact = {"qkv": packed}, {"qkv": packed.astype(np.float64)}
    np.testing.assert_array_equal(gradients["qkv"], packed, err_msg=f"seed {seed}")
    if "bias" in floats:
        wanted["bias"] = packed.astype(np.float32).sum((0, 1)).astype(vector)
        exact["bias"] = exact["qkv"].sum((0, 1))
    assert_matches_oracle(gradients, wanted, exact, seed=seed)


@pytest.mark.parametrize("seed", seeds(8))
def test_random_moves(seed, monkeypatch):
    """Shapes have up to eight axes, long and empty ones anywhere. The way back is exact, too."""
    rng = np.random.default_rng(seed)
    line = power_of_two(rng, 32)
    config = PermuteConfig(line, line * line * power_of_two(rng, 4), power_of_two(rng, 4))
    monkeypatch.setattr(tuning_layouts, "permute", lambda *_: config)
    shape = [int(n) for n in rng.choice([0, 1, 2, 3, 5], rng.integers(1, 9), p=[0.02, 0.23, 0.25, 0.25, 0.25])]
    for axis in rng.integers(0, len(shape), 2):
        shape[axis] = int(rng.choice([7, 16, 33, 65])) if math.prod(shape) < 1000 else shape[axis]
    while math.prod(shape) > 20_000:
        shape[int(np.argmax(shape))] = 2
    axes = tuple(int(a) for a in rng.permutation(len(shape)))
    dtype = str(rng.choice(DTYPES_TO_MOVE))
    x = random_bits(rng, dtype, shape)
    with jax.enable_x64(dtype in DTYPES_64):
        y, pull_back = jax.vjp(lambda x: jaxft.permute(x, axes, implementation="triton"), jnp.asarray(x))
        assert_moves(x, axes, y)
        assert_moves(x, axes, jaxft.permute(jnp.asarray(x), axes, implementation="xla"))
        if dtype.startswith(("float", "bfloat")):
            assert_moves(y, np.argsort(axes), *pull_back(y))


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
    message = f"{op}: there is no 'cudnn' implementation, only ('triton', 'xla')"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        getattr(jaxft, op)(*arguments, implementation="cudnn")
    message = f"{op}: implementation 'triton' cannot be used: it needs compute capability 8.0, Tesla T4 has 7.5"
    with dispatch.target("Tesla T4", (7, 5)), pytest.raises(NotImplementedError, match=re.escape(message)):
        getattr(jaxft, op)(*arguments, implementation="triton")
