"""A save image in a pipe: libvirt reads it while it is written, and so it is nowhere as a whole.

libvirt opens a save image once (9.0) or twice (11.3), reads its head each time, and passes the
descriptor of the last time to the QEMU that it starts. So the head is written whenever a reader has
closed the pipe, until that QEMU is there.

QEMU does not notice the end of a pipe: it polls for input, and an end is none (10.0 then uses a
whole processor without end). So an image that remains incomplete is ended with what is no image.
"""

import asyncio
import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from vmckpt.state.durable import storage_errors

T = TypeVar("T")
_CLOSED = 0x10  # IN_CLOSE_NOWRITE of inotify(7)
_EVENT = struct.Struct("iIII")
_EVENTS_BYTES, _POLL_S, _SPOIL_S = 4096, 0.002, 0.05
# No offset of a page has all of these flags.
_NO_IMAGE = b"\xff" * 4096
_libc = ctypes.CDLL(None, use_errno=True)


class ImagePipe:
    """The pipe, for a block; in the end a reader finds the end of the file there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._in_use, self._is_ended = threading.Lock(), False
        self._fd = self._events = -1

    def __enter__(self) -> Self:
        """Create it. Raises StorageError."""
        with storage_errors(f"create {self.path}"):
            os.mkfifo(self.path, 0o600)
            self._events = _watch(self.path)
            # Reading as well, so that what is written waits for a reader.
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close and remove it."""
        self.close()
        os.close(self._events)

    async def offer(self, head: bytes, taken: Callable[[], T | None]) -> T:
        """Give the head to readers until `taken` returns something; returns that.

        Raises StorageError.
        """
        with storage_errors(f"make {self.path} large enough"):  # so that nothing waits for a reader
            if fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ) < len(head):
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, len(head))
        os.write(self._fd, head)
        while (found := taken()) is None:
            for _ in range(self._closed()):
                os.write(self._fd, head)
            await asyncio.sleep(_POLL_S)
        # From here on a reader that ends is noticed.
        with storage_errors(f"write {self.path}"):
            only = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        os.close(self._fd)
        self._fd = only
        return found

    def is_open_in(self, pid: int) -> bool:
        """Whether a process has it open."""
        mine = os.fstat(self._fd)
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # it has ended
            return False
        for one in descriptors:
            with suppress(OSError):
                found = one.stat()
                if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                    return True
        return False

    def write(self, pieces: Iterable[bytes]) -> None:
        """Write them all. Blocking. Raises BrokenPipeError: the reader has ended."""
        with self._in_use:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    if self._is_ended:
                        return
                    view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        """All is written: let the reader find the end."""
        self._is_ended = True  # what is being written ends with the next piece
        if self._fd >= 0:
            # Unlinked first: a reader that opened the closed pipe would wait for a writer.
            self.path.unlink(missing_ok=True)
            with self._in_use:
                os.close(self._fd)
            self._fd = -1

    async def spoil(self, reading: "asyncio.Future[None]") -> None:
        """The image remains incomplete: have readers give up, until `reading` has ended."""
        self._is_ended = True
        while not reading.done():
            release(self.path)
            await asyncio.wait({reading}, timeout=_SPOIL_S)
        if not reading.cancelled():
            reading.exception()  # what made it incomplete says more

    def _closed(self) -> int:
        """How many readers have closed it since the last time."""
        count = 0
        with suppress(BlockingIOError):
            events, at = os.read(self._events, _EVENTS_BYTES), 0
            while at < len(events):
                _, mask, _, length = _EVENT.unpack_from(events, at)
                count += bool(mask & _CLOSED)
                at += _EVENT.size + length
        return count


def release(path: Path) -> None:
    """Have readers of an incomplete image give up: call it until they have, then it is removed."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as exc:
        if exc.errno != errno.ENXIO:  # without a reader
            raise
        path.unlink(missing_ok=True)
        return
    try:
        with suppress(BlockingIOError, BrokenPipeError):
            while True:
                os.write(fd, _NO_IMAGE)
    finally:
        os.close(fd)


def _watch(path: Path) -> int:
    """An inotify descriptor of readers that close `path`. Raises OSError."""
    events = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if events < 0:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    if _libc.inotify_add_watch(events, os.fsencode(path), _CLOSED) < 0:
        error = ctypes.get_errno()
        os.close(events)
        raise OSError(error, os.strerror(error))
    return int(events)
