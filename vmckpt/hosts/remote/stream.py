"""One of many byte streams on a connection: a socket here, its counterpart on the far side."""

import asyncio
import select
import socket
from collections.abc import Awaitable, Callable

from vmckpt.hosts.remote.frames import Frame, RpcFrameKind, broken, credit

# Maximum amount of unread data in flight, per direction of a stream.
WINDOW_BYTES = 256 << 10
LINGER_S = 1.0
_CHUNK_BYTES = 64 << 10
# An END and a CLOSE, which need no credit.
_WITHOUT_BYTES = 2


class ByteStream:
    """Carries bytes between `sock`, which it owns, and frames, both ways, with flow control.

    An end of file passes through each way separately; closing one socket closes the other. `forget`
    is called at the end.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        send: Callable[[Frame], Awaitable[None]],
        forget: Callable[[int], None],
    ) -> None:
        self._sock, self._number, self._send, self._forget = sock, number, send, forget
        self._come: asyncio.Queue[Frame] = asyncio.Queue()
        self._waiting_bytes = 0
        self._credit_bytes = WINDOW_BYTES
        self._more_credit = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to carry bytes; earlier ones were buffered."""
        self._task = asyncio.create_task(self._run())

    def take(self, frame: Frame) -> None:
        """Handle a frame of this stream. Raises ProtocolError if it exceeds the credit."""
        if frame.kind is RpcFrameKind.CREDIT:
            self._credit_bytes += frame.credit_bytes
            self._more_credit.set()
            return
        self._waiting_bytes += _room(frame)
        if self._waiting_bytes > WINDOW_BYTES + _WITHOUT_BYTES:
            raise broken("a stream exceeds the window that it was granted")
        self._come.put_nowait(frame)
        if frame.kind is RpcFrameKind.CLOSE and self._task is not None:
            # Received data is still delivered, unless the local reader does not take it.
            asyncio.get_running_loop().call_later(LINGER_S, self._task.cancel)

    async def close(self) -> None:
        """The connection is gone: close the socket."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._sock.close()  # again: a task that never ran has not

    async def _run(self) -> None:
        inward = asyncio.create_task(self._carry_in())
        outward = asyncio.create_task(self._carry_out())
        try:
            both = {inward, outward}
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if any(not task.cancelled() and task.exception() for task in done):
                # This socket or the connection is broken: the far one must close too.
                await self._say_closed()
        finally:
            for task in (inward, outward):
                task.cancel()
            await asyncio.wait({inward, outward})
            self._sock.close()
            self._forget(self._number)

    async def _say_closed(self) -> None:
        try:
            await self._send(Frame(RpcFrameKind.CLOSE, self._number))
        except OSError:
            return  # the connection is gone, as the far side sees by itself

    async def _carry_out(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._credit_bytes <= 0:
                self._more_credit.clear()
                await self._more_credit.wait()
            most = min(_CHUNK_BYTES, self._credit_bytes)
            data = await loop.sock_recv(self._sock, most)
            if not data:
                break
            self._credit_bytes -= len(data)
            await self._send(Frame(RpcFrameKind.DATA, self._number, data))
        if _is_hung_up(self._sock):
            raise ConnectionResetError
        await self._send(Frame(RpcFrameKind.END, self._number))

    async def _carry_in(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._come.get()
            if frame.kind is RpcFrameKind.CLOSE:
                raise ConnectionResetError
            if frame.kind is RpcFrameKind.END:
                self._sock.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sock, frame.payload)
            self._waiting_bytes -= _room(frame)
            await self._send(credit(self._number, len(frame.payload)))


def _room(frame: Frame) -> int:
    """Its share of the window; an empty frame has one too."""
    return max(len(frame.payload), 1)


def _is_hung_up(sock: socket.socket) -> bool:
    """Whether the peer of a Unix socket has closed it, not only its sending half."""
    poll = select.poll()
    poll.register(sock, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
