"""A kernel that splits a vector into separate arrays; XLA would launch one kernel for each.

The vectors of BERT-base have 0.5 MB in 16 bits, which takes less time to copy than a kernel takes to start.
See docs/performance-notes.md, "Bundled vectors".
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common

_ELEMENTS = 1024  # Elements that a program copies of each of its parts.
_PARTS = 8  # Parts that a program copies. It starts the reads of all of them before it writes any.
_MOST = 256  # Parts of one kernel. The arguments of a kernel may take 4 KB.


def unsupported(x: Array, name: str = "x") -> str | None:
    """Returns the reason why the kernel cannot split the vector `x`, which messages call `name`, or None if it can."""
    return common.unsupported_dtype(**{name: x}) or common.unsupported_size(x, name)


def _kernel(x_ref: Any, *y_refs: Any, begins: Sequence[int]) -> None:
    place = pl.program_id(0) * _ELEMENTS
    for first in range(0, len(y_refs), _PARTS):

        @pl.when(pl.program_id(1) == first // _PARTS)
        def _(first: int = first) -> None:
            copies, places = [], common.positions(place, _ELEMENTS)
            for y_ref, begin in zip(y_refs[first : first + _PARTS], begins[first : first + _PARTS], strict=True):
                inside = places < y_ref.shape[0]
                values = common.load(x_ref.at[common.span(begin + place, _ELEMENTS)], mask=inside, other=None)
                copies.append((y_ref, values, inside))
            for y_ref, values, inside in copies:
                common.store(y_ref.at[common.span(place, _ELEMENTS)], values, mask=inside)


def split(x: Array, sizes: Sequence[int], *, interpret: bool) -> list[Array]:
    """Splits x `[sum(sizes)]` into arrays of the given sizes, all above 0."""
    parts, begins = [], list(itertools.accumulate(sizes[:-1], initial=0))
    for first in range(0, len(sizes), _MOST):
        some = sizes[first : first + _MOST]
        parts += common.launch(
            functools.partial(_kernel, begins=begins[first : first + _MOST]),
            (pl.cdiv(max(some), _ELEMENTS), pl.cdiv(len(some), _PARTS)),
            [x],
            [jax.ShapeDtypeStruct((size,), x.dtype) for size in some],
            name="split",
            num_warps=4,
            interpret=interpret,
        )
    return parts
