"""From a changed kernel to its result on a device, in QEMU: a machine that is off, and one that is up.

Two ways to hold a kernel: a C++ program of the user's own, compiled in ``./inv shell`` and sent to the device; and the
QPU extension of torch, rebuilt and put into the device's root by ``./inv deploy``. The change is a number that the
kernel adds, another one in every round. The time ends when that number has been seen in what the device computed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.measure import Figure, Goal, Result, median_of
from benchmarks.workspace import Workspace
from nfsroot import access, qemu, serve
from nfsroot.layout import Layout
from nfsroot.private_network import private_network
from toolchain import files, process, progress
from toolchain.config import ROOT
from toolchain.errors import CommandFailed

OFF = "device off"
UP = "device up"
UP_LOADED = "device up, by pitorch.preloaded"

RULE = (
    "MODEL: the device is QEMU's virtual machine with the lean init, booted over NFS; not measured on hardware. The "
    "image is built and exported before; the time runs from the saved source to the seen result, always of another "
    "kernel. Device off: one run, its boot included. Device up: that run was the warm-up, then the median. Python is "
    "started anew each time, or by ``python3 -m pitorch.preloaded``, which forks a process that has imported torch."
)

KERNELS = Path("recipes/qpu_ops/csrc/kernels.cpp")
PROGRAM = Path(__file__).resolve().parent / "program.cpp"

_OF_EXTENSION = re.compile(r"(\[\]\(const Float& x, const Float& y\) \{ return x \* y)[^;]*(; \})")
_OF_PROGRAM = re.compile(r"(\*p = x \+ )[0-9.]+(f;)")
_OPERANDS = 3.0 * 5.0
_RESULT = re.compile(r"^(?:imports (?P<imports>\S+) )?result (?P<result>.+)$", re.MULTILINE)
_PYTHON = """
import time
began = time.monotonic()
import torch, dot_cpp
ready = time.monotonic()
result = dot_cpp.product(torch.full((40,), 3.0), torch.full((40,), 5.0))
print("imports", ready - began, "result", *sorted(set(result.tolist())), flush=True)
"""
_PRELOADED = ("python3", "-m", "pitorch.preloaded")
_COMPILE = "g++ -O2 -o program program.cpp $(pkg-config --cflags --libs qpu)"
_RECEIVE = "cat > /tmp/program && chmod +x /tmp/program && /tmp/program"
_FIRST = 100


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of one change from the saved source: until compiled (and deployed), booted, and seen in a result."""

    made: float
    booted: float = 0.0
    ran: float
    imports: float = 0.0
    """Part of ``ran``: the imports on the device."""

    @property
    def total(self) -> float:
        """From the saved source to the result."""
        return self.made + self.booted + self.ran


class Subject(Protocol):
    """What holds the kernel."""

    name: str

    def make(self, number: int) -> float:
        """Save a kernel that adds ``number`` and bring it to where the device finds it; the seconds without saving."""

    def run(self, entry: access.SshAccess) -> str:
        """What a new process on the device prints."""


def measure(workspace: Workspace) -> Result:
    """Change the kernel and see its result, in a program and (with torch) in the extension.

    Raises RootNeeded, CommandFailed (another result than the changed kernel's), and what building, deploying and
    booting raise.
    """
    process.require_root("to serve and change a tree of all owners", "./inv bench --name=device")
    workspace.ensure_built()
    with progress.step("export what is booted, make the workbench (not timed)"):
        workspace.task("export-nfsroot")
        workspace.task("shell", "--command=true", f"--folder={workspace.folder}")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(files.scratch_folder(workspace.folder, "program"))
        figures = _figures(workspace, Program(workspace, scratch))
        notes = ["every result was computed by the kernel changed last: its number was in it"]
        if workspace.manifests()["torch"].facts["version"]:
            checkout = stack.enter_context(copied_checkout(workspace.folder))
            extension = Extension(workspace, checkout)
            with progress.step("deploy unchanged sources (not timed)"):
                workspace.task("deploy", cwd=checkout)
            figures += _figures(workspace, extension)
        else:
            notes.append("WITHOUT torch: no wheel was at hand, so there is no extension to change")
    return Result(
        name="device",
        title="Changed kernel to device result",
        rule=RULE,
        figures=tuple(figures),
        notes=tuple(notes),
    )


