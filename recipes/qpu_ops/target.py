"""The extension wheel for the target, built by plain ``pip wheel`` inside the armv7 container.

torch and libqpu are mounted where the target has them, and the native compiler stands in for the emulated one
(images.native), which nothing in the wheel's own build knows of.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import docker

from images.containers import run_in
from images.flavour import Suite
from images.native import Mounts
from recipes import wheels
from recipes.qpu_ops import incremental
from recipes.recipe import Recipe
from toolchain import files
from toolchain.config import Config
from toolchain.jobs import compile_jobs

_DRIVERS = ("target.py", "native.py", "incremental.py")


def build(
    client: docker.DockerClient,
    dev_image: str,
    recipe: Recipe,
    config: Config,
    *,
    suite: Suite,
    compiler: Mounts,
    torch_site: Path,
    libqpu: Path,
    libqpu_prefix: str,
    folder: Path,
    log: Path,
    surroundings: Sequence[str] = (),
    reuse: bool = False,
) -> Path:
    """Build the wheel into ``folder`` and audit it; the wheel's path.

    ``torch_site`` and ``libqpu`` are staged roots. With ``reuse`` a kept build is brought up to date where there is
    one (recipes.qpu_ops.incremental) that was made in the same ``surroundings``: texts that identify what is mounted.

    Raises CommandFailed, PlatformMismatch or WheelUnusable.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    folder.mkdir(parents=True, exist_ok=True)
    packages = f"usr/local/lib/python{suite.python}/dist-packages"
    headers = files.tree_fingerprint(libqpu / libqpu_prefix.removeprefix("/") / "include")
    key = incremental.surroundings(recipe.folder, *surroundings, headers, str(bool(compiler.paths)))
    work = config.target_root / "work"
    kept = incremental.Kept(work / "qpu-ops-kept")

    def run(source: Path, out: Path, script: str) -> str:
        owner = work.stat()
        return run_in(
            client,
            dev_image,
            ["sh", "-euc", f"{script}; chown -R {owner.st_uid}:{owner.st_gid} /usr/src"],
            architecture=config.image.target,
            binds=[
                f"{source}:/usr/src/qpu_ops:rw",
                f"{out}:/usr/src/out:rw",
                f"{torch_site / packages}:/{packages}:ro",
                f"{libqpu / libqpu_prefix.removeprefix('/')}:{libqpu_prefix}:ro",
                *compiler.binds(),
            ],
            environment={
                **compiler.environment,
                "LIBQPU_PREFIX": libqpu_prefix,
                "MAX_JOBS": str(compile_jobs(config.build)),
                "SOURCE_DATE_EPOCH": str(config.image.source_date_epoch),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PIP_ROOT_USER_ACTION": "ignore",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            },
            workdir="/usr/src/qpu_ops",
            log=log,
            mend="the compiler's words are above; the sources are in recipes/qpu_ops",
        ).output

    with files.scratch_folder(work, "qpu-ops") as scratch:
        out = scratch / "out"
        out.mkdir()
        made = None
        if reuse:
            made = kept.rebuild(
                recipe.folder, key, lambda lines: run(kept.source, out, "; ".join(map(shlex.join, lines))), out
            )
        if made is None:
            full = incremental.Kept(scratch / "kept")
            ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "recipe.toml", *_DRIVERS)
            shutil.copytree(recipe.folder, full.source, ignore=ignored)
            wheel = (
                "python3 -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir --wheel-dir /usr/src/out"
            )
            output = run(full.source, out, f"{wheel} .")
            recipe.require_outputs(out)
            made = next(out.glob(recipe.outputs[0]))
            full.remember(key, output, made)
            files.remove(kept.folder)
            full.folder.rename(kept.folder)
        wheels.audit(made, config.image.target)
        for old in folder.glob(recipe.outputs[0]):
            old.unlink()
        return Path(shutil.move(made, folder / made.name))
