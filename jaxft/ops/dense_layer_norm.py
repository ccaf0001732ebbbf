"""The op `dense_residual_layer_norm`: LN(dropout(x @ kernel + bias) + residual)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxft import dispatch, reference
from jaxft.dropout import dropout_seed
from jaxft.kernels.triton import dense as triton_dense
from jaxft.kernels.triton import layer_norm as triton_norm
from jaxft.ops import checks, dense, float8, layer_norm, matrix_view, plans, sharding, transforms
from jaxft.ops.matrix_view import MatrixView
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import dense as tuning
from jaxft.tuning import rows as tuning_rows

_Added = tuple[Array | None, Array | None]  # a bias and a residual


@sharding.over_explicit_axes(
    "x: ... k, kernel: k D, bias: D, residual: ... D, gamma: D, beta: D, kernel_scale: D -> ... D"
)
def dense_residual_layer_norm(
    x: Array,
    kernel: Array,
    bias: Array | None,
    residual: Array,
    gamma: Array | None,
    beta: Array | None,
    *,
    epsilon: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_sum: bool = False,
    precision: jax.lax.PrecisionLike = None,
    kernel_scale: Array | None = None,
    x_scale: float | None = None,
    float8_scale: float | None = None,
    implementation: str | None = None,
) -> Any:
    """Computes a dense layer, adds a residual and normalises the sum.

    Equivalent to::

        bias_residual_layer_norm(dense(x, kernel), bias, residual, gamma, beta, epsilon=epsilon)

    With many rows, the op runs as these two ops. With few rows, the tiles of the matmul occupy too few SMs. The matmul
    may then split the depth of each tile over several programs (split-K), and the LayerNorm kernel adds up the partial
    sums in float32. If XLA's own split-K matmul is faster, XLA runs the matmul and the LayerNorm.

    Args:
      x: `[..., K]`, float32, float16, bfloat16 or float8_e4m3fn. The matmul accumulates in float32.
      kernel: `[K, D]` of the dtype of `x`.
      bias: `[D]` of any float dtype, or None.
      residual: `[..., D]` of the dtype of `x`; bfloat16 or float16 if `x` is float8.
      gamma: `[D]` of any float dtype, or None for 1.
      beta: `[D]` of any float dtype, or None for 0.
      epsilon: added to the variance. (The default is FasterTransformer's, BERT's is 1e-12.)
      dropout_rate: probability of dropping an element, in [0, 1).
      dropout_rng: a JAX random key, required if the rate is not 0 (see `jaxft.ops`).
      return_sum: whether to also return the sum before the normalisation, for pre-norm models.
      precision: precision of the matmul, as in `jnp.matmul`. None follows `jax.default_matmul_precision`.
      kernel_scale: as for `dense`, for a float8 kernel.
      x_scale: as for `dense`, for a float8 `x`.
      float8_scale: None or, with a float8 `x`, a number that adds a result: the normalised array divided by that number
        in float8_e4m3fn, clipped to 448.
      implementation: None, "triton" or "xla" (see `jaxft.ops`).

    Returns:
      `[..., D]` of the dtype of `residual`. With `return_sum`, a pair of such arrays: (normalised, sum). With
      `float8_scale`, the float8 array follows.

    Gradients: for x, kernel, bias, residual, gamma and beta. Where a gradient is taken, the two ops run, also for the
    result. The result of the matmul is then rounded to the dtype of `x` before the sum.

    Determinism and errors: as for all ops (see `jaxft.ops`).

    Source: a GEMM of FasterTransformer v1.0 and the `add_bias_input_layernorm` after it.
    """
    op = "dense_residual_layer_norm"
    kernel, view = matrix_view.split(kernel)
    x, kernel = checks.as_factors(op, x, kernel)
    depth, width = kernel.shape
    scales = {"x_scale": float8.check_scale(op, "x_scale", x_scale)}
    scales["float8_scale"] = float8.check_scale(op, "float8_scale", float8_scale)
    if float8.is_float8(x):
        residual = float8.as_residual(op, residual, (*x.shape[:-1], width))
        kernel_scale = float8.check_kernel_scale(op, "kernel_scale", kernel_scale, width)
    else:
        float8.check_unused(op, x, kernel_scale=kernel_scale, **scales)
        residual = checks.as_term(op, "residual", residual, (*x.shape[:-1], width), x)
    bias, gamma, beta = checks.as_vectors(op, width, bias=bias, gamma=gamma, beta=beta)
    checks.check_flag(op, "return_sum", return_sum)
    options: dict[str, Any] = {
        "epsilon": checks.check_number(op, "epsilon", epsilon, positive=True),
        "dropout_rate": checks.check_dropout(op, dropout_rate, dropout_rng),
        "return_sum": bool(return_sum),
        "precision": checks.check_precision(op, precision, x.dtype),
    }
    rows = math.prod(x.shape[:-1])
    arrays = x.reshape(rows, depth), kernel, residual.reshape(rows, width), bias, gamma, beta
    if kernel_scale is not None:
        plan = float8_plan_of(
            op, *arrays, kernel_scale, x_scale=scales["x_scale"], float8_scale=scales["float8_scale"], **options,
            implementation=implementation,
        )  # fmt: skip
        plans.record(op, (*arrays[:2], kernel_scale, bias, arrays[2], gamma, beta), plan)
        rng = dropout_rng if plan.dropout_rate > 0.0 else None
        found = run_float8(x, kernel, residual, bias, gamma, beta, kernel_scale, rng, plan)
        return found if len(found) > 1 else found[0]
    plan = plan_of(op, *arrays, **options, implementation=implementation)
    plans.record(op, (*arrays[:2], bias, arrays[2], gamma, beta), plan)
    out = run(x, kernel, residual, bias, gamma, beta, dropout_rng if plan.dropout_rate > 0.0 else None, plan, view)
    return out if return_sum else out[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of `dense_residual_layer_norm`.

    A pass by "ops" has the plans of `dense` and `bias_residual_layer_norm`. A `forward` pass by "triton" is a split-K
    matmul and a LayerNorm that adds up the partial sums. A `forward` pass by "xla" is plain jnp.
    """

    epsilon: float
    dropout_rate: float
    return_sum: bool
    precision: Any
    kernel_precision: str  # precision of float32 matmuls in kernels, "tf32" or "float32"
    first_row: int | None = None  # of a `MatrixView`, whose `stack` is the kernel then
    # The other fields are for float8 arrays.
    op: str = ""
    x_scale: float = 1.0
    float8_scale: float | None = None
    matmul_adds: bool = False  # whether the matmul adds bias and residual, and not the LayerNorm


