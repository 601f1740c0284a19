"""Detect combinations of emulator and kernel versions that are known to fail (emulators.toml)."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from debian.debian_support import Version

from doctor.emulation import EMULATOR_PACKAGES, emulator, native
from doctor.finding import RUN_LIMIT_S, Finding, Verdict, fail, first_version
from toolchain import process
from toolchain.config import Config

_TABLE = Path(__file__).with_name("emulators.toml")
_CHECK = "emulator and kernel"


def check_emulator(config: Config) -> Finding:
    """Check whether the emulator and the kernel have versions that are known to fail together."""
    if (finding := native(_CHECK, config.image.target)) is not None:
        return finding
    program = emulator(config.image.target.qemu)
    if program is None:
        done = "looked for the emulator in binfmt_misc and on the PATH"
        return fail(_CHECK, done, "no emulator", f"run ./inv --set-up to install it ({EMULATOR_PACKAGES})")
    version = first_version(process.output_of([program, "--version"], limit_s=RUN_LIMIT_S))
    return judge_emulator(
        guest=config.image.architecture, qemu=version, package=_package_version(program), kernel=os.uname().release
    )


def judge_emulator(*, guest: str, qemu: str, package: str, kernel: str) -> Finding:
    """Return the finding on these versions: a warning if they are known to fail together."""
    rows: list[dict[str, Any]] = tomllib.loads(_TABLE.read_text())["pair"]
    found = {"qemu": qemu, "package": package, "kernel": first_version(kernel)}
    bad = [row for row in rows if guest in row["guests"] and all(_within(row, *item) for item in found.items())]
    versions = f"qemu-user {qemu}" + (f" (package {package})" if package else "") + f", kernel {kernel}"
    return Finding(
        check=_CHECK,
        verdict=Verdict.WARN if bad else Verdict.OK,
        done=f"compared both versions with {len(rows)} known bad pairs",
        found=versions + "".join(f"; {row['symptom']} ({', '.join(row['sources'])})" for row in bad),
        fix="; ".join(row["fix"] for row in bad),
    )


def _package_version(program: Path) -> str:
    """Return the version of the Debian package that owns a file, or an empty string if no package owns it."""
    owner = subprocess.run(["dpkg-query", "--search", program], check=False, capture_output=True, text=True)
    if owner.returncode != 0:
        return ""
    package = owner.stdout.partition(":")[0]
    query = ["dpkg-query", "--show", "--showformat=${Version}", package]
    return subprocess.run(query, check=False, capture_output=True, text=True).stdout.strip()


def _within(row: Mapping[str, Any], name: str, version: str) -> bool:
    """Return whether a version is within the range of a row in emulators.toml.

    If the row has no range for ``name``, the result is True for every version. An empty string (an unknown version) is
    outside any range.
    """
    low, high = row.get(f"{name}_from"), row.get(f"{name}_below")
    if not low and not high:
        return True
    return bool(version) and not (low and Version(version) < low) and not (high and Version(version) >= high)
