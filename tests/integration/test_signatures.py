"""Tests of signed images in a real registry: signatures that are accepted, and the message of each refusal."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from registry_parts import (
    KIB,
    ask,
    blob_path,
    command_lines_seen,
    config_for,
    engine_client,
    for_arm64,
    forget,
    image,
    load_image,
    need,
)

from flow import publish
from flow.build_lock import build_lock
from images import sbom
from recipes.torch import provenance
from registry import attestations, distribution, oras, passwords, signing
from registry.attestations import CYCLONEDX, PROVENANCE, SPDX
from registry.client import Pushed
from registry.distribution import digest_of
from registry.local import Registry
from registry.reference import Reference, resolve
from toolchain.config import Config, load_config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, ConfigError, SignatureRefused, UserError
from toolchain.files import sha256_of
from toolchain.manifest import Artefact, Manifest

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
PASSWORD = "Signing_secret_93"
LAYER = b"a layer"


@dataclass(frozen=True)
class Keys:
    """The files of a key pair."""

    private: Path
    public: Path


def make_keys(folder: Path, name: str, *, password: str = "", curve: str = "P-256") -> Keys:
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    argv = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{curve}", "-out", str(private)]
    if password:
        argv += ["-aes-256-cbc", "-pass", "env:KEY_PASSWORD"]
    environment = {**os.environ, "KEY_PASSWORD": password}
    subprocess.run(argv, check=True, capture_output=True, env=environment)
    argv = ["openssl", "pkey", "-in", str(private), "-passin", "env:KEY_PASSWORD", "-pubout", "-out", str(public)]
    subprocess.run(argv, check=True, capture_output=True, env=environment)
    return Keys(private, public)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    need("openssl")
    return make_keys(tmp_path_factory.mktemp("keys"), "signer")


def predicates(finished: str = "2026-01-02T03:04:05Z", *, name: str = "") -> dict[str, Mapping[str, Any]]:
    """Make the predicates of statements, by type, as push does."""
    spdx: dict[str, Any] = {"spdxVersion": "SPDX-2.3", "packages": [], "name": name}
    cyclonedx: dict[str, Any] = {"bomFormat": "CycloneDX"}
    products = [
        {"name": file, "digest": {"sha256": hashlib.sha256(attestations.document_text(document).encode()).hexdigest()}}
        for file, document in zip(sbom.NAMES, (spdx, cyclonedx), strict=True)
    ]
    provenance = {"runDetails": {"metadata": {"finishedOn": finished}, "byproducts": products}}
    return {PROVENANCE: provenance, SPDX: spdx, CYCLONEDX: cyclonedx}


def put_image(store: oras.Store, reference: Reference, layer: bytes = LAYER) -> str:
    """Push an image of one layer without an engine, and return its digest."""
    settings = {"architecture": "arm", "os": "linux", "variant": "v7", "rootfs": {"type": "layers", "diff_ids": []}}
    config = json.dumps(settings).encode()
    kinds = ("application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar")
    parts = [
        {"mediaType": kind, "digest": digest_of(content), "size": len(content)}
        for kind, content in zip(kinds, (config, layer), strict=True)
    ]
    document = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": parts[0], "layers": parts[1:]}).encode()
    store.put(reference.tag, document, [config, layer])
    return digest_of(document)


def signed(
    config: Config, keys: Keys, made: Mapping[str, Mapping[str, Any]] | None = None, *, layer: bytes = LAYER
) -> str:
    """Push a signed image to the registry, and return its digest."""
    reference = resolve(config)
    with oras.connect(reference, actions="pull,push", user="") as store:
        digest = put_image(store, reference, layer)
        attestations.attach(store, digest, made or predicates(), signing.load_private(keys.private))
    return digest


def verify(config: Config, keys: Keys) -> publish.Checked:
    return publish.verify_image(config, str(resolve(config)), key=keys.public)


@contextlib.contextmanager
def changed(path: Path, old: bytes, new: bytes) -> Iterator[None]:
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    try:
        yield
    finally:
        path.write_bytes(whole)


def about(registry: Registry, config: Config, digest: str, suffix: str) -> dict[str, Any]:
    """Return the manifest that contains an image's signature or statements, as selected by ``suffix``."""
    repository = resolve(config).repository
    path = f"/v2/{repository}/manifests/{digest.replace(':', '-')}.{suffix}"
    found: dict[str, Any] = ask(registry, path, headers={"Accept": MANIFEST}).json()
    return found


