"""Each benchmark runs at tiny shapes, writes its rows, and refuses to time a wrong result; the report is repeatable."""

import csv
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import bench_attention
import bench_bias_activation
import bench_cross_entropy
import bench_dense
import bench_embeddings
import bench_encode
import bench_encoder
import bench_feed_forward
import bench_heuristics
import bench_layer_norm
import bench_permute
import bench_pretrain
import bench_softmax
import bench_train
import report
import timing
import tiny
import tune
from jaxft import reference
from jaxft.text.sentence_encoder import SentenceEncoder
from jaxft.tuning import table as tuning_table

HEADS = {"HEADS": 2, "HEAD_SIZE": 64}  # what cuDNN supports, for when this runs on a GPU
TINY_ENCODER = {
    "MODELS": {"BERT-base": (2, 128, 2, 64)},
    "QUICK_CASES": [bench_encoder.Case("BERT-base", 2, 64)],
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """The peers are as users would write them, and jax.nn itself does not run under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Few sets of such small inputs, where on a GPU it takes 100,000 of them to fill its cache."""
    monkeypatch.setattr(timing, "L2_BYTES", 1e4)


def read(folder):
    (path,) = folder.glob("*.csv")
    assert path.stem == jax.devices()[0].device_kind.replace(" ", "_")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("script", "settings", "peers"),
    [
        (
            bench_dense,
            {"SHAPES": [(5, 24, 16), (5, 8, 32)], "LARGE": [], "NAMED": [("dense with tanh GELU", (5, 8, 32))]},
            {"xla", "jaxft, triton"},
        ),
        (bench_cross_entropy, {"SHAPES": [(20, 24, 40)]}, {"xla, float32 logits", "xla, bfloat16 logits"}),
        (bench_layer_norm, {"SHAPES": [(5, 24)]}, {"xla", "copy (memcpy)"}),
        (bench_feed_forward, {"SHAPES": [(5, 16, 24)]}, {"xla"}),
        (bench_embeddings, {"SHAPES": [(2, 5)], "TABLES": (40, 9, 2), "WIDTH": 24}, {"xla", "copy (memcpy)"}),
        (bench_bias_activation, {"SHAPES": [(5, 24)]}, {"xla", "copy (memcpy)"}),
        (bench_permute, {"CASES": [((2, 5, 3, 8), (0, 2, 1, 3), ("float16",))], "HEADS": [(2, 5, 3, 8)]},
         {"xla", "copy (memcpy)"}),
        (
            bench_softmax,
            {
                "QUICK_CASES": [
                    ("log_softmax", "forward", (5, 24), "float16"),
                    ("softmax, masked", "forward+backward", (2, 3, 4, 8), "float32"),
                ]
            },
            {"xla", "copy (memcpy)"},
        ),
        (bench_attention, {"SHAPES": [(2, 64)], "BACK_TO_BACK": [(64, 8, 24, 2)], **HEADS}, {"xla", "xla, padded"}),
        (bench_encoder, TINY_ENCODER, {"jaxft, scanned", "xla", "xla, separate qkv"}),
        (bench_train, {"CASES": TINY_ENCODER["QUICK_CASES"]}, {"jaxft, remat", "xla", "xla, separate qkv"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_benchmark_writes_rows(script, settings, peers, tmp_path, monkeypatch, capsys):
    for name, value in settings.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setenv("JAXFT_COMMIT", "abc1234")
    options = ["--kernels", "--only", "erf GELU 2x64 bfloat16"] if script is bench_encoder else []
    if script is bench_train:
        options = ["--only", "erf GELU 2x64 bfloat16, dropout 0.1"]
        for module in (bench_encoder, bench_train):
            monkeypatch.setattr(module, "MODELS", {"BERT-base": (1, 128, 2, 64)})
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
        assert all(row.values()) or row["metric"] == "temporary_mib", row  # which is no rate, and has no unit of one
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
    printed = capsys.readouterr().out
    assert "jaxft" in printed and "speedup" in printed


@pytest.mark.parametrize("script", [bench_dense, bench_encoder, bench_train])
def test_no_case_is_an_error(script, tmp_path):
    with pytest.raises(SystemExit, match="no case was measured"):
        script.main(["--quick", "--out", str(tmp_path), "--only", "99x99"])
    assert list(tmp_path.iterdir()) == []


def test_heuristics_are_timed_where_they_differ(tmp_path, monkeypatch, capsys):
    def case(rows):
        sizes = {"rows": rows, "width": 24, "itemsize": 4}
        return tune.Case("softmax", sizes, ((rows, 24),), "float32", run, reference.softmax, present=8)

    def run(x, config):
        return jax.named_call(reference.softmax, name=f"config_{config}")(x)

    def measure(variants, **key):
        """Which configuration each has been compiled with."""
        texts = {name: f.as_text() for name, (f, _) in variants.items()}
        assert "config_8" in texts["jaxft"] and "config_4" in texts["jaxft, heuristic"]
        return timed(variants, **key)

    timed = timing.measure
    monkeypatch.setattr(timing, "measure", measure)

    monkeypatch.setattr(tune, "cases", lambda dtypes, kind: [(case(5), 8), (case(6), 4)])
    bench_heuristics.main(["--quick", "--out", str(tmp_path)])
    assert {(row["op"], row["implementation"], row["shape"]) for row in read(tmp_path)} == {
        ("configuration of softmax", name, "6x24") for name in ("jaxft", "jaxft, heuristic")
    }
    with pytest.raises(SystemExit, match="no case in which the table of .* and the heuristics differ"):
        bench_heuristics.main(["--only", "permute", "--out", str(tmp_path)])


def test_tune_some_ops_and_sizes(tmp_path, monkeypatch):
    """What is chosen is written beside what the file has, and later cases of the same run find it."""
    kind, present, table = jax.devices()[0].device_kind, [], {}
    path = tmp_path / f"{kind.replace(' ', '_')}.json"
    path.write_text('{"permute": {"size=1": {"num_warps": 1}}}')

    def cases(dtypes, kind):
        for op, rows, variant in (
            ("softmax", 5, ""), ("softmax", 100, ""), ("layer_norm", 5, ""), ("softmax", 6, ""), ("softmax", 7, "sums")
        ):  # fmt: skip
            sizes = {"rows": rows, "width": 24, "itemsize": 4}
            config = getattr(tuning, op)(device_kind=kind, **sizes)
            present.append(config.num_warps)
            case = tune.Case(
                op, sizes, ((rows, 24),), "float32", reference.softmax, reference.softmax, config, variant=variant
            )
            yield case, config

    monkeypatch.setattr(tuning, "_table", lambda kind: table)
    monkeypatch.setattr(tune, "cases", cases)
    monkeypatch.setattr(tune, "best", lambda case, default: tuning_table.RowConfig(2, 32, 16))
    tune.main(["--out", str(tmp_path), "--only", "softmax", "--sizes", "rows=(4|8),"])
    found = {"block_rows": 2, "block_width": 32, "num_warps": 16}
    chosen = {"rows=8,width=32,itemsize=4": found, "rows=8,width=32,itemsize=4,sums": found}
    assert json.loads(path.read_text()) == {"permute": {"size=1": {"num_warps": 1}}, "softmax": chosen}
    assert present[0] != 16 and present[3] == 16


def test_tune_takes_the_fastest(monkeypatch, capsys):
    """Of those that are right; a second and a third look are for what was among the fastest."""

    def run(x, config):
        return jax.named_call(reference.softmax, name=f"warps_{config.num_warps}")(x)

    def device_us(variant, repeats):
        f = variant[0]
        text = f.as_text() if isinstance(f, jax.stages.Compiled) else ""
        found = [warps for warps in (1, 2, 4, 8) if f"warps_{warps}/" in text]
        seen.extend(found)
        return {1: 10.0, 2: 9.5, 4: 20.0, 8: 9.9}[found[0]] if found else 30.0

    seen = []
    monkeypatch.setattr(timing, "device_us", device_us)
    configs = [tuning_table.RowConfig(1, 32, warps) for warps in (1, 2, 4)]
    monkeypatch.setattr(tune.tuning_candidates, "candidates", lambda *_, **sizes: configs[1:])
    sizes = {"rows": 5, "width": 24, "itemsize": 4}
    case = tune.Case("softmax", sizes, ((5, 24),), "float32", run, reference.softmax, present=configs[0])
    assert tune.best(case, tuning_table.RowConfig(1, 32, 8)) == configs[1]
    assert sorted(seen) == [1, 1, 1, 2, 2, 2, 4, 8, 8, 8]
    assert "was 10.00 us, without a table 1.04x, XLA takes 30.00" in capsys.readouterr().out


def test_rows_are_added_to_those_of_earlier_runs(tmp_path):
    timing.write_rows([row("jaxft", "1.00")], tmp_path)
    timing.write_rows([row("jaxft", "2.00"), row("xla", "3.00")], tmp_path)
    assert [line["p50"] for line in read(tmp_path)] == ["1.00", "2.00", "3.00"]


@pytest.mark.parametrize("wrong", [1.1, jnp.nan])
def test_a_wrong_result_is_not_timed(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_layer_norm, "SHAPES", [(5, 24)])
    op = bench_layer_norm.bias_residual_layer_norm
    monkeypatch.setattr(
        bench_layer_norm, "bias_residual_layer_norm", lambda *args: (op(*args) * wrong).astype("bfloat16")
    )
    with pytest.raises(SystemExit, match=r"bias_residual_layer_norm forward 5x24 bfloat16: error .* nothing is timed"):
        bench_layer_norm.main(["--quick", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tiny_encode(tmp_path, monkeypatch):
    """Arguments of bench_encode with a tiny model, a few texts, and float32 so that packed and padded are one."""
    tiny.write_tokenizer(tmp_path)
    settings = {"CONFIGS": {"tiny": tiny.config()}, "LIMIT": 32, "BATCH_SIZE": 2, "DTYPE": "float32"}
    for name, value in settings.items():
        monkeypatch.setattr(bench_encode, name, value)
    monkeypatch.setattr(bench_encode, "docstrings", lambda: ["the river " * n for n in (1, 14, 3, 0, 2)])
    return ["--quick", "--out", str(tmp_path / "results"), "--tokenizer", str(tmp_path / "tokenizer.json")]


def test_bench_encode(tiny_encode, tmp_path, capsys):
    bench_encode.main(tiny_encode)
    *rows, one, padded = read(tmp_path / "results")
    names = ["jaxft", "jaxft, padded", "jaxft, padded, not sorted", "jaxft"]
    assert [row["implementation"] for row in rows] == names
    assert [row["metric"] for row in rows] == ["wall_us"] * 3 + ["device_only_us"]
    tokens = 5 * 2 + 2 * (1 + 14 + 3 + 0 + 2)
    for row in rows:
        assert set(row) == set(timing.COLUMNS) and all(row.values()), row
        assert (row["op"], row["shape"]) == ("encode docstrings tiny", "5")
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) and row["unit"] == "Mtoken/s"
        assert float(row["rate"]) == pytest.approx(tokens / float(row["p50"]), rel=1e-3)
    assert "not sorted" in capsys.readouterr().out
    for row, name in ((one, "jaxft"), (padded, "jaxft, padded")):
        assert (row["op"], row["implementation"], row["metric"]) == ("encode one text tiny", name, "wall_us")
        assert row["unit"] == "ktext/s" and float(row["rate"]) == pytest.approx(1e3 / float(row["p50"]), rel=1e-3)


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


@pytest.mark.parametrize("wrong", [1.1, jnp.nan])
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
    monkeypatch.setattr(bench_encoder, "MODELS", TINY_ENCODER["MODELS"])
    params = bench_encoder.random_params("BERT-base", "float32")
    x = jax.random.normal(jax.random.key(1), (1, 8, 128))
    options = {"heads": 2, "activation": "gelu", "epsilon": 1e-12, "attention": "xla"}
    with jax.default_matmul_precision("highest"):
        packed = bench_encoder.plain_encoder(params, x, None, **options)
        separate = bench_encoder.plain_encoder(bench_encoder.separate(params), x, None, **options)
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


def row(implementation, p50, op="encoder BERT-base erf GELU", metric="queued_us", date="2026-01-02", dtype="bfloat16"):
    return {
        "op": op, "implementation": implementation, "direction": "forward", "shape": "32x128", "dtype": dtype,
        "metric": metric, "p20": p50, "p50": p50, "p80": p50, "rate": "1", "unit": "TFLOP/s", "jax": "0.0",
        "commit": "abc1234", "date": date,
    }  # fmt: skip


def test_report(tmp_path):
    readme, results = tmp_path / "README.md", tmp_path / "benchmarks" / "results"
    readme.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    results.mkdir(parents=True)
    report.write(readme, results)
    assert "No results yet" in readme.read_text()

    rows = [
        row("jaxft", "90.00", date="2026-01-01"),
        row("jaxft", "100.00"),
        row("jaxft, scanned", "120.00"),
        row("xla", "150.00"),
        row("xla+cudnn", "140.00"),
        row("jaxft", "10.00", "bias_activation gelu", "device_us"),
        row("copy", "9.00", "bias_activation gelu", "device_us"),
        row("jaxft", "20.00", "encode docstrings BERT-base", "wall_us"),
        row("jaxft, padded", "50.00", "encode docstrings BERT-base", "wall_us"),
        row("jaxft", "19.00", "encode docstrings BERT-base", "device_only_us"),
        row("jaxft", "22000.00", "pretraining example, base", "step_us"),
        row("jaxft", "712345.60", "pretraining example, base", "tokens_per_s"),
        row("jaxft", "38.90", "pretraining example, base", "mfu_percent"),
    ]
    shorter = [row("jaxft", "30.00", "bias_activation gelu", "device_us")]
    for name, written in (("NVIDIA_H200", rows), ("NVIDIA_A100", shorter)):
        with (results / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, timing.COLUMNS)
            writer.writeheader()
            writer.writerows(written)
    report.write(readme, results)
    text, chart = readme.read_text(), (results / "NVIDIA_H200.png").read_bytes()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and "old" not in text
    assert "| encoder BERT-base erf GELU | 32x128 | bfloat16 | 100.00 | 120.00 | 150.00 | 140.00 | 1.40x |" in text
    assert "| encode docstrings BERT-base | 32x128 | bfloat16 | 20.00 | 50.00 | 2.50x |" in text
    assert "| pretraining example, base | 32x128 | bfloat16 | 22.00 | 712,346 | 1 | 38.90 % |" in text
    assert text.index("### NVIDIA H200") < text.index("### NVIDIA A100")
    assert "bias_activation" not in text and "(benchmarks/results/NVIDIA_H200.md)" in text
    assert "| 10.00 | 9.00 | - | 90% |" in (results / "NVIDIA_H200.md").read_text()
    assert "![Encoder times on NVIDIA H200](benchmarks/results/NVIDIA_H200.png)" in text

    report.write(readme, results)
    assert readme.read_text() == text and (results / "NVIDIA_H200.png").read_bytes() == chart

    readme.write_text("no markers")
    with pytest.raises(SystemExit, match="expected one line"):
        report.write(readme, results)
