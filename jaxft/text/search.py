"""Search among embeddings on the device: the nearest of a corpus for each query, and the most similar pairs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxft.ops import checks
from jaxft.text.quantization import PRECISIONS, RANGED, as_ranges, check_unused, starts_and_steps
from jaxft.text.similarities import SIMILARITIES, normalized, similarity_name

if TYPE_CHECKING:
    from jaxft.text.sentence_encoder import SentenceEncoder

ScoreFunction = str | Callable[[jax.Array, jax.Array], jax.Array]

_MOST_SCORES = 1 << 26  # scores that are on the device at a time
_LEAST = np.finfo(np.float32).min  # replaces -inf on the device, where -inf marks what is no score


def semantic_search(
    query_embeddings: ArrayLike | Sequence[ArrayLike],
    corpus_embeddings: ArrayLike | Sequence[ArrayLike],
    *,
    query_chunk_size: int = 100,
    corpus_chunk_size: int = 500_000,
    top_k: int = 10,
    score_function: ScoreFunction = "cosine",
    corpus_precision: str = "float32",
    ranges: ArrayLike | None = None,
) -> list[list[dict[str, Any]]]:
    """Finds the entries of a corpus that are most similar to each query, by comparing all of them on the device.

    A NumPy corpus stays in host memory, memory-mapped files included, and is moved to the device in chunks. At most two
    chunks and 2^26 scores are on the device at a time. Chunks have one of a few shapes, so that few programs are
    compiled.

    Scores are float32. Matmuls run at HIGHEST precision, also on a GPU, where TF32 would change the order of close
    scores. The results do not depend on the sizes of the chunks, except for the rounding of matmuls of another shape.

    The corpus may be quantized by `quantize_embeddings`, which saves memory and the time of moving it. Its chunks are
    decoded on the device: int8 and uint8 with `ranges`, and the bits of binary and ubinary as 1 and -1. The queries are
    floats, which is more accurate, or quantized in the same way.

    Args:
      query_embeddings: `[q, D]` or `[D]`, a NumPy or JAX array, or a list of rows.
      corpus_embeddings: `[n, D]`, a NumPy or JAX array, or a list of rows; `[n, ceil(D / 8)]` for packed bits.
      query_chunk_size: most queries that are compared at a time.
      corpus_chunk_size: most entries of the corpus that are compared at a time.
      top_k: number of entries to return for each query. A smaller corpus gives fewer.
      score_function: `"cosine"`, `"dot"`, `"euclidean"` or `"manhattan"` (the last two are negative distances), or a
        function from JAX arrays `[a, D]` and `[b, D]`, float32, to scores `[a, b]`. `jax.jit` traces it.
      corpus_precision: `"float32"` for a corpus of floats, or the `precision` with which it was quantized.
      ranges: `[2, D]`, the ranges with which an int8 or uint8 corpus was quantized.

    Returns:
      For each query a list of `{"corpus_id": int, "score": float}`, the largest score first. Equal scores are in the
      order of the corpus.

    Raises:
      TypeError: embeddings are not floats or do not have the dtype of `corpus_precision`, or `score_function` is
        neither a name nor a function of JAX arrays.
      ValueError: a shape does not match, a number is not a positive integer, a name is unknown, `ranges` are missing,
        not finite or not used by `corpus_precision`, or a score is NaN or positive infinity.
    """
    op = "semantic_search"
    queries = _as_rows(op, "query_embeddings", query_embeddings)
    queries = queries[None] if queries.ndim == 1 else queries
    corpus = _as_rows(op, "corpus_embeddings", corpus_embeddings)
    limits = _check_rows(op, queries, corpus, corpus_precision, ranges)
    query_chunk_size, corpus_chunk_size, top_k = _as_positive(
        op, query_chunk_size=query_chunk_size, corpus_chunk_size=corpus_chunk_size, top_k=top_k
    )
    scores, ids = _nearest(
        op, queries, corpus, min(top_k, len(corpus)), _score(op, score_function), query_chunk_size=query_chunk_size,
        corpus_chunk_size=corpus_chunk_size, decode=corpus_precision, limits=limits,
    )  # fmt: skip
    return [
        [{"corpus_id": index, "score": score} for index, score in zip(*row, strict=True)]
        for row in zip(ids.tolist(), scores.tolist(), strict=True)
    ]


def paraphrase_mining(
    model: "SentenceEncoder",
    sentences: Sequence[str],
    *,
    show_progress_bar: bool | None = False,
    batch_size: int = 32,
    query_chunk_size: int = 5000,
    corpus_chunk_size: int = 100_000,
    max_pairs: int = 500_000,
    top_k: int = 100,
    score_function: ScoreFunction = "cosine",
    truncate_dim: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> list[list[Any]]:
    """Finds the most similar pairs among texts, by comparing all of them. The embeddings are held on the device.

    Args:
      model: the encoder of the texts.
      sentences: a sequence of texts.
      show_progress_bar: see `SentenceEncoder.encode`.
      batch_size: see `SentenceEncoder.encode`.
      query_chunk_size: see `paraphrase_mining_embeddings`.
      corpus_chunk_size: see `paraphrase_mining_embeddings`.
      max_pairs: see `paraphrase_mining_embeddings`.
      top_k: see `paraphrase_mining_embeddings`.
      score_function: see `paraphrase_mining_embeddings`.
      truncate_dim: see `SentenceEncoder.encode`.
      prompt_name: see `SentenceEncoder.encode`.
      prompt: see `SentenceEncoder.encode`.

    Returns:
      See `paraphrase_mining_embeddings`.

    Raises:
      TypeError: `sentences` is a single string. Otherwise see `SentenceEncoder.encode` and `semantic_search`.
      ValueError: see `SentenceEncoder.encode` and `semantic_search`.
    """
    if isinstance(sentences, str):
        raise TypeError("paraphrase_mining: sentences must be a sequence of str, got one str")
    embeddings = model.encode(
        sentences, show_progress_bar=show_progress_bar, batch_size=batch_size, convert_to_numpy=False,
        truncate_dim=truncate_dim, prompt_name=prompt_name, prompt=prompt,
    )  # fmt: skip
    return paraphrase_mining_embeddings(
        embeddings, query_chunk_size=query_chunk_size, corpus_chunk_size=corpus_chunk_size, max_pairs=max_pairs,
        top_k=top_k, score_function=score_function,
    )  # fmt: skip


def paraphrase_mining_embeddings(
    embeddings: ArrayLike | Sequence[ArrayLike],
    *,
    query_chunk_size: int = 5000,
    corpus_chunk_size: int = 100_000,
    max_pairs: int = 500_000,
    top_k: int = 100,
    score_function: ScoreFunction = "cosine",
) -> list[list[Any]]:
    """Finds the most similar pairs among embeddings, by comparing all of them as `semantic_search` does.

    Args:
      embeddings: float `[n, D]`, a NumPy or JAX array, or a list of rows.
      query_chunk_size: most embeddings that are compared to a chunk of the others at a time.
      corpus_chunk_size: most embeddings in a chunk of the others.
      max_pairs: most pairs that are returned.
      top_k: number of most similar others that each embedding is paired with.
      score_function: see `semantic_search`. It must be symmetric, because a pair is scored in one direction.

    Returns:
      A list of `[score, i, j]` with the positions `i < j`, the largest score first. Pairs with equal scores are in the
      order of `i`, then `j`.

    Raises:
      TypeError: see `semantic_search`.
      ValueError: see `semantic_search`.
    """
    op = "paraphrase_mining"
    rows = _as_rows(op, "embeddings", embeddings)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"{op}: embeddings must be floats [n, D], got {rows.dtype} {list(rows.shape)}")
    query_chunk_size, corpus_chunk_size, max_pairs, top_k = _as_positive(
        op, query_chunk_size=query_chunk_size, corpus_chunk_size=corpus_chunk_size, max_pairs=max_pairs, top_k=top_k
    )
    score, count = _score(op, score_function), len(rows)
    found = np.empty(0, [("score", np.float32), ("i", np.int64), ("j", np.int64)])
    for first in range(0, count, query_chunk_size):
        queries = rows[first : first + query_chunk_size]
        scores, others = _nearest(
            op, queries, rows, min(top_k + 1, count), score, query_chunk_size=query_chunk_size,
            corpus_chunk_size=corpus_chunk_size, first_query=first,
        )  # fmt: skip
        own = np.broadcast_to(first + np.arange(len(queries))[:, None], others.shape)
        is_other = others != own
        kept = is_other & (is_other.cumsum(axis=1) <= top_k)
        new = np.empty(int(kept.sum()), found.dtype)
        new["score"] = scores[kept]
        new["i"], new["j"] = np.minimum(own, others)[kept], np.maximum(own, others)[kept]
        found = np.append(found, new)
        # Of both directions of a pair, the first one counts.
        found = found[np.unique(found["i"] * count + found["j"], return_index=True)[1]]
        found = found[np.argsort(-found["score"], kind="stable")[:max_pairs]]
    return [list(pair) for pair in found.tolist()]


def _nearest(
    op: str, queries: Any, corpus: Any, k: int, score: ScoreFunction, *, query_chunk_size: int, corpus_chunk_size: int,
    decode: str = "float32", limits: np.ndarray | None = None, first_query: int = 0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Returns the `k` best scores of each query, float32 `[q, k]`, and their positions, int32 `[q, k]`."""
    if not len(queries) or not len(corpus):
        return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int32)
    if isinstance(queries, jax.Array) and isinstance(corpus, jax.Array) and queries.sharding != corpus.sharding:
        queries = np.asarray(queries)  # it follows the corpus
    on_device, count = isinstance(corpus, jax.Array), len(corpus)
    rows = _chunk(len(queries), query_chunk_size)
    # The last chunk reaches back into the chunk before it. To pad it, the corpus would have to be copied.
    most = min(corpus_chunk_size, max(_MOST_SCORES // rows, 1))
    size = count if on_device and count <= most else _chunk(count, most)
    size = size if size <= count else _round(-(-count // 2), up=True)
    width = queries.shape[1] if jnp.issubdtype(queries.dtype, jnp.floating) else None
    how = {"limits": limits, "decode": decode, "width": width, "normalize": score == "cosine"}
    padding = ((0, -len(queries) % rows), (0, 0))
    padded = (jnp if isinstance(queries, jax.Array) else np).pad(queries, padding) if padding[0][1] else queries
    parts = [padded[first : first + rows] for first in range(0, len(queries), rows)]
    # A single part is prepared in the program that compares it; several parts are compared to prepared entries.
    is_single, merged = len(parts) == 1, how if len(parts) == 1 else {}
    if not is_single:
        parts = [_prepared(part, **how) for part in parts]

    def chunk(first: int) -> Any:
        begin = min(first, count - size)
        entries = corpus if on_device else jax.device_put(corpus[begin : begin + size])
        return entries if is_single else _prepared(entries, begin if on_device else 0, size, **how)

    best: list[Any] = [None] * len(parts)
    following = chunk(0)
    for first in range(0, count, size):
        entries = following
        if first + size < count:
            following = chunk(first + size)
        for index, part in enumerate(parts):
            best[index] = _merge(
                best[index], part, entries, min(first, count - size), first, k=k, size=size,
                score="dot" if score == "cosine" else score, **merged,
            )  # fmt: skip
        if not (is_single and on_device):
            jax.block_until_ready(best)  # otherwise the whole corpus would be moved, or prepared, at once
    scores, ids = (np.concatenate(parts)[: len(queries)] for parts in zip(*jax.device_get(best), strict=True))
    if (infinite := scores == np.inf).any():
        query, place = (int(index) for index in np.argwhere(infinite)[0])
        pair = f"query {first_query + query} and entry {ids[query, place]}"
        raise ValueError(f"{op}: the score of {pair} is not finite, because an embedding has NaN or too large values")
    return np.where(scores == _LEAST, -np.inf, scores), ids


def _prepare(
    rows: jax.Array, begin: Any = 0, size: int | None = None, *, limits: jax.Array | None = None,
    decode: str = "float32", width: int | None = None, normalize: bool = False,
) -> jax.Array:  # fmt: skip
    """Converts `size` rows to float32 `[size, D]`. Decodes rows that have the dtype of the precision `decode`."""
    rows = rows if size in (None, len(rows)) else jax.lax.dynamic_slice_in_dim(rows, begin, size)
    values = rows.astype(jnp.float32)
    if rows.dtype == PRECISIONS[decode]:
        if limits is not None:
            values = (values + (128 if decode == "int8" else 0)) * limits[1, None] + limits[0, None]
        elif decode.endswith("binary"):
            bits = jax.lax.bitcast_convert_type(rows, jnp.uint8) ^ jnp.uint8(0x80 if decode == "binary" else 0)
            values = jnp.unpackbits(bits, axis=-1)[:, :width].astype(jnp.float32) * 2 - 1
    return normalized(values) if normalize else values


_prepared = jax.jit(_prepare, static_argnames=("size", "decode", "width", "normalize"))


@functools.partial(jax.jit, static_argnames=("k", "size", "score", "decode", "width", "normalize"))
def _merge(
    best: tuple[jax.Array, jax.Array] | None, queries: jax.Array, entries: jax.Array, begin: int, first: int, *,
    k: int, size: int, score: ScoreFunction, **how: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the `k` best scores and positions, of `best` and of `size` entries from `begin` on.

    Entries before `first` are in `best`. Queries and entries are prepared if `how` has arguments of `_prepare`.
    """
    queries, entries = _prepare(queries, **how), _prepare(entries, begin, size, **how)
    with jax.default_matmul_precision("highest"):
        scores = (SIMILARITIES[score].full if isinstance(score, str) else score)(queries, entries)
    if jnp.shape(scores) != (len(queries), len(entries)):
        shapes = f"({len(queries)}, {len(entries)}), got {jnp.shape(scores)}"
        raise ValueError(f"score_function must return the shape {shapes}")
    scores = scores.astype(jnp.float32)
    # NaN comes first, so that it is found. Known entries, and places in `best` that are still free, come last.
    scores = jnp.where(jnp.isnan(scores), jnp.inf, jnp.maximum(scores, _LEAST))
    ids = jnp.arange(len(entries), dtype=jnp.int32) + begin
    values, places = _top_k(jnp.where(ids >= first, scores, -jnp.inf), min(k, len(entries)))
    places = places + begin
    if best is not None:
        values, places = jnp.concatenate([best[0], values], axis=1), jnp.concatenate([best[1], places], axis=1)
        values, order = jax.lax.top_k(values, min(k, values.shape[1]))
        places = jnp.take_along_axis(places, order, axis=1)
    return values, places


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns `jax.lax.top_k(scores, k)` of `[q, n]`. Of equal scores, the first ones count.

    The scores are cut into blocks. The `k` best scores are in the `k` blocks with the best maxima.
    """
    # CPU with two cores, [100, 100,000], k=10: 1.7 ms (jax.lax.top_k 36 ms), 2026-11-26.
    block = 1 << (math.isqrt(scores.shape[1] // k).bit_length() - 1)
    blocks = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % block)), constant_values=-jnp.inf)
    blocks = blocks.reshape(len(scores), -1, block)
    chosen = jnp.sort(jax.lax.top_k(blocks.max(axis=2), k)[1], axis=1)  # sorted: equal scores keep their order
    taken = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(len(scores), k * block)
    values, places = jax.lax.top_k(taken, k)
    return values, jnp.take_along_axis(chosen, places // block, axis=1) * block + places % block


def _chunk(count: int, most: int) -> int:
    """Returns the size of chunks of about the same size, at most `most`. The last one may be smaller."""
    return _round(-(-count // -(-count // _round(most))), up=True)


def _round(number: int, *, up: bool = False) -> int:
    """Rounds to a number with at most four significant bits, so that few programs are compiled."""
    step = 1 << max(number.bit_length() - 4, 0)
    return (number + (step - 1) * up) // step * step


def _as_positive(op: str, **given: Any) -> list[int]:
    """Returns positive integers of any type as Python's, which do not wrap around."""
    for name, number in given.items():
        if not (checks.is_natural(number) and number > 0):
            raise ValueError(f"{op}: {name} must be a positive integer, got {number!r}")
    return [*map(int, given.values())]


def _check_rows(op: str, queries: Any, corpus: Any, precision: str, ranges: Any) -> np.ndarray | None:
    """Checks shapes and dtypes. Returns start and step of each component of int8 and uint8, float32 `[2, D]`."""
    if precision not in (*PRECISIONS,):
        names = ", ".join(PRECISIONS)
        raise ValueError(f"{op}: corpus_precision must be one of {names}, got {precision!r:.80}")
    for name, rows in (("corpus_embeddings", corpus), ("query_embeddings", queries)):
        is_float = jnp.issubdtype(rows.dtype, jnp.floating)
        if rows.dtype != PRECISIONS[precision] and not (is_float and (name[0] == "q" or precision.startswith("float"))):
            expected = "floats" if precision.startswith("float") else PRECISIONS[precision].__name__
            raise TypeError(f"{op}: {name} must be {expected} for corpus_precision={precision!r}, got {rows.dtype}")
    width = queries.shape[1]
    if precision.endswith("binary") and jnp.issubdtype(queries.dtype, jnp.floating):
        width = -(-width // 8)
    if corpus.ndim != 2 or corpus.shape[1] != width:
        raise ValueError(f"{op}: corpus_embeddings must be [n, {width}] for these queries, got {list(corpus.shape)}")
    check_unused(op, precision, ranges=ranges)
    if precision not in RANGED:
        return None
    if ranges is None:
        raise ValueError(f"{op}: ranges must be the ranges with which the {precision} corpus was quantized, got None")
    return starts_and_steps(as_ranges(op, ranges, width))


def _score(op: str, function: Any) -> ScoreFunction:
    """Returns the name of a similarity, or a function of JAX arrays."""
    if not callable(function):
        return similarity_name(op, "score_function", function)
    if str(getattr(function, "__module__", "")).startswith("sentence_transformers"):
        raise TypeError(
            f"{op}: score_function must be one of {', '.join(SIMILARITIES)} or a function of JAX arrays, got"
            f" {function.__name__} of sentence-transformers, a function of PyTorch tensors"
        )
    return function


def _as_rows(op: str, name: str, rows: Any) -> Any:
    """Converts to an array of JAX or NumPy, `[n, D]` or `[D]`, of floats or of the integers of quantized embeddings."""
    items = rows if isinstance(rows, list | tuple) else [rows]
    array = (jnp if any(isinstance(item, jax.Array) for item in items) else np).asarray(rows)
    if not jnp.issubdtype(array.dtype, jnp.floating) and array.dtype not in (np.int8, np.uint8):
        raise TypeError(f"{op}: {name} must be floats, or int8 or uint8 if quantized, got {array.dtype}")
    if array.ndim not in (1, 2):
        raise ValueError(f"{op}: {name} must have the shape [n, D], got {array.shape}")
    return array
