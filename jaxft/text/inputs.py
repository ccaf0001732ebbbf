"""The inputs of encoders: texts or token ids, one or many, at once or in chunks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.text import batching
from jaxft.text.batching import Tokens

Part = Sequence[str] | Sequence[tuple[str, str]] | Tokens
CHUNK_CHARACTERS = 1 << 26  # most characters of a chunk of several texts


class Inputs(NamedTuple):
    """Texts, or token ids, to be encoded."""

    parts: Iterable[Part]
    is_single: bool = False  # whether it is one text and not a sequence of texts
    are_chunks: bool = False  # whether there are any number of parts, each with its own results
    are_shapes: bool = False  # whether the programs of all shapes are compiled instead
    empty: Callable[[tuple[int, int], Any], np.ndarray] = np.empty  # makes the array for the results of a part


def read(where: str, name: str, given: Any) -> Inputs:
    """Converts an argument to inputs of one part. Checks that each text is valid Unicode.

    Raises a TypeError or a ValueError that names `where`, the argument's `name` and the index.
    """
    if isinstance(given, Inputs):
        return given
    if isinstance(given, str):
        return Inputs([batching.as_texts(where, name, given)], is_single=True)
    found = _ids_or_items(where, name, given, "a str or an iterable of str")
    return found if isinstance(found, Inputs) else Inputs([_part(where, name, found)])


def read_pairs(where: str, name: str, given: Any) -> Inputs:
    """Converts an argument to pairs of texts, or to the token ids of pairs, of one part. Errors are like `read`'s."""
    if isinstance(given, Inputs):
        return given
    found = _ids_or_items(where, name, given, "a pair of str or an iterable of such pairs")
    if isinstance(found, Inputs):
        return found
    is_single = len(found) == 2 and isinstance(found[0], str)
    pairs = [found] if is_single else found
    if pairs and len(pairs[0]) and _has_integers(pairs[0]):
        return Inputs([_rows(where, name, pairs)])
    for index, pair in enumerate(pairs):
        if not batching.is_sequence(pair) or len(pair) != 2:
            raise TypeError(f"{where}: {name} must be pairs of str, got {pair!r:.80} at index {index}")
    firsts = batching.as_texts(where, "first texts", [pair[0] for pair in pairs])
    seconds = batching.as_texts(where, "second texts", [pair[1] for pair in pairs])
    return Inputs([[*zip(firsts, seconds, strict=True)]], is_single=is_single)


def _ids_or_items(where: str, name: str, given: Any, expected: str) -> Inputs | list[Any]:
    """Returns the inputs if an argument holds token ids, of one text or in an array. Otherwise it returns the items."""
    if isinstance(given, np.ndarray) and given.ndim > 0 and given.dtype.kind in "iu":
        rows = np.atleast_2d(given)
        return Inputs([_rows(where, name, [*rows])], is_single=given.ndim == 1)
    if (of_arrow := _of_arrow(where, name, given)) is not None:
        return Inputs([of_arrow])
    items = batching.as_list(where, name, given, expected)
    if items and _is_integer(items[0]):
        return Inputs([_rows(where, name, [items])], is_single=True)
    return items


def chunks(where: str, name: str, given: Any, size: int) -> Iterator[Part]:
    """Yields parts of up to `size` texts, and of up to `CHUNK_CHARACTERS` characters if there are several texts."""
    return _chunks(where, name, batching.as_iterator(where, name, given, "an iterable of str or of token ids"), size)


def _chunks(where: str, name: str, items: Iterator[Any], size: int) -> Iterator[Part]:
    first, part, characters = 0, list[Any](), 0
    for item in items:
        if hasattr(item, "as_py"):  # an item of an Arrow array
            item = item.as_py()
        length = len(item) if isinstance(item, str) or batching.is_sequence(item) else 0
        if part and (len(part) == size or characters + length > CHUNK_CHARACTERS):
            yield _part(where, name, part, first)
            first, part, characters = first + len(part), [], 0
        part.append(item)
        characters += length
    if part:
        yield _part(where, name, part, first)


def _part(where: str, name: str, items: list[Any], first: int = 0) -> Part:
    """Converts items, of which the first has the position `first`, to texts or token ids."""
    if items and _has_integers(items[0]):
        return _rows(where, name, items, first)
    for index, text in enumerate(items, first):
        if not (isinstance(text, str) and text.isascii()):
            batching.as_text(where, f"{name}[{index}]", text)
    return items


def _rows(where: str, name: str, rows: list[Any], first: int = 0) -> Tokens:
    """Converts the token ids of texts."""
    arrays = []
    for index, row in enumerate(rows, first):
        array = np.asarray(row) if _has_integers(row) else None
        if array is None or array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
            raise TypeError(f"{where}: {name}[{index}] must be a sequence of token ids, got {row!r:.80}")
        arrays.append(array.astype(np.int64))
    begins = np.append(0, np.cumsum([len(array) for array in arrays], dtype=np.int64))
    return _checked(where, name, Tokens(begins, np.concatenate([np.empty(0, np.int64), *arrays]), None), first)


def _of_arrow(where: str, name: str, given: Any) -> Tokens | None:
    """Converts an Arrow array of lists of integers; None for other values."""
    if not hasattr(given, "to_pylist"):
        return None
    whole = given.combine_chunks() if hasattr(given, "combine_chunks") else given
    kind: Any = getattr(whole, "type", None)
    if not hasattr(whole, "flatten") or not str(getattr(kind, "value_type", "")).startswith(("int", "uint")):
        return None
    if whole.null_count or whole.flatten().null_count:
        raise TypeError(f"{where}: {name} must have no nulls, got {whole.null_count or whole.flatten().null_count}")
    lengths = [kind.list_size] * len(whole) if hasattr(kind, "list_size") else whole.value_lengths().to_numpy()
    begins = np.append(0, np.cumsum(lengths, dtype=np.int64))
    return _checked(where, name, Tokens(begins, whole.flatten().to_numpy().astype(np.int64), None), 0)


def _checked(where: str, name: str, tokens: Tokens, first: int) -> Tokens:
    """Converts token ids to int32. Raises a ValueError for one that does not fit."""
    wrong = np.flatnonzero((tokens.ids < 0) | (tokens.ids >= 1 << 31))
    if len(wrong):
        index = first + int(np.searchsorted(tokens.begins, wrong[0], side="right")) - 1
        raise ValueError(f"{where}: {name}[{index}] must be token ids, got {tokens.ids[wrong[0]]}")
    return Tokens(tokens.begins, tokens.ids.astype(np.int32), None)


def _has_integers(value: Any) -> bool:
    """Returns whether a value is a sequence without items or with an integer as its first item."""
    return batching.is_sequence(value) and (len(value) == 0 or _is_integer(value[0]))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
