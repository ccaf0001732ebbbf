"""Texts that are tokenised word by word: the ids of the tokenizers library, and refusals where they may differ."""

import itertools
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

import jaxft
import tiny
from jaxft.text import long_texts, words
from jaxft.text.batching import Tokens
from jaxft.text.long_texts import LongTexts
from jaxft.text.words import Words

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<mask>"]
PIECES = [*"the ##re bird ##s s a b ##b Bird 7 ##7 ' . [ ] SEP é".split(), "\x01"]


def tokenizer(length=12, direction="right", ends=True, **options):
    vocab = {token: number for number, token in enumerate([*SPECIAL, *PIECES])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=6))
    made.normalizer = normalizers.BertNormalizer(**options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if ends:
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(SPECIAL)
    made.enable_truncation(max_length=length, direction=direction)
    return made


def texts(count=400):
    rng = random.Random(0)
    parts = [*map(chr, range(128)), *PIECES, *"birds There BIRD <mask> <MASK> [SEP] bbbbbbbb".split(), " ", " "]
    return ["".join(rng.choices(parts, k=rng.randrange(12))) for _ in range(count)]


@pytest.mark.parametrize("length", [3, 12, 100])
@pytest.mark.parametrize(
    "options", [{}, {"lowercase": False}, {"clean_text": False}, {"ends": False}, {"strip_accents": True}], ids=str
)
def test_ids_are_those_of_the_library(options, length):
    made = tokenizer(length, **options)
    table, refused = Words.of(made), 0
    for _ in range(2):  # the second time from the table
        for text in texts():
            ids = table.ids(text)
            refused += ids is None
            assert ids is None or ids == made.encode(text).ids, text
    assert refused < 200  # of 800


@pytest.mark.parametrize("text", ["a [SEP] b", "<mask>", "é", "a\xa0b"])
def test_added_tokens_and_other_characters_are_refused(text):
    assert Words.of(tokenizer()).ids(text) is None


def test_tokenizers_of_other_kinds_are_refused():
    made = tokenizer()
    assert Words.of(made) is not None and LongTexts(made, is_pair=True).words is None
    made.add_tokens([AddedToken("river", normalized=True)])
    assert Words.of(made) is None
    assert Words.of(tokenizer(direction="left")) is None
    for name, part in (
        ("normalizer", normalizers.Lowercase()), ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("normalizer", normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Strip()])),
        ("model", models.BPE({"a": 0}, [])),
    ):  # fmt: skip
        made = tokenizer()
        setattr(made, name, part)
        assert Words.of(made) is None


def test_table_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "_MOST", 3)
    table = Words.of(tokenizer())
    # The fourth word empties the table. Words of more than 32 characters are not kept.
    for text, kept in (("the bird", 2), ("a b s 7", 3), ("b" * 33, 3), ("b" * 32, 1), ("there", 2)):
        assert table.ids(text) == tokenizer().encode(text).ids
        assert len(table) == kept


@pytest.mark.parametrize("prompt", ["", "a b ", "é "])
def test_texts_of_a_chunk_keep_their_order(prompt):
    of_texts, mixed = LongTexts(tokenizer()), [*texts(60), "é bird", "the"]
    begins, ids, types = long_texts.tokenised(of_texts, {}, False, prompt, mixed)
    assert types is None
    expected = [tokenizer().encode(prompt + text).ids for text in mixed]
    assert [ids[i:j].tolist() for i, j in itertools.pairwise(begins)] == expected
    assert (len(of_texts.words) > 0) == (prompt != "é ")


@pytest.mark.parametrize("text", [
    "a bird sings", "", "caf\u00e9 \U0001f600 rain", "a [MASK] sings", "rain " * 100, "r" * 300, "rain " * 2000,
])  # fmt: skip
@pytest.mark.parametrize("prompt", ["", "query: "])
def test_one_text_is_tokenised_by_the_table(text, prompt, encoder):
    of_texts = encoder._texts(None)
    expected = Tokens.of(of_texts.encodings(prompt, [text]), with_types=False)
    found = of_texts.tokens(prompt, [text], True)
    assert isinstance(found, Tokens) == (len(text) <= 8192)
    found = found if isinstance(found, Tokens) else Tokens.of(found, with_types=False)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.begins, expected.begins)


def test_text_that_the_vocabulary_cannot_tokenise_is_named(tmp_path):
    encoder = jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path))
    of_texts = encoder._texts(None)
    assert Words.of(of_texts.tokenizer) is not None
    of_texts.tokenizer.model.unk_token = "[NONE]"
    assert Words.of(of_texts.tokenizer) is None
    with pytest.raises(ValueError, match=r"^texts\[0\] .* cannot be tokenised: "):
        encoder.encode("\u2603")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return jaxft.SentenceEncoder.from_pretrained(tiny.write_sentence_model(tmp_path_factory.mktemp("model")))
