"""How the operations of attention are computed: plain jnp, cuDNN, and the Triton kernels with their gradients.

On Hopper some gradients are Mosaic GPU's: `_gradient_by_mosaic`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxft import dispatch, reference
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import attention as triton
from jaxft.kernels.triton import attention_backward, attention_delta, attention_problem
from jaxft.ops import transforms
from jaxft.tuning import attention as tuning_attention
from jaxft.tuning import table as tuning_table

Array = jax.Array


class Inputs(NamedTuple):
    """The arrays of a call, checked; key and value are None where query is a packed [B, T, 3, N, H] or [M, 3, N, H]."""

    query: Any
    key: Any = None
    value: Any = None
    bias: Any = None
    mask: Any = None
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    dropout_rng: Any = None
    cu_seqlens: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a call."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    dropout_rate: float
    return_residual: bool
    max_seqlen: int | None = None  # with cu_seqlens


class Sizes(NamedTuple):
    batch: int
    query_length: int
    key_length: int
    heads: int
    head_size: int


def sizes(inputs: Inputs, options: Options) -> Sizes:
    *_, n, h = inputs.query.shape
    if options.max_seqlen is not None:
        return Sizes(inputs.cu_seqlens.shape[0] - 1, options.max_seqlen, options.max_seqlen, n, h)
    b, t = inputs.query.shape[:2]
    return Sizes(b, t, t if inputs.key is None else inputs.key.shape[1], n, h)


def run(op: str, inputs: Inputs, options: Options, implementation: str | None) -> Any:
    """The output, or with `return_residual` a pair of it and the log-sum-exp."""
    reasons = {"triton": _triton_reason(inputs, options)}
    if implementation is not None:
        reasons |= {"cudnn": _cudnn_reason(inputs, options), "mosaic_gpu": "its kernel is for gradients only"}
    choice = dispatch.choose(op, implementation, reasons)
    b, t, s, n, h = sizes(inputs, options)
    if choice.name == "cudnn" and 0 not in (b, t, s, n, h):
        return _cudnn(inputs, options)
    if choice.name == "xla" or 0 in (b, t, s, n, h, inputs.query.shape[0]):
        return _reference(inputs, options)
    precision = dispatch.matmul_precision()
    exact = precision == "float32" and inputs.query.dtype == jnp.float32
    more = exact or any(x is not None for x in (inputs.bias, inputs.mask, inputs.dropout_rng))
    arguments = (b * n, t, s, h, inputs.query.dtype.itemsize, dispatch.device(), more)
    average = None if inputs.cu_seqlens is None else max(1, inputs.query.shape[0] // b)
    static = _Static(
        options,
        tuning_attention.attention(*arguments, average),
        tuning_attention.attention_dq(*arguments, average),
        tuning_attention.attention_dkv(*arguments, attention_problem.bias_of_pairs(inputs.bias), average),
        precision,
        choice.interpret,
        implementation is None and _faster_by_cudnn(inputs, options),
        implementation is None and _gradient_by_mosaic(inputs, options),
        dispatch.device().multiprocessors,
    )
    return _triton_jit(Inputs(*transforms.vary_alike(*inputs)), static)


# --- Plain jnp ---------------------------------------------------------------------------------------------------


def _parts_of(qkv: Array) -> tuple[Array, Array, Array]:
    return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def _plain(inputs: Inputs, options: Options) -> Any:
    query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, rng, cu_seqlens = inputs
    static = dataclasses.asdict(options)
    max_seqlen = static.pop("max_seqlen")
    if max_seqlen is not None:
        return reference.varlen_qkv_attention(query, cu_seqlens, max_seqlen=max_seqlen, dropout_rng=rng, **static)
    if key is None:
        query, key, value = _parts_of(query)
    return reference.dot_product_attention(
        query, key, value, bias, mask, query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths,
        query_segment_ids=q_ids, key_value_segment_ids=kv_ids, dropout_rng=rng, **static,
    )  # fmt: skip


_reference = jax.jit(_plain, static_argnums=1)

# --- cuDNN -------------------------------------------------------------------------------------------------------


def _cudnn_reason(inputs: Inputs, options: Options) -> str | None:
    """Why `jax.nn` with cuDNN cannot do all that is asked, a row with nothing to attend to giving 0 included."""
    if inputs.query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"query is {inputs.query.dtype}, it takes float16 and bfloat16"
    _, t, s, _, h = sizes(inputs, options)
    if h % 8 or h > 128:
        return f"the head size is {h}, it takes multiples of 8 up to 128"
    lengths = inputs.query_seq_lengths is not None or inputs.key_value_seq_lengths is not None
    missing = {
        "packed sequences": inputs.cu_seqlens is not None,
        "segment ids": inputs.query_segment_ids is not None,
        "dropout by this project's mask": inputs.dropout_rng is not None,
        "float32 log-sum-exp": options.return_residual,
    }
    for name, asked in missing.items():
        if asked:
            return f"it has no {name}"
    for name in ("bias", "mask"):
        if getattr(inputs, name) is not None:
            return f"a {name} may leave a row with nothing to attend to, for which it does not give 0"
    if options.local_window_size is not None:
        if not options.is_causal and options.local_window_size[1] > 0:
            return "it has no windows to the right"
        if lengths or t > s:
            return "a window may leave a row with nothing to attend to, for which it does not give 0"
    return None


# Head size: (least key length, least number of logits) where cuDNN computes the output sooner. On an H200 (2026-11-21)
# the kernel takes 1.05-1.2x cuDNN's time at a head size of 64, 1.3-1.8x at 128 and 0.8-0.9x at 32, and XLA 30 us more
# to launch cuDNN. Lengths that are no multiples of 64 are slower, and packed arrays and lengths cost it copies: from
# packed ones of 16 heads of 64 it takes 1,194 us where the kernel takes 1,292 at 2x8192, but 360 against 337 at 8x2048.
_CUDNN_FROM = {64: (1024, 2**29), 128: (512, 2**26)}
_CUDNN_FROM_PACKED = 8192  # positions, besides


def _faster_by_cudnn(inputs: Inputs, options: Options) -> bool:
    """Whether cuDNN computes the output sooner; its gradients are not the same in every run."""
    b, t, s, n, h = sizes(inputs, options)
    if h not in _CUDNN_FROM or not dispatch.device().is_hopper:
        return False
    least_length, least_logits = _CUDNN_FROM[h]
    plain = all(x is None for x in (*inputs[3:], options.local_window_size)) and options.scale > 0.0
    heads_alike = inputs.key is None or inputs.key.shape[2] == n
    if inputs.key is None:
        least_length = max(least_length, _CUDNN_FROM_PACKED)
    large = t % 64 == s % 64 == 0 and s >= least_length and b * n * t * s >= least_logits
    return plain and heads_alike and large and _cudnn_reason(inputs, options) is None and _cudnn_is_there()


@functools.cache
def _cudnn_is_there() -> bool:
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
    except Exception:  # of whatever kind: JAX says so when it traces
        return False
    return True


@functools.partial(jax.jit, static_argnums=1)
def _cudnn(inputs: Inputs, options: Options) -> Any:
    query, key, value = _parts_of(inputs.query) if inputs.key is None else inputs[:3]
    t, s = query.shape[1], key.shape[1]
    q_lengths, kv_lengths = inputs.query_seq_lengths, inputs.key_value_seq_lengths
    queries = keys = None
    if q_lengths is not None or kv_lengths is not None:
        q_lengths = jnp.full(query.shape[0], t, jnp.int32) if q_lengths is None else jnp.clip(q_lengths, 0, t)
        kv_lengths = jnp.full(query.shape[0], s, jnp.int32) if kv_lengths is None else jnp.clip(kv_lengths, 0, s)
        # What takes part in nothing gives and gets nothing, whatever it holds. One key too many where there is none,
        # since no row may be without.
        rows = jnp.minimum(q_lengths, jnp.where(kv_lengths > 0, t, 0))
        columns = jnp.minimum(kv_lengths, jnp.where(q_lengths > 0, s, 0))
        queries = (jnp.arange(t) < rows[:, None])[:, :, None, None]
        keys = (jnp.arange(s) < columns[:, None])[:, :, None, None]
        query, key, value = (
            jnp.where(use, x, jnp.zeros_like(x)) for use, x in ((queries, query), (keys, key), (keys, value))
        )
        q_lengths, kv_lengths = jnp.maximum(q_lengths, 1), jnp.maximum(kv_lengths, 1)
    out = _cudnn_call(query, key, value, q_lengths, kv_lengths, options)
    return out if queries is None else jnp.where(queries, out, jnp.zeros_like(out))


@jax.custom_batching.custom_vmap
def _batched_alike(*arrays):
    """The same arrays; under vmap, all of them have its axis, and first: cuDNN's own batching asks for that."""
    return arrays


