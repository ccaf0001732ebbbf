"""Attention: softmax(q @ k^T * scale + biases) @ v with masks, in any layout of the arrays."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.fusion.algebra import (
    FLOATS,
    Map,
    has_product,
    identity,
    is_like,
    makers,
    source,
    strip,
    view,
    widens,
    widest,
)
from jaxft.fusion.graph import Graph, Node, Var
from jaxft.fusion.rows import Mask, Softmax, mask_after, read_softmax
from jaxft.fusion.site import (
    Options,
    Refused,
    Site,
    as_dtype,
    check_kept_inside,
    need,
    only_cast,
    precision_name,
    region,
)
from jaxft.ops.attention import dot_product_attention

_LOW = -1e4  # masked logits are at most this
_SURELY_LOW = -9.9e8  # no logit is near this, nor near the lowest number of a dtype; -1e9 is -9.98e8 in bfloat16

# --- The softmax, the values and the logits ------------------------------------------------------------------------


@dataclasses.dataclass
class Logits:
    """The parts of the logits: scale * factors * product + biases, with masks. Each map is from the axes of the logits.

    Attributes:
      product: the node of q @ k^T.
      where: the map to the result of `product`.
      scale: the number that the product is multiplied by.
      factors: (value, map, power) of arrays that it is multiplied by.
      biases: (factor, value, map) of what is added.
      masks: the masks.
      masked: the values of masked logits.
      is_biased_after: whether biases are added to masked logits.
    """

    product: Node
    where: Map
    scale: float
    factors: list[tuple[Var, Map, int]]
    biases: list[tuple[float, Var, Map]]
    masks: list[Mask]
    masked: set[float]
    is_biased_after: bool = False


def _read_logits(g: Graph, z: Var, axis: int) -> Logits:
    factors: list[tuple[Var, Map, int]] = []
    biases: list[tuple[float, Var, Map]] = []
    masks: list[Mask] = []
    masked = set[float]()
    v, where, scale, is_biased_after = *strip(g, z), 1.0, False
    while True:
        node = g.defs.get(v)
        need(node is not None, "the logits are not a matmul")
        assert node is not None
        a, b = g.find(node.ins[0]), g.find(node.ins[-1])
        if node.name == "dot_general":
            return Logits(node, where, scale, factors, biases, masks, masked, is_biased_after)
        if node.name in ("mul", "div") and (number := g.number(b)):
            v, scale = a, scale * number if node.name == "mul" else scale / number
        elif node.name == "mul" and (number := g.number(a)):
            v, scale = b, scale * number
        elif node.name == "neg":
            v, scale = a, -scale
        elif node.name in ("add", "sub", "mul", "div"):
            first, second = has_product(g, a), has_product(g, b)
            need(
                first != second, "the logits are computed from two matmuls" if first else "the logits are not a matmul"
            )
            v, other = (a, b) if first else (b, a)
            of_other = strip(g, other, where, casts="floats")
            if node.name in ("add", "sub"):
                need(not factors, "a bias is multiplied by an array")
                biases.append((scale * (-1.0 if node.name == "sub" and first else 1.0), *of_other))
                scale *= -1.0 if node.name == "sub" and second else 1.0
            else:
                need(of_other[1][axis] is None, "the logits are multiplied by an array that varies over the keys")
                need(node.name == "mul" or first, "something is divided by the logits")
                factors.append((*of_other, 1 if node.name == "mul" else -1))
        elif node.name == "select_n" and len(node.ins) == 3:
            chosen = [x for x in node.ins[1:] if has_product(g, x)]
            low = g.number(strip(g, node.ins[1 if node.ins[2] in chosen else 2])[0])
            need(len(chosen) == 1 and isinstance(low, float), "the logits are selected from two arrays")
            assert low is not None
            need(not factors, "masked logits are multiplied by an array")
            need(low * scale <= _LOW, f"masked logits are {low * scale:.6g}, which is no mask")
            is_biased_after = is_biased_after or bool(biases)
            masks.append((*strip(g, node.ins[0], where), chosen[0] is node.ins[1]))
            masked.add(low * scale)
            v = g.find(chosen[0])
        else:
            raise Refused(f"{node.name} between the matmul and the softmax")
        v, where = strip(g, v, where)


def _find_values(g: Graph, found: Softmax) -> tuple[Node, int, Map, list[Mask]]:
    """Finds the matmul of the probabilities p and the values.

    Returns the matmul, the position of p among its operands, the map to p, and the masks of where(mask, p, 0) between.
    """
    matmuls: list[tuple[Node, Var]] = []
    masks: list[Mask] = []
    at: dict[Var, Map] = {found.y: identity(found.y.shape)}  # views of the probabilities, with their maps
    frontier = [found.y]
    while frontier:
        p = frontier.pop()
        for user in g.uses(p):
            need(user is not None, "the probabilities are also returned")
            assert user is not None
            out = g.find(user.out)
            step = view(g, out)
            if user.name == "stop_gradient":
                raise Refused("stop_gradient after the softmax")
            if step is not None and step[0] is p:
                at[out] = strip(g, out, stop={p})[1]
                at[out] = tuple(None if a is None else at[p][a] for a in at[out])
            elif user.name == "dot_general":
                matmuls.append((user, p))
                continue
            elif (mask := mask_after(g, user, p)) is not None and at[p] == identity(found.y.shape):
                masks.append(mask)
                at[out] = at[p]
            elif _draws_random_bits(g, user):
                raise Refused("dropout between softmax and values")
            else:
                raise Refused(f"the probabilities also go to {user.name}")
            frontier.append(out)
    need(matmuls)
    need(len(matmuls) == 1, "the probabilities go to several matmuls")
    matmul, p = matmuls[0]
    return matmul, 0 if g.find(matmul.ins[0]) is p else 1, at[p], masks


def _draws_random_bits(g: Graph, node: Node) -> bool:
    """Returns whether random bits are near among what a node is computed from."""
    stack, seen = [(node, 0)], set[Node]()
    while stack:
        node, depth = stack.pop()
        if node in seen or depth > 10:
            continue
        seen.add(node)
        if node.name.startswith(("random_", "threefry", "rng_")):
            return True
        stack += [(above, depth + 1) for v in node.ins if (above := g.node_of(v)) is not None]
    return False


# --- The layout ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of an operand of the op: batch, length, heads, groups of heads, and the size of a head."""

    batch: list[int]
    length: list[int]
    heads: list[int]
    groups: list[int]
    depth: int

    def arrange(self, x: Any) -> Any:
        """Transposes and reshapes an array to [B, L, N, H]."""
        order = (*self.batch, *self.length, *self.heads, *self.groups, self.depth)
        unit = tuple(a for a in range(x.ndim) if a not in order)
        sizes = [math.prod(x.shape[a] for a in part) for part in (self.batch, self.length, self.heads + self.groups)]
        return x.transpose(*unit, *order).reshape(*sizes, x.shape[self.depth])


