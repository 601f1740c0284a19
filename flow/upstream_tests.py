"""Run PyTorch's own test files with the image's torch, in a container for the target, and count the results.

The files come from the source package that the recipe pins. A failure is *explained* if ``upstream.toml`` states a
reason; otherwise it is an error. Tests that ``upstream.toml`` lists as *left out* are not run and are counted
separately. If a file exceeds the time limit, pytest is stopped and the results so far are counted.

pytest's exit status does not show whether a file was completed, because a process that a test forked may have set this
status, and because pytest itself can be killed. Therefore, the collected tests are compared with those whose teardown
was reported. The remaining tests count as *not run*.

A file that takes longer than the limit is run in parts: ``test_nn.py 2/4`` contains every fourth test in alphabetical
order, starting with the second.

The report is written after each file. Because the tests of all files take hours, a run for which no files are named
continues an interrupted run. It skips the files that were completed with the installed torch and without unexplained
failures.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import inspect
import json
import math
import re
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.containers import run_in
from engine.start import ensure_running
from flow import pipelines
from flow.build_lock import build_lock
from flow.context import Context
from flow.steps import torch_wheel
from recipes.recipe import HERE
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ChecksFailed, CommandTimedOut
from toolchain.jobs import compile_jobs
from wheels.pip import run_pip

LIMIT_S = 1200.0
_GRACE_S = 120.0
_MOUNTED = "/usr/src/upstream"
LIST = HERE / "torch" / "upstream.toml"
_PLUGIN = HERE / "torch" / "upstream_plugin.py"
_KINDS = ("passed", "explained", "failed", "skipped", "left out", "not run")
_NAME = re.compile(r"(?P<file>\S+\.py)(?: (?P<part>[1-9]\d*)/(?P<parts>[1-9]\d*))?")


@dataclass(frozen=True)
class Reasons:
    """The tables in ``upstream.toml``, which map patterns for test names (fnmatch) to reasons."""

    explained: Mapping[str, str]
    """Why these tests fail."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why these tests are not run."""


