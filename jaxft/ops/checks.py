"""Argument checks of the public functions. A message names the op, the argument, what was expected and what it got."""

import functools
import math
import numbers
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxft import reference


def as_array(op: str, name: str, x: Any) -> Array:
    """Returns `x` as a JAX array. Raises if `x` has no dtype or shape, or an integer that JAX's dtype does not hold."""
    _check_array(op, name, x)
    array = jnp.asarray(x)
    if array.dtype != x.dtype and jnp.issubdtype(array.dtype, jnp.integer):  # without x64, JAX drops half of the bits
        check_fits(op, name, x, array.dtype)
    return array


def _check_array(op: str, name: str, x: Any) -> None:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}")


def as_float(op: str, name: str, x: Any) -> Array:
    """Returns `x` as a JAX array. Raises a TypeError unless it has a float dtype."""
    x = as_array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{op}: {name} must be an array of floats, got {x.dtype}")
    return x


def as_rows(op: str, x: Any) -> Array:
    """Returns the argument `x` as a JAX array. Raises unless it has a float dtype and a last axis."""
    x = as_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    return x


def as_integers(op: str, name: str, x: Any, *, saturate: bool = False) -> Array:
    """Converts an integer array to int32.

    A concrete value that does not fit raises a ValueError, unless `saturate`. Otherwise a value that does not fit
    becomes the nearest one that does.
    """
    _check_array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be an array of integers, got {x.dtype}")
    if may_wrap(x):
        if not saturate:
            check_fits(op, name, x, jnp.int32)
        # NumPy clips an array of NumPy, because JAX would let its numbers wrap around.
        x = x.clip(max(jnp.iinfo(x.dtype).min, -(2**31)), 2**31 - 1)
    return jnp.asarray(x, jnp.int32)


def may_wrap(x: Any) -> bool:
    """Returns whether int32 does not hold all values of the dtype of the integers `x`."""
    return jnp.issubdtype(x.dtype, jnp.integer) and bool(jnp.iinfo(x.dtype).max > 2**31 - 1)


def check_fits(op: str, name: str, x: Any, dtype: Any) -> None:
    """Raises a ValueError if a value of the integers `x` does not fit `dtype`. Traced values are not checked."""
    if isinstance(x, jax.core.Tracer) or not x.size:
        return
    limits = jnp.iinfo(dtype)
    for extreme in (int(x.min()), int(x.max())):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(f"{op}: {name} must fit {jnp.dtype(dtype)}, got {extreme}")


def check_cu_seqlens(op: str, given: Any, rows: int, max_seqlen: int) -> None:
    """Raises a ValueError unless packed sequences, if not traced, lie within the rows and fit into `max_seqlen`."""
    if isinstance(given, jax.core.Tracer):
        return
    ends = np.asarray(given).astype(np.int64)
    lengths = np.diff(ends)
    if ends[0] != 0 or (lengths < 0).any():
        raise ValueError(f"{op}: cu_seqlens must ascend from 0, got {ends.tolist()!s:.100}")
    if exceeds(ends[-1], rows):
        raise ValueError(f"{op}: cu_seqlens must not go beyond the {rows} rows, got {ends[-1]}")
    if exceeds(lengths.max(initial=0), max_seqlen):
        raise ValueError(f"{op}: max_seqlen must not be below the longest sequence's {lengths.max()}, got {max_seqlen}")


def as_vector(op: str, name: str, x: Any, width: int) -> Array | None:
    """Checks an optional parameter: None, or `[width]` of any float dtype."""
    if x is None:
        return None
    x = as_float(op, name, x)
    check_shape(op, name, x, (width,))
    return x


def as_vectors(op: str, width: int, **vectors: Any) -> list[Array | None]:
    """Checks several optional parameters by name, see `as_vector`."""
    return [as_vector(op, name, x, width) for name, x in vectors.items()]


def as_term(op: str, name: str, x: Any, shape: tuple[int, ...], other: Array) -> Array:
    """Checks an array of this shape and of the dtype of the argument x, `other`."""
    x = as_float(op, name, x)
    check_shape(op, name, x, shape)
    check_same_dtype(op, name, x, "x", other)
    return x


def as_factors(
    op: str, x: Any, kernel: Any, name: str = "kernel", with_parts: bool = False
) -> tuple[Array, Array]:  # fmt: skip
    """Checks the factors of the matmul of a dense layer: x `[..., K]` and kernel `[K, F]` of the same dtype.

    If `with_parts`, the kernel may be `[K, P, F]` as well.
    """
    x, kernel = as_float(op, "x", x), as_float(op, name, kernel)
    has_columns = kernel.ndim == 2 or (with_parts and kernel.ndim == 3)
    if x.ndim == 0 or not has_columns or kernel.shape[0] != x.shape[-1]:
        raise ValueError(f"{op}: x and {name} must have shapes [..., K] and [K, F], got {x.shape} and {kernel.shape}")
    check_same_dtype(op, name, kernel, "x", x)
    return x, kernel


def as_mask(op: str, name: str, x: Any, true: str = "attend") -> Array:
    """Returns a mask as a JAX array. Raises a TypeError, which says what True means, unless the mask is boolean."""
    x = as_array(op, name, x)
    if x.dtype != jnp.bool_:
        added = true == "attend" and jnp.issubdtype(x.dtype, jnp.floating)
        hint = "one that is added to the logits is a bias" if added else f"write {name} != 0"
        raise TypeError(f"{op}: {name} must be boolean (True = {true}), got {x.dtype}; {hint}")
    return x


