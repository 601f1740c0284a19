"""Tests of wheels made from the distribution's Python packages: their contents, and installation by pip."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from device_parts import layer
from registry_parts import small_disk
from waiting import eventually

from flow import build_wheel
from images.flavour import load_suite
from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import BuildConfig, Config
from toolchain.errors import DiskFull
from toolchain.manifest import Manifest
from wheels import distribution as distribution_wheels
from wheels import find as wheels

SITE = "./usr/lib/python3/dist-packages"
ARMHF, TRIXIE = ARCHITECTURES["armhf"], load_suite("trixie")
FILES = {
    f"{SITE}/numpy/__init__.py": "import os\nversion = '2.2.4'\n",
    f"{SITE}/numpy/__pycache__/__init__.cpython-313.pyc": "byte code",
    f"{SITE}/numpy-2.2.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: numpy\nVersion: 2.2.4\n",
    f"{SITE}/numpy-2.2.4.dist-info/entry_points.txt": "[console_scripts]\nf2py = numpy:version\n",
    "./usr/lib/gnu/python3-numpy/include/numpy/ndarraytypes.h": "#define A\n",
    f"{SITE}/scipy/__init__.py": "",
    f"{SITE}/scipy-1.15.3.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: scipy\nVersion: 1.15.3\n",
    f"{SITE}/pandas/__init__.py": "",
    f"{SITE}/pandas-0.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: pandas\nVersion: no version\n",
    f"{SITE}/numpy/_core/include/numpy": "->../../../../../gnu/python3-numpy/include/numpy",
    f"{SITE}/numpy/gone": "->/nowhere",
}


def test_wheels_contain_the_packages_files(tmp_path: Path) -> None:
    """The files include headers, to which Debian's numpy has a symbolic link."""
    distribution_wheels.make(layer(tmp_path / "dev.tar", FILES).path, tmp_path / "made", ARMHF, TRIXIE)
    tag = "cp313-cp313-linux_armv7l.whl"
    names = [f"numpy-2.2.4-{tag}", f"scipy-1.15.3-{tag}"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == names, (
        "no wheel of pandas, because pip would reject its version"
    )
    for name in names:
        assert wheels.audit(tmp_path / "made" / name, ARMHF) == 0
    with zipfile.ZipFile(tmp_path / "made" / names[0]) as wheel:
        assert wheel.read("numpy/_core/include/numpy/ndarraytypes.h") == b"#define A\n"
        assert not [item for item in wheel.namelist() if item.endswith((".pyc", "gone"))]
        assert b"f2py" in wheel.read("numpy-2.2.4.dist-info/entry_points.txt")


def test_simultaneous_tasks_make_the_wheels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Manifest(step="dev", key="", inputs={}, artefacts=(layer(tmp_path / "dev.tar", FILES),), facts={"wheel": ""})
    monkeypatch.setattr("flow.pipelines.main_job", lambda *_, **__: SimpleNamespace(manifest_path=Path))
    monkeypatch.setattr(build_wheel, "require", lambda *_: root)
    write, written = distribution_wheels._write, []

    def write_slowly(*parts: Any) -> None:
        written.append(parts)
        time.sleep(0.2)
        write(*parts)

    monkeypatch.setattr(distribution_wheels, "_write", write_slowly)
    config = Config(build=BuildConfig(folder=tmp_path / "build"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(build_wheel.build_requirements, config)
        eventually(lambda: written, interval_s=0.01)
        second = pool.submit(build_wheel.build_requirements, config)
        assert [path.name.partition("-")[0] for path in first.result(20)] == ["numpy", "scipy"]
        assert second.result(20) == first.result()
    assert len(written) == len(distribution_wheels.NAMES)


def test_pip_installs_the_wheels(tmp_path: Path) -> None:
    host = host_architecture()
    distribution_wheels.make(layer(tmp_path / "dev.tar", FILES).path, tmp_path / "made", host, TRIXIE)
    words = ["--no-deps", "--no-index", f"--find-links={tmp_path / 'made'}", f"--target={tmp_path / 'site'}"]
    words += ["--only-binary=:all:", "--python-version=3.13", f"--platform={host.wheel_platform}", "numpy", "scipy"]
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(argv, check=True, timeout=300)
    code = "import numpy, scipy; print(numpy.version)"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True, timeout=60
    )
    assert seen.stdout == "2.2.4\n"


def test_full_disk_leaves_no_wheels(tmp_path: Path) -> None:
    files = {**FILES, f"{SITE}/numpy/large": "x" * 300_000}
    tar = layer(tmp_path / "dev.tar", files).path
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(DiskFull, match="no room for wheels of the distribution's packages"):
            distribution_wheels.make(tar, disk / "made", ARMHF, TRIXIE)
        assert list(disk.iterdir()) == []
