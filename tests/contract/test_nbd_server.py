"""The NBD server that takes a mirror's writes, as its protocol says it, byte by byte."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from vmckpt.qemu.disks.nbd_server import MOST_BYTES, serving

SIZE = 1 << 20
GO, EXPORT_NAME, STRUCTURED_REPLY, ABORT = 7, 1, 8, 2
READ, WRITE, DISCONNECT, TRIM, WRITE_ZEROES = 0, 1, 2, 4, 6
OPTION = b"IHAVEOPT"


class Taken:
    """An export that notes what it is given."""

    def __init__(self) -> None:
        self.size_bytes = SIZE
        self.said: list[tuple[int, bytes | int]] = []
        self.has_left, self.has_come = asyncio.Event(), asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def write(self, offset_bytes: int, data: bytes) -> None:
        self.said.append((offset_bytes, data))
        self.has_come.set()
        await self.may_go_on.wait()

    async def zero(self, offset_bytes: int, length_bytes: int) -> None:
        self.said.append((offset_bytes, length_bytes))

    def left(self) -> None:
        self.has_left.set()


Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


@asynccontextmanager
async def visiting(path: Path) -> AsyncIterator[tuple[Reader, Writer]]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        assert await reader.readexactly(18) == b"NBDMAGIC" + OPTION + b"\0\3"
        writer.write(struct.pack(">I", 3))
        yield reader, writer
    finally:
        writer.close()


async def asked(reader: Reader, writer: Writer, option: int, data: bytes) -> list[bytes]:
    """What is answered to an option, up to the last answer: type and data of each."""
    writer.write(OPTION + struct.pack(">II", option, len(data)) + data)
    found = []
    while True:
        magic, of, kind, length = struct.unpack(">QIII", await reader.readexactly(20))
        assert (magic, of) == (0x3E889045565A9, option)
        found.append(struct.pack(">I", kind) + await reader.readexactly(length))
        if kind != 3:
            return found


def named(name: bytes) -> bytes:
    return struct.pack(">I", len(name)) + name + struct.pack(">HH", 1, 3)


async def done(reader: Reader, writer: Writer, kind: int, at: int, what: bytes | int) -> int:
    """The error number that is answered to a request."""
    data = what if isinstance(what, bytes) else b""
    length = len(what) if isinstance(what, bytes) else what
    writer.write(struct.pack(">IHHQQI", 0x25609513, 0, kind, 77, at, length) + data)
    magic, error, cookie = struct.unpack(">IIQ", await reader.readexactly(16))
    assert (magic, cookie) == (0x67446698, 77)
    return int(error)


def run(path: Path, talk: Callable[[Taken, Path], Awaitable[None]]) -> None:
    async def main() -> None:
        taken = Taken()
        async with asyncio.timeout(20), serving(path, {"disk0": taken}):
            await talk(taken, path)
        assert not path.exists()

    asyncio.run(main())


def test_options_and_writes_are_answered_as_the_protocol_says(tmp_path: Path) -> None:
    async def talk(taken: Taken, path: Path) -> None:
        async with visiting(path) as (reader, writer):
            unsupported = [struct.pack(">I", (1 << 31) + 1)]
            assert await asked(reader, writer, STRUCTURED_REPLY, b"") == unsupported
            unknown = [struct.pack(">I", (1 << 31) + 6)]
            assert await asked(reader, writer, GO, named(b"disk1")) == unknown
            invalid = [struct.pack(">I", (1 << 31) + 3)]
            assert await asked(reader, writer, GO, b"\0\0\1\0") == invalid
            assert await asked(reader, writer, GO, named(b"disk0")) == [
                struct.pack(">IHQH", 3, 0, SIZE, 1 | 64),
                struct.pack(">IHIII", 3, 3, 1, 4096, MOST_BYTES),
                struct.pack(">I", 1),
            ]
            assert await done(reader, writer, WRITE, 512, b"abc") == 0
            assert await done(reader, writer, WRITE_ZEROES, 0, SIZE) == 0
            assert await done(reader, writer, WRITE, SIZE - 1, b"ab") == 22
            assert await done(reader, writer, WRITE_ZEROES, 1, SIZE) == 22
            assert await done(reader, writer, READ, 0, 512) == 22
            assert await done(reader, writer, TRIM, 0, 512) == 22
            assert taken.said == [(512, b"abc"), (0, SIZE)]
            writer.write(struct.pack(">IHHQQI", 0x25609513, 0, DISCONNECT, 1, 0, 0))
            assert await reader.read() == b""
        await taken.has_left.wait()

    run(tmp_path / "disks.sock", talk)


def test_a_write_that_has_no_room_yet_is_not_answered(tmp_path: Path) -> None:
    async def talk(taken: Taken, path: Path) -> None:
        async with visiting(path) as (reader, writer):
            await asked(reader, writer, GO, named(b"disk0"))
            taken.may_go_on.clear()
            answer = asyncio.ensure_future(done(reader, writer, WRITE, 0, b"x"))
            await taken.has_come.wait()
            assert not answer.done()
            taken.may_go_on.set()
            assert await answer == 0

    run(tmp_path / "disks.sock", talk)


@pytest.mark.parametrize(
    "nonsense",
    [
        struct.pack(">IHHQQI", 0x25609514, 0, WRITE, 1, 0, 1) + b"x",
        struct.pack(">IHHQQI", 0x25609513, 0, WRITE, 1, 0, MOST_BYTES + 1),
        b"half a request",
    ],
)
def test_who_talks_nonsense_or_breaks_off_has_left(tmp_path: Path, nonsense: bytes) -> None:
    async def talk(taken: Taken, path: Path) -> None:
        async with visiting(path) as (reader, writer):
            await asked(reader, writer, GO, named(b"disk0"))
            writer.write(nonsense)
            writer.write_eof()
            assert await reader.read() == b""
        await taken.has_left.wait()
        assert taken.said == []

    run(tmp_path / "disks.sock", talk)


def test_who_reads_no_answers_is_not_served_for_long(tmp_path: Path) -> None:
    """The answers for a QEMU that was broken into filled this process's memory."""
    many = 100_000

    async def talk(taken: Taken, path: Path) -> None:
        async with visiting(path) as (reader, writer):
            await asked(reader, writer, GO, named(b"disk0"))
            writer.write(struct.pack(">IHHQQI", 0x25609513, 0, WRITE_ZEROES, 1, 0, 512) * many)
            seen = -1
            while seen < len(taken.said):
                seen = len(taken.said)
                await asyncio.sleep(0.3)
            assert 0 < seen < many
            for _ in range(many):
                await reader.readexactly(16)
            assert len(taken.said) == many

    run(tmp_path / "disks.sock", talk)


