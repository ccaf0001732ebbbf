"""Launch configs: the tuned table where it has an entry, the heuristic everywhere else."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxft
from cases import lower
from jaxft import dispatch, tuning, tuning_candidates
from jaxft.tuning import attention as tuning_attention
from jaxft.tuning import cache as tuning_cache
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import layouts as tuning_layouts
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import search as tuning_search
from jaxft.tuning import table as tuning_table

UNKNOWN = "a device that nobody tuned for"
ITEM_SIZES = (2, 4)
#: op -> its config, and the sizes in its table's keys.
OPS = {
    "layer_norm": (tuning_table.RowConfig, ("rows", "width", "itemsize")),
    "layer_norm_backward": (tuning_table.GradientConfig, ("rows", "width", "itemsize")),
    "softmax": (tuning_table.RowConfig, ("rows", "width", "itemsize")),
    "softmax_backward": (tuning_table.RowConfig, ("rows", "width", "itemsize")),
    "bias_activation": (tuning_table.ElementwiseConfig, ("rows", "width", "itemsize")),
    "permute": (tuning_table.PermuteConfig, ("size", "kept", "aligned", "itemsize")),
    "bias_activation_backward": (tuning_table.GradientConfig, ("rows", "width", "itemsize")),
    "qkv_bias_split_heads": (tuning_table.ElementwiseConfig, ("batch_heads", "length", "head_size", "itemsize")),
    "qkv_bias_split_heads_backward": (
        tuning_table.GradientConfig, ("batch", "length", "heads", "head_size", "itemsize"),
    ),
    **dict.fromkeys(
        ("attention", "attention_dq", "attention_dkv"),
        (tuning_table.AttentionConfig, ("batch_heads", "query", "key", "head_size", "itemsize")),
    ),
    "dense_implementation": (tuning_dense.DenseChoice, ("rows", "depth", "width", "activation", "itemsize")),
    "dense": (tuning_dense.DenseConfig, ("rows", "depth", "width", "itemsize")),
    "dense_split": (tuning_dense.SplitConfig, ("rows", "depth", "width", "itemsize")),
    "dense_mosaic": (tuning_dense.MosaicDenseConfig, ("rows", "depth", "width", "activation", "itemsize")),
    "dense_mosaic_gradient": (tuning_dense.MosaicDenseConfig, ("rows", "depth", "width", "itemsize")),
}  # fmt: skip
SIZES = (0, 1, 2, 3, 31, 64, 100, 127, 384, 769, 4096, 5000, 65537)


def heuristics(device_kind=UNKNOWN):
    for itemsize in ITEM_SIZES:
        for rows in SIZES:
            for size in SIZES[1:]:
                yield tuning_rows.layer_norm(rows, size, itemsize, device_kind)
                yield tuning_rows.layer_norm_backward(rows, size, itemsize, device_kind)
                yield tuning_rows.layer_norm_backward(rows, size, itemsize, device_kind, wide_dropout=True)
                yield tuning_rows.embeddings_sums(rows, size)
                yield tuning_rows.softmax(rows, size, itemsize, device_kind)
                yield tuning_rows.softmax_backward(rows, size, itemsize, device_kind)
                yield tuning_rows.bias_activation(rows, size, itemsize, device_kind)
                for aligned in (1, 16 // itemsize):
                    yield tuning_layouts.permute(rows * size, size, aligned, itemsize, device_kind)
                yield tuning_rows.bias_activation_backward(rows, size, itemsize, device_kind)
                yield tuning_layouts.qkv_bias_split_heads(48, rows, size, itemsize, device_kind)
                yield tuning_layouts.qkv_bias_split_heads_backward(4, rows, 12, size, itemsize, device_kind)
                yield tuning_dense.dense(rows, size, 768, itemsize, device_kind)
                yield tuning_dense.dense(rows, 768, size, itemsize, device_kind)
                yield tuning_dense.dense_split(rows, size, 768, itemsize, device_kind)
        for length in SIZES[:-1]:
            for head_size in (8, 32, 33, 64, 80, 128, 256):
                for attention in (
                    tuning_attention.attention,
                    tuning_attention.attention_dq,
                    tuning_attention.attention_dkv,
                ):
                    yield attention(16, length, length, head_size, itemsize, device_kind)
                    yield attention(4096, length, length, head_size, itemsize, device_kind, average=max(1, length // 4))


@pytest.fixture
def tuned(monkeypatch):
    """Replaces the tables by {device kind: table}."""

    def use(tables):
        monkeypatch.setattr(tuning, "_table", lambda device_kind: tables.get(device_kind, {}))

    return use


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**31 - 1, 2**31)])
def test_next_power_of_2(n, power):
    assert tuning_table.next_power_of_2(n) == power


def test_keys_round_sizes_up_to_powers_of_two():
    assert tuning_table.key(rows=4000, width=1000, itemsize=2) == "rows=4096,width=1024,itemsize=2"
    assert tuning_table.key(rows=4097, width=1, itemsize=4) == "rows=8192,width=1,itemsize=4"


def test_keys_have_the_exact_depth_and_width_of_a_product():
    assert tuning_table.key(rows=4000, depth=768, width=2304, itemsize=2) == "rows=4096,depth=768,width=2304,itemsize=2"


def test_heuristics_are_launchable():
    """Blocks and warps are powers of two, as Triton needs them, and no block is absurd."""
    for config in heuristics():
        for name, value in dataclasses.asdict(config).items():
            assert value >= 1 or (name == "programs" and isinstance(config, tuning_table.AttentionConfig)), config
            if name not in ("num_stages", "programs", "splits"):
                assert value & (value - 1) == 0, config
        assert config.num_warps <= 32
        if isinstance(config, tuning_table.AttentionConfig):
            assert min(config.block_q, config.block_k) >= 16, config  # the least that a Triton dot takes
        elif isinstance(config, tuning_dense.DenseConfig):
            assert min(config.block_m, config.block_n, config.block_k) >= 16, config
        elif isinstance(config, tuning_table.PermuteConfig):
            assert config.elements <= 8192, config
        else:
            assert config.block_rows * config.block_width <= 32768, config
            assert config.block_rows * config.block_width // config.num_warps <= 2048, config


def test_attention_blocks_do_not_outgrow_the_sequence():
    for rows, keys in ((17, 5), (5, 40), (1, 1)):
        for batch_heads in (1, 4096):
            config = tuning_attention.attention(batch_heads, rows, keys, 64, 2, UNKNOWN)
            assert config.block_q <= max(16, tuning_table.next_power_of_2(rows)), config
            assert config.block_k <= max(16, tuning_table.next_power_of_2(keys)), config


def shared_memory(op, config, queries_length, keys_length, head_size, itemsize):
    """Bytes that Triton allocates at most for attention: tiles that stay, those on the way, and logits with a bias.

    Not below what Triton 3.9 gives for compute capability 8.6 (some 1,200 kernels, 2026-11-22), but in blocks of 32 or
    fewer, which are far from the limit, and for float32 products without TF32, which take up to half as much again.
    """
    row = tuning_table.next_power_of_2(head_size) * itemsize
    queries, keys = 2 * config.block_q * row, 2 * config.block_k * row  # and their gradients, or values
    stays, moves = {
        "attention": (queries // 2, keys), "attention_dq": (queries, keys), "attention_dkv": (keys, queries)
    }[op]  # fmt: skip
    if op == "attention_dq" and (itemsize == 4 or keys_length <= 128):  # which visits the keys twice
        stays += queries if config.num_stages == 1 else queries // 2
    if config.num_stages == 1:  # in registers where a tile is used as it is, and q once more, transposed
        return stays + moves + (moves // 2 if op == "attention_dkv" else 0)
    logits = config.block_q * config.block_k
    if op == "attention_dkv" and keys_length <= config.block_k and queries_length > config.block_q:
        # The only kernel: also keys without the unused, transposed probabilities, but no bias for each pair.
        stays += keys // 2 + 2 * itemsize * logits
        return stays + (config.num_stages - 1) * moves + moves // 2 + 2048
    return stays + (config.num_stages - 1) * (moves + 4 * logits) + itemsize * logits + 2048


@pytest.mark.parametrize("kind", [UNKNOWN, "NVIDIA L40S", "NVIDIA GeForce RTX 3060"])
def test_heuristics_fit_into_99_kib(kind):
    """What a program gets on Ampere cards other than the A100, and on Ada."""
    lengths = ((16, 16), (64, 16), (200, 64), (100, 100), (5000, 5000))
    for op, head_size, itemsize, (queries, keys), batch_heads, average in itertools.product(
        ("attention", "attention_dq", "attention_dkv"), (8, 33, 64, 80, 128, 192, 256), (2, 4), lengths, (1, 4096),
        (None, 16, 64),
    ):  # fmt: skip
        config = getattr(tuning, op)(batch_heads, queries, keys, head_size, itemsize, kind, average=average)
        taken = shared_memory(op, config, queries, keys, head_size, itemsize)
        if itemsize == 4 and config.num_stages > 1:
            taken *= 1.5
        assert taken <= 99 * 1024, (op, head_size, itemsize, config)
    for rows, depth, width, itemsize in itertools.product((1, 128, 300, 2000), (33, 5000), (100, 768, 5000), (2, 4)):
        config = tuning_dense.dense(rows, depth, width, itemsize, kind)
        tiles = (config.block_m + config.block_n) * config.block_k * itemsize  # fewer than num_stages are on the way
        assert (config.num_stages - 1) * tiles <= 99 * 1024, config


@pytest.mark.parametrize(
    ("kind", "multiprocessors", "rows", "width", "stages"),
    [("NVIDIA H100 80GB HBM3", 132, 128, 2304, 5), ("NVIDIA H100 80GB HBM3", 132, 128, 4224, 5),
     ("NVIDIA H100 80GB HBM3", 132, 128, 4288, 3), ("NVIDIA H100 80GB HBM3", 132, 256, 3072, 3),
     ("NVIDIA H20", 78, 128, 3072, 3), ("NVIDIA A100-SXM4-80GB", 108, 128, 2304, 3), (UNKNOWN, 132, 128, 2304, 3)],
)  # fmt: skip
def test_stages_of_dense(kind, multiprocessors, rows, width, stages):
    """More where the card has room for them, and each tile a multiprocessor to itself."""
    with dispatch.target(kind, (9, 0), multiprocessors):
        assert tuning_dense.dense(rows, 768, width, 2, kind).num_stages == stages


@pytest.mark.parametrize(
    ("rows", "itemsize", "expected"),
    [(256, 2, (64, 64, 128, 4, 3)), (1024, 2, (64, 64, 64, 4, 4)), (1025, 2, (128, 128, 64, 8, 3)),
     (1025, 4, (64, 64, 32, 4, 4))],
)  # fmt: skip
def test_tiles_of_dense(rows, itemsize, expected):
    """Large ones in 16 bits: in full float32 they would spill registers."""
    assert tuning_dense.dense(rows, 768, 3072, itemsize, UNKNOWN) == tuning_dense.DenseConfig(*expected)


@pytest.mark.parametrize(
    ("kind", "large"),
    [("NVIDIA A100-SXM4-80GB", True), ("NVIDIA A100 80GB PCIe", True), ("NVIDIA A30", True), ("NVIDIA A800", True),
     ("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200", True), ("NVIDIA H20", True), ("NVIDIA GH200 480GB", True),
     ("NVIDIA B200", True), ("NVIDIA GB200", True), ("NVIDIA A10", False), ("NVIDIA A10G", False),
     ("NVIDIA A40", False), ("NVIDIA RTX A3000", False), ("NVIDIA A3000", False), ("NVIDIA L4", False),
     ("NVIDIA RTX 6000 Ada Generation", False), ("NVIDIA GB10", False), ("NVIDIA GeForce RTX 5090", False)],
)  # fmt: skip
def test_large_heads_take_what_the_card_has(kind, large):
    blocks = [
        tuning_attention.attention_dkv(64, 512, 512, size, itemsize, kind) for size, itemsize in ((256, 2), (256, 4))
    ]
    expected = [(32, 64, 8, 1), (16, 32, 4, 1)] if large else [(32, 32, 4, 1), (16, 16, 4, 1)]
    assert blocks == [tuning_table.AttentionConfig(*block) for block in expected]


@pytest.mark.parametrize("kind", [UNKNOWN, "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
def test_gradients_of_attention_fit_into_registers(kind):
    """What a thread adds up: it has 255 in all."""
    for length, size, itemsize, average in itertools.product(
        (16, 32, 64, 128, 512), (16, 64, 128, 256), (2, 4), (None, 16, 64)
    ):
        dkv = tuning_attention.attention_dkv(4096, length, length, size, itemsize, kind, average=average)
        dq = tuning_attention.attention_dq(4096, length, length, size, itemsize, kind, average=average)
        assert 2 * dkv.block_k * size <= 128 * 32 * dkv.num_warps, (length, size, itemsize, average, dkv)
        assert dq.block_q * size <= 128 * 32 * dq.num_warps, (length, size, itemsize, average, dq)


@pytest.mark.parametrize(
    ("longest", "average", "expected"),
    [
        (128, None, [(64, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 1)]),
        (128, 16, [(64, 32, 4, 2), (32, 32, 1, 2), (32, 32, 2, 2)]),
        (128, 33, [(64, 64, 4, 3), (64, 64, 4, 3), (32, 128, 4, 1)]),
        (64, 16, [(64, 32, 4, 2), (32, 32, 1, 2), (64, 64, 4, 3)]),
        (32, 8, [(32, 32, 2, 2), (32, 32, 1, 2), (32, 32, 2, 3)]),
        (512, 300, [(64, 64, 4, 3)] * 3),
    ],
)
def test_blocks_are_as_short_as_sequences_back_to_back(longest, average, expected):
    """One that holds all of the longest would be idle in most."""
    sizes = (12 * 1024, longest, longest, 64, 2, "NVIDIA H100 80GB HBM3")  # which has no table
    found = [
        f(*sizes, average=average)
        for f in (tuning_attention.attention, tuning_attention.attention_dq, tuning_attention.attention_dkv)
    ]
    assert found == [tuning_table.AttentionConfig(*block) for block in expected]


def test_sequences_back_to_back_have_entries_of_their_own():
    qkv, cu_seqlens = jnp.zeros((600, 3, 2, 16), jnp.bfloat16), jnp.arange(0, 601, 20, dtype=jnp.int32)
    with tuning_table.trial(trial := tuning_table.Trial({})):
        jaxft.varlen_qkv_attention(qkv, cu_seqlens, max_seqlen=50, implementation="triton")
    sizes = "batch_heads=64,query=64,key=64,head_size=16,average=32,itemsize=2"
    assert trial.asked.keys() == {(op, sizes) for op in ("attention", "attention_dq", "attention_dkv")}


def test_dropout_with_wide_vectors_has_an_entry_of_its_own(key):
    """Of LayerNorm's gradient, whose programs have more registers then."""
    x, seen = jnp.zeros((6, 40), jnp.bfloat16), {}
    for dtype, rate in itertools.product((jnp.bfloat16, jnp.float32), (0.0, 0.1)):
        gamma = jnp.ones(40, dtype)
        with tuning_table.trial(trial := tuning_table.Trial({})):
            jaxft.bias_residual_layer_norm(
                x, None, x, gamma, gamma, dropout_rate=rate, dropout_rng=key, implementation="triton"
            )
        (seen[gamma.dtype.name, rate],) = (name for op, name in trial.asked if op == "layer_norm_backward")
    assert {case for case, name in seen.items() if name.endswith("itemsize=2,dropout=1")} == {("float32", 0.1)}
    usual = tuning_rows.layer_norm_backward(16384, 768, 2, UNKNOWN)
    assert usual == tuning_table.GradientConfig(2, 1024, 396, 4)
    for rows in (16384, 65536):
        wide = tuning_rows.layer_norm_backward(rows, 1024, 2, UNKNOWN, wide_dropout=True)
        assert wide == tuning_table.GradientConfig(1, 1024, 528, 4)


