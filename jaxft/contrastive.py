"""The contrastive loss of embeddings, computed in chunks of rows. `jaxft.training` exports it."""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxft import reference
from jaxft.ops import checks, transforms
from jaxft.ops.cross_entropy import CrossEntropy
from jaxft.tuning import rows as tuning

_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_PARTITIONS = ("joint", "per_direction")
_HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


def contrastive_loss(
    queries: Array,
    documents: Array,
    negatives: Array | None = None,
    *,
    temperature: float | Array = 0.05,
    similarity: str = "cosine",
    directions: Sequence[str] = ("query_to_doc",),
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    axis_name: str | tuple[str, ...] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> CrossEntropy:
    """Computes the contrastive loss of pairs: each query is to find its document among all documents of the batch.

    With the defaults, equivalent to::

        candidates = jnp.concatenate([documents, *negatives.swapaxes(0, 1)])
        logits = unit(queries) @ unit(candidates).T / temperature
        log_p = jax.nn.log_softmax(logits)[jnp.arange(B), jnp.arange(B)]
        -jnp.sum(log_p), B

    The `mean` of the result is the loss `MultipleNegativesRankingLoss` of sentence-transformers, whose options have the
    same names (`scale` is 1 / temperature). `MultipleNegativesSymmetricRankingLoss` is `directions=("query_to_doc",
    "doc_to_query")` with `partition_mode="per_direction"`.

    Args:
      queries: `[B, D]`, float32, float16 or bfloat16. The computation is float32.
      documents: `[B, D]`, row i is the document of query i. For all other queries it is a negative.
      negatives: `[B, H, D]`, hard negatives: H more documents for each query, which are negatives of every query.
      temperature: a positive number, or a float scalar array, which may be trained and must be positive.
      similarity: "cosine", or "dot" for embeddings that are compared as they are.
      directions: which similarities the softmax of pair i has besides the positive's. "query_to_doc", which must be
        among them: query i with all documents. "query_to_query": query i with the other queries. "doc_to_query":
        document i with all queries. "doc_to_doc": document i with all documents of the other pairs.
      partition_mode: "joint" for one softmax over all directions, or "per_direction" for the mean of a loss for each
        direction, of "query_to_doc" and "doc_to_query" only.
      hardness_mode: which negatives of "query_to_doc" weigh more, the more similar they are: "in_batch_negatives",
        "hard_negatives" (the query's own, which needs `negatives`), "all_negatives", or None.
      hardness_strength: `hardness_strength * similarity`, without gradient, is added to the logits of these negatives.
      axis_name: name of a mesh axis or a tuple of names, inside a `jax.shard_map`. The arguments are the device's own
        pairs, and are compared with the pairs of all devices along the axis. None compares with the own pairs only.
      precision: precision of the matmuls, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.

    Returns:
      The tuple (total, labelled): the sum of the losses of the pairs, float32, and their number, int32. The property
      `mean` is the loss. With `axis_name`, both are the device's own: add up both over the devices before you divide,
      as `accumulate_gradients` and `cached_gradients` do. The result is then the loss of the whole batch.

    Raises:
      TypeError: an array has no float dtype, or a number is not one.
      ValueError: a shape does not fit, `temperature` is not positive, an option is unknown or does not go with the
        others, or `axis_name` is no axis of the surrounding `shard_map`.

    Gradients: for the arrays and the temperature, of any order. A row of zeros has the gradient 0.

    Memory: the similarities are computed in chunks of rows, and again in the backward pass. A chunk has 128 rows or at
    most a quarter of them, so `[B, B]` is never stored.

    Determinism: the result and the gradients are deterministic.
    """
    where = "contrastive_loss"
    queries, documents = checks.as_float(where, "queries", queries), checks.as_float(where, "documents", documents)
    if queries.ndim != 2 or documents.shape != queries.shape:
        raise ValueError(
            f"{where}: queries and documents must have the same shape [B, D], got {queries.shape} and {documents.shape}"
        )
    rows, width = queries.shape
    if negatives is not None:
        negatives = checks.as_float(where, "negatives", negatives)
        if negatives.ndim != 3 or negatives.shape[::2] != (rows, width):
            raise ValueError(
                f"{where}: negatives must have shape [B, H, D], here ({rows}, H, {width}), got {negatives.shape}"
            )
    if checks.is_number(temperature):
        temperature = checks.check_number(where, "temperature", temperature, positive=True)
    else:
        checks.check_shape(where, "temperature", checks.as_float(where, "temperature", temperature), ())
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"{where}: similarity must be 'cosine' or 'dot', got {similarity!r:.100}")
    given = (directions,) if isinstance(directions, str) else directions
    directions = tuple(dict.fromkeys(map(str, given))) if isinstance(given, Iterable) else ()
    if "query_to_doc" not in directions or not {*directions} <= {*_DIRECTIONS}:
        raise ValueError(
            f"{where}: directions must be some of {_DIRECTIONS}, 'query_to_doc' among them, got {given!r:.100}"
        )
    for name, value, known in (
        ("partition_mode", partition_mode, _PARTITIONS), ("hardness_mode", hardness_mode, _HARDNESS),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{where}: {name} must be one of {known}, got {value!r:.100}")
    if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & {*directions}:
        raise ValueError(
            f"{where}: partition_mode 'per_direction' needs the positive in each direction, which 'query_to_query' and "
            f"'doc_to_doc' do not have, got directions {directions}"
        )
    strength = checks.check_number(where, "hardness_strength", hardness_strength)
    if strength < 0 or (strength and hardness_mode is None):
        raise ValueError(
            f"{where}: hardness_strength must be a number >= 0, and 0 without a hardness_mode, got {hardness_strength}"
        )
    if hardness_mode == "hard_negatives" and negatives is None:
        raise ValueError(f"{where}: hardness_mode 'hard_negatives' needs negatives, got None")
    if axis_name is not None:
        names, bound = axis_name if isinstance(axis_name, tuple) else (axis_name,), False
        with contextlib.suppress(NameError):
            bound = all(isinstance(name, str) and lax.axis_size(name) > 0 for name in names)
        if not bound:
            raise ValueError(f"{where}: axis_name must be an axis of the surrounding shard_map, got {axis_name!r:.100}")
    precision = checks.check_precision(where, precision, jnp.float32)
    if rows == 0:
        return CrossEntropy(jnp.float32(0), jnp.int32(0))
    dtype = reference.wide_dtype(queries)
    arrays = (None if x is None else jnp.asarray(x, dtype) for x in (queries, documents, negatives, temperature))
    total = _contrastive(
        *transforms.vary_alike(*arrays), cosine=similarity == "cosine", directions=directions, precision=precision,
        joint=partition_mode == "joint", hardness=hardness_mode, strength=strength, axis_name=axis_name,
    )  # fmt: skip
    return CrossEntropy(total, transforms.vary_over(jnp.int32(rows), transforms.varying(total)))


@functools.partial(jax.jit, static_argnums=range(4, 11))
def _contrastive(
    queries: Array, documents: Array, negatives: Array | None, temperature: Array, cosine: bool,
    directions: tuple[str, ...], precision: Any, joint: bool, hardness: str | None, strength: float, axis_name: Any,
) -> Array:  # fmt: skip
    """Computes the sum of the losses of the pairs."""
    rows, width = queries.shape
    documents = documents[:, None]
    if negatives is not None:
        documents = jnp.concatenate([documents, negatives], axis=1)  # [B, 1 + H, D], each query's own document first
    if cosine:
        queries, documents = unit(queries), unit(documents)
    ends = {direction.split("_to_")[1] for direction in directions}
    every = {name: x for name, x in (("query", queries[:, None]), ("doc", documents)) if name in ends}
    first = jnp.int32(0)  # place of the device's first pair among all pairs
    if axis_name is not None:
        every = {name: lax.all_gather(x, axis_name, tiled=True) for name, x in every.items()}
        first = lax.axis_index(axis_name) * rows
    pairs, per_query = every["doc"].shape[:2]
    pair = lax.broadcasted_iota(jnp.int32, (1, pairs, 1), 1)
    is_document = lax.broadcasted_iota(jnp.int32, (1, 1, per_query), 2) == 0
    lowest = float(jnp.finfo(queries.dtype).min)  # not an infinity: all logits of a direction may be masked

    def losses(own: dict[str, Array], row: Array) -> Array:
        is_own, normalizers = row[:, None, None] == pair, []
        weighted = {
            "in_batch_negatives": ~is_own, "hard_negatives": is_own & ~is_document,
            "all_negatives": ~(is_own & is_document),
        }  # fmt: skip
        for direction in directions:
            start, end = direction.split("_to_")
            similarity = jnp.einsum("rd,phd->rph", own[start], every[end], precision=precision)
            logits = similarity / temperature
            if start == end:
                logits = jnp.where(is_own, lowest, logits)
            if direction == "query_to_doc":
                positive = jnp.sum(jnp.where(is_own & is_document, logits, 0.0), axis=(1, 2))
                if hardness is not None:
                    penalty = strength * lax.stop_gradient(similarity)
                    logits = logits + jnp.where(weighted[hardness], penalty, 0.0)
            normalizers.append(jax.nn.logsumexp(logits, axis=(1, 2)))
        found = jnp.stack(normalizers)
        return (jax.nn.logsumexp(found, axis=0) if joint else jnp.mean(found, axis=0)) - positive

    candidates = pairs * sum(per_query if direction.endswith("doc") else 1 for direction in directions)
    chunk = tuning.linear_cross_entropy(rows, candidates, width).rows
    chunks = -(-rows // chunk)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, chunks * chunk - rows), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(chunks, chunk, *x.shape[1:])

    def add(total: Array, part: Any) -> tuple[Array, None]:
        own, row, used = part
        return total + jnp.sum(jnp.where(used, losses(own, first + row), 0.0)), None

    own = {"query": queries, "doc": documents[:, 0]}
    parts = jax.tree.map(split, (own, lax.iota(jnp.int32, rows), jnp.ones(rows, bool)))
    start = transforms.vary_over(jnp.zeros((), queries.dtype), transforms.varying(*every.values(), first))
    return lax.scan(jax.checkpoint(add, prevent_cse=False), start, parts)[0]


def unit(x: Array) -> Array:
    """Scales rows to length 1, or divides them by 1e-12 if they are shorter. A row of zeros has the gradient 0."""
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return jnp.where(squares == 0, 0.0, x / jnp.sqrt(jnp.maximum(squares, 1e-24)))