def test_index_is_signed_as_well_as_its_images(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="both")
    digest = signed(config, keys)
    index = dataclasses.replace(resolve(config), tag="index")
    with oras.connect(index, actions="pull,push", user="") as store:
        held = distribution.read_image(store.connection.at(resolve(config).tag), config.image.target.oci_platform)
        document = distribution.index([held])
        distribution.put_manifest(store.connection, document, distribution.INDEX_TYPE)
        with pytest.raises(SignatureRefused, match="is not signed") as caught:
            publish.verify_image(config, str(index), key=keys.public)
        assert digest_of(document).replace(":", "-") in caught.value.expected
        attestations.sign(store, digest_of(document), signing.load_private(keys.private))
        assert publish.verify_image(config, str(index), key=keys.public).subject == f"{index}@{digest}"
        changed = json.dumps({**json.loads(document), "annotations": {"added": "by another user"}}).encode()
        distribution.put_manifest(store.connection, changed, distribution.INDEX_TYPE)
        with pytest.raises(SignatureRefused, match="is not signed"):
            publish.verify_image(config, str(index), key=keys.public)


def test_older_index_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    """Another user can set the index's tag back to an older index, whose signatures are valid."""
    config = config_for(tmp_path, plain.address, repository="older-index")
    index = dataclasses.replace(resolve(config), tag="index")
    documents = []
    with oras.connect(index, actions="pull,push", user="") as store:
        for finished in ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"):
            signed(config, keys, predicates(finished), layer=finished.encode())
            held = distribution.read_image(store.connection.at(resolve(config).tag), config.image.target.oci_platform)
            documents.append(distribution.index([held]))
            distribution.put_manifest(store.connection, documents[-1], distribution.INDEX_TYPE)
            attestations.sign(store, digest_of(documents[-1]), signing.load_private(keys.private))
            publish.verify_image(config, str(index), key=keys.public)
        distribution.put_manifest(store.connection, documents[0], distribution.INDEX_TYPE)
    with pytest.raises(SignatureRefused, match="is older than the image that was verified here before"):
        publish.verify_image(config, str(index), key=keys.public)


def test_signed_image_is_accepted(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="good")
    digest = signed(config, keys)
    found = verify(config, keys)
    assert found.subject == f"{resolve(config)}@{digest}"
    assert "signature: valid" in found.text()
    assert "built 2026-01-02T03:04:05Z" in found.text()
    assert verify(config, keys) == found
    for suffix in ("sig", "att"):
        assert about(plain, config, digest, suffix)["subject"]["digest"] == digest


def test_unsigned_image_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="unsigned")
    with oras.connect(resolve(config), actions="pull,push", user="") as store:
        put_image(store, resolve(config))
    with pytest.raises(SignatureRefused, match="is not signed") as caught:
        verify(config, keys)
    assert caught.value.exit_code == 36


def test_other_key_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="other-key")
    signed(config, keys)
    with pytest.raises(SignatureRefused, match="was not signed with this key"):
        verify(config, make_keys(tmp_path, "other"))


def test_changed_byte_in_a_layer_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="changed-layer")
    layer = b"the bytes of a layer"
    signed(config, keys, layer=layer)
    with (
        changed(blob_path(plain, digest_of(layer)), b"bytes", b"bytez"),
        pytest.raises(SignatureRefused, match=r"a layer of .* is damaged"),
    ):
        verify(config, keys)
    verify(config, keys)


