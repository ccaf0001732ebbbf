"""Ops on arrays that `jax.jit` divides among devices: the same numbers, and only the collectives that must be.

This file is also the program that the tests run once, in a process with eight CPU devices.
"""

import collections
import contextlib
import functools
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tiny

B, T, N, H, W, F, V = 4, 6, 4, 8, 32, 64, 20
TRITON = ("triton",)
BOTH = ("triton", "xla")
RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape, np.float32)


def norm(width=W):
    return {"gamma": floats(width), "beta": floats(width)}


class Case(NamedTuple):
    """A call of an op on a mesh with the axes data and model, of 2 and 2 devices.

    `specs` gives the mesh axes of the axes of arrays, others are replicated. `summed` are the shapes of the shards that
    all-reduces add up, forward and backward; there is no other collective unless `gathered` names its shapes.
    """

    call: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    specs: dict[str, tuple]
    summed: tuple[tuple[int, ...], ...] = ()
    gathered: tuple[tuple[int, ...], ...] = ()
    implementations: tuple[str | None, ...] = TRITON
    logged: str = ""
    kinds: tuple[str, ...] = ("Auto", "Explicit")  # of axes
    gradient: bool = True  # unless there are float8 arrays


def ops() -> dict[str, Case]:
    import jax
    import jax.numpy as jnp

    import jaxft

    def float8(*shape):
        return floats(*shape).astype(jnp.float8_e4m3fn)

    def dropout():  # makes the key late: it would start JAX
        return {"dropout_rate": 0.3, "dropout_rng": jax.random.key(3)}

    def by_heads(qkv):
        """Divides `[B, T, 3, N, H]` along the heads, on the devices."""
        if not jax.sharding.get_abstract_mesh().auto_axes:
            return qkv
        return jax.lax.with_sharding_constraint(qkv, jax.sharding.PartitionSpec("data", None, None, "model"))

    x, ids = floats(B, T, W), RNG.integers(0, 9, (B, T), np.int32)
    tables = {"word": floats(9, W), "position": floats(T, W), "token_type": floats(2, W), **norm()}
    tables_summed = ((9, W), (T, W), (2, W), (W,), (W,))
    data, kernel, bias = ("data",), floats(W, F), floats(F)
    ffn = {"x": x, "in_kernel": kernel, "in_bias": bias, "out_kernel": floats(F, W), "out_bias": floats(W), **norm()}
    labels = RNG.integers(0, V, (B, T), np.int32)
    labels[:, ::2] = -100
    gelu = functools.partial(jaxft.dense, activation="gelu")
    qkv, heads = floats(B, T, 3, N, H), dict.fromkeys(("key", "value"), floats(B, T, 2, H))
    packed = {"qkv": floats(B * T, 3, N, H), "cu_seqlens": np.array([0, 5, 9, 20], np.int32)}
    head_axes = (None, None, "model")
    columns, rows = (None, "model"), ("model",)
    entropy = {"x": x, "embedding": floats(V, W), "bias": floats(V), "labels": labels}
    return {
        "layer_norm": Case(jaxft.layer_norm, {"x": x, **norm()}, {"x": data}, ((W,), (W,))),
        "layer_norm of a divided sequence": Case(
            jaxft.layer_norm, {"x": x, **norm()}, {"x": ("model", "data")}, ((W,), (W,))
        ),
        "layer_norm of divided columns": Case(
            jaxft.layer_norm, {"x": x}, {"x": ("data", None, "model")}, (), ((B // 2, T, W),),
            logged=r"layer_norm: axis 2 of an array \(4, 6, 32\) is divided over model",
        ),
        "bias_residual_layer_norm": Case(
            lambda **k: jaxft.bias_residual_layer_norm(**k, return_sum=True, **dropout()),
            {"x": x.reshape(B, 3, 2, W), "bias": floats(W), "residual": x.reshape(B, 3, 2, W), **norm()},
            {"x": data, "residual": data}, ((W,), (W,), (W,)),
        ),
        "rms_norm": Case(jaxft.rms_norm, {"x": x, "gamma": floats(W)}, {"x": data}, ((W,),)),
        "embeddings_layer_norm": Case(
            lambda **k: jaxft.embeddings_layer_norm(**k, **dropout()), {"input_ids": ids, **tables},
            {"input_ids": data}, tables_summed, (), BOTH,
        ),
        "embeddings_layer_norm with divided tables": Case(
            jaxft.embeddings_layer_norm, {"input_ids": ids % 8, **tables, "word": floats(8, W)},
            {"input_ids": data, "word": data}, ((8, W), (T, W), (2, W), (W,), (W,)), ((8, W),),
            logged=r"embeddings_layer_norm: axis 0 of an array \(8, 32\) is divided over data",
        ),
        "bias_activation": Case(
            jaxft.bias_activation, {"x": x, "bias": floats(W)},
            {"x": ("data", None, "model"), "bias": ("model",)}, ((W // 2,),),
        ),
        "gated_activation": Case(jaxft.gated_activation, {"x": x, "bias": floats(W)}, {"x": data}, ((W,),)),
        "softmax": Case(
            jaxft.softmax, {"x": floats(B, N, T, T), "bias": floats(B, 1, 1, T)},
            {"x": ("data", "model"), "bias": data}, ((B // 2, 1, 1, T),),
        ),
        "log_softmax": Case(jaxft.log_softmax, {"x": x, "bias": floats(W)}, {"x": data}, ((1, 1, W),)),
        "dense": Case(
            gelu, {"x": x, "kernel": kernel, "bias": bias, "residual": floats(B, T, F)},
            {"x": data, "residual": data}, ((W, F), (F,)), (), BOTH,
        ),
        "dense by columns": Case(
            gelu, {"x": x, "kernel": kernel, "bias": bias}, {"x": data, "kernel": columns, "bias": rows},
            ((B // 2, T, W), (W, F // 2), (F // 2,)), (), BOTH,
        ),
        "dense by rows": Case(  # bias and activation come after the one sum
            gelu, {"x": x, "kernel": kernel, "bias": bias}, {"x": ("data", None, "model"), "kernel": rows},
            ((B // 2, T, F), (W // 2, F), (F,)), (), BOTH,
        ),
        "dense of a divided sequence": Case(  # XLA sums the gradient of the kernel over each mesh axis in turn
            gelu, {"x": x, "kernel": kernel, "bias": bias, "residual": floats(B, T, F)},
            {"x": ("model", "data"), "residual": ("model", "data")}, ((W, F), (W, F), (F,)), (), BOTH,
        ),
        "dense in parts": Case(
            jaxft.dense, {"x": x, "kernel": floats(W, 3, F), "bias": floats(3, F)},
            {"x": data, "kernel": (None, *columns), "bias": columns},
            ((B // 2, T, W), (W, 3, F // 2), (3, F // 2)), (), BOTH,
        ),
        "dense_rotary": Case(  # the result is divided, and the whole kernel gets its gradient
            lambda **k: by_heads(jaxft.dense_rotary(**k, num_heads=N)),
            {"x": x, "kernel": floats(W, 3 * W), "bias": floats(3 * W), "positions": np.arange(T, dtype=np.int32)},
            {"x": data}, ((B // 2, T, W), (3, W // 2, W), (3, W // 2)), ((3, W), (W, 3, W)), kinds=("Auto",),
        ),
        "dense with a gate": Case(
            functools.partial(gelu, gate="first"), {"x": x, "kernel": kernel, "bias": bias}, {"x": data},
            ((W, F), (F,)),
        ),
        "dense of a vmap": Case(
            lambda implementation, **k: jax.vmap(functools.partial(gelu, implementation=implementation))(
                k["x"], k["kernel"]
            ),
            {"x": x, "kernel": floats(B, W, F)}, {"x": data, "kernel": data},
        ),
        "dense_residual_layer_norm": Case(
            lambda **k: jaxft.dense_residual_layer_norm(**k, **dropout()),
            {"x": x, "kernel": kernel, "bias": bias, "residual": floats(B, T, F), **norm(F)},
            {"x": data, "residual": data}, ((W, F), (F,), (F,), (F,)),
        ),
        "feed_forward_residual_layer_norm": Case(
            lambda **k: jaxft.feed_forward_residual_layer_norm(**k, **dropout()), ffn,
            {"x": data, "in_kernel": columns, "in_bias": rows, "out_kernel": rows},
            (*[(B // 2, T, W)] * 2, (W, F // 2), (F // 2,), (F // 2, W), (W,), (W,), (W,)), (), BOTH,
        ),
        "dot_product_attention": Case(
            lambda **k: jaxft.dot_product_attention(**k, **dropout(), return_residual=True),
            {"query": floats(B, T, N, H), **heads, "bias": floats(B, 1, T, T)},
            {**dict.fromkeys(("query", "key", "value"), ("data", None, "model")), "bias": data},
            ((B // 2, 1, T, T),),
        ),
        "qkv_attention": Case(
            lambda **k: jaxft.qkv_attention(**k, **dropout()), {"qkv": qkv, "relative_bias": floats(N, 5)},
            {"qkv": ("data", *head_axes[:2], "model"), "relative_bias": rows}, ((N // 2, 5),), (), BOTH,
        ),
        "varlen_qkv_attention": Case(
            lambda **k: jaxft.varlen_qkv_attention(**k, max_seqlen=T, **dropout()), packed, {"qkv": head_axes},
            (), (), BOTH,
        ),
        "varlen_qkv_attention of a vmap": Case(
            lambda implementation, **k: jax.vmap(
                lambda qkv, cu_seqlens: jaxft.varlen_qkv_attention(
                    qkv, cu_seqlens, max_seqlen=T, implementation=implementation, **dropout()
                )
            )(**k),
            {name: np.stack([array] * 2) for name, array in packed.items()}, {"qkv": data, "cu_seqlens": data},
        ),
        "dense of float8": Case(
            gelu, {"x": float8(B, T, W), "kernel": float8(W, F), "kernel_scale": floats(F), "bias": floats(F)},
            {"x": data, "kernel": columns, "kernel_scale": rows, "bias": rows},
        ),
        "dense of float8 by rows": Case(  # the sum is exact
            jaxft.dense,
            {"x": float8(B, T, W), "kernel": float8(W, F), "kernel_scale": floats(F), "bias": floats(F),
             "residual": floats(B, T, F).astype(jnp.bfloat16)},
            {"x": ("data", None, "model"), "kernel": rows, "residual": data}, ((B // 2, T, F),), (), BOTH,
        ),
        "dense_residual_layer_norm of float8 by rows": Case(
            jaxft.dense_residual_layer_norm,
            {"x": float8(B, T, W), "kernel": float8(W, F), "kernel_scale": floats(F), "bias": floats(F),
             "residual": floats(B, T, F).astype(jnp.bfloat16), **norm(F)},
            {"x": ("data", None, "model"), "kernel": rows, "residual": data}, ((B // 2, T, F),), (), BOTH,
        ),
        "split dense_residual_layer_norm of float8 by rows": Case(
            lambda **k: jaxft.dense_residual_layer_norm(**k, x_scale=0.5, float8_scale=0.5),
            {"x": float8(B, T, 1024), "kernel": float8(1024, F), "kernel_scale": floats(F), "bias": floats(F),
             "residual": floats(B, T, F).astype(jnp.bfloat16), **norm(F)},
            {"x": ("data", None, "model"), "kernel": rows, "residual": data}, ((B // 2, T, F),), (), BOTH,
        ),
        "split dense_residual_layer_norm of float8": Case(
            lambda **k: jaxft.dense_residual_layer_norm(**k, bias=None, x_scale=0.5, return_sum=True),
            {"x": float8(B, T, 1024), "kernel": float8(1024, F), "kernel_scale": floats(F),
             "residual": floats(B, T, F).astype(jnp.bfloat16), **norm(F)},
            {"x": data, "residual": data},
        ),
        "feed_forward_residual_layer_norm of float8 by columns and rows": Case(
            lambda **k: jaxft.feed_forward_residual_layer_norm(**k, inner_scale=0.5),
            {**ffn, "x": float8(B, T, W), "in_kernel": float8(W, F), "out_kernel": float8(F, W),
             "in_kernel_scale": floats(F), "out_kernel_scale": floats(W),
             "residual": x.astype(jnp.bfloat16)},
            {"x": data, "residual": data, "in_kernel": columns, "in_bias": rows, "in_kernel_scale": rows,
             "out_kernel": rows}, ((B // 2, T, W),), (), BOTH,
        ),
        "dense_residual_layer_norm of float8": Case(
            lambda **k: jaxft.dense_residual_layer_norm(**k, float8_scale=0.5),
            {"x": float8(B, T, W), "kernel": float8(W, F), "kernel_scale": floats(F), "bias": floats(F),
             "residual": floats(B, T, F).astype(jnp.bfloat16), **norm(F)},
            {"x": data, "residual": data},
        ),
        "feed_forward_residual_layer_norm of float8": Case(
            lambda **k: jaxft.feed_forward_residual_layer_norm(**k, inner_scale=0.5),
            {**ffn, "x": float8(B, T, W), "in_kernel": float8(W, F), "out_kernel": float8(F, W),
             "in_kernel_scale": floats(F), "out_kernel_scale": floats(W),
             "residual": x.astype(jnp.bfloat16)},
            {"x": data, "residual": data},
        ),
        "qkv_attention to float8": Case(
            lambda **k: jaxft.qkv_attention(**k, float8_scale=0.5), {"qkv": float8(B, T, 3, N, H).astype(jnp.bfloat16)},
            {"qkv": ("data", *head_axes[:2], "model")}, gradient=False,
        ),
        "layer_norm to float8": Case(
            lambda **k: jaxft.layer_norm(**k, float8_scale=0.5), {"x": x, **norm()}, {"x": data}, gradient=False
        ),
        "rotary": Case(
            jaxft.rotary, {"qkv": qkv, "positions": np.arange(T, dtype=np.int32)},
            {"qkv": ("data", None, None, "model")},
        ),
        "qkv_bias_split_heads": Case(
            functools.partial(jaxft.qkv_bias_split_heads, num_heads=N),
            {"qkv": floats(B, T, 3 * N * H), "bias": floats(3 * N * H)}, {"qkv": data}, ((3 * N * H,),),
        ),
        "merge_heads": Case(jaxft.merge_heads, {"x": floats(B, N, T, H)}, {"x": data}),
        "linear_cross_entropy": Case(
            jaxft.linear_cross_entropy, entropy, {"x": data, "labels": data}, ((V, W), (V,)), (), (None,)
        ),
        "linear_cross_entropy by classes": Case(
            jaxft.linear_cross_entropy, entropy, {"x": data, "labels": data, "embedding": rows, "bias": rows},
            (*[(B * T, 1)] * 3, (B * T // 2, W), (V // 2, W), (V // 2,)), (), (None,),
        ),
    }  # fmt: skip


def collectives(text: str) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the shapes, except scalars, that a compiled program sums, and those that other collectives move."""
    found: dict[bool, list[list[int]]] = {True: [], False: []}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for result, kind in re.findall(rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(", text):
        shapes = [[int(n) for n in shape.split(",") if n] for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
        found[kind == "all-reduce"] += [shape for shape in shapes if shape]
    return found[True], found[False]


def measure(case: Case, implementation: str | None, kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Runs a case on one device, and on four with each kind of axes, and compares results and gradients."""
    import jax
    import jax.numpy as jnp

    names = [name for name, array in case.arrays.items() if array.dtype.kind == "f"]
    if not case.gradient or any(array.dtype == jnp.float8_e4m3fn for array in case.arrays.values()):
        names = []

    def run(arrays, implementation=implementation):
        def total(given):
            out = case.call(**arrays | given, implementation=implementation)
            out = [x.astype(jnp.float32) for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
            weights = (jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in out)
            if any(jax.typeof(x).sharding.mesh.explicit_axes for x in out):
                weights = (jax.sharding.reshard(w, jax.typeof(x).sharding) for w, x in zip(weights, out, strict=True))
            return sum(jnp.sum(jnp.sin(x) * w) for x, w in zip(out, weights, strict=True)), out

        return jax.value_and_grad(total, has_aux=True)({name: arrays[name] for name in names})

    alone = jax.jit(run)(case.arrays)
    return {kind: on_four_devices(case, run, kind, alone) for kind in kinds}


def on_four_devices(case: Case, run: Callable[..., Any], kind: str, alone: Any) -> dict[str, Any]:
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    kinds = (jax.sharding.AxisType[kind],) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
    if kind == "Explicit" and case.logged:  # refused by name
        run = functools.partial(run, implementation="xla")
    divided = {
        name: jax.device_put(array, NamedSharding(mesh, P(*case.specs.get(name, ()))))
        for name, array in case.arrays.items()
    }
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("jaxft").addHandler(handler)
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(divided).compile()
    logging.getLogger("jaxft").removeHandler(handler)
    ((_, values), gradients), ((_, standard), others) = program(divided), alone
    pairs = [*zip(jax.tree.leaves((standard, others)), jax.tree.leaves((values, gradients)), strict=True)]
    greatest = max(float(np.max(np.abs(a))) for a, _ in pairs)
    error = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs) / greatest
    summed, moved = collectives(program.as_text())
    return {"error": error, "summed": summed, "moved": moved, "messages": messages}


def measure_model() -> dict[str, Any]:
    """Takes a step of a model on two times two devices, with tensor parallelism."""
    import jax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from jaxft import BertForMaskedLM
    from jaxft.models import join_kernels, partition_specs

    model = BertForMaskedLM(tiny.config(hidden_size=W), rngs=nnx.Rngs(0), implementation="triton")
    graph, params = nnx.split(model)
    ids = np.random.default_rng(0).integers(5, 18, (B, T), np.int32)

    @jax.jit
    def step(params, ids):
        return jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(ids, ids).mean)(params)

    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(model, model_axis="model"))
    divided = jax.device_put(params, specs), jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    program = jax.jit(step, out_shardings=(NamedSharding(mesh, PartitionSpec()), specs)).lower(*divided).compile()
    pairs = zip(jax.tree.leaves(step(params, ids)), jax.tree.leaves(program(*divided)), strict=True)
    summed, moved = collectives(program.as_text())
    try:
        join_kernels(nnx.merge(graph, divided[0]))
    except ValueError as error:
        refused = str(error)
    return {
        "refused": refused,
        "error": max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs),
        "summed": summed, "moved": moved,
    }  # fmt: skip


def measure_float8(kind: str) -> dict[str, Any]:
    """Runs a layer in float8 on two times two devices, with tensor parallelism."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from jaxft import BertModel
    from jaxft.models import partition_specs, quantize

    config = tiny.config(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    model = quantize(BertModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), implementation="triton"))
    graph, params = nnx.split(model)
    ids = np.random.default_rng(0).integers(5, 18, (B, T), np.int32)
    run = jax.jit(lambda params, ids: jax.tree.leaves(nnx.merge(graph, params)(ids))[0])
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType[kind],) * 2, devices=jax.devices()[:4])
    specs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(model, model_axis="model"))
    divided = jax.device_put(params, specs), jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        program = run.lower(*divided).compile()
    summed, moved = collectives(program.as_text())
    error = np.max(np.abs(np.asarray(run(params, ids)) - np.asarray(program(*divided))))
    return {"error": float(error), "summed": summed, "moved": moved}


def measure_step() -> dict[str, Any]:
    """Takes a training step of the examples on one device and on four, with dropout and a tied vocabulary."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import common
    from jaxft import BertForMaskedLM

    model = BertForMaskedLM(tiny.config(hidden_dropout_prob=0.2), rngs=nnx.Rngs(0))
    model.train()
    graph, params = nnx.split(model)
    optimizer = optax.sgd(1.0)
    state = common.initial_state(params, optimizer, "float16")  # with a loss scale

    def loss(params, ids, key):
        return nnx.merge(graph, params).loss(ids, jnp.where(np.arange(T) % 2, ids, -100), rngs=key)

    ids, key = np.random.default_rng(0).integers(5, 18, (8, B, T), np.int32), jax.random.key(0)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    divided = jax.device_put(ids.reshape(2, 4, B, T), NamedSharding(mesh, PartitionSpec(None, "data")))
    given = *jax.device_put((state, key), NamedSharding(mesh, PartitionSpec())), divided
    on_four = common.make_step(loss, optimizer, mesh=mesh)
    program = jax.jit(lambda state, key, ids: on_four(state, ids, key)).lower(*given).compile()
    alone = jax.jit(common.make_step(loss, optimizer))(state, ids, key)
    pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(program(*given)), strict=True)
    summed, moved = collectives(program.as_text())
    return {
        "error": max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs),
        "summed": summed, "moved": moved, "vocabulary": list(model.bert.embeddings.word.shape),
    }  # fmt: skip


_DEBERTA = {"relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p", "share_att_key": True,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "bert": {}, "roberta": {"pad_token_id": 1, "type_vocab_size": 1}, "distilbert": {"type_vocab_size": 0},
    "modernbert": {"pad_token_id": 0, "local_attention": 6, "num_hidden_layers": 3}, "deberta-v2": _DEBERTA,
    "jina": {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    **{name: {"pad_token_id": 1} for name in ("mpnet", "gte", "jina_embeddings_v3")},
    "nomic_bert": {}, "electra": {}, "albert": {},
}  # fmt: skip
HEADS = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification")
DIVISIONS = ((None, False), ("model", False), (None, True), ("model", True))  # model_axis, fsdp
SOME_MODELS = (
    ("bert", "BertForMaskedLM", "model", True), ("modernbert", "BertModel", "model", False),
    ("deberta-v2", "BertForTokenClassification", None, False),
)  # fmt: skip


def measure_explicit(name: str, head: str, model_axis: str | None, fsdp: bool) -> float:
    """Returns the largest relative error of the value and gradients of a model on 2x2 devices with Explicit axes.

    The model has dropout, except for ModernBERT.
    """
    import dataclasses

    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxft
    from jaxft.models import partition_specs

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32, "max_position_embeddings": 64}  # fmt: skip
    config = jaxft.BertConfig.from_dict({"model_type": name} | sizes | MODELS[name])
    if name != "modernbert":
        config = dataclasses.replace(config, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    model = getattr(jaxft, head)(config, rngs=nnx.Rngs(0))
    model.train()
    graph, params = nnx.split(model)
    ids = np.random.default_rng(0).integers(5, 30, (B, 8), np.int32)
    mask = np.arange(8) < np.array([[8], [5], [8], [3]])
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])

    def placed(fsdp: bool) -> Any:
        specs = partition_specs(model, model_axis=model_axis, fsdp=fsdp)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def value(params, ids, mask, labels, is_divided):
        if is_divided and fsdp:
            params = jax.tree.map(jax.sharding.reshard, params, placed(fsdp=False))
        model = nnx.merge(graph, params)
        if head == "BertForMaskedLM":
            return model.loss(ids, labels, mask, rngs=jax.random.key(0)).mean
        states = model(ids, mask, rngs=jax.random.key(0))
        return sum(jnp.sum(1 + jnp.sin(x)) for x in jax.tree.leaves(states))  # terms that cancel lose digits

    step = jax.jit(jax.value_and_grad(value), static_argnums=4)
    batch = ids, mask, np.where(mask & (np.arange(8) % 2 > 0), ids, -100)
    alone = step(params, *batch, False)
    divided = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        found = step(jax.device_put(params, placed(fsdp)), *divided, True)
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (alone, found)), strict=True)
    ]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-4)) for a, b in pairs)


AFTER = ("EmbeddingModel", "SpladeModel", "BertForQuestionAnswering", "BertForSequenceClassification")


def measure_after(kind: str, with_mask: bool) -> dict[str, dict[str, Any]]:
    """Divides the texts among four devices for the modules after an encoder, such as all modes of pooling.

    Returns the largest relative error of the value and gradients of each model, and what they exchange beside sums.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxft
    from jaxft.models.embedding import Dropout, Normalize
    from jaxft.models.pooling import MODES

    config = tiny.config(hidden_dropout_prob=0.2)
    modern = {"model_type": "modernbert", "pad_token_id": 0, "classifier_pooling": "mean", "vocab_size": 40,
              "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}  # fmt: skip
    encoder = jaxft.BertModel(config, rngs=nnx.Rngs(0))
    models: dict[str, Any] = {
        "EmbeddingModel": jaxft.EmbeddingModel(encoder, pooling=MODES, modules=[Dropout(0.2), Normalize()]),
        "SpladeModel": jaxft.SpladeModel(jaxft.BertForMaskedLM(config, rngs=nnx.Rngs(0))),
        "BertForQuestionAnswering": jaxft.BertForQuestionAnswering(config, rngs=nnx.Rngs(0)),
        "BertForSequenceClassification": jaxft.BertForSequenceClassification(
            jaxft.BertConfig.from_dict(modern), rngs=nnx.Rngs(0)
        ),
    }
    ids = np.random.default_rng(0).integers(5, 18, (B, T), np.int32)
    mask = np.arange(T) < np.array([[6], [5], [2], [3]]) if with_mask else None
    mesh = jax.make_mesh((4,), ("data",), (AxisType[kind],), devices=jax.devices()[:4])
    batch = ids, mask, np.array([[0, 1], [1, 2], [0, 0], [2, 2]], np.int32)
    divided = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    found = {}
    for name, model in models.items():
        model.train()
        graph, params = nnx.split(model)

        def value(params, ids, mask, labels, graph=graph, name=name):
            model, key = nnx.merge(graph, params), jax.random.key(0)
            if name == "BertForQuestionAnswering":
                return model.loss(ids, labels, mask, rngs=key).mean
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(model(ids, mask, rngs=key)))

        step = jax.jit(jax.value_and_grad(value))
        alone = step(params, *batch)
        with jax.set_mesh(mesh):
            program = step.lower(jax.device_put(params, NamedSharding(mesh, PartitionSpec())), *divided).compile()
            pairs = [*zip(*map(jax.tree.leaves, (alone, program(params, *divided))), strict=True)]
        greatest = max(float(np.max(np.abs(a))) for a, _ in pairs)
        error = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs) / greatest
        found[name] = {"error": error, "moved": collectives(program.as_text())[1]}
    return found


def division(arguments, results, shapes, specs, mesh=(2, 2), mapped=False, **rule):
    """Returns how a kernel divides the named axes of arrays, whose shardings are mesh axes for each axis."""
    from jaxft.ops.sharding import Rule, _Layout, _names_of

    count, arrays = arguments.count(",") + 1, [*map(np.empty, shapes)]
    names = _names_of(arguments, arrays[:count]), _names_of(results, arrays[count:])
    if mapped:
        names = [[("v0", *own) for own in part] for part in names]
    layout = _Layout(Rule("op", arguments, results, **rule), *names, shapes[:count], shapes[count:])
    return layout.division(specs, dict(zip(("data", "model"), mesh, strict=True)))


def without_order(shape):
    """Returns the sizes that tell a shape apart: XLA may sum a transposed array."""
    return tuple(sorted(size for size in shape if size > 1))


@functools.cache
def names() -> list[tuple[str, str | None]]:
    return [(name, implementation) for name, case in ops().items() for implementation in case.implementations]


def explicit() -> list[tuple[str, str | None]]:
    return [(name, i) for name, i in names() if "Explicit" in ops()[name].kinds and i != "xla"]


def in_process(devices: int, *arguments: str) -> None:
    """Runs this file as a program with this number of CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    more = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | more
    subprocess.run([sys.executable, __file__, *arguments], env=environment, check=True, timeout=600)


# `make test` has most ways to divide an op once: with a kernel, and over one kind of axes.
SOME_XLA = ("embeddings_layer_norm", "dense by columns", "qkv_attention")
SOME_EXPLICIT = (
    "layer_norm", "layer_norm of divided columns", "dense by rows", "dense in parts", "dense of a vmap",
    "dense with a gate", "feed_forward_residual_layer_norm", "qkv_attention", "linear_cross_entropy by classes",
    "dense of float8 by rows", "merge_heads",
)  # fmt: skip
ONLY_EXPLICIT = (
    "layer_norm", "dense in parts", "dense of a vmap", "dense with a gate", "dense of float8 by rows", "merge_heads",
)  # fmt: skip
ONLY_SLOW = (
    "layer_norm of a divided sequence", "dense_residual_layer_norm of float8 by rows", "dense of float8",
    "feed_forward_residual_layer_norm of float8", "dense of a divided sequence", "varlen_qkv_attention of a vmap",
    "qkv_attention to float8", "layer_norm to float8", "dense_residual_layer_norm of float8",
)  # fmt: skip


def some(kind: str) -> list[Any]:
    """Returns the parameters of the tests of this kind of axes."""
    found = []
    for name, implementation in names() if kind == "Auto" else explicit():
        quick = name in SOME_EXPLICIT if kind == "Explicit" else name not in ONLY_EXPLICIT + ONLY_SLOW
        quick &= implementation != "xla" or name in SOME_XLA
        found.append(pytest.param(kind, name, implementation, marks=[pytest.mark.slow] * (not quick)))
    return found


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """Returns the measurements of all selected tests. One process with four devices makes them."""
    file = tmp_path_factory.mktemp("sharding") / "ops.json"
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    wanted = [item.callspec.params for item in items if "measured" in item.fixturenames]
    wanted = {f"{case['name']} {case['implementation']} {case['kind']}" for case in wanted if "kind" in case}
    in_process(4, "ops", str(file), json.dumps([*wanted]))
    return json.loads(file.read_text())


@pytest.mark.parametrize(("kind", "name", "implementation"), some("Auto"))
def test_divided_arrays_give_the_same_numbers_with_few_collectives(kind, name, implementation, measured):
    check(ops()[name], implementation, measured[f"{name} {implementation}"][kind])


@pytest.mark.parametrize(("kind", "name", "implementation"), some("Explicit"))
def test_ops_map_themselves_over_explicit_axes(kind, name, implementation, measured):
    case, found = ops()[name], measured[f"{name} {implementation}"][kind]
    if not case.logged:
        check(case, implementation, found)
    assert found["error"] < 2e-6


def test_half_a_layer_sums_hidden_states_once_in_each_direction(measured):
    """The only other exchanges are sums of gradients, and gathers of the parameters that all devices have whole."""
    found = measured["model"]
    assert found["error"] < 2e-6
    assert [shape for shape in found["summed"] if shape[:2] == [B // 2, T]] == [[B // 2, T, W]] * 4
    assert sorted(found["moved"]) == [[3, W], [W, 3, W]]
    assert found["refused"] == "join_kernels: the kernels of the model are on several devices"


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_half_a_float8_layer_sums_hidden_states_once(axes, measured):
    found = measured["float8"][axes]
    assert found["error"] < 0.05  # bfloat16
    assert found["summed"] == [[B // 2, T, 128]] * 2 and not found["moved"]


def test_training_step_sums_a_tied_vocabulary_once(measured):
    found = measured["step"]
    assert found["error"] < 2e-6
    assert [shape for shape in found["summed"] if shape == found["vocabulary"]] == [found["vocabulary"]]
    assert not found["moved"]


@pytest.mark.parametrize("case", SOME_MODELS, ids=lambda case: case[0])
def test_models_map_themselves_over_explicit_axes(case, measured):
    assert measured["explicit"][str(case)] < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_models_map_themselves_over_explicit_axes(name, tmp_path):
    in_process(4, "explicit", str(tmp_path / "errors.json"), name)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert len(errors) == len(HEADS) * len(DIVISIONS) and max(errors.values()) < 2e-6, errors


@pytest.mark.parametrize("model", AFTER)
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_modules_after_an_encoder_exchange_sums_only(axes, with_mask, model, measured):
    found = measured[f"after {axes} {with_mask}"][model]
    assert found["error"] < 2e-6 and not found["moved"]


def check(case: Case, implementation: str | None, found: dict[str, Any]) -> None:
    assert found["error"] < 2e-6
    if implementation != "xla":  # XLA may sum the same array for several gradients once
        summed, expected = (collections.Counter(map(without_order, s)) for s in (found["summed"], case.summed))
        assert summed == expected
    assert [tuple(shape) for shape in found["moved"]] == [*case.gathered]
    logged = [message for message in found["messages"] if "is divided over" in message]
    assert bool(logged) == bool(case.logged)
    assert all(re.match(case.logged, message) for message in logged)


# --- Training ----------------------------------------------------------------------------------------------------

STEPS = 50
EXAMPLES = {
    "pretrain": ["--accumulate=4"],  # the devices share the micro-batches
    "finetune": [],  # the devices share the texts of a micro-batch
}


def train(example: str, *arguments: str) -> None:
    """Runs an example on small texts with dropout."""
    import dataclasses

    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    import common

    common.join_processes()  # before the tests use JAX
    import finetune
    import pretrain
    import test_examples

    common.paragraphs = test_examples.some_texts
    config = dataclasses.replace(test_examples.CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    preset = pretrain.Preset(config, length=16, rows=64, steps=STEPS, learning_rate=1e-3)
    pretrain.PRESETS, pretrain.EVALUATED = {"small": preset, "base": preset}, 1
    labelled = finetune.Preset(length=16, batch=8, steps=STEPS, learning_rate=1e-3, labels=3)
    finetune.PRESETS = {"small": labelled, "base": labelled}
    code = {"pretrain": pretrain, "finetune": finetune}[example].main(arguments)
    if code:
        raise SystemExit(code)


def start(devices: int, example: str, *arguments: str, **environment: str) -> subprocess.Popen:
    """Starts an example as a program with this number of CPU devices."""
    more = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, __file__, "train", example, *arguments], env=os.environ | more | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text
    return text


def losses(folder: Path) -> np.ndarray:
    return np.loadtxt(folder / "losses.csv", delimiter=",", skiprows=1)[:, 1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the options of each example with the folder of its run on one device, whose losses are the standard."""
    folder = tmp_path_factory.mktemp("trained")
    checkpoint = tiny.write_model(folder / "checkpoint", hidden_dropout_prob=0.1)
    options = {name: [f"--model={checkpoint}", "--save-every=25", *more] for name, more in EXAMPLES.items()}
    for name in EXAMPLES:
        finish(start(1, name, f"--out={folder / name}", *options[name]))
    return {name: (options[name], folder / name) for name in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize(("example", "option"), [("pretrain", "--data-parallel"), ("finetune", "--fsdp")])
def test_training_on_devices_takes_the_same_steps(example, option, trained, tmp_path):
    options, alone = trained[example]
    finish(start(4, example, f"--out={tmp_path}", option, *options))
    assert len(losses(alone)) == STEPS
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-4)


@pytest.mark.slow
def test_checkpoint_continues_on_another_number_of_devices(trained, tmp_path):
    options, alone = trained["finetune"]
    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    text = finish(start(2, "finetune", f"--out={tmp_path}", "--fsdp", *options))
    assert "resumed after step 25" in text
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-4)


@contextlib.contextmanager
def two_processes(folder: Path, options: list[str]):
    """Starts the example of fine-tuning in two processes with a device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    names = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        start(1, "finetune", f"--out={folder}", "--fsdp", *options, **names, JAX_PROCESS_ID=str(i)) for i in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_two_processes_take_the_same_steps(trained, tmp_path):
    options, alone = trained["finetune"]
    with two_processes(tmp_path, options) as processes:
        for process in processes:
            finish(process)
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-4)
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_signal_to_one_process_stops_both_after_the_same_step(trained, tmp_path):
    options, alone = trained["finetune"]
    with two_processes(tmp_path, options) as processes:
        shown = ""
        while not re.search(r" [1-9]\d?/50 ", shown):
            shown += (more := processes[1].stdout.read(16))
            assert more, shown
        processes[1].send_signal(signal.SIGTERM)
        texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [130, 130], texts
    (stopped,) = {re.search(r"interrupted after step (\d+) of 50", text)[1] for text in texts}
    text = finish(start(4, "finetune", f"--out={tmp_path}", "--fsdp", *options))
    assert f"resumed after step {stopped}" in text
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-4)


def measure_all(file: str, wanted: str) -> None:
    results: dict[str, Any] = {"model": measure_model(), "step": measure_step()}
    results["float8"] = {kind: measure_float8(kind) for kind in ("Auto", "Explicit")}
    for name, case in ops().items():
        for i in case.implementations:
            if kinds := tuple(kind for kind in case.kinds if f"{name} {i} {kind}" in json.loads(wanted)):
                results[f"{name} {i}"] = measure(case, i, kinds)
    for kind, with_mask in itertools.product(("Auto", "Explicit"), (False, True)):
        results[f"after {kind} {with_mask}"] = measure_after(kind, with_mask)
    results["explicit"] = {str(case): measure_explicit(*case) for case in SOME_MODELS}
    Path(file).write_text(json.dumps(results))


def measure_all_explicit(file: str, name: str) -> None:
    cases = [(name, head, *division) for head in HEADS for division in DIVISIONS]
    Path(file).write_text(json.dumps({str(case): measure_explicit(*case) for case in cases}))


BOTH_AXES, DATA, MODEL, NONE = ("data", "model"), ("data",), ("model",), ()


@pytest.mark.parametrize(
    ("specs", "mesh", "expected"),
    [
        ([(DATA, NONE), (NONE,), (DATA, NONE)], (2, 2), {"r": DATA}),
        ([(NONE, NONE), (NONE,), (DATA, NONE)], (2, 2), {"r": DATA}),  # as the result is wanted
        ([(DATA, NONE), (DATA,), (NONE, NONE)], (2, 2), {"r": DATA}),  # one mesh axis divides one axis only
        ([(DATA, NONE), (MODEL,), (MODEL, DATA)], (2, 2), {"r": DATA, "c": MODEL}),  # arguments come first
        ([(BOTH_AXES, NONE), (NONE,), (NONE, NONE)], (2, 2), {"r": BOTH_AXES}),
        ([(BOTH_AXES, NONE), (NONE,), (NONE, NONE)], (2, 4), {}),  # 12 rows and 8 devices
        ([(BOTH_AXES, NONE), (NONE,), (NONE, NONE)], (1, 4), {"r": MODEL}),
        ([(DATA, NONE), (NONE,), (NONE, NONE)], (1, 4), {}),
    ],
    ids=str,
)
def test_mesh_axes_divide_axes_of_an_op(specs, mesh, expected):
    assert division("r c, c", "r c", [(12, 6), (6,), (12, 6)], specs, mesh) == expected


def test_results_may_lack_axes_of_the_rule():
    """An example is attention: it also returns the log-sum-exp, which has no axis for the head size."""
    import jax

    from jaxft.ops import sharding

    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,))
    x = jax.device_put(floats(B, T, N, H), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    specs, reason = sharding._types_of_results("query: ... T n H -> ... T n H", {"query": x})
    assert [len(spec) for spec in specs] == [1] and reason is None


def test_array_that_is_not_read_divides_nothing(caplog):
    assert division("r c, _ _", "r c", [(12, 6), (12, 6), (12, 6)], [(NONE, NONE), (DATA, MODEL), (NONE, NONE)]) == {}
    assert not caplog.text


def test_axes_may_be_broadcast_or_flattened():
    shapes = [(12, 6), (1, 6), (24, 6), (12, 6)]
    for specs, expected in (
        ([(NONE, NONE), (NONE, NONE), (DATA, NONE), (NONE, NONE)], {"r": DATA}),  # 24 rows are 12 times 2
        ([(NONE, NONE), (DATA, NONE), (NONE, NONE), (NONE, NONE)], {}),
    ):
        assert division("r c, r c, r c", "r c", shapes, specs) == expected
    assert division("r, r", "r", [(12,), (24,), (24,)], [(NONE,), (DATA,), (NONE,)], (8, 2)) == {}  # 12 rows of 2
    assert division("r, r", "r", [(12,), (18,), (12,)], [(NONE,), (DATA,), (NONE,)]) == {}  # 18 rows are no multiple


def test_axes_of_sums_are_whole_under_vmap():
    shapes, specs = [(12, 6), (6, 4), (12, 4)], [(NONE, DATA), (DATA, NONE), (NONE, NONE)]
    options = {"contracted": {"k": None}}
    assert division("r k, k c", "r c", shapes, specs, **options) == {"k": DATA}
    shapes, specs = [(3, *shape) for shape in shapes], [(NONE, *spec) for spec in specs]
    assert division("r k, k c", "r c", shapes, specs, mapped=True, **options) == {}


def test_shards_that_the_kernel_does_not_take_are_whole(caplog):
    seen = []

    def legal(shapes):
        seen.append(shapes)
        return shapes[1] == (6,)

    shapes, specs = [(12, 6), (6,), (12, 6)], [(DATA, MODEL), (MODEL,), (NONE, NONE)]
    assert division("r c, c", "r c", shapes, specs, legal=legal) == {"r": DATA}
    assert seen == [[(6, 3), (3,)], [(6, 6), (6,)]]
    assert "does not support the shards that come of a division over model" in caplog.text


@pytest.mark.parametrize("place", [0, 2])
def test_whole_axes_are_logged_for_arguments_only(caplog, place):
    from jaxft import dispatch

    dispatch.log_once.cache_clear()
    specs = [(NONE, NONE), (NONE,), (NONE, NONE)]
    specs[place] = (NONE, DATA)
    assert division("r D, D", "r D", [(12, 6), (6,), (12, 6)], specs) == {}
    assert ("axis 1 of an array (12, 6) is divided over data" in caplog.text) == (place == 0)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("r c, c", "which does not give its 2 devices parts of one size"),
        ("r D, D", "which the kernel does not support"),
    ],
)
def test_log_line_tells_why_an_axis_is_whole(caplog, names, reason):
    from jaxft import dispatch

    dispatch.log_once.cache_clear()
    specs = [(NONE, MODEL), (NONE,), (NONE, NONE)]
    assert division(names, names.split(",")[0], [(12, 7), (7,), (12, 7)], specs) == {}
    assert f"op: axis 1 of an array (12, 7) is divided over model, {reason}" in caplog.text


def test_rows_of_a_shard_follow_each_other_with_dropout():
    from jaxft.ops.sharding import rows_of

    assert rows_of((4, 6, 8), dropout=False) == "t0 t1 t2" and rows_of((4, 6, 8), dropout=True) == "t0 T1 T2"
    assert rows_of((1, 6, 8), dropout=True) == "t0 t1 T2" and rows_of((1, 1), dropout=True) == "t0 T1"


if __name__ == "__main__":
    {"ops": measure_all, "explicit": measure_all_explicit, "train": train}[sys.argv[1]](*sys.argv[2:])
