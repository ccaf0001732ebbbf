"""Runs kernels outside of Pallas, whose interpreter forgives accesses beyond an array's end, and checks them."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxft.kernels.triton import common


class Checked:
    """Array that a kernel gets in place of a ref. It records what the kernel writes."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.at = array, array.shape, array.dtype, self
        self.written, self.stores = np.zeros(array.shape, bool), []

    def __getitem__(self, where):
        return self, where if isinstance(where, tuple) else (where,)


def _places(access, mask):
    """Returns the ref, the indices that the mask lets through, the mask (one axis per index), and the tile's shape."""
    ref, where = access
    if any(np.ndim(w) for w in where if not isinstance(w, pl.Slice)):  # a gather: one array of indices per axis
        lines = np.broadcast_arrays(*map(np.asarray, where))
        tile = full = lines[0].shape
    else:
        lines = [int(w.start) + np.arange(w.size) if isinstance(w, pl.Slice) else np.array([int(w)]) for w in where]
        full, tile = tuple(map(len, lines)), tuple(w.size for w in where if isinstance(w, pl.Slice))
        lines = np.ix_(*lines)
    mask = np.ones(full, bool) if mask is None else np.asarray(mask).reshape(full)
    index = tuple(np.broadcast_to(line, full)[mask] for line in lines)
    for i, n in zip(index, ref.shape, strict=True):
        assert i.min(initial=0) >= 0 and i.max(initial=0) < n, "an access outside of the array"
    return ref, index, mask, tile


def _load(access, mask=None, other=0):
    ref, index, mask, shape = _places(access, mask)
    assert not ref.written[index].any(), "an element is read after it was overwritten"
    value = np.full(mask.shape, other, ref.dtype)
    value[mask] = ref.array[index]
    return jnp.asarray(value.reshape(shape))


def _store(access, value, mask=None):
    ref, index, mask, _ = _places(access, mask)
    assert not ref.written[index].any(), "an element is written twice"
    ref.written[index] = True
    ref.stores.append(index)
    ref.array[index] = np.asarray(value).reshape(mask.shape)[mask]


_unfinished = []  # arrays that a kernel has written in part; a later kernel must write the rest


def _refs(operands, outputs):
    inputs = [None if x is None else Checked(np.array(x)) for x in operands]
    return inputs, [Checked(np.zeros(o.shape, o.dtype)) for o in outputs]


def _run(kernel, grid, program, refs):
    with mock.patch.multiple(pl, program_id=lambda axis: jnp.int32(program[axis]), num_programs=grid.__getitem__):
        kernel(*refs)


def _launch(kernel, grid, operands, outputs, *, aliases=None, **_):
    refs, results = _refs(operands, outputs)
    for operand, output in (aliases or {}).items():
        results[output] = refs[operand]  # shared memory
        for i in reversed([i for i, (array, _) in enumerate(_unfinished) if array is operands[operand]]):
            results[output].written[...] = _unfinished.pop(i)[1]
    for program in np.ndindex(*grid):
        _run(kernel, grid, program, [*refs, *results])
    arrays = [jnp.asarray(result.array) for result in results]
    _unfinished.extend((a, r.written) for a, r in zip(arrays, results, strict=True) if not r.written.all())
    return arrays


@contextlib.contextmanager
def checked():
    """Kernels launched in here must read and write inside their arrays, and write each element once."""
    token = common.interpreting.set(True)
    try:
        with mock.patch.multiple(common, load=_load, store=_store, launch=_launch), jax.disable_jit():
            yield
        assert not _unfinished, "an element is not written"
    finally:
        _unfinished.clear()
        common.interpreting.reset(token)


def first_stores(run):
    """Returns the indices of each store to the first result by the first program of the kernel that `run` launches."""
    found = []

    def launch(kernel, grid, operands, outputs, **_):
        refs, results = _refs(operands, outputs)
        _run(kernel, grid, (0,) * len(grid), [*refs, *results])
        found.extend(results[0].stores)
        return [jnp.asarray(result.array) for result in results]

    with checked(), mock.patch.object(common, "launch", launch):
        run()
    return found
