"""Tests of build-wheel: arguments, error messages, the audit, and builds in the development image."""

from __future__ import annotations

import errno
import gzip
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import docker
import pytest
from http_parts import served
from registry_parts import small_disk
from wheel_parts import EM_ARM, EM_X86_64, HARD, elf, make_wheel

from engine.containers import run_in
from flow import main_job
from flow.build_wheel import build_wheel
from flow.serve_wheels import Offer
from images.apt import Source
from images.flavour import Pocket, load_suite
from toolchain import progress
from toolchain.config import Config, load_config
from toolchain.errors import (
    CommandFailed,
    DiskFull,
    NetworkUnreachable,
    PlatformMismatch,
    SourceUnavailable,
    UserError,
    WheelUnusable,
)
from toolchain.ports import free_port
from wheels import build, contents, faults, pip_settings
from wheels.index import instructions, running_index, wheels_in
from wheels.request import Options, Wanted
from wheels.wheelhouse import REPLACED, place

SETUP = """\
from setuptools import Extension, setup
setup(name="pitorch-try", version="1.2", py_modules=["trying"], ext_modules=[Extension("_trying", ["trying.c"])])
"""
MODULE = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *bits(PyObject *self, PyObject *none) { return PyLong_FromSize_t(8 * sizeof(void *)); }
static PyMethodDef methods[] = {{"bits", bits, METH_NOARGS, "Width of a pointer."}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_trying", NULL, -1, methods};
PyMODINIT_FUNC PyInit__trying(void) { return PyModule_Create(&module); }
"""


def project(folder: Path, **files: str) -> Path:
    """Create a project with a C extension. ``files`` replaces or adds files; the last ``_`` in a name becomes a dot."""
    folder.mkdir(parents=True)
    contents = {"setup_py": SETUP, "trying_c": MODULE, "trying_py": "from _trying import bits\n", **files}
    for name, text in contents.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("pyyaml==6.0.2", "pyyaml", "6.0.2"),
        ("Foo_Bar == 1.0rc1", "Foo_Bar", "1.0rc1"),
        ("x==2!1.0+local", "x", "2!1.0+local"),
    ],
)
def test_packages_are_named_with_a_version(tmp_path: Path, text: str, name: str, version: str) -> None:
    assert Wanted.parse(text, folder=tmp_path) == Wanted(name=name, version=version)


@pytest.mark.parametrize(
    "text",
    ["numpy", "numpy>=2", "numpy==2,!=2.1", "numpy==2.*", "numpy===2", "numpy[extra]==2", "x==1; python_version>'3'",
     "", "==1", "a b", "--index-url==1", "-r==1", "numpy @ https://example.org/x.whl"],
)  # fmt: skip
def test_other_requirements_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceUnavailable, match=r"does not identify one wheel|there is no project") as caught:
        Wanted.parse(text, folder=tmp_path)
    assert caught.value.exit_code == 25
    assert caught.value.fix


@pytest.mark.parametrize("text", [".", "./", "p/..", "../{name}", "{path}"])
def test_paths_are_relative_to_the_callers_folder(tmp_path: Path, text: str) -> None:
    folder = project(tmp_path / "here")
    (folder / "p").mkdir()
    asked = text.format(name=folder.name, path=folder)
    assert Wanted.parse(asked, folder=folder) == Wanted(project=folder)


def test_folders_without_a_slash_and_archives_are_accepted(tmp_path: Path) -> None:
    folder = project(tmp_path / "here")
    (tmp_path / "here-1.0.tar.gz").write_bytes(b"")
    assert Wanted.parse("here", folder=tmp_path).project == folder
    assert Wanted.parse("here-1.0.tar.gz", folder=tmp_path).project == tmp_path / "here-1.0.tar.gz"


@pytest.mark.parametrize("text", ["./nothing", "empty", "./notes.txt", "full/", "~nosuchuser/x", "./loop"])
def test_paths_without_a_project_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "main.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceUnavailable) as caught:
        Wanted.parse(text, folder=tmp_path)
    assert str(tmp_path) in caught.value.summary


def test_wrong_arguments_are_refused_before_building(tmp_path: Path) -> None:
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    with pytest.raises(SourceUnavailable):
        build_wheel(config, "numpy", folder=tmp_path)
    assert not config.build_root.exists()


# --- copying a project ----------------------------------------------------------------------------------------------


def test_build_folder_in_a_project_is_not_copied(tmp_path: Path) -> None:
    """The copy is in the build folder, so copying that folder would copy the copy into itself endlessly."""
    here = project(tmp_path / "here")
    for name in (".git/HEAD", ".venv/pyvenv.cfg", "package/__pycache__/a.pyc", "package/a.py", "build/b.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("x")
    config = load_config({"build": {"folder": str(here / "made")}})
    source = config.target_root / "work" / ".wheel.1" / "source"
    source.mkdir(parents=True)
    given = build.copy_project(Wanted(project=here), source, config)
    assert given == "/usr/src/wheel/source/here"
    copied = {str(path.relative_to(source / "here")) for path in (source / "here").rglob("*") if path.is_file()}
    # Versions often come from git tags, and projects may have a folder named build.
    assert copied == {".git/HEAD", "build/b.py", "package/a.py", "setup.py", "trying.c", "trying.py"}


def test_project_whose_name_is_not_utf8_is_copied(tmp_path: Path) -> None:
    """The requirement is an argument of a program in a container, and is written to a log."""
    here = project(tmp_path / os.fsdecode(b"caf\xe9"))
    (source := tmp_path / "source").mkdir()
    given = build.copy_project(Wanted(project=here), source, load_config({}))
    assert given == "/usr/src/wheel/source/caf?"
    assert (source / "caf?" / "setup.py").is_file()


@pytest.mark.parametrize("name", [".", "link"])
def test_project_in_the_build_folder_is_copied(tmp_path: Path, name: str) -> None:
    """The build folder may be a symbolic link, and the project may contain the folder into which it is copied."""
    made = project(tmp_path / "made")
    (tmp_path / "link").symlink_to("made")
    config = load_config({"build": {"folder": str(tmp_path / name)}})
    source = made / "work" / "source"
    source.mkdir(parents=True)
    build.copy_project(Wanted(project=made), source, config)
    assert sorted(path.name for path in (source / "made").iterdir()) == ["setup.py", "trying.c", "trying.py", "work"]
    assert list((source / "made" / "work").iterdir()) == []


def test_files_that_cannot_be_copied_are_reported(tmp_path: Path) -> None:
    here = project(tmp_path / "here")
    os.mkfifo(here / "pipe")
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    (tmp_path / "source").mkdir()
    with pytest.raises(SourceUnavailable, match="cannot be copied") as caught:
        build.copy_project(Wanted(project=here), tmp_path / "source", config)
    assert "pipe" in caught.value.found


# --- pip's settings -------------------------------------------------------------------------------------------------


def test_pip_settings_follow_pips_precedence() -> None:
    listed = (
        "global.index-url='https://a.invalid/simple'\nglobal.extra-index-url='\\nhttps://b.invalid\\nhttps://c.invalid'\n"
        "wheel.index-url='https://wheel.invalid'\ninstall.index-url='https://install.invalid'\n:env:.cert='/c.pem'\n"
        "global.quiet='1'\n:env:.find_links='/x /y'\nnonsense\nglobal.broken='\n"
    )
    found = pip_settings.parse(listed)
    assert found["index-url"] == "https://wheel.invalid", (
        "in pip's configuration, a command's section overrides [global]"
    )
    assert found["extra-index-url"] == "https://b.invalid https://c.invalid"
    assert found["cert"] == "/c.pem"
    assert found["find-links"] == "/x /y"


def test_local_paths_are_mounted_at_the_same_path(tmp_path: Path) -> None:
    for name in ("index/simple", "wheels", "other wheels"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ca.pem").write_text("")
    settings = {
        "index-url": f"file://{tmp_path}/index/simple",
        "extra-index-url": "https://user:secret@example.invalid/simple",
        "find-links": f"{tmp_path}/wheels {tmp_path}/gone",
        "cert": f"{tmp_path}/ca.pem",
        "quiet": "1",
    }
    found = pip_settings.for_container(
        settings, {"REQUESTS_CA_BUNDLE": f"{tmp_path}/ca.pem", "HOME": "/x"}, ["/inside"]
    )
    assert found.environment == {
        "PIP_INDEX_URL": settings["index-url"],
        "PIP_EXTRA_INDEX_URL": settings["extra-index-url"],
        "PIP_FIND_LINKS": f"{tmp_path}/wheels {tmp_path}/gone /inside",
        "PIP_CERT": settings["cert"],
        "REQUESTS_CA_BUNDLE": f"{tmp_path}/ca.pem",
    }
    # A local index keeps its files next to its folder ``simple``, so the parent folder is mounted.
    assert set(found.paths) == {f"{tmp_path}/index", f"{tmp_path}/wheels", f"{tmp_path}/ca.pem"}
    assert all(bind.endswith(":ro") for bind in found.binds())


def test_home_folder_is_expanded_where_pip_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ca.pem").write_text("")
    (tmp_path / "wheels").mkdir()
    settings = {
        "cert": "~/ca.pem",
        "find-links": "https://a.invalid/~user/ ~/wheels ~nobody-here/x",
        "constraint": "~/constraints.txt",
    }
    found = pip_settings.for_container(settings, {}, [])
    assert found.environment == {
        "PIP_CERT": f"{tmp_path}/ca.pem",
        "PIP_FIND_LINKS": f"https://a.invalid/~user/ {tmp_path}/wheels ~nobody-here/x",
        "PIP_CONSTRAINT": "~/constraints.txt",
    }
    assert set(found.paths) == {f"{tmp_path}/ca.pem", f"{tmp_path}/wheels"}


def test_settings_of_this_pcs_pip_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("[global]\ntimeout = 77\n[wheel]\nno-index = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    found = pip_settings.of_this_pc().environment
    assert (found["PIP_TIMEOUT"], found["PIP_NO_INDEX"]) == ("77", "true")
    assert found["PIP_INDEX_URL"] == "https://index.invalid/simple"
    (tmp_path / "pip.conf").write_text("index-url = https://index.invalid/simple\n")
    with pytest.raises(CommandFailed, match="pip config list failed") as caught:
        pip_settings.of_this_pc()
    assert caught.value.fix == "correct the file that pip names below"
    assert "no section headers" in caught.value.tail


# --- error messages -------------------------------------------------------------------------------------------------


def pip_wheel(folder: Path, index: str, *words: str) -> str:
    """Run this machine's pip, which must fail, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "no_proxy": "*", "NO_PROXY": "*", "LC_ALL": "C"}
    argv = [sys.executable, "-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-deps"]
    argv += [
        "--no-cache-dir",
        "--retries=1",
        "--timeout=5",
        f"--index-url={index}",
        f"--wheel-dir={folder}/out",
        *words,
    ]
    done = subprocess.run(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode != 0, done.stdout
    return done.stdout


def explain(output: str, wanted: Wanted) -> UserError:
    fault = faults.explain(CommandFailed("pip failed", tail=output), wanted, output, load_config({}))
    assert isinstance(fault, UserError)
    return fault


def test_unreachable_index_is_a_network_error(tmp_path: Path) -> None:
    output = pip_wheel(tmp_path, f"http://127.0.0.1:{free_port()}/simple/", "thing==1.0")
    fault = explain(output, Wanted(name="thing", version="1.0"))
    assert isinstance(fault, NetworkUnreachable), output
    assert "refused" in fault.found
    needy = project(tmp_path / "needy", pyproject_toml='[build-system]\nrequires = ["setuptools"]\n')
    output = pip_wheel(tmp_path, f"http://127.0.0.1:{free_port()}/simple/", str(needy))
    assert isinstance(explain(output, Wanted(project=needy)), NetworkUnreachable), output


def test_unknown_packages_and_versions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "say", lambda _: None)
    for version in ("1.0", "1.1"):
        make_wheel(tmp_path / "house", version=version, tag="py3-none-any")
    with running_index(lambda: wheels_in([tmp_path / "house"])) as url:
        output = pip_wheel(tmp_path, url, "thing==7")
        fault = explain(output, Wanted(name="thing", version="7"))
        assert isinstance(fault, SourceUnavailable), output
        assert "1.0, 1.1" in fault.found
        output = pip_wheel(tmp_path, url, "nosuch==1")
        fault = explain(output, Wanted(name="nosuch", version="1"))
        assert isinstance(fault, SourceUnavailable), output
        assert "no package of that name" in fault.found
        needy = project(tmp_path / "needy", pyproject_toml='[build-system]\nrequires = ["nosuch>=3"]\n')
        output = pip_wheel(tmp_path, url, str(needy))
        fault = explain(output, Wanted(project=needy))
        assert isinstance(fault, SourceUnavailable), output
        assert "requires nosuch>=3, and the index has no suitable version" in fault.summary


def test_packages_without_source_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "say", lambda _: None)
    for name, version, tag in (
        ("seeing", "1.0", "cp313-cp313-manylinux_2_17_x86_64"),
        ("seeing", "1.0", "cp312-cp312-linux_armv7l"),
        ("seeing", "1.1", "cp313-cp313-win_amd64"),
        ("torch", "2.6.0", "cp313-cp313-manylinux_2_28_aarch64"),
        ("torchvision", "0.21.0", "cp313-cp313-manylinux_2_28_aarch64"),
    ):
        make_wheel(tmp_path / "house", name=name, version=version, tag=tag)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "*")
    with running_index(lambda: wheels_in([tmp_path / "house"])) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        fault = explain(pip_wheel(tmp_path, url, "seeing==1.0"), Wanted(name="seeing", version="1.0"))
        assert isinstance(fault, SourceUnavailable)
        assert fault.summary.startswith("the package index has no source for seeing==1.0, only wheels")
        assert fault.found.startswith("2 wheels for other targets, such as seeing-1.0-")
        assert "docs/wheels.md" in fault.fix
        (tmp_path / "limits.txt").write_text("seeing<9\n")
        output = pip_wheel(tmp_path, url, "seeing==1.0", f"--constraint={tmp_path / 'limits.txt'}")
        fault = explain(output, Wanted(name="seeing", version="1.0"))
        assert fault.summary.startswith("the package index has no source for seeing==1.0, only wheels"), output
        fault = explain(pip_wheel(tmp_path, url, "torch==2.6.0"), Wanted(name="torch", version="2.6.0"))
        assert fault.fix == "run ./inv build-torch"
        output = pip_wheel(tmp_path, url, "torchvision==0.21.0")
        fault = explain(output, Wanted(name="torchvision", version="0.21.0"))
        assert fault.fix.startswith("run ./inv build-image, ")
        needy = project(tmp_path / "needy", pyproject_toml='[build-system]\nrequires = ["seeing==1.1"]\n')
        fault = explain(pip_wheel(tmp_path, url, str(needy)), Wanted(project=needy))
        assert f"seeing==1.1, which {needy} requires" in fault.summary
        fault = explain(pip_wheel(tmp_path, url, "seeing==3"), Wanted(name="seeing", version="3"))
        assert "does not have seeing==3" in fault.summary


