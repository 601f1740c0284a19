"""Helpers for registry tests: small images, certificates, a slow or failing proxy, and a second engine."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import io
import json
import os
import random
import select
import shutil
import socket
import subprocess
import tarfile
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
import processes
import psutil
import pytest
import requests
from spare_bridge import spare_bridge

from engine.connect import connect
from engine.dockerd import Daemon
from engine.start import ensure_daemon
from engine.stop import stop_daemon
from registry import client as registry_client
from registry.client import Pulled, Pushed
from registry.local import Registry, Settings
from registry.reference import with_options
from toolchain.config import Config, load_config
from toolchain.errors import EngineUnavailable
from toolchain.files import MARKER

USER = "tester"
PASSWORD = "open-Sesame_7319"
HTPASSWD = f"{USER}:$2b$04$zAndiu6bXdklw6fq1b9SD.7utjlP.ire7A78fCLQG.XgJx9zcbWyi\n"
"""The entry for USER with PASSWORD, hashed by bcrypt with the lowest cost."""

KIB, MIB = 1 << 10, 1 << 20
ARM, ARM64, AMD64 = "linux/arm/v7", "linux/arm64", "linux/amd64"


def need(*programs: str) -> None:
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for program in programs:
        if shutil.which(program, path=search) is None:
            pytest.skip(f"requires the program {program}")


@contextlib.contextmanager
def engine_client() -> Iterator[docker.DockerClient]:
    try:
        client = connect(timeout_s=120)
    except EngineUnavailable as fault:
        pytest.skip(f"requires a Docker engine: {fault.found}")
    try:
        yield client
    finally:
        client.close()


def with_images_on(disk: Path, folder: Path) -> Settings:
    """Return the settings of a registry whose images are on another disk."""
    folder.mkdir()
    (folder / MARKER).touch()
    (folder / "images").symlink_to(disk)
    return Settings(folder=folder)


def with_tls(certificate: Path, key: Path) -> dict[str, str]:
    """Return docker-registry's variables for TLS."""
    return {"REGISTRY_HTTP_TLS_CERTIFICATE": str(certificate), "REGISTRY_HTTP_TLS_KEY": str(key)}


def config_for(folder: Path, address: str, **registry: str) -> Config:
    """Return a configuration with unique image names, so that tests do not change real images."""
    return load_config(
        {
            # The companions' key depends on the torch wheel, but the tests' artefacts are not torch wheels.
            "image": {"name": f"pitorch-test-{uuid.uuid4().hex[:10]}", "companions": False},
            "build": {"folder": str(folder / "build")},
            "registry": {"address": address, **registry},
        }
    )


def push(config: Config, **options: str) -> Pushed:
    """Push the image of one architecture; ``options`` are those of ``with_options``."""
    (pushed,), _ = registry_client.push([with_options(config, **options)])
    return pushed


def pull(config: Config, **options: str) -> Pulled:
    """Pull the image of one architecture; ``options`` are those of ``with_options``."""
    (pulled,) = registry_client.pull([with_options(config, **options)])
    return pulled


@contextlib.contextmanager
def command_lines_seen() -> Iterator[set[str]]:
    """Collect the command lines of all processes that run during the block."""
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.update(processes.command_lines().values())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join(30)


def for_arm64(config: Config) -> Config:
    """Return the same configuration for arm64."""
    return dataclasses.replace(config, image=dataclasses.replace(config.image, architecture="arm64"))


