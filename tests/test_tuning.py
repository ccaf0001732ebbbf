"""Launch configurations come from the tuned table where it has an entry, else from the heuristic."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxft
from cases import card, lower
from jaxft import dispatch
from jaxft.tuning import attention as tuning_attention
from jaxft.tuning import cache as tuning_cache
from jaxft.tuning import dense as tuning_dense
from jaxft.tuning import layouts as tuning_layouts
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import search as tuning_search
from jaxft.tuning import table as tuning_table

UNKNOWN = card("a device that nobody tuned for", (8, 6))
H100, H200 = card("NVIDIA H100 80GB HBM3"), card("NVIDIA H200")
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
    "gated_activation": (tuning_table.ElementwiseConfig, ("rows", "width", "itemsize")),
    "gated_activation_backward": (tuning_table.GradientConfig, ("rows", "width", "itemsize")),
    "qkv_bias_split_heads": (tuning_table.ElementwiseConfig, ("batch_heads", "length", "head_size", "itemsize")),
    "qkv_bias_split_heads_backward": (
        tuning_table.GradientConfig, ("batch", "length", "heads", "head_size", "itemsize"),
    ),
    "rotary": (tuning_table.ElementwiseConfig, ("rows", "heads", "head_size", "itemsize")),
    **dict.fromkeys(
        ("attention", "attention_dq", "attention_dkv"),
        (tuning_table.AttentionConfig, ("batch_heads", "query", "key", "head_size", "itemsize")),
    ),
    "dense_implementation": (tuning_dense.DenseChoice, ("rows", "depth", "width", "activation", "itemsize")),
    "dense": (tuning_dense.DenseConfig, ("rows", "depth", "width", "itemsize")),
    "dense_split": (tuning_dense.SplitConfig, ("rows", "depth", "width", "itemsize")),
    "dense_mosaic": (tuning_dense.MosaicDenseConfig, ("rows", "depth", "width", "activation", "itemsize")),
    "float8_dense_mosaic": (
        tuning_dense.MosaicDenseConfig, ("rows", "depth", "width", "activation", "result_itemsize", "itemsize"),
    ),
    "dense_mosaic_gradient": (tuning_dense.MosaicDenseConfig, ("rows", "depth", "width", "itemsize")),
}  # fmt: skip
SIZES = (0, 1, 2, 3, 31, 64, 100, 127, 384, 769, 4096, 5000, 65537)


def heuristics(device=UNKNOWN):
    for itemsize in ITEM_SIZES:
        for rows in SIZES:
            for size in SIZES[1:]:
                yield tuning_rows.layer_norm(rows, size, itemsize, device)
                yield tuning_rows.layer_norm_backward(rows, size, itemsize, device)
                yield tuning_rows.layer_norm_backward(rows, size, itemsize, device, wide_dropout=True)
                yield tuning_rows.embeddings_sums(rows, size)
                yield tuning_rows.softmax(rows, size, itemsize, device)
                yield tuning_rows.softmax_backward(rows, size, itemsize, device)
                yield tuning_rows.bias_activation(rows, size, itemsize, device)
                yield tuning_rows.gated_activation(rows, size, itemsize, device)
                yield tuning_rows.gated_activation_backward(rows, size, itemsize, device)
                for aligned in (1, 16 // itemsize):
                    yield tuning_layouts.permute(rows * size, size, aligned, itemsize, device)
                yield tuning_rows.bias_activation_backward(rows, size, itemsize, device)
                yield tuning_layouts.qkv_bias_split_heads(48, rows, size, itemsize, device)
                yield tuning_layouts.qkv_bias_split_heads_backward(4, rows, 12, size, itemsize, device)
                yield tuning_layouts.rotary(rows, size, 64, itemsize, device)
                yield tuning_layouts.rotary(rows, 24, 2 * min(size, 1024), itemsize, device)
                yield tuning_dense.dense(rows, size, 768, itemsize, device)
                yield tuning_dense.dense(rows, 768, size, itemsize, device)
                yield tuning_dense.dense_split(rows, size, 768, itemsize, device)
        for length in SIZES[:-1]:
            for head_size in (8, 32, 33, 64, 80, 128, 256):
                for attention in (
                    tuning_attention.attention,
                    tuning_attention.attention_dq,
                    tuning_attention.attention_dkv,
                ):
                    sizes = length, length, head_size, itemsize, device
                    yield attention(tuning_attention.Call(16, *sizes))
                    yield attention(tuning_attention.Call(4096, *sizes, average=max(1, length // 4)))
                    yield attention(tuning_attention.Call(4096, *sizes, window=129))
                    yield attention(tuning_attention.Call(4096, *sizes, relative=True))


@pytest.fixture
def tuned(monkeypatch):
    """Replaces the tables by {device kind: table}."""

    def use(tables):
        monkeypatch.setattr(tuning_table, "_table", lambda device_kind: tables.get(device_kind, {}))

    return use


def test_narrow_windows_have_blocks_of_their_own():
    """The shipped entries, for calls without a window, say nothing about them."""

    def blocks(length, window, card, **more):
        call = tuning_attention.Call(384, length, length, 64, 2, card, window=window, **more)
        return dataclasses.astuple(tuning_attention.attention(call))[:4]

    for hopper in (H100, H200):
        assert blocks(512, 129, hopper) == blocks(8192, 129, hopper) == (64, 64, 4, 2)
        assert blocks(128, 129, hopper) == (128, 128, 8, 2)
        assert blocks(128, 129, hopper, average=100) == (64, 64, 4, 2)
        assert blocks(8192, 4097, hopper) == blocks(8192, None, hopper) != (64, 64, 4, 2)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_relative_biases_have_own_launch_configurations(length):
    """The shipped entries are for calls without a table."""
    for hopper in (H100, H200):
        call = tuning_attention.Call(384, length, length, 64, 2, hopper, more=True, relative=True)
        found = [
            dataclasses.astuple(kernel(call))[:4]
            for kernel in (tuning_attention.attention, tuning_attention.attention_dq, tuning_attention.attention_dkv)
        ]
        assert found == [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)]
    short = tuning_attention.Call(2, 128, 128, 64, 2, H200, more=True, relative=True)
    assert tuning_attention.attention(short).block_q == 16


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**31 - 1, 2**31)])
def test_next_power_of_2(n, power):
    assert tuning_table.next_power_of_2(n) == power


def test_keys_round_sizes_up_to_powers_of_two():
    assert tuning_table.key(rows=4000, width=1000, itemsize=2) == "rows=4096,width=1024,itemsize=2"
    assert tuning_table.key(rows=4097, width=1, itemsize=4) == "rows=8192,width=1,itemsize=4"


def test_keys_keep_exact_depth_and_width():
    assert tuning_table.key(rows=4000, depth=768, width=2304, itemsize=2) == "rows=4096,depth=768,width=2304,itemsize=2"


def test_heuristics_are_launchable():
    """Blocks and warps are powers of two, as Triton requires, and no block is absurdly large."""
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


def test_many_heads_have_a_program_each():
    for heads in (1, 12, 1024, 5000):
        config = tuning_layouts.qkv_bias_split_heads_backward(2, 128, heads, 8, 2, UNKNOWN)
        assert config.programs == max(1, 1024 // tuning_table.next_power_of_2(heads))


def test_attention_blocks_do_not_outgrow_the_sequence():
    for rows, keys in ((17, 5), (5, 40), (1, 1)):
        for batch_heads in (1, 4096):
            config = tuning_attention.attention(tuning_attention.Call(batch_heads, rows, keys, 64, 2, UNKNOWN))
            assert config.block_q <= max(16, tuning_table.next_power_of_2(rows)), config
            assert config.block_k <= max(16, tuning_table.next_power_of_2(keys)), config


def shared_memory(op, config, queries_length, keys_length, head_size, itemsize):
    """Bytes that Triton allocates at most for attention: tiles that stay, those on the way, and logits with a bias.

    Not below what Triton 3.9 gives for compute capability 8.6 (some 1,200 kernels, 2026-11-22), but in blocks of 32 or
    fewer, which are far from the limit, and for float32 products without TF32, which take up to half as much again.
    """
    row = tuning_table.next_power_of_2(head_size) * itemsize
    queries, keys = 2 * config.block_q * row, 2 * config.block_k * row  # the factor 2 is for gradients, or values
    stays, moves = {
        "attention": (queries // 2, keys), "attention_dq": (queries, keys), "attention_dkv": (keys, queries)
    }[op]  # fmt: skip
    if op == "attention_dq" and (itemsize == 4 or keys_length <= 128):  # the kernel visits the keys twice
        stays += queries if config.num_stages == 1 else queries // 2
    if config.num_stages == 1:  # unchanged tiles stay in registers; q is stored again, transposed
        return stays + moves + (moves // 2 if op == "attention_dkv" else 0)
    logits = config.block_q * config.block_k
    if op == "attention_dkv" and keys_length <= config.block_k and queries_length > config.block_q:
        # It is the only kernel: keys are stored, too, but neither unused transposed probabilities nor a bias per pair.
        stays += keys // 2 + 2 * itemsize * logits
        return stays + (config.num_stages - 1) * moves + moves // 2 + 2048
    return stays + (config.num_stages - 1) * (moves + 4 * logits) + itemsize * logits + 2048


@pytest.mark.parametrize(
    "device",
    [UNKNOWN, card("NVIDIA L40S", (8, 9), 142), card("NVIDIA GeForce RTX 3060", (8, 6), 28)],
    ids=lambda d: d.kind,
)
def test_heuristics_fit_into_99_kib(device):
    """Ada cards, and Ampere cards other than the A100, have 99 KiB of shared memory per thread block."""
    lengths = ((16, 16), (64, 16), (200, 64), (100, 100), (5000, 5000))
    for op, head_size, itemsize, (queries, keys), batch_heads, average in itertools.product(
        ("attention", "attention_dq", "attention_dkv"), (8, 33, 64, 80, 128, 192, 256), (2, 4), lengths, (1, 4096),
        (None, 16, 64),
    ):  # fmt: skip
        call = tuning_attention.Call(batch_heads, queries, keys, head_size, itemsize, device, average=average)
        config = getattr(tuning_attention, op)(call)
        taken = shared_memory(op, config, queries, keys, head_size, itemsize)
        if itemsize == 4 and config.num_stages > 1:
            taken *= 1.5
        assert taken <= 99 * 1024, (op, head_size, itemsize, config)
    sizes = itertools.product((1, 60, 128, 200, 300, 2000), (33, 5000), (100, 768, 5000), (1, 2, 4))
    for (rows, depth, width, itemsize), op in itertools.product(sizes, (tuning_dense.dense, tuning_dense.dense_split)):
        config = op(rows, depth, width, itemsize, device)
        tiles = (config.block_m + config.block_n) * config.block_k * itemsize
        assert (config.num_stages - 1) * tiles <= 99 * 1024, config  # fewer than num_stages tiles are in flight


@pytest.mark.parametrize(
    ("device", "rows", "width", "stages"),
    [(H100, 128, 2304, 5), (H100, 128, 4224, 5), (H100, 128, 4288, 3), (H100, 256, 3072, 3),
     (card("NVIDIA H20", (9, 0), 78), 128, 3072, 3), (card("NVIDIA A100-SXM4-80GB", (8, 0), 108), 128, 2304, 3),
     (UNKNOWN, 128, 2304, 3)],
    ids=lambda value: getattr(value, "kind", None),
)  # fmt: skip
def test_dense_takes_more_stages_where_they_fit(device, rows, width, stages):
    """A card takes more stages where it has the shared memory and each tile has a multiprocessor to itself."""
    assert tuning_dense.dense(rows, 768, width, 2, device).num_stages == stages


@pytest.mark.parametrize(
    ("rows", "itemsize", "expected"),
    [(256, 2, (64, 64, 128, 4, 3)), (1024, 2, (64, 64, 64, 4, 4)), (1025, 2, (128, 128, 64, 8, 3)),
     (1025, 4, (64, 64, 32, 4, 4))],
)  # fmt: skip
def test_triton_dense_picks_its_tile(rows, itemsize, expected):
    """Tiles are large in 16 bits only: in full float32 they would spill registers."""
    assert tuning_dense.dense(rows, 768, 3072, itemsize, UNKNOWN) == tuning_dense.DenseConfig(*expected)


@pytest.mark.parametrize(
    ("capability", "large"),
    [((8, 0), True), ((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)  # fmt: skip
def test_large_heads_use_all_shared_memory(capability, large):
    device = card("a card", capability)
    calls = [tuning_attention.Call(64, 512, 512, 256, itemsize, device) for itemsize in (2, 4)]
    blocks = [tuning_attention.attention_dkv(call) for call in calls]
    expected = [(32, 64, 8, 1), (16, 32, 4, 1)] if large else [(32, 32, 4, 1), (16, 16, 4, 1)]
    assert blocks == [tuning_table.AttentionConfig(*block) for block in expected]


@pytest.mark.parametrize(
    "device", [UNKNOWN, H200, card("NVIDIA A100-SXM4-80GB", (8, 0), 108), card("NVIDIA L4", (8, 9), 58)],
    ids=lambda device: device.kind,
)  # fmt: skip
def test_gradients_of_attention_fit_into_registers(device):
    """A thread's sums take at most half of its 255 registers."""
    for length, size, itemsize, average in itertools.product(
        (16, 32, 64, 128, 512), (16, 64, 128, 256), (2, 4), (None, 16, 64)
    ):
        call = tuning_attention.Call(4096, length, length, size, itemsize, device, average=average)
        dkv, dq = tuning_attention.attention_dkv(call), tuning_attention.attention_dq(call)
        assert 2 * dkv.block_k * size <= 128 * 32 * dkv.num_warps, (length, size, itemsize, average, dkv)
        assert dq.block_q * size <= 128 * 32 * dq.num_warps, (length, size, itemsize, average, dq)


