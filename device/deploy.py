"""A changed kernel to the board without a new image: rebuild libqpu and the extension, put them into the exported tree.

    sources → (libqpu, qpu-ops) → their layers → the exported tree, in place → programs that the board starts next

A board that runs from the tree over NFS opens the new files with the next program it starts; programs that run keep
the files that they have open. Nothing else of the tree is touched.

Every file is written beside its place first. Only when all are written do they change places, one rename each, while
signals wait: whatever ends a deployment before that leaves the tree as it was. What the layers held earlier and no
longer do is removed. Then each file is read back, and the export's manifest states the tree's new hash and what was
deployed. The image in the engine is not changed: ``./inv build-image`` and ``./inv export-nfsroot`` bring both together
again.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import os
import posixpath
import re
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flow import main_job
from nfsroot.layout import Layout, require_export
from nfsroot.tree import TreeHash, follow, inside
from recipes import recipe
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, InUse, PlatformMismatch
from toolchain.manifest import Artefact, Manifest

LIBRARIES = {"local": ("libqpu", "our own libqpu"), "upstream": ("qpulib", "upstream's QPULib")}
"""The choices of ``qpu.library``: their recipes, and in words."""

STEPS = ("libqpu", "qpu-ops")
"""The steps whose layers are deployed."""

_HASH_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one layer did to the tree: paths relative to its root."""

    layer: Artefact
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A finished deployment. ``rootfs_sha256`` is of the tree as it now is, empty where the board changes it too fast.

    ``build_seconds`` is the part that compiling took, ``seconds`` the whole.
    """

    layout: Layout
    changes: tuple[Change, ...]
    rootfs_sha256: str
    build_seconds: float
    seconds: float
    warnings: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether anything in the tree is another than before."""
        return any(change.replaced or change.removed for change in self.changes)

    @property
    def rows(self) -> list[progress.Row]:
        """Lines of the final table."""
        return [
            progress.row_of(
                change.layer.path.name,
                change.layer,
                self.seconds,
                f"{len(change.replaced)} files replaced, {len(change.removed)} removed, {change.unchanged} as before",
            )
            for change in self.changes
        ]


def deploy(config: Config) -> Deployed:
    """Bring libqpu and the extension up to date and put them into the exported tree.

    Raises RootNeeded, ArtefactMissing (no export), PlatformMismatch (the tree has the other QPU library, or another
    torch than the one that the extension was compiled against), InUse (an export is under way), ArtefactDamaged, and
    what the steps raise.
    """
    process.require_root("to write into the exported tree", "./inv deploy")
    began = time.monotonic()
    layout = Layout.of(config)
    require_export(layout)
    require_same_library(layout.tree, config.qpu.library)
    built = main_job.build_image(config, only=STEPS, reuse=True)
    compiled = time.monotonic() - began
    require_same_torch(layout.tree, config.target_root / "torch-site")
    manifests = [built.manifest(name) for name in STEPS]
    prefix = str(built.manifest("libqpu").facts["prefix"])
    with progress.step(f"deploy to {layout.tree}"):
        layers = {item.artefact(".tar"): item for item in manifests if item.artefacts}
        wheels = {layer.path.name: item.artefact(".whl") for layer, item in layers.items() if item.facts.get("wheel")}
        done = put(layout, list(layers), owned_prefixes=(prefix,), wheels=wheels)
    return replace(
        done,
        build_seconds=compiled,
        seconds=time.monotonic() - began,
        warnings=(*dict.fromkeys(warning for item in manifests for warning in item.warnings), *done.warnings),
    )


def library_of(tree: Path) -> str:
    """Which QPU library a tree has, as a choice of ``qpu.library``; empty without one."""
    held = {name: _outputs(tree, book) for name, (book, _) in LIBRARIES.items()}
    # Both bring a libqpu.so.1 and a QPULib.h; what our own has besides tells them apart.
    if any(there for path, there in held["local"].items() if path not in held["upstream"]):
        return "local"
    return "upstream" if any(held["upstream"].values()) else ""


