"""Where a guest's RAM is, and its content where no other process can map it."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from vmckpt.memory.dirty_pages import Mapping, mappings_of, populated, present
from vmckpt.memory.private.backing import held_by_files
from vmckpt.memory.private.process_memory import read_memory
from vmckpt.memory.ram_file import PAGE_BYTES, Span, open_fd
from vmckpt.memory.runs import union

T = TypeVar("T")
_SWAPS = Path("/proc/swaps")
# Of a process (x86-64 with five levels of page tables).
_END_OF_ADDRESSES = 1 << 56


class GuestRam(NamedTuple):
    """The RAM of one guest: a `file`, mapped shared by its QEMU.

    `private`: if it is private memory of its QEMU instead, its address range.
    """

    file: Path | None
    private: Span | None = None


class PrivateRam:
    """RAM that is private to its process; offsets are from its first address.

    `before`: the spans that may hold something other than zeroes when tracking begins.
    """

    def __init__(self, pid: int, pagemap: int, span: Span, before: Sequence[Span]) -> None:
        self._pid, self._pagemap, self._span = pid, pagemap, span
        self._seen = before
        self.size_bytes = span[1] - span[0]

    @property
    def mapping(self) -> Mapping:
        """Its mapping in the process."""
        return Mapping(*self._span, 0)

    def extents(self) -> list[Span]:
        """The spans that may hold something other than zeroes, and all those of earlier calls."""
        # Tracked pages without memory look as if they were swapped out: with swap, everything is
        # read; without swap, only present pages. A page that is being moved looks swapped out too:
        # it was present before, was seen just after tracking began, or was written since.
        if len(_SWAPS.read_text().splitlines()) > 1:
            return [(0, self.size_bytes)]
        start, _ = self._span
        here = [(a - start, b - start) for a, b in present(self._pagemap, self.mapping)]
        self._seen = list(union(self._seen, here))
        return self._seen

    def copy(self, spans: Sequence[Span]) -> bytes:
        """The content of the spans, in sequence. Raises OSError."""
        start, _ = self._span
        return read_memory(self._pid, [(start + a, start + b) for a, b in spans])


@contextmanager
def private_ram(pid: int, ram: GuestRam, ram_bytes: int | None) -> Iterator[PrivateRam]:
    """The RAM that process `pid` has alone, for the block. Raises OSError."""
    start, end = span = ram.private or (0, 0)
    is_possible = not start % PAGE_BYTES and start < end <= _END_OF_ADDRESSES
    if not is_possible or (ram_bytes or end - start) != end - start:
        raise OSError(errno.EFAULT, f"no RAM of {ram_bytes} bytes can be at {start:#x} to {end:#x}")
    with open_fd(os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)) as pagemap:
        # Before tracking begins: only then a page that is there differs from one that never was.
        there = [(a - start, b - start) for a, b in populated(pagemap, Mapping(start, end, 0))]
        below = [(a - start, b - start) for a, b in held_by_files(pid, span)]
        yield PrivateRam(pid, pagemap, span, list(union(there, below)))


@contextmanager
def ram_of(
    pid: int,
    ram: GuestRam,
    ram_bytes: int | None,
    opened: Callable[[Path, int | None], AbstractContextManager[T]],
) -> Iterator[tuple[T | PrivateRam, tuple[Mapping, ...]]]:
    """The RAM's content, a file `opened` for it, and where it is in process `pid`, for the block.

    Raises OSError, as `mappings_of` and `private_ram` do.
    """
    if ram.private or ram.file is None:
        with private_ram(pid, ram, ram_bytes) as alone:
            yield alone, (alone.mapping,)
    else:
        mappings = mappings_of(pid, ram.file, ram_bytes)
        with opened(ram.file, ram_bytes) as shared:
            yield shared, mappings
