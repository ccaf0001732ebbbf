"""Kernels on sharded arrays: one rule per op says which axes may be divided among devices.

A rule names the axes of each array, as in an einsum: `"r D, D -> r D"`. Axes with a lower-case name may be divided
among devices. Each device then runs the kernel on its shards. A result that lacks a divided axis is a sum over it,
which an all-reduce adds up. Axes with an upper-case name are gathered first, and a log line says so.

This holds for Auto axes of a mesh, under `jax.jit`. A public op with `over_explicit_axes` also maps itself over the
Explicit axes in the types of its arrays: it makes them Auto, and derives the types of its results from such a rule.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxft import dispatch
from jaxft.dropout import ShardKey

_Names = tuple[str, ...]  # names of the axes of an array
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Division = dict[str, tuple[str, ...]]  # mesh axes over which an axis is divided, by name of the axis


@dataclasses.dataclass(frozen=True)
class Rule:
    """Names of the axes of the arguments and results of a kernel.

    Both texts have one part per argument or result, separated by commas. A part is the names of the axes, separated by
    spaces. If an argument is a tuple, its part holds for each array of the tuple, or has one alternative per array,
    separated by `|`. A name `...` stands for any number of axes that may be divided. The part `key(b n T)` is for a
    random key of dropout. It has the names or sizes of the axes whose flat index is the row of dropout. A part `_` is
    for an array that the kernel does not read.

    Attributes:
      op: name of the op, for messages.
      arguments: names of the axes of the arguments.
      results: names of the axes of the results.
      legal: returns whether the kernel takes shards of the given shapes, one for each array in the order of the
        arguments. None if the kernel takes all shapes.
      contracted: for axes over which the kernel sums in its middle, a function that computes the shards of the results
        instead of the kernel: `function(over, *arrays)`, where `over` are the mesh axes to sum over.
    """

    op: str
    arguments: str
    results: str
    legal: Callable[[Sequence[Any]], bool] | None = None
    contracted: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


def partitioned(
    kernel: Callable[..., Any], rule: Rule, shared: Sequence[bool], mapped: Sequence[Sequence[bool]] = ()
) -> Callable[..., Any]:
    """Returns a function of arrays that computes `kernel(shared, *arrays)`, on sharded arrays shard by shard.

    `shared` and `kernel` are as in `transforms.mappable`: an array that has no divided axis counts as shared. `mapped`
    tells for each `vmap` around the kernel, the innermost first, which arrays have an axis for it in front.
    """

    def run(*arrays: Any) -> Any:
        leaves, tree = jax.tree.flatten(arrays)
        count = len(leaves)  # the functions below outlive the trace, so they may not hold its arrays
        owners = [i for i, x in enumerate(arrays) for _ in jax.tree.leaves(x)]
        names = _names_of(rule.arguments, arrays)
        names = [
            (*(f"v{level}" for level in reversed(range(len(mapped))) if mapped[level][i]), *own)
            for i, own in enumerate(names)
        ]
        if jax.sharding.get_abstract_mesh().manual_axes or not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
            return kernel(shared, *arrays)
        program, out = jax.make_jaxpr(
            lambda *leaves: kernel(shared, *jax.tree.unflatten(tree, leaves)), return_shape=True
        )(*map(_raw, leaves))
        if program.effects:  # of the interpreter of Mosaic kernels; a custom call cannot have them (JAX 0.12)
            return kernel(shared, *arrays)
        # A custom call takes the constants of the kernel as arguments.
        names += [("C",) * jnp.ndim(x) for x in program.consts]
        results = _names_of(rule.results, out if "," in rule.results and isinstance(out, tuple) else (out,))
        results = [(*(f"v{level}" for level in reversed(range(len(mapped)))), *own) for own in results]

        def whole(*operands: Array) -> list[Array]:
            return jax.core.eval_jaxpr(program.jaxpr, operands[count:], *operands[:count])

        def partition(mesh: Any, given: Sequence[Any], wanted: Sequence[Any]) -> Any:
            layout = _Layout(rule, names, results, [x.shape for x in given], [x.shape for x in wanted])
            given_specs = [_spec_of(x) for x in (*given, *wanted)]
            division = layout.division(given_specs, dict(mesh.shape))

            def shard(*operands: Array) -> list[Array]:
                with jax.sharding.use_abstract_mesh(_of_auto_axes(mesh.abstract_mesh)):  # kernels take no Explicit axes
                    return layout.run(kernel, shared, tree, owners, division, dict(mesh.shape), operands[:count])

            ins, outs = ([NamedSharding(mesh, spec) for spec in part] for part in layout.specs(division, given_specs))
            return mesh, shard, outs, tuple(ins)

        def shardy_rule(_: Any, given: Sequence[Any], wanted: Sequence[Any]) -> SdyShardingRule:
            return _Layout(rule, names, results, [x.shape for x in given], [x.shape for x in wanted]).shardy()

        # With one device, JAX lowers `whole` without partitioning. Only the lowering knows the number of devices,
        # because a cached trace does not depend on the shardings of Auto axes.
        call = custom_partitioning(whole)
        call.def_partition(partition, sharding_rule=shardy_rule)
        return jax.tree.unflatten(jax.tree.structure(out), call(*map(_raw, leaves), *program.consts))

    return run


def over_explicit_axes(rule: str | Callable[[dict[str, Any]], str]) -> Callable[[_Function], _Function]:
    """Decorates a public op, so that it takes arrays which are sharded over the Explicit axes of a mesh.

    `rule` names the axes of the arguments and of the results, from the right: `"x: ... D, gamma: D -> ... D"`. `|`
    separates the names for the arrays of a tuple. A rule with one result holds for all results. If the names depend on
    the arguments, `rule` is a function that gets the arguments by name and returns the names.

    If an array is divided along an axis with an upper-case name, or two arrays are divided in ways that contradict each
    other, XLA runs the op, or an error names the array.
    """

    def decorate(op: _Function) -> _Function:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            mesh = next(filter(None, map(_explicit_mesh, jax.tree.leaves((args, kwargs)))), None)
            if mesh is None:
                return op(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            types, reason = _types_of_results(rule if isinstance(rule, str) else rule(given), given)
            if reason is not None:
                name = given.get("implementation")
                given["implementation"] = dispatch.choose(op.__name__, name, {name or "triton": reason}).name
            leaves, tree = jax.tree.flatten(given)
            own = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

            def on_auto_axes(*arrays: Array) -> Any:
                every = dict(enumerate(leaves)) | dict(zip(own, arrays, strict=True))
                return op(**jax.tree.unflatten(tree, every.values()))

            shardings = tuple(NamedSharding(mesh, spec) for spec in types)
            out = shardings if len(shardings) > 1 else shardings[0]
            mapped = jax.sharding.auto_axes(on_auto_axes, axes=mesh.explicit_axes, out_sharding=out)
            return mapped(*(_in_mesh(leaves[i], mesh) for i in own))

        return run  # type: ignore[return-value]

    return decorate


def rows_of(shape: Sequence[Any], *, dropout: bool) -> str:
    """Returns names of the leading axes of rows. With dropout, the rows of a shard must follow each other."""
    first = next((i for i, size in enumerate(shape) if size != 1), 0)
    return " ".join(f"T{i}" if dropout and i > first else f"t{i}" for i in range(len(shape)))


def _explicit_mesh(x: Any) -> Any:
    """Returns the mesh in the type of an array if it has Explicit axes, and None inside of a `jax.shard_map`."""
    if not isinstance(x, jax.Array):
        return None
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes or sharding.mesh.manual_axes:
        return None
    return getattr(x, "sharding", sharding).mesh  # outside of a jit, with the devices


def _in_mesh(x: Array, mesh: Any) -> Array:
    """Returns `x` with the mesh in its type. A NumPy array that is differentiated has none.

    The transpose of JAX's reshard of such an array raises under a `vmap` over an Explicit axis. The transpose of a
    product does not.
    """
    if not jax.typeof(x).sharding.mesh.empty or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x * jax.lax.full((), 1, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _types_of_results(rule: str, given: Mapping[str, Any]) -> tuple[list[PartitionSpec], str | None]:
    """Returns how the results are divided by a rule of `over_explicit_axes`, and why kernels cannot run."""
    arguments, results = rule.split("->")
    division: _Division = {}
    reason, more = None, 0
    for part in arguments.split(","):
        argument, _, names = part.partition(":")
        arrays = [x for x in jax.tree.leaves(given.get(argument.strip())) if isinstance(x, jax.Array)]
        for own, x in zip(names.split("|"), arrays, strict=False):
            if "..." in own:
                more = max(more, x.ndim - len(own.split()) + 1)
            axes = _expand(tuple(own.split()), x.shape)[-x.ndim :]
            for axis, (name, over) in enumerate(zip(axes, _spec_of(jax.typeof(x)), strict=False)):
                taken = {a for other, used in division.items() if other != name for a in used}
                if not over:
                    continue
                if division.get(name, over) != over or taken.intersection(over):
                    why = "another array is divided otherwise"
                else:
                    division[name] = over
                    if name[0].islower():
                        continue
                    why = "kernels are not divided"
                reason = reason or (
                    f"{argument.strip()} is sharded over Explicit axes, {jax.typeof(x).sharding.spec}, and {why} along "
                    f"axis {axis}: jax.sharding.reshard it, or call the op inside of jax.shard_map"
                )
    specs = []
    for part in results.split(","):
        spec = [division.get(name) for name in _expand(tuple(part.split()), (0,) * (len(part.split()) - 1 + more))]
        while spec and spec[-1] is None:  # other results may have fewer axes
            spec.pop()
        specs.append(PartitionSpec(*spec))
    return specs, reason


def _of_auto_axes(mesh: Any) -> Any:
    return mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))


def _raw(x: Array) -> Array:
    """Returns the data of a random key, which a custom call can take, and other arrays unchanged."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _spec_of(x: Any) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which each axis of `x` is divided."""
    if not isinstance(x.sharding, NamedSharding):
        return ((),) * len(x.shape)
    spec = (*x.sharding.spec, *(None,) * (len(x.shape) - len(x.sharding.spec)))
    return tuple(() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec)