def test_a_tuned_entry_wins(tuned):
    tuned({"NVIDIA H200": {"layer_norm": {"rows=4096,width=1024,itemsize=2": {"block_rows": 2, "num_warps": 8}}}})
    heuristic = tuning_rows.layer_norm(4000, 1000, 2, UNKNOWN)
    expected = dataclasses.replace(heuristic, block_rows=2, num_warps=8)
    assert expected != heuristic
    assert tuning_rows.layer_norm(4000, 1000, 2, "NVIDIA H200") == expected  # in the bucket
    for op, rows, itemsize in (
        (tuning_rows.layer_norm, 4097, 2),
        (tuning_rows.layer_norm, 4000, 4),
        (tuning_rows.bias_activation, 4000, 2),
    ):
        assert op(rows, 1000, itemsize, "NVIDIA H200") == op(rows, 1000, itemsize, UNKNOWN)


@pytest.mark.parametrize("op", [op for op in OPS if "mosaic" not in op and op != "dense_implementation"])
def test_every_op_finds_its_tuned_entry(op, tuned):
    sizes = {name: 100 + place for place, name in enumerate(OPS[op][1])}
    tuned({"card": {op: {tuning_table.key(**sizes): {"num_warps": 32}}}})
    assert getattr(tuning_dense if "dense" in op else tuning, op)(*sizes.values(), "card").num_warps == 32


