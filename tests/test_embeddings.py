"""embeddings_layer_norm: op and kernels."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, jit, lower, normal, power_of_two, seeds, slow, slow_cases, some
from checked import checked
from jaxft import dispatch, reference
from jaxft.dropout import dropout_mask, dropout_seed
from jaxft.kernels.triton import embeddings as kernel
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning.table import GradientConfig, RowConfig

BOTH = ("triton", "xla")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", BOTH)
TABLES = ("word", "position", "token_type")
ROWS = {"word": 29, "position": 13, "token_type": 3}


def some_floats(rng, width, dtype=jnp.float32, vectors=jnp.float32, rows=ROWS):
    floats = normal(rng, dtype, **{name: (rows[name], width) for name in TABLES if rows.get(name)})
    return floats | normal(rng, vectors, gamma=(width,), beta=(width,))


def some_ids(rng, shape, rows=ROWS, least=0):
    """Returns ids that include -1 and less (down to `least`), and ids as far beyond the tables."""
    return {
        name: jnp.asarray(rng.integers(least, rows[table] - least, shape), jnp.int32)
        for name, table in zip(("input_ids", "position_ids", "token_type_ids"), TABLES, strict=True)
        if rows.get(table)
    }


def check_op(floats, ids, seed=None, implementations=("triton",), gradients=True, dtype=None, rate=0.0, **options):
    """Checks the op on `ids` by name. Missing ids have their defaults."""
    key = jax.random.key(3)
    dropout = {"dropout_rate": rate, "dropout_rng": key if rate else None}
    shape = (*ids["input_ids"].shape, floats["word"].shape[1])
    keep = {"rate": rate, "keep": np.asarray(dropout_mask(key, rate, shape)) if rate else None}

    def plain(**floats):
        result = None if floats["word"].dtype == jnp.float64 else dtype  # for the exact gradients
        return reference.embeddings_layer_norm(**ids, **floats, dtype=result, **dropout, **options)

    def exact(**floats):
        return oracle.embeddings_layer_norm(**jax.tree.map(np.asarray, ids), **floats, **keep, **options)

    def op(implementation, **floats):
        more = {"dtype": dtype, "implementation": implementation, **dropout, **options}
        return jaxft.embeddings_layer_norm(**ids, **floats, **more)

    check(op, plain, exact, floats, implementations=implementations, gradients=gradients, seed=seed)


def only(ids, *names):
    return {name: ids[name] for name in ("input_ids", *names)}


@pytest.mark.parametrize(
    ("shape", "width"),
    [((2, 1, 3), 64), *slow_cases(((1,), 1), ((2, 3), 8209), ((5,), 80), ((2, 7), 127), ((3, 11), 17))], ids=str,
)  # fmt: skip
def test_shapes(shape, width):
    rng = np.random.default_rng(0)
    floats, ids = some_floats(rng, width), some_ids(rng, shape)
    check_op(floats, ids)
    check_op(floats, only(ids))


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), (3, 5)], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, width, implementation):
    floats = {name: jnp.ones((7, width), jnp.bfloat16) for name in TABLES}
    ids = jnp.zeros(shape, jnp.int32)
    if width == 0 or ids.size == 0:
        run = functools.partial(jaxft.embeddings_layer_norm, ids, implementation=implementation)
        y, pull_back = jax.vjp(lambda f: run(**f), floats)
        assert (y.shape, y.dtype) == ((*shape, width), jnp.bfloat16)
        chex.assert_trees_all_equal(pull_back(y)[0], jax.tree.map(jnp.zeros_like, floats))


@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(*DTYPES[:2])])
@pytest.mark.parametrize("tables", [DTYPES[0], *slow(*DTYPES[1:])])
def test_dtypes(tables, dtype):
    """Tables and result may have different dtypes, such as float32 parameters of a bfloat16 model."""
    rng = np.random.default_rng(1)
    floats, ids = some_floats(rng, 80, tables), only(some_ids(rng, (2, 5)), "token_type_ids")
    check_op(floats, ids, dtype=dtype)
    assert jaxft.embeddings_layer_norm(**ids, **floats).dtype == tables


def test_tables_of_different_dtypes():
    rng = np.random.default_rng(1)
    floats = some_floats(rng, 80, jnp.bfloat16)
    floats["position"], floats["gamma"] = floats["position"].astype(jnp.float32), floats["gamma"].astype(jnp.float16)
    check_op(floats, some_ids(rng, (2, 5)), implementations=BOTH, dtype=jnp.float16)


@pytest.mark.parametrize("absent", [["gamma", "beta", "token_type"], *slow(["gamma"], ["beta"], ["token_type"])],
                         ids="+".join)  # fmt: skip
def test_optional_operands(absent):
    rng = np.random.default_rng(2)
    floats, ids = some_floats(rng, 80), some_ids(rng, (2, 7))
    floats = {name: x for name, x in floats.items() if name not in absent}
    check_op(floats, only(ids))
    check_op(floats, only(ids, *(["token_type_ids"] if "token_type" in floats else []), "position_ids"))


@pytest.mark.parametrize("epsilon", [10, *slow(1e-12, 1e-2)])
def test_epsilon(epsilon):
    rng = np.random.default_rng(3)
    floats, ids = some_floats(rng, 33), some_ids(rng, (2, 7))
    check_op({name: x * 0.03 if x.ndim == 2 else x for name, x in floats.items()}, ids, epsilon=epsilon)


def test_large_mean():
    """The variance is computed from the deviations from the mean."""
    rng = np.random.default_rng(4)
    floats = some_floats(rng, 300)
    check_op(floats | {"word": floats["word"] + 1e4}, only(some_ids(rng, (2, 7))))


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize(("shape", "width"), [((2, 7), 127), *slow_cases(((1,), 1), ((2, 3), 8209))], ids=str)
def test_dropout(shape, width, dtype):
    rng = np.random.default_rng(16)
    floats, ids = some_floats(rng, width, dtype), some_ids(rng, shape)
    check_op(floats, only(ids), rate=0.1)
    check_op({name: x for name, x in floats.items() if name not in ("gamma", "beta")}, ids, rate=0.9)


@pytest.mark.parametrize("sizes", [(4, 64), *slow((16, 512))], ids=str)
@IMPLEMENTATIONS
def test_kernels_and_reference_drop_the_same(implementation, sizes, monkeypatch, key):
    """The masks are bitwise equal, forward and backward, and at every block size."""
    monkeypatch.setattr(tuning_rows, "layer_norm", lambda *_: RowConfig(*sizes, 1))
    monkeypatch.setattr(tuning_rows, "layer_norm_backward", lambda *_: GradientConfig(*sizes, 3, 1))
    rng, rate = np.random.default_rng(17), 0.5
    floats, ids = some_floats(rng, 300), some_ids(rng, (2, 9))
    keep = np.asarray(dropout_mask(key, rate, (2, 9, 300)))

    @jax.jit
    def run(floats, dy, key):
        options = {"dropout_rate": rate, "dropout_rng": key, "implementation": implementation}
        y, pull_back = jax.vjp(lambda f: jaxft.embeddings_layer_norm(**ids, **f, **options), floats)
        return y, pull_back(dy)[0]

    # Each token has a power of 2: the exact sum in beta's gradient tells which tokens are kept.
    weights = 2.0 ** np.arange(18).reshape(2, 9, 1)
    for given in (key, jax.random.key_data(key)):
        y, gradients = run(floats, jnp.broadcast_to(jnp.asarray(weights, jnp.float32), keep.shape), given)
        np.testing.assert_array_equal(y != 0.0, keep)
        np.testing.assert_array_equal(gradients["beta"], np.sum(keep * weights * 2.0, axis=(0, 1)))


@IMPLEMENTATIONS
def test_rate_of_zero_drops_nothing(implementation, key):
    rng = np.random.default_rng(18)
    floats, ids = some_floats(rng, 24), some_ids(rng, (2, 5))
    run = functools.partial(jaxft.embeddings_layer_norm, **ids, **floats, implementation=implementation)
    expected = run()
    for options in ({"dropout_rate": 0.0}, {"dropout_rng": key}):  # a rate of 0 needs no key
        np.testing.assert_array_equal(run(**options), expected)


@IMPLEMENTATIONS
def test_vmap_over_keys(implementation, key):
    rng = np.random.default_rng(19)
    floats, ids, keys = some_floats(rng, 24), some_ids(rng, (2, 5)), jax.random.split(key, 3)

    def run(key, floats):
        options = {"dropout_rate": 0.4, "dropout_rng": key, "implementation": implementation}
        return jax.grad(lambda f: jnp.sum(jaxft.embeddings_layer_norm(**ids, **f, **options) ** 3))(floats)

    jitted = jax.jit(run)
    each = [jitted(key, floats) for key in keys]
    got = jax.jit(jax.vmap(run, in_axes=(0, None)))(keys, floats)
    chex.assert_trees_all_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each), rtol=1e-5, atol=1e-4)
    assert (each[0]["beta"] != each[1]["beta"]).any()


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("name", "table"),
    [("input_ids", "word"), *slow_cases(("position_ids", "position"), ("token_type_ids", "token_type"))],
)
def test_unknown_id_makes_one_row_nan(name, table, implementation):
    """No other row is NaN, and the unknown id adds to no row's gradient."""
    rng = np.random.default_rng(5)
    floats, good = some_floats(rng, 24), some_ids(rng, (2, 5))

    @jit
    def run(ids):
        y, pull_back = jax.vjp(lambda f: jaxft.embeddings_layer_norm(**ids, **f, implementation=implementation), floats)
        return y.reshape(10, 24), pull_back(jnp.ones_like(y))[0]

    expected, kept = run(good)[0], np.arange(10) != 7
    for bad in (-1, -ROWS[table], ROWS[table], 2**31 - 1, -(2**31)):
        got, gradients = run(good | {name: good[name].at[1, 2].set(bad)})
        assert np.isnan(got[7]).all() and np.isfinite(gradients[table]).all()
        np.testing.assert_array_equal(got[kept], expected[kept])


