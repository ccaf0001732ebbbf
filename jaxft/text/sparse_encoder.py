"""SparseEncoder: computes sparse embeddings of texts with SPLADE, with the interface of sentence-transformers."""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import scipy.sparse
from jax.experimental import sparse
from jax.typing import DTypeLike

from jaxft import dispatch
from jaxft.models.float8 import Float8Recipe
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.models.splade import SpladeModel
from jaxft.ops import checks
from jaxft.ops.bundle import Rebuild
from jaxft.text import arguments, batching, module_files
from jaxft.text.batching import Batch
from jaxft.text.similarities import SIMILARITIES, similarity_name
from jaxft.text.text_encoder import TextEncoder, name_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_Row = tuple[np.ndarray, np.ndarray]  # int32 token ids, and their weights


class SparseEncoder(TextEncoder):
    """A masked language model with its tokenizer: computes a weight for each token id, of which most are 0 (SPLADE).

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts.

    Args:
      model: the masked language model. Each `encode` reads its current parameters, so the model may be trained between
        calls.
      tokenizer: see `SentenceEncoder`.
      max_seq_length: see `SentenceEncoder`.
      pooling_strategy: see `SpladeModel`.
      activation_function: see `SpladeModel`.
      max_active_dims: number of the largest weights of a text that `encode` keeps. None keeps all.
      prompts: see `SentenceEncoder`.
      default_prompt_name: see `SentenceEncoder`.
      similarity_fn_name: see `SentenceEncoder`, except that None takes "dot".
      token_types: see `SentenceEncoder`.
      packed: see `SentenceEncoder`.
      **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

    Attributes:
      embedder: the `SpladeModel`.
      tokenizer: as the argument.
      prompts: see `SentenceEncoder`.
      default_prompt_name: see `SentenceEncoder`.

    Raises:
      TypeError: see `SentenceEncoder`.
      ValueError: as for `SentenceEncoder`, `pooling_strategy` or `activation_function` is unknown, or `max_active_dims`
        is not a positive integer.
    """

    _SIMILARITY = "dot"

    def __init__(
        self,
        model: BertForMaskedLM,
        tokenizer: "Tokenizer",
        *,
        max_seq_length: int | None,
        pooling_strategy: str = "max",
        activation_function: str = "relu",
        max_active_dims: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        token_types: bool = True,
        packed: bool | None = None,
        **others: Any,
    ) -> None:
        arguments.refuse("SparseEncoder", others)
        self.max_active_dims = max_active_dims
        super().__init__(
            SpladeModel(model, pooling_strategy=pooling_strategy, activation_function=activation_function), tokenizer,
            max_seq_length=max_seq_length, prompts=prompts, default_prompt_name=default_prompt_name,
            similarity_fn_name=similarity_fn_name, token_types=token_types, packed=packed,
        )  # fmt: skip

        def embed(
            arrays: list[jax.Array], input_ids: jax.Array, lengths: jax.Array, longest: int, rebuild: Rebuild
        ) -> jax.Array:
            call = batching.sequences(input_ids, lengths, longest)
            return dispatch.on_host(rebuild(arrays)(input_ids, **call, deterministic=True))

        self._embed = jax.jit(embed, static_argnums=(3, 4))

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        max_seq_length: int | None = None,
        max_active_dims: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        dtype: DTypeLike | None = None,
        implementation: str | None = None,
        quantization: str | Float8Recipe | None = None,
        packed: bool | None = None,
        **others: Any,
    ) -> "SparseEncoder":
        """Loads a SPLADE checkpoint of sentence-transformers, or a masked language model of transformers.

        A masked language model without modules.json gets the pooling "max". A setting that would change embeddings and
        is not supported is an error, for example a module SparseAutoEncoder, Router or SparseStaticEmbedding.

        Args:
          folder_or_id: a folder, or the id of a model on Hugging Face.
          revision: see `BertModel.from_pretrained`.
          cache_dir: see `BertModel.from_pretrained`.
          local_files_only: see `BertModel.from_pretrained`.
          max_seq_length: see `SentenceEncoder.from_pretrained`.
          max_active_dims: see the constructor. None takes the number in the files.
          prompts: see `SentenceEncoder.from_pretrained`.
          default_prompt_name: see `SentenceEncoder.from_pretrained`.
          similarity_fn_name: see the constructor. None takes the name in the files.
          dtype: float32, float16 or bfloat16, the dtype of parameters and computation. Logits and embeddings are always
            float32. None is bfloat16 for a model in float8 and float32 for others.
          implementation: passed to every op. None picks the fastest for the device.
          quantization: "fp8" to multiply in float8_e4m3fn, see `BertModel.from_pretrained`.
          packed: see `SentenceEncoder`.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Returns:
          The encoder.

        Raises:
          CheckpointError: a file is missing or malformed, or asks for something that is not supported; the message
            names the file. Or an argument does not fit the checkpoint.
          TypeError: see `SentenceEncoder.from_pretrained`.
        """
        arguments.refuse("from_pretrained", others)

        def parts(layout: module_files.Layout) -> dict[str, Any]:
            return {
                "model": BertForMaskedLM.from_pretrained(
                    layout.transformer, dtype=dtype, implementation=implementation, quantization=quantization
                ),
                **layout.splade,
                "max_active_dims": layout.max_active_dims if max_active_dims is None else max_active_dims,
            }

        return cls._load(
            folder_or_id, module_files.read_sparse_encoder, parts, revision=revision, cache_dir=cache_dir,
            local_files_only=local_files_only, max_seq_length=max_seq_length, prompts=prompts,
            default_prompt_name=default_prompt_name, similarity_fn_name=similarity_fn_name,
            dtype=dtype, implementation=implementation, quantization=quantization, packed=packed,
        )  # fmt: skip

    def _write(self, folder: str | os.PathLike[str], **own: Any) -> None:
        settings = {"model_type": "SparseEncoder", **self._settings()}
        if self.max_active_dims is not None:
            settings["max_active_dims"] = self.max_active_dims
        self._save(folder, settings, **own)

    @property
    def max_active_dims(self) -> int | None:
        """Number of the largest weights of a text that `encode` keeps; None keeps all. It may be set."""
        return self._max_active_dims

    @max_active_dims.setter
    def max_active_dims(self, value: int | None) -> None:
        self._max_active_dims = _checked_most("SparseEncoder", "max_active_dims", value)

    def _similarity_name(self, name: Any) -> str:
        return similarity_name("SparseEncoder", "similarity_fn_name", name)

    def encode(  # type: ignore[override]  # the base class names only the first argument
        self,
        inputs: str | Iterable[str] | None = None,
        *,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_sparse_tensor: bool = True,
        convert_to_numpy: bool = True,
        max_active_dims: int | None = None,
        task: str | None = None,
        devices: Any = None,
        **others: Any,
    ) -> Any:
        """Computes the sparse embeddings of texts. Batches are formed in the same way as in `SentenceEncoder.encode`.

        Args:
          inputs: see `SentenceEncoder.encode`.
          sentences: another name of `inputs`.
          prompt_name: see `SentenceEncoder.encode`.
          prompt: see `SentenceEncoder.encode`.
          batch_size: see `SentenceEncoder.encode`. The weights of a batch, `[texts, V]`, are in memory at a time.
          show_progress_bar: see `SentenceEncoder.encode`.
          convert_to_sparse_tensor: whether the result is sparse. If False, it is an array with all weights.
          convert_to_numpy: whether the result is of SciPy or NumPy. If False, it is of JAX: a
            `jax.experimental.sparse.BCOO`, or a `jax.Array` if it is not sparse.
          max_active_dims: number of the largest weights of a text to keep. None takes the encoder's own number.
          task: see `SentenceEncoder.encode`.
          devices: see `SentenceEncoder.encode`.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Returns:
          The weights of the n `inputs`, in their order: a `scipy.sparse.csr_array` of float32 `[n, V]`, with ascending
          token ids in each row. For a single text, its row `[V]`, a `scipy.sparse.coo_array`.

        Raises:
          TypeError: see `SentenceEncoder.encode`.
          ValueError: `batch_size` or `max_active_dims` is not a positive integer, `prompt_name` or `task` is unknown, a
            text is not valid Unicode or cannot be tokenised, or an embedding is not finite. The message names the text
            and the reason.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one text.
        """
        arguments.refuse(name_of(task), others)
        arguments.check_flags(
            "encode", show_progress_bar=show_progress_bar, convert_to_numpy=convert_to_numpy,
            convert_to_sparse_tensor=convert_to_sparse_tensor,
        )  # fmt: skip
        inputs = arguments.one_of("encode", inputs=inputs, sentences=sentences)
        read, prompt, batch_size = self._start(inputs, prompt, prompt_name, batch_size, task)
        most = _checked_most("encode", "max_active_dims", max_active_dims) or self.max_active_dims

        def finish(rows: list[_Row]) -> Any:
            begins = np.append(0, np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64))
            ids, weights = (np.concatenate([np.empty(0, dtype), *part]) for dtype, part in (
                (np.int32, [row[0] for row in rows]), (np.float32, [row[1] for row in rows])))  # fmt: skip
            found: Any = scipy.sparse.csr_array((weights, ids, begins), shape=(len(rows), self.embedding_dimension))
            found = found[0] if read.is_single else found
            if not convert_to_sparse_tensor:
                return found.toarray() if convert_to_numpy else dispatch.to_device(found.toarray())
            if convert_to_numpy:
                return found
            indices = np.stack(found.tocoo().coords, axis=-1).astype(np.int32)
            return sparse.BCOO((dispatch.to_device(found.data), dispatch.to_device(indices)), shape=found.shape)

        return self._compute(
            read, prompt, task, batch_size, self._given, devices, finish, show_progress_bar,
            convert=lambda batch: [_active(weights, most) for weights in batch],
        )  # fmt: skip

    @staticmethod
    def _given(arrays: list[Any], rebuild: Rebuild, batch: Batch) -> tuple[Any, ...]:
        return arrays, batch.input_ids, batch.lengths, batch.longest, rebuild

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Computes the similarity of every embedding of one array with every embedding of another one.

        Args:
          embeddings1: `[n, V]` or `[V]`, of SciPy or JAX (sparse or not) or NumPy.
          embeddings2: `[m, V]` or `[V]`.

        Returns:
          float32 `[n, m]`, computed by the function `similarity_fn_name`: a JAX array if an argument is of JAX, a NumPy
          array otherwise. Euclidean and Manhattan distances are negative.

        Raises:
          TypeError: an argument is no array.
          ValueError: the shapes do not fit.
        """
        return self._similarity(embeddings1, embeddings2, pairwise=False)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Computes the similarity of the first embeddings of two arrays, of the second ones, and so on.

        Args:
          embeddings1: `[n, V]` or `[V]`, as for `similarity`.
          embeddings2: of the same shape.

        Returns:
          float32 `[n]`, see `similarity`. Two embeddings `[V]` give a single number.

        Raises:
          TypeError: an argument is no array.
          ValueError: the shapes do not fit.
        """
        return self._similarity(embeddings1, embeddings2, pairwise=True)

    def _similarity(self, embeddings1: Any, embeddings2: Any, *, pairwise: bool) -> Any:
        given = embeddings1, embeddings2
        name = "similarity_pairwise" if pairwise else "similarity"
        a, b = (_as_csr(name, f"embeddings{i}", x) for i, x in enumerate(given, 1))
        if a.shape[1] != b.shape[1] or (pairwise and a.shape[0] != b.shape[0]):
            raise ValueError(f"{name}: embeddings1 and embeddings2 must fit, got {a.shape} and {b.shape}")
        if self.similarity_fn_name == "cosine":
            a, b = (x / np.maximum(scipy.sparse.linalg.norm(x, axis=1), 1e-12)[:, None] for x in (a, b))
        scores: Any
        if self.similarity_fn_name in ("dot", "cosine"):
            scores = (a * b).sum(axis=1) if pairwise else (a @ b.T).toarray()
        elif pairwise:
            difference = abs(a - b)
            scores = -(
                difference.sum(axis=1)
                if self.similarity_fn_name == "manhattan"
                else np.sqrt(difference.power(2).sum(axis=1))
            )
        else:
            # A row of one array at a time, and only the token ids that occur.
            used = np.unique(np.concatenate([a.indices, b.indices]))
            full = SIMILARITIES[self.similarity_fn_name].full
            dense = b[:, used].toarray()
            scores = np.concatenate(
                [np.empty((0, b.shape[0])), *(full(a[[i]][:, used].toarray(), dense) for i in range(a.shape[0]))]
            )
        scores = np.asarray(scores, np.float32)
        if pairwise and all(x.ndim == 1 for x in given):
            scores = scores[0]
        return dispatch.to_device(scores) if any(isinstance(x, jax.Array | sparse.BCOO) for x in given) else scores

    def decode(self, embeddings: Any, top_k: int | None = None) -> list[Any]:
        """Returns the tokens of embeddings with their weights, the largest weight first.

        Args:
          embeddings: `[n, V]` or `[V]`, as for `similarity`.
          top_k: number of tokens of a text to return. None returns all that are not 0.

        Returns:
          For `[V]`, a list of tuples (token, weight); for `[n, V]`, a list of n such lists.

        Raises:
          TypeError: `embeddings` is no array.
          ValueError: `top_k` is not a positive integer, or `embeddings` has another number of axes.
        """
        top_k = _checked_most("decode", "top_k", top_k)
        matrix, found = _as_csr("decode", "embeddings", embeddings), []
        for begin, end in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True):
            ids, weights = matrix.indices[begin:end], matrix.data[begin:end]
            best = np.argsort(-weights, kind="stable")[:top_k]
            found.append([(self.tokenizer.id_to_token(int(ids[i])), float(weights[i])) for i in best])
        return found[0] if embeddings.ndim == 1 else found

    @staticmethod
    def intersection(embeddings1: Any, embeddings2: Any) -> Any:
        """Multiplies two embeddings: what each token contributes to their dot product.

        Args:
          embeddings1: `[V]`, as for `similarity`.
          embeddings2: `[V]` or `[n, V]`.

        Returns:
          The positive products, in the shape of `embeddings2`: a sparse array of SciPy, as `encode` returns.

        Raises:
          TypeError: an argument is no array.
          ValueError: the shapes do not fit.
        """
        a, b = _as_csr("intersection", "embeddings1", embeddings1), _as_csr("intersection", "embeddings2", embeddings2)
        if embeddings1.ndim != 1 or a.shape[1] != b.shape[1]:
            raise ValueError(
                "intersection: embeddings1 and embeddings2 must have the shapes [V] and [V] or [n, V], got"
                f" {embeddings1.shape} and {embeddings2.shape}"
            )
        weights = np.zeros(a.shape[1], np.float32)
        weights[a.indices] = a.data
        found = scipy.sparse.csr_array((b.data * weights[b.indices], b.indices, b.indptr), shape=b.shape)
        found.data[found.data < 0] = 0
        found.eliminate_zeros()
        return found[0] if embeddings2.ndim == 1 else found

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """Counts the weights of embeddings that are not 0.

        Args:
          embeddings: `[n, V]` or `[V]`, as for `similarity`.

        Returns:
          `"active_dims"`, the mean number of weights of a text that are not 0, and `"sparsity_ratio"`, the mean part of
          the weights that are 0.

        Raises:
          TypeError: `embeddings` is no array.
          ValueError: `embeddings` has another number of axes.
        """
        matrix = _as_csr("sparsity", "embeddings", embeddings)
        if 0 in matrix.shape:
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        active = matrix.nnz / matrix.shape[0]
        return {"active_dims": active, "sparsity_ratio": 1 - active / matrix.shape[1]}


