"""Find the apt mirror and verify its pockets.

If the signed index of a mirror names files that the mirror does not have, apt rejects the mirror. Each pocket is
therefore checked separately with the command that every later step runs: a native ``apt-get update`` for the required
architectures in private directories. If the command fails, the pocket is tried under its other name (``stable`` for
``trixie``), provided that the index there is for the same release. If the update fails under both names, the pocket is
omitted. If a pocket was verified only under its other name, or was omitted, a warning is added to the image's manifest;
with ``image.strict``, an error is raised instead. The main pocket cannot be omitted.

The verified package lists are stored, and later steps use them for installation. All roots of a build therefore use the
same state of the mirror until ``build-image --update`` reads the indices again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import re
import shlex
import shutil
import tempfile
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from engine.proxies import SOCKS_FIX, SOCKS_MISSING, build_environment
from images.flavour import Flavour, Pocket, SigningKey, kernel_archive, load_flavour, target_flavour
from toolchain import files
from toolchain.architecture import host_architecture
from toolchain.config import Config, ImageConfig
from toolchain.errors import (
    CommandFailed,
    CommandTimedOut,
    ConfigError,
    MirrorPocketUnusable,
    NetworkUnreachable,
    SourceUnavailable,
)
from toolchain.process import output_of, run

_UPDATE_LIMIT_S = 300.0
_DOWNLOADER = "/usr/lib/apt/apt-helper"
_LISTS = "the mirror's package lists"
_LEAST_ROOM = 1 << 16
"""A limit in bytes. If less space was free when apt failed, the disk is considered full, whatever apt reports."""
_FIELD = re.compile(r"^(Codename|Date|Origin): (.+)$", re.MULTILINE)
"""Matches the fields of Release and InRelease files."""
_FETCHING = re.compile(r"^[EW]: (?:Failed to fetch \S+ *)?")
"""Matches the prefix that apt puts before the reason for a failed download."""

_NEWER_KEY = (
    "; if apt rejects the archive's key (Debian 13 rejects keys that are signed with SHA-1 only), put a newer copy of "
    "the key at {}"
)

UNREACHABLE = re.compile(
    r"^[EW]: .*(?:Could not (?:resolve|connect)|Temporary failure resolving|Failed to fetch|Unable to connect)",
    re.MULTILINE,
)
"""Matches apt's errors for a mirror that does not respond, or that lacks files that its verified lists name.

Downloads that succeeded on a retry, and messages of package scripts, are not matched: apt does not mark them as errors.
"""

UNKNOWN = re.compile(
    r"^E: (?:Unable to locate package (\S+)|Package '(\S+)' has no installation candidate)", re.MULTILINE
)
"""Matches apt's errors for an unknown package."""


@dataclass(frozen=True)
class Source:
    """One line of sources.list: a pocket of an archive, its URI, and the keyring that verifies it."""

    pocket: Pocket
    uri: str
    components: tuple[str, ...]
    keyring: Path
    architectures: tuple[str, ...]
    archive: str = "debian"
    """The name of the flavour that describes the archive."""
    only: tuple[str, ...] = ()
    """Patterns for the packages that roots may install from this source; empty: all packages."""
    origin: str = ""
    """The verified index's Origin field; set only if ``only`` requires it."""
    keyring_in_root: str = ""
    """The keyring's path in roots; empty: the same as on this PC."""
    keyring_package: str = ""
    """The keyring's package, for archives other than the distribution's."""

    @property
    def line(self) -> str:
        """The source in apt's one-line format."""
        options = f"arch={','.join(self.architectures)} signed-by={self.keyring}"
        return f"deb [{options}] {self.uri} {self.pocket.suite} {' '.join(self.components)}"


