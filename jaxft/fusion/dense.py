"""Dense layers, what they absorb and what absorbs them; transposes and embeddings."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxft.fusion.activations import Activation
from jaxft.fusion.algebra import FLOATS, Map, has_product, identity, is_like, is_vector, source, strip, terms, view
from jaxft.fusion.graph import Graph, Node, Var
from jaxft.fusion.rows import Norm, log_of_sum
from jaxft.fusion.site import (
    Options,
    Refused,
    Site,
    as_vector,
    fill,
    is_used_outside,
    need,
    outward,
    precision_name,
    present,
    region,
)
from jaxft.ops.cross_entropy import linear_cross_entropy
from jaxft.ops.dense import dense
from jaxft.ops.dense_layer_norm import dense_residual_layer_norm
from jaxft.ops.embeddings import embeddings_layer_norm
from jaxft.ops.feed_forward import feed_forward_residual_layer_norm
from jaxft.ops.layer_norm import bias_residual_layer_norm, rms_norm
from jaxft.ops.permute import permute

_NO_LABEL = -(2**30)  # no user has this label


@dataclasses.dataclass(frozen=True)
class Product:
    """x @ kernel + bias, or x @ kernel.T + bias."""

    x: Var
    kernel: Var
    bias: Var | None
    transposed: bool
    precision: str | None
    out: Var

    @property
    def inputs(self) -> list[Var]:
        """The arrays."""
        return present(self.x, self.kernel, self.bias)

    def kernel_of(self, array: Any) -> Any:
        """The kernel `[K, F]`."""
        return array.T if self.transposed else array

    @property
    def static(self) -> dict[str, Any]:
        """The sizes of the kernel and the precision, which decide about the kernels of an op."""
        k, f = self.kernel.shape[::-1] if self.transposed else self.kernel.shape
        return {"K": k, "F": f, **({"precision": self.precision} if self.precision else {})}


def _product(g: Graph, v: Var, bias: Var | None) -> Product | None:
    """Reads the matmul of a dense layer."""
    node = g.node_of(v)
    if node is None or node.name != "dot_general":
        return None
    (left, right), (left_batch, _) = node.params["dimension_numbers"]
    x, kernel = (g.find(operand) for operand in node.ins)
    if left_batch or len(left) != 1 or len(kernel.shape) != 2 or left[0] != len(x.shape) - 1 or len(x.shape) < 2:
        return None
    if x.dtype != kernel.dtype or str(x.dtype) not in FLOATS or g.find(v).dtype.itemsize < x.dtype.itemsize:
        return None
    try:
        precision = precision_name(node.params["precision"])
    except Refused:
        return None
    transposed, above = right[0] == 1, g.defs.get(kernel)
    if above is not None and above.name == "transpose":
        kernel, transposed = g.find(above.ins[0]), not transposed
    return Product(x, kernel, bias, transposed, precision, g.find(v))


def _dense_of(g: Graph, h: Var, readers: Collection[Node] = ()) -> Product | None:
    """Returns the dense layer without activation that computes `h`.

    Returns None if several nodes outside of `readers` read `h`, or if another node reads the result of the matmul.
    """
    if len(g.uses(h)) > 1 and is_used_outside(g, h, readers):
        return None
    found = terms(g, h)
    vectors = [v for c, v, where in found if v is not None and where and c == 1 and is_vector(v, where, h)]
    arrays = [v for c, v, where in found if v is not None and where and c == 1 and is_like(v, where, h)]
    arrays = [v for v in arrays if v not in vectors]
    if len(arrays) != 1 or len(vectors) > 1 or len(arrays) + len(vectors) != len(found):
        return None
    product = _product(g, arrays[0], vectors[0] if vectors else None)
    alone = len(g.uses(arrays[0])) == 1 or g.find(arrays[0]) is g.find(h)
    return product if alone else None


def absorb_dense(g: Graph, site: Site, options: Options) -> None:
    """Turns a `bias_activation` into the `dense` layer whose matmul is before it."""
    activation, base, bias = site.parts
    product = _product(g, base, bias)
    y = site.outs[0]
    if product is None or is_used_outside(g, base, site.region) or y.dtype.itemsize > product.x.dtype.itemsize:
        return
    if product.out.dtype != product.x.dtype and y.dtype != product.x.dtype:
        return

    def call(x: Any, kernel: Any, *bias: Any) -> Any:
        vector = as_vector(bias[0]) if bias else None
        return dense(x, product.kernel_of(kernel), vector, activation=activation.name, precision=product.precision,
                     implementation=options.implementation)  # fmt: skip

    site.op, site.family, site.call, site.inputs = "dense", "dense", call, product.inputs
    site.static = {**product.static, **site.static}
    site.parts, site.region, site.operands = (activation, product), region(g, [y], set(product.inputs)), []


def _addends(g: Graph, x: Var, sites: Collection[Var], with_bias: bool) -> tuple[Var, Var, Var | None] | None:
    """Reads `x` as a sum of two arrays, in any order with a bias. Returns (array, array, bias), or None."""
    arrays, vectors = list[Var](), list[Var]()
    stack = [x]
    while stack:
        v = g.find(stack.pop())
        node = g.defs.get(v)
        is_inner = v is x or (len(g.uses(v)) == 1 and v not in sites and v.shape == x.shape)
        if node is not None and node.name in ("add", "add_any") and is_inner and with_bias:
            stack += node.ins
        else:
            stripped, where = strip(g, v, casts="floats")
            if v.shape and is_vector(stripped, where, x):
                vectors.append(stripped)
            else:
                arrays.append(v)
    if len(arrays) != 2 or len(vectors) > 1:  # as it was written
        top = g.defs[x]
        arrays, vectors = [g.find(v) for v in top.ins] if top.name in ("add", "add_any") else [], []
    is_sum = len(arrays) == 2 and arrays[0] is not arrays[1]
    if not is_sum or any(v.shape != x.shape for v in arrays):
        return None
    return arrays[0], arrays[1], vectors[0] if vectors else None


def absorb_residual(g: Graph, site: Site, sites: dict[Var, Site], options: Options) -> None:
    """Takes the residual before a normalisation into it, and the dense layers before the residual."""
    norm: Norm = site.parts
    x, dtype = norm.x, norm.dtype
    if x not in g.defs or x in sites or x.dtype != dtype:
        return
    addends = _addends(g, x, sites, norm.center)
    if addends is None:
        return
    a, b, bias = addends
    keeps = is_used_outside(g, x, site.region)
    settings: dict[str, Any] = {"epsilon": norm.epsilon, "return_sum": keeps, "implementation": options.implementation}
    outs, vectors = [norm.y, x] if keeps else [norm.y], present(*norm.vectors)
    static = {**norm.static, "return_sum": True} if keeps else norm.static

    def become(op: str, inputs: list[Var], call: Any, more: dict[str, Any], operands: list[Var]) -> None:
        site.op, site.inputs, site.call, site.outs = op, inputs, call, outs
        site.static, site.operands = {**more, **static}, operands
        site.region = region(g, outs, set(inputs))

    if norm.center and "dense" in options.only:
        for h, residual in ((a, b), (b, a)):
            product = _dense_of(g, h) if bias is None else _product(g, h, bias) if len(g.uses(h)) == 1 else None
            if product is None or product.x.dtype != dtype or norm.y.dtype.itemsize > dtype.itemsize:
                continue
            inner = sites.get(product.x)
            if inner is not None and inner.op == "dense" and len(g.uses(product.x)) == 1 and not product.transposed:
                activation, first = inner.parts
                same = residual.shape == first.x.shape and first.precision == product.precision
                if same and first.x.dtype == dtype and first.out.dtype == dtype:
                    return _become_feed_forward(activation, first, product, residual, norm, settings, vectors,
                                                sites, become)  # fmt: skip

            def layer(x: Any, *more: Any, product: Product = product) -> Any:
                values = (product.kernel, product.bias, x, *norm.vectors)
                kernel, bias, residual, gamma, beta = fill(values, more)
                return dense_residual_layer_norm(
                    x, product.kernel_of(kernel), as_vector(bias), residual, as_vector(gamma), as_vector(beta),
                    precision=product.precision, **settings,
                )  # fmt: skip

            inputs = [*product.inputs, residual, *vectors]
            return become("dense_residual_layer_norm", inputs, layer, product.static, [])

    def call(x: Any, residual: Any, *vectors: Any, **in_place: Any) -> Any:
        bias_of_x, gamma, beta = map(as_vector, fill((bias, *norm.vectors), vectors))
        if norm.center:
            return bias_residual_layer_norm(x, bias_of_x, residual, gamma, beta, **settings, **in_place)
        return rms_norm(x, gamma, residual=residual, **settings, **in_place)

    become("bias_residual_layer_norm" if norm.center else "rms_norm", [a, b, *present(bias), *vectors], call,
           {"bias": bias is not None} if norm.center else {"residual": True}, [a, b] if keeps else [a])  # fmt: skip


def _become_feed_forward(
    activation: Activation, first: Product, second: Product, residual: Var, norm: Norm, settings: dict[str, Any],
    vectors: list[Var], sites: dict[Var, Site], become: Any,
) -> None:  # fmt: skip
    own = residual is first.x

    def call(x: Any, *more: Any) -> Any:
        values = (first.kernel, first.bias, second.kernel, second.bias, None if own else residual, *norm.vectors)
        in_kernel, in_bias, out_kernel, out_bias, other, gamma, beta = fill(values, more)
        return feed_forward_residual_layer_norm(
            x, first.kernel_of(in_kernel), as_vector(in_bias), out_kernel, as_vector(out_bias), as_vector(gamma),
            as_vector(beta), activation=activation.name, residual=other, precision=first.precision, **settings,
        )  # fmt: skip

    del sites[second.x]
    inputs = [*first.inputs, *present(second.kernel, second.bias), *([] if own else [residual]), *vectors]
    become("feed_forward_residual_layer_norm", inputs, call, {**first.static, "activation": activation.name}, [])


# --- Embeddings --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table: table[ids].

    `outside` says what an id outside of the table takes: "clip" for the nearest row, "skip" for zeros, or "nan".
    """

    table: Var
    ids: Var
    outside: str
    out: Var

    def ids_of(self, array: Any) -> Any:
        """The ids as the op takes them, with the shape of the result's leading axes."""
        ids = array.reshape(self.out.shape[:-1])
        return jnp.clip(ids, 0, self.table.shape[0] - 1) if self.outside == "clip" else ids


