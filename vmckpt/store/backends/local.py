"""A store in a directory: files are synced and renamed; locks end with their process."""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import BusyError, RefusedError, StorageError, VmckptError
from vmckpt.state.durable import sync_directory
from vmckpt.store.backends import marks
from vmckpt.store.backends.backend import CREATED_ONCE, Buffer, MissingError
from vmckpt.store.backends.file_systems import file_system_of, keeps_locks, why_unkept
from vmckpt.store.backends.files import (
    append_only_error,
    read_all,
    storage_error,
    write_all,
)
from vmckpt.store.errors import UnreadableError, there_already, too_large
from vmckpt.store.files.config import OBJECT_FOLDERS, read_config

# Unfinished objects, and what killed writers left.
TEMPORARY = "tmp"
LOCK = "lock"
MOST_OPEN = 64
# No other object ever gets one of their names: only these files are kept open.
_KEPT_OPEN = ("bundles/", "maps/", "packs/")
# Environment variable; 1: no other host uses stores on file systems without locks.
ONE_HOST = "VMCKPT_STORE_ONE_HOST"
# The errors of link(2) on file systems without hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
# A disk cannot read a sector, or a file system finds a wrong checksum: only this file is affected.
_UNREADABLE = (errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)
_POLL_S = 0.01
# struct flock of 64-bit Linux.
_FLOCK = struct.Struct("hhqqixxxx")


