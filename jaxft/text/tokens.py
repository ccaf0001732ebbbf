"""Tokens of several texts, without JAX, which processes that tokenise do not need."""

import dataclasses
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of several texts in a few arrays. Python lists of tokens would take longer than the device needs."""

    begins: np.ndarray  # int64 [texts + 1]: the first token of each text, then the number of tokens
    ids: np.ndarray  # int32 [begins[-1]]
    type_ids: np.ndarray | None  # as ids

    @classmethod
    def of(cls, texts: "Iterable[Encoding]", *, with_types: bool) -> "Tokens":
        """Concatenates encodings of the `tokenizers` library. It keeps none of them."""
        begins, ids, type_ids = [0], array("i"), array("i")
        for text in texts:
            ids.fromlist(text.ids)
            begins.append(len(ids))
            if with_types:
                type_ids.fromlist(text.type_ids)
        types = np.array(type_ids, np.int32) if with_types else None
        return cls(np.array(begins, np.int64), np.array(ids, np.int32), types)

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each text, int64 `[texts]`."""
        return np.diff(self.begins)

    def __getitem__(self, texts: slice) -> "Tokens":
        first, stop, _ = texts.indices(len(self))
        begins = self.begins[first : stop + 1]
        return self._each(begins - begins[0], lambda part: part[begins[0] : begins[-1]])

    def in_order(self, order: np.ndarray) -> "Tokens":
        """Returns the texts in another order: text `i` of the result is text `order[i]`."""
        lengths = self.lengths[order]
        begins = np.append(0, np.cumsum(lengths))
        where = np.arange(begins[-1]) + np.repeat(self.begins[order] - begins[:-1], lengths)
        return self._each(begins, lambda part: part[where])

    def __add__(self, other: "Tokens") -> "Tokens":
        begins = np.append(self.begins, self.begins[-1] + other.begins[1:])
        types = None
        if self.type_ids is not None:
            assert other.type_ids is not None
            types = np.append(self.type_ids, other.type_ids)
        return Tokens(begins, np.append(self.ids, other.ids), types)

    def _each(self, begins: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> "Tokens":
        return Tokens(begins, change(self.ids), None if self.type_ids is None else change(self.type_ids))


class TextError(ValueError):
    """Error about one of several texts (or pairs): it cannot be tokenised, or its result is not finite."""

    def __init__(self, index: int, text: Any, reason: str) -> None:
        super().__init__(f"texts[{index}] ({text!r:.80}) {reason}")
        self.index, self.text, self.reason = index, text, reason
