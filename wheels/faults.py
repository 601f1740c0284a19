"""Search the output of pip, apt and the compiler for the reason why ``build-wheel`` failed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from images import apt
from images.flavour import load_suite
from toolchain import files
from toolchain.config import Config
from toolchain.errors import CommandFailed, DiskFull, NetworkUnreachable, SourceUnavailable, UserError
from toolchain.process import run
from wheels import contents
from wheels.pip import Output
from wheels.request import Wanted

_INDEX_LIMIT_S = 120.0
_COMPANION = (
    "./inv build-image, which builds it for the image's torch, then run ./inv serve-wheels (recipes/companions)"
)
_RECIPES = {
    "torch": "./inv build-torch",
    "torchvision": _COMPANION,
    "torchaudio": _COMPANION,
    "apache-tvm-ffi": "./inv build-tvm-ffi",
}
"""For each package with a recipe in this repository, the command that builds it."""
# The messages are those of setuptools-rust, maturin and Python.
_WITHOUT_RUST = re.compile(
    r"can't find Rust compiler|Cargo, the Rust package manager, is not installed|No such file or directory: 'cargo'"
)
_CARGO_UNREACHABLE = re.compile(r"^ *(?:failed to download from `|\[\d+\] ).*$", re.MULTILINE)
_APT_NAMES = {
    "opencv-python": "opencv",
    "opencv-python-headless": "opencv",
    "pillow": "pil",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}
"""The names of distribution packages, after ``python3-``, where they differ from those in the package index."""


class RustMissing(CommandFailed):
    """The package contains Rust code, and the container has no Rust compiler."""


def explain(
    fault: CommandFailed, wanted: Wanted, text: str, config: Config, sources: Sequence[apt.Source] = ()
) -> UserError:
    """Return the error for a failed ``pip wheel``. The fix names the distribution's package, if there is one.

    If the cause is unknown, return ``fault`` with advice about missing files added to its output. ``contents.advice``
    searches the package sources ``sources`` for these files.
    """
    error = _explained(fault, wanted, text, config, sources)
    if not isinstance(error, DiskFull) and (package := distribution_package(wanted.name, config)):
        apt_fix = f"use the distribution's package on the board: apt-get install {package}"
        error.fix = f"{error.fix}; or {apt_fix}" if error.fix else apt_fix
    return error


def distribution_package(name: str, config: Config) -> str:
    """Return the Debian package for a Python package, or "" if the image's verified package lists contain none."""
    canonical = canonicalize_name(name)
    package = f"python3-{_APT_NAMES.get(canonical, canonical.removeprefix('python-'))}"
    known = apt.package_names(config.target_root / "mirror" / "lists", config.image.architecture) if name else set()
    return package if package in known else ""


def _explained(
    fault: CommandFailed, wanted: Wanted, text: str, config: Config, sources: Sequence[apt.Source]
) -> UserError:
    if full := files.full_disk(text, f"the build of {wanted}, here or in the engine's folder", config.target_root):
        return full
    output = Output.parse(text)
    if output.build_failed and _WITHOUT_RUST.search(text):
        return RustMissing(
            f"{wanted} contains Rust code, and the container has no Rust compiler",
            returncode=fault.returncode,
            expected="the native Rust toolchain, which requires the native compiler and Debian's packages",
            found="a build without the native compiler",
            fix="set build.native_compiler: true and image.flavour: debian, or use a version for which the "
            "index has a wheel, without --from-source",
            tail=fault.tail,
        )
    if output.build_failed and (unreachable := _CARGO_UNREACHABLE.search(text)):
        return NetworkUnreachable(
            f"Cargo cannot download the crates that {wanted} requires",
            expected="a response from crates.io, or from the crate registry that ~/.cargo/config.toml names",
            found=shortened(unreachable[0]),
            fix="check the network and https_proxy, or name a reachable registry or a folder of crates in "
            "~/.cargo/config.toml, then run the task again",
        )
    if output.build_failed:
        return _with_advice(fault, text, config, sources)
    if output.unreachable:
        return NetworkUnreachable(
            f"pip cannot reach the package index that it needs to build {wanted}",
            expected="the container to reach the package index that pip's configuration names (pip config list)",
            found=shortened(output.unreachable),
            fix="check the network, https_proxy and pip.conf, then run the task again",
        )
    if not output.name:
        pin = f"=={wanted.version}"
        # If a constraint names the package, pip reports a conflict even when the index has no file that fits.
        if output.is_conflict and wanted.name and (others := wheels_for_others(wanted.name, pin, config)):
            return _without_source(wanted, wanted.name, pin, others)
        return _with_advice(fault, text, config, sources)
    name, pin = output.name, output.specifier
    shown = ", ".join(output.versions[-6:])
    if others := wheels_for_others(name, pin, config):
        return _without_source(wanted, name, pin, others)
    if not _is_same(name, wanted.name):
        return SourceUnavailable(
            f"the build of {wanted} requires {name}{pin}, and the index has no suitable version",
            expected=f"{name}{pin}, as source or as a wheel for the target",
            found=f"versions {shown}" if shown else "no version",
            fix=f"first run ./inv build-wheel {name}==VERSION, which puts the wheel into the wheelhouse",
        )
    return SourceUnavailable(
        f"the package index does not have {wanted}",
        expected=f"version {wanted.version} of {wanted.name}",
        found=f"versions …, {shown}" if shown else "no package of that name, or none for this Python",
        fix="check the spelling of the name and version",
    )


