"""A client for labgrid's coordinator that reads and changes places and reservations.

The requests are sent directly to labgrid's gRPC interface, because a gRPC call takes milliseconds, whereas the program
labgrid-client takes a second to start.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from labgrid.remote.common import ResourceEntry, ResourceMatch
from labgrid.remote.generated import labgrid_coordinator_pb2 as messages
from labgrid.remote.generated.labgrid_coordinator_pb2_grpc import CoordinatorStub
from labgrid.util.version import labgrid_version

from device.labgrid_client import own_user
from toolchain import process
from toolchain.errors import CommandFailed, NetworkUnreachable, UserError

_CALL_LIMIT_S = 15.0
"""The time limit for a call. labgrid's coordinator itself waits 10 s for an exporter."""

_SESSION_LIMIT_S = 120.0
"""The time limit for a session. While a place is acquired, the coordinator waits up to 10 s for each resource."""

_INTERRUPTED = "interrupted while waiting for labgrid's coordinator"


def own_name() -> str:
    """The name (``HOST/USER``) under which places are acquired for this user."""
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
        with self.session() as (_, resources):
            for item in resources:
                group = f"{item.path.exporter_name}/{item.path.group_name}"
                found[group] = found.get(group, frozenset()) | {item.cls}
        return found

    def parameters(self, place: Place) -> dict[str, Mapping[str, Any]]:
        """Return a mapping from the classes of the place's exported resources to the resources' parameters."""
        with self.session() as (_, resources):
            return {
                item.cls: ResourceEntry(ResourceEntry.data_from_pb2(item)).args
                for item in resources
                if any(_matches(pattern, item) for pattern in place.matches)
            }

    def reserve(self, filters: Mapping[str, str]) -> str:
        """Reserve a place that has these tags, and return the reservation's token."""
        with self.session() as (stub, _):
            main = messages.Reservation.Filter(filter=filters)
            request = messages.CreateReservationRequest(filters={"main": main}, prio=0.0)
            return str(stub.CreateReservation(request, timeout=_CALL_LIMIT_S).reservation.token)

    def acquire(self, place: Place) -> None:
        """Acquire a place. Raises CommandFailed if a resource of the place is not exported."""
        with self.session() as (stub, resources):
            for pattern in place.matches:
                if not any(_matches(pattern, item) for item in resources):
                    raise CommandFailed("a resource is missing", found=f"no exported resource matches {pattern}")
            request = messages.AcquirePlaceRequest(placename=place.name)
            call = stub.AcquirePlace.future(request, timeout=_SESSION_LIMIT_S)
            with process.on_interrupt(call.cancel):
                call.result()

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

    def give_back(self, name: str, holder: str, token: str) -> None:
        """Cancel a reservation and release its place."""
        self.cancel(token)  # first, so that labgrid gives the released place to the next user
        self.release(name, holder)

    def responds(self) -> bool:
        """Whether the coordinator responds."""
        try:
            self.places()
        except NetworkUnreachable:
            return False
        return True

    def _call(self, method: str, **fields: object) -> Any:
        """Call a method of the coordinator with these fields, and return the response. Raises the errors of _stub."""
        with self._stub() as stub:
            return getattr(stub, method)(getattr(messages, f"{method}Request")(**fields), timeout=_CALL_LIMIT_S)

    @contextlib.contextmanager
    def session(self, *, limit_s: float = _SESSION_LIMIT_S) -> Iterator[tuple[CoordinatorStub, list[Any]]]:
        """Open a session under this user's name, and yield it with the exported resources. Raises the errors of _stub.

        Only a client with an open session can reserve or acquire places. Reservations and acquired places outlive the
        session, which ends after ``limit_s`` seconds at the latest.
        """
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        startup = messages.StartupDone(version=labgrid_version(), name=own_name())
        outgoing.put(messages.ClientInMessage(startup=startup))
        outgoing.put(messages.ClientInMessage(subscribe=messages.Subscribe(all_resources=True)))
        outgoing.put(messages.ClientInMessage(sync=messages.Sync(id=1)))
        resources: list[Any] = []
        with self._stub() as stub:
            try:
                incoming = stub.ClientStream(iter(outgoing.get, None), timeout=limit_s)
                with process.on_interrupt(incoming.cancel):
                    for message in incoming:
                        resources += [update.resource for update in message.updates if update.HasField("resource")]
                        if message.HasField("sync"):
                            break
                yield stub, resources
            finally:
                outgoing.put(None)

    @contextlib.contextmanager
    def _stub(self) -> Iterator[CoordinatorStub]:
        """Connect to the coordinator.

        Raises NetworkUnreachable, or CommandFailed if the coordinator refuses a request.
        """
        # Without a local pool, the sessions of several threads would share a connection; the coordinator rejects a
        # second session on a connection. The times for lost connections are those of labgrid-client.
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.keepalive_time_ms", 7500), ("grpc.keepalive_timeout_ms", 10000)]
        options += [("grpc.http2.ping_timeout_ms", 10000), ("grpc.http2.max_pings_without_data", 0)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            try:
                yield CoordinatorStub(channel)
            except grpc.FutureCancelledError as fault:
                raise CommandFailed(_INTERRUPTED) from fault
            except grpc.RpcError as fault:
                if fault.code() is grpc.StatusCode.CANCELLED:
                    raise CommandFailed(_INTERRUPTED) from fault
                if fault.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise NetworkUnreachable(
                        f"labgrid's coordinator at {self.address} does not respond",
                        expected="a coordinator at the address in lab.coordinator",
                        found=str(fault.details()),
                        fix="run ./inv lab up on the coordinator's PC, or correct lab.coordinator",
                    ) from fault
                raise CommandFailed("labgrid's coordinator refused a request", found=str(fault.details())) from fault


def _matches(pattern: str, resource: Any) -> bool:
    """Whether a pattern of a place, ``EXPORTER/GROUP/CLASS`` with wildcards, matches an exported resource."""
    path = (resource.path.exporter_name, resource.path.group_name, resource.cls)
    return bool(ResourceMatch.fromstr(pattern).ismatch(path))
