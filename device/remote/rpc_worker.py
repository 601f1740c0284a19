"""Compile a kernel and, if the request has an address, run and time it over TVM's RPC.

    python -m device.remote.rpc_worker < REQUEST

REQUEST is a JSON object: ``kernel`` (a file), ``size``, ``target``, ``linker``, ``library`` (a file to write),
``address`` (see ``device.remote.address``; null: compile only), ``number``, ``repeat``, ``min_repeat_ms``, ``warm_up``,
``queue_limit_s``, ``session_limit_s``. For the output, see ``reporting``.

The board's server ends a session after ``session_limit_s``. The time limit for each stage in a session is slightly
longer than ``session_limit_s``, so a stage exceeds its limit only if the board no longer responds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from device.remote import comparing, compiling
from device.remote.reporting import FAULT_STATUS, Fault, serve, stage, tell

COMPILE_LIMIT_S = 600.0
CONNECT_LIMIT_S = 20.0
GRACE_S = 10.0
"""The delay between a session's own time limit and the time when the session is considered lost."""

PAUSE_S = 1.0
"""The delay between two attempts to get a board if TVM returns immediately instead of waiting."""
AT_ONCE_S = 30.0
"""Proxies that do not allow clients to wait report an error within this time; other proxies report it after 600 s."""

# Messages from TVM's client (src/runtime/rpc/rpc_socket_impl.cc).
_NO_SUCH_KEY = "cannot find server that matches key"
_KEY_WAITED_FOR = "server already have key"
_PROXY = re.compile(r"proxy\[(?P<keys>.*)\]")
_TIMED_OUT = ("RPCSessionTimeoutError", "session has expired")
_CLOSED = ("socket", "Socket", "closed", "Connection", "connection", "Broken pipe", "rpc_endpoint", "code=")
_UNLOADABLE = ("cannot open shared object", "wrong ELF class", "invalid ELF header", "Exec format", "Failed to load")
_ELF = struct.Struct("<4sBB10xHH")


def _run(request: Mapping[str, Any]) -> None:
    path, library = Path(request["kernel"]), Path(request["library"])
    with stage("compile", COMPILE_LIMIT_S):
        kernel = compiling.load(path, request["size"])
        alone = request["address"] is None
        entry = compiling.export(path, kernel, request["target"], request["linker"], library, standalone=alone)
    tell(kernel=kernel.name, size=kernel.size, shape=kernel.shape, operations=kernel.operations, entry=entry)
    if request["address"] is None:
        return
    with translated(request["session_limit_s"]):
        session = open_session(request["address"], request["queue_limit_s"], request["session_limit_s"])
        _measure(session, kernel, entry, library, request)


@contextlib.contextmanager
def translated(session_limit_s: float) -> Iterator[None]:
    """Convert exceptions from TVM to the corresponding Fault."""
    began = time.monotonic()
    try:
        yield
    except Fault:
        raise
    except Exception as fault:
        text = f"{type(fault).__name__}: {fault}"
        held = time.monotonic() - began
        if any(word in text for word in _TIMED_OUT):
            raise Fault("timed-out", f"the board's server ended the session after {session_limit_s:g} s") from fault
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found = f"{lines[0]} … {lines[-1]}"[:400] if len(lines) > 1 else text[:400]
        if any(word in text for word in _CLOSED) or isinstance(fault, (OSError, EOFError)):
            raise Fault("lost", f"the connection was lost {held:.1f} s after the request ({found})") from fault
        raise Fault("refused", found) from fault


# ------------------------------------------------------------------------------------------------ sessions


def open_session(address: Mapping[str, Any], queue_limit_s: float, session_limit_s: float) -> Any:
    """Connect to the board, and wait until it is free. Raises Fault."""
    from tvm import rpc

    kind, host, port, key = (address[name] for name in ("kind", "host", "port", "key"))
    if kind == "local":
        with stage("connect", CONNECT_LIMIT_S):
            return rpc.LocalSession()
    seconds = max(1, round(session_limit_s))
    with stage("reach", CONNECT_LIMIT_S):
        _require_answer(host, port)
        if kind == "tracker":
            _require_known(rpc, host, port, key)
    # A server with an active session accepts the connection, but does not respond until that session ends.
    with stage("queue", queue_limit_s):
        session = _connected(rpc, kind, host, port, key, seconds)
    tell(board=_peer(kind, host, port, key))
    return session


def _connected(rpc: Any, kind: str, host: str, port: int, key: str, seconds: int) -> Any:
    """Open a session. If TVM returns immediately instead of waiting for a board, retry until the stage's time limit."""
    while True:
        began = time.monotonic()
        try:
            if kind == "tracker":
                return rpc.connect_tracker(host, port).request(key, session_timeout=seconds, max_retry=1)
            return rpc.connect(host, port, key, session_timeout=seconds)
        except Exception as fault:
            if _NO_SUCH_KEY in str(fault):
                if kind == "direct":
                    raise Fault("unknown", "the server has a key: connect through its tracker or proxy") from fault
                if kind == "proxy" and time.monotonic() - began < AT_ONCE_S:
                    raise Fault("unknown", "the proxy has a tracker, which assigns its boards") from fault
                # Otherwise, a proxy timed out, or a tracker assigned a board that has disconnected from its proxy.
            elif _KEY_WAITED_FOR not in str(fault):  # a proxy lets only one client wait for a key
                raise
        time.sleep(PAUSE_S)


