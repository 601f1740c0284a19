"""Measure the time from a kernel change to its result, first with the QEMU device off and then with it running.

The benchmark measures a kernel in the user's C++ program and a kernel in torch's QPU extension. The program is compiled
in ``./inv shell`` and sent to the device. ``./inv deploy`` rebuilds the extension and installs it in the device's root
filesystem. Each round changes the number that the kernel adds. The measurement ends when the device returns a result
that contains the new number.
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
from recipes.git import git
from toolchain import files, process, progress
from toolchain.config import ROOT
from toolchain.errors import CommandFailed

OFF = "device off"
UP = "device up"
UP_LOADED = "device up, by pitorch.preloaded"

RULE = (
    "MODEL: the device is QEMU's virtual machine with the lean init, booted over NFS; not measured on hardware. The "
    "image is built and exported in advance. The time is measured from saving a changed kernel to its result. Device "
    "off: one run, including the boot. Device up: the median; the run with the device off is the warm-up. Each run "
    "starts Python, except with ``python3 -m pitorch.preloaded``, which forks a process that has imported torch."
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
    """The duration of each step of one round, in seconds: compile (and deploy), boot, and obtain the result."""

    made: float
    booted: float = 0.0
    ran: float
    imports: float = 0.0
    """The part of ``ran`` during which the device imports modules."""

    @property
    def total(self) -> float:
        """The time between saving the source and receiving the result, in seconds."""
        return self.made + self.booted + self.ran


class Subject(Protocol):
    """A program or extension that contains the kernel."""

    name: str

    def make(self, number: int) -> float:
        """Save a kernel that adds ``number``, and compile or deploy it. Returns the duration in seconds."""

    def run(self, entry: access.SshAccess) -> str:
        """Run the kernel in a new process on the device and return its output."""


def measure(workspace: Workspace) -> Result:
    """Measure the time from a saved change to its result, for a program and, if the image has torch, the extension.

    Raises PlatformMismatch if no virtual machine has the target's architecture, CommandFailed (if the result does not
    come from the changed kernel), and any error from the build, the deployment or the boot.
    """
    workspace.require_target("device", "armhf", "arm64")
    workspace.ensure_built()
    with progress.step("export the tree and build the development image (not timed)"):
        workspace.task("export-nfsroot")
        workspace.task("shell", "--command=true", f"--folder={workspace.folder}")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(files.scratch_folder(workspace.folder, "program"))
        has_torch = bool(workspace.manifests()["torch"].facts["version"])
        # The copy is created first, so that an error does not discard measurements.
        checkout = stack.enter_context(copied_checkout(workspace.folder)) if has_torch else None
        figures = _figures(workspace, Program(workspace, scratch))
        notes = ["every result contains the number from the last kernel change"]
        if checkout:
            extension = Extension(workspace, checkout)
            with progress.step("deploy unchanged sources (not timed)"):
                workspace.task("deploy", cwd=checkout)
            figures += _figures(workspace, extension)
        else:
            notes.append("WITHOUT torch: there is no wheel, so there is no extension to change")
    return Result(
        name="device",
        title="Time from a changed kernel to its result on the device",
        rule=RULE,
        figures=tuple(figures),
        notes=tuple(notes),
    )


def _figures(workspace: Workspace, subject: Subject) -> list[Figure]:
    """Measure the time of each round for one subject: first with the device off, then with the device running."""
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
    """Replace the text between the pattern's two groups. Raises CommandFailed unless there is exactly one match."""
    made, count = pattern.subn(rf"\g<1>{text}\g<2>", source)
    if count != 1:
        raise CommandFailed(
            "the kernel's source does not match this benchmark's pattern",
            expected=f"exactly one match of the pattern {pattern.pattern}",
            found=f"{count} matches",
            fix="adapt the pattern in benchmarks/device.py to the kernel's source",
        )
    return made


def changed_program(source: str, number: int) -> str:
    """Return the program's source with a kernel that adds ``number``."""
    return changed(source, _OF_PROGRAM, f"{number}.0")


def changed_kernel(source: str, number: int) -> str:
    """Return the source of the extension's kernels, with an element-wise product that also adds ``number``."""
    return changed(source, _OF_EXTENSION, f" + {number}.0f")


