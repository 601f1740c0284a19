"""Run programs on the QPUs of a Raspberry Pi, read their machine code, and count their clock cycles.

Kernels are written in C++ (``qpu/qpu.hpp``) and saved with ``Kernel::save()``, or written in assembly::

    from pitorch import qpu

    kernel = qpu.Program.open("axpy.qpuo")
    x = qpu.Buffer.of(numpy.arange(1600, dtype=numpy.float32))
    kernel.run(1600, numpy.float32(0.5), x, qpus=12)
    print(x.read(), kernel.cycles(), kernel.listing())

The module loads ``libqpu.so.1`` from the dynamic loader's path, or the file that the environment variable
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
    """An error from libqpu. ``kind`` is the name of the error's C++ class."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class Backend(NamedTuple):
    """The backend that runs kernels, and the reason for its selection."""

    name: str
    reason: str


class Cycles(NamedTuple):
    """The cost of a run on the emulator, according to its model of a board; not measured on hardware.

    All numbers are sums over the QPUs, except clocks and seconds. ``seconds`` is the time that the kernel alone takes.
    The additional time for the ``launches`` is given for both methods of launching programs on the QPUs.
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
            raise QpuError(f"{name} has no {function}: it is not libqpu, or is an older version of it", "") from fault
        found.restype = result
        found.argtypes = arguments
    return library


def _decoded(text: bytes) -> str:
    """Decode a string from the library, which may contain a path or name in any encoding."""
    return text.decode(errors="replace")


def _failed() -> QpuError:
    library = _library()
    return QpuError(_decoded(library.qpu_last_error()), _decoded(library.qpu_last_error_class()))


def _require(outcome: int) -> None:
    if outcome != 0:
        raise _failed()


def _text(pointer: int | None) -> str:
    """Return a C string from a library function as a Python string, and free the C string."""
    if not pointer:
        raise _failed()
    try:
        return _decoded(ctypes.string_at(pointer))
    finally:
        _library().qpu_free(pointer)


def _words64(words: numpy.typing.ArrayLike) -> numpy.typing.NDArray[numpy.uint64]:
    return numpy.ascontiguousarray(words, dtype=numpy.uint64).reshape(-1)


def version() -> str:
    """Return the version of libqpu."""
    return str(_library().qpu_version().decode())


def backend() -> Backend:
    """Return the current backend and the reason for its selection. Raises QpuError if QPU_BACKEND cannot be used."""
    library = _library()
    name = library.qpu_backend_name()
    reason = _decoded(library.qpu_backend_reason())
    if name is None:
        raise QpuError(reason, "BackendError")
    return Backend(name.decode(), reason)


def machine(root: str = "/") -> dict[str, Any]:
    """Return the report of ``qpu-info --json``: the backends, the board, and what prevents use of the QPUs."""
    found: dict[str, Any] = json.loads(_text(_library().qpu_machine_report(os.fsencode(root), 1)))
    return found


def assemble(text: str) -> numpy.typing.NDArray[numpy.uint64]:
    """Assemble lines of text into machine code; ``#`` begins a comment."""
    library = _library()
    count = library.qpu_assemble(text.encode(), None, 0)
    if count < 0:
        raise _failed()
    words = numpy.zeros(count, dtype=numpy.uint64)
    library.qpu_assemble(text.encode(), words.ctypes.data_as(_WORDS64), count)
    return words


def disassemble(words: numpy.typing.ArrayLike) -> str:
    """List machine code, one line per word: number, word, and the text that assembles to this word."""
    code = _words64(words)
    return _text(_library().qpu_disassemble(code.ctypes.data_as(_WORDS64), code.size))


