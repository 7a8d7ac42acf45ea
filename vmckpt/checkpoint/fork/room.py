"""The memory of forks: what they share, and room for what each of them may write."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from vmckpt.checkpoint.facts import RAM
from vmckpt.checkpoint.restore.restore import load_memory
from vmckpt.hosts.host import Promise
from vmckpt.hosts.local import LocalHost
from vmckpt.memory.ram_file import RamFile
from vmckpt.sequence.steps import finish
from vmckpt.store.store import Checkpoint
from vmckpt.vm.paths import IN_MEMORY, QemuDir
from vmckpt.vm.start import no_room


class ForkRoom(NamedTuple):
    """What `forks` forks need: each of them may write `each_bytes`."""

    forks: int
    each_bytes: int
    ram_dir: Path
    overcommit: bool


def room_files(run: str) -> QemuDir:
    """The files in memory of a run that makes forks."""
    return QemuDir(Path("-"), "fork", run)


@asynccontextmanager
async def room_for_all(
    host: LocalHost, run: str, point: Checkpoint, room: ForkRoom
) -> AsyncIterator[None]:
    """Reserve what the forks share and what each may write, for the block.

    Raises RefusedError, StorageError.
    """
    ram, files = point.manifest.area(RAM), room_files(run)
    shared = ram.chunks * ram.chunk_bytes if ram else 0
    needed = shared + room.forks * room.each_bytes
    try:
        for ram_dir in {room.ram_dir, IN_MEMORY}:
            await host.make_private_dir(files.memory(ram_dir))
        promise = Promise(files.promised, needed, files.ram(room.ram_dir), False, holder="")
        found = await host.promise_memory(promise, overcommit=room.overcommit)
        if not found.is_given:
            raise no_room(host, needed, room.ram_dir, found)
        yield
    finally:
        for ram_dir in {room.ram_dir, IN_MEMORY}:
            await finish(host.remove(files.memory(ram_dir)))


def load_content(fd: int, point: Checkpoint, memory_bytes: int) -> None:
    """Load the checkpoint's memory into an empty file. Blocking. Raises OSError, DamagedError."""
    os.truncate(fd, memory_bytes)
    ram = RamFile(fd)
    try:
        load_memory(ram, point.area(RAM))
    finally:
        ram.close()
