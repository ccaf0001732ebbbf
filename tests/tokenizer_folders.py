"""Tokenizer folders, and the token ids that transformers gives to texts with them.

`python tests/tokenizer_folders.py`, in an environment with transformers 5, writes tests/data/tokenizer_ids.json.
"""

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

DATA = Path(__file__).parent / "data" / "tokenizer_ids.json"
TEXTS = (
    "The Cat sat", "CAFÉ café", "[DOC] cat[doc]", "x猫が y", "  the  cat \n", "[MASK] [mask] <mask>", "<s> [Q] acat",
    "", "``cat'' THE,\tcafé\n cat. <S> [cls]",
)  # fmt: skip
PAIR = "the cat", "[DOC] café"

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, "the", "cat", "sat", "Cat", "cafe", "café", "doc", "[", "]", "a", "##a", "##t", "猫", "<s>", "</s>")
NEXT = len(WORDS)
TEXT_WORDS = "\n".join(WORDS) + "\n"
BYTES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ca", "cat", "Ġcat")
MERGES = (("c", "a"), ("ca", "t"), ("Ġ", "cat"))
PIECES = (("<s>", 0), ("<pad>", 0), ("</s>", 0), ("<unk>", 0), ("▁", -2), ("▁cat", -3), ("cat", -3), ("▁the", -3),
          ("c", -5), ("a", -5), ("t", -5), ("<mask>", 0))  # fmt: skip
CAMEMBERT = (("<s>NOTUSED", 0), ("<pad>", 0), ("</s>NOTUSED", 0), ("<unk>", 0), ("<unk>NOTUSED", -100), *PIECES[4:],
             ("<s>", 0), ("</s>", 0))  # fmt: skip


ALBERT = (("<pad>", 0), ("<unk>", 0), ("[CLS]", 0), ("[SEP]", 0), ("[MASK]", 0), *PIECES[4:11], ('"', -4), ("▁T", -6),
          ("e", -5), ("f", -5), ("é", -6))  # fmt: skip
DEBERTA = (("[PAD]", 0), ("[CLS]", 0), ("[SEP]", 0), ("[UNK]", 0), *PIECES[4:11], (",", -4), ("▁,", -4), (".", -4),
           ("'", -4), ("▁T", -6), ("é", -6), ("f", -6), ("e", -6), ("[MASK]", 0))  # fmt: skip
MPNET = ("<s>", "<pad>", "</s>", "<unk>", "[UNK]", *WORDS[5:18], "<mask>")


def added(content, **options):
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True} | plain | options


def word_piece(words=WORDS, *, lowercase=True, template="[CLS] $A [SEP]", **model):
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(words)}, unk_token="[UNK]", **model))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens([token for token in SPECIAL if token in words])
    return tokenizer


