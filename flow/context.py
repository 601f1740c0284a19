"""The context that every step uses: the configuration, the paths in the build folder and the Docker engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import docker

from engine.connect import connect
from images.flavour import Suite, load_suite
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import Config, ImageConfig


@dataclass
class Context:
    """A configuration, and the connection to the Docker engine.

    The connection is opened on first use and closed when the ``with`` block ends.
    """

    config: Config
    reuse: bool = False
    """Whether a step may update its previous build instead of starting from scratch; the product is the same."""
    _client: docker.DockerClient | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def client(self) -> docker.DockerClient:
        """The connection to the engine. Raises EngineUnavailable."""
        if self._client is None:
            self._client = connect()
        return self._client

    @property
    def image(self) -> ImageConfig:
        """The image's settings."""
        return self.config.image

    @property
    def target(self) -> Architecture:
        """The image's architecture."""
        return self.config.image.target

    @functools.cached_property
    def native(self) -> Architecture:
        """This PC's architecture."""
        return host_architecture()

    @functools.cached_property
    def suite(self) -> Suite:
        """The image's suite."""
        return load_suite(self.config.image.suite)

    @property
    def epoch(self) -> int:
        """The upper limit for time stamps in products, in Unix seconds."""
        return self.config.image.source_date_epoch

    @property
    def root(self) -> Path:
        """The target's folder, with the products and manifests of the steps."""
        return self.config.target_root

    @property
    def keyrings(self) -> Path:
        """The folder for archives' signing keys that must be downloaded because no package contains the keys."""
        return self.config.build_root / "keys"

    @property
    def tools(self) -> Path:
        """The folder with native programs."""
        return self.root / "tools"

    @property
    def farm(self) -> Path:
        """The folder with symbolic links that the native compiler needs in development containers (images.native)."""
        return self.root / "farm"

    @property
    def torch_site(self) -> Path:
        """The folder into which torch is unpacked. It has the layout of the target's root filesystem."""
        return self.root / "torch-site"

    @property
    def libqpu_stage(self) -> Path:
        """The folder into which libqpu is unpacked. It has the layout of the target's root filesystem."""
        return self.root / "libqpu"

    def log(self, step: str) -> Path:
        """Return the path of a step's log."""
        return self.root / "logs" / f"{step}.log"


def for_all_targets(config: Config, suite: str) -> Config:
    """Return the configuration for products that all targets share.

    The configuration has the suite ``suite``, the flavour Debian, this PC's architecture and the distribution's kernel.
    Its folder is therefore not the folder of a target for another architecture, and its mirror does not depend on the
    target. Raises PlatformMismatch.
    """
    image = with_debian(config.image, suite, host_architecture().debian)
    return replace(config, image=replace(image, kernel="distribution"))


def with_debian(image: ImageConfig, suite: str, architecture: str) -> ImageConfig:
    """Return an image's settings with the flavour Debian. A mirror of another flavour is not kept."""
    mirror = image.mirror if image.flavour == "debian" else ""
    return replace(image, flavour="debian", suite=suite, architecture=architecture, mirror=mirror)
