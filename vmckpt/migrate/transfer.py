"""Sending RAM: start, watch, switch method when asked to, and say how it ended."""

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from vmckpt.errors import OperationFailedError, TimedOutError
from vmckpt.events.types import Progress
from vmckpt.migrate.disks import DiskMirrors
from vmckpt.migrate.options import UNLIMITED_DOWNTIME_MS, Method, OnTimeout, Options
from vmckpt.migrate.switchover import WAIT_S, Switchover
from vmckpt.plan.convergence import eta_s, has_stalled
from vmckpt.plan.policy import Act, Decision, Steering
from vmckpt.qemu import commands
from vmckpt.qemu.block import migrate_continue
from vmckpt.qemu.monitor import Events, Monitor
from vmckpt.qemu.replies import MigrationStatus
from vmckpt.units import format_duration, format_rate, format_size

SAMPLE_S = 0.1
# No byte for this long while QEMU says "active": it never notices a silent link by itself.
SILENCE_S = 15.0
# Before the second round QEMU has not sent all pages once, and post-copy would have to send all.
FIRST_POSTCOPY_ROUND = 2
LOCAL_STATES = frozenset({"none", "setup", "wait-unplug"})


class Ending(Enum):
    """How a transfer ended on the source."""

    COMPLETED = "all state is on the target"
    POSTCOPY = "the source serves pages, the rest of the state is on the target"


