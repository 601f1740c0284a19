"""Tests that root filesystems are reproducible, and identical with and without native programs."""

from __future__ import annotations

import _imp
import dataclasses
import importlib.util
import os
import py_compile
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from registry_parts import small_disk

from flow import roots
from flow.context import Context
from flow.main_job import Built
from images import probe, rootfs
from toolchain import files
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config
from toolchain.errors import CommandFailed, DiskFull, UserError
from toolchain.files import sha256_of

SMALL = ("ca-certificates", "python3", "python3-packaging")


@pytest.fixture(scope="module")
def spec(built: Built, product_config: Config) -> rootfs.RootSpec:
    """Return the specification of a small target root, based on the shared build's verified lists."""
    with Context(product_config) as context:
        made = roots.root_spec(context, "small", SMALL, built.manifest("mirror"), (product_config.image.target,))
        return dataclasses.replace(made, overlays=roots.overlays(context))


@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("packages", [("python3-minimal",), pytest.param(SMALL, marks=pytest.mark.expensive)])
def test_the_same_inputs_give_the_same_tar_emulated_or_not(
    spec: rootfs.RootSpec, product_config: Config, tmp_path: Path, packages: tuple[str, ...]
) -> None:
    """The emulated compilation of the complete standard library takes a minute, so it is a weekly test."""
    spec = dataclasses.replace(spec, packages=packages)
    with Context(product_config) as context:
        natively = dataclasses.replace(spec, native_tools=context.tools)
    # A package that is in the folder of archives but not in the list must not be installed.
    stray = next(
        path for path in (spec.archives.parent / spec.archives.name.replace("small", "tools")).glob("make_*.deb")
    )
    spec.archives.mkdir(parents=True, exist_ok=True)
    shutil.copy2(stray, spec.archives)
    fetched = rootfs.download(natively, tmp_path / "first.download.log")
    assert len(fetched) > 50
    assert all(re.fullmatch(r"[0-9a-f]{64}  [a-z0-9][^/ ]+_(armhf|all)\.deb", line) for line in fetched)
    # The recorded packages are installed. If the record does not match the files, apt is called again.
    unfit = (f"{'0' * 64}  {stray.name}",)
    digests = {}
    for name, wanted in (
        ("native", dataclasses.replace(natively, fetched=fetched)),
        ("emulated", dataclasses.replace(spec, fetched=unfit)),
    ):
        tar = tmp_path / f"{name}.tar"
        rootfs.build_tar(wanted, tar, tmp_path / f"{name}.log")
        digests[name] = sha256_of(tar)
        with tarfile.open(tar, "r:") as archive:
            assert "./usr/bin/make" not in archive.getnames()
            if name == "native":
                assert checked_by_hash(archive) == []
                assert "copyright" in documents(archive)
                assert documents(archive) <= {"copyright", "locale.alias", "dir"}, (
                    "only locale.alias and dir, which is in no package, are allowed"
                )
                assert "./etc/dpkg/dpkg.cfg.d/lean" in archive.getnames(), (
                    "packages that are installed on the board must omit documentation too"
                )
        tar.unlink()
    assert digests["native"] == digests["emulated"]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(("first", "native", "emul"))] == []
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".uris", ".sums")] == []


def documents(archive: tarfile.TarFile) -> set[str]:
    """Return the names of files in the folders for documentation, manual pages and translations."""
    places = tuple(f"./usr/share/{name}/" for name in ("doc", "info", "lintian", "locale", "man"))
    return {Path(item.name).name for item in archive if item.name.startswith(places) and item.isreg()}


