"""Extract native programs: replacements for emulated programs, and the cross compiler."""

from __future__ import annotations

from collections.abc import Mapping

from flow import roots
from flow.context import Context
from images import rootfs
from images.flavour import packages_for
from toolchain.manifest import Manifest
from toolchain.steps import Made, Step


def step(context: Context) -> Step:
    """Return the step that extracts the packages of native programs into one folder."""
    standing_in = packages_for("standing_in", context.image)
    others = {name for role in ("depmod", "compiler", "builder") for name in packages_for(role, context.image)}
    packages = (*standing_in, *sorted(others - {*standing_in}))
    without = packages_for("not_among_tools", context.image)
    architectures = (context.native, *([context.target] if context.target != context.native else []))

    def action(needs: Mapping[str, Manifest]) -> Made:
        spec = roots.root_spec(context, "tools", packages, needs["mirror"], architectures)
        rootfs.build_tools(spec, context.tools, context.log("tools"), standing_in=standing_in, without=without)
        programs = (context.tools / rootfs.STANDING_IN).read_text().split()
        # The list of packages is also recorded, because the builder image must change even if an added package contains
        # only headers and no programs.
        return Made(facts={"programs": programs, "packages": list(packages)})

    return Step(
        name="tools",
        title="native tools",
        code=__name__,
        inputs={"packages": " ".join(packages), "without": " ".join(without)},
        needs=("mirror",),
        action=action,
        missing=lambda _: "" if (context.tools / rootfs.STANDING_IN).is_file() else "its folder is missing",
    )
