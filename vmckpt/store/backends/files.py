"""Whole reads and writes of files, and the errors of a store whose files cannot be used."""

import errno
import os

from vmckpt.errors import RefusedError, StorageError
from vmckpt.store.backends.backend import Buffer


def append_only_error(name: str, location: str) -> RefusedError:
    """The error for an append-only client."""
    return RefusedError(
        f"{name} in {location} is not changed",
        why="this client may add to the store, and remove or replace nothing (append-only)",
        remedy="do it where the store is, or with a key that is not restricted to --append-only",
    )


def read_all(fd: int, start: int, length: int) -> bytes:
    """Read `length` bytes; fewer at the end of the file. Raises OSError.

    A read that reaches an unreadable sector returns the bytes before it, and no error.
    """
    data = os.pread(fd, length, start)
    while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
        data += more
    return data


def write_all(fd: int, data: Buffer) -> None:
    """Write all of it. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def storage_error(exc: OSError, name: str, location: str) -> StorageError:
    """Translate a failed call on a file."""
    why, remedy = exc.strerror or str(exc), "check that it is there, and its rights"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "nothing that was in the store is harmed: make room there"
    if exc.errno == errno.EXDEV:
        why = "its folder leads to another file system, and what is complete is renamed into it"
        remedy = "move all of the store to that file system, and link the store's own directory"
    return StorageError(f"cannot use {name} in {location}", why=why, remedy=remedy)
