"""What ``import torch`` runs, so that it knows the device ``qpu`` by itself (entry point group torch.backends)."""

from __future__ import annotations


def load() -> None:
    """Register the device. Where libqpu cannot be loaded torch goes on without it; ``import torch_qpu`` tells why."""
    try:
        import torch_qpu  # noqa: F401
    except ImportError:
        return
