"""The main job's plan without an engine: which steps there are, what hangs on what, and who may run them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from ordinary_user import run_python
from registry_parts import small_disk
from wheel_parts import make_wheel

from flow import main_job, torch_job
from flow import main_steps as flow
from flow.main_steps import Flow, alone
from images import apt, rootfs
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ConfigError, DiskFull, ImageBuildFailed, RootNeeded
from toolchain.manifest import Manifest
from toolchain.steps import Decision, Made, Pipeline, Step

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def config_for(folder: Path, *, native_compiler: bool = True) -> Config:
    """Nothing was built there, and no engine answers."""
    return load_config({"build": {"folder": str(folder), "native_compiler": native_compiler}})


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")


def needs_of(config: Config, *, workbench: bool = False) -> dict[str, tuple[str, ...]]:
    """The steps in their order, and what each needs."""
    with Flow(config) as flow:
        return {step.name: step.needs for step in flow.pipeline(workbench=workbench).steps}


# ------------------------------------------------------------------------------------------ one switch


def test_the_extension_is_cross_compiled_and_nobody_needs_the_development_root(tmp_path: Path) -> None:
    steps = needs_of(config_for(tmp_path))
    assert list(steps) == [
        *("mirror", "tools", "builder", "torch", "archives", "torch-site", "rootfs", "base", "libqpu", "qpu-ops"),
        "system",
    ]
    assert steps["qpu-ops"] == ("builder", "torch-site", "libqpu")


def test_without_the_native_compiler_the_extension_is_built_in_the_development_root(tmp_path: Path) -> None:
    steps = needs_of(config_for(tmp_path, native_compiler=False))
    assert list(steps) == [
        *(
            "mirror",
            "tools",
            "builder",
            "dev",
            "torch",
            "archives",
            "torch-site",
            "rootfs",
            "base",
            "libqpu",
            "qpu-ops",
            "system",
        ),
    ]
    assert steps["qpu-ops"] == ("dev", "torch-site", "libqpu")
    assert steps["libqpu"] == ("builder",), "the library is cross-compiled either way"


def test_where_the_target_s_compiler_makes_other_code_nothing_is_cross_compiled(tmp_path: Path) -> None:
    """Debian's makes ARMv7's, which a Pi 1 ends with an illegal instruction."""
    config = load_config({"image": {"flavour": "raspbian"}, "build": {"folder": str(tmp_path)}})
    steps = needs_of(config, workbench=True)
    assert steps["libqpu"] == ("dev",)
    assert steps["qpu-ops"] == ("dev", "torch-site", "libqpu")
    upstream = dataclasses.replace(config, qpu=dataclasses.replace(config.qpu, library="upstream"))
    assert needs_of(upstream)["libqpu"] == ("dev",)
    with Flow(config) as made, Flow(config_for(tmp_path)) as debian:
        assert made.compiler().binds() == []
        assert "Raspbian's own compiler, emulated" in made.own_compiler
        assert "ARMv6" in made.own_compiler
        assert (debian.own_compiler, debian.crossed, made.crossed) == ("", True, False)


@pytest.mark.parametrize("native_compiler", [True, False])
def test_shells_have_the_development_root_either_way(tmp_path: Path, native_compiler: bool) -> None:
    steps = needs_of(config_for(tmp_path, native_compiler=native_compiler), workbench=True)
    assert "dev" in steps["workbench"]
    assert list(steps)[-1] == "workbench"
    assert steps["dev"] == ("mirror", "tools")


def test_the_switch_is_an_input_of_the_extension_alone(tmp_path: Path) -> None:
    with Flow(config_for(tmp_path)) as on, Flow(config_for(tmp_path, native_compiler=False)) as off:
        before = {step.name: dict(step.inputs) for step in on.pipeline(workbench=True).steps}
        after = {step.name: dict(step.inputs) for step in off.pipeline(workbench=True).steps}
    assert [name for name in before if before[name] != after[name]] == ["qpu-ops"]


def test_the_builder_image_is_made_anew_when_less_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path / "build")

    def inputs() -> dict[str, str]:
        with Flow(config) as made:
            (step,) = (step for step in made.pipeline().steps if step.name == "builder")
            return dict(step.inputs)

    before = inputs()
    with monkeypatch.context() as changed:
        changed.setattr(rootfs, "LEFT_OUT", rootfs.LEFT_OUT[1:])
        assert inputs() == {**before, "left out": " ".join(rootfs.LEFT_OUT)} != before
    assert inputs() == before


MODULES = {
    "images/rootfs.py": {"tools", "builder", "dev", "archives", "rootfs"},
    "images/apt.py": {"tools", "dev", "archives", "rootfs"},
    "images/archive.py": {"builder", "dev", "rootfs", "base"},
    "images/native.py": {"dev"},
    "images/system.py": {"system", "workbench"},
    "flow/layers.py": {"system", "workbench"},
    "flow/main_steps.py": set(),
    "images/templates/Dockerfile.j2": set(),
    "toolchain/files.py": {"builder"},
    "toolchain/steps.py": set(),
}
"""Which steps are made again after a change to a module, by themselves."""


def test_a_step_is_made_again_when_the_python_that_makes_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path / "build")

    def inputs() -> dict[str, dict[str, str]]:
        with Flow(config) as made:
            return {step.name: dict(step.inputs) for step in made.pipeline(workbench=True).steps}

    copy = tmp_path / "checkout"
    for name in MODULES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    ours = inputs()
    monkeypatch.setattr(flow, "ROOT", copy)
    before = inputs()
    assert {name for name in before if before[name] != ours[name]} <= {"tvm-server", "libqpu", "qpu-ops", "torch-site"}
    for name, steps in MODULES.items():
        with (copy / name).open("a") as stream:
            stream.write("# changed\n")
        after = inputs()
        assert {step for step in after if after[step] != before[step]} == steps, name
        before = after


def test_roots_are_made_again_by_another_mmdebstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs() -> dict[str, str]:
        with Flow(config_for(tmp_path / "build")) as made:
            return {step.name: step.inputs.get("mmdebstrap", "") for step in made.pipeline(workbench=True).steps}

    program = tmp_path / "mmdebstrap"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    before = inputs()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first = inputs()
    program.write_text("#!/bin/sh\n# newer\n")
    second = inputs()
    assert {name for name in first if first[name] != before[name]} == {"dev", "rootfs"}
    assert {name for name in first if first[name] != second[name]} == {"dev", "rootfs"}
    with monkeypatch.context() as changed:
        changed.setattr(shutil, "which", lambda *_, **__: None)
        assert rootfs.program_fingerprint() == "absent", "who merely plans need not have it"


def test_a_disk_that_becomes_full_under_a_wheels_content_is_told(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", {"thing.bin": os.urandom(3 << 20)})
    with small_disk(tmp_path / "disk", "2m") as disk, Flow(config_for(disk)) as made:
        with pytest.raises(DiskFull, match=f"no room for what {wheel.name} holds") as caught:
            made._stage_wheel(wheel, made.root / "site", made.root / "site.tar")
        assert str(made.root) in caught.value.expected
        assert list(made.root.iterdir()) == []
        tar = tmp_path / "large.tar"
        files.pack(wheel.parent, tar, epoch=1000)
        with pytest.raises(DiskFull, match=r"no room for what large\.tar holds"):
            flow._unpack(tar, disk / "large")


@pytest.mark.parametrize("own", [True, False])
def test_a_disk_that_is_full_when_the_extension_is_built_is_told(tmp_path: Path, own: bool) -> None:
    facts: dict[str, dict[str, Any]] = {
        "builder": {"image": "sha256:0"},
        "torch-site": {"version": "2.6.0"},
        "libqpu": {"prefix": "/usr", "own": own, "library": "another one"},
    }

    def done(name: str) -> Step:
        return Step(name=name, title=name, inputs={}, action=lambda _: Made(facts=facts[name]))

    with small_disk(tmp_path / "disk", "160k") as disk, Flow(config_for(disk)) as made:
        made._client = docker.DockerClient(base_url="unix:///nowhere", version="1.41")
        step = next(step for step in made.pipeline().steps if step.name == "qpu-ops")
        pipeline = Pipeline(made.root, (*map(done, facts), step))
        with pytest.raises(DiskFull, match="no room for QPU extension wheel"):
            pipeline.execute(pipeline.plan())
        assert not pipeline.manifest_path("qpu-ops").exists()
        assert list((made.root / "work").iterdir()) == [], "nothing is left half-written"


def test_no_compiler_is_mounted_where_it_is_switched_off(tmp_path: Path) -> None:
    assert Flow(config_for(tmp_path, native_compiler=False)).compiler().binds() == []


# ------------------------------------------------------------------------------------------ steps by name


def test_the_development_root_is_had_by_name(tmp_path: Path) -> None:
    decisions = main_job.plan(config_for(tmp_path), only=["dev"])
    assert [item.step.name for item in decisions] == ["mirror", "tools", "dev"]
    assert all(item.runs for item in decisions)


def test_the_workbench_is_had_by_name(tmp_path: Path) -> None:
    decisions = {item.step.name: item for item in main_job.plan(config_for(tmp_path), again=["workbench"])}
    assert {"dev", "workbench", "system"} <= set(decisions)
    assert decisions["workbench"].forced
    assert not decisions["dev"].forced


def test_a_step_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main_job.plan(config_for(tmp_path), only=["rootf"], again=["libcpu"])
    valid = "mirror, tools, builder, torch, archives, torch-site, rootfs, base, libqpu, qpu-ops, system"
    assert caught.value.faults == (f"no step 'libcpu'; valid: {valid}", f"no step 'rootf'; valid: {valid}")
    with pytest.raises(ConfigError, match=r"no step 'x'; valid: mirror, .*, dev, .*, workbench"):
        main_job.plan(config_for(tmp_path), only=["dev", "x"])


@pytest.mark.parametrize("image", [{}, {"flavour": "raspbian"}, {"kernel": "raspberrypi"}])
def test_planning_leaves_nothing_behind_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: dict[str, str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("requests.get", lambda url, **_: asked.append(url))
    decisions = main_job.plan(load_config({"image": image, "build": {"folder": str(tmp_path / "build")}}))
    assert decisions[0].step.name == "mirror"
    assert decisions[0].runs
    assert (asked, (tmp_path / "build").exists()) == ([], False)


def test_a_key_that_is_gone_is_fetched_by_the_step_that_asks_the_mirror(tmp_path: Path) -> None:
    config = load_config({"image": {"flavour": "raspbian"}, "build": {"folder": str(tmp_path)}})
    with Flow(config) as made:
        (step,) = (step for step in made.pipeline().steps if step.name == "mirror")
        (made.root / "mirror" / "lists").mkdir(parents=True)
        manifest = Manifest(step="mirror", key="", inputs={})
        assert step.missing(manifest) == "a key of its archives is gone"
        made.keyrings.mkdir()
        (made.keyrings / "raspbian.gpg").touch()
        assert step.missing(manifest) == ""


def test_what_the_mirror_s_manifest_says_of_debian_s_pockets_is_as_ever(tmp_path: Path) -> None:
    """Its product is by that: with other facts every step that needs it would run anew."""
    made = apt.sources_for(load_config({"image": {"kernel": "raspberrypi"}}), tmp_path)
    records = [flow._source_record(item) for item in made]
    assert {frozenset(item) for item in records[:3]} == {
        frozenset(("pocket", "uri", "components", "keyring", "architectures"))
    }
    assert {*records[3]} > {"archive", "only", "keyring_in_root"}
    assert tuple(map(flow._source, json.loads(json.dumps(records)))) == made


# ------------------------------------------------------------------------------------------ rights


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that any user may write to."""
    with tempfile.TemporaryDirectory(prefix="pitorch-rights-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def as_nobody(checkout: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``./inv`` with these words for an ordinary user, when the machine is ready."""
    environment = {
        "HOME": str(folder),
        "DOCKER_HOST": os.environ["DOCKER_HOST"],
        "INVOKE_BUILD_FOLDER": str(folder / "build"),
    }
    return run_python(checkout, "-m", "toolchain.cli", *words, environment=environment)


@needs_root
@pytest.mark.parametrize(
    ("words", "titles", "fix"),
    [
        (["build-image"], "(native tools, native builder image, root filesystem)", "./inv build-image"),
        (["build-image", "--only=dev"], "(native tools, development root)", "./inv build-image --only=dev"),
        (
            ["shell", "--command=make all"],
            "(native tools, native builder image, development root)",
            "./inv shell '--command=make all'",
        ),
    ],
)
def test_an_ordinary_user_is_told_to_use_sudo_before_anything_is_done(
    open_checkout: Path, public: Path, words: list[str], titles: str, fix: str
) -> None:
    ended = as_nobody(open_checkout, *words, folder=public)
    assert ended.returncode == 28, ended.stderr
    assert f"root is needed to give files to their owners {titles}" in ended.stderr
    assert "found:    user id 65534" in ended.stderr
    kept = "--preserve-env=DOCKER_HOST,INVOKE_BUILD_FOLDER"
    assert ended.stderr.rstrip().endswith(f"fix:      sudo {kept} {fix}"), "all that was typed, and what was set"
    assert "Traceback" not in ended.stderr
    assert not (public / "build").exists()


@needs_root
def test_an_ordinary_user_may_look_at_the_plan(open_checkout: Path, public: Path) -> None:
    ended = as_nobody(open_checkout, "build-image", "--plan", folder=public)
    assert ended.returncode == 0, ended.stderr
    assert "root filesystem" in ended.stdout


@needs_root
def test_a_build_folder_of_another_user_is_told(tmp_path: Path, public: Path) -> None:
    theirs = public / "theirs"
    theirs.mkdir(mode=0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(RootNeeded, match="belongs to another user") as caught, alone(theirs):
            raise AssertionError("must not go on")
    finally:
        os.seteuid(0)
    assert "build.folder" in caught.value.fix


BRING_UP_TO_DATE = """
import sys
from pathlib import Path
from flow.main_steps import alone
from toolchain.steps import Made, Pipeline, Step

def action(_):
    print("ran")
    return Made()

folder, version = Path(sys.argv[1]), sys.argv[2]
with alone(folder):
    if version == "twice":
        with alone(folder):
            print("both")
    pipeline = Pipeline(folder, (Step(name="image", title="image", inputs={"version": version}, action=action),))
    pipeline.execute(pipeline.plan())
"""


@needs_root
def test_what_root_built_may_be_used_by_others_and_not_be_built_on(open_checkout: Path, public: Path) -> None:
    """As ``shell`` does after ``sudo ./inv build-image``."""
    theirs = public / "theirs"

    def as_user(version: str) -> subprocess.CompletedProcess[str]:
        words = ("-c", BRING_UP_TO_DATE, str(theirs), version)
        return run_python(open_checkout, *words, environment={"HOME": str(public)})

    subprocess.run([sys.executable, "-c", BRING_UP_TO_DATE, theirs, "1"], cwd=ROOT, check=True)
    used = as_user("1")
    assert (used.returncode, used.stdout) == (0, ""), used.stderr
    refused = as_user("2").stderr
    assert "RootNeeded: " in refused
    assert "belongs to another user" in refused
    assert "it may not be written to, and image has to be made" in refused
    assert "sudo" in refused
    assert "ServerFailed: another build works" in as_user("twice").stderr


@needs_root
def test_no_root_is_begun_without_root(public: Path) -> None:
    """Whoever asks for one, and whatever else is missing."""
    spec = rootfs.RootSpec(
        role="small",
        suite="trixie",
        architectures=(host_architecture().debian,),
        packages=("base-files",),
        sources=(),
        lists=public / "lists",
        archives=public / "archives",
        source_date_epoch=0,
    )
    os.seteuid(65534)
    try:
        builds: tuple[Callable[[], object], ...] = (
            lambda: rootfs.build_tools(spec, public / "tools", public / "logs" / "log", standing_in=()),
            lambda: rootfs.build_native_tar(spec, public / "root.tar", public / "logs" / "log"),
            lambda: rootfs.build_tar(spec, public / "root.tar", public / "logs" / "log"),
        )
        for build in builds:
            with pytest.raises(RootNeeded, match="files of the small root") as caught:
                build()
            assert caught.value.fix.startswith("sudo ./inv")
    finally:
        os.seteuid(0)
    assert list(public.iterdir()) == []


# ------------------------------------------------------------------------------------------ builds that were killed

KILLED = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from flow.main_steps import alone
from toolchain import files
folder = Path(sys.argv[1])
with alone(folder), files.replacing(folder / "rootfs.tar") as aside, ExitStack() as stack:
    places = [(folder, "tools"), (folder / "work", "wheel"), (folder / "mirror", "pockets")]
    places += [(folder.parent / "archives", "apt"), (folder.parent / "sources", "pytorch")]
    for place, name in places:
        (stack.enter_context(files.scratch_folder(place, name)) / "large").write_bytes(os.urandom(1 << 20))
    aside.write_text("half")
    aside.with_name(aside.name + ".tar").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gigabytes, each time; what others have in the folders stays."""
    folder = tmp_path / "target"
    ended = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    (folder / ".rootfs.tar.17.scratch").mkdir()
    assert len(list(folder.iterdir())) == 7
    theirs = {
        *(folder / name for name in ("lock", ".nfsroot.export", ".nfsroot.lock", ".mine", "rootfs.tar", "tools")),
        *(folder / name for name in (".tools.tar", "a.17.part", "work", "mirror")),
        *(folder / "work" / name for name in ("libqpu-0123456789ab", ".wheel", ".cache.settings", ".wheel.SETTINGS")),
        *(tmp_path / "archives" / name for name in ("trixie-armhf-rootfs", ".wheel.abcdefgh")),
    }
    for kept in theirs:
        if not kept.exists():
            kept.mkdir()
    with alone(folder):
        left = {path for place in (folder, folder / "work", tmp_path / "archives") for path in place.iterdir()}
        assert left == theirs
        assert [*(folder / "mirror").iterdir(), *(tmp_path / "sources").iterdir()] == []
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" *what killed tasks left is removed: (\S+, ){2}\S+ and 5 more \(5\.0 MiB\)", said), said
    with alone(folder):
        assert capsys.readouterr().err == ""


def test_what_others_work_in_is_no_leftover(tmp_path: Path) -> None:
    """A build of another target, a wheel's, an export: none of them holds this target's lock."""
    folder = tmp_path / "target"
    with (
        files.scratch_folder(folder / "work", "wheel") as wheel,
        files.scratch_folder(tmp_path / "archives", "apt") as packages,
        files.scratch_folder(folder, "overlay") as layers,
        alone(folder),
    ):
        assert all(path.is_dir() for path in (wheel, packages, layers))
    assert [path for place in ("target", "target/work", "archives") for path in (tmp_path / place).glob(".*")] == []


@pytest.mark.parametrize("way", ["place", "word", "file"])
def test_what_programs_of_a_killed_task_work_in_is_no_leftover_before_they_end(tmp_path: Path, way: str) -> None:
    place = tmp_path / "target" / "work" / ".wheel.abcdefgh"
    place.mkdir(parents=True)
    (place / "file").touch()
    words = ["sh", "-c", "echo; read x", *([f"Dir::Log={place}"] if way == "word" else [])]
    with (
        (place / "file").open() as opened,
        subprocess.Popen(
            words,
            cwd=place if way == "place" else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=opened if way == "file" else None,
        ) as running,
    ):
        opened.close()
        assert running.stdout is not None
        assert running.stdout.readline() == b"\n"
        with alone(tmp_path / "target"):
            assert (place / "file").exists()
        running.communicate(b"\n")
    with alone(tmp_path / "target"):
        assert not place.exists()


def test_leftovers_are_not_looked_for_behind_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / ".wheel.abcdefgh"
    elsewhere.mkdir(parents=True)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "work").symlink_to(elsewhere.parent)
    (folder / ".tools.abcdefgh").symlink_to(elsewhere)
    with alone(folder):
        pass
    (folder / "work").unlink()
    (folder / "work").mkdir()
    (folder / "work" / ".wheel.abcdefgh").symlink_to(elsewhere)
    with alone(folder):
        assert (folder / "work" / ".wheel.abcdefgh").is_symlink()
    assert (folder / ".tools.abcdefgh").is_symlink()
    assert elsewhere.is_dir()


def test_a_mount_below_keeps_a_leftover(tmp_path: Path) -> None:
    place = tmp_path / "a target" / "work" / ".wheel.abcdefgh"
    place.mkdir(parents=True)
    with small_disk(place / "below it", "1m") as disk:
        (disk / "file").touch()
        with alone(tmp_path / "a target"):
            assert (disk / "file").exists()
    with alone(tmp_path / "a target"):
        assert not place.exists()


def test_what_is_mounted_is_no_leftover(tmp_path: Path) -> None:
    place = tmp_path / ".tools.abcdefgh"
    with small_disk(place, "1m"):
        (place / "file").touch()
        with alone(tmp_path):
            assert (place / "file").exists()
    with alone(tmp_path):
        assert not place.exists()


@needs_root
def test_a_process_of_the_same_number_may_have_been_killed_before(tmp_path: Path) -> None:
    """In a container numbers repeat: the next build stopped at what the one before had left."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    (tmp_path / f".root.tar.{os.getpid()}.scratch").mkdir()
    (tmp_path / "lists").mkdir()
    spec = rootfs.RootSpec(
        role="small",
        suite="trixie",
        architectures=(host_architecture().debian,),
        packages=("base-files",),
        sources=(),
        lists=tmp_path / "lists",
        archives=tmp_path / "archives",
        source_date_epoch=0,
    )
    with pytest.raises(ImageBuildFailed, match="the small root"):  # without sources there is nothing to make it of
        rootfs.build_native_tar(spec, tmp_path / "root.tar", tmp_path / "log")
    left = {f".root.tar.{os.getpid()}.scratch", "archives", "lists", "log"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("runs", [True, False])
def test_the_plan_from_source_names_torchs_own_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: bool
) -> None:
    def step(name: str) -> Step:
        return Step(name=name, title=name, inputs={}, action=lambda _: Made())

    def decided(config: object) -> list[Decision]:
        del config
        return [Decision(step(name), "", runs, "a reason", None) for name in ("mirror", "torch-builder", "torch-wheel")]

    main = Pipeline(tmp_path, [step("mirror"), step("torch")])
    main.execute(main.plan())
    monkeypatch.setattr(torch_job, "plan", decided)
    monkeypatch.setattr(main_job, "_pipeline", lambda *_: main)
    for from_source in (True, False):
        settings = {"build": {"folder": str(tmp_path)}, "torch": {"from_source": from_source}}
        planned = main_job.plan(load_config(settings))
        assert [(item.step.name, item.runs) for item in planned] == [
            *([("torch-builder", runs), ("torch-wheel", runs)] if from_source else []),
            ("mirror", False),
            ("torch", runs and from_source),
        ]


def test_from_source_torch_is_built_before_the_image_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only so is the wheel that was just built the one that the plan sees."""
    done: list[str] = []

    class Enough(Exception):
        pass

    def plan(*_: object, **__: object) -> object:
        done.append("plan")
        raise Enough

    monkeypatch.setattr(main_job, "ensure_running", lambda _: done.append("engine"))
    monkeypatch.setattr(torch_job, "build_torch", lambda config: done.append(f"torch {config.torch.variant}"))
    monkeypatch.setattr(main_job, "_pipeline", plan)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for from_source, expected in ((True, ["engine", "torch neon", "plan"]), (False, ["engine", "plan"])):
        done.clear()
        settings = {"build": {"folder": str(tmp_path)}, "torch": {"from_source": from_source}}
        with pytest.raises(Enough):
            main_job.build_image(load_config(settings))
        assert done == expected
