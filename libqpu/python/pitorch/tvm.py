"""Call TVM's compiled kernels on a board without TVM's runtime. Arguments are numpy arrays or torch tensors.

``./inv profile-remote --target armv7 --keep FILE.so`` writes a library of kernels for 32-bit boards, which this module
can load. If ``apache-tvm-ffi`` is installed (``./inv build-tvm-ffi``), a library exported by TVM itself also works::

    from pitorch import tvm

    gemm = tvm.Library("gemm.so")["gemm"]
    gemm(a, b, c)          # numpy arrays or torch tensors in the CPU's memory; results are written in place

Kernels check the types, shapes and strides of their arguments; KernelError contains the kernel's message. TVM's code
crashes unless arrays are aligned to 64 bytes, so unaligned arrays are copied for the call, and copied back afterwards.
torch aligns its tensors; views and numpy arrays may be unaligned.

Most functions of TVM's runtime, such as those that run loops in parallel threads, are not available, and calling one
would crash the process. A library that uses such functions is therefore rejected.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Kernel", "KernelError", "Library"]

ALIGNMENT = 64
"""The alignment of arrays that kernels require, in bytes."""
_CPU = 1
_TENSOR_POINTER = 7
_CAPSULE = b"dltensor"
_RUNTIME_FUNCTIONS = ("ParallelLaunch", "ParallelBarrier", "AllocWorkspace", "FreeWorkspace", "GetFuncFromEnv")
"""Suffixes of function names in TVM's runtime. A library that uses such a function has a null pointer of that name."""


class KernelError(RuntimeError):
    """A kernel does not exist, or rejected its arguments."""


class _Tensor(ctypes.Structure):
    """DLTensor in dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Value(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("pointer", ctypes.c_void_p))


class _Any(ctypes.Structure):
    """TVMFFIAny in tvm/ffi/c_api.h."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value))


class _Bytes(ctypes.Structure):
    """TVMFFIByteArray in tvm/ffi/c_api.h."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))

    def text(self) -> str:
        return ctypes.string_at(self.data, self.size).decode(errors="replace") if self.size else ""


class _Error(ctypes.Structure):
    """TVMFFIObject in tvm/ffi/c_api.h, and the beginning of the TVMFFIErrorCell that follows it."""

    _fields_ = (
        ("references", ctypes.c_uint64),
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("deleter", ctypes.c_int64),
        ("kind", _Bytes),
        ("message", _Bytes),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Library:
    """The kernels in a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # If the path were a name without a folder, the loader would search for it in the system's library folders.
        self.path = str(Path(path).resolve())
        self._library = _loaded(self.path)
        standalone = hasattr(self._library, "pitorch_raised")
        provided = ("AllocWorkspace", "FreeWorkspace") if standalone else ()
        missing = [
            name
            for name in _RUNTIME_FUNCTIONS
            if name not in provided and hasattr(self._library, f"__TVMBackend{name}")
        ]
        if "ParallelLaunch" in missing:
            raise KernelError(f"{self.path} has parallel loops, but TVM's thread pool is not available here")
        if missing:
            raise KernelError(
                f"{self.path} requires TVM's runtime ({', '.join(missing)}): "
                "build the library with profile-remote --keep"
            )
        ffi, own = _ffi_error(), _library_error(self._library) if standalone else None
        if ffi is None and own is None:
            raise KernelError(f"{self.path} was not built for boards without TVM: build it with profile-remote --keep")
        self._sources = tuple(source for source in (ffi, own) if source is not None)

    def __getitem__(self, name: str) -> Kernel:
        """Return the kernel with this name. Raises KernelError."""
        try:
            entry = getattr(self._library, f"__tvm_ffi_{name}")
        except AttributeError as fault:
            raise KernelError(f"{self.path} has no kernel {name!r}") from fault
        entry.restype = ctypes.c_int
        entry.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.POINTER(_Any))
        return Kernel(name, entry, self._last_error)

    def _last_error(self) -> str:
        """Return the last error message, from TVM's FFI if it was loaded before the library, else from the library."""
        return next((text for source in self._sources if (text := source())), "the kernel failed without a message")


