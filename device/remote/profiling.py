"""``profile-remote``: compile a kernel for a board, run it there, check its result and time it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from device.remote import comparing, compiling, faults, loader_session, opencl, qpu_kernel, reporting, targets
from device.remote import environment as environments
from device.remote.address import FORM_OF, LOADER_KINDS, PLACE_FORM, RPC_KINDS, Address, parse, resolve
from device.remote.loader_session import LoaderSession, Timing
from device.remote.targets import Target
from toolchain import files, process, progress
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.errors import CommandFailed, ResultMismatch, UserError

KERNELS = Path(__file__).with_name("kernels")
_T = TypeVar("_T")
# The target qpu does not use qemu-user (the address "emulator"), because libqpu's emulator runs natively. The target
# opencl does not use qemu-user, because the emulated board has no OpenCL.
_LIMITED = {"qpu": ("local", "tree", "ssh"), "opencl": ("local", "tree", "ssh", "adb")}
_WORKER_LIMIT_S = 86400.0
"""The time limit for a worker's entire run. Each stage also has a separate limit."""
_MOST = 10**12


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measurement.

    ``seconds`` contains the mean time per run for each repeat. ``model_s`` is the time per run that the emulator
    estimates.
    """

    kernel: str
    size: int
    shape: str
    operations: int
    target: str
    device: str
    backend: str
    seconds: tuple[float, ...]
    checked: int
    timing: Timing
    model_s: float | None = None
    board: str = ""
    """The board's model from its device tree; empty if there is none."""
    foreign: bool = False
    """Whether the kernel is for a machine other than this PC."""
    emulated: bool = False
    """Whether the board or its QPUs were emulated."""
    devices: tuple[str, ...] = ()
    """The board's OpenCL devices."""
    build: str = ""
    """How the board obtained the binary of an OpenCL kernel."""

    @property
    def mean_s(self) -> float:
        """The mean time per run over all repeats."""
        return statistics.fmean(self.seconds)

    @property
    def deviation_s(self) -> float:
        """The sample standard deviation of the repeats; 0 if there is only one repeat."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0

    @property
    def gflops(self) -> float | None:
        """Operations divided by the mean time, in GFLOPS; None if the kernel's file does not define ``operations``."""
        return self.operations / self.mean_s / 1e9 if self.operations and self.mean_s > 0 else None

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the table of results."""
        found = [
            ("kernel", f"{self.kernel} ({self.shape})"),
            ("target", self.target),
            ("device", self.device),
            ("runs on", self.backend),
            ("result", f"{self.checked} elements agree with the reference"),
            ("mean", seconds_text(self.mean_s)),
            ("std", f"{seconds_text(self.deviation_s)} ({len(self.seconds)} repeats)"),
            ("minimum", seconds_text(min(self.seconds))),
            (
                "GFLOPS",
                _rate(self.gflops) if self.gflops is not None else "the kernel does not define its operations",
            ),
        ]
        if self.board:
            found.insert(3, ("board", self.board))
        if self.build:
            found.append(("build", self.build))
        if len(self.devices) > 1:
            found.append(("devices", "\n".join(self.devices)))
        if note := note_of(emulated=self.emulated, foreign=self.foreign, board=self.board):
            found.append(("note", note))
        if self.model_s is not None:
            rate = f", {_rate(self.operations / self.model_s / 1e9)} GFLOPS" if self.operations and self.model_s else ""
            found.append(
                ("model", f"{seconds_text(self.model_s)} per run{rate}: estimate of the emulator's cycle model")
            )
        return found

    def print(self) -> None:
        """Print the table to stdout."""
        progress.make_console().print(table_of_results(f"{self.kernel} on {self.device}", self.rows()))

    def as_json(self) -> str:
        """The measurement as JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "timing"}
        derived = {"mean_s": self.mean_s, "std_s": self.deviation_s, "gflops": self.gflops}
        return json.dumps({**facts, **vars(self.timing), **derived}, indent=2) + "\n"


