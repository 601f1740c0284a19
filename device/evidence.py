"""The evidence of a run: one JSON file that links the source to what the board said.

Schema 1. Every value comes from the place that knows it; what could not be learnt is empty and never guessed.

``schema``      1
``made``        when the run ended, UTC, ISO 8601
``source``      of the tests: ``commit`` (40 hex digits, or empty outside a git checkout), ``dirty`` and the
                ``changes`` that make it so
``target``      ``label``, ``flavour``, ``suite``, ``architecture``
``steps``       the build's steps: ``step``, ``key`` (SHA-256 of its inputs), ``seconds``, ``warnings``, ``artefacts``
                (``name``, ``size`` in bytes, ``sha256``) and the ``source`` (``commit``, ``dirty``) that made it
``image``       ``reference``, ``id`` and registry ``digests`` of the image that was exported, the ``source`` that it
                was built from, and the pockets (by suite) that were ``left_out`` of it
``wheels``      the wheels in the tree, as the build of its image noted them and ``deploy`` since: ``name``, ``size``,
                ``sha256``; why there may be others (an image from elsewhere) says ``wheels_unknown``, else empty
``rootfs``      the exported tree: ``path``, ``sha256`` over names, owners, modes and contents, the same as it was in
                the image (``image_tree_sha256``), ``counts``, the audit's ``findings``, the layers
                ``deployed`` to it since, and the ``source`` that exported it
``device``      what the board said of itself (``device.onboard.facts``), and of this run: ``access``, ``init``,
                ``boot_seconds``, ``through`` (``boot`` or ``enter-nfsroot``), ``execution`` and ``execution_reason``
``tools``       versions of the programs on this side
``without``     components that the image lacks, so that their tests were skipped
``links``       checks that the chain holds: ``name``, ``expected``, ``found``, ``holds`` (null: cannot be told) and
                ``severity``: ``error`` where a link that does not hold means that what was tested is not what was
                built, so that the run is no pass, else ``warning``
``results``     ``passed``, ``failed``, ``errors``, ``skipped``, ``seconds`` and ``tests`` (``nodeid``, ``outcome``,
                ``seconds``, ``text``)
``timing``      the timing document of the board (``tests/device/timing.py``), or ``{"reason": …}`` why there is none

``execution`` is ``emulation`` when this program started the machine in QEMU; ``hardware`` when the board's device
tree names a Raspberry Pi, has the revision code and the serial number that a Pi's firmware writes into it, and nothing
speaks against it; else ``unverified``. Only ``hardware`` counts as measured. QEMU's raspi2b with a kernel's device tree
has the model and not the other two. A device tree that was forged on purpose is not found out.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import platform
import posixpath
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfsroot import qemu
from nfsroot.layout import Layout
from nfsroot.tree import inside
from toolchain import checkout, files, process
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, CommandFailed, ProgramMissing
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import MANIFEST_SUFFIX

SCHEMA = 1

OUTCOMES = ("passed", "failed", "error", "skipped")

LAYERS = {"libqpu": "libqpu", "qpu-ops": "QPU extension"}
"""Steps whose layers are compared with the tree, file by file; in words."""

EXTENSION, EXTENSION_LAYER = "pitorch_qpu_ops", "qpu-ops-site.tar"
"""The distribution that is deployed, and its layer."""

_ABSENT = re.compile(r"the image is built without (.+)")


@dataclass(frozen=True)
class Test:
    """A test of the suite and how it ended: passed, failed, error or skipped. ``text`` says why, when not passed."""

    nodeid: str
    outcome: str
    seconds: float
    text: str = ""

    @property
    def file(self) -> str:
        """The test file."""
        return self.nodeid.partition("::")[0]

    @property
    def name(self) -> str:
        """The test within its file."""
        return self.nodeid.partition("::")[2]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the board said, read back. ``error`` is a fault of the run itself."""

    facts: Mapping[str, Any]
    booted: Mapping[str, Any]
    tests: tuple[Test, ...]
    timing: Mapping[str, Any]
    seconds: float
    whole: bool
    error: Mapping[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; one that breaks off is as good as its last whole line."""
        kept: dict[str, dict[str, Any]] = {}
        tests: dict[str, Test] = {}
        collected: list[str] = []
        for event in _events(path):
            what = event.pop("pitorch")
            if what == "result":
                tests[event["nodeid"]] = Test(event["nodeid"], event["outcome"], event["seconds"], event["text"])
            elif what == "collected":
                collected = event["nodeids"]
            else:
                kept[what] = event
        ended = "pytest ended" if "end" in kept else "the board went away"
        for nodeid in collected:
            tests.setdefault(nodeid, Test(nodeid, "error", 0.0, f"not run: {ended} before"))
        return cls(
            facts=kept.get("facts", {}),
            booted=kept.get("booted", {}),
            tests=tuple(tests.values()),
            timing=kept.get("timing", {}).get("document", {"reason": "the timing was not asked for"}),
            seconds=kept.get("end", {}).get("seconds", 0.0),
            whole="end" in kept,
            error=kept.get("error"),
        )


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "pitorch" in event:
                yield event


def execution_of(facts: Mapping[str, Any], *, started_by_us: bool) -> tuple[str, str]:
    """``emulation``, ``hardware`` or ``unverified``, and why."""
    model = facts.get("model", "")
    if started_by_us:
        return "emulation", f"a virtual machine that this run started in QEMU ({model or 'no model'})"
    suspicious = [word for word in facts.get("compatible", ()) if "virt" in word or "qemu" in word.lower()]
    if suspicious:
        return "emulation", f"the board's device tree says {', '.join(suspicious)}"
    if not model.startswith("Raspberry Pi"):
        return "unverified", f"the board's device tree names no Raspberry Pi (model: {model or 'none'})"
    firmware = facts.get("firmware", {})
    written = (("revision code", "revision"), ("serial number", "serial_number"))
    lacking = [name for name, key in written if not str(firmware.get(key, "")).strip("0")]
    if lacking:
        return "unverified", (
            f"the board's device tree says {model}, but has not the {' and the '.join(lacking)} that a Pi's firmware "
            "writes there: so it is in an emulator that was given a Pi's device tree"
        )
    return "hardware", f"the board's device tree says {model} and has what a Pi's firmware writes there"


def collect(config: Config, record: Record, *, started_by_us: bool, access: str, through: str) -> dict[str, Any]:
    """The evidence document of a run."""
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
            **{key: value for key, value in record.booted.items() if key in ("boot_seconds", "init")},
        },
        "tools": tools(config),
        "without": without(record.tests),
        "links": links(config, record, export, steps, source=source),
        "results": {
            **count(record.tests),
            "seconds": record.seconds,
            "tests": [vars(test) for test in record.tests],
        },
        "timing": dict(record.timing),
    }


def count(tests: Sequence[Test]) -> dict[str, int]:
    """How many tests ended which way."""
    ended = [test.outcome for test in tests]
    return {
        "passed": ended.count("passed"),
        "failed": ended.count("failed"),
        "errors": ended.count("error"),
        "skipped": ended.count("skipped"),
    }


def without(tests: Sequence[Test]) -> list[str]:
    """Components that the image lacks, as the skipped tests say."""
    absent: dict[str, None] = {}
    for test in tests:
        if test.outcome == "skipped" and (found := _ABSENT.search(test.text)):
            for part in re.split(r" and |, ", found[1].partition(":")[0]):
                absent[part.strip()] = None
    return sorted(absent)


def tools(config: Config) -> dict[str, str]:
    """Versions of the programs on this side; those that are not installed are left out."""
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


def links(
    config: Config,
    record: Record,
    export: Manifest | None,
    steps: Sequence[Manifest],
    *,
    source: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Checks that the board ran what was built: commit → image → export → tree → board.

    Three things are done on purpose and break nothing: another commit that was not built anew, a pulled image on a
    machine that built one too, and layers that were deployed to the tree of an older image.
    """
    tree = Layout.of(config).tree
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    made: list[dict[str, Any]] = []

    def link(name: str, expected: str, found: str, *, holds: bool | None, grave: bool = True) -> None:
        severity = "error" if grave else "warning"
        made.append({"name": name, "expected": expected, "found": found, "holds": holds, "severity": severity})

    def equal(name: str, expected: str, found: str, *, grave: bool = True) -> None:
        link(name, expected, found, holds=expected == found, grave=grave)

    if export is not None:
        for name, origin in (
            ("the image was built from the commit of the tests", _image_source(export, steps)),
            ("the tree was exported from the commit of the tests", export.source),
        ):
            holds = checkout.same(source, origin)
            expected, found = checkout.described(source), checkout.described(origin)
            if holds is False and expected == found:
                found += ", perhaps others"
            link(name, expected, found, holds=holds, grave=False)
    built, exported = _image_built(steps), str(facts.get("image_id", ""))
    deployed = {str(item["layer"]) for item in facts.get("deployed", ())}
    if built and exported:
        built_since = facts.get("built_image") != built
        equal(
            "the exported tree is of the image that was built last",
            built,
            exported,
            grave=built_since and not deployed,
        )
    for step, title in LAYERS.items():
        layer = _layer(steps, step)
        ours = exported in (built, facts.get("built_image"))
        if layer is not None and exported and (ours or layer.path.name in deployed):
            found, holds = _held(tree, layer)
            link(f"the tree holds the {title} that was built last", layer.sha256, found, holds=holds)
    libqpu = record.facts.get("libqpu", {})
    if libqpu:
        in_tree = tree / str(libqpu["path"]).lstrip("/")
        name = "the board loads the tree's libqpu"
        try:
            expected = files.sha256_of(in_tree) if in_tree.is_file() else f"no {in_tree}"
        except PermissionError:
            link(name, f"{in_tree}, which only root can read", libqpu["sha256"], holds=None)
        else:
            equal(name, expected, libqpu["sha256"])
    for name, digest in record.facts.get("records", {}).items():
        if found := _record_in_tree(tree, name):
            equal(f"the board imports the tree's {name}", found, digest)
    root = record.facts.get("root", "")
    if " nfs" in root:
        # A server may give the tree another name: what is in it is compared above.
        equal("the board's root is the exported tree", str(tree), root.split()[0].partition(":")[2], grave=False)
    return made


def failing(document: Mapping[str, Any], severity: str) -> list[str]:
    """Links of a severity that do not hold, a line each."""
    return [
        f"{link['name']}: expected {_short(link['expected'])}, found {_short(link['found'])}"
        for link in document["links"]
        if link["holds"] is False and link["severity"] == severity
    ]


def _short(text: str) -> str:
    """Hashes and commits by their first twelve digits."""
    return re.sub(r"\b(?:sha256:)?([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", text)


def _last(steps: Sequence[Manifest], name: str) -> Manifest | None:
    return next((step for step in reversed(steps) if step.step == name), None)


def _image_built(steps: Sequence[Manifest]) -> str:
    """Id of the image that was built here last; empty without one."""
    system = _last(steps, "system")
    return str(system.facts.get("image", "")) if system is not None else ""


def _image_source(export: Manifest, steps: Sequence[Manifest]) -> Mapping[str, Any]:
    """The commit that the exported image was built from, as the export noted it, or else the build."""
    if noted := export.facts.get("image_source"):
        return dict(noted)
    system = _last(steps, "system")
    return system.source if system is not None and system.facts.get("image") == export.facts.get("image_id") else {}


def _layer(steps: Sequence[Manifest], name: str) -> Artefact | None:
    """The layer that a step made last; None without one."""
    step = _last(steps, name)
    made = [item for item in step.artefacts if item.path.suffix == ".tar"] if step is not None else []
    return made[0] if made else None


def _held(tree: Path, layer: Artefact) -> tuple[str, bool | None]:
    """The layer's SHA-256 when the tree has all of it, else what the tree has otherwise; None when nobody can tell."""
    try:
        layer.verify()
        others = _otherwise(tree, layer.path)
    except (ArtefactMissing, ArtefactDamaged) as fault:
        return f"nothing to compare with: {fault.summary}", None
    except (OSError, tarfile.TarError) as fault:
        return f"not comparable: {fault}", None
    if not others:
        return layer.sha256, True
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"another {', '.join(others[:3])}{more}", False


def _otherwise(tree: Path, layer: Path) -> list[str]:
    """Files and links of a layer that the tree lacks or has otherwise.

    Byte code does not count: Python checks it against its source, and a board that runs from the tree may write it.
    """
    others = []
    with tarfile.open(layer, "r:") as archive:
        for member in archive:
            path = posixpath.normpath(member.name).lstrip("/")
            place = inside(tree, path)
            if member.issym():
                same = place.is_symlink() and place.readlink() == Path(member.linkname)
            elif member.isfile() and not path.endswith(".pyc"):
                stream = archive.extractfile(member)
                content = hashlib.sha256(stream.read() if stream else b"").hexdigest()
                same = place.is_file() and not place.is_symlink() and files.sha256_of(place) == content
            else:
                same = True
            if not same:
                others.append(f"/{path}")
    return others


def _record_in_tree(tree: Path, name: str) -> str:
    wanted = name.replace("-", "_").lower()
    for pattern in ("usr/lib/python3*/dist-packages", "usr/local/lib/python3*/dist-packages", "opt/*/lib/python3*/*"):
        for folder in tree.glob(pattern):
            for record in folder.glob("*.dist-info/RECORD"):
                if record.parent.name.rpartition("-")[0].lower() == wanted or record.parent.name.lower().startswith(
                    f"{wanted}-"
                ):
                    return hashlib.sha256(record.read_text().encode()).hexdigest()
    return ""


def _steps(config: Config, layout: Layout) -> list[Manifest]:
    """The manifests of the build, oldest first."""
    paths = [path for path in config.target_root.rglob(f"*{MANIFEST_SUFFIX}") if not _inside(path, layout)]
    paths.sort(key=lambda path: path.stat().st_mtime)
    return [found for path in paths if (found := Manifest.read(path)) is not None]


def _inside(path: Path, layout: Layout) -> bool:
    return path == layout.manifest or any(
        path.is_relative_to(folder) for folder in (layout.place, layout.aside, layout.folder)
    )


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
        "source": dict(_image_source(export, steps)) if export is not None else {},
        "left_out": list(facts.get("left_out", ())),
    }