def test_the_mosaic_product_finds_its_tuned_entries(tuned):
    tuned({"card": {"dense_mosaic": {"rows=1024,depth=200,width=300,activation=2,itemsize=2": {"group": 4}}}})
    with_gelu, without = (tuning_dense.dense_mosaic(1000, 200, 300, name, 2, "card") for name in ("gelu", None))
    assert with_gelu == dataclasses.replace(without, group=4) != without
    default = tuning_dense.dense_mosaic_gradient(1000, 200, 300, 2, "card")
    tuned({"card": {"dense_mosaic_gradient": {"rows=1024,depth=200,width=300,itemsize=2": {"stages": 2}}}})
    found = tuning_dense.dense_mosaic_gradient(1000, 200, 300, 2, "card")
    assert found == dataclasses.replace(default, stages=2) != default


@pytest.mark.parametrize("sizes", [(768, 2304), (1024, 3072), (1024, 4096)])
def test_models_do_not_share_entries_of_products(sizes, tuned):
    """BERT-base and BERT-large, and the layers of one of them."""
    key = "rows=512,depth=768,width=3072,itemsize=2"
    tuned({"card": {"dense": {key: {"num_warps": 16}}, "dense_split": {key: {"splits": 7}}}})
    assert tuning_dense.dense(500, 768, 3072, 2, "card").num_warps == 16
    assert tuning_dense.dense_split(500, 768, 3072, 2, "card").splits == 7
    for op in (tuning_dense.dense, tuning_dense.dense_split):
        assert op(500, *sizes, 2, "card") == op(500, *sizes, 2, UNKNOWN)


