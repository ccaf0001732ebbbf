"""The arguments that the Mosaic GPU kernels take.

This module imports no Mosaic, because that import takes half a second: an op asks it on every device, and imports a
kernel only where the kernel runs.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PIECE = 64  # rows and columns of a tile that are finished and stored at a time
TILE = 64  # attention's gradient: the keys of a warp group, the queries of a step, and the head size
KEYS = 2 * TILE  # attention's gradient: the keys of a pass
# The lengths that attention's gradient takes. Below, the Triton kernel with five matmuls is as fast. Above, the
# gradient of the queries does not fit in shared memory.
LENGTHS = (256, 512)


@functools.cache
def missing() -> str | None:
    """Returns why this JAX cannot run Mosaic GPU kernels, or None if it can."""
    for name in ("jax.experimental.pallas.mosaic_gpu", "jax.experimental.mosaic.gpu"):
        try:
            found = importlib.util.find_spec(name)
        except ImportError:
            found = None
        if found is None:
            return f"this JAX has no {name}"
    return None


def register_calls() -> None:
    """Registers Mosaic's custom calls with XLA, which a process needs before it loads a program that has them."""
    from jax.experimental.mosaic import gpu  # noqa: F401  # it also tells XLA where the libraries of the calls are


def line(dtype: Any, *widths: int, most: int = PIECE) -> int:
    """Returns how many elements a line in shared memory has, such that rows of these widths end where a line ends.

    A line has 128, 64 or 32 bytes and at most `most` elements; 0 means that no length fits. Mosaic copies an array in
    blocks of 8 rows x one line. Blocks beyond the edge of the array are read as zeros and are not stored, which does
    not work for elements beyond the edge inside a block. A row shorter than a line must be a multiple of 8.
    """
    lines = (min(most, nbytes // jnp.dtype(dtype).itemsize) for nbytes in (128, 64, 32))
    return next((n for n in lines if all(w % 8 == 0 and (w < n or w % n == 0) for w in widths)), 0)


def dense_unsupported(
    x: Array | jax.ShapeDtypeStruct, kernel: Array | jax.ShapeDtypeStruct, bias: Array | None,
    residual: Array | None = None, precision: str = "tf32", gate: str | None = None, head_size: int | None = None,
) -> str | None:  # fmt: skip
    """Returns why the kernel cannot take x [M, K], kernel [K, F], bias [F] and residual [M, F], or None.

    With a `gate`, kernel is [K, 2 * F] and bias [2 * F]. With a `head_size`, the kernel rotates queries and keys.
    """
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"x is {x.dtype}, the kernel takes float32, float16 and bfloat16"
    if x.dtype == jnp.float32 and precision != "tf32":
        return "a matmul in full float32 was asked for, the kernel computes TF32"
    if bias is not None and bias.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"bias is {bias.dtype}, the kernel takes float32, float16 and bfloat16"
    if residual is not None and x.dtype == jnp.float32:
        return "it adds no residual in float32"  # there is no shared memory left for the residual
    if gate is not None and x.dtype == jnp.float32:
        return "it has no gate in float32"
    if head_size is not None and x.dtype == jnp.float32:
        return "it has no rotation in float32"
    if head_size not in (None, PIECE):
        return f"the head size is {head_size}, the kernel rotates heads of {PIECE}"
    (rows, depth), width = x.shape, kernel.shape[1]
    if reason := _sizes_unsupported(rows, depth, width):
        return reason
    if gate is not None and width % (2 * PIECE):
        # A tile that goes beyond the first half would store its sums in the second one.
        return f"F is {width // 2}: with a gate it must be a multiple of {PIECE}"
    if not line(x.dtype, depth, width):
        least = 32 // x.dtype.itemsize
        return f"K is {depth} and F is {width}: above {4 * least} they must be multiples of {least}, below of 8"
    return missing()


def _sizes_unsupported(rows: int, depth: int, width: int) -> str | None:
    """Returns why the kernels cannot take a matmul of these sizes, or None."""
    if 0 in (rows, depth, width):
        return "an array is empty"
    if max(rows, depth, width) > 2**30:
        return f"a matmul of {rows}x{depth} and {depth}x{width} has a size above 2^30"
    if rows < PIECE or width <= PIECE:
        # JAX 0.11.2 stores what lies beyond the edge of an array of one line of tiles at the array's beginning.
        return f"M is {rows} and F is {width}: they must be at least {PIECE} and above {PIECE}"
    return None


def float8_dense_unsupported(
    x: Array | jax.ShapeDtypeStruct, kernel: Array | jax.ShapeDtypeStruct, bias: Array | None,
    residual: Array | None, kernel_scale: Array | None,
) -> str | None:  # fmt: skip
    """Returns why the kernel cannot take float8_e4m3fn x [M, K] and kernel [K, F] with these other arrays, or None."""
    vectors = {"bias": bias, "kernel_scale": kernel_scale}
    for name, vector in vectors.items():
        if vector is not None and vector.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
            return f"{name} is {vector.dtype}, the kernel takes float32, float16 and bfloat16"
    if residual is not None and residual.dtype.itemsize != 2:
        return f"residual is {residual.dtype}, the kernel takes float16 and bfloat16 beside float8"
    (rows, depth), width = x.shape, kernel.shape[1]
    if reason := _sizes_unsupported(rows, depth, width):
        return reason
    if depth % 128 or width % 64:
        return f"K is {depth} and F is {width}: in float8 they must be multiples of 128 and 64"
    return missing()


def derivative_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a kernel keeps an activation's derivatives beside results of `dtype`.

    Beside bfloat16, derivatives take 8 bits, with an error of at most 1/400. The derivatives 0 and 1 are exact, and
    derivatives below 1/400 become 0. A bfloat16 derivative would have an error of 1/256 above 1 and of 1/512 from 1/2
    on. See docs/performance-notes.md, "Accuracy of activation derivatives in 8 bits".

    A derivative of a sum that is NaN is a number. The result beside it is NaN or infinite, and so is what follows it.
    """
    return jnp.dtype(jnp.uint8 if dtype == jnp.bfloat16 else dtype)


def attention_backward_unsupported(
    qkv: Array, mask: Array | None, *, scale: float, return_residual: bool, limited: bool, **others: Array | None
) -> str | None:
    """Returns why the kernel of attention's gradient cannot run, or None. `limited`: by a causal mask or a window."""
    for name, x in others.items():
        if x is not None:
            return f"it takes no {name}"
    if limited:
        return "it has no causal mask and no window"
    if return_residual:
        return "it takes no gradient of the log-sum-exp"
    if scale <= 0.0:
        return "it takes positive scales only"
    batch, length, _, _, size = qkv.shape
    if qkv.dtype not in (jnp.float16, jnp.bfloat16):
        return f"qkv is {qkv.dtype}, the kernel takes float16 and bfloat16"
    if size != TILE:
        return f"the head size is {size}, the kernel takes {TILE}"
    if length % KEYS or not LENGTHS[0] <= length <= LENGTHS[1]:
        return f"there are {length} positions, the kernel takes multiples of {KEYS} from {LENGTHS[0]} to {LENGTHS[1]}"
    if mask is not None and mask.shape not in ((batch, 1, 1, length), (1, 1, 1, length)):
        return f"the mask has shape {mask.shape}, the kernel takes one of keys, {(batch, 1, 1, length)}"
    if qkv.size >= 2**31:
        return f"qkv has {qkv.size} elements, the kernel takes fewer than 2^31"
    return missing()
