"""CrossEncoder: scores pairs of texts, for reranking, with the interface of sentence-transformers' CrossEncoder."""

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxft import dispatch
from jaxft.checkpoint.files import CheckpointError, read_settings
from jaxft.models import embedding
from jaxft.models.bert import BertModel
from jaxft.models.bundled import Bundled
from jaxft.models.classification import BertForSequenceClassification
from jaxft.models.embedding import EmbeddingModel
from jaxft.models.float8 import Float8Recipe
from jaxft.ops import checks
from jaxft.ops.bundle import Rebuild
from jaxft.text import arguments, batching, exported, module_files, writing
from jaxft.text import inputs as text_inputs
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch, Bucket
from jaxft.text.devices import Dealer
from jaxft.text.text_encoder import Texts, read_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Activation = Callable[[jax.Array], jax.Array]
LastSteps = tuple[str, bool]  # the name of the activation, and whether a softmax follows it

# Activations of scores `[n, num_labels]` by the names of PyTorch's classes, which files contain.
# Read-only, because compiled programs are kept by these names.
ACTIVATIONS: Mapping[str, Activation] = types.MappingProxyType(
    embedding.ACTIVATIONS
    | {"Softmax": jax.nn.softmax, "LogSoftmax": jax.nn.log_softmax, "Softmin": lambda x: jax.nn.softmax(-x)}
)


