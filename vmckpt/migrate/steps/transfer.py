"""Send RAM: start, watch, switch the method on request, and report the end."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from vmckpt.errors import OperationFailedError
from vmckpt.events.types import Progress
from vmckpt.forecast.model.convergence import eta_s
from vmckpt.forecast.model.pilot import PolicyDecision, PrecopySample
from vmckpt.migrate import later
from vmckpt.migrate.steps.disks import DiskMirrors
from vmckpt.migrate.steps.steering import (
    FIRST_POSTCOPY_ROUND,
    Steering,
    SteeringOrder,
    TransferFigures,
    given_up,
    pilot,
)
from vmckpt.migrate.steps.switchover import WAIT_S, Switchover
from vmckpt.options.migration import MigrationOptions
from vmckpt.options.policy import Act
from vmckpt.options.reading import UNLIMITED_DOWNTIME_MS
from vmckpt.qemu import commands
from vmckpt.qemu.abilities import SENDING_SPEED, throttle
from vmckpt.qemu.block import migrate_continue
from vmckpt.qemu.monitor import Events, Monitor
from vmckpt.qemu.replies import MigrationStatus

SAMPLE_S = 0.1
LOCAL_STATES = frozenset({"none", "setup", "wait-unplug"})


# The event, and the run state, of a guest that QEMU stops because its disk fails.
IO_ERROR, IO_ERROR_STATE = "BLOCK_IO_ERROR", "io-error"


class TransferEnding(Enum):
    """How a transfer ended on the source."""

    COMPLETED = "all state is on the destination"
    POSTCOPY = "the source serves pages, the rest of the state is on the destination"


class Transfer:
    """One transfer of RAM, watched on the source's monitor.

    `emit` gets a Progress every 0.1 s; `note` decisions in words. `switchover` decides when the
    guest may stop; None leaves that to QEMU.
    """

    def __init__(
        self,
        source: Monitor,
        options: MigrationOptions,
        clock: Callable[[], float],
        emit: Callable[[Progress], None],
        note: Callable[[str, str], None],
        *,
        disks: DiskMirrors,
        switchover: Switchover | None,
    ) -> None:
        self._source, self._options, self._disks = source, options, disks
        self._switchover = switchover
        self._clock, self._emit, self._note = clock, emit, note
        self._began_s = time.monotonic()
        self._steering, self._pilot = Steering(options), pilot(options)
        # As in the record, so that a replay of the policy sees the same.
        self._sampled_s = 0.0
        self._postcopy_began = False
        self._handed_over = False
        self._unwelcome = (IO_ERROR,) if options.abort_on_error else ()
        self.last = MigrationStatus("none")

    @property
    def rounds(self) -> int:
        """Rounds of pre-copy that have begun."""
        return self._steering.rounds

    async def run(self, uri: str) -> TransferEnding:
        """Send to `uri` until the source is done or in post-copy.

        Raises OperationFailedError (QEMU failed, the link is silent), TimedOutError; the source's
        migration may still be running then: settle it. CancelledError likewise.
        """
        try:
            with self._source.events("MIGRATION", "MIGRATION_PASS", *self._unwelcome) as events:
                self._tell_what_is_left_out()
                await self._require_sound_disks()
                await commands.migrate(self._source, uri)
                later.load_to_arrive()
                return await self._watch(events, until_postcopy=True)
        finally:
            if self._switchover:
                await self._switchover.close()

    async def hold_to(self, bandwidth_bytes_per_s: int) -> None:
        """Limit the bandwidth from now on, of memory and disks together."""
        settings = replace(self._options, bandwidth_bytes_per_s=bandwidth_bytes_per_s).settings(
            copies_disks=self._disks.any
        )
        limit = settings.max_bandwidth_bytes_per_s
        if self._switchover:
            await self._switchover.hold_to(limit)
        else:
            await commands.migrate_set_parameters(self._source, {SENDING_SPEED: limit})
        await self._disks.hold_to(bandwidth_bytes_per_s)

    async def drain(self) -> None:
        """After the switch to post-copy, wait until every page is on the destination."""
        with self._source.events("MIGRATION", "MIGRATION_PASS") as events:
            self._steering.listen_anew(time.monotonic())
            await self._watch(events, until_postcopy=False)

    async def _watch(self, events: Events, *, until_postcopy: bool) -> TransferEnding:
        while True:
            status = await self._sample()
            if self._postcopy_began and until_postcopy:
                return TransferEnding.POSTCOPY
            if status.status == "completed":
                return TransferEnding.COMPLETED
            if status.ended:
                raise OperationFailedError(
                    "the migration failed",
                    why=status.error or f"QEMU ended it as '{status.status}'",
                    remedy="the guest continues on the source; see the destination's error message",
                )
            if status.status == "postcopy-paused":
                raise OperationFailedError(
                    "post-copy was interrupted",
                    why="the link between the hosts broke while the guest ran on the destination",
                    remedy="repair the link; the guest waits for its pages",
                )
            if status.status == "pre-switchover" and not self._handed_over:
                # The guest is stopped, and no longer writes. QEMU may report that
                # again for a moment after `migrate-continue`.
                self._handed_over = True
                await self._disks.hand_over()
                await migrate_continue(self._source)
            if not status.in_postcopy:
                await self._steer(status)
            self._steering.check_silence(
                status.transferred_bytes,
                time.monotonic(),
                expected=status.status in LOCAL_STATES,
            )
            if await self._news_of_the_end(events) and not self._postcopy_began:
                return TransferEnding.COMPLETED  # the guest is stopped: figures come later

    def _tell_what_is_left_out(self) -> None:
        policy, steers = self._options.policy, self._options.steers
        if policy is None:
            return
        kept = [rule.act for rule in steers.rules] if steers else []
        for rule in policy.rules:
            if rule.act not in kept:
                self._note("policy", f"'{rule.act}' is skipped: it would violate a constraint")

    async def _require_sound_disks(self) -> None:
        """Raises OperationFailedError if a disk error has stopped the guest."""
        if self._unwelcome:
            status = (await commands.query_status(self._source)).status
            if status == IO_ERROR_STATE:
                raise _disk_error("before its memory moved")

    async def account(self) -> None:
        """Compute the figures of a finished transfer."""
        await self._sample()

    async def _news_of_the_end(self, events: Events) -> bool:
        """Wait for a status event of QEMU, 0.1 s at most; returns whether it has completed."""
        wait_s = WAIT_S if self._switchover and self._switchover.waits else SAMPLE_S
        rounds_are_short = self._switchover is not None and self._switchover.all_sent_once
        until_s = time.monotonic() + wait_s
        is_paused = False
        while event := await events.next(
            wait_s if is_paused else max(0.0, until_s - time.monotonic())
        ):
            came = (event, *events.drain())
            news: list[Any] = [one.get("data", {}) for one in came]
            if any(_stops_the_guest(one) for one in came):
                raise _disk_error("while its memory moved")
            # A short post-copy is over before a query sees it.
            self._postcopy_began |= {"status": "postcopy-active"} in news
            if {"status": "completed"} in news:
                return True
            if states := [one for one in news if "status" in one]:
                is_paused = states[-1] == {"status": "device"}
            # No time for queries while devices and the last dirty pages are sent, nor at each of
            # the short rounds before that: QEMU answers between other work.
            if not is_paused and (states or not rounds_are_short):
                return False
        return False

    async def _sample(self) -> MigrationStatus:
        status = await commands.query_migrate(self._source)
        self.last, self._sampled_s = status, self._clock()
        self._postcopy_began |= status.in_postcopy
        self._steering.see(_figures(status), held=self._is_held)
        meaningful = status.round >= FIRST_POSTCOPY_ROUND
        dirty = status.dirty_rate_bytes_per_s if meaningful else 0.0
        self._emit(
            Progress(
                at_s=self._sampled_s,
                status=status.status,
                round=status.round,
                total_bytes=status.total_bytes,
                remaining_bytes=status.remaining_bytes,
                transferred_bytes=status.transferred_bytes,
                throughput_bytes_per_s=status.throughput_bytes_per_s,
                dirty_rate_bytes_per_s=dirty,
                expected_downtime_ms=status.expected_downtime_ms if meaningful else None,
                throttle_percent=status.throttle_percent,
                postcopy_requests=status.postcopy_requests,
                eta_s=eta_s(status.remaining_bytes, status.throughput_bytes_per_s, dirty),
                normal_pages=status.normal_pages,
                zero_pages=status.zero_pages,
            )
        )
        return status

    async def _steer(self, status: MigrationStatus) -> None:
        if status.status == "active":
            await self._disks.check()
        if self._switchover:
            await self._switchover.consider(status)
        if self._pilot and status.status == "active":
            sample = PrecopySample(
                self._sampled_s,
                status.round,
                status.remaining_bytes,
                held=self._is_held,
                throttle_percent=None if self._options.observe_only else status.throttle_percent,
            )
            await self._obey(self._pilot.see(sample))
        fitting_bytes = self._switchover.fitting_bytes if self._switchover else 0.0
        elapsed_s = time.monotonic() - self._began_s
        order = self._steering.steer(_figures(status), elapsed_s, fitting_bytes=fitting_bytes)
        if order is None:
            return
        what, why = order
        self._note(what.value, why)
        match what:
            case SteeringOrder.START_POSTCOPY:
                await commands.migrate_start_postcopy(self._source)
            case SteeringOrder.STOP_GUEST:
                await self._stop_at_next_poll()

    @property
    def _is_held(self) -> bool:
        return self._switchover is not None and self._switchover.held

    async def _stop_at_next_poll(self) -> None:
        await commands.migrate_set_parameters(
            self._source, {"downtime-limit": UNLIMITED_DOWNTIME_MS}
        )
        if self._switchover:
            await self._switchover.now()

    async def _obey(self, decision: PolicyDecision | None) -> None:
        """Follow the policy's decision, or only report it."""
        if decision is None:
            return
        if self._options.observe_only:
            self._note("policy", f"it would be {decision.words} now: {decision.why}")
            return
        self._note("policy", f"{decision.words}: {decision.why}")
        match decision.act:
            case Act.RAISE_DOWNTIME:
                limit = {"downtime-limit": decision.downtime_ms}
                await commands.migrate_set_parameters(self._source, limit)
                if self._switchover:
                    self._switchover.allow(decision.downtime_ms / 1e3)
            case Act.THROTTLE:
                await commands.migrate_set_parameters(
                    self._source, throttle(decision.throttle_percent)
                )
            case Act.POSTCOPY:
                self._pilot = None
                await commands.migrate_start_postcopy(self._source)
            case Act.PAUSE:
                self._pilot = None
                await self._stop_at_next_poll()
            case Act.ABORT:
                raise given_up(decision)


def _stops_the_guest(event: Mapping[str, Any]) -> bool:
    return event.get("event") == IO_ERROR and event.get("data", {}).get("action") == "stop"


def _disk_error(when: str) -> OperationFailedError:
    return OperationFailedError(
        "a disk of the guest's failed",
        why=f"QEMU stopped the guest for it {when}, and --abort-on-error was asked for",
        remedy="see why on the source (free space), and resume the guest, by QMP's `cont` at "
        "the qmp_socket of `vmckpt vm show --json`: until then it cannot move",
    )


def _figures(status: MigrationStatus) -> TransferFigures:
    return TransferFigures(
        status.round,
        status.remaining_bytes,
        status.transferred_bytes,
        status.throughput_bytes_per_s,
        status.dirty_rate_bytes_per_s,
    )
