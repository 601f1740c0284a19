"""Run a model in eager PyTorch on the board, in float32 and in int8, for comparison with TVM."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from device.remote import loader_session
from device.remote.address import LOADER_KINDS, Address
from device.remote.environment import TvmEnvironment
from device.remote.targets import Target
from engine.connect import connect
from engine.containers import run_in
from toolchain import files, progress
from toolchain.architecture import host_architecture
from toolchain.config import Config
from toolchain.errors import UserError

SCRIPT = loader_session.SOURCE / "torch_session.py"
PRECISIONS = ("float32", "int8")


@dataclass(frozen=True, kw_only=True)
class Eager:
    """The results of a model in eager PyTorch in one precision. If the model was not run, ``reason`` states why."""

    precision: str
    reason: str = ""
    seconds: tuple[float, ...] = ()
    """The latency of each run."""
    difference: float = 0.0
    """The largest absolute difference from eager PyTorch (float32) on this PC, in the output for which
    ``difference / largest`` is largest."""
    largest: float = 0.0
    """The largest absolute value of the same output on this PC."""
    peak_memory_bytes: int = 0
    """The peak memory of the process on the board, including the Python interpreter and PyTorch."""
    threads: int = 0
    torch: str = ""
    """The version of PyTorch on the board."""

    @property
    def median_s(self) -> float | None:
        """The median latency."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def p90_s(self) -> float | None:
        """The latency that 90 % of the runs do not exceed (90th percentile)."""
        return float(numpy.quantile(self.seconds, 0.9)) if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """All fields, the median latency and the 90th percentile, as a dictionary for JSON."""
        return {**dataclasses.asdict(self), "median_s": self.median_s, "p90_s": self.p90_s}


def measure(
    config: Config, target: Target, address: Address, description: bytes, environment: TvmEnvironment
) -> tuple[Eager, ...]:
    """Run the model that ``description`` contains (see ``model_graph``) on the board, in each precision.

    ``environment`` has this PC's PyTorch. Errors are not raised, because TVM's measurement remains valid. Instead, an
    error becomes the ``reason`` in each result.
    """
    if address.kind == "adb":
        return not_run("phones have no Python with PyTorch")
    if address.kind not in LOADER_KINDS:
        return not_run("TVM's server does not run PyTorch: use a tree:// or ssh:// address")
    try:
        with progress.step(f"run the model in PyTorch on {address}"):
            results = _results(config, target, address, description, environment)
    except UserError as fault:
        return not_run(f"{fault.summary}: {fault.found}" if fault.found else fault.summary)
    return tuple(
        Eager(precision=precision, **{**result, "seconds": tuple(result.get("seconds", ()))})
        for precision, result in results.items()
    )


def not_run(reason: str) -> tuple[Eager, ...]:
    """Return a result without measurements for each precision; ``reason`` explains why the model was not run."""
    return tuple(Eager(precision=precision, reason=reason) for precision in PRECISIONS)


def _results(
    config: Config, target: Target, address: Address, description: bytes, environment: TvmEnvironment
) -> Mapping[str, Any]:
    if address.kind == "emulator" and target.architecture != host_architecture():
        return _in_container(config, target, description)
    with loader_session.session(config, target, address, loader=SCRIPT, python=environment) as board:
        return board.torch(description)


def _in_container(config: Config, target: Target, description: bytes) -> Mapping[str, Any]:
    """Run the session in a container of the system image, because this PC has no PyTorch for the emulated CPU."""
    image = dataclasses.replace(config.image, architecture=target.architecture.debian)
    reference = dataclasses.replace(config, image=image).image_reference("system")
    remote = config.remote
    with (
        files.scratch_folder(config.build_root / "remote", "torch") as scratch,
        contextlib.closing(connect()) as client,
    ):
        (scratch / "request").write_bytes(f"torch {len(description)}\n".encode() + description)
        limits = f"/run/pitorch.lock {remote.queue_limit_s:g} {remote.session_limit_s:g}"
        run_in(
            client,
            reference,
            ["sh", "-c", f"exec python3 /mnt/session.py {limits} </mnt/scratch/request >/mnt/scratch/answer"],
            architecture=target.architecture,
            binds=[f"{SCRIPT}:/mnt/session.py:ro", f"{scratch}:/mnt/scratch:rw"],
            limit_s=remote.session_limit_s + loader_session.GRACE_S,
        )
        _, result = (scratch / "answer").read_bytes().split(b"\n", 2)[1:]
        return dict(json.loads(result))
