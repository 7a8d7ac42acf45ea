"""Saves the state of a VM's devices in a tenth of the time that migrating them takes.

`xen-save-devices-state` (QEMU >= 1.1, independent of Xen) saves devices in one command, into a
descriptor: it needs no thread and starts no dirty log, and `cont` is accepted at once. But it
omits what a waiting QEMU reads first: the head of the stream, and RAM that is no named file
(ROMs). This part is learned once, in the pause of an epoch whose devices were migrated as well:
both then hold the same devices, to the byte, and what precedes them is the base of all later
epochs.

Only for VMs whose other RAM is ROMs, which change only at a reset (the firmware gets its tables
again). For a while after a reset, and for VMs with other memory (a graphics card's), devices are
migrated.
"""

import os
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np

from vmckpt.epoch.migrated import require_bounded
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import device_state
from vmckpt.qemu.monitor import CommandRefusedError, Events, Monitor
from vmckpt.sequence.steps import finish

# migration/savevm.c: magic and version, and sections of the stream.
_HEAD_BYTES, _SECTION_FULL, _SECTION_HEAD = 8, 4, struct.Struct(">BIB")
# The rest of a migration stream's end: a description in JSON, for people.
_NO_DESCRIPTION = struct.pack(">BI", 6, 2) + b"{}"
# In a migrated stream the word for QEMU's state differs; this much may differ, in one section.
_MOST_DIFFERING_BYTES = 128
# By then firmware has read its tables, on slow machines too.
_SETTLED_AFTER_RESET_S = 60.0
# Names of blocks: a VM's own RAM as in `vm/argv.py`, and ROMs of the machine and of devices.
_RAM, _ROMS, _ROM_BEGINS, _ROM_ENDS = "ram0", ("pc.bios", "pc.rom"), "/rom@", ".rom"


@asynccontextmanager
async def devices_of(monitor: Monitor) -> AsyncIterator["Devices"]:
    """The means to save a VM's devices, for the block. Raises as `Monitor.ask` does."""
    with monitor.events("RESET") as resets, _memory() as (fd, writer):
        fdset = await monitor.add_fd(writer) if await _has_only_roms(monitor) else None
        try:
            yield Devices(monitor, (fd, writer), fdset, resets)
        finally:
            if fdset is not None and monitor.is_open:
                await finish(device_state.remove_fd(monitor, fdset))


class Devices:
    """Saves the devices of one VM; `base` precedes the output of `save`, None: unknown."""

    def __init__(
        self, monitor: Monitor, fds: tuple[int, int], fdset: int | None, resets: Events
    ) -> None:
        self._monitor, self._path, self._resets = monitor, f"/dev/fdset/{fdset}", resets
        self._fd, self._writer = fds
        self._is_refused = fdset is None
        self._reset_s: float | None = None
        self.base: bytes | None = None

    def may_change(self) -> bool:
        """Whether the content of `base` may be changing. Call it before each epoch."""
        if self._resets.drain():
            self._reset_s, self.base = time.monotonic(), None
        if self._reset_s is None:
            return False
        return time.monotonic() - self._reset_s < _SETTLED_AFTER_RESET_S

    def can_be_learned(self) -> bool:
        """Whether the base can be learned, as far as is known."""
        return not self._is_refused and not self.may_change()

    async def save(self) -> bytes:
        """Their state in the current pause of the VM.

        Raises as `Monitor.tell` does, OperationFailedError: it is larger than any.
        """
        os.lseek(self._writer, 0, os.SEEK_SET)
        await device_state.save_devices(self._monitor, self._path)
        length = os.lseek(self._writer, 0, os.SEEK_CUR)
        require_bounded(self._monitor, length)
        return os.pread(self._fd, length, 0)[_HEAD_BYTES:] + _NO_DESCRIPTION

    async def learn(self, migrated: bytes, saved: Awaitable[bytes]) -> None:
        """Find the base in the `migrated` state and the `saved` one of the same pause.

        Raises as `Monitor.tell` does.
        """
        try:
            self.base = base_of(migrated, await saved)
        except CommandRefusedError:
            self.base = None
        self._is_refused = self.base is None


def base_of(migrated: bytes, saved: bytes) -> bytes | None:
    """What precedes the devices in a migration's stream; None: it holds them differently."""
    devices = saved.removesuffix(_NO_DESCRIPTION)
    if len(devices) < _SECTION_HEAD.size or devices[0] != _SECTION_FULL:
        return None
    first = devices[: _SECTION_HEAD.size + devices[_SECTION_HEAD.size - 1]]
    at = migrated.find(first)
    there = migrated[at : at + len(devices)]
    if at < _HEAD_BYTES or len(there) != len(devices):
        return None
    differing = np.frombuffer(there, np.uint8) != np.frombuffer(devices, np.uint8)
    return migrated[:at] if np.count_nonzero(differing) <= _MOST_DIFFERING_BYTES else None


@contextmanager
def _memory() -> Iterator[tuple[int, int]]:
    """A file in memory, for reading and for writing; a separate description for each."""
    with (
        open_fd(os.memfd_create("vmckpt-devices", os.MFD_CLOEXEC)) as fd,
        open_fd(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)) as writer,
    ):
        yield fd, writer


async def _has_only_roms(monitor: Monitor) -> bool:
    """Whether all of a VM's RAM except its file is ROMs. False if QEMU does not report it."""
    try:
        blocks = await device_state.query_ram_blocks(monitor)
    except CommandRefusedError:
        return False
    others = [block for block in blocks if block.rpartition("/")[2] != _RAM]
    return len(others) == len(blocks) - 1 and all(map(_is_rom, others))


def _is_rom(block: str) -> bool:
    return block in _ROMS or block.startswith(_ROM_BEGINS) or block.endswith(_ROM_ENDS)
