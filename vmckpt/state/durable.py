"""Small files that a crash, a power cut or a full disk leaves either as they were or as written.

A rename alone is not enough: on XFS, and on ext4 without `auto_da_alloc`, a power cut after it
leaves an empty file. So a record's content is synced before the rename, and its directory after.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.errors import StorageError

# Never follows a link that stands there, and never opens a file that another user made.
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE_ROOM = "free space there, or correct the directory's owner and mode"
_MEND = "repair the storage, or correct the directory's owner and mode"


@contextmanager
def storage_errors(action: str, remedy: str = _MEND) -> Iterator[None]:
    """An OSError in the block is a StorageError: `action` ("write PATH") cannot be done."""
    try:
        yield
    except OSError as exc:
        raise StorageError(f"cannot {action}", why=exc.strerror or str(exc), remedy=remedy) from exc


def write_durably(path: Path, text: str) -> None:
    """Replace a file (mode 0600) in one step; it is on the disk when this returns. StorageError.

    Its directory is made if need be.
    """
    with storage_errors(f"make {path.parent}", _MAKE_ROOM):
        make_dir_durably(path.parent)
    with storage_errors(f"write {path}", _MAKE_ROOM):
        replace(path, text)


def replace(path: Path, text: str, *, mode: int = 0o600) -> None:
    """As `write_durably`, in a directory that is there. Raises OSError."""
    part = part_of(path)
    try:
        part.unlink(missing_ok=True)  # of a process that was killed while it wrote
        with os.fdopen(os.open(part, NEW_FILE, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        part.rename(path)
        sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def reserve(path: Path, size_bytes: int) -> None:
    """Have room on the disk for a file that `fill` writes later, full or not. Raises StorageError.

    Its directory is made if need be.
    """
    part = part_of(path)
    try:
        make_dir_durably(path.parent)
        part.unlink(missing_ok=True)
        fd = os.open(part, NEW_FILE, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            os.close(fd)
    except OSError as exc:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(
            f"cannot reserve {size_bytes} bytes for {path}",
            why=exc.strerror or str(exc),
            remedy="free space there",
        ) from exc


def fill(path: Path, text: str) -> None:
    """Write a file into the room that `reserve` has for it: it is all there then, in one step.

    Raises StorageError.
    """
    data, part = text.encode(), part_of(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with storage_errors(f"write {path}", _MAKE_ROOM):
        with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        sync_directory(path.parent)


def part_of(path: Path) -> Path:
    """What a file is called while it is written; a process that is killed then leaves it."""
    return path.with_name(f".{path.name}.part")


def rename_durably(path: Path, name: str) -> None:
    """Rename a file within its directory; it is done on the disk when this returns. StorageError.

    Where there is no such file nothing is done.
    """
    with storage_errors(f"rename {path} to {name}"):
        if path.exists():
            path.rename(path.with_name(name))
        sync_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Remove a file; it does not come back after a power cut. No file is no error. OSError."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    with suppress(FileNotFoundError):  # its directory went too
        sync_directory(path.parent)


def make_dir_durably(directory: Path) -> None:
    """A directory (mode 0700) that is there after a power cut, parents included. OSError."""
    missing = []
    at = directory
    while not at.exists():
        missing.append(at)
        at = at.parent
    for one in reversed(missing):
        try:
            one.mkdir(mode=0o700)
        except FileExistsError:
            # Made meanwhile: by another process of this user's, else it is a trap.
            if not one.is_dir() or one.lstat().st_uid != os.geteuid():
                raise
        sync_directory(one.parent)
    if not missing:
        directory.mkdir(exist_ok=True)  # raises when a file is in its place


def sync_file(path: Path) -> None:
    """Have the disk keep what a file holds, and that it is there. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the disk keep which files a directory has, and their names. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
