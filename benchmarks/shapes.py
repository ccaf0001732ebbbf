"""The shapes that benchmarks, `tune.py` and tests use: one list for each operation.

This file is plain data with a few small functions. It imports neither JAX nor jaxft.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

DTYPES = ("bfloat16", "float32")
FORWARD, BOTH = "forward", "forward+backward"
DIRECTIONS = (FORWARD, BOTH)

# --- Row kernels ---------------------------------------------------------------------------------------------------

#: rows, width
LAYER_NORM = [(128, 768), (1024, 768), (4096, 768), (16384, 768), (16384, 1024), (65536, 1024), (4096, 384)]
#: rows, width of the feed-forward layer
BIAS_ACTIVATION = [(128, 3072), (1024, 3072), (4096, 3072), (16384, 4096), (4096, 1536)]


#: rows, width of the result of a gated feed-forward layer: ModernBERT-base, ModernBERT-large, GTE-base and NomicBERT
GATED_ACTIVATION = [(128, 1152), (4096, 1152), (16384, 1152), (16384, 2624), (16384, 3072)]


#: rows, depth, width of the result of a gated matmul
GATED_DENSE = [(32, 768, 1152), (128, 768, 1152), (4096, 768, 1152), (16384, 768, 1152), (16384, 1024, 2624)]


class Softmax(NamedTuple):
    """A softmax over the last axis. `op` is "softmax" or "log_softmax"; what follows a comma says how it is called."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    directions: tuple[str, ...] = DIRECTIONS

    @property
    def masked(self) -> bool:
        """Returns whether there are a mask and a scale."""
        return self.op.endswith(", masked")

    @property
    def one_buffer(self) -> bool:
        """Returns whether all calls have the same input, which is then in the L2 cache."""
        return self.op.endswith(", one buffer")


