"""Small files here that a crash or a full disk leaves as they were, or as they are to be."""

import os
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import StorageError


def write_durably(path: Path, text: str) -> None:
    """Replace a file (mode 0600) in one step; it is on the disk when this returns. StorageError.

    Its directory is made if need be.
    """
    _make(path.parent)
    part = part_of(path)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        _sync(path.parent)
    except OSError as exc:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}",
            why=exc.strerror or str(exc),
            remedy="free space there, or mend the rights of the directory",
        ) from exc


def reserve(path: Path, size_bytes: int) -> None:
    """Have room on the disk for a file that `fill` writes later, full or not. Raises StorageError.

    Its directory is made if need be.
    """
    _make(path.parent)
    part = part_of(path)
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.truncate()
            os.fsync(file.fileno())
        part.rename(path)
        _sync(path.parent)
    except OSError as exc:
        raise StorageError(
            f"cannot write {path}",
            why=exc.strerror or str(exc),
            remedy="free space there, or mend the rights of the directory",
        ) from exc


def part_of(path: Path) -> Path:
    """What a file is called while it is written; who is killed then leaves it so."""
    return path.with_name(f".{path.name}.part")


def rename_durably(path: Path, name: str) -> None:
    """Call a file otherwise; it is called so on the disk when this returns. Raises StorageError.

    Where there is none nothing is done.
    """
    try:
        if path.exists():
            path.rename(path.with_name(name))
        _sync(path.parent)
    except OSError as exc:
        raise StorageError(
            f"cannot rename {path} to {name}",
            why=exc.strerror or str(exc),
            remedy="mend the storage, or the rights of the directory",
        ) from exc


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise StorageError(
            f"cannot make {directory}",
            why=exc.strerror or str(exc),
            remedy="free space there, or mend the rights; nothing is begun that cannot be kept",
        ) from exc


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
