"""The disks of a running VM at the moment of an epoch, read while the guest continues.

In the pause each device gets a filter (`copy-before-write`): from then on a block is copied to a
sparse file before it is overwritten. Afterwards a node that shows the disk without later writes
(`snapshot-access`) is read over NBD while the guest writes. Guest writes never fail because of it:
if the file has no room, the snapshot breaks, and the reader gets an error.

A dirty bitmap, started shortly before, tells the next epoch which blocks changed since, and some
more; the previous one ends shortly after. It is only in QEMU's memory: without it the next epoch
reads the whole disk.
"""

import os
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.deadlines import retry
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import block
from vmckpt.qemu.block import DiskDevice
from vmckpt.qemu.disks.nbd import ALLOCATION, NbdExport, bitmap_context
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.sequence.steps import finish
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.users.users import grant_write, made_by

_OLD, _FILTER, _SNAPSHOT = "vmckpt-old-", "vmckpt-cbw-", "vmckpt-instant-"
BITMAP = "vmckpt-"
_LISTENER = "vmckpt-disks"
_BUSY_S, _POLL_S = 5.0, 0.01


class DiskPiece(NamedTuple):
    """A piece of a disk as of that moment; None: it is zeroes."""

    start: int
    length: int
    data: bytearray | None


@dataclass(slots=True)
class _Disk:
    drive: DiskDevice
    size_bytes: int
    # The bitmap of writes since an earlier epoch; None: everything must be read.
    since: str | None


