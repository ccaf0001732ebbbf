"""Functions that look like what `jaxft.fuse` replaces, and are not: nothing may change. Near misses say why."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from fusion_cases import (
    ATT,
    BA,
    BRLN,
    DENSE,
    DRLN,
    EMPTY,
    FF,
    LN,
    LOSS,
    LSM,
    PAD,
    QKV,
    RMS,
    SM,
    B,
    D,
    F,
    H,
    N,
    T,
    V,
    keys,
    normal,
)  # fmt: skip
from test_fusion import standard_promotion  # noqa: F401


def mean(x):
    return x.mean(-1, keepdims=True)


def var(x):
    return x.var(-1, keepdims=True)


def swapped(rows):
    return rows.swapaxes(0, 1)


def narrow(x):  # a fake quantisation
    return x.astype(jnp.float8_e4m3fn).astype(x.dtype)


def ratio(x, of):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / of(e)


def total(e):
    return e.sum(-1, keepdims=True)


def losses(x, w):
    labels = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1)[..., 0]


MASK = jnp.arange(16).reshape(4, 4) % 3 > 0
SQUARE, TABLE, VECTOR, ROWS = (D, D), (D, V), (D,), (4, 4, D)
# A function, the shapes of its arguments, and the op that must not be found.
TRAPS = {
    "the mean of other rows": (
        lambda x: (x - swapped(mean(x))) * jax.lax.rsqrt(mean((x - swapped(mean(x))) ** 2) + 1e-5), [ROWS], LN),
    "the squared mean of other rows": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean(x * x) - swapped(mean(x)) ** 2 + 1e-5), [ROWS], LN),
    "transposed rows": (lambda x: swapped(x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5), [ROWS], LN),
    "a mean without its axis": (
        lambda x: (x - x.mean(-1)) * jax.lax.rsqrt(mean((x - x.mean(-1)) ** 2) + 1e-5), [SQUARE], LN),
    "squares of the columns": (lambda x: x * jax.lax.rsqrt(mean(x.T**2) + 1e-5), [SQUARE], RMS),
    "sums of other rows": (lambda x: ratio(x, lambda e: swapped(total(e))), [ROWS], SM),
    "logarithms of other rows": (lambda x: x - jnp.log(jnp.exp(x).sum(-1))[None], [SQUARE], LSM),
    "a transposed loss": (lambda x, w: jnp.sum(losses(x, w).T * MASK), [ROWS, TABLE], LOSS),
    "a loss several times": (lambda x, w: jnp.sum(jnp.broadcast_to(losses(x, w), (3, 4, 4))), [ROWS, TABLE], LOSS),
    "a loss in integers": (lambda x, w: jnp.sum((losses(x, w) * 9).astype(int)), [ROWS, TABLE], LOSS),
    "a loss of 5 where there is no label": (
        lambda x, w: jnp.sum(jnp.where(MASK, losses(x, w), 5)), [ROWS, TABLE], LOSS),
    "a quantised row": (lambda x: (narrow(x) - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5), [ROWS], LN),
    "a GELU of a rounded number": (lambda x: 0.5 * x * (1 + jax.lax.erf(0.7071 * x)), [ROWS], BA),
    "a quantised part of a GELU": (
        lambda x: 0.5 * x * (1 + jax.lax.erf(narrow(x / math.sqrt(2)))), [ROWS], BA),
    "squares of twice x minus the mean": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean((2 * x - mean(x)) ** 2) + 1e-5), [ROWS], LN),
    "squares of twice the mean minus x": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean((2 * mean(x) - x) ** 2) + 1e-5), [ROWS], LN),
    "squares of a shifted centre": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean((x - mean(x) + 0.5) ** 2) + 1e-5), [ROWS], LN),
    "a shifted centre": (lambda x: (x - mean(x) + 0.5) * jax.lax.rsqrt(var(x) + 1e-5), [ROWS], LN),
    "twice the squares": (lambda x: x * jax.lax.rsqrt(mean(2 * (x * x)) + 1e-5), [ROWS], RMS),
    "the square of the mean is added": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean(x * x) + mean(x) ** 2 + 1e-5), [ROWS], LN),
    "the square of another mean": (
        lambda x, y: (x - mean(x)) * jax.lax.rsqrt(mean(x * x) - mean(0.1 * y) ** 2 + 1e-5), [ROWS, ROWS], LN),
    "the variance of other rows": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(swapped(var(x)) + 1e-5), [ROWS], LN),
    "the root of other rows": (
        lambda x: (x - mean(x)) * swapped(jax.lax.rsqrt(var(x) + 1e-5)), [ROWS], LN),
    "a variance of the columns": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(((x - mean(x)) ** 2).mean(-2, keepdims=True) + 1e-5), [SQUARE], LN),
    "a variance of many columns without bias": (
        lambda x: (x - mean(x)) * jax.lax.rsqrt(x.var(-1, ddof=1, keepdims=True) + 1e-5), [(3, 1000)], LN),
    "the root of another array": (lambda x, y: y * jax.lax.rsqrt(mean(x * x) + 1e-5), [ROWS, ROWS], RMS),
    "a product with itself": (lambda x: x * x * jax.lax.rsqrt(mean(x * x) + 1e-5), [ROWS], RMS),
    "parts of twice the array": (
        lambda x: (lambda r: 2 * x * r - mean(x) * r)(jax.lax.rsqrt(var(x) + 1e-5)), [ROWS], LN),
    "parts of another mean": (
        lambda x, y: (lambda r: x * r - mean(y) * r)(jax.lax.rsqrt(var(x) + 1e-5)), [ROWS, ROWS], LN),
    "two scales": (
        lambda x, g, h: (lambda r: x * r * g - mean(x) * r * h)(jax.lax.rsqrt(var(x) + 1e-5)),
        [ROWS, VECTOR, VECTOR], LN),
    "a matmul that is used twice, before a residual": (
        lambda x, w, r: (lambda y: (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5))(x @ w + r) + jnp.sum(x @ w),
        [ROWS, SQUARE, ROWS], DRLN),
    "a matmul that is used twice, before an activation": (
        lambda x, w, b: jax.nn.gelu(x @ w + b) + jnp.sum(x @ w), [ROWS, SQUARE, VECTOR], DENSE),
    "a matmul that is used twice, before a loss": (
        lambda x, w, b: jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), jnp.arange(4)[:, None], -1))
        + jnp.sum(x @ w), [(4, D), TABLE, (V,)], LOSS),
    "a matmul of other rows": (lambda x, w: swapped(x) @ w, [ROWS, TABLE], "dot_general"),
    "a matmul of two dtypes": (
        lambda x, w: jax.nn.gelu(jax.lax.dot_general(
            x.astype(jnp.bfloat16), w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)),
        [ROWS, TABLE], "dense"),
    "a matmul with a narrower kernel": (
        lambda x, w: jax.nn.gelu(jax.lax.dot_general(
            x, w.astype(jnp.bfloat16), (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)),
        [ROWS, TABLE], "dense"),
    "a matmul with a narrower result": (
        lambda x, w, r: norm_of(r + jax.lax.dot_general(
            x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16).astype(jnp.float32)),
        [ROWS, SQUARE, ROWS], DRLN),
    "a matmul with a result of the other 16 bits": (
        lambda x, w: jax.nn.relu(jax.lax.dot_general(
            x.astype(jnp.float16), w.astype(jnp.float16), (((2,), (0,)), ((), ())),
            preferred_element_type=jnp.bfloat16)), [ROWS, TABLE], DENSE),
    "a matmul for each example": (
        lambda x, w, b: jax.nn.gelu(jnp.einsum("btd,bd->bt", x, w) + b), [ROWS, (4, D), (4,)], DENSE),
    "a matmul over the rows": (
        lambda x, w, b: jax.nn.gelu(jax.lax.dot_general(x, w, (((0,), (0,)), ((), ()))) + b),
        [SQUARE, SQUARE, VECTOR], DENSE),
    "a norm of twice an array": (lambda x: norm_of(x + x), [ROWS], "bias_residual_layer_norm"),
    "embeddings whose sum is used twice": (
        lambda w, p: (lambda x: (norm_of(x), x))(w[jnp.arange(8).reshape(2, 4)] + p), [(9, D), (4, D)],
        "embeddings_layer_norm"),
    "a loss whose rows are used twice": (
        lambda x, w: (lambda rows: jnp.sum(rows) + jnp.max(rows))(losses(x, w)), [ROWS, TABLE], LOSS),
    "a loss whose log-softmax is used twice": (
        lambda x, w: (lambda y: jnp.max(y) - jnp.sum(y[jnp.arange(4), 0]))(jax.nn.log_softmax(x @ w)),
        [(4, D), TABLE], LOSS),
    "a feed-forward of two precisions": (
        lambda x, w, out: (lambda y: (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5))(
            x + jax.nn.gelu(jnp.dot(x, w, precision="default")) @ out), [ROWS, (D, F), (F, D)], FF),
    "exponentials as integers": (lambda x: ratio(x, lambda e: total(e.astype(int).astype(e.dtype))), [ROWS], SM),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_trap_is_left_alone(name):
    fn, shapes, op = TRAPS[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    fused = jaxft.fuse(fn, force=True)
    assert op not in fused.report(*args).counts, fused.report(*args)
    np.testing.assert_allclose(jax.jit(fused)(*args), jax.jit(fn)(*args), rtol=1e-5, atol=1e-5)


def with_weights(weights):
    """Returns attention with `weights` as the function of logits and mask that gives the probabilities."""

    def fn(q, k, v, mask):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.35
        return jnp.einsum("bhqk,bkhd->bqhd", weights(logits, keys(mask)), v)

    return fn


def one_of(fn, *shapes):
    return lambda: (fn, [normal(i, *shape) for i, shape in enumerate(shapes or [(B, T, D)])])


def attention(weights, mask=PAD):
    return lambda: (with_weights(weights), [*(normal(i, *shape) for i, shape in enumerate(QKV)), mask])


def softmax_of(exponentials):
    return lambda x: (lambda e: e / total(e))(exponentials(x))


OTHER = jnp.arange(T)[:, None] % 5 > jnp.arange(T) % 4
A_ROW_IS_EMPTY = jnp.tri(D, k=-1, dtype=bool)
VALUES = {
    "numbers beyond the range of a cast": lambda: (
        lambda x: (lambda y: (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5))(x.astype(jnp.float16).astype(jnp.float32)),
        [(normal(0, T, D) * 4e4).astype(jnp.bfloat16)]),
    "a squared exponential": one_of(lambda x: jnp.exp(x) ** 2 / total(jnp.exp(x))),
    "a product of exponentials": one_of(lambda x: jnp.exp(x) * jnp.exp(x) / total(jnp.exp(x))),
    "exponentials of a difference": one_of(lambda x, b: softmax_of(jnp.exp)(x - b), (B, T, D), (D,)),
    "exponentials times their sum": one_of(lambda x: jnp.exp(x) / total(jnp.exp(x)) ** -1),
    "twice the probabilities": one_of(lambda x: jnp.exp(x) * (2 / total(jnp.exp(x)))),
    "a softmax of a transposed array": one_of(lambda x: jax.nn.softmax(x.T), SQUARE),
    "a log-softmax over axis 1": one_of(lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True)),
    "the sum of a row and its logarithm": one_of(lambda x: x + jnp.log(total(jnp.exp(x)))),
    "twice the logarithm": one_of(lambda x: x - 2 * jnp.log(total(jnp.exp(x)))),
    "a constant mask of -inf with an empty row": one_of(
        lambda x: jax.nn.softmax(jnp.where(A_ROW_IS_EMPTY, x, -jnp.inf)), SQUARE),
    "an inverted constant mask of -inf with an empty row": one_of(
        lambda x: jax.nn.softmax(jnp.where(~A_ROW_IS_EMPTY.T, x, -jnp.inf) + jnp.where(A_ROW_IS_EMPTY, 0, 1)), SQUARE),
    "a constant mask of -inf that is inverted": one_of(
        lambda x: jax.nn.softmax(jnp.where(~A_ROW_IS_EMPTY, -jnp.inf, x)), SQUARE),
    "two masks of -inf": one_of(lambda x, y: jax.nn.softmax(jnp.where(
        A_ROW_IS_EMPTY, jnp.where(y > 0, x, -jnp.inf), -jnp.inf)), SQUARE, SQUARE),
    "the logarithm of a mask": one_of(
        lambda x, y: jax.nn.softmax(x + jnp.log((y > 1.5).astype(x.dtype))), (B, T, D), (B, T, D)),
    "a bias before a temperature": attention(
        lambda s, m: jax.nn.softmax((s + jnp.arange(1.0, T + 1)) * jnp.arange(1.0, N + 1)[:, None, None])),
    "a factor of each key": attention(lambda s, m: jax.nn.softmax(s * jnp.arange(1.0, T + 1))),
    "a number divided by the logits": attention(lambda s, m: jax.nn.softmax(jnp.arange(T)[:, None] * 1e-3 / s)),
    "masked logits times a temperature": attention(
        lambda s, m: jax.nn.softmax(jnp.where(m, s, -1e9) * (1e-9 * jnp.arange(1.0, N + 1))[:, None, None])),
    "halves of the probabilities of some heads": attention(
        lambda s, m: jnp.einsum("bhqk,h->bhqk", jax.nn.softmax(s), jnp.full(N, 0.5))),
    "another mask after the softmax": attention(
        lambda s, m: jnp.where(OTHER, jax.nn.softmax(jnp.where(m, s, -1e9)), 0)),
    "a mask of transposed probabilities": attention(lambda s, m: jnp.where(
        OTHER, jax.nn.softmax(jnp.where(OTHER, s, -1e9)).swapaxes(2, 3), 0).swapaxes(2, 3)),
    "another mask of the probabilities": attention(lambda s, m: jnp.where(
        OTHER, softmax_of(lambda s: jnp.where(m, jnp.exp(s), 0))(s), 0)),
    "embeddings that are 0 beyond the table": one_of(
        lambda w, p: norm_of(w.at[jnp.arange(8).reshape(2, 4) * 2].get(mode="fill", fill_value=0) + p), (9, D), (4, D)),
    "transposed positions": one_of(
        lambda w, p: norm_of(w[jnp.arange(2 * D).reshape(2, D) % 9] + p.T), (9, D), SQUARE),
    "a loss by its normaliser": one_of(
        lambda x, w: jnp.sum(jax.nn.logsumexp(x @ w, axis=-1) - (x @ w)[jnp.arange(4), 0]), (4, D), TABLE),
    "twice the embeddings of words": one_of(
        lambda w, p: norm_of(2 * w[jnp.arange(8).reshape(2, 4)] + p), (9, D), (4, D)),
    "a loss plus a number for each row": one_of(
        lambda x, w, r: jnp.sum(jax.nn.logsumexp(x @ w, axis=-1) - (x @ w)[jnp.arange(4), 0] + r), (4, D), TABLE, (4,)),
    "a feed-forward with another residual": one_of(
        lambda x, w, o, r: norm_of(jax.nn.gelu(x @ w) @ o + r), (B, T, D), (D, F), (F, D), (B, T, D)),
    "two masks": attention(lambda s, m: jax.nn.softmax(jnp.where(OTHER, jnp.where(m, s, -1e9), -1e9))),
    "one of two masks after the softmax": attention(lambda s, m: jnp.where(OTHER, jax.nn.softmax(
        jnp.where(OTHER, jnp.where((jnp.arange(T)[:, None] != 3) | ~OTHER, s, -1e9), -1e9)), 0)),
    "a softmax with a mask of masked logits": attention(lambda s, m: jax.nn.softmax(
        jnp.where(m, s, -1e9), where=(jnp.arange(T)[:, None] > 0) | (jnp.arange(T) >= T - 2))),
    "two masks of different values": attention(
        lambda s, m: jax.nn.softmax(jnp.where(jnp.tri(T, k=-1, dtype=bool), jnp.where(m, s, -1e9), -2e9))),
    "a wide causal mask": attention(lambda s, m: jax.nn.softmax(jnp.where(jnp.tri(T, k=1, dtype=bool), s, -1e9))),
    "two biases": attention(lambda s, m: jax.nn.softmax(s + jnp.arange(T) - 0.5 * jnp.arange(T)[:, None] * OTHER)),
    "a mask times a number": attention(lambda s, m: jax.nn.softmax(s + 3 * jnp.where(m, 0, -1e30)), EMPTY),
    "weights of a mask": attention(lambda s, m: jax.nn.softmax(s + jnp.log(jnp.where(m, 1.0, 0.25)))),
    "grouped heads whose keys are all masked": lambda: (
        lambda q, k, v, m: jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], mask=keys(m)),
        [*(normal(i, *shape) for i, shape in enumerate(QKV)), EMPTY]),
    "probabilities that go to two matmuls": one_of(
        lambda q, k, v: (lambda p: (p @ v, p @ (v + 1)))(jax.nn.softmax(q @ k.T)), *[(T, H)] * 3),
    "values of another size": one_of(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, (T, H), (T, H), (T, 2 * H)),
    "transposed probabilities": one_of(lambda q, k, v: jax.nn.softmax(q @ k.T).T @ v, *[(T, H)] * 3),
    "heads of two axes": one_of(
        lambda q, k, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhde,bkhde->bhqk", q, k)), v),
        (B, T, N, 2, 4), (B, T, N, 2, 4), (B, T, N, 2)),
    "heads of another order": one_of(
        lambda q, k, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v[:, :, ::-1]), *QKV),
    "lookups beyond a table": lambda: (
        lambda ids, words, places: (lambda y: (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5))(
            jnp.take(words, ids, axis=0, mode="clip") + places),
        [jnp.array([[0, 3, V - 1, V + 5], [-2, 1, 2, 3]]), normal(0, V, D), normal(1, 4, D)]),
    "a loss of labels that do not exist": lambda: (
        lambda x, w, labels: -jnp.sum(jnp.sum(jax.nn.log_softmax(x @ w) * jax.nn.one_hot(labels, V), -1)),
        [normal(0, 16, D), normal(1, D, V), jnp.arange(16) * 7 - 9]),
    "a loss of one-hot logits with labels that do not exist": lambda: (
        lambda x, w, labels: jnp.sum(
            jax.nn.logsumexp(x @ w, -1) - jnp.sum((x @ w) * jax.nn.one_hot(labels, V), -1)),
        [normal(0, 16, D), normal(1, D, V), jnp.arange(16) * 7 - 9]),
    "a loss of logits that are 0 for labels that do not exist": lambda: (
        lambda x, w, labels: jnp.sum(jax.nn.logsumexp(x @ w, -1) - jnp.take_along_axis(
            x @ w, labels[:, None], -1, mode="fill", fill_value=0)[:, 0]),
        [normal(0, 16, D), normal(1, D, V), jnp.arange(16) * 7]),
    "a loss with a mask that is inverted": one_of(
        lambda x, w: jnp.sum(jnp.where(MASK, 0, losses(x, w))), ROWS, TABLE),
    "a loss of weighted rows": one_of(lambda x, w, y: jnp.sum(losses(x, w) * y), ROWS, TABLE, (4, 4)),
    "infinity times what is not attended": attention(
        lambda s, m: jax.nn.softmax(s + (1 - m.astype(s.dtype)) * -jnp.inf)),
    "infinity times what is attended": attention(lambda s, m: jax.nn.softmax(s + (m.astype(s.dtype) - 1) * jnp.inf)),
    "a 16-bit bias times a number": lambda: (
        lambda q, k, v, b: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(
            0.3 * (jnp.einsum("bqhd,bkhd->bhqk", q, k) + b.astype(jnp.float32))), v),
        [*(normal(i, *shape) for i, shape in enumerate(QKV)), (5.3 * jnp.arange(T)).astype(jnp.bfloat16)]),
    "a mask of what two masks have": attention(lambda s, m: jax.nn.softmax(jnp.where(m & OTHER, -1e9, s))),
    "a mask of the lower triangle": attention(
        lambda s, m: jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), -1e9, s))),
    "a scale beyond a table": one_of(
        lambda x, t: norm_of(x) * t.at[1].get(mode="fill", fill_value=2.0), (B, T, D), (1, D)),
    "the row of a table of one row": one_of(
        lambda x, t: norm_of(x + t[jnp.zeros(T, int)]), (B, T, D), (1, D)),
    "a permuted transpose": one_of(lambda x: x.transpose(1, 2, 0).transpose(0, 2, 1), (B, T, D)),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_results_are_those_of_the_function(name):
    """Whatever is found."""
    fn, args = VALUES[name]()
    found, expected = jax.jit(jaxft.fuse(fn, force=True))(*args), jax.jit(fn)(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


NEAR = {
    "softmax plus one": (one_of(lambda x: ratio(x, lambda e: 1 + total(e))), "not divided by their sum alone"),
    "a sum plus epsilon": (one_of(lambda x: ratio(x, lambda e: total(e) + 1e-9)), "not divided by their sum alone"),
    "a sum of at least epsilon": (
        attention(lambda s, m: ratio(s, lambda e: jnp.maximum(total(e), 1e-9))), "not divided by their sum alone"),
    "powers of two": (one_of(lambda x: jnp.exp2(x) / total(jnp.exp2(x))), "a softmax with base 2"),
    "an epsilon that is an array": (
        one_of(lambda x, e: (x - mean(x)) * jax.lax.rsqrt(var(x) + e), (B, T, D), ()), "neither a number nor one"),
    "a variance of at least epsilon": (
        one_of(lambda x: (x - mean(x)) * jax.lax.rsqrt(jnp.maximum(var(x), 1e-5))), "max between the mean of squares"),
    "a variance without gradient": (
        one_of(lambda x: (x - mean(x)) * jax.lax.rsqrt(jax.lax.stop_gradient(var(x)) + 1e-5)),
        "stop_gradient between the mean of squares"),
    "squares in a matmul": (
        one_of(lambda x: x * jax.lax.rsqrt((x * x) @ jnp.full((D, 1), 1 / D) + 1e-5)), "squares go into a matmul"),
    "twice a GELU": (one_of(lambda x: x * (1 + jax.lax.erf(x / math.sqrt(2)))), "2 times gelu"),
    "a gate without gradient": (
        one_of(lambda x: x * jax.lax.stop_gradient(jax.nn.sigmoid(x))), "stop_gradient inside of silu"),
    "relu by where": (one_of(lambda x, b: jnp.where(x + b > 0, x + b, 0), (B, T, D), (D,)), "only jax.nn.relu is relu"),
    "a centred array that is returned": (
        one_of(lambda x: ((x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5), x - mean(x))),
        "an intermediate result of the normalisation is also used elsewhere"),
    "mish": (one_of(lambda x: x * jnp.tanh(jax.nn.softplus(x))), "no kernel for"),
    "elu": (one_of(jax.nn.elu), "no kernel for elu"),
    "a softmax over two axes": (one_of(lambda x: jax.nn.softmax(x, (1, 2))), "a softmax over 2 axes"),
    "an activation with a wider result": (
        one_of(lambda x, b: jax.nn.gelu((x.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)).astype(x.dtype)),
               (B, T, D), (D,)), "bfloat16 becomes float32 in the activation"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_miss_has_a_reason(name):
    make, reason = NEAR[name]
    fn, args = make()
    report = jaxft.fuse(fn, force=True).report(*args)
    assert report.counts == {} and any(reason in record.reason for record in report), report


def heads(of_logits, of_result, *shapes, weights=jax.nn.softmax):
    """Attention by two einsums."""
    return one_of(lambda q, k, v: jnp.einsum(of_result, weights(jnp.einsum(of_logits, q, k)), v), *shapes)


def loss_of(of_rows, *shapes):
    """The loss of the log-softmax of a matmul."""
    return one_of(lambda x, w, *more: of_rows(jax.nn.log_softmax(x @ w), *more), (4, D), TABLE, *shapes)


def picked(y, **options):
    return jnp.take_along_axis(y, jnp.arange(4)[:, None], -1, **options)[:, 0]


def root_of(of_variance):
    return one_of(lambda x: (x - mean(x)) * jax.lax.rsqrt(of_variance(x) + 1e-5))


def of_words(of_sum):
    return one_of(lambda w, p: norm_of(of_sum(w[jnp.arange(8).reshape(2, 4)], p)), (9, D), (4, D))


STOP = jax.lax.stop_gradient
# Only the op that the reason is about is left alone. A part of it, such as a softmax or a LayerNorm, may be found.
REASONS = {
    "one key": (heads("qd,kd->qk", "qk,kd->qd", (T, H), (1, H), (1, H)), "there is one key"),
    "a softmax over the examples": (
        heads("bqd,bkd->bqk", "bqk,bkd->bqd", *[(B, T, H)] * 3, weights=lambda s: jax.nn.softmax(s, 0)),
        "the softmax is not over an axis of the keys"),
    "keys of two axes": (heads("qd,jkd->qjk", "qjk,kd->qjd", (T, H), (2, T, H), (T, H)), "the keys have further axes"),
    "a sum over the heads": (
        heads("qhd,khd->hqk", "hqk,khd->qd", *[(T, N, H)] * 3), "the second matmul contracts several axes"),
    "values of all heads": (
        heads("qhd,khd->hqk", "hqk,kd->qhd", (T, N, H), (T, N, H), (T, H)), "the values have another batch"),
    "values of two axes": (
        heads("qd,kd->qk", "qk,kde->qde", (T, H), (T, H), (T, H, 2)), "the values have further axes"),
    "a sink": (one_of(
        lambda q, k, v, sink: jax.nn.softmax(jnp.concatenate([q @ k.T, sink], -1))[:, :-1] @ v, *[(T, H)] * 3, (T, 1)),
        "concatenated with other logits"),
    "two matmuls": (one_of(
        lambda q, k, v: jax.nn.softmax((q @ k.T) * (k @ q.T)) @ v, *[(T, H)] * 3), "computed from two matmuls"),
    "one of two matmuls": (attention(
        lambda s, m: jax.nn.softmax(jnp.where(m, s, s + 1))), "the logits are selected from two arrays"),
    "logits that only choose": (attention(
        lambda s, m: jax.nn.softmax(jnp.where(s > 0, -1e9, jnp.arange(1.0, T + 1)))), "selected from two arrays"),
    "a number beside embeddings": (of_words(lambda w, p: w + p + 1), "a number is added to the embeddings"),
    "a vector beside embeddings": (of_words(lambda w, p: w + p + p[0]), "something else is added to the embeddings"),
    "four embeddings": (
        of_words(lambda w, p: w + p[jnp.ones((2, 4), int)] + p[jnp.zeros((2, 4), int)] + p), "4 embeddings in the sum"),
    "embeddings alone": (of_words(lambda w, p: w), "1 embeddings in the sum"),
    "a log-softmax that is squared": (loss_of(lambda y: jnp.sum(y**2)), "goes to integer_pow, not to a look-up"),
    "losses that are returned": (loss_of(lambda y: picked(y)), "the loss of each row is needed"),
    "the largest loss": (loss_of(lambda y: jnp.max(picked(y))), "goes to reduce_max, not to a sum"),
    "losses without gradient": (loss_of(lambda y: jnp.sum(STOP(picked(y)))), "goes to stop_gradient, not to a sum"),
    "labels that take 7 outside": (
        loss_of(lambda y: jnp.sum(picked(y, mode="fill", fill_value=7.0))), "take another number than NaN or 0"),
    "two labels of a row": (
        loss_of(lambda y: jnp.sum(jnp.take_along_axis(y, jnp.arange(8).reshape(4, 2), -1))), "has several labels"),
    "columns of a log-softmax": (loss_of(lambda y: jnp.sum(y[:, jnp.arange(4)])), ""),
    "weights of a loss": (loss_of(lambda y, w: jnp.sum(picked(y) * w), (4,)), "a weight that is not a mask"),
    "a loss of 3 instead": (
        loss_of(lambda y, w: jnp.sum(jnp.where(w > 0, picked(y), 3.0)), (4,)), "replaced by a number that is not 0"),
    "a mask of all rows": (
        loss_of(lambda y, w: jnp.sum(jnp.where(jnp.broadcast_to(w > 0, 4), picked(y), 0.0)), (1,)), "not one per row"),
    "logits that are capped": (one_of(
        lambda x, w: jnp.sum(picked(jax.nn.log_softmax(jnp.tanh(x @ w)))), (4, D), TABLE), "tanh between the matmul"),
    "two means of squares": (root_of(lambda x: mean(x**2) + mean((x + 1) ** 2)), "not one mean of squares"),
    "the squares of another difference": (
        root_of(lambda x: mean((x - 2 * mean(x)) ** 2)), "what follows the root is not"),
    "another term of the variance": (root_of(lambda x: mean(x**2) + x[..., :1] ** 2), "the variance has further terms"),
    "a difference of the variance": (
        root_of(lambda x: mean(x**2) - jnp.sin(x[..., :1])), "the variance has further terms"),
    "the square of another array's mean": (one_of(
        lambda x, y: (x - mean(x)) * jax.lax.rsqrt(mean(x**2) - mean(y) ** 2 + 1e-5), (B, T, D), (B, T, D)),
        "has two different x"),
    "a mean of cubes": (root_of(lambda x: mean(x**3)), "the variance is not a mean of squares"),
    "a norm of length 1": (one_of(lambda x: x * jax.lax.rsqrt(total(x * x) + 1e-6)), "as in an L2 norm"),
    "a variance that is returned": (one_of(
        lambda x: ((x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5), var(x))), "the mean or the variance is also returned"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_reason_is_given_and_results_agree(name):
    make, reason = REASONS[name]
    fn, args = make()
    fused = jaxft.fuse(fn, force=True)
    report = fused.report(*args)
    assert not report.counts.keys() & {ATT, LOSS, RMS, "embeddings_layer_norm"}, report
    assert not reason or any(reason in record.reason for record in report), report
    for x, y in zip(*(jax.tree.leaves(jax.jit(f)(*args)) for f in (fused, fn)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_masked_logits_that_a_scale_raises_are_no_mask():
    fn, args = attention(lambda s, m: jax.nn.softmax(jnp.where(m, s, -1e9) * 1e-6))()
    report = jaxft.fuse(fn, force=True).report(*args)
    assert report.counts == {"softmax": 1}
    assert any("masked logits are -1000, which is no mask" in record.reason for record in report)


def test_subtracted_logarithm_is_no_mask():
    """The logits of masked keys are +inf, so their rows are NaN."""
    fn, args = attention(lambda s, m: jax.nn.softmax(s - jnp.log(m.astype(s.dtype))), PAD)()
    fused = jaxft.fuse(fn, force=True)
    (record,) = fused.report(*args)
    assert record.op == ATT and "biases=1" in record.sizes
    assert np.isnan(fn(*args)).any()
    np.testing.assert_allclose(fused(*args), fn(*args), atol=1e-5)


@pytest.mark.parametrize("low", [-jnp.inf, float(jnp.finfo(jnp.float32).min)], ids=["NaN", "mean"])
def test_causal_rows_before_the_first_key_are_as_in_the_original(low):
    causal, late = jnp.tri(T, dtype=bool), jnp.broadcast_to(jnp.arange(T) > 2, (B, T))
    fn, args = attention(lambda s, m: jax.nn.softmax(jnp.where(causal & m, s, low)), late)()
    fused = jaxft.fuse(fn, force=True)
    (record,) = fused.report(*args)
    assert record.op == ATT and "causal=True" in record.sizes
    np.testing.assert_allclose(fused(*args), fn(*args), atol=1e-5)


def layer(order):
    """Returns a LayerNorm of what `order` makes of residual, matmul and bias."""

    def fn(x, w, bias, residual, gamma):
        y = order(residual, x @ w, bias)
        return (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5) * gamma

    return fn, [normal(i, *s) for i, s in enumerate([(B, T, F), (F, D), (D,), (B, T, D), (D,)])]


def half(order):
    def fn(x, w, bias, out, gamma):
        y = order(x, jax.nn.gelu(x @ w) @ out, bias)
        return (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5) * gamma, y

    return fn, [normal(i, *s) for i, s in enumerate([(B, T, D), (D, F), (D,), (F, D), (D,)])]


ORDERS = [lambda r, p, b: r + p + b, lambda r, p, b: b + (p + r)]
SPELLINGS = {
    **{f"dense and residual {i}": (lambda order=order: layer(order), {DRLN: 1}) for i, order in enumerate(ORDERS)},
    **{f"feed-forward {i}": (lambda order=order: half(order), {FF: 1}) for i, order in enumerate(ORDERS)},
    "squares by einsum": (one_of(
        lambda x: x * jax.lax.rsqrt(jnp.einsum("btd,btd->bt", x, x)[..., None] / D + 1e-6)), {RMS: 1}),
    "squares by vecdot": (one_of(
        lambda x: (x - mean(x)) / jnp.sqrt(jnp.vecdot(x - mean(x), x - mean(x))[..., None] / D + 1e-6)), {LN: 1}),
    "a dot of one row": (one_of(lambda x: x * jax.lax.rsqrt(x @ x / D + 1e-6), (D,)), {RMS: 1}),
    "an RMSNorm of a product": (one_of(
        lambda x, y: x * y * jax.lax.rsqrt(mean((x * y) ** 2) + 1e-6), (B, T, D), (B, T, D)), {RMS: 1}),
    "a mask that is inverted": (attention(lambda s, m: (lambda e: e / total(e))(jnp.where(m, 0, jnp.exp(s))),
                                          jnp.arange(T)[None] > jnp.array([[T // 2], [T - 2]])), {ATT: 1}),
    "the largest logit of all": (
        attention(lambda s, m: (lambda e: e / total(e))(jnp.exp(s - s.max()))), {ATT: 1}),
    "a SiLU with a reciprocal": (one_of(lambda x: x * jnp.reciprocal(1 + jnp.exp(-x))), {BA: 1}),
    "a loss of merged rows": (one_of(lambda x, w: -jnp.take_along_axis(jax.nn.log_softmax(
        (x @ w).reshape(-1, V)), jnp.arange(16)[:, None], -1).mean(), ROWS, TABLE), {LOSS: 1}),
    "a loss times a number": (one_of(lambda x, w: 2 * jnp.mean(0.5 * losses(x, w)), ROWS, TABLE), {LOSS: 1}),
    "a loss that is divided by a number": (
        one_of(lambda x, w: jnp.sum(losses(x, w) / 4), ROWS, TABLE), {LOSS: 1}),
    "code that is never used": (attention(lambda s, m: (jnp.sin(s), jax.nn.softmax(s))[1]), {ATT: 1}),
    "numbers times queries and keys": (
        one_of(lambda q, k, v: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", 2 * q, 0.3 * k)), v), *QKV), {ATT: 1}),
    "logits that are subtracted": (
        one_of(lambda q, k, v, a, b: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(a - (jnp.einsum("bqhd,bkhd->bhqk", q, k) - b)), v), *QKV, (T, T), (T, T)),
        {ATT: 1}),
    "numbers times a bias": (one_of(lambda x, b: jax.nn.gelu(x + 2 * b), (B, T, D), (D,)), {BA: 1}),
    "an RMSNorm of magnitudes": (one_of(lambda x: jnp.sqrt(x**2) * jax.lax.rsqrt(mean(x**2) + 1e-6)), {}),
    "an RMSNorm of negated squares": (one_of(lambda x: x * jax.lax.rsqrt(mean(jnp.power(-x, 2.0)) + 1e-6)), {RMS: 1}),
    "a LayerNorm of rows with an axis of size 1": (one_of(
        lambda x: (x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5), (B, 1, D)), {LN: 1}),
    "a shift that is subtracted": (one_of(
        lambda x, b: (x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5) - b, (B, T, D), (D,)), {LN: 1}),
    "a softmax of rows with an axis of size 1": (one_of(lambda x: ratio(x, total), (B, 1, D)), {SM: 1}),
    "logits that are divided by a number of each query": (
        attention(lambda s, m: jax.nn.softmax(s / jnp.arange(1.0, T + 1)[:, None])), {ATT: 1}),
    "logits that are multiplied by a number of each head": (
        attention(lambda s, m: jax.nn.softmax(jnp.arange(1.0, N + 1)[:, None, None] * s)), {ATT: 1}),
    "a LayerNorm of a LayerNorm": (one_of(
        lambda x, g, b: (lambda y: (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5))(
            (x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5) * g + b), (B, T, D), (D,), (D,)), {LN: 2}),
    "a feed-forward with a transposed kernel": (one_of(
        lambda x, w, out: (lambda y: (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5))(x + jax.nn.gelu(x @ w) @ out.T),
        (B, T, D), (D, F), (D, F)), {DENSE: 1, DRLN: 1}),
    "two shifts": (one_of(
        lambda x, a, b: (x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5) + a + b, (B, T, D), (D,), (D,)), {LN: 1}),
    "two scales in turn": (one_of(
        lambda x, a, b: (x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5) * a * b, (B, T, D), (D,), (D,)), {LN: 1}),
    "twice a normalisation": (one_of(lambda x: 2 * ((x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5))), {LN: 1}),
    "an RMSNorm with a shift": (one_of(
        lambda x, g, b: x * jax.lax.rsqrt(mean(x * x) + 1e-5) * g + b, (B, T, D), (D,), (D,)), {RMS: 1}),
    "a clipped GELU": (one_of(lambda x: jnp.clip(jax.nn.gelu(x), -5, 5)), {BA: 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_found_and_agrees(name):
    make, wanted = SPELLINGS[name]
    fn, args = make()
    fused = jaxft.fuse(fn, force=True)
    assert fused.report(*args).counts == wanted, fused.report(*args)
    found, expected = jax.jit(fused)(*args), jax.jit(fn)(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * float(jnp.abs(y).max()), rtol=0)


PRECISE = {
    "dense": (lambda dot, x, w: jax.nn.gelu(dot(x, w)), [ROWS, SQUARE]),
    "dense and residual": (lambda dot, x, w, r: norm_of(dot(x, w) + r), [ROWS, SQUARE, ROWS]),
    "feed-forward": (lambda dot, x, w, o: norm_of(x + dot(jax.nn.gelu(dot(x, w)), o)), [ROWS, (D, F), (F, D)]),
    "loss": (lambda dot, x, w: jnp.sum(-jnp.take_along_axis(
        jax.nn.log_softmax(dot(x, w)), jnp.arange(4)[:, None], -1)), [(4, D), TABLE]),
    "attention with one precise matmul": (
        lambda dot, q, k, v: dot(jax.nn.softmax(jnp.dot(q, k.T, precision="default")), v), [(T, H)] * 3),
    "attention": (lambda dot, q, k, v: dot(jax.nn.softmax(dot(q, k.T)), v), [(T, H)] * 3),
}  # fmt: skip


def norm_of(y):
    return (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5)


@pytest.mark.parametrize("name", PRECISE)
def test_ops_keep_the_precision_of_matmuls(name):
    fn, shapes = PRECISE[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]

    def precise(*args):
        return fn(lambda a, b: jnp.dot(a, b, precision="highest"), *args)

    fused = jaxft.fuse(precise, force=True, implementation="xla")
    with jax.default_matmul_precision("default"):
        assert len(fused.report(*args).counts) == 1
        text = str(jax.make_jaxpr(fused)(*args))
    highest = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") + text.count("precision=Precision.HIGHEST")
    assert text.count("dot_general[") == highest > 0


def test_number_times_16_bit_bias_is_not_rounded():
    """Under jax.jit, XLA may leave out the rounding that the equations have one by one."""
    fn, args = VALUES["a 16-bit bias times a number"]()
    np.testing.assert_allclose(jaxft.fuse(fn, force=True)(*args), fn(*args), rtol=2e-5, atol=2e-5)


def test_table_of_words_is_the_longest():
    def fn(types, words, places):
        ids = jnp.arange(8).reshape(2, 4)
        return norm_of(types[ids % 2] + words[ids] + places[ids % 4])

    (record,) = jaxft.fuse(fn, force=True).report(*(normal(i, rows, D) for i, rows in enumerate((2, 9, 4))))
    assert record.op == "embeddings_layer_norm" and "V=9" in record.sizes


def test_bias_before_a_residual_is_taken_in():
    def fn(x, kernel, bias, residual):
        y = jnp.einsum("bthk,hkd->btd", x, kernel) + bias + residual
        return (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5)

    args = [normal(i, *shape) for i, shape in enumerate([QKV[0], (N, H, D), (D,), (B, T, D)])]
    (record,) = jaxft.fuse(fn, force=True).report(*args)
    assert record.op == BRLN and "bias=True" in record.sizes
    np.testing.assert_allclose(jaxft.fuse(fn, force=True)(*args), fn(*args), atol=1e-5)


@pytest.mark.parametrize("name", ["an array of integers", "a mask"])
def test_operands_of_other_types_are_cast(name):
    def vector(size):
        return jnp.arange(size) if name == "an array of integers" else jnp.arange(size) % 3 > 0

    def norm(x, residual):
        y = x + residual + vector(D)
        return (y - mean(y)) * jax.lax.rsqrt(var(y) + 1e-5) * vector(D)

    def weights(logits, mask):
        return jax.nn.softmax(logits + vector(T))

    x = normal(0, B, T, D)
    for fn, args, op in (
        (norm, (x, x[::-1]), BRLN),
        (lambda x: jax.nn.silu(x + vector(D)), (x,), BA),
        (with_weights(weights), [*(normal(i, *shape) for i, shape in enumerate(QKV)), PAD], ATT),
    ):
        fused = jaxft.fuse(fn, force=True)
        assert fused.report(*args).counts == {op: 1}
        np.testing.assert_allclose(fused(*args), fn(*args), atol=1e-5)


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_attention_is_computed_in_the_widest_dtype(promotion):
    def fn(q, k, v):
        probabilities = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities.astype(v.dtype), v)

    q, k, v = (normal(i, B, T, N, H) for i in range(3))
    v = v.astype(jnp.bfloat16)
    fused, exact = jaxft.fuse(fn, force=True), fn(q, k, v.astype(jnp.float32))
    with jax.numpy_dtype_promotion(promotion):
        assert fused.report(q, k, v).counts == {ATT: 1}
        found, original = (jnp.abs(f(q, k, v).astype(jnp.float32) - exact).max() for f in (fused, fn))
    assert found <= original


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
def test_arrays_without_elements_are_left_alone(shape):
    x = jnp.zeros(shape)
    for fn in (jax.nn.gelu, jax.nn.softmax, lambda x: (x - mean(x)) * jax.lax.rsqrt(var(x) + 1e-5)):
        fused = jaxft.fuse(fn, force=True)
        assert list(fused.report(x)) == [] and fused(x).shape == shape
