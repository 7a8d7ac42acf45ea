"""The guest's disk writes on their way into the stream, cut where epochs end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from vmckpt.replicate.disks.known import KnownBlocks
from vmckpt.replicate.wire.messages import WRITE_BYTES, DiskWrite

# At the first limit an epoch ends early; at the second the guest's writes wait for its end.
EARLY_BYTES, MOST_BYTES = 16 << 20, 64 << 20
# While nothing waits (`open`): more than the queues of all of a guest's disks hold.
FLOOD_BYTES = 1 << 30


class Intake:
    """The writes to all disks since the last cut, in order.

    `known` is what the standby's copies hold, by disk, until `all_is_copied`: content that a copy
    already has is not passed on. Nothing is known of a disk that is not in it.
    """

    def __init__(self, known: dict[int, KnownBlocks]) -> None:
        self._known: dict[int, KnownBlocks] | None = known
        self._writes: list[DiskWrite] = []
        self._queued_bytes = 0
        self._is_open, self._is_dropped = False, False
        self._room = asyncio.Event()
        self._room.set()
        self.is_early = asyncio.Event()
        # More than FLOOD_BYTES came: QEMU was broken into. The writes are no longer complete.
        self.is_flooded = False
        self.written_bytes = self.same_bytes = 0

    async def write(self, disk: int, offset_bytes: int, data: bytes) -> None:
        """Data that the guest wrote; returns when there is room for more."""
        if not data.strip(b"\0"):  # also nothing at all
            await self.zero(disk, offset_bytes, len(data))
            return
        self.written_bytes += len(data)
        if self._known is None or disk not in self._known:
            self._queue(DiskWrite(disk, offset_bytes, data), len(data))
        else:
            view, differing_bytes = memoryview(data), 0
            for start, end in self._known[disk].differing(offset_bytes, data):
                part = view[start - offset_bytes : end - offset_bytes]
                self._queue(DiskWrite(disk, start, part), len(part))
                differing_bytes += len(part)
            self.same_bytes += len(data) - differing_bytes
        await self._room.wait()

    async def zero(self, disk: int, offset_bytes: int, length_bytes: int) -> None:
        """Zeroes that the guest wrote; like `write`."""
        self.written_bytes += length_bytes
        spans = [(offset_bytes, offset_bytes + length_bytes)] if length_bytes else []
        if self._known is not None and disk in self._known:
            spans = self._known[disk].differing_from_zero(offset_bytes, length_bytes)
            self.same_bytes += length_bytes - sum(end - start for start, end in spans)
        for start, end in spans:
            self._queue(DiskWrite(disk, start, b"", zero_bytes=end - start), 0)
        await self._room.wait()

    def cut(self) -> list[DiskWrite]:
        """All that was written since the last cut."""
        writes, self._writes, self._queued_bytes = self._writes, [], 0
        self.is_early.clear()
        self._room.set()
        return writes

    @property
    def is_full(self) -> bool:
        """Whether the guest's writes wait for the end of the epoch."""
        return self._queued_bytes >= MOST_BYTES

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let no write wait for the block: QEMU stops a guest only once all writes are accepted."""
        self._is_open = True
        self._room.set()
        try:
            yield
        finally:
            self._is_open = False

    async def waits_for(self, most_s: float, wake: asyncio.Event | None = None) -> None:
        """Return when enough is queued that an epoch should end, at `wake`, or after `most_s`."""
        events = [self.is_early, *([wake] if wake else [])]
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waiting, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def all_is_copied(self) -> None:
        """From now on pass on every write, even if the copies already have it."""
        self._known = None

    def drop(self) -> None:
        """Discard writes from now on, so that the guest does not wait."""
        self._is_dropped = True
        self.cut()

    def _queue(self, write: DiskWrite, data_bytes: int) -> None:
        if self._queued_bytes > FLOOD_BYTES:
            self.is_flooded = True
            self.drop()
        if self._is_dropped:
            return
        self._writes.append(write)
        self._queued_bytes += data_bytes + WRITE_BYTES
        if self._queued_bytes >= EARLY_BYTES:
            self.is_early.set()
        if self.is_full and not self._is_open:
            self._room.clear()
