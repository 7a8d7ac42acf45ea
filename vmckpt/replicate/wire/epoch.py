"""An epoch as frames, both ways: composed by the primary, assembled by the standby.

    BEGIN, then PAGES, BASE, DEVICE and DISK in any number and order, then COMMIT

What is applied to the replica is a `ReceivedEpoch`: all of it has arrived and its checksums match.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vmckpt.replicate.wire import messages
from vmckpt.replicate.wire.errors import damaged, protocol_violation
from vmckpt.replicate.wire.frames import Buffer, FrameHead, FrameKind, Outbound
from vmckpt.replicate.wire.messages import WRITE_BYTES, Begin, Commit, DiskWrite, HelloDisk
from vmckpt.replicate.wire.pages import Encoder, Numbers, PageBatch, Words, decode
from vmckpt.replicate.wire.sections import Packer

# A device state is sent in pieces, so that it does not need its full size in memory at once.
_DEVICE_BYTES = 1 << 20
# Writes are sent in frames of this size, or of one write's if that is larger.
_DISK_BYTES = 1 << 20
# What a frame occupies in the standby's memory besides its content.
_FRAME_BYTES = 2048
_PARTS = frozenset({FrameKind.PAGES, FrameKind.BASE, FrameKind.DEVICE, FrameKind.DISK})


@dataclass(slots=True)
class _Totals:
    """What was sent, or received, since BEGIN."""

    frames: int = 0
    pages: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0
    crc: int = 0

    def add(self, head_crc: int) -> None:
        self.frames += 1
        self.crc = zlib.crc32(head_crc.to_bytes(4), self.crc)

    def as_commit(self) -> Commit:
        return Commit(self.frames, self.pages, self.device_bytes, self.disk_bytes, self.crc)


class Composer:
    """The primary's end of a connection: every method yields frames to send in that order.

    A frame is a list of buffers. The contents of whole pages, device state and disk writes that are
    not packed belong to the caller: they must not change until they are sent.
    """

    def __init__(self, outbound: Outbound, encoder: Encoder) -> None:
        self.outbound, self.encoder = outbound, encoder
        self.device_packer, self.disk_packer = Packer(), Packer()
        self._epoch, self._totals = 0, _Totals()
        self._base = b""

    def tell_link(self, link_bytes_per_s: float) -> None:
        """Set the link's speed, by which packing is chosen. 0 packs all, inf nothing."""
        packers = self.encoder.patches, self.encoder.wholes, self.device_packer, self.disk_packer
        for packer in packers:
            packer.link_bytes_per_s = link_bytes_per_s

    def begin(self, epoch: int, begin: Begin) -> list[Buffer]:
        """The first frame of `epoch`, which is above `begin.base`."""
        self._epoch, self._totals = epoch, _Totals()
        return self._part(FrameKind.BEGIN, begin.encode())

    def pages(self, numbers: Numbers, contents: Words) -> Iterator[list[Buffer]]:
        """Frames for pages, by number, and their contents. Unchanged pages yield none.

        A page may come again in an epoch: the later content counts.
        """
        for pages, payload in self.encoder.batches(numbers, contents):
            self._totals.pages += pages
            yield self._part(FrameKind.PAGES, payload)

    def base(self, base: bytes) -> Iterator[list[Buffer]]:
        """Frames for what precedes the device state from now on; none if it is unchanged."""
        if base is not self._base:
            self._base = base
            yield from self._pieces(FrameKind.BASE, memoryview(base))

    def device(self, state: Buffer) -> Iterator[list[Buffer]]:
        """Frames for the device state."""
        if state:
            yield from self._pieces(FrameKind.DEVICE, memoryview(state).cast("B"))

    def _pieces(self, kind: FrameKind, view: memoryview) -> Iterator[list[Buffer]]:
        """At least one: an empty base is one too."""
        for at in range(0, max(len(view), 1), _DEVICE_BYTES):
            piece = view[at : at + _DEVICE_BYTES]
            self._totals.device_bytes += len(piece)
            yield self._part(kind, messages.encode_device([piece], self.device_packer))

    def disk(self, writes: Sequence[DiskWrite]) -> Iterator[list[Buffer]]:
        """Frames for disk writes, in the order in which the guest made them."""
        some: list[DiskWrite] = []
        some_bytes = 0
        for write in writes:
            length = memoryview(write.data).nbytes
            if some and some_bytes + length > _DISK_BYTES:
                yield self._writes(some, some_bytes)
                some, some_bytes = [], 0
            some.append(write)
            some_bytes += length
        if some:
            yield self._writes(some, some_bytes)

    def commit(self) -> list[Buffer]:
        """The last frame of the epoch."""
        return self.outbound.frame(FrameKind.COMMIT, self._epoch, self._totals.as_commit().encode())

    def _writes(self, writes: Sequence[DiskWrite], data_bytes: int) -> list[Buffer]:
        self._totals.disk_bytes += data_bytes
        return self._part(FrameKind.DISK, messages.encode_writes(writes, self.disk_packer))

    def _part(self, kind: FrameKind, payload: list[Buffer]) -> list[Buffer]:
        frame = self.outbound.frame(kind, self._epoch, payload)
        self._totals.add(int.from_bytes(memoryview(frame[0])[-4:]))
        return frame


