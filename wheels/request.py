"""What ``build-wheel`` is asked for: a package or a project, and how its build is to run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from toolchain.errors import SourceUnavailable

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARCHIVES = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a wheel is to be made of: a project on this PC, or a name and version from pip's index."""

    project: Path | None = None
    name: str = ""
    version: str = ""

    def __str__(self) -> str:
        return str(self.project) if self.project else f"{self.name}=={self.version}"

    @property
    def label(self) -> str:
        """For the name of a log."""
        text = self.project.name if self.project else f"{canonicalize_name(self.name)}-{self.version}"
        return re.sub(r"[^A-Za-z0-9._+-]", "-", text)

    @classmethod
    def parse(cls, text: str, *, folder: Path) -> Wanted:
        """NAME==VERSION, or a path (relative to ``folder``) of a project's folder or of its source archive.

        Raises SourceUnavailable for anything else, and for a path without a project.
        """
        if not _looks_like_path(text, folder):
            return cls._pinned(text)
        try:
            path = (folder / Path(text).expanduser()).resolve()
        except RuntimeError as fault:
            raise SourceUnavailable(
                f"there is no project at {text}",
                expected="the name of a user of this PC after ~",
                found="no such user, or none with a home",
                fix="check the path; a package of the index is named NAME==VERSION",
            ) from fault
        if path.is_dir():
            if not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
                raise SourceUnavailable(
                    f"{path} is no Python project",
                    expected="a folder with pyproject.toml or setup.py",
                    found=_listing(path),
                    fix="name the folder that has it, or NAME==VERSION",
                )
            return cls(project=path)
        if path.is_file() and path.name.endswith(_ARCHIVES):
            return cls(project=path)
        raise SourceUnavailable(
            f"there is no project at {path}",
            expected=f"a project's folder, or its source archive ({', '.join(_ARCHIVES)})",
            found="a file of another kind" if path.is_file() else "nothing",
            fix="check the path; a package of the index is named NAME==VERSION",
        )

    @classmethod
    def _pinned(cls, text: str) -> Wanted:
        fix = "for instance ./inv build-wheel pyyaml==6.0.2, or ./inv build-wheel ./my-project"
        try:
            wish = Requirement(text)
            (pin,) = wish.specifier
            version = str(Version(pin.version))
        except (InvalidRequirement, ValueError) as fault:
            raise SourceUnavailable(
                f"{text!r} does not say which wheel",
                expected="NAME==VERSION, or the path of a project",
                found="more or less than one version" if not isinstance(fault, InvalidRequirement) else repr(text),
                fix=fix,
            ) from fault
        if pin.operator != "==" or wish.extras or wish.marker or wish.url:
            raise SourceUnavailable(
                f"{text!r} does not say which wheel",
                expected="one version, and no extras or markers: they are not part of a wheel",
                found=text,
                fix=fix,
            )
        return cls(name=wish.name, version=version)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a build is to run."""

    from_source: bool = False
    """Take no ready wheel of the index."""
    packages: Sequence[str] = ()
    """Packages of the distribution that are installed for this build."""
    isolated: bool = True
    """Make an environment of what the project requires for its build; else it is the workbench's own packages."""
    constraints: Sequence[str] = ()
    """pip's constraints, for what the build requires too: paths on this PC, or addresses."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the build, over all others."""

    @classmethod
    def parse(
        cls,
        *,
        folder: Path,
        from_source: bool,
        packages: Sequence[str],
        isolated: bool,
        constraints: Sequence[str],
        variables: Sequence[str],
    ) -> Options:
        """Of a task's options; paths count from ``folder``, ``variables`` are NAME (this PC's value) or NAME=VALUE.

        Raises SourceUnavailable for what cannot be.
        """
        if wrong := [name for name in packages if not _PACKAGE.fullmatch(name)]:
            raise SourceUnavailable(
                "what the build wants of the distribution is named by packages",
                expected="names of Debian packages: lower case, digits, '+', '-' and '.'",
                found=", ".join(map(repr, wrong)),
                fix="for instance --package=libxml2-dev",
            )
        paths = [text if "://" in text else str((folder / Path(text)).resolve()) for text in constraints]
        if absent := [path for path in paths if "://" not in path and not Path(path).is_file()]:
            raise SourceUnavailable(
                f"there is no file of constraints at {absent[0]}",
                expected="a file with lines such as numpy<2, or its address",
                found="nothing, or a folder",
                fix="check the path that --constraint gives",
            )
        return cls(
            from_source=from_source,
            packages=packages,
            isolated=isolated,
            constraints=paths,
            environment=dict(_variable(text) for text in variables),
        )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise SourceUnavailable(
            f"--env={name} names no variable",
            expected="NAME, whose value is taken from this environment, or NAME=VALUE",
            found=repr(name),
            fix="for instance --env=CFLAGS=-O3",
        )
    if not equals and name not in os.environ:
        raise SourceUnavailable(
            f"--env={name} names a variable that is not set here",
            expected="an exported variable, or NAME=VALUE",
            found=f"no variable {name}",
            fix=f"export {name} first (under sudo: sudo --preserve-env={name})",
        )
    return name, value if equals else os.environ[name]


def _looks_like_path(text: str, folder: Path) -> bool:
    if "==" in text and "/" not in text:
        return False
    return "/" in text or text in (".", "..") or text.endswith(_ARCHIVES) or (folder / text).exists()


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "an empty folder"
