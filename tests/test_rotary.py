"""rotary: op and kernel."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import INTERPRET, ONE_DTYPE, check, in_float64, jit, lower, normal, power_of_two, seeds, slow, slow_cases
from checked import checked, first_stores
from compare import assert_matches_oracle
from jaxft import reference
from jaxft.kernels.triton import rotary as kernel
from jaxft.tuning import layouts as tuning_layouts
from jaxft.tuning.table import ElementwiseConfig
from lowered import TRITON, of, operations

BOTH = pytest.mark.parametrize("implementation", ["triton", "xla"])


def check_op(floats, positions, *, in_place=False, seed=None, **options):
    """Checks the op for `qkv`, or for `query` and `key`."""

    def bind(op, **more):
        def run(**f):
            return op(f["qkv"] if "qkv" in f else (f["query"], f["key"]), positions, **options, **more)

        return run

    check(lambda implementation, **f: bind(jaxft.rotary, in_place=in_place, implementation=implementation)(**f),
          bind(reference.rotary), bind(oracle.rotary), floats, implementations=["triton", "xla"],
          seed=seed)  # fmt: skip


def ints(*shape, most=512):
    return np.random.default_rng(7).integers(0, most, shape, dtype=np.int32)


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(
    ("tokens", "positions"),
    [((2, 5), np.arange(5, dtype=np.int32)), ((2, 5), ints(2, 1)), ((7,), ints(7)),
     *slow_cases(((2, 5), ints(1, 5)), ((2, 5), ints(2, 5)), ((2, 5), ints()), ((), ints()), ((2, 3, 2), ints(3, 2)))],
    ids=str,
)  # fmt: skip
def test_positions_of_padded_and_packed_tokens(tokens, positions, dtype):
    rng = np.random.default_rng(0)
    check_op(normal(rng, dtype, qkv=(*tokens, 3, 2, 8)), positions)
    check_op(normal(rng, dtype, query=(*tokens, 4, 8), key=(*tokens, 2, 8)), positions, in_place=True)


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(("heads", "size"), [(12, 64), (3, 6), *slow_cases((1, 2), (7, 80), (5, 96), (16, 128))])
def test_sizes_of_heads(heads, size, dtype):
    """Half of a head, and the heads of a row, need not be powers of two."""
    for in_place in (False, True):
        floats = normal(np.random.default_rng(1), dtype, qkv=(13, 3, heads, size))
        check_op(floats, ints(13), theta=160000.0, in_place=in_place)


@pytest.mark.parametrize("options", [{"theta": 40000.0, "frequency_scale": 2.0 ** (-2 / 64)}, *slow({"theta": 1000.0})])
def test_frequencies(options):
    """Long positions show errors of the frequencies."""
    floats = normal(np.random.default_rng(2), jnp.float32, qkv=(9, 3, 1, 64))
    check_op(floats, ints(9, most=8192), **options)


@pytest.mark.parametrize("size", [2, 64, 80])
def test_frequencies_are_powers_of_theta(size):
    got = reference.rotary_frequencies(size, 160000.0, 0.5, np.float32)
    exact = 0.5 * 160000.0 ** (-np.arange(0, size, 2) / size)
    np.testing.assert_allclose(got, exact, rtol=5e-7)
    assert got.dtype == np.float32 and got[0] == 0.5
    np.testing.assert_allclose(reference.rotary_frequencies(size, 160000.0, 0.5, np.float64), exact, rtol=1e-15)


@BOTH
@pytest.mark.parametrize("in_place", [False, True])
def test_values_keep_their_bits(in_place, implementation):
    """Also NaN, and neither NaN nor infinity reaches another pair."""
    qkv = normal(np.random.default_rng(3), jnp.float32, qkv=(2, 5, 3, 2, 8))["qkv"]
    bad = qkv.at[0, 1, 2, 0, 3].set(jnp.nan).at[0, 1, 2, 1].set(-0.0).at[1, 2, 0, 1, 2].set(jnp.inf)
    run = functools.partial(jaxft.rotary, positions=np.arange(5), in_place=in_place, implementation=implementation)
    clean, got = run(qkv), run(bad)
    np.testing.assert_array_equal(got[:, :, 2].view(jnp.int32), bad[:, :, 2].view(jnp.int32))
    changed = np.zeros(qkv.shape, bool)
    changed[:, :, 2] = changed[1, 2, 0, 1, 2] = changed[1, 2, 0, 1, 6] = True
    np.testing.assert_array_equal(np.asarray(got)[~changed], np.asarray(clean)[~changed])
    assert not np.isfinite(np.asarray(got)[1, 2, 0, 1, [2, 6]]).any()


@BOTH
def test_logits_depend_on_distances_only(implementation):
    rng = np.random.default_rng(4)
    x = normal(rng, jnp.float32, query=(1, 1, 16), key=(1, 1, 16))
    pair = tuple(jnp.broadcast_to(x[name], (6, 1, 16)) for name in ("query", "key"))
    q, k = jaxft.rotary(pair, np.arange(6), implementation=implementation)
    logits = np.einsum("inh,jnh->ij", q, k)
    for distance in range(-5, 6):
        line = np.diagonal(logits, distance)
        np.testing.assert_allclose(line, line[0], atol=2e-5)
    assert np.ptp(logits) > 0.1


@BOTH
def test_packed_rows_equal_padded_rows(implementation):
    qkv = normal(np.random.default_rng(5), jnp.bfloat16, qkv=(2, 5, 3, 2, 8))["qkv"]
    positions = np.arange(5)
    run = functools.partial(jaxft.rotary, theta=1000.0, implementation=implementation)
    padded = run(qkv, positions)
    packed = run(qkv.reshape(10, 3, 2, 8), np.tile(positions, 2))
    parts = run((qkv[:, :, 0], qkv[:, :, 1]), np.broadcast_to(positions, (2, 5)))
    np.testing.assert_array_equal(packed, padded.reshape(packed.shape))
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, padded[:, :, i])


@BOTH
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_turns_back(in_place, implementation):
    """The gradient of a rotated array, for that array, is the array."""
    qkv = normal(np.random.default_rng(6), jnp.float32, qkv=(7, 3, 2, 8))["qkv"]
    run = functools.partial(jaxft.rotary, positions=ints(7), in_place=in_place, implementation=implementation)

    @jax.jit
    def there_and_back(qkv):
        out, pull_back = jax.vjp(run, qkv)
        return out, pull_back(out)[0]

    def second_gradient(run):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(run(x) ** 3))(x) ** 2)))(qkv)

    out, back = there_and_back(qkv)
    np.testing.assert_allclose(back, qkv, rtol=1e-5, atol=1e-6)
    assert not np.allclose(out, qkv, atol=0.1)
    second = second_gradient(run)
    expected = second_gradient(functools.partial(reference.rotary, positions=jnp.asarray(ints(7))))
    np.testing.assert_allclose(second, expected, rtol=1e-3, atol=1e-3)


def test_in_place_reads_no_values():
    """The kernel takes the memory of its operand, also for the gradient, and visits two thirds of it."""
    x, positions = of((64, 3, 12, 64), jnp.bfloat16), of((64,), jnp.int32)
    for in_place in (False, True):
        run = functools.partial(jaxft.rotary, in_place=in_place)
        text = lower(run, x, positions)
        assert ("output_operand_alias" in text) == in_place
        gradient = lower(lambda x, p: jax.vjp(functools.partial(run, positions=p), x)[1](x), x, positions)  # noqa: B023
        assert ("output_operand_alias" in gradient) == in_place and operations(gradient)[TRITON] == 1
    grids = []
    arrays = jnp.ones((8, 6, 8)), jnp.zeros(8, jnp.int32), jnp.ones(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel.common, "launch", lambda kernel, grid, *_, **__: grids.append(grid) or [None])
        for in_place in (False, True):
            config = ElementwiseConfig(8, 4, 1)
            kernel.rotate(*arrays, rotated=4, inverse=False, in_place=in_place, config=config, interpret=True)
    assert grids == [(6, 1), (4, 1)]


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_op_is_one_kernel(dtype, caplog):
    for shape, positions in (((2, 512, 3, 12, 64), (512,)), ((1000, 3, 7, 80), (1000,)), ((1, 3, 1, 2), (1,))):
        found = operations(lower(jaxft.rotary, of(shape, dtype), of(positions, jnp.int32)))
        assert (found[TRITON], found["concatenate"], found["slice"]) == (1, 0, 0)
    q, k = of((9, 4, 64), dtype), of((9, 2, 64), dtype)
    pair = lower(lambda q, k, p: jaxft.rotary((q, k), p), q, k, of((9,), "int32"))
    assert operations(pair)[TRITON] == 2
    with jax.enable_x64(True):
        for ids in ("int32", "int64"):
            assert operations(lower(jaxft.rotary, of((9, 3, 4, 64), dtype), of((9,), ids)))[TRITON] == 1
    assert caplog.messages == []


CONFIGS = [ElementwiseConfig(*sizes) for sizes in ((1, 4, 1), (2, 16, 4), (16, 8, 2), (4, 1, 1), (32, 64, 8))]


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("in_place", [False, True])
def test_any_config(in_place, dtype):
    """A row's position repeats after seven rows."""
    x, positions = normal(np.random.default_rng(8), dtype, x=(21, 9, 6))["x"], jnp.asarray(ints(7))
    frequencies = jnp.asarray(reference.rotary_frequencies(6, 100.0, 1.0, np.float32))

    def plain(x):
        (turned,) = reference.rotary((x[:, :6],), -jnp.tile(positions, 3), 100.0)
        return jnp.concatenate([turned, x[:, 6:]], axis=1)

    expected, exact = jit(plain)(x), in_float64(plain, x)
    for config in CONFIGS:
        options = {"rotated": 6, "inverse": True, "in_place": in_place, "config": config}
        got = jit(functools.partial(kernel.rotate, **options, interpret=INTERPRET))(x, positions, frequencies)
        assert_matches_oracle(got, expected, exact, seed=config)
        text = lower(functools.partial(kernel.rotate, **options, interpret=False),
                     of(x.shape, dtype), of((7,), "int32"), of((3,)))  # fmt: skip
        assert operations(text)[TRITON] == 1


