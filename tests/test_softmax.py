"""softmax and log_softmax: ops and kernels."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import (
    INTERPRET,
    ONE_DTYPE,
    check,
    check_padding,
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
from jaxft import dispatch, reference
from jaxft.kernels.triton import softmax as kernel
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning.table import RowConfig

names = pytest.mark.parametrize("name", ["softmax", "log_softmax"])
softmax = pytest.mark.parametrize("name", ["softmax", *slow("log_softmax")])
log_softmax = pytest.mark.parametrize("name", ["log_softmax", *slow("softmax")])
both = pytest.mark.parametrize("implementation", ["triton", "xla"])


def check_op(name, floats, seed=None, implementations=("triton",), in_place=False, **options):
    check(lambda implementation, **f: getattr(jaxft, name)(**f, **options, in_place=in_place,
                                                           implementation=implementation),
          lambda **f: getattr(reference, name)(**f, **options), lambda **f: getattr(oracle, name)(**f, **options),
          floats, implementations=implementations, seed=seed)  # fmt: skip


def run_kernel(name, x, dy, bias, mask, config, scale=None, in_place=False):
    """Returns the result and the gradients of x and bias."""
    options = {"log": name == "log_softmax", "scale": scale, "config": config, "interpret": INTERPRET}
    save = name == "log_softmax" and x.shape[-1] > config.block_width
    y, *saved = kernel.forward(x, bias, mask, in_place=in_place, save=save, **options)
    return y, *kernel.backward(dy, x, bias, mask, *saved, **options)


@functools.cache
def plain_kernel(name, scale):
    @jit
    def run(x, dy, bias, mask):
        y, pull_back = jax.vjp(lambda x, bias: getattr(reference, name)(x, scale=scale, bias=bias, mask=mask), x, bias)
        return y, *pull_back(dy)

    return run


@functools.cache
def compiled_kernel(name, config, scale):
    return jit(functools.partial(run_kernel, name, config=config, scale=scale))


def check_kernel(name, x, config, scale=None, bias=None, mask=None):
    """Checks the kernels with a configuration of the test's choice."""
    dy, plain = normal(np.random.default_rng(99), x.dtype, dy=x.shape)["dy"], plain_kernel(name, scale)
    y = getattr(oracle, name)(x, scale=scale, bias=bias, mask=mask)
    got = compiled_kernel(name, config, scale)(x=x, dy=dy, bias=bias, mask=mask)
    assert_matches_oracle(got, plain(x, dy, bias, mask), (y, *in_float64(plain, x, dy, bias, mask)[1:]), seed=config)


@names
def test_gradient_of_a_full_bias_has_no_scale(name):
    rng = np.random.default_rng(0)
    check_op(name, normal(rng, np.float32, x=(3, 5, 20), bias=(3, 5, 20)), scale=0.3)


@softmax
@pytest.mark.parametrize("shape", [(1,), (2, 3, 127), (3, 1031), *slow((7, 3), (3, 1), (37, 64))], ids=str)
def test_shapes(name, shape):
    check_op(name, normal(np.random.default_rng(0), jnp.float32, x=shape))


@names
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(name, shape, implementation):
    def op(x):
        return getattr(jaxft, name)(x, mask=jnp.ones(shape, bool), implementation=implementation)

    x = jnp.ones(shape, jnp.bfloat16)
    y, pull_back = jax.vjp(op, x)
    assert {(a.shape, a.dtype) for a in (y, *pull_back(y))} == {(shape, x.dtype)}


# Blocks hold whole rows, several rows, or chunks of rows.
CONFIGS = [
    *(RowConfig(*sizes) for sizes in ((16, 128, 4), (4, 32, 2))),
    *slow(*(RowConfig(*sizes) for sizes in ((64, 256, 8), (1, 16, 1), (2, 1, 1)))),
]


@names
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_config(name, config):
    """Some chunks and some rows are fully masked."""
    rng, dtype, bias_dtype = np.random.default_rng(6), jnp.bfloat16, jnp.float32
    x, bias = normal(rng, dtype, x=(3, 7, 101))["x"], normal(rng, bias_dtype, bias=(7, 101))["bias"]
    mask = np.arange(101) < rng.integers(0, 102, (3, 1, 1))
    check_kernel(name, x, config, scale=-0.7, bias=bias, mask=mask)


