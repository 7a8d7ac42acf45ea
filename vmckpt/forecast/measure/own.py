"""How fast a VM of vmckpt's own dirties its memory: its QEMU and its RAM file are known."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import BusyError, HostDownError, RefusedError
from vmckpt.forecast.measure.dirty_rate import (
    DirtyRate,
    moved_on,
    sampled,
    track,
    track_there,
    while_free,
)
from vmckpt.hosts.lock import Owner
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, session
from vmckpt.units import whole_number
from vmckpt.vm.inventory import Vm, require_alive
from vmckpt.vm.paths import lock_path

SAMPLING = "qemu-page-sampling"
SAMPLE_PAGES = 8192
# Interval of polls for QEMU's result.
POLL_S, PATIENCE = 0.1, 100
_MOST_TICKS = 10**15
_NO_FILE = "its RAM is not in a file of its own"


class MeasuredVm(NamedTuple):
    """One VM, as `Measurable`."""

    vm: Vm

    @property
    def name(self) -> str:
        """Its name."""
        return self.vm.name

    @property
    def vcpus(self) -> int:
        """Its number of processors."""
        return self.vm.spec.vcpus

    async def require_measurable(self) -> None:
        """Raises BusyError when an operation holds the VM, RefusedError when it does not run."""
        await require_alive(self.vm)
        await _require_free(self.vm)
        await _require_running(self.vm)

    async def processor_s(self) -> float:
        """Processor time that its QEMU has used."""
        vm = self.vm
        stat = await vm.host.read_text(Path(f"/proc/{vm.qemu.process.pid}/stat"))
        words = (stat or "").rpartition(")")[2].split()
        ticks = [whole_number(word, _MOST_TICKS) for word in words[11:13]]
        if len(ticks) != 2 or None in ticks:
            await require_alive(vm)
            raise HostDownError(
                f"QEMU of '{vm.name}' cannot be inspected",
                why=f"{vm.host.name} does not show process {vm.qemu.process.pid}",
                remedy="check /proc there",
            )
        return sum(filter(None, ticks)) / os.sysconf("SC_CLK_TCK")

    async def track(self, for_s: float) -> DirtyRate:
        """Track its pages. Raises BusyError: an operation began; OSError: it cannot be tracked."""

        async def is_free() -> bool:
            return await _other_owner(self.vm) is None

        vm = self.vm
        pid, ram_file = vm.qemu.process.pid, vm.qemu.files.ram(vm.spec.ram_dir)
        ram_bytes = vm.spec.memory_bytes
        try:
            if vm.host.is_this_machine:
                found = await track(pid, GuestRam(ram_file), ram_bytes, for_s, is_free)
            else:
                lock = lock_path(vm.host.state_dir, vm.name)
                words = [str(word) for word in (pid, ram_file, ram_bytes, for_s, lock)]
                found = await track_there(vm.host, words, for_s)
        except FileNotFoundError as exc:
            raise OSError(errno.ENOTSUP, _NO_FILE) from exc
        if found is None:
            await _require_free(vm)
            raise moved_on(vm.name, "an operation")
        return found

    async def sample(self, for_s: float, why: str) -> DirtyRate:
        """Have its QEMU sample its pages."""
        rate = partial(_sampled_rate, self.vm)
        return await sampled(rate, for_s, self.vm.spec.memory_bytes, SAMPLING, why)


async def _sampled_rate(vm: Vm, length_s: int) -> float:
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        try:
            await commands.calc_dirty_rate(monitor, length_s, SAMPLE_PAGES)
        except CommandRefusedError as exc:
            raise BusyError(
                f"QEMU does not measure the dirty rate of '{vm.name}' now",
                why=exc.why,
                remedy="wait for the other measurement to end",
            ) from exc
    # Meanwhile the monitor is free for other clients.
    require_free = partial(_require_free, vm)
    await while_free(length_s, require_free)
    for _ in range(PATIENCE):
        async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
            rate = await commands.query_dirty_rate(monitor)
        if rate is not None:
            return rate
        await while_free(POLL_S, require_free)
    raise HostDownError(
        f"QEMU reports no dirty rate of '{vm.name}'",
        why=f"it was asked for {length_s} s, and {PATIENCE * POLL_S:g} s later there was none",
        remedy="check the QEMU process",
    )


async def _require_running(vm: Vm) -> None:
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        state = await commands.query_status(monitor)
    if not state.running:
        raise RefusedError(
            f"'{vm.name}' does not run",
            why=f"its state is '{state.status}': it dirties no memory",
            remedy="start it, and measure then",
        )


async def _other_owner(vm: Vm) -> Owner | None:
    held = await vm.host.lock_owner(lock_path(vm.host.state_dir, vm.name))
    return None if held is not None and held.pid == os.getpid() else held


async def _require_free(vm: Vm) -> None:
    if (held := await _other_owner(vm)) is not None:
        raise moved_on(vm.name, f"{held.action} (run {held.run}, pid {held.pid})")
