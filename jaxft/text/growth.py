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
        return max(self._factors)

    @property
    def of_rules(self) -> float:
        """Largest growth by replacements and pre-tokenizers, without the growth by steps that know Unicode."""
        return self._spread * math.prod(max(_factors(step)) for step, _ in self._steps if step["type"] not in _UNICODE)

    def bound(self, *texts: str) -> float:
        """Returns a number that the sizes of texts do not exceed together, in a hundredth of the time of the tokens."""
        ascii, other = self._factors
        beyond = sum([len(text.encode()) - len(text) for text in texts if not text.isascii()])
        return ascii * sum(map(len, texts)) + other * beyond

    def size(self, text: str, *, rough: float | None = None) -> float:
        """Returns the size of a text, or infinity if it is above `MOST`, without normalizing that much text.

        Returns `bound`, which is faster and may be larger, if `bound` is at most `rough`. None stands for `MOST`.
        """
        if (bound := self.bound(text)) <= (MOST if rough is None else rough):
            return bound
        total = 0.0
        for segment in self._segments(text):
            total += self._spread * self._size_of_segment(segment)
            if total > MOST:
                return math.inf
        return total

    def _segments(self, text: str) -> Iterator[str]:
        """Yields the parts of a text between added tokens, which are normalized one by one."""
        for number, (first, stop) in zip((found := self._splitter.encode(text)).ids, found.offsets, strict=True):
            if number == 0:
                yield text[first:stop]

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
        return len(text.encode()) if self._has_bytes else len(text)

    @functools.cached_property
    def _steps(self) -> list[tuple[dict[str, Any], Any]]:
        return [(step, _normalizer(step).normalize_str) for step in steps_of(_state(self._tokenizer.normalizer))]

    @functools.cached_property
    def _has_bytes(self) -> bool:
        """True if a token may be a byte of a character."""
        return any(step["type"] == "ByteLevel" for step in self._splitters) or any(
            self._tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
        )

    @functools.cached_property
    def _splitters(self) -> list[dict[str, Any]]:
        return steps_of(_state(self._tokenizer.pre_tokenizer))

    @functools.cached_property
    def _spread(self) -> int:
        """Growth by the pre-tokenizers after the first that puts a character before words or writes bytes."""
        kinds = [step["type"] for step in self._splitters]
        prefixes = kinds.count("Metaspace") + sum(bool(step.get("add_prefix_space")) for step in self._splitters)
        return max(prefixes, 1) << max(kinds.count("ByteLevel") - 1, 0)

    @functools.cached_property
    def _factors(self) -> tuple[float, float]:
        """Largest size from an ASCII character, and from another one for each byte beyond its first."""
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
        width = 4 if self._has_bytes else 1
        # A character of n bytes has n - 1 bytes beyond the first, and one that is not changed gives n.
        return self._spread * ascii * (1 if is_ascii else width), self._spread * (
            other * width if self._steps else 1 if self._has_bytes else 0
        )

    @functools.cached_property
    def _splitter(self) -> "Tokenizer":
        """Finds the added tokens that count before normalization, and has the token 0 for all between two of them."""
        from tokenizers import Tokenizer, models

        splitter = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        added = self._tokenizer.get_added_tokens_decoder().values()
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
