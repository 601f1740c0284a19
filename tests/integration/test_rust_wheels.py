"""Tests of build-wheel for packages with Rust code: Cargo's settings, errors, and builds with a native toolchain."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import needs_the_machine

from engine.connect import connect
from engine.containers import run_in
from engine.start import ensure_running
from flow import main_job, pipelines, roots
from flow.build_wheel import build_wheel
from flow.context import Context
from images import rootfs
from toolchain import files
from toolchain.config import Config, load_config
from toolchain.errors import CommandFailed, NetworkUnreachable, UserError
from toolchain.manifest import require
from wheels import build, cargo_settings, faults
from wheels.request import Wanted

FAILED = "error: subprocess-exited-with-error\n"
WITHOUT_CARGO = {
    "setuptools-rust": "error: can't find Rust compiler",
    "maturin": "Cargo, the Rust package manager, is not installed or is not on PATH.",
}
CARGO_OFFLINE = """\
error: failed to get `pyo3` as a dependency of package `thing v0.1.0 (/usr/src/wheel/source/thing)`
Caused by:
  failed to download from `https://index.invalid/config.json`
Caused by:
  [6] Couldn't resolve host name (Could not resolve host: index.invalid)
"""

# --- error messages -------------------------------------------------------------------------------------------------


def explain(output: str) -> UserError:
    wanted = Wanted(name="thing", version="1.0")
    return faults.explain(CommandFailed("pip failed", tail=output), wanted, output, load_config({}))


@pytest.mark.parametrize("text", WITHOUT_CARGO.values(), ids=WITHOUT_CARGO)
def test_a_missing_rust_compiler_is_recognised(text: str) -> None:
    fault = explain(FAILED + text)
    assert isinstance(fault, faults.RustMissing)
    assert "contains Rust code" in fault.summary
    assert "build.native_compiler" in fault.fix


def test_cargo_without_a_network_is_reported() -> None:
    fault = explain(FAILED + CARGO_OFFLINE)
    assert isinstance(fault, NetworkUnreachable)
    assert "Cargo cannot download the crates" in fault.summary
    assert "index.invalid/config.json" in fault.found
    assert "~/.cargo/config.toml" in fault.fix


# --- Cargo's configuration ------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a home folder for the caller, with an empty folder for Cargo."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    (tmp_path / "home" / ".cargo").mkdir(parents=True)
    return tmp_path / "home"


def test_cargos_configuration_is_mounted_with_its_folders(tmp_path: Path, home: Path) -> None:
    assert cargo_settings.of_this_pc().paths == {}
    (tmp_path / "crates").mkdir()
    (home / "mine").mkdir()
    (home / ".cargo" / "config.toml").write_text(
        f"[source.crates-io]\nreplace-with = 'a'\n[source.a]\ndirectory = '{tmp_path}/crates'\n"
        "[source.b]\nlocal-registry = 'mine'\n[source.c]\nregistry = 'sparse+https://index.invalid/'\n"
    )
    assert cargo_settings.of_this_pc().paths == {
        "/root/.cargo/config.toml": home / ".cargo" / "config.toml",
        f"{tmp_path}/crates": tmp_path / "crates",
        "/root/mine": home / "mine",
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[source", "table declaration"),
        ("source = 3", "int"),
        ("source.a = 3", "int"),
        ("source.a.directory = 3", "int"),
        ("[source.a]\ndirectory = '/no/such/folder'", "/no/such/folder"),
    ],
)
def test_invalid_cargo_configuration_is_reported(home: Path, text: str, found: str) -> None:
    (home / ".cargo" / "config.toml").write_text(text)
    with pytest.raises(UserError, match="Cargo's configuration") as caught:
        cargo_settings.of_this_pc()
    assert found in caught.value.found
    assert str(home / ".cargo" / "config.toml") in caught.value.fix


# --- builds with the native toolchain -------------------------------------------------------------------------------

BUILD = """\
use std::{env, process::Command};
fn main() {
    let seen = Command::new(env::var("RUSTC").unwrap()).arg("-vV").output().unwrap().stdout;
    let text = String::from_utf8(seen).unwrap();
    let host = text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    println!("cargo:rustc-env=COMPILED_BY={host} {}", env::consts::ARCH);
}
"""
"""A build script that records in the program on which machines rustc and the script itself ran."""

SETUPTOOLS_RUST = {
    "pyproject.toml": '[build-system]\nrequires = ["setuptools", "setuptools-rust"]\n',
    "setup.py": """\
from setuptools import setup
from setuptools_rust import Binding, RustExtension
setup(name="pitorch-rusty", version="1.0", rust_extensions=[RustExtension("rusty", binding=Binding.NoBinding)])
""",
    "Cargo.toml": '[package]\nname = "rusty"\nversion = "1.0.0"\nedition = "2021"\n[lib]\ncrate-type = ["cdylib"]\n',
    "build.rs": BUILD,
    # Declares the parts of the C API that one function needs, instead of using PyO3.
    "src/lib.rs": """\
use std::ffi::{c_char, c_int, c_void};
use std::ptr::{addr_of, addr_of_mut, null, null_mut};

type Object = *mut c_void;

#[repr(C)]
struct Method {
    name: *const c_char,
    function: Option<extern "C" fn(Object, Object) -> Object>,
    flags: c_int,
    doc: *const c_char,
}

