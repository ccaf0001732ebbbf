"""What a training step needs beside model and optimiser: gradients over micro-batches, and a loss scale for float16.

And `COMPILER_OPTIONS`, for `jax.jit(step, compiler_options=...)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxft.ops import checks, transforms
from jaxft.ops.cross_entropy import CrossEntropy

# Of products followed by an addition, XLA makes Triton kernels, or leaves the addition to a kernel of its own. Without
# them cuBLAS adds, as where a gradient joins that of the residual connection; and there is less to compile.
# A loop whose length the data decide, as that of `linear_cross_entropy`, is by default no part of a CUDA graph: in the
# middle of every step the host waits for the forward pass, to see how often to go on, and the GPU then for the host to
# send the backward pass. With what is in a graph by default (JAX 0.11), and such loops (WHILE), a step of the example
# pretrain.py (BERT-base, 16,384 tokens) takes 23.5 ms for 26.6 when calls are queued (H200, JAX 0.11.2, 2026-11-24).
COMPILER_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
}

_LEAST, _LARGEST = 1.0, 2.0**24

State = TypeVar("State")


class LossScale(NamedTuple):
    """The factor of the loss that keeps float16 gradients from vanishing, and its history; part of a training state.

    A pytree of three scalars, saved and restored with the rest of the state. bfloat16 and float32 need none.

    When more than 24 steps in a row were `skipped`, no scale is left that could help: the gradients themselves are not
    finite, and the training should be stopped.
    """

    scale: Array  # float32
    good_steps: Array  # int32, since the scale last changed
    skipped: Array  # int32, steps in a row, up to the last one, that were left out

    @classmethod
    def create(cls, scale: float = 2.0**15) -> Self:
        """The state before the first step.

        Raises:
          ValueError: `scale` is no number from 1 to 2**24.
        """
        if not checks.is_number(scale) or not _LEAST <= float(scale) <= _LARGEST:
            raise ValueError(f"LossScale: scale must be a number from 1 to 2**24, got {scale!r:.100}")
        return cls(jnp.float32(scale), jnp.int32(0), jnp.int32(0))

    def update(self, finite: Array, *, growth_interval: int = 2000) -> "LossScale":
        """The state after a step: half the scale if a gradient was not finite, twice after so many good steps in a row.

        Between 1 and 2**24.

        Args:
          finite: a boolean scalar, whether all gradients were.
          growth_interval: after how many good steps the scale grows.

        Raises:
          TypeError: `finite` is something else, as the loss.
          ValueError: `growth_interval` is no integer above 0.
        """
        if jnp.shape(finite) != () or jnp.result_type(finite) != jnp.bool_:
            raise TypeError(f"LossScale: finite must be a boolean scalar, got {jax.typeof(finite)}")
        if not checks.is_natural(growth_interval) or growth_interval == 0:
            raise ValueError(f"LossScale: growth_interval must be an integer above 0, got {growth_interval!r:.100}")
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grows = good_steps >= growth_interval
        scale = self.scale * jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5).astype(jnp.float32)
        skipped = jnp.where(finite, 0, self.skipped + 1)
        return LossScale(scale.clip(_LEAST, _LARGEST), jnp.where(grows, 0, good_steps), skipped)


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], tuple[Array, Array]],
    params: Any,
    batches: Any,
    *,
    loss_scale: LossScale | None = None,
) -> tuple[CrossEntropy, Any]:
    """The mean loss of a batch and its gradients, from one micro-batch after the other: the memory is that of one.

    Equivalent, up to rounding, to::

      def mean(params):
        losses = [loss_fn(params, jax.tree.map(lambda x: x[i], batches)) for i in range(micro_batches)]
        return sum(total for total, _ in losses) / max(sum(labelled for _, labelled in losses), 1)

      jax.grad(mean)(params)

    so that each label counts the same, whichever micro-batch it is in; and whichever device, inside a `jax.shard_map`
    over whose axes `batches` vary and `params` do not: what is returned is of all devices. (With `check_vma=False` JAX
    does not tell, and it is each device's own.) If some of the `params` vary over such an axis, it is of the device's
    own batches too: shards that belong together are to be gathered before.

    Args:
      loss_fn: (params, micro_batch) -> (total, labelled), two scalars: the sum of the losses, and of how many, as
        `BertForMaskedLM.loss` and `jaxft.linear_cross_entropy` return it; inside a `shard_map` the device's own.
      params: a pytree of float arrays; float32 to train in 16 bits (`dtype` of a model, not its `param_dtype`).
      batches: a pytree of arrays with the micro-batches along their first axis. Keys for dropout,
        `jax.random.split(key, micro_batches)`, are such an array.
      loss_scale: of float16. The gradients that are returned are not scaled, but not finite where it was too large.
        `params` then are float32: gradients of float16 would vanish without the scale.

    Returns:
      The loss as `CrossEntropy` (total, labelled, and as a property their `mean`), and the gradients in the dtypes of
      `params`; sums over the micro-batches are float32.

    Raises:
      TypeError: `loss_scale` is no `LossScale`, or `params` has an array that is not of floats.
      ValueError: `batches` has no arrays, or these do not have the same number of micro-batches, at least one; or
        `loss_fn` does not return two scalars, the second an integer, or has added them up over devices; or there are a
        `loss_scale` and float16 `params`.
    """
    where = "accumulate_gradients"
    _check_loss_scale(where, loss_scale)
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
    for dtype in dtypes:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{where}: params must be arrays of floats, got one of {dtype}")
    if loss_scale is not None and jnp.float16 in dtypes:
        raise ValueError(
            f"{where}: params must not be float16 with a loss_scale, got a float16 array; keep parameters in float32 "
            "(param_dtype=jnp.float32 of a model and of its from_pretrained), the computation in float16 (dtype)"
        )
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batches)]
    if len({shape[:1] for shape in shapes}) != 1 or shapes[0][:1] in ((), (0,)):
        raise ValueError(f"{where}: batches must be arrays of the same first axis, the micro-batches, got {shapes}")
    scale = jnp.float32(1) if loss_scale is None else loss_scale.scale
    # Inside a shard_map: JAX would add up the devices' gradients of each one's mean, which do not count alike.
    own, of_batches = (transforms.varying(*jax.tree.leaves(tree)) for tree in (params, batches))

    def scaled_mean(params: Any, batch: Any) -> tuple[Array, CrossEntropy]:
        loss = loss_fn(params, batch)
        parts = [jax.typeof(part) for part in jax.tree.leaves(loss)]
        if [part.shape for part in parts] != [(), ()] or not jnp.issubdtype(parts[1].dtype, jnp.integer):
            found = ", ".join(map(str, parts))
            raise ValueError(f"{where}: loss_fn must return two scalars, total and an integer labelled, got {found}")
        total, labelled = jnp.asarray(loss[0], jnp.float32), jnp.asarray(loss[1], jnp.int32)
        if summed := of_batches - own - transforms.varying(total):
            raise ValueError(
                f"{where}: inside a shard_map loss_fn must return the device's own sums, got a total that is the same "
                f"over {sorted(map(str, summed))}; leave out its psum"
            )
        # Of the mean, whose gradients are in float16's range at scales that do not depend on the batch.
        return scale * CrossEntropy(total, labelled).mean, CrossEntropy(total, labelled)

    def vary(tree: Any) -> Any:
        return jax.tree.map(lambda x: transforms.vary_over(x, own | of_batches), tree)

    varied = vary(params)

    def add(carry: tuple[CrossEntropy, Any], batch: Any) -> tuple[tuple[CrossEntropy, Any], None]:
        loss, sums = carry
        gradients, part = jax.grad(scaled_mean, has_aux=True)(varied, batch)
        factor = part.labelled.astype(jnp.float32) / scale
        sums = jax.tree.map(lambda total, gradient: total + factor * gradient.astype(jnp.float32), sums, gradients)
        return vary((jax.tree.map(jnp.add, loss, part), sums)), None

    zeros = jax.tree.map(lambda param: jnp.zeros(jnp.shape(param), jnp.float32), params)
    start = vary((CrossEntropy(jnp.float32(0), jnp.int32(0)), zeros))
    (loss, sums), _ = lax.scan(add, start, batches)
    if over := tuple(of_batches - own):
        loss, sums = lax.psum((loss, sums), over)
    labelled = jnp.maximum(loss.labelled, 1).astype(jnp.float32)
    return loss, jax.tree.map(lambda total, param: (total / labelled).astype(param.dtype), sums, params)


def update_if_finite(
    update: Callable[[Any, State], State],
    gradients: Any,
    state: State,
    loss_scale: LossScale | None,
    *,
    growth_interval: int = 2000,
) -> tuple[State, LossScale | None]:
    """One step of an optimiser, which with loss scaling is left out where a gradient is not finite.

    Equivalent to::

      finite = all_finite(gradients)
      (update(gradients, state) if finite else state), loss_scale.update(finite)

    Args:
      update: (gradients, state) -> the next state, of the same structure, shapes and dtypes; it is always computed.
      gradients: as `accumulate_gradients` returns them.
      state: a pytree of arrays: parameters and state of the optimiser, its count of steps included.
      loss_scale: None for `update(gradients, state), None`.
      growth_interval: as for `LossScale.update`.

    Returns:
      The next state and the next loss scale.

    Raises:
      TypeError: `loss_scale` is no `LossScale`.
      ValueError: as `LossScale.update`; or `update` gives another structure, shape or dtype.
    """
    _check_loss_scale("update_if_finite", loss_scale)
    updated = update(gradients, state)
    if loss_scale is None:
        return updated, None
    new, old = ([jax.tree.structure(tree), *map(_kind, jax.tree.leaves(tree))] for tree in (updated, state))
    if new != old:
        got, wanted = next(pair for pair in zip(new, old, strict=False) if pair[0] != pair[1])
        raise ValueError(f"update_if_finite: update must give what state has, {wanted!s:.300}, got {got!s:.300}")
    finite = all_finite(gradients)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    return kept, loss_scale.update(finite, growth_interval=growth_interval)


def _kind(array: Any) -> str:
    return f"{getattr(array, 'dtype', None) or jnp.result_type(array)}{list(jnp.shape(array))}"


def all_finite(arrays: Any) -> Array:
    """A boolean scalar, whether a pytree of arrays has no NaN and no infinity; true of one without arrays."""
    return jnp.array([jnp.isfinite(array).all() for array in jax.tree.leaves(arrays)], bool).all()


def _check_loss_scale(where: str, loss_scale: Any) -> None:
    if not isinstance(loss_scale, LossScale | None):
        raise TypeError(f"{where}: loss_scale must be a LossScale or None, got {loss_scale!r:.100}")
