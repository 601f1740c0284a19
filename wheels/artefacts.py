"""Cache finished wheels, so that a wheel that takes an hour to build is built only once per machine or team.

An entry consists of a finished wheel, the debug symbols that were removed from it, and the provenance. An entry is
stored in the build folder, in ``artefacts/NAME/KEY/``. The key depends on everything that the build used: the recipe's
key, the compiler and the installed packages. A manifest in the folder lists sizes and SHA-256 digests, which are
verified on every use. An entry that fails verification is never used; it is renamed instead of deleted, so that the
cause can be examined.

An entry also records the recipe's key, which is known before anything is installed. ``of_recipe`` returns a recipe's
newest wheel, regardless of the compiler that built it; ``get`` returns the wheel with a given key.

In a registry, the entries are OCI artefacts (registry.oras) with the tag ``NAME-KEY``. Of the entries with the same
recipe key, the one that was pushed last also has the tag ``NAME-RECIPE``. KEY and RECIPE are the first 40 digits of the
entry's key and of the recipe's key; the manifest's annotations contain the complete keys. Users who can write to the
registry must be trustworthy, because downloads are verified only against their provenance and against the digests that
the registry states. The provenance is required, except for recipes that do not write it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from registry import oras
from registry.reference import Reference, resolve
from registry.retries import with_retries
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, RegistryFailed
from toolchain.manifest import Artefact, Manifest

KIND = "application/vnd.pitorch.artefact.v1"
"""``artifactType`` in registries."""
MANIFEST = "manifest.json"
PROVENANCE = ".provenance.json"
"""The suffix of the in-toto statement's file name."""

