"""The keep mask of dropout: a fair draw, and a pure function of (key, element index)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import reference
from jaxft.dropout import dropout_mask

SIGMAS = 5.0  # a fair mask fails one of these statistics less than once in a million keys


def assert_fair(successes, trials, chance):
    """Asserts that each of `successes` could be the count of `trials` independent draws of `chance`."""
    away = np.abs(np.asarray(successes) - trials * chance) / np.sqrt(trials * chance * (1.0 - chance))
    assert away.max() < SIGMAS, f"{away.max():.1f} standard deviations from the expected {trials * chance}"


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_rate(rate, key):
    rows, columns = 512, 768
    keep = np.asarray(dropout_mask(key, rate, (rows, columns)))
    assert keep.dtype == bool
    assert_fair(keep.sum(), keep.size, 1.0 - rate)
    for axis, trials in ((0, rows), (1, columns)):  # neither columns nor rows differ more than chance lets them
        counts = keep.sum(axis=axis)
        chi_square = (((counts - trials * (1.0 - rate)) ** 2) / (trials * rate * (1.0 - rate))).sum()
        assert abs(chi_square - counts.size) < SIGMAS * np.sqrt(2.0 * counts.size)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropped_elements_are_independent(rate, key):
    """Neighbours in a row, in a column and on the diagonals, and masks of related keys, agree by chance alone."""
    keys = [key, jax.random.key(1), *jax.random.split(key, 2), jax.random.fold_in(key, 7)]
    masks = [np.asarray(dropout_mask(k, rate, (512, 512))) for k in keys]
    first, both = masks[0], (1.0 - rate) ** 2
    shifts = ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (0, 32), (32, 0), (0, 256), (256, 0))
    pairs = [(first[down:, right:], first[: 512 - down, : 512 - right]) for down, right in shifts]
    pairs += [(first[1:, :-1], first[:-1, 1:])]
    pairs += [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    for a, b in pairs:
        # A mask against itself counts each element twice, so the variance is at most 4 times a fair coin's.
        assert_fair(((a & b).sum() - a.size * both) / 2.0 + a.size * both, a.size, both)


def test_dropout_is_a_function_of_key_and_element(key):
    mask = np.asarray(dropout_mask(key, 0.3, (2, 3, 40)))
    np.testing.assert_array_equal(mask, jax.jit(dropout_mask, static_argnums=(1, 2))(key, 0.3, (2, 3, 40)))
    np.testing.assert_array_equal(mask.reshape(6, 40), dropout_mask(key, 0.3, (6, 40)))
    np.testing.assert_array_equal(mask.reshape(6, 40)[:4, :17], dropout_mask(key, 0.3, (4, 17)))
    np.testing.assert_array_equal(mask[0, 0, :7], dropout_mask(key, 0.3, (7,)))
    assert (mask != dropout_mask(jax.random.key(1), 0.3, (2, 3, 40))).any()
    raw = jax.random.key_data(key)
    np.testing.assert_array_equal(mask, dropout_mask(raw, 0.3, (2, 3, 40)))
    assert dropout_mask(key, 0.3, (0, 5)).shape == (0, 5)


def test_every_key_generator_works():
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        keys = jax.random.split(jax.random.key(0, impl=impl), 3)
        masks = [np.asarray(dropout_mask(key, 0.5, (64, 64))) for key in keys]
        for i, mask in enumerate(masks):
            assert_fair(mask.sum(), mask.size, 0.5)
            assert_fair((mask == masks[i - 1]).sum(), mask.size, 0.5)


def test_every_word_of_a_key_counts():
    """A key of the generator "rbg" has four words."""
    words = np.arange(1, 5, dtype=np.uint32)
    key = jax.random.wrap_key_data(words, impl="rbg")
    for i in range(4):
        other = jax.random.wrap_key_data(np.where(np.arange(4) == i, words + 8, words), impl="rbg")
        assert (dropout_mask(key, 0.5, (16, 16)) != dropout_mask(other, 0.5, (16, 16))).mean() > 0.3, i


def test_dropout_keeps_the_expectation(key):
    """The mean over many keys is the input, and the mean of the gradients is the gradient."""
    keys = jax.random.split(key, 4096)
    masks = jax.vmap(lambda k: dropout_mask(k, 0.25, (3, 5)))(keys)
    assert_fair(np.asarray(masks).sum(axis=0), len(keys), 0.75)
    x = jnp.ones((3, 5))

    def summed(x):
        return reference.bias_residual_layer_norm(
            x, None, jnp.zeros_like(x), None, None, dropout_rate=0.25, dropout_rng=key, return_sum=True
        )[1]

    scaled = np.where(dropout_mask(key, 0.25, (3, 5)), np.float32(1.0 / 0.75), np.float32(0.0))
    np.testing.assert_allclose(summed(x), scaled, rtol=1e-7)
    np.testing.assert_allclose(jax.grad(lambda x: summed(x).sum())(x), scaled, rtol=1e-7)


def test_dropout_mask_is_pinned():
    """Masks of a key must not change with a release: checkpointed training runs rely on them."""

    def scramble(x, middle=0):
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15) ^ middle) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    def bits(seed, row, column):
        first = scramble((row + seed[0]) % 2**32)
        return scramble((column + first) % 2**32, middle=scramble(first ^ seed[1]))

    key = jax.random.key(42)
    seed = [scramble(int(word)) for word in jax.random.key_data(key)]
    expected = [[bits(seed, row, column) >= round(0.3 * 2**32) for column in range(50)] for row in range(20)]
    np.testing.assert_array_equal(dropout_mask(key, 0.3, (20, 50)), expected)
