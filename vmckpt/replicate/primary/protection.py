"""The primary's loop: copy the guest, then epoch after epoch, each safe before its output leaves.

`ending.py` lists how it ends, and who has the guest then.
"""

import asyncio
import math
import select
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from vmckpt.deadlines import poll
from vmckpt.epoch.guard import STOPPED_FOR_AN_EPOCH
from vmckpt.errors import HostDownError, OutcomeUnknownError, StorageError, VmckptError
from vmckpt.hosts.processes.process import is_exiting
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, MonitorLostError
from vmckpt.replicate.channel import ALONE, GUEST_OFF, PATIENCE_S, STOPPED, YOURS, Channel
from vmckpt.replicate.control import GO_ALONE, GO_ALONE_UNLESS_TAKEN, write_last_status
from vmckpt.replicate.paths import SecondPath
from vmckpt.replicate.primary.ending import (
    LibvirtMoves,
    ProtectionEnding,
    libvirtd_is_back,
    require_at_work,
)
from vmckpt.replicate.primary.epochs import Epochs, PrimaryHandles
from vmckpt.replicate.primary.keeper import GIVEN_UP_S, RETRY_S, TermKeeper
from vmckpt.replicate.primary.stream import EpochStream, StandbyLostError
from vmckpt.replicate.request import ReplicationRequest, ServiceFiles
from vmckpt.replicate.status import COPYING, PROTECTED, ReplicaStatus, Role
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.inventory import read_home

POLL_S = 0.02
# How often to check whether the guest must stop, and QEMU's time to answer then.
STOP_POLL_S, STOP_ANSWER_S = 0.1, 1.0
# Within this time all threads of a dying QEMU have left user code.
DYING_S = 2.0
# A standby that has the term reports within this time whether it can run the guest.
TAKING_S = 20.0


