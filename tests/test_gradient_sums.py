"""Gradients that are sums over many rows are added up in float32 and rounded once: every op, every shared argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cases
import jaxft
from compare import errors, magnitude, ulp
from jaxft.models import attention_fn
from jaxft.models.positions import disentangled_attention

ROWS, D = 10_000, 8
ROW, KERNEL, VECTOR = (ROWS, D), (D, D), (D,)
NORM = {"gamma": VECTOR, "beta": VECTOR}
LAYER = {"x": ROW, "kernel": KERNEL, "bias": VECTOR}
RESIDUAL = {"x": ROW, "bias": VECTOR, "residual": ROW}
TABLES = {"word": (4, D), "position": (10, D), "token_type": (2, D)}
IDS = jnp.zeros((1000, 10), jnp.int32)  # one token, 10,000 times
LABELS = jnp.zeros(ROWS, jnp.int32)

partial = functools.partial
CASES = {
    "layer_norm": (jaxft.layer_norm, {"x": ROW, **NORM}),
    "residual": (partial(jaxft.bias_residual_layer_norm, return_sum=True), RESIDUAL | NORM),
    "rms_norm": (jaxft.rms_norm, {"x": ROW, "gamma": VECTOR, "residual": ROW}),
    "embeddings": (partial(jaxft.embeddings_layer_norm, IDS), TABLES | NORM),
    "embeddings_ids": (
        partial(jaxft.embeddings_layer_norm, IDS, position_ids=IDS + 3, token_type_ids=IDS + 1),
        TABLES,
    ),
    "bias_activation": (jaxft.bias_activation, {"x": ROW, "bias": VECTOR}),
    "gated_activation": (jaxft.gated_activation, {"x": ROW, "bias": VECTOR}),
    "softmax": (jaxft.softmax, {"x": ROW, "bias": VECTOR}),
    "log_softmax": (jaxft.log_softmax, {"x": (10, 1000, D), "bias": (10, 1, D)}),
    "split": (partial(jaxft.qkv_bias_split_heads, num_heads=2), {"qkv": (10, 1000, 3 * D), "bias": (3 * D,)}),
    "dense": (jaxft.dense, LAYER),
    "dense_rotary": (
        partial(jaxft.dense_rotary, positions=np.zeros((), np.int32), num_heads=2),
        LAYER | {"kernel": (D, 3 * D), "bias": (3 * D,)},
    ),
    "dense_gelu": (partial(jaxft.dense, activation="gelu"), LAYER | {"residual": ROW}),
    "dense_gate": (partial(jaxft.dense, activation="gelu", gate="first"), LAYER),
    "dense_residual": (jaxft.dense_residual_layer_norm, LAYER | RESIDUAL | NORM),
    "feed_forward": (
        jaxft.feed_forward_residual_layer_norm,
        {"x": ROW, "in_kernel": KERNEL, "in_bias": VECTOR, "out_kernel": KERNEL, "out_bias": VECTOR, **NORM},
    ),
    "feed_forward_gate": (
        partial(jaxft.feed_forward_residual_layer_norm, gate="first", activation="silu", out_bias=None, beta=None),
        {"x": ROW, "in_kernel": (D, 2 * D), "in_bias": (2 * D,), "out_kernel": KERNEL, "gamma": VECTOR},
    ),
    "max_sim": (
        lambda queries, documents, implementation: jaxft.max_sim(queries, documents),
        {"queries": (2, 3, D), "documents": (ROWS, 2, D)},
    ),
    "cross_entropy": (
        lambda **floats: jaxft.linear_cross_entropy(labels=LABELS, **floats).total,
        {"x": ROW, "embedding": (5, D), "bias": (5,)},
    ),
    "attention": (
        jaxft.dot_product_attention,
        {"query": (1, ROWS // 2, 2, D), "key": (1, 5, 1, D), "value": (1, 5, 1, D), "bias": (1, 1, 1, 5)},
    ),
    "relative_bias": (jaxft.qkv_attention, {"qkv": (500, 20, 3, 1, D), "relative_bias": (1, 7)}),
    "attention_fn": (
        attention_fn,
        {"query": (300, 2, 17, 1, D), "key": (300, 2, 5, 1, D), "value": (300, 2, 5, 1, D), "bias": (1, 2, 1, 1, 5)},
    ),
}


def alike(rng, shape):
    """Returns rows that are alike, because gradients that cancel would hide an error."""
    width = shape[-1] if shape else 1
    row = rng.uniform(0.5, 1.5, width) * np.where(np.arange(width) % 3, -1.0, 1.0)
    return row.reshape(shape[-1:]) * (1.0 + 0.2 * rng.standard_normal(shape))


def cotangents(out, scale):
    """Returns cotangents whose sum over the first rows is larger than the whole sum, so that float16 would overflow."""

    def one(leaf):
        x = alike(np.random.default_rng(1), leaf.shape)
        rows = x.reshape(-1, leaf.shape[-1] if leaf.shape else 1)
        rows[3 * len(rows) // 4 :] *= -1.0
        return jnp.asarray(x * scale, leaf.dtype)

    return jax.tree.map(one, out)


@pytest.mark.parametrize("dtype", [cases.DTYPES[1], *cases.slow(cases.DTYPES[2])])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "xla") for name in CASES),
     *cases.slow_cases(*((name, "triton") for name in CASES if name not in ("cross_entropy", "max_sim")))],
)  # fmt: skip
def test_sums_over_rows_are_float32(name, implementation, dtype):
    (op, shapes), rng = CASES[name], np.random.default_rng(0)
    floats = {n: jnp.asarray(alike(rng, shape), dtype) for n, shape in shapes.items()}
    shared = [n for n, x in floats.items() if x.size < ROWS]
    out = jax.eval_shape(lambda floats: op(**floats, implementation="xla"), floats)

    def gradients(implementation):
        def run(floats, cotangents):
            return jax.vjp(lambda floats: op(**floats, implementation=implementation), floats)[1](cotangents)[0]

        return cases.jit(run)

    exact = cases.in_float64(gradients("xla"), floats, cotangents(out, 1.0))
    scale = 2.0 ** np.floor(np.log2(2.0**15.9 / max(magnitude(exact[n]) for n in shared)))
    got = gradients(implementation)(floats, cotangents(out, scale))
    for n in shared:
        assert errors(n, got[n], exact[n] * scale).max() <= ulp(magnitude(exact[n] * scale), dtype), n


def test_vmapped_rows_of_dense_are_summed_in_float32():
    """Without a batch axis of its own, the op adds no rows: JAX adds up the gradients of the examples."""
    x, kernel, bias = jnp.zeros((ROWS, 1, D)), jnp.eye(D), jnp.zeros(D)
    x, kernel, bias = (a.astype(jnp.float16) for a in (x, kernel, bias))
    f = jax.vmap(functools.partial(jaxft.dense, implementation="xla"), in_axes=(0, None, None))
    out, pull_back = jax.vjp(lambda bias: f(x, kernel, bias), bias)
    cotangent = jnp.where(jnp.arange(ROWS) < 3 * ROWS // 4, 12.0, -12.0).astype(out.dtype)[:, None, None]
    np.testing.assert_array_equal(pull_back(jnp.broadcast_to(cotangent, out.shape))[0], 6 * ROWS)


@pytest.mark.parametrize("implementation", ["xla", *cases.slow("triton")])
@pytest.mark.parametrize("name", ["dense", "dense_rotary", "dense_gelu", "dense_residual", "feed_forward"])
def test_vmapped_matmuls_are_summed_in_float32(name, implementation):
    """XLA's CPU backend adds up some batched matmuls in bfloat16: 8,064 instead of 10,000 ones."""
    (op, shapes), rng = CASES[name], np.random.default_rng(0)
    rows = {n: shape for n, shape in shapes.items() if shape == ROW}
    floats = {n: jnp.asarray(alike(rng, shape), jnp.bfloat16) for n, shape in shapes.items()}

    def gradients(floats, implementation=implementation):
        axes = {n: 0 if n in rows else None for n in floats}
        f = jax.vmap(lambda floats: op(**floats, implementation=implementation), in_axes=(axes,))
        out, pull_back = jax.vjp(f, floats)
        return pull_back(cotangents(out, 1.0))[0]

    exact = cases.in_float64(partial(gradients, implementation="xla"), floats)
    got = jax.jit(gradients)(floats)  # with XLA's own options: `cases.jit` turns off what adds up in bfloat16
    for n in shapes.keys() - rows:
        assert errors(n, got[n], exact[n]).max() <= ulp(magnitude(exact[n]), jnp.bfloat16), n


