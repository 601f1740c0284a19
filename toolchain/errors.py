"""Every fault that a user can put right, each with its own exit code.

An error says what was expected, what was found and the fix. Only the outermost layer (``tasks.py``,
``toolchain/cli.py``) turns one into an exit code. There an ``OSError`` that nobody expected becomes a user error too,
with its path; a bug is not a ``UserError`` and is left to raise.

Exit codes 1 and 2 stay with Invoke (a failed task body, a command line that does not parse), 130 is Ctrl-C.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from toolchain.text import printable


class UserError(Exception):
    """A fault the user can fix.

    ``expected`` and ``found`` are short noun phrases, ``fix`` is what to type or change.
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
    """invoke.yaml or an INVOKE_* variable holds one or more faults; all of them are listed."""

    exit_code = 11

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        listed = "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(
            f"the configuration has {len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}:\n{listed}",
            fix="edit invoke.yaml (or the INVOKE_* variable or task's option named above), then run the task again",
        )


class ForeignBinaryRefused(UserError):
    """The kernel cannot execute programs of the target architecture."""

    exit_code = 12


class ProgramMissing(UserError):
    """A host program that a step needs is not installed."""

    exit_code = 13


class CommandFailed(UserError):
    """A subprocess ended with a fault; the last lines of its output are part of the message."""

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
    """A subprocess was still running at its deadline and was ended."""

    exit_code = 15


class EngineUnavailable(UserError):
    """No Docker engine answers, and none could be started."""

    exit_code = 16


class ImageBuildFailed(UserError):
    """The engine reported a fault while it built or loaded an image."""

    exit_code = 17


class PlatformMismatch(UserError):
    """An image, ELF file or wheel is for another platform than the one asked for."""

    exit_code = 18


class MirrorPocketUnusable(UserError):
    """A pocket of the apt mirror cannot be verified (an error under ``image.strict``, else a warning)."""

    exit_code = 19


class NetworkUnreachable(UserError):
    """A host that a step needs does not answer."""

    exit_code = 20


class DiskFull(UserError):
    """Not enough room where a step has to write."""

    exit_code = 21


class SystemRefused(UserError):
    """The operating system refused to read or write something, where no other error says more."""

    exit_code = 56


class MemoryExhausted(UserError):
    """The kernel killed a process of a build because memory ran out."""

    exit_code = 55


class WheelUnusable(UserError):
    """A wheel is missing, damaged, or for another Python or ABI than the image's."""

    exit_code = 22


class SourceUnavailable(UserError):
    """A recipe's source cannot be obtained."""

    exit_code = 23


class RecipeInvalid(UserError):
    """A recipe's data file is missing or has faults."""

    exit_code = 37


class NotReproducible(UserError):
    """What was built again is not what was built before."""

    exit_code = 38


class ForeignFolder(UserError):
    """A folder that would be replaced or deleted does not carry our marker."""

    exit_code = 24


class ArtefactMissing(UserError):
    """A step was asked for the product of an earlier one that has not been run."""

    exit_code = 25


class ArtefactDamaged(UserError):
    """A file does not have the size or the SHA-256 that its manifest states."""

    exit_code = 26


class ServerFailed(UserError):
    """A server that we start (NFS, registry, dockerd) did not come up, or went away."""

    exit_code = 27


class RootNeeded(UserError):
    """A step that changes owners, mounts or networks was asked for by an ordinary user."""

    exit_code = 28


class InUse(UserError):
    """Another run, or something mounted there, holds what a step has to replace."""

    exit_code = 29


class RegistryRefused(UserError):
    """The registry refused: credentials or rights."""

    exit_code = 30


class RegistryUnreachable(UserError):
    """The registry's host does not answer in time, or there is no way to it."""

    exit_code = 31


class RegistryHostUnknown(RegistryUnreachable):
    """The registry's host has a name that does not resolve."""

    exit_code = 51


class RegistryConnectionRefused(RegistryUnreachable):
    """The registry's host is there, and nothing listens on that port."""

    exit_code = 52


