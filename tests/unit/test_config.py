"""Tests of the configuration: invalid values and their messages, and the hierarchy of Invoke's configuration."""

from __future__ import annotations

import dataclasses
import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from invoke import config as invoke_config

from toolchain.architecture import ARCHITECTURES
from toolchain.config import ROOT, Config, ImageConfig, defaults, load_config, split_registry, take_variables
from toolchain.errors import ConfigError


def shown(folder: Path, *, yaml: str = "", **environment: str) -> Config:
    """Return the configuration that Invoke reads in a folder."""
    (folder / "invoke.yaml").write_text(yaml)
    read: Any = invoke_config.Config(project_location=folder, lazy=True)
    read.load_collection(defaults(environment))
    read.load_project()
    return load_config(read, environment=take_variables(environment))


def fault_of(tree: dict[str, Any]) -> str:
    """Return the error of a configuration with exactly one error."""
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert len(caught.value.faults) == 1
    return caught.value.faults[0]


def test_empty_configuration_has_all_defaults() -> None:
    assert load_config({}) == Config()


def test_invokes_defaults_equal_the_defaults() -> None:
    assert load_config(defaults()) == Config()


def test_every_setting_has_a_valid_default_and_help() -> None:
    for section in dataclasses.fields(Config):
        for item in dataclasses.fields(getattr(Config(), section.name)):
            value = getattr(getattr(Config(), section.name), item.name)
            check = item.metadata["check"]
            assert check is None or check(value) == "", f"{section.name}.{item.name}"
            assert item.metadata["help"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown section, near": ({"imgae": {}}, "imgae: no such section; did you mean 'image'?"),
    "unknown section, far": ({"zzz": {}}, "zzz: no such section; valid: image, build, torch"),
    "section that is none": ({"image": "armhf"}, "image: expected a section with keys, found 'armhf'"),
    "empty section": ({"torch": None}, "torch: expected a section with keys, found None"),
    "unknown key, near": ({"image": {"suit": "trixie"}}, "image.suit: no such setting; did you mean 'suite'?"),
    "unknown key, far": ({"torch": {"zzz": 1}}, "torch.zzz: no such setting; valid: wheelhouse, required"),
    "suite": ({"image": {"suite": "trixi"}}, "did you mean 'trixie'?, found 'trixi'"),
    "suite that is far": ({"image": {"suite": 12}}, "image.suite: expected a string, found 12"),
    "flavour": ({"image": {"flavour": "ubuntu"}}, "expected one of debian, raspbian, found 'ubuntu'"),
    "architecture": ({"image": {"architecture": "armv7"}}, "expected one of armhf, arm64, amd64"),
    "package": ({"image": {"extra_packages": ["vim", "Bad Name"]}}, "'Bad Name': expected a Debian package name"),
    "packages that are not a list": ({"image": {"extra_packages": {"vim": 1}}}, "expected a list of strings"),
    "packages that are not strings": ({"image": {"extra_packages": ["vim", 1]}}, "expected a list of strings"),
    "image name": ({"image": {"name": "PiTorch"}}, "expected a lower-case repository name, found 'PiTorch'"),
    "mirror": (
        {"image": {"mirror": "deb.example"}},
        "expected a URL that begins with http://HOST, https://HOST, copy:/ or file:/, or an empty value, "
        "found 'deb.example'",
    ),
    "mirror with a space": ({"image": {"mirror": "http://a b"}}, "expected a URL that begins with http://HOST"),
    "mirror, no host": ({"image": {"mirror": "https:///debian"}}, "expected a URL that begins with http://HOST"),
    "security mirror": ({"image": {"security_mirror": "file:debian"}}, "expected a URL that begins with http://HOST"),
    "true or false": ({"image": {"strict": "maybe"}}, "image.strict: expected true or false, found 'maybe'"),
    "true or false as number": ({"image": {"strict": 2}}, "expected true or false, found 2"),
    "build folder": ({"build": {"folder": ""}}, "build.folder: expected the name of a folder, found ''"),
    "build folder, null": ({"build": {"folder": None}}, "build.folder: expected the name of a folder, found None"),
    "build folder, colon": ({"build": {"folder": "a:b"}}, "without a colon, because the engine cannot mount"),
    "jobs": ({"build": {"jobs": -1}}, "build.jobs: expected 0 to 1024, found -1"),
    "jobs, one beyond": ({"build": {"jobs": 1025}}, "expected 0 to 1024, found 1025"),
    "jobs as word": ({"build": {"jobs": "many"}}, "build.jobs: expected a number, found 'many'"),
    "half a job": ({"build": {"jobs": 1.5}}, "expected a whole number, found 1.5"),
    "jobs without end": ({"build": {"jobs": float("inf")}}, "build.jobs: expected a number, found inf"),
    "jobs as truth": ({"build": {"jobs": True}}, "expected a number, found True"),
    "memory": ({"build": {"memory_per_job_mib": 63}}, "expected 64 to 65536 MiB, found 63"),
    "wheelhouse": ({"torch": {"wheelhouse": None}}, "torch.wheelhouse: expected a list of strings, found None"),
    "registry": (
        {"registry": {"address": "http://r:5000"}},
        "expected HOST[:PORT], with at most 63 characters between dots, found 'http://r:5000'",
    ),
    "registry, none": (
        {"registry": {"address": ""}},
        "expected HOST[:PORT], with at most 63 characters between dots, found ''",
    ),
    "registry, label": (
        {"registry": {"address": "-r.example"}},
        "expected HOST[:PORT], with at most 63 characters between dots, found '-r.example'",
    ),
    "registry, IPv6": ({"registry": {"address": "[:::]:5000"}}, "expected an IPv6 address in the brackets"),
    "registry, port": ({"registry": {"address": "r.example:65536"}}, "expected a port from 1 to 65535"),
    "registry, port 0": ({"registry": {"address": "127.0.0.1:0"}}, "expected a port from 1 to 65535"),
    "registry, bare name": ({"registry": {"address": "r"}}, "expected a host with a dot or a port"),
    "address": ({"nfs": {"address": "192.168.77.256"}}, "nfs.address: expected an IPv4 address, or an empty value"),
    "host's port": ({"device": {"host": "pi@board:65536"}}, "device.host: expected a port from 1 to 65535"),
    "repository": ({"registry": {"repository": "a//b"}}, "expected a lower-case repository name"),
    "tag": ({"registry": {"tag": "-x"}}, "registry.tag: expected an image tag, or an empty value, found '-x'"),
    "subnet": ({"nfs": {"subnet": "192.168.77.300/24"}}, "nfs.subnet: expected an IPv4 subnet"),
    "subnet with host bits": ({"nfs": {"subnet": "192.168.77.1/24"}}, "with no host bits set"),
    "kept relative folder": ({"nfs": {"persistent": ["home"]}}, "'home': expected the absolute path of a folder"),
    "kept folder in memory": ({"nfs": {"persistent": ["/run/x"]}}, "'/run/x': expected the absolute path of a folder"),
    "kept folder above": ({"nfs": {"persistent": ["/home/../etc"]}}, "expected the absolute path of a folder"),
    "kept root": ({"nfs": {"persistent": ["/"]}}, "'/': expected the absolute path of a folder"),
    "kept folder with a blank": ({"nfs": {"persistent": ["/my files"]}}, "expected the absolute path of a folder"),
    "subnet without length": ({"nfs": {"subnet": "192.168.77.0"}}, "with its prefix length"),
    "host": ({"device": {"host": "pi@"}}, "expected [USER@]HOST, or an empty value"),
    "not a number of seconds": ({"device": {"boot_timeout_s": float("nan")}}, "expected 10 to 86400 s"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_state_the_expected_and_the_found_value(name: str) -> None:
    tree, words = BAD[name]
    assert words in fault_of(tree)


def test_all_errors_are_reported_at_once() -> None:
    tree = {"image": {"suite": "sid", "flavor": "debian"}, "build": {"jobs": "x"}, "zoo": {}, "nfs": 3}
    with pytest.raises(ConfigError) as caught:
        load_config(tree, environment={"INVOKE_IMAGE_SUIT": "sid"})
    assert len(caught.value.faults) == 6
    text = str(caught.value)
    assert text.startswith("the configuration has 6 errors:\n")
    for word in ("image.suite", "did you mean 'flavour'?", "build.jobs", "zoo", "nfs", "INVOKE_IMAGE_SUIT"):
        assert word in text
    assert "fix:" in text
    assert caught.value.exit_code == 11


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("build", "jobs", 0),
        ("build", "jobs", 1024),
        ("build", "native_compiler", False),
        ("build", "memory_per_job_mib", 64),
        ("nfs", "port", 65535),
        ("image", "source_date_epoch", 1),
        ("device", "boot_timeout_s", 10.0),
        ("registry", "tag", "v1.0_rc-2"),
        ("nfs", "subnet", "10.0.0.0/8"),
        ("device", "host", "pi@192.168.77.2"),
        ("device", "host", "pi@192.168.77.2:2222"),
        ("device", "host", "fe80::1"),
        ("nfs", "address", "192.168.77.1"),
        ("image", "mirror", "https://mirror.example/debian"),
        ("image", "mirror", "http://[::1]:8080"),
        ("image", "mirror", "file:/srv/debian"),
        ("image", "security_mirror", "copy:///srv/debian"),
        ("image", "strict", True),
    ],
)
def test_limits_are_valid_values(section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_config({section: {key: value}}), section), key) == value


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("r.example", ("r.example", 0)),
        ("localhost", ("localhost", 0)),
        ("r:65535", ("r", 65535)),
        ("[::1]:5000", ("::1", 5000)),
        ("[fd00::2]", ("fd00::2", 0)),
    ],
)
def test_registry_address_has_a_host_and_optional_port(address: str, parts: tuple[str, int]) -> None:
    assert split_registry(load_config({"registry": {"address": address}}).registry.address) == parts


