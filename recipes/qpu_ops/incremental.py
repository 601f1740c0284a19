"""Rebuild the extension wheel from a kept build when only its own sources changed: minutes become seconds.

A full build starts Python and imports torch under emulation, then compiles every source. Of that, a changed kernel
needs one compilation and one link. So a full build is kept: its source folder with the objects in it, the command
lines that its compiler was called with, and its wheel. As long as everything else is the same (the *surroundings*:
development root, torch, libqpu, compiler, setup.py), a rebuild runs the compiler's command lines for the sources that
changed, and the linker's for the modules they are in, without Python, and puts the products into a copy of the wheel.
What is installed from it is what a full build would install, byte for byte; a test compares them.

A kept build that does not fit is not used, and whatever is odd about one leads to a full build.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolchain import files

SOURCES = ("csrc", "src")
"""Folders whose files may change between a kept build and a rebuild; anything else belongs to the surroundings."""

_COMPILER = re.compile(r"(?:\S*/)?(?:\S+-)?(?:gcc|g\+\+|cc|c\+\+)(?:-\d+)?")
_INCLUDED = re.compile(r'^#include "([^"]+\.cpp)"', re.MULTILINE)
_RECORD = "kept.json"


def compiler_commands(output: str) -> list[list[str]]:
    """The compiler's and linker's command lines in what setup.py (or ``pip -v``) printed, in order."""
    found = []
    for line in output.splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        if words and _COMPILER.fullmatch(words[0]) and "-o" in words and ("-c" in words or "-shared" in words):
            found.append(words)
    return found


@dataclass(frozen=True)
class Kept:
    """A kept build in a folder of its own: ``source`` (with its objects), the wheel, and the record of both."""

    folder: Path

    @property
    def source(self) -> Path:
        """The copy of the sources that was built, mounted into the container at every build."""
        return self.folder / "source"

    def remember(self, surroundings: str, output: str, wheel: Path) -> None:
        """Keep a full build that has just ended well; ``output`` is what it printed, ``wheel`` is copied.

        Compilers that run side by side may break each other's lines: where the output does not tell how each object
        that was linked came about, nothing is kept.
        """
        commands = compiler_commands(output)
        compiled = {item[item.index("-o") + 1] for item in commands if "-c" in item}
        linked = {word for item in commands if "-shared" in item for word in item if word.endswith(".o")}
        if not linked or linked - compiled:
            return
        shutil.copy2(wheel, self.folder / wheel.name)
        document = {
            "surroundings": surroundings,
            "wheel": wheel.name,
            "commands": commands,
            "objects": {item[item.index("-o") + 1]: self._key(item) for item in commands if "-c" in item},
            "names": _names(self.source),
        }
        files.write_text_atomically(self.folder / _RECORD, json.dumps(document, indent=1))

    def rebuild(
        self, recipe: Path, surroundings: str, run: Callable[[Sequence[Sequence[str]]], object], out: Path
    ) -> Path | None:
        """Bring the kept build up to date with the recipe's sources; the wheel in ``out``, None for a full build.

        ``run`` executes command lines in ``source``, in order. Raises CommandFailed with the compiler's words.
        """
        try:
            document = json.loads((self.folder / _RECORD).read_text())
            old = self.folder / str(document["wheel"])
            commands = [list(map(str, item)) for item in document["commands"]]
            objects = dict(document["objects"])
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        links = [item for item in commands if "-shared" in item]
        fits = document.get("surroundings") == surroundings and document.get("names") == _names(recipe)
        if not fits or not links or not objects or not old.is_file():
            return None
        # Until it ends well there is no kept build: what an interrupted one leaves may be torn.
        (self.folder / _RECORD).unlink()
        for name in document["names"]:
            if (recipe / name).read_bytes() != (self.source / name).read_bytes():
                shutil.copyfile(recipe / name, self.source / name)
        outdated = [item for item in commands if "-c" in item and self._outdated(item, objects)]
        anew = {item[item.index("-o") + 1] for item in outdated}
        if outdated:
            run([*outdated, *(link for link in links if anew.intersection(link))])
        libraries = [self.source / link[link.index("-o") + 1] for link in links]
        made = _rewrapped(old, out / old.name, self.source / "src", libraries)
        if made is None:
            return None
        shutil.copy2(made, old)
        document["objects"] = {item[item.index("-o") + 1]: self._key(item) for item in commands if "-c" in item}
        files.write_text_atomically(self.folder / _RECORD, json.dumps(document, indent=1))
        return made

    def _outdated(self, command: Sequence[str], objects: dict[str, str]) -> bool:
        product = command[command.index("-o") + 1]
        return objects.get(product) != self._key(command) or not (self.source / product).is_file()

    def _key(self, command: Sequence[str]) -> str:
        """SHA-256 over a command line, its source, the sources that it includes and every header in its folder."""
        digest = hashlib.sha256(shlex.join(command).encode())
        own = self.source / command[command.index("-c") + 1]
        included = [own.parent / name for name in _INCLUDED.findall(own.read_text())]
        for path in (own, *included, *sorted(own.parent.glob("*.h"))):
            digest.update(f"\0{path.relative_to(self.source)}\0{files.sha256_of(path)}".encode())
        return digest.hexdigest()


def _names(root: Path) -> list[str]:
    """The files that may change, relative to the root. Another set of them means another build."""
    found = (path for name in SOURCES for path in (root / name).rglob("*"))
    return sorted(
        str(path.relative_to(root))
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    )


def surroundings(root: Path, *others: str) -> str:
    """SHA-256 over the recipe's other files and whatever else a kept build depends on."""
    digest = hashlib.sha256(files.tree_fingerprint(root, "*.py", "*.toml", "backend/*").encode())
    for item in others:
        digest.update(b"\0" + item.encode())
    return digest.hexdigest()


def _rewrapped(old: Path, new: Path, modules: Path, libraries: Sequence[Path]) -> Path | None:
    """A copy of a wheel with its modules and its extensions replaced, RECORD to match; None when they do not fit."""
    extensions = {library.name: library for library in libraries}
    if len(extensions) != len(libraries):
        return None
    with files.replacing(new) as aside, zipfile.ZipFile(old) as source, zipfile.ZipFile(aside, "w") as sink:
        rows = []
        for member in source.infolist():
            content = source.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                record = member
                continue
            if library := extensions.get(Path(member.filename).name):
                content = library.read_bytes()
            elif ".dist-info/" not in member.filename:
                if not (modules / member.filename).is_file():
                    return None
                content = (modules / member.filename).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{member.filename},sha256={digest},{len(content)}\n")
            sink.writestr(member, content)
        rows.append(f"{record.filename},,\n")
        sink.writestr(record, "".join(rows))
    return new
