"""Tests of the package index for the board's pip: requests, pip itself, and files that must not be served."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests
from http_parts import served
from test_torch_wheel import a_wheel
from waiting import eventually
from wheel_parts import EM_ARM, EM_X86_64, HARD, elf, make_wheel, torch_wheel

from flow.serve_wheels import Offer, serve_wheels
from recipes import recipe
from recipes.torch import provenance, resolve
from recipes.tvm_ffi import locate as tvm_ffi
from toolchain import progress
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ArtefactDamaged, ArtefactMissing, InUse, PlatformMismatch, UserError
from toolchain.ports import free_port
from wheels import artefacts
from wheels.index import instructions, running_index, wheels_in
from wheels.wheelhouse import REPLACED

TORCH = "torch-2.6.0-cp313-cp313-linux_armv7l.whl"


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """Make a folder with two wheels, and files that must not be served."""
    folder = tmp_path / "wheelhouse"
    make_wheel(folder, {"thing.py": "x = 1\n", "blob": os.urandom(300_000)}, tag="py3-none-any", purelib=True)
    make_wheel(folder, {"torch.py": "x = 1\n"}, name="torch", version="2.6.0")
    make_wheel(folder / REPLACED, name="old", tag="py3-none-any")
    (folder / "README.md").write_text("not a wheel")
    (folder / "thing-1.0.tar.gz").write_text("not a wheel either")
    (folder / "no.whl").write_text("no wheel's name")
    (tmp_path / "secret-1.0-py3-none-any.whl").write_text("outside the wheelhouse")
    (folder / "secret-1.0-py3-none-any.whl").symlink_to(tmp_path / "secret-1.0-py3-none-any.whl")
    return folder


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(progress, "say", lines.append)
    return lines


def offered_from(*folders: Path) -> Callable[[], Mapping[str, Path]]:
    return functools.partial(wheels_in, folders)


@pytest.fixture
def index(wheelhouse: Path, printed: list[str]) -> Iterator[str]:
    """Serve the index; yield its root URL."""
    with running_index(offered_from(wheelhouse)) as url:
        yield url.removesuffix("/simple/")


def get(url: str, method: str = "GET", **options: object) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, timeout=30, **options)  # type: ignore[arg-type]


def raw(index: str, target: str, method: str = "GET") -> bytes:
    """Send a request without normalising its path, and return the response."""
    host, _, port = index.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{method} {target} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        parts = []
        while block := connection.recv(1 << 16):
            parts.append(block)
    return b"".join(parts)


def wait_for(printed: list[str], count: int) -> None:
    """Wait for lines, because the server prints a request after the client has received the response."""
    eventually(lambda: len(printed) >= count)


def config_for(tmp_path: Path, wheelhouse: Path, **wheels: object) -> Config:
    return load_config(
        {
            "build": {"folder": str(tmp_path / "build")},
            "torch": {"wheelhouse": [str(wheelhouse)]},
            "wheels": {"address": "127.0.0.1", "port": free_port(), **wheels},
        }
    )


def test_the_index_lists_wheels_with_their_sha256(index: str, wheelhouse: Path) -> None:
    page = get(f"{index}/simple/").text
    assert re.findall(r'href="([^"]+)"', page) == ["/simple/thing/", "/simple/torch/"]
    answer = get(f"{index}/simple/thing/")
    (link,) = re.findall(r'href="([^"]+)"', answer.text)
    path, _, digest = link.partition("#sha256=")
    wheel = wheelhouse / "thing-1.0-py3-none-any.whl"
    assert digest == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert requests.compat.urljoin(answer.url, path) == f"{index}/packages/{wheel.name}"
    assert get(f"{index}/packages/{wheel.name}").content == wheel.read_bytes()


def test_names_are_normalised_as_in_pep_503(index: str, wheelhouse: Path) -> None:
    assert get(f"{index}/simple/Torch/").url == f"{index}/simple/torch/"
    assert get(f"{index}/simple/nothing/").status_code == 404
    make_wheel(wheelhouse, name="foo_Bar.baz", tag="py3-none-any")
    for name in ("foo-bar-baz", "Foo_Bar.baz", "foo--bar__BAZ", "foo.bar.baz"):
        answer = get(f"{index}/simple/{name}/")
        assert (answer.status_code, answer.url) == (200, f"{index}/simple/foo-bar-baz/"), name
        assert "foo_Bar.baz-1.0-py3-none-any.whl" in answer.text


@pytest.mark.parametrize(
    ("path", "code", "target"),
    [
        ("/simple", 308, "/simple/"),
        ("/simple/thing", 308, "/simple/thing/"),
        ("/simple/Thing", 308, "/simple/Thing/"),
        ("/simple/Thing/", 301, "/simple/thing/"),
        ("/simple/Nothing.At_All/", 301, "/simple/nothing-at-all/"),
    ],
)
def test_other_addresses_redirect_to_those_of_pep_503(index: str, path: str, code: int, target: str) -> None:
    answer = get(f"{index}{path}", allow_redirects=False)
    assert answer.status_code == code
    assert requests.compat.urljoin(answer.url, answer.headers["Location"]) == f"{index}{target}"


def test_wheels_that_are_added_later_are_served(index: str, wheelhouse: Path) -> None:
    make_wheel(wheelhouse, name="later", tag="py3-none-any")
    assert "later-1.0" in get(f"{index}/simple/later/").text


def test_pip_downloads_and_verifies(index: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    argv = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "download", "--no-deps"]
    argv += ["--no-cache-dir", "--index-url", f"{index}/simple/", "--dest", str(tmp_path / "got"), "thing"]
    # Bypass this machine's proxy.
    environment |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["thing-1.0-py3-none-any.whl"]


@pytest.mark.parametrize(
    ("range_", "slice_"),
    [("bytes=0-0", slice(0, 1)), ("bytes=100-199", slice(100, 200)), ("bytes=1000-", slice(1000, None)),
     ("bytes=-10", slice(-10, None)), ("bytes=100-99999999", slice(100, None))],
)  # fmt: skip
def test_ranges(index: str, wheelhouse: Path, range_: str, slice_: slice) -> None:
    whole = (wheelhouse / "thing-1.0-py3-none-any.whl").read_bytes()
    answer = get(f"{index}/packages/thing-1.0-py3-none-any.whl", headers={"Range": range_})
    assert answer.status_code == 206
    assert answer.content == whole[slice_]
    first = (slice_.start or 0) % len(whole)
    assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(whole)}"


@pytest.mark.parametrize("range_", ["items=0-1", "bytes=0-1,4-5", "bytes=0-1, 4-", "Bytes=0-,-1", "nonsense", "=", ""])
def test_unsupported_ranges_get_the_complete_file(index: str, wheelhouse: Path, range_: str) -> None:
    answer = get(f"{index}/packages/thing-1.0-py3-none-any.whl", headers={"Range": range_})
    assert answer.status_code == 200
    assert "Content-Range" not in answer.headers
    assert answer.content == (wheelhouse / "thing-1.0-py3-none-any.whl").read_bytes()


def test_head_requests_ignore_ranges(index: str, wheelhouse: Path) -> None:
    answer = get(f"{index}/packages/thing-1.0-py3-none-any.whl", "HEAD", headers={"Range": "bytes=0-1"})
    assert answer.status_code == 200
    assert int(answer.headers["Content-Length"]) == (wheelhouse / "thing-1.0-py3-none-any.whl").stat().st_size


@pytest.mark.parametrize("range_", ["bytes=9999999-", "bytes=5-4"])
def test_ranges_outside_the_wheel_are_rejected(index: str, range_: str) -> None:
    assert get(f"{index}/packages/thing-1.0-py3-none-any.whl", headers={"Range": range_}).status_code == 416


def test_interrupted_downloads_can_be_resumed(index: str, wheelhouse: Path) -> None:
    url = f"{index}/packages/thing-1.0-py3-none-any.whl"
    whole = (wheelhouse / "thing-1.0-py3-none-any.whl").read_bytes()
    with contextlib.closing(get(url, stream=True)) as broken:
        part = next(broken.iter_content(1000))
    rest = get(url, headers={"Range": f"bytes={len(part)}-"})
    assert part + rest.content == whole


def test_head_sends_no_content(index: str, wheelhouse: Path) -> None:
    answer = get(f"{index}/packages/thing-1.0-py3-none-any.whl", "HEAD")
    assert answer.content == b""
    assert int(answer.headers["Content-Length"]) == (wheelhouse / "thing-1.0-py3-none-any.whl").stat().st_size
    assert answer.headers["Accept-Ranges"] == "bytes"


@pytest.mark.parametrize(
    "target",
    [
        "/packages/README.md",
        "/packages/thing-1.0.tar.gz",
        "/packages/no.whl",
        "/packages/replaced/old-1.0-py3-none-any.whl",
        "/packages/secret-1.0-py3-none-any.whl",
        "/packages/../secret-1.0-py3-none-any.whl",
        "/packages/..%2fsecret-1.0-py3-none-any.whl",
        "/packages/%2e%2e/secret-1.0-py3-none-any.whl",
        "/packages/....//secret-1.0-py3-none-any.whl",
        "/packages//etc/passwd",
        "/packages/../../../../../../../../etc/passwd",
        "/packages/%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
        "/packages/..\\..\\etc\\passwd",
        "/packages/thing-1.0-py3-none-any.whl%00.txt",
        "/../../etc/passwd",
        "/simple/../packages/README.md",
    ],
)
def test_other_files_are_not_served(index: str, target: str) -> None:
    answer = raw(index, target)
    status = int(answer.split(b" ", 2)[1])
    assert status != 200, answer
    for secret in (b"outside the wheelhouse", b"not a wheel", b"no wheel's name", b"root:"):
        assert secret.strip() not in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(index: str, wheelhouse: Path, method: str) -> None:
    before = sorted(path.name for path in wheelhouse.iterdir())
    body = {":action": "file_upload", "name": "evil", "version": "1"}
    upload = {"content": ("evil-1.0-py3-none-any.whl", b"evil")}
    assert get(f"{index}/", method, data=body, files=upload).status_code == 405
    assert (
        get(f"{index}/", method, data={":action": "remove_pkg", "name": "thing", "version": "1.0"}).status_code == 405
    )
    assert sorted(path.name for path in wheelhouse.iterdir()) == before


def test_each_request_prints_one_line(index: str, printed: list[str]) -> None:
    get(f"{index}/simple/thing/")
    wait_for(printed, 1)
    get(f"{index}/packages/thing-1.0-py3-none-any.whl", headers={"Range": "bytes=0-1023"})
    wait_for(printed, 2)
    raw(index, "/simple/%1b%5b31mred/")
    wait_for(printed, 3)
    raw(index, "/simple/", "\x1b]0;GET\x07")
    wait_for(printed, 4)
    assert len(printed) == 4
    assert re.fullmatch(r" *127\.0\.0\.1 GET /simple/thing/ 200 \d+ B, \d+\.\d s", printed[0])
    assert re.fullmatch(r" *127\.0\.0\.1 GET /packages/thing-1.0-py3-none-any.whl 206 1.0 KiB, \d+\.\d s", printed[1])
    assert all(line.isprintable() for line in printed), "control sequences from clients must not be printed"
    assert r"'\x1b]0;GET\x07' /simple/ 405" in printed[3]


def damage_metadata(wheel: Path, *, how: int = zipfile.ZIP_DEFLATED) -> None:
    """Make a wheel whose compressed metadata is damaged."""
    with zipfile.ZipFile(wheel, "w", how) as archive:
        archive.writestr("thing.py", "x = 1\n")
        archive.writestr("thing-1.0.dist-info/METADATA", f"Name: thing\nRequires-Python: >=3\n\n{'text ' * 99}")
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("thing-1.0.dist-info/METADATA")
    content = bytearray(wheel.read_bytes())
    begin = member.header_offset + 30 + len(member.filename)
    # Skip the header of LZMA.
    for place in range(begin + (0 if how == zipfile.ZIP_DEFLATED else 9), begin + member.compress_size):
        content[place] ^= 0xFF
    wheel.write_bytes(content)


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_wheel_with_damaged_metadata_is_listed(index: str, wheelhouse: Path, printed: list[str], how: int) -> None:
    make_wheel(wheelhouse, name="thing", version="2.0", tag="py3-none-any")
    damage_metadata(wheelhouse / "thing-1.0-py3-none-any.whl", how=how)
    answer = get(f"{index}/simple/thing/")
    assert answer.status_code == 200
    assert re.findall(r">(thing-[^<]+)<", answer.text) == [
        f"thing-{number}-py3-none-any.whl" for number in ("1.0", "2.0")
    ]
    assert "data-requires-python" not in answer.text
    wait_for(printed, 1)


def test_errors_are_printed_as_warnings(
    printed: list[str], warned: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    def offered() -> Mapping[str, Path]:
        raise ValueError("\x1b[31munexpected")

    with running_index(offered) as url:
        answer = get(f"{url}thing/")
        wait_for(printed, 1)
    assert answer.status_code == 500
    assert "unexpected" not in answer.text
    assert re.fullmatch(r" *127\.0\.0\.1 GET /simple/thing/ 500 \d+ B, \d+\.\d s", printed[0])
    (line,) = warned
    assert line.startswith("/simple/thing/ cannot be served: ")
    assert "ValueError: \\x1b[31munexpected" in line
    assert capfd.readouterr().err == ""


def test_read_errors_are_printed_as_warnings(
    printed: list[str], warned: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The served file is /proc/self/mem: the kernel returns EIO, because address 0 is not mapped."""
    with running_index(lambda: {TORCH: Path("/proc/self/mem")}) as url:
        get(url.replace("/simple/", f"/packages/{TORCH}"))
        wait_for(printed, 1)
    assert f"GET /packages/{TORCH} 200 0 B" in printed[0]
    assert [line for line in warned if "Input/output error" in line]
    assert capfd.readouterr().err == ""


