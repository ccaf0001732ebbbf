"""The one seam to Pallas' Triton backend, and the mathematics that several kernels share.

Every kernel is launched through `launch`, and every masked access goes through `load` and `store`, so that a move to
another backend (the Triton backend is deprecated in JAX since 0.11) changes this file and leaves the kernels alone.
The mathematics are pure functions of arrays.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxft import reference

Array = jax.Array

store, dot = plgpu.store, plgpu.dot
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


def load(where: Any, *, mask: Array | None = None, other: float | None = 0) -> Array:
    """What lies there, and `other` where the mask is False (None: undefined)."""
    if mask is None or other is None:
        return plgpu.load(where, mask=mask)
    return plgpu.load(where, mask=mask, other=jnp.full((), other, where.dtype))


def dot_in_short_chains(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False, precision: Any) -> Array:
    """`dot`, for products in full float32 that plain JAX computes as a matrix times a vector.

    It sums them up in a tree, and one chain of additions would lose more digits: these are up to four, of 16 products
    or more, with zeros for the others, added in a loop in which one of them at a time takes shared memory.
    """
    depth = a.shape[0 if trans_a else 1]
    chain = max(16, depth // 4)
    if depth <= chain:
        return dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=precision)
    place = lax.div(positions(0, depth), jnp.int32(chain))
    place = place[:, None] if trans_a else place[None, :]

    def add(i: Array, total: Array) -> Array:
        part = jnp.where(place == i, a, 0.0)
        return fma(dot(part, b, trans_a=trans_a, trans_b=trans_b, precision=precision), 1.0, total)

    shape = a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1]
    return lax.fori_loop(0, depth // chain, add, jnp.zeros(shape, jnp.float32))


def positions(start: Array | int, size: int) -> Array:
    """`size` indices from `start` on, in 32 bits whatever JAX's default integers are."""
    return start + jnp.arange(size, dtype=jnp.int32)


def span(start: Array | int, size: int) -> Any:
    """`size` (a power of two) indices from `start` on, possibly past the array's end: mask the access."""
    return pl.ds(jnp.int32(start), size)  # JAX checks a Python integer against the array's bounds, and refuses


class Tile(NamedTuple):
    """A block of rows and columns of an array [M, D], possibly past its edges."""

    row: Array  # the first
    column: Array
    shape: tuple[int, int]  # powers of two
    in_rows: Array | None  # [rows], which of them the array has; None: all
    in_width: Array | None  # [columns], likewise

    @property
    def rows(self) -> Array:
        return positions(self.row, self.shape[0])

    @property
    def columns(self) -> Array:
        return positions(self.column, self.shape[1])

    @property
    def place(self) -> tuple[Any, Any]:
        return span(self.row, self.shape[0]), span(self.column, self.shape[1])

    @property
    def inside(self) -> Array | None:
        """[rows, columns]; None: all."""
        if self.in_rows is None and self.in_width is None:
            return None
        rows = True if self.in_rows is None else self.in_rows[:, None]
        return jnp.broadcast_to(rows if self.in_width is None else rows & self.in_width[None, :], self.shape)

    def load(self, ref: Any) -> Array:
        """0 beyond the edges, which therefore add nothing to a sum."""
        return load(ref.at[self.place], mask=self.inside)

    def load_vector(self, ref: Any) -> Array:
        """These columns of an array [D], as float32 [1, columns]."""
        return load(ref.at[self.place[1]], mask=self.in_width).astype(jnp.float32)[None, :]

    def load_rows(self, ref: Any, numbers: Array) -> tuple[Array, Array]:
        """These columns of the rows of an array [R, D] with these numbers [rows], 0 for one that it does not have.

        And which it has, [rows, 1].
        """
        there = ((numbers >= 0) & (numbers < ref.shape[0]))[:, None]
        inside = there if self.in_width is None else there & self.in_width[None, :]
        place = jnp.broadcast_to(numbers[:, None], self.shape), jnp.broadcast_to(self.columns[None, :], self.shape)
        return load(ref.at[place], mask=jnp.broadcast_to(inside, self.shape)), there

    def store(self, ref: Any, values: Array) -> None:
        store(ref.at[self.place], values.astype(ref.dtype), mask=self.inside)