@_batched_alike.def_vmap
def _(size, batched, *arrays):
    full = (x if own else jnp.broadcast_to(x, (size, *x.shape)) for own, x in zip(batched, arrays, strict=True))
    return _batched_alike(*full), (True,) * len(arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cudnn_call(query, key, value, q_lengths, kv_lengths, options):
    attend, arrays = _cudnn_attend(query, key, value, q_lengths, kv_lengths, options)
    return attend(*arrays)


def _cudnn_attend(query, key, value, q_lengths, kv_lengths, options):
    lengths = () if q_lengths is None else (q_lengths, kv_lengths)
    query, key, value, *lengths = _batched_alike(query, key, value, *lengths)
    q_lengths, kv_lengths = lengths or (None, None)
    window = options.local_window_size
    causal = options.is_causal or (window is not None and window[1] == 0)  # it has windows with a causal mask only
    attend = functools.partial(
        jax.nn.dot_product_attention, scale=options.scale, is_causal=causal, query_seq_lengths=q_lengths,
        key_value_seq_lengths=kv_lengths, local_window_size=window, implementation="cudnn",
    )  # fmt: skip
    return attend, (query, key, value)


def _cudnn_call_fwd(*arguments):
    attend, arrays = _cudnn_attend(*arguments)
    out, pull_back = jax.vjp(attend, *arrays)
    return out, pull_back


def _cudnn_call_bwd(options, pull_back, dout):
    saved, structure = jax.tree.flatten(pull_back)
    dout, *saved = _batched_alike(dout, *saved)
    return *jax.tree.unflatten(structure, saved)(dout), None, None


_cudnn_call.defvjp(_cudnn_call_fwd, _cudnn_call_bwd)


# --- Triton ------------------------------------------------------------------------------------------------------


class _Static(NamedTuple):
    """What is compiled into the kernels."""

    options: Options
    forward: tuning_table.AttentionConfig
    query_gradient: tuning_table.AttentionConfig
    key_gradient: tuning_table.AttentionConfig
    precision: str
    interpret: bool
    by_cudnn: bool  # the output, where no gradient is asked for
    gradient_by_mosaic: bool
    multiprocessors: int


def _triton_reason(inputs: Inputs, options: Options) -> str | None:
    """Why the kernels cannot run this call, if they cannot."""
    _, t, s, _, h = sizes(inputs, options)
    positions = max(t, s, 0 if inputs.cu_seqlens is None else inputs.query.shape[0])
    return attention_problem.unsupported(h, positions, inputs.mask, query=inputs.query, bias=inputs.bias)


_BUSY = 0.72  # the least part of the multiprocessors


def _gradient_by_mosaic(inputs: Inputs, options: Options) -> bool:
    """Whether the kernel of Mosaic GPU computes the gradient: of a packed array, and sooner than those of Triton.

    It has one head of a sequence at a time for each multiprocessor, and takes as long for some of these as for all.
    With the output, at 512 tokens: 144 heads, which keep 0.55 of 132 multiprocessors busy, 137 us (Triton 120); 192,
    0.73, 148 (155); 288, 0.73, 222 (224); 384, 0.97, 246 (290) (H100, 2026-11-25).
    """
    device, (b, _, _, n, _) = dispatch.device(), sizes(inputs, options)
    rounds = -(-b * n // device.multiprocessors)
    if not device.is_hopper or b * n < _BUSY * rounds * device.multiprocessors:
        return False
    more = any(x is not None for name, x in inputs._asdict().items() if name not in ("query", "mask", "dropout_rng"))
    limited = options.is_causal or options.local_window_size is not None
    if more or limited or options.return_residual or options.scale <= 0.0:
        return False
    try:
        from jaxft.kernels.mosaic_gpu import attention_backward as mosaic
    except ImportError:  # an older or newer JAX
        return False
    return mosaic.unsupported(inputs.query, inputs.mask) is None


def _arguments(inputs: Inputs, static: _Static) -> tuple[Any, ...]:
    """The first arguments of the kernels' entry points."""
    options = static.options
    before, after = options.local_window_size or (None, None)
    rules = attention_problem.Rules(
        inputs.bias,
        inputs.mask,
        inputs.query_seq_lengths,
        inputs.key_value_seq_lengths,
        inputs.query_segment_ids,
        inputs.key_value_segment_ids,
        None if inputs.dropout_rng is None else dropout_seed(inputs.dropout_rng),
        inputs.cu_seqlens,
    )
    window = (before, 0 if options.is_causal else after)
    kernel_options = attention_problem.Options(
        options.scale, window, options.dropout_rate, options.max_seqlen or 0, static.precision
    )
    return inputs.query, inputs.key, inputs.value, rules, kernel_options


def _forward(inputs: Inputs, static: _Static, save: bool) -> Any:
    """What the op returns, and if `save` also what the backward pass needs: the output, the log-sum-exp in parts."""
    residual = static.options.return_residual
    out, *parts = triton.forward(
        *_arguments(inputs, static), return_residual=save or residual, config=static.forward, interpret=static.interpret
    )
    result: Any = out
    if residual:
        top, *total = (jnp.swapaxes(x, -1, -2) for x in parts)
        natural = attention_problem.natural_logits(inputs.query.dtype, inputs.bias, static.precision)
        result = out, sum(map(_times_log_2, total), top if natural else _times_log_2(top))
    return (result, (out, *parts)) if save else result


def _times_log_2(x: Array) -> Array:
    number = float(np.nextafter(np.float32(math.log(2.0)), np.float32(0.0)))
    return x * number + x * (math.log(2.0) - number)  # more digits than float32 has; both are positive, as -inf asks


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _triton(inputs, static):
    if static.by_cudnn:
        return _cudnn(inputs, static.options)
    return _forward(inputs, static, save=False)


def _fwd(inputs, static):
    def kernel(inputs):
        return _forward(inputs, static, save=True)

    def plain(inputs):
        return (_plain(inputs, static.options),)

    result, saved = transforms.with_plain_gradient(kernel, plain, saves=1)(inputs)
    return result, (inputs, saved)


def _mosaic_gradient(dout, inputs, saved, static):
    from jaxft.kernels.mosaic_gpu import attention_backward as mosaic

    qkv, (out, lse) = inputs.query, saved
    *_, rules, options = _arguments(inputs, static)
    rows = attention_delta.row_statistics(dout, out, lse, rules.seed, interpret=static.interpret)
    found = mosaic.backward(
        dout, qkv, rows, rules.mask, scale=options.scale, dropout_rate=options.dropout_rate,
        programs=static.multiprocessors,
    )  # fmt: skip
    # Inside a shard_map, results of Mosaic kernels do not say over which axes they vary.
    return transforms.vary_alike(qkv, found)[1]


def _bwd(static, saved, d):
    def kernel(d, inputs, saved):
        if static.gradient_by_mosaic:
            return Inputs(_mosaic_gradient(d, inputs, saved, static))
        dout, dlse = d if static.options.return_residual else (d, None)
        gradients = attention_backward.backward(
            dout,
            None if dlse is None else jnp.swapaxes(dlse, -1, -2),
            *_arguments(inputs, static),
            *saved,
            query_config=static.query_gradient,
            key_config=static.key_gradient,
            interpret=static.interpret,
        )
        return Inputs(*gradients)

    def plain(d, inputs, saved):
        (gradients,) = jax.vjp(lambda inputs: _plain(inputs, static.options), inputs)[1](d)
        return Inputs(*gradients[:4])

    return (transforms.with_plain_gradient(kernel, plain)(d, *saved),)


_triton.defvjp(_fwd, _bwd)
_triton_jit = jax.jit(_triton, static_argnums=1)
