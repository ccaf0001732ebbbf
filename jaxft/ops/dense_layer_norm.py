"""dense_residual_layer_norm: LN(dropout(x @ kernel + bias) + residual), how each half of a BERT layer ends."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax

from jaxft import dispatch
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import dense as product
from jaxft.kernels.triton import layer_norm as norm
from jaxft.ops import checks, transforms
from jaxft.ops.dense import dense, plan_of, splits_few_rows
from jaxft.ops.layer_norm import bias_residual_layer_norm
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import table as tuning_table

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
    options = _Options(
        epsilon=checks.check_number(op, "epsilon", epsilon, positive=True),
        dropout_rate=checks.check_dropout(op, dropout_rate, dropout_rng),
        precision=checks.check_precision(op, precision, x.dtype),
        implementation=implementation,
    )
    reason = product.unsupported(x=x) or norm.unsupported(residual, bias=bias, gamma=gamma, beta=beta)
    choice = dispatch.choose(op, implementation, {"triton": reason})

    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, depth), kernel, residual.reshape(rows, width), bias, gamma, beta
    rng = dropout_rng if options.dropout_rate > 0.0 else None
    if choice.name == "xla" or 0 in (rows, depth, width):
        return _two_ops(*arrays, rng, options).reshape(residual.shape)
    kind, precision = dispatch.device(), dispatch.matmul_precision(options.precision)
    parts = tuning_dense.dense_split(rows, depth, width, x.dtype.itemsize, kind)
    if parts.splits > 1:
        sums = tuning_rows.layer_norm(rows, width, 4, kind, "sums")  # which have 4 bytes
        split = _Split(parts, sums, precision, choice.interpret)
    else:
        # Where XLA's product of few rows is the fastest, it splits the depth, and XLA's LayerNorm adds up the parts. In
        # TF32 128x768x768 8.4 us for 9.6 with our LayerNorm, 128x3072x768 12.2 for 13.2, 512x3072x768 19.2 for 21.2,
        # but 1024x768x768 15.1 for 14.1; in bfloat16 512x3072x768 10.9 for 11.6 (H200, 2026-11-23).
        few = implementation is None and splits_few_rows(rows, x.dtype.itemsize, precision)
        if not few or plan_of(op, *arrays[:2], None, None, None, options.precision, None) is not None:
            return _two_ops(*arrays, rng, options).reshape(residual.shape)
        split = None
    return _result_jit(*transforms.vary_alike(*arrays, rng), options, split).reshape(residual.shape)


class _Options(NamedTuple):
    """What a caller says beside the arrays."""

    epsilon: float
    dropout_rate: float
    precision: Any
    implementation: str | None


class _Split(NamedTuple):
    """What is compiled into the two kernels."""

    product: tuning_dense.SplitConfig
    norm: tuning_table.RowConfig
    kernel_precision: str
    interpret: bool


def _two_ops(x, kernel, residual, bias, gamma, beta, rng, options):
    y = dense(x, kernel, precision=options.precision, implementation=options.implementation)
    return bias_residual_layer_norm(
        y, bias, residual, gamma, beta, epsilon=options.epsilon, dropout_rate=options.dropout_rate, dropout_rng=rng,
        in_place=True, implementation=options.implementation,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _result(x, kernel, residual, bias, gamma, beta, rng, options, split):
    """By the two kernels, or (`split` is None) by XLA."""
    if split is None:
        return _two_ops(x, kernel, residual, bias, gamma, beta, rng, options._replace(implementation="xla"))
    (sums,) = product.forward(
        x, kernel, None, None, activation=None, precision=split.kernel_precision, config=split.product,
        interpret=split.interpret, splits=split.product.splits,
    )  # fmt: skip
    seed = None if rng is None else dropout_seed(rng)
    return norm.forward(
        sums, bias, residual, gamma, beta, seed, epsilon=options.epsilon, dropout_rate=options.dropout_rate,
        return_sum=False, save=False, in_place=False, config=split.norm, interpret=split.interpret,
    )[0]  # fmt: skip


def _fwd(x, kernel, residual, bias, gamma, beta, rng, options, split):
    run = functools.partial(_two_ops, rng=rng, options=options)
    return jax.vjp(run, x, kernel, residual, bias, gamma, beta)


def _bwd(options, split, pull_back, d):
    return *pull_back(d), None


_result.defvjp(_fwd, _bwd)
_result_jit = jax.jit(_result, static_argnums=(7, 8))
