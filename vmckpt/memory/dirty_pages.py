"""Tracks from outside, exactly, which pages of its guest's RAM file a QEMU writes (Linux >= 6.7).

The file's mappings in QEMU are registered with a userfaultfd in asynchronous write-protect mode:
the first write to a page costs the guest one fault, which the kernel resolves itself, and
ioctl(PAGEMAP_SCAN) reports which pages had one. See the kernel's admin-guide/mm/userfaultfd.rst and
pagemap.rst. Not detected: other processes' writes to the same file (vhost-user), and devices'
writes into pages that the kernel pinned before they were protected.
"""

import array
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from operator import le
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vmckpt.memory.borrowed import descriptor_from
from vmckpt.memory.ram_file import PAGE_BYTES, Span, open_fd, require_size
from vmckpt.procfs import read_lines

_NR_USERFAULTFD = 323
_USER_MODE_ONLY = 1
_API, _REGISTER, _WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
# PAGEFAULT_FLAG_WP, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED, WP_ASYNC.
_FEATURES = 1 << 0 | 1 << 12 | 1 << 13 | 1 << 15
_MODE_WP = 2
_PAGEMAP_SCAN, _WP_MATCHING, _IS_WRITTEN, _IS_PRESENT, _IS_SWAPPED = 0xC0606610, 1, 2, 8, 16
_SCAN_ARG = struct.Struct("12Q")
_RANGES = 1 << 15  # three words each: start, end, categories
# The number of calls with which a narrow scan protects what was written.
PARTS = 256