@dataclass(frozen=True)
class Verified:
    """The verified sources, the SHA-256 of each of their indices, and warnings about the other sources."""

    sources: tuple[Source, ...]
    indices: dict[str, str]
    warnings: tuple[str, ...]
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Pockets that were verified under their other name: a map from the release name to that name."""


@functools.cache
def host_mirrors() -> Mapping[str, str]:
    """Return the URIs of the Debian mirrors that apt uses on this host, under the keys ``main`` and ``security``.

    If one of these mirrors is not found, its key is absent. If apt uses a local file with a list of mirrors, the first
    mirror in this file is returned. An unreadable list is ignored. The result is cached, because apt takes a third of a
    second and every plan needs the mirrors.
    """
    listed = output_of(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(LABEL)|$(ORIGIN)", "Created-By: Packages"]
    )
    found: dict[str, str] = {}
    for line in listed.splitlines():
        uri, label, origin = line.split("|")
        uri = _first_mirror(uri).rstrip("/")
        last = urllib.parse.urlparse(uri).path.rsplit("/", 1)[-1]
        known = label in ("Debian", "Debian-Security") or (origin in ("", "$(ORIGIN)") and last.startswith("debian"))
        if not known or not uri:
            continue
        security = label == "Debian-Security" or last == "debian-security"
        found.setdefault("security" if security else "main", uri)
    return found


def _first_mirror(uri: str) -> str:
    """Return the mirror to which a URI refers.

    For ``mirror+file:/…``, this is the first entry in the file (apt-transport-mirror(1)). Return an empty string if the
    file does not exist, or if the list is fetched over the network and can thus change.
    """
    scheme, _, path = uri.partition(":")
    if scheme.partition("+")[0] != "mirror":
        return uri
    if scheme != "mirror+file":
        return ""
    try:
        lines = Path("/", urllib.parse.unquote(path.lstrip("/"))).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")), "")


def sources_for(config: Config, keyrings: Path) -> tuple[Source, ...]:
    """Return all configured pockets, including those that have not been verified.

    Nothing is fetched. ``fetch_keys`` stores in ``keyrings`` the keys that no package contains. Raises ConfigError if
    no Debian mirror is known.
    """
    image = config.image
    target = target_flavour(image)
    mirrors = _mirrors(config)
    made: list[Source] = []
    for flavour, architectures in _wanted(image):
        keyring = flavour.keyring or _fetched_keyring(flavour, keyrings)
        for pocket in flavour.pockets:
            override = image.mirror.rstrip("/") if flavour.name == target.name else ""
            uri = mirrors.get(pocket.mirror) or override or pocket.mirror
            made.append(
                Source(
                    pocket,
                    uri,
                    flavour.components,
                    keyring,
                    architectures,
                    archive=flavour.name,
                    only=flavour.only,
                    keyring_in_root=flavour.keyring_in_root if flavour.keyring_in_root != str(keyring) else "",
                    keyring_package=flavour.keyring_package if flavour.only else "",
                )
            )
    return tuple(made)


def _mirrors(config: Config) -> dict[str, str]:
    image = config.image
    host = host_mirrors()
    debian_target = image.flavour == "debian"
    # A trailing slash is removed, because the suffix of the security mirror is appended to the URI.
    main = (image.mirror.rstrip("/") if debian_target else "") or host.get("main", "")
    if not main:
        fix = (
            "set it in invoke.yaml, or with INVOKE_IMAGE_MIRROR=http://HOST/debian; if image.flavour is not debian, "
            "add a Debian mirror to /etc/apt/sources.list.d"
            if debian_target
            else "programs that run on this PC are installed from a Debian mirror: add one to /etc/apt/sources.list.d"
        )
        raise ConfigError([f"image.mirror: no Debian mirror is set, and this host's apt does not use one; {fix}"])
    derived = main + "-security" if main.endswith("/debian") else ""
    of_host = "" if debian_target and image.mirror else host.get("security", "")
    return {"main": main, "security": image.security_mirror.rstrip("/") or of_host or derived or main}


def _wanted(image: ImageConfig) -> list[tuple[Flavour, tuple[str, ...]]]:
    """Return the archives that the build uses, each with its architectures.

    Debian's archive is always included, because ``for_root`` uses it for every image.
    """
    both = tuple(dict.fromkeys((host_architecture().debian, image.architecture)))
    target = target_flavour(image)
    given = target.from_debian if image.kernel == "distribution" else ()
    wanted: list[tuple[Flavour, tuple[str, ...]]]
    wanted = [(dataclasses.replace(load_flavour("debian", image.suite), only=given), both)]
    if target.name != "debian":
        wanted.append((target, (image.architecture,)))
    if (archive := kernel_archive(image)) is not None:
        wanted.append((archive, (image.architecture,)))
    return wanted


def for_root(
    sources: tuple[Source, ...], image: ImageConfig, architectures: tuple[str, ...], packages: Sequence[str]
) -> tuple[Source, ...]:
    """Return the apt sources for a root filesystem with these packages.

    The first of ``architectures`` is the root's own. A root that has only the target's architecture runs on the target.
    Its packages come from the target's distribution, and from other archives if these provide one of ``packages``. All
    other roots run on this PC. Their packages come from Debian, including the target's headers and libraries, because
    apt requires a package to have the same version for all architectures that share its files.
    """
    of_the_target = architectures == (image.architecture,)
    own = image.flavour if of_the_target else "debian"
    mine = [dataclasses.replace(item, only=(), keyring_package="") for item in sources if item.archive == own]
    if of_the_target:
        others = [item for item in sources if item.archive != own]
        mine += [item for item in others if any(fnmatch.filter(packages, pattern) for pattern in item.only)]
    return tuple(item for item in mine if set(item.architectures) & set(architectures))


def _fetched_keyring(flavour: Flavour, folder: Path) -> Path:
    return folder / f"{flavour.name}.gpg"


def fetch_keys(config: Config, keyrings: Path) -> None:
    """Fetch the keys for ``sources_for`` that are missing from ``keyrings`` or differ from the pinned keys.

    Raises the same exceptions as ``fetch_key``.
    """
    for flavour, _ in _wanted(config.image):
        if flavour.keyring:
            continue
        if flavour.key is None:
            raise ValueError(f"flavour {flavour.name} has neither a keyring nor a key")
        path = _fetched_keyring(flavour, keyrings)
        if not path.is_file() or _fingerprints(path) != {flavour.key.fingerprint}:
            fetch_key(flavour.key, path)


def fetch_key(key: SigningKey, path: Path) -> None:
    """Fetch an archive's signing key, check its fingerprint and store it as a binary keyring.

    Raises NetworkUnreachable, or SourceUnavailable if the key is not the pinned one.
    """
    try:
        answer = requests.get(key.url, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as fault:
        raise NetworkUnreachable(
            f"the archive's signing key cannot be fetched from {key.url}",
            expected=f"the key with fingerprint {key.fingerprint}",
            found=str(fault),
            fix=(SOCKS_FIX if SOCKS_MISSING in str(fault) else "connect to the network")
            + f", or store the key yourself: gpg --dearmor < KEY > {path}",
        ) from fault
    with files.replacing(path) as aside:
        _gpg("--yes", "--dearmor", "--output", str(aside), stdin=answer.content)
        found = _fingerprints(aside)
        if found != {key.fingerprint}:
            raise SourceUnavailable(
                f"the key at {key.url} is not the pinned key",
                expected=f"fingerprint {key.fingerprint}",
                found=", ".join(sorted(found)) or "no key",
                fix="find out why the key differs; if the archive has changed its key, update images/flavours/",
            )


def _gpg(*words: str, stdin: bytes | None = None) -> str:
    """Run GnuPG with an empty home folder, without the caller's keys or options, and return its standard output."""
    with tempfile.TemporaryDirectory(prefix="pitorch-gpg-") as home:
        argv = ["gpg", "--homedir", home, "--batch", "--no-options", *words]
        return run(argv, stdin=stdin, check=False, merge_stderr=False).output


