"""The random keys of dropout: one for each call of a model, and from that one for each place where there is dropout."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax import Array

from jaxft.ops import checks

# The places are numbered: two of a head, then the embeddings, then three in each layer.
_OF_HEAD = 2
_OF_LAYER = 3


def call_key(where: str, rngs: nnx.Rngs | Array | None, **rates: float) -> Array | None:
    """The key of a call with dropout at these rates: `rngs`, or the next one of its stream; None if all of them are 0.

    Raises:
      TypeError: `rngs` is neither an `nnx.Rngs` nor one JAX random key.
      ValueError: it is None, has no stream for dropout, or cannot count here; or a rate is 1, which a checkpoint may
        have.
    """
    if not any(rates.values()):
        return None
    if all_of_it := [name for name, rate in rates.items() if rate >= 1]:
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
    """`[2]`: for a head."""
    return _fold_in(key, 0, _OF_HEAD)


def encoder_keys(key: Array, layers: int) -> tuple[Array, Array]:
    """One for the embeddings, and `[layers, 3]`; made all at once, which is one kernel on a GPU."""
    keys = _fold_in(key, _OF_HEAD, 1 + _OF_LAYER * layers)
    return keys[0], keys[1:].reshape(layers, _OF_LAYER, *keys.shape[1:])


def _fold_in(key: Array, first: int, count: int) -> Array:
    numbers = jnp.arange(first, first + count, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


def options(rate: float, key: Array | None) -> dict[str, Any]:
    """An operation's arguments for dropout; without a key there is none."""
    return {} if key is None else {"dropout_rate": rate, "dropout_rng": key}
