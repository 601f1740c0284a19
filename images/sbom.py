"""Write a root filesystem's bill of materials (SBOM) as SPDX 2.3 and CycloneDX 1.6, both in JSON.

debsbom reads the list of packages from dpkg's status file. This project's wheels and libraries are added, each with its
file's SHA-256. The same input produces the same bytes, because identifiers are derived from the contents, and the
creation time is set to the image's.

Both documents are validated before they are written: the SPDX document with spdx-tools, and the CycloneDX document with
the JSON schema in cyclonedx-python-lib.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import tarfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packageurl import PackageURL
from packaging.utils import parse_wheel_filename

from toolchain import files, process
from toolchain.errors import ArtefactDamaged, ArtefactMissing

NAMES = ("sbom.spdx.json", "sbom.cdx.json")
"""The documents' file names."""
_CDX_VERSION = "1.6"
_DISTRIBUTION = "pitorch-system"
STATUS = "var/lib/dpkg/status"
"""dpkg's list of the installed packages."""
FILES = frozenset({STATUS, "var/lib/dpkg/arch-native", "var/lib/apt/extended_states"})
"""The files of a root from which its bill of materials is made."""


@dataclass(frozen=True)
class Part:
    """A file that an image contains or was built from: a wheel, a library, or a Debian package with firmware."""

    file: str
    sha256: str

    @property
    def name(self) -> str:
        """The project's name."""
        if self.is_firmware:
            return self.file.partition("_")[0]
        return str(parse_wheel_filename(self.file)[0]) if self._is_wheel else self.file.partition(".so")[0]

    @property
    def version(self) -> str:
        """The project's version; empty if the file's name does not contain the version."""
        if self.is_firmware:
            return unquote(self.file.split("_")[1])
        return str(parse_wheel_filename(self.file)[1]) if self._is_wheel else self.file.partition(".so.")[2]

    @property
    def purl(self) -> str:
        """The package URL (ECMA-427)."""
        if self.is_firmware:
            architecture = self.file.removesuffix(".deb").split("_")[2]
            return PackageURL("deb", "debian", self.name, self.version, {"arch": architecture}).to_string()
        kind = "pypi" if self._is_wheel else "generic"
        return PackageURL(kind, None, self.name, self.version, {"file_name": self.file}).to_string()

    @property
    def is_firmware(self) -> bool:
        """Whether the file is a Debian package, which contains firmware.

        Packages that are installed in the root are not instances of this class.
        """
        return self.file.endswith(".deb")

    @property
    def _is_wheel(self) -> bool:
        return self.file.endswith(".whl")


def libraries_in(tar: Path) -> list[Part]:
    """Return the shared libraries in a layer's tar."""
    with tarfile.open(tar) as archive:
        found = [item for item in archive if item.isfile() and ".so" in Path(item.name).name]
        contents = [(item, archive.extractfile(item)) for item in found]
        return [
            Part(Path(item.name).name, hashlib.sha256(stream.read()).hexdigest()) for item, stream in contents if stream
        ]