#[repr(C)]
struct Definition {
    count: isize,
    kind: Object,
    init: *const c_void,
    index: isize,
    copy: Object,
    name: *const c_char,
    doc: *const c_char,
    size: isize,
    methods: *const Method,
    others: [*const c_void; 4],
}

extern "C" {
    fn PyModule_Create2(definition: *mut Definition, api: c_int) -> Object;
    fn PyUnicode_FromStringAndSize(text: *const c_char, size: isize) -> Object;
}

extern "C" fn seen(_: Object, _: Object) -> Object {
    let text = format!("{} {} {}", env!("COMPILED_BY"), std::env::consts::ARCH, usize::BITS);
    unsafe { PyUnicode_FromStringAndSize(text.as_ptr().cast(), text.len() as isize) }
}

const NO_ARGUMENTS: c_int = 4;

static mut METHODS: [Method; 2] = [
    Method { name: c"seen".as_ptr(), function: Some(seen), flags: NO_ARGUMENTS, doc: null() },
    Method { name: null(), function: None, flags: 0, doc: null() },
];

static mut MODULE: Definition = Definition {
    count: 1,
    kind: null_mut(),
    init: null(),
    index: 0,
    copy: null_mut(),
    name: c"rusty".as_ptr(),
    doc: null(),
    size: -1,
    methods: addr_of!(METHODS).cast(),
    others: [null(); 4],
};

#[no_mangle]
pub unsafe extern "C" fn PyInit_rusty() -> Object {
    PyModule_Create2(addr_of_mut!(MODULE), 1013)
}
""",
}

MATURIN = {
    "pyproject.toml": """\
[build-system]
requires = ["maturin>=1,<2"]
build-backend = "maturin"
[project]
name = "pitorch-rusty"
version = "1.0"
[tool.maturin]
module-name = "rusty"
""",
    "Cargo.toml": """\
[package]
name = "rusty"
version = "1.0.0"
edition = "2021"
[lib]
crate-type = ["cdylib"]
[dependencies]
pyo3 = { version = "0", features = ["extension-module"] }
""",
    "build.rs": BUILD,
    "src/lib.rs": """\
use pyo3::prelude::*;

#[pyfunction]
fn seen() -> String {
    format!("{} {} {}", env!("COMPILED_BY"), std::env::consts::ARCH, usize::BITS)
}

#[pymodule]
fn rusty(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(seen, module)?)
}
""",
}


def project(folder: Path, contents: dict[str, str]) -> Path:
    (folder / "src").mkdir(parents=True)
    for name, text in contents.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def own_wheelhouse(product_config: Config, tmp_path: Path) -> Iterator[Config]:
    """Provide the shared build with a temporary wheelhouse that takes precedence, and block other builds meanwhile."""
    needs_the_machine()
    folders = (str(tmp_path / "house"), *product_config.torch.wheelhouse)
    ensure_running(product_config)
    with files.locked(product_config.build_root / "for-the-tests"):
        yield dataclasses.replace(product_config, torch=dataclasses.replace(product_config.torch, wheelhouse=folders))


def imported(done: build.Done, config: Config) -> str:
    """Install a wheel in a target container, and return what its module reports."""
    install = f"pip install -q --no-deps --no-index --target /tmp/x /house/{done.wheel.path.name}"
    with contextlib.closing(connect()) as client:
        seen = run_in(
            client,
            config.image_reference("workbench"),
            ["sh", "-euc", f"{install}; cd /tmp/x; python3 -c 'import rusty; print(rusty.seen())'"],
            architecture=config.image.target,
            binds=[f"{done.wheel.path.parent}:/house:ro"],
            environment={"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            limit_s=600,
        )
    return seen.output.splitlines()[-1]


@pytest.mark.expensive
@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(3600)
def test_setuptools_rust_compiles_natively(own_wheelhouse: Config, home: Path, tmp_path: Path) -> None:
    project(tmp_path / "rusty", SETUPTOOLS_RUST)
    done = build_wheel(own_wheelhouse, "./rusty", folder=tmp_path)
    assert done.elf_files == 1
    assert imported(done, own_wheelhouse) == "x86_64-unknown-linux-gnu x86_64 arm 32"


@pytest.mark.expensive
@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(3600)
def test_maturin_and_pyo3_from_a_folder_of_crates(own_wheelhouse: Config, home: Path, tmp_path: Path) -> None:
    """The distribution's crate packages provide a folder that Cargo reads instead of the registry."""
    main_job.ready_workbench(own_wheelhouse)
    with Context(own_wheelhouse) as context:
        mirror = require(pipelines.main_job(context).manifest_path("mirror"), "build-image")
        spec = roots.root_spec(context, "crates", ("librust-pyo3-dev",), mirror, (context.native,))
        rootfs.build_tools(spec, tmp_path / "crates", tmp_path / "crates.log", standing_in=())
    (home / ".cargo" / "config.toml").write_text(
        "[source.crates-io]\nreplace-with = 'distribution'\n"
        f"[source.distribution]\ndirectory = '{tmp_path}/crates/usr/share/cargo/registry'\n"
    )
    project(tmp_path / "rusty", MATURIN)
    done = build_wheel(own_wheelhouse, "./rusty", folder=tmp_path)
    assert done.elf_files == 1
    assert imported(done, own_wheelhouse) == "x86_64-unknown-linux-gnu x86_64 arm 32"
