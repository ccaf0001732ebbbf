"""SentenceEncoder: computes embeddings of texts, and reads checkpoints in the layout of sentence-transformers."""

import dataclasses
import itertools
import operator
import os
import sys
from collections.abc import Sequence
from pathlib import Path
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
from jaxft.ops.bundle import Rebuild
from jaxft.text import batching
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch, Bucket
from jaxft.text.long_texts import LongTexts

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Pooling modes by their field in a Pooling module's config.json, in the order in which sentence-transformers
# concatenates the results of several modes.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_MODES = ("cls", "max", "mean")
_SETTINGS_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # in file names


class SentenceEncoder:
    """A BERT encoder with its tokenizer and pooling: computes embeddings of texts as sentence-transformers does.

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts.

    Args:
      model: the encoder. Each `encode` reads its current parameters, so the model may be trained between calls.
      tokenizer: a `tokenizers.Tokenizer`. The encoder uses a copy that does not pad and truncates to `max_seq_length`.
      max_seq_length: maximum number of tokens of a text, special tokens included. Longer texts are truncated.
      pooling: one or more of "cls", "max" and "mean". The results of several modes are concatenated in the given order.
      normalize: whether `encode` always scales embeddings to length 1.
      prompt: text that is put before every text. White space at both ends of the result is removed.
      packed: whether batches are packed, without padding. None packs if variable-length attention runs as a kernel, as
        on an NVIDIA GPU.

    Raises:
      ValueError: a pooling mode is unknown, or `max_seq_length` leaves no room for a token.
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
        packed: bool | None = None,
    ) -> None:
        unknown = [mode for mode in pooling if mode not in _POOLING_MODES]
        if unknown or not pooling:
            raise ValueError(f"SentenceEncoder: pooling must name some of {_POOLING_MODES}, got {tuple(pooling)}")
        self.model = model
        self.pooling = tuple(pooling)
        self.normalize = normalize
        self.prompt = prompt
        self._max_seq_length = max_seq_length = operator.index(max_seq_length)
        self._tokenizer = tokenizer_files.truncating(
            tokenizer, max_seq_length, owner="SentenceEncoder", argument="max_seq_length"
        )
        self._long_texts = LongTexts(self._tokenizer)
        self._batcher = batching.Batcher(
            limit=max_seq_length,
            padding=model.config.pad_token_id,
            packed=batching.packs(model.embeddings.options.implementation) if packed is None else packed,
            characters=len,
        )

        self._bundled = Bundled(model.embeddings.options.implementation)

        def embed(
            arrays: list[jax.Array], input_ids: jax.Array, lengths: jax.Array, longest: int, normalize: bool,
            rebuild: Rebuild,
        ) -> jax.Array:  # fmt: skip
            module = rebuild(arrays)
            if input_ids.ndim == 1:
                hidden = module(input_ids, cu_seqlens=lengths, max_seqlen=longest, deterministic=True).last_hidden_state
                pooled = pool_packed(hidden.astype(jnp.float32), lengths, self.pooling, longest)
            else:
                mask = jnp.arange(longest, dtype=lengths.dtype) < lengths[:, None]
                hidden = module(input_ids, mask, deterministic=True).last_hidden_state
                pooled = pool(hidden.astype(jnp.float32), mask, self.pooling)
            return l2_normalize(pooled) if normalize else pooled

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

        These files are read, besides the configuration and the weights of the model:

        - modules.json: a Transformer, a Pooling and optionally a Normalize module.
        - config.json of the Pooling module: the modes cls, max and mean, alone or together.
        - sentence_bert_config.json, or the file of another model type such as sentence_roberta_config.json:
          `max_seq_length` and `do_lower_case`.
        - config_sentence_transformers.json: the default prompt.
        - tokenizer.json, or else a BERT vocab.txt.
        - tokenizer_config.json: `truncation_side`, and `model_max_length` if there is no `max_seq_length`.

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
        layout = _read_layout(folder)
        model = BertModel.from_pretrained(layout.transformer, dtype=dtype, implementation=implementation)
        limit = min(layout.max_seq_length or sys.maxsize, model.config.max_sequence_length)
        tokenizer = tokenizer_files.load(layout.transformer, layout.do_lower_case)
        tokenizer_files.check_vocabulary(tokenizer, layout.transformer, model.config.vocab_size)
        try:
            return cls(
                model,
                tokenizer,
                max_seq_length=limit,
                pooling=layout.pooling,
                normalize=layout.normalize,
                prompt=layout.prompt,
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
        return self.model.config.hidden_size * len(self.pooling)

    def tokenize(self, sentences: str | Sequence[str] | np.ndarray) -> list[list[int]]:
        """Computes the token ids of each text as the model gets them: with prompt and special tokens, truncated.

        Args:
          sentences: one text, or a sequence of texts.

        Returns:
          A list with the token ids of each text, not padded. A single text gives a list of one list.

        Raises:
          TypeError: see `encode`.
          ValueError: a text is not valid Unicode.
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
        sorted by length. Of a very long text, only a part is tokenised, if the tokens that count certainly are those of
        the whole text.

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
          ValueError: `batch_size` is not a positive integer, or a text is not valid Unicode.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one text.
        """
        batch_size = batching.check_batch_size("encode", batch_size)
        texts = batching.as_texts("encode", "sentences", sentences)
        normalize = self.normalize or normalize_embeddings
        arrays, rebuild = self._bundled(self.model)

        def compute(batch: Batch) -> jax.Array:
            return self._embed(arrays, batch.input_ids, batch.lengths, batch.longest, normalize, rebuild)

        embeddings = self._batcher.compute_all(
            texts, self._encodings, batch_size, compute, width=self.embedding_dimension, unit="text",
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
        # Strip as sentence-transformers does: for a byte-level tokenizer such as RoBERTa's, white space is text.
        return self._tokenizer.encode_batch_fast(self._long_texts.cut([(self.prompt + text).strip() for text in texts]))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Settings from the files of a checkpoint folder, except for the model's own."""

    transformer: Path
    pooling: tuple[str, ...]
    normalize: bool
    max_seq_length: int | None
    do_lower_case: bool
    prompt: str


