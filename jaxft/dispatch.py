"""Detection of the device, and the choice of an implementation for each op. No other module does either."""

import contextlib
import contextvars
import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger("jaxft")

#: All implementations that an op of jaxft may have. "xla" is `jaxft.reference`, compiled by XLA.
IMPLEMENTATIONS = ("triton", "mosaic_gpu", "cudnn", "xla")

#: `jax.export.export(..., disabled_checks=jaxft.EXPORT_DISABLED_CHECKS)` accepts the custom calls behind the Triton
#: kernels, the Mosaic GPU kernels (which JAX accepts anyway, from 0.10.2 to 0.12) and cuDNN. JAX does not promise to
#: keep the others stable, so import such a program with the JAX version that exported it. A process that runs Mosaic
#: GPU kernels must import `jax.experimental.mosaic.gpu`.
EXPORT_DISABLED_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
)


class Device(NamedTuple):
    """Properties of the device that ops are traced for."""

    platform: str  # "cuda", "rocm", "cpu", "tpu", ...
    kind: str  # "NVIDIA H200", "cpu", ...
    compute_capability: tuple[int, int] | None  # None if not an NVIDIA device
    multiprocessors: int = 132  # number of SMs; the default is an H100 or H200
    shared_memory: int = 99 * 1024  # bytes that a thread block may use

    @property
    def is_hopper(self) -> bool:
        """Returns whether the device is a Hopper GPU (compute capability 9.0)."""
        return self.compute_capability == (9, 0)

    @property
    def is_after_hopper(self) -> bool:
        """Returns whether the device is an NVIDIA GPU of a generation after Hopper."""
        return self.compute_capability is not None and self.compute_capability >= (10, 0)


class Choice(NamedTuple):
    """Implementation that `choose` picked."""

    name: str
    interpret: bool  # run a Pallas kernel in interpret mode
    why: str = ""  # why other implementations were not chosen, for messages
    by_name: bool = False  # whether the user named it


# JAX's caches of traces depend on it, as they depend on the default device.
_target = jax.make_user_context(None)

#: True while `explain` traces: it runs nothing, so it does not log what falls back.
quiet: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxft_quiet", default=False)


@contextlib.contextmanager
def target(
    kind: str = "NVIDIA H200",
    compute_capability: tuple[int, int] = (9, 0),
    multiprocessors: int = 132,
    shared_memory: int | None = None,
) -> Iterator[None]:
    """Context in which ops are traced for the given NVIDIA device instead of the attached device.

    Use it to lower or export a program for a GPU on a machine without one. The context changes what jaxft chooses, but
    not where JAX runs.

    Args:
      kind: name of the device.
      compute_capability: (major, minor).
      multiprocessors: number of SMs. Launch configurations depend on it.
      shared_memory: bytes of shared memory that a thread block may use. Launch configurations depend on it. None is the
        limit that the CUDA programming guide gives for the compute capability.
    """
    if shared_memory is None:
        shared_memory = _shared_memory(compute_capability)
    with _target(Device("cuda", kind, compute_capability, multiprocessors, shared_memory)):
        yield


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Context in which JAX lowers kernels for the `target`. Without a target it changes nothing.

    Raises a NotImplementedError if JAX, before 0.11, cannot lower for it.
    """
    if _target.value is None:
        yield
        return
    if jax.__version_info__ < (0, 11):
        _, kind, wanted, *_ = _target.value
        there = _describe(default_device()).compute_capability or (9, 0)  # Hopper where JAX finds no GPU
        if wanted != there:
            raise NotImplementedError(
                f"JAX {jax.__version__} lowers kernels for compute capability {there} here, {kind} has {wanted};"
                " JAX 0.11 lowers for other GPUs"
            )
        yield
        return
    kind = jax.sharding.AbstractDevice(device_kind=_target.value.kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def device() -> Device:
    """Returns the device that ops are traced for: the `target`, else JAX's default device."""
    if _target.value is not None:
        return _target.value
    return _describe(default_device())


