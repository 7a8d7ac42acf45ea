"""Decide what a schedule must do now, and when it is due next. No I/O, no clock.

Calendar times use the wall clock; the last claimed one is recorded, so that clock changes neither
repeat nor skip a run. Intervals use CLOCK_BOOTTIME, which cannot be set, and the wall clock across
reboots.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice, takewhile
from typing import NamedTuple

from vmckpt.fleet.schedule.instants import Calendar, Day
from vmckpt.fleet.schedule.request import CatchUp

# A run that begins within this time is not late: `--catch-up skip` still runs it.
GRACE_S = 600.0
# A clock set back by more was wrong before: due times then count from the present time.
MOST_BACK_S = 86400.0
# The delay before a failed run is retried; doubled each time, up to the second value.
AGAIN_S, LONGEST_AGAIN_S = 30.0, 900.0
# The retry delay after another operation held the VM: a dead scheduler's job ends soon.
BUSY_AGAIN_S = 3.0
# Missed times are counted up to this number.
MOST_MISSED = 1000


class ClockReading(NamedTuple):
    """One reading of the clocks: the wall clock, and CLOCK_BOOTTIME with the boot id."""

    wall_s: float
    boot_s: float
    boot_id: str

    def since(self, earlier: "ClockReading") -> float:
        """Seconds since an earlier reading.

        Across a reboot by the wall clock, but at least the time since boot.
        """
        if self.boot_id == earlier.boot_id:
            return max(0.0, self.boot_s - earlier.boot_s)
        return max(self.boot_s, self.wall_s - earlier.wall_s)

    def earlier(self, by_s: float) -> "ClockReading":
        """The reading `by_s` seconds earlier."""
        return ClockReading(self.wall_s - by_s, self.boot_s - by_s, self.boot_id)


@dataclass(frozen=True, slots=True)
class Every:
    """Due repeatedly, `every_s` after the previous due time."""

    every_s: float
    day: Day


@dataclass(frozen=True, slots=True)
class Timing:
    """When runs are due. `salt` gives each schedule a different jitter."""

    when: Calendar | Every
    jitter_s: float
    catch_up: CatchUp
    salt: str

    @property
    def day(self) -> Day:
        """The part of each day in which runs may begin."""
        return self.when.day

    def jitter(self, key: int) -> float:
        """The delay of a run, derived from its key: the same at every call."""
        digest = hashlib.sha256(f"{self.salt} {key}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48 * self.jitter_s


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that has started, and whose end is not recorded yet.

    `missed`: earlier due times that it replaces. `failed`: when it failed last, after `tries`
    (None: no failure is recorded; its process may be dead); it is retried `again_s` later.
    """

    number: int
    due_s: float
    missed: int
    begun: ClockReading
    tries: int = 1
    failed: ClockReading | None = None
    again_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """A schedule's progress. `number`: how many runs were claimed.

    `last_due_s` is the last due time that was claimed or skipped, `anchor` when an interval was
    last due (None: never, and it is due at once).
    """

    number: int
    last_due_s: float
    anchor: ClockReading | None
    claim: ClaimedRun | None = None


class BeginRun(NamedTuple):
    """Claim and begin a run."""

    due_s: float
    missed: int


class MayTake(Enum):
    """Whether to retry a claimed run that has made nothing yet."""

    YES = "now"
    LATER = "when its part of the day begins"
    NO = "it is too late for it"


class Settle(NamedTuple):
    """Settle a claimed run: check its outcome and, if it made nothing, whether to retry it.

    `due_s` and `missed` are the due times that it covers by now.
    """

    may_take: MayTake
    due_s: float
    missed: int


class Wait(NamedTuple):
    """Nothing is due before `until_s` (wall clock; None: ever)."""

    until_s: float | None


class ScheduleDecision(NamedTuple):
    """What to do, and the new state; `notes` explain changes in it."""

    state: ScheduleState
    move: BeginRun | Settle | Wait
    notes: tuple[str, ...] = ()


