"""Tests of registries that respond late or not at all, with invalid data or with errors: retries and messages."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import http.server
import io
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import docker
import pytest
from http_parts import answering, serving
from registry_parts import KIB, MIB, config_for, for_arm64, forget, image, pull, push
from test_artefacts import KEY, products
from test_signatures import make_keys, signed, write_build

from flow import publish
from registry import attestations, connection, credentials, distribution, oras, retries, transfer
from registry.connection import Connection, log_in
from registry.credentials import Credentials
from registry.distribution import Blob, RemoteImage, digest_of, read_image
from registry.local import Registry
from registry.reference import Reference, resolve, with_options
from registry.retries import with_retries
from toolchain import progress
from toolchain.config import Config
from toolchain.errors import (
    AccessDenied,
    PlatformMismatch,
    ReferenceNotFound,
    RegistryBroke,
    RegistryFailed,
    RegistryUnreachable,
    UserError,
)
from toolchain.ports import free_port
from wheels import artefacts

DELAYS_S = retries.RETRY_DELAYS_S
ENGINE_EVENTS = transfer.events
ZEROS = "sha256:" + "0" * 64
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
Hook = Callable[["Handler"], bool]


class Handler(http.server.BaseHTTPRequestHandler):
    """Calls the server's hook, or forwards the request to the real registry."""

    protocol_version = "HTTP/1.1"
    server: Front

    def handle_any(self) -> None:
        """Handle a request with any method."""
        self.server.requests.append(f"{self.command} {self.path}")
        sent = self.body()
        if self.server.hook(self) or not self.server.target:
            return
        headers = {name: self.headers[name] for name in ("Accept", "Content-Type", "Host") if name in self.headers}
        with contextlib.closing(http.client.HTTPConnection(self.server.target, timeout=20)) as forwarded:
            forwarded.request(self.command, self.path, sent, headers)
            answer = forwarded.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name not in ("Date", "Server", "Connection"):
                    self.send_header(name, value)
            self.end_headers()
            self.server.send(self, body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def body(self) -> bytes:
        """Read the request's body."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        blocks = []
        while size := int(self.rfile.readline(), 16):
            blocks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(blocks)

    def reply(self, status: int, body: bytes = b"{}", **headers: str) -> bool:
        """Send a response."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    def raw(self, data: bytes) -> bool:
        """Send raw bytes and close the connection."""
        self.wfile.write(data)
        return self.hang_up()

    def hang_up(self) -> bool:
        """Close the connection."""
        self.close_connection = True
        return True

    def reset(self) -> bool:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        return True

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Front(http.server.ThreadingHTTPServer):
    """An HTTP server that can forward requests to a registry (HOST:PORT)."""

    daemon_threads = True

    def __init__(self, hook: Hook, target: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hook = hook
        self.target = target
        self.requests: list[str] = []
        self.over = threading.Event()
        self.send: Callable[[Handler, bytes], object] = lambda handler, body: handler.wfile.write(body)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing, because in some tests the client closes the connection."""

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def front(hook: Hook, target: str = "") -> Iterator[Front]:
    with serving(Front(hook, target)) as server:
        try:
            yield server
        finally:
            server.over.set()


@contextlib.contextmanager
def connected_to(address: str) -> Iterator[Connection]:
    reference = Reference(host=address, repository="pitorch/system", tag="t")
    with Connection(reference, insecure=True, actions="pull") as remote:
        yield remote


@pytest.fixture(autouse=True)
def quick(docker_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten delays and time limits, silence warnings, and hide all credentials."""
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01,) * 4)
    monkeypatch.setattr(connection, "_READ_S", 1.0)
    monkeypatch.setattr(progress, "warn", lambda _: None)


@pytest.mark.parametrize("folder", ["none", "file"])
def test_no_credentials_without_a_docker_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / folder))
    credentials.require_readable()
    assert credentials.find(Reference(host="127.0.0.1:5000", repository="a/b", tag="t")) is None


# ------------------------------------------------------------------------------------------ the first request


def late(handler: Handler) -> bool:
    handler.server.over.wait(20)
    return handler.hang_up()