def _fingerprints(keyring: Path) -> set[str]:
    """Return the fingerprints of the primary keys in a binary keyring."""
    listed = _gpg("--with-colons", "--show-keys", str(keyring))
    found: set[str] = set()
    primary = False
    for line in listed.splitlines():
        kind, *fields = line.split(":")
        if kind == "pub":
            primary = True
        elif kind == "fpr" and primary:
            found.add(fields[8])
            primary = False
    return found


def verify(sources: tuple[Source, ...], folder: Path, *, strict: bool, limit_s: float = _UPDATE_LIMIT_S) -> Verified:
    """Update each pocket separately, and merge the lists of the verified pockets into ``folder``/lists.

    A pocket fails if its update takes longer than ``limit_s``. Raises MirrorPocketUnusable if a main pocket fails or,
    with ``strict``, if any pocket fails. Raises DiskFull if the lists cannot be stored.
    """
    with files.room_for(_LISTS, folder):
        folder.mkdir(parents=True, exist_ok=True)
        return _verify(sources, folder, strict=strict, limit_s=limit_s)


def _verify(sources: tuple[Source, ...], folder: Path, *, strict: bool, limit_s: float) -> Verified:
    with files.scratch_folder(folder, "pockets") as scratch:
        with concurrent.futures.ThreadPoolExecutor(len(sources)) as pool:
            numbered = list(enumerate(sources))
            faults = list(pool.map(lambda item: _update(item[1], scratch / str(item[0]), limit_s), numbered))
        good: list[Source] = []
        warnings: list[str] = []
        names: dict[str, str] = {}
        for number, (source, fault) in enumerate(zip(sources, faults, strict=True)):
            if not fault:
                good.append(source)
                continue
            state, why_not = ("", "") if strict else _by_its_other_name(source, scratch / str(number), limit_s)
            if state:
                good.append(source)
                names[source.pocket.suite] = source.pocket.also
                warnings.append(
                    f"pocket {source.pocket.suite} of {source.uri} cannot be verified: {fault} (the same release's "
                    f"signed index under the name {source.pocket.also}, dated {state}, is used instead)"
                )
                continue
            also_not = f"; its other name, {source.pocket.also}, cannot be used either: {why_not}" if why_not else ""
            text = (
                f"pocket {source.pocket.suite} of {source.uri} cannot be verified and is left out: {fault}{also_not} "
                f"(its updates are missing from the image)"
            )
            if strict or source.pocket.name in ("main", "raspberrypi"):
                raise MirrorPocketUnusable(
                    f"pocket {source.pocket.suite} of {source.uri} cannot be verified",
                    expected="a signed index, and all files that the index lists, on the mirror",
                    found=fault + also_not,
                    fix="try again when the mirror has been updated, or set image.mirror to another mirror"
                    + (_NEWER_KEY.format(source.keyring) if source.keyring_in_root else "")
                    + (" (image.strict makes this an error)" if strict else ""),
                )
            warnings.append(text)
        lists = scratch / "lists"
        (lists / "partial").mkdir(parents=True)
        indices: dict[str, str] = {}
        verified: list[Source] = []
        for number, source in enumerate(sources):
            if source not in good:
                continue
            verified.append(_with_origin(source, scratch / str(number)))
            for item in sorted((scratch / str(number) / "lists").iterdir()):
                if item.is_file() and item.name != "lock":
                    shutil.copy2(item, lists / item.name)
                    if item.name.endswith("Release"):
                        indices[f"{source.uri} {source.pocket.suite}"] = files.sha256_of(item)
        final = folder / "lists"
        files.remove(final)
        lists.rename(final)
    return Verified(tuple(verified), indices, tuple(warnings), names)


