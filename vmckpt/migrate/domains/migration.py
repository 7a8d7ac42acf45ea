"""One migration of a domain from beginning to end."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from vmckpt.errors import (
    OperationFailedError,
    VmckptError,
)
from vmckpt.events.types import Emit, PhaseBegan
from vmckpt.forecast.migrated_by import LIBVIRT
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import require_open
from vmckpt.migrate.domains.journal import DomainJournal, make_room
from vmckpt.migrate.domains.request import MigrateCall, build
from vmckpt.migrate.domains.settle import lost, settle, unknown
from vmckpt.migrate.domains.settle_lost import settle_lost
from vmckpt.migrate.domains.tidy import leave_on_destination, leave_on_source
from vmckpt.migrate.domains.transfer import DomainTransfer
from vmckpt.migrate.domains.whereabouts import DomainMove
from vmckpt.migrate.locks import locked
from vmckpt.migrate.recorded import MigrationRun, dead_mans_switch, recorded, request_of
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.shared_link import SharedLink, on_the_link
from vmckpt.migrate.steps.disk_files import MovedDisk, create_files
from vmckpt.migrate.steps.downtime import GuestDowntime
from vmckpt.migrate.steps.echo import BridgedNic, Echo, begin
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.domains.arrival import name_there
from vmckpt.preflight.domains.checks import DomainPreflight, preflight, require_elsewhere
from vmckpt.sequence.steps import both, to_the_end
from vmckpt.vm.domains.inventory import Domain, seen_again
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd, libvirtds


async def migrate(
    domain: Domain,
    destination: Host,
    options: MigrationOptions,
    emit: Emit,
    forecast: Mapping[str, Any] | None = None,
) -> MigrationReport:
    """Have libvirt move the running domain to `destination`; returns when it runs only there.

    Every event goes to `emit` and into the run record, with the `forecast` made beforehand. Raises
    RefusedError (nothing was changed), BusyError, OperationFailedError or TimedOutError (undone:
    the domain is on the source), CancelledByUserError (likewise), VmLostError, OutcomeUnknownError
    (says what both ends reported).
    """
    require_elsewhere(domain, destination)
    source, action = domain.host, f"migrate to {destination.name}"
    request = request_of(domain.name, (source, destination), options) | {"driver": LIBVIRT.driver}
    async with (
        recorded(request, options, emit, forecast=forecast) as run,
        dead_mans_switch(domain.name, run.id),
        locked(domain.name, (source, destination), action, run.id),
    ):
        if options.in_turn:  # its drain marks the host first, then looks for locks
            await require_open(destination)
        await make_room(domain.name)
        async with AsyncExitStack() as stack, libvirtds(source, destination) as (here, there):
            domain = await seen_again(domain, here)
            # The second session, for the long call, is opened during the queries.
            checked, caller = await both(
                preflight(domain, here, there, options),
                stack.enter_async_context(libvirtd(source)),
            )
            route = checked.require(domain.name, destination.name)
            call = build(checked.options, *route, checked.held_mib_per_s)
            request["disk_bytes"] = sum(copy.allocated_bytes for copy in checked.copies)
            request["held_s"] = checked.held_s
            run.begin(checked.options, checked.checks)
            starts = domain.seen.persistent and await here.starts_with_host(domain.uuid)
            migration = DomainMigration(domain, destination, checked, run, starts_with_host=starts)
            limit = checked.options.bandwidth_bytes_per_s
            turns = checked.options.in_turn
            async with on_the_link(
                source, destination, run.id, limit, run.note, in_turn=turns
            ) as link:
                report = await migration.run((here, caller), call, link)
        return run.end(report, checked.checks)


class DomainMigration:
    """One migration that has passed its checks."""

    def __init__(
        self,
        domain: Domain,
        destination: Host,
        checked: DomainPreflight,
        run: MigrationRun,
        *,
        starts_with_host: bool = False,
    ) -> None:
        self._domain, self._checked, self._run = domain, checked, run
        self._ends = (domain.host, destination)
        self._journal = DomainJournal(
            run=run.id,
            vm=domain.name,
            uuid=domain.uuid,
            source=domain.host.name,
            target=destination.name,
            persistent=domain.seen.persistent,
            disks=tuple(
                MovedDisk(str(disk.source), str(disk.target), disk.keep) for disk in checked.copies
            ),
            may_postcopy=checked.options.may_postcopy,
            known_to_target=checked.known_to_target,
            held_mib_per_s=checked.held_mib_per_s,
            max_downtime_ms=checked.options.max_downtime_ms,
            has_tpm=domain.description.has_tpm,
            starts_with_host=starts_with_host,
        )
        self._downtime = GuestDowntime(destination, run.note)
        self._began_s = self._ended_s = time.monotonic()

    async def run(
        self, sessions: tuple[Libvirtd, Libvirtd], request: MigrateCall, link: SharedLink
    ) -> MigrationReport:
        """Prepare, transfer, release; see `migrate`.

        `sessions` with the source: one to watch the migration, and one for the long call.
        """
        source, caller = sessions
        transfer = DomainTransfer(
            source,
            self._domain.uuid,
            self._checked.options,
            self._run.elapsed_s,
            self._run.tell,
            held_mib_per_s=self._checked.held_mib_per_s,
        )
        try:
            self._begin("prepare")
            await self._journal.write()
            copies = self._checked.copies
            await create_files(self._ends[1], self._domain.name, self._run.id, copies)
            if self._checked.options.in_turn:
                self._begin("turn")
                await link.my_turn()
            if self._domain.state == "running":
                guest = self._domain.description.heartbeat_id
                await self._downtime.begin(guest, self._probe(source))
            self._began_s = time.monotonic()
            async with link.kept(transfer.hold_to):
                await transfer.run(request, caller)
        except (asyncio.CancelledError, VmckptError) as exc:
            # A second Ctrl-C must not start the cleanup before it is known who has the guest.
            if (meant := await to_the_end(self._meaning(exc))) is not None:
                self._downtime.cancel()
                raise meant from (None if meant is exc else exc)
            self._run.note("too-late", "it was too late to undo: the VM is on the destination")
        self._ended_s = time.monotonic()
        self._downtime.conclude(self._began_s, self._ended_s)
        await link.leave()
        return await to_the_end(self._conclude(source, transfer))

    def _begin(self, phase: str) -> None:
        self._run.tell(PhaseBegan(self._run.elapsed_s(), phase))

    async def _meaning(self, exc: BaseException) -> BaseException | None:
        """What an error means for the guest, after cleanup; None: the guest is on the
        destination.
        """
        move, view = await settle(
            self._journal, self._ends, lambda text: self._run.note("rescue", text)
        )
        if move is DomainMove.DESTINATION_OWNS:
            return None
        if move is DomainMove.LOST:
            await settle_lost(
                self._journal, view, self._ends, lambda text: self._run.note("lost", text)
            )
            return lost(self._journal, view, self._ends)
        if move is not DomainMove.SOURCE_OWNS:
            return await unknown(self._journal, move, view, self._ends)
        await leave_on_source(
            self._journal, self._ends[1], lambda text: self._run.note("undo-failed", text)
        )
        if isinstance(exc, VmckptError) and not isinstance(exc, OperationFailedError):
            return OperationFailedError(exc.what, why=exc.why, remedy=exc.remedy)
        return exc

    async def _conclude(self, source: Libvirtd, transfer: DomainTransfer) -> MigrationReport:
        self._begin("release")
        await leave_on_destination(
            self._journal,
            self._ends,
            lambda text: self._run.note("left-behind", text),
            session=source,
        )
        total_time_s = self._run.elapsed_s()
        guest_silence, last, options = (
            await self._downtime.result(),
            transfer.last,
            self._checked.options,
        )
        method = "postcopy" if transfer.postcopy else "precopy"
        return MigrationReport(
            run=self._run.id,
            vm=name_there(self._domain.name, options.at_target),
            source=self._ends[0].name,
            target=self._ends[1].name,
            requested_method=options.method,
            method="stop" if options.method is Method.STOP else method,
            encryption=self._checked.encryption.scheme.value,
            outcome="completed",
            total_time_s=round(total_time_s, 4),
            transfer_time_s=round(transfer.took_s or self._ended_s - self._began_s, 4),
            downtime_ms=last.downtime_ms,
            guest_downtime_ms=guest_silence.downtime_ms,
            guest_silent_ms=guest_silence.silent_ms,
            heartbeats_lost=guest_silence.heartbeats_lost,
            blocktime_ms=None,
            transferred_bytes=last.transferred_bytes,
            rounds=transfer.rounds,
            warnings=(),
            run_record="",
            channels=options.requested_channels or 1,
            guest_downtime_by=guest_silence.by,
            guest_downtime_too_short_ms=guest_silence.too_short_ms,
        )

    async def _probe(self, session: Libvirtd) -> Echo | None:
        nics = list[BridgedNic]()
        for one in self._domain.description.interfaces:
            bridge = one.source if one.kind == "bridge" else None
            if one.kind == "network":
                bridge = await session.network_bridge(one.source)
            if bridge and one.mac:
                nics.append(BridgedNic(bridge, one.mac))
        return await begin(self._ends[0], self._domain.name, self._run.id, nics, None)
