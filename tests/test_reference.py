"""`jaxft.reference`, the specification, against independent NumPy code in float64."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import slow
from compare import errors, magnitude, ulp
from jaxft import reference
from jaxft.dropout import dropout_mask

SIZES = (1, 2, 3, 5, 7, 13, 17, 32, 37)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with one set of options: both versions as functions of the same float arguments."""

    floats: dict[str, np.ndarray]
    plain: Callable
    oracle: Callable
    keeps_half: bool = dataclasses.field(default=False, kw_only=True)  # intermediate results have the input's dtype


# --- Cases: a random shape and a random combination of options -----------------------------------------------------


def _some(rng, value, chance=0.5):
    return value if rng.random() < chance else None


def _floats(rng, **shapes):
    return {name: rng.standard_normal(shape) for name, shape in shapes.items() if shape is not None}


def _mask(rng, shape):
    """Returns a random mask. Each axis is broadcast or whole, and some rows are fully masked."""
    mask = rng.random([size if rng.random() < 0.7 else 1 for size in shape]) < 0.7
    if mask.size and rng.random() < 0.5:
        mask.reshape(-1, mask.shape[-1])[0] = False
    return mask


def _dropout(rng, shape) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns keyword arguments for plain jnp and for the oracle."""
    rate = float(rng.choice([0.0, 0.1, 0.5, 0.9]))
    key = jax.random.key(int(rng.integers(2**31)))
    plain = {"dropout_rate": rate, "dropout_rng": key}
    if rate == 0.0:
        return plain, {}
    return plain, {"keep": np.asarray(dropout_mask(key, rate, tuple(shape))), "rate": rate}


def _leading(rng, size):
    return tuple(size() for _ in range(rng.integers(0, 3)))


def layer_norm(rng, size):
    width = size()
    floats = _floats(rng, x=(*_leading(rng, size), width), gamma=_some(rng, (width,)), beta=_some(rng, (width,)))
    floats["x"] = floats["x"] * 3.0 + rng.choice([0.0, 10.0])  # a mean that spoils one-pass variances
    epsilon = float(rng.choice([1e-12, 1e-6, 0.3]))
    return Case(floats, *(lambda f, m=m: m.layer_norm(**f, epsilon=epsilon) for m in (reference, oracle)))


def bias_residual_layer_norm(rng, size):
    width = size()
    shape = (*_leading(rng, size), width)
    floats = _floats(rng, x=shape, bias=_some(rng, (width,), 0.8), residual=shape, gamma=_some(rng, (width,), 0.8),
                     beta=_some(rng, (width,), 0.8))  # fmt: skip
    options: dict[str, Any] = {"epsilon": float(rng.choice([1e-12, 1e-6, 0.3])), "return_sum": bool(rng.random() < 0.5)}
    plain_dropout, oracle_dropout = _dropout(rng, shape)
    missing: dict[str, Any] = {name: None for name in ("bias", "gamma", "beta") if name not in floats}
    return Case(
        floats,
        lambda f: reference.bias_residual_layer_norm(**f, **missing, **options, **plain_dropout),
        lambda f: oracle.bias_residual_layer_norm(**f, **missing, **options, **oracle_dropout),
    )


def rms_norm(rng, size):
    shape = (*_leading(rng, size), size())
    floats = _floats(rng, x=shape, gamma=_some(rng, shape[-1:], 0.8), residual=_some(rng, shape))
    floats["x"] = floats["x"] * 3.0 + rng.choice([0.0, 10.0])
    options: dict[str, Any] = {"epsilon": float(rng.choice([1e-12, 1e-6, 0.3]))}
    options["return_sum"] = "residual" in floats and bool(rng.random() < 0.5)
    return Case(floats, *(lambda f, m=m: m.rms_norm(**f, **options) for m in (reference, oracle)))


def embeddings_layer_norm(rng, size):
    width, shape = size(), (*_leading(rng, size), size())
    rows = {"word": size(), "position": shape[-1] + int(rng.integers(0, 3)), "token_type": _some(rng, size(), 0.8)}
    floats = _floats(rng, **{name: (n, width) for name, n in rows.items() if n}, gamma=_some(rng, (width,), 0.8),
                     beta=_some(rng, (width,), 0.8))  # fmt: skip
    ids = {f"{name}_ids": rng.integers(0, n, shape) for name, n in rows.items() if n}
    input_ids = ids.pop("word_ids")
    options = {name: x for name, x in ids.items() if rng.random() < 0.6}
    options["epsilon"] = float(rng.choice([1e-12, 1e-6, 0.3]))
    return Case(floats, *(lambda f, m=m: m.embeddings_layer_norm(input_ids, **f, **options)
                          for m in (reference, oracle)))  # fmt: skip


def bias_activation(rng, size):
    width = size()
    activation = str(rng.choice(["gelu", "gelu_tanh", "relu", "silu", "tanh"]))
    floats = _floats(rng, x=(*_leading(rng, size), width), bias=_some(rng, (width,), 0.8))
    floats["x"] = floats["x"] * rng.choice([1.0, 5.0])
    return Case(
        floats,
        *(lambda f, m=m: m.bias_activation(f["x"], f.get("bias"), activation=activation) for m in (reference, oracle)),
    )


def gated_activation(rng, size):
    width = 2 * size()
    options = {"activation": str(rng.choice(["gelu", "silu"])), "gate": str(rng.choice(["first", "second"]))}
    floats = _floats(rng, x=(*_leading(rng, size), width), bias=_some(rng, (width,), 0.5))
    return Case(floats, *(lambda f, m=m: m.gated_activation(**f, **options) for m in (reference, oracle)))


def _row_softmax(name):
    def case(rng, size):
        shape = (*_leading(rng, size), size())
        floats = _floats(rng, x=shape, bias=_some(rng, [1 if rng.random() < 0.3 else n for n in shape]))
        options = {"scale": _some(rng, float(rng.uniform(0.1, 3.0))), "mask": _some(rng, _mask(rng, shape))}
        return Case(floats, *(lambda f, m=m: getattr(m, name)(**f, **options) for m in (reference, oracle)))

    case.__name__ = name
    return case


def qkv_bias_split_heads(rng, size):
    heads, head_size = size(), size()
    width = 3 * heads * head_size
    floats = _floats(rng, qkv=(size(), size(), width), bias=_some(rng, (width,), 0.7))
    return Case(
        floats, *(lambda f, m=m: m.qkv_bias_split_heads(f["qkv"], f.get("bias"), heads) for m in (reference, oracle))
    )


def merge_heads(rng, size):
    floats = _floats(rng, x=(size(), size(), size(), size()))
    return Case(floats, *(lambda f, m=m: m.merge_heads(**f) for m in (reference, oracle)))


def permute(rng, size):
    small = [min(size(), 7) for _ in range(rng.integers(1, 6))]
    axes = tuple(int(axis) for axis in rng.permutation(len(small)))
    return Case(_floats(rng, x=small), *(lambda f, m=m: m.permute(**f, axes=axes) for m in (reference, oracle)))


def rotary(rng, size):
    tokens, heads, head_size = _leading(rng, size), size(), 2 * min(size(), 17)
    positions = rng.integers(-3, 4, tokens[int(rng.integers(0, 2)) :], np.int32)
    options = {"theta": float(rng.choice([100.0, 1e4])), "frequency_scale": float(rng.choice([1.0, 0.5]))}
    if rng.random() < 0.5:
        floats = _floats(rng, qkv=(*tokens, 3, heads, head_size))
        return Case(floats, *(lambda f, m=m: m.rotary(f["qkv"], positions, **options) for m in (reference, oracle)))
    floats = _floats(rng, query=(*tokens, heads, head_size), key=(*tokens, 1, head_size))
    return Case(floats, *(lambda f, m=m: m.rotary((f["query"], f["key"]), positions, **options)
                          for m in (reference, oracle)))  # fmt: skip


def dense_rotary(rng, size):
    tokens, depth, heads, width = _leading(rng, size), size(), size(), 6 * min(size(), 5)
    floats = _floats(rng, x=(*tokens, depth), kernel=(depth, width * heads), bias=(width * heads,))
    options = {"positions": rng.integers(-3, 4, tokens[-1:], np.int32), "theta": 100.0, "num_heads": heads}
    return Case(floats, *(lambda f, m=m: m.dense_rotary(**f, **options) for m in (reference, oracle)))


def dense(rng, size):
    rows, inner, outer = _leading(rng, size), size(), size()
    activation = _some(rng, str(rng.choice(["gelu", "gelu_tanh", "relu", "silu", "tanh"])))
    gate = None if activation is None else _some(rng, str(rng.choice(["first", "second"])))
    halves = 1 if gate is None else 2
    floats = _floats(rng, x=(*rows, inner), kernel=(inner, halves * outer), bias=_some(rng, (halves * outer,)),
                     residual=_some(rng, (*rows, outer)))  # fmt: skip
    return Case(
        floats,
        lambda f: reference.dense(**f, activation=activation, gate=gate),
        lambda f: oracle.dense(**f, activation=activation, gate=gate),
        keeps_half=True,
    )


def linear_cross_entropy(rng, size):
    rows, width, classes = _leading(rng, size), size(), size()
    floats = _floats(rng, x=(*rows, width), embedding=(classes, width), bias=_some(rng, (classes,), 0.8))
    labels = np.where(rng.random(rows) < 0.6, rng.integers(0, classes, rows), -100).astype(np.int32)
    return Case(
        floats,
        lambda f: reference.linear_cross_entropy(**f, labels=jnp.asarray(labels))[0],
        lambda f: oracle.linear_cross_entropy(**f, labels=labels)[0],
    )


def _window(rng):
    return tuple(int(n) for n in rng.integers(0, 4, 2))


def dot_product_attention(rng, size):
    batch, rows, keys, groups, kv_heads, head_size = (min(size(), n) for n in (3, 37, 37, 3, 3, 17))
    heads = groups * kv_heads
    full = (batch, heads, rows, keys)
    floats = _floats(rng, query=(batch, rows, heads, head_size), key=(batch, keys, kv_heads, head_size),
                     value=(batch, keys, kv_heads, head_size),
                     bias=_some(rng, [1 if rng.random() < 0.4 else n for n in full], 0.4))  # fmt: skip
    options = {
        "mask": _some(rng, _mask(rng, full), 0.4),
        "scale": _some(rng, float(rng.uniform(0.1, 1.0)), 0.3),
        "is_causal": bool(rng.random() < 0.3),
        "query_seq_lengths": _some(rng, rng.integers(0, rows + 1, batch, np.int32), 0.3),
        "key_value_seq_lengths": _some(rng, rng.integers(0, keys + 1, batch, np.int32), 0.4),
        "local_window_size": _some(rng, _window(rng), 0.3),
        "return_residual": bool(rng.random() < 0.4),
    }
    if rng.random() < 0.3:
        options["query_segment_ids"] = np.sort(rng.integers(0, 3, (batch, rows), np.int32), axis=1)
        options["key_value_segment_ids"] = np.sort(rng.integers(0, 3, (batch, keys), np.int32), axis=1)
    plain_dropout, oracle_dropout = _dropout(rng, full)
    return Case(
        floats,
        lambda f: reference.dot_product_attention(**f, **options, **plain_dropout),
        lambda f: oracle.dot_product_attention(**f, **options, **oracle_dropout),
        keeps_half=True,
    )


def varlen_qkv_attention(rng, size):
    lengths = [min(size(), 13) * int(rng.random() < 0.8) for _ in range(3)]
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    heads, head_size, max_seqlen = min(size(), 3), size(), max(1, *lengths) + int(rng.integers(0, 3))
    unused = int(rng.integers(0, 4))  # rows after the last sequence
    options = {
        "is_causal": bool(rng.random() < 0.3),
        "local_window_size": _some(rng, _window(rng), 0.3),
        "return_residual": bool(rng.random() < 0.4),
    }
    plain_dropout, oracle_dropout = _dropout(rng, (3, heads, max_seqlen, max_seqlen))
    return Case(
        _floats(rng, qkv=(int(cu_seqlens[-1]) + unused, 3, heads, head_size)),
        lambda f: reference.varlen_qkv_attention(
            **f, cu_seqlens=jnp.asarray(cu_seqlens), max_seqlen=max_seqlen, **options, **plain_dropout,
        ),
        lambda f: oracle.varlen_qkv_attention(**f, cu_seqlens=cu_seqlens, **options, **oracle_dropout),
        keeps_half=True,
    )  # fmt: skip


softmax, log_softmax = _row_softmax("softmax"), _row_softmax("log_softmax")
OPS = (layer_norm, bias_residual_layer_norm, rms_norm, embeddings_layer_norm, bias_activation, gated_activation,
       softmax, log_softmax, qkv_bias_split_heads, merge_heads, permute, rotary, dense, dense_rotary,
       linear_cross_entropy,        dot_product_attention, varlen_qkv_attention)  # fmt: skip
# Ops with many options get more seeds.
SEEDS = {"dot_product_attention": 20, "merge_heads": 2, "permute": 3, "qkv_bias_split_heads": 3}


def seeded(share=1):
    """Returns (op, seed) pairs with one `share` of the seeds. `make test` has the first seed only."""
    return [
        pytest.param(op, seed, id=f"{op.__name__}-{seed}", marks=[pytest.mark.slow] * (seed > 0))
        for op in OPS
        for seed in range(-(-SEEDS.get(op.__name__, 5) // share))
    ]


# --- Values ------------------------------------------------------------------------------------------------------


def assert_accurate(case, dtype, seed):
    """The result errs at most as much as backward stable code may.

    Moving every input by one rounding error, in a random direction, moves the exact result by some amount. Code that
    rounds at each step does a few times that, and then rounds the result: 8 times and 2 ulp are granted. A rounding
    error is one of float32, the dtype of statistics and sums, or, where intermediate results are kept in the input's
    dtype, one of that.
    """
    floats = {name: np.asarray(jnp.asarray(x, dtype)) for name, x in case.floats.items()}
    exact = case.oracle(floats)
    got = jax.jit(case.plain)(floats)
    chex.assert_trees_all_equal_shapes(got, exact)
    eps = float(jnp.finfo(dtype if case.keeps_half else jnp.float32).eps)
    rng = np.random.default_rng(seed)
    slack = jax.tree.map(lambda x: 0.0, exact)
    for _ in range(2):
        moved = {n: oracle.f64(x) * (1.0 + eps * rng.choice([-1.0, 1.0], x.shape)) for n, x in floats.items()}
        change = jax.tree.map(_largest_change, case.oracle(moved), exact)
        slack = jax.tree.map(max, slack, change)
    for leaf, leaf_exact, moved_by in zip(*map(jax.tree.leaves, (got, exact, slack)), strict=True):
        error = errors("result", leaf, leaf_exact, seed).max(initial=0.0)
        allowed = 8.0 * moved_by + 2.0 * ulp(magnitude(leaf_exact), leaf.dtype)
        assert error <= allowed, f"seed {seed}"


def _largest_change(moved, exact):
    finite = np.isfinite(exact)
    return float(np.abs(moved[finite] - exact[finite]).max(initial=0.0))


@pytest.mark.parametrize(("op", "seed"), seeded())
def test_random_options(op, seed):
    rng = np.random.default_rng(seed)
    assert_accurate(op(rng, lambda: int(rng.choice(SIZES))), jnp.float32, seed)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow(jnp.float16)], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_half_precision(op, dtype):
    rng = np.random.default_rng(1000)
    case = op(rng, lambda: int(rng.choice((3, 5, 7, 13))))
    assert_accurate(case, dtype, 1000)
    out = jax.eval_shape(case.plain, {name: jax.ShapeDtypeStruct(x.shape, dtype) for name, x in case.floats.items()})
    assert jax.tree.leaves(out)[0].dtype == (jnp.float32 if op is linear_cross_entropy else dtype)  # a loss


VECTORS = {"layer_norm": ("gamma", "beta"), "bias_residual_layer_norm": ("bias", "gamma", "beta"),
           "bias_activation": ("bias",), "softmax": (), "log_softmax": ()}  # fmt: skip


@pytest.mark.parametrize("epsilon", [1e-12, 1e-3, 10.0])
def test_epsilon_is_added_to_the_variance(epsilon):
    x = np.random.default_rng(0).standard_normal((4, 9)) * np.array([[1e-6], [0.1], [1.0], [0.0]])
    with jax.enable_x64(True):
        got = reference.layer_norm(jnp.asarray(x), epsilon=epsilon)
    np.testing.assert_allclose(got, oracle.layer_norm(x, epsilon=epsilon), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (0, 5), (4, 0, 8), (1, 769), (2, 3, 127)], ids=str)
@pytest.mark.parametrize("name", VECTORS)
def test_shapes_of_row_ops(name, shape):
    residual = shape if name == "bias_residual_layer_norm" else None
    floats = _floats(np.random.default_rng(0), x=shape, residual=residual, **dict.fromkeys(VECTORS[name], shape[-1:]))
    assert_accurate(Case(floats, *(lambda f, m=m: getattr(m, name)(**f) for m in (reference, oracle))), jnp.float32, 0)


ATTENTION_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "key_mask": {"mask": np.arange(5)[None, None, None, :] < np.array([3, 0])[:, None, None, None]},
    "head_mask": {"mask": np.arange(24).reshape(1, 4, 6, 1) % 3 > 0},
    "causal": {"is_causal": True},
    "query_lengths": {"query_seq_lengths": np.array([6, 2], np.int32)},
    "key_lengths": {"key_value_seq_lengths": np.array([0, 4], np.int32)},
    "segments": {"query_segment_ids": np.array([[0, 0, 1, 1, 2, 2], [3, 0, 0, 0, 1, 9]], np.int32),
                 "key_value_segment_ids": np.array([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]], np.int32)},
    "window": {"local_window_size": (1, 2)},
    "window_left": {"local_window_size": (0, 0), "is_causal": True},
}  # fmt: skip


def _attention_case(shape, options, seed=0):
    batch, rows, keys, heads, kv_heads, size = shape
    floats = _floats(np.random.default_rng(seed), query=(batch, rows, heads, size), key=(batch, keys, kv_heads, size),
                     value=(batch, keys, kv_heads, size))  # fmt: skip
    options = {**options, "return_residual": True}
    return Case(floats, *(lambda f, m=m: m.dot_product_attention(**f, **options) for m in (reference, oracle)))


@pytest.mark.parametrize("name", ATTENTION_OPTIONS)
def test_one_attention_option(name):
    assert_accurate(_attention_case((2, 6, 5, 4, 2, 8), ATTENTION_OPTIONS[name]), jnp.float32, 0)


ATTENTION_SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (0, 3, 3, 2, 2, 8),
    (2, 0, 5, 2, 1, 8),
    (2, 3, 0, 2, 2, 8),
    (1, 67, 61, 6, 2, 33),
]


@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=str)
def test_shapes_of_attention(shape):
    assert_accurate(_attention_case(shape, {"is_causal": True}), jnp.float32, 0)


def test_packed_sequences_may_be_empty():
    qkv, cu_seqlens = jnp.zeros((0, 3, 2, 4)), jnp.zeros((3,), jnp.int32)
    chex.assert_shape(reference.varlen_qkv_attention(qkv, cu_seqlens, max_seqlen=3), (0, 2, 4))


@pytest.mark.parametrize("name", ["plain", "scale", "head_mask", "causal", "query_lengths", "window"])
def test_attention_agrees_with_jax_nn(name):
    """Empty rows are left out: for them jax.nn returns the mean of the values."""
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in _attention_case((2, 6, 5, 4, 2, 8), {}).floats.items()}
    options: dict[str, Any] = {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in ATTENTION_OPTIONS[name].items()
    }
    (out, lse), expected = (
        jax.jit(lambda f, op=op: op(**f, **options, return_residual=True))(floats)
        for op in (reference.dot_product_attention, jax.nn.dot_product_attention)
    )
    some = ~np.isneginf(lse)
    for got, leaf in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(got[some], leaf[some], atol=8 * ulp(magnitude(np.asarray(leaf)), got.dtype))
    assert (np.asarray(out)[~some] == 0.0).all()


# --- Gradients ---------------------------------------------------------------------------------------------------


def _projected(out, weights, xp=jnp):
    """Returns a scalar that depends on every finite element of the result."""
    leaves = zip(jax.tree.leaves(out), weights, strict=True)
    return sum((xp.where(np.isfinite(w), leaf, 0.0) * np.nan_to_num(w)).sum() for leaf, w in leaves)


def assert_gradients(case, seed):
    """Asserts that JAX's derivatives in float64 equal central differences of the oracle, for every float argument."""
    step = 1e-5  # leaves an error of about step^2 from the third derivative and eps / step from rounding
    rng = np.random.default_rng(seed)
    weights = [np.where(np.isfinite(leaf), rng.standard_normal(leaf.shape), np.nan)
               for leaf in jax.tree.leaves(case.oracle(case.floats))]  # fmt: skip
    with jax.enable_x64(True):
        got = jax.jit(jax.grad(lambda f: _projected(case.plain(f), weights)))(
            {name: jnp.asarray(x) for name, x in case.floats.items()}
        )
    for name, x in case.floats.items():
        expected = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            ahead, behind = x.copy(), x.copy()
            ahead[index] += step
            behind[index] -= step
            there = (_projected(case.oracle({**case.floats, name: moved}), weights, np) for moved in (ahead, behind))
            expected[index] = (next(there) - next(there)) / (2.0 * step)
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(
            got[name], expected, rtol=0.0, atol=1e3 * step**2 * (1.0 + np.abs(expected).max(initial=0.0)),
            err_msg=f"gradient of {name} [seed {seed}]",
        )  # fmt: skip


