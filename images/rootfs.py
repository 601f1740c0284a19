"""Build root filesystems with mmdebstrap, reproducibly: the same inputs produce the same tar, bit for bit.

All roots are built from one state of the mirror (images.apt):

- *tools*: programs for this PC's architecture, namely native replacements for emulated programs, the cross compiler,
  and the rest of the native builder image; the packages are extracted in parallel without mmdebstrap and are not
  configured;
- *builders*, for recipes that need more than the builder image: native roots with installed packages;
- *dev*: a target root with compilers and headers, in which wheels are built;
- *rootfs*: the target root that is exported and booted.

Native programs download and unpack the packages of target roots. The target's code runs only while packages are being
configured. Even then, native tools replace programs that do not depend on the target CPU
(images/hooks/install-with-native-tools). If ``native_tools`` is None, everything except unpacking is emulated; this is
several times slower and produces the same tree.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.proxies import build_environment
from images import apt
from images.apt import Source, sources_text
from toolchain import files, progress
from toolchain.architecture import ARCHITECTURES, Architecture, host_architecture
from toolchain.errors import CommandFailed, CommandTimedOut, NetworkUnreachable, ProgramMissing, UserError
from toolchain.jobs import available_memory_mib
from toolchain.process import require_program, require_root, run

HERE = Path(__file__).resolve().parent
STANDING_IN = "standing-in"
"""The file in a tools folder that names the programs that replace emulated ones, one per line."""

_LIMIT_S = 3600.0
_PROBE_LIMIT_S = 60.0
_MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"
_MEMORY_FOR_TREE_MIB = 4096
_ROOM_FOR_ARCHIVES_MIB = 500
_ROOM_FOR_TOOLS_MIB = 1000
_MERGED = ("bin", "sbin", "lib", "lib64")
_EXTRACT_SCRIPT = """
    dpkg-deb --fsys-tarfile "$1" | tar --extract --preserve-permissions --numeric-owner --keep-directory-symlink -C "$0"
"""
_SCRATCH_SCRIPT = """
    if [ "$1" -gt 0 ]; then mount -t tmpfs -o "size=${1}m,mode=755" pitorch "$0"; fi
    export TMPDIR="$0"
    shift
    exec "$@"
"""
_MOUNT_POINTS = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777}
LEFT_OUT = (
    # Patterns for files in a tools folder that the builder image omits; "**" matches any number of folders.
    *(*_MOUNT_POINTS, "var", "depmod", STANDING_IN, f"{STANDING_IN}.packages"),
    # Files that the tools' Python may write even while the image is built (wheels.byte_code).
    *("mnt", "**/__pycache__"),
    *(f"usr/share/{name}" for name in ("doc", "info", "lintian", "locale", "man", "zoneinfo", "cmake-*/Help")),
    # Programs that builds do not use, and files for link-time optimisation and sanitizers.
    *(f"usr/bin/{name}" for name in ("cpack", "ctest", "*-lto-dump*", "*-gcov*")),
    "usr/libexec/gcc*/*/*/lto1",
    *(
        f"usr/{folder}/lib{name}san.*"
        for folder in ("lib/*-linux-gnu*", "*-linux-gnu*/lib", "lib/gcc*/*/*")
        for name in ("a", "hwa", "l", "t", "ub")
    ),
    # Character set conversions and files for embedding Python, for this PC and the target.
    *("usr/lib/*/gconv", "usr/lib/python*/config-*"),
)
_STAND_INS = re.compile(
    # The pattern excludes the cross compiler, ld, make and ninja, which images.native provides; perlX.Y, which is
    # another name for perl; and dpkg, which must be the target's.
    r"(?!.*-linux-gnu)(?!dpkg|perl\d|ld\b|make$|ninja$)[a-z0-9_.\[+-]+"
)


@dataclass(frozen=True, kw_only=True)
class RootSpec:
    """A root filesystem to build."""

    role: str
    suite: str
    architectures: tuple[str, ...]
    """Debian's names: the root's architecture, then foreign architectures (multiarch)."""
    packages: tuple[str, ...]
    sources: tuple[Source, ...]
    lists: Path
    """The sources' verified package lists (images.apt.verify)."""
    archives: Path
    """The folder for downloaded packages, which is preserved between builds."""
    source_date_epoch: int
    fetched: tuple[str, ...] = ()
    """The result of ``download``. If it is empty, apt resolves the dependencies again."""
    overlays: tuple[Path, ...] = ()
    """Folders that are copied into the root before packages are unpacked."""
    native_tools: Path | None = None
    keyring_package: str = ""
    split_usr: bool = False
    """As in images.flavour.Suite: whether the root first needs the links of a merged /usr."""

    @property
    def architecture(self) -> Architecture:
        """The root's architecture."""
        return ARCHITECTURES[self.architectures[0]]


