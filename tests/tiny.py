"""A tiny random encoder with a tokenizer of its own, written to a folder as sentence-transformers lays it out."""

import json
import string

from flax import nnx
from tokenizers import Tokenizer, models
from tokenizers.implementations import BertWordPieceTokenizer

from jaxft.models.bert import BertConfig, BertModel

WIDTH = 16
WORDS = ("a", "bird", "sings", "in", "the", "old", "tree", "rain", "falls", "on", "river", ".", ",")
VOCAB = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
VOCAB += tuple(c for c in string.ascii_letters if c not in VOCAB) + tuple("##" + c for c in string.ascii_letters)
TYPES = "sentence_transformers.models."


def write_json(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def write_modules(folder, *modules):
    """modules.json of `(type, path)` pairs."""
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "type": t, "path": path} for i, (t, path) in enumerate(modules)],
    )


def write_model(folder, **options):
    """A transformers folder: the model, vocab.txt, and a tokenizer.json with padding and truncation built in."""
    sizes = {
        "vocab_size": len(VOCAB),
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,  # so that embeddings of different texts are far apart
    }
    model = BertModel(BertConfig(**(sizes | options)), rngs=nnx.Rngs(0))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(token + "\n" for token in VOCAB))
    tokenizer = BertWordPieceTokenizer(vocab={token: i for i, token in enumerate(VOCAB)}, lowercase=True)
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(max_length=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_sentence_model(folder, pooling=None, normalize=False):
    """`write_model` with mean pooling or the Pooling config given."""
    write_model(folder)
    write_json(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_mean_tokens": True})
    modules = [(TYPES + "Transformer", ""), (TYPES + "Pooling", "1_Pooling"), (TYPES + "Normalize", "2_Normalize")]
    write_modules(folder, *modules[: 2 + normalize])
    return folder


def bare_tokenizer():
    """A tokenizer that adds no special tokens, so that an empty text has no token at all."""
    return Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
