"""Where benchmarks build: a folder and image names of their own.

The workspace's ``image.source_date_epoch`` is one second off the configured one: a root filesystem that is the same,
byte for byte, as one that the engine has already would be loaded in no time, and a clean build would not be one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import docker.errors
from docker.models.images import Image

from benchmarks.measure import Observed, observe
from engine.connect import connect
from engine.start import ensure_running
from flow import main_job
from toolchain import files, progress
from toolchain.config import ROOT, Config
from toolchain.errors import InUse
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX
from wheels.wheelhouse import wheelhouses


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """``config`` is the user's, with the build folder and the image name of the benchmarks; ``results`` keeps JSON.

    ``times`` is how often short measurements are repeated.
    """

    config: Config
    results: Path
    user: Config
    times: int = 3

    @classmethod
    def of(cls, user: Config, *, times: int = 3) -> Workspace:
        """The workspace in the user's build folder."""
        results = user.build_root / "benchmarks"
        config = replace(
            user,
            build=replace(user.build, folder=results / "work"),
            image=replace(
                user.image,
                name=f"{user.image.name}-benchmark",
                source_date_epoch=user.image.source_date_epoch - 1,
            ),
            nfs=replace(user.nfs, folder=""),
            torch=replace(user.torch, wheelhouse=tuple(str(folder) for folder in wheelhouses(user))),
        )
        return cls(config=config, results=results, user=user, times=times)

    @property
    def folder(self) -> Path:
        """Products and logs; removed by ``clean``."""
        return self.config.build_root

    def environment(self) -> dict[str, str]:
        """What makes a task work in here."""
        config = self.config
        return {
            "INVOKE_RUNTIME_CONFIG": "",  # a file of the user's would win over what follows
            "INVOKE_BUILD_FOLDER": str(config.build_root),
            "INVOKE_IMAGE_NAME": config.image.name,
            "INVOKE_IMAGE_SOURCE_DATE_EPOCH": str(config.image.source_date_epoch),
            "INVOKE_NFS_FOLDER": "",
            "INVOKE_TORCH_WHEELHOUSE": ",".join(config.torch.wheelhouse),
        }

    def task(self, *words: str, cwd: Path = ROOT) -> Observed:
        """Run a task in here, in a process of its own. Raises CommandFailed."""
        log = self.results / "logs" / f"{words[0]}.log"
        return observe(words, environment=self.environment(), log=log, cwd=cwd)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One run of the benchmarks at a time, in a folder that is theirs. Raises InUse, or UserError."""
        self.results.mkdir(parents=True, exist_ok=True)
        taken = InUse(
            f"other benchmarks run in {self.results}",
            expected="one run at a time: they would measure each other",
            found="its lock is held",
            fix="wait for the other run, or end it",
        )
        with files.held(self.results / "lock", taken):
            self._own()
            yield

    def ensure_built(self) -> main_job.Built:
        """Bring the workspace's image up to date; not measured."""
        self._own()
        with progress.step("build what is measured (not timed)"):
            return main_job.build_image(self.config)

    def ensure_workbench(self) -> None:
        """As ``ensure_built``, and the development root and the image that shells are opened in."""
        self.ensure_built()
        with progress.step("make the workbench (not timed)"):
            main_job.ready_workbench(self.config)

    def clean(self) -> None:
        """Remove everything that was built in here, images and their layers included. Raises UserError."""
        if self.folder.exists():
            files.require_owned(self.folder)
            files.remove(self.folder)
        self._remove_images()
        self._own()

    def drop(self) -> None:
        """As ``clean``, and leave no folder."""
        self.clean()
        files.remove(self.folder)

    def manifests(self) -> dict[str, Manifest]:
        """The steps that were made, by name."""
        paths = sorted(self.config.target_root.glob(f"*{MANIFEST_SUFFIX}"))
        return {found.step: found for path in paths if (found := Manifest.read(path)) is not None}

    def stamps(self) -> dict[str, int]:
        """When each step's manifest was written: a step that ran has a new one."""
        paths = self.config.target_root.glob(f"*{MANIFEST_SUFFIX}")
        return {path.name: path.stat().st_mtime_ns for path in paths}

    def _own(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.require_owned(self.folder)
        (self.folder / files.MARKER).touch()

    def _remove_images(self) -> None:
        ensure_running(self.config)
        client = connect()
        try:
            for name in self._image_names(client.images.list()):
                with contextlib.suppress(docker.errors.ImageNotFound):
                    client.images.remove(name, force=True)
        finally:
            client.close()

    def _image_names(self, images: Sequence[Image]) -> list[str]:
        prefix = f"{self.config.image.name}/"
        return sorted(tag for image in images for tag in image.tags if tag.startswith(prefix))


def size_of(tree: Path) -> int:
    """Bytes of content in a tree's files; a file with several names counts once."""
    seen: set[int] = set()
    total = 0
    for folder, _, names in os.walk(tree):
        for name in names:
            status = (Path(folder) / name).lstat()
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_size
    return total
