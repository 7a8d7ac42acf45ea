"""Framed messages between primary and standby: on the wire each is this head, then the payload.

    offset 0   payload's length, bytes       unsigned 32 bit, big-endian, as all numbers in heads
           4   kind                          unsigned 8 bit
           5   frames sent before this one   its upper 24 of 56 bit, per direction of a connection
           8   term                          unsigned 64 bit
          16   epoch                         unsigned 64 bit; 0 if there is none
          24   frames sent before this one   its lower 32 bit
          28   CRC-32 of the payload         unsigned 32 bit
          32   CRC-32 of bytes 0 to 31       unsigned 32 bit

So any single flipped bit is detected, and so is a frame that is missing, duplicated or out of
order. At a million frames a second 56 bits last for 2,000 years. Up to protocol 4
(`messages.PROTOCOL`) bytes 5 to 7 were zero: the first frames are the same in all protocols, so
sides with different protocols can read each other's HELLO and report which they speak.
"""

import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from vmckpt.replicate.wire.errors import StaleTermError, damaged, protocol_violation

Buffer = bytes | bytearray | memoryview
# Longer than any frame that is sent; a longer one is invalid.
MOST_BYTES = 64 << 20
_HEAD = struct.Struct(">IB3sQQII")
_LOW_BITS, _HIGH_BYTES = 32, 3
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size


class FrameKind(IntEnum):
    """A frame's kind; `messages` describes its payload."""

    HELLO = 1
    WELCOME = 2
    BEGIN = 3
    PAGES = 4
    DEVICE = 5
    DISK = 6
    COMMIT = 7
    ACK = 8
    HEARTBEAT = 9
    FAILURE = 10
    DIGESTS = 11
    BASE = 12


_KINDS = frozenset(kind.value for kind in FrameKind)


class FrameHead(NamedTuple):
    """The head that precedes a payload."""

    length_bytes: int
    kind: FrameKind
    term: int
    epoch: int
    sequence: int
    payload_crc: int
    crc: int

    def __str__(self) -> str:
        return f"frame {self.sequence} ({self.kind.name} of epoch {self.epoch})"


class Outbound:
    """Frames for one direction of a connection, numbered. All carry `term`."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.sequence = 0
        self.sent_bytes = 0

    def frame(self, kind: FrameKind, epoch: int, parts: Iterable[Buffer]) -> list[Buffer]:
        """The next frame: its head, and `parts` unchanged, not copied."""
        payload = list(parts)
        length_bytes, crc = 0, 0
        for part in payload:
            length_bytes += len(part) if isinstance(part, bytes) else memoryview(part).nbytes
            crc = zlib.crc32(part, crc)
        high, low = divmod(self.sequence, 1 << _LOW_BITS)
        upper = high.to_bytes(_HIGH_BYTES)
        head = _HEAD.pack(length_bytes, kind, upper, self.term, epoch, low, crc)
        self.sequence += 1
        self.sent_bytes += HEAD_BYTES + length_bytes
        return [head + _CRC.pack(zlib.crc32(head)), *payload]


class Inbound:
    """Checks one direction of a connection: each frame once, in order, none of a lower term.

    Raise `highest_term` whenever a higher term is seen granted.
    """

    def __init__(self, highest_term: int) -> None:
        self.highest_term = highest_term
        self.sequence = 0

    def head(self, data: Buffer) -> FrameHead:
        """The next frame's head, of exactly HEAD_BYTES bytes.

        Raises DamagedError, WireError, StaleTermError.
        """
        (crc,) = _CRC.unpack_from(data, _HEAD.size)
        if zlib.crc32(data[: _HEAD.size]) != crc:
            raise damaged(
                f"the head of frame {self.sequence} is damaged", "its checksum does not hold"
            )
        length_bytes, kind, upper, term, epoch, low, payload_crc = _HEAD.unpack_from(data)
        if length_bytes > MOST_BYTES or kind not in _KINDS:
            raise protocol_violation(
                f"frame {self.sequence} is invalid", f"kind {kind} with {length_bytes} bytes"
            )
        sequence = int.from_bytes(upper) << _LOW_BITS | low
        head = FrameHead(length_bytes, FrameKind(kind), term, epoch, sequence, payload_crc, crc)
        if head.sequence != self.sequence:
            raise damaged(f"frame {self.sequence} is missing", f"instead came {head}")
        self.sequence += 1
        require_term(head, self.highest_term)
        return head


def require_whole(head: FrameHead, payload: Buffer) -> None:
    """Raises DamagedError unless `payload` is what was sent."""
    if memoryview(payload).nbytes != head.length_bytes or zlib.crc32(payload) != head.payload_crc:
        raise damaged(f"{head} is damaged", "the checksum of its payload does not hold")


def require_term(head: FrameHead, highest: int) -> None:
    """Raises StaleTermError when a term above the sender's was seen granted."""
    if head.term < highest:
        raise StaleTermError(
            f"{head} of term {head.term} is refused",
            why=f"term {highest} was granted",
            remedy="its sender was replaced: stop its guest, and protect the VM from where it "
            "runs now",
        )
