"""Tests of run_pip's errors: an index that does not respond, an index without the package, and other errors."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from registry_parts import small_disk
from wheel_parts import make_wheel

from toolchain import progress
from toolchain.errors import CommandFailed, DiskFull, NetworkUnreachable, SourceUnavailable
from wheels.index import running_index, wheels_in
from wheels.pip import run_pip

pytestmark = pytest.mark.usefixtures("isolated_pip")


def test_index_that_does_not_respond_is_a_network_error(tmp_path: Path) -> None:
    words: list[str | Path] = ["download", "--index-url=http://127.0.0.1:1/simple", "--dest", tmp_path, "six==1.16.0"]
    with pytest.raises(NetworkUnreachable, match=r"^six 1\.16 cannot be downloaded") as caught:
        run_pip(words, what="six 1.16", log=tmp_path / "log", fix="name another")
    assert str(tmp_path / "log") in caught.value.found
    assert "127.0.0.1" in (tmp_path / "log").read_text()


@pytest.mark.skipif(importlib.util.find_spec("socks") is not None, reason="requires that PySocks is not installed")
def test_socks_proxy_without_pysocks_is_reported(tmp_path: Path) -> None:
    words: list[str | Path] = ["download", "--retries=0", "--index-url=https://index.invalid/simple"]
    words += ["--dest", tmp_path, "six==1.16.0"]
    proxies = dict.fromkeys(("all_proxy", "https_proxy", "HTTPS_PROXY"), "socks5h://127.0.0.1:1")
    with pytest.raises(NetworkUnreachable, match="requires SOCKS") as caught:
        run_pip(words, what="six 1.16", log=tmp_path / "log", fix="x", environment={**proxies, "no_proxy": ""})
    assert "PySocks" in caught.value.fix


def test_missing_package_is_reported(tmp_path: Path) -> None:
    words: list[str | Path] = ["download", "--no-index", f"--find-links={tmp_path}"]
    words += ["--dest", tmp_path, "no-such-thing==3.1"]
    with pytest.raises(SourceUnavailable, match=r"does not have no-such-thing==3\.1") as caught:
        run_pip(words, what="it", log=tmp_path / "log", fix="name another")
    assert (caught.value.expected, caught.value.fix) == ("a matching file for it", "name another")


def test_missing_version_is_not_a_network_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One index has other versions; the connection to another index fails."""
    monkeypatch.setattr(progress, "say", lambda _: None)
    make_wheel(tmp_path / "house", version="1.0", tag="py3-none-any")
    with running_index(lambda: wheels_in([tmp_path / "house"])) as url:
        words: list[str | Path] = ["download", f"--index-url={url}", "--extra-index-url=http://127.0.0.1:1/simple"]
        with pytest.raises(SourceUnavailable, match=r"does not have thing==7"):
            run_pip(
                [*words, "--dest", tmp_path, "thing==7"],
                what="it",
                log=tmp_path / "log",
                fix="name another",
                environment={"no_proxy": "*"},
            )
    assert "NewConnectionError" in (tmp_path / "log").read_text()


def test_full_disk_is_reported(tmp_path: Path) -> None:
    make_wheel(tmp_path / "house", {"blob": os.urandom(300_000)}, tag="py3-none-any")
    with small_disk(tmp_path / "disk", "64k") as disk, pytest.raises(DiskFull, match=r"no room for it") as caught:
        run_pip(
            ["download", "--no-index", f"--find-links={tmp_path / 'house'}", "--dest", disk, "thing"],
            what="it",
            log=tmp_path / "log",
            fix="name another",
        )
    assert "No space left on device" in caught.value.found


def test_other_errors_keep_pips_output(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        run_pip(["download", "--no-such-option"], what="it", log=tmp_path / "log", fix="name another")
    assert "no such option" in caught.value.tail


def test_interpreter_and_environment_are_used(tmp_path: Path) -> None:
    fake_python = tmp_path / "python"
    fake_python.write_text('#!/bin/sh\necho "$PIP_OF_TEST $*"\n')
    fake_python.chmod(0o755)
    run_pip(
        ["check"],
        what="it",
        log=tmp_path / "log",
        fix="name another",
        python=fake_python,
        environment={"PIP_OF_TEST": "value"},
    )
    assert "value -m pip --disable-pip-version-check --no-input check" in (tmp_path / "log").read_text()
