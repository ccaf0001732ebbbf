"""A matrix that is stored in a longer array, beside other matrices, so that a call has fewer arguments."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike


@functools.partial(jax.tree_util.register_dataclass, data_fields=("joined",), meta_fields=("first", "shape"))
@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A matrix that lies in a longer array, one row after the other. Dense layers take it for a kernel.

    Passing an array to a compiled function costs the host about 1 us. Matrices that share one array cost that once. The
    Triton kernels of dense layers read a view in place. Everything else reads `array()`, which is a slice. XLA copies
    the slice, except for its own matmuls and for Mosaic GPU kernels (since JAX 0.11).

    Attributes:
      joined: the longer array `[N]`.
      first: the first row of the matrix, in rows of the matrix.
      shape: `(K, F)`. N is a multiple of F.
    """

    joined: Any
    first: int
    shape: tuple[int, int]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.joined.dtype

    def stack(self) -> Array:
        """Returns the whole array as a matrix of F columns."""
        return self.joined.reshape(-1, self.shape[1])

    def array(self) -> Array:
        """Returns the matrix as an array."""
        return self.stack()[self.first : self.first + self.shape[0]]

    def astype(self, dtype: DTypeLike) -> Any:
        """Returns the view itself if it has this dtype, and otherwise an array."""
        return self if self.dtype == dtype else self.array().astype(dtype)


def split(kernel: Any) -> tuple[Any, MatrixView | None]:
    """Returns the array of a kernel, and the view of it if it is one."""
    return (kernel.array(), kernel) if isinstance(kernel, MatrixView) else (kernel, None)


def join(matrices: Sequence[np.ndarray]) -> list[MatrixView]:
    """Copies matrices of the same dtype into one array on the host, and returns their views."""
    firsts, end = [], 0
    for rows, columns in (x.shape for x in matrices):
        firsts.append(-(-end // columns))
        end = (firsts[-1] + rows) * columns
    every = math.lcm(*(x.shape[1] for x in matrices))
    joined = np.zeros(-(-end // every) * every, matrices[0].dtype)
    views = [MatrixView(joined, first, x.shape) for first, x in zip(firsts, matrices, strict=True)]
    for view, x in zip(views, matrices, strict=True):
        view.array()[...] = x
    return views
