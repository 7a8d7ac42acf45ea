"""A guest's RAM with holes for pages that are still to come: userfaultfd, missing mode.

It is a file that QEMU maps, or private memory of QEMU (a libvirt domain's).

QEMU keeps a copy of the userfaultfd: if the last one were closed, the kernel would forget that
pages are missing and give the guest zeroes. So a guest whose pager has died waits at the next
missing page, unharmed, until another pager takes the descriptor out of QEMU again. See the kernel's
admin-guide/mm/userfaultfd.rst.

System calls that write guest memory (a disk read) fault too: the userfaultfd must not be limited
to user mode, so QEMU must run as root, or the kernel must allow it
(vm.unprivileged_userfaultfd).

If all pages of a 2 MiB range are freed (a guest reports free ones) just as one is put there, the
kernel returns EAGAIN (observed), or, according to its source, EFAULT: a retry succeeds. It also
returns EFAULT if a huge page has arrived, and then the page is there. See mfill_atomic() in
mm/userfaultfd.c.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import select
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vmckpt.memory.dirty_pages import Mapping, find_mappings
from vmckpt.memory.private.process_memory import addresses_of, laid_out
from vmckpt.memory.process_call import NR_MADVISE, call_there, descriptor_of
from vmckpt.memory.ram_file import PAGE_BYTES, Span, extents, open_fd

_NR_USERFAULTFD = 323
_API, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_COPY, _ZEROPAGE, _WAKE = 0xC028AA03, 0xC020AA04, 0x8010AA02
_MISSING_SHMEM, _MODE_MISSING = 1 << 5, 1
_EVENT_PAGEFAULT, _MESSAGE_BYTES = 0x12, 32
# The maximum per fill.
MOST_BYTES = 1 << 20
_MADV_DONTNEED = 4
# In smaps (proc(5)): the addresses of a mapping, and its flag for a userfaultfd in missing mode.
_SPAN, _WAITS = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) "), b"um"
# Of an entry in pagemap: in memory, or swapped out.
_PRESENT = 3 << 62
# How often in a row the kernel may report that one page cannot be put there just now.
_TRIES = 10_000


@dataclass(frozen=True, slots=True)
class SharedRam:
    """A file that a process maps."""

    path: Path

    def mappings(self, pid: int) -> Sequence[Mapping]:
        """Where the process has it. Raises OSError."""
        mappings = find_mappings(pid, self.path)
        if not mappings:
            raise FileNotFoundError(2, f"process {pid} does not map {self.path}")
        return mappings

    def present(self, _pid: int) -> "np.ndarray":
        """For each page, whether it has memory. Raises OSError."""
        size_bytes = self.path.stat().st_size
        found = np.zeros(size_bytes // PAGE_BYTES, bool)
        with open_fd(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            for start, end in extents(fd, size_bytes):
                found[start // PAGE_BYTES : end // PAGE_BYTES] = True
        return found

    def is_present(self, _pid: int, offset: int) -> bool:
        """Whether a page has memory. Raises OSError."""
        with open_fd(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            try:
                return os.lseek(fd, offset, os.SEEK_DATA) == offset
            except OSError as exc:
                if exc.errno == errno.ENXIO:  # only a hole up to the end
                    return False
                raise


@dataclass(frozen=True, slots=True)
class AnonymousRam:
    """Private memory of a process: the addresses of its blocks, which count as one image."""

    blocks: tuple[Span, ...]

    def mappings(self, _pid: int) -> Sequence[Mapping]:
        """Where the process has it."""
        return laid_out(self.blocks)

    def present(self, pid: int) -> "np.ndarray":
        """For each page, whether the process has it. Raises OSError."""
        found = list[np.ndarray]()
        with _pagemap(pid) as fd:
            for start, end in self.blocks:
                count = (end - start) // PAGE_BYTES
                entries = os.pread(fd, 8 * count, start // PAGE_BYTES * 8)
                if len(entries) != 8 * count:
                    raise ProcessLookupError(errno.ESRCH, "the process has ended")
                found.append(np.frombuffer(entries, np.uint64) & np.uint64(_PRESENT) != 0)
        return np.concatenate(found)

    def is_present(self, pid: int, offset: int) -> bool:
        """Whether the process has a page. Raises OSError."""
        page = addresses_of(self.mappings(pid), [(offset, offset + PAGE_BYTES)])
        return bool(AnonymousRam(tuple(page)).present(pid).all())

    def is_guarded(self, pid: int) -> bool:
        """Whether the process waits at pages of it that are missing; a process that has ended does
        not.
        """
        try:
            lines = Path(f"/proc/{pid}/smaps").read_bytes().splitlines()
        except FileNotFoundError:
            return False
        is_here = False
        for line in lines:
            if (found := _SPAN.match(line)) is not None:
                start, end = (int(part, 16) for part in found.groups())
                is_here = any(start <= first < end for first, _ in self.blocks)
            elif is_here and line.startswith(b"VmFlags:") and _WAITS in line.split():
                return True
        return False

    def drop(self, pid: int) -> None:
        """Make all of it missing, whatever was there. Raises OSError."""
        for start, end in self.blocks:
            call_there(pid, NR_MADVISE, start, end - start, _MADV_DONTNEED)


class MissingPages:
    """The pages of a guest's RAM that a process finds missing; offsets are those in the RAM."""

    def __init__(
        self,
        pid: int,
        uffd: int,
        ram: SharedRam | AnonymousRam,
        mappings: Sequence[Mapping],
        number: int,
    ) -> None:
        self._pid, self._uffd, self._mappings = pid, uffd, tuple(mappings)
        self._ram = ram
        # The descriptor's number in the process that keeps it.
        self.number = number
        # The kernel copies from here: memory that never moves.
        self._staged = mmap.mmap(-1, MOST_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._staged))
        self._poll = select.poll()
        self._poll.register(uffd, select.POLLIN)
        self._poll.register(os.pidfd_open(pid), select.POLLIN)

    @classmethod
    def begin(cls, pid: int, ram: SharedRam | AnonymousRam) -> "MissingPages":
        """From here on process `pid` waits at each page that has no memory; private RAM has none.

        The process must meet the conditions of `call_there`. Raises OSError.
        """
        mappings = ram.mappings(pid)
        number = call_there(pid, _NR_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
        uffd = descriptor_of(pid, number)
        fcntl.ioctl(uffd, _API, bytearray(struct.pack("QQQ", 0xAA, _MISSING_SHMEM, 0)))
        for start, end, _ in mappings:
            argument = struct.pack("QQQQ", start, end - start, _MODE_MISSING, 0)
            fcntl.ioctl(uffd, _REGISTER, bytearray(argument))
        if isinstance(ram, AnonymousRam):
            ram.drop(pid)
        return cls(pid, uffd, ram, mappings, number)

    @classmethod
    def again(cls, pid: int, ram: SharedRam | AnonymousRam, number: int) -> "MissingPages":
        """Continue after the death of another pager, with the descriptor that `pid` has kept."""
        return cls(pid, descriptor_of(pid, number), ram, ram.mappings(pid), number)

    def faults(self, timeout_ms: int) -> list[int]:
        """The pages that threads wait for, once there are any. OSError: the process ended."""
        events = self._poll.poll(timeout_ms)
        if not events:
            return []
        if any(fd != self._uffd or output & select.POLLERR for fd, output in events):
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        try:
            output = os.read(self._uffd, _MESSAGE_BYTES * 64)
        except BlockingIOError:
            return []
        return [
            self._offset(struct.unpack_from("QQ", output, at + 8)[1])
            for at in range(0, len(output), _MESSAGE_BYTES)
            if output[at] == _EVENT_PAGEFAULT
        ]

    def accessed(self, offsets: Sequence[int]) -> list[bool]:
        """For pages that the file had before: whether the process has accessed them since.

        The kernel maps some neighbours of a page that is read: these count too. See its
        admin-guide/mm/pagemap.rst. Raises ProcessLookupError: it has ended.
        """
        with _pagemap(self._pid) as fd:
            return [self._is_mapped(fd, offset) for offset in offsets]

    def _is_mapped(self, pagemap: int, offset: int) -> bool:
        for mapping, first, _ in self._within(offset, offset + PAGE_BYTES):
            address = mapping.start + first - mapping.offset
            entry = os.pread(pagemap, 8, address // PAGE_BYTES * 8)
            if not entry:
                raise ProcessLookupError(errno.ESRCH, "the process has ended")
            if int.from_bytes(entry, "little") >> 63:
                return True
        return False

    def fill(self, offset: int, data: bytes | memoryview) -> None:
        """Fill whole pages from `offset` on; pages that exist are kept.

        Threads that wait for them continue. Raises OSError: ENOMEM, ESRCH.
        """
        view = memoryview(data)
        for at in range(0, len(view), MOST_BYTES):
            piece = view[at : at + MOST_BYTES]
            self._staged[: len(piece)] = piece
            source = self._address - offset - at

            def copy(shift: int, first: int, end: int, source: int = source) -> int:
                return self._ioctl(_COPY, shift + first, source + first, end - first, 0)

            self._put(copy, offset + at, offset + at + len(piece))

    def zero(self, offset: int) -> None:
        """One page of zeroes, unless the page exists. Raises as `fill` does."""

        def put(shift: int, first: int, end: int) -> int:
            return self._ioctl(_ZEROPAGE, shift + first, end - first, 0)

        self._put(put, offset, offset + PAGE_BYTES)

    def _put(self, put: Callable[[int, int, int], int], start: int, end: int) -> None:
        """Make the kernel put pages there; `put` returns how many bytes it has done."""
        for mapping, first, last in self._within(start, end):
            shift, at, tries = mapping.start - mapping.offset, first, 0
            while at < last:
                try:
                    done = put(shift, at, last)
                except OSError as exc:
                    if exc.errno != errno.EEXIST and not self._ram.is_present(self._pid, at):
                        tries += 1
                        if exc.errno not in (errno.EAGAIN, errno.EFAULT) or tries > _TRIES:
                            raise
                        continue
                    self._wake(shift + at)
                    done = PAGE_BYTES
                at, tries = at + done, 0

    def _ioctl(self, request: int, *words: int) -> int:
        """How many bytes a request has done. Raises OSError if it is none."""
        argument = bytearray(struct.pack(f"{len(words)}Qq", *words, 0))
        try:
            fcntl.ioctl(self._uffd, request, argument)
        except BlockingIOError:  # done in part
            done = int(struct.unpack_from("q", argument, 8 * len(words))[0])
            if done <= 0:
                raise
            return done
        return int(struct.unpack_from("q", argument, 8 * len(words))[0])

    def end(self) -> None:
        """Fill missing pages with zeroes and wake all waiters. Raises OSError."""
        for start, end, _ in self._mappings:
            fcntl.ioctl(self._uffd, _UNREGISTER, bytearray(struct.pack("QQ", start, end - start)))

    def _wake(self, address: int) -> None:
        fcntl.ioctl(self._uffd, _WAKE, bytearray(struct.pack("QQ", address, PAGE_BYTES)))

    def _offset(self, address: int) -> int:
        for start, end, offset in self._mappings:
            if start <= address < end:
                return (address - start + offset) & -PAGE_BYTES
        raise ValueError(f"a fault at {address:#x}, outside the guest's RAM")

    def _within(self, first: int, end: int) -> list[tuple[Mapping, int, int]]:
        found = []
        for mapping in self._mappings:
            last = mapping.offset + mapping.end - mapping.start
            a, b = max(first, mapping.offset), min(end, last)
            if a < b:
                found.append((mapping, a, b))
        return found


@contextmanager
def _pagemap(pid: int) -> Iterator[int]:
    """The kernel's table of a process's pages. Raises ProcessLookupError: it has ended."""
    try:
        pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise ProcessLookupError(errno.ESRCH, "the process has ended") from exc
    with open_fd(pagemap) as fd:
        yield fd
