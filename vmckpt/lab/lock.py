"""One `up` or `down` at a time."""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from vmckpt.errors import BusyError

_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def locked(directory: Path) -> AsyncIterator[None]:
    """Hold the lock of the lab in `directory` during the block.

    The lock file is removed when there is no lab.

    Raises BusyError if another process holds it for 10 s.
    """
    path = directory.with_name("lab.lock")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = await _lock(path)
    try:
        yield
    finally:
        _unlock(descriptor, path, directory)


async def _lock(path: Path) -> int:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if _try_lock(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > deadline_s:
            raise BusyError(
                "the lab is busy",
                why=f"another 'vmckpt lab up' or 'down' holds {path}",
                remedy="wait for it to end",
            )
        await asyncio.sleep(0.01)


def _unlock(descriptor: int, path: Path, directory: Path) -> None:
    if not directory.exists():
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file: then others would not see this lock.
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