_ELEMENTS = 64 * 2**20
SOFTMAX = [
    *(Softmax("softmax", (_ELEMENTS // width, width), "float16") for width in (2**n for n in range(4, 16))),
    *(Softmax("softmax", (rows, width), "bfloat16") for rows in (128, 4096) for width in (128, 1024)),
    Softmax("log_softmax", (256, 250_000), "bfloat16"),  # a vocabulary
    # Attention scores: the sizes of OneFlow's table, and FasterTransformer's, with mask and scale.
    *(Softmax("softmax", (32, 64, length, length), "float32") for length in (16, 32, 64, 128, 256, 512)),
    *(Softmax("softmax, masked", (32, 12, length, length), "float16") for length in (128, 512)),
    # OneFlow does not say whether its inputs were in the cache. Its shortest times are below memory's.
    *(Softmax("softmax, one buffer", (32, 64, length, length), "float32", (FORWARD,)) for length in (16, 32)),
    *(Softmax("softmax", (_ELEMENTS // width, width), "float32") for width in (2**n for n in range(10, 16))),
]
SOFTMAX_QUICK = [case for case in SOFTMAX if math.prod(case.shape) <= _ELEMENTS // 2]

#: batch, length
EMBEDDINGS = [(1, 128), (8, 128), (32, 128), (32, 512)]
EMBEDDINGS_WIDTH = 768
#: rows of the word, position and token type tables of BERT-base
EMBEDDINGS_TABLES = (30522, 512, 2)

# --- Layouts -------------------------------------------------------------------------------------------------------

PERMUTE_DTYPES = ("float16", "float32")
#: shape, axes; no axis is 1, and no two axes can be merged
PERMUTE: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((8, 128, 12, 64), (0, 2, 1, 3)),
    ((32, 128, 12, 64), (0, 2, 1, 3)),
    ((1024, 1024), (1, 0)),
    ((32, 512, 12, 64), (0, 2, 1, 3)),
    ((8192, 8192), (1, 0)),
    ((8191, 8193), (1, 0)),
    ((256, 512, 1024), (2, 1, 0)),
]
#: batch, length, heads, head size
SPLIT_HEADS = [(8, 128, 12, 64), (32, 128, 12, 64), (32, 512, 12, 64)]

#: batch, length, heads, head size
ROTARY = [(1, 128, 12, 64), (32, 128, 12, 64), (32, 512, 12, 64), (2, 8192, 12, 64)]

# --- Attention -----------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    """Self-attention of `batch` sequences of `length` tokens, from packed QKV."""

    batch: int
    length: int
    heads: int
    head_size: int


#: The first four have 32,768 or 16,384 tokens, the others are the layers of BERT-base, MiniLM-L6 and short sentences.
ATTENTION = [
    Attention(256, 128, 16, 64),
    Attention(64, 512, 16, 64),
    Attention(8, 2048, 16, 64),
    Attention(2, 8192, 16, 64),
    Attention(1, 128, 12, 64),
    Attention(8, 128, 12, 64),
    Attention(32, 128, 12, 64),
    Attention(128, 128, 12, 64),
    Attention(32, 512, 12, 64),
    Attention(32, 128, 12, 32),
    Attention(128, 64, 12, 64),
]
#: Shapes that are also timed with random lengths of keys, half of which are valid.
ATTENTION_HALF_VALID = ATTENTION[:4]
#: Attention with a table of biases by relative position, of this reach on each side, as MPNet has it.
RELATIVE_BIAS = [Attention(32, 512, 12, 64), Attention(32, 128, 12, 64), Attention(8, 2048, 12, 64)]
RELATIVE_BIAS_REACH = 128
#: In float64 the gradient of plain jnp does not fit into a card's memory for longer sequences.
ATTENTION_LONGEST_GRADIENT = 2048


class PackedAttention(NamedTuple):
    """Self-attention of packed sequences: `rows` tokens in at most `sequences` sequences of at most `longest` tokens.

    Lengths are `longest` times a random number to the power of `skew`.
    """

    rows: int
    sequences: int
    longest: int
    skew: int
    heads: int = 16
    head_size: int = 64


#: Like a step of examples/pretrain.py, and like a batch of longer texts.
ATTENTION_PACKED = [PackedAttention(16384, 1024, 128, 3), PackedAttention(16384, 64, 512, 1)]

# --- Dense layers --------------------------------------------------------------------------------------------------

#: depth, width of the matmuls of a layer of BERT-base and of BERT-large
BERT_BASE = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
BERT_LARGE = [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]
#: rows, depth, width
DENSE = [
    *((rows, *sizes) for rows in (16, 32, 64, 128, 256, 512, 1024, 4096, 16384) for sizes in BERT_BASE),
    *((rows, *sizes) for rows in (128, 256, 512, 1024, 4096, 16384) for sizes in BERT_LARGE),
    *((rows, 768, 3072) for rows in (2047, 16383)),  # no multiple of 8, which Mosaic GPU needs
]
#: (op, shape) of `bench_dense.py` that are also timed with named implementations
DENSE_NAMED = [
    *(("dense", (rows, 3072, 768)) for rows in (4096, 16384)),
    *((f"dense with {gelu} GELU", (rows, 768, 3072)) for rows in (4096, 16384) for gelu in ("erf", "tanh")),
]
#: rows, width, inner width
FEED_FORWARD = [(rows, *sizes) for rows in (512, 4096, 16384) for sizes in ((768, 3072), (1024, 4096))]
#: rows, width, classes of BERT-base
CROSS_ENTROPY = [(rows, 768, 30522) for rows in (4096, 16384)]
#: The share of rows that have a label; masked language modelling has about 15 %.
CROSS_ENTROPY_LABELLED = (1.0, 0.15)

#: queries, entries of the corpus, components
SEARCH = [(1, 100_000, 384), (100, 100_000, 384), (100, 1_000_000, 384)]


def is_ffn_input(depth: int, width: int) -> bool:
    """Returns whether a dense layer of these sizes is the first one of a feed-forward network, before the GELU."""
    return width == 4 * depth


def dense_dtypes(rows: int, depth: int, width: int) -> tuple[str, ...]:
    """Returns the dtypes that a shape of `DENSE` is timed with: float32 for few rows of BERT-base only."""
    return DTYPES if rows <= 1024 and (depth, width) in BERT_BASE else DTYPES[:1]


# --- Encoders ------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """The sizes of an encoder. `inner` is the width of the feed-forward layer."""

    layers: int
    width: int
    heads: int
    inner: int


MODELS = {
    "MiniLM-L6": Model(6, 384, 12, 1536),
    "BERT-base": Model(12, 768, 12, 3072),
    "BERT-large": Model(24, 1024, 16, 4096),
}


def encoder_flops(model: str, lengths: Sequence[int]) -> int:
    """Returns the FLOP of a forward pass: projections, feed-forward network, QK^T and PV. Only valid tokens count."""
    layers, width, _, inner = MODELS[model]
    return layers * sum(n * (2 * (4 * width**2 + 2 * width * inner) + 4 * n * width) for n in lengths)


#: Hugging Face's name of an activation, and the form of GELU that it is.
GELUS = {"gelu": "erf", "gelu_new": "tanh"}


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A batch for a whole encoder.

    Attributes:
      model: a key of `MODELS`.
      batch: number of sequences.
      length: tokens of a sequence, padding included.
      dtype: dtype of parameters and hidden states.
      valid: number of tokens that are not padding, or None if all are valid.
    """

    model: str
    batch: int
    length: int
    dtype: str = "bfloat16"
    valid: int | None = None

    def op(self, gelu: str) -> str:
        """Returns the name in the results."""
        padding = "" if self.valid is None else f", {self.valid} valid tokens"
        return f"encoder {self.model} {GELUS[gelu]} GELU{padding}"

    def label(self, gelu: str) -> str:
        """Returns the name with the sizes, which `--only` searches."""
        return f"{self.op(gelu)} {self.batch}x{self.length} {self.dtype}"


_BFLOAT16 = [
    Encoder("BERT-base", 1, 128),
    Encoder("BERT-base", 8, 128),
    Encoder("BERT-base", 32, 128),
    Encoder("BERT-base", 128, 128),
    Encoder("BERT-base", 32, 512),
    Encoder("BERT-base", 32, 512, valid=9394),
    Encoder("BERT-large", 32, 512),
    *(Encoder("BERT-base", 1, length) for length in (16, 32)),  # search queries
]
ENCODER = [
    *_BFLOAT16,
    *(dataclasses.replace(case, dtype="float16") for case in _BFLOAT16),
    *(Encoder("BERT-base", *shape, "float32") for shape in ((1, 128), (8, 128), (32, 128), (32, 512))),
]
ENCODER_QUICK = ENCODER[:3]
#: rows, depth, width of matmuls in float8
FP8_DENSE = [
    (4096, 768, 2304), (4096, 768, 3072), (4096, 3072, 768), (4096, 768, 768), (128, 768, 3072), (512, 3072, 768),
    (16384, 768, 3072), (16384, 3072, 768), (16384, 1024, 3072), (16384, 1024, 4096), (16384, 4096, 1024),
]  # fmt: skip
FP8_ENCODER = [
    Encoder("BERT-base", 32, 128), Encoder("BERT-base", 128, 128), Encoder("BERT-base", 32, 512),
    Encoder("BERT-base", 32, 512, valid=9394), Encoder("BERT-large", 32, 512),
]  # fmt: skip
# Few tokens: the card does not reach its power limit.
FP8_FEW = [Encoder("BERT-base", 1, 16), Encoder("BERT-base", 1, 128), Encoder("BERT-base", 8, 64),
           Encoder("BERT-base", 16, 64)]  # fmt: skip
TRAINING = [Encoder("BERT-base", 32, 128), Encoder("BERT-base", 32, 512)]
TRAINING_DROPOUT = (0.0, 0.1)


class Contrastive(NamedTuple):
    """A contrastive training step in bfloat16. `valid` tokens of the texts are no padding; None is all of them."""

    model: str
    pairs: int
    length: int
    valid: int | None = None
    dropout: float = 0.0
    adamw: bool = False

    @property
    def op(self) -> str:
        """Returns the name in the results."""
        padding = "" if self.valid is None else f", {self.valid} valid tokens"
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return f"contrastive step {self.model}{padding}{dropout}{' with AdamW' * self.adamw}"

    @property
    def texts(self) -> Encoder:
        """Returns the batch of queries and documents."""
        return Encoder(self.model, 2 * self.pairs, self.length, valid=self.valid)


CONTRASTIVE = [
    Contrastive("BERT-base", 256, 128),
    Contrastive("BERT-base", 256, 128, adamw=True),
    Contrastive("BERT-base", 256, 128, dropout=0.1),
    Contrastive("BERT-base", 256, 128, valid=32768),
]

# --- Other libraries -----------------------------------------------------------------------------------------------

#: batch, length of `bench_peers.py`
PEERS_FORWARD = [(1, 128), (32, 128), (32, 512)]
PEERS_TRAINING = [(32, 128), (32, 512)]

# --- Modern encoders -----------------------------------------------------------------------------------------------

#: Name -> fields of config.json that differ from the defaults of the model type.
MODERN_CONFIGS: dict[str, dict[str, Any]] = {
    "ModernBERT-base": {"model_type": "modernbert"},
    "MPNet-base": {"model_type": "mpnet", "max_position_embeddings": 514},
    "GTE-v1.5-base": {"model_type": "gte", "vocab_size": 30528, "type_vocab_size": 0, "pad_token_id": 0},
    "NomicBERT-base": {"model_type": "nomic_bert"},
    "DeBERTa-v3-base": {
        "model_type": "deberta-v2", "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
        "max_position_embeddings": 512, "relative_attention": True, "share_att_key": True, "position_buckets": 256,
        "max_relative_positions": -1, "position_biased_input": False, "norm_rel_ebd": "layer_norm",
        "pos_att_type": "p2c|c2p",
    },
    "ELECTRA-base": {
        "model_type": "electra", "embedding_size": 768, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072,
    },
    "ALBERT-base": {
        "model_type": "albert", "embedding_size": 128, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu_new",
    },
}  # fmt: skip


#: Model -> the least speedup over (plain JAX, transformers) that is aimed at.
MODERN_TARGETS = {
    "ModernBERT-base": (1.4, 1.4), "MPNet-base": (1.4, 2.0), "GTE-v1.5-base": (1.4, 1.4), "NomicBERT-base": (1.4, 1.4),
    "DeBERTa-v3-base": (1.0, 0.0), "ELECTRA-base": (1.0, 0.0), "ALBERT-base": (1.0, 0.0),
}  # fmt: skip
MODERN_RAGGED_TARGET = 2.0
_MODERN_TRAINING = "modern training step"


def modern_targets(op: str) -> tuple[float, float]:
    """Returns the least speedups over plain JAX and transformers that rows with this op aim at, 0 for none."""
    model = next((name for name in MODERN_TARGETS if name in op), None)
    if model is None or op.startswith(_MODERN_TRAINING):
        return 0.0, 0.0
    least = MODERN_RAGGED_TARGET if "valid tokens" in op else 0.0
    over_jax, over_torch = MODERN_TARGETS[model]
    return max(least, over_jax), max(least, over_torch)


class Modern(NamedTuple):
    """A batch for an encoder with its embeddings, in bfloat16. `valid` tokens are no padding; None is all of them."""

    model: str
    batch: int
    length: int
    valid: int | None = None
    training: bool = False

    @property
    def op(self) -> str:
        """Returns the name in the results."""
        padding = "" if self.valid is None else f", {self.valid} valid tokens"
        return f"{_MODERN_TRAINING if self.training else 'modern encoder'} {self.model}{padding}"

    @property
    def label(self) -> str:
        """Returns the name with the sizes, which `--only` searches."""
        return f"{self.op} {self.batch}x{self.length}"


#: The most important ones come first.
MODERN = [
    *(Modern("ModernBERT-base", *shape) for shape in ((32, 512), (8, 2048), (32, 128), (1, 128), (2, 8192))),
    Modern("ModernBERT-base", 32, 512, valid=9394),
    Modern("ModernBERT-base", 8, 2048, valid=6554),
    *(Modern("MPNet-base", *shape) for shape in ((32, 512), (32, 128), (1, 128))),
    *(Modern("ModernBERT-base", *shape, training=True) for shape in ((32, 512), (32, 128), (8, 2048))),
    *(Modern("MPNet-base", *shape, training=True) for shape in ((32, 512), (32, 128))),
    *(
        Modern(model, 32, length)
        for model in ("GTE-v1.5-base", "NomicBERT-base", "DeBERTa-v3-base", "ELECTRA-base", "ALBERT-base")
        for length in (512, 128)
    ),
]