FAILED = "error: subprocess-exited-with-error\n"


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("opencv-python-headless", "python3-opencv"),
        ("Scikit_Learn", "python3-sklearn"),
        ("onnxruntime", "python3-onnxruntime"),
        ("python-dateutil", "python3-dateutil"),
        ("numba", ""),
    ],
)
def test_the_fix_names_the_distributions_package(tmp_path: Path, name: str, package: str) -> None:
    config = load_config({"build": {"folder": str(tmp_path)}})
    lists = config.target_root / "mirror" / "lists"
    lists.mkdir(parents=True)
    known = ("opencv", "sklearn", "onnxruntime", "dateutil")
    text = "".join(f"Package: python3-{item}\nVersion: 1\n\n" for item in known)
    (lists / "deb.invalid_dists_trixie_main_binary-armhf_Packages").write_text(text)
    (lists / "deb.invalid_dists_trixie_main_binary-amd64_Packages").write_text("Package: python3-numba\n")
    wanted = Wanted(name=name, version="1.0")
    fault = faults.explain(CommandFailed("x", fix="read the log"), wanted, FAILED, config)
    advice = f"; or use the distribution's package on the board: apt-get install {package}" if package else ""
    assert fault.fix == f"read the log{advice}"


def test_source_in_another_format_counts_as_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "simple" / "seeing"
    folder.mkdir(parents=True)
    names = ["seeing-1.0-cp313-cp313-win_amd64.whl", "seeing-1.0.tar.gz", "seeing-1.1-cp313-cp313-win_amd64.whl"]
    (folder / "index.html").write_text("<!DOCTYPE html>" + "".join(f'<a href="{name}">{name}</a>' for name in names))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    assert faults.wheels_for_others("seeing", "==1.0", config) == []
    assert faults.wheels_for_others("seeing", "==1.1", config) == names[2:]


