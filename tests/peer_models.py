"""Tiny models in the layout of sentence-transformers, and calls whose results must agree with that library.

Only NumPy's frozen generator, safetensors and tokenizers write the folders, so that any machine makes the same ones.
`python tests/peer_models.py`, in an environment with sentence-transformers 6.2 and transformers 5, writes its results
for all calls to tests/data/sentence_transformers.npz. tests/test_peer_values.py compares jaxft with these numbers, and
tests/peers_sentence_transformers.py (`make test-peers`) with the library itself.
"""

import contextlib
import itertools
import json
import string
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

DATA = Path(__file__).parent / "data" / "sentence_transformers.npz"
TOLERANCE = 2e-6  # of an embedding's largest component, or of 1 if that is larger

TEXTS = (
    "The old river", "A bird sings in the old tree.", "rain", "Rain falls on the river, and a bird sings in a tree.",
    "", "  x  of  Y ", "CAF\u00c9 by the river; query: who sings?", "the old tree " * 12,
)  # fmt: skip
QUERY = "where does the bird sing?"
PAIRS = [
    (QUERY, TEXTS[1]),
    (QUERY, TEXTS[3]),
    ("rain", "Rain falls."),
    ("the old", ""),
    ("", "tree"),
    (QUERY, TEXTS[7]),
]

WIDTH, LAYERS, HEADS, INNER, POSITIONS, LENGTH = 16, 1, 2, 32, 48, 24
SPECIAL = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
}
WORDS = ("the", "old", "river", "a", "bird", "sings", "in", "tree", "rain", "falls", "on", "and", "query", "who", "by")


# --- Tokenizers ---------------------------------------------------------------------------------------------------


def word_piece():
    letters = [*string.ascii_lowercase, *string.punctuation]
    words = dict.fromkeys([*SPECIAL["bert"], *WORDS, *letters, *(f"##{letter}" for letter in letters)])
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens([*SPECIAL["bert"]])
    return tokenizer