def test_changed_byte_in_a_signature_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="changed-signature")
    digest = signed(config, keys)
    layer = about(plain, config, digest, "sig")["layers"][0]["digest"]
    with (
        changed(blob_path(plain, layer), b"cosign container", b"cosign Container"),
        pytest.raises(SignatureRefused, match=r"the signature of .* is damaged"),
    ):
        verify(config, keys)


def test_changed_statement_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    """The envelope's payload is changed, its signature is not, and the digests in the registry are correct."""
    config = config_for(tmp_path, plain.address, repository="changed-statement")
    digest = signed(config, keys)
    manifest = about(plain, config, digest, "att")
    envelope = json.loads(blob_path(plain, manifest["layers"][0]["digest"]).read_bytes())
    envelope["payload"] = ("A" if envelope["payload"][0] != "A" else "B") + envelope["payload"][1:]
    content = json.dumps(envelope).encode()
    manifest["layers"][0] |= {"digest": digest_of(content), "size": len(content)}
    with oras.connect(resolve(config), actions="pull,push", user="") as store:
        store.put(f"{digest.replace(':', '-')}.att", json.dumps(manifest).encode(), [content])
    with pytest.raises(SignatureRefused, match=r"a statement about .* was not signed with this key, or was changed"):
        verify(config, keys)


@pytest.mark.parametrize("suffix", ["sig", "att"])
def test_signature_of_another_image_is_refused(plain: Registry, keys: Keys, tmp_path: Path, suffix: str) -> None:
    config = config_for(tmp_path, plain.address, repository=f"swapped-{suffix}")
    good = signed(config, keys, layer=b"another layer")
    digest = signed(config, keys)
    manifest = about(plain, config, good, suffix)
    with oras.connect(resolve(config), actions="pull,push", user="") as store:
        store.put(f"{digest.replace(':', '-')}.{suffix}", json.dumps(manifest).encode(), [])
    with pytest.raises(SignatureRefused, match="belongs to another image") as caught:
        verify(config, keys)
    assert (digest in caught.value.expected, caught.value.found) == (True, good)


def test_older_image_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="older")
    signed(config, keys, predicates("2026-02-01T00:00:00Z"))
    verify(config, keys)
    signed(config, keys, predicates("2026-01-01T00:00:00Z"), layer=b"an older layer")
    with pytest.raises(SignatureRefused, match="is older than the image that was verified here before"):
        verify(config, keys)
    (tmp_path / "build/verified.json").unlink()
    verify(config, keys)


@pytest.mark.parametrize("content", ["", "[]", '{"name": 1}', '{"name": {"digest": "sha256:1"}}'])
def test_damaged_record_of_verified_images_is_reported(
    plain: Registry, keys: Keys, tmp_path: Path, content: str
) -> None:
    config = config_for(tmp_path, plain.address, repository="damaged-record")
    signed(config, keys)
    verify(config, keys)
    record = tmp_path / "build/verified.json"
    record.write_text(content)
    with pytest.raises(UserError, match=r"verified\.json is damaged") as caught:
        verify(config, keys)
    assert "also accepts an image that is older than those verified before" in caught.value.fix
    assert record.read_text() == content


def verified(finished: str) -> attestations.Verified:
    return attestations.Verified(digest=f"sha256:{finished}", statements=predicates(finished))


def test_simultaneous_runs_record_all_images(tmp_path: Path) -> None:
    config = config_for(tmp_path, "127.0.0.1:5000")
    names = [dataclasses.replace(resolve(config), tag=f"tag{number}") for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: publish._remember(config, name, verified("2026-01-01T00:00:00Z")), names))
    assert len(json.loads((tmp_path / "build/verified.json").read_text())) == len(names)


