"""Detect combinations of emulator and kernel versions that are known to fail (emulators.toml)."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doctor.emulation import EMULATOR_PACKAGES, emulator, native
from doctor.finding import RUN_LIMIT_S, Finding, Verdict, fail, first_version
from toolchain import process
from toolchain.config import Config

_TABLE = Path(__file__).with_name("emulators.toml")
_CHECK = "emulator and kernel"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A row of emulators.toml: a combination of versions that is known to fail."""

    symptom: str
    fix: str
    guests: tuple[str, ...]
    sources: tuple[str, ...]
    qemu_from: str = ""
    qemu_below: str = ""
    package_from: str = ""
    package_below: str = ""
    kernel_from: str = ""
    kernel_below: str = ""

    def applies(self, *, guest: str, qemu: str, package: str, kernel: str) -> bool:
        """Return whether the versions meet all conditions of this row.

        An empty string stands for an unknown version, which meets no condition.
        """
        return (
            guest in self.guests
            and _within(qemu, self.qemu_from, self.qemu_below, _numbers_below)
            and _within(package, self.package_from, self.package_below, _package_below)
            and _within(kernel, self.kernel_from, self.kernel_below, _numbers_below)
        )


def known_bad_pairs() -> tuple[Pair, ...]:
    """Return the rows of emulators.toml."""
    rows: list[dict[str, Any]] = tomllib.loads(_TABLE.read_text())["pair"]
    return tuple(Pair(**{key: _frozen(value) for key, value in row.items()}) for row in rows)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_emulator(config: Config) -> Finding:
    """Check whether the versions of the emulator and the kernel are a known bad pair."""
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
    """Return the finding on these versions: a warning if they are a known bad pair."""
    rows = known_bad_pairs()
    bad = [row for row in rows if row.applies(guest=guest, qemu=qemu, package=package, kernel=kernel)]
    versions = f"qemu-user {qemu}" + (f" (package {package})" if package else "") + f", kernel {kernel}"
    return Finding(
        check=_CHECK,
        verdict=Verdict.WARN if bad else Verdict.OK,
        done=f"compared both versions with {len(rows)} known bad pairs",
        found=versions + "".join(f"; {row.symptom} ({', '.join(row.sources)})" for row in bad),
        fix="; ".join(row.fix for row in bad),
    )


def _package_version(program: Path) -> str:
    """Return the version of the Debian package that owns a file, or an empty string if no package owns it."""
    owner = subprocess.run(["dpkg-query", "--search", program], check=False, capture_output=True, text=True)
    if owner.returncode != 0:
        return ""
    package = owner.stdout.partition(":")[0]
    query = ["dpkg-query", "--show", "--showformat=${Version}", package]
    return subprocess.run(query, check=False, capture_output=True, text=True).stdout.strip()


def _within(version: str, low: str, high: str, below: Callable[[str, str], bool]) -> bool:
    if not low and not high:
        return True
    if not version:
        return False
    return not (low and below(version, low)) and not (high and not below(version, high))


def _numbers_below(left: str, right: str) -> bool:
    """Return whether the version number at the start of ``left`` is lower than that of ``right``.

    The version number in ``6.18.44-fc``, for example, is 6.18.44.
    """
    numbers = [[int(part) for part in first_version(text + ".0").split(".")] for text in (left, right)]
    length = max(len(item) for item in numbers)
    padded = [item + [0] * (length - len(item)) for item in numbers]
    return padded[0] < padded[1]


def _package_below(left: str, right: str) -> bool:
    """Return whether a Debian version is lower than another, as determined by dpkg."""
    return subprocess.run(["dpkg", "--compare-versions", left, "lt", right], check=False).returncode == 0