def test_output_of_a_failed_package_build_is_shown(tmp_path: Path) -> None:
    broken = project(tmp_path / "broken", setup_py="raise SystemExit('libfoo is needed: Connection refused')")
    output = pip_wheel(tmp_path, f"http://127.0.0.1:{free_port()}/simple/", "--no-build-isolation", str(broken))
    fault = explain(output, Wanted(project=broken))
    assert isinstance(fault, CommandFailed)
    assert "libfoo is needed" in str(fault)


GCC_FILLS = """\
import subprocess, sys
from pathlib import Path
Path("large.c").write_text('const char large[] = "' + "x" * 300000 + '";')
sys.exit(subprocess.run(["gcc", "-c", "large.c", "-o", "DISK/large.o"]).returncode)
"""


@pytest.mark.parametrize("program", ["pip", "gcc"])
def test_full_disk_in_pip_or_in_a_build_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(progress, "say", lambda _: None)
    make_wheel(tmp_path / "house", {"blob": os.urandom(300_000)}, tag="py3-none-any")
    with (
        small_disk(tmp_path / "disk", "64k") as disk,
        running_index(lambda: wheels_in([tmp_path / "house"])) as url,
    ):
        words = ["thing==1.0"]
        wanted = Wanted(name="thing", version="1.0")
        if program == "gcc":
            wanted = Wanted(project=project(tmp_path / "own", setup_py=GCC_FILLS.replace("DISK", str(disk))))
            words = ["--no-build-isolation", str(wanted.project)]
        fault = explain(pip_wheel(disk, url, *words), wanted)
    assert isinstance(fault, DiskFull)
    assert "No space left on device" in fault.found
    assert str(wanted) in fault.summary


