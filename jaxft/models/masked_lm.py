"""BERT, RoBERTa and DistilBERT encoders with the head of masked language modelling, and its loss."""

from typing import Any

from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jaxft.models import inputs
from jaxft.models.bert import BertModel
from jaxft.models.config import BertConfig
from jaxft.models.heads import EncoderWithHead, labels_in_use
from jaxft.ops.cross_entropy import CrossEntropy, linear_cross_entropy
from jaxft.ops.dense import dense
from jaxft.ops.layer_norm import layer_norm


class MaskedLMHead(nnx.Module):
    """A dense layer with its activation, and a LayerNorm; the bias of the logits, whose matrix is the word embeddings'.

    The activation is the encoder's, in RoBERTa always GELU.
    """

    def __init__(self, encoder: BertModel, rngs: nnx.Rngs | None) -> None:
        self.options, config = encoder.embeddings.options, encoder.config
        width = config.hidden_size
        self.activation = config.activation if config.model_type in ("bert", "distilbert") else "gelu"
        self.dense_kernel, self.dense_bias = self.options.normal(rngs, width, width), self.options.zeros(rngs, width)
        self.norm_gamma, self.norm_beta = self.options.ones(rngs, width), self.options.zeros(rngs, width)
        self.out_bias = self.options.zeros(rngs, config.vocab_size)

    def __call__(self, x: Array) -> Array:
        """`x` `[..., D]` -> `[..., D]`, which the word embeddings make logits of."""
        kernel, bias = self.dense_kernel[...].astype(self.options.dtype), self.dense_bias[...]
        gamma, beta, epsilon = self.norm_gamma[...], self.norm_beta[...], self.options.config.layer_norm_eps
        implementation = self.options.implementation
        x = dense(x, kernel, bias, activation=self.activation, implementation=implementation)
        return layer_norm(x, gamma, beta, epsilon=epsilon, implementation=implementation)


class BertForMaskedLM(EncoderWithHead):
    """A BERT, RoBERTa or DistilBERT encoder and its head for masked language modelling: logits, or the loss.

    The same network as transformers' classes of that name (`RobertaForMaskedLM` and so on for the other types). The
    output matrix is that of the word embeddings, which `save_pretrained` writes once; `from_pretrained` reads
    checkpoints with and without a second copy, and refuses one with an output matrix of its own; with `rngs` it adds a
    new head to the checkpoint of an encoder. Used in `nnx.jit` and `jax.jit` as `BertModel`. A training step::

        @nnx.jit
        def train_step(model, optimizer, input_ids, labels, attention_mask):
            loss, grads = nnx.value_and_grad(lambda m: m.loss(input_ids, labels, attention_mask).mean)(model)
            optimizer.update(model, grads)
            return loss

    With dropout, after `model.train()`, it also takes an `nnx.Rngs` and draws a key from it before the function whose
    gradient is taken: `key = rngs.dropout()`, and then `m.loss(input_ids, labels, attention_mask, rngs=key)`.

    Args:
      config: sizes and options of the encoder.
      dtype, param_dtype, implementation: as for `BertModel`; they hold for the head too, but the product with the
        vocabulary's matrix is XLA's under every `implementation`.
      remat: as for `BertModel`.
      rngs: random numbers for the initial parameters, as for `BertModel`; those of the head are made as the encoder's.

    Attributes:
      bert: the `BertModel`, without a pooler.
      lm_head: `dense_kernel` `[D, D]`, `dense_bias`, `norm_gamma` and `norm_beta` `[D]`, `out_bias` `[V]`.
    """

    _TASK = "ForMaskedLM"

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.lm_head = MaskedLMHead(self.bert, rngs)

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
        """Computes the logits of all tokens; for training, `loss` needs far less time and memory.

        Args: all as for `BertModel`.

        Returns:
          `[B, T, V]`, of packed tokens `[M, V]`, in the model's `dtype`.

        Raises:
          TypeError, ValueError: as `BertModel`.

        Gradients: of all parameters.
        """
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic, "rngs": rngs}
        x = self._hidden(input_ids, attention_mask, token_type_ids, position_ids, **options)
        # XLA's product reads the table as it lies; the kernels of `dense` would need a transposed copy.
        table = self.bert.embeddings.word[...].astype(x.dtype).T
        return dense(x, table, self.lm_head.out_bias[...], implementation="xla")

    def loss(
        self,
        input_ids: ArrayLike,
        labels: ArrayLike,
        attention_mask: ArrayLike | None = None,
        token_type_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        *,
        cu_seqlens: ArrayLike | None = None,
        max_seqlen: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> CrossEntropy:
        """The cross-entropy of the tokens that have a label; of the others no logits are computed.

        Args:
          labels: integers of the shape of `input_ids`, the ids of the tokens that were masked, and -100 elsewhere. Of
            packed tokens, rows that take no part in a sequence have no label, whatever is given there.
          input_ids, attention_mask, token_type_ids, position_ids: as for `BertModel`.
          cu_seqlens, max_seqlen, deterministic, rngs: likewise.

        Returns:
          What `jaxft.linear_cross_entropy` returns: the tuple (total, labelled), whose property `mean` is the loss
          that transformers returns, and 0 where there is no label. Over the steps of gradient accumulation or over
          devices, add up both before dividing.

        Raises:
          TypeError, ValueError: as `BertModel` and `jaxft.linear_cross_entropy`.

        Gradients: of all parameters. A label that is no id of the vocabulary makes the loss NaN.
        """
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic, "rngs": rngs}
        shape = inputs.as_ids("BertModel", "input_ids", input_ids).shape
        labels_of_all = inputs.as_ids("BertForMaskedLM", "labels", labels, shape)
        x = self._hidden(input_ids, attention_mask, token_type_ids, position_ids, **options)
        used = labels_in_use(labels_of_all, cu_seqlens, max_seqlen)
        return linear_cross_entropy(x, self.bert.embeddings.word[...], used, self.lm_head.out_bias[...])

    def _hidden(self, *ids: Any, **options: Any) -> Array:
        """What the word embeddings make logits of."""
        return self.lm_head(self.bert(*ids, **options).last_hidden_state)

    @classmethod
    def _head_options(cls, settings: dict[str, Any], config: BertConfig, given: dict[str, Any]) -> dict[str, Any]:
        tied = settings.get("tie_word_embeddings")
        if tied not in (None, True):
            raise ValueError(
                f"BertForMaskedLM: tie_word_embeddings must be true, an output layer with weights of its own is not "
                f"supported, got {tied!r:.100}"
            )
        return {**given}
