"""What a failed ``build-wheel`` means: by pip's, apt's and the compiler's own words, what to do about it."""

from __future__ import annotations

import re
import sys

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
from toolchain.errors import CommandFailed, NetworkUnreachable, SourceUnavailable
from toolchain.process import run
from wheels import contents
from wheels.request import Wanted

_ASKING_LIMIT_S = 120.0
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeoutError|ProxyError|SSLError|CERTIFICATE_VERIFY"
    r"|Max retries exceeded|Temporary failure in name resolution|Connection refused|No route to host"
)
# pip's words, for a program that it ran and that failed: the package's own build, or pip itself for what that requires.
_OF_PACKAGE = "subprocess-exited-with-error"
_OF_REQUIREMENTS = "pip subprocess to install build dependencies did not run successfully"
_NO_SUCH = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)(\S*)")
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
# With --verbose twice, pip names each wheel that is for another machine or Python.
_PASSED_OVER = re.compile(
    r"Skipping link: none of the wheel's tags \(.*\) are compatible .*?[:/]([^/\s#]+\.whl)(?:#|\s|$)"
)
_SOURCE = re.compile(r"Skipping link: No sources permitted for .*?[:/]([^/\s#]+\.(?:tar\.gz|zip))(?:#|\s|$)")
_CONFLICT = "ResolutionImpossible"
_OWN_TASKS = {"torch": "./inv build-torch", "apache-tvm-ffi": "./inv build-tvm-ffi"}
"""Packages that a recipe of this repository builds."""


def explain(fault: CommandFailed, wanted: Wanted, output: str, config: Config) -> Exception:
    """What a failed ``pip wheel`` means, by its own words.

    Where the package's build failed, it is the fault itself, with what to do about files that were not found at the end
    of the output.
    """
    if full := files.full_disk(output, f"the build of {wanted}, here or in the engine's folder", config.target_root):
        return full
    missing = _NO_SUCH.search(output)
    known = _VERSIONS.search(output)
    versions = [item.strip() for item in known[1].split(",") if item.strip() != "none"] if known else []
    if missing is None and _OF_REQUIREMENTS not in output and _OF_PACKAGE in output:
        return _with_advice(fault, output, config)
    if not versions and (network := _NO_NETWORK.search(output)):
        line = next(line for line in output.splitlines() if network[0] in line)
        return NetworkUnreachable(
            f"pip cannot reach its index, to build {wanted}",
            expected="the package index that this PC's pip uses (pip config list) to answer from a container",
            found=shortened(line),
            fix="fix the network, https_proxy or pip.conf, then run the task again",
        )
    if missing is None:
        pin = f"=={wanted.version}"
        # Where a constraint names the package, pip speaks of a conflict although the index has nothing that fits.
        if _CONFLICT in output and wanted.name and (others := wheels_for_others(wanted.name, pin, config)):
            return _without_source(wanted, wanted.name, pin, others)
        return _with_advice(fault, output, config)
    name, pin = missing[1], missing[2]
    shown = ", ".join(versions[-6:])
    if others := wheels_for_others(name, pin, config):
        return _without_source(wanted, name, pin, others)
    if canonicalize_name(name.partition("==")[0]) != canonicalize_name(wanted.name or "-"):
        return SourceUnavailable(
            f"{wanted} needs {name}{pin} to be built, and the index has none that fits",
            expected=f"{name}{pin}, as source or for the target",
            found=f"versions {shown}" if shown else "no version",
            fix=f"build that first: ./inv build-wheel {name}==VERSION; it is then found in the wheelhouse",
        )
    return SourceUnavailable(
        f"the package index does not have {wanted}",
        expected=f"version {wanted.version} of {wanted.name}",
        found=f"versions …, {shown}" if shown else "no package of that name, or none for this Python",
        fix="check the name and version for a typing error",
    )