def test_unknown_ids_spoil_no_other_gradient():
    rng = np.random.default_rng(6)
    for shape in ((3, 7), (40,)):
        ids = some_ids(rng, shape, least=-2)
        check_op(some_floats(rng, 24, rows=ROWS | {"position": 50}), ids)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", *slow("uint8", "int16", "uint16", "uint64")])
def test_dtypes_of_ids(dtype, implementation):
    """Numbers beyond int32 are unknown ids: they do not wrap around to known ids."""
    rng = np.random.default_rng(7)
    floats, good = some_floats(rng, 24), some_ids(rng, (2, 5))
    for x64 in (False, True):
        with jax.enable_x64(x64):
            run = functools.partial(jaxft.embeddings_layer_norm, **floats, implementation=implementation)
            expected = run(**good)
            same = {name: np.asarray(x).astype(dtype) for name, x in good.items()}
            np.testing.assert_array_equal(run(**same), expected)
            limits = np.iinfo(dtype)
            beyond = {limits.max, limits.min, min(limits.max, 2**32 + 1)} - {0}
            for name, extreme in itertools.product(("input_ids", "position_ids"), beyond):
                ids = same[name].copy()
                ids[0, 3] = extreme
                for bad in (ids, jnp.asarray(ids))[: 1 + (x64 or limits.bits < 64)]:
                    got = run(**(same | {name: bad}))
                    assert np.isnan(got[0, 3]).all() and np.isfinite(got[1]).all()


