"""A small image for the target platform, with everything that an inexact export would lose.

The image has two layers, so that it also contains whiteouts, opaque folders, changes of type and overridden hard links.
"""

# Names in a root filesystem are bytes, but pathlib supports only text.
# ruff: noqa: PTH112, PTH113, PTH114, PTH115, PTH118, PTH123

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import docker

from images.system import LEFT_OUT

CAPABILITY_NET_RAW = bytes.fromhex("0100000200200000000000000000000000000000")
"""security.capability of ``cap_net_raw=ep``: struct vfs_cap_data, revision 2, linux/capability.h."""

UNDECODABLE = "usr/share/na\udcefve\udcff"
"""A name that is not UTF-8 (surrogateescape)."""

BIG_ID = 3_000_000_000


def entry(
    name: str,
    content: bytes | str = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    owner: tuple[int, int] = (0, 0),
    link: str = "",
    device: tuple[int, int] = (0, 0),
    xattrs: dict[str, bytes] | None = None,
    mtime: int = 1_700_000_000,
) -> tuple[tarfile.TarInfo, bytes]:
    """Return one tar member."""
    data = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.linkname, info.mtime = kind, mode, len(data), link, mtime
    info.uid, info.gid = owner
    info.devmajor, info.devminor = device
    info.pax_headers = {
        f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape") for key, value in (xattrs or {}).items()
    }
    return info, data


def folder(name: str, mode: int = 0o755, owner: tuple[int, int] = (0, 0)) -> tuple[tarfile.TarInfo, bytes]:
    """Return a folder."""
    return entry(name, kind=tarfile.DIRTYPE, mode=mode, owner=owner, mtime=1_600_000_000)


