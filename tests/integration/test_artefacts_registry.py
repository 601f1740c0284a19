"""Tests that push artefacts to a real registry and pull them, in ORAS's layout, without an engine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nasty_image
import pytest
from registry_parts import (
    MIB,
    PASSWORD,
    USER,
    Proxy,
    ask,
    blob_path,
    blobs_on_disk,
    config_for,
    engine_client,
    forget,
    need,
    small_disk,
    with_images_on,
)
from test_artefacts import KEY, OTHER_KEY, products

from flow import share_artefacts as share
from recipes.torch import provenance
from recipes.tvm_ffi import locate as tvm_ffi
from registry import local as local_registry
from registry import oras, retries
from registry.credentials import PASSWORD_VARIABLE
from registry.local import Registry
from toolchain import progress
from toolchain.config import Config, load_config
from toolchain.errors import (
    AccessDenied,
    ArtefactDamaged,
    ArtefactMissing,
    CommandFailed,
    DiskFull,
    NetworkUnreachable,
    ReferenceNotFound,
    RegistryBroke,
    RegistryFailed,
    RegistryFull,
    SourceUnavailable,
)
from toolchain.manifest import Artefact, Manifest
from wheels import artefacts
from wheels.faults import explain
from wheels.request import Wanted

OCI = "application/vnd.oci.image.manifest.v1+json"
TAG = f"thing-{KEY[:40]}"

pytestmark = pytest.mark.usefixtures("docker_config")


def teammate(config: Config, folder: Path) -> Config:
    """Return a configuration for another machine, with the same registry and an empty cache."""
    section = config.registry
    return config_for(folder, section.address, namespace=section.namespace, user=section.user)


def manifest_of(running: Registry, namespace: str, tag: str = TAG) -> dict[str, object]:
    answer = ask(running, f"/v2/{namespace}/artefacts/manifests/{tag}", headers={"Accept": OCI})
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


def test_pulled_files_equal_the_pushed_ones(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="whole/team")
    made = products(tmp_path)
    artefacts.put(here, "thing", KEY, made)
    (pushed,) = artefacts.push(here)
    assert str(pushed.reference) == f"{plain.address}/whole/team/artefacts:{TAG}"
    assert (pushed.moved, pushed.note) == (3, "3 of 3 files sent")
    there = teammate(here, tmp_path / "there")
    pulled = artefacts.pull(there, "thing", KEY)
    assert (pulled.moved, pulled.digest) == (3, pushed.digest)
    found = artefacts.get(there, "thing", KEY)
    assert found is not None
    assert {path.name: path.read_bytes() for path in found} == {path.name: path.read_bytes() for path in made}
    assert all(path.is_relative_to(there.build_root) for path in found)


def test_layout_is_that_of_oras(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="layout")
    made = products(tmp_path)
    artefacts.put(config, "thing", KEY, made)
    (pushed,) = artefacts.push(config)
    answer = ask(plain, f"/v2/layout/artefacts/manifests/{TAG}", headers={"Accept": OCI})
    assert pushed.digest == "sha256:" + hashlib.sha256(answer.content).hexdigest()
    document = answer.json()
    assert document["mediaType"] == OCI == answer.headers["Content-Type"]
    assert document["artifactType"] == artefacts.KIND
    assert document["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    assert document["config"]["digest"] == "sha256:" + hashlib.sha256(b"{}").hexdigest()
    assert base64.b64decode(document["config"]["data"]) == b"{}"
    named = {layer["annotations"]["org.opencontainers.image.title"]: layer for layer in document["layers"]}
    assert {name: (layer["digest"], layer["size"]) for name, layer in named.items()} == {
        path.name: ("sha256:" + hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size) for path in made
    }
    assert named["thing.provenance.json"]["mediaType"] == "application/vnd.in-toto+json"
    assert document["annotations"] == {"pitorch.key": KEY, "pitorch.name": "thing"}
    for layer in [document["config"], *document["layers"]]:
        assert ask(plain, f"/v2/layout/artefacts/blobs/{layer['digest']}").status_code == 200


ORAS = "oras==0.2.43"
PULL = "import sys, oras.client; oras.client.OrasClient(insecure=True).pull(target=sys.argv[1], outdir=sys.argv[2])"


@pytest.fixture(scope="module")
def oras_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a Python interpreter with the ORAS client from the package index."""
    venv = tmp_path_factory.mktemp("oras") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    argv = [sys.executable, "-m", "pip", "--python", str(python), "install", "--verbose", "--retries=1", ORAS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        wanted = Wanted(name="oras", version=ORAS.partition("==")[2])
        fault = explain(CommandFailed(done.stderr), wanted, done.stdout + done.stderr, load_config({}))
        if isinstance(fault, (NetworkUnreachable, SourceUnavailable)):
            pytest.skip(f"requires {ORAS} from the package index: {fault.found}")
        raise fault
    return python


def test_oras_client_pulls_the_same_files(plain: Registry, tmp_path: Path, oras_python: Path) -> None:
    config = config_for(tmp_path / "here", plain.address, namespace="foreign-client")
    made = products(tmp_path)
    recipe = "a" * 64
    artefacts.put(config, "thing", KEY, made, recipe=recipe)
    artefacts.push(config)
    environment = {**os.environ, "HOME": str(tmp_path), "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    for tag in (TAG, f"thing-{recipe[:40]}"):
        got = tmp_path / "got" / tag
        argv: list[str | Path] = [oras_python, "-c", PULL, f"{plain.address}/foreign-client/artefacts:{tag}", got]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert {path.name: path.read_bytes() for path in got.iterdir()} == {
            path.name: path.read_bytes() for path in made
        }


def test_manifest_depends_on_its_contents_only() -> None:
    one = oras.File(digest="sha256:" + "1" * 64, size=1, name="a", media_type="x/y")
    two = oras.File(digest="sha256:" + "2" * 64, size=2, name="b", media_type="x/y")
    assert oras.manifest("k", [one, two], {"p": "1", "q": "2"}) == oras.manifest("k", [two, one], {"q": "2", "p": "1"})


def test_second_push_sends_nothing(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="again")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    (first,) = artefacts.push(config)
    stored = blobs_on_disk(plain)
    (second,) = artefacts.push(config)
    assert (second.digest, second.moved, second.note) == (first.digest, 0, "already there")
    assert blobs_on_disk(plain) == stored


def test_first_push_of_a_key_wins(plain: Registry, tmp_path: Path) -> None:
    first = config_for(tmp_path / "first", plain.address, namespace="race")
    artefacts.put(first, "thing", KEY, products(tmp_path / "a"))
    (pushed,) = artefacts.push(first)
    second = teammate(first, tmp_path / "second")
    artefacts.put(second, "thing", KEY, products(tmp_path / "b", content="x = 2\n"))
    (refused,) = artefacts.push(second)
    assert (refused.digest, refused.moved) == (pushed.digest, 0)
    assert "another build" in refused.note


def test_second_pull_receives_nothing(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="still")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    artefacts.push(config)
    pulled = artefacts.pull(config, "thing", KEY)
    assert (pulled.moved, pulled.note) == (0, "already here")


def test_damaged_local_entry_is_pulled_again(plain: Registry, tmp_path: Path, warned: list[str]) -> None:
    config = config_for(tmp_path, plain.address, namespace="fixed")
    stored = artefacts.put(config, "thing", KEY, products(tmp_path))
    right = stored[1].read_bytes()
    artefacts.push(config)
    stored[1].chmod(0o644)
    stored[1].write_bytes(right[:-1] + b"!")
    pulled = artefacts.pull(config, "thing", KEY)
    assert pulled.moved == 3
    assert stored[1].read_bytes() == right
    assert "pulling it again" in warned[0]


def test_damaged_entry_is_not_pushed(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="unsent")
    stored = artefacts.put(config, "thing", KEY, products(tmp_path))
    stored[0].chmod(0o644)
    stored[0].write_bytes(b"something else")
    with pytest.raises(ArtefactDamaged):
        artefacts.push(config)
    assert ask(plain, "/v2/unsent/artefacts/tags/list").status_code == 404


def test_damaged_file_in_the_registry_is_refused(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="rotten")
    made = products(tmp_path, content="y = 'rotten'\n")
    artefacts.put(here, "thing", KEY, made)
    artefacts.push(here)
    blob = blob_path(plain, hashlib.sha256(made[0].read_bytes()).hexdigest())
    spoilt = bytearray(blob.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    blob.write_bytes(spoilt)
    there = teammate(here, tmp_path / "there")
    with pytest.raises(RegistryFailed, match="damaged in the registry"):
        artefacts.pull(there, "thing", KEY)
    assert artefacts.get(there, "thing", KEY) is None
    left = [path for path in there.build_root.rglob("*") if path.is_file() and path.name != "lock"]
    assert left == [], "no incomplete file must be left"


def test_file_missing_in_the_registry_is_pushed_again(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="lost")
    made = products(tmp_path, content="z = 'lost'\n")
    artefacts.put(config, "thing", KEY, made)
    artefacts.push(config)
    link = plain.settings.images / "docker/registry/v2/repositories/lost/artefacts/_layers/sha256"
    (link / hashlib.sha256(made[0].read_bytes()).hexdigest() / "link").unlink()
    (again,) = artefacts.push(config)
    assert again.moved == 1
    assert artefacts.pull(teammate(config, tmp_path / "there"), "thing", KEY).moved == 3


def test_unknown_key_is_reported(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="known")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    artefacts.push(config)
    with pytest.raises(ReferenceNotFound) as caught:
        artefacts.pull(config, "thing", OTHER_KEY)
    assert TAG in caught.value.found
    assert "push-artefacts" in caught.value.fix


def test_key_with_the_same_prefix_is_refused(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="alike")
    artefacts.put(here, "thing", KEY, products(tmp_path))
    artefacts.push(here)
    with pytest.raises(RegistryFailed, match="does not match its tag"):
        artefacts.pull(teammate(here, tmp_path / "there"), "thing", KEY[:40] + "0" * 24)


def test_recipe_key_pulls_the_latest_push(plain: Registry, tmp_path: Path) -> None:
    recipe = "a" * 64
    here = config_for(tmp_path / "here", plain.address, namespace="recipe")
    artefacts.put(here, "thing", KEY, products(tmp_path / "old"), recipe=recipe)
    (old,) = artefacts.push(here)
    there = teammate(here, tmp_path / "there")
    first = artefacts.pull(there, "thing", recipe)
    assert (first.entry.key, first.entry.recipe, first.digest) == (KEY, recipe, old.digest)
    assert artefacts.of_recipe(there, "thing", recipe) == artefacts.get(there, "thing", KEY)
    newer = teammate(here, tmp_path / "newer")
    artefacts.put(newer, "thing", OTHER_KEY, products(tmp_path / "new", content="x = 2\n"), recipe=recipe)
    (new,) = artefacts.push(newer)
    second = artefacts.pull(there, "thing", recipe)
    assert (second.entry.key, second.digest, second.moved) == (OTHER_KEY, new.digest, 3)
    assert artefacts.pull(there, "thing", recipe).note == "already here"
    assert artefacts.pull(there, "thing", KEY).digest == old.digest, (
        "the older artefact must still be available by its key"
    )
    tags = ask(plain, "/v2/recipe/artefacts/tags/list").json()["tags"]
    assert sorted(tags) == sorted([f"thing-{key[:40]}" for key in (KEY, OTHER_KEY, recipe)])


@pytest.mark.parametrize("left_out", ["statement", "wheel in the statement"])
def test_artefact_without_provenance_is_refused(plain: Registry, tmp_path: Path, left_out: str) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace=f"unstated/{len(left_out)}")
    wheel, symbols, statement = products(tmp_path)
    if left_out == "statement":
        given = [wheel, symbols]
    else:
        document = json.loads(statement.read_text())
        document["subject"] = [item for item in document["subject"] if item["name"] != wheel.name]
        statement.write_text(json.dumps(document))
        given = [wheel, symbols, statement]
    artefacts.put(here, "thing", KEY, given)
    artefacts.push(here)
    there = teammate(here, tmp_path / "there")
    with pytest.raises(RegistryFailed, match="has no provenance") as caught:
        artefacts.pull(there, "thing", KEY)
    assert wheel.name in caught.value.found
    assert artefacts.get(there, "thing", KEY) is None
    assert artefacts.pull(there, "thing", KEY, stated=False).moved == len(given), (
        "an artefact without provenance must be accepted if its recipe has none"
    )


def test_provenance_of_torch_is_required(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="tasks-unstated")
    (name, key, _), *_ = share.wanted(here)
    artefacts.put(here, name, key, products(tmp_path)[:2])
    artefacts.push(here)
    with pytest.raises(RegistryFailed, match="has no provenance"):
        share.pull_artefacts(teammate(here, tmp_path / "there"))


def test_empty_cache_cannot_be_pushed(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address)
    with pytest.raises(ArtefactMissing) as caught:
        artefacts.push(config)
    assert caught.value.fix == "run ./inv build-torch"


def put_manifest(running: Registry, namespace: str, document: dict[str, object], kind: str = OCI) -> None:
    import requests

    with requests.Session() as session:
        session.trust_env = False
        address = f"{running.url}/v2/{namespace}/artefacts/manifests/{TAG}"
        answer = session.put(address, data=json.dumps(document), headers={"Content-Type": kind}, timeout=20)
    assert answer.status_code == 201, answer.text


def test_paths_in_file_names_are_refused(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="hostile")
    artefacts.put(here, "thing", KEY, products(tmp_path))
    artefacts.push(here)
    document = manifest_of(plain, "hostile")
    there = teammate(here, tmp_path / "there")
    for name in ("../../escaped.whl", "/etc/escaped", "a/b", "..", ".hidden", "a\nb", "", "thing.symbols.tar.xz"):
        document["layers"][0]["annotations"]["org.opencontainers.image.title"] = name  # type: ignore[index]
        put_manifest(plain, "hostile", document)
        with pytest.raises(RegistryFailed, match="is not a supported artefact"):
            artefacts.pull(there, "thing", KEY)
    document["layers"][0]["annotations"]["org.opencontainers.image.title"] = "manifest.json"  # type: ignore[index]
    put_manifest(plain, "hostile", document)
    with pytest.raises(RegistryFailed):
        artefacts.pull(there, "thing", KEY)
    assert not list(tmp_path.rglob("*escaped*"))


def test_other_artefacts_are_refused(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="foreign")
    artefacts.put(here, "thing", KEY, products(tmp_path))
    artefacts.push(here)
    document = manifest_of(plain, "foreign")
    there = teammate(here, tmp_path / "there")
    changes: list[dict[str, object]] = [
        {"artifactType": "application/vnd.other"},
        {"annotations": {"pitorch.name": "thing", "pitorch.key": OTHER_KEY}},
        {"annotations": {}},
        {"annotations": {"pitorch.name": "thing", "pitorch.key": "../" + KEY, "pitorch.recipe": KEY}},
        {"layers": []},
    ]
    for change in changes:
        put_manifest(plain, "foreign", {**document, **change})
        with pytest.raises(RegistryFailed):
            artefacts.pull(there, "thing", KEY)


def test_statement_of_another_wheel_is_refused(plain: Registry, tmp_path: Path) -> None:
    """A registry user could combine a wheel with another wheel's statement."""
    one = config_for(tmp_path / "one", plain.address, namespace="forged")
    artefacts.put(one, "thing", KEY, products(tmp_path / "a"))
    artefacts.push(one)
    artefacts.put(one, "thing", OTHER_KEY, products(tmp_path / "b", content="evil = 1\n"))
    artefacts.push(one)
    right, wrong = manifest_of(plain, "forged"), manifest_of(plain, "forged", f"thing-{OTHER_KEY[:40]}")
    layers = [*right["layers"]]  # type: ignore[misc]
    (layers[0],) = [layer for layer in wrong["layers"] if layer["mediaType"] == "application/zip"]  # type: ignore[attr-defined]
    put_manifest(plain, "forged", {**right, "layers": layers})
    there = teammate(one, tmp_path / "there")
    with pytest.raises(RegistryFailed, match="are inconsistent"):
        artefacts.pull(there, "thing", KEY)
    assert artefacts.get(there, "thing", KEY) is None


# --- credentials ---------------------------------------------------------------------------------------------------


def test_password_from_the_environment(guarded: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path, guarded.address, namespace="private", user=USER)
    artefacts.put(config, "thing", KEY, products(tmp_path))
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    (pushed,) = artefacts.push(config)
    assert pushed.moved == 3
    assert artefacts.pull(teammate(config, tmp_path / "there"), "thing", KEY).moved == 3


def test_missing_password_is_refused(guarded: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, guarded.address, namespace="closed")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    with pytest.raises(AccessDenied, match="authentication required"):
        artefacts.push(config)


# --- failing registries ----------------------------------------------------------------------------------------------


def large(tmp_path: Path) -> list[Path]:
    made = products(tmp_path)
    made[1].write_bytes(bytes(range(256)) * (8 * MIB // 256))
    return made[:2]


def test_push_is_retried_if_the_connection_is_lost(
    plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01,) * 4)
    monkeypatch.setattr(progress, "warn", lambda _: None)
    with Proxy(plain.address) as proxy:
        config = config_for(tmp_path, proxy.address, namespace="broken")
        artefacts.put(config, "thing", KEY, large(tmp_path))
        proxy.watch = lambda _, sent: sent > 2 * MIB and proxy.cuts == 0
        (pushed,) = artefacts.push(config)
        assert proxy.cuts == 1
        assert (
            pushed.digest
            == "sha256:"
            + hashlib.sha256(
                ask(plain, f"/v2/broken/artefacts/manifests/{TAG}", headers={"Accept": OCI}).content
            ).hexdigest()
        )
        assert artefacts.pull(teammate(config, tmp_path / "there"), "thing", KEY, stated=False).moved == 2


def test_push_fails_if_the_connection_is_lost_repeatedly(
    plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01,))
    monkeypatch.setattr(progress, "warn", lambda _: None)
    with Proxy(plain.address) as proxy:
        config = config_for(tmp_path, proxy.address, namespace="away")
        artefacts.put(config, "thing", KEY, large(tmp_path))
        proxy.watch = lambda _, sent: sent > MIB
        with pytest.raises(RegistryBroke) as caught:
            artefacts.push(config)
    assert caught.value.exit_code == 35
    assert ask(plain, "/v2/away/artefacts/tags/list").json().get("tags") is None


def test_full_registry_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("docker-registry")
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01,))
    monkeypatch.setattr(progress, "warn", lambda _: None)
    with (
        small_disk(tmp_path / "disk", "4m") as disk,
        local_registry.serve(with_images_on(disk, tmp_path / "r")) as running,
    ):
        config = config_for(tmp_path, running.address)
        artefacts.put(config, "thing", KEY, large(tmp_path))
        with pytest.raises(RegistryFull) as caught:
            artefacts.push(config)
        assert caught.value.exit_code == 35
        assert TAG not in ask(running, "/v2/pitorch/artefacts/tags/list").text
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, timeout=30)
        (pushed,) = artefacts.push(config)
        assert pushed.moved in (1, 2), "the small file may have been pushed before the disk was full"