@pytest.mark.parametrize(
    ("longest", "average", "expected"),
    [
        (128, None, [(64, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 1)]),
        (128, 16, [(64, 32, 4, 2), (32, 32, 1, 2), (32, 32, 2, 2)]),
        (128, 32, [(64, 32, 4, 2), (32, 32, 1, 2), (32, 32, 2, 2)]),
        (128, 33, [(64, 64, 4, 3), (64, 64, 4, 3), (32, 128, 4, 1)]),
        (64, 16, [(64, 32, 4, 2), (32, 32, 1, 2), (64, 64, 4, 3)]),
        (32, 8, [(32, 32, 2, 2), (32, 32, 1, 2), (32, 32, 2, 3)]),
        (512, 300, [(64, 64, 4, 3)] * 3),
    ],
)
def test_blocks_follow_the_average_packed_length(longest, average, expected):
    """A block that holds the longest sequence would be idle for most sequences."""
    call = tuning_attention.Call(12 * 1024, longest, longest, 64, 2, H100, average=average)  # a card without a table
    found = [
        f(call) for f in (tuning_attention.attention, tuning_attention.attention_dq, tuning_attention.attention_dkv)
    ]
    assert found == [tuning_table.AttentionConfig(*block) for block in expected]


def test_packed_sequences_have_their_own_entries():
    qkv, cu_seqlens = jnp.zeros((600, 3, 2, 16), jnp.bfloat16), jnp.arange(0, 601, 20, dtype=jnp.int32)
    with tuning_table.trial(trial := tuning_table.Trial({})):
        jaxft.varlen_qkv_attention(qkv, cu_seqlens, max_seqlen=50, implementation="triton")
    sizes = "batch_heads=64,query=64,key=64,head_size=16,average=32,itemsize=2"
    assert trial.asked.keys() == {(op, sizes) for op in ("attention", "attention_dq", "attention_dkv")}


