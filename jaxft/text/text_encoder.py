"""Base class of the encoders of single texts: loading, prompts, lengths and batches, which all of them share."""

import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from jax.typing import DTypeLike

from jaxft import compilation_cache, dispatch
from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.models.bundled import Bundled
from jaxft.models.config import BertConfig
from jaxft.models.float8 import check_load_options
from jaxft.ops import checks
from jaxft.text import arguments, batching, exported, long_texts, module_files, processes, writing
from jaxft.text import inputs as text_inputs
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Bucket, Tokens
from jaxft.text.devices import Arguments, Dealer, import_mosaic_gpu
from jaxft.text.inputs import Inputs, Part
from jaxft.text.long_texts import LongTexts
from jaxft.text.processes import Processes

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_LONG = 1 << 16  # characters; a longer text may take much memory in each process at once
_SHORT = 1 << 13  # characters; a table of words tokenises such a text faster than the tokenizers library
_MANY = 8192  # processes start once an encoder has seen this number of texts in chunks that processes may tokenise
_OWN_PROMPTS = {"query": None, "document": None}
_log = logging.getLogger("jaxft")
TASKS = {"query": ("query",), "document": ("document", "passage", "corpus")}  # the names of their prompts


def name_of(task: Any) -> str:
    """Returns the name of the method that passes a task to `encode`."""
    return f"encode_{task}" if isinstance(task, str) and task in TASKS else "encode"


class Files(NamedTuple):
    """Files of a checkpoint that have been read, except for its weights."""

    folder: Path
    layout: module_files.Layout
    settings: tokenizer_files.Settings

    def limit(self, config: BertConfig, tokenizer: "Tokenizer", owner: str, *, is_pair: bool = False) -> int:
        """Returns the maximum number of tokens that the files name, or the most that the model takes.

        Raises a CheckpointError that names the file and the field if there is no room for a token.
        """
        settings, field = self.settings, "max_seq_length"
        limit, file = self.layout.max_seq_length, self.layout.sources.get(field)
        if limit is None:
            field = settings.max_length_field
            limit, file = settings.max_length or sys.maxsize, settings.file_of(field)
            if limit > config.max_position_embeddings:
                field, file = "max_position_embeddings", settings.folder / "config.json"
                limit = config.max_position_embeddings
        limit = self.fitted(limit, config)
        self.check_room(tokenizer, limit, file, field, owner, is_pair=is_pair)
        return limit

    def check_room(
        self, tokenizer: "Tokenizer", length: int, file: Path | None, field: str, owner: str, *, is_pair: bool = False
    ) -> None:  # fmt: skip
        """Raises a CheckpointError if a length, a field of a file, leaves no room for a token."""
        try:
            tokenizer_files.check_room(tokenizer, length, is_pair=is_pair, owner=owner, argument=field)
        except ValueError as error:
            of_tokenizer = isinstance(error, CheckpointError) or file is None
            raise CheckpointError(f"{self.folder if of_tokenizer else file}: {error}") from error

    def fitted(self, limit: int, config: BertConfig) -> int:
        """Returns a limit of the files, or the most that the model takes if that is less, with a log line."""
        if limit > config.most_tokens:
            _log.warning(
                "%s: texts are cut after %d tokens, the positions of the model, though its files say %d",
                self.folder, config.most_tokens, limit,
            )  # fmt: skip
        return min(limit, config.most_tokens)


def read_files(
    folder_or_id: str | os.PathLike[str], read: Callable[[Path], module_files.Layout], *, revision: str | None,
    cache_dir: str | os.PathLike[str] | None, local_files_only: bool, dtype: DTypeLike | None,
    implementation: str | None, quantization: Any,
) -> Files:  # fmt: skip
    """Finds or downloads a checkpoint and reads it. `read` reads the folder's layout.

    Checks the options of the model first.

    If a model with this `implementation` has kernels and no programs are stored or exported, a thread starts to import
    what tracing the first program needs.
    """
    check_load_options(dtype, None, implementation, quantization)
    folder = checkpoint_files.resolve(
        folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
    )
    layout = read(folder)
    if implementation != "xla" and compilation_cache.is_empty() and not (folder / exported.FILE).exists():
        import_mosaic_gpu(dispatch.device())
    return Files(folder, layout, tokenizer_files.Settings(layout.transformer))


