"""Tests of image references, and of error messages from engines and requests. No registry is needed."""

from __future__ import annotations

import base64
import getpass
import io
import json
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import urllib3.exceptions
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from registry import connection, credentials, distribution, faults, passwords, retries, signing, transfer, trust
from registry.connection import Connection
from registry.credentials import Credentials
from registry.reference import Reference, parse, resolve, with_options
from toolchain import progress
from toolchain.config import Config, load_config
from toolchain.errors import (
    AccessDenied,
    DiskFull,
    PlatformMismatch,
    ReferenceNotFound,
    RegistryBroke,
    RegistryConnectionRefused,
    RegistryFailed,
    RegistryFull,
    RegistryHostUnknown,
    RegistryProxyUnusable,
    RegistryUnreachable,
    RegistryUntrusted,
    UserError,
)

HERE = Reference(host="r.example:5000", repository="pitorch/system", tag="trixie-armhf")


def test_reference_comes_from_the_configuration() -> None:
    assert str(resolve(Config())) == "127.0.0.1:5000/pitorch/system:trixie-armhf"


@pytest.mark.parametrize(
    ("registry", "tag", "expected"),
    [
        ("registry.example.com/group", "", "registry.example.com/group/system:trixie-armhf"),
        ("registry.example.com/group/", "", "registry.example.com/group/system:trixie-armhf"),
        ("registry.example.com:8443/a/b", "1.0", "registry.example.com:8443/a/b/system:1.0"),
        ("localhost/a", "", "localhost/a/system:trixie-armhf"),
        (63 * "x" + ".example/a", "", 63 * "x" + ".example/a/system:trixie-armhf"),
        ("127.0.0.1:5000", "T", "127.0.0.1:5000/pitorch/system:T"),
        ("[::1]:5000/a", "", "[::1]:5000/a/system:trixie-armhf"),
        ("docker.io/someone", "", "docker.io/someone/system:trixie-armhf"),
        ("r.example:65535/a__b/c--d/e.f", "_" + 127 * "x", "r.example:65535/a__b/c--d/e.f/system:_" + 127 * "x"),
    ],
)
def test_options_override_the_configuration(registry: str, tag: str, expected: str) -> None:
    assert str(resolve(with_options(Config(), registry=registry, tag=tag))) == expected


def test_another_repository_can_be_configured() -> None:
    config = load_config({"registry": {"repository": "myrasp"}})
    found = resolve(with_options(config, registry="registry.cn-hangzhou.aliyuncs.com/ja1zhou", tag="torch"))
    assert str(found) == "registry.cn-hangzhou.aliyuncs.com/ja1zhou/myrasp:torch"


def test_docker_hub_has_another_api_host() -> None:
    assert resolve(with_options(Config(), registry="docker.io/someone")).api_host == "registry-1.docker.io"
    assert HERE.api_host == "r.example:5000"


