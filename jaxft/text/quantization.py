"""Quantization of embeddings to fewer bits, with the numbers of sentence-transformers."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# NumPy dtype of the result of each precision.
PRECISIONS: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "uint8": np.uint8,
    "binary": np.int8,
    "ubinary": np.uint8,
}
RANGED = ("int8", "uint8")  # the precisions that need ranges
_FEW_ROWS = 100  # ranges of fewer embeddings are reported as unreliable
_BLOCK = 1 << 18  # values that are quantized at a time, so that intermediate results stay in the cache

_log = logging.getLogger("jaxft")


def quantize_embeddings(
    embeddings: ArrayLike | Sequence[ArrayLike],
    precision: str,
    *,
    ranges: ArrayLike | None = None,
    calibration_embeddings: ArrayLike | None = None,
) -> Any:
    """Quantizes float embeddings to fewer bits, as `sentence_transformers.quantize_embeddings` does.

    `"int8"` and `"uint8"` divide the range of each component into 255 equal steps. Values outside of the range get the
    nearest end of it. A component whose range is empty gives 0 (`"uint8"`) or -128 (`"int8"`). `"binary"` and
    `"ubinary"` keep one bit per component, which says whether the component is positive. Eight components share a byte,
    the first one in the highest bit; zero bits fill the last byte. `"binary"` stores the byte minus 128.

    Args:
      embeddings: float `[n, D]` or `[D]`, a NumPy or JAX array; a list of such rows; or a list of float `[n_i, D]`, for
        example the token embeddings of several texts, which then share their ranges.
      precision: `"float32"`, `"float16"`, `"int8"`, `"uint8"`, `"binary"` or `"ubinary"`.
      ranges: numbers `[2, D]`, the smallest and the largest value of each component. Used for `"int8"` and `"uint8"`,
        without effect for others, as in sentence-transformers.
      calibration_embeddings: float `[m, D]` from which the ranges are computed if `ranges` is None. Used as `ranges`.
        If both are None, the ranges are computed from `embeddings`; fewer than 100 rows log a warning.

    Returns:
      A NumPy array `[n, D]` or `[D]` of float32, float16, int8 or uint8; `[n, ceil(D / 8)]` or `[ceil(D / 8)]` of int8
      for `"binary"` and of uint8 for `"ubinary"`. A list of arrays for a list of `[n_i, D]`.

    Raises:
      TypeError: `embeddings` or `calibration_embeddings` are not floats, or `ranges` are not numbers.
      ValueError: `precision` is unknown, a shape is wrong, ranges would have to be computed from a single embedding, a
        lower end of `ranges` is above its upper end, or a value is not finite (except for `"float32"` and
        `"float16"`) or too large for float16.
    """
    if precision not in (*PRECISIONS,):
        raise ValueError(
            f"quantize_embeddings: precision must be one of {', '.join(PRECISIONS)}, got {precision!r:.80}"
        )
    several = isinstance(embeddings, list | tuple) and len(embeddings) > 0 and np.ndim(embeddings[0]) == 2
    if isinstance(embeddings, list | tuple) and not embeddings:
        return []
    parts = [_as_floats("embeddings", part) for part in (embeddings if several else [embeddings])]  # type: ignore[union-attr]
    if len(widths := {part.shape[-1] for part in parts}) > 1:
        raise ValueError(f"quantize_embeddings: embeddings must have one width, got {sorted(widths)}")
    if precision not in ("float32", "float16"):
        for part in parts:
            _check_finite("embeddings", part)
    limits = None
    if precision in RANGED and any(part.size for part in parts):
        limits = limits_of(
            "quantize_embeddings", parts, precision, ranges=ranges, calibration_embeddings=calibration_embeddings
        )
    results = [quantized(part, precision, limits) for part in parts]
    return results if several else results[0]


def check_unused(op: str, precision: str, **given: Any) -> None:
    """Raises a ValueError if an argument is given that only the precisions with ranges use."""
    for name, value in given.items():
        if value is not None and precision not in RANGED:
            raise ValueError(f"{op}: {name} must be None with precision {precision!r}, which has no ranges")


def as_ranges(op: str, ranges: Any, width: int) -> np.ndarray:
    """Checks ranges of int8 and uint8: finite float32 `[2, width]`, the lower ends first."""
    limits = _as_floats("ranges", ranges, op, or_integers=True).astype(np.float32)
    if limits.shape != (2, width):
        raise ValueError(f"{op}: ranges must have the shape (2, {width}), got {limits.shape}")
    _check_finite("ranges", limits, op)
    if (wrong := limits[0] > limits[1]).any():
        index = int(wrong.argmax())
        low, high = limits[:, index].tolist()
        raise ValueError(f"{op}: ranges[0] must not exceed ranges[1], got {low} and {high} for component {index}")
    return limits


def limits_of(
    op: str, parts: list[np.ndarray], precision: str, *, ranges: Any = None, **calibrations: Any
) -> np.ndarray:
    """Returns the ranges of the components of int8 and uint8, float32 `[2, D]`, see `quantize_embeddings`.

    The calibration embeddings come under the name of their argument of `op`.
    """
    width, ((name, calibration),) = parts[0].shape[-1], calibrations.items()
    if ranges is None:
        rows = sum(part.shape[0] for part in parts) if parts[0].ndim == 2 else 1
        if calibration is not None:
            parts = [_as_floats(name, calibration, op)]
            _check_finite(name, parts[0], op)
            if parts[0].ndim != 2 or parts[0].shape[-1] != width or not parts[0].size:
                shape = parts[0].shape
                raise ValueError(f"{op}: {name} must be [n, {width}], got {shape}")
        elif rows == 1:
            raise ValueError(f"{op}: {precision} ranges of a single embedding say nothing: pass ranges or {name}")
        elif rows < _FEW_ROWS:
            _log.warning(
                "%s: %s ranges are computed from only %d embeddings: pass ranges, or %s of more texts",
                op, precision, rows, name,
            )  # fmt: skip
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        ranges = np.stack([joined.min(axis=0), joined.max(axis=0)])
    return as_ranges(op, ranges, width)


def starts_and_steps(limits: np.ndarray) -> np.ndarray:
    """Returns start and step of each component, float32 `[2, D]`, for ranges `[2, D]`. An empty range has step 1."""
    steps = (limits[1] - limits[0]) / np.float32(255)
    return np.stack([limits[0], np.where(steps == 0, np.float32(1), steps)])


def codes(values: Any, precision: str, starts_steps: Any) -> Any:
    """Quantizes floats `[n, D]` of NumPy or JAX, for int8 and uint8 with the result of `starts_and_steps`."""
    on_device = isinstance(values, jax.Array)
    if precision.endswith("binary"):
        bits = (jnp if on_device else np).packbits(values > 0, axis=-1)
        return bits if precision == "ubinary" else (bits ^ 0x80).view(np.int8)
    if starts_steps is not None:
        start, step = starts_steps[:, None]
        floors = _floors(values - start, step) if on_device else np.floor((values - start) / step)
        values = floors.clip(0, 255) - 128 * (precision == "int8")
    return values.astype(PRECISIONS[precision])


def _floors(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `floor(a / b)` of float32, with the quotient rounded as by NumPy, for results from 0 to 255.

    Smaller results are negative, larger ones are 255. The division of XLA may be off by an ulp, and the ends of a range
    are at the edge of a step.
    """
    n = jnp.rint(a / b).clip(0, 255)
    high = (b.view(jnp.uint32) & jnp.uint32(0xFFFFFF00)).view(jnp.float32)
    rest = (a - high * n) - (b - high) * n  # a - b * n, exact if it is small
    return jnp.where(rest < (jnp.nextafter(n, jnp.zeros_like(n)) - n) / 2 * b, n - 1, n)