def wheels_for_others(name: str, pin: str, config: Config) -> list[str]:
    """Return the names of a package's wheels for other platforms; an empty list if the index has the package's source.

    If ``pin`` is ``==VERSION``, only that version is considered. pip on this PC queries the index, because the emulated
    pip would need minutes to list all wheels.
    """
    image = config.image
    with files.scratch_folder(config.target_root / "work", "wheel") as scratch:
        argv = [sys.executable, "-m", "pip", "download", "-vv", "--no-input", "--no-deps", f"--dest={scratch}"]
        argv += ["--only-binary=:all:", f"--platform={image.target.wheel_platform}"]
        argv += [f"--python-version={load_suite(image.suite).python}", f"{name}{pin}"]
        output = Output.parse(run(argv, check=False, limit_s=_INDEX_LIMIT_S).output)
    if any(_is_of(file, name, pin) for file in output.sources):
        return []
    return list(dict.fromkeys(file for file in output.other_platforms if _is_of(file, name, pin)))


def _is_of(file: str, name: str, pin: str) -> bool:
    """Return whether a file in the index belongs to a package and, if ``pin`` is ``==VERSION``, to that version."""
    try:
        project, version = (parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename)(file)[:2]
        return project == canonicalize_name(name) and (not pin.startswith("==") or version == Version(pin[2:]))
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return False


def _is_same(name: str, other: str) -> bool:
    return canonicalize_name(name) == canonicalize_name(other or "-")


def _without_source(wanted: Wanted, name: str, pin: str, others: list[str]) -> SourceUnavailable:
    package = f"{name}{pin}"
    task = _RECIPES.get(canonicalize_name(name))
    required_by = "" if _is_same(name, wanted.name) else f", which {wanted} requires"
    return SourceUnavailable(
        f"the package index has no source for {package}{required_by}, only wheels, and none of them is for the target",
        expected="a source archive, or a wheel for the target's machine and Python",
        found=f"{len(others)} wheel{'s' if len(others) > 1 else ''} for other targets, such as {others[-1]}",
        fix=f"run {task}"
        if task
        else f"get the source of {package} from its project, then run ./inv build-wheel FOLDER (docs/wheels.md, "
        "'A package without source')",
    )


def _with_advice(fault: CommandFailed, text: str, config: Config, sources: Sequence[apt.Source]) -> CommandFailed:
    """Add advice about missing files to the program output in the error, and return the error."""
    if not (advice := contents.advice(text, sources, config)):
        return fault
    return CommandFailed(
        fault.summary,
        returncode=fault.returncode,
        expected=fault.expected,
        found=fault.found,
        fix=fault.fix,
        tail=f"{fault.tail.rstrip()}\n--- files that the build did not find ---\n{advice}",
    )


def explain_apt(fault: CommandFailed, text: str, config: Config) -> Exception:
    """Return the error for distribution packages that apt could not install for a build; ``text`` is apt's output."""
    if full := files.full_disk(text, "packages in the engine's folder", config.target_root):
        return full
    errors = [line.removeprefix("E: ") for line in text.splitlines() if line.startswith("E: ")]
    found = shortened(errors[0]) if errors else fault.found
    if unknown := apt.UNKNOWN.search(text):
        return SourceUnavailable(
            f"{config.image.suite} has no package {unknown[1] or unknown[2]}",
            expected="a package in the lists that the image was built from",
            found=found,
            fix="check the spelling of the name given with --package",
        )
    if apt.UNREACHABLE.search(text):
        return NetworkUnreachable(
            "the mirror does not provide the packages given with --package",
            expected="a mirror with every package in the verified lists",
            found=found,
            fix="check the network; if the mirror has been updated since the image was built, run ./inv build-image "
            "--update",
        )
    return CommandFailed(
        "the packages given with --package cannot be installed",
        returncode=fault.returncode,
        expected="apt-get install to exit with status 0",
        found=found,
        fix="correct the error in apt's output below",
        tail=fault.tail,
    )


def shortened(line: str) -> str:
    """Return an output line for a message, shortened to its beginning and end if it is long."""
    text = " ".join(line.split())
    return text if len(text) <= 240 else f"{text[:120]} … {text[-120:]}"
