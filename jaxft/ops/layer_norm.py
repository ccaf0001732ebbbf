"""The ops `layer_norm`, `bias_residual_layer_norm`, LN(dropout(x + bias) + residual), and `rms_norm`."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxft import dispatch, reference
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import common
from jaxft.kernels.triton import layer_norm as triton
from jaxft.ops import checks, float8, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import rows as tuning


@sharding.over_explicit_axes("x: ... D, gamma: D, beta: D -> ... D")
def layer_norm(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    epsilon: float = 1e-6,
    in_place: bool = False,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts it, in one pass over memory.

    Equivalent to::

        mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        (x - mean) * lax.rsqrt(variance + epsilon) * gamma + beta

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. The statistics are float32: first the mean, then the variance as the
        mean of (x - mean)^2, never as E[x^2] - E[x]^2.
      gamma: `[D]` of any float dtype, or None for 1.
      beta: `[D]` of any float dtype, or None for 0.
      epsilon: added to the variance.
      in_place: whether the kernel writes the result into the memory of `x` (see `jaxft.ops`).
      float8_scale: None, or a number that adds a result: the normalised array divided by that number, in float8_e4m3fn,
        clipped to 448. NaN stays NaN. Such a call has no gradient.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      An array of the shape and dtype of `x`. With `float8_scale`, a pair of arrays: (normalised, float8).

    Gradients: for x, gamma and beta.

    Determinism: the result and the gradients are deterministic.
    """
    op = "layer_norm"
    x, gamma, beta, epsilon = _check(op, x, gamma, beta, epsilon)
    checks.check_flag(op, "in_place", in_place)
    float8_scale = float8.check_scale(op, "float8_scale", float8_scale)
    arrays = x, None, None, gamma, beta
    plan = plan_of(
        op, *arrays, epsilon=epsilon, in_place=in_place, float8_scale=float8_scale, implementation=implementation
    )
    plans.record(op, arrays, plan)
    out = run(*arrays, None, plan)
    return out[0] if float8_scale is None else out


