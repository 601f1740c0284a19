"""Tests of the apt mirror with valid and invalid pockets, using a real archive that is signed and served here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import apt_parts
import pytest
from apt_parts import Archive, Proxy, sources
from http_parts import served
from registry_parts import small_disk

from engine.proxies import build_environment
from images import apt, rootfs
from images.flavour import SigningKey, load_suite, packages_for, target_flavour
from toolchain.config import ImageConfig, load_config
from toolchain.errors import (
    CommandFailed,
    CommandTimedOut,
    ConfigError,
    DiskFull,
    MirrorPocketUnusable,
    NetworkUnreachable,
    SourceUnavailable,
)
from toolchain.files import tree_fingerprint
from toolchain.process import run

pytestmark = pytest.mark.usefixtures("apt_without_delays")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with contextlib.closing(Archive(tmp_path_factory.mktemp("archive"))) as made:
        yield made


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_all_pockets_verify(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=True)
    assert [item.pocket.name for item in found.sources] == ["main", "updates", "security"]
    assert found.warnings == ()
    assert len(found.indices) == 3
    assert any(path.name.endswith("Packages") or "Packages" in path.name for path in (tmp_path / "lists").iterdir())


def test_a_stale_pocket_is_left_out_with_a_warning(archive: Archive, tmp_path: Path) -> None:
    with archive.stale("stone-security"), served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=False)
        with pytest.raises(MirrorPocketUnusable, match="stone-security") as caught:
            apt.verify(sources(archive, uri), tmp_path, strict=True)
    assert [item.pocket.name for item in found.sources] == ["main", "updates"]
    assert found.names == {}
    (warning,) = found.warnings
    assert "stone-security" in warning
    assert "left out" in warning
    assert "image.strict" in caught.value.fix
    assert not any("stone-security" in path.name for path in (tmp_path / "lists").iterdir())


def test_the_main_pocket_cannot_be_left_out(archive: Archive, tmp_path: Path) -> None:
    with (
        archive.stale("stone"),
        served(archive.folder) as uri,
        pytest.raises(MirrorPocketUnusable, match="pocket stone of"),
    ):
        apt.verify(sources(archive, uri), tmp_path, strict=False)


@pytest.mark.parametrize("strict", [False, True])
def test_an_index_that_does_not_fit_on_the_disk_is_a_full_disk(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """On a full disk, apt itself reports only that the index cannot be fetched or verified."""
    noise = "".join(f" {os.urandom(32).hex()}\n" for _ in range(40_000))
    monkeypatch.setattr(apt_parts, "PACKAGES", apt_parts.PACKAGES.rstrip("\n") + "\n" + noise + "\n")
    archive.publish("large")
    with served(archive.folder) as uri, small_disk(tmp_path / "disk", "1m") as disk:
        wanted = (archive.source("stone", uri, "main"), archive.source("large", uri, "updates"))
        with pytest.raises(DiskFull, match="no room for the mirror's package lists") as caught:
            apt.verify(wanted, disk / "mirror", strict=strict)
        assert [path.name for path in (disk / "mirror").iterdir()] == []
    assert "build.folder" in caught.value.fix


def test_pocket_is_used_under_its_other_name(archive: Archive, tmp_path: Path) -> None:
    """During a mirror update, a pocket may have a new index but old files under one of its names.

    Under the pocket's other name, the index and the files are still old.
    """
    archive.publish("solid", codename="stone")
    with archive.stale("stone"), served(archive.folder) as uri:
        wanted = (archive.source("stone", uri, "main", also="solid"),)
        found = apt.verify(wanted, tmp_path, strict=False)
        with pytest.raises(MirrorPocketUnusable, match="pocket stone of"):
            apt.verify(wanted, tmp_path / "strict", strict=True)
    assert found.sources == wanted, "apt in the image must use the name of the release"
    assert found.names == {"stone": "solid"}
    (warning,) = found.warnings
    assert "under the name solid" in warning
    assert "01 Jan 2026" in warning
    lists = {path.name for path in (tmp_path / "lists").iterdir()}
    assert any(name.endswith("_dists_stone_InRelease") for name in lists)
    assert any("_dists_stone_main_binary-armhf_Packages" in name for name in lists)
    assert not any("solid" in name for name in lists)


def test_packages_come_from_a_pocket_under_its_other_name(archive: Archive, tmp_path: Path) -> None:
    archive.publish("solid", codename="stone")
    with archive.stale("stone"), served(archive.folder) as uri:
        found = apt.verify((archive.source("stone", uri, "main", also="solid"),), tmp_path, strict=False)
        names, log = ["greeter"], tmp_path / "log"
        made = apt.download(
            found.sources, tmp_path / "lists", ["armhf"], names, tmp_path / "archives", log, essential=False
        )
    assert len(made) == 2
    assert all(path.read_bytes() == b"x" for path in made)


@pytest.mark.parametrize("fault", ["another release", "absent", "stale too"])
def test_unusable_other_name_is_reported(archive: Archive, tmp_path: Path, fault: str) -> None:
    also, why = {
        "another release": ("sand", "this name now refers to sand"),
        "absent": ("nowhere", "does not have a Release file"),
        "stale too": ("solid", "File has unexpected size"),
    }[fault]
    archive.publish("sand", codename="sand")
    archive.publish("solid", codename="stone")
    with archive.stale("solid"), archive.stale("stone"), served(archive.folder) as uri:
        with pytest.raises(MirrorPocketUnusable, match="pocket stone of") as caught:
            apt.verify((archive.source("stone", uri, "main", also=also),), tmp_path, strict=False)
        wanted = (archive.source("stone-updates", uri, "main"), archive.source("stone", uri, "updates", also=also))
        (warning,) = apt.verify(wanted, tmp_path / "updates", strict=False).warnings
    for said in (str(caught.value.found), warning):
        of_its_own, _, of_the_other = said.partition(f"; its other name, {also}, cannot be used either: ")
        assert "/dists/stone/" in of_its_own
        assert why in of_the_other
        assert "Failed to fetch" not in of_the_other
    assert "left out" in warning
    assert not (tmp_path / "lists").exists()


def test_source_packages_are_downloaded_or_reported(archive: Archive, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with served(archive.folder) as uri:
        main = (archive.source("stone", uri, "main"),)
        apt.fetch_source(main, "hello", "1.0", out, tmp_path / "log")
        assert [path.name for path in out.iterdir()] == ["hello_1.0.dsc"]
        for package, version in (("hello", "2.0"), ("farewell", "1.0")):
            with pytest.raises(SourceUnavailable, match=f"{package} {version} cannot be fetched") as caught:
                apt.fetch_source(main, package, version, tmp_path, tmp_path / "log")
            assert package in caught.value.found


def test_a_source_package_is_fetched_by_the_pockets_other_name(archive: Archive, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    archive.publish("solid", codename="stone")
    with archive.stale("stone"), served(archive.folder) as uri:
        apt.fetch_source((archive.source("stone", uri, "main", "solid"),), "hello", "1.0", out, tmp_path / "log")
        for also in ("", "nowhere"):
            source = archive.source("stone", uri, "main", also)
            with pytest.raises(SourceUnavailable, match=r"hello 1\.0 cannot be fetched") as caught:
                apt.fetch_source((source,), "hello", "1.0", tmp_path, tmp_path / "log")
            assert "stone" in caught.value.found
    assert [path.name for path in out.iterdir()] == ["hello_1.0.dsc"]


def test_another_key_does_not_verify(archive: Archive, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with (
        contextlib.closing(Archive(other)) as other_user,
        served(other_user.folder) as uri,
        pytest.raises(MirrorPocketUnusable),
    ):
        apt.verify((archive.source("stone", uri, "main"),), tmp_path / "out", strict=False)


def test_unresponsive_mirror_is_reported(archive: Archive, tmp_path: Path) -> None:
    with pytest.raises(MirrorPocketUnusable) as caught:
        apt.verify((archive.source("stone", "http://127.0.0.1:1", "main"),), tmp_path, strict=False)
    assert "127.0.0.1" in caught.value.found


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*build_environment(), "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variable", "scheme"),
    [
        ("all_proxy", "http://"),
        ("ALL_PROXY", "http://"),
        ("all_proxy", ""),
        ("http_proxy", "http://"),
        ("HTTP_PROXY", "http://"),
    ],
)
def test_proxy_from_any_variable_is_used(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str
) -> None:
    """The mirror's host does not exist, so only requests through the proxy succeed."""
    without_proxies(monkeypatch)
    with served(archive.folder) as uri:
        proxy = Proxy(uri)
        with proxy.running() as address:
            monkeypatch.setenv(variable, scheme + address)
            found = apt.verify(sources(archive, "http://mirror.invalid"), tmp_path, strict=True)
    assert len(found.sources) == 3
    assert "http://mirror.invalid/dists/stone/InRelease" in proxy.asked
    assert len(proxy.asked) >= 6, "two requests per pocket, for its index and its list"