ROWS, VECTOR = jnp.zeros((3, 100, 80), jnp.bfloat16), jnp.zeros(80, jnp.bfloat16)
TABLE, IDS = jnp.zeros((100, 80), jnp.bfloat16), jnp.zeros((3, 100), jnp.int32)


@pytest.mark.parametrize(
    ("op", "call", "width"),
    [
        ("softmax", lambda **how: jaxft.softmax(ROWS, **how), 128),
        ("softmax", lambda **how: jaxft.log_softmax(ROWS, **how), 128),
        ("layer_norm", lambda **how: jaxft.layer_norm(ROWS, VECTOR, VECTOR, **how), 128),
        ("layer_norm", lambda **how: jaxft.rms_norm(ROWS, VECTOR, **how), 128),
        ("layer_norm", lambda **how: jaxft.embeddings_layer_norm(IDS, TABLE, TABLE, None, VECTOR, VECTOR, **how), 128),
        ("bias_activation", lambda **how: jaxft.bias_activation(ROWS, VECTOR, **how), 128),
        ("gated_activation", lambda **how: jaxft.gated_activation(
            ROWS, VECTOR, activation="gelu", gate="first", **how), 64),
    ],
)  # fmt: skip
def test_ops_on_rows_ask_for_sizes_of_results(op, call, width):
    with tuning_table.trial(trial := tuning_table.Trial({})):
        jax.eval_shape(functools.partial(call, implementation="triton"))
    assert {name for name, _ in trial.asked} == {op, f"{op}_backward"}
    assert all(sizes.startswith(f"rows=512,width={width},itemsize=") for _, sizes in trial.asked)