def lower_layer() -> list[tuple[tarfile.TarInfo, bytes]]:
    """Return the lower layer: entries that the upper layer changes, and entries that must be preserved."""
    return [
        folder("bin"), folder("dev"), folder("etc"), folder("etc/ssh"), folder("opt"), folder("root", 0o700),
        folder("run"), folder("tmp", 0o1777), folder("usr"), folder("usr/bin"), folder("usr/share"), folder("var"),
        folder("var/gone"), folder("var/opaque"), folder("var/opaque/below"), folder("var/becomes-file"),
        folder("var/mail", 0o2775, (0, 8)),
        entry("usr/bin/passwd", b"setuid", mode=0o4755),
        entry("usr/bin/write", b"setgid", mode=0o2755, owner=(0, 5)),
        entry("usr/bin/ping", b"ping", mode=0o755, xattrs={"security.capability": CAPABILITY_NET_RAW}),
        entry("usr/bin/perl", b"perl" * 5000, mode=0o755),
        entry("usr/bin/perl5", kind=tarfile.LNKTYPE, link="usr/bin/perl", mode=0o755),
        entry("usr/share/link-a", b"linked"),
        entry("usr/share/link-b", kind=tarfile.LNKTYPE, link="usr/share/link-a"),
        entry("usr/share/far", b"far user", owner=(BIG_ID, BIG_ID)),
        entry(UNDECODABLE, b"not UTF-8"),
        entry("usr/share/new\nline", b"odd"),
        entry("usr/share/-rf", b"odd too"),
        entry("usr/share/gr\u00fc\u00dfe \u2713", b"UTF-8"),
        *[folder("usr/share/" + "long/" * depth) for depth in range(1, 31)],
        entry("usr/share/" + "long/" * 30 + "name", b"deep"),
        entry("usr/share/read-only", b"0", mode=0o000),
        entry("dev/null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
        entry("dev/loop0", kind=tarfile.BLKTYPE, device=(7, 0), mode=0o660, owner=(0, 6)),
        entry("run/fifo", kind=tarfile.FIFOTYPE, mode=0o600),
        entry("bin/sh", kind=tarfile.SYMTYPE, link="/usr/bin/dash", mode=0o777),
        entry("usr/share/dangling", kind=tarfile.SYMTYPE, link="/nowhere/\udcff", mode=0o777, owner=(7, 7)),
        entry("var/gone/file", b"removed by the second layer"),
        entry("var/removed", b"removed by the second layer"),
        entry("var/opaque/below/hidden", b"hidden by the second layer"),
        entry("var/opaque/kept-name", b"old"),
        entry("var/becomes-file/inside", b"x"),
        entry("var/becomes-folder", b"x"),
        entry("var/becomes-link", b"x"),
        entry("opt/sparse", b"\0" * 1_000_000 + b"end"),
    ]  # fmt: skip


def upper_layer() -> list[tuple[tarfile.TarInfo, bytes]]:
    """Return the upper layer: whiteouts, an opaque folder, changes of type, and a file that replaces a hard link."""
    return [
        folder("var"),
        entry("var/.wh.gone"), entry("var/.wh.removed"),
        folder("var/opaque", 0o750), entry("var/opaque/.wh..wh..opq"), entry("var/opaque/kept-name", b"new"),
        entry("var/becomes-file", b"a file now"),
        folder("var/becomes-folder"), entry("var/becomes-folder/inside", b"in"),
        entry("var/becomes-link", kind=tarfile.SYMTYPE, link="becomes-file", mode=0o777),
        folder("usr"), folder("usr/share"), entry("usr/share/link-a", b"replaced: link-b keeps the old content"),
        folder("etc"), entry("etc/hostname", "build-pc\n"), entry("etc/hosts", "127.0.0.1 localhost build-pc\n"),
        entry("etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
        entry("etc/resolv.conf", kind=tarfile.SYMTYPE, link="/run/systemd/resolve/stub-resolv.conf", mode=0o777),
        entry("etc/fstab", "UUID=1-2 / ext4 defaults 0 1\n/dev/sda2 none swap sw 0 0\nproc /proc proc defaults 0 0\n"),
        entry("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        entry("etc/environment", "LANG=C.UTF-8\nhttp_proxy=http://build-proxy:3128\n"),
        folder("etc/ssh"), entry("etc/ssh/sshd_config", "UsePAM yes\n"),
        entry("etc/ssh/ssh_host_ed25519_key", "the same for everyone\n", mode=0o600),
        entry("etc/ssh/ssh_host_ed25519_key.pub", "ssh-ed25519 AAAAOLD root@build\n"),
        folder("etc/apt"), folder("etc/apt/apt.conf.d"),
        entry("etc/apt/apt.conf.d/01proxy", 'Acquire::http::Proxy "http://build-proxy:3128";\n'),
        folder("etc/network"), entry("etc/network/interfaces", "auto eth0\niface eth0 inet dhcp\n"),
        entry(".dockerenv"), folder("dev"), entry("dev/console", mode=0o755),
        folder("usr/sbin"), entry("usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", mode=0o755),
    ]  # fmt: skip


def layer(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Make a layer's tar."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return made.getvalue()


def with_libraries(program: str) -> dict[str, bytes]:
    """Return a program of this machine as ``bin/NAME``, and the shared libraries that it needs, by path in a root."""
    source = os.path.realpath(shutil.which(program) or f"/bin/{program}")
    listed = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
    libraries = {path[1:]: Path(path).read_bytes() for path in re.findall(r"(/\S+)", listed)}
    return {f"bin/{program}": Path(source).read_bytes(), **libraries}


def root_of(files: Mapping[str, bytes]) -> bytes:
    """Make the tar of a root with these files, all of which are executable."""
    return layer([entry(name, content, mode=0o755) for name, content in files.items()])


def archive(reference: str, layers: list[bytes], *, architecture: str = "arm", variant: str = "v7") -> bytes:
    """Make a docker-archive."""
    created = "2025-01-01T00:00:00Z"
    config = json.dumps(
        {
            "architecture": architecture,
            "variant": variant,
            "os": "linux",
            "created": created,
            "config": {"Cmd": ["/bin/sh"], "Labels": {LEFT_OUT: '["trixie-security"]'}},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(data).hexdigest() for data in layers]},
            "history": [{"created": created, "created_by": "test"} for _ in layers],
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    paths = [f"layer{number}.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": name, "RepoTags": [reference], "Layers": paths}]).encode()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, data in [(name, config), *zip(paths, layers, strict=True), ("manifest.json", manifest)]:
            tar.addfile(entry(path, data)[0], io.BytesIO(data))
    return made.getvalue()


def load(client: docker.DockerClient, reference: str, layers: list[bytes], **platform: str) -> str:
    """Load an image and return its ID."""
    return str(client.images.load(archive(reference, layers, **platform))[0].id)


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def tree_listing(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Map each entry's path to the properties that an export must preserve; times are in nanoseconds."""
    listed: dict[bytes, tuple[object, ...]] = {}
    first: dict[tuple[int, int], bytes] = {}
    top = os.fsencode(root)
    for parent, folders, names in os.walk(top):
        for path in sorted([parent, *(os.path.join(parent, name) for name in (*names, *folders))]):
            name = os.path.relpath(path, top)
            if name in listed:
                continue
            found = os.lstat(path)
            content: object = None
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as stream:
                    content = hashlib.sha256(stream.read()).hexdigest()
            xattrs = tuple(
                (key, os.getxattr(path, key, follow_symlinks=False))
                for key in sorted(os.listxattr(path, follow_symlinks=False))
                if not key.startswith("trusted.overlay.")
            )
            leader = first.setdefault((found.st_dev, found.st_ino), name) if not os.path.isdir(path) else name
            listed[name] = (
                oct(found.st_mode), found.st_uid, found.st_gid, found.st_rdev, found.st_mtime_ns,
                content, xattrs, leader,
            )  # fmt: skip
    return listed