@pytest.mark.parametrize(("op", "seed"), seeded(share=2))
def test_random_gradients(op, seed):
    rng = np.random.default_rng(seed)
    assert_gradients(op(rng, lambda: int(rng.choice((1, 2, 3)))), seed)


@pytest.mark.parametrize(
    "name", ["head_mask", "segments", *slow(*(n for n in ATTENTION_OPTIONS if n not in ("head_mask", "segments")))]
)
def test_gradients_of_one_attention_option(name):
    assert_gradients(_attention_case((2, 6, 5, 4, 2, 2), ATTENTION_OPTIONS[name]), 0)


def test_relu_has_no_gradient_at_zero():
    """jax.nn.relu and the kernels do the same."""
    grad = jax.grad(lambda x: reference.bias_activation(x, None, activation="relu").sum())(jnp.zeros((2, 3)))
    assert (grad == 0.0).all()


# --- Padding and empty rows --------------------------------------------------------------------------------------

POISON = np.array([np.nan, np.inf, -np.inf, 3e38])


def _poisoned(x, valid):
    """Returns `x` with NaN, infinities and huge numbers where it is not `valid`."""
    return np.where(valid, x, np.resize(POISON, x.shape)).astype(np.float32)


def assert_padding_is_ignored(function, clean, poisoned, padding):
    """`function` of `poisoned` arguments is `function` of `clean` ones, bit for bit, and so are its gradients.

    `padding` says for each argument where its padding is; the gradients there are 0.
    """

    @jax.jit
    def value_and_gradients(arguments):
        out, gradients = jax.vjp(lambda f: function(**f), arguments)
        weights = jax.tree.map(lambda x: np.random.default_rng(0).standard_normal(x.shape).astype(x.dtype), out)
        return out, gradients(weights)[0]

    expected, got = value_and_gradients(clean), value_and_gradients(poisoned)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_equal(got, expected)
    got = got[1]
    for name, where in padding.items():
        assert (np.asarray(got[name])[np.broadcast_to(where, got[name].shape)] == 0.0).all(), name


