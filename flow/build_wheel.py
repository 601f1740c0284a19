"""``build-wheel``: build any Python package for the target with plain ``pip wheel`` inside the armv7 container.

The container is the workbench, with compilers, torch and libqpu. The native compiler and build tools replace the
emulated ones (images.native, images.build_tools), which is invisible to the build of the package. pip creates its
isolated build environment in the container. Wheels in the wheelhouse, the torch of the image and the distribution's
numpy, SciPy and pandas can satisfy build requirements. pip uses the settings of this PC (wheels.pip_settings).

The wheel is audited (archive, RECORD, every ELF file, tag) before it is put into the wheelhouse. A wheel of the same
name with other contents is moved to another folder, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import shutil
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import docker
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from packaging.utils import canonicalize_name, parse_wheel_filename

from engine.containers import run_in
from engine.daemon import connect
from flow import main_job, pipelines
from flow.context import Context
from flow.native_compiler import native_compiler
from flow.wheelhouse import place
from images import build_tools, native
from images.flavour import Suite, load_suite
from recipes.wheelhouses import wheelhouses
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import (
    ArtefactMissing,
    CommandFailed,
    PlatformMismatch,
    SourceUnavailable,
)
from toolchain.jobs import compile_jobs
from toolchain.manifest import Artefact, require
from wheels import distribution as distribution_wheels
from wheels import find as wheels
from wheels import pip_settings
from wheels.faults import explain, explain_apt, shortened
from wheels.request import Options, Wanted

_HOME = "/usr/src/wheel"
_WHEELHOUSE = "/usr/src/wheelhouse"
_LISTS = "/usr/src/lists"
_LIBRARIES = "libraries"
"""File next to the wheel: the package of each library in the container."""
# Exit status for a failure of apt. Neither apt nor pip uses it.
_APT_FAILED = 83
_LIMIT_S = 24 * 3600.0
# Prefixes of sonames (those of PEP 599 that exist on 32-bit ARM), and the interpreter's library.
_EVERYWHERE = (
    *("libc.so.", "libm.so.", "libdl.so.", "libpthread.so.", "librt.so.", "libutil.so.", "ld-linux"),
    *("libgcc_s.so.", "libstdc++.so.", "libpython3"),
)
_NOT_COPIED = ("__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache", "*.egg-info")


@dataclass(frozen=True, kw_only=True)
class Done:
    """A wheel in the wheelhouse. ``elf_files`` is the number of programs and libraries in it."""

    wheel: Artefact
    elf_files: int
    seconds: float
    warnings: tuple[str, ...]

    @property
    def row(self) -> progress.Row:
        """Its line of the final table."""
        note = f"{self.elf_files} ELF file{'s' if self.elf_files > 1 else ''}" if self.elf_files else "pure Python"
        return progress.row_of(self.wheel.path.name, self.wheel, self.seconds, note)


def build_wheel(config: Config, text: str, *, folder: Path, options: Options | None = None) -> Done:
    """Build one wheel for the target and put it into the first wheelhouse folder.

    ``text`` is NAME==VERSION or a path (relative to ``folder``). Raises SourceUnavailable (no such package, version or
    project), NetworkUnreachable, DiskFull, CommandFailed (the build fails), PlatformMismatch or WheelUnusable (the
    wheel is not for the target), and as the main job.
    """
    wanted = Wanted.parse(text, folder=folder)
    main_job.ready_workbench(config, task="./inv build-wheel")
    context = Context(config)
    stand_ins = native_compiler(context)
    if stand_ins.paths:
        tools = build_tools.tool_mounts(context.tools, context.target, context.suite)
        stand_ins = build_tools.together(stand_ins, tools)
    with contextlib.closing(connect()) as client:
        return build_in(
            client,
            config.image_reference("workbench"),
            config,
            wanted,
            stand_ins=stand_ins,
            offered=offered(config),
            options=options or Options(),
        )


def offered(config: Config) -> list[Path]:
    """Wheels for build requirements outside the wheelhouses: the torch of the image, and the distribution's."""
    context = Context(config)
    manifests = pipelines.main_job(context, with_workbench=True)
    torch = require(manifests.manifest_path("torch"), "build-image").facts["wheel"]
    root = require(manifests.manifest_path("dev"), "build-image").artefact(".tar")
    folder = config.target_root / "distribution-wheels" / root.sha256[:16]
    if not folder.is_dir():
        with progress.step("wheels of the distribution's numpy, SciPy and pandas"):
            files.remove(folder.parent)
            folder.parent.mkdir(parents=True)
            distribution_wheels.make(root.path, folder, config.image.target, context.suite)
    return [*([Path(torch)] if torch else []), *sorted(folder.glob("*.whl"))]


