"""SentenceEncoder: computes embeddings of texts, and reads checkpoints in the layout of sentence-transformers."""

import functools
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxft.checkpoint import files as checkpoint_files
from jaxft.checkpoint.files import CheckpointError
from jaxft.models.bert import BertModel
from jaxft.models.bundled import Bundled
from jaxft.models.embedding import EmbeddingModel, Module, Normalize
from jaxft.models.pooling import l2_normalize
from jaxft.ops import checks
from jaxft.ops.bundle import Rebuild
from jaxft.text import arguments, batching, module_files, writing
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch, Bucket
from jaxft.text.long_texts import LongTexts
from jaxft.text.quantization import PRECISIONS, as_ranges, quantize_embeddings
from jaxft.text.similarities import SIMILARITIES, similarity_name

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_OUTPUT_VALUES = ("sentence_embedding", "token_embeddings", None)
_OWN_PROMPTS = {"query": None, "document": None}
_TASKS = {"query": ("query",), "document": ("document", "passage", "corpus")}  # the names of their prompts


class _Texts:
    """Tokenises and batches texts of at most `limit` tokens."""

    def __init__(
        self, tokenizer: "Tokenizer", model: BertModel, limit: int, *, token_types: bool, packed: bool
    ) -> None:
        self.tokenizer = tokenizer_files.truncating(
            tokenizer, limit, model.config, token_types=token_types, owner="SentenceEncoder",
            argument="max_seq_length",
        )  # fmt: skip
        self.long_texts = LongTexts(self.tokenizer)
        self.batcher = batching.Batcher(limit=limit, padding=model.config.pad_token_id, packed=packed, characters=len)

    def encodings(self, prompt: str, texts: Sequence[str]) -> "Iterator[Encoding]":
        return self.long_texts.encodings([prompt + text for text in texts] if prompt else texts)


