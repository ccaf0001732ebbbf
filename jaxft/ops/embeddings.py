"""The op `embeddings_layer_norm`: sum of word, position and token type embeddings, LayerNorm and dropout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxft import dispatch, reference
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import embeddings as triton
from jaxft.kernels.triton import layer_norm as triton_layer_norm
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.sharding import Rule
from jaxft.tuning import rows as tuning


@sharding.over_explicit_axes(
    "input_ids: ..., word: V D, position: P D, token_type: C D, gamma: D, beta: D, position_ids: ..., "
    "token_type_ids: ... -> ... D"
)
def embeddings_layer_norm(
    input_ids: Array,
    word: Array,
    position: Array,
    token_type: Array | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    position_ids: Array | None = None,
    token_type_ids: Array | None = None,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    dtype: Any = None,
    implementation: str | None = None,
) -> Array:
    """Looks up word, position and token type embeddings, adds them and normalises the sum, in one kernel.

    Equivalent to::

        total = word[input_ids] + position[position_ids] + token_type[token_type_ids]
        dropout(layer_norm(total, gamma, beta, epsilon=epsilon))

    An id outside of its table (also a negative id) gives NaN in the row of its token, except in elements that dropout
    drops. Such an id has no gradient in that table.

    Args:
      input_ids: `[..., T]`, integers.
      word: `[V, D]`, float32, float16 or bfloat16. The sum and the statistics are float32.
      position: `[P, D]` of any float dtype.
      token_type: `[C, D]` of any float dtype, or None for no such embedding.
      gamma: `[D]` of any float dtype, or None for 1.
      beta: `[D]` of any float dtype, or None for 0.
      position_ids: integers of the shape of `input_ids`, or None for 0 to T - 1. A symbolic T may exceed P; tokens
        beyond P then give NaN.
      token_type_ids: integers of the shape of `input_ids`, or None for 0.
      epsilon: added to the variance. (BERT's is 1e-12.)
      dropout_rate: probability of dropping an element, in [0, 1).
      dropout_rng: a JAX random key, required if the rate is not 0 (see `jaxft.ops`).
      dtype: dtype of the result. None is the dtype of `word`.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      `[..., T, D]` of `dtype`.

    Raises:
      ValueError: T is more than P and there are no position_ids, or there are token_type_ids but no token_type. See
        `jaxft.ops` for the other errors.

    Gradients: for word, position, token_type, gamma and beta. The gradients of the tables are dense arrays.

    Determinism: `"triton"` is deterministic. It sorts the tokens by id and adds up the gradients of equal ids in a
    fixed order. On a GPU, `"xla"` adds them by atomics in any order, unless `XLA_FLAGS` has
    `--xla_gpu_deterministic_ops=true`. In float32 with up to 4,096 tokens, `"xla"` is 1.4 to 1.6 times as fast, forward
    pass included (H200, 2026-11-22).

    Source: BERT (Devlin et al., 2019), section 3: the sum of token, segment and position embeddings.
    """
    op = "embeddings_layer_norm"
    input_ids = _as_ids(op, "input_ids", input_ids)
    word = _as_table(op, "word", word)
    width = word.shape[1]
    position = _as_table(op, "position", position, width)
    token_type = None if token_type is None else _as_table(op, "token_type", token_type, width)
    gamma, beta = checks.as_vectors(op, width, gamma=gamma, beta=beta)
    if position_ids is not None:
        position_ids = _as_ids(op, "position_ids", position_ids, input_ids.shape)
    elif not all(isinstance(size, int) for size in (input_ids.shape[-1], position.shape[0])):  # NaN beyond the table
        position_ids = lax.broadcasted_iota(jnp.int32, input_ids.shape, input_ids.ndim - 1)
    elif input_ids.shape[-1] > position.shape[0]:
        raise ValueError(
            f"{op}: position must have a row for each of the {input_ids.shape[-1]} tokens of a sequence where there "
            f"are no position_ids, got {position.shape[0]}"
        )
    if token_type_ids is not None:
        token_type_ids = _as_ids(op, "token_type_ids", token_type_ids, input_ids.shape)
        if token_type is None:
            raise ValueError(f"{op}: token_type must be an array where there are token_type_ids, got None")
    epsilon = checks.check_number(op, "epsilon", epsilon, positive=True)
    try:
        dtype = jax.dtypes.canonicalize_dtype(word.dtype if dtype is None else dtype)
    except TypeError as error:
        raise TypeError(f"{op}: dtype must be one of floats, got {dtype!r}") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{op}: dtype must be one of floats, got {dtype}")

    rate = checks.check_dropout(op, dropout_rate, dropout_rng)
    rng = dropout_rng if rate > 0.0 else None

    arrays = word, position, token_type, gamma, beta, input_ids, position_ids, token_type_ids
    plan = plan_of(op, *arrays, epsilon=epsilon, dropout_rate=rate, dtype=dtype, implementation=implementation)
    plans.record(op, (input_ids, word, position, token_type, gamma, beta, position_ids, token_type_ids), plan)
    if plan.forward.backend == "xla":
        return _reference(plan, *arrays, rng)
    return _kernels(plan, *arrays, rng)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `embeddings_layer_norm`. `backward` has configurations of LayerNorm and of the sums by id."""

    epsilon: float
    dropout_rate: float
    dtype: Any


def plan_of(
    op: str, word: Array, position: Array, token_type: Array | None, gamma: Array | None, beta: Array | None,
    input_ids: Array, position_ids: Array | None, token_type_ids: Array | None, *, epsilon: float,
    dropout_rate: float, dtype: Any, implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backend and configurations for arrays of these shapes and dtypes."""
    plan = functools.partial(Plan, epsilon=epsilon, dropout_rate=dropout_rate, dtype=dtype)
    tables = {"word": word, "position": position, "token_type": token_type}
    ids = {"input_ids": input_ids, "position_ids": position_ids, "token_type_ids": token_type_ids}
    reason = triton.unsupported(dtype, ids, tables, gamma=gamma, beta=beta)
    choice = dispatch.choose(op, implementation, {"triton": reason})
    rows, width = input_ids.size, word.shape[1]
    if choice.name == "xla" or rows * width == 0:
        return plan(why=choice.why)
    others = dispatch.device(), "embeddings"

    def sums(table, ids):
        return None if table is None or ids is None else tuning.embeddings_sums(*table.shape)

    backward = (
        tuning.layer_norm_backward(rows, width, 4, *others),  # itemsize of the sum, float32
        tuning.embeddings_sums(*word.shape),
        sums(position, position_ids),
        sums(token_type, token_type_ids),
    )
    forward = tuning.layer_norm(rows, width, dtype.itemsize, *others)
    return plan(**plans.by_triton(choice, forward, backward))


def _as_ids(op, name, x, shape=None):
    """Converts ids to int32. An id that int32 does not hold becomes an id that no table has."""
    x = checks.as_integers(op, name, x, saturate=True)
    if shape is not None:
        checks.check_shape(op, name, x, shape)
    elif x.ndim == 0:
        raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
    return x


def _as_table(op, name, x, width=None):
    x = checks.as_float(op, name, x)
    if x.ndim != 2 or x.shape[0] == 0:
        raise ValueError(f"{op}: {name} must have shape [rows, D], rows > 0, got {x.shape}")
    if width is not None and x.shape[1] != width:
        raise ValueError(f"{op}: {name} must have the width of word, {width}, got {x.shape[1]}")
    return x


def _plain(plan, word, position, token_type, gamma, beta, input_ids, position_ids, token_type_ids, rng):
    return reference.embeddings_layer_norm(
        input_ids, word, position, token_type, gamma, beta, position_ids=position_ids, token_type_ids=token_type_ids,
        epsilon=plan.epsilon, dropout_rate=plan.dropout_rate, dropout_rng=rng, dtype=plan.dtype,
    )  # fmt: skip


def _forward(plan, save, word, position, token_type, gamma, beta, input_ids, position_ids, token_type_ids, rng):
    def flat(ids):
        return None if ids is None else ids.reshape(-1)

    y, *saved = triton.forward(
        word, position, token_type, gamma, beta, flat(input_ids), flat(position_ids), flat(token_type_ids),
        None if rng is None else dropout_seed(rng), length=input_ids.shape[-1], epsilon=plan.epsilon,
        dropout_rate=plan.dropout_rate, dtype=plan.dtype, save=save, config=plan.forward.config,
        interpret=plan.interpret,
    )  # fmt: skip
    shape = *input_ids.shape, word.shape[1]
    if not save:
        return y.reshape(shape)
    total, numbers = saved
    return y.reshape(shape), (total.reshape(shape), numbers.reshape(2, *input_ids.shape))


def _backward(
    plan, dtypes, dy, saved, word, position, token_type, gamma, beta, input_ids, position_ids, token_type_ids, rng
):
    norm, *configs = plan.backward.config
    total, saved = saved[0].reshape(-1, dy.shape[-1]), saved[1].reshape(2, -1)
    of_rows = token_type is not None and token_type_ids is None  # the gradient of row 0 is a sum over all tokens
    of_word, of_position, of_token_type, of_gamma, of_beta = dtypes
    vectors = {"bias": of_token_type if of_rows else None, "gamma": of_gamma, "beta": of_beta}
    d, _, found = triton_layer_norm.backward(
        dy.reshape(total.shape), None, total, None, None, gamma, None if rng is None else dropout_seed(rng),
        saved, dropout_rate=plan.dropout_rate, drops_result=rng is not None,
        vectors={name: dtype for name, dtype in vectors.items() if dtype is not None}, dtype=total.dtype,
        config=norm, interpret=plan.interpret,
    )  # fmt: skip

    def by_id(table, dtype, ids, config):
        like = jax.ShapeDtypeStruct(table.shape, dtype)
        return triton.sum_by_id(d, ids.reshape(-1), like, config=config, interpret=plan.interpret)

    def first_rows(table, dtype, rows):
        return jnp.pad(rows.astype(dtype), ((0, table.shape[0] - rows.shape[0]), (0, 0)))

    if position_ids is not None:
        dposition = by_id(position, of_position, position_ids, configs[1])
    else:
        dposition = first_rows(position, of_position, jnp.sum(d.reshape(-1, *dy.shape[-2:]), axis=0))
    dtoken_type = None
    if token_type is not None:
        if of_rows:
            dtoken_type = first_rows(token_type, of_token_type, found["bias"][None])
        else:
            dtoken_type = by_id(token_type, of_token_type, token_type_ids, configs[2])
    return by_id(word, of_word, input_ids, configs[0]), dposition, dtoken_type, found.get("gamma"), found.get("beta")


def _rule(plan, word, position, token_type, gamma, beta, ids, *others):
    position_ids, _, rng = others
    rows = sharding.rows_of(ids.shape, dropout=rng is not None)
    if position_ids is None:  # the position of a token is then its place in the last axis
        rows = " ".join([*rows.split()[:-1], "T"])
    arguments = f"V D, P D, C D, D, D, {rows}, {rows}, {rows}, key({rows})"
    return Rule("embeddings_layer_norm", arguments, f"{rows} D"), f"{rows} D | 2 {rows}"


_reference, _kernels = transforms.implementations(_forward, _backward, _plain, gradients=5, rule=_rule)
