"""A simulated board: this machine's system with an SSH server in a network namespace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nfsroot.layout import Layout
from toolchain import process

# sh SCRIPT PASSWD SSHD CONFIGURATION: sshd requires its own user and /run/sshd.
_SERVE = """
mount --bind "$1" /etc/passwd && mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$2" -D -e -f "$3"
"""


@contextlib.contextmanager
def ssh_board(
    namespace: str, sshd: Path, folder: Path, layout: Layout, variables: str = "", enter: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run an SSH server in the namespace; new keys replace those of the export.

    For the board's programs, ``folder`` is on the PATH and ``variables`` are in the environment.
    ``enter`` is a shell script that runs each client's command ($SSH_ORIGINAL_COMMAND) in a separate mount namespace.
    """
    folder.mkdir()
    layout.client_key.unlink(missing_ok=True)
    for key in (layout.client_key, folder / "host"):
        process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    layout.known_hosts.write_text(f"* {(folder / 'host.pub').read_text()}")
    passwd = folder / "passwd"
    passwd.write_text(f"root:x:0:0:root:{folder}:/bin/sh\nsshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n")
    configuration = folder / "sshd_config"
    accepted = str(layout.client_key).replace("%", "%%")
    configuration.write_text(
        f"HostKey {folder / 'host'}\nAuthorizedKeysFile {accepted}.pub\nStrictModes no\nUsePAM no\n"
        f"SetEnv PATH={folder}:{Path(sys.executable).parent}:/usr/bin:/bin {variables}\n"
    )
    if enter:
        (folder / "enter").write_text(enter)
        with configuration.open("a") as stream:
            stream.write(f"ForceCommand exec unshare --mount sh -eu {folder / 'enter'}\n")
    words = ["ip", "netns", "exec", namespace, "unshare", "--mount", "sh", "-c", _SERVE, "sh"]
    with subprocess.Popen([*words, passwd, sshd, configuration], stderr=subprocess.PIPE) as board:
        try:
            assert board.stderr is not None
            assert any(b"listening" in line for line in board.stderr)
            yield board
        finally:
            board.kill()
            # Kill the processes of cut connections, because they would keep the namespace in use.
            for pid in process.output_of(["ip", "netns", "pids", namespace]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
