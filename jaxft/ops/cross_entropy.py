"""The op `linear_cross_entropy`: cross-entropy of the logits of a linear classifier, a chunk of logits at a time."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxft import dispatch, reference
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import rows as tuning


class CrossEntropy(NamedTuple):
    """Result of `linear_cross_entropy`: a sum and a count, both of which add up over the parts of a batch.

    Attributes:
      total: the sum of the losses, float32.
      labelled: the number of rows with a label, int32.
    """

    total: Array
    labelled: Array

    @property
    def mean(self) -> Array:
        """The loss that torch and transformers return: total / labelled. It is 0 if no row has a label."""
        return self.total / jnp.maximum(self.labelled, 1).astype(self.total.dtype)


@sharding.over_explicit_axes("x: ... D, embedding: v D, labels: ..., bias: v -> ")
def linear_cross_entropy(
    x: Array,
    embedding: Array,
    labels: Array,
    bias: Array | None = None,
    *,
    ignore_index: int = -100,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> CrossEntropy:
    """Computes the cross-entropy of the logits x @ embedding.T + bias, a chunk of labelled rows at a time.

    Equivalent to::

        log_p = jax.nn.log_softmax(x @ embedding.T + bias)
        picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        -jnp.sum(jnp.where(labels != ignore_index, picked, 0)), jnp.sum(labels != ignore_index)

    The time grows with the number of labels, not with the number of rows. (Masked language modelling labels some 15 %
    of the rows.) At most one chunk of logits is in memory.

    Args:
      x: `[..., D]`, float32, float16 or bfloat16. Matmuls accumulate in float32, and logits are float32.
      embedding: `[V, D]` of any float dtype, a row for each class: a table of word embeddings as it is, not transposed.
        It is cast to the dtype of `x`.
      labels: `[...]`, integers. A label outside of [0, V) that is not `ignore_index` makes the total NaN, and also the
        gradients that it takes part in.
      bias: `[V]` of any float dtype, or None.
      ignore_index: the label of rows without a label, a Python integer. Such rows contribute nothing, whatever `x`
        holds there.
      precision: precision of the matmuls, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.
      implementation: None or "xla", the only implementation. The matmuls are cuBLAS's on a GPU.

    Returns:
      The tuple (total, labelled): the sum of the losses, float32, and the number of rows with a label, int32. Both are
      scalars. The property `mean` is the loss that torch and transformers return, except that it is 0, with gradients
      of 0, if no row has a label.

      Over the steps of gradient accumulation or the devices of a `jax.shard_map`, add up both before you divide. Under
      `jax.jit` on several devices, each device collects its own rows that have a label.

    Raises:
      ValueError: ignore_index is not a Python integer that fits int32. See `jaxft.ops` for the other errors.

    Gradients: for x, embedding and bias (reverse mode only). They are exactly 0 in rows without a label. The pass that
    computes the loss also computes them, for a cotangent of 1, because the logits of a chunk exist only there. They are
    kept in float32 and multiplied by the cotangent before they are rounded to the dtypes of the arguments.

    Accuracy: the gradient of the logits, which is at most 1, is rounded to the dtype of `x`. In float16 it is
    multiplied by 2^15 before that, so that probabilities far below the smallest number of float16 count, with or
    without loss scaling.

    Determinism: the result and the gradients are deterministic.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), and the chunked losses of
    Liger-Kernel.
    """
    op = "linear_cross_entropy"
    x, embedding = checks.as_float(op, "x", x), checks.as_float(op, "embedding", embedding)
    if x.ndim == 0 or embedding.ndim != 2 or embedding.shape[0] == 0 or embedding.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: x and embedding must have shapes [..., D] and [V, D], V > 0, got {x.shape} and {embedding.shape}"
        )
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or abs(ignore_index) >= 2**31 - 1:
        raise ValueError(f"{op}: ignore_index must be a Python integer of 32 bits, got {ignore_index!r:.100}")
    # A label that int32 does not hold becomes a number that is neither a class nor `ignore_index`.
    labels = checks.as_integers(op, "labels", labels, saturate=True)
    checks.check_shape(op, "labels", labels, x.shape[:-1])
    bias = checks.as_vector(op, "bias", bias, embedding.shape[0])
    precision = checks.check_precision(op, precision, x.dtype)
    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, x.shape[-1]), embedding, bias, labels.reshape(rows)
    plan = plan_of(op, *arrays[:3], ignore_index=ignore_index, precision=precision, implementation=implementation)
    plans.record(op, (x, embedding, labels, bias), plan)
    if 0 in arrays[0].shape:
        return CrossEntropy(*_reference(*arrays, ignore_index, precision))
    return CrossEntropy(*_loss_jit(*arrays, plan))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `linear_cross_entropy`."""

    ignore_index: int
    precision: Any


