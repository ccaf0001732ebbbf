"""The op `dense_rotary`: rotary positions of x @ kernel + bias, packed queries, keys and values."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import dense as triton_dense
from jaxft.kernels.triton import rotary as triton_rotary
from jaxft.ops import checks, dense, matrix_view, plans, rotary, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import dense as tuning


@sharding.over_explicit_axes("x: ... K, kernel: K F, bias: F, positions: ... -> ... 3 N H")
def dense_rotary(
    x: Array,
    kernel: Array,
    bias: Array | None,
    positions: Array,
    theta: float = 10000.0,
    *,
    num_heads: int,
    frequency_scale: float = 1.0,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Array:
    """Projects to packed queries, keys and values, and rotates queries and keys by their positions (RoPE).

    Equivalent to::

        qkv = dense(x, kernel, bias).reshape(*x.shape[:-1], 3, num_heads, -1)
        rotary(qkv, positions, theta, frequency_scale=frequency_scale)

    On Hopper, with float16 or bfloat16, heads of 64 and many rows, the matmul rotates in its epilogue. Elsewhere the op
    runs as these two ops.

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. The matmul accumulates in float32.
      kernel: `[D, 3 * N * H]` of the dtype of `x`. H is even.
      bias: `[3 * N * H]` of any float dtype, or None.
      positions: integers that broadcast to the leading axes of `x`. The angles are float32.
      theta: base of the frequencies, a positive Python number.
      num_heads: N, a Python integer.
      frequency_scale: factor of all frequencies, a positive Python number (see `rotary`).
      precision: precision of the matmul, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.
      implementation: None picks the fastest (see `jaxft.ops`). `"mosaic_gpu"` (Hopper only) is the matmul that rotates;
        `"triton"` and `"xla"` are passed to the two ops.

    Returns:
      `[..., 3, N, H]` of the dtype of `x`.

    Gradients: for x, kernel and bias. The gradient of the result is rotated by minus the angle.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Accuracy: `"mosaic_gpu"` rotates the float32 sum. The two ops round the sum to the dtype of `x` first.

    Source: Su et al., "RoFormer", 2021, with the halves of a head as pairs, as in GPT-NeoX.
    """
    op = "dense_rotary"
    kernel, view = matrix_view.split(kernel)
    x, kernel = checks.as_factors(op, x, kernel)
    depth, width = kernel.shape
    bias = checks.as_vector(op, "bias", bias, width)
    num_heads = checks.as_size(op, "num_heads", num_heads, positive=True)
    if width % (6 * num_heads):
        raise ValueError(
            f"{op}: the last axis of kernel must be a multiple of 6 * num_heads = {6 * num_heads} (queries, keys and "
            f"values with an even head size), got {kernel.shape}"
        )
    tokens = x.shape[:-1]
    positions = checks.as_broadcast(op, "positions", checks.as_integers(op, "positions", positions), tokens)
    options: dict[str, Any] = {
        "theta": checks.check_number(op, "theta", theta, positive=True),
        "frequency_scale": checks.check_number(op, "frequency_scale", frequency_scale, positive=True),
        "precision": checks.check_precision(op, precision, x.dtype),
    }
    arrays = x.reshape(math.prod(tokens), depth), kernel, bias
    shape = *tokens, 3, num_heads, width // (3 * num_heads)
    plan = plan_of(op, *arrays, positions, shape, **options, implementation=implementation)
    plans.record(op, (*arrays, positions), plan)
    # So that devices may divide the heads.
    parts = kernel.reshape(depth, 3, width // 3), None if bias is None else bias.reshape(3, width // 3)
    if plan.forward.backend == "ops":
        matmul, rotation = plan.forward.config
        parts = parts if view is None else (kernel, bias)  # devices do not divide a view
        return rotary.run(dense.run(x, *parts, None, matmul, view).reshape(shape), positions, rotation)
    return _result_jit(arrays[0], *parts, rotary.periodic(positions, tokens), plan).reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `dense_rotary`. A pass by "ops" has the plans of `dense` and `rotary`."""

    num_heads: int
    precision: Any