def byte_level():
    words = dict.fromkeys([*SPECIAL["roberta"][:4], *sorted(pre_tokenizers.ByteLevel.alphabet())])
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("r", "i"), ("ri", "v"), ("e", "r"), ("riv", "er")]
    words |= dict.fromkeys([first + second for first, second in merges] + ["<mask>"])
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.add_special_tokens([*SPECIAL["roberta"][:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


def unigram():
    pieces = [(token, 0.0) for token in SPECIAL["roberta"][:4]]
    pieces += [("\u2581" + word, -3.0) for word in WORDS if len(word) > 1]
    pieces += [(letter, -6.0) for letter in ("\u2581", *string.ascii_letters, *".,;?:")] + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens([*SPECIAL["roberta"][:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


TOKENIZERS = {
    "bert": (word_piece, "BertTokenizer"),
    "distilbert": (word_piece, "DistilBertTokenizer"),
    "roberta": (byte_level, "RobertaTokenizer"),
    "xlm-roberta": (unigram, "XLMRobertaTokenizer"),
}


def write_tokenizer(folder, kind, **settings):
    make, name = TOKENIZERS[kind]
    tokenizer = make()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = "bert" if name.endswith("BertTokenizer") else "roberta"
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL["bert"], strict=True))
    if special == "roberta":
        named = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token"), SPECIAL["roberta"], strict=False))
        named |= {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": name, "model_max_length": 40} | named | settings)
    return tokenizer.get_vocab_size()


# --- Models -------------------------------------------------------------------------------------------------------


def write_json(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1))


def random_of(name):
    """Returns NumPy's frozen generator: its numbers for a seed never change."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def tensors_of(seed, shapes):
    """Returns float32 tensors by name. Vectors named `*.weight` are those of a LayerNorm."""
    rng, found = random_of(seed), {}
    for name, shape in shapes.items():
        # Larger weights magnify the rounding of float32.
        scale = 1.0 if "embeddings" in name else (0.4 if len(shape) == 1 else 0.8) / np.sqrt(shape[-1])
        values = scale * rng.standard_normal(shape)
        found[name] = (values + (len(shape) == 1 and name.endswith("weight"))).astype(np.float32)
    return found


def linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name, width=WIDTH):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def encoder_shapes(kind, words):
    distilled = kind == "distilbert"
    positions = POSITIONS + 2 * ("roberta" in kind)
    shapes: dict[str, Any] = {
        "embeddings.word_embeddings.weight": (words, WIDTH),
        "embeddings.position_embeddings.weight": (positions, WIDTH),
        **norm("embeddings.LayerNorm"),
    }
    if not distilled:
        shapes["embeddings.token_type_embeddings.weight"] = (1 if "roberta" in kind else 2, WIDTH)
        shapes |= linear("pooler.dense", WIDTH, WIDTH)
    for i in range(LAYERS):
        layer = f"transformer.layer.{i}." if distilled else f"encoder.layer.{i}."
        attention = (
            ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm")
            if distilled
            else tuple(f"attention.{n}" for n in ("self.query", "self.key", "self.value", "output.dense",
                                                  "output.LayerNorm"))
        )  # fmt: skip
        ffn = ("ffn.lin1", "ffn.lin2", "output_layer_norm") if distilled else (
            "intermediate.dense", "output.dense", "output.LayerNorm")  # fmt: skip
        for name in attention[:4]:
            shapes |= linear(layer + name, WIDTH, WIDTH)
        shapes |= norm(layer + attention[4])
        shapes |= linear(layer + ffn[0], INNER, WIDTH) | linear(layer + ffn[1], WIDTH, INNER) | norm(layer + ffn[2])
    return shapes


ARCHITECTURES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "distilbert": "DistilBert"}


# Kind -> start of the names of the encoder's tensors, names of the dense layer, the LayerNorm and the bias of the head.
MLM = {
    "bert": ("bert.", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "roberta": ("roberta.", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "xlm-roberta": ("roberta.", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "distilbert": ("distilbert.", "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
}


def write_transformer(folder, kind, num_labels=None, mlm=False, tokenizer=None, **config):
    """Writes an encoder, a classifier if `num_labels` is given, or a masked language model, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    words = write_tokenizer(folder, kind, **(tokenizer or {}))
    roberta, distilled = "roberta" in kind, kind == "distilbert"
    shapes = encoder_shapes(kind, words)
    if num_labels is not None:
        prefix = {"bert": "bert.", "distilbert": "distilbert."}.get(kind, "roberta.")
        shapes = {prefix + name: shape for name, shape in shapes.items() if not (roberta and "pooler" in name)}
        shapes |= linear("classifier.out_proj" if roberta else "classifier", num_labels, WIDTH)
        if kind != "bert":
            shapes |= linear("classifier.dense" if roberta else "pre_classifier", WIDTH, WIDTH)
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_labels)}
    if mlm:
        prefix, layer, normed, bias = MLM[kind]
        shapes = {prefix + name: shape for name, shape in shapes.items() if "pooler" not in name}
        shapes |= linear(layer, WIDTH, WIDTH) | norm(normed) | {bias: (words,)}
    tensors = tensors_of(kind, shapes)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sizes = {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER,
        "type_vocab_size": 1 if roberta else 2, "layer_norm_eps": 1e-5 if roberta else 1e-12,
        "pad_token_id": 1 if roberta else 0, "hidden_act": "gelu",
    }  # fmt: skip
    if distilled:
        sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER, "activation": "gelu",
                 "pad_token_id": 0}  # fmt: skip
    task = "ForMaskedLM" if mlm else "Model" if num_labels is None else "ForSequenceClassification"
    write_json(folder / "config.json", {
        "model_type": kind, "architectures": [ARCHITECTURES[kind] + task], "vocab_size": words,
        "max_position_embeddings": POSITIONS + 2 * roberta,
    } | sizes | config)  # fmt: skip


def write_stanford(folder, metadata):
    """Writes a ColBERT model as Stanford's code does."""
    write_transformer(folder, "bert")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {f"bert.{name}": value for name, value in tensors.items()}
    tensors |= tensors_of("stanford", {"linear.weight": ((metadata or {}).get("dim", 128), WIDTH)})
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {marker: words.pop(word) for marker, word in (("[unused0]", "##~"), ("[unused1]", "##`"))}
    write_json(folder / "tokenizer.json", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"architectures": ["HF_ColBERT"]})
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    return folder