def wheels_for_others(name: str, pin: str, config: Config) -> list[str]:
    """The index's wheels of a package, of version X if ``pin`` is ``==X``; none where it has source or one that fits.

    Asked anew, by this PC's pip: to name each of them costs the emulated one minutes.
    """
    image = config.image
    with files.scratch_folder(config.target_root / "work", "wheel") as scratch:
        argv = [sys.executable, "-m", "pip", "download", "-vv", "--no-input", "--no-deps", f"--dest={scratch}"]
        argv += ["--only-binary=:all:", f"--platform={image.target.wheel_platform}"]
        argv += [f"--python-version={load_suite(image.suite).python}", f"{name}{pin}"]
        asked = run(argv, check=False, limit_s=_ASKING_LIMIT_S)
    if any(_is_of(link[1], name, pin) for link in _SOURCE.finditer(asked.output)):
        return []
    links = [link[1] for link in _PASSED_OVER.finditer(asked.output)]
    return list(dict.fromkeys(link for link in links if _is_of(link, name, pin)))


def _is_of(file: str, name: str, pin: str) -> bool:
    """Whether a file of the index is one of a package, and of version X if ``pin`` is ``==X``."""
    try:
        project, version = (parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename)(file)[:2]
        return project == canonicalize_name(name) and (not pin.startswith("==") or version == Version(pin[2:]))
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return False


def _without_source(wanted: Wanted, name: str, pin: str, others: list[str]) -> SourceUnavailable:
    asked = f"{name}{pin}"
    own = _OWN_TASKS.get(canonicalize_name(name))
    needed = "" if canonicalize_name(name) == canonicalize_name(wanted.name or "-") else f", which {wanted} needs"
    return SourceUnavailable(
        f"the package index has no source of {asked}{needed}: only wheels, and none is for the target",
        expected="a source archive, or a wheel for the target's machine and Python",
        found=f"{len(others)} wheel{'s' if len(others) > 1 else ''} for others, such as {others[-1]}",
        fix=f"{own} builds it"
        if own
        else f"get the source of {asked} from its project, then ./inv build-wheel FOLDER (docs/wheels.md, "
        "'A package without source')",
    )


def _with_advice(fault: CommandFailed, output: str, config: Config) -> CommandFailed:
    """The fault, with what to do about files that the build did not find at the end of its output."""
    if not (advice := contents.advice(output, config)):
        return fault
    return CommandFailed(
        fault.summary,
        returncode=fault.returncode,
        expected=fault.expected,
        found=fault.found,
        fix=fault.fix,
        tail=f"{fault.tail.rstrip()}\n--- files that the build did not find ---\n{advice}",
    )


def explain_apt(fault: CommandFailed, output: str, config: Config) -> Exception:
    """What it means that the distribution's packages for a build could not be installed, by apt's own words."""
    if full := files.full_disk(output, "packages in the engine's folder", config.target_root):
        return full
    complaints = [line.removeprefix("E: ") for line in output.splitlines() if line.startswith("E: ")]
    found = shortened(complaints[0]) if complaints else fault.found
    if unknown := apt.UNKNOWN.search(output):
        return SourceUnavailable(
            f"{config.image.suite} has no package {unknown[1] or unknown[2]}",
            expected="a package of the lists that the image was made by",
            found=found,
            fix="check the name that --package gives for a typing error",
        )
    if apt.UNREACHABLE.search(output):
        return NetworkUnreachable(
            "the mirror does not give the packages that --package names",
            expected="every package that the verified lists name",
            found=found,
            fix="check the network; if the mirror has moved on since, run ./inv build-image --update",
        )
    return CommandFailed(
        "the packages that --package names cannot be installed",
        returncode=fault.returncode,
        expected="apt-get install to end with status 0",
        found=found,
        fix="apt's own words are below",
        tail=fault.tail,
    )


def shortened(line: str) -> str:
    """A line of output for a message: its beginning and end, if it is long."""
    text = " ".join(line.split())
    return text if len(text) <= 240 else f"{text[:120]} … {text[-120:]}"
