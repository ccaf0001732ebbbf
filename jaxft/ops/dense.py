"""Dense layers: the op `dense`, activation(x @ kernel + bias) + residual."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import bias_activation, gated_activation
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, float8, matrix_view, plans, sharding, transforms
from jaxft.ops.matrix_view import MatrixView
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import dense as tuning
from jaxft.tuning import rows as tuning_rows


def _axes(given: dict[str, Any]) -> str:
    """Returns the axes of a call of `dense` (see `sharding.over_explicit_axes`)."""
    if getattr(given["kernel"], "ndim", 2) == 3:
        return "x: ... k, kernel: k P f, bias: P f -> ... P f"
    columns, out = ("f", "f") if given.get("gate") is None else ("F", "G")  # the halves of a gate are far apart
    return f"x: ... k, kernel: k {columns}, bias: {columns}, residual: ... {out}, kernel_scale: {columns} -> ... {out}"


@sharding.over_explicit_axes(_axes)
def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    gate: str | None = None,
    residual: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    kernel_scale: Array | None = None,
    x_scale: float | None = None,
    float8_scale: float | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """Computes a dense layer with its epilogue: bias, activation and residual.

    Equivalent to::

        jax.nn.gelu(x @ kernel + bias, approximate=False) + residual  # activation="gelu"
        gated_activation(x @ kernel, bias, activation=activation, gate=gate) + residual  # with a gate
        activation(x_scale * kernel_scale * (x @ kernel) + bias) + residual  # of float8, see below

    Args:
      x: `[..., K]`, float32, float16, bfloat16 or float8_e4m3fn. The matmul accumulates in float32.
      kernel: `[K, F]` of the dtype of `x`. The kernels of float8 read it as `[F, K]`: store that array and pass its
        transpose, which inside of `jax.jit` is no copy. Without an activation and a residual, also `[K, P, F]` in 32 or
        16 bits: P parts that devices can divide alike, such as the heads of packed queries, keys and values.
      bias: `[F]` of any float dtype, or None. `[P, F]` if the kernel has parts.
      activation: None, "gelu" (with the error function), "gelu_tanh", "relu", "silu" or "tanh".
      gate: None, or the half of the columns of `kernel`, "first" or "second", to which the activation is applied. The
        other half multiplies the result, which has `F / 2` columns then. A gate needs an activation.
      residual: the shape of the result and the dtype of `x`, added last, or None.
      precision: precision of the matmul, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.
      kernel_scale: `[F]` of any float dtype, the scales of the columns of a float8 kernel. It is required with float8.
      x_scale: the number by which a float8 `x` stands for smaller or larger numbers. None is 1.
      float8_scale: a number that makes the result of float8 arrays float8_e4m3fn: the result divided by that number,
        clipped to 448. NaN stays NaN. None gives a result of `dtype`.
      dtype: bfloat16 or float16, the dtype of the result of float8 arrays and of their residual. None is bfloat16.
      implementation: None picks the fastest (see `jaxft.ops`). `"triton"` and `"mosaic_gpu"` (Hopper only) run the
        whole layer as one kernel; `"xla"` leaves fusion to XLA. In float32, `"mosaic_gpu"` computes in TF32, takes no
        residual and transposes `kernel` first. It has no gate in float32, and none of the two has a gate in float8.

    Returns:
      `[..., F]` of the dtype of `x`; `[..., F / 2]` with a gate, `[..., P, F]` with parts.

    Gradients: for x, kernel, bias and residual. A gradient with float8 arrays raises. The backward pass of an
    activation uses the result of the matmul, which is kept in the dtype of `x`. `"mosaic_gpu"` keeps the sum x @ kernel
    + bias instead, also in the dtype of `x`.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Accuracy: bias and residual are added in float32. There is one exception: if XLA computes the matmul and there is
    neither an activation nor a residual, XLA adds the bias in its epilogue, in the dtype of `x`. In TF32,
    `"mosaic_gpu"` truncates `x` where XLA rounds. Its error is 1.6 times as large, and its results are 0.04 % smaller
    on average.

    Source: the GEMMs of FasterTransformer v1.0 with `add_bias_act` in the epilogue.
    """
    op = "dense"
    kernel, view = matrix_view.split(kernel)
    x, kernel = checks.as_factors(op, x, kernel, with_parts=True)
    parts = kernel.shape[1:]
    if len(parts) == 2:
        if activation is not None or residual is not None or float8.is_float8(x):
            raise ValueError(
                f"{op}: a kernel with parts, {kernel.shape}, takes no activation, residual or float8 arrays"
            )
        kernel = kernel.reshape(kernel.shape[0], math.prod(parts))
        if bias is not None:
            bias = checks.as_float(op, "bias", bias)
            checks.check_shape(op, "bias", bias, parts)
            bias = bias.reshape(kernel.shape[1])
    scales = {"x_scale": float8.check_scale(op, "x_scale", x_scale)}
    scales["float8_scale"] = float8.check_scale(op, "float8_scale", float8_scale)
    bias = checks.as_vector(op, "bias", bias, kernel.shape[1])
    checks.check_activation(op, activation, optional=True)
    rows, width = math.prod(x.shape[:-1]), checks.gated_width(op, gate, kernel)
    if gate is not None and activation is None:
        raise ValueError(f"{op}: a gate needs an activation, got None")
    if float8.is_float8(x):
        return _float8(op, x, kernel, bias, residual, kernel_scale, scales, dtype, activation, gate, implementation)
    float8.check_unused(op, x, kernel_scale=kernel_scale, **scales, dtype=dtype)
    if residual is not None:
        residual = checks.as_term(op, "residual", residual, (*x.shape[:-1], width), x)
    precision = checks.check_precision(op, precision, x.dtype)
    arrays = (x.reshape(rows, x.shape[-1]), kernel, bias, None if residual is None else residual.reshape(rows, width))
    plan = plan_of(op, *arrays, activation, precision, implementation, gate)
    plans.record(op, arrays, plan)
    if len(parts) == 2:  # so that devices can divide each part
        kernel, bias = kernel.reshape(kernel.shape[0], *parts), None if bias is None else bias.reshape(parts)
    return run(x, kernel, bias, residual, plan, view)


def _float8(op, x, kernel, bias, residual, kernel_scale, scales, dtype, activation, gate, implementation):
    """Computes the layer of float8 arrays."""
    depth, width = kernel.shape
    if gate is not None:
        raise NotImplementedError(f"{op}: there is no gate with float8_e4m3fn arrays, got gate={gate!r}")
    kernel_scale = float8.check_kernel_scale(op, "kernel_scale", kernel_scale, width)
    rows, dtype = math.prod(x.shape[:-1]), float8.check_result(op, dtype)
    if residual is not None:
        unit: Any = jax.ShapeDtypeStruct((), dtype)
        residual = checks.as_term(op, "residual", residual, (*x.shape[:-1], width), unit)
    arrays = x.reshape(rows, depth), kernel, kernel_scale, bias, float8.rows_of(residual)
    plan = float8.plan_of(
        op, *arrays, activation=activation, x_scale=scales["x_scale"] or 1.0, float8_scale=scales["float8_scale"],
        dtype=dtype, implementation=implementation,
    )  # fmt: skip
    plans.record(op, arrays, plan)
    return float8.run(x, kernel, kernel_scale, bias, residual, plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a dense layer. "triton" and "mosaic_gpu" are one kernel, "xla+triton" XLA's matmul and another kernel.

    The other kernel is the one of `bias_activation` or, with a gate, of `gated_activation`. The `backward` pass is the
    kernel for the gradients of activation and bias. The matmuls of the gradient are XLA's.
    """

    activation: str | None
    precision: Any
    kernel_precision: str  # precision of float32 matmuls in kernels, "tf32" or "float32"
    gate: str | None = None
    plain: bool = False  # plain jnp, which JAX differentiates
    first_row: int | None = None  # of a `MatrixView`, whose `stack` is the kernel then

    @property
    def is_one_kernel(self) -> bool:
        """Returns whether one kernel computes the result, matmul included."""
        return self.forward.backend in ("triton", "mosaic_gpu")


