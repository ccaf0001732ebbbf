"""feed_forward_residual_layer_norm: LN(dropout(act(x @ W1 + b1) @ W2 + b2) + x), the second half of a BERT layer."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, dense, dense_layer_norm, layer_norm, plans, transforms
from jaxft.ops.plans import Pass
from jaxft.tuning import dense as tuning

Array = jax.Array


def feed_forward_residual_layer_norm(
    x: Array,
    in_kernel: Array,
    in_bias: Array | None,
    out_kernel: Array,
    out_bias: Array | None,
    gamma: Array | None,
    beta: Array | None,
    *,
    activation: str = "gelu",
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Array:
    """The feed-forward network of a BERT layer: two dense layers, the residual and the LayerNorm.

    Equivalent to::

      h = dense(x, in_kernel, in_bias, activation=activation)
      dense_residual_layer_norm(h, out_kernel, out_bias, x, gamma, beta, epsilon=epsilon)

    and in the forward pass the same kernels. The backward pass is what it is for: where "mosaic_gpu" is the fastest for
    the first layer, in 16 bits its kernel also gives the derivatives of the activation, beside bfloat16 in 8 bits, and
    the gradient is multiplied by them in the epilogue of its product with the second kernel.

    Args:
      x: `[..., D]`, float32, float16 or bfloat16; products accumulate in float32.
      in_kernel: `[D, F]` of the dtype of `x`.
      in_bias: `[F]` of any float dtype, or None.
      out_kernel: `[F, D]` of the dtype of `x`.
      out_bias, gamma, beta: `[D]` of any float dtype, or None for 0, 1 and 0.
      activation: "gelu" (by the error function), "gelu_tanh", "relu", "silu" or "tanh".
      epsilon: added to the variance (FasterTransformer's default; BERT's is 1e-12).
      dropout_rate: in [0, 1). What is kept is a pure function of the key and the element's index.
      dropout_rng: a JAX random key, needed where the rate is not 0.
      precision: of the products, as in `jnp.matmul`; None follows `jax.default_matmul_precision`.
      implementation: None for the fastest, "triton" or "xla"; "mosaic_gpu" for the first layer and, in 16 bits, its
        gradient, and the fastest for the rest (on Hopper GPUs).

    Returns:
      `[..., D]` of the dtype of `x`.

    Raises:
      TypeError: an array is not of floats, a kernel has another dtype than x, or a number is not one.
      ValueError: a shape does not fit, a number is out of its range, or an unknown activation, precision or
        implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of all arrays. Deterministic. The activation's derivatives are rounded where that kernel saves them: in
    bfloat16 to 8 bits, in steps of 1/200, so that those below 1/400 count for nothing. In a real checkpoint the
    gradients then err as much as those of plain jnp in bfloat16; that of a unit whose sums are all far in a tail errs
    more, but is small. In float16 they are float16; there, where a gradient is taken, "gelu_tanh" and "silu" may differ
    from the values without one by what rounding does.
    Source: the second half of FasterTransformer v1.0's encoder layer.
    """
    op = "feed_forward_residual_layer_norm"
    x, in_kernel = checks.as_factors(op, x, in_kernel, name="in_kernel")
    width, inner = in_kernel.shape
    out_kernel = checks.as_float(op, "out_kernel", out_kernel)
    checks.check_shape(op, "out_kernel", out_kernel, (inner, width))
    checks.check_same_dtype(op, "out_kernel", out_kernel, "x", x)
    in_bias = checks.as_vector(op, "in_bias", in_bias, inner)
    out_bias, gamma, beta = (
        checks.as_vector(op, name, vector, width)
        for name, vector in (("out_bias", out_bias), ("gamma", gamma), ("beta", beta))
    )
    checks.check_activation(op, activation)
    precision = checks.check_precision(op, precision, x.dtype)
    options = {
        "epsilon": checks.check_number(op, "epsilon", epsilon, positive=True),
        "dropout_rate": checks.check_dropout(op, dropout_rate, dropout_rng),
        "precision": precision,
    }
    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, width), in_kernel, in_bias, out_kernel, out_bias, gamma, beta
    plan = plan_of(op, *arrays, activation=activation, **options, implementation=implementation)
    plans.record(op, arrays, plan)
    return _run(*arrays, dropout_rng if dropout_rate > 0.0 else None, plan).reshape(x.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """How the feed-forward network runs.

    The `forward` pass is composed of other ops. A `backward` pass by "mosaic_gpu" multiplies by the derivatives that
    the first kernel of the `saving` pass kept; its ops are `dense`, `dense` and `bias_residual_layer_norm`. Otherwise
    the ops are `dense` and `dense_residual_layer_norm`, with their own gradients.
    """

    precision: Any


def plan_of(
    op: str,
    x: Array,
    in_kernel: Array,
    in_bias: Array | None,
    out_kernel: Array,
    out_bias: Array | None,
    gamma: Array | None,
    beta: Array | None,
    *,
    activation: str,
    epsilon: float,
    dropout_rate: float,
    precision: Any,
    implementation: str | None,
) -> Plan:
    """Chooses backends and configurations for arrays of these shapes and dtypes, in two dimensions."""
    (rows, width), inner, itemsize, device = x.shape, in_kernel.shape[1], x.dtype.itemsize, dispatch.device()
    # A named implementation is refused here, with the names of this op's arguments.
    if implementation is not None:
        reason = triton.unsupported(x=x, in_bias=in_bias, out_bias=out_bias, gamma=gamma, beta=beta)
        dispatch.choose(op, implementation, {"triton": reason, "mosaic_gpu": reason})
    others = None if implementation == "mosaic_gpu" else implementation
    first = dense.plan_of(op, x, in_kernel, in_bias, None, activation, precision, implementation)
    norm = {"epsilon": epsilon, "dropout_rate": dropout_rate, "implementation": others}
    if first.forward.backend != "mosaic_gpu" or itemsize > 2:  # there are no derivatives in float32
        h = jax.ShapeDtypeStruct((rows, inner), x.dtype, sharding=jax.typeof(x).sharding)
        second = dense_layer_norm.plan_of(
            op, h, out_kernel, x, out_bias, gamma, beta, **norm, precision=precision
        )  # fmt: skip
        ops = Pass("ops", (first, second))
        return Plan(forward=ops, backward=ops, why=first.why, precision=precision)
    h = jax.ShapeDtypeStruct((rows, inner), x.dtype)
    second = dense.plan_of(op, h, out_kernel, None, None, None, precision, None)
    last = layer_norm.plan_of(op, x, out_bias, x, gamma, beta, **norm, in_place=True)
    saving, backward = tuning.dense_mosaic_derivatives(
        first.forward.config, rows, width, inner, itemsize, support.derivative_dtype(x.dtype).itemsize, device
    )
    return Plan(
        forward=Pass("ops", (first, second, last)),
        saving=Pass("ops", (dataclasses.replace(first, saving=Pass("mosaic_gpu", saving)), second, last)),
        backward=Pass("mosaic_gpu", backward),
        why=first.why,
        precision=precision,
    )


def _run(x, in_kernel, in_bias, out_kernel, out_bias, gamma, beta, rng, plan):
    if plan.backward.backend == "ops":
        first, second = plan.forward.config
        h = dense.run(x, in_kernel, in_bias, None, first)
        return dense_layer_norm.run(h, out_kernel, x, out_bias, gamma, beta, rng, second)
    *_, last = plan.forward.config
    y = _products_jit(*transforms.vary_alike(x, in_kernel, in_bias, out_kernel), plan)
    return layer_norm.run(y, out_bias, x, gamma, beta, rng, last)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _products(x, in_kernel, in_bias, out_kernel, plan):
    first, second, _ = plan.forward.config
    h = dense.kernels(x, in_kernel, in_bias, None, first)
    return dense.run(h, out_kernel, None, None, second)


def _fwd(x, in_kernel, in_bias, out_kernel, plan):
    first, second, _ = plan.saving.config
    h, slope = dense.with_slope(x, in_kernel, in_bias, first)
    return dense.run(h, out_kernel, None, None, second), (x, in_kernel, in_bias, out_kernel, h, slope)


def _bwd(plan, saved, dy):
    x, in_kernel, in_bias, out_kernel, h, slope = saved
    product = functools.partial(jnp.matmul, precision=plan.precision)
    dz, total = _inner_gradient(dy, out_kernel, slope, x, in_kernel, in_bias, plan)
    d_in_bias = None if in_bias is None else total.astype(in_bias.dtype)
    (d_out_kernel,) = jax.vjp(functools.partial(product, h), out_kernel)[1](dy)
    dx, d_in_kernel = jax.vjp(product, x, in_kernel)[1](dz)
    return dx, d_in_kernel, d_in_bias, d_out_kernel


def _inner_gradient(dy, out_kernel, slope, x, in_kernel, in_bias, plan):
    """Of the sum x @ in_kernel + in_bias, and its sum over the rows in float32.

    `slope` are the activation's derivatives as the kernel has kept them. For the gradients of this they are computed
    again from the sum.
    """

    def plain(dy, out_kernel, slope, x, in_kernel, in_bias):
        first, *_ = plan.forward.config
        z = reference.dense(x, in_kernel, in_bias, precision=plan.precision).astype(jnp.float32)
        dh = jnp.matmul(dy, out_kernel.T, precision=plan.precision, preferred_element_type=jnp.float32)
        (dz,) = jax.vjp(reference.ACTIVATIONS[first.activation], z)[1](dh)
        return dz.astype(dy.dtype), jnp.sum(dz, axis=0)

    def fused(dy, out_kernel, slope, *_):
        from jaxft.kernels.mosaic_gpu import dense_backward as mosaic

        found = mosaic.backward(dy, out_kernel, slope, config=plan.backward.config)
        return tuple(transforms.vary_alike(dy, out_kernel, slope, *found)[3:])  # see `dense`

    return transforms.with_plain_gradient(fused, plain)(dy, out_kernel, slope, x, in_kernel, in_bias)


_products.defvjp(_fwd, _bwd)
_products_jit = jax.jit(_products, static_argnums=4)