class Buffer:
    """Zero-filled memory that the CPU and the QPUs share. If kernels run on the QPUs, a buffer is GPU memory.

    ``array`` accesses the memory directly. On hardware, the memory is uncached, so use ``write`` and ``read`` to copy
    whole arrays. On 64-bit boards, use ``array`` only for single elements, such as ``array[3]``. NumPy's operations on
    several elements, such as ``array[:] = values``, can make unaligned accesses. In GPU memory, an unaligned access
    ends the process with the signal SIGBUS.
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
        """Create a buffer with a copy of the values.

        Elements of 4 bytes keep their type; float64 is converted to float32, and int64 to int32.
        """
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
        """The bus address at which the QPUs access the buffer."""
        return int(_library().qpu_buffer_address(self._handle))

    @property
    def array(self) -> numpy.typing.NDArray[Any]:
        """A view of the memory. The memory stays allocated as long as the view exists."""
        memory = (ctypes.c_uint32 * self._size).from_address(_library().qpu_buffer_data(self._handle))
        memory.owner = self  # type: ignore[attr-defined]
        words: numpy.typing.NDArray[Any] = numpy.ctypeslib.as_array(memory)
        return words.view(self.dtype).reshape(self.shape)

    def write(self, values: numpy.typing.ArrayLike) -> None:
        """Copy values into the buffer. The values are broadcast to the buffer's shape."""
        array = numpy.ascontiguousarray(numpy.broadcast_to(numpy.asarray(values, dtype=self.dtype), self.shape))
        _require(_library().qpu_buffer_write(self._handle, 0, array.ctypes.data, array.nbytes))

    def read(self) -> numpy.typing.NDArray[Any]:
        """Return a copy of the buffer's contents."""
        array = numpy.empty(self.shape, dtype=self.dtype)
        _require(_library().qpu_buffer_read(self._handle, 0, array.ctypes.data, array.nbytes))
        return array


def _uniform(argument: Argument) -> int:
    """Convert a kernel's argument to the 32-bit word that is passed to the QPU."""
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
    """Machine code that runs on the current backend, or on the emulator if the interpreter is the default backend."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        if not handle:
            raise _failed()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _library().qpu_program_delete(self._handle)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Program:
        """Load a kernel written by ``Kernel::save()`` or ``save``, or a file of raw words."""
        return cls(_library().qpu_program_open(os.fsencode(path)))

    @classmethod
    def from_words(cls, words: numpy.typing.ArrayLike, name: str = "program") -> Program:
        """Create a program from raw words. To run it, pass all of the program's uniforms to ``run_raw``."""
        code = _words64(words)
        return cls(_library().qpu_program_from_words(code.ctypes.data_as(_WORDS64), code.size, name.encode()))

    @classmethod
    def assemble(cls, text: str, name: str = "program") -> Program:
        """Create a program from lines of assembly."""
        return cls.from_words(assemble(text), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file."""
        _require(_library().qpu_program_save(self._handle, os.fsencode(path)))

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return _decoded(_library().qpu_program_name(self._handle))

    @property
    def words(self) -> numpy.typing.NDArray[numpy.uint64]:
        """A copy of the machine code."""
        first = _WORDS64()
        count = _library().qpu_program_words(self._handle, ctypes.byref(first))
        return numpy.ctypeslib.as_array(first, (count,)).copy()

    @property
    def parameters(self) -> int:
        """The number of arguments of ``run``."""
        return int(_library().qpu_program_parameters(self._handle))

    @property
    def uses_sfu(self) -> bool:
        """Whether the last bits of results may differ between the emulator and hardware."""
        return bool(_library().qpu_program_uses_sfu(self._handle))

    def run(self, *arguments: Argument, qpus: int = 1) -> None:
        """Run a kernel to completion. Arguments are integers, floats and buffers, in the kernel's parameter order."""
        words = numpy.array([_uniform(item) for item in arguments], dtype=numpy.uint32)
        _require(_library().qpu_program_run(self._handle, qpus, words.ctypes.data_as(_WORDS32), words.size))

    def run_raw(self, uniforms: Sequence[Sequence[Argument]]) -> None:
        """Run the program on one QPU per row of ``uniforms``. All rows must have the same length.

        Each row contains the uniforms of one QPU.
        """
        if len({len(row) for row in uniforms}) > 1:
            raise ValueError("expected the same number of uniforms for each QPU")
        words = numpy.array([[_uniform(item) for item in row] for row in uniforms], dtype=numpy.uint32)
        each = words.shape[1] if words.ndim == 2 else 0
        _require(_library().qpu_program_run_raw(self._handle, len(uniforms), words.ctypes.data_as(_WORDS32), each))

    def profile(self, on: bool = True) -> None:
        """Count how often later runs on the emulator execute each instruction. ``listing`` shows the counts."""
        _library().qpu_program_profile(self._handle, int(on))

    def cycles(self) -> Cycles | None:
        """Return the cost of the last run on the emulator, or None before the first run."""
        found = _Cycles()
        if _library().qpu_program_cycles(self._handle, ctypes.byref(found)) != 0:
            return None
        facts = {name: getattr(found, name) for name in Cycles._fields}
        return Cycles(**{**facts, "board": found.board.decode()})

    def listing(self) -> str:
        """Return the instructions with the source constructs that they implement.

        If the program was profiled, the listing also contains how often each instruction was executed.
        """
        return _text(_library().qpu_program_listing(self._handle))
