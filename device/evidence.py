"""The evidence of a run: one JSON file that links the source to what the board said.

Schema 1. Every value comes from the place that knows it; what could not be learnt is empty and never guessed.

``schema``      1
``made``        when the run ended, UTC, ISO 8601
``source``      ``commit`` (40 hex digits, or empty outside a git checkout), ``dirty`` and the
                ``changes`` that make it so
``target``      ``label``, ``flavour``, ``suite``, ``architecture``
``steps``       the build's steps: ``step``, ``key`` (SHA-256 of its inputs), ``seconds``, ``warnings`` and
                ``artefacts`` (``name``, ``size`` in bytes, ``sha256``)
``image``       ``reference``, ``id`` and registry ``digests`` of the image that was exported
``wheels``      the wheels in it: ``name``, ``size``, ``sha256``
``rootfs``      the exported tree: ``path``, ``sha256`` over names, owners, modes and contents, the same as it was in
                the image (``image_tree_sha256``), ``counts``, and the audit's ``findings``
``device``      what the board said of itself (``device.onboard.facts``), and of this run: ``access``, ``init``,
                ``boot_seconds``, ``through`` (``boot`` or ``enter-nfsroot``), ``execution`` and ``execution_reason``
``tools``       versions of the programs on this side
``without``     components that the image lacks, so that their tests were skipped
``links``       checks that the chain holds: ``name``, ``expected``, ``found``, ``holds``
``results``     ``passed``, ``failed``, ``errors``, ``skipped``, ``seconds`` and ``tests`` (``nodeid``, ``outcome``,
                ``seconds``, ``text``)
``timing``      the timing document of the board (``tests/device/timing.py``), or ``{"reason": …}`` why there is none

``execution`` is ``emulation`` when this program started the machine in QEMU, ``hardware`` when the board's device
tree names a Raspberry Pi and nothing speaks against it, else ``unverified``. Only ``hardware`` counts as measured.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfsroot import qemu
from nfsroot.layout import Layout
from toolchain import files, process
from toolchain.config import ROOT, Config
from toolchain.errors import CommandFailed, ProgramMissing
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX

SCHEMA = 1

OUTCOMES = ("passed", "failed", "error", "skipped")

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
        if "end" not in kept:
            for nodeid in collected:
                tests.setdefault(nodeid, Test(nodeid, "error", 0.0, "not run: the board went away before"))
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
    execution, reason = execution_of(record.facts, started_by_us=started_by_us)
    facts = dict(record.facts)
    return {
        "schema": SCHEMA,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source": source(),
        "target": {
            "label": config.image.label,
            "flavour": config.image.flavour,
            "suite": config.image.suite,
            "architecture": config.image.architecture,
        },
        "steps": [_step(item) for item in steps],
        "image": _image(config, export),
        "wheels": _wheels(steps),
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
        "links": links(config, record, export, steps, through=through),
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


def source() -> dict[str, Any]:
    """The commit of the checkout, and what was changed since."""
    try:
        commit = process.output_of(["git", "rev-parse", "HEAD"], cwd=ROOT)
        changes = process.output_of(["git", "status", "--porcelain"], cwd=ROOT).splitlines()
    except (CommandFailed, ProgramMissing) as fault:
        return {"commit": "", "dirty": None, "changes": [], "reason": fault.summary}
    return {"commit": commit, "dirty": bool(changes), "changes": changes[:50]}


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
    config: Config, record: Record, export: Manifest | None, steps: Sequence[Manifest], *, through: str
) -> list[dict[str, Any]]:
    """Checks that the board ran what was built: image → export → tree → board."""
    tree = config.nfsroot
    made: list[dict[str, Any]] = []

    def link(name: str, expected: str, found: str) -> None:
        made.append({"name": name, "expected": expected, "found": found, "holds": expected == found})

    built = next((str(step.facts.get("image", "")) for step in reversed(steps) if step.step == "system"), "")
    exported = str(export.facts.get("image_id", "")) if export is not None else ""
    if built and exported:
        link("the exported tree is of the image that was built last", built, exported)
    libqpu = record.facts.get("libqpu", {})
    if libqpu:
        in_tree = tree / str(libqpu["path"]).lstrip("/")
        link(
            "the board loads the tree's libqpu",
            files.sha256_of(in_tree) if in_tree.is_file() else f"no {in_tree}",
            libqpu["sha256"],
        )
    for name, digest in record.facts.get("records", {}).items():
        if found := _record_in_tree(tree, name):
            link(f"the board imports the tree's {name}", found, digest)
    root = record.facts.get("root", "")
    if through == "boot" and " nfs" in root:
        link("the board's root is the exported tree", str(tree), root.split()[0].partition(":")[2])
    return made


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
        path.is_relative_to(folder) for folder in (layout.tree, layout.aside, layout.folder)
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
    }


def _image(config: Config, export: Manifest | None) -> dict[str, Any]:
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    return {
        "reference": str(facts.get("image", config.image_reference("system"))),
        "id": str(facts.get("image_id", "")),
        "digests": list(facts.get("image_digests", ())),
    }


def _wheels(steps: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Wheels that steps made, and wheels that they found ready (those are facts: the file is not the build's)."""
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        for item in step.artefacts:
            if item.path.suffix == ".whl":
                found[item.path.name] = {"name": item.path.name, "size": item.size, "sha256": item.sha256}
        if step.facts.get("wheel") and step.facts.get("sha256"):
            path = Path(str(step.facts["wheel"]))
            size = path.stat().st_size if path.is_file() else None
            found.setdefault(path.name, {"name": path.name, "size": size, "sha256": step.facts["sha256"]})
    return [found[name] for name in sorted(found)]


def _rootfs(layout: Layout, export: Manifest | None) -> dict[str, Any]:
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    return {
        "path": str(layout.tree),
        "sha256": str(facts.get("rootfs_sha256", "")),
        "image_tree_sha256": str(facts.get("image_tree_sha256", "")),
        "counts": dict(facts.get("counts", {})),
        "findings": list(facts.get("findings", ())),
    }


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the evidence file, atomically."""
    files.write_text_atomically(path, json.dumps(document, indent=2, sort_keys=False) + "\n")
