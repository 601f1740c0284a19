"""CMake options that set the compilers and the installation folder."""

from __future__ import annotations

from toolchain.architecture import Architecture


def compile_options(target: Architecture, prefix: str, *, cross: bool) -> list[str]:
    """Return options that set the installation prefix and, if ``cross`` is true, the builder image's cross compiler."""
    if cross:
        return cross_options(target, prefix)
    settings = {"CMAKE_BUILD_TYPE": "Release", "CMAKE_INSTALL_PREFIX": prefix, "CMAKE_INSTALL_LIBDIR": "lib"}
    return [f"-D{name}={value}" for name, value in settings.items()]


def cross_options(target: Architecture, prefix: str) -> list[str]:
    """Return options that select the builder image's cross compiler and set the installation prefix."""
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.wheel_platform.removeprefix("linux_"),
        "CMAKE_CXX_COMPILER": f"{target.gnu}-g++",
        "CMAKE_STRIP": f"/usr/bin/{target.gnu}-strip",
        "CMAKE_FIND_ROOT_PATH_MODE_PROGRAM": "NEVER",
        "CMAKE_LIBRARY_ARCHITECTURE": target.gnu,
        "CMAKE_INSTALL_PREFIX": prefix,
        "CMAKE_INSTALL_LIBDIR": "lib",
    }
    return [f"-D{name}={value}" for name, value in settings.items()]
