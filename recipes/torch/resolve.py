"""Find the torch wheel: the wheelhouse folders, in order.

A wheel that fits by its name is then looked into: archive, RECORD, every ELF file's machine and float ABI. Without
one the image is built without torch, and says so loudly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from images.flavour import load_suite
from recipes import wheels
from recipes.recipe import load
from toolchain.config import ROOT, Config
from toolchain.errors import WheelUnusable
from toolchain.files import sha256_of


@dataclass(frozen=True)
class Resolution:
    """The wheel, or None with the reason."""

    wheel: Path | None
    version: str
    reason: str


def wheelhouses(config: Config) -> list[Path]:
    """The configured folders, absolute."""
    return [ROOT / folder for folder in config.torch.wheelhouse]


def listing(config: Config) -> str:
    """What the wheelhouses hold, as an input of the step: names, sizes and times, one a line."""
    lines = []
    for folder in wheelhouses(config):
        for path in sorted(folder.glob(f"{load('torch').settings['distribution']}-*.whl")):
            if path.is_file():
                status = path.stat()
                lines.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(lines) or "empty"


def resolve(config: Config) -> Resolution:
    """Look through the wheelhouses. Raises WheelUnusable when ``torch.required`` is set and none fits.

    A wheel that fits by name but is damaged or for another machine is an error at any rate.
    """
    target, suite = config.image.target, load_suite(config.image.suite)
    folders = wheelhouses(config)
    found, refused = wheels.candidates(folders, load("torch").settings["distribution"], wheels.tags_for(target, suite))
    if found:
        best = found[0]
        wheels.audit(best.path, target)
        return Resolution(best.path, str(best.version), f"from {best.path.parent}")
    reason = _reason(folders, refused, f"{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}")
    if config.torch.required:
        raise WheelUnusable(
            "there is no torch wheel for the image, and torch.required is set",
            expected=f"torch-*-{suite.python_tag}-{suite.python_tag}-{target.wheel_platform}.whl in a wheelhouse",
            found=reason,
            mend="put a wheel there (torch.wheelhouse in invoke.yaml), or set torch.required: false",
        )
    return Resolution(None, "", reason)


def _reason(folders: Sequence[Path], refused: Sequence[str], wanted: str) -> str:
    if refused:
        return f"no wheel is tagged {wanted}: " + "; ".join(refused)
    return "no torch wheel in " + ", ".join(str(folder) for folder in folders)


def identity(resolution: Resolution) -> str:
    """SHA-256 of the wheel, or an empty string."""
    return sha256_of(resolution.wheel) if resolution.wheel else ""