def test_a_newer_image_stays_recorded(tmp_path: Path) -> None:
    """A run with an older image does not overwrite the record that a run with a newer image has written."""
    config = config_for(tmp_path, "127.0.0.1:5000")
    for finished in ("2026-02-01T00:00:00Z", "2026-01-01T00:00:00Z"):
        publish._remember(config, resolve(config), verified(finished))
    (entry,) = json.loads((tmp_path / "build/verified.json").read_text()).values()
    assert entry["finished"] == "2026-02-01T00:00:00Z"


@pytest.mark.parametrize("kind", [PROVENANCE, SPDX, CYCLONEDX])
def test_missing_statement_is_refused(plain: Registry, keys: Keys, tmp_path: Path, kind: str) -> None:
    config = config_for(tmp_path, plain.address, repository="incomplete")
    signed(config, keys, {name: value for name, value in predicates().items() if name != kind})
    with pytest.raises(SignatureRefused, match="are missing") as caught:
        verify(config, keys)
    assert kind in caught.value.expected


def test_other_bill_of_materials_is_refused(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, repository="other-sbom")
    signed(config, keys, {**predicates(), SPDX: predicates(name="another")[SPDX]})
    with pytest.raises(SignatureRefused, match="does not match the provenance"):
        verify(config, keys)


def test_keys_of_other_kinds_are_refused(keys: Keys, tmp_path: Path) -> None:
    other = make_keys(tmp_path, "p384", curve="P-384")
    for load, path in ((signing.load_private, other.private), (signing.load_public, other.public)):
        with pytest.raises(UserError, match="a key of an unsupported kind"):
            load(path)
    with pytest.raises(UserError, match="cannot be used to sign"):
        signing.load_private(keys.public)
    with pytest.raises(UserError, match="is not a public key"):
        signing.load_public(keys.private)
    with pytest.raises(UserError, match="cannot be read"):
        signing.load_public(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"registry\.public_key"):
        publish.public_key(load_config({}), None)


def test_password_is_needed_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need("openssl")
    encrypted = make_keys(tmp_path, "encrypted", password=PASSWORD)
    monkeypatch.setattr(passwords, "_taken", {})
    with pytest.raises(UserError, match="is encrypted"):
        signing.load_private(encrypted.private)
    monkeypatch.setenv(signing.PASSWORD_VARIABLE, "Wrong_secret_93")
    with pytest.raises(UserError, match="cannot be used to sign") as caught:
        signing.load_private(encrypted.private)
    assert "Wrong_secret_93" not in f"{caught.value}{vars(caught.value)}{caught.value.__context__!r}"
    monkeypatch.setenv(signing.PASSWORD_VARIABLE, PASSWORD)
    signer = signing.load_private(encrypted.private)
    assert signing.PASSWORD_VARIABLE not in os.environ
    captured = capfd.readouterr()
    assert PASSWORD not in f"{signer!r}{captured.out}{captured.err}"


def test_cosign_accepts_the_image(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    need("cosign")
    config = config_for(tmp_path, plain.address, repository="cosign")
    signed(config, keys)
    options = [f"--key={keys.public}", "--insecure-ignore-tlog=true", "--allow-http-registry", str(resolve(config))]
    home = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["cosign", "verify", *options], check=True, capture_output=True, env=home)
    for kind in (PROVENANCE, SPDX, CYCLONEDX):
        argv = ["cosign", "verify-attestation", f"--type={kind}", *options]
        subprocess.run(argv, check=True, capture_output=True, env=home)
    other = [f"--key={make_keys(tmp_path, 'other').public}", *options[1:]]
    assert subprocess.run(["cosign", "verify", *other], capture_output=True, env=home, check=False).returncode != 0


