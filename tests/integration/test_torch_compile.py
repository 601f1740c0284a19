"""Tests of interruptions of torch's compilation, with the real container, ninja, cross compiler and linker.

The sources are small; the code under test is torch's builder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from registry_parts import small_disk
from waiting import eventually

from engine.connect import connect
from flow import main_job, verify
from images.flavour import load_suite
from recipes import recipe
from recipes.torch import build as building
from recipes.torch import source
from toolchain.config import ROOT, Config, load_config
from toolchain.errors import ChecksFailed, CommandFailed, DiskFull

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NINJA = """
rule cxx
  command = arm-linux-gnueabihf-g++ -fPIC -c $in -o $out
  description = Building CXX object $out
rule link
  command = sh link $in $out
build one.o: cxx one.cpp
build two.o: cxx two.cpp
build libboth.so: link one.o two.o | link
"""
LINK = """
if [ ! -e patience ]; then
    printf 'the first half of a library' >$3
    touch linking
    sleep 200
fi
exec arm-linux-gnueabihf-g++ -shared $1 $2 -o $3
"""
GO = """
import sys
sys.path[:0] = sys.argv[1:4]
from pathlib import Path
from test_torch_compile import a_builder
a_builder(Path(sys.argv[4]), sys.argv[5]).compile()
"""


def a_builder(folder: Path, image: str, client: docker.DockerClient | None = None) -> building.Builder:
    """Make torch's builder with a build tree in ``folder`` and the given image."""
    config = load_config({"build": {"folder": str(folder), "jobs": 2}})
    data = recipe.load("torch")
    for name in ("source", "ccache"):
        (folder / name).mkdir(exist_ok=True)
    found = source.Source(kind="archive", folder=folder / "source", identity="archive pytorch 1", files={})
    plan = building.Plan.of(data, config, load_suite("trixie"))
    return building.Builder(client or connect(), image, "sha256:1", plan, found, folder / "torch.log")


@pytest.fixture
def image(built: main_job.Built, product_config: Config) -> str:
    """Return the builder image, which has ninja and the cross compiler, like the image of torch's builder."""
    assert built.manifest("builder").facts["image"]
    return product_config.image_reference("builder")


@pytest.fixture
def builder(tmp_path: Path, image: str, client: docker.DockerClient) -> building.Builder:
    return a_builder(tmp_path, image, client)


