"""Prepare a migration's destination: a waiting QEMU, the same machine as the source's."""

from collections.abc import Collection

from vmckpt.errors import RefusedError
from vmckpt.migrate import later
from vmckpt.migrate.outcome.ends import Pair
from vmckpt.migrate.steps.encryption import disarm
from vmckpt.migrate.steps.settings import set_destination, set_source
from vmckpt.qemu.abilities import Agreement
from vmckpt.qemu.compare import GuestMachine, describe, differences
from vmckpt.sequence.steps import both
from vmckpt.vm.identity import hand_over
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Qemu
from vmckpt.vm.start import plug_taps, start_qemu


async def write_down(vm: Vm, pair: Pair) -> None:
    """Record the VM on the destination's host, with its identity and checkpoints. StorageError."""
    theirs = vm_dir(pair.destination.host.state_dir, vm.name)
    await pair.destination.host.write_text(theirs.spec, vm.spec.text)
    await hand_over(vm.host, vm.directory, pair.destination.host)
    if gone := await vm.host.read_text(vm.directory.gone_replica):
        await pair.destination.host.write_text(theirs.gone_replica, gone)


async def prepare_destination(
    vm: Vm, pair: Pair, agreement: Agreement, absent: Collection[str]
) -> Qemu:
    """Start it, apply settings to both ends, without credentials of an earlier move, and compare
    them.

    `absent` are ids of devices that are unplugged for the move. Raises RefusedError: it would be
    another machine; OperationFailedError: one keeps other settings.
    """
    qemu, ours = await both(_start(vm, pair), _meanwhile(pair, agreement, absent))
    if vm.spec.passthrough:
        from vmckpt.devices.destination import prepare_devices

        await prepare_devices(vm, pair.destination)
    await both(
        plug_taps(pair.destination.host, vm.spec, pair.destination.files),
        both(_compare(pair, ours), set_destination(pair, agreement)),
    )
    return qemu


async def _start(vm: Vm, pair: Pair) -> Qemu:
    destination = pair.destination
    qemu, monitor = await start_qemu(
        destination.host, vm.spec, vm.qemu.platform, destination.files, incoming=True
    )
    destination.adopt(monitor)
    return qemu


async def _meanwhile(pair: Pair, agreement: Agreement, absent: Collection[str]) -> GuestMachine:
    """The work that fits the time in which the destination's QEMU starts."""
    ours, _ = await both(
        _source_machine(pair, absent), both(pair.source.rescue(), _set_source(pair, agreement))
    )
    later.load_to_send()
    return ours


async def _set_source(pair: Pair, agreement: Agreement) -> None:
    await disarm(pair.source)
    await set_source(pair, agreement)


async def _source_machine(pair: Pair, absent: Collection[str]) -> GuestMachine:
    found = await describe(await pair.source.monitor())
    # Those unplugged for the move come back later.
    stay = {name: kind for name, kind in found.devices.items() if name not in absent}
    return found._replace(devices=stay)


async def _compare(pair: Pair, ours: GuestMachine) -> None:
    monitor = await pair.destination.monitor()
    _, theirs = await both(pair.destination.rescue(), describe(monitor))
    if found := differences(ours, theirs):
        raise RefusedError(
            f"the QEMU on {pair.destination.host.name} would be a different machine to the guest",
            why="; ".join(found),
            remedy="run the VM with a CPU model and machine type that are the same on both",
        )
