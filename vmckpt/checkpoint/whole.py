"""Save a VM as a whole, if nothing better is possible: adopted VMs, forks, older kernels.

The guest is paused while QEMU writes all memory and devices to a file: at fixed offsets
(`mapped-ram`, QEMU >= 9.0, so that the store recognises known pages), otherwise as a migration
stream. Then it continues, and the file is added to the store. The expected pause is reported
beforehand, and nothing is changed if the file would not fit. A process that dies meanwhile leaves
`vms/VM/saving`: the dead-man's switch, or the next command on the VM, cancels the saving and
resumes the guest.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.checkpoint.facts import (
    BESIDES_BYTES,
    FILE,
    MAPPED_RAM,
    SAVED,
    STREAM,
    most_saved_bytes,
)
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.store_thread import store_thread
from vmckpt.checkpoint.take import StopTimes, Taking
from vmckpt.epoch.capture import all_done, resume
from vmckpt.epoch.migrated import saving
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.host import Host, Promise
from vmckpt.memory.ram_file import Span, extents, open_fd
from vmckpt.preflight.checkpoint import save_checks
from vmckpt.preflight.finding import require
from vmckpt.procfs import read_text, status_fields
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.state.durable import NEW_FILE
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.open import Access
from vmckpt.store.transaction import Transaction
from vmckpt.units import format_duration, format_rate, format_size
from vmckpt.vm.inventory import Vm, require_alive
from vmckpt.vm.lifecycle import held
from vmckpt.vm.paths import IN_MEMORY, QemuDir
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.users.users import grant_write

# The time to write what is not memory.
BESIDES_S = 0.1
PROBE_BYTES = 32 << 20
FINISH_S, CHECK_S, POLL_S = 30.0, 1.0, 0.005
# QEMU must answer while it saves, and little must be left at the end.
LIMITS = {"max-bandwidth": 1 << 40, "downtime-limit": 100}
_FD_NAME = "vmckpt-saved"


async def require_savable(vm: Vm) -> None:
    """Raises RefusedError with every reason why QEMU cannot save a VM."""
    await require_alive(vm)
    require(await save_checks(vm), f"'{vm.name}' cannot be saved")


async def take_whole(
    vm: Vm, location: str, options: TakeOptions, tell: Callable[[str], None], access: Access
) -> TakenCheckpoint:
    """Save it; the guest continues in any case. `options.max_pause_s` of 0: no limit.

    Raises RefusedError, BusyError, StorageError, OperationFailedError: then nothing of it remains.
    """
    async with held(vm, "checkpoint create") as now:
        await require_savable(now)
        # For an encrypted store the state must never be on a disk unencrypted.
        file = now.qemu.files.saved_file(in_memory=access.secret is not None)
        if file.is_relative_to(now.qemu.files.memory(IN_MEMORY)):
            await now.host.make_private_dir(file.parent)
        connected = await now.host.connect(now.qemu.files.operator)
        async with session(connected, now.name) as monitor, store_thread() as store_calls:
            taking = _TakingWhole(now, monitor, options, store_calls, tell)
            taking.file = file
            try:
                return await taking.take(location, access)
            finally:
                file.unlink(missing_ok=True)


@asynccontextmanager
async def saved_room(
    host: Host, spec: Spec, files: QemuDir, file: Path, size_bytes: int
) -> AsyncIterator[None]:
    """Room for the block for the file of a VM saved as a whole; in memory it is reserved.

    Raises RefusedError.
    """
    free = await host.free_bytes(file.parent)
    if file.is_relative_to(IN_MEMORY):
        free = min(free, await host.available_memory_bytes())
    if free < size_bytes:
        raise _no_room(spec, file, size_bytes, free)
    if file.is_relative_to(files.path):  # on a disk
        yield
        return
    record = files.promised.with_name(f"{files.promised.name}-saved")
    await host.make_private_dir(record.parent)
    own = file if file.parent == record.parent else None
    promise = Promise(record, size_bytes, own, is_private=own is None, holder="")
    found = await host.promise_memory(promise, overcommit=spec.overcommit)
    if not found.is_given:
        raise _no_room(spec, file, size_bytes, found.free_bytes)
    try:
        yield
    finally:
        await finish(host.remove(record))


def _no_room(spec: Spec, file: Path, size_bytes: int, free_bytes: int) -> RefusedError:
    return RefusedError(
        f"there is no room to save or load '{spec.name}' as a whole",
        why=f"it takes up to {format_size(size_bytes)} in {file.parent} for a moment, "
        f"{format_size(free_bytes)} are free",
        remedy="make room there; the guest was not affected",
    )


async def resume_unsaved(vm: Vm) -> None:
    """Recovery after the saving process died: cancel the saving and resume the guest.

    The caller holds the lock. Raises HostDownError, OutcomeUnknownError: QEMU does not answer;
    nothing was changed.
    """
    files = vm.qemu.files
    if await vm.host.exists(vm.directory.saving):
        if await vm.is_alive():
            async with session(await vm.host.connect(files.operator), vm.name) as monitor:
                await _give_up(monitor)
                await resume(monitor)
                if (await commands.query_migrate_capabilities(monitor)).get(MAPPED_RAM):
                    await commands.migrate_set_capabilities(monitor, {MAPPED_RAM: False})
        await vm.host.remove(vm.directory.saving)
    for in_memory in (False, True):
        await vm.host.remove(files.saved_file(in_memory=in_memory))


class _TakingWhole(Taking):
    """One VM being saved as a whole, into `file` first."""

    file: Path

    async def _moment(self, new: Transaction) -> StopTimes:
        offered = await commands.query_migrate_capabilities(self._monitor)
        mapped = MAPPED_RAM in offered
        size_bytes = _expected_bytes(self._vm)
        async with saved_room(self._vm.host, self._vm.spec, self._vm.qemu.files, self.file,
                              size_bytes):  # fmt: skip
            await self._require_short(size_bytes)
            wanted = {"events": True} | ({MAPPED_RAM: True} if mapped else {})
            async with saving(self._monitor, wanted, LIMITS):
                pause_s = await self._save(mapped=mapped)
                unix_s = time.time()
            self._tell("storing")
            await self._store_calls(partial(self._store, new))
        return StopTimes(unix_s, [pause_s], 0, 0, FILE, MAPPED_RAM if mapped else STREAM)

    async def _require_short(self, size_bytes: int) -> None:
        """Report the expected pause. Raises RefusedError if it exceeds the limit."""
        speed = await in_thread(partial(_speed_bytes_per_s, self.file))
        expected_s = size_bytes / speed + BESIDES_S
        text = (
            f"about {format_duration(expected_s)}: up to {format_size(size_bytes)}, "
            f"written at {format_rate(speed)}"
        )
        self._tell(f"the guest will be paused for {text}")
        if 0 < self._options.max_pause_s < expected_s:
            raise RefusedError(
                f"saving '{self._vm.name}' would stop it for too long",
                why=f"{text}; --max-pause allows {format_duration(self._options.max_pause_s)}",
                remedy="allow more, or run it from a vmckpt spec, which makes the pause short",
            )

    async def _save(self, *, mapped: bool) -> float:
        """Save the guest to the file, with the disks at the same moment; returns the pause."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.file, flags, 0o600)
        with open_fd(fd):
            if not mapped:
                await self._monitor.give_fd(_FD_NAME, fd)
        await self._vm.host.write_text(self._vm.directory.saving, "")
        began_s = time.perf_counter()
        with self._monitor.events("MIGRATION") as events:
            try:
                await commands.stop(self._monitor)
                grant_write(self._vm.qemu.files, self.file)
                uri = f"file:{self.file}" if mapped else f"fd:{_FD_NAME}"
                await commands.migrate(self._monitor, uri)
                await self._saved(events)
                await all_done([asyncio.ensure_future(step) for step in self._disks.in_pause()])
            except BaseException:
                await finish(self._undone())
                raise
            await to_the_end(resume(self._monitor))
        pause_s = time.perf_counter() - began_s
        await self._vm.host.remove(self._vm.directory.saving)
        return pause_s

    async def _saved(self, events: Any) -> None:
        """Wait until all is written. Raises OperationFailedError."""
        while True:
            event = await events.next(CHECK_S)
            found = await commands.query_migrate(self._monitor, timeout_s=FINISH_S)
            status = event["data"]["status"] if event else found.status
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                break
        raise OperationFailedError(
            f"'{self._vm.name}' could not be saved; it keeps running",
            why=found.error or f"QEMU's migration to the file is {found.status}",
            remedy=f"check the free space in {self.file.parent}, and see the VM's stderr.log",
        )

    async def _undone(self) -> None:
        try:
            await _give_up(self._monitor)
        finally:  # whatever QEMU answers, if it does
            await resume(self._monitor)
        await self._vm.host.remove(self._vm.directory.saving)

    def _store(self, new: Transaction) -> None:
        fd = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        with open_fd(fd):
            size = os.fstat(fd).st_size
            if size > (most := most_saved_bytes(self._vm.spec.memory_bytes)):
                raise OperationFailedError(
                    f"what QEMU has saved of '{self._vm.name}' cannot be stored",
                    why=f"it has {format_size(size)}; {format_size(most)} are expected at most: "
                    "that QEMU may be compromised, or belong to another user",
                    remedy="restart the VM from a checkpoint that you trust",
                )
            area = new.area(SAVED, size_bytes=size, chunk_bytes=PAGE_CHUNK_BYTES)
            empty = np.ones(-(-size // PAGE_CHUNK_BYTES), bool)
            for start, end in _chunks(fd, size):
                empty[start // PAGE_CHUNK_BYTES : -(-end // PAGE_CHUNK_BYTES)] = False
            area.put_zero(np.flatnonzero(empty))
            area.put_file(fd, _chunks(fd, size))
        self.file.unlink()


async def _give_up(monitor: Monitor) -> None:
    """Cancel the migration; none is under way on return."""
    given_up_s = time.monotonic() + FINISH_S
    while (await commands.query_migrate(monitor)).status in _UNDER_WAY:
        await commands.migrate_cancel(monitor)
        if time.monotonic() > given_up_s:
            return
        await asyncio.sleep(POLL_S)


_UNDER_WAY = ("setup", "active", "device", "pre-switchover", "cancelling", "wait-unplug")


def _expected_bytes(vm: Vm) -> int:
    return saved_bytes(vm.qemu.process.pid, vm.spec.memory_bytes)


def saved_bytes(pid: int, memory_bytes: int) -> int:
    """The most that is written when QEMU saves its guest: its present memory, and devices.

    Raises OSError: the process has ended.
    """
    status = status_fields(read_text(Path(f"/proc/{pid}/status")))
    has = sum(int(status.get(name, ["0"])[0]) for name in ("VmRSS", "VmSwap", "HugetlbPages"))
    return min(has << 10, memory_bytes) + BESIDES_BYTES


def _speed_bytes_per_s(beside: Path) -> float:
    """The current write speed in that directory. Blocking. Raises OSError."""
    path = beside.with_name(f"{beside.name}.probe")
    data = os.urandom(PAGE_CHUNK_BYTES)  # QEMU writes page by page
    path.unlink(missing_ok=True)
    fd = os.open(path, NEW_FILE, 0o600)
    try:
        with open_fd(fd):
            began_s = time.perf_counter()
            for _ in range(PROBE_BYTES // len(data)):
                os.write(fd, data)
            return PROBE_BYTES / (time.perf_counter() - began_s)
    finally:
        path.unlink()


def _chunks(fd: int, size: int) -> Iterator[Span]:
    """The spans with content, rounded to whole chunks."""
    last = 0
    for start, end in extents(fd, size):
        first = max(last, start // PAGE_CHUNK_BYTES * PAGE_CHUNK_BYTES)
        last = min(size, -(-end // PAGE_CHUNK_BYTES) * PAGE_CHUNK_BYTES)
        if first < last:
            yield first, last
