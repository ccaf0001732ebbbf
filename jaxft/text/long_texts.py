"""Cuts long texts before they are tokenised, where the tokens that count cannot depend on the rest of the text."""

import contextlib
import functools
import itertools
import json
import math
import re
import threading
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxft.checkpoint import files as checkpoint_files
from jaxft.text import growth
from jaxft.text.words import Words

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# In characters per token that counts: the length above which a text is long, and the length of the first part that is
# tried. Each further part is `_GROWTH` times as long.
_LONG, _FIRST, _GROWTH = 16, 6, 4
_MOST = 400_000  # characters of one text that are tokenised at once; each may take a kilobyte
_PIECE = 1 << 16  # characters of the pieces in which tokens are counted
_END = 32  # characters at either end of a run that is shortened
_PER_PAIR, _PER_ENCODING = 2, 32  # memory of a token of a pair and of an encoding without tokens, in tokens of a text
_TRIES = 1000  # places between characters of a part that are tried
_ALONE = threading.RLock()  # for texts that take hundreds of megabytes

# Normalizers that change characters one by one or together with the characters beside them.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
                "StripAccents"}  # fmt: skip
# Pre-tokenizers that split two characters whatever is around them, unless the first is white space or an apostrophe.
_PRE_TOKENIZERS = {"BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace",
                   "WhitespaceSplit"}  # fmt: skip
# Places that are not between two letters. Ideographs count as words.
_PLACES = re.compile(r"(?<![^\W\d_])|(?![^\W\d_])|(?=[\u2e80-\ufaff\U00020000-\U0003ffff])")


class TextError(ValueError):
    """Error about one of several texts (or pairs): it cannot be tokenised, or its result is not finite."""

    def __init__(self, index: int, text: Any, reason: str) -> None:
        super().__init__(f"texts[{index}] ({text!r:.80}) {reason}")
        self.index, self.text, self.reason = index, text, reason


class _Rules(NamedTuple):
    """Facts about a tokenizer that allow to cut its texts."""

    between_words: bool  # whether words are tokenised one by one, and end where two characters are split
    is_bert: bool  # whether the tokens of a character, other than letters of words, ignore all characters beside it
    longest: int  # characters (with byte-level tokens, bytes) of the longest token, if words may be cut; otherwise 0
    limit: int | None  # a word with more characters is one unknown token
    known: set[str] | None  # the characters of tokens; a run of others is one unknown token
    kept: set[str]  # texts that are not cut: added tokens, also after normalization, and those that are replaced
    stripping: set[str]  # texts of the added tokens that take white space beside them


_NOTHING = _Rules(False, False, 0, None, None, set(), set())


