"""Build torchvision and torchaudio: cross-compile them in the native builder image against a torch wheel's files.

The folder ``prebuilt`` contains the wheels that match the torch wheel in this repository, so a first build does not
have to compile them. The folder is a copy of the wheels' entry in the artefact cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import docker

from engine.containers import run_in
from images import apt
from images.flavour import Suite
from recipes.recipe import HERE, Recipe, load
from recipes.torch import audit, published
from toolchain import files
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config
from toolchain.jobs import compile_jobs
from wheels import artefacts
from wheels import find as wheels

NAME = "companions"
"""Name of the recipe and of the artefact."""
PREBUILT = HERE / NAME / "prebuilt"
"""Folder of the wheels in this repository."""
_HOME = "/usr/src/companions"
_FIX = "correct the recipe in recipes/companions, or set image.companions: false to omit torchvision and torchaudio"


def unfit(version: str) -> str:
    """Return the reason why torchvision and torchaudio do not fit this version of torch, or an empty string."""
    if not version:
        return "there is no torch wheel"
    wanted = load(NAME).settings["torch"]
    return "" if version.startswith(f"{wanted}.") else f"they require torch {wanted}, but the torch wheel is {version}"


def recipe_key(data: Recipe, target: Architecture, suite: Suite, torch: str) -> str:
    """Hash the torch wheel's SHA-256 and everything in this repository that determines the wheels."""
    return artefacts.key_of(data.fingerprint(), suite.name, target.debian, torch)


def finished(config: Config, key: str) -> tuple[tuple[Path, ...], str]:
    """Return the finished wheels for a recipe key, and their origin. Raises ArtefactDamaged."""
    if cached := artefacts.of_recipe(config, NAME, key):
        return cached, "from the artefact cache"
    return artefacts.prebuilt(PREBUILT, NAME, key), "the wheel in this repository"


def listing(config: Config) -> str:
    """Return the keys in the artefact cache as a step input, because the result of ``finished`` depends on them."""
    return " ".join(artefacts.keys(config, NAME))


def published_for(config: Config, torch: str, *, fetch: bool = True) -> list[Path]:
    """Return the package index's wheels that match the torch wheel with this SHA-256; empty if there are none.

    The wheels are audited. Without ``fetch``, only wheels that were fetched before are returned. Raises the same
    exceptions as ``published.obtain`` and ``wheels.find.audit``.
    """
    pins = published.pins(config)
    if not pins or pins[0].sha256 != torch:
        return []
    found = [published.obtain(pin, config) for pin in pins[1:] if fetch or published.place(pin, config).is_file()]
    for wheel in found:
        wheels.audit(wheel, config.image.target)
    return found


def fetch(data: Recipe, source: apt.Source, folder: Path, log: Path) -> dict[str, Path]:
    """Fetch each package's source archive into ``folder`` unless it is already there. Raises SourceUnavailable."""
    places = {}
    for name, package in data.tables["package"].items():
        places[name] = folder / Path(package["archive"]).name
        apt.fetch_file(source, package["archive"], package["sha256"], places[name], log)
    return places


def build(
    client: docker.DockerClient,
    builder: str,
    data: Recipe,
    config: Config,
    suite: Suite,
    archives: Mapping[str, Path],
    torch_site: Path,
    scratch: Path,
    log: Path,
) -> list[Path]:
    """Build the wheels in the image ``builder`` and return their paths. They are not audited yet."""
    target = config.image.target
    packages = _packages(suite)
    owner = scratch.stat()
    lines = [f"trap 'chown -R {owner.st_uid}:{owner.st_gid} {_HOME}' EXIT"]
    for name, archive in archives.items():
        lines += [
            f"mkdir {name}",
            f"tar --extract --file /usr/src/{archive.name} --directory {name} --strip-components=1 --no-same-owner",
            f"for patch in /usr/src/recipe/patches/{name}/*.patch; do [ -e $patch ] || continue",
            f"patch --directory={name} --strip=1 --forward --batch --fuzz=0 --input=$patch; done",
            f"(cd {name}; PACKAGE={name} python3 /usr/src/recipe/inside/setup.py bdist_wheel --dist-dir {_HOME}/out)",
        ]
    run_in(
        client,
        builder,
        ["sh", "-euc", "\n".join(lines)],
        architecture=host_architecture(),
        binds=[
            f"{scratch}:{_HOME}:rw",
            f"{data.folder}:/usr/src/recipe:ro",
            f"{torch_site / packages}:/{packages}:ro",
            *(f"{archive.resolve()}:/usr/src/{archive.name}:ro" for archive in archives.values()),
        ],
        environment={
            "TORCH_FILES": f"/{packages}/torch",
            "MAX_JOBS": str(compile_jobs(config.build)),
            "SOURCE_DATE_EPOCH": data.settings["epoch"],
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "_PYTHON_HOST_PLATFORM": target.wheel_platform.replace("_", "-", 1),
            "_PYTHON_SYSCONFIGDATA_NAME": f"_sysconfigdata__{target.gnu}",
        },
        workdir=_HOME,
        log=log,
        fix=f"read the compiler's messages above or in {log}; {_FIX}",
    )
    out = scratch / "out"
    data.require_outputs(out)
    return sorted(out.glob("*.whl"))


def _packages(suite: Suite) -> str:
    return f"usr/local/lib/python{suite.python}/dist-packages"


def examine(wheel: Path, torch_site: Path, target: Architecture, suite: Suite) -> audit.Examined:
    """Audit a wheel by the same rules as the torch wheel. It may use torch's libraries in ``torch_site``.

    The wheel must be stripped, and must not contain paths from its build. Raises WheelUnusable or PlatformMismatch.
    """
    # NEON is permitted: the libraries for image formats use it only if the CPU supports it.
    torch = sorted((torch_site / _packages(suite)).glob("torch*/**/*.so*"))
    return audit.examine_stripped(wheel, target, suite, flags="neon", home=_HOME, extends=torch, fix=_FIX)


def place(made: Sequence[Path], folder: Path, data: Recipe) -> tuple[Path, ...]:
    """Replace the wheels in ``folder`` with copies of ``made``, and return the paths of the copies."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in data.outputs:
        for old in folder.glob(pattern):
            old.unlink()
    for wheel in made:
        with files.replacing(folder / wheel.name) as aside:
            shutil.copyfile(wheel, aside)
    return tuple(folder / wheel.name for wheel in made)
