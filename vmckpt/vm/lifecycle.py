"""run, start, stop and rm of a VM on one host."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from vmckpt.errors import (
    BusyError,
    RefusedError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.hosts.lock import Owner
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.sequence.steps import all_of, finish, to_the_end
from vmckpt.vm.inventory import Vm, read_vm, require_unused
from vmckpt.vm.passthrough.passthrough import Passthrough
from vmckpt.vm.paths import QemuDir, lock_path, new_qemu_id, vm_dir
from vmckpt.vm.power_off import power_off
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.spec.spec_text import written
from vmckpt.vm.start import end_qemu, plug_taps, remove_home, remove_qemu_files, start_qemu, sweep

# Paused by a user, or by QEMU after a disk error: it can be resumed.
STANDING_STILL = ("paused", "io-error")


async def start_vm(vm: Vm) -> Vm:
    """Start a stopped VM where it is at home, or resume a paused one.

    Raises RefusedError if it runs.
    """
    async with held(vm, "vm start") as now:
        if await now.is_alive():
            return await _go_on(now)
        # "auto" values were resolved when it first ran.
        return await boot(now.spec, now.host, now.qemu.platform)


async def pause_vm(vm: Vm) -> None:
    """Pause the guest; one that is paused is left alone.

    Raises RefusedError if the VM is off or in a state that only its operation may end.
    """
    async with held(vm, "vm pause", whole=False, runs_again=False) as now:
        await _require_on(now)
        async with _operator(now) as monitor:
            if await _status(now, monitor) not in STANDING_STILL:
                await commands.stop(monitor)


async def resume_vm(vm: Vm) -> None:
    """Resume a paused guest; one that runs is left alone.

    Raises RefusedError as `pause_vm` does, CommandRefusedError if QEMU cannot resume it.
    """
    async with held(vm, "vm resume") as now:
        await _require_on(now)
        async with _operator(now) as monitor:
            if await _status(now, monitor) in STANDING_STILL:
                await commands.cont(monitor)


async def reboot_vm(vm: Vm, *, force: bool, timeout_s: float) -> Vm:
    """Power the guest off by its button and start it again; with `force` reset it at once.

    Raises RefusedError if it does not run; TimedOutError if the guest does not power off within
    `timeout_s`: it continues to run.
    """
    async with held(vm, "vm reboot") as now:
        await _require_on(now)
        async with _operator(now) as monitor:
            if await _status(now, monitor) in STANDING_STILL:
                raise RefusedError(
                    f"'{now.name}' is paused",
                    why="its guest cannot act on its power button",
                    remedy=f"resume it first: vmckpt vm resume {now.name}",
                )
            if force:
                await commands.system_reset(monitor)
                return now
        await power_off(now.name, lambda: _press_button(now), now.is_alive, timeout_s)
        return await to_the_end(_started_again(now))


async def _started_again(vm: Vm) -> Vm:
    await remove_qemu_files(vm.host, vm.spec.ram_dir, vm.qemu.files)
    return await boot(vm.spec, vm.host, vm.qemu.platform)


async def _require_on(vm: Vm) -> None:
    if not await vm.is_alive():
        raise RefusedError(
            f"'{vm.name}' is off",
            why="it has no QEMU",
            remedy=f"start it: vmckpt vm start {vm.name}",
        )


async def _status(vm: Vm, monitor: Monitor) -> str:
    """Raises RefusedError unless the guest runs or is paused."""
    status = await commands.query_status(monitor)
    if not status.running and status.status not in STANDING_STILL:
        raise RefusedError(
            f"'{vm.name}' neither runs nor is paused",
            why=f"its state is '{status.status}'",
            remedy=f"see what it is doing: vmckpt vm show {vm.name}",
        )
    return status.status


@asynccontextmanager
async def _operator(vm: Vm) -> AsyncIterator[Monitor]:
    connected = await vm.host.connect(vm.qemu.files.operator)
    async with session(connected, vm.name) as monitor:
        yield monitor


async def set_network(vm: Vm, *, plugged: bool) -> None:
    """Choose whether a stopped VM has a network when it next starts. RefusedError while it runs."""
    async with held(vm, "vm network") as now:
        if await now.is_alive():
            raise RefusedError(
                f"'{now.name}' runs",
                why="its NICs are connected, or not, when its QEMU starts",
                remedy=f"stop it first: vmckpt vm stop {now.name}",
            )
        nics = tuple(nic._replace(isolated=not plugged) for nic in now.spec.nics)
        await now.host.write_text(now.directory.spec, written(now.spec._replace(nics=nics)))


async def set_autostart(vm: Vm, *, on: bool) -> None:
    """Choose whether the VM starts when its host has booted; the spec goes with the VM."""
    async with held(vm, "vm autostart", whole=False, runs_again=False) as now:
        spec = now.spec._replace(autostart=on)
        await now.host.write_text(now.directory.spec, written(spec))


async def stop_vm(vm: Vm, *, force: bool, timeout_s: float) -> None:
    """Press the power button and wait for the end; with `force` end QEMU at once.

    A stopped VM is left alone. Raises TimedOutError if the guest does not power off within
    `timeout_s`: it continues to run.
    """
    async with held(vm, "vm stop", whole=False, runs_again=False) as now:
        if await now.is_alive() and force:
            await end_qemu(now.host, now.spec.ram_dir, now.qemu.files)
        elif await now.is_alive():
            await power_off(now.name, lambda: _press_button(now), now.is_alive, timeout_s)
        await remove_qemu_files(now.host, now.spec.ram_dir, now.qemu.files)


async def remove_vm(vm: Vm) -> int | None:
    """Remove a VM that is off; its disk images stay. Raises RefusedError while it runs.

    An adopted QEMU keeps running: returns its pid. Raises BusyError if it may not run its guest.
    """
    async with held(vm, "vm rm", runs_again=False) as now:
        is_alive = await now.is_alive()
        if is_alive and not now.qemu.is_foreign:
            raise RefusedError(
                f"'{now.name}' runs",
                why="only a stopped VM can be removed",
                remedy=f"stop it first: vmckpt vm stop {now.name}",
            )
        if is_alive:
            await read_again(now)  # a guest that may not run keeps its claim
        await remove_qemu_files(now.host, now.spec.ram_dir, now.qemu.files)
        await remove_home(now.host, now.directory)
        return now.qemu.process.pid if is_alive else None


@asynccontextmanager
async def held(
    vm: Vm, action: str, *, whole: bool = True, runs_again: bool = True
) -> AsyncIterator[Vm]:
    """Lock the VM; yields its current state, without leftovers of killed commands.

    Raises BusyError if another operation holds the lock, the VM has gone meanwhile, (`whole`) its
    memory is not complete yet, or (`runs_again`) it does not run and a standby may have the right
    to.
    """
    async with vm.host.lock(lock_path(vm.host.state_dir, vm.name), owner(action)):
        now = await read_again(vm, whole=whole, runs_again=runs_again)
        await tidy(now)
        yield now


async def tidy(vm: Vm) -> None:
    """Remove leftovers of killed commands, and those of a QEMU that has ended.

    The caller holds the lock, and no migration of the VM is interrupted.
    """
    await sweep(vm.host, vm.spec, vm.directory, vm.qemu.files)
    if not await vm.is_alive():
        await remove_qemu_files(vm.host, vm.spec.ram_dir, vm.qemu.files)


async def read_again(vm: Vm, *, whole: bool = True, runs_again: bool = True) -> Vm:
    """Read the VM again, as the holder of its lock.

    Raises BusyError if its home is no longer there, a migration or a restore of it was interrupted,
    its disks have overlays, (`whole`) pages of its memory are still to be loaded from a checkpoint,
    or (`runs_again`) a standby may have the right to run it, and its guest may go on from here.
    """
    if await vm.host.exists(vm.directory.journal):
        raise BusyError(
            f"a migration of '{vm.name}' was interrupted at this moment",
            why="it must be ended first",
            remedy=f"try again, which ends it: vmckpt vm show {vm.name}",
        )
    now = await read_vm(vm.host, vm.name)
    if now is None:
        raise BusyError(
            f"'{vm.name}' is no longer on {vm.host.name}",
            why="another command has moved or removed it meanwhile",
            remedy="try again: vmckpt vm list",
        )
    if await now.host.exists(now.directory.overlays_request):
        raise BusyError(
            f"what '{vm.name}' has written is not on its shared disks yet",
            why="its writes are in an overlay, from a replication with --disks shared",
            remedy=f"commit it: vmckpt replicate stop {vm.name}",
        )
    if await now.host.exists(now.directory.restoring):
        raise BusyError(
            f"a restore of '{vm.name}' was interrupted at this moment",
            why="it must be ended first: by it the VM has its disks",
            remedy=f"try again, which ends it: vmckpt vm show {vm.name}",
        )
    if whole and await now.host.exists(now.qemu.files.missing) and await now.is_alive():
        raise BusyError(
            f"the memory of '{vm.name}' is not there yet",
            why="it was restored, and the process that loads the rest of its memory has died",
            remedy=f"try again, which brings the rest: vmckpt vm show {vm.name}",
        )
    if runs_again and await now.host.exists(now.directory.claim):
        ask = "resume" if await now.is_alive() else "start"
        raise BusyError(
            f"another host may run '{vm.name}'",
            why=f"it was protected from {vm.host.name}, and how that ended is not known",
            remedy=f"vmckpt vm {ask} {vm.name}, which asks the arbiter",
        )
    return now


async def restore_is_cut_off(vm: Vm) -> bool:
    """Whether a restore, a fork or a checkpoint of the VM was interrupted."""
    has_begun = await restore_has_begun(vm)
    return has_begun and await vm.host.lock_owner(lock_path(vm.host.state_dir, vm.name)) is None


async def restore_has_begun(vm: Vm) -> bool:
    """Whether a restore, a fork or a checkpoint of the VM is in progress, or was interrupted.

    Missing memory of a QEMU that has ended does not count.
    """
    mine, files = vm.directory, vm.qemu.files
    marks = [mine.restoring, mine.saving, mine.away, files.old_blocks(0)]
    marks += [files.saved_file(in_memory=in_memory) for in_memory in (False, True)]
    begun = any(await all_of(vm.host.exists(mark) for mark in marks))
    return begun or (await vm.host.exists(files.missing) and await vm.is_alive())


async def _go_on(vm: Vm) -> Vm:
    """Finish an interrupted start, or resume a paused guest.

    Raises RefusedError if the VM runs already, CommandRefusedError if QEMU cannot resume it.
    """
    async with _operator(vm) as monitor:
        status = (await commands.query_status(monitor)).status
        if status == "prelaunch" and not vm.qemu.is_foreign:
            await plug_taps(vm.host, vm.spec, vm.qemu.files)
            await _plug(vm.host, vm.qemu.files, monitor, vm.spec.passthrough)
        elif status not in STANDING_STILL:
            raise _runs_already(vm)
        await commands.cont(monitor)
        return vm


async def _plug(
    host: Host, files: QemuDir, monitor: Monitor, devices: tuple[Passthrough, ...]
) -> None:
    if devices:  # few VMs have any: the others do without these modules
        from vmckpt.vm.passthrough.plug import plug

        await plug(host, files, monitor, devices)


def _runs_already(vm: Vm) -> RefusedError:
    return RefusedError(
        f"'{vm.name}' runs already",
        why=f"its QEMU on {vm.host.name} is pid {vm.qemu.process.pid}",
        remedy="there is nothing to do",
    )


def owner(action: str, run: str = "-", ended_by: str = "") -> Owner:
    """This process as the holder of a VM's lock."""
    return Owner(run, action, os.getpid(), time.time(), ended_by)


