"""Check that the board ran the files that were built, by following them from the source code to the board."""

from __future__ import annotations

import hashlib
import posixpath
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from device.record import Record
from nfsroot.layout import Layout
from nfsroot.tree import follow, inside
from toolchain import checkout, files
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, ArtefactMissing
from toolchain.manifest import Artefact, Manifest

LAYERS = {"libqpu": "libqpu", "qpu-ops": "QPU extension"}
"""The build steps whose layers are compared with the exported tree file by file, each with a description."""


def check(
    config: Config,
    record: Record,
    export: Manifest | None,
    steps: Sequence[Manifest],
    *,
    source: Mapping[str, Any],
    checksums: str = "",
) -> list[dict[str, Any]]:
    """Check each link between the built files and the board: commit → image → export → tree → board.

    ``checksums`` lists the files that the run deployed to the tree. If ``checksums`` is not empty, the function also
    checks that the board reads these files.

    Three legitimate cases do not break the chain: the commit of the tests has not been built; the tree was exported
    from a pulled image, although this PC has also built an image; or layers were deployed to the tree of an older
    image.
    """
    tree = Layout.of(config).tree
    facts: Mapping[str, Any] = export.facts if export is not None else {}
    checked: list[dict[str, Any]] = []

    def link(name: str, expected: str, found: str, *, holds: bool | None, severity: str = "error") -> None:
        checked.append({"name": name, "expected": expected, "found": found, "holds": holds, "severity": severity})

    def equal(name: str, expected: str, found: str, *, severity: str = "error") -> None:
        link(name, expected, found, holds=expected == found, severity=severity)

    def equal_in_tree(name: str, hash_of: Callable[[Path, str], str], what: str, found: str) -> None:
        try:
            if expected := hash_of(tree, what):
                equal(name, expected, found)
        except PermissionError:
            link(name, f"the hash of a file in {tree}, which only root may read", found, holds=None)

    if export is not None:
        for name, origin in (
            ("the image was built from the same commit as the tests", image_source(export, steps)),
            ("the tree was exported from the same commit as the tests", export.source),
        ):
            holds = checkout.same(source, origin)
            expected, found = checkout.described(source), checkout.described(origin)
            if holds is False and expected == found:
                found += ", possibly different ones"
            link(name, expected, found, holds=holds, severity="warning")
    built, exported = _image_built(steps), str(facts.get("image_id", ""))
    deployed = {str(item["layer"]) for item in facts.get("deployed", ())}
    if built and exported:
        built_since = facts.get("built_image") != built
        severity = "error" if built_since and not deployed else "warning"
        equal("the exported tree is from the image that was built last", built, exported, severity=severity)
    for step, title in LAYERS.items():
        layer = _layer(steps, step)
        ours = exported in (built, facts.get("built_image"))
        if layer is not None and exported and (ours or layer.path.name in deployed):
            found, holds = _compare_layer(tree, layer)
            link(f"the tree contains the {title} that was built last", layer.sha256, found, holds=holds)
    libqpu = record.facts.get("libqpu", {})
    if libqpu:
        equal_in_tree("the board loads the tree's libqpu", _library_in_tree, libqpu["path"], libqpu["sha256"])
    for name, digest in record.facts.get("records", {}).items():
        equal_in_tree(f"the board imports the tree's {name}", _record_in_tree, name, digest)
    if checksums:
        listed = hashlib.sha256(checksums.encode()).hexdigest()
        equal("the board reads the files that the run deployed", listed, record.deployed_sha256)
    root = record.facts.get("root", "")
    if " nfs" in root:
        # A different path causes only a warning, because a server may export the tree under another path. The tree's
        # contents are compared above.
        path = "/" + root.split()[0].partition(":/")[2]
        path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)  # see proc(5), mounts
        equal("the board's root is the exported tree", str(tree), path, severity="warning")
    return checked


def broken_links(document: Mapping[str, Any], severity: str) -> list[str]:
    """Return a line of text for each broken link with the given severity."""
    return [
        f"{link['name']}: expected {_short(link['expected'])}, found {_short(link['found'])}"
        for link in document["links"]
        if link["holds"] is False and link["severity"] == severity
    ]


def _short(text: str) -> str:
    """Return ``text`` with each hash and commit shortened to its first twelve digits."""
    return re.sub(r"\b(?:sha256:)?([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", text)


def _last_manifest(steps: Sequence[Manifest], name: str) -> Manifest | None:
    return next((step for step in reversed(steps) if step.step == name), None)


def _image_built(steps: Sequence[Manifest]) -> str:
    """Return the ID of the last image that was built on this PC, or an empty string if no image was built."""
    system = _last_manifest(steps, "system")
    return str(system.facts.get("image", "")) if system is not None else ""


def image_source(export: Manifest, steps: Sequence[Manifest]) -> Mapping[str, Any]:
    """Return the commit from which the exported image was built, as recorded by the export or by the build."""
    if recorded := export.facts.get("image_source"):
        return dict(recorded)
    system = _last_manifest(steps, "system")
    return system.source if system is not None and system.facts.get("image") == export.facts.get("image_id") else {}


def _layer(steps: Sequence[Manifest], name: str) -> Artefact | None:
    """Return the layer from the last run of a step, or None if there is none."""
    step = _last_manifest(steps, name)
    layers = [item for item in step.artefacts if item.path.suffix == ".tar"] if step is not None else []
    return layers[0] if layers else None


def _compare_layer(tree: Path, layer: Artefact) -> tuple[str, bool | None]:
    """Compare a layer with the exported tree.

    Returns the layer's SHA-256 and True if the tree contains the whole layer, otherwise the differing paths and False.
    If the layer and the tree cannot be compared, returns the reason and None.
    """
    try:
        layer.verify()
        different = _different_paths(tree, layer.path)
    except (ArtefactMissing, ArtefactDamaged) as fault:
        return f"the layer cannot be compared: {fault.summary}", None
    except (OSError, tarfile.TarError) as fault:
        return f"the layer cannot be compared: {fault}", None
    if not different:
        return layer.sha256, True
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return f"different: {', '.join(different[:3])}{more}", False


def _different_paths(tree: Path, layer: Path) -> list[str]:
    """Return the paths of the layer's files and symbolic links that are missing or different in the tree.

    Bytecode files are ignored, because Python checks them against the source, and because a board that runs from the
    tree may write new bytecode files.
    """
    different = []
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
                different.append(f"/{path}")
    return different


def _library_in_tree(tree: Path, path: str) -> str:
    place = follow(tree, path)
    return files.sha256_of(place) if place.is_file() else f"the hash of {place}, which does not exist"


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