@pytest.mark.parametrize(
    ("registry", "tag", "words"),
    [
        ("https://r.example/a", "", "must not contain a scheme"),
        ("r.example/a b", "", "is not a valid repository name"),
        ("r.example/a//b", "", "is not a valid repository name"),
        ("r.example/a:tag", "", "pass the tag with --tag"),
        ("r.example/a@sha256", "", "pass the tag with --tag"),
        ("r.example/.a", "", "is not a valid repository name"),
        ("r.example/a___b", "", "is not a valid repository name"),
        ("me:word@r.example/a", "", "must not contain a user or password"),
        ("/a", "", "is not the address of a registry"),
        ("r.example:65536/a", "", "is not the address of a registry"),
        ("[1::2::3]:5000/a", "", "is not the address of a registry"),
        (64 * "x" + ".example/a", "", "at most 63 characters"),
        ("someone/a", "", "Docker Hub"),
        ("r.example/" + 250 * "a", "", "too long"),
        ("r.example/a", ".a", "is not a valid tag"),
        ("r.example/a", 129 * "x", "is not a valid tag"),
    ],
)
def test_invalid_references_are_refused(registry: str, tag: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(with_options(Config(), registry=registry, tag=tag))
    assert words in str(caught.value)
    assert "word@" not in str(caught.value)
    assert caught.value.fix
    assert caught.value.exit_code == 10


def test_upper_case_names_are_refused() -> None:
    with pytest.raises(UserError, match="lower case") as caught:
        resolve(with_options(Config(), registry="127.0.0.1:5000/Upper"))
    assert caught.value.fix == "pass --registry 127.0.0.1:5000/upper"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("r.example/a", "neither a file nor an image"),
        ("r.example:5000/a", "neither a file nor an image"),
        ("r.example/A:1", "must be in lower case"),
        ("r.example/a..b:1", "'a..b' is not a valid repository name"),
        ("someone/a:1", "Docker Hub"),
        ("https://r.example/a:1", "must not contain a scheme"),
        ("me:word@r.example/a:1", "must not contain a user or password"),
        ("me:word@r.example/a", "neither a file nor an image"),
    ],
)
def test_invalid_image_names_are_refused_without_an_option(text: str, words: str) -> None:
    """``verify`` has no option --registry, so the message must not mention one."""
    with pytest.raises(UserError) as caught:
        parse(text)
    shown = str(caught.value)
    assert words in shown
    assert "--registry" not in shown
    assert "word@" not in shown
    assert "./inv verify" in caught.value.fix


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        # dockerd 20.10.24.
        ("no basic auth credentials", AccessDenied),
        ("unauthorized: authentication required", AccessDenied),
        ('Head "http://r.example:5000/v2/a/manifests/t": no basic auth credentials', AccessDenied),
        (
            'Get "https://r.example:5000/v2/": dial tcp 10.0.0.1:5000: connect: connection refused',
            RegistryConnectionRefused,
        ),
        ('Get "https://r.example/v2/": dial tcp: lookup r.example on 10.0.0.53:53: no such host', RegistryHostUnknown),
        ("dial tcp: lookup r.example on 10.0.0.53:53: read: connection refused", RegistryUnreachable),
        ('Get "https://r.example/v2/": net/http: TLS handshake timeout', RegistryUnreachable),
        ('Get "https://r.example/v2/": x509: certificate signed by unknown authority', RegistryUntrusted),
        ('Get "https://r.example/v2/": http: server gave HTTP response to HTTPS client', RegistryUntrusted),
        ("An image does not exist locally with the tag: r.example/a", ReferenceNotFound),
        ("manifest for r.example/a:t not found: manifest unknown: manifest unknown", ReferenceNotFound),
        ("invalid reference format: repository name must be lowercase", UserError),
        ("no matching manifest for linux/arm/v7 in the manifest list entries", PlatformMismatch),
        ("received unexpected HTTP status: 500 Internal Server Error", RegistryBroke),
        ('Put "http://127.0.0.1:5000/v2/a/manifests/x": EOF', RegistryBroke),
        (
            "failed to register layer: Error processing tar file(exit status 1): write /data: no space left on device",
            DiskFull,
        ),
        # Later engines and other registries.
        ("failed to resolve reference: r.example/a:t: not found: manifest unknown", ReferenceNotFound),
        (
            "no matching manifest for linux/arm/v7 in the manifest list entries: no match for platform in manifest: "
            "not found",
            PlatformMismatch,
        ),
        ("unknown: unknown error", RegistryBroke),
        ("denied: requested access to the resource is denied", AccessDenied),
        (
            "denied: adding 53.0 MiB of storage resource, which when updated to current usage of 4.9 GiB will exceed "
            "the configured upper limit of 5.0 GiB.",
            RegistryFull,
        ),
        ("write tcp 127.0.0.1:1->127.0.0.1:2: write: connection reset by peer", RegistryBroke),
        ("errors:\ndigest invalid\nmanifest blob unknown: blob unknown to registry\n", RegistryBroke),
        ("some new error", RegistryFailed),
    ],
)
def test_engine_messages_are_translated(message: str, kind: type[Exception]) -> None:
    fault = transfer.explain(message, HERE, None)
    assert type(fault) is kind
    assert fault.fix


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('Put "http://127.0.0.1:44013/v2/denied/eof/manifests/quota": EOF', RegistryBroke),
        ("Put http://127.0.0.1:44013/v2/denied/eof/manifests/quota: EOF", RegistryBroke),
        ("read tcp 127.0.0.1:54012->127.0.0.1:44013: read: connection reset by peer", RegistryBroke),
        ("read tcp [::1]:401->[::1]:44013: use of closed network connection", RegistryBroke),
        ("write tcp 127.0.0.1:44013: broken pipe, layer sha256:1401" + 60 * "0", RegistryBroke),
        ("layer 4010aaaabbbb: 24010401-0401-0401-0401-000000000401: unexpected EOF", RegistryBroke),
        ("manifest for 127.0.0.1:44013/denied/eof:quota not found: manifest unknown", ReferenceNotFound),
        ("An image does not exist locally with the tag: 127.0.0.1:44013/denied/eof", ReferenceNotFound),
        ("dial tcp 127.0.0.1:44013: connect: no route to host", RegistryUnreachable),
        ("127.0.0.1:44013/denied/eof:quota: some new error", RegistryFailed),
        ('Head "http://127.0.0.1:44013/v2/denied/eof/manifests/quota": no basic auth credentials', AccessDenied),
        ("unexpected status from PUT request to http://127.0.0.1:44013/v2/: 401", AccessDenied),
    ],
)
def test_names_and_addresses_do_not_affect_the_error(message: str, kind: type[Exception]) -> None:
    reference = Reference(host="127.0.0.1:44013", repository="denied/eof", tag="quota")
    assert type(transfer.explain(message, reference, None)) is kind


