"""Export the system that the virtual machine boots before it chroots into the exported tree.

A real board that runs enter-nfsroot has booted another system from its card. In QEMU, the image of the root filesystem
takes the place of the system on the card. This bare system lacks torch, libqpu and the extension modules, and is
exported to a separate folder. If the device suite finds torch and the modules, it has therefore found them in the
exported tree.
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
    """Return the paths of the exported bare system."""
    return Layout(absolute(config.target_root / "bare-system"))


def ready(config: Config) -> Layout:
    """Export the image unless it has already been exported; return the export's paths.

    Raises the same errors as ``export``, and ArtefactMissing if the engine does not have the image. The image is absent
    if the system image was pulled and not built here.
    """
    process.require_root("to export and serve the system that chroots into the tree", "./inv test-on-pi --chroot")
    layout = layout_of(config)
    ensure_running(config)
    with contextlib.closing(connect()) as client:
        image = unpack.find_image(client, config.image_reference(_ROLE), config.image.target)
    why = "never exported"
    with contextlib.suppress(ArtefactMissing, ArtefactDamaged):
        if require_export(layout).facts["image_id"] == image.id:
            progress.say(f"    bare system: skipped ({image.reference} unchanged)")
            return layout
        why = f"{image.reference} changed"
    progress.say(f"    bare system: runs ({why})")
    export(config, destination=layout.place, role=_ROLE)
    return layout
