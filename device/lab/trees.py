"""Bring the exported trees of running boards up to date before a run tests these boards.

A running board's root filesystem is the exported tree, so the board uses the files that ``device.deploy`` installs in
the tree. All boards with the same architecture share a tree. A run therefore deploys to each tree only once, before the
suite starts on the first board that uses this tree. Otherwise, the tree could change while the suite runs on another
board.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from device.deploy import Deployed, deploy, library_of
from nfsroot.layout import Layout, require_export
from toolchain import files, process, progress
from toolchain.config import Config
from toolchain.errors import InUse, UserError

_POLL_S = 0.5


class Trees:
    """The exported trees that the boards of one run use. The class is thread-safe."""

    def __init__(self, targets: Iterable[Config] = ()) -> None:
        """``targets`` contains a configuration for each running board; it is empty if these boards are unknown."""
        self._running = frozenset(Layout.of(target).tree for target in targets)
        self._lock = threading.Lock()
        self._done: dict[Path, Deployed | UserError | OSError | None] = {}

    def bring(self, target: Config, *, running: bool) -> Deployed | None:
        """Deploy to a board's tree if running boards use this tree, but only once per run.

        The caller must hold the board.

        Returns None if the run boots the board (``running`` is false) or the tree's image was not built on this PC. For
        a running board, errors of ``deploy`` are raised. For a board that the run boots, these errors are ignored,
        because a deployment that fails leaves the tree unchanged.
        """
        tree = Layout.of(target).tree
        if not running and tree not in self._running:
            return None
        with self._lock:
            if tree not in self._done:
                self._done[tree] = _deployed(target)
            done = self._done[tree]
        if not running:
            return None
        if isinstance(done, Exception):
            raise done
        if done is None:
            progress.say(f"    skipping the deployment to {tree}: its image was not built on this PC")
        else:
            progress.say(f"    deployed to {tree}: {done.text}")
        return done


def _deployed(target: Config) -> Deployed | UserError | OSError | None:
    """Deploy the extension and the QPU library that the tree uses (libqpu or QPULib). Return the result or error."""
    try:
        layout = Layout.of(target)
        facts = require_export(layout).facts
        if not facts.get("deployed") and facts.get("built_image") != facts.get("image_id", ""):
            return None
        process.require_root("to write into the exported tree", "./inv test-on-pi")
        library = library_of(layout.tree) or target.qpu.library
        with _alone(target.target_root / "lab-deploy.lock"):
            done = deploy(replace(target, qpu=replace(target.qpu, library=library)))
    except (UserError, OSError) as fault:
        return fault
    for warning in done.warnings:
        progress.warn(warning)
    return done


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other run deploys to this tree, then hold its lock. Raises InUse if Ctrl-C interrupts the wait."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    busy = InUse(
        "interrupted while another run was deploying to the same tree",
        expected=f"no lock on {lock}",
        found="a lock",
        fix="run the task again when the other run has ended",
    )
    interrupted, shown = threading.Event(), False
    with contextlib.ExitStack() as stack:
        with process.on_interrupt(interrupted.set):
            while True:
                try:
                    stack.enter_context(files.held(lock, busy))
                    break
                except InUse:
                    if not shown:
                        progress.say(f"    waiting for another run that deploys to the same tree ({lock})")
                    shown = True
                    if interrupted.wait(_POLL_S):
                        raise
        yield