@pytest.mark.emulation
@pytest.mark.timeout(600)
def test_a_large_documented_root_is_built_on_disk(
    spec: rootfs.RootSpec,
    product_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
) -> None:
    """A long image.extra_packages can make a root larger than memory; this test reduces the memory limit instead."""
    monkeypatch.setattr(rootfs, "_MEMORY_FOR_TREE_MIB", 8)
    documented = dataclasses.replace(product_config.image, documentation=True)
    with Context(dataclasses.replace(product_config, image=documented)) as context:
        wanted = dataclasses.replace(
            spec, native_tools=context.tools, overlays=roots.overlays(context), packages=("dash",)
        )
    tar = tmp_path / "documented.tar"
    rootfs.build_tar(wanted, tar, tmp_path / "log")
    with tarfile.open(tar, "r:") as archive:
        assert "./usr/bin/dpkg" in archive.getnames()
        found = documents(archive)
    assert {"copyright", "changelog.Debian.gz", "dash.1.gz", "coreutils.mo"} <= found
    assert warned == ["the small root filesystem does not fit into 8 MiB of memory: building on disk"]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(("documented", "log"))] == []


def test_tests_are_left_out_and_modules_are_compiled(built: Built) -> None:
    """In the root, py3compile would report files that a package lists but that do not exist."""
    with tarfile.open(built.manifest("rootfs").artefact(".tar").path, "r:") as archive:
        modules = {item.name for item in archive if item.isreg() and item.name.endswith((".py", ".pyc"))}
    packages = "./usr/lib/python3/dist-packages"
    for package, lean in (("sympy", True), ("networkx", True), ("mpmath", True), ("numpy", False)):
        mine = {name for name in modules if name.startswith(f"{packages}/{package}/")}
        assert lean == (not any("/tests/" in name for name in mine))
        sources = {name for name in mine if name.endswith(".py")}
        assert len(sources) > 50
        compiled = mine - sources
        assert {name.replace("/__pycache__/", "/").replace(".cpython-313.pyc", ".py") for name in compiled} == sources


def checked_by_hash(archive: tarfile.TarFile) -> list[str]:
    """Find byte code that does not record its source's time stamp and size. More than 100 files must be compiled."""
    members = {item.name: item for item in archive if item.isreg()}
    compiled = [name for name in members if name.endswith(".pyc")]
    assert len(compiled) > 100
    found = []
    for name in compiled:
        content = archive.extractfile(name)
        assert content is not None
        folder, _, file = name.rpartition("/__pycache__/")
        source = members.get(f"{folder}/{file.partition('.')[0]}.py")
        if source is None:  # a link; its target has byte code under its own name
            continue
        if struct.unpack("<III", content.read(16)[4:]) != (0, int(source.mtime), source.size):
            found.append(name)
    return found


def test_only_matching_byte_code_gets_the_source_time(tmp_path: Path) -> None:
    """No byte code is newer than the time stamp, and Python recompiles sources that do not match their byte code."""
    for name, seconds in (("old", 1000), ("new", 9000), ("other", 1000)):
        source = tmp_path / f"{name}.py"
        source.write_text(f"NAME = {name!r}\n")
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        os.utime(source, (seconds, seconds))
    (tmp_path / "other.py").write_text("NAME = 'else'\n")
    (tmp_path / "__pycache__" / f"gone.{sys.implementation.cache_tag}.pyc").write_bytes(b"short")
    # Byte code of another Python version, which uses another hash key.
    source, foreign = tmp_path / "foreign.py", tmp_path / "__pycache__" / "foreign.cpython-999.pyc"
    source.write_text("NAME = 1\n")
    os.utime(source, (1000, 1000))
    foreign.write_bytes(struct.pack("<II", 999, 3) + _imp.source_hash(999, source.read_bytes()))
    script = rootfs.HERE / "hooks" / "date-byte-code"
    done = subprocess.run([script, tmp_path, "5000"], check=True, capture_output=True, text=True)
    assert done.stdout == "3 byte code files changed\n"

    def header(name: str) -> tuple[int, ...]:
        compiled = Path(importlib.util.cache_from_source(str(tmp_path / f"{name}.py")))
        return struct.unpack("<III", compiled.read_bytes()[4:16])

    assert foreign.read_bytes() == struct.pack("<IIII", 999, 0, 1000, len("NAME = 1\n"))
    assert header("old") == (0, 1000, len("NAME = 'old'\n"))
    assert header("new") == (0, 5000, len("NAME = 'new'\n"))
    assert header("other")[0] == 3
    os.utime(tmp_path / "new.py", (5000, 5000))
    seen = "import old, new, other; print(old.NAME, new.NAME, other.NAME)"
    words = [sys.executable, "-B", "-v", "-c", seen]
    done = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "old new else\n"
    taken = {
        name for name in ("old", "new", "other") if f"code object from '{tmp_path}/__pycache__/{name}." in done.stderr
    }
    assert taken == {"old", "new"}