def work_devices(*, many: bool) -> list[jax.Device]:
    """Returns the devices that compute by default, or an empty list where JAX computes if nothing says otherwise.

    These are JAX's default device where one is set, otherwise all GPUs of this process if there are `many` batches. If
    the GPUs differ in kind, only the GPUs of the first one's kind are returned.
    """
    if jax.config.jax_default_device is not None:  # type: ignore[attr-defined]
        return [default_device()]
    if not many or platform() not in ("cuda", "rocm"):
        return []
    first, *others = jax.local_devices()
    return [first, *(other for other in others if _describe(other) == _describe(first))]


def named_devices(where: str, devices: Any) -> list[jax.Device]:
    """Returns the devices that an argument `devices` names.

    Each is a device of JAX or an index into `jax.local_devices()`. Raises a ValueError or a TypeError for others, and
    for devices of several kinds.
    """
    known = jax.local_devices()
    items = [devices] if isinstance(devices, jax.Device | int | np.integer) else devices
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise TypeError(f"{where}: devices must be a list of devices of JAX or of their indices, got {devices!r:.80}")
    found = []
    for item in items:
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not 0 <= item < len(known):
                raise ValueError(f"{where}: devices must be indices below {len(known)}, the number here, got {item}")
            item = known[item]
        if not isinstance(item, jax.Device):
            raise TypeError(f"{where}: devices must be devices of JAX or their indices, got {item!r:.80}")
        if item.process_index != jax.process_index(item.client):
            raise ValueError(f"{where}: devices must belong to this process, got {item}")
        found.append(item)
    if not found or len({*found}) < len(found) or len({*map(_describe, found)}) > 1:
        raise ValueError(f"{where}: devices must be one or more different devices of one kind, got {devices!r:.200}")
    return found


def homes(arrays: Iterable[Any]) -> set[jax.Device]:
    """Returns the devices where arrays are. NumPy arrays are on no device."""
    return {home for x in arrays if isinstance(x, jax.Array) for home in x.devices()}


def default_device() -> jax.Device:
    """Returns JAX's default device."""
    # `default` is None, the name of a platform, or a device.
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return default if hasattr(default, "platform") else jax.local_devices(backend=default)[0]


def to_device(value: np.ndarray) -> jax.Array:
    """Returns `jnp.asarray(value)`, but compiles no program for its shape unless a mesh is set."""
    return jax.device_put(value) if jax.sharding.get_abstract_mesh().empty else jnp.asarray(value)


_MOST_ON_HOST = 1 << 25  # bytes of an array; several batches are in flight, and XLA does not give pinned memory back


def on_host(results: Any) -> Any:
    """Puts arrays, results of a traced function, into the host's memory, if they are traced for an NVIDIA GPU.

    The program then writes them there itself, which saves a copy after the program. Large arrays stay on the device.
    """
    # H200, one query, MiniLM, from the text to the NumPy array: 0.77 ms (1.22 with a copy), 2026-11-28
    # See docs/performance-notes.md, "The host's time for a query".
    if platform() != "cuda":
        return results
    host = jax.memory.Space.Host
    return jax.tree.map(lambda x: jax.device_put(x, host) if x.nbytes <= _MOST_ON_HOST else x, results)


@contextlib.contextmanager
def traced_for(device: jax.Device | None) -> Iterator[None]:
    """Context in which ops are traced for a device. It changes nothing if they are traced for such a device anyway."""
    if device is None or _target.value is not None or _describe(device) == _describe(default_device()):
        yield
        return
    with jax.default_device(device):
        yield


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
    """Returns the platform of the device that ops are traced for, for example "cuda"."""
    return device().platform


def device_kind() -> str:
    """Returns the name of the device that ops are traced for, for example "NVIDIA H200"."""
    return device().kind