# Settings of the Transformer module of a cross-encoder that is a classifier.
CLASSIFIER = {
    "transformer_task": "sequence-classification", "module_output_name": "scores",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
}  # fmt: skip
FILL_MASK = {"transformer_task": "fill-mask", "module_output_name": "token_embeddings",
             "modality_config": CLASSIFIER["modality_config"]}  # fmt: skip
OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.",
    "Dense": "sentence_transformers.base.modules.dense.",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.",
    "Dropout": "sentence_transformers.sentence_transformer.modules.dropout.",
    "Normalize": "sentence_transformers.base.modules.normalize.",
    "MLMTransformer": "sentence_transformers.sparse_encoder.models.",
    "SpladePooling": "sentence_transformers.sparse_encoder.modules.splade_pooling.",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.",
}
ACTIVATIONS = {"Identity": "torch.nn.modules.linear.Identity"} | {
    name: f"torch.nn.modules.activation.{name}"
    for name in (
        "Tanh", "GELU", "ReLU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "CELU", "SELU", "ReLU6", "Hardtanh",
        "Hardsigmoid", "Hardswish", "Mish", "Softplus", "Softsign", "LogSigmoid", "Tanhshrink",
    )
}  # fmt: skip


def pooling(*modes, width=WIDTH, **settings):
    return "Pooling", {"embedding_dimension": width, "pooling_mode": modes[0] if len(modes) == 1 else modes} | settings


def old_pooling(*modes, **settings):
    """Returns the settings of versions before 5.7: a flag per mode."""
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    found = {f"pooling_mode_{flag}": flag in modes for flag in flags}
    return "Pooling", {"word_embedding_dimension": WIDTH} | found | settings


def dense(rows, columns, activation="Tanh", bias=True, **settings):
    names = {"in_features": rows, "out_features": columns, "bias": bias}
    return "Dense", names | {"activation_function": ACTIVATIONS[activation]} | settings


NORMALIZE = "Normalize", {}
MEAN = pooling("mean")
PROMPTS = {"query": "query: ", "document": "", "passage": "the old ", "long": "who sings in the old tree by the river "}


def recipe(kind, *modules, calls=("encode",), family="SentenceTransformer", types=None, transformer=None, settings=None,
           **model):  # fmt: skip
    return {
        "kind": kind, "modules": modules, "calls": calls, "family": family, "types": types, "transformer": transformer,
        "settings": settings, "model": model,
    }  # fmt: skip


