"""Helpers for the apt tests: a small signed archive, served locally, and a proxy that counts requests."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import http.server
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from http_parts import answering

from images import apt
from images.flavour import Pocket
from toolchain.process import run

PACKAGES = """Package: hello
Version: 1.0
Architecture: armhf
Maintainer: Nobody <nobody@example.org>
Filename: pool/hello.deb
Size: 1
SHA256: {digest}
Description: says hello

Package: greeter
Version: 1.0
Architecture: armhf
Maintainer: Nobody <nobody@example.org>
Depends: hello (>= 1.0)
Filename: pool/hello.deb
Size: 1
SHA256: {digest}
Description: lets hello say it

"""

SOURCES = """Package: hello
Binary: hello
Version: 1.0
Architecture: any
Format: 1.0
Directory: pool
Files:
 {md5} {size} hello_1.0.dsc
Checksums-Sha256:
 {sha256} {size} hello_1.0.dsc

"""


class Key:
    """A temporary key that signs indices. ``folder`` contains the public key in armoured form and as a keyring."""

    def __init__(self, folder: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpg-")  # a socket's path has at most 107 characters
        self.home = self._folder.name
        self.keyring = folder / "archive.gpg"
        quiet: list[str | Path] = ["gpg", "--homedir", self.home, "--batch", "--quiet", "--pinentry-mode", "loopback"]
        quiet += ["--passphrase", ""]
        self._gpg = quiet
        run([*quiet, "--quick-generate-key", "archive@example.org", "ed25519", "sign", "never"])
        run([*quiet, "--yes", "--output", self.keyring, "--export"])
        run([*quiet, "--yes", "--armor", "--output", folder / "archive.asc", "--export"])
        self.fingerprint = next(
            line.split(":")[9]
            for line in run([*quiet, "--with-colons", "--list-keys"]).output.splitlines()
            if line.startswith("fpr:")
        )

    def clearsign(self, plain: Path, signed: Path) -> None:
        """Sign a file."""
        run([*self._gpg, "--yes", "--clearsign", "--output", signed, plain])

    def close(self) -> None:
        """Stop the agent that gpg leaves running for each home folder."""
        run(["gpgconf", "--homedir", self.home, "--kill", "all"])
        self._folder.cleanup()


class Archive:
    """A small archive: three pockets, each with a signed index."""

    def __init__(self, folder: Path, *, label: str = "") -> None:
        self.folder = folder
        self.label = label
        self._key = Key(folder)
        self.keyring = self._key.keyring
        self.fingerprint = self._key.fingerprint
        self.close = self._key.close
        (folder / "pool").mkdir()
        (folder / "pool" / "hello.deb").write_bytes(b"x")
        for suite in ("stone", "stone-updates", "stone-security"):
            self.publish(suite)

    def publish(self, suite: str, codename: str = "") -> None:
        """Write a pocket's index and sign it, optionally with a codename that differs from the suite's name."""
        dist = self.folder / "dists" / suite
        binary = dist / "main" / "binary-armhf"
        binary.mkdir(parents=True, exist_ok=True)
        text = PACKAGES.format(digest=hashlib.sha256(b"x").hexdigest()).encode()
        (binary / "Packages.gz").write_bytes(gzip.compress(text, mtime=0))
        source = dist / "main" / "source"
        source.mkdir(parents=True, exist_ok=True)
        described = self._sources().encode()
        (source / "Sources.gz").write_bytes(gzip.compress(described, mtime=0))
        lines = ["Origin: Test", f"Suite: {suite}", f"Codename: {codename or suite}"]
        lines += [f"Label: {self.label}"] if self.label else []
        lines += ["Architectures: armhf", "Components: main"]
        lines += ["Date: Thu, 01 Jan 2026 00:00:00 UTC", "SHA256:"]
        for path in (binary / "Packages.gz", source / "Sources.gz"):
            content = path.read_bytes()
            lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {path.relative_to(dist)}")
        for name, content in (("main/binary-armhf/Packages", text), ("main/source/Sources", described)):
            lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}")
        (dist / "Release").write_text("\n".join(lines) + "\n")
        self.sign(suite)

    def sign(self, suite: str) -> None:
        """Sign a pocket's index without changing it."""
        dist = self.folder / "dists" / suite
        self._key.clearsign(dist / "Release", dist / "InRelease")

    def _sources(self) -> str:
        """Return the index of source packages: one package with one file."""
        description = self.folder / "pool" / "hello_1.0.dsc"
        description.write_text("Format: 1.0\nSource: hello\nVersion: 1.0\n")
        content = description.read_bytes()
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return SOURCES.format(md5=md5, sha256=hashlib.sha256(content).hexdigest(), size=len(content))

    @contextlib.contextmanager
    def stale(self, suite: str) -> Iterator[None]:
        """During the block, replace the mirror's files with files that are older than the index."""
        for name in ("binary-armhf/Packages.gz", "source/Sources.gz"):
            (self.folder / "dists" / suite / "main" / name).write_bytes(b"of yesterday")
        try:
            yield
        finally:
            self.publish(suite)

    def source(self, suite: str, uri: str, name: str, also: str = "") -> apt.Source:
        """Return an apt source for a pocket of this archive."""
        pocket = Pocket(name=name, suite=suite, mirror="", also=also)
        return apt.Source(pocket, uri, ("main",), self.keyring, ("armhf",))


class Proxy:
    """An HTTP proxy that records the requested addresses, and sends all requests to one host."""

    def __init__(self, target: str) -> None:
        self.target = urllib.parse.urlsplit(target).netloc
        self.asked: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Listen on the loopback interface; yield the address as HOST:PORT."""
        proxy = self

        class Forward(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.asked.append(self.path)
                with contextlib.closing(http.client.HTTPConnection(proxy.target, timeout=20)) as onwards:
                    onwards.request("GET", urllib.parse.urlsplit(self.path).path)
                    answer = onwards.getresponse()
                    body = answer.read()
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        with answering(Forward) as port:
            yield f"127.0.0.1:{port}"


def sources(archive: Archive, uri: str) -> tuple[apt.Source, ...]:
    """Return the archive's three pockets at an address."""
    return (
        archive.source("stone", uri, "main"),
        archive.source("stone-updates", uri, "updates"),
        archive.source("stone-security", uri, "security"),
    )
