"""The current state of a VM's passthrough devices."""

from typing import NamedTuple

from vmckpt.qemu import hotplug
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import Vm
from vmckpt.vm.passthrough.cards import read_given


class DeviceRow(NamedTuple):
    """One device. `state` is plugged, unplugged or stopped."""

    id: str
    what: str
    strategy: str
    hook: str | None
    state: str
    addresses: tuple[str, ...]


async def device_rows(vm: Vm) -> list[DeviceRow]:
    """All devices of the VM. Raises HostDownError."""
    there: frozenset[str] | None = None
    if vm.spec.passthrough and await vm.is_alive():
        async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
            there = await hotplug.plugged(monitor)
    given = await read_given(vm.host, vm.qemu.files) if there is not None else {}
    return [
        DeviceRow(
            device.id,
            device.match or device.driver,
            device.strategy.value,
            device.hook,
            _state(device.id, there),
            tuple(given.get(device.id, ())),
        )
        for device in vm.spec.passthrough
    ]


def _state(name: str, there: frozenset[str] | None) -> str:
    if there is None:
        return "stopped"
    return "plugged" if name in there else "unplugged"
