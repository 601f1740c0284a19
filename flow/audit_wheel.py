"""``audit-wheel``: check whether a CPU supports a wheel's instructions, and run the wheel on an emulated CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.connect import connect, image_id
from engine.containers import run_in
from engine.start import ensure_running
from flow import extracted_tools
from images.flavour import load_suite
from toolchain import files, progress
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.errors import ChecksFailed, PlatformMismatch, SourceUnavailable, WheelUnusable
from wheels import cpu_gate, download
from wheels import find as wheels
from wheels.cpu_gate import CHECKED, UNCHECKED, UNPROVEN, Cpu, Static
from wheels.instructions import Disassembler
from wheels.request import Wanted

PASS, FAIL, INCOMPLETE = "pass", "FAIL", "incomplete"
_ILLEGAL = 4
_SCRIPT = Path(__file__).parent / "cpu_probe.py"
_INSIDE = "/mnt"
_LIMIT_S = 1800.0
_LONGEST_NAME = 100
_SHOWN = 10
_COLOURS = {PASS: "green", FAIL: "bold red", INCOMPLETE: "yellow"}


@dataclass(frozen=True)
class Step:
    """A probe step's outcome: the number of the signal that killed the step, and the error that the step raised."""

    step: str
    signal: int
    error: str

    @property
    def result(self) -> str:
        """The outcome as text."""
        if self.signal:
            return "illegal instruction" if self.signal == _ILLEGAL else f"killed by signal {self.signal}"
        return self.error or "ok"


@dataclass(frozen=True)
class Probed:
    """The result of the run on the emulated CPU. ``reason`` states why the wheel was not run."""

    steps: tuple[Step, ...] = ()
    reason: str = ""

    @property
    def verdict(self) -> str:
        """FAIL, INCOMPLETE or PASS.

        The verdict is FAIL if a step executed an illegal instruction, and INCOMPLETE if no step ran, or a step did not
        complete or failed for another reason.
        """
        if any(item.signal == _ILLEGAL for item in self.steps):
            return FAIL
        return PASS if self.steps and all(item.result == "ok" for item in self.steps) else INCOMPLETE


@dataclass(frozen=True)
class Audited:
    """The results of the static check and of the run on the emulated CPU."""

    wheel: str
    sha256: str
    cpu: Cpu
    static: Static
    probed: Probed
    functions: tuple[str, ...]
    """The first unchecked and unproven functions with their instructions, as text."""

    @property
    def verdict(self) -> str:
        """The verdict. A wheel with unchecked instructions fails even if the probe did not execute them."""
        return FAIL if self.static.count(UNCHECKED) else self.probed.verdict

    def as_json(self) -> str:
        """Return the results as JSON, for other programs."""
        document = {
            "schema": 1,
            "wheel": self.wheel,
            "sha256": self.sha256,
            "cpu": self.cpu.name,
            "architecture": self.cpu.architecture,
            "verdict": self.verdict.lower(),
            "static": {
                "files": self.static.files,
                **{state: self.static.count(state) for state in (CHECKED, UNCHECKED, UNPROVEN)},
                "functions": [asdict(item) for item in self.static.functions],
            },
            "probe": {
                "verdict": self.probed.verdict.lower(),
                "reason": self.probed.reason,
                "steps": [asdict(item) for item in self.probed.steps],
            },
        }
        return json.dumps(document, indent=2) + "\n"

    def print(self, console: Console | None = None) -> None:
        """Print the static check's results, the run's results and the verdict on stdout."""
        out = console or progress.make_console()
        out.print(Text(f"{self.wheel} on {self.cpu.name} ({self.cpu.boards})", style="bold"), soft_wrap=True)
        out.print(_static_table(self.static))
        for line in self.functions:
            out.print(Text(line), soft_wrap=True)
        out.print(_probe_table(self.probed, self.cpu))
        out.print(Text(f"verdict: {self.verdict}", style=_COLOURS[self.verdict]))

    def require_pass(self) -> None:
        """Raise WheelUnusable if the wheel fails, or ChecksFailed if the probe was not completed."""
        if self.verdict == FAIL:
            illegal = [item.step for item in self.probed.steps if item.signal == _ILLEGAL]
            found = (
                [f"{count} functions with unchecked instructions"] if (count := self.static.count(UNCHECKED)) else []
            )
            raise WheelUnusable(
                f"{self.wheel} does not run on {self.cpu.name}",
                expected=f"a CPU feature check before every instruction that {self.cpu.name} does not support",
                found="; ".join([*found, *(f"illegal instruction in: {step}" for step in illegal)]),
                fix="use another version, or build the wheel from source for this CPU",
            )
        if self.verdict == INCOMPLETE:
            failed = [f"{item.step}: {item.result}" for item in self.probed.steps if item.result != "ok"]
            raise ChecksFailed(
                f"the probe did not confirm that {self.wheel} runs on {self.cpu.name}",
                expected="every step of the probe to succeed",
                found=self.probed.reason or "; ".join(failed) or "no result",
                fix="correct the problem that the table above shows, and run the task again",
            )


