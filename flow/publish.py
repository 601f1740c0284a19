"""``push --sign``, ``pull --verify``, ``sign`` and ``verify``: sign and verify images and files.

An image's provenance, like that of a torch wheel, is an in-toto statement with a SLSA provenance predicate (version 1).
This provenance lists the commit, and the SHA-256 digests of the wheels, of libqpu, of the mirror's package lists and of
the bill of materials.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from securesystemslib.signer import CryptoSigner

from engine.connect import connect, image_id
from flow.build_lock import build_lock
from images import sbom
from recipes.torch import provenance
from registry import attestations, client, distribution, oras, reference, signing
from registry.attestations import CYCLONEDX, PROVENANCE, SPDX
from registry.client import Pulled, Pushed, PushedIndex
from registry.reference import Reference
from registry.retries import with_retries
from toolchain import files
from toolchain.config import ROOT, Config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, ConfigError, SignatureRefused, UserError
from toolchain.manifest import Manifest, have_same_needs, is_made_from
from toolchain.steps import MANIFEST_SUFFIX

BUILD_TYPE = "tag:pitorch,2026:build-image/v1"
"""A tag URI (RFC 4151), not a link. docs/trust.md describes this build type."""
BUILDER = "tag:pitorch,2026:pitorch/v1"
FILE_TYPE = "tag:pitorch,2026:file/v1"
"""The predicate type of the statement about a file without provenance; the predicate has no fields."""
_STEPS = ("system", "sbom", "mirror", "rootfs", "libqpu", "torch", "qpu-ops")


@dataclass(frozen=True)
class Checked:
    """A line of text for each check that ``verify`` has made."""

    subject: str
    lines: tuple[str, ...]

    def text(self) -> str:
        """Return the checks as text for a terminal."""
        return "\n".join([self.subject, *(f"  {line}" for line in self.lines)])


def push(configs: Sequence[Config], *, sign: bool) -> tuple[list[Pushed], PushedIndex | None]:
    """Push each configuration's system image and, with ``sign``, its signature and signed statements.

    If there are several images, each for a different architecture, an index is also pushed. Raises ConfigError if the
    key is not set, ArtefactMissing if an image was not built here, UserError if a build is running, and the same
    exceptions as ``registry.client.push``.
    """
    predicates = []
    with contextlib.ExitStack() as stack:
        if sign:
            signer = _private_key(configs[0])
            # Until the images are pushed, no build may replace them or the manifests that describe them.
            for config in configs:
                if config.target_root.is_dir():
                    stack.enter_context(build_lock(config.target_root))
            predicates = [statements(config) for config in configs]
        images, index = client.push(configs)
    user = configs[0].registry.user
    for pushed, stated in zip(images, predicates, strict=False):
        with oras.connect(pushed.reference, actions="pull,push", user=user) as store:
            with_retries(partial(attestations.attach, store, pushed.digest, stated, signer), store.connection)
    if sign and index is not None:
        with oras.connect(index.reference, actions="pull,push", user=user) as store:
            with_retries(partial(attestations.sign, store, index.digest, signer), store.connection)
    return images, index


def pull(configs: Sequence[Config], *, verify: bool, key: Path | None) -> list[Pulled]:
    """Pull each configuration's system image; with ``verify``, only if all signatures and statements are valid.

    Raises ConfigError if the key is not set, SignatureRefused if a signature or statement is invalid, and UserError if
    the record of verified images is damaged. Also raises the exceptions of ``registry.client.pull``.
    """
    if not verify:
        return client.pull(configs)
    wanted = client.shared_reference(configs)
    chosen = public_key(configs[0], key)
    found = [_verified(config, wanted, key=chosen, contents=False) for config in configs]
    done = client.pull(configs, digests=[item.digest for item in found])
    for config, item in zip(configs, found, strict=True):
        _remember(config, wanted, item)
    return done


def verify_image(config: Config, name: str, *, key: Path | None) -> Checked:
    """Verify an image in a registry: all digests, the signature, the statements, and every layer's contents.

    Raises UserError if the name, the key or the record of verified images is invalid, and ConfigError if no key is set.
    Raises SignatureRefused if one of these checks fails or a newer image was verified before. Also raises the
    exceptions of ``registry.client.pull``.
    """
    wanted = reference.parse(name)
    chosen = public_key(config, key)
    found = _verified(config, wanted, key=chosen, contents=True)
    _remember(config, wanted, found)
    packages = len(found.statements[SPDX].get("packages", ()))
    return Checked(
        f"{wanted}@{found.digest}",
        (
            f"signature: valid, verified with the key in {chosen.path}",
            "contents: the digests of the manifest, the configuration and all layers match",
            f"provenance: built {found.finished}",
            f"bill of materials: SPDX with {packages} packages, and CycloneDX; both match the provenance",
        ),
    )


def sign_file(config: Config, path: Path) -> Path:
    """Sign a file: write a signed statement (DSSE envelope) to the file's folder, and return the envelope's path.

    If a wheel has a provenance statement, this statement is signed. For a product of this build, such as a card image,
    a provenance statement is generated from the manifest next to the product. For any other file, the statement
    contains only the file's name and SHA-256. Raises ConfigError if the key is not set; ArtefactDamaged if the
    provenance or the manifest belongs to another file; or UserError if the key cannot be used.
    """
    signer = _private_key(config)
    path = files.absolute(path)  # the form of the paths in a manifest
    described = provenance.path_for(path)
    if path.suffix == ".whl" and described.is_file():
        provenance.read(described, path)
        statement = json.loads(described.read_text())
    elif predicate := _provenance_of_product(path):
        statement = attestations.statement(path.name, files.sha256_of(path), PROVENANCE, predicate)
    else:
        statement = attestations.statement(path.name, files.sha256_of(path), FILE_TYPE, {})
    envelope = envelope_of(path)
    files.write_text_atomically(envelope, signing.envelope(statement, signer).decode() + "\n")
    return envelope


def envelope_of(path: Path) -> Path:
    """Return the path of the envelope with the signed statement about a file."""
    return path.with_name(f"{path.name}.dsse.json")


def verify_file(config: Config, path: Path, *, key: Path | None) -> Checked:
    """Verify a file: its signed statement, its provenance and, if the file is a bill of materials, its format.

    If a signed provenance also lists other products, each of these products that is in the file's folder must match the
    provenance too. If ``key`` or ``registry.public_key`` is set, the file must be signed. Raises SignatureRefused if
    the signature is missing or invalid, or if a signed statement does not match. Raises ConfigError if a key is needed
    but not set. Raises ArtefactDamaged if a provenance or bill of materials is invalid, or if a wheel does not match
    its provenance. Raises ArtefactMissing if the file is unsigned and is neither a wheel with a provenance nor a bill
    of materials.
    """
    lines = []
    statement = provenance.path_for(path)
    if key is not None or config.registry.public_key or envelope_of(path).is_file():
        chosen = public_key(config, key)
        signed = _signed_statement(path, chosen)
        lines.append(f"signature: valid, verified with the key in {chosen.path}")
        if path.suffix != ".whl" and signed.get("predicateType") == PROVENANCE:
            lines += _checked_products(path, signed)
        elif statement.is_file():
            _require_same_statement(signed, statement)
    if path.name.endswith((".spdx.json", ".cdx.json")):
        try:
            sbom.require_valid(path)
        except RecursionError as fault:
            raise ArtefactDamaged(
                f"{path.name} is not a valid bill of materials",
                found="a JSON document that is nested too deeply",
                fix="run the task that wrote the document again",
            ) from fault
        lines.append("bill of materials: accepted by the library for its format")
    elif path.suffix == ".whl" and statement.is_file():
        provenance.read(statement, path)
        lines.append(f"provenance: the file has the SHA-256 in {statement.name}")
    if not lines:
        raise ArtefactMissing(
            f"{path.name} has no signature or provenance to verify",
            expected=f"a signature ({envelope_of(path).name}), a wheel with its .provenance.json, or a bill of "
            "materials (.spdx.json, .cdx.json)",
            found="no signature or wheel provenance next to the file",
            fix="pass another file, or an image: HOST[:PORT]/REPOSITORY:TAG",
        )
    return Checked(str(path), tuple(lines))


def _signed_statement(path: Path, key: signing.PublicKey) -> dict[str, Any]:
    """Return the signed statement about a file.

    Raises SignatureRefused if the signature is missing, or if the key or the file does not match the signature.
    """
    envelope = envelope_of(path)
    if not envelope.is_file():
        raise SignatureRefused(
            f"{path.name} is not signed",
            expected=envelope.name,
            found="no file with this name in the same folder",
            fix=f"run ./inv sign {path}",
        )
    stated = signing.open_envelope(envelope.read_bytes(), key, envelope.name, fix=f"run ./inv sign {path}")
    sha256 = files.sha256_of(path)
    subjects = stated.get("subject")
    if {"name": path.name, "digest": {"sha256": sha256}} not in (subjects if isinstance(subjects, list) else []):
        raise SignatureRefused(
            f"{path.name} is not the file that was signed",
            expected=f"the name and the SHA-256 in {envelope.name}",
            found=f"{path.name} with SHA-256 {sha256}",
            fix="do not use this file; get it again from its source",
        )
    return stated


def _checked_products(path: Path, signed: Mapping[str, Any]) -> list[str]:
    """Compare each product in a signed provenance with its file in the folder of ``path``; return one line per product.

    Raises SignatureRefused, or ArtefactDamaged if the provenance does not have the form that ``sign_file`` writes.
    """
    try:
        details = signed["predicate"]["runDetails"]
        lines = [f"provenance: built {details['metadata']['finishedOn']}"]
        products = [(path.with_name(item["name"]), item["digest"]["sha256"]) for item in details["byproducts"]]
    except (KeyError, TypeError, ValueError) as fault:
        raise ArtefactDamaged(
            f"the signed provenance of {path.name} was not written by ./inv sign",
            expected="the time of the build, and names and SHA-256 checksums of files in the same folder",
            found=f"{type(fault).__name__}: {fault}",
            fix=f"run ./inv sign {path}",
        ) from fault
    for other, stated in products:
        if not other.is_file():
            lines.append(f"{other.name}: not checked, because it is not next to the file")
            continue
        sha256 = files.sha256_of(other)
        if sha256 != stated:
            raise SignatureRefused(
                f"{other.name} does not match the provenance of {path.name}",
                expected=f"SHA-256 {stated}",
                found=f"SHA-256 {sha256}",
                fix="do not use these files; get them again from their source",
            )
        lines.append(f"{other.name}: matches the provenance")
    return lines


def _require_same_statement(signed: Mapping[str, Any], path: Path) -> None:
    try:
        same = json.loads(path.read_text()) == signed
    except ValueError:
        same = False
    if not same:
        raise SignatureRefused(
            f"{path.name} is not the provenance that was signed",
            expected="the statement that the envelope (.dsse.json) contains",
            found="another statement",
            fix="do not use this file; get it again from its source",
        )


def _private_key(config: Config) -> CryptoSigner:
    if not config.registry.signing_key:
        raise ConfigError(["registry.signing_key is not set: set it to the path of a private key"])
    return signing.load_private(ROOT / config.registry.signing_key)


def public_key(config: Config, key: Path | None) -> signing.PublicKey:
    """Return the key from --key or the configuration.

    Raises ConfigError if no key is set, or UserError if the key cannot be used.
    """
    if key is None and not config.registry.public_key:
        raise ConfigError(["registry.public_key is not set: set it to the path of a public key, or pass --key"])
    return signing.load_public(key or ROOT / config.registry.public_key)


def _verified(config: Config, wanted: Reference, *, key: signing.PublicKey, contents: bool) -> attestations.Verified:
    with oras.connect(wanted, actions="pull", user=config.registry.user) as store:

        def attempt() -> tuple[distribution.RemoteImage, attestations.Verified]:
            held = distribution.read_image(store.connection, config.image.target.oci_platform)
            return held, attestations.verify(store.connection, held, key)

        held, found = with_retries(attempt, store.connection)
        _require_newest(config, wanted, found)
        if contents:
            attestations.check_contents(store.connection, held)
    return found


def _record(config: Config) -> Path:
    """Return the path of the file that records the images that were last verified here."""
    return config.build_root / "verified.json"


def _record_name(config: Config, wanted: Reference) -> str:
    """Return the name under which an image is recorded.

    The name includes the platform, because an index has one image per platform.
    """
    return f"{wanted} {config.image.target.oci_platform}"


def _require_newest(config: Config, wanted: Reference, found: attestations.Verified) -> None:
    """Raise SignatureRefused if a newer image of the same name was verified here before.

    Raises UserError if the record of verified images is damaged.
    """
    path = _record(config)
    before = _recorded(path).get(_record_name(config, wanted), {})
    if found.finished < before.get("finished", ""):
        raise SignatureRefused(
            f"{wanted} is older than the image that was verified here before",
            expected=f"{before['digest']}, built {before['finished']}, or an image that was built later",
            found=f"{found.digest}, built {found.finished}",
            fix=f"if you set the tag to an older image yourself, remove {path}; otherwise, do not use the image",
        )


def _remember(config: Config, wanted: Reference, found: attestations.Verified) -> None:
    """Record an image as verified, unless another run has recorded a newer image since ``_require_newest`` ran."""
    path, name = _record(config), _record_name(config, wanted)
    with files.locked(path.parent, lock_file=False):
        recorded = _recorded(path)
        if found.finished >= recorded.get(name, {}).get("finished", ""):
            recorded[name] = {"digest": found.digest, "finished": found.finished}
            files.write_text_atomically(path, json.dumps(recorded, indent=2) + "\n")


def _recorded(path: Path) -> dict[str, dict[str, str]]:
    """Return the recorded images by name. Raises UserError if the file is damaged."""
    try:
        recorded = {
            name: {key: str(entry[key]) for key in ("digest", "finished")}
            for name, entry in json.loads(path.read_text()).items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise UserError(
            f"{path} is damaged",
            expected="the images that were verified here last, as JSON",
            found=f"{type(fault).__name__}: {fault}",
            fix="restore the file from a backup, or remove the file; after a removal, the next verification of each "
            "image also accepts an image that is older than those verified before",
        ) from fault
    return recorded


def statements(config: Config) -> dict[str, Mapping[str, Any]]:
    """Return the system image's predicates by type: provenance, SPDX and CycloneDX.

    Raises ArtefactMissing if the image in the engine is not the one that was built here, or if a later build without
    an image has replaced or removed manifests.
    """
    read = {step: Manifest.read(config.target_root / f"{step}{MANIFEST_SUFFIX}") for step in _STEPS}
    made = {step: item for step, item in read.items() if item is not None}
    if found := _why_unsigned(config, made):
        raise ArtefactMissing(
            "the image has no provenance",
            expected=f"the image {config.image_reference('system')} from the last ./inv build-image in this folder",
            found=found,
            fix="run ./inv build-image; a pulled image can be pushed, but not signed",
        )
    documents = made["sbom"]
    for item in documents.artefacts:
        item.verify()
    spdx, cyclonedx = (json.loads(documents.artefact(name).path.read_text()) for name in sbom.NAMES)
    return {
        PROVENANCE: _provenance(config, made),
        SPDX: spdx,
        CYCLONEDX: cyclonedx,
    }


def _why_unsigned(config: Config, made: Mapping[str, Manifest]) -> str:
    """Return the reason why the manifests do not describe the image in the engine, or an empty string if they do."""
    if missing := [step for step in _STEPS if step not in made]:
        return f"no manifest of the step {missing[0]}"
    system, rootfs = made["system"], made["rootfs"]
    if _image_id(config) != system.facts["image"]:
        return "another image"
    parts = all(is_made_from(system, made[step]) for step in ("rootfs", "libqpu", "torch", "qpu-ops"))
    if not (parts and is_made_from(rootfs, made["mirror"]) and have_same_needs(made["sbom"], system)):
        return "manifests of another build"
    return ""


def _image_id(config: Config) -> str:
    with contextlib.closing(connect()) as engine:
        return image_id(engine, config.image_reference("system"))


def _provenance_of_product(path: Path) -> dict[str, Any] | None:
    """Generate a file's provenance from the manifest in the same folder that lists the file.

    Return None if no manifest in the folder lists the file.

    Raises ArtefactDamaged if the file has changed since the manifest was written.
    """
    for described in sorted(path.parent.glob(f"*{MANIFEST_SUFFIX}")):
        made = Manifest.read(described)
        found = [item for item in made.artefacts if item.path == path] if made else []
        if made is None or not found:
            continue
        found[0].verify()
        facts, commit = made.facts, made.source.get("commit", "")
        image = [(facts["image"], facts["image_id"].removeprefix("sha256:"))] if "image_id" in facts else []
        return {
            "buildDefinition": {
                "buildType": f"tag:pitorch,2026:{made.step}/v1",
                "externalParameters": {},
                "internalParameters": {"key": made.key, "dirty": bool(made.source.get("dirty", False))},
                "resolvedDependencies": [
                    *_with_digests([*image, *facts.get("firmware", {}).items()]),
                    *([{"name": "pitorch", "digest": {"gitCommit": commit}}] if commit else []),
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {"invocationId": made.key, "finishedOn": _finished(described)},
                "byproducts": _with_digests(
                    (item.path.name, item.sha256) for item in made.artefacts if item.path != path
                ),
            },
        }
    return None


def _with_digests(pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return an in-toto resource descriptor for each pair of a name and a SHA-256."""
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in pairs]


