"""Every check, and the tests of this machine's side, one after the other; all are run before the verdict.

Tests that are marked ``expensive`` are left out: those of many minutes each are run by name.

Their output goes straight to the caller's own, so a log shows pytest's closing line and each fault where it stands.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolchain import caller, process, progress
from toolchain.config import ROOT
from toolchain.errors import ChecksFailed, ProgramMissing


@dataclass(frozen=True)
class Check:
    """One program that finds faults, by ending with a status that is not 0."""

    name: str
    argv: tuple[str, ...]


_SHELLS = frozenset({b"sh", b"bash", b"dash"})
_DIRECTIVE = b"# shellcheck shell="


def files_of_the_project() -> tuple[Path, ...]:
    """The files that are under version control, or will be; links are left out."""
    listed = process.output_of(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    paths = (ROOT / name for name in listed.splitlines())
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def shell_scripts() -> tuple[Path, ...]:
    """Those of them that are shell scripts."""
    return tuple(path for path in files_of_the_project() if is_shell_script(path))


def is_shell_script(path: Path) -> bool:
    """Whether shellcheck can read it: by its suffix, its shebang, or the directive of a script that is sourced."""
    if path.suffix in (".sh", ".bash"):
        return True
    if path.suffix:
        return False
    with path.open("rb") as stream:
        first = stream.readline(80)
    if first.startswith(b"#!"):
        return any(word.rpartition(b"/")[2] in _SHELLS for word in first[2:].split())
    return first.startswith(_DIRECTIVE)


def folders_of_tests() -> tuple[str, ...]:
    """Each is read by a mypy of its own: their modules have no package, and some share a name (conftest)."""
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/*.py")}
    return ("tests/conftest.py", *sorted(folders))


SCRIPTS = ("images/hooks/date-byte-code",)
"""Python without a suffix, which belongs to no package."""


def linters() -> tuple[Check, ...]:
    """Style, types and shell."""
    python = (sys.executable, "-m")
    scripts = tuple(str(path.relative_to(ROOT)) for path in shell_scripts())
    return (
        Check("ruff check", (*python, "ruff", "check", ".")),
        Check("ruff format", (*python, "ruff", "format", "--check", ".")),
        Check("mypy", (*python, "mypy")),
        *(Check(f"mypy {place}", (*python, "mypy", place)) for place in (*folders_of_tests(), *SCRIPTS)),
        Check("shellcheck", (str(process.require_program("shellcheck", "to check the shell scripts")), *scripts)),
    )


def host_tests(select: str = "", lanes: int = 1) -> Check:
    """The tests of this machine's side; ``select`` is an expression for pytest's -k.

    With two ``lanes`` those that share one build and all others run side by side (tests/conftest.py).
    """
    side_by_side = ("-n", str(lanes), "--dist", "loadscope", "--no-loadscope-reorder")
    words = ["--durations=25", *(side_by_side if lanes > 1 else ())]
    return Check("pytest", (sys.executable, "-m", "pytest", *words, *(("-k", select) if select else ())))


BUILDERS = ("mmdebstrap", "dockerd")
"""Programs without which no image is built."""


def lacking() -> tuple[str, ...]:
    """What this machine lacks to build images; without it the tests of the main job are left out."""
    found = [] if os.geteuid() == 0 else ["root's rights"]
    for name in BUILDERS:
        try:
            process.require_program(name, "to build images")
        except ProgramMissing:
            found.append(f"the program {name}")
    return tuple(found)


def run_tests(*, select: str = "", checks_only: bool = False, lanes: int = 1, partial: bool = False) -> None:
    """Run every check and the tests, or only the linters.

    Raises ChecksFailed before anything is run where the tests of the main job would be left out; with ``partial`` the
    rest is run, and what was left out is said in the end.
    """
    if checks_only:
        run_all(linters())
        return
    left_out = lacking()
    if left_out and not partial:
        raise ChecksFailed(
            "the tests of the main job would be left out",
            expected=f"a machine that can build images: root's rights, {', '.join(BUILDERS)}",
            found=f"not here: {', '.join(left_out)}",
            fix=f"{caller.as_root('./inv test')} (./inv --set-up installs programs), or ./inv test --partial, "
            "which runs the rest",
        )
    try:
        run_all((*linters(), host_tests(select, lanes)))
    finally:
        if left_out:
            progress.warn(f"LEFT OUT: the tests of the main job, for lack of {', '.join(left_out)}")


def run_all(checks: Sequence[Check]) -> None:
    """Run them all, then raise ChecksFailed that names those which found faults, if any did."""
    failed: list[str] = []
    for check in checks:
        with progress.step(check.name):
            print(f"$ {shlex.join(check.argv)}", flush=True)
            status = subprocess.run(check.argv, cwd=ROOT, check=False).returncode
        if status != 0:
            failed.append(f"{check.name} ({process.explain_exit(status)})")
    if failed:
        raise ChecksFailed(
            f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}",
            expected="each to end with status 0",
            fix="their own output above says where",
        )
