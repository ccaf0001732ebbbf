"""Parts of the examples, operations in custom modules, and training with and without kernels."""

import argparse
import csv
import dataclasses
import json
import os
import re
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import common
import custom_modules
import finetune
import pretrain
import tiny
import train_embedder
import train_parity
from docstrings import Docstring
from jaxft import BertConfig, BertForMaskedLM, training
from jaxft.models.bert import named_parameters
from test_examples import CONFIG, quick_compiler, small, some_texts, standard_promotion

__all__ = ["quick_compiler", "small", "standard_promotion"]  # fixtures of every test here


def test_settings_cover_everything_that_changes_bits(monkeypatch):
    args = common.arguments(None, "x", {"small": 0, "base": 1}).parse_args(["--model=a", "--out=b"])
    found = common.settings(args, data="c")

    def changed():
        return {name: value for name, value in common.settings(args, data="c").items() if value != found[name]}

    for name, value in (
        ("default_matmul_precision", "tensorfloat32"),
        ("default_prng_impl", "rbg"),
        ("enable_x64", True),
        ("threefry_partitionable", False),
    ):
        with getattr(jax, name)(value):
            assert changed() == {f"jax_{name}": value}
    jax.config.update("jax_random_seed_offset", 7)
    try:
        assert changed() == {"jax_random_seed_offset": 7}
    finally:
        jax.config.update("jax_random_seed_offset", 0)
    for name in ("XLA_FLAGS", "NPROC"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            assert changed() == {name: "x"}
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "cpu")
        patch.setattr(os, "sched_getaffinity", lambda pid: range(1000), raising=False)
        assert changed() == {"cores": 1000}
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert common.settings(args)["cores"] is None
    versions = {"jax": jax.__version__, "numpy": np.__version__, "optax": optax.__version__}
    assert versions.items() <= found.items() and {"jaxlib", "flax", "jaxft", "device", "dtype", "data"} <= found.keys()
    assert not {"model", "out", "save_every"} & found.keys()


def test_tokenizer_without_mask_token_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"pretrain: the tokenizer has no \[MASK\], which masking needs"):
        tokenizer = tiny.bert_tokenizer()
        vocab = json.loads(tokenizer.to_str())
        del vocab["model"]["vocab"]["[MASK]"]
        vocab["added_tokens"] = [token for token in vocab["added_tokens"] if token["content"] != "[MASK]"]
        pretrain.Documents(["a"], type(tokenizer).from_str(json.dumps(vocab)), pretrain.PRESETS["small"])


def test_masked_batches():
    tokenizer = tiny.bert_tokenizer()
    documents = pretrain.Documents(list(some_texts()), tokenizer, pretrain.PRESETS["small"])
    assert documents.lengths.max() <= 16 and all(s[0] == 2 and s[-1] == 3 for s in documents.sequences)
    known = {tuple(sequence) for sequence in documents.sequences}
    counts = np.zeros(4)
    for step in range(100):
        batch = documents.batch(np.random.default_rng(step))
        ids, labels, ends = batch["input_ids"], batch["labels"], batch["cu_seqlens"]
        original = np.where(labels >= 0, labels, ids)
        sequences = [tuple(original[a:b]) for a, b in zip(ends, ends[1:], strict=False) if b > a]
        assert set(sequences) <= known and ends[0] == 0 and 128 - 16 <= ends[-1] <= 128 and len(ends) == 128 // 16 + 1
        assert (ids[ends[-1] :] == 0).all() and (labels[ends[-1] :] == -100).all()
        assert not np.isin(original[labels >= 0], [0, 2, 3]).any()
        inner = ends[-1] - 2 * len(sequences)
        masked, same = (labels >= 0) & (ids == documents.mask), (labels >= 0) & (ids == labels)
        counts += inner, (labels >= 0).sum(), masked.sum(), same.sum()
    np.testing.assert_allclose(counts[1] / counts[0], 0.15, atol=0.01)
    np.testing.assert_allclose(counts[2:] / counts[1], [0.8, 0.1], atol=0.03)
    for name, array in pretrain.batches(documents, [0, 3], 2).items():
        np.testing.assert_array_equal(array, pretrain.batches(documents, [0, 3], 2)[name])
        assert array.shape[0] == 2


