"""Which machine this is, and which implementation of an op it gets. The only file that asks either question."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

logger = logging.getLogger("jaxft")

#: Every implementation that an op of jaxft may have. "xla" is `jaxft.reference`, compiled by XLA.
IMPLEMENTATIONS = ("triton", "mosaic_gpu", "cudnn", "xla")

#: `jax.export.export(..., disabled_checks=jaxft.EXPORT_DISABLED_CHECKS)` accepts the custom calls behind the Triton
#: kernels and cuDNN, which JAX does not promise to keep stable: import such a program with the JAX version that
#: exported it.
EXPORT_DISABLED_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in ("__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
)


class Device(NamedTuple):
    platform: str  # "cuda", "rocm", "cpu", "tpu", ...
    kind: str  # "NVIDIA H200", "cpu", ...
    compute_capability: tuple[int, int] | None  # of NVIDIA devices
    multiprocessors: int = 132  # of an H100 or H200; what a real device says wins
    shared_memory: int = 99 * 1024  # bytes that a thread block may have

    @property
    def is_hopper(self) -> bool:
        return self.compute_capability == (9, 0)

    @property
    def is_after_hopper(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= (10, 0)


class Choice(NamedTuple):
    name: str
    interpret: bool  # run a Pallas kernel in interpret mode


_target: contextvars.ContextVar[Device | None] = contextvars.ContextVar("jaxft_target", default=None)


@contextlib.contextmanager
def target(
    kind: str = "NVIDIA H200",
    compute_capability: tuple[int, int] = (9, 0),
    multiprocessors: int = 132,
    shared_memory: int | None = None,
) -> Iterator[None]:
    """Within this context, ops are traced for that NVIDIA device instead of the one that is attached.

    For lowering or exporting a program for a GPU on a machine without one. It changes what jaxft chooses, not where
    JAX runs; trace a new function inside it, since `jax.jit` returns what it traced before. Launch configurations
    depend on the number of `multiprocessors` and on the `shared_memory` in bytes that a thread block may have (None:
    the limit that the CUDA programming guide gives for the compute capability).
    """
    if shared_memory is None:
        shared_memory = _shared_memory(compute_capability)
    token = _target.set(Device("cuda", kind, compute_capability, multiprocessors, shared_memory))
    try:
        yield
    finally:
        _target.reset(token)


def device() -> Device:
    """The device that ops are traced for: the `target`, else JAX's default device."""
    chosen = _target.get()
    if chosen is not None:
        return chosen
    # None, a platform's name, or a device.
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return _describe(default if hasattr(default, "platform") else jax.devices(default)[0])


@functools.lru_cache
def _describe(device: jax.Device) -> Device:
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    if platform != "cuda":
        return Device(platform, device.device_kind, None)
    major, minor = map(int, str(device.compute_capability).split("."))
    shared_memory = getattr(device, "shared_memory_per_block_optin", None) or _shared_memory((major, minor))
    return Device(platform, device.device_kind, (major, minor), device.core_count, shared_memory)


def platform() -> str:
    return device().platform


def device_kind() -> str:
    return device().kind


def _shared_memory(compute_capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a thread block may have (CUDA C++ Programming Guide, compute capabilities)."""
    kib = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return kib.get(compute_capability, 99) * 1024


# Settings of JAX's that ask for more digits than TF32 has.
_AS_FLOAT32 = (
    "highest", "float32", "f32_f32_f32", "tf32_tf32_f32_x3", "bf16_bf16_f32_x3", "bf16_bf16_f32_x6", "bf16_bf16_f32_x9",
    "f64_f64_f64",
)  # fmt: skip


def matmul_precision(precision: Any = None) -> str:
    """How a Pallas kernel computes float32 matrix products: "tf32", or "float32" where the caller or JAX is told so."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    settings = precision if type(precision) is tuple else (precision,)  # one for each operand; the higher one counts
    return "float32" if any(_above_tf32(default if s is None else s) for s in settings) else "tf32"


def _above_tf32(setting: Any) -> bool:
    if isinstance(setting, jax.lax.DotAlgorithm):
        kinds = setting.lhs_precision_type, setting.rhs_precision_type
        return setting.num_primitive_operations > 1 or any(np.dtype(kind).itemsize > 2 for kind in kinds)
    name = getattr(setting, "name", setting)  # of a jax.lax.Precision or DotAlgorithmPreset
    return str(name).lower() in _AS_FLOAT32


def choose(op: str, implementation: str | None, reasons: Mapping[str, str | None]) -> Choice:
    """The implementation to run.

    Args:
      op: the op's name, for messages.
      implementation: what the user asked for; None for the fastest that this device and this case support.
      reasons: the implementations that the op has, the preferred first, each with why it cannot do this case (None if
        it can). "xla" is always there.

    Raises:
      ValueError: `implementation` is not one of `IMPLEMENTATIONS`.
      NotImplementedError: it is, but the op has no such implementation, or the device or the case is not supported.
    """
    reasons = {**reasons, "xla": None}
    if implementation is None:
        return Choice(_fastest(op, reasons)[0], interpret=False)
    check_name(op, implementation)
    if implementation not in reasons:
        raise NotImplementedError(f"{op}: there is no {implementation!r} implementation, only {tuple(reasons)}")
    machine = device()
    interpret = implementation == "triton" and machine.platform == "cpu"
    reason = reasons[implementation] or (None if interpret else _machine_reason(implementation, machine))
    if reason is not None:
        raise NotImplementedError(f"{op}: implementation {implementation!r} cannot be used: {reason}")
    if interpret:
        _log_once(
            f"{op}: the Triton kernel runs in Pallas' interpret mode on this CPU, which is for tests, not for speed"
        )
    return Choice(implementation, interpret)


def check_name(op: str, implementation: Any) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def explain(op: str, reasons: Mapping[str, str | None]) -> tuple[str, str]:
    """What `choose(op, None, reasons)` gives on this machine, and why."""
    return _fastest(op, {**reasons, "xla": None}, log=False)


def _fastest(op: str, reasons: Mapping[str, str | None], log: bool = True) -> tuple[str, str]:
    machine = device()
    if reasons.keys() == {"xla"}:
        return "xla", "the only implementation"
    if machine.platform != "cuda":
        return "xla", f"kernels need an NVIDIA GPU, this is {machine.kind}"
    rejected = []
    for name, reason in reasons.items():
        reason = reason or _machine_reason(name, machine)
        if reason is None and name != "xla":
            return name, f"the fastest for {machine.kind}"
        if reason is not None:
            rejected.append(f"{name}: {reason}")
    why = "; ".join(rejected)
    if log:
        _log_once(f"{op} falls back to XLA ({why})")
    return "xla", why


def _machine_reason(name: str, machine: Device) -> str | None:
    needed = {"triton": (8, 0), "cudnn": (8, 0), "mosaic_gpu": (9, 0)}.get(name)
    if needed is None:
        return None
    have = machine.compute_capability
    if have is None:
        return f"it needs an NVIDIA GPU, this is {machine.kind}"
    only = name == "mosaic_gpu"  # the instructions of Hopper's matrix units are on no other card
    if have < needed or (only and have[0] > needed[0]):
        which = f"{needed[0]}.{needed[1]}{' and no later one' if only else ''}"
        return f"it needs compute capability {which}, {machine.kind} has {have[0]}.{have[1]}"
    return None


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)