def plan_of(
    op: str, x: Array, kernel: Array, bias: Array | None, residual: Array | None, activation: str | None,
    precision: Any, implementation: str | None, gate: str | None = None,
) -> Plan:  # fmt: skip
    """Chooses backends and configurations for arrays of these shapes and dtypes, in two dimensions."""
    sizes = rows, _, width = x.shape[0], x.shape[1], kernel.shape[1]
    itemsize, kernel_precision, device = x.dtype.itemsize, dispatch.matmul_precision(precision), dispatch.device()
    plan = functools.partial(
        Plan, activation=activation, precision=precision, kernel_precision=kernel_precision, gate=gate
    )
    reason = triton.unsupported(x=x, kernel=kernel, bias=bias, residual=residual)
    # Mosaic GPU takes none of the dtypes, shardings and symbolic shapes that Triton refuses.
    reasons = {"triton": reason}
    if reason is None or implementation is not None:
        mosaic_reason = reason or support.dense_unsupported(x, kernel, bias, residual, kernel_precision, gate)
        reasons = {"mosaic_gpu": mosaic_reason} | reasons
    choice = dispatch.choose(op, implementation, reasons)
    if choice.name == "xla" or 0 in sizes:
        return plan(plain=True, why=choice.why)

    backend, why = choice.name, choice.why
    if implementation is None:
        full = itemsize > 2 and kernel_precision == "float32"
        if gate is not None:
            backend = tuning.gated_implementation(*sizes, itemsize, device)
        else:
            backend = tuning.dense_implementation(*sizes, activation, itemsize, device, residual is not None, full)
        if backend == "mosaic_gpu" != choice.name:
            # Mosaic GPU would be fastest but does not support these arguments: take the next best.
            backend = tuning.without_mosaic(*sizes, None if gate else activation, itemsize, device)
        legal = ("mosaic_gpu", "triton") if choice.name == "mosaic_gpu" else ("triton",)
        why = "; ".join([*filter(None, [why]), *(f"{name}: slower at this size" for name in legal if name != backend)])
    if backend == "xla" and (residual is not None if activation else bias is None):
        return plan(plain=True, why=why)  # no kernel of jaxft would take part

    after, after_backward = tuning_rows.bias_activation, tuning_rows.bias_activation_backward
    if gate is not None:
        after, after_backward, width = tuning_rows.gated_activation, tuning_rows.gated_activation_backward, width // 2
    config: Any = None
    if backend == "mosaic_gpu":
        config = tuning.dense_mosaic(*sizes, activation, itemsize, device, residual is not None, gate is not None)
    elif backend == "triton":
        config = tuning.dense(*sizes, itemsize, device)
    elif activation is not None and not tuning.splits_few_rows(rows, itemsize, kernel_precision):
        backend, config = "xla+triton", after(rows, width, itemsize, device)
    backward = plans.XLA
    if activation is None and bias is not None:
        backward = Pass("triton")  # the sum over the rows
    elif activation is not None and tuning.epilogue_gradient_is_faster(backend, rows, itemsize):
        backward = Pass("triton", after_backward(rows, width, itemsize, device))
    return plan(forward=Pass(backend, config), backward=backward, **plans.of_choice(choice) | {"why": why})