def test_the_result_is_frozen() -> None:
    made = load_config({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.image.suite = "sid"  # type: ignore[misc]


def test_derived_paths_and_names() -> None:
    made = load_config(
        {"image": {"flavour": "raspbian", "suite": "bookworm"}, "build": {"folder": "out"}, "registry": {"tag": "t1"}}
    )
    assert made.target_root == ROOT / "out/raspbian-bookworm-armhf"
    assert made.nfsroot == made.target_root / "nfsroot"
    assert made.image_reference("dev") == "pitorch/dev:raspbian-bookworm-armhf"
    assert made.tag == "t1"
    assert load_config({}).tag == "trixie-armhf"
    assert load_config({"nfs": {"folder": "/srv/pi"}}).nfsroot == Path("/srv/pi")
    assert made.qpulib_source == ROOT / "out/sources/qpulib"
    assert load_config({"qpu": {"upstream_source": "/srv/q"}}).qpulib_source == Path("/srv/q")
    assert ImageConfig(architecture="arm64").target.oci_platform == "linux/arm64"


def test_tilde_in_any_path_is_the_callers_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SUDO_UID", raising=False)
    made = load_config(
        {
            "build": {"folder": "~/build"},
            "torch": {"wheelhouse": ["~/wheels", "wheelhouse", "a~"]},
            "qpu": {"upstream_source": "~"},
            "cuda": {"toolkit": "pypi", "python": "~/venv/bin/python"},
            "registry": {"user": "~/me"},
        },
        environment={"INVOKE_NFS_FOLDER": "~/nfs"},
    )
    assert made.build_root == tmp_path / "build"
    assert made.torch.wheelhouse == (f"{tmp_path}/wheels", "wheelhouse", "a~")
    assert made.qpulib_source == tmp_path
    assert made.nfsroot == tmp_path / "nfs"
    assert (made.cuda.toolkit, made.cuda.python) == ("pypi", f"{tmp_path}/venv/bin/python")
    assert made.registry.user == "~/me", "a user name is not a path, so ~ must not be expanded"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as under sudo")
def test_home_under_sudo_is_that_of_the_calling_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("SUDO_UID", "65534")
    home = pwd.getpwuid(65534).pw_dir
    assert load_config({"build": {"folder": "~/build"}}).build_root == Path(home, "build")
    monkeypatch.setenv("SUDO_UID", "4000000001")
    assert load_config({"build": {"folder": "~/build"}}).build_root == Path("/root/build"), (
        "expected root's home folder, because no user has this ID"
    )
    assert load_config({"build": {"folder": "~no-such-user/x"}}).build_root == ROOT / "~no-such-user/x"


def test_an_unsupported_architecture_is_reported() -> None:
    image = {"flavour": "raspbian", "architecture": "arm64"}
    with pytest.raises(ConfigError) as caught:
        load_config({"image": {**image, "suite": "sid"}, "nfs": {"port": 0}})
    assert [fault.partition(",")[0] for fault in caught.value.faults] == [
        "image.suite: expected one of trixie",
        "nfs.port: expected 1 to 65535",
        "image.architecture: Raspbian has only armhf",
    ]
    assert fault_of({"image": image}) == "image.architecture: Raspbian has only armhf, found 'arm64'"
    assert "Raspbian" not in fault_of({"image": {**image, "architecture": "armv9"}}), "only one error must be reported"
    assert load_config({"image": {**image, "architecture": "armhf"}}).image.label == "raspbian-trixie-armhf"
    for architecture in ARCHITECTURES:
        assert load_config({"image": {"architecture": architecture}}).image.architecture == architecture


@pytest.mark.parametrize(
    ("name", "expected"),
    [("pitorch", "pitorch"), ("a/b.c_d-e", "a-b-c-d-e"), (64 * "x", 50 * "x"), (49 * "x" + ".y", 49 * "x")],
)
def test_host_names_of_boards_are_valid_labels(name: str, expected: str) -> None:
    assert load_config({"image": {"name": name}}).image.host_name == expected


def test_the_distribution_has_no_torch_for_armhf() -> None:
    torch = {"source": "distribution"}
    assert fault_of({"torch": torch}) == (
        "torch.source: the distribution has no python3-torch for armhf, found 'distribution'"
    )
    assert load_config({"torch": torch, "image": {"architecture": "arm64"}}).torch.source == "distribution"


def test_list_of_options_is_not_split() -> None:
    """Options may contain spaces and commas, although the value of an environment variable is split at commas."""
    whole = ("A=-O1 -Wl,--as-needed", "B=", "C=x=y ")
    assert load_config({"torch": {"options": ["D=1"]}}, options={"torch.options": [*whole]}).torch.options == whole
    assert load_config({"torch": {"options": ["D=1"]}}, options={"torch.options": []}).torch.options == ("D=1",)
    assert load_config({"torch": {"options": [*whole]}}).torch.options == whole
    assert load_config({}, environment={"INVOKE_TORCH_OPTIONS": "A=1 2,B=3"}).torch.options == ("A=1 2", "B=3")
    for wrong in ("A", "=1", "", "A B=1", "A=1\nB=2"):
        with pytest.raises(ConfigError, match="expected NAME=VALUE, such as USE_OPENMP=OFF"):
            load_config({}, options={"torch.options": [*whole, wrong]})


def test_options_take_precedence_unless_empty() -> None:
    tree = {"qpu": {"library": "local", "upstream_mode": "qpu"}}
    assert load_config(tree, options={"qpu.library": "upstream"}).qpu.library == "upstream"
    assert load_config(tree, options={"qpu.library": "upstream"}).qpu.upstream_mode == "qpu"
    assert load_config(tree, options={"qpu.library": ""}).qpu.library == "local"
    assert load_config({}, options={"qpu.library": "upstream"}).qpu.library == "upstream"
    with pytest.raises(ConfigError, match="did you mean 'upstream'"):
        load_config(tree, options={"qpu.library": "up-stream"})


def test_variables_that_name_no_setting_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, environment={"INVOKE_IMAGE_SUTE": "bookworm", "INVOKE_@": "1"})
    assert caught.value.faults == (
        "INVOKE_@: no such setting",
        "INVOKE_IMAGE_SUTE: no such setting; did you mean 'INVOKE_IMAGE_SUITE'?",
    )


def test_variables_except_those_of_invoke_are_removed() -> None:
    own = {"INVOKE_RUN_ECHO": "1", "INVOKE_RUNTIME_CONFIG": "x.yaml", "INVOKE_DEBUG": "1", "HOME": "/"}
    ours = {"INVOKE_IMAGE_SUITE": "bookworm", "INVOKE_NONSENSE": "1"}
    environment = own | ours
    assert take_variables(environment) == ours
    assert environment == own


def test_a_variable_of_an_invalid_section_is_reported() -> None:
    with pytest.raises(ConfigError, match="image: expected a section with keys"):
        load_config({"image": 3}, environment={"INVOKE_IMAGE_SUITE": "trixie"})


def test_invoke_yaml_reaches_the_configuration(tmp_path: Path) -> None:
    made = shown(
        tmp_path,
        yaml="image:\n  suite: bookworm\n  strict: true\n  extra_packages: [vim, htop]\nbuild:\n  jobs: 3\n"
        "device:\n  boot_timeout_s: 30\n",
    )
    assert made.image.suite == "bookworm"
    assert made.image.strict is True
    assert made.image.extra_packages == ("vim", "htop")
    assert made.build.jobs == 3
    assert made.device.boot_timeout_s == 30.0
    assert made.image.flavour == "debian"


def test_variables_override_invoke_yaml(tmp_path: Path) -> None:
    made = shown(
        tmp_path,
        yaml="image:\n  suite: bookworm\n  strict: true\n  extra_packages: [nano]\nbuild:\n  jobs: 3\n",
        INVOKE_IMAGE_SUITE="trixie",
        INVOKE_IMAGE_STRICT="false",
        INVOKE_IMAGE_EXTRA_PACKAGES="vim, htop,",
        INVOKE_BUILD_JOBS="0",
        INVOKE_BUILD_NATIVE_COMPILER="no",
        INVOKE_TORCH_WHEELHOUSE="/a,/b",
        INVOKE_DEVICE_BOOT_TIMEOUT_S="12.5",
    )
    assert made.image.suite == "trixie"
    assert made.image.strict is False
    assert made.image.extra_packages == ("vim", "htop")
    assert made.build.jobs == 0
    assert made.build.native_compiler is False
    assert made.torch.wheelhouse == ("/a", "/b")
    assert made.device.boot_timeout_s == 12.5


def test_the_time_stamp_of_other_build_tools_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """reproducible-builds.org specifies the variable; the project's own setting has priority."""
    variable = {"SOURCE_DATE_EPOCH": "1700000000"}
    assert shown(tmp_path, **variable).image.source_date_epoch == 1700000000
    assert shown(tmp_path, SOURCE_DATE_EPOCH="").image.source_date_epoch == ImageConfig().source_date_epoch
    ours = {**variable, "INVOKE_IMAGE_SOURCE_DATE_EPOCH": "1600000000"}
    assert shown(tmp_path, **ours).image.source_date_epoch == 1600000000
    for value in ("yesterday", "0"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
        with pytest.raises(ConfigError, match=f"found '{value}' in SOURCE_DATE_EPOCH"):
            shown(tmp_path, SOURCE_DATE_EPOCH=value)
    yaml = "image:\n  source_date_epoch: 1500000000\n"
    assert shown(tmp_path, yaml=yaml, **variable).image.source_date_epoch == 1500000000


# ------------------------------------------------------------------------------------------------ invalid paths

PATHS = ["build.folder", "torch.wheelhouse", "qpu.upstream_source", "nfs.folder", "remote.linker", "cuda.toolkit"]
FOLDERS = ["build.folder", "torch.wheelhouse", "qpu.upstream_source", "nfs.folder"]


def path_fault_of(name: str, path: str) -> str:
    """Return the error for a setting whose value is this path, or an empty string if the path is accepted."""
    section, _, key = name.partition(".")
    try:
        load_config({section: {key: [path] if key == "wheelhouse" else path}})
    except ConfigError as refused:
        (fault,) = refused.faults
        return fault.removeprefix(f"{name}: ")
    return ""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("n" * 256, "expected a path whose parts have at most 255 bytes each"),
        ("folder/" + "é" * 128, "expected a path whose parts have at most 255 bytes each"),
        ("/".join(["folder"] * 700), "expected a path of at most 4095 bytes"),
        ("a\0b", "expected a path without a NUL character"),
        ("caf\udce9", "expected a path in UTF-8"),
        ("FOLDER/latin-1/below", "expected a path in UTF-8"),
        ("/dev/null/below", "expected a path below a folder, and /dev/null is not a folder"),
        ("FOLDER/file/below/it", "expected a path below a folder, and FOLDER/file is not a folder"),
        ("FOLDER/link/below", "expected a path below a folder, and FOLDER/file is not a folder"),
        ("FOLDER/loop/below", "expected a path that can be resolved"),
        ("/proc/nothing/here", "expected a path outside /proc and /sys"),
        ("/sys/../sys/nothing", "expected a path outside /proc and /sys"),
    ],
)
@pytest.mark.parametrize("name", PATHS)
def test_values_that_cannot_be_paths_are_refused(tmp_path: Path, name: str, path: str, said: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latin-1").symlink_to("caf\udce9")
    folder = str(tmp_path)
    assert path_fault_of(name, path.replace("FOLDER", folder)).startswith(said.replace("FOLDER", folder))


def test_a_path_in_a_home_that_is_a_file_keeps_its_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SUDO_UID", raising=False)
    said = f"expected a path below a folder, and {home} is not a folder, found '~/tree'"
    assert path_fault_of("nfs.folder", "~/tree") == said


@pytest.mark.parametrize("path", ["/dev/null", "FOLDER/file", "FOLDER/dangling"])
@pytest.mark.parametrize("name", FOLDERS)
def test_file_in_place_of_a_folder_is_refused(tmp_path: Path, name: str, path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    given = path.replace("FOLDER", str(tmp_path))
    assert path_fault_of(name, given) in (
        f"expected a folder, found {given!r}",
        f"expected a folder, found {[given]!r}",
    )


@pytest.mark.parametrize("name", PATHS)
def test_new_paths_and_paths_of_maximum_length_are_valid(tmp_path: Path, name: str) -> None:
    for path in ("n" * 255, str(tmp_path / "new" / "folder"), "", str(tmp_path), "../other"):
        assert path_fault_of(name, path) == "" or (name, path) == ("build.folder", "")


def test_a_tree_that_is_the_root_of_this_machine_is_refused() -> None:
    for path in ("/", "/usr/..", "//"):
        assert path_fault_of("nfs.folder", path).startswith("expected a folder below /, not / itself")


def test_a_long_value_is_shown_in_part() -> None:
    assert len(path_fault_of("build.folder", "n" * 100_000)) < 300
