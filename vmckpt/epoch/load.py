"""Loads the state of a VM's devices into a waiting QEMU that has its memory."""

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

from vmckpt.errors import OperationFailedError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Events, Monitor
from vmckpt.qemu.stream_head import plain_stream, read_stream_head
from vmckpt.sequence.in_thread import in_thread

LOAD_TIMEOUT_S, _CHECK_S = 10.0, 0.5
_FD_NAME = "vmckpt-state"
# For a waiting QEMU: its memory does not come with the devices.
SETTINGS = {"x-ignore-shared": True, "events": True, "return-path": False}


async def load_devices(monitor: Monitor, device_state: bytes, *, blocks: int = 1) -> None:
    """Load the guest, paused and ready to run. `SETTINGS` have been set.

    `blocks`: how many its RAM has. Raises OperationFailedError; then this QEMU is no longer usable.
    """
    if blocks > 1 and (plain := _as_plain(device_state)) is not None:
        await commands.migrate_set_capabilities(monitor, {"x-ignore-shared": False})
        device_state = plain
    reader, writer = os.pipe()
    feeding = asyncio.ensure_future(in_thread(partial(feed, writer, device_state)))
    with open_fd(reader):
        await monitor.give_fd(_FD_NAME, reader)
    with monitor.events("MIGRATION") as events:
        await commands.migrate_incoming(monitor, f"fd:{_FD_NAME}")
        if await has_loaded(monitor, events):
            await feeding
            return
    raise OperationFailedError(
        f"{monitor.label} cannot load the guest",
        why="loading the state of its devices failed: see its stderr.log",
        remedy="use the QEMU and the machine type that saved it",
    )


def _as_plain(device_state: bytes) -> bytes | None:
    """The same as an ordinary stream: pages of RAM that do not come stay as they are.

    With `x-ignore-shared` each block says where the guest sees it, which a head that was read out
    of QEMU's memory does not know. None: its head was learned, and is QEMU's own.
    """
    try:
        return b"".join(plain_stream(read_stream_head(device_state), ()))
    except ValueError:
        return None


async def has_loaded(monitor: Monitor, events: Events) -> bool:
    """Wait for the end; whether it succeeded. `events` of kind MIGRATION began before."""
    given_up_s = time.monotonic() + LOAD_TIMEOUT_S
    while monitor.is_open and time.monotonic() < given_up_s:
        event = await events.next(_CHECK_S)
        data: Any = event["data"] if event else {"status": "?"}
        if data["status"] in ("completed", "failed"):
            return bool(data["status"] == "completed")
    return False


def feed(writer: int, data: bytes) -> None:
    """Write everything into a pipe, as far as it is read, and close it."""
    with open_fd(writer), suppress(BrokenPipeError):  # the reader says why it stopped
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(writer, rest) :]
