"""Plans: which backend runs each pass of an op, and with which launch configuration; `explain` lists them.

Every op asks its kernels which backends are legal (`unsupported`), asks `jaxft.tuning` which legal one is the fastest,
and writes the answer into one frozen `Plan`. The plan is chosen outside of traced functions and is the only static
argument of the op's `custom_vjp`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxft import dispatch


@dataclasses.dataclass(frozen=True)
class Pass:
    """The backend that runs one pass of an op.

    Attributes:
      backend: "triton", "mosaic_gpu", "cudnn", "xla", "xla+triton" for XLA's matmul and a Triton kernel after it, or
        "ops" for a pass that is composed of other ops.
      config: the launch configuration; for several kernels a tuple of them, for "ops" the plans of the other ops. None
        where the backend has nothing to configure.
    """

    backend: str
    config: Any = None


XLA = Pass("xla")


def by_triton(choice: dispatch.Choice, forward: Any, backward: Any) -> dict[str, Any]:
    """Returns the fields of a plan whose passes are Triton kernels with these configurations."""
    passes = {"forward": Pass("triton", forward), "backward": Pass("triton", backward)}
    return {**passes, **of_choice(choice)}


def of_choice(choice: dispatch.Choice) -> dict[str, Any]:
    """Returns the fields of a plan that are the same whatever the passes are."""
    return {"interpret": choice.interpret, "by_name": choice.by_name, "why": choice.why}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one call of an op. Each op adds its static arguments as fields.

    Attributes:
      forward: computes the result where no gradient is taken.
      saving: computes the result and what `backward` needs, where a gradient is taken. None if `forward` does that too.
      backward: computes the gradients.
      interpret: whether Pallas interprets the kernels, for tests on a CPU.
      by_name: whether the user named the implementation, so that no other may replace it.
      why: the reasons against the other backends, for people.
    """

    forward: Pass = XLA
    saving: Pass | None = None
    backward: Pass = XLA
    interpret: bool = False
    by_name: bool = False
    why: str = dataclasses.field(default="", compare=False)

    @property
    def with_gradient(self) -> Pass:
        """The pass that computes the result where a gradient is taken."""
        return self.saving or self.forward


@dataclasses.dataclass(frozen=True)
class Record:
    """One call of an op that `explain` recorded.

    Attributes:
      op: the name of the public function.
      shapes: the dtypes and shapes of the arrays, for example "bf16[4096,768]".
      forward: the pass that computes the result where no gradient is taken.
      saving: the pass that computes the result where a gradient is taken, if that is another pass than `forward`.
      backward: the pass that computes the gradients.
      why: the reasons against the other backends.
      plan: the plan of the call, which has these passes.
    """

    op: str
    shapes: tuple[str, ...]
    forward: Pass
    saving: Pass | None
    backward: Pass
    why: str = dataclasses.field(compare=False)
    plan: Plan


class Explanation(list[Record]):
    """The records of `explain`, in the order of the calls. Printed, they are a table with equal calls in one row."""

    def __str__(self) -> str:
        rows = [("calls", "op", "arrays", "forward", "backward", "why not another")]
        for record in dict.fromkeys(self):
            passes = describe(record.plan, "forward"), describe(record.plan, "backward")
            rows.append((str(self.count(record)), record.op, " ".join(record.shapes), *passes, record.why))
        return "\n".join(table_lines(rows))


class _Recorder:
    """Collects records. As a new value in the keys of JAX's caches, it makes `explain` trace what JAX has cached."""

    def __init__(self) -> None:
        self.records = Explanation()


_recorder = jax.make_user_context(None)


def record(op: str, arrays: Sequence[Any], plan: Plan) -> None:
    """Records the plan of a call if `explain` is tracing."""
    if _recorder.value is not None:
        shapes = tuple(_short(x) for x in arrays if x is not None)
        passes = plan.forward, plan.saving, plan.backward
        _recorder.value.records.append(Record(op, shapes, *passes, plan.why, plan))


