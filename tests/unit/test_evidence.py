"""Tests of the chain from the commit to the board: the changes that break a link, and those that do not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from device_parts import layer
from test_flow import needs_root, public

from device import evidence
from device.chain import check
from device.record import Record
from flow import layers
from images.system import LEFT_OUT, render
from nfsroot import export, unpack
from nfsroot.layout import Layout
from toolchain import checkout
from toolchain.config import load_config
from toolchain.manifest import Artefact, Manifest
from toolchain.steps import MANIFEST_SUFFIX, Made, Pipeline, Step, key_of

__all__ = ["public"]

COMMIT, OTHER = "a" * 40, "b" * 40
CLEAN = {"commit": COMMIT, "dirty": False}
IMAGE, NEWER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
LIBRARY = "opt/pitorch/lib/libqpu.so.1.0"
SITE = "usr/local/lib/python3.13/dist-packages"
BUILT_LAST = "the exported tree is from the image that was built last"
LIBQPU_IN_TREE = "the tree contains the libqpu that was built last"
EXTENSION_IN_TREE = "the tree contains the QPU extension that was built last"
IMAGE_COMMIT = "the image was built from the same commit as the tests"
TREE_COMMIT = "the tree was exported from the same commit as the tests"


class Chain:
    """The files of a build and a matching export, for tests to modify."""

    def __init__(self, folder: Path, nfsroot: str = "nfsroot") -> None:
        self.config = load_config(
            {"nfs": {"folder": str(folder / nfsroot)}, "build": {"folder": str(folder / "build")}}
        )
        self.root = self.config.target_root
        self.layout = Layout.of(self.config)
        self.content = {
            LIBRARY: "library",
            "opt/pitorch/lib/libqpu.so.1": "->libqpu.so.1.0",
            f"{SITE}/dot_cpp.py": "module",
            f"{SITE}/__pycache__/dot_cpp.cpython-313.pyc": "byte code",
        }
        self.root.mkdir(parents=True)
        for path, text in self.content.items():
            place = self.layout.tree / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("->"):
                place.symlink_to(text[2:])
            else:
                place.write_text(text)
        self.add_step("libqpu", {name: text for name, text in self.content.items() if name.startswith("opt")})
        self.add_step("qpu-ops", {name: text for name, text in self.content.items() if name.startswith("usr")})
        self.build_image(IMAGE)
        self.export()
        self.facts: dict[str, Any] = {
            "libqpu": {"path": f"/{LIBRARY}", "sha256": hashlib.sha256(b"library").hexdigest()},
            "root": f"10.0.2.2:{self.layout.tree} / nfs4 rw 0 0",
        }

    def add_step(self, step: str, content: Mapping[str, str]) -> Artefact:
        """Write a layer and its step's manifest."""
        tar = layer(self.root / f"{step}.tar", content)
        Manifest(step=step, key="k", inputs={}, artefacts=(tar,)).write(self.root / f"{step}{MANIFEST_SUFFIX}")
        return tar

    def build_image(self, image: str, source: Mapping[str, Any] = CLEAN, **facts: Any) -> None:
        """Write the manifest of a built image."""
        made = Manifest(step="system", key="k", inputs={}, facts={"image": image, **facts}, source=source)
        made.write(self.root / f"system{MANIFEST_SUFFIX}")

    def export(self, image: str = IMAGE, *, source: Mapping[str, Any] = CLEAN, **facts: Any) -> None:
        """Write the manifest of an export."""
        found = unpack.SourceImage(reference="r", id=image, digests=(), size=1, layers=(), labels={LEFT_OUT: "[]"})
        recorded = {"image_id": image, **export.origin_of(self.config, found), **facts}
        Manifest(step="nfsroot", key="k", inputs={}, facts=recorded, source=source).write(self.layout.manifest)

    def links(
        self, source: Mapping[str, Any] = CLEAN, *, read: str = "", deployed: str = ""
    ) -> dict[str, dict[str, Any]]:
        """Return the links by name."""
        record = Record(
            facts=self.facts,
            booted={},
            tests=(),
            timing={},
            seconds=1.0,
            error=None,
            deployed_sha256=hashlib.sha256(read.encode()).hexdigest() if read else "",
        )
        found = check(
            self.config,
            record,
            Manifest.read(self.layout.manifest),
            evidence._steps(self.config, self.layout),
            source=source,
            checksums=deployed,
        )
        return {item["name"]: item for item in found}

    def document(self) -> dict[str, Any]:
        """Return the evidence of a run without tests."""
        record = Record(facts={}, booted={}, tests=(), timing={}, seconds=1.0, error=None)
        return evidence.collect(self.config, record, started_by_us=True, access="QEMU", through="boot")

    def broken(self, severity: str = "error", source: Mapping[str, Any] = CLEAN) -> list[str]:
        """Return the names of the broken links."""
        return [
            name for name, item in self.links(source).items() if item["holds"] is False and item["severity"] == severity
        ]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_all_links_of_a_matching_chain_hold(chain: Chain) -> None:
    links = chain.links()
    assert list(links) == [
        IMAGE_COMMIT,
        TREE_COMMIT,
        BUILT_LAST,
        LIBQPU_IN_TREE,
        EXTENSION_IN_TREE,
        "the board loads the tree's libqpu",
        "the board's root is the exported tree",
    ]
    assert [item for item in links.values() if item["holds"] is not True] == []