def test_the_table_of_the_h200_has_the_layers_of_both_berts():
    """Each has entries of its own, those of BERT-large for as few rows as Triton's product is taken for."""
    table = tuning_table._table("NVIDIA H200")
    base = "768,width=2304", "768,width=768", "768,width=3072", "3072,width=768"
    large = "1024,width=3072", "1024,width=1024", "1024,width=4096", "4096,width=1024"
    for layers, most in ((base, 1024), (large, 256)):
        for sizes, rows in itertools.product(layers, (128, 256, 512, 1024)):
            assert rows > most or f"rows={rows},depth={sizes},itemsize=2" in table["dense"]
    for sizes, rows in itertools.product((*base, *large), (128, 256, 512, 1024, 4096, 16384)):
        activation = 2 if sizes in ("768,width=3072", "1024,width=4096") else 1
        entry = f"rows={rows},depth={sizes},activation={activation},itemsize=2"
        depth, width = map(int, sizes.split(",width="))
        known = {"xla", "triton" if tuning_dense.is_short(rows, depth, width, 2) else "mosaic_gpu"}
        assert table["dense_implementation"][entry]["implementation"] in known


def test_the_implementation_of_dense_is_in_the_table(tuned):
    entry = {"rows=4096,depth=768,width=3072,activation=2,itemsize=2": {"implementation": "triton"}}
    tuned({"NVIDIA H200": {"dense_implementation": entry}})
    sizes = 4096, 768, 3072
    chosen = [tuning_dense.dense_implementation(*sizes, name, 2, "NVIDIA H200") for name in ("gelu", None)]
    assert chosen == ["triton", "mosaic_gpu"]
    for implementation, kernels in (("triton", 1), ("xla", 1), ("mosaic_gpu", 0)):
        entry |= dict.fromkeys(entry, {"implementation": implementation})
        floats = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 768), (768, 3072), (3072,)))
        text = lower(functools.partial(jaxft.dense, activation="gelu"), *floats)
        assert text.count("xla.gpu.triton") == kernels
        assert ("stablehlo.dot_general" in text) == (implementation == "xla")
        assert ("mosaic_gpu" in text) == (implementation == "mosaic_gpu")


