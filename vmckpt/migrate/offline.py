"""Migrate a VM that is off like one that is paused: with a QEMU that never runs a guest.

So disks, encryption, journal and recovery are those of every migration, and both QEMUs confirm that
they support the VM. It has almost no memory and no passed-through devices.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, VmLostError
from vmckpt.hosts.host import Host
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.migration.checks import Preflight, busy, preflight
from vmckpt.sequence.steps import to_the_end
from vmckpt.units import MIB
from vmckpt.vm.inventory import Vm
from vmckpt.vm.lifecycle import held
from vmckpt.vm.paths import IN_MEMORY, new_qemu_id
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.start import end_qemu, start_qemu

MEMORY_BYTES = 64 * MIB


def reduced_spec(spec: Spec) -> Spec:
    """The reduced spec of a QEMU for a VM that is off. Pure; its text, which moves along, is the
    VM's.
    """
    if spec.adopted is not None:
        return spec  # an adopted VM's arguments cannot be reduced
    return spec._replace(memory_bytes=MEMORY_BYTES, ram_dir=IN_MEMORY, passthrough=())


@asynccontextmanager
async def temporary_qemu(vm: Vm) -> AsyncIterator[Vm]:
    """Give the stopped `vm`, whose lock is held, a QEMU with its disks for the block.

    To others the VM is off, and the next holder of its lock ends a remaining QEMU. If the block
    leaves a journal, its recovery does. Raises RefusedError if the VM runs, and as `start_qemu`.
    """
    if await vm.is_alive():
        raise RefusedError(
            f"'{vm.name}' runs",
            why="--offline moves a VM that is off",
            remedy=f"leave out --offline, or: vmckpt vm stop {vm.name}",
        )
    files, spec = vm.directory.qemu(new_qemu_id()), reduced_spec(vm.spec)
    try:
        qemu, monitor = await start_qemu(vm.host, spec, vm.qemu.platform, files, incoming=False)
        await monitor.close()
        yield vm._replace(spec=spec, qemu=qemu)
    except VmLostError as exc:
        raise OperationFailedError(
            f"the move of '{vm.name}' was undone",
            why="the QEMU that had its disks for the move has ended",
            remedy=f"it is still off on {vm.host.name}; run the migration again",
        ) from exc
    finally:
        # A cancellation comes too late here: the block's work is done.
        await to_the_end(_end(vm, spec, files.qemu_id))


async def _end(vm: Vm, spec: Spec, qemu_id: str) -> None:
    with suppress(HostDownError):  # the next holder of the lock ends it
        if not await vm.host.exists(vm.directory.journal):
            await end_qemu(vm.host, spec.ram_dir, vm.directory.qemu(qemu_id))


async def examine_off(vm: Vm, destination: Host, options: MigrationOptions) -> Preflight:
    """All findings for and against moving a VM that is off; leaves it unchanged."""
    if (held_by := await busy(vm)) is not None:
        return Preflight((held_by,), options)
    async with held(vm, "check") as now, temporary_qemu(now) as still:
        return await preflight(still, destination, options)
