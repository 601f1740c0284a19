"""Upstream's own test files, run on the image's torch in the target's container: passed, failed, skipped, cut off.

The files come from the source package that the recipe pins. A failure is *explained* where ``upstream.toml`` gives the
reason for it, and else a fault. What it says is *left out* is not run, and counted as that. A file that takes longer
than the limit is cut off and counted as far as it came.

pytest's own exit status does not show that a file was run to its end: a process that a test forked may write one too,
and the one that is waited for may be killed. So the tests that pytest collected are compared with those that were torn
down; the difference is *not run*.

A file that needs more than the limit is run in parts: ``test_nn.py 2/4`` is every fourth of its tests, in the order of
their names, from the second on.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import json
import re
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker

from engine.containers import run_in
from engine.start import ensure_running
from flow import main_steps as flow
from flow import torch_job as job
from recipes.recipe import HERE
from recipes.torch import source as sources
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, ChecksFailed, CommandFailed, CommandTimedOut, SourceUnavailable
from toolchain.jobs import compile_jobs
from wheels.pip import run_pip

LIMIT_S = 1200.0
_LEFT_TO_END_S = 120.0
_MOUNTED = "/usr/src/upstream"
LIST = HERE / "torch" / "upstream.toml"
_PLUGIN = HERE / "torch" / "upstream_plugin.py"
_KINDS = ("passed", "explained", "failed", "skipped", "left out", "not run")
_NAME = re.compile(r"(?P<file>\S+\.py)(?: (?P<part>[1-9]\d*)/(?P<parts>[1-9]\d*))?")


@dataclass(frozen=True)
class Reasons:
    """The tables of ``upstream.toml``: a pattern of tests' names (fnmatch), and the reason."""

    explained: Mapping[str, str]
    """Why these fail."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why these are not run."""


@dataclass(frozen=True)
class Part:
    """A test file of upstream's, or one of ``parts`` equal parts of it; the first part is number 1."""

    file: str
    part: int = 1
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """FILE or "FILE PART/PARTS". Raises ArtefactMissing for anything else."""
        found = _NAME.fullmatch(text.strip())
        if found is None or not (part := int(found["part"] or 1)) <= (parts := int(found["parts"] or 1)):
            raise ArtefactMissing(
                f"{text!r} names no test file of upstream's, nor a part of one",
                expected="a name such as test_nn.py, or a part such as 'test_nn.py 2/4'",
                found=repr(text),
                fix="put a part into quotes; it counts from 1 to the number of parts",
            )
        return cls(found["file"], part, parts)

    def __str__(self) -> str:
        return self.file if self.parts == 1 else f"{self.file} {self.part}/{self.parts}"


@dataclass(frozen=True)
class Collected:
    """Names of tests as the plugin wrote them: all of the file, and those of the part that was to run."""

    whole: Sequence[str]
    part: Sequence[str]


@dataclass(frozen=True)
class Told:
    """One file's result, or that of a part of it.

    ``failures`` maps a test's name to its last line, ``explained`` and ``left_out`` to our reason.
    """

    file: str
    counts: Mapping[str, int]
    failures: Mapping[str, str]
    explained: Mapping[str, str]
    ended: str
    """Empty, or why the file did not run to its end."""
    seconds: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    unmet: Sequence[str] = ()
    """Patterns of our tables that name this file, and none of its tests."""

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "file": self.file,
            **{kind.replace(" ", "_"): self.counts.get(kind, 0) for kind in _KINDS},
            "ended": self.ended,
            "seconds": round(self.seconds, 1),
            "failures": dict(self.failures),
            "explanations": dict(self.explained),
            "omissions": dict(self.left_out),
            "unmet": list(self.unmet),
        }