def _rows_of(g: Graph, v: Var) -> Rows | None:
    """Reads a look-up in a table [V, D]."""
    node = g.node_of(v)
    if node is None or node.name != "gather":
        return None
    table, ids = map(g.find, node.ins)
    numbers, out = node.params["dimension_numbers"], g.find(v)
    if (
        len(table.shape) != 2
        or tuple(numbers.collapsed_slice_dims) != (0,)
        or tuple(numbers.start_index_map) != (0,)
        or tuple(numbers.offset_dims) != (len(out.shape) - 1,)
        or tuple(node.params["slice_sizes"]) != (1, table.shape[1])
        or numbers.operand_batching_dims
        or len(out.shape) < 2
    ):
        return None
    if (outside := _outside(node)) not in ("clip", "nan"):
        return None
    stored, where = strip(g, table)  # a table in float32 that is cast for the look-up
    table = stored if is_like(stored, where, table) and str(stored.dtype) in FLOATS else table
    return Rows(table, ids, outside, out)


def _outside(gather: Node) -> str:
    """Returns what an index outside of the array takes: "clip", "skip" (0) or "nan", or "" for anything else.

    XLA clips the indices that JAX promises to be inside, as in `x[i]`.
    """
    modes, fill_value = jax.lax.GatherScatterMode, gather.params.get("fill_value")
    if gather.params["mode"] in (modes.CLIP, modes.PROMISE_IN_BOUNDS):
        return "clip"
    if gather.params["mode"] != modes.FILL_OR_DROP:
        return ""
    return "nan" if fill_value is None or math.isnan(fill_value) else "skip" if fill_value == 0 else ""


