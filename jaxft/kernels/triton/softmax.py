"""Kernels for masked softmax and log_softmax of x * scale + bias, forward and backward.

Bias and mask are never expanded. A row of x finds its row of the bias and of the mask by strides, which are 0 along the
axes that broadcast. The forward pass moves 2 * M * S elements and the backward pass 3 * M * S, plus bias and mask.

Rows that fit in `block_width` are read once and stay in registers. In the forward pass, long rows of 16-bit elements
stay there unconverted, which takes half the registers of the float32 values computed from them. Rows that do not fit
are read twice in chunks: first for their statistics (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018), then for the result. The second read comes from the L2 cache if the row fits there.

The backward pass recomputes the probabilities from x. Probabilities that are rounded to 16 bits would be too coarse for
a row with one probability near 1, since the gradient depends on the difference to 1. For log_softmax of rows in several
chunks, the forward pass saves two numbers per row, and the backward pass reads x once.

Source: FasterTransformer's `softmax_kernel`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common
from jaxft.tuning.table import RowConfig

# (size, stride) of each group of leading axes of x, the innermost group first. One step along a group moves by `stride`
# rows in the operand.
Axes = tuple[tuple[int, int], ...]


def unsupported(x: Array, bias: Array | None, mask: Array | None) -> str | None:
    """Returns the reason why the kernels cannot take these arrays, or None if they can."""
    reason = common.unsupported_dtype(x=x, bias=bias) or common.unsupported_array(mask=mask)
    if reason is None and mask is not None and mask.size > 2**31:
        return f"mask has {mask.size} elements, the kernel takes at most 2^31"  # Pallas uses signed 32-bit indices.
    return reason or common.unsupported_size(x)


# --- Where rows of a bias or mask lie ----------------------------------------------------------------------------


def _axes(shape: tuple[int, ...], operand: Array | None) -> Axes:
    """Returns how the rows of x, of shape `shape`, map to the rows of an operand that broadcasts to x."""
    axes: list[tuple[int, int]] = []
    if operand is None:
        return ()
    own_shape, step = (1,) * (len(shape) - operand.ndim) + operand.shape, 1
    for size, own in zip(shape[-2::-1], own_shape[-2::-1], strict=True):
        stride, step = step if own > 1 else 0, step * own
        if size == 1:
            continue
        if axes and stride == axes[-1][0] * axes[-1][1]:  # The axis continues the previous group.
            axes[-1] = (axes[-1][0] * size, axes[-1][1])
        else:
            axes.append((size, stride))
    return tuple(axes)


def _load_broadcast(ref, axes: Axes, tile: common.Tile):
    """Loads the part of a bias or mask [rows, S or 1] for this tile of x; each axis has the size of the tile or 1."""
    block_rows, wide = tile.shape[0], ref.shape[1] > 1
    # A tile starts at a multiple of `block_rows`. A group whose size is a multiple of it is made of whole tiles.
    one_row = block_rows == 1 or not axes or (axes[0][1] == 0 and (len(axes) == 1 or axes[0][0] % block_rows == 0))
    rows = tile.row if one_row else common.positions(tile.row, block_rows)
    index, inner = jnp.zeros_like(rows), 1
    for n, (size, stride) in enumerate(axes):
        if stride:
            along = lax.div(rows, jnp.int32(inner))
            index = index + (along if n == len(axes) - 1 else lax.rem(along, jnp.int32(size))) * stride
        inner *= size
    if one_row and not wide:
        return common.load(ref.at[index, jnp.int32(0)])[None, None]
    if one_row:
        return common.load(ref.at[index, tile.place[1]], mask=tile.in_width)[None, :]
    if not wide:
        return common.load(ref.at[index, jnp.int32(0)], mask=tile.in_rows)[:, None]
    where = tuple(jnp.broadcast_to(i, tile.shape) for i in (index[:, None], tile.columns[None, :]))
    return common.load(ref.at[where], mask=tile.inside)


# --- The mathematics ---------------------------------------------------------------------------------------------


def _select(allowed, x, otherwise):
    return x if allowed is None else jnp.where(allowed, x, otherwise)


def _shift_of(top):
    """Returns what to subtract from the logits: their maximum, or 0 if no element of the row was allowed so far."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _maximum(logits, before=None):
    """Returns the maximum of each row, and the factor for sums of exponentials of the chunks `before`, or None."""
    top = jnp.max(logits, axis=1)  # may drop a NaN, but the exponentials keep it
    if before is None:
        return top, None
    top = jnp.maximum(before, top)
    return top, common.exp(before - _shift_of(top))