def write_build(config: Config, image_id: str) -> None:
    """Write a build's manifests, with small documents."""
    root = config.target_root
    root.mkdir(parents=True)
    for name, document in zip(sbom.NAMES, ({"spdxVersion": "SPDX-2.3"}, {"bomFormat": "CycloneDX"}), strict=True):
        (root / name).write_text(attestations.document_text(document))
    write_manifest(root, "mirror", facts={"indices": {"http://user:pw@mirror/debian trixie": "cd" * 32}})
    write_manifest(root, "rootfs", "mirror")
    parts = ("rootfs", "libqpu", "torch", "qpu-ops")
    for name in parts[1:]:
        write_manifest(root, name)
    artefacts = tuple(Artefact.of(root / name) for name in sbom.NAMES)
    write_manifest(root, "sbom", *parts, artefacts=artefacts, facts={"parts": {"torch-2.6.0.whl": "ab" * 32}})
    write_manifest(root, "system", *parts, facts={"image": image_id})


def write_manifest(root: Path, step: str, *needs: str, artefacts: tuple[Artefact, ...] = (), facts: Any = None) -> None:
    """Write the manifest of a step that used the products of the steps ``needs``."""
    made = {name: Manifest.read(root / f"{name}.manifest.json") for name in needs}
    inputs = {f"needs:{name}": item.product for name, item in made.items() if item}
    source = {"commit": "12" * 20, "dirty": False}
    manifest = Manifest(step=step, key="k", inputs=inputs, artefacts=artefacts, facts=facts or {}, source=source)
    manifest.write(root / f"{step}.manifest.json")


@pytest.mark.parametrize("changed", ["mirror", "rootfs", "torch", "libqpu", "qpu-ops", "sbom"])
def test_steps_of_another_build_are_not_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """A later build that ended before the image was made may have replaced or removed a step's manifest."""
    monkeypatch.setattr(publish, "_image_id", lambda _: "sha256:1")
    config = load_config({"build": {"folder": str(tmp_path)}})
    root = config.target_root
    write_build(config, "sha256:1")
    assert set(publish.statements(config)) == {PROVENANCE, SPDX, CYCLONEDX}
    whole = (root / f"{changed}.manifest.json").read_text()
    if changed == "sbom":
        made = json.loads(whole)
        made["inputs"]["needs:torch"] = "another wheel"
        (root / "sbom.manifest.json").write_text(json.dumps(made))
    else:
        needs = ("mirror",) if changed == "rootfs" else ()
        write_manifest(root, changed, *needs, facts={"another": "build"})
    with pytest.raises(ArtefactMissing, match="no provenance") as caught:
        publish.statements(config)
    assert caught.value.found == "manifests of another build"
    (root / f"{changed}.manifest.json").unlink()
    with pytest.raises(ArtefactMissing, match="no provenance"):
        publish.statements(config)


def test_no_build_runs_until_a_signed_image_is_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}, "registry": {"signing_key": str(keys.private)}})

    def push(_: object) -> tuple[list[Pushed], None]:
        with pytest.raises(UserError, match="another build is running"), build_lock(config.target_root):
            raise AssertionError("the block must not run")
        return [], None

    monkeypatch.setattr(publish, "_image_id", lambda _: "sha256:1")
    monkeypatch.setattr("registry.client.push", push)
    write_build(config, "sha256:1")
    with build_lock(config.target_root), pytest.raises(UserError, match="another build is running"):
        publish.push([config], sign=True)
    publish.push([config], sign=True)


@pytest.mark.engine
def test_push_signs_the_index_of_several_architectures(plain: Registry, keys: Keys, tmp_path: Path) -> None:
    settings = {"signing_key": str(keys.private), "public_key": str(keys.public)}
    armhf = config_for(tmp_path, plain.address, repository="multiple", **settings)
    configs = [armhf, for_arm64(armhf)]
    names = [config.image_reference("system") for config in configs]
    with engine_client() as client:
        try:
            for config, name in zip(configs, names, strict=True):
                write_build(config, load_image(client, name, platform=config.image.target.oci_platform))
            _, index = publish.push(configs, sign=True)
            assert index is not None
            assert about(plain, armhf, index.digest, "sig")["subject"]["digest"] == index.digest
            forget(client, *names)
            pulled = publish.pull(configs, verify=True, key=None)
            assert [one.name for one in pulled] == names
        finally:
            forget(client, *names)


