"""An NBD server that only takes writes: what a mirror in QEMU sends it.

Fixed newstyle, one simple reply a request (github.com/NetworkBlockDevice/nbd, doc/proto.md).
Written here, for no library serves: libnbd and its like are clients, and nbdkit is a process of its
own, which would have to be asked what came before the guest was stopped.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

# Requests may be as long as QEMU ever makes them.
MOST_BYTES = 32 << 20
_HELLO = struct.pack(">QQH", 0x4E42444D41474943, 0x49484156454F5054, 1 | 2)
_NO_ZEROES = 2
_OPTION = struct.Struct(">QII")
_OPTION_MAGIC = 0x49484156454F5054
_ANSWER = struct.Struct(">QIII")
_ANSWER_MAGIC = 0x3E889045565A9
_EXPORT_NAME, _ABORT, _GO = 1, 2, 7
_ACK, _INFO = 1, 3
_UNSUPPORTED, _INVALID, _UNKNOWN = (1 << 31) + 1, (1 << 31) + 3, (1 << 31) + 6
_INFO_EXPORT = struct.Struct(">HQH")
_INFO_BLOCKS = struct.Struct(">HIII")
# Its flags: they are there; zeroes may be written by length alone.
_FLAGS = 1 | 64
_REQUEST = struct.Struct(">IHHQQI")
_REQUEST_MAGIC = 0x25609513
_REPLY = struct.Struct(">IIQ")
_REPLY_MAGIC = 0x67446698
_WRITE, _DISCONNECT, _WRITE_ZEROES = 1, 2, 6
_EINVAL = 22
# No option that makes sense is longer.
_MOST_OPTION_BYTES = 1 << 16


class Export(Protocol):
    """What takes the writes of one disk; each is answered when its method returns."""

    @property
    def size_bytes(self) -> int:
        """How long the disk is."""

    async def write(self, offset_bytes: int, data: bytes) -> None:
        """Take data that was written."""

    async def zero(self, offset_bytes: int, length_bytes: int) -> None:
        """Take zeroes that were written."""

    def left(self) -> None:
        """Whoever wrote it has gone, in whatever way: writes may be missing from here on."""


class _SpokenWrongError(Exception):
    """The client does not speak the protocol."""


@asynccontextmanager
async def serving(path: Path, exports: Mapping[str, Export]) -> AsyncIterator[None]:
    """Take writes to `exports`, by name, at a Unix socket for the block. Raises OSError."""
    visits = set[asyncio.Task[None]]()

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            visits.add(task)
            task.add_done_callback(visits.discard)
        try:
            # A client that breaks off or talks nonsense is the export's to notice.
            with suppress(OSError, EOFError, _SpokenWrongError):
                export = await _agree(reader, writer, exports)
                if export is not None:
                    try:
                        await _serve(reader, writer, export)
                    finally:
                        export.left()
        finally:
            writer.transport.abort()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(visit, path, limit=2 * MOST_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in tuple(visits):
            task.cancel()
        await asyncio.gather(*visits, return_exceptions=True)


async def _agree(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exports: Mapping[str, Export]
) -> Export | None:
    """The export that the client chooses; None when it goes without."""
    writer.write(_HELLO)
    flags = int.from_bytes(await reader.readexactly(4))
    if flags & ~(1 | _NO_ZEROES):
        raise _SpokenWrongError
    while True:
        magic, option, length = _OPTION.unpack(await reader.readexactly(_OPTION.size))
        # To the option of old clients there is no answer but the export itself.
        if magic != _OPTION_MAGIC or length > _MOST_OPTION_BYTES or option == _EXPORT_NAME:
            raise _SpokenWrongError
        data = await reader.readexactly(length)

        def answer(kind: int, said: bytes = b"", option: int = option) -> None:
            writer.write(_ANSWER.pack(_ANSWER_MAGIC, option, kind, len(said)) + said)

        if option == _ABORT:
            answer(_ACK)
            return None
        if option != _GO:
            answer(_UNSUPPORTED)
            continue
        name = _name(data)
        if name is None:
            answer(_INVALID)
        elif name not in exports:
            answer(_UNKNOWN)
        else:
            answer(_INFO, _INFO_EXPORT.pack(0, exports[name].size_bytes, _FLAGS))
            answer(_INFO, _INFO_BLOCKS.pack(3, 1, 4096, MOST_BYTES))
            answer(_ACK)
            return exports[name]


def _name(data: bytes) -> str | None:
    """The name that a client asks to go on with; None when it says none."""
    length = int.from_bytes(data[:4])
    if len(data) < 6 + length:
        return None
    with suppress(UnicodeDecodeError):
        return data[4 : 4 + length].decode()
    return None


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, export: Export
) -> None:
    while True:
        request = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
        magic, _, kind, cookie, offset, length = request
        if magic != _REQUEST_MAGIC or (kind == _WRITE and length > MOST_BYTES):
            raise _SpokenWrongError
        if kind == _DISCONNECT:
            return
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
