"""dense_residual_layer_norm: LN(dropout(x @ kernel + bias) + residual), how each half of a BERT layer ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from jaxft import dispatch, reference
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import dense as triton_dense
from jaxft.kernels.triton import layer_norm as triton_norm
from jaxft.ops import checks, dense, layer_norm, plans, transforms
from jaxft.ops.plans import Pass
from jaxft.tuning import dense as tuning
from jaxft.tuning import rows as tuning_rows

Array = jax.Array


def dense_residual_layer_norm(
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Array:
    """A dense layer, and the normalised sum of its result and a residual: for few rows as two kernels made for it.

    Equivalent to::

      bias_residual_layer_norm(dense(x, kernel), bias, residual, gamma, beta, epsilon=epsilon)

    and as fast as that for many rows. A few rows give work to too few programs; then several share the depth of each
    tile of the product (split-K), and the kernel of the LayerNorm adds up their partial sums, in float32. XLA does the
    like, and where its product of few rows is the fastest, in TF32 and for some deep ones, both are XLA's, unless a
    gradient is taken.

    Args:
      x: `[..., K]`, float32, float16 or bfloat16; products accumulate in float32.
      kernel: `[K, D]` of the dtype of `x`.
      bias: `[D]` of any float dtype, or None.
      residual: `[..., D]` of the dtype of `x`.
      gamma, beta: `[D]` of any float dtype, or None for 1 and 0.
      epsilon: added to the variance (FasterTransformer's default; BERT's is 1e-12).
      dropout_rate: in [0, 1). What is kept is a pure function of the key and the element's index.
      dropout_rng: a JAX random key, needed where the rate is not 0.
      precision: of the product, as in `jnp.matmul`; None follows `jax.default_matmul_precision`.
      implementation: None for the fastest, "triton" or "xla".

    Returns:
      `[..., D]` of the dtype of `x`.

    Raises:
      TypeError: an array is not of floats, kernel or residual has another dtype than x, or a number is not one.
      ValueError: a shape does not fit, a number is out of its range, or an unknown precision or implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.

    Gradients: of x, kernel, bias, residual, gamma and beta. Where they are taken, the two ops run, also for the result:
    the product is then rounded to the dtype of x before the sum. Deterministic.
    Source: a GEMM of FasterTransformer v1.0 and the `add_bias_input_layernorm` after it.
    """
    op = "dense_residual_layer_norm"
    x, kernel = checks.as_factors(op, x, kernel)
    depth, width = kernel.shape
    residual = checks.as_float(op, "residual", residual)
    checks.check_shape(op, "residual", residual, (*x.shape[:-1], width))
    checks.check_same_dtype(op, "residual", residual, "x", x)
    bias, gamma, beta = (
        checks.as_vector(op, name, vector, width) for name, vector in (("bias", bias), ("gamma", gamma), ("beta", beta))
    )
    options = {
        "epsilon": checks.check_number(op, "epsilon", epsilon, positive=True),
        "dropout_rate": checks.check_dropout(op, dropout_rate, dropout_rng),
        "precision": checks.check_precision(op, precision, x.dtype),
    }
    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, depth), kernel, residual.reshape(rows, width), bias, gamma, beta
    plan = plan_of(op, *arrays, **options, implementation=implementation)
    plans.record(op, arrays, plan)
    return run(*arrays, dropout_rng if plan.dropout_rate > 0.0 else None, plan).reshape(residual.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """How the two halves run.

    A pass by "ops" has the plans of `dense` and `bias_residual_layer_norm`. A `forward` pass by "triton" is a split-K
    matmul and a LayerNorm that adds up the partial sums, one by "xla" is plain jnp.
    """

    epsilon: float
    dropout_rate: float
    precision: Any
    kernel_precision: str  # "tf32" or "float32", of float32 matmuls in kernels


def plan_of(
    op: str,
    x: Array,
    kernel: Array,
    residual: Array,
    bias: Array | None,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float,
    dropout_rate: float,
    precision: Any,
    implementation: str | None,
) -> Plan:
    """Chooses backends and configurations for arrays of these shapes and dtypes, in two dimensions."""
    (rows, depth), width, itemsize = x.shape, kernel.shape[1], x.dtype.itemsize
    product_reason = triton_dense.unsupported(x=x)
    reason = product_reason or triton_norm.unsupported(residual, bias=bias, gamma=gamma, beta=beta)
    choice = dispatch.choose(op, implementation, {"triton": reason})
    kernel_precision, device = dispatch.matmul_precision(precision), dispatch.device()
    product = dense.plan_of(op, x, kernel, None, None, None, precision, implementation)
    # A matmul that no kernel takes, because of its sharding or its size, leaves the LayerNorm to XLA, too.
    norm = layer_norm.plan_of(
        op, residual, bias, residual, gamma, beta, epsilon=epsilon, dropout_rate=dropout_rate, in_place=True,
        implementation="xla" if product_reason else implementation,
    )  # fmt: skip
    two_ops = Pass("ops", (product, norm))
    forward, why = two_ops, choice.why
    if choice.name == "triton" and 0 not in (rows, depth, width):
        split = tuning.dense_split(rows, depth, width, itemsize, device)
        if split.splits > 1:
            forward = Pass("triton", (split, tuning_rows.layer_norm(rows, width, 4, device, "sums")))  # of float32 sums
        elif implementation is None and tuning.splits_few_rows(rows, itemsize, kernel_precision) and product.plain:
            # XLA's split matmul takes the LayerNorm along.
            # H200, tf32, 128x768x768: 8.4 us (our LayerNorm after the matmul 9.6), 2026-11-23
            forward, why = plans.XLA, "triton: slower at this size"
    return Plan(
        forward=forward,
        saving=two_ops,
        backward=two_ops,
        interpret=choice.interpret,
        why=why,
        epsilon=epsilon,
        dropout_rate=dropout_rate,
        precision=precision,
        kernel_precision=kernel_precision,
    )


def run(
    x: Array, kernel: Array, residual: Array, bias: Array | None, gamma: Array | None, beta: Array | None,
    rng: Array | None, plan: Plan,
) -> Array:  # fmt: skip
    """Computes both halves of arrays in two dimensions."""
    arrays = x, kernel, residual, bias, gamma, beta, rng
    if plan.forward.backend == "ops":
        return _two_ops(*arrays, plan)
    return _result_jit(*transforms.vary_alike(*arrays), plan)


def _two_ops(x, kernel, residual, bias, gamma, beta, rng, plan):
    product, norm = plan.backward.config
    y = dense.run(x, kernel, None, None, product)
    return layer_norm.run(y, bias, residual, gamma, beta, rng, norm)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _result(x, kernel, residual, bias, gamma, beta, rng, plan):
    if plan.forward.backend == "xla":
        return reference.dense_residual_layer_norm(
            x, kernel, bias, residual, gamma, beta, precision=plan.precision, epsilon=plan.epsilon,
            dropout_rate=plan.dropout_rate, dropout_rng=rng,
        )  # fmt: skip
    split, norm = plan.forward.config
    (sums,) = triton_dense.forward(
        x, kernel, None, None, activation=None, precision=plan.kernel_precision, config=split,
        interpret=plan.interpret, splits=split.splits,
    )  # fmt: skip
    seed = None if rng is None else dropout_seed(rng)
    return triton_norm.forward(
        sums, bias, residual, gamma, beta, seed, epsilon=plan.epsilon, dropout_rate=plan.dropout_rate,
        return_sum=False, save=False, in_place=False, config=norm, interpret=plan.interpret,
    )[0]  # fmt: skip


def _fwd(x, kernel, residual, bias, gamma, beta, rng, plan):
    run = functools.partial(_two_ops, rng=rng, plan=plan)
    return jax.vjp(run, x, kernel, residual, bias, gamma, beta)


def _bwd(plan, pull_back, d):
    return *pull_back(d), None


_result.defvjp(_fwd, _bwd)
_result_jit = jax.jit(_result, static_argnums=7)