def _are_plain(texts: Sequence[Any]) -> bool:
    """Tells whether texts, or pairs, are fit for another process: no subclasses of str, and none is very long."""
    strings = texts if isinstance(texts[0], str) else [*itertools.chain.from_iterable(texts)]
    return {*map(type, strings)} == {str} and max(map(len, strings)) <= _LONG


class Texts:
    """Tokenises and batches texts, or pairs of texts, of at most `limit` tokens."""

    def __init__(
        self, tokenizer: "Tokenizer", model: BertModel, limit: int, *, token_types: bool, packed: bool, owner: str,
        argument: str = "max_seq_length", is_pair: bool = False,
    ) -> None:  # fmt: skip
        config = model.config
        self.tokenizer = tokenizer_files.truncating(
            tokenizer, limit, config, is_pair=is_pair, token_types=token_types, owner=owner, argument=argument
        )
        self.long_texts, self._vocab_size = LongTexts(self.tokenizer, is_pair=is_pair), config.vocab_size
        self._padding: dict[str, Any] = {}
        self._processes: Processes | None = None
        self._seen, self._guard = 0, threading.Lock()  # number of texts that processes may tokenise
        self.batcher = batching.Batcher(
            limit=limit, padding=config.pad_token_id, packed=packed,
            with_types=is_pair and token_types and config.type_vocab_size > 1,
            characters=(lambda pair: sum(map(len, pair))) if is_pair else len,
        )  # fmt: skip

    def pad(self, length: int, token: str, type_id: int | None) -> None:
        """Adds a token to texts of fewer than `length` tokens. With `type_id`, batches get type ids, which mark it."""
        pad_id = self.tokenizer.token_to_id(token)
        self._padding = {"length": length, "pad_id": pad_id, "pad_token": token, "pad_type_id": type_id or 0}
        self.batcher.with_types = type_id is not None

    def encodings(self, prompt: str, texts: Sequence[Any]) -> "Iterator[Encoding]":
        """Tokenises texts, or pairs, after a prompt."""
        return long_texts.encodings(self.long_texts, self._padding, prompt, texts)

    def tokens(self, prompt: str, texts: Sequence[Any], stays: bool) -> "Tokens | Iterator[Encoding]":
        """Tokenises texts, or pairs, after a prompt. After many texts, starts processes, which then tokenise.

        If `stays` is true, this process tokenises.
        """
        if stays and len(texts) == 1 and type(texts[0]) is str and len(texts[0]) <= _SHORT:
            settings = self.long_texts, self._padding, self.batcher.with_types
            return Tokens.of_arrays(*long_texts.tokenised(*settings, prompt, texts))  # by a table of words
        if stays or not _are_plain(texts):
            return self.encodings(prompt, texts)
        with self._guard:
            self._seen += len(texts)
            if self._processes is None and self._seen >= _MANY:
                settings = self.long_texts, self._padding, self.batcher.with_types
                count = 0 if dispatch.platform() == "cpu" else processes.suitable()
                self._processes = Processes(functools.partial(long_texts.tokenised, *settings), count)
        found = self._processes(prompt, texts) if self._processes else None
        self.batcher.helpers = self._processes.ready if self._processes else 0
        return self.encodings(prompt, texts) if found is None else Tokens.of_arrays(*found)

    def checked(self, where: str, parts: Iterable[Part]) -> Iterator[Part]:
        """Yields the parts. It checks token ids, and adds type ids or the tokens of `pad`. Texts stay as they are."""
        first = 0
        for part in parts:
            yield self._checked(where, part, first) if isinstance(part, Tokens) else part
            first += len(part)

    def _checked(self, where: str, texts: Tokens, first: int) -> Tokens:
        lengths, limit = texts.lengths, self.batcher.limit
        if len(wrong := np.flatnonzero(lengths > limit)):
            name = f"{where}: inputs[{first + wrong[0]}]"
            raise ValueError(f"{name} must have at most {limit} token ids, got {lengths[wrong[0]]}")
        if len(wrong := np.flatnonzero(texts.ids >= self._vocab_size)):
            name = f"{where}: inputs[{first + np.searchsorted(texts.begins, wrong[0], side='right') - 1}]"
            raise ValueError(f"{name} must have token ids below {self._vocab_size}, got {texts.ids[wrong[0]]}")
        if not self._padding:
            return self._with_types_of_pairs(texts) if self.batcher.with_types else texts
        begins = np.append(0, np.cumsum(np.maximum(lengths, self._padding["length"])))
        kept = np.arange(len(texts.ids)) + np.repeat(begins[:-1] - texts.begins[:-1], lengths)
        ids = np.full(begins[-1], self._padding["pad_id"], np.int32)
        ids[kept] = texts.ids
        if not self.batcher.with_types:
            return Tokens(begins, ids, None)
        types = np.full(begins[-1], self._padding["pad_type_id"], np.int32)
        types[kept] = 0
        return Tokens(begins, ids, types)

    def _with_types_of_pairs(self, pairs: Tokens) -> Tokens:
        """Adds type ids: 1 after the token that ends the first text, if the tokenizer has type ids."""
        types = np.zeros_like(pairs.ids)
        nothing = self.tokenizer.encode("", "")
        if 1 in nothing.type_ids[1:]:
            is_end = pairs.ids == nothing.ids[nothing.type_ids.index(1) - 1]
            ends = np.append(0, np.cumsum(is_end))
            types[:] = ends[:-1] > np.repeat(ends[pairs.begins[:-1]], pairs.lengths)
        return Tokens(pairs.begins, pairs.ids, types)


