"""The apt mirror: pockets that verify, and the ways in which one does not. A real archive, signed and served here."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import apt
from images.flavour import Pocket, SigningKey, load_flavour, packages_for, target_flavour
from toolchain.config import Config, ImageConfig, load_config
from toolchain.errors import ConfigError, MirrorPocketUnusable, NetworkUnreachable, SourceUnavailable
from toolchain.process import run

PACKAGES = """Package: hello
Version: 1.0
Architecture: armhf
Maintainer: Nobody <nobody@example.org>
Filename: pool/hello.deb
Size: 1
SHA256: {digest}
Description: says hello

"""


class Archive:
    """A small archive: three pockets, each with a signed index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "gpg"
        self.home.mkdir(mode=0o700)
        self.keyring = folder / "archive.gpg"
        quiet = ["gpg", "--homedir", self.home, "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        self._gpg = quiet
        run([*quiet, "--quick-generate-key", "archive@example.org", "ed25519", "sign", "never"])
        run([*quiet, "--yes", "--output", self.keyring, "--export"])
        run([*quiet, "--yes", "--armor", "--output", folder / "archive.asc", "--export"])
        self.fingerprint = next(
            line.split(":")[9]
            for line in run([*quiet, "--with-colons", "--list-keys"]).output.splitlines()
            if line.startswith("fpr:")
        )
        for suite in ("stone", "stone-updates", "stone-security"):
            self.publish(suite)

    def publish(self, suite: str) -> None:
        """Write a pocket's index and sign it."""
        dist = self.folder / "dists" / suite
        binary = dist / "main" / "binary-armhf"
        binary.mkdir(parents=True, exist_ok=True)
        text = PACKAGES.format(digest=hashlib.sha256(b"x").hexdigest()).encode()
        (binary / "Packages.gz").write_bytes(gzip.compress(text, mtime=0))
        lines = ["Origin: Test", f"Suite: {suite}", f"Codename: {suite}", "Architectures: armhf", "Components: main"]
        lines += ["Date: Thu, 01 Jan 2026 00:00:00 UTC", "SHA256:"]
        for path in (binary / "Packages.gz",):
            content = path.read_bytes()
            lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} main/binary-armhf/{path.name}")
        lines.append(f" {hashlib.sha256(text).hexdigest()} {len(text)} main/binary-armhf/Packages")
        (dist / "Release").write_text("\n".join(lines) + "\n")
        run([*self._gpg, "--yes", "--clearsign", "--output", dist / "InRelease", dist / "Release"])

    def make_stale(self, suite: str) -> None:
        """The mirror's files are older than its index says."""
        (self.folder / "dists" / suite / "main" / "binary-armhf" / "Packages.gz").write_bytes(b"of yesterday")

    def source(self, suite: str, uri: str, name: str) -> apt.Source:
        """A source that names this archive."""
        return apt.Source(Pocket(name=name, suite=suite, mirror=""), uri, ("main",), self.keyring, ("armhf",))

    def close(self) -> None:
        """End the agent that gpg leaves behind for each home."""
        run(["gpgconf", "--homedir", self.home, "--kill", "all"])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with contextlib.closing(Archive(tmp_path_factory.mktemp("archive"))) as made:
        yield made


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def sources(archive: Archive, uri: str) -> tuple[apt.Source, ...]:
    return (
        archive.source("stone", uri, "main"),
        archive.source("stone-updates", uri, "updates"),
        archive.source("stone-security", uri, "security"),
    )


def test_all_pockets_verify(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=True)
    assert [item.pocket.name for item in found.sources] == ["main", "updates", "security"]
    assert found.warnings == ()
    assert len(found.indices) == 3
    assert any(path.name.endswith("Packages") or "Packages" in path.name for path in (tmp_path / "lists").iterdir())


def test_a_stale_pocket_is_left_out_with_a_warning(archive: Archive, tmp_path: Path) -> None:
    archive.make_stale("stone-security")
    try:
        with served(archive.folder) as uri:
            found = apt.verify(sources(archive, uri), tmp_path, strict=False)
            with pytest.raises(MirrorPocketUnusable, match="stone-security") as caught:
                apt.verify(sources(archive, uri), tmp_path, strict=True)
    finally:
        archive.publish("stone-security")
    assert [item.pocket.name for item in found.sources] == ["main", "updates"]
    (warning,) = found.warnings
    assert "stone-security" in warning
    assert "left out" in warning
    assert "image.strict" in caught.value.mend
    assert not any("stone-security" in path.name for path in (tmp_path / "lists").iterdir())


def test_the_main_pocket_cannot_be_left_out(archive: Archive, tmp_path: Path) -> None:
    archive.make_stale("stone")
    try:
        with served(archive.folder) as uri, pytest.raises(MirrorPocketUnusable, match="pocket stone of"):
            apt.verify(sources(archive, uri), tmp_path, strict=False)
    finally:
        archive.publish("stone")


