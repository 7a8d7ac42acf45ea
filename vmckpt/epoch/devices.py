"""Saves the state of a VM's devices in a tenth of the time that migrating them takes.

`xen-save-devices-state` (QEMU >= 1.1, independent of Xen) saves devices in one command, into a
descriptor: it needs no thread and starts no dirty log, and `cont` is accepted at once. But it
omits what a waiting QEMU reads first: `head.py`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from vmckpt.epoch.head import (
    HEAD_BYTES,
    NO_DESCRIPTION,
    Head,
    LearnedHead,
    ReadHead,
    has_only_roms,
)
from vmckpt.epoch.migrated import require_bounded
from vmckpt.memory.private.other_blocks import OtherBlocks
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import device_state
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.qemu.stream_head import RamBlock
from vmckpt.sequence.steps import finish


@asynccontextmanager
async def devices_of(
    monitor: Monitor,
    blocks: Sequence[RamBlock],
    ram: tuple[str, ...],
    memory: OtherBlocks | None,
) -> AsyncIterator["Devices"]:
    """The means to save a VM's devices, for the block. `blocks`: all its RAM, `ram` its guest's
    by their names; `memory`: the others, if they can be read. Raises as `Monitor.ask` does.
    """
    with monitor.events("RESET") as resets, _memory() as (fd, writer):
        head: Head = LearnedHead(resets, has_only_roms=has_only_roms(blocks, ram))
        if memory is not None:
            machine = await device_state.query_machine_type(monitor)
            head = ReadHead(machine, blocks, ram, memory)
        is_of_use = head.is_known() or head.can_be_learned()
        fdset = await monitor.add_fd(writer) if is_of_use else None
        try:
            yield Devices(monitor, (fd, writer), fdset, head)
        finally:
            if fdset is not None and monitor.is_open:
                await finish(device_state.remove_fd(monitor, fdset))


class Devices:
    """Saves the devices of one VM. A waiting QEMU reads `head`, then what `save` returned."""

    def __init__(
        self, monitor: Monitor, fds: tuple[int, int], fdset: int | None, head: Head
    ) -> None:
        self._monitor, self._path = monitor, f"/dev/fdset/{fdset}"
        self._fd, self._writer = fds
        self._head = head
        self.is_known, self.can_be_learned = head.is_known, head.can_be_learned
        self.take_memory = head.take

    async def save(self) -> bytes:
        """Their state in the current pause of the VM.

        Raises as `Monitor.tell` does, OperationFailedError: it is larger than any.
        """
        os.lseek(self._writer, 0, os.SEEK_SET)
        await device_state.save_devices(self._monitor, self._path)
        length = os.lseek(self._writer, 0, os.SEEK_CUR)
        require_bounded(self._monitor, length)
        return os.pread(self._fd, length, 0)[HEAD_BYTES:] + NO_DESCRIPTION

    async def list_memory(self) -> None:
        """In the pause, after `take_memory`: have QEMU list its memory, if that may have changed.

        Raises as `head` does.
        """
        if self._head.needs_list():
            self._head.list_blocks(await device_state.query_ram_blocks(self._monitor))

    async def head(self) -> bytes:
        """What precedes the state that was saved last; an unchanged one is the same object.

        The VM may run again. Raises as `Monitor.ask` does, OperationFailedError: the VM has got
        other memory.
        """
        if self._head.follows_blocks:
            self._head.require_same(await device_state.query_ram_blocks(self._monitor))
        return self._head.content()

    async def learn(self, migrated: bytes, saved: "asyncio.Future[bytes]") -> None:
        """Learn the head from the `migrated` state and the `saved` one of the same pause.

        Raises as `Monitor.tell` does.
        """
        try:
            self._head.learn(migrated, await saved)
        except CommandRefusedError:
            self._head.learn(migrated, b"")


async def ram_blocks(monitor: Monitor) -> Sequence[RamBlock]:
    """All of a VM's RAM; none if its QEMU does not list it."""
    try:
        return await device_state.query_ram_blocks(monitor)
    except CommandRefusedError:
        return ()


@contextmanager
def _memory() -> Iterator[tuple[int, int]]:
    """A file in memory, for reading and for writing; a separate description for each."""
    with (
        open_fd(os.memfd_create("vmckpt-devices", os.MFD_CLOEXEC)) as fd,
        open_fd(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)) as writer,
    ):
        yield fd, writer
