"""Access a board over SSH with the login key that the export created and with the board's pinned host key.

ssh looks up the host key under a fixed name (``HostKeyAlias``), so the key is valid for every address and port of the
board, including a virtual machine's forwarded port. Without a pinned key, ssh uses the user's ``known_hosts``. ssh
always rejects an unknown host key and never adds it to ``known_hosts``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolchain import files, process
from toolchain.errors import AccessDenied, ArtefactMissing, UserError

ALIAS = "pitorch-board"
"""The board's name in the pinned known_hosts file."""

_REFUSED = re.compile(r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED|No \S+ host key is known")
_DENIED = re.compile(r"Permission denied \(|Too many authentication failures")


@dataclass(frozen=True, kw_only=True)
class SshAccess:
    """A board's address, user and keys.

    If this project did not export the board's system, ``key`` and ``known_hosts`` are None, and ssh uses the user's
    keys and ``known_hosts``.
    """

    host: str
    port: int = 22
    user: str = "root"
    key: Path | None = None
    known_hosts: Path | None = None

    def options(self) -> list[str]:
        """Return the ``ssh`` options for a login that never prompts and accepts only a known host key.

        Raises UserError.
        """
        words = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
        if self.known_hosts is not None:
            words += [
                "-o", f"UserKnownHostsFile={_quoted(self.known_hosts)}",
                "-o", "GlobalKnownHostsFile=none",
                "-o", f"HostKeyAlias={ALIAS}",
            ]  # fmt: skip
        if self.key is not None:
            # The option -i is not used, because ssh would look for the file before it expands %%, and ignore the key as
            # missing.
            words += ["-o", "IdentitiesOnly=yes", "-o", f"IdentityFile={_quoted(self.key)}"]
        return words

    def command(self, remote: Sequence[str] = (), *, connect_timeout_s: int = 20) -> list[str]:
        """Return the ``ssh`` command line that runs ``remote`` on the board."""
        words = ["ssh", *self.options(), "-o", f"ConnectTimeout={connect_timeout_s}", "-o", "LogLevel=ERROR"]
        words += ["-p", str(self.port), "-l", self.user, self.host]
        return [*words, "--", shlex.join(remote)] if remote else words

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}" + (f":{self.port}" if self.port != 22 else "")


def parse_host(text: str) -> tuple[str, str, int]:
    """Parse ``[USER@]HOST[:PORT]`` (IPv6: ``[ADDRESS]:PORT``) into user (default root), host and port (default 22)."""
    found = re.fullmatch(
        r"(?:(?P<user>[\w.][\w.-]*)@)?(?:\[(?P<six>[0-9A-Fa-f:%\w.]+)\]|(?P<host>[\w.][\w.-]*))(?::(?P<port>\d{1,5}))?",
        text,
    )
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise UserError(
            f"{text!r} is not a valid board address",
            expected="[USER@]HOST[:PORT], with an IPv6 address in brackets",
            found=repr(text),
            fix="use an address such as root@192.168.77.50",
        )
    return found["user"] or "root", found["six"] or found["host"], int(found["port"] or 22)


def pin(host_keys: Path, destination: Path, more: Sequence[str] = ()) -> Path:
    """Write a known_hosts file that lists the keys in ``host_keys`` and in ``more`` under the name ``ALIAS``.

    ``host_keys`` is a known_hosts file or a file of public keys in ssh-keygen's format. Raises ArtefactMissing if
    ``host_keys`` contains no key.
    """
    try:
        lines = host_keys.read_text().splitlines()
    except FileNotFoundError:
        lines = []
    keys = [found[0] for line in lines if (found := re.search(r"(?:ssh|ecdsa|sk)-[\w@.-]+ AAAA[\w+/=]+", line))]
    if not keys:
        raise ArtefactMissing(
            "the host key of the exported tree is missing, so the board cannot be authenticated",
            expected=f"at least one public key in {host_keys}",
            found="no key" if host_keys.exists() else "no such file",
            fix="run ./inv export-nfsroot again, which creates the host keys",
        )
    files.write_text_atomically(destination, "".join(f"{ALIAS} {key}\n" for key in dict.fromkeys([*keys, *more])))
    return destination


def require_readable(key: Path, again: str) -> None:
    """Raise RootNeeded if this user may not read a login key. ``again`` is the command that root must run."""
    if key.exists() and not os.access(key, os.R_OK, effective_ids=True):
        process.require_root(f"to read the login key {key}", again)


def diagnose(access: SshAccess, output: str) -> UserError | None:
    """Return the error that ssh's output describes, or None if a retry may succeed."""
    if _REFUSED.search(output):
        pinned = access.known_hosts is not None
        return AccessDenied(
            f"the SSH host key of {access} is not the expected one",
            expected="an SSH host key of the exported tree, or one that a board has stored on this PC (nfs.overlay)"
            if pinned
            else "an SSH host key from your known_hosts",
            found="another host key" if pinned else "an unknown or different host key",
            fix="check the address, and boot the board from the exported tree: the board's host key differs if the "
            "tree was exported again while the board was up, or if the board runs a card image"
            if pinned
            else f"run {_to_type('ssh', access)}, and accept the host key if its fingerprint is the one on the board's "
            "console",
        )
    if _DENIED.search(output):
        return AccessDenied(
            f"SSH login denied: {access}",
            expected=f"a login with the key {access.key}" if access.key else "a login with one of your SSH keys",
            found=output.strip().splitlines()[-1],
            fix="boot the board from the exported tree: its /root/.ssh/authorized_keys contains the key"
            if access.key
            else f"run {_to_type('ssh-copy-id', access)}",
        )
    return None


def _to_type(program: str, access: SshAccess) -> str:
    """Return a command that runs ``program`` with the board's address, as the user whose SSH files this task uses."""
    sudo = ["sudo"] if os.geteuid() == 0 and os.environ.get("SUDO_USER") else []
    port = ["-p", str(access.port)] if access.port != 22 else []
    return shlex.join([*sudo, program, *port, f"{access.user}@{access.host}"])


def _quoted(path: Path) -> str:
    """Return a path quoted for ssh's option parser, with ``%`` doubled, because ssh expands ``%`` in paths.

    Raises UserError for a path with ``${``, which cannot be quoted.
    """
    if "${" in str(path):
        raise UserError(
            "ssh cannot use the files of the exported tree",
            expected="a path without ${, because ssh would replace it with the value of a variable",
            found=str(path),
            fix="set nfs.folder and build.folder to folders without ${ in their paths",
        )
    escaped = re.sub(r'(["\\])', r"\\\1", str(path).replace("%", "%%"))
    return f'"{escaped}"'
