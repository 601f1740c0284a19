"""Parse the arguments of ``build-wheel``: a package or a project, and the build's options."""

from __future__ import annotations

import hashlib
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
    """The source of a wheel: a project on this PC, or a name and version in pip's index."""

    project: Path | None = None
    name: str = ""
    version: str = ""

    def __str__(self) -> str:
        return str(self.project) if self.project else f"{self.name}=={self.version}"

    @property
    def label(self) -> str:
        """A name for the log. Projects with the same file name but different paths have different log names."""
        text = f"{canonicalize_name(self.name)}-{self.version}"
        if self.project:
            text = f"{self.project.name}-{hashlib.sha256(os.fsencode(self.project)).hexdigest()[:8]}"
        return re.sub(r"[^A-Za-z0-9._+-]", "-", text)

    @classmethod
    def parse(cls, text: str, *, folder: Path) -> Wanted:
        """Parse NAME==VERSION, or the path (relative to ``folder``) of a project's folder or source archive.

        Raises SourceUnavailable for any other text, and if there is no project at the path.
        """
        if not _looks_like_path(text, folder):
            return cls._pinned(text)
        path = Path(os.path.realpath(folder / text))  # Path.resolve raises RuntimeError for a loop of links
        if path.is_dir():
            if not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
                raise SourceUnavailable(
                    f"{path} is not a Python project",
                    expected="a folder with pyproject.toml or setup.py",
                    found=_listing(path),
                    fix="pass the folder that contains one of these files, or NAME==VERSION",
                )
            return cls(project=path)
        if path.is_file() and path.name.endswith(_ARCHIVES):
            return cls(project=path)
        raise SourceUnavailable(
            f"there is no project at {path}",
            expected=f"a project's folder or source archive ({', '.join(_ARCHIVES)})",
            found="a file of another type" if path.is_file() else "nothing",
            fix="check the path, or pass NAME==VERSION for a package in the index",
        )

    @classmethod
    def _pinned(cls, text: str) -> Wanted:
        fix = "pass one version or a project: ./inv build-wheel pyyaml==6.0.2, or ./inv build-wheel ./my-project"
        try:
            requirement = Requirement(text)
            (pin,) = requirement.specifier
            version = str(Version(pin.version))
        except (InvalidRequirement, ValueError) as fault:
            raise SourceUnavailable(
                f"{text!r} does not identify one wheel",
                expected="NAME==VERSION, or the path of a project",
                found="no version, or more than one" if not isinstance(fault, InvalidRequirement) else repr(text),
                fix=fix,
            ) from fault
        if pin.operator != "==" or requirement.extras or requirement.marker or requirement.url:
            raise SourceUnavailable(
                f"{text!r} does not identify one wheel",
                expected="one version, without extras, markers or a URL",
                found=text,
                fix=fix,
            )
        return cls(name=requirement.name, version=version)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a build."""

    from_source: bool = False
    """Whether to build the package even if the index has a wheel."""
    packages: Sequence[str] = ()
    """Distribution packages to install for this build."""
    isolated: bool = True
    """Whether to install build requirements into an isolated environment instead of using the container's packages."""
    constraints: Sequence[str] = ()
    """The URLs of pip's constraints files, which also apply to build requirements."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The build's environment variables, which override all others."""

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
        """Parse a task's options. Paths are relative to ``folder``.

        ``variables`` are NAME=VALUE, or NAME for a variable that is set in this process's environment. Raises
        SourceUnavailable for invalid options.
        """
        if wrong := [name for name in packages if not _PACKAGE.fullmatch(name)]:
            raise SourceUnavailable(
                "a name given with --package is not a valid Debian package name",
                expected="names of Debian packages: lower-case letters, digits, '+', '-' and '.'",
                found=", ".join(map(repr, wrong)),
                fix="correct the name; for example: --package=libxml2-dev",
            )
        paths = [text if "://" in text else os.path.realpath(folder / text) for text in constraints]
        if absent := [path for path in paths if "://" not in path and not Path(path).is_file()]:
            raise SourceUnavailable(
                f"there is no constraints file at {absent[0]}",
                expected="a file with lines such as numpy<2, or the URL of such a file",
                found="no file",
                fix="check the path after --constraint",
            )
        return cls(
            from_source=from_source,
            packages=packages,
            isolated=isolated,
            # pip splits the variable PIP_CONSTRAINT at spaces, which a URL does not contain.
            constraints=[path if "://" in path else Path(path).as_uri() for path in paths],
            environment=dict(_variable(text) for text in variables),
        )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise SourceUnavailable(
            f"--env={name} does not contain a valid variable name",
            expected="NAME of a variable that is set in this shell, or NAME=VALUE",
            found=repr(name),
            fix="correct the name; for example: --env=CFLAGS=-O3",
        )
    if not equals and name not in os.environ:
        raise SourceUnavailable(
            f"--env={name}: the variable is not set",
            expected="an exported variable, or NAME=VALUE",
            found=f"no variable {name}",
            fix=f"export {name} first (with sudo: sudo --preserve-env={name})",
        )
    return name, value if equals else os.environ[name]


def _looks_like_path(text: str, folder: Path) -> bool:
    if "==" in text and "/" not in text:
        return False
    return "/" in text or text in (".", "..") or text.endswith(_ARCHIVES) or (text != "" and (folder / text).exists())


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "an empty folder"