@pytest.fixture
def large(wheelhouse: Path) -> Path:
    """Make a file that is named like a wheel and is larger than the socket buffers."""
    path = wheelhouse / "large-1.0-py3-none-any.whl"
    path.write_bytes(bytes(32 << 20))
    return path


def test_log_shows_the_progress_of_a_download(
    index: str, large: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "console", progress.make_console(file=io.StringIO()))
    monkeypatch.setattr(progress._LineBar, "_EVERY_S", 0.0)
    assert get(f"{index}/packages/{large.name}").content == large.read_bytes()
    eventually(lambda: any(" 200 " in line for line in printed))
    get(f"{index}/simple/thing/")
    eventually(lambda: "/simple/thing/" in printed[-1])
    lines = [re.fullmatch(rf" *{re.escape(large.name)}: (\d+) %", line) for line in printed[:-2]]
    shares = [int(found[1]) for found in lines if found]
    assert len(shares) == len(lines) > 100, "the file must be sent in blocks"
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 100)
    assert re.fullmatch(rf" *127\.0\.0\.1 GET /packages/{large.name} 200 32\.0 MiB, \d+\.\d s", printed[-2])
    assert "/simple/thing/ 200" in printed[-1]


def test_interrupted_download_prints_its_size(index: str, large: Path, printed: list[str]) -> None:
    with contextlib.closing(get(f"{index}/packages/{large.name}", stream=True)) as broken:
        next(broken.iter_content(1000))
    wait_for(printed, 1)
    (line,) = printed
    found = re.fullmatch(rf" *127\.0\.0\.1 GET /packages/{large.name} 200 ([\d.]+) (B|KiB|MiB) of 32\.0 MiB, .*", line)
    assert found, line
    assert float(found[1]) < 32 or found[2] != "MiB"