def _by_its_other_name(source: Source, scratch: Path, limit_s: float) -> tuple[str, str]:
    """Update a pocket under its other name, and store the lists in ``scratch`` under the pocket's own name.

    Returns the index's date and an empty string or, after a failure, an empty string and the reason. If the pocket has
    no other name, both strings are empty.
    """
    also = source.pocket.also
    if not also:
        return "", ""
    other = dataclasses.replace(source, pocket=dataclasses.replace(source.pocket, suite=also, also=""))
    files.remove(scratch)
    if fault := _update(other, scratch, limit_s):
        return "", _FETCHING.sub("", fault)
    fields = _release_fields(scratch)
    # The alias may already point to the next release.
    if (codename := fields.get("Codename", "a release without a name")) != source.pocket.suite:
        return "", f"this name now refers to {codename}"
    for path in [path for path in (scratch / "lists").iterdir() if path.is_file() and path.name != "lock"]:
        path.rename(path.with_name(path.name.replace(f"_dists_{also}_", f"_dists_{source.pocket.suite}_")))
    return fields.get("Date", "no date"), ""


def _release_fields(scratch: Path) -> dict[str, str]:
    """Return the fields of the release index in ``scratch``."""
    release = next((path for path in sorted((scratch / "lists").iterdir()) if path.name.endswith("Release")), None)
    return dict(_FIELD.findall(release.read_text())) if release else {}


