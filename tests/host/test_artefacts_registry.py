"""Artefacts to a real registry and back, in ORAS's layout; no engine takes part."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_parts import (
    HTPASSWD,
    MIB,
    PASSWORD,
    USER,
    Proxy,
    ask,
    blobs_on_disk,
    config_for,
    free_port,
    need,
    small_disk,
)
from test_artefacts import KEY, OTHER_KEY, products

from images import local_registry, oras, registry
from images.credentials import PASSWORD_VARIABLE
from images.distribution import RegistryFull
from images.local_registry import Registry, Settings
from recipes import artefacts, share
from toolchain import progress
from toolchain.config import ROOT, Config
from toolchain.errors import (
    ArtefactDamaged,
    ArtefactMissing,
    ReferenceInvalid,
    ReferenceNotFound,
    RegistryFailed,
    RegistryRefused,
    RegistryUnreachable,
)

OCI = "application/vnd.oci.image.manifest.v1+json"
TAG = f"thing-{KEY[:40]}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    need("docker-registry")
    with local_registry.serve(Settings(folder=tmp_path_factory.mktemp("plain") / "r")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    need("docker-registry")
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "htpasswd").write_text(HTPASSWD)
    with local_registry.serve(Settings(folder=folder / "r", htpasswd=folder / "htpasswd")) as running:
        yield running


@pytest.fixture(autouse=True)
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No credentials but the test's own."""
    folder = tmp_path / "docker-config"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    return folder


def teammate(config: Config, folder: Path) -> Config:
    """The same registry, from a machine that has nothing."""
    section = config.registry
    return config_for(folder, section.address, namespace=section.namespace)


def manifest_of(running: Registry, namespace: str, tag: str = TAG) -> dict[str, object]:
    answer = ask(running, f"/v2/{namespace}/artefacts/manifests/{tag}", headers={"Accept": OCI})
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


def blob_path(running: Registry, digest: str) -> Path:
    digest = digest.removeprefix("sha256:")
    return running.settings.images / "docker/registry/v2/blobs/sha256" / digest[:2] / digest / "data"


def test_what_a_machine_pushed_another_pulls_byte_for_byte(plain: Registry, tmp_path: Path) -> None:
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


def test_the_layout_is_that_of_oras(plain: Registry, tmp_path: Path) -> None:
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


def test_a_manifest_depends_on_nothing_but_the_files() -> None:
    one = oras.File(digest="sha256:" + "1" * 64, size=1, name="a", media_type="x/y")
    two = oras.File(digest="sha256:" + "2" * 64, size=2, name="b", media_type="x/y")
    assert oras.manifest("k", [one, two], {"p": "1", "q": "2"}) == oras.manifest("k", [two, one], {"q": "2", "p": "1"})


def test_a_second_push_sends_nothing(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="again")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    (first,) = artefacts.push(config)
    stored = blobs_on_disk(plain)
    (second,) = artefacts.push(config)
    assert (second.digest, second.moved, second.note) == (first.digest, 0, "is there already")
    assert blobs_on_disk(plain) == stored


def test_whoever_built_first_wins(plain: Registry, tmp_path: Path) -> None:
    first = config_for(tmp_path / "first", plain.address, namespace="race")
    artefacts.put(first, "thing", KEY, products(tmp_path / "a"))
    (pushed,) = artefacts.push(first)
    second = teammate(first, tmp_path / "second")
    artefacts.put(second, "thing", KEY, products(tmp_path / "b", content="x = 2\n"))
    (refused,) = artefacts.push(second)
    assert (refused.digest, refused.moved) == (pushed.digest, 0)
    assert "another build" in refused.note


def test_a_second_pull_receives_nothing(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="still")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    artefacts.push(config)
    pulled = artefacts.pull(config, "thing", KEY)
    assert (pulled.moved, pulled.note) == (0, "is here already")


