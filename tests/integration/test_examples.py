"""Tests that run the examples from the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm_servers
from remote_kernels import out_of_reach

from device.remote import environment
from device.remote.environment import TvmEnvironment
from toolchain.config import ROOT, Config


@pytest.fixture(scope="module")
def tvm(product_config: Config) -> Iterator[TvmEnvironment]:
    installed = environment.ready(product_config)
    with out_of_reach():
        yield installed


def run(tvm: TvmEnvironment, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "remote_add.py", *words],
        env={**os.environ, **tvm.variables, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_kernel_runs_on_this_pc(tvm: TvmEnvironment) -> None:
    done = run(tvm, "--local-demo")
    assert re.fullmatch(r"\S+ secs/op\n", done.stdout), done.stderr
    assert 0 < float(done.stdout.split()[0]) < 1


def test_the_kernel_runs_on_a_board(tvm: TvmEnvironment, tmp_path: Path) -> None:
    """TVM's own server on this PC represents the board, so the kernel is compiled for this PC."""
    with tvm_servers.board(tvm) as board:
        config = tmp_path / "board.toml"
        config.write_text(f'host = "127.0.0.1"\nport = {board.port}\n[target]\nkind = "llvm"\n')
        done = run(tvm, "--config", str(config), CXX="g++")
        assert re.fullmatch(r"\S+ secs/op\n", done.stdout), done.stderr
        assert "load_module" in board.log()