def test_full_disk_during_a_download_is_reported(plain: Registry, tmp_path: Path) -> None:
    """Another program may fill the disk after the check for free space."""
    config = config_for(tmp_path, plain.address, namespace="room")
    artefacts.put(config, "thing", KEY, large(tmp_path))
    (pushed,) = artefacts.push(config)
    with (
        small_disk(tmp_path / "disk", "64k") as disk,
        oras.connect(pushed.reference, actions="pull", user="") as remote,
    ):
        item = max(remote.artefact().files, key=lambda file: file.size)
        with pytest.raises(DiskFull, match=f"no room for {item.name}") as caught:
            remote.download(item, disk / item.name)
        assert not (disk / item.name).exists()
    assert caught.value.found == "No space left on device"


# --- the artefacts that the tasks select -----------------------------------------------------------------------------


def test_pull_selects_artefacts_of_this_checkout(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="tasks")
    (name, key, _), (other, offered, _), *_ = share.wanted(here)
    assert name == "torch"
    artefacts.put(here, name, key, products(tmp_path))
    artefacts.push(here)
    there = teammate(here, tmp_path / "there")
    (pulled,) = share.pull_artefacts(there)
    assert (pulled.entry.name, pulled.entry.key) == (name, key)
    assert artefacts.get(there, name, key)
    artefacts.put(here, other, "f" * 64, products(tmp_path)[:1], recipe=offered)
    artefacts.push(here)
    assert [(item.entry.name, item.moved) for item in share.pull_artefacts(there)] == [(name, 0), (other, 1)], (
        "optional artefacts must be pulled too, and need no provenance"
    )
    assert artefacts.of_recipe(there, other, offered)


