"""Parts of a training step: micro-batches, losses of embeddings, loss scaling for float16, compiler options."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxft import reference
from jaxft.contrastive import contrastive_loss as contrastive_loss
from jaxft.contrastive import unit
from jaxft.ops import checks, transforms
from jaxft.ops.cross_entropy import CrossEntropy

# Options for training steps: jax.jit(step, compiler_options=COMPILER_OPTIONS).
# Triton GEMM off: for a matmul followed by an addition XLA generates a Triton kernel, or a separate kernel for the
# addition. With the option off, cuBLAS does the addition, for example where a gradient joins the gradient of the
# residual connection. There is also less to compile.
# Command buffers (CUDA graphs): the defaults of JAX 0.11, and WHILE. Without WHILE, a loop with a data-dependent trip
# count such as the loop of `linear_cross_entropy` is not part of a CUDA graph. The host then waits for the forward pass
# of every step to learn the trip count, and the GPU waits for the host to launch the backward pass.
# H200, JAX 0.11.2, pretrain.py, BERT-base, 16,384 tokens, queued steps: 23.5 ms (without WHILE 26.6 ms), 2026-11-24
COMPILER_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
}

_LEAST, _LARGEST = 1.0, 2.0**24

State = TypeVar("State")


class LossScale(NamedTuple):
    """Dynamic loss scale: the factor of the loss that keeps float16 gradients from underflowing.

    It is part of the training state: a pytree of three scalars, to be saved and restored with the rest. Training in
    bfloat16 or float32 needs no loss scale. Stop the training when `skipped` exceeds 24: by then the scale is 1, and
    the gradients themselves are not finite.

    Attributes:
      scale: float32 scalar, the factor of the loss.
      good_steps: int32 scalar, the number of steps since the scale last changed.
      skipped: int32 scalar, the number of steps skipped in a row, up to and including the latest step.
    """

    scale: Array
    good_steps: Array
    skipped: Array

    @classmethod
    def create(cls, scale: float = 2.0**15) -> Self:
        """Creates the loss scale for the first step, with both counters at 0.

        Args:
          scale: the initial factor, a Python number from 1 to 2**24.

        Raises:
          ValueError: `scale` is not a number from 1 to 2**24.
        """
        if not checks.is_number(scale) or not _LEAST <= float(scale) <= _LARGEST:
            raise ValueError(f"LossScale: scale must be a number from 1 to 2**24, got {scale!r:.100}")
        return cls(jnp.float32(scale), jnp.int32(0), jnp.int32(0))

    def update(self, finite: Array, *, growth_interval: int = 2000) -> "LossScale":
        """Computes the loss scale for the next step.

        The scale is halved if a gradient was not finite, and doubled after `growth_interval` finite steps in a row. It
        stays between 1 and 2**24.

        Args:
          finite: a boolean scalar, whether all gradients of the step were finite.
          growth_interval: number of finite steps after which the scale is doubled.

        Raises:
          TypeError: `finite` is not a boolean scalar (for example the loss).
          ValueError: `growth_interval` is not an integer above 0.
        """
        if jnp.shape(finite) != () or jnp.result_type(finite) != jnp.bool_:
            raise TypeError(f"LossScale: finite must be a boolean scalar, got {jax.typeof(finite)}")
        if not checks.is_natural(growth_interval) or growth_interval == 0:
            raise ValueError(f"LossScale: growth_interval must be an integer above 0, got {growth_interval!r:.100}")
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grows = good_steps >= min(int(growth_interval), 2**31 - 1)
        scale = self.scale * jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5).astype(jnp.float32)
        skipped = jnp.where(finite, 0, self.skipped + 1)
        return LossScale(scale.clip(_LEAST, _LARGEST), jnp.where(grows, 0, good_steps), skipped)


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], tuple[Array, Array]],
    params: Any,
    batches: Any,
    *,
    loss_scale: LossScale | None = None,
    sum_dtype: Any = jnp.float32,
) -> tuple[CrossEntropy, Any]:
    """Computes the mean loss of a batch and its gradients, one micro-batch at a time.

    Activations take the memory of one micro-batch only. Equivalent, up to rounding, to::

      def mean(params):
        losses = [loss_fn(params, jax.tree.map(lambda x: x[i], batches)) for i in range(micro_batches)]
        return sum(total for total, _ in losses) / max(sum(labelled for _, labelled in losses), 1)

      jax.grad(mean)(params)

    Each label has the same weight, whichever micro-batch and device it is on. Inside a `jax.shard_map`, the results
    cover the batches of all devices along each mesh axis over which `batches` vary and `params` do not. With
    `check_vma=False`, JAX does not report what varies, so the results cover the device's own batches only. If any of
    the `params` vary over a mesh axis, the results are not summed over that axis. Gather shards that belong together
    before the call.

    Args:
      loss_fn: a function (params, micro_batch) -> (total, labelled) that returns two scalars: the sum of the losses,
        and the number of labels. `BertForMaskedLM.loss` and `jaxft.linear_cross_entropy` return such a pair. Inside a
        `shard_map`, both scalars are the device's own.
      params: a pytree of float arrays. To train in 16 bits, keep them in float32 (`param_dtype` of a model) and compute
        in 16 bits (`dtype` of a model).
      batches: a pytree of arrays with the micro-batches along their first axis. Dropout keys can be one of the arrays:
        `jax.random.split(key, micro_batches)`.
      loss_scale: the loss scale for float16, or None. The returned gradients are not scaled. They are not finite if the
        scale was too large. With a loss scale, `params` must not be float16, because unscaled float16 gradients would
        underflow.
      sum_dtype: the dtype in which the devices of a `shard_map` add up the gradients of matrices and tables. bfloat16
        halves the bytes that the devices exchange, and rounds each device's gradients to 8 bits of precision. The
        gradients of vectors and the loss are always added up in float32.

    Returns:
      The tuple (loss, gradients). The loss is a `CrossEntropy`: (total, labelled), with their quotient as the property
      `mean`. The gradients have the structure and dtypes of `params`. Sums over the micro-batches are float32.

    Raises:
      TypeError: `loss_fn` is not a function, `loss_scale` is not a `LossScale`, `sum_dtype` is neither float32 nor
        bfloat16, or `params` has an array that is not of floats.
      ValueError: `batches` has no arrays, or its arrays do not have the same number of micro-batches, at least one.
        `loss_fn` does not return two scalars with an integer as the second, or has summed them over devices. `params`
        has float16 arrays and there is a `loss_scale`.
    """
    where = "accumulate_gradients"
    _check_functions(where, loss_fn=loss_fn)
    if sum_dtype not in (jnp.float32, jnp.bfloat16, "float32", "bfloat16"):
        raise TypeError(f"{where}: sum_dtype must be float32 or bfloat16, got {sum_dtype!r:.100}")
    own, of_batches = _checked_axes(where, params, batches, loss_scale)
    scale = jnp.float32(1) if loss_scale is None else loss_scale.scale

    def scaled_mean(params: Any, batch: Any) -> tuple[Array, CrossEntropy]:
        loss = _own_sums(where, loss_fn(params, batch), of_batches - own)
        # The scale multiplies the mean, not the total: then the scale that fits float16 does not depend on the number
        # of labels.
        return scale * loss.mean, loss

    # Inside a shard_map, JAX sums the gradients of parameters that do not vary over the devices. Here they are the
    # gradients of each device's own mean, which need different weights. So parameters are made to vary, and the
    # weighted gradients are summed explicitly below.
    vary = functools.partial(_vary, own | of_batches)
    varied = vary(params)

    def add(carry: tuple[CrossEntropy, Any], batch: Any) -> tuple[tuple[CrossEntropy, Any], None]:
        loss, sums = carry
        gradients, part = jax.grad(scaled_mean, has_aux=True)(varied, batch)
        factor = part.labelled.astype(jnp.float32) / scale
        sums = jax.tree.map(lambda total, gradient: total + factor * gradient.astype(jnp.float32), sums, gradients)
        return vary((jax.tree.map(jnp.add, loss, part), sums)), None

    start = vary((CrossEntropy(jnp.float32(0), jnp.int32(0)), _zeros(params)))
    (loss, sums), _ = lax.scan(add, start, batches)
    if over := tuple(of_batches - own):
        own_sums = jax.tree.map(lambda total: total.astype(sum_dtype if total.ndim > 1 else jnp.float32), sums)
        loss, all_sums = lax.psum((loss, own_sums), over)
        sums = jax.tree.map(lambda total: total.astype(jnp.float32), all_sums)
    labelled = jnp.maximum(loss.labelled, 1).astype(jnp.float32)
    return loss, jax.tree.map(lambda total, param: (total / labelled).astype(param.dtype), sums, params)


def cached_gradients(
    embed_fn: Callable[[Any, Any], Any],
    loss_fn: Callable[..., tuple[Array, Array]],
    params: Any,
    batches: Any,
    *,
    loss_scale: LossScale | None = None,
) -> tuple[CrossEntropy, Any]:
    """Computes the mean loss of a batch of embeddings and its gradients, encoding one micro-batch at a time.

    The loss compares all texts of the batch with each other, as `contrastive_loss` does, but activations take the
    memory of one micro-batch only. The encoder runs once without gradients, for the embeddings of the whole batch, and
    once with gradients, a micro-batch at a time. (A single micro-batch runs once.) Equivalent, up to rounding, to::

      def mean(params):
        parts = [embed_fn(params, jax.tree.map(lambda x: x[i], batches)) for i in range(micro_batches)]
        return loss_fn(*(jnp.concatenate(part) for part in zip(*parts))).mean

      jax.grad(mean)(params)

    Inside a `jax.shard_map`, the results cover all devices, as for `accumulate_gradients`.

    Args:
      embed_fn: a function (params, micro_batch) -> a tuple of float arrays `[B, ...]`, for example the embeddings of
        the queries and of the documents. A single array counts as a tuple of one. It must not depend on anything else,
        because it is called twice: a dropout key comes from `batches`, and is then the same in both passes.
      loss_fn: a function of the arrays of all micro-batches, `[micro_batches * B, ...]` each, that returns two scalars:
        the sum of the losses, and the number of rows. `contrastive_loss` and the results of `matryoshka_loss` are such
        functions. Inside a `shard_map`, both scalars are the device's own.
      params: see `accumulate_gradients`.
      batches: see `accumulate_gradients`.
      loss_scale: see `accumulate_gradients`.

    Returns:
      The tuple (loss, gradients), see `accumulate_gradients`.

    Raises:
      TypeError: `embed_fn` or `loss_fn` is not a function, `loss_scale` is not a `LossScale`, or `params` or the result
        of `embed_fn` has an array that is not of floats.
      ValueError: a result of `embed_fn` has no axis. Otherwise as `accumulate_gradients`.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021).
    """
    where = "cached_gradients"
    _check_functions(where, embed_fn=embed_fn, loss_fn=loss_fn)
    own, of_batches = _checked_axes(where, params, batches, loss_scale)

    def embed(params: Any, batch: Any) -> tuple[Array, ...]:
        found = embed_fn(params, batch)
        arrays = tuple(found) if isinstance(found, tuple | list) else (found,)
        for array in arrays:
            if checks.as_float(where, "the result of embed_fn", array).ndim == 0:
                raise ValueError(f"{where}: the result of embed_fn must be arrays [B, ...], got a scalar")
        return arrays

    def total_of(embeddings: tuple[Array, ...]) -> tuple[Array, Array]:
        return _own_sums(where, loss_fn(*(x.reshape(-1, *x.shape[2:]) for x in embeddings)), of_batches - own)

    if jax.tree.leaves(batches)[0].shape[0] == 1:  # no need to run the encoder twice

        def loss_of(params: Any, batch: Any) -> CrossEntropy:
            return _own_sums(where, loss_fn(*embed(params, batch)), of_batches - own)

        return accumulate_gradients(loss_of, params, batches, loss_scale=loss_scale)
    scale = jnp.float32(1) if loss_scale is None else loss_scale.scale
    vary = functools.partial(_vary, own | of_batches)
    varied = vary(params)
    embeddings = lax.map(lambda batch: embed(varied, batch), batches)
    total, pull_back, labelled = jax.vjp(total_of, embeddings, has_aux=True)
    loss, over = vary(CrossEntropy(total, labelled)), tuple(of_batches - own)
    loss = lax.psum(loss, over) if over else loss
    factor = scale / jnp.maximum(loss.labelled, 1).astype(jnp.float32)
    (cotangents,) = pull_back(transforms.vary_over(factor, transforms.varying(total)))

    def add(sums: Any, part: tuple[Any, Any]) -> tuple[Any, None]:
        batch, cotangent = part
        (gradients,) = jax.vjp(lambda params: embed(params, batch), varied)[1](cotangent)
        return vary(jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sums, gradients)), None

    sums, _ = lax.scan(add, vary(_zeros(params)), (batches, cotangents))
    sums = lax.psum(sums, over) if over else sums
    return loss, jax.tree.map(lambda total, param: (total / scale).astype(param.dtype), sums, params)


def _checked_axes(where: str, params: Any, batches: Any, loss_scale: Any) -> tuple[frozenset[Any], frozenset[Any]]:
    """Checks the arguments, and returns the mesh axes over which `params` and `batches` vary."""
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
    own, of_batches = (transforms.varying(*jax.tree.leaves(tree)) for tree in (params, batches))
    return own, of_batches


def _own_sums(where: str, loss: Any, over: frozenset[Any]) -> CrossEntropy:
    """Checks the result of a loss function, which must be the device's own along the mesh axes `over`."""
    parts = [jax.typeof(part) for part in jax.tree.leaves(loss)]
    if [part.shape for part in parts] != [(), ()] or not jnp.issubdtype(parts[1].dtype, jnp.integer):
        found = ", ".join(map(str, parts))
        raise ValueError(f"{where}: loss_fn must return two scalars, total and an integer labelled, got {found}")
    total, labelled = jnp.asarray(loss[0], jnp.float32), jnp.asarray(loss[1], jnp.int32)
    if summed := over - transforms.varying(total):
        raise ValueError(
            f"{where}: inside a shard_map loss_fn must return the device's own sums, got a total that is the same "
            f"over {sorted(map(str, summed))}; leave out its psum"
        )
    return CrossEntropy(total, labelled)