def build_in(
    client: docker.DockerClient,
    image: str,
    config: Config,
    wanted: Wanted,
    *,
    stand_ins: native.Mounts,
    offered: Sequence[Path] = (),
    options: Options,
) -> Done:
    """``build_wheel`` in a given image; ``offered`` are wheels for build requirements."""
    began = time.monotonic()
    suite = load_suite(config.image.suite)
    wheelhouse = wheelhouses(config)[0]
    wheelhouse.mkdir(parents=True, exist_ok=True)
    log = config.target_root / "logs" / f"build-wheel-{wanted.label}.log"
    files.remove(log)
    with files.scratch_folder(config.target_root / "work", "wheel") as scratch, progress.step(f"wheel of {wanted}"):
        out, source = scratch / "out", scratch / "source"
        out.mkdir()
        source.mkdir()
        given = _bring(wanted, source, config)
        built_before = _built_before([*sorted(wheelhouse.glob("*.whl")), *offered], wanted)
        settings = pip_settings.of_this_pc([_WHEELHOUSE] if built_before else [], options.constraints)
        with progress.bar(f"pip wheel {wanted}") as bar:
            lines = 0

            def show(line: str) -> None:
                nonlocal lines
                lines += 1
                bar.update(lines, note=line.strip()[:60])

            try:
                run_in(
                    client,
                    image,
                    _command(given, wanted, scratch, options),
                    architecture=config.image.target,
                    binds=[
                        f"{source}:{_HOME}/source:rw",
                        f"{out}:{_HOME}/out:rw",
                        *([f"{config.target_root / 'mirror' / 'lists'}:{_LISTS}:ro"] if options.packages else []),
                        *built_before,
                        *settings.binds(),
                        *stand_ins.binds(),
                    ],
                    environment={
                        **stand_ins.environment,
                        **settings.environment,
                        **_environment(config),
                        **options.environment,
                    },
                    workdir=_HOME,
                    limit_s=_LIMIT_S,
                    log=log,
                    on_line=show,
                    fix=f"the last lines of the build's output are below; the whole output is in {log}",
                )
            except CommandFailed as fault:
                output = log.read_text(errors="replace")
                if fault.returncode == _APT_FAILED:
                    raise explain_apt(fault, output, config) from fault
                raise explain(fault, wanted, output, config) from fault
        made = _one_wheel(out, log)
        elf_files = accept(made, config, suite)
        needed = libraries_of_the_board(made)
        owners = packages_of(needed, out / _LIBRARIES)
        placed, warnings = place(made, wheelhouse)
    if needed:
        warnings.append(f"{made.name} requires libraries of the board: {_to_install(needed, owners)}")
    for warning in warnings:
        progress.warn(warning)
    return Done(
        wheel=Artefact.of(placed), elf_files=elf_files, seconds=time.monotonic() - began, warnings=tuple(warnings)
    )


def accept(wheel: Path, config: Config, suite: Suite) -> int:
    """Audit a wheel; the number of its ELF files. Raises WheelUnusable or PlatformMismatch."""
    count = wheels.audit(wheel, config.image.target)
    tags = parse_wheel_filename(wheel.name)[3]
    if not tags & wheels.tags_for(config.image.target, suite):
        raise PlatformMismatch(
            f"{wheel.name} does not fit the image",
            expected=f"a tag such as {suite.python_tag}-{suite.python_tag}-{config.image.target.wheel_platform}",
            found=", ".join(sorted(str(tag) for tag in tags)),
            fix="check how the project sets its platform; the tag comes from its build",
        )
    return count


def libraries_of_the_board(wheel: Path) -> list[str]:
    """Sonames that a wheel requires and that are neither in the wheel nor on every system with Python."""
    needed: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        contained = {Path(name).name for name in archive.namelist()}
        for _, content in wheels.elf_members(archive):
            dynamic = ELFFile(content).get_section_by_name(".dynamic")
            if isinstance(dynamic, DynamicSection):
                # The name of pyelftools' attribute depends on the tag.
                needed |= {str(getattr(tag, "needed", "")) for tag in dynamic.iter_tags("DT_NEEDED")}
    return sorted(name for name in needed - contained if not name.startswith(_EVERYWHERE))


def packages_of(sonames: Iterable[str], listing: Path) -> dict[str, str]:
    """The packages of the distribution that contain libraries, by soname.

    ``listing`` contains lines ``…/PACKAGE[:ARCHITECTURE].list:PATH``, the output of grep over dpkg's file lists.
    """
    known: dict[str, str] = {}
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        owner, _, path = line.partition(".list:")
        known.setdefault(path.rpartition("/")[2], owner.rpartition("/")[2].partition(":")[0])
    return {name: known[name] for name in sonames if name in known}


