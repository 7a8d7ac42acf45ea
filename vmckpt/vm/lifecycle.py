"""run, start, stop and rm of a VM on one host."""

import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from vmckpt.errors import (
    BusyError,
    OperationFailedError,
    RefusedError,
    UsageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.drained import require_open
from vmckpt.hosts.inventory.inventory import all_hosts, local_host
from vmckpt.hosts.lock import Owner
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.sequence.steps import all_of, finish, to_the_end
from vmckpt.vm.argv import Platform
from vmckpt.vm.identity import identity_of
from vmckpt.vm.inventory import Vm, homes, read_vm, require_unused
from vmckpt.vm.passthrough.plug import plug
from vmckpt.vm.paths import QemuDir, VmDir, lock_path, vm_dir
from vmckpt.vm.power_off import power_off
from vmckpt.vm.probe import abilities, choose_accel
from vmckpt.vm.spec.spec import Spec, anchored, parse_spec
from vmckpt.vm.spec.spec_text import written
from vmckpt.vm.start import (
    end_qemu,
    new_qemu_id,
    plug_taps,
    remove_qemu_files,
    start_qemu,
    sweep,
)

# Runs wherever TCG does, and is the same in every QEMU, unlike "max".
TCG_CPU = "qemu64"
KVM_CPU = "host"
# Paused by a user, or by QEMU after a disk error: it can be resumed.
STANDING_STILL = ("paused", "io-error")


def read_spec(path: Path) -> Spec:
    """Read a spec; relative paths start from its directory. Raises UsageError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {path}", why=str(exc), remedy="name a spec file (TOML)"
        ) from exc
    base = path.absolute().parent
    return parse_spec(anchored(parse_spec(text, str(path), base), base), str(path), base)


async def run_vm(spec: Spec, host: Host) -> Vm:
    """Create the VM on `host` and start it; on an error nothing of it remains.

    Raises RefusedError if the inventory has a VM of that name anywhere, or the host is drained;
    BusyError if there may soon be one.
    """
    await host.require_up()
    directory = vm_dir(host.state_dir, spec.name)
    # A name is assigned under a lock, on whichever host.
    name_lock = local_host().lock(state_dir() / "names" / spec.name, owner("vm run"))
    async with name_lock, host.lock(lock_path(host.state_dir, spec.name), owner("vm run")):
        await require_open(host)  # a drain writes its mark first, then looks for locks
        if taken := await homes(spec.name, all_hosts()):
            raise RefusedError(
                f"there is a VM '{spec.name}' already",
                why=f"on host {taken[0].host.name}",
                remedy=f"choose another name, start it (`vmckpt vm start {spec.name}`), "
                "or remove it",
            )
        await require_unused([spec.name], host, all_hosts())
        await sweep(host, spec, directory, None)
        await host.make_dir(directory.path)
        created: list[Path] = []
        try:
            await host.write_text(directory.spec, spec.text)
            await identity_of(host, directory)
            await _create_disks(host, spec, created)
            return await _boot(spec, host, await settled_platform(spec, host), is_new=True)
        except BaseException:
            await finish(_undo_run(host, directory, created))
            raise


async def _undo_run(host: Host, directory: VmDir, created: Iterable[Path]) -> None:
    """Remove the new VM, and the images made for it that no other VM has begun to use."""
    from vmckpt.vm.images import used_besides

    for path in created:
        try:
            is_used = await used_besides(host, path, (f"VM {directory.path.name}",))
        except VmckptError:  # libvirtd is silent, or a VM's files are damaged
            is_used = True
        if not is_used:
            await host.remove(path)
    await host.remove(directory.path)


async def start_vm(vm: Vm) -> Vm:
    """Start a stopped VM where it is at home, or resume a paused one.

    Raises RefusedError if it runs.
    """
    async with held(vm, "vm start") as now:
        if await now.is_alive():
            return await _go_on(now)
        # "auto" values were resolved when it first ran.
        return await _boot(now.spec, now.host, now.qemu.platform)


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
    return await _boot(vm.spec, vm.host, vm.qemu.platform)


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

    An adopted QEMU keeps running: returns its pid.
    """
    async with held(vm, "vm rm", runs_again=False) as now:
        is_alive = await now.is_alive()
        if is_alive and not now.qemu.is_foreign:
            raise RefusedError(
                f"'{now.name}' runs",
                why="only a stopped VM can be removed",
                remedy=f"stop it first: vmckpt vm stop {now.name}",
            )
        await remove_qemu_files(now.host, now.spec.ram_dir, now.qemu.files)
        await now.host.remove(now.directory.path)
        return now.qemu.process.pid if is_alive else None


@asynccontextmanager
async def held(
    vm: Vm, action: str, *, whole: bool = True, runs_again: bool = True
) -> AsyncIterator[Vm]:
    """Lock the VM; yields its current state, without leftovers of killed commands.

    Raises BusyError if another operation holds the lock, the VM has gone meanwhile, (`whole`) its
    memory is not complete yet, or (`runs_again`) a standby may have the right to run it.
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
    or (`runs_again`) it is off and a standby may have the right to run it.
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
    if runs_again and await now.host.exists(now.directory.claim) and not await now.is_alive():
        raise BusyError(
            f"another host may run '{vm.name}'",
            why=f"it was protected from {vm.host.name}, and how that ended is not settled",
            remedy=f"vmckpt vm start {vm.name}, which asks the arbiter",
        )
    return now


async def restore_is_cut_off(vm: Vm) -> bool:
    """Whether a restore, a fork or a checkpoint of the VM was interrupted.

    Missing memory of a QEMU that has ended does not count.
    """
    mine, files = vm.directory, vm.qemu.files
    marks = [mine.restoring, mine.saving, mine.away, files.old_blocks(0)]
    marks += [files.saved_file(in_memory=in_memory) for in_memory in (False, True)]
    begun = any(await all_of(vm.host.exists(mark) for mark in marks))
    begun = begun or (await vm.host.exists(files.missing) and await vm.is_alive())
    return begun and await vm.host.lock_owner(lock_path(vm.host.state_dir, vm.name)) is None


async def _go_on(vm: Vm) -> Vm:
    """Finish an interrupted start, or resume a paused guest.

    Raises RefusedError if the VM runs already, CommandRefusedError if QEMU cannot resume it.
    """
    async with _operator(vm) as monitor:
        status = (await commands.query_status(monitor)).status
        if status == "prelaunch" and not vm.qemu.is_foreign:
            await plug_taps(vm.host, vm.spec, vm.qemu.files)
            await plug(vm.host, vm.qemu.files, monitor, vm.spec.passthrough)
        elif status not in STANDING_STILL:
            raise _runs_already(vm)
        await commands.cont(monitor)
        return vm


def _runs_already(vm: Vm) -> RefusedError:
    return RefusedError(
        f"'{vm.name}' runs already",
        why=f"its QEMU on {vm.host.name} is pid {vm.qemu.process.pid}",
        remedy="there is nothing to do",
    )


def owner(action: str, run: str = "-", ended_by: str = "") -> Owner:
    """This process as the holder of a VM's lock."""
    return Owner(run, action, os.getpid(), time.time(), ended_by)


async def _boot(spec: Spec, host: Host, platform: Platform, *, is_new: bool = False) -> Vm:
    directory = vm_dir(host.state_dir, spec.name)
    files = directory.qemu(new_qemu_id())
    before = await host.read_text(directory.current)
    qemu, monitor = await start_qemu(host, spec, platform, files, incoming=False)
    try:
        await plug_taps(host, spec, files)
        await plug(host, files, monitor, spec.passthrough)
        await host.write_text(directory.current, qemu.to_json())
        if is_new:
            # Another operator, with a separate state directory, may assign it at the same time.
            await require_unused([spec.name], host, all_hosts())
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


async def settled_platform(spec: Spec, host: Host) -> Platform:
    """Resolve a spec's platform on a host. Raises RefusedError if the host does not offer it."""
    offered = (await abilities(host)).machines
    if spec.machine not in offered:
        raise RefusedError(
            f"QEMU on {host.name} has no machine type '{spec.machine}'",
            why=f"it offers {', '.join(sorted(set(offered.values()), reverse=True)[:6])}, ...",
            remedy="choose one of them, or a host with a QEMU that has it",
        )
    accel, _ = await choose_accel(host, spec.accel)
    cpu = spec.cpu if spec.cpu != "auto" else (KVM_CPU if accel == "kvm" else TCG_CPU)
    return Platform(offered[spec.machine], accel, cpu)


async def _create_disks(host: Host, spec: Spec, created: list[Path]) -> None:
    """Create missing images; each path is added to `created` before the file exists."""
    for disk in spec.disks:
        path = disk.on(host.state_dir)
        if await host.exists(path):
            continue
        if disk.size_bytes is None:
            raise RefusedError(
                f"disk image {path} is not on {host.name}",
                why="and the spec gives no size to create it with",
                remedy='create it, fix the path, or add size = "10G"',
            )
        if not disk.path.is_absolute():
            await host.make_dir(path.parent)
        created.append(path)
        try:
            await create_image(host, path, disk.format, disk.size_bytes)
        except OperationFailedError:
            created.remove(path)  # it is another VM's, created meanwhile
            raise


async def create_image(host: Host, path: Path, image_format: str, size_bytes: int) -> None:
    """Create an empty disk image; nothing may exist at `path`. Raises OperationFailedError.

    It is durable on return: otherwise data that a guest flushes later could be lost with its name.
    """
    # qemu-img would follow another user's dangling symbolic link.
    done = await host.run(["sh", "-c", 'set -C; : >"$1"', "sh", str(path)])
    if done.returncode:
        raise OperationFailedError(
            f"cannot create disk image {path} on {host.name}",
            why=done.stderr.strip(),
            remedy="remove what stands there, or correct the path",
        )
    done = await host.run(
        [str(qemu_img(host)), "create", "-q", "-f", image_format, str(path), str(size_bytes)]
    )
    if not done.returncode:
        done = await host.run(["sync", "--", str(path), str(path.parent)])
    if done.returncode:
        await host.remove(path)
        raise OperationFailedError(
            f"cannot create disk image {path} on {host.name}",
            why=done.stderr.strip(),
            remedy="check the path and free space",
        )


def qemu_img(host: Host) -> Path:
    """The qemu-img that belongs to a host's QEMU."""
    return Path(host.qemu).parent / "qemu-img" if "/" in host.qemu else Path("qemu-img")


async def _press_button(vm: Vm) -> None:
    async with _operator(vm) as monitor:
        await commands.system_powerdown(monitor)
