"""Tests of the main job's pipelines without an engine: steps, plans and permissions."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ordinary_user import run_python
from registry_parts import small_disk
from wheel_parts import make_wheel

from flow import cuda_job, main_job, pipelines, roots, torch_job
from flow.compilers import emulated_compiler_reason, is_extension_cross_compiled, native_compiler
from flow.context import Context, for_all_targets
from flow.staging import stage_wheels
from flow.steps import mirror
from images import apt, rootfs
from images.recorded_sources import record_of, source_of
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import Config, load_config
from toolchain.errors import CommandFailed, ConfigError, DiskFull, RootNeeded
from toolchain.manifest import Manifest
from toolchain.steps import Decision, Made, Pipeline, Step

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def config_for(folder: Path, *, native_compiler: bool = True) -> Config:
    """Make a configuration whose build folder is empty."""
    return load_config({"build": {"folder": str(folder), "native_compiler": native_compiler}})


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")


def steps_of(config: Config, *, with_workbench: bool = False) -> dict[str, Step]:
    with Context(config) as context:
        return {step.name: step for step in pipelines.main_job(context, with_workbench=with_workbench).steps}


# Where the extension and libqpu are compiled.


def test_the_extension_is_cross_compiled_by_default(tmp_path: Path) -> None:
    steps = steps_of(config_for(tmp_path))
    assert "dev" not in steps
    assert steps["qpu-ops"].needs == ("builder", "torch-site", "libqpu")
    assert steps["libqpu"].needs == ("builder",)


def test_without_native_compiler_the_extension_is_built_in_dev(tmp_path: Path) -> None:
    steps = steps_of(config_for(tmp_path, native_compiler=False))
    assert steps["qpu-ops"].needs == ("dev", "torch-site", "libqpu")
    assert steps["libqpu"].needs == ("builder",), "libqpu must still be cross-compiled"


def test_torch_of_the_distribution_is_a_package_of_the_root(tmp_path: Path) -> None:
    base = {"build": {"folder": str(tmp_path)}, "image": {"architecture": "arm64"}}
    usual, debians = (Context(load_config({**base, "torch": {"source": it}})) for it in ("pypi", "distribution"))
    assert {*roots.common_packages(debians)} - {*roots.common_packages(usual)} == {
        *("python3-torch", *debians.suite.torch_python)
    }


@pytest.mark.parametrize(("suite", "absent"), [("trixie", set()), ("bookworm", {"python3-onnxruntime"})])
def test_ml_packages_are_those_of_the_release(tmp_path: Path, suite: str, absent: set[str]) -> None:
    base = {"build": {"folder": str(tmp_path)}}
    without, with_them = (
        Context(load_config({**base, "image": {"suite": suite, "ml_packages": wanted}})) for wanted in (False, True)
    )
    names = {"python3-opencv", "python3-onnxruntime", "python3-scipy", "python3-sklearn"}
    assert names & set(roots.common_packages(without)) == set()
    assert names - set(roots.common_packages(with_them)) == absent
    assert roots.target_packages(without) != roots.target_packages(with_them)
    assert roots.absent_warnings(without) == ()
    assert {text.partition(" is NOT in the image: ")[0] for text in roots.absent_warnings(with_them)} == absent
    assert all(text.endswith(f"{suite} does not have it") for text in roots.absent_warnings(with_them))


def test_nothing_is_cross_compiled_for_raspbian(tmp_path: Path) -> None:
    """Debian's cross compiler generates ARMv7 code, which a Pi 1 cannot execute."""
    config = load_config({"image": {"flavour": "raspbian"}, "build": {"folder": str(tmp_path)}})
    steps = steps_of(config, with_workbench=True)
    assert steps["libqpu"].needs == ("dev",)
    assert steps["qpu-ops"].needs == ("dev", "torch-site", "libqpu")
    upstream = dataclasses.replace(config, qpu=dataclasses.replace(config.qpu, library="upstream"))
    assert steps_of(upstream)["libqpu"].needs == ("dev",)
    raspbian, debian = Context(config), Context(config_for(tmp_path))
    assert native_compiler(raspbian).binds() == []
    assert "Raspbian's own compiler compiles code" in emulated_compiler_reason(raspbian)
    assert "ARMv6" in emulated_compiler_reason(raspbian)
    assert emulated_compiler_reason(debian) == ""
    assert is_extension_cross_compiled(debian)
    assert not is_extension_cross_compiled(raspbian)


