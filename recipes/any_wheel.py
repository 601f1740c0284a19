"""``build-wheel``: any Python package's wheel for the target, by plain ``pip wheel`` inside the armv7 container.

The container is the workbench: compilers, torch and libqpu are in it, and the native compiler stands in for the
emulated one (images.native), which the package's own build knows nothing of. pip makes its isolated environment in
there, so what a project's build requires is what runs; wheels that are in the wheelhouse already (numpy, say) serve as
such requirements. The packages come from where this PC's pip gets its own (recipes.pip_settings).

The result is audited (archive, RECORD, every ELF file, tag) before it gets into the wheelhouse. A wheel of the same
name with other contents is not overwritten in silence: it is moved aside, and said so.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import shutil
import time
import zipfile
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import docker
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from images import apt, native
from images.containers import run_in
from images.engine import connect
from images.flavour import Suite, load_suite
from recipes import main_job, pip_settings, wheels
from recipes.flow import Flow
from recipes.torch import resolve
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import (
    ArtefactMissing,
    CommandFailed,
    NetworkUnreachable,
    PlatformMismatch,
    SourceUnavailable,
)
from toolchain.jobs import compile_jobs
from toolchain.manifest import Artefact

REPLACED = "replaced"
"""Folder in the wheelhouse for wheels that another of the same name took the place of."""

_HOME = "/usr/src/wheel"
_WHEELHOUSE = "/usr/src/wheelhouse"
_LISTS = "/usr/src/lists"
# The exit code that tells what apt was asked for from what pip was: neither of them has it.
_APT_FAILED = 83
_LIMIT_S = 24 * 3600.0
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
# Beginnings of sonames (PEP 599, as far as 32-bit ARM has them), and the interpreter's own.
_EVERYWHERE = (
    *("libc.so.", "libm.so.", "libdl.so.", "libpthread.so.", "librt.so.", "libutil.so.", "ld-linux"),
    *("libgcc_s.so.", "libstdc++.so.", "libpython3"),
)
_ARCHIVES = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz")
_NOT_COPIED = ("__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache", "*.egg-info")
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeoutError|ProxyError|SSLError|CERTIFICATE_VERIFY"
    r"|Max retries exceeded|Temporary failure in name resolution|Connection refused|No route to host"
)
# pip's words, for a program that it ran and that failed: the package's own build, or pip itself for what that requires.
_OF_PACKAGE = "subprocess-exited-with-error"
_OF_REQUIREMENTS = "pip subprocess to install build dependencies did not run successfully"
_NO_SUCH = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)(\S*)")
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a wheel is to be made of: a project on this PC, or a name and version from pip's index."""

    project: Path | None = None
    name: str = ""
    version: str = ""

    def __str__(self) -> str:
        return str(self.project) if self.project else f"{self.name}=={self.version}"

    @classmethod
    def parse(cls, text: str, *, folder: Path) -> Wanted:
        """NAME==VERSION, or a path (relative to ``folder``) of a project's folder or of its source archive.

        Raises SourceUnavailable for anything else, and for a path without a project.
        """
        if not _looks_like_path(text, folder):
            return cls._pinned(text)
        try:
            path = (folder / Path(text).expanduser()).resolve()
        except RuntimeError as fault:
            raise SourceUnavailable(
                f"there is no project at {text}",
                expected="the name of a user of this PC after ~",
                found="no such user, or none with a home",
                mend="check the path; a package of the index is named NAME==VERSION",
            ) from fault
        if path.is_dir():
            if not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
                raise SourceUnavailable(
                    f"{path} is no Python project",
                    expected="a folder with pyproject.toml or setup.py",
                    found=_listing(path),
                    mend="name the folder that has it, or NAME==VERSION",
                )
            return cls(project=path)
        if path.is_file() and path.name.endswith(_ARCHIVES):
            return cls(project=path)
        raise SourceUnavailable(
            f"there is no project at {path}",
            expected=f"a project's folder, or its source archive ({', '.join(_ARCHIVES)})",
            found="a file of another kind" if path.is_file() else "nothing",
            mend="check the path; a package of the index is named NAME==VERSION",
        )

    @classmethod
    def _pinned(cls, text: str) -> Wanted:
        mend = "for instance ./inv build-wheel pyyaml==6.0.2, or ./inv build-wheel ./my-project"
        try:
            wish = Requirement(text)
            (pin,) = wish.specifier
            version = str(Version(pin.version))
        except (InvalidRequirement, ValueError) as fault:
            raise SourceUnavailable(
                f"{text!r} does not say which wheel",
                expected="NAME==VERSION, or the path of a project",
                found="more or less than one version" if not isinstance(fault, InvalidRequirement) else repr(text),
                mend=mend,
            ) from fault
        if pin.operator != "==" or wish.extras or wish.marker or wish.url:
            raise SourceUnavailable(
                f"{text!r} does not say which wheel",
                expected="one version, and no extras or markers: they are not part of a wheel",
                found=text,
                mend=mend,
            )
        return cls(name=wish.name, version=version)


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


