"""Each benchmark runs at tiny shapes, writes its rows, and refuses to time a wrong result; the report is repeatable."""

import argparse
import contextlib
import csv
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bench_attention
import bench_bias_activation
import bench_contrastive
import bench_cross_entropy
import bench_dense
import bench_devices
import bench_embeddings
import bench_encode
import bench_encoder
import bench_feed_forward
import bench_fp8
import bench_fuse
import bench_gated_activation
import bench_layer_norm
import bench_modern_encoders
import bench_peers
import bench_permute
import bench_pretrain
import bench_relative_bias
import bench_rotary
import bench_search
import bench_softmax
import bench_train
import fp8_accuracy
import jaxft
import plain_encoders
import report
import shapes
import startup
import timing
import tiny
import tune
from cases import slow
from jaxft import BertForSequenceClassification, dispatch, reference
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.tuning import rows as tuning_rows
from jaxft.tuning import search as tuning_search
from jaxft.tuning import table as tuning_table

TINY = [shapes.Encoder("BERT-base", 2, 64)]


@pytest.fixture(autouse=True)
def standard_promotion():
    """The peers are as users would write them, and jax.nn itself does not run under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Few sets of inputs, where on a GPU it takes 100,000 such small ones to fill its cache."""
    monkeypatch.setattr(timing, "L2_BYTES", 1e4)