def write(folder, name):
    """Writes the folder of a model to `folder`, which must not exist."""
    made = ALL[name]
    write_transformer(folder, made["kind"], **made["model"])
    if made["modules"] is None:
        return folder
    is_old_mlm = made["types"] == OLD and "mlm" in made["model"]
    settings = {"max_seq_length": LENGTH} | (CLASSIFIER if "num_labels" in made["model"] else {})
    settings |= FILL_MASK if "mlm" in made["model"] and not is_old_mlm else {}
    write_json(folder / "sentence_bert_config.json", settings | (made["transformer"] or {}))
    entries = [("MLMTransformer" if is_old_mlm else "Transformer", "")]
    for i, (kind, config) in enumerate(made["modules"], 1):
        path = f"{i}_{kind}"
        entries.append((kind, path))
        write_json(folder / path / "config.json", config)
        shapes: dict[str, Any] = {}
        if kind == "Dense":
            shapes["linear.weight"] = config["out_features"], config["in_features"]
            if config["bias"]:
                shapes["linear.bias"] = (config["out_features"],)
            if config.get("use_residual") and config["in_features"] != config["out_features"]:
                shapes["residual.weight"] = shapes["linear.weight"]
        elif kind == "LayerNorm":
            shapes = norm("norm", config["dimension"])
        if shapes:
            tensors = tensors_of(f"{i} {kind}", shapes)
            safetensors.numpy.save_file(tensors, folder / path / "model.safetensors", {"format": "pt"})
    types = [(NEW[kind] if is_old_mlm else made["types"] or NEW[kind]) + kind for kind, _ in entries]
    if made["types"] == "pylate":
        types = [{"Dense": "pylate.models.Dense."}.get(kind, NEW[kind]) + kind for kind, _ in entries]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, (_, path)) in enumerate(zip(types, entries, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "config_sentence_transformers.json", {"model_type": made["family"]} | (made["settings"] or {}))
    return folder


# --- Recipes ------------------------------------------------------------------------------------------------------

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPT_CALLS = ("encode", "prompt", "prompt_name", "query", "document", "prompt, truncated")
MODELS: dict[str, Any] = {
    "all options": recipe(
        "bert", MEAN, calls=(
            "encode", "one text", "batches", "normalize", "truncate_dim", "truncate_dim, normalize", "prompt",
            "int8", "uint8", "binary", "ubinary", "token_embeddings", "one text, token_embeddings", "everything",
            "similarity", "similarity_pairwise",
        ),
    ),
    "modules": recipe(
        "bert", pooling("cls", "mean"), dense(2 * WIDTH, 20), NORMALIZE, dense(20, 12, "GELU", bias=False),
        ("LayerNorm", {"dimension": 12}), ("Dropout", {"dropout": 0.3}), dense(12, 12, "Identity", use_residual=True),
        dense(12, 6, "SiLU", use_residual=True), NORMALIZE, settings={"truncate_dim": 5, "similarity_fn_name": "dot"},
        calls=("encode", "normalize", "truncate_dim", "int8", "token_embeddings", "similarity", "similarity_pairwise"),
    ),
    "all poolings": recipe("roberta", pooling(*POOLING_MODES[::-1]), settings={"prompts": PROMPTS}, calls=PROMPT_CALLS),
    "all poolings without the prompt": recipe(
        "bert", pooling(*POOLING_MODES, include_prompt=False),
        settings={"prompts": PROMPTS, "default_prompt_name": "passage"}, calls=PROMPT_CALLS,
    ),
    "one text, and prompts of queries only": recipe(
        "xlm-roberta", old_pooling("mean_tokens", "lasttoken", include_prompt=False), types=OLD,
        settings={"prompts": {"query": "query: "}, "similarity_fn_name": "euclidean"},
        calls=("one text", "prompt", "query", "document", "similarity", "similarity_pairwise"),
    ),
    "two Normalize": recipe("distilbert", MEAN, NORMALIZE, dense(WIDTH, 8, "ReLU"), NORMALIZE, types=OLD),
    "lower case": recipe(
        "xlm-roberta", MEAN, transformer={"do_lower_case": True, "max_seq_length": 10},
        settings={"similarity_fn_name": "manhattan"}, calls=("encode", "similarity", "similarity_pairwise"),
    ),
}  # fmt: skip
STORED = (*MODELS,)
for kind, mode in itertools.product(TOKENIZERS, POOLING_MODES):
    MODELS[f"{kind}, {mode}"] = recipe(kind, pooling(mode))
for mode in POOLING_MODES:
    excluded = pooling(mode, include_prompt=False)
    MODELS[f"{mode}, without the prompt"] = recipe("bert", excluded, settings={"prompts": PROMPTS}, calls=PROMPT_CALLS)
    flag = mode if mode in ("mean_sqrt_len_tokens", "lasttoken") else f"{mode}_token{'s' * (mode != 'cls')}"
    MODELS[f"old settings, {mode}"] = recipe("distilbert", old_pooling(flag), types=OLD)
for activation in ACTIVATIONS:
    MODELS[f"Dense, {activation}"] = recipe("bert", MEAN, dense(WIDTH, 24, activation))
MODELS |= {
    "Dense without an activation": recipe(
        "bert", MEAN, ("Dense", {"in_features": WIDTH, "out_features": 4, "bias": True})
    ),
    "modules before the pooling": recipe(
        "bert", dense(WIDTH, 12, "GELU", module_input_name="token_embeddings"),
        ("Normalize", {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}),
        pooling("mean", "lasttoken", width=12), dense(24, 5), calls=("encode", "token_embeddings", "everything"),
    ),
    "Dense before Normalize": recipe("xlm-roberta", MEAN, dense(WIDTH, 24), NORMALIZE),
    "LayerNorm alone": recipe("roberta", pooling("cls"), ("LayerNorm", {"dimension": WIDTH})),
    "no pooling module's fields": recipe("bert", ("Pooling", {"word_embedding_dimension": WIDTH}), types=OLD),
    "a default prompt": recipe("bert", MEAN, settings={"prompts": PROMPTS, "default_prompt_name": "query"},
                               calls=PROMPT_CALLS),
    "a prompt that is cut off": recipe(
        "bert", pooling("mean", "lasttoken", "weightedmean", include_prompt=False), settings={"prompts": PROMPTS},
        transformer={"max_seq_length": 6}, calls=("encode", "prompt, truncated"),
    ),
    "length of the tokenizer": recipe("bert", MEAN, transformer={"max_seq_length": None}),
}  # fmt: skip

SIGMOID = {"activation_fn": ACTIVATIONS["Sigmoid"]}
SCORES = ("predict", "one pair", "batches", "prompt", "softmax", "logits")
SCORES_OUT = {"module_output_name": "scores"}
RERANKERS: dict[str, Any] = {
    "one label": recipe("bert", family="CrossEncoder", num_labels=1, calls=(*SCORES, "rank", "rank, prompt"),
                        settings={"prompts": PROMPTS, "activation_fn": ACTIVATIONS["Identity"]}),
    "several labels": recipe("roberta", family="CrossEncoder", num_labels=3, calls=SCORES,
                             settings={"prompts": PROMPTS, "default_prompt_name": "query"} | SIGMOID),
    "from modules": recipe(
        "bert", pooling("cls", "mean"), dense(2 * WIDTH, 8, "GELU"), ("LayerNorm", {"dimension": 8}),
        dense(8, 1, "Identity", **SCORES_OUT), family="CrossEncoder", calls=(*SCORES, "rank"), settings=SIGMOID,
    ),
}  # fmt: skip
STORED_RERANKERS = (*RERANKERS,)
for kind in TOKENIZERS:
    RERANKERS[f"{kind}, 1"] = recipe(kind, family="CrossEncoder", num_labels=1, calls=("predict",))
    RERANKERS[f"{kind}, 2"] = recipe(kind, family="CrossEncoder", num_labels=2, calls=("predict", "softmax"))
for activation in ("Identity", "Tanh", "ReLU", "Sigmoid"):
    RERANKERS[f"activation {activation}"] = recipe(
        "bert", family="CrossEncoder", num_labels=1, settings={"activation_fn": ACTIVATIONS[activation]},
        calls=("predict",),
    )  # fmt: skip
RERANKERS |= {
    "from modules, several labels": recipe(
        "xlm-roberta", pooling("mean"), dense(WIDTH, 4, "Identity", **SCORES_OUT), family="CrossEncoder",
        calls=("predict", "softmax"),
    ),
    "from modules, activated": recipe(
        "distilbert", pooling("mean", include_prompt=False), dense(WIDTH, 1, "Tanh", **SCORES_OUT),
        family="CrossEncoder", settings={"prompts": PROMPTS}, calls=("predict", "prompt"),
    ),
    "without modules.json": recipe("bert", family="CrossEncoder", num_labels=1, calls=("predict", "rank"))
    | {"modules": None},
}  # fmt: skip


SPLADE_CALLS = ("encode", "query", "document", "batches", "max_active_dims", "similarity", "similarity_pairwise",
                "decode", "sparsity", "intersection")  # fmt: skip


def splade(kind, pooling="max", activation="relu", calls=("encode",), **options):
    settings = {"pooling_strategy": pooling, "activation_function": activation, "embedding_dimension": None}
    return recipe(
        kind, ("SpladePooling", settings), calls=calls, family="SparseEncoder", mlm=True, **options
    )  # fmt: skip


SPARSE: dict[str, Any] = {
    "splade": splade("bert", calls=SPLADE_CALLS, settings={"prompts": PROMPTS}),
    "splade, sum": splade("distilbert", "sum", "log1p_relu", calls=SPLADE_CALLS, types=OLD,
                          settings={"similarity_fn_name": "cosine", "max_active_dims": 7}),
    "splade without modules.json": splade("roberta") | {"modules": None},
}  # fmt: skip
STORED_SPARSE = (*SPARSE,)
for kind, strategy in itertools.product(TOKENIZERS, ("max", "sum")):
    SPARSE[f"splade, {kind}, {strategy}"] = splade(kind, strategy)
SPARSE["splade, manhattan"] = splade(
    "xlm-roberta", settings={"similarity_fn_name": "manhattan"}, calls=("similarity", "similarity_pairwise")
)
# Euclidean distances of equal embeddings are not 0 there.
SPARSE["splade, euclidean"] = splade(
    "xlm-roberta", settings={"similarity_fn_name": "euclidean"}, calls=("similarity_pairwise",)
)

COLBERT_CALLS = ("encode", "query", "document", "one text", "batches", "normalize", "similarity", "similarity_pairwise")
OF_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
PROJECTION = dense(WIDTH, 8, "Identity", bias=False, **OF_TOKENS)
SKIP = "MultiVectorMask", {"skiplist_words": [*string.punctuation], "skiplist_tasks": ["document"]}
UNSKIPPED = "MultiVectorMask", {"skiplist_words": [], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
NORMALIZED = "Normalize", OF_TOKENS
MARKERS = {"query": "[Q] ", "document": "[D] "}


def colbert(kind, *modules, expansion=None, calls=("query", "document"), transformer=None, **options):
    expansion = {} if expansion is None else {"query_expansion": {"token": None} | expansion}
    return {"colbert": True} | recipe(
        kind, *modules, calls=calls, family=options.pop("family", "MultiVectorEncoder"),
        transformer=expansion | (transformer or {}), **options,
    )  # fmt: skip


FIXED = {"strategy": "fixed", "attend": False, "length": 12}
MULTI_VECTOR: dict[str, Any] = {
    "colbert": colbert("bert", PROJECTION, SKIP, NORMALIZED, expansion=FIXED, calls=COLBERT_CALLS,
                       transformer={"document_length": 20}, settings={"prompts": MARKERS}),
    "colbert of pylate": colbert(
        "bert", dense(WIDTH, 8, "Identity", bias=False), family="ColBERT", types="pylate", calls=COLBERT_CALLS,
        settings={"query_prefix": "[unused0] ", "document_prefix": "the old ", "query_length": 10,
                  "document_length": 18, "attend_to_expansion_tokens": True, "similarity_fn_name": "MaxSim"},
    ),
    "colbert without expansion": colbert("roberta", PROJECTION, UNSKIPPED, calls=COLBERT_CALLS,
                                         settings={"similarity_fn_name": "meanmaxsim"}),
}  # fmt: skip
STORED_MULTI_VECTOR = (*MULTI_VECTOR,)
for kind, attend, strategy in itertools.product(TOKENIZERS, (False, True), ("fixed", "min")):
    MULTI_VECTOR[f"colbert, {kind}, {strategy}{', attending' * attend}"] = colbert(
        kind, PROJECTION, SKIP, NORMALIZED, expansion={"strategy": strategy, "attend": attend, "length": 9}
    )
MULTI_VECTOR |= {
    "colbert with another token": colbert("bert", PROJECTION, SKIP, expansion=FIXED | {"token": "rain"}),
    "colbert that keeps few tokens": colbert(
        "bert", PROJECTION, ("MultiVectorMask", {"keep_only_token_ids": [5, 6, 7], "skiplist_words": ["the"],
                                                 "skiplist_tasks": ["query", "document"]}), calls=COLBERT_CALLS,
    ),
    "colbert of pylate, as a SentenceTransformer": colbert(
        "distilbert", dense(WIDTH, 8, "Identity", bias=False), family="SentenceTransformer", types="pylate",
        settings={"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 8, "skiplist_words": ["the"]},
    ),
    "colbert of pylate, not expanding": colbert(
        "bert", dense(WIDTH, 8, "Identity", bias=False), family="ColBERT", types="pylate",
        settings={"query_prefix": "", "do_query_expansion": False, "query_length": 6},
    ),
}  # fmt: skip
ALL = MODELS | RERANKERS | SPARSE | MULTI_VECTOR
STORED_ALL = STORED + STORED_RERANKERS + STORED_SPARSE + STORED_MULTI_VECTOR


# --- Calls: the same for both libraries ---------------------------------------------------------------------------


def arrays(value):
    """Returns NumPy arrays in place of arrays of PyTorch and JAX, lists of them included."""
    if isinstance(value, list | tuple):
        return [arrays(item) for item in value]
    return {k: arrays(v) for k, v in value.items()} if isinstance(value, dict) else np.asarray(value)


def flat(value):
    """Returns one array for a list of arrays `[length, D]`, after the lengths."""
    found = arrays(value)
    return np.concatenate([np.float32([len(x) / 1024 for x in found]), np.concatenate(found).ravel()])


def everything(encoder):
    """Returns what `output_value=None` returns, without padding."""
    found = arrays(encoder.encode([*TEXTS], output_value=None))
    valid = [x["attention_mask"].astype(bool) for x in found]
    tokens = [x["token_embeddings"][mask] for x, mask in zip(found, valid, strict=True)]
    ids = [x["input_ids"][mask] for x, mask in zip(found, valid, strict=True)]
    return np.concatenate([
        np.concatenate([x["sentence_embedding"] for x in found]), np.concatenate(tokens).ravel(),
        np.concatenate(ids).astype(np.float32) / 1024,
    ])  # fmt: skip


def encode(**options):
    return lambda encoder: encoder.encode([*TEXTS], **options)


def filled(value):
    """Returns an array with the zeros of a sparse one."""
    return value.toarray() if hasattr(value, "toarray") else value.to_dense() if hasattr(value, "to_dense") else value


def decoded(encoder):
    """Returns the weights of the decoded tokens, and the tokens as numbers."""
    found = encoder.decode(encoder.encode([*TEXTS]), top_k=5) + [encoder.decode(encoder.encode(TEXTS[1]))]
    ids = [zlib.crc32(token.encode()) % 1000 / 1000 for row in found for token, _ in row]
    return np.float32([*ids, *(weight for row in found for _, weight in row), *map(len, found)])


SPARSE_CALLS = {
    "encode": lambda encoder: filled(encoder.encode([*TEXTS])),
    "query": lambda encoder: filled(encoder.encode_query([*TEXTS])),
    "document": lambda encoder: encoder.encode_document([*TEXTS], convert_to_sparse_tensor=False),
    "batches": lambda encoder: filled(encoder.encode([*TEXTS], batch_size=3)),
    "max_active_dims": lambda encoder: filled(encoder.encode([*TEXTS], max_active_dims=5)),
    "similarity": lambda encoder: filled(encoder.similarity(encoder.encode([*TEXTS]), encoder.encode([*TEXTS[:3]]))),
    "similarity_pairwise": lambda encoder: filled(
        encoder.similarity_pairwise(encoder.encode([*TEXTS[1:]]), encoder.encode([*TEXTS[:-1]]))
    ),
    "decode": decoded,
    "sparsity": lambda encoder: np.float32([*encoder.sparsity(encoder.encode([*TEXTS])).values()]),
    "intersection": lambda encoder: filled(encoder.intersection(encoder.encode(TEXTS[1]), encoder.encode([*TEXTS]))),
}
MULTI_VECTOR_CALLS = {
    "encode": lambda encoder: flat(encoder.encode([*TEXTS])),
    "query": lambda encoder: flat(encoder.encode_query([*TEXTS])),
    "document": lambda encoder: flat(encoder.encode_document([*TEXTS])),
    "one text": lambda encoder: encoder.encode_query(TEXTS[1]),
    "batches": lambda encoder: flat(encoder.encode_query([*TEXTS], batch_size=3)),
    "normalize": lambda encoder: flat(encoder.encode_document([*TEXTS], normalize_embeddings=True)),
    "similarity": lambda encoder: encoder.similarity(
        encoder.encode_query([*TEXTS[:3]]), encoder.encode_document([*TEXTS])
    ),
    "similarity_pairwise": lambda encoder: encoder.similarity_pairwise(
        encoder.encode_query([*TEXTS[1:]]), encoder.encode_document([*TEXTS[:-1]])
    ),
}


def ranked(found):
    return np.array([[x["corpus_id"], x["score"]] for x in found], np.float32)


CALLS = {
    "encode": encode(),
    "one text": lambda encoder: encoder.encode(TEXTS[1]),
    "batches": encode(batch_size=3),
    "normalize": encode(normalize_embeddings=True),
    "truncate_dim": encode(truncate_dim=3),
    "truncate_dim, normalize": encode(truncate_dim=7, normalize_embeddings=True),
    "prompt": encode(prompt="the old "),
    "prompt_name": encode(prompt_name="passage"),
    "prompt, truncated": encode(prompt_name="long"),
    "query": lambda encoder: encoder.encode_query([*TEXTS]),
    "document": lambda encoder: encoder.encode_document([*TEXTS]),
    **{name: encode(precision=name) for name in ("int8", "uint8", "binary", "ubinary")},
    "token_embeddings": lambda encoder: flat(encoder.encode([*TEXTS], output_value="token_embeddings")),
    "one text, token_embeddings": lambda encoder: encoder.encode(TEXTS[3], output_value="token_embeddings"),
    "everything": everything,
    "similarity": lambda encoder: encoder.similarity(encoder.encode([*TEXTS]), encoder.encode([*TEXTS[:3]])),
    "similarity_pairwise": lambda encoder: encoder.similarity_pairwise(
        encoder.encode([*TEXTS[1:]]), encoder.encode([*TEXTS[:-1]])
    ),
}
RERANKER_CALLS = {
    "predict": lambda encoder: encoder.predict(PAIRS),
    "one pair": lambda encoder: encoder.predict(PAIRS[0]),
    "batches": lambda encoder: encoder.predict(PAIRS, batch_size=2),
    "prompt": lambda encoder: encoder.predict(PAIRS, prompt="the old "),
    "softmax": lambda encoder: encoder.predict(PAIRS, apply_softmax=True),
    "logits": lambda encoder: encoder.predict(PAIRS, activation_fn=lambda x: x),
    "rank": lambda encoder: ranked(encoder.rank(QUERY, [*TEXTS], top_k=4)),
    "rank, prompt": lambda encoder: ranked(encoder.rank(QUERY, [*TEXTS], prompt_name="passage", return_documents=True)),
}


def assert_close(got, expected, values=None, what=""):
    """Asserts equal shapes and dtypes, and numbers that agree to `TOLERANCE`.

    Integers may differ by one step (bits: by one bit) where `values`, the floats that they were made of, lie on the
    edge of two steps.
    """
    got = np.asarray(got)
    assert got.shape == expected.shape, what
    assert got.dtype == expected.dtype, what
    if not np.issubdtype(got.dtype, np.integer):
        scale = max(1.0, np.abs(expected).max(initial=0))
        assert np.abs(got - expected).max(initial=0) <= TOLERANCE * scale, f"{what}: {np.abs(got - expected).max()}"
        return
    if got.shape == values.shape:
        low, high = values.min(axis=0), values.max(axis=0)
        position = (values.astype(np.float64) - low) / np.maximum((high - low) / 255, 1e-30)
        near = np.abs(position - np.round(position)) <= 1e-3
        different = got.astype(int) - expected.astype(int)
        assert (np.abs(different) <= near).all(), what
    else:
        shift = 128 if got.dtype == np.int8 else 0
        bits = [np.unpackbits((x.astype(int) + shift).astype(np.uint8), axis=-1) for x in (got, expected)]
        different = (bits[0] != bits[1])[..., : values.shape[-1]]
        assert (np.abs(values)[different] <= TOLERANCE).all(), what


def class_of(made):
    """Returns the class that loads a recipe's folder, by its name in sentence-transformers."""
    return "MultiVectorEncoder" if made.get("colbert") else made["family"]


def results(encoder, made):
    """Yields the results of all calls of a recipe by name."""
    calls = {
        "SentenceTransformer": CALLS, "CrossEncoder": RERANKER_CALLS, "SparseEncoder": SPARSE_CALLS,
        "MultiVectorEncoder": MULTI_VECTOR_CALLS,
    }[class_of(made)]  # fmt: skip
    for name in made["calls"]:
        yield name, arrays(calls[name](encoder))


def main():
    import sentence_transformers

    found = {}
    with contextlib.chdir(tempfile.mkdtemp()):
        for name in STORED_ALL:
            made = ALL[name]
            load = getattr(sentence_transformers, class_of(made))
            folder = write(Path(f"{len(found)}").resolve(), name)
            with contextlib.redirect_stdout(sys.stderr):
                encoder = load(str(folder), device="cpu")
            found |= {f"{name}: {call}": value for call, value in results(encoder, made)}
    np.savez_compressed(DATA, **found)
    print(f"{len(found)} results, {DATA.stat().st_size} bytes")


if __name__ == "__main__":
    main()
