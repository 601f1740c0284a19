"""Tests of profile-remote without a board: addresses, targets, comparison, and errors in a kernel's file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest
from exports import exported_in
from remote_kernels import RIGHT, write
from wheel_parts import make_wheel

from device import labgrid_environment
from device.remote import (
    comparing,
    compiling,
    environment,
    faults,
    loader_session,
    opencl,
    phone,
    profiling,
    reporting,
    rpc_worker,
    targets,
)
from device.remote.address import Address, parse, resolve
from device.remote.loader_session import Timing
from images.flavour import load_suite
from recipes import recipe
from recipes.tvm_server import build as tvm_server
from toolchain import progress
from toolchain.architecture import ARCHITECTURES, host_architecture
from toolchain.config import Config, load_config
from toolchain.errors import (
    AccessDenied,
    BoardSilent,
    ConfigError,
    InUse,
    NetworkUnreachable,
    PlatformMismatch,
    UserError,
)
from toolchain.files import sha256_of
from wheels.index import running_index, wheels_in

REMOTE = Path(faults.__file__).parent


@pytest.mark.parametrize(("target", "architecture"), [("aarch64", "arm64"), ("opencl", "arm64"), ("armv7", "armhf")])
def test_login_key_is_of_the_export_for_the_target(tmp_path: Path, target: str, architecture: str) -> None:
    for name in ("armhf", "arm64"):
        exported_in(tmp_path / name)
    folder = tmp_path / "build" / f"trixie-{architecture}"
    folder.mkdir(parents=True)
    for path in (tmp_path / architecture).iterdir():
        path.rename(folder / path.name)
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    found = loader_session._access(config, targets.load(target), parse("tree://root@127.0.0.1"))
    assert found.key == folder / "nfsroot.files" / "id_ed25519"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local", Address(kind="local")),
        ("emulator", Address(kind="emulator")),
        ("192.168.77.50:9090", Address(kind="direct", host="192.168.77.50", port=9090)),
        ("direct://pi.lan:9090", Address(kind="direct", host="pi.lan", port=9090)),
        ("[fd00::1]:9090", Address(kind="direct", host="fd00::1", port=9090)),
        ("tracker://lab:9190/pi3", Address(kind="tracker", host="lab", port=9190, key="pi3")),
        ("proxy://lab:9090/android", Address(kind="proxy", host="lab", port=9090, key="android")),
        ("proxy://[fd00::2]:1/k", Address(kind="proxy", host="fd00::2", port=1, key="k")),
        ("ssh://me@pi:2222", Address(kind="ssh", host="me@pi:2222")),
        ("tree://root@192.168.77.50", Address(kind="tree", host="root@192.168.77.50")),
        ("adb://", Address(kind="adb")),
        ("adb://0A1B-2c", Address(kind="adb", host="0A1B-2c")),
        ("adb://[fd00::1]:5555", Address(kind="adb", host="[fd00::1]:5555")),
    ],
)
def test_address_is_parsed(text: str, expected: Address) -> None:
    assert parse(text) == expected
    assert str(expected) == text.removeprefix("direct://")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pi",
        "pi:",
        "pi:0",
        "pi:65536",
        "pi:9090/key",
        "tracker://pi:9190",
        "proxy://pi:1",
        "http://pi:80",
        "ssh://",
        "adb://-s;id",
        "a b",
    ],
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    for form in ("HOST:PORT, tracker://HOST:PORT/KEY, proxy://", "tree://", "ssh://", "adb://", "place://NAME"):
        assert form in caught.value.expected


def test_boards_are_resolved_by_name() -> None:
    devices = ("pi3=tracker://lab:9190/pi3", "desk=pi.lan:9090")
    assert resolve("pi3", devices).key == "pi3"
    assert resolve("desk", devices).host == "pi.lan"
    assert resolve("other:1", devices).host == "other"
    with pytest.raises(UserError) as caught:
        resolve("dsk", devices)
    assert caught.value.fix == "pass --device desk"
    assert "pi3, desk" in caught.value.expected


def test_every_invalid_board_of_the_configuration_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("a", ("a=nonsense", "b=pi:9090", "c=pi:99999"))
    assert [fault.split(":")[1].strip() for fault in caught.value.faults] == ["a", "c"]
    with pytest.raises(ConfigError, match="NAME=ADDRESS"):
        load_config({"remote": {"devices": ["pi3"]}})


def test_targets_use_the_table_of_architectures() -> None:
    assert targets.load("aarch64").architecture == ARCHITECTURES["arm64"]
    assert targets.load("aarch64").linker("") == "aarch64-linux-gnu-g++"
    assert targets.load("armv7").linker("") == "arm-linux-gnueabihf-g++"
    assert targets.load("local").architecture == host_architecture()
    assert targets.load("local").linker("") == "g++"
    assert targets.load("armv7").linker("clang++-19") == "clang++-19"
    with pytest.raises(UserError) as caught:
        targets.load("arm7")
    assert caught.value.fix == "pass --target armv7"


def test_other_compilers_build_other_loaders(tmp_path: Path) -> None:
    def loader_of(folder: str, version: str) -> Path:
        loader_session._version.cache_clear()
        compiler = tmp_path / folder / "g++"
        compiler.parent.mkdir(exist_ok=True)
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ {version}" && exit\n'
            'while [ "$1" != -o ]; do shift; done; touch "$2"\n'
        )
        compiler.chmod(0o755)
        config = load_config({"build": {"folder": str(tmp_path / "build")}, "remote": {"linker": str(compiler)}})
        return loader_session.build_loader(config, targets.load("armv7"))

    first = loader_of("a", "12.2.0")
    assert loader_of("a", "12.2.0") == first
    others = {loader_of("a", "14.2.0"), loader_of("b", "12.2.0")}
    assert len(others - {first}) == 2


def test_first_difference_is_found_in_memory_order() -> None:
    expected = numpy.zeros((4, 5), numpy.float32)
    found = expected.copy()
    found[2, 3], found[3, 0] = 1, 2
    wrong = comparing.first_difference(found, expected, relative=0, absolute=0)
    assert wrong == {"index": (2, 3), "expected": 0.0, "value": 1.0, "count": 2, "total": 20}
    assert comparing.first_difference(expected, expected, relative=0, absolute=0) is None
    assert comparing.first_difference(found, expected, relative=0, absolute=2) is None


def test_nan_equals_only_nan() -> None:
    expected = numpy.array([1, numpy.nan, 3], numpy.float32)
    assert comparing.first_difference(expected.copy(), expected, relative=0, absolute=0) is None
    found = numpy.array([1, numpy.nan, numpy.nan], numpy.float32)
    wrong = comparing.first_difference(found, expected, relative=1, absolute=1e30)
    assert wrong is not None
    assert wrong["index"] == (2,)


def test_different_shapes_or_types_are_not_compared() -> None:
    ones = numpy.ones(4, numpy.float32)
    for other in (numpy.ones((2, 2), numpy.float32), numpy.ones(4), numpy.ones(1, numpy.float32)):
        with pytest.raises(ValueError, match="expected float32 of shape"):
            comparing.first_difference(other, ones, relative=0, absolute=0)


def test_empty_results_agree() -> None:
    nothing = numpy.zeros(0, numpy.float32)
    assert comparing.first_difference(nothing, nothing, relative=0, absolute=0) is None


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("SIZE = 96", "SIZES = 96", "does not define SIZE"),
        ("def inputs", "def input", "does not define inputs"),
        ("import numpy", "import nump", "kernel.py:2: cannot be read: ModuleNotFoundError: No module named 'nump'"),
        ("SIZE = 96", "SIZE = = 96", "SyntaxError"),
        ("SIZE = 96", "raise SystemExit(3)", "kernel.py:4: cannot be read: SystemExit: 3"),
        ("SIZE = 96", "SIZE = 0", "a size of 0"),
        ("SIZE = 96", "SIZE = 'big'", "SIZE is not a number: ValueError"),
        ("SIZE = 96", "SIZE = 96; TOLERANCE = 1e-3", "the tolerance is not a pair of numbers: TypeError: cannot"),
        ("SIZE = 96", "SIZE = 96; TOLERANCE = ('a', 'b')", "the tolerance is not a pair of numbers: ValueError"),
        ("return [random", "return [1 / 0, random", "inputs() fails: ZeroDivisionError"),
        (
            "return [random.standard_normal(size, dtype=numpy.float32)]",
            "return ['text']",
            "expected an array of numbers",
        ),
        ("return a * numpy.float32(2)", "return a.no_such_thing", "reference() fails: AttributeError"),
    ],
)
def test_error_in_a_kernel_file_is_reported_with_its_line(tmp_path: Path, old: str, new: str, found: str) -> None:
    path = write(tmp_path, RIGHT, (old, new))
    with pytest.raises(reporting.Fault) as caught:
        compiling.load(path, 0)
    assert caught.value.kind == "kernel"
    assert found in caught.value.found


def test_arrays_of_a_kernel_are_reproducible(tmp_path: Path) -> None:
    one, two = (compiling.load(write(tmp_path), size) for size in (0, 96))
    assert (one.arrays[0] == two.arrays[0]).all()
    assert one.shape == "float32 96, float32 96"
    assert one.operations == 0
    assert one.tolerance == compiling.TOLERANCE
    assert compiling.load(write(tmp_path), 7).arrays[0].shape == (7,)


def test_integer_results_are_exact_by_default(tmp_path: Path) -> None:
    whole = ("a * numpy.float32(2)", "a.astype(numpy.int32)")
    assert compiling.load(write(tmp_path, RIGHT, whole), 0).tolerance == (0.0, 0.0)
    chosen = ("SIZE = 96", "SIZE = 96; TOLERANCE = (0, 1)")
    assert compiling.load(write(tmp_path, RIGHT, whole, chosen), 0).tolerance == (0.0, 1.0)


@pytest.mark.parametrize("kernel", ["ad_one", "no/such.py", "pyproject.toml", ""])
def test_missing_kernel_error_lists_the_known_ones(kernel: str) -> None:
    with pytest.raises(UserError) as caught:
        profiling.kernel_file(kernel)
    assert "add_one, gemm" in caught.value.expected


@pytest.mark.parametrize(
    "wrong", [{"number": 0}, {"repeat": 0}, {"min_repeat_ms": -1}, {"warm_up": -1}, {"number": -5}, {"number": 10**20}]
)
def test_invalid_timing_options_are_refused(wrong: dict[str, int]) -> None:
    timing = Timing(**{"number": 1, "repeat": 1, "min_repeat_ms": 0, "warm_up": 0, **wrong})
    with pytest.raises(UserError, match="nothing can be measured"):
        profiling.profile(Config(), kernel="add_one", target="local", timing=timing)


@pytest.mark.parametrize(
    ("target", "device", "summary"),
    [
        ("aarch64", "", "no board selected"),
        ("armv7", "local", "cannot run on local"),
        ("aarch64", "local", "cannot run on local"),
        ("qpu", "tracker://lab:9190/pi", "cannot run on tracker"),
        ("qpu", "emulator", "cannot run on emulator"),
        ("qpu", "adb://", "cannot run on adb://"),
        ("opencl", "emulator", "cannot run on emulator"),
        ("local", "nowhere", "there is no board 'nowhere'"),
    ],
)
def test_board_of_another_transport_is_refused(tmp_path: Path, target: str, device: str, summary: str) -> None:
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    with pytest.raises(UserError, match=re.escape(summary)):
        profiling.profile(config, kernel="add_one", target=target, device=device)


@pytest.mark.parametrize(
    ("target", "forms", "others"),
    [
        ("aarch64", "HOST:PORT tracker:// proxy:// tree:// ssh:// adb:// emulator place://", ()),
        ("armv7", "tree:// ssh:// adb:// emulator place://", ("tracker://",)),
        ("opencl", "local tree:// ssh:// adb:// place://", ("emulator", "tracker://")),
        ("qpu", "local tree:// ssh:// place://", ("emulator", "adb://")),
    ],
)
def test_refused_board_names_the_addresses_of_the_target(target: str, forms: str, others: tuple[str, ...]) -> None:
    wanted = targets.load(target)
    error = profiling.wrong_device(wanted, parse("proxy://lab:1/k"))
    assert error.summary == f"code for {wanted.title} cannot run on proxy://lab:1/k"
    for form in forms.split():
        assert form in error.expected
    for form in others:
        assert form not in error.expected


def test_address_of_a_lab_is_not_a_configured_board() -> None:
    with pytest.raises(ConfigError, match=r"place://NAME \(--device only\), found 'place://pi3'"):
        resolve("pi3", ("pi3=place://pi3",))


@pytest.mark.parametrize("kind", ["architecture", "crashed", "linker", "refused"])
def test_fault_of_both_names_the_kernel_or_model(kind: str) -> None:
    made = faults.error_of(kind, "", where="the board", target="a machine", gnu="its triplet")
    assert made.summary.startswith("the kernel or model ")


def test_compile_error_names_a_header_but_not_the_source() -> None:
    lines = ("/tmp/source.cl:3:5: error: one", "<kernel>:4:1: error: two", "/usr/a.h:7:9: error: three")
    assert opencl.compiler_errors("\x1e".join(("clBuildProgram: X", *lines))) == (
        "clBuildProgram: X / line 3, column 5: error: one / line 4, column 1: error: two / "
        "/usr/a.h, line 7, column 9: error: three"
    )


LISTED = (
    "List of devices attached\nAB12\tunauthorized\n192.0.2.7:5555\tdevice\n"
    "CD34\tno permissions (missing udev rules?); see [http://developer.android.com/tools/device.html]\n\n"
)


@pytest.mark.parametrize("host", ["pi..lan", f"{'a' * 64}.lan"])
def test_host_name_that_dns_does_not_allow_is_silent(host: str) -> None:
    with pytest.raises(reporting.Fault) as caught:
        rpc_worker._require_answer(host, 9090)
    assert caught.value.kind == "silent"
    assert labgrid_environment._addresses(host) == []


def test_opencl_file_must_be_named_like_a_function(tmp_path: Path) -> None:
    """The loader separates the words of a request with spaces."""
    path = write(tmp_path, RIGHT).rename(tmp_path / "two words.py")
    path.with_suffix(".cl").touch()
    with pytest.raises(reporting.Fault, match=r"two words\.cl: 'two words' is not a valid name of a function"):
        opencl.program(path, compiling.load(path, 0, target="opencl"))


def test_states_of_phones_are_read() -> None:
    found = phone.states("* daemon started successfully\n" + LISTED)
    assert (found["AB12"], found["192.0.2.7:5555"], len(found)) == ("unauthorized", "device", 3)
    assert found["CD34"].startswith("no permissions")


@pytest.mark.parametrize(
    ("state", "error", "summary"),
    [
        ("unauthorized", AccessDenied, "adb://X does not accept the key of this PC"),
        ("authorizing", AccessDenied, "adb://X does not accept the key of this PC"),
        ("offline", BoardSilent, "adb://X does not respond to adb"),
        ("recovery", UserError, "adb cannot start programs on adb://X"),
    ],
)
def test_state_of_a_phone_has_its_error(state: str, error: type[UserError], summary: str) -> None:
    with pytest.raises(error, match=re.escape(summary)) as caught:
        phone.require_usable(state, parse("adb://X"))
    assert caught.value.found == f"the state {state}"


def test_phone_is_chosen_from_the_list() -> None:
    phones = phone.states(LISTED)
    assert phone.choose(phones, parse("adb://AB12")) == ("AB12", "unauthorized")
    assert phone.choose({"AB12": "device"}, parse("adb://")) == ("AB12", "device")
    with pytest.raises(UserError, match="adb:// matches several phones") as caught:
        phone.choose(phones, parse("adb://"))
    assert "AB12 (unauthorized), 192.0.2.7:5555 (device)" in caught.value.found
    with pytest.raises(BoardSilent, match="adb does not find adb://EF56"):
        phone.choose(phones, parse("adb://EF56"))
    with pytest.raises(BoardSilent) as silent:
        phone.choose({}, parse("adb://"))
    assert silent.value.found == "no phones"


def test_tvm_installation_without_network_leaves_nothing(tmp_path: Path, unreachable_index: None) -> None:
    """The test runs pip with an unreachable index."""
    config = load_config({"build": {"folder": str(tmp_path / "build")}})
    with pytest.raises(NetworkUnreachable) as caught:
        environment.ready(config)
    assert "apache-tvm==" in caught.value.summary
    assert "https_proxy" in caught.value.fix
    assert sorted(path.suffix for path in (tmp_path / "build" / "packages").iterdir()) == ["", ".log"]


def test_tvm_versions_are_pinned() -> None:
    assert all("==" in pin for pin in tvm_server.pins())
    assert {pin.split("==")[0] for pin in tvm_server.pins()} >= {"apache-tvm", "apache-tvm-ffi"}


@pytest.mark.usefixtures("isolated_pip")
def test_the_wheels_of_the_server_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        make_wheel(tmp_path / "house", {f"{name}.py": "x = 1\n"}, name=name, tag="py3-none-any")
        for name in ("other", "server")
    ]
    monkeypatch.setattr(tvm_server, "pins", lambda: ("server==1.0", "other==1.0"))
    monkeypatch.setattr(progress, "say", lambda _: None)
    with running_index(lambda: wheels_in([tmp_path / "house"])) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("no_proxy", "*")
        wheels = tvm_server.stage(
            recipe.load("tvm_server"),
            ARCHITECTURES["arm64"],
            load_suite("trixie"),
            tmp_path / "root",
            tmp_path / "pip.log",
        )
    assert [(item.path.name, item.sha256) for item in wheels] == [(path.name, sha256_of(path)) for path in made]
    site = tmp_path / "root/opt/pitorch/tvm"
    assert (site / "server.py").is_file()
    assert not list(site.rglob("direct_url.json")), "the layer must not contain paths of this PC"
    assert {path.name for path in tmp_path.iterdir()} == {"house", "root", "pip.log"}


def test_statistics_of_a_profile() -> None:
    made = profiling.Profile(
        kernel="k", size=4, shape="float32 4", operations=4000, target="local", device="local", backend="CPU",
        seconds=(1e-6, 3e-6), checked=4, timing=Timing(1, 2, 0, 0),
    )  # fmt: skip
    assert made.mean_s == pytest.approx(2e-6)
    assert made.deviation_s == pytest.approx(2**0.5 * 1e-6)
    assert made.gflops == pytest.approx(2.0)
    rows = dict(made.rows())
    assert rows["mean"] == "2 µs"
    assert rows["minimum"] == "1 µs"
    assert "model" not in rows
    assert "note" not in rows


def test_every_reported_fault_is_in_the_table() -> None:
    reported = {
        kind
        for name in ("rpc_worker.py", "compiling.py", "loader_session.py", "profiling.py")
        for kind in re.findall(r'(?:Fault|error_of|_error)\(\s*"([\w-]+)"', (REMOTE / name).read_text())
    }
    assert reported >= {"unknown", "silent", "busy", "timed-out", "lost", "linker", "refused", "kernel", "crashed"}
    assert reported <= set(faults.TABLE)
    words = {"where": "the board", "limit_s": 7.0, "target": "a machine", "gnu": "its triplet"}
    for kind in faults.TABLE:
        made = faults.error_of(kind, "found text", **words)
        assert made.found == "found text"
        assert "{" not in f"{made.summary}{made.expected}{made.fix}"


def test_every_fault_of_the_loader_has_an_error() -> None:
    sources = "".join((REMOTE / "loader" / name).read_text() for name in ("loader.cpp", "opencl.cpp"))
    kinds = set(re.findall(r'Failure\("([\w-]+)"', sources))
    assert kinds >= {"architecture", "kernel", "load", "memory", "protocol"}
    assert kinds >= {"no-opencl", "no-device", "build", "device-memory", "work-group"}
    for kind in kinds | {"busy"}:
        made = faults.loader_error(kind, "its words", where="the board", limit_s=1.0)
        expected = {"busy": InUse, "architecture": PlatformMismatch}.get(kind, UserError)
        assert type(made) is expected
        assert "the board" in made.summary