def _short(x: Any) -> str:
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32"}
    return f"{names.get(str(x.dtype), x.dtype)}[{','.join(map(str, x.shape))}]"


def explain(fn: Callable[..., Any], *args: Any) -> Explanation:
    """Returns how the ops of jaxft in `fn(*args)` run: backend and launch configuration, forward and backward.

    Traces `fn`, which runs nothing on the device, and returns the plan of each call of an op that is traced::

        print(jaxft.explain(lambda x, w, b: jaxft.dense(x, w, b, activation="gelu"), x, w, b))

    The plans are for the present device. Inside of `jaxft.dispatch.target(...)` they are for another NVIDIA device, on
    any machine; there, cuDNN is taken only if JAX finds cuDNN on this machine.

    The body of a `jax.jit`, a `scan` or a `vmap` is traced once, however often it runs. Each call of `explain` traces
    anew, and the trace stays in JAX's caches until `jax.clear_caches()`.

    Args:
      fn: the function, with or without `jax.jit`: an op, a gradient, a whole model. Bind arguments that are no arrays
        with `functools.partial`.
      *args: arrays, `jax.ShapeDtypeStruct`s, or trees of them, such as NNX modules.

    Returns:
      A list with one `Record` per traced call of an op, in the order of the calls. A record has the fields `op`,
      `shapes`, `forward` (where no gradient is taken), `saving` (the pass instead of `forward` where a gradient is
      taken, or None), `backward` (each with `backend` and `config`), and `why`, the reasons against other backends.
      The list prints as a table. It is empty if `fn` calls no op.

    Raises:
      TypeError: `fn` is not a function.
    """
    if not callable(fn):
        raise TypeError(f"explain: fn must be a function, got {type(fn).__name__}")
    recorder = _Recorder()
    _trace(fn, args, recorder)
    found, recorder.records = recorder.records, Explanation()  # JAX's caches keep the recorder
    return found


def _trace(fn: Callable[..., Any], args: Sequence[Any], recorder: _Recorder) -> None:
    token = dispatch.quiet.set(True)
    try:
        with _recorder(recorder):
            jax.eval_shape(lambda *args: fn(*args), *args)
    finally:
        dispatch.quiet.reset(token)


class _Found(Exception):
    """Ends the trace of `first_plan`. Its argument is the plan."""


class _FirstRecord(Explanation):
    """Records of a trace that ends at the first one."""

    def append(self, record: Record) -> None:
        raise _Found(record.plan)


def first_plan(fn: Callable[..., Any], *args: Any) -> Plan | None:
    """Returns the plan of the first op of jaxft in `fn(*args)`, or None. Traces `fn` up to there, and no kernel."""
    recorder = _Recorder()
    recorder.records = _FirstRecord()
    try:
        _trace(fn, args, recorder)
    except _Found as found:
        return found.args[0]
    return None


def describe(plan: Plan, direction: str, *, with_config: bool = True) -> str:
    """Writes the "forward" or "backward" pass of a plan as one short text: backend and numbers of the configuration.

    A composed pass has the backends of its ops in order. A forward pass that is another one where a gradient is taken
    has both.
    """
    text = _describe(plan, direction, with_config)
    other = text if direction != "forward" or plan.saving is None else _describe(plan, "saving", with_config)
    return text if other == text else f"{text} (with gradient: {other})"


def _describe(plan: Plan, direction: str, with_config: bool) -> str:
    part = plan.with_gradient if direction == "saving" else getattr(plan, direction)
    if part.backend == "ops":
        parts = [_describe(inner, direction, with_config) for inner in part.config]
        return " + ".join(parts if len(set(parts)) > 1 else parts[:1])
    return f"{part.backend} {_numbers(part.config)}" if with_config and part.config is not None else part.backend


def _numbers(config: Any) -> str:
    if isinstance(config, tuple):  # one configuration per kernel
        return " ".join(_numbers(part) for part in config if part is not None)
    return f"{type(config).__name__}({', '.join(map(str, dataclasses.astuple(config)))})"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows of texts as the columns of a table. Returns one line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
