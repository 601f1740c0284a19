"""Tests of updates to the extension's previous build: recompilation, invalid records, and the resulting wheel."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from container_builds import container_and_cross_builds_agree

from flow import main_job
from flow.context import Context
from flow.steps import qpu_ops
from recipes import recipe
from recipes.qpu_ops import incremental, target
from toolchain.config import Config
from toolchain.errors import CommandFailed
from toolchain.manifest import Manifest

COMPILERS = ("g++", "arm-linux-gnueabihf-g++")

TREE = {
    "csrc/one.cpp": '#include "both.h"\nint one() { return FIRST; }\n',
    "csrc/two.cpp": "int two() { return 2; }\n",
    "csrc/both.h": "#define FIRST 1\n",
    "csrc/other/three.cpp": '#include "part.cpp"\nint three() { return THIRD + part(); }\n',
    "csrc/other/part.cpp": '#include "own.h"\nint part() { return 30; }\n',
    "csrc/other/own.h": "#define THIRD 3\n",
    "src/module.py": "NUMBER = 1\n",
    "setup.py": "",
}


def compiler() -> str:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no compiler: none of {', '.join(COMPILERS)} is installed")
    return found


class Build:
    """A recipe that a real compiler on this PC builds in a folder, and the record of the last build."""

    def __init__(self, folder: Path) -> None:
        self.recipe, self.out = folder / "recipe", folder / "out"
        self.out.mkdir()
        self.previous = incremental.PreviousBuild(folder / "previous")
        self.ran: list[Sequence[str]] = []
        for name, text in TREE.items():
            (self.recipe / name).parent.mkdir(parents=True, exist_ok=True)
            (self.recipe / name).write_text(text)
        cxx = compiler()
        self.commands = [
            [cxx, "-fPIC", "-c", "csrc/one.cpp", "-o", "build/one.o"],
            [cxx, "-fPIC", "-c", "csrc/two.cpp", "-o", "build/two.o"],
            [cxx, "-shared", "build/one.o", "build/two.o", "-o", "build/_native.so", "-Wl,-s"],
            [cxx, "-fPIC", "-c", "csrc/other/three.cpp", "-o", "build/three.o"],
            [cxx, "-shared", "build/three.o", "-o", "build/_other.so", "-Wl,-s"],
        ]

    def full(self, said: Callable[[str], str] = str) -> None:
        """Build everything and record the build; ``said`` can modify the recorded output."""
        shutil.copytree(self.recipe, self.previous.source)
        (self.previous.source / "build").mkdir()
        self._execute(self.commands)
        wheel = self.out / "trial-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as sink:
            sink.write(self.previous.source / "src/module.py", "module.py")
            sink.write(self.previous.source / "build/_native.so", "trial/_native.so")
            sink.write(self.previous.source / "build/_other.so", "other/_other.so")
            sink.writestr("trial-1.0.dist-info/METADATA", "Name: trial\n")
            sink.writestr("trial-1.0.dist-info/RECORD", "of the full build\n")
        printed = "\n".join(["running build_ext", *map(shlex.join, self.commands), "done"])
        self.previous.remember("as ever", said(printed), wheel)
        wheel.unlink()

    def rebuild(self, surroundings: str = "as ever") -> Path | None:
        """Update the previous build. Return the wheel, or None if the record cannot be used."""
        self.ran = []
        return self.previous.rebuild(self.recipe, surroundings, self._execute, self.out)

    def _execute(self, commands: Sequence[Sequence[str]]) -> None:
        for words in commands:
            self.ran.append(words)
            done = subprocess.run(words, cwd=self.previous.source, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CommandFailed("the compiler", tail=done.stderr)

    def compiled(self) -> list[str]:
        """Return the sources that the last rebuild compiled, and "link" for each link step."""
        return [words[words.index("-c") + 1] if "-c" in words else "link" for words in self.ran]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    made = Build(tmp_path)
    made.full()
    return made


def change(build: Build, name: str, old: str, new: str) -> None:
    text = (build.recipe / name).read_text()
    assert old in text
    (build.recipe / name).write_text(text.replace(old, new))


def products(build: Build) -> list[bytes]:
    """Return the contents of the objects and modules."""
    return [path.read_bytes() for path in sorted((build.previous.source / "build").iterdir())]


def test_only_a_changed_source_is_compiled_and_linked(build: Build) -> None:
    change(build, "csrc/two.cpp", "return 2", "return 22")
    wheel = build.rebuild()
    assert wheel is not None
    assert build.compiled() == ["csrc/two.cpp", "link"]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("trial/_native.so") == (build.previous.source / "build/_native.so").read_bytes()
        assert archive.testzip() is None
    assert build.rebuild() is not None
    assert build.compiled() == [], "an up-to-date build must not compile anything"


def test_a_build_with_garbled_output_is_not_recorded(tmp_path: Path) -> None:
    made = Build(tmp_path)
    made.full(lambda text: text.replace("-o build/two.o\n", "-o build/tw\no.o\n", 1))
    assert made.rebuild() is None


def test_a_module_is_linked_when_its_own_sources_changed(build: Build) -> None:
    change(build, "csrc/other/own.h", "THIRD 3", "THIRD 33")
    with zipfile.ZipFile(build.previous.folder / "trial-1.0-py3-none-any.whl") as archive:
        before = archive.read("other/_other.so"), archive.read("trial/_native.so")
    wheel = build.rebuild()
    assert wheel is not None
    assert build.compiled() == ["csrc/other/three.cpp", "link"]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("other/_other.so") != before[0]
        assert archive.read("trial/_native.so") == before[1]


def test_a_changed_included_source_recompiles_the_includer(build: Build) -> None:
    change(build, "csrc/other/part.cpp", "return 30", "return 40")
    assert build.rebuild() is not None
    assert build.compiled() == ["csrc/other/three.cpp", "link"]


def test_a_changed_header_recompiles_its_folder(build: Build) -> None:
    change(build, "csrc/both.h", "FIRST 1", "FIRST 11")
    assert build.rebuild() is not None
    assert build.compiled() == ["csrc/one.cpp", "csrc/two.cpp", "link"]


def test_a_changed_python_module_compiles_nothing(build: Build) -> None:
    change(build, "src/module.py", "1", "2")
    wheel = build.rebuild()
    assert wheel is not None
    assert build.compiled() == []
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("module.py") == b"NUMBER = 2\n"
        record = archive.read("trial-1.0.dist-info/RECORD").decode().splitlines()
    assert record[0].startswith("module.py,sha256=")
    assert record[-1] == "trial-1.0.dist-info/RECORD,,"
    assert len(record) == 5


def test_only_failed_sources_are_compiled_after_an_error(build: Build) -> None:
    change(build, "csrc/one.cpp", "return FIRST", "return nothing")
    for _ in range(2):
        with pytest.raises(CommandFailed) as caught:
            build.rebuild()
        assert "nothing" in caught.value.tail
        assert build.compiled() == ["csrc/one.cpp"]
    change(build, "csrc/one.cpp", "return nothing", "return FIRST")
    assert build.rebuild() is not None
    assert build.compiled() == ["csrc/one.cpp", "link"]
    assert build.rebuild() is not None
    assert build.compiled() == []


@pytest.mark.parametrize("finished", range(4))
@pytest.mark.parametrize("is_reverted", [False, True])
def test_an_interrupted_update_can_be_continued(build: Build, finished: int, is_reverted: bool) -> None:
    """Both modules are outdated: two sources are compiled, then both modules are linked."""
    sources = ("csrc/two.cpp", "return 2"), ("csrc/other/own.h", "THIRD 3")
    for name, text in sources:
        change(build, name, text, f"{text}2")

    def interrupted(commands: Sequence[Sequence[str]]) -> None:
        build._execute(commands[:finished])
        (build.previous.source / commands[finished][commands[finished].index("-o") + 1]).write_text("incomplete")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.previous.rebuild(build.recipe, "as ever", interrupted, build.out)
    for name, text in sources if is_reverted else ():
        change(build, name, f"{text}2", text)
    assert build.rebuild() is not None
    assert build.compiled() == ["csrc/two.cpp", "csrc/other/three.cpp", "link", "link"]
    updated = products(build)
    build._execute(build.commands)
    assert products(build) == updated


def content_after_interruption(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str, interrupted: Callable[..., object]
) -> bytes:
    """Interrupt a rebuild in ``shutil``'s function ``name``. Return a module of the wheel from the next rebuild."""
    monkeypatch.setattr(shutil, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.rebuild()
    monkeypatch.undo()
    wheel = build.rebuild()
    assert wheel is not None
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return archive.read("module.py")


@pytest.mark.parametrize("copied", range(3))
def test_an_interrupted_copy_is_repeated(build: Build, monkeypatch: pytest.MonkeyPatch, copied: int) -> None:
    for name, text in (("csrc/both.h", "FIRST 1"), ("csrc/two.cpp", "return 2"), ("src/module.py", "1")):
        change(build, name, text, f"{text}0")
    real = shutil.copyfile
    done: list[Path] = []

    def interrupted(source: Path, target: Path) -> Path:
        if len(done) == copied:
            target.write_text("incomplete")
            raise KeyboardInterrupt
        done.append(source)
        return real(source, target)

    assert content_after_interruption(build, monkeypatch, "copyfile", interrupted) == b"NUMBER = 10\n"
    updated = products(build)
    build._execute(build.commands)
    assert products(build) == updated


def test_an_interrupted_copy_of_the_wheel_is_repeated(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:100])
        raise KeyboardInterrupt

    assert content_after_interruption(build, monkeypatch, "copy2", interrupted) == b"NUMBER = 1\n"


