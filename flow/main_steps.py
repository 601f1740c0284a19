"""The main job as steps: pins and config → images → recipes → system image.

::

    mirror ─┬── tools ──┬── builder ─── libqpu ───┬── qpu-ops ──┬── system
            │           ├── torch-site ─┬─────────┘             │
            └── archives ── rootfs ─────┴── base ───────────────┘
                        └── dev ────── workbench
    torch ───── torch-site, archives

The development root and the workbench are made for whom they are for: shells, and wheels that are built in the target's
own container. The extension's wheel is one of those when the native compiler is switched off. Where the target's own
compiler makes other code than the cross compiler, the library is compiled there too.

Every step's manifest lies in the target's folder of the build folder; its artefacts lie beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import docker
import docker.errors

from engine.connect import ENGINE_ERRORS, connect
from flow import layers as composed
from images import apt, archive, native, probe, rootfs, system
from images.flavour import Pocket, load_suite, packages_for, target_flavour
from recipes import recipe
from recipes.libqpu import build as libqpu
from recipes.qpu_ops import target as qpu_ops
from recipes.qpulib import build as qpulib
from recipes.torch import resolve
from recipes.tvm_ffi import kept as tvm_ffi
from recipes.tvm_server import build as tvm_server
from toolchain import files, leftovers, progress
from toolchain.architecture import Architecture, host_architecture
from toolchain.config import ROOT, Config
from toolchain.errors import CommandFailed, EngineUnavailable, ServerFailed
from toolchain.manifest import Artefact, Manifest
from toolchain.process import run
from toolchain.steps import Made, Pipeline, Step
from wheels import byte_code as pyc
from wheels import find as wheels

ROOTS = ("tools", "builder", "dev", "rootfs")
"""Steps whose files have owners: root alone can make them."""
NO_ENGINE = "no engine answers"
MODULES = ("dot_cpp", "matrix_cpp", "cpu_cpp")
"""What the extension wheel brings; imported in the finished image before it is called built."""

_SCRATCH = re.compile(r"\.[\w-]+(?:\.tar)?\.(?:[a-z0-9_]{8}|\d+\.scratch)")
_PART = re.compile(r"\.[\w-]+\.tar\.\d+\.part(?:\.tar)?")
"""Names of what a build writes aside (toolchain.files) in its target's folder."""
_SCRATCH_IN = {"work": ("probe", "qpu-ops", "tvm-ffi", "wheel"), "mirror": ("pockets",)}
"""What scratch folders are named after in folders of the target's, where tasks work that are no build too."""
_SCRATCH_BESIDE = {"archives": ("apt",), "sources": ("apt", "pytorch", "tvm-ffi")}
"""The same in the folders that builds of all targets share."""


