"""Rotary positions: the op `rotary`."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxft import dispatch, reference
from jaxft.kernels.triton import rotary as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import layouts as tuning


def _axes(given: dict[str, Any]) -> str:
    """Returns the axes of a call (see `sharding.over_explicit_axes`)."""
    if isinstance(given["qkv"], tuple | list):
        return "qkv: ... n H | ... k H, positions: ... -> ... n H, ... k H"
    return "qkv: ... C n H, positions: ... -> ... C n H"


@sharding.over_explicit_axes(_axes)
def rotary(
    qkv: Any,
    positions: Array,
    theta: float = 10000.0,
    *,
    frequency_scale: float = 1.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    in_place: bool = False,
    implementation: str | None = None,
) -> Any:
    """Rotates queries and keys by their positions (RoPE), in one pass over memory.

    Equivalent, for the queries and keys `x`, to::

        angles = positions[..., None, None] * frequency_scale * theta ** (-jnp.arange(0, H, 2) / H)
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    Args:
      qkv: packed queries, keys and values, `[..., 3, N, H]`, float32, float16 or bfloat16, or a pair (query, key) of
        arrays `[..., N, H]` and `[..., K, H]`. H is even. The leading axes are the axes of the tokens, for example
        `[B, T]` or, for packed sequences, `[M]`. The values are not changed. The rotation is computed in float32.
      positions: integers that broadcast to the tokens, for example `[T]`, `[B, T]` or `[M]`. The angles are float32.
      theta: base of the frequencies, a positive Python number.
      frequency_scale: factor of all frequencies, a positive Python number. Linear scaling by a factor f is `1 / f`. The
        NTK scaling of GTE by f is `f ** (-2 / H)` with `theta` multiplied by f.
      rotary_dim: the rotated elements of a head: None or H. Partial rotation is not supported.
      interleaved: False. Pairs are `(i, i + H // 2)`. Pairs `(2 * i, 2 * i + 1)` are not supported.
      in_place: whether the kernel writes the result into the memory of `qkv`, and the gradient into the memory of the
        result's gradient (see `jaxft.ops`). The values are then neither read nor written.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      An array of the shape and dtype of `qkv`, or a pair of arrays.

    Raises:
      NotImplementedError: the rotation is partial or interleaved. See `jaxft.ops` for the other errors.

    Gradients: for qkv, or query and key. The gradient is the rotation by minus the angle, by the same kernel.

    Determinism: the result and the gradients are deterministic.

    Source: Su et al., "RoFormer", 2021, with the halves of a head as pairs, as in GPT-NeoX.
    """
    op = "rotary"
    positions = checks.as_integers(op, "positions", positions)
    checks.check_flag(op, "interleaved", interleaved)
    checks.check_flag(op, "in_place", in_place)
    if interleaved:
        raise NotImplementedError(f"{op}: interleaved must be False (pairs of neighbours are unsupported), got True")
    options: dict[str, Any] = {
        "theta": checks.check_number(op, "theta", theta, positive=True),
        "frequency_scale": checks.check_number(op, "frequency_scale", frequency_scale, positive=True),
        "in_place": bool(in_place),
    }

    def rotated(name, x):
        x, at = _check(op, name, x, positions, rotary_dim)
        plan = plan_of(op, name, x, at, **options, implementation=implementation)
        plans.record(op, (x, at), plan)
        return run(x, at, plan)

    if not isinstance(qkv, tuple | list):
        return rotated("qkv", qkv)
    if len(qkv) != 2:
        raise ValueError(f"{op}: qkv must be an array or a pair (query, key), got {len(qkv)} arrays")
    return tuple(rotated(name, x) for name, x in zip(("query", "key"), qkv, strict=True))


_AXES = {True: ("3", "N", "H"), False: ("N", "H")}  # last axes of packed and of separate arrays


def _check(op, name, x, positions, rotary_dim):
    """Checks one array, and returns it with positions of the rank of its tokens."""
    x, axes = checks.as_float(op, name, x), _AXES[name == "qkv"]
    if x.ndim < len(axes) or (name == "qkv" and x.shape[-3] != 3):
        raise ValueError(f"{op}: {name} must have shape [..., {', '.join(axes)}], got {x.shape}")
    size = x.shape[-1]
    if not isinstance(size, int) or size % 2:
        raise ValueError(f"{op}: the head size of {name} must be an even number, got {size}")
    if rotary_dim is not None and rotary_dim != size:
        raise NotImplementedError(
            f"{op}: rotary_dim must be None or the head size, {size} (not a part of a head), got {rotary_dim}"
        )
    return x, checks.as_broadcast(op, "positions", positions, x.shape[: x.ndim - len(axes)])


def periodic(positions: Array, tokens: tuple[int, ...]) -> Array:
    """Returns positions `[P]` of which row m of the flattened tokens has number m % P."""
    first = next((i for i, size in enumerate(positions.shape) if size != 1), positions.ndim)
    if positions.shape[first:] != tokens[first:]:
        positions = jnp.broadcast_to(positions, tokens)
    return positions.reshape(-1)


def axis_of_positions(x: Array, positions: Array) -> tuple[str, Any]:
    """Returns the name of the axis of positions `[P]` in a `Rule` whose rows are m, and the rule's `legal`."""
    # Row m has position m % P: a shard of some rows must begin with position 0, or have positions of its own.
    period, ndim = positions.shape[0], x.ndim
    return ("m", None) if period == x.shape[0] else ("P", lambda shapes: shapes[0][-ndim] % period == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of the rotation of one array: packed queries, keys and values, or queries or keys."""

    theta: float
    frequency_scale: float
    in_place: bool
    is_packed: bool
    inverse: bool = False


def plan_of(
    op: str, name: str, x: Array, positions: Array, *, theta: float, frequency_scale: float, in_place: bool,
    implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backend and configurations for an array of this shape and dtype."""
    plan = functools.partial(
        Plan, theta=theta, frequency_scale=frequency_scale, in_place=in_place, is_packed=name == "qkv"
    )
    choice = dispatch.choose(op, implementation, {"triton": triton.unsupported(x, positions, name)})
    if choice.name == "xla" or x.size == 0:
        return plan(why=choice.why)
    *tokens, heads, size = x.shape
    if name == "qkv":
        parts = tokens.pop()
        heads *= parts if not in_place else parts - 1
    config = tuning.rotary(math.prod(tokens), heads, size, x.dtype.itemsize, dispatch.device())
    return plan(**plans.by_triton(choice, config, config))


def run(x: Array, positions: Array, plan: Plan) -> Array:
    """Rotates one array. The positions have the rank of its tokens."""
    if plan.forward.backend == "xla":
        return _reference(plan, x, positions)
    tokens = x.shape[: x.ndim - len(_AXES[plan.is_packed])]
    flat = x.reshape(math.prod(tokens), *x.shape[len(tokens) :])
    return _rotate_jit(*transforms.vary_alike(flat, periodic(positions, tokens)), plan).reshape(x.shape)


def rotate_back(x: Array, positions: Array, plan: Plan) -> Array:
    """Rotates `[M, N, H]` or `[M, 3, N, H]` by minus the angle. Row m has position `positions[m % len(positions)]`."""
    return _rotate(x, positions, dataclasses.replace(plan, inverse=not plan.inverse))


@functools.partial(jax.jit, static_argnums=0)
def _reference(plan, x, positions):
    run = functools.partial(reference.rotary, positions=positions, theta=plan.theta)
    if plan.is_packed:
        return run(x, frequency_scale=plan.frequency_scale)
    return run((x,), frequency_scale=plan.frequency_scale)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rotate(x, positions, plan):
    """Rotates x `[M, N, H]`, or the first two of the three parts of x `[M, 3, N, H]`."""
    frequencies = jnp.asarray(reference.rotary_frequencies(x.shape[-1], plan.theta, plan.frequency_scale, jnp.float32))

    def kernel(_, x, positions, frequencies):
        heads = math.prod(x.shape[1:-1])
        return triton.rotate(
            x.reshape(x.shape[0], heads, -1), positions, frequencies,
            rotated=heads - heads // 3 if plan.is_packed else heads, inverse=plan.inverse, in_place=plan.in_place,
            config=plan.forward.config, interpret=plan.interpret,
        ).reshape(x.shape)  # fmt: skip

    def plain(x, positions, _):
        at = jnp.broadcast_to(positions, (x.shape[0] // positions.shape[0], positions.shape[0])).reshape(-1)
        sign = jnp.where(plan.inverse, -1, 1)
        return _reference(plan, x, at * sign)

    own, legal = axis_of_positions(x, positions)
    names = "m 3 n H" if plan.is_packed else "m n H"
    rule = Rule("rotary", f"{names}, {own}, F", names, legal)
    return transforms.mappable(kernel, plain, plan, rule)(*transforms.vary_alike(x, positions, frequencies))


def _fwd(x, positions, plan):
    return _rotate(x, positions, plan), positions


def _bwd(plan, positions, dy):
    return rotate_back(dy, positions, plan), None


_rotate.defvjp(_fwd, _bwd)
_rotate_jit = jax.jit(_rotate, static_argnums=2)