class DisksAtOnce:
    """The writable disks of one VM around one epoch. Node names are as in the VM's QEMU."""

    def __init__(self, monitor: Monitor, files: QemuDir) -> None:
        self._monitor, self._files = monitor, files
        self._disks: list[_Disk] = []
        self._bitmap = ""
        self._may_be_inactive = False
        self._has_filters = False

    @property
    def nodes(self) -> list[str]:
        """The disks' nodes, in order."""
        return [disk.drive.node for disk in self._disks]

    def size_bytes(self, node: str) -> int:
        """How large a disk is."""
        return self._disk(node).size_bytes

    def knows_changes(self, node: str) -> bool:
        """Whether the changes to it since the epoch `since` are known."""
        return self._disk(node).since is not None

    async def prepare(self, nodes: Sequence[str], bitmap: str, since: str | None) -> None:
        """Before the pause: do what takes time. First remove what a killed predecessor left.

        `bitmap` names what is written from that moment on, for a later epoch's `since`. Raises
        RefusedError, CommandRefusedError.
        """
        self._bitmap = BITMAP + bitmap
        await remove_leftovers(self._monitor)
        if not nodes:
            return
        # Since 10.0 a node that was inactivated for a migration, or for saving devices, reports
        # that.
        self._may_be_inactive = await block.has_blockdev_set_active(self._monitor)
        drives = {drive.node: drive for drive in await block.query_drives(self._monitor)}
        images = await block.query_disk_images(self._monitor)
        bitmaps = await block.query_bitmaps(self._monitor)
        for node in nodes:
            if self._bitmap in bitmaps.get(node, {}):  # of an earlier try, which was killed
                await block.bitmap_remove(self._monitor, node, self._bitmap)
        for number, node in enumerate(nodes):
            if node not in drives:
                raise RefusedError(
                    f"{self._monitor.label}: its disk '{node}' belongs to no device",
                    why="QEMU reports no device that uses it",
                    remedy="inspect it with query-block",
                )
            size_bytes = images[node].virtual_size_bytes
            # A bitmap that a killed predecessor has ended misses later writes.
            known = since is not None and bitmaps.get(node, {}).get(BITMAP + since, False)
            disk = _Disk(drives[node], size_bytes, BITMAP + since if known and since else None)
            self._disks.append(disk)
            self._make_file(number, disk)
            if self._may_be_inactive:
                await self._add_destination(number)
        actions = [block.bitmap_add(disk.drive.node, self._bitmap) for disk in self._disks]
        await block.transaction(self._monitor, actions)

    async def add_filters(self) -> None:
        """Add the filters before a pause in which the disks stay this QEMU's; then they only have
        to be put into use.
        """
        for number, disk in enumerate(self._disks):
            if not self._may_be_inactive:
                await self._add_destination(number)
            await self._add_filter(number, disk)
        self._has_filters = True

    def _make_file(self, number: int, disk: _Disk) -> None:
        with self._files.old_blocks(number).open("wb") as file:
            os.truncate(file.fileno(), disk.size_bytes)
        grant_write(self._files, self._files.old_blocks(number))

    async def _add_destination(self, number: int) -> None:
        path = self._files.old_blocks(number)
        name = await _lent(self._monitor, path) if self._monitor.is_lent else str(path)
        inner = {"driver": "file", "filename": name, "discard": "unmap"}
        options = {"driver": "raw", "node-name": f"{_OLD}{number}", "discard": "unmap"}
        await block.blockdev_add(self._monitor, {**options, "file": inner})

    async def _add_filter(self, number: int, disk: _Disk) -> None:
        await block.blockdev_add(
            self._monitor,
            {
                "driver": "copy-before-write",
                "node-name": f"{_FILTER}{number}",
                "file": disk.drive.node,
                "target": f"{_OLD}{number}",
                "on-cbw-error": "break-snapshot",
            },
        )

    def in_pause(self) -> list[Coroutine[Any, Any, Any]]:
        """Commands for the pause, in order: they freeze the disks' view at that moment.

        Without `add_filters` they come after the devices have been migrated: QEMU does not release
        its disks while there is a filter.
        """
        steps: list[Coroutine[Any, Any, Any]] = []
        if self._disks and self._may_be_inactive and not self._has_filters:
            steps.append(block.blockdev_set_active(self._monitor))
        for number, disk in enumerate(self._disks):
            if not self._has_filters:
                if not self._may_be_inactive:  # one that was there before could not be written
                    steps.append(self._add_destination(number))
                steps.append(self._add_filter(number, disk))
            steps.append(block.set_drive(self._monitor, disk.drive, f"{_FILTER}{number}"))
        return steps

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Path]:
        """Export the disks for the block; yields the socket's path."""
        if ended := [(disk.drive.node, disk.since) for disk in self._disks if disk.since]:
            # An exported bitmap no longer changes.
            actions = [block.bitmap_disable(node, since) for node, since in ended]
            await block.transaction(self._monitor, actions)
        path = made_by(self._files, "disks.sock")
        path.unlink(missing_ok=True)
        await self._serve(path)
        try:
            for number, disk in enumerate(self._disks):
                # Refused while the filter has no other user.
                instant = {"driver": "snapshot-access", "file": f"{_FILTER}{number}"}
                name = f"{_SNAPSHOT}{number}"
                await block.blockdev_add(self._monitor, instant | {"node-name": name})
                await block.block_export_read(
                    self._monitor,
                    disk.drive.node,
                    name,
                    (disk.drive.node, disk.since) if disk.since else None,
                )
            yield path
        finally:
            await finish(self._stop_serving(path))

    async def _serve(self, path: Path) -> None:
        if not self._monitor.is_lent:
            await block.nbd_server_start_unix(self._monitor, path)
            return
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            await self._monitor.give_fd(_LISTENER, listening.fileno())
        await block.nbd_server_start_given(self._monitor, _LISTENER)

    async def _stop_serving(self, path: Path) -> None:
        if self._monitor.is_open:
            await block.nbd_server_stop(self._monitor)
        path.unlink(missing_ok=True)

    def contexts(self, node: str) -> tuple[str, ...]:
        """The NBD contexts that the export of a disk offers."""
        since = self._disk(node).since
        return (ALLOCATION, bitmap_context(since)) if since else (ALLOCATION,)

    def read(
        self, export: NbdExport, node: str, most_bytes: int, block_bytes: int
    ) -> Iterator[DiskPiece]:
        """The disk, or what changed on it, piece by piece, in whole blocks. Blocking."""
        since = self._disk(node).since
        for start, end in self._spans(export, since, block_bytes):
            at = start
            for first, last in filled(export, start, end, block_bytes):
                if at < first:
                    yield DiskPiece(at, first - at, None)
                for offset in range(first, last, most_bytes):
                    length = min(most_bytes, last - offset)
                    yield DiskPiece(offset, length, export.read(offset, length))
                at = last
            if at < end:
                yield DiskPiece(at, end - at, None)

    def _spans(
        self, export: NbdExport, since: str | None, block_bytes: int
    ) -> Iterator[tuple[int, int]]:
        size = export.size_bytes
        if since is None:
            yield 0, size
            return
        last = 0
        for extent in export.extents(bitmap_context(since), 0, size):
            if not extent.flagged:
                continue
            start = max(last, extent.start // block_bytes * block_bytes)
            last = min(size, -(-(extent.start + extent.length) // block_bytes) * block_bytes)
            if start < last:
                yield start, last

    async def end(self, *, keep_bitmap: bool) -> None:
        """Remove all of it, except, if the epoch counts, the new bitmap. The guest continues."""
        if self._monitor.is_open:
            await remove_leftovers(self._monitor)
            await forget_bitmaps(self._monitor, self._bitmap if keep_bitmap else None)
        forget_files(self._files)

    def _disk(self, node: str) -> _Disk:
        return next(disk for disk in self._disks if disk.drive.node == node)


def filled(export: NbdExport, start: int, end: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The whole blocks of a part of the disk that hold data, joined."""
    first = last = start
    for extent in export.extents(ALLOCATION, start, end):
        if extent.flagged:
            continue
        at = extent.start // block_bytes * block_bytes
        if at > last:
            if first < last:
                yield first, last
            first = at
        last = min(end, -(-(extent.start + extent.length) // block_bytes) * block_bytes)
    if first < last:
        yield first, last


async def _lent(monitor: Monitor, path: Path) -> str:
    """The file's name for a QEMU that gets descriptors; the lender takes them back."""
    with open_fd(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as fd:
        return f"/dev/fdset/{await monitor.add_fd(fd)}"


def forget_files(files: QemuDir) -> None:
    """Remove the filters' files; that of disk 0 last, which shows that there are some."""
    for path in sorted(files.path.glob(f"{files.old_blocks(0).name[:-1]}*"), reverse=True):
        path.unlink(missing_ok=True)


async def remove_leftovers(monitor: Monitor) -> None:
    """Remove all leftovers from a QEMU: devices get their disks back, nodes are deleted."""
    images = await block.query_disk_images(monitor)
    if not any(name.startswith((_OLD, _FILTER, _SNAPSHOT)) for name in images):
        return
    with suppress(CommandRefusedError):  # none runs
        await block.nbd_server_stop(monitor)
    await _delete_all(monitor, images, _SNAPSHOT)
    for drive in await block.query_drives(monitor):
        if drive.node.startswith(_FILTER):
            below = await block.file_of(monitor, drive.node)
            await block.set_drive(monitor, drive, below)
    await _delete_all(monitor, images, _FILTER)
    await _delete_all(monitor, images, _OLD)


async def forget_bitmaps(monitor: Monitor, but: str | None = None) -> None:
    """Remove the bitmaps of earlier epochs, all but one."""
    for node, names in (await block.query_bitmaps(monitor)).items():
        for name in names:
            if name.startswith(BITMAP) and name != but:
                await block.bitmap_remove(monitor, node, name)


async def _delete_all(monitor: Monitor, nodes: Iterable[str], prefix: str) -> None:
    for node in nodes:
        if node.startswith(prefix):
            await _delete(monitor, node)


async def _delete(monitor: Monitor, node: str) -> None:
    """Close a node; its users may take a moment to release it."""
    try:
        await retry(
            lambda: block.blockdev_del(monitor, node),
            CommandRefusedError,
            every_s=_POLL_S,
            within_s=_BUSY_S,
        )
    except CommandRefusedError as exc:
        raise OperationFailedError(
            f"{monitor.label} does not release '{node}'",
            why=exc.description,
            remedy="take the checkpoint again, which retries",
        ) from exc
