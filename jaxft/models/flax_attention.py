"""Adapter that lets Flax's attention modules use jaxft's attention."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn import dtypes
from jax import Array

from jaxft import reference
from jaxft.ops import checks
from jaxft.ops.attention import dot_product_attention


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    *,
    relative_bias: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Computes `jaxft.dot_product_attention` from the arguments of Flax's attention functions.

    Pass it to a multi-head attention module of Flax, in `flax.nnx` or `flax.linen`::

      nnx.MultiHeadAttention(..., attention_fn=jaxft.models.attention_fn, broadcast_dropout=False)

    Equivalent to `dot_product_attention` of `flax.nnx` and `flax.linen`, except for a query with nothing to attend to.

    Args:
      query: `[batch..., T, N, H]`, with any number of batch dimensions.
      key: `[batch..., S, K, H]`. N is a multiple of K.
      value: `[batch..., S, K, H]`.
      bias: broadcastable to `[batch..., N, T, S]`, added to the scaled logits.
      mask: broadcastable to `[batch..., N, T, S]`. A query attends to the keys whose mask is not 0.
      broadcast_dropout: must be False if there is dropout, because each element has its own dropout.
      dropout_rng: as for `jaxft.dot_product_attention`.
      dropout_rate: as for `jaxft.dot_product_attention`.
      deterministic: True turns dropout off.
      dtype: passed to `promote_dtype`.
      precision: precision of float32 matmuls, a `jax.lax.Precision` or equivalent. None is JAX's default.
      module: must be None, because there are no attention weights to sow.
      promote_dtype: applied to the arrays, `promote_dtype((query, key, value), dtype=dtype)`.
      is_causal: as for `jaxft.dot_product_attention`.
      force_fp32_for_softmax: has no effect, because logits and softmax are always float32.
      einsum_dot_general: must be None, because the kernel computes the matmuls.
      qk_attn_weights_einsum: as `einsum_dot_general`.
      attn_weights_value_einsum: as `einsum_dot_general`.
      relative_bias: as for `jaxft.dot_product_attention`. Set it with `functools.partial`.
      implementation: as for `jaxft.dot_product_attention`. Set it with `functools.partial`.

    Returns:
      `[batch..., T, N, H]`. A query with nothing to attend to gives 0 (in Flax, the mean of all values).

    Raises:
      NotImplementedError: an argument requests something that is not supported.
      TypeError: as for `jaxft.dot_product_attention`.
      ValueError: as for `jaxft.dot_product_attention`, or batch dimensions or shapes do not fit.

    Gradients: for query, key, value, bias and relative_bias.
    """
    impossible = {  # with the argument of Flax's modules that sets it
        "module": (module, "sow_weights"),
        "einsum_dot_general": (einsum_dot_general, ""),
        "qk_attn_weights_einsum": (qk_attn_weights_einsum, "qk_attn_weights_einsum_cls"),
        "attn_weights_value_einsum": (attn_weights_value_einsum, "attn_weights_value_einsum_cls"),
    }
    for name, (asked, source) in impossible.items():
        if asked is not None:
            hint = source and f"; it comes from the argument {source} of a Flax module"
            raise NotImplementedError(f"attention_fn: {name} must be None, got {type(asked).__name__}{hint}")
    rate = 0.0 if deterministic else dropout_rate
    if rate > 0.0 and broadcast_dropout:
        raise NotImplementedError(
            "attention_fn: dropout is drawn for each element of [B, N, T, S]; pass broadcast_dropout=False, got True"
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if query.ndim < 3:
        raise ValueError(f"attention_fn: query must have shape [batch..., T, N, H], got {query.shape}")
    batch = query.shape[:-3]
    for name, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim or x.shape[:-3] != batch:
            raise ValueError(f"attention_fn: {name} must have the batch dimensions of query, {batch}, got {x.shape}")
    bias = None if bias is None else jnp.asarray(bias)
    if mask is not None:
        given: Any = mask if hasattr(mask, "dtype") else np.asarray(mask)
        mask = jnp.asarray(given if given.dtype == jnp.bool else given != 0)  # JAX may drop bits of the numbers
    pairs = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    bias, mask = (
        None if x is None else checks.as_broadcast("attention_fn", name, x, pairs)
        for name, x in (("bias", bias), ("mask", mask))
    )
    if len(batch) > 1:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        bias, mask = (_with_one_batch(x, batch) for x in (bias, mask))
    with _matmul_precision(precision):
        out = dot_product_attention(
            query, key, value, bias, mask, is_causal=is_causal, relative_bias=relative_bias, dropout_rate=rate,
            dropout_rng=dropout_rng if rate > 0.0 else None, implementation=implementation,
        )  # fmt: skip
    return out.reshape(*batch, *out.shape[-3:])


def _with_one_batch(x: Array | None, batch: tuple[int, ...]) -> Array | None:
    """Reshapes [batch..., N, T, S] to [B, N, T, S], with B = 1 if every batch dimension is 1."""
    if x is None:
        return x
    own = x.shape[:-3]
    if all(n == 1 for n in own):
        return x.reshape(1, *x.shape[-3:])
    if own != batch and jnp.issubdtype(x.dtype, jnp.floating):
        x = reference.wide(x)  # so that the gradient of a bias is added up over the batch before it is rounded
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(math.prod(batch), *x.shape[-3:])


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    if precision is None:
        return contextlib.nullcontext()
    both = precision if isinstance(precision, tuple) else (precision, precision)
    if both[0] != both[1]:
        raise NotImplementedError(f"attention_fn: precision must be the same for both operands, got {precision}")
    name = both[0]
    if isinstance(name, jax.lax.Precision):
        name = name.name.lower()
    elif isinstance(name, jax.lax.DotAlgorithmPreset):
        name = name.name
    return jax.default_matmul_precision(name)
