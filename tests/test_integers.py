"""Integers of every dtype: right, or refused by the name of the argument; they never wrap around."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cases
import jaxft
from jaxft import training
from jaxft.models import attention_fn

Q = np.random.default_rng(0).standard_normal((2, 5, 1, 8)).astype(np.float32)
X = Q.reshape(10, 8)
TABLE = X[:6]
CONFIG = jaxft.BertConfig(
    vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    max_position_embeddings=8,
)  # fmt: skip


def attend(**options):
    return jaxft.dot_product_attention(Q, Q, Q, **options)


def model_loss(labels, **options):
    model = jaxft.BertForMaskedLM(CONFIG, rngs=nnx.Rngs(0))
    return model.loss(jnp.ones(labels.shape, jnp.int32), labels, **options)


def packed_loss(labels):
    return model_loss(labels, cu_seqlens=jnp.array([0, 4]), max_seqlen=4)


def model(**options):
    return jaxft.BertModel(CONFIG, rngs=nnx.Rngs(0))(**options).last_hidden_state


IDS = np.array([[1, 2, 3, 4, 0]])
# A function of integers, the integers, the place of a number beyond int32 in the last axis, and the number there that
# has the same effect.
CASES = {
    "query_seq_lengths": (lambda x: attend(query_seq_lengths=x), [3, 5], 1, 5),
    "key_value_seq_lengths": (lambda x: attend(key_value_seq_lengths=x), [3, 5], 1, 5),
    "query_segment_ids": (lambda x: attend(query_segment_ids=x, key_value_segment_ids=x), [[1, 1, 0, 9, 1]] * 2, 3, 9),
    "query_segment_ids of other keys": (
        lambda x: attend(query_segment_ids=x, key_value_segment_ids=x[:, ::-1] + 1), [[1, 1, 0, 9, 2]] * 2, 3, 9,
    ),
    "cu_seqlens": (
        lambda x: jaxft.varlen_qkv_attention(jnp.stack([X[:, None]] * 3, 1), x, max_seqlen=10), [0, 4, 10], 2, 10,
    ),
    "indices": (lambda x: jaxft.restore_padding(X, x, batch=3, length=4), [*range(9), 12], 9, 12),
    "input_ids": (lambda x: jaxft.embeddings_layer_norm(x, TABLE, TABLE), [[1, 2, 3, 4, 6]], 4, 6),
    "labels": (lambda x: jaxft.linear_cross_entropy(X, TABLE, x), [0, 1, 2, 3, 4, 5, 0, 1, 2, 6], 9, 6),
    "labels of a model": (model_loss, [[1, 2, 3, 6]], 3, 6),
    "labels of a packed model": (packed_loss, [1, 2, 3, 6], 3, 6),
    "input_ids of a model": (lambda x: model(input_ids=x), [[1, 2, 3, 4, 6]], 4, 6),
    "position_ids of a model": (lambda x: model(input_ids=IDS, position_ids=x), [[0, 1, 2, 3, 8]], 4, 8),
    "attention_mask of a model": (lambda x: model(input_ids=IDS, attention_mask=x), [[1, 1, 1, 0, 1]], 4, 1),
    "mask of attention_fn": (
        lambda x: attention_fn(Q, Q, Q, mask=x.reshape(2, 1, 1, 5)), [[1, 1, 1, 0, 1]] * 2, 4, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int64", *cases.slow("uint8", "int16", "uint32", "uint64")])
@pytest.mark.parametrize("name", CASES)
def test_integers_do_not_wrap_around(name, dtype):
    """2^32 is added to a number: a conversion to 32 bits would drop it. uint32 gets the bits of -100, "no label"."""
    function, numbers, place, counts_as = CASES[name]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    expected = jax.tree.map(np.asarray, jax.jit(function)(jnp.asarray(numbers, jnp.int32)))
    given = np.array(numbers, dtype)
    if np.iinfo(dtype).max > 2**31:
        given[..., place] = 2**32 - 100 if dtype == "uint32" else 2**32 + counts_as - 1
    try:
        jax.tree.map(close, function(given), expected)
    except ValueError as error:  # a number that is known can be refused
        assert f"{name.split()[0]} must fit int32, got 42949" in str(error)
    with jax.enable_x64(True):
        jax.tree.map(close, jax.jit(function)(jnp.asarray(given)), expected)


@pytest.mark.parametrize("op", ["rotary", "dense_rotary"])
def test_positions_do_not_wrap_around(op):
    """A traced number that int32 does not hold becomes the nearest one that it holds."""

    def rotate(positions):
        if op == "rotary":
            return jaxft.rotary(jnp.stack([X[:, None]] * 3, 1), positions)
        kernel = jnp.tile(jnp.eye(8, dtype=jnp.float32), (1, 3))
        return jaxft.dense_rotary(X, kernel, None, positions=positions, num_heads=1)

    given = np.arange(10) + 2**32 * (np.arange(10) == 4)
    expected = rotate(np.where(given > 9, 2**31 - 1, given).astype(np.int32))
    with pytest.raises(ValueError, match=f"{op}: positions must fit int32, got 4294967300"):
        rotate(given)
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(rotate)(jnp.asarray(given)), expected, rtol=1e-5, atol=1e-6)


WIDE = [-3, 5, 2**31 + 5, 2**31 - 1, 2**32 - 3, 2**63 + 5, 2**64 - 3, -(2**31)]
PAIRS = [("uint32", "uint32"), ("uint32", "int32"), *cases.slow_cases(
    ("int32", "uint32"), ("uint32", "uint8"), ("int16", "uint32"), ("uint32", "int64"), ("int64", "uint64"),
    ("uint64", "int32"), ("uint32", "uint64"),
)]  # fmt: skip


@pytest.mark.parametrize(("query_dtype", "key_dtype"), PAIRS)
@pytest.mark.parametrize("both_traced", [True, False])
def test_segment_ids_of_two_dtypes_are_compared_exactly(query_dtype, key_dtype, both_traced):
    """Otherwise one side is a constant with numbers that int32 does not hold."""

    def ids(dtype, start, without=None):
        limits = np.iinfo(dtype)
        fit = [x for x in WIDE if limits.min <= x <= limits.max and x != without] * 6
        return np.array([fit[start : start + 5], fit[:5]], dtype)

    query, key = ids(query_dtype, 0), ids(key_dtype, 1, without=2**31 - 1)
    same = (query[:, :, None].astype(object) == key[:, None].astype(object)).astype(bool)
    with jax.enable_x64("64" in query_dtype + key_dtype):
        if both_traced:
            got = jax.jit(lambda q, k: attend(query_segment_ids=q, key_value_segment_ids=k))(query, key)
        elif query_dtype in ("uint32", "int64", "uint64"):
            got = jax.jit(lambda q: attend(query_segment_ids=q, key_value_segment_ids=key))(query)
        else:
            got = jax.jit(lambda k: attend(query_segment_ids=query, key_value_segment_ids=k))(key)
        np.testing.assert_allclose(got, attend(mask=same[:, None]), rtol=1e-5, atol=1e-6)


def test_wide_segment_ids_may_have_symbolic_sizes():
    def attend(q, ids):
        return jaxft.dot_product_attention(q, q, q, query_segment_ids=ids, key_value_segment_ids=ids)

    shapes = jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.float32), jax.ShapeDtypeStruct((1, 1), jnp.uint32)
    shapes = jax.export.symbolic_args_specs(shapes, ("b, t, 1, 8", "b, t"))
    ids = jnp.array([[1, 2**31, 2**31, 1, 2**31 + 1]] * 2, jnp.uint32)
    got = jax.export.export(jax.jit(attend))(*shapes).call(Q, ids)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    np.testing.assert_allclose(got, jaxft.dot_product_attention(Q, Q, Q, mask=same), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["permute", "merge_heads", "remove_padding", "restore_padding"])
def test_moved_integers_do_not_lose_bits(name):
    """Without x64, JAX drops the upper half of NumPy's 64-bit integers."""
    x = np.full((1, 1, 1, 1), 2**32 + 5)
    call = {
        "permute": lambda: jaxft.permute(x, (1, 0, 2, 3)),
        "merge_heads": lambda: jaxft.merge_heads(x),
        "remove_padding": lambda: jaxft.remove_padding(x, np.ones((1, 1), bool), capacity=1),
        "restore_padding": lambda: jaxft.restore_padding(x, np.zeros(1, np.int32), batch=1, length=1),
    }[name]
    with pytest.raises(ValueError, match=f"{name}: x must fit int32, got 4294967301"):
        call()
    with jax.enable_x64(True):
        assert int(jax.tree.leaves(call())[0].reshape(())) == 2**32 + 5