def _two_sum(total, more):
    """Adds `more` to a compensated sum (number, lost), where `lost` corrects rounding errors: Knuth's two-sum."""
    number, lost = total
    new = number + more
    part = new - number
    return new, lost + ((number - (new - part)) + (more - part))


def _times(total, weight):
    return total[0] * weight, total[1] * weight


def _nonzero(total):
    """Replaces 0 by 1, for a division by the sum of a row without an allowed element."""
    return jnp.where(total == 0.0, 1.0, total)


def _gradient(e, allowed, dy, inverse, center, rest, *, log: bool):
    """Computes the gradient of the logits.

    The probabilities p are the exponentials `e` times `inverse`. For softmax, `rest` is the sum over the row of
    (dy - center) * p; for log_softmax it is the sum of dy. `center` is close to the sum of dy * p. It is subtracted
    first, because dy minus that sum would be mostly rounding error where one p is nearly 1.
    """
    p = e * inverse
    gradient = dy - p * rest if log else p * ((dy - center) - rest)
    return _select(allowed, gradient, 0.0)  # A NaN in the row reaches allowed elements only.


# --- The kernels -------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """A tile of x and its inputs, kept unconverted to take few registers. Absent inputs are None."""

    tile: common.Tile
    x: Any
    bias: Array | None
    mask: Array | None
    dy: Any

    def allowed(self) -> Array | None:
        """Returns which elements take part (None: all)."""
        # Masked elements are read all the same: a load under a mask that is not known in advance is not vectorised.
        allowed = self.tile.inside
        if self.mask is not None:
            keep = jnp.broadcast_to(self.mask, self.tile.shape)
            allowed = keep if allowed is None else allowed & keep
        return allowed

    def logits(self, scale: float) -> tuple[Array, Array | None]:
        """Returns the logits, -inf where they are not allowed, and which elements are allowed."""
        logits = self.x.astype(jnp.float32) * scale
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)
        allowed = self.allowed()
        return _select(allowed, logits, -jnp.inf), allowed

    def allowed_dy(self) -> Array:
        """Returns dy, 0 where it is not allowed."""
        return _select(self.allowed(), self.dy.astype(jnp.float32), 0.0)

    def again(self, num_warps: int) -> "_Chunk":
        """Returns an equal chunk from which the compiler recomputes values that would take too many registers."""
        if self.x.dtype.itemsize > 2 or math.prod(self.tile.shape) < 2048 * num_warps:
            return self
        return self._replace(x=common.opaque(self.x))