def test_rows_that_cost_mosaic_copies_do_not_take_an_entry_of_others(tuned):
    key = "rows=512,depth=768,width=768,activation=1,itemsize=2"
    table = {"dense_implementation": {key: {"implementation": "mosaic_gpu"}}}
    tuned({"NVIDIA H200": table})
    chosen = [tuning_dense.dense_implementation(rows, 768, 768, None, 2, "NVIDIA H200") for rows in (264, 512, 509)]
    assert chosen == ["mosaic_gpu", "mosaic_gpu", "triton"]
    table["dense_implementation"][key] = {"implementation": "xla"}
    assert tuning_dense.dense_implementation(509, 768, 768, None, 2, "NVIDIA H200") == "xla"
    trial = tuning_table.Trial({})
    with tuning_table.trial(trial):  # autotune keeps what it finds for such rows beside what it finds for others
        for rows in (512, 509):
            tuning_dense.dense_implementation(rows, 768, 768, None, 2, "NVIDIA H200")
    assert list(trial.asked) == [("dense_implementation", key), ("dense_implementation", f"{key},unaligned")]


def test_with_a_residual_entries_without_do_not_count():
    """XLA has a kernel more then: the rule decides, on the card with the table as on others."""
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        with_residual = tuning_dense.dense_implementation(16384, 3072, 768, None, 2, kind, residual=True)
        assert with_residual == "mosaic_gpu"
        assert tuning_dense.dense_implementation(16384, 3072, 768, None, 2, kind) == "xla"
    sizes = {"rows": 16384, "depth": 3072, "width": 768, "activation": 1, "itemsize": 2, "residual": 1}
    tried = tuning_search.candidates("dense_implementation", tuning_dense.DenseChoice("mosaic_gpu"), **sizes)
    assert {choice.implementation for choice in tried} >= {"triton", "xla"}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_where_mosaic_is_no_choice_it_is_neither_said_to_be_nor_taken(capability, residual):
    """And what autotune finds with a residual is kept beside what it finds without."""
    shapes = {"x": (4096, 768), "kernel": (768, 768), **({"residual": (4096, 768)} if residual else {})}
    floats = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    mosaic = capability == (9, 0)
    key = f"rows=4096,depth=768,width=768,activation=1,itemsize=2{',residual=1' * residual}"
    entry = "dense_implementation", key
    for tried in ({}, {entry: tuning_dense.DenseChoice("mosaic_gpu")}):
        with dispatch.target("NVIDIA card", capability), tuning_table.trial(trial := tuning_table.Trial(tried)):
            traced = jax.jit(lambda arrays: jaxft.dense(**arrays)).trace(floats)
        choices = {key: config.implementation for (op, key), (config, _) in trial.asked.items() if op == entry[0]}
        assert choices == {key: "mosaic_gpu" if mosaic else "xla"}
        assert ("wgmma" in str(traced.jaxpr)) == mosaic