def test_flops_are_six_a_parameter_and_token():
    """The count has the matrices of layers and head. Word embeddings count as the output layer of predicted tokens."""
    model = nnx.eval_shape(lambda: BertForMaskedLM(BertConfig(), rngs=nnx.Rngs(0)))
    sizes = {name: np.prod(parameter.shape) for name, parameter in named_parameters(model).items()}
    kernels = sum(size for name, size in sizes.items() if name.endswith("kernel"))
    labels = np.full((2, 256), -100)
    labels[0, :30] = 5
    batch = {"labels": labels, "cu_seqlens": np.array([[0, 100, 200, 200], [0, 50, 50, 50]])}
    attention = 12 * 12 * 768 * (100**2 + 100**2 + 50**2)
    expected = 6 * kernels * 250 + 6 * sizes["embeddings.word"] * 30 + attention
    assert pretrain.flops(BertConfig(), batch) == expected


def test_peak(monkeypatch):
    assert pretrain.peak_flops("bfloat16", 100.0) == 1e14
    for kind, dtype, tflops in (("NVIDIA H200", "bfloat16", 989.5), ("NVIDIA A100-SXM4-80GB", "float32", 156.0)):
        monkeypatch.setattr(pretrain.dispatch, "device_kind", lambda kind=kind: kind)
        assert pretrain.peak_flops(dtype, None) == tflops * 1e12
    others = {
        "NVIDIA H200 NVL": 835.5,
        "NVIDIA L4": 121.0,
        "NVIDIA L40": 181.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA L400": None,
    }
    for kind, tflops in others.items():
        monkeypatch.setattr(pretrain.dispatch, "device_kind", lambda kind=kind: kind)
        assert pretrain.peak_flops("bfloat16", None) == (tflops and tflops * 1e12)
    monkeypatch.setattr(pretrain.dispatch, "device_kind", lambda: "cpu")
    assert pretrain.peak_flops("float32", None) is None


def test_paragraphs(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "package" / "test").mkdir(parents=True)
    code = '"""First\n  line.\n\n\nIn both."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    (tmp_path / "package" / "a.py").write_text(code)
    (tmp_path / "package" / "test" / "b.py").write_text('"""A test."""')
    (tmp_path / "module.py").write_text('"""In both.\n\nAlone."""')
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    expected = {"Alone.": "module", "First line.": "package", "Class.": "package", "Method.": "package"}
    assert common.paragraphs() == expected
    held_out = [common.held_out(str(number)) for number in range(2000)]
    assert 0.08 < np.mean(held_out) < 0.12
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "nowhere")})
    with pytest.raises(SystemExit, match="nowhere has no sources of Python's standard library"):
        common.paragraphs()


def test_pairs_are_unique_and_from_other_modules(monkeypatch):
    docstrings = [Docstring(owner, name, paragraphs) for owner, name, paragraphs in (
        ("json", "dump", ["Write.", "As JSON.", "To a file."]),  # json is held out, os is not
        ("json", None, ["A module.", "With a description."]),
        ("os", "walk", ["Walk.", "Goes down the tree."]),
        ("os", "short", ["Short.", "x"]),
        ("os", "alone", ["Has no more."]),
        ("os", "first", ["Same.", "Text that occurs twice."]),
        ("sys", "second", ["Same too.", "Text that occurs twice."]),
    )]  # fmt: skip
    monkeypatch.setattr(common, "docstrings", lambda: docstrings)
    monkeypatch.setattr(train_embedder, "LEAST_CHARACTERS", 10)
    learned, held_out = train_embedder.docstring_pairs()
    assert held_out == [("dump: Write.", "As JSON. To a file.")]
    assert learned == [("walk: Walk.", "Goes down the tree.")]