class TextEncoder:
    """A model with its tokenizer and prompts. A subclass adds `encode` and the model, which has an `encoder`."""

    _SIMILARITY: ClassVar[str]  # name of the default function
    from_pretrained: ClassVar[Callable[..., Any]]
    _given: Any  # returns the arguments of `_embed` for a batch, if they do not depend on arguments of `encode`
    _embed: Any  # the jitted function of the model's arrays and a batch

    def __init__(
        self,
        embedder: Any,
        tokenizer: "Tokenizer",
        *,
        max_seq_length: int | None,
        prompts: Mapping[str, str] | None,
        default_prompt_name: str | None,
        similarity_fn_name: str | None,
        token_types: bool,
        packed: bool | None,
    ) -> None:
        owner = type(self).__name__
        arguments.check_flags(owner, token_types=token_types, packed=packed)
        self.embedder, self.tokenizer = embedder, tokenizer
        self.similarity_fn_name = similarity_fn_name
        self.prompts = arguments.merged_prompts(owner, _OWN_PROMPTS, prompts, {})
        self.default_prompt_name = default_prompt_name
        arguments.check_prompts(owner, self.prompts, default_prompt_name)
        self._token_types = token_types
        implementation = self.model.embeddings.options.implementation
        self._packed = batching.packs(implementation) if packed is None else packed
        self._origin = writing.Origin()
        self._task_lengths: dict[str, int] = {}  # maximum numbers of tokens of queries and documents, from a checkpoint
        self.max_seq_length = max_seq_length
        self._bundled = Bundled(implementation)
        self._dealer = Dealer(self._bundled)

    @classmethod
    def _load(
        cls,
        folder_or_id: str | os.PathLike[str],
        read: Callable[[Path], module_files.Layout],
        parts: Callable[[module_files.Layout], dict[str, Any]],
        *,
        revision: str | None,
        cache_dir: str | os.PathLike[str] | None,
        local_files_only: bool,
        max_seq_length: int | None,
        prompts: Mapping[str, str] | None,
        default_prompt_name: str | None,
        similarity_fn_name: str | None,
        dtype: DTypeLike | None,
        implementation: str | None,
        quantization: Any,
        packed: bool | None,
    ) -> Self:
        """Loads an encoder. `read` reads the folder's layout; `parts` returns the constructor's other arguments."""
        files = folder, layout, settings = read_files(
            folder_or_id, read, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only, dtype=dtype,
            implementation=implementation, quantization=quantization,
        )  # fmt: skip
        own = parts(layout)
        config = own["model"].config
        may_pad_left = layout.query_expansion is None and not config.positions_count_padding
        tokenizer = tokenizer_files.load(settings, layout.do_lower_case, may_pad_left=may_pad_left)
        tokenizer_files.keep_whole(tokenizer, layout.markers)
        if max_seq_length is None:
            max_seq_length = files.limit(config, tokenizer, cls.__name__)
        for task, length in layout.task_lengths.items():
            field = f"{task}_length"
            files.check_room(tokenizer, length, layout.sources.get(field), field, cls.__name__)
        try:
            encoder = cls(
                tokenizer=tokenizer,
                max_seq_length=max_seq_length,
                prompts=arguments.merged_prompts("from_pretrained", _OWN_PROMPTS, prompts, layout.prompts),
                default_prompt_name=layout.default_prompt_name if default_prompt_name is None else default_prompt_name,
                similarity_fn_name=layout.similarity_fn_name if similarity_fn_name is None else similarity_fn_name,
                token_types=settings.token_types,
                packed=packed,
                **own,
            )
            encoder._task_lengths = {task: files.fitted(n, config) for task, n in layout.task_lengths.items()}
            encoder._origin = writing.read_origin(folder_or_id, folder, settings)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        return encoder

    @classmethod
    def from_exported(cls, path: str | os.PathLike[str]) -> Self:
        """Loads a folder that `export` has written, and computes by its programs, without tracing the model.

        A program is compiled when a shape first occurs. The encoder has the methods of one from `from_pretrained`, but
        only programs for the shapes and options that were exported.

        Load folders only from sources that you trust: a program may run any code that XLA can call.

        Args:
          path: the folder.

        Returns:
          The encoder.

        Raises:
          CheckpointError: the folder was not exported from this class, or with another version of jaxft, JAX or jaxlib,
            or for another device, or a file is missing or was changed; the message names it.
          ImportError: flatbuffers is not installed.
          TypeError: `path` is not a string or path.
        """
        record = exported.read(path, cls)
        encoder: Self = cls.from_pretrained(path, **record["load"])
        encoder._embed = exported.Programs(path, record)
        return encoder

    def export(
        self, path: str | os.PathLike[str], *, batch_size: int = 32, show_progress_bar: bool | None = None
    ) -> None:
        """Writes the folder of `save_pretrained` with a program for each batch shape, for `from_exported`.

        `SentenceEncoder.export` describes the programs.

        Args:
          path: see `SentenceEncoder.export`.
          batch_size: see `SentenceEncoder.export`.
          show_progress_bar: see `SentenceEncoder.export`.

        Raises:
          TypeError: see `SentenceEncoder.export`.
          NotADirectoryError: `path` is a file.
          ValueError: see `SentenceEncoder.export`.
        """
        self._export(path, [self._given], batch_size, show_progress_bar)

    def save_pretrained(self, folder: str | os.PathLike[str], **others: Any) -> None:
        """Writes a folder that `from_pretrained` and sentence-transformers load, with the same embeddings.

        The folder gets the files of the encoder, of the modules and of the tokenizer, prompts, `similarity_fn_name`,
        `max_seq_length`, the encoder's other settings, and a model card, README.md. The card keeps licence, language
        and base model of the folder that this encoder was loaded from. Parameters are saved in their dtype. All files
        are complete before one of them gets its final name. Modules and tokenizer files of an earlier save are removed;
        other files in the folder stay. Folders of PyLate and Stanford become folders of sentence-transformers.

        Only jaxft loads a folder of a model in float8.

        Args:
          folder: folder of the files. It is created if it does not exist.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Raises:
          TypeError: `folder` is not a string or path, or an argument is one of sentence-transformers only.
          NotADirectoryError: `folder` is a file.
          ValueError: the parameters have no values yet, or a parameter has NaN or infinite values.
        """
        arguments.refuse("save_pretrained", others)
        self._write(folder)

    def _write(self, folder: str | os.PathLike[str], **own: Any) -> None:
        """Writes the folder of `save_pretrained`, to which `export` adds the files `exported`."""
        raise NotImplementedError

    def _export(
        self, path: str | os.PathLike[str], variants: Sequence[Arguments], batch_size: int,
        show_progress_bar: bool | None, **options: Any,
    ) -> None:  # fmt: skip
        """Writes the folder of `export`. See `exported.contents` for the arguments."""
        self._write(path, exported=exported.contents(
            type(self).__name__, path, self._embed, self.embedder,
            [self._texts(task).batcher for task in (None, *TASKS)], variants, batch_size=batch_size,
            packed=self._packed, options=options, show_progress_bar=show_progress_bar,
        ))  # fmt: skip

    @property
    def model(self) -> BertModel:
        """The encoder, `embedder.encoder`."""
        return self.embedder.encoder

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a text, special tokens included. Longer texts are truncated. It may be set.

        Setting it raises a ValueError if it leaves no room for a token or exceeds the number of positions of the model
        (without a table of positions, 2**20). None sets `max_position_embeddings`, or fewer where the model has fewer.
        """
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        config = self.model.config
        value = config.max_sequence_length if value is None else value
        value = tokenizer_files.checked_limit(type(self).__name__, "max_seq_length", value, config)
        self._by_length = {value: self._texts_of(value)}
        self._max_seq_length = value

    @property
    def similarity_fn_name(self) -> str:
        """Name of the function of `similarity` and `similarity_pairwise`. It may be set; None sets the default."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, value: str | None) -> None:
        self._similarity_fn_name = self._similarity_name(self._SIMILARITY if value is None else value)

    def _similarity_name(self, name: Any) -> str:
        """Returns the name of a similarity that this class has. Raises a ValueError for others."""
        raise NotImplementedError

    def get_embedding_dimension(self) -> int:
        """Returns `embedding_dimension`, as the method of sentence-transformers."""
        return self.embedding_dimension

    @property
    def embedding_dimension(self) -> int:
        """Length of an embedding."""
        return self.embedder.embedding_dimension

    def tokenize(
        self, inputs: str | Iterable[str], *, prompt_name: str | None = None, prompt: str | None = None
    ) -> list[list[int]]:
        """Computes the token ids of each text as the model gets them: with prompt and special tokens, truncated.

        Args:
          inputs: one text, or an iterable of texts.
          prompt_name: see `encode`.
          prompt: see `encode`.

        Returns:
          A list with the token ids of each text, not padded. A single text gives a list of one list.

        Raises:
          TypeError: see `encode`.
          ValueError: a text is not valid Unicode or cannot be tokenised, or there is no prompt of that name.
        """
        texts = batching.as_texts("tokenize", "inputs", inputs)
        prompt = arguments.chosen_prompt("tokenize", self.prompts, self.default_prompt_name, prompt, prompt_name)
        of_texts = self._by_length[self.max_seq_length]
        return [
            chunk.ids[begin:end].tolist()
            for _, chunk in of_texts.batcher.tokenised(texts, functools.partial(of_texts.tokens, prompt))
            for begin, end in itertools.pairwise(chunk.begins)
        ]

    def encode(self, inputs: str | Iterable[str] | None = None, **options: Any) -> Any:
        """Computes the embeddings of texts."""
        raise NotImplementedError

    def encode_iter(self, inputs: Iterable[Any], *, chunk_size: int = 65_536, **options: Any) -> Generator[Any]:
        """Computes the embeddings of any number of texts, a chunk at a time, in constant memory.

        Reads the texts about three chunks ahead of the result, and up to 32 batches more while a program is compiled.
        While the caller works on a result, the devices compute the batches that are queued. `encode` gives the same
        embeddings, to the bit, for the texts of a chunk alone.

        Args:
          inputs: an iterable of texts, or of the token ids of texts. It may be endless.
          chunk_size: number of texts of a chunk. A chunk has fewer texts if they have more than 67 million characters.
          **options: the keyword arguments of `encode`. `show_progress_bar=None` shows none.

        Returns:
          A generator of results, see `encode`: one for each chunk, in the order of `inputs`.

        Raises:
          TypeError: see `encode`.
          ValueError: as for `encode`, or `chunk_size` is not a positive integer. The index that a message names counts
            the texts of all chunks.
          jax.errors.JaxRuntimeError: see `encode`.
        """
        if not (checks.is_natural(chunk_size) and chunk_size > 0):
            raise ValueError(f"encode_iter: chunk_size must be a positive integer, got {chunk_size!r:.80}")
        parts = text_inputs.chunks("encode_iter", "inputs", inputs, int(chunk_size))
        chunks: Any = Inputs(parts, are_chunks=True)
        return self.encode(chunks, **options)

    def encode_query(self, inputs: str | Iterable[str] | None = None, **options: Any) -> Any:
        """Computes the embeddings of queries: `encode` for the task "query".

        If the call names no prompt, queries get the prompt "query".

        Args:
          inputs: see `encode`.
          **options: the keyword arguments of `encode`.

        Returns:
          See `encode`.

        Raises:
          TypeError: see `encode`.
          ValueError: see `encode`.
          jax.errors.JaxRuntimeError: see `encode`.
        """
        return self.encode(inputs, **self._task_options("query", options))

    def encode_document(self, inputs: str | Iterable[str] | None = None, **options: Any) -> Any:
        """Computes the embeddings of documents: `encode` for the task "document".

        If the call names no prompt, documents get the first of the prompts "document", "passage", "corpus". As in
        sentence-transformers, every encoder has a prompt "document", which is "" unless something sets it.

        Args:
          inputs: see `encode`.
          **options: the keyword arguments of `encode`.

        Returns:
          See `encode`.

        Raises:
          TypeError: see `encode`.
          ValueError: see `encode`.
          jax.errors.JaxRuntimeError: see `encode`.
        """
        return self.encode(inputs, **self._task_options("document", options))

    def warmup(
        self, *, batch_size: int = 32, show_progress_bar: bool | None = None, devices: Any = None, **options: Any
    ) -> None:  # fmt: skip
        """Compiles all programs that calls of `encode` with these options need, several at a time.

        Afterwards no call with these options compiles, whatever its texts. `use_compilation_cache` makes the programs
        last beyond this process. On a GPU, each program also runs once.

        Packed batches need one program for each of `buckets(batch_size)`. Padded batches need one for each length and
        each number of texts, see `encode`. Another `batch_size`, `normalize_embeddings`, `truncate_dim`, `precision`
        or `output_value`, a task with a limit of its own, and a prompt that takes no part in the pooling need other
        programs.

        Args:
          batch_size: the `batch_size` of the calls.
          show_progress_bar: whether to show progress on stderr. None shows it if stderr is a terminal.
          devices: the `devices` of the calls. None takes the devices of calls with many texts.
          **options: other keyword arguments of the calls, for example `normalize_embeddings`. With `task`, the calls
            are `encode_query` or `encode_document`.

        Raises:
          TypeError: see `encode`.
          ValueError: see `encode`.
          jax.errors.JaxRuntimeError: a program cannot be compiled, or the memory of the device does not suffice.
        """
        inputs: Any = Inputs([[]], are_shapes=True)
        if options.get("task") in TASKS:
            options = self._task_options(options.pop("task"), options)
        self.encode(
            inputs, batch_size=batch_size, show_progress_bar=show_progress_bar, devices=devices, **options
        )  # fmt: skip

    def buckets(self, batch_size: int = 32) -> list[Bucket]:
        """Returns the shapes of packed batches. A program is compiled when a shape first occurs.

        Args:
          batch_size: the `batch_size` of `encode`.

        Returns:
          The shapes; an empty list if batches are padded.

        Raises:
          ValueError: `batch_size` is not a positive integer.
        """
        return batching.buckets(batch_size, self.max_seq_length) if self._packed else []

    def _start(
        self, given: Any, prompt: str | None, prompt_name: str | None, batch_size: Any, task: Any,
        options: Sequence[tuple[str, Any, Sequence[Any]]] = (),
    ) -> tuple[Inputs, str, int]:  # fmt: skip
        """Checks arguments of `encode`. Returns the inputs, the prompt and the batch size."""
        batch_size = batching.check_batch_size("encode", batch_size)
        inputs = text_inputs.read("encode", "inputs", given)
        prompt = arguments.chosen_prompt("encode", self.prompts, self.default_prompt_name, prompt, prompt_name)
        for name, value, known in (*options, ("task", task, (None, *TASKS))):
            if value not in known:
                raise ValueError(f"encode: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        return inputs, prompt, batch_size

    def _texts(self, task: str | None) -> Texts:
        """Returns what tokenises and batches the texts of a task."""
        limit = self._task_lengths.get(str(task), self.max_seq_length)
        return self._by_length.get(limit) or self._by_length.setdefault(limit, self._texts_of(limit))

    def _texts_of(self, limit: int) -> Texts:
        return Texts(
            self.tokenizer, self.model, limit, token_types=self._token_types, packed=self._packed,
            owner=type(self).__name__,
        )  # fmt: skip

    def _compute(
        self, inputs: Inputs, prompt: str, task: str | None, batch_size: int, arguments: Arguments, devices: Any,
        finish: Callable[[Any], Any], show_progress_bar: bool | None, width: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Returns the finished results of the model for `inputs`, or an iterator of them if `inputs` has chunks.

        `arguments` are of the function `_embed`. See `Batcher.compute_parts`.
        """
        of_texts = self._texts(task)
        if inputs.are_shapes:
            lanes = self._dealer.lanes("warmup", devices, self.embedder, self._embed, arguments, one=False)
            blanks = of_texts.batcher.blanks(batch_size)
            return self._dealer.warm_up(lanes, blanks, show_progress_bar=show_progress_bar)
        parts: Iterable[Any] = of_texts.checked("encode", inputs.parts)
        parts = parts if inputs.are_chunks else [*parts]
        one = isinstance(parts, list) and len(parts[0]) == 1
        lanes = self._dealer.lanes("encode", devices, self.embedder, self._embed, arguments, one=one)
        found = of_texts.batcher.compute_parts(
            parts, functools.partial(of_texts.tokens, prompt), batch_size, lanes, model=self.embedder, width=width,
            unit="text", show_progress_bar=show_progress_bar, empty=inputs.empty, **options,
        )  # fmt: skip
        if inputs.are_chunks:
            return _finished(found, finish)
        (results,) = found
        return finish(results)

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that every encoder saves."""
        return {
            "prompts": self.prompts,
            "default_prompt_name": self.default_prompt_name,
            "similarity_fn_name": self.similarity_fn_name,
        }

    def _save(self, folder: str | os.PathLike[str], settings: dict[str, Any], **own: Any) -> None:
        writing.save(
            folder, self.embedder, self._by_length[self.max_seq_length].tokenizer, settings,
            token_types=self._token_types, max_length=self.max_seq_length, origin=self._origin,
            task_lengths=self._task_lengths, **own,
        )  # fmt: skip

    def _task_options(self, task: str, options: dict[str, Any]) -> dict[str, Any]:
        """Adds the task, and the prompt of the task if `options` has none."""
        arguments.refuse(name_of(task), {"task"} & {*options})
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options["prompt_name"] = next((name for name in TASKS[task] if name in self.prompts), None)
        return options | {"task": task}


def _finished(found: Generator[Any], finish: Callable[[Any], Any]) -> Generator[Any]:
    """Yields the finished results. Closing it ends the threads of `found`."""
    with contextlib.closing(found):
        yield from map(finish, found)
