"""Image references: where in which registry an image lies.

Grammar of the reference package of the distribution project: ``HOST[:PORT]/PATH[:TAG]``, at most 255 characters
before the tag. We always write the host, so that no engine ever guesses a public one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolchain.config import Config, split_registry
from toolchain.errors import ReferenceInvalid

_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LONGEST_NAME = 255

_HUB = "docker.io"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image in a registry."""

    host: str
    """HOST[:PORT], as it stands in the image's name."""
    repository: str
    tag: str

    @property
    def name(self) -> str:
        """Without the tag."""
        return f"{self.host}/{self.repository}"

    @property
    def api_host(self) -> str:
        """The host that speaks the registry protocol: Docker Hub's has another name than its images."""
        return "registry-1.docker.io" if self.host in (_HUB, f"index.{_HUB}") else self.host

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


def resolve(config: Config, *, registry: str | None = None, tag: str | None = None) -> Reference:
    """The reference of the system image; options override the configuration's section ``registry``.

    ``registry`` is HOST[:PORT]/NAMESPACE; without a namespace the configured one is used. Raises ReferenceInvalid.
    """
    host, namespace = config.registry.address, config.registry.namespace
    if registry is not None:
        given_host, _, given_namespace = registry.partition("/")
        _check_host(given_host, registry)
        host, namespace = given_host, given_namespace.rstrip("/") or namespace
    repository = f"{namespace}/{config.registry.repository}"
    _check_repository(host, repository)
    tag = config.tag if tag is None else tag
    if not _TAG.fullmatch(tag):
        raise ReferenceInvalid(
            f"{tag!r} cannot be a tag",
            expected="1 to 128 letters, digits, '_', '.' and '-', not starting with '.' or '-'",
            found=repr(tag),
            fix="give another --tag",
        )
    return Reference(host=host, repository=repository, tag=tag)


def _check_host(host: str, registry: str) -> None:
    if "://" in registry or registry.startswith(("http:", "https:")):
        raise ReferenceInvalid(
            "a registry is named without a scheme",
            expected="HOST[:PORT]/NAMESPACE",
            found=registry,
            fix=f"--registry {registry.partition('://')[2] or 'HOST/NAMESPACE'}",
        )
    if "@" in host:
        raise ReferenceInvalid(
            "a registry's name holds no user or password",
            expected="HOST[:PORT]/NAMESPACE",
            found="something before an @",
            fix="give --user NAME; the password comes from the credential store, the environment or a prompt",
        )
    try:
        split_registry(host)
    except ValueError as fault:
        if "Docker Hub" in str(fault):
            raise ReferenceInvalid(
                f"{host!r} would be taken for a name on Docker Hub, not for a host",
                expected="a host with a dot or a port: HOST[:PORT]/NAMESPACE",
                found=registry,
                fix=f"--registry {host}:443/…, or docker.io/{registry} if you mean Docker Hub",
            ) from fault
        raise ReferenceInvalid(
            f"{host!r} is not a registry's address",
            expected="HOST[:PORT]/NAMESPACE, the port from 1 to 65535",
            found=registry,
            fix="for instance --registry 127.0.0.1:5000/pitorch",
        ) from fault


def _check_repository(host: str, repository: str) -> None:
    if repository != repository.lower():
        raise ReferenceInvalid(
            "a repository's name is written in lower case",
            expected=repository.lower(),
            found=repository,
            fix=f"--registry {host}/{repository.lower().rpartition('/')[0]}",
        )
    if not _PATH.fullmatch(repository):
        tagged = ":" in repository or "@" in repository
        raise ReferenceInvalid(
            f"{repository!r} cannot be a repository's name",
            expected="lower-case letters and digits, parted by single '.', '_', '/' or by '-'",
            found=repository,
            fix="give the tag with --tag" if tagged else "give another namespace: --registry HOST[:PORT]/NAMESPACE",
        )
    if len(host) + 1 + len(repository) > _LONGEST_NAME:
        raise ReferenceInvalid(
            "the image's name is too long",
            expected=f"at most {_LONGEST_NAME} characters before the tag",
            found=f"{len(host) + 1 + len(repository)}",
            fix="give a shorter namespace: --registry HOST[:PORT]/NAMESPACE",
        )