_KEY_ANNOTATION, _NAME_ANNOTATION, _RECIPE_ANNOTATION = "pitorch.key", "pitorch.name", "pitorch.recipe"
_RECIPE = "recipe"
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_KEY = re.compile(r"[0-9a-f]{40,64}")
_TAG_DIGITS = 40


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One finished and verified artefact on this machine."""

    name: str
    key: str
    recipe: str
    """The recipe's key; empty if it is unknown."""
    files: tuple[Artefact, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The entry's files, sorted by name."""
        return tuple(item.path for item in self.files)

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(item.size for item in self.files)

    @property
    def tag(self) -> str:
        """The entry's tag in a registry."""
        return _tag(self.name, self.key)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """An entry that is both on this machine and in a registry."""

    entry: Entry
    reference: Reference
    digest: str
    moved: int
    """The number of transferred files."""
    seconds: float
    note: str

    @property
    def row(self) -> progress.Row:
        """The entry's row in the final table."""
        return progress.Row(str(self.reference), self.entry.size, self.digest, self.seconds, self.note)


def put(config: Config, name: str, key: str, paths: Sequence[Path], *, recipe: str = "") -> tuple[Path, ...]:
    """Store copies of files under a recipe's name and a key; return the copies' paths. Replace an existing entry.

    ``recipe`` is the recipe's key, which ``of_recipe`` looks up.

    Raises DiskFull, or ArtefactDamaged if a provenance statement lists other digests.
    """
    place = _place(config, name, key)
    needed = sum(path.stat().st_size for path in paths)
    files.require_space(place.parent, (needed >> 20) + 1, f"the artefact {name}")
    with files.locked(_folder(config)), files.scratch_folder(place.parent, name) as scratch:
        aside = scratch / "entry"
        aside.mkdir()
        with files.room_for(f"the artefact {name}", place.parent):
            for path in paths:
                shutil.copyfile(path, aside / path.name)
                (aside / path.name).chmod(0o444)
        made = tuple(Artefact.of(aside / path.name) for path in sorted(paths, key=lambda item: item.name))
        _check_statement(made)
        _warn_if_changed(place, made)
        inputs = {_RECIPE: recipe} if recipe else {}
        Manifest(step=name, key=key, inputs=inputs, artefacts=made).write(aside / MANIFEST)
        with files.swapping():
            if place.exists():
                place.rename(scratch / "replaced")
            aside.rename(place)
    return tuple(place / item.path.name for item in made)


def get(config: Config, name: str, key: str) -> tuple[Path, ...] | None:
    """Return the verified files stored under a recipe's name and a key, or None if there are none.

    Raises ArtefactDamaged if the files have changed; the entry is then renamed, and the next call returns None.
    """
    found = entry(config, name, key)
    return found.paths if found else None


def keys(config: Config, name: str) -> tuple[str, ...]:
    """Return the keys of all entries for a recipe, without verifying the entries."""
    return tuple(sorted(path.parent.name for path in (_folder(config) / name).glob(f"*/{MANIFEST}")))


def keys_of_recipe(config: Config, name: str, recipe: str) -> tuple[str, ...]:
    """Return the keys of the entries with the recipe key ``recipe``, newest first.

    The entries are not verified, to save time.
    """
    found: list[tuple[int, str]] = []
    for path in (_folder(config) / name).glob(f"*/{MANIFEST}"):
        manifest = Manifest.read(path) if _KEY.fullmatch(path.parent.name) else None
        if manifest is not None and manifest.inputs.get(_RECIPE) == recipe:
            found.append((path.stat().st_mtime_ns, path.parent.name))
    return tuple(key for _, key in sorted(found, reverse=True))


def of_recipe(config: Config, name: str, recipe: str) -> tuple[Path, ...] | None:
    """Return the files of the newest entry with the recipe key ``recipe``, as ``get`` does."""
    keys = keys_of_recipe(config, name, recipe)
    return get(config, name, keys[0]) if keys else None


def prebuilt(folder: Path, name: str, recipe: str) -> tuple[Path, ...]:
    """Return the files of an entry that is committed to this repository, or none if the entry has another recipe key.

    Raises ArtefactDamaged if the entry does not match its manifest.
    """
    manifest = Manifest.read(folder / MANIFEST)
    if manifest is None or manifest.inputs.get(_RECIPE) != recipe:
        return ()
    try:
        return _intact(folder, name, manifest.key).paths
    except (ArtefactDamaged, ArtefactMissing) as fault:
        raise ArtefactDamaged(
            f"{name} in this repository is damaged ({fault.summary})",
            expected=fault.expected or "every file in its manifest",
            found=fault.found or "a missing file",
            fix=f"run git checkout -- {folder}",
        ) from fault


def entry(config: Config, name: str, key: str) -> Entry | None:
    """Return the entry that lists the files that ``get`` would return, with their sizes and digests.

    Returns None if there is no entry. Raises the same exceptions as ``get``.
    """
    place = _place(config, name, key)
    while True:
        try:
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _intact(place, name, key)
        except (ArtefactDamaged, ArtefactMissing) as fault:
            aside = _set_aside(config, place, folder)
            if aside is None:
                continue  # another process has replaced the entry
            raise ArtefactDamaged(
                f"{name} in the artefact cache is damaged and will not be used ({fault.summary})",
                expected=fault.expected or "every file in its manifest",
                found=fault.found or "a missing file",
                fix=f"run the task again to rebuild or pull the artefact; the damaged entry was renamed to {aside}",
            ) from fault
        finally:
            os.close(folder)


def _intact(place: Path, name: str, key: str) -> Entry:
    """Read and verify the entry in a folder. Raises ArtefactDamaged or ArtefactMissing if the entry has changed."""
    manifest = Manifest.read(place / MANIFEST)
    if manifest is None or (manifest.step, manifest.key) != (name, key):
        raise ArtefactDamaged(
            f"{place} is not a complete artefact",
            expected=f"a manifest of {name} with the key {key}",
            found="another manifest, or none",
        )
    strays = [item.path for item in manifest.artefacts if item.path.parent != place]
    if strays:
        raise ArtefactDamaged(
            f"the manifest in {place} lists files in other folders",
            expected=str(place),
            found=str(strays[0].parent),
        )
    try:
        for item in manifest.artefacts:
            item.verify()
        _check_statement(manifest.artefacts)
    except FileNotFoundError as fault:  # removed in the meantime
        raise ArtefactMissing(f"{fault.filename} no longer exists") from fault
    return Entry(name=name, key=key, recipe=manifest.inputs.get(_RECIPE, ""), files=manifest.artefacts)


def entries(config: Config) -> Iterator[Entry]:
    """Yield all entries on this machine. Raises ArtefactDamaged at the first damaged entry."""
    for place in sorted(_folder(config).glob("*/*")):
        if place.is_dir() and _NAME.fullmatch(place.parent.name) and _KEY.fullmatch(place.name):
            found = entry(config, place.parent.name, place.name)
            if found is not None:
                yield found


def key_of(*parts: str) -> str:
    """Return the SHA-256 of the texts that determine an artefact."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def push(config: Config) -> list[Shared]:
    """Push all entries to the registry, and verify that it holds them.

    A complete artefact that already has the tag is not replaced. Raises ArtefactMissing if there is nothing to push;
    ArtefactDamaged if an entry is damaged; otherwise the same exceptions as registry.oras.
    """
    found = list(entries(config))
    if not found:
        raise ArtefactMissing(
            "there is no artefact to push",
            expected=f"a finished wheel in {_folder(config)}",
            found="none",
            fix="run ./inv build-torch",
        )
    return [_push(config, item) for item in found]


def pull(config: Config, name: str, key: str, *, stated: bool = True) -> Shared:
    """Pull the artefact with this name and key, unless this machine already has it.

    ``key`` is the artefact's key or the recipe's key. A damaged entry on this machine is renamed and replaced.
    ``stated`` is false for a recipe that does not write provenance; otherwise a provenance statement must list every
    file.

    Raises ReferenceNotFound if the registry does not have the artefact; RegistryFailed if the artefact is damaged, has
    no provenance or is not the requested one; otherwise the same exceptions as registry.oras.
    """
    began = time.monotonic()
    reference = _reference(config, _tag(name, key))
    with oras.connect(reference, actions="pull", user=config.registry.user) as remote:
        held = with_retries(remote.artefact, remote.connection)
        _require_ours(reference, held, name, key)
        own, recipe = held.annotations[_KEY_ANNOTATION], held.annotations.get(_RECIPE_ANNOTATION, "")
        if (here := _entry_or_warning(config, name, own)) is not None:
            return Shared(
                entry=here, reference=reference, digest=held.digest, moved=0, seconds=0.0, note="already here"
            )
        place = _place(config, name, own)
        with files.scratch_folder(place.parent, f"{name}.pull") as scratch:
            files.require_space(scratch, (2 * held.size >> 20) + 1, f"the artefact {name}")

            def attempt() -> None:
                for item in held.files:
                    if not (scratch / item.name).exists():
                        remote.download(item, scratch / item.name)

            with_retries(attempt, remote.connection)
            if stated:
                _require_stated(reference, [scratch / item.name for item in held.files])
            try:
                put(config, name, own, [scratch / item.name for item in held.files], recipe=recipe)
            except ArtefactDamaged as fault:
                raise RegistryFailed(
                    f"the contents of {reference} are inconsistent ({fault.summary})",
                    expected=fault.expected,
                    found=fault.found,
                    fix="delete the tag from the registry, and push the wheel again from the machine that built it",
                ) from fault
    made = entry(config, name, own)
    assert made is not None, "it was stored above"  # noqa: S101
    return Shared(
        entry=made,
        reference=reference,
        digest=held.digest,
        moved=len(held.files),
        seconds=time.monotonic() - began,
        note=f"{len(held.files)} files received",
    )


def _entry_or_warning(config: Config, name: str, key: str) -> Entry | None:
    """Return the entry, or None if it is absent or damaged.

    A damaged entry only causes a warning, because it is then pulled again.
    """
    try:
        return entry(config, name, key)
    except ArtefactDamaged as fault:
        progress.warn(f"{fault.summary}; pulling it again")
    return None


def _push(config: Config, item: Entry) -> Shared:
    began = time.monotonic()
    reference = _reference(config, item.tag)
    annotations = {_NAME_ANNOTATION: item.name, _KEY_ANNOTATION: item.key}
    if item.recipe:
        annotations[_RECIPE_ANNOTATION] = item.recipe
    with oras.connect(reference, actions="pull,push", user=config.registry.user) as remote:
        held = with_retries(remote.find_complete, remote.connection)
        if held is not None:
            _require_ours(reference, held, item.name, item.key)
            _tag_as_newest(remote, item)
            note = "already there" + ("" if _same(held, item) else ", from another build: not replaced")
            return Shared(
                entry=item,
                reference=reference,
                digest=held.digest,
                moved=0,
                seconds=time.monotonic() - began,
                note=note,
            )
        held, sent = with_retries(lambda: remote.push(KIND, item.paths, annotations), remote.connection)
        _tag_as_newest(remote, item)
    return Shared(
        entry=item,
        reference=reference,
        digest=held.digest,
        moved=sent,
        seconds=time.monotonic() - began,
        note=f"{sent} of {len(item.files)} files sent",
    )


def _tag_as_newest(remote: oras.Store, item: Entry) -> None:
    """Point the recipe's tag at this entry."""
    if item.recipe:
        with_retries(lambda: remote.add_tag(_tag(item.name, item.recipe)), remote.connection)


def _same(held: oras.Artefact, item: Entry) -> bool:
    """Return whether ``held`` and ``item`` contain the same files.

    Provenance statements are ignored, because they contain the build's time.
    """
    there = {file.name: file.digest for file in held.files if not file.name.endswith(PROVENANCE)}
    here = {file.path.name: f"sha256:{file.sha256}" for file in item.files if not file.path.name.endswith(PROVENANCE)}
    return there == here


def _require_ours(reference: Reference, held: oras.Artefact, name: str, key: str) -> None:
    own = held.annotations.get(_KEY_ANNOTATION, "")
    stated_key = key if key == held.annotations.get(_RECIPE_ANNOTATION) and _KEY.fullmatch(own) else own
    stated = (held.kind, held.annotations.get(_NAME_ANNOTATION), stated_key)
    if stated != (KIND, name, key) or MANIFEST in [item.name for item in held.files]:
        raise RegistryFailed(
            f"the artefact in {reference} does not match its tag",
            expected=f"type {KIND}, name {name}, key {key}",
            found=", ".join(str(item or "none") for item in stated),
            fix="check --registry and registry.artefacts; if both are correct, delete the tag from the registry",
        )


def _tag(name: str, key: str) -> str:
    return f"{name}-{key[:_TAG_DIGITS]}"


def _reference(config: Config, tag: str) -> Reference:
    """Return the reference of an artefact in the repository ``registry.artefacts``."""
    section = dataclasses.replace(config.registry, repository=config.registry.artefacts)
    return resolve(dataclasses.replace(config, registry=section), tag=tag)


def _folder(config: Config) -> Path:
    return config.build_root / "artefacts"


def _place(config: Config, name: str, key: str) -> Path:
    if not _NAME.fullmatch(name) or not _KEY.fullmatch(key):
        raise ValueError(f"invalid artefact name or key: {name!r}, {key!r}")
    return _folder(config) / name / key


def _check_statement(made: Sequence[Artefact]) -> None:
    """Compare the digests in provenance statements (in-toto) with the files. Raises ArtefactDamaged."""
    there = {item.path.name: item.sha256 for item in made}
    for item in made:
        if not item.path.name.endswith(PROVENANCE):
            continue
        try:
            subjects = json.loads(item.path.read_text())["subject"]
            stated = {str(one["name"]): str(one["digest"]["sha256"]) for one in subjects}
        except (ValueError, KeyError, TypeError) as fault:
            raise ArtefactDamaged(
                f"{item.path.name} is not a provenance statement",
                expected="an in-toto statement with subjects and their SHA-256",
                found=f"{type(fault).__name__}: {fault}",
                fix="build it again",
            ) from fault
        wrong = [name for name in sorted(stated.keys() & there.keys()) if stated[name] != there[name]]
        if wrong or not stated.keys() & there.keys():
            raise ArtefactDamaged(
                f"{item.path.name} describes other files",
                expected=", ".join(f"{name} with SHA-256 {stated[name]}" for name in wrong or sorted(stated)),
                found=", ".join(f"{name} with SHA-256 {there[name]}" for name in wrong) or ", ".join(sorted(there)),
                fix="build it again",
            )


def _require_stated(reference: Reference, received: Sequence[Path]) -> None:
    """Require a provenance statement for every file; ``_check_statement`` verifies the digests."""
    described: set[str] = set()
    for path in received:
        if path.name.endswith(PROVENANCE):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                described |= {str(item["name"]) for item in json.loads(path.read_text())["subject"]}
    names = [path.name for path in received if not path.name.endswith(PROVENANCE)]
    unknown = [name for name in names if name not in described]
    if unknown or not names:
        raise RegistryFailed(
            f"{reference} has no provenance for its files",
            expected="an in-toto statement with the SHA-256 of every file",
            found=f"none for {', '.join(unknown)}" if unknown else "a statement without files",
            fix="delete the tag from the registry, then build the wheel here or push it from the machine that built it",
        )


def _warn_if_changed(place: Path, made: Sequence[Artefact]) -> None:
    """Warn if the same key has produced different bytes, because the build is then not reproducible."""
    before = Manifest.read(place / MANIFEST)
    known = {item.path.name: item.sha256 for item in before.artefacts} if before else {}
    for item in made:
        if not item.path.name.endswith(PROVENANCE) and known.get(item.path.name, item.sha256) != item.sha256:
            progress.warn(
                f"{item.path.name} differs from the previous file with the same key: its build is not reproducible "
                f"({known[item.path.name][:16]} → {item.sha256[:16]})"
            )


def _set_aside(config: Config, place: Path, folder: int) -> Path | None:
    """Rename a damaged entry; return its new path, or None if another process has replaced or removed the entry.

    ``folder`` is a file descriptor of the entry's open folder. The inode of an open folder is not reused, so it
    distinguishes the entry from one that another process has stored.
    """
    aside = place.with_name(f"{place.name}.damaged-{time.time_ns()}")
    with files.locked(_folder(config)):
        try:
            if not os.path.samestat(place.stat(), os.fstat(folder)):
                return None
        except FileNotFoundError:
            return None
        place.rename(aside)
    return aside
