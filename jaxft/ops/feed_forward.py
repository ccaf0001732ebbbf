"""feed_forward_residual_layer_norm: LN(dropout(act(x @ W1 + b1) @ W2 + b2) + x), the second half of a BERT layer."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxft import dispatch, reference
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, transforms
from jaxft.ops import dense as dense_op
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.layer_norm import bias_residual_layer_norm
from jaxft.tuning import dense as tuning_dense

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
    options: dict[str, Any] = {
        "epsilon": checks.check_number(op, "epsilon", epsilon, positive=True),
        "dropout_rate": checks.check_dropout(op, dropout_rate, dropout_rng),
        "dropout_rng": dropout_rng,
        "implementation": None if implementation == "mosaic_gpu" else implementation,
    }
    if implementation is not None:  # the two layers would say it in their arguments' names
        reason = triton.unsupported(x=x, in_bias=in_bias, out_bias=out_bias, gamma=gamma, beta=beta)
        dispatch.choose(op, implementation, {"triton": reason, "mosaic_gpu": reason})
    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, width), in_kernel, in_bias, out_kernel
    plan = dense_op.plan_of(op, *arrays[:3], None, activation, precision, implementation)
    if plan is None or not plan.by_mosaic or x.dtype.itemsize > 2:  # there are no derivatives in float32
        h = dense_op.run(*arrays[:3], None, activation, precision, plan).reshape(*x.shape[:-1], inner)
        return dense_residual_layer_norm(h, out_kernel, out_bias, x, gamma, beta, precision=precision, **options)
    between: Any = jax.ShapeDtypeStruct((rows, inner), x.dtype)
    static = _Static(
        plan,
        dense_op.plan_of(op, between, out_kernel, None, None, None, precision, None),
        tuning_dense.dense_mosaic_gradient(rows, width, inner, x.dtype.itemsize, dispatch.device()),
    )
    y = _products_jit(*transforms.vary_alike(*arrays), static).reshape(x.shape)
    return bias_residual_layer_norm(y, out_bias, x, gamma, beta, in_place=True, **options)


class _Static(NamedTuple):
    """What is compiled into the kernels."""

    plan: dense_op.Plan  # of the first product
    second: dense_op.Plan | None
    gradient: tuning_dense.MosaicDenseConfig


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _products(x, in_kernel, in_bias, out_kernel, static):
    return _second(dense_op.kernels(x, in_kernel, in_bias, None, static.plan), out_kernel, static)


def _second(h, out_kernel, static):
    return dense_op.run(h, out_kernel, None, None, None, static.plan.precision, static.second)


def _fwd(x, in_kernel, in_bias, out_kernel, static):
    h, slope = dense_op.with_slope(x, in_kernel, in_bias, static.plan)
    return _second(h, out_kernel, static), (x, in_kernel, in_bias, out_kernel, h, slope)


def _bwd(static, saved, dy):
    x, in_kernel, in_bias, out_kernel, h, slope = saved
    product = functools.partial(jnp.matmul, precision=static.plan.precision)
    dz, total = _inner_gradient(dy, out_kernel, slope, x, in_kernel, in_bias, static)
    d_in_bias = None if in_bias is None else total.astype(in_bias.dtype)
    (d_out_kernel,) = jax.vjp(functools.partial(product, h), out_kernel)[1](dy)
    dx, d_in_kernel = jax.vjp(product, x, in_kernel)[1](dz)
    return dx, d_in_kernel, d_in_bias, d_out_kernel


def _inner_gradient(dy, out_kernel, slope, x, in_kernel, in_bias, static):
    """Of the sum x @ in_kernel + in_bias, and its sum over the rows in float32.

    `slope` are the activation's derivatives as the kernel has kept them. For the gradients of this they are computed
    again from the sum.
    """

    def plain(dy, out_kernel, slope, x, in_kernel, in_bias):
        z = reference.dense(x, in_kernel, in_bias, precision=static.plan.precision).astype(jnp.float32)
        dh = jnp.matmul(dy, out_kernel.T, precision=static.plan.precision, preferred_element_type=jnp.float32)
        (dz,) = jax.vjp(reference.ACTIVATIONS[static.plan.activation], z)[1](dh)
        return dz.astype(dy.dtype), jnp.sum(dz, axis=0)

    def fused(dy, out_kernel, slope, *_):
        from jaxft.kernels.mosaic_gpu import dense_backward as mosaic

        found = mosaic.backward(dy, out_kernel, slope, config=static.gradient)
        return tuple(transforms.vary_alike(dy, out_kernel, slope, *found)[3:])  # see `dense`

    return transforms.with_plain_gradient(fused, plain)(dy, out_kernel, slope, x, in_kernel, in_bias)


_products.defvjp(_fwd, _bwd)
_products_jit = jax.jit(_products, static_argnums=4)
