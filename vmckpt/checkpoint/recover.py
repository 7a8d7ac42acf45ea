"""What is done after the death of whoever restored or saved a VM: it is whole, and it runs."""

from contextlib import suppress

from vmckpt.checkpoint.paging import see_to_pages
from vmckpt.checkpoint.restore import finish_in_place, let_run
from vmckpt.checkpoint.whole import let_go
from vmckpt.devices.absence import recover_devices
from vmckpt.epoch.output import BriefHold
from vmckpt.errors import VmckptError
from vmckpt.hosts.scheduling import real_time_is_over
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path


async def recover(vm: Vm) -> None:
    """End a restore or a saving that was cut off, whichever way it had got.

    Raises BusyError, VmLostError, JobHeldError.
    """
    async with vm.host.lock(lock_path(vm.host.state_dir, vm.name), owner("checkpoint restore")):
        await finish_in_place(vm)
        now = await read_vm(vm.host, vm.name)
        if now is not None:
            await let_go(now)
            # Whichever of the two it is: it stood still for the other, or was about to begin.
            await let_run(now)
            await see_to_pages(now.host, now.qemu)
            if await now.host.exists(now.directory.away):
                await recover_devices(now)


async def let_output_go(vm: Vm) -> None:
    """After the death of whoever took it with others, and of its guard: nothing is held.

    Nor does its QEMU come before others any more.
    """
    real_time_is_over(vm.qemu.process.pid)
    with suppress(VmckptError):  # QEMU has ended, or another operation has its monitor
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            await BriefHold(monitor, [], 1.0).let_go()
