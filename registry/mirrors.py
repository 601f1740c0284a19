"""Add and remove registry mirrors in the engine's ``daemon.json``.

A mirror is a pull-through cache that the engine queries before Docker Hub. The engine accepts ``http(s)://HOST[:PORT]``
without path, query, fragment or user (moby: registry/config.go, ValidateMirror) and prints the URL with a slash at the
end.

The file's indentation, owner and mode, its other keys and the order of the keys are preserved, and a backup is written.
The new file is validated (as JSON and, from Docker 23.0, by ``dockerd --validate``) and renamed into place. If systemd
or ``./inv`` started the engine, it is reloaded; mirrors do not require a restart. Otherwise the command for reloading
the engine is printed. Finally the engine is asked which mirrors it uses. If these mirrors differ from those in the
file, or if the reload failed, the old file is restored and the engine is reloaded again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker.errors
import requests

from engine import systemd
from engine.connect import connect, selected
from engine.dockerd import Daemon
from engine.start import ensure_daemon
from toolchain import caller, files, process
from toolchain.errors import CommandFailed, EngineUnavailable, UserError

DAEMON_JSON = Path("/etc/docker/daemon.json")

_KEY = "registry-mirrors"
_PIDFILES = (Path("/var/run/docker.pid"), Path("/run/docker.pid"))
_RELOAD_LIMIT_S = 10.0
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")


@dataclass(frozen=True, kw_only=True)
class Mirrors:
    """The state of the mirrors after a task."""

    file: Path
    configured: tuple[str, ...]
    """The mirrors in the file."""
    active: tuple[str, ...] | None
    """The mirrors that the engine uses; None if no engine responds."""
    changed: bool = False
    backup: Path | None = None
    reload: str = ""
    """The command that reloaded the engine; or why it was not reloaded, with the command to run if one is needed."""

    @property
    def in_effect(self) -> bool:
        """Whether the engine uses the mirrors in the file."""
        return self.active is not None and [_plain(url) for url in self.active] == [
            _plain(url) for url in self.configured
        ]

    def lines(self) -> list[str]:
        """Return the state as lines of text."""
        found = [f"{self.file}: {'changed' if self.changed else 'unchanged'}, {_listed(self.configured)}"]
        if self.backup is not None:
            found.append(f"backup of the old file: {self.backup}")
        if self.reload:
            found.append(f"engine: {self.reload}")
        if self.active is not None:
            state = "same as in the file" if self.in_effect else "differs from the file"
            found.append(f"the engine uses {_listed(self.active)}: {state}")
        return found


def _listed(urls: Sequence[str]) -> str:
    return f"mirrors {', '.join(urls)}" if urls else "no mirrors"


def merge(urls: Sequence[str], *, daemon_json: Path = DAEMON_JSON, daemon: Daemon | None = None) -> Mirrors:
    """Append mirrors to the existing ones; mirrors that already exist keep their position.

    ``daemon`` is the engine that ``./inv`` may have started (``Daemon.of(config)``). Raises UserError if a URL is
    invalid (before any change) or if the engine does not use the new mirrors. Raises EngineUnavailable if the selected
    engine or its configuration cannot be used.
    """
    added = [_checked(url) for url in urls]

    def change(now: list[str]) -> list[str]:
        known = {_plain(url) for url in now}
        return [*now, *(url for url in dict.fromkeys(added) if url not in known)]

    return _apply(change, daemon_json, daemon)


def remove(urls: Sequence[str] = (), *, daemon_json: Path = DAEMON_JSON, daemon: Daemon | None = None) -> Mirrors:
    """Remove the given mirrors, or all if ``urls`` is empty; unknown mirrors are ignored.

    Raises the same exceptions as ``merge``.
    """
    removed = {_checked(url) for url in urls}

    def change(now: list[str]) -> list[str]:
        return [url for url in now if removed and _plain(url) not in removed]

    return _apply(change, daemon_json, daemon)


def show(*, daemon_json: Path = DAEMON_JSON) -> Mirrors:
    """Return the mirrors in the file and those that the engine uses. Raises EngineUnavailable."""
    document, _ = _read(daemon_json)
    return Mirrors(file=daemon_json, configured=tuple(document.get(_KEY, [])), active=_active())


def _apply(change: Callable[[list[str]], list[str]], daemon_json: Path, daemon: Daemon | None) -> Mirrors:
    selected()  # raises an error for an engine on another machine, which does not read this machine's file
    path = daemon_json.resolve()
    with _locked(path):
        document, old = _read(path)
        before: list[str] = list(document.get(_KEY, []))
        after = change(before)
        active = _active()
        backup = None
        if after != before:
            # Write an empty list instead of removing the key, because a reload changes only settings whose keys are in
            # the file (moby: daemon/reload.go).
            document[_KEY] = after
            _refuse_option(daemon)
            backup = _write(path, document, old)
        state = Mirrors(
            file=daemon_json,
            configured=tuple(after),
            active=active,
            changed=after != before,
            backup=backup,
        )
        try:
            return _reload(state, daemon)
        except BaseException as fault:  # including Ctrl-C
            if state.changed:
                if backup is None:
                    path.unlink(missing_ok=True)
                else:
                    os.replace(backup, path)
                note = f"{state.file} was restored, {_reload_restored(daemon, active)}"
                if isinstance(fault, UserError):
                    fault.found = "; ".join(part for part in (fault.found, note) if part)
            raise


def _reload(state: Mirrors, daemon: Daemon | None) -> Mirrors:
    """Return the new state.

    An engine that systemd or ``./inv`` started is reloaded if its mirrors differ from those in the file.
    """
    if state.in_effect:
        return state
    if state.active is None:
        return replace(state, reload="not running; it reads the file when it starts")
    argv = _reload_command(daemon)
    pid = _pid_of(daemon)
    if not argv:
        how = f"kill -HUP {pid}" if pid else "kill -HUP $(pidof dockerd)"
        return replace(state, reload=f"reload it yourself, because neither systemd nor ./inv started it: {how}")
    process.run(argv, limit_s=60, fix="correct the error in the command's output below, then run the task again")
    deadline = time.monotonic() + _RELOAD_LIMIT_S
    while True:
        state = replace(state, active=_active(), reload=process.pasteable(argv))
        if state.in_effect:
            return state
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    log = daemon.log if daemon is not None and argv[-2:-1] == ["-HUP"] else "journalctl -u docker.service"
    raise UserError(
        "the engine has not applied the configured list of mirrors",
        expected=f"the mirrors {', '.join(state.configured) or 'none'} to be in use after {process.pasteable(argv)}",
        found="no response" if state.active is None else f"it uses {', '.join(state.active) or 'none'}",
        fix=f"read the engine's log ({log}), check that the engine reads {state.file} (--config-file), and restart it "
        "if necessary",
    )


def _reload_restored(daemon: Daemon | None, used: Sequence[str] | None) -> str:
    """Reload the engine after the file was restored, or start it again if it has exited; return the outcome."""
    if used is None:
        return "and no engine was running before"
    try:
        if _active() is None and daemon is not None:
            ensure_daemon(daemon, selected())
        elif argv := _reload_command(daemon):
            process.run(argv, limit_s=60)
    except UserError as fault:
        return f"but the engine could not be reloaded: {fault.summary}"
    deadline = time.monotonic() + _RELOAD_LIMIT_S
    while (active := _active()) != used and time.monotonic() < deadline:
        time.sleep(0.1)
    if active is None:
        return "but the engine does not respond now"
    return "and the engine uses the previous mirrors" if active == used else "and the engine was reloaded"


def _reload_command(daemon: Daemon | None) -> list[str]:
    """Return the command that reloads an engine that ``./inv`` or systemd started, or [] for other engines."""
    sudo = ["sudo"] if os.geteuid() != 0 else []
    if daemon is not None and (started := daemon.recorded_process()):
        return [*sudo, "kill", "-HUP", str(started.pid)]
    return [*sudo, "systemctl", "reload", "docker.service"] if systemd.runs_engine() else []


def _as_root() -> str:
    return f"run the task as root: {caller.as_root('./inv mirror …')}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Allow only one task at a time to change the file.

    The folder itself is locked, so that no lock file remains in it.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(path.parent, lock_file=False))
        except OSError as fault:
            raise _unusable(path, "a writable folder", fault.strerror or "", fix=_as_root()) from fault
        yield


def _checked(url: str) -> str:
    """Return a normalised URL. Raises UserError if the URL is invalid."""
    fault = ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        parts, port, fault = urlsplit(""), None, str(problem)
    if not fault:
        if parts.scheme not in ("http", "https"):
            fault = f"the scheme {parts.scheme!r}" if parts.scheme and "://" in url else "no http:// or https://"
        elif "@" in parts.netloc:
            fault = "a user or password in it"
        elif not parts.hostname or not _HOST.fullmatch(parts.netloc) or port == 0:
            fault = f"the host {parts.netloc!r}"
        elif parts.path not in ("", "/"):
            fault = f"the path {parts.path}"
        elif "?" in url or "#" in url:
            fault = "a query or fragment"
    if fault:
        shown = re.sub(r"//[^/@]*@", "//…@", url)
        bare = _HOST.fullmatch(url.partition("/")[0])
        raise UserError(
            f"{shown!r} is not the address of a mirror",
            expected="http://HOST[:PORT] or https://HOST[:PORT]",
            found=fault,
            fix=f"pass https://{bare[0]}"
            if bare and "://" not in url
            else "pass the address that the mirror's documentation states",
        )
    return _plain(url)


def _plain(url: str) -> str:
    """Return a URL in lower case, without the slash that the engine appends. Scheme and host are case-insensitive."""
    return url.rstrip("/").lower()


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the document and its text; both are empty for a missing or empty file. Raises EngineUnavailable."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}, ""
    except UnicodeDecodeError as fault:
        raise _unusable(path, "UTF-8 text", str(fault)) from fault
    except OSError as fault:
        raise _unusable(path, "a readable file", fault.strerror or str(fault), fix=_as_root()) from fault
    if not text.strip():
        return {}, text
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except ValueError as fault:
        raise _unusable(path, "one JSON object", str(fault)) from fault
    if not isinstance(document, dict):
        raise _unusable(path, "one JSON object", f"a {type(document).__name__}")
    mirrors = document.get(_KEY, [])
    if not isinstance(mirrors, list) or not all(isinstance(url, str) for url in mirrors):
        raise _unusable(path, f'"{_KEY}" as a list of strings', json.dumps(mirrors)[:100])
    return document, text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice!r}")
    return found


def _unusable(path: Path, expected: str, found: str, *, fix: str = "") -> EngineUnavailable:
    return EngineUnavailable(
        f"the engine's configuration {path} cannot be used",
        expected=expected,
        found=found,
        fix=fix or f"correct {path}, which was not changed; the engine would not start with it either",
    )


def _write(path: Path, document: dict[str, Any], old: str) -> Path | None:
    """Validate, back up and replace the file; return the backup, or None if there was no file."""
    text = json.dumps(document, indent=_indentation(old), ensure_ascii=False) + "\n"
    backup = None
    try:
        with files.replacing(path) as aside:
            aside.touch(0o600)  # before the text is written, because the addresses of proxies can contain passwords
            aside.write_text(text, encoding="utf-8")
            _validate(aside, path)
            if path.exists():
                shutil.copymode(path, aside)
                _copy_owner(path, aside)
                backup = _back_up(path)
            else:
                aside.chmod(0o644)
    except PermissionError as fault:
        raise _unusable(path, "a writable file", "permission denied", fix=_as_root()) from fault
    except OSError as fault:
        raise _unusable(path, "a writable file", fault.strerror or str(fault)) from fault
    return backup


def _back_up(path: Path) -> Path:
    backup = path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.bak")
    backup.touch(0o600)
    shutil.copy2(path, backup)
    _copy_owner(path, backup)
    return backup


def _copy_owner(path: Path, to: Path) -> None:
    owner = path.stat()
    os.chown(to, owner.st_uid, owner.st_gid)


def _indentation(text: str) -> int | str:
    """Return the indentation of a file; by default two spaces, as in Docker's documentation."""
    match = re.search(r"^([ \t]+)\"", text, re.MULTILINE)
    return match[1] if match else 2


