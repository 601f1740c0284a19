"""``torch.qpu``: the device as PyTorch's own code and models ask for it, in the manner of ``torch.cuda``.

There is one device, ``qpu:0``, and one stream: launches end before they return.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from torch_qpu import _C
from torch_qpu.streams import Event, Stream, StreamContext, require_qpu

__all__ = ["Event", "Stream", "StreamContext"]  # PyTorch looks for the rest by name
MODEL_BACKENDS = ("interpreter", "emulator")
"""Backends of libqpu that are no QPUs: their times are those of a model."""

_BUS_ADDRESSES = 1 << 30
"""Bytes that the QPUs can address; what a model has, where no firmware splits the memory."""


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of the device."""

    name: str
    backend: str
    """What runs the kernels, as libqpu names it."""
    reason: str
    """Why that backend."""
    multi_processor_count: int
    """QPUs; each computes 16 elements in four clocks."""
    total_memory: int
    """Bytes: the GPU's part of the memory split, or the limit set by ``set_memory_limit``; of a model the 1 GiB of bus
    addresses."""
    is_hardware: bool
    """False for an emulator or interpreter: its times say nothing about a board."""


def init() -> None:
    """Nothing is to be initialised; memory and QPUs are opened when first used."""


def is_initialized() -> bool:
    """Always: see ``init``."""
    return True


def is_available() -> bool:
    """Whether tensors of the device can be made: libqpu has a backend here."""
    try:
        _C.backend()
    except RuntimeError:
        return False
    return not _C.in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(_C.in_bad_fork())


def device_count() -> int:
    """One."""
    return 1


def current_device() -> int:
    """Index of the one device."""
    return 0


def _index(device: Any) -> int:
    require_qpu(device)
    return 0


def set_device(device: Any) -> None:
    """Check that it is the one device. Raises RuntimeError."""
    _index(device)


class device:  # noqa: N801 (named as torch.cuda.device)
    """Context in which the device is the current one; it always is."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def get_device_name(device: Any = None) -> str:
    """Which VideoCore, and what runs its kernels."""
    return get_device_properties(device).name


def get_device_properties(device: Any = None) -> DeviceProperties:
    """What is known of the device. Raises RuntimeError when QPU_BACKEND names no backend that works."""
    _index(device)
    name, reason = _C.backend()
    report = json.loads(_C.machine_report())
    hardware = name not in MODEL_BACKENDS
    split = report["gpu_memory"]["mib"]
    total = _C.limit() or (split << 20 if split and hardware else _BUS_ADDRESSES)
    board = report["board"]["model"] or "no Raspberry Pi"
    where = f"on {board}" if hardware else "model, not measured on hardware"
    return DeviceProperties(f"VideoCore IV ({name}; {where})", name, reason, 12, total, hardware)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Generation of the VideoCore, and the revision 0: all boards' kernels are the same."""
    _index(device)
    return 4, 0


def synchronize(device: Any = None) -> None:
    """Wait for what was launched; that has ended already."""
    _index(device)


def current_stream(device: Any = None) -> torch.Stream:
    """The one stream."""
    return Stream(device)


default_stream = current_stream
stream = StreamContext


def set_stream(stream: torch.Stream) -> None:
    """Check that it is the one stream. Raises RuntimeError."""
    StreamContext(stream)


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes and numbers of the allocator: allocated by tensors, reserved from libqpu, segments, retries, failures."""
    _index(device)
    return dict(_C.memory_statistics())


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The statistics as a table for people; ``abbreviated`` leaves the numbers of segments and blocks out."""
    stats = memory_stats(device)
    limit = stats["limit_bytes"]
    lines = [
        f"{get_device_name(device)}: memory",
        f"{'':12}{'now':>12}{'at most':>12}",
        *(
            f"{name:12}{stats[f'{name}_bytes.current'] / 2**20:8.1f} MiB{stats[f'{name}_bytes.peak'] / 2**20:8.1f} MiB"
            for name in ("allocated", "reserved")
        ),
        f"limit: {f'{limit / 2**20:.1f} MiB' if limit else 'none set'}",
        f"out of memory {stats['out_of_memory']} times, after {stats['retries']} retries",
    ]
    if not abbreviated:
        lines += [
            f"{stats['segments.current']} segments of {stats['segments.allocated']} that were taken,"
            f" {stats['blocks.free']} free blocks",
            f"{stats['allocations']} allocations, {stats['frees']} given back",
        ]
    return "\n".join(lines)


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors hold."""
    return memory_stats(device)["allocated_bytes.current"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors held since the start or ``reset_peak_memory_stats``."""
    return memory_stats(device)["allocated_bytes.peak"]


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from libqpu, for tensors and kept for later ones."""
    return memory_stats(device)["reserved_bytes.current"]


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes taken from libqpu."""
    return memory_stats(device)["reserved_bytes.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin the peaks anew."""
    _index(device)
    _C.reset_peaks()


def empty_cache() -> None:
    """Give the memory back that no tensor uses."""
    _C.release_cached()


def set_memory_limit(limit: int) -> None:
    """Let the device hold no more than ``limit`` bytes; 0 for what libqpu gives."""
    if limit < 0:
        raise ValueError(f"set_memory_limit: expected bytes, 0 or more, found {limit}")
    _C.set_limit(limit)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, kept ones among them, and all."""
    total = get_device_properties(device).total_memory
    return max(total - memory_allocated(device), 0), total


# --- random numbers --------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the device's generator. The CPU makes its numbers, so they are those that the CPU makes of this seed."""
    torch.ops.torch_qpu.manual_seed((int(seed) + (1 << 63)) % (1 << 64) - (1 << 63))


manual_seed_all = manual_seed


def initial_seed() -> int:
    """The seed that the device's generator began with."""
    return int(torch.ops.torch_qpu.initial_seed()) % (1 << 64)


def seed() -> int:
    """Seed the generator anew, from the system's random numbers."""
    return int(torch.ops.torch_qpu.new_seed()) % (1 << 64)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the device's generator, as a CPU tensor of bytes."""
    _index(device)
    state: torch.Tensor = torch.ops.torch_qpu.rng_state()
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set what ``get_rng_state`` gave."""
    _index(device)
    torch.ops.torch_qpu.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Float32 alone is computed by the QPUs, so autocast changes nothing on them."""
    return [torch.float32]


# --- torch.compile ---------------------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """Inductor's classes, which importing costs seconds: only where Inductor asks."""
    if name in ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen"):
        from torch_qpu import inductor

        return getattr(inductor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
