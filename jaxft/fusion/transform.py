"""`fuse`: replaces subgraphs of a JAX function by ops of jaxft."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np

from jaxft import dispatch
from jaxft.fusion.evaluate import Program
from jaxft.fusion.plan import FAMILIES
from jaxft.fusion.report import Checks, Report, check_of, report_of
from jaxft.fusion.site import MASKED_ROWS, Options

logger = logging.getLogger("jaxft")


def fuse(
    fn: Callable[..., Any],
    *,
    only: str | Iterable[str] | None = None,
    implementation: str | None = None,
    masked_rows: str = "exact",
    strict: bool = False,
    force: bool = False,
    static_argnums: int | Iterable[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
) -> "Fused":
    """Returns a function with the results of `fn` that runs recognised subgraphs as ops of jaxft.

    The returned function traces `fn` with its arguments, as `jax.jit` does. It replaces the subgraphs that it
    recognises (the sites), and evaluates all other equations unchanged::

        fused = jaxft.fuse(model.apply)
        print(fused.report(params, x))  # what is replaced, what is not, and why
        loss, gradients = jax.jit(jax.value_and_grad(lambda params: loss_of(fused(params, x))))(params)

    It recognises:

    - LayerNorm and RMSNorm, with the residual before them
    - softmax and log-softmax
    - attention
    - bias and activation
    - dense layers with an activation, or before a residual and a LayerNorm
    - the feed-forward half of a layer
    - sums of embeddings with their LayerNorm
    - the summed cross-entropy of a matmul
    - transposes that cancel, compose or feed a matmul

    docs/fuse.md has the details.

    A function that is fused already keeps its static arguments. With the same options it is searched once, and its
    `strict` stays.

    Fuse before you differentiate: `jax.grad(jaxft.fuse(f))`. In a differentiated function, `jaxft.fuse(jax.grad(f))`,
    nothing is replaced. The returned function works under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan`,
    `jax.checkpoint` and `jax.shard_map`. `fn` may contain all of them. Put `jax.jit` around the returned function.
    Without `jax.jit`, each call traces `fn` and searches again.

    Args:
      fn: any JAX function. Arrays in its arguments are traced. Everything else, such as Python numbers, strings and
        functions, is passed to `fn` as it is. NNX modules may be arguments. Changes that `fn` makes to their variables
        are written back.
      only: the family or families of ops to look for: "attention", "softmax", "layer_norm", "rms_norm", "activation",
        "dense", "embeddings", "cross_entropy", "permute". None looks for all of them.
      implementation: the argument `implementation` of all ops. A site whose op does not support it raises
        `NotImplementedError`.
      masked_rows: the result of a query whose keys are all masked.

        - "exact": the result of `fn`, and the gradients of `fn` where the result is finite. A finite additive mask
          stays a bias.
        - "mask": like "exact", but an additive mask that is made from a boolean becomes a boolean mask. This is faster,
          and changes the gradients of such queries and their keys.
        - "zero": 0, as in the ops of jaxft. This is the fastest.
      strict: whether to raise a ValueError if nothing is replaced.
      force: whether to replace all sites on any device. If False, a site is replaced on an NVIDIA GPU if its op is
        faster than XLA. A site whose op is faster in a training step only is replaced where a gradient is taken. On any
        other device, `fn` is then called unchanged.
      static_argnums: positions of arguments that are passed to `fn` as they are, arrays included.
      static_argnames: names of such arguments. As in `jax.jit`, an argument may be given by position or by name,
        whichever of the two options has it.

    Returns:
      A function with the signature of `fn`, and two methods. `report(*args)` returns a list of records, one for each
      site and each near miss, which prints as a table. `check(*args)` runs each site on these arguments as the original
      equations, as the op and in float64, and returns the errors.

    Raises:
      TypeError: `fn` is not a function, or an option has the wrong type.
      ValueError: an option has an unknown value, `fn` has no such argument, or nothing was replaced and `strict` is
        True.

    Accuracy: the errors of results and gradients, measured against float64, are at most twice the errors of `fn`. A
    subgraph that would change more is not replaced. A LayerNorm whose variance is E[x^2] - E[x]^2 becomes more
    accurate.
    """
    if not callable(fn):
        raise TypeError(f"fuse: fn must be a function, got {type(fn).__name__}")
    wanted = _several("only", FAMILIES if only is None else only, str)
    if not wanted or not wanted.issubset(FAMILIES):
        raise ValueError(f"fuse: only must be None or some of {FAMILIES}, got {only!r}")
    if masked_rows not in MASKED_ROWS:
        raise ValueError(f"fuse: masked_rows must be one of {MASKED_ROWS}, got {masked_rows!r}")
    dispatch.check_name("fuse", implementation)
    for name, flag in (("strict", strict), ("force", force)):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"fuse: {name} must be True or False, got {type(flag).__name__}")
    families = tuple(family for family in FAMILIES if family in wanted)
    options = Options(families, implementation, masked_rows, bool(force))
    numbers, names = _several("static_argnums", static_argnums, int), _several("static_argnames", static_argnames, str)
    numbers, names = _static_arguments(fn, numbers, names)
    if isinstance(fn, Fused):
        numbers, names = numbers | fn._numbers, names | fn._names
        if fn._options == options:
            strict, fn = strict or fn._strict, fn._fn
    return Fused(fn, options, bool(strict), numbers, names)


def _several(name: str, given: Any, kind: type) -> set[Any]:
    """Returns an option that is one value of a type, or several, or None."""
    accepted = (int, np.integer) if kind is int else kind
    try:
        values = [given] if isinstance(given, accepted) else [] if given is None else list(given)
    except TypeError:
        values = [None]
    if any(not isinstance(x, accepted) or isinstance(x, bool) for x in values):
        noun = "an integer or several integers" if kind is int else "a string or several strings"
        raise TypeError(f"fuse: {name} must be {noun}, got {given!r:.100}")
    return set(values)


def _static_arguments(fn: Any, numbers: set[int], names: set[str]) -> tuple[set[int], set[str]]:
    """Returns the positions and the names of static arguments, each with those that the other one implies."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some functions that are written in C
        return numbers, names
    kinds = [p.kind for p in parameters.values()]
    positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for number in numbers:
            if not -len(positional) <= number < len(positional):
                raise ValueError(
                    f"fuse: static_argnums has {number}, but fn has {len(positional)} positional arguments"
                )
        numbers = {number % len(positional) for number in numbers}
    for name in sorted(names):
        if name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(f"fuse: static_argnames has {name!r}, but the arguments of fn are {[*parameters]}")
    implied = {positional[n] for n in numbers if 0 <= n < len(positional)}
    return numbers | {positional.index(name) for name in names if name in positional}, names | implied


class Fused:
    """A function that `fuse` returned."""

    def __init__(self, fn: Any, options: Options, strict: bool, numbers: set[int], names: set[str]) -> None:
        self._fn, self._options, self._strict = fn, options, strict
        self._numbers, self._names = numbers, names
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the function to an instance, so that it can be a method."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes `fn(*args, **kwargs)`."""
        if not self._options.force and dispatch.platform() != "cuda":
            if self._strict:
                raise ValueError(
                    f"fuse: nothing was replaced: without force=True, fn runs as it is on {dispatch.device_kind()}"
                )
            return self._fn(*args, **kwargs)
        program, call = self._program(*args, **kwargs)
        call.check_arrays("the function", jax.ShapeDtypeStruct)
        if not program.sites:
            if self._strict:
                raise ValueError(f"fuse: nothing was replaced\n{report_of(program)}")
            return call.finish(jax.extend.core.jaxpr_as_fun(call.closed)(*call.arrays))
        logger.info("fuse: %s replaced, %d near misses", report_of(program).counts, len(program.misses))
        if not any(isinstance(x, jax.core.Tracer) for x in call.arrays):
            _warn_once()
        return call.finish(program(*call.arrays))

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Returns the sites and near misses for these arguments. Arrays may be `jax.ShapeDtypeStruct`s."""
        return report_of(self._program(*args, **kwargs)[0])

    def check(self, *args: Any, **kwargs: Any) -> Checks:
        """Runs each site on these arguments as the original equations, as the op and in float64. Returns the errors."""
        program, call = self._program(*args, **kwargs)
        call.check_arrays("check", jax.ShapeDtypeStruct | jax.core.Tracer)
        return check_of(program, call.arrays)

    def _program(self, *args: Any, **kwargs: Any) -> tuple[Program, "_Call"]:
        call = _Call(self._fn, args, kwargs, self._numbers, self._names)
        return Program(call.closed, self._options), call


@functools.cache
def _warn_once() -> None:
    logger.warning("fuse: a fused function was called without jax.jit: each call plans again and runs op by op")


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _is_module(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module | nnx.Optimizer | nnx.Rngs)


class _Call:
    """One call of `fn`: the arrays in its arguments, and the jaxpr of `fn` as a function of these arrays.

    NNX modules are split before the trace and merged inside of it. Their new state is a result of the jaxpr, so that
    `finish` can write changes back.
    """

    def __init__(self, fn: Any, args: Any, kwargs: Any, numbers: set[int], names: set[str]) -> None:
        positions = {n % len(args) if -len(args) <= n < len(args) else n for n in numbers} if args else set(numbers)
        static = {i: x for i, x in enumerate(args) if i in positions}, {n: kwargs[n] for n in names if n in kwargs}
        dynamic = (
            [x for i, x in enumerate(args) if i not in positions],
            {n: x for n, x in kwargs.items() if n not in static[1]},
        )
        leaves, tree = jax.tree.flatten(dynamic, is_leaf=_is_module)
        self._modules = tuple(x for x in leaves if _is_module(x))
        nnx: Any = sys.modules.get("flax.nnx")
        graphdef, state = nnx.split(self._modules) if nnx is not None and self._modules else (None, None)
        states, tree_of_states = jax.tree.flatten(state)
        self._state_tree: Any = tree_of_states
        is_array = [_is_array(x) and not _is_module(x) for x in leaves]
        self.arrays = [x for x, traced in zip(leaves, is_array, strict=True) if traced] + states

        def flat(*arrays: Any) -> list[Any]:
            modules, new = (), None
            if self._modules:
                merged = nnx.merge(graphdef, jax.tree.unflatten(self._state_tree, arrays[len(arrays) - len(states) :]))
                modules = iter(merged)
            values = iter(arrays)
            every = [next(modules) if _is_module(x) else next(values) if traced else x  # type: ignore[call-overload]
                     for x, traced in zip(leaves, is_array, strict=True)]  # fmt: skip
            positional, keywords = jax.tree.unflatten(tree, every)
            rest = iter(positional)
            given = [static[0][i] if i in static[0] else next(rest) for i in range(len(args))]
            result = fn(*given, **keywords, **static[1])
            if self._modules:
                after, new = nnx.split(merged)
                if after != graphdef:
                    raise ValueError(
                        "fuse: fn changed which variables an NNX module has, which fuse does not write back"
                    )
            self._outs, self._out_tree = jax.tree.flatten(result)
            self._traced = [_is_array(x) for x in self._outs]
            outs = [x for x, traced in zip(self._outs, self._traced, strict=True) if traced]
            self._outs = [None if traced else x for x, traced in zip(self._outs, self._traced, strict=True)]
            return outs + jax.tree.leaves(new)

        self.closed = jax.make_jaxpr(flat)(*self.arrays)

    def check_arrays(self, of: str, refused: Any) -> None:
        """Raises a TypeError if an argument is an array of a refused type, which has no values."""
        for x in self.arrays:
            if isinstance(x, refused):
                raise TypeError(
                    f"fuse: {of} needs arrays with values, got {x!r:.100}; report() takes shapes and dtypes"
                )

    def finish(self, results: Sequence[Any]) -> Any:
        """Returns the result of `fn`, and writes the new state of NNX modules back.

        `results` are the results of the jaxpr.
        """
        results = list(results)
        count = self._state_tree.num_leaves
        new = results[len(results) - count :]
        old = self.arrays[len(self.arrays) - count :]
        if any(a is not b for a, b in zip(new, old, strict=True)):
            sys.modules["flax.nnx"].update(self._modules, jax.tree.unflatten(self._state_tree, new))
        values = iter(results)
        outs = [next(values) if traced else x for x, traced in zip(self._outs, self._traced, strict=True)]
        return jax.tree.unflatten(self._out_tree, outs)
