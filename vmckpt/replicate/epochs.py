"""The primary's epochs, one by one: each taken, on its way, safe with the standby, let out."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from vmckpt.epoch.budget import Budget
from vmckpt.epoch.capture import Capture
from vmckpt.epoch.epoch import Epoch, Pages
from vmckpt.epoch.guard import STOPPED_FOR_AN_EPOCH
from vmckpt.epoch.output import HeldOutput
from vmckpt.errors import RefusedError
from vmckpt.hosts.scheduling import prompt
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.replicate.disks.mirrors import Mirrors
from vmckpt.replicate.figures import Figures
from vmckpt.replicate.keeper import Keeper
from vmckpt.replicate.pace import Pace
from vmckpt.replicate.request import Options
from vmckpt.replicate.stream import Stream
from vmckpt.vm.inventory import Vm

COPY_BYTES = 16 << 20
# Epochs of the first copy that may be under way at once.
COPIES_AHEAD = 2
POLL_S = 0.02
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

    def __init__(self, grip: Grip, stream: Stream, keeper: Keeper, options: Options) -> None:
        self._monitor, self._capture, self._pidfd = grip.monitor, grip.capture, grip.pidfd
        self._stream, self._keeper, self._mirrors = stream, keeper, grip.mirrors
        self._budget = Budget(options.max_pause_s)
        self.pace = Pace(options.epoch_s)
        self.figures = Figures()
        self.is_safe = False
        # The state in which the guest stands still without anybody's having stopped it; "": none.
        self.stands_still = ""
        self._resumed_s = 0.0

    async def copy(self, require_wanted: Callable[[], None]) -> None:
        """All of its disks and its memory, in epochs without devices, while the guest runs."""

        async def take(pages: Pages) -> None:
            require_wanted()
            number = await self._stream.commit(pages, writes=intake.cut())
            await self._stream.acknowledged(number - COPIES_AHEAD)

        intake = self._mirrors.intake
        while not await self._mirrors.are_copied():
            await intake.waits_for(POLL_S)
            await take(Pages((), b""))
        await self._capture.everything(take, COPY_BYTES)

    async def one(self, replica: str, *, resume_guest: bool = True) -> bool:
        """An epoch, from its first page to its output's leaving.

        False when there is none: the guest stands still, or another has its term. Raises
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
        await self._stream.acknowledged(epoch.number)
        self.figures.safe(epoch.number, captured_s)
        if not self.is_safe:
            if not await self._keeper.in_sync(replica):
                return False
            self.is_safe = True
        if self._keeper.may_release(epoch.number):
            await self._capture.release()
        return True

    async def rest(self, wake: asyncio.Event) -> None:
        """Let the guest run until the next epoch, or `wake`; what it writes may call for one."""
        left_s = self._resumed_s + self.pace.run_s - time.monotonic()
        await self._mirrors.intake.waits_for(max(0.0, left_s), wake)

    async def _captured(self, *, resume_guest: bool) -> tuple[Epoch, float]:
        """An epoch that is on its way, and when its pause began."""
        intake = self._mirrors.intake
        await self._stream.disks(intake.cut())
        early, pauses = 0, list[float]()
        while self._budget.wants_pass(self._capture.dirty_pages()):
            with self._killed_if_stuck(), intake.open(), prompt():
                spans, pause_s = await self._capture.early()
            if pause_s is not None:
                pauses.append(pause_s)
            for pages in self._capture.copies(spans, COPY_BYTES):
                early += pages.count
                await self._stream.pages(pages)
        captured_s = time.monotonic()
        with self._killed_if_stuck(), intake.open(), prompt():
            epoch = await self._capture.epoch(
                self._stream.next_number,
                resume_guest=resume_guest,
                at_stop=self._mirrors.end_epoch,
            )
        self._resumed_s = time.monotonic()
        devices = epoch.device_base, epoch.device_state
        await self._stream.commit(epoch.pages, devices, self._mirrors.ended())
        return replace(epoch, early_pages=early, early_pauses_s=tuple(pauses)), captured_s

    @contextmanager
    def _killed_if_stuck(self) -> Iterator[None]:
        """For the block: a QEMU that answers nothing for too long is killed; the standby goes on.

        Only its silence counts, not the time that copying takes here, and only while there is a
        standby that could go on with the guest.
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
            if self._stream.why or self._keeper.is_silent():
                silences = 0  # nobody would go on with the guest
            await asyncio.sleep(POLL_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _learn(self, epoch: Epoch) -> None:
        pause = epoch.pause
        self._budget.paused(epoch.pages.count, pause.total_s, pause.copy_s)
        self.pace.paused(pause.total_s)
        self.figures.taken(epoch)

    async def _let_run(self) -> None:
        """The guest stands still: if it was the guard that stopped it, and it may run, it does."""
        state = await commands.query_status(self._monitor)
        is_stuck = not state.running and state.status not in STOPPED_FOR_AN_EPOCH
        self.stands_still = state.status if is_stuck else ""
        if self._keeper.may_run() and not state.running and not is_stuck:
            await self._capture.resume()
        await asyncio.sleep(POLL_S)
