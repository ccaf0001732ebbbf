"""A kernel that splits a vector into separate arrays; XLA would launch one kernel for each.

The vectors of BERT-base have 0.5 MB in 16 bits, which takes less time to copy than a kernel takes to start.
See docs/performance-notes.md, "Bundled vectors".
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common

_ELEMENTS = 1024  # Elements that a program copies.
_PARTS = 16  # Parts of a group. A program skips a group if it copies to none of its parts.
_MOST = 256  # Parts of one kernel. The arguments of a kernel may take 4 KB.


def unsupported(x: Array, name: str = "x") -> str | None:
    """Returns the reason why the kernel cannot split the vector `x`, which messages call `name`, or None if it can."""
    return common.unsupported_dtype(**{name: x}) or common.unsupported_size(x, name)


def _kernel(x_ref: Any, *y_refs: Any, begins: Sequence[int]) -> None:
    start = begins[0] + pl.program_id(0) * _ELEMENTS
    places = common.positions(start, _ELEMENTS)
    values = common.load(x_ref.at[common.span(start, _ELEMENTS)], mask=places < x_ref.shape[0], other=None)
    parts = [*zip(y_refs, begins, strict=True)]
    for first in range(0, len(parts), _PARTS):
        group = parts[first : first + _PARTS]
        (_, lowest), (last_ref, last) = group[0], group[-1]

        @pl.when((start < last + last_ref.shape[0]) & (start + _ELEMENTS > lowest))
        def _(group: Any = group) -> None:
            for y_ref, begin in group:
                index = (places - begin).astype(jnp.uint32)  # Places before the part become numbers beyond its end.
                common.store(y_ref.at[index], values, mask=index < y_ref.shape[0])


def split(x: Array, sizes: Sequence[int], *, interpret: bool) -> list[Array]:
    """Splits x `[sum(sizes)]` into arrays of the given sizes, all above 0."""
    parts, begins = [], list(itertools.accumulate(sizes[:-1], initial=0))
    for first in range(0, len(sizes), _MOST):
        some = sizes[first : first + _MOST]
        parts += common.launch(
            functools.partial(_kernel, begins=begins[first : first + _MOST]),
            (pl.cdiv(sum(some), _ELEMENTS),),
            [x],
            [jax.ShapeDtypeStruct((size,), x.dtype) for size in some],
            name="split",
            num_warps=4,
            interpret=interpret,
        )
    return parts
