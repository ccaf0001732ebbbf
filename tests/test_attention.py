"""dot_product_attention, qkv_attention and varlen_qkv_attention: ops and kernel."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
import oracle
from cases import DTYPES, INTERPRET, ONE_DTYPE, check, check_padding, jit, normal, slow, slow_cases
from compare import assert_matches_oracle
from jaxft import dispatch, reference
from jaxft.dropout import dropout_mask, dropout_seed, keep_bits, keep_threshold
from jaxft.kernels.triton import attention as kernel
from jaxft.kernels.triton.attention_problem import Options, Rules, natural_logits, problem
from jaxft.tuning.table import AttentionConfig

LOG_2 = np.float32(np.log(2.0))
HEAD_SIZES = [1, 8, 16, 33, 40, 64, 80, 128, 256]


def separate(rng, b, t, s, n, k, h, dtype=jnp.float32):
    return normal(rng, dtype, query=(b, t, n, h), key=(b, s, k, h), value=(b, s, k, h))


def packed(rng, b, t, n, h, dtype=jnp.float32):
    return normal(rng, dtype, qkv=(b, t, 3, n, h))


def check_op(floats, seed=None, implementations=("triton",), gradients=True, plain_options=None, **options):
    """Checks an op against plain jnp and the oracle. They take `plain_options` where the options differ."""
    plain_options = options if plain_options is None else plain_options
    op = jaxft.qkv_attention if "qkv" in floats else jaxft.dot_product_attention
    exact = oracle.qkv_attention if "qkv" in floats else oracle.dot_product_attention

    def plain(qkv=None, **f):
        f = f if qkv is None else dict(zip(("query", "key", "value"), jnp.moveaxis(qkv, 2, 0), strict=True)) | f
        return reference.dot_product_attention(**f, **plain_options)

    check(lambda implementation, **f: op(**f, **options, implementation=implementation), plain,
          lambda **f: exact(**f, **plain_options), floats, implementations=implementations,
          gradients=gradients, seed=seed)  # fmt: skip


def lengths(*values):
    return np.array(values, np.int32)


# --- What the kernel does: key lengths, key masks, grouped heads, any size -----------------------------------------

SHAPES = [(1, 1, 1, 1, 1, 8), (2, 37, 37, 2, 2, 16), (1, 67, 61, 6, 2, 40), (2, 3, 131, 2, 1, 16), (1, 131, 3, 1, 1, 8),
          (64, 1, 33, 3, 3, 16)]  # fmt: skip


@pytest.mark.parametrize("shape", [*SHAPES[::2], *slow(*SHAPES[1::2])], ids=str)
def test_shapes(shape):
    """Shapes [B, T, S, N, K, H] have ones, primes, fewer and more queries than keys, grouped heads and many blocks."""
    check_op(separate(np.random.default_rng(0), *shape), return_residual=True)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes(head_size):
    """Packed projections work with powers of two and other head sizes."""
    check_op(packed(np.random.default_rng(1), 1, 19, 2, head_size), gradients=False)


@pytest.mark.parametrize("head_size", [256, *slow(128)])
def test_single_query_works_with_large_heads(head_size):
    """Matmuls in full precision need shared memory for partial sums that are added in pairs."""
    check_op(separate(np.random.default_rng(1), 1, 1, 40, 1, 1, head_size))


EMPTY = [(0, 3, 3, 2, 2, 8), (2, 0, 5, 2, 1, 8), (2, 3, 0, 2, 2, 8), (2, 3, 3, 0, 2, 8)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_empty(shape, implementation):
    """Without keys, no row has anything to attend to."""
    b, t, _, n, _, h = shape
    floats = separate(np.random.default_rng(2), *shape, jnp.bfloat16)
    out, lse = jaxft.dot_product_attention(**floats, return_residual=True, implementation=implementation)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((b, t, n, h), jnp.bfloat16, (b, t, n), jnp.float32)
    assert (out == 0.0).all() and jnp.isneginf(lse).all()


@pytest.mark.parametrize("implementation", ["triton", "xla", None])
def test_heads_of_size_zero(implementation):
    """Without head dimensions, all logits are 0."""
    out, lse = jaxft.qkv_attention(jnp.ones((2, 5, 3, 4, 0)), return_residual=True, implementation=implementation)
    assert out.shape == (2, 5, 4, 0)
    np.testing.assert_allclose(lse, np.full((2, 5, 4), np.log(5.0)), rtol=1e-6)


S = 37
HOLES = np.random.default_rng(0).random((2, 1, 1, S)) < 0.7
KEY_MASKS = {
    "lengths": {"key_value_seq_lengths": lengths(S, 20)},
    "no_key": {"key_value_seq_lengths": lengths(0, 33)},
    "beyond": {"key_value_seq_lengths": lengths(S + 5, 1)},
    "holes": {"mask": HOLES},
    "late": {"mask": np.arange(S)[None, None, None, :] >= np.array([30, 0])[:, None, None, None]},
    "for_all": {"mask": HOLES[:1]},
    "one": {"mask": np.array([True, False]).reshape(2, 1, 1, 1)},
    "both": {"mask": HOLES, "key_value_seq_lengths": lengths(S, 20)},
}


@pytest.mark.parametrize("name", ["both", "one", *slow(*(name for name in KEY_MASKS if name not in ("both", "one")))])
def test_key_masks(name):
    options = KEY_MASKS[name]
    floats = packed(np.random.default_rng(3), 2, S, 2, 16)
    if name == "beyond":  # more keys than there are count as all keys
        check_op(floats, **options, plain_options={"key_value_seq_lengths": lengths(S, 1)}, gradients=False)
    else:
        check_op(floats, **options, return_residual=True, implementations=["triton", "xla"])


@pytest.mark.parametrize("name", ["both", *slow(None)])
@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_dtypes(dtype, name):
    floats = separate(np.random.default_rng(4), 2, S, S, 4, 2, 16, dtype)
    check_op(floats, **KEY_MASKS.get(name, {}), return_residual=True, implementations=["triton", "xla"])


@pytest.mark.slow
def test_float32_at_the_default_precision():
    """On a GPU the default is TF32, at this size in plain jnp as well."""
    with jax.default_matmul_precision(None):
        check_op(separate(np.random.default_rng(5), 2, 256, 256, 4, 4, 64), return_residual=True)


@pytest.mark.parametrize("masks", [{}, KEY_MASKS["both"]], ids=["all", "masked"])
@pytest.mark.parametrize("scale", [-0.3, *slow(0.0, 3)])
def test_scale(scale, masks):
    """The scale may be any number, also one that reverses the order of the logits or makes them equal."""
    check_op(packed(np.random.default_rng(6), 2, S, 2, 16), scale=scale, **masks, gradients=scale <= 0.0)


@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(DTYPES[0])])
@pytest.mark.parametrize("sign", [1.0, *slow(-1.0)])
def test_huge_logits(dtype, sign):
    """Logits of about 1e4 of either sign do not overflow, and the largest one of a row still decides."""
    floats = packed(np.random.default_rng(7), 2, S, 2, 16, dtype)
    floats["qkv"] = floats["qkv"].at[:, :, :2].multiply(100.0)
    if sign < 0.0:  # all of them negative
        floats["qkv"] = jnp.abs(floats["qkv"]).at[:, :, 0].multiply(-1.0)
    check_op(floats, **KEY_MASKS["both"], return_residual=True)


@pytest.mark.parametrize("shape", [(2, 1, 1, S), *slow((1, 2, S, S))], ids=["columns", "matrix"])
def test_biases_of_minus_infinity(shape):
    """A bias of -inf excludes as a mask does. A row of nothing else is 0, has no gradients and spoils no other row."""
    floats = packed(np.random.default_rng(22), 2, S, 2, 16)
    bias = np.random.default_rng(23).standard_normal(shape).astype(np.float32)
    bias[np.random.default_rng(24).random(shape) < 0.3] = -np.inf
    bias[-1, -1, -1] = -np.inf  # whole rows

    def attend(implementation, qkv):
        return jaxft.qkv_attention(qkv, bias, return_residual=True, implementation=implementation)

    def plain(qkv):
        parts = (qkv[:, :, i] for i in range(3))
        return reference.dot_product_attention(*parts, mask=jnp.asarray(bias > -np.inf), return_residual=True,
                                               bias=jnp.asarray(np.where(bias > -np.inf, bias, 0.0)))  # fmt: skip

    check(attend, plain, lambda qkv: oracle.qkv_attention(qkv, bias, return_residual=True), floats)
    gradient = jax.grad(lambda bias: jaxft.qkv_attention(floats["qkv"], bias, implementation="triton").sum())(bias)
    assert np.isfinite(gradient).all() and (gradient[bias == -np.inf] == 0.0).all()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("both", "triton"), *((n, "xla") for n in ("lengths", "holes", "both", "no_key", "one"))],
)
def test_padding_of_keys_reaches_nothing(name, implementation):
    """Keys and values that no query attends to have no effect, whatever they hold."""
    options = KEY_MASKS[name]
    keep = np.broadcast_to(options.get("mask", True), (2, 1, 1, S))[:, 0, 0]
    if "key_value_seq_lengths" in options:
        keep = keep & (np.arange(S) < options["key_value_seq_lengths"][:, None])
    clean = separate(np.random.default_rng(8), 2, S, S, 2, 2, 16)
    valid = {"query": np.ones((2, S, 1, 1), bool) & keep.any(axis=1)[:, None, None, None]}
    valid |= dict.fromkeys(("key", "value"), keep[:, :, None, None])
    check_padding(lambda **f: jaxft.dot_product_attention(**f, **options, implementation=implementation), clean, valid)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("masks", [{"key_value_seq_lengths": lengths(0, 0)}, {"mask": np.zeros((1, 1, 1, 1), bool)}],
                         ids=["lengths", "mask"])  # fmt: skip
def test_rows_without_keys_are_zero(masks, implementation):
    @jit
    def run(floats):
        def attend(floats):
            return jaxft.qkv_attention(**floats, **masks, return_residual=True, implementation=implementation)

        out, pull_back = jax.vjp(attend, floats)
        return out, pull_back(jax.tree.map(jnp.ones_like, out))[0]["qkv"]

    (out, lse), gradient = run(packed(np.random.default_rng(9), 2, S, 2, 16))
    assert (out == 0.0).all() and jnp.isneginf(lse).all() and (gradient == 0.0).all()


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_query_reaches_no_other_query(implementation):
    clean = separate(np.random.default_rng(10), 2, S, S, 2, 2, 16)
    poisoned = clean | {"query": clean["query"].at[0, 3, 1].set(jnp.nan)}
    run = jit(lambda floats: jaxft.dot_product_attention(**floats, implementation=implementation))
    expected, got = np.array(run(clean)), np.array(run(poisoned))
    assert np.isnan(got[0, 3, 1]).all()
    got[0, 3, 1] = expected[0, 3, 1]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_batch_axis_is_optional(implementation):
    floats = separate(np.random.default_rng(11), 1, S, S, 4, 2, 16)
    one = {name: x[0] for name, x in floats.items()}
    options = {"return_residual": True, "implementation": implementation}
    cases = [
        ({"key_value_seq_lengths": lengths(20), "query_seq_lengths": lengths(30)},
         {"key_value_seq_lengths": np.int32(20), "query_seq_lengths": lengths(30)}),
        ({"mask": HOLES[:1]}, {"mask": HOLES[0]}),
        ({"mask": HOLES[:1]}, {"mask": HOLES[0, 0, 0]}),
    ]  # fmt: skip
    ids = {f"{side}_segment_ids": np.arange(S, dtype=np.int32) // 10 for side in ("query", "key_value")}
    cases.append(({name: x[None] for name, x in ids.items()}, ids))
    for batched, unbatched in cases:
        expected = jaxft.dot_product_attention(**floats, **batched, **options)
        got = jaxft.dot_product_attention(**one, **unbatched, **options)
        chex.assert_trees_all_equal(got, jax.tree.map(lambda x: x[0], expected))
    qkv = packed(np.random.default_rng(11), 1, S, 2, 16)["qkv"]
    expected = jaxft.qkv_attention(qkv, mask=HOLES[:1], implementation=implementation)
    np.testing.assert_array_equal(
        jaxft.qkv_attention(qkv[0], mask=HOLES[0], implementation=implementation), expected[0]
    )


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_reruns_are_bitwise_equal(implementation):
    floats = packed(np.random.default_rng(12), 2, S, 2, 16, jnp.bfloat16)

    def attend(floats):
        return jaxft.qkv_attention(**floats, **KEY_MASKS["both"], implementation=implementation)

    check_reruns(attend, floats)


def check_reruns(attend, floats):
    """Runs the output 250 times, the output and the gradients 50 times."""

    @jit
    def run(floats):
        out, pull_back = jax.vjp(attend, floats)
        return out, pull_back(out)

    for function, reruns in ((jit(attend), 250), (run, 50)):
        first = function(floats)
        for _ in range(1 if INTERPRET else reruns):
            chex.assert_trees_all_equal(function(floats), first)


@pytest.mark.parametrize(
    "name", ["half of a block", *slow("one kernel, shared tiles", "two kernels", "bias", "back to back")]
)
def test_reruns_of_every_kernel_are_bitwise_equal(name):
    """The cases have enough programs to fill a GPU, a bias gradient that sequences share, and dropout."""
    batch, heads, size = (3, 2, 8) if INTERPRET else (16, 12, 64)
    rng, options = np.random.default_rng(0), {"implementation": "triton"}
    length = 300 if name in ("two kernels", "bias") else 128
    floats = packed(rng, batch, length, heads, size, jnp.bfloat16)
    if name == "half of a block":
        options["key_value_seq_lengths"] = rng.integers(0, length + 1, batch, np.int32)
    if name in ("two kernels", "bias"):
        options |= {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    if name == "bias":
        floats |= normal(rng, jnp.bfloat16, bias=(1, heads, length, length))
    if name == "back to back":
        floats = {"qkv": floats["qkv"].reshape(-1, 3, heads, size)}
        ends = np.append(0, np.sort(rng.choice(batch * length, 3 * batch, replace=False))).astype(np.int32)

    def attend(floats):
        if name == "back to back":
            longest = int(np.diff(ends).max())
            return jaxft.varlen_qkv_attention(**floats, cu_seqlens=ends, max_seqlen=longest, **options)
        return jaxft.qkv_attention(**floats, **options)

    check_reruns(attend, floats)


@pytest.mark.skipif(INTERPRET, reason="reads a program compiled for an NVIDIA GPU")
@pytest.mark.parametrize("masks", [{}, {"is_causal": True}], ids=["all", "causal"])
def test_memory_grows_linearly_with_the_length(masks):
    """Neither the forward nor the backward pass stores a square matrix."""

    def attend(qkv):
        return jnp.sum(jaxft.qkv_attention(qkv, **masks, implementation="triton"), dtype=jnp.float32)

    def temporary(function, length):
        qkv = jax.ShapeDtypeStruct((1, length, 3, 4, 64), jnp.bfloat16)
        return jax.jit(function).lower(qkv).compile().memory_analysis().temp_size_in_bytes

    for function in (attend, jax.grad(attend)):
        assert temporary(function, 8192) <= 4.1 * temporary(function, 2048) < 8192 * 8192


def test_qkv_attention_equals_separate_arrays():
    qkv = packed(np.random.default_rng(13), 2, S, 2, 16)["qkv"]
    options = KEY_MASKS["both"] | {"return_residual": True, "implementation": "triton"}
    apart = jaxft.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **options)
    chex.assert_trees_all_equal(jaxft.qkv_attention(qkv, **options), apart)


# --- The kernel with any blocks ------------------------------------------------------------------------------------

CONFIGS = [AttentionConfig(*numbers) for numbers in ((32, 16, 4, 3), (16, 128, 4, 2, 5))]
CONFIGS += slow(
    *(AttentionConfig(*numbers) for numbers in ((16, 16, 1, 1), (16, 64, 4, 2, 5), (64, 32, 8, 1), (128, 128, 4, 1)))
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("masking", "dtype"), [("none", jnp.float32), ("lengths", jnp.bfloat16), *slow_cases(("holes", jnp.bfloat16))]
)
def test_any_config(masking, dtype, config):
    """Sequences have several blocks, and whole blocks are masked before, between and after other blocks."""
    b, t, s = 3, 21, 75
    floats = separate(np.random.default_rng(14), b, t, s, 2, 1, 24, dtype)
    keep, rules = np.ones((b, s), bool), Rules()
    if masking == "lengths":
        key_lengths = lengths(75, 32, 0)
        keep, rules = np.arange(s) < key_lengths[:, None], Rules(key_lengths=jnp.asarray(key_lengths))
    if masking == "holes":
        keep = np.random.default_rng(15).random((b, s)) < 0.8
        keep[0, :40] = keep[0, 60:] = keep[1, 20:50] = False
        rules = Rules(mask=jnp.asarray(keep[:, None, None, :]))
    masked = {"scale": 0.3, "return_residual": True, "mask": keep[:, None, None, :]}
    expected = jit(lambda f: reference.dot_product_attention(**f, **masked))(floats)
    exact = oracle.dot_product_attention(**floats, **masked)
    options = Options(0.3, precision=dispatch.matmul_precision())

    def run(query, key, value):
        out, top, *total = kernel.forward(
            query, key, value, rules, options, return_residual=True, config=config, interpret=INTERPRET
        )
        assert len(total) == (dtype == jnp.float32)
        in_base_2 = not natural_logits(query.dtype, None, options.precision)
        return out, jnp.swapaxes((top * LOG_2 if in_base_2 else top) + sum(x * LOG_2 for x in total), 1, 2)

    got = jit(run)(*(floats[name] for name in ("query", "key", "value")))
    assert_matches_oracle(tuple(got), expected, exact, seed=config)


# --- Every other option --------------------------------------------------------------------------------------------

T = 6
OTHER_OPTIONS = {
    "bias": {"bias": jnp.linspace(-1.0, 1.0, T).reshape(T, 1)},
    "mask": {"mask": np.arange(24).reshape(1, 4, T, 1) % 3 > 0},
    "causal": {"is_causal": True},
    "query_lengths": {"query_seq_lengths": lengths(6, 2)},
    "segments": {"query_segment_ids": np.array([[0, 0, 1, 1, 2, 2], [3, 0, 0, 0, 1, 9]], np.int32),
                 "key_value_segment_ids": np.array([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]], np.int32)},
    "window": {"local_window_size": (1, 2)},
    "window_of_one_number": {"local_window_size": 1},
    "window_without_a_pair": {"local_window_size": (4, 3)},  # the last query, and the first, do not see all keys
    "several": {"is_causal": True, "local_window_size": (1, 0)},
}  # fmt: skip


@pytest.mark.parametrize("name", [*list(OTHER_OPTIONS)[::2], *slow(*list(OTHER_OPTIONS)[1::2])])
def test_other_options(name):
    options = OTHER_OPTIONS[name]
    floats = separate(np.random.default_rng(16), 2, T, 5, 4, 2, 8)
    plain_options = dict(options)
    if options.get("local_window_size") == 1:
        plain_options["local_window_size"] = (1, 1)
    if "bias" in options:  # a bias of lower rank is a float argument
        floats |= plain_options
        plain_options = options = {}
    check_op(floats, **options, plain_options=plain_options | {"return_residual": True}, return_residual=True,
             implementations=["triton", "xla"])  # fmt: skip


@pytest.mark.parametrize("rate", [0.9, *slow(0.1)])
def test_dropout(rate, key):
    floats = packed(np.random.default_rng(17), 2, T, 4, 8)
    keep = np.asarray(dropout_mask(key, rate, (2, 4, T, T)))
    options = {"dropout_rate": rate, "dropout_rng": key}

    def plain(qkv):
        return reference.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **options)

    check(lambda implementation, qkv: jaxft.qkv_attention(qkv, **options, implementation=implementation), plain,
          lambda qkv: oracle.qkv_attention(qkv, keep=keep, rate=rate), floats,
          implementations=["triton", "xla"])  # fmt: skip


def test_dropout_works_with_other_key_lengths(key):
    """The keep mask is numbered by query, whatever the number of keys."""
    floats = separate(np.random.default_rng(17), 2, T, 9, 4, 2, 8)
    keep = np.asarray(dropout_mask(key, 0.5, (2, 4, T, 9)))
    options = {"dropout_rate": 0.5, "dropout_rng": key}
    check(lambda implementation, **f: jaxft.dot_product_attention(**f, **options, implementation=implementation),
          lambda **f: reference.dot_product_attention(**f, **options),
          lambda **f: oracle.dot_product_attention(**f, keep=keep, rate=0.5), floats,
          implementations=["triton", "xla"])  # fmt: skip


def test_rate_of_zero_drops_nothing(key):
    floats = packed(np.random.default_rng(17), 1, T, 4, 8)
    for implementation in ("triton", "xla"):
        expected = jaxft.qkv_attention(**floats, implementation=implementation)
        for rng in (None, key):
            got = jaxft.qkv_attention(**floats, dropout_rate=0.0, dropout_rng=rng, implementation=implementation)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("options", [OTHER_OPTIONS["query_lengths"], OTHER_OPTIONS["segments"]],
                         ids=["lengths", "segments"])  # fmt: skip
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_padding_of_queries_reaches_nothing(options, implementation):
    """The second sequence has queries beyond its length, or segments that no key has."""
    clean = separate(np.random.default_rng(18), 2, T, 5, 4, 2, 8)
    if "query_seq_lengths" in options:
        attends = np.broadcast_to((np.arange(T) < np.array([[6], [2]]))[:, :, None], (2, T, 5))
    else:
        attends = options["query_segment_ids"][:, :, None] == options["key_value_segment_ids"][:, None, :]
    queries, keys = attends.any(axis=2)[:, :, None, None], attends.any(axis=1)[:, :, None, None]
    check_padding(lambda **f: jaxft.dot_product_attention(**f, **options, implementation=implementation), clean,
                  {"query": queries, "key": keys, "value": keys})  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True, "scale": -0.5}, *slow({}, {"local_window_size": (2, 0), "return_residual": True})],
    ids=["causal", "plain", "window"],
)
def test_packed_sequences(options):
    """The sequences have 4, 0 and 5 rows, and three rows belong to no sequence."""
    boundaries = np.array([0, 4, 4, 9], np.int32)
    check(
        lambda implementation, qkv: jaxft.varlen_qkv_attention(
            qkv, boundaries, max_seqlen=6, **options, implementation=implementation),
        lambda qkv: reference.varlen_qkv_attention(qkv, jnp.asarray(boundaries), max_seqlen=6, **options),
        lambda qkv: oracle.varlen_qkv_attention(qkv, boundaries, **options),
        normal(np.random.default_rng(19), jnp.float32, qkv=(12, 3, 2, 8)),
        implementations=["triton", "xla"],
    )  # fmt: skip


def test_packed_dropout_with_a_huge_bound(key):
    """The bound of the lengths counts for the index of an element, but takes no memory. The indices have 32 bits."""
    boundaries, length, (heads, size) = np.array([0, 4, 9], np.int32), 2**31 - 1, (2, 8)
    qkv = normal(np.random.default_rng(22), jnp.float32, qkv=(9, 3, heads, size))["qkv"]
    options = {"dropout_rate": 0.5, "dropout_rng": key}
    got = jaxft.varlen_qkv_attention(qkv, boundaries, max_seqlen=length, **options, implementation="xla")
    seed = dropout_seed(key)
    for b, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        q, k, v = np.moveaxis(np.asarray(qkv[start:stop], np.float64), 1, 0)
        p = np.exp(np.einsum("tnh,snh->nts", q, k) / math.sqrt(size))
        p /= p.sum(axis=-1, keepdims=True)
        t = np.arange(stop - start)
        rows = [[((b * heads + n) * length + int(i)) % 2**32 for i in t] for n in range(heads)]
        bits = keep_bits(seed[0], seed[1], jnp.asarray(rows, jnp.uint32)[:, :, None], jnp.asarray(t, jnp.uint32))
        p = np.where(bits >= jnp.uint32(keep_threshold(0.5)), 2 * p, 0)
        np.testing.assert_allclose(got[start:stop], np.einsum("nts,snh->tnh", p, v), atol=1e-5)

    some = [
        jaxft.varlen_qkv_attention(qkv, boundaries, max_seqlen=23, **options, implementation=implementation)
        for implementation in ("xla", "triton")
    ]
    np.testing.assert_allclose(*some, atol=1e-5)


@pytest.mark.parametrize("boundaries", [[0, 8, 20], *slow([0, 9], [0, 12, 12])], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_overlong_sequences_are_cut(boundaries, implementation):
    """Traced boundaries cannot raise: sequences beyond `max_seqlen` or beyond the rows are cut."""
    qkv = normal(np.random.default_rng(21), jnp.float32, qkv=(12, 3, 2, 8))["qkv"]
    options = {"max_seqlen": 6, "return_residual": True, "implementation": implementation}
    out, lse = jit(lambda *arrays: jaxft.varlen_qkv_attention(*arrays, **options))(qkv, lengths(*boundaries))
    cut = [(start, min(start + 6, stop, 12)) for start, stop in zip(boundaries[:-1], boundaries[1:], strict=True)]
    used = np.zeros(12, bool)
    for start, stop in cut:
        used[start:stop] = True
        expected = jaxft.qkv_attention(qkv[None, start:stop], return_residual=True, implementation="xla")
        chex.assert_trees_all_close(
            (out[start:stop], lse[start:stop]), jax.tree.map(lambda x: x[0], expected), atol=1e-6
        )
    assert (out[~used] == 0.0).all() and jnp.isneginf(lse[~used]).all()


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_padding_reaches_no_packed_sequence(implementation):
    boundaries, valid = np.array([0, 4, 4, 9], np.int32), (np.arange(12) < 9)[:, None, None, None]
    check_padding(lambda qkv: jaxft.varlen_qkv_attention(qkv, boundaries, max_seqlen=6, implementation=implementation),
                  normal(np.random.default_rng(20), jnp.float32, qkv=(12, 3, 2, 8)), {"qkv": valid})  # fmt: skip


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 2, 3, 1), *slow((2, 0, 3, 1), (3, 1, 0, 2))])
def test_transposed_16_bit_arrays_attend_on_a_cpu(axes, dtype):
    """XLA's CPU backend lacks some layouts of batched bfloat16 matmuls with a float32 result."""
    floats = normal(np.random.default_rng(0), dtype, query=(2, 16, 4, 32), key=(2, 16, 4, 32), value=(2, 16, 4, 32))
    transposed = {name: jnp.transpose(x, axes) for name, x in floats.items()}

    def attend(floats):
        back = {name: jnp.transpose(x, tuple(map(int, np.argsort(axes)))) for name, x in floats.items()}
        return jaxft.dot_product_attention(**back, implementation="xla")

    def gradients(floats):
        return jax.grad(lambda floats: jnp.sum(attend(floats).astype(jnp.float32) ** 2))(floats)

    # Without the options of the other tests: they turn off what fails.
    out, found = jax.jit(attend)(transposed), jax.jit(gradients)(transposed)
    expected = jaxft.dot_product_attention(**{n: x.astype(jnp.float32) for n, x in floats.items()})
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.02)
    chex.assert_tree_all_finite(found)


@pytest.mark.parametrize(("size", "width"), [(1, 16), (8, 16), (16, 16), (17, 32), (80, 128)])
def test_tiles_have_at_least_16_columns(size, width):
    """Triton multiplies no narrower ones on a GPU."""
    x = jnp.ones((1, 4, 2, size))
    assert problem(x, x, x, Rules(), Options(1.0)).width == width