def _read_layout(folder: Path) -> _Layout:
    transformer, normalize, include_prompt = folder, False, True
    pooling: tuple[str, ...] = ("mean",)
    modules_file = folder / "modules.json"
    if modules_file.exists():
        modules = _read_modules(modules_file)
        transformer = modules["Transformer"]
        if not os.path.isdir(transformer):
            raise CheckpointError(f"{modules_file}: the folder of module Transformer, {transformer}, does not exist")
        pooling, include_prompt = _read_pooling(modules["Pooling"] / "config.json")
        normalize = "Normalize" in modules
    files = [transformer / f"sentence_{kind}_config.json" for kind in _SETTINGS_KINDS]
    settings_file = next(filter(Path.exists, files), files[0])
    max_seq_length = tokenizer_files.max_length(settings_file, "max_seq_length")
    if max_seq_length is None:  # newer sentence-transformers keep the limit here
        max_seq_length = tokenizer_files.max_length(transformer / "tokenizer_config.json", "model_max_length")
    return _Layout(
        transformer=transformer,
        pooling=pooling,
        normalize=normalize,
        max_seq_length=max_seq_length,
        do_lower_case=bool(tokenizer_files.read_settings(settings_file).get("do_lower_case", False)),
        prompt=_read_default_prompt(folder / "config_sentence_transformers.json", include_prompt),
    )


def _read_modules(file: Path) -> dict[str, Path]:
    """Reads the folder of each module from modules.json. The keys are the last components of the modules' types."""
    modules: dict[str, Path] = {}
    entries = checkpoint_files.read_json(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{file}: expected a list of modules, got {entries!r:.80}")
    for entry in entries:
        kind = str(entry.get("type")).rpartition(".")[2]
        path = entry.get("path")
        if kind not in ("Transformer", "Pooling", "Normalize") or kind in modules:
            what = "appears twice" if kind in modules else "is not supported"
            raise CheckpointError(
                f"{file}: module {entry.get('type')!r} {what}; supported are one Transformer, one Pooling and"
                " optionally one Normalize"
            )
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: module {kind} must have a path inside the folder, got {path!r}")
        modules[kind] = file.parent / path
    if list(modules)[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(
            f"{file}: expected a Transformer, a Pooling and optionally a Normalize module in this order, got"
            f" {list(modules)}"
        )
    return modules


def _read_pooling(file: Path) -> tuple[tuple[str, ...], bool]:
    """Reads a Pooling module's config.json. Returns the modes, and whether prompt tokens take part in the pooling."""
    if not os.path.exists(file):
        raise CheckpointError(f"{file}: missing, but modules.json names it")
    config = checkpoint_files.read_json_object(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    unsupported = [mode for mode in modes if mode not in _POOLING_MODES] if isinstance(modes, list) else [modes]
    if unsupported or not modes:
        raise CheckpointError(
            f"{file}: pooling mode {', '.join(map(repr, unsupported))} is not supported; supported are"
            f" {', '.join(_POOLING_MODES)} and their concatenation"
        )
    return tuple(modes), bool(config.get("include_prompt", True))


def _read_default_prompt(file: Path, include_prompt: bool) -> str:
    config = tokenizer_files.read_settings(file)
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts = config.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise CheckpointError(f"{file}: default_prompt_name is {name!r:.80}, but prompts has no text of that name")
    if prompt and not include_prompt:
        raise CheckpointError(f"{file}: a default prompt together with include_prompt=false in the pooling's config")
    return prompt
