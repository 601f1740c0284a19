"""Export the image as a root filesystem: copy it exactly, audit the copy, and replace the old tree.

The old tree remains unchanged until the new one is complete. The export is prepared in ``.NAME.export`` next to the
destination. renameat2(RENAME_EXCHANGE) then exchanges the old and the new tree atomically. The folders with the files
that accompany the trees are exchanged next. The manifest is written last, and then the old tree is removed. An export
that is interrupted before the exchange does not change the tree, and the next export removes its remaining files. If
the file system does not support the exchange, each folder is replaced by means of two renames. If SIGKILL stops the
export between two such renames, the next export first restores the old tree.

A tree is replaced or removed only if the marker next to the tree identifies it (nfsroot.layout), and never while
something is mounted in the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.connect import connect
from images import sbom
from images.system import LEFT_OUT, WHEELS
from nfsroot import unpack
from nfsroot.audit import Finding, Settings, audit, nameservers_of_host, table
from nfsroot.boot_files import write_boot_files
from nfsroot.layout import (
    Layout,
    identity_of,
    is_named,
    is_ours,
    keep_private,
    marker_of,
    move_in,
    named_trees,
    write_marker,
)
from nfsroot.tree import TreeHash, file_in, follow, mounts_below, require_unmounted
from toolchain import checkout, process, progress
from toolchain.config import Config
from toolchain.errors import InUse, UserError
from toolchain.files import (
    MARKER,
    absolute,
    held,
    remove,
    require_space,
    room_for,
    room_for_programs,
    scratch_folder,
    sha256_of,
    swapping,
)
from toolchain.manifest import Artefact, Manifest, have_same_needs
from toolchain.steps import MANIFEST_SUFFIX, key_of

_AGAIN = "./inv export-nfsroot"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A finished export."""

    layout: Layout | None
    """The tree's paths; None if only a tarball was requested."""
    tarball: Artefact | None
    manifest: Manifest
    findings: tuple[Finding, ...]
    copy_seconds: float
    seconds: float


def export(
    config: Config,
    *,
    destination: Path | None = None,
    tarball: Path | None = None,
    fix: bool = True,
    role: str = "system",
) -> ExportResult:
    """Export the system image to a folder (by default ``nfs.folder``), to a tarball, or to both.

    If only a tarball is requested, no folder is written. With ``fix=False``, the tree is exported without the audit's
    fixes. ``role`` selects another of the target's images, such as ``rootfs``.

    Raises RootNeeded, EngineUnavailable, PlatformMismatch and DiskFull; ArtefactMissing if there is no image; InUse if
    another export or a server uses the tree, or if something is mounted in it; UserError if the destination was not
    created by an export or cannot be written to.
    """
    process.require_root("to set the files' owners", _AGAIN)
    began = time.monotonic()
    final = Layout(absolute(destination or (tarball or config.nfsroot)))
    if not final.place.name:
        raise UserError(
            "an export cannot replace the root folder of this machine",
            expected="a folder or a file below /",
            found=str(final.place),
            fix="choose another path with --folder or --tarball, or set nfs.folder in invoke.yaml",
        )
    as_folder = destination is not None or tarball is None
    tarball = absolute(tarball) if tarball is not None else None
    purpose = f"the export of {config.image_reference(role)}"
    client = connect()
    source = unpack.find_image(client, config.image_reference(role), config.image.target)
    with locked(final), room_for_programs(purpose, final.place.parent):
        _put_back(final)
        if tarball is not None:
            _require_place_of(tarball)
        if as_folder:
            _refuse_foreign(final)
        needed = (source.size >> 20) * (1 if source.layers else 2) + 64
        require_space(final.place.parent, needed, purpose)
        with _aside(final) as aside:
            tree = aside / final.tree.name
            with progress.step(f"copy {source.reference}"):
                copy_began = time.monotonic()
                method = unpack.unpack(client, source, tree)
                copied = time.monotonic() - copy_began
            hashed, before = _hash(tree, source.size)
            metadata = aside / final.folder.name
            origin = origin_of(config, source) if role == "system" else {}
            warnings = (*left_out_warnings(origin), *write_boot_files(config, final, tree, metadata.parent))
            settings = Settings(
                hostname=config.image.host_name,
                nameservers=nameservers_of_host(),
                client_public_key=_client_key(final, metadata),
                now=int(time.time()),
            )
            findings: tuple[Finding, ...] = ()
            if fix:
                with progress.step("audit"):
                    audited = audit(tree, settings)
                findings = tuple(audited.findings)
                hashed.refresh(audited.touched)
                (metadata / final.known_hosts.name).write_text("".join(f"* {key}\n" for key in audited.host_keys))
            documents = write_sbom(config, source, tree, metadata) if role == "system" else {}
            inputs = {"image": source.id, "hostname": settings.hostname, "fix": str(fix)}
            packed = _pack(tree, tarball) if tarball is not None else None
            manifest = Manifest(
                step="nfsroot",
                key=key_of("nfsroot", inputs),
                inputs=inputs,
                artefacts=(packed,) if packed is not None else (),
                facts={
                    "image": source.reference,
                    "image_id": source.id,
                    "image_digests": list(source.digests),
                    **origin,
                    "method": method,
                    "image_tree_sha256": before,
                    "rootfs_sha256": hashed.sha256,
                    "counts": dict(hashed.counts()),
                    "findings": [item.as_json() for item in findings],
                    "sbom": documents,
                },
                warnings=warnings,
                seconds=time.monotonic() - began,
                source=checkout.origin(),
            )
            _swap_in(final, tree if as_folder else None, metadata, manifest)
    return ExportResult(
        layout=final if as_folder else None,
        tarball=packed,
        manifest=manifest,
        findings=findings,
        copy_seconds=copied,
        seconds=time.monotonic() - began,
    )


