"""The file that is a guest's RAM: its content, copied out of it and into another one.

A file's holes are zero pages, and reading them through a mapping would allocate them: so only
what has memory is copied. Writes are system calls: in a mapping a full file system is a SIGBUS.
"""

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import StorageError

PAGE_BYTES = 4096
# The largest size of huge pages: a file in them consists of whole ones.
_HUGE_BYTES = 1 << 30
# A byte range of a file, end exclusive, in whole pages.
Span = tuple[int, int]


class RamFile:
    """A mapped RAM file, shared with all that map it.

    `size_bytes`: the guest's memory, of which a file in huge pages may have a little more.
    """

    def __init__(self, fd: int, ram_bytes: int | None = None) -> None:
        self._fd = fd
        file_bytes = os.fstat(fd).st_size
        require_size(file_bytes, ram_bytes)
        self.size_bytes = min(file_bytes, ram_bytes or file_bytes)
        self._view = memoryview(mmap.mmap(fd, file_bytes))[: self.size_bytes]

    @property
    def view(self) -> memoryview:
        """All of it, without a copy. Release it before the file is closed."""
        return self._view

    def reserve(self) -> None:
        """Zero all of it, and allocate all of it from now on. Raises OSError (ENOSPC)."""
        zeroes = bytes(1 << 20)
        for start, end in self.extents():
            for at in range(start, end, len(zeroes)):
                self._put(zeroes[: end - at], at)
        os.posix_fallocate(self._fd, 0, self.size_bytes)

    def extents(self) -> list[Span]:
        """The spans that have memory; all others hold zeroes."""
        return list(extents(self._fd, self.size_bytes))

    def copy(self, spans: Iterable[Span]) -> bytes:
        """The content of the spans, in sequence. They must have memory: no holes."""
        view = self._view
        return b"".join([view[start:end] for start, end in spans])

    def write(self, spans: Sequence[Span], data: bytes | memoryview) -> None:
        """The inverse of `copy`. Raises OSError (ENOSPC: no memory is left), ValueError.

        ValueError: spans and data do not match each other, or the file; nothing was written.
        """
        length = sum(end - start for start, end in spans)
        if length != len(data) or any(not 0 <= a <= b <= self.size_bytes for a, b in spans):
            raise ValueError(f"{len(data)} bytes for spans of {length} in {self.size_bytes}")
        source, at = memoryview(data), 0
        for start, end in spans:
            offset = start
            while offset < end:
                written = self._put(source[at : at + end - offset], offset)
                offset, at = offset + written, at + written

    def _put(self, data: bytes | memoryview, at: int) -> int:
        try:
            return os.pwrite(self._fd, data, at)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
        # A file in huge pages cannot be written, and its mapping has reserved all of its memory.
        self._view[at : at + len(data)] = data
        return len(data)

    def close(self) -> None:
        """Unmap it."""
        mapped = self._view.obj
        self._view.release()
        if isinstance(mapped, mmap.mmap):
            mapped.close()


class ReadRam:
    """A RAM file that is only read, by system calls.

    Through a mapping reading a hole would allocate it, and a file cut short would be a SIGBUS.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self.size_bytes = fd, os.fstat(fd).st_size // PAGE_BYTES * PAGE_BYTES

    def extents(self) -> list[Span]:
        """The spans that have memory; all others hold zeroes."""
        return list(extents(self._fd, self.size_bytes))

    def copy(self, spans: Sequence[Span]) -> bytes:
        """The content of the spans, in sequence. Raises OSError."""
        return b"".join([os.pread(self._fd, end - start, start) for start, end in spans])


@contextmanager
def read_only(path: Path, ram_bytes: int | None = None) -> Iterator[ReadRam]:
    """The RAM file at `path`, to be read for the block. Raises OSError."""
    with open_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        require_size(os.fstat(fd).st_size, ram_bytes)
        yield ReadRam(fd)


def unnamed(directory: Path) -> int:
    """A new file in `directory` without a name: it disappears with its last descriptor.

    Raises StorageError if the file system does not support that.
    """
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StorageError(
            f"no file without a name can be made in {directory}",
            why=exc.strerror or str(exc),
            remedy="name a directory on tmpfs, ext4, xfs or btrfs as the VM's ram_dir",
        ) from exc


def give_name(fd: int, path: Path) -> None:
    """Add a name for an open file. Raises OSError."""
    with open_fd(os.open("/proc/self/fd", os.O_DIRECTORY | os.O_CLOEXEC)) as all_open:
        # With a directory descriptor linkat(2) follows the link; otherwise it does not.
        os.link(str(fd), path, src_dir_fd=all_open)


def require_size(size_bytes: int, ram_bytes: int | None) -> None:
    """Require that the file is no larger than the guest's memory; None: that is not known.

    A compromised QEMU can extend its file, and work on it takes memory by its size. Raises OSError.
    """
    if ram_bytes is not None and size_bytes > -(-ram_bytes // _HUGE_BYTES) * _HUGE_BYTES:
        raise OSError(errno.EFBIG, f"it has {size_bytes} bytes, the guest {ram_bytes}")


@contextmanager
def mapped(path: Path, ram_bytes: int | None = None) -> Iterator[RamFile]:
    """The RAM file at `path`, mapped for the block. Raises OSError."""
    with open_fd(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as fd:
        file = RamFile(fd, ram_bytes)
        try:
            yield file
        finally:
            file.close()


def extents(fd: int, size_bytes: int) -> Iterator[Span]:
    """The spans of a file that are not holes, up to a size. Raises OSError."""
    at = 0
    while at < size_bytes:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, min(at, size_bytes)


@contextmanager
def open_fd(fd: int) -> Iterator[int]:
    """A descriptor for the block, closed after it."""
    try:
        yield fd
    finally:
        os.close(fd)
