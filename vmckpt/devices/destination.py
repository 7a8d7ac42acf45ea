"""Prepares a VM's devices on its destination host."""

from vmckpt.devices.journey import QemuAccess
from vmckpt.vm.inventory import Vm
from vmckpt.vm.passthrough.cards import cards_of_vm
from vmckpt.vm.passthrough.plug import plug, reserve


async def prepare_devices(vm: Vm, destination: QemuAccess) -> None:
    """Reserve an equal free card on the destination for each device, and plug in those that QEMU
    moves.

    Raises RefusedError, OperationFailedError, OutcomeUnknownError.
    """
    devices = vm.spec.passthrough
    ours = await cards_of_vm(vm.host, vm.qemu.files)
    await reserve(destination.host, destination.files, devices, ours)
    moved = [device for device in devices if not device.strategy.detaches]
    await plug(destination.host, destination.files, await destination.monitor(), moved)
