"""Times an encoder on this device: jaxft, plain JAX compiled by XLA, and plain JAX with cuDNN attention."""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxft import dispatch
from jaxft.models.bert import BertModel
from jaxft.models.float8 import Float8Recipe, quantize
from jaxft.ops.bundle import bundle
from jaxft.tuning import profiler

logger = logging.getLogger("jaxft")

Attention = Literal["xla", "cudnn"]

FLOAT8 = "jaxft fp8"  # the name of a variant

_ROUNDS = 9
_ROUND_SECONDS = 0.1
_BLOCKING_CALLS = 20


class ComparisonError(RuntimeError):
    """jaxft's result is less accurate than plain JAX's result allows, or plain JAX has no result to compare with."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Median times of a call, in microseconds."""

    queued: float  # per call, when many calls are queued before the result is awaited
    blocking: float  # of one call, until its result is ready


# --- Baselines: layers as an experienced JAX user would write them -----------------------------------------------

PLAIN_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def plain_layer_norm(x: Array, gamma: Array, beta: Array, epsilon: float) -> Array:
    """Computes LayerNorm in plain JAX, in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(variance + epsilon)
    return (normal * gamma.astype(wide.dtype) + beta.astype(wide.dtype)).astype(x.dtype)


def plain_layer(
    p: Mapping[str, Array], x: Array, lengths: Array | None, *, heads: int, activation: str, epsilon: float,
    attention: Attention | Callable[[Array, Array, Array], Array], drop: Callable[[Array], Array] = lambda x: x,
) -> Array:  # fmt: skip
    """Computes a `BertLayer` in plain JAX from `x` `[B, T, D]` and `lengths` `[B]` (None: all T tokens).

    The parameters `p` have the dtype of `x`, and either one kernel and bias for q, k and v ("qkv_kernel", "qkv_bias"),
    or one for each ("q_kernel", "q_bias", ...). `drop` is the dropout of the two outputs that a residual is added to.
    """
    batch, length, width = x.shape
    if "qkv_kernel" in p:
        qkv = (x @ p["qkv_kernel"] + p["qkv_bias"]).reshape(batch, length, 3, heads, width // heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
    else:
        projected = (x @ p[f"{name}_kernel"] + p[f"{name}_bias"] for name in ("q", "k", "v"))
        q, k, v = (y.reshape(batch, length, heads, width // heads) for y in projected)
    if callable(attention):
        context = attention(q, k, v)
    else:
        context = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation=attention)
    context = context.reshape(x.shape) @ p["out_kernel"] + p["out_bias"]
    x = plain_layer_norm(x + drop(context), p["attention_norm_gamma"], p["attention_norm_beta"], epsilon)
    y = PLAIN_ACTIVATIONS[activation](x @ p["ffn_in_kernel"] + p["ffn_in_bias"])
    y = y @ p["ffn_out_kernel"] + p["ffn_out_bias"]
    return plain_layer_norm(x + drop(y), p["ffn_norm_gamma"], p["ffn_norm_beta"], epsilon)


def plain_encoder(
    params: Sequence[Mapping[str, Array]], x: Array, lengths: Array | None = None, **options: Any
) -> Array:
    """Computes a stack of layers `[B, T, D]` in plain JAX, with the `options` of `plain_layer`."""
    for p in params:
        x = plain_layer(p, x, lengths, **options)
    return x


def without_counterpart(model: BertModel) -> str | None:
    """Returns why `plain_encoder` is not the layers of `model`, or None. Sizes may differ from BERT's."""
    config = model.config
    if config.relative_bias:
        return "its attention has a bias by relative position"
    if config.shared_layers:
        return "its layers share one set of parameters"
    if reason := model.layers[0].unlike_bert():
        return reason
    return None if config.positions == "learned" else f"its attention has {config.positions} positions"


# --- The comparison ----------------------------------------------------------------------------------------------


