"""What every step works with: the configuration, the paths in the build folder and the Docker engine."""

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
    """One configuration. The engine is connected on first use and disconnected at the end of the ``with`` block."""

    config: Config
    reuse: bool = False
    """Whether a step may update its previous build instead of starting from scratch. The product is the same."""
    _client: docker.DockerClient | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def client(self) -> docker.DockerClient:
        """The engine. Raises EngineUnavailable."""
        if self._client is None:
            self._client = connect()
        return self._client

    @property
    def image(self) -> ImageConfig:
        """Settings of the image."""
        return self.config.image

    @property
    def target(self) -> Architecture:
        """Architecture of the image."""
        return self.config.image.target

    @functools.cached_property
    def native(self) -> Architecture:
        """Architecture of this PC."""
        return host_architecture()

    @functools.cached_property
    def suite(self) -> Suite:
        """Release of the image."""
        return load_suite(self.config.image.suite)

    @property
    def epoch(self) -> int:
        """Upper limit of the time stamps in products, in Unix seconds."""
        return self.config.image.source_date_epoch

    @property
    def root(self) -> Path:
        """Folder of the target, with the products and manifests of its steps."""
        return self.config.target_root

    @property
    def keyrings(self) -> Path:
        """Downloaded keys of archives whose keys are in no package."""
        return self.config.build_root / "keys"

    @property
    def tools(self) -> Path:
        """Native programs."""
        return self.root / "tools"

    @property
    def farm(self) -> Path:
        """Links for the native compiler in development containers (images.native)."""
        return self.root / "farm"

    @property
    def torch_site(self) -> Path:
        """torch, unpacked as in the target root."""
        return self.root / "torch-site"

    @property
    def libqpu_stage(self) -> Path:
        """libqpu, unpacked as in the target root."""
        return self.root / "libqpu"

    def log(self, step: str) -> Path:
        """Log of a step."""
        return self.root / "logs" / f"{step}.log"


def for_all_targets(config: Config, suite: str) -> Config:
    """The configuration for what all targets share, such as native tools: one folder, and a release of Debian."""
    own = ImageConfig()
    image = replace(config.image, suite=suite, flavour=own.flavour, architecture=own.architecture, kernel=own.kernel)
    return replace(config, image=image)