def test_who_goes_before_it_has_chosen_was_nobody(tmp_path: Path) -> None:
    async def talk(taken: Taken, path: Path) -> None:
        async with visiting(path) as (reader, writer):
            assert await asked(reader, writer, ABORT, b"") == [struct.pack(">I", 1)]
            assert await reader.read() == b""
        async with visiting(path) as (reader, writer):
            writer.write(b"no option at all")
            assert await reader.read() == b""
        async with visiting(path) as (reader, writer):
            writer.write(OPTION + struct.pack(">II", EXPORT_NAME, 5) + b"disk0")
            assert await reader.read() == b""
        assert not taken.has_left.is_set()

    run(tmp_path / "disks.sock", talk)


def test_each_disk_has_one_writer_of_whom_little_is_read_ahead(tmp_path: Path) -> None:
    """A QEMU that was broken into made more and more connections, and filled the memory."""

    async def talk(taken: Taken, path: Path) -> None:
        taken.may_go_on.clear()
        async with visiting(path) as (reader, writer):
            await asked(reader, writer, GO, named(b"disk0"))
            request = struct.pack(">IHHQQI", 0x25609513, 0, WRITE, 1, 0, SIZE) + b"x" * SIZE
            for _ in range(64):
                writer.write(request)
            await taken.has_come.wait()
            await asyncio.sleep(0.5)  # it would read all of it
            read_bytes = 64 * len(request) - writer.transport.get_write_buffer_size()
            assert len(request) <= read_bytes < 8 * SIZE
            second, refused = await asyncio.open_unix_connection(path)
            assert await second.read() == b""
            refused.close()
            taken.may_go_on.set()
        await taken.has_left.wait()
        async with visiting(path) as (reader, writer):  # when the first one has gone
            await asked(reader, writer, GO, named(b"disk0"))

    run(tmp_path / "disks.sock", talk)
