"""Load a VM that was saved as a whole (`checkpoint/whole.py`) into a waiting QEMU."""

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.checkpoint.facts import MAPPED_RAM
from vmckpt.errors import OperationFailedError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.area import Area
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.users.users import grant_write

CHECK_S = 1.0
_BATCH_CHUNKS = 1024
_FD_NAME = "vmckpt-saved"


async def load_whole(
    monitor: Monitor, area: Area, files: QemuDir, *, mapped: bool, file: Path
) -> None:
    """Load the guest, paused and ready to run; `mapped` memory comes from `file`.

    There is room for that (`whole.saved_room`). Raises OperationFailedError, DamagedError,
    StorageError; this QEMU cannot be used after that.
    """
    if mapped:
        await _from_file(monitor, area, files, file)
    else:
        await _from_pipe(monitor, area)


async def _from_file(monitor: Monitor, area: Area, files: QemuDir, path: Path) -> None:
    try:
        await in_thread(partial(_write_file, path, area))
        grant_write(files, path)
        await commands.migrate_set_capabilities(monitor, {"events": True, MAPPED_RAM: True})
        await _loaded(monitor, commands.migrate_incoming(monitor, f"file:{path}"))
    finally:
        path.unlink(missing_ok=True)
    await commands.migrate_set_capabilities(monitor, {MAPPED_RAM: False})


async def _from_pipe(monitor: Monitor, area: Area) -> None:
    reader, writer = os.pipe()
    feeding = asyncio.ensure_future(in_thread(partial(_feed, writer, area)))
    with open_fd(reader):
        await monitor.give_fd(_FD_NAME, reader)
    await commands.migrate_set_capabilities(monitor, {"events": True})
    try:
        await _loaded(monitor, commands.migrate_incoming(monitor, f"fd:{_FD_NAME}"))
    except OperationFailedError:
        await feeding  # if reading the store failed, this raises the cause
        raise
    await feeding


async def _loaded(monitor: Monitor, begin: Coroutine[Any, Any, None]) -> None:
    with monitor.events("MIGRATION") as events:
        await begin
        while True:
            event: Any = await events.next(CHECK_S)
            if event is None:
                status = (await commands.query_migrate(monitor)).status
            else:
                status = event["data"]["status"]
            if status == "completed":
                return
            if status == "failed":
                raise OperationFailedError(
                    f"{monitor.label} cannot load the guest",
                    why="loading the saved state failed: see its stderr.log",
                    remedy="use the QEMU and the machine type that saved it",
                )


def _write_file(path: Path, area: Area) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open_fd(fd):
        os.truncate(fd, area.size_bytes)
        for numbers, contents in area.stream():
            view, size = memoryview(contents), area.chunk_bytes
            for i, number in enumerate(numbers.tolist()):
                os.pwrite(fd, view[i * size : (i + 1) * size], number * size)
        os.truncate(fd, area.size_bytes)


def _feed(writer: int, area: Area) -> None:
    with open_fd(writer), suppress(BrokenPipeError):  # the reader reports why it stopped
        left = area.size_bytes
        for at in range(0, area.chunk_count, _BATCH_CHUNKS):
            numbers = np.arange(at, min(area.chunk_count, at + _BATCH_CHUNKS))
            rest = memoryview(area.read(numbers))[:left]
            left -= len(rest)
            while rest:
                rest = rest[os.write(writer, rest) :]