def test_long_messages_are_shortened_in_the_middle() -> None:
    message = (
        'failed commit on ref "layer-sha256:0": failed to do request: Put "http://r.example:5000/v2/a/blobs/uploads/1'
        f'?_state={500 * "x"}&digest=sha256%3A0": {300 * "y"} write: connection reset by peer'
    )
    fault = transfer.explain(message, HERE, None)
    assert isinstance(fault, RegistryBroke)
    assert fault.found.endswith("connection reset by peer")
    assert len(fault.found) < 320
    assert "xxx" not in fault.found


def test_secrets_are_not_in_repr() -> None:
    known = Credentials(user="me", password="hidden-1", identity_token="hidden-2", source="a test")
    assert "me" in repr(known)
    assert "hidden" not in repr(known)
    assert "hidden" not in str(transfer.explain("unauthorized", HERE, known))


def test_passwords_may_be_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "gehe\udcefm"  # a byte that is not UTF-8, as Python decodes it in an environment variable
    encoded = Credentials(user="me", password=secret).basic.removeprefix("Basic ")
    assert base64.b64decode(encoded) == b"me:gehe\xefm"
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"gehe\xefm"),
    )
    (tmp_path / "key.pem").write_bytes(key)
    monkeypatch.setattr(passwords, "_taken", {passwords.SIGNING: secret})
    assert signing.load_private(tmp_path / "key.pem")


def test_error_in_the_event_stream_is_raised() -> None:
    events: list[dict[str, Any]] = [
        {"status": "The push refers to repository [r.example/a]"},
        {"status": "Pushing", "progressDetail": {"current": 1, "total": 2}, "id": "a"},
        {"errorDetail": {"message": "unauthorized: no"}, "error": "unauthorized: no"},
    ]
    with pytest.raises(transfer.EngineReported, match="unauthorized: no"):
        transfer.Transfer("test").follow(events)


def test_event_stream_yields_digest_and_layers() -> None:
    digest = "sha256:" + 64 * "a"
    waits: list[int] = []
    shown = transfer.Transfer("test", lambda: waits.append(1))
    with pytest.raises(transfer.EngineReported):
        shown.follow(
            [
                {"status": "Pushed", "progressDetail": {}, "id": "one"},
                {"status": "Retrying in 2 seconds", "progressDetail": {}, "id": "two"},
                {"status": "Retrying in 1 second", "progressDetail": {}, "id": "two"},
                {"status": "Pushing", "progressDetail": {"current": 5, "total": 9}, "id": "two"},
                {"status": "Retrying in 3 seconds", "progressDetail": {}, "id": "two"},
                {"error": "EOF"},
            ]
        )
    assert len(waits) == 2, "expected one report per wait, not one per second"
    assert shown.digest == ""
    shown.follow(
        [
            {"status": "Layer already exists", "progressDetail": {}, "id": "one"},
            {"status": "Pushing", "progressDetail": {"current": 9, "total": 9}, "id": "two"},
            {"status": "Pushed", "progressDetail": {}, "id": "two"},
            {"status": f"t: digest: {digest} size: 735"},
            {"progressDetail": {}, "aux": {"Tag": "t", "Digest": digest, "Size": 735}},
        ]
    )
    assert (shown.digest, shown.moved) == (digest, {"one", "two"})