@dataclasses.dataclass(frozen=True)
class Layout:
    """The roles of the axes of operands, logits and result.

    Attributes:
      q, k, v: the axes of the operands.
      q_side: which operand of the first matmul the queries are.
      logits: the axes of the logits that are [batch, heads, groups, queries, keys]. One of size 1 may be missing.
      sizes: the sizes of these five, missing ones included.
      result: for each axis of the result, the axis of the logits that it is, or "depth", or None if its size is 1.
    """

    q: Axes
    k: Axes
    v: Axes
    q_side: int
    logits: list[list[int | None]]
    sizes: list[list[int]]
    result: list[Any]

    @property
    def counts(self) -> list[int]:
        """The sizes B, K, N / K, T and S."""
        return [math.prod(part) for part in self.sizes]

    def expand(self, x: Any, where: Map) -> Any:
        """Returns an array of the logits' axes as [B or 1, N or 1, T or 1, S or 1]."""
        kept = [[None if a is None else where[a] for a in part] for part in self.logits]
        every = [a for part in kept for a in part if a is not None]
        x = x.transpose(every + [a for a in range(x.ndim) if a not in every])
        shape = iter(x.shape)
        ones = [[1 if a is None else next(shape) for a in part] for part in kept]
        x = x.reshape([n for part in ones for n in part])
        joined = [(ones[0], self.sizes[0]), (ones[1] + ones[2], self.sizes[1] + self.sizes[2]), (ones[3], ones[3]),
                  (ones[4], ones[4])]  # fmt: skip
        full = [whole if math.prod(own) > 1 else own for own, whole in joined]  # several axes become one
        x = jnp.broadcast_to(x, [n for part in full for n in part])
        return x.reshape([math.prod(part) for part in full])

    def restore(self, y: Any, shape: tuple[int, ...]) -> Any:
        """Returns the result [B, T, N, H] of the op in the layout of the result."""
        batch, heads, groups, queries, _ = self.sizes
        y = y.reshape(*batch, *queries, *heads, *groups, y.shape[-1])
        names = [a for i in (0, 3, 1, 2) for a in self.logits[i]] + ["depth"]
        order = [names.index(name) for name in self.result if name is not None]
        return y.transpose(order + [a for a in range(y.ndim) if a not in order]).reshape(shape)


