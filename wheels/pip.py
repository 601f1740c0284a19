"""Run pip on this PC, read its output, and download pinned files."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.proxies import SOCKS_FIX, SOCKS_MISSING
from images.flavour import Suite
from toolchain import files, progress
from toolchain.architecture import Architecture
from toolchain.errors import CommandFailed, NetworkUnreachable, SourceUnavailable, UserError
from toolchain.process import run
from wheels import find as wheels

_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeoutError|ProxyError|SSLError|CERTIFICATE_VERIFY"
    r"|Max retries exceeded|Temporary failure in name resolution|Connection refused|No route to host|Read timed out"
)
_NOT_FOUND = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)([^\s;(]*)")
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
# pip prints these lines if --verbose is given twice.
_OTHER_PLATFORM = re.compile(
    r"Skipping link: none of the wheel's tags \(.*\) are compatible .*?[:/]([^/\s#]+\.whl)(?:#|\s|$)"
)
_SOURCE = re.compile(r"Skipping link: No sources permitted for .*?[:/]([^/\s#]+\.(?:tar\.gz|zip))(?:#|\s|$)")
# pip prints these messages if a program that it runs fails. The program is the package's own build, or another pip that
# installs build requirements.
_BUILD_FAILED = "subprocess-exited-with-error"
_REQUIREMENTS_FAILED = "pip subprocess to install build dependencies did not run successfully"
_CONFLICT = "ResolutionImpossible"
_OTHER_BYTES = re.compile(r"Got\s+([0-9a-f]{64})")
"""Matches the SHA-256 of a file that differs from the required one (--require-hashes)."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The causes of a failure, as reported in pip's output."""

    name: str
    """The requirement that has no matching distribution; empty if there is none."""
    specifier: str
    """The version specifier of that requirement."""
    versions: list[str]
    """The versions of that package in the index."""
    unreachable: str
    """The first line about a failed connection; empty if an index responded or no connection failed."""
    socks_missing: bool
    """Whether the proxy requires SOCKS, which pip does not support without PySocks."""
    build_failed: bool
    """Whether the package's own build failed."""
    is_conflict: bool
    """Whether the requirements contradict each other."""
    other_platforms: list[str]
    """File names of wheels that are incompatible with the platform or the version of Python."""
    sources: list[str]
    """File names of source archives that were not permitted."""

    @classmethod
    def parse(cls, text: str) -> Output:
        """Extract the causes of a failure from pip's output."""
        missing = _NOT_FOUND.search(text)
        found = next((match[1] for match in _VERSIONS.finditer(text) if match[1] != "none"), "")
        versions = [item.strip() for item in found.split(",") if item]
        lines = (line for line in text.splitlines() if _UNREACHABLE.search(line))
        return cls(
            name=missing[1] if missing else "",
            specifier=missing[2] if missing else "",
            versions=versions,
            # Without a network connection, pip retries and then reports that it found no distribution.
            unreachable="" if versions else next(lines, ""),
            socks_missing=SOCKS_MISSING in text,
            build_failed=missing is None and _BUILD_FAILED in text and _REQUIREMENTS_FAILED not in text,
            is_conflict=_CONFLICT in text,
            other_platforms=[link[1] for link in _OTHER_PLATFORM.finditer(text)],
            sources=[link[1] for link in _SOURCE.finditer(text)],
        )


def run_pip(
    words: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    fix: str,
    missing: type[UserError] = SourceUnavailable,
    python: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 1800.0,
) -> None:
    """Run ``python -m pip WORDS`` without prompts; ``what`` names the download in error messages.

    If no file in the index satisfies a requirement, raises the exception class ``missing`` with the advice ``fix``.
    Raises SourceUnavailable if a file has a wrong SHA-256, NetworkUnreachable if the index cannot be reached, and
    DiskFull. For any other failure, raises CommandFailed with the last lines of pip's output.
    """
    try:
        run(
            [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *words],
            env=environment,
            limit_s=limit_s,
            log=log,
        )
    except CommandFailed as fault:
        if full := files.full_disk(fault.tail, what, log.parent):
            raise full from fault
        output = Output.parse(fault.tail)
        if output.socks_missing:
            raise NetworkUnreachable(
                f"{what} cannot be downloaded: the proxy requires SOCKS, which pip supports only with PySocks",
                expected="an HTTP proxy, or the package PySocks",
                found=f"{SOCKS_MISSING} (complete log: {log})",
                fix=SOCKS_FIX,
            ) from fault
        if output.unreachable:
            raise NetworkUnreachable(
                f"{what} cannot be downloaded: the package index does not respond",
                expected="a response from the package index in pip's configuration (pip config list)",
                found=f"no connection (complete log: {log})",
                fix="check the network, https_proxy and pip.conf, then run the task again",
            ) from fault
        if output.name:
            raise missing(
                f"the package index does not have {output.name}{output.specifier}",
                expected=f"a matching file for {what}",
                found=f"no such version, or none for this platform (complete log: {log})",
                fix=fix,
            ) from fault
        if other := _OTHER_BYTES.search(fault.tail):
            raise SourceUnavailable(
                f"the package index has a different file named {what}",
                expected="the pinned SHA-256",
                found=other[1],
                fix="find out why the file differs before you change the pin",
            ) from fault
        raise


def for_target(target: Architecture, suite: Suite) -> list[str]:
    """Return pip's options that permit only wheels for a target."""
    platforms = [f"--platform={name}" for name in wheels.platforms_for(target, suite)]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={suite.python}", *platforms]


def download_pinned(
    name: str,
    version: str,
    sha256: str,
    place: Path,
    *,
    words: Sequence[str],
    log: Path,
    fix: str,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Return the file ``place``, which has this SHA-256; download the file if it does not exist.

    ``words`` are pip's options for this file. Raises DiskFull, the same exceptions as ``run_pip``, and
    SourceUnavailable if an existing file is not the pinned one.
    """
    if not place.is_file():
        with (
            files.room_for(place.name, place.parent),
            files.scratch_folder(place.parent, name) as scratch,
            progress.step(f"fetch {name} {version}"),
        ):
            wanted = scratch / "wanted.txt"
            wanted.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
            options = ("--no-deps", "--no-cache-dir", "--require-hashes", f"--requirement={wanted}")
            argv = ["download", *options, f"--dest={scratch}", *words]
            run_pip(argv, what=f"{name} {version}", log=log, fix=fix, environment=environment)
            downloaded = scratch / place.name
            if not downloaded.is_file():
                raise SourceUnavailable(
                    f"the package index has {name} {version} under another file name",
                    expected=place.name,
                    found=", ".join(sorted(item.name for item in scratch.iterdir() if item != wanted)),
                    fix=fix,
                )
            downloaded.replace(place)
    found = files.sha256_of(place)
    if found != sha256:
        raise SourceUnavailable(
            f"{place} is not the pinned file",
            expected=f"SHA-256 {sha256}",
            found=found,
            fix=f"delete {place} and run the task again",
        )
    return place
