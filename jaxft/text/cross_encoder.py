"""CrossEncoder: scores pairs of texts, for reranking, with the interface of sentence-transformers' CrossEncoder."""

import operator
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bundled import Bundled
from jaxft.models.classification import BertForSequenceClassification
from jaxft.ops.bundle import Rebuild
from jaxft.text import arguments, batching, module_files
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch, Bucket
from jaxft.text.long_texts import LongTexts

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Activation = Callable[[jax.Array], jax.Array]

# Activations by the last component of their PyTorch name. sentence-transformers writes the full name into its files.
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": lambda x: x,
    "Sigmoid": jax.nn.sigmoid,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
}


class CrossEncoder:
    """A BERT-type classifier with its tokenizer: scores pairs of texts, and ranks documents for a query.

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts.

    Args:
      model: the classifier. Each call reads its current parameters, so the model may be trained between calls.
      tokenizer: a `tokenizers.Tokenizer`. The encoder uses a copy that does not pad and truncates to `max_length`.
      max_length: maximum number of tokens of a pair, special tokens included. The longer text is truncated first.
      activation_fn: a function from float32 logits `[n, num_labels]` to scores of the same shape. None applies the
        sigmoid for a model with one label, and no activation for a model with several labels.
      prompt: text that is put before the first text of every pair.
      token_types: whether the model gets the token type ids of the tokenizer. Otherwise, all are 0.
      packed: whether batches are packed, as for `SentenceEncoder`.

    Raises:
      ValueError: `max_length` leaves no room for a token, or the model lacks a token id or type id of the tokenizer.
    """

    def __init__(
        self,
        model: BertForSequenceClassification,
        tokenizer: "Tokenizer",
        *,
        max_length: int,
        activation_fn: Activation | None = None,
        prompt: str = "",
        token_types: bool = True,
        packed: bool | None = None,
    ) -> None:
        self.model = model
        (self.prompt,) = batching.as_texts("CrossEncoder", "prompt", [prompt])
        self.activation_fn = activation_fn or _ACTIVATIONS["Sigmoid" if model.num_labels == 1 else "Identity"]
        self._max_length = max_length = operator.index(max_length)
        self._tokenizer = tokenizer_files.truncating(
            tokenizer, max_length, model.config, is_pair=True, token_types=token_types, owner="CrossEncoder",
            argument="max_length",
        )  # fmt: skip
        self._long_texts = LongTexts(self._tokenizer, is_pair=True)
        self._batcher = batching.Batcher(
            limit=max_length,
            padding=model.config.pad_token_id,
            packed=batching.packs(model.bert.embeddings.options.implementation) if packed is None else packed,
            with_types=token_types and model.config.type_vocab_size > 1,
            characters=lambda pair: sum(map(len, pair)),
        )
        self._bundled = Bundled(model.bert.embeddings.options.implementation)

        def score(
            arrays: list[jax.Array], input_ids: jax.Array, types: jax.Array | None, lengths: jax.Array, longest: int,
            rebuild: Rebuild,
        ) -> jax.Array:  # fmt: skip
            module = rebuild(arrays)
            if input_ids.ndim == 1:
                logits = module(input_ids, None, types, cu_seqlens=lengths, max_seqlen=longest, deterministic=True)
            else:
                mask = jnp.arange(longest, dtype=lengths.dtype)[None] < lengths[:, None]
                logits = module(input_ids, mask, types, deterministic=True)
            return logits.astype(jnp.float32)

        self._score = jax.jit(score, static_argnums=(4, 5))

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        max_length: int | None = None,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        packed: bool | None = None,
    ) -> "CrossEncoder":
        """Loads a checkpoint for sequence classification and its tokenizer.

        The activation is the one in config_sentence_transformers.json or else, from older versions, in config.json.
        Without such an entry, it is the default of the constructor. docs/checkpoints.md lists each field of the files
        that is read. A setting that would change scores and is not supported is an error.

        Args:
          folder_or_id: a folder, or the id of a model on Hugging Face.
          revision: see `BertModel.from_pretrained`.
          cache_dir: see `BertModel.from_pretrained`.
          local_files_only: see `BertModel.from_pretrained`.
          max_length: maximum number of tokens of a pair. None takes `max_seq_length` or else `model_max_length` of the
            files. Either limit is reduced to the number of positions that the model has.
          dtype: float32, float16 or bfloat16, the dtype of parameters and computation. Scores are always float32.
          implementation: passed to every op. None picks the fastest for the device.
          packed: whether batches are packed, as for `SentenceEncoder`.

        Returns:
          The encoder.

        Raises:
          CheckpointError: a file is missing or malformed, the message names it; or `max_length` leaves no room for a
            token.
          TypeError: `folder_or_id` is not a string or path.
        """
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        layout = module_files.read_cross_encoder(folder)
        model = BertForSequenceClassification.from_pretrained(
            folder, dtype=dtype, implementation=implementation, num_labels=layout.num_labels
        )
        settings = tokenizer_files.Settings(folder)
        limit = layout.max_seq_length or settings.max_length or sys.maxsize
        tokenizer = tokenizer_files.load(settings, layout.do_lower_case)
        activation_fn = _noted_activation(model.settings, folder)
        prompts = arguments.merged_prompts("from_pretrained", {}, None, layout.prompts)
        try:
            arguments.check_prompts("CrossEncoder", prompts, layout.default_prompt_name)
            return cls(
                model,
                tokenizer,
                max_length=min(limit if max_length is None else max_length, model.config.max_sequence_length),
                activation_fn=activation_fn,
                prompt=prompts.get(str(layout.default_prompt_name), ""),
                token_types=settings.token_types,
                packed=packed,
            )
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a pair, special tokens included. Longer pairs are truncated."""
        return self._max_length

    def buckets(self, batch_size: int = 32) -> list[Bucket]:
        """Returns the shapes of packed batches. A program is compiled when a shape first occurs.

        Args:
          batch_size: the `batch_size` of `predict`.

        Returns:
          The shapes; an empty list if batches are padded.

        Raises:
          ValueError: `batch_size` is not a positive integer.
        """
        return batching.buckets(batch_size, self.max_length) if self._batcher.packed else []

    def predict(
        self,
        sentences: Sequence[Sequence[str]] | Sequence[str],
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
    ) -> Any:
        """Scores pairs of texts. Batches are formed in the same way as in `SentenceEncoder.encode`.

        Args:
          sentences: a sequence of pairs (text, text), or one pair.
          batch_size: number of pairs of `max_length` tokens in a batch, see `SentenceEncoder.encode`.
          show_progress_bar: see `SentenceEncoder.encode`.
          activation_fn: a function from float32 logits `[n, num_labels]` to scores of the same shape. None applies the
            encoder's own activation.
          apply_softmax: whether to apply the softmax over the labels after the activation. It has no effect for a model
            with one label.
          convert_to_numpy: see `SentenceEncoder.encode`.

        Returns:
          float32 `[n]` for a model with one label, float32 `[n, num_labels]` for a model with several labels, in the
          order of `sentences`. The result for one pair has no first axis.

        Raises:
          TypeError: `sentences` is neither a pair of strings nor a sequence of such pairs; the message names the index.
          ValueError: `batch_size` is not a positive integer, a text is not valid Unicode or cannot be tokenised, a
            logit is not finite (the message names the pair and the reason), or `activation_fn` returns another shape.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one pair.
        """
        batch_size = batching.check_batch_size("predict", batch_size)
        is_pair = batching.is_sequence(sentences) and len(sentences) == 2 and isinstance(sentences[0], str)
        pairs = _as_pairs([sentences] if is_pair else sentences)
        arrays, rebuild = self._bundled(self.model)

        def compute(batch: Batch) -> jax.Array:
            return self._score(arrays, batch.input_ids, batch.token_type_ids, batch.lengths, batch.longest, rebuild)

        logits = self._batcher.compute_all(
            pairs, self._encodings, batch_size, compute, model=self.model, width=self.model.num_labels, unit="pair",
            show_progress_bar=show_progress_bar,
        )  # fmt: skip
        activation_fn = activation_fn or self.activation_fn
        # The built-in activations treat each element by itself, so rows can be padded to a power of two. Without
        # padding, JAX would compile the activation for every number of pairs.
        count = len(logits)
        if activation_fn in _ACTIVATIONS.values():
            logits = np.pad(logits, ((0, (1 << max(count - 1, 0).bit_length()) - count), (0, 0)))
        scores: Any = jnp.asarray(activation_fn(jnp.asarray(logits)), jnp.float32)
        if scores.shape != logits.shape:
            raise ValueError(f"predict: activation_fn must return the shape {logits.shape}, got {scores.shape}")
        if self.model.num_labels > 1 and apply_softmax:
            scores = jax.nn.softmax(scores, axis=-1)
        scores = np.array(scores)[:count]  # a copy, because NumPy views of JAX arrays are read-only
        if self.model.num_labels == 1:
            scores = scores[:, 0]
        scores = scores[0] if is_pair else scores
        return scores if convert_to_numpy else jnp.asarray(scores)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
    ) -> list[dict[str, Any]]:
        """Ranks documents by their score with a query, the best first.

        Args:
          query: a text.
          documents: a sequence of texts.
          top_k: number of documents to return. None returns all of them.
          return_documents: whether to return the texts too.
          batch_size: see `predict`.
          show_progress_bar: see `predict`.
          activation_fn: see `predict`.

        Returns:
          A list of `{"corpus_id": index in documents, "score": float}`, with the key `"text"` too if `return_documents`
          is True. Documents with equal scores keep their order.

        Raises:
          TypeError: `query` or a document is not a string, or `documents` is not a sequence or is a single string.
          ValueError: as for `predict`, or the model has several labels, or `top_k` is not a positive integer.
          jax.errors.JaxRuntimeError: see `predict`.
        """
        if self.model.num_labels != 1:
            raise ValueError(f"rank: the model must have one label, a score, got {self.model.num_labels} labels")
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1):
            raise ValueError(f"rank: top_k must be None or a positive integer, got {top_k!r}")
        if isinstance(documents, str):
            raise TypeError("rank: documents must be a sequence of str, got one str")
        documents = batching.as_texts("rank", "documents", documents)
        (query,) = batching.as_texts("rank", "query", [query])
        scores = self.predict([(query, text) for text in documents], batch_size, show_progress_bar, activation_fn)
        best = np.argsort(-scores, kind="stable")[:top_k]
        found: list[dict[str, Any]] = [{"corpus_id": int(i), "score": float(scores[i])} for i in best]
        if return_documents:
            for entry in found:
                entry["text"] = documents[entry["corpus_id"]]
        return found

    def _encodings(self, pairs: Sequence[tuple[str, str]]) -> "list[Encoding]":
        pairs = [(self.prompt + first, second) for first, second in pairs]
        return tokenizer_files.encode(self._tokenizer, pairs, self._long_texts.cut_pairs)


def _as_pairs(sentences: Any) -> list[tuple[str, str]]:
    expected = "predict: sentences must be a pair of str or a sequence of such pairs"
    if not batching.is_sequence(sentences):
        raise TypeError(f"{expected}, got {type(sentences).__name__}")
    for index, pair in enumerate(sentences):
        if not batching.is_sequence(pair) or len(pair) != 2:
            raise TypeError(f"{expected}, got {pair!r:.80} at index {index}")
    firsts = batching.as_texts("predict", "first texts", [pair[0] for pair in sentences])
    seconds = batching.as_texts("predict", "second texts", [pair[1] for pair in sentences])
    return list(zip(firsts, seconds, strict=True))


def _noted_activation(settings: dict[str, Any], folder: Path) -> Activation | None:
    noted = settings.get("sentence_transformers")
    noted = noted if isinstance(noted, dict) else {}
    name = noted.get("activation_fn", settings.get("sbert_ce_default_activation_function"))
    if name is None:
        return None
    activation = _ACTIVATIONS.get(str(name).rpartition(".")[2]) if str(name).startswith("torch.") else None
    if activation is None:
        raise CheckpointError(
            f"{folder}: config_sentence_transformers.json or config.json: the activation function {name!r:.80} is not"
            f" supported; supported are {', '.join(_ACTIVATIONS)} of PyTorch"
        )
    return activation