def absorb_embeddings(g: Graph, site: Site, options: Options) -> None:
    """Turns a LayerNorm of a sum of embeddings into `embeddings_layer_norm`."""
    norm: Norm = site.parts
    looked_up, position = list[Rows](), None
    every = [(c, v, where, None if v is None else _rows_of(g, v)) for c, v, where in terms(g, norm.x)]
    if not norm.center or all(rows is None for *_, rows in every):
        return
    for c, v, where, rows in every:
        need(v is not None, "a number is added to the embeddings")
        assert v is not None and where is not None
        if rows is not None and where == identity(norm.x.shape) and v.shape == norm.x.shape:
            looked_up.append(rows)
        else:
            need(position is None and _is_position(v, where, norm.x), "something else is added to the embeddings")
            position = v
        need(c == 1, f"embeddings are multiplied by {c:.6g}")
    need(len(every) in (2, 3), f"{len(every)} embeddings in the sum; two or three are fused")
    need(not is_used_outside(g, norm.x, site.region), "the sum of the embeddings is also used elsewhere")
    # The table with the most rows is the one of the words; the others are positions and token types.
    word, *others = sorted(looked_up, key=lambda rows: -rows.table.shape[0])
    second = None if position is not None else others.pop(0)
    third = others[0] if others else None
    tables = [word.table, position if second is None else second.table, None if third is None else third.table]
    ids = [word.ids, None if second is None else second.ids, None if third is None else third.ids]
    values = (*tables, *ids, *norm.vectors)

    def call(*arrays: Any) -> Any:
        words, positions, types, ids, position_ids, type_ids, gamma, beta = fill(values, arrays)
        return embeddings_layer_norm(
            word.ids_of(ids), words, positions.reshape(-1, words.shape[1]), types, as_vector(gamma), as_vector(beta),
            position_ids=None if second is None else second.ids_of(position_ids),
            token_type_ids=None if third is None else third.ids_of(type_ids),
            epsilon=norm.epsilon, dtype=norm.y.dtype, implementation=options.implementation,
        )  # fmt: skip

    site.op, site.family, site.inputs, site.call = "embeddings_layer_norm", "embeddings", present(*values), call
    site.static = {"V": word.table.shape[0], "D": word.table.shape[1], **norm.static}
    site.region, site.operands = region(g, [norm.y], set(site.inputs)), []


