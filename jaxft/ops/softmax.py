"""Softmax: the ops `softmax` and `log_softmax` with scale, additive bias and boolean mask."""

import dataclasses
import functools
import math

from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.triton import softmax as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import rows as tuning


@sharding.over_explicit_axes("x: ... S, bias: ... S, mask: ... S -> ... S")
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
      in_place: whether the kernel writes the result into the memory of `x` (see `jaxft.ops`).
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      An array of the shape and dtype of `x`. Masked elements are 0, and so is a row without a True.

    Gradients: for x and bias. They are computed from x and bias, so that the result is not kept.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: FasterTransformer v1.0's `softmax_kernel` (with `scale` and `mask`); OneFlow's fused softmax.
    """
    return _run("softmax", x, scale, bias, mask, in_place, implementation)


@sharding.over_explicit_axes("x: ... S, bias: ... S, mask: ... S -> ... S")
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
      x: as for `softmax`. A row may be as wide as a vocabulary.
      scale: as for `softmax`.
      bias: as for `softmax`.
      mask: as for `softmax`.
      in_place: as for `softmax`.
      implementation: as for `softmax`.

    Returns:
      An array of the shape and dtype of `x`. Masked elements are -inf, and so is a row without a True.

    Gradients: for x and bias, 0 where `mask` is False. They are computed from x and bias, so that the result is not
    kept. For long rows, two numbers per row are kept.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: OneFlow's fused softmax, in its logarithmic form.
    """
    return _run("log_softmax", x, scale, bias, mask, in_place, implementation)


def _run(op, x, scale, bias, mask, in_place, implementation):
    x = checks.as_rows(op, x)
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
        return _reference(plan, x, bias, mask)
    return _kernels(plan, x, bias, mask)


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
    return plan(**plans.by_triton(choice, tuning.softmax(*sizes), tuning.softmax_backward(*sizes)))


def _plain(plan, x, bias, mask):
    op = reference.log_softmax if plan.log else reference.softmax
    return op(x, scale=plan.scale, bias=bias, mask=mask)


def _forward(plan, save, x, bias, mask):
    saves = save and plan.log and x.shape[-1] > plan.backward.config.block_width  # else `backward` reads the row once
    y, *saved = triton.forward(
        x, bias, mask, log=plan.log, scale=plan.scale, in_place=plan.in_place and not save, config=plan.forward.config,
        interpret=plan.interpret, save=saves,
    )  # fmt: skip
    return (y, saved[0].reshape(2, *x.shape[:-1]) if saves else None) if save else y


def _backward(plan, dtypes, dy, saved, x, bias, mask):
    numbers = None if saved is None else saved.reshape(2, -1)
    return triton.backward(
        dy, x, bias, mask, numbers, log=plan.log, scale=plan.scale, dtypes=dtypes, config=plan.backward.config,
        interpret=plan.interpret,
    )  # fmt: skip


def _rule(plan, *arrays):
    return Rule("log_softmax" if plan.log else "softmax", "... S, ... S, ... S", "... S"), "2 ..."


_reference, _kernels = transforms.implementations(_forward, _backward, _plain, gradients=2, rule=_rule)