@softmax
@pytest.mark.parametrize("shape", [(24, 64), *slow((24, 48), (3, 8, 64))], ids=str)
def test_blocks_may_divide_the_shape(name, shape):
    """Such blocks need no mask at any edge, or at one edge only."""
    rng = np.random.default_rng(12)
    floats = normal(rng, jnp.float32, x=shape, bias=shape[-2:])
    mask = rng.random(shape[-1:]) < 0.7
    for sizes in ((8, 64, 1), (8, 16, 1), (16, 64, 2)):
        if shape == (24, 64):
            check_kernel(name, floats["x"], RowConfig(*sizes))
        check_kernel(name, floats["x"], RowConfig(*sizes), bias=floats["bias"], mask=mask)


@log_softmax
@pytest.mark.parametrize("width", [127, 5000, *slow(1, 3, 1031)])
def test_chunks_cover_any_width(name, width):
    x = normal(np.random.default_rng(7), jnp.float32, x=(3, width))["x"]
    check_kernel(name, 5.0 * x, RowConfig(2, 256, 1))
    check_kernel(name, jnp.sort(x, axis=1), RowConfig(1, 512, 1))  # the maximum grows with every chunk


@log_softmax
def test_longest_rows_run_in_chunks(name):
    """The widest block does not hold the row, so the op chooses chunks."""
    x = normal(np.random.default_rng(8), jnp.bfloat16, x=(2, 33000))
    check_op(name, x, mask=np.arange(33000) != 5)


@names
@pytest.mark.skipif(INTERPRET, reason="what the compiler may keep, it does in compiled kernels only")
@pytest.mark.parametrize("width", [32768, 65536])
def test_large_rows_may_stay_in_registers(name, width):
    x = normal(np.random.default_rng(8), jnp.bfloat16, x=(3, width))
    check_op(name, x, scale=2.0, in_place=True)


@softmax
@pytest.mark.parametrize("shape", [(4, 8), *slow((4, 4), (2, 2, 4))], ids=str)
def test_bias_gradient_of_four_rows(name, shape):
    """The array that the kernel saves for the bias has four rows, too."""
    check_op(name, normal(np.random.default_rng(20), jnp.float32, x=shape, bias=shape[-1:]), scale=2.0)


@softmax
def test_broadcasts(name):
    """The mask broadcasts along every choice of axes, the bias along the other axes."""
    rng, shape = np.random.default_rng(9), (2, 3, 6, 4)
    floats = normal(rng, jnp.float32, x=shape, dy=shape)
    runs = [jit(functools.partial(run_kernel, name, config=RowConfig(rows, 4, 1))) for rows in (1, 2, 8)]
    every = enumerate(itertools.product([False, True], repeat=4))
    for n, kept in itertools.islice(every, name == "softmax", None, 2):  # each op has one half
        own, other = (tuple(n if k == side else 1 for n, k in zip(shape, kept, strict=True)) for side in (True, False))
        mask, bias = rng.random(own) < 0.7, rng.standard_normal(other).astype(np.float32)
        while mask.ndim and mask.shape[0] == 1:  # dimensions in front may be missing
            mask = mask[0]
        while bias.ndim and bias.shape[0] == 1:
            bias = bias[0]
        arguments = {**floats, "bias": bias, "mask": mask}
        for got, wanted in zip(runs[n // 2 % 3](**arguments), plain_kernel(name, None)(**arguments), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=3e-6, err_msg=f"mask {own}")


@softmax
@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((3, 1, 33), -1.5), *slow_cases(((5, 33), 0.0), ((3, 5, 33), None), ((3, 5, 33), 1e-30),
     ((3, 5, 33), 0.0), ((3, 5, 1), None))],
    ids=str,
)  # fmt: skip
def test_bias_gradient_has_full_precision(name, dtype, shape, scale):
    """The bias gradient has no factor `scale`, and is not rounded with a 16-bit gradient of x."""
    floats = normal(np.random.default_rng(13), dtype, x=(3, 5, 33))
    for bias_dtype in {dtype, jnp.float32}:
        check_op(name, floats | normal(np.random.default_rng(18), bias_dtype, bias=shape), scale=scale)


