"""Prove the 64-bit road on a machine without an engine.

    .venv/bin/python .ci/arm64_board.py FOLDER

Into FOLDER (kept, so that a second run is short) come the root filesystem of arm64, container profile, and TVM's RPC
server, as build-image makes them. The server is started in that root, emulated, and kernels are profiled on it.
It takes minutes of emulation, so it is no part of ./inv test. Needs root.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from device.remote import profiling, servers
from device.remote.loader_session import Timing
from images import rootfs
from images.flavour import packages_for
from recipes.flow import Flow
from toolchain import files, process, progress
from toolchain.config import Config, load_config
from toolchain.errors import PlatformMismatch

_SERVE = """
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot "$1" /usr/local/bin/pitorch-rpc-server --host 127.0.0.1 --port "$2"
"""
TIMING = Timing(number=5, repeat=3, min_repeat_ms=20, warm_up=1)


def make_root(config: Config) -> Path:
    """Mirror, native tools, server and root filesystem; returns the root, unpacked."""
    with Flow(config) as flow:
        wanted = ("mirror", "tools", "tvm-server")
        pipeline = flow.pipeline()
        made = {item.step: item for item in pipeline.execute([d for d in pipeline.plan() if d.step.name in wanted])}
        root, tar = flow.root / "root", flow.root / "rootfs.tar"
        if not tar.is_file():
            flow._require_execution()
            packages = tuple(sorted({*packages_for("base", config.image), *packages_for("board", config.image)}))
            spec = flow.root_spec("rootfs", packages, made["mirror"], (flow.target,))
            with progress.step("root filesystem of arm64"):
                rootfs.build_tar(flow._with_tools(spec), tar, flow.log("rootfs"))
        files.remove(root)
        root.mkdir()
        for layer in (tar, flow.root / "tvm-server.tar"):
            process.run(["tar", "--extract", "--file", layer, "--directory", root, "--numeric-owner"])
    return root


@contextlib.contextmanager
def serving(root: Path) -> Iterator[int]:
    """TVM's server in the root, in namespaces of its own; yields its port."""
    port, log = servers.free_port(), root.with_name("server.log")
    argv = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    with log.open("wb") as output:
        started = subprocess.Popen(
            [*argv, "sh", "-euc", _SERVE, "sh", str(root), str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 900
            while "pitorch: serving" not in log.read_text():
                if started.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.5)
            yield port
        finally:
            process.end_group(started)


def main() -> None:
    """Build, serve, profile; a kernel for the wrong machine must be refused."""
    image = {"architecture": "arm64", "profile": "container"}
    limits = {"server_in_image": True, "session_limit_s": 300}
    config = load_config({"image": image, "build": {"folder": str(Path(sys.argv[1]).resolve())}, "remote": limits})
    with serving(make_root(config)) as port:
        device = f"127.0.0.1:{port}"
        for kernel, size in (("add_one", 0), ("gemm", 64)):
            profiling.profile(config, kernel=kernel, target="aarch64", device=device, size=size, timing=TIMING).print()
        try:
            profiling.profile(config, kernel="add_one", target="armv7", device=device, timing=TIMING)
        except PlatformMismatch as fault:
            print(fault)
        else:
            raise SystemExit("a kernel of 32-bit ARM was not refused")


if __name__ == "__main__":
    main()
