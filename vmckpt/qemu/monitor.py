"""A connection to one QEMU monitor, with time-outs and errors that say what is certain."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, NotRequired, Self, TypedDict, TypeVar

from qemu.qmp import (
    EventListener,
    ExecInterruptedError,
    ExecuteError,
    Message,
    QMPClient,
    QMPError,
)
from qemu.qmp.error import ProtocolError
from qemu.qmp.protocol import Runstate

from vmckpt.codec import convert
from vmckpt.errors import HostDownError, OutcomeUnknownError, VmckptError
from vmckpt.events.trace import trace_command
from vmckpt.foreign import MalformedError, parse
from vmckpt.qemu.shapes import EVENTS, FdSet

# The library logs every disconnect as an error; here it is raised where it matters.
logging.getLogger("qemu.qmp").addHandler(logging.NullHandler())
logging.getLogger("qemu.qmp").propagate = False

Json = Mapping[str, Any]
T = TypeVar("T")

REPLY_TIMEOUT_S = 10.0
# query-qmp-schema answers one line of about 210 kB.
READ_BUFFER_BYTES = 4 << 20
# Limits: events waiting to be read, and bytes per event (QEMU's are a few hundred bytes).
MOST_EVENTS, MOST_EVENT_BYTES = 4096, 64 << 10


# How much of any message is read to identify it.
_Error = TypedDict("_Error", {"class": str, "desc": str})


class _Greeting(TypedDict):
    version: dict[str, Any]
    capabilities: list[Any]


class _Message(TypedDict):
    id: NotRequired[str]
    event: NotRequired[str]
    data: NotRequired[dict[str, Any]]
    error: NotRequired[_Error]
    QMP: NotRequired[_Greeting]


class NotQmpError(ProtocolError):
    """The data from the socket is not a QMP message."""


class _Client(QMPClient):
    """Disable the library's log of each message.

    Logging costs more than the rest of a message (14 us), several times in each epoch's pause.
    """

    async def _do_recv(self) -> Message:
        """The library's method, with checks: other exceptions than ProtocolError would break it.

        Raises ProtocolError.
        """
        try:
            line = await self._readline()
            reply = parse(line, most_bytes=READ_BUFFER_BYTES)
            convert(_Message, reply)
            if "event" in reply and len(line) > MOST_EVENT_BYTES:
                raise ValueError(f"an event of {len(line)} bytes")
        except ValueError as exc:  # includes a line that is too long
            raise NotQmpError(f"QEMU sent what is not QMP: {exc}") from exc
        message = Message(b"{}", eager=False)
        message.update(reply)
        return message

    def _cb_outbound(self, msg: Message) -> Message:
        return msg

    def _cb_inbound(self, msg: Message) -> Message:
        return msg


class _Listener(EventListener):
    """Keeps an event only until it is taken: the library's listener keeps all events ever received.

    A QEMU that sends more than can be read has been compromised.
    """

    async def put(self, event: Message) -> None:
        """Raises NotQmpError, which ends the connection."""
        if self.accept(event):
            if self._queue.qsize() >= MOST_EVENTS:
                raise NotQmpError(f"QEMU sent {MOST_EVENTS} events without a pause")
            await self._queue.put(event)


class CommandRefusedError(VmckptError):
    """QEMU answered a command with an error; the command had no effect."""

    exit_code = 7
    kind = "refused-by-qemu"

    def __init__(self, label: str, command: str, description: str) -> None:
        super().__init__(
            f"{label} refused {command}",
            why=description,
            remedy="see the VM's stderr.log; `vmckpt check` may name the cause",
        )
        self.command, self.description = command, description


class MonitorLostError(HostDownError):
    """The monitor's socket is closed, missing, silent or not QMP; no request was sent to QEMU."""


