"""One migration of a vmckpt VM from beginning to end: its locks and its checks."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vmckpt.errors import BusyError
from vmckpt.events.types import Emit
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import require_open
from vmckpt.migrate.locks import locked
from vmckpt.migrate.migration import Migration
from vmckpt.migrate.outcome.machines import ends
from vmckpt.migrate.recorded import MigrationRun, dead_mans_switch, recorded, request_of
from vmckpt.migrate.shared_link import on_the_link
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.migration.checks import preflight
from vmckpt.vm.holes import hole_pages
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import read_again, tidy
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.start import sweep

if TYPE_CHECKING:
    from vmckpt.migrate.report import MigrationReport


async def migrate(
    vm: Vm,
    destination: Host,
    options: MigrationOptions,
    emit: Emit,
    *,
    run: str | None = None,
    has_switch: bool = False,
    forecast: Mapping[str, Any] | None = None,
) -> "MigrationReport":
    """Move `vm`, running or `offline`, to `destination`; returns when the source has nothing of it.

    Every event goes to `emit` and into the run record, with the `forecast` made beforehand. `run`
    is the run's id if it has one already; `has_switch`: something else recovers the VM should this
    process die (a job's switch). Raises RefusedError (nothing was changed), BusyError,
    OperationFailedError or TimedOutError (undone: the VM is on the source), CancelledByUserError
    (likewise), VmLostError, OutcomeUnknownError (ask both ends).
    """
    request = request_of(vm.name, (vm.host, destination), options)
    async with (
        recorded(request, options, emit, run, forecast=forecast) as record,
        nullcontext() if has_switch else dead_mans_switch(vm.name, record.id),
        locked(vm.name, (vm.host,), f"migrate to {destination.name}", record.id),
    ):
        vm = await read_again(vm)
        if not options.offline:
            return await _move(vm, destination, options, record, request, spec=vm.spec)
        from vmckpt.migrate.offline import temporary_qemu

        await tidy(vm)
        async with temporary_qemu(vm) as still:
            settings = replace(options, method=Method.STOP)
            return await _move(still, destination, settings, record, request, spec=vm.spec)


async def _move(
    vm: Vm,
    destination: Host,
    options: MigrationOptions,
    record: MigrationRun,
    request: dict[str, object],
    *,
    spec: Spec,
) -> "MigrationReport":
    """Check and migrate the VM. The spec is its own, and its lock on its host is held."""
    checked = await preflight(vm, destination, options)
    checked.require(vm.name, destination.name)
    request["guest_agent"] = vm.spec.guest_agent
    request["disk_bytes"] = sum(copy.allocated_bytes for copy in checked.copies)
    request["hole_pages"] = await hole_pages(vm)
    record.begin(checked.options, checked.checks)
    limit = checked.options.bandwidth_bytes_per_s
    async with (
        locked(vm.name, (destination,), f"migrate to {destination.name}", record.id),
        on_the_link(
            vm.host, destination, record.id, limit, record.note, in_turn=options.in_turn
        ) as link,
    ):
        if options.in_turn:  # its drain marks the host first, then looks for locks
            await require_open(destination)
        there = vm_dir(destination.state_dir, vm.name)
        if await destination.exists(there.journal):
            raise BusyError(
                f"{destination.name} still has remains of an earlier migration of '{vm.name}'",
                why="it did not answer when that was undone",
                remedy=f"try again, which removes it: vmckpt vm show {vm.name}",
            )
        if await read_vm(destination, vm.name):
            raise BusyError(
                f"{destination.name} has a VM '{vm.name}' by now",
                why="another operator has put it there since this migration was checked",
                remedy="find out which one is the right one: vmckpt vm list",
            )
        await sweep(destination, spec, there, None)
        identities = await ends(vm.host, destination)
        migration = Migration(
            vm,
            destination,
            checked,
            run=record.id,
            began_s=record.began_s,
            emit=record.tell,
            link=link,
            identities=identities,
        )
        report = await migration.run()
    return record.end(report, checked.checks)