APT_OUTPUTS = {
    "unknown": ("E: Unable to locate package libnosuch-dev\n", SourceUnavailable, "no package libnosuch-dev"),
    "virtual": ("E: Package 'libnosuch' has no installation candidate\n", SourceUnavailable, "no package libnosuch"),
    "no network": (
        "Err:1 http://a.invalid/debian trixie/main armhf libyaml-0-2 armhf 0.2.5-2\n  Could not resolve 'a.invalid'\n"
        "E: Failed to fetch http://a.invalid/debian/pool/x.deb  Could not resolve 'a.invalid'\n",
        NetworkUnreachable,
        "the mirror does not provide the packages",
    ),
    "updated": ("E: Failed to fetch http://a.invalid/x.deb  404  Not Found\n", NetworkUnreachable, "does not provide"),
    "full": (
        "E: Failed to fetch http://a.invalid/x.deb\nE: write (28: No space left on device)\n", DiskFull, "no room for"
    ),
    "other error": ("E: Sub-process dpkg returned an error code (1)\n", CommandFailed, "cannot be installed"),
    "successful retry": (
        "Ign:1 http://a.invalid/debian trixie/main armhf libyaml-0-2 armhf 0.2.5-2\n"
        "  Could not connect to a.invalid:80\n"
        "Get:1 http://a.invalid/debian trixie/main armhf libyaml-0-2 armhf 0.2.5-2 [50.0 kB]\n"
        "E: Sub-process dpkg returned an error code (1)\n",
        CommandFailed,
        "cannot be installed",
    ),
    "output of a package's script": (
        "Could not connect to the message bus: Failed to fetch its address\nUnable to locate package data\n"
        "E: Sub-process dpkg returned an error code (1)\n",
        CommandFailed,
        "cannot be installed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APT_OUTPUTS)
def test_errors_of_apt_are_explained(tmp_path: Path, name: str) -> None:
    output, kind, summary = APT_OUTPUTS[name]
    config = load_config({"build": {"folder": str(tmp_path)}})
    fault = faults.explain_apt(CommandFailed("a container failed", returncode=83, tail=output), output, config)
    assert type(fault) is kind
    assert summary in fault.summary
    assert fault.fix


@pytest.mark.parametrize("encoding", ["", "x-gzip"])
def test_packages_of_missing_files_are_suggested(tmp_path: Path, encoding: str) -> None:
    lists = {
        "armhf": "usr/include/jpeglib.h libdevel/libjpeg62-turbo-dev\n"
        "usr/include/arm-linux-gnueabihf/jpeglib.h libdevel/libother-dev\n"
        "usr/include/old/jpeglib.h libdevel/libold-dev\n"
        "usr/lib/arm-linux-gnueabihf/libxslt.so libdevel/libxslt1-dev\n",
        "all": "usr/share/pkgconfig/some-thing.pc x11/some-dev,x11/other-dev\n",
    }
    folder = tmp_path / "mirror" / "dists" / "trixie" / "main"
    folder.mkdir(parents=True)
    for name, text in lists.items():
        (folder / f"Contents-{name}.gz").write_bytes(gzip.compress(text.encode()))
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    with served(tmp_path / "mirror", encoding) as uri:
        pocket = Pocket(name="main", suite="trixie", mirror="main")
        source = Source(pocket, uri, ("main",), tmp_path / "key", ("armhf", "amd64"))
        wanted = Wanted(name="a", version="1")
        config.target_root.mkdir(parents=True)
        (config.target_root / "mirror.manifest.json").touch()
        output = (
            "a.c:1:10: fatal error: jpeglib.h: No such file or directory\n"
            "/usr/bin/ld: cannot find -lxslt: No such file or directory\n"
            "Package 'some-thing', required by 'virtual:world', not found\n"
            "error: subprocess-exited-with-error\n"
        )
        fault = faults.explain(CommandFailed("x", tail=output), wanted, output, config, [source])
    assert str(fault).splitlines()[-3:] == [
        "jpeglib.h is missing. Add --package=libjpeg62-turbo-dev or --package=libother-dev to install it.",
        "libxslt.so is missing. Add --package=libxslt1-dev to install it.",
        "some-thing.pc is missing. Add --package=other-dev or --package=some-dev to install it.",
    ]
    # The server has been shut down, so this call must reuse the downloaded indices.
    output = output.replace("jpeglib.h", "nosuch.h")
    fault = faults.explain(CommandFailed("x", tail=output), wanted, output, config, [source])
    assert "nosuch.h is missing, and no package of the distribution contains it." in str(fault)


@pytest.mark.parametrize("kept", [0, 10, 15])
def test_damaged_index_of_packages_lists_no_package(tmp_path: Path, kept: int) -> None:
    (missing,) = contents.missing_in("a.c:1:10: fatal error: jpeglib.h: No such file or directory\n")
    whole = gzip.compress(b"usr/include/jpeglib.h libdevel/libjpeg62-turbo-dev\n" + os.urandom(1000))
    index = tmp_path / "Contents-armhf.gz"
    index.write_bytes(whole)
    assert contents.owners_in(index, [missing]) == {missing: ["libjpeg62-turbo-dev"]}
    index.write_bytes(whole[:kept] + b"\xff" * 100)
    assert contents.owners_in(index, [missing]) == {}


def test_missing_header_is_reported_without_an_index(tmp_path: Path) -> None:
    output = "a.cpp:3:10: fatal error: 'boost/any.hpp' file not found\nerror: subprocess-exited-with-error\n"
    config = load_config({"build": {"folder": str(tmp_path)}})
    fault = faults.explain(CommandFailed("x", tail=output), Wanted(name="a", version="1"), output, config)
    assert str(fault).splitlines()[-1].startswith("boost/any.hpp is missing. Use --package=NAME")


# --- the audit and the wheelhouse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "count"),
    [("cp313-cp313-linux_armv7l", 1), ("cp311-abi3-manylinux_2_31_armv7l", 1), ("py3-none-any", 0)],
)
def test_wheels_that_fit_are_accepted(tmp_path: Path, tag: str, count: int) -> None:
    contents = {"a.so": elf(EM_ARM, flags=HARD)} if count else {"a.py": "x = 1\n"}
    wheel = make_wheel(tmp_path, contents, tag=tag)
    assert build.audit(wheel, load_config({})) == count


@pytest.mark.parametrize(
    ("tag", "kind"),
    [("cp312-cp312-linux_armv7l", PlatformMismatch), ("cp313-cp313-linux_x86_64", PlatformMismatch)],
)
def test_wheels_with_a_wrong_tag_are_refused(tmp_path: Path, tag: str, kind: type[UserError]) -> None:
    with pytest.raises(kind) as caught:
        build.audit(make_wheel(tmp_path, tag=tag), load_config({}))
    assert tag in caught.value.found


def test_wheels_for_another_machine_are_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"a.so": elf(EM_X86_64, bits=64)})
    with pytest.raises(PlatformMismatch, match=r"a\.so"):
        build.audit(wheel, load_config({}))
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(WheelUnusable):
        build.audit(wheel, load_config({}))


