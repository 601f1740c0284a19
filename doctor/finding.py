"""The findings that checks return."""

from __future__ import annotations

import enum
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from toolchain import process
from toolchain.errors import UserError

RUN_LIMIT_S = 60.0
"""The time limit for a program that a check runs."""


class Verdict(enum.StrEnum):
    """The result of a check. Only FAIL prevents a build."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check: what was done, what was found, and how to fix the problem."""

    check: str
    verdict: Verdict
    done: str
    found: str
    fix: str = ""


def ok(check: str, done: str, found: str) -> Finding:
    """Return the finding for a check that passed."""
    return Finding(check=check, verdict=Verdict.OK, done=done, found=found)


def warn(check: str, done: str, found: str, fix: str) -> Finding:
    """Return the finding for a problem that does not prevent a build."""
    return Finding(check=check, verdict=Verdict.WARN, done=done, found=found, fix=fix)


def fail(check: str, done: str, found: str, fix: str) -> Finding:
    """Return the finding for a check that failed."""
    return Finding(check=check, verdict=Verdict.FAIL, done=done, found=found, fix=fix)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check and return its finding. User errors, operating system errors and timeouts become findings."""
    try:
        return check()
    except UserError as fault:
        return fail(name, "tried", described(fault), fault.fix)
    except subprocess.TimeoutExpired as fault:
        line = process.pasteable([fault.cmd] if isinstance(fault.cmd, str | os.PathLike) else fault.cmd)
        found = f"{line} was still running after {fault.timeout:.0f} s"
        fix = "run the program yourself to see why it hangs; if an emulator runs it, update the emulator"
        return fail(name, "tried", found, fix)
    except OSError as fault:
        return fail(name, "tried", str(fault), "correct the cause that the error message names")


def described(fault: UserError) -> str:
    """Return one line of text: the error's summary and, if known, what was found."""
    return "; ".join(part for part in (fault.summary, fault.found) if part)


def first_version(text: str) -> str:
    """Return the first dotted version number in ``text``, or an empty string if there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found[0] if found else ""
