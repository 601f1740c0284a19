"""Build the CUDA operator wheel with nvcc in a native container. No GPU is needed.

The container has g++ (and the cross compiler for arm64), pip and setuptools. The CUDA toolkit and torch's headers are
mounted into it. For arm64, nvcc compiles the same GPU code and calls the cross compiler for the host code.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import docker

from engine.containers import run_in
from recipes.cuda_ops.toolkit import Toolkit
from recipes.recipe import Recipe
from toolchain import files
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.jobs import compile_jobs

_LIMIT_S = 3600.0
SOURCES = ("setup.py", "pyproject.toml", "csrc", "src")
"""The wheel's sources. The other files in the recipe's folder are not part of the wheel."""
_PIP_WHEEL = "python3 -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir --wheel-dir /usr/src/out ."


def build(
    client: docker.DockerClient,
    builder: str,
    recipe: Recipe,
    config: Config,
    target: Architecture,
    toolkit: Toolkit,
    include: Path,
    log: Path,
) -> Path:
    """Run ``pip wheel`` in the image ``builder``; return the path of the wheel, which is not audited yet.

    ``include`` is the folder of torch's headers.
    """
    folder = config.build_root / "cuda"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    with files.scratch_folder(folder, "wheel") as scratch:
        source, out = scratch / "source", scratch / "out"
        out.mkdir()
        source.mkdir()
        for name in SOURCES:
            origin = recipe.folder / name
            if origin.is_dir():
                shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy2(origin, source / name)
        owner = scratch.stat()
        give_back = f"trap 'chown -R {owner.st_uid}:{owner.st_gid} /usr/src/cuda_ops /usr/src/out' EXIT"
        run_in(
            client,
            builder,
            ["sh", "-euc", f"{give_back}; {_PIP_WHEEL}"],
            architecture=host_architecture(),
            binds=[
                f"{source}:/usr/src/cuda_ops:rw",
                f"{out}:/usr/src/out:rw",
                f"{toolkit.home}:/usr/local/cuda:ro",
                f"{toolkit.runtime}:/usr/src/cudart:ro",
                f"{include}:/usr/src/torch:ro",
            ],
            environment={
                "CUDA_HOME": "/usr/local/cuda",
                "CUDA_OPS_ARCHITECTURES": ";".join(config.cuda.architectures),
                "CUDA_OPS_CUDART": "/usr/src/cudart",
                "CUDA_OPS_TORCH_INCLUDE": "/usr/src/torch",
                "CUDA_OPS_PLATFORM": target.wheel_platform,
                "CUDA_OPS_JOBS": str(compile_jobs(config.build)),
                "CXX": f"{target.gnu}-g++",
                "SOURCE_DATE_EPOCH": str(config.image.source_date_epoch),
                "PIP_ROOT_USER_ACTION": "ignore",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            },
            workdir="/usr/src/cuda_ops",
            limit_s=_LIMIT_S,
            log=log,
            fix="read the compiler's messages above, and correct the sources in recipes/cuda_ops",
        )
        recipe.require_outputs(out)
        (made,) = out.glob(recipe.outputs[0])
        wheels = folder / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        return made.replace(wheels / made.name)
