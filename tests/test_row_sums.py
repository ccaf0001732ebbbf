"""Sums over rows: more programs than one pass adds up, and partial sums in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from cases import INTERPRET, jit, normal
from checked import checked
from jaxft.kernels.triton import bias_activation, common, gated_activation, layer_norm, permute
from jaxft.tuning.table import GradientConfig


def test_a_program_adds_up_at_most_128_blocks():
    """A longer chain of additions would lose digits."""
    for blocks in (1, 100, 128, 129, 10_000):
        for programs in (1, 4, 1000):
            count = common.share(programs, blocks)
            assert 1 <= count <= blocks and -(-blocks // count) <= 128 and count >= min(programs, blocks)


def integers(rng, *shape):
    """Returns float32 integers, whose sums are exact in any order."""
    return jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)


def test_sums_of_more_rows_than_one_pass_adds(monkeypatch):
    """Rows and width above 8,192 give more partial sums than a program reads at a time."""
    rng = np.random.default_rng(0)
    partial = integers(rng, 2 * layer_norm._SUM_ROWS + 77, 2, 40)
    sums = jit(lambda x: layer_norm._sum_over_programs(x, [jnp.float32, jnp.bfloat16], INTERPRET))(partial)
    expected = np.asarray(partial).sum(axis=0)
    np.testing.assert_array_equal(sums[0], expected[0])
    np.testing.assert_array_equal(sums[1], expected[1].astype(jnp.bfloat16))

    with checked():  # three programs, of a block of four
        layer_norm._sum_over_programs(jnp.ones((3, 2, 5)), [jnp.float32] * 2, interpret=True)

    monkeypatch.setattr(layer_norm, "_SUM_ROWS", 8)
    rows = 21  # each row is a block and has two chunks
    dy, x, saved = integers(rng, rows, 20), integers(rng, rows, 20), jnp.stack([jnp.zeros(rows), jnp.ones(rows)])

    def gradient(dy, x, saved):
        vectors = dict.fromkeys(("gamma", "beta"), jnp.float32)
        options = {"dropout_rate": 0.0, "config": GradientConfig(1, 16, 1, 1), "interpret": INTERPRET}
        return layer_norm.backward(dy, None, x, None, None, jnp.ones(20), None, saved, vectors=vectors, **options)[2]

    found = jit(gradient)(dy, x, saved)
    np.testing.assert_array_equal(found["gamma"], np.sum(dy * x, axis=0))
    np.testing.assert_array_equal(found["beta"], np.sum(dy, axis=0))

    for rows in (1, 20, 70_000):
        x = integers(rng, rows, 5)
        got = jit(lambda x: bias_activation.sum_of_rows(x, interpret=INTERPRET))(x)
        np.testing.assert_array_equal(got, np.asarray(x).sum(axis=0))


def of_bias_activation(dy, programs):
    config = GradientConfig(1, 4, programs, 1)
    options = {"activation": "relu", "config": config, "interpret": INTERPRET}
    return bias_activation.backward(dy, jnp.ones_like(dy), jnp.zeros(4, dy.dtype), **options)[1]


def of_gated_activation(dy, programs):
    """The gate is 1, so that the gradient of the other half is dy."""
    x, config = jnp.ones((len(dy), 8), dy.dtype), GradientConfig(1, 4, programs, 1)
    options = {"activation": "relu", "gate": "first", "config": config, "interpret": INTERPRET}
    return gated_activation.backward(dy, x, jnp.zeros(8, dy.dtype), **options)[1][4:]


def of_layer_norm(dy, programs):
    saved, config = jnp.zeros((2, len(dy))), GradientConfig(1, 4, programs, 1)
    options = {"dropout_rate": 0.0, "config": config, "interpret": INTERPRET}
    vectors = {"beta": dy.dtype}
    return layer_norm.backward(dy, None, dy, None, None, None, None, saved, vectors=vectors, **options)[2]["beta"]


def of_split_heads(dy, programs):
    parts, config = [dy[None, None]] * 3, GradientConfig(1, 4, programs, 1)
    _, sums = permute.join_heads(parts, with_sums=True, config=config, interpret=INTERPRET)
    return jnp.sum(sums, axis=0)[:4].astype(dy.dtype)


@pytest.mark.parametrize("gradient", [of_bias_activation, of_gated_activation, of_layer_norm, of_split_heads])
def test_partial_sums_are_float32(gradient):
    """Two programs share the rows. Their sums are 100.78125, which bfloat16 does not have, and -100."""
    rows = jnp.where(jnp.arange(200) % 2 == 0, 1.0078125, -1.0).astype(jnp.bfloat16)
    got = jit(lambda dy: gradient(dy, 2))(jnp.broadcast_to(rows[:, None], (200, 4)))
    np.testing.assert_array_equal(got, jnp.full(4, 0.78125, jnp.bfloat16))


def test_partial_sums_of_a_shared_bias_are_float32():
    """The gradients of two sequences nearly cancel, so the rest shows how their sum was rounded."""
    rng = np.random.default_rng(1)
    one = normal(rng, jnp.bfloat16, query=(1, 16, 1, 16), key=(1, 16, 1, 16), value=(1, 16, 1, 16), dout=(1, 16, 1, 16))
    floats = {name: jnp.concatenate([x, -x * 1.0078125 if name == "dout" else x]) for name, x in one.items()}
    dout = floats.pop("dout")

    def gradient(bias, implementation):
        def attend(bias):
            return jaxft.dot_product_attention(**floats, bias=bias, implementation=implementation)

        return jax.vjp(attend, bias)[1](dout)[0]

    got = jit(lambda bias: gradient(bias, "triton"))(jnp.zeros((1, 1, 16, 16), jnp.bfloat16))
    wide = jit(lambda bias: gradient(bias, "triton"))(jnp.zeros((1, 1, 16, 16), jnp.float32))
    np.testing.assert_allclose(got.astype(jnp.float32), wide, rtol=2**-7, atol=1e-6)
