"""Rebuild libqpu and the QPU extension and install them in the exported tree, without building a new image.

    sources → (libqpu, qpu-ops) → layers → exported tree

After a deployment, programs that a board starts from the tree over NFS use the new files. Programs that are already
running continue to use the files that they have open. The rest of the tree is not changed.

Each file is first written under a temporary name in its destination folder. When all files have been written, they are
renamed to their final names, and signals are blocked during the renaming. A deployment that is interrupted before the
renames leaves the tree unchanged. Files that an earlier version of a layer installed are removed if the new version
does not contain them. Finally, each file is read back, and the deployed layers and the new hash of the tree are
recorded in the export's manifest. The image in the engine is not changed. To bring both the image and the tree up to
date, run ``./inv build-image`` and ``./inv export-nfsroot``.
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
from images import sbom
from nfsroot.layout import Layout, require_export
from nfsroot.tree import TreeHash, architectures_of, follow, inside
from recipes import recipe
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, InUse, PlatformMismatch
from toolchain.manifest import Artefact, Manifest

LIBRARIES = {"local": ("libqpu", "this project's libqpu"), "upstream": ("qpulib", "upstream's QPULib")}
"""The recipe and the description for each value of ``qpu.library``."""

STEPS = ("libqpu", "qpu-ops")
"""The steps whose layers are deployed."""

_HASH_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """The changes that a layer made to the tree. Paths are relative to the tree's root."""

    layer: Artefact
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int
    digests: Mapping[str, str]
    """The SHA-256 of each regular file in the layer, by path."""

    @property
    def text(self) -> str:
        """The numbers of replaced, removed and unchanged files, as text."""
        return f"{len(self.replaced)} files replaced, {len(self.removed)} removed, {self.unchanged} unchanged"


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """The result of a deployment.

    ``rootfs_sha256`` is the hash of the changed tree; it is empty if the board changed the tree during hashing.
    """

    layout: Layout
    changes: tuple[Change, ...]
    rootfs_sha256: str
    seconds: float
    warnings: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether any file in the tree changed."""
        return any(change.replaced or change.removed for change in self.changes)

    @property
    def text(self) -> str:
        """The changes to the tree, by layer, as text."""
        return "; ".join(f"{change.layer.path.name}: {change.text}" for change in self.changes)

    @property
    def rows(self) -> list[progress.Row]:
        """The rows of the summary table."""
        return [
            progress.row_of(change.layer.path.name, change.layer, self.seconds, change.text) for change in self.changes
        ]

    @property
    def checksums(self) -> str:
        """The input of ``sha256sum --check`` for the deployed files.

        Byte code is omitted, because a board may rewrite it.
        """
        digests = {path: digest for change in self.changes for path, digest in change.digests.items()}
        return "".join(f"{digest}  /{path}\n" for path, digest in sorted(digests.items()) if not path.endswith(".pyc"))


def deploy(config: Config) -> Deployed:
    """Bring libqpu and the extension up to date and install them in the exported tree.

    Raises PlatformMismatch if the tree is for another architecture, contains the other QPU library, or contains a build
    of torch that the extension was not compiled against. Raises InUse if an export or another deployment is running,
    and ArtefactMissing if there is no export. Also raises RootNeeded, ArtefactDamaged, and the errors of the build
    steps.
    """
    process.require_root("to write into the exported tree", "./inv deploy")
    began = time.monotonic()
    layout = Layout.of(config)
    require_export(layout)
    require_same_architecture(layout.tree, config.image.architecture)
    require_same_library(layout.tree, config.qpu.library)
    built = main_job.build_image(config, only=STEPS, reuse=True)
    require_same_torch(layout.tree, config.target_root / "torch-site")
    manifests = [built.manifest(name) for name in STEPS]
    prefix = str(built.manifest("libqpu").facts["prefix"])
    with progress.step(f"deploy to {layout.tree}"):
        layers = {item.artefact(".tar"): item for item in manifests if item.artefacts}
        wheels = {layer.path.name: item.artefact(".whl") for layer, item in layers.items() if item.facts.get("wheel")}
        done = put(layout, list(layers), owned_prefixes=(prefix,), wheels=wheels)
    return replace(
        done,
        seconds=time.monotonic() - began,
        warnings=(*dict.fromkeys(warning for item in manifests for warning in item.warnings), *done.warnings),
    )


def require_same_architecture(tree: Path, chosen: str) -> None:
    """Raise PlatformMismatch if the exported tree is for another architecture.

    Exports for different architectures may use the same ``nfs.folder``.
    """
    found = architectures_of(tree)
    if found and chosen not in found:
        raise PlatformMismatch(
            "the exported tree is for another architecture",
            expected=f"a root filesystem for {chosen}",
            found=f"{tree}, which is for {', '.join(found)}",
            fix=f"to deploy to this tree, run ./inv deploy --architecture={found[0]}; to replace the tree, run "
            f"./inv export-nfsroot --architecture={chosen}",
        )


def library_of(tree: Path) -> str:
    """Return the QPU library in a tree as a value of ``qpu.library``, or an empty string if the tree has none."""
    found = {name: _outputs(tree, recipe_name) for name, (recipe_name, _) in LIBRARIES.items()}
    # Both libraries install libqpu.so.1 and QPULib.h, but only libqpu installs further files.
    if any(exists for path, exists in found["local"].items() if path not in found["upstream"]):
        return "local"
    return "upstream" if any(found["upstream"].values()) else ""


def _outputs(tree: Path, name: str) -> dict[str, bool]:
    """Return the files that a library's recipe installs, and whether each one exists in the tree."""
    data = recipe.load(name)
    prefix = str(data.settings["prefix"]).strip("/")
    return {path: os.path.lexists(inside(tree, f"{prefix}/{path}")) for path in data.outputs}