def _with_origin(source: Source, scratch: Path) -> Source:
    """Return the source; if it has package patterns (``only``), add the Origin field of the index in ``scratch``.

    Raises MirrorPocketUnusable if the index does not contain this field.
    """
    if not source.only:
        return source
    if not (origin := _release_fields(scratch).get("Origin", "")):
        raise MirrorPocketUnusable(
            f"packages from {source.uri} cannot be distinguished from those of other archives",
            expected=f"an index of {source.pocket.suite} with an Origin field, as in the archive's own index",
            found="an index without an Origin field",
            fix=f"replace {source.uri} with the archive itself or with a mirror that is an exact copy of it",
        )
    return dataclasses.replace(source, origin=origin)


def _update(source: Source, scratch: Path, limit_s: float) -> str:
    """Run ``apt-get update`` for one source in private directories; return the reason for a failure, or "".

    Raises DiskFull.
    """
    words = [*_apart(scratch, source.line + "\n"), "-o", f"APT::Architecture={source.architectures[0]}"]
    words += ["-o", "pkgCacheFile::Generate=false"]  # packages are only looked up in the merged lists
    words += [word for name in source.architectures for word in ("-o", f"APT::Architectures::={name}")]
    try:
        with files.least_room(scratch) as least:
            done = run(["apt-get", "update", *words], limit_s=limit_s, env=build_environment(), check=False)
    except CommandTimedOut as fault:
        return f"apt-get update: {fault.found} after {limit_s:g} s"
    except CommandFailed as fault:
        return fault.found
    complaints = [line for line in done.output.splitlines() if line.startswith(("E:", "W:"))]
    if done.returncode or any("Failed to fetch" in line or "not signed" in line for line in complaints):
        first = " ".join((complaints[0] if complaints else f"apt-get update exited with {done.returncode}").split())
        if full := files.full_disk(done.output, _LISTS, scratch.parent):
            raise full
        if least[0] < _LEAST_ROOM:
            found = f"only {least[0]} bytes free while apt-get update ran; apt-get reported: {first}"
            raise files.no_room(_LISTS, scratch.parent, found)
        return first
    return ""


def download(
    sources: tuple[Source, ...],
    lists: Path,
    architectures: Sequence[str],
    names: Sequence[str],
    archives: Path,
    log: Path,
    *,
    essential: bool = True,
    without: Sequence[str] = (),
) -> list[Path]:
    """Fetch a root's packages and their dependencies into a folder; return the files.

    The first of ``architectures`` is the root's own. With ``essential``, essential packages are fetched too. Packages
    named in ``without`` (NAME or NAME:ARCHITECTURE) are not fetched, even if other packages depend on them.
    Dependencies that only these packages require are not fetched either. This PC's apt configuration has no effect.
    Files that are already in the folder are not fetched again. apt's output is written to ``log``. Raises
    CommandTimedOut, or CommandFailed with the last lines of apt's output.
    """
    archives.mkdir(parents=True, exist_ok=True)
    (archives / "partial").mkdir(exist_ok=True)
    with files.scratch_folder(archives.parent, "apt") as scratch:
        apart = _apart(scratch, sources_text(sources, tuple(architectures)))
        (scratch / "etc/preferences.d/pitorch").write_text(preferences_text(sources))
        (scratch / "status").write_text("".join(_installed(name, architectures[0]) for name in without))
        # apt needs its configuration's location before it reads any settings, so pass the location in a file, as
        # mmdebstrap does.
        config = scratch / "apt.conf"
        config.write_text(f'Dir::Etc::main "/dev/null";\nDir::Etc::parts "{scratch}/etc/apt.conf.d";\n')
        # With these options, apt prints dpkg's command line instead of running dpkg. The hook still runs, and receives
        # the paths of the .deb files.
        named = scratch / "named"
        options = [
            ("Dir::State", scratch),
            ("Dir::State::lists", lists),
            ("Dir::Cache::archives", archives),
            ("Dir::Log", scratch),
            ("APT::Architecture", architectures[0]),
            *(("APT::Architectures::", name) for name in architectures),
            ("APT::Install-Recommends", "false"),
            ("APT::Default-Release", ""),
            ("pkgCacheGen::ForceEssential", ","),  # otherwise apt treats the package apt as essential
            ("Dir::Etc::preferences", "/dev/null"),
            ("Dir::Etc::preferencesparts", scratch / "etc/preferences.d"),
            ("Acquire::Retries", "3"),
            ("Debug::NoLocking", "true"),  # other tasks also read the lists
            ("Debug::pkgDPkgPM", "true"),
            ("APT::Immediate-Configure", "false"),
            ("DPkg::Use-Pty", "false"),
            ("DPkg::Pre-Install-Pkgs::", f"cat >{shlex.quote(str(named))}"),
        ]
        words = [*apart, *(word for name, value in options for word in ("-o", f"{name}={value}"))]
        argv = ["apt-get", "--yes", *words, "install", *names, *(["?essential"] if essential else [])]
        environment = {**build_environment(), "APT_CONFIG": str(config), "LC_ALL": "C.UTF-8"}
        run(argv, limit_s=_UPDATE_LIMIT_S * 6, env=environment, log=log)
        return [Path(line) for line in named.read_text().splitlines()]


