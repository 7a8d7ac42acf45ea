"""Migrate a domain that is off: libvirt moves its definition; its disks are there already."""

import asyncio
import time

from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.events.types import Emit, PhaseBegan
from vmckpt.hosts.host import Host
from vmckpt.migrate.domains.journal import DomainJournal, make_room
from vmckpt.migrate.domains.request import build
from vmckpt.migrate.domains.settle import settle_off, unknown
from vmckpt.migrate.domains.tidy import leave_on_destination, leave_on_source
from vmckpt.migrate.domains.whereabouts import DomainMove
from vmckpt.migrate.locks import locked
from vmckpt.migrate.recorded import MigrationRun, dead_mans_switch, recorded, request_of
from vmckpt.migrate.report import MigrationReport
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.domains.arrival import name_there
from vmckpt.preflight.domains.checks import DomainPreflight, require_elsewhere
from vmckpt.preflight.domains.off import preflight_off
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.domains.inventory import Domain, seen_again
from vmckpt.vm.domains.sessions import libvirtds

Ends = tuple[Host, Host]


async def move_off(
    domain: Domain, destination: Host, options: MigrationOptions, emit: Emit
) -> MigrationReport:
    """Have libvirt define the stopped domain at `destination`, and no longer here.

    Raises RefusedError (nothing was changed), BusyError, OperationFailedError (it is here),
    CancelledByUserError (likewise), OutcomeUnknownError (says what both ends reported).
    """
    require_elsewhere(domain, destination)
    ends = domain.host, destination
    async with (
        recorded(request_of(domain.name, ends, options), options, emit) as run,
        dead_mans_switch(domain.name, run.id),
        locked(domain.name, ends, f"migrate to {destination.name}", run.id),
        libvirtds(*ends) as (here, there),
    ):
        await make_room(domain.name)
        domain = await seen_again(domain, here)
        checked = await preflight_off(domain, here, there, options)
        route = checked.require(domain.name, destination.name)
        run.begin(checked.options, checked.checks)
        journal = DomainJournal(
            run=run.id,
            vm=domain.name,
            uuid=domain.uuid,
            source=domain.host.name,
            target=destination.name,
            persistent=True,
            known_to_target=checked.known_to_target,
            offline=True,
            starts_with_host=await here.starts_with_host(domain.uuid),
        )
        began_s = time.monotonic()
        run.tell(PhaseBegan(run.elapsed_s(), "transfer"))
        await journal.write()
        try:
            # It takes a moment, and cannot be cancelled.
            await to_the_end(here.migrate(domain.uuid, *build(checked.options, *route)))
        except (asyncio.CancelledError, VmckptError) as exc:
            if (meant := await to_the_end(_meaning(journal, ends, run, exc))) is not None:
                raise meant from (None if meant is exc else exc)
        took_s = time.monotonic() - began_s
        return await to_the_end(_conclude(journal, ends, run, checked, took_s))


async def _meaning(
    journal: DomainJournal, ends: Ends, run: MigrationRun, exc: BaseException
) -> BaseException | None:
    """What an error means, after cleanup; None: the domain is on the destination."""
    move, view = await settle_off(journal, ends)
    if move is DomainMove.DESTINATION_OWNS:
        return None
    if move is not DomainMove.SOURCE_OWNS:
        return await unknown(journal, move, view, ends)
    await leave_on_source(journal, ends[1], lambda text: run.note("undo-failed", text))
    if isinstance(exc, VmckptError) and not isinstance(exc, OperationFailedError):
        return OperationFailedError(exc.what, why=exc.why, remedy=exc.remedy)
    return exc


async def _conclude(
    journal: DomainJournal, ends: Ends, run: MigrationRun, checked: DomainPreflight, took_s: float
) -> MigrationReport:
    await leave_on_destination(journal, ends, lambda text: run.note("left-behind", text))
    report = MigrationReport(
        run=run.id,
        vm=name_there(journal.vm, checked.options.at_target),
        source=ends[0].name,
        target=ends[1].name,
        requested_method=checked.options.method,
        method="offline",
        encryption=checked.encryption.scheme.value,
        outcome="completed",
        total_time_s=round(run.elapsed_s(), 4),
        transfer_time_s=round(took_s, 4),
        downtime_ms=None,
        guest_downtime_ms=None,
        guest_silent_ms=None,
        heartbeats_lost=None,
        blocktime_ms=None,
        transferred_bytes=0,
        rounds=0,
        warnings=(),
        run_record="",
    )
    return run.end(report, checked.checks)
