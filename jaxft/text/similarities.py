"""Similarities of embeddings: cosine, dot product, and negative Euclidean and Manhattan distance."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxft import dispatch
from jaxft.models.multi_vector import max_sim
from jaxft.models.pooling import l2_normalize

# Names of the similarities of texts with several vectors. "meanmaxsim" divides by the number of query tokens.
MAX_SIMS = ("maxsim", "meanmaxsim")
_PRODUCTS = 1 << 26  # dot products of tokens that are in memory at a time

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
    on_device = jax.jit(lambda a, b: of_difference(a[:, None] - b[None]))

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


def similarity_name(op: str, argument: str, name: Any, known: Iterable[str] = SIMILARITIES) -> str:
    """Returns the name among `known` for a name, or for a member of sentence-transformers' `SimilarityFunction`.

    "dot_product" is an alias of "dot". Raises a ValueError for another name.
    """
    name = getattr(name, "value", name)
    found = "dot" if name == "dot_product" else name
    if not isinstance(found, str) or found not in known:
        which = "several vectors" if found in MAX_SIMS else "one vector" if found in SIMILARITIES else ""
        why = f" (only models with {which} per text have it)" if isinstance(found, str) and which else ""
        raise ValueError(f"{op}: {argument} must be one of {', '.join(known)}, got {name!r:.80}{why}")
    return found


_max_sim = jax.jit(max_sim)
_max_sim_pairs = jax.jit(jax.vmap(lambda *of_pair: max_sim(*(x[None] for x in of_pair))[0, 0]))


def max_sims(queries: Any, documents: Any, *, mean: bool, pairwise: bool = False) -> Any:
    """Computes MaxSim of all queries with all documents, or of the first with the first, and so on.

    Args:
      queries: a list of floats `[tokens, D]`, one array `[n, tokens, D]`, or one query `[tokens, D]`.
      documents: the same of documents.
      mean: whether to divide by the number of tokens of the query.
      pairwise: whether to compare pairs.

    Returns:
      float32 `[n, m]`, or `[n]` for pairs; a JAX array if an argument has a JAX array. Documents of similar length are
      compared at a time, padded to a power of two.

    Raises a TypeError for arguments that are no numbers, and a ValueError for shapes that do not match.
    """
    on_device = any(isinstance(x, jax.Array) for texts in (queries, documents) for x in (texts, *_items(texts)))
    queries, documents = _as_matrices("embeddings1", queries), _as_matrices("embeddings2", documents)
    widths = {x.shape[1] for x in (*queries, *documents)}
    if len(widths) > 1 or (pairwise and len(queries) != len(documents)):
        what = "the same number of texts" if len(widths) < 2 else "the same width"
        raise ValueError(
            f"similarity: embeddings1 and embeddings2 must have {what}, got {len(queries)} and {len(documents)} texts"
            f" of the widths {sorted(widths)}"
        )
    scores = np.zeros(len(queries) if pairwise else (len(queries), len(documents)), np.float32)
    if pairwise:
        # Longest pairs first, so that pairs of similar length are in the same chunk.
        order = np.argsort([-len(query) * len(document) for query, document in zip(queries, documents, strict=True)])
        for chosen in _chunks(order, [max(len(a), len(b)) ** 2 for a, b in zip(queries, documents, strict=True)]):
            of_queries, of_documents = (_padded([x[i] for i in chosen]) for x in (queries, documents))
            found = _max_sim_pairs(of_queries[0], of_documents[0], of_queries[1], of_documents[1])
            scores[chosen] = np.asarray(found)[: len(chosen)]
    else:
        lengths = [len(document) for document in documents]
        longest = max(lengths, default=1)
        for rows in _chunks(np.argsort([-len(query) for query in queries]), [len(x) * longest for x in queries]):
            of_queries = _padded([queries[i] for i in rows])
            size = of_queries[0].shape[0] * of_queries[0].shape[1]
            for columns in _chunks(np.argsort([-length for length in lengths]), [size * max(x, 1) for x in lengths]):
                of_documents = _padded([documents[i] for i in columns])
                found = _max_sim(of_queries[0], of_documents[0], of_queries[1], of_documents[1])
                scores[np.ix_(rows, columns)] = np.asarray(found)[: len(rows), : len(columns)]
    if mean:
        counts = np.array([max(len(query), 1) for query in queries], np.float32)
        scores = scores / (counts if pairwise else counts[:, None])
    return dispatch.to_device(scores) if on_device else scores


def _chunks(order: np.ndarray, costs: Sequence[int]) -> list[np.ndarray]:
    """Cuts an order of texts into chunks that cost at most `_PRODUCTS`, counted with the padding to the first text."""
    chunks, start = [], 0
    while start < len(order):
        size = max(_PRODUCTS // max(2 * costs[order[start]], 1), 1)
        size = 1 << (size.bit_length() - 1)
        chunks.append(order[start : start + size])
        start += size
    return chunks


def _padded(texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pads matrices `[tokens, D]` to powers of two: `[n, longest, D]`, and the mask `[n, longest]`."""
    n, longest = (1 << max(size - 1, 0).bit_length() for size in (len(texts), max(map(len, texts))))
    padded, mask = np.zeros((n, longest, texts[0].shape[1]), np.float32), np.zeros((n, longest), bool)
    for row, text in enumerate(texts):
        padded[row, : len(text)], mask[row, : len(text)] = text, True
    return padded, mask


def _as_matrices(name: str, texts: Any) -> list[np.ndarray]:
    """Converts embeddings of texts to a list of float32 `[tokens, D]`."""
    single = getattr(texts, "ndim", None) == 2
    if not single and getattr(texts, "ndim", None) != 3 and not isinstance(texts, list | tuple):
        raise TypeError(
            f"similarity: {name} must be a list of arrays [tokens, D] or an array of two or three axes, got"
            f" {type(texts).__name__}"
        )
    found = [_as_floats(name, text, on_device=False) for text in ([texts] if single else texts)]
    if wrong := [x.shape for x in found if x.ndim != 2]:
        raise ValueError(f"similarity: {name} must have arrays of the shape [tokens, D], got the shape {wrong[0]}")
    return found
