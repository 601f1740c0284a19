"""Check the apt mirror and the Python package index."""

from __future__ import annotations

import sys
from pathlib import Path

from doctor.finding import RUN_LIMIT_S, Finding, fail, ok, warn
from engine.proxies import SOCKS_FIX, SOCKS_MISSING
from images import apt
from toolchain import process
from toolchain.config import Config
from toolchain.errors import CommandFailed, MirrorPocketUnusable

_MIRROR_LIMIT_S = 120.0


def check_mirror(config: Config, folder: Path) -> Finding:
    """Fetch and verify the apt mirror's package lists as a build does, in a temporary folder."""
    existing = config.build_root / "keys"
    keyrings = existing if existing.is_dir() else folder / "keys"
    sources = apt.sources_for(config, keyrings)
    apt.fetch_keys(config, keyrings)
    return check_pockets(sources, folder / "mirror", strict=config.image.strict)


def check_pockets(sources: tuple[apt.Source, ...], folder: Path, *, strict: bool) -> Finding:
    """Fetch and verify the package lists of the given sources."""
    name = "apt mirror"
    done = f"fetched and verified the lists of {len(sources)} pockets"
    fix = "set image.mirror in invoke.yaml to a complete mirror; if this machine needs a proxy, set http_proxy"
    try:
        verified = apt.verify(sources, folder, strict=False, limit_s=_MIRROR_LIMIT_S)
    except MirrorPocketUnusable as fault:
        return fail(name, done, f"{fault.summary}: {fault.found}", fix)
    if verified.warnings:
        return (fail if strict else warn)(name, done, "; ".join(verified.warnings), fix)
    hosts = ", ".join(dict.fromkeys(source.uri for source in sources))
    return ok(name, done, f"all signatures are valid: {hosts}")


def check_package_index(folder: Path) -> Finding:
    """Download a small package with the user's pip configuration (index, proxy, certificates)."""
    name = "package index"
    done = "downloaded a small package with pip"
    try:
        words = ["--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder / "wheel"), "six"]
        process.run([sys.executable, "-m", "pip", "download", *words], limit_s=RUN_LIMIT_S)
    except CommandFailed as fault:
        found = fault.tail.strip().splitlines()[-1:] or [fault.found]
        fix = (
            SOCKS_FIX
            if SOCKS_MISSING in fault.tail
            else "if this machine needs a proxy, set https_proxy; otherwise, check index-url in pip.conf"
        )
        return warn(name, done, found[0], fix)
    return ok(name, done, "the index responds")
