"""SentenceEncoder: computes embeddings of texts, and reads checkpoints in the layout of sentence-transformers."""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxft import dispatch
from jaxft.models.bert import BertModel
from jaxft.models.embedding import EmbeddingModel, Module, Normalize
from jaxft.models.float8 import Float8Recipe
from jaxft.models.pooling import l2_normalize
from jaxft.ops import checks
from jaxft.ops.bundle import Rebuild
from jaxft.text import arguments, batching, module_files
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch
from jaxft.text.quantization import (
    PRECISIONS,
    RANGED,
    as_ranges,
    check_unused,
    flagged_codes,
    limits_of,
    quantized,
    starts_and_steps,
)
from jaxft.text.similarities import SIMILARITIES, similarity_name
from jaxft.text.text_encoder import TextEncoder, name_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OUTPUT_VALUES = ("sentence_embedding", "token_embeddings", None)


class SentenceEncoder(TextEncoder):
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

    _SIMILARITY = "cosine"

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
        arguments.check_flags("SentenceEncoder", include_prompt=include_prompt, normalize=normalize)
        self.truncate_dim = truncate_dim
        embedder = EmbeddingModel(
            model, pooling=pooling, include_prompt=include_prompt, token_modules=token_modules,
            modules=[*modules, *[Normalize()] * normalize],
        )  # fmt: skip
        super().__init__(
            embedder, tokenizer, max_seq_length=max_seq_length, prompts=prompts,
            default_prompt_name=default_prompt_name, similarity_fn_name=similarity_fn_name, token_types=token_types,
            packed=packed,
        )  # fmt: skip

        def embed(
            arrays: list[jax.Array], input_ids: jax.Array, lengths: jax.Array, longest: int,
            last_steps: tuple[int | None, bool, bool, str], rebuild: Rebuild, prompt_length: jax.Array | None = None,
            starts_steps: jax.Array | None = None,
        ) -> Any:  # fmt: skip
            tokens, pooled = rebuild(arrays).with_tokens(
                input_ids, **batching.sequences(input_ids, lengths, longest), prompt_lengths=prompt_length,
                deterministic=True,
            )  # fmt: skip
            width, normalizes, with_tokens, precision = last_steps
            pooled = pooled[:, :width]
            pooled = l2_normalize(pooled) if normalizes else pooled
            if precision != "float32":
                return dispatch.on_host(flagged_codes(pooled, precision, starts_steps))
            return dispatch.on_host((tokens, pooled) if with_tokens else pooled)

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
        dtype: DTypeLike | None = None,
        implementation: str | None = None,
        quantization: str | Float8Recipe | None = None,
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
            modules after it compute in float32, and embeddings are always float32. None is bfloat16 for a model in
            float8 and float32 for others.
          implementation: passed to every op. None picks the fastest for the device.
          quantization: "fp8" to multiply in float8_e4m3fn, see `BertModel.from_pretrained`.
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

        def parts(layout: module_files.Layout) -> dict[str, Any]:
            return {
                "model": BertModel.from_pretrained(
                    layout.transformer, dtype=dtype, implementation=implementation, quantization=quantization
                ),
                "pooling": layout.pooling,
                "include_prompt": layout.include_prompt,
                "token_modules": layout.token_modules,
                "modules": layout.modules,
                "truncate_dim": layout.truncate_dim if truncate_dim is None else truncate_dim,
            }

        return cls._load(
            folder_or_id, module_files.read_sentence_encoder, parts, revision=revision, cache_dir=cache_dir,
            local_files_only=local_files_only, max_seq_length=max_seq_length, prompts=prompts,
            default_prompt_name=default_prompt_name, similarity_fn_name=similarity_fn_name,
            dtype=dtype, implementation=implementation, quantization=quantization, packed=packed,
        )  # fmt: skip

    def _write(self, folder: str | os.PathLike[str], **own: Any) -> None:
        settings = {"model_type": "SentenceTransformer", **self._settings()}
        settings |= {} if self.truncate_dim is None else {"truncate_dim": self.truncate_dim}
        self._save(folder, settings, **own)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int = 32,
        output_value: str | None = "sentence_embedding",
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        precision: str = "float32",
        show_progress_bar: bool | None = None,
    ) -> None:
        """Writes the folder of `save_pretrained` with a program for each batch shape, for `from_exported`.

        The programs are those that `encode` needs for texts of up to `max_seq_length` tokens, queries and documents,
        with the arguments of the same names. `jax.export` serialises them. They have no weights, which are in
        model.safetensors once. They are for the device that `encode` would compute on. Inside
        `jaxft.dispatch.target`, they are for that device. docs/export.md describes the folder.

        Args:
          path: the folder. It is created if it does not exist. All files are complete before one of them gets its final
            name, and an earlier export there is replaced.
          batch_size: the `batch_size` of `encode`.
          output_value: the `output_value` of `encode`.
          normalize_embeddings: the `normalize_embeddings` of `encode`.
          truncate_dim: the `truncate_dim` of `encode`.
          precision: the `precision` of `encode`.
          show_progress_bar: whether to show progress on stderr. None shows it if stderr is a terminal.

        Raises:
          TypeError: `path` is not a string or path.
          NotADirectoryError: `path` is a file.
          ValueError: `batch_size` or `truncate_dim` is not a positive integer, `output_value` or `precision` is
            unknown, `precision` is for embeddings only, or a parameter has another dtype than the encoder, so that the
            folder could not be loaded with it.
          ImportError: flatbuffers is not installed.
          NotImplementedError: JAX cannot lower for the device of `jaxft.dispatch.target`.
        """
        arguments.check_flags("export", normalize_embeddings=normalize_embeddings, show_progress_bar=show_progress_bar)
        if output_value not in _OUTPUT_VALUES:
            raise ValueError(f"export: output_value must be one of {_OUTPUT_VALUES}, got {output_value!r}")
        if precision not in PRECISIONS or (precision != "float32" and output_value != "sentence_embedding"):
            raise ValueError(
                f"export: precision must be one of {(*PRECISIONS,)}, and 'float32' for other outputs than "
                f"'sentence_embedding', got {precision!r}"
            )
        last_steps = self._last_steps("export", truncate_dim, normalize_embeddings, output_value)
        size = last_steps[0] or self.embedder.embedding_dimension
        steps: list[Any] = [((*last_steps, precision), None)]
        if precision in RANGED:  # embeddings give the ranges, unless the caller does
            steps = [((*last_steps, "float32"), None), (steps[0][0], jnp.zeros((2, size), jnp.float32))]
        # With and without a prompt, where they make different programs.
        lengths = [None] if last_steps[2] is False and self.embedder.include_prompt else [None, np.int32(0)]
        self._export(
            path,
            [functools.partial(_given, last, length, ranges) for last, ranges in steps for length in lengths],
            batch_size, show_progress_bar, output_value=output_value, normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim, precision=precision,
        )  # fmt: skip

    @property
    def truncate_dim(self) -> int | None:
        """Number of components of an embedding that `encode` keeps; None keeps all. It may be set."""
        return self._truncate_dim

    @truncate_dim.setter
    def truncate_dim(self, value: int | None) -> None:
        self._truncate_dim = _checked_width("SentenceEncoder", value)

    def _similarity_name(self, name: Any) -> str:
        return similarity_name("SentenceEncoder", "similarity_fn_name", name)

    @property
    def embedding_dimension(self) -> int:
        """Length D of an embedding, after truncation to `truncate_dim`."""
        width = self.embedder.embedding_dimension
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

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
        devices: Any = None,
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

        Several devices: each has a copy of the parameters, which is kept for later calls. A batch goes to the device
        with the fewest batches in flight. The embeddings are the same to the bit as on one device. Programs for the
        devices after the first are compiled in the background, see docs/corpora.md. Memory that runs out on one device
        makes the batches smaller on this device.

        Args:
          inputs: one text, or any iterable of texts: a list, a generator, a NumPy array, a column of `datasets` or
            pandas, an Arrow array. In place of texts it may have their token ids, as `tokenize` returns them: a list of
            lists or of arrays of integers, an integer array `[n, tokens]`, or an Arrow array of lists; for one text a
            list or array of integers. They are passed to the model as they are: with special tokens, not truncated. No
            prompt is put before them; `prompt` and `prompt_name` say which prompt they begin with.
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
          ranges: smallest and largest value of each component, numbers `[2, embedding_dimension]`, for "int8" and
            "uint8" only.
          calibration: texts, or float embeddings `[m, embedding_dimension]`, from which the ranges of "int8" and
            "uint8" are computed. Texts are encoded with the prompt and the options of this call. `ranges` win over
            `calibration`. Without both, the ranges are computed from the result, which needs more than one text.
          convert_to_numpy: whether to return NumPy arrays. If False, the result has JAX arrays on the default device.
          normalize_embeddings: whether to scale embeddings to length 1. Checkpoints with a Normalize module always do.
          truncate_dim: number of components of an embedding to keep. None takes the encoder's own `truncate_dim`.
          task: "query" or "document" applies the limit of the number of tokens that a checkpoint may have for them.
            `encode_query` and `encode_document` pass it.
          devices: the devices that compute: devices of JAX or indices into `jax.local_devices()`, all of one kind. None
            takes `jax.default_device` where it is set, or the device that the parameters are committed to. Otherwise it
            takes all local GPUs for several texts, and one device for a single text or without a GPU. A log line of the
            level INFO names several devices.
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
          TypeError: `inputs` or one of its items is neither a string nor token ids (the item's index and type are
            named), `devices` has something else than devices, or an argument is one of sentence-transformers only; the
            message names its equivalent.
          ValueError: `devices` are not different local devices of one kind, token ids are too many or outside of the
            vocabulary, `batch_size` or `truncate_dim` is not a positive integer, `prompt_name`, `output_value`,
            `precision` or `task` is unknown, `precision` does not use `ranges` or `calibration`, a text is not valid
            Unicode or cannot be tokenised, or an embedding is not finite. The message names the text and the reason.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one text.
        """
        arguments.refuse(name_of(task), others)
        arguments.check_flags(
            "encode", show_progress_bar=show_progress_bar, convert_to_numpy=convert_to_numpy,
            normalize_embeddings=normalize_embeddings,
        )  # fmt: skip
        inputs = arguments.one_of("encode", inputs=inputs, sentences=sentences)
        known = ("output_value", output_value, _OUTPUT_VALUES), ("precision", precision, (*PRECISIONS,))
        read, prompt, batch_size = self._start(inputs, prompt, prompt_name, batch_size, task, known)
        last_steps = self._last_steps("encode", truncate_dim, normalize_embeddings, output_value)
        is_embedding = output_value == "sentence_embedding"
        check_unused("encode", precision, ranges=ranges, calibration=calibration)
        if precision != "float32" and not is_embedding:
            raise ValueError(f"encode: precision {precision!r} needs output_value 'sentence_embedding'")
        prompt_length = None
        if prompt and not (is_embedding and self.embedder.include_prompt):
            prompt_length = np.int32(
                tokenizer_files.prompt_length(self._by_length[self.max_seq_length].tokenizer, prompt)
            )
        # Before the texts, which may take hours, so that mistakes are found at once.
        size, limits = last_steps[0] or self.embedder.embedding_dimension, None
        if precision in RANGED:
            if ranges is not None:
                limits = as_ranges("encode", ranges, size)
            elif calibration is not None:
                if devices is not None:
                    devices = dispatch.named_devices("encode", devices)  # an iterator may be read once
                calibration = self._calibration(
                    calibration, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar,
                    normalize_embeddings=normalize_embeddings, truncate_dim=truncate_dim, task=task, devices=devices,
                )  # fmt: skip
                limits = limits_of("encode", [np.empty((0, size), np.float32)], precision, calibration=calibration)
            elif read.are_chunks:
                raise ValueError(f"encode_iter: {precision} needs ranges or calibration, the same for all chunks")
            elif len([*read.parts][0]) == 1:
                raise ValueError(f"encode: {precision} ranges of a single text say nothing: pass ranges or calibration")

        # Unless all embeddings give the ranges, the device quantizes the embeddings of each batch.
        needs_all, options = precision in RANGED and limits is None, {}
        on_device = "float32" if needs_all else precision
        starts_steps = None if limits is None else dispatch.to_device(starts_and_steps(limits))
        if on_device != "float32":
            size = -(-size // 8) if precision.endswith("binary") else size
            options = {"convert": _without_flags, "is_finite": _is_finite, "dtype": PRECISIONS[precision]}
        given = functools.partial(_given, (*last_steps, on_device), prompt_length, starts_steps)

        def finish(results: Any) -> Any:
            if not is_embedding:
                convert = (lambda x: x) if convert_to_numpy else dispatch.to_device
                length = None if prompt_length is None else int(prompt_length)
                found = [self._features(x, length, convert) for x in results]
                chosen = found if output_value is None else [x[output_value] for x in found]
                return chosen[0] if read.is_single else chosen
            if needs_all:
                limits = limits_of("encode", [results], precision, calibration=None) if results.size else None
                results = quantized(results, precision, limits)
            result = results[0] if read.is_single else results
            return result if convert_to_numpy else dispatch.to_device(result)

        return self._compute(
            read, prompt, task, batch_size, given, devices, finish, show_progress_bar,
            width=size if is_embedding else None, **options,
        )  # fmt: skip

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

    def _last_steps(
        self, where: str, truncate_dim: Any, normalize_embeddings: bool, output_value: str | None
    ) -> tuple[int | None, bool, bool]:
        """Returns the steps after the modules: the width, whether to normalise, whether to return tokens as well."""
        width = self.truncate_dim if truncate_dim is None else _checked_width(where, truncate_dim)
        if width is not None and width >= self.embedder.embedding_dimension:
            width = None
        # Normalising twice changes nothing but the rounding.
        modules, is_embedding = self.embedder.modules, output_value == "sentence_embedding"
        again = normalize_embeddings and not (width is None and modules and isinstance(modules[-1], Normalize))
        return width, again and is_embedding, not is_embedding

    def _calibration(self, calibration: Any, **options: Any) -> Any:
        """Returns the embeddings of `calibration` if it has texts, else `calibration`."""
        if isinstance(calibration, np.ndarray | jax.Array) and jnp.issubdtype(calibration.dtype, jnp.floating):
            return calibration
        rows = batching.as_list("encode", "calibration", calibration, "an iterable of str or an array of floats")
        if not any(isinstance(row, str) for row in rows):
            return rows
        return self.encode(batching.as_texts("encode", "calibration", rows), **options)

    def _features(self, found: batching.Features, prompt_length: int | None, convert: Any) -> dict[str, Any]:
        """Returns the features of a text under the names of sentence-transformers."""
        features: dict[str, Any] = {"input_ids": convert(found.ids)}
        if self._token_types:
            features["token_type_ids"] = convert(np.zeros_like(found.ids))
        features |= {"attention_mask": convert(np.ones_like(found.ids)), "modality": "text"}
        if prompt_length is not None:
            features["prompt_length"] = prompt_length
        return features | {"token_embeddings": convert(found.tokens), "sentence_embedding": convert(found.pooled)}


def _given(
    last_steps: tuple[Any, ...], prompt_length: np.int32 | None, starts_steps: jax.Array | None,
    arrays: list[Any], rebuild: Rebuild, batch: Batch,
) -> tuple[Any, ...]:  # fmt: skip
    of_batch = batch.input_ids, batch.lengths, batch.longest
    return arrays, *of_batch, last_steps, rebuild, prompt_length, starts_steps


def _is_finite(flagged: np.ndarray) -> np.ndarray:
    """Returns which rows of `flagged_codes` are of finite embeddings."""
    return flagged[:, -1] > 0


def _without_flags(flagged: np.ndarray) -> np.ndarray:
    """Returns the rows of `flagged_codes` without the flags. Raises a ValueError if float16 overflows."""
    if (flagged[:, -1] == 1).any():
        raise ValueError("encode: embeddings must fit float16, but one has a component beyond 65504")
    return flagged[:, :-1]


def _checked_width(where: str, value: Any) -> int | None:
    if value is not None and not (checks.is_natural(value) and value > 0):
        raise ValueError(f"{where}: truncate_dim must be None or a positive integer, got {value!r}")
    return None if value is None else int(value)