@dataclass(frozen=True, slots=True)
class ReceivedEpoch:
    """A complete epoch, checked, and not applied yet. Batches must be applied in order.

    `device_base` is what precedes the device state of this epoch and all after it; None: as before.
    """

    number: int
    term: int
    base: int
    batches: Sequence[PageBatch]
    device_base: bytes | None
    device_state: bytes
    writes: Sequence[DiskWrite]


@dataclass(slots=True)
class _OpenEpoch:
    """An epoch of which parts have arrived."""

    number: int
    term: int
    begin: Begin
    batches: list[PageBatch] = field(default_factory=list)
    base: list[memoryview] = field(default_factory=list)
    device: list[memoryview] = field(default_factory=list)
    writes: list[DiskWrite] = field(default_factory=list)
    totals: _Totals = field(default_factory=_Totals)
    held_bytes: int = 0


class Assembler:
    """The standby's end of a connection: takes frames that passed `Inbound` and `require_whole`.

    `last`: the epoch that the replica holds; 0: it is empty. An epoch that takes more than
    `most_bytes` of memory before it is complete is refused, and one with more than
    `most_state_bytes` of device state: that is kept until the next one is complete.
    """

    def __init__(
        self,
        ram_pages: int,
        disks: Sequence[HelloDisk],
        *,
        last: int,
        most_bytes: float = math.inf,
        most_state_bytes: float = math.inf,
    ) -> None:
        self.last, self._most_bytes, self._most_state_bytes = last, most_bytes, most_state_bytes
        self._ram_pages, self._disks = ram_pages, disks
        self._open: _OpenEpoch | None = None

    def take(self, head: FrameHead, payload: memoryview) -> ReceivedEpoch | None:
        """Take one frame of an epoch. Returns the epoch with its last frame, else None.

        `payload` is kept, not copied. Raises DamagedError, WireError: then the connection must be
        ended, and what has arrived of this epoch dropped.
        """
        if head.kind is FrameKind.BEGIN:
            self._begin(head, messages.decode_begin(payload))
            return None
        now = self._open
        if now is None or now.number != head.epoch or now.term != head.term:
            raise protocol_violation(f"{head} comes unasked", "no such epoch has begun")
        if head.kind is FrameKind.COMMIT:
            return self._commit(now, messages.decode_commit(payload))
        if head.kind not in _PARTS:
            raise protocol_violation(
                f"{head} is not part of an epoch", "a frame of another kind was expected"
            )
        self._part(now, head, payload)
        return None

    def _begin(self, head: FrameHead, begin: Begin) -> None:
        if self._open is not None:
            raise protocol_violation(
                f"{head} comes too early", f"epoch {self._open.number} is not complete yet"
            )
        if begin.base != self.last or head.epoch <= self.last:
            raise protocol_violation(
                f"epoch {head.epoch} does not fit",
                f"it builds on {begin.base}, the replica is at {self.last}",
            )
        self._open = _OpenEpoch(head.epoch, head.term, begin)
        self._open.totals.add(head.crc)

    def _part(self, now: _OpenEpoch, head: FrameHead, payload: memoryview) -> None:
        totals = now.totals
        totals.add(head.crc)
        now.held_bytes += _FRAME_BYTES
        if head.kind is FrameKind.PAGES:
            now.batches.append(decode(payload, self._ram_pages))
            totals.pages += now.batches[-1].pages
            now.held_bytes += now.batches[-1].held_bytes
        elif head.kind in (FrameKind.BASE, FrameKind.DEVICE):
            pieces = now.base if head.kind is FrameKind.BASE else now.device
            pieces.append(messages.decode_device(payload))
            totals.device_bytes += len(pieces[-1])
            now.held_bytes += len(pieces[-1])
        else:
            room_bytes = self._most_bytes - now.held_bytes
            writes = messages.decode_writes(payload, self._disks, room_bytes / WRITE_BYTES)
            now.writes += writes
            data_bytes = sum(len(write.data) for write in writes)
            totals.disk_bytes += data_bytes
            now.held_bytes += data_bytes + len(writes) * WRITE_BYTES
        if totals.device_bytes > self._most_state_bytes:
            raise protocol_violation(
                f"the device state of epoch {now.number} is too large",
                f"no devices have more than {self._most_state_bytes:.0f} bytes",
            )
        if now.held_bytes > self._most_bytes:
            raise protocol_violation(
                f"epoch {now.number} is too large",
                f"{now.held_bytes} bytes of it have come; the standby has room for "
                f"{self._most_bytes:.0f}",
            )

    def _commit(self, now: _OpenEpoch, commit: Commit) -> ReceivedEpoch:
        if commit != now.totals.as_commit():
            raise damaged(
                f"epoch {now.number} is not whole",
                f"{commit} was sent, {now.totals.as_commit()} arrived",
            )
        self._open, self.last = None, now.number
        return ReceivedEpoch(
            now.number,
            now.term,
            now.begin.base,
            tuple(now.batches),
            b"".join(now.base) if now.base else None,
            b"".join(now.device),
            tuple(now.writes),
        )