class Flow:
    """Builds the steps for one configuration.

    The engine is first asked when a step or a probe needs it; leaving the context closes the connection. With
    ``reuse`` a step may bring an earlier build of its own up to date: the product is the same, the way is shorter.
    """

    def __init__(self, config: Config, *, reuse: bool = False) -> None:
        self.config = config
        self.reuse = reuse
        self.image = config.image
        self.target = config.image.target
        self.suite = load_suite(config.image.suite)
        self.root = config.target_root
        self.native = host_architecture()
        self._client: docker.DockerClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def client(self) -> docker.DockerClient:
        """The engine. Raises EngineUnavailable."""
        if self._client is None:
            self._client = connect()
        return self._client

    @property
    def crossed(self) -> bool:
        """Whether the extension's wheel is cross-compiled in the builder image, and not in the target's container."""
        return self.config.build.native_compiler and self.target != self.native and not self.own_compiler

    @functools.cached_property
    def own_compiler(self) -> str:
        """Why only the target's own compiler makes what gets into the image; empty: the cross compiler does."""
        flavour = target_flavour(self.image)
        if not flavour.compiles_for:
            return ""
        return (
            f"what is compiled for this image is compiled by {flavour.title}'s own compiler, emulated, which takes "
            f"seven to ten times as long: it makes {flavour.compiles_for} code, and Debian's cross compiler does not"
        )

    def pipeline(self, *, workbench: bool = False) -> Pipeline:
        """All steps, in the order of the data flow; ``workbench`` adds what is needed for shells in the target."""
        steps = (
            self._mirror(),
            self._tools(),
            self._builder(),
            *([self._dev()] if workbench or not self.crossed else []),
            self._torch(),
            self._archives(),
            self._torch_site(),
            self._rootfs(),
            self._base(),
            self._libqpu(),
            self._qpu_ops(),
            *([self._tvm_server()] if self.config.remote.server_in_image else []),
            *([self._tvm_ffi()] if self.config.remote.ffi_in_image else []),
            self._system(),
        )
        return Pipeline(self.root, (*steps, self._workbench()) if workbench else steps)

    # Paths that steps share.

    @property
    def keyrings(self) -> Path:
        """Keys of archives that no package brings."""
        return self.config.build_root / "keys"

    @property
    def tools(self) -> Path:
        """Native programs."""
        return self.root / "tools"

    @property
    def farm(self) -> Path:
        """Links for the native compiler inside dev containers."""
        return self.root / "farm"

    @property
    def torch_site(self) -> Path:
        """torch, unpacked as in the target root."""
        return self.root / "torch-site"

    @property
    def libqpu_stage(self) -> Path:
        """libqpu, unpacked as in the target root."""
        return self.root / "libqpu"

    def log(self, name: str) -> Path:
        """A step's log."""
        return self.root / "logs" / f"{name}.log"

    def compiler(self) -> native.Mounts:
        """The native compiler for containers of the dev image; nothing when it is switched off."""
        if not self.config.build.native_compiler or self.target == self.native or self.own_compiler:
            return native.Mounts()
        return native.compiler_mounts(self.tools, self.farm, self.target, self.suite)

    # The steps.

    @functools.cached_property
    def sources(self) -> tuple[apt.Source, ...]:
        """Every pocket that is wanted, verified or not."""
        return apt.sources_for(self.config, self.keyrings)

    def left_out(self, mirror: Manifest) -> list[str]:
        """Pockets that the target's packages would come from too, had their index been verified; by suite."""
        verified = {(item.uri, item.pocket.suite) for item in sources_of(mirror)}
        mine = apt.for_root(self.sources, self.image, (self.target.debian,), self._common_packages)
        return sorted({item.pocket.suite for item in mine if (item.uri, item.pocket.suite) not in verified})

    def _mirror(self) -> Step:
        def gone() -> str:
            if not all(item.keyring.is_file() for item in self.sources if item.keyring.parent == self.keyrings):
                return "a key of its archives is gone"
            return "" if (self.root / "mirror" / "lists").is_dir() else "its package lists are gone"

        def action(_: Mapping[str, Manifest]) -> Made:
            apt.fetch_keys(self.config, self.keyrings)
            verified = apt.verify(self.sources, self.root / "mirror", strict=self.image.strict)
            for warning in verified.warnings:
                progress.warn(warning)
            return Made(
                facts={
                    "indices": verified.indices,
                    "sources": [_source_record(item) for item in verified.sources],
                    "names": verified.names,
                },
                warnings=verified.warnings,
            )

        return Step(
            name="mirror",
            title="apt mirror",
            inputs={
                "sources": "; ".join(item.line for item in self.sources),
                "strict": str(self.image.strict),
                **({"limits": limits} if (limits := _limits(self.sources)) else {}),
            },
            action=action,
            missing=lambda _: gone(),
        )

    def root_spec(
        self, role: str, packages: tuple[str, ...], mirror: Manifest, architectures: tuple[Architecture, ...]
    ) -> rootfs.RootSpec:
        """What a root of a role is built from, out of the mirror as it was verified."""
        names = tuple(item.debian for item in architectures)
        flavour = target_flavour(self.image)
        foreign_flavour = flavour.name != "debian" and architectures == (self.target,)
        return rootfs.RootSpec(
            role=role,
            suite=self.image.suite,
            architectures=names,
            packages=packages,
            sources=apt.for_root(sources_of(mirror), self.image, names, packages),
            lists=self.root / "mirror" / "lists",
            archives=self.config.build_root / "archives" / f"{self.image.label}-{role}",
            source_date_epoch=self.image.source_date_epoch,
            split_usr=self.suite.split_usr,
            keyring_package=(flavour.keyring_package if foreign_flavour else "debian-archive-keyring"),
        )

    def _tools(self) -> Step:
        standing_in = packages_for("standing_in", self.image)
        others = {name for role in ("depmod", "compiler", "builder") for name in packages_for(role, self.image)}
        packages = (*standing_in, *sorted(others - {*standing_in}))
        without = packages_for("not_among_tools", self.image)
        architectures = (self.native, self.target) if self.target != self.native else (self.native,)

        def action(needs: Mapping[str, Manifest]) -> Made:
            spec = self.root_spec("tools", packages, needs["mirror"], architectures)
            rootfs.build_tools(spec, self.tools, self.log("tools"), standing_in=standing_in, without=without)
            programs = (self.tools / rootfs.STANDING_IN).read_text().split()
            # The packages too: one that brings headers alone must reach the builder image.
            return Made(facts={"programs": programs, "packages": list(packages)})

        return Step(
            name="tools",
            title="native tools",
            inputs={
                "packages": " ".join(packages),
                "without": " ".join(without),
                "driver": made_by("images/rootfs.py", "images/apt.py"),
            },
            needs=("mirror",),
            action=action,
            missing=lambda _: "" if (self.tools / rootfs.STANDING_IN).is_file() else "its folder is gone",
        )

    def _builder(self) -> Step:
        def action(_: Mapping[str, Manifest]) -> Made:
            tar = self.root / "builder.tar"
            rootfs.pack_tools(self.tools, tar, epoch=self.image.source_date_epoch)
            return self._loaded("builder", tar, self.native)

        return Step(
            name="builder",
            title="native builder image",
            inputs={
                "epoch": str(self.image.source_date_epoch),
                "left out": " ".join(rootfs.LEFT_OUT),
                "packing": made_by("images/rootfs.py", "images/archive.py", "toolchain/files.py"),
            },
            needs=("mirror", "tools"),
            action=action,
            missing=self._image_missing("builder"),
        )

    def _dev(self) -> Step:
        packages = tuple(
            sorted(
                {
                    *packages_for("base", self.image),
                    *packages_for("dev", self.image),
                    *self.suite.torch_libraries,
                    *self.suite.torch_python,
                    *self.image.extra_packages,
                }
            )
        )

        def action(needs: Mapping[str, Manifest]) -> Made:
            self._require_execution()
            spec = self.root_spec("dev", packages, needs["mirror"], (self.target,))
            spec = dataclasses.replace(spec, overlays=self.overlays())
            tar = self.root / "dev.tar"
            rootfs.build_tar(self._with_tools(spec), tar, self.log("dev"))
            if self.target != self.native:
                native.make_farm(self.farm, tar, self.target, self.suite)
            made = self._loaded("dev", tar, self.target)
            if not self.own_compiler:
                return made
            progress.warn(self.own_compiler)
            return dataclasses.replace(made, warnings=(self.own_compiler,))

        return Step(
            name="dev",
            title="development root",
            inputs={
                **self._root_inputs(packages),
                "hook": _hook_fingerprint(),
                "overlay": _fingerprint_of(self.overlays()),
                "farm": made_by("images/native.py"),
            },
            needs=("mirror", "tools"),
            action=action,
            missing=self._image_missing("dev"),
        )

    def _torch(self) -> Step:
        def action(_: Mapping[str, Manifest]) -> Made:
            found = resolve.resolve(self.config)
            if found.wheel is None:
                warning = f"the image is built WITHOUT torch: {found.reason}"
                progress.warn(warning)
                return Made(facts={"wheel": "", "version": ""}, warnings=(warning,))
            progress.say(f"    torch {found.version}: {found.reason}")
            found = dataclasses.replace(found, warnings=(*found.warnings, *self._cross_compiled("torch's wheel")))
            facts = {
                "wheel": str(found.wheel),
                "version": found.version,
                "sha256": resolve.identity(found),
                "from": found.reason,
                "self-contained": found.self_contained,
            }
            return Made(facts=facts, warnings=found.warnings)

        def missing(made: Manifest) -> str:
            wheel = Path(made.facts["wheel"])
            if not made.facts["wheel"]:
                return ""
            if not wheel.is_file():
                return f"{wheel} is gone"
            return "" if files.sha256_of(wheel) == made.facts["sha256"] else f"{wheel} is not the file that was taken"

        return Step(
            name="torch",
            title="torch wheel",
            inputs={
                "recipe": recipe.load("torch").fingerprint(),
                "wheelhouse": resolve.listing(self.config),
                "python": self.suite.python,
                "required": str(self.config.torch.required),
                "from source": str(self.config.torch.from_source),
            },
            action=action,
            missing=missing,
        )

    def _torch_site(self) -> Step:
        tar = self.root / "torch-site.tar"

        def action(needs: Mapping[str, Manifest]) -> Made:
            wheel = needs["torch"].facts["wheel"]
            if not wheel:
                return Made(facts={"version": ""})
            self._stage_wheel(Path(wheel), self.torch_site, tar)
            return Made((tar,), facts={"version": needs["torch"].facts["version"]})

        return Step(
            name="torch-site",
            title="torch, unpacked",
            inputs={"epoch": str(self.image.source_date_epoch), "python": self.suite.python, "staging": _staging()},
            needs=("tools", "torch"),
            action=action,
            missing=lambda made: "its folder is gone" if made.artefacts and not self.torch_site.is_dir() else "",
        )

    @functools.cached_property
    def _common_packages(self) -> tuple[str, ...]:
        """What is in the target's root, with torch or without."""
        common = {
            *packages_for("base", self.image),
            *packages_for("board", self.image),
            *self.image.extra_packages,
        }
        if self.image.profile == "bootable":
            common |= set(packages_for("bootable", self.image))
        if self.config.remote.ffi_in_image:
            common |= {*self.suite.torch_python}  # what it imports is among what torch does
        return tuple(sorted(common))

    def _rootfs_spec(self, needs: Mapping[str, Manifest]) -> rootfs.RootSpec:
        torch = needs["torch"].facts
        with_torch = {*self.suite.torch_python} if torch["wheel"] else set()
        if torch["wheel"] and not torch["self-contained"]:
            with_torch |= {*self.suite.torch_libraries}
        packages = tuple(sorted({*self._common_packages, *with_torch}))
        return self.root_spec("rootfs", packages, needs["mirror"], (self.target,))

    def _packages_inputs(self) -> dict[str, str]:
        return {
            "packages": " ".join(self._common_packages),
            "torch packages": " ".join((*self.suite.torch_libraries, *self.suite.torch_python)),
        }

    def _archives(self) -> Step:
        def action(needs: Mapping[str, Manifest]) -> Made:
            return Made(facts={"packages": list(rootfs.download(self._rootfs_spec(needs), self.log("archives")))})

        return Step(
            name="archives",
            title="packages, fetched",
            inputs={**self._packages_inputs(), "driver": made_by("images/rootfs.py", "images/apt.py")},
            needs=("mirror", "torch"),
            action=action,
        )

    def _rootfs(self) -> Step:
        overlays = self.overlays(*(["bootable"] if self.image.profile == "bootable" else []))

        def action(needs: Mapping[str, Manifest]) -> Made:
            self._require_execution()
            fetched = tuple(needs["archives"].facts.get("packages", ()))  # absent from manifests that are older than it
            spec = dataclasses.replace(self._rootfs_spec(needs), overlays=overlays, fetched=fetched)
            tar = self.root / "rootfs.tar"
            rootfs.build_tar(self._with_tools(spec), tar, self.log("rootfs"))
            made = self._loaded("rootfs", tar, self.target)
            return dataclasses.replace(made, facts={**made.facts, "left_out": self.left_out(needs["mirror"])})

        return Step(
            name="rootfs",
            title="root filesystem",
            inputs={
                **self._packages_inputs(),
                **self._roots_driver(),
                "epoch": str(self.image.source_date_epoch),
                "hook": _hook_fingerprint(),
                "overlay": _fingerprint_of(overlays),
            },
            # The packages are fetched before, while the native tools are made; what is missing then, it fetches itself.
            needs=("mirror", "tools", "torch", "archives"),
            action=action,
            missing=self._image_missing("rootfs"),
        )

    @property
    def _library_role(self) -> str:
        """Where the library is compiled: in the builder, whether the native compiler is switched off or not."""
        return "dev" if self.own_compiler else "builder"

    def _libqpu(self) -> Step:
        return self._upstream() if self.config.qpu.library == "upstream" else self._own()

    def _upstream(self) -> Step:
        data = recipe.load("qpulib")
        tar = self.root / "libqpu.tar"
        variant = qpulib.Variant.of(self.config)
        role = self._library_role

        def action(needs: Mapping[str, Manifest]) -> Made:
            builder, image_id = self.config.image_reference(role), needs[role].facts["image"]
            log = self.log("libqpu")
            source = qpulib.obtain(data, self.config)
            cross = role == "builder"
            qpulib.build(self.client, builder, image_id, data, source, self.config, tar, log, cross=cross)
            _unpack(tar, self.libqpu_stage)
            warnings = (
                f"the image holds upstream QPULib ({variant.label}) in our libqpu's place: it has no qpu-info and no "
                "qpu-selftest",
                *([source.warning] if source.warning else []),
            )
            for warning in warnings:
                progress.warn(warning)
            library = f"QPULib {source.commit or 'of unknown commit'}, {variant.label}"
            return Made((tar,), {"prefix": data.settings["prefix"], "own": False, "library": library}, warnings)

        return Step(
            name="libqpu",
            title=data.title,
            inputs={
                "library": "upstream",
                "mode": variant.label,
                "source": qpulib.identity(data, self.config),
                "recipe": data.fingerprint(),
                "driver": driver_fingerprint("qpulib"),
            },
            needs=(role,),
            action=action,
            missing=lambda _: "" if self.libqpu_stage.is_dir() else "its folder is gone",
        )

    def _own(self) -> Step:
        data = recipe.load("libqpu")
        tar = self.root / "libqpu.tar"
        role = self._library_role

        def action(needs: Mapping[str, Manifest]) -> Made:
            builder, image_id = self.config.image_reference(role), needs[role].facts["image"]
            log = self.log("libqpu")
            libqpu.build(self.client, builder, image_id, data, self.config, tar, log, cross=role == "builder")
            _unpack(tar, self.libqpu_stage)
            return Made((tar,), facts={"prefix": data.settings["prefix"], "own": True, "library": "libqpu"})

        return Step(
            name="libqpu",
            title=data.title,
            inputs={"library": "local", "sources": data.fingerprint(), "driver": driver_fingerprint("libqpu")},
            needs=(role,),
            action=action,
            missing=lambda _: "" if self.libqpu_stage.is_dir() else "its folder is gone",
        )

    def _qpu_ops(self) -> Step:
        data = recipe.load("qpu_ops")
        folder = self.root / "wheels"
        tar = self.root / "qpu-ops-site.tar"

        def action(needs: Mapping[str, Manifest]) -> Made:
            place = self.extension_place(needs)
            if not needs["torch-site"].facts["version"]:
                warning = (
                    "the QPU extension wheel is NOT built: it is compiled against torch, and there is no torch wheel"
                )
                progress.warn(warning)
                return Made(facts={"wheel": ""}, warnings=(warning,))
            try:
                made = qpu_ops.build(
                    self.client,
                    place,
                    data,
                    self.config,
                    suite=self.suite,
                    torch_site=self.torch_site,
                    libqpu=self.libqpu_stage,
                    libqpu_prefix=needs["libqpu"].facts["prefix"],
                    folder=folder,
                    log=self.log("qpu-ops"),
                    surroundings=(needs["torch-site"].product,),
                    reuse=self.reuse,
                )
            except CommandFailed as fault:
                if needs["libqpu"].facts["own"] or files.NO_ROOM.search(fault.tail):
                    raise
                library = needs["libqpu"].facts["library"]
                warning = (
                    f"the QPU extension wheel is LEFT OUT: it does not build against {library} "
                    f"({fault.found}; {self.log('qpu-ops')})"
                )
                progress.warn(warning)
                return Made(facts={"wheel": ""}, warnings=(warning,))
            self._stage_wheel(made, self.root / "qpu-ops-site", tar)
            return Made((made, tar), facts={"wheel": made.name})

        return Step(
            name="qpu-ops",
            title=data.title,
            inputs={
                "sources": data.fingerprint(),
                "driver": driver_fingerprint("qpu_ops"),
                "staging": _staging(),
                "native compiler": str(self.config.build.native_compiler),
            },
            needs=("builder" if self.crossed else "dev", "torch-site", "libqpu"),
            action=action,
        )

    def extension_place(self, made: Mapping[str, Manifest]) -> qpu_ops.Place:
        """Where the extension's wheel is compiled, from the manifest of ``builder``, or of ``dev`` without one."""
        role = "builder" if self.crossed and "builder" in made else "dev"
        reference, image_id = self.config.image_reference(role), made[role].facts["image"]
        if role == "builder":
            return qpu_ops.crossed(reference, image_id, self.target, self.suite)
        return qpu_ops.container(reference, image_id, self.target, self.compiler())

    def _tvm_server(self) -> Step:
        data = recipe.load("tvm_server")
        tar = self.root / "tvm-server.tar"

        def action(_: Mapping[str, Manifest]) -> Made:
            with files.scratch_folder(self.root, "tvm-server") as scratch:
                stage = scratch / "root"
                stage.mkdir()
                tvm_server.stage(data, self.target, self.suite, stage, self.log("tvm-server"))
                pyc.compile_tree(stage, self.tools, self.suite, epoch=self.image.source_date_epoch)
                files.pack(stage, tar, epoch=self.image.source_date_epoch)
            return Made((tar,), facts={"version": tvm_server.pins()[0]})

        return Step(
            name="tvm-server",
            title=data.title,
            inputs={
                "wheels": " ".join(tvm_server.pins()),
                "recipe": data.fingerprint(),
                "driver": driver_fingerprint("tvm_server"),
                "staging": _staging(),
                "epoch": str(self.image.source_date_epoch),
            },
            needs=("tools",),
            action=action,
        )

    def _tvm_ffi(self) -> Step:
        tar = self.root / "tvm-ffi-site.tar"

        def action(_: Mapping[str, Manifest]) -> Made:
            wheel, origin = tvm_ffi.find(self.config)
            progress.say(f"    {wheel.name}: {origin}")
            self._stage_wheel(wheel, self.root / "tvm-ffi-site", tar)
            measured = {"size": wheel.stat().st_size, "sha256": files.sha256_of(wheel)}
            facts = {"wheel": wheel.name, "from": origin, **measured}
            return Made((tar,), facts, self._cross_compiled("the wheel of TVM's FFI"))

        return Step(
            name="tvm-ffi",
            title="TVM's FFI, unpacked",
            inputs={
                "wheels": tvm_ffi.listing(self.config),
                "staging": _staging(),
                "epoch": str(self.image.source_date_epoch),
                "python": self.suite.python,
            },
            needs=("tools",),
            action=action,
        )

    def _base(self) -> Step:
        reference = self.config.image_reference("base")

        def action(needs: Mapping[str, Manifest]) -> Made:
            below, added = needs["rootfs"], needs["torch-site"]
            if not added.artefacts:
                return Made(facts={"base": below.facts["image"]})
            layers = (
                archive.Layer(below.artefact(".tar")),
                archive.Layer(added.artefact(".tar"), f"torch {added.facts['version']}, unpacked"),
            )
            epoch = self.image.source_date_epoch
            loaded = archive.load(self.client, layers, reference, self.target, epoch=epoch)
            facts = {"image": loaded.image_id, "reference": reference, "size": loaded.size}
            return Made(facts={**facts, "base": loaded.image_id})

        return Step(
            name="base",
            title="image with torch",
            inputs={"epoch": str(self.image.source_date_epoch), "driver": made_by("images/archive.py")},
            # Apart from the system image: it can be made while extensions are compiled, and stays when they change.
            needs=("torch-site", "rootfs"),
            action=action,
            missing=lambda made: self._image_missing("base")(made) if "image" in made.facts else "",
        )

    def _system(self) -> Step:
        reference = self.config.image_reference("system")
        bootable = self.image.profile == "bootable"

        def action(needs: Mapping[str, Manifest]) -> Made:
            layers = composed.layers({name: made for name, made in needs.items() if name != "torch-site"})
            text = system.render(
                needs["base"].facts["base"],
                [layer.name for layer in layers],
                labels=composed.labels(self.image, needs),
                bootable=bootable,
            )
            (self.root / "Dockerfile").write_text(text)
            loaded = system.build(self.client, reference, text, layers, self.target)
            modules = [*(["torch", "numpy"] if needs["torch"].facts["wheel"] else ["numpy"])]
            modules += MODULES if needs["qpu-ops"].facts["wheel"] else ()
            modules += ["tvm_ffi"] if "tvm-ffi" in needs else []
            own = needs["libqpu"].facts["own"]
            seen = system.inspect(
                self.client, reference, self.target, modules=modules, own_libqpu=own, log=self.log("system")
            )
            if "tvm-server" in needs:
                seen["tvm"] = tvm_server.check(self.client, reference, self.target, self.log("system"))
            return Made(
                facts={
                    "image": loaded.image_id,
                    "size": loaded.size,
                    "reference": reference,
                    "libqpu": needs["libqpu"].facts["library"],
                    "seen": seen,
                    "left_out": needs["rootfs"].facts.get("left_out"),
                    "wheels": wheels_in(needs),
                }
            )

        return Step(
            name="system",
            title="system image",
            inputs={
                "templates": _templates(),
                "profile": self.image.profile,
                "driver": _composing(),
            },
            needs=(
                *("torch", "torch-site", "rootfs", "base", "libqpu", "qpu-ops"),
                *(("tvm-server",) if self.config.remote.server_in_image else ()),
                *(("tvm-ffi",) if self.config.remote.ffi_in_image else ()),
            ),
            action=action,
            missing=self._image_missing("system"),
        )

    def _workbench(self) -> Step:
        reference = self.config.image_reference("workbench")

        def action(needs: Mapping[str, Manifest]) -> Made:
            layers = composed.layers(needs)
            names = [layer.name for layer in layers]
            text = system.render(needs["dev"].facts["image"], names, labels={}, bootable=False)
            loaded = system.build(self.client, reference, text, layers, self.target)
            return Made(facts={"image": loaded.image_id, "size": loaded.size, "reference": reference})

        return Step(
            name="workbench",
            title="workbench image",
            inputs={"templates": _templates(), "driver": _composing()},
            needs=("dev", "torch-site", "libqpu", "qpu-ops"),
            action=action,
            missing=self._image_missing("workbench"),
        )

    # What steps share.

    def _root_inputs(self, packages: tuple[str, ...]) -> dict[str, str]:
        epoch = str(self.image.source_date_epoch)
        return {"packages": " ".join(packages), "epoch": epoch, **self._roots_driver()}

    def _roots_driver(self) -> dict[str, str]:
        """What makes a root filesystem and loads it: our Python, and the program that it drives."""
        ours = made_by("images/rootfs.py", "images/apt.py", "images/archive.py")
        return {"driver": ours, "mmdebstrap": rootfs.program_fingerprint()}

    def overlays(self, *others: str) -> tuple[Path, ...]:
        """Folders that are laid over a target root: those of these names, and what keeps documentation out."""
        names = [*([] if self.image.documentation else ["lean"]), *others]
        return tuple(rootfs.HERE / "overlay" / name for name in names)

    def _with_tools(self, spec: rootfs.RootSpec) -> rootfs.RootSpec:
        return rootfs.with_tools(spec, self.tools)

    def _cross_compiled(self, wheel: str) -> tuple[str, ...]:
        """The warning, which is shown too, where Debian's cross compiler made more than the target may have."""
        if not (less := target_flavour(self.image).compiles_for):
            return ()
        warning = f"{wheel} is no {less} code: where there is no more than that, on a Pi 1, it does not run"
        progress.warn(warning)
        return (warning,)

    def _require_execution(self) -> None:
        if self.target != self.native and self.target.debian in probe.PROGRAMS:
            with files.scratch_folder(self.root / "work", "probe") as scratch:
                program = scratch / "probe"
                program.write_bytes(probe.PROGRAMS[self.target.debian]())
                program.chmod(0o755)
                rootfs.require_execution(self.target, program)

    def _loaded(self, role: str, tar: Path, architecture: Architecture) -> Made:
        reference = self.config.image_reference(role)
        layer = Artefact.of(tar)
        epoch = self.image.source_date_epoch
        loaded = archive.load(self.client, [archive.Layer(layer)], reference, architecture, epoch=epoch)
        return Made((layer,), facts={"image": loaded.image_id, "reference": reference, "size": loaded.size})

    def _image_missing(self, role: str) -> Any:
        def probe(made: Manifest) -> str:
            try:
                found = self.client.images.get(self.config.image_reference(role)).id
            except (docker.errors.ImageNotFound, docker.errors.NullResource):
                return "its image is gone from the engine"
            except (EngineUnavailable, *ENGINE_ERRORS):
                return NO_ENGINE
            return "" if found == made.facts["image"] else "its image in the engine is another one"

        return probe

    def _stage_wheel(self, wheel: Path, folder: Path, tar: Path) -> None:
        with (
            files.room_for(f"what {wheel.name} holds", self.root),
            files.scratch_folder(self.root, folder.name) as scratch,
        ):
            stage = scratch / "root"
            stage.mkdir()
            wheels.unpack(wheel, stage, self.suite)
            pyc.compile_tree(stage, self.tools, self.suite, epoch=self.image.source_date_epoch)
            files.pack(stage, tar, epoch=self.image.source_date_epoch)
            files.remove(folder)
            stage.rename(folder)