@pytest.mark.parametrize("links", [True, False])
def test_replaced_wheel_is_moved_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), target, None, path)

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    house = tmp_path / "house"
    old = make_wheel(house, {"a.py": "old = 1\n"})
    before = old.read_bytes()
    new = make_wheel(tmp_path / "new", {"a.py": "new = 1\n"})
    placed, warnings = place(new, house)
    assert placed == old
    assert placed.read_bytes() == new.read_bytes()
    (moved,) = (house / REPLACED).rglob("*.whl")
    assert moved.read_bytes() == before
    assert len(warnings) == 1
    assert str(moved) in warnings[0]
    assert place(new, house) == (placed, []), "replacing a wheel by identical contents must not print a warning"
    assert sorted(path.name for path in house.iterdir()) == sorted([old.name, REPLACED])


def test_full_wheelhouse_stays_unchanged(tmp_path: Path) -> None:
    new = make_wheel(tmp_path / "new", {"blob": os.urandom(300_000)})
    with small_disk(tmp_path / "house", "64k") as house:
        old = make_wheel(house, {"a.py": "old = 1\n"})
        before = old.read_bytes()
        with pytest.raises(DiskFull, match=f"no room for {new.name}") as caught:
            place(new, house)
        assert str(house) in caught.value.expected
        assert [path.name for path in house.iterdir()] == [old.name]
        assert old.read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_project_larger_than_the_free_space_is_reported(tmp_path: Path, kind: str) -> None:
    here = project(tmp_path / "here", large_bin="x" * 300_000)
    (tmp_path / "here.zip").write_bytes(bytes(300_000))
    wanted = here if kind == "folder" else tmp_path / "here.zip"
    with small_disk(tmp_path / "disk", "64k") as disk:
        config = load_config({"build": {"folder": str(disk)}})
        with pytest.raises(DiskFull, match="no room for a copy of") as caught:
            build.copy_project(Wanted(project=wanted), disk, config)
    assert caught.value.found == "No space left on device"