def download_alone(sources: tuple[Source, ...], lists: Path, package: str, folder: Path, log: Path) -> Path:
    """Fetch one package without its dependencies into ``folder``, which must be empty; return the file.

    apt's output is written to ``log``. Raises CommandTimedOut, or CommandFailed with the last lines of apt's output.
    """
    architecture = sources[0].architectures[0]
    with files.scratch_folder(folder.parent, "apt") as scratch:
        words = _apart(scratch, sources_text(sources, (architecture,)))
        words += ["-o", f"Dir::State::lists={lists}", "-o", f"APT::Architecture={architecture}"]
        words += ["-o", "Debug::NoLocking=true"]
        run(
            ["apt-get", "download", *words, package],
            limit_s=_UPDATE_LIMIT_S,
            env=build_environment(),
            cwd=folder,
            log=log,
        )
    (found,) = folder.glob("*.deb")
    return found


def _installed(name: str, architecture: str) -> str:
    """Return a dpkg status entry that declares a package installed, in a version that satisfies all dependencies."""
    package, _, other = name.partition(":")
    fields = (
        ("Package", package),
        ("Status", "install ok installed"),
        ("Architecture", other or architecture),
        ("Version", "9999"),
        ("Maintainer", "nobody"),
        ("Description", "not needed"),
    )
    return "".join(f"{field}: {value}\n" for field, value in fields) + "\n"


