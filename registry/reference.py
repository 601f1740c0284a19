"""References to images: registry, repository and tag.

The grammar follows the CNCF Distribution project's reference package: ``HOST[:PORT]/PATH[:TAG]``, with at most 255
characters before the tag. The host is always included, because the engine would otherwise use a public registry.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from toolchain.config import Config, split_registry
from toolchain.errors import UserError

_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LONGEST_NAME = 255

_HUB = "docker.io"
_VERIFY = "correct the name; for example: ./inv verify 127.0.0.1:5000/pitorch/system:trixie-armhf"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image in a registry."""

    host: str
    """HOST[:PORT], as in the image's name."""
    repository: str
    tag: str

    @property
    def name(self) -> str:
        """The reference without the tag."""
        return f"{self.host}/{self.repository}"

    @property
    def api_host(self) -> str:
        """The host of the registry API, which for Docker Hub differs from the host in image names."""
        return "registry-1.docker.io" if self.host in (_HUB, f"index.{_HUB}") else self.host

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


def with_options(config: Config, *, registry: str = "", tag: str = "", user: str = "") -> Config:
    """Return the configuration with the values of ``--registry``, ``--tag`` and ``--user``, unless these are empty.

    ``registry`` is HOST[:PORT]/NAMESPACE; the default namespace is the configured one. Raises UserError.
    """
    section = config.registry
    if registry:
        host, _, namespace = registry.partition("/")
        _check_host(host, registry)
        section = dataclasses.replace(section, address=host, namespace=namespace.rstrip("/") or section.namespace)
    section = dataclasses.replace(section, tag=tag or section.tag, user=user or section.user)
    return dataclasses.replace(config, registry=section)


def resolve(config: Config, *, tag: str | None = None) -> Reference:
    """Return the system image's reference, by default with the configured tag. Raises UserError."""
    host = config.registry.address
    repository = f"{config.registry.namespace}/{config.registry.repository}"
    _check_repository(host, repository)
    tag = config.tag if tag is None else tag
    if not _TAG.fullmatch(tag):
        raise UserError(
            f"{tag!r} is not a valid tag",
            expected="1 to 128 letters, digits, '_', '.' and '-', not starting with '.' or '-'",
            found=repr(tag),
            fix="pass another --tag",
        )
    return Reference(host=host, repository=repository, tag=tag)


def parse(text: str) -> Reference:
    """Parse HOST[:PORT]/REPOSITORY:TAG. Raises UserError."""
    name, _, tag = text.rpartition(":")
    host, _, repository = name.partition("/")
    shown = re.sub(r"^[^/]*@", "", text)  # without a password
    if not repository or not _TAG.fullmatch(tag):
        raise UserError(
            f"{shown!r} is neither a file nor an image in a registry",
            expected="an existing file, or HOST[:PORT]/REPOSITORY:TAG",
            found=shown,
            fix=_VERIFY,
        )
    try:
        _check_host(host, text)
        _check_repository(host, repository)
    except UserError as fault:
        raise UserError(
            f"{shown!r} is not the name of an image in a registry",
            expected="HOST[:PORT]/REPOSITORY:TAG",
            found=fault.summary,
            fix=_VERIFY,
        ) from fault
    return Reference(host=host, repository=repository, tag=tag)


def _check_host(host: str, registry: str) -> None:
    if "://" in registry or registry.startswith(("http:", "https:")):
        raise UserError(
            "the address of a registry must not contain a scheme",
            expected="HOST[:PORT]/NAMESPACE",
            found=registry,
            fix=f"pass --registry {registry.partition('://')[2] or 'HOST/NAMESPACE'}",
        )
    if "@" in host:
        raise UserError(
            "the address of a registry must not contain a user or password",
            expected="HOST[:PORT]/NAMESPACE",
            found="text before an @",
            fix="pass --user NAME; the password comes from the credential store, the environment or a prompt",
        )
    try:
        split_registry(host)
    except ValueError as fault:
        if "Docker Hub" in str(fault):
            raise UserError(
                f"{host!r} would be interpreted as a name on Docker Hub, not as a host",
                expected="a host with a dot or a port: HOST[:PORT]/NAMESPACE",
                found=registry,
                fix=f"pass --registry {host}:443/…, or docker.io/{registry} for Docker Hub",
            ) from fault
        raise UserError(
            f"{host!r} is not the address of a registry",
            expected="HOST[:PORT]/NAMESPACE, with a port from 1 to 65535, and at most 63 characters between dots",
            found=registry,
            fix="correct the address; for example: --registry 127.0.0.1:5000/pitorch",
        ) from fault


def _check_repository(host: str, repository: str) -> None:
    if repository != repository.lower():
        raise UserError(
            "the repository name must be in lower case",
            expected=repository.lower(),
            found=repository,
            fix=f"pass --registry {host}/{repository.lower().rpartition('/')[0]}",
        )
    if not _PATH.fullmatch(repository):
        tagged = ":" in repository or "@" in repository
        raise UserError(
            f"{repository!r} is not a valid repository name",
            expected="lower-case letters and digits, separated by a single '.', '_' or '/', or by one or more '-'",
            found=repository,
            fix="pass the tag with --tag" if tagged else "pass another namespace: --registry HOST[:PORT]/NAMESPACE",
        )
    if len(host) + 1 + len(repository) > _LONGEST_NAME:
        raise UserError(
            "the image name is too long",
            expected=f"at most {_LONGEST_NAME} characters before the tag",
            found=f"{len(host) + 1 + len(repository)} characters",
            fix="pass a shorter namespace: --registry HOST[:PORT]/NAMESPACE",
        )
