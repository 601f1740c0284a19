"""The tasks of ``./inv``. Each task parses its options, calls a function of a package and prints the result.

Each task imports only the modules that it needs, because importing all modules would take half a second.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import Task, task

from registry import passwords
from toolchain import caller, checks, progress
from toolchain import completion as shells
from toolchain.config import Config, defaults, load_config, take_variables
from toolchain.errors import ConfigError, UserError
from toolchain.files import path_fault, write_text_atomically
from toolchain.settings import named
from toolchain.steps import plan_table

_VARIABLES = take_variables(os.environ)
passwords.take(passwords.REGISTRY)
passwords.take(passwords.SIGNING)


def _reported(body: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs a task's body and converts a UserError into its message and exit code.

    Other exceptions propagate. SIGTERM and the loss of the terminal stop a task in the same way as Ctrl-C, including
    all cleanup. Leftover containers of killed tasks are removed before the task begins.
    """

    @functools.wraps(body)
    def run(*args: Any, **options: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        try:
            from engine import containers

            containers.remove_abandoned()
            body(*args, **options)
        except UserError as fault:
            raise Exit(str(fault), code=fault.exit_code) from fault
        except KeyboardInterrupt:
            raise Exit("interrupted", code=130) from None

    return run


_for_all: dict[str, str] = {}
"""Maps the setting ``image.architecture`` to the value of ``--architecture``, an option of all tasks for a target."""


class _TargetTask(Task[Any]):
    """A task whose options do not use the short form ``-h``, because ``-h`` prints the help."""

    def arg_opts(self, name: str, default: str, taken_names: set[str]) -> dict[str, Any]:
        return super().arg_opts(name, default, taken_names | {"h"})


def _target_task(**settings: Any) -> Callable[[Callable[..., None]], Any]:
    """Declare a task as Invoke's ``task`` does, and add error reporting and the option ``--architecture``."""
    texts = {"architecture": "armhf, arm64 or amd64 (default: image.architecture)", **settings.pop("help", {})}

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def run(*args: Any, architecture: str = "", **options: Any) -> None:
            _for_all["image.architecture"] = architecture
            caller.remember_architecture(architecture)
            try:
                body(*args, **options)
            finally:
                _for_all.clear()  # each task on a command line has separate options
                caller.remember_architecture("")

        signature = inspect.signature(body)
        option = inspect.Parameter("architecture", inspect.Parameter.KEYWORD_ONLY, default="", annotation=str)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
        return task(help=texts, klass=_TargetTask, **settings)(_reported(run))

    return decorate


def _is_special(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a socket; False if it cannot be examined."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _path(option: str, given: str, *, device: bool = False) -> Path:
    """Return a path, resolved against the caller's folder. Raises ConfigError for an unusable path.

    Unless ``device`` is true, devices and pipes are refused, because a task would replace them with its output file.
    """
    path = caller.path(given)
    fault = path_fault(path)
    if not fault and not device and _is_special(path):
        fault = "expected a file or a folder, not a device or a pipe"
    if fault:
        raise ConfigError([f"--{option}: {fault}, found {given!r}"])
    return path


_MOST = 1_000_000


def _at_least(low: float, **options: float) -> None:
    """Raise ConfigError if the value of an option is less than ``low`` or greater than ``_MOST``."""
    faults = [
        f"--{name}: expected at {f'most {_MOST}' if given > _MOST else f'least {low}'}, found {given}"
        for name, given in options.items()
        if not low <= given <= _MOST
    ]
    if faults:
        raise ConfigError(faults)


_KEY_HELP = "signer's public key, a PEM file (default: registry.public_key)"
_QPULIB = "local (our own libqpu) or upstream (the original QPULib); default: qpu.library"


def _config(context: Context, options: Mapping[str, str | Sequence[str]] | None = None) -> Config:
    settings = context.config
    return load_config(
        cast("Mapping[str, Any]", settings),
        environment=_VARIABLES,
        named=named(settings),
        options={**_for_all, **(options or {})},
    )


@_target_task(
    help={
        "plan": "print which steps would run and why, without running them",
        "update": "fetch the mirror's indices again, in case packages have changed",
        "again": "run this step again even if it is up to date (may be repeated)",
        "only": "run only this step and the steps that it requires (may be repeated)",
        "qpulib": _QPULIB,
        "from-source": "build torch from source first instead of using the existing wheel",
    },
    iterable=["again", "only"],
)
def build_image(
    context: Context,
    again: list[str],
    only: list[str],
    plan: bool = False,
    update: bool = False,
    qpulib: str = "",
    from_source: bool = False,
) -> None:
    """Build the system image: root filesystem, libqpu, torch and the QPU extension."""
    from flow import main_job

    config = _config(context, {"qpu.library": qpulib, "torch.from_source": "true" if from_source else ""})
    if plan:
        print(plan_table(main_job.plan(config, update=update, again=again, only=only)))
        return
    built = main_job.build_image(config, update=update, again=again, only=only)
    progress.summary(f"built in {built.seconds:.1f} s", built.rows, warnings=built.warnings)


@_target_task(
    name="build-torch",
    help={
        "source": "archive (the distribution's source package) or git (upstream's tag); default: torch.source",
        "variant": "the CPU that the wheel is for: neon or baseline (default: torch.variant)",
        "option": "a CMake option NAME=VALUE that overrides the recipe's option (may be repeated)",
        "again": "build from source even if a wheel exists; ccache is used",
        "plan": "print which steps would run and why, without running them",
    },
    iterable=["option"],
)
def build_torch(
    context: Context, option: list[str], source: str = "", variant: str = "", again: bool = False, plan: bool = False
) -> None:
    """Build the torch wheel for the target from source. To continue an interrupted build, repeat the task."""
    from flow import torch_job

    settings = {"torch.source": source, "torch.variant": variant, "torch.options": option}
    config = _config(context, settings)
    if plan:
        print(plan_table(torch_job.plan(config, again=again)))
        return
    done = torch_job.build_torch(config, again=again)
    progress.summary(f"torch built in {done.seconds:.1f} s", done.rows, warnings=done.warnings)
    print(done.import_check(config.image.architecture))


@_target_task(name="build-tvm-ffi", help={"plan": "print which steps would run and why, without running them"})
def build_tvm_ffi(context: Context, plan: bool = False) -> None:
    """Build the apache-tvm-ffi wheel, which loads TVM kernels on 32-bit ARM boards."""
    from flow import tvm_ffi_job

    config = _config(context)
    if plan:
        print(plan_table(tvm_ffi_job.plan(config)))
        return
    done = tvm_ffi_job.build_tvm_ffi(config)
    progress.summary(f"TVM's FFI built in {done.seconds:.1f} s", [done.row], warnings=done.warnings)


@_target_task(
    help={
        "what": "torch, a file, or an image in a registry: HOST[:PORT]/REPOSITORY:TAG",
        "key": _KEY_HELP,
        "sample": "torch: number of object files to compile again (default: 20)",
        "full": "torch: build the whole wheel again without ccache",
        "seed": "torch: the seed that an earlier run printed, to select the same object files again",
    }
)
def verify(context: Context, what: str, key: str = "", sample: int = 20, full: bool = False, seed: int = -1) -> None:
    """Verify the signature of an image or file, the provenance of a wheel, or the reproducibility of torch."""
    from flow import publish
    from flow import verify as verification

    if what != "torch":
        path, chosen = _path("what", what), _path("key", key) if key else None
        if path.is_file():
            print(publish.verify_file(_config(context), path, key=chosen).text())
        else:
            print(publish.verify_image(_config(context), what, key=chosen).text())
        return
    _at_least(1, sample=sample)
    done = verification.verify_torch(_config(context), sample=sample, full=full, seed=seed if seed >= 0 else None)
    print(f"{what}: {done.summary()}")


@task(help={"what": "a file, such as a card image or a wheel"})
@_reported
def sign(context: Context, what: str) -> None:
    """Sign a file with the key in registry.signing_key, and write the signed statement next to the file."""
    from flow import publish

    print(publish.sign_file(_config(context), _path("what", what)))


@_target_task(
    help={
        "old": "an image, an exported tree, a tar of a root filesystem, or a bill of materials",
        "new": "an image, tree, tar or bill of materials to compare with the old one",
        "json": "print JSON",
    }
)
def diff(context: Context, old: str, new: str, json: bool = False) -> None:
    """Show the packages, wheels, files and sizes that differ between two images, trees or bills of materials."""
    from nfsroot import difference

    before, after = caller.expanded(old), caller.expanded(new)
    done = difference.compare(_config(context), before, after, folder=caller.folder())
    if json:
        sys.stdout.write(done.as_json())
    else:
        done.print()


@_target_task(
    help={
        "file": "a test file, such as test_complex.py, or a part of one: 'test_nn.py 2/4' (may be repeated)",
        "limit": "time limit for each file or part, in minutes (default: 20)",
    },
    iterable=["file"],
)
def upstream_tests(context: Context, file: list[str], limit: float = 20.0) -> None:
    """Run PyTorch's own test files with the image's torch under emulation, and count the results."""
    from flow import upstream_tests as upstream

    _at_least(1, limit=limit)
    done = upstream.run_tests(_config(context), file, limit_s=limit * 60)
    print(done.table())
    print(f"{done.summary()}; {done.path}")


@_target_task(
    help={
        "command": "run this command instead of an interactive shell",
        "folder": "folder to mount at /root/work (default: the current folder)",
        "emulated-compiler": "use the image's emulated compiler instead of the native cross compiler",
        "root": "run as root, for example to install packages; new files are then owned by root",
        "qpulib": _QPULIB,
    }
)
def shell(
    context: Context,
    command: str = "",
    folder: str = "",
    emulated_compiler: bool = False,
    root: bool = False,
    qpulib: str = "",
) -> None:
    """Open a shell in the image with compilers, torch and libqpu; /root/work is the current folder or --folder."""
    from flow import main_job

    config = _config(context, {"qpu.library": qpulib})
    status = main_job.open_shell(
        config,
        _path("folder", folder),
        command=command,
        native_compiler=config.build.native_compiler and not emulated_compiler,
        as_root=root,
    )
    if status:
        raise Exit(code=status)


@_target_task(
    help={
        "folder": "destination of the tree (default: nfs.folder, or nfsroot in the build folder)",
        "tarball": "write the tree as a tar archive; with --folder, also as a folder",
        "untouched": "export the image without the audit's fixes (the tree cannot boot over NFS)",
    }
)
def export_nfsroot(context: Context, folder: str = "", tarball: str = "", untouched: bool = False) -> None:
    """Export the image as a root filesystem for NFS boot, audit it, and write the boot files."""
    from nfsroot import export

    config = _config(context)
    done = export.export(
        config,
        destination=_path("folder", folder) if folder else None,
        tarball=_path("tarball", tarball) if tarball else None,
        fix=not untouched,
    )
    export.print_result(done, config)


@_target_task(
    help={
        "v3": "also serve NFS 3, for boards whose initramfs does not support NFS 4 (requires rpcbind)",
        "address": "listen only on this IPv4 address",
        "port": "TCP port (default: nfs.port)",
    }
)
def serve_nfsroot(context: Context, v3: bool = False, address: str = "", port: int = 0) -> None:
    """Serve the exported tree over NFS until Ctrl-C, and print the commands for the Pi."""
    from nfsroot import serve

    config = _config(context, {"nfs.address": address, "nfs.port": str(port) if port else ""})
    serve.serve(config, nfsv3=v3)


@_target_task(
    help={
        "alone": "assign addresses to directly connected boards; without this option, a router assigns them",
        "address": "listen only on this IPv4 address",
    }
)
def netboot(context: Context, alone: bool = False, address: str = "") -> None:
    """Boot boards without a card: serve DHCP, TFTP and NFS until Ctrl-C, and show a table of the boards."""
    from flow import firmware
    from nfsroot import netboot as network_boot

    config = _config(context, {"nfs.address": address})
    network_boot.netboot(config, alone=alone, fetch_firmware=lambda: firmware.ready(config).folder)


@task(help={"state": "on, off or status"})
@_reported
def share_internet(context: Context, state: str) -> None:
    """Share this PC's internet connection with the board's subnet (NAT by nftables), or stop sharing it."""
    from nfsroot import share_internet as sharing

    actions = {"on": sharing.on, "off": sharing.off, "status": sharing.status}
    if state not in actions:
        raise Exit(f"share-internet: expected on, off or status, found {state!r}", code=2)
    print("\n".join(actions[state](_config(context)).lines()))


@_target_task(
    name="test-on-pi",
    help={
        "host": "[USER@]HOST[:PORT] of a running board that booted the exported tree",
        "qemu": "use a virtual machine that boots the exported tree over NFS (default if device.host is empty)",
        "chroot": "boot another system (the board's own or, in QEMU, one without torch or libqpu), enter the exported "
        "tree from it with enter-nfsroot, and run the suite there",
        "init": "init system of the virtual machine: lean or systemd (default: device.init)",
        "cpu": "CPU of the virtual machine: cortex-a53 (Pi 3), -a72 (Pi 4), -a76 (Pi 5) or -a7 (default: device.cpu)",
        "select": "only tests whose names match this expression (pytest -k)",
        "no-timing": "omit the timing table",
        "place": "a board in the lab, by name (docs/lab.md)",
        "tag": "run on the first free board in the lab with this tag, such as model=pi3",
        "all": "run on all boards in the lab in parallel and write a merged report",
        "shard": "with --tag or --all: split the suite among the free boards, based on measured times",
    },
)
def run_on_pi(
    context: Context,
    host: str = "",
    qemu: bool = False,
    chroot: bool = False,
    init: str = "",
    cpu: str = "",
    select: str = "",
    no_timing: bool = False,
    place: str = "",
    tag: str = "",
    all: bool = False,  # noqa: A002 (the option is --all)
    shard: bool = False,
) -> None:
    """Run the device suite on a real Pi or in QEMU; write the JUnit file, the evidence and the HTML report."""
    from device import suite

    chosen = [f"--{name}" for name, given in {"place": place, "tag": tag, "all": all}.items() if given]
    if shard and not (tag or all):
        raise ConfigError(["--shard requires --tag or --all, which select the boards (docs/lab.md)"])
    if chosen:
        others = {"host": host, "qemu": qemu, "chroot": chroot, "init": init, "cpu": cpu}
        if excluded := [*chosen[1:], *(f"--{name}" for name, given in others.items() if given)]:
            raise ConfigError([f"{chosen[0]} cannot be combined with {', '.join(excluded)}"])
        from device.lab import run as lab_run

        how = lab_run.How(keyword=select or None, timing=not no_timing)
        config = _config(context)
        if shard:
            print(lab_run.on_shards(config, tag, how).summary())
        elif all:
            print(lab_run.on_all(config, how).summary())
        else:
            print((lab_run.on_place(config, place, how) if place else lab_run.on_tagged(config, tag, how)).summary())
        return
    result = suite.test_on_pi(
        _config(context),
        host=host or None,
        qemu=qemu,
        chroot=chroot,
        init=init or None,
        cpu=cpu or None,
        keyword=select or None,
        timing=not no_timing,
    )
    print(result.summary())


@_target_task(
    help={
        "action": "up, status, check (boot each of this PC's boards), log NAME (a board's events) or down",
        "name": "with the action log: the board whose events are printed",
    }
)
def lab(context: Context, action: str, name: str = "") -> None:
    """Share boards through labgrid: start or stop the coordinator and an exporter, or show or check the boards."""
    from device.lab import log as lab_log

    if name and action != "log":
        raise ConfigError([f"--name: valid only with the action log, found {action}"])
    if action == "log":
        print("\n".join(lab_log.lines(_config(context), name)))
        return
    if action == "check":
        from device.lab import run as lab_run

        print(lab_run.check(_config(context)).summary())
        return
    from device.lab import services as lab_services

    actions = {"up": lab_services.up, "status": lab_services.status, "down": lab_services.down}
    if action not in actions:
        raise Exit(f"lab: expected up, status, check, log or down, found {action!r}", code=2)
    print("\n".join(actions[action](_config(context)).lines()))


@_target_task(
    help={
        "kernel": "add_one, gemm, or a Python file (docs/remote.md)",
        "model": "run a PyTorch model instead of a kernel: FILE.pt2, or MODULE:FUNCTION (docs/remote.md)",
        "target": "target to compile for: aarch64, armv7, local, opencl or qpu",
        "device": "a board from remote.devices, or HOST:PORT, tracker://HOST:PORT/KEY, place://NAME, adb://SERIAL …",
        "size": "problem size (default: the size that the kernel defines)",
        "number": "runs per measurement",
        "repeat": "number of measurements",
        "min-repeat-ms": "minimum duration of a measurement; the number of runs is increased to reach it",
        "warm-up": "runs before the first measurement",
        "keep": "write the kernel's library to this file if the kernel's result is correct",
        "export": "write the model's library, parameters, C header and an example program to this folder",
        "json": "print JSON",
        "html": "write a report with the times of the model's operators to this file",
    },
)
def profile_remote(
    context: Context,
    target: str,
    kernel: str = "",
    model: str = "",
    device: str = "",
    size: int = 0,
    number: int = 10,
    repeat: int = 5,
    min_repeat_ms: int = 20,
    warm_up: int = 2,
    keep: str = "",
    export: str = "",
    json: bool = False,
    html: str = "",
) -> None:
    """Compile a kernel or a model for a board, run and time it there, and compare its result with the reference."""
    from device.remote import loader_session, models, profiling

    timing = loader_session.Timing(number=number, repeat=repeat, min_repeat_ms=min_repeat_ms, warm_up=warm_up)
    config = _config(context)
    page = _path("html", html) if html else None
    done: models.ModelProfile | profiling.Profile
    with contextlib.ExitStack() as held:
        if device.startswith("place://"):
            from device.lab import run as lab_run

            device = f"tree://{held.enter_context(lab_run.host_of(config, device.removeprefix('place://')))}"
        if model and not (kernel or size or keep):
            done = models.profile(
                config,
                model=str(caller.path(model)) if model.endswith(".pt2") else model,
                target=target,
                device=device,
                export=_path("export", export) if export else None,
                timing=timing,
                folder=caller.folder(),
            )
            if page is not None:
                write_text_atomically(page, done.as_html())
        elif kernel and not (model or export or html):
            done = profiling.profile(
                config,
                kernel=str(caller.path(kernel)) if kernel.endswith(".py") else kernel,
                target=target,
                device=device,
                size=size,
                keep=_path("keep", keep) if keep else None,
                timing=timing,
            )
        else:
            raise UserError(
                "the options must select either a kernel or a model",
                expected="--kernel (with --size, --keep), or --model (with --export, --html)",
                found=("both --kernel and --model" if model else "neither --kernel nor --model")
                if bool(kernel) == bool(model)
                else "an option for kernels together with --model, or an option for models together with --kernel",
                fix="run ./inv profile-remote --help to see the options for kernels and for models",
            )
    if json:
        sys.stdout.write(done.as_json())
    else:
        done.print()


@_target_task(help={"qpulib": _QPULIB})
def deploy(context: Context, qpulib: str = "") -> None:
    """Rebuild libqpu and the QPU extension and install them in the exported tree of a running board."""
    from device import deploy as deployment

    done = deployment.deploy(_config(context, {"qpu.library": qpulib}))
    state = "deployed to" if done.changed else "nothing changed in"
    progress.summary(f"{state} {done.layout.tree} in {done.seconds:.1f} s", done.rows, warnings=done.warnings)


@_target_task(name="sd-image")
def sd_image(context: Context) -> None:
    """Make a compressed card image from the system image, with a block map and an entry for Raspberry Pi Imager."""
    from sdcard import image as card_image

    made = card_image.build(_config(context))
    rows = [progress.row_of(item.path.name, item, made.seconds) for item in made.artefacts]
    progress.summary(f"made in {made.seconds:.1f} s", rows, warnings=made.warnings)


@_target_task(name="write-card", help={"device": "the card, such as /dev/mmcblk0; all data on it is lost"})
def write_card(context: Context, device: str) -> None:
    """Write the card image to a card, and read it back to verify it. Refuses mounted and fixed disks."""
    from sdcard import write as card_writing

    done = card_writing.write_card(_config(context), _path("device", device, device=True))
    print(f"{done.device}: {progress.human_size(done.size)} written and read back in {done.seconds:.1f} s")


_REGISTRY_HELP = {
    "registry": "HOST[:PORT]/NAMESPACE (default: registry.address and registry.namespace)",
    "tag": "tag of the image (default: registry.tag, or SUITE-ARCHITECTURE)",
    "user": "user name; the password comes from the credential store, PITORCH_REGISTRY_PASSWORD or a prompt",
}
_IMAGES_HELP = {
    **_REGISTRY_HELP,
    "tag": "tag of the image (default: registry.tag, or SUITE-ARCHITECTURE; for several architectures, SUITE)",
    "architecture": "armhf, arm64, or both under one tag: armhf,arm64 (default: image.architecture)",
}


def _configs(context: Context, **options: str) -> list[Config]:
    """Return a configuration with ``options`` (see _REGISTRY_HELP) for each architecture in ``--architecture``."""
    from registry.reference import with_options

    names = _for_all["image.architecture"].split(",")
    found = [with_options(_config(context, {"image.architecture": name}), **options) for name in names]
    return list({config.image.architecture: config for config in found}.values())


@_target_task(help={**_IMAGES_HELP, "sign": "sign the image, its provenance and its bill of materials (docs/trust.md)"})
def push(context: Context, registry: str = "", tag: str = "", user: str = "", sign: bool = False) -> None:
    """Push the system image and verify that the registry has it."""
    from flow import publish

    images, index = publish.push(_configs(context, registry=registry, tag=tag, user=user), sign=sign)
    rows = []
    for done in images:
        note = f"{done.sent} of {done.layers} layers sent{', signed' if sign else ''}"
        rows.append(progress.Row(str(done.reference), done.size, done.digest, done.seconds, note))
    if index is not None:
        note = f"index of {len(images)} images"
        rows.append(progress.Row(str(index.reference), index.size, index.digest, index.seconds, note))
    progress.summary("pushed", rows)


@_target_task(
    help={
        **_IMAGES_HELP,
        "verify": "refuse the image unless its signature, provenance and bill of materials are valid",
        "key": _KEY_HELP,
    }
)
def pull(
    context: Context, registry: str = "", tag: str = "", user: str = "", verify: bool = False, key: str = ""
) -> None:
    """Pull the system image, verify its digest and platform, and tag it with its local name."""
    from flow import publish

    configs = _configs(context, registry=registry, tag=tag, user=user)
    pulled = publish.pull(configs, verify=verify, key=_path("key", key) if key else None)
    signed = ", signature valid" if verify else ""
    rows = []
    for done in pulled:
        note = f"{done.received} of {done.layers} layers received, {done.platform}{signed}, now {done.name}"
        rows.append(progress.Row(str(done.reference), done.size, done.digest, done.seconds, note))
    progress.summary("pulled", rows)


@task(
    iterable=["url"],
    help={
        "url": "URL of a mirror to add (several: ./inv mirror URL URL…); without a URL, show the mirrors",
        "remove": "remove these mirrors, or all mirrors if no URL is given",
    },
)
@_reported
def mirror(context: Context, url: list[str], remove: bool = False) -> None:
    """Add registry mirrors to the engine's daemon.json, show them, or remove them."""
    from engine.dockerd import Daemon
    from registry import mirrors

    daemon = Daemon.of(_config(context))
    if remove:
        state = mirrors.remove(url, daemon=daemon)
    else:
        state = mirrors.merge(url, daemon=daemon) if url else mirrors.show()
    print("\n".join(state.lines()))


@task(help={"action": "up, down or status", "purge": "with down: also delete the images"})
@_reported
def registry(context: Context, action: str, purge: bool = False) -> None:
    """Run a registry on this machine, for trials and tests."""
    from registry import local as local_registry

    settings = local_registry.Settings.of(_config(context))
    if action == "up":
        state = local_registry.start(settings)
    elif action == "down":
        state = local_registry.down(settings, purge=purge)
    elif action == "status":
        state = local_registry.look(settings)
    else:
        raise Exit(f"registry: expected up, down or status, found {action!r}", code=2)
    print(f"registry responds at {state.url}" if state.running else "registry: not running")


@_target_task(help={"json": "print JSON"})
def doctor(context: Context, json: bool = False) -> None:
    """Check this machine by performing the operations of a build, and print a fix for each problem."""
    from doctor import examination, report

    findings = examination.examine(_config(context))
    if json:
        sys.stdout.write(report.as_json(findings))
    else:
        report.print_table(findings)
    examination.require_healthy(findings)


@task
@_reported
def down(context: Context) -> None:
    """Stop the engine that ./inv started; another running engine is not stopped."""
    from engine.dockerd import Daemon
    from engine.stop import stop_daemon

    print(stop_daemon(Daemon.of(_config(context))))


@task(help={"shell": "bash, zsh or fish"}, positional=["shell"])
@_reported
def completion(_: Context, shell: str) -> None:
    """Print a completion script for ./inv; to use it in bash, run eval "$(./inv completion bash)"."""
    sys.stdout.write(shells.script(shell))


@_target_task(
    help={
        "name": "benchmark to run: build, extension, export, device, kernels, torch, cpu, models or lab (default: all)",
        "times": "number of repetitions of short measurements",
        "keep": "keep the built files, so that the next run of a single benchmark starts sooner",
        "against": "a torch wheel to compare with the wheel in the image (only with --name=cpu)",
    },
)
def bench(context: Context, name: str = "", times: int = 3, keep: bool = False, against: str = "") -> None:
    """Run the benchmarks and compare each result with that of the conventional approach."""
    from benchmarks import suite as benchmarks

    _at_least(1, times=times)
    against = str(_path("against", against)) if against else ""
    benchmarks.bench(_config(context), name, times=times, keep=keep, against=against)


@task(
    name="test",
    help={
        "select": "only tests whose names match this expression (pytest -k)",
        "checks-only": "only the linters and the type checker",
        "quick": "only the linters and unit tests; needs no root privileges, engine or network; takes under 90 s",
        "lanes": "number of processes that run tests in parallel; 1: run all tests one after another",
        "partial": "if this machine cannot build images, skip the tests that need an image instead of failing",
    },
)
@_reported
def run_tests(
    _: Context,
    select: str = "",
    checks_only: bool = False,
    quick: bool = False,
    lanes: int = 4,
    partial: bool = False,
) -> None:
    """Run the linters and all tests, except those that take many minutes each (CONTRIBUTING.md)."""
    _at_least(1, lanes=lanes)
    checks.run_tests(select=select, checks_only=checks_only, quick=quick, lanes=lanes, partial=partial)


_ARTEFACTS_HELP = {name: text for name, text in _REGISTRY_HELP.items() if name != "tag"}


@_target_task(help=_ARTEFACTS_HELP)
def push_artefacts(context: Context, registry: str = "", user: str = "") -> None:
    """Push the wheels in the artefact cache, so that a team builds each wheel only once."""
    from registry.reference import with_options
    from wheels import artefacts

    done = artefacts.push(with_options(_config(context), registry=registry, user=user))
    progress.summary("pushed", [item.row for item in done])


@_target_task(help=_ARTEFACTS_HELP)
def pull_artefacts(context: Context, registry: str = "", user: str = "") -> None:
    """Pull the wheels that this checkout would build, and verify them."""
    from flow import share_artefacts as share
    from registry.reference import with_options

    done = share.pull_artefacts(with_options(_config(context), registry=registry, user=user))
    progress.summary("pulled", [item.row for item in done])


@_target_task(
    name="build-wheel",
    help={
        "what": "NAME==VERSION, or the path of a project's folder or source archive",
        "from-source": "build the package from source even if the index has a wheel",
        "package": "a distribution package that the build requires, such as libxml2-dev (may be repeated)",
        "constraint": "a pip constraints file, which also applies to build requirements (may be repeated)",
        "env": "NAME passes a variable of this shell to the build, NAME=VALUE sets one (may be repeated)",
        "no-build-isolation": "build with the container's packages (pip's option of the same name)",
    },
    iterable=["package", "constraint", "env"],
)
def build_wheel(
    context: Context,
    what: str,
    package: list[str],
    constraint: list[str],
    env: list[str],
    from_source: bool = False,
    no_build_isolation: bool = False,
) -> None:
    """Build a wheel of any Python package for the target and put it into the wheelhouse."""
    from flow import build_wheel as any_wheel
    from wheels.request import Options

    options = Options.parse(
        folder=caller.folder(),
        from_source=from_source,
        packages=package,
        isolated=not no_build_isolation,
        constraints=[caller.expanded(path) for path in constraint],
        variables=env,
    )
    done = any_wheel.build_wheel(_config(context), caller.expanded(what), folder=caller.folder(), options=options)
    progress.summary(f"built in {done.seconds:.1f} s", [done.row], warnings=done.warnings)


@task(
    name="audit-wheel",
    help={
        "what": "NAME==VERSION, or the path of a wheel",
        "cpu": "cortex-a53, cortex-a72 or cortex-a76 for arm64; cortex-a7 for armhf",
        "json": "print JSON",
    },
)
@_reported
def audit_wheel(context: Context, what: str, cpu: str, json: bool = False) -> None:
    """Check whether a wheel runs on a CPU: disassemble it, and run it on the emulated CPU."""
    from flow import audit_wheel as wheel_audit

    config = _config(context)
    done = wheel_audit.audit(config, caller.expanded(what), folder=caller.folder(), cpu=cpu)
    if json:
        sys.stdout.write(done.as_json())
    else:
        done.print()
    done.require_pass()


@_target_task(
    name="serve-wheels",
    help={
        "address": "listen on this IPv4 address (default: wheels.address)",
        "port": "TCP port (default: wheels.port)",
    },
)
def serve_the_wheels(context: Context, address: str = "", port: int = 0) -> None:
    """Serve the wheels as a package index until Ctrl-C, and print the pip commands for the Pi."""
    from flow import serve_wheels

    config = _config(context, {"wheels.address": address, "wheels.port": str(port) if port else ""})
    serve_wheels.serve_wheels(config)


@task(
    help={
        "architecture": "amd64, or arm64 for boards with an NVIDIA GPU (built and audited on this PC, but not run)",
        "plan": "print which steps would run and why, without running them",
        "check": "run the operators' tests on this machine: on the CPU, and on a GPU if torch finds one",
        "torch": "also run the tests with this torch release, which is downloaded (may be repeated)",
    },
    iterable=["torch"],
)
@_reported
def build_cuda_wheel(
    context: Context, torch: list[str], architecture: str = "amd64", plan: bool = False, check: bool = False
) -> None:
    """Build the wheel with CUDA operators for the GPUs in cuda.architectures; does not require a GPU."""
    from flow import cuda_checks, cuda_job

    config = _config(context)
    if plan:
        print(plan_table(cuda_job.plan(config, architecture)))
        return
    cuda_checks.require_checkable(architecture, check=check, torch=torch)
    made = cuda_job.build_wheel(config, architecture)
    wheel = made.artefact(".whl")
    row = progress.row_of(wheel.path.name, wheel, made.seconds, made.facts["contents"])
    progress.summary(f"built with {made.facts['toolkit']}", [row])
    for version in [*([""] if check else []), *torch]:
        print(cuda_checks.check(config, wheel.path, torch=version).summary())


@task(
    name="cuda-timing",
    help={
        "op": "an operation of cuda_ops, or a dotted name such as torch.add",
        "input": "an input, such as f32[1024,16], or a number (may be repeated; default: the operation's inputs)",
        "runs": "number of calls to time with each of the four timing methods",
        "timeline": "also write a trace for https://ui.perfetto.dev, and an nsys report if nsys is installed",
    },
    iterable=["input"],
)
@_reported
def cuda_timing(
    context: Context,
    input: list[str],  # noqa: A002 (the option is --input)
    op: str = "add2",
    runs: int = 10,
    timeline: bool = False,
) -> None:
    """Time a GPU operation with four methods of synchronisation, and compare the times with the kernel's time."""
    from flow import cuda_timing as cuda_timing_tool

    _at_least(1, runs=runs)
    done = cuda_timing_tool.measure(_config(context), op=op, inputs=input, runs=runs, timeline=timeline)
    print(f"{done.text}\nfiles: {done.folder}")


namespace = Collection(*(item for item in globals().values() if isinstance(item, Task)))
namespace.configure(defaults(os.environ))