@pytest.mark.engine
def test_push_signs_and_pull_verifies(plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted = make_keys(tmp_path, "encrypted", password=PASSWORD)
    monkeypatch.setattr(passwords, "_taken", {passwords.SIGNING: PASSWORD})
    settings = {"signing_key": str(encrypted.private), "public_key": str(encrypted.public)}
    config = config_for(tmp_path, plain.address, repository="whole", **settings)
    name = config.image_reference("system")
    with command_lines_seen() as seen, engine_client() as client, image(client, name, (4 * KIB,)) as identity:
        with pytest.raises(ArtefactMissing, match="no provenance"):
            publish.push([config], sign=True)
        write_build(config, identity)
        (pushed,), _ = publish.push([config], sign=True)
        forget(client, name)
        (pulled,) = publish.pull([config], verify=True, key=None)
        assert (pulled.digest, pulled.image_id) == (pushed.digest, identity)
        forget(client, name)
        other = make_keys(tmp_path, "other").public
        with pytest.raises(SignatureRefused):
            publish.pull([config], verify=True, key=other)
        assert not [one for one in client.api.images() if name in (one["RepoTags"] or [])], (
            "the image must not be pulled"
        )
    stored = b"".join(path.read_bytes() for path in plain.settings.images.rglob("data"))
    secret = encrypted.private.read_text().splitlines()[2]
    for text in (PASSWORD, secret):
        assert text.encode() not in stored
        assert text not in "".join(seen) + plain.settings.log.read_text()
    statement = json.loads(
        blob_path(plain, about(plain, config, pushed.digest, "att")["layers"][0]["digest"]).read_bytes()
    )
    provenance = json.loads(base64.b64decode(statement["payload"]))
    names = [item["name"] for item in provenance["predicate"]["buildDefinition"]["resolvedDependencies"]]
    assert names == ["torch-2.6.0.whl", "index of trixie", "pitorch"]


def test_file_is_verified(tmp_path: Path) -> None:
    config = load_config({})
    wheel = tmp_path / "torch-2.6.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    with pytest.raises(ArtefactMissing, match="no signature or provenance to verify"):
        publish.verify_file(config, wheel, key=None)
    write_provenance(wheel)
    assert "provenance" in publish.verify_file(config, wheel, key=None).text()
    wheel.write_bytes(b"a Wheel")
    with pytest.raises(UserError, match="does not match its provenance"):
        publish.verify_file(config, wheel, key=None)
    (tmp_path / "x.cdx.json").write_text("{}")
    with pytest.raises(UserError, match="not a valid bill of materials"):
        publish.verify_file(config, tmp_path / "x.cdx.json", key=None)


def write_provenance(wheel: Path) -> None:
    subject = [{"name": wheel.name, "digest": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}}]
    predicate: dict[str, Any] = {"buildDefinition": {"externalParameters": {}}}
    document = {"subject": subject, "predicateType": PROVENANCE, "predicate": predicate}
    provenance.path_for(wheel).write_text(json.dumps(document))


