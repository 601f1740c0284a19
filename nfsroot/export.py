"""Export the image as a root filesystem: exact copy, audit, the files beside it, then one swap.

Order of work, so that the old tree is whole until the new one is: everything is made in ``.NAME.export`` beside the
destination; the trees change places by renameat2(RENAME_EXCHANGE), which is atomic; then the files beside them do;
the manifest is written last; only then is the old tree removed. Whatever ends an export before the exchange leaves
the old tree and its files as they were, and the next export clears away what was left. (Where the file system cannot
exchange, there are two renames; what a SIGKILL between them leaves aside, the next export puts back first.)

A tree is replaced or removed only when the marker beside it names that very folder (nfsroot.layout), and never while
something is mounted in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.connect import connect
from images.system import LEFT_OUT
from nfsroot import unpack
from nfsroot.audit import Finding, Settings, audit, nameservers_of_host, table
from nfsroot.boot_files import accompany
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
from nfsroot.tree import TreeHash, require_unmounted
from toolchain import checkout, process, progress
from toolchain.config import Config
from toolchain.errors import CommandFailed, ForeignFolder, InUse, UserError
from toolchain.files import MARKER, absolute, full_disk, held, remove, require_space, room_for, swapping
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import MANIFEST_SUFFIX, key_of

_AGAIN = "./inv export-nfsroot"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A finished export."""

    layout: Layout | None
    """Of the tree; None when only a tarball was asked for."""
    tarball: Artefact | None
    image: str
    image_id: str
    road: str
    """How the image was read: overlay or layers."""
    image_tree_sha256: str
    """Hash of the tree as it is in the image."""
    rootfs_sha256: str
    """Hash of the tree as exported, after the audit's fixes."""
    counts: dict[str, int]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
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

    With a tarball and no destination no folder is left. ``fix`` false gives the image's tree untouched. ``role`` names
    another of the target's images, such as ``rootfs``.

    Raises RootNeeded, EngineUnavailable, ArtefactMissing (no image), PlatformMismatch, ForeignFolder (the destination
    is not ours), InUse (another export, a server of the tree, or mounts in it), DiskFull, and UserError where nothing
    can be written.
    """
    process.require_root("to give files to their owners", _AGAIN)
    began = time.monotonic()
    final = Layout(absolute(destination or (tarball or config.nfsroot)))
    if not final.place.name:
        raise ForeignFolder(
            "an export cannot replace this machine's own root",
            expected="a folder or a file below /",
            found=str(final.place),
            fix="name another one: --folder, --tarball, or nfs.folder in invoke.yaml",
        )
    as_folder = destination is not None or tarball is None
    tarball = absolute(tarball) if tarball is not None else None
    purpose = f"the export of {config.image_reference(role)}"
    client = connect()
    source = unpack.find_image(client, config.image_reference(role), config.image.target)
    with locked(final), _room_for(purpose, final.place.parent):
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
                road = unpack.unpack(client, source, tree)
                copied = time.monotonic() - copy_began
            hashed, before = _hash(tree, source.size)
            beside = aside / final.folder.name
            origin = origin_of(config, source) if role == "system" else {}
            warnings = (*left_out_warnings(origin), *accompany(config, final, tree, beside.parent))
            settings = Settings(
                hostname=config.image.name.replace("/", "-").replace("_", "-").replace(".", "-"),
                nameservers=nameservers_of_host(),
                client_public_key=_client_key(final, beside),
                now=int(time.time()),
            )
            findings: tuple[Finding, ...] = ()
            if fix:
                with progress.step("audit"):
                    audited = audit(tree, settings)
                findings = tuple(audited.findings)
                hashed.refresh(audited.touched)
                (beside / final.known_hosts.name).write_text("".join(f"* {key}\n" for key in audited.host_keys))
            rootfs, counts = hashed.sha256, dict(hashed.counts())
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
                    "road": road,
                    "image_tree_sha256": before,
                    "rootfs_sha256": rootfs,
                    "counts": counts,
                    "findings": [item.as_json() for item in findings],
                },
                warnings=warnings,
                seconds=time.monotonic() - began,
                source=checkout.origin(),
            )
            _swap_in(final, tree if as_folder else None, beside, manifest)
    return ExportResult(
        layout=final if as_folder else None,
        tarball=packed,
        image=source.reference,
        image_id=source.id,
        road=road,
        image_tree_sha256=before,
        rootfs_sha256=rootfs,
        counts=counts,
        findings=findings,
        warnings=warnings,
        copy_seconds=copied,
        seconds=time.monotonic() - began,
    )


def origin_of(config: Config, source: unpack.SourceImage) -> dict[str, Any]:
    """Where the image comes from, as facts: of what was built here, and of what the image's labels say.

    ``built_image`` is the image that was built here last (one that was pulled is another), ``image_source`` the commit
    it was built from and ``wheels`` those in it, both when that is the one that is exported, and ``left_out`` the
    pockets that it lacks; a fact that nobody knows is not there.
    """
    facts: dict[str, Any] = {}
    built = Manifest.read(config.target_root / f"system{MANIFEST_SUFFIX}")
    if built is not None:
        facts["built_image"] = str(built.facts.get("image", ""))
        if facts["built_image"] == source.id:
            facts |= {"image_source": dict(built.source)} if built.source else {}
            facts |= {"wheels": built.facts["wheels"]} if "wheels" in built.facts else {}
    with contextlib.suppress(KeyError, ValueError):
        if isinstance(said := json.loads(source.labels[LEFT_OUT]), list):
            facts["left_out"] = [str(suite) for suite in said]
    return facts


def left_out_warnings(origin: Mapping[str, Any]) -> tuple[str, ...]:
    """What the image lacks because a pocket's index could not be verified when it was built."""
    return tuple(
        f"the image was built without pocket {suite}, whose index could not be verified: its updates are missing"
        for suite in origin.get("left_out", ())
    )