class _Row(NamedTuple):
    """The rows of a program, in chunks."""

    row: Array
    operands: tuple[Any, ...]  # The refs of x, bias, mask and dy, each of which may be None.
    axes: tuple[Axes, Axes]  # For bias and mask.
    config: RowConfig
    size: tuple[int, int]  # The shape of x.

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.size[1], self.config.block_width)

    def chunk(self, i) -> _Chunk:
        (x_ref, bias_ref, mask_ref, dy_ref), tile = self.operands, self.tile(i)
        bias = None if bias_ref is None else _load_broadcast(bias_ref, self.axes[0], tile)
        mask = None if mask_ref is None else _load_broadcast(mask_ref, self.axes[1], tile)
        x, dy = (None if ref is None else tile.load(ref) for ref in (x_ref, dy_ref))
        return _Chunk(tile, x, bias, mask, dy)

    def tile(self, i) -> common.Tile:
        shape = self.config.block_rows, self.config.block_width
        return common.tile(self.size, self.row, i * shape[1], shape)

    def visit(self, visit):
        """Calls `visit(chunk, found)` for each chunk; returns the last chunk and what `visit` found in all of them.

        Each chunk is read while the chunk before it is visited. The last chunk stays in registers.
        """
        chunk = self.chunk(0)
        if self.chunks == 1:
            return visit(chunk)

        def step(i, state):
            values, found = state
            return self.chunk(i + 1)[1:], visit(_Chunk(self.tile(i), *values), found)[1]

        ahead = self.chunk(1)[1:]
        ahead, found = lax.fori_loop(1, self.chunks - 1, step, (ahead, visit(chunk)[1]))
        return visit(_Chunk(self.tile(self.chunks - 1), *ahead), found)

    def write(self, last, write) -> None:
        """Calls `write` for each chunk from the last to the first: the last ones are most likely still in a cache."""
        if self.chunks == 1:
            return write(last)

        def step(i, values):
            i = self.chunks - 2 - i
            ahead = self.chunk(i - 1)[1:]
            write(_Chunk(self.tile(i), *values))
            return ahead

        ahead = self.chunk(self.chunks - 2)[1:]
        write(last)
        ahead = lax.fori_loop(0, self.chunks - 2, step, ahead)
        write(_Chunk(self.tile(0), *ahead))


def _fwd_kernel(
    x_ref, bias_ref, mask_ref, y_ref, saved_ref=None,
    *, log: bool, scale: float, bias_axes: Axes, mask_axes: Axes, config: RowConfig,
):  # fmt: skip
    first = pl.program_id(0) * config.block_rows
    row = _Row(first, (x_ref, bias_ref, mask_ref, None), (bias_axes, mask_axes), config, x_ref.shape)

    def visit(chunk, before=None):
        """Returns the chunk, and the maximum and the sum of exponentials so far."""
        top, weight = _maximum(chunk.logits(scale)[0], None if before is None else before[0])
        chunk = chunk.again(config.num_warps)
        total = jnp.sum(common.exp(chunk.logits(scale)[0] - _shift_of(top)[:, None]), axis=1)
        if before is None:
            return chunk, (top, (total, jnp.zeros_like(total)))
        return chunk, (top, _two_sum(_times(before[1], weight), total))

    def write(chunk, top, total):
        logits, allowed = chunk.logits(scale)
        shifted = logits - _shift_of(top)[:, None]
        if log:
            y = _select(allowed, shifted - jnp.log(_nonzero(total))[:, None], -jnp.inf)
        else:
            y = common.exp(shifted) * (1.0 / _nonzero(total))[:, None]
        chunk.tile.store(y_ref, y)

    last, (top, total) = row.visit(visit)
    total = total[0] + total[1]
    if saved_ref is not None:
        _store_numbers(saved_ref, last.tile, (_shift_of(top), 1.0 / _nonzero(total)))
    row.write(last.again(config.num_warps), lambda chunk: write(chunk, top, total))


def _store_numbers(ref, tile: common.Tile, numbers):
    """Stores numbers of each row of the tile into `ref`, [numbers, M]."""
    for n, values in enumerate(numbers):
        common.store(ref.at[jnp.int32(n), tile.place[0]], values, mask=tile.in_rows)