KEEP_KEYS = np.arange(5)[None, :] < np.array([3, 0, 5])[:, None]  # [B, S]: the second row has no key at all
KEEP_ROWS = np.arange(6)[None, :] < np.array([4, 6, 0])[:, None]  # [B, T]


@pytest.mark.parametrize(
    "options",
    [
        {"mask": KEEP_KEYS[:, None, None, :]},
        {"mask": np.broadcast_to(KEEP_KEYS[:, None, None, :], (3, 4, 6, 5))},
        {"key_value_seq_lengths": np.array([3, 0, 5], np.int32)},
        {"key_value_seq_lengths": np.array([3, 0, 5], np.int32), "query_seq_lengths": np.array([4, 6, 0], np.int32)},
        {"key_value_seq_lengths": np.array([3, 0, 5], np.int32), "is_causal": True, "local_window_size": (2, 0)},
        {"query_segment_ids": np.where(KEEP_ROWS, 1, -1).astype(np.int32),
         "key_value_segment_ids": np.where(KEEP_KEYS, 1, -2).astype(np.int32)},
    ],
    ids=["key_mask", "full_mask", "key_lengths", "lengths", "window", "segments"],
)  # fmt: skip
def test_padding_of_attention(options, key):
    rng = np.random.default_rng(0)
    clean = _floats(rng, query=(3, 6, 4, 8), key=(3, 5, 2, 8), value=(3, 5, 2, 8), bias=(3, 4, 6, 5))
    clean = {name: x.astype(np.float32) for name, x in clean.items()}
    rows = KEEP_ROWS if {"query_seq_lengths", "query_segment_ids"} & set(options) else np.ones((3, 6), bool)
    valid = {"query": rows[:, :, None, None], "key": KEEP_KEYS[:, :, None, None], "value": KEEP_KEYS[:, :, None, None],
             "bias": (rows[:, :, None] & KEEP_KEYS[:, None, :])[:, None]}  # fmt: skip

    def attention(**floats):
        masks: dict[str, Any] = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        return reference.dot_product_attention(**floats, **masks, dropout_rate=0.5, dropout_rng=key)

    assert_padding_is_ignored(
        attention, clean, {n: _poisoned(x, valid[n]) for n, x in clean.items()}, {n: ~x for n, x in valid.items()}
    )


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_padding_of_softmax(name):
    mask = np.arange(7)[None, :] < np.array([7, 3, 1, 0])[:, None]
    clean = {n: x.astype(np.float32) for n, x in _floats(np.random.default_rng(0), x=(4, 7), bias=(4, 7)).items()}

    def function(**floats):
        out = getattr(reference, name)(**floats, scale=0.5, mask=mask)
        return jnp.where(mask, out, 0.0)  # the -inf of log_softmax is by design

    assert_padding_is_ignored(
        function, clean, {n: _poisoned(x, mask) for n, x in clean.items()}, dict.fromkeys(clean, ~mask)
    )