def _wheels(export: Manifest | None) -> dict[str, Any]:
    """The wheels in the exported tree; what the build folder holds by now may be others."""
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    unknown = _wheels_unknown(facts)
    found = {_distribution(item["name"]): dict(item) for item in facts.get("wheels", ())}
    for layer in facts.get("deployed", ()):
        if wheel := layer.get("wheel"):
            found[_distribution(wheel["name"])] = dict(wheel)
        elif layer["layer"] == EXTENSION_LAYER:
            found.pop(EXTENSION, None)
            unknown = unknown or f"{EXTENSION_LAYER} was deployed before deployments noted their wheel: deploy again"
    return {"wheels": sorted(found.values(), key=lambda item: str(item["name"])), "wheels_unknown": unknown}


def _wheels_unknown(facts: Mapping[str, Any]) -> str:
    if "wheels" in facts:
        return ""
    image = str(facts.get("image_id", ""))
    if not image:
        return "no image is known that the tree was exported from"
    if image != facts.get("built_image"):
        return f"{facts.get('image', 'the image')} was not built here, and an image does not say what its wheels were"
    return "the image was built or exported before wheels were noted: ./inv build-image --again=system and export anew"


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
    """Write the evidence file, atomically."""
    files.write_text_atomically(path, json.dumps(document, indent=2, sort_keys=False) + "\n")