def _free(node: Node, side: int) -> list[int]:
    """Returns the axes of an operand of a matmul that are axes of its result alone."""
    contracted, batch = node.params["dimension_numbers"]
    return [a for a in range(len(node.ins[side].shape)) if a not in contracted[side] and a not in batch[side]]


def _unit_free(axes: list[int], shape: tuple[int, ...]) -> list[int]:
    """Returns the axes whose size is not 1, or the first one if all have size 1."""
    return [a for a in axes if shape[a] != 1] or axes[:1]


def _read_layout(g: Graph, found: Softmax, logits: Logits, pv: Node, p_side: int, p_where: Map) -> Layout:
    """Reads the role of each axis off the two matmuls: batch, heads, queries, keys, or size of a head."""
    qk, axis, z_shape = logits.product, found.axis, found.logits.shape
    contracted, batch = qk.params["dimension_numbers"]
    roles: list[tuple[Any, int]] = [("batch", i) for i in range(len(batch[0]))]
    roles += [(0, a) for a in _free(qk, 0)] + [(1, a) for a in _free(qk, 1)]
    role: list[Any] = [None if a is None else roles[a] for a in logits.where]
    place = {r: a for a, r in enumerate(role) if r is not None}  # where the logits have a role
    need(z_shape[axis] != 1, "there is one key, so that the softmax is 1")
    need(role[axis] is not None and role[axis][0] in (0, 1), "the softmax is not over an axis of the keys")
    k_side = role[axis][0]
    q_side, v_side = 1 - k_side, 1 - p_side
    q, k, v = g.find(qk.ins[q_side]), g.find(qk.ins[k_side]), g.find(pv.ins[v_side])
    need(len(contracted[0]) == 1, "the first matmul contracts several axes")
    k_length = _unit_free(_free(qk, k_side), k.shape)
    need(len(k_length) <= 1, "the keys have further axes")
    # The longest axis is the length of the queries, the first one if there are two. The others are groups of heads.
    q_free = _unit_free(_free(qk, q_side), q.shape)
    q_length = [max(q_free, key=lambda a: q.shape[a])] if q_free else []
    groups = [a for a in q_free if a not in q_length]
    paired = [i for i, a in enumerate(batch[q_side]) if q.shape[a] != 1]
    heads = [max(paired, key=lambda i: batch[q_side][i])] if len(paired) > 1 else []
    others = [i for i in paired if i not in heads]

    # The second matmul has the same batch, and contracts the keys.
    pv_contracted, pv_batch = pv.params["dimension_numbers"]
    need(len(pv_contracted[p_side]) == 1, "the second matmul contracts several axes")
    need(p_where[pv_contracted[p_side][0]] == axis, "the second matmul does not sum over the keys")
    v_of = {p_where[a]: b for a, b in zip(pv_batch[p_side], pv_batch[v_side], strict=True) if p_where[a] is not None}
    need(sorted(v_of) == sorted(place["batch", i] for i in paired), "the values have another batch than the keys")
    v_depth = _unit_free(_free(pv, v_side), v.shape)
    need(len(v_depth) == 1, "the values have further axes")
    q_depth, k_depth = contracted[q_side][0], contracted[k_side][0]
    size = q.shape[q_depth]
    need(v.shape[v_depth[0]] == size, f"heads of queries have size {size}, of values {v.shape[v_depth[0]]}")

    def axes(of: Any, length: list[int], groups: list[int], depth: int) -> Axes:
        return Axes([of[i] for i in others], length, [of[i] for i in heads], groups, depth)

    v_batch = {i: v_of[place["batch", i]] for i in paired}
    parts: list[list[int | None]] = [[place["batch", i] for i in others], [place["batch", i] for i in heads]]
    parts += [[place[q_side, a] for a in groups], [place.get((q_side, a)) for a in q_length], [axis]]
    sizes = [[1 if a is None else z_shape[a] for a in part] for part in parts]
    halves: list[list[Any]] = [[p_where[a] for a in _free(pv, p_side)], []]
    halves[1] += ["depth" if a == v_depth[0] else None for a in _free(pv, v_side)]
    result: list[Any] = [p_where[a] for a in pv_batch[p_side]]
    result += halves[p_side] + halves[v_side]
    result = [None if n == 1 else name for name, n in zip(result, pv.out.shape, strict=True)]
    return Layout(axes(batch[q_side], q_length, groups, q_depth), axes(batch[k_side], k_length, [], k_depth),
                  axes(v_batch, [pv_contracted[v_side][0]], [], v_depth[0]), q_side, parts, sizes, result)  # fmt: skip


