"""Heartbeats over the second path: one datagram each, authenticated by a key.

    offset 0   "vkb1"
           4   the sender: 1 the primary, 2 the standby     unsigned 8 bit
           5   zero                                         3 bytes
           8   how many it has sent, including this one     unsigned 64 bit, big-endian, as the next
          16   the highest number that it has received      unsigned 64 bit; 0: none
          24   HMAC-SHA256 of bytes 0 to 23                 32 bytes

The key is derived from the replication's one-time token, which both sides have. So a datagram of
another replication or of the same side, or one that was received before (copied, or late), is
ignored; it contains no secret.
"""

import hmac
import struct
from enum import IntEnum
from hashlib import sha256
from typing import NamedTuple

from vmckpt.replicate.wire.errors import protocol_violation

_MAGIC = b"vkb1"
_BEAT = struct.Struct(">4sB3xQQ")
_MAC_BYTES = sha256().digest_size
BEAT_BYTES = _BEAT.size + _MAC_BYTES
_PURPOSE = b"vmckpt: heartbeats over the second path"


class Sender(IntEnum):
    """Which side sends it."""

    PRIMARY = 1
    STANDBY = 2

    @property
    def other(self) -> "Sender":
        """The side that it listens to."""
        return Sender.STANDBY if self is Sender.PRIMARY else Sender.PRIMARY


class Beat(NamedTuple):
    """Datagram `number` of `sender`; `heard`: the highest number it has from the other side."""

    sender: Sender
    number: int
    heard: int


def beat_key(token: str) -> bytes:
    """The key of a replication with this token."""
    return hmac.digest(token.encode(), _PURPOSE, "sha256")


def encode_beat(beat: Beat, key: bytes) -> bytes:
    """The datagram."""
    reply = _BEAT.pack(_MAGIC, beat.sender, beat.number, beat.heard)
    return reply + hmac.digest(key, reply, "sha256")


def decode_beat(data: bytes, key: bytes) -> Beat:
    """Decode a datagram that `encode_beat` made with the same key. Raises WireError."""
    reply, mac = data[: _BEAT.size], data[_BEAT.size :]
    if len(data) != BEAT_BYTES or not hmac.compare_digest(hmac.digest(key, reply, "sha256"), mac):
        raise protocol_violation(
            "a datagram is not a heartbeat", f"{len(data)} bytes from another sender"
        )
    magic, sender, number, heard = _BEAT.unpack(reply)
    if magic != _MAGIC or sender not in (Sender.PRIMARY, Sender.STANDBY):
        raise protocol_violation(
            "a heartbeat is not of this protocol", f"{magic!r} of sender {sender}"
        )
    return Beat(Sender(sender), number, heard)


class Hearing:
    """One side's heartbeats: what it sends, and when it was heard. The caller supplies the times.

    `heard_s`: when the other side was last heard; `answered_s`: when it last reported a higher
    number of this side's. None: never.
    """

    def __init__(self, side: Sender, key: bytes) -> None:
        self._side, self._key = side, key
        self._sent = self._heard = self._answered = 0
        self.heard_s: float | None = None
        self.answered_s: float | None = None

    def next_datagram(self) -> bytes:
        """The next datagram."""
        self._sent += 1
        return encode_beat(Beat(self._side, self._sent, self._heard), self._key)

    def receive(self, data: bytes, now_s: float) -> None:
        """Process a datagram; one that was received before is ignored. Raises WireError."""
        beat = decode_beat(data, self._key)
        if beat.sender is not self._side.other:
            raise protocol_violation("a heartbeat comes from the wrong side", f"{beat.sender.name}")
        if beat.number <= self._heard:
            return
        self._heard, self.heard_s = beat.number, now_s
        if self._answered < beat.heard <= self._sent:
            self._answered, self.answered_s = beat.heard, now_s