temporary_faults = pytest.mark.parametrize(
    "fault",
    [
        lambda handler: handler.reply(503, b""),
        lambda handler: handler.reply(429, b""),
        lambda handler: handler.raw(b"\x00\xff nonsense\r\n\r\n"),
        lambda handler: handler.hang_up(),
        lambda handler: handler.reset(),
        late,
    ],
    ids=["503", "429", "garbage", "closed", "reset", "late"],
)


@temporary_faults
def test_failed_first_request_is_retried(fault: Hook) -> None:
    def hook(handler: Handler) -> bool:
        return fault(handler) if len(handler.server.requests) == 1 else handler.reply(200)

    with front(hook) as server, connected_to(server.address) as remote:
        assert log_in(remote, actions="pull", user="") is None
        assert server.requests == ["GET /v2/"] * 3, "expected a failed request, its retry, and the login"


@pytest.mark.parametrize(("idle_s", "connections"), [(60.0, 1), (0.0, 3)])
def test_idle_connections_are_not_used_again(monkeypatch: pytest.MonkeyPatch, idle_s: float, connections: int) -> None:
    monkeypatch.setattr(connection, "_IDLE_S", idle_s)
    used: set[int] = set()

    def hook(handler: Handler) -> bool:
        used.add(handler.client_address[1])
        return handler.reply(200)

    with front(hook) as server, connected_to(server.address) as remote:
        remote.ping()
        remote.request("GET", "/v2/")
        remote.request("GET", "/v2/")
    assert len(used) == connections


@temporary_faults
@pytest.mark.parametrize("part", ["manifests", "blobs"])
def test_failed_look_up_of_artefacts_is_retried(plain: Registry, tmp_path: Path, fault: Hook, part: str) -> None:
    """The first two requests fail, because the client sends a GET after a HEAD that fails with a status code."""
    config = config_for(tmp_path / "here", plain.address)
    artefacts.put(config, "thing", KEY, products(tmp_path))
    artefacts.push(config)
    failures: list[str] = []

    def hook(handler: Handler) -> bool:
        if f"/{part}/" not in handler.path or len(failures) == 2:
            return False
        failures.append(handler.path)
        return fault(handler)

    with front(hook, plain.address) as server:
        (pushed,) = artefacts.push(with_options(config, registry=server.address))
        assert (pushed.note, len(failures)) == ("already there", 2)
        failures.clear()
        pulled = artefacts.pull(config_for(tmp_path / "there", server.address), "thing", KEY)
        assert (pulled.note, len(failures)) == ("3 files received", 2)


