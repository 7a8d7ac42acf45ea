"""Memory of this machine that costs what memory costs, for the time of a benchmark.

Where the machine is itself a VM whose hypervisor takes free memory back ("free page reporting"),
whoever touches a page that was free for two seconds waits for the hypervisor, many times as long as
for the kernel: a migration's target and the holes of its source do nothing else. What is reported
are free blocks of 2 MiB. So memory is touched once, and all of it let go but one page in each such
block: the rest is free, whole blocks it is not, and it stays with this machine. The kernel gives
such pages away before it breaks a whole block.
"""

import array
import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

PAGE_BYTES = 4096
# Pages of a block that is reported when it is free as a whole.
BLOCK_PAGES = 512
_PRESENT, _FRAME = 1 << 63, (1 << 55) - 1


@contextmanager
def warm(size_bytes: int) -> Iterator[None]:
    """About so much of the machine's free memory is warm for the block; wants root (PFNs)."""
    with mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.madvise(mmap.MADV_NOHUGEPAGE)
        kept = _one_of_each_block(_frames(area, size_bytes // PAGE_BYTES))
        _let_go(area, kept)
        # Broken blocks that were there before are given away first: they are warm from here on.
        _frames(area, size_bytes // PAGE_BYTES)
        _let_go(area, kept)
        yield


def _let_go(area: mmap.mmap, kept: list[int]) -> None:
    for before, after in pairwise([-1, *kept, len(area) // PAGE_BYTES]):
        if after > before + 1:
            start, length = (before + 1) * PAGE_BYTES, (after - before - 1) * PAGE_BYTES
            area.madvise(mmap.MADV_DONTNEED, start, length)


def _frames(area: mmap.mmap, pages: int) -> "array.array[int]":
    """The physical page of each, all touched before."""
    for page in range(pages):
        area[page * PAGE_BYTES] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    frames = array.array("Q")
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE_BYTES * frames.itemsize)
        frames.frombytes(pagemap.read(pages * frames.itemsize))
    return frames


def _one_of_each_block(frames: "array.array[int]") -> list[int]:
    """The number of one page in each physical block, ascending."""
    if not any(frame & _FRAME for frame in frames):
        raise SystemExit("physical page numbers are hidden: this benchmark wants root")
    first = dict[int, int]()
    for page, frame in enumerate(frames):
        if frame & _PRESENT:
            first.setdefault((frame & _FRAME) // BLOCK_PAGES, page)
    return sorted(first.values())