SMALL = {ROWS: 6, ROWS // 2: 3, 1000: 3, 300: 3, 17: 2}


def over_examples(count, shapes):
    """Returns random arrays of few rows. The names in `mapped` have an axis of examples in front, with equal halves."""

    def one(rng, shape, mapped, dtype):
        shape = tuple(SMALL.get(size, size) for size in shape)
        x = rng.standard_normal((count // 2,) * mapped + shape)
        return jnp.asarray(np.concatenate([x, x]) if mapped else x, dtype)

    return lambda rng, mapped, dtype: {n: one(rng, shape, n in mapped, dtype) for n, shape in shapes.items()}


def cancelling(rng, shape, dtype):
    """Returns random cotangents of examples. Those of the second half nearly cancel those of the first half."""
    half = shape[0] // 2
    x = 1.0 + 0.3 * rng.standard_normal(shape)
    x[half:] = 0.01 * rng.standard_normal(x[half:].shape) - x[:half]
    return jnp.asarray(x, dtype)


def vmapped_gradients(call, floats, mapped, others=()):
    """Returns a function that computes the gradients of the `floats` that the examples share."""
    axes = {n: 0 if n in mapped else None for n in floats}

    def run(implementation, floats, cotangents):
        def every(shared):
            f = jax.vmap(lambda f, *masks: call(*masks, **f, implementation=implementation), (axes, *[0] * len(others)))
            return f({n: shared.get(n, x) for n, x in floats.items()}, *others)

        return jax.vjp(every, {n: x for n, x in floats.items() if n not in mapped})[1](cotangents)[0]

    return run


def assert_examples_are_summed(run, floats, cotangents, *, rounds=False, kernel=True):
    """Asserts that gradients err by few ulp of the sum, although the gradients of the examples are much larger.

    If the op `rounds` a gradient in between to 16 bits, plain jnp may err more. A kernel errs at most twice as much.
    The kernels of attention, and no others, round the gradient of the logits, so queries and keys are not compared.
    """
    exact = cases.in_float64(partial(run, "xla"), floats, cotangents)
    plain = cases.jit(partial(run, "xla"))(floats, cotangents)
    got = cases.jit(partial(run, "triton"))(floats, cotangents) if kernel else plain
    for n, x in plain.items():
        unit, error = ulp(magnitude(exact[n]), x.dtype), errors(n, x, exact[n]).max()
        assert rounds or error <= 2 * unit, n
        assert n in ("query", "key", "qkv") or errors(n, got[n], exact[n]).max() <= 2 * error + 2 * unit, n


SPLIT_K = {"x": (ROWS, 512), "kernel": (512, D), "bias": VECTOR, "residual": ROW, **NORM}
EXAMPLES = CASES | {
    "residual": (jaxft.bias_residual_layer_norm, CASES["residual"][1]),
    "softmax": (jaxft.softmax, {"x": ROW, "bias": (1, D)}),
    "full_softmax": (partial(jaxft.softmax, scale=0.5), {"x": ROW, "bias": ROW}),
    "log_softmax": (jaxft.log_softmax, {"x": ROW, "bias": VECTOR}),
    "split_k": (jaxft.dense_residual_layer_norm, SPLIT_K),
    "embeddings": (partial(jaxft.embeddings_layer_norm, IDS[:2, :3]), TABLES | NORM),
    "embeddings_ids": (
        partial(jaxft.embeddings_layer_norm, IDS[:2, :3], position_ids=IDS[:2, :3] + 3, token_type_ids=IDS[:2, :3] + 1),
        TABLES | NORM,
    ),
    "cross_entropy": (
        lambda **floats: jaxft.linear_cross_entropy(labels=LABELS[:6], **floats).total, CASES["cross_entropy"][1]
    ),
    "attention_bias": (jaxft.dot_product_attention, CASES["attention"][1] | {"bias": (1, 1, 3, 5)}),
    "own_bias": (partial(jaxft.dense, activation="gelu"), {"bias": VECTOR, "x": ROW, "kernel": KERNEL}),
}  # fmt: skip
del EXAMPLES["attention_fn"]
QUICK = ("residual", "embeddings_ids", "softmax", "dense_gelu", "own_bias", "split_k", "attention")


@pytest.mark.parametrize("dtype", [cases.DTYPES[1], *cases.slow(cases.DTYPES[2])])
@pytest.mark.parametrize("last", [False, *cases.slow(True)])
@pytest.mark.parametrize("name", [*QUICK, *cases.slow(*(n for n in EXAMPLES if n not in QUICK))])
def test_examples_that_share_an_array_are_summed_in_float32(name, last, dtype):
    """JAX adds up the gradients of the examples of a vmap. A kernel gives them to JAX in float32."""
    (op, shapes), rng = EXAMPLES[name], np.random.default_rng(0)
    mapped = [list(shapes)[-1 if last or name.startswith("embeddings") else 0]]
    floats = over_examples(32, shapes)(rng, mapped, dtype)
    run = vmapped_gradients(op, floats, mapped)
    axes = {n: 0 if n in mapped else None for n in floats}
    out = jax.eval_shape(jax.vmap(lambda f: op(**f, implementation="xla"), (axes,)), floats)
    cotangents = jax.tree.map(lambda leaf: cancelling(rng, leaf.shape, leaf.dtype), out)
    rounds = any(matmul in name for matmul in ("dense", "own_bias", "split_k", "feed_forward", "cross_entropy"))
    assert_examples_are_summed(run, floats, cotangents, rounds=rounds, kernel=name != "cross_entropy")


def masked(op, name="mask"):
    """Returns the op as a function whose first argument is the given one."""
    return lambda mask, **floats: op(**{name: mask}, **floats)


@pytest.mark.parametrize("dtype", [cases.DTYPES[1], *cases.slow(cases.DTYPES[2])])
@pytest.mark.parametrize("name", ["key and value", *cases.slow("qkv", "packed")])
def test_attention_of_examples_with_their_own_masks(name, dtype):
    """The examples share keys and values, but not which keys they attend to."""
    rng = np.random.default_rng(0)
    mask = jnp.asarray(np.tile(rng.random((16, 1, 1, 1, 5)) < 0.7, (2, 1, 1, 1, 1)))
    ends = np.stack([np.zeros(32), np.tile(rng.integers(1, 5, 16), 2), np.full(32, 5)], axis=1)
    if name == "key and value":
        shapes = {"query": (1, 6, 2, D), "key": (1, 5, 1, D), "value": (1, 5, 1, D)}
        mapped, out, masks = ["query"], (32, 1, 6, 2, D), mask
        call = masked(jaxft.dot_product_attention)
    elif name == "qkv":
        shapes, mapped, out, masks = {"qkv": (1, 5, 3, 2, D)}, [], (32, 1, 5, 2, D), mask
        call = masked(jaxft.qkv_attention)
    else:
        shapes, mapped, out, masks = {"qkv": (5, 3, 2, D)}, [], (32, 5, 2, D), jnp.asarray(ends, jnp.int32)
        call = masked(partial(jaxft.varlen_qkv_attention, max_seqlen=5), "cu_seqlens")
    floats = over_examples(32, shapes)(rng, mapped, dtype)
    run = vmapped_gradients(call, floats, mapped, (masks,))
    assert_examples_are_summed(run, floats, cancelling(rng, out, dtype), rounds=name == "packed")


@pytest.mark.parametrize("mapping", ["inner", "outer"])
def test_nested_vmaps_sum_in_float32(mapping):
    """One vmap maps the bias, and the other one, over the 32 examples, shares it."""
    rng = np.random.default_rng(0)
    floats = over_examples(32, {"x": (3, 6, D), "bias": (3, D)})(rng, ["x"], jnp.float16)
    cotangents = cancelling(rng, (32, 3, 6, D), jnp.float16)

    def run(implementation, floats, cotangents):
        f = partial(jaxft.bias_activation, implementation=implementation)
        inner = jax.vmap(jax.vmap(f), (0, None))
        outer = jax.vmap(jax.vmap(f, (0, None)), (1, 0), 1)
        every = inner if mapping == "inner" else outer
        return {"bias": jax.vjp(lambda bias: every(floats["x"], bias), floats["bias"])[1](cotangents)[0]}

    assert_examples_are_summed(run, floats, cotangents)


def test_examples_overflow_only_together():
    """With a loss scale of 2^15, the gradient of one example exceeds float16, and the sum does not."""
    x, bias = jnp.zeros((2, 64, D), jnp.float16), jnp.zeros(D, jnp.float16)
    cotangent = jnp.stack([jnp.full((64, D), 2.0**15), jnp.full((64, D), 32 - 2.0**15)]).astype(jnp.float16)
    for implementation in ("xla", "triton"):
        f = jax.vmap(partial(jaxft.bias_activation, activation="relu", implementation=implementation), (0, None))
        got = jax.vjp(lambda bias, f=f: f(x + 1, bias), bias)[1](cotangent)[0]
        np.testing.assert_array_equal(got, np.full(D, 64 * 32.0))


def test_second_derivatives_of_cross_entropy_are_not_nan():
    """With a loss scale, the cotangent of an unscaled gradient exceeds float16. Too large derivatives are inf."""
    rng = np.random.default_rng(0)
    floats = {"x": (6, D), "embedding": (5, D), "bias": (5,)}
    floats = {n: jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float16) for n, shape in floats.items()}

    def penalty(floats):
        def loss(floats):
            return jaxft.linear_cross_entropy(labels=LABELS[:6], **floats).total * 2.0**12

        gradients = jax.grad(loss)(floats)
        return sum(jnp.sum(jnp.square(d.astype(jnp.float32))) for d in gradients.values()) * 2.0**-9

    got, exact = jax.grad(penalty)(floats), jax.grad(penalty)({n: x.astype(jnp.float32) for n, x in floats.items()})
    for n, x in got.items():
        expected = np.asarray(exact[n], np.float64)
        assert errors(n, x, expected).max() <= 0.01 * magnitude(expected), n


def test_hessian_of_embeddings_is_summed_in_float32():
    """The gradient of a gradient also goes through the table."""

    def squared_gradient(word):
        y, pull_back = jax.vjp(
            lambda word: jaxft.embeddings_layer_norm(IDS, word, position, implementation="xla"), word
        )
        (d,) = pull_back(jnp.broadcast_to(weights.astype(y.dtype), y.shape))
        return jnp.sum(d.astype(jnp.float32) ** 2) / ROWS**2

    position, weights = jnp.zeros((10, D), jnp.bfloat16), jnp.arange(D) % 3
    word = jnp.asarray(np.random.default_rng(0).standard_normal((4, D)), jnp.bfloat16)
    got = jax.grad(squared_gradient)(word)
    position = position.astype(jnp.float32)
    exact = np.asarray(jax.grad(squared_gradient)(word.astype(jnp.float32)), np.float64)
    assert errors("word", got, exact).max() <= 0.02 * magnitude(exact)


@pytest.mark.parametrize("relative", [None, 0.01])
def test_attention_gradients_do_not_overflow_inside(relative):
    """A product of 2^15 and values summed over a head exceeds float16; the gradients themselves do not.

    With `relative`, the attention is DeBERTa's, which has embeddings of relative positions of this size.
    """
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, 8, 1, 64)), jnp.float16) for _ in range(3)]
    arrays[0] *= jnp.float16(0.01)
    if relative:
        arrays[1] *= jnp.float16(0.01)
        arrays.append(jnp.asarray(relative * rng.standard_normal((8, 2, 1, 64)), jnp.float16))

    def gradients(dtype):
        def attend(q, k, v, *table):
            if table:
                return disentangled_attention(jnp.stack([q, k, v], axis=2), *table, None, buckets=4, farthest=8)
            return jaxft.dot_product_attention(q, k, v, scale=2.0**-9, implementation="xla")

        return jax.vjp(attend, *(x.astype(dtype) for x in arrays))[1](jnp.full((1, 8, 1, 64), 2.0**13, dtype))

    for got, exact in zip(gradients(jnp.float16), gradients(jnp.float32), strict=True):
        exact = np.asarray(exact, np.float64)
        assert errors("gradient", got, exact).max() <= 4 * ulp(magnitude(exact), jnp.float16)


