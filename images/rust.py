"""Provide a native Rust toolchain in an emulated container, in addition to the native compiler (images.native).

The distribution's rustc and Cargo run natively on this PC. They compile for the target and use the target's Rust
standard library. The toolchain is in one folder; two small programs in /usr/bin start rustc and Cargo with the
toolchain's own libraries. Build scripts and procedural macros of crates run on this PC, so the folder also contains a C
compiler to link them.

setuptools-rust and maturin read the target from ``CARGO_BUILD_TARGET``, and PyO3 reads the settings of the target's
Python from ``PYO3_CROSS_LIB_DIR``.
"""

from __future__ import annotations

from pathlib import Path

from images.flavour import Suite
from images.native import Mounts
from toolchain.architecture import Architecture, host_architecture

PLACE = "/usr/libexec/pitorch-rust"
_TRIPLES = {
    "armhf": "armv7-unknown-linux-gnueabihf",
    "arm64": "aarch64-unknown-linux-gnu",
    "amd64": "x86_64-unknown-linux-gnu",
}
_START = """\
#!/bin/sh
LD_LIBRARY_PATH={place}/usr/lib/{gnu} exec {place}/usr/bin/{program} "$@"
"""
# The linker and the C library also come from the folder.
_LINK = """\
#!/bin/sh
LD_LIBRARY_PATH={place}/usr/lib/{gnu} exec {place}/usr/bin/{gnu}-gcc-{gcc} -B{place}/link/ --sysroot={place} "$@"
"""


def add_programs(folder: Path, suite: Suite) -> None:
    """Write the programs that start the toolchain in the container. ``folder`` contains the extracted packages."""
    gnu = host_architecture().gnu
    start, link = folder / "start", folder / "link"
    for place in (start, link):
        place.mkdir()
    texts = {start / name: _START.format(place=PLACE, gnu=gnu, program=name) for name in ("rustc", "cargo")}
    texts[start / "cc"] = _LINK.format(place=PLACE, gnu=gnu, gcc=suite.gcc)
    for path, text in texts.items():
        path.write_text(text)
        path.chmod(0o755)
    (link / "ld").symlink_to(f"../usr/bin/{gnu}-ld")
    for name in ("lib", "lib64"):
        if not (folder / name).exists():
            (folder / name).symlink_to(f"usr/{name}")


def rust_mounts(folder: Path, target: Architecture, suite: Suite) -> Mounts:
    """Return the mounts that add the Rust toolchain to a dev container in which the native compiler is mounted."""
    triple, host = (_TRIPLES[item.debian] for item in (target, host_architecture()))
    return Mounts(
        {PLACE: folder, **{f"/usr/bin/{name}": folder / "start" / name for name in ("rustc", "cargo")}},
        {
            "CARGO_BUILD_TARGET": triple,
            f"{_variable(triple)}_LINKER": f"{target.gnu}-gcc",
            f"{_variable(host)}_LINKER": f"{PLACE}/start/cc",
            "PYO3_CROSS_LIB_DIR": f"/usr/lib/python{suite.python}",
            # The container's pkg-config returns the target's paths.
            "PKG_CONFIG_ALLOW_CROSS": "1",
        },
    )


def _variable(triple: str) -> str:
    return f"CARGO_TARGET_{triple.upper().replace('-', '_')}"
