"""A kernel's file becomes a shared library for a target. Runs beside TVM (``tvm`` is imported where it is used).

A kernel's file defines ``SIZE``, ``module(size)``, ``inputs(size, random)``, ``reference(*inputs)`` and, where it
wants, ``TOLERANCE`` (relative, absolute) and ``operations(size)``; docs/remote.md describes them. The kernel's function
takes the inputs in their order, then the result.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy

from device.remote.reporting import Fault

TOLERANCE = (1e-5, 1e-6)
"""Relative and absolute, of a kernel that states none: float32 with a few roundings."""
SEED = 20180501
STANDALONE = Path(__file__).with_name("loader") / "standalone.cpp"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Kernel:
    """A kernel's file, read: its arrays are made, its function is not compiled yet."""

    name: str
    size: int
    arrays: tuple[Any, ...]
    """Inputs, C-contiguous."""
    expected: Any
    """What the reference made of them."""
    tolerance: tuple[float, float]
    operations: int
    """Floating-point operations of one run; 0 where the kernel does not say."""
    source: ModuleType

    @property
    def shape(self) -> str:
        """What it computes on, in words."""
        return ", ".join(f"{item.dtype} {'×'.join(map(str, item.shape))}" for item in (*self.arrays, self.expected))


def load(path: Path, size: int, *, qpu: bool = False) -> Kernel:
    """Read a kernel's file and make its arrays; ``size`` 0 takes the file's own.

    ``qpu``: it will run on the QPUs, whose arithmetic rounds towards zero: ``QPU_TOLERANCE`` counts, if there is one.

    Raises Fault ``kernel`` with the line of the file that is wrong.
    """
    source = _guarded(path, "cannot be read", lambda: _imported(path))
    wanted = ("SIZE", "inputs", "reference")
    if missing := [name for name in wanted if not hasattr(source, name)]:
        raise Fault("kernel", f"{path} does not define {', '.join(missing)}")
    size = size or int(source.SIZE)
    if size < 1:
        raise Fault("kernel", f"a size of {size}: expected 1 or more")
    random = numpy.random.default_rng(SEED)
    arrays = _guarded(path, "cannot make its inputs", lambda: [_plain(item) for item in source.inputs(size, random)])
    expected = _guarded(path, "has a reference that fails", lambda: _plain(source.reference(*arrays)))
    relative, absolute = getattr(source, "TOLERANCE", TOLERANCE)
    if qpu:
        relative, absolute = getattr(source, "QPU_TOLERANCE", (relative, absolute))
    count = getattr(source, "operations", lambda _: 0)
    return Kernel(
        name=path.stem,
        size=size,
        arrays=tuple(arrays),
        expected=expected,
        tolerance=(float(relative), float(absolute)),
        operations=_guarded(path, "cannot count its operations", lambda: int(count(size))),
        source=source,
    )


def export(
    path: Path, kernel: Kernel, target: Mapping[str, Any], linker: str, library: Path, *, standalone: bool
) -> str:
    """Compile and link ``kernel`` to ``library``; returns the name of its function.

    ``standalone``: for a board without TVM's runtime, so what the kernel needs of it is linked in.

    Raises Fault ``kernel``, or ``linker`` with the linker's own words.
    """
    import tvm
    from tvm.support import cc
    from tvm.target import Target

    if not hasattr(kernel.source, "module"):
        raise Fault("kernel", f"{path} does not define module, so it is no kernel for TVM")
    module = _guarded(path, "cannot make its module", lambda: kernel.source.module(kernel.size))
    if not isinstance(module, tvm.IRModule):
        raise Fault("kernel", f"{path}: module() is to return a tvm.IRModule, found {type(module).__name__}")
    names = [item.name_hint for item in module.get_global_vars()]
    if len(names) != 1:
        raise Fault("kernel", f"{path}: expected a module of one function, found {len(names)}: {', '.join(names)}")
    function = module[names[0]]
    entry = str(function.attrs["global_symbol"]) if function.attrs and "global_symbol" in function.attrs else names[0]
    built = _guarded(path, "does not compile", lambda: tvm.compile(module, target=Target(dict(target))))
    own = ["-O2", "-std=c++17", str(STANDALONE)] if standalone else []
    try:
        built.export_library(str(library), fcompile=cc.cross_compiler(linker, add_files=own))
    except Exception as fault:
        raise Fault("linker", f"{linker}: {_last_words(str(fault))}") from fault
    return entry


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pitorch_kernel_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _plain(array: Any) -> Any:
    made = numpy.ascontiguousarray(array)
    if made.dtype.kind not in "fiu" or not made.dtype.isnative:
        raise TypeError(f"expected an array of numbers, found {made.dtype}")
    return made


def _guarded(path: Path, what: str, action: Callable[[], _T]) -> _T:
    """Run what a kernel's file brings; whatever it raises is the kernel's fault, told with its line."""
    try:
        return action()
    except Fault:
        raise
    except Exception as fault:
        frames = [item for item in traceback.extract_tb(fault.__traceback__) if item.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}" if frames else str(path)
        raise Fault("kernel", f"{where} {what}: {type(fault).__name__}: {_last_words(str(fault))}") from fault


def _last_words(text: str) -> str:
    """The last lines that say something, in one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:600]
