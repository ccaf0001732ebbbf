"""Long texts are cut before they are tokenised: the tokens are those of the whole text, for every kind of tokenizer."""

import contextlib
import functools
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

import tiny
from cases import seeds, slow
from jaxft import BertConfig, cli
from jaxft.text import growth, long_texts, records
from jaxft.text import tokenizer as tokenizer_files
from jaxft.text.batching import TextError
from jaxft.text.long_texts import LongTexts

WORDS = ["the", "old", "tree", "sings", "Bird", "café", "cafe\u0301", "don't", "we'll", "x'lll", "1234", "naïve", "éa",
         "Straße", "中文", "雨が", "か\u3099", "ｶﾞ", "각", "\u1100\u1161\u11a8", "าำ", "İ", "ﬁ", "ͺ", "ﾞ", "²",
         "๓", "a_b", "_",
         "\u0d4e", "😀", "👍🏽", "\u200b", "\xad", "\0", "\ufffd", "\u0301", "\u0345", "<mask>", "<MASK>", "[MASK]",
         "new york", "[NEW]", "foo>", "tail", "▁", "▁▁", "…", "...", ",", "。", "，", "!", "''", "'", "-", "---", "a,b",
         ";\u0338", "s", "ll", "''s", "'''", "``", "`", "a+b/c", "=\u0338", "x[y]", "#a#", "e^~`", "\\n"]  # fmt: skip
GAPS = [" ", " ", " ", " ", "", "", "  ", "\n", "\t", "\u3000", "\xa0", "   \n ", ", ", ". ", "\u2028", "\x1c"]
RUNS = ["a", "ab", "th", "1", "a1", " ", "  \n", "\t", "中文", "中", "é", "\u0301", "\u200b", "\0", "-", "'", ".",
        "'l", "▁", "ſ", "A", " a", "\u200b\0", "=", "#!", "가", "е", "the", "…"]  # fmt: skip


def random_text(rng):
    parts = []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.4:
            run = rng.choice(RUNS)
            parts.append(run * rng.choice([3, 30, 300, 900]) + rng.choice(["", "<mask>", " ", "x", "\u0301"]))
        few = rng.sample(WORDS, 4) if rng.random() < 0.5 else WORDS
        for _ in range(rng.choice([3, 30, 200])):
            parts += [rng.choice(few), rng.choice(GAPS)]
    return "".join(parts)


def soup(rng):
    """Returns a text of few different parts, so that each of them is often beside a cut."""
    parts = rng.sample([*WORDS, *GAPS, *RUNS], rng.randint(1, 4))
    parts += rng.sample(["a", "é", " ", "ﾞ", "ͺ", "\u0d4e", ",", "\u0301", "ß" * 9], rng.randint(0, 2))
    return "".join(rng.choices([part for part in parts if part] or ["a"], k=rng.randint(60, 200)))[:400]


# Characters that normalizers, pre-tokenizers, graphemes and added tokens join with those beside them.
HOSTILE = ["a", "é", "ж", "中", "가", "\u1100", "\u1161", "\u11a8", "か", "ﾞ", "\u3099", "ｶ", "ก", "ั", "ﬁ", "①", "İ",
           "ſ", "\u0345", "ͺ", "\u0301", "\u0338", "😀", "👩", "\u200d", "🏽", "🇩", "🇪", "❤", "\ufe0f", "\u200b", "\0",
           "\x1c", "\x85", " ", "\t", "\n", "\r", "\r\n", "\xa0", "\u3000", "\u180e", "_", "'", "'ll", "'s", "-", "‿",
           "，", "。", "≠", "<mask>", "[MASK]", "]", "foo>", "tail", "\u0d4e", "▁", "1", "٣", "Ⅷ", "क", "्", "\ue000",
           "𓀀", "𐤀", "¨", "ﷺ", "abab", "the", "\u3164", "’", "\u0600", "\u2060"]  # fmt: skip


def hostile(rng):
    few = rng.sample(HOSTILE, rng.choice([1, 2, 2, 3, 4, 6, 20]))
    return "".join(rng.choice(few) * rng.choice([1, 1, 1, 5, 120]) for _ in range(90))[: rng.choice([200, 600])]


@functools.cache
def text_sample(seed):
    rng = random.Random(seed)
    return [make(rng) for make, count in ((random_text, 12), (soup, 50), (hostile, 60)) for _ in range(count)]


@pytest.fixture
def only_proofs(monkeypatch):
    """Keeps texts that cannot be cut before they are tokenised."""
    monkeypatch.setattr(LongTexts, "_cut_tokenised", lambda self, text, count, factor: text)


def bert(**options):
    tokenizer = tiny.bert_tokenizer()
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    tokenizer.model.max_input_chars_per_word = 20
    return tokenizer


def bert_split_special_tokens():
    tokenizer = bert()
    tokenizer.encode_special_tokens = True
    return tokenizer


def bert_do_lower_case():
    tokenizer = bert(lowercase=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), tokenizer.normalizer])
    return tokenizer