def _bwd_kernel(
    dy_ref, saved_ref, x_ref, bias_ref, mask_ref, dx_ref, *more_refs,
    log: bool, scale: float, bias_axes: Axes, mask_axes: Axes, config: RowConfig, save: str | None,
):  # fmt: skip
    """Computes the gradient of x, and as `save` asks the "gradients" of the logits or four "numbers" of each row."""
    first = pl.program_id(0) * config.block_rows
    row = _Row(first, (x_ref, bias_ref, mask_ref, dy_ref), (bias_axes, mask_axes), config, x_ref.shape)

    def add(chunk, before=None):
        """Returns the chunk, and the sum of dy so far."""
        total = jnp.sum(chunk.allowed_dy(), axis=1)
        return chunk, (total, jnp.zeros_like(total)) if before is None else _two_sum(before, total)

    def visit(chunk, before=None):
        """Returns the chunk, and the maximum, the sum of exponentials, `center` and `rest` so far.

        `center` and `rest` are as in `_gradient`, but `rest` of softmax is not yet divided by the sum of exponentials.
        For log_softmax, a row must be one chunk.
        """
        logits, dy = chunk.logits(scale)[0], chunk.allowed_dy()
        top, weight = _maximum(logits, None if before is None else before[0])
        e = common.exp(logits - _shift_of(top)[:, None])
        total = jnp.sum(e, axis=1)
        if log:
            center, rest = jnp.zeros_like(total), jnp.sum(dy, axis=1)
        else:
            center = jnp.sum(e * dy, axis=1) / _nonzero(total)
            rest = jnp.sum(e * (dy - center[:, None]), axis=1)
        if before is None:
            return chunk, (top, (total, jnp.zeros_like(total)), center, (rest, jnp.zeros_like(total)))
        old, old_center = _times(before[1], weight), before[2]
        # Keeps the center of the heavier part (the earlier chunks or this one), and moves the lighter part's sum to it.
        stays = old[0] >= total
        moved = jnp.where(stays, total, old[0]) * jnp.where(stays, center - old_center, old_center - center)
        rest = _two_sum(_times(before[3], weight), rest + moved)
        return chunk, (top, _two_sum(old, total), jnp.where(stays, old_center, center), rest)

    def write(chunk, found):
        logits, allowed = chunk.logits(scale)
        shift, *numbers = (s[:, None] for s in found)
        gradient = _gradient(common.exp(logits - shift), allowed, chunk.allowed_dy(), *numbers, log=log)
        chunk.tile.store(dx_ref, gradient * scale)
        if save == "gradients":
            chunk.tile.store(more_refs[0], gradient)

    if saved_ref is None:
        last, (top, total, center, rest) = row.visit(visit)
        inverse, rest = 1.0 / _nonzero(total[0] + total[1]), rest[0] + rest[1]
        found = _shift_of(top), inverse, center, rest if log else rest * inverse
    else:
        _, rest = row._replace(operands=(None, None, mask_ref, dy_ref)).visit(add)
        last = row.chunk(row.chunks - 1)
        numbers = (saved_ref.at[jnp.int32(n), last.tile.place[0]] for n in range(2))
        shift, inverse = (common.load(where, mask=last.tile.in_rows) for where in numbers)
        found = shift, inverse, jnp.zeros_like(shift), rest[0] + rest[1]
    if save == "numbers":
        _store_numbers(more_refs[0], last.tile, found)
    row.write(last, lambda chunk: write(chunk, found))


# --- Entry points ------------------------------------------------------------------------------------------------


def forward(
    x: Array,
    bias: Array | None,
    mask: Array | None,
    *,
    log: bool,
    scale: float | None,
    in_place: bool,
    config: RowConfig,
    interpret: bool,
    save: bool = False,
) -> list[Array]:
    """Computes softmax or log_softmax of x * scale + bias over the last axis of x `[..., S]`. Returns a list.

    Elements where the mask is False do not take part. With `save`, a float32 array `[2, M]` follows the result: the
    maximum and the inverse of the sum of exponentials of each row, which `backward` needs for log_softmax of rows in
    several chunks. With `in_place`, the result takes the memory of `x`.
    """
    name, aliases = "log_softmax_fwd" if log else "softmax_fwd", {0: 0} if in_place else {}
    outputs = [jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)]
    if save:
        outputs.append(jax.ShapeDtypeStruct((2, outputs[0].shape[0]), jnp.float32))
    y, *saved = _launch(
        _fwd_kernel, [], x, bias, mask, outputs, log, scale, config, interpret, name=name, aliases=aliases
    )
    return [y.reshape(x.shape), *saved]


