"""Under which names checkpoints keep the parameters of the heads; those of the encoders are in `checkpoint`.

By the `model_type` of BERT, RoBERTa and DistilBERT; XLM-RoBERTa and CamemBERT are as RoBERTa.
"""

from collections.abc import Mapping

Names = dict[str, list[str]]

# Sequence classification: a dense layer on the first token, which in BERT is the pooler, and one to the labels.

_CLASSIFICATION: Mapping[str, Names] = {
    "bert": {
        "head.dense_kernel": ["pooler.dense.weight"],
        "head.dense_bias": ["pooler.dense.bias"],
        "head.out_kernel": ["classifier.weight"],
        "head.out_bias": ["classifier.bias"],
    },
    "roberta": {
        "head.dense_kernel": ["classifier.dense.weight"],
        "head.dense_bias": ["classifier.dense.bias"],
        "head.out_kernel": ["classifier.out_proj.weight"],
        "head.out_bias": ["classifier.out_proj.bias"],
    },
    "distilbert": {
        "head.dense_kernel": ["pre_classifier.weight"],
        "head.dense_bias": ["pre_classifier.bias"],
        "head.out_kernel": ["classifier.weight"],
        "head.out_bias": ["classifier.bias"],
    },
}

# Token classification: a layer to the labels alone.

_TOKEN_CLASSIFICATION: Names = {"classifier.kernel": ["classifier.weight"], "classifier.bias": ["classifier.bias"]}

# Masked language modelling: a dense layer and a LayerNorm, and the bias of the logits, whose matrix is that of the word
# embeddings.

_MASKED_LM: Mapping[str, Names] = {
    "bert": {
        "lm_head.dense_kernel": ["cls.predictions.transform.dense.weight"],
        "lm_head.dense_bias": ["cls.predictions.transform.dense.bias"],
        "lm_head.norm_gamma": ["cls.predictions.transform.LayerNorm.weight"],
        "lm_head.norm_beta": ["cls.predictions.transform.LayerNorm.bias"],
        "lm_head.out_bias": ["cls.predictions.bias"],
    },
    "roberta": {
        "lm_head.dense_kernel": ["lm_head.dense.weight"],
        "lm_head.dense_bias": ["lm_head.dense.bias"],
        "lm_head.norm_gamma": ["lm_head.layer_norm.weight"],
        "lm_head.norm_beta": ["lm_head.layer_norm.bias"],
        "lm_head.out_bias": ["lm_head.bias"],
    },
    "distilbert": {
        "lm_head.dense_kernel": ["vocab_transform.weight"],
        "lm_head.dense_bias": ["vocab_transform.bias"],
        "lm_head.norm_gamma": ["vocab_layer_norm.weight"],
        "lm_head.norm_beta": ["vocab_layer_norm.bias"],
        "lm_head.out_bias": ["vocab_projector.bias"],
    },
}

NAMES: Mapping[str, Names] = {
    kind: _CLASSIFICATION[kind] | _TOKEN_CLASSIFICATION | _MASKED_LM[kind] for kind in ("bert", "roberta", "distilbert")
}

# The last layer of the classifiers, whose first axis is the labels'.
LABELS = ("classifier.weight", "classifier.bias", "classifier.out_proj.weight", "classifier.out_proj.bias")

# What a checkpoint of masked language modelling may hold a second time -> the name of the first.
_WORDS = "embeddings.word_embeddings.weight"
TIED: Mapping[str, Mapping[str, str]] = {
    "bert": {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    "roberta": {"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    "distilbert": {"vocab_projector.weight": _WORDS},
}