def profile(
    config: Config,
    *,
    kernel: str,
    target: str,
    device: str = "",
    size: int = 0,
    keep: Path | None = None,
    timing: Timing = Timing(number=10, repeat=5, min_repeat_ms=20, warm_up=2),  # noqa: B008 - frozen
) -> Profile:
    """Compile ``kernel`` (a name, or a file) for ``target``, then run, check and time it on ``device``.

    If the kernel's result is correct, the library is copied to ``keep``.

    Raises UserError, ResultMismatch, InUse, BoardLost, BoardSilent, PlatformMismatch, and any error raised while
    installing TVM or compiling.
    """
    wanted = targets.load(target)
    path = kernel_file(kernel)
    address = device_of(config, wanted, device)
    require_sane(timing, size)
    with files.scratch_folder(config.build_root / "remote", "run") as scratch:
        job = _Job(config, wanted, address, path, size, timing, scratch)
        if wanted.name == "opencl":
            if keep is not None:
                raise _nothing_to_keep(path)
            return job.by_opencl()
        if wanted.name == "qpu":
            done = job.by_loader(job.qpu_library())
        elif address.kind == "local" and wanted.name != "local":
            raise wrong_device(wanted, address)
        elif address.kind in RPC_KINDS:
            done = job.by_rpc()
        else:
            done = job.by_loader(job.tvm_library())
        if keep is not None:
            with files.replacing(keep) as staged:
                shutil.copyfile(job.library, staged)
    return done


def kernel_file(name: str) -> Path:
    """The file of a kernel: one of the project's kernels, or the user's own Python file. Raises UserError."""
    known = sorted(path.stem for path in KERNELS.glob("*.py") if path.stem != "__init__")
    if name in known:
        return KERNELS / f"{name}.py"
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        return path.resolve()
    raise UserError(
        f"there is no kernel {name!r}",
        expected=f"{', '.join(known)}, or a Python file",
        found="no such file" if path.suffix == ".py" else repr(name),
        fix="choose one of these kernels, or write your own file (docs/remote.md describes its contents)",
    )


def require_sane(timing: Timing, size: int) -> None:
    """Raise UserError for options that make a measurement impossible."""
    low = {"number": 1, "repeat": 1, "min_repeat_ms": 0, "warm_up": 0}
    for name, least in low.items():
        if not least <= getattr(timing, name) <= _MOST:
            raise UserError(
                "nothing can be measured with these options",
                expected=f"--{name.replace('_', '-')} with a value of {least} to {_MOST}",
                found=str(getattr(timing, name)),
            )
    if size < 0:
        raise UserError(
            "the size is negative",
            expected="--size with a value of 1 or more, or 0 for the kernel's own size",
            found=str(size),
        )


def device_of(config: Config, target: Target, name: str) -> Address:
    """The board's address: ``name`` or, if ``name`` is empty, the target's default. Raises UserError."""
    if not name and target.transport == "loader" and config.device.host:
        return parse(f"tree://{config.device.host}")
    if not name and not target.default_device:
        raise UserError(
            f"no board selected, and {target.title} has no default board",
            expected="--device with a name from remote.devices, or an address",
            found="no --device",
            fix="pass, for example, --device tree://root@HOST for a board that booted the exported tree, or --device "
            "HOST:9090 for TVM's server; see docs/remote.md for how to set up a board",
        )
    address = resolve(name or target.default_device, config.remote.devices)
    if address.kind not in _LIMITED.get(target.name, FORM_OF):
        raise wrong_device(target, address)
    return address


def wrong_device(target: Target, address: Address) -> UserError:
    """The error to raise if the board cannot run the target's code."""
    others = [kind for kind in FORM_OF if kind != "local" and (target.transport == "rpc" or kind in LOADER_KINDS)]
    forms = [FORM_OF[kind] for kind in _LIMITED.get(target.name, others)]
    return UserError(
        f"code for {target.title} cannot run on {address}",
        expected=f"{', '.join(forms)} or {PLACE_FORM}",
        found=str(address),
        fix="choose another --device or --target (docs/remote.md describes both)",
    )


def _nothing_to_keep(path: Path) -> UserError:
    return UserError(
        "an OpenCL kernel has no compiled library to keep",
        expected="--target opencl without --keep",
        found="--keep",
        fix=f"omit --keep; programs on the board compile {path.with_suffix('.cl').name} with clBuildProgram instead",
    )


