"""Choose the compiler for the image's code: Debian's cross compiler, or the target's own compiler under emulation."""

from __future__ import annotations

from flow.context import Context
from images import native
from images.flavour import target_flavour
from toolchain import progress


def emulated_compiler_reason(context: Context) -> str:
    """Return the reason why the target's own compiler is needed, or "" if the code can be cross-compiled."""
    flavour = target_flavour(context.image)
    if not flavour.compiles_for:
        return ""
    return (
        f"{flavour.title}'s own compiler compiles code for this image under emulation, which takes seven to ten times "
        f"as long. Debian's cross compiler cannot be used, because it does not generate {flavour.compiles_for} code"
    )


def is_extension_cross_compiled(context: Context) -> bool:
    """Return whether the extension is cross-compiled in the builder image.

    Otherwise, it is compiled in a container for the target.
    """
    can_cross = context.target != context.native and not emulated_compiler_reason(context)
    return context.config.build.native_compiler and can_cross


def library_image(context: Context) -> str:
    """Return the role of the image in which libqpu is compiled.

    The setting ``build.native_compiler`` does not affect this choice.
    """
    return "dev" if emulated_compiler_reason(context) else "builder"


def native_compiler(context: Context) -> native.Mounts:
    """Return the mounts that provide the native cross compiler in containers of the development image.

    If the native compiler is disabled or cannot be used, the result contains no mounts.
    """
    if not is_extension_cross_compiled(context):
        return native.Mounts()
    return native.compiler_mounts(context.tools, context.farm, context.target, context.suite)


def newer_code_warning(context: Context, wheel: str) -> tuple[str, ...]:
    """Print and return a warning if ``wheel`` does not run on all CPUs that the image's distribution supports."""
    if not (older := target_flavour(context.image).compiles_for):
        return ()
    warning = f"{wheel} is not {older} code: it does not run on a Pi 1, whose CPU does not support newer code"
    progress.warn(warning)
    return (warning,)
