"""Records as files in one directory, for one machine or for machines that share it.

    VM.leases/N    version N of the record (20 digits), created by link(2), never changed
    VM.lease       the only version, as vmckpt 0.1 kept it; its text is MOVED once there are others

The highest version is the current one. Its successor is written to a temporary file, synced, and
linked to the next number: link(2) fails if that exists, on a network file system's server too. So
there is no lock that a server could take from a suspended process, or that a client could wrongly
believe it has (a lock followed by rename(2) is no compare-and-swap on NFS), and a process that is
stopped or killed at any point blocks no other.
"""

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.lease.record import LeaseRecord, decode, encode
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned
from vmckpt.sequence.in_thread import NoThreadError, in_thread
from vmckpt.state.durable import make_dir_durably

TIMEOUT_S = 1.0
# Versions that are kept for slow readers; and the age at which a killed process's files go.
KEPT, _LEFTOVER_S = 16, 3600.0
MOVED = "moved to numbered versions by a newer vmckpt\n"
_POLL_S = 0.002
_DIGITS = 20
# With these errors link(2) certainly did nothing. After others a server may have, or may yet.
_REFUSED = (
    errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT, errno.EROFS,
    errno.EMLINK, errno.EXDEV, errno.ENOENT, errno.ENAMETOOLONG,
)  # fmt: skip
# How many requests may wait for a silent server, each in its own thread.
MOST_WAITING = 16
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
T = TypeVar("T")


