"""A system for the virtual machine to boot when it is to enter the exported tree as a chroot.

A real board that runs enter-nfsroot has a system of its own, on its card. In QEMU the image of the root filesystem
alone plays that part, exported to a folder of its own: the same packages, kernel and init, and neither torch nor libqpu
nor the extension modules. What the suite finds of those, it finds in the tree that was entered.
"""

from __future__ import annotations

import contextlib

from engine.connect import connect
from engine.start import ensure_running
from nfsroot import unpack
from nfsroot.export import export
from nfsroot.layout import Layout, require_export
from toolchain import process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, ArtefactMissing
from toolchain.files import absolute

_ROLE = "rootfs"


def layout_of(config: Config) -> Layout:
    """Where its export is."""
    return Layout(absolute(config.target_root / "own-system"))


def ready(config: Config) -> Layout:
    """Its export, made where there is none of the image as it is.

    Raises RootNeeded, ArtefactMissing where the engine has no such image (the system image was pulled, not built here),
    and what ``export`` raises.
    """
    process.require_root("to export and to serve the system that enters the tree", "./inv test-on-pi --chroot")
    layout = layout_of(config)
    ensure_running(config)
    with contextlib.closing(connect()) as client:
        image = unpack.find_image(client, config.image_reference(_ROLE), config.image.target)
    why = "never finished before"
    with contextlib.suppress(ArtefactMissing, ArtefactDamaged):
        if require_export(layout).facts["image_id"] == image.id:
            progress.say(f"    system that enters the tree: skipped ({image.reference} unchanged)")
            return layout
        why = f"{image.reference} is another"
    progress.say(f"    system that enters the tree: runs ({why})")
    export(config, destination=layout.place, role=_ROLE)
    return layout