def plan_of(
    op: str, x: Array, kernel: Array, residual: Array, bias: Array | None, gamma: Array | None, beta: Array | None, *,
    epsilon: float, dropout_rate: float, return_sum: bool, precision: Any, implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backends and configurations for arrays of these shapes and dtypes, in two dimensions."""
    rows, itemsize = x.shape[0], x.dtype.itemsize
    reason = triton_dense.unsupported(x, kernel=kernel, bias=bias, residual=residual, gamma=gamma, beta=beta)
    choice = dispatch.choose(op, implementation, {"triton": reason})
    kernel_precision = dispatch.matmul_precision(precision)
    matmul = dense.plan_of(op, x, kernel, None, None, None, precision, implementation)
    y: Any = jax.eval_shape(jnp.matmul, x, kernel)  # with its sharding
    norm = layer_norm.plan_of(
        op, y, bias, residual, gamma, beta, epsilon=epsilon, dropout_rate=dropout_rate,
        return_sum=return_sum, in_place=True, implementation=implementation,
    )  # fmt: skip
    two_ops = Pass("ops", (matmul, norm))
    forward, why = two_ops, choice.why
    if choice.name == norm.forward.backend == "triton" and x.size and kernel.size:
        if split := _split_pass(x, kernel):
            forward = split
        elif implementation is None and tuning.splits_few_rows(rows, itemsize, kernel_precision) and matmul.plain:
            forward, why = plans.XLA, "triton: slower at this size"
    return Plan(
        forward=forward, saving=two_ops, backward=two_ops, **plans.of_choice(choice) | {"why": why}, epsilon=epsilon,
        dropout_rate=dropout_rate, return_sum=return_sum, precision=precision, kernel_precision=kernel_precision,
    )  # fmt: skip


def _who_adds(matmul: bool, bias: Array | None, residual: Array | None) -> tuple[_Added, _Added]:
    """Returns the bias and the residual that the matmul adds, and those that the LayerNorm adds."""
    nothing, both = (None, None), (bias, residual)
    return (both, nothing) if matmul else (nothing, both)


def float8_plan_of(
    op: str, x: Array, kernel: Array, residual: Array, bias: Array | None, gamma: Array | None, beta: Array | None,
    kernel_scale: Array, *, x_scale: float | None, float8_scale: float | None, epsilon: float, dropout_rate: float,
    return_sum: bool, precision: Any, implementation: str | None,
) -> Plan:  # fmt: skip
    """Chooses backends and configurations for a float8 `x` and kernel, which have no gradient."""
    dtype = residual.dtype
    matmul_plan = functools.partial(
        float8.plan_of, op, x, kernel, kernel_scale, x_scale=x_scale or 1.0, dtype=dtype, implementation=implementation
    )  # fmt: skip
    matmul = matmul_plan(None)
    adds = matmul.forward.backend == "mosaic_gpu" and dropout_rate == 0.0 and not return_sum
    adds = adds and tuning.float8_matmul_adds_residual(x.shape[0], *kernel.shape)
    of_matmul, of_norm = _who_adds(adds, bias, residual)
    matmul = matmul_plan(*of_matmul) if adds else matmul
    y: Any = jax.eval_shape(lambda x, kernel: (x @ kernel).astype(dtype), x, kernel)  # with its sharding
    norm = layer_norm.plan_of(
        op, y, *of_norm, gamma, beta, epsilon=epsilon, dropout_rate=dropout_rate, return_sum=return_sum,
        in_place=True, float8_scale=float8_scale,
        implementation=None if implementation == "mosaic_gpu" else implementation,
    )  # fmt: skip
    forward = Pass("ops", (matmul, norm))
    if matmul.forward.backend == norm.forward.backend == "triton":  # no array is empty
        forward = _split_pass(x, kernel) or forward
    reasons = "; ".join(dict.fromkeys(plan.why for plan in (matmul, norm) if plan.why))
    return Plan(
        forward=forward, interpret=matmul.interpret, by_name=matmul.by_name, why=reasons, epsilon=epsilon,
        dropout_rate=dropout_rate, return_sum=return_sum, precision=precision, kernel_precision="tf32", op=op,
        x_scale=x_scale or 1.0, float8_scale=float8_scale, matmul_adds=adds,
    )  # fmt: skip


def _split_pass(x: Array, kernel: Array) -> Pass | None:
    """Returns the pass of a split-K matmul and a LayerNorm that adds up the parts, or None if it does not pay."""
    (rows, depth), width, device = x.shape, kernel.shape[1], dispatch.device()
    split = tuning.dense_split(rows, depth, width, x.dtype.itemsize, device)
    if split.splits == 1:
        return None
    return Pass("triton", (split, tuning_rows.layer_norm(rows, width, 4, device, "sums")))  # the sums are float32


def run_float8(
    x: Array, kernel: Array, residual: Array, bias: Array | None, gamma: Array | None, beta: Array | None,
    kernel_scale: Array, rng: Array | None, plan: Plan,
) -> tuple[Array, ...]:  # fmt: skip
    """Computes the results of a `float8_plan_of`."""
    if plan.forward.backend == "triton":
        float8.note_clipped(plan.op, x)
        return _split_float8_jit(x, kernel, residual, bias, gamma, beta, rng, kernel_scale, plan)
    matmul, norm = plan.forward.config
    of_matmul, of_norm = _who_adds(plan.matmul_adds, bias, residual)
    y = float8.run(x, kernel, kernel_scale, *of_matmul, matmul)
    return layer_norm.run(y, *of_norm, gamma, beta, rng, norm)


def run(
    x: Array, kernel: Array, residual: Array, bias: Array | None, gamma: Array | None, beta: Array | None,
    rng: Array | None, plan: Plan, view: MatrixView | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Computes the normalised array, and the sum if the plan asks for it. x and residual have any axes of rows.

    If the kernel is a `view`, Triton reads it in place.
    """
    if plan.forward.backend == "ops":
        matmul, norm = plan.forward.config
        y = dense.run(x, kernel, None, None, matmul, view)
        return layer_norm.run(y, bias, residual, gamma, beta, rng, norm)
    if view is not None and plan.forward.backend == "triton":
        kernel, plan = view.stack(), dataclasses.replace(plan, first_row=view.first)
    return _result_jit(x, kernel, residual, bias, gamma, beta, rng, plan)


@functools.partial(jax.jit, static_argnums=7)
def _result_jit(x, kernel, residual, bias, gamma, beta, rng, plan):
    product = dense.product_carrier(x, dense.matrix(x, kernel, plan), plan)
    carriers = product, *transforms.wide_carriers(bias, residual, gamma, beta)
    every = transforms.vary_alike(x, kernel, residual, bias, gamma, beta, rng, *carriers)
    return _result(*every[:7], tuple(every[7:]), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _result(x, kernel, residual, bias, gamma, beta, rng, carriers, plan):
    del carriers

    def plain(x, kernel, residual, bias, gamma, beta, rng):
        out = reference.dense_residual_layer_norm(
            x, dense.matrix(x, kernel, plan), bias, residual, gamma, beta, epsilon=plan.epsilon,
            dropout_rate=plan.dropout_rate, dropout_rng=rng, return_sum=plan.return_sum, precision=plan.precision,
        )  # fmt: skip
        return out if plan.return_sum else (out,)

    def by_parts(over, x, kernel, residual, bias, gamma, beta, rng):
        y = jax.lax.psum(reference.matmul(x, kernel, plan.precision), over)
        return _normalized(plan, y, bias, residual, gamma, beta, rng)

    run = plain
    if plan.forward.backend != "xla":
        rows = sharding.rows_of(x.shape[:-1], dropout=rng is not None)
        # Devices do not divide a `MatrixView`: other matrices lie in the same array.
        k = "k" if plan.first_row is None else "K"
        rule = Rule(
            "dense_residual_layer_norm", f"{rows} {k}, {k} D, {rows} D, D, D, D, key({rows})", f"{rows} D, {rows} D",
            contracted={"k": by_parts},
        )  # fmt: skip
        run = transforms.mappable(functools.partial(_split, plan), plain, plan, rule)
    return run(x, kernel, residual, bias, gamma, beta, rng)


def _normalized(plan, y, bias, residual, gamma, beta, rng):
    options = {"epsilon": plan.epsilon, "dropout_rate": plan.dropout_rate, "return_sum": plan.return_sum}
    out = reference.bias_residual_layer_norm(y, bias, residual, gamma, beta, dropout_rng=rng, **options)
    return out if plan.return_sum else (out,)


def _split(plan, _, x, kernel, residual, bias, gamma, beta, rng, kernel_scale=None):
    split, norm = plan.forward.config
    (sums,) = triton_dense.forward(
        float8.rows_of(x), kernel, None, None, activation=None, precision=plan.kernel_precision, config=split,
        interpret=plan.interpret, splits=split.splits, first_row=plan.first_row or 0, kernel_scale=kernel_scale,
        x_scale=plan.x_scale,
    )  # fmt: skip
    seed = None if rng is None else dropout_seed(rng)
    out = triton_norm.forward(
        sums, bias, float8.rows_of(residual), gamma, beta, seed, epsilon=plan.epsilon, dropout_rate=plan.dropout_rate,
        return_sum=plan.return_sum, save=False, in_place=False, float8_scale=plan.float8_scale, config=norm,
        interpret=plan.interpret,
    )  # fmt: skip
    return tuple(y.reshape(residual.shape) for y in out)


@functools.partial(jax.jit, static_argnums=8)
def _split_float8_jit(x, kernel, residual, bias, gamma, beta, rng, kernel_scale, plan):
    def plain(*arrays):
        return by_parts((), *arrays)

    def by_parts(over, x, kernel, residual, bias, gamma, beta, rng, kernel_scale):
        y = reference.float8_dense(x, kernel, kernel_scale, x_scale=plan.x_scale, dtype=jnp.float32, over=over)
        wide = _normalized(plan, y, bias, residual, gamma, beta, rng)
        found = tuple(part.astype(residual.dtype) for part in wide)
        return found if plan.float8_scale is None else (*found, reference.to_float8(wide[0], plan.float8_scale))

    rows = sharding.rows_of(x.shape[:-1], dropout=rng is not None)
    rule = Rule(
        "dense_residual_layer_norm", f"{rows} k, k D, {rows} D, D, D, D, key({rows}), D",
        f"{rows} D, {rows} D, {rows} D", contracted={"k": by_parts},
    )  # fmt: skip
    run = transforms.mappable(functools.partial(_split, plan), plain, plan, rule)
    arrays = transforms.vary_alike(x, kernel, residual, bias, gamma, beta, rng, kernel_scale)
    return float8.without_gradient(plan.op, run)(*arrays)


def _fwd(x, kernel, residual, bias, gamma, beta, rng, carriers, plan):
    matmul, norm = plan.backward.config

    y = dense.run(x, dense.matrix(x, kernel, plan), None, None, matmul)
    return jax.vjp(lambda *carriers: layer_norm.run(y, bias, residual, gamma, beta, rng, norm, carriers), *carriers)


def _bwd(plan, pull_back, d):
    return *[None] * 7, pull_back(d)


_result.defvjp(_fwd, _bwd)