class CrossEncoder:
    """A BERT-type model with its tokenizer: scores pairs of texts, and ranks documents for a query.

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts.

    Args:
      model: a classifier, or an `EmbeddingModel` whose vectors are the logits, for example with a `Dense` module at the
        end. Each call reads its current parameters, so the model may be trained between calls.
      tokenizer: a `tokenizers.Tokenizer`. The encoder uses a copy that does not pad and truncates to `max_length`.
      max_length: maximum number of tokens of a pair, special tokens included. The longer text is truncated first.
      activation_fn: a function from float32 logits `[n, num_labels]` to scores of the same shape. None applies the
        sigmoid for a model with one label, and no activation for a model with several labels.
      prompts: texts by name, to be put before the first text of every pair.
      default_prompt_name: name of the prompt for calls without `prompt` and `prompt_name`. None is no prompt.
      token_types: whether the model gets the token type ids of the tokenizer. Otherwise, all are 0.
      packed: whether batches are packed, as for `SentenceEncoder`.

    Attributes:
      model: as the argument.
      activation_fn: the function of scores.
      prompts: dict of the prompts by name. It may be changed between calls.
      default_prompt_name: as the argument. It may be set between calls.

    Raises:
      TypeError: `activation_fn` is no function, `prompts` is no dict of texts, or an argument of sentence-transformers
        has no meaning here; the message names the equivalent.
      ValueError: `max_length` leaves no room for a token or exceeds the positions of the model, the model lacks a token
        id or type id of the tokenizer, or `prompts` has no text of the name `default_prompt_name`.
    """

    def __init__(
        self,
        model: BertForSequenceClassification | EmbeddingModel,
        tokenizer: "Tokenizer",
        *,
        max_length: int,
        activation_fn: Activation | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        token_types: bool = True,
        packed: bool | None = None,
        **others: Any,
    ) -> None:
        arguments.refuse("CrossEncoder", others)
        arguments.check_flags("CrossEncoder", token_types=token_types, packed=packed)
        self.model, self._token_types, self._origin = model, token_types, writing.Origin()
        self.prompts = arguments.merged_prompts("CrossEncoder", {}, prompts, {})
        self.default_prompt_name = default_prompt_name
        arguments.check_prompts("CrossEncoder", self.prompts, default_prompt_name)
        own = ACTIVATIONS["Sigmoid" if self.num_labels == 1 else "Identity"]
        self.activation_fn = _checked_activation("CrossEncoder", activation_fn) or own
        self._packed = batching.packs(self._encoder.embeddings.options.implementation) if packed is None else packed
        self._set_length(tokenizer, max_length, "max_length")
        self._bundled = Bundled(self._encoder.embeddings.options.implementation)

        def score(
            arrays: list[jax.Array], input_ids: jax.Array, types: jax.Array | None, lengths: jax.Array, longest: int,
            prompt_length: jax.Array | None, rebuild: Rebuild, last_steps: LastSteps,
        ) -> jax.Array:  # fmt: skip
            module = rebuild(arrays)
            call = batching.sequences(input_ids, lengths, longest)
            if isinstance(module, EmbeddingModel):
                call["prompt_lengths"] = prompt_length
            logits = module(input_ids, token_type_ids=types, deterministic=True, **call).astype(jnp.float32)
            # The barrier keeps the logits the same to the bit for all activations.
            logits = jax.lax.optimization_barrier(logits)
            name, softmax = last_steps
            scores = _activated(logits, ACTIVATIONS[name], softmax=softmax)
            return dispatch.on_host(jnp.concatenate([logits, scores], axis=-1))

        self._score: Any = jax.jit(score, static_argnums=(4, 6, 7))
        self._exported_steps: LastSteps | None = None  # the only steps of the programs of `from_exported`
        self._dealer = Dealer(self._bundled)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Activation | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        dtype: DTypeLike | None = None,
        implementation: str | None = None,
        quantization: str | Float8Recipe | None = None,
        packed: bool | None = None,
        **others: Any,
    ) -> "CrossEncoder":
        """Loads a checkpoint for sequence classification, or one with modules that give scores, and its tokenizer.

        docs/checkpoints.md lists each field of the files that is read. A setting that would change scores and is not
        supported is an error.

        Args:
          folder_or_id: a folder, or the id of a model on Hugging Face.
          revision: see `BertModel.from_pretrained`.
          cache_dir: see `BertModel.from_pretrained`.
          local_files_only: see `BertModel.from_pretrained`.
          num_labels: number of labels, which the checkpoint must have. None takes the number in the files.
          max_length: maximum number of tokens of a pair. None takes `max_seq_length` or else `model_max_length` of the
            files, or the number of positions that the model has if that is smaller.
          activation_fn: as for the constructor. None takes the activation in config_sentence_transformers.json or else,
            from older versions, in config.json. Without such an entry, it is the default of the constructor.
          prompts: as for the constructor. They win over prompts of the same name in the files, which are kept.
          default_prompt_name: as for the constructor. None takes the name in the files.
          dtype: float32, float16 or bfloat16, the dtype of parameters and computation. Scores are always float32.
            None is bfloat16 for a model in float8 and float32 for others.
          implementation: passed to every op. None picks the fastest for the device.
          quantization: "fp8" to multiply in float8_e4m3fn, see `BertModel.from_pretrained`.
          packed: whether batches are packed, as for `SentenceEncoder`.
          **others: none. An argument of sentence-transformers raises a TypeError, which names the equivalent.

        Returns:
          The encoder.

        Raises:
          CheckpointError: a file is missing or malformed, the message names it; or `max_length` leaves no room for a
            token or exceeds the number of positions of the model.
          TypeError: as for the constructor, or `folder_or_id` is not a string or path.
        """
        arguments.refuse("from_pretrained", others)
        files = folder, layout, settings = read_files(
            folder_or_id, module_files.read_cross_encoder, revision=revision, cache_dir=cache_dir,
            local_files_only=local_files_only, dtype=dtype, implementation=implementation, quantization=quantization,
        )  # fmt: skip
        options: dict[str, Any] = {
            "dtype": dtype, "implementation": implementation, "quantization": quantization
        }  # fmt: skip
        model: BertForSequenceClassification | EmbeddingModel
        if layout.pooling:
            of_tokens = BertModel.from_pretrained(layout.transformer, **options)
            try:
                model = EmbeddingModel(
                    of_tokens, pooling=layout.pooling, include_prompt=layout.include_prompt,
                    token_modules=layout.token_modules, modules=layout.modules,
                )  # fmt: skip
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from error
            if num_labels not in (None, model.embedding_dimension):
                raise CheckpointError(
                    f"{folder}: has {model.embedding_dimension} labels, not num_labels={num_labels!r}"
                )
        else:
            given = layout.num_labels if num_labels is None else num_labels
            model = BertForSequenceClassification.from_pretrained(folder, num_labels=given, **options)
        if activation_fn is None:
            activation_fn = _saved_activation(folder, layout.transformer)
        config = (model.encoder if isinstance(model, EmbeddingModel) else model).config
        # A classifier takes the first token of a row, which would be padding.
        may_pad_left = isinstance(model, EmbeddingModel) and not config.positions_count_padding
        tokenizer = tokenizer_files.load(settings, layout.do_lower_case, may_pad_left=may_pad_left)
        if max_length is None:
            max_length = files.limit(config, tokenizer, cls.__name__, is_pair=True)
        try:
            encoder = cls(
                model,
                tokenizer,
                max_length=max_length,
                activation_fn=activation_fn,
                prompts=arguments.merged_prompts("from_pretrained", {}, prompts, layout.prompts),
                default_prompt_name=layout.default_prompt_name if default_prompt_name is None else default_prompt_name,
                token_types=settings.token_types,
                packed=packed,
            )
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        encoder._origin = writing.read_origin(folder_or_id, folder, settings)
        return encoder

    def save_pretrained(self, folder: str | os.PathLike[str], **others: Any) -> None:
        """Writes a folder that `from_pretrained` and sentence-transformers load, with the same scores.

        The folder gets the files of the model and of the tokenizer, prompts, `max_seq_length`, the activation, and a
        model card. `SentenceEncoder.save_pretrained` describes the card, and which files of an earlier save are
        removed.

        Args:
          folder: see `SentenceEncoder.save_pretrained`.
          **others: see `SentenceEncoder.save_pretrained`.

        Raises:
          TypeError: see `SentenceEncoder.save_pretrained`.
          NotADirectoryError: `folder` is a file.
          ValueError: see `SentenceEncoder.save_pretrained`, or `activation_fn` has no name in PyTorch.
        """
        arguments.refuse("save_pretrained", others)
        self._save(folder, self._settings("save_pretrained"))

    def _settings(self, where: str) -> dict[str, Any]:
        if (name := _name_of(self.activation_fn)) is None:
            raise ValueError(
                f"{where}: activation_fn must be a function that files can name, got "
                f"{self.activation_fn!r:.80}; set activation_fn to one of jaxft.text.cross_encoder.ACTIVATIONS, "
                "and pass another function to predict"
            )
        return {
            "model_type": "CrossEncoder",
            "activation_fn": writing.activation_name(name),
            "prompts": self.prompts,
            "default_prompt_name": self.default_prompt_name,
        }

    def _save(self, folder: str | os.PathLike[str], settings: dict[str, Any], **own: Any) -> None:
        writing.save(
            folder, self.model, self.tokenizer, settings, token_types=self._token_types,
            max_length=self.max_seq_length, origin=self._origin, **own,
        )  # fmt: skip

    def export(
        self, path: str | os.PathLike[str], *, batch_size: int = 32, show_progress_bar: bool | None = None
    ) -> None:
        """Writes the folder of `save_pretrained` with a program for each batch shape, for `from_exported`.

        The programs are those that `predict` needs for pairs of up to `max_seq_length` tokens. They compute the
        encoder's own activation. `predict` of the loaded encoder takes other activations too, and then computes them
        after the program. `SentenceEncoder.export` describes the programs.

        Args:
          path: see `SentenceEncoder.export`.
          batch_size: the `batch_size` of `predict`.
          show_progress_bar: see `SentenceEncoder.export`.

        Raises:
          TypeError: see `SentenceEncoder.export`.
          NotADirectoryError: `path` is a file.
          ValueError: see `SentenceEncoder.export`, or `activation_fn` has no name in PyTorch.
        """
        settings = self._settings("export")
        last_steps = str(_name_of(self.activation_fn)), False
        lengths = [None, np.int32(0)] if self._needs_prompt_length else [None]
        self._save(path, settings, exported=exported.contents(
            type(self).__name__, path, self._score, self.model, [self._pairs.batcher],
            [functools.partial(_given, length, last_steps) for length in lengths], batch_size=batch_size,
            packed=self._packed, options={}, show_progress_bar=show_progress_bar,
        ))  # fmt: skip

    @classmethod
    def from_exported(cls, path: str | os.PathLike[str]) -> "CrossEncoder":
        """Loads a folder that `export` has written, see `SentenceEncoder.from_exported`.

        Load folders only from sources that you trust.

        Args:
          path: the folder.

        Returns:
          The encoder.

        Raises:
          CheckpointError: see `SentenceEncoder.from_exported`.
          TypeError: `path` is not a string or path.
        """
        record = exported.read(path, cls)
        encoder = cls.from_pretrained(path, **record["load"])
        encoder._score = exported.Programs(path, record)
        encoder._exported_steps = str(_name_of(encoder.activation_fn)), False
        return encoder

    @property
    def _needs_prompt_length(self) -> bool:
        """True if pooling leaves out the tokens of a prompt. The program then gets the length of the prompt."""
        return isinstance(self.model, EmbeddingModel) and not self.model.include_prompt

    @property
    def num_labels(self) -> int:
        """Number of scores of a pair."""
        return self.model.embedding_dimension if isinstance(self.model, EmbeddingModel) else self.model.num_labels

    @property
    def tokenizer(self) -> "Tokenizer":
        """A copy of the tokenizer, which does not pad and truncates pairs to `max_seq_length`."""
        return self._pairs.tokenizer

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a pair, special tokens included. Longer pairs are truncated. It can be set.

        Raises:
          ValueError: the new value leaves no room for a token, or exceeds the number of positions of the model.
        """
        return self._pairs.batcher.limit

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._set_length(self.tokenizer, value, "max_seq_length")

    max_length = max_seq_length  # the name in versions of sentence-transformers before 6

    @property
    def _encoder(self) -> BertModel:
        return self.model.encoder if isinstance(self.model, EmbeddingModel) else self.model.bert

    def _set_length(self, tokenizer: "Tokenizer", length: int, argument: str) -> None:
        length = tokenizer_files.checked_limit("CrossEncoder", argument, length, self._encoder.config)
        self._pairs = Texts(
            tokenizer, self._encoder, length, token_types=self._token_types, packed=self._packed,
            owner="CrossEncoder", argument=argument, is_pair=True,
        )  # fmt: skip

    def warmup(
        self, *, batch_size: int = 32, show_progress_bar: bool | None = None, devices: Any = None, **options: Any
    ) -> None:  # fmt: skip
        """Compiles all programs that calls of `predict` and `rank` with these options need, several at a time.

        See `SentenceEncoder.warmup`. An `activation_fn` that is not in `jaxft.text.cross_encoder.ACTIVATIONS` is not
        compiled, because JAX compiles it for each number of pairs.

        Args:
          batch_size: the `batch_size` of the calls.
          show_progress_bar: whether to show progress on stderr. None shows it if stderr is a terminal.
          devices: the `devices` of the calls. None takes the devices of calls with many pairs.
          **options: other keyword arguments of `predict`, for example `apply_softmax`.

        Raises:
          TypeError: see `predict`.
          ValueError: see `predict`.
          jax.errors.JaxRuntimeError: a program cannot be compiled, or the memory of the device does not suffice.
        """
        inputs: Any = text_inputs.Inputs([], are_shapes=True)
        self.predict(
            inputs, batch_size=batch_size, show_progress_bar=show_progress_bar, devices=devices, **options
        )  # fmt: skip

    def buckets(self, batch_size: int = 32) -> list[Bucket]:
        """Returns the shapes of packed batches. A program is compiled when a shape first occurs.

        Args:
          batch_size: the `batch_size` of `predict`.

        Returns:
          The shapes; an empty list if batches are padded.

        Raises:
          ValueError: `batch_size` is not a positive integer.
        """
        return batching.buckets(batch_size, self.max_seq_length) if self._packed else []

    def predict(
        self,
        inputs: Iterable[Sequence[Any]] | Sequence[Any] | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        devices: Any = None,
        **others: Any,
    ) -> Any:
        """Scores pairs of texts. Batches are formed in the same way as in `SentenceEncoder.encode`.

        Args:
          inputs: pairs (text, text), or one pair. Any iterable of pairs is accepted, for example a generator. In place
            of pairs it may have their token ids, as `encoder.tokenizer.encode(text, text).ids` gives them: a list of
            lists or of arrays of integers, an integer array `[n, tokens]`, or an Arrow array of lists; for one pair a
            list or array of integers. They have special tokens and are not truncated. The tokens after the first
            separator are of the second text. No prompt is put before them, see `SentenceEncoder.encode`.
          prompt_name: name of the prompt to put before the first text of every pair. None takes `default_prompt_name`.
          prompt: text to put before the first text of every pair, in place of a named prompt. "" is no prompt.
          batch_size: number of pairs of `max_seq_length` tokens in a batch, see `SentenceEncoder.encode`.
          show_progress_bar: see `SentenceEncoder.encode`.
          activation_fn: a function from float32 logits `[n, num_labels]` to scores of the same shape. None applies the
            encoder's own activation. A function of `jaxft.text.cross_encoder.ACTIVATIONS` is a part of the compiled
            programs. So the first call with another one than before, or with another `apply_softmax`, compiles them
            again, unless `warmup` was called with both. "Identity" compiles nothing.
          apply_softmax: whether to apply the softmax over the labels after the activation; None does not. It has no
            effect for a model with one label.
          convert_to_numpy: see `SentenceEncoder.encode`.
          devices: see `SentenceEncoder.encode`.
          **others: none. An argument of sentence-transformers raises a TypeError, which names the equivalent.

        Returns:
          float32 `[n]` for a model with one label, float32 `[n, num_labels]` for a model with several labels, in the
          order of `inputs`. The result for one pair has no first axis.

        Raises:
          TypeError: `inputs` is neither a pair of strings nor an iterable of such pairs or of token ids, the message
            names the index; or an argument of sentence-transformers has no meaning here, the message names the
            equivalent.
          ValueError: `batch_size` is not a positive integer, `prompt_name` is unknown, a text is not valid Unicode or
            cannot be tokenised, token ids are too many or outside of the vocabulary, a logit is not finite (the message
            names the pair and the reason), or `activation_fn` returns another shape.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one pair.
        """
        arguments.refuse("predict", others)
        arguments.check_flags(
            "predict", show_progress_bar=show_progress_bar, apply_softmax=apply_softmax,
            convert_to_numpy=convert_to_numpy,
        )  # fmt: skip
        batch_size = batching.check_batch_size("predict", batch_size)
        activation_fn = _checked_activation("predict", activation_fn) or self.activation_fn
        prompt = arguments.chosen_prompt("predict", self.prompts, self.default_prompt_name, prompt, prompt_name)
        read = text_inputs.read_pairs("predict", "inputs", inputs)
        prompt_length = None
        if prompt and self._needs_prompt_length:
            prompt_length = np.int32(tokenizer_files.prompt_length(self.tokenizer, prompt))

        parts = [*self._pairs.checked("predict", read.parts)]
        one = len(parts) == 1 and len(parts[0]) == 1
        labels = self.num_labels
        name, softmax = _name_of(activation_fn), labels > 1 and bool(apply_softmax)
        own = _name_of(self.activation_fn) or "Identity", False
        wants_logits = (name, softmax) == ("Identity", False)  # any program has them
        last_steps = self._exported_steps or (own if name is None or wants_logits else (name, softmax))
        given = functools.partial(_given, prompt_length, last_steps)
        lanes = self._dealer.lanes("predict", devices, self.model, self._score, given, one=one)
        if read.are_shapes:
            blanks = self._pairs.batcher.blanks(batch_size)
            return self._dealer.warm_up(lanes, blanks, show_progress_bar=show_progress_bar)
        has_scores = last_steps == (name, softmax)  # otherwise, the logits are taken
        (scores,) = self._pairs.batcher.compute_parts(
            parts, functools.partial(self._pairs.tokens, prompt), batch_size, lanes, model=self.model, width=labels,
            unit="pair", show_progress_bar=show_progress_bar,
            convert=lambda rows: rows[:, labels:] if has_scores else rows[:, :labels],
            is_finite=lambda rows: np.isfinite(rows[:, :labels]).all(axis=1),
        )  # fmt: skip
        if not has_scores and not wants_logits:
            logits = dispatch.to_device(scores)
            scores = np.array(_activated(logits, activation_fn, softmax=softmax))  # a copy, which may be written to
        if labels == 1:
            scores = scores[:, 0]
        scores = scores[0] if read.is_single else scores
        return scores if convert_to_numpy else dispatch.to_device(scores)

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        devices: Any = None,
        **others: Any,
    ) -> list[dict[str, Any]]:
        """Ranks documents by their score with a query, the best first.

        Args:
          query: a text. Token ids of pairs can be passed to `predict` only.
          documents: texts. Any iterable of strings is accepted.
          top_k: number of documents to return. None returns all of them.
          return_documents: whether to return the texts too.
          prompt_name: see `predict`. The prompt comes before the query.
          prompt: see `predict`.
          batch_size: see `predict`.
          show_progress_bar: see `predict`.
          activation_fn: see `predict`.
          devices: see `predict`.
          **others: see `predict`.

        Returns:
          A list of `{"corpus_id": index in documents, "score": float}`, with the key `"text"` too if `return_documents`
          is True. Documents with equal scores keep their order.

        Raises:
          TypeError: `query` or a document is not a string, `documents` is not iterable or is a single string, or an
            argument of sentence-transformers has no meaning here.
          ValueError: as for `predict`, or the model has several labels, or `top_k` is not a positive integer.
          jax.errors.JaxRuntimeError: see `predict`.
        """
        arguments.refuse("rank", others)
        arguments.check_flags("rank", return_documents=return_documents)
        if self.num_labels != 1:
            raise ValueError(f"rank: the model must have one label, a score, got {self.num_labels} labels")
        if top_k is not None and not (checks.is_natural(top_k) and top_k > 0):
            raise ValueError(f"rank: top_k must be None or a positive integer, got {top_k!r}")
        if isinstance(documents, str):
            raise TypeError("rank: documents must be a sequence of str, got one str")
        documents = batching.as_texts("rank", "documents", documents)
        if batching.is_sequence(query):
            raise TypeError(f"rank: query must be a str, got {type(query).__name__}; predict takes token ids of pairs")
        query = batching.as_text("rank", "query", query)
        scores = self.predict(
            [(query, text) for text in documents], prompt_name=prompt_name, prompt=prompt, batch_size=batch_size,
            show_progress_bar=show_progress_bar, activation_fn=activation_fn, devices=devices,
        )  # fmt: skip
        best = np.argsort(-scores, kind="stable")[:top_k]
        found: list[dict[str, Any]] = [{"corpus_id": int(i), "score": float(scores[i])} for i in best]
        if return_documents:
            for entry in found:
                entry["text"] = documents[entry["corpus_id"]]
        return found


def _given(
    prompt_length: np.int32 | None, last_steps: LastSteps, arrays: list[Any], rebuild: Rebuild, batch: Batch
) -> tuple[Any, ...]:  # fmt: skip
    types = batch.token_type_ids
    return arrays, batch.input_ids, types, batch.lengths, batch.longest, prompt_length, rebuild, last_steps


def _activated(logits: jax.Array, activation_fn: Activation, *, softmax: bool) -> jax.Array:
    """Returns the scores of logits `[n, num_labels]`."""
    scores = jnp.asarray(activation_fn(logits), jnp.float32)
    if scores.shape != logits.shape:
        raise ValueError(f"predict: activation_fn must return the shape {logits.shape}, got {scores.shape}")
    return jax.nn.softmax(scores, axis=-1) if softmax else scores


def _name_of(function: Activation) -> str | None:
    """Returns the name of a function in `ACTIVATIONS`. None if it is another function."""
    return next((name for name, known in ACTIVATIONS.items() if known is function), None)


def _checked_activation(where: str, function: Any) -> Activation | None:
    kind = type(function)
    if function is None or (callable(function) and not kind.__module__.startswith("torch.")):
        return function
    equivalent = f", for example jaxft.text.cross_encoder.ACTIVATIONS[{kind.__name__!r}]" * (
        kind.__name__ in ACTIVATIONS
    )
    raise TypeError(
        f"{where}: activation_fn must be a function of a JAX array{equivalent}, got {kind.__module__}.{kind.__name__}"
    )


def _saved_activation(folder: Path, transformer: Path) -> Activation | None:
    """Returns the activation in a folder's files, None if there is none."""
    file, field = folder / "config_sentence_transformers.json", "activation_fn"
    name = read_settings(file).get(field) if os.path.lexists(folder / "modules.json") else None
    if name is None:
        file = transformer / "config.json"
        config = read_settings(file)
        older = config.get("sentence_transformers")
        if not isinstance(older, dict) or field not in older:
            older, field = config, "sbert_ce_default_activation_function"
        name = older.get(field)
    if name is None:
        return None
    activation = ACTIVATIONS.get(str(name).rpartition(".")[2]) if str(name).startswith("torch.") else None
    if activation is None:
        raise CheckpointError(
            f"{file}: {field}: the activation function {name!r:.80} is not supported; supported are"
            f" {', '.join(ACTIVATIONS)} of PyTorch"
        )
    return activation
