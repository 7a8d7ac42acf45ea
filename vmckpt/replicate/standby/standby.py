"""The standby's service: follow the primary epoch by epoch, and take over when it dies."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from vmckpt.deadlines import poll
from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.scheduling import batch_priority, normal_priority
from vmckpt.hosts.remote.tls import listening, token_of
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant, SeenRecord
from vmckpt.lease.standby import StandbyMove
from vmckpt.memory.allocator import keep_freed_memory
from vmckpt.memory.ram_file import RamFile, mapped
from vmckpt.preflight.replication.memory import standby_bytes
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.channel import ALONE, GUEST_OFF, STOPPED, TAKEN, Channel
from vmckpt.replicate.control import DISMISS, TAKE_ALONE, answering, write_last_status
from vmckpt.replicate.disks.copies import StandbyFile, discard, keep, mark_as_disks, prepare
from vmckpt.replicate.disks.journal import DisksJournal, journal_of
from vmckpt.replicate.narration import narrated
from vmckpt.replicate.operator.leftovers import remove_stale_home
from vmckpt.replicate.paths import SecondPath, second_path
from vmckpt.replicate.primary.keeper import GIVEN_UP_S
from vmckpt.replicate.promised import promised
from vmckpt.replicate.recovery import give_up_term
from vmckpt.replicate.request import (
    ReplicationRequest,
    ServiceFiles,
    read_request,
    stop_command,
)
from vmckpt.replicate.standby.following import Following
from vmckpt.replicate.standby.replica import Replica, replica_in
from vmckpt.replicate.standby.takeover import TICK_S, TakeOver
from vmckpt.replicate.standby.trial import try_means
from vmckpt.replicate.standby.waiting import WaitingGuest, start_waiting
from vmckpt.replicate.status import COPYING, PROMOTED, ReplicaStatus, Role
from vmckpt.replicate.wire.beats import Sender
from vmckpt.replicate.wire.messages import Failure
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.vm.inventory import read_home
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import sweep

COME_S, CHECK_S = 60.0, 0.25


async def serve_standby(directory: Path) -> None:
    """Run the standby, from the waiting QEMU to its end or the takeover.

    Raises RefusedError, OperationFailedError, HostDownError, OSError: nothing of it is left.
    """
    keep_freed_memory()
    request, files = read_request(directory), ServiceFiles(directory)
    host, lock = request.standby, lock_path(request.standby.state_dir, request.vm)
    async with AsyncExitStack() as stack:
        action = f"standby of {request.primary.name}"
        await stack.enter_async_context(
            host.lock(lock, owner(action, request.run, stop_command(request.vm)))
        )
        if await read_home(host, request.vm):
            raise RefusedError(
                f"{host.name} has a VM '{request.vm}' already",
                why="the standby of a VM is another host",
                remedy="choose another standby, or remove the VM there",
            )
        directory_ = vm_dir(host.state_dir, request.vm)
        await host.make_dir(directory_.path)
        spec = parse_spec(request.spec, str(directory_.spec), directory_.path)
        await sweep(host, spec, directory_, None)  # left by a standby that was killed
        await host.write_text(directory_.spec, spec.text)
        if request.identity:  # it determines QEMU's user
            await host.write_text(directory_.identity, f"{request.identity}\n")
        await host.write_text(directory_.taken_over, request.run)
        abandon = [*await host.own_command(), "replica", "abandon", str(directory)]
        stack.enter_context(armed(abandon, files.recovery_log))
        copies = [
            StandbyFile(disk.on(host.state_dir), copied.size_bytes, disk.format)
            for copied in request.disks
            for disk in (spec.disks[copied.number],)
        ]
        # A shared disk is not a copy: it is neither created nor removed.
        paths = [] if request.shares_disks else [copy.path for copy in copies]
        own = [] if request.shares_disks else copies
        prepare(own, request.vm, request.run, request.identity)
        undo = stack.enter_context(ExitStack())
        undo.callback(discard, paths, request.vm, request.run)
        warm = await start_waiting(host, spec, request)
        standby = Standby(request, files, warm, paths)
        await stack.enter_async_context(narrated(standby.status, host))
        try:
            qcow2_bytes = sum(copy.size_bytes for copy in copies if copy.image_format != "raw")
            need_bytes = standby_bytes(
                spec.memory_bytes, has_disks=bool(copies), qcow2_bytes=qcow2_bytes
            )
            async with (
                promised(host, warm.qemu.files, spec, "standby", need_bytes),
                journal_of(copies, are_shared=request.shares_disks) as disks,
            ):
                with mapped(warm.qemu.files.ram(spec.ram_dir), spec.memory_bytes) as ram:
                    await standby.serve(ram, disks)
        finally:
            await to_the_end(standby.finish())
            if standby.has_the_guest:
                undo.pop_all()


class Standby:
    """One standby, from its first connection to its end."""

    def __init__(
        self,
        request: ReplicationRequest,
        files: ServiceFiles,
        warm: WaitingGuest,
        copies: Sequence[Path],
    ) -> None:
        self._request, self._files, self._warm, self._copies = request, files, warm, copies
        self.name = request.replica
        span = LeaseSpan(request.options.lease_s)
        claimant = Claimant(self.name, replica=self.name)
        self._lease = Lease(open_arbiter(request.options), request.vm, claimant, span)
        self._ended, self._why = "", ""
        self._may_have_run = self._was_dismissed = False
        self._noticed_s = self._entitled_s = 0.0
        self._took_over_s: float | None = None
        self._replica: Replica | None = None
        self._following: Following | None = None
        self._taking: TakeOver | None = None
        self._second: SecondPath | None = None
        self._requested, self._dismissed = asyncio.Event(), asyncio.Event()

    @property
    def has_the_guest(self) -> bool:
        """Whether the guest may run here: then its files must not be touched."""
        return self._may_have_run

    async def serve(self, ram: RamFile, disks: DisksJournal) -> None:
        """Follow the primary; returns when this standby has taken over, or is of no use."""
        token = token_of(self._files.path)
        came: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        left = asyncio.Event()

        async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not came.done():
                came.set_result(Channel(reader, writer, 0))
                await left.wait()

        async with (
            second_path(self._request, Sender.STANDBY, token) as second,
            answering(self._files.control, self._answer),
            await listening(self._files.path, visit) as listener,
        ):
            self._second = second
            # It takes a second for every few GiB: listen, and hear the primary, meanwhile.
            reserving = asyncio.ensure_future(self._reserve(ram))
            try:
                channel = await self._came(came)
                listener.close()  # a protection has one primary
                refusal = await channel.alive_during(asyncio.shield(reserving))
                if refusal is not None:
                    await channel.fail(refusal)
                    return
                with replica_in(ram, disks) as replica:
                    await self._follow(channel, replica, second)
            except TimeoutError:
                given_up = self._dismissed.is_set()
                late = f"the primary did not come within {COME_S:g} s"
                self._why = "its start was given up" if given_up else late
            finally:
                await finish(asyncio.wait({reserving}))  # it writes to the memory
                left.set()

    async def _came(self, came: "asyncio.Future[Channel]") -> Channel:
        """The primary, once it has connected. Raises TimeoutError."""
        dismissed = asyncio.ensure_future(self._dismissed.wait())
        either: set[asyncio.Future[Any]] = {came, dismissed}
        await asyncio.wait(either, timeout=COME_S, return_when=asyncio.FIRST_COMPLETED)
        dismissed.cancel()
        if not came.done():
            came.cancel()
            raise TimeoutError
        return came.result()

    async def finish(self) -> None:
        """In any case, leave the guest running, or nothing."""
        if self._may_have_run:
            self._ended = PROMOTED
            await self._warm.close()
        else:
            self._ended = "ended"
            if self._lease.has_requested:
                # It should have continued here and never did: the primary, if it is there, may have
                # it back.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._give_up_term(), GIVEN_UP_S)
            await self._warm.end()
            if self._was_dismissed:
                discard(self._copies, self._request.vm)
            elif self._replica and self._replica.complete:
                keep(self._copies, self._request.vm)
        await self._write_status()

    async def _give_up_term(self) -> None:
        """Release the term, whatever became of earlier requests: it is no longer this standby's.

        Tries as long as it takes. A request without an answer is waited for only while another
        holds the term: a write over our own record settles it.
        """
        while self._lease.is_in_doubt and not self._is_ours(self._lease.seen):
            with suppress(VmckptError):
                await self._lease.read()
            await asyncio.sleep(TICK_S)
        with suppress(VmckptError):
            await give_up_term(self._request)

    def _is_ours(self, seen: SeenRecord | None) -> bool:
        return seen is not None and self._request.is_standbys(seen.now.record.holder)

    async def _reserve(self, ram: RamFile) -> Failure | None:
        """Reserve memory for all of the guest from now on; returns why there is not enough."""
        try:
            await to_the_end(in_thread(ram.reserve))
        except OSError as exc:
            what = f"{self._request.standby.name} has no room for the memory of the guest"
            self._why = f"{what}: {exc.strerror}"
            return Failure("refused", what, exc.strerror or str(exc), "free memory there")
        return None

    async def _follow(self, channel: Channel, replica: Replica, second: SecondPath) -> None:
        """Receive until the primary has gone, then decide what to do."""
        primary = Following(self.name, replica, partial(try_means, self._request), second)
        self._replica, self._following = replica, primary
        request, warm = self._requested, self._warm
        taking = TakeOver(self._request, self._lease, replica, primary, request, lack=warm.lack)
        self._taking = taking
        batch_priority()  # its QEMU, which was started before, does not
        receiving = asyncio.ensure_future(primary.receive(channel))
        ended = asyncio.ensure_future(self._warm.ended())
        try:
            while True:
                await asyncio.wait(
                    {receiving, ended}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if ended.done():
                    await self._say_that_qemu_died(channel, ended.result())
                    return
                if receiving.done() and receiving.result() in (STOPPED, GUEST_OFF, ALONE):
                    self._was_dismissed = receiving.result() != ALONE
                    return
                if not taking.is_due(receiving):
                    continue
                self._noticed_s = boottime_s()
                normal_priority()
                move = await taking.settled(receiving)
                self._entitled_s = boottime_s()
                self._why = taking.why
                if move is StandbyMove.PROMOTE:
                    receiving.cancel()
                    await asyncio.wait({receiving})
                    await to_the_end(self._promote(replica, channel))
                if move is not StandbyMove.FOLLOW:
                    return
                batch_priority()
        finally:
            receiving.cancel()
            ended.cancel()
            await asyncio.wait({receiving, ended})
            channel.abort()

    async def _say_that_qemu_died(self, channel: Channel, how: str) -> None:
        self._why = f"the QEMU that waited here {how}"
        with suppress(HostDownError):
            await channel.fail(
                Failure(ALONE, "the standby can no longer take over", self._why, "-")
            )

    async def _promote(self, replica: Replica, channel: Channel) -> None:
        began_s = time.perf_counter()
        try:
            await replica.disks.applied()
            await self._warm.load(replica.device_state)
        except (OperationFailedError, StorageError) as exc:
            self._why = exc.why
            with suppress(VmckptError):  # then it is tried again at the end
                await self._lease.give_up()
            return
        if await self._was_replaced():
            self._why = "another took the term while the guest was loaded here"
            return
        # No longer copies that could be dropped.
        mark_as_disks(self._copies, self._request.vm, self._request.identity)
        self._warm.settle_here()
        self._may_have_run = True  # from here on this QEMU is never ended
        try:
            await self._warm.run()
        except OperationFailedError as exc:
            self._why = f"{exc.what}: {exc.why}; {exc.remedy}"
            return
        self._took_over_s = time.perf_counter() - began_s
        await self._warm.announce()
        with suppress(HostDownError):  # a primary that hands the guest over receives it
            await channel.fail(Failure(TAKEN, "the guest runs on the standby", "as requested", "-"))
        if self._lease.held is None:  # without the arbiter: it still lists this replica
            with suppress(StorageError):
                await self._request.standby.write_text(self._warm.directory.gone_replica, self.name)
        self._ended = PROMOTED
        self._why = f"took over from {self._request.primary.name} at epoch {replica.epoch}"
        await self._write_status()
        await self._conclude()
        request, primary = self._request, self._request.primary
        if request.one_machine:
            await remove_stale_home(primary, request.vm, request.qemu_id)
            await primary.remove(ServiceFiles.of(primary, request.vm).path)
        with suppress(StorageError):  # the guest gets the error when it next flushes
            await replica.disks.flush()

    async def _conclude(self) -> None:
        """Do what remains for a guest that runs here; what could not be done is reported."""
        try:
            await self._warm.conclude()
        except VmckptError as exc:
            self._why += f"; {exc.what}: {exc.why}; {exc.remedy}"

    async def _was_replaced(self) -> bool:
        """Whether the arbiter shows another's term, after a load that outlasted the lease.

        An operator may have taken this host for dead meanwhile. A silent arbiter stops nothing: the
        primary can no longer act.
        """
        if self._lease.held is None or boottime_s() < self._lease.held_until_s:
            return False
        with suppress(VmckptError):
            await self._lease.read()
        return self._lease.held is None

    async def _answer(self, word: str) -> ReplicaStatus:
        if word == DISMISS:
            self._dismissed.set()
        elif word in ("failover", TAKE_ALONE):
            if word == TAKE_ALONE and self._taking is not None:
                self._taking.continue_alone()
            self._requested.set()
            await poll(lambda: self._ended, every_s=TICK_S)
        return self.status()

    def status(self) -> ReplicaStatus:
        """Its state, for people and programs."""
        replica, held, primary = self._replica, self._lease.held, self._following
        status = ReplicaStatus(
            role=Role.STANDBY,
            vm=self._request.vm,
            run=self._request.run,
            primary=self._request.primary.name,
            standby=self._request.standby.name,
            state=self._ended or self._stage(),
            why=self._why or (primary.why if primary else ""),
            arbiter_fails=self._taking.arbiter_fails if self._taking else "",
            term=held.term if held else primary.term if primary else 0,
            epoch=replica.epoch if replica else 0,
            complete=bool(replica and replica.complete),
            heard_ms_ago=round((boottime_s() - primary.heard_s) * 1e3, 1) if primary else None,
            disk_bytes_applied=replica.disks.applied_bytes if replica else 0,
            received_bytes=primary.received_bytes if primary else 0,
            qemu_id=self._warm.qemu.files.qemu_id,
            primary_qemu_id=self._request.qemu_id,
            noticed_boottime_s=round(self._noticed_s, 4) if self._took_over_s else None,
            fencing_ms=_ms(self._entitled_s - self._noticed_s) if self._took_over_s else None,
            took_over_ms=_ms(self._took_over_s) if self._took_over_s else None,
        )
        if self._second is None:
            return status
        request = self._request
        return self._second.added_to(
            status,
            (request.standby.migration_address, request.primary.migration_address),
            primary.heard_s if primary else None,
            is_lost=primary is not None and primary.is_lost,
        )

    def _stage(self) -> str:
        if self._following is None or self._following.hello is None:
            return "waiting"
        return "following" if self._replica and self._replica.complete else COPYING

    async def _write_status(self) -> None:
        await write_last_status(self._request.standby, self._files, self.status())


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
