"""Frames over one connection: sent whole, dispatched by number, with detection of silence."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from vmckpt.errors import HostDownError
from vmckpt.hosts.remote.frames import Frame, ProtocolError, RpcFrameKind, read_frame
from vmckpt.hosts.remote.stream import ByteStream

PING_S = 5.0
# A shorter stall of the network does no harm.
SILENCE_S = 30.0
_OF_STREAMS = frozenset(
    {RpcFrameKind.DATA, RpcFrameKind.CREDIT, RpcFrameKind.END, RpcFrameKind.CLOSE}
)


class LinkLostError(HostDownError):
    """The connection broke: the caller must determine whether the request took effect."""


class FrameLink:
    """One connection to the far side. `peer` names it in errors.

    `run` must be running; each frame that belongs to no stream goes to `handle`.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        handle: Callable[[Frame], None],
    ) -> None:
        self._reader, self._writer, self._peer, self._handle = reader, writer, peer, handle
        self._streams: dict[int, ByteStream] = {}
        self._pongs: set[asyncio.Task[None]] = set()

    async def send(self, frame: Frame) -> None:
        """Send a frame, waiting while the connection accepts no more. Raises ConnectionError."""
        if self.is_closing:
            raise ConnectionResetError(f"the connection to {self._peer} is closed")
        self._writer.write(frame.encode())
        await self._writer.drain()

    @property
    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._writer.is_closing()

    def abort(self) -> None:
        """Close the connection at once: `run` ends."""
        # A pipe whose other end is closed can no longer be aborted.
        if not self.is_closing:
            self._writer.transport.abort()

    def open_stream(self, sock: socket.socket, number: int) -> ByteStream:
        """A stream for `sock`; it buffers what arrives until it is started."""
        sock.setblocking(False)
        stream = ByteStream(sock, number, self.send, self._forget)
        self._streams[number] = stream
        return stream

    async def drop_stream(self, number: int) -> None:
        """Close a stream that was refused."""
        if stream := self._streams.pop(number, None):
            await stream.close()

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)

    async def run(self) -> LinkLostError:
        """Carry frames until the connection ends; returns the reason. It is closed then, with its
        streams.
        """
        pinging = asyncio.create_task(self._ping())
        try:
            why = await self._read()
        finally:
            pinging.cancel()
            self.abort()
            await asyncio.wait({pinging, *self._pongs})
            for stream in list(self._streams.values()):
                await stream.close()
            with suppress(OSError):
                await self._writer.wait_closed()
        return LinkLostError(
            f"the connection to {self._peer} is lost",
            why=why,
            remedy="check the network and the host, then try again",
        )

    async def _read(self) -> str:
        while True:
            try:
                self._dispatch(await read_frame(self._reader, SILENCE_S))
            except asyncio.IncompleteReadError:
                return "the other side has closed it"
            except TimeoutError:
                return f"nothing was received for {SILENCE_S:g} s"
            except ProtocolError as exc:
                return exc.why
            except OSError as exc:
                return exc.strerror or str(exc)

    def _dispatch(self, frame: Frame) -> None:
        if frame.kind is RpcFrameKind.PING:
            if self._pongs:
                return  # one is already waiting to be taken, and says the same
            pong = asyncio.create_task(self._pong())
            self._pongs.add(pong)
            pong.add_done_callback(self._pongs.discard)
        elif frame.kind in _OF_STREAMS:
            # Frames of a stream that has ended here may still be in flight.
            if stream := self._streams.get(frame.number):
                stream.take(frame)
        elif frame.kind is not RpcFrameKind.PONG:
            self._handle(frame)

    async def _pong(self) -> None:
        try:
            await self.send(Frame(RpcFrameKind.PONG))
        except OSError:
            return  # the reader notices it

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            try:
                await self.send(Frame(RpcFrameKind.PING))
            except OSError:
                return  # as above
