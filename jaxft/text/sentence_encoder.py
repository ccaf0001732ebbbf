"""Text in, embeddings out: a BERT encoder with its tokenizer and pooling, read from a sentence-transformers folder."""

import dataclasses
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

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# The order in which sentence-transformers concatenates the results of several pooling modes.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_MODES = ("cls", "max", "mean")
_SETTINGS_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # of file names


class SentenceEncoder:
    """A BERT encoder, its tokenizer and a pooling: turns texts into vectors, as sentence-transformers does.

    Usually made by `from_pretrained`. The constructor takes the parts.

    Args:
      model: the encoder. Its parameters are read anew by each `encode`, so it may be trained in between.
      tokenizer: a `tokenizers.Tokenizer`. A copy without padding and truncated to `max_seq_length` is used.
      max_seq_length: the most tokens of a text, special tokens included; the rest is cut off.
      pooling: one or more of "cls", "max" and "mean"; the results of several are concatenated in the order given.
      normalize: whether embeddings are always scaled to length 1.
      prompt: text put before every text, which then loses the white space around it.
      packed: whether the texts of a batch lie back to back, without padding; None: on an NVIDIA GPU with kernels.

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
        self._batcher = batching.Batcher(
            limit=max_seq_length,
            padding=model.config.pad_token_id,
            packed=batching.packs(model.embeddings.options.implementation) if packed is None else packed,
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
        """Reads a folder in the layout of sentence-transformers, or of transformers (then with mean pooling).

        Read are modules.json (a Transformer, a Pooling and optionally a Normalize module), the pooling's config.json
        (cls, max and mean, alone or together), sentence_bert_config.json or that of another type (`max_seq_length`,
        `do_lower_case`), the default prompt of config_sentence_transformers.json, and tokenizer.json or else a BERT
        vocab.txt. The number of tokens is limited by `max_seq_length` (or else the tokenizer's `model_max_length`) and
        by the positions that the model has.

        Args:
          folder_or_id: a folder, or a model's id on Hugging Face.
          revision, cache_dir, local_files_only: for an id, as in `huggingface_hub.snapshot_download`.
          dtype: float32, float16 or bfloat16, of the parameters and of the arithmetic. Embeddings are always float32.
          implementation: passed to every op; None picks the fastest for the device.
          packed: whether the texts of a batch lie back to back, without padding; None: on an NVIDIA GPU with kernels.

        Raises:
          CheckpointError: a file is missing or malformed, or asks for something that is not supported, for example
            a Dense module; the message names the file.
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
        """The most tokens of a text that count, special tokens included."""
        return self._max_seq_length

    @property
    def embedding_dimension(self) -> int:
        """The length D of an embedding."""
        return self.model.config.hidden_size * len(self.pooling)

    def tokenize(self, sentences: str | Sequence[str] | np.ndarray) -> list[list[int]]:
        """The token ids of each text as the model gets them: with prompt and special tokens, truncated, not padded.

        Raises:
          TypeError, ValueError: as `encode`.
        """
        return [encoding.ids for encoding in self._encodings(batching.as_texts("encode", "sentences", sentences))]

    def encode(
        self,
        sentences: str | Sequence[str] | np.ndarray,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        convert_to_numpy: bool = True,
    ) -> np.ndarray | jax.Array:
        """Computes the embeddings of texts.

        Texts are tokenised some hundreds or thousands at a time, in threads ahead of the device, and sorted by length.

        Packed (on an NVIDIA GPU), a batch takes as many texts as have `batch_size * max_seq_length` tokens together,
        one after the other; only the last ones of a call may be smaller. Each batch has one of the shapes of
        `buckets(batch_size)`, and a text's embedding does not depend on its neighbours, but for the rounding of
        products of other shapes.

        Padded, texts are cut into batches of `batch_size`. A batch is padded to the next of the lengths 16, 32, 48, 64,
        96, 128, 192, 256, ... (powers of two and 1.5 times powers of two, and at the end `max_seq_length`); the last
        batch of a call is padded to a power of two of rows, at most `batch_size`. So for one `batch_size` there are at
        most (number of lengths) * (2 + log2(batch_size)) compiled programs however many calls are made.

        Where the device's memory does not suffice for a batch, `batch_size` is halved, from there on and in later
        calls, which the log says, and no text is lost.

        Args:
          sentences: one text, or a sequence of texts (a NumPy array of strings is one too).
          batch_size: how many texts of `max_seq_length` tokens are computed at a time; packed, more of shorter ones.
          show_progress_bar: whether stderr shows progress; None: for more than 1,000 texts on a terminal.
          normalize_embeddings: scale each embedding to length 1. Folders with a Normalize module always do.
          convert_to_numpy: whether to return a NumPy array; else a JAX array on the default device.

        Returns:
          float32 `[len(sentences), D]` in the order of `sentences`; `[D]` for a single text.

        Raises:
          TypeError: `sentences` or one of its items is not a string (the item's index and type are named).
          ValueError: `batch_size` is not a positive integer, or a text is not valid Unicode.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not even suffice for one text.
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
        """The shapes of packed batches, each of which is compiled when it first occurs; none if texts are padded."""
        return batching.buckets(batch_size, self.max_seq_length) if self._batcher.packed else []

    def _encodings(self, texts: Sequence[str]) -> "list[Encoding]":
        # As sentence-transformers does; to a tokenizer of bytes, as RoBERTa's, white space is text.
        return self._tokenizer.encode_batch_fast([(self.prompt + text).strip() for text in texts])


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What the files of a checkpoint folder say, but for the model itself."""

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
    """modules.json -> the folder of each module, by the last component of its type."""
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
    """A Pooling module's config.json -> the modes, and whether the tokens of a prompt take part."""
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
