"""The primary's epochs, one by one: captured, sent, safe with the standby, output released."""

import asyncio
import math
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from vmckpt.epoch.budget import Budget
from vmckpt.epoch.capture import Capture
from vmckpt.epoch.epoch import Epoch, Pages
from vmckpt.epoch.guard import STOPPED_FOR_AN_EPOCH
from vmckpt.epoch.output import HeldOutput
from vmckpt.errors import RefusedError
from vmckpt.hosts.processes.scheduling import high_priority
from vmckpt.lease.clock import boottime_s
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.options.replication import ReplicationOptions
from vmckpt.preflight.replication.memory import epoch_limit_bytes
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.replicate.channel import PATIENCE_S
from vmckpt.replicate.disks.mirrors import Mirrors
from vmckpt.replicate.primary.brake import GRACE_S, LEAST_RUN_S, SLOT_S, Brake, Writing
from vmckpt.replicate.primary.figures import PrimaryFigures
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.primary.pace import EpochPace
from vmckpt.replicate.primary.stream import EpochStream, StandbyLostError
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.replicate.wire.pages import nonzero_pages
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm

COPY_BYTES = 16 << 20
# How many epochs of the first copy may be in flight at once.
COPIES_AHEAD = 2
POLL_S, SCAN_POLL_S = 0.02, 0.005
# How often a running guest is checked for having written as much as an epoch may have, and the
# maximum share of the time that this may take: scanning a large memory is slow.
SIZE_POLL_S, SIZE_POLL_SHARE = 0.1, 0.1
# How often the guest's output is counted while it runs for longer than this.
COUNT_S = 0.05
# The protection ends if an epoch takes longer, its passes and sending included: holding output
# for so long is not worth it.
LONGEST_S = 30.0
# When an epoch takes longer than DOUBT_S, QEMU is probed: one that leaves PROBES in a row
# unanswered, each for PROBE_S, is killed.
DOUBT_S, PROBE_S, PROBES = 3.0, 1.0, 2


class PrimaryHandles(NamedTuple):
    """The primary's resources of its VM; `pidfd` belongs to its QEMU."""

    vm: Vm
    monitor: Monitor
    capture: Capture
    output: HeldOutput
    pidfd: int
    mirrors: Mirrors


