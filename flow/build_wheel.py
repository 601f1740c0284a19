"""``build-wheel``: any Python package's wheel for the target, by plain ``pip wheel`` inside the armv7 container.

The container is the workbench: compilers, torch and libqpu are in it, and the native compiler and build tools stand in
for the emulated ones (images.native, images.build_tools), which the package's own build knows nothing of. pip makes its
isolated environment in there, so what a project's build requires is what runs; wheels that are in the wheelhouse
already, the image's torch and the distribution's numpy, SciPy and pandas serve as such requirements. The packages come
from where this PC's pip gets its own (wheels.pip_settings).

The result is audited (archive, RECORD, every ELF file, tag) before it gets into the wheelhouse. A wheel of the same
name with other contents is not overwritten in silence: it is moved aside, and said so.
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

from engine.connect import connect
from engine.containers import run_in
from flow import main_job
from flow.main_steps import Flow
from images import build_tools, native
from images.flavour import Suite, load_suite
from recipes.torch import resolve
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

REPLACED = "replaced"
"""Folder in the wheelhouse for wheels that another of the same name took the place of."""

_HOME = "/usr/src/wheel"
_WHEELHOUSE = "/usr/src/wheelhouse"
_LISTS = "/usr/src/lists"
_LIBRARIES = "libraries"
"""File beside the wheel: which package each library in the container is of."""
# The exit code that tells what apt was asked for from what pip was: neither of them has it.
_APT_FAILED = 83
_LIMIT_S = 24 * 3600.0
# Beginnings of sonames (PEP 599, as far as 32-bit ARM has them), and the interpreter's own.
_EVERYWHERE = (
    *("libc.so.", "libm.so.", "libdl.so.", "libpthread.so.", "librt.so.", "libutil.so.", "ld-linux"),
    *("libgcc_s.so.", "libstdc++.so.", "libpython3"),
)
_NOT_COPIED = ("__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache", "*.egg-info")


@dataclass(frozen=True, kw_only=True)
class Done:
    """A wheel in the wheelhouse. ``elf_files`` is how many programs and libraries of the target are in it."""

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
    project), NetworkUnreachable, DiskFull, CommandFailed (its own build fails), PlatformMismatch or WheelUnusable (the
    wheel is not for the target), and what the main job raises.
    """
    wanted = Wanted.parse(text, folder=folder)
    main_job.ready_workbench(config, task="./inv build-wheel")
    flow = Flow(config)
    stand_ins = flow.compiler()
    if stand_ins.paths:
        stand_ins = build_tools.together(stand_ins, build_tools.tool_mounts(flow.tools, flow.target, flow.suite))
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
    """Wheels that a build may require and that are in no wheelhouse: the image's torch, and the distribution's."""
    flow = Flow(config)
    manifests = flow.pipeline(workbench=True)
    torch = require(manifests.manifest_path("torch"), "build-image").facts["wheel"]
    root = require(manifests.manifest_path("dev"), "build-image").artefact(".tar")
    folder = config.target_root / "distribution-wheels" / root.sha256[:16]
    if not folder.is_dir():
        with progress.step("wheels of the distribution's numpy, SciPy and pandas"):
            files.remove(folder.parent)
            folder.parent.mkdir(parents=True)
            distribution_wheels.make(root.path, folder, config.image.target, flow.suite)
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
    """As ``build_wheel``, in a given image; ``offered`` are wheels that the build may require."""
    began = time.monotonic()
    suite = load_suite(config.image.suite)
    wheelhouse = resolve.wheelhouses(config)[0]
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

            def tell(line: str) -> None:
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
                    on_line=tell,
                    fix=f"the last lines of the package's own output are below, all of them are in {log}",
                )
            except CommandFailed as fault:
                said = log.read_text(errors="replace")
                if fault.returncode == _APT_FAILED:
                    raise explain_apt(fault, said, config) from fault
                raise explain(fault, wanted, said, config) from fault
        made = _one_wheel(out, log)
        elf_files = accept(made, config, suite)
        needed = libraries_of_the_board(made)
        owners = packages_of(needed, out / _LIBRARIES)
        placed, warnings = place(made, wheelhouse)
    if needed:
        warnings.append(f"{made.name} needs what is not in it; on the board: {_to_install(needed, owners)}")
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
            fix="look at how the project names its platform; the tag comes from its own build",
        )
    return count


def libraries_of_the_board(wheel: Path) -> list[str]:
    """Sonames that a wheel's programs want, and that neither the wheel nor every system with Python has."""
    needed: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        own = {Path(name).name for name in archive.namelist()}
        for _, content in wheels.elf_members(archive):
            dynamic = ELFFile(content).get_section_by_name(".dynamic")
            if isinstance(dynamic, DynamicSection):
                # pyelftools names the attribute after the tag.
                needed |= {str(getattr(tag, "needed", "")) for tag in dynamic.iter_tags("DT_NEEDED")}
    return sorted(name for name in needed - own if not name.startswith(_EVERYWHERE))


