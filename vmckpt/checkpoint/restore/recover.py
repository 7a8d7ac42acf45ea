"""Recovery after a restoring or saving process died: the VM is intact and runs."""

from contextlib import suppress

from vmckpt.checkpoint.restore.making import settle, stays_paused
from vmckpt.checkpoint.restore.old_vm import let_run
from vmckpt.checkpoint.restore.paging import see_to_pages
from vmckpt.checkpoint.whole import resume_unsaved
from vmckpt.devices.absence import recover_devices
from vmckpt.epoch.disks import forget_files, remove_leftovers
from vmckpt.epoch.output import BriefHold
from vmckpt.errors import HostDownError, OutcomeUnknownError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.scheduling import end_real_time
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner, restore_has_begun
from vmckpt.vm.paths import lock_path, vm_dir


async def undo(host: Host, name: str) -> None:
    """Remove everything of a copy or fork that was not completed.

    Raises BusyError, OperationFailedError.
    """
    if await host.exists(vm_dir(host.state_dir, name).restoring):
        async with host.lock(lock_path(host.state_dir, name), owner("checkpoint restore")):
            await settle(host, name)


async def recover(vm: Vm) -> None:
    """Finish or undo an interrupted restore or save.

    Raises BusyError, VmLostError, JobHeldError.
    """
    async with vm.host.lock(lock_path(vm.host.state_dir, vm.name), owner("checkpoint restore")):
        if not await restore_has_begun(vm):
            return  # another command has ended it meanwhile: its guest may be paused since
        is_to_run = True
        try:
            is_to_run = not await stays_paused(vm.host, vm.name)
            await settle(vm.host, vm.name)
        finally:
            # Files that cannot be settled must not keep the guest of vm.json from running.
            now = await read_vm(vm.host, vm.name)
            if now is not None:
                await _go_on(now, is_to_run=is_to_run)
        if now is not None:
            await see_to_pages(now.host, now.qemu)
            if await now.host.exists(now.directory.away):
                await recover_devices(now)


async def _go_on(vm: Vm, *, is_to_run: bool) -> None:
    """Resume its guest if it was paused for the new one, or was about to start."""
    # A QEMU that does not answer now is left for later.
    with suppress(HostDownError, OutcomeUnknownError):
        await resume_unsaved(vm)
        await _release_disks(vm)
    if is_to_run:
        await let_run(vm)


async def _release_disks(vm: Vm) -> None:
    """Remove filters that a dead checkpoint left on its disks."""
    if not await vm.host.exists(vm.qemu.files.old_blocks(0)):
        return
    if await vm.is_alive():
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            await remove_leftovers(monitor)
    forget_files(vm.qemu.files)


async def release_output(vm: Vm) -> None:
    """Release output held by a dead group checkpoint whose guard is dead too.

    Also resets its QEMU's priority.
    """
    end_real_time(vm.qemu.process.pid)
    with suppress(VmckptError):  # QEMU has ended, or another operation has its monitor
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            await BriefHold(monitor, [], 1.0).release_all()