def test_sizes_of_numpy_do_not_wrap_around():
    twenty, x = np.uint8(20), jnp.ones((400, 8))
    assert jaxft.restore_padding(x, jnp.arange(400), batch=twenty, length=twenty).shape == (20, 20, 8)
    qkv, ends = jnp.stack([jnp.ones((250, 1, 8))] * 3, 1), np.array([0, 200, 250], np.uint8)
    np.testing.assert_allclose(jaxft.varlen_qkv_attention(qkv, ends, max_seqlen=np.uint8(200)), 1.0, rtol=1e-5)
    wide = jnp.asarray(np.random.default_rng(0).standard_normal((1, 300, 1, 8)), jnp.float32)
    for implementation in ("xla", "triton"):
        near, far = (
            jaxft.dot_product_attention(*[wide] * 3, local_window_size=window, implementation=implementation)
            for window in ((np.uint8(200), np.uint8(100)), (200, 100))
        )
        np.testing.assert_array_equal(near, far)
    q, *_ = jaxft.qkv_bias_split_heads(jnp.ones((1, 2, 300)), None, num_heads=np.uint8(100))
    assert q.shape == (1, 100, 2, 1)
    scale = training.LossScale.create().update(jnp.array(True), growth_interval=np.int64(2**32 + 1))
    assert scale.scale == 2.0**15