class RegistryUntrusted(UserError):
    """The registry's certificate is not trusted, or it speaks plain HTTP where TLS is expected."""

    exit_code = 32


class ReferenceInvalid(UserError):
    """An image name, tag or registry address does not follow the reference grammar."""

    exit_code = 33


class ReferenceNotFound(UserError):
    """The registry or the engine does not have that image or tag."""

    exit_code = 34


class RegistryFailed(UserError):
    """The registry answers what a registry should not (no registry at all, a digest or a layer that does not match)."""

    exit_code = 35


class RegistryFull(RegistryFailed):
    """The registry has no room left."""

    exit_code = 53


class RegistryBroke(RegistryFailed):
    """The registry broke off, or answered with a fault of its own: worth another try."""

    exit_code = 54


class RegistryStalled(RegistryFailed):
    """Nothing was transferred for longer than we wait; another try would wait as long."""

    exit_code = 57


class EngineConfigUnusable(UserError):
    """The engine's daemon.json is broken, may not be changed, or is not what the engine goes by."""

    exit_code = 36


class BoardSilent(UserError):
    """The board (or the virtual machine) did not answer in time."""

    exit_code = 40


class BoardUntrusted(UserError):
    """The board's SSH host key is not the one we wrote into its root filesystem."""

    exit_code = 41


class DeviceTestsFailed(UserError):
    """The device suite ran and did not pass."""

    exit_code = 42


class ChainBroken(UserError):
    """The device suite passed, but what it tested is not what was built."""

    exit_code = 49


class NetworkSharingFailed(UserError):
    """The NAT table for the board's subnet cannot be set up or taken down."""

    exit_code = 43


class PortTaken(UserError):
    """Another program listens on the port that a server of ours needs."""

    exit_code = 44


class BoardLoginDenied(UserError):
    """The board answers with the right host key, but does not accept our login key."""

    exit_code = 45


class ToolkitUnusable(UserError):
    """There is no CUDA toolkit of the pinned release, or it lacks a part."""

    exit_code = 46


class GpuMissing(UserError):
    """A step that needs a CUDA GPU was asked for on a machine without one."""

    exit_code = 47


class ChecksFailed(UserError):
    """Tests, linters or doctor's checks found faults."""

    exit_code = 50


class DeviceUnknown(UserError):
    """A device's name or address leads to no board."""

    exit_code = 60


class DeviceBusy(UserError):
    """The board, or every board with that key, serves somebody else for longer than we wait."""

    exit_code = 61


class SessionTimedOut(UserError):
    """The board ended our session because its time was up."""

    exit_code = 62


class BoardLost(UserError):
    """The board, or what ran the kernel on it, went away in mid-run."""

    exit_code = 63


class ResultMismatch(UserError):
    """A kernel computed something else than its reference."""

    exit_code = 64


class KernelUnusable(UserError):
    """A kernel's file is missing, does not hold a kernel, does not compile, or the kernel itself fails."""

    exit_code = 65


_WAYS_OUT = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or have your quota raised",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f unlimited), or use a file system that takes larger files",
    errno.EACCES: "run the task as a user who may do that, or name another place",
    errno.EPERM: "run the task as a user who may do that, or name another place",
    errno.EROFS: "name a place that can be written to",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory",
    errno.EIO: "check the disk: dmesg says what it reported",
}


def of_system(fault: OSError) -> UserError:
    """The user error for what the operating system refused: a full disk, or another fault with the path it names."""
    names = [
        os.fsdecode(name) for name in (fault.filename, fault.filename2) if isinstance(name, (str, bytes, os.PathLike))
    ]
    full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
    place = " and ".join(names)
    return (DiskFull if full else SystemRefused)(
        f"{place or 'an operation'}: {fault.strerror}",
        expected="room on the disk" if full else "a file or folder that can be used",
        found=f"{fault.strerror} (errno {fault.errno})",
        fix=_WAYS_OUT.get(fault.errno or 0, "check that path" if place else "check what the task was given"),
    )
