"""What finds the pages that a guest writes, and copies them: the best way that there is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from vmckpt.memory.comparison import compared
from vmckpt.memory.dirty_pages import DirtyPages, tracked
from vmckpt.memory.ram_file import RamFile, Span, mapped
from vmckpt.memory.soft_dirty import SoftDirty, is_sound, soft_dirty


class Tracker(Protocol):
    """The dirty pages of one RAM file.

    `needs_stop`: writes during `take_spans` may be missed, so the VM must be paused and its block
    layer drained.
    """

    @property
    def name(self) -> str:
        """How it finds them, for people."""

    @property
    def needs_stop(self) -> bool:
        """See above."""

    def count(self) -> int:
        """How many were written since they were last taken. Costs the guest nothing."""

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """Where: spans of the file, in bytes. What is `spared` may count as written next time."""

    def extents(self) -> list[Span]:
        """All that is not certainly zero."""

    def copy(self, spans: Sequence[Span]) -> bytes:
        """What is there, as of `take_spans` or later; what was written since is found next time."""


class WriteProtection:
    """By write-protecting them: a fault of the guest's for the first write to each."""

    name = "page protection"
    needs_stop = True

    def __init__(self, dirty: DirtyPages, ram: RamFile) -> None:
        self.count, self.take_spans = dirty.count, dirty.take_spans
        self.extents, self.copy = ram.extents, ram.copy


@contextmanager
def tracking(pid: int, ram_file: Path, how: str, ram_bytes: int | None = None) -> Iterator[Tracker]:
    """Track what process `pid` writes to its RAM file, for the block; every page counts as not
    written at its beginning.

    `how` is the name of the best that the kernel allows (`hosts/processes/kernel.py`); soft-dirty
    bits that could get lost are not trusted: then all is compared. Raises OSError as `tracked`,
    `soft_dirty` and `compared` do.
    """
    if how == WriteProtection.name:
        with tracked(pid, ram_file, ram_bytes) as dirty, mapped(ram_file, ram_bytes) as ram:
            yield WriteProtection(dirty, ram)
    elif how == SoftDirty.name and is_sound(ram_file):
        with soft_dirty(pid, ram_file, ram_bytes) as marked:
            yield marked
    else:
        with compared(ram_file, ram_bytes) as comparison:
            yield comparison