def _shared_memory(compute_capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a thread block may use, by the CUDA C++ Programming Guide."""
    kib = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return kib.get(compute_capability, 99) * 1024


# Settings of JAX that request more precision than TF32 has.
_AS_FLOAT32 = (
    "highest", "float32", "f32_f32_f32", "tf32_tf32_f32_x3", "bf16_bf16_f32_x3", "bf16_bf16_f32_x6", "bf16_bf16_f32_x9",
    "f64_f64_f64",
)  # fmt: skip


def matmul_precision(precision: Any = None) -> str:
    """Returns how a Pallas kernel computes float32 matmuls, "tf32" or "float32". None takes JAX's setting."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    settings = precision if type(precision) is tuple else (precision,)  # one for each operand; the higher one counts
    return "float32" if any(_above_tf32(default if s is None else s) for s in settings) else "tf32"


def _above_tf32(setting: Any) -> bool:
    if isinstance(setting, jax.lax.DotAlgorithm):
        kinds = setting.lhs_precision_type, setting.rhs_precision_type
        return setting.num_primitive_operations > 1 or any(np.dtype(kind).itemsize > 2 for kind in kinds)
    name = getattr(setting, "name", setting)  # a jax.lax.Precision or DotAlgorithmPreset has a name
    return str(name).lower() in _AS_FLOAT32


def choose(op: str, implementation: str | None, reasons: Mapping[str, str | None]) -> Choice:
    """Returns the implementation to run.

    Args:
      op: the op's name, for messages.
      implementation: the one that the user named, or None for the fastest one that supports the device and the case.
      reasons: maps implementations of the op, the preferred one first, to why they do not support this case, or None.

    Raises:
      ValueError: `implementation` is not one of `IMPLEMENTATIONS`.
      NotImplementedError: the op lacks the named implementation, or it does not support the device or the case.
    """
    reasons = {**reasons, "xla": None}
    if implementation is None:
        name, why = _fastest(op, reasons)
        return Choice(name, interpret=False, why=why)
    check_name(op, implementation)
    if implementation not in reasons:
        raise NotImplementedError(f"{op}: there is no {implementation!r} implementation, only {tuple(reasons)}")
    machine = device()
    interpret = implementation == "triton" and machine.platform == "cpu" and sys.platform != "win32"  # no Triton there
    reason = reasons[implementation] or (None if interpret else machine_reason(implementation, machine))
    if reason is not None:
        raise NotImplementedError(f"{op}: implementation {implementation!r} cannot be used: {reason}")
    if interpret:
        log_once(
            f"{op}: the Triton kernel runs in Pallas' interpret mode on this CPU, which is for tests, not for speed"
        )
    return Choice(implementation, interpret, "asked for by name", by_name=True)


def check_name(op: str, implementation: Any) -> None:
    """Raises a ValueError unless `implementation` is None or one of `IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def _fastest(op: str, reasons: Mapping[str, str | None]) -> tuple[str, str]:
    """Returns the first implementation that can be used on this device, and the reasons against those before it."""
    machine = device()
    if reasons.keys() == {"xla"}:
        return "xla", "the only implementation"
    if machine.platform != "cuda":
        return "xla", f"kernels need an NVIDIA GPU, this is {machine.kind}"
    rejected: list[str] = []
    for name, reason in reasons.items():
        reason = reason or machine_reason(name, machine)
        if reason is None and name != "xla":
            return name, "; ".join(rejected)
        if reason is not None:
            rejected.append(f"{name}: {reason}")
    why = "; ".join(rejected)
    if not quiet.get():
        log_once(f"{op} falls back to XLA ({why})")
    return "xla", why


def machine_reason(name: str, machine: Device) -> str | None:
    """Returns why an implementation cannot run on this machine, or None if it can."""
    needed = {"triton": (8, 0), "cudnn": (8, 0), "mosaic_gpu": (9, 0)}.get(name)
    if needed is None:
        return None
    have = machine.compute_capability
    if have is None:
        return f"it needs an NVIDIA GPU, this is {machine.kind}"
    only = name == "mosaic_gpu"  # no other generation has Hopper's matmul instructions
    if have < needed or (only and have[0] > needed[0]):
        which = f"{needed[0]}.{needed[1]}{' and no later one' if only else ''}"
        return f"it needs compute capability {which}, {machine.kind} has {have[0]}.{have[1]}"
    return None


@functools.cache
def log_once(message: str) -> None:
    """Logs a warning, each message once."""
    logger.warning(message)