def _outputs(tree: Path, name: str) -> dict[str, bool]:
    """What a recipe of a library installs, and whether the tree has it."""
    data = recipe.load(name)
    prefix = str(data.settings["prefix"]).strip("/")
    return {path: os.path.lexists(inside(tree, f"{prefix}/{path}")) for path in data.outputs}


def require_same_library(tree: Path, chosen: str) -> None:
    """Raise PlatformMismatch when the tree has the other QPU library: the programs in it are linked with its own."""
    found = library_of(tree)
    if found and found != chosen:
        raise PlatformMismatch(
            "the exported tree has the other QPU library",
            expected=f"{LIBRARIES[chosen][1]}, which is to be deployed (qpu.library: {chosen})",
            found=f"{LIBRARIES[found][1]} in {tree}",
            fix=f"./inv deploy --qpulib={found}, or ./inv build-image --qpulib={chosen} and ./inv export-nfsroot",
        )


def require_same_torch(tree: Path, staged: Path) -> None:
    """Raise PlatformMismatch when the tree's torch is not the staged one: an extension fits only its own torch."""
    records = {folder: _torch_record(folder) for folder in (tree, staged)}
    if records[staged] and records[tree] != records[staged]:
        raise PlatformMismatch(
            "the exported tree has another torch than the one that the extension was compiled against",
            expected=f"a torch whose RECORD has SHA-256 {records[staged]}",
            found=records[tree] or "no torch",
            fix="run ./inv build-image, then ./inv export-nfsroot",
        )


def _torch_record(root: Path) -> str:
    found = sorted(root.glob("usr/local/lib/python3*/dist-packages/torch-*.dist-info/RECORD"))
    return files.sha256_of(found[0]) if found else ""


def put(
    layout: Layout,
    layers: Sequence[Artefact],
    *,
    owned_prefixes: Sequence[str],
    wheels: Mapping[str, Artefact] | None = None,
) -> Deployed:
    """Put layers (uncompressed tars of a root) into an exported tree, in place.

    ``wheels`` are those that layers were unpacked from, by the layer's file name: the tree's manifest notes them.

    ``owned_prefixes`` are folders of the board that belong to the layers alone: what the layers do not hold is removed
    there. Of a wheel's layer the files that the tree's RECORD of the same distribution lists are removed, and byte code
    of the layers' modules that they do not bring.

    Raises ArtefactMissing, ArtefactDamaged or InUse.
    """
    began = time.monotonic()
    manifest = require_export(layout)
    with _locked(layout), contextlib.ExitStack() as asides:
        contents = [(layer, _write_aside(layout.tree, layer, asides)) for layer in layers]
        kept = {path for _, content in contents for path in content}
        stale = [_stale(layout.tree, content, kept, owned_prefixes) for _, content in contents]
        warnings = _new_sonames(layout.tree, [item for _, content in contents for item in content.values()])
        changes = tuple(
            Change(
                layer=layer,
                replaced=tuple(path for path, item in content.items() if item.aside is not None),
                removed=tuple(gone),
                unchanged=sum(1 for item in content.values() if item.aside is None),
            )
            for (layer, content), gone in zip(contents, stale, strict=True)
        )
        if any(change.replaced or change.removed for change in changes):
            manifest = _recorded(manifest, changes, "", wheels or {})
            with files.swapping():
                manifest.write(layout.manifest)
                for _, content in contents:
                    for item in content.values():
                        if item.aside is not None:
                            os.replace(item.aside, item.place)
                for path in (path for gone in stale for path in gone):
                    _remove(layout.tree, path)
        for _, content in contents:
            for path, item in content.items():
                _verify(path, item)
        if not manifest.facts.get("rootfs_sha256"):
            with progress.step("hash the tree"):
                manifest = _recorded(manifest, (), _hash(layout.tree), {})
            manifest.write(layout.manifest)
    rootfs = str(manifest.facts["rootfs_sha256"])
    if not rootfs:
        warnings = (*warnings, "the board changes the tree so fast that its hash could not be taken; evidence lacks it")
    return Deployed(
        layout=layout,
        changes=changes,
        rootfs_sha256=rootfs,
        build_seconds=0.0,
        seconds=time.monotonic() - began,
        warnings=warnings,
    )