def tile(
    array: Sequence[int], row: Array | int, column: Array | int, shape: tuple[int, int], *, may_be_beyond: bool = False
) -> Tile:
    """The tile of this shape at row and column, which are multiples of it, of an array [M, D].

    It must begin within the array, but for its rows where it `may_be_beyond`.
    """
    first_row, first_column = jnp.int32(row), jnp.int32(column)
    # Without masks where none are needed: in narrow rows they would be many of the instructions.
    in_rows = positions(first_row, shape[0]) < array[0] if may_be_beyond or array[0] % shape[0] else None
    in_width = positions(first_column, shape[1]) < array[1] if array[1] % shape[1] else None
    return Tile(first_row, first_column, shape, in_rows, in_width)


def exp2(x: Array) -> Array:
    """2^x of float32 by one instruction, with an error of 2 ulp; results below 2^-126 are 0."""
    return _instruction("ex2.approx.ftz.f32", x) if not _interpreting.get() else jnp.exp2(x)


def exp(x: Array) -> Array:
    """e^x of float32; the relative error grows with |x|, so that the absolute one of x <= 0 stays below 2^-24."""
    return exp2(x * math.log2(math.e))


def reciprocal(x: Array) -> Array:
    """1 / x of float32 by one instruction, with an error of 1 ulp; results below 2^-126 are 0."""
    return _instruction("rcp.approx.ftz.f32", x) if not _interpreting.get() else 1.0 / x


def rounded_reciprocal(x: Array) -> Array:
    """1 / x of float32 to the nearest number, by about eight instructions."""
    return _instruction("rcp.rn.f32", x) if not _interpreting.get() else 1.0 / x


