"""Tests that native build tools in an emulated container produce the same files and output as emulated tools."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import docker
import pytest

from engine.containers import run_in
from flow import build_wheel as any_wheel
from flow import main_job
from flow.compilers import native_compiler
from flow.context import Context
from images import build_tools, native
from toolchain.config import Config
from wheels import build, pip_settings
from wheels.request import Options, Wanted

REQUIRED = "Cython==3.3.1"

PYPROJECT = f"""\
[build-system]
requires = ["meson-python==0.18.0", "meson==1.8.2", "{REQUIRED}", "numpy"]
build-backend = "mesonpy"
[project]
name = "pitorch-small"
version = "1.0"
"""

# The properties of machine and Python that Meson detects are compiled into the wheel, so different ones change its
# bytes.
MESON = """\
project('pitorch-small', 'c', 'cython', version: '1.0')
py = import('python').find_installation(pure: false)
cc = meson.get_compiler('c')
made = configure_file(output: 'seen.h', configuration: {
  'SEEN_MACHINE': '"' + host_machine.cpu_family() + ' ' + build_machine.cpu() + '"',
  'SEEN_POINTER': cc.sizeof('void *'),
  'SEEN_SUFFIX': '"' + py.get_variable('EXT_SUFFIX', 'none') + '"',
  'SEEN_DEPENDENCY': '"' + dependency('python3-embed', method: 'pkg-config').get_variable('libdir') + '"',
})
numpy = run_command(py, '-c', 'import numpy; print(numpy.get_include())', check: true).stdout().strip()
words = custom_target('words', input: 'words.py', output: 'words.h', command: [py, '@INPUT@', '@OUTPUT@'])
py.extension_module('_small', '_small.pyx', made, words, include_directories: include_directories(numpy), install: true)
"""

# A script of the project that queries the target's Python.
WORDS = """\
import platform, struct, sys, sysconfig
printed = f"{8 * struct.calcsize('P')} {sysconfig.get_platform()} {platform.machine()} {sys.executable}"
open(sys.argv[1], "w").write(f'#define WORDS "{printed}"\\n')
"""

CYTHON = """\
# cython: language_level=3
cimport numpy
cdef extern from "seen.h":
    const char *SEEN_MACHINE
    const char *SEEN_SUFFIX
    const char *SEEN_DEPENDENCY
    int SEEN_POINTER
cdef extern from "words.h":
    const char *WORDS

def seen():
    return SEEN_MACHINE.decode(), SEEN_SUFFIX.decode(), SEEN_DEPENDENCY.decode(), SEEN_POINTER, WORDS.decode()

def total(numpy.ndarray[numpy.float64_t] values, *, scale=2**40):
    cdef double found = 0
    for at in range(values.shape[0]):
        found += values[at]
    return f"{found * scale:.3f}", [{"a": 1.5, "b": -(2**63)}, (1, 2.25e-3, b"bytes")]

class Thing:
    def method(self, *, name="x"):
        return [f"{name}{at}" for at in range(3)]