class Transfer:
    """One transfer of RAM, watched on the source's monitor.

    `emit` gets a Progress every 0.1 s; `note` decisions in words. `switchover` says when the guest
    may stop; None leaves that to QEMU.
    """

    def __init__(
        self,
        source: Monitor,
        options: Options,
        clock: Callable[[], float],
        emit: Callable[[Progress], None],
        note: Callable[[str, str], None],
        *,
        disks: DiskMirrors,
        switchover: Switchover | None,
    ) -> None:
        self._source, self._options, self._disks = source, options, disks
        self._switchover = switchover
        self._steering = _steering(options)
        self._clock, self._emit, self._note = clock, emit, note
        self._began_s = time.monotonic()
        self._round_bytes: list[int] = []
        self._silent_since_s, self._last_sent = self._began_s, -1
        self._time_is_up = False
        self._asked_postcopy = False
        self._postcopy_began = False
        self._handed_over = False
        self.rounds = 0
        self.last = MigrationStatus("none")

    async def run(self, uri: str) -> Ending:
        """Send to `uri` until the source is done or in post-copy.

        Raises OperationFailedError (QEMU gave up, the link is silent), TimedOutError; the source's
        migration may still be under way then: settle it. CancelledError likewise.
        """
        with self._source.events("MIGRATION", "MIGRATION_PASS") as events:
            await commands.migrate(self._source, uri)
            return await self._watch(events, until_postcopy=True)

    async def drain(self) -> None:
        """After the switch to post-copy: until every page is on the target."""
        with self._source.events("MIGRATION", "MIGRATION_PASS") as events:
            self._silent_since_s, self._last_sent = time.monotonic(), -1
            await self._watch(events, until_postcopy=False)

    async def _watch(self, events: Events, *, until_postcopy: bool) -> Ending:
        while True:
            status = await self._sample()
            if self._postcopy_began and until_postcopy:
                return Ending.POSTCOPY
            if status.status == "completed":
                return Ending.COMPLETED
            if status.ended:
                raise OperationFailedError(
                    "the migration failed",
                    why=status.error or f"QEMU ended it as '{status.status}'",
                    remedy="the source goes on; see the target's words",
                )
            if status.status == "postcopy-paused":
                raise OperationFailedError(
                    "post-copy was interrupted",
                    why="the link between the hosts broke while the guest ran on the target",
                    remedy="mend the link; the guest waits for its pages",
                )
            if status.status == "pre-switchover" and not self._handed_over:
                # The guest is stopped, and nothing of it writes any more. QEMU may say so again
                # for a moment after it was told to go on.
                self._handed_over = True
                await self._disks.hand_over()
                await migrate_continue(self._source)
            if not status.in_postcopy:
                await self._steer(status)
            self._check_silence(status)
            if await self._news_of_the_end(events) and not self._postcopy_began:
                return Ending.COMPLETED  # the guest stands still: it is accounted for later

    async def account(self) -> None:
        """The figures of a transfer that is over."""
        await self._sample()

    async def _news_of_the_end(self, events: Events) -> bool:
        """Wait until QEMU tells of a change, 0.1 s at most; whether it has completed."""
        wait_s = WAIT_S if self._switchover and self._switchover.waits else SAMPLE_S
        while event := await events.next(wait_s):
            news = [one.get("data") for one in (event, *events.drain())]
            # A short post-copy is over before a query sees it.
            self._postcopy_began |= {"status": "postcopy-active"} in news
            if {"status": "completed"} in news:
                return True
            if news[-1] != {"status": "device"}:
                return False
            # The guest stands still while its devices are sent: no time for questions.
        return False

    async def _sample(self) -> MigrationStatus:
        status = await commands.query_migrate(self._source)
        self.last = status
        self._postcopy_began |= status.in_postcopy
        self.rounds = max(self.rounds, status.round)
        while len(self._round_bytes) < status.round:
            self._round_bytes.append(status.remaining_bytes)
        meaningful = status.round >= FIRST_POSTCOPY_ROUND
        dirty = status.dirty_rate_bytes_per_s if meaningful else 0.0
        self._emit(
            Progress(
                at_s=self._clock(),
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
        if self._steering and status.status == "active" and not self._asked_postcopy:
            await self._obey(self._steering.see(status.round, status.remaining_bytes))
        options = self._options
        if options.timeout_s is not None and not self._time_is_up:
            self._time_is_up = time.monotonic() - self._began_s > options.timeout_s
            if self._time_is_up:
                await self._time_up(options)
        if self._asked_postcopy or status.round < FIRST_POSTCOPY_ROUND:
            return
        if options.method is Method.POSTCOPY:
            await self._start_postcopy("all pages were sent once")
        elif options.method is Method.HYBRID and has_stalled(self._round_bytes):
            await self._start_postcopy("the last rounds gained nothing: pre-copy will not end")
        elif self._time_is_up and options.on_timeout is OnTimeout.POSTCOPY:
            await self._start_postcopy("the time is up")

    async def _obey(self, decision: Decision | None) -> None:
        """Do what the policy says, or only tell of it."""
        if decision is None:
            return
        words = {
            Act.RAISE_DOWNTIME: f"allowing a standstill of {decision.downtime_ms} ms",
            Act.POSTCOPY: "going over to post-copy",
            Act.PAUSE: "stopping the VM to send the rest",
            Act.ABORT: "giving up",
        }[decision.act]
        if self._options.observe_only:
            self._note("policy", f"it would be {words} now: {decision.why}")
            return
        self._note("policy", f"{words}: {decision.why}")
        match decision.act:
            case Act.RAISE_DOWNTIME:
                limit = {"downtime-limit": decision.downtime_ms}
                await commands.migrate_set_parameters(self._source, limit)
            case Act.POSTCOPY:
                await self._start_postcopy(decision.why)
            case Act.PAUSE:
                await self._stop_at_next_look()
            case Act.ABORT:
                raise OperationFailedError(
                    "the policy gave the migration up",
                    why=f"{decision.why}: {self._why_so_long()}",
                    remedy="allow more downtime or bandwidth, or another policy",
                )

    async def _stop_at_next_look(self) -> None:
        await commands.migrate_set_parameters(
            self._source, {"downtime-limit": UNLIMITED_DOWNTIME_MS}
        )
        if self._switchover:
            await self._switchover.now()

    async def _time_up(self, options: Options) -> None:
        given = format_duration(options.timeout_s or 0)
        if options.on_timeout is OnTimeout.ABORT:
            raise TimedOutError(
                f"the migration did not end within {given}",
                why=self._why_so_long(),
                remedy="allow more time, downtime or bandwidth, or use --method hybrid",
            )
        if options.on_timeout is OnTimeout.PAUSE:
            self._note("time-up", f"{given} are over: stopping the VM to send the rest")
            await self._stop_at_next_look()

    def _why_so_long(self) -> str:
        sent, link = self.last.transferred_bytes, self.last.throughput_bytes_per_s
        if self.rounds < FIRST_POSTCOPY_ROUND:
            left = format_size(self.last.remaining_bytes)
            return f"{format_size(sent)} went at {format_rate(link)}, {left} were still left"
        dirty = format_rate(self.last.dirty_rate_bytes_per_s)
        rates = f"the guest dirties {dirty}, the link takes {format_rate(link)}"
        return f"after {self.rounds} rounds {rates}"

    async def _start_postcopy(self, reason: str) -> None:
        self._note("postcopy", f"switching to post-copy: {reason}")
        self._asked_postcopy = True
        await commands.migrate_start_postcopy(self._source)

    def _check_silence(self, status: MigrationStatus) -> None:
        now_s = time.monotonic()
        if status.transferred_bytes != self._last_sent or status.status in LOCAL_STATES:
            self._silent_since_s, self._last_sent = now_s, status.transferred_bytes
        elif now_s - self._silent_since_s > SILENCE_S:
            raise OperationFailedError(
                "the migration stands still",
                why=f"no byte has moved for {SILENCE_S:g} s, and QEMU never notices by itself",
                remedy="check the network between the hosts and the target's load",
            )


def _steering(options: Options) -> Steering | None:
    policy = options.policy
    if policy is None:
        return None
    if options.pause_promised:
        kept = tuple(rule for rule in policy.rules if rule.act is not Act.RAISE_DOWNTIME)
        policy = replace(policy, rules=kept)
    return Steering(policy, options.max_downtime_ms)
