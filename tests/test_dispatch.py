"""Which implementation an op gets, and what is said about it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import dispatch

AMPERE, TURING = ("NVIDIA A100", (8, 0)), ("NVIDIA T4", (7, 5))
CPU, TPU = dispatch.Device("cpu", "cpu", None), dispatch.Device("tpu", "TPU v6e", None)
H200 = dispatch.Device("cuda", "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def fresh_log(caplog):
    caplog.set_level(logging.INFO, logger="jaxft")
    dispatch._log_once.cache_clear()
    yield
    dispatch._log_once.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Replaces the attached device."""

    def use(device):
        monkeypatch.setattr(dispatch, "device", lambda: device)

    return use


@pytest.mark.parametrize("other", [CPU, TPU, dispatch.Device("rocm", "MI300X", None)], ids=lambda d: d.kind)
def test_automatic_elsewhere_is_xla_and_says_nothing(other, machine, caplog):
    machine(other)
    assert dispatch.choose("softmax", None, {"triton": None}) == ("xla", False)
    assert dispatch.choose("softmax", None, {"triton": "too wide"}) == ("xla", False)
    assert caplog.messages == []
    assert dispatch.explain("softmax", {"triton": None}) == ("xla", f"kernels need an NVIDIA GPU, this is {other.kind}")


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_the_device_that_is_attached():
    machine = dispatch.device()
    assert (machine.platform, machine.kind) == ("cuda", jax.devices()[0].device_kind)
    assert machine.compute_capability >= (7, 0) and 0 < machine.multiprocessors < 1000
    if machine.kind == "NVIDIA H200":
        assert machine == H200


def test_automatic_on_nvidia_takes_the_first_that_can(caplog):
    with dispatch.target():
        assert dispatch.choose("dense", None, {"mosaic_gpu": None, "triton": None}) == ("mosaic_gpu", False)
        assert dispatch.choose("dense", None, {"mosaic_gpu": "odd", "triton": None}) == ("triton", False)
        assert dispatch.choose("dense", None, {}) == ("xla", False)
    assert caplog.messages == []
    with dispatch.target(*AMPERE):
        assert dispatch.choose("dense", None, {"mosaic_gpu": None, "triton": None}) == ("triton", False)


def test_automatic_falls_back_and_says_so_once_for_each_op_and_reason(caplog):
    with dispatch.target():
        for _ in range(3):
            assert dispatch.choose("softmax", None, {"triton": "it is too wide"}) == ("xla", False)
        assert caplog.messages == ["softmax falls back to XLA (triton: it is too wide)"]
        dispatch.choose("softmax", None, {"triton": "it is too long"})
        dispatch.choose("dense", None, {"triton": "it is too wide"})
        assert len(caplog.messages) == 3
        assert dispatch.explain("permute", {"triton": "no"}) == ("xla", "triton: no")
        assert len(caplog.messages) == 3  # explaining is not falling back
    assert {record.name for record in caplog.records} == {"jaxft"}


def test_automatic_falls_back_on_an_old_card(caplog):
    with dispatch.target(*TURING):
        assert dispatch.choose("softmax", None, {"triton": None}) == ("xla", False)
    assert caplog.messages == ["softmax falls back to XLA (triton: it needs compute capability 8.0, NVIDIA T4 has 7.5)"]