def test_first_folder_wins_for_the_same_name(tmp_path: Path, printed: list[str]) -> None:
    first, second = (make_wheel(tmp_path / name, {"a.py": f"{name} = 1\n"}) for name in ("one", "two"))
    with running_index(offered_from(first.parent, second.parent)) as url:
        page = get(f"{url}thing/").text
        assert re.findall(r"sha256=([0-9a-f]+)", page) == [hashlib.sha256(first.read_bytes()).hexdigest()]
        assert get(url.replace("/simple/", f"/packages/{first.name}")).content == first.read_bytes()


def test_missing_folders_are_ignored(tmp_path: Path, wheelhouse: Path, printed: list[str]) -> None:
    with running_index(offered_from(tmp_path / "none", wheelhouse)) as url:
        assert get(f"{url}thing/").status_code == 200


# --- torch and other wheels outside the wheelhouse ------------------------------------------------------------------


@pytest.fixture
def no_prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder instead of the one with the repository's wheel."""
    place = tmp_path / "prebuilt"
    place.mkdir()
    monkeypatch.setattr(resolve, "PREBUILT", place)
    return place


def offering(tmp_path: Path, *wheelhouses: Path, **torch: Any) -> Config:
    folders = [str(folder) for folder in wheelhouses]
    return load_config({"build": {"folder": str(tmp_path / "build")}, "torch": {"wheelhouse": folders, **torch}})