def _apart(scratch: Path, sources_list: str) -> list[str]:
    """Create apt's private directories, and return the options that restrict apt to them."""
    for name in ("lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/apt.conf.d"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(sources_list)
    options = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def fetch_source(sources: tuple[Source, ...], package: str, version: str, folder: Path, log: Path) -> None:
    """Fetch a source package's files into ``folder``; apt verifies them through the archive's signature.

    If the package cannot be fetched, the pockets are tried under their other names, as in ``verify``. The package is
    the same under either name, because ``version`` identifies it. Raises SourceUnavailable with apt's first error.
    """
    try:
        _fetch_source(sources, package, version, folder, log)
    except SourceUnavailable:
        others = tuple(
            dataclasses.replace(item, pocket=dataclasses.replace(item.pocket, suite=item.pocket.also, also=""))
            for item in sources
            if item.pocket.also
        )
        with contextlib.suppress(SourceUnavailable):
            if others:
                _fetch_source(others, package, version, folder, log)
                return
        raise


def _fetch_source(sources: tuple[Source, ...], package: str, version: str, folder: Path, log: Path) -> None:
    with files.scratch_folder(folder.parent, "apt") as scratch:
        words = _apart(scratch, "".join(_source_line(source) + "\n" for source in sources))
        try:
            for argv in (
                ["apt-get", "update", *words],
                ["apt-get", "source", "--download-only", *words, f"{package}={version}"],
            ):
                run(argv, limit_s=_UPDATE_LIMIT_S * 6, env=build_environment(), cwd=folder, log=log)
        except CommandFailed as fault:
            complaints = [line for line in fault.tail.splitlines() if line.startswith(("E:", "Err:", "W:"))]
            places = ", ".join(dict.fromkeys(source.uri for source in sources))
            raise SourceUnavailable(
                f"the source package {package} {version} cannot be fetched",
                expected=f"the source package in one of these archives: {places}",
                found=complaints[0] if complaints else fault.found,
                fix="check the network; if it works, set image.mirror to a mirror that provides source packages",
            ) from fault


def fetch_file(source: Source, path: str, sha256: str, place: Path, log: Path) -> None:
    """Fetch a file from an archive, such as a part of a source package, and store it as ``place``.

    If ``place`` already has this SHA-256, the function does nothing.

    apt verifies the SHA-256. Raises SourceUnavailable with apt's first error.
    """
    if place.is_file() and files.sha256_of(place) == sha256:
        return
    # apt does not copy the files of "file:" URIs; it reads them in place.
    uri = re.sub("^file:", "copy:", f"{source.uri}/{path}")
    with files.scratch_folder(place.parent, "apt") as scratch:
        aside = scratch / place.name
        argv = [_DOWNLOADER, "-o", "APT::Sandbox::User=root", "download-file", uri, str(aside), f"SHA256:{sha256}"]
        try:
            run(argv, limit_s=_UPDATE_LIMIT_S * 6, env=build_environment(), log=log)
        except CommandFailed as fault:
            complaints = [" ".join(line.split()) for line in fault.tail.splitlines() if line.startswith("E:")]
            raise SourceUnavailable(
                f"{place.name} cannot be fetched",
                expected=f"{uri} with SHA-256 {sha256}",
                found=complaints[0] if complaints else fault.found,
                fix="check the network; if it works, set image.mirror to a mirror that provides source packages",
            ) from fault
        aside.replace(place)


def _source_line(source: Source) -> str:
    components = " ".join(source.components)
    return f"deb-src [signed-by={source.keyring}] {source.uri} {source.pocket.suite} {components}"


def package_names(lists: Path, architecture: str) -> set[str]:
    """Return the names of all packages for an architecture in the verified lists."""
    found = lists.glob(f"*_binary-{architecture}_Packages*")
    texts = [output_of([_DOWNLOADER, "cat-file", str(path)]) for path in found]
    return set(re.findall(r"^Package: (\S+)$", "\n".join(texts), re.MULTILINE))


def sources_text(sources: tuple[Source, ...], architectures: tuple[str, ...], *, in_root: bool = False) -> str:
    """Return the text of sources.list for a root with these architectures; sources for other architectures are omitted.

    The paths of the keyrings are those on this PC or, if ``in_root`` is true, those in the root.
    """
    lines = []
    for source in sources:
        shared = tuple(name for name in source.architectures if name in architectures)
        keyring = Path(source.keyring_in_root) if in_root and source.keyring_in_root else source.keyring
        if shared:
            lines.append(dataclasses.replace(source, architectures=shared, keyring=keyring).line)
    return "".join(line + "\n" for line in lines)


def preferences_text(sources: tuple[Source, ...]) -> str:
    """Return apt's preferences for a root with these sources, or an empty string if no preferences are required.

    apt installs from each source only the packages that the source may provide (``only``).
    """
    texts = []
    for origin, only in dict.fromkeys((item.origin, item.only) for item in sources if item.only):
        for packages, priority in (("*", -1), (" ".join(only), 990)):
            texts.append(f"Package: {packages}\nPin: release o={origin}\nPin-Priority: {priority}\n")
    return "\n".join(texts)


def fingerprint(verified: Verified) -> str:
    """Return the SHA-256 of the verified indices, which identifies the mirror's state during the build."""
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(verified.indices.items()))
    return hashlib.sha256(text.encode()).hexdigest()
