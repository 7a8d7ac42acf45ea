"""Frames over a connection between primary and standby, each checked before anybody sees it."""

import asyncio
from collections.abc import Iterable

from vmckpt.errors import HostDownError
from vmckpt.replicate.wire.frames import (
    HEAD_BYTES,
    Buffer,
    Head,
    Inbound,
    Kind,
    Outbound,
    require_whole,
)
from vmckpt.replicate.wire.messages import Failure

# By which word a side says how it ends: as was asked, with the guest, dead with the term given up,
# or because the standby is of no use.
STOPPED, GUEST_OFF, YOURS, ALONE = "stopped", "guest-off", "yours", "alone"
# A side that is silent for so long is taken for lost.
PATIENCE_S = 2.0


class Channel:
    """One end of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, term: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self.outbound, self.inbound = Outbound(term), Inbound(0)

    async def send(self, *frames: Iterable[Buffer]) -> None:
        """Send frames; waits while the other side is behind.

        Raises HostDownError, also when that takes nothing at all for PATIENCE_S.
        """
        for frame in frames:
            self.put(frame)
        transport, waiting = self._writer.transport, 0
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._writer.drain()
                return
            except TimeoutError:
                before, waiting = waiting, transport.get_write_buffer_size()
                if waiting and waiting == before:
                    raise _lost(f"the other side takes nothing for {PATIENCE_S:g} s") from None
            except OSError as exc:
                raise _lost(str(exc)) from exc

    def put(self, frame: Iterable[Buffer]) -> None:
        """Send a frame without waiting. Raises HostDownError."""
        if self._writer.is_closing():
            raise _lost("it was closed")
        for part in frame:
            self._writer.write(part)

    async def receive(self) -> tuple[Head, memoryview]:
        """The next frame.

        Raises HostDownError (the connection has ended), DamagedError, WireError, StaleTermError.
        """
        try:
            head = self.inbound.head(await self._reader.readexactly(HEAD_BYTES))
            payload = await self._reader.readexactly(head.length_bytes)
        except (OSError, EOFError) as exc:
            raise _lost(str(exc) or "it was closed") from exc
        require_whole(head, payload)
        return head, memoryview(payload)

    async def fail(self, failure: Failure) -> None:
        """Say why this side ends the connection. Raises HostDownError."""
        await self.send(self.outbound.frame(Kind.FAILURE, 0, failure.encode()))

    def abort(self) -> None:
        """End it at once, with what has not left yet."""
        self._writer.transport.abort()


def _lost(why: str) -> HostDownError:
    return HostDownError(
        "the connection between primary and standby has ended",
        why=why,
        remedy="see `vmckpt replicate status`",
    )
