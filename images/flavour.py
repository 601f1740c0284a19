"""Read and validate the data files that define distribution flavours, releases and package lists."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.architecture import Architecture
from toolchain.config import ImageConfig
from toolchain.errors import ConfigError

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """A signing key that is not available in any package: its URL and OpenPGP fingerprint (40 hex digits)."""

    url: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Pocket:
    """A part of an archive that has its own index. ``mirror`` is ``main``, ``security`` or a URL."""

    name: str
    suite: str
    mirror: str
    also: str = ""
    """Another name of the suite in the archive, such as ``stable``, while the suite has that status."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """An archive: its pockets, and the keyring or key that verifies their indices."""

    name: str
    title: str
    components: tuple[str, ...]
    pockets: tuple[Pocket, ...]
    keyring: Path | None
    keyring_package: str
    keyring_in_root: str
    """The keyring's path in ``keyring_package``, which may differ from the path on this PC."""
    key: SigningKey | None
    architectures: tuple[str, ...]
    packages: Mapping[str, tuple[str, ...]]
    """Packages that are installed from a kernel archive, by architecture."""
    only: tuple[str, ...]
    """Patterns for the packages that roots may install from this archive; empty: all packages."""
    from_debian: tuple[str, ...]
    """Patterns for the packages that this flavour's roots install from Debian's archive: the kernel."""
    compiles_for: str
    """The target CPU of the distribution's compiler, if Debian's cross compiler generates different code."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A distribution release, with the software versions that occur in the names and paths of its packages."""

    name: str
    python: str
    gcc: str
    glibc: str
    """The C library's version."""
    glibcxx: str
    """The C++ library's newest symbol version (GLIBCXX_…)."""
    torch_libraries: tuple[str, ...]
    """Libraries for a torch wheel that does not include them."""
    torch_python: tuple[str, ...]
    """Python packages that torch imports, either immediately or on first use."""
    split_usr: bool
    """Whether packages have files outside /usr, so that a root first needs the links of a merged /usr."""

    @property
    def python_tag(self) -> str:
        """CPython's wheel tag, such as ``cp313``."""
        return "cp" + self.python.replace(".", "")


def load_flavour(name: str, suite: str) -> Flavour:
    """Return the flavour called ``name`` for a release."""
    data = _read(HERE / "flavours" / f"{name}.toml")
    key = data.get("key")
    part = _read(HERE / "flavours" / "suites.toml").get(suite, {}).get("part", "")
    return Flavour(
        name=name,
        title=data["title"],
        components=tuple(data["components"]),
        pockets=tuple(
            Pocket(
                name=row["name"],
                suite=row["suite"].format(suite=suite),
                mirror=row["mirror"],
                also=row.get("also", "").format(part=part) if part else "",
            )
            for row in data["pocket"]
        ),
        keyring=Path(data["keyring"]) if "keyring" in data else None,
        keyring_package=data.get("keyring_package", ""),
        keyring_in_root=data.get("keyring_in_root", data.get("keyring", "")),
        key=SigningKey(url=key["url"], fingerprint=key["fingerprint"]) if key else None,
        architectures=tuple(data.get("architectures", ())),
        packages={name: tuple(row) for name, row in data.get("packages", {}).items()},
        only=tuple(data.get("only", ())),
        from_debian=tuple(data.get("from_debian", ())),
        compiles_for=data.get("compiles_for", ""),
    )


def load_suite(name: str) -> Suite:
    """Return the release called ``name``."""
    row = _read(HERE / "flavours" / "suites.toml")[name]
    return Suite(
        name=name,
        python=row["python"],
        gcc=row["gcc"],
        glibc=row["glibc"],
        glibcxx=row["glibcxx"],
        torch_libraries=tuple(row["torch_libraries"]),
        torch_python=tuple(row["torch_python"]),
        split_usr=row.get("split_usr", False),
    )


def target_flavour(image: ImageConfig) -> Flavour:
    """Return the target's flavour. Raises ConfigError if the flavour does not support the architecture."""
    flavour = load_flavour(image.flavour, image.suite)
    if flavour.architectures and image.architecture not in flavour.architectures:
        raise ConfigError(
            [
                f"image.architecture: {flavour.title} has only {', '.join(flavour.architectures)}, "
                f"found {image.architecture!r}"
            ]
        )
    return flavour


def kernel_archive(image: ImageConfig) -> Flavour | None:
    """Return the separate archive that provides the kernel, or None if the image does not use one.

    Raises ConfigError if the separate archive has no kernel for the architecture.
    """
    if image.profile != "bootable" or image.kernel != "raspberrypi":
        return None
    archive = load_flavour("raspberrypi-kernel", image.suite)
    if image.architecture not in archive.packages:
        raise ConfigError(
            [
                f"image.kernel: the {archive.title} has kernels only for {', '.join(archive.packages)}, found "
                f"{image.architecture!r}; set image.kernel: distribution"
            ]
        )
    return archive


def packages_for(role: str, image: ImageConfig) -> tuple[str, ...]:
    """Return the packages of a role (a table in packages.toml) that the release has, sorted and without duplicates."""
    row = _read(HERE / "packages.toml")[role]
    target: Architecture = image.target
    suite = load_suite(image.suite)
    archive = kernel_archive(image)
    words: list[str] = []
    for template in row.get("target") or row["native"]:
        if template == "{kernel}":
            words += archive.packages[target.debian] if archive else [target.kernel_package]
        else:
            words.append(template.format(gnu=target.gnu, arch=target.debian, gcc=suite.gcc, python=suite.python))
    return tuple(sorted(set(words) - {*packages_not_in(role, image)}))


def packages_not_in(role: str, image: ImageConfig) -> tuple[str, ...]:
    """Return those packages of a role that do not exist in the image's release."""
    return tuple(_read(HERE / "packages.toml")[role].get("not_in", {}).get(image.suite, ()))


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