def _names_of(text: str, values: Sequence[Any]) -> list[_Names]:
    """Returns the names of the axes of each array in `values`. A random key has the one name that the text gives."""
    found: list[_Names] = []
    for part, value in zip(text.split(","), values, strict=False):
        leaves, each = jax.tree.leaves(value), [names.strip() for names in part.split("|")]
        for names, _ in zip(each * len(leaves) if len(each) == 1 else each, leaves, strict=False):
            found.append((names,) if names.startswith("key(") else tuple(names.split()))
    return found


class _Layout:
    """Names and sizes of all axes of one call."""

    def __init__(
        self, rule: Rule, arguments: Sequence[_Names], results: Sequence[_Names], shapes: Sequence[tuple[int, ...]],
        result_shapes: Sequence[tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.rule, self.shapes, self.count = rule, [*shapes, *result_shapes], len(shapes)
        self.keys = {i: names[-1][4:-1].split() for i, names in enumerate(arguments) if _is_key(names)}
        self.is_mapped = any(name.startswith("v0") for names in arguments for name in names)
        whole = [_expand(names, shape) for names, shape in zip([*arguments, *results], self.shapes, strict=True)]
        self.first: dict[str, int] = {}  # size in the first array that has the axis
        self.least: dict[str, int] = {}  # the number of parts that all arrays have
        for names, shape in zip(whole, self.shapes, strict=True):
            for name, size in zip(names, shape, strict=True):
                self.first.setdefault(name, size)
                if size > 1:
                    self.least[name] = min(size, self.least.get(name, size))
        # An axis of size 1 is broadcast, or has been summed over.
        self.names = [
            tuple(
                name if name == "_" or (size > 1 and size % self.least[name] == 0) else "1"
                for name, size in zip(names, shape, strict=True)
            )
            for names, shape in zip(whole, self.shapes, strict=True)
        ]  # fmt: skip

    def shardy(self) -> SdyShardingRule:
        """Returns the rule by which XLA propagates shardings. Axes that may not be divided propagate none."""
        sizes: dict[str, int] = {}
        mappings = []
        for i, (names, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            mapping: list[Any] = []
            for axis, (name, size) in enumerate(zip(names, shape, strict=True)):
                if not self._may_divide(name):
                    mapping.append(f"p{i}_{axis}")
                elif size == self.least[name]:
                    mapping.append(name)
                else:
                    mapping.append(CompoundFactor(name, f"p{i}_{axis}"))
                    sizes[f"p{i}_{axis}"] = size // self.least[name]
            mappings.append(tuple(mapping))
        given, wanted = (tuple(mappings[: self.count]), tuple(mappings[self.count :]))
        return SdyShardingRule(given, wanted, **sizes)  # type: ignore[arg-type]

    def division(self, specs: Sequence[tuple[_Names, ...]], mesh: Mapping[str, int]) -> _Division:
        """Returns how the axes are divided, by the shardings of the arrays and then of the results."""
        found: _Division = {}
        used: set[str] = set()
        for i, (names, shape, spec) in enumerate(zip(self.names, self.shapes, specs, strict=True)):
            for axis, (name, size, over) in enumerate(zip(names, shape, spec, strict=True)):
                over = tuple(a for a in over if mesh[a] > 1)
                if not over or name in found or used.intersection(over):
                    continue
                if name == "_":
                    continue
                parts = math.prod(mesh[a] for a in over)
                if not self._may_divide(name) or self.least[name] % parts:
                    reason = "which the kernel does not support for this axis"
                    if self._may_divide(name):
                        reason = f"which does not give its {parts} devices parts of one size"
                    if i < self.count:
                        dispatch.log_once(
                            f"{self.rule.op}: axis {axis} of an array {shape} is divided over {', '.join(over)}, "
                            f"{reason}: each device gets all {size} elements"
                        )
                    continue
                found[name] = over
                used.update(over)
        while found and self.rule.legal is not None and not self.rule.legal(self._shards(found, mesh)):
            name, over = found.popitem()
            dispatch.log_once(
                f"{self.rule.op}: the kernel does not support the shards that come of a division over "
                f"{', '.join(over)}: each device gets all of them"
            )
        return found

    def _may_divide(self, name: str) -> bool:
        # The functions of contracted axes are not mapped.
        return name[0].islower() and not (self.is_mapped and name in self.rule.contracted)

    def _shards(self, division: _Division, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Returns the shapes of the shards of the arguments."""
        return [
            tuple(
                size // math.prod(mesh[a] for a in division.get(name, ()))
                for name, size in zip(names, shape, strict=True)
            )
            for names, shape in zip(self.names[: self.count], self.shapes, strict=False)
        ]

    def specs(
        self, division: _Division, given: Sequence[tuple[_Names, ...]]
    ) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """Returns the shardings of the arguments and of the results. An array that is not read keeps the given one."""
        specs = [
            PartitionSpec(*spec) if "_" in names else PartitionSpec(*(division.get(name) for name in names))
            for names, spec in zip(self.names, given, strict=True)
        ]
        return specs[: self.count], specs[self.count :]

    def run(
        self, kernel: Callable[..., Any], shared: Sequence[bool], tree: Any, owners: Sequence[int],
        division: _Division, mesh: Mapping[str, int], leaves: Sequence[Array],
    ) -> list[Array]:  # fmt: skip
        """Computes the shards of the results on one device."""
        shared = list(shared)
        for i, owner in enumerate(owners):
            shared[owner] |= i not in self.keys and "_" not in self.names[i] and not division.keys() <= {*self.names[i]}
        leaves = list(leaves)
        for i, rows in self.keys.items():
            leaves[i] = self._key(leaves[i], rows, division, mesh)
        run = functools.partial(kernel, tuple(shared))
        own = [name for name in division if name in self.rule.contracted]
        for name in own:
            run = functools.partial(self.rule.contracted[name], division[name])
        found = jax.tree.leaves(run(*jax.tree.unflatten(tree, leaves)))
        for i, names in enumerate(self.names[self.count :]):
            over = tuple(a for name, axes in division.items() if name not in (*names, *own) for a in axes)
            if over:
                found[i] = jax.lax.psum(found[i], over)
        return found

    def _key(self, data: Array, rows: Sequence[str], division: _Division, mesh: Mapping[str, int]) -> Any:
        """Returns the key of a shard, which counts the rows of dropout as the whole array does."""
        within = tuple(self.first.get(name, 1) if name.isidentifier() else int(name) for name in rows)
        start, stride = jnp.uint32(0), 1
        for name, size in reversed([*zip(rows, within, strict=True)]):
            if name in division:
                part = size // math.prod(mesh[a] for a in division[name])
                start = start + jax.lax.axis_index(division[name]).astype(jnp.uint32) * jnp.uint32(
                    part * stride % 2**32
                )
            stride *= size
        return ShardKey(data, jnp.broadcast_to(start, data.shape[:-1]), within)


def _is_key(names: _Names) -> bool:
    return bool(names) and names[-1].startswith("key(")


def _expand(names: _Names, shape: tuple[int, ...]) -> _Names:
    """Returns one name for each axis. `...` becomes names that count from the right."""
    if _is_key(names):
        return (*names[:-1], *("K",) * (len(shape) - len(names) + 1))
    if "..." not in names:
        return names
    at, more = names.index("..."), len(shape) - len(names) + 1
    return (*names[:at], *(f"d{i}" for i in reversed(range(more))), *names[at + 1 :])
