"""The standby's copy of the guest: its RAM file, its disks, the last whole epoch's device state."""

from collections.abc import Iterator
from contextlib import contextmanager

from vmckpt.memory.ram_file import PAGE_BYTES, RamFile
from vmckpt.replicate.disks.journal import Journal
from vmckpt.replicate.wire.epoch import Epoch
from vmckpt.replicate.wire.pages import Words, as_words


class Replica:
    """A guest as of the last epoch that was applied. Of none before the first with devices.

    Epochs without device state bring the memory of a guest that is still being copied.
    """

    def __init__(self, words: Words, disks: Journal) -> None:
        self._words, self.disks = words, disks
        self.epoch, self._device_base, self.device_state = 0, b"", b""

    @property
    def complete(self) -> bool:
        """Whether a guest can go on from it."""
        return bool(self.device_state) and self.disks.is_sound

    def apply(self, epoch: Epoch) -> None:
        """Bring it to a whole epoch; its disks follow behind.

        Raises DamagedError: then it is of no use any more.
        """
        # Should this raise, or this process die in it, the memory is of no one epoch.
        self.device_state = b""
        for batch in epoch.batches:
            batch.apply(self._words)
        self.disks.take(epoch.writes)
        if epoch.device_base is not None:
            self._device_base = epoch.device_base
        self.epoch = epoch.number
        if epoch.device_state:
            self.device_state = self._device_base + epoch.device_state


@contextmanager
def replica_in(ram: RamFile, disks: Journal) -> Iterator[Replica]:
    """An empty replica in a RAM file that is all zero and reserved, for the block."""
    replica = Replica(as_words(ram.view), disks)
    try:
        yield replica
    finally:
        del replica._words


def ram_pages(ram_bytes: int) -> int:
    """How many pages a guest has."""
    return ram_bytes // PAGE_BYTES
