"""Run the extracted programs that make card images (flow.extracted_tools), with their own loader and libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolchain import process

_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Tools:
    """The folder with the programs. They use ``epoch``, in Unix seconds, as the time stamp in file systems."""

    folder: Path
    epoch: int

    def command(self, name: str, *words: str | Path) -> list[str]:
        """Return the command line that runs a program such as ``mke2fs``."""
        usr = self.folder / "usr"
        loader = next(usr.glob("lib*/ld-linux*.so.*"))
        library = next(usr.glob("lib/*/libc.so.6")).parent
        program = next(path for path in (usr / "sbin" / name, usr / "bin" / name) if path.is_file())
        return [*map(str, (loader, "--library-path", library, "--argv0", name, program, *words))]

    def run(self, name: str, *words: str | Path, stdin: bytes | None = None) -> str:
        """Run a program and return its standard output. Raises CommandFailed."""
        environment: Mapping[str, str] = {
            "SOURCE_DATE_EPOCH": str(self.epoch),
            "E2FSPROGS_FAKE_TIME": str(self.epoch),
            "MKE2FS_CONFIG": str(self.folder / "etc/mke2fs.conf"),
            "MTOOLSRC": "/dev/null",
            "TZ": "UTC",
            "LD_PRELOAD": "",  # fakeroot's library requires this PC's C library
        }
        return process.run(
            self.command(name, *words),
            env=environment,
            stdin=stdin,
            limit_s=_LIMIT_S,
            merge_stderr=False,
            fix="read the last lines of the output; if the disk is full, which is the usual cause, free some space",
        ).output
