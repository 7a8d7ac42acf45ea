"""A store in one file, for carrying about: written once, as a whole, then only read.

    magic     b"\\x89VMCKAR\\n"
    objects   one after the other, as they are
    table     JSON: for each object its name, first byte and size, in the order in which they lie
    trailer   the table's size (unsigned 64 bit, big-endian), and BLAKE2b, 32 bytes, of the magic,
              the table, and the size

The objects have their own checksums; the rest is looked at whenever the file is opened.
"""

import contextlib
import errno
import fcntl
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from vmckpt.errors import BusyError, RefusedError
from vmckpt.state.durable import sync_directory
from vmckpt.store.backends.backend import Buffer, MissingError
from vmckpt.store.backends.files import read_all, storage_error, write_all
from vmckpt.store.backends.local import LocalHeld
from vmckpt.store.errors import damaged
from vmckpt.store.files.decoding import count, decoding, json_of, listed, row, text

MAGIC = b"\x89VMCKAR\n"
_SIZE = struct.Struct(">Q")
_SUM_BYTES = 32
_TRAILER_BYTES = _SIZE.size + _SUM_BYTES
_COPY_BYTES = 4 << 20
_MOST_OBJECTS = 1 << 22


class _Objects:
    """Objects in a file, by the table."""

    locks_last = True
    is_remote = False

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.location = path, str(path)
        self._fd = fd
        self._table: dict[str, tuple[int, int]] = {}

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder."""
        return {name: size for name, (size, _) in self.versions(folder).items()}

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The objects in a folder."""
        begin, table = f"{folder}/", self._table.items()
        return {
            name.removeprefix(begin): (size, str(start))
            for name, (start, size) in table
            if name.startswith(begin)
        }

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of an object."""
        if name not in self._table:
            raise MissingError(name)
        at, size = self._table[name]
        left = max(0, size - start)
        return self.pread(at + start, left if length is None else min(left, length))

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of an object."""
        size = self._table.get(name, (0, 0))[1]
        return self.read(name, max(0, size - length)), size

    def leftovers(self) -> dict[str, int]:
        """None."""
        return {}

    def pread(self, start: int, length: int) -> bytes:
        """Part of the file."""
        with self.errors():
            return read_all(self._fd, start, length)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """OSError of the block becomes StorageError."""
        try:
            yield
        except OSError as exc:
            raise storage_error(exc, self.path.name, str(self.path.parent)) from exc


class ArchiveBackend(_Objects):
    """A read-only store in a file. It never changes, so there is nothing to lock. DamagedError."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, -1)
        with self.errors():
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._table = self._read_table()
        except BaseException:
            self.close()
            raise

    def write(self, name: str) -> NoReturn:
        """Refused."""
        raise self._finished()

    def remove(self, name: str) -> NoReturn:
        """Refused."""
        raise self._finished()

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator[LocalHeld]:
        """Nothing to lock: there are no writers."""
        if not shared:
            raise self._finished()
        yield LocalHeld()

    def close(self) -> None:
        """Close the file. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _finished(self) -> RefusedError:
        return RefusedError(
            f"{self.location} cannot be changed",
            why="an exported file is written once",
            remedy="import it into a store (vmckpt store import), or export again",
        )

    def _read_table(self) -> dict[str, tuple[int, int]]:
        size = os.fstat(self._fd).st_size
        trailer = self.pread(max(0, size - _TRAILER_BYTES), _TRAILER_BYTES)
        if self.pread(0, len(MAGIC)) != MAGIC or len(trailer) < _TRAILER_BYTES:
            raise damaged(
                f"{self.location} cannot be read", "it is not an exported file, or not whole"
            )
        (length,) = _SIZE.unpack_from(trailer)
        start = size - _TRAILER_BYTES - length
        table = self.pread(start, length) if start > 0 else b""
        if len(table) != length or _sum(table) != trailer[_SIZE.size :]:
            raise damaged(f"{self.location} is damaged", "its table is not what was written")
        spans = dict[str, tuple[int, int]]()
        with decoding(self.location):  # anyone can compute such a checksum
            for written in listed(json_of(table, 3 * _MOST_OBJECTS), _MOST_OBJECTS):
                name, first, bytes_ = row(written, 3)
                spans[text(name)] = count(first, start), count(bytes_, start)
        if start != len(MAGIC) + sum(bytes_ for _, bytes_ in spans.values()):
            raise damaged(f"{self.location} is damaged", "its table does not fit its size")
        return spans