def read(folder):
    (path,) = folder.glob("*.csv")
    assert path.stem == jax.devices()[0].device_kind.replace(" ", "_")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_shapes_need_neither_jax_nor_jaxft():
    code = "import sys; import shapes; assert not {'jax', 'jaxft', 'numpy'} & sys.modules.keys()"
    folder = Path(shapes.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def test_shapes_are_listed_once():
    for name, value in vars(shapes).items():
        if name.isupper() and isinstance(value, list):
            assert value and len(set(value)) == len(value), name


# `make test-all` runs these scripts too. They differ from others in their ops alone, or compile models.
SLOW_SCRIPTS = (bench_attention, bench_bias_activation, bench_contrastive, bench_dense, bench_embeddings,
                bench_encoder, bench_feed_forward, bench_fp8, bench_gated_activation, bench_relative_bias,
                bench_rotary, bench_train)  # fmt: skip


def script(module, settings, peers):
    return pytest.param(module, settings, peers, marks=[pytest.mark.slow] * (module in SLOW_SCRIPTS))


@pytest.mark.parametrize(
    ("script", "settings", "peers"),
    [
        script(
            bench_dense,
            {
                "DENSE": [(5, 24, 16), (5, 8, 32)],
                "BERT_BASE": [(24, 16), (8, 32)],
                "DENSE_NAMED": [("dense with tanh GELU", (5, 8, 32))],
            },
            {"xla", "jaxft, triton"},
        ),
        script(bench_fp8, {"FP8_DENSE": [(64, 128, 512)], "MODELS": {"tiny": shapes.Model(1, 128, 2, 256)},
                     "FP8_FEW": [shapes.Encoder("tiny", 1, 16)],
                     "FP8_ENCODER": [shapes.Encoder("tiny", 2, 16), shapes.Encoder("tiny", 2, 16, valid=20)]},
         {"xla", "jaxft, triton", "jaxft, bfloat16"}),
        script(bench_search, {"SEARCH": [(3, 200, 8), (1, 20, 8)]}, {"xla"}),
        script(bench_cross_entropy, {"CROSS_ENTROPY": [(20, 24, 40)]}, {"xla, float32 logits", "xla, bfloat16 logits"}),
        script(bench_layer_norm, {"LAYER_NORM": [(5, 24)]}, {"xla", "copy (memcpy)"}),
        script(bench_feed_forward, {"FEED_FORWARD": [(5, 16, 24)]}, {"xla"}),
        script(
            bench_embeddings,
            {"EMBEDDINGS": [(2, 5)], "EMBEDDINGS_TABLES": (40, 9, 2), "EMBEDDINGS_WIDTH": 24},
            {"xla", "copy (memcpy)"},
        ),
        script(bench_bias_activation, {"BIAS_ACTIVATION": [(5, 24)]}, {"xla", "copy (memcpy)"}),
        script(bench_gated_activation, {"GATED_ACTIVATION": [(5, 24)], "GATED_DENSE": [(5, 16, 24)]},
         {"xla", "copy (memcpy)", "jaxft, triton"}),
        script(
            bench_permute,
            {
                "PERMUTE": [((2, 5, 3, 8), (0, 2, 1, 3))],
                "PERMUTE_DTYPES": ("float16",),
                "SPLIT_HEADS": [(2, 5, 3, 8)],
            },
            {"xla", "copy (memcpy)"},
        ),
        script(bench_rotary, {"ROTARY": [(2, 5, 3, 8)]},
         {"xla", "copy (memcpy)", "jaxft, two ops", "jaxft, dense alone"}),
        script(
            bench_softmax,
            {
                "SOFTMAX_QUICK": [
                    shapes.Softmax("log_softmax", (5, 24), "float16", (shapes.FORWARD,)),
                    shapes.Softmax("softmax, masked", (2, 3, 4, 8), "float32", (shapes.BOTH,)),
                ]
            },
            {"xla", "copy (memcpy)"},
        ),
        script(
            bench_attention,
            {  # heads of 64, which cuDNN supports when this runs on a GPU
                "ATTENTION": [shapes.Attention(2, 64, 2, 64)],
                "ATTENTION_HALF_VALID": [shapes.Attention(2, 64, 2, 64)],
                "ATTENTION_PACKED": [shapes.PackedAttention(64, 8, 24, 2, 2, 64)],
            },
            {"xla", "xla, padded"},
        ),
        script(
            bench_relative_bias,
            {"RELATIVE_BIAS": [shapes.Attention(2, 64, 2, 64)], "RELATIVE_BIAS_REACH": 7},
            {"xla", "xla, padded"},
        ),
        script(
            bench_encoder,
            {"MODELS": {"BERT-base": shapes.Model(2, 128, 2, 64)}, "ENCODER_QUICK": TINY},
            {"jaxft, scanned", "xla", "xla, separate qkv"},
        ),
        script(
            bench_train,
            {"MODELS": {"BERT-base": shapes.Model(1, 128, 2, 64)}, "TRAINING": TINY},
            {"jaxft, remat", "xla", "xla, separate qkv"},
        ),
        script(
            bench_contrastive,
            {
                "MODELS": {"BERT-base": shapes.Model(1, 128, 2, 64)},
                "CONTRASTIVE": [shapes.Contrastive("BERT-base", 4, 16)],
                "EMBEDDINGS_TABLES": (40, 16, 2),
            },
            {"jaxft, packed", "jaxft, cached", "xla", "xla, separate qkv"},
        ),
        *(
            pytest.param(bench_contrastive, settings, {"xla", "xla, separate qkv"}, marks=pytest.mark.slow)
            for case in ({"adamw": True}, {"dropout": 0.1}, {"valid": 70})
            for settings in [
                {
                    "MODELS": {"BERT-base": shapes.Model(1, 128, 2, 64)},
                    "CONTRASTIVE": [shapes.Contrastive("BERT-base", 4, 16, **case)],
                    "EMBEDDINGS_TABLES": (40, 16, 2),
                }
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_benchmark_writes_rows(script, settings, peers, tmp_path, monkeypatch, capsys):
    for name, value in settings.items():
        monkeypatch.setattr(shapes, name, value)
    monkeypatch.setenv("JAXFT_COMMIT", "abc1234")
    options = ["--kernels", "--only", "erf GELU 2x64 bfloat16"] if script is bench_encoder else []
    if script is bench_train:
        options = ["--only", "erf GELU 2x64 bfloat16, dropout 0.1"]
    script.main(["--quick", "--out", str(tmp_path), *options])
    rows = read(tmp_path)
    assert {row["implementation"] for row in rows} >= {"jaxft", *peers}
    assert {row["commit"] for row in rows} == {"abc1234"}
    if script is bench_dense:
        assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    if script is bench_cross_entropy:
        assert {row["op"] for row in rows} == {"linear_cross_entropy", "linear_cross_entropy, 15 % labelled"}
    for row in rows:
        assert set(row) == set(timing.COLUMNS), row
        empty = {name for name, value in row.items() if not value}
        assert empty <= ({"note", "unit"} if row["metric"] == "temporary_mib" else {"note"}), row
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
    printed = capsys.readouterr().out
    assert "jaxft" in printed and "speedup" in printed


@pytest.mark.slow
def test_question_answering_is_timed_on_packed_texts(tmp_path, monkeypatch, capsys):
    lengths = np.array([9, 30, 3, 32, 31, 2])
    found = [*bench_fp8.packed_batches(lengths, 64, 3)]
    assert [starts.tolist() for starts in found] == [[0, 9, 39, 42], [0, 32, 63, 63], [0, 2, 2, 2]]
    np.save(tmp_path / "lengths.npy", lengths)
    monkeypatch.setattr(shapes, "MODELS", {"BERT-large": shapes.Model(1, 128, 2, 128)})
    monkeypatch.setattr(bench_fp8, "TOKENS", 64)
    monkeypatch.setattr(bench_fp8, "TEXTS", 3)
    options = ["--only", "none", "--lengths", str(tmp_path / "lengths.npy"), "--seconds", "0.02"]
    bench_fp8.main(["--quick", "--out", str(tmp_path), *options])
    rows = read(tmp_path)
    assert {row["implementation"] for row in rows} == {"jaxft", "jaxft, bfloat16"}
    for row in rows:
        assert "samples/s" in row["note"] and "; lengths of lengths.npy; throughput beside MLPerf's" in row["note"]


@pytest.mark.slow
def test_fused_networks_are_checked_and_timed(tmp_path, monkeypatch, capsys):
    sizes = {"batch": 2, "length": 8, "layers": 1, "width": 32, "heads": 2}
    monkeypatch.setattr(bench_fuse, "CASES", [dataclasses.replace(bench_fuse.CASES[i], **sizes) for i in (0, 2)])
    bench_fuse.main(["--quick", "--force", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "feed_forward_residual_layer_norm" in text and "as fast as the original" in text and "planned in" in text


@pytest.mark.slow
def test_corpus_is_timed_in_pairs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FUSION_SIZES", "2,12,32,4,8,64,50")
    wanted = "corpus, forward: softmax", "corpus, forward+backward: a bias and"
    bench_fuse.main(["--quick", "--force", "--only", *wanted, "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "3 functions, 2 with replacements" in text and "queued_us: " in text and "of 2 ratios are above" in text
    (path,) = tmp_path.glob("*.csv")
    rows = timing.read_rows(path)
    assert {row["op"].partition(":")[0] for row in rows} == {"fuse corpus"}
    assert {(row["shape"], row["implementation"]) for row in rows} == {("2x12", "xla"), ("2x12", "fused")}


@pytest.mark.parametrize("script", [bench_contrastive, bench_dense, bench_encoder, bench_train])
def test_no_case_is_an_error(script, tmp_path):
    with pytest.raises(SystemExit, match="no case was measured"):
        script.main(["--quick", "--out", str(tmp_path), "--only", "99x99"])
    assert list(tmp_path.iterdir()) == []


def test_startup_writes_the_medians_of_fresh_processes(tmp_path, monkeypatch, capsys):
    times = {"cold": iter([(1.5, 6.0), (1.2, 5.0), (9.0, 5.5)]), "warm": iter([(0.1, 0.5), (0.2, 0.4), (0.3, 0.3)])}
    empty, cases = set(), []

    def run(command, *, env, **_):
        case = "cold" if (cache := env["JAXFT_COMPILATION_CACHE"]) not in empty else "warm"
        empty.add(cache)
        cases.append(case)
        first, texts = next(times[case])
        found = {"first query": first, "texts": texts, "count": 3000, "dtype": "bfloat16", "device": "NVIDIA H100"}
        return subprocess.CompletedProcess(command, 0, json.dumps(found))

    monkeypatch.setattr(startup.subprocess, "run", run)
    monkeypatch.setenv("JAXFT_COMMIT", "abc")
    monkeypatch.setenv("JAXFT_TEST_CHECKPOINT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["startup.py", "--only", "cold", "warm", "--out", str(tmp_path / "rows")])
    startup.main()
    assert cases == ["cold", "warm"] * 3 and len(capsys.readouterr().out.splitlines()) == 6
    rows = timing.read_rows(tmp_path / "rows" / "NVIDIA_H100.csv")
    found = {(row["implementation"], row["shape"]): (row["p50"], row["rate"]) for row in rows}
    assert found == {
        ("jaxft", "1"): ("200000.00", "0.005"), ("jaxft", "3000"): ("400000.00", "7.5"),
        ("jaxft, empty cache", "1"): ("1500000.00", "0.0006667"),
        ("jaxft, empty cache", "3000"): ("5500000.00", "0.5455"),
    }  # fmt: skip
    assert {(row["op"], row["dtype"], row["metric"]) for row in rows} == {("start-up MiniLM-L6", "bfloat16", "wall_us")}
    title, _, table = report.tables(rows)
    assert title.startswith("## Fresh processes") and "| 7.50x |" in table and "| 13.75x |" in table


# --- Launch configurations -----------------------------------------------------------------------------------------


SOFTMAX = functools.partial(jaxft.softmax, implementation="triton")


def softmax_case(rows, ours=SOFTMAX):
    sizes = {"rows": rows, "width": 24}
    return tune.Case("softmax", sizes, "float32", ours, reference.softmax, ((rows, 24),), tune.FORWARD)


KEY = "rows=8,width=32,itemsize=4"
FAST = tuning_table.RowConfig(2, 32, 2)


@pytest.fixture
def table(monkeypatch):
    """The table that jaxft comes with."""
    found = {}
    monkeypatch.setattr(tuning_table, "_table", lambda kind: found)
    yield found
    jax.clear_caches()


@pytest.fixture
def machine(monkeypatch, table):
    """A device on which FAST is the fastest; what `autotune` is called with."""
    calls, autotune = [], tuning_search.autotune

    def recorded(fn, *args, **options):
        calls.append((args, options, tuning_rows.softmax(*args[-1].shape, 4, dispatch.device())))
        return autotune(fn, *args, **options)

    def sample(program):
        return 50.0 if program.config == FAST else 100.0

    monkeypatch.setattr(tuning_search, "autotune", recorded)
    monkeypatch.setattr(tuning_search, "_device", dispatch.device)
    monkeypatch.setattr(tuning_search, "candidates", lambda op, present, device, **sizes: [FAST])
    monkeypatch.setattr(tuning_search, "_sampler", lambda present, sets: sample)
    return calls


def test_tune_fills_the_table(machine, table, tmp_path, monkeypatch, capsys):
    """A choice is stored beside what the file has, and later cases of the same run have it."""
    kind = jax.devices()[0].device_kind
    path = tmp_path / f"{kind.replace(' ', '_')}.json"
    path.write_text('{"permute": {"size=1": {"num_warps": 1}}}')
    monkeypatch.setattr(tune, "cases", lambda dtypes: [softmax_case(rows) for rows in (5, 100, 6)])
    tune.main(["--out", str(tmp_path), "--only", "softmax", "--sizes", "rows=(5|6),"])
    found = {"block_rows": 2, "block_width": 32, "num_warps": 2}
    assert json.loads(path.read_text()) == {"permute": {"size=1": {"num_warps": 1}}, "softmax": {KEY: found}}
    assert table == {"softmax": {KEY: found}}
    (_, options, first), (_, _, second) = machine
    assert first != FAST and second == FAST
    assert options == {"table": path, "copies": 1 if jax.default_backend() == "cpu" else 42}
    assert "softmax rows=5,width=24,float32 forward: softmax" in capsys.readouterr().out


def test_tune_ignores_what_the_user_has_tuned(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = tuning_table.RowConfig(4, 32, 1)
    with contextlib.ExitStack() as stack:
        stack.callback(tune.cache.load.cache_clear)
        file = tune.cache.path(dispatch.device().kind)
        tune.cache.check_writable(file)
        tune.cache.save(file, "softmax", KEY, mine)
        assert tuning_rows.softmax(5, 24, 4, dispatch.device()) == mine
        monkeypatch.setattr(tune, "cases", lambda dtypes: [softmax_case(5)])
        tune.main(["--out", str(tmp_path)])
        ((_, _, present),) = machine
        assert present != mine
        assert tuning_rows.softmax(5, 24, 4, dispatch.device()) == mine


def test_tune_refuses_wrong_results(machine, tmp_path, monkeypatch):
    case = softmax_case(5, ours=lambda x: 1.1 * jaxft.softmax(x))
    monkeypatch.setattr(tune, "cases", lambda dtypes: [case])
    with pytest.raises(SystemExit, match="softmax rows=5,width=24,float32 forward: error .* nothing is timed"):
        tune.main(["--out", str(tmp_path)])
    assert machine == [] and not list(tmp_path.iterdir())


def test_tune_skips_what_xla_runs(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "cases", lambda dtypes: [softmax_case(5, ours=jax.nn.softmax)])
    tune.main(["--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith("forward: XLA runs it\n")


def test_tune_needs_a_case(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--only", "no_such_op"])
    assert "no case has what --only, --sizes and --dtypes say" in capsys.readouterr().err


@pytest.mark.slow
def test_tune_compares_where_configs_differ(table, tmp_path, monkeypatch):
    def ours(x):
        warps = tuning_rows.softmax(*x.shape, 4, dispatch.device()).num_warps
        return jax.named_call(reference.softmax, name=f"warps_{warps}")(jnp.where(jnp.isnan(x), warps, x))

    @contextlib.contextmanager
    def without_table():
        with monkeypatch.context() as patch:
            patch.setattr(tuning_table, "_table", lambda kind: {})
            yield

    def measure(variants, **options):
        texts = {name: program.as_text() for name, (program, _) in variants.items()}
        assert "warps_16" in texts["jaxft"] and "warps_4" in texts["jaxft, heuristic"]
        return timed(variants, **options)

    timed = timing.measure
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(tune, "without_table", without_table)
    monkeypatch.setattr(tune, "cases", lambda dtypes: [softmax_case(rows, ours) for rows in (100, 5)])
    table["softmax"] = {KEY: {"num_warps": 16}}
    tune.main(["--compare", "--quick", "--out", str(tmp_path)])
    assert {(row["op"], row["implementation"], row["shape"]) for row in read(tmp_path)} == {
        ("configuration of softmax", name, "5x24") for name in ("jaxft", "jaxft, heuristic")
    }
    table.clear()
    with pytest.raises(SystemExit, match="no case in which the table of .* and the heuristics differ"):
        tune.main(["--compare", "--out", str(tmp_path)])


def test_a_device_without_table_keeps_its_facts():
    with dispatch.target("NVIDIA H200", (9, 0), 114, 200_000), tune.without_table():
        assert dispatch.device() == dispatch.Device("cuda", "NVIDIA H200 without a table", (9, 0), 114, 200_000)


@pytest.mark.slow
def test_tuned_cases_are_those_of_plain_jnp():
    """Shapes and dtypes of the results; every operation with a configuration is among the cases."""
    ops, name = set(), None
    for case in tune.cases(shapes.DTYPES):
        ops.add(case.op)
        if name == (name := (case.op, len(case.arguments[0]), case.dtype, case.directions)):
            continue  # another shape of the same kind
        for direction in case.directions:
            inputs = jax.eval_shape(functools.partial(case.inputs, direction, 0))
            got, wanted = (jax.eval_shape(tune.directed(op, direction), *inputs) for op in (case.ours, case.plain))
            assert jax.tree.leaves(got) == jax.tree.leaves(wanted), (case.name(), direction)
    assert ops == {
        "bias_residual_layer_norm", "bias_activation", "gated_activation", "permute", "qkv_bias_split_heads", "rotary",
        "qkv_attention",
        "dense",
        "dense_residual_layer_norm", "softmax", "log_softmax",
    }  # fmt: skip


# --- Rows ----------------------------------------------------------------------------------------------------------


def test_rows_replace_rows_of_the_same_case(tmp_path):
    timing.write_rows([row("jaxft", "1.00"), row("cudnn", "5.00")], tmp_path)
    timing.write_rows([row("jaxft", "2.00"), row("xla", "3.00")], tmp_path)
    found = [(line["implementation"], line["p50"]) for line in read(tmp_path)]
    assert found == [("jaxft", "2.00"), ("cudnn", "5.00"), ("xla", "3.00")]
    timing.write_rows([row("jaxft", "4.00")], tmp_path, "Other Card")
    assert [line["p50"] for line in timing.read_rows(tmp_path / "Other_Card.csv")] == ["4.00"]


def test_the_latest_date_counts():
    rows = [row("jaxft", p50, date=f"2026-01-0{day}") for p50, day in (("1", 1), ("2", 3), ("3", 3), ("4", 2))]
    assert [line["p50"] for line in timing.newest(rows)] == ["3"]


def test_files_without_notes_are_read(tmp_path):
    columns = [name for name in timing.COLUMNS if name != "note"]
    (tmp_path / "a.csv").write_text(f"{','.join(columns)}\n{','.join(columns)}\n")
    assert timing.read_rows(tmp_path / "a.csv") == [dict(zip(columns, columns, strict=True)) | {"note": ""}]


def test_calls_go_on_with_the_next_inputs():
    """Also from one sample to the next, else few of the inputs would be used, and stay in the cache."""
    seen = []
    call = timing.rotating(seen.append, [("a",), ("b",), ("c",)])
    for _ in range(2):
        [call() for _ in range(4)]
    assert "".join(seen) == "abcabcab"


@pytest.mark.parametrize("wrong", [1.1, jnp.nan])
def test_a_wrong_result_is_not_timed(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "LAYER_NORM", [(5, 24)])
    op = bench_layer_norm.bias_residual_layer_norm
    monkeypatch.setattr(
        bench_layer_norm, "bias_residual_layer_norm", lambda *args: (op(*args) * wrong).astype("bfloat16")
    )
    with pytest.raises(SystemExit, match=r"bias_residual_layer_norm forward 5x24 bfloat16: error .* nothing is timed"):
        bench_layer_norm.main(["--quick", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tiny_encode(tmp_path, monkeypatch):
    """Arguments of bench_encode with a tiny model and few texts. In float32 packed and padded batches agree."""
    tiny.write_tokenizer(tmp_path)
    settings = {
        "CONFIGS": {"tiny": tiny.config()}, "LIMIT": 32, "BATCH_SIZE": 2, "DTYPE": "float32", "PROMPT": "the ",
        "OPTIONS_TEXTS": 6, "OPTIONS_TOKENS": (4, 10),
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setattr(bench_encode, name, value)
    monkeypatch.setattr(bench_encode, "docstrings", lambda: ["the river " * n for n in (1, 14, 3, 0, 2)])
    return ["--quick", "--out", str(tmp_path / "results"), "--tokenizer", str(tmp_path / "tokenizer.json")]


def test_bench_encode(tiny_encode, tmp_path, capsys):
    bench_encode.main(tiny_encode)
    every = read(tmp_path / "results")
    *rows, one, padded = (row for row in every if "options" not in row["op"])
    names = ["jaxft", "jaxft, padded", "jaxft, padded, not sorted", "jaxft"]
    assert [row["implementation"] for row in rows] == names
    assert [row["metric"] for row in rows] == ["wall_us"] * 3 + ["device_only_us"]
    tokens = 5 * 2 + 2 * (1 + 14 + 3 + 0 + 2)
    for row in rows:
        assert set(row) == set(timing.COLUMNS) and all(row[name] for name in timing.COLUMNS if name != "note"), row
        assert (row["op"], row["shape"]) == ("encode docstrings tiny", "5")
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) and row["unit"] == "Mtoken/s"
        assert float(row["rate"]) == pytest.approx(tokens / float(row["p50"]), rel=1e-3)
    assert "not sorted" in capsys.readouterr().out
    for row, name in ((one, "jaxft"), (padded, "jaxft, padded")):
        assert (row["op"], row["implementation"], row["metric"]) == ("encode one text tiny", name, "wall_us")
        assert row["unit"] == "ktext/s" and float(row["rate"]) == pytest.approx(1e3 / float(row["p50"]), rel=1e-3)
    options = [row for row in every if row["op"] == "encode options tiny"]
    names = ["prompt", "prompt not pooled", "truncate_dim", "int8", "ubinary", "Dense"]
    assert [row["implementation"] for row in options] == ["jaxft", *(f"jaxft, {name}" for name in names)]
    tokens = 2 * (5 + 9 + 7)  # texts of 1, 3 and 2 times two tokens, twice, with the prompt and the special tokens
    for row in options:
        assert row["shape"] == "6" and float(row["rate"]) == pytest.approx(tokens / float(row["p50"]), rel=1e-3)


@pytest.mark.slow
def test_bench_encode_times_options_alone(tiny_encode, tmp_path, capsys):
    bench_encode.main([*tiny_encode, "--only", "options"])
    assert {row["op"] for row in read(tmp_path / "results")} == {"encode options tiny"}
    assert "tiny, jaxft, Dense: " in capsys.readouterr().out


def devices_options(tiny_encode, tmp_path):
    options = ["--only", "encode", "corpus", "train", "--texts", "7", "--rows-per-part", "3", "--repeats", "1"]
    return [*tiny_encode, *options, "--work", str(tmp_path)]


def test_bench_devices(tiny_encode, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(bench_devices, "TRAIN_SHAPE", (2, 16))
    bench_devices.main(devices_options(tiny_encode, tmp_path))
    rows = {(row["op"], row["implementation"]): row for row in read(tmp_path / "results")}
    step = rows.pop(("train on GPUs tiny", "jaxft, 1 GPU"))
    assert (step["shape"], step["unit"]) == ("2x16", "ktoken/s")
    assert float(step["rate"]) == pytest.approx(1e3 * 2 * 16 / float(step["p50"]), rel=1e-3)
    short = "encode short texts tiny"
    assert {*rows} == {
        ("encode on GPUs tiny", "jaxft, 1 GPU"), (short, "jaxft"), (short, "jaxft, parquet to parquet"),
    }  # fmt: skip
    for row in rows.values():
        assert row["metric"] == "wall_us" and row["shape"] == ("7" if row["op"] == short else "5")
        assert float(row["rate"]) == pytest.approx(1e3 * int(row["shape"]) / float(row["p50"]), rel=1e-3)
    printed = capsys.readouterr().out
    assert "GiB with the model loaded" in printed and "of the rate in memory" in printed


def test_bench_devices_times_no_other_bits(tiny_encode, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_devices.np, "array_equal", lambda *_: False)
    with pytest.raises(SystemExit, match="differ from one device; nothing is timed"):
        bench_devices.main([*tiny_encode, "--only", "encode"])
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("after", "code"), [(9.5, 0), (10.5, 0), (jnp.nan, 0), (9.5, 130)])
def test_bench_pretrain(after, code, tmp_path, monkeypatch):
    def run(options):
        """The example itself is run in test_examples."""
        out = Path(dict(option.removeprefix("--").split("=", 1) for option in options)["out"])
        (out / "held_out.csv").write_text(f"step,value\n0,10.0\n20,9.9\n40,{after}\n")
        speed = {"step_seconds": 0.02, "tokens_per_s": 7e5, "flops_per_s": 4e14, "mfu": 0.4}
        (out / "speed.json").write_text(json.dumps(speed))
        return code

    monkeypatch.setattr(bench_pretrain.pretrain, "main", run)
    options = ["--quick", "--out", str(tmp_path), "--model", "a folder"]
    if code or not after < 10.0:
        with pytest.raises(SystemExit, match="(went from 10.0 to .*|it was interrupted): nothing is written"):
            bench_pretrain.main(options)
        assert not list(tmp_path.iterdir())
        return
    bench_pretrain.main(options)
    found = {row["metric"]: (float(row["p50"]), float(row["rate"]), row["unit"]) for row in read(tmp_path)}
    assert found == {"step_us": (2e4, 400, "TFLOP/s"), "tokens_per_s": (7e5, 0, ""), "mfu_percent": (40, 0, "")}


@pytest.mark.parametrize("wrong", [jnp.nan, *slow(1.1)])
def test_bench_encode_refuses_wrong_embeddings(wrong, tiny_encode, tmp_path, monkeypatch):
    encode = SentenceEncoder.encode

    def one_of_them_wrong(self, *args, **options):
        return encode(self, *args, **options) * (wrong if self.buckets() else 1.0)

    monkeypatch.setattr(SentenceEncoder, "encode", one_of_them_wrong)
    with pytest.raises(SystemExit, match="tiny: packed and padded embeddings differ by .* nothing is timed"):
        bench_encode.main(tiny_encode)
    assert not (tmp_path / "results").exists()


def test_docstrings(tmp_path, monkeypatch):
    (tmp_path / "package" / "test").mkdir(parents=True)
    code = '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\ndef g(): pass\n'
    (tmp_path / "package" / "a.py").write_text(code)
    (tmp_path / "package" / "test" / "b.py").write_text(code)
    monkeypatch.setattr(bench_encode.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert bench_encode.docstrings() == ["Module.", "Class.", "Method."]


def test_encoder_peers_agree_with_each_other(monkeypatch):
    monkeypatch.setattr(shapes, "MODELS", {"BERT-base": shapes.Model(2, 128, 2, 64)})
    params = bench_encoder.random_params("BERT-base", "float32")
    x = jax.random.normal(jax.random.key(1), (1, 8, 128))
    options = {"heads": 2, "activation": "gelu", "epsilon": 1e-12, "attention": "xla"}
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda params: bench_encoder.plain_encoder(params, x, None, **options))
        packed, separate = run(params), run(bench_encoder.separate(params))
    assert jnp.max(jnp.abs(packed - separate)) < 1e-5


def test_kernels_of_a_compiled_program():
    text = """HloModule jit_f

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %copy.9 = f32[8]{0} copy(%p)
}

%command_buffer (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %loop_add_fusion.2 = f32[8]{0} fusion(%p.1), kind=kLoop, calls=%fused
  %custom-call.1 = (f32[8,8]{1,0:T(8)}, s8[4]{0}) custom-call(%p.1), custom_call_target="__cublas$gemm"
  ROOT %copy.1 = f32[8]{0} copy(%loop_add_fusion.2)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %loop_add_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %call = f32[8]{0} call(%loop_add_fusion), to_apply=%command_buffer
}
"""
    assert bench_encoder.kernels(text) == {"fusion loop_add_fusion": 2, "custom-call __cublas$gemm": 1, "copy": 1}


def row(implementation, p50, op="encoder BERT-base erf GELU", metric="queued_us", date="2026-01-02", **more):
    return {
        "op": op, "implementation": implementation, "direction": "forward", "shape": "32x128", "dtype": "bfloat16",
        "metric": metric, "p20": p50, "p50": p50, "p80": p50, "rate": "1", "unit": "TFLOP/s", "jax": "0.0",
        "commit": "abc1234", "date": date, "note": "", **more,
    }  # fmt: skip


# --- Report --------------------------------------------------------------------------------------------------------


def test_the_committed_report_is_current():
    report.main(["--check"])


def test_committed_results_have_each_case_once():
    for path in timing.RESULTS.glob("*.csv"):
        rows = timing.read_rows(path)
        assert rows == timing.newest(rows), path
        assert path.read_text().splitlines()[0] == ",".join(timing.COLUMNS)


@pytest.fixture
def root(tmp_path):
    """A project with results of two devices."""
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nby hand\n{report.END}\nafter\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "startup.md").write_text(f"before\n{report.LATENCY}\nby hand\n{report.END}\nafter\n")
    rows = [
        row("jaxft", "90.00", date="2026-01-01"),
        row("jaxft", "100.00"),
        row("jaxft, scanned", "120.00"),
        row("xla", "150.00"),
        row("xla+cudnn", "140.00"),
        row("jaxft", "10.00", "bias_activation gelu", "device_us"),
        row("copy", "9.00", "bias_activation gelu", "device_us"),
        row("jaxft", "9.00", "encoder BERT-base erf GELU, fp8", "sustained_us", note="690 W, 1485 MHz"),
        row("jaxft", "20.00", "encode docstrings BERT-base", "wall_us"),
        row("jaxft, padded", "50.00", "encode docstrings BERT-base", "wall_us"),
        row("jaxft", "19.00", "encode docstrings BERT-base", "device_only_us"),
        row("jaxft", "22000.00", "pretraining example, base", "step_us"),
        row("jaxft", "712345.60", "pretraining example, base", "tokens_per_s"),
        row("jaxft", "38.90", "pretraining example, base", "mfu_percent"),
    ]
    results = tmp_path / "benchmarks" / "results"
    timing.write_rows(rows, results, "NVIDIA H200")
    timing.write_rows([row("jaxft", "30.00", "bias_activation gelu", "device_us")], results, "NVIDIA A100")
    return tmp_path


def test_report_writes_pages(root):
    docs = root / "docs" / "benchmarks"
    docs.mkdir(parents=True)
    (docs / "NVIDIA_T4.md").write_text("of results that are gone")
    report.write(root)
    assert sorted(path.name for path in docs.iterdir()) == [
        "NVIDIA_A100.md", "NVIDIA_H200.md", "NVIDIA_H200.png", "index.md",
    ]  # fmt: skip
    page = (docs / "NVIDIA_H200.md").read_text()
    assert "| encoder BERT-base erf GELU | 32x128 | bfloat16 | 100.00 | 120.00 | 150.00 | 140.00 | 1.40x |" in page
    assert "| encode docstrings BERT-base | 32x128 | bfloat16 | 20.00 | 50.00 | 2.50x |" in page
    assert "| pretraining example, base | 32x128 | bfloat16 | 22.00 | 712,346 | 1 | 38.90 % |" in page
    assert "| 10.00 | 9.00 | - | 90% |" in page and "Time that a call keeps the GPU busy, microseconds:" in page
    index = (docs / "index.md").read_text()
    assert "\n- encoder BERT-base erf GELU, fp8 32x128, jaxft: 690 W, 1485 MHz.\n" in page
    assert "| [NVIDIA H200](NVIDIA_H200.md) | 13 | 2026-01-02 with JAX 0.0 |" in index
    assert "by hand" in (root / "README.md").read_text()  # without rows of other libraries


def test_report_adds_rows_of_other_files(root, monkeypatch):
    monkeypatch.setattr(report, "ROOT", root)
    timing.write_rows([row("jaxft", "75.00")], root / "elsewhere", "NVIDIA H200")
    report.main(["--add", str(root / "elsewhere" / "NVIDIA_H200.csv")])
    assert "| 75.00 | 120.00 | 150.00 | 140.00 | 1.87x |" in (root / "docs/benchmarks/NVIDIA_H200.md").read_text()


def test_report_finds_what_is_not_current(root):
    report.write(root)
    assert report.stale(root) == []
    before = {path: path.read_bytes() for path in (root / "docs" / "benchmarks").iterdir()}
    report.write(root)
    assert {path: path.read_bytes() for path in (root / "docs" / "benchmarks").iterdir()} == before
    timing.write_rows([row("jaxft", "99.00")], root / "benchmarks" / "results", "NVIDIA H200")
    docs = root / "docs" / "benchmarks"
    assert {*report.stale(root)} == {docs / "NVIDIA_H200.png", docs / "NVIDIA_H200.md"}
    report.write(root)
    (docs / "index.md").unlink()
    (docs / "other.md").write_text("")
    assert report.stale(root) == [docs / "index.md", docs / "other.md"]


def peer_row(implementation, p50, what, shape, **more):
    metric = "queued_us" if "x" in shape else "wall_us"
    return row(implementation, p50, f"peers, {what}", metric, shape=shape, note="jax 0.0, torch 9", **more)


def test_report_fills_the_readme(root):
    rows = [
        peer_row("torch.compile", "552.00", "encoder, BERT-base", "1x128"),
        peer_row("jaxft", "317.00", "encoder, BERT-base", "1x128"),
        peer_row("jaxft", "500000.00", "encode docstrings, BERT-base", "26000", date="2026-01-01"),
        peer_row("jaxft", "588000.00", "encode docstrings, BERT-base", "26166"),
        peer_row("sentence-transformers", "5000000.00", "encode docstrings, BERT-base", "26166"),
        peer_row("jaxft", "19555.00", "training step, BERT-base", "32x512"),
        peer_row("torch.compile", "nan", "training step, BERT-base", "32x512") | {"note": "failed: no memory"},
    ]
    timing.write_rows(rows, root / "benchmarks" / "results", "NVIDIA H200")
    report.write(root)
    assert (
        (root / "README.md").read_text()
        == f"""before
{report.BEGIN}
|  | jaxft | sentence-transformers | torch.compile | speedup |
| --- | ---: | ---: | ---: | ---: |
| encode docstrings, BERT-base | 44,500 texts/s | 5,233 texts/s | - | 8.50x |
| encoder, BERT-base, 1x128 | 0.317 ms | - | 0.552 ms | 1.74x |
| training step, BERT-base, 32x512 | 19.6 ms | - | failed | - |

NVIDIA H200. Medians, bfloat16, 2026-01-02: jax 0.0, torch 9.
training step, BERT-base, 32x512, torch.compile: failed: no memory.
{report.END}
after
"""
    )
    assert (root / "docs" / "benchmarks" / "peers.png").read_bytes().startswith(b"\x89PNG")
    page = (root / "docs" / "benchmarks" / "NVIDIA_H200.md").read_text()
    assert "## Other libraries\n\n|  | jaxft | sentence-transformers |" in page
    assert report.stale(root) == []
    (root / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match="expected a line"):
        report.stale(root)


# --- Other libraries -----------------------------------------------------------------------------------------------

FAKES = """
import os, time
import numpy as np

class Right:
    packages = ("numpy",)
    sign = 1.0
    def device(self):
        return "Fake Card"
    def batch_sizes(self, model):
        return 8, 16
    def encoder(self, folder):
        def encode(texts, size):
            time.sleep(0.001 if size == 16 else 0.01)
            texts = [texts] if isinstance(texts, str) else texts
            return np.array([[self.sign * len(t), 1.0, t.count("a")] for t in texts])
        return encode
    def ranker(self, folder):
        encode = self.encoder(folder)
        return lambda query, documents, size: encode(documents, size)[:, 0]
    def layers(self, folder, x, weights):
        import peers
        return {"numpy": peers.Layers(lambda: self.sign * x[:2, :2], lambda out: None, lambda out: out)}

class Other(Right):
    pass

class Wrong(Right):
    sign = -1.0

class Broken(Right):
    def encoder(self, folder):
        raise ValueError("no such model")

class Dies(Right):
    def encoder(self, folder):
        os._exit(7)

class Slow(Right):
    def encoder(self, folder):
        time.sleep(60)

class Absent(Right):
    packages = ("numpy", "no-such-package")
"""


@pytest.fixture
def compare_fakes(tmp_path, monkeypatch, capsys):
    """Runs bench_peers with libraries of `FAKES`; returns the rows, and what was printed."""
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes" / "fakes.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"), prepend=os.pathsep)
    run = bench_peers.run

    def run_or_prepare(command, *rest, **options):
        if "--prepare" not in command:
            return run(command, *rest, **options)
        work = command[command.index("--work") + 1]
        (work / "texts.json").write_text(json.dumps([f"{'a' * (n % 7)} text {n}" for n in range(300)]))
        return None

    monkeypatch.setattr(bench_peers, "run", run_or_prepare)

    def compare(case, *names, **limits):
        monkeypatch.setitem(bench_peers.CASES, case, bench_peers.CASES[case]._replace(limit=limits.get("limit", 30)))
        options = ["--quick", "--out", str(tmp_path / "out"), "--seconds", str(limits.get("seconds", 60))]
        bench_peers.main(
            [*options, "--model", "a folder", "--only", case, "--peers", *(f"fakes:{name}" for name in names)]
        )
        (path,) = (tmp_path / "out").glob("*.csv")
        assert path.stem == "Fake_Card"
        return timing.read_rows(path), capsys.readouterr().out

    return compare


@pytest.mark.parametrize(
    ("case", "what", "shape", "checked", "setting"),
    [("encode-base", "docstrings", "300", "embeddings", "batch size 16; "),
     ("query-base", "one query", "1", "embedding", "")],
)  # fmt: skip
def test_peers_are_measured_and_compared(compare_fakes, case, what, shape, checked, setting):
    rows, printed = compare_fakes(case, "Right", "Wrong", "Other", "Absent", "Broken", "Dies")
    assert {line["op"] for line in rows} == {f"peers, encode {what}, BERT-base"}
    found = {line["implementation"].removeprefix("fakes:"): line for line in rows}
    assert {*found} == {"Right", "Wrong", "Other", "Broken", "Dies"}
    right = found["Right"]
    assert (right["shape"], right["metric"], right["unit"]) == (shape, "wall_us", "ktext/s")
    assert float(right["p50"]) > 0 and right["note"] == f"{setting}numpy {np.__version__}" and right["commit"]
    assert float(right["rate"]) == pytest.approx(int(shape) * 1e3 / float(right["p50"]), rel=1e-2)
    for name, reason in (
        ("Wrong", f"failed: {checked}: cosine -0."),
        ("Broken", "failed: ValueError: no such model"),
        ("Dies", "failed: exit code 7"),
    ):
        assert found[name]["p50"] == "nan" and found[name]["note"].startswith(reason)
    assert f"{case}, fakes:Absent: left out, because no-such-package is not installed" in printed
    assert f"| encode {what}, BERT-base |" in printed


def test_peers_that_take_too_long_are_ended(compare_fakes):
    rows, _ = compare_fakes("encode-minilm", "Right", "Slow", limit=2)
    notes = {line["implementation"]: line["note"] for line in rows}
    assert notes["fakes:Slow"] == "failed: not done after 2 s" and "numpy" in notes["fakes:Right"]


def test_peers_without_time_left_have_no_rows(compare_fakes, monkeypatch):
    monkeypatch.setattr(bench_peers, "LEAST_SECONDS", 1)
    rows, printed = compare_fakes("encode-minilm", "Right", "Slow", "Other", seconds=3)
    assert {line["implementation"] for line in rows} == {"fakes:Right"}
    assert "fakes:Slow: no time is left; run the rest with --only and --peers" in printed


def test_a_library_that_differs_from_all_fails(compare_fakes):
    rows, _ = compare_fakes("rank", "Wrong", "Right")
    notes = {line["implementation"]: line["note"] for line in rows}
    assert notes["fakes:Wrong"] == "failed: its numbers agree with the numbers of no other library"
    assert notes["fakes:Right"].startswith("failed: scores: cosine -1.00000 with the numbers of fakes:Wrong")


@pytest.mark.parametrize(("case", "direction"), [("forward", "forward"), ("training", "value and gradient")])
def test_peers_run_layers(case, direction, compare_fakes):
    rows, _ = compare_fakes(case, "Right")
    (found,) = rows
    assert (found["direction"], found["metric"], found["unit"]) == (direction, "queued_us", "TFLOP/s")
    assert found["note"] == f"numpy {np.__version__}"


@pytest.mark.slow
def test_jaxft_is_a_peer(tmp_path, monkeypatch):
    """In this process, at tiny sizes, with the folders that `prepare` writes."""
    (tmp_path / "tokenizer").mkdir()
    tiny.write_tokenizer(tmp_path / "tokenizer")
    sizes = shapes.Model(1, 16, 2, 32)
    monkeypatch.setattr(shapes, "MODELS", {"BERT-base": sizes, "MiniLM-L6": sizes})
    monkeypatch.setattr(shapes, "PEERS_FORWARD", [(2, 8)])
    monkeypatch.setattr(shapes, "PEERS_TRAINING", [(2, 8)])
    monkeypatch.setattr(bench_encode, "docstrings", lambda: ["the river " * (n % 5) for n in range(20)])
    work = tmp_path / "work"
    work.mkdir()
    bench_peers.prepare(work, tmp_path / "tokenizer")
    for name, case in bench_peers.CASES.items():
        out = tmp_path / f"{name}.json"
        bench_peers.measure(bench_peers.Job("jaxft", name, work, True), out)
        found = json.loads(out.read_text())
        assert "error" not in found and found["device"] == jax.devices()[0].device_kind
        assert len(found["lines"]) == len(bench_peers.lines(case, 20, True))
        assert all(us > 0 for line in found["lines"] for us in line["us"])


@pytest.mark.slow
def test_batches_of_few_tokens_have_no_sustained_time(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "MODELS", {"tiny": shapes.Model(1, 128, 2, 256)})
    monkeypatch.setattr(shapes, "FP8_FEW", [shapes.Encoder("tiny", 1, 16)])
    monkeypatch.setattr(shapes, "FP8_ENCODER", [shapes.Encoder("tiny", 2, 16)])
    bench_fp8.main(["--only", "tiny", "--seconds", "0.1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.csv")
    found = {(row["shape"], row["metric"]) for row in timing.read_rows(path)}
    assert ("1x16", "queued_us") in found and {shape for shape, metric in found if metric == "sustained_us"} == {"2x16"}


# --- Modern encoders -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_modern(monkeypatch):
    """Models of each type with four layers at most, and cases of ModernBERT."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64,
        "pad_token_id": 1, "max_position_embeddings": 40,
    }  # fmt: skip
    more = {
        "ModernBERT-base": {"local_attention": 8}, "ELECTRA-base": {"embedding_size": 32},
        "ALBERT-base": {"embedding_size": 16},
    }  # fmt: skip
    configs = {name: config | sizes | more.get(name, {}) for name, config in shapes.MODERN_CONFIGS.items()}
    monkeypatch.setattr(shapes, "MODERN_CONFIGS", configs)
    cases = [
        shapes.Modern("ModernBERT-base", 2, 32),
        shapes.Modern("ModernBERT-base", 2, 32, valid=40),
        shapes.Modern("ModernBERT-base", 2, 16, training=True),
    ]
    monkeypatch.setattr(shapes, "MODERN", cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", shapes.MODERN_CONFIGS)
def test_plain_encoder_equals_the_model(name, tiny_modern):
    model = plain_encoders.random_model(name)
    ids, lengths = plain_encoders.inputs(shapes.Modern(name, 2, 32, valid=40))
    keep = np.arange(32) < lengths[:, None]
    expected = np.asarray(model(ids, keep).last_hidden_state)[keep]
    params = plain_encoders.nnx.to_pure_dict(plain_encoders.nnx.state(model))
    for blocks in (False, True):
        got = plain_encoders.encode(
            params, jnp.asarray(ids), jnp.asarray(lengths), config=model.config, attention="xla", blocks=blocks
        )
        np.testing.assert_allclose(np.asarray(got)[keep], expected, rtol=0, atol=2e-5)


def test_plain_blocks_attend_to_the_window():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 2, 8))
    expected = jax.nn.dot_product_attention(q, k, v, local_window_size=4)
    np.testing.assert_allclose(plain_encoders.attend_in_blocks(q, k, v, None, 4, "xla"), expected, atol=1e-6)


def modern_process(tmp_path, process, *options):
    options = ["--out", str(tmp_path / "out"), "--work", str(tmp_path), *options]
    bench_modern_encoders.main(
        [*options, "--process", process, "--model", "ModernBERT-base", "--json", str(tmp_path / f"{process}.json")]
    )


@pytest.mark.slow
def test_bench_modern_encoders_times_jax(tiny_modern, tmp_path, monkeypatch):
    encode = plain_encoders.encode

    def without_blocks(*args, blocks=False, **options):
        if blocks and args[2] is None:
            raise NotImplementedError("no blocks today")
        return encode(*args, blocks=blocks, **options)

    monkeypatch.setattr(plain_encoders, "encode", without_blocks)
    modern_process(tmp_path, "jax")
    assert json.loads((tmp_path / "jax.json").read_text()) == {
        "device": jax.devices()[0].device_kind, "done": [case.label for case in shapes.MODERN[:2]],
    }  # fmt: skip
    modern_process(tmp_path, "training", "--quick")
    rows = read(tmp_path / "out")
    found = {(row["op"], row["shape"], row["implementation"]): row for row in rows}
    encoder, step = "modern encoder ModernBERT-base", "modern training step ModernBERT-base"
    assert {*found} == {
        *((encoder, "2x32", name) for name in ("jaxft", "xla", "xla, blocks")),
        *((f"{encoder}, 40 valid tokens", "2x32", name) for name in ("jaxft", "jaxft, padded", "xla", "xla, blocks")),
        *((step, "2x16", name) for name in ("jaxft", "xla")),
    }
    failure = found.pop((encoder, "2x32", "xla, blocks"))
    assert failure["p50"] == "nan" and failure["note"] == "failed: NotImplementedError: no blocks today"
    assert all(float(row["p50"]) > 0 and row["unit"] == "TFLOP/s" for row in found.values())
    assert (tmp_path / "ModernBERT-base" / "model.safetensors").exists()
    lines = report.modern_tables(rows)
    assert any("| failed |" in line for line in lines[1].split("\n"))
    assert lines[-1] == f"- {encoder} 2x32, xla, blocks: {failure['note']}."


@pytest.mark.slow
def test_bench_modern_encoders_times_no_wrong_result(tiny_modern, tmp_path, monkeypatch):
    forward = plain_encoders.jaxft_forward
    monkeypatch.setattr(
        plain_encoders, "jaxft_forward",
        lambda *args, **options: lambda *inputs: forward(*args, **options)(*inputs) * 1.1,
    )  # fmt: skip
    modern_process(tmp_path, "jax", "--quick", "--only", "ModernBERT-base 2x32")
    found = {row["implementation"]: row for row in read(tmp_path / "out")}
    assert found["jaxft"]["p50"] == "nan" and "twice plain jnp's error" in found["jaxft"]["note"]
    assert {*found} == {"jaxft", "xla, blocks"} and float(found["xla, blocks"]["p50"]) > 0


def test_rows_of_transformers(tiny_modern, tmp_path):
    args = argparse.Namespace(out=tmp_path)
    cases = shapes.MODERN[:2]
    found = {
        "device": "Fake Card", "versions": "torch 9",
        "lines": [
            {"label": cases[0].label, "name": "transformers", "us": [2.0, 3.0, 4.0], "setting": "sdpa"},
            {"label": cases[0].label, "name": "torch.compile", "error": "RuntimeError: no compiler"},
        ],
    }  # fmt: skip
    bench_modern_encoders.torch_rows(cases, found, "not done after 5 s", args)
    rows = timing.read_rows(tmp_path / "Fake_Card.csv")
    rows = [(row["op"], row["implementation"], row["p50"], row["note"]) for row in rows]
    assert sorted(rows) == [
        (cases[0].op, "torch.compile", "nan", "failed: RuntimeError: no compiler"),
        (cases[0].op, "transformers", "3.00", "sdpa; torch 9"),
        (cases[1].op, "transformers", "nan", "failed: not done after 5 s"),
    ]


def test_latencies_of_one_commit_are_compared_with_goals(root):
    blocking = {"metric": "blocking_us", "shape": "1x16"}
    rows = [
        row("jaxft", "545.00", **blocking), row("jaxft, constants", "500.00", **blocking),
        row("jaxft, joined", "403.00", **blocking) | {"commit": "other"},
        row("jaxft", "81000.00", "start-up MiniLM-L6", "wall_us", shape="1"),
        row("jaxft, empty cache", "5100000.00", "start-up MiniLM-L6", "wall_us", shape="3000"),
    ]  # fmt: skip
    timing.write_rows(rows, root / "benchmarks" / "results", "NVIDIA H200")
    older = [row(name, "1.00", date="2026-01-01", **blocking) for name in ("jaxft", "jaxft, constants")]
    older += [row("jaxft", "8.00"), row("xla", "9.00")]  # for the figure
    timing.write_rows(older, root / "benchmarks" / "results", "NVIDIA A100")
    report.write(root)
    page = (root / "docs" / "startup.md").read_text()
    assert page.startswith(f"before\n{report.LATENCY}\n| what |") and page.endswith(f"\n{report.END}\nafter\n")
    lines = [line for line in page.splitlines() if "| NVIDIA H200, 2026-01-02 |" in line]
    assert [line.split(" | ")[2:] for line in lines] == [
        ["jaxft, constants", "0.545 ms", "0.500 ms", "1.09", "1.08 |"],
        ["-", "81.0 ms", "-", "-", "300 ms |"],
        ["-", "5.10 s", "-", "-", "8.00 s |"],
    ]
    assert page.count("| not measured |") == len(report.GOALS) - 3


def test_modern_rows_have_targets(root):
    op = "modern encoder MPNet-base"
    rows = [row(name, us, op) for name, us in (("jaxft", "10.00"), ("xla", "15.00"), ("transformers", "25.00"))]
    rows.append(row("torch.compile", "nan", op) | {"note": "failed: no compiler"})
    timing.write_rows(rows, root / "benchmarks" / "results", "NVIDIA H200")
    report.write(root)
    page = (root / "docs" / "benchmarks" / "NVIDIA_H200.md").read_text()
    assert f"| {op} | 32x128 | bfloat16 | 10.00 | 15.00 | 25.00 | failed | 1.50x | 2.50x | 1.4x, 2.0x |" in page
    assert f"- {op} 32x128, torch.compile: failed: no compiler." in page


def test_the_readme_has_ten_rows_at_most():
    found = [line for case in bench_peers.CASES.values() for line in bench_peers.lines(case, 1, False)]
    assert len(found) == 10


def test_accuracy_in_float8(tmp_path, monkeypatch, capsys):
    names = ["rain", "birds"]
    texts = {f"{word} {text}": names[i % 2] for i, word in enumerate(tiny.WORDS) for text in ("falls", "sings")}
    monkeypatch.setattr(fp8_accuracy.finetune, "paragraphs", lambda labels: (texts, names) if labels == 2 else None)
    monkeypatch.setattr(fp8_accuracy.common, "held_out", lambda text: text.endswith("falls"))
    config = tiny.config(hidden_size=128, intermediate_size=128)
    BertForSequenceClassification(config, id2label=names, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    fp8_accuracy.main([str(tmp_path), "--length", "8"])
    first, *_, wide, half, narrow = capsys.readouterr().out.splitlines()
    assert first == f"{len(texts) // 2} texts"
    assert wide.endswith("| 100.0% | 1.000 |") and half.startswith("| bfloat16 |") and narrow.startswith("| FP8 |")
    assert 0.8 < float(narrow.split("|")[-2]) < float(half.split("|")[-2]) < 1.0


def test_kendall():
    assert fp8_accuracy.kendall(np.array([1, 2, 3, 4]), np.array([1, 2, 4, 3])) == pytest.approx(2 / 3)
    tied = fp8_accuracy.kendall(np.array([1, 2, 3]), np.array([1, 1, 2]))  # two of three pairs, 3 and 2 without ties
    assert tied == pytest.approx(2 / 6**0.5)
