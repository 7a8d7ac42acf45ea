"""A QEMU's monitor that another program has, which relays commands to it.

That program started the QEMU, perhaps as another user, so files of ours may be out of its reach: it
is lent descriptors (`Monitor.is_lent`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NotRequired, Protocol, TypedDict

from qemu.qmp import EventListener, ExecInterruptedError, Message

from vmckpt.codec import convert
from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.events.trace import trace_command
from vmckpt.foreign import MalformedError, parse
from vmckpt.qemu.monitor import (
    MOST_EVENT_BYTES,
    MOST_EVENTS,
    READ_BUFFER_BYTES,
    REPLY_TIMEOUT_S,
    CommandRefusedError,
    Events,
    Json,
    Monitor,
)
from vmckpt.qemu.shapes import FdSet

# Numbers of our descriptor sets. The other program counts its own from 0.
FIRST_FDSET, MOST_FDSETS = 0x766B_0000, 1 << 16
_OURS = "vmckpt"


class _RelayedError(TypedDict):
    desc: str


_Reply = TypedDict("_Reply", {"return": NotRequired[Any], "error": NotRequired[_RelayedError]})
Receive = Callable[[str, str], None]


class Relay(Protocol):
    """The other program. Its errors about itself are VmckptErrors."""

    @property
    def is_open(self) -> bool:
        """Whether it still relays."""

    async def execute(
        self, command: str, arguments: Json | None, fd: int | None, timeout_s: float | None
    ) -> str:
        """Have QEMU execute a command, with a descriptor of ours; returns its reply, JSON.

        Commands are executed in the order of these calls. Raises HostDownError: no answer.
        """

    async def reopen(self) -> None:
        """Relay again, after the other program has ended and was started again. Raises
        HostDownError: it does not answer; what it raises: it does not relay.
        """

    async def close(self) -> None:
        """End it; QEMU and the guest continue."""


class _RelayedListener(EventListener):
    """Keeps an event only until it is taken."""

    def deliver(self, event: Message) -> None:
        """Keep it, if it is one of those that were asked for.

        Events beyond the limit are dropped: a QEMU that sends as many has been compromised.
        """
        if self.accept(event) and self._queue.qsize() < MOST_EVENTS:
            self._queue.put_nowait(event)


class RelayedMonitor(Monitor):
    """A session over a relay. Raises as `Monitor` does, and what the relay does."""

    is_lent = True

    def __init__(self, relay: Relay, label: str) -> None:
        self._relay, self.label = relay, label
        self._listeners = list[_RelayedListener]()
        self._fdsets = count(FIRST_FDSET)

    @property
    def is_open(self) -> bool:
        """False once the relay has ended."""
        return self._relay.is_open

    async def _execute(
        self,
        command: str,
        arguments: Json | None,
        timeout_s: float | None,
        *,
        oob: bool = False,
        fd: int | None = None,
    ) -> object:
        if oob:
            raise ExecInterruptedError("a relayed monitor has no out-of-band commands")
        trace_command(self.label, command, arguments)
        try:
            text = await self._relay.execute(command, arguments, fd, timeout_s)
            reply: _Reply = convert(_Reply, parse(text, most_bytes=READ_BUFFER_BYTES))
        except HostDownError as exc:
            raise ExecInterruptedError(f"{exc.what}: {exc.why}") from exc
        except MalformedError as exc:
            raise ExecInterruptedError(f"what it relayed is not QMP: {exc}") from exc
        if "error" in reply:
            raise CommandRefusedError(self.label, command, reply["error"]["desc"])
        return reply.get("return")

    async def give_fd(self, name: str, fd: int) -> None:
        """See `Monitor`."""
        await self._lend(fd, "getfd", {"fdname": name})

    async def add_fd(self, fd: int) -> int:
        """See `Monitor`."""
        number = next(self._fdsets)
        # libvirt 11.3 crashes at a set without words when it saves the domain.
        await self._lend(fd, "add-fd", {"fdset-id": number, "opaque": _OURS})
        return number

    async def forget_fds(self) -> None:
        """Have QEMU close all descriptors that `add_fd` gave it, in this session or an earlier
        one. Raises as `ask` and `tell` do.
        """
        for given in await self.ask("query-fdsets", list[FdSet]):
            number = given["fdset-id"]
            if FIRST_FDSET <= number < FIRST_FDSET + MOST_FDSETS:
                await self.tell("remove-fd", {"fdset-id": number})

    async def _lend(self, fd: int, command: str, arguments: Json) -> None:
        try:
            await self._execute(command, arguments, REPLY_TIMEOUT_S, fd=fd)
        except ExecInterruptedError as exc:
            raise OutcomeUnknownError(
                f"{self.label} did not answer {command}",
                why=f"{exc}: it is unknown whether it took effect",
                remedy="ask QEMU for its state before doing anything else",
            ) from exc

    def receive(self, name: str, data: str) -> None:
        """An event of this QEMU, its data as JSON or nothing. Call it in the event loop's thread.

        One that is malformed is left out.
        """
        try:
            found = parse(data, most_bytes=MOST_EVENT_BYTES) if data else {}
        except MalformedError:
            return
        event = Message(json.dumps({"event": name, "data": found}).encode())
        for listener in self._listeners:
            listener.deliver(event)

    @contextmanager
    def events(self, *names: str) -> Iterator[Events]:
        """See `Monitor`."""
        listener = _RelayedListener(names)
        self._listeners.append(listener)
        try:
            yield Events(listener, self)
        finally:
            self._listeners.remove(listener)

    async def reopen(self) -> None:
        """See `Monitor`."""
        if not self.is_open:
            await self._relay.reopen()

    async def close(self) -> None:
        """End the relay."""
        await self._relay.close()