@pytest.mark.parametrize("name", ["Triton", "cuda", "", "pallas"])
def test_an_unknown_name(name):
    with pytest.raises(ValueError) as error:
        dispatch.choose("softmax", name, {"triton": None})
    for part in ("softmax", repr(name), *dispatch.IMPLEMENTATIONS):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "reasons", "device", "parts"),
    [
        ("cudnn", {"triton": None}, CPU, ["'cudnn'", "'triton'", "'xla'"]),  # the op has none
        ("triton", {"triton": "head size 512 is above 256"}, CPU, ["'triton'", "head size 512 is above 256"]),
        ("triton", {"triton": "no"}, H200, ["'triton'", "no"]),
        ("triton", {"triton": None}, dispatch.Device("cuda", *TURING), ["8.0", "NVIDIA T4", "7.5"]),
        ("triton", {"triton": None}, TPU, ["NVIDIA GPU", "TPU v6e"]),
        ("mosaic_gpu", {"mosaic_gpu": None}, dispatch.Device("cuda", *AMPERE), ["9.0", "NVIDIA A100", "8.0"]),
        ("mosaic_gpu", {"mosaic_gpu": None}, dispatch.Device("cuda", "NVIDIA B200", (10, 0)), ["no later one", "10.0"]),
        ("cudnn", {"cudnn": None}, CPU, ["NVIDIA GPU", "cpu"]),
    ],
)
def test_a_named_implementation_that_cannot_run(name, reasons, device, parts, machine, caplog):
    machine(device)
    with pytest.raises(NotImplementedError) as error:
        dispatch.choose("attention", name, reasons)
    for part in ("attention", *parts):
        assert part in str(error.value)
    assert caplog.messages == []


def test_a_named_implementation_is_used(machine):
    assert dispatch.choose("softmax", "xla", {"triton": None}) == ("xla", False)
    machine(H200)
    for name in ("triton", "cudnn", "mosaic_gpu", "xla"):
        assert dispatch.choose("softmax", name, {"triton": None, "cudnn": None, "mosaic_gpu": None}) == (name, False)


def test_a_named_triton_on_a_cpu_is_interpreted_and_says_so_once(machine, caplog):
    machine(CPU)
    for _ in range(2):
        assert dispatch.choose("softmax", "triton", {"triton": None}) == ("triton", True)
    (message,) = caplog.messages
    assert "softmax" in message and "interpret" in message


def test_target_replaces_the_device_within_its_context_only():
    before = dispatch.device()
    with dispatch.target():
        assert dispatch.device() == H200
        with dispatch.target(*AMPERE):
            assert (dispatch.platform(), dispatch.device_kind()) == ("cuda", "NVIDIA A100")
        assert dispatch.device_kind() == "NVIDIA H200"
        with pytest.raises(RuntimeError), dispatch.target(*TURING):
            raise RuntimeError
        assert dispatch.device_kind() == "NVIDIA H200"
    assert dispatch.device() == before


def test_the_default_device_counts():
    cpu = jax.devices("cpu")[0]
    for default in (cpu, "cpu"):
        with jax.default_device(default):
            assert dispatch.device() == CPU
            assert dispatch.choose("softmax", None, {"triton": None}) == ("xla", False)


@pytest.mark.parametrize("setting", [None, "default", "tensorfloat32", "highest", "float32"])
def test_matmul_precision_follows_jax(setting):
    with jax.default_matmul_precision(setting):
        assert dispatch.matmul_precision() == ("float32" if setting in ("highest", "float32") else "tf32")


@pytest.mark.parametrize("preset", list(jax.lax.DotAlgorithmPreset), ids=str)
def test_no_preset_gives_less_than_it_says(preset):
    """Float32 wherever digits are asked for that TF32 has not."""
    less = ("TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_BF16", "DEFAULT")
    less += ("F16_F16_F16", "F16_F16_F32")
    expected = "tf32" if preset.name in less or preset.name.startswith("ANY_F8") else "float32"
    assert dispatch.matmul_precision(preset) == expected


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (("default", "highest"), "float32"),
        ((jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT), "float32"),
        (("default", "default"), "tf32"),
        (jax.lax.DotAlgorithm(np.float32, np.float32, np.float32), "float32"),
        (jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32, num_primitive_operations=3), "float32"),
        (jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32), "tf32"),
    ],
    ids=str,
)
def test_the_higher_precision_of_two_operands_counts(precision, expected):
    assert dispatch.matmul_precision(precision) == expected


def test_choosing_works_under_a_trace():
    @jax.jit
    def f(x):
        return x if dispatch.choose("softmax", None, {"triton": None}).name == "xla" else 2.0 * x

    with jax.default_device(jax.devices("cpu")[0]):
        assert f(jnp.ones(())) == 1.0