@dataclass(frozen=True)
class Part:
    """One of upstream's test files, or one of ``parts`` equal parts of a file. Parts are numbered from 1."""

    file: str
    part: int = 1
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse FILE or "FILE PART/PARTS". Raises ArtefactMissing for any other text."""
        found = _NAME.fullmatch(text.strip())
        if found is None or not (part := int(found["part"] or 1)) <= (parts := int(found["parts"] or 1)):
            raise ArtefactMissing(
                f"{text!r} is not the name of a test file or a part",
                expected="a name such as test_nn.py, or a part such as 'test_nn.py 2/4'",
                found=repr(text),
                fix="put FILE PART/PARTS in quotation marks; PART must be a number from 1 to PARTS",
            )
        return cls(found["file"], part, parts)

    def __str__(self) -> str:
        return self.file if self.parts == 1 else f"{self.file} {self.part}/{self.parts}"


@dataclass(frozen=True)
class Collected:
    """The test names that the plugin wrote: all tests of the file, and those of the requested part."""

    whole: Sequence[str]
    part: Sequence[str]


@dataclass(frozen=True)
class Result:
    """The result of a file or part.

    ``failures`` maps test names to failure messages. ``explained`` and ``left_out`` map test names to the reasons in
    ``upstream.toml``.
    """

    file: str
    counts: Mapping[str, int]
    failures: Mapping[str, str]
    explained: Mapping[str, str]
    ended: str
    """Why the file was not completed; empty if it was completed."""
    seconds: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    unmet: Sequence[str] = field(default_factory=list)
    """Patterns in ``upstream.toml`` that match no test in this file."""


@dataclass(frozen=True)
class Outcome:
    """The results of all files, and the path of the report."""

    results: Sequence[Result]
    path: Path

    def total(self, kind: str) -> int:
        """Return the number of tests with the result ``kind``."""
        return sum(item.counts.get(kind, 0) for item in self.results)

    def summary(self) -> str:
        """The results as one line of text."""
        counts = ", ".join(f"{self.total(kind)} {kind}" for kind in _KINDS if self.total(kind))
        cut = sum(bool(item.ended) for item in self.results)
        return f"{len(self.results)} of upstream's test files: {counts}" + (f"; {cut} not completed" if cut else "")

    def table(self) -> str:
        """Return a table of the results, with one line per file."""
        width = max(len(item.file) for item in self.results)
        head = f"{'file':{width}}" + "".join(f"{kind:>11}" for kind in _KINDS) + f"{'seconds':>10}"
        lines = [
            f"{item.file:{width}}"
            + "".join(f"{item.counts.get(kind, 0):>11}" for kind in _KINDS)
            + f"{item.seconds:>10.0f}  {item.ended}".rstrip()
            for item in self.results
        ]
        return "\n".join([head, *lines])


def identity(record: str) -> str:
    """Return a SHA-256 that is the same for a torch wheel and for the torch that the wheel installs.

    ``record`` is the text of torch's ``RECORD``, which contains the hashes of all files. Installers add lines for
    scripts and for their own metadata to this file; these lines are ignored. This function is also run in the
    container, so it uses no other definitions.
    """
    from hashlib import sha256

    lines = [line for line in record.splitlines() if not line.startswith("../") and ".dist-info/" not in line]
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()


@dataclass
class Report:
    """A JSON file with the results of all files that were run with the installed torch."""

    path: Path
    torch: str
    """The ``identity`` of the installed torch."""
    is_emulated: bool
    results: dict[str, Result]
    """Maps the names of files and parts to their results."""

    @classmethod
    def read(cls, path: Path, context: Context) -> Report:
        """Read the report; discard results of other torch wheels. Raises the same exceptions as ``run_in``."""
        script = f"{inspect.getsource(identity)}from importlib.metadata import distribution as of\n"
        made = run_in(
            context.client,
            context.config.image_reference("system"),
            ["python3", "-c", f"{script}print(identity(of('torch').read_text('RECORD')))"],
            architecture=context.target,
            limit_s=300,
            log=context.log("upstream"),
            fix="run ./inv build-image with a torch wheel (recipes/torch)",
        )
        torch = made.output.split()[-1]
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if (earlier := cls.load(path)).torch == torch:
                return earlier
        return cls(path, torch, context.config.image.target != context.native, {})

    @classmethod
    def load(cls, path: Path) -> Report:
        """Load a report.

        Raises OSError if the file cannot be read, and ValueError, KeyError or TypeError if it is not a report.
        """
        document = json.loads(path.read_text())
        results = {item["file"]: Result(**item) for item in document["files"]}
        return cls(path, document["torch"], document["emulated"], results)

    def is_final(self, item: Part, reasons: Reasons) -> bool:
        """Return True if all tests of ``item`` ran and ``reasons`` still explains each failure and omission.

        A file with patterns that matched no test is run again, because the patterns may have been corrected.
        """
        result = self.results.get(str(item))
        return (
            result is not None
            and not (result.ended or result.counts.get("failed", 0) or result.unmet)
            and all(_reason(test, reasons.explained) for test in result.explained)
            and all(_reason(test, reasons.left_out) for test in result.left_out)
        )

    def add(self, result: Result) -> None:
        """Add a result, and write the report."""
        self.results[result.file] = result
        items = [dataclasses.asdict(self.results[name]) for name in sorted(self.results)]
        document = {"torch": self.torch, "emulated": self.is_emulated, "files": items}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text_atomically(self.path, json.dumps(document, indent=2) + "\n")


def run_tests(
    config: Config, names: Sequence[str] = (), *, limit_s: float = LIMIT_S, tests: Path | None = None
) -> Outcome:
    """Run the files in ``names``, or those that the recipe lists, and write the report next to the wheel.

    A name denotes a file or a part (``Part``). Without names, the files that an earlier run completed with the same
    torch are not run again. ``limit_s`` is the limit per file or part in seconds; ``tests`` is the folder of test files
    to use instead of upstream's. Prints a warning for patterns in ``upstream.toml`` that match no test in their file.

    Raises ChecksFailed with the unexplained failures, or ArtefactMissing if a file is unknown or no image has torch.
    Also raises the exceptions of ``fetch_packages`` and ``unpack``.
    """
    data = tomllib.loads(LIST.read_text())
    wanted = [Part.parse(name) for name in names or data["files"]]
    ensure_running(config)
    with build_lock(config.target_root), Context(config) as context:
        folder = tests or _unpacked(context)
        if absent := [str(item) for item in wanted if not (folder / item.file).is_file()]:
            raise ArtefactMissing(
                f"upstream has no test file {absent[0]}",
                expected=f"the name of a test file, such as {', '.join(data['files'][:3])}",
                found=", ".join(absent),
                fix=f"pass the name of a file in {folder}",
            )
        report = Report.read(config.target_root / "torch" / "upstream-tests.json", context)
        reasons = Reasons(data["explained"], data["left_out"])
        to_run = [item for item in wanted if names or not report.is_final(item, reasons)]
        if len(to_run) < len(wanted):
            skipped = f"{len(wanted) - len(to_run)} of {len(wanted)} files skipped"
            progress.say(f"{skipped}: passed earlier with the same torch; to run them again, delete {report.path}")
        if to_run:
            with files.scratch_folder(context.root, "upstream") as scratch:
                packages = fetch_packages(data["packages"], scratch / "packages", context.log("upstream"))
                shutil.copy(_PLUGIN, packages)
                _run_all(context, folder, packages, scratch, to_run, reasons, limit_s, report.add)
    results = [report.results[str(item)] for item in wanted]
    outcome = Outcome(results, report.path)
    for pattern in dict.fromkeys(pattern for item in results for pattern in item.unmet):
        progress.warn(f"recipes/torch/upstream.toml contains {pattern}, but upstream has no such test")
    if outcome.total("failed"):
        found = [f"{name}: {line}" for item in results for name, line in item.failures.items()]
        print(outcome.table())
        raise ChecksFailed(
            f"{outcome.total('failed')} of upstream's tests fail without a known reason",
            expected="only failures for which recipes/torch/upstream.toml states a reason",
            found="\n".join(found[:20]),
            fix=f"read all failures in {outcome.path}, and the tests' output in {context.log('upstream')}",
        )
    return outcome


def fetch_packages(pins: Sequence[str], to: Path, log: Path) -> Path:
    """Install the pinned packages into the folder ``to``, and return the folder.

    Raises NetworkUnreachable, SourceUnavailable, DiskFull or CommandFailed.
    """
    what = "the packages of upstream's tests"
    fix = "check the index (pip config list) and the pins in recipes/torch/upstream.toml"
    words = ["install", "--quiet", "--no-deps", f"--target={to}", *pins]
    run_pip(words, what=what, log=log, fix=fix, limit_s=600)
    return to


def unpack(archive: Path, place: Path) -> None:
    """Unpack a source archive's ``test`` folder to ``place``, which is created only on success.

    Raises DiskFull or CommandFailed.
    """
    with files.scratch_folder(place.parent, place.name) as scratch:
        argv = ["tar", "--extract", "--file", str(archive), "--directory", str(scratch)]
        with files.room_for_programs("upstream's tests", place.parent):
            process.run([*argv, "--strip-components=1", "--no-same-owner", "--wildcards", "*/test/*"], limit_s=600)
        (scratch / "test").rename(place)


def _unpacked(context: Context) -> Path:
    """Return the folder with upstream's tests from the source that the recipe pins."""
    pipeline = pipelines.torch_job(context)
    *_, made = pipeline.execute(pipeline.plan(only=("torch-source",)))
    source = torch_wheel.source_of(context, made)
    if source.kind == "git":
        return source.folder / "test"
    place = source.folder.with_name(f"{source.folder.name}-tests")
    if not place.is_dir():
        (archive,) = source.folder.glob("*.orig.tar.*")
        unpack(archive, place)
    return place


