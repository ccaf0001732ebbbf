"""The one seam to Pallas' Triton backend, and the mathematics that several kernels share.

Every kernel is launched through `launch`, and every masked access goes through `load` and `store`, so that a move to
another backend (the Triton backend is deprecated in JAX since 0.11) changes this file and leaves the kernels alone.
The mathematics are pure functions of arrays.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxft import reference

Array = jax.Array

load, store, dot = plgpu.load, plgpu.store, plgpu.dot
_interpreting = contextvars.ContextVar("interpreting", default=False)  # while a kernel is traced


def launch(
    kernel: Callable[..., None],
    grid: Sequence[int],
    operands: Sequence[Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool,
) -> list[Array]:
    """Runs `kernel(*operand_refs, *output_refs)` over `grid` (the first axis fastest) and returns the outputs.

    Refs are whole arrays: a kernel computes its own offsets and masks what lies beyond an edge. An operand that is None
    has None for its ref. `aliases` maps operands to outputs (by their places) that take their memory; XLA copies an
    operand first where something else still reads it.
    """
    present = [x for x in operands if x is not None]
    place = {i: n for n, i in enumerate(i for i, x in enumerate(operands) if x is not None)}

    def body(*refs: Any) -> None:
        given = iter(refs)
        kernel(*[None if x is None else next(given) for x in operands], *given)

    body.__name__ = name
    varying = _varying(present)
    call = pl.pallas_call(
        body,
        grid=tuple(grid),
        out_shape=[jax.ShapeDtypeStruct(o.shape, o.dtype, **varying) for o in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases={place[operand]: output for operand, output in (aliases or {}).items()},
        interpret=interpret,
        name=name,
    )
    token = _interpreting.set(interpret)
    try:
        return list(call(*present))
    finally:
        _interpreting.reset(token)


def _varying(operands: Sequence[Array]) -> dict[str, Any]:
    """What JAX asks about outputs inside a shard_map: they vary over the mesh axes that any operand varies over."""
    axes = [jax.typeof(x).manual_axis_type for x in operands]
    return {"manual_axis_type": type(axes[0])(varying=frozenset().union(*(a.varying for a in axes)))}


def positions(start: Array | int, size: int) -> Array:
    """`size` indices from `start` on, in 32 bits whatever JAX's default integers are."""
    return start + jnp.arange(size, dtype=jnp.int32)


def span(start: Array | int, size: int) -> Any:
    """`size` (a power of two) indices from `start` on, possibly past the array's end: mask the access."""
    return pl.ds(jnp.int32(start), size)  # JAX checks a Python integer against the array's bounds, and refuses


def exp2(x: Array) -> Array:
    """2^x of float32 by one instruction, with an error of 2 ulp; results below 2^-126 are 0."""
    return _instruction("ex2.approx.ftz.f32", x) if not _interpreting.get() else jnp.exp2(x)


def exp(x: Array) -> Array:
    """e^x of float32; the relative error grows with |x|, so that the absolute one of x <= 0 stays below 2^-24."""
    return exp2(x * math.log2(math.e))


def reciprocal(x: Array) -> Array:
    """1 / x of float32 by one instruction, with an error of 1 ulp; results below 2^-126 are 0."""
    return _instruction("rcp.approx.ftz.f32", x) if not _interpreting.get() else 1.0 / x


def _instruction(name: str, x: Array) -> Array:
    # Triton's own exp2 and division take four instructions more, for numbers below 2^-126. Without them bias+GELU takes
    # 65 us instead of 76, attention 198 instead of 214 (H200, bfloat16, 16384x4096 and 64x512, 2026-11-20).
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    (y,) = plgpu.elementwise_inline_asm(
        f"{name} $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[out]
    )
    return y


def read_ahead(
    program: Array, programs: int, blocks: int, read: Callable[[Any], Any], work: Callable[..., Any], carry: Any = None
) -> Any:
    """carry = work(block, read(block), carry) for every so many blocks, each read while the one before is worked on.

    Blocks are numbered from 0 on; `read` must give something for numbers beyond the last.
    """
    if programs == blocks:
        return work(program, read(program), carry)

    def step(i, state):  # type: ignore[no-untyped-def]
        values, carry = state
        block = program + i * programs
        return read(block + programs), work(block, values, carry)

    count = lax.div(blocks - 1 - program, jnp.int32(programs)) + 1
    return lax.fori_loop(0, count, step, (read(program), carry))[1]


