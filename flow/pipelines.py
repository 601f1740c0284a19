"""The pipelines: the steps of each job, in the order of the data flow.

::

    mirror ─┬── tools ──┬── builder ─── libqpu ───┬── qpu-ops ──┬── system
            │           ├── torch-site ─┬─────────┘             │
            └── archives ── rootfs ─────┴── base ───────────────┘
                        └── dev ────── workbench
    torch ───── torch-site, archives
    mirror, builder, torch, torch-site ── companions ── system
    archives, rootfs, torch, libqpu, qpu-ops, companions ── sbom

    mirror ── torch-builder ──┬── torch-wheel
          └── torch-source ───┘

    mirror ── card-firmware

    mirror ── tvm-ffi-builder ── tvm-ffi-wheel

    mirror ── cuda-builder ── cuda-wheel

Shells require the development root. The extension is built in the development root if the native compiler is
disabled or if only the target's compiler generates the right code; otherwise, it is built in the builder image. If only
the target's compiler generates the right code, libqpu is also compiled in the development root.

The steps' manifests and products are in the target's folder.
"""

from __future__ import annotations

from flow.compilers import is_extension_cross_compiled
from flow.context import Context
from flow.steps import (
    archives,
    base,
    builder,
    card_firmware,
    companions,
    cuda_wheel,
    dev,
    libqpu,
    mirror,
    native_builder,
    qpu_ops,
    rootfs,
    sbom,
    system,
    tools,
    torch,
    torch_site,
    torch_source,
    torch_wheel,
    tvm_ffi,
    tvm_ffi_wheel,
    tvm_server,
    workbench,
)
from toolchain.architecture import Architecture
from toolchain.steps import Pipeline


def main_job(context: Context, *, with_workbench: bool = False) -> Pipeline:
    """Return the steps from the mirror to the system image and, optionally, the workbench image."""
    config = context.config
    with_dev = with_workbench or not is_extension_cross_compiled(context)
    modules = (
        *(mirror, tools, builder),
        *([dev] if with_dev else []),
        *(torch, archives, torch_site, rootfs, base, libqpu, qpu_ops),
        *([companions] if config.image.companions else []),
        *([tvm_server] if config.remote.server_in_image else []),
        *([tvm_ffi] if config.remote.ffi_in_image else []),
        system,
        sbom,
        *([workbench] if with_workbench else []),
    )
    return Pipeline(context.root, [module.step(context) for module in modules])


def torch_job(context: Context, *, again: bool = False) -> Pipeline:
    """Return the steps that build a torch wheel. With ``again``, a wheel in the artefact cache is ignored."""
    builder_step = native_builder.step(context, "torch-builder", "torch's builder image")
    before = (mirror.step(context), builder_step, torch_source.step(context))
    return Pipeline(context.root, (*before, torch_wheel.step(context, again=again)))


def cpu_job(context: Context) -> Pipeline:
    """Return the steps that produce the root filesystem and unpack torch, for the benchmark ``cpu``."""
    modules = (mirror, tools, torch, archives, torch_site, rootfs)
    return Pipeline(context.root, [module.step(context) for module in modules])


def firmware_job(context: Context, name: str) -> Pipeline:
    """Return the step that fetches firmware for boards; ``name`` is a key of ``card_firmware.PARTS``."""
    return Pipeline(context.root, [mirror.step(context), card_firmware.step(context, name)])


def tvm_ffi_job(context: Context) -> Pipeline:
    """Return the steps that build TVM FFI's wheel. Raises PlatformMismatch or RecipeInvalid."""
    builder_step = native_builder.step(context, "tvm-ffi-builder", "builder image of TVM's FFI")
    return Pipeline(context.root, (mirror.step(context), builder_step, tvm_ffi_wheel.step(context)))


def cuda_job(context: Context, target: Architecture) -> Pipeline:
    """Return the steps that build the wheel with CUDA operators for an architecture."""
    builder_step = native_builder.step(context, "cuda-builder", "CUDA builder image", with_target=False)
    return Pipeline(context.root, (mirror.step(context), builder_step, cuda_wheel.step(context, target)))
