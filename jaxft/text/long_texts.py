"""Cuts long texts before they are tokenised, where the tokens that count cannot depend on the rest of the text."""

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# In characters per token that counts: the length above which a text is long, and the length of the first part that is
# tried. Each further part is `_GROWTH` times as long.
_LONG, _FIRST, _GROWTH = 16, 6, 4

# Normalizers that change characters one by one or together with the marks after them. They keep white space and the
# punctuation below apart from the characters before it.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
                "StripAccents"}  # fmt: skip
_SPACES, _PUNCTUATION, _IDEOGRAPHS = " \t\n\r", ",.;:!?，。、；：！？", "\u3400-\u4dbf\u4e00-\u9fff"  # noqa: RUF001
_SYMBOLS = '"#$%&()*+-/<=>@[\\]^`{|}~'  # as punctuation, except for the symbols in added tokens such as [MASK]
# Letters and digits, except for those that Unicode joins with the next character to one grapheme.
_ALPHANUMERIC = r"[^\W_\u0d4e\U00010000-\U0010ffff]"
# Characters that BERT's normalizer may remove, and of which texts may have millions.
_REMOVABLE = (
    "\0\x01\x02\x07\x08\x1b\x7f\xad\u0300\u0301\u0302\u0303\u0308\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufffd"
)


class _Rules(NamedTuple):
    """Rules that say where the texts of a tokenizer may be cut."""

    between_words: re.Pattern[str] | None  # empty matches, where the tokens on either side ignore the other side
    needs_letter: bool  # whether the character before must be a letter or digit, also after normalization
    runs: list[re.Pattern[str]]  # long runs that have the tokens of their two groups
    longest: int  # characters of the longest token, if words may be cut; otherwise 0
    only_ascii: bool  # whether only words of ASCII characters may be cut, because tokens consist of bytes
    added: set[str]  # texts of added tokens, also after normalization
    stripping: set[str]  # texts of the added tokens that take white space beside them


