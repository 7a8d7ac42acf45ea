"""Frames over a connection between primary and standby, each verified before use."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from vmckpt.errors import HostDownError
from vmckpt.lease.clock import boottime_s
from vmckpt.replicate.wire.frames import (
    HEAD_BYTES,
    Buffer,
    FrameHead,
    FrameKind,
    Inbound,
    Outbound,
    require_whole,
)
from vmckpt.replicate.wire.messages import Failure, Heartbeat

# A side's last word: as requested; with the guest; the guest is paused or dead here and the term
# given up; the standby is of no use; the standby has the guest.
STOPPED, GUEST_OFF, YOURS, ALONE, TAKEN = "stopped", "guest-off", "yours", "alone", "taken"
# A side that accepts or sends nothing for this long is considered lost.
PATIENCE_S = 2.0
HEARTBEAT_S = 0.5
# How much is written at once, and how much may be queued before more is produced.
GROUP_BYTES, WAITING_BYTES = 512 << 10, 1 << 20
_POLL_S = 0.1

Frame = list[Buffer]
T = TypeVar("T")


class Channel:
    """One end of a connection.

    Times are `clock.boottime_s`: `heard_s` is when anything last arrived, even part of a frame;
    `progress_s` is when the other side was last known to have accepted more of what was sent, or
    to be working on it: `progress` returns a number that grows while this side does.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, term: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._writer.transport.set_write_buffer_limits(high=WAITING_BYTES)
        self.outbound, self.inbound = Outbound(term), Inbound(0)
        self.heard_s = self.progress_s = boottime_s()
        self.received_bytes, self._taken = 0, Heartbeat(0, 0)
        self.progress: Callable[[], int] = int

    async def send(self, *frames: Frame) -> None:
        """Send frames; waits while the other side is behind. Raises as `send_all` does."""
        await self.send_all(frames)

    async def send_all(self, frames: Iterable[Frame]) -> None:
        """Send frames as they are produced; waits while the other side is behind.

        Meanwhile this side receives, and other tasks may send. Raises HostDownError, also when the
        other side has accepted nothing for PATIENCE_S.
        """
        for group in _groups(frames):
            self._write(group)
            await self._room()

    def put(self, frame: Frame) -> None:
        """Send a frame without waiting. Raises HostDownError."""
        self._write(frame)

    def _write(self, parts: list[Buffer]) -> None:
        if self._writer.is_closing():
            raise _lost("it was closed")
        # In one write: each write is a separate TLS record and system call.
        self._writer.write(b"".join(parts))

    async def _room(self) -> None:
        since_s = boottime_s()
        await asyncio.sleep(0)
        while True:
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._writer.drain()
                return
            except TimeoutError:
                if boottime_s() - max(since_s, self.progress_s) > PATIENCE_S:
                    raise _lost(f"the other side takes nothing for {PATIENCE_S:g} s") from None
            except OSError as exc:
                raise _lost(str(exc)) from exc

    async def receive(self) -> tuple[FrameHead, memoryview]:
        """The next frame.

        Raises HostDownError (the connection has ended), DamagedError, WireError, StaleTermError.
        """
        head = self.inbound.head(await self._read(HEAD_BYTES))
        payload = await self._read(head.length_bytes)
        require_whole(head, payload)
        return head, payload

    async def _read(self, length: int) -> memoryview:
        data, at = memoryview(bytearray(length)), 0
        while at < length:
            try:
                some = await self._reader.read(length - at)
            except OSError as exc:
                raise _lost(str(exc)) from exc
            if not some:
                raise _lost("it was closed")
            data[at : at + len(some)] = some
            at += len(some)
            self.received_bytes += len(some)
            self.heard_s = boottime_s()
        return data.toreadonly()

    async def beat(self) -> None:
        """Send heartbeats with the bytes received, until cancelled. Raises HostDownError."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.put(self.outbound.frame(FrameKind.HEARTBEAT, 0, self._heartbeat().encode()))

    async def alive_during(self, work: Awaitable[T]) -> T:
        """The result of `work`; sends heartbeats meanwhile, as far as the connection carries them.

        Raises what `work` does.
        """
        beating = asyncio.ensure_future(self.beat())
        try:
            return await work
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.received_bytes, self.progress())

    def has_taken(self, message: Heartbeat) -> bool:
        """Note how much the other side has accepted; returns whether that is more than before."""
        if message.received_bytes <= self._taken.received_bytes and (
            message.progress <= self._taken.progress
        ):
            return False
        self._taken, self.progress_s = message, boottime_s()
        return True

    async def fail(self, failure: Failure) -> None:
        """Tell the other side why this one ends the connection. Raises HostDownError."""
        await self.send(self.outbound.frame(FrameKind.FAILURE, 0, failure.encode()))

    def abort(self) -> None:
        """Close at once; discards what is still queued."""
        self._writer.transport.abort()


def _groups(frames: Iterable[Frame]) -> Iterator[list[Buffer]]:
    """The frames' parts in order, in pieces of about GROUP_BYTES.

    A frame is numbered when it is made, so nothing may be sent between its making and its sending.
    """
    group: list[Buffer] = []
    group_bytes = 0
    for frame in frames:
        group += frame
        group_bytes += sum(memoryview(part).nbytes for part in frame)
        if group_bytes >= GROUP_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _lost(why: str) -> HostDownError:
    return HostDownError(
        "the connection between primary and standby has ended",
        why=why,
        remedy="see `vmckpt replicate status`",
    )