@pytest.mark.parametrize("with_compiler", [True, False])
def test_the_workbench_needs_the_development_root(tmp_path: Path, with_compiler: bool) -> None:
    steps = steps_of(config_for(tmp_path, native_compiler=with_compiler), with_workbench=True)
    assert "dev" in steps["workbench"].needs
    assert steps["dev"].needs == ("mirror", "tools")


def test_the_compiler_setting_is_an_input_of_the_extension_only(tmp_path: Path) -> None:
    before = steps_of(config_for(tmp_path), with_workbench=True)
    after = steps_of(config_for(tmp_path, native_compiler=False), with_workbench=True)
    assert [name for name in before if before[name].inputs != after[name].inputs] == ["qpu-ops"]


def test_no_compiler_is_mounted_if_it_is_switched_off(tmp_path: Path) -> None:
    assert native_compiler(Context(config_for(tmp_path, native_compiler=False))).binds() == []


# Inputs.


def test_another_mmdebstrap_rebuilds_the_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs() -> dict[str, str]:
        steps = steps_of(config_for(tmp_path / "build"), with_workbench=True)
        return {name: step.inputs.get("mmdebstrap", "") for name, step in steps.items()}

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
        assert rootfs.program_fingerprint() == "absent", "planning must not require mmdebstrap"


def test_recorded_sources_omit_default_values(tmp_path: Path) -> None:
    """The records are part of the mirror's product, so changed records would make every dependent step run again."""
    sources = apt.sources_for(load_config({"image": {"kernel": "raspberrypi"}}), tmp_path)
    records = [record_of(item) for item in sources]
    assert {frozenset(item) for item in records[:3]} == {
        frozenset(("pocket", "uri", "components", "keyring", "architectures"))
    }
    assert {*records[3]} > {"archive", "only", "keyring_in_root"}
    assert tuple(map(source_of, json.loads(json.dumps(records)))) == sources


# Full disks.