def cache_torch(config: Config, folder: Path) -> Path:
    """Put a torch wheel with the recipe's key into the artefact cache, as pull-artefacts does."""
    folder.mkdir(exist_ok=True)
    key = resolve.key(config)
    key_of_build = provenance.artefact_key(key, {"compiler": "arm-linux-gnueabihf-g++ 14.2.0"})
    return artefacts.put(config, "torch", key_of_build, a_wheel(folder, key), recipe=key)[-1]


def test_torch_in_the_artefact_cache_is_served(
    tmp_path: Path, wheelhouse: Path, no_prebuilt: Path, printed: list[str]
) -> None:
    (wheelhouse / TORCH).unlink()
    config = offering(tmp_path, wheelhouse)
    offer = Offer(config)
    assert TORCH not in offer()
    with running_index(offer) as url:
        assert get(f"{url}torch/").status_code == 404
        cached = cache_torch(config, tmp_path / "made")
        assert hashlib.sha256(cached.read_bytes()).hexdigest() in get(f"{url}torch/").text
        assert get(url.replace("/simple/", f"/packages/{TORCH}")).content == cached.read_bytes()
        assert get(f"{url}thing/").status_code == 200
    assert offer()[TORCH] == resolve.resolve(config).wheel


def test_torch_in_the_wheelhouse_is_served(tmp_path: Path, no_prebuilt: Path) -> None:
    ours = torch_wheel(tmp_path / "house")
    config = offering(tmp_path, tmp_path / "house")
    cached = cache_torch(config, tmp_path / "made")
    assert Offer(config)() == {TORCH: ours}
    assert Offer(offering(tmp_path, tmp_path / "house", from_source=True))() == {TORCH: cached}


