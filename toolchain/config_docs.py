"""The page docs/configuration.md: every setting, from the one place that has its type, default and help.

``python -m toolchain.config_docs`` writes the page; a test compares it with what would be written.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from pathlib import Path
from typing import Any

from toolchain import files
from toolchain.config import ROOT, Check, Config

PAGE = ROOT / "docs" / "configuration.md"

_KINDS: dict[Any, tuple[str, Any]] = {
    str: ("text", "\0"),
    Path: ("path", Path()),
    bool: ("true or false", None),
    int: ("whole number", -math.inf),
    float: ("number", -math.inf),
}
"""By type: its name for readers, and a value that no check allows."""

_HEAD = """\
# Configuration

Every setting has a default, so `invoke.yaml` may be absent or hold only what differs:

```yaml
image:
  suite: bookworm
  extra_packages: [vim, tmux]
torch:
  wheelhouse: [wheelhouse]
```

Where a setting comes from, the later wins: the default below, `/etc/invoke.yaml`, `~/.invoke.yaml`, `invoke.yaml` in
the checkout, the environment variable in the table, a file named by `./inv --config FILE TASK`. A list in an
environment variable is written with commas. Relative paths in settings start at the checkout, `~` is your home, under
sudo too; FILE is from the folder that you are in.

Everything is checked before a task begins. An unknown section or key is refused with the nearest valid name, and all
faults are reported at once (exit code 11). A path must be one that can exist: no part over 255 bytes, below a folder
and not below a file, outside `/proc` and `/sys`.
"""

_NOTES = {
    "image": """\
Which archive gives what:

- `flavour: raspbian`: roots and shells are Raspbian's, what runs on this PC is Debian's. Raspbian has no kernel: the
  distribution's is Debian's, which QEMU's machine and a Pi 2 and 3 boot. libqpu and wheels are compiled by Raspbian's
  own compiler, emulated: it makes ARMv6 code, and Debian's does not. torch's wheel is ARMv7 code, which a Pi 1 cannot
  run.
- `kernel: raspberrypi`: kernel and boot firmware come from the Raspberry Pi's archive, and nothing else does; apt in
  the image keeps to that too (`/etc/apt/preferences.d/pitorch`). It is the kernel of a Pi 2 and 3, or for arm64 that of
  64 bits; others of that archive come by `extra_packages`.
- The tests build both from stand-ins of the archives; the real ones have not been built from.
""",
}

_TAIL = """\
## What is not in invoke.yaml

| variable | meaning |
| --- | --- |
| `http_proxy`, `https_proxy`, `all_proxy`, `no_proxy` | reach every build step, in either spelling, and a dockerd \
that `./inv` starts where there is no systemd (docker.service has its own settings); `all_proxy` stands in for the \
first two. A SOCKS proxy (`socks5h://`) serves apt and git; pip and registries need an HTTP proxy, or on this PC \
PySocks in `.venv` |
| `SOURCE_DATE_EPOCH` | newest time stamp in images, where `image.source_date_epoch` is not set |
| `DOCKER_HOST` | the engine to use; unset: that of docker's current context (`DOCKER_CONTEXT`), with its TLS files. \
Builds want one of this machine, whose folders they mount |
| `PITORCH_SKIP_APT=1` | `./inv` installs no host packages as long as it is set: they are someone else's care |
| `PITORCH_PYTHON` | the Python that `./inv` makes `.venv` with, instead of `/usr/bin/python3` |
| `PITORCH_REGISTRY_PASSWORD` | password for `push`, `pull` and the tasks of artefacts; never on a command line, nor \
in another program's environment |

*Written by `python -m toolchain.config_docs`; change the help texts in `toolchain/config.py`, not this page.*
"""


def render() -> str:
    """The page's text."""
    sections = typing.get_type_hints(Config)
    parts = [_HEAD]
    for item in dataclasses.fields(Config):
        section = sections[item.name]
        parts.append(f"## `{item.name}`\n\n{_purpose(section)}\n\n{_table(item.name, section)}")
        if item.name in _NOTES:
            parts.append(_NOTES[item.name])
    return "\n".join([*parts, _TAIL])


def _purpose(section: Any) -> str:
    return re.sub(r": section ``\w+``\.", ".", str(section.__doc__).splitlines()[0])


def _table(name: str, section: Any) -> str:
    made, hints = section(), typing.get_type_hints(section)
    rows = ["| setting | default | valid | meaning | environment |", "| --- | --- | --- | --- | --- |"]
    for item in dataclasses.fields(section):
        cells = (
            f"`{name}.{item.name}`",
            _default(getattr(made, item.name)),
            _valid(hints[item.name], item.metadata["check"]),
            item.metadata["help"],
            f"`INVOKE_{name}_{item.name}`".upper(),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _valid(hint: Any, check: Check | None) -> str:
    """What a value may be: the check itself says so about a value that nothing allows."""
    name = "list" if isinstance(hint, types.GenericAlias) else _KINDS[hint][0]
    impossible = ("\0",) if name == "list" else _KINDS[hint][1]
    said = check(impossible).partition("expected ")[2].partition("; did you mean")[0] if check else ""
    if not said:
        return name
    return f"{name}: {said}" if hint in (int, float) or name == "list" else said


def _default(value: Any) -> str:
    if value in ("", ()):
        return "(empty)"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def write(page: Path = PAGE) -> None:
    """Write the page, atomically."""
    files.write_text_atomically(page, render())


if __name__ == "__main__":
    write()
