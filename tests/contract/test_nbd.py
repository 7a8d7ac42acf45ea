"""What QEMU's NBD server says, read right; and what it must not say, refused."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from vmckpt.epoch.disks import filled
from vmckpt.errors import OperationFailedError
from vmckpt.qemu.disks.nbd import ALLOCATION, NbdExport, bitmap_context

SIZE = 1 << 20
Chunks = list[tuple[int, bytes]]
DIRTY = bitmap_context("since")


class Server:
    """One export on one connection; `answer` gives the chunks of each request."""

    def __init__(self, sock: socket.socket, answer: Callable[[int, int, int], Chunks]) -> None:
        self._sock, self._answer = sock, answer

    def run(self) -> None:
        try:
            self._greet()
            while self._one():
                pass
        except (OSError, struct.error):
            return
        finally:
            self._sock.close()

    def _get(self, length: int) -> bytes:
        return self._sock.recv(length, socket.MSG_WAITALL)

    def _greet(self) -> None:
        self._sock.sendall(b"NBDMAGIC" + b"IHAVEOPT" + struct.pack(">H", 3))
        self._get(4)
        while True:
            _, option, length = struct.unpack(">8sII", self._get(16))
            data = self._get(length)
            if option == 10:
                at, number = 4 + struct.unpack_from(">I", data)[0] + 4, 0
                while at < len(data):
                    size = struct.unpack_from(">I", data, at)[0]
                    name = data[at + 4 : at + 4 + size]
                    self._reply(option, 4, struct.pack(">I", 70 + number) + name)
                    at, number = at + 4 + size, number + 1
            if option == 7:
                self._reply(option, 3, struct.pack(">HQH", 0, SIZE, 1))
            self._reply(option, 1, b"")
            if option == 7:
                return

    def _reply(self, option: int, kind: int, data: bytes) -> None:
        head = struct.pack(">QIII", 0x0003E889045565A9, option, kind, len(data))
        self._sock.sendall(head + data)

    def _one(self) -> bool:
        _, _, command, cookie, offset, length = struct.unpack(">IHHQQI", self._get(28))
        if command == 2:
            return False
        chunks = self._answer(command, offset, length)
        for number, (kind, data) in enumerate(chunks):
            done = number == len(chunks) - 1
            head = struct.pack(">IHHQI", 0x668E33EF, done, kind, cookie, len(data))
            self._sock.sendall(head + data)
        return True


@contextmanager
def served(answer: Callable[[int, int, int], Chunks], *contexts: str) -> Iterator[NbdExport]:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=Server(theirs, answer).run)
    thread.start()
    export = NbdExport(ours, "disk0", contexts or (ALLOCATION,))
    try:
        yield export
    finally:
        export.close()
        thread.join()


def status(number: int, *extents: tuple[int, int]) -> Chunks:
    packed = b"".join(struct.pack(">II", *extent) for extent in extents)
    return [(5, struct.pack(">I", number) + packed)]


def test_data_and_holes_come_in_any_order() -> None:
    def answer(_: int, offset: int, length: int) -> Chunks:
        half = length // 2
        hole = struct.pack(">QI", offset, half)
        return [(1, struct.pack(">Q", offset + half) + b"x" * half), (2, hole)]

    with served(answer) as export:
        assert export.size_bytes == SIZE
        assert export.read(4096, 8192) == bytes(4096) + b"x" * 4096


def test_extents_are_of_the_context_that_was_asked_for() -> None:
    def answer(_: int, __: int, ___: int) -> Chunks:
        return [*status(70, (SIZE, 3)), *status(71, (4096, 0), (4096, 1), (SIZE - 8192, 0))]

    with served(answer, ALLOCATION, DIRTY) as export:
        assert [e.flagged for e in export.extents(ALLOCATION, 0, SIZE)] == [True]
        dirty = [(e.start, e.length) for e in export.extents(DIRTY, 0, SIZE) if e.flagged]
        assert dirty == [(4096, 4096)]


def test_whole_blocks_are_read_where_a_part_of_them_holds_something() -> None:
    def answer(_: int, __: int, ___: int) -> Chunks:
        zero = SIZE - 3 * 65536 - 512
        return status(70, (65536, 3), (4096, 0), (61440, 3), (65536, 0), (zero, 3), (512, 0))

    with served(answer) as export:
        whole = list(filled(export, 0, SIZE, 65536))
        assert whole == [(65536, 3 * 65536), (SIZE - 65536, SIZE)]


def test_an_error_is_told_in_qemus_words() -> None:
    def answer(_: int, __: int, ___: int) -> Chunks:
        words = b"snapshot is broken"
        return [((1 << 15) + 1, struct.pack(">IH", 5, len(words)) + words)]

    with served(answer) as export, pytest.raises(OperationFailedError) as error:
        export.read(0, 4096)
    assert error.value.why == "snapshot is broken"


def test_an_unknown_context_and_a_lost_connection_are_errors() -> None:
    with served(lambda _, __, ___: []) as export:
        export._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OperationFailedError):
            export.read(0, 4096)
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 400 what is that")
    theirs.close()
    with pytest.raises(OperationFailedError):
        NbdExport(ours, "disk0", (ALLOCATION,))


@pytest.mark.parametrize(
    "chunks",
    [
        status(70, (0, 0), (SIZE, 0)),
        [(5, struct.pack(">I", 70) + b"odd")],
        [(5, b"")],
        status(71, (SIZE, 0)),
    ],
    ids=["no bytes", "half an extent", "nothing", "of another context"],
)
def test_a_status_that_is_none_is_an_error(chunks: Chunks) -> None:
    """Of a QEMU that a guest has broken into; none of them is waited for without end."""
    with served(lambda _, __, ___: chunks) as export, pytest.raises(OperationFailedError):
        list(export.extents(ALLOCATION, 0, SIZE))


@pytest.mark.parametrize("offset", [0, 4095, 4097, SIZE])
def test_data_of_other_bytes_than_were_asked_for_is_an_error(offset: int) -> None:
    data = [(1, struct.pack(">Q", offset) + bytes(4096))]
    with served(lambda _, __, ___: data) as export, pytest.raises(OperationFailedError):
        export.read(4096, 4096)
    with served(lambda _, __, ___: [(1, b"short")]) as export, pytest.raises(OperationFailedError):
        export.read(4096, 4096)
