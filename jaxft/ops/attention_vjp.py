"""The plan of attention, its implementations (plain jnp, cuDNN, kernels), and the gradients of the kernels."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxft import dispatch, reference
from jaxft.dropout import ShardKey, dropout_seed
from jaxft.kernels.cudnn import attention as cudnn
from jaxft.kernels.mosaic_gpu import support
from jaxft.kernels.triton import attention as triton
from jaxft.kernels.triton import attention_backward, attention_delta, attention_problem, common
from jaxft.ops import checks, float8, plans, transforms
from jaxft.ops.plans import Pass
from jaxft.ops.sharding import Rule
from jaxft.tuning import attention as tuning


class Inputs(NamedTuple):
    """Arrays of a call, after the checks. `key` and `value` are None if `query` is a packed array."""

    query: Any
    key: Any = None
    value: Any = None
    bias: Any = None
    relative_bias: Any = None
    mask: Any = None
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    dropout_rng: Any = None
    cu_seqlens: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    """Static arguments of a call."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    dropout_rate: float
    return_residual: bool
    max_seqlen: int | None = None  # only with cu_seqlens
    float8_scale: float | None = None  # makes the output float8, which has no gradient


def sizes(inputs: Inputs, options: Options) -> tuple[int, int, int, int, int]:
    """Returns the sizes of a call: B, T, S, N and H. For packed sequences, both lengths are `max_seqlen`."""
    *_, n, h = inputs.query.shape
    if options.max_seqlen is not None:
        return inputs.cu_seqlens.shape[0] - 1, options.max_seqlen, options.max_seqlen, n, h
    b, t = inputs.query.shape[:2]
    return b, t, t if inputs.key is None else inputs.key.shape[1], n, h


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plans.Plan):
    """Plan of a call of attention. A `backward` pass by "triton" has a configuration for dq and one for dk and dv."""

    options: Options
    precision: Any
    kernel_precision: str  # precision of float32 matmuls in kernels, "tf32" or "float32"


def plan_of(op: str, inputs: Inputs, options: Options, implementation: str | None) -> Plan:
    """Chooses backends and configurations for arrays of these shapes and dtypes."""
    device, kernel_precision = dispatch.device(), dispatch.matmul_precision()
    precision = checks.check_precision(op, None, inputs.query.dtype)
    plan = functools.partial(Plan, options=options, precision=precision, kernel_precision=kernel_precision)
    of_card = None if options.float8_scale is None else common.unsupported_by_card()
    reasons = {"triton": of_card or _triton_unsupported(inputs, options)}
    if implementation is not None:
        reasons |= {"cudnn": _cudnn_unsupported(inputs, options), "mosaic_gpu": "its kernel is for gradients only"}
    choice = dispatch.choose(op, implementation, reasons)
    b, t, s, n, h = sizes(inputs, options)
    if choice.name == "xla" or 0 in (b, t, s, n, h, inputs.query.shape[0]):
        return plan(why=choice.why)
    if choice.name == "cudnn":
        return plan(forward=Pass("cudnn"), backward=Pass("cudnn"), why=choice.why)

    call = _call(inputs, options, kernel_precision)
    forward = Pass("triton", tuning.attention(call))
    if options.float8_scale is not None:
        return plan(forward=forward, **plans.of_choice(choice))
    backward = Pass("triton", _triton_gradient(call, inputs))
    saving, why = None, [choice.why] if choice.why else []
    if implementation is None:
        reason = _cudnn_unsupported(inputs, options) or _cudnn_is_slower(inputs, options, device)
        if reason is None and (reason := cudnn.missing()) is None:
            forward, saving = Pass("cudnn"), forward
        else:
            why.append(f"cudnn, forward: {reason}")
        reason = dispatch.machine_reason("mosaic_gpu", device) or _mosaic_unsupported(inputs, options)
        if reason is None and not tuning.mosaic_gradient_is_faster(b * n, device):
            reason = "slower with this number of heads"
        if reason is None:
            backward = Pass("mosaic_gpu", tuning.attention_mosaic_gradient(device))
        else:
            why.append(f"mosaic_gpu, backward: {reason}")
    choice = choice._replace(why="; ".join(why))
    return plan(forward=forward, saving=saving, backward=backward, **plans.of_choice(choice))


