"""A build backend: setuptools, with access to the interpreter's installed packages.

By default, ``pip wheel .`` isolates a build from the installed packages, so it would download torch. The downloaded
version could differ from the installed one, and no index provides torch for armv7. This backend restores access to the
folders that the interpreter itself searches, so that plain ``pip wheel .`` works without a network.
"""

import os
import site
import sys
import sysconfig

for _folder in (*site.getsitepackages(), sysconfig.get_path("platlib"), site.getusersitepackages()):
    if _folder not in sys.path:
        site.addsitedir(_folder)


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:  # noqa: ARG001
    """Return no requirements: if setuptools were asked for them, it would run setup.py and import torch once more."""
    return []


def build_wheel(
    wheel_directory: str, config_settings: dict[str, str] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel into a folder and return its file name. Exits with an error message if a package is missing."""
    try:
        if "TORCH_FILES" not in os.environ:  # see setup.py
            import torch  # noqa: F401
        from setuptools import build_meta
    except ModuleNotFoundError as fault:
        sys.exit(
            f"pitorch-qpu-ops is built against the installed torch, and the Python package {fault.name} is missing\n"
            f"  expected: torch and setuptools installed for {sys.executable}\n"
            f"  found:    no module named {fault.name}\n"
            f"  fix:      run {sys.executable} -m pip install torch setuptools"
        )
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