def _hash(tree: Path, size: int) -> tuple[TreeHash, str]:
    with progress.step("hash the tree"), progress.bar("hashing", total=size, in_bytes=True) as bar:
        hashed = TreeHash.of(tree, on_bytes=lambda done: bar.update(done, total=size))
        return hashed, hashed.sha256


def _client_key(final: Layout, beside: Path) -> str:
    """The public half of the key pair that logs in to the board; an earlier export's pair is kept."""
    private, public = beside / final.client_key.name, beside / f"{final.client_key.name}.pub"
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
    """The tree as a tar: owners by number, xattrs, hard links; names in order, so that equal trees give equal tars."""
    # The end of the name tells tar how to compress.
    aside = tarball.with_name(f".part.{tarball.name}")
    try:
        aside.touch(mode=0o600)  # it has the board's private host keys
        with progress.step(f"pack {tarball.name}"):
            process.run(
                [
                    "tar", "--create", f"--file={aside}", f"--directory={tree}", "--format=posix", "--numeric-owner",
                    "--sort=name", "--xattrs", "--xattrs-include=*", "--one-file-system", "--auto-compress",
                    "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime", ".",
                ],
                env={"LC_ALL": "C"},
                fix="see its last lines; a full disk is the usual cause",
            )  # fmt: skip
        os.replace(aside, tarball)
    finally:
        remove(aside)
    return Artefact.of(tarball)