@dataclass(frozen=True)
class Outcome:
    """All files' results, and where they are written."""

    told: Sequence[Told]
    path: Path

    def total(self, kind: str) -> int:
        """How many tests ended so."""
        return sum(item.counts.get(kind, 0) for item in self.told)

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.total(kind)} {kind}" for kind in _KINDS if self.total(kind))
        cut = sum(bool(item.ended) for item in self.told)
        return f"{len(self.told)} of upstream's test files: {counts}" + (f"; {cut} not run to the end" if cut else "")

    def table(self) -> str:
        """A line a file."""
        width = max(len(item.file) for item in self.told)
        head = f"{'file':{width}}" + "".join(f"{kind:>11}" for kind in _KINDS) + f"{'seconds':>10}"
        lines = [
            f"{item.file:{width}}"
            + "".join(f"{item.counts.get(kind, 0):>11}" for kind in _KINDS)
            + f"{item.seconds:>10.0f}  {item.ended}".rstrip()
            for item in self.told
        ]
        return "\n".join([head, *lines])


def run_tests(
    config: Config, names: Sequence[str] = (), *, limit_s: float = LIMIT_S, tests: Path | None = None
) -> Outcome:
    """Run upstream's files (``names``, else those that the recipe lists) and write the counts beside the wheel.

    A name is a file's, or that of a part (``Part``). ``limit_s`` is per file or part, in seconds; ``tests`` another
    folder of test files. Warns of patterns in ``upstream.toml`` that meet no test of their file. Raises ChecksFailed
    with the failures that nothing explains, ArtefactMissing for a name that is no file of upstream's, or without an
    image with torch, and what ``fetch_packages`` and ``unpack`` raise.
    """
    data = tomllib.loads(LIST.read_text())
    wanted = [Part.parse(name) for name in names or data["files"]]
    ensure_running(config)
    with flow.alone(config.target_root), job.TorchFlow(config) as made:
        folder = tests or _unpacked(made)
        if absent := [str(item) for item in wanted if not (folder / item.file).is_file()]:
            raise ArtefactMissing(
                f"upstream has no test file {absent[0]}",
                expected=f"names like {', '.join(data['files'][:3])}",
                found=", ".join(absent),
                fix=f"the files are in {folder}",
            )
        with files.scratch_folder(made.root, "upstream") as scratch:
            packages = fetch_packages(data["packages"], scratch / "packages", made.log("upstream"))
            shutil.copy(_PLUGIN, packages)
            told = _run_all(
                made, folder, packages, scratch, wanted, Reasons(data["explained"], data["left_out"]), limit_s
            )
    outcome = Outcome(told, config.target_root / "torch" / "upstream-tests.json")
    outcome.path.parent.mkdir(parents=True, exist_ok=True)
    document = {"emulated": config.image.target != made.native, "files": [item.record() for item in told]}
    files.write_text_atomically(outcome.path, json.dumps(document, indent=2) + "\n")
    for pattern in dict.fromkeys(pattern for item in told for pattern in item.unmet):
        progress.warn(f"recipes/torch/upstream.toml names {pattern}, and upstream has no such test")
    if outcome.total("failed"):
        found = [f"{name}: {line}" for item in told for name, line in item.failures.items()]
        print(outcome.table())
        raise ChecksFailed(
            f"{outcome.total('failed')} of upstream's tests fail, and nothing explains it",
            expected="failures only where recipes/torch/upstream.toml gives the reason",
            found="\n".join(found[:20]),
            fix=f"all are in {outcome.path}; the output is in {made.log('upstream')}",
        )
    return outcome


def fetch_packages(pins: Sequence[str], to: Path, log: Path) -> Path:
    """What pytest needs, by pip into the folder ``to``. Raises NetworkUnreachable, SourceUnavailable, DiskFull."""

    def unfound(name: str) -> SourceUnavailable:
        return SourceUnavailable(
            f"the package index does not have {name}",
            expected=", ".join(pins),
            found="no such version",
            fix="pip config list says which index that is; the pins are in recipes/torch/upstream.toml",
        )

    what = "what upstream's tests need"
    try:
        words = ["install", "--quiet", "--no-deps", f"--target={to}", *pins]
        run_pip(words, what=what, log=log, unfound=unfound, limit_s=600)
    except CommandFailed as fault:
        if full := files.full_disk(fault.tail, what, to.parent):
            raise full from fault
        raise
    return to