def decide(timing: Timing, state: ScheduleState, now: ClockReading) -> ScheduleDecision:
    """What is due."""
    state, notes = _believed(state, now)
    if state.claim is not None:
        return ScheduleDecision(state, _claimed(timing, state, state.claim, now), notes)
    late = _late(timing, state, now)
    if late is None:
        return ScheduleDecision(state, Wait(_next(timing, state, now)), notes)
    if not timing.day.has(now.wall_s):
        return ScheduleDecision(state, Wait(timing.day.opens_s(now.wall_s)), notes)
    if timing.catch_up is CatchUp.SKIP and late.late_s > GRACE_S:
        state = _passed(timing, state, late.due_s, now)
        count = late.missed + 1
        skipped = f"{count}{'+' if count > MOST_MISSED else ''} missed, and not made up for"
        return ScheduleDecision(state, Wait(_next(timing, state, now)), (*notes, skipped))
    return ScheduleDecision(state, BeginRun(late.due_s, late.missed), notes)


def claim(
    timing: Timing, state: ScheduleState, begin: BeginRun, now: ClockReading
) -> ScheduleState:
    """The state after the run that is to begin is claimed."""
    number = state.number + 1
    new = ClaimedRun(number, begin.due_s, begin.missed, now)
    return replace(_passed(timing, state, begin.due_s, now), number=number, claim=new)


def claim_again(
    timing: Timing, state: ScheduleState, settle: Settle, now: ClockReading
) -> ScheduleState:
    """The state after a claimed run that made nothing is retried."""
    old = _require(state)
    new = replace(
        old,
        due_s=settle.due_s,
        missed=settle.missed,
        begun=now,
        tries=old.tries + 1,
        failed=None,
    )
    return replace(_passed(timing, state, settle.due_s, now), claim=new)


def failed(
    state: ScheduleState, why: str, now: ClockReading, *, is_busy: bool = False
) -> ScheduleState:
    """The state after the claimed run has failed, to be retried later."""
    held = _require(state)
    again_s = min(LONGEST_AGAIN_S, AGAIN_S * 2.0 ** min(held.tries - 1, 20))
    again_s = BUSY_AGAIN_S if is_busy else again_s
    return replace(state, claim=replace(held, failed=now, again_s=again_s, why=why))


def ended(state: ScheduleState) -> ScheduleState:
    """The state after the claimed run is over."""
    return replace(state, claim=None)


def upcoming(timing: Timing, state: ScheduleState, now: ClockReading) -> Iterator[float]:
    """When the next runs begin if all goes well, by the wall clock, in order."""
    decision = decide(timing, state, now)
    move, state = decision.move, decision.state
    if isinstance(move, Wait):
        if move.until_s is None:
            return
        first_s = move.until_s
    else:
        first_s = now.wall_s
    if isinstance(move, BeginRun):
        state = claim(timing, state, move, now)
    yield first_s
    if isinstance(timing.when, Calendar):
        times = timing.when.after(max(state.last_due_s, first_s - timing.jitter_s))
        rest: Iterator[float] = (at + timing.jitter(int(at)) for at in times)
    else:
        rest = _intervals(timing, timing.when.every_s, state, now, first_s)
    yield from (at for at in rest if at > first_s and timing.day.has(at))


def _intervals(
    timing: Timing, every_s: float, state: ScheduleState, now: ClockReading, first_s: float
) -> Iterator[float]:
    """All due times after the last one, without the very first."""
    due_s, number = first_s, state.number + 1
    if state.anchor is not None:
        due_s, number = now.wall_s - now.since(state.anchor), state.number
    while True:
        due_s, number = timing.day.opens_s(due_s + every_s), number + 1
        yield timing.day.opens_s(due_s + timing.jitter(number))


class _Late(NamedTuple):
    """A due run: since when, how late beyond its jitter, and which others it replaces."""

    due_s: float
    late_s: float
    missed: int


def _late(timing: Timing, state: ScheduleState, now: ClockReading) -> _Late | None:
    if isinstance(timing.when, Calendar):
        return _late_by_calendar(timing, timing.when, state, now)
    return _late_by_interval(timing, timing.when.every_s, state, now)


