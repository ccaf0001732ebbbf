"""`jaxft bench` compares an encoder with plain JAX."""

import contextlib
import functools
import importlib.util
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny
from cases import slow
from jaxft import cli, comparison, dispatch
from jaxft.models import bert
from jaxft.models.float8 import Float8Recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, hidden_act="gelu_new"))


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in (("_ROUNDS", 1), ("_ROUND_SECONDS", 1e-6), ("_BLOCKING_CALLS", 1)):
        monkeypatch.setattr(comparison, name, value)


def fails(capsys, *arguments):
    code = cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    return captured.err.splitlines()[-1].removeprefix("jaxft: error: ")


def test_table_json_and_chart(model, tmp_path, capsys):
    cases = [(1, 4), (3, 4), (1, 8), (3, 8)]
    arguments = ["--batch", "1", "3", "--length", "4", "8", "--dtype", "float32", "-o", "out.json"]
    assert cli.main(["bench", "--model", model, *arguments, "--chart", "out.png"]) == 0
    head, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert model in head and "float32" in head
    assert columns.split()[:4] == ["batch", "length", "jaxft", "xla"]
    assert [tuple(map(int, line.split()[:2])) for line in lines] == cases
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["model"], found["dtype"]) == (model, "float32") and "jax" in found["versions"]
    assert [(r["batch"], r["length"]) for r in found["results"]] == cases
    for result in found["results"]:
        assert set(result["us"]) >= {"jaxft", "xla"}
        assert all(us > 0.0 for times in result["us"].values() for us in times.values())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_longest_length_is_accepted(model, monkeypatch, capsys):
    def stop(*arguments):
        raise comparison.ComparisonError("stop")

    monkeypatch.setattr(comparison, "compare", stop)
    assert fails(capsys, "--model", model, "--batch", "1", "--length", "64") == "1x64: stop"


def test_float8_is_timed_beside_bfloat16(tmp_path, capsys):
    tiny.write_model(tmp_path / "wide", hidden_size=128, intermediate_size=128, initializer_range=0.05)
    arguments = ["--batch", "1", "--length", "8", "--quantization", "fp8"]
    assert cli.main(["bench", "--model", str(tmp_path / "wide"), *arguments]) == 0
    head, _, columns, _ = capsys.readouterr().out.splitlines()
    assert "bfloat16" in head and "jaxft fp8" in columns


def test_float8_of_other_models_is_refused(model, tmp_path, capsys):
    tiny.write_model(tmp_path / "wide", hidden_size=128, intermediate_size=128)
    bert.BertModel.from_pretrained(tmp_path / "wide", quantization="fp8").save_pretrained(tmp_path / "narrow")
    wide, narrow = str(tmp_path / "wide"), str(tmp_path / "narrow")
    arguments, quantized = ["--batch", "1", "--length", "8"], ["--quantization", "fp8"]
    message = f"{model}: no layer of the model runs in float8: hidden_size 16 is not a multiple of 128"
    assert fails(capsys, "--model", model, *arguments, *quantized) == message
    message = "--dtype must be bfloat16 or float16 for a model in float8, got float32"
    assert fails(capsys, "--model", wide, *arguments, *quantized, "--dtype", "float32") == message
    for options in ([], quantized, ["--dtype", "float16"], ["--dtype", "float32"]):
        message = fails(capsys, "--model", narrow, *arguments, *options)
        assert message == f"{narrow}: is in float8; bench needs the 16-bit model, with --quantization fp8"


