"""Build a wheel of any Python package with ``pip wheel`` in a container for the target.

The container contains compilers, torch and libqpu. Native programs are mounted over the container's emulated compiler
and build tools (images.native, images.build_tools). pip creates its usual isolated build environment in the container.
pip finds requirements in the first wheelhouse, among the wheels that the caller passes, and in the package indices that
pip uses on this PC (wheels.pip_settings).

The wheel is audited (archive, RECORD, ELF files, tag) before it is put into the wheelhouse.
"""

from __future__ import annotations

import functools
import shlex
import shutil
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import docker
from elftools.elf.elffile import ELFFile
from packaging.utils import canonicalize_name, parse_wheel_filename

from engine.containers import run_in
from images import apt, build_tools, native
from images.flavour import load_suite
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, CommandFailed, PlatformMismatch, SourceUnavailable
from toolchain.jobs import compile_jobs
from toolchain.manifest import Artefact
from wheels import find as wheels
from wheels import pip_settings
from wheels.faults import explain, explain_apt, shortened
from wheels.request import Options, Wanted
from wheels.wheelhouse import place, wheelhouses

_HOME = "/usr/src/wheel"
_WHEELHOUSE = "/usr/src/wheelhouse"
_LISTS = "/usr/src/lists"
_LIBRARIES = "libraries"
"""The file next to the wheel that lists the container's libraries by package."""
# This exit code means that apt failed. Neither apt nor pip uses it.
_APT_FAILED = 83
_LIMIT_S = 24 * 3600.0
# Prefixes of the sonames of libraries that every system with Python contains (PEP 599, as far as it applies to 32-bit
# ARM).
_EVERYWHERE = (
    *("libc.so.", "libm.so.", "libdl.so.", "libpthread.so.", "librt.so.", "libutil.so.", "ld-linux"),
    *("libgcc_s.so.", "libstdc++.so.", "libpython3"),
)
_NOT_COPIED = ("__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache", "*.egg-info")


@dataclass(frozen=True, kw_only=True)
class BuildContainer:
    """The container in which wheels are built."""

    image: str
    mounts: native.Mounts
    """Native programs that are mounted over the emulated ones."""
    wheels: Sequence[Path] = ()
    """Wheels outside the first wheelhouse that a build may require."""
    sources: Sequence[apt.Source] = ()
    """Package sources whose indices are searched for files that a build did not find."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A wheel in the wheelhouse."""

    wheel: Artefact
    elf_files: int
    """The number of programs and libraries in the wheel."""
    seconds: float
    warnings: tuple[str, ...]

    @property
    def row(self) -> progress.Row:
        """The wheel's row in the final table."""
        note = f"{self.elf_files} ELF file{'s' if self.elf_files > 1 else ''}" if self.elf_files else "pure Python"
        return progress.row_of(self.wheel.path.name, self.wheel, self.seconds, note)