def _late_by_calendar(
    timing: Timing, calendar: Calendar, state: ScheduleState, now: ClockReading
) -> _Late | None:
    due_s = calendar.newest(state.last_due_s, now.wall_s)
    if due_s is not None and due_s + timing.jitter(int(due_s)) > now.wall_s:
        due_s = calendar.newest(state.last_due_s, due_s - 1)
    if due_s is None:
        return None
    until_s = due_s
    times = islice(calendar.after(state.last_due_s), MOST_MISSED + 1)
    missed = sum(1 for _ in takewhile(lambda at: at < until_s, times))
    return _Late(due_s, now.wall_s - due_s - timing.jitter(int(due_s)), missed)


def _late_by_interval(
    timing: Timing, every_s: float, state: ScheduleState, now: ClockReading
) -> _Late | None:
    if state.anchor is None:
        return _Late(now.wall_s, 0.0, 0)
    over_s = now.since(state.anchor) - every_s
    jitter_s = timing.jitter(state.number + 1)
    opened_s = timing.day.opened_s(now.wall_s)
    due_s, missed = now.wall_s - over_s, int(max(0.0, over_s) // every_s)
    if opened_s is not None and timing.day.has(now.wall_s) and due_s < opened_s:
        # A time that was due outside the part of the day is due when that begins.
        due_s, missed = opened_s, 0
    late_s = now.wall_s - due_s - jitter_s
    return None if over_s < 0 or late_s < 0 else _Late(due_s, late_s, missed)


def _passed(timing: Timing, state: ScheduleState, due_s: float, now: ClockReading) -> ScheduleState:
    """The due time is claimed or skipped: the next one counts from it."""
    if isinstance(timing.when, Calendar):
        return replace(state, last_due_s=max(state.last_due_s, due_s))
    back_s = now.wall_s - due_s
    every_s = timing.when.every_s
    # After a run this late the interval counts from its start, or the next would come too soon.
    if back_s > timing.jitter_s + every_s / 2:
        back_s = 0.0
    return replace(state, anchor=now.earlier(max(0.0, back_s)), last_due_s=due_s)


def _next(timing: Timing, state: ScheduleState, now: ClockReading) -> float | None:
    """The time of the next run that is not due yet."""
    if isinstance(timing.when, Calendar):
        for at in timing.when.after(state.last_due_s):
            begins_s = at + timing.jitter(int(at))
            if begins_s > now.wall_s:
                return timing.day.opens_s(begins_s)
        return None
    if state.anchor is None:
        return timing.day.opens_s(now.wall_s)
    due_s = now.wall_s - now.since(state.anchor) + timing.when.every_s
    opens_s = timing.day.opens_s(max(due_s, timing.day.opened_s(now.wall_s) or due_s))
    return timing.day.opens_s(opens_s + timing.jitter(state.number + 1))


def _claimed(
    timing: Timing, state: ScheduleState, held: ClaimedRun, now: ClockReading
) -> Settle | Wait:
    is_open = timing.day.has(now.wall_s)
    if held.failed is not None:
        rest_s = held.again_s - now.since(held.failed)
        if rest_s > 0 or not is_open:
            return Wait(timing.day.opens_s(now.wall_s + max(0.0, rest_s)))
    due_s, missed = held.due_s, held.missed
    if isinstance(timing.when, Calendar):
        late_s = now.wall_s - due_s - timing.jitter_s
    else:
        late_s = now.since(held.begun)
    newer = _late(timing, state, now)
    if newer is not None:
        # It replaces this one too: two checkpoints in a row would be useless.
        due_s, late_s, missed = newer.due_s, newer.late_s, missed + 1 + newer.missed
    may = MayTake.YES if is_open else MayTake.LATER
    if timing.catch_up is CatchUp.SKIP and late_s > GRACE_S:
        may = MayTake.NO
    return Settle(may, due_s, missed)


def _believed(state: ScheduleState, now: ClockReading) -> tuple[ScheduleState, tuple[str, ...]]:
    """The state adjusted to the clocks: after a reboot an anchor counts from now."""
    if state.anchor is not None and state.anchor.boot_id != now.boot_id:
        state = replace(state, anchor=now.earlier(now.since(state.anchor)))
    if state.last_due_s - now.wall_s > MOST_BACK_S:
        note = "the clock went back by more than a day: due times are counted from the present time"
        return replace(state, last_due_s=now.wall_s), (note,)
    return state, ()


def _require(state: ScheduleState) -> ClaimedRun:
    if state.claim is None:
        raise ValueError("no run is claimed")
    return state.claim
