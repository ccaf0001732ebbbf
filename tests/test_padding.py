"""remove_padding and restore_padding: values against NumPy, gradients, and what happens to tokens that do not fit."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cases import seeds
from checked import checked
from jaxft import remove_padding, restore_padding
from jaxft.kernels.triton import padding as kernel

DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint16", "bool", "complex64"]
SPOILT = [("float32", np.nan), ("bfloat16", np.nan), ("complex64", np.nan), ("int32", -1), ("int8", -1),
          ("uint16", 2**16 - 1), ("bool", True)]  # fmt: skip
MASK = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)  # 8 tokens
TOKENS = 8


def random_array(rng, shape, dtype):
    return jnp.asarray(rng.integers(0, 100, shape)).astype(dtype)


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def packed_by_hand(x, mask, capacity):
    """Returns (x, indices, cu_seqlens) of `remove_padding`, token by token."""
    rows, indices, cu_seqlens = [], [], [0]
    for b, t in np.ndindex(mask.shape):
        if mask[b, t]:
            rows.append(np.asarray(x)[b, t])
            indices.append(b * mask.shape[1] + t)
    for row in mask:
        cu_seqlens.append(cu_seqlens[-1] + int(row.sum()))
    out = np.zeros((capacity, *x.shape[2:]), x.dtype)
    out[: len(rows)] = np.reshape(rows, (len(rows), *x.shape[2:]))
    return out, indices + [mask.size] * (capacity - len(indices)), cu_seqlens


def is_spoilt(x, value):
    return np.isnan(x).all() if value is np.nan else (np.asarray(x) == value).all()


# --- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(8))
def test_random(seed):
    rng = np.random.default_rng(seed)
    batch, length = rng.integers(0, 6, 2)
    shape = (batch, length, *rng.integers(0, 5, rng.integers(0, 3)))
    mask = rng.random((batch, length)) < rng.choice([0.0, 0.5, 1.0])
    x = random_array(rng, shape, rng.choice(DTYPES))
    capacity = max(1, int(mask.sum()) + int(rng.integers(0, 4)))
    mapped = jax.jit(lambda x, mask: remove_padding(x, mask, capacity=capacity))
    for packed in (remove_padding(x, mask, capacity=capacity), mapped(x, mask)):
        rows, indices, cu_seqlens = packed_by_hand(x, mask, capacity)
        assert packed.x.dtype == x.dtype
        assert packed.indices.dtype == packed.cu_seqlens.dtype == jnp.int32
        np.testing.assert_array_equal(packed.x, rows)
        assert packed.indices.tolist() == indices
        assert packed.cu_seqlens.tolist() == cu_seqlens
    keep = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
    restored = restore_padding(packed.x, packed.indices, batch=int(batch), length=int(length))
    assert restored.dtype == x.dtype
    np.testing.assert_array_equal(restored, np.where(keep, x, np.zeros((), x.dtype)))


def test_padding_reaches_nothing():
    x = jnp.where(MASK[..., None], normal((3, 5, 2)), jnp.nan)
    packed = remove_padding(x, MASK, capacity=TOKENS + 2)
    assert np.isfinite(packed.x).all()
    unused = packed.x.at[TOKENS:].set(jnp.nan)
    np.testing.assert_array_equal(
        restore_padding(unused, packed.indices, batch=3, length=5), jnp.where(MASK[..., None], x, 0.0)
    )


def test_restore_accepts_rows_in_any_order():
    x = normal((3, 2))
    expected = np.zeros((6, 2), np.float32)
    expected[[4, 0]] = x[:2]
    got = restore_padding(x, np.array([4, 0, 9], np.int64), batch=2, length=3)
    np.testing.assert_array_equal(got, expected.reshape(2, 3, 2))


@pytest.mark.parametrize("seed", seeds(6))
def test_kernel(seed):
    """Kernel and gathers are bitwise equal, and so are their gradients, also if tokens do not fit."""
    rng = np.random.default_rng(seed)
    batch, length = map(int, rng.integers(1, 9, 2))
    mask = rng.random((batch, length)) < rng.choice([0.0, 0.5, 1.0])
    dtype = rng.choice(["float32", "float16", "bfloat16"])
    x = jnp.asarray(rng.standard_normal((batch, length, *[(16,), (3, 17), (300,)][seed % 3])), dtype)
    capacity = max(1, int(mask.sum()) + int(rng.integers(-1, 4)))

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, mask, implementation):
        def there_and_back(x):
            packed = remove_padding(x, mask, capacity=capacity, implementation=implementation)
            options = {"batch": batch, "length": length, "implementation": implementation}
            return packed.x, restore_padding(packed.x, packed.indices, **options)

        out, pull_back = jax.vjp(there_and_back, x)
        return out, pull_back(out)

    got, expected = (run(x, mask, implementation) for implementation in ("triton", "xla"))
    assert "take_rows" in str(jax.make_jaxpr(run, static_argnums=2)(x, mask, "triton"))
    chex.assert_trees_all_equal(got, expected)


def test_kernel_stays_within_the_arrays():
    """There are two blocks of columns and three of rows, of which the last are not full."""
    x, indices = normal((9, 300)), jnp.array([3, 8, 9, 0, -1, 5, 2**31 - 1, 1, 1, 7, -5, *range(8)], jnp.int32)
    with checked():
        got = kernel.take_rows(x, indices, interpret=True)
    expected = np.where(indices[:, None] < 0, np.nan, 0.0) + np.zeros((1, 300), np.float32)
    known = (np.asarray(indices) >= 0) & (np.asarray(indices) < 9)
    expected[known] = np.asarray(x)[np.asarray(indices)[known]]
    np.testing.assert_array_equal(got, expected)


def test_kernel_takes_rows_of_32_bytes_and_2_30_places():
    for dtype, width, accepted in ((jnp.bfloat16, 16, True), (jnp.float32, 8, True), (jnp.float32, 7, False)):
        assert (kernel.unsupported(jax.ShapeDtypeStruct((5, width), dtype), 4) is None) == accepted
    for rows, places, accepted in ((2**30, 2**30, True), (2**30 + 1, 1, False), (1, 2**30 + 1, False)):
        assert (kernel.unsupported(jax.ShapeDtypeStruct((rows, 16), jnp.float32), places) is None) == accepted


# --- More tokens than fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [MASK, jnp.asarray(MASK)], ids=["numpy", "jax"])
def test_overflow_outside_jit_raises(mask):
    def run(x, capacity):  # jit below has no mask argument, so its values are known there
        return remove_padding(x, mask, capacity=capacity)

    for call in (run, jax.jit(run, static_argnums=1)):
        call(normal((3, 5)), TOKENS)
        with pytest.raises(ValueError, match="remove_padding: mask must .* as many tokens as capacity, 7, got 8"):
            call(normal((3, 5)), TOKENS - 1)


@pytest.mark.parametrize(("dtype", "value"), SPOILT)
def test_overflow_under_jit_spoils_everything(dtype, value):
    x = random_array(np.random.default_rng(0), (3, 5, 2), dtype)

    @jax.jit
    def there_and_back(x, mask):
        packed = remove_padding(x, mask, capacity=TOKENS - 1)
        return packed, restore_padding(packed.x, packed.indices, batch=3, length=5)

    packed, restored = there_and_back(x, MASK)
    assert is_spoilt(packed.x, value) and is_spoilt(restored, value)
    assert (packed.indices == -1).all()
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 8]
    fewer = MASK.copy()
    fewer[2, 4] = False
    packed, restored = there_and_back(x, fewer)
    np.testing.assert_array_equal(packed.x, x[fewer])
    np.testing.assert_array_equal(restored[fewer], x[fewer])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_beyond_the_capacity(dtype):
    """One token too many spoils every row, there and back, and every gradient."""
    x = normal((3, 5, 16)).astype(dtype)

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, mask, capacity):
        def there_and_back(x):
            packed = remove_padding(x, mask, capacity=capacity, implementation="triton")
            return packed.x, restore_padding(packed.x, packed.indices, batch=3, length=5, implementation="triton")

        out, pull_back = jax.vjp(there_and_back, x)
        return *out, *pull_back(out)

    assert all(np.isnan(y.astype(jnp.float32)).all() for y in run(x, MASK, TOKENS - 1))
    packed, restored, gradient = run(x, MASK, TOKENS)
    np.testing.assert_array_equal(packed, x[MASK])
    np.testing.assert_array_equal(restored, jnp.where(MASK[..., None], x, 0))
    assert np.isfinite(gradient.astype(jnp.float32)).all()


def test_overflow_spoils_the_gradient():
    """The gradient is spoilt even if the result does not show it, as behind a comparison."""

    def loss(x, mask):
        packed = remove_padding(x, mask, capacity=TOKENS - 1)
        return jnp.sum(restore_padding(packed.x * 2.0, packed.indices, batch=3, length=5))

    assert np.isnan(jax.jit(jax.grad(loss))(normal((3, 5, 2)), MASK)).all()


def test_overflow_in_vmap_spoils_one_row():
    x, masks = normal((2, 3, 5)), jnp.stack([MASK, MASK & (np.arange(5) < 3)])

    def run(x, mask):
        packed = remove_padding(x, mask, capacity=TOKENS - 1)
        return packed.x, restore_padding(packed.x, packed.indices, batch=3, length=5)

    packed, restored = jax.vmap(run)(x, masks)
    assert np.isnan(packed[0]).all() and np.isnan(restored[0]).all()
    np.testing.assert_array_equal(packed[1], packed_by_hand(x[1], np.asarray(masks[1]), TOKENS - 1)[0])
    np.testing.assert_array_equal(restored[1], jnp.where(masks[1], x[1], 0.0))


# --- Gradients ---------------------------------------------------------------------------------------------------


def test_gradients():
    x, rows = normal((3, 5, 2)), normal((TOKENS + 2, 2), 1)
    packed, pull_back = jax.vjp(lambda x: remove_padding(x, MASK, capacity=TOKENS + 2).x, x)
    expected = np.zeros(x.shape, np.float32)
    expected[MASK] = rows[:TOKENS]
    np.testing.assert_array_equal(pull_back(rows)[0], expected)

    indices = remove_padding(x, MASK, capacity=TOKENS + 2).indices
    _, pull_back = jax.vjp(lambda rows: restore_padding(rows, indices, batch=3, length=5), rows)
    np.testing.assert_array_equal(pull_back(x)[0], packed)


def test_second_derivatives():
    x = normal((3, 5))

    def loss(x):
        packed = remove_padding(x, MASK, capacity=TOKENS + 2)
        return jnp.sum(restore_padding(packed.x**3, packed.indices, batch=3, length=5) ** 2)

    def directional(x):
        return jnp.sum(jax.grad(loss)(x) * 0.5)

    np.testing.assert_allclose(jax.grad(loss)(x), np.where(MASK, 6 * x**5, 0), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(directional))(x), np.where(MASK, 15 * x**4, 0), rtol=1e-5)


def test_integers_beside_floats_have_no_gradient():
    def loss(x, ids):
        packed, ids = (remove_padding(a, MASK, capacity=TOKENS) for a in (x, ids))
        back = restore_padding(ids.x, ids.indices, batch=3, length=5)
        return jnp.sum(packed.x * ids.x.astype(jnp.float32)) + jnp.sum(x * back.astype(jnp.float32))

    ids = jnp.arange(15).reshape(3, 5)
    gradient, none = jax.grad(loss, (0, 1), allow_int=True)(normal((3, 5)), ids)
    np.testing.assert_array_equal(gradient, np.where(MASK, 2 * ids, 0).astype(np.float32))
    assert none.dtype == jax.dtypes.float0


def test_only_integers_are_scattered():
    def loss(x, mask):
        packed = remove_padding(x, mask, capacity=TOKENS)
        return jnp.sum(restore_padding(packed.x**2, packed.indices, batch=3, length=5) ** 2)

    text = str(jax.make_jaxpr(jax.grad(lambda x, mask: jnp.sum(jax.grad(loss)(x, mask))))(normal((3, 5, 2)), MASK))
    scattered = re.findall(r":(\w+)\[[^]]*\] = scatter", text)
    assert scattered and set(scattered) == {"i32"}


def test_masks_of_a_shard_map():
    """Each device packs its own sequences."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def run(x, mask):
        packed = remove_padding(x, mask, capacity=TOKENS)
        return restore_padding(packed.x, packed.indices, batch=len(x), length=5)

    for specs in ((P("data"), P("data")), (P(), P("data"))):
        sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"))
        gradient = jax.jit(jax.grad(lambda x, mask, f=sharded: jnp.sum(f(x, mask) ** 2)))
        x = normal((3, 5))
        np.testing.assert_array_equal(gradient(x, MASK), jnp.where(MASK, 2.0 * x, 0.0))


