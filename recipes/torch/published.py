"""Fetch the package index's pinned wheels of torch, torchvision and torchaudio for targets that have no prebuilt wheel.

pip fetches the wheels with this PC's settings (indices, proxies, certificates). ``published.toml`` contains the file
names and SHA-256 values. pip compares the SHA-256 when it fetches a file, and ``obtain`` compares it on every use.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from images.flavour import load_suite
from toolchain.config import Config
from wheels.pip import download_pinned

_DATA = Path(__file__).with_name("published.toml")
_OTHER_PLACE = "or put a wheel for the target into a wheelhouse (torch.wheelhouse)"


@dataclass(frozen=True)
class Pin:
    """A wheel in the package index: its file name and SHA-256."""

    file: str
    sha256: str

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return parse_wheel_filename(self.file)[0]

    @property
    def version(self) -> str:
        """The version of the distribution."""
        return str(parse_wheel_filename(self.file)[1])

    @property
    def platforms(self) -> list[str]:
        """The platform tags of the wheel."""
        return sorted({tag.platform for tag in parse_wheel_filename(self.file)[3]})

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def pins(config: Config) -> tuple[Pin, ...]:
    """Return the target's pinned wheels, torch first; empty if there are none."""
    table = tomllib.loads(_DATA.read_text()).get(f"{config.image.suite}-{config.image.architecture}", {})
    return tuple(Pin(file, sha256) for file, sha256 in table.items())


def place(pin: Pin, config: Config) -> Path:
    """Return the path of the fetched wheel, whether or not it exists."""
    return config.build_root / "published" / pin.file


def obtain(pin: Pin, config: Config) -> Path:
    """Return the wheel's path; fetch the wheel unless it is already there.

    Raises NetworkUnreachable, or SourceUnavailable if the index lacks the wheel or the wheel's SHA-256 is not the
    pinned one.
    """
    # An index without hashes could otherwise offer another wheel of this version.
    tags = [f"--python-version={load_suite(config.image.suite).python}", *map("--platform={}".format, pin.platforms)]
    return download_pinned(
        pin.name,
        pin.version,
        pin.sha256,
        place(pin, config),
        words=["--only-binary=:all:", "--implementation=cp", *tags],
        log=config.target_root / "logs" / "published.log",
        fix=f"configure an index that has the wheel (pip config list prints the current index), {_OTHER_PLACE}",
    )
