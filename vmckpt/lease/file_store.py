"""Records as files of one directory, for one machine or for machines that share it.

    VM.lease    version and record, replaced as a whole: a reader needs no lock
    VM.lock     locked while a version is compared and its successor put in place

The new file is on the disk before the lock is asked for, so it is held for microseconds: a process
that is stopped while it has it blocks everybody, until it goes on or is killed.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.lease.record import Record, decode, encode
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned
from vmckpt.sequence.in_thread import in_thread

TIMEOUT_S = 1.0
# What a killed process left unfinished is removed after so long.
_LEFTOVER_S = 3600.0
_POLL_S = 0.002
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
T = TypeVar("T")


class FileStore:
    """Records in `directory`, which is made when it is not there."""

    def __init__(self, directory: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._directory, self._timeout_s = directory, timeout_s

    async def read(self, vm: str) -> Versioned | None:
        """What stands there now."""
        try:
            return await self._within(lambda: _read(self._path(vm)))
        except (OSError, TimeoutError) as exc:
            raise self._down(vm, exc) from exc

    async def replace(self, vm: str, record: Record, *, over: int) -> Versioned:
        """Put `record` where version `over` stands; what stands there afterwards."""
        try:
            return await self._within(lambda: self._replace(vm, record, over))
        except TimeoutError as exc:
            raise OutcomeUnknownError(
                f"nobody knows whether the lease of '{vm}' was written",
                why=f"{self._directory} gave no answer for {self._timeout_s} s",
                remedy="look again; nothing is granted meanwhile",
            ) from exc

    async def _within(self, work: Callable[[], T]) -> T:
        # The lock's own limit comes first: what it says is certain.
        return await asyncio.wait_for(in_thread(work), 2 * self._timeout_s)

    def _path(self, vm: str) -> Path:
        return self._directory / f"{quote(vm, safe='')}.lease"

    def _replace(self, vm: str, record: Record, over: int) -> Versioned:
        path = self._path(vm)
        new = Versioned(record, over + 1)
        part = path.with_name(f".{path.stem}.{os.getpid()}-{time.monotonic_ns()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(part, _NEW_FILE, 0o600), "w") as file:
                file.write(f"{new.version}\n{encode(record)}\n")
                file.flush()
                os.fsync(file.fileno())
            with _locked(path.with_suffix(".lock"), self._timeout_s):
                now = _read(path)
                if (now.version if now else NONE_YET) == over:
                    part.rename(path)
                    now = new
        except TimeoutError as exc:
            raise self._down(vm, exc) from exc
        except OSError as exc:
            raise StorageError(
                f"cannot write the lease of '{vm}'",
                why=f"{exc.filename or path}: {exc.strerror}",
                remedy="make room, or see to the rights of the directory",
            ) from exc
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        if now is not new:
            return self._as_found(vm, now)
        try:
            _settle(path.parent)
        except OSError as exc:
            raise OutcomeUnknownError(
                f"nobody knows whether the lease of '{vm}' lasts",
                why=f"it was put in place, but {path.parent} did not say that it is on the disk: "
                f"{exc.strerror}",
                remedy="look again; see to the disk",
            ) from exc
        return new

    def _as_found(self, vm: str, now: Versioned | None) -> Versioned:
        if now is None:
            raise StorageError(
                f"the lease of '{vm}' is gone",
                why=f"{self._path(vm)} was removed",
                remedy="stop every protection of the VM, make sure that it runs once, and "
                "protect it anew",
            )
        return now

    def _down(self, vm: str, exc: OSError | TimeoutError) -> ArbiterDownError:
        return ArbiterDownError(
            f"the lease of '{vm}' cannot be asked for",
            why=str(exc) or f"{self._directory} gave no answer for {self._timeout_s} s",
            remedy="see to the directory; a stopped process that holds its lock has to go on or "
            "be killed",
        )


def _read(path: Path) -> Versioned | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    version, _, record = text.partition("\n")
    if not version.isdecimal():
        raise StorageError(
            f"{path} holds no lease",
            why=f"it begins with {version[:40]!r}, not with a version",
            remedy="stop every protection of the VM, make sure that it runs once, and remove it",
        )
    return Versioned(decode(record, str(path)), int(version))


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock for the block. Raises TimeoutError, OSError."""
    deadline_s = time.monotonic() + timeout_s
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def _settle(directory: Path) -> None:
    """Have the disk keep which files there are, without those that killed processes left."""
    for entry in os.scandir(directory):
        if entry.name.endswith(".part"):
            with suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _LEFTOVER_S:
                    Path(entry).unlink(missing_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
