"""The primary's epochs, one by one: each taken, on its way, safe with the standby, let out."""

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
from vmckpt.hosts.processes.scheduling import prompt
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
# Epochs of the first copy that may be under way at once.
COPIES_AHEAD = 2
POLL_S, SCAN_POLL_S = 0.02, 0.005
# How often a guest that runs is looked at for having written as much as an epoch may have, and for
# which part of the time at most: a scan of much memory takes its time.
SIZE_POLL_S, SIZE_POLL_SHARE = 0.1, 0.1
# How often it is seen how much the guest sends, while it runs for longer than this.
COUNT_S = 0.05
# A guest whose epochs take longer, passes and the first one included, is not worth its output's
# being held so long.
LONGEST_S = 30.0
# When an epoch takes longer than DOUBT_S, QEMU is probed: one that leaves PROBES in a row
# unanswered, each for PROBE_S, is killed.
DOUBT_S, PROBE_S, PROBES = 3.0, 1.0, 2


class Grip(NamedTuple):
    """What the primary has of its VM; `pidfd` is of its QEMU."""

    vm: Vm
    monitor: Monitor
    capture: Capture
    output: HeldOutput
    pidfd: int
    mirrors: Mirrors


class Epochs:
    """One VM's epochs. `is_safe` once a standby could go on from one of them."""

    def __init__(
        self, grip: Grip, stream: EpochStream, keeper: TermKeeper, options: ReplicationOptions
    ) -> None:
        self._monitor, self._capture, self._pidfd = grip.monitor, grip.capture, grip.pidfd
        self._output = grip.output
        self._stream, self._keeper, self._mirrors = stream, keeper, grip.mirrors
        self._budget = Budget(options.max_pause_s)
        self.pace = EpochPace(options.epoch_s)
        self.figures = PrimaryFigures()
        self.is_safe = False
        # The state in which the guest is stopped, though vmckpt did not stop it; "": none.
        self.stands_still = ""
        self._resumed_s = 0.0
        ram_bytes = grip.vm.spec.memory_bytes
        self._most_pages = epoch_limit_bytes(ram_bytes) // PAGE_BYTES
        has_room_for_all = self._most_pages * PAGE_BYTES > ram_bytes
        self._brake = Brake(math.inf if has_room_for_all else self._most_pages)
        self._writing = Writing()
        # Of the epoch that is being sent: since when, how many pages, how long the guest was held.
        self._sending_s = self._held_s = 0.0
        self._by_s = math.inf  # when it is to be safe
        self._under_way = 0

    def added_to(self, status: ReplicaStatus) -> ReplicaStatus:
        """The status with the figures, how fast the guest writes unslowed, and what the link takes.

        Both in bytes of whole pages, however few of them change; 0: not seen yet.
        """
        return replace(
            self.figures.added_to(status),
            written_bytes_per_s=round(self._writing.pages_per_s * PAGE_BYTES),
            link_bytes_per_s=round(self._brake.pages_per_s * PAGE_BYTES),
        )

    def has_standby(self) -> bool:
        """Whether a standby could take over the guest if its QEMU died.

        A host without power is silent, and its connection stays open for long.
        """
        if self._keeper.replaced.is_set():
            return True
        is_lost = bool(self._stream.why) or self._keeper.is_silent()
        return self.is_safe and not is_lost and boottime_s() - self._stream.heard_s <= PATIENCE_S

    async def copy(self, require_wanted: Callable[[], None]) -> None:
        """All of its disks and its memory, in epochs without devices, while the guest runs."""

        under_way, safe_pages = deque[int](), 0

        async def take(pages: Pages) -> None:
            nonlocal safe_pages
            require_wanted()
            number = await self._stream.commit(pages, writes=intake.cut())
            await self._stream.acknowledged(number - COPIES_AHEAD)
            # Zero pages cost a link nothing, and what is under way it has not taken yet.
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
        await self._capture.everything(take, COPY_BYTES)
        # And what was written meanwhile, as far as that gets fewer: the guest's output is held from
        # the first epoch on, which is to be a short one.
        self._begin_sending(math.inf)
        with suppress(RefusedError):  # it does not run
            await self._passes(require_wanted)
            async with self._braked():
                await self._stream.acknowledged(self._stream.next_number - 1)

    def _begin_sending(self, for_s: float) -> None:
        self._sending_s, self._held_s, self._under_way = time.monotonic(), 0.0, 0
        self._by_s = self._sending_s + for_s

    async def one(self, replica: str, *, resume_guest: bool = True) -> bool:
        """An epoch, from its first page to the release of its output.

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
            await self._capture.release()
        return True

    async def _safe(self, number: int) -> None:
        """Return when the standby has the epoch. Raises StandbyLostError."""
        async with self._in_time():
            await self._stream.acknowledged(number)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """For the block, in which an epoch is on its way. Raises StandbyLostError: for too long."""
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
        """Let the guest run until the next epoch, or `wake`; what it writes may call for one, and
        what it sends.
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
        """An epoch that is on its way, and when its pause began."""
        intake = self._mirrors.intake
        self._begin_sending(LONGEST_S)
        async with self._in_time():
            await self._stream.disks(intake.cut())
        early, pauses = await self._passes()
        self._require_room(early)
        captured_s = time.monotonic()
        with self._killed_if_stuck(), intake.open(), prompt():
            epoch = await self._capture.epoch(
                self._stream.next_number,
                resume_guest=resume_guest,
                at_stop=self._mirrors.end_epoch,
            )
        self._resumed_s = time.monotonic()
        self._under_way = early + epoch.pages.count
        devices = epoch.device_base, epoch.device_state
        async with self._in_time(), self._braked():
            await self._stream.commit(epoch.pages, devices, self._mirrors.ended())
        return replace(epoch, early_pages=early, early_pauses_s=tuple(pauses)), captured_s

    async def _passes(
        self, require_wanted: Callable[[], None] | None = None
    ) -> tuple[int, list[float]]:
        """What was written, sent while the guest runs: how many pages, in which pauses."""
        intake, early, pauses = self._mirrors.intake, 0, list[float]()
        while self._wants_pass(early):
            with self._killed_if_stuck(), intake.open(), prompt():
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
                    else:  # there is no whole epoch yet: nothing has to wait for this one's end
                        number = await self._stream.commit(pages)
                        await self._stream.acknowledged(number - COPIES_AHEAD)
                    self._under_way = early
        return early, pauses

    def _wants_pass(self, early: int) -> bool:
        """Whether to copy more while the guest runs: not what would leave no room for the rest."""
        dirty = self._capture.dirty_pages()
        has_room = not self.is_safe or early + 2 * dirty <= self._most_pages
        return has_room and self._budget.wants_pass(dirty)

    def _require_room(self, early: int) -> None:
        """The epoch is no more than the standby has memory for. Raises StandbyLostError."""
        pages = self._capture.dirty_pages() + (early if self.is_safe else 0)
        if pages > self._most_pages:
            raise StandbyLostError(
                f"an epoch would have {format_size(pages * PAGE_BYTES)}, and the standby has "
                f"memory for {format_size(self._most_pages * PAGE_BYTES)}: the guest writes faster "
                "than the link takes, though it was slowed"
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
        """For the block, in which an epoch is on its way, the guest writes no more than can follow.

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
            if slowing:  # what it met of a QEMU that has died the next epoch meets too
                await to_the_end(_ended(slowing))

    async def _slow(self, over: asyncio.Event) -> None:
        """Stop the guest for a part of each slot while it writes, or sends, too much.

        Ends at `over`, whatever becomes of the cancellation that comes with it.
        """
        while not over.is_set():
            began_s = time.monotonic()
            takes = self._brake.takes_pages_per_s(self._under_way, began_s - self._sending_s)
            dirty = self._capture.dirty_pages()
            # A scan of much memory takes its time: it is not to be all that is done.
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
        """Stop the guest for most of so long, unless it is `over` before."""
        until_s = time.monotonic() + owed_s
        while (left_s := until_s - time.monotonic()) >= SCAN_POLL_S and not over.is_set():
            await self._hold(min(left_s, SLOT_S - LEAST_RUN_S))
            await asyncio.sleep(LEAST_RUN_S)

    async def _hold(self, for_s: float) -> None:
        """Stop the guest for so long, if it runs and that is worth it."""
        if for_s < SCAN_POLL_S or not (await commands.query_status(self._monitor)).running:
            return
        began_s = time.monotonic()
        try:
            await commands.stop(self._monitor)
            await asyncio.sleep(for_s)
        finally:
            if self._keeper.may_run():
                # A cancellation that comes meanwhile is let through afterwards.
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
        "takes, though it was slowed"
    )


async def _ended(tasks: Iterable["asyncio.Task[None]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
