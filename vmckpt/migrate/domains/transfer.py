"""A running libvirt migration: watched, steered, aborted."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    VmckptError,
)
from vmckpt.events.record import FIGURES_MISSING
from vmckpt.events.types import Emit, Note, PhaseBegan
from vmckpt.forecast.model.pilot import PrecopySample
from vmckpt.migrate.domains.hold import IN_QEMU, Hold
from vmckpt.migrate.domains.progress import figures, progress
from vmckpt.migrate.domains.request import MigrateCall, unheld
from vmckpt.migrate.steps.steering import Steering, SteeringOrder, given_up, pilot
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.options.policy import Act
from vmckpt.options.reading import UNLIMITED_DOWNTIME_MS
from vmckpt.preflight.domains.options import SAMPLE_POSTCOPY_S, sample_s, whole_mib
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.libvirtd import Libvirtd

# Maximum poll interval until memory is sent: queries cost nothing then; the start is recorded.
SAMPLE_BEFORE_S = 0.1
# Its phases before that; "" is libvirt's own preparation.
_BEFORE_MEMORY = ("", "mirror")
# QEMU's own default, not set in libvirt.
DEFAULT_DOWNTIME_MS = 300
# With more, pre-copy could finish before post-copy can begin.
POSTCOPY_DOWNTIME_MS = 1
ABORT_EVERY_S = 2.0
# How long after the call's end libvirt may report the job's final figures, in another session.
FIGURES_S = 2.0
# How long an aborted call may go without any sign of life.
GIVE_UP_S = 60.0


class DomainTransfer:
    """One libvirt migration call, watched and steered by a session with the source's libvirtd.

    `last` are the latest figures; `postcopy`: whether the guest may have run on the destination
    before its memory was there; `took_s`: how long its memory took, as far as libvirt showed it.
    """

    def __init__(
        self,
        source: Libvirtd,
        uuid: str,
        options: MigrationOptions,
        clock: Callable[[], float],
        emit: Emit,
        *,
        held_mib_per_s: int = 0,
        patience_s: float = GIVE_UP_S,
    ) -> None:
        self._source, self._uuid, self._options = source, uuid, options
        self._patience_s = patience_s
        limit = options.bandwidth_bytes_per_s
        self._hold = Hold(held_mib_per_s, limit) if held_mib_per_s else None
        self._wanted_ms = options.max_downtime_ms
        self._clock, self._emit = clock, emit
        self._steering, self._pilot = Steering(options), pilot(options)
        self._began_s = time.monotonic()
        self._phase, self._memory_began_s, self.took_s = "", self._began_s, 0.0
        self._has_ended = False
        self._downtime_set = options.method is Method.STOP
        self.last = DomainJob(active=False)
        self.postcopy = False

    @property
    def rounds(self) -> int:
        """Rounds of pre-copy that have begun."""
        return max(self._steering.rounds, self.last.round)

    @property
    def _sample_s(self) -> float:
        given = sample_s(self._options)
        if self.postcopy:
            return max(given, SAMPLE_POSTCOPY_S)
        return given if self.last.round else min(given, SAMPLE_BEFORE_S)

    async def run(self, request: MigrateCall, caller: Libvirtd) -> None:
        """Have libvirt migrate, in another session; returns when the domain has moved.

        Raises LibvirtRefusedError (it failed), TimedOutError, OperationFailedError (the link is
        silent), OutcomeUnknownError (libvirtd did not answer), CancelledError. After each of them,
        ask both ends. A migration that had begun is aborted first, unless the guest is in
        post-copy; if the abort fails, libvirt continues it.
        """
        try:
            await self._run(request, caller)
        except LibvirtRefusedError as exc:
            if self._hold is None or IN_QEMU not in exc.why:
                raise
            # The domain's QEMU is older than the host's.
            self._hold = None
            self._emit(Note(self._clock(), "switchover", f"not held back: {exc.why}"))
            await self._run(unheld(request), caller)

    async def _run(self, request: MigrateCall, caller: Libvirtd) -> None:
        self._has_ended, self.took_s = False, 0.0
        async with self._source.ended_jobs(self._uuid) as jobs:
            call = asyncio.ensure_future(caller.migrate(self._uuid, *request))
            watch = asyncio.ensure_future(self._watch(jobs))
            try:
                await asyncio.wait({call, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    watch.result()
                await asyncio.shield(call)
            except (asyncio.CancelledError, VmckptError):
                await to_the_end(self._give_up(call))
                if _failed(call) or not self.postcopy:
                    raise
            finally:
                watch.cancel()
                await asyncio.wait({watch})
                _failed(watch)
            self.took_s = self.took_s or time.monotonic() - self._memory_began_s
            await self._await_figures(jobs)
        self._emit(progress(self.last, self._clock(), postcopy=self.postcopy, has_ended=True))

    async def _watch(self, jobs: asyncio.Queue[DomainJob]) -> None:
        """Report and steer until all is sent; ends by cancellation or its error."""
        while True:
            # The call itself reports how it ended; a domain that has moved may be gone before that.
            with suppress(LibvirtRefusedError, HostDownError, NotFoundError):
                await self._poll()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._sample_s):
                    self._end(await jobs.get())
                    return  # libvirt finishes the rest

    async def _await_figures(self, jobs: asyncio.Queue[DomainJob]) -> None:
        """The final figures; those of the last query would be wrong."""
        try:
            while not self._has_ended or not jobs.empty():
                async with asyncio.timeout(min(FIGURES_S, self._patience_s)):
                    self._end(await jobs.get())
        except TimeoutError:
            self.last = self.last._replace(downtime_ms=None)
            why = f"libvirt did not report them within {FIGURES_S:g} s"
            self._emit(Note(self._clock(), FIGURES_MISSING, f"the last figures are missing: {why}"))

    def _end(self, job: DomainJob) -> None:
        self._has_ended, self.last = True, job
        self.took_s = self.took_s or time.monotonic() - self._memory_began_s

    def _begin(self, phase: str) -> None:
        if self._phase != phase:
            self._phase = phase
            self._emit(PhaseBegan(self._clock(), phase))

    async def _poll(self) -> None:
        job = await self._source.job(self._uuid)
        if not job.active:
            return
        self.last = job
        self._steering.see(figures(job), held=self._hold is not None and self._hold.is_on)
        self._emit(progress(job, self._clock(), postcopy=self.postcopy))
        if job.copies_disks:
            self._begin("mirror")
        if job.round == 0:
            return  # disks are being copied, or it is being prepared
        if self._phase in _BEFORE_MEMORY:
            self._memory_began_s = time.monotonic()
            self._begin("transfer")
        if not self.postcopy:
            await self._set_downtime(job)
        if not self.postcopy:
            await self._obey_policy(job)
        if not self.postcopy:
            await self._steer(job)
        self._steering.check_silence(
            job.transferred_bytes, time.monotonic(), expected=self.postcopy
        )

    async def _set_downtime(self, job: DomainJob) -> None:
        if self._options.method is Method.POSTCOPY:
            await self._set_once(POSTCOPY_DOWNTIME_MS)
        elif self._hold is None:
            await self._set_once(self._wanted_ms)
        else:
            self._hold.see(job)
            if (downtime_ms := self._hold.order(job, self._wanted_ms)) is not None:
                await self._source.set_max_downtime(self._uuid, downtime_ms)

    async def _set_once(self, downtime_ms: int) -> None:
        if self._downtime_set:
            return
        self._downtime_set = True
        if downtime_ms != DEFAULT_DOWNTIME_MS:
            await self._source.set_max_downtime(self._uuid, downtime_ms)

    async def _allow(self, downtime_ms: int) -> None:
        """Allow this downtime from now on."""
        self._wanted_ms = downtime_ms
        if self._hold is not None:
            downtime_ms = self._hold.give(downtime_ms)
        await self._source.set_max_downtime(self._uuid, downtime_ms)

    async def _start_postcopy(self) -> None:
        await self._source.start_postcopy(self._uuid)
        self.postcopy = True
        self._begin("drain")

    async def _stop_guest(self) -> None:
        self._hold, self._downtime_set = None, True
        await self._source.set_max_downtime(self._uuid, UNLIMITED_DOWNTIME_MS)

    async def hold_to(self, bandwidth_bytes_per_s: int) -> None:
        """Limit the bandwidth from now on, in whole MiB/s."""
        if self.last.active and not self.postcopy:
            await self._source.set_max_speed(self._uuid, whole_mib(bandwidth_bytes_per_s))
            if self._hold is not None:
                self._hold.limit_bytes_per_s = bandwidth_bytes_per_s
        else:
            raise OperationFailedError(
                "the domain's memory does not move now", why="libvirt prepares it", remedy="wait"
            )

    async def _obey_policy(self, job: DomainJob) -> None:
        if self._pilot is None:
            return
        sample = PrecopySample(self._clock(), job.round, job.remaining_bytes)
        decision = self._pilot.see(sample)
        if decision is None:
            return
        if self._options.observe_only:
            text = f"it would be {decision.words} now: {decision.why}"
            self._emit(Note(self._clock(), "policy", text))
            return
        self._emit(Note(self._clock(), "policy", f"{decision.words}: {decision.why}"))
        match decision.act:
            case Act.RAISE_DOWNTIME:
                await self._allow(decision.downtime_ms)
            case Act.POSTCOPY:
                await self._start_postcopy()
            case Act.PAUSE:
                self._pilot = None
                await self._stop_guest()
            case Act.ABORT:
                raise given_up(decision)
            case Act.THROTTLE:
                pass  # refused beforehand, see option_checks

    async def _steer(self, job: DomainJob) -> None:
        order = self._steering.steer(figures(job), time.monotonic() - self._began_s)
        if order is None:
            return
        what, why = order
        self._emit(Note(self._clock(), what.value, why))
        match what:
            case SteeringOrder.START_POSTCOPY:
                await self._start_postcopy()
            case SteeringOrder.STOP_GUEST:
                await self._stop_guest()

    async def _give_up(self, call: "asyncio.Future[None]") -> None:
        """Wait for the end of libvirt's call: aborted or, in post-copy, completed.

        A call that does neither is left alone after a while; both ends then report the outcome.
        """
        sent_bytes, since_s = -1, time.monotonic()
        while not call.done() and time.monotonic() - since_s < self._patience_s:
            with suppress(LibvirtRefusedError, HostDownError, OutcomeUnknownError):
                if not self.postcopy:
                    await self._source.abort(self._uuid)  # refused if it has just ended
                elif (sent := (await self._source.job(self._uuid)).transferred_bytes) > sent_bytes:
                    sent_bytes, since_s = sent, time.monotonic()
            await asyncio.wait({call}, timeout=min(ABORT_EVERY_S, self._patience_s))
        call.cancel()
        await asyncio.wait({call})


def _failed(task: "asyncio.Future[None]") -> bool:
    """Whether it ended with an error, which counts as retrieved."""
    return task.cancelled() or task.exception() is not None