def build(
    client: docker.DockerClient, container: BuildContainer, wanted: Wanted, options: Options, config: Config
) -> Done:
    """Build one wheel and put it into the first wheelhouse.

    Raises SourceUnavailable if there is no such package or version; CommandFailed if the package's own build failed;
    and PlatformMismatch or WheelUnusable if the wheel does not fit the target. NetworkUnreachable, DiskFull and
    RustMissing are raised for other failures.
    """
    began = time.monotonic()
    wheelhouse = wheelhouses(config)[0]
    wheelhouse.mkdir(parents=True, exist_ok=True)
    log = config.target_root / "logs" / f"build-wheel-{wanted.label}.log"
    files.remove(log)
    with (
        files.scratch_folder(config.target_root / "work", "wheel") as scratch,
        progress.step(f"build a wheel of {wanted}"),
    ):
        out, source = scratch / "out", scratch / "source"
        out.mkdir()
        source.mkdir()
        requirement = copy_project(wanted, source, config)
        available = wheel_mounts([*sorted(wheelhouse.glob("*.whl")), *container.wheels], wanted)
        settings = pip_settings.of_this_pc([_WHEELHOUSE] if available else [], options.constraints)
        certificates = settings.environment.get("PIP_CERT", "")
        with progress.bar(f"pip wheel {wanted}") as bar:
            lines = 0

            def on_line(line: str) -> None:
                nonlocal lines
                lines += 1
                bar.update(lines, note=line.strip()[:60])

            try:
                run_in(
                    client,
                    container.image,
                    command(requirement, wanted, scratch, options),
                    architecture=config.image.target,
                    binds=[
                        f"{source}:{_HOME}/source:rw",
                        f"{out}:{_HOME}/out:rw",
                        *([f"{config.target_root / 'mirror' / 'lists'}:{_LISTS}:ro"] if options.packages else []),
                        *available,
                        *settings.binds(),
                        *container.mounts.binds(),
                    ],
                    environment={
                        **container.mounts.environment,
                        **settings.environment,
                        **({"CARGO_HTTP_CAINFO": certificates} if certificates else {}),
                        **_environment(config),
                        **options.environment,
                    },
                    workdir=_HOME,
                    limit_s=_LIMIT_S,
                    log=log,
                    on_line=on_line,
                    fix=f"find the cause in the build's output: the end is below, and the full output is in {log}",
                )
            except CommandFailed as fault:
                output = log.read_text(errors="replace")
                if fault.returncode == _APT_FAILED:
                    raise explain_apt(fault, output, config) from fault
                raise explain(fault, wanted, output, config, container.sources) from fault
        made = _only_wheel(out, log)
        elf_files = audit(made, config)
        missing = libraries_not_included(made)
        owners = packages_of(missing, out / _LIBRARIES)
        placed, warnings = place(made, wheelhouse)
    if missing:
        warnings.append(f"{made.name} requires libraries on the board: {libraries_text(missing, owners)}")
    for warning in warnings:
        progress.warn(warning)
    return Done(
        wheel=Artefact.of(placed), elf_files=elf_files, seconds=time.monotonic() - began, warnings=tuple(warnings)
    )


def audit(wheel: Path, config: Config) -> int:
    """Audit a wheel and its tag; return the number of ELF files in it. Raises WheelUnusable or PlatformMismatch."""
    image, suite = config.image, load_suite(config.image.suite)
    count = wheels.audit(wheel, image.target)
    tags = parse_wheel_filename(wheel.name)[3]
    if not tags & wheels.tags_for(image.target, suite):
        raise PlatformMismatch(
            f"{wheel.name} is not compatible with the image",
            expected=f"a tag such as {suite.python_tag}-{suite.python_tag}-{image.target.wheel_platform}",
            found=", ".join(sorted(str(tag) for tag in tags)),
            fix="check how the project's build sets the platform tag",
        )
    return count


def libraries_not_included(wheel: Path) -> list[str]:
    """Return the sonames that a wheel's ELF files require, except those in the wheel or on every system with Python."""
    needed: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        own = {Path(name).name for name in archive.namelist()}
        for _, content in wheels.elf_members(archive):
            needed |= set(wheels.dynamic(ELFFile(content))[0])
    return sorted(name for name in needed - own if not name.startswith(_EVERYWHERE))


def packages_of(sonames: Iterable[str], listing: Path) -> dict[str, str]:
    """Return the distribution package of each library, by soname.

    ``listing`` is the output of grep over dpkg's file lists: lines such as ``…/PACKAGE[:ARCHITECTURE].list:PATH``.
    """
    known: dict[str, str] = {}
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        owner, _, path = line.partition(".list:")
        known.setdefault(path.rpartition("/")[2], owner.rpartition("/")[2].partition(":")[0])
    return {name: known[name] for name in sonames if name in known}


def libraries_text(sonames: Sequence[str], owners: Mapping[str, str]) -> str:
    """Return the command that installs the libraries' packages, followed by the libraries whose package is unknown."""
    by_package: dict[str, list[str]] = {}
    for name in sonames:
        by_package.setdefault(owners.get(name, ""), []).append(name)
    unknown = by_package.pop("", [])
    words = [f"apt-get install {' '.join(by_package)} (for {', '.join(sorted(owners))})"] if by_package else []
    return "; ".join([*words, *([f"{', '.join(unknown)} (package unknown)"] if unknown else [])])


