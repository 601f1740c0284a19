"""The evidence of a run: one JSON file that links the source code to the results from the board.

Schema 1. Each value is read from its authoritative source. A value that could not be determined is left empty rather
than guessed.

``schema``      1
``made``        the time at which the run ended (UTC, ISO 8601)
``source``      where the tests come from: ``commit`` (40 hex digits, or empty outside a git checkout), ``dirty``
                (whether there are uncommitted changes) and ``changes`` (the uncommitted changes)
``target``      ``label``, ``flavour``, ``suite``, ``architecture``
``steps``       the build's steps: ``step``, ``key`` (SHA-256 of its inputs), ``seconds``, ``warnings``, ``artefacts``
                (``name``, ``size`` in bytes, ``sha256``) and the ``source`` (``commit``, ``dirty``) of the build
``image``       the exported image: ``reference``, ``id``, registry ``digests``, the ``source`` that it was built from,
                and ``left_out`` (the pockets that the image lacks because their index could not be verified)
``wheels``      the wheels in the tree, as recorded by the build of its image and by ``deploy``: ``name``, ``size``,
                ``sha256``. ``wheels_unknown`` states why the tree may contain other wheels, for example because its
                image was not built on this PC; ``wheels_unknown`` is empty if all wheels are known
``rootfs``      the exported tree: ``path``, ``sha256`` (the hash of names, owners, modes and contents),
                ``image_tree_sha256`` (the corresponding hash for the image's tree), ``counts``, the audit's
                ``findings``, the layers that were ``deployed`` after the export, and the ``source`` of the export
                (``commit``, ``dirty``)
``device``      the facts that the board reported (``device.onboard.facts``), and facts about the run: ``access``,
                ``boot_seconds``, ``through`` (``boot`` or ``enter-nfsroot``), ``execution``, ``execution_reason``, and
                for a virtual machine ``init`` and ``cpu``
``tools``       versions of the programs on the host
``without``     components that are missing from the image; their tests were skipped
``links``       checks of the chain (``device.chain``): ``name``, ``expected``, ``found``, ``holds`` (null: unknown) and
                ``severity`` (``error`` or ``warning``). If a link with the severity ``error`` does not hold, the tested
                files are not the files that were built, and the run does not pass
``results``     ``passed``, ``failed``, ``errors``, ``skipped``, ``seconds`` and ``tests`` (``nodeid``, ``outcome``,
                ``seconds``, ``text``)
``timing``      the timing document from the board (``tests/device/timing.py``), or ``{"reason": …}`` if there is none

``execution`` is ``emulation`` if this program started the machine in QEMU, or if the device tree's ``compatible``
strings contain "virt" or "qemu". ``execution`` is ``hardware`` if the board's device tree names a Raspberry Pi and
contains the revision code and the serial number that a Pi's firmware writes. In all other cases, ``execution`` is
``unverified``. Only results whose ``execution`` is ``hardware`` count as measured on hardware. If QEMU's machine
raspi2b uses the device tree of a kernel package, the machine reports the model name, but neither a revision code nor a
serial number. A deliberately forged device tree is not detected.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device import chain
from device.record import Record, count, missing_components
from nfsroot import qemu
from nfsroot.layout import Layout
from toolchain import checkout, files, process
from toolchain.config import Config
from toolchain.errors import CommandFailed, ProgramMissing
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX

SCHEMA = 1

EXTENSION, EXTENSION_LAYER = "pitorch_qpu_ops", "qpu-ops-site.tar"
"""The Python distribution that ``deploy`` installs, and the name of its layer."""


def execution_of(facts: Mapping[str, Any], *, started_by_us: bool) -> tuple[str, str]:
    """Return the kind of machine (``emulation``, ``hardware`` or ``unverified``), and the reason."""
    model = facts.get("model", "")
    if started_by_us:
        return "emulation", f"a QEMU virtual machine that this run started ({model or 'no model'})"
    suspicious = [word for word in facts.get("compatible", ()) if "virt" in word or "qemu" in word.lower()]
    if suspicious:
        return "emulation", f"the board's device tree contains {', '.join(suspicious)}"
    if not model.startswith("Raspberry Pi"):
        return "unverified", f"the board's device tree does not name a Raspberry Pi (model: {model or 'none'})"
    firmware = facts.get("firmware", {})
    written = (("revision code", "revision"), ("serial number", "serial_number"))
    missing = [name for name, key in written if not str(firmware.get(key, "")).strip("0")]
    if missing:
        return "unverified", (
            f"the board's device tree names {model}, but lacks the {' and the '.join(missing)} that a Pi's firmware "
            "writes: the board is probably an emulator with a Pi's device tree"
        )
    return "hardware", f"the board's device tree names {model} and contains the data that a Pi's firmware writes"


def collect(
    config: Config, record: Record, *, started_by_us: bool, access: str, through: str, checksums: str = ""
) -> dict[str, Any]:
    """Return the evidence document of a run. ``checksums`` lists the files that the run deployed."""
    layout = Layout.of(config)
    export = Manifest.read(layout.manifest)
    steps = _steps(config, layout)
    source = checkout.state()
    execution, reason = execution_of(record.facts, started_by_us=started_by_us)
    facts = dict(record.facts)
    return {
        "schema": SCHEMA,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source": source,
        "target": {
            "label": config.image.label,
            "flavour": config.image.flavour,
            "suite": config.image.suite,
            "architecture": config.image.architecture,
        },
        "steps": [_step(item) for item in steps],
        "image": _image(config, export, steps),
        **_wheels(export),
        "rootfs": _rootfs(layout, export),
        "device": {
            **facts,
            "access": access,
            "through": through,
            "execution": execution,
            "execution_reason": reason,
            **{key: value for key, value in record.booted.items() if key in ("boot_seconds", "init", "cpu")},
        },
        "tools": tools(config),
        "without": missing_components(record.tests),
        "links": chain.check(config, record, export, steps, source=source, checksums=checksums),
        "results": {
            **count(record.tests),
            "seconds": record.seconds,
            "tests": [vars(test) for test in record.tests],
        },
        "timing": dict(record.timing),
    }


def tools(config: Config) -> dict[str, str]:
    """Return the versions of the programs on the host. Programs that are not installed are omitted."""
    found = {
        "python": platform.python_version(),
        "host_kernel": platform.release(),
        **{name: importlib.metadata.version(name) for name in ("pitorch", "labgrid", "pytest", "matplotlib")},
    }
    with contextlib.suppress(CommandFailed, ProgramMissing):
        found["qemu"] = qemu.qemu_version(config.image.architecture)
    with contextlib.suppress(CommandFailed, ProgramMissing):
        program = process.require_program("ganesha.nfsd", "to serve the exported tree")
        if version := re.search(r"V?(\d+(?:\.\d+)+)", process.output_of([program, "-v"])):
            found["nfs-ganesha"] = version[1]
    with contextlib.suppress(CommandFailed, ProgramMissing):
        text = process.run(["ssh", "-V"]).output
        found["ssh"] = text.partition(",")[0].strip()
    return found


def _steps(config: Config, layout: Layout) -> list[Manifest]:
    """Return the manifests of the build steps, oldest first. Manifests that a concurrent build removes are omitted."""
    found = []
    for path in config.target_root.glob(f"*{MANIFEST_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            written = path.stat().st_mtime
            if path != layout.manifest and (manifest := Manifest.read(path)) is not None:
                found.append((written, manifest))
    return [manifest for _, manifest in sorted(found, key=lambda item: item[0])]


def _step(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "key": manifest.key,
        "seconds": manifest.seconds,
        "warnings": list(manifest.warnings),
        "artefacts": [
            {"name": item.path.name, "size": item.size, "sha256": item.sha256} for item in manifest.artefacts
        ],
        "source": dict(manifest.source),
    }


def _image(config: Config, export: Manifest | None, steps: Sequence[Manifest]) -> dict[str, Any]:
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    return {
        "reference": str(facts.get("image", config.image_reference("system"))),
        "id": str(facts.get("image_id", "")),
        "digests": list(facts.get("image_digests", ())),
        "source": dict(chain.image_source(export, steps)) if export is not None else {},
        "left_out": list(facts.get("left_out", ())),
    }


def _wheels(export: Manifest | None) -> dict[str, Any]:
    """Return the wheels in the exported tree, which may differ from those in the build folder."""
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    unknown = _wheels_unknown(facts)
    found = {_distribution(item["name"]): dict(item) for item in facts.get("wheels", ())}
    for layer in facts.get("deployed", ()):
        if wheel := layer.get("wheel"):
            found[_distribution(wheel["name"])] = dict(wheel)
        elif layer["layer"] == EXTENSION_LAYER:
            found.pop(EXTENSION, None)
            unknown = unknown or f"the deployment of {EXTENSION_LAYER} did not record its wheel: run ./inv deploy again"
    return {"wheels": sorted(found.values(), key=lambda item: str(item["name"])), "wheels_unknown": unknown}


def _wheels_unknown(facts: Mapping[str, Any]) -> str:
    if "wheels" in facts:
        return ""
    image = str(facts.get("image_id", ""))
    if not image:
        return "the image that the tree was exported from is unknown"
    if image != facts.get("built_image"):
        return f"{facts.get('image', 'the image')} was not built here, and an image does not record its wheels"
    return "the build did not record the wheels: run ./inv build-image --again=system and ./inv export-nfsroot"


def _distribution(wheel: str) -> str:
    return wheel.partition("-")[0].lower()


def _rootfs(layout: Layout, export: Manifest | None) -> dict[str, Any]:
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    return {
        "path": str(layout.tree),
        "sha256": str(facts.get("rootfs_sha256", "")),
        "image_tree_sha256": str(facts.get("image_tree_sha256", "")),
        "counts": dict(facts.get("counts", {})),
        "findings": list(facts.get("findings", ())),
        "deployed": list(facts.get("deployed", ())),
        "source": dict(export.source) if export is not None else {},
    }


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the evidence file atomically."""
    files.write_text_atomically(path, json.dumps(document, indent=2, sort_keys=False) + "\n")