@pytest.mark.parametrize(("read", "holds"), [("list", True), ("another", False), ("", False)])
def test_a_running_board_must_have_read_the_deployed_files(chain: Chain, read: str, holds: bool) -> None:
    assert chain.links(read=read, deployed="list")["the board reads the files that the run deployed"]["holds"] is holds


def test_library_replaced_by_hand_breaks_the_chain(chain: Chain) -> None:
    """The board loads the library in the tree, which is not the library that was built."""
    (chain.layout.tree / LIBRARY).write_text("another")
    chain.facts["libqpu"]["sha256"] = hashlib.sha256(b"another").hexdigest()
    assert chain.broken() == [LIBQPU_IN_TREE]
    assert chain.links()[LIBQPU_IN_TREE]["found"] == f"different: /{LIBRARY}"


@pytest.mark.parametrize("change", ["missing", "replaced by a link", "other target"])
def test_missing_part_of_a_layer_breaks_the_chain(chain: Chain, change: str) -> None:
    module, link = chain.layout.tree / f"{SITE}/dot_cpp.py", chain.layout.tree / "opt/pitorch/lib/libqpu.so.1"
    if change == "other target":
        link.unlink()
        link.symlink_to("/usr/lib/libqpu.so.1")
    else:
        module.rename(module.with_name("renamed.py"))
        if change == "replaced by a link":
            module.symlink_to("renamed.py")
    assert chain.broken() == [LIBQPU_IN_TREE if change == "other target" else EXTENSION_IN_TREE]


def test_byte_code_from_the_board_does_not_break_the_chain(chain: Chain) -> None:
    (chain.layout.tree / f"{SITE}/__pycache__/dot_cpp.cpython-313.pyc").write_text("written by the board")
    assert chain.broken() == []


def test_board_with_another_library_breaks_the_chain(chain: Chain) -> None:
    chain.facts["libqpu"]["sha256"] = "0" * 64
    assert chain.broken() == ["the board loads the tree's libqpu"]


def test_image_built_after_the_export_breaks_the_chain(chain: Chain) -> None:
    chain.build_image(NEWER)
    assert chain.broken() == [BUILT_LAST]
    chain.export(NEWER)
    assert chain.broken() == []


def test_undeployed_kernel_breaks_the_chain(chain: Chain) -> None:
    chain.add_step("libqpu", {LIBRARY: "library 2"})
    assert chain.broken() == [LIBQPU_IN_TREE]


