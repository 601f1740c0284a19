"""``./inv test``: run the linters, the type checker and the tests, and report all failures at the end.

Tests marked ``expensive`` are skipped, because they take many minutes each (CONTRIBUTING.md describes how to run them).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolchain import caller, process, progress
from toolchain.config import ROOT
from toolchain.errors import ChecksFailed, ProgramMissing


@dataclass(frozen=True)
class Check:
    """A program whose exit status is 0 only if the check succeeds."""

    name: str
    argv: tuple[str, ...]


_SHELLS = frozenset({b"sh", b"bash", b"dash"})
_DIRECTIVE = b"# shellcheck shell="


def files_of_the_project() -> tuple[Path, ...]:
    """Return the files under version control and new files that Git does not ignore, except symbolic links."""
    # The checkout may belong to another user. Without -z, git quotes names with special characters.
    git = ("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z")
    listed = process.output_of([*git, "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def shell_scripts() -> tuple[Path, ...]:
    """Return the project's shell scripts."""
    return tuple(path for path in files_of_the_project() if is_shell_script(path))


def is_shell_script(path: Path) -> bool:
    """Return whether a file is a shell script according to its suffix, shebang line or shellcheck directive."""
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
    """Return the folders that mypy checks separately, because they are not packages and share module names."""
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/*.py")}
    return ("tests/conftest.py", *sorted(folders))


SCRIPTS = ("images/hooks/date-byte-code",)
"""Python scripts without a suffix, which are not part of a package."""


def linters() -> tuple[Check, ...]:
    """Return the linters, the type checker and the spelling check."""
    python = (sys.executable, "-m")
    scripts = tuple(str(path.relative_to(ROOT)) for path in shell_scripts())
    return (
        Check("ruff check", (*python, "ruff", "check", ".")),
        Check("ruff format", (*python, "ruff", "format", "--check", ".")),
        Check("mypy", (*python, "mypy")),
        *(Check(f"mypy {place}", (*python, "mypy", place)) for place in (*folders_of_tests(), *SCRIPTS)),
        Check("codespell", (*python, "codespell_lib")),
        Check("shellcheck", (str(process.require_program("shellcheck", "to check the shell scripts")), *scripts)),
    )


def unit_tests(select: str = "") -> Check:
    """Return the tests that need neither root privileges nor an engine or a network.

    ``select`` is an expression for pytest -k.
    """
    return _pytest("unit tests", select, "-n", "2", "--dist", "loadfile", "tests/unit")


def all_tests(select: str = "", lanes: int = 1) -> Check:
    """Return the unit tests and the integration tests.

    ``lanes`` is the number of parallel processes. All tests of a file run in the same process, and so do tests that
    change the same build or tree (tests/conftest.py). Many tests spend their time waiting for a machine or a deadline,
    so four processes are needed to keep two cores busy.
    """
    words = ("-n", str(lanes), "--dist", "loadscope", "--no-loadscope-reorder") if lanes > 1 else ()
    return _pytest("tests", select, *words)


def _pytest(name: str, select: str, *words: str) -> Check:
    chosen = ("-k", select) if select else ()
    return Check(name, (sys.executable, "-m", "pytest", "--durations=10", *words, *chosen))


BUILDERS = ("mmdebstrap", "dockerd")
"""Programs that an image build requires."""


def missing_for_builds() -> tuple[str, ...]:
    """Return what this machine lacks for building images. If anything is missing, the main job's tests are skipped."""
    found = [] if os.geteuid() == 0 else ["root privileges"]
    for name in BUILDERS:
        try:
            process.require_program(name, "to build images")
        except ProgramMissing:
            found.append(f"the program {name}")
    return tuple(found)


def run_tests(
    *, select: str = "", checks_only: bool = False, quick: bool = False, lanes: int = 1, partial: bool = False
) -> None:
    """Run the linters and all tests.

    With ``checks_only``, run only the linters; with ``quick``, only the linters and the unit tests. If the machine
    cannot build images, ChecksFailed is raised before anything runs, because the main job's tests would be skipped.
    With ``partial``, only the main job's tests are skipped on such a machine, and a warning at the end names them.
    """
    if checks_only:
        run_all(linters())
        return
    if quick:
        run_all((*linters(), unit_tests(select)))
        return
    missing = missing_for_builds()
    if missing and not partial:
        raise ChecksFailed(
            "the tests of the main job cannot run on this machine",
            expected=f"a machine that can build images: root privileges, {', '.join(BUILDERS)}",
            found=f"this machine lacks {', '.join(missing)}",
            fix=f"run {caller.as_root('./inv test')} (./inv --set-up installs missing programs), ./inv test --partial "
            "for the other tests, or ./inv test --quick for the unit tests",
        )
    try:
        run_all((*linters(), all_tests(select, lanes)))
    finally:
        if missing:
            progress.warn(f"SKIPPED: the tests of the main job, because this machine lacks {', '.join(missing)}")


def run_all(checks: Sequence[Check]) -> None:
    """Run all checks, then raise ChecksFailed with the names of the checks that failed, if any."""
    failed: list[str] = []
    for check in checks:
        with progress.step(check.name):
            print(f"$ {shlex.join(check.argv)}", flush=True)
            status = process.run_attached(check.argv, cwd=ROOT)
        if status != 0:
            failed.append(f"{check.name} ({process.explain_exit(status)})")
    if failed:
        raise ChecksFailed(
            f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}",
            expected="exit status 0 from each check",
            fix="correct the errors in the output above",
        )
