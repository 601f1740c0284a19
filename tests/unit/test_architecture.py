"""Tests of architecture names."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import ROOT


def test_names_are_unique() -> None:
    rows = list(ARCHITECTURES.values())
    for names in ([row.gnu for row in rows], [row.oci_platform for row in rows], [row.qemu for row in rows]):
        assert len(set(names)) == len(rows)
    may_be_empty = {"oci_variant", "emulated_cpu"}
    assert all(
        getattr(row, item.name) for row in rows for item in dataclasses.fields(row) if item.name not in may_be_empty
    )


def test_the_chroot_helper_emulates_the_same_cpu() -> None:
    cpu = ARCHITECTURES["arm64"].emulation["QEMU_CPU"]
    assert f"{{QEMU_CPU:-{cpu}}}" in (ROOT / "nfsroot" / "enter-nfsroot").read_text()


@pytest.mark.parametrize("debian", ARCHITECTURES)
def test_the_gnu_triplets_match_debians_table(debian: str) -> None:
    argv = ["dpkg-architecture", "-a", debian, "-q", "DEB_HOST_GNU_TYPE"]
    try:
        output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip("dpkg-architecture (package dpkg-dev) is not installed")
    assert output == ARCHITECTURES[debian].gnu


def test_the_host_architecture_is_that_of_dpkg() -> None:
    output = subprocess.run(["dpkg", "--print-architecture"], check=True, capture_output=True, text=True).stdout.strip()
    assert host_architecture().debian == output


@pytest.mark.parametrize(
    ("dpkg", "words"),
    [("echo riscv64", "found:    riscv64"), ("exit 2", "dpkg"), (None, "dpkg")],
    ids=["unknown", "failing", "missing"],
)
def test_an_unknown_host_architecture_is_reported(tmp_path: Path, dpkg: str | None, words: str) -> None:
    if dpkg is not None:
        (tmp_path / "dpkg").write_text(f"#!/bin/sh\n{dpkg}\n")
        (tmp_path / "dpkg").chmod(0o755)
    program = """
from toolchain.architecture import host_architecture
from toolchain.errors import UserError
try:
    host_architecture()
except UserError as fault:
    print(fault.exit_code, fault)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("26 " if dpkg == "echo riscv64" else ("14 " if dpkg else "13 "))
    assert words in done.stdout
