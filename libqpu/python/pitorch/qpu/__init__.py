"""Programs for the QPUs of a Raspberry Pi, from Python: run them, read their machine code, count their clocks.

Kernels are written in C++ (``qpu/qpu.hpp``) and saved by ``Kernel::save()``, or written in assembly::

    from pitorch import qpu

    kernel = qpu.Program.open("axpy.qpuo")
    x = qpu.Buffer.of(numpy.arange(1600, dtype=numpy.float32))
    kernel.run(1600, numpy.float32(0.5), x, qpus=12)
    print(x.array, kernel.cycles(), kernel.listing())

The library is ``libqpu.so.1`` where the dynamic loader finds it, or the file that the environment variable
``QPU_LIBRARY`` names. ``QPU_BACKEND`` and the library's other variables apply; see docs/libqpu.md.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy

if TYPE_CHECKING:
    import numpy.typing

__all__ = [
    "Backend",
    "Buffer",
    "Cycles",
    "Program",
    "QpuError",
    "assemble",
    "backend",
    "disassemble",
    "machine",
    "version",
]

Argument = Union[int, float, "numpy.generic", "Buffer"]


class QpuError(RuntimeError):
    """What libqpu refused or met; ``kind`` is the class that it has in C++."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class Backend(NamedTuple):
    """What runs kernels, as libqpu states it."""

    name: str
    reason: str


class Cycles(NamedTuple):
    """What a run on the emulator took, by its model of a board: not measured on hardware.

    Sums over the QPUs, but for clocks and seconds. ``seconds`` is the kernel alone; what ``launches`` take besides is
    told for the two ways of starting one on the QPUs.
    """

    instructions: int
    clocks: int
    stalled_on_tmu: int
    stalled_on_vpm: int
    stalled_on_other: int
    tmu_bytes: int
    memory_read_bytes: int
    memory_write_bytes: int
    seconds: float
    board: str
    launches: int
    registers_launch_seconds: float
    mailbox_launch_seconds: float


class _Cycles(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in Cycles._fields[:8]),
        ("seconds", ctypes.c_double),
        ("board", ctypes.c_char_p),
        ("launches", ctypes.c_uint64),
        ("registers_launch_seconds", ctypes.c_double),
        ("mailbox_launch_seconds", ctypes.c_double),
    )


_WORDS32 = ctypes.POINTER(ctypes.c_uint32)
_WORDS64 = ctypes.POINTER(ctypes.c_uint64)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "qpu_version": (ctypes.c_char_p, ()),
    "qpu_backend_name": (ctypes.c_char_p, ()),
    "qpu_backend_reason": (ctypes.c_char_p, ()),
    "qpu_last_error": (ctypes.c_char_p, ()),
    "qpu_last_error_class": (ctypes.c_char_p, ()),
    "qpu_free": (None, (ctypes.c_void_p,)),
    "qpu_machine_report": (ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)),
    "qpu_buffer_new": (ctypes.c_void_p, (ctypes.c_size_t,)),
    "qpu_buffer_delete": (None, (ctypes.c_void_p,)),
    "qpu_buffer_data": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "qpu_buffer_address": (ctypes.c_uint32, (ctypes.c_void_p,)),
    "qpu_buffer_write": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)),
    "qpu_buffer_read": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)),
    "qpu_program_open": (ctypes.c_void_p, (ctypes.c_char_p,)),
    "qpu_program_from_words": (ctypes.c_void_p, (_WORDS64, ctypes.c_size_t, ctypes.c_char_p)),
    "qpu_program_delete": (None, (ctypes.c_void_p,)),
    "qpu_program_save": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)),
    "qpu_program_name": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "qpu_program_words": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.POINTER(_WORDS64))),
    "qpu_program_parameters": (ctypes.c_size_t, (ctypes.c_void_p,)),
    "qpu_program_uses_sfu": (ctypes.c_int, (ctypes.c_void_p,)),
    "qpu_program_run": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, _WORDS32, ctypes.c_size_t)),
    "qpu_program_run_raw": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int, _WORDS32, ctypes.c_size_t)),
    "qpu_program_profile": (None, (ctypes.c_void_p, ctypes.c_int)),
    "qpu_program_cycles": (ctypes.c_int, (ctypes.c_void_p, ctypes.POINTER(_Cycles))),
    "qpu_program_listing": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "qpu_disassemble": (ctypes.c_void_p, (_WORDS64, ctypes.c_size_t)),
    "qpu_assemble": (ctypes.c_long, (ctypes.c_char_p, _WORDS64, ctypes.c_size_t)),
}