def wheels_in(needs: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """The wheels that an image is made of, as steps made or found them: ``name``, ``size`` and ``sha256``.

    What a manifest that is older than these facts does not say is empty.
    """
    found = []
    for name in ("torch", "tvm-ffi", "qpu-ops"):
        made = needs.get(name)
        if made is None or not made.facts.get("wheel"):
            continue
        if name == "qpu-ops":
            item = made.artefact(".whl")
            found.append({"name": item.path.name, "size": item.size, "sha256": item.sha256})
            continue
        path = Path(made.facts["wheel"])
        size = made.facts.get("size", path.stat().st_size if path.is_file() else None)
        found.append({"name": path.name, "size": size, "sha256": made.facts.get("sha256", "")})
    return sorted(found, key=lambda item: str(item["name"]))


def sources_of(mirror: Manifest) -> tuple[apt.Source, ...]:
    """The verified sources that the mirror's manifest records."""
    return tuple(_source(record) for record in mirror.facts["sources"])


def _source_record(source: apt.Source) -> dict[str, Any]:
    record = {**dataclasses.asdict(source), "keyring": str(source.keyring)}
    # What is usual is left out: manifests had not always all of it, and stand for the same products.
    usual = {item.name: item.default for item in dataclasses.fields(source)}
    return {name: value for name, value in record.items() if value != usual[name]}


def _source(record: Mapping[str, Any]) -> apt.Source:
    lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list | tuple)}
    pocket, keyring = Pocket(**record["pocket"]), Path(record["keyring"])
    return apt.Source(**{**record, **lists, "pocket": pocket, "keyring": keyring})