def test_signed_file_is_verified_and_a_changed_one_refused(keys: Keys, tmp_path: Path) -> None:
    config = load_config({"registry": {"signing_key": str(keys.private), "public_key": str(keys.public)}})
    card = tmp_path / "card.img.xz"
    card.write_bytes(b"a card")
    with pytest.raises(SignatureRefused, match="is not signed"):
        publish.verify_file(config, card, key=keys.public)
    envelope = publish.sign_file(config, card)
    lines = publish.verify_file(config, card, key=None).lines
    assert lines == (f"signature: valid, verified with the key in {keys.public}",)
    with pytest.raises(SignatureRefused, match="was not signed with this key"):
        publish.verify_file(config, card, key=make_keys(tmp_path, "other").public)
    with pytest.raises(ConfigError, match=r"registry\.public_key"):
        publish.verify_file(load_config({}), card, key=None)
    card.write_bytes(b"a Card")
    with pytest.raises(SignatureRefused, match="is not the file that was signed"):
        publish.verify_file(config, card, key=None)
    envelope.write_text(envelope.read_text().replace('"payload": "ey', '"payload": "fy'))
    with pytest.raises(SignatureRefused, match="was changed afterwards"):
        publish.verify_file(config, card, key=None)
    envelope.write_text("{")
    with pytest.raises(SignatureRefused, match="is not a signed statement") as caught:
        publish.verify_file(config, card, key=None)
    assert caught.value.fix == f"run ./inv sign {card}"


def test_signature_of_a_renamed_file_is_refused(keys: Keys, tmp_path: Path) -> None:
    """A file that was signed under another name must not replace this one."""
    config = load_config({"registry": {"signing_key": str(keys.private), "public_key": str(keys.public)}})
    old, new = tmp_path / "old.img.xz", tmp_path / "new.img.xz"
    old.write_bytes(b"a card")
    publish.sign_file(config, old).rename(publish.envelope_of(new))
    old.rename(new)
    with pytest.raises(SignatureRefused, match="is not the file that was signed"):
        publish.verify_file(config, new, key=None)


def test_signed_wheel_has_its_provenance_as_statement(keys: Keys, tmp_path: Path) -> None:
    config = load_config({"registry": {"signing_key": str(keys.private), "public_key": str(keys.public)}})
    wheel = tmp_path / "torch-2.6.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    write_provenance(wheel)
    envelope = json.loads(publish.sign_file(config, wheel).read_text())
    assert json.loads(base64.b64decode(envelope["payload"])) == json.loads(provenance.path_for(wheel).read_text())
    assert [line.partition(":")[0] for line in publish.verify_file(config, wheel, key=None).lines] == [
        "signature",
        "provenance",
    ]
    stated = json.loads(provenance.path_for(wheel).read_text())
    provenance.path_for(wheel).write_text(json.dumps({**stated, "builder": "another"}))
    with pytest.raises(SignatureRefused, match="is not the provenance that was signed"):
        publish.verify_file(config, wheel, key=None)
    with pytest.raises(ConfigError, match=r"registry\.signing_key"):
        publish.sign_file(load_config({}), wheel)


def test_signed_product_has_the_provenance_of_its_build(keys: Keys, tmp_path: Path) -> None:
    config = load_config({"registry": {"signing_key": str(keys.private), "public_key": str(keys.public)}})
    card, document, moved = (tmp_path / name for name in ("card.img.xz", "card.spdx.json", "card.bmap"))
    for path in (card, document, moved):
        path.write_text(f"contents of {path.name}")
    package = {"raspi-firmware_1_all.deb": "cd" * 32}
    Manifest(
        step="sd",
        key="k",
        inputs={},
        artefacts=tuple(map(Artefact.of, (card, document, moved))),
        facts={"image": "pitorch/system:trixie-armhf", "image_id": f"sha256:{'ab' * 32}", "firmware": package},
        source={"commit": "12" * 20, "dirty": False},
    ).write(tmp_path / "sd.manifest.json")
    envelope = json.loads(publish.sign_file(config, card).read_text())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert statement["predicateType"] == PROVENANCE
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {item["name"]: [*item["digest"].values()] for item in dependencies} == {
        "pitorch/system:trixie-armhf": ["ab" * 32],
        "raspi-firmware_1_all.deb": ["cd" * 32],
        "pitorch": ["12" * 20],
    }
    moved.unlink()
    assert [line.partition(":")[0] for line in publish.verify_file(config, card, key=None).lines] == [
        *("signature", "provenance", "card.spdx.json", "card.bmap")
    ]
    assert "card.bmap: not checked" in publish.verify_file(config, card, key=None).text()
    document.write_text("another bill of materials")
    with pytest.raises(SignatureRefused, match=r"card\.spdx\.json does not match the provenance of card\.img\.xz"):
        publish.verify_file(config, card, key=None)
    card.write_text("another card")
    with pytest.raises(ArtefactDamaged, match="does not match its manifest"):
        publish.sign_file(config, card)