class SentenceEncoder:
    """A BERT encoder with its tokenizer and modules: computes embeddings of texts as sentence-transformers does.

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts.

    Args:
      model: the encoder. Each `encode` reads its current parameters, so the model may be trained between calls.
      tokenizer: a `tokenizers.Tokenizer`. The encoder uses a copy that does not pad and truncates to `max_seq_length`.
      max_seq_length: maximum number of tokens of a text, special tokens included. Longer texts are truncated. None
        takes the number of positions of the model.
      pooling: see `EmbeddingModel`.
      include_prompt: see `EmbeddingModel`.
      token_modules: see `EmbeddingModel`.
      modules: see `EmbeddingModel`.
      normalize: whether to add a `Normalize` module, so that `encode` always scales embeddings to length 1.
      prompts: texts by name. `encode` puts the text of one of them before every text.
      default_prompt_name: name of the prompt that `encode` takes if a call names none.
      truncate_dim: number of components of an embedding to keep, from the first on. None keeps all. The modules come
        before, `normalize_embeddings` of `encode` after.
      similarity_fn_name: "cosine", "dot", "euclidean" or "manhattan", the function of `similarity` and
        `similarity_pairwise`. None takes "cosine".
      token_types: whether the type ids of the tokenizer count. If so, an id other than 0 is not supported.
      packed: whether batches are packed, without padding. None packs if variable-length attention runs as a kernel, as
        on an NVIDIA GPU.
      **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

    Attributes:
      embedder: the `EmbeddingModel`.
      tokenizer: as the argument.
      prompts: dict of the prompts by name; it always has "query" and "document". It may be changed between calls.
      default_prompt_name: as the argument. It may be set between calls.

    Raises:
      TypeError: a prompt is not a string, `modules` has an object of another type, or an argument is one of
        sentence-transformers only; the message names its equivalent.
      ValueError: a pooling mode is unknown, `max_seq_length` leaves no room for a token or exceeds the positions of the
        model, `truncate_dim` is not a positive integer, `default_prompt_name` is not among the prompts,
        `similarity_fn_name` is unknown, or the model lacks a token id or type id of the tokenizer.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer: "Tokenizer",
        *,
        max_seq_length: int | None,
        pooling: str | Sequence[str] = ("mean",),
        include_prompt: bool = True,
        token_modules: Sequence[Module] = (),
        modules: Sequence[Module] = (),
        normalize: bool = False,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        truncate_dim: int | None = None,
        similarity_fn_name: str | None = None,
        token_types: bool = True,
        packed: bool | None = None,
        **others: Any,
    ) -> None:
        arguments.refuse("SentenceEncoder", others)
        self.truncate_dim = truncate_dim
        self.similarity_fn_name = similarity_fn_name
        self.embedder = EmbeddingModel(
            model, pooling=pooling, include_prompt=include_prompt, token_modules=token_modules,
            modules=[*modules, *[Normalize()] * normalize],
        )  # fmt: skip
        self.tokenizer = tokenizer
        self.prompts = arguments.merged_prompts("SentenceEncoder", _OWN_PROMPTS, prompts, {})
        self.default_prompt_name = default_prompt_name
        arguments.check_prompts("SentenceEncoder", self.prompts, default_prompt_name)
        self._token_types = token_types
        implementation = model.embeddings.options.implementation
        self._packed = batching.packs(implementation) if packed is None else packed
        self._origin = writing.Origin()
        self._task_lengths: dict[str, int] = {}  # maximum numbers of tokens of queries and documents, from a checkpoint
        self.max_seq_length = max_seq_length
        self._bundled = Bundled(implementation)

        def embed(
            arrays: list[jax.Array], input_ids: jax.Array, lengths: jax.Array, longest: int,
            last_steps: tuple[int | None, bool, bool], rebuild: Rebuild, prompt_length: jax.Array | None = None,
        ) -> Any:  # fmt: skip
            tokens, pooled = rebuild(arrays).with_tokens(
                input_ids, **batching.sequences(input_ids, lengths, longest), prompt_lengths=prompt_length,
                deterministic=True,
            )  # fmt: skip
            width, normalizes, with_tokens = last_steps
            pooled = pooled[:, :width]
            pooled = l2_normalize(pooled) if normalizes else pooled
            return (tokens, pooled) if with_tokens else pooled

        self._embed = jax.jit(embed, static_argnums=(3, 4, 5))

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        max_seq_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        truncate_dim: int | None = None,
        similarity_fn_name: str | None = None,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        packed: bool | None = None,
        **others: Any,
    ) -> "SentenceEncoder":
        """Loads a checkpoint in the layout of sentence-transformers, or of transformers (with mean pooling).

        The files of both libraries are read as they read them; docs/checkpoints.md lists each field. A setting that
        would change embeddings and is not supported is an error. A folder without modules.json gets mean pooling, which
        the log "jaxft" says.

        Args:
          folder_or_id: a folder, or the id of a model on Hugging Face.
          revision: see `BertModel.from_pretrained`.
          cache_dir: see `BertModel.from_pretrained`.
          local_files_only: see `BertModel.from_pretrained`.
          max_seq_length: maximum number of tokens of a text. None takes the limit of the files, or the number of
            positions that the model has if that is smaller.
          prompts: texts by name. They win over the prompts of the files, which are added.
          default_prompt_name: see the constructor. None takes the name in the files.
          truncate_dim: see the constructor. None takes the number in the files.
          similarity_fn_name: see the constructor. None takes the name in the files.
          dtype: float32, float16 or bfloat16, the dtype of parameters and computation of the encoder. Pooling and the
            modules after it compute in float32, and embeddings are always float32.
          implementation: passed to every op. None picks the fastest for the device.
          packed: whether batches are packed, see the constructor.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Returns:
          The encoder.

        Raises:
          CheckpointError: a file is missing or malformed, or asks for something that is not supported, for example a
            Router module; the message names the file. Or an argument does not fit the checkpoint.
          TypeError: `folder_or_id` is not a string or path, or an argument is one of sentence-transformers only; the
            message names its equivalent.
        """
        arguments.refuse("from_pretrained", others)
        folder = checkpoint_files.resolve(
            folder_or_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        layout = module_files.read_sentence_encoder(folder)
        model = BertModel.from_pretrained(layout.transformer, dtype=dtype, implementation=implementation)
        settings = tokenizer_files.Settings(layout.transformer)
        limit = layout.max_seq_length or settings.max_length or sys.maxsize
        limit = min(limit, model.config.max_sequence_length)
        tokenizer = tokenizer_files.load(settings, layout.do_lower_case)
        if similarity_fn_name is None and layout.similarity_fn_name in SIMILARITIES:
            similarity_fn_name = layout.similarity_fn_name  # sentence-transformers ignores other names, too
        try:
            encoder = cls(
                model,
                tokenizer,
                max_seq_length=limit if max_seq_length is None else max_seq_length,
                pooling=layout.pooling,
                include_prompt=layout.include_prompt,
                token_modules=layout.token_modules,
                modules=layout.modules,
                prompts=arguments.merged_prompts("from_pretrained", _OWN_PROMPTS, prompts, layout.prompts),
                default_prompt_name=layout.default_prompt_name if default_prompt_name is None else default_prompt_name,
                truncate_dim=layout.truncate_dim if truncate_dim is None else truncate_dim,
                similarity_fn_name=similarity_fn_name,
                token_types=settings.token_types,
                packed=packed,
            )
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        encoder._task_lengths = layout.task_lengths
        encoder._origin = writing.read_origin(folder_or_id, folder, settings)
        return encoder

    def save_pretrained(self, folder: str | os.PathLike[str], **others: Any) -> None:
        """Writes a folder that `from_pretrained` and sentence-transformers load, with the same embeddings.

        The folder gets the files of the encoder, of the modules and of the tokenizer, prompts, `similarity_fn_name`,
        `truncate_dim`, `max_seq_length`, and a model card, README.md. The card keeps licence, language and base model
        of the folder that this encoder was loaded from. Parameters are saved in their dtype. All files are complete
        before one of them gets its final name. Modules and tokenizer files of an earlier save are removed; other files
        in the folder stay.

        Args:
          folder: folder of the files. It is created if it does not exist.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Raises:
          TypeError: `folder` is not a string or path, or an argument is one of sentence-transformers only.
          NotADirectoryError: `folder` is a file.
          ValueError: the parameters have no values yet.
        """
        arguments.refuse("save_pretrained", others)
        settings = {
            "model_type": "SentenceTransformer",
            "prompts": self.prompts,
            "default_prompt_name": self.default_prompt_name,
            "similarity_fn_name": self.similarity_fn_name,
            **({} if self.truncate_dim is None else {"truncate_dim": self.truncate_dim}),
        }
        writing.save(
            folder, self.embedder, self._by_length[self.max_seq_length].tokenizer, settings,
            token_types=self._token_types, max_length=self.max_seq_length, origin=self._origin,
            task_lengths=self._task_lengths,
        )  # fmt: skip

    @property
    def model(self) -> BertModel:
        """The encoder, `embedder.encoder`."""
        return self.embedder.encoder

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a text, special tokens included. Longer texts are truncated. It may be set.

        Setting it raises a ValueError if it leaves no room for a token or exceeds the number of positions of the model.
        None sets the number of positions.
        """
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        config = self.model.config
        value = config.max_sequence_length if value is None else value
        value = tokenizer_files.checked_limit("SentenceEncoder", "max_seq_length", value, config)
        self._by_length = {value: self._texts_of(value)}
        self._max_seq_length = value

    @property
    def truncate_dim(self) -> int | None:
        """Number of components of an embedding that `encode` keeps; None keeps all. It may be set."""
        return self._truncate_dim

    @truncate_dim.setter
    def truncate_dim(self, value: int | None) -> None:
        self._truncate_dim = _checked_width("SentenceEncoder", value)

    @property
    def similarity_fn_name(self) -> str:
        """Name of the function of `similarity` and `similarity_pairwise`. It may be set; None sets "cosine"."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, value: str | None) -> None:
        self._similarity_fn_name = similarity_name(
            "SentenceEncoder", "similarity_fn_name", "cosine" if value is None else value
        )

    @property
    def embedding_dimension(self) -> int:
        """Length D of an embedding, after truncation to `truncate_dim`."""
        width = self.embedder.embedding_dimension
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    def get_embedding_dimension(self) -> int:
        """Returns `embedding_dimension`, as the method of sentence-transformers."""
        return self.embedding_dimension

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
            for _, chunk in of_texts.batcher.tokenised(texts, functools.partial(of_texts.encodings, prompt))
            for begin, end in itertools.pairwise(chunk.begins)
        ]

    def encode(
        self,
        inputs: str | Iterable[str] | None = None,
        *,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str = "float32",
        ranges: ArrayLike | None = None,
        calibration: Any = None,
        convert_to_numpy: bool = True,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        task: str | None = None,
        **others: Any,
    ) -> Any:
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
          inputs: one text, or any iterable of texts: a list, a generator, a NumPy array, a column of `datasets` or
            pandas, an Arrow array.
          sentences: another name of `inputs`.
          prompt_name: name of one of `prompts`, whose text is put before every text. None takes `default_prompt_name`.
          prompt: text that is put before every text, in place of a text in `prompts`. "" puts nothing there.
          batch_size: number of texts of `max_seq_length` tokens in a batch. A packed batch holds more texts if they are
            shorter.
          show_progress_bar: whether to show progress on stderr. None shows it for more than 1,000 texts if stderr is a
            terminal.
          output_value: "sentence_embedding" for embeddings; "token_embeddings" for the vectors of all tokens that the
            pooling gets; None for both, with the inputs of the model.
          precision: "float32", "float16", "int8", "uint8", "binary" or "ubinary", see `quantize_embeddings`.
          ranges: smallest and largest value of each component, `[2, embedding_dimension]`, for "int8" and "uint8".
          calibration: texts, or float embeddings `[m, embedding_dimension]`, from which the ranges are computed. Texts
            are encoded with the prompt and the options of this call. `ranges` win over `calibration`. Without both, the
            ranges are computed from the result, which needs more than one text.
          convert_to_numpy: whether to return NumPy arrays. If False, the result has JAX arrays on the default device.
          normalize_embeddings: whether to scale embeddings to length 1. Checkpoints with a Normalize module always do.
          truncate_dim: number of components of an embedding to keep. None takes the encoder's own `truncate_dim`.
          task: "query" or "document" applies the limit of the number of tokens that a checkpoint may have for them.
            `encode_query` and `encode_document` pass it.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Returns:
          `[n, embedding_dimension]` in the order of the n `inputs`, for a single text `[embedding_dimension]`: float32,
          or as `quantize_embeddings` says for another `precision`.

          With `output_value="token_embeddings"`, a list of float32 `[tokens, D]`, without padding; for a single text
          one array. `truncate_dim` and `normalize_embeddings` do not concern them.

          With `output_value=None`, a list of dicts, for a single text one dict: `"input_ids"`, `"token_type_ids"` (if
          the model gets them) and `"attention_mask"`, int32 `[tokens]`; `"modality"`, which is "text";
          `"prompt_length"` (if there is a prompt), the number of its tokens; `"token_embeddings"`; and
          `"sentence_embedding"`, which `normalize_embeddings` does not concern.

        Raises:
          TypeError: `inputs` or one of its items is not a string (the item's index and type are named), or an argument
            is one of sentence-transformers only; the message names its equivalent.
          ValueError: `batch_size` or `truncate_dim` is not a positive integer, `prompt_name`, `output_value`,
            `precision` or `task` is unknown, a text is not valid Unicode or cannot be tokenised, or an embedding is not
            finite. The message names the text and the reason.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one text.
        """
        arguments.refuse("encode", others)
        inputs = arguments.one_of("encode", inputs=inputs, sentences=sentences)
        batch_size = batching.check_batch_size("encode", batch_size)
        texts = batching.as_texts("encode", "inputs", inputs)
        prompt = arguments.chosen_prompt("encode", self.prompts, self.default_prompt_name, prompt, prompt_name)
        width = self.truncate_dim if truncate_dim is None else _checked_width("encode", truncate_dim)
        for name, value, known in (
            ("output_value", output_value, _OUTPUT_VALUES), ("precision", precision, (*PRECISIONS,)),
            ("task", task, (None, *_TASKS)),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"encode: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        is_embedding = output_value == "sentence_embedding"
        if precision != "float32" and not is_embedding:
            raise ValueError(f"encode: precision {precision!r} needs output_value 'sentence_embedding'")
        if width is not None and width >= self.embedder.embedding_dimension:
            width = None
        limit = min(self._task_lengths.get(str(task), self.max_seq_length), self.model.config.max_sequence_length)
        of_texts = self._by_length.get(limit) or self._by_length.setdefault(limit, self._texts_of(limit))
        prompt_length = None
        if prompt and not (is_embedding and self.embedder.include_prompt):
            prompt_length = np.int32(
                tokenizer_files.prompt_length(self._by_length[self.max_seq_length].tokenizer, prompt)
            )
        # Normalising twice changes nothing but the rounding.
        modules = self.embedder.modules
        again = normalize_embeddings and not (width is None and modules and isinstance(modules[-1], Normalize))
        last_steps = width, again and is_embedding, not is_embedding
        # Before the texts, which may take hours, so that mistakes are found at once.
        if precision in ("int8", "uint8"):
            if ranges is not None:
                ranges = as_ranges("encode", ranges, width or self.embedder.embedding_dimension)
            elif calibration is not None:
                calibration = self._calibration(
                    calibration, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar,
                    normalize_embeddings=normalize_embeddings, truncate_dim=truncate_dim, task=task,
                )  # fmt: skip
            elif len(texts) == 1:
                raise ValueError(f"encode: {precision} ranges of a single text say nothing: pass ranges or calibration")
        arrays, rebuild = self._bundled(self.embedder)

        def compute(batch: Batch) -> Any:
            return self._embed(
                arrays, batch.input_ids, batch.lengths, batch.longest, last_steps, rebuild, prompt_length
            )

        results = of_texts.batcher.compute_all(
            texts, functools.partial(of_texts.encodings, prompt), batch_size, compute, model=self.embedder,
            width=(width or self.embedder.embedding_dimension) if is_embedding else None, unit="text",
            show_progress_bar=show_progress_bar,
        )  # fmt: skip
        if not is_embedding:
            convert = (lambda x: x) if convert_to_numpy else jnp.asarray
            found = [self._features(x, prompt_length if prompt else None, convert) for x in results]
            chosen = found if output_value is None else [x[output_value] for x in found]
            return chosen[0] if isinstance(inputs, str) else chosen
        if precision != "float32":
            results = quantize_embeddings(results, precision, ranges=ranges, calibration_embeddings=calibration)
        result = results[0] if isinstance(inputs, str) else results
        return result if convert_to_numpy else jnp.asarray(result)

    def encode_query(self, inputs: str | Iterable[str] | None = None, **options: Any) -> Any:
        """Computes the embeddings of queries: `encode` with the prompt "query", if the call names no prompt.

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
        """Computes the embeddings of documents: `encode` with the first of the prompts "document", "passage", "corpus".

        As in sentence-transformers, every encoder has a prompt "document", which is "" unless something sets it. A
        prompt that the call names comes first.

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

    def similarity(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Any:
        """Computes the similarity of every embedding of one array with every embedding of another one.

        Args:
          embeddings1: floats `[n, D]` or `[D]`.
          embeddings2: floats `[m, D]` or `[D]`.

        Returns:
          float32 `[n, m]`, computed by the function `similarity_fn_name`. Euclidean and Manhattan distances are
          negative, so that a larger number means more similar.

        Raises:
          ValueError: the shapes do not fit.
        """
        return SIMILARITIES[self.similarity_fn_name].full(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Any:
        """Computes the similarity of the first embeddings of two arrays, of the second ones, and so on.

        Args:
          embeddings1: floats `[n, D]` or `[D]`.
          embeddings2: floats of the same shape.

        Returns:
          float32 `[n]`, see `similarity`.

        Raises:
          ValueError: the shapes do not fit.
        """
        return SIMILARITIES[self.similarity_fn_name].pairwise(embeddings1, embeddings2)

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

    def _texts_of(self, limit: int) -> _Texts:
        return _Texts(self.tokenizer, self.model, limit, token_types=self._token_types, packed=self._packed)

    def _calibration(self, calibration: Any, **options: Any) -> Any:
        """Returns the embeddings of `calibration` if it has texts, else `calibration`."""
        if isinstance(calibration, np.ndarray | jax.Array) and jnp.issubdtype(calibration.dtype, jnp.floating):
            return calibration
        rows = batching.as_list("encode", "calibration", calibration, "an iterable of str or an array of floats")
        if not any(isinstance(row, str) for row in rows):
            return rows
        return self.encode(batching.as_texts("encode", "calibration", rows), **options)

    def _task_options(self, task: str, options: dict[str, Any]) -> dict[str, Any]:
        """Adds the task, and the prompt of the task if `options` has none."""
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options["prompt_name"] = next((name for name in _TASKS[task] if name in self.prompts), None)
        return options | {"task": task}

    def _features(self, found: batching.Features, prompt_length: Any, convert: Any) -> dict[str, Any]:
        """Returns the features of a text under the names of sentence-transformers."""
        features: dict[str, Any] = {"input_ids": convert(found.ids)}
        if self._token_types:
            features["token_type_ids"] = convert(np.zeros_like(found.ids))
        features |= {"attention_mask": convert(np.ones_like(found.ids)), "modality": "text"}
        if prompt_length is not None:
            features["prompt_length"] = int(prompt_length)
        return features | {"token_embeddings": convert(found.tokens), "sentence_embedding": convert(found.pooled)}


def _checked_width(where: str, value: Any) -> int | None:
    if value is not None and not (checks.is_natural(value) and value > 0):
        raise ValueError(f"{where}: truncate_dim must be None or a positive integer, got {value!r}")
    return value