def _finished(manifest: Path) -> str:
    """Return the time at which a manifest was written."""
    return datetime.datetime.fromtimestamp(manifest.stat().st_mtime, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _provenance(config: Config, made: Mapping[str, Manifest]) -> dict[str, Any]:
    system = made["system"]
    indices = made["mirror"].facts.get("indices", {})
    commit = system.source.get("commit", "")
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "flavour": config.image.flavour,
                "suite": config.image.suite,
                "architecture": config.image.architecture,
                "profile": config.image.profile,
            },
            "internalParameters": {
                "image": system.facts["image"],
                "steps": {name: item.key for name, item in sorted(made.items())},
                "dirty": bool(system.source.get("dirty", False)),
            },
            "resolvedDependencies": [
                *_with_digests(made["sbom"].facts["parts"].items()),
                # The name omits the mirror's address, which may be private.
                *_with_digests((f"index of {name.rpartition(' ')[2]}", sums) for name, sums in sorted(indices.items())),
                *([{"name": "pitorch", "digest": {"gitCommit": commit}}] if commit else []),
            ],
        },
        "runDetails": {
            "builder": {"id": BUILDER},
            "metadata": {
                "invocationId": system.key,
                "finishedOn": _finished(config.target_root / f"system{MANIFEST_SUFFIX}"),
            },
            "byproducts": _with_digests((item.path.name, item.sha256) for item in made["sbom"].artefacts),
        },
    }