def _is_position(v: Var, where: Map, x: Var) -> bool:
    """Returns whether `v` holds one row for each position of x [..., T, D], for all examples."""
    *lead, row, column = (None, *where)
    in_order = row is not None and column is not None and row < column
    return in_order and not any(a is not None for a in lead) and v.size == x.shape[-2] * x.shape[-1]


# --- Cross-entropy -----------------------------------------------------------------------------------------------


def cross_entropy_site(g: Graph, log_softmax: Site, options: Options) -> Site:
    """Recognises the summed loss -log_softmax(x @ table.T + bias)[label], given the log-softmax."""
    y, z = log_softmax.parts
    _logits_of(g, z, y)
    users = [user for user in g.uses(y) if user is not None]
    need(len(users) == len(g.uses(y)) == 1, "the log-softmax of a matmul goes to more than a look-up of labels")
    (user,) = users
    need(user.name in ("gather", "mul"), f"the log-softmax of a matmul goes to {user.name}, not to a look-up of labels")
    return _summed_loss(g, log_softmax.anchor, z, _labels_of(g, user, y), g.find(user.out), 1.0, options)


def normalised_loss_site(g: Graph, anchor: Node, options: Options) -> Site:
    """Recognises by its logarithm the summed loss log(sum(exp(logits))) - logits[label], which optax computes."""
    argument, z = log_of_sum(g, anchor)
    log, shift = g.find(anchor.out), [(c, v) for c, v, _ in terms(g, argument, stop={z}) if v is not z]
    for y in outward(g, log, ("add", "broadcast_in_dim", "neg", "reshape", "squeeze", "sub"), 4):
        every = terms(g, y, stop={log})
        if any(where is not None and where != identity(y.shape) for _, _, where in every):
            continue
        found = [(c, v) for c, v, _ in every]
        sign = next((c for c, v in found if v is log), 0.0)
        picks = [node for c, v in found if c == -sign and v is not None and (node := _pick(g, v)) is not None]
        if abs(sign) == 1 and len(picks) == 1:
            rows = next((x for x in map(g.find, picks[0].ins) if x in (z, argument)), None)
            of_logits = [(-c * sign, v) for c, v in shift] if rows is z else []
            rest = [t for t in found if t[1] is not log and t[1] is not None and _pick(g, t[1]) is not picks[0]]
            if rows is not None and rest == of_logits:
                labels = _labels_of(g, picks[0], rows)
                need(labels.outside != "skip", "a label outside of the classes leaves log(sum(exp(logits)))")
                return _summed_loss(g, anchor, z, labels, y, -sign, options)
    raise Refused("")


