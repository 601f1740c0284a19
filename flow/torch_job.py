"""``build-torch``: the steps from the mirror to a torch wheel in the wheelhouse.

::

    mirror ── torch-builder ──┬── torch-wheel
          └── torch-source ───┘

They share the main job's folder and mirror; only the wheel, and what goes with it, leaves it: to ``products``, beside
the provenance that says what it was made from, and only after its audit.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.start import ensure_running
from flow import main_steps as flow
from images import rootfs
from images.flavour import packages_for
from recipes import recipe
from recipes.torch import audit, provenance, resolve
from recipes.torch import build as building
from recipes.torch import source as sources
from toolchain import files, progress
from toolchain.config import Config
from toolchain.errors import ArtefactDamaged, UserError
from toolchain.manifest import Manifest, all_warnings
from toolchain.steps import Decision, Made, Pipeline, Step
from wheels import artefacts


@dataclass(frozen=True)
class Done:
    """A wheel that was built or found built: the manifests of the steps, which ran, and the seconds of the whole."""

    manifests: tuple[Manifest, ...]
    seconds: float

    @property
    def wheel(self) -> Manifest:
        """The last step's manifest."""
        return self.manifests[-1]

    @property
    def rows(self) -> list[progress.Row]:
        """Lines of the final table."""
        return [
            progress.row_of(made.path.name, made, item.seconds, _note(item) if made.path.suffix == ".whl" else "")
            for item in self.manifests
            if item.step in ("torch-source", "torch-wheel")
            for made in item.artefacts
        ]

    @property
    def warnings(self) -> list[str]:
        """Warnings of all steps."""
        return all_warnings(self.manifests)


class TorchFlow(flow.Flow):
    """The steps that build torch for one configuration."""

    def __init__(self, config: Config, *, again: bool = False) -> None:
        """With ``again`` the wheel is built, whatever the artefact cache has."""
        super().__init__(config)
        self._again = again
        self.recipe = recipe.load("torch")
        self.plan = building.Plan.of(self.recipe, config, self.suite)
        self.products = resolve.products(config)

    def pipeline(self, *, workbench: bool = False) -> Pipeline:
        """The steps; there is no workbench among them."""
        del workbench
        return Pipeline(self.root, (self._mirror(), self._torch_builder(), self._torch_source(), self._torch_wheel()))

    def _torch_builder(self) -> Step:
        packages = packages_for("torch_builder", self.image)

        def action(needs: Mapping[str, Manifest]) -> Made:
            spec = self.root_spec("torch-builder", packages, needs["mirror"], (self.native, self.target))
            tar = self.root / "torch-builder.tar"
            rootfs.build_native_tar(dataclasses.replace(spec, keyring_package=""), tar, self.log("torch-builder"))
            return self._loaded("torch-builder", tar, self.native)

        return Step(
            name="torch-builder",
            title="torch's builder image",
            inputs=self._root_inputs(packages),
            needs=("mirror",),
            action=action,
            missing=self._image_missing("torch-builder"),
        )

    def _torch_source(self) -> Step:
        kind = self.config.torch.source

        def action(needs: Mapping[str, Manifest]) -> Made:
            verified = flow.sources_of(needs["mirror"])
            folder = self.config.build_root / "sources"
            found = sources.obtain(self.recipe, self.suite, kind, verified, folder, self.log("torch-source"))
            facts = {"kind": found.kind, "folder": found.folder.name, "identity": found.identity, "files": found.files}
            return Made(facts=facts)

        return Step(
            name="torch-source",
            title="torch's source",
            inputs={"source": sources.identity(self.recipe, self.suite, kind)},
            needs=("mirror",),
            action=action,
            missing=lambda made: sources.missing(
                self.recipe, self.suite, kind, self.config.build_root / "sources" / made.facts["folder"]
            ),
        )

    def _torch_wheel(self) -> Step:
        kind = self.config.torch.source
        key = self.plan.key(sources.identity(self.recipe, self.suite, kind))

        def action(needs: Mapping[str, Manifest]) -> Made:
            found = self._source(needs["torch-source"])
            builder = self._builder_of(needs["torch-builder"], found)
            versions = builder.versions()
            whole_key = provenance.artefact_key(key, versions)
            if not self._again and (kept := artefacts.get(self.config, self.recipe.name, whole_key)):
                return self._from_cache(kept, key)
            began = time.time()
            with files.scratch_folder(self.root, "torch-wheel") as scratch:
                built = builder.build(scratch)
                seen = audit.examine(built.wheel, self.target, self.suite, flags=self.plan.flags)
                statement = provenance.write(
                    built,
                    self.plan,
                    found,
                    key=key,
                    versions=versions,
                    began=began,
                    path=provenance.beside(built.wheel),
                )
                placed = place([built.wheel, built.symbols, statement], self.products)
            artefacts.put(self.config, self.recipe.name, whole_key, placed, recipe=key)
            tidy(builder)
            return Made(
                placed,
                facts={
                    "key": key,
                    "wheel": built.wheel.name,
                    "elf files": seen.elf_files,
                    "newest symbols": dict(seen.newest),
                    "vendored": [item["name"] for item in built.vendored],
                    "ccache": {"hits": built.cache_hits, "calls": built.cache_calls},
                },
                warnings=seen.warnings,
            )

        return Step(
            name="torch-wheel",
            title="torch wheel from source",
            inputs={"key": key, "driver": flow.driver_fingerprint("torch")},
            needs=("torch-builder", "torch-source"),
            action=action,
            missing=lambda made: next(
                (
                    f"{item.path.name} is not the file that was made"
                    for item in made.artefacts
                    if files.sha256_of(item.path) != item.sha256
                ),
                "",
            ),
        )

    def _from_cache(self, kept: Sequence[Path], key: str) -> Made:
        """A wheel that the same recipe, compiler and packages made before, here or where it was pulled from."""
        (wheel,) = [path for path in kept if path.suffix == ".whl"]
        stated = provenance.read(provenance.beside(wheel), wheel).get("recipeKey")
        if stated != key:
            raise ArtefactDamaged(
                f"the provenance of the kept {wheel.name} speaks of another recipe than its place",
                expected=f"recipeKey {key}",
                found=str(stated or "none"),
                fix=f"delete {wheel.parent} and run the task again",
            )
        seen = audit.examine(wheel, self.target, self.suite, flags=self.plan.flags)
        with files.room_for(wheel.name, self.root), files.scratch_folder(self.root, "torch-wheel") as scratch:
            for path in kept:
                shutil.copyfile(path, scratch / path.name)
            placed = place([scratch / path.name for path in kept], self.products)
        progress.say(f"    {wheel.name}: from the artefact cache")
        return Made(
            placed,
            facts={
                "key": key,
                "wheel": wheel.name,
                "elf files": seen.elf_files,
                "newest symbols": dict(seen.newest),
                "cache": kept[0].parent.name,
            },
            warnings=seen.warnings,
        )

    def keep(self, made: Manifest) -> None:
        """Put the products into the artefact cache again where it no longer has them as they were made."""
        (wheel,) = [item.path for item in made.artefacts if item.path.suffix == ".whl"]
        key = made.facts["key"]
        whole_key = made.facts.get("cache") or provenance.artefact_key(key, provenance.versions_of(wheel))
        try:
            if artefacts.get(self.config, self.recipe.name, whole_key):
                return
        except ArtefactDamaged as fault:
            progress.warn(f"{fault.summary}; it is put there anew")
        artefacts.put(self.config, self.recipe.name, whole_key, [item.path for item in made.artefacts], recipe=key)
        progress.say(f"    {wheel.name}: put into the artefact cache again, without building it")

    def _source(self, made: Manifest) -> sources.Source:
        return sources.Source(
            kind=made.facts["kind"],
            folder=self.config.build_root / "sources" / made.facts["folder"],
            identity=made.facts["identity"],
            files=made.facts["files"],
        )

    def _builder_of(self, image: Manifest, source: sources.Source) -> building.Builder:
        reference = self.config.image_reference("torch-builder")
        return building.Builder(
            self.client, reference, image.facts["image"], self.plan, source, self.log("torch-wheel")
        )

    def builder(self) -> building.Builder:
        """The builder, after the steps before the wheel were brought up to date. Raises as they do."""
        pipeline = self.pipeline()
        decisions = [item for item in pipeline.plan() if item.step.name != "torch-wheel"]
        made = {item.step: item for item in pipeline.execute(decisions)}
        return self._builder_of(made["torch-builder"], self._source(made["torch-source"]))