def test_a_damaged_entry_here_is_pulled_anew(plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "warn", said.append)
    config = config_for(tmp_path, plain.address, namespace="mended")
    kept = artefacts.put(config, "thing", KEY, products(tmp_path))
    right = kept[1].read_bytes()
    artefacts.push(config)
    kept[1].chmod(0o644)
    kept[1].write_bytes(right[:-1] + b"!")
    pulled = artefacts.pull(config, "thing", KEY)
    assert pulled.moved == 3
    assert kept[1].read_bytes() == right
    assert "pulled anew" in said[0]


def test_a_damaged_entry_is_not_pushed(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="unsent")
    kept = artefacts.put(config, "thing", KEY, products(tmp_path))
    kept[0].chmod(0o644)
    kept[0].write_bytes(b"something else")
    with pytest.raises(ArtefactDamaged):
        artefacts.push(config)
    assert ask(plain, "/v2/unsent/artefacts/tags/list").status_code == 404


def test_a_flipped_bit_in_the_registry_is_found_out(plain: Registry, tmp_path: Path) -> None:
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
    assert left == [], "nothing half-received stays"


def test_what_the_registry_lost_is_pushed_again(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="lost")
    made = products(tmp_path, content="z = 'lost'\n")
    artefacts.put(config, "thing", KEY, made)
    artefacts.push(config)
    link = plain.settings.images / "docker/registry/v2/repositories/lost/artefacts/_layers/sha256"
    (link / hashlib.sha256(made[0].read_bytes()).hexdigest() / "link").unlink()
    (again,) = artefacts.push(config)
    assert again.moved == 1
    assert artefacts.pull(teammate(config, tmp_path / "there"), "thing", KEY).moved == 3


def test_a_key_that_nobody_pushed(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address, namespace="known")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    artefacts.push(config)
    with pytest.raises(ReferenceNotFound) as caught:
        artefacts.pull(config, "thing", OTHER_KEY)
    assert TAG in caught.value.found, "the tags that there are, are told"
    assert "push-artefacts" in caught.value.mend


def test_a_key_that_begins_alike_is_not_taken_for_it(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="alike")
    artefacts.put(here, "thing", KEY, products(tmp_path))
    artefacts.push(here)
    with pytest.raises(RegistryFailed, match="another artefact than its tag says"):
        artefacts.pull(teammate(here, tmp_path / "there"), "thing", KEY[:40] + "0" * 24)


def test_who_knows_the_recipe_alone_gets_what_was_pushed_last(plain: Registry, tmp_path: Path) -> None:
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
    assert artefacts.pull(there, "thing", recipe).note == "is here already"
    assert artefacts.pull(there, "thing", KEY).digest == old.digest, "the older one stays under its own key"
    tags = ask(plain, "/v2/recipe/artefacts/tags/list").json()["tags"]
    assert sorted(tags) == sorted([f"thing-{key[:40]}" for key in (KEY, OTHER_KEY, recipe)])


@pytest.mark.parametrize("left_out", ["the statement", "the wheel's place in it"])
def test_what_comes_without_provenance_is_refused(plain: Registry, tmp_path: Path, left_out: str) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace=f"unstated/{len(left_out)}")
    wheel, symbols, statement = products(tmp_path)
    if left_out == "the statement":
        given = [wheel, symbols]
    else:
        document = json.loads(statement.read_text())
        document["subject"] = [item for item in document["subject"] if item["name"] != wheel.name]
        statement.write_text(json.dumps(document))
        given = [wheel, symbols, statement]
    artefacts.put(here, "thing", KEY, given)
    artefacts.push(here)
    there = teammate(here, tmp_path / "there")
    with pytest.raises(RegistryFailed, match="without the provenance") as caught:
        artefacts.pull(there, "thing", KEY)
    assert wheel.name in caught.value.found
    assert artefacts.get(there, "thing", KEY) is None
    assert artefacts.pull(there, "thing", KEY, stated=False).moved == len(given), "where the recipe writes none"