def test_torch_with_another_key_is_not_served(tmp_path: Path, no_prebuilt: Path) -> None:
    """The test checks the wheel of an earlier build-torch, and the wheel in the repository."""
    config = offering(tmp_path, tmp_path / "house")
    resolve.products(config).mkdir(parents=True)
    for folder in (resolve.products(config), no_prebuilt):
        a_wheel(folder, "0" * 64)
    offer = Offer(config)
    assert offer() == {}
    assert offer.torch.reason.count("has a different recipe key") == 2
    a_wheel(no_prebuilt, resolve.key(config))
    assert offer() == {TORCH: no_prebuilt / TORCH}
    a_wheel(resolve.products(config), resolve.key(config))
    assert offer() == {TORCH: resolve.products(config) / TORCH}, "expected the wheel that an image would contain"


def test_only_the_images_torch_is_served(tmp_path: Path, no_prebuilt: Path) -> None:
    first = torch_wheel(tmp_path / "first", version="2.1.0")
    torch_wheel(tmp_path / "first", version="2.0.0")
    torch_wheel(tmp_path / "second", version="2.10.0")
    other = torch_wheel(tmp_path / "second", version="2.11.0", python="cp311")
    offer = Offer(offering(tmp_path, tmp_path / "first", tmp_path / "second"))
    assert offer() == {first.name: first, other.name: other}, "pip on the board ignores wheels for another Python"
    assert [line.split("-")[1] for line in offer.notes()] == ["2.0.0", "2.10.0"]
    assert offer.notes()[0].endswith(f"the image's torch is {first.name}")


def test_torch_behind_a_symbolic_link_is_not_served(tmp_path: Path, wheelhouse: Path, no_prebuilt: Path) -> None:
    (wheelhouse / TORCH).unlink()
    elsewhere = torch_wheel(tmp_path / "elsewhere")
    link = wheelhouse / TORCH
    link.symlink_to(elsewhere)
    config = offering(tmp_path, wheelhouse)
    offer = Offer(config)
    assert resolve.resolve(config).wheel == link
    assert list(offer()) == ["thing-1.0-py3-none-any.whl"]
    assert offer.notes() == [f"torch is not served: {link} is a symbolic link; replace it with the wheel"]
    with running_index(offer) as url:
        assert get(f"{url}torch/").status_code == 404
        assert get(url.replace("/simple/", f"/packages/{TORCH}")).status_code == 404
    link.unlink()
    elsewhere.rename(link)
    assert offer()[TORCH] == link


def test_missing_required_torch_does_not_block_others(tmp_path: Path, wheelhouse: Path, no_prebuilt: Path) -> None:
    for name in (TORCH, "no.whl"):
        (wheelhouse / name).unlink()
    offer = Offer(offering(tmp_path, wheelhouse, required=True))
    assert list(offer()) == ["thing-1.0-py3-none-any.whl"]
    assert offer.notes() == [f"torch is not served: no torch wheel in {wheelhouse}"]