# --- Masks and biases ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks and biases as the op takes them.

    Attributes:
      is_causal: whether a mask is causal.
      masks: the other masks.
      biases: (factor, value, map) of what is added to the logits.
      empty: the result of a query without keys to attend to: "zero", "mean" of the values, or "nan".
    """

    is_causal: bool
    masks: list[Mask]
    biases: list[tuple[float, Var, Map]]
    empty: str

    def apply(self, layout: Layout, arrays: Any) -> tuple[Any, Any]:
        """Returns the mask and the bias, or None."""
        mask = bias = None
        for (_, where, inverted), x in zip(self.masks, arrays, strict=False):
            x = layout.expand(x if x.dtype == bool else x != 0, where)
            x = ~x if inverted else x
            mask = x if mask is None else mask & x
        for (factor, _, where), x in zip(self.biases, arrays[len(self.masks) :], strict=True):
            x = layout.expand(x, where)
            x = x if factor == 1 else x.astype(jnp.float32) * factor
            bias = x if bias is None else bias.astype(jnp.float32) + x.astype(jnp.float32)
        return mask, bias

    def fill_empty(self, y: Any, v: Any, mask: Any) -> Any:
        """Returns the result [B, T, N, H] with `empty` in the rows of queries without keys to attend to."""
        if self.empty == "zero" or mask is None:
            return y
        allowed = mask & jnp.tri(y.shape[1], v.shape[1], dtype=bool) if self.is_causal else mask
        is_empty = jnp.swapaxes(~jnp.any(allowed, axis=-1), 1, 2)[..., None]
        instead = jnp.asarray(jnp.nan, y.dtype)
        if self.empty == "mean":
            mean = jnp.mean(v, axis=1, keepdims=True)  # JAX adds up in float32
            instead = jnp.repeat(mean, y.shape[2] // v.shape[2], axis=2)
        return jnp.where(is_empty, instead, y)


def _read_masks(
    g: Graph, found: Softmax, logits: Logits, after: list[Mask], layout: Layout, options: Options
) -> Masks:  # fmt: skip
    inside = [] if found.mask is None else [found.mask]
    # Adding -inf is what a mask does. A larger number leaves the differences between the logits of a masked row.
    low = -math.inf if options.masked_rows == "exact" else _LOW
    additive = {bias: seen for bias in logits.biases if (seen := _additive_mask(g, *bias, low)) is not None}
    biases = [bias for bias in logits.biases if bias not in additive]
    if any(_additive_mask(g, *bias, -math.inf) is not None for bias in additive):
        is_mixed = any(map(math.isfinite, logits.masked))
        need(options.masked_rows != "exact" or not is_mixed, "masks of different values")
        logits.masked.add(-math.inf)
    every = logits.masks + inside
    need(all(mask in every for mask in after), "the probabilities are masked after the softmax")
    empty = "mean" if math.isfinite(min(logits.masked, default=0.0)) else "nan"
    empty = "zero" if after or options.masked_rows == "zero" else found.empty or empty
    if options.masked_rows != "zero":
        need(len(set(every)) == 1 or not (inside or after), "masks of different values")

    is_causal, masks = False, list[Mask]()
    for mask, where, inverted in every:
        for part, part_where in [(mask, where)] if inverted else _conjuncts(g, mask, where):
            known = g.constant(part)
            known = None if known is None else known.astype(bool) ^ inverted
            if known is not None and _is_causal(known, part.shape, part_where, layout):
                is_causal = True
            elif known is None or not known.all():
                masks.append((part, part_where, inverted))
    masks += additive.values()
    if options.masked_rows == "exact":
        low = max(logits.masked, default=-math.inf)
        is_lowest = any(low == float(jnp.finfo(d).min) for d in FLOATS)
        need(not masks or is_lowest or low <= _SURELY_LOW,
             f'masked logits are {low:.6g}; masked_rows="mask" takes them for a mask')  # fmt: skip
        need(len(logits.masked) <= 1 or not masks, "masks of different values")
        is_mean = masks and empty == "mean"
        need(not (is_mean and logits.is_biased_after), "a bias is added to masked logits, whose rows may be all masked")
    return Masks(is_causal, masks, biases, empty)


def _conjuncts(g: Graph, v: Var, where: Map) -> list[tuple[Var, Map]]:
    v, where = strip(g, v, where)
    node = g.defs.get(v)
    if node is not None and node.name == "and":
        return [part for x in node.ins for part in _conjuncts(g, x, where)]
    return [(v, where)]


def _is_causal(known: np.ndarray, shape: tuple[int, ...], where: Map, layout: Layout) -> bool:
    """Returns whether a constant mask of this shape is lower triangular in queries and keys, and constant elsewhere."""
    ends: list[Any] = [where[a] if a is not None else None for part in layout.logits[3:] for a in part]
    used = {a for a in where if a is not None}
    if None in ends or len(ends) != 2 or used != set(ends):
        return False
    full = np.broadcast_to(known, [size if a in used else 1 for a, size in enumerate(shape)])
    queries, keys = (shape[a] for a in ends)
    full = full.transpose([a for a in range(full.ndim) if a not in ends] + ends).reshape(queries, keys)
    return bool(np.array_equal(full, np.tri(queries, keys, dtype=bool)))


def _additive_mask(g: Graph, factor: float, v: Var, where: Map, low: float) -> Mask | None:
    """Returns the mask for which factor * v is 0 where attended and at most `low` elsewhere."""
    v, where = strip(g, v, where)
    node = g.defs.get(v)
    if node is None:
        return None
    if node.name == "select_n" and len(node.ins) == 3:
        no, yes = (g.number(strip(g, x)[0]) for x in node.ins[1:])
        mask, mask_where = strip(g, node.ins[0], where)
        if yes == 0 and no is not None and factor * no <= low:
            return mask, mask_where, False
        if no == 0 and yes is not None and factor * yes <= low:
            return mask, mask_where, True
    if node.name == "log" and factor > 0:
        mask, mask_where = strip(g, node.ins[0], where)
        return (mask, mask_where, False) if mask.dtype == bool else None
    if node.name in ("mul", "div") and (number := g.number(node.ins[1])):
        inner = strip(g, node.ins[0], where)
        return _additive_mask(g, factor * number if node.name == "mul" else factor / number, *inner, low)
    if node.name == "mul" and (number := g.number(node.ins[0])):
        return _additive_mask(g, factor * number, *strip(g, node.ins[1], where), low)
    for one, other, is_low in ((0, 1, -math.inf < factor <= low), (1, 0, math.inf > factor >= -low)):
        if node.name == "sub" and is_low and g.number(node.ins[one]) == 1:
            mask, mask_where = strip(g, node.ins[other], where)
            return (mask, mask_where, False) if mask.dtype == bool else None
    return None


# --- The site ------------------------------------------------------------------------------------------------------


def _unscaled(g: Graph, x: Var) -> tuple[float, Var]:
    """Splits x = factor * y, where the factor is a number. Returns (factor, y)."""
    factor, v, where = 1.0, *strip(g, x, casts="none")
    while is_like(v, where, x) or where == identity(x.shape):
        node = g.defs.get(v)
        if node is None or node.name not in ("mul", "div"):
            break
        a, b = node.ins
        if number := g.number(b):
            v, factor = g.find(a), factor * number if node.name == "mul" else factor / number
        elif node.name == "mul" and (number := g.number(a)):
            v, factor = g.find(b), factor * number
        else:
            break
        if v.shape != x.shape or v.dtype != x.dtype:
            return 1.0, x
    return (factor, v) if v.shape == x.shape and factor != 1.0 else (1.0, x)


def attention_site(g: Graph, anchor: Node, options: Options) -> Site:
    """Recognises attention by the exponential of its softmax."""
    joined = [x for node in makers(g, anchor.ins[0], "concatenate") for x in node.ins]
    need(not any(has_product(g, x) for x in joined), "the logits of a matmul are concatenated with other logits")
    need(has_product(g, anchor.ins[0]))
    found = read_softmax(g, anchor)
    pv, p_side, p_where, after = _find_values(g, found)
    logits = _read_logits(g, found.logits, found.axis)
    layout = _read_layout(g, found, logits, pv, p_side, p_where)
    masks = _read_masks(g, found, logits, after, layout, options)
    qk = logits.product
    precision = precision_name(qk.params["precision"], pv.params["precision"])

    # If q, k and v are casts to a wider dtype and the result is narrow, the op takes the arrays before the casts.
    (q_factor, q), (k_factor, k) = (_unscaled(g, g.find(qk.ins[side])) for side in (layout.q_side, 1 - layout.q_side))
    scale, operands = logits.scale * q_factor * k_factor, [q, k, g.find(pv.ins[1 - p_side])]
    out = g.find(pv.out)
    cast = only_cast(g, out)
    narrow = [source(g, x) for x in operands]
    dtype = widest(*(x.dtype for x in (q, k, pv.ins[p_side])))
    if len({x.dtype for x in narrow}) == 1 and (cast.dtype == narrow[0].dtype or narrow[0].dtype == dtype):
        operands, dtype, out = narrow, narrow[0].dtype, cast if cast.dtype == narrow[0].dtype else out
    need(str(dtype) in FLOATS, f"the values are {dtype}")
    need(widens(out.dtype, dtype) or out.dtype == pv.out.dtype, f"the result is {out.dtype}")

    def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
        parts = (layout.q, q), (layout.k, k), (layout.v, v)
        q, k, v = (axes.arrange(as_dtype(x, dtype)) for axes, x in parts)
        for (_, where, power), x in zip(logits.factors, more, strict=False):
            x = jnp.swapaxes(layout.expand(x.astype(jnp.float32), where), 1, 2)
            q = (q * x if power == 1 else q / x).astype(dtype)
        mask, bias = masks.apply(layout, more[len(logits.factors) :])
        with jax.default_matmul_precision(precision):
            y = dot_product_attention(
                q, k, v, bias, mask, scale=scale, is_causal=masks.is_causal, implementation=options.implementation
            )
        return layout.restore(masks.fill_empty(y, v, mask), out.shape)

    inputs = [*operands, *(f[0] for f in logits.factors), *(m[0] for m in masks.masks), *(b[1] for b in masks.biases)]
    leaves = set(inputs)
    inside = region(g, [out], leaves)
    check_kept_inside(g, inside, [out], leaves, found.logits.size, "an intermediate result of the attention")
    b, kv, groups, t, s = layout.counts
    static: dict[str, Any] = {
        "B": b,
        "T": t,
        "S": s,
        "N": kv * groups,
        **({"K": kv} if groups > 1 else {}),
        "H": q.shape[layout.q.depth],
    }
    static |= {"precision": precision} if precision else {}
    static |= {"causal": True} if masks.is_causal else {}
    static |= {"masks": len(masks.masks)} if masks.masks else {}
    static |= {"biases": len(masks.biases)} if masks.biases else {}
    return Site("dot_product_attention", "attention", anchor, [out], inputs, call, static, inside, layout)
