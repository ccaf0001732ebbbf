"""Ops on rows: LayerNorm, RMSNorm, softmax and log-softmax."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxft.fusion.algebra import (
    FLOATS,
    Factor,
    Map,
    Term,
    factors,
    identity,
    is_per_row,
    is_vector,
    source,
    strip,
    terms,
    view,
    widest,
)
from jaxft.fusion.graph import ELEMENTWISE, Graph, Node, Var
from jaxft.fusion.site import (
    Options,
    Refused,
    Site,
    as_dtype,
    as_vector,
    check_kept_inside,
    fill,
    need,
    outward,
    present,
    region,
)
from jaxft.ops.layer_norm import layer_norm, rms_norm
from jaxft.ops.softmax import log_softmax, softmax

Mask = tuple[Var, Map, bool]  # a mask, the map from the axes of the logits to it, and whether True means masked


@dataclasses.dataclass(frozen=True)
class Norm:
    """A LayerNorm or, without `center`, an RMSNorm: y = norm(x) * gamma + beta, computed in `dtype`."""

    y: Var
    x: Var
    gamma: Var | None
    beta: Var | None
    epsilon: float
    center: bool
    variance: str
    dtype: Any

    @property
    def vectors(self) -> tuple[Var | None, Var | None]:
        """The scale and the shift."""
        return self.gamma, self.beta

    @property
    def static(self) -> dict[str, Any]:
        """The settings, for people."""
        return {"epsilon": self.epsilon, "variance": self.variance} if self.center else {"epsilon": self.epsilon}


def _mean_of(g: Graph, coefficient: float, v: Var) -> Var | None:
    """Returns x if coefficient * v is plus or minus the mean of x over its last axis."""
    node = g.defs.get(v)
    if node is None or node.name != "reduce_sum":
        return None
    x = g.find(node.ins[0])
    if tuple(node.params["axes"]) != (len(x.shape) - 1,):
        return None
    return x if _is_one(abs(coefficient) * x.shape[-1], v) else None


def _is_one(x: float, v: Var) -> bool:
    """Returns whether n times the factor 1 / n of `v` is 1. In 16 bits, the factor has a relative error of 2^-9."""
    return abs(x - 1) < (1e-6 if v.dtype.itemsize > 2 else 4e-3)


def _check_centered(g: Graph, v: Var, x: Var, scale: float = 1.0) -> None:
    """Raises `Refused` unless scale * v = x - mean(x)."""
    found = terms(g, v, scale=scale, stop={x})
    plus = [t for t in found if t[1] is x and t[0] == 1 and t[2] == identity(x.shape)]
    minus = [t for t in found if t[0] < 0 and _is_mean(g, *t, x)]
    need(len(found) == 2 and len(plus) == len(minus) == 1, "what is squared is not x - mean(x)")


def _is_mean(g: Graph, coefficient: float, v: Var | None, where: Map | None, x: Var) -> bool:
    y = None if v is None else _mean_of(g, coefficient, v)
    return v is not None and where is not None and is_per_row(v, where, x) and y is not None and source(g, y) is x


def _read_norms(g: Graph, anchor: Node) -> list[Norm]:
    """Reads the normalisation whose root is `anchor`. There are several if it is scaled and shifted in several ways."""
    if anchor.name == "pow":
        need(g.number(anchor.ins[1]) in (-0.5, 0.5))
    variance = g.find(anchor.ins[0])
    every = _unclipped(g, variance)
    epsilon = sum(c for c, v, _ in every if v is None)
    rest = [(c, v) for c, v, _ in every if v is not None]
    sums = [
        (c, v) for c, v in rest if (node := g.defs.get(v)) is not None and node.name in ("dot_general", "reduce_sum")
    ]
    need(sums, _what_is_between(g, variance))
    need(len(sums) == 1, "the argument of the root is not one mean of squares")
    inner, others = _squared(g, *sums[0]), [(c, v) for c, v in rest if v is not sums[0][1]]
    numbers = [v for _, v, where in every if v is not None and where != identity(variance.shape)]
    need(not numbers, "epsilon, or another term of the variance, is neither a number nor one for each row")
    need(epsilon > 0, "there is no epsilon inside of the root")
    if others:
        need(len(others) == 1 and others[0][0] < 0, "the variance has further terms")
        scale, mean = factors(g, others[0][1])
        need(len(mean) == 1 and mean[0][1:] == (identity(others[0][1].shape), 2), "the variance has further terms")
        of_mean = _mean_of(g, math.sqrt(abs(others[0][0] * scale)), mean[0][0])
        x = source(g, inner)
        need(of_mean is not None and source(g, of_mean) is x, "E[x^2] - E[x]^2 has two different x")
        readings, refused, kind = [(x, True)], "", "E[x^2] - E[x]^2"
    else:
        (readings, refused), kind = _readings(g, inner), "two passes"
    need(str(readings[0][0].dtype) in FLOATS, f"x is {readings[0][0].dtype}")
    norms, inside = list[Norm](), set[Node]()
    reason = refused or "what follows the root is not x * rsqrt * gamma + beta"
    names = (
        "add",
        "broadcast_in_dim",
        "convert_element_type",
        "div",
        "integer_pow",
        "mul",
        "reshape",
        "squeeze",
        "sub",
    )
    for y, (x, center) in itertools.product(outward(g, anchor.out, names, 9), readings):
        if y.shape == x.shape and str(y.dtype) in FLOATS and g.defs[y] not in inside:
            try:
                gamma, beta = _affine(g, y, x, variance, center)
            except Refused as error:
                reason = str(error) or reason
                continue
            dtype = widest(x.dtype, y.dtype)
            norms.append(Norm(y, x, gamma, beta, epsilon, center, kind, dtype))
            inside |= region(g, [y], {x})
    need(norms, reason)
    return norms


def _readings(g: Graph, inner: Var) -> tuple[list[tuple[Var, bool]], str]:
    """Reads a norm that has the mean of the squares of `inner`.

    Returns what x may be and whether its mean is subtracted, and the reason if it is not although it seems to be.
    """
    refused, plain = "", [(source(g, inner), False)]
    for scale in (1.0, -1.0):  # mean(x) - x has the same squares as x - mean(x)
        found = terms(g, inner, scale=scale)
        means = [y for c, v, _ in found if v is not None and c < 0 and (y := _mean_of(g, c, v)) is not None]
        if means:
            x = source(g, means[-1])
            try:
                _check_centered(g, inner, x, scale)
            except Refused as error:
                refused = str(error)
            else:
                return ([(x, True)] if scale > 0 else [(x, True), *plain]), ""
    above = g.defs.get(inner)
    if above is not None and above.name == "neg":
        plain.append((source(g, above.ins[0]), False))
    return plain, refused


def _squared(g: Graph, coefficient: float, v: Var) -> Var:
    """Returns the array whose mean of squares over the last axis is coefficient * v."""
    node = g.defs[v]
    operand = g.find(node.ins[0])
    last, lead = len(operand.shape) - 1, tuple(range(len(operand.shape) - 1))
    square, where = strip(g, operand)
    above = g.defs.get(square)
    is_square = above is not None and (
        above.name == "square"
        or (above.name == "integer_pow" and above.params["y"] == 2)
        or (above.name == "mul" and g.find(above.ins[0]) is g.find(above.ins[1]))
    )
    if node.name == "dot_general":
        of_itself = (((last,),) * 2, (lead,) * 2)
        need(
            operand is g.find(node.ins[1]) and node.params["dimension_numbers"] == of_itself,
            "squares go into a matmul" if is_square else "",
        )
    else:
        axes = tuple(map(int, node.params["axes"]))
        need(axes == (last,), f"statistics over axes {axes} of {last + 1}; only the last axis is fused")
    divisor, count = 1 / coefficient, operand.shape[-1]
    need(
        abs(coefficient) != 1, "squares are summed, as in an L2 norm, and no mean of them is taken" if count > 1 else ""
    )
    need(_is_one(coefficient * count, v), f"the variance divides by {divisor:.6g}, not by {count}")
    if node.name == "dot_general":
        return operand
    if is_square and above is not None:
        inner, where = strip(g, above.ins[0], where)  # it may be a product itself
    else:
        scale, found = factors(g, square, where)
        need(len(found) == 1 and found[0][2] == 2 and abs(scale - 1) < 1e-6, "the variance is not a mean of squares")
        inner, where, _ = found[0]
    need(where == identity(operand.shape), "the variance is not a mean of squares")
    return inner


def _what_is_between(g: Graph, v: Var) -> str:
    """Returns the operation between a sum and a root with the argument `v`, or "" if there is no sum."""
    stack, seen = [(g.find(v), "")], set[Var]()
    while stack:
        v, name = stack.pop()
        node = g.defs.get(v)
        if node is None or v in seen:
            continue
        seen.add(v)
        if node.name == "reduce_sum" and name:
            return f"{name} between the mean of squares and the root"
        if node.out.size == v.size and node.name in (*ELEMENTWISE, "custom_jvp_call"):
            is_usual = node.name in ("add", "convert_element_type", "div", "mul", "sub")
            stack += [(g.find(x), name if is_usual else node.name) for x in node.ins if x.size == v.size]
        elif (step := view(g, v)) is not None:
            stack.append((step[0], name))
    return ""


def _unclipped(g: Graph, v: Var) -> list[Term]:
    """Returns the terms of a variance. Ignores a maximum with 0, which Flax applies to E[x^2] - E[x]^2."""
    found: list[Term] = []
    for c, term, where in terms(g, v):
        node = g.defs.get(term) if term is not None else None
        if node is not None and node.name == "max" and 0 in map(g.number, node.ins):
            (kept,) = [x for x in node.ins if g.number(x) != 0]
            found += terms(g, kept, where, c)
        else:
            found.append((c, term, where))
    return found


def _affine(g: Graph, y: Var, x: Var, variance: Var, center: bool) -> tuple[Var | None, Var | None]:
    """Returns gamma and beta of y = (x - mean(x)) * variance^-0.5 * gamma + beta."""
    beta: Var | None = None
    main: list[tuple[float, list[Factor]]] = []
    for c, v, where in terms(g, y, stop={x}):
        need(v is not None, "a constant is added after the normalisation")
        assert v is not None and where is not None
        scale, found = factors(g, v, where, stop={x})
        if any(power == -0.5 and f is variance for f, _, power in found):
            main.append((c * scale, found))
        else:
            need(is_vector(v, where, x), "what is added after the normalisation is not a vector [D]")
            need(beta is None and c == 1, "two vectors are added after the normalisation")
            beta = v
    need(main)

    def split(found: list[Factor]) -> tuple[Var | None, list[Factor]]:
        gamma, rest = None, []
        for f, where, power in found:
            if f is variance and power == -0.5:
                need(is_per_row(f, where, x))
            elif is_vector(f, where, x) and power == 1 and not _depends(g, f, x):
                need(gamma is None, "two vectors are multiplied after the normalisation")
                gamma = f
            else:
                rest.append((f, where, power))
        need(len(rest) == 1 and rest[0][2] == 1)
        return gamma, rest

    if len(main) == 1:
        scale, found = main[0]
        gamma, ((core, where, _),) = split(found)
        need(abs(scale - 1) < 1e-6, f"the normalisation is multiplied by {scale:.6g}")
        need(where == identity(x.shape) and (center or core is x))
        if center:
            _check_centered(g, core, x)
    else:  # x * r * gamma - mean * r * gamma
        need(center and len(main) == 2)
        (plus, of_x), (minus, of_mean) = sorted(main, key=lambda part: -part[0])
        gamma, ((core, where, _),) = split(of_x)
        other, ((mean, of_row, _),) = split(of_mean)
        need(gamma is other and core is x and where == identity(x.shape) and abs(plus - 1) < 1e-6 and minus < 0)
        need(_is_mean(g, minus, mean, of_row, x))
    need(center or beta is None, "an RMSNorm with a shift")
    return gamma, beta


def _depends(g: Graph, v: Var, x: Var) -> bool:
    """Returns whether `v` is computed from `x`. A vector of parameters is not, even if x is a single row."""
    return v is x or any(x in map(g.find, node.ins) for node in region(g, [v], {x}))


def norm_sites(g: Graph, anchor: Node, options: Options) -> list[Site]:
    """Recognises LayerNorms or RMSNorms of one array by their root."""
    need(g.number(anchor.out) is None)
    norms = _read_norms(g, anchor)
    x, ys = norms[0].x, [norm.y for norm in norms]
    leaves = present(x, *(v for norm in norms for v in norm.vectors))
    inside = region(g, ys, leaves)
    check_kept_inside(g, inside, ys, leaves, x.size, "an intermediate result of the normalisation")
    rows = x.size // max(1, x.shape[-1])
    for node in inside:
        if node.out.size == rows and x.shape[-1] > 1:
            seen = [node.out, *outward(g, node.out, ("convert_element_type", "reshape", "squeeze"), 2)]
            need(not any(None in g.uses(v) for v in seen), "the mean or the variance is also returned")
    return [_norm_site(g, anchor, norm, len(norms) == 1, options) for norm in norms]


def _norm_site(g: Graph, anchor: Node, norm: Norm, is_only: bool, options: Options) -> Site:
    def call(x: Any, *vectors: Any, **in_place: Any) -> Any:
        gamma, beta = map(as_vector, fill(norm.vectors, vectors))
        x = as_dtype(x, norm.dtype)
        settings: dict[str, Any] = {"epsilon": norm.epsilon, "implementation": options.implementation}
        if norm.center:
            return layer_norm(x, gamma, beta, **settings, **in_place)
        return rms_norm(x, gamma, **settings, **in_place)

    op, leaves = "layer_norm" if norm.center else "rms_norm", present(norm.x, *norm.vectors)
    # One of several norms must neither absorb the op before it nor overwrite the array.
    parts, operands = (norm, [norm.x]) if is_only else (None, [])
    inside = region(g, [norm.y], leaves)
    return Site(op, op, anchor, [norm.y], leaves, call, norm.static, inside, parts, operands=operands)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """y = softmax(logits) over `axis`.

    `mask` selects the elements of the sum, or is None for all elements. The other elements of y are 0. `empty` is the
    result of a row without selected elements: "zero", or "nan" from a division by 0.
    """

    y: Var
    logits: Var
    axis: int
    mask: Mask | None = None
    empty: str = ""


def mask_after(g: Graph, node: Node, v: Var) -> Mask | None:
    """Returns the mask if a node is where(mask, v, 0), where(mask, 0, v) or v * mask, else None."""
    ins = [g.find(x) for x in node.ins]
    if node.name == "select_n" and len(ins) == 3 and v in ins[1:] and ins[0].dtype == bool:
        at = ins.index(v, 1)
        return (*strip(g, ins[0]), at == 1) if g.number(ins[3 - at]) == 0 else None
    if node.name == "mul" and v in ins:
        other = ins[1 - ins.index(v)]
        mask, where = strip(g, other)
        return (mask, where, False) if other.shape and mask.dtype == bool else None
    return None


def _masked(g: Graph, v: Var) -> dict[Var, Mask]:
    """Returns the values where(mask, v, 0) and v * mask of the graph, with their masks."""
    users = [user for user in g.uses(v) if user is not None]
    return {g.find(user.out): mask for user in users if (mask := mask_after(g, user, v)) is not None}


def _without_shift(g: Graph, v: Var, axis: int) -> Var:
    """Returns z where v = z - top, and top is the same along the axis."""
    node = g.node_of(v)
    if node is not None and node.name == "sub":
        _, where = strip(g, node.ins[1], stop_gradient=True)
        top = g.find(node.ins[1])
        if not top.shape or len(where) == len(v.shape) and where[axis] is None or top.shape[axis] == 1:
            return g.find(node.ins[0])
    return g.find(v)


def read_softmax(g: Graph, anchor: Node) -> Softmax:
    """Reads the softmax whose exponential is `anchor`."""
    e = g.find(anchor.out)
    masked = {out: mask for x in outward(g, e, ("convert_element_type",), 1) for out, mask in _masked(g, x).items()}
    numerators = {e, *masked}
    casts = [x for numerator in numerators for x in outward(g, numerator, ("convert_element_type",), 1)]
    reason = ""
    dividing = [user for x in (e, *casts) for user in g.uses(x) if user is not None and user.name in ("div", "mul")]
    for node in dividing:
        y = g.find(node.out)
        scale, found = factors(g, y, stop=numerators)
        upper, lower = ([f for f in found if f[2] == power] for power in (1, -1))
        if len(upper) != 1 or len(lower) != 1 or upper[0][0] not in numerators:
            continue
        total = g.defs.get(lower[0][0])
        summed = (
            strip(g, total.ins[0], stop=numerators)[0] if total is not None and total.name == "reduce_sum" else None
        )
        if len(found) != 2 or scale != 1 or total is None or summed not in numerators:
            if lower[0][0].size < y.size and any(_depends(g, lower[0][0], x) for x in numerators):
                reason = "the exponentials are not divided by their sum alone"
            continue
        axes = tuple(map(int, total.params["axes"]))
        need(len(axes) == 1, f"a softmax over {len(axes)} axes")
        in_order = is_per_row(lower[0][0], lower[0][1], y, axes[0]) and upper[0][1] == identity(y.shape)
        need(in_order, "the exponentials are divided by the sums of other rows")
        need(anchor.name == "exp", "a softmax with base 2")
        logits = _without_shift(g, anchor.ins[0], axes[0])
        if summed is e:
            need(upper[0][0] is e, "the softmax is masked after its sum")
            return Softmax(y, logits, axes[0])
        mask = masked[summed]
        for safe, other in _masked(g, y).items():
            if other == mask:
                return Softmax(safe, logits, axes[0], mask, "zero")
        need(upper[0][0] is summed, "the sum of the softmax has a mask that its result has not")
        return Softmax(y, logits, axes[0], mask, "nan")
    for _, v, _ in terms(g, anchor.ins[0]):  # the exponential of a log-softmax
        log = None if v is None else g.node_of(v)
        if log is not None and log.name == "log":
            argument, z = log_of_sum(g, log)
            if _is_log_softmax(g, g.find(anchor.ins[0]), g.find(log.out), argument, z):
                return Softmax(e, z, len(e.shape) - 1)
    raise Refused(reason)


def softmax_site(g: Graph, anchor: Node, options: Options) -> Site:
    """Recognises a softmax by its exponential."""
    found = read_softmax(g, anchor)
    y, z = found.y, found.logits
    need(found.axis == len(y.shape) - 1, f"a softmax over axis {found.axis} of {len(y.shape)}; only the last is fused")
    need(found.mask is None, "a softmax with a mask in its sum")
    return _softmax_site(g, anchor, y, z, softmax, "softmax", options)


def log_of_sum(g: Graph, anchor: Node) -> tuple[Var, Var]:
    """Reads log(sum(exp(argument))) over the last axis. Returns the argument, and it without a shift of its rows."""

    def above(v: Var) -> Node | None:
        v, root = g.find(v), v
        v, where = strip(g, v)
        return g.node_of(v) if where == identity(root.shape) else None

    total = above(anchor.ins[0])
    if total is not None and total.name == "abs":  # logsumexp takes the logarithm of it
        total = above(total.ins[0])
    need(total is not None and total.name == "reduce_sum")
    assert total is not None
    exponential = above(total.ins[0])
    need(exponential is not None and exponential.name == "exp")
    assert exponential is not None
    argument, axes = g.find(exponential.ins[0]), tuple(map(int, total.params["axes"]))
    need(axes == (len(argument.shape) - 1,), f"a log-softmax over axes {axes}; only the last is fused")
    return argument, _without_shift(g, argument, axes[0])


def _is_log_softmax(g: Graph, y: Var, log: Var, argument: Var, z: Var) -> bool:
    """Returns whether y = argument - log, given what `log_of_sum` returns."""
    want, found = (terms(g, v, stop={log, z}) for v in (argument, y))
    rest = [t for t in found if t not in want]
    if len(found) != len(want) + 1 or len(rest) != 1 or rest[0][:2] != (-1.0, log):
        return False
    return rest[0][2] is not None and is_per_row(log, rest[0][2], y)


def log_softmax_site(g: Graph, anchor: Node, options: Options) -> Site:
    """Recognises a log-softmax by its logarithm."""
    argument, z = log_of_sum(g, anchor)
    log = g.find(anchor.out)
    for y in outward(g, log, ("add", "broadcast_in_dim", "convert_element_type", "reshape", "sub", "squeeze"), 6):
        if y.shape != argument.shape or str(y.dtype) not in FLOATS:
            continue
        if _is_log_softmax(g, y, log, argument, z):
            return _softmax_site(g, anchor, y, z, log_softmax, "log_softmax", options)
    raise Refused("")


def _rows_of_minus_infinity(g: Graph, z: Var) -> tuple[Var, bool] | None:
    """Returns (mask, inverted) of logits where(mask, x, -inf). The softmax of a row without a True is NaN.

    Returns None if nothing in the graph makes a whole row -inf. Raises `Refused` if something else than a mask may.
    """
    stack, seen = [g.find(z)], set[Var]()
    while stack:
        v = stack.pop()
        node, known = g.defs.get(v), g.constant(v)
        if v in seen or (node is None and known is None):
            continue
        seen.add(v)
        if known is not None:
            is_float_constant = jnp.issubdtype(known.dtype, np.floating)
            lowest = known.max(-1, initial=-math.inf) if is_float_constant and known.ndim else known
            need(
                not is_float_constant or not np.isneginf(lowest).any(),
                "a row of -inf alone is NaN in fn, and 0 in the op",
            )
            continue
        assert node is not None
        if node.name == "select_n" and node.ins[0].dtype == bool and node.ins[0].shape == z.shape and v is g.find(z):
            for at in (1, 2):
                if g.number(strip(g, node.ins[at])[0]) == -math.inf:
                    mask = g.constant(node.ins[0])
                    is_full = mask is not None and (mask.astype(bool) ^ (at == 2)).any(-1).all()
                    _rows_of_minus_infinity(g, node.ins[3 - at])
                    return None if is_full else (g.find(node.ins[0]), at == 2)
        is_log_of_mask = node.name == "log" and strip(g, node.ins[0])[0].dtype == bool
        need(not is_log_of_mask, "a row of -inf alone is NaN in fn, and 0 in the op")
        if node.name in ELEMENTWISE or view(g, v) is not None:
            stack += [g.find(x) for x in node.ins]
    return None


def _softmax_site(g: Graph, anchor: Node, y: Var, z: Var, op: Any, name: str, options: Options) -> Site:
    need(str(z.dtype) in FLOATS and str(y.dtype) in FLOATS, f"the logits are {z.dtype}")
    inside = region(g, [y], {z})
    check_kept_inside(g, inside, [y], {z}, y.size, f"an intermediate result of the {name}")
    narrow = source(g, z)
    x = narrow if narrow.dtype == y.dtype else z
    dtype = widest(x.dtype, y.dtype)
    mask = None if options.masked_rows == "zero" else _rows_of_minus_infinity(g, z)

    def call(x: Any, *allowed: Any, **in_place: Any) -> Any:
        y = op(as_dtype(x, dtype), implementation=options.implementation, **in_place)
        if mask is not None:
            y = jnp.where(jnp.any(allowed[0] ^ mask[1], axis=-1, keepdims=True), y, jnp.asarray(jnp.nan, y.dtype))
        return y

    static, inputs = {"width": y.shape[-1]}, [x] if mask is None else [x, mask[0]]
    inside = region(g, [y], set(inputs))
    return Site(name, "softmax", anchor, [y], inputs, call, static, inside, (y, x), operands=[x])
