"""Random-access reads of the disks in a checkpoint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vmckpt.checkpoint.facts import DiskFacts, known_facts
from vmckpt.errors import NotFoundError
from vmckpt.store.errors import damaged
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES, Manifest
from vmckpt.store.store import Checkpoint

_NAME = re.compile("disk-[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class StoredDisk:
    """A disk with its content. `name`: its area, such as disk-0.

    `path` and `format` are those of the VM's image.
    """

    name: str
    path: str
    format: str
    size_bytes: int


def stored_disks(manifest: Manifest) -> list[StoredDisk]:
    """The disks whose content the checkpoint has. Raises RefusedError, DamagedError."""
    found = known_facts(manifest.facts).disks
    return [_checked(manifest, disk, disk.area) for disk in found if disk.area is not None]


def find_disk(manifest: Manifest, text: str) -> StoredDisk:
    """Find a disk by its name or its image's path. Raises NotFoundError, and as above."""
    disks = stored_disks(manifest)
    found = [disk for disk in disks if text in (disk.name, disk.path)]
    if not found:
        raise NotFoundError(
            f"the checkpoint has no disk '{text}'",
            why=f"it has: {', '.join(f'{disk.name} ({disk.path})' for disk in disks) or 'none'}",
            remedy="name one of them, such as disk-0",
        )
    return found[0]


class DiskReader:
    """A disk's bytes. Blocking; for one thread at a time."""

    def __init__(self, point: Checkpoint, disk: StoredDisk) -> None:
        self.disk, self.size_bytes = disk, disk.size_bytes
        self._area = point.area(disk.name)

    def read(self, start: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer at the disk's end. Raises DamagedError, StorageError."""
        end = min(start + length, self.size_bytes)
        if start < 0 or end <= start:
            return b""
        first = start // BLOCK_CHUNK_BYTES
        numbers = np.arange(first, -(-end // BLOCK_CHUNK_BYTES))
        at = first * BLOCK_CHUNK_BYTES
        return bytes(self._area.read(numbers)[start - at : end - at])


def names_of(disks: Sequence[StoredDisk]) -> str:
    """The names on one line."""
    return ", ".join(disk.name for disk in disks)


def _checked(manifest: Manifest, disk: DiskFacts, name: str) -> StoredDisk:
    """Check the facts against the stored area: they may come from another site."""
    area = manifest.area(name)
    fits = (
        area is not None
        and _NAME.fullmatch(name) is not None  # it becomes a file name and an export name
        and area.chunk_bytes == BLOCK_CHUNK_BYTES
        and disk.format in ("raw", "qcow2")
        and 0 < disk.size_bytes <= area.size_bytes < disk.size_bytes + BLOCK_CHUNK_BYTES
    )
    if not fits:
        raise damaged(
            f"checkpoint {manifest.id} is damaged", f"its {name} is not what its facts say"
        )
    return StoredDisk(name, disk.path, disk.format, disk.size_bytes)
