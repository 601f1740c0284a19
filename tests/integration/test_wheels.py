"""Tests of wheels for the target: selection, audit, installation and byte code."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from packaging import _manylinux
from wheel_parts import EABI5, EM_AARCH64, EM_ARM, EM_X86_64, HARD, SOFT, digest, elf, make_wheel

from engine import containers
from flow import main_job
from images.flavour import load_suite
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config
from toolchain.errors import PlatformMismatch, WheelUnusable
from wheels import byte_code as pyc
from wheels import find as wheels

ARMHF = ARCHITECTURES["armhf"]
TRIXIE = load_suite("trixie")

# Selection by name.


@pytest.mark.parametrize(
    "tag",
    [
        "cp313-cp313-linux_armv7l",
        "cp313-cp313-manylinux_2_17_armv7l",
        "cp313-cp313-manylinux_2_36_armv7l",
        "cp313-cp313-manylinux_2_41_armv7l",
        "cp313-cp313-manylinux2014_armv7l",
        "cp313-cp313-manylinux_2_17_armv7l.manylinux2014_armv7l",
        "cp38-abi3-linux_armv7l",
        "cp313-abi3-manylinux_2_31_armv7l",
        "cp313-none-linux_armv7l",
        "py3-none-linux_armv7l",
        "py3-none-any",
        "py2.py3-none-any",
        "py313-none-any",
        "cp313-none-any",
    ],
)
def test_supported_tags_are_accepted(tmp_path: Path, tag: str) -> None:
    path = make_wheel(tmp_path, tag=tag)
    found, refused = wheels.candidates([tmp_path], "thing", wheels.tags_for(ARMHF, TRIXIE))
    assert [item.path for item in found] == [path]
    assert refused == []


@pytest.mark.parametrize(
    "tag",
    [
        "cp312-cp312-linux_armv7l",
        "cp314-abi3-linux_armv7l",
        "cp313-cp313t-linux_armv7l",
        "cp313-cp313-linux_armv6l",
        "cp313-cp313-linux_aarch64",
        "cp313-cp313-linux_x86_64",
        "cp313-cp313-manylinux_2_17_x86_64",
        "cp313-cp313-manylinux_2_99_armv7l",
        "cp313-cp313-manylinux_2_42_armv7l",
        "cp313-cp313-manylinux_2_16_armv7l",
        "cp313-cp313-manylinux2010_armv7l",
        "cp313-cp313-manylinux1_armv7l",
        "cp313-cp313-musllinux_1_2_armv7l",
        "cp313-cp313-win32",
        "py2-none-any",
    ],
)
def test_unsupported_tags_are_reported(tmp_path: Path, tag: str) -> None:
    path = make_wheel(tmp_path, tag=tag)
    found, refused = wheels.candidates([tmp_path], "thing", wheels.tags_for(ARMHF, TRIXIE))
    assert found == []
    assert refused == [f"{path.name} is for {tag}"]


def test_releases_have_different_pythons() -> None:
    tags = {str(tag) for tag in wheels.tags_for(ARMHF, load_suite("bookworm"))}
    assert "cp311-cp311-linux_armv7l" in tags
    assert "cp313-cp313-linux_armv7l" not in tags
    shared = {str(tag) for tag in wheels.tags_for(ARCHITECTURES["arm64"], TRIXIE)} & tags
    assert all(tag.endswith("-none-any") for tag in shared)


@pytest.mark.parametrize("suite", ["trixie", "bookworm"])
@pytest.mark.parametrize("name", ["armhf", "arm64", "amd64"])
def test_platform_tags_equal_those_of_packaging(monkeypatch: pytest.MonkeyPatch, suite: str, name: str) -> None:
    """``packaging`` computes the tags that pip accepts on a machine of the architecture."""
    release, target = load_suite(suite), ARCHITECTURES[name]
    machine = target.wheel_platform.removeprefix("linux_")
    version = _manylinux._GLibCVersion(2, int(release.glibc.split(".")[1]))
    monkeypatch.setattr(_manylinux, "_get_glibc_version", lambda: version)
    monkeypatch.setattr(_manylinux, "_have_compatible_abi", lambda *_: True)
    expected = {*_manylinux.platform_tags([machine]), target.wheel_platform}
    ours = {tag.platform for tag in wheels.tags_for(target, release)} - {"any"}
    assert ours == expected


def test_candidates_are_sorted_by_wheelhouse_and_version(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    versions = {"1.9": second, "1.10": second, "1.2": first, "1.3rc1": first}
    for version, folder in versions.items():
        make_wheel(folder, version=version)
    found, _ = wheels.candidates([tmp_path / "absent", first, second], "thing", wheels.tags_for(ARMHF, TRIXIE))
    assert [str(item.version) for item in found] == ["1.3rc1", "1.2", "1.10", "1.9"]


def test_names_of_distributions_are_normalised(tmp_path: Path) -> None:
    make_wheel(tmp_path, name="Some_Thing", version="2.0")
    make_wheel(tmp_path, name="something", version="3.0")
    found, refused = wheels.candidates([tmp_path], "some.thing", wheels.tags_for(ARMHF, TRIXIE))
    assert [str(item.version) for item in found] == ["2.0"]
    assert refused == []


def test_invalid_file_names_are_reported(tmp_path: Path) -> None:
    (tmp_path / "thing.whl").write_text("")
    (tmp_path / "thing-1.0-cp313-cp313-linux_armv7l.whl").mkdir()
    found, refused = wheels.candidates([tmp_path], "thing", wheels.tags_for(ARMHF, TRIXIE))
    assert found == []
    assert len(refused) == 1
    assert "thing.whl" in refused[0]


# Audit.


def test_audit_counts_elf_files(tmp_path: Path) -> None:
    contents: dict[str, str | bytes] = {
        "thing/__init__.py": "",
        "thing/a.so": elf(EM_ARM, flags=HARD),
        "thing/deep/b.so": elf(EM_ARM, flags=EABI5, vfp_args=1),
        "thing/data.bin": b"\x7fEL",
        "thing/empty": b"",
    }
    assert wheels.audit(make_wheel(tmp_path, contents), ARMHF) == 2
    assert wheels.audit(make_wheel(tmp_path, {"thing.py": ""}, name="pure"), ARMHF) == 0


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (elf(EM_X86_64, bits=64), "EM_X86_64, 64 bit"),
        (elf(EM_AARCH64, bits=64), "EM_AARCH64, 64 bit"),
        (elf(EM_ARM, flags=SOFT), "EM_ARM, 32 bit, soft float"),
        (elf(EM_ARM, flags=EABI5), "EM_ARM, 32 bit, soft float"),
        (elf(EM_ARM, flags=EABI5, vfp_args=0), "EM_ARM, 32 bit, soft float"),
        (elf(EM_ARM, flags=HARD, big=True), "EM_ARM, 32 bit, big-endian"),
        (elf(3), "EM_386, 32 bit"),
    ],
    ids=["x86_64", "aarch64", "soft by flag", "no flag, no attribute", "soft by attribute", "big-endian", "i386"],
)
def test_elf_file_for_another_machine_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    wheel = make_wheel(tmp_path, {"thing/good.so": elf(EM_ARM, flags=HARD), "thing/_C.so": content})
    with pytest.raises(PlatformMismatch) as caught:
        wheels.audit(wheel, ARMHF)
    assert caught.value.exit_code == 26
    assert f"{wheel.name}: thing/_C.so" in caught.value.summary
    assert caught.value.expected == "EM_ARM, 32 bit, hard float"
    assert caught.value.found == found


def test_audit_supports_other_targets(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"a.so": elf(EM_AARCH64, bits=64)})
    assert wheels.audit(wheel, ARCHITECTURES["arm64"]) == 1
    with pytest.raises(PlatformMismatch, match="EM_X86_64, 64 bit"):
        wheels.audit(wheel, ARCHITECTURES["amd64"])


@pytest.mark.parametrize(("abi", "fits"), [("hard", True), ("softfp", False), ("soft", False)])
def test_audit_distinguishes_float_abis_of_gcc(tmp_path: Path, abi: str, fits: bool) -> None:
    compiler = shutil.which("arm-linux-gnueabihf-gcc")
    assert compiler, "./inv installs the ARM cross compiler"
    (tmp_path / "a.c").write_text("float twice(float x) { return x + x; }\n")
    flags = ["-march=armv7-a+fp", f"-mfloat-abi={abi}", "-nostdlib", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "a.c", "-o", "a.so"], cwd=tmp_path, check=True)
    wheel = make_wheel(tmp_path, {"a.so": (tmp_path / "a.so").read_bytes()})
    if fits:
        assert wheels.audit(wheel, ARMHF) == 1
    else:
        with pytest.raises(PlatformMismatch, match="soft float"):
            wheels.audit(wheel, ARMHF)


@pytest.mark.parametrize("flags", [EABI5, HARD])
@pytest.mark.parametrize("length", [4, 5, 16, 40, 60, 120])
def test_truncated_elf_file_is_refused(tmp_path: Path, length: int, flags: int) -> None:
    whole = elf(EM_ARM, flags=flags, vfp_args=1)
    assert len(whole) > 120
    with pytest.raises(WheelUnusable, match=r"a\.so is not a readable ELF file") as caught:
        wheels.audit(make_wheel(tmp_path, {"a.so": whole[:length]}), ARMHF)
    assert caught.value.exit_code == 26
    assert caught.value.found


def test_damaged_elf_files_never_cause_a_traceback(tmp_path: Path) -> None:
    whole = elf(EM_ARM, flags=EABI5, vfp_args=1)
    dice = random.Random(1)  # noqa: S311 - the damage must be the same in each run
    refused = 0
    for _ in range(300):
        spoilt = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            spoilt[dice.randrange(4, len(spoilt))] = dice.randrange(256)
        try:
            wheels.audit(make_wheel(tmp_path, {"a.so": bytes(spoilt)}), ARMHF)
        except (WheelUnusable, PlatformMismatch):
            refused += 1
    assert 0 < refused < 300


def spoil_text(text: str) -> str:
    return text.replace("sha256=", "sha256=A", 1)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (lambda text: spoil_text(text), "didn't match RECORD"),
        (lambda text: text.replace(",0\n", ",1\n", 1), "didn't match RECORD"),
        (lambda text: "\n".join(text.splitlines()[1:]) + "\n", "is not mentioned in RECORD"),
        (lambda _: "", "is not mentioned in RECORD"),
        (lambda text: text.replace("sha256=", "md5=", 1), "RECORD"),
    ],
    ids=["wrong digest", "wrong size", "file not listed", "empty", "weak digest"],
)
def test_wrong_record_is_refused(tmp_path: Path, record: Callable[[str], str], found: str) -> None:
    wheel = make_wheel(tmp_path, {"thing/__init__.py": b"", "thing/a.py": "a = 1\n"}, record=record)
    with pytest.raises(WheelUnusable) as caught:
        wheels.audit(wheel, ARMHF)
    assert found in caught.value.found
    assert "RECORD matches" in caught.value.expected


def refused(wheel: Path) -> bool:
    try:
        wheels.audit(wheel, ARMHF)
    except (WheelUnusable, PlatformMismatch):
        return True
    return False


def test_truncated_wheel_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"thing/a.py": "a = 1\n" * 100, "thing/b.so": elf(EM_ARM, flags=HARD)})
    whole = wheel.read_bytes()
    for size in range(0, len(whole), 13):
        wheel.write_bytes(whole[:size])
        assert refused(wheel), f"the first {size} of {len(whole)} bytes"


def test_wheel_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"thing/a.py": "a = 1\n" * 100, "thing/b.so": elf(EM_ARM, flags=HARD)})
    whole = wheel.read_bytes()
    contents: set[int] = set()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            begin = member.header_offset + 30 + len(member.filename)
            contents |= set(range(begin, begin + member.compress_size - 1))  # The last byte may be only padding.
    for position in range(len(whole)):
        wheel.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        assert refused(wheel) or position not in contents, f"byte {position}"


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "no entries"])
def test_files_that_are_not_archives_are_refused(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "thing-1.0-cp313-cp313-linux_armv7l.whl"
    wheel.write_bytes(content)
    with pytest.raises(WheelUnusable, match="is damaged"):
        wheels.audit(wheel, ARMHF)
    with pytest.raises(WheelUnusable, match="cannot be unpacked"):
        wheels.unpack(wheel, tmp_path / "root", TRIXIE)


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_is_found_with_any_compression(tmp_path: Path, how: int) -> None:
    wheel = make_wheel(tmp_path, {"thing.py": "x = 1\n" * 99})
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", how) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        member = archive.getinfo("thing.py")
    assert wheels.audit(wheel, ARMHF) == 0
    whole = bytearray(wheel.read_bytes())
    begin = member.header_offset + 30 + len(member.filename)
    whole[begin + 12 : begin + member.compress_size] = b"\xff" * (member.compress_size - 12)
    wheel.write_bytes(whole)
    with pytest.raises(WheelUnusable, match="is damaged"):
        wheels.audit(wheel, ARMHF)


def test_renamed_wheel_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"thing.py": ""})
    renamed = wheel.rename(tmp_path / "torch-1.0-cp313-cp313-linux_armv7l.whl")
    with pytest.raises(WheelUnusable, match="is damaged"):
        wheels.audit(renamed, ARMHF)


@pytest.mark.parametrize("name", ["thing.whl", "thing-2004d-py3-none-any.whl"])
def test_file_name_that_no_wheel_has_is_refused(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path, {"thing.py": ""}, version="2004d")
    renamed = wheel.rename(tmp_path / name)
    with pytest.raises(WheelUnusable, match=f"{name} is not a valid wheel name"):
        wheels.audit(renamed, ARMHF)


# Installation.


def full_wheel(folder: Path) -> Path:
    info = "thing-1.0.dist-info"
    return make_wheel(
        folder,
        {
            "thing/__init__.py": "value = 1\n",
            "thing/_C.so": elf(EM_ARM, flags=HARD),
            f"{info}/entry_points.txt": "[console_scripts]\nthing-run = thing:main\n",
            "thing-1.0.data/scripts/thing-script": "#!python\nprint('hello')\n",
            "thing-1.0.data/scripts/thing-shell": "#!/bin/sh\necho hello\n",
            "thing-1.0.data/data/share/thing/notes.txt": "notes\n",
            "thing-1.0.data/headers/thing.h": "#pragma once\n",
            "thing-1.0.data/purelib/pure.py": "pure = True\n",
        },
    )


@pytest.mark.parametrize("suite", ["trixie", "bookworm"])
def test_files_are_installed_in_debians_folders(tmp_path: Path, suite: str) -> None:
    root, release = tmp_path / "root", load_suite(suite)
    wheels.unpack(full_wheel(tmp_path), root, release)
    packages = f"usr/local/lib/python{release.python}/dist-packages"
    info = f"{packages}/thing-1.0.dist-info"
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == {
        f"{packages}/thing/__init__.py",
        f"{packages}/thing/_C.so",
        f"{packages}/pure.py",
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER", "entry_points.txt")),
        "usr/local/bin/thing-run",
        "usr/local/bin/thing-script",
        "usr/local/bin/thing-shell",
        "usr/local/share/thing/notes.txt",
        f"usr/local/include/python{release.python}/thing.h",
    }
    assert (root / info / "INSTALLER").read_text() == "pitorch\n"


def test_scripts_are_executable_with_the_targets_python(tmp_path: Path) -> None:
    root = tmp_path / "root"
    wheels.unpack(full_wheel(tmp_path), root, TRIXIE)
    scripts = root / "usr/local/bin"
    assert (scripts / "thing-run").read_text().splitlines()[0] == "#!/usr/bin/python3"
    assert (scripts / "thing-script").read_text().splitlines()[0] == "#!/usr/bin/python3"
    assert (scripts / "thing-shell").read_text().splitlines()[0] == "#!/bin/sh"
    assert all(os.access(path, os.X_OK) for path in scripts.iterdir())


def test_record_lists_installed_files_with_digests(tmp_path: Path) -> None:
    root = tmp_path / "root"
    wheels.unpack(full_wheel(tmp_path), root, TRIXIE)
    packages = root / "usr/local/lib/python3.13/dist-packages"
    rows = [row.rsplit(",", 2) for row in (packages / "thing-1.0.dist-info/RECORD").read_text().splitlines()]
    assert len(rows) == sum(1 for path in root.rglob("*") if path.is_file())
    for name, hashed, size in rows:
        path = packages / name
        assert path.is_file(), name
        if hashed:
            assert (hashed, int(size)) == (digest(path.read_bytes()), path.stat().st_size), name
    assert not any(str(tmp_path) in name for name, _, _ in rows)


def test_paths_outside_the_root_are_refused(tmp_path: Path) -> None:
    up = "../" * 12
    wheel = make_wheel(tmp_path, {f"{up}{str(tmp_path / 'escaped').lstrip('/')}": "out\n"})
    with pytest.raises(WheelUnusable, match="cannot be unpacked"):
        wheels.unpack(wheel, tmp_path / "root", TRIXIE)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    "text",
    ["thing-run = thing:main\n", "[console_scripts]\nthing-run\n", "[console_scripts]\nthing-run = thing main\n"],
)
def test_invalid_entry_points_are_refused(tmp_path: Path, text: str) -> None:
    """The audit does not read the entry points."""
    wheel = make_wheel(tmp_path, {"thing-1.0.dist-info/entry_points.txt": text})
    assert wheels.audit(wheel, ARMHF) == 0
    with pytest.raises(WheelUnusable, match="cannot be unpacked"):
        wheels.unpack(wheel, tmp_path / "root", TRIXIE)


def test_invalid_record_is_refused(tmp_path: Path) -> None:
    """The wheels that an audited wheel requires are unpacked without an audit."""
    wheel = make_wheel(tmp_path, {"thing.py": ""}, record=lambda text: text.replace(",", "", 1))
    with pytest.raises(WheelUnusable, match="cannot be unpacked"):
        wheels.unpack(wheel, tmp_path / "root", TRIXIE)


def test_existing_files_are_overwritten_only_on_request(tmp_path: Path) -> None:
    """A file that two packages contain is overwritten by pip; the layers of images must not have such files."""
    wheel = full_wheel(tmp_path)
    other = make_wheel(tmp_path, {"thing/__init__.py": "value = 2\n"}, name="other")
    wheels.unpack(wheel, tmp_path / "root", TRIXIE)
    for again in (wheel, other):
        with pytest.raises(WheelUnusable, match="cannot be unpacked"):
            wheels.unpack(again, tmp_path / "root", TRIXIE)
    wheels.unpack(other, tmp_path / "root", TRIXIE, overwrite=True)
    (found,) = (tmp_path / "root").rglob("thing/__init__.py")
    assert found.read_text() == "value = 2\n"


# Byte code.


@pytest.mark.engine
@pytest.mark.emulation
def test_byte_code_equals_that_of_the_emulated_python(
    built: main_job.Built, product_config: Config, client: docker.DockerClient, tmp_path: Path
) -> None:
    release = load_suite(product_config.image.suite)
    wheel = make_wheel(
        tmp_path,
        {"thing/ok.py": "def f(): return {1, 2, 'x'}\n", "thing/sub/__init__.py": "", "thing/bad.py": "def :\n"},
        tag=f"{release.python_tag}-{release.python_tag}-linux_armv7l",
    )
    packages = f"usr/local/lib/python{release.python}/dist-packages"
    epoch = product_config.image.source_date_epoch
    trees = {}
    for name, mtime in (("native", 1_000_000_000), ("again", 1_500_000_000), ("emulated", 1_600_000_000)):
        root = tmp_path / name
        wheels.unpack(wheel, root, release)
        for path in root.rglob("*.py"):
            os.utime(path, (epoch, epoch) if name == "emulated" else (mtime, mtime))
        if name == "emulated":
            containers.run_in(
                client,
                built.manifest("system").facts["reference"],
                ["sh", "-c", f"python3 -m compileall -q /{packages}/thing || true"],
                architecture=ARMHF,
                binds=[f"{root / packages / 'thing'}:/{packages}/thing:rw"],
            )
        else:
            pyc.compile_tree(root, product_config.target_root / "tools", release, epoch=epoch)
        trees[name] = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.pyc")}
    assert sorted(Path(name).name.split(".")[0] for name in trees["native"]) == ["__init__", "ok"]
    assert trees["native"] == trees["again"] == trees["emulated"]
    headers = [struct.unpack("<II", content[4:12]) for content in trees["native"].values()]
    assert headers == [(0, epoch)] * 2, "PEP 552: validated by the source's time stamp"