def test_a_damaged_package_is_reported_with_its_fix(tmp_path: Path) -> None:
    """The programs in the pipe detect two kinds of damage: a file that is not a package, and a truncated package."""
    (tmp_path / "whole/DEBIAN").mkdir(parents=True)
    (tmp_path / "whole/DEBIAN/control").write_text(
        "Package: whole\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
    )
    (tmp_path / "whole/data").write_bytes(os.urandom(50_000))
    whole, torn, none = (tmp_path / f"{name}.deb" for name in ("whole", "torn", "none"))
    subprocess.run(["dpkg-deb", "--build", tmp_path / "whole", whole], check=True, capture_output=True)
    torn.write_bytes(whole.read_bytes()[:20_000])
    none.write_bytes(b"x")
    (tmp_path / "tree").mkdir()
    rootfs._extract([whole], tmp_path / "tree", tmp_path / "log")
    assert (tmp_path / "tree/data").read_bytes() == (tmp_path / "whole/data").read_bytes()
    for damaged in (torn, none):
        with pytest.raises(CommandFailed, match="cannot be unpacked") as caught:
            rootfs._extract([whole, damaged], tmp_path / "tree", tmp_path / "log")
        assert damaged.name in caught.value.found + (tmp_path / "log").read_text()
        assert f"remove {tmp_path}" in caught.value.fix


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    """A full disk must not be reported as a damaged package, although dpkg-deb and tar exit with the same statuses."""
    (tmp_path / "large/DEBIAN").mkdir(parents=True)
    (tmp_path / "large/DEBIAN/control").write_text(
        "Package: large\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
    )
    (tmp_path / "large/data").write_bytes(os.urandom(3 << 20))
    package = tmp_path / "large.deb"
    subprocess.run(["dpkg-deb", "--build", tmp_path / "large", package], check=True, capture_output=True)
    with small_disk(tmp_path / "disk", "2m") as disk:
        (disk / "tree").mkdir()
        with pytest.raises(DiskFull, match="no room for the native tools") as caught:
            rootfs._extract([package], disk / "tree", tmp_path / "log")
    assert files.NO_ROOM.search(caught.value.found)
    assert str(disk) in caught.value.expected


def test_a_full_disk_under_the_builder_image_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tools/usr/bin").mkdir(parents=True)
    (tmp_path / "tools/usr/bin/large").write_bytes(os.urandom(3 << 20))
    with small_disk(tmp_path / "disk", "2m") as disk:
        with pytest.raises(DiskFull, match=r"no room for") as caught:
            rootfs.pack_tools(tmp_path / "tools", disk / "builder.tar", epoch=1000)
        assert list(disk.iterdir()) == []
    assert str(disk) in caught.value.expected
    assert "build.folder" in caught.value.fix


def test_all_mounts_of_the_build_are_removed() -> None:
    assert "pitorch" not in {line.split()[0] for line in Path("/proc/mounts").read_text().splitlines()}


