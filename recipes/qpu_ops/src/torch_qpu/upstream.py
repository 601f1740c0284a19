"""Replace Python functions of PyTorch that assume that an accelerator works like CUDA.

The replacements are installed once, when the device is registered. For other devices, each replacement calls PyTorch's
original function.
"""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions


def install() -> None:
    """Install all replacements."""
    for kind in (torch.Tensor, nn.Parameter):
        ForkingPickler.register(kind, _reduced)
    ForkingPickler.register(torch.UntypedStorage, _reduced_storage)
    nn.DataParallel.__init__ = _parallel_or_refused(nn.DataParallel.__init__)
    nn.parallel.data_parallel = _refused_on_qpu(nn.parallel.data_parallel)


# --- other processes -------------------------------------------------------------------------------------------------


def _rebuilt(saved: bytes, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    there = torch.load(io.BytesIO(saved), weights_only=True).to("qpu")
    return nn.Parameter(there, requires_grad) if is_parameter else there.requires_grad_(requires_grad)


def _refused(why: str) -> None:
    raise RuntimeError(why)


def _reduced(tensor: torch.Tensor) -> Any:
    """Send a tensor to another process (for example, from a DataLoader's worker or through a Queue) as a copy.

    PyTorch would share the tensor's memory, but QPU memory belongs to one process. Errors are raised in the process
    that receives the tensor. A queue pickles in a separate thread and drops what it cannot pickle, so an error on the
    sending side would leave the receiver waiting forever.
    """
    if tensor.device.type != "qpu":
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        return _refused, (
            "a qpu tensor that is part of a graph cannot be sent to another process: its gradients would be lost; "
            "send tensor.detach()",
        )
    saved = io.BytesIO()
    try:
        torch.save(tensor.detach().cpu(), saved)
    except RuntimeError as fault:
        return _refused, (f"a qpu tensor cannot be sent to another process: {fault}",)
    return _rebuilt, (saved.getvalue(), isinstance(tensor, nn.Parameter), tensor.requires_grad)


def _reduced_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "qpu":
        return reductions.reduce_storage(storage)
    return _refused, ("a qpu storage cannot be sent to another process: send a tensor, whose values are copied",)


# --- several devices -------------------------------------------------------------------------------------------------


def _require_cpu(module: nn.Module, device_ids: Any, output_device: Any) -> None:
    where = {str(t.device) for t in (*module.parameters(), *module.buffers()) if t.device.type != "cpu"}
    if where or device_ids is not None or output_device is not None:
        found = f"a module on {', '.join(sorted(where))}" if where else f"device_ids={device_ids}"
        raise RuntimeError(
            "DataParallel splits a batch among several devices of one type, but there is only one qpu: "
            f"expected a module on the CPU and no device_ids, found {found}; use the module without DataParallel"
        )


def _parallel_or_refused(original: Any) -> Any:
    """Return a DataParallel constructor that leaves a CPU module on the CPU and raises an error for other modules."""

    def init(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        if torch._utils._get_available_device_type() != "qpu":
            original(self, module, device_ids, output_device, dim)
            return
        _require_cpu(module, device_ids, output_device)
        nn.Module.__init__(self)
        self.module, self.device_ids = module, []

    return init


def _refused_on_qpu(original: Any) -> Any:
    """Return a replacement for ``data_parallel``, the function, that calls ``_require_cpu`` first."""

    def data_parallel(
        module: nn.Module,
        inputs: Any,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        module_kwargs: Any = None,
    ) -> Any:
        if torch._utils._get_available_device_type() != "qpu":
            return original(module, inputs, device_ids, output_device, dim, module_kwargs)
        _require_cpu(module, device_ids, output_device)
        return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))

    return data_parallel
