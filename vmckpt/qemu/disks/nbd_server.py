"""An NBD server for exports that are either write-only, as for a QEMU mirror, or read-only.

Fixed newstyle, one simple reply per request (github.com/NetworkBlockDevice/nbd, doc/proto.md). No
library provides a server: libnbd and the like are clients, and nbdkit is a separate process, which
would have to be asked what arrived before the guest was stopped. Clients of read-only exports are
any NBD clients: qemu-img, qemu-nbd, nbdcopy, nbd-client.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from vmckpt.errors import VmckptError

# Requests may be as long as QEMU's longest.
MOST_BYTES = 32 << 20
# Read ahead of each connection: of a request that is not served yet no more is taken from it.
_AHEAD_BYTES = 1 << 20
_HELLO = struct.pack(">QQH", 0x4E42444D41474943, 0x49484156454F5054, 1 | 2)
_NO_ZEROES = 2
_OPTION = struct.Struct(">QII")
_OPTION_MAGIC = 0x49484156454F5054
_ANSWER = struct.Struct(">QIII")
_ANSWER_MAGIC = 0x3E889045565A9
_EXPORT_NAME, _ABORT, _LIST, _OPT_INFO, _GO = 1, 2, 3, 6, 7
_ACK, _SERVER, _INFO = 1, 2, 3
_UNSUPPORTED, _INVALID, _UNKNOWN = (1 << 31) + 1, (1 << 31) + 3, (1 << 31) + 6
_INFO_EXPORT = struct.Struct(">HQH")
_INFO_BLOCKS = struct.Struct(">HIII")
# Export flags: flags are present; zeroes may be written by length alone; it is read-only, and
# several connections see the same.
_WRITES_FLAGS, _READS_FLAGS = 1 | 64, 1 | 2 | 256
_REQUEST = struct.Struct(">IHHQQI")
_REQUEST_MAGIC = 0x25609513
_REPLY = struct.Struct(">IIQ")
_REPLY_MAGIC = 0x67446698
_READ, _WRITE, _DISCONNECT, _WRITE_ZEROES = 0, 1, 2, 6
_EPERM, _EIO, _EINVAL = 1, 5, 22
# No meaningful option is longer.
_MOST_OPTION_BYTES = 1 << 16


@runtime_checkable
class ReadableDisk(Protocol):
    """The readable content of one disk."""

    @property
    def size_bytes(self) -> int:
        """The size of the disk."""

    async def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read that many bytes. Raises VmckptError: the client gets an I/O error."""


class Export(Protocol):
    """Receives the writes of one disk; each is acknowledged when its method returns."""

    @property
    def size_bytes(self) -> int:
        """The size of the disk."""

    async def write(self, offset_bytes: int, data: bytes) -> None:
        """Receive written data."""

    async def zero(self, offset_bytes: int, length_bytes: int) -> None:
        """Receive written zeroes."""

    def left(self) -> None:
        """The writer has disconnected: writes may be missing from here on."""


class _SpokenWrongError(Exception):
    """The client does not speak the protocol."""


