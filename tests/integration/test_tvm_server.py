"""TVM's RPC server for an image: the staged files, the architectures, and the setting that adds it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from device.remote import environment
from doctor import examination as doctor
from flow.main_steps import Flow
from images import probe, rootfs
from images.flavour import load_suite
from recipes import recipe
from recipes.tvm_server import build
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config, load_config
from toolchain.errors import WheelUnusable
from toolchain.process import run


def machines(root: Path) -> set[int]:
    """The machines (e_machine) of all ELF files in a folder."""
    found = set()
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            head = path.read_bytes()[:20]
            if head[:4] == b"\x7fELF":
                found.add(struct.unpack("<H", head[18:20])[0])
    return found


def test_server_is_staged_without_the_compiler(tmp_path: Path) -> None:
    data = recipe.load("tvm_server")
    build.stage(data, ARCHITECTURES["arm64"], load_suite("trixie"), tmp_path / "root", tmp_path / "pip.log")
    site = tmp_path / "root/opt/pitorch/tvm"
    assert machines(tmp_path / "root") == {183}  # EM_AARCH64
    assert (site / "tvm/lib/libtvm_runtime.so").is_file()
    assert (site / "board_server.py").read_text() == build.SERVER.read_text()
    for name in data.settings["left_out"].split():
        assert not (site / name).exists()
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 60 << 20
    launcher = tmp_path / "root/usr/local/bin/pitorch-rpc-server"
    assert os.access(launcher, os.X_OK)
    assert data.settings["prefix"] in launcher.read_text()


def test_error_without_wheels_names_the_loader(tmp_path: Path) -> None:
    data = recipe.load("tvm_server")
    with pytest.raises(WheelUnusable) as caught:
        build.stage(data, ARCHITECTURES["armhf"], load_suite("trixie"), tmp_path / "root", tmp_path / "pip.log")
    assert "apache-tvm==" in caught.value.expected
    assert "our loader" in caught.value.fix


@pytest.mark.parametrize("wanted", [True, False])
def test_setting_adds_the_server_to_the_main_job(tmp_path: Path, wanted: bool) -> None:
    image = {"architecture": "arm64", "profile": "container"}
    given = {"image": image, "build": {"folder": str(tmp_path)}, "remote": {"server_in_image": wanted}}
    with Flow(load_config(given)) as flow:
        steps = {step.name: step for step in flow.pipeline().steps}
    assert ("tvm-server" in steps) == wanted
    assert ("tvm-server" in steps["system"].needs) == wanted
    assert list(steps)[-1] == "system"


def test_doctor_checks_64_bit_arm_programs(tmp_path: Path) -> None:
    program = tmp_path / "probe"
    program.write_bytes(probe.PROGRAMS["arm64"]())
    program.chmod(0o755)
    if not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists() and os.uname().machine != "aarch64":
        pytest.skip("qemu-aarch64 is not registered; ./inv does it")
    rootfs.require_execution(ARCHITECTURES["arm64"], program)
    assert doctor.check_execution_64(tmp_path).verdict is doctor.Verdict.OK


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--tracker", "lab:9190"], "need a --key"),
        (["--proxy", "lab"], "expected HOST:PORT"),
        (["--tracker", "lab:x", "--key", "k"], "expected HOST:PORT"),
        (["--port", "many"], "invalid int"),
    ],
)
def test_invalid_server_command_line_is_refused(words: list[str], error: str) -> None:
    done = subprocess.run([sys.executable, build.SERVER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert error in done.stderr


def test_server_check_reports_its_version(product_config: Config) -> None:
    """build-image runs this check in an image with the server; here it runs with this PC's TVM."""
    tvm = environment.ready(product_config)
    done = run([sys.executable, build.SERVER, "--check"], env=tvm.variables, limit_s=300)
    version = next(pin for pin in build.pins() if pin.startswith("apache-tvm==")).partition("==")[2]
    assert f"pitorch: TVM {version} serves" in done.output
    assert "Traceback" not in done.output