def origin_of(config: Config, source: unpack.SourceImage) -> dict[str, Any]:
    """Return the facts about the image's origin that the manifest records.

    The facts come from the local build and from the image's labels.

    ``built_image`` is the last image that was built here. ``image_source`` (the commit that the image was built from)
    and ``wheels`` (the image's wheels) are present only if the exported image is ``built_image``, not a pulled image.
    ``left_out`` lists the pockets that the image lacks. Unknown facts are absent.
    """
    facts: dict[str, Any] = {}
    built = Manifest.read(config.target_root / f"system{MANIFEST_SUFFIX}")
    if built is not None:
        facts["built_image"] = str(built.facts.get("image", ""))
        if facts["built_image"] == source.id:
            facts |= {"image_source": dict(built.source)} if built.source else {}
            facts |= {"wheels": built.facts["wheels"]} if "wheels" in built.facts else {}
    with contextlib.suppress(KeyError, ValueError):
        if isinstance(suites := json.loads(source.labels[LEFT_OUT]), list):
            facts["left_out"] = [str(suite) for suite in suites]
    return facts


def write_sbom(config: Config, source: unpack.SourceImage, tree: Path, folder: Path) -> dict[str, str]:
    """Write the tree's bill of materials into a folder; return the names and SHA-256 of the files.

    For an image that was built here, the build's bill of materials is used. A tree without dpkg's status has no bill of
    materials.
    """
    if file_in(tree, sbom.STATUS) is None:
        return {}
    made, system = (Manifest.read(config.target_root / f"{step}{MANIFEST_SUFFIX}") for step in ("sbom", "system"))
    if made and system and system.facts.get("image") == source.id and have_same_needs(made, system):
        for item in made.artefacts:
            item.verify()
            shutil.copyfile(item.path, folder / item.path.name)
    else:
        with progress.step("bill of materials"), scratch_folder(folder, "packages") as root:
            # debsbom reads copies, because links in the tree could lead it to files of this PC.
            for name in sbom.FILES:
                if (place := file_in(tree, name)) is not None:
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(place, root / name)
            found = follow(tree, "opt/pitorch/lib").glob("*.so.*")
            libraries = sorted(path for path in found if path.is_file() and not path.is_symlink())
            parts = [sbom.Part(path.name, sha256_of(path)) for path in libraries]
            with contextlib.suppress(KeyError, ValueError, AttributeError):
                parts = [*(sbom.Part(*item) for item in json.loads(source.labels[WHEELS]).items()), *parts]
            sbom.write(
                root,
                folder,
                label=config.image.label,
                parts=parts,
                epoch=config.image.source_date_epoch,
                log=config.target_root / "logs" / "sbom.log",
            )
    return {name: sha256_of(folder / name) for name in sbom.NAMES}


