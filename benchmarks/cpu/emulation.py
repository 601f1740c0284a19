"""Run a Python script under QEMU, with an optional plugin, in a container with the target's root filesystem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.containers import run_in
from flow.context import Context

INSIDE = "/mnt"
"""The folder in the container into which callers mount their files."""
_LIMIT_S = 3600.0


def run(
    context: Context,
    tools: Path,
    site: Path,
    words: Sequence[str],
    *,
    binds: Mapping[Path, str],
    out: Path,
    log: Path,
    plugin: Path | None = None,
) -> None:
    """Run ``python3 WORDS`` with torch from ``site``.

    The folder ``out`` is mounted at /out, where the plugin writes the file ``counts``.

    ``binds`` maps paths on this PC to read-only mount points in the container. torch uses one thread. Raises
    CommandFailed, CommandTimedOut, EngineUnavailable.
    """
    libraries = f"/usr/lib/{context.native.gnu}"
    emulator = f"{INSIDE}/qemu"
    readable = {
        # The emulator's loader and libraries, at paths that the target does not use.
        tools / "usr/lib64": "/lib64",
        tools / libraries[1:]: libraries,
        tools / f"usr/bin/qemu-{context.target.qemu}": emulator,
        site: f"{INSIDE}/torch",
        **binds,
    }
    counted = []
    if plugin is not None:
        readable[plugin] = f"{INSIDE}/count.so"
        counted = ["-plugin", f"{INSIDE}/count.so,out=/out/counts"]
    run_in(
        context.client,
        context.config.image_reference("rootfs"),
        [emulator, *counted, "/usr/bin/python3", *words],
        architecture=context.target,
        binds=[*(f"{source}:{target}:ro" for source, target in readable.items()), f"{out}:/out:rw"],
        environment={
            "PYTHONPATH": f"{INSIDE}/torch",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        },
        limit_s=_LIMIT_S,
        log=log,
    )


def packages(root: Path, context: Context) -> Path:
    """Return the folder in the root filesystem ``root`` in which Python packages are installed."""
    return root / f"usr/local/lib/python{context.suite.python}/dist-packages"