def test_a_disk_that_fills_up_while_a_wheel_is_unpacked(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", {"thing.bin": os.urandom(3 << 20)})
    with small_disk(tmp_path / "disk", "2m") as disk, Context(config_for(disk)) as context:
        with pytest.raises(DiskFull, match=f"no room for the contents of {wheel.name}") as caught:
            stage_wheels(context, [wheel], context.root / "site", context.root / "site.tar")
        assert str(context.root) in caught.value.expected
        assert list(context.root.iterdir()) == []
        tar = tmp_path / "large.tar"
        files.pack(wheel.parent, tar, epoch=1000)
        with pytest.raises(DiskFull, match=r"no room for the contents of large\.tar"):
            files.unpack(tar, disk / "large")


# Plans.


def test_the_development_root_can_be_requested_by_name(tmp_path: Path) -> None:
    decisions = main_job.plan(config_for(tmp_path), only=["dev"])
    assert [item.step.name for item in decisions] == ["mirror", "tools", "dev"]
    assert all(item.runs for item in decisions)


def test_the_workbench_can_be_requested_by_name(tmp_path: Path) -> None:
    decisions = {item.step.name: item for item in main_job.plan(config_for(tmp_path), again=["workbench"])}
    assert {"dev", "workbench", "system"} <= set(decisions)
    assert decisions["workbench"].forced
    assert not decisions["dev"].forced


def test_an_unknown_step_is_rejected_with_the_valid_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main_job.plan(config_for(tmp_path), only=["rootf"], again=["libcpu"])
    valid = ", ".join(steps_of(config_for(tmp_path)))
    assert caught.value.faults == (f"no step 'libcpu'; valid: {valid}", f"no step 'rootf'; valid: {valid}")
    with pytest.raises(ConfigError, match=r"no step 'x'; valid: mirror, .*, dev, .*, workbench"):
        main_job.plan(config_for(tmp_path), only=["dev", "x"])


def test_again_rejects_steps_that_only_does_not_select(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main_job.plan(config_for(tmp_path), only=["libqpu"], again=["system", "libqpu", "mirror"])
    assert caught.value.faults == ("--again=system: expected a step that --only selects",)
    config = load_config({"build": {"folder": str(tmp_path)}, "torch": {"from_source": True}})
    assert main_job.plan(config, only=["libqpu"])[-1].step.name == "libqpu"


@pytest.mark.parametrize("image", [{}, {"flavour": "raspbian"}, {"kernel": "raspberrypi"}])
def test_planning_creates_no_file_and_sends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: dict[str, str]
) -> None:
    requested: list[str] = []
    monkeypatch.setattr("requests.get", lambda url, **_: requested.append(url))
    decisions = main_job.plan(load_config({"image": image, "build": {"folder": str(tmp_path / "build")}}))
    assert decisions[0].step.name == "mirror"
    assert decisions[0].runs
    assert (requested, (tmp_path / "build").exists()) == ([], False)


def test_a_missing_key_is_fetched_again_by_the_mirror_step(tmp_path: Path) -> None:
    config = load_config({"image": {"flavour": "raspbian"}, "build": {"folder": str(tmp_path)}})
    step = steps_of(config)["mirror"]
    context = Context(config)
    (context.root / "mirror" / "lists").mkdir(parents=True)
    manifest = Manifest(step="mirror", key="", inputs={})
    assert step.missing(manifest) == "the key of an archive is missing"
    context.keyrings.mkdir()
    (context.keyrings / "raspbian.gpg").touch()
    assert step.missing(manifest) == ""


def test_all_targets_share_the_mirror_of_shared_tools(tmp_path: Path) -> None:
    """If a target used the tools' folder with other sources, the steps of both would run again after each switch."""
    mirrors = set()
    for architecture in {"armhf", "arm64"} - {host_architecture().debian}:
        for kernel in ("distribution", "raspberrypi"):
            image = {"architecture": architecture, "kernel": kernel}
            config = load_config({"build": {"folder": str(tmp_path)}, "image": image})
            shared = Context(for_all_targets(config, "trixie"))
            assert shared.root != config.target_root
            mirrors.add((shared.root, *mirror.step(shared).inputs.items()))
    assert len(mirrors) == 1


@pytest.mark.parametrize("flavour", ["debian", "raspbian"])
def test_debian_tools_do_not_use_a_mirror_of_raspbian(tmp_path: Path, flavour: str) -> None:
    given = f"http://mirror.example/{flavour}"
    config = load_config({"build": {"folder": str(tmp_path)}, "image": {"flavour": flavour, "mirror": given}})
    for other in (for_all_targets(config, "trixie"), cuda_job.context_of(config).config):
        uris = {item.uri for item in apt.sources_for(other, tmp_path)}
        assert (given in uris) == (flavour == "debian")


@pytest.mark.parametrize("runs", [True, False])
def test_the_plan_from_source_starts_with_torchs_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: bool
) -> None:
    def step(name: str) -> Step:
        return Step(name=name, title=name, inputs={}, action=lambda _: Made())

    def decided(config: object) -> list[Decision]:
        del config
        return [Decision(step(name), {}, runs, "a reason", None) for name in ("mirror", "torch-builder", "torch-wheel")]

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


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the engine's start and torch's build; return a list to which they add their names. The user is root."""
    names: list[str] = []
    monkeypatch.setattr(main_job, "ensure_running", lambda _: names.append("engine"))
    monkeypatch.setattr(torch_job, "build_torch", lambda config: names.append(f"torch {config.torch.variant}"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return names


def test_from_source_torch_is_built_before_the_image_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: list[str]
) -> None:
    """The image's plan must use the newly built torch wheel."""

    class Enough(Exception):
        pass

    def plan(*_: object, **__: object) -> object:
        done.append("plan")
        raise Enough

    monkeypatch.setattr(main_job, "plan", lambda *_, **__: [])
    monkeypatch.setattr(main_job, "_pipeline", plan)
    for from_source, expected in ((True, ["engine", "torch neon", "plan"]), (False, ["engine", "plan"])):
        done.clear()
        settings = {"build": {"folder": str(tmp_path)}, "torch": {"from_source": from_source}}
        with pytest.raises(Enough):
            main_job.build_image(load_config(settings))
        assert done == expected


