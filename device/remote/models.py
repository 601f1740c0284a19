"""``profile-remote --model``: compile a PyTorch model for a board, run it there, check its outputs and time it."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from device.remote import comparing, eager, loader_session, model_compiling, profiling, targets
from device.remote import environment as environments
from device.remote.address import LOADER_KINDS, Address
from device.remote.eager import Eager
from device.remote.loader_session import SOURCE, Timing
from device.remote.targets import Target
from toolchain import files, progress, templates
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.errors import UserError

SHOWN_OPERATORS = 20
"""The number of operators in the printed table. JSON and the report contain all operators."""
NO_OPERATORS = "The model has no operators: its outputs are inputs or constants."
_TEMPLATE = Path(__file__).parent.parent / "templates" / "model.html.j2"


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The measurements of a model on a board.

    ``seconds`` contains the latency of each run; ``operators`` contains each operator's name and time, in execution
    order.
    """

    model: str
    inputs: tuple[str, ...]
    target: str
    device: str
    board: str
    seconds: tuple[float, ...]
    operators: tuple[tuple[str, float], ...]
    checked: int
    tolerances: tuple[tuple[float, float], ...]
    """The relative and absolute tolerances of the outputs."""
    parameter_bytes: int
    parameters_sha256: str
    parameters: str
    """How the board obtained the parameters."""
    work_area_bytes: int
    peak_memory_bytes: int
    """The peak memory of the process on the board."""
    eager: tuple[Eager, ...]
    """The results of the same model in eager PyTorch on the same board, by precision."""
    emulated: bool
    note: str

    @property
    def median_s(self) -> float:
        """The median latency."""
        return statistics.median(self.seconds)

    @property
    def p90_s(self) -> float:
        """The latency that 90 % of the runs do not exceed (90th percentile)."""
        return float(numpy.quantile(self.seconds, 0.9))

    @property
    def peak_memory(self) -> str:
        """The peak memory as a string."""
        return self._memory(self.peak_memory_bytes)

    def _memory(self, size: int) -> str:
        return (progress.human_size(size) + (", with the emulator" if self.emulated else "")) if size else "unknown"

    @property
    def shares(self) -> list[tuple[str, str, float]]:
        """Each operator's name, time and share of the total time, starting with the slowest operator."""
        whole = sum(seconds for _, seconds in self.operators) or 1.0
        slowest_first = sorted(self.operators, key=lambda item: -item[1])
        return [(name, profiling.seconds_text(seconds), seconds / whole) for name, seconds in slowest_first]

    @property
    def _allowed(self) -> str:
        """The tolerances as a string; if they differ, each with the index of its output."""
        texts = [
            f"{relative:g} relative or {absolute:.3g} absolute" if relative or absolute else "equal"
            for relative, absolute in self.tolerances
        ]
        return texts[0] if len(set(texts)) == 1 else "; ".join(f"output {n}: {text}" for n, text in enumerate(texts))

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the table of results."""
        text, size = profiling.seconds_text, progress.human_size
        found = [
            ("model", f"{self.model} ({', '.join(self.inputs)})"),
            ("target", self.target),
            ("device", self.device),
            ("result", f"{self.checked} elements agree with PyTorch ({self._allowed})"),
            ("median", f"{text(self.median_s)} ({len(self.seconds)} runs)"),
            ("p90", text(self.p90_s)),
            ("parameters", f"{self.parameters}, SHA-256 {self.parameters_sha256[:12]}…, {size(self.parameter_bytes)}"),
            ("work area", size(self.work_area_bytes)),
            ("peak memory", self.peak_memory),
        ]
        if self.board:
            found.insert(3, ("board", self.board))
        if self.note:
            found.append(("note", self.note))
        return found

    def comparison(self) -> list[tuple[str, ...]]:
        """The rows of the table that compares TVM with eager PyTorch, starting with the header row.

        There are no rows if the model was not run in PyTorch.
        """
        text = profiling.seconds_text
        if not any(item.seconds for item in self.eager):
            return []

        def cells(name: str, tvm: str, shown: Callable[[Eager], str]) -> tuple[str, ...]:
            return (name, tvm, *(shown(item) if item.seconds else "–" for item in self.eager))

        return [
            ("", "TVM", *(f"torch {item.precision}" for item in self.eager)),
            cells("median", text(self.median_s), lambda item: text(item.median_s or 0.0)),
            cells("p90", text(self.p90_s), lambda item: text(item.p90_s or 0.0)),
            cells("peak memory", self.peak_memory, lambda item: self._memory(item.peak_memory_bytes)),
            cells(
                "difference",
                "within tolerance",
                lambda item: f"{item.difference:.3g} of {item.largest:.3g}",
            ),
            cells("threads", "1", lambda item: str(item.threads)),
            cells("version", "", lambda item: item.torch),
        ]

    @property
    def not_run(self) -> list[str]:
        """One line of text for each reason why eager PyTorch did not run the model, with the affected precisions."""
        reasons: dict[str, list[str]] = {}
        for item in self.eager:
            if item.reason:
                reasons.setdefault(item.reason, []).append(item.precision)
        return [f"torch {' and '.join(names)} not run: {reason}" for reason, names in reasons.items()]

    def print(self) -> None:
        """Print the tables on stdout."""
        console = progress.make_console()
        console.print(profiling.table_of_results(f"{self.model} on {self.device}", self.rows()))
        if rows := self.comparison():
            table = profiling.table("TVM and eager PyTorch on the same board")
            for name in rows[0]:
                table.add_column(name, overflow="fold")
            for cells in rows[1:]:
                table.add_row(*cells)
            console.print(table)
        for line in self.not_run:
            console.print(line, markup=False)
        if not self.operators:
            console.print(NO_OPERATORS)
            return
        table = profiling.table("operators")
        table.add_column("operator", overflow="fold")
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        for name, seconds, share in self.shares[:SHOWN_OPERATORS]:
            table.add_row(name, seconds, f"{share:.1%}")
        if others := self.shares[SHOWN_OPERATORS:]:
            table.add_row(f"{len(others)} others", "", f"{sum(share for _, _, share in others):.1%}")
        console.print(table)

    def as_json(self) -> str:
        """The measurement as JSON."""
        facts = {**vars(self), "eager": [item.as_json() for item in self.eager]}
        return json.dumps({**facts, "median_s": self.median_s, "p90_s": self.p90_s}, indent=2) + "\n"

    def as_html(self) -> str:
        """The measurement as an HTML page without external resources."""
        facts = {"done": self, "text": profiling.seconds_text, "no_operators": NO_OPERATORS}
        return templates.render(_TEMPLATE, facts, trim_blocks=True, html=True)


def profile(
    config: Config,
    *,
    model: str,
    target: str,
    timing: Timing,
    folder: Path,
    device: str = "",
    export: Path | None = None,
) -> ModelProfile:
    """Compile ``model`` (FILE.pt2 or MODULE:FUNCTION) for ``target``, then run, check and time it on ``device``.

    Python looks for MODULE in ``folder`` first. If the outputs are correct, the library, the parameters, the example
    arrays and an example program in C are written to the folder ``export``, which must not exist yet.

    Raises UserError, ResultMismatch, and the errors that ``profiling.profile`` raises.
    """
    wanted = targets.load(target)
    if not wanted.tvm:
        raise UserError(
            f"models cannot run on {wanted.title}",
            expected="--target local, aarch64 or armv7: models run on CPUs only",
            found=f"--target {target}",
            fix="choose a CPU target; to use opencl or qpu, run a kernel instead (--kernel; see docs/remote.md)",
        )
    address = profiling.device_of(config, wanted, device)
    if address.kind == "local" and wanted.name != "local":
        raise profiling.wrong_device(wanted, address)
    profiling.require_sane(timing, 0)
    reference = _reference(model)
    if export is not None and export.exists():
        raise UserError(
            f"{export} already exists",
            expected="--export set to a folder that does not exist yet",
            found="a folder" if export.is_dir() else "a file",
            fix=f"delete {export}, or choose another folder",
        )
    with files.scratch_folder(config.build_root / "remote", "run") as scratch:
        environment = environments.ready_for_models(config)
        by_rpc = address.kind not in LOADER_KINDS
        facts, library = _compiled(
            config, wanted, address if by_rpc else None, reference, folder, timing, environment, scratch
        )
        parameters = library.with_name("model.params").read_bytes()
        inputs, expected = (_arrays(library.with_name(f"{name}.npz")) for name in ("inputs", "expected"))
        if not by_rpc:
            _by_loader(config, wanted, address, library, parameters, inputs, expected, timing, facts)
        graph = library.with_name("model.graph")
        in_torch = (
            eager.measure(config, wanted, address, graph.read_bytes(), environment)
            if graph.is_file()
            else eager.not_run(facts["no_graph"])
        )
        if export is not None:
            _write(export, library, inputs, expected)
    emulated = address.kind == "emulator" and wanted.architecture != host_architecture()
    return ModelProfile(
        model=facts["name"],
        inputs=tuple(f"{item.dtype} {'×'.join(map(str, item.shape))}" for item in inputs),
        target=f"{wanted.name} ({wanted.title})",
        device=str(address),
        board=facts["model"],
        seconds=tuple(facts["seconds"]),
        operators=tuple(zip(facts["operators"], facts["operator_s"], strict=True)),
        checked=facts["checked"],
        tolerances=tuple((relative, absolute) for relative, absolute in facts["tolerances"]),
        parameter_bytes=len(parameters),
        parameters_sha256=hashlib.sha256(parameters).hexdigest(),
        parameters=facts["parameters"],
        peak_memory_bytes=facts["peak_memory_bytes"],
        eager=in_torch,
        emulated=emulated,
        work_area_bytes=facts["work_area_bytes"],
        note=profiling.note_of(emulated=emulated, foreign=wanted.name != "local", board=facts["model"]),
    )


def compile_for(config: Config, model: str, target: Target, folder: Path) -> None:
    """Compile MODULE:FUNCTION for a target, and write the library, parameters and description to a new folder.

    Raises UserError, and the errors that ``environment.ready_for_models`` raises.
    """
    folder.mkdir()
    once = Timing(number=1, repeat=1, min_repeat_ms=0, warm_up=0)
    environment = environments.ready_for_models(config)
    _compiled(config, target, None, model, folder, once, environment, folder)


def _compiled(
    config: Config,
    target: Target,
    address: Address | None,
    reference: str,
    folder: Path,
    timing: Timing,
    environment: environments.TvmEnvironment,
    scratch: Path,
) -> tuple[dict[str, Any], Path]:
    """Compile the model in ``scratch`` and, if ``address`` is not None, run the model over RPC.

    Returns the facts that the worker reported, and the library's path.
    """
    library = scratch / "libmodel.so"
    common = profiling.request_of(config, target, address, library, timing, "models")
    facts = profiling.run_worker(
        config, target, address, "device.remote.model_worker",
        {"model": reference, "folder": str(folder), **common}, environment=environment, scratch=scratch, name=reference,
    )  # fmt: skip
    return facts, library


def _write(folder: Path, library: Path, inputs: list[Any], expected: list[Any]) -> None:
    """Write the model and an example program in C to ``folder``."""
    with files.replacing(folder) as staged:
        staged.mkdir()
        for source in (library, library.with_name("model.params"), SOURCE / "main.c"):
            shutil.copyfile(source, staged / source.name)
        (staged / "model.h").write_text(_header(len(inputs), len(expected)))
        for name, arrays in (("input", inputs), ("expected", expected)):
            for number, array in enumerate(arrays):
                (staged / f"{name}{number}.bin").write_bytes(array.tobytes())


def _header(inputs: int, outputs: int) -> str:
    """The library's C header, which defines how many inputs and outputs the model has."""
    counts = f"#define PITORCH_MODEL_INPUTS {inputs}\n#define PITORCH_MODEL_OUTPUTS {outputs}\n"
    return counts + (SOURCE / "model.h").read_text()


