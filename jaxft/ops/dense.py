"""dense: activation(x @ kernel + bias) + residual."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxft import dispatch, reference
from jaxft.kernels.triton import bias_activation
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, transforms
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import table as tuning_table

Array = jax.Array


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    residual: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Array:
    """A dense layer with what follows it: bias, activation and residual.

    Equivalent to::

      jax.nn.gelu(x @ kernel + bias, approximate=False) + residual  # activation="gelu"

    Args:
      x: `[..., K]`, float32, float16 or bfloat16; products accumulate in float32.
      kernel: `[K, F]` of the dtype of `x`.
      bias: `[F]` of any float dtype, or None.
      activation: None, "gelu" (by the error function), "gelu_tanh", "relu", "silu" or "tanh".
      residual: `[..., F]` of the dtype of `x`, added last.
      precision: of the product, as in `jnp.matmul`; None follows `jax.default_matmul_precision`. TF32 by "mosaic_gpu"
        cuts digits of x off, where XLA rounds: 1.6 times the error, results 0.04 % smaller on average.
      implementation: None for the fastest; "mosaic_gpu" (on Hopper GPUs; in float32 without a residual, in TF32, and
        the kernel is transposed first) and "triton" do all in one kernel, "xla" in as many as XLA makes of it. On an
        NVIDIA GPU, None takes "mosaic_gpu" where it was measured faster, the host's time included, else in 16 bits
        "triton" for few rows, but for deep ones, and up to Hopper for any number of them where there is an activation
        and F > K; for others XLA's product (cuBLAS) and for an activation after it the Triton kernel of
        `bias_activation` (XLA's own for few rows, but not in full float32, and where there is a residual).

    Returns:
      `[..., F]` of the dtype of `x`.

    Raises:
      TypeError: an array is not of floats, or kernel or residual has another dtype than x.
      ValueError: a shape does not fit, or an unknown activation, precision or implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x, kernel, bias and residual. Deterministic. With neither activation nor residual, XLA adds the bias
    in the dtype of x, in the epilogue of its product; otherwise the sum is float32. What is saved for the activation's
    gradient is the product, by "mosaic_gpu" that sum, rounded to the dtype of x.
    Source: the GEMMs of FasterTransformer v1.0 with `add_bias_act` in the epilogue.
    """
    op = "dense"
    x, kernel = checks.as_factors(op, x, kernel)
    bias = checks.as_vector(op, "bias", bias, kernel.shape[1])
    checks.check_activation(op, activation, optional=True)
    if residual is not None:
        residual = checks.as_float(op, "residual", residual)
        checks.check_shape(op, "residual", residual, (*x.shape[:-1], kernel.shape[1]))
        checks.check_same_dtype(op, "residual", residual, "x", x)
    precision = checks.check_precision(op, precision, x.dtype)
    rows, width = math.prod(x.shape[:-1]), kernel.shape[1]
    # In two dimensions, which is where XLA recognises a matrix product with a bias in its epilogue.
    arrays = (x.reshape(rows, x.shape[-1]), kernel, bias, None if residual is None else residual.reshape(rows, width))
    plan = plan_of(op, *arrays, activation, precision, implementation)
    return run(*arrays, activation, precision, plan).reshape(*x.shape[:-1], width)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static: one kernel for all, or (`product` is None) XLA's product and perhaps a kernel after it."""

    activation: str | None
    precision: Any
    product: tuning_dense.DenseConfig | tuning_dense.MosaicDenseConfig | None
    epilogue: tuning_table.ElementwiseConfig | None  # None: XLA's
    gradient: tuning_table.GradientConfig | None  # of the activation and the bias; None: XLA's
    kernel_precision: str
    interpret: bool

    @property
    def by_mosaic(self) -> bool:
        return isinstance(self.product, tuning_dense.MosaicDenseConfig)


def plan_of(
    op: str,
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array | None,
    activation: str | None,
    precision: Any,
    implementation: str | None,
) -> Plan | None:
    """How to compute it, of arrays in two dimensions; None for as the reference does."""
    sizes = rows, _, width = x.shape[0], x.shape[1], kernel.shape[1]
    itemsize, kernel_precision = x.dtype.itemsize, dispatch.matmul_precision(precision)
    reasons, kind, fastest = {"triton": triton.unsupported(x=x, bias=bias)}, dispatch.device(), implementation
    if implementation is None and dispatch.platform() == "cuda" and reasons["triton"] is None:
        hopper, full = dispatch.device().is_hopper, itemsize > 2 and kernel_precision == "float32"
        fastest = tuning_dense.dense_implementation(
            *sizes, activation, itemsize, kind, hopper, residual is not None, full
        )
    # Mosaic GPU is imported, which takes a while, only where it may be the choice.
    if fastest not in (None, "triton", "xla"):
        # What Triton refuses, dtypes and arrays of some shardings and shapes, is nothing for it either.
        mosaic = {"mosaic_gpu": reasons["triton"] or _mosaic_reason(x, kernel, bias, residual, precision)}
        reasons = mosaic | reasons if implementation is None else reasons | mosaic
    choice = dispatch.choose(op, implementation, reasons)
    if implementation is None and fastest == "mosaic_gpu" and choice.name != fastest:
        fastest = tuning_dense.without_mosaic(*sizes, activation, itemsize, kind)
    product: tuning_dense.DenseConfig | tuning_dense.MosaicDenseConfig | None = None
    if choice.name == "mosaic_gpu":
        product = tuning_dense.dense_mosaic(*sizes, activation, itemsize, kind, residual is not None)
    elif fastest == "triton":
        product = tuning_dense.dense(*sizes, itemsize, kind)
    no_kernel = product is None and (residual is not None if activation else bias is None)
    if choice.name == "xla" or 0 in sizes or no_kernel:
        return None
    # Of few rows XLA splits the depth of the product, and the kernel that adds up the parts takes the activation along.
    # In TF32 128x768x3072 with GELU 12.0 us for 13.3 with our kernel after it, 256 rows 14.4 for 15.9, 512 rows 20.1
    # for 20.3; in bfloat16 128x3072x768 7.5 us, and without GELU 7.4 (H200, 2026-11-23 and 24).
    by_xla = splits_few_rows(rows, itemsize, kernel_precision)
    epilogue = None if by_xla else tuning_rows.bias_activation(rows, width, itemsize, kind)
    # It puts the gradient where it adds up parts, too: forward and backward of 128x768x3072 in TF32 with tanh GELU took
    # 34.8 us for 36.5 with our kernel for it, of 256 rows 50.1 for 51.2, of 512 rows 70.5 for 71.0 (H100, 2026-11-25).
    gradient = None
    if product is not None or not by_xla or itemsize == 2 or rows > 128:
        gradient = tuning_rows.bias_activation_backward(rows, width, itemsize, kind)
    return Plan(
        activation=activation,
        precision=precision,
        product=product,
        epilogue=epilogue,
        gradient=gradient,
        kernel_precision=kernel_precision,
        interpret=choice.interpret,
    )


def splits_few_rows(rows: int, itemsize: int, kernel_precision: str) -> bool:
    """Whether XLA's products of so few rows are such that XLA should do what follows them, in what adds up their parts.

    Not in float32 that is not TF32.
    """
    return rows <= 512 and (itemsize <= 2 or kernel_precision == "tf32")


def run(
    x: Array, kernel: Array, bias: Array | None, residual: Array | None, activation: str | None, precision: Any,
    plan: Plan | None,
) -> Array:  # fmt: skip
    if plan is None:
        return _reference(x, kernel, bias, residual, activation, precision)
    return _kernels_jit(*transforms.vary_alike(x, kernel, bias, residual), plan)


def _mosaic_reason(x: Array, kernel: Array, bias: Array | None, residual: Array | None, precision: Any) -> str | None:
    try:
        from jaxft.kernels.mosaic_gpu import dense as mosaic
    except ImportError as error:
        return f"this JAX cannot import it: {error}"
    if x.dtype == jnp.float32 and dispatch.matmul_precision(precision) != "tf32":
        return "a float32 product was asked for, its products are TF32"
    return mosaic.unsupported(x, kernel, bias, residual)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _reference(x, kernel, bias, residual, activation, precision):
    return reference.dense(x, kernel, bias, activation=activation, residual=residual, precision=precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def kernels(x, kernel, bias, residual, plan):
    if plan.product is None:
        return _epilogue(jnp.matmul(x, kernel, precision=plan.precision), bias, residual, plan, in_place=True)
    return _one_kernel(x, kernel, bias, residual, plan)[0]


def _one_kernel(x, kernel, bias, residual, plan, also=None):
    """The result, and what a gradient needs: Triton's `also` "product", Mosaic GPU's "sum" or "slope"."""
    if not plan.by_mosaic:
        found = triton.forward(
            x, kernel, bias, residual, activation=plan.activation, precision=plan.kernel_precision, config=plan.product,
            interpret=plan.interpret, also_product=also == "product",
        )  # fmt: skip
        return tuple(found)
    from jaxft.kernels.mosaic_gpu import dense as mosaic

    results = mosaic.forward(x, kernel, bias, residual, activation=plan.activation, config=plan.product, also=also)
    # Inside a shard_map, results of Mosaic kernels do not say over which axes they vary.
    return tuple(transforms.vary_alike(x, kernel, bias, residual, *results)[4:])


def with_slope(x: Array, kernel: Array, bias: Array | None, plan: Plan) -> tuple[Array, Array]:
    """The result of a plan by Mosaic, and the activation's derivatives, rounded, which have no gradient."""

    def plain(x, kernel, bias):
        return (reference.dense(x, kernel, bias, activation=plan.activation, precision=plan.precision),)

    fused = functools.partial(_one_kernel, residual=None, plan=plan, also="slope")
    return transforms.with_plain_gradient(fused, plain, saves=1)(x, kernel, bias)


def _epilogue(y, bias, residual, plan, in_place):
    """activation(y + bias) + residual of a product `y` in memory, which may end there."""
    if plan.activation is None or residual is not None or plan.epilogue is None:
        return reference.dense_epilogue(y, bias, plan.activation, residual)
    return bias_activation.forward(
        y, bias, activation=plan.activation, config=plan.epilogue, in_place=in_place, interpret=plan.interpret
    )


def _fwd(x, kernel, bias, residual, plan):
    if plan.product is None:
        y = jnp.matmul(x, kernel, precision=plan.precision)
        run = transforms.with_plain_gradient(
            functools.partial(_epilogue, plan=plan, in_place=False),
            lambda y, bias, residual: reference.dense_epilogue(y, bias, plan.activation, residual),
        )
        return run(y, bias, residual), (x, kernel, bias, residual, None if plan.activation is None else y)
    if plan.activation is not None:

        def plain(x, kernel, bias, residual):
            inner, outer = (bias, None) if plan.by_mosaic else (None, bias)
            y = reference.dense(x, kernel, inner, precision=plan.precision)
            return reference.dense_epilogue(y, outer, plan.activation, residual), y

        fused = functools.partial(_one_kernel, plan=plan, also="sum" if plan.by_mosaic else "product")
        out, y = transforms.with_plain_gradient(fused, plain)(x, kernel, bias, residual)
        return out, (x, kernel, bias, residual, y)
    return kernels(x, kernel, bias, residual, plan), (x, kernel, bias, residual, None)


def _bwd(plan, saved, d_out):
    x, kernel, bias, residual, y = saved
    if plan.by_mosaic and bias is not None:
        bias = jnp.zeros_like(bias)  # it is in y

    dy, d_bias = _epilogue_gradient(d_out, y, bias, plan)
    _, product_vjp = jax.vjp(functools.partial(jnp.matmul, precision=plan.precision), x, kernel)
    return *product_vjp(dy), d_bias, None if residual is None else d_out


def sum_of_rows(x: Array, plan: Plan) -> Array:
    """x [M, F] -> [F], float32."""
    total = transforms.with_plain_gradient(
        functools.partial(bias_activation.sum_of_rows, interpret=plan.interpret),
        lambda x: jnp.sum(x, axis=0, dtype=jnp.float32),
    )
    return total(x)


def _epilogue_gradient(d_out, y, bias, plan):
    """Of activation(y + bias): the gradients of y and bias, in one pass if there is an activation."""
    if plan.activation is None:
        if bias is None:
            return d_out, None
        return d_out, sum_of_rows(d_out, plan).astype(bias.dtype)

    def plain(d_out, y, bias):
        return jax.vjp(lambda y, bias: reference.dense_epilogue(y, bias, plan.activation, None), y, bias)[1](d_out)

    if plan.gradient is None:
        return plain(d_out, y, bias)

    def fused(d_out, y, bias):
        return bias_activation.backward(
            d_out, y, bias, activation=plan.activation, config=plan.gradient, interpret=plan.interpret
        )

    return transforms.with_plain_gradient(fused, plain)(d_out, y, bias)


kernels.defvjp(_fwd, _bwd)
_kernels_jit = jax.jit(kernels, static_argnums=4)