def require_execution(architecture: Architecture, probe: Path) -> None:
    """Check that this machine can execute programs for ``architecture``. Raises UserError if it cannot.

    The check runs ``probe``, a static executable for that architecture that exits with status 0.
    """
    try:
        environment = {**os.environ, **architecture.emulation}
        done = subprocess.run([probe], check=False, capture_output=True, timeout=_PROBE_LIMIT_S, env=environment)
        seen = f"exit status {done.returncode}" if done.returncode else ""
    except OSError as fault:
        seen = os.strerror(fault.errno or 0)
    except subprocess.TimeoutExpired as fault:
        seen = f"a program of a few bytes was still running after {fault.timeout:.0f} s"
    if seen:
        raise UserError(
            f"this host cannot execute {architecture.debian} programs",
            expected=f"qemu-{architecture.qemu} registered in binfmt_misc with flag F",
            found=seen,
            fix="run ./inv --set-up as root to install and register the emulator (a container must run with "
            "--privileged); run ./inv doctor to see what is missing",
        )


def program_fingerprint() -> str:
    """Return the SHA-256 of mmdebstrap, which is a single script, or ``absent`` if mmdebstrap is not installed."""
    try:
        return files.sha256_of(require_program("mmdebstrap", "to build root filesystems"))
    except (ProgramMissing, OSError):
        return "absent"


def download(spec: RootSpec, log: Path) -> tuple[str, ...]:
    """Download a target root's packages for ``build_tar``; return the SHA-256 and the name of each file.

    The result contains one line for each file, in sha256sum's format. apt has verified the files. Raises DiskFull,
    NetworkUnreachable, CommandFailed or CommandTimedOut.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    packages = _fetch(spec, _named(spec), log, essential=True)
    return tuple(f"{files.sha256_of(path)}  {path.name}" for path in sorted(packages))


def _fetch(
    spec: RootSpec, names: Sequence[str], log: Path, *, essential: bool, without: Sequence[str] = ()
) -> list[Path]:
    files.require_space(spec.archives, _ROOM_FOR_ARCHIVES_MIB, f"the packages of the {spec.role} root")
    try:
        return apt.download(
            spec.sources,
            spec.lists,
            spec.architectures,
            names,
            spec.archives,
            log,
            essential=essential,
            without=without,
        )
    except CommandTimedOut:
        raise
    except CommandFailed as fault:
        raise _explained(
            spec,
            fault,
            log,
            summary=f"fetching the packages of the {spec.role} root filesystem failed",
            expected="apt-get to exit with status 0",
        ) from fault


def _named(spec: RootSpec) -> list[str]:
    """Return a target root's explicitly requested packages, without their dependencies."""
    merged = "usr-is-merged" if spec.split_usr else ""
    keyrings = [spec.keyring_package, *(item.keyring_package for item in spec.sources)]
    return sorted({*spec.packages, *filter(None, [*keyrings, merged])})