def require_same_library(tree: Path, chosen: str) -> None:
    """Raise PlatformMismatch if the tree contains a QPU library other than ``chosen``.

    The tree's programs are linked against the library that the tree contains.
    """
    found = library_of(tree)
    if found and found != chosen:
        raise PlatformMismatch(
            "the exported tree contains a different QPU library",
            expected=f"{LIBRARIES[chosen][1]}, the library to deploy (qpu.library: {chosen})",
            found=f"{LIBRARIES[found][1]} in {tree}",
            fix=f"to keep the tree's library, run ./inv deploy --qpulib={found}; to change it, run "
            f"./inv build-image --qpulib={chosen} and ./inv export-nfsroot",
        )


def require_same_torch(tree: Path, staged: Path) -> None:
    """Raise PlatformMismatch if the torch in ``tree`` differs from the torch in ``staged``.

    The extension was compiled against the torch in ``staged``, and works only with that build of torch.
    """
    records = {folder: _torch_record(folder) for folder in (tree, staged)}
    if records[staged] and records[tree] != records[staged]:
        raise PlatformMismatch(
            "the torch in the exported tree is not the one that the extension was compiled against",
            expected=f"a torch wheel whose file RECORD has the SHA-256 {records[staged]}",
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
    """Install layers (uncompressed tar archives of parts of a root filesystem) in an exported tree.

    ``owned_prefixes`` are folders that only these layers write to. In these folders, files that no layer contains are
    removed. If the tree contains an earlier version of a layer's wheel, the files in that version's RECORD are also
    removed unless a layer contains them. The byte code of replaced modules is removed as well.

    ``wheels`` maps a layer's file name to the wheel from which the layer was made; the tree's manifest records that
    wheel.

    Raises ArtefactMissing, ArtefactDamaged or InUse.
    """
    began = time.monotonic()
    with _locked(layout), contextlib.ExitStack() as cleanup:
        manifest = require_export(layout)
        contents = [(layer, _stage(layout.tree, layer, cleanup)) for layer in layers]
        current = {path for _, content in contents for path in content}
        stale = [_stale(layout.tree, content, current, owned_prefixes) for _, content in contents]
        warnings = _soname_warnings(layout.tree, [item for _, content in contents for item in content.values()])
        changes = tuple(
            Change(
                layer=layer,
                replaced=tuple(path for path, item in content.items() if item.staged is not None),
                removed=tuple(removed),
                unchanged=sum(1 for item in content.values() if item.staged is None),
                digests={path: item.content for path, item in content.items() if stat.S_ISREG(item.mode)},
            )
            for (layer, content), removed in zip(contents, stale, strict=True)
        )
        if any(change.replaced or change.removed for change in changes):
            manifest = _with_deployed(manifest, changes, "", wheels or {})
            with files.swapping():
                manifest.write(layout.manifest)
                for _, content in contents:
                    for item in content.values():
                        if item.staged is not None:
                            os.replace(item.staged, item.destination)
                for paths in stale:
                    for path in paths:
                        _remove(layout.tree, path)
                for name in sbom.NAMES:  # these files list the replaced wheel and library
                    (layout.folder / name).unlink(missing_ok=True)
        for _, content in contents:
            for path, item in content.items():
                _verify(path, item)
        if not manifest.facts.get("rootfs_sha256"):
            with progress.step("hash the tree"):
                manifest = _with_deployed(manifest, (), _hash(layout.tree), {})
            manifest.write(layout.manifest)
    rootfs = str(manifest.facts["rootfs_sha256"])
    if not rootfs:
        warnings = (*warnings, "the board changed the tree during hashing, so the evidence will lack the tree's hash")
    return Deployed(
        layout=layout,
        changes=changes,
        rootfs_sha256=rootfs,
        seconds=time.monotonic() - began,
        warnings=warnings,
    )


@dataclass(frozen=True)
class _Item:
    """A file or link in a layer. ``staged`` is the temporary file with the new content; None if nothing changes."""

    destination: Path
    staged: Path | None
    mode: int
    content: str
    """The SHA-256 of a file, or the target of a link."""


@contextlib.contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    """Hold the lock that keeps exports and other deployments from running at the same time."""
    taken = InUse(
        f"another export or deployment is writing to {layout.tree}",
        expected=f"no lock on {layout.lock}",
        found="a lock",
        fix="wait until the other run ends, or stop it",
    )
    with files.held(layout.lock, taken):
        yield


def _stage(tree: Path, layer: Artefact, cleanup: contextlib.ExitStack) -> dict[str, _Item]:
    """Create a layer's folders and write each changed file under a temporary name next to its destination.

    Returns a mapping from paths to items, in the layer's order.
    """
    layer.verify()
    content: dict[str, _Item] = {}
    with tarfile.open(layer.path, "r:") as archive:
        for member in archive:
            path = posixpath.normpath(member.name).lstrip("/")
            destination = inside(tree, path)
            if member.isdir():
                if _make_folder(destination, path, member):
                    cleanup.callback(_remove_if_empty, destination)
                continue
            if not (member.isreg() or member.issym()):
                raise ArtefactDamaged(
                    f"{layer.path.name} cannot be deployed",
                    expected="files, folders and symbolic links",
                    found=f"{path}, whose tar type is {member.type!r}",
                    fix="run ./inv build-image and ./inv export-nfsroot",
                )
            if destination.is_dir() and not destination.is_symlink():
                raise ArtefactDamaged(
                    f"{path} cannot be deployed",
                    expected="a file, a link or nothing at that path in the tree",
                    found="a folder",
                    fix="run ./inv export-nfsroot",
                )
            staged = destination.with_name(f".{destination.name}.{os.getpid()}.part")
            cleanup.callback(files.remove, staged)
            # Remove the files of killed deployments, and links that the board may have created with such a name.
            for old in list(destination.parent.iterdir()):
                if re.fullmatch(rf"\.{re.escape(destination.name)}\.\d+\.part", old.name):
                    files.remove(old)
            if member.issym():
                item = _Item(destination, staged, stat.S_IFLNK, member.linkname)
                if not _is_installed(item):
                    staged.symlink_to(member.linkname)
            else:
                item = _Item(destination, staged, stat.S_IFREG | member.mode & 0o7777, _copy(archive, member, staged))
            if _is_installed(item):
                files.remove(staged)
                item = _Item(destination, None, item.mode, item.content)
            else:
                os.chown(staged, member.uid, member.gid, follow_symlinks=False)
                os.utime(staged, (member.mtime, member.mtime), follow_symlinks=False)
            content[path] = item
    return content


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _make_folder(destination: Path, path: str, member: tarfile.TarInfo) -> bool:
    """Create a folder unless it exists. Returns whether the folder was created."""
    if not os.path.lexists(destination):
        destination.mkdir(mode=member.mode & 0o7777)
        os.chown(destination, member.uid, member.gid)
        destination.chmod(member.mode & 0o7777)
        return True
    if not destination.is_dir() and not destination.is_symlink():
        raise ArtefactDamaged(
            f"{path} cannot be deployed", expected="a folder", found="a file", fix="run ./inv export-nfsroot"
        )
    return False


def _copy(archive: tarfile.TarFile, member: tarfile.TarInfo, staged: Path) -> str:
    source = archive.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name} is a regular file without content")
    digest = hashlib.sha256()
    with source, staged.open("xb") as sink:
        while block := source.read(1 << 20):
            digest.update(block)
            sink.write(block)
        os.fchmod(sink.fileno(), member.mode & 0o7777)
    return digest.hexdigest()


