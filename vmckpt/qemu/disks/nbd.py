"""A client of QEMU's NBD server: a disk's content, and which parts are empty or changed.

Blocking: run it in a separate thread. The protocol is doc/proto.md of NetworkBlockDevice/nbd: fixed
newstyle negotiation, structured replies, metadata contexts.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from vmckpt.errors import OperationFailedError

ALLOCATION = "base:allocation"
# Limit of one request; QEMU's server accepts 32 MiB.
MOST_READ_BYTES = 1 << 20
_MOST_STATUS_BYTES = 1 << 30
_MOST_ANSWER_BYTES = 64 << 20
# Replies to one option: at most one per context, and the export's description.
_MOST_REPLIES, _MOST_REPLY_BYTES = 64, 64 << 10

_MAGIC, _OPTION_MAGIC, _OPTION_REPLY = b"NBDMAGIC", b"IHAVEOPT", 0x0003E889045565A9
_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_GO, _STRUCTURED_REPLY, _SET_META_CONTEXT = 7, 8, 10
_ACK, _INFO, _META_CONTEXT, _ERROR_BIT = 1, 3, 4, 1 << 31
_INFO_EXPORT = b"\0\0"
_REQUEST_MAGIC, _REPLY_MAGIC = 0x25609513, 0x668E33EF
_READ, _DISCONNECT, _BLOCK_STATUS = 0, 2, 7
_DONE = 1
_DATA, _HOLE, _STATUS, _CHUNK_ERROR = 1, 2, 5, 1 << 15
_ZERO_FLAG, _DIRTY_FLAG = 2, 1


class Extent(NamedTuple):
    """`length` bytes of the disk from `start` on; `flagged`: they read as zeroes, or are dirty."""

    start: int
    length: int
    flagged: bool


def bitmap_context(bitmap: str) -> str:
    """The name of the metadata context for a dirty bitmap."""
    return f"qemu:dirty-bitmap:{bitmap}"


class NbdExport:
    """One export, over a connected stream socket, which this takes over.

    `contexts` are those that `extents` can query. Raises OperationFailedError whenever the server
    refuses or disconnects.
    """

    def __init__(self, connected: socket.socket, export: str, contexts: tuple[str, ...]) -> None:
        connected.setblocking(True)
        self._socket, self._export, self._cookie = connected, export, 0
        self._contexts: dict[str, int] = {}
        try:
            self.size_bytes = self._negotiate(contexts)
        except BaseException:
            connected.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        try:
            with suppress(OperationFailedError):  # the server disconnected first
                self._send_request(_DISCONNECT, 0, 0)
        finally:
            self._socket.close()

    def extents(self, context: str, start: int, end: int) -> Iterator[Extent]:
        """The bytes from `start` up to `end`, in order, as `context` describes them."""
        flag = _ZERO_FLAG if context == ALLOCATION else _DIRTY_FLAG
        at = start
        while at < end:
            self._send_request(_BLOCK_STATUS, at, min(end - at, _MOST_STATUS_BYTES))
            came = self._status(self._contexts[context])
            if not came or not all(length for length, _ in came):
                raise self._broken("its answer does not cover the whole disk")
            for length, flags in came:
                yield Extent(at, min(length, end - at), bool(flags & flag))
                at += length
                if at >= end:
                    break

    def read(self, start: int, length: int) -> bytearray:
        """Read the disk's content there; at most MOST_READ_BYTES."""
        self._send_request(_READ, start, length)
        data = bytearray(length)
        for kind, payload in self._chunks():
            if kind == _DATA:
                offset = int.from_bytes(payload[:8]) - start
                if len(payload) < 8 or not 0 <= offset <= length - (len(payload) - 8):
                    raise self._broken("it answers with other bytes than requested")
                data[offset : offset + len(payload) - 8] = payload[8:]
            elif kind != _HOLE and kind:
                raise self._broken(f"it answers a read with {kind}")
        return data

    def _status(self, wanted: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for kind, payload in self._chunks():
            if kind != _STATUS:
                continue
            if len(payload) % 8 != 4:
                raise self._broken("its answer is of no length that there is")
            if struct.unpack_from(">I", payload)[0] == wanted:
                found = list(struct.iter_unpack(">II", payload[4:]))
        return found

    def _negotiate(self, contexts: tuple[str, ...]) -> int:
        magic, option_magic, flags = struct.unpack(">8s8sH", self._receive(18))
        if magic != _MAGIC or option_magic != _OPTION_MAGIC or not flags & _FIXED_NEWSTYLE:
            raise self._broken("it does not speak NBD as QEMU does")
        self._send(struct.pack(">I", flags & (_FIXED_NEWSTYLE | _NO_ZEROES)))
        self._option(_STRUCTURED_REPLY, b"")
        name = self._export.encode()
        named = struct.pack(">I", len(name)) + name
        queries = b"".join(struct.pack(">I", len(c.encode())) + c.encode() for c in contexts)
        for kind, payload in self._option(
            _SET_META_CONTEXT, named + struct.pack(">I", len(contexts)) + queries
        ):
            if kind == _META_CONTEXT and len(payload) >= 4:
                number = struct.unpack_from(">I", payload)[0]
                self._contexts[payload[4:].decode(errors="replace")] = number
        if missing := set(contexts) - set(self._contexts):
            raise self._broken(f"it does not know {', '.join(sorted(missing))}")
        for kind, payload in self._option(_GO, named + struct.pack(">H", 0)):
            if kind == _INFO and len(payload) == 12 and payload[:2] == _INFO_EXPORT:
                return int(struct.unpack_from(">Q", payload, 2)[0])
        raise self._broken("it does not say how large the disk is")

    def _option(self, option: int, data: bytes) -> list[tuple[int, bytes]]:
        self._send(_OPTION_MAGIC + struct.pack(">II", option, len(data)) + data)
        came: list[tuple[int, bytes]] = []
        while True:
            magic, _, kind, length = struct.unpack(">QIII", self._receive(20))
            if magic != _OPTION_REPLY or length > _MOST_REPLY_BYTES:
                raise self._broken("its answer to an option is invalid")
            payload = self._receive(length)
            if kind & _ERROR_BIT:
                raise self._broken(
                    f"it refuses option {option}: {payload.decode(errors='replace')}"
                )
            if kind == _ACK:
                return came
            if len(came) == _MOST_REPLIES:
                raise self._broken("its answer to an option does not end")
            came.append((kind, payload))

    def _send_request(self, command: int, offset: int, length: int) -> None:
        self._cookie += 1
        self._send(struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, command, self._cookie, offset, length))

    def _chunks(self) -> Iterator[tuple[int, bytes]]:
        error = ""
        while True:
            magic, flags, kind, cookie, length = struct.unpack(">IHHQI", self._receive(20))
            if magic != _REPLY_MAGIC or cookie != self._cookie or length > _MOST_ANSWER_BYTES:
                raise self._broken("its answer is out of step")
            payload = self._receive(length)
            if kind & _CHUNK_ERROR:
                error = payload[6:].decode(errors="replace") or f"error {payload[:4].hex()}"
            else:
                yield kind, payload
            if flags & _DONE:
                break
        if error:
            raise self._broken(error)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as exc:
            raise self._broken(exc.strerror or str(exc)) from exc

    def _receive(self, length: int) -> bytes:
        parts, left = [], length
        while left:
            try:
                part = self._socket.recv(min(left, 1 << 20))
            except OSError as exc:
                raise self._broken(exc.strerror or str(exc)) from exc
            if not part:
                raise self._broken("it has closed the connection")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _broken(self, why: str) -> OperationFailedError:
        return OperationFailedError(
            f"QEMU's NBD server cannot read disk '{self._export}'",
            why=why,
            remedy="see the VM's stderr.log",
        )
