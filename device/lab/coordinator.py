"""A client for labgrid's coordinator that reads and changes places and reservations.

Requests that need a session (reserve, acquire) are sent through the program labgrid-client, which opens the session.
Most other requests are sent directly to labgrid's gRPC interface, because a gRPC call takes milliseconds, whereas
labgrid-client takes a second to start.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from labgrid.remote.generated import labgrid_coordinator_pb2 as messages
from labgrid.remote.generated.labgrid_coordinator_pb2_grpc import CoordinatorStub

from device.labgrid_environment import client_environment, own_user
from toolchain import process
from toolchain.errors import CommandFailed, NetworkUnreachable, UserError

_CALL_LIMIT_S = 15.0
"""The time limit for a call. labgrid's coordinator itself waits 10 s for an exporter."""


def own_name() -> str:
    """The name (``HOST/USER``) under which labgrid-client acquires places for this user."""
    return f"{os.environ.get('LG_HOSTNAME', socket.gethostname())}/{own_user()}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place.

    ``holder`` is ``HOST/USER``, or empty if nobody holds the place; ``since`` is the Unix time of the last change.
    """

    name: str
    tags: Mapping[str, str]
    matches: tuple[str, ...]
    holder: str
    since: float
    resources: tuple[str, ...]
    """The classes of the place's resources; empty while nobody holds the place."""

    def held_text(self) -> str:
        """A sentence that states who holds the place and since when."""
        since = datetime.datetime.fromtimestamp(self.since).astimezone()
        return f"{self.name} is held by {self.holder} (since {since:%Y-%m-%d %H:%M:%S})"


@dataclass(frozen=True)
class Coordinator:
    """A coordinator at ``address`` (HOST:PORT)."""

    address: str

    def places(self) -> dict[str, Place]:
        """All places by name. Raises NetworkUnreachable."""
        found = self._call("GetPlaces").places
        return {
            item.name: Place(
                name=item.name,
                tags=dict(item.tags),
                matches=tuple(f"{match.exporter}/{match.group}/{match.cls}" for match in item.matches),
                holder=item.acquired if item.HasField("acquired") else "",
                since=item.changed,
                resources=tuple(path.split("/")[2] for path in item.acquired_resources),
            )
            for item in found
        }

    def exported(self) -> dict[str, frozenset[str]]:
        """Return a mapping from each ``EXPORTER/GROUP`` to the classes of the group's resources."""
        found: dict[str, frozenset[str]] = {}
        for line in self.client("complete", "resources").output.split():
            group, _, kind = line.rpartition("/")
            found[group] = found.get(group, frozenset()) | {kind}
        return found

    def define(self, name: str, tags: Mapping[str, str], match: str) -> bool:
        """Create a place, or update its tags and its resource match. Return whether anything changed.

        An existing place keeps its tag ``quarantine``, which only test runs set. Raises UserError if the board of an
        existing place belongs to another exporter.
        """
        old = self.places().get(name)
        exporter = match.partition("/")[0]
        if old and (others := [pattern for pattern in old.matches if pattern.partition("/")[0] != exporter]):
            raise UserError(
                f"the place {name} belongs to another PC",
                expected=f"a place name that no other PC uses on the coordinator at {self.address}",
                found=f"a place with the resources {', '.join(others)}",
                fix="choose another name for the row in lab.boards; if the other PC was renamed or no longer exists, "
                f"run .venv/bin/labgrid-client -x {self.address} -p {name} delete",
            )
        before = dict(old.tags) if old else {}
        tags = {"quarantine": before.get("quarantine", "no"), **tags}
        changed = {key: tags.get(key, "") for key in {*before, *tags} if before.get(key) != tags.get(key)}
        if old is None:
            self._call("AddPlace", name=name)
        if changed:
            self._call("SetPlaceTags", placename=name, tags=changed)
        for pattern in set(old.matches if old else ()) - {match}:
            self._call("DeletePlaceMatch", placename=name, pattern=pattern)
        if old is None or match not in old.matches:
            self._call("AddPlaceMatch", placename=name, pattern=match)
        return old is None or bool(changed) or old.matches != (match,)

    def tag(self, name: str, key: str, value: str) -> None:
        """Set a tag on a place; an empty value removes the tag."""
        self._call("SetPlaceTags", placename=name, tags={key: value})

    def delete(self, name: str) -> None:
        """Delete a place."""
        self._call("DeletePlace", name=name)

    def release(self, name: str, holder: str) -> None:
        """Release a place if ``holder`` holds it; otherwise do nothing."""
        self._call("ReleasePlace", placename=name, fromuser=holder)

    def allocated(self, token: str) -> str:
        """The name of the place allocated to a reservation; empty if none is allocated yet. Extends the reservation."""
        found = self._call("PollReservation", token=token).reservation
        return str(found.allocations["main"]) if "main" in found.allocations else ""

    def cancel(self, token: str) -> None:
        """Cancel a reservation, unless it has already expired."""
        with contextlib.suppress(CommandFailed):
            self._call("CancelReservation", token=token)

    def client(self, *words: str) -> process.Completed:
        """Run labgrid-client, and return its standard output. Raises CommandFailed with the program's messages."""
        return process.run(
            [program("labgrid-client"), "-x", self.address, *words],
            env=client_environment(self.address),
            limit_s=120,
            merge_stderr=False,
        )

    def responds(self) -> bool:
        """Whether the coordinator responds."""
        try:
            self.places()
        except NetworkUnreachable:
            return False
        return True

    def _call(self, method: str, **fields: object) -> Any:
        """Call a method of the coordinator with these fields, and return the response.

        Raises NetworkUnreachable, or CommandFailed if the coordinator refuses the request.
        """
        request = getattr(messages, f"{method}Request")(**fields)
        with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                return getattr(CoordinatorStub(channel), method)(request, timeout=_CALL_LIMIT_S)
            except grpc.RpcError as fault:
                if fault.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise NetworkUnreachable(
                        f"labgrid's coordinator at {self.address} does not respond",
                        expected="a coordinator at the address in lab.coordinator",
                        found=str(fault.details()),
                        fix="run ./inv lab up on the coordinator's PC, or correct lab.coordinator",
                    ) from fault
                raise CommandFailed("labgrid's coordinator refused a request", found=str(fault.details())) from fault


def program(name: str) -> Path:
    """The path of one of labgrid's programs, which are installed next to the running Python interpreter."""
    return Path(sys.executable).with_name(name)