@pytest.mark.parametrize(
    "predicate", [None, {}, {"runDetails": {"metadata": {"finishedOn": "now"}, "byproducts": [{"uri": "https://x"}]}}]
)
def test_provenance_of_another_program_is_reported(keys: Keys, tmp_path: Path, predicate: dict[str, Any]) -> None:
    (file := tmp_path / "file").write_text("contents")
    statement = attestations.statement(file.name, sha256_of(file), PROVENANCE, predicate)
    publish.envelope_of(file).write_bytes(signing.envelope(statement, signing.load_private(keys.private)))
    with pytest.raises(ArtefactDamaged, match=r"was not written by \./inv sign") as caught:
        publish.verify_file(load_config({}), file, key=keys.public)
    assert caught.value.fix == f"run ./inv sign {file}"


@pytest.mark.parametrize("given", ["docs/../sd/card.img", "link/card.img"])
def test_product_is_recognised_by_any_path(keys: Keys, tmp_path: Path, given: str) -> None:
    config = load_config({"registry": {"signing_key": str(keys.private), "public_key": str(keys.public)}})
    card, other = tmp_path / "sd" / "card.img", tmp_path / "sd" / "card.bmap"
    for folder in ("docs", "sd"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("sd")
    for path in (card, other):
        path.write_text(path.name)
    made = Manifest(step="sd", key="k", inputs={}, artefacts=tuple(map(Artefact.of, (card, other))))
    made.write(tmp_path / "sd" / "sd.manifest.json")
    envelope = publish.sign_file(config, tmp_path / given)
    assert envelope == publish.envelope_of(card)
    statement = json.loads(base64.b64decode(json.loads(envelope.read_text())["payload"]))
    assert statement["predicateType"] == PROVENANCE
    assert [item["name"] for item in statement["predicate"]["runDetails"]["byproducts"]] == [other.name]


def test_removed_signature_is_refused_if_a_key_is_set(keys: Keys, tmp_path: Path) -> None:
    config = load_config({"registry": {"signing_key": str(keys.private), "public_key": str(keys.public)}})
    wheel = tmp_path / "torch-2.6.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    write_provenance(wheel)
    publish.sign_file(config, wheel).unlink()
    with pytest.raises(SignatureRefused, match="is not signed"):
        publish.verify_file(config, wheel, key=None)


def test_cosign_accepts_the_signature_of_a_file(keys: Keys, tmp_path: Path) -> None:
    need("cosign")
    config = load_config({"registry": {"signing_key": str(keys.private)}})
    card = tmp_path / "card.img.xz"
    card.write_bytes(b"a card")
    options = [f"--key={keys.public}", "--insecure-ignore-tlog=true", f"--type={publish.FILE_TYPE}"]
    argv = ["cosign", "verify-blob-attestation", *options, f"--signature={publish.sign_file(config, card)}", str(card)]
    home = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(argv, check=True, capture_output=True, env=home)
    card.write_bytes(b"a Card")
    assert subprocess.run(argv, capture_output=True, env=home, check=False).returncode != 0


def test_invalid_image_names_are_refused() -> None:
    for text in ("nonsense", "host:5000/x", "127.0.0.1:5000/UPPER:tag"):
        with pytest.raises(UserError, match=re.escape(text.partition("/")[0])):
            publish.verify_image(load_config({}), text, key=None)