class Program:
    """A user's C++ program, compiled in the development image and sent over SSH."""

    name = "kernel in a C++ program"

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self._workspace, self._folder = workspace, folder
        self._source = PROGRAM.read_text()

    def make(self, number: int) -> float:
        """Compile the program in ``./inv shell``."""
        (self._folder / "program.cpp").write_text(changed_program(self._source, number))
        files.remove(self._folder / "program")
        return self._workspace.task("shell", f"--command={_COMPILE}", f"--folder={self._folder}").seconds

    def run(self, entry: access.SshAccess) -> str:
        """Send the program to the device and run it."""
        program = (self._folder / "program").read_bytes()
        log = self._workspace.results / "logs" / "device.log"
        return process.run(entry.command(["sh", "-c", _RECEIVE]), stdin=program, log=log, merge_stderr=False).output


class Extension:
    """The extension's kernel for the element-wise product, deployed from a copy of the checkout."""

    name = "kernel in the torch extension"

    def __init__(self, workspace: Workspace, checkout: Path, python: Sequence[str] = ("python3",)) -> None:
        self._workspace, self._checkout, self._python = workspace, checkout, python
        self._source = (checkout / KERNELS).read_text()

    def preloaded(self) -> Extension:
        """Return a variant of this subject whose Python process is forked from a process that has imported torch."""
        return Extension(self._workspace, self._checkout, _PRELOADED)

    def load(self, entry: access.SshAccess) -> None:
        """Import torch once."""
        process.run(entry.command([*self._python, "-c", "import torch"]), log=self._log)

    @property
    def _log(self) -> Path:
        return self._workspace.results / "logs" / "device.log"

    def make(self, number: int) -> float:
        """Rebuild the extension and install it in the device's root filesystem with ``./inv deploy``."""
        (self._checkout / KERNELS).write_text(changed_kernel(self._source, number))
        return self._workspace.task("deploy", cwd=self._checkout).seconds

    def run(self, entry: access.SshAccess) -> str:
        """Start Python and run the product kernel."""
        return process.run(entry.command([*self._python, "-c", _PYTHON]), log=self._log, merge_stderr=False).output


class Rounds:
    """Measures the rounds of one subject. Each round changes the kernel and obtains its result from the device."""

    def __init__(self, workspace: Workspace, subject: Subject, first: int = _FIRST) -> None:
        self._workspace, self._subject = workspace, subject
        self._layout = Layout.of(workspace.config)
        self.number = first

    def with_boot(self, device: contextlib.ExitStack) -> tuple[Round, access.SshAccess]:
        """Measure the time of a round that starts with the device off.

        The device then runs until ``device`` is closed.
        """
        made = self._make()
        began = time.monotonic()
        entry = self._boot(device)
        booted = time.monotonic() - began
        ran, imports = self._ran(entry)
        return Round(made=made, booted=booted, ran=ran, imports=imports), entry

    def on(self, entry: access.SshAccess) -> Round:
        """Measure the time of a round on a running device. The kernel runs in a new process."""
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
            cpu=config.device.cpu,
            memory_mib=config.device.memory_mib,
            cpus=config.device.cpus,
        )
        limit_s = config.device.boot_timeout_s
        machine = device.enter_context(qemu.running_machine(spec, logs / "console.log", boot_timeout_s=limit_s))
        known = access.pin(self._layout.known_hosts, logs / "known_hosts")
        return access.SshAccess(host="127.0.0.1", port=machine.ssh_port, key=self._layout.client_key, known_hosts=known)

    def _ran(self, entry: access.SshAccess) -> tuple[float, float]:
        """Run the kernel. Return the time until the result and the import time, both in seconds.

        Raises CommandFailed for a wrong result.
        """
        began = time.monotonic()
        output = self._subject.run(entry)
        seconds = time.monotonic() - began
        return seconds, imports_in(output, _OPERANDS + self.number)


def imports_in(output: str, wanted: float) -> float:
    """Return the import time from a program's output. Raises CommandFailed if the result is not ``wanted``."""
    match = _RESULT.search(output)
    if match is None or match["result"] != str(wanted):
        raise CommandFailed(
            "the device did not run the changed kernel",
            expected=str(wanted),
            found=match["result"] if match else "no result",
            tail=output,
        )
    return float(match["imports"] or 0.0)


@contextlib.contextmanager
def copied_checkout(parent: Path) -> Iterator[Path]:
    """Copy the checkout's files, except those that ``.gitignore`` names. Raises CommandFailed."""
    with files.scratch_folder(parent, "checkout") as copy, files.scratch_folder(parent, "git") as empty:
        # The checkout may be a source archive, or belong to another user, so git uses a new, empty repository.
        git(empty, "init", "--quiet", "--bare")
        words = (f"--git-dir={empty}", f"--work-tree={ROOT}", "ls-files", "-z", "--others", "--exclude-standard")
        for name in git(ROOT, *words).split("\0"):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        yield copy