def wheel_mounts(found: Sequence[Path], wanted: Wanted) -> list[str]:
    """Return the mounts for wheels that the build may require. Of wheels with the same name, only the first is mounted.

    Wheels of the package itself are excluded, because pip would return them instead of building the package.
    """
    name = canonicalize_name(wanted.name)
    others = {path.name: path for path in reversed(found) if path.is_file()}
    return [
        f"{path.resolve()}:{_WHEELHOUSE}/{path.name}:ro"
        for path in sorted(others.values())
        if canonicalize_name(path.name.partition("-")[0]) != name
    ]


def copy_project(wanted: Wanted, source: Path, config: Config) -> str:
    """Copy a project for the container, because builds write into the project's folder.

    Returns the requirement to pass to pip. The build folder is not copied if it is inside the project. ``.git`` is
    copied, because many builds derive the version from it. Raises DiskFull, or SourceUnavailable if a file cannot be
    copied.
    """
    if wanted.project is None:
        return str(wanted)
    # The engine's API accepts only UTF-8, so other bytes in the name become question marks.
    target = source / wanted.project.name.encode(errors="replace").decode()
    try:
        with files.room_for(f"a copy of {wanted.project}", source):
            if wanted.project.is_dir():
                ours = {config.build_root.resolve(), source.resolve()}
                shutil.copytree(wanted.project, target, symlinks=True, ignore=functools.partial(_ignored, ours))
            else:
                shutil.copyfile(wanted.project, target)
    except (shutil.Error, PermissionError) as fault:
        # shutil.Error lists all files that could not be copied, each with the reason.
        reason = fault.args[0][0][2] if isinstance(fault, shutil.Error) else str(fault)
        raise SourceUnavailable(
            f"{wanted.project} cannot be copied for the build",
            expected="files, links and folders that this user can read",
            found=shortened(reason),
            fix="make these files readable, or move them elsewhere if they do not belong to the project",
        ) from fault
    return f"{_HOME}/source/{target.name}"


def _ignored(ours: Set[Path], folder: str, names: list[str]) -> set[str]:
    found = shutil.ignore_patterns(*_NOT_COPIED)(folder, names)
    return found | {name for name in names if Path(folder) / name in ours}


def command(requirement: str, wanted: Wanted, scratch: Path, options: Options) -> Sequence[str]:
    """Return the container's command: apt, pip, then chown, which gives the files to the user who runs the build."""
    words = ["python3", "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--wheel-dir", f"{_HOME}/out"]
    words += ["--no-binary", wanted.name] if options.from_source and wanted.name else []
    words += [] if options.isolated else ["--no-build-isolation"]
    owner = scratch.stat()
    script = 'home=$1; shift; trap \'chown -R "$0" "$home"\' EXIT; '
    if options.packages:
        # The lists are mounted read-only, so apt cannot lock them. The image was installed from the same lists.
        settings = f"-o Dir::State::lists={_LISTS} -o Debug::NoLocking=true -o Acquire::Retries=3"
        install = f"apt-get -q {settings} install --yes --no-install-recommends {shlex.join(options.packages)}"
        script += f"{install} || exit {_APT_FAILED}; "
    script += f"[ ! -x {build_tools.INSTALL} ] || {build_tools.INSTALL}; "
    script += f'"$@"; grep -E \'/lib[^/]*[.]so[^/]*$\' /var/lib/dpkg/info/*.list >"$home/out/{_LIBRARIES}"'
    return ["sh", "-euc", script, f"{owner.st_uid}:{owner.st_gid}", _HOME, *words, "--", requirement]


def _environment(config: Config) -> dict[str, str]:
    jobs = str(compile_jobs(config.build))
    return {
        "HOME": "/root",
        "MAX_JOBS": jobs,
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAKEFLAGS": f"-j{jobs}",
        "CARGO_BUILD_JOBS": jobs,
        "SOURCE_DATE_EPOCH": str(config.image.source_date_epoch),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        # Use wheels for build requirements even if the index has newer source, so that no build compiles numpy.
        "PIP_PREFER_BINARY": "1",
        # Without this variable, maturin would download a Rust compiler, which would run under emulation.
        "MATURIN_NO_INSTALL_RUST": "1",
    }


def _only_wheel(out: Path, log: Path) -> Path:
    made = sorted(out.glob("*.whl"))
    if len(made) != 1:
        raise ArtefactMissing(
            "pip did not build exactly one wheel",
            expected="one wheel",
            found=", ".join(path.name for path in made) or "none",
            fix=f"find the cause in {log}",
        )
    return made[0]
