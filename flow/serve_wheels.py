"""``serve-wheels``: serve this PC's wheels to pip on boards.

The index offers the wheels in the wheelhouses, the torch wheel that would be installed in the image
(recipes.torch.resolve), the matching torchvision and torchaudio wheels if they have been built, and the apache-tvm-ffi
wheel. Other torch wheels that fit the image are omitted, because pip would choose the newest one, and the board's torch
could differ from the image's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path

from images.flavour import load_suite
from recipes.companions import build as companions
from recipes.companions.locate import key_with
from recipes.torch import published, resolve
from recipes.tvm_ffi import locate as tvm_ffi
from toolchain import files, process, progress
from toolchain.addresses import server_address
from toolchain.config import Config
from toolchain.errors import ArtefactMissing, UserError
from wheels import find as wheels
from wheels.index import instructions, running_index, wheels_in
from wheels.wheelhouse import wheelhouses


class Offer:
    """The wheels to serve for a configuration.

    A call of an instance returns a mapping from the file names of the current wheels to their paths.

    An audit takes seconds, so the wheels for torch, torchvision, torchaudio and apache-tvm-ffi are chosen and audited
    again only if the available wheels have changed. If a wheel is damaged or was built for another machine, the
    constructor raises the same exceptions as ``resolve.resolve`` and ``tvm_ffi.find``; later calls skip such a wheel
    with a warning.
    """

    def __init__(self, config: Config) -> None:
        # Serve the other wheels even if the image requires torch and the torch wheel is missing.
        self._config = dataclasses.replace(config, torch=dataclasses.replace(config.torch, required=False))
        self._lock = threading.Lock()
        self._listing = self._list()
        self.torch = resolve.resolve(self._config)
        """The image's torch wheel, or the reason why there is none."""
        self._ffi = self._find_ffi()
        self._companions = self._find_companions()

    def __call__(self) -> dict[str, Path]:
        """Return the wheels to serve now."""
        with self._lock:
            listing = self._list()
            if listing != self._listing:
                self._choose_again()
                self._listing = listing
            ours = (self.torch.wheel, self._ffi, *self._companions)
            chosen = [path for path in ours if path is not None and not path.is_symlink()]
        left_out = self._fitting_torch()
        found = {name: path for name, path in wheels_in(wheelhouses(self._config)).items() if path not in left_out}
        return dict(sorted({**found, **{path.name: path for path in chosen}}.items()))

    def notes(self) -> list[str]:
        """Return one line for each torch wheel that is not served, with the reason."""
        if self.torch.wheel is None:
            return [f"torch is not served: {self.torch.reason}"]
        if self.torch.wheel.is_symlink():
            return [f"torch is not served: {self.torch.wheel} is a symbolic link; replace it with the wheel"]
        served = self()
        left_out = [path.name for path in self._fitting_torch() if served.get(path.name) != path]
        return [f"not served: {name}; the image's torch is {self.torch.wheel.name}" for name in left_out]

    def _choose_again(self) -> None:
        try:
            self.torch = resolve.resolve(self._config)
        except UserError as fault:
            self.torch = resolve.Resolution(None, "", fault.summary)
            progress.warn(f"torch is not served: {fault.summary}")
        try:
            self._ffi = self._find_ffi()
        except UserError as fault:
            self._ffi = None
            progress.warn(f"TVM's FFI is not served from the artefact cache: {fault.summary}")
        try:
            self._companions = self._find_companions()
        except UserError as fault:
            self._companions = ()
            progress.warn(f"torchvision and torchaudio are not served: {fault.summary}")

    def _find_ffi(self) -> Path | None:
        with contextlib.suppress(ArtefactMissing):
            return tvm_ffi.find(self._config)[0] if tvm_ffi.key(self._config) else None
        return None

    def _find_companions(self) -> tuple[Path, ...]:
        if key := key_with(self._config, self.torch):
            return companions.finished(self._config, key)[0]
        if self._config.image.companions and self.torch.wheel is not None:
            return tuple(companions.published_for(self._config, files.sha256_of(self.torch.wheel), fetch=False))
        return ()

    def _list(self) -> str:
        mine = companions.listing(self._config)
        fetched = [pin.file for pin in published.pins(self._config) if published.place(pin, self._config).is_file()]
        return f"{resolve.listing(self._config)}\n{tvm_ffi.listing(self._config)}\n{mine}\n{fetched}"

    def _fitting_torch(self) -> list[Path]:
        image = self._config.image
        tags = wheels.tags_for(image.target, load_suite(image.suite))
        return [item.path for item in wheels.candidates(wheelhouses(self._config), "torch", tags)[0]]


def serve_wheels(config: Config) -> None:
    """Print the commands for the board, and serve the wheels until Ctrl-C, SIGTERM or SIGHUP.

    Raises ArtefactMissing if there is no wheel, and the same exceptions as ``running_index``.
    """
    with progress.step("examine the wheels"):
        offer = Offer(config)
    names = list(offer())
    if not names:
        raise ArtefactMissing(
            "there is no wheel to serve",
            expected="a torch wheel for the image, or any wheel in " + ", ".join(map(str, wheelhouses(config))),
            found=offer.torch.reason,
            fix="run ./inv build-torch or ./inv build-wheel NAME==VERSION",
        )
    torch = offer.torch.wheel
    example = torch.name if torch is not None and torch.name in names else names[0]
    stop = threading.Event()
    address = config.wheels.address or server_address(config)
    with (
        process.stopped_by_signals(stop),
        running_index(offer, address=address, port=config.wheels.port) as url,
    ):
        for line in (*instructions(url, names, example), *offer.notes()):
            progress.say(line)
        while not stop.wait(0.5):
            pass
        progress.say("stopping the package index")
