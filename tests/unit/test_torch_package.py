"""Tests of recipes/torch/inside/package on a small wheel with real ARM libraries."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection
from wheel_parts import digest, make_wheel

PACKAGE = Path(__file__).resolve().parents[2] / "recipes" / "torch" / "inside" / "package"
GNU = "arm-linux-gnueabihf"
EPOCH = 1735689600
SYSTEM = ["libc.so.", "libm.so.", "libgcc_s.so.", "ld-linux-armhf.so.", "libstdc++.so."]

CORE = """
#include <omp.h>
int core(void) {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 100; i++) sum += i;
    return sum + omp_get_max_threads();
}
"""
BINDING = "int core(void);\nint binding(void) { return core() + 1; }\n"


def compiled(folder: Path) -> dict[str, bytes]:
    """Compile torch/lib/libcore.so, which uses OpenMP, and its caller torch/_C.so, which needlessly links libgomp."""
    compiler = shutil.which(f"{GNU}-gcc")
    assert compiler, "./inv installs the ARM cross compiler"
    (folder / "core.c").write_text(CORE)
    (folder / "binding.c").write_text(BINDING)
    common = ["-g", "-O1", "-shared", "-fPIC", "-Wl,--build-id", "-Wl,--no-as-needed"]
    for argv in (
        [*common, "-fopenmp", "core.c", "-o", "libcore.so"],
        [*common, "binding.c", "-L.", "-lcore", "-lgomp", "-Wl,-rpath,/home/builder/torch", "-o", "_C.so"],
    ):
        subprocess.run([compiler, *argv], cwd=folder, check=True)
    return {
        "torch/__init__.py": b"from ._C import binding\n",
        "torch/lib/libcore.so": (folder / "libcore.so").read_bytes(),
        "torch/_C.so": (folder / "_C.so").read_bytes(),
    }


def packaged(wheel: Path, out: Path, *, system: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    out.mkdir()
    wanted = {"gnu": GNU, "system": SYSTEM if system is None else system, "epoch": EPOCH}
    # In a build this is the container's Python; here it is the Python of the tests, which also has pyelftools.
    return subprocess.run(
        [sys.executable, PACKAGE, wheel, out, json.dumps(wanted)], capture_output=True, text=True, timeout=120
    )


def dynamic(content: bytes) -> dict[str, list[str]]:
    """Return the required libraries, soname and search path of an ELF file."""
    dynamic_tags: dict[str, list[str]] = {"needed": [], "soname": [], "runpath": [], "rpath": []}
    section = ELFFile(io.BytesIO(content)).get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    for tag in section.iter_tags():
        kind = tag.entry.d_tag.removeprefix("DT_").lower()
        if kind in dynamic_tags:
            dynamic_tags[kind].append(getattr(tag, kind))
    return dynamic_tags


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def made(contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the products; return their folder."""
    folder = tmp_path_factory.mktemp("package")
    wheel = make_wheel(folder, contents, name="torch", version="2.6.0")
    done = packaged(wheel, folder / "out")
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "out"


def members(folder: Path) -> dict[str, bytes]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_libraries_missing_on_the_system_are_bundled(made: Path) -> None:
    inside = members(made)
    (name,) = [member for member in inside if member.startswith("torch.libs/")]
    origin = Path(f"/usr/{GNU}/lib/libgomp.so.1")
    vendored = name.removeprefix("torch.libs/")
    assert vendored == f"libgomp-{hashlib.sha256(origin.read_bytes()).hexdigest()[:8]}.so.1"
    assert dynamic(inside[name])["soname"] == [vendored]
    core, binding = dynamic(inside["torch/lib/libcore.so"]), dynamic(inside["torch/_C.so"])
    assert vendored in core["needed"]
    assert core["runpath"] == ["$ORIGIN/../../torch.libs"]
    assert "libcore.so" in binding["needed"]
    assert not [name for name in binding["needed"] if "gomp" in name], (
        "_C.so must not link libgomp, because it uses no symbol of it"
    )
    assert binding["runpath"] == ["$ORIGIN/lib"], "the search path must not contain a folder of the build"
    (dynamic_tags,) = json.loads((made / "vendored.json").read_text())
    assert (dynamic_tags["name"], dynamic_tags["origin"]) == (vendored, origin.resolve().name)
    assert dynamic_tags["package"].startswith("libgomp1-armhf-cross=")


def test_a_debugger_finds_the_symbols_by_build_id(made: Path, contents: dict[str, bytes]) -> None:
    inside = members(made)
    with tarfile.open(next(made.glob("*.symbols.tar.xz"))) as archive:
        symbols = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        assert {member.mtime for member in archive} == {EPOCH}
    for name in ("torch/lib/libcore.so", "torch/_C.so"):
        whole, ours = ELFFile(io.BytesIO(contents[name])), ELFFile(io.BytesIO(inside[name]))
        for section in (".debug_info", ".symtab"):
            assert whole.get_section_by_name(section) is not None
            assert ours.get_section_by_name(section) is None
        identity = ours.get_section_by_name(".note.gnu.build-id")
        assert isinstance(identity, NoteSection)
        note = next(identity.iter_notes())["n_desc"]
        split = ELFFile(io.BytesIO(symbols.pop(f".build-id/{note[:2]}/{note[2:]}.debug")))
        assert split.get_section_by_name(".debug_info") is not None
    assert symbols == {}


def test_the_record_lists_every_file_with_its_hash(made: Path) -> None:
    inside = members(made)
    record = inside.pop("torch-2.6.0.dist-info/RECORD").decode()
    rows = {name: (stated, size) for name, stated, size in csv.reader(record.splitlines())}
    assert rows.pop("torch-2.6.0.dist-info/RECORD") == ("", "")
    assert rows == {name: (digest(content), str(len(content))) for name, content in inside.items()}
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        assert {entry.date_time for entry in entries} == {time.gmtime(EPOCH)[:6]}
        modes = {entry.filename: entry.external_attr >> 16 for entry in entries}
        assert [entry.filename for entry in entries[:-1]] == sorted(inside, key=Path)
    assert modes["torch/_C.so"] == 0o100755
    assert modes["torch/__init__.py"] == 0o100644


def test_pack_ignores_order_times_and_location(made: Path, contents: dict[str, bytes], tmp_path: Path) -> None:
    """Apart from the compilers' output, two builds of a wheel differ only in these properties."""
    wheel = make_wheel(tmp_path / "elsewhere", contents, name="torch", version="2.6.0")
    turned = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(turned, "w") as target:
        for number, entry in enumerate(reversed(source.infolist())):
            other = zipfile.ZipInfo(entry.filename, (2020, 1, 2 + number, 3, 4, 6))
            other.external_attr = entry.external_attr
            target.writestr(other, source.read(entry))
    assert turned.read_bytes() != wheel.read_bytes()
    done = packaged(turned, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    for path in made.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in made.iterdir()}


def test_a_missing_library_is_reported_by_name(contents: dict[str, bytes], tmp_path: Path) -> None:
    spoilt = contents | {
        "torch/lib/libcore.so": contents["torch/lib/libcore.so"].replace(b"libgomp.so.1", b"libgone.so.1")
    }
    wheel = make_wheel(tmp_path, spoilt, name="torch", version="2.6.0")
    done = packaged(wheel, tmp_path / "out")
    assert done.returncode != 0
    assert "no library libgone.so.1 below" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
