"""Serve a checkpoint's disks over NBD, read-only, at a Unix socket: no root, no kernel module."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import Key, opened
from vmckpt.checkpoint.disks.stored_disks import DiskReader, StoredDisk, stored_disks
from vmckpt.errors import NotFoundError, RefusedError, StorageError, VmckptError
from vmckpt.qemu.disks.nbd_server import serving
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.store import Checkpoint

Failed = Callable[[VmckptError], None]


@asynccontextmanager
async def readers(entry: CatalogueEntry, key: Key = None) -> AsyncIterator[list[DiskReader]]:
    """Readers of the checkpoint's disks; the checkpoint is not removed during the block.

    Raises NotFoundError (it has none), DamagedError, BusyError, StorageError.
    """
    async with opened(entry.location, key) as store:
        reading = store.read(entry.id)
        point: Checkpoint = await in_thread(reading.__enter__)
        try:
            disks = stored_disks(point.manifest)
            if not disks:
                raise NotFoundError(
                    f"checkpoint {entry.name} holds no disk",
                    why="its VM had no writable disk",
                    remedy="choose another checkpoint",
                )
            yield [DiskReader(point, disk) for disk in disks]
        finally:
            await finish(in_thread(partial(reading.__exit__, None, None, None)))


@asynccontextmanager
async def served(
    entry: CatalogueEntry, socket: Path, failed: Failed, key: Key = None
) -> AsyncIterator[list[StoredDisk]]:
    """Export each disk by name (disk-0, ...) at `socket` for the block.

    `failed` receives each read that the store could not serve; the client gets an I/O error. Raises
    as `readers`; RefusedError: the path `socket` exists already.
    """
    if socket.exists() or socket.is_symlink():
        raise RefusedError(
            f"{socket} exists already",
            why="the server creates its socket there, and removes it when it ends",
            remedy="choose another path; a killed server's socket can be removed",
        )
    async with readers(entry, key) as disks:
        exports = {one.disk.name: _Export(one, failed) for one in disks}
        async with _at(socket, exports):
            yield [one.disk for one in disks]


@asynccontextmanager
async def _at(socket: Path, exports: "dict[str, _Export]") -> AsyncIterator[None]:
    server = serving(socket, exports)
    try:
        await server.__aenter__()
    except OSError as exc:
        raise StorageError(
            f"cannot make the socket {socket}",
            why=exc.strerror or str(exc),
            remedy="choose a path of at most 107 bytes, in a folder that exists",
        ) from exc
    try:
        yield
    finally:
        await finish(server.__aexit__(None, None, None))


class _Export:
    """One exported disk; its reads are serialized."""

    def __init__(self, reader: DiskReader, failed: Failed) -> None:
        self.size_bytes = reader.size_bytes
        self._reader, self._failed = reader, failed
        self._turn = asyncio.Lock()

    async def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read `length_bytes` bytes. Raises VmckptError."""
        async with self._turn:
            try:
                return await in_thread(partial(self._reader.read, offset_bytes, length_bytes))
            except VmckptError as exc:
                self._failed(exc)
                raise
