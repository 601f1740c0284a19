"""Tests of apache-tvm-ffi for armv7: its real source, the recipe, the audit, and the build."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import docker
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from remote_kernels import export
from wheel_parts import EM_ARM, FOR_OTHER_MACHINES, HARD, elf, make_wheel

from engine.containers import run_in
from flow import main_job, pipelines, tvm_ffi_job
from flow import share_artefacts as share
from flow.context import Context
from images.flavour import load_suite
from recipes import recipe
from recipes.recipe import Recipe
from recipes.tvm_ffi import build, locate, source
from recipes.tvm_server import build as tvm_server
from toolchain import files
from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import Config, load_config
from toolchain.errors import (
    ArtefactDamaged,
    ArtefactMissing,
    NetworkUnreachable,
    PlatformMismatch,
    RecipeInvalid,
    SourceUnavailable,
    WheelUnusable,
)
from toolchain.steps import Made, Pipeline, Step
from wheels import artefacts
from wheels import build as build_any

TRIXIE = load_suite("trixie")
DATA = recipe.load("tvm_ffi")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Fetch the real source archive and the folder with its build tools."""
    folder = tmp_path_factory.mktemp("sources")
    try:
        tools = source.tools(DATA, TRIXIE, folder, folder / "pip.log")
        return source.obtain(DATA, tools, folder, folder / "pip.log"), tools
    except NetworkUnreachable as fault:
        pytest.skip(f"no network: {fault.found}")