def _limits(sources: Sequence[apt.Source]) -> str:
    """Which packages come from archives of which not all do."""
    return "; ".join(dict.fromkeys(f"{item.archive}: {' '.join(item.only)}" for item in sources if item.only))


def _hook_fingerprint() -> str:
    return files.tree_fingerprint(rootfs.HERE / "hooks")


def _fingerprint_of(overlays: Sequence[Path]) -> str:
    return " ".join(f"{folder.name}:{files.tree_fingerprint(folder)}" for folder in overlays) or "none"


def _templates() -> str:
    return files.tree_fingerprint(rootfs.HERE / "templates", "Dockerfile.j2")


def made_by(*modules: str) -> str:
    """SHA-256 of the Python, named by paths from the checkout, that makes what a step makes."""
    return files.tree_fingerprint(ROOT, *modules)


def _staging() -> str:
    """SHA-256 of the Python that unpacks and compiles wheels."""
    return made_by("wheels/byte_code.py", "wheels/find.py")


def _composing() -> str:
    """SHA-256 of the Python that composes an image of its layers and labels."""
    return made_by("images/system.py", "flow/layers.py")


def driver_fingerprint(folder: str) -> str:
    """SHA-256 of the Python that drives a recipe."""
    return files.tree_fingerprint(ROOT / "recipes" / folder, "*.py")


