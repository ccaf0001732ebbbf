"""MultiVectorEncoder: computes a vector for each token of a text (ColBERT), as sentence-transformers does."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxft import dispatch
from jaxft.models.bert import BertModel
from jaxft.models.embedding import Module
from jaxft.models.float8 import Float8Recipe
from jaxft.models.multi_vector import MultiVectorModel, StanfordColbert
from jaxft.ops import checks
from jaxft.ops.bundle import Rebuild
from jaxft.text import arguments, batching, module_files, similarities
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import Batch
from jaxft.text.text_encoder import TextEncoder, Texts, name_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_EXPANSION = 127  # the type id that marks the tokens of query expansion


class MultiVectorEncoder(TextEncoder):
    """An encoder with its tokenizer and a projection: computes a vector for each token of a text (ColBERT).

    Use `from_pretrained` to load a checkpoint. The constructor takes the parts. Queries and documents are encoded
    differently: use `encode_query` and `encode_document`.

    Args:
      model: the encoder. Each `encode` reads its current parameters, so the model may be trained between calls.
      tokenizer: see `SentenceEncoder`.
      max_seq_length: see `SentenceEncoder`.
      token_modules: see `MultiVectorModel`.
      query_expansion: None, or a dict for ColBERT's expansion of queries: `"strategy"`, "fixed" for queries of exactly
        `"length"` tokens or "min" for at least `"length"`; `"attend"`, whether tokens attend to the added ones (by
        default not); and `"token"`, the added token (by default the mask token, or else the token that ends a text).
      mask_token: text of the mask token. None takes "[MASK]" or "<mask>" if the tokenizer has it.
      skiplist_words: tokens whose vectors are left out, for example `list(string.punctuation)`.
      skiplist_tasks: tasks for which they are left out, by default only documents. `encode` without a task counts as
        "document".
      keep_only_token_ids: if given, all texts but queries keep only the vectors of these tokens.
      prompts: see `SentenceEncoder`; for ColBERT often `{"query": "[Q] ", "document": "[D] "}`.
      default_prompt_name: see `SentenceEncoder`.
      similarity_fn_name: "maxsim", or "meanmaxsim" to divide by the number of query tokens. None takes "maxsim".
      token_types: see `SentenceEncoder`.
      packed: see `SentenceEncoder`. Queries to whose expansion no token attends are always padded.
      **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

    Attributes:
      embedder: the `MultiVectorModel`.
      tokenizer: as the argument.
      prompts: see `SentenceEncoder`.
      default_prompt_name: see `SentenceEncoder`.
      skiplist_words: as the argument, a list.
      skiplist_tasks: as the argument, a list.
      keep_only_token_ids: as the argument, a list.

    Raises:
      TypeError: see `SentenceEncoder`.
      ValueError: as for `SentenceEncoder`, or `query_expansion` is wrong or longer than the positions of the model.
    """

    _SIMILARITY = "maxsim"

    def __init__(
        self,
        model: BertModel,
        tokenizer: "Tokenizer",
        *,
        max_seq_length: int | None,
        token_modules: Sequence[Module] = (),
        query_expansion: Mapping[str, Any] | None = None,
        mask_token: str | None = None,
        skiplist_words: Sequence[str] = (),
        skiplist_tasks: Sequence[str] = ("document",),
        keep_only_token_ids: Sequence[int] = (),
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        token_types: bool = True,
        packed: bool | None = None,
        **others: Any,
    ) -> None:
        arguments.refuse("MultiVectorEncoder", others)
        self._mask_token = mask_token
        self._expanding: Texts | None = None  # for queries with expansion
        self.skiplist_words = _as_words("skiplist_words", skiplist_words)
        self.skiplist_tasks = _as_words("skiplist_tasks", skiplist_tasks)
        self.keep_only_token_ids = [*keep_only_token_ids]
        if not all(map(checks.is_natural, self.keep_only_token_ids)):
            raise TypeError(
                f"MultiVectorEncoder: keep_only_token_ids must be token ids, got {keep_only_token_ids!r:.80}"
            )
        self.keep_only_token_ids = [*map(int, self.keep_only_token_ids)]  # NumPy's are not for JSON
        super().__init__(
            MultiVectorModel(model, token_modules=token_modules), tokenizer, max_seq_length=max_seq_length,
            prompts=prompts, default_prompt_name=default_prompt_name, similarity_fn_name=similarity_fn_name,
            token_types=token_types, packed=packed,
        )  # fmt: skip
        self.query_expansion = query_expansion

        def embed(
            arrays: list[jax.Array], input_ids: jax.Array, types: jax.Array | None, lengths: jax.Array, longest: int,
            rebuild: Rebuild,
        ) -> tuple[jax.Array]:  # fmt: skip
            call = batching.sequences(input_ids, lengths, longest)
            if types is not None:
                call["attention_mask"] = call["attention_mask"] & (types != _EXPANSION)
            return (dispatch.on_host(rebuild(arrays)(input_ids, **call, deterministic=True)),)

        self._embed = jax.jit(embed, static_argnums=(4, 5))

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
        similarity_fn_name: str | None = None,
        dtype: DTypeLike | None = None,
        implementation: str | None = None,
        quantization: str | Float8Recipe | None = None,
        packed: bool | None = None,
        **others: Any,
    ) -> "MultiVectorEncoder":
        """Loads a MultiVectorEncoder of sentence-transformers, or a ColBERT model of PyLate or Stanford.

        A setting that would change embeddings and is not supported is an error, for example a token pooling module.

        Args:
          folder_or_id: a folder, or the id of a model on Hugging Face.
          revision: see `BertModel.from_pretrained`.
          cache_dir: see `BertModel.from_pretrained`.
          local_files_only: see `BertModel.from_pretrained`.
          max_seq_length: see `SentenceEncoder.from_pretrained`. The files may have other limits for queries and
            documents, which win.
          prompts: see `SentenceEncoder.from_pretrained`.
          default_prompt_name: see `SentenceEncoder.from_pretrained`.
          similarity_fn_name: see the constructor. None takes the name in the files.
          dtype: float32, float16 or bfloat16, the dtype of parameters and computation of the encoder. The modules after
            it compute in float32, and embeddings are always float32. None is bfloat16 for a model in float8 and float32
            for others.
          implementation: passed to every op. None picks the fastest for the device.
          quantization: "fp8" to multiply in float8_e4m3fn, see `BertModel.from_pretrained`.
          packed: see the constructor.
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
            load: dict[str, Any] = {
                "dtype": dtype, "implementation": implementation, "quantization": quantization
            }  # fmt: skip
            modules = layout.token_modules
            if layout.projection is None:
                model = BertModel.from_pretrained(layout.transformer, **load)
            else:
                colbert = StanfordColbert.from_pretrained(layout.transformer, dim=layout.projection, **load)
                model, modules = colbert.bert, (colbert.projection(), *modules)
            settings = tokenizer_files.Settings(layout.transformer)
            named = settings.named_tokens()
            mask = named.get("mask_token") or named.get("eos_token")
            return {
                "model": model,
                "token_modules": modules,
                "query_expansion": layout.query_expansion,
                "mask_token": None if mask is None else mask.content,
                **layout.mask,
            }

        return cls._load(
            folder_or_id, module_files.read_multi_vector_encoder, parts, revision=revision, cache_dir=cache_dir,
            local_files_only=local_files_only, max_seq_length=max_seq_length, prompts=prompts,
            default_prompt_name=default_prompt_name, similarity_fn_name=similarity_fn_name,
            dtype=dtype, implementation=implementation, quantization=quantization, packed=packed,
        )  # fmt: skip

    def _write(self, folder: str | os.PathLike[str], **own: Any) -> None:
        mask = {name: getattr(self, name) for name in module_files.MASK_FIELDS}
        mask["keep_only_token_ids"] = mask["keep_only_token_ids"] or None
        self._save(
            folder, {"model_type": "MultiVectorEncoder", **self._settings()}, mask=mask,
            query_expansion=self.query_expansion, **own,
        )  # fmt: skip

    @property
    def query_expansion(self) -> dict[str, Any] | None:
        """Settings of query expansion, see the class. They may be set; None turns it off.

        Setting them raises a ValueError if they are wrong or longer than the positions of the model.
        """
        return self._query_expansion

    @query_expansion.setter
    def query_expansion(self, value: Mapping[str, Any] | None) -> None:
        found = module_files.checked_expansion("MultiVectorEncoder", value)
        if found is not None:
            self._expansion_token(found)
            owner, argument, length = "MultiVectorEncoder", "length of query_expansion", found["length"]
            tokenizer_files.checked_limit(owner, argument, length, self.model.config)
            tokenizer_files.check_room(self.tokenizer, length, owner=owner, argument=argument)
        if found is not None and not found["attend"] and self.model.config.positions == "disentangled":
            raise ValueError("MultiVectorEncoder: query_expansion of DeBERTa must have attend=True")
        self._query_expansion, self._expanding = found, None

    def _expansion_token(self, expansion: Mapping[str, Any]) -> str:
        given = expansion["token"] or self._mask_token
        for token in ("[MASK]", "<mask>") if given is None else (given,):
            if self.tokenizer.token_to_id(token) is not None:
                return token
        raise ValueError(f"MultiVectorEncoder: token of query_expansion must be in the vocabulary, got {given!r:.80}")

    def _similarity_name(self, name: Any) -> str:
        return similarities.similarity_name("MultiVectorEncoder", "similarity_fn_name", name, similarities.MAX_SIMS)

    def _texts(self, task: str | None) -> Texts:
        expansion = self.query_expansion
        if task != "query" or expansion is None:
            return super()._texts(task)
        length = limit = expansion["length"]
        if expansion["strategy"] == "min":
            limit = max(length, super()._texts(task).batcher.limit)
        if self._expanding is None or self._expanding.batcher.limit != limit:
            self._expanding = Texts(
                self.tokenizer, self.model, limit, token_types=self._token_types,
                packed=self._packed and expansion["attend"], owner="MultiVectorEncoder",
                argument="length of query_expansion",
            )  # fmt: skip
            self._expanding.pad(length, self._expansion_token(expansion), None if expansion["attend"] else _EXPANSION)
        return self._expanding

    def encode(  # type: ignore[override]  # the base class names only the first argument
        self,
        inputs: str | Iterable[str] | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "token_embeddings",
        convert_to_numpy: bool = True,
        normalize_embeddings: bool = False,
        task: str | None = None,
        devices: Any = None,
        **others: Any,
    ) -> Any:
        """Computes the vectors of the tokens of texts. Batches are formed as in `SentenceEncoder.encode`.

        Args:
          inputs: see `SentenceEncoder.encode`.
          prompt_name: see `SentenceEncoder.encode`.
          prompt: see `SentenceEncoder.encode`.
          batch_size: see `SentenceEncoder.encode`.
          show_progress_bar: see `SentenceEncoder.encode`.
          output_value: "token_embeddings" for the vectors of the tokens that count; None for dicts with the vectors of
            all tokens and the inputs of the model.
          convert_to_numpy: see `SentenceEncoder.encode`.
          normalize_embeddings: whether to scale the vectors to length 1. Checkpoints with a Normalize module always do.
          task: "query" expands queries, "document" applies the skip list; both may have an own maximum number of
            tokens. `encode_query` and `encode_document` pass it.
          devices: see `SentenceEncoder.encode`.
          **others: none. An argument of sentence-transformers raises a TypeError that names the equivalent.

        Returns:
          A list of float32 `[tokens, embedding_dimension]` in the order of `inputs`; for a single text one array.

          With `output_value=None`, a list of dicts, for a single text one dict: `"input_ids"`, int32 `[tokens]`,
          `"attention_mask"`, booleans `[tokens]` that are True for the tokens that count, `"modality"`, which is
          "text", and `"token_embeddings"`, which `normalize_embeddings` does not concern.

        Raises:
          TypeError: see `SentenceEncoder.encode`.
          ValueError: see `SentenceEncoder.encode`.
          jax.errors.JaxRuntimeError: the device failed, or its memory does not suffice for one text.
        """
        arguments.refuse(name_of(task), others)
        arguments.check_flags(
            "encode", show_progress_bar=show_progress_bar, convert_to_numpy=convert_to_numpy,
            normalize_embeddings=normalize_embeddings,
        )  # fmt: skip
        known = ("output_value", output_value, ("token_embeddings", None))
        read, prompt, batch_size = self._start(inputs, prompt, prompt_name, batch_size, task, [known])
        convert = (lambda x: x) if convert_to_numpy else dispatch.to_device
        skipped = self._skipped(task)

        def finish(found: list[batching.Features]) -> Any:
            results: list[Any] = []
            for of_text in found:
                counts = ~np.isin(of_text.ids, skipped)
                if task != "query" and self.keep_only_token_ids:
                    counts &= np.isin(of_text.ids, self.keep_only_token_ids)
                if output_value is None:
                    features = {"input_ids": of_text.ids, "attention_mask": counts, "token_embeddings": of_text.tokens}
                    results.append({name: convert(x) for name, x in features.items()} | {"modality": "text"})
                    continue
                vectors = of_text.tokens if counts.all() else of_text.tokens[counts]
                results.append(convert(similarities.normalized(vectors) if normalize_embeddings else vectors))
            return results[0] if read.is_single else results

        return self._compute(read, prompt, task, batch_size, self._given, devices, finish, show_progress_bar)

    @staticmethod
    def _given(arrays: list[Any], rebuild: Rebuild, batch: Batch) -> tuple[Any, ...]:
        return arrays, batch.input_ids, batch.token_type_ids, batch.lengths, batch.longest, rebuild

    def _skipped(self, task: str | None) -> list[int]:
        """Returns the ids of the tokens whose vectors are left out."""
        if (task or "document") not in self.skiplist_tasks:
            return []
        ids = map(self.tokenizer.token_to_id, self.skiplist_words)
        return [number for number in ids if number is not None]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Computes the score of every query with every document: MaxSim.

        For each vector of the query, MaxSim takes the largest dot product with a vector of the document, and adds these
        numbers up. "meanmaxsim" divides by the number of the query's vectors. The scores are computed on the device, a
        chunk of queries and documents at a time, in float32 (matmuls at HIGHEST precision).

        Args:
          embeddings1: of queries: a list of floats `[tokens, D]`, an array `[n, tokens, D]`, or one query
            `[tokens, D]`.
          embeddings2: of documents, in the same forms.

        Returns:
          float32 `[n, m]`; a JAX array if an argument has a JAX array, a NumPy array otherwise. A document without
          vectors has the score -1e9.

        Raises:
          TypeError: an argument is no list of arrays of numbers.
          ValueError: the shapes do not fit.
        """
        return similarities.max_sims(embeddings1, embeddings2, mean=self.similarity_fn_name == "meanmaxsim")

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Computes the score of the first query with the first document, of the second ones, and so on.

        Args:
          embeddings1: of queries, as for `similarity`.
          embeddings2: of the same number of documents.

        Returns:
          float32 `[n]`, see `similarity`.

        Raises:
          TypeError: an argument is no list of arrays of numbers.
          ValueError: the shapes do not fit.
        """
        mean = self.similarity_fn_name == "meanmaxsim"
        return similarities.max_sims(embeddings1, embeddings2, mean=mean, pairwise=True)


def _as_words(name: str, words: Any) -> list[str]:
    words = batching.as_list("MultiVectorEncoder", name, words, "an iterable of str")
    return batching.as_texts("MultiVectorEncoder", name, words)
