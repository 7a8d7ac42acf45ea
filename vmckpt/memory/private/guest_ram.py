"""Where a guest's RAM is, and its content where no other process can map it."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from vmckpt.memory.dirty_pages import Mapping, mappings_of, populated, present
from vmckpt.memory.private.backing import held_by_files
from vmckpt.memory.private.process_memory import addresses_of, laid_out, read_memory
from vmckpt.memory.ram_file import PAGE_BYTES, Span, open_fd
from vmckpt.memory.runs import union

T = TypeVar("T")
_SWAPS = Path("/proc/swaps")
# Of a process (x86-64 with five levels of page tables).
_END_OF_ADDRESSES = 1 << 56


class GuestRam(NamedTuple):
    """The RAM of one guest: a `file`, mapped shared by its QEMU.

    `private`: if it is private memory of its QEMU instead, the addresses of its blocks.
    """

    file: Path | None
    private: tuple[Span, ...] = ()


class PrivateRam:
    """RAM that is private to its process, its blocks as one image: offsets are from the first one.

    `before`: the spans that may hold something other than zeroes when tracking begins.
    """

    def __init__(
        self, pid: int, pagemap: int, mappings: tuple[Mapping, ...], before: Sequence[Span]
    ) -> None:
        self._pid, self._pagemap, self.mappings = pid, pagemap, mappings
        self._seen = before
        self.size_bytes = sum(one.end - one.start for one in mappings)

    def extents(self) -> list[Span]:
        """The spans that may hold something other than zeroes, and all those of earlier calls."""
        # Tracked pages without memory look as if they were swapped out: with swap, everything is
        # read; without swap, only present pages. A page that is being moved looks swapped out too:
        # it was present before, was seen just after tracking began, or was written since.
        if len(_SWAPS.read_text().splitlines()) > 1:
            return [(0, self.size_bytes)]
        here = list[Span]()
        for one in self.mappings:
            here += _offsets(one, present(self._pagemap, one))
        self._seen = list(union(self._seen, here))
        return self._seen

    def copy(self, spans: Sequence[Span]) -> bytes:
        """The content of the spans, in sequence. Raises OSError."""
        return read_memory(self._pid, addresses_of(self.mappings, spans))


@contextmanager
def private_ram(pid: int, ram: GuestRam, ram_bytes: int | None) -> Iterator[PrivateRam]:
    """The RAM that process `pid` has alone, for the block. Raises OSError."""
    mappings, total_bytes = laid_out(ram.private), 0
    for start, end, _ in mappings:
        if start % PAGE_BYTES or end % PAGE_BYTES or not 0 < start < end <= _END_OF_ADDRESSES:
            raise OSError(errno.EFAULT, f"no RAM can be at {start:#x} to {end:#x}")
        total_bytes += end - start
    if not total_bytes or (ram_bytes or total_bytes) != total_bytes:
        raise OSError(errno.EFAULT, f"its RAM has {total_bytes} bytes instead of {ram_bytes}")
    with open_fd(os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)) as pagemap:
        before = list[Span]()
        for one in mappings:
            # Before tracking begins: only then a page that is there differs from one that never
            # was.
            there = _offsets(one, populated(pagemap, one))
            below = _offsets(one, held_by_files(pid, (one.start, one.end)))
            before += union(there, below)
        yield PrivateRam(pid, pagemap, mappings, before)


def _offsets(mapping: Mapping, spans: Iterable[Span]) -> list[Span]:
    """Spans of a mapping's addresses as offsets of the RAM."""
    shift = mapping.offset - mapping.start
    return [(start + shift, end + shift) for start, end in spans]


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
            yield alone, alone.mappings
    else:
        mappings = mappings_of(pid, ram.file, ram_bytes)
        with opened(ram.file, ram_bytes) as shared:
            yield shared, mappings
