"""The paths between primary and standby: the connection, and a second path.

The second path carries datagrams (`wire/beats.py`) between the hosts' second addresses, on another
network. It carries no epochs. A side that is heard over it is alive, even if the connection is
lost: its term is not claimed, and the loss is reported.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from vmckpt.errors import OperationFailedError
from vmckpt.lease.clock import boottime_s
from vmckpt.preflight.replication.checks import lacks_second
from vmckpt.replicate.channel import HEARTBEAT_S, PATIENCE_S
from vmckpt.replicate.request import ReplicationRequest
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.replicate.wire.beats import Hearing, Sender, beat_key
from vmckpt.replicate.wire.errors import WireError

# The state of a path. ONE_WAY: the other side is heard, but says that it does not hear this one.
# WAITING: nothing has arrived yet, or was due. NONE: there is no such path.
HEARD, ONE_WAY, SILENT, WAITING, NONE = "heard", "one way", "silent", "waiting", "none"
UNHEARD = (ONE_WAY, SILENT)
FIRST, SECOND = "replication", "second"


class SecondPath(asyncio.DatagramProtocol):
    """This side's end of the second path; it receives on `port`, which `other` knows.

    Without addresses there is no second path, and `lacks` says why.
    """

    def __init__(
        self, hearing: Hearing, other: str, here: str = "", there: str = "", *, lacks: str = ""
    ) -> None:
        self._hearing, self._other = hearing, other
        self.here, self.there, self.lacks = here, there, lacks
        self._transport: asyncio.DatagramTransport | None = None
        self._beating: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self.port: int | None = None

    @property
    def heard_s(self) -> float | None:
        """When the other side was last heard over it, by `clock.boottime_s`."""
        return self._hearing.heard_s

    async def open(self, ports: tuple[int, int] | None) -> None:
        """Listen on one of these ports, or any. Raises OperationFailedError."""
        loop = asyncio.get_running_loop()
        first, last = ports or (0, 0)
        for port in range(first, last + 1):
            try:
                await loop.create_datagram_endpoint(lambda: self, (self.here, port))
            except OSError as exc:
                if exc.errno == errno.EADDRINUSE and port < last:
                    continue
                why = f"{exc.strerror or exc}: it is configured as the host's second address"
                remedy = "name the right one, or none: vmckpt host set HOST --second-addr ..."
                if exc.errno == errno.EADDRINUSE:
                    why = f"every port of the host's, {first} to {last}, is in use there"
                    remedy = "give it more of them: vmckpt host set HOST --migration-ports ..."
                raise OperationFailedError(
                    f"heartbeats cannot be received at {self.here}", why=why, remedy=remedy
                ) from exc
            return

    def begin(self, port: int | None) -> None:
        """Send heartbeats to the other's port from now on."""
        if self._transport is not None and port is not None and self._beating is None:
            self._began_s = boottime_s()
            self._beating = asyncio.ensure_future(self._beat(self._transport, port))

    async def _beat(self, transport: asyncio.DatagramTransport, port: int) -> None:
        there = await self._resolved(transport.get_extra_info("socket").family, port)
        while True:
            transport.sendto(self._hearing.next_datagram(), there)
            await asyncio.sleep(HEARTBEAT_S)

    async def _resolved(self, family: int, port: int) -> Any:
        """The other side's address. A name is resolved once, and in a thread: nothing else, the
        lease least of all, may wait for a name server.
        """
        kind, numeric = socket.SOCK_DGRAM, socket.AI_NUMERICHOST
        with suppress(socket.gaierror):  # a name
            return socket.getaddrinfo(self.there, port, family, kind, flags=numeric)[0][4]
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError, UnicodeError, RuntimeError):  # no answer, or no thread
                found = await loop.getaddrinfo(self.there, port, family=family, type=kind)
                return found[0][4]
            await asyncio.sleep(HEARTBEAT_S)

    def close(self) -> None:
        """Stop sending and listening."""
        if self._beating is not None:
            self._beating.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """The socket is open."""
        self._transport = transport
        self.port = int(transport.get_extra_info("sockname")[1])

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """A datagram arrived; one that the other side did not make is ignored."""
        before_s, now_s = self.heard_s, boottime_s()
        try:
            self._hearing.receive(data, now_s)
        except WireError:
            return
        if self.heard_s == now_s and before_s is not None and before_s < now_s - PATIENCE_S:
            self._began_s = now_s  # again: the other side has yet to hear of that

    def error_received(self, exc: Exception) -> None:
        """A datagram was not sent or received: the silence will show it."""

    def state(self) -> str:
        """The path's current state."""
        if self.lacks:
            return NONE
        if self._beating is None:
            return WAITING
        since_s, heard_s = boottime_s() - PATIENCE_S, self.heard_s
        if heard_s is None:
            return WAITING if self._began_s > since_s else SILENT
        if heard_s < since_s:
            return SILENT
        # Judged at the last datagram heard, not now: a path cut both ways never looks one-way.
        answered_s = max(self._hearing.answered_s or 0.0, self._began_s)
        return HEARD if heard_s - answered_s <= PATIENCE_S else ONE_WAY

    def diagnosis(self, connection_heard_s: float) -> str:
        """What is known of the other side while its connection is silent."""
        if self.lacks:
            return f"there is no second path to {self._other}: {self.lacks}"
        if self.heard_s is not None and self.heard_s > connection_heard_s + HEARTBEAT_S:
            alive = f"{self._other} is alive, as heartbeats at {self.here} show"
            return f"{alive}: only the connection is lost"
        if self.heard_s is not None and boottime_s() - self.heard_s <= 2 * HEARTBEAT_S:
            return f"{self._other} was heard at {self.here} until a moment ago"
        return f"no heartbeats of {self._other} arrive at {self.here} either"

    def added_to(
        self,
        status: ReplicaStatus,
        first: tuple[str, str],
        heard_s: float | None,
        *,
        is_lost: bool,
    ) -> ReplicaStatus:
        """The status with both paths: their state, addresses, and when each was last heard.

        `heard_s`: when anything last came over the connection between the addresses `first`; None:
        there is no connection yet.
        """
        now_s = boottime_s()
        if heard_s is None:
            connection = WAITING
        else:
            connection = SILENT if is_lost or now_s - heard_s > PATIENCE_S else HEARD
        times_s = {FIRST: heard_s, SECOND: self.heard_s}
        return replace(
            status,
            paths={FIRST: connection, SECOND: self.state()},
            path_addresses={FIRST: first, SECOND: (self.here, self.there)},
            path_heard_ms_ago={
                path: None if at_s is None else round((now_s - at_s) * 1e3, 1)
                for path, at_s in times_s.items()
            },
            second_path_lacks=self.lacks,
        )


@asynccontextmanager
async def second_path(
    request: ReplicationRequest, side: Sender, token: str
) -> AsyncIterator[SecondPath]:
    """For the block: this side's end of it, if each host has a second address.

    Raises OperationFailedError: it is not this host's.
    """
    ours, theirs = request.primary, request.standby
    if side is Sender.STANDBY:
        ours, theirs = theirs, ours
    hearing, lacks = Hearing(side, beat_key(token)), lacks_second(ours, theirs)
    if lacks or ours.second_address is None or theirs.second_address is None:
        yield SecondPath(hearing, theirs.name, lacks=lacks)
        return
    path = SecondPath(hearing, theirs.name, ours.second_address, theirs.second_address)
    await path.open(ours.migration_ports)
    try:
        yield path
    finally:
        path.close()