class FileStore:
    """Records in `directory`, which is created if missing."""

    def __init__(self, directory: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._directory, self._timeout_s = directory, timeout_s
        self._free = threading.Semaphore(MOST_WAITING)

    async def read(self, vm: str) -> Versioned | None:
        """The current record."""
        try:
            return await self._within(lambda: self._read(vm))
        except (OSError, TimeoutError) as exc:
            raise self._down(vm, exc) from exc

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        """Put `record` over version `over`; returns what is stored afterwards."""
        try:
            return await self._within(lambda: self._replace(vm, record, over))
        except NoThreadError as exc:
            raise self._down(vm, exc) from exc
        except TimeoutError as exc:
            raise OutcomeUnknownError(
                f"it is unknown whether the lease of '{vm}' was written",
                why=f"{self._directory} did not answer for {self._timeout_s} s",
                remedy="try again; nothing is granted meanwhile",
            ) from exc

    async def _within(self, work: Callable[[], T]) -> T:
        def released() -> T:
            try:
                return work()
            finally:
                self._free.release()

        async def counted() -> T:
            if not self._free.acquire(blocking=False):
                raise TimeoutError
            try:
                return await in_thread(released)
            except NoThreadError:
                self._free.release()
                raise

        # Twice: the old lock's own limit comes first, and its result is certain.
        async with asyncio.timeout(2 * self._timeout_s):  # wait_for may lose a cancellation
            return await counted()

    def _versions(self, vm: str) -> Path:
        return self._directory / f"{quote(vm, safe='')}.leases"

    def _single(self, vm: str) -> Path:
        return self._directory / f"{quote(vm, safe='')}.lease"

    def _read(self, vm: str) -> Versioned | None:
        directory = self._versions(vm)
        while number := _highest(directory):
            # A network file system's client may list a directory as it was a while ago.
            while (directory / _name(number + 1)).exists():
                number += 1
            # If it is gone by now, it was replaced KEPT times meanwhile.
            with suppress(FileNotFoundError):
                return _parse(directory / _name(number), number)
        return _read_single(self._single(vm))

    def _replace(self, vm: str, record: LeaseRecord, over: int) -> Versioned:
        try:
            now = self._read(vm)
            if (now.version if now else NONE_YET) != over:
                return self._as_found(vm, now)
            new = Versioned(record, over + 1)
            with self._single_locked(vm, over):
                is_new = self._put(vm, new)
            if not is_new:
                return self._as_found(vm, self._read(vm))
        except TimeoutError as exc:
            raise self._down(vm, exc) from exc
        except OSError as exc:
            raise StorageError(
                f"cannot write the lease of '{vm}'",
                why=f"{exc.filename or self._versions(vm)}: {exc.strerror}",
                remedy="make room, or check the permissions of the directory; it must be on a "
                "file system with hard links",
            ) from exc
        try:
            _settle(self._versions(vm), new.version)
        except OSError as exc:
            raise _in_doubt(vm, self._versions(vm), exc) from exc
        return new

    def _put(self, vm: str, new: Versioned) -> bool:
        """Whether the new version is in place, and the highest version.

        Raises OSError (it certainly is not), OutcomeUnknownError.
        """
        directory = self._versions(vm)
        make_dir_durably(directory)
        part = directory / f".{os.getpid()}-{time.monotonic_ns()}.part"
        path = directory / _name(new.version)
        try:
            with os.fdopen(os.open(part, _NEW_FILE, 0o600), "w") as file:
                file.write(f"{encode(new.record)}\n")
                file.flush()
                os.fsync(file.fileno())
            may_be_there = True
            try:
                try:
                    path.hardlink_to(part)
                except FileExistsError:
                    # A server may have done it, its answer lost: then the file has two names.
                    if part.stat().st_nlink < 2:
                        return False
                except OSError as exc:
                    may_be_there = exc.errno not in _REFUSED
                    raise
                if _highest(directory) <= new.version:
                    return True
                # While this process was suspended others advanced so far that the number was free
                # again.
                path.unlink(missing_ok=True)
                return False
            except OSError as exc:
                if not may_be_there:
                    raise
                raise _in_doubt(vm, directory, exc) from exc
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    @contextmanager
    def _single_locked(self, vm: str, over: int) -> Iterator[None]:
        """Keep any vmckpt 0.1 from replacing the single version, in the block and afterwards."""
        single = self._single(vm)
        if over == NONE_YET or _highest(self._versions(vm)) or not single.exists():
            yield
            return
        with _locked(single.with_suffix(".lock"), self._timeout_s):
            now = _read_single(single)
            if now is None or now.version != over:
                raise TimeoutError(f"an older vmckpt has just replaced {single}")
            yield
            try:
                single.write_text(MOVED)
            except OSError as exc:
                raise _in_doubt(vm, single, exc) from exc

    def _as_found(self, vm: str, now: Versioned | None) -> Versioned:
        if now is None:
            raise StorageError(
                f"the lease of '{vm}' is gone",
                why=f"{self._versions(vm)} was removed, or is empty",
                remedy="stop every protection of the VM, make sure that it runs only once, and "
                "protect it again",
            )
        return now

    def _down(self, vm: str, exc: OSError | TimeoutError) -> ArbiterDownError:
        return ArbiterDownError(
            f"the lease of '{vm}' cannot be read",
            why=str(exc) or f"{self._directory} did not answer for {self._timeout_s} s",
            remedy="check the directory",
        )


def _in_doubt(vm: str, path: Path, exc: OSError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"it is unknown whether the lease of '{vm}' was written durably",
        why=f"{path} did not confirm that it is in place and on disk: {exc.strerror}",
        remedy="try again; check the disk, or the server",
    )


def _name(version: int) -> str:
    return f"{version:0{_DIGITS}d}"


def _highest(directory: Path) -> int:
    """The highest version in a directory; 0: none, or there is no directory. Raises OSError."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return 0
    return max(
        (int(name) for name in names if len(name) == _DIGITS and name.isdecimal()), default=0
    )


def _parse(path: Path, version: int) -> Versioned:
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        raise _no_lease(path, "it ends too early")
    return Versioned(decode(data, str(path)), version)


def _read_single(path: Path) -> Versioned | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    version, _, record = data.partition(b"\n")
    if not (version.isdigit() and len(version) <= _DIGITS):
        raise _no_lease(path, f"it begins with {version[:40]!r}, not with a version")
    return Versioned(decode(record, str(path)), int(version))


def _no_lease(path: Path, why: str) -> StorageError:
    return StorageError(
        f"{path} holds no lease",
        why=why,
        remedy="stop every protection of the VM, make sure that it runs only once, and remove it",
    )


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock for the block. Raises TimeoutError, OSError."""
    deadline_s = time.monotonic() + timeout_s
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"another process has held {path} all the time") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _settle(directory: Path, version: int) -> None:
    """Remove old versions and files that killed processes left; then sync the directory."""
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            is_part = entry.name.endswith(".part")
            is_old = entry.name.isdecimal() and int(entry.name) <= version - KEPT
            if is_old or (is_part and time.time() - entry.stat().st_mtime > _LEFTOVER_S):
                Path(entry).unlink(missing_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