def _validate(aside: Path, path: Path) -> None:
    """Validate the file with dockerd, if dockerd is installed and supports ``--validate`` (23.0 and later)."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which("dockerd", path=search)
    if program is None or "--validate" not in process.output_of([program, "--help"]):
        return
    try:
        process.run([program, "--validate", f"--config-file={aside}"], limit_s=60)
    except CommandFailed as fault:
        found = " ".join(fault.tail.split()).replace(str(aside), str(path))
        raise _unusable(path, "a configuration that dockerd --validate accepts", found) from fault


def _refuse_option(daemon: Daemon | None) -> None:
    """Raise an error if dockerd's options set mirrors, because dockerd does not start if the file sets them too."""
    pid = _pid_of(daemon)
    if pid is None:
        return
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if any(word.partition("=")[0] == "--registry-mirror" for word in words):
        raise EngineUnavailable(
            "mirrors are set on the engine's command line",
            expected="mirrors only in daemon.json, because the engine does not start if its command line sets them too",
            found=f"--registry-mirror among the arguments of dockerd (pid {pid})",
            fix="remove the option from the engine's unit or start script, restart the engine, then run the task again",
        )


def _active() -> tuple[str, ...] | None:
    """Return the mirrors that the engine uses, or None if no engine responds."""
    try:
        client = connect(timeout_s=20)
    except EngineUnavailable:
        return None
    try:
        settings = client.api.info().get("RegistryConfig") or {}
    except (docker.errors.DockerException, requests.RequestException):  # the engine is exiting
        return None
    finally:
        client.close()
    return tuple(settings.get("Mirrors") or ())


def _pid_of(daemon: Daemon | None) -> int | None:
    """Return the local dockerd's process id from its pid file, or None if that process is not a dockerd."""
    own = [daemon.folder / "docker.pid"] if daemon is not None else []
    for pidfile in (*own, *_PIDFILES):
        with contextlib.suppress(OSError, ValueError):
            pid = int(pidfile.read_text())
            if Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd":
                return pid
    return None