@dataclass
class _Job:
    """One run of ``profile-remote`` with a kernel."""

    config: Config
    target: Target
    address: Address
    path: Path
    size: int
    timing: Timing
    scratch: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def library(self) -> Path:
        return self.scratch / f"{self.path.stem}.so"

    # TVM's RPC

    def by_rpc(self) -> Profile:
        self._work(self.address)
        facts = self.facts
        return self._profile(backend="CPU", seconds=facts["seconds"], checked=facts["checked"], board=facts["model"])

    def tvm_library(self) -> tuple[Path, str, list[Path]]:
        """Compile the kernel with TVM.

        Returns the library, the name of its function, and an empty list of folders (the kernel needs no libraries).
        """
        self._work(None)
        return self.library, self.facts["entry"], []

    def _work(self, address: Address | None) -> None:
        environment = environments.ready(self.config)
        common = request_of(self.config, self.target, address, self.library, self.timing, "kernels")
        self.facts = run_worker(
            self.config, self.target, address, "device.remote.rpc_worker",
            {"kernel": str(self.path), "size": self.size, **common},
            environment=environment, scratch=self.scratch, name=self.path.stem,
        )  # fmt: skip

    # The loader

    def qpu_library(self) -> tuple[Path, str, list[Path]]:
        """Compile a C++ kernel with libqpu."""
        folders = qpu_kernel.build(self.config, self.target, self.address, self.path, self.library)
        return self.library, "-", folders

    def by_loader(self, compiled: tuple[Path, str, list[Path]]) -> Profile:
        """Send the library to the loader on the board, then run, check and time the kernel."""
        library, entry, folders = compiled
        if self.address.kind != "adb":
            return self._on_board(self._arrays(), lambda board: board.load(library, entry), folders)
        loader = self.scratch / "loader"
        with progress.step("link the loader with the kernel"):
            loader_session.build_static_loader(self.config, self.target, library.with_suffix(".o"), entry, loader)
        return self._on_board(self._arrays(), lambda board: board.load(None, entry), [], loader)

    def by_opencl(self) -> Profile:
        """Send the source to the loader on the board, then run, check and time the kernel.

        The board's OpenCL driver compiles the source.
        """
        kernel = self._arrays()
        program = self._opencl_program(kernel)
        measured: dict[str, Any] = {}

        def build(board: LoaderSession) -> str:
            devices = board.devices()
            number = opencl.choose(devices)
            seconds, kept = board.build(number, devices[number], program)
            state = "binary of an earlier session, loaded" if kept else "compiled on the board"
            measured.update(devices=tuple(map(str, devices)), build=f"{state} in {seconds_text(seconds)}")
            return str(devices[number])

        return dataclasses.replace(self._on_board(kernel, build, []), **measured)

    def _opencl_program(self, kernel: compiling.Kernel) -> opencl.Program:
        """The user's OpenCL file or, if there is none, the source that TVM generates."""
        if self.path.with_suffix(".cl").is_file() or not hasattr(kernel.source, "opencl_module"):
            return self._guarded(lambda: opencl.program(self.path, kernel))
        made = run_worker(
            self.config, self.target, None, "device.remote.opencl_worker",
            {"kernel": str(self.path), "size": self.size},
            environment=environments.ready(self.config), scratch=self.scratch, name=self.path.stem,
        )  # fmt: skip
        return opencl.Program(
            kernel=made["function"],
            options="",
            source=made["source"],
            work_items=tuple(made["work_items"]),
            group=tuple(made["group"]),
        )

    def _on_board(
        self,
        kernel: compiling.Kernel,
        load: Callable[[LoaderSession], str],
        folders: list[Path],
        loader: Path | None = None,
    ) -> Profile:
        """Run, check and time a kernel.

        ``load`` loads the kernel on the board and returns the name of the backend that runs it.
        """
        target = qpu_kernel.on_this_pc(self.target) if self.address.kind == "local" else self.target
        with loader_session.session(self.config, target, self.address, libraries=folders, loader=loader) as board:
            progress.say(f"    {self.address} is ready")
            backend = load(board)
            numbers = [board.array(item) for item in (*kernel.arrays, comparing.blank(kernel.expected))]
            model = board.run(numbers)
            found = board.read(numbers[-1], kernel.expected)
            wrong = comparing.first_mismatch([found], [kernel.expected], [kernel.tolerance])
            if wrong is not None:
                raise mismatch("kernel", self.path.stem, str(self.address), wrong)
            _, seconds = board.time(self.timing, numbers)
        facts = {"size": kernel.size, "shape": kernel.shape, "operations": kernel.operations}
        self.facts |= {**facts, "kernel": kernel.name}
        # The names of libqpu's hardware backends start with vc4-. The other backends compute on the CPU.
        foreign = self.target.architecture != host_architecture()
        emulated = (self.address.kind == "emulator" and foreign) or (
            self.target.name == "qpu" and " vc4-" not in backend
        )
        return self._profile(
            backend=backend,
            seconds=seconds,
            checked=kernel.expected.size,
            model_s=model,
            board=board.model,
            emulated=emulated,
        )

    def _arrays(self) -> compiling.Kernel:
        return self._guarded(lambda: compiling.load(self.path, self.size, target=self.target.name))

    @staticmethod
    def _guarded(action: Callable[[], _T]) -> _T:
        try:
            return action()
        except reporting.Fault as fault:
            raise faults.error_of("kernel", fault.found) from fault

    def _profile(self, **measured: Any) -> Profile:
        return Profile(
            kernel=self.facts["kernel"],
            size=self.facts["size"],
            shape=self.facts["shape"],
            operations=self.facts["operations"],
            target=f"{self.target.name} ({self.target.title})",
            device=str(self.address),
            foreign="local" not in (self.target.name, self.address.kind),
            timing=self.timing,
            **{**measured, "seconds": tuple(measured["seconds"])},
        )