@pytest.mark.parametrize("implementation", ["xla", *cases.slow("triton")])
def test_far_and_near_pairs_overflow_only_together(implementation):
    """All keys at a distance of two or more are the last element of the table, as those at a distance of one."""

    def residual(table):
        qkv = jnp.zeros((16, 3, 3, 1, 8), jnp.float16)
        options = {"return_residual": True, "implementation": implementation}
        return jaxft.qkv_attention(qkv, relative_bias=table, **options)[1]

    out, pull_back = jax.vjp(residual, jnp.zeros((1, 3), jnp.float16))
    cotangent = jnp.zeros_like(out).reshape(16, 3).at[:, 1:].set(jnp.array([5.0, -3.0]) * 2.0**13)
    (got,) = pull_back(cotangent.reshape(out.shape))  # query 1 has one key at its left, and query 2 has two
    np.testing.assert_allclose(got[0, 0], 16 * (5 - 2 * 3) * 2.0**13 / 3, rtol=1e-3)


@pytest.mark.parametrize("packed", [False, *cases.slow(True)])
def test_models_sum_gradients_in_float32(packed):
    """All parameters of an encoder with a head, 16 bits against float32 of the same numbers."""
    config = jaxft.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=4,
    )  # fmt: skip
    batch, length = ROWS // 4, 4
    ids, labels = jnp.full((batch, length), 5), jnp.full((batch, length), 7)
    options = {}
    if packed:
        ids, labels = ids.reshape(-1), labels.reshape(-1)
        options = {"cu_seqlens": jnp.arange(batch + 1) * length, "max_seqlen": length}

    def gradients(dtype, like=None):
        model = jaxft.BertForMaskedLM(config, dtype=dtype, param_dtype=dtype, implementation="xla", rngs=nnx.Rngs(0))
        graph, params = nnx.split(model)
        if like is not None:
            params = jax.tree.map(lambda x: x.astype(dtype), like)
        grad = cases.jit(jax.grad(lambda params: nnx.merge(graph, params).loss(ids, labels, **options).mean))
        return params, grad(params)

    params, got = gradients(jnp.bfloat16)
    _, exact = gradients(jnp.float32, params)
    for (path, x), wanted in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(exact), strict=True):
        wanted = np.asarray(wanted, np.float64)
        error = np.linalg.norm(np.asarray(x, np.float64) - wanted)
        assert error <= 0.01 * np.linalg.norm(wanted), jax.tree_util.keystr(path)