def test_libraries_that_a_wheel_requires_are_listed(tmp_path: Path) -> None:
    """The test uses an extension module of this machine's Python: a real ELF file that requires libraries."""
    import _ssl

    if not getattr(_ssl, "__file__", ""):
        pytest.skip("requires a Python with ssl as a shared library")
    module = Path(_ssl.__file__).read_bytes()
    needed = build.libraries_not_included(make_wheel(tmp_path, {"a.so": module}))
    assert [name.partition(".so")[0] for name in needed] == ["libcrypto", "libssl"]
    vendored = make_wheel(tmp_path / "b", {"a.so": module, f"thing.libs/{needed[1]}": b"it is here"})
    assert build.libraries_not_included(vendored) == needed[:1]
    assert build.libraries_not_included(make_wheel(tmp_path / "c", {"a.py": "x = 1\n"})) == []


def options_of(folder: Path, **given: Sequence[str]) -> Options:
    """Return the task's options, with defaults for those that are not given."""
    defaults: dict[str, Sequence[str]] = {"packages": (), "constraints": (), "variables": ()}
    return Options.parse(folder=folder, from_source=False, isolated=True, **{**defaults, **given})


def test_packages_of_required_libraries_are_listed(tmp_path: Path) -> None:
    listing = tmp_path / "libraries"
    listing.write_text(
        "/var/lib/dpkg/info/libjpeg62-turbo:armhf.list:/usr/lib/arm-linux-gnueabihf/libjpeg.so.62\n"
        "/var/lib/dpkg/info/libxml2.list:/usr/lib/arm-linux-gnueabihf/libxml2.so.2\n"
    )
    sonames = ["libjpeg.so.62", "libown.so.1", "libxml2.so.2"]
    owners = build.packages_of(sonames, listing)
    assert owners == {"libjpeg.so.62": "libjpeg62-turbo", "libxml2.so.2": "libxml2"}
    assert build.libraries_text(sonames, owners) == (
        "apt-get install libjpeg62-turbo libxml2 (for libjpeg.so.62, libxml2.so.2); libown.so.1 (package unknown)"
    )
    assert build.packages_of(sonames, tmp_path / "none") == {}


def test_log_is_named_after_the_package() -> None:
    assert Wanted(name="Foo_Bar", version="1.0+local").label == "foo-bar-1.0+local"
    labels = {Wanted(project=Path(folder, "my project")).label for folder in ("/a", "/b", "/a")}
    assert len(labels) == 2, "projects with the same folder name have separate logs"
    for label in labels:
        assert re.fullmatch("my-project-[0-9a-f]{8}", label)