@dataclass(frozen=True)
class _Item:
    """A file or link of a layer: its place in the tree, and what is written beside it (None: it is there already)."""

    place: Path
    aside: Path | None
    mode: int
    content: str
    """SHA-256 of a file, target of a link."""


@contextlib.contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    """Neither an export nor another deployment at the same time."""
    taken = InUse(
        f"{layout.tree} is being exported or deployed to by another run",
        expected=f"nobody holds {layout.lock}",
        found="a lock",
        fix="wait for the other run, or end it",
    )
    with files.held(layout.lock, taken):
        yield


def _write_aside(tree: Path, layer: Artefact, asides: contextlib.ExitStack) -> dict[str, _Item]:
    """Write every file of a layer that differs beside its place; folders are made. By path, in the layer's order."""
    layer.verify()
    content: dict[str, _Item] = {}
    with tarfile.open(layer.path, "r:") as archive:
        for member in archive:
            path = posixpath.normpath(member.name).lstrip("/")
            place = inside(tree, path)
            if member.isdir():
                if _make_folder(place, path, member):
                    asides.callback(_remove_empty, place)
                continue
            if not (member.isreg() or member.issym()):
                raise ArtefactDamaged(
                    f"{layer.path.name} cannot be deployed",
                    expected="files, folders and symbolic links",
                    found=f"{path} of tar type {member.type!r}",
                    fix="run ./inv build-image and ./inv export-nfsroot",
                )
            if place.is_dir() and not place.is_symlink():
                raise ArtefactDamaged(
                    f"{path} cannot be deployed",
                    expected="a file or link, or nothing, at its place in the tree",
                    found="a folder",
                    fix="run ./inv export-nfsroot",
                )
            aside = place.with_name(f".{place.name}.{os.getpid()}.part")
            asides.callback(files.remove, aside)
            if member.issym():
                item = _Item(place, aside, stat.S_IFLNK, member.linkname)
                if not _same(item):
                    aside.symlink_to(member.linkname)
            else:
                item = _Item(place, aside, stat.S_IFREG | member.mode & 0o7777, _copy(archive, member, aside))
            if _same(item):
                files.remove(aside)
                item = _Item(place, None, item.mode, item.content)
            else:
                os.chown(aside, member.uid, member.gid, follow_symlinks=False)
                os.utime(aside, (member.mtime, member.mtime), follow_symlinks=False)
            content[path] = item
    return content


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _make_folder(place: Path, path: str, member: tarfile.TarInfo) -> bool:
    """Make a folder unless it is there; whether it was made."""
    if not os.path.lexists(place):
        place.mkdir(mode=member.mode & 0o7777)
        os.chown(place, member.uid, member.gid)
        place.chmod(member.mode & 0o7777)
        return True
    if not place.is_dir() and not place.is_symlink():
        raise ArtefactDamaged(
            f"{path} cannot be deployed", expected="a folder", found="a file", fix="run ./inv export-nfsroot"
        )
    return False


def _copy(archive: tarfile.TarFile, member: tarfile.TarInfo, aside: Path) -> str:
    source = archive.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name} is a regular file without content")
    digest = hashlib.sha256()
    with source, aside.open("wb") as sink:
        while block := source.read(1 << 20):
            digest.update(block)
            sink.write(block)
    aside.chmod(member.mode & 0o7777)
    return digest.hexdigest()


def _same(item: _Item) -> bool:
    """Whether the tree has it already."""
    try:
        found = item.place.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(item.mode):
        return stat.S_ISLNK(found.st_mode) and str(item.place.readlink()) == item.content
    return found.st_mode == item.mode and files.sha256_of(item.place) == item.content


def _verify(path: str, item: _Item) -> None:
    if not _same(item):
        raise ArtefactDamaged(
            f"{path} is not what was deployed",
            expected=f"{'a link to' if stat.S_ISLNK(item.mode) else 'a file with SHA-256'} {item.content}",
            found="another file" if os.path.lexists(item.place) else "nothing",
            fix="check the disk and whether the board writes there, then run ./inv deploy again",
        )


