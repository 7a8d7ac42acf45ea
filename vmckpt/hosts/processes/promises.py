"""Memory reservations for processes: no memory is reserved twice.

A guest's memory is allocated page by page as the guest touches it, and if there is none left the
guest dies. So all memory that a process may come to use counts as taken from before its start. Each
reservation is a file `/dev/shm/*/promised*`; it counts while its holder runs, or the process that
requested it has not started the holder yet. A process writes its request first and then counts: of
two concurrent requests, at least one sees the other.
"""

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vmckpt.hosts.host import FreeMemory, Promise
from vmckpt.hosts.ownership import trusted_users
from vmckpt.hosts.processes import process
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.procfs import NOT_NOW, read_lines, read_text, status_fields

RECORDS_DIR = Path("/dev/shm")
NAME = "promised"
# How long an earlier request waits for later ones to withdraw.
_TURN_S, _POLL_S = 2.0, 0.01
# A QEMU is started within this time of its reservation, or never.
_STARTED_WITHIN_NS = 120 * 10**9
_BLOCK_BYTES = 512
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_MOUNTS, _HUGETLBFS = Path("/proc/mounts"), "hugetlbfs"
_MOST_CHARS = 1 << 16


class _Promise(NamedTuple):
    """A recorded reservation. `since_ns`: the order of requests; `is_given`: it was granted."""

    promise: Promise
    asker: ProcessId
    since_ns: int
    is_given: bool
    holder_pid: int | None = None


def room(directory: Path, available_bytes: int, records_dir: Path = RECORDS_DIR) -> FreeMemory:
    """What can still be reserved in `directory`. Blocking. Raises OSError."""
    return _room(directory, available_bytes, [one for _, one in _counting(records_dir)])


def promise(
    wanted: Promise,
    available: Callable[[], int],
    *,
    overcommit: bool,
    records_dir: Path = RECORDS_DIR,
) -> FreeMemory:
    """Reserve memory if there is room, otherwise leave nothing: `is_given` says which. Blocking.

    The directory of its record must exist. With `overcommit` it is always granted. Raises OSError.
    """
    me = process.identify(os.getpid()) or ProcessId(os.getpid(), 0)
    mine = _Promise(wanted, me, time.monotonic_ns(), is_given=False)
    _write(wanted.record, mine)
    directory = wanted.file.parent.parent if wanted.file else None
    until_s = time.monotonic() + _TURN_S
    try:
        while True:
            others = [one for path, one in _counting(records_dir) if path != wanted.record]
            first = [one for one in others if one.is_given or one.since_ns <= mine.since_ns]
            have = available()
            found = _room(directory, have, first)
            fits = wanted.size_bytes <= found.free_bytes or overcommit
            every = _room(directory, have, others)
            if fits and (len(first) == len(others) or wanted.size_bytes <= every.free_bytes):
                _write(wanted.record, mine._replace(is_given=True))
                return found._replace(is_given=True)
            if not fits or time.monotonic() > until_s:
                wanted.record.unlink(missing_ok=True)
                return found
            time.sleep(_POLL_S)
    except BaseException:
        wanted.record.unlink(missing_ok=True)
        raise


def _room(directory: Path | None, available_bytes: int, others: list[_Promise]) -> FreeMemory:
    """For a directory, or (None) for memory in no file."""
    owed = [(one.promise, _outstanding(one)) for one in others]
    in_memory = sum(size for _, size in owed)
    free = available_bytes - in_memory
    if directory is not None:
        while not directory.exists():
            directory = directory.parent
        device, is_huge = directory.stat().st_dev, is_in_huge_pages(directory)
        here = sum(
            size
            for one, size in owed
            if one.file and not one.is_private and _device(one.file.parent) == device
        )
        on_it = _free_on(directory, is_huge=is_huge) - here
        free = on_it if is_huge else min(on_it, free)
    return FreeMemory(max(0, free), in_memory, is_given=False)