def request_of(
    config: Config, target: Target, address: Address | None, library: Path, timing: Timing, linked: str
) -> dict[str, Any]:
    """The fields that are common to requests for kernels and models. Raises ProgramMissing if there is no linker."""
    linker = process.require_program(target.linker(config.remote.linker), f"to link {linked} for {target.title}")
    return {
        "target": dict(target.tvm),
        "linker": str(linker),
        "library": str(library),
        "address": vars(address) if address is not None else None,
        **vars(timing),
        "queue_limit_s": config.remote.queue_limit_s,
        "session_limit_s": config.remote.session_limit_s,
    }


def run_worker(
    config: Config,
    target: Target,
    address: Address | None,
    module: str,
    request: Mapping[str, Any],
    *,
    environment: environments.TvmEnvironment,
    scratch: Path,
    name: str,
) -> dict[str, Any]:
    """Run a worker with ``request`` and return its results.

    ``name`` identifies the kernel or model in error messages.
    """
    run = _WorkerRun()
    done = process.run(
        environment.command("-m", module),
        env={**environment.variables, "TMPDIR": str(scratch)},
        stdin=json.dumps(request).encode(),
        on_line=run.handle_line,
        limit_s=_WORKER_LIMIT_S,
        log=config.build_root / "remote" / "worker.log",
        check=False,
    )
    if done.returncode != 0:
        compiled = "model" if module.endswith("model_worker") else "kernel"
        raise _error_of_worker(run, done, config, target, name, address, compiled)
    return run.facts


