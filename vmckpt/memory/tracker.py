"""Finds the pages that a guest writes, and copies them, by the best available method."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from vmckpt.memory.comparison import compared
from vmckpt.memory.dirty_pages import DirtyPages, tracked_at
from vmckpt.memory.private.guest_ram import GuestRam, PrivateRam, ram_of
from vmckpt.memory.private.other_blocks import OtherBlocks
from vmckpt.memory.ram_file import RamFile, Span, mapped
from vmckpt.memory.soft_dirty import SoftDirty, is_sound, soft_dirty


class Tracker(Protocol):
    """The dirty pages of one RAM file.

    `needs_stop`: writes during `take_spans` may be missed, so the VM must be paused and its block
    layer drained.
    """

    @property
    def name(self) -> str:
        """The name of the method, for people."""

    @property
    def needs_stop(self) -> bool:
        """See the class."""

    @property
    def others(self) -> OtherBlocks | None:
        """The process's other memory, as it was asked for; None: this tracker cannot see it."""

    def count(self) -> int:
        """How many pages were written since they were last taken. Costs the guest nothing."""

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """Spans of the file, in bytes. What is `spared` may count as written the next time."""

    def extents(self) -> list[Span]:
        """All that is not certainly zero."""

    def copy(self, spans: Sequence[Span]) -> bytes:
        """The content as of `take_spans` or later; later writes are found the next time."""


class WriteProtection:
    """By write protection: the first write to each page costs the guest a fault."""

    name = "page protection"
    needs_stop = True

    def __init__(self, dirty: DirtyPages, ram: RamFile | PrivateRam, others: OtherBlocks) -> None:
        self.count, self._dirty, self._ram_bytes = dirty.count, dirty, ram.size_bytes
        self.extents, self.copy = ram.extents, ram.copy
        self.others = others

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """Those of the RAM; those of other memory are noted there."""
        spans = self.others.noted(self._dirty.take_spans(spared))
        # A huge page may end behind the RAM.
        return [(a, min(b, self._ram_bytes)) for a, b in spans if a < self._ram_bytes]


@contextmanager
def tracking(
    pid: int,
    ram: GuestRam,
    how: str,
    ram_bytes: int | None = None,
    others: Sequence[Span] = (),
) -> Iterator[Tracker]:
    """Track what process `pid` writes to its guest's RAM, for the block; `others` are addresses of
    other memory there.

    Initially every page counts as not written. `how` is the name of the best method that the kernel
    allows (`hosts/processes/kernel.py`); soft-dirty bits that could get lost are not trusted: then
    everything is compared. Raises OSError as `tracked_at`, `soft_dirty` and `compared` do, and
    EOPNOTSUPP: RAM that a process has alone is tracked by write protection only.
    """
    if how == WriteProtection.name:
        with ram_of(pid, ram, ram_bytes, mapped) as (content, mappings):
            behind = max(one.offset + one.end - one.start for one in mappings)
            blocks = OtherBlocks(pid, others, behind)
            with tracked_at(pid, (*mappings, *blocks.mappings)) as dirty:
                content.extents()  # sees what was written while tracking was being prepared
                yield WriteProtection(dirty, content, blocks)
    elif ram.private or ram.file is None:
        raise OSError(errno.EOPNOTSUPP, f"memory that QEMU has alone is not tracked by {how}")
    elif how == SoftDirty.name and is_sound(ram.file):
        with soft_dirty(pid, ram.file, ram_bytes) as marked:
            yield marked
    else:
        with compared(ram.file, ram_bytes) as comparison:
            yield comparison