def byte_level(*, add_prefix_space=False):
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(BYTES)}, [*MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=add_prefix_space)
    tokenizer.add_special_tokens([*BYTES[:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


def unigram(pieces=PIECES, unknown=3, special=BYTES[:4], mask="<mask>"):
    tokenizer = Tokenizer(models.Unigram([*pieces], unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([*special, AddedToken(mask, lstrip=True)])
    return tokenizer


def albert(**options):
    return unigram(ALBERT, **{"unknown": 1, "special": [token for token, _ in ALBERT[:4]], "mask": "[MASK]"} | options)


def deberta(**options):
    return unigram(DEBERTA, **{"special": [token for token, _ in DEBERTA[:4]], "mask": "[MASK]"} | options)


def ends(tokenizer, first, last, numbers):
    """Gives a tokenizer a post-processor that differs from its class's own: the last token comes twice."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last} {last}", pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[*zip((first, last), numbers, strict=True)],
    )  # fmt: skip
    return tokenizer


def changed(tokenizer, **changes):
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_tokens():
    tokenizer = word_piece()
    tokenizer.add_tokens([AddedToken("[DOC]", normalized=True), "[Q]"])
    return tokenizer


FOLDERS = {}


def folder(name, model_type="bert", **files):
    FOLDERS[name] = {"config.json": {"model_type": model_type, "vocab_size": 400}} | files


BERT = {"tokenizer_class": "BertTokenizer"}
SAVED = {"tokenizer_class": "PreTrainedTokenizerFast"}
OPTIONS = (
    {}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False},
    {"split_special_tokens": True}, {"add_prefix_space": True}, {"do_basic_tokenize": False},
    {"never_split": ["cat"]}, {"truncation_side": "left", "model_max_length": 4}, {"max_len": 4},
    {"add_bos_token": True}, {"model_input_names": ["input_ids", "attention_mask"]}, {"unk_token": "cat"},
    {"cls_token": "<s>"},
    {"sep_token": added("</s>", __type="AddedToken")}, {"pad_token": None}, {"mask_token": "[Q]"}, {"bos_token": "[Q]"},
    {"extra_special_tokens": ["[DOC]"]}, {"extra_special_tokens": {"image_token": "[DOC]"}}, {"image_token": "[DOC]"},
    {"additional_special_tokens": ["[DOC]", "[Q]"]},
    {"added_tokens_decoder": {str(NEXT): added("[DOC]"), str(NEXT + 1): added("[Q]", special=False, normalized=True)}},
    {"added_tokens_decoder": {str(NEXT + 7): added("[DOC]", lstrip=True), "6": added("cat", single_word=True)}},
    {"model_specific_special_tokens": {"x": "[DOC]", "y_token": added("[Q]", __type="AddedToken", lstrip=True)}},
    {"model_specific_special_tokens": {"x": "[DOC]"}, "image_token": "[Q]"},
    {"model_specific_special_tokens": {"x": "[DOC]"}, "image_token": added("[Q]", __type="AddedToken")},
    {"model_specific_special_tokens": {"x": "[DOC]"}, "extra_special_tokens": {"image_token": "[Q]"}},
    {"model_specific_special_tokens": {"x": "[DOC]"}, "extra_special_tokens": ["[Q]"]},
)  # fmt: skip
for number, options in enumerate(OPTIONS):
    folder(f"options {number}, tokenizer.json", **{
        "tokenizer.json": word_piece(), "tokenizer_config.json": BERT | options,
    })  # fmt: skip
    folder(f"options {number}, vocab.txt", **{"vocab.txt": TEXT_WORDS, "tokenizer_config.json": BERT | options})
    folder(f"options {number}, as saved", **{"tokenizer.json": word_piece(), "tokenizer_config.json": SAVED | options})
MAPS = {
    "added": {"added_tokens.json": {"[DOC]": NEXT, "[Q]": NEXT + 1}},
    "added, with a gap": {"added_tokens.json": {"[Q]": NEXT + 9, "[DOC]": NEXT + 1}},
    "added, special": {
        "added_tokens.json": {"[DOC]": NEXT},
        "special_tokens_map.json": {"additional_special_tokens": ["[DOC]"]},
    },
    "map": {
        "special_tokens_map.json": {
            "additional_special_tokens": ["[DOC]"], "cls_token": "<s>", "sep_token": added("</s>", lstrip=True),
        },
        "tokenizer_config.json": BERT | {"cls_token": "[CLS]"},
    },
    "map and tokenizer_config.json": {
        "special_tokens_map.json": {"additional_special_tokens": ["[DOC]"], "do_lower_case": False},
        "tokenizer_config.json": BERT | {"additional_special_tokens": ["[Q]"], "do_lower_case": True},
    },
    "map and more tokens": {
        "special_tokens_map.json": {"extra_special_tokens": ["[DOC]"]},
        "tokenizer_config.json": BERT | {"extra_special_tokens": ["[Q]"]},
    },
    "map and model-specific tokens": {
        "special_tokens_map.json": {"extra_special_tokens": {"image_token": "[Q]"}},
        "tokenizer_config.json": BERT | {"model_specific_special_tokens": {"x": "[DOC]"}},
    },
    "map with a token in parts": {"special_tokens_map.json": {"mask_token": {"content": "[DOC]", "lstrip": False}}},
    "map without effect": {
        "special_tokens_map.json": {"additional_special_tokens": ["[DOC]"], "cls_token": "<s>"},
        "tokenizer_config.json": BERT | {"added_tokens_decoder": {"4": added("[MASK]")}},
    },
}  # fmt: skip
for name, files in MAPS.items():
    folder(f"{name}, tokenizer.json", **{"tokenizer.json": word_piece()}, **files)
    folder(f"{name}, vocab.txt", **{"vocab.txt": TEXT_WORDS}, **files)
    own = {"tokenizer_config.json": files.get("tokenizer_config.json", {}) | SAVED}
    folder(f"{name}, as saved", **{"tokenizer.json": word_piece()} | files | own)
folder("named tokens are special", **{"tokenizer.json": word_piece(), "tokenizer_config.json": BERT | {
    "added_tokens_decoder": {"4": added("[MASK]", special=False)}, "split_special_tokens": True,
}})  # fmt: skip
for name in ("BertTokenizerFast", "DistilBertTokenizer", "ElectraTokenizerFast", "TokenizersBackend"):
    cased = {"tokenizer.json": word_piece(lowercase=False)}
    folder(name, **cased, **{"tokenizer_config.json": {"tokenizer_class": name}})
folder("cased", **{"tokenizer.json": word_piece(lowercase=False)})
folder("cased, distilbert", "distilbert", **{"tokenizer.json": word_piece(lowercase=False)})
folder("class in config.json", **{
    "tokenizer.json": word_piece(lowercase=False),
    "config.json": {"model_type": "bert", "vocab_size": 400, "tokenizer_class": "PreTrainedTokenizerFast"},
})  # fmt: skip
folder("short words", **{"tokenizer.json": word_piece(max_input_chars_per_word=2)})
folder("template", **{"tokenizer.json": word_piece(template="$A:1 [SEP]:1")})
folder("template, as saved", **{"tokenizer.json": word_piece(template="$A [SEP]"), "tokenizer_config.json": SAVED})
folder("added in tokenizer.json", **{"tokenizer.json": with_tokens()})
folder("added in tokenizer.json, as saved", **{"tokenizer.json": with_tokens(), "tokenizer_config.json": SAVED})
folder("added in tokenizer.json, and a decoder", **{
    "tokenizer.json": with_tokens(), "tokenizer_config.json": BERT | {"added_tokens_decoder": {"4": added("[MASK]")}},
})  # fmt: skip
for prefix in (None, True, False):
    option = {} if prefix is None else {"add_prefix_space": prefix}
    folder(f"roberta, prefix {prefix}", "roberta", **{
        "tokenizer.json": byte_level(add_prefix_space=prefix is not True),
        "tokenizer_config.json": {"tokenizer_class": "RobertaTokenizer"} | option,
    })  # fmt: skip
    folder(f"roberta, prefix {prefix}, as saved", "roberta", **{
        "tokenizer.json": byte_level(add_prefix_space=prefix is not True), "tokenizer_config.json": SAVED | option,
    })  # fmt: skip
    folder(f"xlm-roberta, prefix {prefix}", "xlm-roberta", **{
        "tokenizer.json": unigram(), "tokenizer_config.json": {"tokenizer_class": "XLMRobertaTokenizer"} | option,
    })  # fmt: skip
folder("roberta, files", "roberta", **{
    "vocab.json": {token: i for i, token in enumerate(BYTES)},
    "merges.txt": "#version: 0.2\n" + "\n".join(map(" ".join, MERGES)) + "\n",
})  # fmt: skip
folder("roberta", "roberta", **{"tokenizer.json": byte_level(add_prefix_space=True)})
folder("xlm-roberta", "xlm-roberta", **{"tokenizer.json": changed(
    unigram(), normalizer=normalizers.Sequence([normalizers.Lowercase()]), pre_tokenizer=pre_tokenizers.Whitespace()
)})  # fmt: skip
folder("xlm-roberta, added", "xlm-roberta", **{"tokenizer.json": unigram(), "tokenizer_config.json": {
    "tokenizer_class": "XLMRobertaTokenizerFast", "bos_token": "</s>",
    "added_tokens_decoder": {str(len(PIECES)): added("[DOC]")},
}})  # fmt: skip
folder("camembert", "camembert", **{"tokenizer.json": unigram(CAMEMBERT)})
folder("camembert, added", "camembert", **{
    "tokenizer.json": unigram(CAMEMBERT), "tokenizer_config.json": {"additional_special_tokens": ["[DOC]"]},
})  # fmt: skip

NEW_OPTIONS = (
    {}, {"do_lower_case": False}, {"do_lower_case": True}, {"strip_accents": False},
    {"tokenize_chinese_chars": False}, {"keep_accents": True}, {"split_by_punct": True}, {"add_prefix_space": False},
    {"unk_id": 2}, {"trim_offsets": False}, {"split_special_tokens": True},
    {"truncation_side": "left", "model_max_length": 4}, {"model_input_names": ["token_type_ids", "attention_mask"]},
    {"unk_token": "cat"}, {"cls_token": "cat"}, {"sep_token": "cat"}, {"mask_token": "[Q]"}, {"bos_token": "[Q]"},
    {"cls_token": added("cat", __type="AddedToken", lstrip=True, normalized=True)}, {"pad_token": None},
    {"additional_special_tokens": ["[DOC]", "[Q]"]}, {"extra_special_tokens": {"image_token": "[DOC]"}},
    {"additional_special_tokens": ["[DOC]"], "extra_special_tokens": {"image_token": "[Q]"}},
    {"added_tokens_decoder": {"30": added("[DOC]"), "31": added("[Q]", special=False, normalized=True)}},
    {"add_bos_token": True}, {"vocab_type": "spm"}, {"remove_space": False},
    {"model_specific_special_tokens": {"x": "[DOC]"}},
)  # fmt: skip
NEW = {
    "mpnet": ("MPNetTokenizer", word_piece(MPNET)),
    "albert": ("AlbertTokenizer", albert()),
    "deberta-v2": ("DebertaV2Tokenizer", deberta()),
}
for kind, (name, tokenizer) in NEW.items():
    for number, options in enumerate(NEW_OPTIONS):
        folder(f"{kind}, options {number}", kind, **{
            "tokenizer.json": tokenizer, "tokenizer_config.json": {"tokenizer_class": name} | options,
        })  # fmt: skip
        if kind == "mpnet":
            folder(f"{kind}, vocab.txt, options {number}", kind, **{
                "vocab.txt": "\n".join(MPNET) + "\n", "tokenizer_config.json": {"tokenizer_class": name} | options,
            })  # fmt: skip
NULL = {"add_prefix_space": None, "do_lower_case": None, "keep_accents": None, "split_by_punct": None}
for kind in ("albert", "deberta-v2"):
    name, tokenizer = NEW[kind]
    folder(f"{kind}, null", kind, **{
        "tokenizer.json": tokenizer, "tokenizer_config.json": {"tokenizer_class": name} | NULL,
    })  # fmt: skip
folder("xlm-roberta, null", "xlm-roberta", **{"tokenizer.json": unigram(), "tokenizer_config.json": NULL})
folder("camembert, null", "camembert", **{"tokenizer.json": unigram(CAMEMBERT), "tokenizer_config.json": NULL})
folder("albert, own ends", "albert", **{"tokenizer.json": ends(albert(), "[CLS]", "[SEP]", (2, 3))})
folder("albert, own ends, add_bos_token", "albert", **{
    "tokenizer.json": ends(albert(), "[CLS]", "[SEP]", (2, 3)), "tokenizer_config.json": {"add_eos_token": True},
})  # fmt: skip
folder("deberta-v2, own ends", "deberta-v2", **{"tokenizer.json": ends(deberta(), "[CLS]", "[SEP]", (1, 2))})
folder("mpnet, own ends", "mpnet", **{"tokenizer.json": ends(word_piece(MPNET), "<s>", "</s>", (0, 2))})
folder("albert, another unknown", "albert", **{"tokenizer.json": albert(unknown=3)})
folder("xlm-roberta, another unknown", "xlm-roberta", **{"tokenizer.json": unigram(unknown=1)})
folder("camembert, another unknown", "camembert", **{"tokenizer.json": unigram(CAMEMBERT, unknown=1)})
folder("camembert, mask given", "camembert", **{
    "tokenizer.json": unigram(CAMEMBERT), "tokenizer_config.json": {"mask_token": "[Q]"},
})  # fmt: skip
folder("deberta-v2, another unknown", "deberta-v2", **{"tokenizer.json": deberta(unknown=1)})
folder("deberta-v2, unknown with a score", "deberta-v2", **{
    "tokenizer.json": unigram((*DEBERTA[:3], ("[UNK]", -9), *DEBERTA[4:]), special=["[CLS]"], mask="[MASK]"),
    "tokenizer_config.json": {"unk_id": 3},
})  # fmt: skip
for kind in ("modernbert", "nomic_bert", "new", "gte", "electra", "jina_embeddings_v3"):
    tokenizer = unigram() if kind in ("gte", "jina_embeddings_v3") else word_piece(lowercase=False)
    folder(f"{kind}, no class", kind, **{"tokenizer.json": tokenizer})
for kind in ("modernbert", "nomic_bert", "new", "gte", "electra"):
    for name in ("BertTokenizer", "PreTrainedTokenizerFast"):
        folder(f"{kind}, {name}", kind, **{
            "tokenizer.json": word_piece(lowercase=False), "tokenizer_config.json": {"tokenizer_class": name},
        })  # fmt: skip
for kind in ("new", "gte", "jina_embeddings_v3"):
    folder(f"{kind}, XLMRobertaTokenizerFast", kind, **{
        "tokenizer.json": unigram(), "tokenizer_config.json": {"tokenizer_class": "XLMRobertaTokenizerFast"},
    })  # fmt: skip
folder("modernbert, RobertaTokenizer", "modernbert", **{
    "tokenizer.json": byte_level(), "tokenizer_config.json": {"tokenizer_class": "RobertaTokenizer"},
})  # fmt: skip


def write(path, files):
    """Writes the files of a folder."""
    for name, content in files.items():
        text = content.to_str() if isinstance(content, Tokenizer) else content
        (path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def main():
    import transformers

    ids = {}
    for name, files in FOLDERS.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(write(Path(tempfile.mkdtemp()), files))
        limit = min(tokenizer.model_max_length, 64)
        pair = tokenizer(*PAIR, truncation="longest_first", max_length=limit)
        texts = [tokenizer(text, truncation=True, max_length=limit)["input_ids"] for text in TEXTS]
        ids[name] = [*texts, pair["input_ids"], pair.get("token_type_ids")]
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in ids.items()]
    DATA.write_text("{\n" + ",\n".join([f'"transformers": "{transformers.__version__}"', *lines]) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
