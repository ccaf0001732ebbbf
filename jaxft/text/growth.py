"""Bounds the growth of a text in the steps of a tokenizer, whose memory is proportional to the grown text."""

import base64
import functools
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AT_ONCE = 1 << 20  # characters after normalization that one call of the tokenizers library gets; about 130 MB
MOST = 1_600_000  # characters after normalization of one text; about 400 MB
_COMPATIBLE, _CANONICAL = 18, 4  # most characters from one: NFKC or NFKD; other normalizers that know Unicode


class Growth:
    """Sizes of texts after normalization.

    A size is a number of characters, or of bytes if tokens may be bytes. It is about the largest number of tokens.

    Args:
      tokenizer: the tokenizer. It is read when a size is first computed.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @property
    def factor(self) -> float:
        """Largest size of a text of one character."""
        ascii, beyond, _ = self._factors
        return max(ascii, beyond) if self._steps else ascii + 3 * beyond

    @property
    def pre_tokenizers(self) -> int:
        """Number of pre-tokenizers that a text goes through, one after the other."""
        return len(self._splitters)

    @property
    def of_rules(self) -> float:
        """Largest growth by replacements and pre-tokenizers, without the growth by steps that know Unicode."""
        rules = math.prod(max(_factors(step)) for step, _ in self._steps if step["type"] not in _UNICODE)
        return rules * self._spread(1, 1, 1, 0)

    def bound(self, *texts: str) -> float:
        """Returns a number that the sizes of texts do not exceed together, in a hundredth of the time of the tokens."""
        ascii, beyond, of_text = self._factors
        others = sum([len(text.encode()) - len(text) for text in texts if not text.isascii()])
        return ascii * sum(map(len, texts)) + beyond * others + of_text * len(texts)

    def size(self, text: str, *, rough: float | None = None) -> float:
        """Returns the size of a text, or infinity if it is above `MOST`, without normalizing that much text.

        Returns `bound`, which is faster and may be larger, if `bound` is at most `rough`. None stands for `MOST`.
        """
        if (bound := self.bound(text)) <= (MOST if rough is None else rough):
            return bound
        total = 0.0
        for segment in self._segments(text):
            total += 1 if segment is None else self._size_of_segment(segment)
            if total > MOST:
                return math.inf
        return total

    def _segments(self, text: str) -> Iterator[str | None]:
        """Yields the parts of a text between added tokens, which are normalized one by one, and None for each token."""
        for number, (first, stop) in zip((found := self._splitter.encode(text)).ids, found.offsets, strict=True):
            yield text[first:stop] if number == 0 else None

    def _size_of_segment(self, text: str) -> float:
        for step, normalize in self._steps:
            if step["type"] == "Prepend":
                size: float = len(text) + len(step["prepend"])
            elif step["type"] == "Replace":
                without, marked = (len(_normalizer(step | {"content": mark}).normalize_str(text)) for mark in ("", "x"))
                size = without + (marked - without) * len(step["content"])
            else:
                size, length = 0, max(int(MOST / max(_factors(step))), 1)
                for first in range(0, len(text), length):  # nearly the size: cuts may separate what belongs together
                    size += len(normalize(text[first : first + length]))
                    if size > MOST:
                        break
            if size > MOST:
                return math.inf
            text = normalize(text)
        parts = 1 + len(text) * self._later_parts
        return self._spread(len(text), len(text.encode()), text.count(" "), parts, inserted=4 * self._inserted)

    @functools.cached_property
    def _steps(self) -> list[tuple[dict[str, Any], Any]]:
        return [(step, _normalizer(step).normalize_str) for step in steps_of(_state(self._tokenizer.normalizer))]

    @functools.cached_property
    def _inserted(self) -> float:
        """Largest number of characters that regular expressions with an empty match insert at one end of a text."""
        found = 0.0
        for step, _ in self._steps:
            found *= max(_factors(step))
            if "Regex" in step.get("pattern", ()):  # may match at the end, too
                found += len(step["content"])
        return found

    @functools.cached_property
    def _has_byte_tokens(self) -> bool:
        """True if a byte of a character that the vocabulary lacks is a token."""
        return any(self._tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))

    @functools.cached_property
    def _splitters(self) -> list[dict[str, Any]]:
        return steps_of(_state(self._tokenizer.pre_tokenizer))

    def _spread(
        self, characters: float, in_bytes: float, spaces: float, parts: float, first: int = 0, inserted: float = 0
    ) -> float:  # fmt: skip
        """Returns the largest size of normalized text after the pre-tokenizers from `first` on.

        The text has `parts` parts that are pre-tokenized one by one, and `in_bytes` bytes in UTF-8. At most `inserted`
        bytes are before its first character that was not inserted. ByteLevel repeats them (tokenizers 0.23). The result
        is the largest of some linear functions, so the sum of the results of several texts is at least the result of
        them all.
        """
        for number, step in enumerate(self._splitters[first:], first + 1):
            match step["type"]:
                case "WhitespaceSplit" if number == 1 or self._splitters[number - 2] != step:
                    # Two parts are separated by at least one space, which is removed.
                    fewer = (characters - parts) / 2
                    short = self._spread(characters - fewer, in_bytes - fewer, 0, parts + fewer, number, inserted)
                    return max(short, self._spread(characters, in_bytes, 0, parts, number, inserted))
                case "Metaspace":
                    mark = len(step["replacement"].encode())
                    in_bytes += (mark - 1) * spaces
                    spaces = characters + parts if step["replacement"] == " " else 0
                    if step["prepend_scheme"] != "never":
                        characters, in_bytes, inserted = characters + parts, in_bytes + mark * parts, 2 * inserted
                case "ByteLevel":  # makes a character of one or two bytes from each byte
                    if step["add_prefix_space"]:
                        characters, in_bytes, inserted = characters + parts, in_bytes + parts, 2 * inserted
                    parts, characters = characters, in_bytes + inserted
                    in_bytes, spaces, inserted = 2 * characters, 0, 4 * inserted
                    continue
            parts = characters  # each character may be a part
        return in_bytes if self._has_byte_tokens else characters

    @functools.cached_property
    def _factors(self) -> tuple[float, float, float]:
        """Returns three sizes.

        - The largest size that an ASCII character adds.
        - What another character adds for each of its bytes beyond the first.
        - What each text adds.
        """
        ascii, other, is_ascii, unicode = 1.0, 1.0, True, 0
        for step, _ in self._steps:
            of_ascii, of_other = _factors(step)
            if step["type"] in _UNICODE:  # together, these lengthen a text as much as the strongest of them
                of_other, unicode = max(of_other / max(unicode, 1), 1), max(unicode, int(of_other))
            else:
                unicode = 0
            ascii *= of_ascii if is_ascii else max(of_ascii, of_other)
            other *= max(of_ascii, of_other)
            is_ascii = is_ascii and _keeps_ascii(step)
        of_ascii, of_other = (self._spread(1, width, 1, 0) for width in (1, 4))
        of_part = self._inserted * of_other + self._spread(0, 0, 0, 1, inserted=4 * self._inserted)
        # A character of n bytes has n - 1 bytes beyond the first. Each of them adds the same if nothing is normalized.
        beyond = other * of_other if self._steps else self._spread(0, 1, 0, 0)
        return ascii * (of_ascii if is_ascii else of_other) + self._parts(of_part) * of_part, beyond, of_part

    @functools.cached_property
    def _later_parts(self) -> float:
        """Most parts that a character of a normalized text makes, beyond the first part of the text."""
        return self._parts(self._spread(0, 0, 0, 1), is_normalized=True)

    def _parts(self, size: float, is_normalized: bool = False) -> float:
        """Returns how many parts between added tokens a character makes at most, if a part adds `size` to the text."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        # A token that is normalized to nothing matches between all characters.
        late = [len(self._normalized(token.content)) for token in tokens if token.normalized and token.content]
        early = [len(token.content) for token in tokens if not (token.normalized or is_normalized) and token.content]
        shortest = min(early + late, default=math.inf)
        # A token counts as its characters, so a long token already pays for the part that follows it.
        return 0.0 if shortest >= 1 + size else 1 / (1 + shortest)

    def _normalized(self, text: str) -> str:
        return text if self._tokenizer.normalizer is None else self._tokenizer.normalizer.normalize_str(text)

    @functools.cached_property
    def _splitter(self) -> "Tokenizer":
        """Finds the added tokens that count before normalization, and has the token 0 for all between two of them."""
        from tokenizers import Tokenizer, models

        added = self._tokenizer.get_added_tokens_decoder().values()
        other = "a" * (1 + max((len(token.content) for token in added), default=0))  # no added token
        splitter = Tokenizer(models.WordLevel({other: 0}, unk_token=other))
        splitter.add_tokens([token for token in added if not token.normalized])
        splitter.encode_special_tokens = self._tokenizer.encode_special_tokens
        return splitter