class LocalBackend:
    """A directory. It and its parents are created with the first object.

    With `append_only` nothing is removed or replaced: RefusedError.
    """

    locks_last = True
    is_remote = False

    def __init__(self, root: Path, *, append_only: bool = False) -> None:
        self.root, self.append_only = root, append_only
        self.location = str(root)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._mutex = threading.Lock()
        self._locks_are_kept = False
        # The store's marks, once seen.
        self._marks: tuple[str, ...] = ()

    def names(self, folder: str) -> dict[str, int]:
        """The files in a folder."""
        return {name: size for name, (size, _) in self.versions(folder).items()}

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The files in a folder."""
        found = dict[str, tuple[int, str]]()
        try:
            with self.own_directory(folder) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    # A file that is removed meanwhile is missing; all others are listed.
                    with contextlib.suppress(FileNotFoundError):
                        # NFS keeps a removed open file under a hidden name.
                        if entry.is_file() and not entry.name.startswith("."):
                            is_ = entry.stat()
                            found[entry.name] = is_.st_size, f"{is_.st_ino} {is_.st_mtime_ns}"
        except FileNotFoundError:
            return found
        except OSError as exc:
            raise self.error(exc, folder) from exc
        return found

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of a file."""
        with self._reading(name) as fd:
            # Not more than the file has: its content may claim that a part is 4 GiB.
            left = max(0, os.fstat(fd).st_size - start)
            try:
                return read_all(fd, start, left if length is None else min(left, length))
            except MemoryError as exc:
                raise too_large(name, "it takes more memory than there is") from exc

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of a file."""
        with self._reading(name) as fd:
            size = os.fstat(fd).st_size
            start = max(0, size - length)
            return read_all(fd, start, size - start), size

    def write(self, name: str) -> "LocalWriter":
        """A file under a temporary name, until it is published."""
        try:
            return LocalWriter(self, name)
        except OSError as exc:
            raise self.error(exc, name) from exc

    def remove(self, name: str) -> None:
        """Unlink it durably."""
        if self.append_only:
            raise append_only_error(name, self.location)
        parent, _, last = name.rpartition("/")
        # Removing frees space, even on a full disk.
        with contextlib.suppress(OSError):
            self.require_marks(name)
        try:
            with contextlib.suppress(FileNotFoundError), self.own_directory(parent) as folder:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(last, dir_fd=folder)
                os.fsync(folder)
        except OSError as exc:
            raise self.error(exc, name) from exc
        with self._mutex:
            fd = self._open.pop(name, None)
        if fd is not None:
            os.close(fd)

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator["LocalHeld"]:
        """A lock on one byte of the lock file, chosen by the name: it ends with the process."""
        at = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        request = _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0)
        fd = self._lock_file(shared=shared)
        try:
            # Without a working lock a reader risks only its own read.
            if not shared:
                self._require_kept()
        except BaseException:
            os.close(fd)
            raise
        until_s = time.monotonic() + wait_s
        try:
            while True:
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
                    break
                except OSError as exc:
                    if exc.errno not in (errno.EAGAIN, errno.EACCES):
                        raise self.error(exc, LOCK) from exc
                if time.monotonic() >= until_s:
                    raise BusyError(
                        f"the store {self.location} is in use",
                        why=f"another command holds its {name}",
                        remedy="wait for it to end, then run this again",
                    )
                time.sleep(_POLL_S)
            yield LocalHeld()
        finally:
            os.close(fd)

    def leftovers(self) -> dict[str, int]:
        """Unfinished files."""
        return {f"{TEMPORARY}/{name}": size for name, size in self.names(TEMPORARY).items()}

    def accept_folders(self) -> None:
        """Mark the folders of the store as they are now. Raises StorageError, and as `read_config`.

        An append-only client cannot mark: StorageError if that is needed.
        """
        if self.append_only:
            for folder in OBJECT_FOLDERS:
                self.names(folder)
            return
        try:
            self._mark(read_config(self).id)
        except OSError as exc:
            raise self.error(exc, "its folders") from exc

    def close(self) -> None:
        """Close all open files."""
        with self._mutex:
            fds, self._open = list(self._open.values()), OrderedDict()
        for fd in fds:
            os.close(fd)

    def folder(self, name: str) -> Path:
        """The object's directory; created durably if it is missing."""
        folder = (self.root / name).parent
        if not folder.is_dir():
            missing = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for one in missing:
                sync_directory(one.parent)
        elif folder != self.root:
            with self._directory(folder):
                pass  # not another user's link
        return folder

    @contextmanager
    def own_directory(self, folder: str) -> Iterator[int]:
        """A folder of the store, open for the block, so that its disk is not unmounted meanwhile.

        Raises OSError; StorageError if it is not the store's (`marks.py`).
        """
        required = self._known_marks() if folder in OBJECT_FOLDERS else ()
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(self._directory(self.root / folder))
            except FileNotFoundError as exc:
                if required:
                    raise marks.not_own(folder, self.location) from exc
                raise
            if required and not marks.is_marked(fd, required):
                raise marks.not_own(folder, self.location)
            yield fd

    def _require_own(self, name: str) -> None:
        """Raises StorageError if an object is missing because its folder is not the store's."""
        try:
            with (
                contextlib.suppress(FileNotFoundError),
                self.own_directory(name.rpartition("/")[0]),
            ):
                pass
        except OSError as exc:
            raise self.error(exc, name) from exc

    def _known_marks(self) -> tuple[str, ...]:
        if not self._marks:
            self._marks = marks.marks_in(self.root)
        return self._marks

    def require_marks(self, name: str) -> None:
        """Before an object is added or removed, mark the folders of a store without marks.

        Raises OSError; StorageError if they may not be this store's.
        """
        folder = name.partition("/")[0]
        if folder in (name, TEMPORARY, "config") or self._known_marks():
            return
        try:
            store_id = read_config(self).id
        except VmckptError:  # no store yet
            return
        objects = {folder: self.versions(folder) for folder in OBJECT_FOLDERS}
        if marks.belong_together(objects):
            self._mark(store_id)
        elif not self._known_marks():  # otherwise another command has just made them
            raise marks.not_certain(objects, self.location)

    def _mark(self, store_id: str) -> None:
        """Raises OSError."""
        for folder in (*OBJECT_FOLDERS, ""):
            self.folder(f"{folder}/x" if folder else "x")
            with self._directory(self.root / folder) as fd:
                marks.put_mark(fd, marks.mark_of(store_id))

    @contextmanager
    def _directory(self, folder: Path) -> Iterator[int]:
        """A directory, open for the block. Raises OSError if it is another user's symbolic link.

        Otherwise every user who can write to the location could make a gc run by root empty any
        directory.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if folder == self.root:
            fd = os.open(folder, flags)
        else:
            try:
                fd = os.open(folder, flags | os.O_NOFOLLOW)
            except OSError as exc:
                if exc.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                fd = _opened(_own_link(folder), flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _require_kept(self) -> None:
        """Raises RefusedError if other hosts, or other programs, do not see locks."""
        if self._locks_are_kept:
            return
        path = self.root / LOCK
        found = file_system_of(path)
        kind = found.kind if found else "of unknown type"
        try:
            is_kept = keeps_locks(path)
        except OSError as exc:
            raise self.error(exc, f"locks (its file system is {kind})") from exc
        why = why_unkept(found) if found else None
        if is_kept and (why is None or os.environ.get(ONE_HOST) == "1"):
            self._locks_are_kept = True
            return
        if not is_kept:
            why = "a lock that one program holds is granted to another as well"
        raise RefusedError(
            f"{self.location} is on a file system that does not keep locks: {kind}",
            why=f"{why}; commands of two hosts at once could disturb one another",
            remedy="use NFS with locks, object storage (s3://...), or HOST:/DIRECTORY of the host "
            "that has the disk"
            + (f"; if this host alone uses the store, set {ONE_HOST}=1" if is_kept else ""),
        )

    def _lock_file(self, *, shared: bool) -> int:
        try:
            path = self.folder(LOCK) / LOCK
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(path, flags, 0o600)
            except OSError:
                # A read-only store: a reader's lock needs no write access.
                if not shared:
                    raise
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise self.error(exc, LOCK) from exc

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        """An open file for the block; the most recent ones stay open."""
        with self._mutex:
            fd = self._open.pop(name, None)
        try:
            if fd is None:
                # Another user's FIFO instead of a file would block a reader.
                fd = os.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            yield fd
        except FileNotFoundError as exc:
            self._require_own(name)
            raise MissingError(name) from exc
        except OSError as exc:
            error = self.error(exc, name)
            if exc.errno == errno.ESTALE and fd is not None:
                # On NFS another host has removed it.
                os.close(fd)
                fd = None
                raise MissingError(name) from exc
            if exc.errno not in _UNREADABLE:
                raise error from exc
            raise UnreadableError(error.what, why=error.why, remedy=error.remedy) from exc
        finally:
            if fd is not None:
                self._put_back(name, fd)

    def _put_back(self, name: str, fd: int) -> None:
        surplus = [fd]
        with self._mutex:
            # Another thread may have opened it meanwhile.
            if name not in self._open and name.startswith(_KEPT_OPEN):
                self._open[name] = surplus.pop()
                if len(self._open) > MOST_OPEN:
                    surplus.append(self._open.popitem(last=False)[1])
        for one in surplus:
            os.close(one)

    def error(self, exc: OSError, name: str) -> StorageError:
        """Translate an OSError."""
        return storage_error(exc, name, self.location)


class LocalWriter:
    """An unfinished file."""

    def __init__(self, backend: LocalBackend, name: str) -> None:
        self._backend, self._name = backend, name
        backend.require_marks(name)
        self._temporary = backend.folder(f"{TEMPORARY}/x") / secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd: int | None = os.open(self._temporary, flags, 0o600)

    def write(self, data: Buffer) -> None:
        """Append."""
        if self._fd is None:
            raise ValueError(f"{self._name} is written already")
        try:
            write_all(self._fd, data)
        except OSError as exc:
            raise self._backend.error(exc, self._name) from exc

    def publish(self) -> None:
        """Sync, rename, sync the directory."""
        if self._fd is None:
            raise ValueError(f"{self._name} is written already")
        path = self._backend.root / self._name
        try:
            os.fsync(self._fd)
            folder = self._backend.folder(self._name)
            with self._backend.own_directory(self._name.rpartition("/")[0]):
                replaces = path.exists()
                if self._backend.append_only or self._name.startswith(CREATED_ONCE):
                    self._link(path)
                else:
                    self._temporary.rename(path)
            os.close(self._fd)
            self._fd = None
            try:
                sync_directory(folder)
            except OSError:
                # It exists, but not durably: a caller that gets the error must find nothing. If it
                # replaced the only config, keep it.
                if not replaces:
                    path.unlink()
                raise
        except OSError as exc:
            raise self._backend.error(exc, self._name) from exc

    def _link(self, path: Path) -> None:
        """Unlike a rename this fails if the name exists. Raises OSError."""
        try:
            os.link(self._temporary, path)
        except FileExistsError as exc:
            # An NFS server may have done it, and been asked again because its answer was lost.
            if not self._temporary.samefile(path):
                raise self._there_already() from exc
        except OSError as exc:
            if exc.errno not in NO_LINKS or self._backend.append_only:
                raise
            # A file system without hard links (FAT): a local one, on which locks last.
            if path.exists():
                raise self._there_already() from exc
            self._temporary.rename(path)
            return
        self._temporary.unlink()

    def _there_already(self) -> RefusedError:
        if self._backend.append_only:
            return append_only_error(self._name, self._backend.location)
        return there_already(self._name.rpartition("/")[2], self._backend.location)

    def discard(self) -> None:
        """Unlink it unless it was published."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        with contextlib.suppress(OSError):
            self._temporary.unlink()


class LocalHeld:
    """A kernel lock: it cannot be lost."""

    def require(self) -> None:
        """Always held."""


def _own_link(path: Path) -> str:
    """The target of a symbolic link by root or this user. Raises OSError for another user's."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if found.st_uid not in (0, os.geteuid()):
            why = f"it is a link that another user (uid {found.st_uid}) has made"
            raise PermissionError(errno.EPERM, why, str(path))
        return str(path.parent / os.readlink("", dir_fd=fd))
    finally:
        os.close(fd)


def _opened(target: str, flags: int) -> int:
    """Follow a directory's symbolic link. Raises OSError, also if the target is missing: a store
    whose disk is not mounted would seem empty, and gc removes what nothing needs.
    """
    try:
        return os.open(target, flags)
    except FileNotFoundError as exc:
        why = f"it is a link to {target}, which is not there"
        raise NotADirectoryError(errno.ENOTDIR, why, target) from exc
