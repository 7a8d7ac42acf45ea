"""Write the images of a domain that is made of a checkpoint. Everything here blocks."""

import errno
import os
from pathlib import Path

from vmckpt.checkpoint.disks.qcow2 import write_image, write_overlay
from vmckpt.checkpoint.domains.planned import DomainDiskPlan
from vmckpt.store.store import Checkpoint
from vmckpt.vm.domains.definition.description import ImageFile


def write_content(point: Checkpoint, disk: DomainDiskPlan, kind: str, path: Path) -> None:
    """Write the disk's content to a new image. Raises OSError, DamagedError."""
    write_image(path, kind, disk.size_bytes, point.area(disk.area).stream())


def write_over_base(disk: DomainDiskPlan, path: Path) -> None:
    """Write a new image that has nothing of its own yet. Raises OSError."""
    base = _base_of(disk)
    write_overlay(path, disk.size_bytes, base.path, base.format)


class SharedBases:
    """The images that forks are based on: written once, each fork has a hard link to them.

    So they go with the last fork's images.
    """

    def __init__(self, point: Checkpoint) -> None:
        self._point = point
        self._written = dict[str, Path]()

    def write(self, disk: DomainDiskPlan, path: Path) -> None:
        """Give the base of this disk the name `path`. Raises OSError, DamagedError."""
        base = _base_of(disk)
        if not self._is_linked(disk.area, path):
            write_content(self._point, disk, base.format, path)
        self._written[disk.area] = base.path

    def _is_linked(self, area: str, path: Path) -> bool:
        """Whether an earlier fork's is there, and links can be made; then it is one now."""
        if (earlier := self._written.get(area)) is None:
            return False
        try:
            os.link(earlier, path)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                return False
            raise
        return True


def _base_of(disk: DomainDiskPlan) -> ImageFile:
    if disk.base is None:
        raise ValueError(f"{disk.image.path} has no base")
    return disk.base
