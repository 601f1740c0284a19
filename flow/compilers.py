"""Which compiler generates the code of the image: Debian's cross compiler, or the emulated compiler of the target."""

from __future__ import annotations

from flow.context import Context
from images.flavour import target_flavour
from toolchain import progress


def emulated_compiler_reason(context: Context) -> str:
    """Why only the target's own compiler can be used; empty if Debian's cross compiler can be used."""
    flavour = target_flavour(context.image)
    if not flavour.compiles_for:
        return ""
    return (
        f"code for this image is compiled by {flavour.title}'s own compiler under emulation, which takes seven to ten "
        f"times as long: it generates {flavour.compiles_for} code, and Debian's cross compiler does not"
    )


def is_extension_cross_compiled(context: Context) -> bool:
    """Whether the extension is cross-compiled in the builder image instead of built in a container of the target."""
    can_cross = context.target != context.native and not emulated_compiler_reason(context)
    return context.config.build.native_compiler and can_cross


def library_image(context: Context) -> str:
    """Role of the image in which libqpu is compiled. The setting ``build.native_compiler`` does not affect it."""
    return "dev" if emulated_compiler_reason(context) else "builder"


def newer_code_warning(context: Context, wheel: str) -> tuple[str, ...]:
    """If a cross-compiled wheel requires a newer CPU than the image, print and return a warning."""
    if not (older := target_flavour(context.image).compiles_for):
        return ()
    warning = f"{wheel} is not {older} code: it does not run on a Pi 1, whose CPU does not support newer code"
    progress.warn(warning)
    return (warning,)