def test_dropout_with_wide_vectors_has_its_own_entry(key):
    """The LayerNorm gradient needs more registers in this case."""
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


def test_tuned_entry_beats_the_heuristic(tuned):
    tuned({"NVIDIA H200": {"layer_norm": {"rows=4096,width=1024,itemsize=2": {"block_rows": 2, "num_warps": 8}}}})
    heuristic = tuning_rows.layer_norm(4000, 1000, 2, UNKNOWN)
    expected = dataclasses.replace(heuristic, block_rows=2, num_warps=8)
    assert expected != heuristic
    assert tuning_rows.layer_norm(4000, 1000, 2, H200) == expected  # rounded up to the entry
    for op, rows, itemsize in (
        (tuning_rows.layer_norm, 4097, 2),
        (tuning_rows.layer_norm, 4000, 4),
        (tuning_rows.bias_activation, 4000, 2),
    ):
        assert op(rows, 1000, itemsize, H200) == op(rows, 1000, itemsize, UNKNOWN)


@pytest.mark.parametrize("op", [op for op in OPS if "mosaic" not in op and op != "dense_implementation"])
def test_every_op_finds_its_tuned_entry(op, tuned):
    sizes = {name: 100 + place for place, name in enumerate(OPS[op][1])}
    tuned({"card": {op: {tuning_table.key(**sizes): {"num_warps": 32}}}})
    module = next(m for m in (tuning_rows, tuning_layouts, tuning_attention, tuning_dense) if hasattr(m, op))
    arguments = *sizes.values(), card("card", (8, 6))
    arguments = (tuning_attention.Call(*arguments),) if module is tuning_attention else arguments
    assert getattr(module, op)(*arguments).num_warps == 32