def _static_table(static: Static) -> Table:
    table = Table(title="functions with instructions that the CPU lacks", title_justify="left", width=80)
    table.add_column("file", overflow="fold")
    for state in (CHECKED, UNCHECKED, UNPROVEN):
        table.add_column(state, justify="right", no_wrap=True)
    table.add_column("extensions, unless checked", overflow="fold")
    for file in dict.fromkeys(item.file for item in static.functions):
        here = [item for item in static.functions if item.file == file]
        seen = Counter(name for item in here if item.state != CHECKED for name in item.instructions)
        counts = Counter(item.state for item in here)
        states = [str(counts[state]) for state in (CHECKED, UNCHECKED, UNPROVEN)]
        table.add_row(Text(Path(file).name), *states, Text(", ".join(sorted(seen))))
    if not static.functions:
        table.add_row(f"none in {static.files} ELF files", "0", "0", "0", "")
    return table


def _probe_table(probed: Probed, cpu: Cpu) -> Table:
    table = Table(title=f"probe of the wheel on an emulated {cpu.name}", title_justify="left", width=80)
    table.add_column("step", overflow="fold")
    table.add_column("result", overflow="fold")
    for item in probed.steps:
        table.add_row(Text(item.step), Text(item.result, style="bold red" if item.signal else ""))
    if probed.reason:
        table.add_row("not run", Text(probed.reason, style="yellow"))
    return table


def audit(config: Config, text: str, *, folder: Path, cpu: str) -> Audited:
    """Audit a wheel for the CPU ``cpu``. The architecture of ``cpu`` overrides the configured architecture.

    ``text`` is NAME==VERSION or the path of a wheel, relative to ``folder``. Raises ConfigError for an unknown CPU, and
    PlatformMismatch for a wheel that is not for the target. Raises SourceUnavailable, NetworkUnreachable or
    WheelUnusable if the wheel cannot be obtained or used, and NetworkUnreachable or WheelUnusable for its dependencies.
    Also raises the exceptions of ``flow.extracted_tools.cpu_tools``.
    """
    wanted_cpu = cpu_gate.load_cpu(cpu)
    config = dataclasses.replace(config, image=dataclasses.replace(config.image, architecture=wanted_cpu.architecture))
    log = config.target_root / "logs" / "audit-wheel.log"
    files.remove(log)
    with files.scratch_folder(config.target_root / "work", "audit-wheel") as scratch:
        wheel = _wheel(config, text, folder, scratch, log)
        wheels.audit(wheel, config.image.target)
        reason = _no_probe(config)
        disassembler = Disassembler(extracted_tools.cpu_tools(config))
        with progress.step(f"examine the instructions of {wheel.name}"):
            static = cpu_gate.examine(wheel, wanted_cpu, disassembler)
        probed = Probed(reason=reason) if reason else _run(config, wheel, scratch, wanted_cpu, log)
        return Audited(wheel.name, files.sha256_of(wheel), wanted_cpu, static, probed, _readable(static, disassembler))


def _wheel(config: Config, text: str, folder: Path, scratch: Path, log: Path) -> Path:
    """Return the wheel's path; download the wheel if ``text`` is NAME==VERSION."""
    if text.endswith(".whl"):
        path = folder / text  # a link is not resolved, because the name of its target may differ
        if not path.is_file():
            raise SourceUnavailable(
                f"there is no wheel at {path}",
                expected="the path of a wheel, or NAME==VERSION",
                found="no such file",
                fix="correct the path",
            )
        return path
    wanted = Wanted.parse(text, folder=folder)
    if wanted.project:
        raise SourceUnavailable(
            f"{wanted} is not a wheel",
            expected="the path of a wheel, or NAME==VERSION",
            found="the path of a project",
            fix=f"build the project's wheel first: run ./inv build-wheel {text}",
        )
    with progress.step(f"download {wanted}"):
        return download.download(str(wanted), scratch, config.image.target, load_suite(config.image.suite), log)


