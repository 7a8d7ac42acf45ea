"""The primary's loop: copy the guest, then epoch after epoch, each safe before its output leaves.

How it ends, and who has the guest then: `Ending`.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from vmckpt.epoch.budget import Budget
from vmckpt.epoch.capture import Capture
from vmckpt.epoch.epoch import Epoch, Pages
from vmckpt.epoch.guard import STOPPED_FOR_AN_EPOCH
from vmckpt.epoch.output import HeldOutput
from vmckpt.errors import OutcomeUnknownError, VmckptError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.replicate.channel import ALONE, GUEST_OFF, STOPPED, YOURS, Channel
from vmckpt.replicate.figures import Figures
from vmckpt.replicate.keeper import Keeper
from vmckpt.replicate.pace import Pace
from vmckpt.replicate.request import Files, Request
from vmckpt.replicate.stream import StandbyLostError, Stream
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.inventory import Vm

COPY_BYTES = 16 << 20
# Epochs of the first copy that may be under way at once.
COPIES_AHEAD = 2
POLL_S = 0.02
# A QEMU that has not given an epoch after so long is taken for dead, and killed.
EPOCH_S = 5.0


class Ending(StrEnum):
    """Why the protection ended, and where the guest is."""

    STOPPED = "stopped: it was asked for; the guest runs here, unprotected"
    ALONE = "alone: the standby is lost; the guest runs here, unprotected"
    GUEST_OFF = "off: the guest has powered off"
    YOURS = "handed over: the standby goes on with the guest"
    REPLACED = "replaced: the standby has taken over; this QEMU was ended"
    LOST = "lost: its QEMU died before the standby had the guest"


class Grip(NamedTuple):
    """What the primary has of its VM."""

    vm: Vm
    monitor: Monitor
    capture: Capture
    output: HeldOutput


class Protection:
    """One VM's protection, from the first copy to its end."""

    def __init__(
        self,
        request: Request,
        files: Files,
        grip: Grip,
        *,
        keeper: Keeper,
        channel: Channel,
        replica: str,
    ) -> None:
        self._request, self._files = request, files
        self._wake = asyncio.Event()
        self._vm, self._monitor, self._capture, self._output = grip
        self._keeper, self._replica = keeper, replica
        self._stream = Stream(channel, keeper, self._vm.spec.memory_bytes, self._wake.set)
        self._budget = Budget(request.options.max_pause_s)
        self._pace = Pace(request.options.epoch_s)
        self._figures = Figures()
        self._state, self._why = "copying", ""
        self._asked: Ending | None = None
        self._resumed_s = 0.0
        self._ending: Ending | None = None

    async def run(self) -> None:
        """Protect it until that ends."""
        async with self._in_background() as background, self._woken_by_its_end():
            try:
                self._ending = await self._protect(background)
            except StandbyLostError as exc:
                self._why = "" if self._asked else str(exc)
                self._ending = await self._go_on_alone()
            except BaseException as exc:
                # Asked to end, or a bug of ours: no guest stays behind whose output is held.
                self._why = f"the service ended: {str(exc) or type(exc).__name__}"
                self._ending = await to_the_end(self._go_on_alone())
                await to_the_end(self._conclude(self._ending))
                raise
        await self._conclude(self._ending)

    async def _conclude(self, ending: Ending) -> None:
        if ending is Ending.REPLACED:
            await self._vm.host.stop_for_good(self._vm.qemu.process)
        self._state = "ended"
        self._why = f"{ending.value}{': ' if self._why else ''}{self._why}"
        await self._vm.host.write_text(self._files.status, json.dumps(self.status()))

    @asynccontextmanager
    async def _in_background(self) -> AsyncIterator[list["asyncio.Task[None]"]]:
        """Receiving, heartbeats and the lease, for the block."""
        work = (self._stream.receive(), self._stream.beat(), self._keeper.keep())
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _woken_by_its_end(self) -> AsyncIterator[None]:
        """For the block: when QEMU ends nobody sleeps on."""
        loop = asyncio.get_running_loop()
        with open_fd(os.pidfd_open(self._vm.qemu.process.pid)) as pidfd:
            loop.add_reader(pidfd, self._wake.set)
            try:
                yield
            finally:
                loop.remove_reader(pidfd)

    async def _protect(self, background: list["asyncio.Task[None]"]) -> Ending:
        with self._monitor.events("SHUTDOWN") as shutdowns:
            try:
                await self._copy()
                await self._output.hold()
                while self._asked is None:
                    if self._keeper.replaced.is_set():
                        return Ending.REPLACED
                    for task in background:
                        if task.done():
                            raise StandbyLostError(_reason(task))
                    await self._one_epoch()
                    await self._rest()
                if self._asked is Ending.YOURS:
                    return await self._hand_over()
                return await self._stop()
            except (MonitorLostError, OutcomeUnknownError):
                told: list[Any] = [event["data"] for event in shutdowns.drain()]
                return await self._qemu_gone(is_off=any(data["guest"] for data in told))
            except VmckptError as exc:
                raise StandbyLostError(f"{exc.what}: {exc.why}") from exc

    async def _copy(self) -> None:
        """All of the guest's memory, in epochs without devices, while it runs."""

        async def take(pages: Pages) -> None:
            if self._asked is not None:
                raise StandbyLostError("asked to end before all was copied")
            number = await self._stream.begin()
            await self._stream.pages(pages)
            await self._stream.commit()
            await self._stream.acknowledged(number - COPIES_AHEAD)

        await self._capture.everything(take, COPY_BYTES)

    async def _one_epoch(self) -> bool:
        """An epoch, from its first page to its acknowledgement; False while the guest stands."""
        with self._killed_if_stuck():
            runs = await self._runs()
        if not runs:
            return False
        epoch, captured_s = await self._captured()
        self._learn(epoch)
        await self._stream.acknowledged(epoch.number)
        self._figures.safe(epoch.number, captured_s)
        if self._state != "protected":
            if not await self._keeper.in_sync(self._replica):
                return False
            self._state = "protected"
        if self._keeper.may_release(epoch.number):
            await self._capture.release()
        return True

    async def _captured(self) -> tuple[Epoch, float]:
        """An epoch that is on its way, and when its pause began."""
        number = await self._stream.begin()
        early, pauses = 0, list[float]()
        while self._budget.wants_pass(self._capture.dirty_pages()):
            with self._killed_if_stuck():
                pages, pause_s = await self._capture.early()
            early += pages.count
            pauses.append(pause_s)
            await self._stream.pages(pages)
        captured_s = time.monotonic()
        resume_guest = self._asked is not Ending.YOURS
        with self._killed_if_stuck():
            epoch = await self._capture.epoch(number, resume_guest=resume_guest)
        self._resumed_s = time.monotonic()
        await self._stream.pages(epoch.pages)
        await self._stream.commit(epoch.device_state)
        return replace(epoch, early_pages=early, early_pauses_s=tuple(pauses)), captured_s

    @contextmanager
    def _killed_if_stuck(self) -> Iterator[None]:
        """For the block: a QEMU that answers nothing for too long is dead; the standby goes on."""
        loop, can_be_replaced = asyncio.get_running_loop(), self._state == "protected"
        with open_fd(os.pidfd_open(self._vm.qemu.process.pid)) as pidfd:
            end = partial(signal.pidfd_send_signal, pidfd, signal.SIGKILL)
            timer = loop.call_later(EPOCH_S, end) if can_be_replaced else None
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()

    def _learn(self, epoch: Epoch) -> None:
        pause = epoch.pause
        self._budget.paused(epoch.pages.count, pause.total_s, pause.copy_s)
        self._pace.paused(pause.total_s)
        self._figures.taken(epoch)

    async def _rest(self) -> None:
        left_s = self._resumed_s + self._pace.run_s - time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, left_s))

    async def _runs(self) -> bool:
        """Whether an epoch can be taken. A guest that the guard has stopped is let run again."""
        if self._keeper.may_run():
            state = await commands.query_status(self._monitor)
            if state.running:
                return True
            if state.status in STOPPED_FOR_AN_EPOCH:
                await self._capture.resume()
                return True
        await asyncio.sleep(POLL_S)
        return False

    async def _hand_over(self) -> Ending:
        """The guest goes on from its last moment here, with the standby."""
        while not await self._one_epoch():
            if self._keeper.replaced.is_set():
                return Ending.REPLACED
        return await self._dead_here("asked for", Ending.YOURS)

    async def _qemu_gone(self, *, is_off: bool) -> Ending:
        if is_off:
            if await self._keeper.solo():
                await self._stream.end(GUEST_OFF, "the guest has powered off")
            return Ending.GUEST_OFF
        if self._state != "protected":
            if await self._vm.is_alive():
                raise StandbyLostError("the primary's QEMU does not answer")
            await self._keeper.solo()
            await self._stream.end(STOPPED, "the primary's QEMU died during the first copy")
            return Ending.LOST
        return await self._dead_here("its QEMU died, or did not answer", Ending.YOURS)

    async def _dead_here(self, why: str, ending: Ending) -> Ending:
        """End QEMU for certain, and let the standby have the term at once."""
        await self._vm.host.stop_for_good(self._vm.qemu.process)
        with suppress(VmckptError):  # then the standby finds the lease ended by itself
            await self._keeper.give_up()
        await self._stream.end(YOURS, why)
        self._why = why
        return ending

    async def _stop(self) -> Ending:
        if not await self._keeper.solo():
            return Ending.REPLACED
        await self._stream.end(STOPPED, "asked for")
        await self._let_go()
        return Ending.STOPPED

    async def _go_on_alone(self) -> Ending:
        """The standby is lost: say so to the arbiter, then let the guest's output go."""
        self._state = "alone"
        if not await self._keeper.solo():
            return Ending.REPLACED
        await self._stream.end(ALONE, self._why)
        self._stream.abort()
        await self._let_go()
        return Ending.ALONE

    async def _let_go(self) -> None:
        # No replica may take over, so that the guest runs on whether or not the lease is renewed.
        self._keeper.free()
        with suppress(MonitorLostError, OutcomeUnknownError):  # its QEMU has ended
            await self._output.let_go()
            await self._capture.resume()

    async def answer(self, word: str) -> dict[str, Any]:
        """What it is asked over its control socket: status, stop, failover."""
        if word in ("stop", "failover"):
            self._asked = Ending.STOPPED if word == "stop" else Ending.YOURS
            self._wake.set()
            while self._ending is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        return self.status()

    def status(self) -> dict[str, Any]:
        """How it is, for people and programs."""
        options = self._request.options
        return {
            "role": "primary",
            "vm": self._vm.name,
            "run": self._request.run,
            "primary": self._request.primary.name,
            "standby": self._request.standby.name,
            "state": self._state,
            "ending": self._ending.name.lower() if self._ending else None,
            "why": self._why,
            "term": self._keeper.term,
            "output_commit": options.holds_output,
            "epoch_ms": round(self._pace.run_s * 1e3, 1),
            "epoch_is_auto": options.epoch_s is None,
            "max_pause_ms": options.max_pause_s * 1e3,
            "sent_bytes": self._stream.sent_bytes,
            **self._figures.to_json(),
        }


def _reason(task: "asyncio.Task[None]") -> str:
    error = None if task.cancelled() else task.exception()
    return str(error) if error else "the standby is lost"