def build_wheel(
    config: Config, text: str, *, folder: Path, from_source: bool = False, packages: Sequence[str] = ()
) -> Done:
    """Build one wheel for the target and put it into the first wheelhouse folder.

    ``text`` is NAME==VERSION or a path (relative to ``folder``). With ``from_source`` pip takes no ready wheel of the
    index for it. ``packages`` of the distribution are installed in the container before, for this build alone, by the
    lists that the image was made by. Raises SourceUnavailable (no such package, version or project),
    NetworkUnreachable, DiskFull, CommandFailed (its own build fails), PlatformMismatch or WheelUnusable (the wheel is
    not for the target), and what the main job raises.
    """
    wanted = Wanted.parse(text, folder=folder)
    if wrong := [name for name in packages if not _PACKAGE.fullmatch(name)]:
        raise SourceUnavailable(
            "what the build wants of the distribution is named by packages",
            expected="names of Debian packages: lower case, digits, '+', '-' and '.'",
            found=", ".join(map(repr, wrong)),
            mend="for instance --package=libxml2-dev",
        )
    main_job.ready_workbench(config, task="./inv build-wheel")
    compiler = Flow(config).compiler() if config.build.native_compiler else native.Mounts()
    with contextlib.closing(connect()) as client:
        return build_in(
            client,
            config.image_reference("workbench"),
            config,
            wanted,
            compiler=compiler,
            from_source=from_source,
            packages=packages,
        )


def build_in(
    client: docker.DockerClient,
    image: str,
    config: Config,
    wanted: Wanted,
    *,
    compiler: native.Mounts,
    from_source: bool = False,
    packages: Sequence[str] = (),
) -> Done:
    """As ``build_wheel``, in a given image."""
    began = time.monotonic()
    suite = load_suite(config.image.suite)
    wheelhouse = resolve.wheelhouses(config)[0]
    wheelhouse.mkdir(parents=True, exist_ok=True)
    log = config.target_root / "logs" / "build-wheel.log"
    files.remove(log)
    with files.scratch_folder(config.target_root / "work", "wheel") as scratch, progress.step(f"wheel of {wanted}"):
        out, source = scratch / "out", scratch / "source"
        out.mkdir()
        source.mkdir()
        given = _bring(wanted, source, config)
        built_before = _built_before(wheelhouse, wanted)
        settings = pip_settings.of_this_pc([_WHEELHOUSE] if built_before else [])
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
                    _command(given, wanted, scratch, from_source=from_source, packages=packages),
                    architecture=config.image.target,
                    binds=[
                        f"{source}:{_HOME}/source:rw",
                        f"{out}:{_HOME}/out:rw",
                        *([f"{config.target_root / 'mirror' / 'lists'}:{_LISTS}:ro"] if packages else []),
                        *built_before,
                        *settings.binds(),
                        *compiler.binds(),
                    ],
                    environment={**compiler.environment, **settings.environment, **_environment(config)},
                    workdir=_HOME,
                    limit_s=_LIMIT_S,
                    log=log,
                    on_line=tell,
                    mend=f"the package's own words are above, all of them in {log}; a library that it wants is perhaps "
                    "not in the image: --package=LIBRARY-dev installs it for this build",
                )
            except CommandFailed as fault:
                said = log.read_text(errors="replace")
                if fault.returncode == _APT_FAILED:
                    raise explain_apt(fault, said, config) from fault
                raise explain(fault, wanted, said, config) from fault
        made = _one_wheel(out)
        elf_files = accept(made, config, suite)
        needed = libraries_of_the_board(made)
        placed, warnings = place(made, wheelhouse)
    if needed:
        warnings.append(f"{made.name} needs libraries of the board that are not in it: {', '.join(needed)}")
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
            mend="look at how the project names its platform; the tag comes from its own build",
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