def _unpack(tar: Path, folder: Path) -> None:
    with files.scratch_folder(folder.parent, folder.name) as scratch:
        stage = scratch / "root"
        stage.mkdir()
        try:
            run(["tar", "--extract", "--file", tar, "--directory", stage, "--no-same-owner"])
        except CommandFailed as fault:
            if full := files.full_disk(fault.tail, f"what {tar.name} holds", folder.parent):
                raise full from fault
            raise
        files.remove(folder)
        stage.rename(folder)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Only one build at a time writes to a target's folder. Raises RootNeeded where that is closed to this user.

    Where it may be read only, what is up to date can be used; a step that has to run raises.
    """
    taken = ServerFailed(
        f"another build works in {folder}",
        expected="one build of a target at a time",
        found="its lock is held",
        fix="wait for it, or set build.folder to another folder",
    )
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.held(folder / "lock", taken))
        except PermissionError as fault:
            raise files.belongs_to_another(folder, str(fault)) from fault
        leftovers.clear(_left_in(folder), folder.parent)
        yield


def _left_in(folder: Path) -> Iterator[Path]:
    """What killed tasks may have left in a target's folder, and in those that all targets share."""
    yield from (path for path in folder.glob(".*.*") if _SCRATCH.fullmatch(path.name) and path.is_dir())
    yield from (path for path in folder.glob(".*.part*") if _PART.fullmatch(path.name) and path.is_file())
    places = {folder / name: prefixes for name, prefixes in _SCRATCH_IN.items()}
    places |= {folder.parent / name: prefixes for name, prefixes in _SCRATCH_BESIDE.items()}
    for place, prefixes in places.items():
        if not place.is_symlink():
            named = re.compile(rf"\.(?:{'|'.join(prefixes)})\.[a-z0-9_]{{8}}")
            yield from (path for path in place.glob(".*.*") if named.fullmatch(path.name) and path.is_dir())