@names
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_options(name, dtype):
    """A float32 bias goes with any dtype of x, and operands broadcast."""
    rng = np.random.default_rng(1)
    floats = normal(rng, dtype, x=(2, 3, 5, 7)) | normal(rng, jnp.float32, bias=(2, 1, 5, 1))
    mask = np.arange(7) < np.array([7, 3, 1, 0, 7])[:, None]
    check_op(name, floats, scale=-1.5, mask=mask)


@softmax
def test_huge_logits(name):
    for config in (RowConfig(1, 64, 1), RowConfig(2, 8, 1)):
        check_kernel(name, normal(np.random.default_rng(2), jnp.float32, x=(5, 33))["x"] * 1e4, config)


@log_softmax
@pytest.mark.parametrize(
    ("dtype", "block_width"),
    [(jnp.float32, 8), (jnp.bfloat16, 64),
     *slow_cases((jnp.float32, 1), (jnp.float32, 64), (jnp.float16, 8), (jnp.bfloat16, 8))],
)  # fmt: skip
def test_gradients_of_peaked_rows(name, dtype, block_width):
    """One probability is nearly 1, so the gradient is the small rest that rounding must not hide."""
    rng = np.random.default_rng(10)
    for peak in (4.0, 8.0, 12.0, 16.0):
        x = normal(rng, dtype, x=(5, 33))["x"]
        check_kernel(name, x.at[:, int(rng.integers(33))].set(peak), RowConfig(2, block_width, 1))


@names
@both
def test_fully_masked_rows(name, implementation):
    mask = np.array([[True, True, False], [False, False, False]])

    def op(x):
        return getattr(jaxft, name)(x, mask=mask, implementation=implementation)

    y, pull_back = jax.vjp(op, jnp.ones((2, 3)))
    half, nothing = (0.5, 0.0) if name == "softmax" else (np.float32(np.log(0.5)), -np.inf)
    np.testing.assert_allclose(y, [[half, half, nothing], [nothing] * 3], rtol=1e-6)
    (dx,) = pull_back(jnp.arange(6.0).reshape(2, 3))
    derivative = 0.25 if name == "softmax" else 0.5
    np.testing.assert_allclose(dx, [[-derivative, derivative, 0.0], [0.0] * 3], rtol=1e-6)


@names
@both
def test_padding_reaches_nothing(name, implementation):
    mask = np.arange(7) < np.array([7, 3, 1, 0])[:, None]

    def function(**floats):
        y = getattr(jaxft, name)(**floats, scale=0.5, mask=mask, implementation=implementation)
        return jnp.where(mask, y, 0.0)  # log_softmax is -inf there

    clean = normal(np.random.default_rng(3), jnp.float32, x=(4, 7), bias=(4, 7))
    check_padding(function, clean, dict.fromkeys(clean, mask))


@log_softmax
@pytest.mark.parametrize("block_width", [2, *slow(8)])
@pytest.mark.parametrize("bias", [(7,), *slow((4, 7))], ids=str)
def test_nan_in_masked_cotangents_reaches_nothing(name, block_width, bias):
    """In plain jnp such a NaN spoils the row. The kernels ignore it."""
    mask = np.arange(7) < np.array([7, 3, 1, 0])[:, None]
    floats = normal(np.random.default_rng(11), jnp.float32, x=(4, 7), dy=(4, 7), bias=bias)
    run = jit(functools.partial(run_kernel, name, mask=mask, config=RowConfig(2, block_width, 1), scale=0.5))
    clean, poisoned = (run(**floats | {"dy": dy}) for dy in (floats["dy"], jnp.where(mask, floats["dy"], jnp.nan)))
    assert (np.asarray(clean[1])[~mask] == 0.0).all()
    chex.assert_trees_all_equal(poisoned, clean)