def _figures(workspace: Workspace, subject: Subject) -> list[Figure]:
    """Every round with one subject: on a device that is off, then while it is up."""
    rounds = Rounds(workspace, subject)
    with contextlib.ExitStack() as device:
        with progress.step(f"{subject.name}: {OFF}"):
            off, entry = rounds.with_boot(device)
        up, loaded = [], []
        for _ in range(workspace.times):
            with progress.step(f"{subject.name}: {UP}"):
                up.append(rounds.on(entry))
        if isinstance(subject, Extension):
            preloaded = subject.preloaded()
            with progress.step("load torch on the device (not timed)"):
                preloaded.load(entry)
            again = Rounds(workspace, preloaded, first=rounds.number)
            for _ in range(workspace.times):
                with progress.step(f"{subject.name}: {UP_LOADED}"):
                    loaded.append(again.on(entry))
    parts = f"made {off.made:.1f} s, booted {off.booted:.1f} s, ran {off.ran:.1f} s"
    found = [
        Figure(name=f"{subject.name}: {OFF}", value=off.total, goal=Goal(60), note=parts + _imports_of(off)),
        _up(f"{subject.name}: {UP}", up),
    ]
    return [*found, _up(f"{subject.name}: {UP_LOADED}", loaded)] if loaded else found


