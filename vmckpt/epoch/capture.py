"""Epochs of a running VM, each in a pause of a few milliseconds (design.md, "The epoch").

Stop; find the pages written since the last one; have QEMU save the state of its devices (as
`devices.py` can, or by `migrate` with `x-ignore-shared`: RAM left out); copy the pages; continue.
Pages are protected only while the VM is stopped and its block layer drained: one that is pinned for
a read in flight can be written without a fault. `stop` drains.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from vmckpt.epoch.devices import Devices, devices_of
from vmckpt.epoch.epoch import Epoch, Pages, Pause
from vmckpt.epoch.hot import HotRuns
from vmckpt.epoch.output import HeldOutput
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.kernel import scans_pagemaps
from vmckpt.memory.ram_file import Span, open_fd
from vmckpt.memory.tracker import Tracker, tracking
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Events, Monitor
from vmckpt.sequence.steps import finish, to_the_end

# RAM that is a named shared file is left out of what `migrate` writes.
CAPABILITIES = {"x-ignore-shared": True, "events": True, "return-path": False}
# What is left, ROMs and devices, is written at once, in one round.
PARAMETERS = {"max-bandwidth": 1 << 40, "downtime-limit": 2_000_000}
# The proof that its vCPUs ran: of a VM that runs it is in the log, which has no room for all of it.
VCPU_TRACE = "vm_state_notify"
# The state of an ordinary machine's devices fits.
PIPE_BYTES = 1 << 20
STATE_TIMEOUT_S, CONT_TIMEOUT_S, CONT_POLL_S = 10.0, 5.0, 0.0003
_FD_NAME = "vmckpt-epoch"
# What is asked of QEMU besides while the guest stands still, in order.
InPause = Callable[[], list[Coroutine[Any, Any, Any]]]
# What QEMU says to `cont` for a moment after a migration has ended.
_NOT_YET = "not finalized"


@asynccontextmanager
async def capturing(
    pid: int, ram_file: Path, monitor: Monitor, output: HeldOutput
) -> AsyncIterator["Capture"]:
    """Epochs of a VM for the block; before, between and after them the VM runs.

    `monitor` is its operator monitor, nobody else's meanwhile. A `guard` is to stand by: should
    this process die in a pause it lets the guest run on. Raises OSError as `tracking` does,
    CommandRefusedError.
    """
    async with saving(monitor, CAPABILITIES, PARAMETERS), devices_of(monitor) as devices:
        with tracking(pid, ram_file, by_kernel=scans_pagemaps()) as tracker:
            yield Capture(monitor, output, tracker, devices)


@asynccontextmanager
async def saving(
    monitor: Monitor, wished: Mapping[str, bool], limits: Mapping[str, int]
) -> AsyncIterator[None]:
    """QEMU's settings for saving its state, for the block; then they are as they were.

    With `x-ignore-shared` left on, the next migration would leave its memory behind; what an
    earlier migration left on (multifd) would have QEMU refuse a pipe.
    """
    capabilities = await commands.query_migrate_capabilities(monitor)
    parameters = await commands.query_migrate_parameters(monitor)
    wanted = {name: False for name, on in capabilities.items() if on} | dict(wished)
    try:
        await commands.trace(monitor, VCPU_TRACE, enabled=False)
        await commands.migrate_set_capabilities(monitor, wanted)
        await commands.migrate_set_parameters(monitor, limits)
        yield
    finally:
        if monitor.is_open:
            await finish(commands.trace(monitor, VCPU_TRACE, enabled=True))
            before = {name: capabilities[name] for name in wanted}
            await finish(commands.migrate_set_capabilities(monitor, before))
            values = {name: parameters[name] for name in limits}
            await finish(commands.migrate_set_parameters(monitor, values))


@contextmanager
def _received() -> Iterator[tuple[int, "asyncio.Future[bytes]"]]:
    """The writing end of a pipe, to be closed by the caller, and all that comes until it closes."""
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with suppress(PermissionError):  # then QEMU waits for us now and then
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    came: list[bytes] = []
    everything: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        came.append(os.read(reader, PIPE_BYTES))
        if not came[-1]:
            loop.remove_reader(reader)
            if not everything.done():  # nobody waits any more
                everything.set_result(b"".join(came))

    with open_fd(reader):
        loop.add_reader(reader, read)
        try:
            yield writer, everything
        finally:
            loop.remove_reader(reader)


class Capture:
    """One VM's epochs. Whatever is raised or cancelled, the VM runs on if its QEMU lives."""

    def __init__(
        self,
        monitor: Monitor,
        output: HeldOutput,
        tracker: Tracker,
        devices: Devices,
    ) -> None:
        self._monitor, self._output, self._tracker = monitor, output, tracker
        self._devices = devices
        self._hot = HotRuns()

    @property
    def tracker(self) -> str:
        """How the pages are found that the guest writes."""
        return self._tracker.name

    def dirty_pages(self) -> int:
        """How many were written since they were last copied. Costs the guest nothing."""
        return self._tracker.count()

    async def everything(self, take: Callable[[Pages], Awaitable[None]], chunk_bytes: int) -> None:
        """Hand all that the RAM holds to `take`, piece by piece, copied while the guest runs.

        What the guest writes meanwhile is found by the next pass. The first thing to be done.
        """
        # Protected before, while the guest ran; what was read in flight then is there after a stop.
        await self._scan()
        for start, end in self._tracker.extents():
            for at in range(start, end, chunk_bytes):
                span = (at, min(end, at + chunk_bytes))
                await take(Pages((span,), self._tracker.copy((span,))))

    async def early(self) -> tuple[list[Span], float | None]:
        """What was written since the last pass, to be copied while the guest runs; and its pause,
        if there was one.

        Copies may be torn: pages that are written meanwhile come again. Raises RefusedError when
        the guest does not run.
        """
        return await self._scan()

    def copies(self, spans: Iterable[Span], chunk_bytes: int) -> Iterator[Pages]:
        """What the spans hold now, in pieces of `chunk_bytes`."""
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
    ) -> Epoch:
        """All that changed since the last pass, as of one moment; its output moves one buffer on.

        `at_stop` is called in that moment, and what it raises is raised; `also` gives commands for
        the same pause, for when the devices have been saved. Without `resume_guest` the guest
        stands still afterwards. Raises RefusedError when it does not run, OperationFailedError when
        QEMU does not give its devices' state.
        """
        if not also and not self._devices.may_change() and self._devices.base is not None:
            return await self._saved(number, self._devices.base, at_stop, resume_guest=resume_guest)
        with _received() as (writer, received):
            with open_fd(writer):
                giving = self._monitor.give_fd(_FD_NAME, writer)
                await asyncio.gather(giving, self._require_running())
            began_s = time.perf_counter()
            with self._monitor.events("MIGRATION") as events:
                try:
                    migrating = commands.migrate(self._monitor, f"fd:{_FD_NAME}")
                    steps = [*self._output.end_epoch(), migrating]
                    pages, pause, _ = await self._take(began_s, at_stop, steps)
                    device_state = await self._end_of(received)
                    await self._require_completed(events)
                    if also:
                        await all_done([asyncio.ensure_future(step) for step in also()])
                    else:
                        await self._devices.learn(device_state)
                except BaseException:
                    await finish(self.resume())
                    raise
                if resume_guest:
                    await to_the_end(self.resume())
                paused_s = time.perf_counter() - began_s
        return Epoch(number, pages, b"", device_state, pause._replace(total_s=paused_s))

    async def _saved(
        self, number: int, base: bytes, at_stop: Callable[[], None] | None, *, resume_guest: bool
    ) -> Epoch:
        """An epoch whose devices are saved, not migrated: `cont` is taken whenever it comes.

        Its output is cut off just before the stop. What is sent in between is the next epoch's, and
        waits for it. Of a guest that stands still afterwards there is no next one.
        """
        steps = self._output.end_epoch()
        if resume_guest:
            await asyncio.gather(self._require_running(), *steps)
            steps = []
        else:
            await self._require_running()
        began_s = time.perf_counter()
        try:
            pages, pause, devices = await self._take(
                began_s, at_stop, [*steps, self._devices.save()], resume_guest=resume_guest
            )
        except BaseException:
            await finish(self.resume())
            raise
        paused_s = time.perf_counter() - began_s
        return Epoch(number, pages, base, devices, pause._replace(total_s=paused_s))

    async def resume(self) -> None:
        """Let the guest run; one that runs is left alone."""
        await resume(self._monitor)

    async def release(self) -> None:
        """Let go the output of the epochs taken so far: they are safe."""
        await self._output.release()

    async def _take(
        self,
        began_s: float,
        at_stop: Callable[[], None] | None,
        steps: Iterable[Coroutine[Any, Any, Any]],
        *,
        resume_guest: bool = False,
    ) -> tuple[Pages, Pause, Any]:
        """Sent at once and done in this order: the guest stands still for fewer round trips.

        With what the last of `steps` gives. The guest goes on when they are done and all is copied.
        """
        stop = asyncio.ensure_future(commands.stop(self._monitor))
        rest = [asyncio.ensure_future(step) for step in steps]
        last = rest[-1]
        try:
            await stop
            stopped_s = time.perf_counter()
            if at_stop is not None:
                at_stop()
            spans = self._tracker.take_spans(self._hot.spared)
            scanned_s = time.perf_counter()
            pages = Pages(tuple(spans), self._tracker.copy(spans))
            copied_s = time.perf_counter()
            if resume_guest:
                rest.append(asyncio.ensure_future(self.resume()))
            self._hot.found(spans)
        finally:
            # Whatever happens, nothing of it is still to be done when the guest runs on.
            await asyncio.wait({stop, *rest})
        for step in rest:
            step.result()
        pause = Pause(0.0, stopped_s - began_s, scanned_s - stopped_s, copied_s - scanned_s)
        return pages, pause, last.result()

    async def _end_of(self, received: "asyncio.Future[bytes]") -> bytes:
        """All of the device state. QEMU closes the pipe when it lets the guest run again: `cont` is
        refused before that, for a moment longer than it has said that it is done.
        """
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                return await received
        except TimeoutError as exc:
            raise self._gives_no_state(f"its pipe is open after {STATE_TIMEOUT_S:g} s") from exc

    async def _require_completed(self, events: Events) -> None:
        while event := await events.next(STATE_TIMEOUT_S):
            data: Any = event["data"]
            if data["status"] == "completed":
                return
            if data["status"] in ("failed", "cancelled"):
                break
        status = await commands.query_migrate(self._monitor)
        raise self._gives_no_state(status.error or f"migration to a descriptor is {status.status}")

    def _gives_no_state(self, why: str) -> OperationFailedError:
        return OperationFailedError(
            f"{self._monitor.label} does not give the state of its devices",
            why=why,
            remedy="look at the VM's stderr.log",
        )

    async def _scan(self) -> tuple[list[Span], float | None]:
        await self._require_running()
        if not self._tracker.needs_stop:
            return self._tracker.take_spans(), None
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
            raise RefusedError(
                f"{self._monitor.label} does not run",
                why=f"its state is '{state.status}'",
                remedy="let it run: see `vmckpt vm show`",
            )


async def resume(monitor: Monitor) -> None:
    """Let a guest run whose state was saved; one that runs is left alone."""
    deadline_s = time.monotonic() + CONT_TIMEOUT_S
    while True:
        try:
            await commands.cont(monitor)
            return
        except CommandRefusedError as exc:
            if _NOT_YET not in exc.description or time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(CONT_POLL_S)


async def all_done(steps: list[asyncio.Future[Any]]) -> None:
    """All of them have ended when this returns or raises the first error."""
    if steps:
        await asyncio.wait(steps)
    for step in steps:
        step.result()