def test_wrong_torch_is_an_error_at_start_then_a_warning(
    tmp_path: Path, wheelhouse: Path, no_prebuilt: Path, printed: list[str], warned: list[str]
) -> None:
    offer = Offer(offering(tmp_path, wheelhouse))
    torch_wheel(wheelhouse, {"torch/_C.so": elf(EM_X86_64, bits=64)}, version="2.7.0")
    with pytest.raises(PlatformMismatch):
        Offer(offering(tmp_path, wheelhouse))
    with running_index(offer) as url:
        assert get(f"{url}torch/").status_code == 404
        assert get(f"{url}thing/").status_code == 200
        assert len(warned) == 1, "expected one warning, not one for each request"
        assert "torch-2.7.0" in warned[0]
        torch_wheel(wheelhouse, version="2.7.0")
        assert "torch-2.7.0" in get(f"{url}torch/").text
    assert len(warned) == 1


def test_tvm_ffi_in_the_artefact_cache_is_served(tmp_path: Path, no_prebuilt: Path) -> None:
    config = offering(tmp_path, tmp_path / "house")
    version = recipe.load(tvm_ffi.NAME).settings["version"]
    content = {"tvm_ffi/a.so": elf(EM_ARM, flags=HARD, vfp_args=1)}
    made = make_wheel(tmp_path, content, name="apache_tvm_ffi", version=version)
    offer = Offer(config)
    assert offer() == {}
    (cached,) = artefacts.put(config, tvm_ffi.NAME, "f" * 64, [made], recipe=tvm_ffi.key(config))
    assert offer() == {made.name: cached}
    ours = make_wheel(tmp_path / "house", content, name="apache_tvm_ffi", version=version)
    assert offer() == {made.name: ours}, "the wheelhouse must take precedence, as for the image"
    ours.unlink()
    cached.chmod(0o644)
    cached.write_bytes(cached.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtefactDamaged):
        Offer(config)
    config = dataclasses.replace(config, image=dataclasses.replace(config.image, architecture="arm64"))
    assert Offer(config)() == {}, "no wheel is served for arm64, because the public index has one"


def test_nothing_to_serve_is_an_error(tmp_path: Path, no_prebuilt: Path) -> None:
    with pytest.raises(ArtefactMissing, match="build-wheel") as caught:
        serve_wheels(config_for(tmp_path, tmp_path / "empty"))
    assert caught.value.found == f"no torch wheel in {tmp_path / 'empty'}"


@pytest.mark.parametrize("port", [-1, 99999])
def test_invalid_ports_are_refused(wheelhouse: Path, port: int) -> None:
    with (
        pytest.raises(UserError, match=f"the package index cannot listen on port {port}") as caught,
        running_index(offered_from(wheelhouse), port=port),
    ):
        pytest.fail("the server started")
    assert "wheels.port" in caught.value.fix


def test_port_in_use_is_refused(tmp_path: Path, wheelhouse: Path) -> None:
    config = config_for(tmp_path, wheelhouse)
    with socket.create_server(("127.0.0.1", config.wheels.port)), pytest.raises(InUse) as caught:
        serve_wheels(config)
    assert caught.value.exit_code == 29
    assert "wheels.port" in caught.value.fix


def test_address_of_another_machine_is_refused(tmp_path: Path, wheelhouse: Path) -> None:
    with pytest.raises(UserError, match=r"wheels\.address"):
        serve_wheels(config_for(tmp_path, wheelhouse, address="192.0.2.1"))


def test_instructions_name_the_index_and_the_wheels() -> None:
    wheel = "torch-2.6.0-cp313-cp313-linux_armv7l.whl"
    lines = instructions("http://192.168.77.1:8080/simple/", [wheel], wheel)
    assert "serving 1 wheel at http://192.168.77.1:8080/simple/" in lines[0]
    commands = [line for line in lines if "pip install" in line]
    assert "--index-url http://192.168.77.1:8080/simple/ --trusted-host 192.168.77.1 --no-deps" in commands[0]
    assert "--extra-index-url http://192.168.77.1:8080/simple/ --trusted-host 192.168.77.1" in commands[1]


