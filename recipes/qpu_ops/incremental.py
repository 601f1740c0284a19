"""Update the previous build of the extension wheel within seconds if only the extension's sources have changed.

A full build takes minutes: it starts Python and imports torch under emulation, and then compiles every source. A
changed kernel requires only one compilation and one link. Therefore, the previous full build is stored: its source
folder with the objects, its compiler and linker command lines, its wheel, and a hash (``surroundings``). The hash
covers everything else that determines the wheel: the development root, torch, libqpu, the compiler and setup.py. If the
hash is unchanged, a rebuild runs the compiler command lines for the changed sources and the linker command lines for
their modules, without Python. It then puts the products into a copy of the wheel. The installed files are identical to
those of a full build, byte for byte; a test compares them.

If the hash differs or the stored build is inconsistent, the stored build is ignored, and a full build follows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolchain import files

SOURCES = ("csrc", "src")
"""Folders whose files may change between a build and its update. A change to any other file requires a full build."""

_COMPILER = re.compile(r"(?:\S*/)?(?:\S+-)?(?:gcc|g\+\+|cc|c\+\+)(?:-\d+)?")
_INCLUDED = re.compile(r'^#include "([^"]+\.cpp)"', re.MULTILINE)
_RECORD = "build.json"


def compiler_commands(output: str) -> list[list[str]]:
    """Return the compiler and linker command lines in the output of setup.py (or ``pip -v``), in order."""
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
class PreviousBuild:
    """A folder with a full build: ``source`` (with the objects), the wheel, and a JSON file that records the build."""

    folder: Path

    @property
    def source(self) -> Path:
        """The copy of the sources that is mounted into the container."""
        return self.folder / "source"

    def remember(self, surroundings: str, output: str, wheel: Path) -> None:
        """Record a successful full build: the command lines in its ``output``, and a copy of its ``wheel``.

        The output of concurrent compilers can be interleaved. Therefore, nothing is recorded if the command line for
        any linked object is not found.
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
        self._write(document)

    def rebuild(
        self, recipe: Path, surroundings: str, run: Callable[[Sequence[Sequence[str]]], object], out: Path
    ) -> Path | None:
        """Rebuild what has changed in the recipe's sources since the recorded build.

        Returns the wheel in ``out``, or None if a full build is necessary. ``run`` executes command lines in
        ``source``, in order. Raises CommandFailed.
        """
        try:
            document = json.loads((self.folder / _RECORD).read_text())
            old = self.folder / str(document["wheel"])
            commands = [list(map(str, item)) for item in document["commands"]]
            objects = dict(document["objects"])
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        links = {self.source / item[item.index("-o") + 1]: item for item in commands if "-shared" in item}
        fits = document.get("surroundings") == surroundings and document.get("names") == _names(recipe)
        if not fits or not links or not old.is_file():
            return None
        if not all((self.source / name).is_file() for name in document["names"]):
            return None
        for name in document["names"]:
            if (recipe / name).read_bytes() != (self.source / name).read_bytes():
                shutil.copyfile(recipe / name, self.source / name)
        outdated = [item for item in commands if "-c" in item and self._outdated(item, objects)]
        outputs = {item[item.index("-o") + 1] for item in outdated}
        linked = {module: item for module, item in links.items() if outputs.intersection(item)}
        if not all(module.is_file() for module in links if module not in linked):
            return None
        if outdated:
            # After an error or an interruption, the next call compiles these objects and links their modules again.
            document["objects"] = {name: key for name, key in objects.items() if name not in outputs}
            self._write(document)
            run([*outdated, *linked.values()])
        made = _rewrapped(old, out / old.name, self.source / "src", list(links))
        if made is None:
            return None
        with files.replacing(old) as aside:
            shutil.copy2(made, aside)
        document["objects"] = {item[item.index("-o") + 1]: self._key(item) for item in commands if "-c" in item}
        self._write(document)
        return made

    def _write(self, document: Mapping[str, object]) -> None:
        files.write_text_atomically(self.folder / _RECORD, json.dumps(document, indent=1))

    def _outdated(self, command: Sequence[str], objects: dict[str, str]) -> bool:
        product = command[command.index("-o") + 1]
        return objects.get(product) != self._key(command) or not (self.source / product).is_file()

    def _key(self, command: Sequence[str]) -> str:
        """Hash a command line, its source file, the files that this file includes, and all headers in its folder."""
        digest = hashlib.sha256(shlex.join(command).encode())
        own = self.source / command[command.index("-c") + 1]
        included = [own.parent / name for name in _INCLUDED.findall(own.read_text())]
        for path in (own, *included, *sorted(own.parent.glob("*.h"))):
            digest.update(f"\0{path.relative_to(self.source)}\0{files.sha256_of(path)}".encode())
        return digest.hexdigest()


def _names(root: Path) -> list[str]:
    """Return the relative paths of the files in ``SOURCES``. If these paths change, a full build is necessary."""
    found = (path for name in SOURCES for path in (root / name).rglob("*"))
    return sorted(
        str(path.relative_to(root))
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    )


def surroundings(root: Path, *others: str) -> str:
    """Hash the recipe's files outside ``SOURCES`` and all strings in ``others``."""
    digest = hashlib.sha256(files.tree_fingerprint(root, "*.py", "*.toml", "backend/*").encode())
    for item in others:
        digest.update(b"\0" + item.encode())
    return digest.hexdigest()


def _rewrapped(old: Path, new: Path, modules: Path, libraries: Sequence[Path]) -> Path | None:
    """Copy the wheel ``old`` to ``new``, and replace the Python modules, compiled extensions and RECORD in the copy.

    Returns the path of the copy, or None if the new files do not match the wheel's members.
    """
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