class Protection:
    """One VM's protection, from the first copy to its end."""

    _moves = LibvirtMoves(None)

    def __init__(
        self,
        request: ReplicationRequest,
        files: ServiceFiles,
        handles: PrimaryHandles,
        *,
        keeper: TermKeeper,
        channel: Channel,
        replica: str,
        second: SecondPath,
        moves: LibvirtMoves,
    ) -> None:
        self._moves = moves
        self._request, self._files, self._second = request, files, second
        self._wake = asyncio.Event()
        self._handles, self._vm, self._monitor = handles, handles.vm, handles.monitor
        self._keeper, self._replica = keeper, replica
        ram_bytes = self._vm.spec.memory_bytes
        self._stream = EpochStream(channel, keeper, ram_bytes, self._wake.set, handles.mirrors.tell)
        self._epochs = Epochs(handles, self._stream, keeper, request.options)
        self._why = ""
        self._requested: ProtectionEnding | None = None
        self._is_ending = self._is_handing_over = False
        self._ending: ProtectionEnding | None = None

    async def run(self) -> None:
        """Protect it until the protection ends."""
        async with self._in_background() as background:
            try:
                with self._woken_by_its_end():
                    ending = await self._protect(background)
            except StandbyLostError as exc:
                self._why = "" if self._requested else self._how_lost(exc)
                # Ending now, even on request, would leave behind a guest whose output is held.
                ending = await to_the_end(self._go_on_alone())
            except BaseException as exc:
                # Requested end, or a bug of ours: leave no guest behind whose output is held.
                self._why = f"the service ended: {str(exc) or type(exc).__name__}"
                ending = await to_the_end(self._go_on_alone())
                await to_the_end(self._conclude(await to_the_end(self._settled(ending))))
                raise
            # A standby that has taken the term may still report over the connection that it has the
            # guest.
            ending = await to_the_end(self._settled(ending))
        await to_the_end(self._conclude(ending))

    def _how_lost(self, exc: StandbyLostError) -> str:
        is_silent = bool(self._stream.why) or self._keeper.is_silent()
        if self._stream.is_reported or not is_silent:
            return str(exc)
        return f"{exc}; {self._second.diagnosis(self._stream.heard_s)}"

    async def _settled(self, ending: ProtectionEnding) -> ProtectionEnding:
        """After a replacement: it continues here after all, or nothing of it still runs."""
        if ending is not ProtectionEnding.REPLACED:
            return ending
        if not self._keeper.had_replica:  # nothing else can have this guest
            who = self._keeper.taken_by or "another service"
            self._why = f"{who} took the term: another VM of this name uses the same arbiter"
            return await self._alone()
        if await self._has_term_back():
            return await self._go_on_here()
        await self._end_qemu()
        return ending

    async def _conclude(self, ending: ProtectionEnding) -> None:
        if ending.is_settled:
            with suppress(StorageError):  # then the VM's next start asks the arbiter, once
                await self._vm.host.remove(self._vm.directory.claim)
        self._ending = ending
        self._why = f"{ending.text} ({self._why})" if self._why else ending.text
        try:
            await write_last_status(self._vm.host, self._files, self.status())
        except StorageError:
            # If both are on one machine, a standby that took over removes these files.
            if await self._vm.host.exists(self._files.path):
                raise

    async def _end_qemu(self) -> None:
        """Make sure that QEMU has ended, however long that takes: others rely on it."""
        pid = self._vm.qemu.process.pid
        while self._qemu_lives():
            self._signal(signal.SIGKILL)
            try:
                if await self._vm.host.stop_for_good(self._vm.qemu.process):
                    return
                self._why = f"QEMU {pid} has not ended after SIGKILL: waiting for it"
            except OutcomeUnknownError as exc:
                self._why = f"waiting for the end of QEMU {pid}: {exc.why}"
            await asyncio.sleep(RETRY_S)

    def _qemu_lives(self) -> bool:
        """Whether anything of QEMU runs, or may.

        The pidfd of a killed QEMU reports its end only when its memory is free: long after that.
        If no descriptor is free for more, the pidfd alone counts: it was opened at the start.
        """
        ended = select.poll()
        ended.register(self._handles.pidfd, select.POLLIN)
        return not (ended.poll(0) or is_exiting(self._vm.qemu.process.pid))

    @asynccontextmanager
    async def _in_background(self) -> AsyncIterator[list["asyncio.Task[None]"]]:
        """Receive, send heartbeats and keep the lease, for the block."""
        work = [
            self._stream.receive(),
            self._stream.beat(),
            self._keeper.keep(),
            self._stop_without_right(),
        ]
        if (domain := self._request.domain) is not None:
            from vmckpt.replicate.domains.described import until_changed

            work.append(until_changed(self._vm.host, domain))
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_without_right(self) -> None:
        """Make sure that the guest does not run once its lease has ended; runs until cancelled.

        The guard does so too. Either may be frozen or dead; if QEMU answers neither it is killed
        then: a replica that may take over has everything that left it. What a dead guard has held
        is released as soon as it may run.
        """
        while True:
            await asyncio.sleep(STOP_POLL_S)
            if not self._keeper.must_stop():
                if not self._keeper.has_guard:
                    self._signal(signal.SIGCONT)
                continue
            try:
                status = await commands.query_status(self._monitor, STOP_ANSWER_S)
                if status.running and self._keeper.must_stop():
                    await commands.stop(self._monitor)
            except (MonitorLostError, OutcomeUnknownError, CommandRefusedError):
                if self._keeper.has_guard or not self._keeper.must_stop():
                    continue  # it holds a QEMU that does not answer
                self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it is just ending
            signal.pidfd_send_signal(self._handles.pidfd, number)

    @contextmanager
    def _woken_by_its_end(self) -> Iterator[None]:
        """For the block: wake all waiters when QEMU ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._handles.pidfd, self._wake.set)
        try:
            yield
        finally:
            loop.remove_reader(self._handles.pidfd)

    async def _protect(self, background: list["asyncio.Task[None]"]) -> ProtectionEnding:
        with self._monitor.events("SHUTDOWN") as shutdowns:
            try:
                await self._epochs.copy(self._require_wanted)
                await self._handles.output.hold()
                while self._requested is None:
                    if self._keeper.replaced.is_set():
                        return ProtectionEnding.REPLACED
                    require_at_work(background)
                    self._moves.require_none()
                    if await self._epochs.one(self._replica):
                        await self._epochs.rest(self._wake)
                if self._requested is ProtectionEnding.YOURS:
                    return await self._hand_over(background)
                return await self._stop()
            except (VmckptError, OSError) as exc:
                if not await self._is_qemus_end(exc):
                    if isinstance(exc, OSError):
                        raise
                    raise StandbyLostError(f"{exc.what}: {exc.why}") from exc
                if await libvirtd_is_back(exc, self._monitor, self._qemu_lives):
                    raise StandbyLostError(f"libvirtd ended or was restarted: {exc}") from exc
                reasons: list[Any] = [event["data"] for event in shutdowns.drain()]
                is_off = any(data["guest"] for data in reasons)
                if self._moves.has_moved():
                    self._why, is_off = "libvirt has saved or migrated it", True
                return await self._qemu_gone(is_off=is_off)

    async def _is_qemus_end(self, exc: Exception) -> bool:
        """Whether its QEMU has died, whatever was noticed first.

        A killed QEMU loses its memory, which cannot be scanned then, before its sockets are closed.
        """
        if isinstance(exc, MonitorLostError | OutcomeUnknownError):
            return True
        if isinstance(exc, HostDownError):  # the standby has died
            return False
        return await self._is_dying()

    async def _is_dying(self) -> bool:
        """Whether its QEMU has ended, or will in a moment; its last message has arrived by then."""
        await asyncio.sleep(POLL_S)
        return not await poll(
            self._qemu_lives, lambda lives: not lives, every_s=POLL_S, within_s=DYING_S
        )

    def _require_wanted(self) -> None:
        if self._requested is not None:
            raise StandbyLostError("stopped before everything was copied")

    async def _hand_over(self, background: list["asyncio.Task[None]"]) -> ProtectionEnding:
        """The standby continues the guest from its last moment here.

        A guest that QEMU has stopped (its disk is full) continues from its last epoch.
        """
        while not await self._epochs.one(self._replica, resume_guest=False):
            if self._keeper.replaced.is_set():
                return ProtectionEnding.REPLACED
            if self._requested is not ProtectionEnding.YOURS:
                return await self._stop()  # the arbiter is gone: continue here
            if self._stands_still():
                break
            require_at_work(background)
        else:
            # A standby that takes the term, and whose disk hangs, says nothing: then nothing here
            # could tell it from one that has the guest.
            await self._epochs.applied()
        receiving, self._is_handing_over = background[0], True
        await self._keeper.hand_over()
        await self._stream.end(YOURS, "as requested")
        given_up_s = time.monotonic() + TAKING_S
        while not receiving.done() and time.monotonic() < given_up_s:
            await asyncio.wait({receiving}, timeout=PATIENCE_S)
            # If QEMU has ended (its host goes down) the standby has the only copy.
            if receiving.done() or not self._qemu_lives():
                continue
            if await self._takes_back():
                return await self._go_on_here()
        return await self._handed_over()

    async def _handed_over(self) -> ProtectionEnding:
        """The standby has the guest; or it does not, and the guest continues here unchanged."""
        if not self._stream.is_taken and await self._has_term_back():
            return await self._go_on_here()
        await self._end_qemu()
        self._why = "as requested"
        return ProtectionEnding.YOURS

    async def _has_term_back(self) -> bool:
        """Whether the new holder of the term releases it in time, unable to run the guest.

        Until then the guard keeps the guest paused here. The time starts when another holder is
        first seen, because the arbiter may have been silent before. It ends as soon as the standby
        is known to have the guest, or the operator no longer wants to wait for it.
        """
        until_s = math.inf
        while time.monotonic() < until_s and self._qemu_lives():
            if self._stream.is_taken or await self._is_at_home_there() or self._keeper.is_refuted:
                return False
            if await self._takes_back():
                return True
            until_s = min(until_s, time.monotonic() + GIVEN_UP_S)
            await asyncio.sleep(RETRY_S)
        return False

    async def _takes_back(self) -> bool:
        """`TermKeeper.take_back`, until the standby has the guest, or has the only copy: QEMU has
        ended here.
        """
        taking = asyncio.ensure_future(self._keeper.take_back(self._request.is_standbys))
        while not taking.done():
            if self._stream.is_taken or not self._qemu_lives():
                taking.cancel()
                await asyncio.wait({taking})
                return False
            await asyncio.wait({taking}, timeout=RETRY_S)
        return taking.result()

    async def _is_at_home_there(self) -> bool:
        """Whether the standby certainly has the guest; on another machine only it can say so."""
        request = self._request
        return request.one_machine and await read_home(request.standby, request.vm) is not None

    async def _go_on_here(self) -> ProtectionEnding:
        self._why = f"the standby did not take the guest over: {self._stream.why or 'it is silent'}"
        return await self._alone()

    async def _alone(self) -> ProtectionEnding:
        await self._stream.end(ALONE, self._why)
        self._stream.abort()
        await self._release_guest()
        return ProtectionEnding.ALONE

    async def _qemu_gone(self, *, is_off: bool) -> ProtectionEnding:
        if is_off:
            if not await self._keeper.solo():
                return ProtectionEnding.REPLACED
            await self._stream.end(GUEST_OFF, "the guest has powered off")
            return ProtectionEnding.GUEST_OFF
        if self._may_answer_again():
            raise StandbyLostError("the primary's QEMU does not answer")
        if not self._epochs.is_safe:
            await self._keeper.solo()
            await self._stream.end(STOPPED, "the primary's QEMU died during the first copy")
            return ProtectionEnding.LOST
        return await self._dead_here("its QEMU died, or did not answer", ProtectionEnding.YOURS)

    def _may_answer_again(self) -> bool:
        """Whether QEMU is silent, not about to end, and the only one that has the guest."""
        if not (self._epochs.is_safe and self._qemu_lives()):
            return self._qemu_lives()
        return self._monitor.is_open and not self._epochs.has_standby()

    async def _dead_here(self, why: str, ending: ProtectionEnding) -> ProtectionEnding:
        """Make sure that QEMU has ended, and release the term to the standby at once."""
        await self._end_qemu()
        with suppress(VmckptError):  # then the standby waits for the lease to expire
            await self._keeper.give_up()
        await self._stream.end(YOURS, why)
        self._why = why
        return ending

    async def _stop(self) -> ProtectionEnding:
        if ending := await self._not_solo():
            return ending
        await self._stream.end(STOPPED, "as requested")
        await self._release_guest()
        return ProtectionEnding.STOPPED

    async def _go_on_alone(self) -> ProtectionEnding:
        """The standby is lost: tell the arbiter, then release the guest's output.

        A guest that is dead here belongs to the standby, if that is alive after all.
        """
        self._is_ending = True
        if self._is_handing_over:
            return await self._handed_over()
        return await self._not_solo() or await self._alone()

    async def _not_solo(self) -> ProtectionEnding | None:
        """None once no replica may take over, which the arbiter may take long to record;
        else how the protection ends: the guest is dead here, or another has its term.
        """
        solo = asyncio.ensure_future(self._keeper.solo())
        while not solo.done():
            if self._epochs.is_safe and not self._qemu_lives() and not self._moves.has_moved():
                solo.cancel()
                await asyncio.wait({solo})
                return await self._dead_here("its QEMU died", ProtectionEnding.YOURS)
            await asyncio.wait({solo}, timeout=RETRY_S)
        return None if solo.result() else ProtectionEnding.REPLACED

    async def _release_guest(self) -> None:
        """When this returns the guest runs with none of its output held, or QEMU has ended.

        A guest that QEMU itself stopped (an internal error) stays stopped.
        """
        # No replica may take over, so the guest may run whether or not the lease is renewed.
        self._keeper.free()
        self._handles.mirrors.intake.drop()
        while self._qemu_lives():
            # It is stuck, or ending; or the libvirtd that has its monitor is.
            with suppress(MonitorLostError, OutcomeUnknownError, HostDownError):
                await self._monitor.reopen()
                await self._handles.output.release_all()
                if await self._runs_by_now():
                    return
            await asyncio.sleep(RETRY_S)

    async def _runs_by_now(self) -> bool:
        """Resume the guest. True if it runs, or is stopped for a reason other than an epoch."""
        try:
            await self._handles.capture.resume()
        except CommandRefusedError:
            state = await commands.query_status(self._monitor)
            return state.status not in STOPPED_FOR_AN_EPOCH
        return True

    @property
    def is_settled(self) -> bool:
        """Whether it has ended, and the guest is here or off: no replica has it."""
        return self._ending is not None and self._ending.is_settled

    def hand_over(self) -> None:
        """Have the standby take the guest over: this host goes down (SIGTERM)."""
        if self._requested is None:
            self._requested = ProtectionEnding.YOURS
            self._wake.set()

    async def answer(self, word: str) -> ReplicaStatus:
        """Answer a request over its control socket: status, and the words that end it."""
        if word in ("stop", "failover", GO_ALONE, GO_ALONE_UNLESS_TAKEN):
            self._requested = (
                ProtectionEnding.YOURS if word == "failover" else ProtectionEnding.STOPPED
            )
            if word in (GO_ALONE, GO_ALONE_UNLESS_TAKEN):
                with suppress(StorageError):  # the guest continues, if without a next protection
                    await self._vm.host.write_text(self._vm.directory.gone_replica, self._replica)
                self._keeper.continue_alone(is_certain=word == GO_ALONE)
            self._wake.set()
            await poll(lambda: self._ending is not None, every_s=POLL_S)
        return self.status()

    def status(self) -> ReplicaStatus:
        """Its state, for people and programs."""
        options = self._request.options
        status = ReplicaStatus(
            role=Role.PRIMARY,
            vm=self._vm.name,
            run=self._request.run,
            primary=self._request.primary.name,
            standby=self._request.standby.name,
            state=self._stage(),
            ending=self._ending.name.lower() if self._ending else None,
            why=self._why or self._stands_still() or self._waits(),
            arbiter_fails=self._keeper.arbiter_fails,
            arbiter=options.arbiter,
            lease_s=options.lease_s,
            term=self._keeper.term,
            may_run=self._ending is not None or self._keeper.may_run(),
            output_commit=options.holds_output,
            epoch_ms=round(self._epochs.pace.run_s * 1e3, 1),
            epoch_is_auto=options.epoch_s is None,
            max_pause_ms=options.max_pause_s * 1e3,
            tracker=self._handles.capture.tracker,
            sent_bytes=self._stream.sent_bytes,
        )
        status = self._second.added_to(
            status,
            (self._request.primary.migration_address, self._request.standby.migration_address),
            self._stream.heard_s,
            is_lost=self._stream.is_lost,
        )
        return self._epochs.added_to(self._handles.mirrors.added_to(status))

    def _stands_still(self) -> str:
        state = self._epochs.stands_still
        return f"QEMU has stopped the guest: '{state}'" if state else ""

    def _waits(self) -> str:
        fails, taken_by = self._keeper.arbiter_fails, self._keeper.taken_by
        waits = [f"the arbiter granted the term to {taken_by}"] if taken_by else []
        return "; ".join([*waits, f"the arbiter does not answer: {fails}"] if fails else waits)

    def _stage(self) -> str:
        if self._ending is not None:
            return "ended"
        if self._is_ending:
            return "alone"
        return PROTECTED if self._epochs.is_safe else COPYING