def compare(model: BertModel, batch: int, length: int, recipe: Float8Recipe | None = None) -> dict[str, Times]:
    """Times the layers of `model` (`implementation=None`) on the embeddings of random tokens `[batch, length]`.

    With a `recipe`, the model that it quantizes is timed too. Its hidden states must have a cosine similarity of at
    least 0.98 with plain JAX's in float64.

    The results of jaxft and cuDNN are checked against plain JAX in float64 first. Raises `ComparisonError` if jaxft is
    not accurate enough or plain JAX cannot run the case. In these cases, cuDNN is left out, with a warning.
    """
    config, options = model.config, model.layers[0].options
    dtype = options.dtype
    arrays, rebuild = bundle(model.layers)
    params = [
        {name: jnp.asarray(value, dtype) for name, value in nnx.to_pure_dict(nnx.state(layer)).items()}
        for layer in model.layers
    ]

    @jax.jit
    def ours(arrays: list[Array], x: Array) -> Array:
        for layer in rebuild(arrays):
            x = layer(x, None)
        return x

    def plain(attention: Attention) -> Callable[..., Array]:
        encoder = functools.partial(
            plain_encoder, heads=config.num_attention_heads, activation=config.activation,
            epsilon=config.layer_norm_eps, attention=attention,
        )  # fmt: skip
        return jax.jit(encoder)

    variants: dict[str, tuple[Callable[..., Array], Any]] = {"jaxft": (ours, arrays), "xla": (plain("xla"), params)}
    if recipe is not None:
        float8_arrays, float8_rebuild = bundle(quantize(model, recipe).layers)

        @jax.jit
        def in_float8(arrays: list[Array], x: Array) -> Array:
            for layer in float8_rebuild(arrays):
                x = layer(x, None)
            return x

        variants[FLOAT8] = (in_float8, float8_arrays)
    if dispatch.platform() == "cuda" and dtype != jnp.float32:
        variants["xla+cudnn"] = (plain("cudnn"), params)
    ids = jax.random.randint(jax.random.key(0), (batch, length), 0, config.vocab_size)
    x = nnx.jit(lambda embeddings, ids: embeddings(ids, None, None))(model.embeddings, ids)
    calls = {name: functools.partial(f, parameters, x) for name, (f, parameters) in variants.items()}
    with jax.numpy_dtype_promotion("standard"):  # jax.nn needs it, whatever the user has set
        # Wait for each result: converting an array whose computation failed (out of memory) makes NumPy abort.
        with jax.enable_x64(True):
            exact = jax.block_until_ready(variants["xla"][0](*jax.tree.map(lambda a: a.astype("float64"), (params, x))))
        try:
            plainly = jax.block_until_ready(calls["xla"]())
        except ValueError as error:  # float16 on a CPU
            raise ComparisonError(f"plain JAX cannot run {dtype} here: {error}") from error
        truth = np.asarray(exact)
        if not (np.isfinite(truth).all() and np.isfinite(np.asarray(plainly, np.float64)).all()):
            raise ComparisonError(
                f"plain JAX's hidden states in {dtype} are not finite: there is nothing to compare with"
            )
        allowed = 2 * _error(plainly, truth) + 2 * float(jnp.finfo(dtype).eps) * float(np.max(np.abs(truth)))

        def check(whose: str, name: str) -> None:
            error = _error(jax.block_until_ready(calls[name]()), truth)
            if not error <= allowed:  # also when it is NaN
                raise ComparisonError(
                    f"{whose} hidden states err by {error:.3g}, above {allowed:.3g}, twice plain JAX's error; it was "
                    "not timed"
                )

        check("jaxft's", "jaxft")
        if FLOAT8 in calls:
            got = np.asarray(jax.block_until_ready(calls[FLOAT8]()), np.float64)
            norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(truth, axis=-1)
            if not (cosine := float(np.mean(np.sum(got * truth, axis=-1) / norms))) >= 0.98:
                raise ComparisonError(f"the hidden states in float8 have a cosine of {cosine:.4f}; they were not timed")
        if "xla+cudnn" in calls:
            try:
                check("its", "xla+cudnn")
            except jax.errors.JaxRuntimeError:  # out of memory
                raise
            except (NotImplementedError, RuntimeError, ValueError) as error:  # inaccurate, unsupported or not installed
                logger.warning("%dx%d: cuDNN's attention is left out: %s", batch, length, error)
                del calls["xla+cudnn"]
        return _times(calls)


def _error(got: Array, truth: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - truth)))


def _times(calls: Mapping[str, Callable[[], Array]]) -> dict[str, Times]:
    for call in calls.values():  # compile
        profiler.queued_us(call, 2)
    round_us = _ROUND_SECONDS * 1e6
    repeats = {n: max(2, min(1000, math.ceil(round_us / profiler.queued_us(call, 3)))) for n, call in calls.items()}
    names = [*calls]
    queued = profiler.turns(names, _ROUNDS, lambda name: profiler.queued_us(calls[name], repeats[name]))
    blocking = profiler.turns(names, _BLOCKING_CALLS, lambda name: profiler.queued_us(calls[name], 1))
    medians = zip(np.median(queued, axis=0).tolist(), np.median(blocking, axis=0).tolist(), strict=True)
    return {name: Times(*both) for name, both in zip(names, medians, strict=True)}


# --- Output ------------------------------------------------------------------------------------------------------


def table(cases: Sequence[tuple[int, int]], times: Sequence[Mapping[str, Times]]) -> list[str]:
    """Formats a row for each case. "speedup" is the queued time of the fastest baseline divided by jaxft's.

    jaxft's time is that in float8 where there is one.
    """
    names = list(dict.fromkeys(itertools.chain(*times)))  # of all cases, because a case may lack a variant
    lines = [["batch", "length", *names, "speedup", *(f"{name}, blocking" for name in names)]]
    for (batch, length), found in zip(cases, times, strict=True):
        fastest = min(us.queued for name, us in found.items() if not name.startswith("jaxft"))
        ours = found.get(FLOAT8, found["jaxft"]).queued
        queued, blocking = (
            [f"{getattr(found[name], what):.1f}" if name in found else "-" for name in names]
            for what in ("queued", "blocking")
        )
        lines.append([str(batch), str(length), *queued, f"{fastest / ours:.2f}x", *blocking])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def draw(cases: Sequence[tuple[int, int]], times: Sequence[Mapping[str, Times]], title: str, file: BinaryIO) -> None:
    """Draws a bar chart of the queued times relative to plain XLA, and writes it as a PNG."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(itertools.chain(*times)))
    height = 0.8 / len(names)
    figure = Figure(figsize=(8, 1.2 + 0.25 * len(names) * len(cases)))
    axes = figure.subplots()
    for i, name in enumerate(names):
        shares = [found[name].queued / found["xla"].queued if name in found else 0.0 for found in times]
        axes.barh([y + i * height for y in range(len(cases))], shares, height, label=name)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(cases))])
    axes.set_yticklabels([f"{batch} x {length}" for batch, length in cases])
    axes.invert_yaxis()
    axes.set_xlabel("time relative to plain XLA (shorter is faster)")
    axes.set_ylabel("batch x tokens")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