def layer_tar(seed: str, size: int) -> bytes:
    """Return a layer with one incompressible file."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo(f"data-{seed}")
        entry.size = size
        archive.addfile(entry, io.BytesIO(random.Random(seed).randbytes(size)))  # noqa: S311  (data, not a secret)
    return stream.getvalue()


def load_image(
    client: docker.DockerClient, name: str, sizes: tuple[int, ...] = (4 * KIB,), *, seed: str = "", platform: str = ARM
) -> str:
    """Load an image with layers of the given sizes; return its ID."""
    layers = [layer_tar(f"{seed or name}-{number}", size) for number, size in enumerate(sizes)]
    settings = {
        **dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False)),
        "created": "2025-01-01T00:00:00Z",
        "config": {"Cmd": ["/bin/true"]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]},
        "history": [{"created": "2025-01-01T00:00:00Z", "created_by": "test"} for _ in layers],
    }
    config = json.dumps(settings).encode()
    identity = hashlib.sha256(config).hexdigest()
    names = [f"layer-{number}.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": f"{identity}.json", "RepoTags": [name], "Layers": names}]).encode()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member, content in (
            (f"{identity}.json", config),
            ("manifest.json", manifest),
            *zip(names, layers, strict=True),
        ):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    client.images.load(stream.getvalue())
    return client.images.get(name).id or ""


@contextlib.contextmanager
def image(
    client: docker.DockerClient, name: str, sizes: tuple[int, ...] = (4 * KIB,), *, seed: str = "", platform: str = ARM
) -> Iterator[str]:
    identity = load_image(client, name, sizes, seed=seed, platform=platform)
    try:
        yield identity
    finally:
        forget(client, name)


def forget(client: docker.DockerClient, *names: str) -> None:
    """Remove images with all their names and digests."""
    for name in names:
        with contextlib.suppress(docker.errors.ImageNotFound):
            found = client.images.get(name)
            for one in [*(found.attrs["RepoTags"] or []), *(found.attrs["RepoDigests"] or [])]:
                with contextlib.suppress(docker.errors.ImageNotFound):
                    client.images.remove(one, force=True)
            with contextlib.suppress(docker.errors.ImageNotFound):
                assert found.id is not None
                client.images.remove(found.id, force=True)


def tags_of(client: docker.DockerClient, config: Config) -> set[str]:
    """Return the engine's tags for the configuration's images. Other tests may add other images at the same time."""
    ours = (config.image.name, config.registry.address)
    tags = {tag for one in client.api.images() for tag in one["RepoTags"] or []}
    return {tag for tag in tags if tag.startswith(ours)}


def ask(registry: Registry, path: str, **options: object) -> requests.Response:
    """Send a request to the registry without using the code under test."""
    with requests.Session() as session:
        session.trust_env = False
        verify = str(registry.settings.certificate) if registry.settings.certificate else True
        return session.get(registry.url + path, timeout=20, verify=verify, **options)  # type: ignore[arg-type]


def blob_path(registry: Registry, digest: str) -> Path:
    """Return the path of the file in which the registry stores a blob."""
    name = digest.removeprefix("sha256:")
    return registry.settings.images / f"docker/registry/v2/blobs/sha256/{name[:2]}/{name}/data"


def blobs_on_disk(registry: Registry) -> dict[str, int]:
    """Return the size of every blob that the registry stores, by digest."""
    found = registry.settings.images.glob("docker/registry/v2/blobs/sha256/*/*/data")
    return {path.parent.name: path.stat().st_size for path in found}


def outside_address() -> str:
    """Return a non-loopback address of this machine, at which engines do not accept insecure registries."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation network (RFC 5737); nothing is sent
            address = str(probe.getsockname()[0])
        except OSError as fault:
            pytest.skip(f"requires an address other than loopback: {fault}")
    if address.startswith("127."):
        pytest.skip("requires an address other than loopback")
    return address