def place(made: Sequence[Path], folder: Path) -> tuple[Path, ...]:
    """Move a wheel and what belongs to it into a folder of the same disk; where they are now.

    An earlier statement goes first and the new one comes last: wherever this ends, no statement there speaks of another
    wheel, and a wheel without one is not taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(made, key=lambda path: path.name.endswith(artefacts.PROVENANCE))
    for path in ordered:
        if path.name.endswith(artefacts.PROVENANCE):
            files.remove(folder / path.name)
    for path in ordered:
        path.replace(folder / path.name)
    return tuple(folder / path.name for path in made)


def tidy(builder: building.Builder) -> None:
    """Remove the trees that a finished build takes the place of, up to 9 GB each, and tell of others."""
    replaced, others = builder.older()
    for tree in replaced:
        size = progress.human_size(files.size_of(tree.home))
        try:
            tree.discard()
            progress.say(f"    an older build tree is removed: {tree.home} ({size}); ccache keeps its objects")
        except (OSError, UserError) as fault:
            progress.warn(f"an older build tree stays: {tree.home} ({size}): {fault}")
    if others:
        told = ", ".join(f"{tree.home.name} ({progress.human_size(files.size_of(tree.home))})" for tree in others)
        progress.say(f"    other build trees of torch lie in {builder.home.parent}: {told}; what you need no more,")
        progress.say(f"    remove by sudo rm -r {builder.home.parent}/NAME")


def _note(made: Manifest) -> str:
    """Where a wheel's bytes come from: the artefact cache, or the compiler and its cache."""
    if "cache" in made.facts:
        return "from the artefact cache"
    used = made.facts.get("ccache", {"hits": 0, "calls": 0})
    if not used["calls"]:
        return ""
    share = 100 * used["hits"] / used["calls"]
    # All is said of all alone.
    told = f"{min(share, 99.9):.1f}" if 99 <= share < 100 else f"{share:.0f}"
    return f"ccache answered {used['hits']} of {used['calls']} compiler calls ({told} %)"


def plan(config: Config, *, again: bool = False) -> list[Decision]:
    """Which steps would run, and why; ``again`` as in ``build_torch``."""
    with TorchFlow(config) as made:
        return _plan(made, again=again)


def build_torch(config: Config, *, again: bool = False) -> Done:
    """Build the wheel, or say that nothing changed. Raises a UserError of the step that failed.

    With ``again`` it is built from source although one is at hand: ``verify`` and ``bench`` need the tree of a build.
    """
    began = time.monotonic()
    ensure_running(config)
    with flow.alone(config.target_root), TorchFlow(config, again=again) as made:
        manifests = made.pipeline().execute(_plan(made, again=again))
        made.keep(manifests[-1])
    return Done(tuple(manifests), time.monotonic() - began)


def _plan(made: TorchFlow, *, again: bool) -> list[Decision]:
    return made.pipeline().plan(force=frozenset({"torch-wheel"} if again else ()))