def test_padding_reaches_no_packed_sequence():
    clean = {"qkv": np.random.default_rng(0).standard_normal((12, 3, 2, 4)).astype(np.float32)}
    valid = (np.arange(12) < 9)[:, None, None, None]

    def function(qkv):
        return reference.varlen_qkv_attention(qkv, jnp.array([0, 4, 4, 9], jnp.int32), max_seqlen=6)

    assert_padding_is_ignored(function, clean, {"qkv": _poisoned(clean["qkv"], valid)}, {"qkv": ~valid})


@pytest.mark.parametrize(
    "options",
    [{"key_value_seq_lengths": np.zeros(2, np.int32)}, {"mask": np.zeros((1, 1, 1, 5), bool)}],
    ids=lambda options: next(iter(options)),
)
def test_rows_without_keys_are_zero(options):
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in _attention_case((2, 6, 5, 4, 2, 8), {}).floats.items()}

    @jax.jit
    def value_and_gradients(floats):
        masks: dict[str, Any] = {name: jnp.asarray(x) for name, x in options.items()}
        out, gradients = jax.vjp(lambda f: reference.dot_product_attention(**f, **masks, return_residual=True), floats)
        return out, gradients(jax.tree.map(jnp.ones_like, out))[0]

    (out, lse), gradients = value_and_gradients(floats)
    assert (out == 0.0).all() and jnp.isneginf(lse).all()
    for name, gradient in gradients.items():
        assert (gradient == 0.0).all(), name