def _instruction(name: str, *args: Array, operands: Sequence[str] = ("$1",)) -> Array:
    # Triton's own exp2 and division take four instructions more, for numbers below 2^-126. Without them bias+GELU takes
    # 65 us instead of 76, attention 198 instead of 214 (H200, bfloat16, 16384x4096 and 64x512, 2026-11-20).
    (y,) = plgpu.elementwise_inline_asm(
        f"{name} $0, {', '.join(operands)};",
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return y


def fma(x: Array, y: Array | float, z: Array | float) -> Array:
    """x * y + z of float32 by one instruction, with one rounding; y and z broadcast to x.

    Where a kernel says x * y + z, XLA's compilation of it takes two instructions. With this one GELU of float32 takes
    167 us instead of 195, attention 1,291 instead of 1,346 (H200, 16384x4096 and 2x8192, 2026-11-21).
    """
    if _interpreting.get():
        return x * y + z
    arrays, operands = [], []
    for operand in (x, y, z):
        if isinstance(operand, float):
            operands.append(f"0f{np.float32(operand).view(np.uint32):08X}")
        else:
            arrays.append(jnp.broadcast_to(operand, x.shape))
            operands.append(f"${len(arrays)}")
    return _instruction("fma.rn.f32", *arrays, operands=operands)


def opaque(x: Array) -> Array:
    """x, of 16 bits, which no compiler knows to be the same: what was computed from x is computed from it once more."""
    if _interpreting.get():
        return x
    (y,) = plgpu.elementwise_inline_asm(
        "mov.b32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def share(programs: int, blocks: int) -> int:
    """How many programs add up the blocks, if `programs` are wanted: more additions in a row would lose digits."""
    return min(blocks, max(programs, pl.cdiv(blocks, 128)))


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


def unsupported_array(dtypes: Sequence[Any] = (), /, **arrays: Array | None) -> str | None:
    """Why the kernels cannot take these arrays, if they cannot; `dtypes` are those that they take, () for any."""
    for name, x in ((name, x) for name, x in arrays.items() if x is not None):
        if not all(isinstance(size, int) for size in x.shape):  # of jax.export
            return f"{name} has a symbolic shape, {x.shape}"
        if any(spec := jax.typeof(x).sharding.spec):
            return f"{name} is sharded over Explicit axes, {spec}; a kernel runs on each device inside of jax.shard_map"
        if dtypes and x.dtype not in dtypes:
            return f"{name} is {x.dtype}, the kernels take float32, float16 and bfloat16"
    return None


def unsupported_dtype(**arrays: Array | None) -> str | None:
    """The same of arrays that must be of floats."""
    return unsupported_array((jnp.float32, jnp.float16, jnp.bfloat16), **arrays)


def unsupported_size(x: Array) -> str | None:
    """Why the kernels cannot take x as `[rows, width]`, if they cannot.

    Pallas' offsets are 32-bit into arrays of up to 2^32 bytes and 64-bit into larger ones, so the number of elements,
    of 2 bytes or more, is free. But a position in one dimension is 32-bit, and that past the end of the last block too.
    """
    for what, length in (("rows", math.prod(x.shape[:-1])), ("columns", x.shape[-1])):
        if x.size > 0 and length > 2**30:
            return f"x has {length} {what}, the kernels take at most 2^30"
    return None


# --- Activations: float32 in, float32 out ------------------------------------------------------------------------
#
# gelu, gelu_tanh and silu are functions g with g(a) = a + g(-a), so each is computed from its value at -|x|, which is
# e^-y times something smooth; the derivatives likewise, from g'(a) = 1 - g'(-a). For results of 16 bits the hardware's
# exp2 does. For float32 it does not, nor does a y rounded to a float: e^-y would err y times as much.


def _leading(x: Array, bits: int) -> Array:
    """`x` cut to its leading bits: products of two such numbers of 12 bits are exact."""
    mask = jnp.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) & mask, jnp.float32)


def _polynomial(x: Array, *coefficients: float) -> Array:
    value = fma(x, coefficients[0], coefficients[1])
    for c in coefficients[2:]:
        value = fma(value, x, c)
    return value


def _nearest(x: Array) -> tuple[Array, Array]:
    """The integer nearest to x, |x| < 2^22, as a float and as an integer."""
    if _interpreting.get():  # XLA would simplify what follows to x
        return jnp.round(x), jnp.round(x).astype(jnp.int32)
    large = 1.5 * 2.0**23  # of which 1 is the last bit: two additions, where a conversion takes as long as eight
    total = x + large
    return total - large, jax.lax.bitcast_convert_type(total, jnp.int32) - 0x4B400000


def _exp_minus(high: Array, low: Array | float, rate: float) -> tuple[Array, Array]:
    """e^(-rate * (high + low)) as (p, scale): (1 + p) * scale * 2^-24, with an error of 2^-25 or so in p.

    `high` is at most 151.4 * ln(2) / rate, where the result is 0. The factor 2^24 keeps `scale` a normal number.
    """
    step = math.log(2.0) / rate
    unit = 2.0 ** (math.frexp(step)[1] - 15)
    coarse = round(step / unit) * unit  # of 15 bits, so that n * coarse is exact (Cody and Waite)
    n, whole = _nearest((high + low) * (1.0 / step))
    y = fma(n, -coarse, high) + fma(n, coarse - step, low)  # |y| <= step / 2
    minimax = (0.00138145599, -0.00836873556, 0.0416683899, -0.166665205, 0.499999934, -1.0)
    p = y * _polynomial(y, *(c * rate ** (6 - i) for i, c in enumerate(minimax)))
    return p, jax.lax.bitcast_convert_type((127 + 24 - whole) << 23, jnp.float32)


def _exp(p: Array, scale: Array) -> Array:
    return (1.0 + p) * (scale * 2.0**-24)


