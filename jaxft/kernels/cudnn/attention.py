"""Attention by cuDNN, through `jax.nn.dot_product_attention`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Options(NamedTuple):
    """The static arguments of a call."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None


def unsupported(
    query_length: int, key_length: int, options: Options, *, return_residual: bool = False, **arrays: Array | None
) -> str | None:
    """Returns why cuDNN cannot do all that a call asks for, or None. A row with nothing to attend to must give 0.

    `arrays` are the arrays of the op by name, the query or the packed array first, None where they are not given.
    """
    name, query = next(iter(arrays.items()))
    assert query is not None
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"{name} is {query.dtype}, it takes float16 and bfloat16"
    head_size = query.shape[-1]
    if head_size % 8 or head_size > 128:
        return f"the head size is {head_size}, it takes multiples of 8 up to 128"
    lacking = {
        "table of biases by relative position": arrays.get("relative_bias") is not None,
        "packed sequences": arrays.get("cu_seqlens") is not None,
        "segment ids": arrays.get("query_segment_ids") is not None,
        "dropout by this project's mask": arrays.get("dropout_rng") is not None,
        "float32 log-sum-exp": return_residual,
    }
    for name, asked in lacking.items():
        if asked:
            return f"it has no {name}"
    for name in ("bias", "mask"):
        if arrays.get(name) is not None:
            return f"a {name} may leave a row with nothing to attend to, for which it does not give 0"
    if options.local_window_size is not None:
        if not options.is_causal and options.local_window_size[1] > 0:
            return "it has no windows to the right"
        lengths = (arrays.get(name) for name in ("query_seq_lengths", "key_value_seq_lengths"))
        if any(x is not None for x in lengths) or query_length > key_length:
            return "a window may leave a row with nothing to attend to, for which it does not give 0"
    return None


@functools.cache
def missing() -> str | None:
    """Returns why this JAX cannot call cuDNN's attention, or None if it can."""
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
    except Exception as error:  # of whatever kind: JAX says so when it traces
        return f"this JAX cannot call it: {error}"
    return None


def forward(
    query: Array, key: Array, value: Array, query_lengths: Array | None, key_lengths: Array | None, options: Options
) -> Array:
    """Computes attention: query `[B, T, N, H]`, key and value `[B, S, K, H]`, lengths int32 `[B]` or None for all."""
    t, s = query.shape[1], key.shape[1]
    queries = keys = None
    if query_lengths is not None or key_lengths is not None:
        full = query.shape[0]
        query_lengths = jnp.full(full, t, jnp.int32) if query_lengths is None else jnp.clip(query_lengths, 0, t)
        key_lengths = jnp.full(full, s, jnp.int32) if key_lengths is None else jnp.clip(key_lengths, 0, s)
        # Rows without keys, and keys without queries, are cleared: they give and get nothing, whatever they hold. cuDNN
        # is told of one key where there is none, because it has no rows without keys.
        rows = jnp.minimum(query_lengths, jnp.where(key_lengths > 0, t, 0))
        columns = jnp.minimum(key_lengths, jnp.where(query_lengths > 0, s, 0))
        queries = (jnp.arange(t)[None] < rows[:, None])[:, :, None, None]
        keys = (jnp.arange(s)[None] < columns[:, None])[:, :, None, None]
        query, key, value = (
            jnp.where(use, x, jnp.zeros_like(x)) for use, x in ((queries, query), (keys, key), (keys, value))
        )
        query_lengths, key_lengths = jnp.maximum(query_lengths, 1), jnp.maximum(key_lengths, 1)
    out = _call(query, key, value, query_lengths, key_lengths, options)
    return out if queries is None else jnp.where(queries, out, jnp.zeros_like(out))


@jax.custom_batching.custom_vmap
def _batched_alike(*arrays):
    """Returns the same arrays. Under vmap, all of them have its axis, and first: cuDNN's batching rule needs that."""
    return arrays


@_batched_alike.def_vmap
def _(size, batched, *arrays):
    full = (x if own else jnp.broadcast_to(x, (size, *x.shape)) for own, x in zip(batched, arrays, strict=True))
    return _batched_alike(*full), (True,) * len(arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _call(query, key, value, query_lengths, key_lengths, options):
    attend, arrays = _attend(query, key, value, query_lengths, key_lengths, options)
    return attend(*arrays)


def _attend(query, key, value, query_lengths, key_lengths, options) -> tuple[Any, Any]:
    lengths = () if query_lengths is None else (query_lengths, key_lengths)
    query, key, value, *lengths = _batched_alike(query, key, value, *lengths)
    query_lengths, key_lengths = lengths or (None, None)
    window = options.local_window_size
    causal = options.is_causal or (window is not None and window[1] == 0)  # it has windows with a causal mask only
    attend = functools.partial(
        jax.nn.dot_product_attention, scale=options.scale, is_causal=causal, query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths, local_window_size=window, implementation="cudnn",
    )  # fmt: skip
    return attend, (query, key, value)


def _fwd(*arguments):
    attend, arrays = _attend(*arguments)
    return jax.vjp(attend, *arrays)


def _bwd(options, pull_back, dout):
    saved, structure = jax.tree.flatten(pull_back)
    dout, *saved = _batched_alike(dout, *saved)
    return *jax.tree.unflatten(structure, saved)(dout), None, None


_call.defvjp(_fwd, _bwd)