def _no_probe(config: Config) -> str:
    """Return the reason why the wheel cannot be run, or an empty string if it can."""
    if host_architecture() == config.image.target:
        return "this PC executes the target's programs natively, so no CPU can be emulated"
    ensure_running(config)
    reference = config.image_reference("rootfs")
    with contextlib.closing(connect()) as client:
        if not image_id(client, reference):
            option = f"--architecture={config.image.architecture}"
            return f"there is no image {reference}; ./inv build-image --only=rootfs {option} builds it"
    return ""


def _run(config: Config, wheel: Path, scratch: Path, cpu: Cpu, log: Path) -> Probed:
    """Run the wheel with its dependencies, or return the reason why it cannot be run."""
    suite = load_suite(config.image.suite)
    try:
        steps = cpu_gate.probe_of(wheel)
        with progress.step(f"download the dependencies of {wheel.name}"):
            (others := scratch / "dependencies").mkdir()
            needed = download.dependencies(wheel, others, config.image.target, suite, log)
    except (SourceUnavailable, WheelUnusable) as fault:
        return Probed(reason=f"{fault.summary}; {fault.found}")
    (site := scratch / "site").mkdir()
    for item in (wheel, *needed):
        # As with pip, a file may be in several wheels, such as tests/__init__.py.
        wheels.unpack(item, site, suite, overwrite=True)
    with progress.step(f"run the wheel on an emulated {cpu.name}"):
        return _probe(config, steps, site, cpu, log)


def _probe(config: Config, steps: Sequence[tuple[str, str]], site: Path, cpu: Cpu, log: Path) -> Probed:
    """Run the probe's steps in the target root. Raises PlatformMismatch if QEMU does not emulate the requested CPU."""
    packages = f"usr/local/lib/python{load_suite(config.image.suite).python}/dist-packages"
    with contextlib.closing(connect()) as client:
        output = run_in(
            client,
            config.image_reference("rootfs"),
            ["python3", f"{_INSIDE}/cpu_probe.py", json.dumps(steps)],
            architecture=config.image.target,
            binds=[f"{site}:{_INSIDE}/site:ro", f"{_SCRIPT}:{_INSIDE}/cpu_probe.py:ro"],
            environment={
                "QEMU_CPU": cpu.name,
                "PYTHONPATH": f"{_INSIDE}/site/{packages}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "2",
            },
            limit_s=_LIMIT_S,
            log=log,
            check=False,
        ).output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(('{"hwcap"', '{"step"'))]
    if not lines:
        return Probed(reason=f"the container's Python did not start: {output.strip()[-200:]}")
    entry, bit, name = cpu.lacks
    if lines[0]["hwcap"][{16: 0, 26: 1}[entry]] >> bit & 1:
        raise PlatformMismatch(
            f"the emulator does not emulate {cpu.name}",
            expected=f"an emulated CPU without the capability {name}",
            found=f"an emulated CPU with this capability, although QEMU_CPU is {cpu.name}",
            fix="install a newer qemu-user; ./inv doctor prints the installed version",
        )
    done = [Step(**line) for line in lines[1:]]
    if all(item.result == "ok" for item in done if item.step == steps[0][0]):  # otherwise, no other step was started
        reported = {item.step for item in done}
        done += [Step(name, 0, "did not complete") for name, _ in steps if name not in reported]
    return Probed(tuple(done))


def _readable(static: Static, disassembler: Disassembler) -> tuple[str, ...]:
    """Return lines for the first few unchecked functions, and then lines for the first few unproven functions."""
    lines = []
    for state in (UNCHECKED, UNPROVEN):
        found = [item for item in static.functions if item.state == state]
        names = disassembler.demangled([item.name for item in found[:_SHOWN]])
        for item, name in zip(found, names, strict=False):
            counts = ", ".join(f"{count} {kind}" for kind, count in item.instructions.items())
            shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
            lines.append(f"{state}: {shown} ({counts})")
        if len(found) > _SHOWN:
            lines.append(f"{state}: … and {len(found) - _SHOWN} more; --json lists all")
    return tuple(lines)
