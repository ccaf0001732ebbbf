"""Encoders of all model types with a head for masked language modelling, and its loss."""

from typing import Any

from flax import nnx
from jax import Array

from jaxft.models.bert import BertModel, value
from jaxft.models.config import BertConfig
from jaxft.models.heads import EncoderWithHead
from jaxft.ops.dense import dense
from jaxft.ops.layer_norm import layer_norm

# Types whose head has the activation of the encoder; others have "gelu".
_OWN_ACTIVATION = ("bert", "ernie", "distilbert", "nomic_bert", "albert", "deberta-v2", "jina_bert")


class MaskedLMHead(nnx.Module):
    """Dense layer with an activation, LayerNorm, and the bias of the logits, whose matrix is the word embeddings."""

    def __init__(self, encoder: BertModel, rngs: nnx.Rngs | None) -> None:
        self.options, config = encoder.embeddings.options, encoder.config
        width = config.width_of_tables
        self.activation = config.activation if config.model_type in _OWN_ACTIVATION else "gelu"
        if config.classifier_norm:  # the head of classifiers
            self.activation = config.head_activation
        self.dense_kernel = self.options.normal(rngs, config.hidden_size, width)
        self.dense_bias = self.options.zeros(rngs, width) if config.classifier_bias else None
        self.norm_gamma, self.norm_beta = self.options.norm(rngs, width)
        self.out_bias = self.options.zeros(rngs, config.vocab_size)

    def __call__(self, x: Array) -> Array:
        """Computes the input of the matmul with the word embeddings, `[..., E]`, from `x` `[..., D]`."""
        x = self.options.dense(x, self.dense_kernel, self.dense_bias, self.activation)
        epsilon, implementation = self.options.config.layer_norm_eps, self.options.implementation
        gamma, beta = value(self.norm_gamma), value(self.norm_beta)
        return layer_norm(x, gamma, beta, epsilon=epsilon, implementation=implementation)


class BertForMaskedLM(EncoderWithHead):
    """An encoder with a head for masked language modelling, for logits or the loss.

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

    A call returns the logits of all tokens, `[B, T, V]`, or `[M, V]` for packed sequences. For training, `loss` needs
    far less time and memory. Its `labels` have the shape of `input_ids`: the ids of the tokens that were masked, and
    -100 elsewhere. Rows that belong to no packed sequence have no label, whatever `labels` holds there.

    Takes the arguments of `BertModel` except `add_pooling_layer`, and raises the same errors. All arguments but `remat`
    also apply to the head. XLA computes the matmul with the word embeddings under every `implementation`.

    Attributes:
      bert: the `BertModel`, without a pooler.
      lm_head: `dense_kernel` `[D, D]`, `dense_bias`, `norm_gamma` and `norm_beta` `[D]`, `out_bias` `[V]`.
    """

    _TASK = "ForMaskedLM"

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        self.lm_head = MaskedLMHead(self.bert, rngs)

    def _features(self, *ids: Any, **call: Any) -> Array:
        return self.lm_head(self.bert(*ids, **call).last_hidden_state)

    def _logits(self, x: Array) -> Array:
        # XLA's matmul reads the table without a transposed copy, which the kernels of `dense` would need.
        table = self.bert.embeddings.word[...].astype(x.dtype).T
        return dense(x, table, self.lm_head.out_bias[...], implementation="xla")

    def _classes(self) -> tuple[Array, Array]:
        return self.bert.embeddings.word[...], self.lm_head.out_bias[...]

    @classmethod
    def _head_options(cls, settings: dict[str, Any], config: BertConfig, given: dict[str, Any]) -> dict[str, Any]:
        tied = settings.get("tie_word_embeddings")
        if tied not in (None, True):
            raise ValueError(
                f"BertForMaskedLM: tie_word_embeddings must be true, an output layer with weights of its own is not "
                f"supported, got {tied!r:.100}"
            )
        return {**given}
