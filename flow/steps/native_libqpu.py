"""Build libqpu for this machine."""

from __future__ import annotations

from flow import native_environment
from flow.context import Context
from recipes import recipe
from recipes.libqpu import native
from toolchain import files, process
from toolchain.config import Config
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that compiles and installs the library with CMake."""
    data = recipe.load("libqpu")
    return Step(
        name="native-libqpu",
        title="native libqpu",
        code=__name__,
        inputs={"sources": data.fingerprint()},
        action=lambda _: _make(context.config),
    )


def _make(config: Config) -> Made:
    folder = native_environment.folder_of(config)
    tree = native.build(config, "tools/all")
    with files.scratch_folder(folder, "libqpu") as scratch:
        prefix = scratch / "prefix"
        with files.locked(tree):
            process.run(["cmake", "--install", tree, "--prefix", prefix], limit_s=300)
        files.remove(folder / "libqpu")
        prefix.rename(folder / "libqpu")
    library = (folder / "libqpu" / "lib" / "libqpu.so").resolve(strict=True)
    # The installed headers, tools and Python modules are part of the product: the extension and the tests use them.
    return Made(artefacts=(library,), facts={"installed": files.tree_fingerprint(folder / "libqpu")})
