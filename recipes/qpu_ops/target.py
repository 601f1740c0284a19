"""Build the extension wheel for the target in one of two environments.

One environment is the native builder image, which the main job uses by default. The wheel is cross-compiled there
against torch's files, with the headers and settings of the target's Python. Cross-compilation requires neither
emulation nor the development root.

The other environment is the armv7 container, in which plain ``pip wheel`` builds the wheel, as a user would. In the
container, torch and libqpu are installed as on the target. The native compiler can replace the emulated compiler there
(images.native) without a change to the wheel's own build. Both environments produce the same wheel, byte for byte; a
test compares the wheels.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import docker

from engine.containers import run_in
from images.flavour import Suite
from images.native import Mounts
from recipes.qpu_ops import incremental
from recipes.recipe import Recipe
from toolchain import files
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.jobs import compile_jobs
from wheels import find as wheels

_DRIVERS = ("target.py", "native.py", "incremental.py")


_PIP_WHEEL = "python3 -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir --wheel-dir /usr/src/out ."
# The function that pip would call; the builder image has no pip.
_BACKEND = """python3 -c 'import sys
sys.path.insert(0, "backend")
import build_with_installed_torch as backend
print(backend.build_wheel("/usr/src/out"))'"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """An environment for compiling the wheel: an image, the mounts of its container, and the script to run in it.

    The working folder contains the sources. The wheel is written to /usr/src/out.
    """

    image: str
    image_id: str
    architecture: Architecture
    script: str
    mounts: Mounts = field(default_factory=Mounts)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A string that identifies the environment. It changes if the same sources could produce a different wheel."""
        return f"{self.image_id} {sorted(self.mounts.paths)} {self.script}"


def container(image: str, image_id: str, target: Architecture, compiler: Mounts) -> Place:
    """Return the environment for a build in the target's emulated development root, with the mounts in ``compiler``."""
    environment = {
        **compiler.environment,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return Place(
        image=image,
        image_id=image_id,
        architecture=target,
        script=_PIP_WHEEL,
        mounts=compiler,
        environment=environment,
    )


def crossed(image: str, image_id: str, target: Architecture, suite: Suite) -> Place:
    """Return the environment for a build in the native builder image, whose Python has the target's settings."""
    environment = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_FILES": f"/{_packages(suite)}/torch",
        "_PYTHON_HOST_PLATFORM": target.wheel_platform.replace("_", "-", 1),
        "_PYTHON_SYSCONFIGDATA_NAME": f"_sysconfigdata__{target.gnu}",
    }
    return Place(
        image=image,
        image_id=image_id,
        architecture=host_architecture(),
        script=_BACKEND,
        environment=environment,
    )


def _packages(suite: Suite) -> str:
    return f"usr/local/lib/python{suite.python}/dist-packages"


def build(
    client: docker.DockerClient,
    place: Place,
    recipe: Recipe,
    config: Config,
    *,
    suite: Suite,
    torch_site: Path,
    libqpu: Path,
    libqpu_prefix: str,
    folder: Path,
    log: Path,
    surroundings: Sequence[str] = (),
    reuse: bool = False,
) -> Path:
    """Build the wheel into ``folder``, audit it, and return its path.

    ``torch_site`` and ``libqpu`` contain torch and libqpu, with the same layout as the target's root filesystem.
    ``surroundings`` are strings that identify the mounted files. If ``reuse`` is true and the previous build had the
    same ``surroundings``, that build is updated (recipes.qpu_ops.incremental).

    Raises CommandFailed, PlatformMismatch or WheelUnusable.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    folder.mkdir(parents=True, exist_ok=True)
    packages = _packages(suite)
    headers = files.tree_fingerprint(libqpu / libqpu_prefix.removeprefix("/") / "include")
    key = incremental.surroundings(recipe.folder, *surroundings, headers, place.identity)
    work = config.target_root / "work"
    previous = incremental.PreviousBuild(work / "qpu-ops-previous")

    def run(source: Path, out: Path, script: str) -> str:
        owner = work.stat()
        return run_in(
            client,
            place.image,
            ["sh", "-euc", f"trap 'chown -R {owner.st_uid}:{owner.st_gid} /usr/src' EXIT; {script}"],
            architecture=place.architecture,
            binds=[
                f"{source}:/usr/src/qpu_ops:rw",
                f"{out}:/usr/src/out:rw",
                f"{torch_site / packages}:/{packages}:ro",
                f"{libqpu / libqpu_prefix.removeprefix('/')}:{libqpu_prefix}:ro",
                *place.mounts.binds(),
            ],
            environment={
                **place.environment,
                "LIBQPU_PREFIX": libqpu_prefix,
                "MAX_JOBS": str(compile_jobs(config.build)),
                "SOURCE_DATE_EPOCH": str(config.image.source_date_epoch),
            },
            workdir="/usr/src/qpu_ops",
            log=log,
            fix="read the compiler's messages above, and correct the sources in recipes/qpu_ops",
        ).output

    with files.scratch_folder(work, "qpu-ops") as scratch:
        out = scratch / "out"
        out.mkdir()
        made = None
        if reuse:
            made = previous.rebuild(
                recipe.folder, key, lambda lines: run(previous.source, out, "; ".join(map(shlex.join, lines))), out
            )
        if made is None:
            full = incremental.PreviousBuild(scratch / "previous")
            ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "recipe.toml", *_DRIVERS)
            shutil.copytree(recipe.folder, full.source, ignore=ignored)
            output = run(full.source, out, place.script)
            recipe.require_outputs(out)
            made = next(out.glob(recipe.outputs[0]))
            full.remember(key, output, made)
            files.remove(previous.folder)
            full.folder.rename(previous.folder)
        wheels.audit(made, config.image.target)
        for old in folder.glob(recipe.outputs[0]):
            old.unlink()
        return Path(shutil.move(made, folder / made.name))