def _is_installed(item: _Item) -> bool:
    """Return whether the destination already has the content and the mode of ``item``."""
    try:
        found = item.destination.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(item.mode):
        return stat.S_ISLNK(found.st_mode) and str(item.destination.readlink()) == item.content
    return found.st_mode == item.mode and files.sha256_of(item.destination) == item.content


def _verify(path: str, item: _Item) -> None:
    if not _is_installed(item):
        raise ArtefactDamaged(
            f"{path} differs from the deployed file",
            expected=f"{'a link to' if stat.S_ISLNK(item.mode) else 'a file with SHA-256'} {item.content}",
            found="another file" if os.path.lexists(item.destination) else "nothing",
            fix="check that the disk works and that the board does not write to that path, then run ./inv deploy again",
        )


def _stale(tree: Path, content: Mapping[str, _Item], current: set[str], prefixes: Sequence[str]) -> list[str]:
    """Return the files that an earlier version of the layer installed and that this version does not contain."""
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
                found |= _files_in_record(tree, match["site"], record)
        # Files in layers have fixed timestamps, so Python could run the old source's byte code instead of the new
        # source.
        found |= _byte_code(tree, path)
    return sorted(path for path in found if path not in current and not re.search(r"/\.[^/]+\.\d+\.part$", path))


