"""Messages on the wire: a kind, the number of what it belongs to, and a payload, framed by length.

    offset 0   payload's length, bytes   unsigned 32 bit, big-endian
           4   kind                      unsigned 8 bit
           5   number                    unsigned 32 bit, big-endian
           9   payload

Before the first frame the far side sends MAGIC: whatever stands before it, a login shell's greeting
for one, is not part of a message.
"""

import asyncio
import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from vmckpt.errors import HostDownError
from vmckpt.foreign import MalformedError, parse

MAGIC = b"\x00vmckpt-serve\n"
# Both sides must have the same; it changes with a frame, the form of a value, a request
# (tests/unit/test_frames.py says when) or the files of a job.
PROTOCOL = 8
# Longer than any file that is read whole; a longer frame is invalid.
MOST_BYTES = 64 << 20
_HEAD = struct.Struct(">IBI")


class RpcFrameKind(IntEnum):
    """The kind of a frame. Payloads are JSON except DATA (the bytes) and CREDIT (a 32-bit
    number).
    """

    HELLO = 1
    REQUEST = 2
    ANSWER = 3
    ERROR = 4
    CANCEL = 5
    DATA = 6
    CREDIT = 7
    END = 8
    CLOSE = 9
    PING = 10
    PONG = 11


_KINDS = frozenset(kind.value for kind in RpcFrameKind)


class Frame(NamedTuple):
    """One message. `number` is the request's or the stream's; 0 if it has none."""

    kind: RpcFrameKind
    number: int = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        """Encode for the wire."""
        return _HEAD.pack(len(self.payload), self.kind, self.number) + self.payload

    @property
    def json(self) -> Any:
        """The payload as JSON. Raises ProtocolError."""
        try:
            return parse(self.payload, most_bytes=MOST_BYTES)
        except MalformedError as exc:
            raise broken(f"a message of kind {self.kind.name}: {exc}") from exc

    @property
    def credit_bytes(self) -> int:
        """The amount of a CREDIT. Raises ProtocolError."""
        if len(self.payload) != 4:
            raise broken("a CREDIT has another length")
        return int.from_bytes(self.payload)


def with_json(kind: RpcFrameKind, number: int, value: object) -> Frame:
    """A frame with a JSON payload."""
    return Frame(kind, number, json.dumps(value, separators=(",", ":")).encode())


def credit(number: int, count_bytes: int) -> Frame:
    """Permission to send that many more bytes on a stream."""
    return Frame(RpcFrameKind.CREDIT, number, count_bytes.to_bytes(4))


async def read_frame(reader: asyncio.StreamReader, silence_s: float | None = None) -> Frame:
    """The next frame. Raises IncompleteReadError at the end, ProtocolError if invalid, OSError.

    TimeoutError: nothing came for `silence_s`. A long frame may take any time over a slow network.
    """
    async with asyncio.timeout(silence_s):
        length, kind, number = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if length > MOST_BYTES or kind not in _KINDS:
        raise broken(f"a frame of kind {kind} with {length} bytes")
    payload = bytearray()
    while left := length - len(payload):
        async with asyncio.timeout(silence_s):
            part = await reader.read(left)
        if not part:
            raise asyncio.IncompleteReadError(bytes(payload), length)
        payload += part
    return Frame(RpcFrameKind(kind), number, bytes(payload))


class ProtocolError(HostDownError):
    """The other side sent an invalid message: it counts as no answer to any request."""


def broken(why: str) -> ProtocolError:
    """The error for an invalid message."""
    return ProtocolError(
        "the connection carries data that is not a message",
        why=why,
        remedy="report this; install the same vmckpt on both sides",
    )