def _pick(g: Graph, v: Var) -> Node | None:
    """Returns the gather, or the matmul with one-hot labels before a sum, that computes `v`."""
    node = g.node_of(v)
    if node is not None and node.name == "reduce_sum" and node.params["axes"] == (len(node.ins[0].shape) - 1,):
        node = g.node_of(source(g, node.ins[0]))
    return node if node is not None and node.name in ("gather", "mul") else None


def _summed_loss(
    g: Graph, anchor: Node, z: Var, labels: Rows, picked: Var, scale: float, options: Options
) -> Site:  # fmt: skip
    """Follows `picked`, scale times the loss of each row, to its sum."""
    keep: tuple[Var, bool] | None = None
    total: Var | None = None
    while total is None:
        (user, *more) = g.uses(picked)
        need(user is not None and not more, "the loss of each row is needed, not only a sum")
        assert user is not None
        out = g.find(user.out)
        if user.name == "neg":
            picked, scale = out, -scale
        elif user.name in ("mul", "div") and (number := g.number(user.ins[1])):
            picked, scale = out, scale * number if user.name == "mul" else scale / number
        elif user.name == "mul" and (number := g.number(user.ins[0])):
            picked, scale = out, scale * number
        elif user.name in ("mul", "select_n") and keep is None:
            keep = _kept_rows(g, user, picked)
            picked = out
        elif _is_reshape(g, out, picked) and user.name != "stop_gradient":
            picked = out
        elif user.name == "reduce_sum" and not out.shape:
            total = out
        elif user.name == "reduce_sum" and picked.shape == z.shape and out.shape == z.shape[:-1]:
            picked = out  # of one-hot labels
        else:
            raise Refused(f"the loss of each row goes to {user.name}, not to a sum")
    product, taken = _logits_of(g, z, total)
    rows = math.prod(z.shape[:-1])
    values = (product.x, product.kernel, product.bias, labels.ids, None if keep is None else keep[0])

    def call(*arrays: Any) -> Any:
        x, table, bias, ids, kept = fill(values, arrays)
        ids = labels.ids_of(ids).reshape(rows)
        is_label = (ids >= 0) & (ids < z.shape[-1])
        if keep is not None:
            kept = jnp.broadcast_to(kept.reshape(kept.shape or (1,)), (rows,)) if kept.ndim == 0 else kept.reshape(rows)
        is_kept = True if keep is None else kept ^ keep[1]
        # A label outside of the classes makes the loss NaN, but not the gradients of the other rows.
        nan = labels.outside == "nan" and jnp.any(~is_label & is_kept)
        ids = jnp.where(is_label & is_kept, ids.astype(jnp.int32), _NO_LABEL)
        x = x[taken].reshape(rows, x.shape[-1])
        loss = linear_cross_entropy(
            x, table if product.transposed else table.T, ids, as_vector(bias), ignore_index=_NO_LABEL,
            precision=product.precision, implementation=options.implementation,
        )  # fmt: skip
        return (loss.total + jnp.where(nan, jnp.nan, 0.0)) * -scale

    inputs = present(*values)
    precision = {"precision": product.precision} if product.precision else {}
    static = {"rows": rows, "V": z.shape[-1], "D": product.x.shape[-1], **precision}
    return Site("linear_cross_entropy", "cross_entropy", anchor, [total], inputs, call, static,
                region(g, [total], set(inputs)), always=True)  # fmt: skip


