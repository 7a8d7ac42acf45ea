"""Locks for one operation at a time, which die with their owner and name it.

Open file description locks (fcntl(2)): unlike with flock(2) an observer can query whether one is
held without taking it, so queries never make an operation fail.
"""

import errno
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import BusyError

# Describes a holder that has not written its name yet, or found no space for it.
JUST_BEGUN = "an operation that has just begun"


class Owner(NamedTuple):
    """The holder of a lock: the run's id, its action, and since when (Unix seconds).

    `ended_by`: the command that ends it, if it does not end by itself.
    """

    run: str
    action: str
    pid: int
    since_unix_s: float
    ended_by: str = ""


@contextmanager
def held(path: Path, owner: Owner) -> Iterator[None]:
    """Hold the lock at `path` for the block. Raises BusyError, naming the holder.

    If there is no space for the owner's name, the lock is held without one. The file is removed at
    the end; a process that has opened the removed file tries again, so that there is only one
    holder.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            text = os.read(fd, 4096)
            os.close(fd)
            raise _busy(path, _parse(text)) from None
        if _is_still(fd, path):
            break
        os.close(fd)
    try:
        _write(fd, owner)
        yield
    finally:
        with suppress(OSError):  # a file without a lock counts as free
            path.unlink()
        os.close(fd)


def _write(fd: int, owner: Owner) -> None:
    os.ftruncate(fd, 0)
    try:
        os.pwrite(fd, json.dumps(owner._asdict()).encode(), 0)
    except OSError as exc:
        # Even on a full disk you can end a VM, and recover an interrupted migration.
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_owner(path: Path) -> Owner | None:
    """The lock's holder; None if it is free (a dead owner's file counts as free)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
        if struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK:
            return None
        return _parse(os.read(fd, 4096)) or Owner("?", JUST_BEGUN, 0, 0.0)
    finally:
        os.close(fd)


# struct flock: type, whence, start, length (0: to the end), pid (0 for this kind of lock).
_FLOCK = "@hhqqi4x"


def _whole_file(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _parse(text: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _busy(path: Path, owner: Owner | None) -> BusyError:
    who = f"{owner.action} (run {owner.run}, pid {owner.pid})" if owner else "another operation"
    remedy = "wait for it to end; it is released when its holder ends"
    if owner and owner.ended_by:
        remedy = f"end it first: {owner.ended_by}"
    return BusyError(f"'{path.name}' is busy", why=f"held by {who}", remedy=remedy)