class Mapping(NamedTuple):
    """A piece of the RAM file in a process: addresses, and the first one's offset in the file."""

    start: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class PageSet:
    """Pages of the RAM file, one bit each, by number in the file."""

    bits: int

    def __or__(self, other: "PageSet") -> "PageSet":
        return PageSet(self.bits | other.bits)

    @property
    def count(self) -> int:
        """How many pages."""
        return self.bits.bit_count()

    def numbers(self) -> Iterator[int]:
        """The pages' numbers, ascending."""
        for at, byte in enumerate(self.bits.to_bytes((self.bits.bit_length() + 7) // 8, "little")):
            if byte:
                yield from (8 * at + bit for bit in range(8) if byte >> bit & 1)


class DirtyPages:
    """The pages written since the last `take`, while `tracked_at` is open.

    `is_narrow`: for a guest that runs by KVM. A scan that protects makes the kernel remove the
    *whole requested range* from KVM's page tables (pagemap_scan's mmu_notifier range), written or
    not; so written pages are found first, and only their ranges requested. Without KVM one walk is
    cheaper.
    """

    def __init__(
        self, pagemap_fd: int, mappings: tuple[Mapping, ...], *, is_narrow: bool = False
    ) -> None:
        self._fd, self._mappings, self._is_narrow = pagemap_fd, mappings, is_narrow
        # How much memory was requested to be protected, page by page or not.
        self.scanned_bytes = 0
        self._words = array.array("Q", bytes(24 * _RANGES))
        self._file_pages = max(m.offset + m.end - m.start for m in mappings) // PAGE_BYTES

    @property
    def set_bytes(self) -> int:
        """How much memory a set of pages takes."""
        return (self._file_pages + 7) // 8

    def count(self) -> int:
        """How many pages were written since the last `take`. Costs the guest nothing."""
        total = 0
        for mapping in self._mappings:
            for found in self._scan(mapping, 0):
                total += sum(found[1::3]) - sum(found[0::3])
        return total // PAGE_BYTES

    def take(self) -> PageSet:
        """The pages written since the last `take`. From here on a first write is detected again."""
        bitmap = bytearray(self.set_bytes)
        for start, end in self.take_spans():
            _mark(bitmap, start // PAGE_BYTES, end // PAGE_BYTES)
        return PageSet(int.from_bytes(bitmap, "little"))

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """Like `take`, as spans of the file, in bytes; cheaper for many pages.

        If a file is mapped twice a span may come twice. What is `spared`, ascending, counts as
        written the next time too, whether it is or not, and costs no fault.
        """
        spans: list[Span] = []
        for mapping in self._mappings:
            shift = mapping.offset - mapping.start
            for piece, flags in _pieces(mapping, spared):
                for part in self._parts(piece, flags):
                    for found in self._scan(part, flags):
                        ends = zip(found[0::3], found[1::3], strict=True)
                        spans += [(start + shift, end + shift) for start, end in ends]
        return spans

    def _parts(self, piece: Mapping, flags: int) -> Iterable[Mapping]:
        """What of a piece is scanned with these flags, ascending: all of it, or (narrow) what was
        written, in a limited number of parts.
        """
        parts = [piece]
        if flags & _WP_MATCHING and self._is_narrow:
            written = [
                span
                for found in self._scan(piece, 0)
                for span in zip(found[0::3], found[1::3], strict=True)
            ]
            shift = piece.offset - piece.start
            parts = [Mapping(start, end, start + shift) for start, end in _joined(written)]
        if flags & _WP_MATCHING:
            self.scanned_bytes += sum(part.end - part.start for part in parts)
        return parts

    def _scan(self, mapping: Mapping, flags: int) -> Iterator["array.array[int]"]:
        return _scanned(self._fd, self._words, mapping, flags, _IS_WRITTEN)


def present(pagemap_fd: int, mapping: Mapping) -> Iterator[Span]:
    """The spans of addresses that have memory of their own or of a file now. Raises OSError.

    Not those that are swapped out, or are being moved in memory at this moment (compaction).
    """
    yield from _with_any(pagemap_fd, mapping, _IS_PRESENT)


def populated(pagemap_fd: int, mapping: Mapping) -> Iterator[Span]:
    """The spans of addresses that have memory, wherever it is. Raises OSError.

    In protected memory, pages that were never accessed count too.
    """
    yield from _with_any(pagemap_fd, mapping, _IS_PRESENT | _IS_SWAPPED)


def _with_any(pagemap_fd: int, mapping: Mapping, categories: int) -> Iterator[Span]:
    words = array.array("Q", bytes(24 * _RANGES))
    for found in _scanned(pagemap_fd, words, mapping, 0, categories):
        yield from zip(found[0::3], found[1::3], strict=True)


def _scanned(
    pagemap_fd: int, words: "array.array[int]", mapping: Mapping, flags: int, categories: int
) -> Iterator["array.array[int]"]:
    """Ranges of pages of any of the categories, three words each, ascending.

    If there are more than 512 of them and nothing is protected again, the kernel (6.18) walks
    some pages again and reports them twice.
    """
    # Where written pages alone are asked for, pages without memory that are not protected count.
    every, any_of = (categories, 0) if categories == _IS_WRITTEN else (0, categories)
    at = reported = mapping.start
    while at < mapping.end:
        address, _ = words.buffer_info()
        argument = bytearray(
            _SCAN_ARG.pack(
                _SCAN_ARG.size, flags, at, mapping.end, 0, address, _RANGES, 0,
                0, every, any_of, every | any_of,
            )
        )  # fmt: skip
        count = fcntl.ioctl(pagemap_fd, _PAGEMAP_SCAN, argument)
        found = words[: 3 * count]
        yield found if flags & _WP_MATCHING else _once(found, reported)
        reported = max((reported, *found[-2:-1]))
        walked = _SCAN_ARG.unpack(argument)[4]
        if walked <= at:
            return
        at = walked


def _once(found: "array.array[int]", reported: int) -> "array.array[int]":
    """The ranges without what is below `reported` or in earlier ones."""
    if all(map(le, chain((reported,), found[1::3]), found[0::3])):
        return found
    kept = array.array("Q")
    for start, end, categories in zip(found[0::3], found[1::3], found[2::3], strict=True):
        if end > reported:
            kept.extend((max(start, reported), end, categories))
            reported = end
    return kept


def _joined(written: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans, ascending; joined across their smallest gaps until there are at most PARTS."""
    if len(written) <= PARTS:
        return written
    spans = np.array(written, dtype=np.int64)
    gaps = spans[1:, 0] - spans[:-1, 1]
    cuts = np.sort(np.argpartition(gaps, -(PARTS - 1))[-(PARTS - 1) :])
    starts = np.concatenate([spans[:1, 0], spans[cuts + 1, 0]])
    ends = np.concatenate([spans[cuts, 1], spans[-1:, 1]])
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def uses_kvm(pid: int) -> bool:
    """Whether the process runs a guest by KVM. Raises OSError (gone, or not ours)."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if str(Path(f"/proc/{pid}/fd/{fd}").readlink()) == "anon_inode:kvm-vm":
                return True
    return False


def _pieces(mapping: Mapping, spared: Sequence[Span]) -> Iterator[tuple[Mapping, int]]:
    """A mapping in pieces, and how to scan each: protect again, or spare."""
    shift, at = mapping.offset - mapping.start, mapping.start
    for first, end in spared:
        start, stop = max(at, first - shift), min(mapping.end, end - shift)
        if start < stop:
            if at < start:
                yield Mapping(at, start, at + shift), _WP_MATCHING
            yield Mapping(start, stop, start + shift), 0
            at = stop
    if at < mapping.end:
        yield Mapping(at, mapping.end, at + shift), _WP_MATCHING


def _mark(bitmap: bytearray, first: int, end: int) -> None:
    """Set the bits from `first` up to `end`."""
    while first < end and (first & 7 or end - first < 8):
        bitmap[first >> 3] |= 1 << (first & 7)
        first += 1
    whole = (end - first) >> 3
    bitmap[first >> 3 : (first >> 3) + whole] = b"\xff" * whole
    for page in range(first + 8 * whole, end):
        bitmap[page >> 3] |= 1 << (page & 7)


def mappings_of(pid: int, ram_file: Path, ram_bytes: int | None) -> tuple[Mapping, ...]:
    """Where a process maps its RAM file. Raises OSError: ENOENT, ESRCH, EFBIG."""
    mappings = find_mappings(pid, ram_file)
    if not mappings:
        raise FileNotFoundError(2, f"process {pid} does not map {ram_file}")
    require_size(max(one.offset + one.end - one.start for one in mappings), ram_bytes)
    return mappings


@contextmanager
def tracked_at(pid: int, mappings: tuple[Mapping, ...]) -> Iterator[DirtyPages]:
    """Track the pages that process `pid` writes in some of its memory, for the block.

    Initially every page counts as not written. Nothing remains in the process, however
    this one ends. Raises OSError: EPERM (not the same user, or ptrace is restricted), EBUSY
    (another tracks it, or it cannot be stopped), ESRCH (gone), EINVAL or ENOTTY (the kernel is
    older than 6.7), and what `descriptor_from` raises.
    """
    # It applies to that process's memory wherever it is. A copy left there would outlive us, and
    # the next tracker would find the memory taken.
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    with open_fd(descriptor_from(pid, _NR_USERFAULTFD, flags)) as uffd:
        fcntl.ioctl(uffd, _API, bytearray(struct.pack("QQQ", 0xAA, _FEATURES, 0)))
        for start, end, _ in mappings:
            span = struct.pack("QQ", start, end - start)
            fcntl.ioctl(uffd, _REGISTER, bytearray(span + struct.pack("QQ", _MODE_WP, 0)))
            # Include pages that the process has not accessed yet, or reading them would look like
            # writing.
            fcntl.ioctl(uffd, _WRITEPROTECT, bytearray(span + struct.pack("Q", 1)))
        with open_fd(os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)) as pagemap:
            yield DirtyPages(pagemap, mappings, is_narrow=uses_kvm(pid))


def find_mappings(pid: int, ram_file: Path) -> tuple[Mapping, ...]:
    """Where a process maps the file. Raises OSError (the process is gone, or not ours)."""
    found = []
    for line in read_lines(Path(f"/proc/{pid}/maps")):
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == str(ram_file):
            start, end = (int(part, 16) for part in parts[0].split("-"))
            found.append(Mapping(start, end, int(parts[2], 16)))
    return tuple(found)