def _to_install(sonames: Sequence[str], owners: Mapping[str, str]) -> str:
    """The packages to install on the board and, in parentheses, the libraries that require them."""
    by_package: dict[str, list[str]] = {}
    for name in sonames:
        by_package.setdefault(owners.get(name, ""), []).append(name)
    unknown = by_package.pop("", [])
    words = [f"apt-get install {' '.join(by_package)} (for {', '.join(sorted(owners))})"] if by_package else []
    return "; ".join([*words, *([f"{', '.join(unknown)}, which no package of the build contains"] if unknown else [])])


def _built_before(found: Sequence[Path], wanted: Wanted) -> list[str]:
    """Mounts of wheels, except those of the package itself, which pip would return. The first of a name is used."""
    name = canonicalize_name(wanted.name)
    others = {path.name: path for path in reversed(found) if path.is_file()}
    return [
        f"{path.resolve()}:{_WHEELHOUSE}/{path.name}:ro"
        for path in sorted(others.values())
        if canonicalize_name(path.name.partition("-")[0]) != name
    ]


def _bring(wanted: Wanted, source: Path, config: Config) -> str:
    """Copy a project into the folder that is mounted; the argument for pip. Builds write into a project's folder.

    The build folder is not copied if it is inside the project. ``.git`` is copied, because many builds read the version
    from it. Raises SourceUnavailable if the project cannot be copied, DiskFull.
    """
    if wanted.project is None:
        return str(wanted)
    target = source / wanted.project.name
    try:
        with files.room_for(f"a copy of {wanted.project}", source):
            if wanted.project.is_dir():
                ours = {config.build_root.resolve(), source.resolve()}
                shutil.copytree(wanted.project, target, symlinks=True, ignore=functools.partial(_left_out, ours))
            else:
                shutil.copyfile(wanted.project, target)
    except (shutil.Error, PermissionError) as fault:
        # The error of copytree lists everything that it could not copy, with reasons.
        reason = fault.args[0][0][2] if isinstance(fault, shutil.Error) else str(fault)
        raise SourceUnavailable(
            f"{wanted.project} cannot be copied for the build",
            expected="files, links and folders that this user can read",
            found=shortened(reason),
            fix="move other files out of the project, or make them readable",
        ) from fault
    return f"{_HOME}/source/{target.name}"


def _left_out(ours: Set[Path], folder: str, names: list[str]) -> set[str]:
    """Names in a folder of the project that are not copied."""
    found = shutil.ignore_patterns(*_NOT_COPIED)(folder, names)
    return found | {name for name in names if Path(folder) / name in ours}


def _command(given: str, wanted: Wanted, scratch: Path, options: Options) -> Sequence[str]:
    """The command for apt and pip. It also sets the owner of the files, so that this user can remove them."""
    words = ["python3", "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--wheel-dir", f"{_HOME}/out"]
    words += ["--no-binary", wanted.name] if options.from_source and wanted.name else []
    words += [] if options.isolated else ["--no-build-isolation"]
    owner = scratch.stat()
    script = 'home=$1; shift; trap \'chown -R "$0" "$home"\' EXIT; '
    if options.packages:
        # The lists are mounted read-only, so apt cannot lock them. The installed packages come from the same lists.
        apt = f"-o Dir::State::lists={_LISTS} -o Debug::NoLocking=true -o Acquire::Retries=3"
        install = f"apt-get -q {apt} install --yes --no-install-recommends {shlex.join(options.packages)}"
        script += f"{install} || exit {_APT_FAILED}; "
    script += f"[ ! -x {build_tools.INSTALL} ] || {build_tools.INSTALL}; "
    script += f'"$@"; grep -E \'/lib[^/]*[.]so[^/]*$\' /var/lib/dpkg/info/*.list >"$home/out/{_LIBRARIES}"'
    return ["sh", "-euc", script, f"{owner.st_uid}:{owner.st_gid}", _HOME, *words, "--", given]


def _environment(config: Config) -> dict[str, str]:
    jobs = str(compile_jobs(config.build))
    return {
        "HOME": "/root",
        "MAX_JOBS": jobs,
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAKEFLAGS": f"-j{jobs}",
        "SOURCE_DATE_EPOCH": str(config.image.source_date_epoch),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        # Use wheels for build requirements even if the index has newer sources, which would have to be compiled.
        "PIP_PREFER_BINARY": "1",
    }


def _one_wheel(out: Path, log: Path) -> Path:
    made = sorted(out.glob("*.whl"))
    if len(made) != 1:
        raise ArtefactMissing(
            "pip did not make exactly one wheel",
            expected="one wheel",
            found=", ".join(path.name for path in made) or "none",
            fix=f"read {log}",
        )
    return made[0]
