"""A matrix that is stored in a longer array, beside other matrices, so that a call has fewer arguments."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("joined",), meta_fields=("first", "shape")
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A matrix that lies in a longer array, one row after the other. It takes the place of an array in a module.

    Passing an array to a compiled function costs the host about 1 us. Matrices that share one array cost that once. The
    Triton kernels of dense layers read a view in place. Everything else reads `array()`, which is a slice; XLA copies
    it, except for its own matmuls and those of Mosaic GPU (since JAX 0.11).

    Attributes:
      joined: the longer array `[N]`.
      first: the first row of the matrix, in rows of the matrix.
      shape: `(K, F)`. N is a multiple of F.
    """

    joined: Array
    first: int
    shape: tuple[int, int]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.joined.dtype

    def array(self) -> Array:
        """Returns the matrix as an array."""
        return self.joined.reshape(-1, self.shape[1])[self.first : self.first + self.shape[0]]

    def astype(self, dtype: DTypeLike) -> Any:
        """Returns the view itself if it has this dtype, or else an array."""
        return self if self.dtype == dtype else self.array().astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else self.array()[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array(), dtype)


def split(kernel: Any) -> tuple[Any, MatrixView | None]:
    """Returns the array of a kernel, and the view of it if it is one."""
    return (kernel.array(), kernel) if isinstance(kernel, MatrixView) else (kernel, None)


def join(matrices: Sequence[Any]) -> list[MatrixView]:
    """Copies matrices of the same dtype into one array and returns their views. Shapes give a shape and its views."""
    firsts, end = [], 0
    for rows, columns in (x.shape for x in matrices):
        firsts.append(-(-end // columns))
        end = (firsts[-1] + rows) * columns
    every = math.lcm(*(x.shape[1] for x in matrices))
    starts = [first * x.shape[1] for first, x in zip(firsts, matrices, strict=True)]
    run: Any = functools.partial(_joined, tuple(starts), -(-end // every) * every)
    of_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in matrices)
    joined = jax.eval_shape(run, *matrices) if of_shapes else run(*matrices)
    return [MatrixView(joined, first, x.shape) for first, x in zip(firsts, matrices, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _joined(starts: tuple[int, ...], length: int, *matrices: Array) -> Array:
    parts, ends = [], [*starts[1:], length]
    for start, end, x in zip(starts, ends, matrices, strict=True):
        parts += [x.reshape(-1), jnp.zeros(end - start - x.size, x.dtype)]
    return jnp.concatenate(parts)