def _counting(records_dir: Path) -> Iterator[tuple[Path, _Promise]]:
    """Reservations whose holder runs or is being started. Another user's do not count.

    Raises OSError if one that may count cannot be read now.
    """
    users = trusted_users()
    holders = _command_lines(users)
    for path in _written(records_dir):
        try:
            one = _read(path, users)
        except (ValueError, KeyError, TypeError):
            continue
        except OSError as exc:
            if exc.errno in NOT_NOW:  # it may count
                raise
            continue
        if not (holder := one.promise.holder.encode()):
            if process.is_alive(one.asker):
                yield path, one._replace(holder_pid=one.asker.pid)
            continue
        pid = next((pid for pid, line in holders.items() if holder in line), None)
        is_new = time.monotonic_ns() - one.since_ns < _STARTED_WITHIN_NS
        if pid is not None or (is_new and process.is_alive(one.asker)):
            yield path, one._replace(holder_pid=pid)


def _written(records_dir: Path) -> Iterator[Path]:
    """The reservation files in `records_dir`, where any user may put symbolic links.

    A VM's directory may be removed meanwhile.
    """
    with suppress(FileNotFoundError), os.scandir(records_dir) as entries:
        directories = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for directory in directories:
            # Another user's directory may be unreadable, or may have become a file.
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                names = os.listdir(directory)
                yield from (Path(directory, name) for name in names if name.startswith(NAME))


def _outstanding(given: _Promise) -> int:
    """The part that is not in use yet."""
    one, taken = given.promise, 0
    try:
        if one.file and not one.is_private:
            with suppress(FileNotFoundError):  # it is not created yet
                taken = one.file.stat().st_blocks * _BLOCK_BYTES
        elif given.holder_pid is not None:  # what it has written is private memory
            status = status_fields(read_text(Path(f"/proc/{given.holder_pid}/status")))
            taken = int(status.get("RssAnon", ["0"])[0]) * 1024
    except OSError:
        return one.size_bytes
    return max(0, one.size_bytes - taken)


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def _free_on(directory: Path, *, is_huge: bool) -> int:
    found = os.statvfs(directory)
    if found.f_blocks or not is_huge:
        return found.f_bavail * found.f_frsize
    # Mounted without a size: it says that it has none.
    pool = _HUGE_PAGES / f"hugepages-{found.f_bsize >> 10}kB" / "free_hugepages"
    return int(pool.read_text()) * found.f_bsize


def is_in_huge_pages(directory: Path) -> bool:
    """Whether files in the directory are in huge pages: its memory is reserved already."""
    mounts = [line.split(" ") for line in read_lines(_MOUNTS)]
    where = directory.resolve()
    of = [(len(words[1]), words[2]) for words in mounts if where.is_relative_to(words[1])]
    return max(of, default=(0, ""))[1] == _HUGETLBFS


def _command_lines(users: Collection[int]) -> dict[int, bytes]:
    """Raises OSError if /proc cannot be read now: memory of a holder left out would seem free."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        # It has ended, or is hidden.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # Includes processes of a VM's own user: this argument is within the first piece.
            if b"-pidfile" in (line := process.file_of(int(name), "cmdline", users)):
                found[int(name)] = line
    return found


def _write(path: Path, given: _Promise) -> None:
    one = given.promise
    words = {
        "size_bytes": one.size_bytes, "file": str(one.file or ""), "is_private": one.is_private,
        "holder": one.holder, "asker": [given.asker.pid, given.asker.start_ticks],
        "since_ns": given.since_ns, "is_given": given.is_given,
    }  # fmt: skip
    part = path.with_name(f".{path.name}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(words, file)
    part.rename(path)


def _read(path: Path, users: Collection[int]) -> _Promise:
    """Raises OSError, also for other users' files: reading a FIFO would block."""
    words = json.loads(_text(path, users))
    file, holder = Path(words["file"]) if words["file"] else None, str(words["holder"])
    one = Promise(path, int(words["size_bytes"]), file, bool(words["is_private"]), holder)
    asker = ProcessId(*map(int, words["asker"]))
    return _Promise(one, asker, int(words["since_ns"]), bool(words["is_given"]))


def _text(path: Path, users: Collection[int]) -> str:
    inside = path.parent.lstat()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd) as file:
        found = os.fstat(fd)
        is_ours = stat.S_ISDIR(inside.st_mode) and {inside.st_uid, found.st_uid} <= {*users}
        if not is_ours or not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "another user's", str(path))
        return file.read(_MOST_CHARS)
