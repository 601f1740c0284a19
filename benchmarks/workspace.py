"""The separate build folder and image names of the benchmarks.

The workspace's ``image.source_date_epoch`` differs from the configured value by one second. If the values were
equal, the engine might already contain an identical root filesystem, and a clean build would skip loading it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
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
from toolchain.errors import InUse, PlatformMismatch
from toolchain.manifest import Manifest
from toolchain.steps import MANIFEST_SUFFIX
from wheels.wheelhouse import wheelhouses


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The benchmarks' configuration, and their folder for results.

    The benchmarks have their own build folder and image name. ``times`` is the number of repetitions of short
    measurements. ``against`` is the path of the second wheel that the benchmark ``cpu`` measures.
    """

    config: Config
    results: Path
    user: Config
    times: int = 3
    against: str = ""

    @classmethod
    def of(cls, user: Config, *, times: int = 3, against: str = "") -> Workspace:
        """Return the workspace in the user's build folder."""
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
        return cls(config=config, results=results, user=user, times=times, against=against)

    @property
    def folder(self) -> Path:
        """The folder with build products and logs, which ``clean`` removes."""
        return self.config.build_root

    @property
    def _settings(self) -> Path:
        return self.folder / "settings.json"

    def require_target(self, benchmark: str, *supported: str) -> None:
        """Raise PlatformMismatch unless ``image.architecture`` is one of the supported architectures."""
        found = self.config.image.architecture
        if found not in supported:
            raise PlatformMismatch(
                f"the benchmark '{benchmark}' does not support this target",
                expected=f"image.architecture: {' or '.join(supported)}",
                found=found,
                fix=f"run ./inv bench --name={benchmark} --architecture={supported[0]}",
            )

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make a task use the workspace's configuration."""
        return {"INVOKE_RUNTIME_CONFIG": str(self._settings)}

    def task(self, *words: str, cwd: Path = ROOT) -> Observed:
        """Run a task in the workspace in a separate process. Raises CommandFailed."""
        log = self.results / "logs" / f"{words[0]}.log"
        return observe(words, environment=self.environment(), log=log, cwd=cwd)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the workspace and create its folder. Raises InUse or UserError."""
        self.results.mkdir(parents=True, exist_ok=True)
        taken = InUse(
            f"other benchmarks are running in {self.results}",
            expected="one run at a time, because parallel runs interfere with each other",
            found="a lock that another run holds",
            fix="wait for the other run, or stop it",
        )
        with files.held(self.results / "lock", taken):
            self._create_folder()
            yield

    def ensure_built(self) -> None:
        """Bring the workspace's image up to date without measuring the build."""
        self._create_folder()
        with progress.step("build the image (not timed)"):
            main_job.build_image(self.config)

    def ensure_workbench(self) -> None:
        """Bring the image, the development root and the development image up to date."""
        self.ensure_built()
        with progress.step("build the development image (not timed)"):
            main_job.ready_workbench(self.config)

    def clean(self) -> None:
        """Remove all products built in the workspace, including images. Raises UserError."""
        if self.folder.exists():
            files.require_owned(self.folder)
            files.remove(self.folder)
        self._remove_images()
        self._create_folder()

    def drop(self) -> None:
        """Clean the workspace and remove its folder."""
        self.clean()
        files.remove(self.folder)

    def manifests(self) -> dict[str, Manifest]:
        """Return the manifests of all steps, by the names of the steps."""
        paths = sorted(self.config.target_root.glob(f"*{MANIFEST_SUFFIX}"))
        return {found.step: found for path in paths if (found := Manifest.read(path)) is not None}

    def stamps(self) -> dict[str, int]:
        """Return the modification time of each step's manifest. Running a step changes this time."""
        paths = self.config.target_root.glob(f"*{MANIFEST_SUFFIX}")
        return {path.name: path.stat().st_mtime_ns for path in paths}

    def _create_folder(self) -> None:
        """Create the folder, with the configuration for tasks. Raises UserError if the folder is not pitorch's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.require_owned(self.folder)
        (self.folder / files.MARKER).touch()
        # A file, because it overrides invoke.yaml and can store list entries that contain commas.
        text = json.dumps(dataclasses.asdict(self.config), default=str)
        files.write_text_atomically(self._settings, text, mode=0o600)  # settings can contain passwords

    def _remove_images(self) -> None:
        ensure_running(self.config)
        with contextlib.closing(connect()) as client:
            for name in self._image_names(client.images.list()):
                with contextlib.suppress(docker.errors.ImageNotFound):
                    client.images.remove(name, force=True)

    def _image_names(self, images: Sequence[Image]) -> list[str]:
        prefix = f"{self.config.image.name}/"
        return sorted(tag for image in images for tag in image.tags if tag.startswith(prefix))


def size_of(tree: Path) -> int:
    """Return the total size in bytes of a tree's files. A file with several hard links counts once."""
    seen: set[int] = set()
    total = 0
    for folder, _, names in os.walk(tree):
        for name in names:
            status = (Path(folder) / name).lstat()
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_size
    return total