@pytest.mark.parametrize("programs", [132, 114, 16])
def test_one_program_a_multiprocessor(programs):
    with dispatch.target("NVIDIA H100", (9, 0), programs):
        config = tuning_dense.dense_mosaic(4096, 768, 3072, "gelu", 2, "NVIDIA H100")
    assert config.programs == programs
    sizes = {"rows": 4096, "depth": 1024, "width": 4096, "activation": 2, "itemsize": 2}
    assert {c.programs for c in tuning_search.candidates("dense_mosaic", config, **sizes)} == {programs}


@pytest.mark.parametrize(
    ("rows", "width", "tile"),
    [(512, 768, (64, 64, "none")), (1024, 768, (64, 64, "m")), (1024, 1024, (64, 64, "m")),
     (1024, 2304, (64, 192, "m")), (1024, 3072, (64, 192, "m")), (16384, 3072, (128, 192, "none"))],
)  # fmt: skip
def test_tiles_of_mosaic_products(rows, width, tile):
    """Those that were the fastest on an H200, on a Hopper card without a table."""
    config = tuning_dense.dense_mosaic(rows, 768, width, None, 2, "NVIDIA H100 80GB HBM3")
    assert (config.tile_m, config.tile_n, config.split) == tile


@pytest.mark.parametrize("rows", [1, 64, 300, 4096, 16384])
@pytest.mark.parametrize("width", [80, 768, 3072])
def test_the_mosaic_gradient_fits_into_shared_memory(rows, width):
    default = tuning_dense.dense_mosaic_gradient(rows, 768, width, 2, UNKNOWN)
    sizes = {"rows": rows, "depth": 768, "width": width, "itemsize": 2}
    for config in (default, *tuning_search.candidates("dense_mosaic_gradient", default, **sizes)):
        assert config.tile_m % 64 == config.tile_n % 64 == 0 and config.tile_m * config.tile_n <= 192 * 128
        # A ring of blocks of dy and kernel, four pieces of results and of slopes in 8 bits, eighths, and two rows of
        # sums: 227 KiB is all there is.
        pieces = 4 * 64 * 64 * (2 + 1) + 8 * 64 * 2 + 2 * config.tile_n * 4
        assert config.stages * sum(config.block) * 64 * 2 + pieces < 227 * 1024 - 512


