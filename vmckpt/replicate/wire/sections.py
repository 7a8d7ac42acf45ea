"""Parts of a payload, packed with zstd if that pays.

A section is: its packing method (8 bit), raw length, packed length (32 bit each), and the bytes.
"""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from vmckpt.replicate.wire.errors import protocol_violation
from vmckpt.replicate.wire.frames import MOST_BYTES, Buffer

_HEAD = struct.Struct(">BII")
_RAW, _ZSTD = 0, 1
# Level 1: higher levels cost more time than they save on any link for which packing pays.
LEVEL = 1
# Below this size a section's own head dominates.
LEAST_BYTES = 64
# If packing does not pay, it is retried once in this many sections: content changes.
RETRY = 32
# A smaller gain counts as none: random content never reaches this.
LEAST_GAIN = 0.05
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Gauge:
    """What packing has recently cost and gained, for one kind of content."""

    seconds_per_byte: float = 0.0
    ratio: float = 0.5
    left_out: int = 0

    def pays(self, link_bytes_per_s: float) -> bool:
        """Whether to pack the next section: packing and sending less is faster than sending all.

        A link of 0 bytes/s always pays, one without limit (inf) never.
        """
        if link_bytes_per_s == float("inf"):
            return False
        saved_s_per_byte = 1 - self.ratio
        gains = saved_s_per_byte > LEAST_GAIN
        pays = gains and self.seconds_per_byte * link_bytes_per_s < saved_s_per_byte
        return pays or self.left_out >= RETRY

    def after(self, *, raw_bytes: int, packed_bytes: int, seconds: float) -> "Gauge":
        """The gauge after a section was packed."""
        return Gauge(
            self.seconds_per_byte + _WEIGHT * (seconds / raw_bytes - self.seconds_per_byte),
            self.ratio + _WEIGHT * (packed_bytes / raw_bytes - self.ratio),
        )

    def without(self) -> "Gauge":
        """The gauge after a section was sent unpacked."""
        return Gauge(self.seconds_per_byte, self.ratio, self.left_out + 1)


class Packer:
    """Packs sections of one kind of content for a link of a known speed.

    `link_bytes_per_s` may be set at any time: 0 to pack always, inf to pack never.
    """

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        self.link_bytes_per_s = link_bytes_per_s
        self.gauge = Gauge()
        self._zstd = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)

    def pack(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """The section that holds `parts` in sequence. What is not packed is not copied."""
        raw_bytes = sum(memoryview(part).nbytes for part in parts)
        if raw_bytes < LEAST_BYTES or not self.gauge.pays(self.link_bytes_per_s):
            self.gauge = self.gauge.without()
            return [_HEAD.pack(_RAW, raw_bytes, raw_bytes), *parts]
        began_s = time.thread_time()
        squeeze = self._zstd.compressobj(size=raw_bytes)
        packed = [*map(squeeze.compress, parts), squeeze.flush()]
        packed_bytes = sum(map(len, packed))
        seconds = time.thread_time() - began_s
        self.gauge = self.gauge.after(
            raw_bytes=raw_bytes, packed_bytes=packed_bytes, seconds=seconds
        )
        if packed_bytes >= raw_bytes:
            return [_HEAD.pack(_RAW, raw_bytes, raw_bytes), *parts]
        return [_HEAD.pack(_ZSTD, raw_bytes, packed_bytes), *packed]


def unpack(payload: memoryview, count: int) -> list[memoryview]:
    """The content of the `count` sections in `payload`. Raises WireError."""
    found, at = [], 0
    for _ in range(count):
        if len(payload) - at < _HEAD.size:
            raise protocol_violation("a payload ends too early", "a section is missing")
        packing, raw_bytes, packed_bytes = _HEAD.unpack_from(payload, at)
        at += _HEAD.size
        found.append(_content(packing, raw_bytes, payload[at : at + packed_bytes], packed_bytes))
        at += packed_bytes
    if at != len(payload):
        raise protocol_violation(
            "a payload is too long", f"{len(payload) - at} bytes follow its end"
        )
    return found


def _content(packing: int, raw_bytes: int, packed: memoryview, packed_bytes: int) -> memoryview:
    if len(packed) != packed_bytes or raw_bytes > MOST_BYTES or packing not in (_RAW, _ZSTD):
        raise protocol_violation("a section is malformed", f"{packed_bytes} bytes for {raw_bytes}")
    if packing == _RAW:
        raw: Buffer = packed
    else:
        try:
            # It would allocate as much as the frame claims, before checking.
            if zstandard.frame_content_size(packed) != raw_bytes:
                raise protocol_violation("a section has another length", f"not {raw_bytes} bytes")
            raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=raw_bytes)
        except zstandard.ZstdError as exc:
            raise protocol_violation("a section cannot be unpacked", str(exc)) from exc
    if len(raw) != raw_bytes:
        raise protocol_violation(
            "a section has another length", f"{len(raw)} bytes for {raw_bytes}"
        )
    return memoryview(raw)