@pytest.fixture(scope="module")
def unpacked(fetched: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the archive."""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "--extract", "--file", fetched[0], "--directory", folder], check=True)
    (root,) = folder.iterdir()
    return root


def changed(**settings: str) -> Recipe:
    return dataclasses.replace(DATA, settings={**DATA.settings, **settings})


def test_the_version_is_that_of_the_kernel_compiler() -> None:
    assert f"{DATA.settings['distribution']}=={DATA.settings['version']}" in tvm_server.pins()


def test_the_tools_satisfy_the_requirements_of_the_source(unpacked: Path) -> None:
    stated = tomllib.loads((unpacked / "pyproject.toml").read_text())["build-system"]
    assert stated["build-backend"] == "scikit_build_core.build"
    pins = {pin.name: next(iter(pin.specifier)).version for pin in map(Requirement, DATA.settings["tools"].split())}
    for wanted in map(Requirement, stated["requires"]):
        assert pins[wanted.name] in wanted.specifier, wanted


def test_the_source_matches_the_recipe(unpacked: Path) -> None:
    message = Parser().parsestr((unpacked / "PKG-INFO").read_text())
    assert (message["Name"], message["Version"]) == (DATA.settings["distribution"], DATA.settings["version"])
    assert TRIXIE.python in SpecifierSet(message["Requires-Python"])
    needed = {Requirement(item).name for item in message.get_all("Requires-Dist", []) if "extra" not in item}
    assert {f"python3-{name}" for name in needed} <= set(TRIXIE.torch_python)
    cmake = (unpacked / "CMakeLists.txt").read_text()
    for name in DATA.tables["options"]:
        assert name.startswith("CMAKE_") or name in cmake, name


def test_the_patches_apply_to_the_source(unpacked: Path) -> None:
    patches = sorted((DATA.folder / "patches").glob("*.patch"))
    assert patches
    for path in patches:
        words = ["patch", "--dry-run", "--strip=1", "--forward", "--batch", "--fuzz=0", f"--input={path}"]
        done = subprocess.run(words, cwd=unpacked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("suite", "newest"), [("trixie", 41), ("bookworm", 36)])
def test_tools_for_a_newer_glibc_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, newest: int
) -> None:
    """The tools run in a container of the release ``suite``, so they must not require a newer glibc."""
    release, platform = load_suite(suite), host_architecture().wheel_platform.removeprefix("linux_")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for glibc in (newest, newest + 1):
        tag = f"{release.python_tag}-{release.python_tag}-manylinux_2_{glibc}_{platform}"
        make_wheel(tmp_path, {"thing.py": ""}, name=f"of{glibc}", tag=tag)
    found = source.tools(changed(tools=f"of{newest}==1.0"), release, tmp_path / "kept", tmp_path / "log")
    assert (found / "thing.py").is_file()
    with pytest.raises(SourceUnavailable, match=f"does not have of{newest + 1}"):
        source.tools(changed(tools=f"of{newest + 1}==1.0"), release, tmp_path / "kept", tmp_path / "log")
    assert list((tmp_path / "kept").iterdir()) == [found]


def test_the_source_archive_is_checked_on_every_use(fetched: tuple[Path, Path], tmp_path: Path) -> None:
    archive, tools = fetched
    kept = tmp_path / archive.name
    shutil.copy(archive, kept)
    assert source.obtain(DATA, tools, tmp_path, tmp_path / "pip.log") == kept
    assert not (tmp_path / "pip.log").exists()
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(SourceUnavailable) as caught:
        source.obtain(DATA, tools, tmp_path, tmp_path / "pip.log")
    assert DATA.settings["sha256"] in caught.value.expected
    assert str(kept) in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "message"), [({"sha256": "0" * 64}, "a different file"), ({"version": "0.0.99"}, "does not have")]
)
def test_another_source_is_rejected_and_removed(
    fetched: tuple[Path, Path], tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SourceUnavailable, match=message) as caught:
        source.obtain(changed(**settings), fetched[1], tmp_path, tmp_path / "pip.log")
    if "sha256" in settings:
        assert caught.value.found == DATA.settings["sha256"]
    assert [path.name for path in tmp_path.iterdir()] == ["pip.log"]


def test_without_a_network_no_file_remains(tmp_path: Path, unreachable_index: None) -> None:
    """The test runs the real pip with an unreachable index."""
    log = tmp_path / "pip.log"
    actions: tuple[Callable[[], object], ...] = (
        lambda: source.tools(DATA, TRIXIE, tmp_path, log),
        lambda: source.obtain(DATA, tmp_path, tmp_path, log),
    )
    for action in actions:
        with pytest.raises(NetworkUnreachable) as caught:
            action()
        assert "https_proxy" in caught.value.fix
        assert [path.name for path in tmp_path.iterdir()] == ["pip.log"]


def test_unsupported_targets_are_rejected_with_a_fix(tmp_path: Path) -> None:
    for image, kind, message in (
        ({"architecture": "arm64"}, PlatformMismatch, "pip install apache-tvm-ffi=="),
        ({"suite": "bookworm"}, RecipeInvalid, "set image.suite to trixie"),
    ):
        config = load_config({"image": image, "build": {"folder": str(tmp_path / "build")}})
        with pytest.raises(kind) as caught:
            tvm_ffi_job.build_tvm_ffi(config)
        assert message in caught.value.fix
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(("contents", "tag", "kind", "message"), FOR_OTHER_MACHINES)
def test_a_wheel_for_another_machine_is_rejected(
    tmp_path: Path, contents: dict[str, bytes], tag: str, kind: type[Exception], message: str
) -> None:
    wheel = make_wheel(tmp_path, contents, name="apache_tvm_ffi", tag=tag)
    with pytest.raises(kind) as caught:
        build.examine(wheel, ARCHITECTURES["armhf"], TRIXIE)
    assert message in str(caught.value)


@pytest.mark.skipif(shutil.which("arm-linux-gnueabihf-gcc") is None, reason="no cross compiler for armhf")
def test_a_library_with_symbols_or_build_paths_is_rejected(tmp_path: Path) -> None:
    text = tmp_path / "a.c"
    text.write_text(f'const char *where(void) {{ return "{build.HOME}/a.c"; }}\n')
    for options, message in (([], "has a symbol table"), (["-s"], "contains a path from its build")):
        library = tmp_path / "a.so"
        subprocess.run(["arm-linux-gnueabihf-gcc", "-shared", "-fPIC", *options, text, "-o", library], check=True)
        wheel = make_wheel(tmp_path, {"tvm_ffi/a.so": library.read_bytes()}, name="apache_tvm_ffi")
        with pytest.raises(WheelUnusable, match=message):
            build.examine(wheel, ARCHITECTURES["armhf"], TRIXIE)


def fitting(folder: Path, *, version: str = "") -> Path:
    """Make a wheel that passes the audit."""
    library = elf(EM_ARM, flags=HARD, vfp_args=1)
    return make_wheel(
        folder, {"tvm_ffi/a.so": library}, name="apache_tvm_ffi", version=version or DATA.settings["version"]
    )


def configured(tmp_path: Path, **remote: object) -> Config:
    return load_config(
        {"build": {"folder": str(tmp_path / "build")}, "torch": {"wheelhouse": [str(tmp_path / "w")]}, "remote": remote}
    )


def test_the_wheel_is_found_in_wheelhouse_or_artefact_cache(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with pytest.raises(ArtefactMissing) as caught:
        locate.find(config)
    assert "./inv build-tvm-ffi" in caught.value.fix
    key = locate.key(config)
    whole = artefacts.key_of(key, "0" * 64)
    before = locate.listing(config)
    artefacts.put(config, locate.NAME, whole, [fitting(tmp_path / "made")], recipe=key)
    assert locate.listing(config) != before, "the step that uses the wheel must run again"
    wheel, origin = locate.find(config)
    assert (wheel.parent.name, origin) == (whole, "from the artefact cache")
    fitting(tmp_path / "w", version="0.0.9")
    assert locate.find(config)[0] == wheel, "a wheel of another version does not match TVM's kernels"
    ours = fitting(tmp_path / "w")
    assert locate.find(config) == (ours, f"from {ours.parent}")


def test_a_damaged_wheel_is_not_used(tmp_path: Path) -> None:
    config = configured(tmp_path)
    key = locate.key(config)
    (there,) = artefacts.put(config, locate.NAME, artefacts.key_of(key, "1"), [fitting(tmp_path / "made")], recipe=key)
    there.chmod(0o644)
    there.write_bytes(there.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtefactDamaged):
        locate.find(config)
    spoilt = fitting(tmp_path / "w")
    spoilt.write_bytes(spoilt.read_bytes()[:50])
    with pytest.raises(WheelUnusable):
        locate.find(config)


def test_an_unsupported_target_has_no_key(tmp_path: Path) -> None:
    assert locate.key(configured(tmp_path))
    for image in ({"architecture": "arm64"}, {"suite": "bookworm"}):
        config = load_config({"image": image, "build": {"folder": str(tmp_path)}})
        assert locate.key(config) == ""
        with pytest.raises((PlatformMismatch, RecipeInvalid)):
            locate.find(config)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_setting_adds_it_to_the_main_job(tmp_path: Path, wanted: bool) -> None:
    with Context(configured(tmp_path, ffi_in_image=wanted)) as context:
        steps = {step.name: step for step in pipelines.main_job(context).steps}
    assert ("tvm-ffi" in steps) == wanted
    assert ("tvm-ffi" in steps["system"].needs) == wanted
    if wanted:
        assert "python3-typing-extensions" in steps["rootfs"].inputs["packages"], (
            "apache-tvm-ffi depends on typing-extensions"
        )


@pytest.mark.parametrize(("flavour", "warned"), [("debian", False), ("raspbian", True)])
def test_raspbian_images_warn_about_armv7_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flavour: str, warned: bool
) -> None:
    """The warning is the same as for torch's wheel. The manifest records the warning for later runs."""
    fitting(tmp_path / "w")
    make_wheel(tmp_path / "w", {"torch/a.so": elf(EM_ARM, flags=HARD, vfp_args=1)}, name="torch", version="2.6.0")
    config = configured(tmp_path, ffi_in_image=True)
    config = dataclasses.replace(config, image=dataclasses.replace(config.image, flavour=flavour))
    with Context(config) as context:
        wanted = [step for step in pipelines.main_job(context).steps if step.name in ("torch", "tvm-ffi")]
        tools = Step(
            name="tools", title="native tools", inputs={}, action=lambda _: Made()
        )  # a substitute that does nothing
        pipeline = Pipeline(context.root, (tools, *wanted))
        _, *manifests = pipeline.execute(pipeline.plan())
    shown = " ".join(capsys.readouterr().err.split())
    for wheel, manifest in zip(("torch's wheel", "the wheel of TVM's FFI"), manifests, strict=True):
        message = f"{wheel} is not ARMv6 code: it does not run on a Pi 1, whose CPU does not support newer code"
        assert (message in shown) == warned
        assert (message in manifest.warnings) == warned


def test_pull_artefacts_requests_the_wheel(tmp_path: Path) -> None:
    """The wheel is required if the image contains it; otherwise it is optional."""
    without, given = configured(tmp_path), configured(tmp_path, ffi_in_image=True)
    for config, is_required in ((without, False), (given, True)):
        assert (locate.NAME, locate.key(without), is_required) in share.wanted(config)
    elsewhere = load_config({"image": {"architecture": "arm64"}, "build": {"folder": str(tmp_path)}})
    assert [name for name, _, _ in share.wanted(elsewhere)] == ["torch"]


ON_BOARD = """
python3 -m pip install --quiet --no-deps --no-index --break-system-packages --root-user-action=ignore /wheels/*.whl
cd /kernels
TVM_FFI_DISABLE_TORCH_C_DLPACK=1 python3 - <<'END'
import torch, tvm_ffi
from pitorch import tvm

a, b, c = torch.randn(32, 32), torch.randn(32, 32), torch.zeros(32, 32)
tvm_ffi.load_module("/kernels/plain.so")["gemm"](a, b, c)
assert torch.allclose(c, a @ b, atol=1e-4)
assert torch.equal(torch.from_dlpack(tvm_ffi.from_dlpack(a)), a)

c.zero_()
gemm = tvm.Library("plain.so")["gemm"]
gemm(torch.cat([torch.zeros(1), a.flatten()])[1:].view(32, 32), b, c)
assert torch.allclose(c, a @ b, atol=1e-4)
for action, message in (
    (lambda: gemm(a, b.double(), c), "Mismatched b.dtype"),
    (lambda: tvm.Library("many.so"), "parallel loops"),
):
    try:
        action()
    except tvm.KernelError as fault:
        assert message in str(fault), fault
    else:
        raise SystemExit(f"not refused: {message}")
print("tvm_ffi", tvm_ffi.__version__, "with torch", torch.__version__)
END
"""


@pytest.mark.expensive
@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(7200)
def test_a_board_with_the_wheel_loads_exported_tvm_kernels(
    product_config: Config, built: main_job.Built, client: docker.DockerClient, tmp_path: Path
) -> None:
    if not built.manifest("torch").facts["wheel"]:
        pytest.skip("the image is built without torch: no wheel is available")
    torch = dataclasses.replace(product_config.torch, wheelhouse=(str(tmp_path / "wheels"),))
    config = dataclasses.replace(product_config, torch=torch)
    done = tvm_ffi_job.build_tvm_ffi(config)
    assert done.wheel.path.parent == tmp_path / "wheels"
    assert build_any.audit(done.wheel.path, config) == 3
    assert build_any.libraries_not_included(done.wheel.path) == []
    assert not any(item.runs for item in tvm_ffi_job.plan(config))
    assert locate.find(config)[0] == done.wheel.path
    done.wheel.path.unlink()
    assert files.sha256_of(locate.find(config)[0]) == done.wheel.sha256, "the artefact cache must contain the wheel too"
    done = tvm_ffi_job.build_tvm_ffi(config)
    export(product_config, tmp_path, "armv7")
    message = run_in(
        client,
        product_config.image_reference("system"),
        ["sh", "-euc", ON_BOARD],
        architecture=product_config.image.target,
        binds=[f"{tmp_path}:/kernels:ro", f"{tmp_path / 'wheels'}:/wheels:ro"],
    ).output
    assert f"tvm_ffi {DATA.settings['version']} with torch" in message