def _files_in_record(tree: Path, site: str, record: Path) -> set[str]:
    """Return the existing files that a RECORD lists, and their byte code, as paths relative to the tree."""
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
    """Return the paths of a module's byte code files in the tree."""
    folder, name = posixpath.split(path)
    if not name.endswith(".py"):
        return set()
    cache = follow(tree, f"{folder}/__pycache__")
    return {f"{folder}/__pycache__/{item.name}" for item in cache.glob(f"{name.removesuffix('.py')}.*.pyc")}


def _remove(tree: Path, path: str) -> None:
    destination = inside(tree, path)
    destination.unlink(missing_ok=True)
    for folder in list(destination.parents)[: path.count("/")]:
        try:
            folder.rmdir()
        except OSError:
            return


def _soname_warnings(tree: Path, items: Sequence[_Item]) -> tuple[str, ...]:
    """Return a warning for each library that is missing from the dynamic loader's cache, which the export wrote."""
    cache = follow(tree, "etc/ld.so.cache")
    known = cache.read_bytes() if cache.is_file() else b""
    names = [item.destination.name for item in items if re.fullmatch(r"lib[^/]+\.so\.\d+", item.destination.name)]
    missing = sorted(name for name in names if name.encode() not in known)
    return tuple(f"{name} is missing from the board's loader cache: run ldconfig on the board" for name in missing)


def _with_deployed(
    manifest: Manifest, changes: Sequence[Change], rootfs: str, wheels: Mapping[str, Artefact]
) -> Manifest:
    deployed = {item["layer"]: item for item in manifest.facts.get("deployed", ())}
    for change in changes:
        name = change.layer.path.name
        entry: dict[str, Any] = {"layer": name, "sha256": change.layer.sha256, "replaced": len(change.replaced)}
        if wheel := wheels.get(name):
            entry["wheel"] = {"name": wheel.path.name, "size": wheel.size, "sha256": wheel.sha256}
        deployed.pop(name, None)
        deployed[name] = entry
    changed = {"rootfs_sha256": rootfs, "deployed": list(deployed.values()), "sbom": {}}
    return replace(manifest, facts={**manifest.facts, **changed})


def _hash(tree: Path) -> str:
    """Compute the tree's hash. Return an empty string if every attempt failed because the board removed a file."""
    for _ in range(_HASH_TRIES):
        try:
            return TreeHash.of(tree).sha256
        except FileNotFoundError:
            continue
    return ""