@pytest.mark.parametrize("config", [CONFIGS[2], *slow(CONFIGS[0], CONFIGS[1], *CONFIGS[3:])], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_kernel_stays_within_its_arrays(in_place, config):
    arrays = jnp.ones((11, 9, 6)), jnp.asarray(ints(11)), jnp.ones(3)
    options = {"rotated": 9 if in_place else 6, "inverse": False, "in_place": in_place, "config": config}
    run = functools.partial(kernel.rotate, *arrays, **options, interpret=True)
    with checked():
        got = run()
    chex.assert_trees_all_close(got, run(), rtol=1e-6, atol=1e-6)


def test_kernel_starts_with_the_last_rows():
    arrays = jnp.ones((10, 1, 8)), jnp.zeros(10, jnp.int32), jnp.ones(4)
    options = {"rotated": 1, "inverse": False, "in_place": False, "config": ElementwiseConfig(2, 4, 1)}
    stores = first_stores(lambda: kernel.rotate(*arrays, **options, interpret=True))
    assert {*np.ravel(stores[0][0])} == {8, 9}


@BOTH
def test_reruns_are_bitwise_equal(implementation):
    qkv = normal(np.random.default_rng(9), jnp.bfloat16, qkv=(37, 3, 4, 16))["qkv"]
    run = jit(jax.value_and_grad(lambda x: jaxft.rotary(x, ints(37), implementation=implementation).sum()))
    chex.assert_trees_all_equal(run(qkv), run(qkv))


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 3, 2, 8), (4, 3, 0, 8), (4, 3, 2, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    x = jnp.ones(shape, jnp.bfloat16)
    positions = jnp.zeros(shape[-4:-3], jnp.int32)
    y, pull_back = jax.vjp(lambda x: jaxft.rotary(x, positions, implementation=implementation), x)
    assert (y.shape, y.dtype) == (shape, x.dtype) and pull_back(y)[0].shape == shape


@pytest.mark.parametrize("seed", seeds(4))
def test_random(seed, monkeypatch):
    """Launch configurations are random, too."""
    rng = np.random.default_rng(seed)
    config = ElementwiseConfig(power_of_two(rng, 32), power_of_two(rng, 128), power_of_two(rng, 4))
    monkeypatch.setattr(tuning_layouts, "rotary", lambda *_: config)
    tokens = tuple(int(n) for n in rng.choice([1, 2, 5, 13], rng.integers(1, 3)))
    heads, size = int(rng.choice([1, 2, 3, 7, 12])), 2 * int(rng.choice([1, 2, 3, 17, 32, 48]))
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))
    shape = tokens[int(rng.integers(0, len(tokens))) :]
    positions = rng.integers(-10, 3000, shape, dtype=np.int32)
    floats = normal(rng, dtype, qkv=(*tokens, 3, heads, size))
    if rng.random() < 0.4:
        floats = normal(rng, dtype, query=(*tokens, heads * 2, size), key=(*tokens, heads, size))
    check_op(floats, positions, in_place=bool(rng.random() < 0.5), theta=float(rng.choice([100.0, 1e4, 160000.0])),
             seed=seed)  # fmt: skip