def _up(name: str, rounds: list[Round]) -> Figure:
    middle = sorted(rounds, key=lambda item: item.total)[len(rounds) // 2]
    parts = f"made {middle.made:.1f} s, ran {middle.ran:.1f} s"
    return median_of(name, [item.total for item in rounds], goal=Goal(15), note=parts + _imports_of(middle))


def _imports_of(found: Round) -> str:
    return f" (imports {found.imports:.1f} s)" if found.imports else ""


def changed(source: str, pattern: re.Pattern[str], text: str) -> str:
    """A source with ``text`` between the groups of a pattern. Raises CommandFailed unless that is found once."""
    made, count = pattern.subn(rf"\g<1>{text}\g<2>", source)
    if count != 1:
        raise CommandFailed(
            "the kernel to change is not as this benchmark knows it",
            expected=f"one place that matches {pattern.pattern}",
            found=f"{count}",
            fix="adapt the pattern in benchmarks/device.py",
        )
    return made


def changed_program(source: str, number: int) -> str:
    """The program with a kernel that adds ``number``."""
    return changed(source, _OF_PROGRAM, f"{number}.0")


def changed_kernel(source: str, number: int) -> str:
    """The extension's kernels with a product kernel that adds ``number``."""
    return changed(source, _OF_EXTENSION, f" + {number}.0f")


class Program:
    """A user's own C++ program, compiled in the workbench and sent over SSH."""

    name = "kernel in a C++ program"

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self._workspace, self._folder = workspace, folder
        self._source = PROGRAM.read_text()

    def make(self, number: int) -> float:
        """Compile it in ``./inv shell``."""
        (self._folder / "program.cpp").write_text(changed_program(self._source, number))
        files.remove(self._folder / "program")
        return self._workspace.task("shell", f"--command={_COMPILE}", f"--folder={self._folder}").seconds

    def run(self, entry: access.SshAccess) -> str:
        """Send it and run it."""
        program = (self._folder / "program").read_bytes()
        log = self._workspace.results / "logs" / "device.log"
        return process.run(entry.command(["sh", "-c", _RECEIVE]), stdin=program, log=log, merge_stderr=False).output


class Extension:
    """The QPU extension: its product kernel, in a copy of the checkout, deployed from there."""

    name = "kernel in the torch extension"

    def __init__(self, workspace: Workspace, checkout: Path, python: Sequence[str] = ("python3",)) -> None:
        self._workspace, self._checkout, self._python = workspace, checkout, python
        self._source = (checkout / KERNELS).read_text()

    def preloaded(self) -> Extension:
        """The same, by a Python that is forked from one that has torch."""
        return Extension(self._workspace, self._checkout, _PRELOADED)

    def load(self, entry: access.SshAccess) -> None:
        """Let it have torch."""
        process.run(entry.command([*self._python, "-c", "import torch"]), log=self._log)

    @property
    def _log(self) -> Path:
        return self._workspace.results / "logs" / "device.log"

    def make(self, number: int) -> float:
        """Rebuild it and put it into the tree: ``./inv deploy``."""
        (self._checkout / KERNELS).write_text(changed_kernel(self._source, number))
        return self._workspace.task("deploy", cwd=self._checkout).seconds

    def run(self, entry: access.SshAccess) -> str:
        """Start Python and multiply."""
        return process.run(entry.command([*self._python, "-c", _PYTHON]), log=self._log, merge_stderr=False).output


class Rounds:
    """Changes a subject's kernel, each time to another, and sees its result on the device."""

    def __init__(self, workspace: Workspace, subject: Subject, first: int = _FIRST) -> None:
        self._workspace, self._subject = workspace, subject
        self._layout = Layout.of(workspace.config)
        self.number = first

    def with_boot(self, device: contextlib.ExitStack) -> tuple[Round, access.SshAccess]:
        """One round with a device that is off; it stays up as long as ``device`` is open."""
        made = self._make()
        began = time.monotonic()
        entry = self._boot(device)
        booted = time.monotonic() - began
        ran, imports = self._ran(entry)
        return Round(made=made, booted=booted, ran=ran, imports=imports), entry

    def on(self, entry: access.SshAccess) -> Round:
        """One round with a device that is up, in a new process."""
        made = self._make()
        ran, imports = self._ran(entry)
        return Round(made=made, ran=ran, imports=imports)

    def _make(self) -> float:
        self.number += 1
        return self._subject.make(self.number)

    def _boot(self, device: contextlib.ExitStack) -> access.SshAccess:
        config, logs = self._workspace.config, self._workspace.results / "logs"
        tree = self._layout.tree
        device.enter_context(private_network())
        server = device.enter_context(serve.running_server(tree, log=logs / "nfs-server.log"))
        spec = qemu.MachineSpec(
            boot=qemu.boot_files(tree, config.image.architecture),
            nfs_path=str(tree),
            nfs_port=server.port,
            architecture=config.image.architecture,
            memory_mib=config.device.memory_mib,
            cpus=config.device.cpus,
        )
        limit_s = config.device.boot_timeout_s
        machine = device.enter_context(qemu.running_machine(spec, logs / "console.log", boot_timeout_s=limit_s))
        known = access.pin(self._layout.known_hosts, logs / "known_hosts")
        return access.SshAccess(host="127.0.0.1", port=machine.ssh_port, key=self._layout.client_key, known_hosts=known)

    def _ran(self, entry: access.SshAccess) -> tuple[float, float]:
        """Seconds until the result is here, and of the imports. Raises CommandFailed for another kernel's result."""
        began = time.monotonic()
        output = self._subject.run(entry)
        seconds = time.monotonic() - began
        return seconds, imports_in(output, _OPERANDS + self.number)


def imports_in(output: str, wanted: float) -> float:
    """Seconds of imports that a program told beside the ``wanted`` result. Raises CommandFailed for another one."""
    match = _RESULT.search(output)
    if match is None or match["result"] != str(wanted):
        raise CommandFailed(
            "the device did not compute with the changed kernel",
            expected=str(wanted),
            found=match["result"] if match else "no result",
            tail=output,
        )
    return float(match["imports"] or 0.0)


@contextlib.contextmanager
def copied_checkout(parent: Path) -> Iterator[Path]:
    """A copy of the checkout's files, under version control or about to be."""
    listed = process.output_of(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    with files.scratch_folder(parent, "checkout") as copy:
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        yield copy
