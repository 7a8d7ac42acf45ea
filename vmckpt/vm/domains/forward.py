"""A private Unix socket on this machine that forwards to one on a host.

libvirt's client opens its connections itself. To reach a remote libvirtd like everything else on
the host (`Host.connect`), with its host keys and settings, it connects here.

The client needs a path, but the socket has a name only until it is open; afterwards the path is
that of a descriptor. So no other process can connect, and a killed vmckpt leaves nothing.
"""

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import HostDownError, StorageError
from vmckpt.hosts.host import Host

CHUNK_BYTES = 64 * 1024
# In a directory of this user until it is opened; the next process removes a stale one.
NAME = "libvirt.sock"


@asynccontextmanager
async def forwarded(host: Host, path: Path, directory: Path) -> AsyncIterator[Path]:
    """A private socket for the block that forwards each connection to `path` on `host`.

    The first connection is opened at once. Raises HostDownError if nothing listens there;
    StorageError if `directory` is not writable. Nothing remains in it.
    """
    ahead = [await host.connect(path)]
    pumps: set[asyncio.Task[None]] = set()

    async def far_end() -> socket.socket:
        return ahead.pop() if ahead else await host.connect(path)

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pump = asyncio.ensure_future(_join(far_end, reader, writer))
        pumps.add(pump)
        pump.add_done_callback(pumps.discard)

    try:
        listening, found = _nameless(directory)
        try:
            server = await asyncio.start_unix_server(serve, sock=listening, limit=CHUNK_BYTES)
            try:
                yield Path(f"/proc/self/fd/{found}")
            finally:
                server.close()
                for pump in list(pumps):
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                await server.wait_closed()
        finally:
            listening.close()
            os.close(found)
    finally:
        for unused in ahead:
            unused.close()


def _nameless(directory: Path) -> tuple[socket.socket, int]:
    """A bound socket, and an O_PATH descriptor of it, the only way to reach it.

    Raises StorageError.
    """
    near = socket.socket(socket.AF_UNIX)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        within = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(within, fcntl.LOCK_EX)  # held by any process only for the next few calls
            with suppress(FileNotFoundError):
                os.unlink(NAME, dir_fd=within)
            # A socket's path has at most 107 bytes; the directory's may be longer.
            near.bind(f"/proc/self/fd/{within}/{NAME}")
            try:
                return near, os.open(NAME, os.O_PATH | os.O_CLOEXEC, dir_fd=within)
            finally:
                os.unlink(NAME, dir_fd=within)
        finally:
            os.close(within)
    except OSError as exc:
        near.close()
        raise StorageError(
            f"cannot make a socket in {directory}",
            why=exc.strerror or str(exc),
            remedy="check free space and permissions",
        ) from exc


async def _join(
    far_end: Callable[[], Awaitable[socket.socket]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Forward bytes both ways until either end closes; then close both."""
    try:
        far_reader, far_writer = await asyncio.open_unix_connection(sock=await far_end())
    except (HostDownError, OSError):
        writer.close()  # the client reports the end of the stream
        return
    copies = [
        asyncio.ensure_future(_copy(reader, far_writer)),
        asyncio.ensure_future(_copy(far_reader, writer)),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        for end in (writer, far_writer):
            end.close()
            with suppress(OSError):
                await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the end of one side is the end of both
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