def _logits_of(g: Graph, z: Var, end: Var) -> tuple[Product, tuple[slice, ...]]:
    """Returns the dense layer whose rows are the logits `z`, and the slices of its leading axes that `z` has.

    `end` is the value whose computation may read the logits.
    """
    logits, taken = z, tuple[slice, ...]()
    node = g.defs.get(logits)
    if node is not None and node.name == "reshape" and node.ins[0].shape[-1:] == logits.shape[-1:]:
        logits = g.find(node.ins[0])
    node = g.defs.get(logits)
    if node is not None and node.name == "slice" and node.ins[0].shape[-1:] == logits.shape[-1:]:
        bounds = node.params["start_indices"], node.params["limit_indices"], node.params["strides"]
        taken = tuple(map(slice, *(bound or (1,) * len(logits.shape) for bound in bounds)))[:-1]
        logits = g.find(node.ins[0])
    product = _dense_of(g, logits, region(g, [end], {logits}))
    if product is None:
        node = g.node_of(logits)
        need(node is not None and has_product(g, logits))
        assert node is not None
        need(node.name not in ("add", "dot_general"), "the logits are used elsewhere, or not of a dense layer")
        raise Refused(f"{node.name} between the matmul and the log-softmax")
    return product, taken


def _is_reshape(g: Graph, v: Var, x: Var) -> bool:
    """Returns whether `v` has the elements of `x` in their order."""
    step = view(g, v)
    if step is None or step[0] is not x or v.size != x.size:
        return False
    axes = [a for a in step[1] if a is not None]
    return axes == sorted(axes)


def _labels_of(g: Graph, node: Node, y: Var) -> Rows:
    """Reads y [..., V] looked up by labels: by take_along_axis, y[arange, labels] or y * one_hot(labels)."""
    lead, count = y.shape[:-1], y.shape[-1]
    outside = "skip"  # one-hot labels
    if node.name == "gather":
        ids, numbers, outside = g.find(node.ins[1]), node.params["dimension_numbers"], _outside(node)
        need(g.find(node.ins[0]) is y and tuple(node.params["slice_sizes"]) == (1,) * len(y.shape))
        need(outside, "labels outside of the classes take another number than NaN or 0")
        both = g.defs.get(ids)
        if tuple(numbers.start_index_map) == (0, 1) and both is not None and both.name == "concatenate":
            need(len(both.ins) == 2 and _is_arange(g.constant(both.ins[0]), 0, lead[0]))
            ids = g.find(both.ins[1])
        else:
            need(tuple(numbers.operand_batching_dims) == tuple(range(len(lead))), "rows are not looked up one by one")
    else:
        other = next(x for x in map(g.find, node.ins) if x is not y)
        reason = "the log-softmax of a matmul goes to a product that is not with one-hot labels"
        equal = g.defs.get(strip(g, other)[0])
        need(equal is not None and equal.name == "eq" and other.shape == y.shape, reason)
        assert equal is not None
        labels = [x for x in equal.ins if not _is_arange(g.constant(x), -1, count)]
        need(len(labels) == 1, reason)
        ids, where = strip(g, labels[0])
        in_order = [a for a in where if a is not None] == [a for a, size in enumerate(ids.shape) if size != 1]
        need(jnp.issubdtype(ids.dtype, jnp.integer) and where[-1] is None and in_order, reason)
    need(ids.size == math.prod(lead), "a row has several labels")
    return Rows(Var(y.aval.update(shape=(count, 1))), ids, outside, Var(y.aval))


