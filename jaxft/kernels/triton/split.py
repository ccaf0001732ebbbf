"""The parts of a vector, each an array, by one kernel; XLA has one for each.

Bytes: each element once in and once out, for BERT-base 0.5 MB in 16 bits: less than it takes to start a kernel. With it
the layers of BERT-base of 1x128 tokens, whose 96 vectors are one argument, take 374 us for 504 where calls are queued,
and 512 for 629 to a call's result, of 8x128 tokens 578 for 604 and 920 for 1,043; on the device 300.3 for 299.4 and 537
for 533 (bfloat16, H100 with a slow host, 2026-11-25).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common

Array = jax.Array

_ELEMENTS = 1024  # of a part that a program copies
_PARTS = 8  # of which it does so, so that their reads are under way at once
_MOST = 256  # parts of a kernel, whose arguments are at most 4 KB


def unsupported(x: Array) -> str | None:
    """Why the kernel cannot split `x`, if it cannot."""
    return common.unsupported_dtype(x=x) or common.unsupported_size(x)


def _kernel(x_ref: Any, *y_refs: Any, begins: Sequence[int]) -> None:
    place = pl.program_id(0) * _ELEMENTS
    for first in range(0, len(y_refs), _PARTS):

        @pl.when(pl.program_id(1) == first // _PARTS)
        def _(first: int = first) -> None:
            copies = []
            for y_ref, begin in zip(y_refs[first : first + _PARTS], begins[first : first + _PARTS], strict=True):
                inside = common.positions(place, _ELEMENTS) < y_ref.shape[0]
                values = common.load(x_ref.at[common.span(begin + place, _ELEMENTS)], mask=inside, other=None)
                copies.append((y_ref, values, inside))
            for y_ref, values, inside in copies:
                common.store(y_ref.at[common.span(place, _ELEMENTS)], values, mask=inside)


def split(x: Array, sizes: Sequence[int], *, interpret: bool) -> list[Array]:
    """x [sum(sizes)] -> an array of each of the sizes, all above 0."""
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
