"""Finds written pages of its guest's RAM file by the soft-dirty bits of kernels older than 6.7.

Writing "4" to /proc/PID/clear_refs clears the bit of every page of the process; the first write
to one after that costs a fault and sets it again: bit 55 of its entry in /proc/PID/pagemap. See
the kernel's admin-guide/mm/soft-dirty.rst. All bits are cleared at once, and not at the instant at
which they are read: the guest is paused for both. Reading takes time in proportion to the memory,
1 ms for 256 MiB. Not detected: what `dirty_pages.py` does not detect either.

A page that the kernel removes from the page table loses its bit. Pages of a tmpfs are removed to
be swapped out, or to become part of a huge page: if that is possible, `is_sound` returns false.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.memory.dirty_pages import Mapping, find_mappings
from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, Span, mapped, open_fd
from vmckpt.memory.runs import runs
from vmckpt.procfs import read_lines

_ENTRY_BYTES = 8
_MARK = np.uint64(1 << 55)
_CLEAR_MARKS = b"4"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class SoftDirty:
    """The pages with the bit set, while `soft_dirty` is open."""

    name = "soft-dirty bits"
    needs_stop = True
    others = None

    def __init__(
        self, pagemap: int, clear_refs: int, mappings: tuple[Mapping, ...], ram: RamFile
    ) -> None:
        self._pagemap, self._clear_refs = pagemap, clear_refs
        self._mappings, self._ram = mappings, ram
        self.extents, self.copy = ram.extents, ram.copy
        self._forget()

    def count(self) -> int:
        """How many were written since they were last taken. Changes nothing."""
        return int(np.count_nonzero(self._written()))

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """The written pages as spans of the file, in bytes; clears all bits.

        Ignores `spared`: the kernel clears the bits of all pages or of none.
        """
        written = self._written()
        self._forget()
        return list(runs(written))

    def _forget(self) -> None:
        os.write(self._clear_refs, _CLEAR_MARKS)

    def _written(self) -> NDArray[np.bool_]:
        """A boolean for each page of the file."""
        written = np.zeros(self._ram.size_bytes // PAGE_BYTES, np.bool_)
        # Pages without memory were not written.
        for start, end in self._ram.extents():
            for mapping in self._mappings:
                shift = mapping.offset - mapping.start
                first, last = max(start, mapping.offset), min(end, mapping.end + shift)
                if first < last:
                    marked = self._entries(first - shift, last - shift) & _MARK != 0
                    written[first // PAGE_BYTES : last // PAGE_BYTES] |= marked
        return written

    def _entries(self, start: int, end: int) -> NDArray[np.uint64]:
        """The page table's entries for these addresses."""
        at, size = start // PAGE_BYTES * _ENTRY_BYTES, (end - start) // PAGE_BYTES * _ENTRY_BYTES
        read = b""
        while len(read) < size:
            more = os.pread(self._pagemap, size - len(read), at + len(read))
            if not more:
                raise ProcessLookupError(errno.ESRCH, "the process no longer has such memory")
            read += more
        return np.frombuffer(read, np.uint64)


@contextmanager
def soft_dirty(pid: int, ram_file: Path, ram_bytes: int | None = None) -> Iterator[SoftDirty]:
    """Track the pages of `ram_file` that process `pid` writes, for the block.

    Initially every page counts as not written. Nothing remains in the process. Raises
    OSError: EBUSY (another tracks it: a process has one set of bits), EACCES or EPERM (not the
    same user), ENOENT (gone, or the file is not mapped there).
    """
    mappings = find_mappings(pid, ram_file)
    if not mappings:
        raise FileNotFoundError(errno.ENOENT, f"process {pid} does not map {ram_file}")
    with (
        _alone(ram_file),
        open_fd(os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)) as pagemap,
        open_fd(os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)) as clear_refs,
        mapped(ram_file, ram_bytes) as ram,
    ):
        yield SoftDirty(pagemap, clear_refs, mappings, ram)


@contextmanager
def _alone(ram_file: Path) -> Iterator[None]:
    """Exclude other trackers on this host that would clear the bits of this file's process."""
    with open_fd(os.open(ram_file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise OSError(errno.EBUSY, f"{ram_file} is tracked already") from exc
        yield


def is_sound(ram_file: Path) -> bool:
    """Whether no bit of its pages can get lost: a tmpfs without huge pages. Raises OSError."""
    kind, options = _file_system(ram_file)
    if kind != "tmpfs" or any(
        option.startswith("huge=") and option != "huge=never" for option in options
    ):
        return False
    return not (_HUGE_PAGES.exists() and "[force]" in _HUGE_PAGES.read_text())


def _file_system(path: Path) -> tuple[str, list[str]]:
    """The type and options of its file system."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in read_lines(Path("/proc/self/mountinfo")):
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            kind, _, options = source.split(" ", 2)
            return kind, options.split(",")
    raise FileNotFoundError(errno.ENOENT, f"no mounted file system has {path}")
