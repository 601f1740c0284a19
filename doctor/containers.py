"""Check the Docker engine's version, storage driver and disk space, and build an image for the target with it."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import uuid
from collections.abc import Mapping

from doctor.finding import Finding, described, fail, guarded, ok, warn
from doctor.resources import check_engine_disk, on_another_disk
from engine.connect import ENGINE_ERRORS, connect
from engine.start import EngineInfo, ensure_running
from images import probe
from toolchain.config import Config
from toolchain.errors import UserError, of_system

_OLDEST_ENGINE = (20, 10)
_SLOW_DRIVERS = ("vfs", "fuse-overlayfs")
_ENGINE_DONE = "read its version and storage driver"


def engine_findings(config: Config) -> list[Finding]:
    """Return the findings on the engine; start an engine if none is running."""
    try:
        info = ensure_running(config)
    except (UserError, OSError) as problem:
        fault = of_system(problem) if isinstance(problem, OSError) else problem
        return [
            fail("engine", _ENGINE_DONE, described(fault), fault.fix),
            fail(
                "container", "nothing", "not tried, because no engine can be used", "first apply the fix for 'engine'"
            ),
        ]
    findings = [judge_engine(info), guarded("container", lambda: check_container(config.image.target.oci_platform))]
    if on_another_disk(info.data_root, config.build_root):
        findings.append(guarded("engine's disk", lambda: check_engine_disk(info.data_root)))
    return findings


def judge_engine(info: EngineInfo) -> Finding:
    """Return the finding on the engine's version and storage driver."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", info.version)[:2])
    origin = "started here" if info.started_here else "found running"
    layers = f"storage {info.storage_driver}, cgroup version {info.cgroup_version or 'unknown'}"
    found = f"version {info.version} at {info.address}, {origin}; {layers}"
    if numbers < _OLDEST_ENGINE:
        fix = "install Docker 20.10 or newer (Debian: apt-get install docker.io)"
        return fail("engine", _ENGINE_DONE, found, fix)
    if info.storage_driver in _SLOW_DRIVERS:
        fix = (
            "put the engine's data-root on ext4 or xfs, where overlay2 works (if the engine runs in a container, on a "
            f"volume); {info.storage_driver} copies whole layers, which takes time and disk space"
        )
        return warn("engine", _ENGINE_DONE, found, fix)
    return ok("engine", _ENGINE_DONE, found)


def check_container(oci_platform: str) -> Finding:
    """Build an image for the target's platform, run a small ARM program in it, and check the image's platform."""
    name = "container"
    tag = f"pitorch-doctor:{uuid.uuid4().hex}"
    done = f"built an image with COPY and RUN for {oci_platform}, and inspected it"
    client = connect(timeout_s=120)
    try:
        output: list[str] = []
        dockerfile = b'FROM scratch\nCOPY probe /\nRUN ["/probe"]\n'
        events = client.api.build(
            fileobj=_context({"Dockerfile": (dockerfile, 0o644), "probe": (probe.elf(), 0o755)}),
            custom_context=True,
            platform=oci_platform,
            tag=tag,
            decode=True,
            rm=True,
            forcerm=True,
            nocache=True,
            network_mode="none",
        )
        error = ""
        for event in events:
            output.append(event.get("stream", ""))
            error = error or event.get("error", "")
        if error or probe.MESSAGE.decode().strip() not in "".join(output):
            found = error or "the program in the container did not print the expected line"
            fix = (
                "apply the fix for 'binfmt flags' above: the flags must include F; if the engine runs in a container, "
                "start that container with --privileged"
            )
            return fail(name, done, found, fix)
        image = client.images.get(tag).attrs
    except ENGINE_ERRORS as fault:
        return fail(name, done, str(fault)[:400], "find the cause in the engine's log")
    finally:
        with contextlib.suppress(*ENGINE_ERRORS):
            client.images.remove(tag, force=True)
        client.close()
    platform = "/".join(part for part in (image["Os"], image["Architecture"], image.get("Variant", "")) if part)
    found = f"the program ran; the image's platform is {platform}"
    if platform != oci_platform:
        return fail(name, done, found, "use an engine that supports --platform")
    return ok(name, done, found)


def _context(members: Mapping[str, tuple[bytes, int]]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (content, mode) in members.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    return packed
