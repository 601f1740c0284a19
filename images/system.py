"""Build the system image: the root filesystem and one layer per recipe.

The Dockerfile is rendered from a template; it depends only on the arguments of ``render``. ``ADD`` unpacks the layers'
tar archives. Layers that change rarely come first, so a changed QPU kernel replaces only one small layer. Only
``ldconfig`` is emulated.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors

from engine.connect import ENGINE_ERRORS
from engine.containers import run_in
from engine.proxies import build_environment
from images.archive import LoadedImage, tar_of, verify
from toolchain import progress, templates
from toolchain.architecture import Architecture
from toolchain.errors import CommandFailed

LEFT_OUT = "pitorch.left_out"
"""Label: a JSON list of the pockets (by suite) that were omitted because their index could not be verified."""

WHEELS = "pitorch.wheels"
"""Label: the wheels in the image, as a JSON object that maps file names to their SHA-256."""

_TEMPLATE = Path(__file__).resolve().parent / "templates" / "Dockerfile.j2"

_LINE_MADE = re.compile(r"^ ---> ([0-9a-f]{12})$", re.MULTILINE)
"""Matches the line in which the engine names the new or cached image for a Dockerfile instruction."""

_INSPECT = """
import ctypes, importlib, json, platform, subprocess, sys, sysconfig
found = {"python": platform.python_version(), "platform": sysconfig.get_platform(), "modules": {}}
for name in json.loads(sys.argv[1]):
    found["modules"][name] = getattr(importlib.import_module(name), "__version__", "")
ctypes.CDLL("libqpu.so.1")
if json.loads(sys.argv[2]):
    found["qpu"] = json.loads(subprocess.run(["qpu-info", "--json"], check=True, capture_output=True).stdout)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Layer:
    """A tar archive that is unpacked into the image's root directory."""

    name: str
    tar: Path


def render(base: str, layers: Sequence[str], *, labels: Mapping[str, str], bootable: bool) -> str:
    """Return the Dockerfile's text."""
    values = {"base": base, "layers": list(layers), "labels": sorted(labels.items()), "bootable": bootable}
    return templates.render(_TEMPLATE, values, trim_blocks=True)


def build(
    client: docker.DockerClient,
    reference: str,
    dockerfile: str,
    layers: Sequence[Layer],
    architecture: Architecture,
) -> LoadedImage:
    """Build the image and verify its platform. A failed build leaves no untagged images behind.

    Raises CommandFailed with the engine's message.
    """
    total = sum(layer.tar.stat().st_size for layer in layers)
    with (
        progress.bar(f"build {reference}", total=total, in_bytes=True) as bar,
        contextlib.ExitStack() as on_failure,
    ):
        context = tar_of([("Dockerfile", dockerfile.encode())], [(layer.name, layer.tar) for layer in layers], bar)
        said: list[str] = []
        try:
            on_failure.callback(_remove_unfinished, client, said, _images_of(client))
            events = client.api.build(
                fileobj=context,  # type: ignore[arg-type] # requests accepts any iterable
                custom_context=True,
                tag=reference,
                platform=architecture.oci_platform,
                buildargs=build_environment(),
                network_mode="host",
                rm=True,
                forcerm=True,
                decode=True,
            )
            for event in events:
                if "error" in event:
                    raise _failed(reference, str(event["error"]), said)
                said.append(str(event.get("stream", "")))
        except docker.errors.APIError as fault:
            raise _failed(reference, str(fault.explanation), []) from fault
        except ENGINE_ERRORS as fault:
            raise _failed(reference, str(fault), said) from fault
        on_failure.pop_all()
    return verify(client, reference, architecture)


def _images_of(client: docker.DockerClient) -> set[str]:
    """Return the IDs of the engine's images, including intermediate ones, shortened as in the build output."""
    return {str(name).removeprefix("sha256:")[:12] for name in client.api.images(quiet=True, all=True)}


def _remove_unfinished(client: docker.DockerClient, said: Sequence[str], before: set[str]) -> None:
    """Remove a failed build's intermediate images, except those that existed before or are in use."""
    with contextlib.suppress(*ENGINE_ERRORS):
        for name in reversed([found for found in _LINE_MADE.findall("".join(said)) if found not in before]):
            with contextlib.suppress(docker.errors.APIError):
                client.api.remove_image(name, noprune=True)


def _failed(reference: str, found: str, said: Sequence[str]) -> CommandFailed:
    tail = "".join(said)[-1500:].strip()
    return CommandFailed(
        f"the engine did not build {reference}",
        expected="every instruction of the Dockerfile to succeed",
        found=found + (f"\n{tail}" if tail else ""),
        fix="run ./inv doctor to check the engine and emulation, then run ./inv build-image again",
    )


def inspect(
    client: docker.DockerClient,
    reference: str,
    architecture: Architecture,
    *,
    modules: Sequence[str],
    own_libqpu: bool,
    log: Path,
) -> dict[str, Any]:
    """Import the modules and load libqpu in a container created from the image; return the versions.

    ``own_libqpu`` is true if the image contains this project's libqpu and therefore qpu-info. If a module or libqpu
    cannot be loaded, CommandFailed is raised, so that the image is not recorded as a product.
    """
    argv = ["python3", "-c", _INSPECT, json.dumps(list(modules)), json.dumps(own_libqpu)]
    try:
        done = run_in(client, reference, argv, architecture=architecture, limit_s=900, log=log)
    except CommandFailed as fault:
        raise CommandFailed(
            f"{reference} was built, but failed the import test",
            expected=f"libqpu.so.1 and these modules to load: {', '.join(modules) or 'none'}",
            found=fault.tail.strip()[-1500:] or fault.found,
            fix=f"find the cause in {log}, correct it, then run ./inv build-image again",
        ) from fault
    found: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
    return found
