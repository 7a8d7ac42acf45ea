"""A standby's copy of one disk: a raw image, written past the QEMU that waits with it.

QEMU has it open but inactive, and neither reads nor writes it before the guest is here.
"""

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vmckpt.memory.ram_file import open_fd
from vmckpt.replicate.disks.known import BLOCK_BYTES, blocks_of, digest_of, zero_digest
from vmckpt.replicate.wire.messages import DiskWrite

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# What a file system without them says.
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


class Image:
    """A raw image that is open for writing. Every method may block: for threads."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd, self.size_bytes = fd, size_bytes

    def reserve(self, writes: Sequence[DiskWrite]) -> None:
        """Have room for all of the writes, so that none of them fails for want of it.

        Changes nothing that could be read. Raises OSError (ENOSPC). File systems that write
        elsewhere at each write (btrfs, ZFS) promise nothing.
        """
        for write in writes:
            if not write.zero_bytes:
                length = memoryview(write.data).nbytes
                if length and not _fallocate(self._fd, _KEEP_SIZE, write.offset_bytes, length):
                    return

    def apply(self, writes: Sequence[DiskWrite]) -> None:
        """Write them, in order; doing it twice is the same. Raises OSError."""
        reserved = _merged(
            (write.offset_bytes, write.offset_bytes + memoryview(write.data).nbytes)
            for write in writes
            if not write.zero_bytes
        )
        for write in writes:
            if write.zero_bytes:
                self._zero(write.offset_bytes, write.offset_bytes + write.zero_bytes, reserved)
            else:
                self._write(write.offset_bytes, memoryview(write.data))

    def flush(self) -> None:
        """All of it survives a power cut when this returns. Raises OSError."""
        os.fdatasync(self._fd)

    def digests(self, first_block: int, count: int) -> bytes:
        """The digests of `count` blocks, or of those up to the end. Holes are not read.

        Raises OSError.
        """
        end = min(first_block + count, blocks_of(self.size_bytes))
        found = []
        data_at = -1
        for block in range(first_block, end):
            at = block * BLOCK_BYTES
            length = min(BLOCK_BYTES, self.size_bytes - at)
            if data_at < at:
                data_at = self._data_from(at)
            if data_at >= at + length:
                found.append(zero_digest(length))
            else:
                found.append(digest_of(os.pread(self._fd, length, at)))
                data_at = -1
        return b"".join(found)

    def _data_from(self, offset_bytes: int) -> int:
        try:
            return os.lseek(self._fd, offset_bytes, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:  # there is none up to the end
                raise
            return self.size_bytes

    def _write(self, offset_bytes: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self._fd, data, offset_bytes)
            data, offset_bytes = data[done:], offset_bytes + done

    def _zero(self, start: int, end: int, reserved: Sequence[tuple[int, int]]) -> None:
        """Zero a span: as a hole, but for what is reserved for writes that come with it."""
        at = start
        for kept_start, kept_end in reserved:
            if kept_end <= at or kept_start >= end:
                continue
            self._punch(at, kept_start)
            at = max(at, kept_start)
            self._write_zeroes(at, min(kept_end, end))
            at = min(kept_end, end)
        self._punch(at, end)

    def _punch(self, start: int, end: int) -> None:
        mode = _KEEP_SIZE | _PUNCH_HOLE
        if start < end and not _fallocate(self._fd, mode, start, end - start):
            self._write_zeroes(start, end)

    def _write_zeroes(self, start: int, end: int) -> None:
        for at in range(start, end, BLOCK_BYTES):
            self._write(at, memoryview(bytes(min(BLOCK_BYTES, end - at))))


@contextmanager
def opened(path: Path) -> Iterator[Image]:
    """The image at `path`, for the block. Raises OSError."""
    with open_fd(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as fd:
        yield Image(fd, os.fstat(fd).st_size)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order that touch nowhere."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> bool:
    """False where the file system cannot. Raises OSError."""
    while _libc.fallocate(fd, mode, offset_bytes, length_bytes):
        error = ctypes.get_errno()
        if error in _CANNOT:
            return False
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))
    return True