def make_certificate(folder: Path, *addresses: str) -> tuple[Path, Path]:
    """Return a self-signed certificate for IP addresses, and its key."""
    need("openssl")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ",".join(f"IP:{address}" for address in addresses)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pitorch test"),
            *("-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key


class Proxy:
    """A TCP relay in front of a registry; the relay counts bytes, and can slow down or close connections.

    ``watch`` receives every block from a client and the number of client bytes so far. If ``watch`` returns true, all
    connections are closed.
    """

    def __init__(self, target: str, *, rate: float | None = None) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._rate = rate
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.watch: Callable[[bytes, int], bool] = lambda _block, _sent: False
        self.sent = 0
        self.cuts = 0
        # Without a small buffer, a slow relay would buffer megabytes. The size must be set before listening.
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(0.1)
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.cut()
        for thread in list(self._threads):
            thread.join(5)
        self._listener.close()

    def cut(self) -> None:
        """Close all open connections."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self.cuts += 1

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._relay, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(client)
            try:
                server = stack.enter_context(socket.create_connection(self._target, timeout=10))
            except OSError:
                return
            with self._lock:
                self._open += [client, server]
            with contextlib.suppress(OSError):
                self._pump(client, server)
            with self._lock:
                self._open.remove(client)
                self._open.remove(server)

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        while not self._closing.is_set():
            ready, _, _ = select.select([client, server], [], [], 0.1)
            for source in ready:
                block = source.recv(16 * KIB)
                if not block:
                    return
                if source is client:
                    self.sent += len(block)
                    if self.watch(block, self.sent):
                        self.cut()
                        return
                    if self._rate:
                        time.sleep(len(block) / self._rate)
                (server if source is client else client).sendall(block)


@contextlib.contextmanager
def second_engine(folder: Path, *options: str) -> Iterator[Daemon]:
    """Run a second engine, with data and configuration below ``folder``."""
    with unstarted_engine(folder, *options) as daemon:
        ensure_daemon(daemon)
        yield daemon


@contextlib.contextmanager
def unstarted_engine(folder: Path, *options: str) -> Iterator[Daemon]:
    """Describe a second engine, which is stopped at the end of the block if it was started."""
    need("dockerd")
    if os.geteuid() != 0:
        pytest.skip("requires root to run a second dockerd")
    (folder / "daemon.json").touch()
    if not (folder / "daemon.json").read_text():
        (folder / "daemon.json").write_text("{}\n")
    # Paths of sockets are limited to 107 characters; pytest's folders can be longer.
    socket_folder = Path("/run") / f"pitorch-test-{uuid.uuid4().hex[:8]}"
    stack = contextlib.ExitStack()
    bridge = stack.enter_context(spare_bridge())
    daemon = Daemon(
        folder=folder / "engine",
        host=f"unix://{socket_folder}/docker.sock",
        exec_root=socket_folder / "exec",
        options=(
            f"--data-root={folder / 'data'}",
            f"--config-file={folder / 'daemon.json'}",
            f"--bridge={bridge}",
            "--iptables=false",
            "--ip-forward=false",
            "--storage-driver=vfs",
            *options,
        ),
    )
    socket_folder.mkdir()
    try:
        yield daemon
    finally:
        stop_daemon(daemon)
        stack.close()
        # dockerd bind-mounts its data folder, and does not unmount it if killed.
        mounted = [Path(mount.mountpoint) for mount in psutil.disk_partitions(all=True)]
        for place in reversed(mounted):
            if place.is_relative_to(folder / "data") or place.is_relative_to(socket_folder):
                subprocess.run(["umount", "-l", place], check=False, capture_output=True, timeout=20)
        shutil.rmtree(socket_folder, ignore_errors=True)
        shutil.rmtree(folder / "data", ignore_errors=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system that a test can fill."""
    if os.geteuid() != 0:
        pytest.skip("requires root to mount a small file system")
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "pitorch-test", str(folder)], check=False, capture_output=True
    )
    if made.returncode != 0:
        pytest.skip(f"requires mounting a tmpfs: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


class TokenServer(http.server.ThreadingHTTPServer):
    """A token server that follows the CNCF Distribution project's token specification.

    The server signs JSON web tokens (RS256) with the key of ``certificate``. It grants the requested scope to USER with
    PASSWORD, and to clients that send ``refresh_token``. While ``anonymous`` is true, anyone gets the scope ``pull``.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._key = key
        text = certificate.read_text()
        self._chain = ["".join(text.split("-----")[2].split())]
        self.refresh_token = f"refresh-{uuid.uuid4().hex}"
        self.anonymous = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                given = self.headers.get("Authorization")
                query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
                self._answer(query, known=given == expected, refused=given not in (None, expected))

            def do_POST(self) -> None:
                query = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                known = query.get("refresh_token") == [outer.refresh_token]
                self._answer(query, known=known, refused=not known)

            def _answer(self, query: dict[str, list[str]], *, known: bool, refused: bool) -> None:
                if refused or not (known or outer.anonymous):
                    self.send_response(401)
                    self.end_headers()
                    return
                token = outer.token(query.get("scope", []), known=known)
                body = json.dumps({"token": token, "access_token": token, "expires_in": 300}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/token"

    def token(self, scopes: list[str], *, known: bool) -> str:
        """Return a signed token for the granted scopes."""
        access = []
        for scope in " ".join(scopes).split():
            kind, name, actions = scope.split(":")
            granted = [action for action in actions.split(",") if known or action == "pull"]
            access.append({"type": kind, "name": name, "actions": granted})
        now = int(time.time())
        claims: dict[str, object] = {"iss": "issuer", "sub": USER, "aud": "pitorch-test", "access": access}
        claims |= {"jti": uuid.uuid4().hex, "exp": now + 300, "nbf": now - 10, "iat": now}
        header = {"typ": "JWT", "alg": "RS256", "x5c": self._chain}
        text = b".".join(_base64url(json.dumps(part).encode()) for part in (header, claims))
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self._key)],
            input=text,
            check=True,
            capture_output=True,
            timeout=30,
        )
        return (text + b"." + _base64url(signed.stdout)).decode()


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