def _call(inputs: Inputs, options: Options, precision: str) -> tuning.Call:
    """Returns what the configurations of the Triton kernels depend on."""
    b, t, s, n, h = sizes(inputs, options)
    exact = precision == "float32" and inputs.query.dtype == jnp.float32
    more = exact or any(x is not None for x in (*inputs[3:6], inputs.dropout_rng))
    average = None if inputs.cu_seqlens is None else max(1, inputs.query.shape[0] // b)
    window = None if options.local_window_size is None else sum(options.local_window_size) + 1
    relative = inputs.relative_bias is not None
    return tuning.Call(b * n, t, s, h, inputs.query.dtype.itemsize, dispatch.device(), more, average, window, relative)


def _triton_gradient(call: tuning.Call, inputs: Inputs) -> tuple[Any, Any]:
    """Returns the configurations of the Triton kernels for dq, and for dk and dv."""
    dq = tuning.attention_dq(call)
    return dq, tuning.attention_dkv(call, attention_problem.bias_of_pairs(inputs.bias))  # the last, see `autotune`


def _by_name(inputs: Inputs) -> dict[str, Any]:
    """Returns the arrays by the names that the user knows, without the random key."""
    arrays = {name: x for name, x in inputs._asdict().items() if name != "dropout_rng"}
    return arrays if inputs.key is not None else {"qkv": arrays.pop("query")} | arrays


def _triton_unsupported(inputs: Inputs, options: Options) -> str | None:
    """Returns why the Triton kernels cannot run this call, or None if they can."""
    _, t, s, _, h = sizes(inputs, options)
    rows = 0 if inputs.cu_seqlens is None else inputs.query.shape[0]
    return attention_problem.unsupported(h, (t, s, rows), **_by_name(inputs))


def _cudnn_unsupported(inputs: Inputs, options: Options) -> str | None:
    """Returns why cuDNN cannot run this call, or None if it can."""
    _, t, s, _, _ = sizes(inputs, options)
    if options.float8_scale is not None:
        return "it writes no float8"
    return cudnn.unsupported(
        t, s, _cudnn_options(options), return_residual=options.return_residual, **_by_name(inputs),
        dropout_rng=inputs.dropout_rng,
    )  # fmt: skip


def _cudnn_is_slower(inputs: Inputs, options: Options, device: dispatch.Device) -> str | None:
    """Returns the reason why cuDNN does not compute the output sooner, or None if it does.

    Unless it is named, cuDNN computes no gradients, because its gradients differ from run to run.
    """
    if any(x is not None for x in (*inputs[3:], options.local_window_size)) or options.scale <= 0.0:
        return "its speed with masks, lengths, windows and such scales is not measured"
    if inputs.key is not None and inputs.key.shape[2] != inputs.query.shape[2]:
        return "its speed with grouped heads is not measured"
    is_faster = tuning.cudnn_is_faster(*sizes(inputs, options), inputs.key is None, device)
    return None if is_faster else "slower for these sizes"


def _mosaic_unsupported(inputs: Inputs, options: Options) -> str | None:
    """Returns why the Mosaic GPU kernel cannot compute the gradient of this call, or None if it can."""
    others = {name: x for name, x in inputs._asdict().items() if name not in ("query", "mask", "dropout_rng")}
    return support.attention_backward_unsupported(
        inputs.query, inputs.mask, scale=options.scale, return_residual=options.return_residual,
        limited=options.is_causal or options.local_window_size is not None, **others,
    )  # fmt: skip


def run(inputs: Inputs, plan: Plan) -> Any:
    """Computes the output. With `return_residual`, returns a pair of the output and the log-sum-exp."""
    if plan.options.float8_scale is not None:
        return _float8(plan, *inputs)
    if plan.forward.backend == "xla":
        return _reference(plan, *inputs)
    if plan.backward.backend == "cudnn":  # asked for by name, with cuDNN's own gradient
        return _cudnn_jit(inputs, plan.options)
    return _kernels(plan, *inputs)


@functools.partial(jax.jit, static_argnums=0)
def _float8(plan, *arrays):
    """Computes the output in float8, without a gradient."""

    def plain(*arrays):
        options = dataclasses.replace(plan.options, float8_scale=None)
        out = _plain(dataclasses.replace(plan, options=options), *arrays)
        out, *lse = out if options.return_residual else (out,)
        out = reference.to_float8(reference.wide(out), plan.options.float8_scale)
        return (out, *lse) if lse else out

    def kernel(_, *arrays):
        return _forward(plan, False, *arrays)

    run = plain if plan.forward.backend == "xla" else transforms.mappable(kernel, plain, plan, _rule(plan, *arrays)[0])
    return float8.without_gradient("attention", run)(*transforms.vary_alike(*arrays))


# --- Plain jnp ---------------------------------------------------------------------------------------------------


def _parts_of(qkv: Array) -> tuple[Array, Array, Array]:
    return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def _plain(plan: Plan, *arrays: Any) -> Any:
    query, key, value, bias, relative_bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, rng, cu_seqlens = arrays
    static = vars(plan.options) | {"precision": plan.precision}
    max_seqlen, _ = static.pop("max_seqlen"), static.pop("float8_scale")
    if max_seqlen is not None:
        return reference.varlen_qkv_attention(
            query, cu_seqlens, max_seqlen=max_seqlen, relative_bias=relative_bias, dropout_rng=rng, **static
        )
    if key is None:
        query, key, value = _parts_of(query)
    return reference.dot_product_attention(
        query, key, value, bias, mask, relative_bias=relative_bias, query_seq_lengths=q_lengths,
        key_value_seq_lengths=kv_lengths, query_segment_ids=q_ids, key_value_segment_ids=kv_ids, dropout_rng=rng,
        **static,
    )  # fmt: skip


# --- cuDNN -------------------------------------------------------------------------------------------------------


def _cudnn_options(options: Options) -> cudnn.Options:
    return cudnn.Options(options.scale, options.is_causal, options.local_window_size)


def _cudnn(inputs: Inputs, options: Options) -> Array:
    query, key, value = _parts_of(inputs.query) if inputs.key is None else inputs[:3]
    lengths = inputs.query_seq_lengths, inputs.key_value_seq_lengths
    return cudnn.forward(query, key, value, *lengths, _cudnn_options(options))


_cudnn_jit = jax.jit(_cudnn, static_argnums=1)


# --- Kernels -----------------------------------------------------------------------------------------------------


def _arguments(inputs: Inputs, plan: Plan) -> tuple[Any, ...]:
    """Returns the first arguments of the kernels' entry points."""
    options = plan.options
    before, after = options.local_window_size or (None, None)
    table = inputs.relative_bias
    bias = inputs.bias if table is None else table[None, :, None]
    rules = attention_problem.Rules(
        bias, inputs.mask, inputs.query_seq_lengths, inputs.key_value_seq_lengths, inputs.query_segment_ids,
        inputs.key_value_segment_ids, None if inputs.dropout_rng is None else dropout_seed(inputs.dropout_rng),
        inputs.cu_seqlens,
    )  # fmt: skip
    window = (before, 0 if options.is_causal else after)
    kernel_options = attention_problem.Options(
        options.scale,
        window,
        options.dropout_rate,
        options.max_seqlen or 0,
        plan.kernel_precision,
        table is not None,
        _heads_of_rows(inputs.dropout_rng),
    )
    return inputs.query, inputs.key, inputs.value, rules, kernel_options


def _heads_of_rows(rng: Any) -> int | None:
    """Returns the number of heads over which the rows of dropout are counted, None for the heads of the arrays."""
    return rng.within[1] if isinstance(rng, ShardKey) else None


def _forward(plan: Plan, save: bool, *arrays: Any) -> Any:
    """Computes the result of the op. With `save`, also returns the output and the parts of the log-sum-exp."""
    inputs = Inputs(*arrays)
    if plan.forward.backend == "cudnn" and not save:
        return _cudnn(inputs, plan.options)
    residual = plan.options.return_residual
    out, *parts = triton.forward(
        *_arguments(inputs, plan),
        return_residual=save or residual,
        float8_scale=plan.options.float8_scale,
        config=plan.with_gradient.config,
        interpret=plan.interpret,
    )
    result: Any = out
    if residual:
        top, *total = (jnp.swapaxes(x, -1, -2) for x in parts)
        any_bias = inputs.bias if inputs.relative_bias is None else inputs.relative_bias
        natural = attention_problem.natural_logits(inputs.query.dtype, any_bias, plan.kernel_precision)
        result = out, sum(map(_times_log_2, total), top if natural else _times_log_2(top))
    return (result, (out, *parts)) if save else result


def _times_log_2(x: Array) -> Array:
    """Multiplies float32 `x` by log(2). The constant is a sum of two, because float32 has too few digits for it."""
    number = float(np.nextafter(np.float32(math.log(2.0)), np.float32(0.0)))
    return x * number + x * (math.log(2.0) - number)  # both constants are positive, so that -inf does not become NaN


def _mosaic_gradient(dout, inputs, saved, plan):
    from jaxft.kernels.mosaic_gpu import attention_backward as mosaic

    qkv, (out, lse) = inputs.query, saved
    *_, rules, options = _arguments(inputs, plan)
    rows = attention_delta.row_statistics(dout, out, lse, rules.seed, options.heads, interpret=plan.interpret)
    found = mosaic.backward(
        dout, qkv, rows, rules.mask, scale=options.scale, dropout_rate=options.dropout_rate,
        programs=plan.backward.config.programs,
    )  # fmt: skip
    # Inside a shard_map, results of Mosaic kernels lack the mesh axes over which they vary.
    return transforms.vary_alike(qkv, found)[1]


def _backward(plan, dtypes, d, saved, *arrays):
    inputs = Inputs(*arrays)
    *of_rows, of_bias, of_relative = dtypes
    of_rows = next((dtype for dtype in of_rows if dtype == jnp.float32), inputs.query.dtype)
    configs = plan.backward.config
    if plan.backward.backend == "mosaic_gpu":
        if of_rows == inputs.query.dtype:
            return _mosaic_gradient(d, inputs, saved, plan), None, None, None, None
        # The Mosaic kernel sums in 16 bits.
        configs = _triton_gradient(_call(inputs, plan.options, plan.kernel_precision), inputs)
    query_config, key_config = configs
    dout, dlse = d if plan.options.return_residual else (d, None)
    *found, dbias = attention_backward.backward(
        dout, None if dlse is None else jnp.swapaxes(dlse, -1, -2), *_arguments(inputs, plan), *saved,
        query_config=query_config, key_config=key_config, interpret=plan.interpret,
        dtypes=(of_rows, of_bias if inputs.relative_bias is None else of_relative),
    )  # fmt: skip
    of_pairs, of_table = (dbias, None) if inputs.relative_bias is None or dbias is None else (None, dbias[0, :, 0])
    return *found, of_pairs, of_table


def _rule(plan, *arrays):
    inputs = Inputs(*arrays)
    if inputs.cu_seqlens is not None:  # any row may belong to any sequence
        rows, key = "M 3 n H, , , , n R, , , , , , ", f"key(1 n {plan.options.max_seqlen})"
        return Rule("varlen_qkv_attention", f"{rows}{key}, C", "M n H | M n"), "M n H | n M | n M"
    packed = inputs.key is None
    query, key = ("b T 3 n H", "") if packed else ("b T n H", "b S n H")
    pairs, name = "b n T S", "qkv_attention" if packed else "dot_product_attention"
    arguments = f"{query}, {key}, {key}, {pairs}, n R, {pairs}, b, b, b T, b S, key(b n T)"
    return Rule(name, arguments, "b T n H | b T n"), "b T n H | b n T | b n T"


_reference, _kernels = transforms.implementations(_forward, _backward, _plain, gradients=5, rule=_rule)
