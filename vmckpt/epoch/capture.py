"""Epochs of a running VM, each in a pause of a few milliseconds (design.md, "The epoch").

Stop; find the pages written since the last epoch; have QEMU save the state of its devices (as in
`devices.py`, or by `migrate` with `x-ignore-shared`: RAM left out); copy the pages; continue.
Pages are protected only while the VM is stopped and its block layer drained: one that is pinned for
a read in flight can be written without a fault. `stop` drains.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from vmckpt.epoch.devices import Devices, devices_of, ram_blocks
from vmckpt.epoch.epoch import Epoch, Pages, Pause
from vmckpt.epoch.head import readable
from vmckpt.epoch.hot import HotRuns
from vmckpt.epoch.migrated import CAPABILITIES, PARAMETERS, device_migration, saving
from vmckpt.epoch.output import HeldOutput
from vmckpt.errors import RefusedError
from vmckpt.hosts.processes.kernel import page_tracking
from vmckpt.hosts.processes.scheduling import in_real_time
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import Span
from vmckpt.memory.runs import union
from vmckpt.memory.tracker import Tracker, tracking
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.vm.record import RAM_NAME

CONT_TIMEOUT_S, CONT_POLL_S = 5.0, 0.0003
# Returns further commands for QEMU, to be sent in order, during the pause or just before it.
InPause = Callable[[], list[Coroutine[Any, Any, Any]]]
Pausing = Callable[[], AbstractContextManager[None]]
# QEMU's reply to `cont` for a moment after a migration has ended.
_NOT_YET = "not finalized"
# The guest's own suspended state: QEMU >= 9 leaves it at `stop`, and restores it at `cont`.
_SUSPENDED = "suspended"


class StandsStillError(RefusedError):
    """The guest did not run before its epoch, so it does not run after it."""


@asynccontextmanager
async def capturing(
    pid: int,
    ram: GuestRam,
    monitor: Monitor,
    output: HeldOutput,
    pausing: Pausing = nullcontext,
    *,
    ram_bytes: int | None = None,
    ram_names: tuple[str, ...] = (RAM_NAME,),
) -> AsyncIterator["Capture"]:
    """Epochs of a VM for the block; before, between and after them the VM runs.

    `ram_names` are the names that QEMU has for the blocks of its guest's RAM.

    `monitor` is its operator monitor, used exclusively. With `guard`, a guard resumes the guest if
    this process dies during a pause. `pausing` is entered for each pass's pause. Raises OSError as
    `tracking` does, CommandRefusedError.
    """
    # The settings of a lent QEMU are its owner's: its devices are only saved, never migrated.
    async with nullcontext() if monitor.is_lent else saving(monitor, CAPABILITIES, PARAMETERS):
        blocks = await ram_blocks(monitor)
        others = readable(blocks, ram_names)
        with tracking(pid, ram, page_tracking(), ram_bytes, others or ()) as tracker:
            memory = None if others is None else tracker.others
            async with devices_of(monitor, blocks, ram_names, memory) as devices:
                yield Capture(
                    pid, monitor, output, tracker=tracker, devices=devices, pausing=pausing
                )


class Capture:
    """One VM's epochs. After any error or cancellation the VM continues if its QEMU is alive."""

    def __init__(
        self,
        pid: int,
        monitor: Monitor,
        output: HeldOutput,
        *,
        tracker: Tracker,
        devices: Devices,
        pausing: Pausing = nullcontext,
    ) -> None:
        self._pid = pid
        self._monitor, self._output, self._tracker = monitor, output, tracker
        self._devices, self._pausing = devices, pausing
        self._hot = HotRuns()

    @property
    def tracker(self) -> str:
        """What finds the pages that the guest writes."""
        return self._tracker.name

    def dirty_pages(self) -> int:
        """How many pages were written since they were last copied. Costs the guest nothing."""
        return self._tracker.count()

    def saves_devices(self) -> bool:
        """Whether the next epoch's devices are saved quickly, and the disks stay this QEMU's."""
        return self._devices.is_known()

    async def learn_devices(self) -> float:
        """Learn how to save them quickly, if possible, in a separate pause, which is returned.

        Otherwise an epoch's pause would include that. Raises as `epoch` does.
        """
        if not self._devices.can_be_learned():
            return 0.0
        await self._require_running()
        async with device_migration(self._monitor) as migration:
            with in_real_time():
                began_s = time.perf_counter()
                stop = asyncio.ensure_future(commands.stop(self._monitor))
                save = asyncio.ensure_future(self._devices.save())
                begin = asyncio.ensure_future(migration.begin())
                try:
                    with in_real_time(self._pid):
                        await asyncio.wait({stop, save, begin})
                    stop.result()
                    begin.result()
                    with in_real_time(self._pid):  # includes the migration thread, which is new
                        migrated = await migration.state()
                finally:
                    with in_real_time(self._pid):
                        await to_the_end(self.resume())
                paused_s = time.perf_counter() - began_s
        await self._devices.learn(migrated, save)
        return paused_s

    async def everything(
        self,
        take: Callable[[Pages], Awaitable[None]],
        chunk_bytes: int,
        pausing: Pausing = nullcontext,
    ) -> float:
        """Pass the whole content of the RAM to `take`, piece by piece, copied while the guest runs.

        The next pass finds what the guest writes meanwhile. Call it first, except for
        `learn_devices`. It may begin with a pause, for which `pausing` is entered, and which is
        returned.
        """
        # Pages were protected while the guest ran; reads that were in flight then are complete
        # after a stop.
        # What was written since they were protected is copied too, wherever it is now.
        with pausing():
            written, pause_s = await self._scan()
        self._devices.take_memory()
        for start, end in union(self._tracker.extents(), written):
            for at in range(start, end, chunk_bytes):
                span = (at, min(end, at + chunk_bytes))
                await take(Pages((span,), self._tracker.copy((span,))))
        return pause_s or 0.0

    async def early(self) -> tuple[list[Span], float | None]:
        """What was written since the last pass, to be copied while the guest runs; and its pause,
        if there was one.

        Copies may be torn: pages that are written meanwhile come again. Raises RefusedError if the
        guest does not run.
        """
        found = await self._scan()
        self._devices.take_memory()  # less to copy in the pause of the epoch
        return found

    def copies(self, spans: Iterable[Span], chunk_bytes: int) -> Iterator[Pages]:
        """The current content of the spans, in pieces of `chunk_bytes`."""
        piece: list[Span] = []
        left = chunk_bytes
        for start, end in spans:
            at = start
            while at < end:
                piece.append((at, min(end, at + left)))
                left -= piece[-1][1] - at
                at = piece[-1][1]
                if not left:
                    yield Pages(tuple(piece), self._tracker.copy(piece))
                    piece, left = [], chunk_bytes
        if piece:
            yield Pages(tuple(piece), self._tracker.copy(piece))

    async def epoch(
        self,
        number: int,
        *,
        resume_guest: bool = True,
        at_stop: Callable[[], None] | None = None,
        also: InPause | None = None,
        before: InPause | None = None,
        may_run: Callable[[], Awaitable[object]] | None = None,
        at_run: Callable[[], None] | None = None,
    ) -> Epoch:
        """Everything that changed since the last pass, at one moment; output moves to the next
        buffer.

        `at_stop` is called at that moment, and its errors are raised; `also` returns commands for
        the same pause, after the devices were saved. (By a migration, unless `saves_devices`: QEMU
        has then released its disks.) `before` returns commands that are sent together with the
        stop, and executed before it. The guest is resumed when all is done and `may_run` returns,
        and `at_run` is called then; without `resume_guest` it stays paused. Raises
        StandsStillError: it is not running; OperationFailedError: QEMU does not deliver the state
        of its devices.
        """
        first = (lambda: [self._require_running(), *before()]) if before else None
        if self.saves_devices():
            resumed = partial(self._resume_when, may_run, at_run) if resume_guest else None
            return await self._saved(number, at_stop, also, first, resumed)
        await self._require_running()
        async with device_migration(self._monitor) as migration:
            with in_real_time(self._pid):
                began_s = time.perf_counter()
                try:
                    steps = [*self._output.end_epoch(), migration.begin()]
                    pages, pause, _ = await self._take(began_s, at_stop, steps, first=first)
                    device_state = await migration.state()
                    if also:
                        await all_done([asyncio.ensure_future(step) for step in also()])
                    elif self._devices.can_be_learned():
                        saved = asyncio.ensure_future(self._devices.save())
                        await self._devices.learn(device_state, saved)
                    if may_run is not None:
                        await may_run()
                except BaseException as exc:
                    await finish(self._let_run_after(exc))
                    raise
                if resume_guest:
                    await to_the_end(self._resume_when(None, at_run))
                paused_s = time.perf_counter() - began_s
        return Epoch(number, pages, b"", device_state, pause._replace(total_s=paused_s))

    async def _saved(
        self,
        number: int,
        at_stop: Callable[[], None] | None,
        also: InPause | None,
        first: InPause | None,
        resumed: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> Epoch:
        """An epoch whose devices are saved, not migrated, so that `cont` is always accepted.

        Its output ends just before the stop. Packets in between belong to the next epoch and wait
        for it. If the guest stays paused there is no next epoch.
        """
        steps: list[Coroutine[Any, Any, Any]] = [*self._output.end_epoch()]
        if first is None and resumed:
            await asyncio.gather(self._require_running(), *steps)
            steps = []
        elif first is None:
            await self._require_running()
        try:
            with in_real_time(self._pid):
                began_s = time.perf_counter()
                steps.append(self._devices.save())
                pages, pause, devices = await self._take(
                    began_s, at_stop, steps, also, first, resumed=resumed
                )
                paused_s = time.perf_counter() - began_s
            head = await self._devices.head()
        except BaseException as exc:
            await finish(self._let_run_after(exc))
            raise
        return Epoch(number, pages, head, devices, pause._replace(total_s=paused_s))

    async def resume(self) -> None:
        """Resume the guest if it does not run."""
        await resume(self._monitor)

    async def _resume_when(
        self,
        may_run: Callable[[], Awaitable[object]] | None,
        at_run: Callable[[], None] | None,
    ) -> None:
        if may_run is not None:
            await may_run()
        await self.resume()
        if at_run is not None:
            at_run()

    async def release(self) -> None:
        """Release the output of the epochs captured so far: they are safe."""
        await self._output.release()

    async def _take(
        self,
        began_s: float,
        at_stop: Callable[[], None] | None,
        steps: Iterable[Coroutine[Any, Any, Any]],
        also: InPause | None = None,
        first: InPause | None = None,
        *,
        resumed: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> tuple[Pages, Pause, Any]:
        """Send all commands at once, to be executed in order: fewer round trips in the pause.

        Returns the result of the last of `steps`. `resumed` resumes the guest when they are done
        and everything is copied.
        """
        before = [asyncio.ensure_future(step) for step in (first() if first else ())]
        stop = asyncio.ensure_future(commands.stop(self._monitor))
        rest = [asyncio.ensure_future(step) for step in steps]
        last = rest[-1]
        rest += [asyncio.ensure_future(step) for step in (also() if also else ())]
        try:
            await stop
            stopped_s = time.perf_counter()
            await all_done(before)
            if at_stop is not None:
                at_stop()
            spans = self._tracker.take_spans(self._hot.spared)
            scanned_s = time.perf_counter()
            pages = Pages(tuple(spans), self._tracker.copy(spans))
            self._devices.take_memory()
            await self._devices.list_memory()
            copied_s = time.perf_counter()
            if resumed is not None:
                rest.append(asyncio.ensure_future(resumed()))
            self._hot.found(spans)
        finally:
            # Whatever happens, none of these may still be pending when the guest continues.
            await asyncio.wait({*before, stop, *rest})
        for step in rest:
            step.result()
        pause = Pause(0.0, stopped_s - began_s, scanned_s - stopped_s, copied_s - scanned_s)
        return pages, pause, last.result()

    async def _scan(self) -> tuple[list[Span], float | None]:
        await self._require_running()
        if not self._tracker.needs_stop:
            return self._tracker.take_spans(), None
        with self._pausing(), in_real_time(self._pid):
            began_s = time.perf_counter()
            try:
                await commands.stop(self._monitor)
                spans = self._tracker.take_spans()
            finally:
                await to_the_end(self.resume())
            return spans, time.perf_counter() - began_s

    async def _require_running(self) -> None:
        state = await commands.query_status(self._monitor)
        if not state.running:
            raise StandsStillError(
                f"{self._monitor.label} does not run",
                why=f"its state is '{state.status}'",
                remedy="let it run: see `vmckpt vm show`",
            )

    async def _let_run_after(self, exc: BaseException) -> None:
        if not isinstance(exc, StandsStillError) or f"'{_SUSPENDED}'" in exc.why:
            await self.resume()


async def resume(monitor: Monitor) -> None:
    """Resume a guest whose state was saved, if it does not run."""
    deadline_s = time.monotonic() + CONT_TIMEOUT_S
    while True:
        try:
            await commands.cont(monitor)
            return
        except CommandRefusedError as exc:
            if _NOT_YET not in exc.description or time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(CONT_POLL_S)


async def all_done(steps: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all of them have ended; then raises the first error, if any."""
    if steps:
        await asyncio.wait(steps)
    for step in steps:
        step.result()
