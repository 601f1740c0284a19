"""The artefact cache: what takes an hour to make is made once, for a machine and for a team.

A finished wheel, what was split off it and its provenance lie together under the key of all that made them (the
recipe's own key, the compiler, the packages that it was built with), at ``artefacts/NAME/KEY/`` of the build folder. A
manifest beside them states sizes and SHA-256; they are checked on every use. An entry that fails is set aside, never
used and never deleted by itself: somebody may want to know why.

An entry also tells its recipe's key, which is known before anything is installed: who only wants a wheel of this recipe
takes the newest, whatever compiler made it (``of_recipe``); who is about to build asks for the very one (``get``).

The same entries lie in a registry as OCI artefacts (registry.oras), tagged ``NAME-KEY`` with the key's first 40 digits,
and the one that was pushed last ``NAME-RECIPE`` as well; whole keys stand in the manifest's annotations. A registry is
believed as far as its writers are: what is received is checked against the digests that the registry states, and
against its own provenance, without which it is not taken (unless its recipe writes none).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from registry import oras
from registry.client import with_retries
from registry.reference import Reference, resolve
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, RegistryFailed
from toolchain.manifest import Artefact, Manifest

KIND = "application/vnd.pitorch.artefact.v1"
"""``artifactType`` in registries."""
MANIFEST = "manifest.json"
PROVENANCE = ".provenance.json"
"""Ending of the in-toto statement's name."""

