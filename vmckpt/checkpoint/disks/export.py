"""Export a checkpoint's disk as a raw or qcow2 image: complete and verified, or no file."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import Key, opened
from vmckpt.checkpoint.disks.qcow2 import write_image
from vmckpt.checkpoint.disks.stored_disks import StoredDisk, find_disk
from vmckpt.errors import RefusedError, StorageError, UsageError
from vmckpt.qemu.disks.qcow2 import tables_bytes
from vmckpt.sequence.in_thread import until_cancelled
from vmckpt.store.area import Area
from vmckpt.store.backends.local import NO_LINKS
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES
from vmckpt.store.store import Store
from vmckpt.units import format_size

FORMATS = ("qcow2", "raw")
Moved = Callable[[int, int], None]


class ExportFile(NamedTuple):
    """The image file to create."""

    path: Path
    format: str


class Exported(NamedTuple):
    """A finished image; `written_bytes` excludes holes."""

    disk: StoredDisk
    format: str
    written_bytes: int


async def export_disk(
    entry: CatalogueEntry, disk: str, image: ExportFile, moved: Moved, key: Key = None
) -> Exported:
    """Export to a file that must not exist; `moved` receives the bytes done and the total.

    Until it is complete and synced the file is named `.FILE.part-...`; after an error or a
    cancellation nothing remains. Raises RefusedError (the file exists, or no room), NotFoundError,
    DamagedError, StorageError.
    """
    if os.path.lexists(image.path):
        raise _there_already(image.path)
    async with opened(entry.location, key) as store:

        def work(still_wanted: Callable[[], None]) -> Exported:
            def watched(done: int, total: int) -> None:
                still_wanted()
                moved(done, total)

            return _export(store, entry.id, disk, image, watched)

        return await until_cancelled(work)


def format_of(destination: Path, given: str | None) -> str:
    """The image's format: as given, else by the file name's suffix. Raises UsageError."""
    ends = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw"}
    kind = given or ends.get(destination.suffix)
    if kind not in FORMATS:
        raise UsageError(
            f"{destination.name} does not end in a known format"
            if given is None
            else f"--format {given} is unknown",
            why="it is qcow2 or raw",
            remedy="end the name in .qcow2, .raw or .img, or add --format",
        )
    return kind


def _export(
    store: Store, checkpoint_id: str, name: str, image: ExportFile, moved: Moved
) -> Exported:
    destination, kind = image
    with store.read(checkpoint_id) as point:
        disk = find_disk(point.manifest, name)
        area = point.area(disk.name)
        total = len(area.numbers()) * BLOCK_CHUNK_BYTES
        temporary = destination.with_name(f".{destination.name}.part-{secrets.token_hex(4)}")
        try:
            _require_room(
                destination, total + (tables_bytes(disk.size_bytes) if kind != "raw" else 0)
            )
            write_image(temporary, kind, disk.size_bytes, _watched(area, total, moved))
            try:
                _put_in_place(temporary, destination)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as exc:
            raise StorageError(
                f"cannot write {destination}",
                why=exc.strerror or str(exc),
                remedy="check that the folder exists, its permissions, and free space",
            ) from exc
        return Exported(disk, kind, total)


def _watched(
    area: Area, total: int, moved: Moved
) -> "Iterator[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], memoryview]]":
    done = 0
    moved(done, total)
    for numbers, contents in area.stream():
        yield numbers, contents
        done += len(numbers) * BLOCK_CHUNK_BYTES
        moved(done, total)


def _put_in_place(temporary: Path, destination: Path) -> None:
    """Rename it durably, unless another file has taken the name meanwhile."""
    try:
        try:
            os.link(temporary, destination, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in NO_LINKS:
                raise
            # An empty file reserves the name until the rename.
            os.close(
                os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            )
            temporary.rename(destination)
    except FileExistsError as exc:
        raise _there_already(destination) from exc
    folder = os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _there_already(destination: Path) -> RefusedError:
    return RefusedError(
        f"{destination} exists already",
        why="an export does not overwrite",
        remedy="choose another name, or remove it first",
    )


def _require_room(destination: Path, needed_bytes: int) -> None:
    there = os.statvfs(destination.parent)
    free = there.f_bavail * there.f_frsize
    if free < needed_bytes:
        raise RefusedError(
            f"there is no room for {destination}",
            why=f"it takes up to {format_size(needed_bytes)}, {format_size(free)} are free",
            remedy="make room there, or choose another location",
        )
