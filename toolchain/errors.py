"""Errors that the user can fix, and their exit codes (docs/tasks.md lists them).

An error states what was expected, what was found and the fix. Only the outermost layer (``tasks.py``,
``toolchain/cli.py``) converts errors, and any unhandled ``OSError``, into exit codes. Other exceptions are bugs and
stop the program with a traceback. An error has its own class only if code or a script must distinguish it from other
errors. Invoke uses exit codes 1 (a failed task body) and 2 (an invalid command line); 130 means Ctrl-C.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from toolchain.text import printable


class UserError(Exception):
    """An error that the user can fix.

    ``expected`` and ``found`` are short noun phrases; ``fix`` is the command or change that solves the problem.
    """

    exit_code = 10

    def __init__(self, summary: str, *, expected: str = "", found: str = "", fix: str = "") -> None:
        super().__init__(summary)
        self.summary = summary
        self.expected = expected
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.summary]
        for label, text in (("expected", self.expected), ("found", self.found), ("fix", self.fix)):
            if text:
                lines.append(f"  {label + ':':10}{text}")
        return printable("\n".join(lines))


class ConfigError(UserError):
    """The configuration has errors in invoke.yaml, INVOKE_* variables or options; the message lists all of them."""

    exit_code = 11

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        listed = "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(
            f"the configuration has {len(self.faults)} error{'s' if len(self.faults) > 1 else ''}:\n{listed}",
            fix="edit invoke.yaml (or the INVOKE_* variable or option named above), then run the task again",
        )


class RecipeInvalid(UserError):
    """A recipe's data file is missing or invalid, or the recipe does not support the configuration."""

    exit_code = 11


class ProgramMissing(UserError):
    """A program that a step requires is not installed."""

    exit_code = 13


class CommandFailed(UserError):
    """A subprocess failed; the message includes the last lines of its output."""

    exit_code = 14

    def __init__(
        self, summary: str, *, returncode: int = 1, tail: str = "", expected: str = "", found: str = "", fix: str = ""
    ) -> None:
        super().__init__(summary, expected=expected, found=found, fix=fix)
        self.returncode = returncode
        self.tail = tail

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n--- last lines of its output ---\n{self.tail.rstrip()}" if self.tail.strip() else text


class CommandTimedOut(CommandFailed):
    """A subprocess was terminated because it exceeded its time limit."""


class EngineUnavailable(UserError):
    """No Docker engine responds and none can be started, or the engine's configuration is invalid."""

    exit_code = 16


class NetworkUnreachable(UserError):
    """A host that a step requires does not respond."""

    exit_code = 20


class MirrorPocketUnusable(NetworkUnreachable):
    """A pocket of the apt mirror cannot be verified (an error with ``image.strict``, otherwise a warning)."""


class RegistryUnreachable(NetworkUnreachable):
    """The registry's host is unknown, refuses the connection or does not respond in time."""


class RegistryHostUnknown(RegistryUnreachable):
    """The name of the registry's host cannot be resolved."""


class RegistryConnectionRefused(RegistryUnreachable):
    """No program listens on the registry's port."""


class RegistryProxyUnusable(RegistryUnreachable):
    """The proxy's address is invalid, its host is unknown, or no program listens there."""


class DiskFull(UserError):
    """There is not enough disk space for a step's output."""

    exit_code = 21


class ArtefactMissing(UserError):
    """An earlier step's product is missing."""

    exit_code = 25


class SourceUnavailable(UserError):
    """A recipe's source cannot be obtained."""

    exit_code = 25


class ArtefactDamaged(UserError):
    """The size or the SHA-256 of a file differs from the value in its manifest."""

    exit_code = 26


class WheelUnusable(UserError):
    """A wheel is missing, damaged, or built for a Python version or ABI other than the image's."""

    exit_code = 26


class PlatformMismatch(UserError):
    """An image, ELF file or wheel is for a platform other than the requested one."""

    exit_code = 26


class RootNeeded(UserError):
    """An ordinary user started a step that changes file owners, mounts or networks."""

    exit_code = 28


class InUse(UserError):
    """Another process uses the folder, port or board."""

    exit_code = 29


class AccessDenied(UserError):
    """Authentication failed, access is not permitted, or the server's identity cannot be verified."""

    exit_code = 30


class RegistryUntrusted(UserError):
    """The registry's certificate is not trusted, or the registry uses plain HTTP where TLS is expected."""

    exit_code = 30


class ReferenceNotFound(UserError):
    """The registry or the engine does not have the requested image or tag."""

    exit_code = 34


class RegistryFailed(UserError):
    """The response is invalid, because the server is not a registry, or because a digest or a layer does not match."""

    exit_code = 35


class RegistryFull(RegistryFailed):
    """The registry has no space left."""


class RegistryBroke(RegistryFailed):
    """The registry closed the connection or reported an internal error; a retry may help."""


class SignatureRefused(UserError):
    """A signature is missing, invalid, or made with another key or for another image.

    This error is also raised if the image is older than one that has already been verified.
    """

    exit_code = 36


class BoardSilent(UserError):
    """The board or the virtual machine did not respond in time."""

    exit_code = 40


class BoardLost(UserError):
    """The connection to the board was lost, or its session ended, during the run."""

    exit_code = 40


class DeviceTestsFailed(UserError):
    """The device suite ran and did not pass."""

    exit_code = 42


class ResultMismatch(UserError):
    """A kernel's result differs from its reference."""

    exit_code = 42


class ChainBroken(UserError):
    """The software on the board is not the software that was built."""

    exit_code = 49


class ChecksFailed(UserError):
    """A test, a linter, one of doctor's checks or a rebuild did not give the expected result."""

    exit_code = 50


FIXES = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some disk space, or have your quota raised",
    errno.EFBIG: "raise the file size limit (ulimit -f unlimited), or use a file system that supports larger files",
    errno.EACCES: "run the task as a user with the required permission, or use another path",
    errno.EPERM: "run the task as a user with the required permission, or use another path",
    errno.EROFS: "use a path on a writable file system",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EAGAIN: "end some processes, or raise the limit on processes (ulimit -u)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "end some processes: the whole machine has too many open files",
    errno.ENOMEM: "free some memory",
    errno.EIO: "check the disk; dmesg shows the reported error",
}


def of_system(fault: OSError) -> UserError:
    """Convert an OSError to a user error (DiskFull for a full disk). The message contains the path if it is known."""
    names = [
        os.fsdecode(name) for name in (fault.filename, fault.filename2) if isinstance(name, (str, bytes, os.PathLike))
    ]
    full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
    place = " and ".join(names)
    return (DiskFull if full else UserError)(
        f"{place or 'an operation'}: {fault.strerror}",
        expected="free space on the disk" if full else "a usable file or folder",
        found=f"{fault.strerror} (errno {fault.errno})",
        fix=FIXES.get(fault.errno or 0, "check the path" if place else "check the arguments of the task"),
    )