def test_hosts_in_no_proxy_are_contacted_directly(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_proxies(monkeypatch)
    with served(archive.folder) as uri:
        proxy = Proxy(uri)
        with proxy.running() as address:
            monkeypatch.setenv("all_proxy", f"http://{address}")
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            apt.verify(sources(archive, uri), tmp_path, strict=True)
    assert proxy.asked == []


def test_socks_proxy_is_passed_in_apts_format(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy's port is closed. apt must report this, and not an unknown type of proxy."""
    without_proxies(monkeypatch)
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(MirrorPocketUnusable) as caught:
        apt.verify((archive.source("stone", "http://mirror.invalid", "main"),), tmp_path, strict=False)
    assert "127.0.0.1:1" in caught.value.found
    assert "Unsupported proxy" not in caught.value.found


def test_key_is_fetched_through_the_proxy(archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_proxies(monkeypatch)
    key = SigningKey(url="http://mirror.invalid/archive.asc", fingerprint=archive.fingerprint)
    with served(archive.folder) as uri:
        proxy = Proxy(uri)
        with proxy.running() as address:
            monkeypatch.setenv("all_proxy", f"http://{address}")
            apt.fetch_key(key, tmp_path / "key.gpg")
    assert proxy.asked == ["http://mirror.invalid/archive.asc"]


@pytest.mark.skipif(importlib.util.find_spec("socks") is not None, reason="requires that PySocks is not installed")
def test_key_error_behind_socks_proxy_names_missing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_proxies(monkeypatch)
    monkeypatch.setenv("all_proxy", "socks5h://127.0.0.1:1")
    with pytest.raises(NetworkUnreachable) as caught:
        apt.fetch_key(SigningKey(url="http://mirror.invalid/key", fingerprint="0" * 40), tmp_path / "key.gpg")
    assert "PySocks" in caught.value.fix


def test_a_failed_verification_leaves_the_old_lists(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        apt.verify(sources(archive, uri), tmp_path, strict=False)
    before = sorted(path.name for path in (tmp_path / "lists").iterdir())
    with pytest.raises(MirrorPocketUnusable):
        apt.verify((archive.source("stone", "http://127.0.0.1:1", "main"),), tmp_path, strict=False)
    assert sorted(path.name for path in (tmp_path / "lists").iterdir()) == before


def test_mirror_of_this_pc_is_the_default() -> None:
    found = apt.host_mirrors()
    made = apt.sources_for(load_config({}), Path("/nonexistent"))
    assert found["main"].startswith(("http://", "https://", "file:", "copy:"))
    assert made[0].uri == found["main"]
    assert [item.pocket.suite for item in made] == ["trixie", "trixie-updates", "trixie-security"]


@pytest.mark.parametrize(
    ("scheme", "text", "found"),
    [
        ("file", "# of this cloud\n\n{uri}/\tpriority:1\nhttp://mirror.invalid/debian\n", "{uri}"),
        ("file", "# none\n", None),
        ("file", None, None),
        ("http", None, None),
    ],
)
def test_first_mirror_of_a_list_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, text: str | None, found: str | None
) -> None:
    """Debian's cloud images have a mirror list, whereas images that pitorch builds do not."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    listed = tmp_path / "mirrors" / "debian.list"
    listed.parent.mkdir()
    config = tmp_path / "apt.conf"
    config.write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "-";\n'
        f'Dir::State::lists "{tmp_path}/lists";\nAPT::Sandbox::User "root";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(config))
    monkeypatch.setattr(apt, "host_mirrors", apt.host_mirrors.__wrapped__)  # without an earlier call's cached result
    with (
        contextlib.closing(Archive(tmp_path / "archive", label="Debian")) as made,
        served(made.folder) as uri,
        served(listed.parent) as elsewhere,
    ):
        place = {"file": f"mirror+file:{listed}", "http": f"mirror+{elsewhere}/debian.list"}[scheme]
        options = f"arch=armhf signed-by={made.keyring}"
        (tmp_path / "sources.list").write_text(f"deb [{options}] {place} stone main\n")
        listed.write_text(f"{uri}\n")
        run(["apt-get", "update"])
        if text is None:
            listed.unlink()
        else:
            listed.write_text(text.format(uri=uri))
        assert apt.host_mirrors() == ({"main": found.format(uri=uri)} if found else {})
        if not found:
            with pytest.raises(ConfigError, match="INVOKE_IMAGE_MIRROR="):
                apt.sources_for(load_config({}), tmp_path / "keys")


def test_configured_mirror_takes_precedence() -> None:
    made = apt.sources_for(load_config({"image": {"mirror": "http://mirror.example.org/debian"}}), Path("/nonexistent"))
    assert {item.uri for item in made[:2]} == {"http://mirror.example.org/debian"}
    assert made[2].uri == "http://mirror.example.org/debian-security"


def test_trailing_slash_of_a_mirror_is_ignored() -> None:
    """A trailing slash once made pitorch search the main archive for the security pocket, and omit the pocket."""

    def places(**image: str) -> list[str]:
        return [item.uri for item in apt.sources_for(load_config({"image": image}), Path("/nonexistent"))]

    plain = places(mirror="http://mirror.example.org/debian")
    assert plain[2] == "http://mirror.example.org/debian-security"
    assert places(mirror="http://mirror.example.org/debian/") == plain
    named = places(mirror="http://mirror.example.org/debian//", security_mirror="http://mirror.example.org/security/")
    assert named == [*plain[:2], "http://mirror.example.org/security"]
    raspbian = places(flavour="raspbian", mirror="http://mirror.example.org/raspbian/")
    assert "http://mirror.example.org/raspbian" in raspbian
    assert not [uri for uri in raspbian if uri.endswith("/")]


def test_sources_of_a_root_name_only_its_architectures() -> None:
    made = apt.sources_for(load_config({}), Path("/nonexistent"))
    assert "arch=armhf " in apt.sources_text(made, ("armhf",))
    assert "arch=amd64,armhf" in apt.sources_text(made, ("amd64", "armhf"))
    assert apt.sources_text(made, ("riscv64",)) == ""


def test_packages_are_downloaded_once(archive: Archive, tmp_path: Path) -> None:
    archives = tmp_path / "archives" / "rootfs"
    with served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=True)
        lists = tmp_path / "lists"
        before = tree_fingerprint(lists)
        apt.download(found.sources, lists, ("armhf",), ["hello"], archives, tmp_path / "log")
        with pytest.raises(CommandFailed) as caught:
            apt.download(found.sources, lists, ("armhf",), ["hello", "goodbye"], archives, tmp_path / "log")
    assert "Unable to locate package goodbye" in caught.value.tail
    assert [path.name for path in archives.glob("*.deb")] == ["hello_1.0_armhf.deb"]
    assert tree_fingerprint(lists) == before
    assert [path.name for path in archives.parent.iterdir()] == ["rootfs"]
    # The archive is no longer served, so apt must use the downloaded package.
    apt.download(found.sources, lists, ("armhf",), ["hello"], archives, tmp_path / "log")


def test_excluded_dependencies_are_left_out(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=True)
        cases = {"all": (), "foreign": ("hello:arm64",), "some": ("hello:armhf",), "own": ("hello",)}
        for name, without in cases.items():
            archives = tmp_path / name / "rootfs"
            apt.download(
                found.sources, tmp_path / "lists", ("armhf",), ["greeter"], archives, tmp_path / "log", without=without
            )
            expected = {"greeter_1.0_armhf.deb"} | ({"hello_1.0_armhf.deb"} if name in ("all", "foreign") else set())
            assert {path.name for path in archives.glob("*.deb")} == expected


def test_apt_configuration_of_this_pc_is_ignored(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pins.d").mkdir()
    for place in ("pins", "pins.d/all"):
        (tmp_path / place).write_text("Package: *\nPin: release o=Test\nPin-Priority: -1\n")
    config = tmp_path / "apt.conf"
    with served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=True)
        monkeypatch.setenv("APT_CONFIG", str(config))
        for number, setting in enumerate(
            [
                'APT::Default-Release "nonsense";',
                f'Dir::Etc::preferences "{tmp_path}/pins";',
                f'Dir::Etc::preferencesparts "{tmp_path}/pins.d";',
            ]
        ):
            config.write_text(setting + "\n")
            archives = tmp_path / str(number) / "rootfs"
            apt.download(found.sources, tmp_path / "lists", ("armhf",), ["hello"], archives, tmp_path / "log")
            assert [path.name for path in archives.glob("*.deb")] == ["hello_1.0_armhf.deb"]


def test_unavailable_packages_are_reported(archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "logs" / "archives.log"
    with served(archive.folder) as uri:
        found = apt.verify(sources(archive, uri), tmp_path, strict=True)
        spec = rootfs.RootSpec(
            role="small",
            suite="stone",
            architectures=("armhf",),
            packages=("hello",),
            sources=found.sources,
            lists=tmp_path / "lists",
            archives=tmp_path / "archives",
            source_date_epoch=0,
        )
        rootfs.download(spec, log)
        assert "apt-get --yes" in log.read_text(), "the log must also be written on success"
        assert "hello" in log.read_text().partition("\n")[2]
        with pytest.raises(
            CommandFailed, match="the mirror lacks a package that the small root filesystem requires"
        ) as caught:
            rootfs.download(dataclasses.replace(spec, packages=("hello", "goodbye")), log)
        assert "package goodbye in stone for armhf" in caught.value.expected
        with pytest.raises(CommandFailed, match="fetching the packages of the small root filesystem failed") as caught:
            rootfs.download(dataclasses.replace(spec, packages=("hello=2.0",)), log)
        assert "apt-get" in caught.value.expected
        assert "Version '2.0' for 'hello' was not found" in caught.value.found
        assert str(log) in caught.value.found
        assert "Version '2.0'" in log.read_text()
        assert "goodbye" not in log.read_text(), "the log must contain a single run"
        with monkeypatch.context() as changed:
            changed.setattr(apt, "_UPDATE_LIMIT_S", 0.0001)
            with pytest.raises(CommandTimedOut):
                rootfs.download(spec, log)
        with monkeypatch.context() as changed:
            changed.setattr(rootfs, "_ROOM_FOR_ARCHIVES_MIB", 1 << 40)
            with pytest.raises(DiskFull, match="packages of the small root"):
                rootfs.download(spec, log)
        package = archive.folder / "pool" / "hello.deb"
        package.unlink()
        try:
            with pytest.raises(NetworkUnreachable) as unreachable:
                rootfs.download(dataclasses.replace(spec, archives=tmp_path / "others"), log)
        finally:
            package.write_bytes(b"x")
    assert "--update" in unreachable.value.fix


def test_a_key_is_fetched_and_its_fingerprint_checked(archive: Archive, tmp_path: Path) -> None:
    with served(archive.folder) as uri:
        apt.fetch_key(SigningKey(url=f"{uri}/archive.asc", fingerprint=archive.fingerprint), tmp_path / "key.gpg")
        assert (tmp_path / "key.gpg").stat().st_size > 100
        with pytest.raises(SourceUnavailable, match="is not the pinned key") as caught:
            apt.fetch_key(SigningKey(url=f"{uri}/archive.asc", fingerprint="0" * 40), tmp_path / "bad.gpg")
    assert archive.fingerprint in caught.value.found
    assert not (tmp_path / "bad.gpg").exists()


def test_unreachable_key_error_names_its_destination(tmp_path: Path) -> None:
    with pytest.raises(NetworkUnreachable) as caught:
        apt.fetch_key(SigningKey(url="http://127.0.0.1:1/key", fingerprint="0" * 40), tmp_path / "key.gpg")
    assert str(tmp_path / "key.gpg") in caught.value.fix


@pytest.mark.parametrize("image", [{"flavour": "raspbian"}, {"kernel": "raspberrypi"}])
def test_listing_sources_does_not_fetch_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: dict[str, str]
) -> None:
    config = load_config({"image": {**image, "mirror": "http://mirror.example.org/debian"}})
    fetched: list[Path] = []
    monkeypatch.setattr(apt, "fetch_key", lambda _, path: fetched.append(path))
    keyrings = tmp_path / "keys"
    named = {item.keyring for item in apt.sources_for(config, keyrings) if item.keyring.parent == keyrings}
    assert (len(named), fetched, keyrings.exists()) == (1, [], False)
    apt.fetch_keys(config, keyrings)
    assert set(fetched) == named


def test_a_missing_debian_mirror_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ubuntu, for example, apt's sources do not contain a Debian mirror."""
    monkeypatch.setattr(apt, "host_mirrors", dict)
    with pytest.raises(ConfigError, match="INVOKE_IMAGE_MIRROR="):
        apt.sources_for(load_config({}), Path("/nonexistent"))
    with pytest.raises(ConfigError, match="/etc/apt/sources") as caught:
        apt.sources_for(load_config({"image": {"flavour": "raspbian"}}), Path("/nonexistent"))
    assert "INVOKE_IMAGE_MIRROR" not in str(caught.value), "for Raspbian images, this variable sets Raspbian's mirror"


def test_raspbian_is_defined_by_data_for_armhf() -> None:
    flavour = target_flavour(ImageConfig(flavour="raspbian"))
    assert flavour.key is not None
    assert len(flavour.key.fingerprint) == 40
    assert "rpi" in flavour.components
    with pytest.raises(ConfigError, match="Raspbian has only armhf"):
        target_flavour(ImageConfig(flavour="raspbian", architecture="arm64"))


@pytest.mark.parametrize(("suite", "gcc"), [("trixie", "14"), ("bookworm", "12")])
@pytest.mark.parametrize("architecture", ["armhf", "arm64"])
def test_package_lists_follow_suite_and_architecture(suite: str, gcc: str, architecture: str) -> None:
    image = ImageConfig(suite=suite, architecture=architecture)
    gnu = image.target.gnu
    assert f"g++-{gcc}-{gnu}" in packages_for("compiler", image)
    assert image.target.kernel_package in packages_for("bootable", image)
    assert f"libpython{load_suite(suite).python}-dev:{architecture}" in packages_for("builder", image)
    assert f"libasan8-{architecture}-cross" in packages_for("not_among_tools", image)
    raspberry = ImageConfig(suite=suite, architecture=architecture, kernel="raspberrypi")
    kernel = {"armhf": "linux-image-rpi-v7", "arm64": "linux-image-rpi-v8"}[architecture]
    assert {kernel, "raspi-firmware"} <= {*packages_for("bootable", raspberry)}
    kernels = [name for name in packages_for("bootable", raspberry) if name.startswith("linux-image")]
    assert kernels == [kernel]


def test_raspberry_pi_kernel_is_limited_to_its_architectures() -> None:
    image = {"kernel": "raspberrypi", "architecture": "amd64", "mirror": "http://mirror.example.org/debian"}
    with pytest.raises(ConfigError, match=r"only for armhf, arm64, found 'amd64'; set image\.kernel: distribution"):
        apt.sources_for(load_config({"image": image}), Path("/nonexistent"))
    assert apt.sources_for(load_config({"image": {**image, "profile": "container"}}), Path("/nonexistent"))