class Epochs:
    """One VM's epochs. `is_safe` once a standby could continue from one of them."""

    def __init__(
        self,
        handles: PrimaryHandles,
        stream: EpochStream,
        keeper: TermKeeper,
        options: ReplicationOptions,
    ) -> None:
        self._monitor, self._capture, self._pidfd = handles.monitor, handles.capture, handles.pidfd
        self._output = handles.output
        self._stream, self._keeper, self._mirrors = stream, keeper, handles.mirrors
        self._budget = Budget(options.max_pause_s)
        self.pace = EpochPace(options.epoch_s)
        self.figures = PrimaryFigures()
        self.is_safe = False
        # The state in which the guest is stopped, if vmckpt did not stop it; "": none.
        self.stands_still = ""
        self._resumed_s = 0.0
        ram_bytes = handles.vm.spec.memory_bytes
        self._most_pages = epoch_limit_bytes(ram_bytes) // PAGE_BYTES
        has_room_for_all = self._most_pages * PAGE_BYTES > ram_bytes
        self._brake = Brake(math.inf if has_room_for_all else self._most_pages)
        self._writing = Writing()
        # Of the epoch being sent: its start, its pages, and how long the guest was held.
        self._sending_s = self._held_s = 0.0
        self._by_s = math.inf  # its deadline
        self._under_way = 0
        self._devices = b"", b""  # of the last epoch

    def added_to(self, status: ReplicaStatus) -> ReplicaStatus:
        """The status with the figures, the unslowed guest's write rate, and the link's rate.

        Both in bytes of whole pages, however few of them change; 0: not measured yet.
        """
        return replace(
            self.figures.added_to(status),
            written_bytes_per_s=round(self._writing.pages_per_s * PAGE_BYTES),
            link_bytes_per_s=round(self._brake.pages_per_s * PAGE_BYTES),
        )

    def has_standby(self) -> bool:
        """Whether a standby could take over the guest if its QEMU died.

        A host without power is silent, but its connection stays open for long.
        """
        if self._keeper.replaced.is_set():
            return True
        is_lost = bool(self._stream.why) or self._keeper.is_silent()
        return self.is_safe and not is_lost and boottime_s() - self._stream.heard_s <= PATIENCE_S

    async def copy(self, require_wanted: Callable[[], None]) -> None:
        """Copy all of its disks and memory, in epochs without devices, while the guest runs."""

        under_way, safe_pages = deque[int](), 0

        async def take(pages: Pages) -> None:
            nonlocal safe_pages
            require_wanted()
            number = await self._stream.commit(pages, writes=intake.cut())
            await self._stream.acknowledged(number - COPIES_AHEAD)
            # Zero pages cost a link nothing, and the link has not taken what is still in flight.
            under_way.append(nonzero_pages(pages.data))
            if len(under_way) > COPIES_AHEAD:
                safe_pages += under_way.popleft()
            self._brake.took(safe_pages, time.monotonic() - copies_s)
            if pages.count and self._writing.is_due(began_s := time.monotonic()):
                dirty = self._capture.dirty_pages()
                self._writing.found(dirty, began_s, time.monotonic())

        intake, copies_s = self._mirrors.intake, 0.0
        while not await self._mirrors.are_copied():
            await intake.waits_for(POLL_S)
            await take(Pages((), b""))
        copies_s = time.monotonic()
        await self._capture.everything(take, COPY_BYTES, intake.open)
        # Then copy what was written meanwhile, for as long as that shrinks: the guest's output is
        # held from the first epoch on, so that epoch should be short.
        self._begin_sending(math.inf)
        with suppress(RefusedError):  # it does not run
            await self._passes(require_wanted)
            async with self._braked():
                await self._stream.acknowledged(self._stream.next_number - 1)

    def _begin_sending(self, for_s: float) -> None:
        self._sending_s, self._held_s, self._under_way = time.monotonic(), 0.0, 0
        self._by_s = self._sending_s + for_s

    async def one(self, replica: str, *, resume_guest: bool = True) -> bool:
        """Take one epoch, from its first page to the release of its output.

        False if there is none: the guest is paused, or another host has its term. Raises
        StandbyLostError, MonitorLostError, OutcomeUnknownError.
        """
        if not self._keeper.may_run():
            await asyncio.sleep(POLL_S)
            return False
        try:
            epoch, captured_s = await self._captured(resume_guest=resume_guest)
        except RefusedError:  # it does not run
            with self._killed_if_stuck():
                await self._let_run()
            return False
        self.stands_still = ""
        self._learn(epoch)
        async with self._braked():
            await self._safe(epoch.number)
        took_s = time.monotonic() - self._sending_s
        self._brake.took(self._under_way, took_s)
        self.figures.slowed(self._held_s / took_s)
        self.figures.safe(epoch.number, captured_s)
        if not self.is_safe:
            if not await self._keeper.in_sync(replica):
                return False
            self.is_safe = True
        if self._keeper.may_release(epoch.number):
            # A guest that was just reset keeps QEMU until its disk writes are done.
            with self._mirrors.intake.open():
                await self._capture.release()
        return True

    async def applied(self) -> None:
        """After an epoch whose guest stays paused: return when the standby has applied its disk
        writes, and not only received them. Raises StandbyLostError.

        It acknowledges no epoch before those of earlier ones are applied.
        """
        if self._mirrors.has_disks:
            self._begin_sending(LONGEST_S)
            async with self._in_time():
                number = await self._stream.commit(Pages((), b""), self._devices)
            await self._safe(number)

    async def _safe(self, number: int) -> None:
        """Return when the standby has the epoch. Raises StandbyLostError."""
        async with self._in_time():
            await self._stream.acknowledged(number)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """For the block, with an epoch in flight. Raises StandbyLostError: it took too long."""
        left_s = max(0.0, self._by_s - time.monotonic())
        timer = asyncio.timeout(None if left_s == math.inf else left_s)
        try:
            async with timer:
                yield
        except TimeoutError as exc:
            if not timer.expired():
                raise
            raise _too_long() from exc

    async def rest(self, wake: asyncio.Event) -> None:
        """Let the guest run until the next epoch, or `wake`; its writes or its output may call for
        one earlier.
        """
        until_s, intake = self._resumed_s + self.pace.run_s, self._mirrors.intake
        size_at_s = time.monotonic() + SIZE_POLL_S
        while (left_s := until_s - time.monotonic()) > COUNT_S:
            if await self._output.is_filling():
                return
            if (began_s := time.monotonic()) >= size_at_s:
                # So that the epoch's last part, which is copied in its pause, is no more than half.
                if self._capture.dirty_pages() > self._most_pages // 2:
                    return
                look_s = (time.monotonic() - began_s) / SIZE_POLL_SHARE
                size_at_s = time.monotonic() + SIZE_POLL_S + look_s
            await intake.waits_for(COUNT_S, wake)
            if wake.is_set() or intake.is_early.is_set():
                return
        await intake.waits_for(max(0.0, left_s), wake)

    async def _captured(self, *, resume_guest: bool) -> tuple[Epoch, float]:
        """Capture and send an epoch; returns it, and when its pause began."""
        intake = self._mirrors.intake
        self._begin_sending(LONGEST_S)
        async with self._in_time():
            await self._stream.disks(intake.cut())
        early, pauses = await self._passes()
        self._require_room(early)
        captured_s = time.monotonic()
        with self._killed_if_stuck(), intake.open(), high_priority():
            epoch = await self._capture.epoch(
                self._stream.next_number,
                resume_guest=resume_guest,
                at_stop=self._mirrors.end_epoch,
            )
        self._resumed_s = time.monotonic()
        self._under_way = early + epoch.pages.count
        self._devices = epoch.device_base, epoch.device_state
        async with self._in_time(), self._braked():
            await self._stream.commit(epoch.pages, self._devices, self._mirrors.ended())
        return replace(epoch, early_pages=early, early_pauses_s=tuple(pauses)), captured_s

    async def _passes(
        self, require_wanted: Callable[[], None] | None = None
    ) -> tuple[int, list[float]]:
        """Send what was written, in passes while the guest runs; returns pages and pauses."""
        intake, early, pauses = self._mirrors.intake, 0, list[float]()
        while self._wants_pass(early):
            with self._killed_if_stuck(), intake.open(), high_priority():
                spans, pause_s = await self._capture.early()
            if pause_s is not None:
                pauses.append(pause_s)
            async with self._in_time(), self._braked():
                for pages in self._capture.copies(spans, COPY_BYTES):
                    if require_wanted is not None:
                        require_wanted()
                    early += pages.count
                    if self.is_safe:
                        await self._stream.pages(pages)
                    else:  # no complete epoch yet: nothing has to wait for the end of this one
                        number = await self._stream.commit(pages)
                        await self._stream.acknowledged(number - COPIES_AHEAD)
                    self._under_way = early
        return early, pauses

    def _wants_pass(self, early: int) -> bool:
        """Whether to copy more while the guest runs: not if the rest would not fit then."""
        dirty = self._capture.dirty_pages()
        has_room = not self.is_safe or early + 2 * dirty <= self._most_pages
        return has_room and self._budget.wants_pass(dirty)

    def _require_room(self, early: int) -> None:
        """Require that the epoch fits the standby's memory for it. Raises StandbyLostError."""
        pages = self._capture.dirty_pages() + (early if self.is_safe else 0)
        if pages > self._most_pages:
            raise StandbyLostError(
                f"an epoch would have {format_size(pages * PAGE_BYTES)}, and the standby has "
                f"memory for {format_size(self._most_pages * PAGE_BYTES)}: the guest writes faster "
                "than the link transfers, although it was throttled"
            )

    @contextmanager
    def _killed_if_stuck(self) -> Iterator[None]:
        """For the block: kill a QEMU that does not answer for too long; the standby takes over.

        Only its silence counts, not the time for copying, and only while there is a standby that
        could take over.
        """
        loop, probing = asyncio.get_running_loop(), list["asyncio.Task[None]"]()
        timer = None
        if self.is_safe:
            timer = loop.call_later(
                DOUBT_S, lambda: probing.append(asyncio.ensure_future(self._kill_when_silent()))
            )
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            for task in probing:
                task.cancel()

    async def _kill_when_silent(self) -> None:
        silences = 0
        while silences < PROBES:
            try:
                await commands.query_status(self._monitor, PROBE_S)
                silences = 0
            except MonitorLostError:
                silences += 1
            if not self.has_standby():
                silences = 0  # no standby could take over
            await asyncio.sleep(POLL_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    @asynccontextmanager
    async def _braked(self) -> AsyncIterator[None]:
        """For the block, in which an epoch is in flight: limit what the guest writes to what can
        follow.

        It runs again at the block's end.
        """
        slowing, over = list["asyncio.Task[None]"](), asyncio.Event()
        grace_s = max(0.0, self._sending_s + GRACE_S - time.monotonic())
        timer = asyncio.get_running_loop().call_later(
            grace_s, lambda: slowing.append(asyncio.ensure_future(self._slow(over)))
        )
        try:
            yield
        finally:
            timer.cancel()
            over.set()
            for task in slowing:
                task.cancel()
            if slowing:  # the next epoch also meets the error of a QEMU that has died
                await to_the_end(_ended(slowing))

    async def _slow(self, over: asyncio.Event) -> None:
        """Stop the guest for part of each slot while it writes, or sends, too much.

        Ends at `over`, even if the cancellation that comes with it is lost.
        """
        while not over.is_set():
            began_s = time.monotonic()
            takes = self._brake.takes_pages_per_s(self._under_way, began_s - self._sending_s)
            dirty = self._capture.dirty_pages()
            # Scanning a large memory is slow: it must not take all of the time.
            poll_s = max(SCAN_POLL_S, 4 * (time.monotonic() - began_s))
            is_filling = await self._output.is_filling()
            if is_filling or self._brake.is_due(dirty, takes):
                runs_s = time.monotonic()
                most = 0 if is_filling else dirty + self._brake.allowance(takes)
                await asyncio.sleep(LEAST_RUN_S)
                await self._until_written(most, began_s + SLOT_S, poll_s)
                written = self._capture.dirty_pages() - dirty
                ran_s = time.monotonic() - runs_s
                owed_s = SLOT_S if is_filling else self._brake.owed_s(written, ran_s, takes)
                await self._make_up(owed_s, over)
            else:
                await asyncio.sleep(poll_s)

    async def _until_written(self, pages: int | float, until_s: float, poll_s: float) -> None:
        while time.monotonic() < until_s and self._capture.dirty_pages() < pages:  # noqa: ASYNC110
            await asyncio.sleep(poll_s)

    async def _make_up(self, owed_s: float, over: asyncio.Event) -> None:
        """Stop the guest for most of this time, unless `over` comes first."""
        until_s = time.monotonic() + owed_s
        while (left_s := until_s - time.monotonic()) >= SCAN_POLL_S and not over.is_set():
            await self._hold(min(left_s, SLOT_S - LEAST_RUN_S))
            await asyncio.sleep(LEAST_RUN_S)

    async def _hold(self, for_s: float) -> None:
        """Stop the guest for this time, if it runs and that is worthwhile.

        Not if its disk writes wait already: each stop would let more of them through.
        """
        intake = self._mirrors.intake
        if for_s < SCAN_POLL_S or intake.is_full:
            return
        if not (await commands.query_status(self._monitor)).running:
            return
        began_s = time.monotonic()
        try:
            # Until it has answered, however this ends: QEMU waits for the guest's writes, and they
            # would wait for an epoch that comes after this.
            with intake.open():
                await finish(commands.stop(self._monitor))
            await asyncio.sleep(for_s)
        finally:
            if self._keeper.may_run():
                # A cancellation that arrives meanwhile is raised afterwards.
                await finish(commands.cont(self._monitor))
            self._held_s += time.monotonic() - began_s

    def _learn(self, epoch: Epoch) -> None:
        pause = epoch.pause
        self._budget.paused(epoch.pages.count, pause.total_s, pause.copy_s)
        self.pace.paused(pause.total_s)
        self.figures.taken(epoch)

    async def _let_run(self) -> None:
        """The guest is paused: resume it if the guard paused it and it may run."""
        state = await commands.query_status(self._monitor)
        is_stuck = not state.running and state.status not in STOPPED_FOR_AN_EPOCH
        self.stands_still = state.status if is_stuck else ""
        if self._keeper.may_run() and not state.running and not is_stuck:
            await self._capture.resume()
        await asyncio.sleep(POLL_S)


def _too_long() -> StandbyLostError:
    return StandbyLostError(
        f"an epoch has been on its way for {LONGEST_S:g} s: the guest writes faster than the link "
        "transfers, although it was throttled"
    )


async def _ended(tasks: Iterable["asyncio.Task[None]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