def build_tar(spec: RootSpec, tar: Path, log: Path) -> None:
    """Build a target root and write it as an uncompressed tar.

    Raises RootNeeded, CommandFailed or NetworkUnreachable.
    """
    _require_root(spec)
    hook = HERE / "hooks" / "install-with-native-tools"
    manual = log.with_suffix(".manual")
    manual.parent.mkdir(parents=True, exist_ok=True)
    manual.write_text("".join(f"{name}\n" for name in _named(spec)))
    fetched = log.with_suffix(".fetched")
    fetched.write_text("".join(f"{line}\n" for line in spec.fetched))
    environment = {
        "NATIVE_TOOLS": str(spec.native_tools or ""),
        "NATIVE_TRIPLET": host_architecture().gnu,
        "MANUAL_PACKAGES": str(manual),
        "FETCHED_PACKAGES": str(fetched),
        "TARGET_ARCHITECTURE": spec.architectures[0],
        "OVERLAYS": "\n".join(map(str, spec.overlays)),
        "HOOK_LOG": str(log),
    }
    _mmdebstrap(spec, tar, log, ["--variant=extract", f"--extract-hook={hook}"], ("?essential",), environment)


def build_native_tar(spec: RootSpec, tar: Path, log: Path) -> None:
    """Build a root for this PC's architecture and install its packages. Raises the same errors as ``build_tar``."""
    _require_root(spec)
    _mmdebstrap(spec, tar, log, ["--variant=apt"], spec.packages, {})


def build_tools(
    spec: RootSpec, folder: Path, log: Path, *, standing_in: tuple[str, ...], without: tuple[str, ...] = ()
) -> None:
    """Extract native programs into ``folder``, and write the list of those that may replace emulated programs.

    The previous contents of ``folder`` are removed. ``standing_in`` lists the packages whose programs may replace
    emulated ones; ``without`` lists the packages to omit. The files belong to the calling user. Raises CommandFailed,
    DiskFull or NetworkUnreachable.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    packages = _fetch(spec, spec.packages, log, essential=False, without=without)
    files.require_space(folder.parent, _ROOM_FOR_TOOLS_MIB, f"the {spec.role} root")
    with files.scratch_folder(folder.parent, folder.name) as scratch:
        tree = scratch / "tree"
        tree.mkdir(mode=0o755)
        for name in _MERGED if spec.split_usr else ():
            (tree / "usr" / name).mkdir(parents=True)
            (tree / name).symlink_to(f"usr/{name}")
        _extract(packages, tree, log)
        _set_depmod_apart(tree)
        (tree / STANDING_IN).write_text("".join(f"{name}\n" for name in _stand_ins(tree)))
        (tree / f"{STANDING_IN}.packages").write_text("".join(f"{name}\n" for name in standing_in))
        files.remove(folder)
        tree.rename(folder)


def _extract(packages: Sequence[Path], tree: Path, log: Path) -> None:
    """Unpack packages in parallel, beginning with the largest, without configuring them.

    Raises DiskFull, or CommandFailed for a damaged package.
    """
    large_first = sorted(packages, key=lambda path: (-path.stat().st_size, path))
    names = "".join(f"{path}\0" for path in large_first).encode()
    at_once = str(len(os.sched_getaffinity(0)))
    argv = ["xargs", "-0", "-n", "1", "-P", at_once, "bash", "-euo", "pipefail", "-c", _EXTRACT_SCRIPT, str(tree)]
    try:
        with files.room_for_programs("the native tools", tree.parent):
            run(argv, stdin=names, limit_s=_LIMIT_S, log=log, env={"LC_ALL": "C.UTF-8"})
    except CommandTimedOut:
        raise
    except CommandFailed as fault:
        raise CommandFailed(
            "the native tools cannot be unpacked",
            expected="dpkg-deb and tar to exit with status 0 for every package",
            found=f"{fault.tail.strip()[-500:] or fault.found} (full log: {log})",
            fix=f"if a package is damaged, remove {packages[0].parent} and run the task again to download the packages",
        ) from fault


def pack_tools(folder: Path, tar: Path, *, epoch: int) -> None:
    """Pack extracted native programs into a reproducible tar (``files.pack``), as a container's root filesystem.

    The packages are not configured; only the missing links to the folders of programs and libraries are created. Files
    that no build reads are omitted, because the engine reads and writes every byte of an image several times. Raises
    DiskFull.
    """
    with files.room_for("the native builder image", tar.parent), files.scratch_folder(tar.parent, tar.name) as overlay:
        for name in ("bin", "sbin", "lib", "lib64"):
            if not (folder / name).is_symlink() and not (folder / name).exists() and (folder / "usr" / name).is_dir():
                (overlay / name).symlink_to(f"usr/{name}")
        for name, mode in (*_MOUNT_POINTS.items(), ("etc", 0o755), ("var", 0o755), ("var/tmp", 0o1777)):
            (overlay / name).mkdir()
            (overlay / name).chmod(mode)
        (overlay / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (overlay / "etc/group").write_text("root:x:0:\n")
        for path in (overlay / "etc/passwd", overlay / "etc/group"):
            path.chmod(0o644)
        files.pack(folder, tar, epoch=epoch, overlay=overlay, leave_out=_matcher(LEFT_OUT))


def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return a regular expression for paths that match one of the patterns.

    ``*`` matches any text without a slash, and ``**`` matches any text.
    """
    wild = {"*": "[^/]*", "**": ".*"}
    parts = (re.split(r"(\*+)", pattern) for pattern in patterns)
    return re.compile("|".join("".join(wild.get(part) or re.escape(part) for part in words) for words in parts))


