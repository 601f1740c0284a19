"""The inputs of the root filesystems: packages, verified sources and overlays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flow.context import Context
from images import apt, probe, rootfs
from images.flavour import packages_for, packages_not_in, target_flavour
from images.recorded_sources import sources_of
from toolchain import files
from toolchain.architecture import Architecture
from toolchain.manifest import Manifest


def root_spec(
    context: Context, role: str, packages: tuple[str, ...], mirror: Manifest, architectures: tuple[Architecture, ...]
) -> rootfs.RootSpec:
    """Return a root's specification, with the sources that the manifest ``mirror`` lists as verified."""
    names = tuple(item.debian for item in architectures)
    flavour = target_flavour(context.image)
    is_foreign = flavour.name != "debian" and architectures == (context.target,)
    return rootfs.RootSpec(
        role=role,
        suite=context.image.suite,
        architectures=names,
        packages=packages,
        sources=apt.for_root(sources_of(mirror), context.image, names, packages),
        lists=context.root / "mirror" / "lists",
        archives=context.config.build_root / "archives" / f"{context.image.label}-{role}",
        source_date_epoch=context.epoch,
        split_usr=context.suite.split_usr,
        keyring_package=flavour.keyring_package if is_foreign else "debian-archive-keyring",
    )


def common_packages(context: Context) -> tuple[str, ...]:
    """Return the packages that the target root contains regardless of whether there is a torch wheel."""
    common = {
        *packages_for("base", context.image),
        *packages_for("board", context.image),
        *context.image.extra_packages,
    }
    if context.image.profile == "bootable":
        common |= set(packages_for("bootable", context.image))
    if context.image.card:
        common |= set(packages_for("card", context.image))
    if context.image.companions:
        common |= set(packages_for("companions", context.image))
    if context.image.ml_packages:
        common |= set(packages_for("ml_packages", context.image))
    if context.config.torch.source == "distribution":
        # The package python3-torch imports setuptools, but does not depend on it.
        common |= {"python3-torch", *context.suite.torch_python}
    if context.config.remote.ffi_in_image:
        common |= {*context.suite.torch_python}  # includes the packages that TVM's FFI imports
    return tuple(sorted(common))


def absent_warnings(context: Context) -> tuple[str, ...]:
    """Return a warning for each package that ``image.ml_packages`` requires but the distribution's release lacks."""
    absent = packages_not_in("ml_packages", context.image) if context.image.ml_packages else ()
    return tuple(f"{name} is NOT in the image: {context.image.suite} does not have it" for name in absent)


def target_spec(context: Context, needs: Mapping[str, Manifest]) -> rootfs.RootSpec:
    """Return the target root's specification; if there is a torch wheel, include the packages that torch requires."""
    torch = needs["torch"].facts
    with_torch = {*context.suite.torch_python} if torch["wheel"] else set()
    if torch["wheel"] and not torch["self-contained"]:
        with_torch |= {*context.suite.torch_libraries}
    packages = tuple(sorted({*common_packages(context), *with_torch}))
    return root_spec(context, "rootfs", packages, needs["mirror"], (context.target,))


def target_packages(context: Context) -> dict[str, str]:
    """Return the packages that ``target_spec`` may include, as inputs of a step."""
    return {
        "packages": " ".join(common_packages(context)),
        "torch packages": " ".join((*context.suite.torch_libraries, *context.suite.torch_python)),
    }


def unverified_pockets(context: Context, mirror: Manifest) -> list[str]:
    """Return the pockets that may contain packages for the target but whose index could not be verified."""
    verified = {(item.uri, item.pocket.suite) for item in sources_of(mirror)}
    configured = apt.sources_for(context.config, context.keyrings)
    wanted = apt.for_root(configured, context.image, (context.target.debian,), common_packages(context))
    return sorted({item.pocket.suite for item in wanted if (item.uri, item.pocket.suite) not in verified})


def overlays(context: Context, *others: str) -> tuple[Path, ...]:
    """Return the overlays for a target root: ``others``, and ``lean`` if the image excludes documentation."""
    names = [*([] if context.image.documentation else ["lean"]), *others]
    return tuple(rootfs.HERE / "overlay" / name for name in names)


def overlay_inputs(folders: Sequence[Path]) -> dict[str, str]:
    """Return the hashes of the overlays and of mmdebstrap's hooks, as inputs of a step."""
    return {
        "hook": files.tree_fingerprint(rootfs.HERE / "hooks"),
        "overlay": " ".join(f"{folder.name}:{files.tree_fingerprint(folder)}" for folder in folders) or "none",
    }


def mmdebstrap_inputs(context: Context) -> dict[str, str]:
    """Return the inputs of every step that runs mmdebstrap."""
    return {"epoch": str(context.epoch), "mmdebstrap": rootfs.program_fingerprint()}


def require_execution(context: Context) -> None:
    """Execute a small program for the target, to check that this PC can run such programs.

    Raises UserError if the program does not run.
    """
    if context.target != context.native and context.target.debian in probe.PROGRAMS:
        with files.scratch_folder(context.root / "work", "probe") as scratch:
            program = scratch / "probe"
            program.write_bytes(probe.PROGRAMS[context.target.debian]())
            program.chmod(0o755)
            rootfs.require_execution(context.target, program)
