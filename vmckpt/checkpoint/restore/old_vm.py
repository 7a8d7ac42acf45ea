"""The guest of a VM that is to be replaced: paused until the commit, without one as before."""

from contextlib import suppress

from vmckpt.errors import HostDownError, OutcomeUnknownError, VmckptError
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import Vm

_PAUSED = "paused"


async def is_paused(vm: Vm) -> bool:
    """Whether its guest is paused already, as by `vm pause`. A VM that is off or silent is not."""
    with suppress(VmckptError):
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            return (await commands.query_status(monitor)).status == _PAUSED
    return False


async def pause_or_kill(vm: Vm) -> None:
    """Pause the guest and keep its QEMU; a QEMU that does not answer is killed."""
    try:
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            await commands.stop(monitor)
    except (HostDownError, OutcomeUnknownError):
        await vm.host.stop_for_good(vm.qemu.process)


async def resume_old(vm: Vm, *, was_paused: bool) -> None:
    """Resume the VM that was to be replaced, unless it was paused, even if the disk is full."""
    before = vm.qemu.to_json()
    try:
        if await vm.host.read_text(vm.directory.current) != before:
            await vm.host.write_text(vm.directory.current, before)
    finally:
        if not was_paused:
            await let_run(vm)


async def let_run(vm: Vm) -> None:
    """Resume a guest that is paused for a restore."""
    with suppress(VmckptError):
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            if (await commands.query_status(monitor)).status == _PAUSED:
                await commands.cont(monitor)
