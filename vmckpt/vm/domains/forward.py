"""A private Unix socket on this machine that leads to one on a host, whichever way the host has.

libvirt's client opens its connections itself; so that a far libvirtd is reached as everything else
of the host is (`Host.connect`), with its host keys and its settings, it is pointed to this.
"""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host

CHUNK_BYTES = 64 * 1024


@asynccontextmanager
async def forwarded(host: Host, path: Path) -> AsyncIterator[Path]:
    """For the block: a socket of this user alone, each connection to it one to `path` on `host`.

    The first one's far end is made at once: raises HostDownError when nobody listens there.
    """
    ahead = [await host.connect(path)]
    pumps: set[asyncio.Task[None]] = set()

    async def far_end() -> socket.socket:
        return ahead.pop() if ahead else await host.connect(path)

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pump = asyncio.ensure_future(_join(far_end, reader, writer))
        pumps.add(pump)
        pump.add_done_callback(pumps.discard)

    directory = Path(tempfile.mkdtemp(prefix="vmckpt-libvirt-"))  # mode 0700
    try:
        server = await asyncio.start_unix_server(serve, directory / "sock", limit=CHUNK_BYTES)
        try:
            yield directory / "sock"
        finally:
            server.close()
            for pump in list(pumps):
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await server.wait_closed()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for unused in ahead:
            unused.close()


async def _join(
    far_end: Callable[[], Awaitable[socket.socket]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Carry bytes both ways until either end closes; then both are closed."""
    try:
        far_reader, far_writer = await asyncio.open_unix_connection(sock=await far_end())
    except (HostDownError, OSError):
        writer.close()  # whoever connected here sees the end of the stream, and says so
        return
    ways = [
        asyncio.ensure_future(_copy(reader, far_writer)),
        asyncio.ensure_future(_copy(far_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, far_writer):
            end.close()
            with suppress(OSError):
                await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the end of one side is the end of both
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