def _require_root(spec: RootSpec) -> None:
    require_root(f"to set the owners of the files in the {spec.role} root", "./inv TASK, with the same task")


def _set_depmod_apart(tree: Path) -> None:
    """Move kmod and its library to a separate folder, which is not bind-mounted into target roots."""
    apart = tree / "depmod"
    apart.mkdir()
    for path in [*tree.glob("usr/bin/kmod"), *tree.glob("usr/lib/*/libkmod.so*")]:
        path.rename(apart / path.name)


def _stand_ins(tree: Path) -> Iterator[str]:
    for program in sorted((tree / "usr" / "bin").iterdir()):
        if program.is_symlink() or not program.is_file() or not _STAND_INS.fullmatch(program.name):
            continue
        with program.open("rb") as stream:
            if stream.read(4) == b"\x7fELF":
                yield program.name


def _mmdebstrap(
    spec: RootSpec,
    target: Path,
    log: Path,
    variant: list[str],
    packages: tuple[str, ...],
    environment: dict[str, str],
) -> None:
    program = require_program("mmdebstrap", "to build root filesystems")
    files.require_space(target.parent, 2500, f"the {spec.role} root")
    spec.archives.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    extracts = "--variant=extract" in variant
    lists, stored = shlex.quote(str(spec.lists)), shlex.quote(str(spec.archives))
    archives = '"$1/var/cache/apt/archives"'
    laid: dict[str, Path] = {}
    if wanted := apt.preferences_text(spec.sources):
        preferences = log.with_suffix(".preferences")
        preferences.write_text(wanted)
        laid["/etc/apt/preferences.d/pitorch"] = preferences
    laid |= {item.keyring_in_root: item.keyring for item in spec.sources if item.keyring_in_root}
    unmount = f"umount {archives}"
    memory_mib = _MEMORY_FOR_TREE_MIB if available_memory_mib() >= 2 * _MEMORY_FOR_TREE_MIB else 0
    words = [
        str(program),
        "--mode=root",
        f"--architectures={','.join(spec.architectures)}",
        "--format=tar",
        "--skip=update,download/empty,check/qemu",
        '--aptopt=APT::Sandbox::User "root"',
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=Acquire::Retries "3"',
        "--dpkgopt=force-unsafe-io",
        *variant,
        f"--include={','.join(packages)}",
        f'--setup-hook=mkdir -p "$1/var/lib/apt/lists" && cp -a {lists}/. "$1/var/lib/apt/lists/"',
        *([f"--hook-dir={_MERGED_USR}"] if spec.split_usr else []),
        *(f'--setup-hook=install -D -m 644 {shlex.quote(str(source))} "$1{path}"' for path, source in laid.items()),
        f"--setup-hook=mkdir -p {archives} && mount --bind {stored} {archives}",
        *(f"--{hook}-hook={unmount}" for hook in ("extract", "customize") if (hook == "extract") == extracts),
        spec.suite,
    ]
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(files.scratch_folder(target.parent, target.name))
        scratch.chmod(0o755)
        aside = stack.enter_context(files.replacing(target))
        named = aside.with_name(aside.name + ".tar")  # mmdebstrap requires the suffix
        stack.callback(files.remove, named)

        def build(memory_mib: int) -> None:
            # In a private mount namespace, mmdebstrap leaves no mounts on the host. If there is enough memory, the tree
            # is built in memory, because dpkg calls fsync often, and emulated 32-bit programs cannot list some folders
            # on ext4.
            apart = ["unshare", "--mount", "--propagation", "private", "--"]
            run(
                [*apart, "sh", "-euc", _SCRATCH_SCRIPT, str(scratch), str(memory_mib), *words, str(named), "-"],
                stdin=sources_text(spec.sources, spec.architectures, in_root=True).encode(),
                env={
                    **build_environment(),
                    **spec.architecture.emulation,
                    **environment,
                    "SOURCE_DATE_EPOCH": str(spec.source_date_epoch),
                    # Only py3compile, which maintainer scripts call, writes byte code. Without this variable, Python
                    # programs that run during the installation would also write byte code.
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
                limit_s=_LIMIT_S,
                log=log,
            )

        try:
            try:
                build(memory_mib)
            except CommandFailed:
                if not memory_mib or not files.full_disk(log.read_text(errors="replace"), "", scratch):
                    raise
                progress.warn(
                    f"the {spec.role} root filesystem does not fit into {memory_mib} MiB of memory: building on disk"
                )
                log.write_text("")
                build(0)
        except CommandFailed as fault:
            raise _explained(
                spec,
                fault,
                log,
                summary=f"building the {spec.role} root failed",
                expected="mmdebstrap to exit with status 0",
            ) from fault
        named.rename(aside)


def _explained(spec: RootSpec, fault: CommandFailed, log: Path, *, summary: str, expected: str) -> Exception:
    """Return an error with the cause that the log shows or, if there is none, with ``summary`` and ``expected``."""
    text = log.read_text(errors="replace")
    if full := files.full_disk(text, f"the {spec.role} root", log.parent):
        return full
    complaints = [line for line in text.splitlines() if line.startswith("E:")]
    found = complaints[0][3:] if complaints else fault.found
    if apt.UNREACHABLE.search(text):
        return NetworkUnreachable(
            f"the packages for the {spec.role} root filesystem cannot be downloaded",
            expected="all packages in the verified lists to be on the mirror",
            found=found,
            fix="check the network; if the mirror has changed since its lists were verified, run ./inv build-image "
            "--update",
        )
    if missing := apt.UNKNOWN.search(text):
        return CommandFailed(
            f"the mirror lacks a package that the {spec.role} root filesystem requires",
            expected=f"package {missing[1] or missing[2]} in {spec.suite} for {spec.architectures[0]}",
            found="no such package in the verified lists",
            fix="correct image.extra_packages, image.ml_packages or image.suite in invoke.yaml",
        )
    return CommandFailed(
        summary,
        expected=expected,
        found=f"{found} (full log: {log})",
        fix="find the cause in the log, and run ./inv doctor to check the requirements of this step",
    )