@pytest.mark.parametrize("packed", [False, True])
def test_batches_of_pairs(packed):
    class Encoder:
        model = BertForMaskedLM  # only its config is read
        tokenize = staticmethod(lambda texts: [[2, *map(int, text.split()), 3] for text in texts])

    encoder = Encoder()
    encoder.model = type("Model", (), {"config": BertConfig(pad_token_id=0)})
    pairs = [(" ".join(["7"] * (1 + i % 3)), " ".join([str(10 + i)] * (1 + i % 9))) for i in range(40)]
    preset = train_embedder.Preset(length=12, pairs=20, steps=1, learning_rate=1.0)
    some = train_embedder.Pairs(pairs, encoder, preset, packed)
    some.rows = 256 if packed else 0
    for seed in range(20):
        batch = some.batch(np.random.default_rng(seed))
        if packed:
            ends = batch["cu_seqlens"]
            assert (
                batch["input_ids"].shape == (256,) and ends.shape == (41,) and not batch["input_ids"][ends[-1] :].any()
            )
            texts = [batch["input_ids"][a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]
        else:
            assert batch["input_ids"].shape == batch["attention_mask"].shape == (40, 12)
            texts = [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
            assert not batch["input_ids"][~batch["attention_mask"]].any()
        found = [
            (" ".join(map(str, q[1:-1])), " ".join(map(str, d[1:-1])))
            for q, d in zip(texts[:20], texts[20:], strict=True)
        ]
        assert len(set(found)) == 20 and set(found) <= set(pairs)
    whole = some.tokens.sum()
    some.rows = int(some.tokens.mean() * 20 * 0.8)  # too few for most batches: longer pairs are replaced
    assert whole > some.rows
    if packed:
        ends = [some.batch(np.random.default_rng(seed))["cu_seqlens"][-1] for seed in range(20)]
        assert max(ends) <= some.rows and min(ends) > some.rows / 2


def test_retrieval_metrics():
    documents = np.eye(13, dtype=np.float32)[:12]
    queries = documents.copy()
    queries[0] = documents[0] + 2 * documents[1]  # the second best
    queries[1] = -documents[1]  # the last one
    found = train_embedder.retrieval(queries, documents, [13, 12])
    assert found["recall@1"] == 10 / 12 and found["recall@10"] == 11 / 12
    np.testing.assert_allclose(found["nDCG@10"], (10 + 1 / np.log2(3)) / 12)
    names = ["recall@1, 12 dimensions", "recall@10, 12 dimensions", "nDCG@10, 12 dimensions"]
    assert [*found][3:] == names and [*found.values()][:3] == [*found.values()][3:]


@pytest.mark.parametrize("value", ["0", "-1", "x", "2147483648"])
def test_counts_are_positive(value, capsys):
    with pytest.raises(SystemExit):
        finetune.main(["--model", "x", "--steps", value])
    message = f"argument --steps: must be a positive integer below 2**31, got '{value}'"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_peak_is_positive(value, capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--model", "x", "--peak-tflops", value])
    assert f"argument --peak-tflops: must be a positive number, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "0.5", "4294967296", "9223372036854775808"])
def test_seeds_fit_32_bits(value, capsys):
    parser = common.arguments(None, "x", {})
    assert parser.parse_args(["--model=x", "--seed=4294967295"]).seed == 2**32 - 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--model=x", f"--seed={value}"])
    assert f"argument --seed: must be a natural number below 2**32, got '{value}'" in capsys.readouterr().err


def test_custom_modules_have_gradients():
    digits = jnp.zeros((2, custom_modules.LENGTH), jnp.int32)
    graph, params = nnx.split(nnx.eval_shape(lambda: custom_modules.NNXSorter(nnx.Rngs(0))))
    sorter = custom_modules.LinenSorter()
    linen_params = jax.eval_shape(sorter.init, jax.random.key(0), digits)
    for forward, of in ((lambda params: nnx.merge(graph, params)(digits), params),
                        (lambda params: sorter.apply(params, digits), linen_params)):  # fmt: skip
        assert jax.eval_shape(forward, of).shape == (*digits.shape, custom_modules.DIGITS)
        gradients = jax.eval_shape(jax.grad(lambda params, forward=forward: forward(params).sum()), of)
        assert jax.tree.structure(gradients) == jax.tree.structure(of)


@pytest.mark.slow
def test_custom_modules_learn(monkeypatch, capsys):
    custom_modules.main()
    assert re.search(r"NNX: the loss falls from .*\nLinen: the loss falls from", capsys.readouterr().out)
    monkeypatch.setattr(custom_modules, "STEPS", 1)
    with pytest.raises(AssertionError):
        custom_modules.train("flat", lambda params, digits: params[digits], np.zeros((10, 10), np.float32))


# --- Training with kernels and without -------------------------------------------------------------------------


@pytest.fixture
def small_parity(monkeypatch):
    sizes = {"CONFIG": dataclasses.replace(CONFIG, vocab_size=50, num_hidden_layers=1, max_position_embeddings=16)}
    texts = [" ".join(text.split()[: 4 + place % 9]) for place, text in enumerate(some_texts())]
    sizes |= {"BATCH": 4, "LENGTH": 12, "STEPS": 60, "LEARNING_RATE": 5e-3, "docstrings": lambda: texts}
    sizes |= {"IMPLEMENTATIONS": {"jaxft": "triton", "xla": "xla"}}
    for name, value in sizes.items():
        monkeypatch.setattr(train_parity, name, value)


@pytest.mark.slow
def test_kernels_train_as_xla_does(small_parity, tmp_path, capsys):
    """The kernels, in interpret mode where there is no GPU, train as plain XLA does."""
    assert train_parity.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("PASS") == 3
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60 and path.with_suffix(".png").exists()
    names = [f"{case}, {name}" for case in train_parity.CASES for name in ("jaxft", "xla")]
    assert [*rows[0]][1:7] == names
    for name in names:
        values = [float(row[name]) for row in rows]
        assert np.mean(values[-20:]) < 0.8 * np.mean(values[:20])
    assert rows[0]["jax"] == jax.__version__ and rows[0]["commit"] and rows[0]["date"]
    assert len({rows[5][name] for name in names[::2]}) == 3


def test_parity_runs_selected_cases(small_parity, tmp_path, monkeypatch, capsys):
    lengths = []

    def losses(case, implementation, data):
        lengths.append(data["input_ids"].shape[-1])
        return np.ones(train_parity.STEPS)

    monkeypatch.setattr(train_parity, "losses", losses)
    assert train_parity.main(["--out", str(tmp_path), "--only", "bfloat16", "--length", "9"]) == 0
    assert lengths == [9, 9]  # one run by the kernels, one by XLA
    (path,) = tmp_path.glob("*_9_tokens_bfloat16.csv")
    assert "bfloat16" in path.read_text() and "float32" not in path.read_text()
    with pytest.raises(SystemExit):
        train_parity.main(["--out", str(tmp_path), "--only", "float64"])
    assert "--only: no case has 'float64' in its name, only bfloat16, dropout 0.1; float32" in capsys.readouterr().err


@pytest.mark.slow
def test_parity_notices_another_dropout_mask(small_parity, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_parity, "CASES", train_parity.CASES[2:])
    losses, accumulate = train_parity.losses, training.accumulate_gradients

    def with_other_masks(case, implementation, data):
        def other(loss_fn, params, batches):
            batch, keys = batches
            return accumulate(loss_fn, params, (batch, keys[::-1]))

        with monkeypatch.context() as patch:
            if implementation == "xla":
                patch.setattr(training, "accumulate_gradients", other)
            return losses(case, "xla", data)

    monkeypatch.setattr(train_parity, "losses", with_other_masks)
    assert train_parity.main(["--out", str(tmp_path)]) == 1
    assert "float32, dropout 0.1: largest difference of a loss" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "wrong"), [("bfloat16", 1.011), ("float32", 1.0002), ("float32", np.nan)])
def test_parity_fails_beyond_its_bounds(dtype, wrong, small_parity, tmp_path, monkeypatch, capsys):
    def losses(case, implementation, data):
        factor = wrong if case.dtype == dtype and implementation == "xla" else 1.0
        return np.where(np.arange(60) < 40, 1.0, factor)

    monkeypatch.setattr(train_parity, "losses", losses)
    assert train_parity.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    wrong = [case for case in train_parity.CASES if case.dtype == dtype]
    assert printed.count("PASS") == 3 - len(wrong)
    assert all(re.search(rf"{case}: .*: FAIL", printed) for case in wrong)


def test_devices_share_equal_parts(monkeypatch):
    alone, all_of_them = (common.Devices(argparse.Namespace(data_parallel=divides)) for divides in (False, True))
    alone.check("--batch", 7)
    assert alone.count == 1 and alone.mesh is None and all_of_them.count == jax.device_count()
    all_of_them.count = 2
    all_of_them.check("--batch", 8)
    with pytest.raises(SystemExit, match="--batch must be a multiple of the 2 devices, got 7"):
        all_of_them.check("--batch", 7)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit, match="several processes need --data-parallel or --fsdp"):
        common.Devices(argparse.Namespace())


@pytest.mark.parametrize("names", [("2", None), (None, "0"), ("2", "a"), ("-2", "0")])
def test_processes_need_numbers(names, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    for name, value in zip(("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), names, strict=True):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="several processes need JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"):
        common.join_processes()