@pytest.mark.parametrize(("name", "value"), [("softmax", 0.0), ("log_softmax", -np.inf)])
def test_fully_masked_rows_of_softmax(name, value):
    @jax.jit
    def value_and_gradient(x):
        out, gradient = jax.vjp(lambda x: getattr(reference, name)(x, mask=jnp.zeros((3, 4), bool)), x)
        return out, *gradient(jnp.ones_like(out))

    out, gradient = value_and_gradient(jnp.ones((3, 4)))
    assert (out == value).all() and (gradient == 0.0).all()


# --- Removing and restoring padding -------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 7, 2), (2, 3, 2, 2), (2, 0, 4)], ids=str)
def test_remove_and_restore_padding(shape, spare):
    rng = np.random.default_rng(0)
    mask = rng.random(shape[:2]) < 0.6
    x = _poisoned(rng.standard_normal(shape), mask.reshape(*mask.shape, *[1] * (len(shape) - 2)))
    kept = oracle.padding_indices(mask)

    @jax.jit
    def there_and_back(x, mask):
        packed, indices, cu_seqlens = reference.remove_padding(x, mask, capacity=len(kept) + spare)
        restored = reference.restore_padding(packed + 1.0, indices, batch=shape[0], length=shape[1])
        return packed, indices, cu_seqlens, restored

    packed, indices, cu_seqlens, restored = map(np.asarray, there_and_back(x, mask))
    flat = x.reshape(-1, *shape[2:])
    np.testing.assert_array_equal(packed[: len(kept)], flat[kept])
    assert (packed[len(kept) :] == 0.0).all()
    assert (indices.dtype, cu_seqlens.dtype) == (np.int32, np.int32)
    assert indices.tolist() == kept + [mask.size] * spare
    assert cu_seqlens.tolist() == [0, *np.cumsum(mask.sum(axis=1)).tolist()]
    expected = np.zeros_like(flat)
    expected[kept] = flat[kept] + 1.0
    np.testing.assert_array_equal(restored, expected.reshape(shape))