def test_mosaic_dense_finds_its_tuned_entries(tuned):
    hopper = card("card")
    tuned({"card": {"dense_mosaic": {"rows=1024,depth=200,width=300,activation=2,itemsize=2": {"group": 4}}}})
    with_gelu, without = (tuning_dense.dense_mosaic(1000, 200, 300, name, 2, hopper) for name in ("gelu", None))
    assert with_gelu == dataclasses.replace(without, group=4) != without
    default = tuning_dense.dense_mosaic_gradient(1000, 200, 300, 2, hopper)
    tuned({"card": {"dense_mosaic_gradient": {"rows=1024,depth=200,width=300,itemsize=2": {"stages": 2}}}})
    found = tuning_dense.dense_mosaic_gradient(1000, 200, 300, 2, hopper)
    assert found == dataclasses.replace(default, stages=2) != default


@pytest.mark.parametrize("sizes", [(768, 2304), (1024, 3072), (1024, 4096)])
def test_dense_entries_are_exact_per_model(sizes, tuned):
    """BERT-base and BERT-large share no entries, nor do two layers of one model."""
    key = "rows=512,depth=768,width=3072,itemsize=2"
    tuned({"card": {"dense": {key: {"num_warps": 16}}, "dense_split": {key: {"splits": 7}}}})
    assert tuning_dense.dense(500, 768, 3072, 2, card("card", (8, 6))).num_warps == 16
    assert tuning_dense.dense_split(500, 768, 3072, 2, card("card", (8, 6))).splits == 7
    for op in (tuning_dense.dense, tuning_dense.dense_split):
        assert op(500, *sizes, 2, card("card", (8, 6))) == op(500, *sizes, 2, UNKNOWN)


def test_h200_table_covers_both_bert_sizes():
    """BERT-large has entries for the few rows for which the Triton matmul is chosen."""
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


def test_table_chooses_the_dense_implementation(tuned):
    entry = {"rows=4096,depth=768,width=3072,activation=2,itemsize=2": {"implementation": "triton"}}
    tuned({"NVIDIA H200": {"dense_implementation": entry}})
    sizes = 4096, 768, 3072
    chosen = [tuning_dense.dense_implementation(*sizes, name, 2, H200) for name in ("gelu", None)]
    assert chosen == ["triton", "mosaic_gpu"]
    for implementation, kernels in (("triton", 1), ("xla", 1), ("mosaic_gpu", 0)):
        entry |= dict.fromkeys(entry, {"implementation": implementation})
        floats = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 768), (768, 3072), (3072,)))
        text = lower(functools.partial(jaxft.dense, activation="gelu"), *floats)
        assert text.count("xla.gpu.triton") == kernels
        assert ("stablehlo.dot_general" in text) == (implementation == "xla")
        assert ("mosaic_gpu" in text) == (implementation == "mosaic_gpu")


