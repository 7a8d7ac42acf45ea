"""The steps of one migration, what each does, and its undo.

Modules that only later steps need are imported there, after `later` has loaded them while QEMU was
at work: each import here delays the start of a migration.
"""

import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vmckpt.devices.journey import BRING_BACK, Journey
from vmckpt.errors import (
    HostDownError,
    JobHeldError,
    OutcomeUnknownError,
    StorageError,
    TimedOutError,
    VmckptError,
    VmLostError,
)
from vmckpt.events.record import FIGURES_MISSING
from vmckpt.events.types import Emit, Note, PhaseBegan
from vmckpt.hosts.host import Host
from vmckpt.migrate.outcome.ends import End, Pair, discard, kill, with_last_lines
from vmckpt.migrate.outcome.journal import BEFORE_COMMIT, first_journal
from vmckpt.migrate.outcome.ownership import OwnershipMove
from vmckpt.migrate.shared_link import SharedLink
from vmckpt.migrate.steps.disk_files import create_files, hand_over_files
from vmckpt.migrate.steps.disks import DiskMirrors
from vmckpt.migrate.steps.downtime import GuestDowntime
from vmckpt.migrate.steps.echo import begin_for
from vmckpt.migrate.steps.encryption import TlsCredentials, arm, disarm_if_possible
from vmckpt.migrate.steps.prepare import prepare_destination, write_down
from vmckpt.migrate.steps.settings import leave_plain
from vmckpt.options.migration import Method
from vmckpt.preflight.migration.checks import Preflight
from vmckpt.preflight.migration.encryption import Scheme
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.sequence.steps import Step, UndoFailure, both, run_steps, to_the_end
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import new_qemu_id, vm_dir
from vmckpt.vm.record import Qemu

if TYPE_CHECKING:
    from vmckpt.migrate.report import MigrationReport
    from vmckpt.migrate.steps.switchover import Switchover
    from vmckpt.migrate.steps.transfer import Transfer