@pytest.mark.parametrize(
    "spoil",
    ["surroundings", "new file", "gone file", "no copy", "no module", "torn record", "no record", "no wheel"],
)
def test_an_unusable_record_leads_to_a_full_build(build: Build, spoil: str) -> None:
    surroundings = "as ever"
    if spoil == "surroundings":
        surroundings = "another torch"
    elif spoil == "new file":
        (build.recipe / "csrc/three.cpp").write_text("int three;\n")
    elif spoil == "gone file":
        (build.recipe / "csrc/both.h").unlink()
    elif spoil == "no copy":
        (build.previous.source / "csrc/both.h").unlink()
    elif spoil == "no module":
        (build.previous.source / "build/_other.so").unlink()
    elif spoil == "torn record":
        (build.previous.folder / "build.json").write_text('{"wheel": "tri')
    elif spoil == "no record":
        (build.previous.folder / "build.json").unlink()
    else:
        next(build.previous.folder.glob("*.whl")).unlink()
    assert build.rebuild(surroundings) is None
    assert build.ran == []


def test_a_missing_object_is_compiled_again(build: Build) -> None:
    (build.previous.source / "build/one.o").unlink()
    assert build.rebuild() is not None
    assert build.compiled() == ["csrc/one.cpp", "link"]


def test_surroundings_exclude_only_the_sources(tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = incremental.surroundings(tmp_path, "torch 1")
    (tmp_path / "csrc/one.cpp").write_text("changed")
    assert incremental.surroundings(tmp_path, "torch 1") == before
    assert incremental.surroundings(tmp_path, "torch 2") != before
    (tmp_path / "setup.py").write_text("changed")
    assert incremental.surroundings(tmp_path, "torch 1") != before


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
def test_a_rebuild_installs_what_a_full_build_installs(
    product_config: Config, built: main_job.Built, tmp_path: Path
) -> None:
    if not built.manifest("torch-site").facts["version"]:
        pytest.skip("the extension cannot be built: no torch wheel is available")
    data = recipe.load("qpu_ops")
    copy = tmp_path / "qpu_ops"
    shutil.copytree(data.folder, copy, ignore=shutil.ignore_patterns("__pycache__", "build"))

    def members(wheel: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(wheel) as archive:
            return {member: archive.read(member) for member in archive.namelist()}

    def wheel(folder: str) -> dict[str, bytes]:
        with Context(product_config) as context:
            made = target.build(
                context.client,
                qpu_ops.place(context, {item.step: item for item in built.manifests}),
                replace(data, folder=copy),
                product_config,
                suite=context.suite,
                torch_site=context.torch_site,
                libqpu=context.libqpu_stage,
                libqpu_prefix=built.manifest("libqpu").facts["prefix"],
                folder=tmp_path / folder,
                log=tmp_path / f"{folder}.log",
                surroundings=(built.manifest("torch-site").product,),
                reuse=True,
            )
        return members(made)

    def rebuild(folder: str) -> dict[str, bytes]:
        made = wheel(folder)
        log = (tmp_path / f"{folder}.log").read_text()
        assert "build_with_installed_torch" not in log, "the whole extension was built, not only the changes"
        assert "csrc/kernels.cpp" in log
        assert "csrc/bindings.cpp" not in log
        return made

    full = members(product_config.target_root / "wheels" / built.manifest("qpu-ops").facts["wheel"])
    kernels = copy / "csrc/kernels.cpp"
    original = kernels.read_text()
    changed = original.replace("return x + y;", "return x + y + 7.0f;")
    assert changed != original
    kernels.write_text(changed)
    rebuilt = rebuild("changed")
    libraries = [name for name in full if name.endswith(".so")]
    assert {Path(name).parent.name for name in libraries} == {"qpu_ops", "torch_qpu"}
    changed_libraries = [name for name in libraries if rebuilt[name] != full[name]]
    assert [Path(name).parent.name for name in changed_libraries] == ["qpu_ops"]
    kernels.write_text(original)
    assert rebuild("original") == full, "a rebuild must give the same files as the main job's full build"
    kept = json.loads((product_config.target_root / "work/qpu-ops-previous/build.json").read_text())
    sources = list((copy / "csrc").rglob("*.cpp"))
    included = {line.split('"')[1] for path in sources for line in path.read_text().splitlines() if '.cpp"' in line}
    assert "operators.cpp" in included
    wanted = {path.stem for path in sources if path.name not in included}
    assert {Path(item).stem for item in kept["objects"]} == wanted >= {"bindings", "kernels", "aten"}


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.expensive)])
def test_native_and_cross_builds_give_the_same_wheel(
    product_config: Config, workbench: Mapping[str, Manifest], tmp_path: Path, small: bool
) -> None:
    """Only the weekly run compiles the complete extension a second time."""
    if not workbench["torch-site"].facts["version"]:
        pytest.skip("the extension cannot be built: no torch wheel is available")
    container_and_cross_builds_agree(product_config, workbench, tmp_path, small=small)