@pytest.mark.parametrize(("count", "kinds"), [(300, 40), *slow_cases((129, 1), (127, 1), (128, 1), (700, 1), (700, 2))])
def test_repeated_ids_are_summed(count, kinds):
    """Tokens with the same id lie in one chunk, in parts of two chunks, and in many chunks."""
    rng = np.random.default_rng(8)
    rows = {"word": 40, "position": count, "token_type": 2}
    ids = {"input_ids": jnp.asarray(rng.integers(0, kinds, (count,)), jnp.int32)}
    ids |= only(some_ids(rng, (count,), rows), "token_type_ids") | ids
    check_op(some_floats(rng, 17, rows=rows), ids)


@pytest.mark.parametrize(
    ("count", "width", "size", "chunk", "config"),
    [(1, 1, 1, 8, RowConfig(4, 16, 1)), (37, 9, 5, 1, RowConfig(1, 16, 1)), (64, 130, 3, 2, RowConfig(4, 32, 2)),
     (64, 130, 3, 64, RowConfig(8, 256, 4)), (50, 4, 70, 8, RowConfig(32, 4, 1)), (90, 4, 1, 8, RowConfig(2, 8, 1))],
    ids=str,
)  # fmt: skip
def test_sums_by_id(count, width, size, chunk, config, monkeypatch):
    """Sums of integers are exact in any order."""
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    rng = np.random.default_rng(9)
    rows = rng.integers(-3, 4, (count, width)).astype(np.float32)
    ids = rng.integers(-2, size + 2, count).astype(np.int32)
    expected = np.zeros((size, width), np.float32)
    for row, i in zip(rows, ids, strict=True):
        if 0 <= i < size:
            expected[i] += row
    for dtype in (jnp.float32, jnp.bfloat16):
        run = functools.partial(kernel.sum_by_id, config=config, interpret=INTERPRET)
        got = jit(run)(rows, ids, jnp.ones((size, width), dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(jnp.float32), expected)


@pytest.mark.parametrize("sizes", [(2, 2), *slow((1, 8), (4, 4))], ids=str)
def test_kernels_stay_within_the_arrays(sizes, monkeypatch, key):
    monkeypatch.setattr(kernel, "CHUNK", 4)
    rng, seed = np.random.default_rng(10), dropout_seed(key)
    floats, ids = some_floats(rng, 6), some_ids(rng, (21,), least=-2)
    options = {"config": RowConfig(*sizes, 1), "interpret": True}
    with checked():
        for given in (ids, ids | {"position_ids": None, "token_type_ids": None}):
            *_, total, _ = kernel.forward(*floats.values(), *given.values(), seed, length=7, epsilon=1e-6,
                                          dropout_rate=0.3, dtype=jnp.float16, save=True, **options)  # fmt: skip
        for name, i in zip(TABLES, ids.values(), strict=True):
            kernel.sum_by_id(total, i, floats[name], **options)


@pytest.mark.skipif(not INTERPRET, reason="XLA scatters by atomics on a GPU")
def test_reruns_are_bitwise_equal_by_xla():
    assert_reruns_are_bitwise_equal("xla")


def test_reruns_are_bitwise_equal():
    assert_reruns_are_bitwise_equal("triton")


def assert_reruns_are_bitwise_equal(implementation):
    rng = np.random.default_rng(11)
    floats, ids = some_floats(rng, 64, jnp.bfloat16), some_ids(rng, (20, 13))

    @jit
    def run(floats, ids):
        op = functools.partial(jaxft.embeddings_layer_norm, **ids, implementation=implementation)
        y, pull_back = jax.vjp(lambda f: op(**f), floats)
        return y, pull_back(y)

    first = run(floats, ids)
    for _ in range(1 if INTERPRET else 20):
        chex.assert_trees_all_equal(run(floats, ids), first)


# --- Transformations of ids (test_transforms.py has the floats) ----------------------------------------------------


@IMPLEMENTATIONS
def test_vmap_over_ids(implementation):
    rng = np.random.default_rng(12)
    floats, ids = some_floats(rng, 24), some_ids(rng, (3, 2, 5))

    def run(ids, floats):
        def loss(floats):
            return jnp.sum(jaxft.embeddings_layer_norm(**ids, **floats, implementation=implementation) ** 3)

        return jax.value_and_grad(loss)(floats)

    got = jit(jax.vmap(run, in_axes=(0, None)))(ids, floats)
    each = [jit(run)(jax.tree.map(lambda x, i=i: x[i], ids), floats) for i in range(3)]
    chex.assert_trees_all_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_scan_and_remat_over_ids(implementation):
    rng = np.random.default_rng(13)
    floats, ids = some_floats(rng, 24), some_ids(rng, (3, 2, 5))

    def loss(floats, implementation):
        @jax.checkpoint
        def step(total, ids):
            y = jaxft.embeddings_layer_norm(**ids, **floats, implementation=implementation)
            return total + jnp.sum(y**3), None

        return jax.lax.scan(step, jnp.zeros(()), ids)[0]

    got, expected = (jit(jax.grad(functools.partial(loss, implementation=i)))(floats) for i in (implementation, "xla"))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("given", [("position_ids", "token_type_ids"), *slow(())], ids=len)
def test_second_derivatives(given, key):
    rng = np.random.default_rng(14)
    floats, ids = some_floats(rng, 24), only(some_ids(rng, (2, 5)), *given)

    def second(implementation):
        def f(floats):
            options = {"dropout_rate": 0.3, "dropout_rng": key, "implementation": implementation}
            return jnp.sum(jaxft.embeddings_layer_norm(**ids, **floats, epsilon=0.1, **options) ** 3)

        return jit(jax.grad(lambda floats: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(floats)))))(floats)

    chex.assert_trees_all_close(second("triton"), second("xla"), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("given", [("position_ids", "token_type_ids"), *slow(())], ids=len)
def test_shards_for_a_gpu(given):
    """Tokens are sharded, tables are replicated: JAX adds up the gradients of the tables."""
    rng = np.random.default_rng(15)
    floats, ids = some_floats(rng, 24), only(some_ids(rng, (2, 5)), *given)

    def loss(floats, ids):
        def run(floats, ids):
            return jaxft.embeddings_layer_norm(**ids, **floats, implementation="triton")

        return jnp.sum(jax.shard_map(run, in_specs=(P(), P("data")), out_specs=P("data"))(floats, ids))

    gradient = jax.grad(loss)
    assert "all_reduce" in lower(gradient, floats, ids, axis="data")
    lower(jax.grad(lambda floats, ids: sum(jnp.sum(x) for x in jax.tree.leaves(gradient(floats, ids)))), floats, ids,
          axis="data")  # fmt: skip


@pytest.mark.parametrize("seed", seeds(2))
def test_random(seed, monkeypatch):
    """Launch configurations are random, too."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([4, 17, 64, 100, 129, 384]))
    shape = tuple(int(n) for n in rng.choice([1, 2, 5, 13, 40], rng.integers(1, 3)))
    tables, vectors = (jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))) for _ in range(2))
    rows = {"word": int(rng.integers(1, 60)), "position": shape[-1] + int(rng.integers(0, 9)),
            "token_type": some(rng, int(rng.integers(1, 5)), 0.8)}  # fmt: skip
    floats = some_floats(rng, width, tables, vectors, rows)
    for name in ("gamma", "beta"):
        if rng.random() < 0.25:
            del floats[name]
    ids = some_ids(rng, shape, rows, least=int(rng.choice([0, 0, -1])))
    for name in ("position_ids", "token_type_ids"):
        if name in ids and rng.random() < 0.4:
            del ids[name]
    blocks = [(power_of_two(rng, 8), max(8, power_of_two(rng, 512)), power_of_two(rng, 4)) for _ in range(3)]
    backward = GradientConfig(*blocks[1][:2], int(rng.integers(1, 9)), blocks[1][2])
    monkeypatch.setattr(kernel, "CHUNK", power_of_two(rng, 64))
    monkeypatch.setattr(tuning_rows, "layer_norm", lambda *_: RowConfig(*blocks[0]))
    monkeypatch.setattr(tuning_rows, "layer_norm_backward", lambda *_: backward)
    monkeypatch.setattr(tuning_rows, "embeddings_sums", lambda *_: RowConfig(*blocks[2]))
    dtype = some(rng, jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"]))))
    rate = float(rng.choice([0.0, 0.1, 0.6]))
    check_op(floats, ids, seed, dtype=dtype, epsilon=float(rng.choice([1e-12, 1e-6, 0.3])), rate=rate)


# --- Errors ------------------------------------------------------------------------------------------------------

TABLE, VECTOR, SOME_IDS = jnp.ones((6, 8)), jnp.ones((8,)), jnp.zeros((2, 5), jnp.int32)
GOOD = {"input_ids": SOME_IDS, "word": TABLE, "position": TABLE, "token_type": TABLE, "gamma": VECTOR, "beta": VECTOR}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": [1]}, TypeError, "input_ids must be an array, got list"),
        ({"input_ids": jnp.ones((2, 5))}, TypeError, "input_ids must be an array of integers, got float32"),
        ({"input_ids": jnp.ones((2, 5), bool)}, TypeError, "input_ids must be an array of integers, got bool"),
        ({"input_ids": jnp.int32(1)}, ValueError, "input_ids must have at least one dimension, got a scalar"),
        ({"word": None}, TypeError, "word must be an array, got NoneType"),
        ({"word": jnp.ones((6, 8), jnp.int32)}, TypeError, "word must be an array of floats, got int32"),
        ({"word": VECTOR}, ValueError, "word must have shape [rows, D], rows > 0, got (8,)"),
        ({"word": jnp.ones((0, 8))}, ValueError, "word must have shape [rows, D], rows > 0, got (0, 8)"),
        ({"position": None}, TypeError, "position must be an array, got NoneType"),
        ({"position": jnp.ones((6, 7))}, ValueError, "position must have the width of word, 8, got 7"),
        ({"position": jnp.ones((1, 6, 8))}, ValueError, "position must have shape [rows, D], rows > 0, got (1, 6, 8)"),
        ({"position": jnp.ones((4, 8))}, ValueError, "position must have a row for each of the 5 tokens of a sequence"
         " where there are no position_ids, got 4"),
        ({"token_type": jnp.ones((2, 9))}, ValueError, "token_type must have the width of word, 8, got 9"),
        ({"token_type": jnp.ones((0, 8))}, ValueError, "token_type must have shape [rows, D], rows > 0, got (0, 8)"),
        ({"token_type": jnp.ones((2, 8), bool)}, TypeError, "token_type must be an array of floats, got bool"),
        ({"token_type": None, "token_type_ids": SOME_IDS}, ValueError,
         "token_type must be an array where there are token_type_ids, got None"),
        ({"token_type_ids": SOME_IDS[0]}, ValueError, "token_type_ids must have shape (2, 5), got (5,)"),
        ({"token_type_ids": TABLE}, TypeError, "token_type_ids must be an array of integers, got float32"),
        ({"position_ids": SOME_IDS[:1]}, ValueError, "position_ids must have shape (2, 5), got (1, 5)"),
        ({"position_ids": 3}, TypeError, "position_ids must be an array, got int"),
        ({"gamma": jnp.ones((7,))}, ValueError, "gamma must have shape (8,), got (7,)"),
        ({"gamma": 1.0}, TypeError, "gamma must be an array, got float"),
        ({"beta": jnp.ones((8,), bool)}, TypeError, "beta must be an array of floats, got bool"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be positive, got 0.0"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must be finite, got nan"),
        ({"epsilon": "1e-6"}, TypeError, "epsilon must be a Python number, got str"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate is 0.1, so dropout_rng must be a JAX random key, got None"),
        ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be in [0, 1), got 1.0"),
        ({"dropout_rate": None}, TypeError, "dropout_rate must be a Python number, got NoneType"),
        ({"dropout_rng": 3}, TypeError, "dropout_rng must be one JAX random key (jax.random.key), got int"),
        ({"dtype": jnp.int32}, TypeError, "dtype must be one of floats, got int32"),
        ({"dtype": "bfloat17"}, TypeError, "dtype must be one of floats, got 'bfloat17'"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None or one of ('triton', 'mosaic_gpu',"
         " 'cudnn', 'xla'), got 'cuda'"),
        ({"implementation": "cudnn"}, NotImplementedError,
         "there is no 'cudnn' implementation, only ('triton', 'xla')"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=re.escape(f"embeddings_layer_norm: {message}")):
        jaxft.embeddings_layer_norm(**{**GOOD, **changes})


@pytest.mark.parametrize("name", ["word", "position", "token_type", "gamma", "beta", "dtype"])
def test_kernel_refuses_float64_by_name(name):
    with jax.enable_x64(True):
        wide = {name: jnp.float64 if name == "dtype" else jnp.ones(GOOD[name].shape, jnp.float64)}
        message = f"'triton' cannot be used: {name} is float64, the kernels take float32, float16 and bfloat16"
        with pytest.raises(NotImplementedError, match=message):
            jaxft.embeddings_layer_norm(**{**GOOD, **wide}, implementation="triton")


@pytest.mark.parametrize(("name", "shape"), [("input_ids", (2**30 + 1,)), ("word", (2**30 + 1, 8))])
def test_kernel_refuses_sizes_beyond_32_bits(name, shape):
    given = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in GOOD.items()}
    given |= {name: jax.ShapeDtypeStruct(shape, GOOD[name].dtype)}
    given["position_ids"] = given["input_ids"]
    with pytest.raises(NotImplementedError, match=f"{name} has {2**30 + 1} rows or columns, .* at most 2\\^30"):
        jax.eval_shape(lambda f: jaxft.embeddings_layer_norm(**f, implementation="triton"), given)


def test_nvidia_takes_the_kernel():
    """An NVIDIA GPU takes the kernel, other devices take XLA."""
    for target, expected in ((True, True), (False, not INTERPRET)):
        jaxpr = functools.partial(jax.make_jaxpr(lambda f: jaxft.embeddings_layer_norm(**f)), GOOD)
        if target:
            with dispatch.target():
                assert ("pallas_call" in str(jaxpr())) == expected
        else:
            assert ("pallas_call" in str(jaxpr())) == expected