def left_out_warnings(origin: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning for each pocket whose index could not be verified when the image was built."""
    return tuple(
        f"the image lacks the updates of pocket {suite}: its index could not be verified"
        for suite in origin.get("left_out", ())
    )


def _hash(tree: Path, size: int) -> tuple[TreeHash, str]:
    with progress.step("hash the tree"), progress.bar("hashing", total=size, in_bytes=True) as bar:
        hashed = TreeHash.of(tree, on_bytes=lambda done: bar.update(done, total=size))
        return hashed, hashed.sha256


def _client_key(final: Layout, metadata: Path) -> str:
    """Return the public key for logins to the board. An earlier export's key pair is reused."""
    private, public = metadata / final.client_key.name, metadata / f"{final.client_key.name}.pub"
    old = final.client_key
    if old.is_file() and old.with_name(public.name).is_file():
        private.touch(mode=0o600)
        private.write_bytes(old.read_bytes())
        public.write_bytes(old.with_name(public.name).read_bytes())
    else:
        process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "pitorch-export", "-f", private], limit_s=60)
    private.chmod(0o600)
    return public.read_text().strip()


def _pack(tree: Path, tarball: Path) -> Artefact:
    """Pack the tree with numeric owners, xattrs and hard links.

    Entries are sorted, so identical trees produce identical tarballs.
    """
    # tar selects the compression by the suffix, so the temporary name has the same suffix.
    aside = tarball.with_name(f".part.{tarball.name}")
    try:
        aside.touch(mode=0o600)  # the archive contains the board's private host keys
        with progress.step(f"pack {tarball.name}"):
            process.run(
                [
                    "tar", "--create", f"--file={aside}", f"--directory={tree}", "--format=posix", "--numeric-owner",
                    "--sort=name", "--xattrs", "--xattrs-include=*", "--one-file-system", "--auto-compress",
                    "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime", ".",
                ],
                env={"LC_ALL": "C"},
                fix="read the last lines of the output; if the disk is full, free some space",
            )  # fmt: skip
        os.replace(aside, tarball)
    finally:
        remove(aside)
    return Artefact.of(tarball)


@contextlib.contextmanager
def locked(final: Layout) -> Iterator[None]:
    """Lock the tree against other exports and servers.

    Raises InUse if an export or a server uses the tree, or UserError if the folder is not writable.
    """
    exported = InUse(
        f"another export or deployment is writing to {final.tree}",
        expected=f"no lock on {final.lock}",
        found="a lock",
        fix="wait until the other run ends, or stop it",
    )
    served = InUse(
        f"{final.tree} is being served over NFS",
        expected="no server that uses the tree, because a running board would lose its files",
        found=f"a lock on {final.served}",
        fix="stop ./inv serve-nfsroot or the test that serves the tree; to change a tree in use, run ./inv deploy",
    )
    with contextlib.ExitStack() as stack:
        with _writable(final.place.parent):
            final.lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(final.lock, exported))
            stack.enter_context(held(final.served, served))
        yield


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Convert an OSError caused by the folder, for example by its read-only file system, into a UserError."""
    try:
        with room_for("an export", folder):
            yield
    except OSError as fault:
        raise UserError(
            f"cannot export to {folder}",
            expected="a writable folder",
            found=f"{fault.filename}: {fault.strerror}",
            fix="choose another path with --folder or --tarball, or set nfs.folder in invoke.yaml",
        ) from fault


def _require_place_of(tarball: Path) -> None:
    if tarball.is_dir():
        raise UserError(
            f"{tarball} is a folder",
            expected="the name of a tarball",
            found="a folder",
            fix="pass the name of a file, such as nfsroot.tar",
        )
    with _writable(tarball.parent):
        tarball.parent.mkdir(parents=True, exist_ok=True)


def _refuse_foreign(final: Layout) -> None:
    if final.place.is_symlink() or (final.place.exists() and not final.place.is_dir()):
        raise UserError(
            f"{final.place} is not a folder",
            expected="a folder from an earlier export, or a path that does not exist yet",
            found="a link" if final.place.is_symlink() else "a file",
            fix="choose another folder",
        )
    if str(final.place) in mounts_below(final.place):
        raise UserError(
            f"{final.place} is a mount point, which an export cannot replace",
            expected=f"a folder on the file system of {final.place.parent}, where the export is prepared",
            found="a mount point",
            fix=f"use a folder in it, such as {final.place / 'nfsroot'} (--folder, or nfs.folder in invoke.yaml)",
        )
    move_in(final)
    entries = list(final.place.iterdir()) if final.place.exists() else []
    if entries and not (entries == [final.tree] and final.tree.is_dir() and is_ours(final)):
        named = "which matches the marker by inode only and has no host key of the export"
        inode_alone = final.tree.is_dir() and is_named(final)
        raise UserError(
            f"{final.place} was not created by an export and will not be replaced",
            expected=f"a path that does not exist yet, an empty folder, or the tree that {final.marker} identifies",
            found=f"a folder with {len(entries)} entries, " + (named if inode_alone else "which no marker identifies"),
            fix="choose another folder, or empty this one",
        )
    if final.folder.exists() and any(final.folder.iterdir()) and not final.marker.is_file():
        raise UserError(
            f"{final.folder} was not created by an export and will not be replaced",
            expected=f"a path that does not exist yet, an empty folder, or one with the marker {MARKER}",
            found="a folder without that marker",
            fix="choose another destination, or empty that folder",
        )
    if final.tree.exists():
        require_unmounted(final.tree, "replaced")


@contextlib.contextmanager
def _aside(final: Layout) -> Iterator[Path]:
    """Create the export's folder next to the destination; at the end, remove it together with the old tree."""
    aside = final.aside
    if aside.exists():
        if not (aside / MARKER).is_file() and any(aside.iterdir()):
            raise UserError(
                f"{aside} exists, but no export created it",
                expected="no folder, or one from an earlier export",
                found="a folder without a marker",
                fix="remove that folder",
            )
        _remove_aside(aside)
    aside.mkdir(mode=0o700)
    try:
        (aside / MARKER).touch()
        yield aside
    finally:
        _remove_aside(aside)