def backward(
    dy: Array,
    x: Array,
    bias: Array | None,
    mask: Array | None,
    saved: Array | None = None,
    *,
    log: bool,
    scale: float | None,
    config: RowConfig,
    interpret: bool,
    dtypes: Sequence[Any] = (None, None),
) -> tuple[Array, Array | None]:
    """Computes the gradients of x and bias (None without a bias) from dy and x, each `[..., S]`.

    They have the given `dtypes`, or the dtypes of x and bias.

    `saved` is required for log_softmax of rows in several chunks. The kernel writes the gradient of a bias that is as
    large as x. If the bias broadcasts, its gradient is a float32 sum of the gradients of the logits. XLA recomputes
    these from x, dy and four numbers per row, which costs one more read of x and dy, and no memory. A bias that is
    constant along a row changes no result, so its gradient is 0.
    """
    assert saved is not None or not log or x.shape[-1] <= config.block_width
    name = "log_softmax_bwd" if log else "softmax_bwd"
    of_x: Any = dtypes[0] or x.dtype
    of_bias: Any = dtypes[1] or (bias is not None and bias.dtype)
    flat = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), of_x)
    outputs, save = [flat], None
    if bias is not None and bias.shape[-1:] not in ((), (1,)):
        if bias.size < x.size:
            save = "numbers"
            outputs.append(jax.ShapeDtypeStruct((4, flat.shape[0]), jnp.float32))
        elif of_bias != of_x or scale not in (None, 1.0):  # Otherwise the gradient is dx.
            save = "gradients"
            outputs.append(jax.ShapeDtypeStruct(flat.shape, of_bias))
    kernel = functools.partial(_bwd_kernel, save=save)
    dx, *more = _launch(kernel, [dy, saved], x, bias, mask, outputs, log, scale, config, interpret, name=name)
    dx = dx.reshape(x.shape)
    if bias is None:
        return dx, None
    if bias.shape[-1:] in ((), (1,)):
        return dx, jnp.zeros_like(bias, of_bias)
    if bias.size == x.size:
        return dx, (more[0] if more else dx).reshape(bias.shape)
    return dx, _bias_gradient(dy, x, bias, mask, more[0], log, scale).astype(of_bias)


def _bias_gradient(dy, x, bias, mask, statistics, log: bool, scale: float | None) -> Array:
    """Computes the float32 gradient of a bias that broadcasts, from the four numbers of each row that were saved."""
    logits = x.astype(jnp.float32) * (1.0 if scale is None else scale) + bias.astype(jnp.float32)
    shift, *numbers = statistics.reshape(4, *x.shape[:-1], 1)
    gradient = _gradient(jnp.exp(logits - shift), mask, dy.astype(jnp.float32), *numbers, log=log)
    own_shape = (1,) * (x.ndim - bias.ndim) + bias.shape
    axes = tuple(axis for axis, size in enumerate(own_shape) if size < x.shape[axis])
    return jnp.sum(gradient, axis=axes).reshape(bias.shape)


def _launch(kernel, before, x, bias, mask, outputs, log, scale, config: RowConfig, interpret, **options):
    body = functools.partial(
        kernel,
        log=log,
        scale=1.0 if scale is None else scale,
        bias_axes=_axes(x.shape, bias),
        mask_axes=_axes(x.shape, mask),
        config=config,
    )
    operands = [*before, x, bias, mask]
    return common.launch(
        body,
        (pl.cdiv(outputs[0].shape[0], config.block_rows),),
        [None if a is None else a.reshape(-1, a.shape[-1] if a.ndim else 1) for a in operands],
        outputs,
        num_warps=config.num_warps,
        interpret=interpret,
        **options,
    )
