"""``torch.qpu``: the device module that PyTorch and models expect, modelled on ``torch.cuda``.

There is one device, ``qpu:0``. There is one stream, because launches are synchronous.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from torch_qpu import _C
from torch_qpu.streams import Event, Stream, StreamContext, require_qpu

__all__ = ["Event", "Stream", "StreamContext"]  # PyTorch looks up the rest by name
MODEL_BACKENDS = ("interpreter", "emulator")
"""The libqpu backends that are not hardware, whose times come from a model."""

_BUS_ADDRESSES = 1 << 30
"""Bytes that the QPUs can address. A model reports this as its memory size, because no firmware splits its memory."""


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of the device."""

    name: str
    backend: str
    """The backend that runs the kernels, as named by libqpu."""
    reason: str
    """Why libqpu selected that backend."""
    multi_processor_count: int
    """Number of QPUs; each computes 16 elements in four clocks."""
    total_memory: int
    """Memory in bytes: the GPU's part of the memory split, or the limit set by ``set_memory_limit``; for a model,
    the 1 GiB of bus addresses."""
    is_hardware: bool
    """False for an emulator or interpreter, whose times are not those of a board."""


def init() -> None:
    """Do nothing, because memory and QPUs are opened on first use."""


def is_initialized() -> bool:
    """Return True; see ``init``."""
    return True


def is_available() -> bool:
    """Return whether tensors can be created on the device. This requires a libqpu backend for this machine."""
    try:
        _C.backend()
    except RuntimeError:
        return False
    return not _C.in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(_C.in_bad_fork())


def device_count() -> int:
    """Return 1."""
    return 1


def current_device() -> int:
    """Return the index of the only device."""
    return 0


def _index(device: Any) -> int:
    require_qpu(device)
    return 0


def set_device(device: Any) -> None:
    """Check that ``device`` is the only device. Raises RuntimeError."""
    _index(device)


class device:  # noqa: N801 (named as torch.cuda.device)
    """A context manager like ``torch.cuda.device``. It has no effect, because the only device is always current."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def get_device_name(device: Any = None) -> str:
    """Return the device's name, which states the VideoCore generation and the backend that runs the kernels."""
    return get_device_properties(device).name


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Return properties of the device. Raises RuntimeError if QPU_BACKEND does not name a working backend."""
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
    """Return the VideoCore generation, and a revision that is always 0 because all boards use the same kernels."""
    _index(device)
    return 4, 0


def synchronize(device: Any = None) -> None:
    """Return immediately. Launches are synchronous, so there is no work to wait for."""
    _index(device)


def current_stream(device: Any = None) -> torch.Stream:
    """Return the device's only stream."""
    return Stream(device)


default_stream = current_stream
stream = StreamContext


def set_stream(stream: torch.Stream) -> None:
    """Check that ``stream`` is the only stream. Raises RuntimeError."""
    StreamContext(stream)


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the allocator's statistics: bytes used by tensors, bytes reserved from libqpu, and counters."""
    _index(device)
    return dict(_C.memory_statistics())


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return the statistics as a human-readable table; ``abbreviated`` omits the segment and block counts."""
    stats = memory_stats(device)
    limit = stats["limit_bytes"]
    lines = [
        f"{get_device_name(device)}: memory",
        f"{'':12}{'now':>12}{'peak':>12}",
        *(
            f"{name:12}{stats[f'{name}_bytes.current'] / 2**20:8.1f} MiB{stats[f'{name}_bytes.peak'] / 2**20:8.1f} MiB"
            for name in ("allocated", "reserved")
        ),
        f"limit: {f'{limit / 2**20:.1f} MiB' if limit else 'none'}",
        f"out of memory {stats['out_of_memory']} times, after {stats['retries']} retries",
    ]
    if not abbreviated:
        lines += [
            f"{stats['segments.current']} of {stats['segments.allocated']} allocated segments still reserved,"
            f" {stats['blocks.free']} free blocks",
            f"{stats['allocations']} allocations, {stats['frees']} freed",
        ]
    return "\n".join(lines)


def memory_allocated(device: Any = None) -> int:
    """Return the number of bytes used by tensors."""
    return memory_stats(device)["allocated_bytes.current"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the maximum number of bytes used by tensors since the start or the last ``reset_peak_memory_stats``."""
    return memory_stats(device)["allocated_bytes.peak"]


def memory_reserved(device: Any = None) -> int:
    """Return the number of bytes reserved from libqpu, for tensors and for the cache."""
    return memory_stats(device)["reserved_bytes.current"]


def max_memory_reserved(device: Any = None) -> int:
    """Return the maximum number of bytes reserved from libqpu."""
    return memory_stats(device)["reserved_bytes.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the maximum values."""
    _index(device)
    _C.reset_peaks()


def empty_cache() -> None:
    """Release memory that no tensor uses."""
    _C.release_cached()


def set_memory_limit(limit: int) -> None:
    """Limit the device memory to ``limit`` bytes; 0 means as much as libqpu provides."""
    if limit < 0:
        raise ValueError(f"set_memory_limit: expected 0 or more bytes, found {limit}")
    _C.set_limit(limit)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the number of free bytes, including cached memory, and the total number of bytes."""
    total = get_device_properties(device).total_memory
    return max(total - memory_allocated(device), 0), total


# --- random numbers --------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the device's generator. The CPU generates the numbers, so a seed gives the same numbers as on the CPU."""
    torch.ops.torch_qpu.manual_seed((int(seed) + (1 << 63)) % (1 << 64) - (1 << 63))


manual_seed_all = manual_seed


def initial_seed() -> int:
    """Return the initial seed of the device's generator."""
    return int(torch.ops.torch_qpu.initial_seed()) % (1 << 64)


def seed() -> int:
    """Seed the generator with a random number from the system."""
    return int(torch.ops.torch_qpu.new_seed()) % (1 << 64)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the device's generator as a CPU tensor of bytes."""
    _index(device)
    state: torch.Tensor = torch.ops.torch_qpu.rng_state()
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore a state that ``get_rng_state`` returned."""
    _index(device)
    torch.ops.torch_qpu.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return float32 as the only dtype for autocast. Autocast has no effect, because the QPUs compute only float32."""
    return [torch.float32]


# --- torch.compile ---------------------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """Import Inductor's classes only when Inductor requests them, because the import takes seconds."""
    if name in ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen"):
        from torch_qpu import inductor

        return getattr(inductor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
