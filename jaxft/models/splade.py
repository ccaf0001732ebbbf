"""SpladeModel: an encoder with a head for masked language modelling, pooled to a weight for each token id (SPLADE)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jaxft.models import inputs
from jaxft.models.bert import BertModel
from jaxft.models.masked_lm import BertForMaskedLM
from jaxft.models.pooling import sequence_rows
from jaxft.ops import checks

POOLINGS, ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")

# Logits that are in memory at a time; fewer classes take part in a matmul if there are more tokens.
_LOGITS, _LEAST_CLASSES = 1 << 25, 512


class SpladeModel(nnx.Module):
    """A masked language model whose logits are pooled over the tokens: a weight for each token of the vocabulary.

    A token gives `log(1 + relu(logits))`. The logits of all tokens, `[M, V]`, are never in memory: they are computed
    and pooled for a part of the vocabulary at a time. The backward pass computes them again. The model can be trained;
    `train()` and `eval()` turn dropout on and off as for `BertModel`.

    Args:
      mlm: the masked language model.
      pooling_strategy: "max" takes the largest weight of a token id over the tokens of a text, "sum" adds the weights.
      activation_function: "relu", or "log1p_relu" for `log(1 + log(1 + relu(logits)))`.

    Attributes:
      mlm: as the argument.
      pooling_strategy: as the argument.
      activation_function: as the argument.

    Raises:
      TypeError: `mlm` is not a `BertForMaskedLM`.
      ValueError: `pooling_strategy` or `activation_function` is unknown.
    """

    def __init__(
        self, mlm: BertForMaskedLM, *, pooling_strategy: str = "max", activation_function: str = "relu"
    ) -> None:
        if not isinstance(mlm, BertForMaskedLM):
            raise TypeError(f"SpladeModel: mlm must be a BertForMaskedLM, got {type(mlm).__name__}")
        for name, value, known in (
            ("pooling_strategy", pooling_strategy, POOLINGS),
            ("activation_function", activation_function, ACTIVATIONS),
        ):
            if value not in known:
                raise ValueError(f"SpladeModel: {name} must be one of {', '.join(known)}, got {value!r:.80}")
        self.mlm, self.pooling_strategy, self.activation_function = mlm, pooling_strategy, activation_function

    @property
    def encoder(self) -> BertModel:
        """The encoder."""
        return self.mlm.bert

    @property
    def embedding_dimension(self) -> int:
        """The number of token ids, V."""
        return self.encoder.config.vocab_size

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
        """Computes the weights of a padded batch or, with `cu_seqlens`, of packed sequences.

        Takes the arguments of `BertModel.__call__` except `output_hidden_states`, and raises the same errors. All
        tokens under the mask take part in the pooling, special tokens included.

        Gradients: for all parameters. Tokens with the same largest logit share the gradient of a maximum.

        Returns:
          float32 `[B, V]`, not negative. A sequence without tokens has the weights 0. Logits that are NaN give infinite
          weights.
        """
        found = self.encoder(
            input_ids, attention_mask, token_type_ids, position_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            deterministic=deterministic, rngs=rngs,
        )  # fmt: skip
        x = self.mlm.lm_head(found.last_hidden_state)
        if cu_seqlens is None:
            mask = jnp.ones(x.shape[:2], jnp.bool)
            if attention_mask is not None:
                mask = inputs.as_ids("SpladeModel", "attention_mask", attention_mask, or_bool=True).astype(jnp.bool)
        else:
            starts = inputs.as_ids("SpladeModel", "cu_seqlens", cu_seqlens)
            longest = checks.as_size("SpladeModel", "max_seqlen", max_seqlen)
            mask = jnp.arange(longest, dtype=jnp.int32)[None] < jnp.diff(starts)[:, None]

        wide = x.astype(jnp.float32)  # so that the gradients of the parts are added in float32

        def pooled(table: Array, bias: Array) -> Array:
            """Returns float32 `[B, C]` for the matrix `[C, D]` and the bias `[C]` of some token ids."""
            logits = jnp.matmul(
                wide.astype(x.dtype), table.astype(x.dtype).T, preferred_element_type=jnp.float32
            )  # fmt: skip
            logits = logits + jnp.expand_dims(bias.astype(jnp.float32), range(logits.ndim - 1))
            if cu_seqlens is not None:
                logits = sequence_rows(logits, starts, longest)
            logits = jnp.where(jnp.isnan(logits), jnp.inf, logits)  # XLA's maximum may ignore NaN on a CPU
            # relu and log1p keep the order: the largest logit has the largest weight.
            if self.pooling_strategy == "max":
                return self._activated(jnp.max(logits, axis=1, where=mask[:, :, None], initial=0.0))
            return jnp.sum(self._activated(logits), axis=1, where=mask[:, :, None])

        table, bias = self.encoder.embeddings.word[...], self.mlm.lm_head.out_bias[...]
        tokens, classes = x[..., 0].size, _LEAST_CLASSES
        if isinstance(tokens, int):  # not a symbolic size of jax.export
            classes = max(_LOGITS // max(tokens, 1) // 128 * 128, _LEAST_CLASSES)
        parts = -(-table.shape[0] // classes)
        if parts == 1:
            return pooled(table, bias)
        classes = -(-table.shape[0] // parts // 8) * 8  # a multiple of 8, which cuBLAS needs
        more = parts * classes - table.shape[0]
        tables = jnp.pad(table, ((0, more), (0, 0))).reshape(parts, classes, -1)
        biases = jnp.pad(bias, (0, more)).reshape(parts, classes)
        found = jax.lax.map(jax.checkpoint(lambda part: pooled(*part)), (tables, biases))
        return jnp.moveaxis(found, 0, 1).reshape(found.shape[1], -1)[:, : table.shape[0]]

    def _activated(self, logits: Array) -> Array:
        weights = jnp.log1p(jnp.maximum(logits, 0))
        return jnp.log1p(weights) if self.activation_function == "log1p_relu" else weights