def _remove_aside(aside: Path) -> None:
    # The user may mount something in the tree at any time, and mounted files must not be deleted.
    require_unmounted(aside, "removed")
    for path in aside.iterdir():
        if path.name != MARKER:  # removed last, so that the next export recognises the folder after an interruption
            remove(path)
    remove(aside)


def _swap_in(final: Layout, tree: Path | None, metadata: Path, manifest: Manifest) -> None:
    """Move a finished export into place. All files are written first, so a full disk leaves the old export intact."""
    written = metadata.with_name(final.manifest.name)
    manifest.write(written)
    holder = metadata.with_name(f"{final.place.name}.new")
    holder.mkdir(mode=0o700)
    with swapping():
        trees: frozenset[str] = frozenset()
        if tree is not None:
            trees = frozenset({identity_of(tree)})
            if final.folder.is_dir():
                # The old marker names both trees, in case the power fails between the two exchanges.
                write_marker(final, named_trees(final) | trees)
        (metadata / MARKER).write_text(marker_of(trees))
        if tree is not None:
            if not final.place.exists():
                holder.rename(final.place)
            keep_private(final)
            _exchange(tree, final.tree)
        _exchange(metadata, final.folder)
        os.replace(written, final.manifest)


def _exchange(new: Path, place: Path) -> None:
    """Exchange two folders atomically, or rename the source if the destination does not exist."""
    if not place.exists():
        new.rename(place)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0:
        return
    # Some file systems (NFS, older overlayfs) do not support the exchange, so rename twice.
    old = _old_name(new.parent, place)
    place.rename(old)
    try:
        new.rename(place)
    except BaseException:
        old.rename(place)
        raise


def _old_name(aside: Path, place: Path) -> Path:
    """Return the temporary path of an old folder while two renames replace it."""
    return aside / f"{place.name}.old"


def _put_back(final: Layout) -> None:
    """Undo the first rename of an export that was killed between the two renames."""
    if not (final.aside / MARKER).is_file():
        return
    for place in (final.tree, final.folder):
        old = _old_name(final.aside, place)
        if old.is_dir() and not os.path.lexists(place):
            old.rename(place)


def print_result(result: ExportResult, config: Config) -> None:
    """Print the audit's findings and the final table.

    For a tree outside ``nfs.folder``, print how other tasks can use it.
    """
    rows = []
    facts = result.manifest.facts
    note = f"read by {facts['method']}, copied in {result.copy_seconds:.1f} s"
    if result.layout is not None:
        size, rootfs = facts["counts"]["bytes"], facts["rootfs_sha256"]
        rows.append(progress.Row(str(result.layout.tree), size, rootfs, result.seconds, note))
    if result.tarball is not None:
        rows.append(progress.row_of(str(result.tarball.path), result.tarball, result.seconds, note))
    if result.findings:
        progress.console.print(table(result.findings))
    progress.summary(f"exported {facts['image']}", rows, warnings=result.manifest.warnings)
    if result.layout is not None and result.layout.place != config.nfsroot:
        progress.say(
            "serve-nfsroot, test-on-pi and deploy use the tree in nfs.folder; to use this tree instead, set a variable:"
        )
        progress.say(f"    INVOKE_NFS_FOLDER={shlex.quote(str(result.layout.place))} ./inv serve-nfsroot")