_KEY_ANNOTATION, _NAME_ANNOTATION, _RECIPE_ANNOTATION = "pitorch.key", "pitorch.name", "pitorch.recipe"
_RECIPE = "recipe"
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_KEY = re.compile(r"[0-9a-f]{40,64}")
_TAG_DIGITS = 40


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One finished artefact on this machine, intact."""

    name: str
    key: str
    recipe: str
    """The recipe's own key; empty where none was told."""
    files: tuple[Artefact, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Its files, sorted by name."""
        return tuple(item.path for item in self.files)

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(item.size for item in self.files)

    @property
    def tag(self) -> str:
        """Its tag in a registry."""
        return _tag(self.name, self.key)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """An entry that is here and in a registry. ``moved`` are the files that had to be transferred."""

    entry: Entry
    reference: Reference
    digest: str
    moved: int
    seconds: float
    note: str

    @property
    def row(self) -> progress.Row:
        """Its line of the final table."""
        return progress.Row(str(self.reference), self.entry.size, self.digest, self.seconds, self.note)


def put(config: Config, name: str, key: str, paths: Sequence[Path], *, recipe: str = "") -> tuple[Path, ...]:
    """Keep copies of files under a recipe's name and a key; where they are now. What was there is replaced, whole.

    ``recipe`` is the recipe's own key, by which ``of_recipe`` finds them too.

    Raises ArtefactMissing for a file that is not there, ArtefactDamaged when a provenance statement among them speaks
    of other bytes, DiskFull.
    """
    place = _place(config, name, key)
    _require_all(paths)
    needed = sum(path.stat().st_size for path in paths)
    files.require_space(place.parent, (needed >> 20) + 1, f"the artefact {name}")
    with _alone(config), files.scratch_folder(place.parent, name) as scratch:
        aside = scratch / "entry"
        aside.mkdir()
        with files.room_for(f"the artefact {name}", place.parent):
            for path in paths:
                shutil.copyfile(path, aside / path.name)
                (aside / path.name).chmod(0o444)
        made = tuple(Artefact.of(aside / path.name) for path in sorted(paths, key=lambda item: item.name))
        _check_statement(made)
        _say_if_other(place, made)
        inputs = {_RECIPE: recipe} if recipe else {}
        Manifest(step=name, key=key, inputs=inputs, artefacts=made).write(aside / MANIFEST)
        with files.swapping():
            if place.exists():
                place.rename(scratch / "replaced")
            aside.rename(place)
    return tuple(place / item.path.name for item in made)


def get(config: Config, name: str, key: str) -> tuple[Path, ...] | None:
    """The files that are kept under a recipe's name and a key, checked now; None when there are none.

    Raises ArtefactDamaged when they are not what was put there: the entry is then set aside, and the next call says
    None.
    """
    found = entry(config, name, key)
    return found.paths if found else None


def kept_of_recipe(config: Config, name: str, recipe: str) -> tuple[str, ...]:
    """Keys of what is kept of a recipe's key, the newest first, intact or not: for a plan, which reads no gigabytes."""
    found: list[tuple[int, str]] = []
    for path in (_folder(config) / name).glob(f"*/{MANIFEST}"):
        manifest = Manifest.read(path) if _KEY.fullmatch(path.parent.name) else None
        if manifest is not None and manifest.inputs.get(_RECIPE) == recipe:
            found.append((path.stat().st_mtime_ns, path.parent.name))
    return tuple(key for _, key in sorted(found, reverse=True))


def of_recipe(config: Config, name: str, recipe: str) -> tuple[Path, ...] | None:
    """As ``get``, for the newest that is kept of a recipe's own key. Raises as it does."""
    keys = kept_of_recipe(config, name, recipe)
    return get(config, name, keys[0]) if keys else None


def entry(config: Config, name: str, key: str) -> Entry | None:
    """As ``get``, with sizes and digests."""
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
                continue  # another process put one there meanwhile, which may be whole
            raise ArtefactDamaged(
                f"the kept {name} is damaged and is not used ({fault.summary})",
                expected=fault.expected or "every file of its manifest",
                found=fault.found or "not there",
                fix=f"run the task again: it is made or pulled anew; the damaged one is {aside}",
            ) from fault
        finally:
            os.close(folder)


def _intact(place: Path, name: str, key: str) -> Entry:
    """The entry in a folder, read whole. Raises ArtefactDamaged or ArtefactMissing unless it is as it was put there."""
    manifest = Manifest.read(place / MANIFEST)
    if manifest is None or (manifest.step, manifest.key) != (name, key):
        raise ArtefactDamaged(
            f"{place} is no whole artefact", expected=f"a manifest of {name}, {key}", found="another, or none"
        )
    strays = [item.path for item in manifest.artefacts if item.path.parent != place]
    if strays:
        raise ArtefactDamaged(f"{place} names files elsewhere", expected=str(place), found=str(strays[0].parent))
    try:
        for item in manifest.artefacts:
            item.verify()
        _check_statement(manifest.artefacts)
    except FileNotFoundError as fault:  # taken away just now
        raise ArtefactMissing(f"{fault.filename} is gone") from fault
    return Entry(name=name, key=key, recipe=manifest.inputs.get(_RECIPE, ""), files=manifest.artefacts)


def entries(config: Config) -> Iterator[Entry]:
    """All that is kept here. Raises ArtefactDamaged at the first entry that is not intact."""
    for place in sorted(_folder(config).glob("*/*")):
        if place.is_dir() and _NAME.fullmatch(place.parent.name) and _KEY.fullmatch(place.name):
            found = entry(config, place.parent.name, place.name)
            if found is not None:
                yield found


def push(config: Config, *, registry: str | None = None, user: str | None = None, name: str = "") -> list[Shared]:
    """Send everything that is kept here (of one ``name``) to a registry, and ask it whether it has it.

    ``registry`` is HOST[:PORT]/NAMESPACE. A tag that is there, whole, is left as it is: whoever built first wins.
    Raises ArtefactMissing when there is nothing to send, ArtefactDamaged, and what registry.oras raises.
    """
    kept = [item for item in entries(config) if name in ("", item.name)]
    if not kept:
        raise ArtefactMissing(
            "there is no artefact to push",
            expected=f"a finished wheel in {_folder(config)}",
            found="none" + (f" named {name}" if name else ""),
            fix="./inv build-torch",
        )
    return [_push(config, item, registry=registry, user=user) for item in kept]


def pull(
    config: Config, name: str, key: str, *, registry: str | None = None, user: str | None = None, stated: bool = True
) -> Shared:
    """Fetch what a registry keeps under a recipe's name and a key, its own or its recipe's, unless it is here.

    A damaged entry of this machine is set aside, and replaced. ``stated`` is false for a recipe that writes no
    provenance: otherwise every file must be spoken of by a statement that comes with it.

    Raises ReferenceNotFound when the registry does not have it, RegistryFailed when what it has is damaged, without
    provenance, or is another artefact, and what registry.oras raises.
    """
    began = time.monotonic()
    reference = _reference(config, _tag(name, key), registry)
    with oras.connect(reference, actions="pull", user=_user(config, user)) as remote:
        held = remote.artefact()
        _require_ours(reference, held, name, key)
        own, recipe = held.annotations[_KEY_ANNOTATION], held.annotations.get(_RECIPE_ANNOTATION, "")
        if (here := _whole_entry(config, name, own)) is not None:
            return Shared(
                entry=here, reference=reference, digest=held.digest, moved=0, seconds=0.0, note="is here already"
            )
        place = _place(config, name, own)
        with files.scratch_folder(place.parent, f"{name}.pull") as scratch:
            files.require_space(scratch, (2 * held.size >> 20) + 1, f"the artefact {name}")

            def attempt() -> None:
                for item in held.files:
                    if not (scratch / item.name).exists():
                        remote.download(item, scratch / item.name)

            with_retries(attempt, remote)
            if stated:
                _require_stated(reference, [scratch / item.name for item in held.files])
            try:
                put(config, name, own, [scratch / item.name for item in held.files], recipe=recipe)
            except ArtefactDamaged as fault:
                raise RegistryFailed(
                    f"{reference} contradicts itself ({fault.summary})",
                    expected=fault.expected,
                    found=fault.found,
                    fix="delete that tag there and push it anew from where it was built",
                ) from fault
    made = entry(config, name, own)
    assert made is not None, "it was put there just now"  # noqa: S101
    return Shared(
        entry=made,
        reference=reference,
        digest=held.digest,
        moved=len(held.files),
        seconds=time.monotonic() - began,
        note=f"{len(held.files)} files received",
    )


def _whole_entry(config: Config, name: str, key: str) -> Entry | None:
    """An entry that is about to be pulled, so a damaged one is a warning."""
    try:
        return entry(config, name, key)
    except ArtefactDamaged as fault:
        progress.warn(f"{fault.summary}; it is pulled anew")
    return None


def _push(config: Config, item: Entry, *, registry: str | None, user: str | None) -> Shared:
    began = time.monotonic()
    reference = _reference(config, item.tag, registry)
    annotations = {_NAME_ANNOTATION: item.name, _KEY_ANNOTATION: item.key}
    if item.recipe:
        annotations[_RECIPE_ANNOTATION] = item.recipe
    with oras.connect(reference, actions="pull,push", user=_user(config, user)) as remote:
        held = remote.find()
        if held is not None and remote.is_whole(held):
            _require_ours(reference, held, item.name, item.key)
            _tag_as_newest(remote, item)
            note = "is there already" + ("" if _same(held, item) else ", of another build: left as it is")
            return Shared(
                entry=item,
                reference=reference,
                digest=held.digest,
                moved=0,
                seconds=time.monotonic() - began,
                note=note,
            )
        (held, sent), _ = with_retries(lambda: remote.push(KIND, item.paths, annotations), remote)
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
    """The recipe's tag is for this one from now on."""
    if item.recipe:
        with_retries(lambda: remote.tag_also(_tag(item.name, item.recipe)), remote)


def _same(held: oras.Artefact, item: Entry) -> bool:
    """Whether the files are the same; statements, which tell the time of the build, left aside."""
    there = {file.name: file.digest for file in held.files if not file.name.endswith(PROVENANCE)}
    here = {file.path.name: f"sha256:{file.sha256}" for file in item.files if not file.path.name.endswith(PROVENANCE)}
    return there == here


def _require_ours(reference: Reference, held: oras.Artefact, name: str, key: str) -> None:
    own = held.annotations.get(_KEY_ANNOTATION, "")
    stated_key = key if key == held.annotations.get(_RECIPE_ANNOTATION) and _KEY.fullmatch(own) else own
    stated = (held.kind, held.annotations.get(_NAME_ANNOTATION), stated_key)
    if stated != (KIND, name, key) or MANIFEST in [item.name for item in held.files]:
        raise RegistryFailed(
            f"{reference} is another artefact than its tag says",
            expected=f"{KIND}, {name}, key {key}",
            found=", ".join(str(item or "nothing stated") for item in stated),
            fix="check --registry and registry.artefacts; delete that tag if it is wrong there",
        )


def _tag(name: str, key: str) -> str:
    return f"{name}-{key[:_TAG_DIGITS]}"


def _reference(config: Config, tag: str, registry: str | None) -> Reference:
    """As for images, in the repository that is for artefacts."""
    section = dataclasses.replace(config.registry, repository=config.registry.artefacts)
    return resolve(dataclasses.replace(config, registry=section), registry=registry, tag=tag)


def _user(config: Config, user: str | None) -> str:
    return config.registry.user if user is None else user


def _folder(config: Config) -> Path:
    return config.build_root / "artefacts"


def _place(config: Config, name: str, key: str) -> Path:
    if not _NAME.fullmatch(name) or not _KEY.fullmatch(key):
        raise ValueError(f"no name and key of an artefact: {name!r}, {key!r}")
    return _folder(config) / name / key


def _require_all(paths: Sequence[Path]) -> None:
    if not paths or len({path.name for path in paths} - {MANIFEST}) != len(paths):
        raise ValueError(f"files of an artefact have names of their own: {[path.name for path in paths]}")
    for path in paths:
        if not path.is_file():
            raise ArtefactMissing(f"{path} is gone", expected="a finished file", found="none", fix="make it again")


def _check_statement(made: Sequence[Artefact]) -> None:
    """What a provenance statement (in-toto) says of the files beside it must be so. Raises ArtefactDamaged."""
    there = {item.path.name: item.sha256 for item in made}
    for item in made:
        if not item.path.name.endswith(PROVENANCE):
            continue
        try:
            subjects = json.loads(item.path.read_text())["subject"]
            stated = {str(one["name"]): str(one["digest"]["sha256"]) for one in subjects}
        except (ValueError, KeyError, TypeError) as fault:
            raise ArtefactDamaged(
                f"{item.path.name} is no provenance statement",
                expected="an in-toto statement with subjects and their SHA-256",
                found=f"{type(fault).__name__}: {fault}",
                fix="build it anew",
            ) from fault
        wrong = [name for name in sorted(stated.keys() & there.keys()) if stated[name] != there[name]]
        if wrong or not stated.keys() & there.keys():
            raise ArtefactDamaged(
                f"{item.path.name} speaks of other files",
                expected=", ".join(f"{name} with SHA-256 {stated[name]}" for name in wrong or sorted(stated)),
                found=", ".join(f"{name} with SHA-256 {there[name]}" for name in wrong) or ", ".join(sorted(there)),
                fix="build it anew",
            )


def _require_stated(reference: Reference, received: Sequence[Path]) -> None:
    """Every file is the subject of a statement among them; whether it is the right one, ``_check_statement`` finds."""
    spoken_of: set[str] = set()
    for path in received:
        if path.name.endswith(PROVENANCE):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                spoken_of |= {str(item["name"]) for item in json.loads(path.read_text())["subject"]}
    names = [path.name for path in received if not path.name.endswith(PROVENANCE)]
    unknown = [name for name in names if name not in spoken_of]
    if unknown or not names:
        raise RegistryFailed(
            f"{reference} comes without the provenance of what is in it",
            expected="an in-toto statement with the SHA-256 of every file",
            found=f"none of {', '.join(unknown)}" if unknown else "a statement alone",
            fix="delete that tag there and push it anew from where it was built, or build it here",
        )


def _say_if_other(place: Path, made: Sequence[Artefact]) -> None:
    """The same key makes the same bytes, or the build is not reproducible: that must not pass in silence."""
    before = Manifest.read(place / MANIFEST)
    known = {item.path.name: item.sha256 for item in before.artefacts} if before else {}
    for item in made:
        if not item.path.name.endswith(PROVENANCE) and known.get(item.path.name, item.sha256) != item.sha256:
            progress.warn(
                f"{item.path.name} is not what was kept under the same key: its build is not reproducible "
                f"({known[item.path.name][:16]} → {item.sha256[:16]})"
            )


def _set_aside(config: Config, place: Path, folder: int) -> Path | None:
    """Move a damaged entry, whose folder is open, out of the way: where it is now; None if it is there no more.

    As long as a folder is open no other gets its inode, so what another process put there meanwhile is told from it.
    """
    aside = place.with_name(f"{place.name}.damaged-{time.time_ns()}")
    with _alone(config):
        try:
            if not os.path.samestat(place.stat(), os.fstat(folder)):
                return None
        except FileNotFoundError:
            return None
        place.rename(aside)
    return aside


@contextlib.contextmanager
def _alone(config: Config) -> Iterator[None]:
    """One process at a time changes the cache; it is a matter of moments."""
    with files.locked(_folder(config)):
        yield
