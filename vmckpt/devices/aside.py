"""What a VM's devices are to be on a host that it is about to go to."""

from vmckpt.devices.journey import QemuAccess
from vmckpt.vm.inventory import Vm
from vmckpt.vm.passthrough.cards import cards_of_vm
from vmckpt.vm.passthrough.plug import plug, reserve


async def set_aside(vm: Vm, target: QemuAccess) -> None:
    """A free equal of each on the target is its own from now on; what QEMU moves is plugged in.

    Raises RefusedError, OperationFailedError, OutcomeUnknownError.
    """
    devices = vm.spec.passthrough
    ours = await cards_of_vm(vm.host, vm.qemu.files)
    await reserve(target.host, target.files, devices, ours)
    moved = [device for device in devices if not device.strategy.detaches]
    await plug(target.host, target.files, await target.monitor(), moved)