def test_the_builder_image_has_no_unused_files(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    wanted = {
        *("usr/bin/cmake", "usr/bin/arm-linux-gnueabihf-g++", "usr/libexec/gcc-cross/arm-linux-gnueabihf/14/cc1plus"),
        *("usr/share/cmake-3.31/Modules/FindThreads.cmake", "usr/lib/python3.13/sysconfig/__init__.py"),
        *("usr/lib/python3.13/_sysconfigdata__arm-linux-gnueabihf.py", "usr/lib/arm-linux-gnueabihf/libc.so.6"),
        # Names that resemble those of excluded files.
        *("usr/lib/python3/dist-packages/library/artisan.py", "usr/lib/python3.13/test/libregrtest/tsan.py"),
        *("usr/lib/python3.13/tools/config-x.py", "usr/lib/arm-linux-gnueabihf/libpartisan.so.1"),
    }
    unwanted = {
        *("usr/bin/cpack", "usr/libexec/gcc-cross/arm-linux-gnueabihf/14/lto1", "usr/share/cmake-3.31/Help/index.rst"),
        *("usr/lib/arm-linux-gnueabihf/libasan.so.8", "usr/lib/arm-linux-gnueabihf/gconv/EUC-JP.so"),
        *(f"usr/lib/{name}/arm-linux-gnueabihf/14/libubsan.a" for name in ("gcc", "gcc-cross")),
        *("usr/arm-linux-gnueabihf/lib/libubsan.so.1", "usr/lib/gcc/aarch64-linux-gnu/14/libhwasan.so"),
        *("usr/lib/python3.13/config-3.13-arm-linux-gnueabihf/libpython3.13.a", "usr/share/locale/de/x.mo"),
        *("var/lib/dpkg/status", rootfs.STANDING_IN, f"{rootfs.STANDING_IN}.packages", "depmod/kmod"),
    }
    for name in (*wanted, *unwanted, "dev/null", "etc/passwd"):
        (tools / name).parent.mkdir(parents=True, exist_ok=True)
        (tools / name).write_text("x")
    rootfs.pack_tools(tools, tmp_path / "first.tar", epoch=1000)
    with tarfile.open(tmp_path / "first.tar", "r:") as archive:
        members = {item.name: item for item in archive}
        passwd = archive.extractfile("etc/passwd")
        assert passwd is not None
        assert passwd.read().startswith(b"root:x:0:0:")
    assert {name for name, item in members.items() if item.isreg()} == {*wanted, "etc/passwd", "etc/group"}
    assert {name: item.linkname for name, item in members.items() if item.issym()} == {
        "bin": "usr/bin",
        "lib": "usr/lib",
    }
    assert members["tmp"].mode == members["var/tmp"].mode == 0o1777
    # The tools' Python interpreter would have written this file if it had run.
    cache = tools / "usr/lib/python3.13/sysconfig/__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-313.pyc").write_text("x")
    (tools / "mnt").mkdir()
    for folder in (cache.parent, tools):
        os.utime(folder, (5000, 5000))
    rootfs.pack_tools(tools, tmp_path / "second.tar", epoch=1000)
    assert sha256_of(tmp_path / "second.tar") == sha256_of(tmp_path / "first.tar")


def test_an_unknown_package_is_named(spec: rootfs.RootSpec, tmp_path: Path) -> None:
    wanted = dataclasses.replace(spec, packages=(*SMALL, "no-such-package-here"))
    with pytest.raises(CommandFailed) as caught:
        rootfs.build_tar(wanted, tmp_path / "root.tar", tmp_path / "root.log")
    assert "no-such-package-here" in caught.value.expected
    assert "extra_packages" in caught.value.fix
    assert not (tmp_path / "root.tar").exists()


def test_foreign_programs_that_do_not_run_are_explained(tmp_path: Path) -> None:
    program = tmp_path / "probe"
    program.write_bytes(probe.elf())
    program.chmod(0o755)
    rootfs.require_execution(ARCHITECTURES["armhf"], program)
    other = bytearray(probe.elf())
    other[18:20] = (0xFE, 0xED)  # an unknown machine
    program.write_bytes(other)
    with pytest.raises(UserError, match="cannot execute armhf programs") as caught:
        rootfs.require_execution(ARCHITECTURES["armhf"], program)
    assert os.strerror(8) in caught.value.found
    assert caught.value.fix.startswith("run ./inv --set-up ")
    assert "./inv doctor" in caught.value.fix


def test_a_hanging_emulator_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "probe"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(rootfs, "_PROBE_LIMIT_S", 0.6)
    with pytest.raises(UserError, match="cannot execute armhf programs") as caught:
        rootfs.require_execution(ARCHITECTURES["armhf"], program)
    assert "was still running after 1 s" in caught.value.found