def flagged_codes(values: jax.Array, precision: str, starts_steps: jax.Array | None) -> jax.Array:
    """Quantizes floats `[n, D]`, with one more column: 0 if the floats are not finite, 1 if float16 overflows, else 2.

    The barrier keeps the floats the same to the bit as without quantization.
    """
    values = jax.lax.optimization_barrier(values)
    found = codes(values, precision, starts_steps)
    is_finite = jnp.isfinite(values).all(axis=-1, keepdims=True)
    fits = is_finite & jnp.isfinite(found).all(axis=-1, keepdims=True)
    return jnp.concatenate([found, is_finite.astype(found.dtype) + fits.astype(found.dtype)], axis=-1)


def quantized(values: np.ndarray, precision: str, limits: np.ndarray | None) -> np.ndarray:
    """Quantizes finite floats `[n, D]` or `[D]`, for int8 and uint8 with ranges `[2, D]`."""
    rows = np.atleast_2d(values)
    starts_steps = None if limits is None else starts_and_steps(limits)
    count = max(_BLOCK // max(rows.shape[1], 1), 1)
    blocks = [rows[first : first + count] for first in range(0, max(len(rows), 1), count)]
    with np.errstate(over="ignore"):
        result = np.concatenate([codes(block, precision, starts_steps) for block in blocks])
    if precision == "float16" and (over := np.isinf(result) & np.isfinite(rows)).any():
        raise ValueError(f"quantize_embeddings: embeddings must fit float16, got {rows[over][0]}")
    return result if values.ndim == 2 else result[0]


def _as_floats(name: str, values: Any, op: str = "quantize_embeddings", *, or_integers: bool = False) -> np.ndarray:
    """Converts to NumPy: float32 `[n, D]` or `[D]`, or float64 if the values are. Raises unless they are floats."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{op}: {name} must be rows of one width: {error}") from error
    if or_integers and array.dtype.kind in "iu":
        array = array.astype(np.float64)
    if array.dtype != np.float64:
        if array.dtype.kind not in "fV" or not np.can_cast(array.dtype, np.float32):
            raise TypeError(f"{op}: {name} must be {'numbers' if or_integers else 'floats'}, got {array.dtype}")
        array = array.astype(np.float32, copy=False)
    if array.ndim not in (1, 2):
        raise ValueError(f"{op}: {name} must have one or two axes, got the shape {array.shape}")
    return array


def _check_finite(name: str, values: np.ndarray, op: str = "quantize_embeddings") -> None:
    if not (finite := np.isfinite(values)).all():
        index = ", ".join(map(str, np.argwhere(~finite)[0]))
        raise ValueError(f"{op}: {name} must be finite, got {values[~finite][0]} at [{index}]")