class NewArchive(_Objects):
    """A file in the making, under a temporary name, locked by one process, for one writer.

    `finish` renames it. Raises RefusedError (the file exists), BusyError, StorageError.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, -1)
        self._aside = path.with_name(f".{path.name}.partial")
        self._require_free()
        with self.errors():
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._aside, flags, 0o600)
        try:
            with self.errors():
                _require_own(self._fd, self._aside)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _require_there(self._fd, self._aside)
                # Drop what a killed process left.
                os.ftruncate(self._fd, 0)
        except BaseException as exc:
            os.close(self._fd)
            if isinstance(exc.__cause__, BlockingIOError):
                raise BusyError(
                    f"{path} is being written", why="by another export", remedy="wait for its end"
                ) from exc
            raise
        self._end = 0
        self._open = True
        self.append(MAGIC)

    def write(self, name: str) -> "_ArchiveWriter":
        """An object, in a file of its own until it is published: several may be written at a
        time.
        """
        with self.errors():
            return _ArchiveWriter(self, name)

    def remove(self, name: str) -> None:
        """Only the last object can be removed: otherwise its bytes would belong to none."""
        start, size = self._table.get(name, (self._end, 0))
        if start + size != self._end:
            raise ValueError(f"{name} is not the last one")
        with self.errors():
            os.ftruncate(self._fd, start)
        self._table.pop(name, None)
        self._end = start

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator[LocalHeld]:
        """Nothing to lock: its creator has exclusive use of it."""
        yield LocalHeld()

    def append(self, data: Buffer) -> None:
        """More bytes."""
        with self.errors():
            os.lseek(self._fd, self._end, os.SEEK_SET)
            write_all(self._fd, data)
        self._end += memoryview(data).nbytes

    def add(self, name: str, source: int, size: int) -> None:
        """Add an object from an open file."""
        start = self._end
        try:
            for at in range(0, size, _COPY_BYTES):
                with self.errors():
                    part = read_all(source, at, min(_COPY_BYTES, size - at))
                self.append(part)
        except BaseException:
            self._end = start
            raise
        self._table[name] = start, size

    def finish(self) -> None:
        """The file is complete and durable on return."""
        self._require_free()
        rows = [[name, start, size] for name, (start, size) in self._table.items()]
        table = json.dumps(rows, separators=(",", ":")).encode()
        self.append(table + _SIZE.pack(len(table)) + _sum(table))
        with self.errors():
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            self._aside.rename(self.path)
            self._close()
            try:
                sync_directory(self.path.parent)
            except OSError:
                # It exists, but not durably.
                self.path.unlink()
                raise

    def close(self) -> None:
        """Remove the file unless it was finished."""
        if self._open:
            with contextlib.suppress(OSError):
                self._aside.unlink()
            self._close()

    def _close(self) -> None:
        self._open = False
        os.close(self._fd)

    def _require_free(self) -> None:
        if self.path.exists():
            raise RefusedError(
                f"{self.path} exists already",
                why="it would be lost",
                remedy="choose another file, or remove it",
            )


class _ArchiveWriter:
    def __init__(self, archive: NewArchive, name: str) -> None:
        self._archive, self._name = archive, name
        # Unnamed, so nothing is left of it in any case.
        self._file = tempfile.TemporaryFile(dir=archive.path.parent, buffering=0)  # noqa: SIM115
        self._size = 0

    def write(self, data: Buffer) -> None:
        """Append."""
        with self._archive.errors():
            write_all(self._file.fileno(), data)
        self._size += memoryview(data).nbytes

    def publish(self) -> None:
        """Append it to the archive."""
        self._archive.add(self._name, self._file.fileno(), self._size)
        self.discard()

    def discard(self) -> None:
        """Close the file."""
        self._file.close()


def _sum(table: bytes) -> bytes:
    return blake2b(MAGIC + table + _SIZE.pack(len(table)), digest_size=_SUM_BYTES).digest()


def _require_own(fd: int, path: Path) -> None:
    """Raises PermissionError if another user owns the file or may read it: its name is
    predictable.
    """
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_nlink != 1:
        why = f"another user (uid {found.st_uid}) made {path.name} there, or may read it"
        raise PermissionError(errno.EPERM, why, str(path))


def _require_there(fd: int, path: Path) -> None:
    """Raises BlockingIOError if the path now has the finished file of another export."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), path.lstat()):
            return
    raise BlockingIOError(errno.EAGAIN, "another export has just ended", str(path))