class Kernel:
    """A kernel. Any thread may call it."""

    def __init__(self, name: str, entry: Any, raised: Callable[[], str]) -> None:
        self.name = name
        self._entry = entry
        self._last_error = raised

    def __call__(self, *arrays: Any) -> None:
        """Run the kernel. ``arrays`` contains the kernel's inputs, followed by its outputs.

        If KernelError is raised, nothing was computed.
        """
        capsules = [_to_capsule(number, item) for number, item in enumerate(arrays)]
        tensors = [_Tensor.from_address(_pointer_of(item, _CAPSULE)) for item in capsules]
        given = (_Any * len(tensors))()
        copies: list[tuple[_Tensor, int, int, Any]] = []
        for number, tensor in enumerate(tensors):
            begin = (tensor.data or 0) + tensor.byte_offset
            if tensor.device_type != _CPU:
                raise KernelError(f"argument {number} of {self.name} is not in the CPU's memory")
            if begin % ALIGNMENT:
                tensor, memory = _aligned(number, tensor, begin)
                copies.append((tensor, begin, _size(tensor), memory))
                tensors[number] = tensor
            given[number].type_index = _TENSOR_POINTER
            given[number].value.pointer = ctypes.addressof(tensor)
        result = _Any()
        if self._entry(None, given, len(tensors), ctypes.byref(result)) != 0:
            raise KernelError(self._last_error())
        for tensor, begin, size, _ in copies:
            ctypes.memmove(begin, tensor.data, size)


def _loaded(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as fault:
        if "TVMFFI" not in str(fault):
            raise KernelError(f"cannot load {path}: {fault}") from fault
    # TVM itself exported the library, so tvm_ffi provides the missing symbols. Prevent tvm_ffi from compiling an
    # extension for torch.
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    try:
        importlib.import_module("tvm_ffi")
    except ImportError as fault:
        raise KernelError(
            f"{path} was not built for boards without TVM: build it with profile-remote --keep, or "
            "install apache-tvm-ffi"
        ) from fault
    try:
        return ctypes.CDLL(path)
    except OSError as fault:
        raise KernelError(f"cannot load {path}: {fault}") from fault


def _library_error(library: ctypes.CDLL) -> Callable[[], str]:
    """Return a function that returns the last error message of a library built with ``--keep``."""
    words = library.pitorch_raised
    words.restype = ctypes.c_char_p
    return lambda: words().decode(errors="replace")


def _ffi_error() -> Callable[[], str] | None:
    """Return a function that returns the last error message of TVM's FFI; None if this process has not loaded it."""
    process = ctypes.CDLL(None)
    try:
        move, release = process.TVMFFIErrorMoveFromRaised, process.TVMFFIObjectDecRef
    except AttributeError:
        return None
    move.restype, move.argtypes = None, (ctypes.POINTER(ctypes.c_void_p),)
    release.restype, release.argtypes = ctypes.c_int, (ctypes.c_void_p,)

    def words() -> str:
        handle = ctypes.c_void_p()
        move(ctypes.byref(handle))
        if not handle.value:
            return ""
        error = _Error.from_address(handle.value)
        text = f"{error.kind.text()}: {error.message.text()}"
        release(handle)
        return text

    return words


def _to_capsule(number: int, item: Any) -> Any:
    if not hasattr(item, "__dlpack__"):
        raise KernelError(f"argument {number}: expected an array or tensor, found {type(item).__name__}")
    if getattr(item, "requires_grad", False):
        raise KernelError(f"argument {number} requires a gradient, which kernels do not compute: call detach() first")
    try:
        return item.__dlpack__()
    except Exception as fault:
        raise KernelError(f"argument {number} cannot be passed to the kernel: {fault}") from fault


def _size(tensor: _Tensor) -> int:
    """Return the size of a dense tensor in bytes."""
    count = 1
    for axis in range(tensor.dimensions):
        count *= tensor.shape[axis]
    return int(count * tensor.bits * tensor.lanes // 8)


def _aligned(number: int, tensor: _Tensor, begin: int) -> tuple[_Tensor, Any]:
    """Return an aligned copy of a dense tensor, and the memory that contains it."""
    step = 1
    for axis in reversed(range(tensor.dimensions)):
        if tensor.strides and tensor.shape[axis] > 1 and tensor.strides[axis] != step:
            raise KernelError(f"argument {number} must be contiguous or aligned to {ALIGNMENT} bytes: copy it first")
        step *= tensor.shape[axis]
    size = _size(tensor)
    memory = ctypes.create_string_buffer(size + ALIGNMENT)
    made = _Tensor.from_buffer_copy(tensor)
    made.data = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    made.byte_offset = 0
    ctypes.memmove(made.data, begin, size)
    return made, memory