def test_kernels_that_read_other_things_start_from_the_entries_of_layer_norm(tuned):
    tuned({"card": {op: {"rows=128,width=1024,itemsize=4": {"num_warps": 32}} for op in OPS if "layer_norm" in op}})
    for variant in ("embeddings", "sums"):
        for op in (tuning_rows.layer_norm, tuning_rows.layer_norm_backward):
            assert op(100, 768, 4, "card", variant).num_warps == 32


def test_an_entry_for_what_a_kernel_reads_goes_before_that_of_layer_norm(tuned):
    plain = "rows=128,width=1024,itemsize=4"
    tuned({"card": {"layer_norm": {plain: {"num_warps": 32}, f"{plain},sums": {"num_warps": 16}}}})
    found = [tuning_rows.layer_norm(100, 768, 4, "card", variant).num_warps for variant in ("", "embeddings", "sums")]
    assert found == [32, 32, 16]


@pytest.mark.parametrize(
    ("rows", "tile", "parts"),
    [(1, (16, 32, 128, 4, 5), (16, 32, 128, 2, 4, 4)), (16, (16, 32, 128, 4, 5), (16, 32, 128, 2, 4, 4)),
     (17, (32, 32, 128, 4, 5), (32, 32, 128, 4, 4, 4)), (64, (64, 32, 128, 4, 5), (64, 32, 128, 4, 4, 4)),
     (65, (64, 64, 128, 4, 3), (64, 64, 64, 4, 5, 4))],
)  # fmt: skip
def test_few_rows_have_narrow_tiles(rows, tile, parts):
    """A query that is searched for has a dozen tokens: what counts is how many programs read the weights."""
    assert tuning_dense.dense(rows, 768, 3072, 2, UNKNOWN) == tuning_dense.DenseConfig(*tile)
    assert tuning_dense.dense_split(rows, 3072, 768, 2, UNKNOWN) == tuning_dense.SplitConfig(*parts)
    for kind in (UNKNOWN, "NVIDIA H200"):
        assert tuning_rows.layer_norm(rows, 768, 4, kind, "sums") == tuning_table.RowConfig(1, 1024, 8)


@pytest.mark.parametrize("kind", [UNKNOWN, "NVIDIA H200"])
def test_few_rows_of_an_activation_have_one_program_for_their_sums(kind):
    """Of few columns each, so that enough programs run and what a thread holds fits into its registers."""
    for rows, width, itemsize in itertools.product((1, 16, 17, 100, 128), (1, 80, 768, 3072, 4096), (2, 4)):
        config = tuning_rows.bias_activation_backward(rows, width, itemsize, kind)
        assert config.programs == 1 and rows <= config.block_rows < 2 * rows
        assert config.block_rows * config.block_width <= 16 * 32 * config.num_warps
        assert rows < 16 or config.block_width <= 64
    assert tuning_rows.bias_activation_backward(129, 3072, 2, kind).programs > 1
    tried = [c for c in tuning_candidates.bias_activation_backward(100, 3072, 2) if c.programs == 1]
    assert {(c.block_rows, c.block_width) for c in tried} == {(128, 32), (128, 64)}


