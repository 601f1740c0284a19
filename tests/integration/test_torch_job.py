"""Tests of ``build-torch`` without the compiler: the placement of the products, the provenance, and ``verify``."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock
from urllib.parse import unquote

import pytest
from registry_parts import small_disk
from test_torch_wheel import a_wheel
from wheel_parts import make_wheel

from flow import pipelines, verify
from flow import torch_job as job
from flow.context import Context
from flow.steps import torch_wheel
from images import probe
from images.flavour import load_suite
from recipes import recipe
from recipes.torch import build as building
from recipes.torch import provenance, resolve, source
from toolchain import progress
from toolchain.config import ROOT, load_config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, DiskFull, WheelUnusable
from toolchain.files import sha256_of
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import Made, Pipeline, Step
from wheels import artefacts


class StandIn:
    """Makes a build's files without compiling, because only the order of operations is tested."""

    def __init__(self, members: dict[str, str | bytes]) -> None:
        self.members = members
        self.built = 0

    def versions(self) -> dict[str, str]:
        """Return package and compiler versions like those of a builder image."""
        return {"g++-14-arm-linux-gnueabihf:amd64": "14.2.0-19cross1", "compiler": "g++ 14.2.0"}

    def older(self) -> tuple[list[building.Builder], list[building.Builder]]:
        """Report that no earlier build has left a tree."""
        return [], []

    def build(self, folder: Path) -> building.Built:
        """Make a wheel with ``members``, and its accompanying files."""
        self.built += 1
        wheel = make_wheel(folder, self.members, name="torch", version="2.6.0", tag="cp313-cp313-linux_armv7l")
        symbols = folder / "torch-2.6.0-cp313-cp313-linux_armv7l.symbols.tar.xz"
        symbols.write_bytes(b"symbols")
        return building.Built(
            wheel=wheel, symbols=symbols, vendored=[], cache_hits=3, cache_calls=4, seconds={"compile": 1.5}
        )


NEEDS = {
    "torch-builder": Manifest(step="torch-builder", key="", inputs={}, facts={"image": "sha256:1"}),
    "torch-source": Manifest(
        step="torch-source",
        key="",
        inputs={},
        facts={"kind": "archive", "folder": "pytorch-1", "identity": "archive pytorch 1", "files": {}},
    ),
}
"""Manifests as if the steps before the wheel had run."""


class StandInJob:
    """The step that builds the wheel, with ``builder`` in place of the real builder."""

    def __init__(self, folder: Path, builder: StandIn) -> None:
        self.context = Context(load_config({"build": {"folder": str(folder)}}))
        self.config, self.root = self.context.config, self.context.root
        self.products = resolve.products(self.config)
        self.builder = builder

    def run(self) -> Made:
        """Run the step's action."""
        with mock.patch.object(torch_wheel, "builder_of", return_value=self.builder):
            return self.step().action(NEEDS)

    def step(self) -> Step:
        """Return the step."""
        return torch_wheel.step(self.context)

    @property
    def placed(self) -> dict[str, bytes]:
        """Return the contents of the files in the product folder, by name."""
        return {path.name: path.read_bytes() for path in sorted(self.products.glob("*"))}

    @property
    def cached(self) -> tuple[str, ...]:
        """Return the keys under which the artefact cache has the recipe's wheels."""
        return artefacts.keys_of_recipe(self.config, "torch", resolve.key(self.config))


FIT: dict[str, str | bytes] = {"torch/version.py": "version = '2.6.0'\n"}
UNFIT: dict[str, str | bytes] = {"torch/lib/probe.so": probe.elf()}