# --- Errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x must be an array, got list"),
        ({"x": np.zeros((3, 4, 2))}, ValueError, r"x must have shape \[B, T, ...\] .* \(3, 5\), got \(3, 4, 2\)"),
        ({"x": np.zeros(3)}, ValueError, r"x must have shape .* got \(3,\)"),
        ({"mask": MASK.astype(np.int32)}, TypeError, "mask must be boolean .* got int32; write mask != 0"),
        ({"mask": MASK[0]}, ValueError, r"mask must have shape \[B, T\], got \(5,\)"),
        ({"capacity": 0}, ValueError, "capacity must be a positive Python integer, got 0"),
        ({"capacity": 8.0}, ValueError, "capacity must be a positive Python integer, got 8.0"),
        ({"capacity": True}, ValueError, "capacity must be a positive Python integer, got True"),
        ({"implementation": "triton"}, NotImplementedError, ".* a row of x has 8 bytes, the kernel is for rows of at"),
        ({"implementation": "triton", "x": np.zeros((3, 5, 9), np.int32)}, NotImplementedError, ".* x is int32, the"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "there is no 'mosaic_gpu' implementation"),
    ],
)
def test_wrong_arguments_of_remove_padding(change, error, message):
    arguments = {"x": np.zeros((3, 5, 2), np.float32), "mask": MASK, "capacity": 8} | change
    with pytest.raises(error, match=f"remove_padding: {message}"):
        remove_padding(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 1.0}, TypeError, "x must be an array, got float"),
        ({"x": np.float32(1)}, ValueError, r"x must have shape \[M, ...\], got a scalar"),
        ({"indices": np.zeros(4, np.float32)}, TypeError, "indices must be an array of integers, got float32"),
        ({"indices": np.zeros(3, np.int32)}, ValueError, r"indices must have shape \(4,\), got \(3,\)"),
        ({"batch": -1}, ValueError, "batch must be a Python integer >= 0, got -1"),
        ({"length": 5.0}, ValueError, "length must be a Python integer >= 0, got 5.0"),
    ],
)
def test_wrong_arguments_of_restore_padding(change, error, message):
    arguments = {"x": np.zeros((4, 2), np.float32), "indices": np.arange(4), "batch": 3, "length": 5} | change
    with pytest.raises(error, match=f"restore_padding: {message}"):
        restore_padding(**arguments)


def test_complex_infinities_are_moved_as_they_are():
    x = jnp.full((1, 2), complex(np.inf, 1))
    with jax.debug_nans(True):
        np.testing.assert_array_equal(remove_padding(x, np.array([[True, False]]), capacity=1).x, x[0, :1])


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_rows_may_have_no_places(implementation):
    x, nowhere = jnp.ones((3, 16)), jnp.full(3, -1)
    y = restore_padding(x, nowhere, batch=0, length=5, implementation=implementation)
    assert y.shape == (0, 5, 16)