def _vary(axes: frozenset[Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: transforms.vary_over(x, axes), tree)


def _zeros(params: Any) -> Any:
    return jax.tree.map(lambda param: jnp.zeros(jnp.shape(param), jnp.float32), params)


def matryoshka_loss(
    loss_fn: Callable[..., tuple[Array, Array]],
    dims: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    n_dims_per_step: int | None = None,
) -> Callable[..., CrossEntropy]:
    """Makes a loss of truncated embeddings: the weighted sum of a loss over several numbers of dimensions.

    The first components of such embeddings are embeddings, too. Equivalent, without `n_dims_per_step`, to::

        total = sum(w * loss_fn(*(unit(x[..., :d]) for x in embeddings)).total for d, w in zip(dims, weights))

    The `mean` of its result is the loss `MatryoshkaLoss` of sentence-transformers. Components that no loss has seen are
    not trained: the largest of `dims` should be the width of the embeddings.

    Args:
      loss_fn: a function of arrays of embeddings that returns two scalars, the sum of the losses and the number of
        rows, such as `contrastive_loss` or a `functools.partial` of it.
      dims: numbers of leading components to keep.
      weights: a factor of the loss for each of `dims`. None is 1 for all.
      n_dims_per_step: how many of `dims`, at random, count in a call. None counts all.

    Returns:
      A function (*embeddings, key=None) -> `CrossEntropy`. Each of the embeddings is a float array `[..., D]` or None,
      which is passed on. `key` is the JAX random key that chooses dimensions, with `n_dims_per_step` only. Inside a
      `shard_map`, it must be the same on all devices.

    Raises:
      TypeError: `loss_fn` is not a function, or one of `weights` is not a number.
      ValueError: `dims` are not positive integers, at least one, or the number of finite `weights` differs from it, or
        `n_dims_per_step` is not a positive integer.

    Source: Kusupati et al., "Matryoshka Representation Learning" (2022).
    """
    where = "matryoshka_loss"
    _check_functions(where, loss_fn=loss_fn)
    dims = tuple(dims) if isinstance(dims, Iterable) else dims
    if not isinstance(dims, tuple) or not dims or not all(checks.is_natural(dim) and dim > 0 for dim in dims):
        raise ValueError(f"{where}: dims must be positive integers, at least one, got {dims!r:.100}")
    given = [1] * len(dims) if weights is None else weights
    factors = [checks.check_number(where, "weights", x) for x in given] if isinstance(given, Iterable) else []
    if len(factors) != len(dims):
        found = len(factors) if isinstance(given, Iterable) else repr(given)
        raise ValueError(f"{where}: weights must have one number for each of the {len(dims)} dims, got {found}")
    if n_dims_per_step is not None and not (checks.is_natural(n_dims_per_step) and n_dims_per_step > 0):
        raise ValueError(f"{where}: n_dims_per_step must be None or a positive integer, got {n_dims_per_step!r:.100}")

    def loss(*embeddings: Array | None, key: Array | None = None) -> CrossEntropy:
        if (key is None) != (n_dims_per_step is None):
            raise ValueError(f"{where}: a key is needed with n_dims_per_step, and only then")
        counts = jnp.ones(len(dims), bool)
        if key is not None and n_dims_per_step is not None:
            checks.check_key(where, "key", key)
            counts = jax.random.permutation(key, len(dims)) < n_dims_per_step
        arrays = [None if x is None else reference.wide(checks.as_float(where, "embeddings", x)) for x in embeddings]
        for x in arrays:
            if x is not None and (x.ndim == 0 or x.shape[-1] < max(dims)):
                raise ValueError(f"{where}: embeddings must have at least {max(dims)} components, got {x.shape}")
        total: Any = 0.0
        for place, (dim, factor) in enumerate(zip(dims, factors, strict=True)):
            part = loss_fn(*(None if x is None else unit(x[..., :dim]) for x in arrays))
            _own_sums(where, part, frozenset())
            total = total + jnp.where(counts[place], factor * part[0], 0.0)
        return CrossEntropy(total, part[1])

    return loss


def update_if_finite(
    update: Callable[[Any, State], State],
    gradients: Any,
    state: State,
    loss_scale: LossScale | None,
    *,
    growth_interval: int = 2000,
) -> tuple[State, LossScale | None]:
    """Applies an optimiser step, or skips it if there is a loss scale and a gradient is not finite.

    Equivalent to::

      finite = all_finite(gradients)
      (update(gradients, state) if finite else state), loss_scale.update(finite)

    Args:
      update: a function (gradients, state) -> next state, with the structure, shapes and dtypes of `state`. It is
        computed in skipped steps too.
      gradients: the gradients that `accumulate_gradients` returns.
      state: a pytree of arrays: the parameters and the state of the optimiser, including its step count.
      loss_scale: the loss scale, or None: then no step is skipped, and the next loss scale is None.
      growth_interval: see `LossScale.update`.

    Returns:
      The tuple (next state, next loss scale).

    Raises:
      TypeError: `update` is not a function, or `loss_scale` is not a `LossScale`.
      ValueError: `growth_interval` is not an integer above 0, or `update` returns another structure, shape or dtype
        than `state` has. Both are checked only if there is a loss scale.
    """
    _check_functions("update_if_finite", update=update)
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
    """Returns a boolean scalar: whether no array of the pytree has a NaN or an infinity (true without arrays)."""
    return jnp.array([jnp.isfinite(array).all() for array in jax.tree.leaves(arrays)], bool).all()


def _check_functions(where: str, **given: Any) -> None:
    for name, function in given.items():
        if not callable(function):
            raise TypeError(f"{where}: {name} must be a function, got {function!r:.100}")


def _check_loss_scale(where: str, loss_scale: Any) -> None:
    if not isinstance(loss_scale, LossScale | None):
        raise TypeError(f"{where}: loss_scale must be a LossScale or None, got {loss_scale!r:.100}")
