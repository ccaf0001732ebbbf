"""dense_residual_layer_norm: LN(dropout(x @ kernel + bias) + residual), how each half of a BERT layer ends."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax

from jaxft import dispatch, reference, tuning, tuning_dense
from jaxft.kernels.triton import dense as product
from jaxft.kernels.triton import layer_norm as norm
from jaxft.ops import common
from jaxft.ops.dense import dense
from jaxft.ops.layer_norm import bias_residual_layer_norm

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
    like; where its product is the fastest, as of few rows in float32, so is its LayerNorm after it, and both run.

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
    x, kernel = common.as_factors(op, x, kernel)
    depth, width = kernel.shape
    residual = common.as_float(op, "residual", residual)
    common.check_shape(op, "residual", residual, (*x.shape[:-1], width))
    common.check_same_dtype(op, "residual", residual, "x", x)
    bias, gamma, beta = (
        common.as_vector(op, name, vector, width) for name, vector in (("bias", bias), ("gamma", gamma), ("beta", beta))
    )
    options = _Options(
        epsilon=common.check_number(op, "epsilon", epsilon, positive=True),
        dropout_rate=common.check_dropout(op, dropout_rate, dropout_rng),
        precision=common.check_precision(op, precision, x.dtype),
        implementation=implementation,
    )
    reason = product.unsupported(x=x) or norm.unsupported(residual, bias=bias, gamma=gamma, beta=beta)
    choice = dispatch.choose(op, implementation, {"triton": reason})

    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, depth), kernel, residual.reshape(rows, width), bias, gamma, beta
    rng = dropout_rng if options.dropout_rate > 0.0 else None
    if choice.name == "xla" or 0 in (rows, depth, width):
        return _two_ops(*arrays, rng, options).reshape(residual.shape)
    kind = dispatch.device_kind()
    sizes = rows, depth, width, x.dtype.itemsize
    by_library = implementation is None and tuning_dense.norm_by_library(*sizes)
    parts = None if by_library else tuning_dense.dense_split(*sizes, kind)
    if parts is not None and parts.splits == 1:
        return _two_ops(*arrays, rng, options).reshape(residual.shape)
    static = _Static(
        options=options,
        product=parts,
        norm=tuning.layer_norm(rows, width, 4, kind, "sums"),  # which have 4 bytes
        kernel_precision=dispatch.matmul_precision(options.precision),
        interpret=choice.interpret,
    )
    return _result_jit(*common.vary_alike(*arrays, rng), static).reshape(residual.shape)


class _Options(NamedTuple):
    """What a caller says beside the arrays."""

    epsilon: float
    dropout_rate: float
    precision: Any
    implementation: str | None


class _Static(NamedTuple):
    """What is compiled into the kernels."""

    options: _Options
    product: tuning_dense.SplitConfig | None  # None: all is XLA's
    norm: tuning.RowConfig
    kernel_precision: str
    interpret: bool


def _two_ops(x, kernel, residual, bias, gamma, beta, rng, options):
    y = dense(x, kernel, precision=options.precision, implementation=options.implementation)
    return bias_residual_layer_norm(
        y, bias, residual, gamma, beta, epsilon=options.epsilon, dropout_rate=options.dropout_rate, dropout_rng=rng,
        in_place=True, implementation=options.implementation,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _result(x, kernel, residual, bias, gamma, beta, rng, static):
    if static.product is None:
        options = static.options._replace(implementation="xla")
        return _two_ops(x, kernel, residual, bias, gamma, beta, rng, options)
    (sums,) = product.forward(
        x, kernel, None, None, activation=None, precision=static.kernel_precision, config=static.product,
        interpret=static.interpret, splits=static.product.splits,
    )  # fmt: skip
    seed = None if rng is None else reference.dropout_seed(rng)
    return norm.forward(
        sums, bias, residual, gamma, beta, seed, epsilon=static.options.epsilon,
        dropout_rate=static.options.dropout_rate, return_sum=False, save=False, in_place=False, config=static.norm,
        interpret=static.interpret,
    )[0]  # fmt: skip


def _fwd(x, kernel, residual, bias, gamma, beta, rng, static):
    run = functools.partial(_two_ops, rng=rng, options=static.options)
    return jax.vjp(run, x, kernel, residual, bias, gamma, beta)


def _bwd(static, pull_back, d):
    return *pull_back(d), None


_result.defvjp(_fwd, _bwd)
_result_jit = jax.jit(_result, static_argnums=7)