@sharding.over_explicit_axes("x: ... D, bias: D, residual: ... D, gamma: D, beta: D -> ... D")
def bias_residual_layer_norm(
    x: Array,
    bias: Array | None,
    residual: Array,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_sum: bool = False,
    in_place: bool = False,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Adds a bias and a residual and normalises the sum (see `layer_norm`), in one pass over memory.

    Equivalent to::

        layer_norm(dropout(x + bias) + residual, gamma, beta, epsilon=epsilon)

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. The sum and the statistics are float32.
      bias: `[D]` of any float dtype, or None.
      residual: the shape and dtype of `x`.
      gamma: `[D]` of any float dtype, or None for 1.
      beta: `[D]` of any float dtype, or None for 0.
      epsilon: added to the variance. (The default is FasterTransformer's, BERT's is 1e-12.)
      dropout_rate: probability of dropping an element, in [0, 1).
      dropout_rng: a JAX random key, required if the rate is not 0 (see `jaxft.ops`).
      return_sum: whether to also return the sum before the normalisation, for pre-norm models.
      in_place: whether the kernel writes the result into the memory of `x` (see `layer_norm`), and the sum into the
        memory of `residual`.
      float8_scale: None, or a number that adds a result: the normalised array divided by that number, in float8_e4m3fn,
        clipped to 448. NaN stays NaN. Such a call has no gradient.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      An array of the shape and dtype of `x`. With `return_sum`, a pair of such arrays: (normalised, sum). With
      `float8_scale`, the float8 array follows.

    Gradients: for x, bias, residual, gamma and beta.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: `add_bias_input_layernorm` of FasterTransformer v1.0.
    """
    op = "bias_residual_layer_norm"
    x, gamma, beta, epsilon = _check(op, x, gamma, beta, epsilon)
    bias = checks.as_vector(op, "bias", bias, x.shape[-1])
    residual = checks.as_term(op, "residual", residual, x.shape, x)
    rate = checks.check_dropout(op, dropout_rate, dropout_rng)
    checks.check_flag(op, "return_sum", return_sum)
    checks.check_flag(op, "in_place", in_place)
    float8_scale = float8.check_scale(op, "float8_scale", float8_scale)
    arrays = x, bias, residual, gamma, beta
    plan = plan_of(
        op, *arrays, epsilon=epsilon, dropout_rate=rate, return_sum=return_sum, in_place=in_place,
        float8_scale=float8_scale, implementation=implementation,
    )  # fmt: skip
    plans.record(op, arrays, plan)
    out = run(*arrays, dropout_rng if rate > 0.0 else None, plan)
    return out if len(out) > 1 else out[0]


@sharding.over_explicit_axes("x: ... D, gamma: D, residual: ... D -> ... D")
def rms_norm(
    x: Array,
    gamma: Array | None = None,
    *,
    residual: Array | None = None,
    epsilon: float = 1e-6,
    return_sum: bool = False,
    in_place: bool = False,
    implementation: str | None = None,
) -> Any:
    """Divides the last axis by its root mean square, after adding a residual if there is one, in one pass over memory.

    Equivalent to::

        total = x + residual
        total * lax.rsqrt(jnp.mean(total**2, -1, keepdims=True) + epsilon) * gamma

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. The sum and the mean square are float32.
      gamma: `[D]` of any float dtype, or None for 1.
      residual: the shape and dtype of `x`, or None for 0.
      epsilon: added to the mean square.
      return_sum: whether to also return the sum before the normalisation, for pre-norm models. It needs a residual.
      in_place: whether the kernel writes the result into the memory of `x` (see `jaxft.ops`), and the sum into the
        memory of `residual`.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      An array of the shape and dtype of `x`. With `return_sum`, a pair of such arrays: (normalised, sum).

    Gradients: for x, gamma and residual.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    op = "rms_norm"
    x, gamma, _, epsilon = _check(op, x, gamma, None, epsilon)
    if residual is not None:
        residual = checks.as_term(op, "residual", residual, x.shape, x)
    checks.check_flag(op, "return_sum", return_sum)
    checks.check_flag(op, "in_place", in_place)
    if return_sum and residual is None:
        raise ValueError(f"{op}: return_sum needs a residual, got None")
    arrays = x, None, residual, gamma, None
    plan = plan_of(
        op, *arrays, epsilon=epsilon, return_sum=return_sum, in_place=in_place, center=False,
        implementation=implementation,
    )  # fmt: skip
    plans.record(op, arrays, plan)
    out = run(*arrays, None, plan)
    return out if return_sum else out[0]


def _check(op, x, gamma, beta, epsilon):
    x = checks.as_rows(op, x)
    gamma, beta = checks.as_vectors(op, x.shape[-1], gamma=gamma, beta=beta)
    return x, gamma, beta, checks.check_number(op, "epsilon", epsilon, positive=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `layer_norm`, `bias_residual_layer_norm` or, without `center`, `rms_norm`."""

    epsilon: float
    dropout_rate: float
    return_sum: bool
    in_place: bool
    center: bool
    float8_scale: float | None


def plan_of(
    op: str, x: Array, bias: Array | None, residual: Array | None, gamma: Array | None, beta: Array | None, *,
    epsilon: float, dropout_rate: float = 0.0, return_sum: bool = False, in_place: bool = False, center: bool = True,
    float8_scale: float | None = None, implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backend and configurations for arrays of these shapes and dtypes."""
    plan = functools.partial(
        Plan, epsilon=epsilon, dropout_rate=dropout_rate, return_sum=return_sum, in_place=in_place, center=center,
        float8_scale=float8_scale,
    )  # fmt: skip
    reason = triton.unsupported(x, bias=bias, residual=residual, gamma=gamma, beta=beta)
    reason = reason or (None if float8_scale is None else common.unsupported_by_card())
    choice = dispatch.choose(op, implementation, {"triton": reason})
    if choice.name == "xla" or x.size == 0:
        return plan(why=choice.why)
    sizes = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize, dispatch.device()
    wide = any(vector is not None and vector.dtype.itemsize > x.dtype.itemsize for vector in (bias, gamma))
    forward = tuning.layer_norm(*sizes)
    backward = tuning.layer_norm_backward(*sizes, "", wide and dropout_rate > 0.0)
    return plan(**plans.by_triton(choice, forward, backward))


def run(
    x: Array, bias: Array | None, residual: Array | None, gamma: Array | None, beta: Array | None, rng: Array | None,
    plan: Plan, carriers: Sequence[Array | None] | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Computes the normalised array, and the sum and the float8 array if the plan asks for them.

    `carriers`, which only kernels take, belong to the first five arrays (see `transforms.carrier`).
    """
    if plan.float8_scale is not None:
        return _with_float8(plan, x, bias, residual, gamma, beta, rng)
    if plan.forward.backend == "xla":
        return _reference(plan, x, bias, residual, gamma, beta, rng)
    return _kernels(plan, x, bias, residual, gamma, beta, rng, carriers=carriers)


@functools.partial(jax.jit, static_argnums=0)
def _with_float8(plan, x, *others):
    """Computes the results and a float8 array, without a gradient."""

    def plain(x, *others):
        y, *total = _plain(plan, reference.wide(x), *others)
        return *(part.astype(x.dtype) for part in (y, *total)), reference.to_float8(y, plan.float8_scale)

    def kernel(_, *arrays):
        return _forward(plan, False, *arrays)

    run = (
        plain if plan.forward.backend == "xla" else transforms.mappable(kernel, plain, plan, _rule(plan, x, *others)[0])
    )
    return float8.without_gradient("layer_norm", run)(*transforms.vary_alike(x, *others))


def _plain(plan, x, bias, residual, gamma, beta, rng):
    if not plan.center:
        options = {"epsilon": plan.epsilon, "return_sum": plan.return_sum}
        out = reference.rms_norm(x, gamma, residual=residual, **options)
        return out if plan.return_sum else (out,)
    if residual is None:
        return (reference.layer_norm(x, gamma, beta, epsilon=plan.epsilon),)
    options = {"epsilon": plan.epsilon, "dropout_rate": plan.dropout_rate, "return_sum": plan.return_sum}
    out = reference.bias_residual_layer_norm(x, bias, residual, gamma, beta, dropout_rng=rng, **options)
    return out if plan.return_sum else (out,)


def _forward(plan, save, x, bias, residual, gamma, beta, rng):
    out = triton.forward(
        _rows(x),
        bias,
        _rows(residual),
        gamma,
        beta,
        None if rng is None else dropout_seed(rng),
        epsilon=plan.epsilon,
        dropout_rate=plan.dropout_rate,
        return_sum=plan.return_sum,
        save=save,
        in_place=plan.in_place and not save,
        center=plan.center,
        float8_scale=plan.float8_scale,
        config=plan.forward.config,
        interpret=plan.interpret,
    )
    result = tuple(y.reshape(x.shape) for y in (out[:-1] if save else out))
    return (result, out[-1].reshape(2, *x.shape[:-1])) if save else result


def _backward(plan, dtypes, dy, saved, x, bias, residual, gamma, beta, rng):
    of_x, of_bias, of_residual, of_gamma, of_beta = dtypes
    vectors = {"bias": of_bias, "gamma": of_gamma, "beta": of_beta}
    dx, dresidual, found = triton.backward(
        _rows(dy[0]), _rows(dy[1]) if plan.return_sum else None, _rows(x), bias, _rows(residual), gamma,
        None if rng is None else dropout_seed(rng), saved.reshape(2, -1), dropout_rate=plan.dropout_rate,
        vectors={name: dtype for name, dtype in vectors.items() if dtype is not None},
        dtype=of_x if of_residual is None else np.promote_types(of_x, of_residual),
        center=plan.center, config=plan.backward.config, interpret=plan.interpret,
    )  # fmt: skip
    dresidual = None if dresidual is None else dresidual.reshape(x.shape)
    return dx.reshape(x.shape), found.get("bias"), dresidual, found.get("gamma"), found.get("beta")


def _rows(x):
    return None if x is None else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rule(plan, x, *others):
    rows = sharding.rows_of(x.shape[:-1], dropout=others[-1] is not None)
    return Rule("layer_norm", f"{rows} D, D, {rows} D, D, D, key({rows})", f"{rows} D"), f"2 {rows}"


_reference, _kernels = transforms.implementations(_forward, _backward, _plain, gradients=5, rule=_rule)