def test_another_key_does_not_verify(archive: Archive, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with (
        contextlib.closing(Archive(other)) as stranger,
        served(stranger.folder) as uri,
        pytest.raises(MirrorPocketUnusable),
    ):
        apt.verify((archive.source("stone", uri, "main"),), tmp_path / "out", strict=False)


def test_a_mirror_that_does_not_answer(archive: Archive, tmp_path: Path) -> None:
    with pytest.raises(MirrorPocketUnusable) as caught:
        apt.verify((archive.source("stone", "http://127.0.0.1:1", "main"),), tmp_path, strict=False)
    assert "127.0.0.1" in caught.value.found


def test_a_failed_verification_leaves_the_old_lists(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        apt.verify(sources(archive, uri), tmp_path, strict=False)
    before = sorted(path.name for path in (tmp_path / "lists").iterdir())
    with pytest.raises(MirrorPocketUnusable):
        apt.verify((archive.source("stone", "http://127.0.0.1:1", "main"),), tmp_path, strict=False)
    assert sorted(path.name for path in (tmp_path / "lists").iterdir()) == before


def test_the_host_s_own_mirror_is_the_default() -> None:
    found = apt.host_mirrors()
    made = apt.sources_for(load_config({}), Path("/nonexistent"))
    assert found["main"].startswith(("http://", "https://", "file:", "copy:"))
    assert made[0].uri == found["main"]
    assert [item.pocket.suite for item in made] == ["trixie", "trixie-updates", "trixie-security"]


def test_a_set_mirror_wins() -> None:
    made = apt.sources_for(load_config({"image": {"mirror": "http://mirror.example.org/debian"}}), Path("/nonexistent"))
    assert {item.uri for item in made[:2]} == {"http://mirror.example.org/debian"}
    assert made[2].uri == "http://mirror.example.org/debian-security"


def test_sources_of_a_root_name_only_its_architectures() -> None:
    made = apt.sources_for(load_config({}), Path("/nonexistent"))
    assert "arch=armhf " in apt.sources_text(made, ("armhf",))
    assert "arch=amd64,armhf" in apt.sources_text(made, ("amd64", "armhf"))
    assert apt.sources_text(made, ("riscv64",)) == ""


def test_a_key_is_fetched_and_its_fingerprint_checked(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        apt.fetch_key(SigningKey(url=f"{uri}/archive.asc", fingerprint=archive.fingerprint), tmp_path / "key.gpg")
        assert (tmp_path / "key.gpg").stat().st_size > 100
        with pytest.raises(SourceUnavailable, match="not hold the key") as caught:
            apt.fetch_key(SigningKey(url=f"{uri}/archive.asc", fingerprint="0" * 40), tmp_path / "bad.gpg")
    assert archive.fingerprint in caught.value.found
    assert not (tmp_path / "bad.gpg").exists()


def test_a_key_out_of_reach_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(NetworkUnreachable) as caught:
        apt.fetch_key(SigningKey(url="http://127.0.0.1:1/key", fingerprint="0" * 40), tmp_path / "key.gpg")
    assert str(tmp_path / "key.gpg") in caught.value.mend


def test_raspbian_is_data() -> None:
    flavour = target_flavour(ImageConfig(flavour="raspbian"))
    assert flavour.key is not None
    assert len(flavour.key.fingerprint) == 40
    assert "rpi" in flavour.components
    with pytest.raises(ConfigError, match="Raspbian has armhf only"):
        target_flavour(ImageConfig(flavour="raspbian", architecture="arm64"))


@pytest.mark.parametrize(("suite", "gcc"), [("trixie", "14"), ("bookworm", "12")])
@pytest.mark.parametrize("architecture", ["armhf", "arm64"])
def test_package_lists_follow_suite_and_architecture(suite: str, gcc: str, architecture: str) -> None:
    image = ImageConfig(suite=suite, architecture=architecture)
    gnu = image.target.gnu
    assert f"g++-{gcc}-{gnu}" in packages_for("compiler", image)
    assert image.target.kernel_package in packages_for("bootable", image)
    assert f"libc6-dev:{architecture}" in packages_for("builder", image)
    raspberry = ImageConfig(suite=suite, kernel="raspberrypi")
    archive = load_flavour("raspberrypi-kernel", suite)
    assert set(archive.packages) <= set(packages_for("bootable", raspberry))
    assert raspberry.target.kernel_package not in packages_for("bootable", raspberry)


def test_config_is_not_shared() -> None:
    assert Config().image.label == "trixie-armhf"
    assert ImageConfig(flavour="raspbian").label == "raspbian-trixie-armhf"
