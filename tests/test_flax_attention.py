"""jaxft.models.attention_fn in Flax's modules of attention, NNX and Linen."""

import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cases import slow
from jaxft.models import attention_fn

B, T, S, WIDTH, HEADS = 2, 5, 7, 16, 2
TRITON = functools.partial(attention_fn, implementation="triton")


def arrays(*batch):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((*batch, n, WIDTH)), jnp.float32) for n in (T, S))
    return x, y, jnp.asarray(rng.random((*batch, 1, T, S)) < 0.7).at[..., 0].set(True)


@pytest.mark.parametrize("fn", [attention_fn, TRITON], ids=["automatic", "triton"])
@pytest.mark.parametrize("masking", ["bool", "causal", *slow(None, "float")])
def test_nnx(masking, fn):
    x, y, mask = arrays(B)
    options = {"mask": {"bool": mask, "float": mask.astype(jnp.float32)}.get(masking), "is_causal": masking == "causal"}

    def gradients(fn):
        module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=fn, rngs=nnx.Rngs(0))
        return nnx.value_and_grad(lambda module: jnp.sum(module(x, y, **options) ** 2))(module)

    with jax.numpy_dtype_promotion("standard"):
        expected, got = gradients(nnx.nn.attention.dot_product_attention), gradients(fn)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (B,), (2, 3)], ids=str)
def test_linen(batch):
    x, y, mask = arrays(*batch)
    module = functools.partial(nn.MultiHeadDotProductAttention, num_heads=HEADS, qkv_features=WIDTH)
    with jax.numpy_dtype_promotion("standard"):
        params = module().init(jax.random.key(0), x, y)
        expected = module().apply(params, x, y, mask=mask)
        got = module(attention_fn=TRITON, force_fp32_for_softmax=True).apply(params, x, y, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_dropout(key):
    x, y, _ = arrays(B)
    module = nnx.MultiHeadAttention(
        HEADS,
        WIDTH,
        decode=False,
        dropout_rate=0.5,
        broadcast_dropout=False,
        attention_fn=attention_fn,
        rngs=nnx.Rngs(0),
    )
    with jax.numpy_dtype_promotion("standard"):
        still, dropped = (module(x, y, deterministic=d, rngs=nnx.Rngs(dropout=1)) for d in (True, False))
        plain = nnx.clone(module)
        plain.dropout_rate = 0.0
        np.testing.assert_array_equal(still, plain(x, y))
    assert not np.allclose(still, dropped)


def test_dtype_and_precision():
    x, y, _ = arrays(B)
    query, key = x.reshape(B, T, HEADS, -1), y.reshape(B, S, HEADS, -1)
    out = attention_fn(query, key, key, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    with jax.default_matmul_precision(None):
        for precision in (jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.F32_F32_F32):
            options = {"precision": precision, "implementation": "xla"}
            text = str(jax.make_jaxpr(lambda *a, o=options: attention_fn(*a, **o))(query, key, key))
            assert precision.name in text
    bias = jnp.ones((HEADS, T, S))
    np.testing.assert_allclose(attention_fn(query, key, key, bias), attention_fn(query, key, key), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [({"module": object()}, NotImplementedError, "module must be None, got object"),
     ({"einsum_dot_general": print}, NotImplementedError, "einsum_dot_general must be None, got builtin_function_or"),
     ({"qk_attn_weights_einsum": print}, NotImplementedError, "qk_attn_weights_einsum must be None"),
     ({"attn_weights_value_einsum": print}, NotImplementedError, "attn_weights_value_einsum must be None"),
     ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, NotImplementedError,
      "dropout is drawn for each element of [B, N, T, S]; pass broadcast_dropout=False, got True"),
     ({"dropout_rate": 0.1, "broadcast_dropout": False}, ValueError, "dropout_rng must be a JAX random key, got None"),
     ({"precision": ("highest", "default")}, NotImplementedError, "precision must be the same for both operands")],
)  # fmt: skip
def test_unsupported_options_are_refused(options, error, message):
    x = jnp.ones((B, T, HEADS, 8))
    with pytest.raises(error, match=re.escape(message)):
        attention_fn(x, x, x, **options)


@pytest.mark.parametrize(
    ("module", "options", "call", "argument"),
    [(nnx.MultiHeadAttention, {"in_features": WIDTH, "decode": False}, {"sow_weights": True}, "sow_weights"),
     (nn.MultiHeadDotProductAttention, {}, {"sow_weights": True}, "sow_weights"),
     *((nn.MultiHeadDotProductAttention, {name: lambda: jnp.einsum}, {}, name)
       for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"))],
)  # fmt: skip
def test_refusal_names_the_argument_of_the_module(module, options, call, argument):
    x, _, _ = arrays(B)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(NotImplementedError, match=f"the argument {argument} "):
        if module is nnx.MultiHeadAttention:
            module(num_heads=HEADS, attention_fn=attention_fn, rngs=nnx.Rngs(0), **options)(x, **call)
        else:
            module(num_heads=HEADS, attention_fn=attention_fn, **options).init(jax.random.key(0), x, **call)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"value": (3, 2, 5, 2, 8)}, "value must have the batch dimensions of query, (2, 3), got (3, 2, 5, 2, 8)"),
        ({"key": (6, 5, 2, 8)}, "key must have the batch dimensions of query, (2, 3), got (6, 5, 2, 8)"),
        ({"bias": (2, 2, 2, 5, 5)}, "bias must broadcast to (2, 3, 2, 5, 5), got shape (2, 2, 2, 5, 5)"),
        ({"mask": (3, 3, 2, 5, 5)}, "mask must broadcast to (2, 3, 2, 5, 5), got shape (3, 3, 2, 5, 5)"),
    ],
    ids=["value", "key", "bias", "mask"],
)
def test_batch_dimensions(shapes, message):
    same = dict.fromkeys(("query", "key", "value"), (2, 3, 5, 2, 8))
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_fn(**{name: jnp.ones(shape) for name, shape in (same | shapes).items()})


def test_list_mask_is_refused():
    x = jnp.ones((1, 2, 2, 8))
    np.testing.assert_array_equal(attention_fn(x, x, x, mask=[True, False]), x)


def test_signature_covers_flax():
    taken = inspect.signature(attention_fn).parameters
    for function in (nnx.dot_product_attention, nn.dot_product_attention):
        assert set(inspect.signature(function).parameters) <= set(taken)