def _active(weights: np.ndarray, most: int | None) -> _Row:
    """Returns the token ids and weights of a text that are not 0, or the `most` largest of them."""
    ids = np.flatnonzero(weights != 0)  # a fifth of the time of np.flatnonzero(weights)
    if most is not None and len(ids) > most:
        found = weights[ids]
        least = np.partition(found, -most)[-most]
        keep = found > least
        ties = np.flatnonzero(found == least)  # in ascending order of the ids
        keep[ties[: most - keep.sum()]] = True
        ids = ids[keep]
    return ids.astype(np.int32), weights[ids]


def _as_csr(op: str, name: str, embeddings: Any) -> Any:
    """Converts embeddings `[n, V]` or `[V]` to a `csr_array` of float32 `[n, V]` without zeros."""
    if not scipy.sparse.issparse(embeddings) and not isinstance(embeddings, sparse.BCOO | jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: {name} must be a sparse array of SciPy or JAX or an array, got {type(embeddings).__name__}"
        )
    if embeddings.ndim not in (1, 2):
        raise ValueError(f"{op}: {name} must have one or two axes, got the shape {embeddings.shape}")
    if isinstance(embeddings, sparse.BCOO):
        coordinates = np.asarray(embeddings.indices)
        # JAX pads indices with numbers beyond the shape.
        used = (coordinates < np.array(embeddings.shape)).all(axis=1)
        rows = coordinates[used][:, 0] if embeddings.ndim == 2 else np.zeros(used.sum(), np.int32)
        shape = embeddings.shape if embeddings.ndim == 2 else (1, *embeddings.shape)
        found = scipy.sparse.csr_array(
            (np.asarray(embeddings.data)[used], (rows, coordinates[used][:, -1])), shape=shape
        )
    elif scipy.sparse.issparse(embeddings):
        found = scipy.sparse.csr_array(embeddings.reshape(1, -1) if embeddings.ndim == 1 else embeddings)
    else:
        found = scipy.sparse.csr_array(np.atleast_2d(np.asarray(embeddings)))
    found = found.astype(np.float32)
    found.sum_duplicates()
    found.eliminate_zeros()
    return found


def _checked_most(where: str, name: str, value: Any) -> int | None:
    if value is not None and not (checks.is_natural(value) and value > 0):
        raise ValueError(f"{where}: {name} must be None or a positive integer, got {value!r:.80}")
    return None if value is None else int(value)