def test_constraints_and_variables_reach_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my limits.txt").write_text("cython<3\n")
    monkeypatch.setenv("TOKEN", "secret")
    address = "https://example.invalid/limits.txt"
    options = options_of(
        tmp_path, constraints=["my limits.txt", address], variables=["TOKEN", "CFLAGS=-O3 -DX=1", "EMPTY="]
    )
    assert options.environment == {"TOKEN": "secret", "CFLAGS": "-O3 -DX=1", "EMPTY": ""}
    (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path}/mine.txt\n")
    (tmp_path / "mine.txt").write_text("")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    found = pip_settings.of_this_pc((), options.constraints)
    assert found.environment["PIP_CONSTRAINT"] == f"{tmp_path}/mine.txt {tmp_path.as_uri()}/my%20limits.txt {address}"
    assert set(found.paths) >= {f"{tmp_path}/mine.txt", f"{tmp_path}/my limits.txt"}
    argv = build.command("x==1", Wanted(name="x", version="1"), tmp_path, options)
    assert not any("secret" in word for word in argv), "values are passed to the engine, not on the command line"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"constraints": ["none.txt"]}, "no constraints file at"),
        ({"constraints": ["."]}, "no constraints file at"),
        ({"constraints": ["loop"]}, "no constraints file at"),
        ({"variables": ["NOT_SET_ANYWHERE"]}, "is not set"),
        ({"variables": ["a b=c"]}, "does not contain a valid variable name"),
        ({"variables": ["=c"]}, "does not contain a valid variable name"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, given: dict[str, Sequence[str]], message: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceUnavailable, match=message) as caught:
        options_of(tmp_path, **given)
    assert caught.value.fix


def test_other_packages_wheels_are_mounted(tmp_path: Path) -> None:
    mine = make_wheel(tmp_path / "house", name="numpy", version="2.3")
    torch = make_wheel(tmp_path / "kept", name="torch", version="2.6.0")
    same = make_wheel(tmp_path / "distribution", name="numpy", version="2.3")
    found = [mine, torch, same, tmp_path / "gone-1.0-py3-none-any.whl"]
    folder = "/usr/src/wheelhouse"
    binds = build.wheel_mounts(found, Wanted(name="other", version="1"))
    assert sorted(binds) == sorted([f"{mine}:{folder}/{mine.name}:ro", f"{torch}:{folder}/{torch.name}:ro"])
    assert build.wheel_mounts(found, Wanted(name="NumPy", version="2.3")) == [f"{torch}:{folder}/{torch.name}:ro"]


@pytest.mark.parametrize("name", ["libfoo; rm -rf /", "-y", "", "Lib", "a$(b)"])
def test_package_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceUnavailable, match="names of Debian packages"):
        options_of(tmp_path, packages=["libyaml-dev", name])


# --- builds in the development image --------------------------------------------------------------------------------