def run(
    x: Array, kernel: Array, bias: Array | None, residual: Array | None, plan: Plan, view: MatrixView | None = None
) -> Array:  # fmt: skip
    """Computes the layer. x has any axes of rows. If nothing follows the bias, kernel and bias have any of columns.

    If the kernel is a `view`, Triton reads it in place.
    """
    if plan.plain:
        return _reference(x, kernel, bias, residual, plan.activation, plan.gate, plan.precision)
    if view is not None and plan.forward.backend == "triton":
        kernel, plan = view.stack(), dataclasses.replace(plan, first_row=view.first)
    return _kernels_jit(x, kernel, bias, residual, plan)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _reference(x, kernel, bias, residual, activation, gate, precision):
    def plain(x, kernel, bias, residual):
        return reference.dense(
            x, kernel, bias, activation=activation, gate=gate, residual=residual, precision=precision
        )

    # XLA recognises a matmul with a bias in its epilogue only in two dimensions.
    has_epilogue = bias is not None and kernel.ndim == 2 and dispatch.platform() == "cuda"
    return (_in_two_dimensions(plain) if has_epilogue else plain)(x, kernel, bias, residual)


def _in_two_dimensions(layer):
    """Returns a function of the arrays of a layer that flattens their rows and columns, and unflattens the results."""

    def run(x, kernel, bias, residual):
        parts = kernel.shape[1:-1]
        rows, tokens = math.prod(x.shape[:-1]), x.shape[:-1]
        found = layer(
            x.reshape(rows, x.shape[-1]), kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:])),
            None if bias is None else bias.reshape(math.prod(kernel.shape[1:])),
            None if residual is None else residual.reshape(rows, residual.shape[-1]),
        )  # fmt: skip
        return jax.tree.map(lambda y: y.reshape(*tokens, *parts, y.shape[1] // math.prod(parts)), found)

    return run


def matrix(x: Array, kernel: Array, plan: Any) -> Array:
    """Returns the matrix that multiplies x: the kernel, or the rows of a `MatrixView` in a joined array."""
    return kernel if plan.first_row is None else kernel[plan.first_row : plan.first_row + x.shape[-1]]


def product_carrier(x: Array, kernel: Array, plan: Any) -> Array:
    """Returns a carrier of x @ kernel, to which a float32 gradient can be given."""
    # The plan knows whether this is a CPU. The device is not asked: a gradient may be traced where it is not known.
    product = functools.partial(
        reference.matmul if plan.interpret else functools.partial(jnp.tensordot, axes=1), precision=plan.precision
    )
    return transforms.carrier(reference.wide, transforms.carrier(product, x, kernel))


@functools.partial(jax.jit, static_argnums=4)
def _kernels_jit(x, kernel, bias, residual, plan):
    carriers = product_carrier(x, matrix(x, kernel, plan), plan), *transforms.wide_carriers(bias, residual)
    *arrays, of_product, of_bias, of_residual = transforms.vary_alike(x, kernel, bias, residual, *carriers)
    return kernels(*arrays, (of_product, of_bias, of_residual), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def kernels(x, kernel, bias, residual, carriers, plan):
    """Computes the layer with the kernels of the plan, and defines its gradient.

    The gradient goes to the `carriers` (see `transforms.carrier`) of the matmul, the bias and the residual.
    """
    del carriers

    @_in_two_dimensions
    def by_kernels(x, kernel, bias, residual):
        if not plan.is_one_kernel:
            return _epilogue(reference.matmul(x, kernel, plan.precision), bias, residual, plan, in_place=True)
        return _one_kernel(x, kernel, bias, residual, plan)[0]

    def plain(x, kernel, bias, residual):
        kernel = matrix(x, kernel, plan)
        return _reference(x, kernel, bias, residual, plan.activation, plan.gate, plan.precision)

    run = transforms.mappable(lambda _, *arrays: by_kernels(*arrays), plain, plan, _rule(plan, x, kernel))
    return run(x, kernel, bias, residual)


def _names(plan, x, kernel):
    """Returns the names of the axes of rows, of columns, and of the columns of the result, for a rule."""
    parts = "".join(f"C{axis} " for axis in range(kernel.ndim - 2))
    # The halves of a gate are far from each other.
    columns, out = (f"{parts}f", f"{parts}f") if plan.gate is None else ("F", "G")
    return sharding.rows_of(x.shape[:-1], dropout=False), columns, out


def matrix_of(shape: Sequence[int], ndim: int, dtype: Any, *, columns: bool = False) -> jax.ShapeDtypeStruct:
    """Returns the shape of a shard as a matrix, of rows or else of columns.

    The array has `ndim` axes. Axes before them belong to a vmap and do not count.
    """
    own = tuple(shape[-ndim:])
    sizes = (own[0], math.prod(own[1:])) if columns else (math.prod(own[:-1]), own[-1])
    return jax.ShapeDtypeStruct(sizes, dtype)


def _rule(plan, x, kernel, also=None):
    """Returns the rule of a layer, or of a layer whose kernel also returns what a gradient needs."""
    rows, columns, out = _names(plan, x, kernel)
    dtype, x_ndim, kernel_ndim = x.dtype, x.ndim, kernel.ndim
    if plan.first_row is not None:  # devices divide the rows of x only: other matrices lie in the same array
        return Rule("dense", f"{rows} K, J F, F, {rows} G", f"{rows} G")

    def by_parts(over, x, kernel, bias=None, residual=None):
        y = jax.lax.psum(reference.matmul(x, kernel, plan.precision), over)
        out = reference.dense_epilogue(y, bias, plan.activation, residual, plan.gate)
        if also is None:
            return out
        return out, y if also == "matmul" or bias is None else (y + bias).astype(y.dtype)

    def legal(shapes):
        own = matrix_of(shapes[0], x_ndim, dtype), matrix_of(shapes[1], kernel_ndim, dtype, columns=True)
        return support.dense_unsupported(*own, None, None, plan.kernel_precision, plan.gate) is None

    # Derivatives in 8 bits come from one kernel only.
    depth = "K" if also == "derivative" else "k"
    return Rule(
        "dense", f"{rows} {depth}, {depth} {columns}, {columns}, {rows} {out}", f"{rows} {out}, {rows} {columns}",
        legal if plan.forward.backend == "mosaic_gpu" else None, contracted={"k": by_parts},
    )  # fmt: skip


def _one_kernel(x, kernel, bias, residual, plan, also=None):
    """Computes the layer by one kernel. With `also`, the kernel also returns what a gradient needs.

    From Triton this is the "matmul" x @ kernel. From Mosaic GPU it is the "sum" x @ kernel + bias, or the "derivative"
    of the activation.
    """
    config = plan.forward.config if also is None else plan.with_gradient.config
    if plan.forward.backend == "triton":
        found = triton.forward(
            x, kernel, bias, residual, activation=plan.activation, gate=plan.gate, precision=plan.kernel_precision,
            config=config, interpret=plan.interpret, also_product=also == "matmul", first_row=plan.first_row or 0,
        )  # fmt: skip
        return tuple(found)
    from jaxft.kernels.mosaic_gpu import dense as mosaic

    results = mosaic.forward(
        x, kernel, bias, residual, activation=plan.activation, config=config, also=also, gate=plan.gate
    )
    # Inside a shard_map, results of Mosaic kernels lack the mesh axes over which they vary.
    return tuple(transforms.vary_alike(x, kernel, bias, residual, *results)[4:])


def with_derivative(x: Array, kernel: Array, bias: Array | None, plan: Plan) -> tuple[Array, Array]:
    """Computes the layer by Mosaic GPU, and the derivatives of the activation, which have no gradient themselves."""

    def plain(x, kernel, bias):
        return (reference.dense(x, kernel, bias, activation=plan.activation, precision=plan.precision),)

    def fused(_, *arrays):
        return _in_two_dimensions(functools.partial(_one_kernel, plan=plan, also="derivative"))(*arrays, None)

    rule = _rule(plan, x, kernel, also="derivative")
    return transforms.with_plain_gradient(fused, plain, plan, rule, saves=1)(x, kernel, bias)


def _epilogue(y, bias, residual, plan, in_place):
    """Computes activation(y + bias) + residual of the result `y` of a matmul.

    With `in_place` and without a gate, the result takes the memory of `y`.
    """
    if plan.forward.backend == "xla":
        return reference.dense_epilogue(y, bias, plan.activation, residual, plan.gate)
    options = {"activation": plan.activation, "config": plan.forward.config, "interpret": plan.interpret}
    if plan.gate is not None:
        return gated_activation.forward(y, bias, gate=plan.gate, **options)
    return bias_activation.forward(y, bias, in_place=in_place, **options)


def _fwd(x, kernel, bias, residual, carriers, plan):
    kernel, plan = matrix(x, kernel, plan), dataclasses.replace(plan, first_row=None)
    if plan.activation is not None:
        saves_sum = plan.forward.backend == "mosaic_gpu"

        def plain(x, kernel, bias, residual):
            inner, outer = (bias, None) if saves_sum else (None, bias)
            y = reference.dense(x, kernel, inner, precision=plan.precision)
            return reference.dense_epilogue(y, outer, plan.activation, residual, plan.gate), y

        @_in_two_dimensions
        def fused(x, kernel, bias, residual):
            if plan.is_one_kernel:
                return _one_kernel(x, kernel, bias, residual, plan, also="sum" if saves_sum else "matmul")
            y = reference.matmul(x, kernel, plan.precision)
            return _epilogue(y, bias, residual, plan, in_place=False), y

        rule = _rule(plan, x, kernel, also="sum" if saves_sum else "matmul")
        run = transforms.with_plain_gradient(lambda _, *arrays: fused(*arrays), plain, plan, rule)
        out, y = run(x, kernel, bias, residual)
        return out, (x, kernel, bias, residual, y)
    return kernels(x, kernel, bias, residual, carriers, plan), (x, kernel, bias, residual, None)


def _bwd(plan, saved, d_out):
    x, kernel, bias, residual, y = saved
    if plan.forward.backend == "mosaic_gpu" and bias is not None:
        bias = jnp.zeros_like(bias)  # y includes it

    dy, d_bias = epilogue_gradient(d_out, y, bias, x, kernel, plan)
    d_residual = None if residual is None else reference.wide(d_out)
    return None, None, None, None, (reference.wide(dy), d_bias, d_residual)


def epilogue_gradient(
    d_out: Array, y: Array | None, bias: Array | None, x: Array, kernel: Array, plan: Plan
) -> tuple[Array, Array | None]:
    """Computes the gradients of y = x @ kernel and bias through activation(y + bias)."""
    rows, columns, out = _names(plan, x, kernel)
    if plan.activation is None:
        if bias is None:
            return d_out, None
        first = x.ndim - 1  # of the axes of columns

        def sums(_, d):
            own = d.shape[first:]
            return bias_activation.sum_of_rows(d.reshape(-1, math.prod(own)), interpret=plan.interpret).reshape(own)

        def plain_sums(d):
            return jnp.sum(d, axis=tuple(range(first)), dtype=jnp.float32)

        rule = Rule("dense", f"{rows} {columns}", columns)
        return d_out, transforms.with_plain_gradient(sums, plain_sums, plan, rule)(d_out)

    def plain(d_out, y, bias, *_):
        def run(y, bias):
            return reference.dense_epilogue(y, bias, plan.activation, None, plan.gate)

        d_out, *floats = jax.tree.map(reference.wide, (d_out, y, bias))
        return jax.vjp(run, *floats)[1](d_out)

    if plan.backward.backend == "xla":
        return plain(d_out, y, bias)

    def fused(shared, d_out, y, bias, *_):
        both = (y, shared[3] and shared[4]), (bias, shared[2])
        options = {
            "activation": plan.activation, "config": plan.backward.config, "interpret": plan.interpret,
            "dtypes": [transforms.gradient_dtype(*of_one) for of_one in both],
        }  # fmt: skip
        matrices = d_out.reshape(-1, d_out.shape[-1]), y.reshape(-1, y.shape[-1])
        if plan.gate is not None:
            dy, d_bias = gated_activation.backward(*matrices, bias, gate=plan.gate, **options)
        else:
            dy, d_bias = bias_activation.backward(*matrices, bias, **options)
        return jax.tree.map(reference.wide, (dy.reshape(y.shape), d_bias))

    unread = f"{'_ ' * x.ndim}, _ _"
    rule = Rule("dense", f"{rows} {out}, {rows} {columns}, {columns}, {unread}", f"{rows} {columns}, {columns}")
    return transforms.with_plain_gradient(fused, plain, plan, rule)(d_out, y, bias, x, kernel)


kernels.defvjp(_fwd, _bwd)
