"""Small files that a crash, a power cut or a full disk leaves either unchanged or complete.

A rename alone is not enough: on XFS, and on ext4 without `auto_da_alloc`, a power cut after it
leaves an empty file. So a file's content is synced before the rename, and its directory after.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.errors import StorageError

# Never follow an existing link, and never open a file that another user created.
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE_ROOM = "free space there, or correct the directory's owner and mode"
_REPAIR = "repair the storage, or correct the directory's owner and mode"


@contextmanager
def storage_errors(action: str, remedy: str = _REPAIR) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError: `action` ("write PATH") failed."""
    try:
        yield
    except OSError as exc:
        raise StorageError(f"cannot {action}", why=exc.strerror or str(exc), remedy=remedy) from exc


def write_durably(path: Path, text: str) -> None:
    """Replace a file (mode 0600) atomically; it is durable when this returns. Raises StorageError.

    Its directory is made if need be.
    """
    with storage_errors(f"make {path.parent}", _MAKE_ROOM):
        make_dir_durably(path.parent)
    with storage_errors(f"write {path}", _MAKE_ROOM):
        replace(path, text)


def replace(path: Path, text: str, *, mode: int = 0o600) -> None:
    """As `write_durably`, in an existing directory. Raises OSError."""
    part = part_of(path)
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed while writing
        with os.fdopen(os.open(part, NEW_FILE, 0o600), "w", encoding="utf-8") as file:
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
    """Allocate space for a file that `fill` writes later, even on a full disk. Raises StorageError.

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
    """Write a file into the space that `reserve` allocated; it appears atomically.

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
    """A file's temporary name while it is written; left behind if the process is killed."""
    return path.with_name(f".{path.name}.part")


def rename_durably(path: Path, name: str) -> None:
    """Rename a file within its directory; durable when this returns. Raises StorageError.

    A missing file is not an error.
    """
    with storage_errors(f"rename {path} to {name}"):
        if path.exists():
            path.rename(path.with_name(name))
        sync_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Remove a file; it does not return after a power cut. It may be missing. Raises OSError."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    with suppress(FileNotFoundError):  # its directory was removed too
        sync_directory(path.parent)


def make_dir_durably(directory: Path, *, mode: int = 0o700) -> None:
    """Create a directory and its parents, with this mode, safe against a power cut.

    Raises OSError.
    """
    missing = []
    at = directory
    while not at.exists():
        missing.append(at)
        at = at.parent
    for one in reversed(missing):
        try:
            one.mkdir(mode=mode)
            if mode & 0o077:  # whatever the umask
                one.chmod(mode)
        except FileExistsError:
            # Created meanwhile: by another process of this user, otherwise it is a trap.
            if not one.is_dir() or one.lstat().st_uid != os.geteuid():
                raise
        sync_directory(one.parent)
    if not missing:
        directory.mkdir(exist_ok=True)  # raises when a file is in its place


def sync_file(path: Path) -> None:
    """Flush a file's content and size to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
