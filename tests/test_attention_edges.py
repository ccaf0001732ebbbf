"""Attention at its edges: blocks without masks, padding queries, every shape of a bias, windows beyond int32."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import check, in_float64, jit, normal, random_cotangents, slow_cases, value_and_gradients
from compare import assert_matches_oracle
from jaxft import reference
from test_attention import check_op
from test_attention_gradients import allowed_pairs, check_padding_of


def separate(rng, b, t, s, n, h, dtype=jnp.float32):
    return normal(rng, dtype, query=(b, t, n, h), key=(b, s, n, h), value=(b, s, n, h))


@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    [((1, 1, 64, 64), 16, jnp.float32), ((1, 1, 64, 1), 64, jnp.bfloat16),
     *slow_cases(((1, 1, 64, 64), 64, jnp.bfloat16), ((1, 1, 64, 1), 16, jnp.float32))],
    ids=str,
)  # fmt: skip
def test_bias_rows_of_minus_infinity(shape, block, dtype, blocks):
    """The blocks are full and need no mask: only the bias says that some rows attend to nothing."""
    blocks(*[(block, block)] * 3)
    rng = np.random.default_rng(0)
    floats, bias = separate(rng, 1, 64, 64, 1, 16, dtype), rng.standard_normal(shape).astype(np.float32)
    bias[:, :, [0, 5, 63]] = -np.inf
    finite = np.where(np.isfinite(bias), bias, 0.0)
    options = {"return_residual": True}

    def attend(implementation, bias=bias, **floats):
        return jaxft.dot_product_attention(**floats, bias=bias, implementation=implementation, **options)

    def plain(**floats):
        mask = jnp.isfinite(bias)
        return reference.dot_product_attention(**floats, bias=jnp.asarray(finite), mask=mask, **options)

    check(attend, plain, functools.partial(oracle.dot_product_attention, bias=bias, **options), floats)
    run = value_and_gradients(lambda bias: attend("triton", bias, **floats)[0])
    gradient = np.asarray(run({"bias": jnp.asarray(bias)}, floats["value"])[1]["bias"])
    assert np.isfinite(gradient).all() and (gradient[~np.isfinite(bias)] == 0.0).all()


LENGTHS = np.array([32, 64, 0], np.int32)
UPPER = np.arange(64)[:, None] >= 32  # the padding queries of the first sequence
LOWER = np.broadcast_to(np.arange(64) // 32, (3, 64)).astype(np.int32)
RULES = {
    "causal": {"is_causal": True},
    "pairs": {"mask": (UPPER | (np.arange(64) < 30))[None, None]},
    "window": {"local_window_size": (9, 3)},
    "segments": {"query_segment_ids": LOWER, "key_value_segment_ids": LOWER},
}


@pytest.mark.parametrize(
    ("name", "block"),
    [("causal", 16), ("pairs", 64), *slow_cases(("pairs", 16), *((name, 64) for name in RULES if name != "pairs"),
     ("window", 16), ("segments", 16))],
)  # fmt: skip
def test_values_seen_by_padding_queries_only(name, block, blocks):
    """Keys and values that only padding queries attend to may hold NaN, and so may those queries."""
    blocks(*[(block, block)] * 3)
    options = RULES[name] | {"query_seq_lengths": LENGTHS}
    check_padding_of(options, allowed_pairs((3, 2, 64, 64), **{"mask": None} | options)[:, 0])


FULL_BLOCKS = {
    "keys": {"mask": np.arange(64) % 3 > np.array([0, 1])[:, None, None, None]},
    "pairs": {"mask": (np.arange(64)[:, None] * np.arange(64) % 5 > 1)[None, None]},
    "lengths": {"key_value_seq_lengths": np.array([32, 33], np.int32)},
    "before": {"local_window_size": (40, 64)},
    "after": {"local_window_size": (64, 40)},
    "segments": {f"{side}_segment_ids": np.array([[0] * 8 + [1] * 56, [0] * 50 + [7] * 14], np.int32)
                 for side in ("query", "key_value")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "block"),
    [("keys", 64), ("pairs", 64), ("before", 16), ("after", 16), ("segments", 16),
     *slow_cases(("lengths", 64), ("before", 64), ("segments", 64), ("keys", 16), ("pairs", 16), ("lengths", 16))],
)  # fmt: skip
def test_blocks_that_positions_fill(name, block, blocks):
    """All blocks have only positions that exist, so that a rule alone says which of them need a mask."""
    blocks(*[(block, block)] * 3)
    floats = separate(np.random.default_rng(0), 2, 64, 64, 1, 16)
    check_op(floats, **FULL_BLOCKS[name])


B, N, T, S = 2, 2, 18, 20
EVERY = list(itertools.product((1, B), (1, N), (1, T), (1, S)))
SOME = [(1, N, T, S), (B, 1, 1, S), (1, 1, T, 1)]  # each has its own way through the kernels


@pytest.mark.parametrize(
    ("shape", "block"),
    [*((shape, 16) for shape in SOME), ((1, N, 1, S), 32),
     *slow_cases(*((shape, block) for shape in EVERY for block in (16, 32)
                   if (shape, block) not in [*((shape, 16) for shape in SOME), ((1, N, 1, S), 32)]))],
    ids=str,
)  # fmt: skip
def test_bias_gradients_of_every_shape(shape, block, blocks):
    """The log-sum-exp has a gradient, and some queries are padding or attend to nothing.

    With a bias for each key there is no mask of pairs, so that some blocks need no mask.
    """
    blocks(*[(block, block)] * 3)
    rng = np.random.default_rng(1)
    mask = rng.random((B, 1, T, 1)) < 0.8
    options = {
        "mask": mask if shape[3] == 1 or shape[2] > 1 else None,
        "query_seq_lengths": np.array([T - 3, T], np.int32),
        "key_value_seq_lengths": np.array([S, S - 6], np.int32),
        "return_residual": True,
    }
    floats = separate(rng, B, T, S, N, 8) | normal(rng, jnp.float32, bias=shape)

    def run(op):
        return value_and_gradients(lambda **floats: op(**floats, **options))

    plain = run(reference.dot_product_attention)
    cotangents = random_cotangents(lambda **floats: reference.dot_product_attention(**floats, **options), floats)
    (_, got) = run(functools.partial(jaxft.dot_product_attention, implementation="triton"))(floats, cotangents)
    (_, expected), (_, exact) = plain(floats, cotangents), in_float64(plain, floats, cotangents)
    assert_matches_oracle(got, expected, exact)


@pytest.mark.parametrize("lse", [False, True])
def test_second_derivatives_with_a_bias(lse):
    """They are those of plain jnp, for the bias and through the log-sum-exp too."""
    floats = separate(np.random.default_rng(4), 1, 5, 6, 2, 8)
    floats["bias"] = jnp.linspace(-1.0, 1.0, 12).reshape(1, 2, 1, 6)
    options = {"key_value_seq_lengths": np.array([4], np.int32), "return_residual": lse}

    def twice(implementation):
        def loss(floats):
            out = jaxft.dot_product_attention(**floats, **options, implementation=implementation)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out))

        return jit(jax.grad(lambda f: sum(jnp.sum(g * g) for g in jax.tree.leaves(jax.grad(loss)(f)))))(floats)

    chex.assert_trees_all_close(twice("triton"), twice("xla"), rtol=1e-4, atol=1e-5)


WINDOWS = [(T - 2, S - 2), (T - 1, 0), (2**31 - 1, 2**31 - 1), *((2**n, 0) for n in (30, 31, 32, 63)), (0, 2**64)]


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_windows_at_the_edge(implementation):
    """Windows that leave out one pair, and windows beyond int32, which wrap around to nothing."""
    floats = separate(np.random.default_rng(2), 1, T, S, 1, 8)
    for window in WINDOWS:
        run = functools.partial(jaxft.dot_product_attention, local_window_size=window, implementation=implementation)
        got = jit(lambda floats, run=run: run(**floats))(floats)
        exact = oracle.dot_product_attention(**floats, local_window_size=window)
        np.testing.assert_allclose(got, exact, atol=1e-6, rtol=1e-5, err_msg=str(window))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_integers_at_the_edge(implementation):
    """The least and the largest int32 are lengths and ids like others, and what lies beyond is refused by name."""
    floats = separate(np.random.default_rng(3), 2, T, S, 1, 8)
    run = functools.partial(jaxft.dot_product_attention, **floats, implementation=implementation)
    least, most = -(2**31), 2**31 - 1
    for edge, same in (([most, 3], [S, 3]), ([least, S], [0, S])):
        got, expected = (run(key_value_seq_lengths=np.array(lengths, np.int64)) for lengths in (edge, same))
        np.testing.assert_array_equal(got, expected)
    places = np.arange(2 * (T + S)) % 3 // 2
    for low, high in ((least, most), (most, least)):
        ids = np.where(places, high, low).astype(np.int64)
        sides = ids[: 2 * T].reshape(2, T), ids[2 * T :].reshape(2, S)
        plain = places[: 2 * T].reshape(2, T), places[2 * T :].reshape(2, S)
        got, expected = (run(query_segment_ids=q, key_value_segment_ids=k) for q, k in (sides, plain))
        np.testing.assert_array_equal(got, expected)
    for beyond in (most + 1, least - 1):
        with pytest.raises(ValueError, match=f"key_value_seq_lengths must fit int32, got {beyond}"):
            run(key_value_seq_lengths=np.array([beyond, 3], np.int64))
        with pytest.raises(ValueError, match=f"query_segment_ids must fit int32, got {beyond}"):
            run(query_segment_ids=np.full((2, T), beyond), key_value_segment_ids=np.zeros((2, S), np.int32))