def _half_square(a: Array) -> tuple[Array, Array, float]:
    """The arguments for e^(-a^2 / 2)."""
    leading = _leading(a, 12)
    return leading * leading, (a - leading) * (a + leading), 0.5


def _tanh_form(a: Array) -> tuple[Array, Array, float]:
    """The arguments for e^-y of 1 / (1 + e^-y) = (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a^3))) / 2."""
    # y = rate * a * (a^2 + 1 / 0.044715). Of each factor the leading bits are exact, and the rest is small.
    leading = _leading(a, 10)
    rest = a - leading
    square = fma(leading, leading, 22.36383056640625)
    tail = fma(rest, a + leading, 1.0 / 0.044715 - 22.36383056640625)
    factor = _leading(square, 12)
    tail = (square - factor) + tail
    return leading * factor, fma(leading, tail, rest * (factor + tail)), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715


def _from_below(x: Array, below: Array) -> Array:
    """g(x) from g(-|x|). Minus infinity gives NaN as in plain jnp, and a NaN that a minimum has dropped comes back."""
    return jnp.where(x < 0.0, 0.0 * x, x) + below


def _gelu_erf(x: Array) -> Array:
    """Within 2 ulp: -g(-a) = a * e^(-a^2 / 2) * R(a), R(a) = (1 + h) / (2 * (1 + a)), h fitted by minimax."""
    a = jnp.minimum(jnp.abs(x), 14.468)
    p, scale = _exp_minus(*_half_square(a))
    first, second = 1.0 + a, fma(a, 0.2, 1.0)
    inverse = reciprocal(first * second)
    t = inverse * second
    h = _polynomial(
        fma(a, inverse * first, -2.0),
        4.22832175e-08, -2.3719324e-07, -1.65883813e-06, 2.95508011e-05, -0.000214032262, 0.00100260732,
        -0.00317696627, 0.00560132124, 0.0052220035, -0.0813526398, -0.0381273386,
    )  # fmt: skip
    # q + rest is a / (1 + a): with 12 bits in q the remainder of that division is exact. The factor 2^24 keeps the rest
    # of the smallest numbers.
    large = a * 2.0**24
    q, leading = _leading(large * t, 12), _leading(a, 12)
    rest = fma(q, leading - a, fma(q, -leading, large - q)) * t
    c = p + fma(h, p, h)  # 1 + c = (1 + p) * (1 + h)
    return _from_below(x, (q + fma(q, c, fma(rest, c, rest))) * scale * -(2.0**-49))


def _gelu_erf_16bit(x: Array) -> Array:
    """GELU (erf) with a relative error of 3e-4, a fraction of the rounding to 16 bits, in a third of the work.

    erfc(|x| / sqrt(2)) / 2 = exp(-x^2 / 2) * t * P(t), t = 1 / (1 + 0.49 |x|), P a minimax fit of the relative error.
    """
    t = reciprocal(fma(jnp.abs(x), 0.49, 1.0))
    p = _polynomial(t, -0.12037462, 0.25018403, 0.17322216, 0.1970786)
    half = exp2(x * x * (-0.5 * math.log2(math.e))) * (t * p)
    return x * jnp.where(x < 0.0, half, 1.0 - half)


def _inverse(e: Array) -> tuple[Array, Array]:
    """1 / (1 + e) for 0 <= e <= 1 as (t, s): t * (1 + s), where s makes up for the rounding of 1 + e and of t."""
    t = reciprocal(1.0 + e)
    return t, fma(t, -e, 1.0 - t)


def _times_sigmoid(x: Array, a: Array, p: Array, scale: Array) -> Array:
    """x / (1 + e^-y) from a = |x| and e^-|y|: -g(-a) = a * e^-y / (1 + e^-y)."""
    t, s = _inverse(_exp(p, scale))
    q = a * t
    return _from_below(x, fma(q, p + s, q) * scale * -(2.0**-24))