@functools.cache
def _library() -> ctypes.CDLL:
    name = os.environ.get("QPU_LIBRARY") or "libqpu.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as fault:
        raise QpuError(f"cannot load libqpu: {fault}; set QPU_LIBRARY to the path of libqpu.so.1", "") from fault
    for function, (result, arguments) in _FUNCTIONS.items():
        try:
            found = getattr(library, function)
        except AttributeError as fault:
            raise QpuError(f"{name} has no {function}: it is no libqpu, or an older one", "") from fault
        found.restype = result
        found.argtypes = arguments
    return library


def _decoded(text: bytes) -> str:
    """A text of the library, which may hold a path or name in any encoding."""
    return text.decode(errors="replace")


def _failed() -> QpuError:
    library = _library()
    return QpuError(_decoded(library.qpu_last_error()), _decoded(library.qpu_last_error_class()))


def _require(outcome: int) -> None:
    if outcome != 0:
        raise _failed()


def _text(pointer: int | None) -> str:
    """What a function returned to be freed."""
    if not pointer:
        raise _failed()
    try:
        return _decoded(ctypes.string_at(pointer))
    finally:
        _library().qpu_free(pointer)


def _words64(words: numpy.typing.ArrayLike) -> numpy.typing.NDArray[numpy.uint64]:
    return numpy.ascontiguousarray(words, dtype=numpy.uint64).reshape(-1)


def version() -> str:
    """Version of libqpu."""
    return str(_library().qpu_version().decode())


def backend() -> Backend:
    """What runs kernels now, and why. Raises QpuError when QPU_BACKEND cannot be served."""
    library = _library()
    name = library.qpu_backend_name()
    reason = _decoded(library.qpu_backend_reason())
    if name is None:
        raise QpuError(reason, "BackendError")
    return Backend(name.decode(), reason)


def machine(root: str = "/") -> dict[str, Any]:
    """What ``qpu-info --json`` prints: backends with their reasons, board, obstacles with their fixes."""
    found: dict[str, Any] = json.loads(_text(_library().qpu_machine_report(os.fsencode(root), 1)))
    return found


def assemble(text: str) -> numpy.typing.NDArray[numpy.uint64]:
    """Machine code of lines of assembly; ``#`` begins a comment."""
    library = _library()
    count = library.qpu_assemble(text.encode(), None, 0)
    if count < 0:
        raise _failed()
    words = numpy.zeros(count, dtype=numpy.uint64)
    library.qpu_assemble(text.encode(), words.ctypes.data_as(_WORDS64), count)
    return words


def disassemble(words: numpy.typing.ArrayLike) -> str:
    """One line per word: number, word, and text that ``assemble`` makes that word of."""
    code = _words64(words)
    return _text(_library().qpu_disassemble(code.ctypes.data_as(_WORDS64), code.size))


class Buffer:
    """Memory that the CPU and the QPUs share: GPU memory where kernels run on the QPUs. Zero-filled.

    ``array`` is the memory itself. On hardware it is not cached: move whole arrays by ``write`` and ``read``.
    """

    def __init__(self, shape: int | Sequence[int], dtype: numpy.typing.DTypeLike = numpy.float32) -> None:
        self.dtype = numpy.dtype(dtype)
        if self.dtype.itemsize != 4:
            raise TypeError(
                f"a QPU computes with elements of 4 bytes: expected float32, int32 or uint32, found {dtype}"
            )
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._size = int(numpy.prod(self.shape, dtype=numpy.int64))
        self._handle: int | None = _library().qpu_buffer_new(4 * max(self._size, 0))
        if not self._handle:
            raise _failed()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _library().qpu_buffer_delete(self._handle)

    @classmethod
    def of(cls, values: numpy.typing.ArrayLike) -> Buffer:
        """A buffer with a copy of values, with their shape; elements of 4 bytes keep their type."""
        array = numpy.asarray(values)
        if array.dtype == numpy.float64:
            array = array.astype(numpy.float32)
        elif array.dtype == numpy.int64:
            array = array.astype(numpy.int32)
        made = cls(array.shape, array.dtype)
        made.write(array)
        return made

    @property
    def address(self) -> int:
        """For the QPUs."""
        return int(_library().qpu_buffer_address(self._handle))

    @property
    def array(self) -> numpy.typing.NDArray[Any]:
        """The memory, without a copy; it lives as long as this view."""
        memory = (ctypes.c_uint32 * self._size).from_address(_library().qpu_buffer_data(self._handle))
        memory.owner = self  # type: ignore[attr-defined]
        words: numpy.typing.NDArray[Any] = numpy.ctypeslib.as_array(memory)
        return words.view(self.dtype).reshape(self.shape)

    def write(self, values: numpy.typing.ArrayLike) -> None:
        """Copy values in; they must fit the shape."""
        array = numpy.ascontiguousarray(numpy.broadcast_to(numpy.asarray(values, dtype=self.dtype), self.shape))
        _require(_library().qpu_buffer_write(self._handle, 0, array.ctypes.data, array.nbytes))

    def read(self) -> numpy.typing.NDArray[Any]:
        """A copy of the contents."""
        array = numpy.empty(self.shape, dtype=self.dtype)
        _require(_library().qpu_buffer_read(self._handle, 0, array.ctypes.data, array.nbytes))
        return array


