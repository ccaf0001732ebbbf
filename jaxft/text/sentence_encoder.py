"""SentenceEncoder: computes embeddings of texts, and reads checkpoints in the layout of sentence-transformers."""

import itertools
import operator
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.models.bundled import Bundled
from jaxft.models.pooling import l2_normalize, pool, pool_packed
from jaxft.ops import checks
from jaxft.ops.bundle import Rebuild
from jaxft.text import batching, module_files
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch, Bucket
from jaxft.text.long_texts import LongTexts

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


class SentenceEncoder:
    """A BERT encoder with its tokenizer and pooling: computes embeddings of texts as sentence-transformers does.

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts.

    Args:
      model: the encoder. Each `encode` reads its current parameters, so the model may be trained between calls.
      tokenizer: a `tokenizers.Tokenizer`. The encoder uses a copy that does not pad and truncates to `max_seq_length`.
      max_seq_length: maximum number of tokens of a text, special tokens included. Longer texts are truncated.
      pooling: one or more of "cls", "max" and "mean". The results of several modes are concatenated in the given order.
      normalize: whether `encode` always scales embeddings to length 1.
      prompt: text that is put before every text.
      truncate_dim: number of components of an embedding to keep, from the first on. None keeps all. `normalize` comes
        before, `normalize_embeddings` of `encode` after.
      token_types: whether the type ids of the tokenizer count. If so, an id other than 0 is not supported.
      packed: whether batches are packed, without padding. None packs if variable-length attention runs as a kernel, as
        on an NVIDIA GPU.

    Raises:
      ValueError: a pooling mode is unknown, `max_seq_length` leaves no room for a token, `truncate_dim` is not a
        positive integer, or the model lacks a token id or type id of the tokenizer.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer: "Tokenizer",
        *,
        max_seq_length: int,
        pooling: Sequence[str] = ("mean",),
        normalize: bool = False,
        prompt: str = "",
        truncate_dim: int | None = None,
        token_types: bool = True,
        packed: bool | None = None,
    ) -> None:
        if truncate_dim is not None and not (checks.is_natural(truncate_dim) and truncate_dim > 0):
            raise ValueError(f"SentenceEncoder: truncate_dim must be None or a positive integer, got {truncate_dim!r}")
        unknown = [mode for mode in pooling if mode not in module_files.POOLING_MODES]
        if unknown or not pooling:
            raise ValueError(
                f"SentenceEncoder: pooling must name some of {module_files.POOLING_MODES}, got {tuple(pooling)}"
            )
        self.model = model
        self.pooling = tuple(pooling)
        self.normalize = normalize
        (self.prompt,) = batching.as_texts("SentenceEncoder", "prompt", [prompt])
        self.truncate_dim = truncate_dim
        self._max_seq_length = max_seq_length = operator.index(max_seq_length)
        self._tokenizer = tokenizer_files.truncating(
            tokenizer, max_seq_length, model.config, token_types=token_types, owner="SentenceEncoder",
            argument="max_seq_length",
        )  # fmt: skip
        self._long_texts = LongTexts(self._tokenizer)
        self._batcher = batching.Batcher(
            limit=max_seq_length,
            padding=model.config.pad_token_id,
            packed=batching.packs(model.embeddings.options.implementation) if packed is None else packed,
            characters=len,
        )

        self._bundled = Bundled(model.embeddings.options.implementation)

        def embed(
            arrays: list[jax.Array], input_ids: jax.Array, lengths: jax.Array, longest: int,
            last_steps: tuple[bool, int | None, bool], rebuild: Rebuild,
        ) -> jax.Array:  # fmt: skip
            module = rebuild(arrays)
            if input_ids.ndim == 1:
                hidden = module(input_ids, cu_seqlens=lengths, max_seqlen=longest, deterministic=True).last_hidden_state
                pooled = pool_packed(hidden.astype(jnp.float32), lengths, self.pooling, longest)
            else:
                mask = jnp.arange(longest, dtype=lengths.dtype)[None] < lengths[:, None]
                hidden = module(input_ids, mask, deterministic=True).last_hidden_state
                pooled = pool(hidden.astype(jnp.float32), mask, self.pooling)
            normalize, width, normalize_again = last_steps
            pooled = (l2_normalize(pooled) if normalize else pooled)[:, :width]
            return l2_normalize(pooled) if normalize_again else pooled

        self._embed = jax.jit(embed, static_argnums=(3, 4, 5))

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        packed: bool | None = None,
    ) -> "SentenceEncoder":
        """Loads a checkpoint in the layout of sentence-transformers, or of transformers (with mean pooling).

        The files of both libraries are read as they read them; docs/checkpoints.md lists each field. A setting that
        would change embeddings and is not supported is an error. A folder without modules.json gets mean pooling, which
        the log "jaxft" says.

        `max_seq_length` of the encoder is the limit from these files, or the number of positions that the model has if
        that is smaller.

        Args:
          folder_or_id: a folder, or the id of a model on Hugging Face.
          revision: see `BertModel.from_pretrained`.
          cache_dir: see `BertModel.from_pretrained`.
          local_files_only: see `BertModel.from_pretrained`.
          dtype: float32, float16 or bfloat16, the dtype of parameters and computation. Embeddings are always float32.
          implementation: passed to every op. None picks the fastest for the device.
          packed: whether batches are packed, see the constructor.

        Returns:
          The encoder.

        Raises:
          CheckpointError: a file is missing or malformed, or asks for something that is not supported, for example a
            Dense module; the message names the file.
          TypeError: `folder_or_id` is not a string or path.
        """
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        layout = module_files.read_sentence_encoder(folder)
        model = BertModel.from_pretrained(layout.transformer, dtype=dtype, implementation=implementation)
        settings = tokenizer_files.Settings(layout.transformer)
        limit = layout.max_seq_length or settings.max_length or sys.maxsize
        tokenizer = tokenizer_files.load(settings, layout.do_lower_case)
        try:
            return cls(
                model,
                tokenizer,
                max_seq_length=min(limit, model.config.max_sequence_length),
                pooling=layout.pooling,
                normalize=layout.normalize,
                prompt=layout.prompt,
                truncate_dim=layout.truncate_dim,
                token_types=settings.token_types,
                packed=packed,
            )
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a text, special tokens included. Longer texts are truncated."""
        return self._max_seq_length

    @property
    def embedding_dimension(self) -> int:
        """Length D of an embedding."""
        width = self.model.config.hidden_size * len(self.pooling)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    def tokenize(self, sentences: str | Sequence[str] | np.ndarray) -> list[list[int]]:
        """Computes the token ids of each text as the model gets them: with prompt and special tokens, truncated.

        Args:
          sentences: one text, or a sequence of texts.

        Returns:
          A list with the token ids of each text, not padded. A single text gives a list of one list.

        Raises:
          TypeError: see `encode`.
          ValueError: a text is not valid Unicode or cannot be tokenised.
        """
        texts = batching.as_texts("encode", "sentences", sentences)
        return [
            chunk.ids[begin:end].tolist()
            for _, chunk in self._batcher.tokenised(texts, self._encodings)
            for begin, end in itertools.pairwise(chunk.begins)
        ]

    def encode(
        self,
        sentences: str | Sequence[str] | np.ndarray,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        convert_to_numpy: bool = True,
    ) -> np.ndarray | jax.Array:
        """Computes the embeddings of texts.

        Threads tokenise hundreds or thousands of texts at a time, ahead of the device. The texts of such a chunk are
        sorted by length. A very long text is cut before it is tokenised, where the tokens that count are certain to
        stay the same.

        Packed batches (the default on an NVIDIA GPU): a batch holds up to `batch_size * max_seq_length` tokens, fewer
        at the end of a call, and has one of the shapes of `buckets(batch_size)`. Other texts of the batch do not change
        the embedding of a text, except for the rounding of matmuls of another shape.

        Padded batches: a batch holds `batch_size` texts. It is padded to the next of the lengths 16, 32, 48, 64, 96,
        128, 192, 256, ... (powers of two and 1.5 times powers of two, the largest is `max_seq_length`). The rows of the
        last batch of a call are padded to a power of two, at most `batch_size`. For one `batch_size`, at most (number
        of lengths) * (2 + log2(batch_size)) programs are compiled, however many calls are made.

        If the device runs out of memory, `batch_size` is halved for the rest of the call and for later calls, and a
        warning is logged. The texts of the batch that did not fit are computed in smaller batches.

        Args:
          sentences: one text, or a sequence of texts, for example a NumPy array of strings.
          batch_size: number of texts of `max_seq_length` tokens in a batch. A packed batch holds more texts if they are
            shorter.
          show_progress_bar: whether to show progress on stderr. None shows it for more than 1,000 texts if stderr is a
            terminal.
          normalize_embeddings: whether to scale embeddings to length 1. Checkpoints with a Normalize module always do.
          convert_to_numpy: whether to return a NumPy array. If False, the result is a JAX array on the default device.

        Returns:
          float32 `[len(sentences), embedding_dimension]` in the order of `sentences`; float32 `[embedding_dimension]`
          for a single text.

        Raises:
          TypeError: `sentences` or one of its items is not a string (the item's index and type are named).
          ValueError: `batch_size` is not a positive integer, a text is not valid Unicode or cannot be tokenised, or an
            embedding is not finite. The message names the text and the reason.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one text.
        """
        batch_size = batching.check_batch_size("encode", batch_size)
        texts = batching.as_texts("encode", "sentences", sentences)
        # Normalising twice changes nothing but the rounding.
        again = normalize_embeddings and (self.truncate_dim is not None or not self.normalize)
        last_steps = self.normalize, self.truncate_dim, again
        arrays, rebuild = self._bundled(self.model)

        def compute(batch: Batch) -> jax.Array:
            return self._embed(arrays, batch.input_ids, batch.lengths, batch.longest, last_steps, rebuild)

        embeddings = self._batcher.compute_all(
            texts, self._encodings, batch_size, compute, model=self.model, width=self.embedding_dimension, unit="text",
            show_progress_bar=show_progress_bar,
        )  # fmt: skip
        result = embeddings[0] if isinstance(sentences, str) else embeddings
        return result if convert_to_numpy else jnp.asarray(result)

    def buckets(self, batch_size: int = 32) -> list[Bucket]:
        """Returns the shapes of packed batches. A program is compiled when a shape first occurs.

        Args:
          batch_size: the `batch_size` of `encode`.

        Returns:
          The shapes; an empty list if batches are padded.

        Raises:
          ValueError: `batch_size` is not a positive integer.
        """
        return batching.buckets(batch_size, self.max_seq_length) if self._batcher.packed else []

    def _encodings(self, texts: Sequence[str]) -> "list[Encoding]":
        texts = [self.prompt + text for text in texts]
        return tokenizer_files.encode(self._tokenizer, texts, self._long_texts.cut)
