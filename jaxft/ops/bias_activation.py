"""Bias and activation: the op `bias_activation`, activation(x + bias)."""

import dataclasses
import math

from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.triton import bias_activation as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import rows as tuning


@sharding.over_explicit_axes("x: ... d, bias: d -> ... d")
def bias_activation(
    x: Array,
    bias: Array | None,
    *,
    activation: str = "gelu",
    in_place: bool = False,
    implementation: str | None = None,
) -> Array:
    """Adds a bias and applies an activation, in one pass over memory.

    Equivalent to::

        jax.nn.gelu(x + bias, approximate=False)  # activation="gelu"

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. The sum and the activation are computed in float32.
      bias: `[D]` of any float dtype, or None.
      activation: "gelu" (BERT's, with the error function), "gelu_tanh" (FasterTransformer's), "relu", "silu" or "tanh".
      in_place: whether the kernel writes the result into the memory of `x` (see `jaxft.ops`).
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Gradients: for x and bias, in one pass. They are computed from x and bias again, not from stored results.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Accuracy: the kernel's float32 GELU is within 2 ulp. For 16-bit results, the GELU has a relative error of at most
    3e-4 before it is rounded.

    Source: `add_bias_act` of FasterTransformer v1.0.
    """
    op = "bias_activation"
    x = checks.as_rows(op, x)
    bias = checks.as_vector(op, "bias", bias, x.shape[-1])
    checks.check_activation(op, activation)
    checks.check_flag(op, "in_place", in_place)
    plan = plan_of(op, x, bias, activation=activation, in_place=in_place, implementation=implementation)
    plans.record(op, (x, bias), plan)
    if plan.forward.backend == "xla":
        return _reference(plan, x, bias)
    return _kernels(plan, x, bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `bias_activation`."""

    activation: str
    in_place: bool


def plan_of(
    op: str, x: Array, bias: Array | None, *, activation: str, in_place: bool, implementation: str | None
) -> Plan:
    """Chooses backend and configurations for arrays of these shapes and dtypes."""
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x, bias=bias)})
    if choice.name == "xla" or x.size == 0:
        return Plan(activation=activation, in_place=in_place, why=choice.why)
    sizes = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize, dispatch.device()
    kernels = plans.by_triton(choice, tuning.bias_activation(*sizes), tuning.bias_activation_backward(*sizes))
    return Plan(**kernels, activation=activation, in_place=in_place)


def _plain(plan, x, bias):
    return reference.bias_activation(x, bias, activation=plan.activation)


def _forward(plan, save, x, bias):
    y = triton.forward(
        x.reshape(-1, x.shape[-1]), bias, activation=plan.activation, config=plan.forward.config,
        in_place=plan.in_place and not save, interpret=plan.interpret,
    ).reshape(x.shape)  # fmt: skip
    return (y, None) if save else y


def _backward(plan, dtypes, dy, saved, x, bias):
    dx, d_bias = triton.backward(
        dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), bias, activation=plan.activation, dtypes=dtypes,
        config=plan.backward.config, interpret=plan.interpret,
    )  # fmt: skip
    return dx.reshape(x.shape), d_bias


def _rule(plan, *arrays):
    return Rule("bias_activation", "... d, d", "... d"), ""


_reference, _kernels = transforms.implementations(_forward, _backward, _plain, gradients=2, rule=_rule)
