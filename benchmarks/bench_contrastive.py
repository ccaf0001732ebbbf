"""A contrastive training step of BERT-base, 256 pairs of 128 tokens in bfloat16: jaxft beside the same in plain JAX.

A step encodes queries and documents in one batch and computes mean pooling, the contrastive loss of the pairs, and the
gradients of all parameters, which have the dtype of the computation. With AdamW it also updates the parameters. The
peers are the encoders of `bench_train.py` with word, position and token type embeddings, mean pooling, and the
cross-entropy of the whole matrix of similarities.

Every program is compiled with XLA's defaults and with `jaxft.training.COMPILER_OPTIONS`, and the faster one counts.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import bench_encoder
import bench_train
import shapes
import timing
from bench_encoder import PEERS
from jaxft import BertConfig, BertModel, EmbeddingModel
from jaxft.comparison import plain_encoder, plain_layer_norm
from jaxft.training import COMPILER_OPTIONS, cached_gradients, contrastive_loss

TEMPERATURE = 0.05
MICRO_BATCHES = 4  # of gradient caching
OPTIMIZER = optax.adamw(1e-5)

Gradients = Callable[[Any, Any, Any], tuple[jax.Array, Any]]  # (parameters, batch, None or a key) -> loss, gradients


def padded(ids: np.ndarray, lengths: np.ndarray | None) -> dict[str, Any]:
    """Returns arguments of an `EmbeddingModel` for texts `[B, T]` that have so many tokens, None if all T."""
    mask = {} if lengths is None else {"attention_mask": np.arange(ids.shape[1]) < lengths[:, None]}
    return {"input_ids": ids, **mask}


def packed(ids: np.ndarray, lengths: np.ndarray | None) -> dict[str, Any]:
    """Returns arguments of an `EmbeddingModel` for the same texts without padding."""
    lengths = np.full(*ids.shape) if lengths is None else lengths
    tokens = ids[np.arange(ids.shape[1]) < lengths[:, None]]
    cu_seqlens = np.append(0, lengths.cumsum()).astype(np.int32)
    return {"input_ids": np.pad(tokens, (0, -len(tokens) % 128)), "cu_seqlens": cu_seqlens}


def step(gradients_of: Gradients, adamw: bool) -> jax.stages.Wrapped:
    """Returns a function (parameters, optimiser state, batch, key) -> loss, and gradients or the updated state."""

    def run(params: Any, opt_state: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        loss, gradients = gradients_of(params, batch, key)
        if not adamw:
            return loss, gradients
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return loss, (optax.apply_updates(params, updates), opt_state)

    return jax.jit(run)


# --- jaxft -------------------------------------------------------------------------------------------------------


def embedder(case: shapes.Contrastive, dtype: str, implementation: str | None, remat: bool) -> EmbeddingModel:
    """Returns a model with random parameters."""
    layers, width, heads, inner = shapes.MODELS[case.model]
    vocabulary, positions, types = shapes.EMBEDDINGS_TABLES
    config = BertConfig(
        vocab_size=vocabulary, max_position_embeddings=positions, type_vocab_size=types, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        hidden_dropout_prob=case.dropout, attention_probs_dropout_prob=case.dropout,
    )  # fmt: skip
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "implementation": implementation, "remat": remat}
    encoder = BertModel(config, **options, rngs=nnx.Rngs(0))
    encoder.pooler = None
    return EmbeddingModel(encoder)


def embeddings(graph: Any, length: int, params: Any, batch: Any, key: Any) -> tuple[jax.Array, ...]:
    """Computes the embeddings of queries and documents."""
    packing = {"max_seqlen": length} if "cu_seqlens" in batch else {}
    return (*jnp.split(nnx.merge(graph, params)(**batch, **packing, deterministic=key is None, rngs=key), 2),)


def at_once(graph: Any, length: int) -> Gradients:
    """Returns the loss and its gradients by an `EmbeddingModel`."""

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return contrastive_loss(*embeddings(graph, length, params, batch, key), temperature=TEMPERATURE).mean

    return jax.value_and_grad(loss)


def cached(graph: Any, length: int) -> Gradients:
    """Returns the same by gradient caching, for a padded batch without padding."""
    loss_fn = functools.partial(contrastive_loss, temperature=TEMPERATURE)

    def run(params: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        ids = batch["input_ids"].reshape(2, MICRO_BATCHES, -1, length).swapaxes(0, 1).reshape(MICRO_BATCHES, -1, length)
        embed = lambda params, ids: embeddings(graph, length, params, {"input_ids": ids}, key)  # noqa: E731
        loss, gradients = cached_gradients(embed, loss_fn, params, ids)
        return loss.mean, gradients

    return run


# --- The peers ---------------------------------------------------------------------------------------------------


def plain_params(model: EmbeddingModel, joint: bool) -> dict[str, Any]:
    """Returns the parameters for `plain`, with q, k and v from one matrix or from three."""
    layers = [dict(nnx.to_pure_dict(nnx.state(layer))) for layer in model.encoder.layers]
    embeddings = dict(nnx.to_pure_dict(nnx.state(model.encoder.embeddings)))
    return {"embeddings": embeddings, "layers": layers if joint else bench_encoder.separate(layers)}


def plain(case: shapes.Contrastive, attention: Any) -> Gradients:
    """Returns the loss and its gradients in plain JAX."""
    options: dict[str, Any] = {"heads": shapes.MODELS[case.model].heads, "activation": "gelu", "epsilon": 1e-12}
    options |= {"attention": attention}

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        ids, lengths = batch
        p = params["embeddings"]
        x = p["word"][ids] + p["position"][: ids.shape[1]] + p["token_type"][0]
        x = plain_layer_norm(x, p["norm_gamma"], p["norm_beta"], 1e-12)
        if key is None:
            x = plain_encoder(params["layers"], x, lengths, **options)
        else:
            x = bench_train.drop(x, jax.random.fold_in(key, len(params["layers"])), case.dropout)
            x = bench_train.plain_encoder(params["layers"], x, key, rate=case.dropout, **options)
        x = x.astype(jnp.float32)
        if lengths is None:
            pooled = jnp.mean(x, axis=1)
        else:
            valid = jnp.arange(ids.shape[1]) < lengths[:, None]
            pooled = jnp.sum(jnp.where(valid[:, :, None], x, 0.0), axis=1) / lengths[:, None].astype(x.dtype)
        queries, documents = jnp.split(pooled / jnp.linalg.norm(pooled, axis=1, keepdims=True), 2)
        log_p = jax.nn.log_softmax(queries @ documents.T / TEMPERATURE, axis=1)
        return -jnp.mean(jnp.diagonal(log_p))

    return jax.value_and_grad(loss)


# --- The comparison ----------------------------------------------------------------------------------------------


def run(case: shapes.Contrastive, args: argparse.Namespace) -> list[timing.Row]:
    """Checks and times one case."""
    ids = np.random.default_rng(0).integers(1, shapes.EMBEDDINGS_TABLES[0], (2 * case.pairs, case.length), np.int32)
    ids[case.pairs :, : case.length // 2] = ids[: case.pairs, : case.length // 2]  # a document is like its query
    lengths = bench_encoder.random_lengths(case.texts)
    counts = None if lengths is None else np.asarray(lengths)
    model = embedder(case, "bfloat16", None, False)
    wide = embedder(case, "float32", "xla", True)
    graph, params = nnx.split(model)
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    key = jax.random.key(3) if case.dropout else None

    ways: dict[str, tuple[Gradients, Any, Any]] = {}  # name: gradients, parameters, batch
    forms = {"padded": padded, "packed": packed}
    for form in ("packed", "padded") if counts is not None else ("padded",) if case.dropout else ("padded", "packed"):
        name = f"jaxft, {form}" if ways else "jaxft"
        ways[name] = at_once(graph, case.length), params, jax.tree.map(jnp.asarray, forms[form](ids, counts))
    if counts is None and key is None:
        ways["jaxft, cached"] = cached(graph, case.length), params, ways["jaxft"][2]
    for name, (attention, joint) in PEERS.items():
        if attention == "xla" or jax.default_backend() == "gpu":
            ways[name] = plain(case, attention), plain_params(model, joint), (jnp.asarray(ids), lengths)
    # In plain JAX by jaxft, so that the same elements are dropped. Not timed.
    batch = jax.tree.map(jnp.asarray, padded(ids, counts))
    checks = [(at_once(nnx.split(embedder(case, "bfloat16", "xla", True))[0], case.length), params, batch)]
    checks += [(at_once(nnx.split(wide)[0], case.length), nnx.state(wide), batch)]

    def inputs(params: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        return params, OPTIMIZER.init(params) if case.adamw else None, batch, key

    peers_key = jax.random.key(3, impl="rbg") if case.dropout else None
    keys = {name: key if name.startswith("jaxft") else peers_key for name in ways}

    def lowered() -> Iterator[tuple[jax.stages.Lowered, dict[str, Any]]]:
        for name, (gradients_of, params, batch) in ways.items():
            program = step(gradients_of, case.adamw).lower(*inputs(params, batch, keys[name]))
            in_graph = bench_train.WITHOUT_CUDNN if case.dropout and "cudnn" in name else {}
            yield from ((program, {**own, **in_graph}) for own in ({}, COMPILER_OPTIONS))
        for precision, (gradients_of, params, batch) in zip((None, "highest"), checks, strict=True):
            with jax.default_matmul_precision(precision):
                program = step(gradients_of, False).lower(params, None, batch, key)
            yield program, COMPILER_OPTIONS

    *programs, plain_step, exact_step = timing.compile_all(lowered())
    (plain_value, in_bfloat16), (value, exact) = (
        program(params, None, batch, key)
        for program, (_, params, batch) in zip((plain_step, exact_step), checks, strict=True)
    )
    label, variants, each = f"{case.op} {case.pairs}x{case.length}", {}, iter(programs)
    allowed = 2 * abs(float(plain_value) - float(value)) + 0.01 * abs(float(value))
    for name, (_, params, batch) in ways.items():
        variants[name] = bench_train.fastest(
            f"{label}, {name}", (next(each), next(each)), inputs(params, batch, keys[name])
        )
        found, results = variants[name][0](*variants[name][1][0])
        if key is None and not abs(float(found) - float(value)) <= allowed:  # with dropout, peers drop other elements
            raise SystemExit(f"{label}, {name}: the loss is {found}, not {value}; nothing is timed")
        if name.startswith("jaxft") and not case.adamw:
            for gradients in zip(*map(jax.tree.leaves, (results, in_bfloat16, exact)), strict=True):
                timing.check(f"{label}, {name}, a gradient {list(gradients[0].shape)}", *gradients)
    print(f"{label}: loss {float(value):.4f}")
    mib = {name: round(bench_train.temporary_mib(variant)) for name, variant in variants.items()}
    print(f"{label}: MiB of temporary memory: {mib}")
    if args.kernels:
        for name, variant in variants.items():
            bench_encoder.print_kernels(f"{label}, {name}", variant, shapes.MODELS[case.model].layers)
    key_of_rows: dict[str, Any] = {
        "op": case.op, "direction": "training step", "shape": (case.pairs, case.length), "dtype": "bfloat16"
    }  # fmt: skip
    samples = {(name, "temporary_mib"): [float(size)] for name, size in mib.items()}
    rows = timing.as_rows(samples, 0.0, "", args, **key_of_rows) if jax.default_backend() == "gpu" else []
    valid = [case.length] * len(ids) if counts is None else counts.tolist()
    work = 3 * shapes.encoder_flops(case.model, valid)
    return rows + timing.measure(variants, work=work, unit="TFLOP/s", args=args, **key_of_rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each program as well")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name, as 'AdamW'")
    args = parser.parse_args(argv)
    results: list[timing.Row] = []
    for case in shapes.CONTRASTIVE[:1] if args.quick else shapes.CONTRASTIVE:
        if args.only in case.op:
            results += run(case, args)
    timing.print_tables(results)


if __name__ == "__main__":
    main()
