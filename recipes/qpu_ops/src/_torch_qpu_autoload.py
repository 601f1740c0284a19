"""Entry point of the group torch.backends: ``import torch`` calls it to register the device ``qpu``."""

from __future__ import annotations


def load() -> None:
    """Register the device. If libqpu cannot be loaded, torch works without it; ``import torch_qpu`` shows the error."""
    try:
        import torch_qpu  # noqa: F401
    except ImportError:
        return
