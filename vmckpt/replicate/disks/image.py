"""A standby's copy of one disk, written without the QEMU that waits with it.

QEMU has it open but inactive, and neither reads nor writes it before the guest is here. Of a qcow2
image only clusters are written, never its tables: all clusters are allocated, see `qcow2.py`.
"""

import ctypes
import errno
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu.disks.qcow2 import CLUSTER_BYTES, read_clusters
from vmckpt.replicate.disks.known import BLOCK_BYTES, blocks_of, digest_of, zero_digest
from vmckpt.replicate.wire.messages import DiskWrite

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# Written at once: small enough to show that a slow disk makes progress.
PIECE_BYTES = 1 << 20
# Errors of a file system that does not support holes.
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


class WritableImage:
    """An image that is open for writing. Every method may block: call it in a thread.

    `file_clusters`: the file's cluster for each cluster of the disk; None: the file is the disk.
    `written_bytes` shows other threads the progress; holes are not counted.
    """

    def __init__(self, fd: int, size_bytes: int, file_clusters: Any = None) -> None:
        self._fd, self.size_bytes, self._file_clusters = fd, size_bytes, file_clusters
        self.written_bytes = 0

    def reserve(self, writes: Sequence[DiskWrite]) -> None:
        """Reserve space for all of the writes, so that none of them fails for lack of it.

        Does not change content. Raises OSError (ENOSPC). Copy-on-write file systems (btrfs, ZFS)
        guarantee nothing.
        """
        for write in writes:
            if length := memoryview(write.data).nbytes:  # an empty span cannot be reserved
                end = write.offset_bytes + length
                for start, span in self._in_file(write.offset_bytes, end):
                    if not _fallocate(self._fd, _KEEP_SIZE, start, span):
                        return

    def apply(self, writes: Sequence[DiskWrite]) -> None:
        """Apply the writes in order. Idempotent. Raises OSError."""
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
        """Make all of it durable. Raises OSError."""
        os.fdatasync(self._fd)

    def digests(self, first_block: int, count: int) -> bytes:
        """The digests of `count` blocks, or of those up to the end. Holes are not read.

        Raises OSError.
        """
        found = []
        hole_at = data_at = 0
        for block in range(first_block, min(first_block + count, blocks_of(self.size_bytes))):
            length = min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)
            at = self._file_offset(block * BLOCK_BYTES)
            if not hole_at <= at < at + length <= data_at:
                hole_at, data_at = at, self._data_from(at)
            if at + length <= data_at:
                found.append(zero_digest(length))
            else:
                found.append(digest_of(os.pread(self._fd, length, at)))
        return b"".join(found)

    def _data_from(self, at: int) -> int:
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:  # only a hole up to the end
                raise
            return sys.maxsize

    def _file_offset(self, offset_bytes: int) -> int:
        """The position in the file of the cluster that begins at an offset of the disk."""
        if self._file_clusters is None:
            return offset_bytes
        return int(self._file_clusters[offset_bytes // CLUSTER_BYTES]) * CLUSTER_BYTES

    def _in_file(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The positions and lengths in the file of a span of the disk: piece by piece, in order."""
        if self._file_clusters is None:
            yield start, end - start
            return
        while start < end:
            first = start - start % CLUSTER_BYTES
            file_offset, stop = self._file_offset(first), first + CLUSTER_BYTES
            while stop < end and self._file_offset(stop) == file_offset + stop - first:
                stop += CLUSTER_BYTES
            stop = min(stop, end)
            yield file_offset + start - first, stop - start
            start = stop

    def _write(self, offset_bytes: int, data: memoryview) -> None:
        for at, length in self._in_file(offset_bytes, offset_bytes + data.nbytes):
            rest, data = data[:length], data[length:]
            file_offset = at
            while rest:
                done = os.pwrite(self._fd, rest[:PIECE_BYTES], file_offset)
                rest, file_offset = rest[done:], file_offset + done
                self.written_bytes += done

    def _zero(self, start: int, end: int, reserved: Sequence[tuple[int, int]]) -> None:
        """Zero a span: as a hole, except for what is reserved for writes of the same epoch."""
        at = start
        # An epoch of a guest that writes many small pieces has thousands of spans to zero and keep.
        first = bisect_right(reserved, start, key=itemgetter(1))
        behind = bisect_left(reserved, end, key=itemgetter(0))
        for kept_start, kept_end in reserved[first:behind]:
            self._punch(at, kept_start)
            at = max(at, kept_start)
            self._write_zeroes(at, min(kept_end, end))
            at = min(kept_end, end)
        self._punch(at, end)

    def _punch(self, start: int, end: int) -> None:
        for at, length in self._in_file(start, end) if start < end else ():
            if not _fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, at, length):
                self._write_zeroes(start, end)
                return

    def _write_zeroes(self, start: int, end: int) -> None:
        for at in range(start, end, BLOCK_BYTES):
            self._write(at, memoryview(bytes(min(BLOCK_BYTES, end - at))))


@contextmanager
def opened(path: Path, image_format: str) -> Iterator[WritableImage]:
    """The image at `path`, for the block. Raises OSError; ValueError if not a copy, see `made`."""
    with open_fd(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as fd:
        if image_format == "raw":
            yield WritableImage(fd, os.fstat(fd).st_size)
            return
        found = read_clusters(fd)
        if not found.are_all_there:
            raise ValueError(f"{path} is not a copy of a disk")
        yield WritableImage(fd, found.size_bytes, found.file_clusters)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, merged where they touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> bool:
    """False if the file system does not support it. Raises OSError."""
    while _libc.fallocate(fd, mode, offset_bytes, length_bytes):
        error = ctypes.get_errno()
        if error in _CANNOT:
            return False
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))
    return True
