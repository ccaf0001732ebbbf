"""All options of attention at once, forward and backward: random cases with blocks smaller than the sequences."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import (
    BITWISE,
    ONE_DTYPE,
    check,
    check_padding,
    normal,
    random_cotangents,
    seeds,
    slow,
    slow_cases,
    some,
    value_and_gradients,
)
from checked import checked
from compare import magnitude
from jaxft import reference
from jaxft.dropout import dropout_mask
from jaxft.kernels.triton import attention_backward
from jaxft.kernels.triton.attention import forward
from jaxft.kernels.triton.attention_problem import Options, Rules
from jaxft.tuning.table import AttentionConfig


def attention_case(rng, head_sizes=(1, 8, 16, 24, 40, 64)):
    """Returns sizes, float arrays and options of a random call of `dot_product_attention` or `qkv_attention`."""
    k, groups = (int(n) for n in rng.integers(1, 4, 2))
    t, s = (int(n) for n in rng.choice([1, 2, 7, 16, 31, 48, 70], 2))
    h = int(rng.choice(head_sizes))
    # With few elements, the largest error is a matter of chance.
    b = max(int(rng.integers(1, 4)), 32 // (min(t, s) * k))
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))
    packed = rng.random() < 0.4
    if packed:
        s, groups = t, 1
        floats = normal(rng, dtype, qkv=(b, t, 3, k, h))
    else:
        floats = normal(rng, dtype, query=(b, t, k * groups, h), key=(b, s, k, h), value=(b, s, k, h))
    full = (b, k * groups, t, s)

    def broadcast(least=1):
        shape = tuple(size if rng.random() < 0.6 else 1 for size in full)
        return shape if np.prod(shape) >= least else broadcast(least)

    floats |= normal(rng, some(rng, jnp.float32) or dtype, bias=some(rng, broadcast(16), 0.4))
    options = {
        "mask": some(rng, rng.random(broadcast()) < rng.choice([0.2, 0.8]), 0.4),
        "scale": some(rng, float(rng.choice([0.0, -0.4, 0.7])), 0.2),
        "is_causal": bool(rng.random() < 0.3),
        "query_seq_lengths": some(rng, rng.integers(0, t + 1, b, np.int32), 0.3),
        "key_value_seq_lengths": some(rng, rng.integers(0, s + 1, b, np.int32), 0.3),
        "local_window_size": some(rng, tuple(int(w) for w in rng.integers(0, 40, 2)), 0.3),
        "return_residual": bool(rng.random() < 0.5),
    }
    if rng.random() < 0.3:
        order = np.sort if rng.random() < 0.7 else lambda x, axis: x
        options["query_segment_ids"] = order(rng.integers(0, 4, (b, t), np.int32), axis=1)
        options["key_value_segment_ids"] = order(rng.integers(0, 4, (b, s), np.int32), axis=1)
    return full, floats, options


def allowed_pairs(full, mask, **options):
    """Returns a mask [B, N, T, S] of the queries and keys that attend to each other."""
    names = reference.attention_mask.__kwdefaults__
    allowed = reference.attention_mask(
        *full[2:], mask=mask, **{name: options[name] for name in names if name in options}
    )
    return np.broadcast_to(True if allowed is None else allowed, full)


def dropout(rng, full):
    """Returns options of dropout for the ops, and the same dropout for the oracle."""
    if rng.random() < 0.7:
        return {}, {}
    key, rate = jax.random.key(int(rng.integers(1000))), float(rng.choice([0.1, 0.6]))
    keep = np.asarray(dropout_mask(key, rate, full))
    return {"dropout_rate": rate, "dropout_rng": key}, {"keep": keep, "rate": rate}


def random_blocks(rng):
    """Returns random blocks for each kernel, and a number of programs for the kernels that can share tiles."""
    keys = [16, 128], [16, 32], [16, 32, 128]
    forward, dq, dkv = ((int(rng.choice([16, 32])), int(rng.choice(block_k))) for block_k in keys)
    shared = (int(n) for n in rng.choice([0, 1, 7], 2))
    return (*forward, next(shared)), dq, (*dkv, next(shared))


MASKS = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 3)},
    "lengths": {
        "query_seq_lengths": np.array([50, 20], np.int32),
        "key_value_seq_lengths": np.array([33, 0], np.int32),
    },
    "segments": {
        "query_segment_ids": np.repeat([[0, 2, 1], [3, 4, 4]], [20, 16, 14], axis=1).astype(np.int32),
        "key_value_segment_ids": np.repeat([[0, 1, 5], [3, 4, 9]], [20, 20, 10], axis=1).astype(np.int32),
    },
    "keys": {"mask": np.arange(50) % 3 > np.array([0, 5])[:, None, None, None]},
    "pairs": {"mask": (np.arange(50)[:, None] < 30) & (np.arange(50) > 20)},
}
SOME_MASKS = "lengths", "segments"  # the random cases have all masks


def pairs(name, rows, keys):
    """Returns a mask [2, T, S] of the queries and keys of two sequences that attend to each other."""
    options = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in MASKS[name].items()}
    if name == "pairs":
        options["mask"] = options["mask"][None, None]
    allowed = reference.attention_mask(rows, keys, **options)
    return np.broadcast_to(True if allowed is None else allowed, (2, 1, rows, keys))[:, 0]


@pytest.mark.parametrize(
    ("name", "block_k"),
    [*((name, 16) for name in SOME_MASKS), *slow_cases(*((name, 16) for name in MASKS if name not in SOME_MASKS),
     ("lengths", 64), ("pairs", 64))],
)  # fmt: skip
def test_padding_reaches_no_gradient(name, block_k, blocks):
    blocks((16, 32), (16, 16), (16, block_k))
    check_padding_of(MASKS[name], pairs(name, 50, 50))


@pytest.mark.parametrize("block", [16, *slow(64)])
def test_keys_outside_of_all_windows_reach_no_gradient(block, blocks):
    blocks(*[(block, block)] * 3)
    check_padding_of(MASKS["window"], pairs("window", 20, 50))


@pytest.mark.parametrize(
    ("name", "length"),
    [("causal", 40), ("queries", 40), ("queries", 16),
     *slow_cases(("causal", 16), *itertools.product(("keys", "holes"), (16, 40)))],
)  # fmt: skip
def test_padding_in_one_block_reaches_no_gradient(name, length, blocks):
    """Queries without keys are visited, but a half of a block without any pair is skipped."""
    lengths = np.array([0, length, 9, 32, 33], np.int32).clip(max=length)
    options = {
        "queries": {"query_seq_lengths": lengths},
        "keys": {"key_value_seq_lengths": lengths},
        "holes": {"mask": np.arange(length) % 3 > np.array([-1, 0, 5, 0, 1])[:, None, None, None]},
        "causal": {"is_causal": True, "key_value_seq_lengths": lengths},
    }[name]
    block = 16 if length == 16 else 64
    blocks((block, block), (block, block), (block, block))
    check_padding_of(options, allowed_pairs((5, 2, length, length), **{"mask": None} | options)[:, 0])


def check_padding_of(options, attends):
    """Asserts that NaN and infinities of unused rows and of their cotangents reach no output and no gradient."""
    (batch, rows, keys), heads = attends.shape, (2, 8)
    query, key = (batch, rows, *heads), (batch, keys, *heads)
    clean = normal(np.random.default_rng(0), jnp.float32, query=query, key=key, value=key)
    queries, keys = attends.any(axis=2)[:, :, None, None], attends.any(axis=1)[:, :, None, None]

    def attend(**floats):
        out, lse = jaxft.dot_product_attention(**floats, **options, return_residual=True, implementation="triton")
        return out, jnp.where(queries[..., 0], lse, 0.0)

    check_padding(attend, clean, {"query": queries, "key": keys, "value": keys})
    run, cotangents = value_and_gradients(attend), random_cotangents(attend, clean)
    poisoned = tuple(jnp.where(use, x, jnp.nan) for use, x in zip((queries, queries[..., 0]), cotangents, strict=True))
    chex.assert_trees_all_equal(run(clean, poisoned), run(clean, cotangents))


@pytest.mark.parametrize("longest", [16, 32, *slow(40)])
def test_packed_sequence_depends_on_no_neighbour(longest, blocks):
    """Values and gradients are bitwise the same, whatever lies before and after the sequence."""
    blocks((16, 16), (16, 32), (32, 16))
    lengths = np.array([longest - 5, 7, longest])
    parts = [normal(np.random.default_rng(i), jnp.bfloat16, qkv=(n, 3, 2, 8))["qkv"] for i, n in enumerate(lengths)]

    def run(order):
        boundaries = np.append(0, np.cumsum(lengths[order])).astype(np.int32)
        qkv = jnp.concatenate([parts[i] for i in order] + [jnp.full((9, 3, 2, 8), jnp.nan, jnp.bfloat16)])

        def attend(qkv):
            options = {"max_seqlen": longest, "is_causal": True, "implementation": "triton"}
            return jaxft.varlen_qkv_attention(qkv, boundaries, **options)

        out, gradients = value_and_gradients(attend)({"qkv": qkv}, qkv[:, 0])
        found = jnp.concatenate([out[:, None], gradients["qkv"]], axis=1)
        assert (found[boundaries[-1] :] == 0.0).all()
        return {i: found[boundaries[n] : boundaries[n + 1]] for n, i in enumerate(order)}

    chex.assert_trees_all_equal(run([0, 1, 2]), run([2, 0, 1]))


@pytest.mark.parametrize("block", [32, *slow(16)])
def test_rows_of_overlong_sequences_have_no_gradient(block, blocks):
    """Each tile of such a sequence writes the gradients of its rows, also where half of its keys are enough."""
    blocks(*[(block, block)] * 3)
    qkv, boundaries = jnp.asarray(np.random.default_rng(0).standard_normal((75, 3, 1, 8)), jnp.float32), [0, 60, 70]

    def gradient(implementation):
        def run(qkv, boundaries):
            return jaxft.varlen_qkv_attention(qkv, boundaries, max_seqlen=16, implementation=implementation)

        pull_back = jax.jit(lambda *x: jax.vjp(lambda qkv: run(qkv, x[1]), x[0])[1](x[0][:, 0])[0])
        return pull_back(qkv, jnp.asarray(boundaries))

    got = gradient("triton")
    np.testing.assert_allclose(got, gradient("xla"), rtol=1e-4, atol=1e-5)
    assert (got[16:60] == 0.0).all() and (got[70:] == 0.0).all()


@pytest.mark.parametrize("derivative", ["first", *slow("second")])
def test_two_kernels_compose(derivative, blocks):
    """The second kernel of the backward pass completes an array of the first, in transformed functions too."""
    blocks((16, 16), (16, 16), (16, 16))
    qkv = normal(np.random.default_rng(0), jnp.float32, qkv=(2, 20, 3, 2, 8))["qkv"]

    def loss(qkv, implementation):
        out = jaxft.qkv_attention(qkv, is_causal=True, implementation=implementation)
        return jnp.sum(out[..., 0] ** 2)

    def run(implementation):
        gradient = jax.grad(jax.checkpoint(lambda qkv: loss(qkv, implementation)))
        if derivative == "second":
            return jax.grad(lambda qkv: jnp.sum(gradient(qkv) ** 2))(qkv)
        scales = jnp.array([1.0, 0.5])
        mapped = jax.vmap(lambda scale: gradient(qkv * scale))(scales)
        _, scanned = jax.lax.scan(lambda carry, scale: (carry, gradient(qkv * scale)), None, scales)
        return mapped, scanned

    got, expected = (jax.jit(lambda name=name: run(name), compiler_options=BITWISE)() for name in ("triton", "xla"))
    if derivative == "first":
        chex.assert_trees_all_equal(got[0], got[1])
    chex.assert_trees_all_close(got, expected, atol=1e-4, rtol=1e-4)


CHECKED = {
    "plain": (Rules(), {}),
    "window": (Rules(), {"window": (5, 0)}),
    "lengths": (Rules(query_lengths=jnp.array([21, 0]), key_lengths=jnp.array([0, 17])), {}),
    "segments": (Rules(query_ids=jnp.arange(42).reshape(2, 21) // 8, key_ids=jnp.arange(38).reshape(2, 19) // 8), {}),
    "bias": (Rules(bias=jnp.ones((1, 2, 21, 19)), mask=jnp.ones((2, 1, 21, 1), bool)), {}),
    "columns": (Rules(bias=jnp.ones((2, 1, 1, 19)), mask=jnp.ones((2, 1, 1, 19), bool)), {}),
    "half": (Rules(bias=jnp.ones((2, 1, 1, 19)), key_lengths=jnp.array([16, 17])), {}),
    "dropout": (Rules(seed=jnp.array([1, 2], jnp.uint32)), {"dropout_rate": 0.5}),
}


SOME_CHECKED = ("plain", "columns", "varlen beyond")


@pytest.mark.parametrize(
    ("name", "block_k"),
    [*((name, 16) for name in SOME_CHECKED),
     *slow_cases(*((name, 16) for name in (*CHECKED, "packed", "varlen") if name not in SOME_CHECKED),
              ("window", 32), ("packed", 32), ("varlen", 32))],
)  # fmt: skip
def test_kernels_stay_within_the_arrays(name, block_k, monkeypatch):
    check_writes(name, AttentionConfig(16, block_k, 4, 1), monkeypatch)


@pytest.mark.parametrize("name", ["columns", *slow("varlen", "window", "packed half", "plain", "packed", "half")])
def test_single_block_kernels_stay_within_their_arrays(name, monkeypatch):
    """One block holds all queries and keys. Three programs share the tiles where they may."""
    check_writes(name, AttentionConfig(32, 32, 4, 1, 3), monkeypatch)


def check_writes(name, key_config, monkeypatch):
    monkeypatch.setattr(attention_backward, "_SHORT", 0)  # the 16-bit kernels then run as for long rows
    rules, static = CHECKED.get(name, (Rules(), {}))
    if name == "packed half":
        rules = Rules(key_lengths=jnp.array([16, 17]))
    options = Options(0.3, **static)
    key = value = None
    rng = np.random.default_rng(0)
    if name.startswith("packed"):
        (query,) = normal(rng, jnp.bfloat16, qkv=(2, 21, 3, 1, 5)).values()
    elif name.startswith("varlen"):
        (query,) = normal(rng, jnp.bfloat16, qkv=(50, 3, 1, 5)).values()
        offsets = [-9, 3, 40, 61] if name == "varlen beyond" else [0, 3, 3, 24]
        rules, options = Rules(cu_seqlens=jnp.array(offsets)), Options(0.3, max_seqlen=21)
    else:
        query, key, value = normal(rng, jnp.float32, q=(2, 21, 2, 5), k=(2, 19, 1, 5), v=(2, 19, 1, 5)).values()
    config = AttentionConfig(16, 16, 4, 1)
    with checked():
        out, *residual = forward(query, key, value, rules, options, return_residual=True,
                                 config=config, interpret=True)  # fmt: skip
        dlse = None if key_config.programs else residual[-1]  # programs share no tiles if there is one
        attention_backward.backward(out, dlse, query, key, value, rules, options, out, *residual,
                 query_config=config, key_config=key_config, interpret=True)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "options"),
    [*slow_cases((jnp.bfloat16, {"local_window_size": (2, 1), "scale": 1.0})), (jnp.float16, {"is_causal": True})],
    ids=["window", "causal"],
)  # fmt: skip
def test_long_rows(dtype, options, blocks):
    """Rows have more keys than those for which the backward pass computes some values twice."""
    blocks((64, 64), (64, 64), (64, 64))
    plain_options = options | {"return_residual": True}
    check(
        lambda implementation, qkv: jaxft.qkv_attention(qkv, **plain_options, implementation=implementation),
        lambda qkv: reference.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), **plain_options),
        lambda qkv: oracle.qkv_attention(qkv, **plain_options),
        normal(np.random.default_rng(0), dtype, qkv=(1, 150, 3, 2, 16)),
    )


@pytest.mark.parametrize("seed", seeds(3))
def test_random(seed, blocks):
    rng = np.random.default_rng(seed)
    case = attention_case(rng)
    drop = dropout(rng, case[0])
    blocks(*random_blocks(rng))
    check_random(case, drop, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1)[:200])
def test_random_large_heads(seed):
    """Large heads keep their default blocks, since other blocks exceed the shared memory."""
    rng = np.random.default_rng(seed)
    case = attention_case(rng, head_sizes=(80, 128, 200, 256))
    check_random(case, dropout(rng, case[0]), seed)


def check_random(case, dropped, seed):
    (full, floats, options), (drop, keep) = case, dropped
    op = jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention
    exact = oracle.qkv_attention if "qkv" in floats else oracle.dot_product_attention

    def plain(qkv=None, **f):
        f = f if qkv is None else dict(zip(("query", "key", "value"), jnp.moveaxis(qkv, 2, 0), strict=True)) | f
        return reference.dot_product_attention(**f, **options, **drop)

    check(lambda implementation, **f: op(**f, **options, **drop, implementation=implementation), plain,
          lambda **f: exact(**f, **options, **keep), floats, seed=seed,
          gradients=allowed_pairs(full, **options).sum(axis=3).max() > 1)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2))
def test_random_cases_at_the_default_precision(seed, blocks):
    """On a GPU the default is TF32, which XLA uses for some shapes only, so plain jnp sets no bound here."""
    rng = np.random.default_rng(seed)
    full, floats, options = attention_case(rng)
    floats = {name: x.astype(jnp.float32) for name, x in floats.items()}
    drop, _ = dropout(rng, full)
    blocks(*random_blocks(rng))
    op = jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention

    def run(implementation):
        return value_and_gradients(lambda **f: op(**f, **options, **drop, implementation=implementation))

    cotangents = random_cotangents(lambda **f: op(**f, **options, **drop, implementation="xla"), floats)
    expected = run("xla")(floats, cotangents)
    with jax.default_matmul_precision(None):
        got = run("triton")(floats, cotangents)

    def compare(got, expected):
        # With operands cut to TF32, plain jnp errs by 2.5e-3. A gradient that cancels out to 0 keeps its terms' errors.
        atol = 1e-2 * max(magnitude(np.asarray(expected)), 1.0)
        np.testing.assert_allclose(got, expected, rtol=0.0, atol=atol, err_msg=f"seed {seed}")

    jax.tree.map(compare, got, expected)


@pytest.mark.parametrize("head_size", [80, *slow(128, 256)])
def test_gradients_of_large_heads(head_size):
    """Heads are grouped and causal, with a bias for all pairs, in their default blocks."""
    floats = normal(np.random.default_rng(7), jnp.float32, query=(1, 40, 4, head_size), key=(1, 40, 2, head_size),
                    value=(1, 40, 2, head_size), bias=(1, 4, 40, 40))  # fmt: skip
    check(lambda implementation, **f: jaxft.dot_product_attention(**f, is_causal=True, implementation=implementation),
          lambda **f: reference.dot_product_attention(**f, is_causal=True),
          lambda **f: oracle.dot_product_attention(**f, is_causal=True), floats)  # fmt: skip


@pytest.mark.parametrize("seed", seeds(3))
def test_random_padding(seed, blocks):
    """NaN and infinities of unused rows and of their cotangents change no bit of the other rows."""
    rng = np.random.default_rng(seed)
    full, floats, options = attention_case(rng)
    blocks(*random_blocks(rng))
    attends = allowed_pairs(full, **options)
    b, n, _, s = full
    kv_heads = floats["key"].shape[2] if "key" in floats else n
    queries = np.swapaxes(attends.any(axis=3), 1, 2)[..., None]
    keys = np.swapaxes(attends.any(axis=2).reshape(b, kv_heads, -1, s).any(axis=2), 1, 2)[..., None]
    used = {"query": queries, "key": keys, "value": keys}
    if "qkv" in floats:
        used = {"qkv": np.stack([queries, keys, keys], axis=2)}
    op = jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention
    options |= {"return_residual": True, "implementation": "triton"}

    def attend(**floats):
        return op(**floats, **options)

    def poison(use, x):
        return jnp.where(use, x, np.resize([np.nan, np.inf, -np.inf, 6e4], x.shape).astype(x.dtype))

    run, cotangents = value_and_gradients(attend), random_cotangents(attend, floats)
    cotangents = cotangents[0], jnp.where(queries[..., 0], cotangents[1], 0.0)
    poisoned = {name: poison(used[name], x) if name in used else x for name, x in floats.items()}
    got = run(poisoned, (poison(queries, cotangents[0]), poison(queries[..., 0], cotangents[1])))
    chex.assert_trees_all_equal(got, run(floats, cotangents), custom_message=f"seed {seed}")


@pytest.mark.parametrize("block_k", [16, *slow(64)])
@pytest.mark.parametrize("maximum", ["drops NaN", *slow("keeps NaN")])
def test_nan_in_a_query_makes_gradients_nan(block_k, maximum, blocks, monkeypatch):
    """The gradients of a NaN query, and of the keys and values that it attends to, are NaN, so that training notices.

    Triton's maximum drops NaN, the interpreter's keeps it.
    """
    if maximum == "drops NaN":
        keeping, maximum_of_two = jnp.max, jnp.maximum

        def drop(x):
            return jnp.where(jnp.isnan(x), -jnp.inf, x) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) else x

        monkeypatch.setattr(jnp, "max", lambda x, axis: keeping(drop(x), axis=axis))
        monkeypatch.setattr(jnp, "maximum", lambda x, y: maximum_of_two(drop(x), drop(y)))
    jax.clear_caches()  # drops traces with the other maximum
    blocks((16, 16), (16, 16), (16, block_k))
    floats = normal(np.random.default_rng(3), jnp.float32, query=(1, 40, 1, 8), key=(1, 40, 1, 8), value=(1, 40, 1, 8))
    floats["query"] = floats["query"].at[0, 3].set(jnp.nan)

    def attend(**floats):
        return jaxft.dot_product_attention(**floats, local_window_size=(2, 15), implementation="triton")

    _, gradients = value_and_gradients(attend)(floats, floats["value"])
    assert jnp.isnan(gradients["query"][0, 3]).all()
    assert all(jnp.isnan(gradients[name][0, 1:19]).all() for name in ("key", "value"))
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_gradients_of_huge_logits(dtype):
    """A row in which one probability is nearly 1 has almost no gradient, however logits of 1e4 are rounded."""
    floats = normal(np.random.default_rng(4), dtype, qkv=(2, 64, 3, 2, 16))
    floats["qkv"] = floats["qkv"].at[:, :, :2].multiply(100.0)

    def plain(qkv):
        return reference.dot_product_attention(*jnp.moveaxis(qkv, 2, 0))

    check(lambda implementation, qkv: jaxft.qkv_attention(qkv, implementation=implementation), plain,
          oracle.qkv_attention, floats)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "programs"),
    [((7, 1, 20, 24), 512), ((1, 1, 20, 24), 12), *slow_cases(((1, 2, 20, 24), 512), ((1, 1, 20, 24), 1))], ids=str,
)  # fmt: skip
def test_gradient_of_a_shared_bias(shape, programs, blocks, monkeypatch):
    """The gradient is a sum of partial sums over some sequences each, and the numbers do not divide each other."""
    monkeypatch.setattr(attention_backward, "_PROGRAMS", programs)
    jax.clear_caches()  # drops traces with another number
    blocks((16, 16), (16, 16), (16, 16))
    rng = np.random.default_rng(6)
    floats = normal(rng, jnp.float32, query=(7, 20, 2, 8), key=(7, 24, 2, 8), value=(7, 24, 2, 8), bias=shape)
    check(lambda implementation, **f: jaxft.dot_product_attention(**f, implementation=implementation),
          reference.dot_product_attention, oracle.dot_product_attention, floats)  # fmt: skip


def test_bias_of_finfo_min_averages_all_values():
    """A row with finfo.min everywhere is the mean of all values, as in plain jnp."""
    floats = normal(np.random.default_rng(5), jnp.float32, query=(1, 20, 2, 8), key=(1, 20, 2, 8), value=(1, 20, 2, 8))
    bias = jnp.where(jnp.arange(20)[:, None] < 7, float(jnp.finfo(jnp.float32).min), 0.0)
    options = {"bias": bias, "return_residual": True}
    got, wanted = (jaxft.dot_product_attention(**floats, **options, implementation=name) for name in ("triton", "xla"))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", seeds(3))
def test_random_packed_sequences(seed, blocks):
    rng = np.random.default_rng(seed)
    b, n, h = int(rng.integers(0, 5)), int(rng.integers(1, 4)), int(rng.choice([1, 8, 24, 64]))
    longest = int(rng.choice([1, 7, 33, 64]))
    b = max(b, 64 // longest) if b else 0
    boundaries = np.append(0, np.cumsum(rng.integers(0, longest + 1, b))).astype(np.int32)
    rows = int(boundaries[-1]) + int(rng.choice([0, 1, 40]))
    dtype = jnp.dtype(str(rng.choice(["float32", "float16", "bfloat16"])))
    options = {
        "scale": some(rng, 0.7, 0.2),
        "is_causal": bool(rng.random() < 0.3),
        "local_window_size": some(rng, tuple(int(w) for w in rng.integers(0, 40, 2)), 0.3),
        "return_residual": bool(rng.random() < 0.5),
    }
    drop, keep = dropout(rng, (b, n, longest, longest))
    blocks(*random_blocks(rng))
    check(
        lambda implementation, qkv: jaxft.varlen_qkv_attention(
            qkv, boundaries, max_seqlen=longest, **options, **drop, implementation=implementation),
        lambda qkv: reference.varlen_qkv_attention(qkv, jnp.asarray(boundaries), max_seqlen=longest, **options, **drop),
        lambda qkv: oracle.varlen_qkv_attention(qkv, boundaries, **options, **keep),
        normal(rng, dtype, qkv=(rows, 3, n, h)), seed=seed,
    )  # fmt: skip