"""


def project(folder: Path) -> Path:
    folder.mkdir()
    for name, text in (
        ("pyproject.toml", PYPROJECT),
        ("meson.build", MESON),
        ("words.py", WORDS),
        ("_small.pyx", CYTHON),
    ):
        (folder / name).write_text(text)
    return folder


def stand_ins(config: Config) -> native.Mounts:
    context = Context(config)
    return build_tools.together(
        native_compiler(context), build_tools.tool_mounts(context.tools, context.target, context.suite)
    )


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("no_other_build")
@pytest.mark.parametrize(
    "tools",
    [
        pytest.param(["native"], id="native"),
        pytest.param(["native", "emulated"], id="both", marks=pytest.mark.expensive),
    ],
)
def test_native_tools_build_a_wheel_by_cython_and_meson(
    built: main_job.Built, client: docker.DockerClient, product_config: Config, tmp_path: Path, tools: list[str]
) -> None:
    """Once a week, emulated tools also build the wheel, which must have the same bytes; this takes a minute.

    In every run, the wheel built by native tools contains the properties of the target that Meson has detected, and
    the next test compares the output of native and emulated tools.
    """
    assert built.manifests
    main_job.ready_workbench(product_config)
    wanted = Wanted(project=project(tmp_path / "small"))
    offered = any_wheel.build_requirements(product_config)
    assert [path.name.partition("-")[0] for path in offered][-3:] == ["numpy", "pandas", "scipy"]
    made = {}
    for name in tools:
        mounts = stand_ins(product_config) if name == "native" else native.Mounts()
        house = dataclasses.replace(product_config.torch, wheelhouse=(str(tmp_path / name),))
        config = dataclasses.replace(product_config, torch=house)
        container = build.BuildContainer(image=config.image_reference("workbench"), mounts=mounts, wheels=offered)
        done = build.build(client, container, wanted, Options(), config)
        log = config.target_root / "logs" / f"build-wheel-{wanted.label}.log"
        assert "Successfully installed" in log.read_text()
        made[name] = (done.wheel.sha256, done.wheel.path)
    assert len({sha256 for sha256, _ in made.values()}) == 1
    seen = run_in(
        client,
        product_config.image_reference("workbench"),
        ["sh", "-euc", "pip install -q --no-deps --no-index --target /tmp/x /house/*.whl; cd /tmp/x; "
         "python3 -c 'import _small, numpy; print(*_small.seen(), *_small.total(numpy.ones(3)))'"],
        architecture=product_config.image.target,
        binds=[f"{made['native'][1].parent}:/house:ro"],
    )  # fmt: skip
    gnu, python = product_config.image.target.gnu, Context(product_config).suite.python_tag.replace("cp", "cpython-")
    printed = f"arm armv7l .{python}-{gnu}.so /usr/lib/{gnu} 4 32 linux-armv7l armv7l /usr/bin/python3 "
    assert seen.output.splitlines()[-1].startswith(printed + "3298534883328.000"), seen.output


TRANSLATE = f"""
{build_tools.INSTALL}
pip install -q --no-deps --break-system-packages {REQUIRED}
cd /tmp && mkdir source
cython -o small.c /project/_small.pyx
ls /var/tmp/pitorch-native/cython-*/site/Cython/Compiler/*.cpython-*.so
rm -r /var/tmp/pitorch-native
echo '# changed' >>"$(python3 -c 'import Cython; print(*Cython.__path__)')/Compiler/Nodes.py"
cd source && cython -o small.c /project/_small.pyx
ls /var/tmp/pitorch-native/cython-*/site | wc -l
cmp small.c ../small.c
wc -l <small.c
"""


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_other_build")
def test_native_cython_generates_the_same_code(
    built: main_job.Built, client: docker.DockerClient, product_config: Config, tmp_path: Path
) -> None:
    """The test changes the installed Cython's source, so the second translation runs this Cython, not a native one."""
    assert built.manifests
    main_job.ready_workbench(product_config)
    settings, mounts = pip_settings.of_this_pc(), stand_ins(product_config)
    seen = run_in(
        client,
        product_config.image_reference("workbench"),
        ["sh", "-euc", TRANSLATE],
        architecture=product_config.image.target,
        binds=[*mounts.binds(), *settings.binds(), f"{project(tmp_path / 'small')}:/project:ro"],
        environment={**mounts.environment, **settings.environment},
    )
    *_, module, fetched, lines = seen.output.splitlines()
    assert module.endswith("-linux-gnu.so")
    assert "arm" not in module.rpartition("/")[2]
    assert fetched == "0"
    assert int(lines) > 1000


ANSWERS = """
for name in zlib python3-embed liblzma nosuch; do pkg-config --cflags --libs --modversion $name 2>&1 || echo none; done
cmake --system-information | grep -E 'CMAKE_(HOST_)?SYSTEM_PROCESSOR|CMAKE_SIZEOF_VOID_P|CMAKE_LIBRARY_ARCHITECTURE '
uname -m; echo $((1 << 40)); printf '%x %d\n' -1 0x7fffffffff; expr 3000000000 + 3000000000
python3 -c 'import sys, os; print(sys.executable, sys.orig_argv[0], sys.maxsize, os.uname().machine)'
python3 -m venv --without-pip /tmp/venv && /tmp/venv/bin/python -c 'import sys; print(sys.executable, sys.prefix)'
pip debug --verbose 2>/dev/null | grep -E 'cp313-cp313|sys.executable|platform'
"""


@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_other_build")
def test_native_tools_report_the_same_as_emulated_ones(
    built: main_job.Built, client: docker.DockerClient, product_config: Config
) -> None:
    assert built.manifests
    main_job.ready_workbench(product_config)
    printed = []
    for mounts in (stand_ins(product_config), native.Mounts()):
        seen = run_in(
            client,
            product_config.image_reference("workbench"),
            ["sh", "-c", f"[ ! -x {build_tools.INSTALL} ] || {build_tools.INSTALL}; {ANSWERS}"],
            architecture=product_config.image.target,
            binds=mounts.binds(),
            environment={**mounts.environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        printed.append(seen.output)
    assert printed[0].splitlines() == printed[1].splitlines()
    assert "-manylinux_2_31_armv7l" in printed[0], "pip must detect a Python for armhf"