def test_a_wheel_is_placed_with_provenance_and_cached(tmp_path: Path) -> None:
    builder = StandIn(FIT)
    made = StandInJob(tmp_path, builder)
    done = made.run()
    placed = cast("tuple[Path, ...]", done.artefacts)
    assert [path.parent for path in placed] == [made.products] * 3
    wheel = made.products / "torch-2.6.0-cp313-cp313-linux_armv7l.whl"
    assert provenance.read(provenance.path_for(wheel), wheel)["recipeKey"] == resolve.key(made.config)
    assert len(made.cached) == 1
    before = made.placed
    again = made.run()
    assert builder.built == 1, "the second run must use the wheel in the artefact cache"
    assert (again.artefacts, made.placed) == (tuple(sorted(placed)), before)
    assert [path.name for path in made.root.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_while_copying_the_wheel(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        made = StandInJob(disk, StandIn({**FIT, "torch/large.bin": os.urandom(300_000)}))
        made.run()
        shutil.rmtree(made.products)
        free = shutil.disk_usage(disk).free
        (disk / "others").write_bytes(bytes(free - 100_000))
        with pytest.raises(DiskFull, match=r"no room for torch-2\.6\.0") as caught:
            made.run()
        assert caught.value.found == "No space left on device"
        assert made.placed == {}
        (disk / "others").unlink()
        assert "cache" in made.run().facts
        assert len(made.placed) == 3


def test_changed_product_is_rebuilt(tmp_path: Path) -> None:
    made = StandInJob(tmp_path, StandIn(FIT))
    done = made.run()
    placed = tuple(Artefact.of(cast("Path", path)) for path in done.artefacts)
    recorded = Manifest(step="torch-wheel", key="", inputs={}, artefacts=placed)
    step = made.step()
    assert step.missing(recorded) == ""
    wheel = placed[0].path
    content = wheel.read_bytes()
    wheel.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert step.missing(recorded) == f"{wheel.name} has changed since it was made"
    made.run()
    assert (wheel.read_bytes(), step.missing(recorded)) == (content, ""), "expected the wheel from the artefact cache"


def returning(made: Made) -> Callable[[object], Made]:
    return lambda _: made


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Make ``build_torch`` and ``plan`` use a builder that finishes quickly, and return this builder."""
    builder = StandIn(FIT)

    def pipeline(context: Context, *, again: bool = False) -> Pipeline:
        before = [
            Step(name=name, title=name, inputs={}, action=returning(Made(facts=made.facts)))
            for name, made in NEEDS.items()
        ]
        return Pipeline(context.root, (*before, torch_wheel.step(context, again=again)))

    monkeypatch.setattr(pipelines, "torch_job", pipeline)
    monkeypatch.setattr(torch_wheel, "builder_of", lambda *_: builder)
    monkeypatch.setattr(job, "ensure_running", lambda _: None)
    return builder


@pytest.mark.parametrize("lost", ["damaged", "set aside by another task", "deleted"])
def test_a_lost_cache_entry_is_restored_without_building(
    tmp_path: Path, whole: StandIn, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    config = load_config({"build": {"folder": str(tmp_path)}})
    key = resolve.key(config)
    job.build_torch(config)
    assert "put into the artefact cache again" not in "".join(said)
    kept = artefacts.of_recipe(config, "torch", key)
    assert kept
    before = {path.name: path.read_bytes() for path in kept}
    if lost == "deleted":
        shutil.rmtree(kept[0].parent)
    else:
        wheel = next(path for path in kept if path.suffix == ".whl")
        wheel.chmod(0o644)
        wheel.write_bytes(b"damaged")
        if lost == "set aside by another task":
            with pytest.raises(ArtefactDamaged, match="is damaged"):
                list(artefacts.entries(config))
            assert list(artefacts.entries(config)) == []
    said.clear()
    job.build_torch(config)
    assert any("skipped (inputs unchanged)" in line for line in said)
    assert any("put into the artefact cache again, without a rebuild" in line for line in said)
    (entry,) = artefacts.entries(config)
    assert (entry.paths, entry.recipe) == (kept, key)
    assert {path.name: path.read_bytes() for path in entry.paths} == before
    assert whole.built == 1
    said.clear()
    job.build_torch(config)
    assert "put into the artefact cache again" not in "".join(said)


def test_an_existing_wheel_is_built_again_on_request(tmp_path: Path, whole: StandIn) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}})
    job.build_torch(config)
    shutil.rmtree(resolve.products(config))
    assert job.build_torch(config).wheel.facts["cache"], "a cached wheel has no tree"
    job.build_torch(config)
    assert whole.built == 1
    assert [(item.runs, item.reason) for item in job.plan(config)] == [(False, "inputs unchanged")] * 3
    assert [(item.runs, item.reason) for item in job.plan(config, again=True)][-1] == (True, "requested")
    done = job.build_torch(config, again=True)
    assert whole.built == 2
    assert "ccache" in done.wheel.facts
    assert len(list(artefacts.entries(config))) == 1
    job.build_torch(config)
    assert whole.built == 2


def test_a_rejected_wheel_is_not_placed(tmp_path: Path) -> None:
    made = StandInJob(tmp_path, StandIn(UNFIT))
    with pytest.raises(WheelUnusable, match="cannot be used"):
        made.run()
    assert (made.placed, made.cached) == ({}, ())
    assert [path.name for path in made.root.iterdir()] == [], "no files must remain"


def test_a_rejected_wheel_keeps_the_previous_one(tmp_path: Path) -> None:
    StandInJob(tmp_path, StandIn(FIT)).run()
    made = StandInJob(tmp_path, StandIn(UNFIT))
    before = made.placed
    shutil.rmtree(made.config.build_root / "artefacts")
    with pytest.raises(WheelUnusable):
        made.run()
    assert made.placed == before
    assert len(before) == 3


@pytest.mark.parametrize("moved", range(3))
def test_no_provenance_is_ever_next_to_another_wheel(tmp_path: Path, moved: int) -> None:
    folder = tmp_path / "products"
    folder.mkdir()
    old_wheel, old_statement = a_wheel(folder, "0" * 64)
    (tmp_path / "new").mkdir()
    wheel, statement = a_wheel(tmp_path / "new", "1" * 64)
    symbols = tmp_path / "new" / "torch.symbols.tar.xz"
    symbols.write_bytes(b"symbols")
    [wheel, symbols, statement][moved].unlink()
    with pytest.raises(FileNotFoundError):
        torch_wheel.place([statement, wheel, symbols], folder)
    assert old_wheel.is_file()
    assert not old_statement.exists()


def test_a_cached_wheel_of_another_recipe_is_rejected(tmp_path: Path) -> None:
    made = StandInJob(tmp_path, StandIn(FIT))
    made.run()
    (whole,) = made.cached
    (wheel, statement) = a_wheel(tmp_path, "0" * 64)
    artefacts.put(made.config, "torch", whole, [wheel, statement], recipe=resolve.key(made.config))
    before = made.placed
    with pytest.raises(
        ArtefactDamaged, match=r"the provenance of the cached .* does not contain the recipe key"
    ) as caught:
        made.run()
    assert caught.value.found == "0" * 64
    assert whole in caught.value.fix
    artefacts.put(made.config, "torch", whole, [wheel], recipe=resolve.key(made.config))
    with pytest.raises(ArtefactDamaged, match="is not a provenance statement"):
        made.run()
    assert made.placed == before


# The provenance.

URI = re.compile(r"[a-z][a-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")
"""RFC 3986: a scheme and the characters of a URI."""
PACKAGE_URL = re.compile(
    r"pkg:deb/debian/(?P<name>(?:[a-z0-9._~:-]|%[0-9A-F]{2})+)"
    r"@(?P<version>(?:[A-Za-z0-9._~:-]|%[0-9A-F]{2})+)\?arch=(?P<architecture>[a-z0-9-]+)"
)
"""ECMA-427: in names and versions, all characters except letters, digits, ``.-_~`` and the colon are encoded."""
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")

VERSIONS = {
    "zlib1g-dev:armhf": "1:1.3.dfsg+really1.3.1-1+b1",
    "libstdc++6:armhf": "14.2.0-19",
    "libcpuinfo-dev:armhf": "0.0~git20250327.39ea79a-1",
    "ca-certificates:all": "20250419",
    "compiler": "arm-linux-gnueabihf-g++ (Debian 14.2.0-19) 14.2.0",
}
"""Some of the 300 packages in the builder image."""


def written(folder: Path, kind: str) -> tuple[building.Built, dict[str, Any]]:
    """Make the products and their provenance for a kind of source."""
    data, suite = recipe.load("torch"), load_suite("trixie")
    config = load_config({"torch": {"source": kind}})
    listed = {"pytorch_2.6.0+dfsg-7.dsc": "2" * 64, "pytorch_2.6.0+dfsg.orig.tar.xz": "0" * 64}
    found = source.Source(
        kind=kind,
        folder=folder,
        identity=source.identity(data, suite, kind),
        files=listed if kind == "archive" else {},
    )
    built = StandIn(FIT).build(folder)
    path = provenance.write(
        built,
        building.Plan.of(data, config, suite),
        found,
        key="a" * 64,
        versions=VERSIONS,
        began=1735689600.0,
        path=provenance.path_for(built.wheel),
    )
    return built, json.loads(path.read_text())


@pytest.mark.parametrize("kind", ["archive", "git"])
def test_the_provenance_conforms_to_in_toto_and_slsa(tmp_path: Path, kind: str) -> None:
    """The specifications are SLSA Provenance v1, and in-toto Statement, ResourceDescriptor and TypeURI v1."""
    built, document = written(tmp_path, kind)
    assert set(document) == {"_type", "subject", "predicateType", "predicate"}
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {item["name"]: item["digest"]["sha256"] for item in document["subject"]} == {
        path.name: sha256_of(path) for path in (built.wheel, built.symbols)
    }
    definition, details = document["predicate"]["buildDefinition"], document["predicate"]["runDetails"]
    assert set(definition) == {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"}
    assert not set(definition["externalParameters"]) & set(definition["internalParameters"])
    for uri in (definition["buildType"], details["builder"]["id"]):
        assert URI.fullmatch(uri), uri
    for moment in ("startedOn", "finishedOn"):
        assert MOMENT.fullmatch(details["metadata"][moment])
    assert details["metadata"]["startedOn"] == "2025-01-01T00:00:00Z"
    resources = [*definition["resolvedDependencies"], *details["byproducts"]]
    for item in resources:
        assert set(item) <= {"name", "uri", "digest", "content", "downloadLocation", "mediaType", "annotations"}
        assert {"uri", "digest", "content"} & set(item), f"{item} has neither a URI nor a digest nor content"
        assert URI.fullmatch(item.get("uri", "x:y")), item
    assert str(tmp_path) not in json.dumps(document)
    assert provenance.read(provenance.path_for(built.wheel), built.wheel)["recipeKey"] == "a" * 64


def test_the_provenance_lists_packages_as_package_urls(tmp_path: Path) -> None:
    _, document = written(tmp_path, "archive")
    uris = [item["uri"] for item in document["predicate"]["buildDefinition"]["resolvedDependencies"] if "uri" in item]
    found = {}
    for uri in uris:
        parts = PACKAGE_URL.fullmatch(uri)
        assert parts, uri
        found[f"{unquote(parts['name'])}:{parts['architecture']}"] = unquote(parts["version"])
    assert found == {name: version for name, version in VERSIONS.items() if name != "compiler"}
    assert "pkg:deb/debian/libstdc%2B%2B6@14.2.0-19?arch=armhf" in uris
    assert "pkg:deb/debian/zlib1g-dev@1:1.3.dfsg%2Breally1.3.1-1%2Bb1?arch=armhf" in uris
    assert document["predicate"]["buildDefinition"]["internalParameters"]["compiler"] == VERSIONS["compiler"]


def test_wheels_are_compared_only_with_equal_versions(tmp_path: Path) -> None:
    """With ``verify --full``, a wheel from another compiler may differ, which proves nothing about the build."""
    wheels = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        wheels.append((written(tmp_path / name, "archive")[0].wheel, name))
    assert provenance.versions_of(wheels[0][0]) == VERSIONS
    assert verify.made_alike(wheels, VERSIONS) == wheels[0]
    now = {**VERSIONS, "libstdc++6:armhf": "14.2.0-20", "compiler": "g++ 14.3.0"}
    statement = provenance.path_for(wheels[1][0])
    text = statement.read_text().replace("14.2.0-19?arch", "14.2.0-20?arch")
    statement.write_text(text.replace(VERSIONS["compiler"], now["compiler"]))
    assert verify.made_alike(wheels, now) == wheels[1]
    with pytest.raises(ArtefactMissing, match="the compiler or packages of the builder image have changed") as caught:
        verify.made_alike(wheels[:1], now)
    assert caught.value.found == (
        f"{wheels[0][0].name} (first): compiler {VERSIONS['compiler']} → g++ 14.3.0, "
        "libstdc++6:armhf 14.2.0-19 → 14.2.0-20"
    )
    assert "./inv build-torch" in caught.value.fix
    many = {**VERSIONS, **{f"p{number}:armhf": "1" for number in range(12)}}
    with pytest.raises(ArtefactMissing) as caught:
        verify.made_alike(wheels[:1], many)
    assert caught.value.found.endswith("and 4 more")


def test_the_provenance_names_both_kinds_of_source(tmp_path: Path) -> None:
    _, archive = written(tmp_path, "archive")
    named = [item for item in archive["predicate"]["buildDefinition"]["resolvedDependencies"] if "uri" not in item]
    assert named == [
        {"name": "pytorch_2.6.0+dfsg-7.dsc", "digest": {"sha256": "2" * 64}},
        {"name": "pytorch_2.6.0+dfsg.orig.tar.xz", "digest": {"sha256": "0" * 64}},
    ]
    _, git = written(tmp_path, "git")
    first = git["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    pinned = recipe.load("torch").tables["git"]
    assert first == {
        "uri": f"git+https://github.com/pytorch/pytorch.git@refs/tags/{pinned['tag']}",
        "digest": {"gitCommit": pinned["commit"]},
    }


def test_the_provenance_contains_seconds_and_ccache_hits(tmp_path: Path) -> None:
    _, document = written(tmp_path, "archive")
    byproducts = {item["name"]: item for item in document["predicate"]["runDetails"]["byproducts"]}
    assert {name: json.loads(base64.b64decode(item["content"])) for name, item in byproducts.items()} == {
        "seconds.json": {"compile": 1.5},
        "ccache.json": {"hits": 3, "calls": 4},
    }
    assert byproducts["ccache.json"]["annotations"] == {"hits": 3, "calls": 4}


# Messages and exit codes of the task.

FAULTS = {
    "no such architecture": ({"INVOKE_IMAGE_ARCHITECTURE": "armv6"}, 11, "image.architecture: expected one of armhf"),
    "release without a source": ({"INVOKE_IMAGE_SUITE": "bookworm"}, 25, "does not pin a source package for bookworm"),
    "no such variant": ({"INVOKE_TORCH_VARIANT": "sse"}, 11, "expected: one of neon, baseline, armv6"),
    "refused variant": ({"INVOKE_TORCH_VARIANT": "armv6"}, 11, "torch cannot be built for ARMv6 of the Pi 1 and Zero"),
    "dead mirror": (
        {"INVOKE_IMAGE_MIRROR": "http://127.0.0.1:1/debian"},
        20,
        "pocket trixie of http://127.0.0.1:1/debian cannot be verified",
    ),
}


@pytest.mark.engine
@pytest.mark.usefixtures("apt_without_delays")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_task_ends_with_the_exit_code_of_the_error(tmp_path: Path, fault: str) -> None:
    variables, code, words = FAULTS[fault]
    folder = tmp_path / "build"
    done = subprocess.run(
        [sys.executable, "-m", "toolchain.cli", "build-torch"],
        cwd=ROOT,
        env={**os.environ, **variables, "INVOKE_BUILD_FOLDER": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert words in said
    assert "Traceback" not in said
    assert [path for path in folder.rglob("*") if path.suffix in {".whl", ".dsc", ".tar"}] == []


@pytest.mark.parametrize("wrong", ["USE_OPENMP", "=OFF", "", "USE OPENMP=OFF"])
def test_an_option_is_accepted_completely_or_rejected(tmp_path: Path, wrong: str) -> None:
    """Spaces and commas are part of an option's value. Anything but NAME=VALUE is an error."""
    whole = "CMAKE_CXX_FLAGS=-O1 -Wl,--as-needed, -g"
    done = subprocess.run(
        [sys.executable, "-m", "toolchain.cli", "build-torch", "--plan", "--option", whole, "--option", wrong],
        cwd=ROOT,
        env={**os.environ, "INVOKE_BUILD_FOLDER": str(tmp_path / "build"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 11, done.stdout + done.stderr
    listed = [whole, wrong]
    assert f"- torch.options: {wrong!r}: expected NAME=VALUE, such as USE_OPENMP=OFF, found {listed}" in done.stderr
    assert "or option named above" in done.stderr
