"""Gated activation: the op `gated_activation`, activation(gate) * other of the halves of x + bias."""

import dataclasses
import math

from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.triton import gated_activation as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import rows as tuning


@sharding.over_explicit_axes("x: ... D, bias: D -> ... H")
def gated_activation(
    x: Array,
    bias: Array | None = None,
    *,
    activation: str = "gelu",
    gate: str = "first",
    implementation: str | None = None,
) -> Array:
    """Adds a bias, applies an activation to one half and multiplies by the other half, in one pass over memory.

    Equivalent to::

        first, second = jnp.split(x + bias, 2, axis=-1)
        jax.nn.gelu(first, approximate=False) * second  # activation="gelu", gate="first": GeGLU

    Args:
      x: `[..., 2 * F]`, float32, float16 or bfloat16: the result of one matmul for both halves. Sum, activation and
        product are computed in float32.
      bias: `[2 * F]` of any float dtype, or None.
      activation: "gelu" (with the error function: GeGLU), "gelu_tanh", "silu" (SwiGLU), "relu" (ReGLU) or "tanh".
      gate: the half to which the activation is applied, "first" or "second".
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      `[..., F]` of the dtype of `x`.

    Gradients: for x and bias, in one pass. They are computed from x and bias again, not from stored results.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    op = "gated_activation"
    x = checks.as_rows(op, x)
    if x.shape[-1] % 2:
        raise ValueError(f"{op}: the last axis of x must have two halves, got {x.shape}")
    bias = checks.as_vector(op, "bias", bias, x.shape[-1])
    checks.check_activation(op, activation)
    checks.check_gate(op, gate)
    plan = plan_of(op, x, bias, activation=activation, gate=gate, implementation=implementation)
    plans.record(op, (x, bias), plan)
    if plan.forward.backend == "xla":
        return _reference(plan, x, bias)
    return _kernels(plan, *transforms.vary_alike(x, bias))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `gated_activation`."""

    activation: str
    gate: str


def plan_of(
    op: str, x: Array, bias: Array | None, *, activation: str, gate: str, implementation: str | None
) -> Plan:  # fmt: skip
    """Chooses backend and configurations for arrays of these shapes and dtypes."""
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x, bias=bias)})
    if choice.name == "xla" or x.size == 0:
        return Plan(activation=activation, gate=gate, why=choice.why)
    sizes = math.prod(x.shape[:-1]), x.shape[-1] // 2, x.dtype.itemsize, dispatch.device()
    kernels = plans.by_triton(choice, tuning.gated_activation(*sizes), tuning.gated_activation_backward(*sizes))
    return Plan(**kernels, activation=activation, gate=gate)


def _plain(plan, x, bias):
    return reference.gated_activation(x, bias, activation=plan.activation, gate=plan.gate)


def _forward(plan, save, x, bias):
    y = triton.forward(
        x.reshape(-1, x.shape[-1]), bias, activation=plan.activation, gate=plan.gate, config=plan.forward.config,
        interpret=plan.interpret,
    ).reshape(*x.shape[:-1], -1)  # fmt: skip
    return (y, None) if save else y


def _backward(plan, dtypes, dy, saved, x, bias):
    dx, d_bias = triton.backward(
        dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), bias, activation=plan.activation, gate=plan.gate,
        dtypes=dtypes, config=plan.backward.config, interpret=plan.interpret,
    )  # fmt: skip
    return dx.reshape(x.shape), d_bias


def _rule(plan, *arrays):
    return Rule("gated_activation", "... D, D", "... H"), ""


_reference, _kernels = transforms.implementations(_forward, _backward, _plain, gradients=2, rule=_rule)