def plan_of(
    op: str, x: Array, embedding: Array, bias: Array | None, *, ignore_index: int, precision: Any,
    implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses how many rows have logits at a time, for x in two dimensions."""
    choice = dispatch.choose(op, implementation, {})
    chunks = Pass("xla", tuning.linear_cross_entropy(x.shape[0], *embedding.shape))
    return Plan(forward=chunks, backward=chunks, why=choice.why, ignore_index=ignore_index, precision=precision)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _reference(x, embedding, bias, labels, ignore_index, precision):
    options = {"ignore_index": ignore_index, "precision": precision}
    return reference.linear_cross_entropy(x, embedding, labels, bias, **options)


@functools.partial(jax.jit, static_argnums=4)
def _loss_jit(x, embedding, bias, labels, plan):
    carriers = transforms.wide_carriers(x, embedding, bias)
    *arrays, of_x, of_embedding, of_bias = transforms.vary_alike(x, embedding, bias, labels, *carriers)
    return _loss(*arrays, (of_x, of_embedding, of_bias), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _loss(x, embedding, bias, labels, carriers, plan):
    del carriers
    run = transforms.mappable(
        lambda _, *arrays: _by_chunks(plan, False, *arrays),
        lambda *arrays: _reference(*arrays, plan.ignore_index, plan.precision), plan,
        _rule(plan, False),
    )  # fmt: skip
    return run(x, embedding, bias, labels)


def _rule(plan, with_gradients):
    def by_parts(over, *arrays):
        found = _by_chunks(plan, with_gradients, *arrays, over=over)
        return (*found[:2], lax.psum(found[2], over), *found[3:]) if with_gradients else found

    results = ", , r D, v D, v" if with_gradients else ", "
    return Rule("linear_cross_entropy", "r D, v D, v, r", results, contracted={"v": by_parts})


def _by_chunks(plan, with_gradients, x, embedding, bias, labels, *, over=()):
    """Computes the sum of the losses, the number of labels and, if asked, the gradients of the floats, in float32.

    If the classes are divided over the mesh axes `over`, the gradient of `x` is the part of the own classes.
    """
    rows, width = x.shape
    wide = reference.wide_dtype(x)
    scale = 2.0**15 if x.dtype == jnp.float16 else 1.0  # the largest power of 2 that keeps the gradient finite
    # Pads the classes to a multiple of 8 (16 bytes in 16 bits). cuBLAS needs that, and XLA would otherwise make padded
    # copies of the table and of the gradient of the logits in every chunk.
    classes, none = embedding.shape[0], -embedding.shape[0] % 8
    table = jnp.pad(embedding.astype(x.dtype), ((0, none), (0, 0)))
    added = bias if bias is not None or none == 0 else jnp.zeros(classes, wide)
    if added is not None:
        added = jnp.pad(added.astype(wide), (0, none), constant_values=-jnp.inf)
    every = classes * (lax.axis_size(over) if over else 1)
    first = lax.axis_index(over) * jnp.int32(classes) if over else 0
    # The indices of the rows with a label, in order, and then `rows`, which is past the end.
    capacity = -(-rows // plan.forward.config.rows) * plan.forward.config.rows
    indices, (_, labelled) = reference.padding_indices((labels != plan.ignore_index)[None], capacity=capacity)

    def dot(a, b, contracted):
        numbers = (contracted, ((), ()))
        factors = reference.matmul_factors(a, b)
        return lax.dot_general(*factors, numbers, precision=plan.precision, preferred_element_type=wide)

    def chunk(i, carry):
        total, gradients = carry
        index = lax.dynamic_slice_in_dim(indices, i * plan.forward.config.rows, plan.forward.config.rows)
        x_rows = x.at[index].get(mode="fill", fill_value=0)
        label = labels.at[index].get(mode="fill", fill_value=0)[:, None]
        used = index[:, None] < rows
        weight = reference.one_or_nan((label >= 0) & (label < every), wide)  # [chunk, 1]

        logits = dot(x_rows, table, ((1,), (1,)))
        if added is not None:
            logits = logits + added[None]
        top = jnp.max(logits, axis=1, keepdims=True)
        logits = logits - (lax.pmax(top, over) if over else top)
        e = jnp.exp(logits)
        normalizer = jnp.sum(e, axis=1, keepdims=True)
        own = label - first
        is_label = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == jnp.where(own < classes, own, -1)
        of_label = jnp.sum(jnp.where(is_label, logits, 0.0), axis=1, keepdims=True)
        if over:
            normalizer, of_label = lax.psum((normalizer, of_label), over)
        loss = jnp.log(normalizer) - of_label
        total = total + jnp.sum(jnp.where(used, loss * weight, 0.0))
        if not with_gradients:
            return total, ()

        dx, d_embedding, d_bias = gradients
        d = jnp.where(used, (e / normalizer - is_label.astype(wide)) * weight, 0.0)
        if bias is not None:
            d_bias = d_bias + jnp.sum(d, axis=0)
        d = (d * scale).astype(x.dtype)
        nowhere = rows + lax.iota(jnp.int32, plan.forward.config.rows)
        place = jnp.where(used[:, 0], index, nowhere)
        dx = dx.at[place].set(dot(d, table, ((1,), (0,))), mode="drop", unique_indices=True)
        d_embedding = d_embedding + dot(d, x_rows, ((0,), (0,)))
        return total, (dx, d_embedding, d_bias)

    sizes = (x.shape, table.shape, () if bias is None else table.shape[:1]) if with_gradients else ()
    _, *start = transforms.vary_alike(x, *(jnp.zeros(size, wide) for size in ((), *sizes)))
    chunks = (labelled + plan.forward.config.rows - 1) // plan.forward.config.rows
    total, gradients = lax.fori_loop(0, chunks, chunk, (start[0], tuple(start[1:])))
    if not with_gradients:
        return total, labelled
    dx, d_embedding, d_bias = gradients
    d_embedding = d_embedding[:classes] / scale
    return total, labelled, dx / scale, d_embedding, None if bias is None else d_bias[:classes]


def _fwd(x, embedding, bias, labels, carriers, plan):
    def plain(x, embedding, bias, labels):
        def loss(*floats):
            return _reference(*floats, labels, plan.ignore_index, plan.precision)

        # In float32: a cotangent of these gradients may be above or below the numbers that float16 has.
        floats = jax.tree.map(reference.wide, (x, embedding.astype(x.dtype), bias))
        total, pull_back, labelled = jax.vjp(loss, *floats, has_aux=True)
        return total, labelled, *pull_back(jnp.ones_like(total))

    fused = transforms.with_plain_gradient(
        lambda _, *arrays: _by_chunks(plan, True, *arrays), plain, plan, _rule(plan, True)
    )
    total, labelled, *gradients = fused(x, embedding, bias, labels)
    return (total, labelled), (gradients, labels != plan.ignore_index)


def _bwd(plan, saved, d):
    gradients, used = saved
    dx, *others = jax.tree.map(lambda x: x * d[0], gradients)
    dx = jnp.where(used[:, None], dx, 0)  # exactly 0 also if the cotangent is NaN
    return None, None, None, None, (dx, *others)


_loss.defvjp(_fwd, _bwd)