def test_instructions_install_the_served_version(tmp_path: Path, printed: list[str]) -> None:
    """The board's default index, and a second index in the board's pip.conf, have a newer version."""
    wheel = make_wheel(tmp_path / "house", {"thing.py": ""}, tag="py3-none-any", purelib=True)
    make_wheel(tmp_path / "public", {"thing.py": ""}, version="2.0", tag="py3-none-any", purelib=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "NO_PROXY": "*", "no_proxy": "*"}
    (tmp_path / "pip").mkdir()
    with running_index(offered_from(tmp_path / "public")) as public, running_index(offered_from(wheel.parent)) as url:
        (tmp_path / "pip" / "pip.conf").write_text(f"[global]\nindex-url = {public}\nextra-index-url = {public}\n")
        commands = [line for line in instructions(url, [wheel.name], wheel.name) if "pip install" in line]
        for number, command in enumerate(commands):
            run = f"{command.replace('~/venv/bin/python', sys.executable)} --target={tmp_path / str(number)}"
            done = subprocess.run(
                ["sh", "-c", run], env=environment, capture_output=True, text=True, check=False, timeout=300
            )
            assert "Successfully installed thing-1.0" in done.stdout, done.stdout + done.stderr
    asked = [line for line in printed if "GET /simple/thing/" in line]
    assert len(asked) == 3, "only the second command must ask the default index"


@pytest.fixture
def default_index(tmp_path: Path) -> Iterator[str]:
    """Provide the board's default index, with newer sources of two packages, which cannot be built here."""
    for name in ("thing", "needy"):
        source = tmp_path / "public" / f"{name}-2.0"
        source.mkdir(parents=True)
        (source / "setup.py").write_text("raise SystemExit('compiled on the board')\n")
        (source / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        folder = tmp_path / "public" / "simple" / name
        folder.mkdir(parents=True)
        with tarfile.open(folder / f"{name}-2.0.tar.gz", "w:gz") as archive:
            archive.add(source, source.name)
        (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{name}-2.0.tar.gz">{name}-2.0.tar.gz</a>')
    with served(tmp_path / "public") as uri:
        yield f"{uri}/simple/"


def test_instructions_prefer_wheels_to_newer_source(tmp_path: Path, default_index: str, printed: list[str]) -> None:
    """The test checks both a package and its dependencies."""
    house = tmp_path / "house"
    make_wheel(house, {"thing.py": "version = 1\n"}, tag="py3-none-any", purelib=True)
    contents = {"needy.py": "import thing\n"}
    needy = make_wheel(house, contents, name="needy", tag="py3-none-any", purelib=True, requires="thing")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": default_index, "NO_PROXY": "*", "no_proxy": "*"}
    with running_index(offered_from(house)) as url:
        line = instructions(url, [needy.name], needy.name)[-1].split()
        assert line[0] == "~/venv/bin/python"
        argv = [sys.executable, *line[1:], f"--target={tmp_path / 'installed'}"]
        without = [word for word in argv if word != "--prefer-binary"]
        done = [
            subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
            for words in (without, argv)
        ]
    assert done[0].returncode != 0
    assert "compiled on the board" in done[0].stdout + done[0].stderr, (
        "without --prefer-binary, pip must try to compile"
    )
    assert done[1].returncode == 0, done[1].stdout + done[1].stderr
    assert "Successfully installed needy-1.0 thing-1.0" in done[1].stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_task_stops_on_a_signal(tmp_path: Path, wheelhouse: Path, number: signal.Signals) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "INVOKE_BUILD_FOLDER": str(tmp_path / "build"),
        "INVOKE_TORCH_WHEELHOUSE": str(wheelhouse),
        "INVOKE_WHEELS_ADDRESS": "127.0.0.1",
        "INVOKE_WHEELS_PORT": str(port),
    }
    argv = [sys.executable, "-m", "toolchain.cli", "serve-wheels"]
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        output = []
        try:
            for line in running.stderr:
                output.append(line)
                if "default index" in line:
                    break
            url = f"http://127.0.0.1:{port}"
            assert get(f"{url}/simple/torch/").status_code == 200
            assert get(f"{url}/packages/{TORCH}", headers={"Range": "bytes=9999999-"}).status_code == 416
            running.send_signal(number)
            rest = running.stderr.read()
            assert running.wait(30) == 0
        finally:
            running.kill()
    assert f"serving 2 wheels at {url}/simple/" in "".join(output)
    assert "stopping the package index" in rest
    assert "GET /simple/torch/ 200" in rest
    assert "Traceback" not in rest
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
