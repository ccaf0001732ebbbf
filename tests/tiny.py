"""Tiny random models with a tokenizer of their own, written to folders as sentence-transformers lays them out."""

import json
import random
import string

import jax
from flax import nnx
from tokenizers import Tokenizer, models, processors
from tokenizers.implementations import BertWordPieceTokenizer

from jaxft.models.bert import BertConfig, BertModel
from jaxft.models.classification import BertForSequenceClassification

WIDTH = 16
WORDS = ("a", "bird", "sings", "in", "the", "old", "tree", "rain", "falls", "on", "river", ".", ",")
VOCAB = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
VOCAB += tuple(c for c in string.ascii_letters if c not in VOCAB) + tuple("##" + c for c in string.ascii_letters)
TYPES = "sentence_transformers.models."


def texts(count):
    """Returns random texts of 1 to 40 words."""
    return [" ".join(random.Random(i).choices(WORDS, k=1 + i * 7 % 40)) for i in range(count)]


def write_json(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def write_modules(folder, *modules):
    """Writes modules.json with `(type, path)` pairs."""
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "type": t, "path": path} for i, (t, path) in enumerate(modules)],
    )


def config(**options):
    sizes = {
        "vocab_size": len(VOCAB),
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,  # so that embeddings of different texts are far apart
    }
    return BertConfig(**(sizes | options))


def bert_tokenizer():
    return BertWordPieceTokenizer(vocab={token: i for i, token in enumerate(VOCAB)}, lowercase=True)._tokenizer


def write_tokenizer(folder, roberta=False):
    """Writes vocab.txt, and a tokenizer.json with padding and truncation built in."""
    (folder / "vocab.txt").write_text("".join(token + "\n" for token in VOCAB))
    tokenizer = bert_tokenizer()
    if roberta:
        tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(max_length=7)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(folder, **options):
    """Writes a transformers folder with the model and its tokenizer."""
    BertModel(config(**options), rngs=nnx.Rngs(0)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_classifier(folder, model_type="bert", num_labels=1, **settings):
    """Writes a classifier for pairs with its tokenizer, and additional fields of config.json."""
    options = {
        "bert": {},
        "roberta": {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66},
        "distilbert": {"type_vocab_size": 0},
    }[model_type]
    encoder = config(model_type=model_type, **options)
    BertForSequenceClassification(encoder, num_labels=num_labels, rngs=nnx.Rngs(0)).save_pretrained(folder)
    file = folder / "config.json"
    write_json(file, json.loads(file.read_text()) | settings)
    write_tokenizer(folder, roberta=model_type == "roberta")
    return folder


def write_sentence_model(folder, pooling=None, normalize=False):
    """Writes `write_model`'s folder with mean pooling, or with the given Pooling config."""
    write_model(folder)
    write_json(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_mean_tokens": True})
    modules = [(TYPES + "Transformer", ""), (TYPES + "Pooling", "1_Pooling"), (TYPES + "Normalize", "2_Normalize")]
    write_modules(folder, *modules[: 2 + normalize])
    return folder


def bare_tokenizer():
    """Returns a tokenizer without special tokens, so that an empty text has no token."""
    return Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))


def scale(model, factor=0.5):
    nnx.update(model, jax.tree.map(lambda x: x * factor, nnx.state(model, nnx.Param)))


def scale_and_delete(model, factor=0.5):
    """Replaces the parameters and deletes the old ones, as a training step does that donates them.

    Returns the old parameters.
    """
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    scale(model, factor)
    for x in before:
        x.delete()
    return before