def check_shape(op: str, name: str, x: Array, expected: tuple[int, ...]) -> None:
    """Raises a ValueError unless `x` has the expected shape."""
    if x.shape != expected:
        raise ValueError(f"{op}: {name} must have shape {expected}, got {x.shape}")


def check_same_dtype(op: str, name: str, x: Array, other_name: str, other: Array) -> None:
    """Raises a TypeError unless `x` has the dtype of `other`."""
    if x.dtype != other.dtype:
        raise TypeError(f"{op}: {name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}")


def as_broadcast(op: str, name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """Returns `x` with axes of size 1 in front up to the rank of `shape`. Raises a ValueError unless it broadcasts."""
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{op}: {name} must broadcast to {shape}, got shape {x.shape}")
    return x.reshape((1,) * (len(shape) - x.ndim) + x.shape)


def check_number(op: str, name: str, value: Any, *, positive: bool = False) -> float:
    """Converts a finite Python or NumPy number to a float. It is static: it becomes part of the compiled kernel."""
    if not is_number(value):
        raise TypeError(f"{op}: {name} must be a Python number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{op}: {name} must be finite, got {value}")
    if positive and not number > 0:
        raise ValueError(f"{op}: {name} must be positive, got {value}")
    return number


def is_number(value: Any) -> bool:
    """Returns whether `value` is a real number of Python or NumPy and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_natural(value: Any) -> bool:
    """Returns whether `value` is an integer >= 0 of Python or NumPy and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def as_size(op: str, name: str, value: Any, *, positive: bool = False) -> Any:
    """Returns a size as a Python integer, whose products do not wrap around. A symbolic size of `jax.export` stays."""
    if jax.export.is_symbolic_dim(value):
        return value
    if not is_natural(value) or (positive and value == 0):
        expected = "a positive Python integer" if positive else "a Python integer >= 0"
        raise ValueError(f"{op}: {name} must be {expected}, got {value!r}")
    if value >= 2**31:
        raise ValueError(f"{op}: {name} must be below 2^31, got {value}")
    return int(value)


def exceeds(size: Any, limit: Any) -> bool:
    """Returns whether a size is above a limit. A symbolic size that may be is taken not to be."""
    try:
        return bool(size > limit)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def check_activation(op: str, activation: Any, *, optional: bool = False) -> None:
    """Raises a ValueError unless `activation` is the name of one, or None if `optional`."""
    known = tuple(reference.ACTIVATIONS)
    if not (optional and activation is None) and not (isinstance(activation, str) and activation in known):
        raise ValueError(f"{op}: activation must be {'None or ' * optional}one of {known}, got {activation!r}")


def check_gate(op: str, gate: Any, *, optional: bool = False) -> None:
    """Raises a ValueError unless `gate` names a half, or is None if `optional`."""
    if not (optional and gate is None) and not (isinstance(gate, str) and gate in ("first", "second")):
        raise ValueError(f"{op}: gate must be {'None, ' * optional}'first' or 'second', got {gate!r}")


def gated_width(op: str, gate: Any, kernel: Array, name: str = "kernel") -> int:
    """Checks an optional gate of a dense layer, and returns how many columns the result of the layer has."""
    check_gate(op, gate, optional=True)
    width = kernel.shape[1]
    if gate is not None and width % 2:
        raise ValueError(f"{op}: with a gate, the columns of {name} must have two halves, got {kernel.shape}")
    return width if gate is None else width // 2


def check_flag(op: str, name: str, value: Any) -> None:
    """Raises a TypeError unless `value` is a bool of Python or NumPy. It is static."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be True or False, got {type(value).__name__}")


def check_dropout(op: str, rate: Any, rng: Array | None) -> float:
    """Checks rate and key of dropout, and returns the rate. The key is required if the rate is not 0."""
    rate = check_number(op, "dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{op}: dropout_rate must be in [0, 1), got {rate}")
    if rate > 0.0 and rng is None:
        raise ValueError(f"{op}: dropout_rate is {rate}, so dropout_rng must be a JAX random key, got None")
    if rng is not None:
        check_key(op, "dropout_rng", rng)
    return rate


def check_key(op: str, name: str, key: Any, expected: str = "one JAX random key") -> None:
    """Raises a TypeError unless `key` is one JAX random key, typed or raw."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", ())
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    # A raw key must have the shape of the keys of JAX's default generator.
    raw = dtype == jnp.uint32 and shape == jax.eval_shape(jax.random.PRNGKey, 0).shape
    if not typed and not raw:
        got = type(key).__name__ if dtype is None else f"{dtype}{list(shape)}"
        raise TypeError(f"{op}: {name} must be {expected} (jax.random.key), got {got}")


def check_precision(op: str, precision: Any, dtype: Any) -> Any:
    """Checks a precision of `jnp.matmul` for arrays of `dtype`, and makes it hashable.

    None becomes JAX's present setting, which may be another one when a gradient is traced.
    """
    precision = tuple(precision) if isinstance(precision, list) else precision
    if precision is not None:
        unit = jax.ShapeDtypeStruct((1, 1), dtype)
        try:
            jax.eval_shape(functools.partial(jnp.matmul, precision=precision), unit, unit)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{op}: precision must be one that jnp.matmul takes, got {precision!r}") from error
    return jax.config.jax_default_matmul_precision if precision is None else precision  # type: ignore[attr-defined]
