"""What can go wrong with a kernel on a board, whichever road it takes there: one table, from kinds to errors.

Kinds are the words that a worker tells (``reporting``), that the loader answers (``loader/loader.cpp``), and that the
two sessions here find by themselves. Where the loader names a finer kind (load, memory, protocol), it is the kernel's.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolchain.errors import BoardLost, BoardSilent, CommandFailed, InUse, PlatformMismatch, UserError


@dataclass(frozen=True)
class Row:
    """An error and its words. ``{where}`` is the board's address; others are given by whoever meets the fault."""

    error: type[UserError]
    summary: str
    expected: str
    fix: str


TABLE = {
    "unknown": Row(
        UserError,
        "no board answers to {where}",
        "a board with that key",
        "check the key, and that the board's server runs and has reached the tracker or proxy",
    ),
    "silent": Row(
        BoardSilent,
        "{where} cannot be reached",
        "an answer to the connection",
        "check that the board is on, that its server (TVM's, or sshd) runs, and that the address is right",
    ),
    "busy": Row(
        InUse,
        "{where} is busy",
        "a session within {limit_s:g} s",
        "try again later, or raise remote.queue_limit_s",
    ),
    "timed-out": Row(
        BoardLost,
        "the session on {where} was ended: its time was up",
        "an end within {limit_s:g} s",
        "measure less (--number, --repeat, --size), or raise remote.session_limit_s",
    ),
    "lost": Row(
        BoardLost,
        "{where} was lost in mid-run",
        "an answer to each request",
        "look at the board (power, network, memory); by RPC a kernel that crashes looks the same: see its server's log",
    ),
    "architecture": Row(
        PlatformMismatch,
        "the kernel is for another machine than {where}",
        "a kernel for the board's own machine",
        "choose the --target that the board runs",
    ),
    "unstartable": Row(
        PlatformMismatch,
        "the loader does not run on {where}",
        "a board of the target's machine, with its C library",
        "choose the --target that the board runs",
    ),
    "linker": Row(
        CommandFailed,
        "the kernel cannot be linked for {target}",
        "a linker for {gnu}",
        "set remote.linker (INVOKE_REMOTE_LINKER) to another cross compiler",
    ),
    "crashed": Row(
        UserError,
        "the kernel crashed on {where}",
        "a kernel that keeps within its arrays",
        "look at its indices, or at what it calls",
    ),
    "kernel": Row(
        UserError,
        "the kernel's file cannot be used",
        "a file that defines SIZE, module, inputs and reference",
        "docs/remote.md has an example",
    ),
    "refused": Row(
        UserError,
        "the kernel fails on {where}",
        "a kernel that can be loaded and takes its arrays",
        "correct the kernel's file (docs/remote.md says what it is called with)",
    ),
}


def told(kind: str, found: str, **words: object) -> UserError:
    """The error of a kind; ``words`` fill in its texts. Raises KeyError for a kind that the table does not have."""
    row = TABLE[kind]
    summary, expected, fix = (text.format(**words) for text in (row.summary, row.expected, row.fix))
    return row.error(summary, expected=expected, found=found, fix=fix)


def answered(kind: str, found: str, **words: object) -> UserError:
    """The error of a kind that a board's loader answered: what it does not tell apart here is the kernel's."""
    return told(kind if kind in ("busy", "architecture") else "refused", found, **words)