async def boot(
    spec: Spec, host: Host, platform: Platform, *, is_new: bool = False, starts: bool = True
) -> Vm:
    """Start a QEMU and, with `starts`, the guest; otherwise end it before the guest has run."""
    directory = vm_dir(host.state_dir, spec.name)
    files = directory.qemu(new_qemu_id())
    before = await host.read_text(directory.current)
    qemu, monitor = await start_qemu(host, spec, platform, files, incoming=False)
    try:
        await plug_taps(host, spec, files)
        await _plug(host, files, monitor, spec.passthrough)
        if not starts:
            # First: what vm.json names is resumed by the next start if it lives.
            await end_qemu(host, spec.ram_dir, files)
        await host.write_text(directory.current, qemu.to_json())
        if is_new:
            # Another operator, with a separate state directory, may assign it at the same time.
            await require_unused([spec.name], host, all_hosts())
        if starts:
            await commands.cont(monitor)
    except BaseException:
        await finish(_take_back(spec, host, files, directory.current, before))
        raise
    finally:
        # A cancellation after `cont` comes too late: the guest runs.
        await to_the_end(monitor.close())
    return Vm(spec, host, directory, qemu)


async def _take_back(
    spec: Spec, host: Host, files: QemuDir, current: Path, before: str | None
) -> None:
    """Undo a start; a VM that was at home here stays at home, stopped as before."""
    # First: on a full disk nothing else may work.
    await end_qemu(host, spec.ram_dir, files)
    if before is None:
        await host.remove(current)
    elif await host.read_text(current) != before:
        await host.write_text(current, before)


async def _press_button(vm: Vm) -> None:
    async with _operator(vm) as monitor:
        await commands.system_powerdown(monitor)
