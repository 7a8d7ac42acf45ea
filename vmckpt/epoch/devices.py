"""The state of a VM's devices, saved in a tenth of the time that a migration of them takes.

`xen-save-devices-state` (QEMU >= 1.1, and nothing of Xen's) saves devices in one command, into a
descriptor: no thread, no dirty log that is begun and ended, and `cont` is taken at once. But it
leaves out what a QEMU that waits wants to read first: the head of the stream, and RAM that is no
named file (ROMs). That is learned once, in the pause of an epoch whose devices were migrated as
well: both hold the same devices then, to the byte, and what stands before them is the base of all
epochs to come.

Only for VMs whose other RAM is ROMs, which change at a reset alone (the firmware is given tables
anew): for a while after one, and of VMs with other memory (a graphics card's), devices are
migrated.
"""

import os
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np

from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import device_state
from vmckpt.qemu.monitor import CommandRefusedError, Events, Monitor
from vmckpt.sequence.steps import finish

# migration/savevm.c: magic and version, and sections of the stream.
_HEAD_BYTES, _SECTION_FULL, _SECTION_HEAD = 8, 4, struct.Struct(">BIB")
# What ends a migration's stream besides: a description in JSON, which is for people.
_NO_DESCRIPTION = struct.pack(">BI", 6, 2) + b"{}"
# In what was migrated QEMU's state is another word; that much may differ, in one section.
_MOST_DIFFERING_BYTES = 128
# Firmware has read its tables by then, on slow machines too.
_SETTLED_AFTER_RESET_S = 60.0
# Names of blocks: a VM's own RAM as `vm/argv.py` has it, and ROMs, of the machine and of devices.
_RAM, _ROMS, _ROM_BEGINS, _ROM_ENDS = "ram0", ("pc.bios", "pc.rom"), "/rom@", ".rom"


@asynccontextmanager
async def devices_of(monitor: Monitor) -> AsyncIterator["Devices"]:
    """Ways to save the devices of a VM for the block. Raises as `Monitor.ask` does."""
    with monitor.events("RESET") as resets, _memory() as (fd, writer):
        fdset = await monitor.add_fd(writer) if await _has_only_roms(monitor) else None
        try:
            yield Devices(monitor, (fd, writer), fdset, resets)
        finally:
            if fdset is not None and monitor.is_open:
                await finish(device_state.remove_fd(monitor, fdset))


class Devices:
    """How the devices of one VM are saved; `base` goes before what `save` gives, None: unknown."""

    def __init__(
        self, monitor: Monitor, fds: tuple[int, int], fdset: int | None, resets: Events
    ) -> None:
        self._monitor, self._path, self._resets = monitor, f"/dev/fdset/{fdset}", resets
        self._fd, self._writer = fds
        self._is_refused = fdset is None
        self._reset_s: float | None = None
        self.base: bytes | None = None

    def may_change(self) -> bool:
        """Whether what `base` holds may be changing. Asked before each epoch."""
        if self._resets.drain():
            self._reset_s, self.base = time.monotonic(), None
        if self._reset_s is None:
            return False
        return time.monotonic() - self._reset_s < _SETTLED_AFTER_RESET_S

    async def save(self) -> bytes:
        """Their state, as of the pause in which the VM is. Raises as `Monitor.tell` does."""
        os.lseek(self._writer, 0, os.SEEK_SET)
        await device_state.save_devices(self._monitor, self._path)
        length = os.lseek(self._writer, 0, os.SEEK_CUR)
        return os.pread(self._fd, length, 0)[_HEAD_BYTES:] + _NO_DESCRIPTION

    async def learn(self, migrated: bytes) -> None:
        """Find the base in what was migrated in this very pause. Raises as `Monitor.tell` does."""
        if self._is_refused or self.may_change():
            return
        try:
            self.base = base_of(migrated, await self.save())
        except CommandRefusedError:
            self.base = None
        self._is_refused = self.base is None


def base_of(migrated: bytes, saved: bytes) -> bytes | None:
    """What stands before the devices in a migration's stream; None: it holds them otherwise."""
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
    """A file in memory, to be read and to be written; one description each."""
    with (
        open_fd(os.memfd_create("vmckpt-devices", os.MFD_CLOEXEC)) as fd,
        open_fd(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)) as writer,
    ):
        yield fd, writer


async def _has_only_roms(monitor: Monitor) -> bool:
    """Whether all of a VM's RAM but its file is ROMs. False where QEMU does not tell."""
    try:
        blocks = await device_state.query_ram_blocks(monitor)
    except CommandRefusedError:
        return False
    others = [block for block in blocks if block.rpartition("/")[2] != _RAM]
    return len(others) == len(blocks) - 1 and all(map(_is_rom, others))


def _is_rom(block: str) -> bool:
    return block in _ROMS or block.startswith(_ROM_BEGINS) or block.endswith(_ROM_ENDS)
