"""Package archives that are created locally and signed with temporary keys, used instead of the public archives.

A flavour's archives are defined as data, not in code. A test replaces only the address and the key in this
data, and runs the project's code with this PC's apt and dpkg.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from apt_parts import Key
from http_parts import served

from images import apt, flavour
from toolchain.process import run

SUITE = "trixie"


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package with one or two files. ``version`` and ``depends`` are in dpkg's format."""

    name: str
    version: str = "1.0"
    architecture: str = "armhf"
    depends: str = ""
    multi_arch: str = ""
    essential: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def control(self) -> str:
        """Return the package's control file."""
        fields = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": self.architecture,
            "Maintainer": "Nobody <nobody@example.org>",
            "Depends": self.depends,
            "Multi-Arch": self.multi_arch,
            "Essential": "yes" if self.essential else "",
            "Description": "stands in for another",
        }
        return "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


class StandIn:
    """An archive in ``folder``, whose indices state ``origin``."""

    def __init__(self, folder: Path, origin: str) -> None:
        self.folder = folder
        self.origin = origin
        self.components: tuple[str, ...] = ("main",)
        self._pool = folder / "pool"
        self._pool.mkdir(parents=True)
        self._described: dict[str, str] = {}
        self.key = Key(folder)

    def add(self, *packages: Package) -> None:
        """Build packages and put them into the pool."""
        for package in packages:
            tree = self.folder / "tree"
            (tree / "DEBIAN").mkdir(parents=True)
            (tree / "DEBIAN/control").write_text(package.control)
            for name, content in {f"usr/bin/{package.name}": b"", **package.files}.items():
                path = tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            self._pack(tree)

    def repack(self, originals: Iterable[Path], suffix: str) -> None:
        """Put packages from another archive into the pool; append ``suffix`` to all versions in their control files."""
        for original in originals:
            tree = self.folder / "tree"
            run(["dpkg-deb", "--raw-extract", original, tree])
            control = tree / "DEBIAN/control"
            text = re.sub(r"(?m)^(Version: .*)$", rf"\1{suffix}", control.read_text())
            control.write_text(re.sub(r"\(= ([^)]+)\)", rf"(= \1{suffix})", text))
            self._pack(tree)

    def _pack(self, tree: Path) -> None:
        control = (tree / "DEBIAN/control").read_text().rstrip("\n")
        said = dict(re.findall(r"(?m)^(Package|Version|Architecture): (.*)$", control))
        name = f"{said['Package']}_{said['Version'].rpartition(':')[2]}_{said['Architecture']}.deb"
        run(["dpkg-deb", "-Znone", "--root-owner-group", "--build", tree, self._pool / name])
        shutil.rmtree(tree)
        content = (self._pool / name).read_bytes()
        where = f"Filename: pool/{name}\nSize: {len(content)}"
        self._described[name] = f"{control}\n{where}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"

    def publish(self, *suites: str) -> None:
        """Write the index of the pool, and sign it."""
        for suite in suites:
            dist = self.folder / "dists" / suite
            origin = [f"Origin: {self.origin}", f"Label: {self.origin}"] if self.origin else []
            lines = [*origin, f"Suite: {suite}", f"Codename: {suite}"]
            lines += ["Date: Thu, 01 Jan 2026 00:00:00 UTC", "Architectures: amd64 arm64 armhf all", "SHA256:"]
            for component, architecture in itertools.product(self.components, ("amd64", "arm64", "armhf")):
                mine = (f"_{architecture}.deb", "_all.deb")
                text = "\n".join(
                    self._described[name] for name in sorted(self._described) if name.endswith(mine)
                ).encode()
                index = f"{component}/binary-{architecture}/Packages"
                packed = dist / f"{index}.gz"
                packed.parent.mkdir(parents=True, exist_ok=True)
                packed.write_bytes(gzip.compress(text, mtime=0))
                for file, content in ((index, text), (f"{index}.gz", packed.read_bytes())):
                    lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {file}")
            (dist / "Release").write_text("\n".join(lines) + "\n")
            self.key.clearsign(dist / "Release", dist / "InRelease")


class World:
    """Substitute archives for Debian, Raspbian and Raspberry Pi, which are empty until packages are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.debian = StandIn(folder / "debian", "Debian")
        self.raspbian = StandIn(folder / "raspbian", "Raspbian")
        self.raspberrypi = StandIn(folder / "raspberrypi", "Raspberry Pi Foundation")

    @contextlib.contextmanager
    def serving(self, *, debian: bool = True) -> Iterator[None]:
        """Publish and serve the archives (Debian's only if ``debian`` is true), and put them in the flavours' data."""
        if debian:
            self.debian.publish(SUITE, f"{SUITE}-updates", f"{SUITE}-security")
        self.raspbian.publish(SUITE)
        self.raspberrypi.publish(SUITE)
        with (
            tempfile.TemporaryDirectory(prefix="pitorch-data-") as folder,
            served(self.folder) as uri,
            pytest.MonkeyPatch.context() as changed,
        ):
            data = Path(folder)
            shutil.copytree(flavour.HERE / "flavours", data / "flavours")
            shutil.copy(flavour.HERE / "packages.toml", data)
            for name, archive in (("raspbian", self.raspbian), ("raspberrypi-kernel", self.raspberrypi)):
                _change(
                    data / "flavours" / f"{name}.toml",
                    url=f"{uri}/{archive.folder.name}/archive.asc",
                    fingerprint=archive.key.fingerprint,
                    mirror=f"{uri}/{archive.folder.name}",
                    components=["main"],
                )
            if debian:
                described = data / "flavours" / "debian.toml"
                described.write_text(described.read_text().replace("keyring =", "keyring_in_root =", 1))
                described.write_text(f'keyring = "{self.debian.key.keyring}"\n{described.read_text()}')
                there = f"{uri}/{self.debian.folder.name}"
                changed.setattr(apt, "host_mirrors", lambda: {"main": there, "security": there})
            changed.setattr(flavour, "HERE", data)
            changed.setenv("no_proxy", "127.0.0.1")
            yield

    def close(self) -> None:
        """Stop the agents that gpg leaves running."""
        for archive in (self.debian, self.raspbian, self.raspberrypi):
            archive.key.close()


def _change(data: Path, **values: str | list[str]) -> None:
    """Change settings in a TOML file. A setting is one line; all occurrences of the setting, if any, are changed."""
    lines = []
    for line in data.read_text().splitlines():
        name = line.partition(" = ")[0]
        lines.append(f"{name} = {values[name]!r}".replace("'", '"') if name in values else line)
    data.write_text("\n".join(lines) + "\n")


def versions(packages: Iterable[Path | str]) -> dict[str, str]:
    """Map (name, architecture) to version for package files named as in an archive."""
    found = {}
    for name in packages:
        package, version, architecture = Path(name).name.removesuffix(".deb").split("_")
        found[f"{package}:{architecture}"] = version.replace("%3a", ":")
    return found
