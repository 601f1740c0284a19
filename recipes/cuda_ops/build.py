"""``build-cuda-wheel``: the wheel of CUDA operators, compiled in a native container by nvcc. No GPU is needed.

::

    mirror ── cuda-builder ──┐
    native-python (headers) ─┴── cuda-wheel

The container has g++ (also the one for arm64), pip and setuptools; the CUDA toolkit and torch's headers are mounted
into it. For arm64 nvcc compiles for the same GPUs and calls the cross compiler for the rest.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.containers import run_in
from engine.start import ensure_running
from flow import native_checks as native
from flow.main_steps import Flow, alone
from images import rootfs
from images.flavour import packages_for
from recipes import recipe
from recipes.cuda_ops import audit, toolkit
from toolchain import files, progress
from toolchain.architecture import ARCHITECTURES, Architecture
from toolchain.config import Config
from toolchain.errors import PlatformMismatch, SourceUnavailable
from toolchain.jobs import compile_jobs
from toolchain.manifest import Manifest
from toolchain.steps import Decision, Made, Pipeline, Step

TARGETS = ("amd64", "arm64")
"""Machines that a wheel can be for: PCs, and boards with an NVIDIA GPU."""

_LIMIT_S = 3600.0
SUITE = "bookworm"
"""The older release, whatever the configured one is: what is linked there runs on newer systems, not the reverse."""
SOURCES = ("setup.py", "pyproject.toml", "csrc", "src")
"""What the wheel is made from; the rest of the recipe's folder drives that."""


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """What was built."""

    path: Path
    contents: str
    toolkit: str
    rows: tuple[progress.Row, ...]


class CudaFlow(Flow):
    """The steps for a wheel; the image is a native one, whatever the configured target is."""

    def __init__(self, config: Config, target: Architecture) -> None:
        image = dataclasses.replace(
            config.image, flavour="debian", suite=SUITE, architecture="amd64", profile="container"
        )
        super().__init__(dataclasses.replace(config, image=image))
        self.wheel_target = target
        self.recipe = recipe.load("cuda_ops")
        self.folder = config.build_root / "cuda"

    def __enter__(self) -> CudaFlow:
        return self

    def wheel_pipeline(self) -> Pipeline:
        """Mirror, image and wheel."""
        return Pipeline(self.root, (self._mirror(), self._cuda_builder(), self._cuda_wheel()))

    def _cuda_builder(self) -> Step:
        packages = packages_for("cuda", self.image)

        def action(needs: Mapping[str, Manifest]) -> Made:
            spec = self.root_spec("cuda-builder", packages, needs["mirror"], (self.native,))
            tar = self.root / "cuda-builder.tar"
            rootfs.build_native_tar(dataclasses.replace(spec, keyring_package=""), tar, self.log("cuda-builder"))
            return self._loaded("cuda-builder", tar, self.native)

        return Step(
            name="cuda-builder",
            title="CUDA builder image",
            inputs=self._root_inputs(packages),
            needs=("mirror",),
            action=action,
            missing=self._image_missing("cuda-builder"),
        )

    def _cuda_wheel(self) -> Step:
        target, data = self.wheel_target, self.recipe

        def action(_: Mapping[str, Manifest]) -> Made:
            tools = toolkit.obtain(data, self.config, target)
            made = self._compile(tools)
            found = audit.audit(made, target, self.config.cuda.architectures)
            return Made((made,), facts={"contents": found.text(), "toolkit": tools.origin})

        return Step(
            name=f"cuda-wheel-{target.debian}",
            title=f"{data.title} for {target.debian}",
            inputs={
                "sources": data.fingerprint(),
                "driver": files.tree_fingerprint(data.folder, "build.py", "audit.py", "toolkit.py"),
                "architectures": " ".join(self.config.cuda.architectures),
                "toolkit": toolkit.identity(data, self.config),
                "headers": native.TORCH,
            },
            needs=("cuda-builder",),
            action=action,
        )

    def _compile(self, tools: toolkit.Toolkit) -> Path:
        """Run ``pip wheel`` in the container; the wheel, not yet audited."""
        target, log = self.wheel_target, self.log(f"cuda-wheel-{self.wheel_target.debian}")
        include = torch_include(self.config)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        command = (
            "python3 -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir --wheel-dir /usr/src/out ."
        )
        with files.scratch_folder(self.folder, "wheel") as scratch:
            source, out = scratch / "source", scratch / "out"
            out.mkdir()
            source.mkdir()
            for name in SOURCES:
                origin = self.recipe.folder / name
                if origin.is_dir():
                    shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
                else:
                    shutil.copy2(origin, source / name)
            owner = scratch.stat()
            run_in(
                self.client,
                self.config.image_reference("cuda-builder"),
                ["sh", "-euc", f"{command}; chown -R {owner.st_uid}:{owner.st_gid} /usr/src/cuda_ops /usr/src/out"],
                architecture=self.native,
                binds=[
                    f"{source}:/usr/src/cuda_ops:rw",
                    f"{out}:/usr/src/out:rw",
                    f"{tools.home}:/usr/local/cuda:ro",
                    f"{tools.runtime}:/usr/src/cudart:ro",
                    f"{include}:/usr/src/torch:ro",
                ],
                environment={
                    "CUDA_HOME": "/usr/local/cuda",
                    "CUDA_OPS_ARCHITECTURES": ";".join(self.config.cuda.architectures),
                    "CUDA_OPS_CUDART": "/usr/src/cudart",
                    "CUDA_OPS_TORCH_INCLUDE": "/usr/src/torch",
                    "CUDA_OPS_PLATFORM": target.wheel_platform,
                    "CUDA_OPS_JOBS": str(compile_jobs(self.config.build)),
                    "CXX": f"{target.gnu}-g++",
                    "SOURCE_DATE_EPOCH": str(self.image.source_date_epoch),
                    "PIP_ROOT_USER_ACTION": "ignore",
                    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                },
                workdir="/usr/src/cuda_ops",
                limit_s=_LIMIT_S,
                log=log,
                fix="the compiler's words are above; the sources are in recipes/cuda_ops",
            )
            self.recipe.require_outputs(out)
            (made,) = out.glob(self.recipe.outputs[0])
            wheels = self.folder / "wheels"
            wheels.mkdir(parents=True, exist_ok=True)
            return made.replace(wheels / made.name)


