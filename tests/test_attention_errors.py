"""Error messages of the three attention functions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft import dispatch

Q, KV = np.ones((2, 6, 4, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)
QKV = np.ones((2, 6, 3, 4, 8), np.float32)
HALF = jnp.ones((2, 5, 2, 8), jnp.bfloat16)
I32 = np.int32

SHARED_ERRORS = [  # the message names S = 6, as for a key with as many rows as the query
    ({"bias": np.ones((2, 4, 6, 6), I32)}, TypeError, "bias must be an array of floats, got int32"),
    ({"bias": np.ones((3, 1, 6, 6), np.float32)}, ValueError,
     "bias must broadcast to (2, 4, 6, 6), got shape (3, 1, 6, 6)"),
    ({"mask": np.ones((2, 1, 1, 6), I32)}, TypeError,
     "mask must be boolean (True = attend), got int32; write mask != 0"),
    ({"mask": np.ones((2, 1, 1, 6), np.float32)}, TypeError, "mask must be boolean (True = attend), got float32"),
    ({"mask": np.ones((2, 6), bool)}, ValueError, "mask must broadcast to (2, 4, 6, 6), got shape (2, 6)"),
    ({"mask": np.ones((1, 2, 4, 6, 6), bool)}, ValueError,
     "mask must broadcast to (2, 4, 6, 6), got shape (1, 2, 4, 6, 6)"),
    ({"mask": [True]}, TypeError, "mask must be an array, got list"),
    ({"scale": "0.1"}, TypeError, "scale must be a Python number, got str"),
    ({"scale": True}, TypeError, "scale must be a Python number, got bool"),
    ({"scale": jnp.ones(())}, TypeError, "scale must be a Python number, got ArrayImpl"),
    ({"query_seq_lengths": np.ones((3,), I32)}, ValueError, "query_seq_lengths must have shape (2,), got (3,)"),
    ({"query_seq_lengths": np.ones((2,), np.float32)}, TypeError,
     "query_seq_lengths must be an array of integers, got float32"),
    ({"key_value_seq_lengths": [6, 6]}, TypeError, "key_value_seq_lengths must be an array, got list"),
    ({"key_value_seq_lengths": np.ones((2, 1), I32)}, ValueError,
     "key_value_seq_lengths must have shape (2,), got (2, 1)"),
    ({"key_value_seq_lengths": np.ones((2,), bool)}, TypeError,
     "key_value_seq_lengths must be an array of integers, got bool"),
    ({"query_segment_ids": np.ones((2, 6), I32)}, ValueError,
     "query_segment_ids and key_value_segment_ids go together, got only query_segment_ids"),
    ({"key_value_segment_ids": np.ones((2, 6), I32)}, ValueError,
     "query_segment_ids and key_value_segment_ids go together, got only key_value_segment_ids"),
    ({"query_segment_ids": np.ones((2, 7), I32), "key_value_segment_ids": np.ones((2, 6), I32)}, ValueError,
     "query_segment_ids must have shape (2, 6), got (2, 7)"),
    ({"query_segment_ids": np.ones((2, 6), I32), "key_value_segment_ids": np.ones((6,), I32)}, ValueError,
     "key_value_segment_ids must have shape (2, 6), got (6,)"),
    ({"is_causal": "no"}, TypeError, "is_causal must be True or False, got str"),
    ({"return_residual": 1}, TypeError, "return_residual must be True or False, got int"),
    ({"local_window_size": -1}, ValueError, "local_window_size must be an integer >= 0 or a pair of them, got -1"),
    ({"local_window_size": (1, -1)}, ValueError,
     "local_window_size must be an integer >= 0 or a pair of them, got (1, -1)"),
    ({"local_window_size": (1, 2, 3)}, ValueError,
     "local_window_size must be an integer >= 0 or a pair of them, got (1, 2, 3)"),
    ({"local_window_size": True}, ValueError, "local_window_size must be an integer >= 0 or a pair of them, got True"),
    ({"dropout_rng": 0}, TypeError, "dropout_rng must be one JAX random key (jax.random.key), got int"),
    ({"dropout_rng": jax.random.split(jax.random.key(0), 3)}, TypeError,
     "dropout_rng must be one JAX random key (jax.random.key), got key<fry>[3]"),
    ({"local_window_size": 1.5}, ValueError, "local_window_size must be an integer >= 0 or a pair of them, got 1.5"),
    ({"dropout_rate": 0.1}, ValueError, "dropout_rate is 0.1, so dropout_rng must be a JAX random key, got None"),
    ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be in [0, 1), got 1.0"),
    ({"dropout_rate": -0.5}, ValueError, "dropout_rate must be in [0, 1), got -0.5"),
    ({"dropout_rate": "0.1"}, TypeError, "dropout_rate must be a Python number, got str"),
    ({"implementation": "flash"}, ValueError,
     "implementation must be None or one of ('triton', 'mosaic_gpu', 'cudnn', 'xla'), got 'flash'"),
    ({"implementation": "mosaic_gpu"}, NotImplementedError,
     "implementation 'mosaic_gpu' cannot be used: its kernel is for gradients only"),
]  # fmt: skip
ERRORS = [
    *((op, {"implementation": "cudnn"}, NotImplementedError,
       f"implementation 'cudnn' cannot be used: {name} is float32, it takes float16 and bfloat16")
      for op, name in (("dot_product_attention", "query"), ("qkv_attention", "qkv"))),
    ("dot_product_attention", {"query": 1.0}, TypeError, "query must be an array, got float"),
    ("dot_product_attention", {"query": Q.astype(I32)}, TypeError, "query must be an array of floats, got int32"),
    ("dot_product_attention", {"value": [KV]}, TypeError, "value must be an array, got list"),
    ("dot_product_attention", {"query": Q[0, 0]}, ValueError,
     "query must have shape [B, T, N, H] or [T, N, H], got (4, 8)"),
    ("dot_product_attention", {"key": KV[:1]}, ValueError,
     "key must have shape [B, S, K, H] with the batch and head size (H=8) of query (2, 6, 4, 8), got (1, 5, 2, 8)"),
    ("dot_product_attention", {"key": KV[..., :4]}, ValueError,
     "key must have shape [B, S, K, H] with the batch and head size (H=8) of query (2, 6, 4, 8), got (2, 5, 2, 4)"),
    ("dot_product_attention", {"query": Q[0]}, ValueError, "key must have shape [S, K, H] with the batch and head size"
     " (H=8) of query (6, 4, 8), got (2, 5, 2, 8)"),
    ("dot_product_attention", {"value": KV[:, :4]}, ValueError, "value must have shape (2, 5, 2, 8), got (2, 4, 2, 8)"),
    ("dot_product_attention", {"value": KV[:, :, :1]}, ValueError,
     "value must have shape (2, 5, 2, 8), got (2, 5, 1, 8)"),
    ("dot_product_attention", {"key": HALF}, TypeError, "key must have the dtype of query, float32, got bfloat16"),
    ("dot_product_attention", {"value": HALF}, TypeError, "value must have the dtype of query, float32, got bfloat16"),
    ("dot_product_attention", {"query": Q[:, :, :3]}, ValueError,
     "the number of query heads must be a multiple of the number of key heads, got 3 and 2"),
    ("dot_product_attention", {"mask": np.ones((2, 1, 1, 6), bool)}, ValueError,
     "mask must broadcast to (2, 4, 6, 5), got shape (2, 1, 1, 6)"),
    ("dot_product_attention",
     {"query_segment_ids": np.ones((2, 6), I32), "key_value_segment_ids": np.ones((2, 6), I32)},
     ValueError, "key_value_segment_ids must have shape (2, 5), got (2, 6)"),
    *(("qkv_attention", *case) for case in SHARED_ERRORS),
    ("qkv_attention", {"qkv": None}, TypeError, "qkv must be an array, got NoneType"),
    ("qkv_attention", {"qkv": QKV.astype(I32)}, TypeError, "qkv must be an array of floats, got int32"),
    ("qkv_attention", {"qkv": QKV[:, :, :2]}, ValueError,
     "qkv must have shape [B, T, 3, N, H] or [T, 3, N, H] with N >= 1, got (2, 6, 2, 4, 8)"),
    ("qkv_attention", {"qkv": QKV[:, :, :, :0]}, ValueError,
     "qkv must have shape [B, T, 3, N, H] or [T, 3, N, H] with N >= 1, got (2, 6, 3, 0, 8)"),
    ("qkv_attention", {"qkv": QKV[0, 0]}, ValueError,
     "qkv must have shape [B, T, 3, N, H] or [T, 3, N, H] with N >= 1, got (3, 4, 8)"),
    ("qkv_attention", {"qkv": QKV[0], "key_value_seq_lengths": np.ones((2,), I32)}, ValueError,
     "key_value_seq_lengths must have shape (), got (2,)"),
    ("qkv_attention", {"qkv": QKV[0], "query_segment_ids": np.ones((7,), I32)}, ValueError,
     "query_segment_ids must have shape (6,), got (7,)"),
    ("varlen_qkv_attention", {"qkv": QKV}, ValueError,
     "qkv must have shape [M, 3, N, H] with N >= 1, got (2, 6, 3, 4, 8)"),
    ("varlen_qkv_attention", {"qkv": QKV[0, :, :, :0]}, ValueError,
     "qkv must have shape [M, 3, N, H] with N >= 1, got (6, 3, 0, 8)"),
    ("varlen_qkv_attention", {"qkv": QKV[0].astype(I32)}, TypeError, "qkv must be an array of floats, got int32"),
    ("varlen_qkv_attention", {"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens must be an array, got list"),
    ("varlen_qkv_attention", {"cu_seqlens": np.zeros((2,), np.float32)}, TypeError,
     "cu_seqlens must be an array of integers, got float32"),
    ("varlen_qkv_attention", {"cu_seqlens": np.zeros((1, 2), I32)}, ValueError,
     "cu_seqlens must have shape [B + 1], got (1, 2)"),
    ("varlen_qkv_attention", {"cu_seqlens": np.array([1, 6], I32)}, ValueError,
     "cu_seqlens must ascend from 0, got [1, 6]"),
    ("varlen_qkv_attention", {"cu_seqlens": np.array([0, 4, 3], I32)}, ValueError,
     "cu_seqlens must ascend from 0, got [0, 4, 3]"),
    ("varlen_qkv_attention", {"cu_seqlens": np.array([0, 6, 7], I32)}, ValueError,
     "cu_seqlens must not go beyond the 6 rows, got 7"),
    ("varlen_qkv_attention", {"max_seqlen": 5}, ValueError,
     "max_seqlen must not be below the longest sequence's 6, got 5"),
    ("varlen_qkv_attention", {"is_causal": 0}, TypeError, "is_causal must be True or False, got int"),
    ("varlen_qkv_attention", {"max_seqlen": -1}, ValueError, "max_seqlen must be a Python integer >= 0, got -1"),
    ("varlen_qkv_attention", {"max_seqlen": 6.0}, ValueError, "max_seqlen must be a Python integer >= 0, got 6.0"),
    ("varlen_qkv_attention", {"scale": None, "local_window_size": -1}, ValueError, "local_window_size must be"),
    ("varlen_qkv_attention", {"dropout_rate": 2.0}, ValueError, "dropout_rate must be in [0, 1), got 2.0"),
    ("varlen_qkv_attention", {"scale": "1"}, TypeError, "scale must be a Python number, got str"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"), ERRORS, ids=[f"{op}-{'-'.join(changes)}" for op, changes, *_ in ERRORS]
)
def test_errors(op, changes, error, message):
    good = {
        "dot_product_attention": {"query": Q, "key": KV, "value": KV},
        "qkv_attention": {"qkv": QKV},
        "varlen_qkv_attention": {"qkv": QKV[0], "cu_seqlens": np.array([0, 6], I32), "max_seqlen": 6},
    }[op]
    with pytest.raises(error, match=re.escape(f"{op}: {message}")):
        getattr(jaxft, op)(**{**good, **changes})


def test_kernel_refuses_large_heads_and_float64_by_name():
    with pytest.raises(NotImplementedError, match="the head size is 257, the kernel takes at most 256"):
        jaxft.qkv_attention(jnp.ones((1, 2, 3, 1, 257)), implementation="triton")
    with jax.enable_x64(True):
        message = "qkv is float64, the kernels take float32, float16 and bfloat16"
        with pytest.raises(NotImplementedError, match=message):
            jaxft.qkv_attention(jnp.ones((1, 2, 3, 1, 8), jnp.float64), implementation="triton")


OF_2_30 = [  # the shapes of queries and keys, or of packed sequences
    ([(1, 2**30 + 1, 1, 8), (1, 3, 1, 8)], 2**30 + 1),
    ([(1, 3, 1, 8), (1, 2**31, 1, 8)], 2**31),
    ([(2**30 + 1, 3, 1, 8)], 2**30 + 1),
]


@pytest.mark.parametrize(("shapes", "count"), OF_2_30, ids=["queries", "keys", "packed"])
def test_kernel_refuses_more_than_2_30_positions(shapes, count):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def attend(implementation, first, *keys):
        options = {"implementation": implementation}
        if keys:
            return jaxft.dot_product_attention(first, *keys, *keys, **options)
        return jaxft.varlen_qkv_attention(first, np.array([0, 5], np.int32), max_seqlen=5, **options)

    def run(implementation):
        return jax.eval_shape(lambda *arrays: attend(implementation, *arrays), *arrays)

    with dispatch.target():
        assert run(None).shape == (*shapes[0][: -3 if len(arrays) == 1 else -2], 1, 8)
        with pytest.raises(NotImplementedError, match=re.escape(f"there are {count} positions, the kernel takes at")):
            run("triton")


def test_packed_rows_beyond_2_31_are_refused():
    qkv = jax.ShapeDtypeStruct((2**31, 3, 1, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=re.escape("varlen_qkv_attention: qkv must have fewer than 2^31")):
        jax.eval_shape(lambda qkv: jaxft.varlen_qkv_attention(qkv, np.array([0, 5], np.int32), max_seqlen=5), qkv)


def test_max_seqlen_may_be_a_numpy_integer():
    """The maximum of an array of lengths is a NumPy integer."""
    qkv = jnp.ones((9, 3, 2, 8))
    found = [jaxft.varlen_qkv_attention(qkv, jnp.array([0, 4, 9]), max_seqlen=longest) for longest in (5, np.int64(5))]
    np.testing.assert_array_equal(*found)
