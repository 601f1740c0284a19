"""Tests of TVM's RPC server in an image: staging for the target, and the main job's setting."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from device.remote import environment
from doctor.finding import Verdict
from doctor.foreign_programs import check_execution_64
from flow import pipelines
from flow.context import Context
from images import probe, rootfs
from images.flavour import load_suite
from recipes import recipe
from recipes.tvm_server import build
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config, load_config
from toolchain.errors import WheelUnusable
from toolchain.process import run


def machines(root: Path) -> set[int]:
    """Return the machines (e_machine) of all ELF files in a folder."""
    found = set()
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            head = path.read_bytes()[:20]
            if head[:4] == b"\x7fELF":
                found.add(struct.unpack("<H", head[18:20])[0])
    return found


def test_the_server_is_staged_without_the_compiler(tmp_path: Path) -> None:
    data = recipe.load("tvm_server")
    wheels = build.stage(data, ARCHITECTURES["arm64"], load_suite("trixie"), tmp_path / "root", tmp_path / "pip.log")
    assert len(wheels) == len(build.pins())
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


def test_an_architecture_without_wheels_names_the_alternative(tmp_path: Path) -> None:
    data = recipe.load("tvm_server")
    with pytest.raises(WheelUnusable) as caught:
        build.stage(data, ARCHITECTURES["armhf"], load_suite("trixie"), tmp_path / "root", tmp_path / "pip.log")
    assert "apache-tvm==" in caught.value.summary
    assert "the loader" in caught.value.fix


def test_a_server_killed_during_its_start_is_reported(tmp_path: Path) -> None:
    """The out-of-memory killer, or an instruction that the CPU lacks, may end the server while it loads TVM."""
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm/__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    done = subprocess.run(
        [sys.executable, str(build.SERVER), "--port=1"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "pitorch: TVM's server was killed by signal 9\n")


@pytest.mark.parametrize("wanted", [True, False])
def test_a_setting_adds_it_to_the_main_job(tmp_path: Path, wanted: bool) -> None:
    image = {"architecture": "arm64", "profile": "container"}
    given = {"image": image, "build": {"folder": str(tmp_path)}, "remote": {"server_in_image": wanted}}
    with Context(load_config(given)) as context:
        steps = {step.name: step for step in pipelines.main_job(context).steps}
    assert ("tvm-server" in steps) == wanted
    assert ("tvm-server" in steps["system"].needs) == wanted
    assert ("tvm-server" in steps["sbom"].needs) == wanted, "the bill of materials lists the server's wheels"


def test_64_bit_arm_programs_run_here_or_are_reported(tmp_path: Path) -> None:
    program = tmp_path / "probe"
    program.write_bytes(probe.PROGRAMS["arm64"]())
    program.chmod(0o755)
    if not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists() and os.uname().machine != "aarch64":
        pytest.skip("qemu-aarch64 is not registered; ./inv registers it")
    rootfs.require_execution(ARCHITECTURES["arm64"], program)
    assert check_execution_64(tmp_path).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tracker", "lab:9190"], "require --key"),
        (["--proxy", "lab"], "expected HOST:PORT"),
        (["--tracker", "lab:x", "--key", "k"], "expected HOST:PORT"),
        (["--port", "many"], "invalid int"),
    ],
)
def test_an_invalid_command_line_of_the_server_is_rejected(words: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, build.SERVER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_check_reports_the_version_of_the_server(product_config: Config) -> None:
    """The test runs build-image's check of an image with the server, but with this PC's TVM."""
    ready = environment.ready(product_config)
    done = run([sys.executable, build.SERVER, "--check"], env=ready.variables, limit_s=300)
    version = next(pin for pin in build.pins() if pin.startswith("apache-tvm==")).partition("==")[2]
    assert f"pitorch: TVM {version} serves" in done.output
    assert "Traceback" not in done.output