class _WorkerRun:
    """The messages received from the worker so far."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.stage = "start"
        self.limit_s = 0.0

    def handle_line(self, line: str) -> None:
        found = reporting.parse(line)
        if found is None:
            return
        if "stage" in found:
            self.stage, self.limit_s = found["stage"], found["limit_s"]
        elif "board" in found:
            progress.say(f"    {found['board']} is ready")
        elif "text" in found:
            progress.say(found["text"])
        elif found.get("free") == 0:
            progress.say(
                f"    waiting for a free board: {found['waiting']} other clients wait for {found['boards']} boards"
            )
        self.facts |= found


def _error_of_worker(
    run: _WorkerRun,
    done: process.Completed,
    config: Config,
    target: Target,
    name: str,
    address: Address | None,
    compiled: str,
) -> UserError:
    """The error that explains why a worker failed. ``compiled`` is "kernel" or "model"."""
    where = str(address)
    remote = config.remote
    words = {
        "where": where,
        "target": target.title,
        "gnu": target.architecture.gnu,
        "limit_s": remote.session_limit_s,
    }
    if done.returncode == reporting.FAULT_STATUS and "fault" in run.facts:
        facts = run.facts
        if facts["fault"] == "mismatch":
            return mismatch(compiled, name, where, facts)
        return faults.error_of(facts["fault"], facts["found"], **words)
    if done.returncode == -signal.SIGALRM:  # a stage exceeded its time limit
        if run.stage == "compile":
            return faults.error_of(compiled, f"still compiling after {run.limit_s:g} s")
        if run.stage == "queue":
            return faults.error_of("busy", _queue(where, run.facts), where=where, limit_s=remote.queue_limit_s)
        if run.stage in ("connect", "reach"):
            return faults.error_of("silent", f"no response within {run.limit_s:g} s", **words)
        return faults.error_of("lost", f"no response for {run.limit_s:g} s during the stage {run.stage!r}", **words)
    if done.returncode < 0 and run.stage in ("run", "time", "load"):
        return faults.error_of("crashed", process.explain_exit(done.returncode), **words)
    return CommandFailed(
        "the TVM worker failed",
        returncode=done.returncode,
        expected="exit status 0, or an error reported by the worker",
        found=f"{process.explain_exit(done.returncode)}, during the stage {run.stage!r}",
        tail="\n".join(line for line in done.output.splitlines()[-15:] if reporting.MARK not in line),
    )


def _queue(where: str, facts: Mapping[str, Any]) -> str:
    """A text that explains why no board became free in time."""
    if where.startswith("tracker"):
        gone = ", or disconnected (a proxy does not inform its tracker)" if facts["proxied"] else ""
        waiting = f"{facts['waiting']} other clients are waiting"
        return f"all {facts['boards']} boards with that key are in sessions{gone}; {waiting}"
    if where.startswith("proxy"):
        return "the board is in another session, or no board with that key is connected to the proxy"
    return "the board accepts the connection but does not respond: it is in another session, or its server has exited"


def mismatch(compiled: str, name: str, where: str, facts: Mapping[str, Any]) -> ResultMismatch:
    """The error for a wrong result. ``compiled`` is "kernel" or "model".

    ``facts`` describes the first element that differs, as ``comparing.first_mismatch`` returns it.
    """
    index = ", ".join(map(str, facts["index"]))
    result = f"output {facts['output']}" if facts["outputs"] > 1 else "the result"
    relative, absolute = facts["tolerance"]
    fix = "compare parts of the model to find the operator; docs/remote.md explains the tolerance"
    return ResultMismatch(
        f"{result} of {name} on {where} differs from the expected result, first at index [{index}]",
        expected=f"{facts['expected']!r}, with a tolerance of {relative:g} (relative) or {absolute:g} (absolute)",
        found=f"{facts['value']!r}; {facts['count']} of {facts['total']} elements differ",
        fix=fix if compiled == "model" else "correct the kernel, or define its TOLERANCE",
    )


def table(title: str, *, show_header: bool = True) -> Table:
    """An empty table with a title."""
    return Table(title=title, title_justify="left", title_style="bold", show_header=show_header)


def table_of_results(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """A table whose rows each contain a name and a value."""
    made = table(title, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def note_of(*, emulated: bool, foreign: bool, board: str) -> str:
    """A note if the time was, or may have been, measured under emulation; otherwise an empty string."""
    if emulated:
        return "timed under emulation; not measured on hardware"
    if foreign and not board.startswith("Raspberry Pi"):
        return "not identified as a Raspberry Pi, possibly emulated; not measured on hardware"
    return ""


def seconds_text(value: float) -> str:
    """A time as text, with four significant digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


def _rate(gflops: float) -> str:
    """A number as text, with four significant digits and without an exponent.

    Numbers of 1000 or more are rounded to integers.
    """
    return f"{gflops:,.0f}" if gflops >= 1000 else f"{gflops:.4g}"