def builder_here(config: Config, step: str, root: bytes, **facts: str) -> str:
    """Write the manifest of a builder's step, and return the SHA-256 of the builder's root."""
    tar = config.target_root / f"{step}.tar"
    tar.parent.mkdir(parents=True, exist_ok=True)
    tar.write_bytes(root)
    made = Manifest(step=step, key="0" * 64, inputs={}, artefacts=(Artefact.of(tar),), facts=facts)
    made.write(config.target_root / f"{step}.manifest.json")
    return made.artefacts[0].sha256


def push_in_order(config: Config, tmp_path: Path, name: str, keys: Mapping[str, str], recipe: str) -> None:
    """Push wheels of one recipe with different keys, as several machines would. The last wheel is the newest."""
    for machine, key in keys.items():
        other = teammate(config, tmp_path / machine)
        artefacts.put(other, name, key, products(tmp_path / machine, content=f"of = {machine!r}\n"), recipe=recipe)
        artefacts.push(other)


def test_pull_prefers_the_same_builder(plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(progress, "say", printed.append)
    base = config_for(tmp_path / "base", plain.address, namespace="builders")
    mine = teammate(base, tmp_path / "mine")
    root = builder_here(mine, "tvm-ffi-builder", b"its packages")
    recipe = tvm_ffi.key(base)
    keys = {
        "like-mine": artefacts.key_of(recipe, root),
        "other": artefacts.key_of(recipe, "0" * 64),
    }
    push_in_order(base, tmp_path, tvm_ffi.NAME, keys, recipe)
    artefacts.put(base, "torch", KEY, products(tmp_path), recipe=next(share.wanted(base))[1])
    artefacts.push(base)

    def pulled(config: Config) -> str:
        _, ffi = share.pull_artefacts(config)
        return ffi.entry.key

    assert pulled(mine) == keys["like-mine"], "expected the artefact that a build on this machine would use"
    assert pulled(teammate(base, tmp_path / "none")) == keys["other"], "without a builder, expected the newest artefact"
    assert printed == []
    strange = teammate(base, tmp_path / "strange")
    builder_here(strange, "tvm-ffi-builder", b"packages that nobody else has")
    assert pulled(strange) == keys["other"]
    assert len(printed) == 1
    assert "the registry has no artefact for this builder" in printed[0]


def test_pull_without_an_engine_selects_the_newest_torch(
    plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    base = config_for(tmp_path / "base", plain.address, namespace="no-engine")
    push_in_order(base, tmp_path, "torch", {"older": KEY, "newer": OTHER_KEY}, next(share.wanted(base))[1])
    mine = teammate(base, tmp_path / "mine")
    builder_here(mine, "torch-builder", b"", image="sha256:" + "0" * 64)
    (pulled,) = share.pull_artefacts(mine)
    assert pulled.entry.key == OTHER_KEY
    assert len(warned) == 1
    assert warned[0].endswith("only the recipe key is used to look up torch")


LISTED = {"g++-arm-linux-gnueabihf:amd64": "4:14.2.0-1", "libopenblas-dev:armhf": "0.3.29+ds-3"}
COMPILERS = {
    "clang++": "Debian clang version 19.1.7 (3+b1)",
    "arm-linux-gnueabihf-g++": "arm-linux-gnueabihf-g++ (Debian 14.2.0-19) 14.2.0",
}


def small_builder() -> bytes:
    """Make the tar of a root whose programs report the packages and compilers of torch's builder."""
    files = nasty_image.with_libraries("sh")
    outputs = {"dpkg-query": "\n".join(map(" ".join, LISTED.items()))}
    outputs |= {name: f"{text}\nmore" for name, text in COMPILERS.items()}
    files |= {f"bin/{name}": f"#!/bin/sh\necho '{text}'\n".encode() for name, text in outputs.items()}
    return nasty_image.root_of(files)


@pytest.mark.engine
def test_pull_prefers_the_same_compiler_and_packages(plain: Registry, tmp_path: Path, warned: list[str]) -> None:
    base = config_for(tmp_path / "base", plain.address, namespace="compilers")
    recipe = next(share.wanted(base))[1]
    versions = {**LISTED, "compiler": "; ".join(COMPILERS.values())}
    keys = {
        "like-mine": provenance.artefact_key(recipe, versions),
        "other": provenance.artefact_key(recipe, {**versions, "libopenblas-dev:armhf": "0.3.30+ds-1"}),
    }
    push_in_order(base, tmp_path, "torch", keys, recipe)
    mine = teammate(base, tmp_path / "mine")
    reference = mine.image_reference("torch-builder")
    name, _, tag = reference.rpartition(":")
    with engine_client() as client:
        client.api.import_image_from_data(small_builder(), repository=name, tag=tag)
        try:
            builder_here(mine, "torch-builder", b"", image=client.images.get(reference).id or "")
            (pulled,) = share.pull_artefacts(mine)
            assert (pulled.entry.key, warned) == (keys["like-mine"], [])
        finally:
            forget(client, reference)
    (pulled,) = share.pull_artefacts(mine)
    assert pulled.entry.key == keys["other"]
    assert "no longer has the image torch-builder" in warned[0]