class LongTexts:
    """Cuts texts for a tokenizer that truncates.

    A text is cut between two words, so that the tokens of the part are tokens of the text. The part grows until it has
    all tokens that count. A long word is cut if the tokens that count are the same wherever a token of it ends near
    the cut. The whole text is kept where neither is certain, for example with an unknown normalizer.

    Args:
      tokenizer: a tokenizer that truncates the longer text of a pair first, and does not pad.
      is_pair: whether it tokenises pairs.
    """

    def __init__(self, tokenizer: "Tokenizer", *, is_pair: bool = False) -> None:
        assert tokenizer.truncation is not None
        self._tokenizer = tokenizer
        self._count: int = tokenizer.truncation["max_length"]  # the tokens that count, or a few more
        self._left: bool = tokenizer.truncation["direction"] == "left"
        # With an odd number of tokens for two long texts, the longer one (the second of equal ones) gets one more.
        self._odd = is_pair and (self._count - tokenizer.num_special_tokens_to_add(is_pair=True)) % 2 == 1

    def cut(self, texts: Sequence[str]) -> Sequence[str]:
        """Returns texts that have the same tokens after truncation. Long texts are cut where that is safe."""
        if max(map(len, texts), default=0) <= _LONG * self._count:
            return texts
        return self._cut(texts, [self._count] * len(texts))

    def cut_pairs(self, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Returns pairs that have the same tokens after truncation. Long texts are cut where that is safe."""
        texts = [*itertools.chain.from_iterable(pairs)]
        if max(map(len, texts), default=0) <= _LONG * self._count:
            return pairs
        cut = self._cut(texts, [self._count] * len(texts))
        changed = [first for first in range(0, len(texts), 2) if cut[first : first + 2] != texts[first : first + 2]]
        if self._odd and changed:
            lengths = self._lengths([cut[first + second] for first in changed for second in (0, 1)])
            for first, one, two in zip(changed, lengths[::2], lengths[1::2], strict=True):
                if min(one, two) < self._count // 2:
                    continue
                # Both may be truncated: keep their order. This is rare, so that counting the tokens of both is no harm.
                total_one, total_two = (self._lengths([text])[0] for text in texts[first : first + 2])
                if total_one > total_two and one <= two:
                    cut[first : first + 1] = self._cut(texts[first : first + 1], [two + 1])
                elif total_one <= total_two and one > two:
                    cut[first + 1 : first + 2] = self._cut(texts[first + 1 : first + 2], [one])
        return [*zip(cut[::2], cut[1::2], strict=True)]

    def _cut(self, texts: Sequence[str], counts: Sequence[int]) -> list[str]:
        """Cuts texts so that the tokens that count stay the same: the first `counts` tokens, or the last ones."""
        texts, size = [*texts], _FIRST * self._count
        waiting = [i for i, text in enumerate(texts) if len(text) > _LONG * self._count]
        while waiting:
            parts = {index: self._part(texts[index], size) for index in waiting}
            lengths = self._lengths([part for part, _ in parts.values()])
            unsure = self._lengths([start for _, start in parts.values()])
            for index, length, start in zip(waiting, lengths, unsure, strict=True):
                part: str | None = parts[index][0]
                if length - start < counts[index]:
                    part = self._part_in_word(texts[index], size) if counts[index] == self._count else None
                if part is not None:
                    texts[index] = part
                else:
                    del parts[index]
            waiting = [index for index in waiting if index not in parts]
            for index in waiting if size == _FIRST * self._count else ():
                for run in self._rules.runs:
                    texts[index] = run.sub(r"\1\2", texts[index])
            size *= _GROWTH
            waiting = [index for index in waiting if len(texts[index]) > size]
        return texts

    def _lengths(self, texts: list[str]) -> list[int]:
        """Returns the number of tokens of each text, without special tokens and before truncation."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [len(encoding) + sum(map(len, encoding.overflowing)) for encoding in encodings]

    def _part(self, text: str, size: int) -> tuple[str, str]:
        """Returns a part between words of about `size` characters, and its start if that may have other tokens."""
        if not self._left:
            stop = self._between_words(text, size, _GROWTH * size)
            return text[: stop or 0], ""
        first = self._between_words(text, len(text) - size, len(text))
        # The first word of a part may get another prefix than within the text, for example a space.
        second = first and self._between_words(text, first + 1, len(text))
        return (text[first:], text[first:second]) if second else ("", "")

    def _between_words(self, text: str, start: int, stop: int) -> int | None:
        """Returns the first place between words; None if there is none, or none among the first 50 is certain."""
        rules, normalizer = self._rules, self._tokenizer.normalizer
        if rules.between_words is None:
            return None
        for found in itertools.islice(rules.between_words.finditer(text, start, stop), 50):
            place = found.start()
            before = text[max(place - 32, 0) : place]
            if not rules.needs_letter or normalizer is None or normalizer.normalize_str(before)[-1:].isalnum():
                return place
        return None

    def _part_in_word(self, text: str, size: int) -> str | None:
        """Returns a part of about `size` characters that is cut in a word, or None if its tokens are not certain.

        A token ends at one of any `longest` places in a row. Before (or after) that place, the tokens of the text are
        the tokens of the part: no merge and no best path there looks further.
        """
        rules = self._rules
        margin = max(4, *map(len, rules.added), 0)  # 4: contractions such as 'll
        if not rules.longest or size > _GROWTH * _FIRST * self._count or size < rules.longest + margin:
            return None
        first = len(text) - size if self._left else size - rules.longest
        word = text[max(first - margin, 0) : first + rules.longest + margin]
        kinds, normalizer = {*map(_kind, word)}, self._tokenizer.normalizer
        if (
            len(kinds) > 1
            or None in kinds
            or (rules.only_ascii and not word.isascii())
            or (normalizer is not None and not normalizer.normalize_str(word).endswith(word))
            or any({*map(_kind, token)} == kinds for token in rules.added)
        ):
            return None
        if kinds == {"space"} and (normalizer or any(token in text for token in rules.stripping)):
            return None
        places = range(first, first + rules.longest)
        parts = [text[place:] if self._left else text[:place] for place in places]
        ids = [found.ids for found in self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)]
        return parts[-1] if len(ids[0]) == self._count and ids.count(ids[0]) == len(ids) else None

    @functools.cached_property
    def _rules(self) -> _Rules:
        settings = json.loads(self._tokenizer.to_str())
        model, normalizer = settings["model"], self._tokenizer.normalizer
        normalizers, pre_tokenizers = _steps(settings["normalizer"]), _steps(settings["pre_tokenizer"])
        kinds = {step["type"] for step in normalizers}

        def normalized(text: str) -> str:
            return text if normalizer is None else normalizer.normalize_str(text)

        added, stripping = (
            {form for token in tokens for form in (token["content"], normalized(token["content"]))}
            for tokens in (
                settings["added_tokens"],
                [token for token in settings["added_tokens"] if token["lstrip"] or token["rstrip"]],
            )
        )
        nothing = _Rules(None, False, [], 0, False, added, stripping)
        # The tokenizers that come from SentencePiece join spaces.
        joined = [" ", "▁"] if any(step["type"] == "Metaspace" for step in pre_tokenizers) else [" "]
        for step in normalizers:
            joins = step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"} and step["content"] in joined
            if step["type"] not in _NORMALIZERS and not joins:
                return nothing
        if not pre_tokenizers or any(token["single_word"] for token in settings["added_tokens"]):
            return nothing
        inside = {character for token in added for character in token[1:]}
        punctuation = _PUNCTUATION + "".join(symbol for symbol in _SYMBOLS if symbol not in inside)
        before, after, runs = f"(?<={_ALPHANUMERIC})", _SPACES, []
        bert = byte_level = False
        match pre_tokenizers[0]:
            case {"type": "BertPreTokenizer"} if "Precompiled" not in kinds:
                bert, before, after = True, "", _SPACES + punctuation
            case {"type": "Whitespace"}:
                after = _SPACES + punctuation
            case {"type": "ByteLevel", "use_regex": True}:
                byte_level, after = True, _SPACES + punctuation
            case {"type": "WhitespaceSplit"}:
                pass
            case {"type": "Metaspace", "split": True}:
                after = " "
            case _:
                return nothing
        if not all(re.search(r"a\s+a$" if c.isspace() else r"a[^\w\s]+a$", normalized(f"a{c}a")) for c in after):
            return nothing
        after = re.escape(after)
        if bert and any(step.get("handle_chinese_chars") for step in normalizers):
            after += _IDEOGRAPHS
        if any(re.search(f"(?s).[{after}]", token) for token in added):
            return nothing
        removed = "".join(c for c in _REMOVABLE if normalized(f"a{c}a") == "aa")
        if (
            bert
            and model["type"] == "WordPiece"
            and kinds - {"Lowercase"} == {"BertNormalizer"}
            and not any(re.search(f"^[A-Za-z0-9]+$|[{_SPACES}{removed}]", token) for token in added)
        ):
            # A word above the model's limit is one unknown token.
            end = f"[A-Za-z0-9]{{{max(model['max_input_chars_per_word'] + 1, *map(len, added))}}}"
            runs = [re.compile(f"({end})[A-Za-z0-9]+({end})")]
            runs += [re.compile(f"([{one}])[{one}]+([{one}])") for one in (_SPACES, removed) if one]
        longest = 0
        if model["type"] == "BPE" and not any(
            model[name]
            for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
        ):
            longest = max(map(len, model["vocab"]))
        elif model["type"] == "Unigram" and not self._left:  # from the right, sums of scores are rounded differently
            longest = max(len(token) for token, _ in model["vocab"])
        if byte_level:
            prefixed = self._left and pre_tokenizers[0]["add_prefix_space"]
            cuts_words = len(pre_tokenizers) == 1 and not normalizers and not prefixed
        else:
            cuts_words = not self._left and {step["type"] for step in pre_tokenizers} <= {
                "WhitespaceSplit",
                "Metaspace",
            }
        return _Rules(
            re.compile(f"{before}(?=[{after}])"),
            bool(before),
            runs,
            longest if cuts_words else 0,
            byte_level,
            added,
            stripping,
        )


def _kind(character: str) -> str | None:
    """Returns the class of a character in GPT-2's regular expression; None for characters that are special there."""
    if character in _SPACES:
        return "space"
    kind = unicodedata.category(character)
    return None if kind[0] in "CZ" or character == "'" else kind[0] if kind[0] in "LN" else "other"


def _steps(settings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if settings is None:
        return []
    parts = settings.get("normalizers", settings.get("pretokenizers"))
    return [settings] if parts is None else [step for part in parts for step in _steps(part)]
