"""``torch.qpu.Stream`` and ``Event``: there is one stream, which is always idle, because launches are synchronous."""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar

import torch

QPU = torch.device("qpu", 0)


class _OfTheDevice(type):
    """A metaclass that makes ``isinstance`` accept PyTorch's own streams and events of this device.

    Subclasses of PyTorch's classes would not work with ``elapsed_time``.
    """

    kind: type[Any]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.kind) and instance.device.type == "qpu"


class Stream(metaclass=_OfTheDevice):
    """The only stream, as a ``torch.Stream``. Raises RuntimeError for any device other than ``qpu:0``."""

    kind: ClassVar[type[Any]] = torch.Stream

    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:
        """Create the stream. ``priority`` is accepted for compatibility, but has no effect with a single stream."""
        require_qpu(device)
        return torch.Stream(QPU, priority=priority)


class Event(metaclass=_OfTheDevice):
    """A ``torch.Event`` of the device.

    The event stores the time at which it was recorded. All earlier launches have finished by then. ``elapsed_time``
    requires ``enable_timing=True``. Raises RuntimeError for ``interprocess=True``.
    """

    kind: ClassVar[type[Any]] = torch.Event

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        """Create the event. The arguments are those of ``torch.cuda.Event``."""
        if interprocess:
            raise RuntimeError("torch.qpu.Event: events cannot be shared between processes; use interprocess=False")
        return torch.Event(QPU, enable_timing=enable_timing, blocking=blocking)


class StreamContext:
    """The context manager that ``torch.qpu.stream(s)`` returns. It has no effect, because there is only one stream.

    As in CUDA, the stream may be None.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        if stream is not None and not isinstance(stream, Stream):
            raise RuntimeError(f"torch.qpu.stream: expected a stream of qpu:0, found {stream}")
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def require_qpu(device: Any) -> None:
    """Raise RuntimeError unless the argument is the only device, its index, or None."""
    index = device if isinstance(device, int) else torch.device("qpu" if device is None else device).index or 0
    if index not in (0, -1) or (not isinstance(device, int | None) and torch.device(device).type != "qpu"):
        raise RuntimeError(f"the only device is qpu:0, found {device if index == 0 else f'qpu:{index}'}")
