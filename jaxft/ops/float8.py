"""Matmuls of float8_e4m3fn arrays (FP8): what `dense` and the ops that contain it do with such arguments."""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import common
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, plans, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import dense as tuning


def is_float8(x: Any) -> bool:
    """Returns whether an argument is a float8_e4m3fn array."""
    return getattr(x, "dtype", None) == reference.FLOAT8


def check_scale(op: str, name: str, scale: Any) -> float | None:
    """Checks an optional scale of activations, a positive number."""
    return None if scale is None else checks.check_number(op, name, scale, positive=True)


def check_unused(op: str, x: Array, **options: Any) -> None:
    """Raises a ValueError if an option for float8 arguments is given although `x` is not float8."""
    for name, option in options.items():
        if option is not None:
            raise ValueError(f"{op}: {name} is for x of float8_e4m3fn, got x of {x.dtype}")


def check_result(op: str, dtype: DTypeLike | None) -> Any:
    """Checks the dtype of the result of a matmul of float8; None is bfloat16."""
    dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{op}: dtype must be bfloat16 or float16 (float8_scale makes it float8), got {dtype}")
    return dtype


def as_residual(op: str, residual: Any, shape: tuple[int, ...]) -> Array:
    """Checks the residual of an op with float8 arrays: bfloat16 or float16, of the given shape."""
    residual = checks.as_float(op, "residual", residual)
    checks.check_shape(op, "residual", residual, shape)
    if residual.dtype not in (jnp.bfloat16, jnp.float16):
        raise TypeError(f"{op}: residual must be bfloat16 or float16 with x of float8_e4m3fn, got {residual.dtype}")
    return residual


def check_kernel_scale(op: str, name: str, scale: Any, width: int) -> Array:
    """Checks the scales of the columns of a float8 kernel, `[F]` of any float dtype."""
    if scale is None:
        raise ValueError(f"{op}: a kernel of float8_e4m3fn needs {name} of shape ({width},), got None")
    checked = checks.as_vector(op, name, scale, width)
    assert checked is not None
    return checked