def test_unaligned_rows_have_their_own_entries(tuned):
    key = "rows=512,depth=768,width=768,activation=1,itemsize=2"
    table = {"dense_implementation": {key: {"implementation": "mosaic_gpu"}}}
    tuned({"NVIDIA H200": table})
    chosen = [tuning_dense.dense_implementation(rows, 768, 768, None, 2, H200) for rows in (264, 512, 509)]
    assert chosen == ["mosaic_gpu", "mosaic_gpu", "triton"]
    table["dense_implementation"][key] = {"implementation": "xla"}
    assert tuning_dense.dense_implementation(509, 768, 768, None, 2, H200) == "xla"
    trial = tuning_table.Trial({})
    with tuning_table.trial(trial):  # autotune keeps what it finds for such rows beside what it finds for others
        for rows in (512, 509):
            tuning_dense.dense_implementation(rows, 768, 768, None, 2, H200)
    assert list(trial.asked) == [("dense_implementation", key), ("dense_implementation", f"{key},unaligned")]


def test_entries_without_residual_do_not_apply():
    """A residual costs XLA another kernel, so the rule decides, with or without a table."""
    for device in (H200, H100):
        with_residual = tuning_dense.dense_implementation(16384, 3072, 768, None, 2, device, residual=True)
        assert with_residual == "mosaic_gpu"
        assert tuning_dense.dense_implementation(16384, 3072, 768, None, 2, device) == "xla"
    sizes = {"rows": 16384, "depth": 3072, "width": 768, "activation": 1, "itemsize": 2, "residual": 1}
    tried = tuning_search.candidates("dense_implementation", tuning_dense.DenseChoice("mosaic_gpu"), H200, **sizes)
    assert {choice.implementation for choice in tried} >= {"triton", "xla"}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_unavailable_mosaic_gpu_is_neither_reported_nor_used(capability, residual):
    """Entries that autotune finds with a residual are separate from entries without one."""
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
def test_mosaic_dense_has_one_program_per_multiprocessor(programs):
    device = card("NVIDIA H100", (9, 0), programs)
    config = tuning_dense.dense_mosaic(4096, 768, 3072, "gelu", 2, device)
    assert config.programs == programs
    sizes = {"rows": 4096, "depth": 1024, "width": 4096, "activation": 2, "itemsize": 2}
    assert {c.programs for c in tuning_search.candidates("dense_mosaic", config, device, **sizes)} == {programs}


@pytest.mark.parametrize(
    ("rows", "width", "tile"),
    [(512, 768, (64, 64, "none")), (1024, 768, (64, 64, "m")), (1024, 1024, (64, 64, "m")),
     (1024, 2304, (64, 192, "m")), (1024, 3072, (64, 192, "m")), (16384, 3072, (128, 192, "none")),
     (132 * 64, 64, (64, 64, "none")), (132 * 64 + 1, 64, (64, 64, "m"))],
)  # fmt: skip
def test_mosaic_dense_picks_the_fastest_tile(rows, width, tile):
    """A Hopper card without a table gets the tiles that were the fastest on an H200."""
    config = tuning_dense.dense_mosaic(rows, 768, width, None, 2, H100)
    assert (config.tile_m, config.tile_n, config.split) == tile


@pytest.mark.parametrize(
    ("sizes", "activation", "tile"),
    [((512, 768, 2304), None, (64, 192, "none")), ((512, 768, 3072), "gelu", (64, 192, "none")),
     ((512, 3072, 768), None, (64, 64, "none")), ((1024, 3072, 768), None, (64, 128, "none")),
     ((1024, 768, 3072), "gelu", (64, 192, "m")), ((2048, 768, 768), None, (64, 192, "none")),
     ((4096, 768, 2304), None, (128, 192, "none")), ((16384, 3072, 768), None, (64, 256, "m"))],
)  # fmt: skip
def test_float8_tiles_give_work_to_most_multiprocessors(sizes, activation, tile):
    assert tuning_dense.float8_implementation(*sizes) == "mosaic_gpu"
    config = tuning_dense.float8_dense_mosaic(*sizes, activation, 2, H200)
    assert (config.tile_m, config.tile_n, config.split) == tile
    candidates = tuning_dense.float8_dense_mosaic_candidates(rows=sizes[0], result_itemsize=2, device=H200)
    assert tile in [(c.tile_m, c.tile_n, c.split) for c in candidates]
    assert config.stages * sum(config.block) * 128 + 9 * 64 * 64 + 2 * config.tile_n * 4 < 227 * 1024 - 512