def keep(seed_ref: Any, rate: float, rows: Array, columns: Array) -> Array:
    """Whether dropout keeps the elements at these places, the same as `reference.dropout_mask` says."""
    seed0, seed1 = (load(seed_ref.at[jnp.int32(i)]) for i in range(2))
    bits = reference.keep_bits(seed0, seed1, rows.astype(jnp.uint32), columns.astype(jnp.uint32))
    return bits >= jnp.uint32(reference.keep_threshold(rate))


def unsupported_dtype(**arrays: Array | None) -> str | None:
    """Why the kernels cannot take these arrays, if they cannot."""
    for name, x in arrays.items():
        if x is not None and x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
            return f"{name} is {x.dtype}, the kernels take float32, float16 and bfloat16"
    return None


# --- Activations: float32 in, float32 out ------------------------------------------------------------------------


def _exp(x: Array) -> Array:
    """exp to float32 accuracy: the hardware's exp2 of a reduced argument (exp2 of x*log2(e) loses |x| * 2^-24)."""
    n = jnp.floor(x * math.log2(math.e) + 0.5)
    reduced = (x - n * 0.693359375) + n * 2.12194440e-4  # ln(2) in two parts (Cody and Waite)
    return jnp.exp2(reduced * math.log2(math.e)) * jnp.exp2(n)


def _erfc_of_magnitude(a: Array) -> Array:
    """erfc(a) for 0 <= a <= 14, relative error 3e-7: exp(-a^2) * t * P(t), t = 1 / (1 + a/2), P fitted by minimax."""
    t = 1.0 / (1.0 + 0.5 * a)
    p = jnp.full_like(t, -0.05944734)
    for c in (0.28640202, -0.49093923, 0.28228968, -0.029492358, 0.20388022, 0.24280754, 0.28241524, 0.2820842):
        p = p * t + c
    # a^2 in two parts, so that its rounding does not show in the exponential.
    high = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(a, jnp.uint32) & jnp.uint32(0xFFFFF000), jnp.float32
    )
    return _exp(-high * high) * _exp(-(a - high) * (a + high)) * t * p


def _gelu_erf(x: Array) -> Array:
    # Beyond 14 it is 0 in float32, and the exponential's reduced argument would grow out of range.
    half = 0.5 * _erfc_of_magnitude(jnp.minimum(jnp.abs(x) * math.sqrt(0.5), 14.0))
    return x * jnp.where(x < 0.0, half, 1.0 - half)


def _gelu_erf_16bit(x: Array) -> Array:
    """GELU (erf) with a relative error of 3e-4, a fraction of the rounding to 16 bits, in a third of the work.

    erfc(|x| / sqrt(2)) / 2 = exp(-x^2 / 2) * t * P(t), t = 1 / (1 + 0.49 |x|), P a minimax fit of the relative error.
    """
    t = reciprocal(1.0 + 0.49 * jnp.abs(x))
    p = ((-0.12037462 * t + 0.25018403) * t + 0.17322216) * t + 0.1970786
    half = exp2(x * x * (-0.5 * math.log2(math.e))) * (t * p)
    return x * jnp.where(x < 0.0, half, 1.0 - half)


def _gelu_tanh(x: Array) -> Array:
    return x * _sigmoid(x * (2.0 * math.sqrt(2.0 / math.pi) * (1.0 + 0.044715 * (x * x))))


def _sigmoid(x: Array) -> Array:
    return reciprocal(1.0 + exp2(x * -math.log2(math.e)))


def activation(name: str, x: Array, dtype: Any) -> Array:
    """The activation of float32 `x`, as accurate as results that are rounded to `dtype` need."""
    match name:
        case "gelu":
            return _gelu_erf(x) if dtype == jnp.float32 else _gelu_erf_16bit(x)
        case "gelu_tanh":
            return _gelu_tanh(x)
        case "relu":
            return jnp.where(x < 0.0, 0.0, x)  # Triton's maximum would turn NaN into 0
        case "silu":
            return x * _sigmoid(x)
        case "tanh":
            return jnp.tanh(x)
    raise ValueError(f"no kernel has the activation {name!r}")