def _uniform(argument: Argument) -> int:
    """The word that a QPU gets for an argument."""
    if isinstance(argument, Buffer):
        return argument.address
    if isinstance(argument, (float, numpy.floating)):
        return int(numpy.float32(argument).view(numpy.uint32))
    if isinstance(argument, (int, numpy.integer)):
        value = int(argument)
        if -(2**31) <= value < 2**32:
            return value % 2**32
        raise OverflowError(f"{value} does not fit in 32 bits")
    raise TypeError(f"expected a number or a Buffer, found {type(argument).__name__}")


class Program:
    """Machine code. It runs on the backend in force; where that is the interpreter by default, on the emulator."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        if not handle:
            raise _failed()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _library().qpu_program_delete(self._handle)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Program:
        """A kernel that ``Kernel::save()`` or ``save`` wrote, or a file of bare words."""
        return cls(_library().qpu_program_open(os.fsencode(path)))

    @classmethod
    def from_words(cls, words: numpy.typing.ArrayLike, name: str = "program") -> Program:
        """A program of bare words; all of its uniforms are given to ``run_raw``."""
        code = _words64(words)
        return cls(_library().qpu_program_from_words(code.ctypes.data_as(_WORDS64), code.size, name.encode()))

    @classmethod
    def assemble(cls, text: str, name: str = "program") -> Program:
        """The same from lines of assembly."""
        return cls.from_words(assemble(text), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file."""
        _require(_library().qpu_program_save(self._handle, os.fsencode(path)))

    @property
    def name(self) -> str:
        """Of the kernel."""
        return _decoded(_library().qpu_program_name(self._handle))

    @property
    def words(self) -> numpy.typing.NDArray[numpy.uint64]:
        """A copy of the machine code."""
        first = _WORDS64()
        count = _library().qpu_program_words(self._handle, ctypes.byref(first))
        return numpy.ctypeslib.as_array(first, (count,)).copy()

    @property
    def parameters(self) -> int:
        """How many arguments ``run`` takes."""
        return int(_library().qpu_program_parameters(self._handle))

    @property
    def uses_sfu(self) -> bool:
        """Whether results differ between emulator and hardware in the last bits."""
        return bool(_library().qpu_program_uses_sfu(self._handle))

    def run(self, *arguments: Argument, qpus: int = 1) -> None:
        """Run a kernel to its end: integers, floats and buffers in the order of its parameters."""
        words = numpy.array([_uniform(item) for item in arguments], dtype=numpy.uint32)
        _require(_library().qpu_program_run(self._handle, qpus, words.ctypes.data_as(_WORDS32), words.size))

    def run_raw(self, uniforms: Sequence[Sequence[Argument]]) -> None:
        """Run on as many QPUs as there are rows, each with its row as uniforms. Rows are equally long."""
        if len({len(row) for row in uniforms}) > 1:
            raise ValueError("each QPU gets the same number of uniforms")
        words = numpy.array([[_uniform(item) for item in row] for row in uniforms], dtype=numpy.uint32)
        each = words.shape[1] if words.ndim == 2 else 0
        _require(_library().qpu_program_run_raw(self._handle, len(uniforms), words.ctypes.data_as(_WORDS32), each))

    def profile(self, on: bool = True) -> None:
        """Count by instruction in the next runs on the emulator; the listing shows it."""
        _library().qpu_program_profile(self._handle, int(on))

    def cycles(self) -> Cycles | None:
        """Of the last run on the emulator; None before one."""
        found = _Cycles()
        if _library().qpu_program_cycles(self._handle, ctypes.byref(found)) != 0:
            return None
        facts = {name: getattr(found, name) for name in Cycles._fields}
        return Cycles(**{**facts, "board": found.board.decode()})

    def listing(self) -> str:
        """Instructions with the constructs of the source; after a profiled run with their counts."""
        return _text(_library().qpu_program_listing(self._handle))