def test_a_device_without_a_table_gets_the_heuristic():
    assert tuning_table.lookup(
        "layer_norm", tuning_table.RowConfig(1, 2, 4), UNKNOWN, rows=1
    ) == tuning_table.RowConfig(1, 2, 4)


def test_committed_tables_are_well_formed():
    for file in (Path(tuning.__file__).parent / "tuned").glob("*.json"):
        table = tuning_table._table(file.stem.replace("_", " "))
        assert table == json.loads(file.read_text())
        for op, entries in table.items():
            config, names = OPS[op]
            fields = {field.name for field in dataclasses.fields(config)}
            for key, entry in entries.items():
                sizes = key.removesuffix(",sums") if op == "layer_norm" else key
                parts = {name: int(size) for name, size in (part.split("=") for part in sizes.split(","))}
                assert tuning_table.key(**parts) == sizes and tuple(parts) == names, (file.name, op, sizes)
                assert set(entry) <= fields, (file.name, op, sizes)
                if config in (tuning_dense.MosaicDenseConfig, tuning_dense.DenseChoice):
                    continue
                blocks = (value for name, value in entry.items() if name not in ("num_stages", "programs", "splits"))
                assert all(value & (value - 1) == 0 for value in blocks), (file.name, op)


def test_candidates():
    for op, (config, names) in OPS.items():
        for scale in (1, 7, 200):
            sizes = {name: {"itemsize": 4, "activation": 1, "aligned": 4}.get(name, 20 * scale) for name in names}
            present = config(*[64] * sum(f.default is dataclasses.MISSING for f in dataclasses.fields(config)))
            found = tuning_search.candidates(op, present, **sizes)
            assert found and all(type(c) is config for c in found), (op, sizes)
            assert present not in found and len(set(found)) == len(found)
    # What costs the host more than the device gains is not tried: few rows, more of a narrow model, and of a wide one.
    for rows, width, tried in ((256, 1024, False), (512, 768, False), (512, 1024, True), (1024, 384, False),
                               (1024, 768, True), (2048, 384, True), (257, 4096, True)):  # fmt: skip
        sizes = {"rows": rows, "depth": width, "width": 4096, "activation": 2, "itemsize": 2}
        found = tuning_search.candidates("dense_implementation", tuning_dense.DenseChoice("triton"), **sizes)
        assert (tuning_dense.DenseChoice("mosaic_gpu") in found) == tried
    around = tuning_search.candidates("an op without a list", tuning_table.RowConfig(2, 64, 4), rows=1)
    assert tuning_table.RowConfig(4, 64, 2) in around and tuning_table.RowConfig(2, 64, 4) not in around


def test_every_heuristic_candidate_and_tuned_entry_is_sound():
    """What `autotune` can store is what can be restored."""
    configs = {*heuristics(), *heuristics("NVIDIA H200")}
    for op, (config, names) in OPS.items():
        configs |= {config(**entry) for entry in tuning_table._table("NVIDIA H200").get(op, {}).values()}
        for scale in (1, 7, 200):
            sizes = {name: {"itemsize": 2, "activation": 1, "aligned": 8}.get(name, 20 * scale) for name in names}
            configs |= {*tuning_search.candidates(op, next(iter(configs)), **sizes)}
    assert {type(c) for c in configs} == {config for config, _ in OPS.values()}
    for config in configs:
        assert tuning_cache._unsound(dataclasses.asdict(config), config) is None, config


def test_arguments_of_autotune():
    with pytest.raises(TypeError, match="autotune: fn must be a function, got int"):
        tuning_search.autotune(3)
    with pytest.raises(TypeError, match="autotune: show_progress_bar must be None, True or False, got 'yes'"):
        tuning_search.autotune(abs, 3, show_progress_bar="yes")