def test_a_recipe_without_provenance_is_pulled_and_torch_is_not(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="tasks-unstated")
    ((name, key),) = share.wanted(here)
    ((other, offered),) = share.offered(here)
    (wheel, symbols, _) = products(tmp_path)
    artefacts.put(here, name, key, [wheel, symbols])
    artefacts.put(here, other, "f" * 64, [wheel], recipe=offered)
    share.push_artefacts(here)
    there = teammate(here, tmp_path / "there")
    with pytest.raises(RegistryFailed, match="without the provenance"):
        share.pull_artefacts(there)
    artefacts.put(there, name, key, products(tmp_path / "own"))
    assert [(item.entry.name, item.moved) for item in share.pull_artefacts(there)] == [(name, 0), (other, 1)]


def test_nothing_to_push(plain: Registry, tmp_path: Path) -> None:
    config = config_for(tmp_path, plain.address)
    with pytest.raises(ArtefactMissing) as caught:
        artefacts.push(config)
    assert caught.value.mend == "./inv build-torch"


def put_manifest(running: Registry, namespace: str, document: dict[str, object], kind: str = OCI) -> None:
    import requests

    with requests.Session() as session:
        session.trust_env = False
        address = f"{running.url}/v2/{namespace}/artefacts/manifests/{TAG}"
        answer = session.put(address, data=json.dumps(document), headers={"Content-Type": kind}, timeout=20)
    assert answer.status_code == 201, answer.text


def test_a_registry_cannot_choose_where_a_file_goes(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="hostile")
    artefacts.put(here, "thing", KEY, products(tmp_path))
    artefacts.push(here)
    document = manifest_of(plain, "hostile")
    there = teammate(here, tmp_path / "there")
    for name in ("../../escaped.whl", "/etc/escaped", "a/b", "..", ".hidden", "a\nb", "", "thing.symbols.tar.xz"):
        document["layers"][0]["annotations"]["org.opencontainers.image.title"] = name  # type: ignore[index]
        put_manifest(plain, "hostile", document)
        with pytest.raises(RegistryFailed, match="no artefact that can be used here"):
            artefacts.pull(there, "thing", KEY)
    document["layers"][0]["annotations"]["org.opencontainers.image.title"] = "manifest.json"  # type: ignore[index]
    put_manifest(plain, "hostile", document)
    with pytest.raises(RegistryFailed):
        artefacts.pull(there, "thing", KEY)
    assert not list(tmp_path.rglob("*escaped*"))


def test_what_is_not_ours_is_refused(plain: Registry, tmp_path: Path) -> None:
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


def test_a_statement_about_another_wheel_is_found_out(plain: Registry, tmp_path: Path) -> None:
    """Whoever may write to the registry could give a wheel the statement of another."""
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
    with pytest.raises(RegistryFailed, match="contradicts itself"):
        artefacts.pull(there, "thing", KEY)
    assert artefacts.get(there, "thing", KEY) is None


# --- who may -------------------------------------------------------------------------------------------------------


def test_a_password_is_asked_of_the_environment(
    guarded: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, guarded.address, namespace="private")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    (pushed,) = artefacts.push(config, user=USER)
    assert pushed.moved == 3
    assert artefacts.pull(teammate(config, tmp_path / "there"), "thing", KEY, user=USER).moved == 3


def test_a_wrong_password_and_none_at_all_are_refused(
    guarded: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, guarded.address, namespace="closed")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    with pytest.raises(RegistryRefused, match="who you are"):
        artefacts.push(config)
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong-" + PASSWORD)
    for call in (
        lambda: artefacts.push(config, user=USER),
        lambda: artefacts.pull(config, "thing", OTHER_KEY, user=USER),
    ):
        with pytest.raises(RegistryRefused) as caught:
            call()
        assert caught.value.exit_code == 30
        assert PASSWORD not in str(caught.value)


# --- registries that are wrong, gone or dying ------------------------------------------------------------------------


