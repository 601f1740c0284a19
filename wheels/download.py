"""Download wheels for the target and their dependencies from the package index that pip uses on this PC."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Set
from email.parser import BytesParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from images.flavour import Suite
from toolchain.architecture import Architecture
from toolchain.errors import WheelUnusable
from toolchain.text import one_line
from wheels.pip import for_target, run_pip


def download(requirement: str, folder: Path, target: Architecture, suite: Suite, log: Path) -> Path:
    """Download the wheel that satisfies a requirement and fits the target, without dependencies.

    Raises SourceUnavailable if the index has no such wheel, and NetworkUnreachable, DiskFull or CommandFailed after
    other failures.
    """
    before = set(folder.glob("*.whl"))
    run_pip(
        ["download", "--no-deps", *for_target(target, suite), f"--dest={folder}", requirement],
        what=f"a wheel of {requirement} for {suite.name} {target.debian}",
        log=log,
        fix="check the name and version, or pass the path of a wheel",
    )
    return next(iter(set(folder.glob("*.whl")) - before))


def dependencies(wheel: Path, folder: Path, target: Architecture, suite: Suite, log: Path) -> list[Path]:
    """Download a wheel's direct and indirect dependencies. Raises WheelUnusable, or the same errors as ``download``.

    pip would evaluate markers such as ``platform_machine`` for this PC instead of the target, so each package is
    requested separately. The first requirement for a package determines its version. A requirement with a URL is an
    error, because the URL may be that of a source archive.
    """
    environment: dict[str, str | Set[str]] = {
        **{key: str(value) for key, value in default_environment().items()},
        "platform_machine": target.wheel_platform.removeprefix("linux_"),
        "python_version": suite.python,
        "python_full_version": f"{suite.python}.0",
    }
    start = canonicalize_name(wheel.name.partition("-")[0])
    found = {start: wheel}
    waiting = [(start, "")]  # packages, each with an extra or, for the requirements outside all extras, ""
    seen = set(waiting)
    while waiting:
        package, extra = waiting.pop()
        for requirement in _requirements(found[package]):
            if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
                continue
            if requirement.url:
                raise WheelUnusable(
                    f"{found[package].name} requires a file from a URL",
                    expected="requirements for packages in the package index",
                    found=one_line(str(requirement)),
                    fix="use another version of the package",
                )
            name = canonicalize_name(requirement.name)
            if name not in found:
                wanted = f"{requirement.name}{requirement.specifier}"
                found[name] = download(wanted, folder, target, suite, log)
            new = {(name, item) for item in ("", *requirement.extras)} - seen
            seen |= new
            waiting += sorted(new)
    return list(found.values())[1:]


def _requirements(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next((item for item in archive.namelist() if item.endswith(".dist-info/METADATA")), None)
        if name is None:
            raise WheelUnusable(
                f"{wheel.name} has no metadata",
                expected="a .dist-info/METADATA file",
                found="none",
                fix="build it again",
            )
        lines = BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist", [])
    for line in map(str, lines):  # a line that is not ASCII is an object of the class Header
        try:
            requirement = Requirement(line)
        except InvalidRequirement as fault:
            raise WheelUnusable(
                f"{wheel.name} has an invalid requirement",
                expected="requirements in pip's format, such as torch>=1.9",
                found=one_line(line),
                fix="use another version of the package",
            ) from fault
        yield requirement
