"""Text in, embeddings out: a BERT encoder with its tokenizer and pooling, read from a sentence-transformers folder."""

import dataclasses
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxft.models import checkpoint
from jaxft.models.bert import BertModel
from jaxft.models.checkpoint import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tqdm import tqdm

_CHUNK = 8192  # texts that are tokenised and sorted together: bounds the host memory, and batches still fill up
_IN_FLIGHT = 8  # batches given to the device before the oldest result is read back
_LONG_WORK = 1000  # texts from which a terminal shows a progress bar unasked

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


class SentenceEncoder:
    """A BERT encoder, its tokenizer and a pooling: turns texts into vectors, as sentence-transformers does.

    Usually made by `from_pretrained`. The constructor takes the parts.

    Args:
      model: the encoder. Its parameters are read anew by each `encode`, so it may be trained in between.
      tokenizer: a `tokenizers.Tokenizer`. A copy without padding and truncated to `max_seq_length` is used.
      max_seq_length: the most tokens of a text, special tokens included; the rest is cut off.
      pooling: one or more of "cls", "max" and "mean"; the results of several are concatenated in the order given.
      normalize: whether embeddings are always scaled to length 1.
      prompt: text put before every text.

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
    ) -> None:
        unknown = [mode for mode in pooling if mode not in _POOLING_MODES]
        if unknown or not pooling:
            raise ValueError(f"SentenceEncoder: pooling must name some of {_POOLING_MODES}, got {tuple(pooling)}")
        special_tokens = tokenizer.num_special_tokens_to_add(is_pair=False)
        if max_seq_length <= special_tokens:
            raise ValueError(
                f"SentenceEncoder: max_seq_length must be above {special_tokens}, the number of special tokens that"
                f" the tokenizer adds, got {max_seq_length}"
            )
        self.model = model
        self.pooling = tuple(pooling)
        self.normalize = normalize
        self.prompt = prompt
        self._max_seq_length = max_seq_length
        # tokenizer.json files often come with padding and a truncation of their own, left from training.
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length=max_seq_length)
        self._lengths = _padded_lengths(max_seq_length)

        graphdef, state = nnx.split(model)
        treedef = jax.tree.structure(state)

        def embed(leaves: list[jax.Array], input_ids: jax.Array, lengths: jax.Array, normalize: bool) -> jax.Array:
            module = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            mask = jnp.arange(input_ids.shape[1], dtype=lengths.dtype) < lengths[:, None]
            hidden = module(input_ids, mask).last_hidden_state
            pooled = _pool(hidden.astype(jnp.float32), mask, self.pooling)
            return _l2_normalize(pooled) if normalize else pooled

        self._embed = jax.jit(embed, static_argnums=3)

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
    ) -> "SentenceEncoder":
        """Reads a folder in the layout of sentence-transformers, or of transformers (then with mean pooling).

        Read are modules.json (a Transformer, a Pooling and optionally a Normalize module), the pooling's config.json
        (cls, max and mean, alone or together), sentence_bert_config.json (`max_seq_length`, `do_lower_case`), the
        default prompt of config_sentence_transformers.json, and tokenizer.json or else a BERT vocab.txt. The number
        of tokens is limited by `max_seq_length` (or else the tokenizer's `model_max_length`) and by the positions
        that the model has.

        Args:
          folder_or_id: a folder, or a model's id on Hugging Face.
          revision, cache_dir, local_files_only: for an id, as in `huggingface_hub.snapshot_download`.
          dtype: float32, float16 or bfloat16, of the parameters and of the arithmetic. Embeddings are always float32.
          implementation: passed to every op; None picks the fastest for the device.

        Raises:
          CheckpointError: a file is missing or malformed, or asks for something that is not supported, for example
            a Dense module; the message names the file.
          TypeError: `folder_or_id` is not a string or path.
        """
        folder = checkpoint.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        layout = _read_layout(folder)
        model = BertModel.from_pretrained(layout.transformer, dtype=dtype, implementation=implementation)
        limit = min(layout.max_seq_length or sys.maxsize, model.config.max_sequence_length)
        tokenizer = _load_tokenizer(layout.transformer, layout.do_lower_case)
        largest_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest_id >= model.config.vocab_size:
            # Its texts would come out as NaN, hours into the work perhaps.
            raise CheckpointError(
                f"{layout.transformer}: the tokenizer has ids up to {largest_id}, the model's vocab_size is only"
                f" {model.config.vocab_size}"
            )
        try:
            return cls(
                model,
                tokenizer,
                max_seq_length=limit,
                pooling=layout.pooling,
                normalize=layout.normalize,
                prompt=layout.prompt,
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
        return self._token_ids(_as_texts(sentences))

    def encode(
        self,
        sentences: str | Sequence[str] | np.ndarray,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        convert_to_numpy: bool = True,
    ) -> np.ndarray | jax.Array:
        """Computes the embeddings of texts.

        Texts are tokenised 8,192 at a time, sorted by length and cut into batches of `batch_size`. A batch is padded
        to the next of the lengths 16, 32, 48, 64, 96, 128, 192, 256, ... (powers of two and 1.5 times powers of two,
        and at the end `max_seq_length`); the last batch of a call is padded to a power of two of rows, at most
        `batch_size`. So for one `batch_size` there are at most (number of lengths) * (2 + log2(batch_size)) compiled
        programs however many calls are made: one a length in long work, and few others. Results do not depend on the
        other texts of a batch, but for the rounding of different matrix shapes.

        Args:
          sentences: one text, or a sequence of texts (a NumPy array of strings is one too).
          batch_size: texts computed at a time.
          show_progress_bar: whether stderr shows progress; None: for more than 1,000 texts on a terminal.
          normalize_embeddings: scale each embedding to length 1. Folders with a Normalize module always do.
          convert_to_numpy: whether to return a NumPy array; else a JAX array on the default device.

        Returns:
          float32 `[len(sentences), D]` in the order of `sentences`; `[D]` for a single text.

        Raises:
          TypeError: `sentences` or one of its items is not a string (the item's index and type are named).
          ValueError: `batch_size` is not a positive integer, or a text is not valid Unicode.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(f"encode: batch_size must be a positive integer, got {batch_size!r}")
        texts = _as_texts(sentences)
        normalize = self.normalize or normalize_embeddings
        leaves = jax.tree.leaves(nnx.state(self.model))
        embeddings = np.empty((len(texts), self.embedding_dimension), np.float32)
        in_flight: deque[tuple[np.ndarray, jax.Array]] = deque()

        with _progress_bar(len(texts), show_progress_bar) as bar:

            def read_oldest() -> None:
                rows, result = in_flight.popleft()
                embeddings[rows] = np.asarray(result)[: len(rows)]
                bar.update(len(rows))

            for rows, input_ids, lengths in self._batches(texts, int(batch_size)):
                in_flight.append((rows, self._embed(leaves, input_ids, lengths, normalize)))
                if len(in_flight) > _IN_FLIGHT:
                    read_oldest()
            while in_flight:
                read_oldest()

        result = embeddings[0] if isinstance(sentences, str) else embeddings
        return result if convert_to_numpy else jnp.asarray(result)

    def _batches(self, texts: list[str], batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields (positions in `texts` `[n]`, input ids `[rows, length]`, lengths `[rows]`) with rows >= n."""
        chunk_size = batch_size * max(1, _CHUNK // batch_size)  # only the very last batch is a partial one
        for start, chunk in self._tokenized_chunks(texts, chunk_size):
            sizes = np.array([len(ids) for ids in chunk], np.int32)
            order = np.argsort(-sizes, kind="stable")  # longest first, so that what takes most memory comes first
            for first in range(0, len(chunk), batch_size):
                members = order[first : first + batch_size]
                rows = min(batch_size, 1 << (len(members) - 1).bit_length())
                length = next(length for length in self._lengths if length >= sizes[members[0]])
                input_ids = np.full((rows, length), self.model.config.pad_token_id, np.int32)
                for row, member in enumerate(members):
                    input_ids[row, : sizes[member]] = chunk[member]
                lengths = np.ones(rows, np.int32)  # rows of padding: one token, to keep their arithmetic finite
                lengths[: len(members)] = sizes[members]
                yield start + members, input_ids, lengths

    def _tokenized_chunks(self, texts: list[str], chunk_size: int) -> Iterator[tuple[int, list[list[int]]]]:
        """Yields (start, token ids of `texts[start : start + chunk_size]`), a thread being one chunk ahead."""

        def tokens(start: int) -> list[list[int]]:
            return self._token_ids(texts[start : start + chunk_size])

        chunk = tokens(0)
        with ThreadPoolExecutor(max_workers=1) as thread:
            for start in range(0, len(texts), chunk_size):
                following = start + chunk_size
                coming = thread.submit(tokens, following) if following < len(texts) else None
                yield start, chunk
                if coming is not None:
                    chunk = coming.result()

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        prompted = [self.prompt + text for text in texts] if self.prompt else texts
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(prompted)]


def _as_texts(sentences: Any) -> list[str]:
    if isinstance(sentences, str):
        sentences = [sentences]
    is_array = isinstance(sentences, np.ndarray) and sentences.ndim > 0
    if not is_array and (isinstance(sentences, bytes) or not isinstance(sentences, Sequence)):
        raise TypeError(f"encode: sentences must be a str or a sequence of str, got {type(sentences).__name__}")
    texts = list(sentences)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"encode: sentences[{index}] must be a str, got {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"encode: sentences[{index}] is not valid Unicode: {error.reason}") from error
    return texts


def _padded_lengths(limit: int) -> tuple[int, ...]:
    """The lengths that batches are padded to: 16, 32, 48, 64, 96, 128, 192, ... below `limit`, and `limit`."""
    lengths, power = [16], 32
    while lengths[-1] < limit:
        lengths += [power, power + power // 2]
        power *= 2
    return (*(length for length in lengths if length < limit), limit)


def _pool(hidden: jax.Array, mask: jax.Array, modes: tuple[str, ...]) -> jax.Array:
    """`hidden` float32 `[B, T, D]`, `mask` bool `[B, T]` -> float32 `[B, D * len(modes)]`; no token at all gives 0."""
    count = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None]
    mask = mask[:, :, None]
    pooled = {
        "cls": lambda: hidden[:, 0],
        "max": lambda: jnp.max(hidden, axis=1, where=mask, initial=-jnp.inf),
        "mean": lambda: jnp.sum(hidden, axis=1, where=mask) / jnp.maximum(count, 1).astype(hidden.dtype),
    }
    return jnp.concatenate([jnp.where(count > 0, pooled[mode](), 0.0) for mode in modes], axis=-1)


def _l2_normalize(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _progress_bar(total: int, show: bool | None) -> "tqdm":
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    if show is None:
        show = total > _LONG_WORK and terminal
    # In a log file every update is a new piece of text, so they come far apart.
    return tqdm(total=total, unit="text", disable=not show, mininterval=0.1 if terminal else 10.0)


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
    settings_file = transformer / "sentence_bert_config.json"
    settings = _read_settings(settings_file)
    max_seq_length = settings.get("max_seq_length")
    if max_seq_length is None:
        # Newer sentence-transformers keep the limit here. 10**30 stands for "none".
        settings_file = transformer / "tokenizer_config.json"
        max_seq_length = _read_settings(settings_file).get("model_max_length")
    if max_seq_length is not None:
        is_number = isinstance(max_seq_length, int | float) and not isinstance(max_seq_length, bool)
        if not is_number or not max_seq_length >= 1:  # NaN, which Python reads from JSON, is not
            raise CheckpointError(
                f"{settings_file}: the maximum length must be a number of at least 1, got {max_seq_length!r:.80}"
            )
    return _Layout(
        transformer=transformer,
        pooling=pooling,
        normalize=normalize,
        max_seq_length=None if max_seq_length is None else int(min(max_seq_length, sys.maxsize)),
        do_lower_case=bool(settings.get("do_lower_case", False)),
        prompt=_read_default_prompt(folder / "config_sentence_transformers.json", include_prompt),
    )


def _read_modules(file: Path) -> dict[str, Path]:
    """modules.json -> the folder of each module, by the last component of its type."""
    modules: dict[str, Path] = {}
    entries = checkpoint.read_json(file)
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
    config = checkpoint.read_json_object(file)
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
    config = _read_settings(file)
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


def _load_tokenizer(folder: Path, do_lower_case: bool) -> "Tokenizer":
    from tokenizers import Tokenizer, normalizers

    file, vocab = folder / "tokenizer.json", folder / "vocab.txt"
    if file.exists():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a tokenizer of the tokenizers library: {error}") from error
    elif vocab.exists():
        tokenizer = _bert_tokenizer(vocab)
    else:
        raise CheckpointError(f"{folder}: no tokenizer: neither tokenizer.json nor vocab.txt is there")
    if do_lower_case:
        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return tokenizer


def _bert_tokenizer(vocab: Path) -> "Tokenizer":
    """BERT's WordPiece tokenizer, for old folders that have only its vocabulary (one token a line)."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    try:
        tokenizer = Tokenizer(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{vocab}: not a vocabulary of one token a line: {error}") from error
    missing = [token for token in special if tokenizer.token_to_id(token) is None]
    if missing:
        raise CheckpointError(f"{vocab}: not a BERT vocabulary: {', '.join(missing)} missing")
    config_file = vocab.with_name("tokenizer_config.json")
    config = _read_settings(config_file)

    def option(name: str, default: bool | None) -> Any:
        value = config.get(name)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{config_file}: {name} must be true, false or null, got {value!r:.80}")
        return default if value is None else value

    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=option("tokenize_chinese_chars", True),
        strip_accents=option("strip_accents", None),
        lowercase=option("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


def _read_settings(file: Path) -> dict[str, Any]:
    """The object in `file`; {} where there is no such file."""
    return checkpoint.read_json_object(file) if file.exists() else {}