@pytest.mark.parametrize("kind", [np.uint8, *cases.slow(np.uint64, np.int64)])
@pytest.mark.parametrize("name", ["top_k", "query_chunk_size", "corpus_chunk_size", "max_pairs"])
def test_sizes_of_a_search_do_not_wrap_around(name, kind):
    """200 + 200 is 144 in uint8. A number beyond int32 stands for all."""
    vectors = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    if name == "max_pairs":
        search = jaxft.paraphrase_mining_embeddings
    else:
        search = functools.partial(jaxft.semantic_search, vectors[:250])
    assert search(vectors, **{name: kind(200)}) == search(vectors, **{name: 200})
    if kind is not np.uint8:
        assert search(vectors, **{name: kind(2**63 - 1)}) == search(vectors, **{name: 300 * 300})


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "max_seqlen": lambda: jaxft.varlen_qkv_attention(jnp.ones((6, 3, 2, 8)), np.array([0, 6]), max_seqlen=2**40),
        "max_seqlen of a model": lambda: model(input_ids=IDS[0], cu_seqlens=np.array([0, 5]), max_seqlen=2**40),
        "capacity": lambda: jaxft.remove_padding(X[None], np.ones((1, 10), bool), capacity=2**40),
        "batch": lambda: jaxft.restore_padding(X, np.arange(10), batch=2**40, length=1),
        "length": lambda: jaxft.restore_padding(X, np.arange(10), batch=1, length=2**31),
        "batch * length": lambda: jaxft.restore_padding(X, np.arange(10), batch=2**20, length=2**20),
        "num_heads": lambda: jaxft.qkv_bias_split_heads(jnp.ones((1, 2, 0)), None, num_heads=2**40),
    }.items(),
)
def test_sizes_beyond_int32_are_refused(name, call):
    with pytest.raises(ValueError, match=rf"{re.escape(name.split(' of ')[0])} must be below 2\^31, got \d{{10,}}"):
        call()


@pytest.mark.parametrize("big", [2**31, 2**63, 2**64, 2**80, -(2**63) - 1])
def test_big_integers_in_lists_are_named(big):
    with pytest.raises(ValueError, match=f"BertModel: input_ids must fit int32, got {big}"):
        model(input_ids=[[1, 2, big]])


def test_largest_max_seqlen_needs_no_memory():
    qkv, ends = jnp.stack([X[:, None]] * 3, 1), np.array([0, 4, 10])
    got, expected = (jaxft.varlen_qkv_attention(qkv, ends, max_seqlen=n, implementation="xla") for n in (2**31 - 1, 6))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