def byte_level(add_prefix_space=False, normalizer=None, mask=True):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("-", "-"), ("'", "'"),
              ("l", "l"), ("'", "ll"), ("1", "2"), ("ä", "¸"), ("ä¸", "Ń"), ("Ċ", "Ċ"), ("h", "t"), ("a", "b"),
              ("ab", "ab"), ("abab", "abab"), ("Ġ", "a"), ("ģ", ","), (".", "."), ("'", "l"), ("Ġ", "-")]  # fmt: skip
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *map("".join, merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if mask:
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=add_prefix_space)
    return tokenizer


def unigram(normalizer=None, pre_tokenizer=None, byte_fallback=False):
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((c, -5.0 - ord(c) % 7 / 10) for c in "abcdefghijklmnopqrstuvwxyz,.'1234中文é"),
    ]
    pieces += [("▁the", -2.0), ("▁old", -2.1), ("ee", -3.0), ("aa", -9.0), ("aaa", -14.5), ("ab", -7.0), ("ba", -7.0),
               ("abab", -15.0), ("中文", -3.0), ("文中", -3.01), ("▁▁", -3.5), ("--", -4.0), ("-", -3.0),
               ("▁tree", -4.0), ("...", -4.0), ("xa", -3.0)]  # fmt: skip
    if byte_fallback:
        pieces += [(f"<0x{i:02X}>", -8.0) for i in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
    )  # fmt: skip
    return tokenizer


def precompiled(rules):
    """Returns SentencePiece's normalizer with these rules: a double array of bytes, then the replacements."""
    units, outputs, nodes = {}, b"", {b""}
    for key in rules:
        nodes |= {key.encode()[:n] for n in range(1, len(key.encode()) + 1)}
    base = {}
    for node in sorted(nodes, key=len):  # parents first
        labels = [key[-1] for key in nodes if len(key) == len(node) + 1 and key.startswith(node)]
        base[node] = next(o for o in range(256, 1 << 20) if not any(o ^ label in units for label in (0, *labels)))
        units[base[node]] = 0  # of a node's value
        units |= {base[node] ^ label: 0 for label in labels}
    for node in nodes:
        place = base[node[:-1]] ^ node[-1] if node else 0
        units[place] = (
            (node[-1] if node else 0) | (place ^ base[node]) << 10 | (node.decode(errors="replace") in rules) << 8
        )
    for key, value in rules.items():
        units[base[key.encode()]] = 1 << 31 | len(outputs)
        outputs += value.encode() + b"\0"
    array = np.zeros((max(units) | 255) + 1, "<u4")
    array[[*units]] = [*units.values()]
    return normalizers.Precompiled(len(array.tobytes()).to_bytes(4, "little") + array.tobytes() + outputs)


CHARS = {"，": ",", "\t": " ", "\n": " ", "\u3000": " ", "\u200b": "", "ﬁ": "fi", "\xad": "", "ｶﾞ": "ガ", "²": "2",
         "ﾞ": "\u3099", "e\u0301": "é", "…": "...", "\u0d4e": "x"}  # fmt: skip


def with_added(tokenizer, *tokens):
    tokenizer.add_tokens([*tokens])
    return tokenizer


def sequence(*steps):
    return (normalizers if isinstance(steps[0], normalizers.Normalizer) else pre_tokenizers).Sequence([*steps])


def joined(content):
    return normalizers.Replace(Regex(" {2,}"), content)


def words(*others):
    return sequence(pre_tokenizers.WhitespaceSplit(), *others, pre_tokenizers.Metaspace())


def changed(name, value):
    tokenizer = bert()
    setattr(tokenizer, name, value)
    return tokenizer