X, P = jnp.ones((2, 5, 3, 2, 8)), jnp.arange(5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxft.rotary(X[:, :, :2], P), ValueError,
         "rotary: qkv must have shape [..., 3, N, H], got (2, 5, 2, 2, 8)"),
        (lambda: jaxft.rotary(X[0, 0, 0], P), ValueError, "rotary: qkv must have shape [..., 3, N, H], got (2, 8)"),
        (lambda: jaxft.rotary((X[0, 0, 0, 0], X), P), ValueError, "query must have shape [..., N, H], got (8,)"),
        (lambda: jaxft.rotary((X[:, :, 0],), P), ValueError, "must be an array or a pair (query, key), got 1 arrays"),
        (lambda: jaxft.rotary((X[:, :, 0], P), P), TypeError, "key must be an array of floats, got int32"),
        (lambda: jaxft.rotary(None, P), TypeError, "rotary: qkv must be an array, got NoneType"),
        (lambda: jaxft.rotary(X[..., :7], P), ValueError, "the head size of qkv must be an even number, got 7"),
        (lambda: jaxft.rotary(X, P[:4]), ValueError, "positions must broadcast to (2, 5), got shape (4,)"),
        (lambda: jaxft.rotary(X, P.astype(float)), TypeError, "positions must be an array of integers, got float32"),
        (lambda: jaxft.rotary(X, 5), TypeError, "positions must be an array, got int"),
        (lambda: jaxft.rotary(X, P, 0.0), ValueError, "theta must be positive, got 0.0"),
        (lambda: jaxft.rotary(X, P, jnp.ones(())), TypeError, "theta must be a Python number"),
        (lambda: jaxft.rotary(X, P, frequency_scale=-1), ValueError, "frequency_scale must be positive, got -1"),
        (lambda: jaxft.rotary(X, P, interleaved=True), NotImplementedError, "rotary: interleaved must be False"),
        (lambda: jaxft.rotary(X, P, interleaved=1), TypeError, "interleaved must be True or False, got int"),
        (lambda: jaxft.rotary(X, P, rotary_dim=4), NotImplementedError,
         "rotary_dim must be None or the head size, 8 (not a part of a head), got 4"),
        (lambda: jaxft.rotary(X, P, in_place=None), TypeError, "in_place must be True or False, got NoneType"),
        (lambda: jaxft.rotary(X, P, implementation="cuda"), ValueError, "implementation"),
        (lambda: jaxft.rotary(jnp.ones((1, 3, 1, 4096)), P[:1], implementation="triton"), NotImplementedError,
         "the head size is 4096, the kernel takes at most 2048"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_kernel_refuses_sizes_beyond_32_bits():
    x = jax.ShapeDtypeStruct((2**28 + 1, 3, 4, 8), jnp.float32)
    positions = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    with pytest.raises(NotImplementedError, match="qkv has 3221225484 rows, the kernels take at most 2"):
        jax.eval_shape(functools.partial(jaxft.rotary, implementation="triton"), x, positions)


def test_whole_head_may_be_named():
    np.testing.assert_array_equal(jaxft.rotary(X, P, rotary_dim=8), jaxft.rotary(X, P))
