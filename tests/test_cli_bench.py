"""`jaxft bench` compares an encoder with plain JAX."""

import importlib.util
import json
import types

import jax
import jax.numpy as jnp
import pytest

import tiny
from cases import slow
from jaxft import cli, comparison, dispatch
from jaxft.models import bert


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
    arguments = ["--batch", "1", str(10**12), "--length", "8", "--dtype", "float32", "-o", "out.json"]
    assert cli.main(["bench", "--model", model, *arguments]) == 2
    out, err = capsys.readouterr()
    assert "error: 1000000000000x8: " in err.splitlines()[-1] and "memory" in err.splitlines()[-1]
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