def unpack(archive: Path, place: Path) -> None:
    """Unpack a source archive's folder ``test`` to ``place``, which is there whole or not at all. Raises DiskFull."""
    with files.scratch_folder(place.parent, place.name) as scratch:
        argv = ["tar", "--extract", "--file", str(archive), "--directory", str(scratch)]
        try:
            process.run([*argv, "--strip-components=1", "--no-same-owner", "--wildcards", "*/test/*"], limit_s=600)
        except CommandFailed as fault:
            if full := files.full_disk(fault.tail, "upstream's tests", place.parent):
                raise full from fault
            raise
        (scratch / "test").rename(place)


def _unpacked(made: job.TorchFlow) -> Path:
    """The folder of upstream's tests, out of the source."""
    source = sources.obtain(
        made.recipe,
        made.suite,
        made.config.torch.source,
        flow.sources_of(_mirror(made)),
        made.config.build_root / "sources",
        made.log("torch-source"),
    )
    if source.kind == "git":
        return source.folder / "test"
    place = made.config.build_root / "sources" / f"{source.folder.name}-tests"
    if not place.is_dir():
        (archive,) = source.folder.glob("*.orig.tar.*")
        unpack(archive, place)
    return place


def _mirror(made: job.TorchFlow) -> Any:
    pipeline = made.pipeline()
    return pipeline.execute(pipeline.plan()[:1])[0]


def _run_all(
    made: job.TorchFlow,
    folder: Path,
    packages: Path,
    out: Path,
    wanted: Sequence[Part],
    reasons: Reasons,
    limit_s: float,
) -> list[Told]:
    client, done = made.client, 0
    told: dict[Part, Told] = {}
    with (
        progress.bar("upstream's tests: files", total=len(wanted)) as bar,
        concurrent.futures.ThreadPoolExecutor(compile_jobs(made.config.build)) as pool,
    ):
        waiting = {
            pool.submit(_run_one, client, made, folder, packages, out, item, reasons, limit_s): item for item in wanted
        }
        try:
            for future in concurrent.futures.as_completed(waiting):
                item = waiting[future]
                told[item] = future.result()
                done += 1
                bar.update(done, note=str(item))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            process.interrupt_all()  # or the files that run would be waited for
            raise
    return [told[item] for item in wanted]


def _run_one(
    client: docker.DockerClient,
    made: job.TorchFlow,
    folder: Path,
    packages: Path,
    out: Path,
    item: Part,
    reasons: Reasons,
    limit_s: float,
) -> Told:
    stem = str(item).replace("/", "--").replace(" ", "-")
    log, collected = out / f"{stem}.jsonl", out / f"{stem}.collected.json"
    pytest = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # Names of tests begin at the folder, also for files in a folder of it.
    options = [f"--rootdir={_MOUNTED}", f"--report-log=/out/{log.name}"]
    plugin = ["-p", _PLUGIN.stem, f"--tell-collected=/out/{collected.name}", f"--part={item.part}/{item.parts}"]
    plugin += [f"--leave-out={pattern}" for pattern in reasons.left_out if _file_of(pattern) == item.file]
    began, hung = time.monotonic(), False
    try:
        run_in(
            client,
            made.config.image_reference("system"),
            # Ended from inside, so that a file that is cut off still tells what it saw.
            [
                *("timeout", "--signal=INT", "--kill-after=60", str(int(limit_s))),
                *(*pytest, *options, *plugin, item.file),
            ],
            architecture=made.target,
            binds=[f"{folder}:{_MOUNTED}:ro", f"{packages}:/packages:ro", f"{out}:/out:rw"],
            environment={
                "PYTHONPATH": "/packages",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "CI": "",
                # Upstream's tests run once for each device that there is; torch_qpu's is not what the wheel brings.
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                # ... and once for the lazy backend, which the recipe does not build: setting it up is all that fails.
                "PYTORCH_TESTING_DEVICE_EXCEPT_FOR": "lazy",
            },
            workdir=_MOUNTED,
            limit_s=limit_s + _LEFT_TO_END_S,
            log=made.log("upstream"),
            check=False,
        )
    except CommandTimedOut:
        hung = True
    lines = log.read_text().splitlines() if log.is_file() else []
    tests = Collected(**json.loads(collected.read_text())) if collected.is_file() else None
    return tally(item, lines, reasons, tests, seconds=time.monotonic() - began, limit_s=limit_s, hung=hung)