def plan_of(
    op: str, x: Array, kernel: Array, bias: Array | None, positions: Array, shape: tuple[int, ...], *, theta: float,
    frequency_scale: float, precision: Any, implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backends and configurations for arrays of these shapes and dtypes. `shape` is the shape of the result."""
    kernel_precision, device = dispatch.matmul_precision(precision), dispatch.device()
    qkv: Any = jax.eval_shape(lambda x, kernel: jnp.matmul(x, kernel).reshape(shape), x, kernel)
    reason = triton_dense.unsupported(x=x, kernel=kernel, bias=bias)
    reason = reason or triton_rotary.unsupported(qkv, positions, "x @ kernel")
    fused_reason = reason or support.dense_unsupported(x, kernel, bias, None, kernel_precision, head_size=shape[-1])
    choice = dispatch.choose(op, implementation, {"mosaic_gpu": fused_reason, "triton": reason})
    of_ops = "xla" if choice.name == "xla" else None if implementation == "mosaic_gpu" else implementation
    two_ops = Pass("ops", (
        dense.plan_of(op, x, kernel, bias, None, None, precision, of_ops),
        rotary.plan_of(op, "qkv", qkv, positions, theta=theta, frequency_scale=frequency_scale, in_place=True,
                       implementation=of_ops),
    ))  # fmt: skip
    forward, why = two_ops, choice.why
    sizes = x.shape[0], x.shape[1], kernel.shape[1]
    if choice.name == "mosaic_gpu":
        if implementation is not None or tuning.epilogue_is_faster(*sizes, x.dtype.itemsize, device):
            config = tuning.dense_mosaic(*sizes, None, x.dtype.itemsize, device, rotary=True)
            forward = Pass("mosaic_gpu", config)
        else:
            why = "mosaic_gpu: slower at this size"
    return Plan(
        forward=forward, backward=two_ops, num_heads=shape[-2], precision=precision,
        **plans.of_choice(choice) | {"why": why},
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=4)
def _result_jit(x, kernel, bias, positions, plan):
    carriers = dense.product_carrier(x, kernel, plan), *transforms.wide_carriers(bias)
    *arrays, of_product, of_bias = transforms.vary_alike(x, kernel, bias, positions, *carriers)
    return _result(*arrays, (of_product, of_bias), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _result(x, kernel, bias, positions, carriers, plan):
    """Computes the rotated projection `[M, 3, N * H]`. Row m has the position `positions[m % len(positions)]`."""
    del carriers
    rotation = plan.backward.config[1]
    options = {"theta": rotation.theta, "frequency_scale": rotation.frequency_scale}

    def plain(x, kernel, bias, positions):
        y = reference.dense_rotary(
            x.reshape(-1, *positions.shape, x.shape[1]), kernel, bias, positions, **options, num_heads=plan.num_heads,
            precision=plan.precision,
        )  # fmt: skip
        return y.reshape(x.shape[0], *kernel.shape[1:])

    size = kernel.shape[2] // plan.num_heads

    def fused(_, x, kernel, bias, positions):
        from jaxft.kernels.mosaic_gpu import dense as mosaic

        if positions.size % support.PIECE:
            positions = jnp.tile(positions, x.shape[0] // positions.size)
        frequencies = reference.rotary_frequencies(size, rotation.theta, rotation.frequency_scale, jnp.float32)
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
        angles = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)
        matrix = kernel.reshape(kernel.shape[0], -1), None if bias is None else bias.reshape(-1)
        (y,) = mosaic.forward(x, *matrix, activation=None, config=plan.forward.config, angles=angles)
        *_, y = transforms.vary_alike(x, *matrix, positions, y)
        return y.reshape(x.shape[0], *kernel.shape[1:])

    own, legal_positions = rotary.axis_of_positions(x, positions)

    dtype = x.dtype

    def legal(shapes):
        own = dense.matrix_of(shapes[0], 2, dtype), dense.matrix_of(shapes[1], 3, dtype, columns=True)
        if shapes[1][-1] % size or support.dense_unsupported(*own, None, head_size=size) is not None:
            return False
        return legal_positions is None or legal_positions(shapes)

    rule = Rule("dense_rotary", f"m K, K C f, C f, {own}", "m C f", legal)
    return transforms.mappable(fused, plain, plan, rule)(x, kernel, bias, positions)


def _fwd(x, kernel, bias, positions, carriers, plan):
    return _result(x, kernel, bias, positions, carriers, plan), (x, kernel, bias, positions)


def _bwd(plan, saved, d_out):
    x, kernel, bias, positions = saved
    matmul, rotation = plan.backward.config
    d_qkv = rotary.rotate_back(d_out.reshape(*d_out.shape[:2], plan.num_heads, -1), positions, rotation)
    dy, d_bias = dense.epilogue_gradient(d_qkv.reshape(d_out.shape), None, bias, x, kernel, matmul)
    return None, None, None, None, (reference.wide(dy), d_bias)


_result.defvjp(_fwd, _bwd)
