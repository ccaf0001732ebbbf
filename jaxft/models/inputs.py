"""Checks of the arguments of models."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxft.ops import checks


def float_dtype(where: str, name: str, dtype: DTypeLike) -> np.dtype:
    """Returns `dtype` as a NumPy dtype. Raises a ValueError unless it is float32, float16 or bfloat16."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # NumPy reads None as float64
    except TypeError:
        found = None
    if found is None or found not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f"{where}: {name} must be float32, float16 or bfloat16, got {found or repr(dtype)}")
    return found


def check_initial(where: str, rngs: Any) -> None:
    """Checks that `rngs` is None or an `nnx.Rngs` that can create the initial parameters of a model."""
    if not isinstance(rngs, nnx.Rngs | None):
        raise TypeError(f"{where}: rngs must be an nnx.Rngs or None, got {type(rngs).__name__}")
    if rngs is not None and not hasattr(rngs, "params"):
        raise ValueError(f"{where}: rngs must have a stream named params or default, got {', '.join(rngs)}")


def check_packed(
    where: str, input_ids: Array, attention_mask: Any, cu_seqlens: Any, max_seqlen: Any
) -> tuple[Array, Any]:
    """Checks the arguments of a packed call. Returns `cu_seqlens` as int32, and `max_seqlen`."""
    if cu_seqlens is None:
        raise ValueError(f"{where}: max_seqlen goes with cu_seqlens, got only max_seqlen")
    max_seqlen = checks.as_size(where, "max_seqlen", max_seqlen)
    if attention_mask is not None:
        kind = type(attention_mask).__name__
        raise ValueError(f"{where}: attention_mask must be None with cu_seqlens, which leave padding out, got {kind}")
    if input_ids.ndim != 1:
        raise ValueError(f"{where}: input_ids must have a shape [tokens] with cu_seqlens, got {list(input_ids.shape)}")
    cu_seqlens = as_ids(where, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.size == 0:
        raise ValueError(f"{where}: cu_seqlens must have a shape [sequences + 1], got {list(cu_seqlens.shape)}")
    checks.check_cu_seqlens(where, cu_seqlens, input_ids.size, max_seqlen)
    return cu_seqlens, max_seqlen


def as_ids(where: str, name: str, value: Any, shape: tuple[int, ...] | None = None, *, or_bool: bool = False) -> Array:
    """Converts an array or nested list to an int32 array (booleans stay if `or_bool`), and checks its shape."""
    expected = f"{where}: {name} must be integers{' or booleans' * or_bool}"
    for number in jax.tree.leaves(value) if isinstance(value, list | tuple | int) else ():
        if isinstance(number, int) and abs(number) >= 2**63:  # NumPy would make floats or objects of all
            raise ValueError(f"{where}: {name} must fit int32, got {number}")
    try:
        if isinstance(value, list | tuple) and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
            value = jnp.asarray(jax.tree.map(functools.partial(as_ids, where, name, or_bool=or_bool), value))
        elif isinstance(value, list | tuple | int):  # JAX would not keep integers of 64 bits
            value = np.asarray(value)
        elif not hasattr(value, "dtype"):
            value = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{expected}, got {type(value).__name__}") from error
    if or_bool and value.dtype == jnp.bool:
        array = jnp.asarray(value)
    elif jnp.issubdtype(value.dtype, jnp.integer):
        array = checks.as_integers(where, name, value)
    else:
        raise TypeError(f"{expected}, got {value.dtype}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{where}: {name} must have the shape of input_ids, {list(shape)}, got {list(array.shape)}")
    return array