@asynccontextmanager
async def serving(
    path: Path, exports: Mapping[str, Export] | Mapping[str, ReadableDisk]
) -> AsyncIterator[None]:
    """Serve `exports`, by name, at a Unix socket for the duration of the block. Raises OSError.

    Of those that are written, each has one connection, its writer's. More are closed at once: each
    takes memory, and a QEMU that was broken into could make any number.
    """
    visits = set[asyncio.Task[None]]()
    are_read = any(isinstance(export, ReadableDisk) for export in exports.values())

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if not are_read and len(visits) >= len(exports):
            writer.transport.abort()
            return
        if task is not None:
            visits.add(task)
            task.add_done_callback(visits.discard)
        try:
            # The export has to notice a client that disconnects or violates the protocol.
            with suppress(OSError, EOFError, _SpokenWrongError):
                export = await _agree(reader, writer, exports)
                if isinstance(export, ReadableDisk):
                    await _serve_reads(reader, writer, export)
                elif export is not None:
                    try:
                        await _serve(reader, writer, export)
                    finally:
                        export.left()
        finally:
            writer.transport.abort()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(visit, path, limit=_AHEAD_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in tuple(visits):
            task.cancel()
        await asyncio.gather(*visits, return_exceptions=True)


async def _agree(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    exports: Mapping[str, Export] | Mapping[str, ReadableDisk],
) -> Export | ReadableDisk | None:
    """The export that the client chooses; None if it disconnects without one."""
    writer.write(_HELLO)
    flags = int.from_bytes(await reader.readexactly(4))
    if flags & ~(1 | _NO_ZEROES):
        raise _SpokenWrongError
    while True:
        await writer.drain()  # a client that does not read gets no further answers
        magic, option, length = _OPTION.unpack(await reader.readexactly(_OPTION.size))
        # The only answer to the option of old clients is the export itself.
        if magic != _OPTION_MAGIC or length > _MOST_OPTION_BYTES or option == _EXPORT_NAME:
            raise _SpokenWrongError
        data = await reader.readexactly(length)

        def answer(kind: int, reply: bytes = b"", option: int = option) -> None:
            writer.write(_ANSWER.pack(_ANSWER_MAGIC, option, kind, len(reply)) + reply)

        if option == _ABORT:
            answer(_ACK)
            return None
        if option == _LIST:
            for one in exports:
                answer(_SERVER, len(one.encode()).to_bytes(4) + one.encode())
            answer(_ACK)
            continue
        if option not in (_GO, _OPT_INFO):
            answer(_UNSUPPORTED)
            continue
        name = _name(data)
        if name is None:
            answer(_INVALID)
        elif name not in exports:
            answer(_UNKNOWN)
        else:
            export = exports[name]
            flags = _READS_FLAGS if isinstance(export, ReadableDisk) else _WRITES_FLAGS
            answer(_INFO, _INFO_EXPORT.pack(0, export.size_bytes, flags))
            answer(_INFO, _INFO_BLOCKS.pack(3, 1, 4096, MOST_BYTES))
            answer(_ACK)
            if option == _GO:
                return export


def _name(data: bytes) -> str | None:
    """The export that a client selects (NBD_OPT_GO); None if it names none."""
    length = int.from_bytes(data[:4])
    if len(data) < 6 + length:
        return None
    with suppress(UnicodeDecodeError):
        return data[4 : 4 + length].decode()
    return None


async def _next(reader: asyncio.StreamReader) -> tuple[int, int, int, int] | None:
    """A request's kind, cookie, offset and length; None: the client goes."""
    request = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
    magic, _, kind, cookie, offset, length = request
    if magic != _REQUEST_MAGIC or (kind == _WRITE and length > MOST_BYTES):
        raise _SpokenWrongError
    return None if kind == _DISCONNECT else (kind, cookie, offset, length)


async def _serve_reads(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, export: ReadableDisk
) -> None:
    while (request := await _next(reader)) is not None:
        kind, cookie, offset, length = request
        error, data = _EPERM, b""
        if kind == _WRITE:
            await reader.readexactly(length)  # refused, but its data still arrives
        elif kind == _READ and (length > MOST_BYTES or offset + length > export.size_bytes):
            error = _EINVAL
        elif kind == _READ:
            try:
                error, data = 0, await export.read(offset, length)
            except VmckptError:
                error = _EIO
        writer.write(_REPLY.pack(_REPLY_MAGIC, error, cookie) + data)
        await writer.drain()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, export: Export
) -> None:
    while (request := await _next(reader)) is not None:
        kind, cookie, offset, length = request
        error = 0
        data = await reader.readexactly(length) if kind == _WRITE else b""
        if offset + length > export.size_bytes:
            error = _EINVAL
        elif kind == _WRITE:
            await export.write(offset, data)
        elif kind == _WRITE_ZEROES:
            await export.zero(offset, length)
        else:
            error = _EINVAL
        writer.write(_REPLY.pack(_REPLY_MAGIC, error, cookie))
        await writer.drain()  # a client that does not read gets no further answers