def _sigmoid(x: Array) -> Array:
    return reciprocal(1.0 + exp2(x * -math.log2(math.e)))


def _slope_of_times_sigmoid(e: Array, y_slope: Array) -> Array:
    """The derivative of x / (1 + e^-y) at -a, from e^-|y| and a * y'(a)."""
    t, s = _inverse(e)
    t = fma(t, s, t)
    return e * (t * fma(y_slope, -t, 1.0))


def activation(name: str, x: Array, dtype: Any) -> Array:
    """The activation of float32 `x`, as accurate as results that are rounded to `dtype` need."""
    exact = dtype == jnp.float32
    match name:
        case "gelu":
            return _gelu_erf(x) if exact else _gelu_erf_16bit(x)
        case "gelu_tanh":
            if exact:
                a = jnp.minimum(jnp.abs(x), 10.705)
                return _times_sigmoid(x, a, *_exp_minus(*_tanh_form(a)))
            linear = 2.0 * math.sqrt(2.0 / math.pi)
            return x * _sigmoid(x * fma(x * x, linear * 0.044715, linear))
        case "silu":
            if exact:
                a = jnp.minimum(jnp.abs(x), 104.66)
                return _times_sigmoid(x, a, *_exp_minus(a, 0.0, 1.0))
            return x * _sigmoid(x)
        case "relu":
            return jnp.where(x < 0.0, 0.0, x)  # Triton's maximum would turn NaN into 0
        case "tanh":
            return jnp.tanh(x)
    raise ValueError(f"no kernel has the activation {name!r}")


def activation_gradient(name: str, x: Array, dy: Array, dtype: Any) -> Array:
    """`dy` times the activation's derivative at `x`, all float32; `dtype` is that of the array that x comes from.

    The derivatives for 16 bits are as accurate as those for float32, but far in the negative tails: bias gradients may
    be float32 whatever x is.
    """
    if name == "relu":
        return jnp.where(x > 0.0, dy, 0.0)
    exact = dtype == jnp.float32
    a = jnp.abs(x)
    match name:
        case "tanh":
            a = jnp.where(a > 52.33, 52.33, a)  # a minimum that keeps NaN
            e = _exp(*_exp_minus(a, 0.0, 2.0)) if exact else exp2(a * (-2.0 * math.log2(math.e)))
            t, s = _inverse(e)
            slope = 4.0 * (t * t) * e
            return dy * fma(slope, 2.0 * s, slope)
        case "gelu":
            a = jnp.minimum(a, 14.468)
            e = _exp(*_exp_minus(*_half_square(a))) if exact else exp2(a * a * (-0.5 * math.log2(math.e)))
            # 0.7517915 is where the derivative at -a is 0; the rest is a minimax fit of the relative error.
            below = e * (0.7517915246935643 - a) * _polynomial(
                a * reciprocal(fma(a, 0.25, 1.0)),
                1.22685106e-06, -2.0015146e-05, 8.15572273e-05, 0.000636503189, -0.00934950055, 0.0533910039,
                -0.176652334, 0.665077969,
            )  # fmt: skip
        case "gelu_tanh":
            a = jnp.minimum(a, 10.705)
            linear, cubic = 2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715
            square = a * a
            if exact:
                e = _exp(*_exp_minus(*_tanh_form(a)))
            else:
                e = exp2(a * fma(square, -cubic * math.log2(math.e), -linear * math.log2(math.e)))
            below = _slope_of_times_sigmoid(e, a * fma(square, 3.0 * cubic, linear))
        case "silu":
            a = jnp.minimum(a, 104.66)
            e = _exp(*_exp_minus(a, 0.0, 1.0)) if exact else exp2(a * -math.log2(math.e))
            below = _slope_of_times_sigmoid(e, a)
        case _:
            raise ValueError(f"no kernel has the activation {name!r}")
    # Infinities give NaN as in plain jnp.
    return dy * fma(x, 0.0, jnp.where(x < 0.0, below, 1.0 - below))
