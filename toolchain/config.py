"""Read the configuration from Invoke's configuration hierarchy, and validate it once; it is immutable from then on.

One dataclass per section of invoke.yaml defines each setting's type, default and help text. The INVOKE_* variables, the
documentation tables and the messages are derived from these definitions. All errors are reported at once. For an
unknown key, the nearest valid name is suggested.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain import caller, lab_boards
from toolchain.architecture import ARCHITECTURES, Architecture
from toolchain.errors import ConfigError
from toolchain.files import absolute, path_fault

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

_SHOWN = 160

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
"""The variable from which build tools read time stamps (https://reproducible-builds.org/specs/source-date-epoch/)."""

Check = Callable[[Any], str]
"""A function that returns the error in a value, or an empty string."""


def _setting(
    default: Any, help_text: str, check: Check | None = None, *, is_path: bool = False, is_folder: bool = False
) -> Any:
    metadata = {"help": help_text, "check": check, "is_path": is_path or is_folder, "is_folder": is_folder}
    if isinstance(default, list):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _one_of(*choices: str) -> Check:
    def check(value: Any) -> str:
        if value in choices:
            return ""
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        return f"expected one of {', '.join(choices)}" + (f"; did you mean {near[0]!r}?" if near else "")

    return check


def _matches(pattern: str, what: str) -> Check:
    return lambda value: "" if re.fullmatch(pattern, value) else f"expected {what}"


def _between(low: float, high: float, unit: str = "") -> Check:
    return lambda value: "" if low <= value <= high else f"expected {low} to {high}{' ' + unit if unit else ''}"


_package = _matches(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?", "a Debian package name")
_url = _matches(
    r"https?://[^/\s]\S*|(?:copy|file):/\S+|",
    "a URL that begins with http://HOST, https://HOST, copy:/ or file:/, or an empty value",
)
_name = _matches(r"[a-z0-9]+(?:[._/-][a-z0-9]+)*", "a lower-case repository name")
_tag = _matches(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|", "an image tag, or an empty value")
_BAD_PORT = "expected a port from 1 to 65535"


def _host(value: Any) -> str:
    if not re.fullmatch(r"(?:[A-Za-z0-9_.-]+@)?[A-Za-z0-9_.:\[\]-]+|", value):
        return "expected [USER@]HOST, or an empty value"
    port = re.search(r"(?:^[^:]*|\]):(\d+)$", value)  # an IPv6 address without brackets has no port
    return _BAD_PORT if port and not 0 < int(port[1]) < 65536 else ""


def _coordinator(value: Any) -> str:
    found = re.fullmatch(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})|", value)
    if found is None:
        return "expected HOST:PORT, or an empty value"
    return _BAD_PORT if value and not 0 < int(found[1]) < 65536 else ""


def _subnet(value: Any) -> str:
    try:
        ipaddress.IPv4Network(value)
    except ValueError:
        return "expected an IPv4 subnet in the form 192.168.77.0/24, with no host bits set"
    return "" if "/" in value else "expected an IPv4 subnet with its prefix length"


def _folder(value: Any) -> str:
    if not value.parts:
        return "expected the name of a folder"
    path = str(ROOT / value)
    return f"expected a path without a colon, because the engine cannot mount {path}" if ":" in path else ""


def _tree(value: Any) -> str:
    return "expected a folder below /, not / itself" if value and absolute(ROOT / value) == Path("/") else ""


def _place(value: str | Path, *, is_folder: bool) -> str:
    """Check a path relative to the checkout; an empty path is valid. Return the error as text, or an empty string."""
    if value in ("", Path()):
        return ""
    path = ROOT / value
    if fault := path_fault(path):
        return fault
    return "expected a folder" if is_folder and os.path.lexists(path) and not os.path.isdir(path) else ""  # noqa: PTH112 (Path.is_dir raises without permission)


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # at most 63 characters (RFC 1035)
_REGISTRY = re.compile(rf"({_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::(\d{{1,5}}))?")


def split_registry(address: str) -> tuple[str, int]:
    """Split a registry's ``HOST[:PORT]`` into the host and the port.

    An IPv6 address is returned without its brackets. The port is 0 if it is missing. Raises ValueError, whose message
    states the expected form.
    """
    found = _REGISTRY.fullmatch(address)
    if found is None:
        raise ValueError("expected HOST[:PORT], with at most 63 characters between dots")
    if found[2] and not 0 < int(found[2]) < 65536:
        raise ValueError(_BAD_PORT)
    host, port = found[1], int(found[2] or 0)
    # If the first component is not "localhost" and has no dot or colon, the engine interprets it as a name on Docker
    # Hub.
    if not port and "." not in host and host != "localhost" and not host.startswith("["):
        raise ValueError("expected a host with a dot or a port; an engine would look for this name on Docker Hub")
    if host.startswith("["):
        host = host.strip("[]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError("expected an IPv6 address in the brackets") from None
    return host, port


def _hostport(value: Any) -> str:
    try:
        split_registry(value)
    except ValueError as fault:
        return str(fault)
    return ""


def _address(value: Any) -> str:
    try:
        ipaddress.IPv4Address(value or "0.0.0.0")  # noqa: S104 (compared, not listened on)
    except ValueError:
        return "expected an IPv4 address, or an empty value"
    return ""


_host_name = _matches(
    r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?|", "a host name of lower-case letters, digits and hyphens, or an empty value"
)
_user = _matches(r"[a-z_][a-z0-9_-]{0,31}|", "a user name of lower-case letters, digits, - and _, or an empty value")
_password_hash = _matches(
    r"\$(?:5|6|y|2b)\$[A-Za-z0-9./$=,]+|", "a hash that begins with $6$, $5$, $y$ or $2b$, or an empty value"
)
_public_key = _matches(
    r"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-\S+ [A-Za-z0-9+/=]+(?: [^\n]*)?", "a public key in the format of authorized_keys"
)
_wifi_psk = _matches(r"[0-9a-f]{64}|", "64 hexadecimal digits from wpa_passphrase, or an empty value")
_country = _matches(r"[A-Z]{2}|", "a country code of two letters, such as GB, or an empty value")
_locale = _matches(r"[a-z]{2,3}_[A-Z]{2}\.UTF-8|C\.UTF-8|", "LANGUAGE_COUNTRY.UTF-8, or an empty value")
_kept_folder = _matches(
    r"(?!/(?:dev|proc|run|sys|tmp)(?:/|$))(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.-]+)+",
    "the absolute path of a folder, such as /home, without spaces and outside /dev, /proc, /run, /sys and /tmp",
)
_option = _matches(r"[A-Za-z_][A-Za-z0-9_]*=.*", "NAME=VALUE, such as USE_OPENMP=OFF")


_device = _matches(r"[A-Za-z0-9_.-]+=\S+", "NAME=ADDRESS")


def _each(check: Check) -> Check:
    return lambda values: "; ".join(f"{value!r}: {fault}" for value in values if (fault := check(value)))


def _gpu_architectures(values: tuple[str, ...]) -> str:
    """Check a list of GPU architectures. Return the error as text, or an empty string for a valid list."""
    if not values:
        return "expected at least one architecture, such as 90+PTX"
    names = [value.removesuffix("+PTX") for value in values]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"expected each architecture once, found {', '.join(twice)} more than once"
    return _each(_matches(r"\d{2,3}[af]?(?:\+PTX)?", "a compute capability without its point, such as 90 or 90+PTX"))(
        values
    )


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """The system image: section ``image``."""

    flavour: str = _setting("debian", "distribution, defined in images/flavours/", _one_of("debian", "raspbian"))
    suite: str = _setting("trixie", "the distribution's release", _one_of("trixie", "bookworm"))
    architecture: str = _setting("armhf", "Debian's name for the target architecture", _one_of(*ARCHITECTURES))
    profile: str = _setting(
        "bootable", "bootable (with systemd and a kernel) or container", _one_of("bootable", "container")
    )
    kernel: str = _setting(
        "distribution", "origin of the bootable profile's kernel", _one_of("distribution", "raspberrypi")
    )
    extra_packages: tuple[str, ...] = _setting(
        [], "additional packages for the root filesystem and the development image", _each(_package)
    )
    companions: bool = _setting(True, "install torchvision and torchaudio, built against the torch wheel, and Pillow")
    ml_packages: bool = _setting(
        False, "install the distribution's onnxruntime, OpenCV, SciPy, pandas, scikit-learn, Pillow and Matplotlib"
    )
    card: bool = _setting(
        False, "install packages for card images: cloud-init, growpart, a DHCP client, wpa_supplicant and sudo"
    )
    documentation: bool = _setting(False, "install packages with their documentation, translations and tests")
    name: str = _setting(
        "pitorch", "first part of all image names; its first 50 characters are the boards' host name", _name
    )
    mirror: str = _setting("", "apt mirror; empty: the mirror that this host's apt uses", _url)
    security_mirror: str = _setting("", "mirror for the security pocket; empty: the same as image.mirror", _url)
    strict: bool = _setting(False, "if a mirror pocket cannot be verified, report an error instead of a warning")
    source_date_epoch: int = _setting(
        1735689600,
        f"newest time stamp in images, in Unix seconds; unset: the value of {EPOCH_VARIABLE}, if that is set",
        _between(1, 4102444800),
    )

    @property
    def target(self) -> Architecture:
        """The target architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def release(self) -> str:
        """The release's name: ``SUITE``, or ``FLAVOUR-SUITE`` for a flavour other than the default."""
        return self.suite if self.flavour == "debian" else f"{self.flavour}-{self.suite}"

    @property
    def label(self) -> str:
        """The target's name: ``SUITE-ARCH``, or ``FLAVOUR-SUITE-ARCH`` for a flavour other than the default."""
        return f"{self.release}-{self.architecture}"

    @property
    def host_name(self) -> str:
        """The host name of boards: ``name`` with hyphens as separators, shortened to 50 characters.

        A host name has at most 63 characters, and a board with ``nfs.overlay`` adds a hyphen and up to 12 digits.
        """
        return re.sub(r"[._/]", "-", self.name)[:50].rstrip("-")


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Folders and resources of builds: section ``build``."""

    folder: Path = _setting(
        Path("build"), "folder for products, stamps and logs, relative to the checkout", _folder, is_folder=True
    )
    jobs: int = _setting(
        0,
        "number of parallel compiler processes; 0: determined from cores, free memory and cgroup limits",
        _between(0, 1024),
    )
    memory_per_job_mib: int = _setting(
        1500, "memory to allow for each compiler process if build.jobs is 0", _between(64, 65536, "MiB")
    )
    native_compiler: bool = _setting(True, "use a native cross compiler inside emulated containers")


@dataclass(frozen=True, kw_only=True)
class TorchConfig:
    """The origin of the torch wheel: section ``torch``."""

    wheelhouse: tuple[str, ...] = _setting(
        ["wheelhouse"], "folders that are searched for wheels, in this order", is_folder=True
    )
    required: bool = _setting(False, "report a missing torch wheel as an error instead of a warning")
    from_source: bool = _setting(False, "build the wheel from source first, and use it")
    source: str = _setting(
        "archive",
        "source that build-torch builds: the distribution's source package (archive) or upstream's Git tag (git); the "
        "other values restrict the search for torch to the pinned wheel (pypi), python3-torch (distribution) or the "
        "wheelhouse (wheelhouse)",
        _one_of("archive", "git", "pypi", "distribution", "wheelhouse"),
    )
    variant: str = _setting("neon", "the CPU that the wheel is for: a variant in recipes/torch/recipe.toml", _name)
    options: tuple[str, ...] = _setting(
        [], "CMake options NAME=VALUE that override the recipe's options", _each(_option)
    )


@dataclass(frozen=True, kw_only=True)
class QpuConfig:
    """The QPU library: section ``qpu``. Settings that begin with ``upstream`` apply only to ``library: upstream``."""

    library: str = _setting("local", "QPU library: libqpu (local) or QPULib (upstream)", _one_of("local", "upstream"))
    upstream_mode: str = _setting("emulation", "mode for which QPULib is compiled", _one_of("emulation", "qpu"))
    upstream_debug: bool = _setting(False, "compile QPULib with its DEBUG option")
    upstream_source: str = _setting(
        "", "checkout of QPULib; empty: fetch it into sources/qpulib in the build folder", is_folder=True
    )


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """The image registry: section ``registry``."""

    address: str = _setting("127.0.0.1:5000", "HOST[:PORT] of the registry", _hostport)
    namespace: str = _setting("pitorch", "namespace (project) in the registry", _name)
    repository: str = _setting("system", "repository in the namespace", _name)
    artefacts: str = _setting("artefacts", "repository for finished wheels in the namespace", _name)
    tag: str = _setting("", "tag; empty: the image's suite and architecture", _tag)
    user: str = _setting("", "user name; empty: the name in Docker's credential store")
    signing_key: str = _setting("", "private key for push --sign, a PEM file (ECDSA, P-256)", is_path=True)
    public_key: str = _setting("", "public key for verify and pull --verify, a PEM file", is_path=True)


@dataclass(frozen=True, kw_only=True)
class NfsConfig:
    """The exported root filesystem and its server: section ``nfs``."""

    folder: str = _setting(
        "",
        "folder that contains the exported tree (tree/), accessible only to root; empty: nfsroot/ in the build folder",
        _tree,
        is_folder=True,
    )
    address: str = _setting(
        "", "address at which boards reach this PC; empty: determined from the route to the board", _address
    )
    port: int = _setting(2049, "TCP port of the user-space NFS server", _between(1, 65535))
    subnet: str = _setting("192.168.77.0/24", "subnet of the boards (for NFS exports and NAT)", _subnet)
    overlay: bool = _setting(
        False, "boards mount the tree read-only and keep changes in memory, so that many boards can share one tree"
    )
    persistent: tuple[str, ...] = _setting(
        [], "with overlay: folders of which this PC stores a separate copy for each board", _each(_kept_folder)
    )


@dataclass(frozen=True, kw_only=True)
class SdConfig:
    """The card image and its first boot: section ``sd``. Raspberry Pi Imager overrides the first-boot settings."""

    hostname: str = _setting("", "host name; empty: determined from image.name", _host_name)
    user: str = _setting("", "user that the first boot creates, with permission to use sudo; empty: none", _user)
    password_hash: str = _setting(
        "", "hash of the user's password, from openssl passwd -6; empty: no login with a password", _password_hash
    )
    ssh_keys: tuple[str, ...] = _setting([], "the user's public SSH keys", _each(_public_key))
    locale: str = _setting("", "locale that the first boot generates, such as en_GB.UTF-8", _locale)
    wifi_name: str = _setting("", "name (SSID) of the wireless network that the board uses; empty: none")
    wifi_psk: str = _setting(
        "", "key of the wireless network, which wpa_passphrase prints as psk; empty: an open network", _wifi_psk
    )
    wifi_country: str = _setting("", "country whose radio regulations apply, such as GB", _country)
    url: str = _setting("", "URL of the folder in which the image is published, for Raspberry Pi Imager", _url)


@dataclass(frozen=True, kw_only=True)
class WheelsConfig:
    """The package index for the board's pip: section ``wheels``."""

    address: str = _setting(
        "", "address on which the index listens; empty: the address at which boards reach this PC", _address
    )
    port: int = _setting(8080, "TCP port of the index", _between(1, 65535))


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The board or virtual machine that runs the device suite: section ``device``."""

    host: str = _setting("", "[USER@]HOST of a real Pi; empty: use QEMU", _host)
    init: str = _setting(
        "lean", "init system of the virtual machine: lean (sshd only) or systemd", _one_of("lean", "systemd")
    )
    cpu: str = _setting(
        "",
        "CPU of the virtual machine; empty: cortex-a7 for armhf, cortex-a53 for arm64",
        _matches(r"[a-z0-9-]*", "QEMU's name for a CPU, such as cortex-a72"),
    )
    memory_mib: int = _setting(1024, "memory of the virtual machine", _between(256, 3072, "MiB"))
    cpus: int = _setting(2, "number of CPUs of the virtual machine", _between(1, 4))
    boot_timeout_s: float = _setting(
        900.0,
        "maximum time until the SSH server responds; at most 300 s if the board is not switched on for the run",
        _between(10, 86400, "s"),
    )


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """Boards that a team shares through labgrid's coordinator: section ``lab``."""

    coordinator: str = _setting(
        "",
        "HOST:PORT of labgrid's coordinator, which lab up starts if it is on this PC; empty: 127.0.0.1:20408",
        _coordinator,
    )
    boards: tuple[str, ...] = _setting(
        [],
        "this PC's boards, one string each: NAME=ADDRESS TAG=VALUE … power=… serial=… card=…; ADDRESS is qemu or "
        "[USER@]HOST[:PORT] (docs/lab.md)",
        lab_boards.check,
    )
    queue_limit_s: float = _setting(600.0, "maximum time to wait for a board that is in use", _between(1, 86400, "s"))


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """Boards for kernel profiling: section ``remote``."""

    devices: tuple[str, ...] = _setting(
        [], "boards as NAME=ADDRESS, for example pi3=tracker://HOST:9190/KEY", _each(_device)
    )
    linker: str = _setting("", "program that links kernels for the target; empty: GNU-TRIPLET-g++", is_path=True)
    server_in_image: bool = _setting(False, "include TVM's RPC server in the image (only arm64 and amd64)")
    ffi_in_image: bool = _setting(
        False, "include the apache-tvm-ffi wheel from build-tvm-ffi in the image (only armhf with trixie)"
    )
    queue_limit_s: float = _setting(60.0, "maximum time to wait for a busy board", _between(1, 86400, "s"))
    session_limit_s: float = _setting(120.0, "maximum duration of a session with a board", _between(1, 86400, "s"))


@dataclass(frozen=True, kw_only=True)
class CudaConfig:
    """The wheel with CUDA operators: section ``cuda``."""

    architectures: tuple[str, ...] = _setting(
        ["75", "80", "86", "90+PTX"],
        "GPU architectures for which the wheel has machine code; +PTX: also code that drivers compile for later GPUs",
        _gpu_architectures,
    )
    toolkit: str = _setting(
        "",
        "folder of a CUDA toolkit, or pypi; empty: the system's toolkit if it is the pinned release, else PyPI's",
        is_path=True,
    )
    python: str = _setting(
        "",
        "Python with torch for cuda-timing: a path, or a program on PATH such as python3.11; empty: the interpreter "
        "that tested the wheel on this PC",
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The validated configuration."""

    image: ImageConfig = field(default_factory=ImageConfig)
    build: BuildConfig = field(default_factory=BuildConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    qpu: QpuConfig = field(default_factory=QpuConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    nfs: NfsConfig = field(default_factory=NfsConfig)
    sd: SdConfig = field(default_factory=SdConfig)
    wheels: WheelsConfig = field(default_factory=WheelsConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    lab: LabConfig = field(default_factory=LabConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    cuda: CudaConfig = field(default_factory=CudaConfig)

    @property
    def build_root(self) -> Path:
        """The absolute path of the build folder."""
        return ROOT / self.build.folder

    @property
    def target_root(self) -> Path:
        """The folder with the products for the configured suite and architecture."""
        return self.build_root / self.image.label

    @property
    def nfsroot(self) -> Path:
        """The folder of the exported tree, with symbolic links resolved, because boards use this path."""
        return absolute(ROOT / self.nfs.folder if self.nfs.folder else self.target_root / "nfsroot")

    @property
    def qpulib_source(self) -> Path:
        """The folder with the checkout of upstream's QPULib."""
        return ROOT / self.qpu.upstream_source if self.qpu.upstream_source else self.build_root / "sources" / "qpulib"

    @property
    def tag(self) -> str:
        """The tag of an image, both locally and in the registry."""
        return self.registry.tag or self.image.label

    def image_reference(self, role: str) -> str:
        """Return the local name of the image for a role, such as rootfs, dev, builder or system."""
        return f"{self.image.name}/{role}:{self.image.label}"


SECTIONS = {item.name: typing.get_type_hints(Config)[item.name] for item in dataclasses.fields(Config)}

_INVOKE_KEYS = frozenset({"run", "runners", "sudo", "tasks", "timeouts", "debug", "load_runtime", "runtime_path"})


_VARIABLES = {
    f"INVOKE_{section}_{item.name}".upper(): f"{section}.{item.name}"
    for section, kind in SECTIONS.items()
    for item in dataclasses.fields(kind)
}

_BARE_VARIABLES = [name.removeprefix("INVOKE_") for name in _VARIABLES]


def take_variables(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the INVOKE_* variables, except Invoke's own, from an environment, and return them.

    Invoke would convert each variable to the type of the value in invoke.yaml. It would interpret ``false`` as true and
    ignore unknown names. It would raise an exception for a word in place of a number, or for text in place of a list.
    ``load_config`` therefore validates the variables.
    """
    own = tuple(f"INVOKE_{key}".upper() for key in _INVOKE_KEYS)
    names = [name for name in environment if name.startswith("INVOKE_") and not name.startswith(own)]
    return {name: environment.pop(name) for name in names}


def defaults(environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the tree of defaults for Invoke, with lists as comma-separated text.

    SOURCE_DATE_EPOCH in ``environment`` is the default of ``image.source_date_epoch``.
    """
    tree: dict[str, dict[str, Any]] = {}
    for name, section in SECTIONS.items():
        made = section()
        values = {item.name: getattr(made, item.name) for item in dataclasses.fields(section)}
        tree[name] = {
            key: ",".join(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            for key, value in values.items()
        }
    if epoch := (environment or {}).get(EPOCH_VARIABLE):
        tree["image"]["source_date_epoch"] = epoch
    return tree


def load_config(
    tree: Mapping[str, Any],
    *,
    options: Mapping[str, str | Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    named: Mapping[str, Any] | None = None,
) -> Config:
    """Validate a tree of settings (Invoke's merged configuration or a plain dict), and return the configuration.

    ``environment`` contains the INVOKE_* variables (see ``take_variables``). The variables override the tree, except
    for the settings in ``named``, which come from the --config file. ``options`` contains settings from the command
    line, such as ``{"qpu.library": "upstream"}``. Options override the tree and the variables; empty options are
    ignored. If a setting is a list, the variable's text is split at commas; a list in ``options`` is used unchanged.
    Raises ConfigError with all errors, including variables that do not name a setting.
    """
    faults: list[str] = []
    stronger = {
        f"{section}.{key}" for section, keys in (named or {}).items() if isinstance(keys, Mapping) for key in keys
    }
    given_names: dict[str, str | Sequence[str]] = {}
    for name, text in sorted((environment or {}).items()):
        if name in _VARIABLES:
            if _VARIABLES[name] not in stronger:
                given_names[_VARIABLES[name]] = text
        else:
            near = difflib.get_close_matches(name.removeprefix("INVOKE_"), _BARE_VARIABLES, n=1, cutoff=0.5)
            faults.append(f"{name}: no such setting" + (f"; did you mean 'INVOKE_{near[0]}'?" if near else ""))
    given_names |= {name: value for name, value in (options or {}).items() if value}
    tree = _overlaid(tree, given_names)
    sections: dict[str, Any] = {}
    for key in tree:
        if key not in SECTIONS and key not in _INVOKE_KEYS:
            faults.append(f"{key}: no such section{_nearest(key, SECTIONS)}")
    for name, section in SECTIONS.items():
        given = tree.get(name, {})
        if not isinstance(given, Mapping) and not hasattr(given, "keys"):
            faults.append(f"{name}: expected a section with keys, found {given!r}")
            continue
        sections[name] = _load_section(name, section, given, faults)
    if "image" in sections and not any(fault.startswith(("image.flavour:", "image.architecture:")) for fault in faults):
        faults += _of_flavour(sections["image"])
    if not faults and (sections["torch"].source, sections["image"].architecture) == ("distribution", "armhf"):
        faults.append("torch.source: the distribution has no python3-torch for armhf, found 'distribution'")
    if faults:
        raise ConfigError([_with_its_variable(fault) for fault in faults])
    return Config(**sections)


def _with_its_variable(fault: str) -> str:
    """Return an error message; if the invalid value comes from SOURCE_DATE_EPOCH, add the name of this variable."""
    value = os.environ.get(EPOCH_VARIABLE)
    from_variable = fault.startswith("image.source_date_epoch:") and value and fault.endswith(f"found {value!r}")
    return f"{fault} in {EPOCH_VARIABLE}" if from_variable else fault


def _of_flavour(image: ImageConfig) -> list[str]:
    """Return a list with the error if the flavour's archive lacks the architecture, otherwise an empty list."""
    flavour = tomllib.loads((ROOT / "images" / "flavours" / f"{image.flavour}.toml").read_text())
    offered = flavour.get("architectures", [image.architecture])
    if image.architecture in offered:
        return []
    return [f"image.architecture: {flavour['title']} has only {', '.join(offered)}, found {image.architecture!r}"]


def _overlaid(tree: Mapping[str, Any], settings: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
    """Return a copy of the tree in which the settings (``section.key``) are replaced.

    Invalid sections are reported later.
    """
    merged = {key: tree[key] for key in tree}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        given = merged.get(section, {})
        if hasattr(given, "keys"):
            merged[section] = {**{known: given[known] for known in given}, key: value}
    return merged


def _load_section(name: str, section: Any, given: Mapping[str, Any], faults: list[str]) -> Any:
    hints = typing.get_type_hints(section)
    fields = {item.name: item for item in dataclasses.fields(section)}
    values: dict[str, Any] = {}
    for key in given:
        if key not in fields:
            faults.append(f"{name}.{key}: no such setting{_nearest(key, fields)}")
            continue
        raw = given[key]
        try:
            value = _convert(raw, hints[key])
        except ValueError as fault:
            faults.append(f"{name}.{key}: {fault}, found {_shortened(raw)}")
            continue
        metadata = fields[key].metadata
        wrong = ""
        if metadata["is_path"]:
            value = _expanded(value)
            places = value if isinstance(value, tuple) else (value,)
            wrong = next(filter(None, (_place(item, is_folder=metadata["is_folder"]) for item in places)), "")
        if wrong := wrong or (metadata["check"](value) if metadata["check"] is not None else ""):
            faults.append(f"{name}.{key}: {wrong}, found {_shortened(raw)}")
            continue
        values[key] = value
    return section(**values)


def _shortened(raw: Any) -> str:
    """Return a value's representation, shortened to one line."""
    text = repr(raw)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]} ({len(text)} characters)"


def _expanded(value: Any) -> Any:
    """Return a path, or a tuple of paths, with ``~`` expanded to the caller's home."""
    if isinstance(value, tuple):
        return tuple(caller.expanded(item) for item in value)
    return type(value)(caller.expanded(os.fspath(value))) if isinstance(value, Path) else caller.expanded(value)


def _nearest(key: str, valid: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(valid)}"


def _convert(raw: Any, wanted: Any) -> Any:
    """Convert a YAML value or a variable's text to the setting's type.

    Raises ValueError, whose message states the expected form.
    """
    if isinstance(wanted, types.GenericAlias):
        if isinstance(raw, str):
            raw = [part.strip() for part in raw.split(",") if part.strip()]
        if not isinstance(raw, (list, tuple)) or not all(isinstance(item, str) for item in raw):
            raise ValueError("expected a list of strings")
        return tuple(raw)
    if wanted is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() in words and isinstance(raw, (str, int)):
            return words[str(raw).lower()]
        raise ValueError("expected true or false")
    if wanted in (int, float):
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ValueError("expected a number")
        try:
            number = wanted(raw)
        except (ValueError, OverflowError):
            raise ValueError("expected a number") from None
        if wanted is int and isinstance(raw, float) and raw != number:
            raise ValueError("expected a whole number")
        return number
    if raw is None:
        return wanted("") if wanted is str else wanted()
    if not isinstance(raw, (str, os.PathLike)):
        raise ValueError("expected a string")
    return wanted(raw)
