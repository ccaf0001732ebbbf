"""BERT, RoBERTa and DistilBERT encoders with a head for masked language modelling, and its loss."""

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
    """Dense layer with an activation, LayerNorm, and the bias of the logits, whose matrix is the word embeddings."""

    def __init__(self, encoder: BertModel, rngs: nnx.Rngs | None) -> None:
        self.options, config = encoder.embeddings.options, encoder.config
        width = config.hidden_size
        self.activation = config.activation if config.model_type in ("bert", "distilbert") else "gelu"
        self.dense_kernel, self.dense_bias = self.options.normal(rngs, width, width), self.options.zeros(rngs, width)
        self.norm_gamma, self.norm_beta = self.options.ones(rngs, width), self.options.zeros(rngs, width)
        self.out_bias = self.options.zeros(rngs, config.vocab_size)

    def __call__(self, x: Array) -> Array:
        """Computes `[..., D]` from `x` `[..., D]`, the input of the matmul with the word embeddings."""
        kernel, bias = self.dense_kernel[...].astype(self.options.dtype), self.dense_bias[...]
        gamma, beta, epsilon = self.norm_gamma[...], self.norm_beta[...], self.options.config.layer_norm_eps
        implementation = self.options.implementation
        x = dense(x, kernel, bias, activation=self.activation, implementation=implementation)
        return layer_norm(x, gamma, beta, epsilon=epsilon, implementation=implementation)


class BertForMaskedLM(EncoderWithHead):
    """A BERT, RoBERTa or DistilBERT encoder with a head for masked language modelling, for logits or the loss.

    The network equals transformers' class of the same name (`RobertaForMaskedLM` and so on for the other types). The
    output matrix is the table of word embeddings, which `save_pretrained` writes once. `from_pretrained` reads
    checkpoints with and without a second copy of the table, and rejects a checkpoint with a separate output matrix.
    With `rngs`, `from_pretrained` adds a new head to the checkpoint of an encoder. Call the model like `BertModel`. A
    training step::

        @nnx.jit
        def train_step(model, optimizer, input_ids, labels, attention_mask):
            loss, grads = nnx.value_and_grad(lambda m: m.loss(input_ids, labels, attention_mask).mean)(model)
            optimizer.update(model, grads)
            return loss

    With dropout (after `model.train()`), the step also takes an `nnx.Rngs`. Draw a key before the function whose
    gradient is taken, `key = rngs.dropout()`, and pass `rngs=key` to `loss`.

    Takes the arguments of `BertModel` except `add_pooling_layer`, and raises the same errors. All
    arguments but `remat` also apply to the head. XLA computes the matmul with the
    word embeddings under every `implementation`.

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
        """Computes the logits of all tokens. For training, `loss` needs far less time and memory.

        Takes the arguments of `BertModel.__call__` except `output_hidden_states`, and raises the same errors.

        Returns:
          `[B, T, V]`, or `[M, V]` for packed sequences, in the model's `dtype`.

        Gradients: for all parameters.
        """
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic, "rngs": rngs}
        x = self._hidden(input_ids, attention_mask, token_type_ids, position_ids, **options)
        # XLA's matmul reads the table without a transposed copy, which the kernels of `dense` would need.
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
        """Computes the cross-entropy of the tokens that have a label. No logits are computed for the other tokens.

        The argument `labels` holds integers of the shape of `input_ids`: the ids of the tokens that were masked, and
        -100 elsewhere. In packed sequences, rows that belong to no sequence have no label, whatever `labels` holds
        there. `__call__` describes the other arguments. Raises the errors of `__call__` and
        `jaxft.linear_cross_entropy`.

        Returns:
          The result of `jaxft.linear_cross_entropy`: the tuple (total, labelled). Its property `mean` is the loss that
          transformers returns, or 0 if there is no label. For gradient accumulation over steps or for several devices,
          sum `total` and `labelled` before you divide.

        Gradients: for all parameters. A label that is not an id of the vocabulary makes the loss NaN.
        """
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic, "rngs": rngs}
        shape = inputs.as_ids("BertModel", "input_ids", input_ids).shape
        labels_of_all = inputs.as_ids("BertForMaskedLM", "labels", labels, shape)
        x = self._hidden(input_ids, attention_mask, token_type_ids, position_ids, **options)
        used = labels_in_use(labels_of_all, cu_seqlens, max_seqlen)
        return linear_cross_entropy(x, self.bert.embeddings.word[...], used, self.lm_head.out_bias[...])

    def _hidden(self, *ids: Any, **options: Any) -> Array:
        """Returns the input of the matmul with the word embeddings."""
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