def a_tree(builder: building.Builder) -> Path:
    """Make a build tree in which nothing has been compiled yet."""
    made = builder.home / "pytorch" / "build"
    made.mkdir(parents=True)
    (made / "build.ninja").write_text(NINJA)
    (made / "link").write_text(LINK)
    for name in ("one", "two"):
        (made / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n")
    return made


@pytest.fixture
def tree(builder: building.Builder) -> Path:
    return a_tree(builder)


def symbols(library: Path) -> set[str]:
    with library.open("rb") as stream:
        elf = ELFFile(stream)
        assert elf["e_machine"] == "EM_ARM"
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        return {symbol.name for symbol in table.iter_symbols()}


def containers_at(client: docker.DockerClient, folder: Path) -> list[str]:
    """Find containers, running or not, with a mount from the folder."""
    return [
        str(box.name)
        for box in client.containers.list(all=True, ignore_removed=True)
        if any(str(mount.get("Source", "")).startswith(str(folder)) for mount in box.attrs["Mounts"])
    ]


def interrupt_while_it_links(tmp_path: Path, tree: Path, image: str, *, times: int = 1) -> None:
    """Compile in another process and send it Ctrl-C when the linker has written part of a library."""
    here = Path(__file__).resolve().parent
    words = [sys.executable, "-c", GO, str(here), str(here.parent / "support"), str(ROOT), str(tmp_path), image]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            eventually((tree / "linking").exists, "linking did not start", interval_s=0.05, task=process)
            for _ in range(times - 1):
                process.send_signal(signal.SIGINT)
                time.sleep(2)
            process.send_signal(signal.SIGINT)
            # After a second Ctrl-C, the linker has less time to exit.
            said, _ = process.communicate(timeout=60 if times == 1 else building._PATIENCE_S - 5)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said


def test_ctrl_c_while_linking_leaves_no_container(
    tmp_path: Path, tree: Path, builder: building.Builder, image: str, client: docker.DockerClient
) -> None:
    library = tree / "libboth.so"
    interrupt_while_it_links(tmp_path, tree, image)
    assert containers_at(client, tmp_path) == []
    compiled = {name: (tree / name).stat().st_mtime_ns for name in ("one.o", "two.o")}
    (tree / "patience").touch()
    builder.compile()
    assert {"_Z3onev", "_Z3twov"} <= symbols(library)
    assert {name: (tree / name).stat().st_mtime_ns for name in compiled} == compiled, (
        "objects must not be compiled again"
    )

    # Repeat the test with a library from an earlier run, which is in ninja's log.
    (tree / "patience").unlink()
    (tree / "linking").unlink()
    (tree / "two.cpp").write_text("int three() { return 1; }\n")
    interrupt_while_it_links(tmp_path, tree, image)
    assert containers_at(client, tmp_path) == []
    (tree / "patience").touch()
    builder.compile()
    assert {"_Z3onev", "_Z5threev"} <= symbols(library)
    assert (tree / "one.o").stat().st_mtime_ns == compiled["one.o"]

    # Repeat the test with a missing library. In ninja's log, the library is newer than all objects, so ninja would
    # accept any file.
    for name in ("patience", "linking", "libboth.so"):
        (tree / name).unlink()
    interrupt_while_it_links(tmp_path, tree, image)
    assert containers_at(client, tmp_path) == []
    assert not library.exists()
    (tree / "patience").touch()
    builder.compile()
    assert {"_Z3onev", "_Z5threev"} <= symbols(library)


def test_a_second_ctrl_c_ends_the_wait(tmp_path: Path, tree: Path, image: str, client: docker.DockerClient) -> None:
    """The second Ctrl-C kills a linker that ignores the first, and none of the linker's files remain."""
    (tree / "link").write_text(f"trap '' INT\n{LINK}")
    interrupt_while_it_links(tmp_path, tree, image, times=2)
    assert containers_at(client, tmp_path) == []


def test_a_full_disk_while_linking_leaves_no_partial_library(
    tmp_path: Path, image: str, client: docker.DockerClient
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        builder = a_builder(disk, image, client)
        tree = a_tree(builder)
        (tree / "patience").touch()
        (tree / "one.cpp").write_text('extern const char one[]; const char one[300000] = "x";\n')
        (disk / "others").write_bytes(bytes(512 << 10))
        with pytest.raises(DiskFull, match="the disk filled up") as caught:
            builder.compile()
        assert "No space left on device" in caught.value.found
        assert caught.value.exit_code == 21
        assert not (tree / "libboth.so").exists()
        compiled = {name: (tree / name).stat().st_mtime_ns for name in ("one.o", "two.o")}
        (disk / "others").unlink()
        builder.compile()
        assert {"one", "_Z3twov"} <= symbols(tree / "libboth.so")
        assert {name: (tree / name).stat().st_mtime_ns for name in compiled} == compiled, (
            "objects must not be compiled again"
        )


def test_a_killed_compiler_raises_memoryexhausted(tree: Path, builder: building.Builder) -> None:
    """If the kernel kills the compiler, GCC's driver reports this, and ninja exits with status 1.

    In practice, the cause is nearly always an OOM kill.
    """
    (tree / "two.cpp").write_text(
        "#include <regex>\nbool two(const char* s) { return std::regex_search(s, std::regex(s)); }\n"
    )
    # With this limit, the kernel kills a process after one second of CPU time.
    (tree / "build.ninja").write_text(
        NINJA.replace("arm-linux-gnueabihf-g++", "ulimit -t 1; arm-linux-gnueabihf-g++ -O3")
    )
    with pytest.raises(CommandFailed) as caught:
        builder.compile()
    assert caught.value.exit_code == 14
    assert "Killed signal terminated program cc1plus" in caught.value.found
    assert "2 compiler processes" in caught.value.expected
    assert "INVOKE_BUILD_JOBS=1" in caught.value.fix
    assert not (tree / "two.o").exists()


def test_processes_killed_by_the_kernel_are_reported(
    builder: building.Builder, client: docker.DockerClient, image: str
) -> None:
    """An OOM kill in another container simulates that of a compiler, which is killed without output."""
    builder.home.mkdir(parents=True)
    with pytest.raises(CommandFailed) as failed:
        builder.run(["sh", "-c", "exit 1"])
    assert failed.value.found == "exit status 1"
    # The process in the other container waits until the step runs; the step waits until that process has been killed.
    hungry = "until [ -e /at/step ]; do sleep 0.1; done; python3 -c 'bytearray(1 << 30)'; echo $? >/at/end; exit 137"
    binds = [f"{builder.home}:/at:rw"]
    hog = client.containers.run(image, ["sh", "-c", hungry], mem_limit="64m", volumes=binds, detach=True)
    try:
        with pytest.raises(CommandFailed) as caught:
            builder.run(["sh", "-c", "touch step; until [ -e end ]; do sleep 0.1; done; exit 1"])
        assert (builder.home / "end").read_text() == "137\n"
    finally:
        hog.remove(force=True)
    assert caught.value.found == "the kernel killed 1 process during the build"


def test_a_killed_container_raises_memoryexhausted(builder: building.Builder) -> None:
    builder.home.mkdir(parents=True)
    with pytest.raises(CommandFailed) as caught:
        builder.run(["sh", "-c", "sh -c 'kill -9 $$'"])
    assert "exit status 137: killed" in caught.value.found


def test_objects_are_verified_in_a_separate_container(tree: Path, builder: building.Builder) -> None:
    """The test runs ``verify`` without --full, on a tree with two objects."""
    (tree / "patience").touch()
    builder.compile()
    commands = [
        {"directory": "/", "file": f"{name}.cpp", "command": f"arm-linux-gnueabihf-g++ -fPIC -c {name}.cpp -o {name}.o"}
        for name in ("one", "two")
    ]
    (tree / "compile_commands.json").write_text(json.dumps(commands))
    before = (tree / "one.o").read_bytes()
    assert sorted(verify.sampled(builder, 2, 1).names) == ["one", "two"]
    (tree / "one.cpp").write_text("int one() { return 3; }\n")
    with pytest.raises(ChecksFailed, match="1 of 2 object files") as caught:
        verify.sampled(builder, 2, 1)
    assert caught.value.found == "one"
    assert (tree / "one.o").read_bytes() == before, "the tree must not change"