@pytest.mark.parametrize(
    ("sizes", "implementation"),
    [((256, 768, 3072), "triton"), ((264, 768, 3072), "mosaic_gpu"), ((300, 768, 3072), "triton"),
     ((1024, 384, 1536), "triton"), ((1032, 384, 1536), "mosaic_gpu")],
)  # fmt: skip
def test_short_matmuls_in_float8_run_in_triton(sizes, implementation):
    assert tuning_dense.float8_implementation(*sizes) == implementation


@pytest.mark.parametrize(
    ("rows", "depth", "parts"),
    [(1, 768, (16, 32, 256, 4, 4, 3)), (64, 3072, (64, 32, 256, 4, 4, 4)), (65, 3072, (64, 64, 128, 4, 5, 4)),
     (128, 768, (64, 64, 128, 4, 5, 3)), (129, 3072, (64, 32, 128, 4, 5, 4)), (256, 3072, (64, 32, 128, 4, 5, 4))],
)  # fmt: skip
def test_few_rows_in_float8_split_the_depth(rows, depth, parts):
    config = tuning_dense.dense_split(rows, depth, 768, 1, H200)
    assert config == tuning_dense.SplitConfig(*parts)
    assert config in tuning_dense.dense_split_candidates(rows=rows, itemsize=1)
    assert tuning_dense.dense_split(129, 768, 768, 1, H200).splits == 1
    assert tuning_dense.dense_split(257, depth, 768, 1, H200).splits == 1


@pytest.mark.parametrize("rows", [1, 64, 300, 4096, 16384])
@pytest.mark.parametrize("width", [80, 768, 3072])
def test_mosaic_gradient_fits_into_shared_memory(rows, width):
    default = tuning_dense.dense_mosaic_gradient(rows, 768, width, 2, H100)
    sizes = {"rows": rows, "depth": 768, "width": width, "itemsize": 2}
    for config in (default, *tuning_search.candidates("dense_mosaic_gradient", default, H100, **sizes)):
        assert config.tile_m % 64 == config.tile_n % 64 == 0 and config.tile_m * config.tile_n <= 192 * 128
        # Shared memory holds a ring of blocks of dy and kernel, four pieces of results and of 8-bit derivatives,
        # eighths, and two rows of sums. There are 227 KiB.
        pieces = 4 * 64 * 64 * (2 + 1) + 8 * 64 * 2 + 2 * config.tile_n * 4
        assert config.stages * sum(config.block) * 64 * 2 + pieces < 227 * 1024 - 512


def test_variants_fall_back_to_layer_norm_entries(tuned):
    tuned({"card": {op: {"rows=128,width=1024,itemsize=4": {"num_warps": 32}} for op in OPS if "layer_norm" in op}})
    for variant in ("embeddings", "sums"):
        for op in (tuning_rows.layer_norm, tuning_rows.layer_norm_backward):
            assert op(100, 768, 4, card("card"), variant).num_warps == 32


def test_variant_entry_beats_the_layer_norm_entry(tuned):
    plain = "rows=128,width=1024,itemsize=4"
    tuned({"card": {"layer_norm": {plain: {"num_warps": 32}, f"{plain},sums": {"num_warps": 16}}}})
    found = [
        tuning_rows.layer_norm(100, 768, 4, card("card"), variant).num_warps for variant in ("", "embeddings", "sums")
    ]
    assert found == [32, 32, 16]


@pytest.mark.parametrize(
    ("rows", "tile", "parts"),
    [(1, (16, 32, 128, 4, 5), (16, 32, 128, 2, 4, 4)), (16, (16, 32, 128, 4, 5), (16, 32, 128, 2, 4, 4)),
     (17, (32, 32, 128, 4, 5), (32, 32, 128, 4, 4, 4)), (64, (64, 32, 128, 4, 5), (64, 32, 128, 4, 4, 4)),
     (65, (64, 64, 128, 4, 3), (64, 64, 64, 4, 5, 4))],
)  # fmt: skip
def test_few_rows_have_narrow_tiles(rows, tile, parts):
    """A search query has a dozen tokens, so the speed depends on how many programs read the weights."""
    assert tuning_dense.dense(rows, 768, 3072, 2, UNKNOWN) == tuning_dense.DenseConfig(*tile)
    assert tuning_dense.dense_split(rows, 3072, 768, 2, UNKNOWN) == tuning_dense.SplitConfig(*parts)
    for device in (UNKNOWN, H200):
        assert tuning_rows.layer_norm(rows, 768, 4, device, "sums") == tuning_table.RowConfig(1, 1024, 8)