def _is_arange(known: Any, axis: int, count: int) -> bool:
    """Returns whether a constant is 0, 1, ... along an axis, and the same along the others."""
    return (
        known is not None and known.size == known.shape[axis] == count and bool((known.ravel() == range(count)).all())
    )


def _kept_rows(g: Graph, node: Node, picked: Var) -> tuple[Var, bool]:
    """Returns (mask, inverted) of picked * mask or where(mask, picked, 0). XLA makes the first the second."""
    if node.name == "mul":
        other = next(x for x in node.ins if g.find(x) is not picked)
        mask, where = strip(g, other)
        need(mask.dtype == bool, "the loss of a row has a weight that is not a mask")
        inverted = False
    else:
        need(len(node.ins) == 3 and g.find(node.ins[0]) is not picked)
        at = [g.find(x) for x in node.ins].index(picked)
        need(g.number(node.ins[3 - at]) == 0, "the loss of a row is replaced by a number that is not 0")
        mask, where = strip(g, node.ins[0])
        inverted = at == 1
    need(where == identity(picked.shape), "the mask of the loss is not one per row")
    return mask, inverted


# --- Transposes --------------------------------------------------------------------------------------------------


def permute_site(g: Graph, node: Node, options: Options) -> Site:
    """Recognises transposes of transposes: they cancel, or one `permute` is enough."""
    v, axes, count = g.find(node.ins[0]), tuple(node.params["permutation"]), 1
    out = g.find(node.out)
    while (above := g.defs.get(v)) is not None and above.name == "transpose" and above.scopes == node.scopes:
        v, axes, count = g.find(above.ins[0]), tuple(above.params["permutation"][a] for a in axes), count + 1
    need(count > 1)
    need(not any(user is not None and user.name == "transpose" for user in g.uses(out)))  # a longer chain ends later
    cancels = axes == tuple(range(len(axes)))

    def call(x: Any) -> Any:
        return x if cancels else permute(x, axes, implementation=options.implementation)

    return Site("permute", "permute", node, [out], [v], call, {"axes": "cancel" if cancels else axes},
                region(g, [out], {v}), always=cancels)  # fmt: skip


def matmul_site(g: Graph, node: Node, options: Options) -> Site:
    """Recognises a matmul of transposed operands. Its replacement reads the operands without the transposes.

    On a GPU XLA does the same, so only `force` replaces it.
    """
    contracted, batch = node.params["dimension_numbers"]
    operands, dims, moved = [], [], 0
    for side, x in enumerate(map(g.find, node.ins)):
        axes = tuple(range(len(x.shape)))
        above = g.defs.get(x)
        if above is not None and above.name == "transpose" and len(g.uses(x)) == 1:
            permutation = above.params["permutation"]
            free = [permutation[a] for a in axes if a not in contracted[side] and a not in batch[side]]
            if free == sorted(free):  # else the axes of the result would change
                x, axes, moved = g.find(above.ins[0]), tuple(permutation), moved + 1
        operands.append(x)
        dims.append((tuple(axes[a] for a in contracted[side]), tuple(axes[a] for a in batch[side])))
    need(moved)
    numbers = (dims[0][0], dims[1][0]), (dims[0][1], dims[1][1])
    settings = {n: node.params[n] for n in ("precision", "preferred_element_type") if n in node.params}

    def call(a: Any, b: Any) -> Any:
        return jax.lax.dot_general(a, b, numbers, **settings)

    out = g.find(node.out)
    return Site("dot_general", "permute", node, [out], operands, call, {"transposed operands": moved},
                region(g, [out], set(operands)))  # fmt: skip