@pytest.fixture
def own_wheelhouse(product_config: Config, tmp_path: Path) -> Config:
    """Provide the shared build, with a temporary wheelhouse before the configured ones."""
    import dataclasses

    folders = (str(tmp_path / "house"), *product_config.torch.wheelhouse)
    return dataclasses.replace(product_config, torch=dataclasses.replace(product_config.torch, wheelhouse=folders))


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_other_build")
def test_project_with_c_extension_runs_on_the_target(
    built: main_job.Built, client: docker.DockerClient, own_wheelhouse: Config, tmp_path: Path
) -> None:
    assert built.manifests
    source = project(tmp_path / "try", pyproject_toml='[build-system]\nrequires = ["setuptools"]\n')
    before = sorted(path.name for path in source.iterdir())
    done = build_wheel(own_wheelhouse, "./try", folder=tmp_path)
    python = load_suite(own_wheelhouse.image.suite).python_tag
    assert done.wheel.path == tmp_path / "house" / f"pitorch_try-1.2-{python}-{python}-linux_armv7l.whl"
    assert done.elf_files == 1
    assert sorted(path.name for path in source.iterdir()) == before, "the project's folder is unchanged"
    seen = run_in(
        client,
        own_wheelhouse.image_reference("workbench"),
        [
            "sh",
            "-euc",
            "pip install -q --no-deps --no-index --target /tmp/x /house/*.whl; cd /tmp/x; "
            "python3 -c 'import trying; print(trying.bits())'",
        ],
        architecture=own_wheelhouse.image.target,
        binds=[f"{tmp_path / 'house'}:/house:ro"],
        environment={"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        limit_s=600,
    )
    assert seen.output.split()[-1] == "32"


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.usefixtures("no_other_build")
def test_compiler_errors_are_shown(built: main_job.Built, own_wheelhouse: Config, tmp_path: Path) -> None:
    assert built.manifests
    project(
        tmp_path / "try", trying_c="#error no such luck\n", pyproject_toml='[build-system]\nrequires = ["setuptools"]\n'
    )
    with pytest.raises(CommandFailed, match="no such luck"):
        build_wheel(own_wheelhouse, "./try", folder=tmp_path)
    assert not list(tmp_path.glob("house/*.whl"))
    assert not list((own_wheelhouse.target_root / "work").glob(".wheel*"))


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.usefixtures("no_other_build")
def test_packages_come_from_the_images_package_lists(
    built: main_job.Built, own_wheelhouse: Config, tmp_path: Path
) -> None:
    assert built.manifests
    project(
        tmp_path / "try",
        setup_py=SETUP.replace('["trying.c"]', '["trying.c"], libraries=["yaml"]'),
        trying_c=MODULE.replace("static PyObject", "#include <yaml.h>\nstatic PyObject", 1).replace(
            "PyLong_FromSize_t(8 * sizeof(void *))", "PyUnicode_FromString(yaml_get_version_string())"
        ),
        pyproject_toml='[build-system]\nrequires = ["setuptools"]\n',
    )
    done = build_wheel(own_wheelhouse, "./try", folder=tmp_path, options=Options(packages=["libyaml-dev"]))
    assert any("apt-get install libyaml-0-2 (for libyaml-0.so.2)" in warning for warning in done.warnings)
    options = Options(packages=["libyaml-dev", "libnosuch-dev"])
    with pytest.raises(SourceUnavailable, match="trixie has no package libnosuch-dev") as caught:
        build_wheel(own_wheelhouse, "./try", folder=tmp_path, options=options)
    assert "Unable to locate package" in caught.value.found


# Importing torch takes most of the time, so pip's two calls for metadata skip the import. The other build does not
# import torch; test_torch_wheel.py imports torch in a build without isolation.
NEEDS_TORCH = """\
import sys
from pathlib import Path
from setuptools import setup
if "bdist_wheel" in sys.argv:
    import torch
    Path("sum_of_torch.py").write_text(f"SUM = {torch.ones(3).sum().item():.0f}")
setup(name="needs-torch", version="1.0", py_modules=["sum_of_torch"])
"""

FINDS_TORCH = """\
import os
import re
from importlib import metadata
from setuptools import setup
setup(name="needs-torch", version=f"{os.environ['MINE']}+{metadata.version('torch')}", py_modules=[])
"""


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_other_build")
def test_build_that_requires_torch_gets_the_images_torch(
    built: main_job.Built, own_wheelhouse: Config, tmp_path: Path
) -> None:
    """Build one wheel with build isolation and one without.

    The second build reads an environment variable that the caller set.
    """
    assert built.manifests
    isolated = '[build-system]\nrequires = ["setuptools", "torch"]\n'
    project(tmp_path / "first", setup_py=NEEDS_TORCH, pyproject_toml=isolated)
    done = build_wheel(own_wheelhouse, "./first", folder=tmp_path)
    assert done.wheel.path.name == "needs_torch-1.0-py3-none-any.whl"
    with zipfile.ZipFile(done.wheel.path) as wheel:
        assert wheel.read("sum_of_torch.py") == b"SUM = 3"
    project(tmp_path / "second", setup_py=FINDS_TORCH)
    options = Options(isolated=False, environment={"MINE": "2.0"})
    done = build_wheel(own_wheelhouse, "./second", folder=tmp_path, options=options)
    assert done.wheel.path.name == f"needs_torch-2.0+{built.manifest('torch').facts['version']}-py3-none-any.whl"
    logs = own_wheelhouse.target_root / "logs"
    for name in ("first", "second"):
        assert (logs / f"build-wheel-{Wanted(project=(tmp_path / name).resolve()).label}.log").exists()


GREETING = "import struct\nprint(__file__, 8 * struct.calcsize('P'))\n"


@pytest.mark.engine
@pytest.mark.emulation
def test_pip_on_the_target_installs_from_serve_wheels(
    built: main_job.Built,
    client: docker.DockerClient,
    own_wheelhouse: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands that serve-wheels prints run in the system image, which shares this machine's network."""
    assert built.manifests
    printed: list[str] = []
    monkeypatch.setattr(progress, "say", printed.append)
    wheel = make_wheel(tmp_path / "house", {"greeting.py": GREETING}, name="greeting", tag="py3-none-any", purelib=True)
    with running_index(Offer(own_wheelhouse)) as url:
        lines = instructions(url, [wheel.name], wheel.name)
        make_venv, install = [line.strip() for line in lines if "~/venv" in line][:2]
        seen = run_in(
            client,
            own_wheelhouse.image_reference("system"),
            ["sh", "-euc", "\n".join([make_venv, install, "cd /", "~/venv/bin/python -c 'import greeting'"])],
            architecture=own_wheelhouse.image.target,
            # Bypass this machine's proxy.
            environment={
                "HOME": "/root",
                "no_proxy": "127.0.0.1",
                "NO_PROXY": "127.0.0.1",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            },
            limit_s=600,
        )
    python = load_suite(own_wheelhouse.image.suite).python
    place = f"/root/venv/lib/python{python}/site-packages/greeting.py"
    assert seen.output.splitlines()[-1] == f"{place} 32"
    assert [line.split()[2:4] for line in printed] == [["/simple/greeting/", "200"], [f"/packages/{wheel.name}", "200"]]