def test_deployment_does_not_break_the_chain(chain: Chain) -> None:
    """The layers are in the tree and in its manifest; a newer image would cause only a warning."""
    tar = chain.add_step("libqpu", {LIBRARY: "library 2"})
    (chain.layout.tree / LIBRARY).write_text("library 2")
    chain.facts["libqpu"]["sha256"] = hashlib.sha256(b"library 2").hexdigest()
    chain.export(deployed=[{"layer": "libqpu.tar", "sha256": tar.sha256, "replaced": 1}])
    assert chain.broken() == []
    assert chain.broken("warning") == []
    chain.build_image(NEWER)
    assert chain.broken() == []
    assert chain.broken("warning") == [BUILT_LAST]


def test_pulled_image_does_not_break_the_chain(chain: Chain) -> None:
    (chain.layout.tree / LIBRARY).write_text("from the registry")
    chain.facts["libqpu"]["sha256"] = hashlib.sha256(b"from the registry").hexdigest()
    chain.export(NEWER)
    assert chain.broken() == []
    assert chain.broken("warning") == [BUILT_LAST]
    assert chain.links()[IMAGE_COMMIT]["holds"] is None
    assert chain.links()[IMAGE_COMMIT]["found"] == "unknown"


def test_different_root_path_is_only_a_warning(chain: Chain) -> None:
    chain.facts["root"] = "nas:/volume1/pi / nfs4 rw 0 0"
    assert chain.broken() == []
    assert chain.broken("warning") == ["the board's root is the exported tree"]


@pytest.mark.parametrize("folder", ["two words", "on:/disk"])
def test_root_path_with_escaped_characters_is_the_tree(tmp_path: Path, folder: str) -> None:
    chain = Chain(tmp_path, folder)
    chain.facts["root"] = f"[fd00::1]:{str(chain.layout.tree).replace(' ', chr(92) + '040')} / nfs4 rw 0 0"
    assert chain.broken("warning") == []


def test_links_to_the_boards_library_stay_in_the_tree(chain: Chain) -> None:
    prefix = chain.layout.tree / "opt/pitorch"
    prefix.rename(chain.layout.tree / "srv")
    prefix.symlink_to("/srv")
    assert chain.broken() == []


@needs_root
def test_tree_that_only_root_may_read_is_unknown(public: Path) -> None:
    chain = Chain(public)
    chain.facts["records"] = {"torch": "0" * 64}
    chain.layout.place.chmod(0o700)
    os.seteuid(65534)
    try:
        links = chain.links()
    finally:
        os.seteuid(0)
    assert {name for name, item in links.items() if item["holds"] is None} == {
        LIBQPU_IN_TREE,
        EXTENSION_IN_TREE,
        "the board loads the tree's libqpu",
        "the board imports the tree's torch",
    }


def test_link_of_a_deleted_layer_is_unknown(chain: Chain) -> None:
    (chain.root / "libqpu.tar").unlink()
    assert chain.links()[LIBQPU_IN_TREE]["holds"] is None
    assert "is missing" in chain.links()[LIBQPU_IN_TREE]["found"]
    assert chain.broken() == []


def test_different_commit_is_only_a_warning(chain: Chain) -> None:
    tests = {"commit": OTHER, "dirty": False}
    assert chain.broken(source=tests) == []
    assert chain.broken("warning", tests) == [IMAGE_COMMIT, TREE_COMMIT]
    link = chain.links(tests)[IMAGE_COMMIT]
    assert (link["expected"], link["found"]) == (OTHER, COMMIT)


@pytest.mark.parametrize(
    ("tests", "build", "found"),
    [
        ({**CLEAN, "dirty": True}, CLEAN, COMMIT),
        (CLEAN, {**CLEAN, "dirty": True}, f"{COMMIT} with uncommitted changes"),
        (
            {**CLEAN, "dirty": True},
            {**CLEAN, "dirty": True},
            f"{COMMIT} with uncommitted changes, possibly different ones",
        ),
    ],
)
def test_uncommitted_changes_break_the_commit_links(
    chain: Chain, tests: Mapping[str, Any], build: Mapping[str, Any], found: str
) -> None:
    chain.build_image(IMAGE, build)
    chain.export(source=build)
    assert chain.broken("warning", tests) == [IMAGE_COMMIT, TREE_COMMIT]
    assert chain.links(tests)[TREE_COMMIT]["found"] == found