def torch_include(config: Config) -> Path:
    """Headers of the torch that the native checks have installed. Raises SourceUnavailable."""
    root = native.folder_of(config) / "venv"
    for found in root.glob("lib/python*/site-packages/torch/include"):
        return found
    raise SourceUnavailable(
        "torch's headers are not there",
        expected=f"torch/include in {root}",
        found="no such folder",
        fix="run the task again: it makes that environment",
    )


def plan(config: Config, architecture: str = "amd64") -> list[Decision]:
    """Which steps would run, and why."""
    with CudaFlow(config, target_of(architecture)) as flow:
        return flow.wheel_pipeline().plan()


def build_wheel(config: Config, architecture: str = "amd64") -> Wheel:
    """Bring the wheel for a machine up to date. Raises the UserError of the step that failed."""
    target = target_of(architecture)
    ensure_running(config)
    native.ready_python(config)
    with CudaFlow(config, target) as flow, alone(flow.root):
        pipeline = flow.wheel_pipeline()
        made = pipeline.execute(pipeline.plan())[-1]
    wheel = made.artefact(".whl")
    row = progress.row_of(wheel.path.name, wheel, made.seconds, made.facts["contents"])
    return Wheel(path=wheel.path, contents=made.facts["contents"], toolkit=made.facts["toolkit"], rows=(row,))


def target_of(architecture: str) -> Architecture:
    """The machine by Debian's name. Raises PlatformMismatch for one that no wheel can be for."""
    if architecture not in TARGETS:
        raise PlatformMismatch(
            "there is no CUDA for that machine",
            expected=f"one of {', '.join(TARGETS)}",
            found=architecture,
            fix=f"./inv build-cuda-wheel --architecture={TARGETS[0]}",
        )
    return ARCHITECTURES[architecture]
