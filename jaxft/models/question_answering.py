"""Encoders of all model types with a head that finds the answer to a question in a text: where it starts and ends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jaxft.models import inputs
from jaxft.models.classification import TokenClassificationHead, _Classifier
from jaxft.models.pooling import sequence_rows
from jaxft.ops import checks
from jaxft.ops.cross_entropy import CrossEntropy


class SpanLogits(NamedTuple):
    """Logits of the answer's first and last token, each `[B, T]`, or `[M]` for packed sequences."""

    start: Array
    end: Array


class BertForQuestionAnswering(_Classifier):
    """An encoder with a dense layer on each token, for logits of the first and of the last token of an answer.

    The network equals transformers' class of the same name (`RobertaForQuestionAnswering` and so on for the other
    types). Call and train the model like `BertModel`. Questions and texts are pairs: `[CLS] question [SEP] text [SEP]`.

    A call returns `SpanLogits`. The `labels` of `loss` are `[B, 2]`: the positions, in the sequence, of the first and
    the last token of the answer. A position outside of the sequence or at a masked token has no label. The softmax is
    over the tokens that are not masked.

    `BertModel` describes the arguments. `id2label` and `classifier_dropout` are as for `BertForSequenceClassification`,
    but there are always two labels, and there is dropout before the dense layer in DistilBERT (0.1) and ModernBERT (0)
    only.

    Attributes:
      bert: the `BertModel`. It has no pooler.
      qa_outputs: `kernel` `[D, 2]`, `bias` `[2]`.

    Raises:
      TypeError: as for `BertModel`.
      ValueError: as for `BertModel`, or the number of labels is not 2.
    """

    _TASK = "ForQuestionAnswering"

    def _add_head(self, rngs: nnx.Rngs | None) -> None:
        if self.num_labels != 2:
            raise ValueError(f"{type(self).__name__}: num_labels must be 2, of start and end, got {self.num_labels}")
        self.qa_outputs = TokenClassificationHead(self.bert.embeddings.options, 2, rngs)

    def _features(self, *ids: Any, **call: Any) -> Array:
        hidden, keys = self._encode(*ids, **call)
        key = None if keys is None else keys[0]
        return self.qa_outputs.features(hidden, dropout_rate=self._head_rate, dropout_rng=key)

    def _logits(self, x: Array) -> Any:
        logits = self.bert.embeddings.options.dense(x, self.qa_outputs.kernel, self.qa_outputs.bias)
        return SpanLogits(logits[..., 0], logits[..., 1])

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
        """Computes the cross-entropy of the positions in `labels`, `[B, 2]`, see the class.

        The other arguments, errors and gradients are as for the loss of the other heads. For a batch without masked
        tokens in which all answers have labels, `mean` of the result is the loss that transformers returns.
        """
        call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "deterministic": deterministic}
        call["rngs"] = rngs
        where, labels = type(self).__name__, inputs.as_ids(type(self).__name__, "labels", labels)
        logits = jnp.stack(self(input_ids, attention_mask, token_type_ids, position_ids, **call), axis=-1)
        logits = logits.astype(jnp.float32)
        if cu_seqlens is None:
            keep = jnp.ones(logits.shape[:2], bool)
            if attention_mask is not None:
                keep = inputs.as_ids("BertModel", "attention_mask", attention_mask, or_bool=True).astype(bool)
        else:
            starts = inputs.as_ids("BertModel", "cu_seqlens", cu_seqlens)
            length = checks.as_size("BertModel", "max_seqlen", max_seqlen)
            logits = sequence_rows(logits, starts, length).reshape(starts.size - 1, length, 2)
            keep = jnp.arange(length, dtype=jnp.int32)[None] < jnp.diff(starts)[:, None]
        checks.check_shape(where, "labels", labels, (logits.shape[0], 2))
        place = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :, None]
        keep = keep[..., None]
        is_label = (place == labels[:, None]) & keep
        is_empty = ~jnp.any(keep, axis=1, keepdims=True)  # without a finite logit, NaN would occur on the way
        logits = jnp.where(keep, logits, jnp.where(is_empty, 0.0, -jnp.inf))
        log_p = jax.nn.log_softmax(logits, axis=1, where=keep | is_empty)
        total = -jnp.sum(jnp.where(is_label, log_p, 0.0))
        return CrossEntropy(total, jnp.sum(is_label, dtype=jnp.int32))