def _stale(tree: Path, content: Mapping[str, _Item], kept: set[str], prefixes: Sequence[str]) -> list[str]:
    """Files of the tree that an earlier version of the layer brought and this one does not have."""
    found: set[str] = set()
    for prefix in (item.strip("/") for item in prefixes):
        if not any(path.startswith(f"{prefix}/") for path in content):
            continue
        top = follow(tree, prefix)
        for folder, folders, names in os.walk(top):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            found |= {f"{prefix}/{(Path(folder) / name).relative_to(top)}" for name in (*names, *links)}
    for path in content:
        if match := re.fullmatch(r"(?P<site>.+)/(?P<name>[^/]+?)-[^/-]+\.dist-info/RECORD", path):
            for record in follow(tree, match["site"]).glob(f"{match['name']}-*.dist-info/RECORD"):
                found |= _listed(tree, match["site"], record)
        # Layers have fixed time stamps: the board could take byte code that it wrote itself for that of the new source.
        found |= _byte_code(tree, path)
    return sorted(path for path in found if path not in kept and not re.search(r"/\.[^/]+\.\d+\.part$", path))


def _listed(tree: Path, site: str, record: Path) -> set[str]:
    """What a RECORD lists (paths relative to the tree), and the byte code that belongs to it."""
    found: set[str] = set()
    with record.open(newline="") as stream:
        for row in csv.reader(stream):
            path = posixpath.normpath(posixpath.join(site, row[0])) if row else ""
            if not path or path.startswith(("..", "/")):
                continue
            found.add(path)
            found |= _byte_code(tree, path)
    return {path for path in found if os.path.lexists(inside(tree, path))}


def _byte_code(tree: Path, path: str) -> set[str]:
    """Byte code in the tree that was made from a module."""
    folder, name = posixpath.split(path)
    if not name.endswith(".py"):
        return set()
    cache = follow(tree, f"{folder}/__pycache__")
    return {f"{folder}/__pycache__/{item.name}" for item in cache.glob(f"{name.removesuffix('.py')}.*.pyc")}


def _remove(tree: Path, path: str) -> None:
    place = inside(tree, path)
    place.unlink(missing_ok=True)
    for folder in list(place.parents)[: path.count("/")]:
        try:
            folder.rmdir()
        except OSError:
            return


def _new_sonames(tree: Path, items: Sequence[_Item]) -> tuple[str, ...]:
    """The loader finds libraries by the cache that was made at export: a name that it lacks must be told to it."""
    cache = follow(tree, "etc/ld.so.cache")
    known = cache.read_bytes() if cache.is_file() else b""
    names = [item.place.name for item in items if re.fullmatch(r"lib[^/]+\.so\.\d+", item.place.name)]
    missing = sorted(name for name in names if name.encode() not in known)
    return tuple(f"{name} is new to the board's loader: run ldconfig on the board" for name in missing)


def _recorded(manifest: Manifest, changes: Sequence[Change], rootfs: str, wheels: Mapping[str, Artefact]) -> Manifest:
    before = list(manifest.facts.get("deployed", ()))
    now: list[dict[str, Any]] = []
    for item in changes:
        name = item.layer.path.name
        noted: dict[str, Any] = {"layer": name, "sha256": item.layer.sha256, "replaced": len(item.replaced)}
        if wheel := wheels.get(name):
            noted["wheel"] = {"name": wheel.path.name, "size": wheel.size, "sha256": wheel.sha256}
        now.append(noted)
    replaced = {item["layer"] for item in now}
    deployed = [item for item in before if item["layer"] not in replaced] + now
    return replace(manifest, facts={**manifest.facts, "rootfs_sha256": rootfs, "deployed": deployed})


def _hash(tree: Path) -> str:
    """The tree's hash; a board that runs from it may remove files meanwhile."""
    for _ in range(_HASH_TRIES):
        try:
            return TreeHash.of(tree).sha256
        except FileNotFoundError:
            continue
    return ""
