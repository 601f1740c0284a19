"""Run code as an ordinary user, in a copy of the checkout that every user can read (root's home has mode 0700)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from toolchain.config import ROOT

USER = 65534
_LEFT_OUT = {"build", "wheelhouse"}


@pytest.fixture(scope="session")
def open_checkout() -> Iterator[Path]:
    """Copy the checkout, with an empty folder ``site-packages`` for its dependencies."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for program in ("setpriv", "unshare", "mount", "cp", "chmod"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    names = [path for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in _LEFT_OUT]
    with tempfile.TemporaryDirectory(prefix="pitorch-checkout-") as folder:
        checkout = Path(folder, "checkout")
        checkout.joinpath("site-packages").mkdir(parents=True)
        subprocess.run(["cp", "-a", "--", *names, checkout], check=True)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        yield checkout


def run_python(
    checkout: Path, *words: str, environment: Mapping[str, str], group: int = USER, limit_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy as an ordinary user who is also in ``group``.

    The checkout's dependencies are mounted on ``site-packages``, because copying and deleting them would take a minute.
    The test is skipped if that user cannot execute Python.
    """
    mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh"]
    mounted += [sysconfig.get_path("purelib"), str(checkout / "site-packages")]
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", f"--groups={group}"]
    python = Path(sys.executable).resolve()
    if subprocess.run([*drop, "test", "-x", python], check=False).returncode:
        pytest.skip(f"{python} cannot be executed by other users")
    return subprocess.run(
        [*mounted, *drop, python, *words],
        cwd=checkout,
        env={
            "PATH": os.environ["PATH"],
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": f"{checkout}:{checkout / 'site-packages'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