def _require_answer(host: str, port: int) -> None:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S / 2):
            pass
    except (OSError, UnicodeError) as fault:  # UnicodeError: a name that DNS does not allow
        raise Fault("silent", getattr(fault, "strerror", None) or str(fault)) from fault


def _require_known(rpc: Any, host: str, port: int, key: str) -> None:
    """Raise Fault ``unknown`` for a key that no board has, because the tracker would let the client wait forever."""
    try:
        tracker = rpc.connect_tracker(host, port)
        summary = tracker.summary()
        tracker.close()
    except (RuntimeError, OSError, ValueError) as fault:
        raise Fault("silent", f"not a tracker ({fault})") from fault
    boards: dict[str, int] = {}
    proxied: set[str] = set()
    for item in summary["server_info"]:
        name = str(item.get("key", "")).removeprefix("server:")
        proxy = _PROXY.fullmatch(name)  # contains the keys of all boards that ever connected to it
        proxied |= set(proxy["keys"].split(",")) if proxy else set()
        for each in proxy["keys"].split(",") if proxy else [name]:
            if each:
                boards[each] = boards.get(each, 0) + 1
    queue = summary["queue_info"]
    if key not in boards and queue.get(key, {"free": 0})["free"] == 0:
        others = sorted({*boards, *(name for name, state in queue.items() if state["free"])})
        raise Fault("unknown", f"the tracker offers {', '.join(others) or 'no boards'}")
    state = queue.get(key, {"free": 0, "pending": 0})
    count = max(boards.get(key, 0), state["free"])
    tell(boards=count, free=state["free"], waiting=state["pending"], proxied=key in proxied)


def _peer(kind: str, host: str, port: int, key: str) -> str:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            host = f"[{host}]"
    return f"{host}:{port}" + (f"/{key}" if key else "") + f" ({kind})"


# ---------------------------------------------------------------------------------------------- measuring


def _measure(session: Any, kernel: compiling.Kernel, entry: str, library: Path, request: Mapping[str, Any]) -> None:
    import tvm

    limit_s = request["session_limit_s"] + GRACE_S
    with stage("upload", limit_s):
        session.upload(str(library))
    with stage("load", limit_s):
        module = loaded(session, library)
    device = session.cpu()
    tell(model=board_model(session))
    with stage("run", limit_s):
        arrays = [tvm.runtime.tensor(item, device) for item in kernel.arrays]
        arrays.append(tvm.runtime.tensor(comparing.blank(kernel.expected), device))
        function = module[entry]
        function(*arrays)
        result = arrays[-1].numpy()
    require_agreement([result], [kernel.expected], [kernel.tolerance])
    tell(checked=int(kernel.expected.size))
    with stage("time", limit_s):
        for _ in range(request["warm_up"]):
            function(*arrays)
        evaluate = module.time_evaluator(
            entry,
            device,
            number=request["number"],
            repeat=request["repeat"],
            min_repeat_ms=request["min_repeat_ms"],
        )
        measured = evaluate(*arrays)
    tell(seconds=[float(item) for item in measured.results])


def require_agreement(found: Sequence[Any], expected: Sequence[Any], tolerances: Sequence[tuple[float, float]]) -> None:
    """If a result differs from its reference, report the first difference and end the worker."""
    wrong = comparing.first_mismatch(found, expected, tolerances)
    if wrong is not None:
        tell(fault="mismatch", found="", **wrong)
        raise SystemExit(FAULT_STATUS)


def loaded(session: Any, library: Path) -> Any:
    """Load the uploaded library on the board. Raises Fault."""
    try:
        return session.load_module(library.name)
    except Exception as fault:
        # The board's dynamic loader may report only "No such file" if the library is for another machine.
        if not any(word in str(fault) for word in _UNLOADABLE):
            raise
        words = [line.strip() for line in str(fault).splitlines() if any(word in line for word in _UNLOADABLE)]
        board, ours = _board_machine(session), _machine(library.read_bytes()[: _ELF.size])
        if board and board != ours:
            raise Fault("architecture", f"the board runs {board}, the code is for {ours}") from fault
        raise Fault("refused", f"the board cannot load the code: {words[0][:300]}") from fault


def _board_machine(session: Any) -> str:
    """The machine type of the board's programs; empty if unknown."""
    # For an absolute path, the server ignores its work folder. /bin/true is read because it is a small program.
    with contextlib.suppress(Exception):
        return _machine(bytes(session.download("/bin/true"))[: _ELF.size])
    return ""


def board_model(session: Any) -> str:
    """The board's name in the device tree; empty if there is none."""
    with contextlib.suppress(Exception):
        return bytes(session.download("/proc/device-tree/model")).decode().strip("\0\n ")
    return ""


def _machine(header: bytes) -> str:
    """Return the machine and the width in an ELF header as text (System V ABI, "ELF header")."""
    names = {3: "x86", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V"}
    if len(header) < _ELF.size or header[:4] != b"\x7fELF":
        return ""
    _, width, _, _, machine = _ELF.unpack(header)
    return f"{names.get(machine, f'machine {machine}')} ({32 * width}-bit)"


if __name__ == "__main__":
    serve(_run)