TOKENIZERS = {
    "bert": bert,
    "bert, cased": lambda: bert(lowercase=False),
    "bert, uncleaned": lambda: bert(clean_text=False, handle_chinese_chars=False, strip_accents=False),
    "bert, do_lower_case": bert_do_lower_case,
    "bert, added": lambda: with_added(
        bert(), "[NEW]", AddedToken("foo>"), AddedToken("<mask>", lstrip=True, rstrip=True)
    ),
    "bert, added word": lambda: with_added(bert(), "tail", "中", AddedToken("s", normalized=False)),
    "bert, added with spaces": lambda: with_added(bert(), "new york", "a,b"),
    "bert, single word": lambda: with_added(bert(), AddedToken("th", single_word=True)),
    "byte-level": byte_level,
    "byte-level, prefix": lambda: byte_level(add_prefix_space=True),
    "byte-level, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte-level, NFD": lambda: byte_level(normalizer=normalizers.NFD(), mask=False),
    "byte-level, added": lambda: with_added(byte_level(mask=False), AddedToken("foo>", rstrip=True), "<MASK>", "ll"),
    "unigram": unigram,
    "unigram, NFKC": lambda: unigram(normalizers.NFKC(), byte_fallback=True),
    "unigram, lower, accents": lambda: unigram(
        sequence(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase())
    ),
    "unigram, XLM-R": lambda: unigram(sequence(normalizers.Nmt(), normalizers.NFKC(), joined(" ")), words()),
    "unigram, precompiled": lambda: unigram(sequence(precompiled(CHARS), joined(" ")), words()),
    "unigram, odd rules": lambda: unigram(precompiled(CHARS | {" ": "e"})),
    "unigram, T5": lambda: unigram(sequence(normalizers.Strip(left=False), joined("▁"))),
    "unigram, strip, prepend": lambda: unigram(sequence(normalizers.Strip(), normalizers.Prepend("▁"))),
    "unigram, first": lambda: unigram(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unigram, never": lambda: unigram(None, pre_tokenizers.Metaspace(prepend_scheme="never")),
    "unigram, one piece": lambda: unigram(None, pre_tokenizers.Metaspace(split=False)),
    "unigram, replace": lambda: unigram(sequence(normalizers.Replace("e t", "x"), normalizers.Replace("a", ""))),
    "unigram, stacked": lambda: unigram(sequence(normalizers.Replace("a", "ll"), normalizers.Replace("'ll", "x"))),
    "unigram, removed": lambda: unigram(sequence(normalizers.Replace("-", ""), normalizers.Replace("''", "t"))),
    "unigram, ALBERT": lambda: unigram(
        sequence(normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(),
                 normalizers.StripAccents(), normalizers.Lowercase(), precompiled(CHARS)),
        words(),
    ),
    "unigram, DeBERTa": lambda: unigram(
        sequence(normalizers.Lowercase(), normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(),
                 normalizers.Strip(left=False)),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "unigram, regex": lambda: unigram(normalizers.Replace(Regex(r"l(?=.*1)"), "t")),
    "unigram, punctuation": lambda: unigram(None, words(pre_tokenizers.Punctuation())),
    "bert, split": bert_split_special_tokens,
    "wordpiece, words": lambda: changed("pre_tokenizer", pre_tokenizers.Whitespace()),
    "wordpiece, NFKC": lambda: changed("normalizer", normalizers.NFKC()),
    "wordpiece, split": lambda: changed("pre_tokenizer", pre_tokenizers.Split(" ", "merged_with_previous")),
}  # fmt: skip


# Nothing is certain with these, or they are not known.
KEPT = {"bert, single word", "unigram, one piece", "unigram, stacked", "unigram, removed", "unigram, regex",
        "wordpiece, split"}  # fmt: skip


# Each kind of tokenizer, in `make test` with one of the sides.
SIDED = [
    pytest.param(name, side, marks=[pytest.mark.slow] * ((i + j) % 2))
    for i, name in enumerate(TOKENIZERS) for j, side in enumerate(("right", "left"))
]  # fmt: skip


def truncating(name, length, side="right", **options):
    tokenizer = TOKENIZERS[name]()
    tokenizer.enable_truncation(max_length=99, direction=side)
    return tokenizer_files.truncating(tokenizer, length, BertConfig(), owner="", argument="", **options)


def same_tokens(tokenizer, texts, cut, seed):
    for text, part in zip(texts, cut, strict=True):
        expected, found = tokenizer.encode_batch_fast([text])[0], tokenizer.encode_batch_fast([part])[0]
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids), (seed, text, part)


@pytest.mark.parametrize(("name", "side"), SIDED)
@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.usefixtures("only_proofs")
def test_tokens_are_those_of_the_whole_text(name, side, seed):
    texts = text_sample(seed)[:: 2 if seed == 0 else 1]  # the first seed is the one of `make test`
    for length in (6, 9):
        tokenizer = truncating(name, length, side)
        cut = LongTexts(tokenizer).cut(texts)
        same_tokens(tokenizer, texts, cut, seed)
        assert all(len(part) == len(text) for text, part in zip(texts, cut, strict=True)) == (name in KEPT)


@pytest.mark.parametrize(
    ("name", "side", "parts"),
    [
        ("byte-level, NFD", "right", [*["abababab"] * 9, "é,"]),  # the accent of a word joins the punctuation
        ("unigram, precompiled", "right", [*["ß" * 14] * 3, "\u0d4e a"]),  # a letter and a space are one grapheme
        ("byte-level, prefix", "left", ["abababab", ",abababab"]),  # a space comes before every text
        ("bert", "right", [*["[MASK]"] * 9, " "]),  # an added token is split where words end
    ],
)
def test_last_token_that_counts_is_at_the_cut(name, side, parts):
    """The tokens are so long, and special tokens so few, that a part has just the tokens that count."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(parts, k=120)) for _ in range(300)]
    tokenizer = truncating(name, 12, side)
    tokenizer.post_processor = processors.Sequence([])
    cut = LongTexts(tokenizer).cut(texts)
    same_tokens(tokenizer, texts, cut, parts)


@pytest.mark.parametrize(
    ("replaced", "text"),
    [([("''", "-")], "'"), ([("~", "'"), ("''", "-")], "~"), ([("~", ""), ("''", "-")], "'~")],
)
def test_run_of_replaced_characters_is_not_cut(replaced, text):
    """Which two of the characters are replaced depends on the start of their run."""
    steps = sequence(*(normalizers.Replace(*pair) for pair in replaced))
    tokenizer = unigram(steps, words(pre_tokenizers.Punctuation()))
    tokenizer.enable_truncation(max_length=9, direction="left")
    texts = ["the tree " + text * count for count in range(400, 404)]
    same_tokens(tokenizer, texts, LongTexts(tokenizer).cut(texts), text)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", sorted(KEPT))
@pytest.mark.parametrize("seed", seeds(5))
def test_texts_that_are_not_certain_are_cut_after_tokenisation(name, side, seed):
    texts = text_sample(seed)
    tokenizer = truncating(name, 9, side)
    cut = LongTexts(tokenizer).cut(texts)
    same_tokens(tokenizer, texts, cut, seed)
    assert sum(map(len, cut)) < sum(map(len, texts))


def test_unknown_run_before_other_characters_of_its_word_is_kept():
    """The scores of a word add up, and rounding may decide between two ways to split what follows."""
    long_texts = LongTexts(truncating("unigram", 9))
    text = "the " + "ж" * 500
    assert long_texts._shorten(text + "aaa") == text + "aaa"
    assert len(long_texts._shorten(text + " aaa")) < 100


def test_text_that_is_too_long_to_be_tokenised_is_refused(monkeypatch):
    monkeypatch.setattr(long_texts, "_MOST", 1000)
    singles, text = LongTexts(truncating("unigram, removed", 9)), "rain " * 201
    pairs = LongTexts(truncating("unigram, removed", 9, is_pair=True), is_pair=True)
    assert len(singles.cut(["the tree", text[:1000]])[1]) < 1000
    for which, texts in ((singles, ["the tree", text]), (pairs, [("a", "b"), ("a", text)])):
        with pytest.raises(TextError, match="1005 characters .* at most 1000 can be tokenised, .* Split") as error:
            list(which.encodings(texts))
        assert error.value.index == 1 and error.value.text == texts[1]


def test_longer_part_is_tried_where_tokens_differ():
    tokenizer = truncating("unigram, regex", 9)
    texts = ["all " * 9 + "1 " + "the " * 200]  # the tokens depend on the 37th character
    cut = LongTexts(tokenizer).cut(texts)
    same_tokens(tokenizer, texts, cut, 0)
    assert len(cut[0]) == len("all all ") + 4 * 9


def test_pair_of_texts_whose_tokens_depend_on_their_ends_is_refused():
    """The parts of both, of as many tokens as count, would be joined with each other."""
    tokenizer = truncating("unigram, regex", 9, is_pair=True)
    text = "all " * 200 + "1"
    with pytest.raises(TextError, match="has 801 characters"):
        list(LongTexts(tokenizer, is_pair=True).encodings([(text, text)]))


def test_endless_line_of_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(records, "LONGEST_LINE", 1000)
    with pytest.raises(cli._UserError, match="^/dev/zero, line 1: has more than 1000 bytes$"):
        next(cli._read_records("/dev/zero", False))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [9, 10])
@pytest.mark.parametrize("name", ["bert", "byte-level", "unigram, T5"])
@pytest.mark.parametrize("seed", seeds(5))
def test_pairs_have_the_tokens_of_the_whole_texts(name, length, side, seed, monkeypatch):
    """The longest text is truncated first. Of an odd number of tokens, the text with more tokens gets one more."""
    rng = random.Random(seed)
    # Not longer, because the tokenizer joins every truncated part of one text with every part of the other.
    texts = [text[: rng.choice([5, 30, 200])] for text in text_sample(seed)[:8]]
    pairs = [*itertools.permutations(texts[:5], 2), *((text, text) for text in texts)]
    pairs += [("the old tree " * 20, "rain"), ("rain on", "the river " * 30)]
    pairs += [pair for text in texts for pair in ((text, text + " a"), (text + " a", text))]
    tokenizer = truncating(name, length, side, is_pair=True)
    monkeypatch.setattr(long_texts, "_PIECE", 20)  # in which tokens are counted
    cut = LongTexts(tokenizer, is_pair=True).cut_pairs(pairs)
    same_tokens(tokenizer, pairs, cut, seed)
    assert sum(map(len, itertools.chain(*cut))) < sum(map(len, itertools.chain(*pairs)))


@pytest.mark.parametrize(("name", "side"), SIDED)
@pytest.mark.parametrize("seed", seeds(5))
def test_tokens_are_counted_in_pieces(name, side, seed, monkeypatch):
    monkeypatch.setattr(long_texts, "_PIECE", 20)
    tokenizer = truncating(name, 9, side, is_pair=True)
    counter = LongTexts(tokenizer, is_pair=True)
    tokenizer.no_truncation()
    for text in text_sample(seed)[10:40]:
        expected = len(tokenizer.encode(text, add_special_tokens=False))
        assert counter._total(text) == expected, text


def letters(tokenizer, text):
    """Returns the number of characters that the model of a tokenizer gets, of bytes if each may be a token."""
    counter = Tokenizer.from_str(tokenizer.to_str())
    counter.no_truncation()
    counter.post_processor = processors.Sequence([])
    vocab = {token: number for number, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    has_bytes = tokenizer.token_to_id("<0x00>") is not None
    counter.model = models.BPE(vocab, [], unk_token="<unk>", fuse_unk=False, byte_fallback=has_bytes)
    return len(counter.encode(text))


# Steps that lengthen texts, with a text that they lengthen.
GROWING = {
    "NFKC": (normalizers.NFKC(), "\ufdfa "),
    "NFKD, decomposed twice": (sequence(normalizers.NFKD(), normalizers.NFC(), normalizers.NFKD()), "\ufdfa각"),
    "Replace": (normalizers.Replace("a", "bc" * 20), "a-a"),
    "Replace, not letter by letter": (normalizers.Replace("abcd", "x " * 30), "abcd"),
    "Replace, regex": (normalizers.Replace(Regex(r"a(?=.*z)"), "b " * 20), "a" * 30 + "z"),
    "Replace, between characters": (normalizers.Replace(Regex("x*"), "yz"), "ab"),
    "Replace, stacked": (
        sequence(*(normalizers.Replace(one, two * 4) for one, two in itertools.pairwise("abcd"))),
        "a",
    ),
    "Replace, then NFKC": (sequence(normalizers.Replace("a", "\ufdfa" * 3), normalizers.NFKC()), "a"),
    "Prepend": (normalizers.Prepend("ab" * 20), "<mm>x"),
    "Replace, start": (normalizers.Replace(Regex("^"), "ab" * 20), "<mm>x"),
    "Precompiled": (precompiled({"x": "ab" * 40}), "x"),
    "Precompiled, grapheme": (precompiled({"e\u0301": "ab" * 40}), "e\u0301"),
    "bytes": (normalizers.ByteLevel(), "😀"),
}


def growing(name):
    normalizer, text = GROWING[name]
    return with_added(unigram(normalizer), AddedToken("<mm>", normalized=False)), text


@pytest.mark.parametrize("name", GROWING)
def test_size_is_not_below_what_the_normalizer_makes(name, monkeypatch):
    tokenizer, text = growing(name)
    monkeypatch.setattr(growth, "MOST", 3000)
    sizes, rng = growth.Growth(tokenizer), random.Random(0)
    for repeats in (1, 2, 5, 40, 200):
        for made in (text * repeats, "".join(rng.choices([text, "é ", "abcd", "中", "<mm>", "ﬁ"], k=repeats))):
            found = letters(tokenizer, made) - made.count("<mm>")
            assert sizes.bound(made) >= found
            assert found <= sizes.size(made, rough=0)
            assert sizes.size(made, rough=0) <= 1.3 * found + 100 or found > 2000


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_size_is_not_below_the_bytes_that_pre_tokenizers_write(levels):
    """A second ByteLevel writes two characters for a byte that the first one has made a character of two bytes."""
    tokenizer, text = byte_level(), "é😀z" * 40
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)] * levels)
    found, sizes = len(tokenizer.encode(text, add_special_tokens=False)), growth.Growth(tokenizer)
    assert found >= (7, 13, 25)[levels - 1] * 40
    assert sizes.bound(text) >= found and sizes.size(text, rough=0) >= found


@pytest.mark.parametrize(
    ("pattern", "content", "levels", "text", "size"),
    [
        ("x*", "y", [False], "11", 5 + 1),
        ("x*", "yé", [True], "1", 8 + 3),
        ("^", "😀", [False], "   ", 7 + 1),
        ("x*", "😀😀😀", [False, False], "1", 49 + 27),
        ("x*", "😀😀😀", [False, False, False], "1", 97 + 111),
        ("(?=1)", "abcd", [True, True, False], "11", 11 + 52),
    ],
)
def test_byte_level_repeats_what_precedes_a_text(pattern, content, levels, text, size):
    """A text whose first character was inserted has more tokens than its normalized form has bytes."""
    tokenizer = byte_level(normalizer=normalizers.Replace(Regex(pattern), content))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=space) for space in levels]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    sizes = growth.Growth(tokenizer)
    assert letters(tokenizer, text) == size
    assert sizes.bound(text) >= size and sizes.size(text, rough=0) >= size


def test_added_tokens_that_count_after_normalization_grow():
    tokenizer = with_added(unigram(normalizers.Replace("a", "bc" * 20)), AddedToken("ab", normalized=True))
    assert growth.Growth(tokenizer).size("ab" * 9, rough=0) == 9 * 41 + 1  # "▁" before the text


def test_added_token_that_is_normalized_to_nothing_matches_everywhere():
    strip = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer, text = with_added(byte_level(normalizer=strip), AddedToken("  ", normalized=True)), "b" * 20
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    found, sizes = len(tokenizer.encode(text, add_special_tokens=False)), growth.Growth(tokenizer)
    assert found == 40 and sizes.bound(text) >= found and sizes.size(text, rough=0) >= found


@pytest.mark.parametrize("content", ["a", "aa"])
def test_any_added_token_is_found(content):
    tokenizer = with_added(byte_level(), AddedToken(content, normalized=False))
    assert [*growth.Growth(tokenizer)._segments(f"b{content}b")] == ["b", None, "b"]


@pytest.mark.parametrize("marks", [0, 1])
def test_bound_is_fast_for_any_number_of_steps_that_is_accepted(marks):
    tokenizer, split, mark = unigram(None), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, *[mark] * marks] * (16 // (1 + marks)))
    start = time.process_time()
    assert all(growth.Growth(tokenizer).of_rules <= 2**16 for _ in range(10))
    assert time.process_time() - start < 0.3


def test_each_pre_tokenizer_puts_a_character_before_words():
    tokenizer, text = unigram(None), "a " * 100
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace("_"), pre_tokenizers.Metaspace("-")])
    found, sizes = letters(tokenizer, text), growth.Growth(tokenizer)
    assert found > 300 and sizes.bound(text) >= found and sizes.size(text, rough=0) >= found


def random_step(rng):
    """Returns a pre-tokenizer. Some put characters before words, others make words of one character."""
    kind = rng.choice([
        lambda: pre_tokenizers.Metaspace(
            rng.choice("▁_😀 "), prepend_scheme=rng.choice(["always", "first", "never"]), split=rng.random() < 0.7
        ),
        lambda: pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.7, use_regex=rng.random() < 0.7),
        lambda: pre_tokenizers.Punctuation(rng.choice(["isolated", "removed", "contiguous"])),
        lambda: pre_tokenizers.Digits(rng.random() < 0.7),
        lambda: pre_tokenizers.Split(Regex("a|▁"), rng.choice(["isolated", "removed"])),
        lambda: pre_tokenizers.CharDelimiterSplit("a"),
        pre_tokenizers.WhitespaceSplit, pre_tokenizers.Whitespace, pre_tokenizers.BertPreTokenizer,
        pre_tokenizers.UnicodeScripts,
    ])  # fmt: skip
    return kind()


@pytest.mark.parametrize("seed", seeds(5))
def test_no_text_exceeds_its_bound(seed):
    """The bound holds for every order of pre-tokenizers, for added tokens of one character, and for many texts."""
    rng, normal = random.Random(seed), [normalizers.Replace("a", " é"), normalizers.NFKD(), normalizers.Prepend("▁ ")]
    kinds = set()
    for _ in range(60):
        normalizer = normalizers.Sequence(rng.sample(normal, rng.randint(0, 2)))
        tokenizer = unigram(normalizer, byte_fallback=rng.random() < 0.3)
        steps = [random_step(rng) for _ in range(rng.randint(1, 3))]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        for token in rng.sample(["#", "ab", "<mm>"], rng.randint(0, 2)):
            tokenizer = with_added(tokenizer, AddedToken(token, normalized=rng.random() < 0.5))
        sizes = growth.Growth(tokenizer)
        for _ in range(10):
            few = rng.sample([" ", "a", "b", "1", "2", ".", ",", "é", "😀", "ﷺ", "_", "▁", "#", "<mm>", "ab"], 3)
            texts = ["".join(rng.choices(few, k=rng.choice([1, 2, 3, 30]))) for _ in range(rng.choice([1, 3]))]
            found = sum(letters(tokenizer, text) for text in texts)
            assert found <= sizes.bound(*texts), (texts, steps)
            assert found <= sum(sizes.size(text, rough=0) for text in texts), (texts, steps)
        kinds |= {type(step).__name__ for step in steps}
    assert len(kinds) == 10


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("steps", "text", "size"),
    [
        ([pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel()], " " * 100, 4 * 100),
        ([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()], "1" * 100, 2 * 100),
        ([pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace()], "," * 100, 2 * 100),
        ([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()], "a " * 50, 100),
        ([pre_tokenizers.Metaspace()], "a" * 100, 101),
        ([pre_tokenizers.Metaspace()], "a#" * 50, 150),  # "#" is an added token
        ([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("😀"), BYTES], "a " * 50, 250),
        ([*(pre_tokenizers.Metaspace(mark, prepend_scheme="never") for mark in " 😀"), BYTES], " " * 100, 400),
        ([*(pre_tokenizers.Metaspace(mark, prepend_scheme="never") for mark in "▁😀"), BYTES], " " * 100, 300),
        ([BYTES], "a" * 100, 100),
    ],
)
def test_size_of_some_texts_is_exact(steps, text, size):
    tokenizer = with_added(unigram(None, pre_tokenizers.Sequence(steps)), *[AddedToken("#")] * ("#" in text))
    assert letters(tokenizer, text) == size
    assert size <= growth.Growth(tokenizer).size(text, rough=0) <= size + len(steps) + 3
    assert growth.Growth(tokenizer).bound(text) <= 1.5 * size + 5


@pytest.mark.parametrize("normalizer", [None, normalizers.NFKC()])
def test_size_of_one_character_is_at_most_the_factor(normalizer):
    sizes = growth.Growth(byte_level(normalizer=normalizer))
    most = max(sizes.size(character, rough=0) for character in "aé中😀ﷺ")
    assert most <= sizes.factor <= 4 * most


def test_limit_of_one_text_is_about_400_megabytes():
    sizes = growth.Growth(byte_level())
    assert sizes.size("a" * 1_500_000) < np.inf and sizes.size("a" * 1_700_000) == np.inf


def test_replacements_are_counted_before_they_are_made(monkeypatch):
    monkeypatch.setattr(growth, "MOST", 3000)
    sizes = growth.Growth(unigram(normalizers.Replace("a", "b" * 1000)))
    sizes._steps = [(step, None) for step, _ in sizes._steps]  # the text is not normalized
    assert sizes.size("a-a" * 50) == np.inf


@pytest.mark.parametrize("name", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "StripAccents", "Nmt"])
def test_unicode_normalizers_lengthen_as_much_as_told(name):
    normalizer = getattr(normalizers, name)()
    sizes = growth.Growth(unigram(sequence(normalizer, normalizers.Lowercase(), normalizers.NFC())))
    for characters, factor in ((range(128), 0), (range(128, 0xD800), 1), (range(0xF900, 0x10000), 1)):
        longest = max(len(normalizer.normalize_str(chr(character))) for character in characters)
        assert longest <= sizes._factors[0] + factor * sizes._factors[1]
    assert sizes.bound("a" * 100) == 101  # "▁" before the text


class Weighing:
    """A tokenizer that notes how many tokens each call makes, overflowing ones included."""

    def __init__(self, tokenizer):
        self.tokenizer, self.most = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def _weighed(self, encodings):
        parts = [part for encoding in encodings for part in (encoding, *encoding.overflowing)]
        self.most = max(self.most, sum(map(len, parts)))
        return encodings

    def encode_batch_fast(self, texts, **options):
        return self._weighed(self.tokenizer.encode_batch_fast(texts, **options))

    def encode_batch(self, texts, **options):
        return self._weighed(self.tokenizer.encode_batch(texts, **options))


@pytest.mark.parametrize(
    ("name", "is_pair"),
    [
        *((name, False) for name in GROWING),
        *((name, True) for name in ("NFKC", "Precompiled, grapheme", "bytes")),
    ],
)
def test_no_call_gets_more_than_fits(name, is_pair, monkeypatch):
    monkeypatch.setattr(growth, "MOST", 20_000)
    monkeypatch.setattr(growth, "AT_ONCE", 10_000)
    monkeypatch.setattr(long_texts, "_MOST", 5000)
    plain, text = growing(name)
    plain = tokenizer_files.truncating(plain, 16, BertConfig(), owner="", argument="", is_pair=is_pair)
    tokenizer = Weighing(plain)
    which = LongTexts(tokenizer, is_pair=is_pair)
    texts = ["a bird", *(text * (size // len(text)) for size in (16, 60, 240, 240, 240, 240, 4900))]
    texts = [(one, other) for one in texts[:4] for other in texts[2:4]] if is_pair else texts
    refused = 0
    for index, one in enumerate(texts):
        try:
            (found,) = which.encodings([one])
        except TextError as error:
            assert "no place to cut" in error.reason
            refused += 1
        else:
            if max(map(len, [one] if isinstance(one, str) else one)) <= 60:
                assert found.ids == plain.encode_batch_fast([one])[0].ids, index
    assert refused <= len(texts) / 2 or "regex" in name  # which looks at the whole text
    with contextlib.suppress(TextError):
        list(which.encodings(texts))
    assert tokenizer.most <= 20_000


def test_no_call_is_without_texts(monkeypatch):
    monkeypatch.setattr(growth, "AT_ONCE", 10)
    tokenizer, text = growing("NFKC")
    which = LongTexts(tokenizer_files.truncating(tokenizer, 128, BertConfig(), owner="", argument=""))
    assert [stop for stop, _ in which._batches([text * 30] * 3)] == [1, 2, 3]
    assert [*which._batches([])] == []


def test_many_texts_that_get_long_are_tokenised_some_at_a_time(monkeypatch):
    monkeypatch.setattr(growth, "AT_ONCE", 20_000)
    tokenizer, text = growing("NFKC")
    tokenizer = Weighing(tokenizer_files.truncating(tokenizer, 128, BertConfig(), owner="", argument=""))
    texts = [text * 30] * 300
    found = list(LongTexts(tokenizer).encodings(texts))
    assert len(found) == 300 and {*map(len, found)} == {128}
    assert 1000 < tokenizer.most <= 20_000


def test_error_after_the_first_call_names_the_text(monkeypatch):
    monkeypatch.setattr(growth, "AT_ONCE", 100)
    monkeypatch.setattr(growth, "MOST", 2000)
    texts = ["the tree"] * 30 + ["<mask>a" * 20] + ["the tree"]
    which = LongTexts(
        tokenizer_files.truncating(unigram(normalizers.Prepend("b" * 500)), 9, BertConfig(), owner="", argument="")
    )
    found = []
    with pytest.raises(TextError, match="no place to cut") as error:
        found.extend(which.encodings(texts))
    assert error.value.index == 30 and error.value.text == texts[30] and len(found) == 30


class Counting:
    """A tokenizer that adds up the characters that it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode_batch_fast(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self.tokenizer.encode_batch_fast(texts, **options)

    def encode_batch(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self.tokenizer.encode_batch(texts, **options)


@pytest.mark.parametrize(
    ("name", "text", "side"),
    [
        *itertools.product(
            ["bert"],
            [
                "the old tree, ",
                "a",
                " ",
                "\n ",
                "中文",
                "-,",
                "\u0301",
                "\0\u200b",
                "1a",
                "aB3+x/",
                "##a",
                "the_",
                "a'",
                "the\xa0",
                " \u200b",
                "👩\u200d👩\u200d❤\ufe0f",
                "]",
                "[MASK]",
                "абвг",
                "≠a",
                "हिन्दी",
            ],
            ["right", "left"],
        ),
        *itertools.product(
            ["byte-level"],
            [
                "the old tree, ",
                "a",
                " ",
                "中文，",
                "-",
                "1a,",
                "aB3+",
                "a1",
                "中文字",
                "ภาษาไทย",
                "👩\u200d👩",
                "- ",
                "'",
                "\u0301",
                "हिन्दी",
            ],
            ["right"],
        ),
        *itertools.product(["byte-level"], ["the old tree, ", "中文，", "中文字", "👩\u200d👩"], ["left"]),
        *itertools.product(
            ["unigram, precompiled"], ["the old tree, ", "中文", "the", "1234", "中文，", "a_"], ["right"]
        ),
        *itertools.product(["unigram, precompiled"], ["ж", "ж😀𓀀", "👩\u200d👩", " ", "  \n", "- "], ["right", "left"]),
        ("unigram, precompiled", "the old tree, ", "left"),
    ],
)
def test_work_does_not_grow_with_the_text(name, text, side):
    text = text * (200_000 // len(text))
    tokenizer = Counting(truncating(name, 32, side))
    (cut,) = LongTexts(tokenizer).cut([text])
    assert len(cut) + tokenizer.characters < 50_000
    assert tokenizer.encode_batch_fast([cut])[0].ids == tokenizer.encode_batch_fast([text])[0].ids


def test_short_texts_are_not_touched():
    tokenizer = Counting(truncating("bert", 32))
    texts = ["a" * 512, "", "rain " * 100]
    pairs = [(text, text) for text in texts]
    assert LongTexts(tokenizer).cut(texts) is texts and LongTexts(tokenizer).cut([]) == []
    assert LongTexts(tokenizer, is_pair=True).cut_pairs(pairs) is pairs
    assert tokenizer.characters == 0


# Prints the megabytes that a long text, or a pair of two, takes beyond the text itself.
MEASURE = """
import json, resource, sys
from test_long_texts import LongTexts, TextError, tokenizer_files, truncating

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

name, side, text, size, is_pair = json.loads(sys.argv[1])
options = {"is_pair": True} if is_pair else {}
tokenizer = truncating(name, 512, side, **options)
long_texts, text = LongTexts(tokenizer, **options), text * (size // len(text))
before = peak()
try:
    list(long_texts.encodings([(text, text + " a") if is_pair else text]))
    print("encoded", peak() - before)
except TextError:
    print("refused", peak() - before)
"""


@pytest.mark.parametrize(
    ("name", "side", "text", "size", "is_pair", "expected"),
    [
        ("bert", "right", "the_", 2_000_000, False, "encoded"),
        *slow(
            *(
                pytest.param(name, side, text, 10_000_000, is_pair, expected)
                for name, side, text, is_pair, expected in [
                    ("bert", "right", "the'", False, "encoded"),
                    ("bert", "left", "the_", True, "encoded"),
                    ("bert", "right", "👩\u200d👩\u200d👧", False, "encoded"),
                    ("byte-level", "right", "中文字雨木", False, "encoded"),
                    ("byte-level", "left", "ภาษาไทย", True, "encoded"),
                    ("unigram, XLM-R", "right", "😀", False, "encoded"),
                    ("unigram, XLM-R", "left", "中文", False, "refused"),
                    ("unigram, removed", "right", "a b", False, "refused"),
                    ("unigram, one piece", "right", "a b", True, "refused"),
                ]
            ),
            pytest.param("unigram, one piece", "right", "a b", 390_000, True, "encoded"),
            pytest.param("wordpiece, split", "right", "中文 ", 400_000, False, "encoded"),
        ),
    ],
)
def test_memory_does_not_grow_with_the_text(name, side, text, size, is_pair, expected):
    command = [sys.executable, "-c", MEASURE, json.dumps([name, side, text, size, is_pair])]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=600)
    found, megabytes = result.stdout.split()
    assert found == expected
    assert int(megabytes) < (100 if name == "bert" else 500)