@contextlib.contextmanager
def locked(final: Layout) -> Iterator[None]:
    """Be the only export of the tree, with no server of it. Raises InUse; UserError where nothing can be written."""
    exported = InUse(
        f"{final.tree} is being exported by another run",
        expected=f"nobody holds {final.lock}",
        found="a lock",
        fix="wait for the other run, or end it",
    )
    served = InUse(
        f"{final.tree} is being served over NFS",
        expected="no server: a board that runs from the tree would lose its files",
        found=f"a lock on {final.served}",
        fix="end ./inv serve-nfsroot or the test that serves it; ./inv deploy changes a running tree",
    )
    with contextlib.ExitStack() as stack:
        with _writable(final.place.parent):
            final.lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(final.lock, exported))
            stack.enter_context(held(final.served, served))
        yield


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Say in words of ours why nothing can be written to the folder: a file on the way, a disk that is read-only."""
    try:
        with room_for("an export", folder):
            yield
    except OSError as fault:
        raise UserError(
            f"nothing can be exported to {folder}",
            expected="a folder that can be made and written to",
            found=f"{fault.filename}: {fault.strerror}",
            fix="name another one: --folder, --tarball, or nfs.folder in invoke.yaml",
        ) from fault


@contextlib.contextmanager
def _room_for(purpose: str, folder: Path) -> Iterator[None]:
    """Raise DiskFull where the block meets a full disk, itself or by a program that it runs."""
    try:
        with room_for(purpose, folder):
            yield
    except CommandFailed as fault:
        if (full := full_disk(fault.tail, purpose, folder)) is not None:
            raise full from fault
        raise


def _require_place_of(tarball: Path) -> None:
    if tarball.is_dir():
        raise ForeignFolder(
            f"{tarball} is a folder",
            expected="the name of a tarball",
            found="a folder",
            fix="name a file, such as nfsroot.tar",
        )
    with _writable(tarball.parent):
        tarball.parent.mkdir(parents=True, exist_ok=True)


def _refuse_foreign(final: Layout) -> None:
    if final.place.is_symlink() or (final.place.exists() and not final.place.is_dir()):
        raise ForeignFolder(
            f"{final.place} would be replaced, but it is not a folder",
            expected="a folder of ours, or nothing",
            found="a link" if final.place.is_symlink() else "a file",
            fix="name another folder",
        )
    move_in(final)
    entries = list(final.place.iterdir()) if final.place.exists() else []
    if entries and not (entries == [final.tree] and final.tree.is_dir() and is_ours(final)):
        named = "whose inode alone the marker names, and that has no host key of the export"
        inode_alone = final.tree.is_dir() and is_named(final)
        raise ForeignFolder(
            f"{final.place} would be replaced, but it is not ours",
            expected=f"an absent or empty folder, or one with the tree that {final.marker} names",
            found=f"a folder with {len(entries)} entries " + (named if inode_alone else "that no marker of ours names"),
            fix="name another folder, or empty this one yourself",
        )
    if final.folder.exists() and any(final.folder.iterdir()) and not final.marker.is_file():
        raise ForeignFolder(
            f"{final.folder} would be replaced, but it is not ours",
            expected=f"an absent or empty folder, or one with our marker {MARKER}",
            found="a folder without it",
            fix="name another destination, or empty that folder yourself",
        )
    if final.tree.exists():
        require_unmounted(final.tree, "replaced")


@contextlib.contextmanager
def _aside(final: Layout) -> Iterator[Path]:
    """The folder beside the destination in which the export is made; removed at the end, with the old tree in it."""
    aside = final.aside
    if aside.exists():
        if not (aside / MARKER).is_file() and any(aside.iterdir()):
            raise ForeignFolder(
                f"{aside} is in the way", expected="nothing, or our own", found="no marker in it", fix="remove it"
            )
        require_unmounted(aside, "removed")
        remove(aside)
    aside.mkdir(mode=0o700)
    try:
        (aside / MARKER).touch()
        yield aside
    finally:
        # A user may look into the new tree at once, and mount: the old one only goes when nothing is mounted in it.
        require_unmounted(aside, "removed")
        remove(aside)


def _swap_in(final: Layout, tree: Path | None, beside: Path, manifest: Manifest) -> None:
    """Put the finished parts in place. All is written before the first of them is: a full disk leaves the old ones."""
    written = beside.with_name(final.manifest.name)
    manifest.write(written)
    holder = beside.with_name(f"{final.place.name}.new")
    holder.mkdir(mode=0o700)
    with swapping():
        trees: frozenset[str] = frozenset()
        if tree is not None:
            trees = frozenset({identity_of(tree)})
            if final.folder.is_dir():
                # Should the power fail between the two exchanges, either marker names both trees.
                write_marker(final, named_trees(final) | trees)
        (beside / MARKER).write_text(marker_of(trees))
        if tree is not None:
            if not final.place.exists():
                holder.rename(final.place)
            keep_private(final)
            _exchange(tree, final.tree)
        _exchange(beside, final.folder)
        os.replace(written, final.manifest)


def _exchange(new: Path, place: Path) -> None:
    """Make two folders change places in one step; where there is nothing yet, a plain rename."""
    if not place.exists():
        new.rename(place)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0:
        return
    # Some file systems (NFS, older overlays) cannot exchange: two renames, the old tree whole under another name.
    old = _kept_old(new.parent, place)
    place.rename(old)
    try:
        new.rename(place)
    except BaseException:
        old.rename(place)
        raise


def _kept_old(aside: Path, place: Path) -> Path:
    """Where what was at a place lies, while it is replaced by two renames."""
    return aside / f"{place.name}.old"


def _put_back(final: Layout) -> None:
    """Rename back what an export that was killed between those two renames left: the next one may fail as well."""
    if not (final.aside / MARKER).is_file():
        return
    for place in (final.tree, final.folder):
        old = _kept_old(final.aside, place)
        if old.is_dir() and not os.path.lexists(place):
            old.rename(place)


def print_result(result: ExportResult, config: Config) -> None:
    """The final table of an export, and what the audit found; how other tasks get a tree that is not ``nfs.folder``."""
    rows = []
    note = f"read by {result.road}, copied in {result.copy_seconds:.1f} s"
    if result.layout is not None:
        size = result.counts["bytes"]
        rows.append(progress.Row(str(result.layout.tree), size, result.rootfs_sha256, result.seconds, note))
    if result.tarball is not None:
        rows.append(progress.row_of(str(result.tarball.path), result.tarball, result.seconds, note))
    if result.findings:
        progress.console.print(table(result.findings))
    progress.summary(f"exported {result.image}", rows, warnings=result.warnings)
    if result.layout is not None and result.layout.place != config.nfsroot:
        progress.say(
            "serve-nfsroot, test-on-pi and deploy take the tree that nfs.folder names; for this one, each with:"
        )
        progress.say(f"    INVOKE_NFS_FOLDER={shlex.quote(str(result.layout.place))} ./inv serve-nfsroot")