class Monitor:
    """One QMP session. Owns its socket; closing it never affects the guest.

    `label` names the QEMU in errors ("web on host a"). `is_lent`: another program's QEMU, which
    gets descriptors (`relayed.py`): it may not be able to open our files.
    """

    is_lent: ClassVar[bool] = False

    def __init__(self, client: QMPClient, label: str) -> None:
        self._client = client
        self.label = label

    @classmethod
    async def connect(cls, sock: socket.socket, label: str, timeout_s: float = 5.0) -> Self:
        """Negotiate on a connected stream socket, which this takes over.

        Raises MonitorLostError: no greeting within `timeout_s` (another client holds the monitor,
        or QEMU is stuck), or the peer is not a QMP server.
        """
        client = _Client(label, readbuflen=READ_BUFFER_BYTES)
        # It would collect every event, and nothing reads them.
        client.events.event_filter = lambda _: False
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(sock)
        except TimeoutError as exc:
            sock.close()
            raise MonitorLostError(
                f"the monitor of {label} is silent",
                why=f"no greeting in {timeout_s:g} s: another client holds it, or QEMU is stuck",
                remedy="end the other client, or check the QEMU process",
            ) from exc
        except (QMPError, OSError, EOFError, ValueError) as exc:
            sock.close()
            raise MonitorLostError(
                f"the monitor of {label} does not speak QMP",
                why=str(exc) or type(exc).__name__,
                remedy="check that the socket is a QMP server of a running QEMU",
            ) from exc
        return cls(client, label)

    @property
    def is_open(self) -> bool:
        """False once QEMU has closed the connection."""
        return bool(self._client.runstate == Runstate.RUNNING)

    async def ask(
        self,
        command: str,
        kind: type[T],
        arguments: Json | None = None,
        timeout_s: float | None = REPLY_TIMEOUT_S,
    ) -> T:
        """Send a command that changes nothing; return its answer, of type `kind`.

        A `timeout_s` of None waits as long as QEMU lives. Raises CommandRefusedError,
        MonitorLostError.
        """
        try:
            return convert(kind, await self._execute(command, arguments, timeout_s))
        except MalformedError as exc:
            raise self.malformed(command, str(exc)) from exc
        except (TimeoutError, QMPError, EOFError, OSError) as exc:
            raise MonitorLostError(
                f"{self.label} did not answer {command}",
                why=_reason(exc, timeout_s),
                remedy="check whether the QEMU process still runs",
            ) from exc

    async def tell(
        self,
        command: str,
        arguments: Json | None = None,
        timeout_s: float | None = REPLY_TIMEOUT_S,
        *,
        oob: bool = False,
        kind: Any = None,
    ) -> Any:
        """Send a command that has an effect; return its answer, of type `kind` if given.

        `timeout_s` as above.

        Raises CommandRefusedError (no effect), OutcomeUnknownError (no answer: it may have
        happened).
        """
        try:
            reply = await self._execute(command, arguments, timeout_s, oob=oob)
            return convert(kind, reply) if kind else reply
        except (TimeoutError, QMPError, EOFError, OSError, MalformedError) as exc:
            raise OutcomeUnknownError(
                f"{self.label} did not answer {command}",
                why=f"{_reason(exc, timeout_s)}: it is unknown whether it took effect",
                remedy="ask QEMU for its state before doing anything else",
            ) from exc

    async def _execute(
        self,
        command: str,
        arguments: Json | None,
        timeout_s: float | None,
        *,
        oob: bool = False,
    ) -> object:
        if not self.is_open:
            raise ExecInterruptedError("the connection is closed")
        trace_command(self.label, command, arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.execute(command, arguments, oob=oob)
        except ExecuteError as exc:
            raise CommandRefusedError(self.label, command, str(exc)) from exc

    def malformed(self, command: str, why: str) -> MonitorLostError:
        """The error for a malformed answer."""
        return MonitorLostError(
            f"{self.label} gave a malformed answer to {command}",
            why=why,
            remedy="see what runs behind its monitor's socket",
        )

    async def give_fd(self, name: str, fd: int) -> None:
        """Give QEMU a copy of a descriptor, for one command (`fd:NAME`). Raises as `tell` does.

        Works only over a local Unix socket.
        """
        self._send_fd(fd)
        await self.tell("getfd", {"fdname": name})

    async def add_fd(self, fd: int) -> int:
        """Give QEMU a copy of a descriptor to keep; return the N of its /dev/fdset/N. As above."""
        self._send_fd(fd)
        added: FdSet = await self.tell("add-fd", kind=FdSet)
        return added["fdset-id"]

    def _send_fd(self, fd: int) -> None:
        try:
            self._client.send_fd_scm(fd)
        except (QMPError, OSError) as exc:
            raise MonitorLostError(
                f"{self.label} takes no descriptor",
                why=str(exc) or type(exc).__name__,
                remedy="check whether the QEMU process still runs",
            ) from exc

    @contextmanager
    def events(self, *names: str) -> Iterator["Events"]:
        """Collect the named events from here to the end of the block."""
        listener = _Listener(names)
        with self._client.listen(listener):
            yield Events(listener, self)

    async def reopen(self) -> None:
        """Connect again, where the connection can have ended without its QEMU (`relayed.py`).

        Raises HostDownError: what relays it does not answer.
        """

    async def close(self) -> None:
        """Disconnect. A QEMU that has quit already is not an error."""
        try:
            await self._client.disconnect()
        except (QMPError, EOFError, OSError):
            return  # The reader's last exception (EOFError of a QEMU that quit) was the only news.


class Events:
    """The events since the block began, in order; their data has the types in EVENTS.

    Raises MonitorLostError for a malformed event.
    """

    def __init__(self, listener: EventListener, monitor: Monitor) -> None:
        self._listener, self._monitor = listener, monitor

    async def next(self, timeout_s: float) -> Message | None:
        """The next event, or None if none arrived within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return self._checked(await self._listener.get())
        except TimeoutError:
            return None

    def drain(self) -> Sequence[Message]:
        """All events received so far, without waiting."""
        return [self._checked(event) for event in self._listener.clear()]

    def _checked(self, event: Message) -> Message:
        name = str(event["event"])
        try:
            convert(EVENTS.get(name, object), event.get("data"))
        except MalformedError as exc:
            raise self._monitor.malformed(f"its description of itself ({name})", str(exc)) from exc
        return event


@asynccontextmanager
async def session(
    sock: socket.socket, label: str, timeout_s: float = 5.0
) -> AsyncIterator[Monitor]:
    """A monitor for the block, closed after it."""
    monitor = await Monitor.connect(sock, label, timeout_s)
    try:
        yield monitor
    finally:
        await monitor.close()


def _reason(exc: BaseException, timeout_s: float | None) -> str:
    if isinstance(exc, TimeoutError) and timeout_s is not None:
        return f"no answer within {timeout_s:g} s"
    return str(exc) or type(exc).__name__
