"""Compile a kernel's file to a shared library for a target. ``tvm`` is imported only in functions that use it.

A kernel's file defines ``SIZE``, ``module(size)``, ``inputs(size, random)``, ``reference(*inputs)`` and optionally
``TOLERANCE`` (relative, absolute) and ``operations(size)``; docs/remote.md describes them. The parameters of the
kernel's function must be the inputs, in the order of ``inputs``, and then the result.
"""

from __future__ import annotations

import importlib.util
import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy

from device.remote.reporting import Fault

TOLERANCE = (1e-5, 1e-6)
"""The default relative and absolute tolerance for floating-point results. It allows a few rounding errors in float32.

By default, integer results must be equal.
"""
SEED = 20180501
STANDALONE = Path(__file__).with_name("loader") / "standalone.cpp"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel file with its arrays. The kernel is not compiled yet."""

    name: str
    size: int
    arrays: tuple[Any, ...]
    """The inputs, as C-contiguous arrays."""
    expected: Any
    """The result that the reference computes."""
    tolerance: tuple[float, float]
    operations: int
    """The number of floating-point operations in one run; 0 if the file does not define ``operations``."""
    source: ModuleType

    @property
    def shape(self) -> str:
        """The types and shapes of the arrays as text."""
        return ", ".join(f"{item.dtype} {'×'.join(map(str, item.shape))}" for item in (*self.arrays, self.expected))

    def launch(self) -> Any:
        """The return value of ``launch(size)`` in an OpenCL kernel's file.

        Raises a Fault of kind ``kernel`` that gives the line number of the error.
        """
        path = Path(str(self.source.__file__))
        return guarded(path, "launch() fails", lambda: self.source.launch(self.size))


def load(path: Path, size: int, *, target: str = "") -> Kernel:
    """Load a kernel's file and create its arrays. ``size`` 0 selects the size that the file defines.

    A tolerance that the file defines for the target (``QPU_TOLERANCE``, ``OPENCL_TOLERANCE``) replaces ``TOLERANCE``,
    because, for example, QPUs round towards zero.

    Raises a Fault of kind ``kernel`` that gives the line number of the error.
    """
    source = guarded(path, "cannot be read", lambda: _import(path))
    required = ("SIZE", "inputs", "reference")
    if missing := [name for name in required if not hasattr(source, name)]:
        raise Fault("kernel", f"{path} does not define {', '.join(missing)}")
    size = size or guarded(path, "SIZE is not a number", lambda: int(source.SIZE))
    if size < 1:
        raise Fault("kernel", f"expected a size of 1 or more, found a size of {size}")
    random = numpy.random.default_rng(SEED)
    arrays = guarded(path, "inputs() fails", lambda: [_contiguous(item) for item in source.inputs(size, random)])
    expected = guarded(path, "reference() fails", lambda: _contiguous(source.reference(*arrays)))
    default = (0.0, 0.0) if expected.dtype.kind in "iu" else TOLERANCE
    tolerance = getattr(source, f"{target.upper()}_TOLERANCE", getattr(source, "TOLERANCE", default))
    count = getattr(source, "operations", lambda _: 0)
    return Kernel(
        name=path.stem,
        size=size,
        arrays=tuple(arrays),
        expected=expected,
        tolerance=guarded(path, "the tolerance is not a pair of numbers", lambda: _pair(tolerance)),
        operations=guarded(path, "operations() fails", lambda: int(count(size))),
        source=source,
    )


def export(
    path: Path, kernel: Kernel, target: Mapping[str, Any], linker: str, library: Path, *, standalone: bool
) -> str:
    """Compile ``kernel`` and link it to ``library``. Returns the name of the kernel's function.

    With ``standalone``, the library includes the parts of TVM's runtime that the kernel needs, for boards without TVM.
    The object file is also written, next to the library, so that the kernel can be linked into a loader.

    Raises a Fault of kind ``kernel``, or one of kind ``linker`` with the linker's output.
    """
    import tvm
    from tvm.support import cc
    from tvm.target import Target

    function = only_function(path, kernel, "module")
    entry = str(function.attrs["global_symbol"])
    module = tvm.IRModule({entry: function})
    built = guarded(path, "does not compile", lambda: tvm.compile(module, target=Target(dict(target))))
    runtime = ["-O2", "-std=c++17", str(STANDALONE)] if standalone else []
    link = cc.cross_compiler(linker, add_files=runtime)

    def link_and_keep(output: str, objects: list[str], options: Any = None) -> None:
        link(output, objects, options)
        shutil.copyfile(objects[0], library.with_suffix(".o"))

    try:
        built.export_library(str(library), fcompile=link_and_keep)
    except Exception as fault:
        raise Fault("linker", f"{linker}: {last_lines(str(fault))}") from fault
    return entry


def only_function(path: Path, kernel: Kernel, name: str) -> Any:
    """Call the kernel file's ``module`` or ``opencl_module``, and return the only function in the resulting TVM module.

    If the function has no global symbol, its name becomes its global symbol. Raises a Fault of kind ``kernel``.
    """
    import tvm

    if not hasattr(kernel.source, name):
        raise Fault("kernel", f"{path} does not define {name}, so it is not a TVM kernel")
    module = guarded(path, f"{name}() fails", lambda: getattr(kernel.source, name)(kernel.size))
    if not isinstance(module, tvm.IRModule):
        raise Fault("kernel", f"{path}: expected {name}() to return a tvm.IRModule, found {type(module).__name__}")
    names = [item.name_hint for item in module.get_global_vars()]
    if len(names) != 1:
        raise Fault("kernel", f"{path}: expected a module with one function, found {len(names)}: {', '.join(names)}")
    function = module[names[0]]
    named = function.attrs and "global_symbol" in function.attrs
    return function if named else function.with_attr("global_symbol", names[0])


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pitorch_kernel_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _pair(values: Any) -> tuple[float, float]:
    relative, absolute = values
    return float(relative), float(absolute)


def _contiguous(array: Any) -> Any:
    made = numpy.ascontiguousarray(array)
    if made.dtype.kind not in "fiu" or not made.dtype.isnative:
        raise TypeError(f"expected an array of numbers, found {made.dtype}")
    return made


def guarded(path: Path, problem: str, action: Callable[[], _T]) -> _T:
    """Run code from a kernel's file.

    Exceptions are converted to a Fault of kind ``kernel`` that gives the line number of the error.
    """
    try:
        return action()
    except Fault:
        raise
    except (Exception, SystemExit) as fault:
        frames = [item for item in traceback.extract_tb(fault.__traceback__) if item.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}" if frames else str(path)
        raise Fault("kernel", f"{where}: {problem}: {type(fault).__name__}: {last_lines(str(fault))}") from fault


def last_lines(text: str) -> str:
    """Join the last three non-empty lines of a text; return at most 600 characters of the result."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:600]