def test_an_unknown_step_is_rejected_before_torch_is_built(tmp_path: Path, done: list[str]) -> None:
    config = load_config({"build": {"folder": str(tmp_path / "build")}, "torch": {"from_source": True}})
    for only, again in ((["none"], []), ([], ["none"]), (["libqpu"], ["system"])):
        with pytest.raises(ConfigError):
            main_job.build_image(config, only=only, again=again)
    assert (done, (tmp_path / "build").exists()) == ([], False)


# Permissions.


@pytest.fixture
def public() -> Iterator[Path]:
    """Make a folder with write permission for all users."""
    with tempfile.TemporaryDirectory(prefix="pitorch-rights-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def as_nobody(checkout: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``./inv`` with these arguments as an ordinary user."""
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
def test_an_ordinary_user_needs_sudo_before_anything_changes(
    open_checkout: Path, public: Path, words: list[str], titles: str, fix: str
) -> None:
    ended = as_nobody(open_checkout, *words, folder=public)
    assert ended.returncode == 28, ended.stderr
    assert f"root is needed to set the owners of files {titles}" in ended.stderr
    assert "found:    user id 65534" in ended.stderr
    kept = "--preserve-env=DOCKER_HOST,INVOKE_BUILD_FOLDER"
    assert ended.stderr.rstrip().endswith(f"fix:      sudo {kept} {fix}"), (
        "the fix must contain the whole command line and the variables"
    )
    assert "Traceback" not in ended.stderr
    assert not (public / "build").exists()


@needs_root
def test_an_ordinary_user_can_see_the_plan(open_checkout: Path, public: Path) -> None:
    ended = as_nobody(open_checkout, "build-image", "--plan", folder=public)
    assert ended.returncode == 0, ended.stderr
    assert "root filesystem" in ended.stdout


def small_root(folder: Path) -> rootfs.RootSpec:
    return rootfs.RootSpec(
        role="small",
        suite="trixie",
        architectures=(host_architecture().debian,),
        packages=("base-files",),
        sources=(),
        lists=folder / "lists",
        archives=folder / "archives",
        source_date_epoch=0,
    )


@needs_root
def test_building_a_root_requires_root(public: Path) -> None:
    spec = small_root(public)
    os.seteuid(65534)
    try:
        builds: tuple[Callable[[], object], ...] = (
            lambda: rootfs.build_native_tar(spec, public / "root.tar", public / "logs" / "log"),
            lambda: rootfs.build_tar(spec, public / "root.tar", public / "logs" / "log"),
        )
        for build in builds:
            with pytest.raises(RootNeeded, match="files in the small root") as caught:
                build()
            assert caught.value.fix.startswith("sudo ./inv")
    finally:
        os.seteuid(0)
    assert list(public.iterdir()) == []


@needs_root
def test_leftovers_of_the_same_process_id_do_not_matter(tmp_path: Path) -> None:
    """In a container, a process can have the same ID as one in an earlier run."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    (tmp_path / f".root.tar.{os.getpid()}.scratch").mkdir()
    (tmp_path / "lists").mkdir()
    spec = small_root(tmp_path)
    with pytest.raises(CommandFailed, match="the small root"):  # fails, because there are no package sources
        rootfs.build_native_tar(spec, tmp_path / "root.tar", tmp_path / "log")
    left = {f".root.tar.{os.getpid()}.scratch", "archives", "lists", "log"}
    assert {path.name for path in tmp_path.iterdir()} == left
