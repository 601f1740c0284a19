"""Tests of the installation of packages for this PC, from a folder of small wheels instead of PyPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from wheel_parts import make_wheel

from flow import native_environment
from flow.context import Context
from flow.steps import native_python
from toolchain.config import Config, load_config
from toolchain.errors import CommandFailed, WheelUnusable
from toolchain.manifest import Manifest
from wheels import for_this_pc

CUDA_BUILD = """
try:
    import cuda_library
except ImportError as fault:
    raise ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory") from fault
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a folder in which pip searches for wheels."""
    folder = tmp_path / "index"
    add(folder, "needed", "1.0")
    monkeypatch.setattr(for_this_pc, "TORCH_NEEDS", ("needed==1.0",))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config({"build": {"folder": str(tmp_path / "build")}})


def add(index: Path, name: str, version: str, code: str = "", requires: str = "") -> None:
    contents = {f"{name}/__init__.py": code}
    make_wheel(index, contents, name=name, version=version, tag="py3-none-any", purelib=True, requires=requires)


def test_cpu_build_of_torch_is_installed_without_cuda(index: Path, config: Config) -> None:
    add(index, "torch", "2.13.0", requires="cuda_library")
    add(index, "cuda_library", "1.0")
    site = for_this_pc.torch(config)
    assert sorted(path.name for path in site.iterdir() if path.suffix != ".dist-info") == ["needed", "torch"]
    (index / "torch-2.13.0-py3-none-any.whl").unlink()
    assert for_this_pc.torch(config) == site, "an installed package must not be searched for again"


def test_cuda_build_of_torch_is_installed_with_cuda(index: Path, config: Config) -> None:
    add(index, "torch", "2.13.0", CUDA_BUILD, requires="cuda_library")
    add(index, "cuda_library", "1.0")
    site = for_this_pc.torch(config)
    subprocess.run([sys.executable, "-c", "import needed, torch"], env={"PYTHONPATH": str(site)}, check=True)


def test_failed_installation_leaves_nothing(index: Path, config: Config) -> None:
    add(index, "torch", "2.13.0", CUDA_BUILD, requires="cuda_library")
    with pytest.raises(WheelUnusable) as caught:
        for_this_pc.torch(config)
    assert "cuda_library" in str(caught.value).replace("-", "_")
    assert sorted(path.name for path in (config.build_root / "packages").iterdir()) == ["lock", "pip.log"]


def test_torch_that_cannot_be_imported_is_not_installed(index: Path, config: Config) -> None:
    add(index, "torch", "2.13.0", "raise OSError('cannot allocate memory in static TLS block')\n")
    with pytest.raises(CommandFailed) as caught:
        for_this_pc.torch(config)
    assert "static TLS block" in caught.value.tail
    assert sorted(path.name for path in (config.build_root / "packages").iterdir()) == ["lock", "pip.log"]


def test_unfinished_installations_are_removed(index: Path, config: Config) -> None:
    add(index, "torch", "2.13.0")
    killed = config.build_root / "packages" / ".torch-0123.99999.part"
    killed.mkdir(parents=True)
    for_this_pc.torch(config)
    assert not killed.exists()


def test_environment_is_made_again_if_its_torch_is_missing(config: Config) -> None:
    made = Manifest(step="native-python", key="", inputs={}, artefacts=(), facts={}, seconds=0)
    with Context(config) as context:
        step = native_python.step(context)
    assert step.missing is not None
    assert step.missing(made) == "its environment is missing"
    python = native_environment.python_of(config)
    python.parent.mkdir(parents=True)
    python.touch()
    assert step.missing(made) == "its torch is missing"
    torch = config.build_root / "packages" / "torch-0123"
    pointer = python.parent.parent / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/torch.pth"
    pointer.parent.mkdir(parents=True)
    pointer.write_text(f"{torch}\n")
    assert step.missing(made) == "its torch is missing"
    torch.mkdir(parents=True)
    assert step.missing(made) == ""
