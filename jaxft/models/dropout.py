"""Random keys for dropout: one key per call of a model, from which each place with dropout derives its own key."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax import Array

from jaxft.ops import checks

# The places with dropout are numbered: first two in a head, then one in the embeddings, then three in each layer.
_OF_HEAD = 2
_OF_LAYER = 3


def call_key(where: str, rngs: nnx.Rngs | Array | None, **rates: float) -> Array | None:
    """Returns the key of a call: `rngs`, or the next key of its dropout stream. None if all rates are 0."""
    if not any(rates.values()):
        return None
    if all_of_it := [name for name, rate in rates.items() if rate >= 1]:  # valid in a config.json
        raise ValueError(f"{where}: for calls with dropout {' and '.join(all_of_it)} must be below 1, got 1")
    if rngs is None:
        found = ", ".join(f"{name} is {rate}" for name, rate in rates.items() if rate)
        raise ValueError(
            f"{where}: deterministic is False and {found}, so rngs must be an nnx.Rngs such as nnx.Rngs(dropout=0), or "
            "a JAX random key, got None; without dropout, call model.eval() or pass deterministic=True"
        )
    if isinstance(rngs, nnx.Rngs):
        if not hasattr(rngs, "dropout"):
            raise ValueError(f"{where}: rngs must have a stream named dropout or default, got {', '.join(rngs)}")
        try:
            return rngs.dropout()
        except TraceContextError as error:
            raise ValueError(
                f"{where}: rngs must not be an nnx.Rngs from outside of the function that JAX traces here, as for a "
                "gradient; draw a key outside, key = rngs.dropout(), and pass rngs=key"
            ) from error
    checks.check_key(where, "rngs", rngs, "an nnx.Rngs or one JAX random key")
    return rngs


def head_keys(key: Array) -> Array:
    """Returns `[2]`: two keys for a head."""
    return _fold_in(key, 0, _OF_HEAD)


def module_keys(key: Array, count: int) -> Array:
    """Returns `[count]`: the keys of the modules after an encoder, which take the place of a head."""
    return _fold_in(head_keys(key)[0], 0, count)


def encoder_keys(key: Array, layers: int) -> tuple[Array, Array]:
    """Returns the key of the embeddings and keys `[layers, 3]`, all derived in one operation: one kernel on a GPU."""
    keys = _fold_in(key, _OF_HEAD, 1 + _OF_LAYER * layers)
    return keys[0], keys[1:].reshape(layers, _OF_LAYER, *keys.shape[1:])


def _fold_in(key: Array, first: int, count: int) -> Array:
    numbers = jnp.arange(first, first + count, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


def options(rate: float, key: Array | None) -> dict[str, Any]:
    """Returns an operation's keyword arguments for dropout; none if `key` is None."""
    return {} if key is None else {"dropout_rate": rate, "dropout_rng": key}