class Migration:
    """The steps of one migration. Each public method is one step's `do`."""

    def __init__(
        self,
        vm: Vm,
        destination: Host,
        checked: Preflight,
        *,
        run: str,
        began_s: float,
        emit: Emit,
        link: SharedLink,
        identities: tuple[str, str],
    ) -> None:
        self._link = link
        self._vm, self._destination_host, self._options = vm, destination, checked.options
        self._stops = checked.options.method is Method.STOP
        self._agreement = checked.require(vm.name, destination.name)
        self._run, self._began_s, self._emit = run, began_s, emit
        directory = vm_dir(destination.state_dir, vm.name)
        self._pair = Pair(
            End(vm.host, vm.qemu.files),
            End(destination, directory.qemu(new_qemu_id())),
            was_running=True,
            ram_dir=vm.spec.ram_dir,
        )
        qemu_id = self._pair.destination.files.qemu_id
        self._journal = first_journal(
            vm, destination, checked, run=run, target_qemu=qemu_id, ids=identities
        )
        self._encryption = checked.encryption
        self._credentials: TlsCredentials | None = None
        self._copies = checked.copies
        self._mirrors = DiskMirrors(
            self._pair,
            checked.copies,
            run=run,
            bandwidth_bytes_per_s=checked.options.bandwidth_bytes_per_s,
            write_through=checked.options.synchronous_writes,
            clock=self._elapsed_s,
            emit=emit,
            note=self._note,
        )
        self._journey = Journey(vm.spec.passthrough, run, self._note)
        self._job_held: VmckptError | None = None
        self._target_qemu: Qemu | None = None
        self._transfer: Transfer | None = None
        self._in_postcopy = self._committed = self._undo_failed_once = False
        self._downtime = GuestDowntime(destination, self._note)
        self._blocktime_ms: int | None = None
        self._transfer_began_s = self._transfer_ended_s = began_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _note(self, code: str, text: str) -> None:
        self._emit(Note(self._elapsed_s(), code, text))

    async def run(self) -> "MigrationReport":
        """All steps; see `run.migrate`."""
        steps = (
            Step("prepare", lambda: self._undoable(self.prepare()), self.undo_prepare),
            *([self._agreeing()] if self._encryption.scheme is not Scheme.UNENCRYPTED else ()),
            *([Step("turn", self._link.my_turn)] if self._options.in_turn else ()),
            *([Step("mirror", self.mirror, self._mirrors.drop)] if self._copies else ()),
            *self._journey.steps_out(self._pair.source),
            Step("transfer", self.transfer),
            Step("switchover", self.switchover, commits=True),
            Step("drain", self.drain),
            Step("verify", self.verify),
            *([Step(BRING_BACK, self.bring_back)] if self._journey.has_devices else ()),
            Step("handover", self.handover),
            Step("release", self.release),
        )
        try:
            status = await commands.query_status(await self._pair.source.monitor())
            self._pair = self._pair._replace(was_running=status.running)
            self._journal = replace(self._journal, was_running=status.running)
            await run_steps(steps, started=self._started, undo_failed=self._undo_failed)
        except VmckptError as exc:
            self._downtime.cancel()
            meant = await to_the_end(self._meaning_or_unknown(exc))
            raise meant from (None if meant is exc else exc)
        finally:
            await to_the_end(self._pair.close())
        # The VM has moved: a cancellation now must not claim otherwise.
        return await to_the_end(self._conclude())

    async def _conclude(self) -> "MigrationReport":
        try:
            if self._journal.offline:
                await discard(self._pair.destination, self._pair.ram_dir)
            await self._journal.remove((self._vm.host, self._destination_host))
        except (StorageError, HostDownError) as exc:
            self._note("journal", str(exc))
        if self._job_held:
            self._downtime.cancel()
            raise self._job_held
        return await self._report()

    async def _meaning_or_unknown(self, exc: VmckptError) -> VmckptError:
        from vmckpt.migrate.outcome.recover import unknown

        try:
            return await self._meaning(exc)
        except HostDownError:
            return await unknown(self._pair)

    async def _meaning(self, exc: VmckptError) -> VmckptError:
        """What the error means for the guest, which may have lost an end by it."""
        from vmckpt.migrate.outcome.recover import lost

        if isinstance(exc, VmLostError):
            return exc
        if not self._committed:
            is_lost = (
                not isinstance(exc, OutcomeUnknownError) and not await self._pair.source.alive()
            )
            return await lost(self._pair) if is_lost else exc
        name, where = self._vm.name, self._destination_host.name
        # After the handover it is at home there, and only there, even if its QEMU has ended.
        if await self._pair.destination.alive() or await read_vm(self._destination_host, name):
            return OutcomeUnknownError(
                f"'{name}' is on {where}, but its move is not finished: {exc.what}",
                why=exc.why,
                remedy=f"vmckpt migrate --recover {name}",
            )
        try:
            await self._settle()
        except (VmLostError, OutcomeUnknownError) as settled:
            return settled
        # The paused guest has not run anywhere since: the source still has all of it.
        await self.undo_prepare()
        return exc

    async def _started(self, step: Step) -> None:
        if step.name == "drain" and not self._in_postcopy:
            return  # nothing to wait for
        if step.name == "verify" and self._journal.offline:
            return  # nothing runs
        # At the switchover the guest is stopped, and the journal has enough already.
        if not step.commits:
            await self._write_journal(step)
        self._emit(PhaseBegan(self._elapsed_s(), step.name))

    async def _write_journal(self, step: Step) -> None:
        self._journal = replace(self._journal, step=step.name)
        for host in (self._vm.host, self._destination_host):
            try:
                await self._journal.write((host,))
            except (StorageError, HostDownError) as exc:
                if step.name in BEFORE_COMMIT:
                    raise
                # The guest may be on the destination: the journals have enough to recover.
                self._note("journal", str(exc))

    def _undo_failed(self, failure: UndoFailure) -> None:
        self._undo_failed_once = True
        self._note("undo-failed", f"undoing '{failure.step}' failed: {failure.error}")

    async def _undoable(self, work: Coroutine[Any, Any, None]) -> None:
        """Work before memory moves: whatever its outcome, the source has the guest."""
        try:
            await work
        except (OutcomeUnknownError, MonitorLostError) as exc:
            raise await with_last_lines(exc, self._pair.destination) from exc

    async def prepare(self) -> None:
        """Start the destination's QEMU, waiting, with the same guest-visible machine as the
        source's.

        Both get the same settings; every answer is checked, since a refused call leaves old
        settings.
        """
        await write_down(self._vm, self._pair)
        await create_files(self._destination_host, self._vm.name, self._run, self._copies)
        self._target_qemu = await prepare_destination(
            self._vm, self._pair, self._agreement, self._journey.absent_ids
        )

    async def undo_prepare(self) -> None:
        """Remove everything of the migration from each host that answers."""
        from vmckpt.migrate.outcome.left import forget, undo_or_leave

        await leave_plain(self._pair.source, partial(self._note, "settings"))
        # Remains of an earlier undo are left to the next command on the VM, which needs the
        # journal.
        note, needed = partial(self._note, "left"), self._undo_failed_once
        done = await undo_or_leave(self._pair, self._journal, note, may_leave=not needed)
        if done and not needed:
            await forget(self._journal, self._vm.host, self._destination_host)

    def _agreeing(self) -> Step:
        return Step("agree", lambda: self._undoable(self.agree()), self.undo_agree)

    async def agree(self) -> None:
        """Give both ends credentials, and use them."""
        self._credentials = await arm(
            self._pair.source, self._pair.destination, self._encryption, self._run
        )

    async def undo_agree(self) -> None:
        """Remove the source's credentials; the destination's go with its QEMU."""
        await disarm_if_possible(self._pair.source, partial(self._note, "tls"))

    async def mirror(self) -> None:
        """Copy local disks; from then on every write goes to both sides."""
        try:
            async with self._link.kept(self._mirrors.hold_to):
                await self._mirrors.mirror(self._credentials)
        except VmckptError as exc:
            raise await self._explained(exc) from exc

    async def transfer(self) -> None:
        """Send RAM and devices, until only the start on the destination is left."""
        from vmckpt.migrate.steps.listen import listen, uri
        from vmckpt.migrate.steps.transfer import Transfer, TransferEnding

        source = await self._pair.source.monitor()
        if self._pair.was_running:
            await self._downtime.begin(self._vm.spec.heartbeat_id, begin_for(self._vm, self._run))
        self._transfer_began_s = time.monotonic()
        try:
            port = await listen(await self._pair.destination.monitor(), self._destination_host)
            self._transfer = Transfer(
                source,
                self._options,
                self._elapsed_s,
                self._emit,
                self._note,
                disks=self._mirrors,
                switchover=self._switchover(source, port),
            )
            if self._stops:
                self._pair = self._pair._replace(stopped=self._journal.stops)
                await commands.stop(source)
            async with self._link.kept(self._transfer.hold_to):
                ending = await self._transfer.run(uri(self._destination_host, port))
            self._in_postcopy = ending is TransferEnding.POSTCOPY
            await self._attach()
        except BaseException as exc:
            # A second Ctrl-C must not undo the destination before it is known who has the guest.
            if await to_the_end(self._settle()) is not OwnershipMove.DESTINATION_OWNS:
                raise await self._explained(exc) from exc
            self._note("too-late", "it was too late to undo: the VM is on the destination")

    async def _attach(self) -> None:
        """Attach the guest's devices before it runs on the destination: without them it stays
        here.
        """
        if not self._journey.has_devices:
            return
        try:
            await self._journey.plug(self._pair.destination)
        except BaseException:
            # It has all of the guest and never ran: the source continues only once it is dead.
            await to_the_end(kill(self._pair.destination))
            raise

    def _switchover(self, source: Monitor, port: int) -> "Switchover | None":
        from vmckpt.migrate.steps.switchover import Socketed, switchover

        here = Socketed(self._vm.host, self._vm.qemu.process)
        there = Socketed(self._destination_host, self._arrived.process)
        return switchover(source, (here, there), port, self._options, self._agreement)

    async def _explained(self, exc: BaseException) -> BaseException:
        """The error with the destination's messages, if those may explain it."""
        if isinstance(exc, VmckptError) and not isinstance(exc, TimedOutError):
            return await with_last_lines(exc, self._pair.destination)
        return exc

    async def _settle(self) -> OwnershipMove:
        """Who has the guest: SOURCE_OWNS or TARGET_OWNS.

        Raises VmLostError, OutcomeUnknownError.
        """
        from vmckpt.migrate.outcome.left import forget, keep_at
        from vmckpt.migrate.outcome.recover import lost, settle_lost, unknown
        from vmckpt.migrate.outcome.settle import settle

        keep = partial(keep_at, self._journal, self._vm.host)
        move = await settle(self._pair, partial(self._note, "rescue"), keep)
        if move is OwnershipMove.LOST:
            try:
                await settle_lost(
                    self._pair, self._vm, self._journal, partial(self._note, "old-image")
                )
                await forget(self._journal, self._vm.host, self._destination_host)
            except HostDownError as exc:
                raise await unknown(self._pair) from exc
            raise await lost(self._pair)
        if move is OwnershipMove.UNKNOWN:
            raise await unknown(self._pair)
        return move

    async def switchover(self) -> None:
        """Run the destination: the commit. QEMU has said that the source cannot continue."""
        from vmckpt.migrate.steps.arrival import resume

        if self._pair.was_running:
            try:
                await resume(self._pair.destination)
            except VmckptError as exc:
                if await self._settle() is not OwnershipMove.DESTINATION_OWNS:
                    raise await with_last_lines(exc, self._pair.destination) from exc
        self._committed = True
        self._transfer_ended_s = time.monotonic()

    async def drain(self) -> None:
        """Wait until the destination no longer needs the source; in post-copy, until it has every
        page.

        Meanwhile the guest wakes up.
        """
        from vmckpt.migrate.steps.arrival import let_wake

        if self._pair.was_running:
            await both(self._drain(), let_wake())
        else:
            await self._drain()
        await self._link.leave()

    async def _drain(self) -> None:
        from vmckpt.migrate.steps.drain import drain

        if self._transfer and self._in_postcopy:
            if not await drain(self._pair, self._transfer, self._note):
                await self._settle()
            destination = await self._pair.destination.monitor()
            self._blocktime_ms = (await commands.query_migrate(destination)).blocktime_ms
            self._transfer_ended_s = time.monotonic()
        elif self._transfer:
            try:
                await self._transfer.account()
            except HostDownError as exc:
                self._note(FIGURES_MISSING, f"the last figures are missing: {exc.what}")

    @property
    def _arrived(self) -> Qemu:
        if self._target_qemu is None:
            raise OutcomeUnknownError(
                "the destination's QEMU is not known",
                why="it was not prepared",
                remedy="report this",
            )
        return self._target_qemu

    async def verify(self) -> None:
        """Check that the guest makes progress at the destination; announce it to the network.

        From here on its packets are observed from outside.
        """
        from vmckpt.migrate.steps.arrival import announce, prove_alive

        if self._pair.was_running:
            self._downtime.conclude(self._transfer_began_s, self._transfer_ended_s)
            await both(
                announce(self._pair.destination),
                prove_alive(self._pair.destination, self._arrived.process),
            )

    async def bring_back(self) -> None:
        """Resume the users of its devices; a failure does not stop the migration."""
        try:
            await self._journey.bring_back(self._pair.destination)
        except VmckptError as exc:
            name = self._vm.name
            self._job_held = JobHeldError(
                f"'{name}' is on {self._destination_host.name}, but what used its device does not "
                "go "
                f"on: {exc.what}",
                why=exc.why,
                remedy=f"{exc.remedy}; then: vmckpt device recover {name}",
            )

    async def handover(self) -> None:
        """Make the destination the VM's home."""
        from vmckpt.migrate.steps.handover import settle_on_destination

        await settle_on_destination(self._pair.destination, self._arrived, self._vm.host)

    async def release(self) -> None:
        """Remove everything of the VM from the source.

        Meanwhile the guest's clock is corrected.
        """
        await both(self._release_source(), self._tidy_destination())

    async def _tidy_destination(self) -> None:
        from vmckpt.migrate.steps.arrival import set_clock

        destination = self._pair.destination
        if self._credentials:
            await disarm_if_possible(destination, partial(self._note, "tls"))
        await leave_plain(destination, partial(self._note, "settings"))
        if self._vm.spec.guest_agent and self._pair.was_running:
            await set_clock(destination, self._note)

    async def _release_source(self) -> None:
        from vmckpt.migrate.steps.handover import release

        await hand_over_files(
            self._vm.host,
            self._destination_host,
            self._run,
            self._journal.disks,
            partial(self._note, "old-image"),
        )
        # Last: it also removes the source's journal, which names its disks.
        await release(self._pair.source, self._pair.ram_dir)

    async def _report(self) -> "MigrationReport":
        from vmckpt.migrate.report import MigrationReport

        last, total_time_s = self._transfer.last if self._transfer else None, self._elapsed_s()
        guest_silence = await self._downtime.result()
        method = "postcopy" if self._in_postcopy else "precopy"
        if self._stops:
            method = "offline" if self._options.offline else "stop"
        return MigrationReport(
            run=self._run,
            vm=self._vm.name,
            source=self._vm.host.name,
            target=self._destination_host.name,
            requested_method=self._options.method,
            method=method,
            encryption=self._encryption.scheme.value,
            outcome="completed",
            total_time_s=round(total_time_s, 4),
            transfer_time_s=round(self._transfer_ended_s - self._transfer_began_s, 4),
            downtime_ms=last.downtime_ms if last else None,
            guest_downtime_ms=guest_silence.downtime_ms,
            guest_silent_ms=guest_silence.silent_ms,
            heartbeats_lost=guest_silence.heartbeats_lost,
            blocktime_ms=self._blocktime_ms,
            transferred_bytes=last.transferred_bytes if last else 0,
            rounds=self._transfer.rounds if self._transfer else 0,
            warnings=(),
            run_record="",
            channels=self._options.requested_channels or 1,
            device_bytes=self._journey.device_bytes,
            device_out_s=self._journey.out_s,
            device_back_s=self._journey.back_s,
            guest_downtime_by=guest_silence.by,
            guest_downtime_too_short_ms=guest_silence.too_short_ms,
        )
