"""A guest's RAM file with holes for pages that are still to come: userfaultfd, missing mode.

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
import select
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from vmckpt.memory.dirty_pages import Mapping, find_mappings
from vmckpt.memory.process_call import call_and_keep, descriptor_of
from vmckpt.memory.ram_file import PAGE_BYTES, open_fd

_NR_USERFAULTFD = 323
_API, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_COPY, _ZEROPAGE, _WAKE = 0xC028AA03, 0xC020AA04, 0x8010AA02
_MISSING_SHMEM, _MODE_MISSING = 1 << 5, 1
_EVENT_PAGEFAULT, _MESSAGE_BYTES = 0x12, 32
# The maximum per fill.
MOST_BYTES = 1 << 20
# How often in a row the kernel may report that one page cannot be put there just now.
_TRIES = 10_000


class MissingPages:
    """The pages of a RAM file that a process finds missing; offsets are the file's."""

    def __init__(
        self, pid: int, uffd: int, ram_file: Path, mappings: Sequence[Mapping], number: int
    ) -> None:
        self._pid, self._uffd, self._mappings = pid, uffd, tuple(mappings)
        self._file = os.open(ram_file, os.O_RDONLY | os.O_CLOEXEC)
        # The descriptor's number in the process that keeps it.
        self.number = number
        # The kernel copies from here: memory that never moves.
        self._staged = mmap.mmap(-1, MOST_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._staged))
        self._poll = select.poll()
        self._poll.register(uffd, select.POLLIN)
        self._poll.register(os.pidfd_open(pid), select.POLLIN)

    @classmethod
    def begin(cls, pid: int, ram_file: Path) -> "MissingPages":
        """From here on process `pid` waits at each page of `ram_file` that has no memory.

        The process must meet the conditions of `call_and_keep`. Raises OSError.
        """
        mappings = find_mappings(pid, ram_file)
        if not mappings:
            raise FileNotFoundError(2, f"process {pid} does not map {ram_file}")
        number = call_and_keep(pid, _NR_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
        uffd = descriptor_of(pid, number)
        fcntl.ioctl(uffd, _API, bytearray(struct.pack("QQQ", 0xAA, _MISSING_SHMEM, 0)))
        for start, end, _ in mappings:
            argument = struct.pack("QQQQ", start, end - start, _MODE_MISSING, 0)
            fcntl.ioctl(uffd, _REGISTER, bytearray(argument))
        return cls(pid, uffd, ram_file, mappings, number)

    @classmethod
    def again(cls, pid: int, ram_file: Path, number: int) -> "MissingPages":
        """Continue after the death of another pager, with the descriptor that `pid` has kept."""
        mappings = find_mappings(pid, ram_file)
        return cls(pid, descriptor_of(pid, number), ram_file, mappings, number)

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
        try:
            pagemap = os.open(f"/proc/{self._pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise ProcessLookupError(errno.ESRCH, "the process has ended") from exc
        with open_fd(pagemap) as fd:
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
                    if exc.errno != errno.EEXIST and not self._is_there(at):
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

    def _is_there(self, offset: int) -> bool:
        """Whether the file has memory for a page."""
        try:
            return os.lseek(self._file, offset, os.SEEK_DATA) == offset
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # only a hole up to the end
                return False
            raise

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