def test_insecure_hosts_come_from_the_engine() -> None:
    info = {
        "RegistryConfig": {
            "InsecureRegistryCIDRs": ["::1/128", "127.0.0.0/8"],
            "IndexConfigs": {"docker.io": {"Secure": True}, "plain.example:80": {"Secure": False}},
        }
    }
    for host in ("127.0.0.1", "127.9.9.9:5000", "localhost:5000", "[::1]:5000", "plain.example:80"):
        assert trust.is_insecure(host, info), host
    for host in ("docker.io", "192.0.2.1:5000", "nosuch.invalid"):
        assert not trust.is_insecure(host, info), host


def test_failed_requests_are_explained_by_their_cause() -> None:
    refused = requests.ConnectionError(urllib3.exceptions.ProtocolError("x", ConnectionRefusedError(111, "refused")))
    assert type(faults.explain(refused, "h")) is RegistryConnectionRefused
    late = requests.ConnectTimeout(urllib3.exceptions.ConnectTimeoutError("x", "timed out"))
    assert type(faults.explain(late, "h")) is RegistryUnreachable
    unknown = requests.ConnectionError(socket.gaierror(-2, "Name or service not known"))
    assert type(faults.explain(unknown, "h")) is RegistryHostUnknown
    socks = faults.explain(requests.exceptions.InvalidSchema("Missing dependencies for SOCKS support."), "h:1")
    assert type(socks) is RegistryProxyUnusable
    assert "PySocks" in socks.fix
    reset = requests.ConnectionError(urllib3.exceptions.ProtocolError("x", ConnectionResetError(104, "reset by peer")))
    assert isinstance(faults.explain(reset, "h"), RegistryBroke)
    bad = requests.exceptions.SSLError(ssl.SSLCertVerificationError(1, "certificate verify failed"))
    assert isinstance(faults.explain(bad, "h"), RegistryUntrusted)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[SSL: TLSV1_ALERT_PROTOCOL_VERSION] tlsv1 alert protocol version", RegistryUntrusted),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", RegistryUntrusted),
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol", RegistryBroke),
    ],
)
def test_letters_in_an_address_do_not_affect_the_error(text: str, kind: type[Exception]) -> None:
    """The state in an upload address is random and can contain the letters EOF, which are also an error message."""
    pool = urllib3.HTTPConnectionPool("h")
    address = "/v2/a/blobs/uploads/1?_state=EOF"
    fault = urllib3.exceptions.MaxRetryError(pool, address, urllib3.exceptions.SSLError(ssl.SSLError(1, text)))
    assert "EOF" in str(fault)
    found = faults.explain(requests.exceptions.SSLError(fault), "h")
    assert type(found) is kind
    assert ("plain HTTP" in found.found) is ("WRONG_VERSION" in text)


@pytest.mark.parametrize(
    ("detail", "full"),
    [
        (
            {"DriverName": "filesystem", "Enclosed": {"Op": "mkdir", "Path": "/quota/my/quota/_uploads", "Err": 28}},
            True,
        ),
        (
            {"DriverName": "filesystem", "Enclosed": {"Op": "mkdir", "Path": "/quota/my/quota/_uploads", "Err": 13}},
            False,
        ),
        ({"DriverName": "filesystem", "Enclosed": {"Op": "mkdir", "Path": "/srv", "Err": 280}}, False),
        ({"name": "my/quota", "reason": "no writer"}, False),
        ({"name": "my/quota", "reason": "the quota of the project is used up"}, True),
        ("write: no space left on device", True),
        ("Insufficient storage", True),
    ],
)
def test_full_storage_is_recognised_in_any_repository(detail: object, full: bool) -> None:
    answer = json.dumps({"errors": [{"code": "UNKNOWN", "message": "unknown error", "detail": detail}]})
    assert faults.is_full(answer, "my/quota") is full


