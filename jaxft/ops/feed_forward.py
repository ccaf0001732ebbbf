"""The op `feed_forward_residual_layer_norm`: LN(dropout(act(x @ W1 + b1) @ W2 + b2) + x), half of a BERT layer."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, dense, dense_layer_norm, float8, layer_norm, matrix_view, plans, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import dense as tuning

_OP = "feed_forward_residual_layer_norm"


def _axes(given: dict[str, Any]) -> str:
    """Returns the axes of a call (see `sharding.over_explicit_axes`)."""
    columns, inner = ("f", "f") if given.get("gate") is None else ("F", "G")  # the halves of a gate are far apart
    return (
        f"x: ... D, in_kernel: D {columns}, in_bias: {columns}, in_kernel_scale: {columns}, out_kernel: {inner} D, "
        "out_bias: D, out_kernel_scale: D, gamma: D, beta: D, residual: ... D -> ... D"
    )


@sharding.over_explicit_axes(_axes)
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
    gate: str | None = None,
    residual: Array | None = None,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_sum: bool = False,
    precision: jax.lax.PrecisionLike = None,
    in_kernel_scale: Array | None = None,
    out_kernel_scale: Array | None = None,
    x_scale: float | None = None,
    inner_scale: float | None = None,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Computes the feed-forward network of a BERT layer: two dense layers, the residual and the LayerNorm.

    Equivalent to::

        h = dense(x, in_kernel, in_bias, activation=activation, gate=gate)
        dense_residual_layer_norm(h, out_kernel, out_bias, x, gamma, beta, epsilon=epsilon)  # or `residual` for x

    The forward pass runs the kernels of these two ops. The backward pass is faster if `"mosaic_gpu"` runs the first
    layer in 16 bits. The kernel of that layer then also stores the derivatives of the activation, for bfloat16 in 8
    bits. The backward pass multiplies by them in the epilogue of its matmul with `out_kernel`.

    Args:
      x: `[..., D]`, float32, float16, bfloat16 or float8_e4m3fn. The matmuls accumulate in float32.
      in_kernel: `[D, F]` of the dtype of `x`.
      in_bias: `[F]` of any float dtype, or None.
      out_kernel: `[F, D]` of the dtype of `x`; `[F / 2, D]` with a gate.
      out_bias: `[D]` of any float dtype, or None.
      gamma: `[D]` of any float dtype, or None for 1.
      beta: `[D]` of any float dtype, or None for 0.
      activation: "gelu" (with the error function), "gelu_tanh", "relu", "silu" or "tanh".
      gate: None, "first" or "second": the half of the columns of `in_kernel` to which the activation is applied, see
        `dense`.
      residual: the shape and dtype of `x`, or None for `x`. A pre-norm model passes the sum whose normalisation is `x`.
        If `x` is float8, the residual is required, and is bfloat16 or float16.
      epsilon: added to the variance. (The default is FasterTransformer's, BERT's is 1e-12.)
      dropout_rate: probability of dropping an element, in [0, 1).
      dropout_rng: a JAX random key, required if the rate is not 0 (see `jaxft.ops`).
      return_sum: whether to also return the sum before the normalisation, for pre-norm models.
      precision: precision of the matmuls, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.
      in_kernel_scale: as `kernel_scale` of `dense`, for a float8 `in_kernel`.
      out_kernel_scale: the same for `out_kernel`.
      x_scale: as for `dense`, for a float8 `x`.
      inner_scale: the number by which the float8 array between the layers is to be multiplied. None is 1.
      float8_scale: as for `dense_residual_layer_norm`.
      implementation: None picks the fastest (see `jaxft.ops`). `"triton"` and `"xla"` run all of the op.
        `"mosaic_gpu"` (Hopper only) runs the first layer and, in 16 bits, its gradient; the rest is picked as for None.

    Returns:
      `[..., D]` of the dtype of the residual. With `return_sum`, a pair of such arrays: (normalised, sum). With
      `float8_scale`, the float8 array follows.

    Gradients: for all arrays.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Accuracy: stored derivatives of the activation are rounded. For bfloat16 they have 8 bits in steps of 1/200, so that
    derivatives below 1/400 become 0. With the weights of a real checkpoint, the errors of the gradients are then as
    large as with plain jnp in bfloat16. The gradient of a unit whose sums are all far in a tail of the activation has a
    larger error, but such a gradient is small. For float16 the derivatives are float16, and "gelu_tanh" and "silu" may
    then differ by rounding from their values where no gradient is taken. See docs/performance-notes.md, "Accuracy of
    activation derivatives in 8 bits".

    Source: the second half of FasterTransformer v1.0's encoder layer.
    """
    op = _OP
    (in_kernel, in_view), (out_kernel, out_view) = map(matrix_view.split, (in_kernel, out_kernel))
    x, in_kernel = checks.as_factors(op, x, in_kernel, name="in_kernel")
    width, inner = in_kernel.shape
    out_kernel = checks.as_term(
        op, "out_kernel", out_kernel, (checks.gated_width(op, gate, in_kernel, "in_kernel"), width), x
    )
    in_bias = checks.as_vector(op, "in_bias", in_bias, inner)
    out_bias, gamma, beta = checks.as_vectors(op, width, out_bias=out_bias, gamma=gamma, beta=beta)
    checks.check_activation(op, activation)
    checks.check_flag(op, "return_sum", return_sum)
    given = {"x_scale": x_scale, "inner_scale": inner_scale, "float8_scale": float8_scale}
    scales = {name: float8.check_scale(op, name, scale) for name, scale in given.items()}
    if float8.is_float8(x):
        if residual is None:
            raise ValueError(f"{op}: residual must be an array if x is float8_e4m3fn, got None")
        residual = float8.as_residual(op, residual, x.shape)
        if gate is not None:
            raise NotImplementedError(f"{op}: there is no gate with float8_e4m3fn arrays, got gate={gate!r}")
        in_kernel_scale = float8.check_kernel_scale(op, "in_kernel_scale", in_kernel_scale, inner)
        out_kernel_scale = float8.check_kernel_scale(op, "out_kernel_scale", out_kernel_scale, width)
    else:
        kernel_scales = {"in_kernel_scale": in_kernel_scale, "out_kernel_scale": out_kernel_scale}
        float8.check_unused(op, x, **kernel_scales, **scales)
    if residual is not None and not float8.is_float8(x):
        residual = checks.as_term(op, "residual", residual, x.shape, x)
    precision = checks.check_precision(op, precision, x.dtype)
    options: dict[str, Any] = {
        "epsilon": checks.check_number(op, "epsilon", epsilon, positive=True),
        "dropout_rate": checks.check_dropout(op, dropout_rate, dropout_rng),
        "return_sum": bool(return_sum),
        "precision": precision,
    }
    rows = math.prod(x.shape[:-1])
    flat = None if residual is None else residual.reshape(rows, width)
    arrays = x.reshape(rows, width), in_kernel, in_bias, out_kernel, out_bias, flat, gamma, beta
    if float8.is_float8(x):
        rng = dropout_rng if dropout_rate > 0.0 else None
        found = _float8(
            op, x, residual, arrays, (in_kernel_scale, out_kernel_scale), scales, activation, options, rng,
            implementation,
        )  # fmt: skip
        return found if len(found) > 1 else found[0]
    plan = plan_of(op, *arrays, activation=activation, gate=gate, **options, implementation=implementation)
    plans.record(op, arrays, plan)
    rng = dropout_rng if dropout_rate > 0.0 else None
    out = _run(x, in_kernel, in_bias, out_kernel, out_bias, residual, gamma, beta, rng, plan, in_view, out_view)
    return out if return_sum else out[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `feed_forward_residual_layer_norm`.

    The `forward` pass is composed of other ops. If the `backward` pass is not "ops", these ops are `dense`, `dense`
    and `bias_residual_layer_norm`, and the backward pass multiplies by the derivatives that the first kernel of the
    `saving` pass has stored. Otherwise the ops are `dense` and `dense_residual_layer_norm`, with their own gradients.
    """

    precision: Any


def plan_of(
    op: str, x: Array, in_kernel: Array, in_bias: Array | None, out_kernel: Array, out_bias: Array | None,
    residual: Array | None, gamma: Array | None, beta: Array | None, *, activation: str, gate: str | None,
    epsilon: float, dropout_rate: float, return_sum: bool, precision: Any, implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backends and configurations for arrays of these shapes and dtypes, in two dimensions."""
    (rows, width), inner, itemsize, device = x.shape, in_kernel.shape[1], x.dtype.itemsize, dispatch.device()
    # Checks a named implementation here, so that an error has the names of this op's arguments.
    if implementation is not None:
        layers = {"in_kernel": in_kernel, "in_bias": in_bias, "out_kernel": out_kernel, "out_bias": out_bias}
        reason = triton.unsupported(x, **layers, residual=residual, gamma=gamma, beta=beta)
        dispatch.choose(op, implementation, {"triton": reason, "mosaic_gpu": reason})
    others = None if implementation == "mosaic_gpu" else implementation
    first = dense.plan_of(op, x, in_kernel, in_bias, None, activation, precision, implementation, gate=gate)

    def between(x, kernel):
        y = jnp.matmul(x, kernel)
        return y if gate is None else y[:, : inner // 2]

    # With the sharding that the array between the layers has. An activation would add the mesh of the context.
    h: Any = jax.eval_shape(between, x, in_kernel)
    residual = x if residual is None else residual
    norm: dict[str, Any] = {
        "epsilon": epsilon, "dropout_rate": dropout_rate, "return_sum": return_sum, "implementation": others
    }  # fmt: skip
    # Kernels store no derivatives in float32, and none of a gate.
    if first.forward.backend != "mosaic_gpu" or itemsize > 2 or gate is not None:
        second = dense_layer_norm.plan_of(
            op, h, out_kernel, residual, out_bias, gamma, beta, **norm, precision=precision
        )
        ops = Pass("ops", (first, second))
        return Plan(forward=ops, backward=ops, precision=precision, **_of_all(first, second))
    middle = dense.plan_of(op, h, out_kernel, None, None, None, precision, None)
    last = layer_norm.plan_of(op, x, out_bias, residual, gamma, beta, **norm, in_place=True)
    saving, backward = tuning.dense_mosaic_derivatives(
        first.forward.config, rows, width, inner, itemsize, support.derivative_dtype(x.dtype).itemsize, device
    )
    # The LayerNorm has its own gradient, after the kernel that multiplies by the derivatives.
    kernels = "mosaic_gpu" if last.backward.backend == "xla" else f"mosaic_gpu + {last.backward.backend}"
    return Plan(
        forward=Pass("ops", (first, middle, last)),
        saving=Pass("ops", (dataclasses.replace(first, saving=Pass("mosaic_gpu", saving)), middle, last)),
        backward=Pass(kernels, (backward, last.backward.config)), precision=precision, **_of_all(first, middle, last),
    )  # fmt: skip


def _of_all(*inner: plans.Plan) -> dict[str, Any]:
    """Returns the fields of a plan that follow from the plans of the ops that it is composed of."""
    reasons = dict.fromkeys(plan.why for plan in inner if plan.why)
    by_name = any(plan.by_name for plan in inner)
    return {"interpret": any(plan.interpret for plan in inner), "by_name": by_name, "why": "; ".join(reasons)}


def _float8(op, x, residual, arrays, kernel_scales, scales, activation, options, rng, implementation):
    """Computes the op of float8 arrays, which has no gradient. `arrays` are all of them in two dimensions."""
    rows, in_kernel, in_bias, out_kernel, out_bias, residual_rows, gamma, beta = arrays
    in_scale, out_scale = kernel_scales
    x_scale, inner_scale = scales["x_scale"] or 1.0, scales["inner_scale"] or 1.0
    dtype = residual.dtype
    first = float8.plan_of(
        op, rows, in_kernel, in_scale, in_bias, activation=activation, x_scale=x_scale, dtype=dtype,
        float8_scale=inner_scale, implementation=implementation,
    )  # fmt: skip
    h: Any = jax.eval_shape(jnp.matmul, rows, in_kernel)  # with its sharding
    rest = out_bias, gamma, beta, out_scale
    second = dense_layer_norm.float8_plan_of(
        op, h, out_kernel, residual_rows, *rest, x_scale=inner_scale, float8_scale=scales["float8_scale"], **options,
        implementation=implementation,
    )  # fmt: skip
    plan = Plan(forward=Pass("ops", (first, second)), precision=options["precision"], **_of_all(first, second))
    plans.record(op, (rows, in_kernel, in_scale, in_bias, out_kernel, out_scale, *arrays[4:]), plan)
    h = float8.run(x, in_kernel, in_scale, in_bias, None, first)
    return dense_layer_norm.run_float8(h, out_kernel, residual, *rest, rng, second)


def _run(x, in_kernel, in_bias, out_kernel, out_bias, residual, gamma, beta, rng, plan, in_view, out_view):
    residual = x if residual is None else residual
    if plan.backward.backend == "ops":
        first, second = plan.forward.config
        h = dense.run(x, in_kernel, in_bias, None, first, in_view)
        return dense_layer_norm.run(h, out_kernel, residual, out_bias, gamma, beta, rng, second, out_view)
    *_, last = plan.forward.config
    y = _products_jit(x, in_kernel, in_bias, out_kernel, plan)
    return layer_norm.run(y, out_bias, residual, gamma, beta, rng, last)


@functools.partial(jax.jit, static_argnums=4)
def _products_jit(x, in_kernel, in_bias, out_kernel, plan):
    carriers = dense.product_carrier(x, in_kernel, plan), *transforms.wide_carriers(in_bias, out_kernel)
    every = transforms.vary_alike(x, in_kernel, in_bias, out_kernel, *carriers)
    return _products(*every[:4], tuple(every[4:]), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _products(x, in_kernel, in_bias, out_kernel, carriers, plan):
    del carriers
    first, middle, _ = plan.forward.config
    h = dense.kernels(x, in_kernel, in_bias, None, None, first)
    return dense.run(h, out_kernel, None, None, middle)


def _fwd(x, in_kernel, in_bias, out_kernel, carriers, plan):
    first, middle, _ = plan.saving.config
    h, derivative = dense.with_derivative(x, in_kernel, in_bias, first)
    return dense.run(h, out_kernel, None, None, middle), (x, in_kernel, in_bias, out_kernel, h, derivative)


def _bwd(plan, saved, dy):
    x, in_kernel, in_bias, out_kernel, h, derivative = saved
    dz, total = _inner_gradient(dy, out_kernel, derivative, x, in_kernel, in_bias, plan)
    d_in_bias = None if in_bias is None else total
    return None, None, None, None, (reference.wide(dz), d_in_bias, _outer_gradient(dy, h, out_kernel, plan))


def _outer_gradient(dy, h, out_kernel, plan):
    """Computes the gradient of the kernel of h @ out_kernel, in float32 if JAX adds up gradients of examples."""

    def gradient(shared, dy, h, out_kernel):
        if shared[2]:  # factors in 16 bits, whose products are added up in float32
            rows = tuple(range(h.ndim - 1))
            return jax.lax.dot_general(
                *reference.matmul_factors(h, dy.astype(h.dtype)), ((rows, rows), ((), ())), precision=plan.precision,
                preferred_element_type=reference.wide_dtype(h),
            )  # fmt: skip
        product = functools.partial(jnp.matmul, h, precision=plan.precision)
        out, pull_back = jax.vjp(product, out_kernel)
        return reference.wide(pull_back(dy.astype(out.dtype))[0])

    plain = functools.partial(gradient, (False,) * 3)
    rows = sharding.rows_of(h.shape[:-1], dropout=False)
    rule = Rule(_OP, f"{rows} d, {rows} f, f d", "f d")
    return transforms.with_plain_gradient(gradient, plain, plan, rule)(dy, h, out_kernel)


def _inner_gradient(dy, out_kernel, derivative, x, in_kernel, in_bias, plan):
    """Computes the gradient of x @ in_kernel + in_bias, and its sum over the rows in float32.

    The gradient of this function does not use the stored `derivative` of the activation, but computes it again.
    """

    def plain(dy, out_kernel, derivative, x, in_kernel, in_bias):
        first, *_ = plan.forward.config
        z = reference.dense(x, in_kernel, in_bias, precision=plan.precision).astype(jnp.float32)
        dh = jnp.matmul(dy, out_kernel.T, precision=plan.precision, preferred_element_type=jnp.float32)
        (dz,) = jax.vjp(reference.ACTIVATIONS[first.activation], z)[1](dh)
        return dz.astype(dy.dtype), jnp.sum(dz, axis=tuple(range(dz.ndim - 1)))

    def fused(_, dy, out_kernel, derivative, *others):
        from jaxft.kernels.mosaic_gpu import dense_backward as mosaic

        matrices = float8.rows_of(dy), out_kernel, float8.rows_of(derivative)
        found = mosaic.backward(*matrices, config=plan.backward.config[0])
        *_, dz, total = transforms.vary_alike(*matrices, *found)  # see `dense._one_kernel`
        return dz.reshape(derivative.shape), total

    dtype, ndim = dy.dtype, dy.ndim

    def legal(shapes):
        inner = jax.ShapeDtypeStruct(shapes[1][:-3:-1], dtype)
        return support.dense_unsupported(dense.matrix_of(shapes[0], ndim, dtype), inner, None) is None

    rows = sharding.rows_of(dy.shape[:-1], dropout=False)
    unread = f"{'_ ' * ndim}, _ _, _"
    rule = Rule(_OP, f"{rows} D, f D, {rows} f, {unread}", f"{rows} f, f", legal)
    run = transforms.with_plain_gradient(fused, plain, plan, rule)
    return run(dy, out_kernel, derivative, x, in_kernel, in_bias)


_products.defvjp(_fwd, _bwd)