@softmax
@pytest.mark.parametrize("block_width", [2, *slow(8)])
def test_nan_and_infinity_stay_in_their_rows(name, block_width):
    """A NaN or an infinity makes its row what plain jnp makes of it, and reaches no other row."""
    x = np.zeros((8, 7), np.float32)
    x[0, 5], x[1, 0], x[2, 3], x[3, 6], x[4] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    x[5, 1], x[5, 6], x[6] = np.nan, np.inf, np.nan
    mask = np.ones((8, 7), bool)
    mask[:, 2] = False
    expected, pull_back = jax.vjp(lambda x: getattr(reference, name)(x, mask=mask), x)
    y, dx, _ = run_kernel(name, jnp.asarray(x), jnp.ones_like(x), None, mask, RowConfig(2, block_width, 1))
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert (np.asarray(dx)[:, 2] == 0.0).all()
    # An infinite logit's own gradient is NaN in plain jnp where its probability is 0.
    finite = np.isfinite(x)
    np.testing.assert_allclose(dx[finite], pull_back(jnp.ones_like(x))[0][finite], atol=1e-6)


@softmax
@both
def test_biases_of_minus_infinity(name, implementation):
    """A bias of -inf masks half of a row, or a whole row, in plain jnp and in the kernels."""
    bias = jnp.zeros((3, 6)).at[0, 3:].set(-jnp.inf).at[1].set(-jnp.inf)
    x = normal(np.random.default_rng(14), jnp.float32, x=(3, 6))["x"]
    y, pull_back = jax.vjp(lambda x: getattr(jaxft, name)(x, bias=bias, implementation=implementation), x)
    expected, plain = jax.vjp(lambda x: getattr(reference, name)(x, bias=bias), x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_allclose(pull_back(x)[0], plain(x)[0], atol=1e-6)


@softmax
@both
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_in_place(name, dtype, implementation):
    """Values and gradients equal the results on a copy, and x stays as it was if it is not donated."""
    floats = normal(np.random.default_rng(15), dtype, x=(5, 7, 40), bias=(7, 40))

    @functools.partial(jax.jit, static_argnames="in_place")
    def run(x, bias, in_place):
        def op(x, bias):
            return getattr(jaxft, name)(x, bias=bias, in_place=in_place, implementation=implementation)

        y, pull_back = jax.vjp(op, x, bias)
        return op(x, bias), y, pull_back(y)

    before = np.asarray(floats["x"])
    chex.assert_trees_all_equal(run(**floats, in_place=True), run(**floats, in_place=False))
    np.testing.assert_array_equal(floats["x"], before)


@names
@pytest.mark.parametrize("block_width", [None, *slow(4)])
def test_second_derivatives(name, block_width, monkeypatch):
    """Rows fit into a block, or are read in chunks, for which the forward pass of log_softmax saves numbers."""
    if block_width is not None:
        monkeypatch.setattr(tuning_rows, "softmax_backward", lambda *_: RowConfig(2, block_width, 1))
    floats = normal(np.random.default_rng(21), jnp.float32, x=(5, 7), bias=(7,))
    mask = np.arange(7) < np.array([7, 3, 1, 6, 2])[:, None]

    def twice(op, **options):
        def loss(f):
            return jnp.sum(jnp.sin(jnp.where(mask, op(**f, scale=-0.7, mask=mask, **options), 0.0)))

        return jit(jax.grad(lambda f: sum(jnp.sum(g * g) for g in jax.tree.leaves(jax.grad(loss)(f)))))(floats)

    got, plain = twice(getattr(jaxft, name), implementation="triton"), twice(getattr(reference, name))
    chex.assert_trees_all_close(got, plain, rtol=1e-4, atol=1e-5)


@log_softmax
def test_in_place_in_chunks(name):
    x = normal(np.random.default_rng(16), jnp.float32, x=(5, 40))["x"]
    config = RowConfig(2, 16, 1)
    got, wanted = (
        jit(functools.partial(run_kernel, name, bias=None, mask=None, config=config, in_place=in_place))(x=x, dy=x)[0]
        for in_place in (True, False)
    )
    np.testing.assert_array_equal(got, wanted)


@names
@pytest.mark.skipif(dispatch.platform() != "cuda", reason="reads a program compiled for an NVIDIA GPU")
def test_in_place_needs_no_second_buffer(name):
    """x is donated, or dead after the call."""
    op, x = functools.partial(getattr(jaxft, name), in_place=True), jnp.zeros((4096, 1024))
    for donated, function in ((0, op), ((), lambda x: op(x + 1.0))):
        memory = jax.jit(function, donate_argnums=donated).lower(x).compile().memory_analysis()
        assert memory.temp_size_in_bytes < x.nbytes // 16, memory
        assert memory.alias_size_in_bytes == (x.nbytes if donated == 0 else 0), memory


@softmax
@pytest.mark.parametrize("axes", [(0, None), *slow((None, 0), (1, 0))], ids=str)
def test_vmap_over_one_argument(name, axes):
    """An operand that is not mapped is shared. If x is not mapped, its memory does not hold the result."""
    rng, shapes = np.random.default_rng(17), ((3, 5), (3, 5))
    x, bias = (rng.standard_normal((4, *s) if a == 0 else (3, 4, 5) if a else s).astype(np.float32)
               for s, a in zip(shapes, axes, strict=True))  # fmt: skip

    def each(op, **options):
        return jit(jax.vmap(lambda x, bias: op(x, bias=bias, **options), in_axes=axes))(x, bias)

    got = each(getattr(jaxft, name), in_place=True, implementation="triton")
    np.testing.assert_allclose(got, each(getattr(reference, name)), rtol=1e-5, atol=1e-6)


@softmax
@both
def test_reruns_are_bitwise_equal(name, implementation):
    x = normal(np.random.default_rng(4), jnp.bfloat16, x=(37, 64))["x"]

    @jit
    def run(x):
        op = functools.partial(getattr(jaxft, name), implementation=implementation)
        y, pull_back = jax.vjp(lambda x, bias: op(x, bias=bias), x, jnp.ones(64))
        return y, *pull_back(y)

    chex.assert_trees_all_equal(run(x), run(x))


@softmax
@pytest.mark.parametrize("seed", seeds(3))
def test_random(name, seed, monkeypatch):
    """Launch configurations are random: rows in chunks, or several rows a program."""
    rng = np.random.default_rng(seed)
    for direction in ("softmax", "softmax_backward"):
        config = RowConfig(power_of_two(rng, 8), power_of_two(rng, 64), power_of_two(rng, 4))
        monkeypatch.setattr(tuning_rows, direction, lambda *_, config=config: config)
    shape = tuple(int(n) for n in rng.choice([1, 2, 4, 5, 13, 31], rng.integers(1, 4)))
    dtype, bias_dtype = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    peak, scale = int(rng.choice([1, 3])), some(rng, float(rng.uniform(-2.0, 2.0)))
    if jnp.float32 in (dtype, bias_dtype) or shape[-1] < 4:
        # With few float32 numbers, plain jnp may by chance be nearly exact. Rounding to 16 bits hides that, except for
        # zeros. The compiler decides whether x * scale + bias - maximum is rounded two or three times.
        while np.prod(shape[:-1], dtype=int) < 10:
            shape = (5, *shape)
        peak, scale = 1, None if scale is None else 2.0 ** round(scale)

    def broadcast():
        return tuple(n if rng.random() < 0.7 else 1 for n in shape[int(rng.integers(0, 2)) :])

    floats = normal(rng, dtype, x=shape) | normal(rng, bias_dtype, bias=some(rng, broadcast()))
    floats["x"] = floats["x"] * peak
    mask = some(rng, rng.random(broadcast()) < 0.7)
    check_op(name, floats, seed, in_place=bool(rng.random() < 0.5), scale=scale, mask=mask)


X = np.ones((2, 3, 8), np.float32)


@names
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be an array, got list"),
        ({"x": X.astype(np.int32)}, TypeError, "x must be an array of floats, got int32"),
        ({"x": np.ones((), np.float32)}, ValueError, "x must have at least one dimension, got a scalar"),
        ({"scale": None, "bias": X.astype(np.int32)}, TypeError, "bias must be an array of floats, got int32"),
        ({"bias": X[:1, :, :4]}, ValueError, "bias must broadcast to (2, 3, 8), got shape (1, 3, 4)"),
        ({"bias": X[None]}, ValueError, "bias must broadcast to (2, 3, 8), got shape (1, 2, 3, 8)"),
        ({"mask": X}, TypeError, "mask must be boolean (True = attend), got float32; one that is "
         "added to the logits is a bias"),
        ({"mask": X.astype(np.int32)}, TypeError, "mask must be boolean (True = attend), got int32; write mask != 0"),
        ({"mask": np.ones((3,), bool)}, ValueError, "mask must broadcast to (2, 3, 8), got shape (3,)"),
        ({"scale": "2"}, TypeError, "scale must be a Python number, got str"),
        ({"scale": jnp.ones(())}, TypeError, "scale must be a Python number, got ArrayImpl"),
        ({"implementation": "fast"}, ValueError,
         "implementation must be None or one of ('triton', 'mosaic_gpu', 'cudnn', 'xla'), got 'fast'"),
        ({"implementation": "cudnn"}, NotImplementedError,
         "there is no 'cudnn' implementation, only ('triton', 'xla')"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors(name, changes, error, message):
    with pytest.raises(error, match=re.escape(f"{name}: {message}")):
        getattr(jaxft, name)(**{"x": X, **changes})


@names
@pytest.mark.parametrize("argument", ["x", "bias"])
def test_kernel_refuses_float64_by_name(name, argument):
    with jax.enable_x64(True):
        arrays = {"x": jnp.ones((2, 8), jnp.float32), "bias": jnp.ones((8,), jnp.float32)}
        arrays[argument] = arrays[argument].astype(jnp.float64)
        with pytest.raises(NotImplementedError, match=f"'triton' cannot be used: {argument} is float64"):
            getattr(jaxft, name)(**arrays, implementation="triton")


@names
def test_kernel_refuses_sizes_beyond_32_bits(name):
    def call(x, mask):
        return getattr(jaxft, name)(x, mask=mask, implementation="triton")

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    width = of(2**16, dtype=bool)
    jax.eval_shape(call, of(2**17, 2**16), width)
    for x, mask, message in (
        (of(2**16, 2**16), of(2**16, 2**16, dtype=bool), "mask has 4294967296 elements"),
        (of(2**31, 1), of(1, dtype=bool), "x has 2147483648 rows, the kernels take at most"),
        (of(1, 2**31), of(1, dtype=bool), "x has 2147483648 columns, the kernels take at most"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(call, x, mask)


@log_softmax
@pytest.mark.parametrize("config", [RowConfig(4, 8, 1), *slow(RowConfig(1, 8, 1), RowConfig(2, 4, 1))], ids=str)
def test_kernels_stay_within_the_arrays(config, name):
    arrays = normal(np.random.default_rng(9), jnp.float32, x=(3, 3, 6), dy=(3, 3, 6), bias=(3, 6))
    x, dy, bias = arrays.values()
    options = {"log": name == "log_softmax", "scale": 0.5, "config": config, "interpret": True}
    for mask in (None, jnp.ones((3, 1, 6), bool), jnp.ones((3, 1), bool)):
        with checked():
            kernel.forward(x, bias, mask, in_place=False, **options)
            _, saved = kernel.forward(x, bias, mask, in_place=True, save=True, **options)
            in_chunks = name == "log_softmax" and config.block_width < 6
            kernel.backward(dy, x, bias, mask, saved if in_chunks else None, **options)


@both
def test_log_softmax_of_large_logits_keeps_its_digits(implementation):
    x = 1e4 + np.random.default_rng(3).standard_normal((4, 32)).astype(np.float32)
    exact = oracle.log_softmax(x.astype(np.float64))
    np.testing.assert_allclose(jaxft.log_softmax(x, implementation=implementation), exact, rtol=1e-6)
