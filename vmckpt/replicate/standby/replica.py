"""The standby's copy of the guest: RAM file, disks, and the last complete epoch's device state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from vmckpt.errors import OperationFailedError
from vmckpt.memory.ram_file import PAGE_BYTES, RamFile
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.wire.epoch import ReceivedEpoch
from vmckpt.replicate.wire.pages import PageBatch, Words, as_words
from vmckpt.sequence.in_thread import in_thread_at_last
from vmckpt.sequence.steps import finish


class Replica:
    """A guest as of the last epoch that was applied; incomplete before the first one with devices.

    Epochs without device state bring the memory of a guest that is still being copied.
    """

    def __init__(self, words: Words, disks: DisksJournal) -> None:
        self._words, self.disks = words, disks
        self.epoch, self._device_base, self.device_state = 0, b"", b""
        # While an epoch is being applied the memory matches no single epoch.
        self.is_applying, self._was_complete = False, False
        # How much of all epochs was written to memory so far.
        self.written_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether a guest can continue from it, once nothing `is_applying`."""
        return (bool(self.device_state) or self._was_complete) and self.disks.is_sound

    def require_same(self, ram_bytes: int) -> None:
        """Require a guest with as much memory. Raises OperationFailedError."""
        if ram_pages(ram_bytes) != len(self._words):
            raise OperationFailedError(
                "the memory sizes of the guest and of its replica differ",
                why=f"{ram_bytes} bytes on the primary, {self._words.nbytes} on the standby",
                remedy="start the replication again: vmckpt replicate start",
            )

    async def apply(self, epoch: ReceivedEpoch) -> None:
        """Bring it to a complete epoch, in a thread; its disks follow later.

        When this returns the epoch's sums have been checked. A cancellation waits for its end.
        Raises DamagedError: then the replica is unusable.
        """
        self.is_applying, self._was_complete = True, bool(self.device_state)
        # If this raises, or this process dies in it, the memory matches no single epoch.
        self.device_state = b""
        try:
            await finish(self._apply(epoch))
        finally:
            self.is_applying = self._was_complete = False

    async def _apply(self, epoch: ReceivedEpoch) -> None:
        await in_thread_at_last(partial(self._write, epoch.batches))
        self.disks.take(epoch.writes)
        if epoch.device_base is not None:
            self._device_base = epoch.device_base
        self.epoch = epoch.number
        if epoch.device_state:
            self.device_state = self._device_base + epoch.device_state

    def _write(self, batches: Sequence[PageBatch]) -> None:
        for batch in batches:
            batch.apply(self._words)
            self.written_bytes += batch.pages * PAGE_BYTES


@contextmanager
def replica_in(ram: RamFile, disks: DisksJournal) -> Iterator[Replica]:
    """An empty replica in a RAM file that is all zero and reserved, for the block."""
    replica = Replica(as_words(ram.view), disks)
    try:
        yield replica
    finally:
        del replica._words


def ram_pages(ram_bytes: int) -> int:
    """How many pages a guest has."""
    return ram_bytes // PAGE_BYTES
