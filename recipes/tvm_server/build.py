"""Install TVM's RPC server into a staged root: pip on this PC installs the wheels for the target."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import docker

from engine.containers import run_in
from images.flavour import Suite
from recipes.recipe import Recipe
from toolchain import files
from toolchain.architecture import Architecture
from toolchain.config import ROOT
from toolchain.errors import CommandFailed, WheelUnusable
from toolchain.manifest import Artefact
from wheels.pip import for_target, run_pip

GROUP = "remote"
SERVER = Path(__file__).with_name("board_server.py")
_LIMIT_S = 1800.0
_SERVES = re.compile(r"TVM (\S+) serves")


def pins() -> tuple[str, ...]:
    """Return TVM and its dependencies as NAME==VERSION, from the optional dependency group in pyproject.toml."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return tuple(data["project"]["optional-dependencies"][GROUP])


def stage(recipe: Recipe, target: Architecture, suite: Suite, root: Path, log: Path) -> tuple[Artefact, ...]:
    """Install the server into ``root``; return the installed wheels, sorted by name. Their files do not remain.

    Raises NetworkUnreachable, or WheelUnusable if there are no wheels for the target.
    """
    site = root / recipe.settings["prefix"].removeprefix("/")
    with files.scratch_folder(root.parent, "wheels") as fetched:
        _install(target, suite, fetched, site, log)
        wheels = tuple(Artefact.of(path) for path in sorted(fetched.glob("*.whl")))
    for name in recipe.settings["left_out"].split():
        files.remove(site / name)
    shutil.copy2(SERVER, site / SERVER.name)
    shutil.copytree(recipe.folder / "files", root, dirs_exist_ok=True)
    return wheels


def check(client: docker.DockerClient, reference: str, target: Architecture, log: Path) -> str:
    """Start the server in a finished image; return the TVM version that it reports. Raises CommandFailed."""
    try:
        said = run_in(
            client, reference, ["pitorch-rpc-server", "--check"], architecture=target, limit_s=_LIMIT_S, log=log
        ).output
    except CommandFailed as fault:
        raise CommandFailed(
            f"TVM's server does not start in {reference}",
            expected="exit status 0 from pitorch-rpc-server --check",
            found=fault.tail.strip()[-1500:] or fault.found,
            fix=f"read the full output in {log}",
        ) from fault
    found = _SERVES.search(said)
    return found[1] if found else ""


def _install(target: Architecture, suite: Suite, fetched: Path, site: Path, log: Path) -> None:
    """Download the wheels to ``fetched``, then install these files into ``site``."""
    download: list[str | Path] = ["download", "--dest", fetched]
    # If the files were named, pip would write their paths to direct_url.json.
    install: list[str | Path] = ["install", "--no-index", "--find-links", fetched, "--no-compile", "--target", site]
    for words in (download, install):
        run_pip(
            [*words, "--no-deps", *for_target(target, suite), *pins()],
            what=f"TVM's server for {suite.name} {target.debian}",
            log=log,
            fix="set remote.server_in_image to false; boards without the server run kernels in the loader "
            "(docs/remote.md)",
            missing=WheelUnusable,
            limit_s=_LIMIT_S,
        )