def without_gradient(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays whose derivative raises a NotImplementedError that names the op."""
    run = jax.custom_jvp(function)

    @run.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{op}: there is no gradient with float8_e4m3fn; train in 16 bits, then quantize")

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a dense layer of float8 arrays. It has no gradient."""

    op: str
    activation: str | None
    x_scale: float
    dtype: Any  # of the result, unless `float8_scale` makes it float8
    float8_scale: float | None


def plan_of(
    op: str, x: Array, kernel: Array, kernel_scale: Array, bias: Array | None, residual: Array | None = None, *,
    activation: str | None = None, x_scale: float = 1.0, dtype: Any, float8_scale: float | None = None,
    implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backend and configuration for arrays of these shapes and dtypes, in two dimensions."""
    plan = functools.partial(
        Plan, op=op, activation=activation, x_scale=x_scale, dtype=dtype, float8_scale=float8_scale
    )
    sizes, device = (x.shape[0], kernel.shape[0], kernel.shape[1]), dispatch.device()
    reason = common.unsupported_float8(x, kernel, kernel_scale=kernel_scale, bias=bias, residual=residual)
    mosaic = reason or support.float8_dense_unsupported(x, kernel, bias, residual, kernel_scale)
    choice = dispatch.choose(op, implementation, {"mosaic_gpu": mosaic, "triton": reason})
    backend, why = choice.name, choice.why
    if backend == "xla" or 0 in sizes:
        return plan(why=why)
    if implementation is None and backend == "mosaic_gpu":
        backend = tuning.float8_implementation(*sizes)
        why = "" if backend == choice.name else "mosaic_gpu: slower at this size"
    if backend == "mosaic_gpu":
        itemsize = jnp.dtype(dtype).itemsize if float8_scale is None else 1
        config: Any = tuning.float8_dense_mosaic(*sizes, activation, itemsize, device, residual is not None)
    else:
        config = tuning.dense(*sizes, 1, device)
    return plan(forward=Pass(backend, config), **plans.of_choice(choice) | {"why": why})


def rows_of(x: Any) -> Any:
    """Returns an array or None with all axes but the last one flattened."""
    return None if x is None else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Clipped(NamedTuple):
    """Counts of the float8 input of one matmul, see `count_clipped`."""

    op: str  # the public function
    shape: tuple[int, ...]  # of the input, [M, K]
    clipped: int  # elements of the input at 448 or -448


_counting: contextvars.ContextVar[list[tuple[str, Array, Array]] | None] = contextvars.ContextVar(
    "counting", default=None
)


def count_clipped(fn: Callable[..., Any], *args: Any) -> list[Clipped]:
    """Counts the clipped numbers in the inputs of all matmuls of float8 that `fn(*args)` computes, for debugging.

    A quantized model clips its activations at 448 times `Float8Recipe.activation_scale`::

        jaxft.models.count_clipped(model, input_ids, attention_mask)

    Args:
      fn: a function, such as a model. Its matmuls must not be inside of `jax.jit` or another transformation. Other
        arguments of a model, such as `max_seqlen`, can be bound by a lambda.
      *args: arrays.

    Returns:
      A `Clipped` for each matmul, in the order of the calls. An element counts if it is 448 or -448, in padding too.

    Raises:
      ValueError: no matmul of float8 is seen, because `fn` has none or is transformed.
    """

    def counted(*args: Any) -> list[Array]:
        seen: list[tuple[str, Array, Array]] = []
        token = _counting.set(seen)
        try:
            fn(*args)
        finally:
            _counting.reset(token)
        names.extend((op, x.shape) for op, x, _ in seen)
        return [count for *_, count in seen]

    names: list[tuple[str, tuple[int, ...]]] = []
    try:
        counts = jax.jit(counted)(*args)
    except jax.errors.UnexpectedTracerError as error:  # the counts are inside of the transformation
        raise ValueError("count_clipped: fn must not have its matmuls inside of jax.jit or the like") from error
    if not counts:
        raise ValueError(
            "count_clipped: fn must have matmuls of float8_e4m3fn, and not inside of jax.jit; none is seen"
        )
    return [Clipped(*named, int(count)) for named, count in zip(names, counts, strict=True)]


def note_clipped(op: str, x: Array) -> None:
    """Adds the number of clipped elements of a matmul's input to the list of `count_clipped`, if that runs."""
    if (seen := _counting.get()) is not None:
        largest = jnp.abs(x.astype(jnp.float32)) >= reference.LARGEST_FLOAT8
        seen.append((op, rows_of(x), jnp.sum(largest, dtype=jnp.int32)))


def run(
    x: Array, kernel: Array, kernel_scale: Array, bias: Array | None, residual: Array | None, plan: Plan
) -> Array:  # fmt: skip
    """Computes the layer. x and residual have any number of axes of rows."""
    note_clipped(plan.op, x)
    return _run_jit(x, kernel, kernel_scale, bias, residual, plan)


@functools.partial(jax.jit, static_argnums=5)
def _run_jit(x, kernel, kernel_scale, bias, residual, plan):
    options = {
        "activation": plan.activation, "x_scale": plan.x_scale, "dtype": plan.dtype, "float8_scale": plan.float8_scale,
    }  # fmt: skip

    def plain(x, kernel, kernel_scale, bias, residual):
        return reference.float8_dense(x, kernel, kernel_scale, bias, residual, **options)

    def by_kernel(_, x, kernel, kernel_scale, bias, residual):
        shape = *x.shape[:-1], kernel.shape[1]
        x, residual = rows_of(x), rows_of(residual)
        if plan.forward.backend == "triton":
            (y,) = triton.forward(
                x, kernel, bias, residual, kernel_scale=kernel_scale, precision="tf32", config=plan.forward.config,
                interpret=plan.interpret, **options,
            )  # fmt: skip
            return y.reshape(shape)
        from jaxft.kernels.mosaic_gpu import dense as mosaic

        (y,) = mosaic.forward(
            x, kernel, bias, residual, kernel_scale=kernel_scale, config=plan.forward.config, **options
        )
        _, _, y = transforms.vary_alike(x, kernel, y)  # see `dense._one_kernel`
        return y.reshape(shape)

    def by_parts(over, *arrays):
        return reference.float8_dense(*arrays, over=over, **options)

    ndim = x.ndim

    def legal(shapes):
        sizes = math.prod(shapes[0][-ndim:-1]), shapes[0][-1]
        rows, columns = (jax.ShapeDtypeStruct(shape, reference.FLOAT8) for shape in (sizes, shapes[1][-2:]))
        return support.float8_dense_unsupported(rows, columns, None, None, None) is None

    arrays = transforms.vary_alike(x, kernel, kernel_scale, bias, residual)
    rows = sharding.rows_of(x.shape[:-1], dropout=False)
    rule = Rule(
        "dense", f"{rows} k, k f, f, f, {rows} f", f"{rows} f",
        legal if plan.forward.backend == "mosaic_gpu" else None, contracted={"k": by_parts},
    )  # fmt: skip
    function = plain if plan.forward.backend == "xla" else transforms.mappable(by_kernel, plain, plan, rule)
    return without_gradient(plan.op, function)(*arrays)
