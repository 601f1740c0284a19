"""Generate an OpenCL kernel with TVM.

    python -m device.remote.opencl_worker < REQUEST

REQUEST is a JSON object: ``kernel`` (the kernel's file) and ``size``. The file's ``opencl_module(size)`` must return a
module with one function, whose loops are bound to work groups (``blockIdx``) and work items (``threadIdx``). The
results are ``source``, ``function`` (the kernel's name in the source), ``work_items`` (their number along each axis)
and ``group`` (the number per work group). For the output, see ``reporting``.

The runtime of the pinned TVM version does not support OpenCL. Therefore, the board's driver compiles the source, and
the loader starts the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device.remote import compiling
from device.remote.reporting import Fault, serve, stage, tell
from device.remote.rpc_worker import COMPILE_LIMIT_S

_PROTOTYPE = re.compile(r"__kernel void (?:__attribute__\S* )?(\w+)\((.*?)\)(?=[;\s{])")
_AXES = "xyz"


def _run(request: Mapping[str, Any]) -> None:
    path = Path(request["kernel"])
    with stage("compile", COMPILE_LIMIT_S):
        kernel = compiling.load(path, request["size"], target="opencl")
        function = compiling.only_function(path, kernel, "opencl_module")
        name, source = _generated(path, function)
        work_items, group = _launch(path, function)
    tell(source=source, function=name, work_items=work_items, group=group)


def _generated(path: Path, function: Any) -> tuple[str, str]:
    """The kernel's name and source. The kernel has the same arguments as the function, in the same order."""
    import tvm
    from tvm.target import Target

    module = tvm.IRModule({"main": function})
    target = Target({"kind": "opencl", "host": {"kind": "llvm"}})
    built = compiling.guarded(path, "does not compile", lambda: tvm.compile(module, target=target))
    source = "".join(str(item.inspect_source()) for item in built.mod.imports if item.kind == "opencl")
    kernels = dict(_PROTOTYPE.findall(source))
    if len(kernels) != 1:
        raise Fault("kernel", f"{path}: expected loops that form one OpenCL kernel, found {len(kernels)} kernels")
    ((name, listed),) = kernels.items()
    # TVM sorts the arguments by name, and leaves out those that the kernel does not use.
    given = {text.split()[-1]: text.strip() for text in listed.split(",")}
    wanted = [f"{parameter.name}_ptr" for parameter in function.params]
    if extra := sorted(set(given) - set(wanted)):
        raise Fault("kernel", f"{path}: TVM's kernel needs {', '.join(extra)}, which are not arguments of the function")
    arguments = ", ".join(given.get(item, f"__global void* {item}") for item in wanted)
    return name, source.replace(f"({listed})", f"({arguments})")


def _launch(path: Path, function: Any) -> tuple[list[int], list[int]]:
    """Return the number of work items along each axis, in total and per work group.

    The numbers are computed from the extents of the loops that are bound to work groups and work items.
    """
    from tvm import tirx
    from tvm_ffi import structural_walk

    extents: dict[str, int] = {}

    def note(loop: Any) -> None:
        if loop.thread_binding is None:
            return
        tag = str(loop.thread_binding.thread_tag)
        if not isinstance(loop.extent, tirx.IntImm):
            raise Fault("kernel", f"{path}: the extent of {tag} is known only at run time")
        if extents.setdefault(tag, int(loop.extent)) != int(loop.extent):
            raise Fault("kernel", f"{path}: {tag} has two extents, {extents[tag]} and {int(loop.extent)}")

    structural_walk(function.body, (tirx.For, note))
    group = [extents.get(f"threadIdx.{axis}", 1) for axis in _AXES]
    return [extents.get(f"blockIdx.{axis}", 1) * size for axis, size in zip(_AXES, group, strict=True)], group


if __name__ == "__main__":
    serve(_run)
