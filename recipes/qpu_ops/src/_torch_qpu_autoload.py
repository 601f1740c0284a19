"""The entry point in the group torch.backends, which ``import torch`` calls to register the device ``qpu``."""

from __future__ import annotations


def load() -> None:
    """Register the device.

    If libqpu cannot be loaded, torch works without the device; ``import torch_qpu`` shows the error.
    """
    try:
        import torch_qpu  # noqa: F401
    except ImportError:
        return
