"""Dense layers: the op `dense`, activation(x @ kernel + bias) + residual."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxft import dispatch, reference
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import bias_activation, gated_activation
from jaxft.kernels.triton import dense as triton
from jaxft.ops import checks, float8, plans, sharding, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import dense as tuning
from jaxft.tuning import rows as tuning_rows


def _axes(given: dict[str, Any]) -> str:
    """Returns the axes of a call of `dense` (see `sharding.over_explicit_axes`)."""
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
        transpose, which inside of `jax.jit` is no copy.
      bias: `[F]` of any float dtype, or None.
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
      `[..., F]` of the dtype of `x`; `[..., F / 2]` with a gate.

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
    x, kernel = checks.as_factors(op, x, kernel)
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
    # In two dimensions, because XLA recognises a matmul with a bias in its epilogue only there.
    arrays = (x.reshape(rows, x.shape[-1]), kernel, bias, None if residual is None else residual.reshape(rows, width))
    plan = plan_of(op, *arrays, activation, precision, implementation, gate)
    plans.record(op, arrays, plan)
    return run(*arrays, plan).reshape(*x.shape[:-1], width)


def _float8(op, x, kernel, bias, residual, kernel_scale, scales, dtype, activation, gate, implementation):
    """Computes the layer of float8 arrays."""
    depth, width = kernel.shape
    if gate is not None:
        raise NotImplementedError(f"{op}: there is no gate with float8_e4m3fn arrays, got gate={gate!r}")
    kernel_scale = float8.check_kernel_scale(op, "kernel_scale", kernel_scale, width)
    rows, dtype = math.prod(x.shape[:-1]), float8.check_result(op, dtype)
    if residual is not None:
        unit: Any = jax.ShapeDtypeStruct((), dtype)
        residual = checks.as_term(op, "residual", residual, (*x.shape[:-1], width), unit).reshape(rows, width)
    arrays = x.reshape(rows, depth), kernel, kernel_scale, bias, residual
    plan = float8.plan_of(
        op, *arrays, activation=activation, x_scale=scales["x_scale"] or 1.0, float8_scale=scales["float8_scale"],
        dtype=dtype, implementation=implementation,
    )  # fmt: skip
    plans.record(op, arrays, plan)
    return float8.run(*arrays, plan).reshape(*x.shape[:-1], width)


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


def run(x: Array, kernel: Array, bias: Array | None, residual: Array | None, plan: Plan) -> Array:
    """Computes the layer of arrays in two dimensions."""
    if plan.plain:
        return _reference(x, kernel, bias, residual, plan.activation, plan.gate, plan.precision)
    return _kernels_jit(x, kernel, bias, residual, plan)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _reference(x, kernel, bias, residual, activation, gate, precision):
    return reference.dense(x, kernel, bias, activation=activation, gate=gate, residual=residual, precision=precision)


def product_carrier(x: Array, kernel: Array, plan: Any) -> Array:
    """Returns a carrier of x @ kernel, to which a float32 gradient can be given."""
    # The plan knows whether this is a CPU. The device is not asked: a gradient may be traced where it is not known.
    product = functools.partial(reference.matmul if plan.interpret else jnp.matmul, precision=plan.precision)
    return transforms.carrier(reference.wide, transforms.carrier(product, x, kernel))


@functools.partial(jax.jit, static_argnums=4)
def _kernels_jit(x, kernel, bias, residual, plan):
    carriers = product_carrier(x, kernel, plan), *transforms.wide_carriers(bias, residual)
    *arrays, of_product, of_bias, of_residual = transforms.vary_alike(x, kernel, bias, residual, *carriers)
    return kernels(*arrays, (of_product, of_bias, of_residual), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def kernels(x, kernel, bias, residual, carriers, plan):
    """Computes the layer with the kernels of the plan, and defines its gradient.

    The gradient goes to the `carriers` (see `transforms.carrier`) of the matmul, the bias and the residual.
    """
    del carriers

    def by_kernels(_, x, kernel, bias, residual):
        if not plan.is_one_kernel:
            return _epilogue(reference.matmul(x, kernel, plan.precision), bias, residual, plan, in_place=True)
        return _one_kernel(x, kernel, bias, residual, plan)[0]

    def plain(x, kernel, bias, residual):
        return _reference(x, kernel, bias, residual, plan.activation, plan.gate, plan.precision)

    return transforms.mappable(by_kernels, plain, plan, _rule(plan, x, kernel))(x, kernel, bias, residual)


def _rule(plan, x, kernel, also=None):
    """Returns the rule of a layer, or of a layer whose kernel also returns what a gradient needs."""
    # The halves of a gate are far from each other.
    columns, out = ("f", "f") if plan.gate is None else ("F", "G")
    dtype = x.dtype

    def by_parts(over, x, kernel, bias=None, residual=None):
        y = jax.lax.psum(reference.matmul(x, kernel, plan.precision), over)
        out = reference.dense_epilogue(y, bias, plan.activation, residual, plan.gate)
        if also is None:
            return out
        return out, y if also == "matmul" or bias is None else (y + bias).astype(y.dtype)

    def legal(shapes):
        rows, columns = (jax.ShapeDtypeStruct(shape[-2:], dtype) for shape in shapes[:2])
        return support.dense_unsupported(rows, columns, None, None, plan.kernel_precision, plan.gate) is None

    # Derivatives in 8 bits come from one kernel only.
    depth = "K" if also == "derivative" else "k"
    return Rule(
        "dense", f"r {depth}, {depth} {columns}, {columns}, r {out}", f"r {out}, r {columns}",
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
            config=config, interpret=plan.interpret, also_product=also == "matmul",
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

    def fused(_, x, kernel, bias):
        return _one_kernel(x, kernel, bias, None, plan, also="derivative")

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
    if not plan.is_one_kernel:
        y = reference.matmul(x, kernel, plan.precision)
        run = transforms.with_plain_gradient(
            lambda _, y, bias, residual: _epilogue(y, bias, residual, plan, in_place=False),
            lambda y, bias, residual: reference.dense_epilogue(y, bias, plan.activation, residual, plan.gate),
            plan,
            Rule("dense", "r f, f, r f", "r f") if plan.gate is None else Rule("dense", "r F, F, r G", "r G"),
        )
        return run(y, bias, residual), (x, kernel, bias, residual, None if plan.activation is None else y)
    if plan.activation is not None:
        saves_sum = plan.forward.backend == "mosaic_gpu"

        def plain(x, kernel, bias, residual):
            inner, outer = (bias, None) if saves_sum else (None, bias)
            y = reference.dense(x, kernel, inner, precision=plan.precision)
            return reference.dense_epilogue(y, outer, plan.activation, residual, plan.gate), y

        def fused(_, x, kernel, bias, residual):
            return _one_kernel(x, kernel, bias, residual, plan, also="sum" if saves_sum else "matmul")

        rule = _rule(plan, x, kernel, also="sum" if saves_sum else "matmul")
        out, y = transforms.with_plain_gradient(fused, plain, plan, rule)(x, kernel, bias, residual)
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
    if plan.activation is None:
        if bias is None:
            return d_out, None
        total = transforms.with_plain_gradient(
            lambda _, x: bias_activation.sum_of_rows(x, interpret=plan.interpret),
            lambda x: jnp.sum(x, axis=0, dtype=jnp.float32),
            plan,
            Rule("dense", "r f", "f"),
        )
        return d_out, total(d_out)

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
        if plan.gate is not None:
            found = gated_activation.backward(d_out, y, bias, gate=plan.gate, **options)
        else:
            found = bias_activation.backward(d_out, y, bias, **options)
        return jax.tree.map(reference.wide, found)

    columns, out = ("f", "f") if plan.gate is None else ("F", "G")
    rule = Rule("dense", f"r {out}, r {columns}, {columns}, _ _, _ _", f"r {columns}, {columns}")
    return transforms.with_plain_gradient(fused, plain, plan, rule)(d_out, y, bias, x, kernel)


kernels.defvjp(_fwd, _bwd)