@pytest.mark.parametrize(("kind", "reason"), [
    ("modernbert", "norms come before attention"), ("nomic_bert", "its feed-forward network is gated"),
    ("mpnet", "its attention has a bias by relative position"),
    ("jina_embeddings_v3", "its attention has rotary positions"),
    ("albert", "its layers share one set of parameters"),
])  # fmt: skip
def test_other_layers_than_those_of_bert_are_refused(kind, reason, tmp_path, capsys):
    sizes = {"vocab_size": 40, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    config = bert.BertConfig.from_dict(sizes | {"intermediate_size": 128, "model_type": kind})
    bert.BertModel(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    for options in ([], ["--quantization", "fp8"]):
        message = fails(capsys, "--model", str(tmp_path), "--batch", "1", "--length", "8", *options)
        assert message == f"{tmp_path}: bench compares layers like BERT's only, but {reason}"


def test_float8_of_a_real_model_is_near_enough(minilm, monkeypatch):
    """The layers get hidden states such as they are trained for. Of normal numbers, the cosine is below 0.98."""
    monkeypatch.setattr(comparison, "_times", dict)
    model = bert.BertModel.from_pretrained(minilm, dtype="bfloat16")
    assert "jaxft fp8" in comparison.compare(model, 1, 8, Float8Recipe())


@pytest.mark.slow
def test_bfloat16(model, capsys):
    assert cli.main(["bench", "--model", model, "--batch", "2", "--length", "8", "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.skipif(dispatch.platform() != "cpu", reason="plain JAX lacks it on CPUs")
def test_dtype_without_plain_jax_is_an_error(model, capsys):
    arguments = ["--batch", "2", "--length", "8", "--dtype", "float16"]
    assert "plain JAX cannot run float16 here" in fails(capsys, "--model", model, *arguments)


def test_wrong_result_is_not_timed(model, tmp_path, monkeypatch, capsys):
    layer = bert.BertLayer.__call__
    monkeypatch.setattr(bert.BertLayer, "__call__", lambda *args: layer(*args) * jnp.float32(1.001))
    message = fails(capsys, "--model", model, "--batch", "1", "--length", "8", "--dtype", "float32", "-o", "out.json")
    assert message.startswith("1x8: ") and "err by" in message and "it was not timed" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_result_that_is_not_finite_is_not_timed(value, model, tmp_path, monkeypatch, capsys):
    layer = bert.BertLayer.__call__
    monkeypatch.setattr(bert.BertLayer, "__call__", lambda *args: layer(*args).at[0, 0, 0].set(value))
    message = fails(capsys, "--model", model, "--batch", "1", "--length", "8", "--dtype", "float32", "-o", "out.json")
    assert message.startswith("1x8: jaxft's hidden states") and "it was not timed" in message
    assert list(tmp_path.iterdir()) == []


def test_overflow_of_plain_jax_is_reported(model, monkeypatch, capsys):
    plain = comparison.plain_encoder
    monkeypatch.setattr(comparison, "plain_encoder", lambda *args, **options: plain(*args, **options) * jnp.inf)
    message = fails(capsys, "--model", model, "--batch", "1", "1", "--length", "8", "--dtype", "float32")
    assert message == "1x8: plain JAX's hidden states in float32 are not finite: there is nothing to compare with"


@pytest.mark.parametrize("error", [comparison.ComparisonError, *slow(jax.errors.JaxRuntimeError)])
def test_failing_case_loses_no_other(error, model, tmp_path, monkeypatch, capsys):
    compare = comparison.compare

    def limited(model, batch, length, recipe):
        if batch == 2:
            raise error("RESOURCE_EXHAUSTED: out of memory")
        return compare(model, batch, length)

    monkeypatch.setattr(comparison, "compare", limited)
    arguments = ["bench", "--model", model, "--batch", "1", "2", "3", "--length", "8", "-o", "out.json"]
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert "2x8: RESOURCE_EXHAUSTED: out of memory" in err
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["1", "3"]
    assert [case["batch"] for case in json.loads((tmp_path / "out.json").read_text())["results"]] == [1, 3]
    assert "RESOURCE_EXHAUSTED" in fails(capsys, "--model", model, "--batch", "2", "--length", "8", "-o", "none.json")
    assert not (tmp_path / "none.json").exists()


@pytest.mark.skipif(
    dispatch.platform() != "cpu", reason="a GPU's call fails itself, as in the test above, not the array that it gave"
)
def test_case_without_memory_is_reported(model, tmp_path, capsys):
    arguments = ["--batch", "1", str(2**31 - 1), "--length", "8", "--dtype", "float32", "-o", "out.json"]
    assert cli.main(["bench", "--model", model, *arguments]) == 2
    out, err = capsys.readouterr()
    assert "error: 2147483647x8: " in err.splitlines()[-1] and "memory" in err.splitlines()[-1]
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["1"]
    assert [case["batch"] for case in json.loads((tmp_path / "out.json").read_text())["results"]] == [1]


def test_unsupported_cudnn_is_left_out(model, monkeypatch, capsys, caplog):
    """A GPU is simulated, and there is no cuDNN."""
    monkeypatch.setattr(comparison, "dispatch", types.SimpleNamespace(platform=lambda: "cuda"))
    assert cli.main(["bench", "--model", model, "--batch", "2", "--length", "8", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == [
        "batch", "length", "jaxft", "xla", "speedup", "jaxft,", "blocking", "xla,", "blocking"
    ]  # fmt: skip
    (message,) = caplog.messages
    assert message.startswith("2x8: cuDNN's attention is left out: ")


def test_wrong_cudnn_result_is_left_out(model, monkeypatch, capsys, caplog):
    def encoder(params, x, attention, **options):
        y = comparison.plain_layer(params[0], x, None, attention="xla", **options)
        return plain(params[1:], y, attention="xla", **options) * (1.0 if attention == "xla" else 1.5)

    plain = comparison.plain_encoder
    monkeypatch.setattr(comparison, "plain_encoder", encoder)
    monkeypatch.setattr(comparison, "dispatch", types.SimpleNamespace(platform=lambda: "cuda"))
    assert cli.main(["bench", "--model", model, "--batch", "2", "--length", "8", "--dtype", "bfloat16"]) == 0
    assert "xla+cudnn" not in capsys.readouterr().out
    (message,) = caplog.messages
    assert "cuDNN's attention is left out: its hidden states err by" in message


@pytest.mark.parametrize(("error", "is_refused"), [(2.9, False), (3.1, True)])
def test_error_beside_that_of_plain_jax_is_limited(error, is_refused, monkeypatch):
    """The hidden states are stubbed: the error of plain JAX is 1, and one ulp is 0.5."""
    errors = iter([1.0, error])
    monkeypatch.setattr(comparison, "_error", lambda got, truth: next(errors) * np.max(np.abs(truth)))
    monkeypatch.setattr(comparison.jnp, "finfo", lambda dtype: types.SimpleNamespace(eps=0.5))
    monkeypatch.setattr(comparison, "_times", dict)
    model = bert.BertModel(tiny.config(num_hidden_layers=1), rngs=nnx.Rngs(0))
    with pytest.raises(comparison.ComparisonError) if is_refused else contextlib.nullcontext():
        assert [*comparison.compare(model, 1, 4)] == ["jaxft", "xla"]


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_plain_layers_are_those_of_the_model(activation, monkeypatch):
    monkeypatch.setattr(comparison, "_times", dict)
    config = tiny.config(num_hidden_layers=1, hidden_act=activation, layer_norm_eps=0.1, initializer_range=0.3)
    assert {*comparison.compare(bert.BertModel(config, rngs=nnx.Rngs(0)), 2, 8)} == {"jaxft", "xla"}


@pytest.mark.parametrize("whole", [False, True])
def test_plain_layers_mask_lengths_and_drop_two_outputs(whole):
    """A row of padding changes no other row, and `drop` gets the outputs of attention and of the network."""
    config = tiny.config(num_hidden_layers=1)
    layer = bert.BertModel(config, rngs=nnx.Rngs(0)).layers[0]
    p = nnx.to_pure_dict(nnx.state(layer))
    options = {"heads": config.num_attention_heads, "activation": "gelu", "epsilon": 1e-12, "attention": "xla"}
    x = jax.random.normal(jax.random.key(0), (1, 6, config.hidden_size))
    lengths = None if whole else jnp.array([4])
    y = comparison.plain_layer(p, x, lengths, **options)
    other = comparison.plain_layer(p, x.at[:, 4:].set(9.0), lengths, **options)
    assert bool(jnp.allclose(y[:, :4], other[:, :4], atol=1e-5)) != whole
    zero = comparison.plain_layer(p, x, lengths, **options, drop=jnp.zeros_like)
    norms = (p["attention_norm_gamma"], p["attention_norm_beta"]), (p["ffn_norm_gamma"], p["ffn_norm_beta"])
    expected = functools.reduce(lambda x, norm: comparison.plain_layer_norm(x, *norm, 1e-12), norms, x)
    np.testing.assert_allclose(zero, expected, atol=1e-6)


def test_float8_is_that_of_the_recipe(monkeypatch):
    seen, quantize = [], comparison.quantize
    monkeypatch.setattr(comparison, "_times", dict)
    monkeypatch.setattr(comparison, "quantize", lambda *arguments: seen.append(arguments) or quantize(*arguments))
    config = tiny.config(num_hidden_layers=1, hidden_size=128, intermediate_size=128, initializer_range=0.05)
    model, recipe = bert.BertModel(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), Float8Recipe(activation_scale=2.0)
    calls = comparison.compare(model, 1, 8, recipe)
    assert seen == [(model, recipe)]
    assert (calls["jaxft fp8"]() != calls["jaxft"]()).any()


def test_float8_of_another_direction_is_not_timed(monkeypatch):
    def shifted(model, recipe):
        """Adds 1 to normalised hidden states: their cosine with what they were is 0.71."""
        other = nnx.clone(model)
        other.layers[-1].ffn_norm_beta.set_value(jnp.ones_like(other.layers[-1].ffn_norm_beta[...]))
        return other

    monkeypatch.setattr(comparison, "quantize", shifted)
    model = bert.BertModel(tiny.config(num_hidden_layers=1), rngs=nnx.Rngs(0))
    with pytest.raises(comparison.ComparisonError, match=r"in float8 have a cosine of 0\.7\d+; they were not timed"):
        comparison.compare(model, 1, 8, Float8Recipe())


def test_times_are_medians(monkeypatch):
    """A call that is queued takes 2 us (b: 3 us), one time in nine a second. A call alone takes 10 us more."""
    counts, rounds = set(), itertools.count()

    def queued_us(call, count):
        counts.add(count)
        outlier = 1e6 if count > 3 and next(rounds) % 9 == 4 else 0.0
        return call() + outlier + 10 * (count == 1)

    monkeypatch.setattr(comparison.profiler, "queued_us", queued_us)
    monkeypatch.setattr(comparison, "_ROUNDS", 9)
    monkeypatch.setattr(comparison, "_ROUND_SECONDS", 1e-4)
    found = comparison._times({"a": lambda: 2.0, "b": lambda: 3.0})
    assert found == {"a": comparison.Times(2.0, 12.0), "b": comparison.Times(3.0, 13.0)}
    assert counts == {2, 3, 50, 34, 1}  # to compile, to estimate, for 100 us, and alone


def test_speedup_is_that_of_float8_if_timed():
    us = {"jaxft": 10.0, "xla": 40.0, "jaxft fp8": 5.0, "xla+cudnn": 20.0}
    (line,) = comparison.table([(1, 8)], [{name: comparison.Times(x, x) for name, x in us.items()}])[1:]
    assert line.split()[6] == "4.00x"


def test_table_shows_cases_without_cudnn(tmp_path):
    both = {name: comparison.Times(us, 2 * us) for name, us in (("jaxft", 10.0), ("xla", 30.0))}
    all_three = both | {"xla+cudnn": comparison.Times(20.0, 40.0)}
    cases, times = [(1, 128), (2, 128)], [both, all_three]
    lines = [line.split() for line in comparison.table(cases, times)[1:]]
    assert lines == [["1", "128", "10.0", "30.0", "-", "3.00x", "20.0", "60.0", "-"],
                     ["2", "128", "10.0", "30.0", "20.0", "2.00x", "20.0", "60.0", "40.0"]]  # fmt: skip
    with (tmp_path / "out.png").open("wb") as file:
        comparison.draw(cases, times, "title", file)


def test_bad_arguments(model, tmp_path, monkeypatch, capsys):
    assert fails(capsys, "--model", model, "-o", "out.txt") == "output 'out.txt' must end in .json"
    assert fails(capsys, "--model", model, "--chart", "out.jpg") == "chart 'out.jpg' must end in .png"
    assert fails(capsys, "--model", model, "--length", "65") == "length 65: the model takes at most 64"
    assert "neither an existing folder" in fails(capsys, "--model", "no/such/model", "-o", "out.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'jaxft[plot]'" in fails(capsys, "--model", model, "--chart", "out.png")
    with pytest.raises(SystemExit):
        cli.main(["bench", "--model", model, "--batch", "0"])
    assert list(tmp_path.iterdir()) == []