class LongTexts:
    """Cuts texts for a tokenizer that truncates.

    A text is cut between two words, so that the tokens of the part are tokens of the text. The part grows until it has
    all tokens that count. A long word is cut if the tokens that count are the same wherever a token of it ends near
    the cut. Long runs of characters without tokens of their own are shortened. Where nothing is certain, for example
    with an unknown normalizer, the whole text is tokenised once, and cut if the part has the same tokens. A text that
    is too long for that is refused, because the tokenizers library would take gigabytes.

    Args:
      tokenizer: a tokenizer that truncates the longer text of a pair first, and does not pad.
      is_pair: whether it tokenises pairs.
    """

    def __init__(self, tokenizer: "Tokenizer", *, is_pair: bool = False) -> None:
        assert tokenizer.truncation is not None
        self._tokenizer = tokenizer
        self._count: int = tokenizer.truncation["max_length"]  # the tokens that count, or a few more
        self._left: bool = tokenizer.truncation["direction"] == "left"
        self._is_pair = is_pair
        # With an odd number of tokens for two long texts, the longer one (the second of equal ones) gets one more.
        self._special = tokenizer.num_special_tokens_to_add(is_pair=is_pair)
        self._odd = is_pair and (self._count - self._special) % 2 == 1
        self._growth = growth.Growth(tokenizer)

    def __reduce__(self) -> Any:
        return _restored, (self._tokenizer, self._tokenizer.encode_special_tokens, self._is_pair)

    @functools.cached_property
    def words(self) -> Words | None:
        """The words of single texts, if texts may be tokenised word by word."""
        return None if self._is_pair else Words.of(self._tokenizer)

    def encodings(self, texts: Sequence[Any]) -> "Iterator[Encoding]":
        """Yields the encodings of texts, or of pairs. Long texts are cut.

        Raises a TextError for the first text or pair that is too long to be tokenised and cannot be cut, or that the
        tokenizers library cannot tokenise.
        """
        done = 0
        try:
            if self._are_light(texts):
                found: Any = self._tokenizer.encode_batch_fast(texts)
            else:
                found = self._encoded(self.cut_pairs(texts) if self._is_pair else self.cut(texts))
            for encoding in found:
                yield encoding
                done += 1
            return
        except BaseException as error:
            if not checkpoint_files.is_library_error(error):
                raise
            if len(texts) == 1:
                reason = error if isinstance(error, _CannotCutError) else f"cannot be tokenised: {error}"
                raise TextError(0, texts[0], str(reason)) from error
        for index in range(done, len(texts)):  # each alone, to find the one that is to blame
            try:
                yield from self.encodings(texts[index : index + 1])
            except TextError as error:
                raise TextError(index, texts[index], error.reason) from error.__cause__

    def _are_light(self, texts: Sequence[Any]) -> bool:
        """Returns whether no text is long, and one call of the library may take all of them: no text is looked at."""
        if self._is_pair or max(map(len, texts), default=0) > _LONG * self._count:
            return False
        return self._growth.bound(*texts) <= growth.AT_ONCE

    def cut(self, texts: Sequence[str]) -> Sequence[str]:
        """Returns texts that have the same tokens after truncation. Long texts are cut where that is safe."""
        growths = self._growths(texts)
        return self._cut(texts, self._count, growths) if any(growths) else texts

    def cut_pairs(self, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Returns pairs that have the same tokens after truncation, as `cut` does."""
        texts, growths = [*itertools.chain.from_iterable(pairs)], self._growths(pairs)
        if not any(growths):
            return pairs
        cut = self._cut(texts, self._count, growths)
        changed = [i for i in range(0, len(texts), 2) if cut[i : i + 2] != texts[i : i + 2]] if self._odd else []
        lengths = self._lengths([cut[first + second] for first in changed for second in (0, 1)])
        for first, one, two in zip(changed, lengths[::2], lengths[1::2], strict=True):
            if min(one, two) < self._count // 2:
                continue
            # Both may be truncated: keep their order.
            total_one, total_two = map(self._total, texts[first : first + 2])
            if total_one > total_two and one <= two:
                again = slice(first, first + 1)
                cut[again] = self._cut(texts[again], two + 1, growths[again])
            elif total_one <= total_two and one > two:
                again = slice(first + 1, first + 2)
                cut[again] = self._cut(texts[again], one, growths[again])
        return [*zip(cut[::2], cut[1::2], strict=True)]

    def _growths(self, texts: Sequence[Any]) -> list[int]:
        """Returns for each text 0 if it can be tokenised whole, else how many times as long its start or end gets."""
        most, growths = _LONG * self._count, []
        for text in texts:
            is_heavy = self._weight(text, self._growth.bound) > growth.MOST
            for one in [text] if isinstance(text, str) else text:
                part = one[-most:] if self._left else one[:most]
                size = self._growth.size(part, rough=0) if is_heavy else 0
                is_long = len(one) > most or size > _FIRST * self._count
                growths.append(is_long and max(math.ceil(min(size / len(part), self._growth.factor)), 1))
        return growths

    def _weight(self, text: Any, size: Callable[[str], float]) -> float:
        """Returns about how many tokens of memory a text or pair takes, from the `size` of a text in tokens.

        The tokenizers library joins each truncated part of the first text of a pair with each part of the second text.
        """
        if isinstance(text, str):
            return size(text)
        share = max((self._count - self._special) // 2, 1)
        first, second = (max(size(one) / share, 1) for one in text)
        return first * second * (_PER_PAIR * self._count + _PER_ENCODING)

    def _encoded(self, texts: Sequence[Any], **options: Any) -> "Iterator[Encoding]":
        """Yields the encodings of texts that are not cut, some at a time."""
        first = 0
        for stop, weight in self._batches(texts):
            with _ALONE if weight > growth.AT_ONCE else contextlib.nullcontext():
                found = self._tokenizer.encode_batch_fast(texts[first:stop], **options)
            yield from found
            first = stop

    def _batches(self, texts: Sequence[Any]) -> Iterator[tuple[int, float]]:
        """Yields (end, weight) of each of the calls in which texts are tokenised."""
        total = 0.0
        for index, text in enumerate(texts):
            if (weight := self._weight(text, self._growth.bound)) > growth.MOST:
                exact = self._growth.size if isinstance(text, str) else lambda one: self._lengths([one])[0]
                weight = self._weight(text, exact)
            if weight > growth.MOST:
                raise _CannotCutError(*[text] if isinstance(text, str) else text)
            if total and total + weight > growth.AT_ONCE:
                yield index, total
                total = 0.0
            total += weight
        if texts:
            yield len(texts), total

    def _cut(self, texts: Sequence[str], count: int, growths: Sequence[int]) -> list[str]:
        """Cuts texts so that the tokens that count stay the same: the first `count` tokens, or the last ones."""
        texts, size = [*texts], _FIRST * count
        waiting = [index for index, factor in enumerate(growths) if factor]
        while waiting and size <= _MOST and self._rules.between_words:
            sizes = {index: max(size // growths[index], 1) for index in waiting}
            parts = {index: self._part(texts[index], sizes[index]) for index in waiting}
            lengths = self._lengths([part for part, _ in parts.values()])
            unsure = self._lengths([start for _, start in parts.values()])
            for index, length, start in zip(waiting, lengths, unsure, strict=True):
                part: str | None = parts[index][0]
                if length - start < count:
                    part = self._part_in_word(texts[index], sizes[index], count)
                if part is None:
                    del parts[index]
                else:
                    texts[index] = part
            waiting = [index for index in waiting if index not in parts]
            if size == _FIRST * count:
                for index in waiting:
                    texts[index] = self._shorten(texts[index])
            size *= _GROWTH
            waiting = [i for i in waiting if growths[i] > 1 or len(texts[i]) > _LONG * self._count]
        for index in waiting:
            texts[index] = self._cut_tokenised(texts[index], count, growths[index])
        return texts

    def _lengths(self, texts: list[str]) -> list[int]:
        """Returns the number of tokens of each text, without special tokens and before truncation."""
        encodings = self._encoded(texts, add_special_tokens=False)
        return [len(encoding) + sum(map(len, encoding.overflowing)) for encoding in encodings]

    def _total(self, text: str) -> int:
        """Returns the number of tokens of a text, which is tokenised in pieces if it is long."""
        text = self._shorten(text)
        total = first = second = 0  # the text from `first` on has its own tokens from `second` on
        while True:
            begin, end = first + _PIECE, first + _MOST
            stop = self._between_words(text, begin, end)
            after = stop and self._between_words(text, stop + 1, end)
            if not after and len(text) > end:
                raise _CannotCutError(text)
            length, start = self._lengths([text[first : after or None], text[first:second]])
            total += length - start
            if not stop or not after:
                return total
            first, second = stop, after

    def _part(self, text: str, size: int) -> tuple[str, str]:
        """Returns a part between words of about `size` characters, and its start if that may have other tokens."""
        if not self._left:
            stop = self._between_words(text, size, min(_GROWTH * size, _MOST))
            return text[: stop or 0], ""
        first = self._between_words(text, max(len(text) - size, 1), len(text))
        # The first word of a part may get another prefix than within the text, for example a space.
        second = first and self._between_words(text, first + 1, len(text))
        return (text[first:], text[first:second]) if second else ("", "")

    def _between_words(self, text: str, start: int, stop: int) -> int | None:
        """Returns the first place between words; None if there is none, or none among the first ones is certain."""
        if not self._rules.between_words:
            return None
        for found in itertools.islice(_PLACES.finditer(text, start, stop), _TRIES):
            sides = self._sides(text, found.start())
            if sides is not None and self._splits(sides):
                return found.start()
        return None

    def _sides(self, text: str, place: int) -> str | None:
        """Returns the normalized characters on either side of a place; None if they depend on each other.

        They do if normalization joins them, or if an added token or a text that is replaced has both.
        """
        kept = self._rules.kept
        longest = max(map(len, kept), default=0)
        around = 32 + 2 * longest
        left, right = text[max(place - around, 0) : place], text[place : place + around]
        before, both = self._normalized(left), self._normalized(left + right)
        after = both[len(before) :]
        if (
            not before
            or not after
            or not both.startswith(before)
            or self._normalized(f"{left}a") != f"{before}a"  # white space before the place is stripped from a part
            or (self._tokenizer.normalizer is not None and unicodedata.category(after[0])[0] == "M")
            or (len(before) < longest and place > around)
            or (len(after) < longest and place + around < len(text))
        ):
            return None
        for one, two in ((left, right), (before, after)):
            for token in kept:
                if token in one[max(len(one) - len(token) + 1, 0) :] + two[: len(token) - 1]:
                    return None
        return before[-1] + after[0]

    def _splits(self, sides: str) -> bool:
        """Returns whether words end between two normalized characters, whatever is around them."""
        if not self._rules.is_bert and (sides[0].isspace() or (sides[0] == "'" and not sides[1].isspace())):
            return False
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str(sides)
        return not any(first < 1 < stop for _, (first, stop) in pieces)

    def _part_in_word(self, text: str, size: int, count: int) -> str | None:
        """Returns a part of about `size` characters that is cut in a word, or None if its tokens are not certain.

        A token ends at one of any `longest` places in a row. Before (or after) that place, the tokens of the word are
        the tokens of its part: no merge and no best path there looks further.
        """
        rules = self._rules
        if not rules.longest:
            return None
        begin = max(len(text) - size, 1) if self._left else size
        place = next((place for place in range(begin, min(begin + 50, len(text))) if self._sides(text, place)), None)
        # An added token may take all white space up to it.
        if place is None or (
            any(map(str.isspace, text[place - 1 : place + 1])) and any(token in text for token in rules.stripping)
        ):
            return None
        part = text[place:] if self._left else text[:place]
        step = -1 if self._left else 1
        found = self._whole(part)
        parts = [found, *found.overflowing]  # for a tokenizer that truncates from the left, from right to left
        if not count <= sum(map(len, parts)) < _GROWTH**3 * count:
            return None
        names = ("ids", "tokens", "word_ids")
        ids, tokens, words = ([item for one in parts for item in getattr(one, name)[::step]] for name in names)
        first = words.index(words[-1])
        needed = max(count - first, 0)
        # The last characters may be in another word of the text: a space before a word, or a contraction such as 'll.
        margin = rules.longest + 4
        word = "".join(tokens[first : first + needed + margin][::step])
        if len(word) <= margin:
            return None
        model = self._tokenizer.model
        for length in range(len(word) - margin, len(word) + 1):
            piece = word[-length:] if self._left else word[:length]
            if [token.id for token in model.tokenize(piece)][::step][:needed] != ids[first : first + needed]:
                return None
        return part

    def _cut_tokenised(self, text: str, count: int, factor: int) -> str:
        """Cuts a text for which no rule holds. Tokenises the text, and searches a part that has the same tokens."""
        if len(text) > _MOST:
            raise _CannotCutError(text)
        with _ALONE:
            whole = self._tokens(text, count)
            if len(whole) < count:
                return text
            (first, stop) = whole[-1][1]
            for more in dict.fromkeys((count // factor, count, _GROWTH * count)):
                part = text[max(first - more, 0) :] if self._left else text[: stop + more]
                if [token for token, _ in self._tokens(part, count)] == [token for token, _ in whole]:
                    return part
        if self._is_pair and len(text) > 2 * _LONG * self._count:
            raise _CannotCutError(text)
        return text

    def _tokens(self, text: str, count: int) -> list[tuple[int, tuple[int, int]]]:
        """Returns the ids and places of the first `count` tokens of a text, or of the last ones from right to left."""
        found = self._whole(text)
        tokens = (
            token
            for part in (found, *found.overflowing)
            for token in [*zip(part.ids, part.offsets, strict=True)][:: -1 if self._left else 1]
        )
        return [*itertools.islice(tokens, count)]

    def _whole(self, text: str) -> "Encoding":
        """Returns the encoding of a text without special tokens, with places."""
        if self._growth.size(text) > growth.MOST:
            raise _CannotCutError(text)
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _shorten(self, text: str) -> str:
        """Shortens long runs of characters that have no token, or one token for all of them."""
        rules = self._rules
        if not rules.between_words:
            return text
        spaces, removed, words, unknown = self._classes({*text})
        longest = max(map(len, rules.kept), default=0)

        def gap(found: re.Match[str]) -> str:
            run = found[0]
            return run[0] + next((character for character in run if character in spaces), "") + run[-1]

        def word(found: re.Match[str]) -> str:
            run = found[0]
            ends = run[:size], run[-size:]
            return "".join(ends) if min(map(len, map(self._normalized, ends))) > least else run

        def unknown_word(found: re.Match[str]) -> str:
            run = found[0]
            # Scores add up along a word, and are rounded: the tokens after the run might change.
            if text[found.end() : found.end() + 1] not in ("", " "):
                return run
            short = run[:_END] + run[-_END:]
            parts = [short, *(run[max(first - _END, 0) : first + _PIECE] for first in range(0, len(run), _PIECE))]
            return short if all(map(self._is_unknown, parts)) else run

        text = _shorten_runs(text, spaces + removed, 4, gap)
        if rules.limit is not None and not any({*token} <= {*words} for token in rules.kept):
            least = rules.limit + longest
            size = 3 * (least + 1)
            text = _shorten_runs(text, words, 2 * size + 1, word)
        if self._splits("a "):
            text = _shorten_runs(text, unknown, 2 * _END + 1, unknown_word)
        return text

    def _classes(self, characters: set[str]) -> tuple[str, str, str, str]:
        """Returns the spaces, removed characters, characters of words and unknown characters among some.

        Removed characters of words are among both. There are only words and removed characters if the normalizer
        changes characters one by one, except for the order of marks.
        """
        rules, inside, space = self._rules, {*"".join(self._rules.kept)}, self._pieces("a a")
        spaces, removed, words, unknown = "", "", "", ""
        for character in characters:
            normalized, pieces = self._normalized(f"a{character}a"), self._pieces(f"a{character}a")
            if len(pieces) == 1 and rules.is_bert:
                words += character
            if not inside.isdisjoint(character + normalized[1:-1]):
                continue
            same = "\r\n" if character == "\r" else character  # these two are one grapheme
            others = (self._pieces(f"a{run}a") for run in (same, character * 2, character * 3))
            if pieces == space and all(map(pieces.__eq__, others)) and (rules.is_bert or _is_space(character)):
                spaces += character
            elif normalized == self._normalized("aa"):
                removed += character if rules.is_bert else ""
            elif not character.isspace() and self._is_unknown(character):
                unknown += character
        return spaces, removed, words, unknown

    def _is_unknown(self, text: str) -> bool:
        """Returns whether a text is in one word, in which no token has a character of it."""
        known, start, text = self._rules.known, self._normalized("a"), self._normalized(f"a{text}a")
        return (
            known is not None
            and text.startswith(start)
            and known.isdisjoint(text[len(start) : -1])
            and len(self._tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1
        )

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        if self._growth.size(text) > growth.MOST:
            raise _CannotCutError(text)
        return text if normalizer is None else normalizer.normalize_str(text)

    def _pieces(self, text: str) -> list[str]:
        """Returns the words of a text."""
        return [piece for piece, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(self._normalized(text))]

    @functools.cached_property
    def _rules(self) -> _Rules:
        settings = json.loads(self._tokenizer.to_str())
        normalizers, splitters = growth.steps_of(settings["normalizer"]), growth.steps_of(settings["pre_tokenizer"])
        tokens = settings["added_tokens"]
        kinds = {step["type"] for step in splitters}
        replaced = _replaced(normalizers)
        if (
            not all(step["type"] in _NORMALIZERS or _joins_spaces(step, kinds) for step in normalizers[len(replaced) :])
            or not splitters
            or not kinds <= _PRE_TOKENIZERS
            or any(step.get("split") is False for step in splitters)
            or any(token["single_word"] for token in tokens)
        ):
            return _NOTHING
        added, stripping = (
            {form for token in some for form in (token["content"], self._normalized(token["content"])) if form}
            for some in (tokens, [token for token in tokens if token["lstrip"] or token["rstrip"]])
        )
        model = settings["model"]
        # A normalizer that composes characters could join what BERT's pre-tokenizer isolates.
        is_bert = kinds == {"BertPreTokenizer"} and {step["type"] for step in normalizers} <= {
            "BertNormalizer",
            "Lowercase",
        }
        limit = {"WordPiece": model.get("max_input_chars_per_word")}.get(model["type"]) if is_bert else None
        if is_bert and model["type"] == "WordLevel":
            limit = max(map(len, model["vocab"]), default=0)
        known = None
        if model["type"] == "Unigram" and not model["byte_fallback"]:
            known = {character for token, _ in model["vocab"] for character in token}
        prefixed = self._left and any(step.get("add_prefix_space") for step in splitters)
        cuts_words = (kinds == {"ByteLevel"} and len(splitters) == 1 and not normalizers and not prefixed) or (
            not self._left and kinds <= {"WhitespaceSplit", "Metaspace"}
        )
        return _Rules(True, is_bert, _longest(model) if cuts_words else 0, limit, known, added | {*replaced}, stripping)


def _restored(tokenizer: "Tokenizer", encode_special_tokens: bool, is_pair: bool) -> LongTexts:
    """Makes `LongTexts` from its pickle. The JSON of a tokenizer lacks `encode_special_tokens`."""
    tokenizer.encode_special_tokens = encode_special_tokens
    return LongTexts(tokenizer, is_pair=is_pair)


def encodings(
    long_texts: LongTexts, padding: Mapping[str, Any], prompt: str, texts: Sequence[Any]
) -> "Iterator[Encoding]":
    """Yields the encodings of texts, or of pairs, after a prompt. `padding`: the arguments of `Encoding.pad`, or {}."""
    if prompt:
        texts = [prompt + x if isinstance(x, str) else (prompt + x[0], x[1]) for x in texts]
    for encoding in long_texts.encodings(texts):
        if padding:
            encoding.pad(**padding)
        yield encoding


def arrays(texts: "Iterable[Encoding]", *, with_types: bool) -> "tuple[array[int], array[int], array[int] | None]":
    """Concatenates encodings. Returns the first token of each text and the number of tokens, the ids and type ids."""
    begins, ids, type_ids = array("q", [0]), array("i"), array("i")
    for text in texts:
        ids.fromlist(text.ids)
        begins.append(len(ids))
        if with_types:
            type_ids.fromlist(text.type_ids)
    return begins, ids, type_ids if with_types else None


def tokenised(
    long_texts: LongTexts, padding: Mapping[str, Any], with_types: bool, prompt: str, texts: Sequence[Any]
) -> "tuple[array[int], array[int], array[int] | None]":
    """Returns the `arrays` of texts, or of pairs. It runs in another process, which needs neither JAX nor NumPy."""
    if padding or with_types or (words := long_texts.words) is None:
        return arrays(encodings(long_texts, padding, prompt, texts), with_types=with_types)
    rows = [words.ids(prompt + text) for text in texts]
    others = encodings(long_texts, padding, prompt, [x for x, row in zip(texts, rows, strict=True) if row is None])
    begins, ids = array("q", [0]), array("i")
    for row in rows:
        ids.fromlist(next(others).ids if row is None else row)
        begins.append(len(ids))
    return begins, ids, None


class _CannotCutError(ValueError):
    """Error about a text, or a pair, that is too long to be tokenised whole and cannot be cut."""

    def __init__(self, *texts: str) -> None:
        count = sum(map(len, texts))
        super().__init__(
            f"has {count} characters in which no place to cut is certain; at most {_MOST} can be tokenised, and fewer"
            " of those that the tokenizer replaces by several. Split or shorten the text: only as many tokens as"
            " max_seq_length count"
        )


def _is_space(character: str) -> bool:
    """Returns whether a character is white space also to added tokens, and in no grapheme with the one before it."""
    return unicodedata.category(character)[0] == "Z" or character in "\t\n\r"


def _shorten_runs(text: str, characters: str, least: int, shorten: Callable[[re.Match[str]], str]) -> str:
    """Applies a function to each run of at least `least` of some characters."""
    return re.sub(f"[{re.escape(characters)}]{{{least},}}", shorten, text) if characters else text


def _longest(model: dict[str, Any]) -> int:
    """Returns the length of the longest token, or 0 if tokens of a word depend on more than merges or scores."""
    if model["type"] == "Unigram":
        return max(len(token) for token, _ in model["vocab"])
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return max(map(len, model["vocab"])) if model["type"] == "BPE" and not any(map(model.get, names)) else 0


def _joins_spaces(normalizer: dict[str, Any], pre_tokenizers: set[str]) -> bool:
    """Returns whether a normalizer joins white space, as the tokenizers that come from SentencePiece do."""
    contents = [" ", "▁"] if "Metaspace" in pre_tokenizers else [" "]
    return (
        normalizer["type"] == "Replace"
        and normalizer["pattern"].get("Regex") in (" {2,}", r"\s{2,}|[\n\r\t]")
        and normalizer["content"] in contents
    )


def _replaced(normalizers: list[dict[str, Any]]) -> list[str]:
    """Returns the texts that the first normalizers replace, as far as one is replaced wherever it is in a text."""
    found: list[str] = []
    inserted = ""
    for step in normalizers:
        pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
        if not pattern or not set(inserted).isdisjoint(pattern):
            break
        found.append(pattern)
        if not step["content"]:  # the characters around it may be the next pattern
            break
        inserted += step["content"]
    return found
