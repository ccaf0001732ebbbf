"""The choice of an op's implementation, and its log messages."""

import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import dispatch

AMPERE, TURING = ("NVIDIA A100", (8, 0)), ("NVIDIA T4", (7, 5))
CPU, TPU = dispatch.Device("cpu", "cpu", None), dispatch.Device("tpu", "TPU v6e", None)
H200 = dispatch.Device("cuda", "NVIDIA H200", (9, 0), 132, 227 * 1024)


@pytest.fixture(autouse=True)
def fresh_log(caplog):
    caplog.set_level(logging.INFO, logger="jaxft")
    dispatch.log_once.cache_clear()
    yield
    dispatch.log_once.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Replaces the attached device."""

    def use(device):
        monkeypatch.setattr(dispatch, "device", lambda: device)

    return use


@pytest.mark.parametrize("other", [CPU, TPU, dispatch.Device("rocm", "MI300X", None)], ids=lambda d: d.kind)
def test_other_devices_take_xla_silently(other, machine, caplog):
    machine(other)
    assert dispatch.choose("softmax", None, {"triton": None})[:2] == ("xla", False)
    assert dispatch.choose("softmax", None, {"triton": "too wide"})[:2] == ("xla", False)
    assert caplog.messages == []
    assert dispatch.choose("softmax", None, {"triton": None}).why == f"kernels need an NVIDIA GPU, this is {other.kind}"


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_attached_gpu_is_described():
    machine = dispatch.device()
    assert (machine.platform, machine.kind) == ("cuda", jax.devices()[0].device_kind)
    assert machine.compute_capability >= (7, 0) and 0 < machine.multiprocessors < 1000
    assert 48 * 1024 <= machine.shared_memory <= 256 * 1024
    if machine.kind == "NVIDIA H200":
        assert machine == H200


def test_nvidia_takes_the_first_supported_implementation(caplog):
    with dispatch.target():
        assert dispatch.choose("dense", None, {"mosaic_gpu": None, "triton": None})[:2] == ("mosaic_gpu", False)
        assert dispatch.choose("dense", None, {"mosaic_gpu": "odd", "triton": None})[:2] == ("triton", False)
        assert dispatch.choose("dense", None, {})[:2] == ("xla", False)
    assert caplog.messages == []
    with dispatch.target(*AMPERE):
        assert dispatch.choose("dense", None, {"mosaic_gpu": None, "triton": None})[:2] == ("triton", False)


def test_fallback_is_logged_once_per_reason(caplog):
    with dispatch.target():
        for _ in range(3):
            assert dispatch.choose("softmax", None, {"triton": "it is too wide"})[:2] == ("xla", False)
        assert caplog.messages == ["softmax falls back to XLA (triton: it is too wide)"]
        dispatch.choose("softmax", None, {"triton": "it is too long"})
        dispatch.choose("dense", None, {"triton": "it is too wide"})
        assert len(caplog.messages) == 3
        assert dispatch.choose("permute", None, {"triton": "no"}).why == "triton: no"
    assert {record.name for record in caplog.records} == {"jaxft"}


def test_old_card_falls_back_to_xla(caplog):
    with dispatch.target(*TURING):
        assert dispatch.choose("softmax", None, {"triton": None})[:2] == ("xla", False)
    assert caplog.messages == ["softmax falls back to XLA (triton: it needs compute capability 8.0, NVIDIA T4 has 7.5)"]


@pytest.mark.parametrize("name", ["Triton", "cuda", "", "pallas"])
def test_unknown_name_is_refused(name):
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
def test_unsupported_named_implementation_raises(name, reasons, device, parts, machine, caplog):
    machine(device)
    with pytest.raises(NotImplementedError) as error:
        dispatch.choose("attention", name, reasons)
    for part in ("attention", *parts):
        assert part in str(error.value)
    assert caplog.messages == []


def test_supported_named_implementation_is_used(machine):
    assert dispatch.choose("softmax", "xla", {"triton": None})[:2] == ("xla", False)
    machine(H200)
    for name in ("triton", "cudnn", "mosaic_gpu", "xla"):
        reasons = dict.fromkeys(("triton", "cudnn", "mosaic_gpu"))
        assert dispatch.choose("softmax", name, reasons)[:2] == (name, False)


def test_triton_on_a_cpu_is_interpreted(machine, caplog):
    machine(CPU)
    for _ in range(2):
        assert dispatch.choose("softmax", "triton", {"triton": None})[:2] == ("triton", True)
    (message,) = caplog.messages
    assert "softmax" in message and "interpret" in message


def test_target_replaces_the_device_in_its_context():
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


def test_default_device_is_used():
    cpu = jax.devices("cpu")[0]
    for default in (cpu, "cpu"):
        with jax.default_device(default):
            assert dispatch.device() == CPU
            assert dispatch.choose("softmax", None, {"triton": None})[:2] == ("xla", False)


@pytest.mark.parametrize(
    ("capability", "kib"), [((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227)]
)
def test_compute_capability_gives_shared_memory(capability, kib):
    with dispatch.target("a card", capability):
        assert dispatch.device().shared_memory == kib * 1024
    with dispatch.target("a card", capability, shared_memory=12345):
        assert dispatch.device().shared_memory == 12345


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({"shared_memory_per_block_optin": 166912}, 166912), ({}, 99 * 1024)],
    ids=["told", "untold"],
)
def test_attached_card_tells_its_shared_memory(facts, expected):
    client = types.SimpleNamespace(platform_version="CUDA 13")
    card = types.SimpleNamespace(
        platform="gpu", client=client, device_kind="a card", compute_capability="8.6", core_count=28, **facts
    )
    assert dispatch._describe.__wrapped__(card) == dispatch.Device("cuda", "a card", (8, 6), 28, expected)


@pytest.mark.parametrize("setting", [None, "default", "tensorfloat32", "highest", "float32"])
def test_matmul_precision_follows_jax(setting):
    with jax.default_matmul_precision(setting):
        assert dispatch.matmul_precision() == ("float32" if setting in ("highest", "float32") else "tf32")


@pytest.mark.parametrize("preset", list(jax.lax.DotAlgorithmPreset), ids=str)
def test_presets_keep_their_digits(preset):
    """A preset with more digits than TF32 computes in float32."""
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
def test_higher_precision_of_two_operands_wins(precision, expected):
    assert dispatch.matmul_precision(precision) == expected


def test_choosing_works_under_a_trace():
    @jax.jit
    def f(x):
        return x if dispatch.choose("softmax", None, {"triton": None}).name == "xla" else 2.0 * x

    with jax.default_device(jax.devices("cpu")[0]):
        assert f(jnp.ones(())) == 1.0


@pytest.mark.parametrize("is_gpu", [False, True])
def test_results_are_put_on_the_host_for_an_nvidia_gpu(is_gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda" if is_gpu else "cpu")
    monkeypatch.setattr(dispatch, "_MOST_ON_HOST", 12)
    traced = jax.make_jaxpr(lambda x: dispatch.on_host((x[:3], x[:4])))(jnp.ones(4))
    assert [x.memory_space == jax.memory.Space.Host for x in traced.out_avals] == [is_gpu, False]  # 12 and 16 bytes