def test_a_refused_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RETRY_DELAYS_S", (0.01,))
    config = config_for(tmp_path, f"127.0.0.1:{free_port()}")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    for call in (lambda: artefacts.push(config), lambda: artefacts.pull(config, "thing", OTHER_KEY)):
        with pytest.raises(RegistryUnreachable) as caught:
            call()
        assert "./inv registry up" in caught.value.mend


def test_an_address_that_is_none(tmp_path: Path) -> None:
    config = config_for(tmp_path, "127.0.0.1:5000")
    artefacts.put(config, "thing", KEY, products(tmp_path))
    for wrong in ("http://127.0.0.1:5000/x", "127.0.0.1:5000/Upper", "nodots/x"):
        with pytest.raises(ReferenceInvalid):
            artefacts.push(config, registry=wrong)


def large(tmp_path: Path) -> list[Path]:
    made = products(tmp_path)
    made[1].write_bytes(bytes(range(256)) * (8 * MIB // 256))
    return made[:2]


def test_a_connection_that_breaks_in_mid_push_is_tried_again(
    plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RETRY_DELAYS_S", (0.01,) * 4)
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


def test_a_registry_that_stays_away_is_given_up(
    plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RETRY_DELAYS_S", (0.01,))
    monkeypatch.setattr(progress, "warn", lambda _: None)
    with Proxy(plain.address) as proxy:
        config = config_for(tmp_path, proxy.address, namespace="away")
        artefacts.put(config, "thing", KEY, large(tmp_path))
        proxy.watch = lambda _, sent: sent > MIB
        with pytest.raises((RegistryFailed, RegistryUnreachable)):
            artefacts.push(config)
    assert ask(plain, "/v2/away/artefacts/tags/list").json().get("tags") is None


def test_a_full_registry_is_said_so_and_the_next_push_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("docker-registry")
    monkeypatch.setattr(registry, "RETRY_DELAYS_S", (0.01,))
    monkeypatch.setattr(progress, "warn", lambda _: None)
    with (
        small_disk(tmp_path / "disk", "4m") as disk,
        local_registry.serve(Settings(folder=tmp_path / "r", storage=disk)) as running,
    ):
        config = config_for(tmp_path, running.address)
        artefacts.put(config, "thing", KEY, large(tmp_path))
        with pytest.raises(RegistryFull) as caught:
            artefacts.push(config)
        assert caught.value.exit_code == 35
        assert TAG not in ask(running, "/v2/pitorch/artefacts/tags/list").text
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, timeout=30)
        (pushed,) = artefacts.push(config)
        assert pushed.moved in (1, 2), "the small file may have arrived before"


# --- the tasks' own choice -------------------------------------------------------------------------------------------


def test_what_this_checkout_would_build_is_what_is_pulled(plain: Registry, tmp_path: Path) -> None:
    here = config_for(tmp_path / "here", plain.address, namespace="tasks")
    ((name, key),) = share.wanted(here)
    assert name == "torch"
    artefacts.put(here, name, key, products(tmp_path))
    share.push_artefacts(here)
    there = teammate(here, tmp_path / "there")
    (pulled,) = share.pull_artefacts(there)
    assert (pulled.entry.name, pulled.entry.key) == (name, key)
    assert artefacts.get(there, name, key)
    ((other, offered),) = share.offered(here)
    artefacts.put(here, other, "f" * 64, products(tmp_path), recipe=offered)
    share.push_artefacts(here)
    assert [item.entry.name for item in share.pull_artefacts(there)] == [name, other], (
        "what is offered beside comes too"
    )
    assert artefacts.of_recipe(there, other, offered)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["push-artefacts"], 25, "there is no artefact to push"),
        (["pull-artefacts", "--registry", "http://x/y"], 33, "without a scheme"),
        (["build-wheel", "numpy"], 23, "NAME==VERSION"),
        (["build-wheel", "./nothing"], 23, "there is no project at"),
    ],
)
def test_the_tasks_end_with_the_faults_own_code(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    environment = {**os.environ, "INVOKE_BUILD_FOLDER": str(tmp_path / "build")}
    argv = [sys.executable, "-m", "toolchain.cli", *words]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
