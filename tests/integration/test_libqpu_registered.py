"""Tests of libqpu's registration with the target's loader, shell and pkg-config."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.register import LOADER_CONFIG, PYTHON_PATH, STATE_CONFIG, register

PREFIX = "/opt/pitorch"


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Make a staged root with a registered library."""
    installed = tmp_path / PREFIX.strip("/")
    for name, text in {
        "bin/qpu-info": "#!/bin/sh\n",
        "lib/python/pitorch/qpu/__init__.py": "",
        "lib/pkgconfig/qpu.pc": "prefix=${pcfiledir}/../../\nlibdir=${prefix}/lib\nincludedir=${prefix}/include\n\n"
        "Name: qpu\nDescription: kernels\nVersion: 1.0\nLibs: -L${libdir} -lqpu\nCflags: -I${includedir}\n",
    }.items():
        (installed / name).parent.mkdir(parents=True)
        (installed / name).write_text(text)
    register(tmp_path, installed, PREFIX)
    return tmp_path


def test_pkg_config_prints_paths_below_the_prefix(stage: Path) -> None:
    program = shutil.which("pkg-config")
    if program is None:
        pytest.skip("the program pkg-config is missing (package pkgconf)")
    environment = {**os.environ, "PKG_CONFIG_LIBDIR": str(stage / "usr/local/lib/pkgconfig")}
    command = [program, "--cflags", "--libs", "qpu"]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["-I/opt/pitorch/include", "-L/opt/pitorch/lib", "-lqpu"]


def test_programs_and_the_library_folder_are_registered(stage: Path) -> None:
    assert (stage / "usr/local/bin/qpu-info").readlink() == Path("/opt/pitorch/bin/qpu-info")
    assert (stage / LOADER_CONFIG).read_text() == "/opt/pitorch/lib\n"


def test_the_python_and_state_folders_are_registered(stage: Path) -> None:
    assert (stage / PYTHON_PATH).read_text() == "/opt/pitorch/lib/python\n"
    assert (stage / STATE_CONFIG).read_text() == "d /run/qpu 2770 root video -\n"


def test_without_a_module_no_python_path_is_registered(tmp_path: Path) -> None:
    installed = tmp_path / PREFIX.strip("/")
    (installed / "lib/pkgconfig").mkdir(parents=True)
    (installed / "lib/pkgconfig/qpu.pc").write_text("prefix=x\n")
    register(tmp_path, installed, PREFIX)
    assert not (tmp_path / PYTHON_PATH).exists()
