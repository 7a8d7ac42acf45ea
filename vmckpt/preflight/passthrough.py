"""How each of a VM's passthrough devices is migrated, and whether it can be."""

from collections.abc import AsyncIterator, Mapping, Sequence

from vmckpt.devices.contract import HookPhase
from vmckpt.devices.hook import GuestHook, HookFailedError
from vmckpt.devices.journey import Journey
from vmckpt.hosts.host import Host
from vmckpt.preflight.blockers import VFIO_REMEDY
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm
from vmckpt.vm.passthrough.cards import Card, cards_of_vm, choose, read_given, taken_on
from vmckpt.vm.passthrough.passthrough import MDEV, Passthrough, Strategy

HOW = {
    Strategy.HOOK_DETACH: "its hook saves what it holds, then it is unplugged",
    Strategy.STOP_APP: "its hook ends what uses it, which starts again afterwards; it is unplugged",
    Strategy.FAILOVER: "a virtio NIC stands in; QEMU unplugs it, and plugs in the destination's",
    Strategy.VFIO_MIGRATION: "QEMU moves its state, if the device and its driver can",
}


async def passthrough_checks(
    vm: Vm, destination: Host, *, may_postcopy: bool, is_running: bool
) -> AsyncIterator[Finding]:
    """A check for each device with what it requires; none for a VM without any."""
    devices = vm.spec.passthrough
    if not devices:
        return
    if may_postcopy:
        reason = "a device needs all of the guest's memory where it is plugged in"
        yield Finding("postcopy", REFUSE, reason, "use --method precopy or stop")
    taken, ours = await taken_on(destination), await cards_of_vm(vm.host, vm.qemu.files)
    for device in devices:
        yield await _destination(device, destination, taken, ours.get(device.id))
        if device.strategy.detaches:
            yield await _hook(vm, device, is_running=is_running)


async def _destination(
    device: Passthrough, destination: Host, taken: set[str], ours: Card | None = None
) -> Finding:
    code = f"device-{device.id}"
    how = f"{device.strategy}: {HOW[device.strategy]}"
    if device.match is None:
        return Finding(code, OK, f"{how}; QEMU on {destination.name} makes another {device.driver}")
    card, why = await choose(destination, device, taken, ours)
    if card is None:
        return Finding(code, REFUSE, f"{how}; {why}", _remedy(device, destination))
    taken |= set(card.addresses)
    if differs := _versions(device, ours, card):
        remedy = (
            f"have the same driver on both; {destination.name}'s decides when the state is there"
        )
        return Finding(code, WARN, f"{how}; {why} on {destination.name}, {differs}", remedy)
    return Finding(code, OK, f"{how}; {why} on {destination.name}")


def _remedy(device: Passthrough, destination: Host) -> str:
    if device.strategy is Strategy.VFIO_MIGRATION:
        return (
            f"bind one on both hosts to its vendor's VFIO driver for migration; where it has none: "
            f"{VFIO_REMEDY}"
        )
    if device.match and device.match.startswith(MDEV):
        return f"make one on {destination.name} (mdevctl), or choose another host"
    return f"bind a free {device.match} to vfio-pci on {destination.name}, or choose another host"


def _versions(device: Passthrough, ours: Card | None, theirs: Card) -> str:
    """How the drivers that exchange a device's state differ; empty: they do not."""
    here, there = (card.functions[0].version if card else "" for card in (ours, theirs))
    if device.strategy is not Strategy.VFIO_MIGRATION or not here or here == there:
        return ""
    return f"whose {theirs.functions[0].driver} is {there or 'of no version'}, the VM's own {here}"


async def _hook(vm: Vm, device: Passthrough, *, is_running: bool) -> Finding:
    code = f"hook-{device.id}"
    if not is_running:
        reason = "its hook runs in the guest, and the guest does not run"
        return Finding(code, REFUSE, reason, f"let it run: vmckpt vm start {vm.name}")
    hook = GuestHook(vm.host, vm.qemu.files, device, "check")
    try:
        answer = await hook.do(HookPhase.PREFLIGHT)
    except HookFailedError as exc:
        return Finding(code, REFUSE, f"{exc.what}: {exc.why}", exc.remedy)
    held = f", {format_size(answer.device_bytes)} to save" if answer.device_bytes else ""
    notes = "".join(f"; {note}" for note in answer.notes)
    return Finding(code, OK, f"{device.hook} is ready{held}{notes}")


async def free_checks(devices: Sequence[Passthrough], host: Host) -> AsyncIterator[Finding]:
    """Whether the host has a free equivalent of each device."""
    taken = await taken_on(host)
    for device in devices:
        yield await _destination(device, host, taken)


async def hook_checks(vm: Vm) -> AsyncIterator[Finding]:
    """Whether the hooks of a running VM's devices are ready; other devices are not asked."""
    for device in vm.spec.passthrough:
        if device.strategy.detaches:
            yield await _hook(vm, device, is_running=True)


async def held_bytes(vm: Vm) -> int | None:
    """Bytes of state in the devices to be unplugged, as their hooks report; None: no such device.

    Raises HookFailedError.
    """
    devices = [device for device in vm.spec.passthrough if device.strategy.detaches]
    if not devices:
        return None
    answers = [
        await GuestHook(vm.host, vm.qemu.files, device, "plan").do(HookPhase.PREFLIGHT)
        for device in devices
    ]
    return sum(answer.device_bytes for answer in answers)


def saved_whole_checks(vm: Vm) -> list[Finding]:
    """What prevents QEMU from saving the whole running VM, devices included."""
    return [
        Finding(
            f"device-{device.id}",
            REFUSE,
            f"'{device.id}' is passed through ({device.strategy}): what it holds would be missing",
            f"take it out and back in for it: vmckpt checkpoint create {vm.name}",
        )
        for device in vm.spec.passthrough
        if device.strategy.detaches
    ]


async def away_names(vm: Vm) -> frozenset[str]:
    """What is unplugged for an operation: ids of functions, and their addresses on the host."""
    return Journey(vm.spec.passthrough, "check", _ignore).ids | await detached_addresses(vm)


def _ignore(code: str, text: str) -> None:
    """Discards events."""


async def detached_addresses(vm: Vm) -> frozenset[str]:
    """The host's functions that are unplugged before QEMU is asked to migrate."""
    given: Mapping[str, Sequence[str]] = await read_given(vm.host, vm.qemu.files)
    names = [device.id for device in vm.spec.passthrough if device.strategy.detaches]
    return frozenset(address for name in names for address in given.get(name, ()))