def test_commit_is_unknown_outside_a_checkout(chain: Chain) -> None:
    tests: dict[str, Any] = {"commit": "", "dirty": None, "changes": [], "reason": "no checkout"}
    assert chain.links(tests)[IMAGE_COMMIT]["holds"] is None
    assert chain.links(tests)[IMAGE_COMMIT]["expected"] == "unknown"
    assert chain.broken("warning", tests) == []


def test_document_contains_the_commit_of_the_build(chain: Chain) -> None:
    document = chain.document()
    assert document["image"]["source"] == CLEAN
    assert document["image"]["left_out"] == []
    assert document["rootfs"]["source"] == CLEAN
    assert {step["step"]: step["source"] for step in document["steps"]}["system"] == CLEAN
    assert json.loads(json.dumps(document)) == document


def test_steps_are_sorted_by_time_without_the_export(chain: Chain) -> None:
    for number, name in enumerate(("system", "qpu-ops", "libqpu")):
        os.utime(chain.root / f"{name}{MANIFEST_SUFFIX}", (number, number))
    chain.layout = Layout(chain.root / "nfsroot")
    chain.export()
    steps = evidence._steps(chain.config, chain.layout)
    assert [step.step for step in steps] == ["system", "qpu-ops", "libqpu"]


def test_manifest_that_a_build_removes_is_left_out(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build removes a step's manifest when it runs the step again, possibly while the evidence is collected."""
    find = Path.glob
    removed = chain.root / f"libqpu{MANIFEST_SUFFIX}"

    def glob(folder: Path, pattern: str) -> list[Path]:
        found = list(find(folder, pattern))
        removed.unlink()
        return found

    monkeypatch.setattr(Path, "glob", glob)
    monkeypatch.setattr(Path, "rglob", glob)
    assert {step.step for step in evidence._steps(chain.config, chain.layout)} == {"system", "qpu-ops"}


def test_only_manifests_of_build_steps_are_read(chain: Chain) -> None:
    """The folders of the target, such as the scratch folders of a build, may change while the evidence is collected."""
    (chain.root / "scratch").mkdir()
    Manifest(step="other", key="k", inputs={}).write(chain.root / "scratch" / f"other{MANIFEST_SUFFIX}")
    assert "other" not in {step.step for step in evidence._steps(chain.config, chain.layout)}


TORCH: dict[str, Any] = {"name": "torch-2.6.0-cp313-cp313-linux_armv7l.whl", "size": 5, "sha256": "c" * 64}
EXTENSION: dict[str, Any] = {
    "name": "pitorch_qpu_ops-0.1.0-cp313-cp313-linux_armv7l.whl",
    "size": 6,
    "sha256": "d" * 64,
}


def built_wheel(chain: Chain, content: str) -> Artefact:
    """Write the extension wheel and its manifest to the build folder."""
    path = chain.root / EXTENSION["name"]
    path.write_text(content)
    made = Artefact.of(path)
    facts = {"wheel": path.name}
    Manifest(step="qpu-ops", key="k", inputs={}, artefacts=(made,), facts=facts).write(
        chain.root / f"qpu-ops{MANIFEST_SUFFIX}"
    )
    return made


def test_wheels_are_those_of_the_tested_image(chain: Chain) -> None:
    """Newer wheels in the build folder are ignored."""
    chain.build_image(IMAGE, wheels=[EXTENSION, TORCH])
    chain.export()
    chain.build_image(NEWER, wheels=[])
    built_wheel(chain, "newer")
    document = chain.document()
    assert document["wheels"] == [EXTENSION, TORCH]
    assert document["wheels_unknown"] == ""


def test_deployed_wheel_replaces_the_one_of_the_image(chain: Chain) -> None:
    deployed = {**EXTENSION, "sha256": "e" * 64}
    chain.build_image(IMAGE, wheels=[EXTENSION, TORCH])
    chain.export(deployed=[{"layer": "libqpu.tar"}, {"layer": "qpu-ops-site.tar", "wheel": deployed}])
    assert chain.document()["wheels"] == [deployed, TORCH]
    assert chain.document()["wheels_unknown"] == ""
    chain.export(deployed=[{"layer": "qpu-ops-site.tar"}])
    assert chain.document()["wheels"] == [TORCH]
    assert "did not record its wheel" in chain.document()["wheels_unknown"]


def test_wheels_of_a_pulled_image_are_unknown(chain: Chain) -> None:
    """The wheels of a pulled image are unknown even if an image and a wheel were also built on this PC."""
    chain.build_image(IMAGE, wheels=[EXTENSION, TORCH])
    built_wheel(chain, "local")
    chain.export(NEWER)
    assert chain.document()["wheels"] == []
    assert "was not built here" in chain.document()["wheels_unknown"]
    chain.export(NEWER, deployed=[{"layer": "qpu-ops-site.tar", "wheel": EXTENSION}])
    assert chain.document()["wheels"] == [EXTENSION]
    assert "was not built here" in chain.document()["wheels_unknown"]
    chain.export(IMAGE)
    assert chain.document()["wheels"] == [EXTENSION, TORCH]
    chain.build_image(IMAGE)
    chain.export(IMAGE)
    assert "did not record the wheels" in chain.document()["wheels_unknown"]
    chain.layout.manifest.unlink()
    assert chain.document()["wheels"] == []
    assert "exported from is unknown" in chain.document()["wheels_unknown"]


def test_image_records_its_wheels(chain: Chain, tmp_path: Path) -> None:
    extension = built_wheel(chain, "extension")
    recorded = {"name": extension.path.name, "size": extension.size, "sha256": extension.sha256}
    found = Manifest.read(chain.root / f"qpu-ops{MANIFEST_SUFFIX}")
    assert found is not None
    (tmp_path / TORCH["name"]).write_text("torch")
    torch = {"wheel": str(tmp_path / TORCH["name"]), "sha256": TORCH["sha256"]}
    ffi = {"wheel": "apache_tvm_ffi-0.1-cp313-cp313-linux_armv7l.whl", "size": 7, "sha256": "f" * 64}
    ffi_noted = {"name": ffi["wheel"], "size": 7, "sha256": "f" * 64}
    server = {"name": "apache_tvm-0.27-py3-none-manylinux_2_28_aarch64.whl", "size": 8, "sha256": "a" * 64}
    others = {
        "torch": torch,
        "tvm-ffi": ffi,
        "tvm-server": {"version": "apache-tvm==0.27", "wheels": [server, ffi_noted]},
        "libqpu": {"library": "libqpu"},
    }
    needs = {name: Manifest(step=name, key="k", inputs={}, facts=facts) for name, facts in others.items()}
    assert layers.wheels_in({**needs, "qpu-ops": found}) == [server, ffi_noted, recorded, TORCH]
    without = {name: dataclasses.replace(made, facts={"wheel": ""}) for name, made in needs.items()}
    assert layers.wheels_in(without) == []


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, independent of the caller's settings."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_state_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    # The temporary folder may be inside another checkout.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "checkout"
    (folder / "below").mkdir(parents=True)
    outside = checkout.state(folder)
    assert (outside["commit"], outside["dirty"]) == ("", None)
    assert outside["reason"]
    assert checkout.origin(folder) == {}
    assert checkout.described(outside) == "unknown"
    git(folder, "init", "--quiet")
    checkout.state.cache_clear()
    assert checkout.state(folder)["commit"] == "", "a checkout without a commit must have no commit in its state"
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "--message=m")
    commit = git(folder, "rev-parse", "HEAD")
    checkout.state.cache_clear()
    assert checkout.state(folder) == {"commit": commit, "dirty": False, "changes": []}
    assert checkout.origin(folder) == {"commit": commit, "dirty": False}
    (folder / "file").write_text("2")
    assert checkout.origin(folder)["dirty"] is False, "the state is determined once per process"
    checkout.state.cache_clear()
    assert checkout.origin(folder) == {"commit": commit, "dirty": True}
    assert checkout.described(checkout.origin(folder)) == f"{commit} with uncommitted changes"
    assert "file" in checkout.state(folder)["changes"][0]
    assert checkout.origin(folder / "below") == {}, "a folder inside another checkout has no origin"