def _reference(model: str) -> str:
    """The path of the model's file, or MODULE:FUNCTION. Raises UserError."""
    if model.endswith(".pt2"):
        path = Path(model).resolve()
        found = "no such file"
        if path.is_file():
            return str(path)
    else:
        module, _, function = model.partition(":")
        found = repr(model)
        if function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            return model
    raise UserError(
        f"there is no model {model!r}",
        expected="FILE.pt2 (torch.export.save), or MODULE:FUNCTION",
        found=found,
        fix="pass an existing file or a function to --model; docs/remote.md describes how to write a model",
    )


def _arrays(path: Path) -> list[Any]:
    with numpy.load(path) as stored:
        return [stored[name] for name in stored.files]


def _by_loader(
    config: Config,
    target: Target,
    address: Address,
    library: Path,
    parameters: bytes,
    inputs: list[Any],
    expected: list[Any],
    timing: Timing,
    facts: dict[str, Any],
) -> None:
    """Send the library and the arrays to the loader on the board, then run, check and time the model.

    For a phone, the model is linked into the loader, and no library is sent.
    """
    seconds = numpy.zeros(len(facts["operators"]))
    loader = library.with_name("loader") if address.kind == "adb" else None
    if loader is not None:
        with progress.step("link the loader with the model"):
            loader_session.build_static_loader(config, target, library.with_suffix(".o"), model_compiling.ENTRY, loader)
    with loader_session.session(config, target, address, loader=loader) as board:
        progress.say(f"    {address} is ready")
        board.load(library if loader is None else None, model_compiling.ENTRY)
        given = [board.array(item) for item in inputs]
        mapped, origin = board.parameters(parameters or b"\0")
        numbers = [*given, mapped, *(board.array(item) for item in (*map(comparing.blank, expected), seconds))]
        board.run(numbers)
        found = [board.read(number, like) for number, like in zip(numbers[len(inputs) + 1 : -1], expected, strict=True)]
        wrong = comparing.first_mismatch(found, expected, facts["tolerances"])
        if wrong is not None:
            raise profiling.mismatch("model", facts["name"], str(address), wrong)
        each = Timing(number=1, repeat=timing.number * timing.repeat, min_repeat_ms=0, warm_up=timing.warm_up)
        _, measured = board.time(each, numbers)
        rows = []
        for _ in range(model_compiling.OPERATOR_RUNS):
            board.run(numbers)
            rows.append(board.read(numbers[-1], seconds))
        peak = board.peak_memory()
    facts |= {
        "parameters": origin,
        "peak_memory_bytes": peak,
        "model": board.model,
        "seconds": measured,
        "checked": sum(int(item.size) for item in found),
        "operator_s": numpy.median(rows, axis=0).tolist(),
    }