def explain(fault: CommandFailed, wanted: Wanted, output: str, config: Config) -> Exception:
    """What a failed ``pip wheel`` means, by its own words; the fault itself where the package's build failed."""
    if full := files.full_disk(output, f"the build of {wanted}, here or in the engine's folder", config.target_root):
        return full
    missing = _NO_SUCH.search(output)
    known = _VERSIONS.search(output)
    versions = [item.strip() for item in known[1].split(",") if item.strip() != "none"] if known else []
    if missing is None and _OF_REQUIREMENTS not in output and _OF_PACKAGE in output:
        return fault
    if not versions and (network := _NO_NETWORK.search(output)):
        line = next(line for line in output.splitlines() if network[0] in line)
        return NetworkUnreachable(
            f"pip cannot reach its index, to build {wanted}",
            expected="the package index that this PC's pip uses (pip config list) to answer from a container",
            found=_shortened(line),
            mend="mend the network, https_proxy or pip.conf, then run the task again",
        )
    if missing is None:
        return fault
    name, pin = missing[1], missing[2]
    shown = ", ".join(versions[-6:])
    if canonicalize_name(name.partition("==")[0]) != canonicalize_name(wanted.name or "-"):
        return SourceUnavailable(
            f"{wanted} needs {name}{pin} to be built, and the index has none that fits",
            expected=f"{name}{pin}, as source or for the target",
            found=f"versions {shown}" if shown else "no version",
            mend=f"build that first: ./inv build-wheel {name}==VERSION; it is then found in the wheelhouse",
        )
    return SourceUnavailable(
        f"the package index does not have {wanted}",
        expected=f"version {wanted.version} of {wanted.name}",
        found=f"versions …, {shown}" if shown else "no package of that name, or none for this Python",
        mend="check the name and version for a typing error",
    )


def explain_apt(fault: CommandFailed, output: str, config: Config) -> Exception:
    """What it means that the distribution's packages for a build could not be installed, by apt's own words."""
    if full := files.full_disk(output, "packages in the engine's folder", config.target_root):
        return full
    complaints = [line.removeprefix("E: ") for line in output.splitlines() if line.startswith("E: ")]
    found = _shortened(complaints[0]) if complaints else fault.found
    if unknown := apt.UNKNOWN.search(output):
        return SourceUnavailable(
            f"{config.image.suite} has no package {unknown[1] or unknown[2]}",
            expected="a package of the lists that the image was made by",
            found=found,
            mend="check the name that --package gives for a typing error",
        )
    if apt.UNREACHABLE.search(output):
        return NetworkUnreachable(
            "the mirror does not give the packages that --package names",
            expected="every package that the verified lists name",
            found=found,
            mend="check the network; if the mirror has moved on since, run ./inv build-image --update",
        )
    return CommandFailed(
        "the packages that --package names cannot be installed",
        returncode=fault.returncode,
        expected="apt-get install to end with status 0",
        found=found,
        mend="apt's own words are below",
        tail=fault.tail,
    )


def _looks_like_path(text: str, folder: Path) -> bool:
    if "==" in text and "/" not in text:
        return False
    return "/" in text or text in (".", "..") or text.endswith(_ARCHIVES) or (folder / text).exists()


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "an empty folder"


def _built_before(wheelhouse: Path, wanted: Wanted) -> list[str]:
    """Mounts of the wheelhouse's wheels, but those of the package itself: pip would hand them back unbuilt."""
    name = canonicalize_name(wanted.name)
    found = [path for path in sorted(wheelhouse.glob("*.whl")) if path.is_file()]
    others = [path for path in found if canonicalize_name(path.name.partition("-")[0]) != name]
    return [f"{path.resolve()}:{_WHEELHOUSE}/{path.name}:ro" for path in others]


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
            found=_shortened(reason),
            mend="move what is no part of the project elsewhere, or let it be read",
        ) from fault
    return f"{_HOME}/source/{target.name}"


def _left_out(ours: Set[Path], folder: str, names: list[str]) -> set[str]:
    """Names in a project's folder that are not copied."""
    found = shutil.ignore_patterns(*_NOT_COPIED)(folder, names)
    return found | {name for name in names if Path(folder) / name in ours}


def _command(given: str, wanted: Wanted, scratch: Path, *, from_source: bool, packages: Sequence[str]) -> Sequence[str]:
    """The words for apt and pip, then for the files' owner: made by root in there, they must go away here."""
    words = ["python3", "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--wheel-dir", f"{_HOME}/out"]
    words += ["--no-binary", wanted.name] if from_source and wanted.name else []
    owner = scratch.stat()
    script = 'home=$1; shift; trap \'chown -R "$0" "$home"\' EXIT; '
    if packages:
        # Read-only, so without a lock; what these lists name fits what is installed, which came by them too.
        options = f"-o Dir::State::lists={_LISTS} -o Debug::NoLocking=true -o Acquire::Retries=3"
        asked = f"apt-get -q {options} install --yes --no-install-recommends {shlex.join(packages)}"
        script += f"{asked} || exit {_APT_FAILED}; "
    script += '"$@"'
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
    }


def _one_wheel(out: Path) -> Path:
    made = sorted(out.glob("*.whl"))
    if len(made) != 1:
        raise ArtefactMissing(
            "pip made no wheel, or several",
            expected="one wheel",
            found=", ".join(path.name for path in made) or "none",
            mend="read logs/build-wheel.log in the target's folder of the build folder",
        )
    return made[0]


def _shortened(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= 240 else f"{text[:120]} … {text[-120:]}"