def test_steps_record_the_commit_but_do_not_depend_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(needs: Mapping[str, Manifest]) -> Made:
        (tmp_path / "out.txt").write_text("same")
        return Made((tmp_path / "out.txt",))

    steps = (
        Step(name="one", title="one", inputs={"a": "1"}, action=write),
        Step(name="two", title="two", inputs={}, needs=("one",), action=write),
    )
    pipeline = Pipeline(tmp_path, steps)
    monkeypatch.setattr(checkout, "origin", lambda: CLEAN)
    first = pipeline.execute(pipeline.plan())
    assert [item.source for item in first] == [CLEAN, CLEAN]
    monkeypatch.setattr(checkout, "origin", lambda: {"commit": OTHER, "dirty": True})
    assert [item.reason for item in pipeline.plan() if item.runs] == []
    again = pipeline.execute(pipeline.plan(force=frozenset({"one"})))
    assert [item.source["commit"] for item in again] == [OTHER, COMMIT], (
        "the second step must keep its commit, because it did not run"
    )
    assert again[0].key == first[0].key == key_of("one", {"a": "1"})


def needs_of_the_image(**rootfs: Any) -> dict[str, Manifest]:
    facts = {
        "rootfs": {"image": IMAGE, "reference": "r", "size": 1, **rootfs},
        "libqpu": {"library": "libqpu"},
        "torch": {"version": "2.6.0"},
    }
    return {name: Manifest(step=name, key="k", inputs={}, facts=found) for name, found in facts.items()}