@temporary_faults
def test_failed_download_by_verify_is_retried(plain: Registry, tmp_path: Path, fault: Hook) -> None:
    layer = random.Random(0).randbytes(MIB)  # noqa: S311  (data, not a secret)
    keys = make_keys(tmp_path, "signer")
    config = config_for(tmp_path, plain.address, repository="verified")
    signed(config, keys, layer=layer)
    downloads: list[str] = []

    def hook(handler: Handler) -> bool:
        if handler.command != "GET" or not handler.path.endswith(digest_of(layer)):
            return False
        downloads.append(handler.path)
        return len(downloads) == 1 and fault(handler)

    def half(handler: Handler, body: bytes) -> None:
        """Send only half of the layer in response to the second request."""
        handler.wfile.write(body[: MIB // 2] if len(downloads) == 2 else body)
        if len(downloads) == 2 and len(body) == MIB:
            handler.hang_up()

    with front(hook, plain.address) as server:
        server.send = half
        name = f"{server.address}/{resolve(config).repository}:{resolve(config).tag}"
        assert "all layers match" in publish.verify_image(config, name, key=keys.public).text()
    assert len(downloads) == 3


@pytest.mark.engine
@pytest.mark.parametrize(
    "fault", [lambda handler: handler.reply(503, b""), lambda handler: handler.reset()], ids=["503", "reset"]
)
def test_failed_upload_of_signatures_is_retried(
    client: docker.DockerClient, plain: Registry, tmp_path: Path, fault: Hook
) -> None:
    """The first upload of a blob fails at its start and at its end, and the first upload of each manifest fails."""
    keys = make_keys(tmp_path, "signer")
    failed: set[str] = set()

    def hook(handler: Handler) -> bool:
        path = handler.path.partition("?")[0]
        request = f"{handler.command} {'uploads' if '/blobs/uploads/' in path else path.rpartition('/')[2]}"
        signing = request in ("POST uploads", "PUT uploads") or (
            handler.command == "PUT" and request.endswith((".att", ".sig"))
        )
        if not signing or request in failed or not handler.headers["User-Agent"].startswith("python-requests"):
            return False
        failed.add(request)
        return fault(handler)

    with front(hook, plain.address) as server:
        armhf = config_for(tmp_path, server.address, repository="signed", signing_key=str(keys.private))
        configs = [armhf, for_arm64(armhf)]
        with contextlib.ExitStack() as stack:
            for config in configs:
                name, platform = config.image_reference("system"), config.image.target.oci_platform
                write_build(config, stack.enter_context(image(client, name, platform=platform)))
            images, index = publish.push(configs, sign=True)
        assert index is not None
        digests = [*(one.digest for one in images), index.digest]
        manifests = [f"PUT {one.replace(':', '-')}.{kind}" for one in digests for kind in ("sig", "att")][:-1]
        assert failed == {"POST uploads", "PUT uploads", *manifests}, "an index has signatures, but no statements"
        for config in configs:
            publish.verify_image(config, str(index.reference), key=keys.public)


@pytest.mark.parametrize(
    "challenge",
    [
        'Basic realm="r", Bearer realm="http://HOST/token",service="s"',
        'Bearer realm="http://HOST/token",service="", Basic realm="r"',
        "Bearer realm=http://HOST/token, service=s",
        'Negotiate, bearer Realm = "http://HOST/token"',
    ],
)
def test_token_is_requested_with_any_form_of_challenge(challenge: str) -> None:
    def hook(handler: Handler) -> bool:
        if handler.path.startswith("/token"):
            return handler.reply(200, b'{"token": "known"}')
        if handler.headers["Authorization"] == "Bearer known":
            return handler.reply(200)
        return handler.reply(401, WWW_Authenticate=challenge.replace("HOST", handler.server.address))

    with front(hook) as server, connected_to(server.address) as remote:
        assert log_in(remote, actions="pull", user="") is None


def test_failed_login_is_retried() -> None:
    def hook(handler: Handler) -> bool:
        return handler.reply(503 if len(handler.server.requests) == 2 else 200)

    with front(hook) as server, connected_to(server.address) as remote:
        log_in(remote, actions="pull", user="")
        assert len(server.requests) == 3


def test_permanent_errors_are_reported() -> None:
    with front(lambda handler: handler.reply(503)) as server, connected_to(server.address) as remote:
        with pytest.raises(RegistryBroke, match="unexpected response") as caught:
            log_in(remote, actions="pull", user="")
        assert len(server.requests) == 5
    assert "HTTP 503" in caught.value.found


@pytest.mark.parametrize(
    ("proxy", "found"),
    [
        ("http://user:s3cret@127.0.0.1:PORT", "connection refused"),
        ("http://nosuch.invalid:1", "name"),
        ("http://user:s3cret@localhost:99999", "an invalid proxy address"),
        ("http://[::1", "an invalid proxy address"),
        ("ftp://127.0.0.1:1", "an invalid proxy address"),
    ],
)
def test_unusable_proxy_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, proxy: str, found: str) -> None:
    warned: list[str] = []
    monkeypatch.setattr(progress, "warn", warned.append)
    monkeypatch.setenv("https_proxy", proxy.replace("PORT", str(free_port())))
    monkeypatch.setenv("no_proxy", "")
    reference = Reference(host="registry.invalid", repository="pitorch/system", tag="t")
    with pytest.raises(RegistryUnreachable) as caught:
        log_in(Connection(reference, insecure=False, actions="pull"), actions="pull", user="")
    assert "registry.invalid cannot be reached through the proxy" in str(caught.value)
    assert found in caught.value.found
    assert "no_proxy" in caught.value.fix
    assert (warned, "s3cret" in str(caught.value)) == ([], False)


def test_proxy_is_selected_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is on the loopback interface; its token server and its storage are reached through the proxy."""

    def registry(handler: Handler) -> bool:
        if handler.path == "/moved":
            return handler.reply(307, Location="http://storage.invalid/blob")
        if handler.headers["Authorization"] == "Bearer known":
            return handler.reply(200)
        return handler.reply(401, WWW_Authenticate='Bearer realm="http://tokens.invalid/token",service="s"')

    with (
        front(lambda handler: handler.reply(200, b'{"token": "known"}')) as proxy,
        front(registry) as server,
        connected_to(server.address) as remote,
    ):
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        monkeypatch.setenv("no_proxy", "direct.invalid")
        log_in(remote, actions="pull", user="")
        assert remote.request("GET", "/moved").status_code == 200
        asked = {line.partition("?")[0] for line in proxy.requests}
        assert asked == {"GET http://tokens.invalid/token", "GET http://storage.invalid/blob"}
        monkeypatch.setenv("no_proxy", "storage.invalid")
        with pytest.raises(RegistryUnreachable):
            remote.request("GET", "/moved")


@pytest.mark.parametrize("address", ["http://[::1", "http://r.example:99999/x", f"http://{64 * 'x'}.example/x"])
def test_redirect_to_an_invalid_address_is_reported(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("no_proxy", "r.example")
    redirect = front(lambda handler: handler.reply(307, Location=address))
    with redirect as server, connected_to(server.address) as remote, pytest.raises(RegistryBroke):
        remote.ping()


def test_404_is_not_retried() -> None:
    with front(lambda handler: handler.reply(404)) as server, connected_to(server.address) as remote:
        with pytest.raises(RegistryFailed, match="unexpected response") as caught:
            log_in(remote, actions="pull", user="")
        assert len(server.requests) == 1
    assert caught.value.exit_code == 35
    assert "HTTP 404" in caught.value.found


# ------------------------------------------------------------------------------------------ invalid data


def test_invalid_response_reports_http_and_https() -> None:
    with (
        front(lambda handler: handler.raw(b"SSH-2.0-OpenSSH\r\n")) as server,
        connected_to(server.address) as remote,
        pytest.raises(RegistryBroke) as caught,
    ):
        remote.ping()
    assert "over HTTP: SSH-2.0-OpenSSH" in caught.value.found
    assert "over HTTPS: it uses plain HTTP" in caught.value.found


def test_silent_server_reports_http_and_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with connected_to(address) as remote, pytest.raises(RegistryUnreachable) as caught:
            remote.ping()
    assert caught.value.exit_code == 20
    assert "over HTTP: " in caught.value.found
    assert "over HTTPS: " in caught.value.found


ERROR_BODY = json.dumps({"errors": [{"code": "NO", "message": f"line\n  fix: rm -rf /{ESCAPE}"}]}).encode()


@pytest.mark.parametrize(
    "hook",
    [
        lambda handler: handler.raw(f"HTTP/1.1 {ESCAPE}\r\n\r\n".encode()),
        lambda handler: handler.raw(f"{ESCAPE} \r\n\r\n".encode()),
        lambda handler: handler.reply(500, ERROR_BODY),
        lambda handler: handler.reply(403, ERROR_BODY),
        lambda handler: handler.reply(401, WWW_Authenticate=f"Odd{ESCAPE} x"),
        lambda handler: handler.reply(401, WWW_Authenticate=f'Bearer realm="ftp://{ESCAPE}/",service="s"'),
    ],
    ids=["status", "line", "500", "403", "challenge", "realm"],
)
def test_control_characters_in_responses_are_escaped(hook: Hook) -> None:
    with front(hook) as server, connected_to(server.address) as remote, pytest.raises(UserError) as caught:
        log_in(remote, actions="pull", user="")
    message = str(caught.value)
    assert message.replace("\n", "").isprintable()
    assert not any(line.startswith("  fix: rm") for line in message.splitlines())
    assert "\\x1b" in message


@pytest.mark.parametrize(
    "manifest",
    [
        {"config": {"digest": "x", "size": "many"}, "layers": []},
        {"config": [], "layers": {}},
        {"config": {"digest": "x", "size": 1}, "layers": [None]},
        {"config": {"digest": ZEROS, "size": float("inf")}, "layers": []},
        {"config": {"digest": f"../{ZEROS}", "size": 2}, "layers": []},
        {"manifests": [7, {"platform": 3}, {"platform": {"os": ESCAPE}}]},
        {"manifests": 7},
    ],
)
def test_invalid_manifests_are_refused(manifest: object) -> None:
    def hook(handler: Handler) -> bool:
        return handler.reply(200, json.dumps(manifest).encode())

    with front(hook) as server, connected_to(server.address) as remote:
        remote.ping()
        with pytest.raises((RegistryFailed, PlatformMismatch)) as caught:
            read_image(remote, "linux/arm/v7")
    assert str(caught.value).replace("\n", "").isprintable()
    assert not isinstance(caught.value, RegistryBroke), "the error must not be one that is retried"


def test_invalid_content_length_is_refused() -> None:
    def hook(handler: Handler) -> bool:
        if "/blobs/" in handler.path:
            return handler.raw(b"HTTP/1.1 200 OK\r\nContent-Length: \x1bmany\r\n\r\n")
        return handler.reply(200, json.dumps({"config": {"digest": ZEROS, "size": 1}, "layers": []}).encode())

    with front(hook) as server, connected_to(server.address) as remote:
        remote.ping()
        with pytest.raises(RegistryFailed) as caught:
            read_image(remote, "linux/arm/v7")
    assert str(caught.value).replace("\n", "").isprintable()


def test_control_characters_from_the_engine_are_escaped() -> None:
    reference = Reference(host="127.0.0.1:5000", repository="pitorch/system", tag="t")
    fault = transfer.explain(f"received unexpected HTTP status: 500 {ESCAPE}\n  fix: none", reference, None)
    assert "\\x1b]0;owned\\x07\\x1b[2J fix: none" in str(fault)


# ------------------------------------------------------------------------------------------ 403


ME = Credentials(user="me", password="secret", source="a test")


@pytest.mark.parametrize("known", [None, ME])
@pytest.mark.parametrize("path", ["/v2/", "/manifests/"])
def test_403_does_not_suggest_a_login(known: Credentials | None, path: str) -> None:
    def hook(handler: Handler) -> bool:
        return handler.reply(403 if path in handler.path and handler.path.startswith("/v2/") else 200)

    def ask(remote: Connection) -> None:
        remote.ping()
        remote.login(known)
        read_image(remote, "linux/arm/v7")

    denied = pytest.raises(AccessDenied, match="denied")
    with front(hook) as server, connected_to(server.address) as remote, denied as caught:
        ask(remote)
    assert "HTTP 403" in caught.value.found
    assert "docker login" not in str(caught.value)
    assert "password" not in caught.value.expected
    assert caught.value.exit_code == 30


def test_missing_tag_is_reported_if_listing_is_denied() -> None:
    def hook(handler: Handler) -> bool:
        status = {"/v2/": 200, "/v2/pitorch/system/tags/list": 403}
        return handler.reply(status.get(handler.path, 404))

    with front(hook) as server, connected_to(server.address) as remote:
        remote.ping()
        with pytest.raises(ReferenceNotFound) as caught:
            read_image(remote, "linux/arm/v7")
    assert caught.value.exit_code == 34


def test_403_from_the_engine_does_not_suggest_a_login() -> None:
    reference = Reference(host="127.0.0.1:5000", repository="pitorch/system", tag="t")
    fault = transfer.explain("unexpected status from HEAD request: 403 Forbidden", reference, None)
    assert str(fault).startswith("access to pitorch/system at 127.0.0.1:5000 denied")
    assert "docker login" not in str(fault)
    anonymous = transfer.explain("denied: requested access to the resource is denied", reference, None)
    assert "docker login" in anonymous.fix, "the fix must suggest a login"
    assert "administrator" in transfer.explain("denied: not yours", reference, ME).fix


# ------------------------------------------------------------------------------------------ transfers that stall


@pytest.mark.engine
def test_repeated_resets_end_the_push_early(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the push continued, the engine would retry each layer for 50 s in each of five attempts."""
    for module in (retries, transfer):
        monkeypatch.setattr(module, "PATIENCE_S", 6.0)

    def hook(handler: Handler) -> bool:
        return handler.reply(200) if handler.path == "/v2/" else handler.reset()

    with front(hook) as server:
        config = config_for(tmp_path, server.address)
        with image(client, config.image_reference("system")), pytest.raises(RegistryBroke) as caught:
            push(config)
        uploads = [line for line in server.requests if line.startswith("POST")]
    assert "the connection was lost repeatedly" in caught.value.found
    assert len(uploads) < 10


class Clock:
    """A clock that advances only by planned delays, so that the speed of the machine has no influence."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds

    @contextlib.contextmanager
    def engine_events(self, *arguments: Any) -> Iterator[Iterator[Mapping[str, Any]]]:
        """Yield the engine's events. Advance the clock by each second that the engine reports before a retry."""

        def count(stream: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
            for event in stream:
                yield event
                self.sleep(str(event.get("status", "")).startswith("Retrying in"))

        with ENGINE_EVENTS(*arguments) as stream:
            yield count(stream)


def resets(answered: str, handler: Handler) -> bool:
    """Answer some requests, and reset all other connections.

    If ``answered`` is "login", only logins are answered; if it is "look-ups", logins and look-ups are.
    """
    if answered != "nothing" and handler.path == "/v2/":
        return handler.reply(200)
    if answered == "look-ups" and handler.command == "HEAD":
        return handler.reply(404, b"")
    return handler.reset()


def push_artefacts(config: Config) -> object:
    folder = Path(config.build.folder)
    folder.mkdir()
    artefacts.put(config, "thing", KEY, products(folder))
    return artefacts.push(config)


def pull_artefact(config: Config) -> object:
    return artefacts.pull(config, "thing", KEY)


def verify(config: Config) -> object:
    keys = make_keys(Path(config.build.folder).parent, "signer")
    return publish.verify_image(config, str(resolve(config)), key=keys.public)


@pytest.mark.engine
@pytest.mark.parametrize("answered", ["nothing", "the login", "look-ups"])
@pytest.mark.parametrize("transferred", [pull, push_artefacts, pull_artefact, verify])
def test_resets_are_reported_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transferred: Callable[[Config], object], answered: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", DELAYS_S)
    with front(partial(resets, answered)) as server:
        config = config_for(tmp_path, server.address)
        with pytest.raises((RegistryBroke, RegistryUnreachable)):
            transferred(config)
    assert 30 < clock.now <= 60


@pytest.mark.engine
@pytest.mark.parametrize("answered", ["nothing", pytest.param("the login", marks=pytest.mark.expensive), "look-ups"])
def test_resets_of_a_push_are_reported_within_a_minute(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: str
) -> None:
    """The delays between the engine's attempts cannot be changed, so these tests take 50 s each."""
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", DELAYS_S)
    monkeypatch.setattr(transfer, "events", clock.engine_events)
    with front(partial(resets, answered)) as server:
        config = config_for(tmp_path, server.address)
        with image(client, config.image_reference("system")), pytest.raises(RegistryBroke):
            push(config)
    assert 30 < clock.now <= 60


@pytest.mark.engine
def test_stalled_layer_ends_the_pull(
    client: docker.DockerClient, plain: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_READ_S", 60.0)
    monkeypatch.setattr(transfer, "STALL_S", 4.0)
    config = config_for(tmp_path, plain.address, repository="stalls")
    name = config.image_reference("system")
    with image(client, name, (4 * KIB, MIB)):
        push(config)
    forget(client, name)

    def half(handler: Handler, body: bytes) -> None:
        handler.wfile.write(body[: len(body) // 2] if len(body) > 100 * KIB else body)
        if len(body) > 100 * KIB:
            handler.wfile.flush()
            handler.server.over.wait(120)

    with front(lambda _: False, plain.address) as server:
        server.send = half
        with pytest.raises(RegistryFailed) as caught:
            pull(config, registry=f"{server.address}/pitorch")
        blobs = [line for line in server.requests if line.startswith("GET") and "/blobs/" in line]
    assert caught.value.exit_code == 35
    assert "stalled" in str(caught.value)
    assert len(blobs) <= 4, "at most two requests for the configuration, and one for each layer"


def upload_with_pause(pause_s: float) -> int:
    """Upload a body that the server reads only after a pause; return the response's status."""
    over = threading.Event()

    class Pausing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_PUT(self) -> None:
            if not over.wait(pause_s):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(201)
                self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    # The body does not fit into the buffers of the sockets.
    with answering(Pausing) as port, connected_to(f"127.0.0.1:{port}") as remote:
        remote.ping()
        try:
            return remote.request("PUT", "/upload", body=lambda: oras._Reader(io.BytesIO(bytes(32 * MIB)))).status_code
        finally:
            over.set()


def test_pause_during_an_upload_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_S", 0.5)
    assert upload_with_pause(1.5) == 201


def test_stalled_upload_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_S", 1.0)
    with pytest.raises(RegistryFailed, match="stalled") as caught:
        upload_with_pause(30)
    assert caught.value.exit_code == 35


def download(remote: Connection, size: int, folder: Path) -> None:
    """Download a file of an artefact, with retries."""
    item = oras.File(digest=ZEROS, size=size, name="a.whl", media_type="application/zip")
    try:
        with_retries(lambda: oras.Store(remote).download(item, folder / "a.whl"), remote)
    finally:
        assert not (folder / "a.whl").exists()


def check_layer(remote: Connection, size: int, _folder: Path) -> None:
    """Download and verify an image with one layer."""
    blob, empty = Blob(digest=ZEROS, size=size), Blob(digest=digest_of(b""), size=0)
    made = RemoteImage(
        digest=ZEROS, manifest=empty, media_type="", platform="linux/arm/v7", config=empty, layers=(blob,)
    )
    attestations.check_contents(remote, made)


downloads = pytest.mark.parametrize("read", [download, check_layer])


def test_compressing_proxy_does_not_change_a_download(tmp_path: Path) -> None:
    content = bytes(10 * KIB)

    def hook(handler: Handler) -> bool:
        if "gzip" in handler.headers["Accept-Encoding"]:
            return handler.reply(200, gzip.compress(content), Content_Encoding="gzip")
        return handler.reply(200, content)

    item = oras.File(digest=digest_of(content), size=len(content), name="a.whl", media_type="application/zip")
    with front(hook) as server, connected_to(server.address) as remote:
        remote.ping()
        oras.Store(remote).download(item, tmp_path / "a.whl")
    assert (tmp_path / "a.whl").read_bytes() == content


@downloads
def test_slow_download_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Connection, int, Path], None]
) -> None:
    monkeypatch.setattr(distribution, "STALL_S", 1.0)

    def hook(handler: Handler) -> bool:
        if "/blobs/" not in handler.path:
            return handler.reply(200)
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not handler.server.over.wait(0.1):
            handler.wfile.write(b"x")
            handler.wfile.flush()
        return handler.hang_up()

    with front(hook) as server, connected_to(server.address) as remote:
        remote.ping()
        with pytest.raises(RegistryFailed) as caught:
            read(remote, 1_000_000, tmp_path)
    assert "of 1000000 bytes of " in caught.value.found


@downloads
def test_stalled_download_is_retried_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Connection, int, Path], None]
) -> None:
    monkeypatch.setattr(retries, "PATIENCE_S", 1.5)

    def hook(handler: Handler) -> bool:
        if "/blobs/" not in handler.path:
            return handler.reply(200)
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 500)
        handler.wfile.flush()
        return late(handler)

    with front(hook) as server:
        with connected_to(server.address) as remote:
            remote.ping()
            with pytest.raises(RegistryUnreachable):
                read(remote, 1000, tmp_path)
        blobs = [line for line in server.requests if "/blobs/" in line]
    assert 1 <= len(blobs) <= 2
