"""MultiVectorModel: an encoder with a projection, which computes a vector for each token (ColBERT)."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jaxft import reference
from jaxft.models.bert import BertModel
from jaxft.models.config import BertConfig
from jaxft.models.embedding import Dense, Module, Normalize, check_modules
from jaxft.models.heads import EncoderWithHead

_EMPTY = -1e9  # the score of a document without tokens


class MultiVectorModel(nnx.Module):
    """An encoder and modules that are applied to the hidden state of each token, as of ColBERT.

    The model can be trained; `train()` and `eval()` turn dropout on and off as for `BertModel`. `max_sim` computes
    scores of its results.

    Args:
      encoder: the encoder.
      token_modules: `Dense` and `Normalize` modules, in order: for ColBERT a `Dense` without a bias and with the
        activation "Identity", then `Normalize`.

    Attributes:
      encoder: as the argument.
      token_modules: as the argument, an `nnx.List`.
      embedding_dimension: length of a vector.

    Raises:
      TypeError: a module has another type.
      ValueError: a module takes another width than the module before gives.
    """

    def __init__(self, encoder: BertModel, *, token_modules: Sequence[Module] = ()) -> None:
        self.encoder, self.token_modules = encoder, nnx.List([*token_modules])
        self.embedding_dimension = check_modules(
            "MultiVectorModel", "token_modules", Dense | Normalize, token_modules, encoder.config.hidden_size
        )

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> Array:
        """Computes the vectors of the tokens of a padded batch or, with `cu_seqlens`, of packed sequences.

        Takes the arguments of `BertModel.__call__` except `output_hidden_states`, and raises the same errors. In a
        padded batch, tokens with the mask 0 get vectors too: no token attends to them, but they attend to the others.
        ColBERT's query expansion needs that.

        Gradients: for all parameters.

        Returns:
          float32 `[B, T, D]`, or `[M, D]` for packed sequences.
        """
        tokens = self.encoder(
            input_ids, attention_mask, token_type_ids, position_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            deterministic=deterministic, rngs=rngs,
        ).last_hidden_state.astype(jnp.float32)  # fmt: skip
        for module in self.token_modules:
            tokens = module(tokens)
        return tokens


class StanfordColbert(EncoderWithHead):
    """A BERT with a projection, in the checkpoints of Stanford's ColBERT.

    Attributes:
      bert: the `BertModel`.
      linear_kernel: the projection, `[D, dim]`.
    """

    _TASK = "HF_ColBERT"

    def __init__(self, config: BertConfig, *, dim: int, rngs: nnx.Rngs | None, **options: Any) -> None:
        self.dim = dim
        super().__init__(config, rngs=rngs, **options)

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.linear_kernel = self.bert.embeddings.options.normal(rngs, self.config.hidden_size, self.dim)

    def projection(self) -> Dense:
        """Returns the projection as a module of a `MultiVectorModel`."""
        dense = Dense(self.config.hidden_size, self.dim, bias=False, activation="Identity", rngs=None)
        dense.kernel.set_value(self.linear_kernel[...].astype(jnp.float32))
        return dense


def max_sim(
    queries: Array, documents: Array, query_mask: Array | None = None, document_mask: Array | None = None
) -> Array:
    """Computes MaxSim: for each query token the largest dot product with a token of the document, summed up.

    The array `[Q, S, N, T]` of all dot products is in memory. Call it for a part of the documents at a time.

    Args:
      queries: floats `[Q, S, D]`.
      documents: floats `[N, T, D]`.
      query_mask: booleans `[Q, S]`, True for the tokens that count. None counts all.
      document_mask: booleans `[N, T]`, in the same way.

    Gradients: for queries and documents.

    Returns:
      float32 `[Q, N]`. A document without tokens has the score -1e9.
    """
    dtype = reference.wide_dtype(queries)
    products = jnp.einsum("qsd,ntd->qsnt", queries, documents, precision="highest", preferred_element_type=dtype)
    if document_mask is not None:
        products = jnp.where(document_mask[None, None], products, -jnp.inf)
    best = reference.largest(products, -1)
    if query_mask is not None:
        best = jnp.where(query_mask[:, :, None], best, 0)
    is_empty = documents.shape[1] == 0 if document_mask is None else ~jnp.any(document_mask, axis=1)[None]
    return jnp.where(is_empty, _EMPTY, jnp.sum(best, axis=1))