def test_image_label_lists_the_left_out_pockets() -> None:
    def labels(**rootfs: Any) -> dict[str, str]:
        return layers.labels(load_config({}).image, needs_of_the_image(**rootfs))

    assert json.loads(labels(left_out=["trixie-security"])[LEFT_OUT]) == ["trixie-security"]
    assert labels(left_out=[])[LEFT_OUT] == "[]"
    text = render(IMAGE, [], labels=labels(left_out=["trixie-security"]), bootable=True)
    assert f"{LEFT_OUT}=" + r'"[\"trixie-security\"]"' in [line.strip(" \\") for line in text.splitlines()]
    assert text.count("LABEL ") == 1, "expected one LABEL instruction, because the engine creates a container for each"
    assert LEFT_OUT not in labels(), "older roots did not record pockets that were left out"


@pytest.mark.parametrize(
    ("label", "left_out"),
    [('["trixie-security"]', ["trixie-security"]), ("[]", []), ("incomplete [", None), ('"text"', None), (None, None)],
)
def test_export_records_the_left_out_pockets_of_the_image(
    chain: Chain, label: str | None, left_out: list[str] | None
) -> None:
    labels = {} if label is None else {LEFT_OUT: label}
    image = unpack.SourceImage(reference="r", id=IMAGE, digests=(), size=1, layers=(), labels=labels)
    origin = export.origin_of(chain.config, image)
    assert origin.get("left_out") == left_out
    warnings = export.left_out_warnings(origin)
    assert len(warnings) == len(left_out or ())
    assert all("trixie-security" in text and "lacks the updates" in text for text in warnings)
    assert (origin["built_image"], origin["image_source"]) == (IMAGE, CLEAN)