_UNICODE = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents"}


def _factors(step: dict[str, Any]) -> tuple[float, float]:
    """Returns how many characters a normalizer makes from an ASCII character, and from another one, at most."""
    match step["type"]:
        case "Prepend":  # before each part of a text between added tokens
            return (1 + len(step["prepend"]),) * 2
        case "Replace":  # a regular expression may match between characters
            pattern, content = step["pattern"].get("String"), len(step["content"])
            return (max(content / len(pattern), 1) if pattern else 1 + content,) * 2
        case "Precompiled":
            return max(map(len, _ascii(step))), max(map(len, _rules(step)))
        case "Nmt" | "Strip" | "StripAccents":
            return 1, 1
        case name:
            return 1, _COMPATIBLE if name.startswith("NFK") else _CANONICAL


def _keeps_ascii(step: dict[str, Any]) -> bool:
    """Returns whether a normalizer makes ASCII texts from ASCII texts."""
    if step["type"] == "Precompiled":
        return all(map(str.isascii, _ascii(step)))
    return step["type"] in _UNICODE or str(step.get("content", step.get("prepend", "▁"))).isascii()


def _ascii(step: dict[str, Any]) -> list[str]:
    """Returns what a normalizer makes of the ASCII characters."""
    return [_normalizer(step).normalize_str(text) for text in (*map(chr, range(128)), "\r\n")]


def _rules(step: dict[str, Any]) -> list[str]:
    """Returns the replacements of SentencePiece's rules, each of which replaces at least one character."""
    rules = base64.b64decode(step["precompiled_charsmap"])
    replacements = rules[4 + int.from_bytes(rules[:4], "little") :]
    return [text.decode(errors="replace") for text in replacements.split(b"\0")]


def _normalizer(step: dict[str, Any]) -> Any:
    from tokenizers import normalizers

    normalizer = normalizers.Strip()
    normalizer.__setstate__(json.dumps(step, allow_nan=False).encode())
    return normalizer


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def steps_of(settings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if settings is None:
        return []
    parts = settings.get("normalizers", settings.get("pretokenizers"))
    return [settings] if parts is None else [step for part in parts for step in steps_of(part)]
