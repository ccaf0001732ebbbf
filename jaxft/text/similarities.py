"""Similarities of embeddings: cosine, dot product, and negative Euclidean and Manhattan distance."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxft.models.pooling import l2_normalize

Rows = ArrayLike | Sequence[ArrayLike]


class Similarity(NamedTuple):
    """A similarity of embeddings: larger is more similar.

    Both functions take NumPy or JAX arrays of any dtype, or lists of rows, and compute in float32 (matmuls at HIGHEST
    precision, because TF32 would change the order of close scores). The result is a JAX array if an argument has a JAX
    array, a NumPy array otherwise. They raise a TypeError for arguments that are no numbers, and a ValueError for
    shapes that do not match.
    """

    full: Callable[[Rows, Rows], Any]
    """Takes `[n, D]` and `[m, D]`, returns float32 `[n, m]`. `[D]` counts as `[1, D]`."""
    pairwise: Callable[[Rows, Rows], Any]
    """Takes `[n, D]` and `[n, D]`, returns float32 `[n]`. One `[D]` is compared to each row."""


def normalized(x: Any) -> Any:
    """Scales float32 rows, of NumPy or JAX, to length 1. A row of zeros stays."""
    if isinstance(x, jax.Array):
        return l2_normalize(x)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-12))


def _euclidean(difference: Any) -> Any:
    return -((difference * difference).sum(axis=-1) ** 0.5)


def _manhattan(difference: Any) -> Any:
    return -abs(difference).sum(axis=-1)


def _dots(a: Any, b: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return a @ b.T


def _distances(of_difference: Callable[[Any], Any]) -> Similarity:
    # XLA fuses the differences into the sum, so that [n, m, D] is not stored.
    on_device = jax.jit(lambda a, b: of_difference(a[:, None] - b))

    def full(a: Any, b: Any) -> Any:
        if isinstance(a, jax.Array):
            return on_device(a, b)
        return np.array([of_difference(b - row) for row in a], np.float32).reshape(len(a), len(b))

    return Similarity(_checked(full, pairwise=False), _checked(lambda a, b: of_difference(a - b), pairwise=True))


def _checked(function: Callable[[Any, Any], Any], *, pairwise: bool) -> Callable[[Rows, Rows], Any]:
    def similarity(a: Any, b: Any) -> Any:
        on_device = any(isinstance(x, jax.Array) for rows in (a, b) for x in (rows, *_items(rows)))
        a, b = (_as_floats(name, rows, on_device) for name, rows in (("embeddings1", a), ("embeddings2", b)))
        if not pairwise:
            a, b = (x[None] if x.ndim == 1 else x for x in (a, b))
        if a.shape[-1] != b.shape[-1] or (pairwise and a.ndim == b.ndim == 2 and len(a) != len(b)):
            what = "the same shape" if pairwise else "the same width"
            raise ValueError(f"similarity: embeddings1 and embeddings2 must have {what}, got {a.shape} and {b.shape}")
        return function(a, b)

    return similarity


def _items(rows: Any) -> Sequence[Any]:
    return rows if isinstance(rows, list | tuple) else ()


def _as_floats(name: str, rows: Any, on_device: bool) -> Any:
    """Converts to float32 `[n, D]` or `[D]`, of JAX or of NumPy."""
    try:
        array: Any = (jnp if on_device else np).asarray(rows).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"similarity: {name} must be an array of numbers, got {type(rows).__name__}: {error}"
        ) from error
    if array.ndim not in (1, 2):
        raise ValueError(f"similarity: {name} must have one or two axes, got the shape {array.shape}")
    return array


SIMILARITIES: dict[str, Similarity] = {
    "cosine": Similarity(
        _checked(lambda a, b: _dots(normalized(a), normalized(b)), pairwise=False),
        _checked(lambda a, b: (normalized(a) * normalized(b)).sum(axis=-1), pairwise=True),
    ),
    "dot": Similarity(_checked(_dots, pairwise=False), _checked(lambda a, b: (a * b).sum(axis=-1), pairwise=True)),
    "euclidean": _distances(_euclidean),
    "manhattan": _distances(_manhattan),
}


def similarity_name(op: str, argument: str, name: Any) -> str:
    """Returns the name in `SIMILARITIES` for a name, or for a member of sentence-transformers' `SimilarityFunction`.

    "dot_product" is an alias of "dot". Raises a ValueError for another name.
    """
    name = getattr(name, "value", name)
    found = "dot" if name == "dot_product" else name
    if not isinstance(found, str) or found not in SIMILARITIES:
        why = " (only models with several vectors per text have it)" if found in ("maxsim", "meanmaxsim") else ""
        raise ValueError(f"{op}: {argument} must be one of {', '.join(SIMILARITIES)}, got {name!r:.80}{why}")
    return found