@pytest.mark.parametrize("device", [UNKNOWN, H200], ids=lambda device: device.kind)
def test_few_rows_sum_in_one_program(device):
    """A program has few columns, so that there are enough programs and registers."""
    for rows, width, itemsize in itertools.product((1, 16, 17, 100, 128), (1, 80, 768, 3072, 4096), (2, 4)):
        config = tuning_rows.bias_activation_backward(rows, width, itemsize, device)
        assert config.programs == 1 and rows <= config.block_rows < 2 * rows
        assert config.block_rows * config.block_width <= 16 * 32 * config.num_warps
        assert rows < 16 or config.block_width <= 64
    assert tuning_rows.bias_activation_backward(129, 3072, 2, device).programs > 1
    tried = [c for c in tuning_rows.bias_activation_backward_candidates(100, 3072, device) if c.programs == 1]
    assert {(c.block_rows, c.block_width) for c in tried} == {(128, 32), (128, 64)}


def test_device_without_a_table_uses_the_heuristic():
    assert tuning_table.lookup(
        "layer_norm", tuning_table.RowConfig(1, 2, 4), UNKNOWN, rows=1
    ) == tuning_table.RowConfig(1, 2, 4)


def test_committed_tables_are_well_formed():
    for file in (Path(jaxft.__file__).parent / "tuned").glob("*.json"):
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
            present = config(**{f.name: 64 for f in dataclasses.fields(config) if f.default is dataclasses.MISSING})
            found = tuning_search.candidates(op, present, H200, **sizes)
            assert found and all(type(c) is config for c in found), (op, sizes)
            assert present not in found and len(set(found)) == len(found)
    # Mosaic GPU is not tried where it costs the host more than the device gains: few rows, or more in narrow models.
    for rows, width, tried in ((256, 1024, False), (512, 768, False), (512, 1024, True), (1024, 384, False),
                               (1024, 768, True), (2048, 384, True), (257, 4096, True)):  # fmt: skip
        sizes = {"rows": rows, "depth": width, "width": 4096, "activation": 2, "itemsize": 2}
        found = tuning_search.candidates("dense_implementation", tuning_dense.DenseChoice("triton"), H200, **sizes)
        assert (tuning_dense.DenseChoice("mosaic_gpu") in found) == tried
    around = tuning_search.candidates("an op without a list", tuning_table.RowConfig(2, 64, 4), H200, rows=1)
    assert tuning_table.RowConfig(4, 64, 2) in around and tuning_table.RowConfig(2, 64, 4) not in around


def test_every_config_can_be_restored():
    """Whatever `autotune` can store can be restored."""
    configs = {*heuristics(), *heuristics(H200)}
    for op, (config, names) in OPS.items():
        configs |= {config(**entry) for entry in tuning_table._table("NVIDIA H200").get(op, {}).values()}
        for scale in (1, 7, 200):
            sizes = {
                name: {"itemsize": 2, "result_itemsize": 2, "activation": 1, "aligned": 8}.get(name, 20 * scale)
                for name in names
            }
            configs |= {*tuning_search.candidates(op, next(iter(configs)), H200, **sizes)}
    assert {type(c) for c in configs} == {config for config, _ in OPS.values()}
    for config in configs:
        assert tuning_cache._unsound(dataclasses.asdict(config), config) is None, config


def test_autotune_checks_its_arguments():
    with pytest.raises(TypeError, match="autotune: fn must be a function, got int"):
        tuning_search.autotune(3)
    with pytest.raises(TypeError, match="autotune: show_progress_bar must be None, True or False, got 'yes'"):
        tuning_search.autotune(abs, 3, show_progress_bar="yes")


def test_every_tuned_op_has_candidates():
    """`search.candidates` finds a list by its name, and would take the neighbours if one side were renamed."""
    modules = tuning_rows, tuning_layouts, tuning_attention, tuning_dense
    listed = {name.removesuffix("_candidates") for m in modules for name in vars(m) if name.endswith("_candidates")}
    assert listed == set(OPS)