def write(
    root: Path,
    folder: Path,
    *,
    label: str,
    parts: Sequence[Part],
    packages: Iterable[str] = (),
    epoch: int,
    log: Path,
) -> tuple[Path, ...]:
    """Write a root's bill of materials into ``folder``; return the documents' paths in the order of ``NAMES``.

    ``root`` is a folder or a tar archive. ``label`` is the system's version, such as SUITE-ARCHITECTURE. ``packages``
    contains a line with the SHA-256 and file name of each Debian package; this SHA-256 is added to the documents' entry
    for the package of the same name and version. ``epoch`` is the documents' creation time in Unix seconds.

    Raises ArtefactMissing for a root without packages; ArtefactDamaged for an invalid document; or CommandFailed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with files.scratch_folder(folder, "sbom") as scratch:
        if root.is_file():
            root = _status_of(root, scratch / "root")
        if not (root / STATUS).is_file():
            raise ArtefactMissing(
                f"{root} has no package list",
                expected=f"{STATUS}, which dpkg writes",
                found="no such file",
                fix="pass the root filesystem of a Debian system",
            )
        moment = datetime.datetime.fromtimestamp(epoch, datetime.UTC).isoformat()
        process.run(
            [
                sys.executable, "-m", "debsbom.cli", "generate", f"--root={root}", f"--out={scratch / 'sbom'}",
                f"--distro-name={_DISTRIBUTION}", f"--distro-version={label}", f"--timestamp={moment}",
                f"--cdx-schema-version={_CDX_VERSION}", "--spdx-namespace=tag:pitorch,2026:sbom",
                f"--cdx-serialnumber={uuid.UUID(int=0)}",
            ],
            env={"PYTHONHASHSEED": "0"},  # makes the order of sets reproducible
            log=log,
        )  # fmt: skip
        add(scratch, parts, packages)
        for name in NAMES:
            (scratch / name).replace(folder / name)
    return tuple(folder / name for name in NAMES)


def add(folder: Path, parts: Sequence[Part], packages: Iterable[str] = ()) -> None:
    """Add ``parts``, and the SHA-256 values from ``packages``, to the two documents in ``folder``.

    The parameters are those of ``write``. Raises ArtefactDamaged for an invalid document.
    """
    sums = _sums(packages)
    for name, complete in zip(NAMES, (_complete_spdx, _complete_cyclonedx), strict=True):
        path = folder / name
        document = json.loads(path.read_text())
        complete(document, parts, sums)
        path.write_text(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        require_valid(path)


def _status_of(tar: Path, folder: Path) -> Path:
    """Extract the files that debsbom reads; return their folder.

    On Python 3.11.2, debsbom itself would extract the whole tar.
    """
    with tarfile.open(tar) as archive:
        for item in archive:
            name = item.name.removeprefix("./")
            if name in FILES and (content := archive.extractfile(item)) is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content.read())
    return folder


def _sums(packages: Iterable[str]) -> dict[str, str]:
    """Map each package (NAME_VERSION_ARCHITECTURE) to its SHA-256.

    Each line of ``packages`` contains the SHA-256 and the file name of a package.
    """
    pairs = (line.split() for line in packages)
    return {unquote(name).removesuffix(".deb"): digest for digest, name in pairs}


def _file_name(purl: str) -> str:
    """Return the NAME_VERSION_ARCHITECTURE of the Debian package that a package URL denotes."""
    found = PackageURL.from_string(purl)
    return f"{found.name}_{found.version}_{dict(found.qualifiers).get('arch')}"


def _complete_spdx(document: dict[str, Any], parts: Sequence[Part], sums: Mapping[str, str]) -> None:
    """Add ``parts``, the packages' SHA-256 values, and a content-derived namespace to an SPDX document."""
    for item in document["packages"]:
        purls = [
            other["referenceLocator"] for other in item.get("externalRefs", ()) if other["referenceType"] == "purl"
        ]
        if purls and (found := sums.get(_file_name(purls[0]))):
            item["checksums"] = [{"algorithm": "SHA256", "checksumValue": found}]
    for part in parts:
        identity = f"SPDXRef-file-{part.sha256[:16]}"
        document["packages"].append(
            {
                "SPDXID": identity,
                "name": part.name,
                **({"versionInfo": part.version} if part.version else {}),
                "packageFileName": part.file,
                "checksums": [{"algorithm": "SHA256", "checksumValue": part.sha256}],
                "externalRefs": [
                    {"referenceCategory": "PACKAGE_MANAGER", "referenceType": "purl", "referenceLocator": part.purl}
                ],
                "filesAnalyzed": False,
                "primaryPackagePurpose": "FIRMWARE" if part.is_firmware else "LIBRARY",
                **dict.fromkeys(
                    ("copyrightText", "downloadLocation", "licenseConcluded", "licenseDeclared"), "NOASSERTION"
                ),
            }
        )
        document["relationships"].append(
            {
                "spdxElementId": identity,
                "relationshipType": "PACKAGE_OF",
                "relatedSpdxElement": f"SPDXRef-{_DISTRIBUTION}",
            }
        )
    document["packages"].sort(key=lambda item: str(item["SPDXID"]))
    document["relationships"].sort(key=lambda item: json.dumps(item, sort_keys=True))
    document["documentNamespace"] += f"/{_digest(document)}"


def _complete_cyclonedx(document: dict[str, Any], parts: Sequence[Part], sums: Mapping[str, str]) -> None:
    """Add ``parts``, the packages' SHA-256 values, and a content-derived serial number to a CycloneDX document."""
    for item in document["components"]:
        if "purl" in item and (found := sums.get(_file_name(item["purl"]))):
            item["hashes"] = [{"alg": "SHA-256", "content": found}]
    document["components"] += [
        {
            "type": "firmware" if part.is_firmware else "library",
            "bom-ref": part.purl,
            "name": part.name,
            **({"version": part.version} if part.version else {}),
            "purl": part.purl,
            "hashes": [{"alg": "SHA-256", "content": part.sha256}],
        }
        for part in parts
    ]
    document["components"].sort(key=lambda item: str(item["bom-ref"]))
    system = next(item for item in document["dependencies"] if item["ref"] == f"CDXRef-{_DISTRIBUTION}")
    system["dependsOn"] = sorted([*system.get("dependsOn", ()), *(part.purl for part in parts)])
    document["dependencies"] = sorted(
        [*document["dependencies"], *({"ref": part.purl} for part in parts)], key=lambda item: str(item["ref"])
    )
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, _digest(document))}"


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def require_valid(path: Path) -> None:
    """Validate a document with the library for its format. Raises ArtefactDamaged, which lists the first errors."""
    check = _faults_of_spdx if path.name.endswith(".spdx.json") else _faults_of_cyclonedx
    if faults := check(path):
        raise ArtefactDamaged(
            f"{path.name} is not a valid bill of materials",
            expected="a document that the SPDX or CycloneDX library accepts as valid",
            found="; ".join(faults[:3]),
            fix="run the task that wrote this file again",
        )


def _faults_of_spdx(path: Path) -> list[str]:
    from spdx_tools.spdx.parser.error import SPDXParsingError
    from spdx_tools.spdx.parser.json.json_parser import parse_from_file
    from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

    try:
        return [item.validation_message for item in validate_full_spdx_document(parse_from_file(str(path)))]
    except SPDXParsingError as fault:
        return list(fault.messages)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:  # spdx-tools does not check types
        return [f"{type(fault).__name__}: {fault}"]


def _faults_of_cyclonedx(path: Path) -> list[str]:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        fault = JsonStrictValidator(SchemaVersion.from_version(_CDX_VERSION)).validate_str(path.read_text())
    except (OSError, ValueError) as broken:
        return [str(broken)]
    return [str(fault.data)] if fault else []
