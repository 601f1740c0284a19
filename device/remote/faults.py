"""Convert the faults in a session with a board, over TVM's RPC or through the loader, to errors.

The kinds of faults are reported by workers (``reporting``), by the loader (``loader/loader.cpp``) and by the sessions
on the host. The loader's more specific kinds (load, protocol) are reported as errors of the kernel or model.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolchain.errors import (
    AccessDenied,
    BoardLost,
    BoardSilent,
    CommandFailed,
    DiskFull,
    InUse,
    PlatformMismatch,
    UserError,
)

TABLE: Mapping[str, tuple[type[UserError], str, str, str]] = {
    "unknown": (
        UserError,
        "no board with the address {where}",
        "a board that is registered under that key",
        "check the key, and check that the board's server is running and connected to the tracker or proxy",
    ),
    "silent": (
        BoardSilent,
        "{where} cannot be reached",
        "a response from the board",
        "check that the board is on, that TVM's server, sshd or adbd runs on it, and that the address is correct",
    ),
    "no-phone": (
        BoardSilent,
        "adb does not find {where}",
        "a phone in the output of adb devices",
        "connect the phone and enable USB debugging in its developer options; for a phone on the network, use "
        "adb://HOST:PORT",
    ),
    "several-phones": (
        UserError,
        "adb:// matches several phones",
        "one phone in the output of adb devices, or an address with a serial number",
        "choose a phone by its serial number: --device adb://SERIAL",
    ),
    "unauthorized-phone": (
        AccessDenied,
        "{where} does not accept the key of this PC",
        'the state "device" in the output of adb devices',
        "unlock the phone and accept the USB debugging request; to repeat the request, run adb kill-server",
    ),
    "offline-phone": (
        BoardSilent,
        "{where} does not respond to adb",
        'the state "device" in the output of adb devices',
        "unlock the phone, reconnect it, and switch USB debugging off and on, or run adb reconnect",
    ),
    "unusable-phone": (
        UserError,
        "adb cannot start programs on {where}",
        'the state "device" in the output of adb devices',
        "start Android on the phone; if adb lacks permissions, install the udev rules in the package "
        "android-sdk-platform-tools-common",
    ),
    "busy": (
        InUse,
        "{where} is busy",
        "a session within {limit_s:g} s",
        "try again later, or raise remote.queue_limit_s",
    ),
    "timed-out": (
        BoardLost,
        "the session on {where} timed out",
        "completion within {limit_s:g} s",
        "reduce --number, --repeat, or a kernel's --size, or raise remote.session_limit_s",
    ),
    "lost": (
        BoardLost,
        "the connection to {where} was lost during the run",
        "a response to each request",
        "check the board (power, network, memory) and its server's log; over RPC, also check the kernel: "
        "a crash closes the connection",
    ),
    "architecture": (
        PlatformMismatch,
        "the kernel or model does not match the architecture of {where}",
        "code for the board's architecture",
        "choose the --target that matches the board",
    ),
    "unstartable": (
        PlatformMismatch,
        "the loader does not run on {where}",
        "a board with the target's architecture and C library; for OpenCL on a phone, 64-bit Android 10 or later",
        "choose the --target that matches the board",
    ),
    "full": (
        DiskFull,
        "{where} has no space for the loader",
        "free space for a temporary file on the board",
        "on the board, free some space in /tmp (on a phone: in /data/local/tmp)",
    ),
    "linker": (
        CommandFailed,
        "the kernel or model cannot be linked for {target}",
        "a linker for {gnu}",
        "set remote.linker (INVOKE_REMOTE_LINKER) to another cross compiler",
    ),
    "crashed": (
        UserError,
        "the kernel or model crashed on {where}",
        "code that accesses only its arrays",
        "check the kernel's indices and calls; for a model, run parts of it to find the operator that crashes",
    ),
    "kernel": (
        UserError,
        "the kernel's file cannot be used",
        "a file that defines SIZE, module, inputs and reference",
        "correct the file: docs/remote.md contains an example",
    ),
    "model": (
        UserError,
        "the model cannot be compiled",
        "a model with static shapes that both torch.export and TVM's importer support",
        "change the model (docs/remote.md describes what it may contain); for the traceback, see remote/worker.log in "
        "the build folder",
    ),
    "operator": (
        UserError,
        "the model has operators that TVM's importer lacks",
        "operators that tvm.relax.frontend.torch converts",
        "in the model, replace these operators with operators that the importer supports",
    ),
    "refused": (
        UserError,
        "the kernel or model fails on {where}",
        "code that can be loaded and accepts its arrays",
        "correct the kernel's file (docs/remote.md describes its arguments); in a model, replace the failing operator",
    ),
    "no-opencl": (
        UserError,
        "{where} has no usable OpenCL library",
        "libOpenCL.so.1 on the board",
        "on the board, install ocl-icd-libopencl1 and the GPU's driver (on a Pi 4 or 5: mesa-opencl-icd); "
        "if the board is a phone, choose a phone whose Android system includes OpenCL",
    ),
    "no-device": (
        UserError,
        "{where} has no OpenCL device",
        "a device in the output of clinfo on the board",
        "install the GPU's driver; on a Pi 4 or 5, also set RUSTICL_ENABLE=v3d, which Mesa requires",
    ),
    "build": (
        UserError,
        "the OpenCL kernel does not compile on {where}",
        "OpenCL C that the board's driver accepts",
        "correct the kernel's .cl file or, if TVM generates the source, its opencl_module",
    ),
    "memory": (
        UserError,
        "{where} does not have enough memory",
        "free memory for the kernel or model and its arrays",
        "choose a smaller --size or model, or end other programs on the board",
    ),
    "device-memory": (
        UserError,
        "the OpenCL device on {where} does not have enough memory",
        "arrays that fit into the device's memory",
        "choose a smaller --size",
    ),
    "work-group": (
        UserError,
        "the work group is too large for {where}",
        "a work group that the device can run",
        "return a smaller work group from the kernel's launch()",
    ),
    "driver": (
        UserError,
        "the OpenCL driver on {where} reports an error",
        "the status CL_SUCCESS",
        "check that the kernel accesses only its arrays, and test the driver with clinfo on the board",
    ),
    "driver-crashed": (
        UserError,
        "the OpenCL driver crashed on {where}",
        "a kernel that accesses only its arrays, and a driver that compiles it",
        "check the kernel's indices, then run it again: the board is still usable",
    ),
}
"""The error class, summary, expectation and fix by kind of fault.

The placeholder ``{where}`` is the board's address; other placeholders vary by fault.
"""

_OF_LOADER = (
    *("busy", "architecture", "memory"),
    *("no-opencl", "no-device", "build", "device-memory", "work-group", "driver"),
)


def error_of(kind: str, found: str, **words: object) -> UserError:
    """The error for a kind of fault. ``words`` replace the placeholders in the error's messages.

    Raises KeyError for an unknown kind.
    """
    error, *texts = TABLE[kind]
    summary, expected, fix = (text.format(**words) for text in texts)
    return error(summary, expected=expected, found=found, fix=fix)


def loader_error(kind: str, found: str, **words: object) -> UserError:
    """The error for a fault that the loader reported. Kinds outside ``_OF_LOADER`` are treated as ``refused``."""
    return error_of(kind if kind in _OF_LOADER else "refused", found, **words)