def test_other_platforms_of_an_index_are_reported() -> None:
    entries = [{"digest": "sha256:1", "platform": {"os": "linux", "architecture": "arm64"}}]
    with pytest.raises(PlatformMismatch, match="linux/arm64"):
        distribution.choose_platform(json.loads(json.dumps({"manifests": entries})), "linux/arm/v7", HERE)


def upload_path(host: str, location: str, scheme: str = "https") -> str:
    """Return the path of an upload address that the registry at ``host`` has sent."""
    answer = requests.Response()
    answer.headers["Location"] = location
    with Connection(Reference(host=host, repository="a/b", tag="t"), insecure=False, actions="pull") as remote:
        remote._base = f"{scheme}://{host}"
        return remote.upload_path(answer)


@pytest.mark.parametrize(
    ("host", "location", "scheme"),
    [
        ("r.example", "/v2/u?s=1", "https"),
        ("r.example", "https://r.example:443/v2/u?s=1", "https"),
        ("r.example:443", "https://r.example/v2/u?s=1", "https"),
        ("127.0.0.1:80", "http://127.0.0.1/v2/u?s=1", "http"),
        ("R.Example:5000", "https://r.example:5000/v2/u?s=1", "https"),
        ("[::1]:443", "https://[::1]/v2/u?s=1", "https"),
        # A proxy that terminates TLS: the registry does not know its clients' scheme.
        ("r.example:443", "http://r.example/v2/u?s=1", "https"),
        ("r.example:8443", "http://r.example:8443/v2/u?s=1", "https"),
    ],
)
def test_upload_address_on_the_same_host_is_accepted(host: str, location: str, scheme: str) -> None:
    assert upload_path(host, location, scheme) == "/v2/u?s=1"


@pytest.mark.parametrize(
    "location",
    [
        "https://other.example/v2/u",
        "https://r.example:8443/v2/u",
        "https://r.example:99999/v2/u",
        "https://r.example:x/v2/u",
        "https://[r.example/v2/u",
    ],
)
def test_upload_address_on_another_host_is_refused(location: str) -> None:
    with pytest.raises(RegistryUntrusted, match="redirects uploads to another host"):
        upload_path("r.example", location)


class Timeouts:
    """A clock for requests to a registry that does not respond to the first one."""

    def __init__(self) -> None:
        self.activity = retries.Activity()
        self.now = 0.0
        self.requests = 0

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds

    def ping(self) -> None:
        """Do nothing: the registry responds."""

    def request(self) -> int:
        """Return the number of requests. The first one times out."""
        self.requests += 1
        if self.requests == 1:
            self.sleep(connection._READ_S)
            raise RegistryUnreachable("no response")
        return self.requests


def test_a_request_is_retried_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Timeouts()
    monkeypatch.setattr(retries, "time", remote)
    monkeypatch.setattr(progress, "warn", lambda _: None)
    assert retries.with_retries(remote.request, remote) == 2


def test_given_password_does_not_need_the_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"credsStore": "nosuchhelper"}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(passwords, "_taken", {})
    monkeypatch.setenv(credentials.PASSWORD_VARIABLE, "secret")
    found = credentials.find(HERE, user="me")
    assert found is not None
    assert (found.user, found.password) == ("me", "secret")
    with pytest.raises(AccessDenied, match="credential helper failed") as caught:
        credentials.find(HERE)
    assert "--user NAME" in caught.value.fix


@pytest.fixture
def ended_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a terminal on which the user has pressed Ctrl-D."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def end(*_: object, **__: object) -> str:
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(getpass, "getpass", end)
    monkeypatch.setattr(passwords, "_taken", {})


@pytest.mark.usefixtures("ended_terminal")
@pytest.mark.parametrize("user", ["", "me"])
def test_ctrl_d_at_a_prompt_is_no_input(user: str) -> None:
    with pytest.raises(AccessDenied, match="no input"):
        credentials.ask(HERE, user=user)


@pytest.mark.usefixtures("ended_terminal")
def test_ctrl_d_at_the_prompt_of_a_key_is_reported(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "key.pem").write_bytes(key)
    with pytest.raises(UserError, match=r"key\.pem cannot be used to sign"):
        signing.load_private(tmp_path / "key.pem")