def tally(
    item: Part,
    lines: Sequence[str],
    reasons: Reasons,
    tests: Collected | None,
    *,
    seconds: float,
    limit_s: float,
    hung: bool = False,
) -> Told:
    """One file's result out of pytest-reportlog's lines (JSON, one a report); ``hung`` where no signal ended it.

    ``tests`` is None where pytest ended before it had collected them: such a file counts as failed, whatever status
    pytest ended with.
    """
    outcomes: dict[str, str] = {}
    said: dict[str, str] = {}
    torn_down: set[str] = set()
    status: int | None = None
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was cut off
        kind = report.get("$report_type")
        if kind == "SessionFinish":
            status = report["exitstatus"]
        elif kind == "CollectReport" and report["outcome"] == "failed":
            outcomes[report["nodeid"]], said[report["nodeid"]] = "failed", _last_line(report)
        elif kind == "TestReport":
            test, outcome = report["nodeid"], report["outcome"]
            if report["when"] == "teardown":
                torn_down.add(test)
            if outcome == "failed" or (outcome == "skipped" and report["when"] != "teardown"):
                outcomes[test] = outcome if outcomes.get(test) != "failed" else "failed"
                said.setdefault(test, _last_line(report))
                if outcome == "skipped" and "wasxfail" in report:
                    outcomes[test] = "passed"  # upstream expects it to fail, and it did
            elif report["when"] == "call":
                outcomes.setdefault(test, "passed")
    why = {test: _reason(test, reasons.explained) for test, outcome in outcomes.items() if outcome == "failed"}
    counts = Counter(
        "explained" if outcome == "failed" and why[test] else outcome for test, outcome in outcomes.items()
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
        said[str(item)] = ended
        why[str(item)] = ""
    if ended and counts["not run"]:
        ended += f": {len(to_run & torn_down)} of {len(to_run)} tests were run"
    return Told(
        str(item),
        counts,
        {test: said.get(test, "") for test, reason in why.items() if not reason},
        {test: reason for test, reason in why.items() if reason},
        ended,
        seconds,
        left_out,
        _unmet(item.file, reasons, {*tests.whole, *outcomes}) if tests else [],
    )


def _ended(status: int | None, tests: Collected | None, not_run: int, *, hung: bool, cut_off: str) -> str:
    """Why a file did not run to its end, or empty. ``status`` is pytest's own word, None where it said none."""
    if hung:
        return "hung, and no signal ended it"
    if status not in (None, 0, 1, 2, 5):
        return f"pytest ended with status {status}"
    if status in (0, 1, 5) and tests is not None and not not_run:
        return ""
    return cut_off or "ended by itself"


def _file_of(pattern: str) -> str:
    return pattern.partition("::")[0]


def _unmet(name: str, reasons: Reasons, tests: Collection[str]) -> list[str]:
    patterns = [pattern for pattern in (*reasons.explained, *reasons.left_out) if _file_of(pattern) == name]
    return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(test, pattern) for test in tests)]


def _reason(test: str, explained: Mapping[str, str]) -> str:
    return next((reason for pattern, reason in explained.items() if fnmatch.fnmatchcase(test, pattern)), "")


def _last_line(report: Mapping[str, Any]) -> str:
    told = report.get("longrepr")
    if isinstance(told, dict):
        told = (told.get("reprcrash") or {}).get("message", "")
    elif isinstance(told, list):
        told = told[-1]
    lines = [line for line in str(told or "").splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