def test_gradients_of_removing_and_restoring_padding():
    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    clean = {"x": np.random.default_rng(0).standard_normal((3, 3, 2)).astype(np.float32)}

    def there_and_back(x):
        packed, indices, _ = reference.remove_padding(x, jnp.asarray(mask), capacity=7)
        return reference.restore_padding(packed * packed, indices, batch=3, length=3)

    assert_padding_is_ignored(
        there_and_back, clean, {"x": _poisoned(clean["x"], mask[..., None])}, {"x": ~mask[..., None]}
    )
    grad = jax.jit(jax.grad(lambda x: there_and_back(x).sum()))(clean["x"])
    np.testing.assert_array_equal(grad, np.where(mask[..., None], 2.0 * clean["x"], 0.0).astype(np.float32))


def test_nan_cotangents_of_padding_reach_no_gradient(key):
    q, k, v = jax.random.normal(key, (3, 1, 4, 2, 8))
    lengths = jnp.array([3])

    def run(q, k, v):
        return reference.dot_product_attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)

    out, vjp = jax.vjp(run, q, k, v)
    ones = jnp.ones_like(out)
    for got, expected in zip(vjp(ones.at[:, 3].set(jnp.nan)), vjp(ones), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_packed_sequence_beyond_the_rows_is_cut():
    qkv = jax.random.normal(jax.random.key(0), (6, 3, 2, 4))
    attend = jax.jit(functools.partial(reference.varlen_qkv_attention, max_seqlen=9))
    found, expected = (attend(qkv, jnp.array(ends)) for ends in ([0, 4, 9], [0, 4, 6]))
    np.testing.assert_allclose(found, expected, atol=1e-6)
