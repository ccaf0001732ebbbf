"""Softmax: the ops `softmax` and `log_softmax` with scale, additive bias and boolean mask."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax

from jaxft import dispatch, reference
from jaxft.kernels.triton import softmax as triton
from jaxft.ops import checks, plans, transforms
from jaxft.ops.plans import Pass
from jaxft.tuning import rows as tuning

Array = jax.Array


def softmax(
    x: Array,
    *,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    in_place: bool = False,
    implementation: str | None = None,
) -> Array:
    """Computes the softmax of x * scale + bias over the last axis, restricted to the elements whose `mask` is True.

    Equivalent, if every row has a True, to::

        jax.nn.softmax(x * scale + bias, where=mask)

    Args:
      x: `[..., S]`, float32, float16 or bfloat16, of any width. The computation is in float32.
      scale: factor of `x`, a Python number. None is 1.
      bias: floats that broadcast to the shape of `x` (for example `[B, 1, T, S]`), or None.
      mask: booleans that broadcast to the shape of `x`, True = attend, or None. Masked values, NaN and Inf included,
        reach no output and no gradient.
      in_place: whether the kernel writes the result into the memory of `x`. This saves a buffer if nothing else needs
        `x`, because `x` is donated or was made in the same jit. If something else needs `x`, XLA copies `x` first. It
        has no effect where a gradient is taken, which needs `x`, nor with `"xla"`, which reuses buffers as it sees fit.
      implementation: `None` picks the fastest implementation for the device and shape. `"triton"` runs a kernel of
        jaxft, `"xla"` plain jnp. docs/kernels.md has the selection table.

    Returns:
      An array of the shape and dtype of `x`. Masked elements are 0, and so is a row without a True.

    Raises:
      TypeError: x or bias does not have a float dtype, mask is not boolean, scale is not a number, or `in_place` is not
        a bool.
      ValueError: bias or mask does not broadcast, `x` is a scalar, or the implementation is unknown.
      NotImplementedError: the named implementation does not support the call. The message says why.

    Gradients: for x and bias. They are computed from x and bias, so that the result is not kept.

    Determinism: the result and the gradients are deterministic.

    Source: FasterTransformer v1.0's `softmax_kernel` (with `scale` and `mask`); OneFlow's fused softmax.
    """
    return _run("softmax", x, scale, bias, mask, in_place, implementation)


def log_softmax(
    x: Array,
    *,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    in_place: bool = False,
    implementation: str | None = None,
) -> Array:
    """Computes the logarithm of the softmax of x * scale + bias over the last axis. It is -inf where `mask` is False.

    Equivalent, if every row has a True, to::

        jax.nn.log_softmax(x * scale + bias, where=mask)

    Args:
      x: `[..., S]`, as in `softmax`, for example as wide as a vocabulary.
      scale: as in `softmax`.
      bias: as in `softmax`.
      mask: as in `softmax`.
      in_place: as in `softmax`.
      implementation: as in `softmax`.

    Returns:
      An array of the shape and dtype of `x`. Masked elements are -inf, and so is a row without a True.

    Raises:
      TypeError: as `softmax`.
      ValueError: as `softmax`.
      NotImplementedError: as `softmax`.

    Gradients: for x and bias, 0 where `mask` is False. They are computed from x and bias, so that the result is not
    kept. For long rows, two numbers per row are kept.

    Determinism: the result and the gradients are deterministic.

    Source: OneFlow's fused softmax, in its logarithmic form.
    """
    return _run("log_softmax", x, scale, bias, mask, in_place, implementation)


def _run(op, x, scale, bias, mask, in_place, implementation):
    x = checks.as_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if scale is not None:
        scale = checks.check_number(op, "scale", scale)
    if bias is not None:
        bias = checks.as_float(op, "bias", bias)
        bias = checks.as_broadcast(op, "bias", bias, x.shape)
    if mask is not None:
        mask = checks.as_mask(op, "mask", mask)
        mask = checks.as_broadcast(op, "mask", mask, x.shape)
    checks.check_flag(op, "in_place", in_place)
    plan = plan_of(op, x, bias, mask, scale=scale, in_place=in_place, implementation=implementation)
    plans.record(op, (x, bias, mask), plan)
    if plan.forward.backend == "xla":
        return _reference(x, bias, mask, op, scale)
    return _kernels_jit(*transforms.vary_alike(x, bias, mask), plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `softmax`, or of `log_softmax` if `log`."""

    log: bool
    scale: float | None
    in_place: bool


def plan_of(
    op: str, x: Array, bias: Array | None, mask: Array | None, *, scale: float | None, in_place: bool,
    implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backend and configurations for arrays of these shapes and dtypes."""
    plan = functools.partial(Plan, log=op == "log_softmax", scale=scale, in_place=in_place)
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x, bias, mask)})
    if choice.name == "xla" or x.size == 0:
        return plan(why=choice.why)
    sizes = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize, dispatch.device()
    return plan(
        forward=Pass("triton", tuning.softmax(*sizes)),
        backward=Pass("triton", tuning.softmax_backward(*sizes)),
        interpret=choice.interpret,
        why=choice.why,
    )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _reference(x, bias, mask, op, scale):
    return getattr(reference, op)(x, scale=scale, bias=bias, mask=mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _kernels(x, bias, mask, plan):
    return _forward(plan, False, x, bias, mask)[0]


def _forward(plan, save, x, bias, mask):
    return triton.forward(
        x, bias, mask, log=plan.log, scale=plan.scale, in_place=plan.in_place, config=plan.forward.config,
        interpret=plan.interpret, save=save,
    )  # fmt: skip


def _fwd(x, bias, mask, plan):
    plan = dataclasses.replace(plan, in_place=False)
    if not plan.log or x.shape[-1] <= plan.backward.config.block_width:  # the backward pass reads the row only once
        return _kernels(x, bias, mask, plan), (x, bias, mask, None)

    def plain(x, bias, mask):
        return [_plain(plan)(x, bias, mask=mask)]

    run = transforms.with_plain_gradient(functools.partial(_forward, plan, True), plain, saves=1)
    y, saved = run(x, bias, mask)
    return y, (x, bias, mask, saved)


def _bwd(plan, saved, dy):
    def kernel(dy, x, bias, mask, saved):
        return triton.backward(
            dy, x, bias, mask, saved, log=plan.log, scale=plan.scale, config=plan.backward.config,
            interpret=plan.interpret,
        )  # fmt: skip

    def plain(dy, x, bias, mask, saved):
        return jax.vjp(functools.partial(_plain(plan), mask=mask), x, bias)[1](dy)

    return *transforms.with_plain_gradient(kernel, plain)(dy, *saved), None


def _plain(plan):
    return functools.partial(_reference, op="log_softmax" if plan.log else "softmax", scale=plan.scale)


_kernels.defvjp(_fwd, _bwd)
_kernels_jit = jax.jit(_kernels, static_argnums=3)