def _run_all(
    context: Context,
    folder: Path,
    packages: Path,
    out: Path,
    wanted: Sequence[Part],
    reasons: Reasons,
    limit_s: float,
    on_result: Callable[[Result], None],
) -> None:
    """Run the files and parts in ``wanted``, several at a time, and pass each result to ``on_result``."""
    client, done = context.client, 0

    def run(item: Part) -> Result:
        stem = str(item).replace("/", "--").replace(" ", "-")
        log, collected = out / f"{stem}.jsonl", out / f"{stem}.collected.json"
        pytest = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        # The paths in test names, including those in subfolders, are relative to this folder.
        options = [f"--rootdir={_MOUNTED}", f"--report-log=/out/{log.name}"]
        plugin = ["-p", _PLUGIN.stem, f"--tell-collected=/out/{collected.name}", f"--part={item.part}/{item.parts}"]
        plugin += [f"--leave-out={pattern}" for pattern in reasons.left_out if _file_of(pattern) == item.file]
        began, signal_at, hung = time.monotonic(), time.time() + limit_s, False
        try:
            run_in(
                client,
                context.config.image_reference("system"),
                # timeout(1) runs inside the container, so that pytest can write its report when the limit is reached.
                [
                    *("timeout", "--signal=INT", "--kill-after=60", str(int(limit_s))),
                    *(*pytest, *options, *plugin, item.file),
                ],
                architecture=context.target,
                binds=[f"{folder}:{_MOUNTED}:ro", f"{packages}:/packages:ro", f"{out}:/out:rw"],
                environment={
                    "PYTHONPATH": "/packages",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "OMP_NUM_THREADS": "1",
                    "CI": "",
                    # Upstream's tests run once per available device. The wheel does not contain torch_qpu, whose device
                    # is therefore disabled here.
                    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                    # The recipe does not build the lazy backend, so the set-up of its tests would fail.
                    "PYTORCH_TESTING_DEVICE_EXCEPT_FOR": "lazy",
                },
                workdir=_MOUNTED,
                limit_s=limit_s + _GRACE_S,
                log=context.log("upstream"),
                check=False,
            )
        except CommandTimedOut:
            hung = True
        lines = log.read_text().splitlines() if log.is_file() else []
        tests = Collected(**json.loads(collected.read_text())) if collected.is_file() else None
        seconds = time.monotonic() - began
        return tally(item, lines, reasons, tests, seconds=seconds, limit_s=limit_s, signal_at=signal_at, hung=hung)

    with (
        progress.bar("upstream's tests: files", total=len(wanted)) as bar,
        concurrent.futures.ThreadPoolExecutor(compile_jobs(context.config.build)) as pool,
    ):
        waiting = {pool.submit(run, item): item for item in wanted}
        try:
            for future in concurrent.futures.as_completed(waiting):
                on_result(future.result())
                done += 1
                bar.update(done, note=str(waiting[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            process.interrupt_all()  # otherwise the pool would wait for the files that are running
            raise


def tally(
    item: Part,
    lines: Sequence[str],
    reasons: Reasons,
    tests: Collected | None,
    *,
    seconds: float,
    limit_s: float,
    signal_at: float = math.inf,
    hung: bool = False,
) -> Result:
    """Return a file's result, based on the lines that pytest-reportlog wrote (each is a JSON report).

    ``signal_at`` is the time at which the limit is reached, in Unix seconds. A test that fails after ``signal_at``
    counts as not run, because torch can turn the KeyboardInterrupt that is raised at the limit into another exception.
    ``hung`` means that no signal could stop pytest. ``tests`` is None if pytest exited before it had collected the
    tests; the file then counts as failed, regardless of pytest's exit status.
    """
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    torn_down: set[str] = set()
    interrupted: set[str] = set()
    status: int | None = None
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:
            continue  # the last line can be incomplete
        kind = report.get("$report_type")
        if kind == "SessionFinish":
            status = report["exitstatus"]
        elif kind == "CollectReport" and report["outcome"] == "failed":
            outcomes[report["nodeid"]], messages[report["nodeid"]] = "failed", _message(report)
        elif kind == "TestReport":
            test, outcome = report["nodeid"], report["outcome"]
            if report["when"] == "teardown":
                torn_down.add(test)
            if outcome == "failed" and report.get("stop", 0.0) >= signal_at:
                interrupted.add(test)
            elif outcome == "failed" or (outcome == "skipped" and report["when"] != "teardown"):
                outcomes[test] = outcome if outcomes.get(test) != "failed" else "failed"
                messages.setdefault(test, _message(report))
                if outcome == "skipped" and "wasxfail" in report:
                    outcomes[test] = "passed"  # an expected failure
            elif report["when"] == "call":
                outcomes.setdefault(test, "passed")
    torn_down -= interrupted
    outcomes = {test: outcome for test, outcome in outcomes.items() if test not in interrupted}
    reason_of = {test: _reason(test, reasons.explained) for test, outcome in outcomes.items() if outcome == "failed"}
    counts = Counter(
        "explained" if outcome == "failed" and reason_of[test] else outcome for test, outcome in outcomes.items()
    )
    part = tests.part if tests else ()
    left_out = {test: reason for test in part if (reason := _reason(test, reasons.left_out))}
    to_run = {*part} - {*left_out}
    counts["left out"] = len(left_out)
    counts["not run"] = len(to_run - torn_down)
    cut_off = f"cut off after {limit_s:.0f} s" if seconds >= limit_s else ""
    ended = _ended(status, tests, counts["not run"], hung=hung, cut_off=cut_off)
    if ended and ended != cut_off:
        counts["failed"] += 1
        messages[str(item)] = ended
        reason_of[str(item)] = ""
    if ended and counts["not run"]:
        ended += f": {len(to_run & torn_down)} of {len(to_run)} tests ran"
    return Result(
        str(item),
        dict(counts),
        {test: messages.get(test, "") for test, reason in reason_of.items() if not reason},
        {test: reason for test, reason in reason_of.items() if reason},
        ended,
        seconds,
        left_out,
        _unmet(item.file, reasons, {*tests.whole, *outcomes}) if tests else [],
    )


def _ended(status: int | None, tests: Collected | None, not_run: int, *, hung: bool, cut_off: str) -> str:
    """Return why the tests of a file did not run to completion, or an empty string if they did.

    ``status`` is pytest's exit status, or None if it is unknown.
    """
    if hung:
        return "hung, and could not be stopped by a signal"
    if status not in (None, 0, 1, 2, 5):
        return f"pytest exited with status {status}"
    if status in (0, 1, 5) and tests is not None and not not_run:
        return ""
    return cut_off or "pytest exited early"


def _file_of(pattern: str) -> str:
    return pattern.partition("::")[0]


def _unmet(name: str, reasons: Reasons, tests: Collection[str]) -> list[str]:
    patterns = [pattern for pattern in (*reasons.explained, *reasons.left_out) if _file_of(pattern) == name]
    return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(test, pattern) for test in tests)]


def _reason(test: str, explained: Mapping[str, str]) -> str:
    return next((reason for pattern, reason in explained.items() if fnmatch.fnmatchcase(test, pattern)), "")


def _message(report: Mapping[str, Any]) -> str:
    message = report.get("longrepr")
    if isinstance(message, dict):
        message = (message.get("reprcrash") or {}).get("message", "")
    elif isinstance(message, list):
        message = message[-1]
    lines = [line for line in str(message or "").splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
