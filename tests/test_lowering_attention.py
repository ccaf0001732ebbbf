"""Attention lowers for an H200, on any machine: one kernel forward, one or two backward, and no copies."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxft
from cases import ONE_DTYPE, lower, slow, slow_cases
from lowered import COPIES, TRITON, assert_one_kernel, of, operations, sizes

pytestmark = pytest.mark.usefixtures("quiet")


def with_gradients(function):
    """Returns a function that computes the result and pulls it back to the first argument."""

    def run(x, *arguments):
        out, pull_back = jax.vjp(lambda x: function(x, *arguments), x)
        return out, pull_back(out)

    return run


@pytest.mark.parametrize("dtype", ONE_DTYPE)
@pytest.mark.parametrize("head_size", [33, 256, *slow(1, 8, 16, 40, 64, 80, 128)])
def test_attention_head_sizes(head_size, dtype, caplog):
    """The op has one kernel forward, one or two backward."""
    for length in (37, 1000):
        qkv = of((2, length, 3, 4, head_size), dtype)
        assert_one_kernel(jaxft.qkv_attention, qkv)
        text = lower(with_gradients(jaxft.qkv_attention), qkv)
        found = operations(text)
        assert found[TRITON] == {37: 2 if head_size * dtype.dtype.itemsize <= 512 else 3, 1000: 3}[length]
        for copies in COPIES:  # packed, and in place
            assert found[copies] == 0, copies
        assert text.count("output_operand_alias<") == (found[TRITON] == 3)
    assert caplog.messages == []


def attention_options(s, key):
    """Returns {name: (static options, shapes of array options)} for B = 2, T = 37, N = 6."""
    both = {"is_causal": True, "local_window_size": (30, 0), "return_residual": True, "scale": 0.3,
            "dropout_rate": 0.1, "dropout_rng": key}  # fmt: skip
    lengths = {"query_seq_lengths": of((2,), jnp.int32), "key_value_seq_lengths": of((2,), jnp.int32)}
    ids = {"query_segment_ids": of((2, 37), jnp.int32), "key_value_segment_ids": of((2, s), jnp.int32)}
    return {
        "plain": ({}, {}),
        "negative_scale": ({"scale": -1.0}, {}),
        "no_scale": ({"scale": 0.0}, {}),
        "residual": ({"return_residual": True}, {}),
        "causal": ({"is_causal": True}, {}),
        "window": ({"local_window_size": (5, 40)}, {}),
        "dropout": ({"dropout_rate": 0.1, "dropout_rng": key}, {}),
        "lengths": ({}, lengths),
        "segments": ({}, ids),
        "key_mask": ({"return_residual": True}, {"mask": of((2, 1, 1, s), jnp.bool_)}),
        "mask": ({}, {"mask": of((2, 1, 37, s), jnp.bool_)}),
        "bias": ({}, {"bias": of((2, 6, 37, s))}),
        "column_bias": ({}, {"bias": of((1, 6, 1, s), jnp.bfloat16)}),
        "row_bias": ({}, {"bias": of((37, 1))}),
        "everything": (both, lengths | ids | {"mask": of((1, 6, 37, 1), jnp.bool_), "bias": of((1, 37, s))}),
        "everything_by_key": (both, lengths | ids | {"mask": of((2, 1, 1, s), jnp.bool_), "bias": of((6, 1, s))}),
    }


OTHERS = ("plain", "negative_scale", "no_scale", "residual", "causal", "window", "lengths", "mask", "column_bias")


@pytest.mark.parametrize(
    ("dtype", "precision", "keys", "kernels"),
    [(jnp.bfloat16, None, 131, 3), *slow_cases((jnp.float32, "highest", 61, 2), (jnp.bfloat16, None, 61, 2),
     (jnp.float32, "highest", 131, 3), (jnp.float16, None, 61, 2))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["dropout", "segments", "key_mask", "bias", *slow(*OTHERS)])
def test_attention_options(name, dtype, precision, keys, kernels, caplog, key):
    """The gradient of a bias for all pairs takes a kernel of its own beside the two of the backward pass."""
    query, key_value = of((2, 37, 6, 64), dtype), of((2, keys, 2, 64), dtype)  # grouped heads
    static, arrays = attention_options(keys, key)[name]
    others = {k: x for k, x in arrays.items() if k != "bias"}

    def attend(floats, others):
        query, key_value, bias = floats
        return jaxft.dot_product_attention(query, key_value, key_value, bias, **others, **static)

    with jax.default_matmul_precision(precision):
        text = lower(with_gradients(attend), (query, key_value, arrays.get("bias")), others)
    assert operations(text)[TRITON] == (4 if name == "bias" else kernels)
    assert caplog.messages == []


@pytest.mark.parametrize("length", [300, *slow(37)])  # one kernel backward, and two
@pytest.mark.parametrize("name", ["lengths", "key_mask", "mask", "varlen"])
def test_masks_copy_no_qkv(name, length, caplog):
    """The search for blocks works on small arrays: QKV and its gradients stay in place."""
    shape = (4 * length, 3, 4, 64) if name == "varlen" else (4, length, 3, 4, 64)
    function, *arrays = {
        "lengths": (lambda qkv, n: jaxft.qkv_attention(qkv, key_value_seq_lengths=n), of((4,), jnp.int32)),
        "key_mask": (lambda qkv, m: jaxft.qkv_attention(qkv, mask=m), of((4, 1, 1, length), jnp.bool_)),
        "mask": (lambda qkv, m: jaxft.qkv_attention(qkv, mask=m), of((4, 1, length, length), jnp.bool_)),
        "varlen": (lambda qkv, n: jaxft.varlen_qkv_attention(qkv, n, max_seqlen=length), of((5,), jnp.int32)),
    }[name]
    text = lower(with_gradients(function), of(shape, jnp.bfloat16), *arrays)
    assert operations(text)[TRITON] == {37: 2, 300: 3}[length]
    copies = re.findall(rf"^.*\bstablehlo\.(?:{'|'.join(COPIES)})\b.*$", text, re.MULTILINE)
    assert max(sizes("\n".join(copies)), default=0) <= 4 * length
    assert caplog.messages == []


def test_attention_has_no_square_matrices():
    """Neither forward nor backward is an array larger than the arguments."""
    length = 8192

    def attend(floats, lengths, ids):
        qkv, bias = floats
        return jaxft.qkv_attention(
            qkv, bias, is_causal=True, key_value_seq_lengths=lengths, query_segment_ids=ids, key_value_segment_ids=ids
        )

    qkv = of((2, length, 3, 4, 64), jnp.bfloat16)
    arguments = (qkv, of((1, 4, 1, length))), of((2,), jnp.int32), of((2, length), jnp.int32)
    assert max(sizes(lower(with_gradients(attend), *arguments))) == math.prod(qkv.shape)


@pytest.mark.parametrize("dtype", ONE_DTYPE)
def test_attention_of_packed_sequences(dtype, caplog, key):
    for longest, kernels in ((16, 2), (300, 3)):
        for options in ({}, {"is_causal": True, "return_residual": True, "dropout_rate": 0.1, "dropout_rng": key}):

            def attend(qkv, cu_seqlens, longest=longest, options=options):
                return jaxft.varlen_qkv_attention(qkv, cu_seqlens, max_seqlen=longest, **options)

            arguments = of((500, 3, 4, 64), dtype), of((5,), jnp.int32)
            assert_one_kernel(attend, *arguments)
            assert operations(lower(with_gradients(attend), *arguments))[TRITON] == kernels
    assert caplog.messages == []