def packages_of(sonames: Iterable[str], listing: Path) -> dict[str, str]:
    """The packages of the distribution that bring libraries, by soname.

    ``listing`` has lines of ``…/PACKAGE[:ARCHITECTURE].list:PATH``, as grep prints dpkg's lists of files.
    """
    known: dict[str, str] = {}
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        owner, _, path = line.partition(".list:")
        known.setdefault(path.rpartition("/")[2], owner.rpartition("/")[2].partition(":")[0])
    return {name: known[name] for name in sonames if name in known}


def _to_install(sonames: Sequence[str], owners: Mapping[str, str]) -> str:
    """What the board needs: packages and, in brackets, the libraries that they are needed for."""
    by_package: dict[str, list[str]] = {}
    for name in sonames:
        by_package.setdefault(owners.get(name, ""), []).append(name)
    unknown = by_package.pop("", [])
    words = [f"apt-get install {' '.join(by_package)} (for {', '.join(sorted(owners))})"] if by_package else []
    return "; ".join([*words, *([f"{', '.join(unknown)}, of no package of the build"] if unknown else [])])


def place(wheel: Path, wheelhouse: Path) -> tuple[Path, list[str]]:
    """Move a wheel into the wheelhouse; a different one of the same name is moved aside. Its path, and warnings.

    Raises DiskFull: what was there stays, under its own name.
    """
    target = wheelhouse / wheel.name
    warnings = []
    with files.room_for(wheel.name, wheelhouse), files.replacing(target) as part:
        shutil.copyfile(wheel, part)
        part.chmod(0o644)
        if target.is_file() and (before := files.sha256_of(target)) != files.sha256_of(wheel):
            aside = wheelhouse / REPLACED / before[:16] / wheel.name
            aside.parent.mkdir(parents=True, exist_ok=True)
            # A second name first: at no moment is there none of the two.
            files.remove(aside)
            aside.hardlink_to(target)
            warnings.append(f"{target.name} was there with other contents; that one is now {aside}")
    return target, warnings


def _built_before(found: Sequence[Path], wanted: Wanted) -> list[str]:
    """Mounts of wheels, but those of the package itself: pip would hand them back unbuilt. Of two, the first counts."""
    name = canonicalize_name(wanted.name)
    others = {path.name: path for path in reversed(found) if path.is_file()}
    return [
        f"{path.resolve()}:{_WHEELHOUSE}/{path.name}:ro"
        for path in sorted(others.values())
        if canonicalize_name(path.name.partition("-")[0]) != name
    ]


def _bring(wanted: Wanted, source: Path, config: Config) -> str:
    """Copy a project to where the container sees it; what pip is given. Builds write into a project's folder.

    Where the copy lies, in the build folder, is left out of a project that has it within. ``.git`` is not: many a
    build asks it for the version. Raises SourceUnavailable for what cannot be copied, DiskFull.
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
        # copytree's own error has all that it could not copy, each with the reason.
        reason = fault.args[0][0][2] if isinstance(fault, shutil.Error) else str(fault)
        raise SourceUnavailable(
            f"{wanted.project} cannot be copied for the build",
            expected="files, links and folders that this user may read",
            found=shortened(reason),
            fix="move what is no part of the project elsewhere, or let it be read",
        ) from fault
    return f"{_HOME}/source/{target.name}"


def _left_out(ours: Set[Path], folder: str, names: list[str]) -> set[str]:
    """Names in a project's folder that are not copied."""
    found = shutil.ignore_patterns(*_NOT_COPIED)(folder, names)
    return found | {name for name in names if Path(folder) / name in ours}


def _command(given: str, wanted: Wanted, scratch: Path, options: Options) -> Sequence[str]:
    """The words for apt and pip, then for the files' owner: made by root in there, they must go away here."""
    words = ["python3", "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--wheel-dir", f"{_HOME}/out"]
    words += ["--no-binary", wanted.name] if options.from_source and wanted.name else []
    words += [] if options.isolated else ["--no-build-isolation"]
    owner = scratch.stat()
    script = 'home=$1; shift; trap \'chown -R "$0" "$home"\' EXIT; '
    if options.packages:
        # Read-only, so without a lock; what these lists name fits what is installed, which came by them too.
        apt = f"-o Dir::State::lists={_LISTS} -o Debug::NoLocking=true -o Acquire::Retries=3"
        asked = f"apt-get -q {apt} install --yes --no-install-recommends {shlex.join(options.packages)}"
        script += f"{asked} || exit {_APT_FAILED}; "
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
        # What a build requires is taken as a wheel, though the index has newer source: numpy is not compiled for it.
        "PIP_PREFER_BINARY": "1",
    }


def _one_wheel(out: Path, log: Path) -> Path:
    made = sorted(out.glob("*.whl"))
    if len(made) != 1:
        raise ArtefactMissing(
            "pip made no wheel, or several",
            expected="one wheel",
            found=", ".join(path.name for path in made) or "none",
            fix=f"read {log}",
        )
    return made[0]
