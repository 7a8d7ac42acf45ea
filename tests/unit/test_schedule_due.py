"""What is due when: intervals, windows, jitter, what was missed, clocks that were set."""

from dataclasses import replace
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.fleet.schedule.due import (
    GRACE_S,
    MOST_BACK_S,
    BeginRun,
    ClockReading,
    Every,
    MayTake,
    ScheduleState,
    Settle,
    Timing,
    Wait,
    claim,
    claim_again,
    decide,
    ended,
    failed,
    upcoming,
)
from vmckpt.fleet.schedule.instants import Calendar, Day
from vmckpt.fleet.schedule.request import CatchUp
from vmckpt.replicate.operator.keeping import DailyWindow

UTC = ZoneInfo("UTC")
# 2026-11-22 00:00 UTC.
MIDNIGHT_S = 1795305600.0
HOUR_S = 3600.0
ALWAYS, NIGHT = Day(None, UTC), Day(DailyWindow.parse("22:00-06:00"), UTC)
HOURLY = Timing(Calendar("0 * * * *", ALWAYS), 0.0, CatchUp.ONCE, "salt")
EVERY = Timing(Every(HOUR_S, ALWAYS), 0.0, CatchUp.ONCE, "salt")


def at(hours: float, boot: str = "a") -> ClockReading:
    return ClockReading(MIDNIGHT_S + hours * HOUR_S, 1e4 + hours * HOUR_S, boot)


def state(now: ClockReading) -> ScheduleState:
    return ScheduleState(0, now.wall_s, None)


def run(timing: Timing, before: ScheduleState, now: ClockReading) -> tuple[ScheduleState, BeginRun]:
    """What is due now is claimed, and done at once."""
    decision = decide(timing, before, now)
    assert isinstance(decision.move, BeginRun), decision
    return ended(claim(timing, decision.state, decision.move, now)), decision.move


def waits(timing: Timing, before: ScheduleState, now: ClockReading) -> float:
    """Hours of the day until which there is nothing to be done."""
    move = decide(timing, before, now).move
    assert isinstance(move, Wait), move
    assert move.until_s is not None
    return (move.until_s - MIDNIGHT_S) / HOUR_S


def test_an_interval_is_due_at_once_and_then_counted_from_when_it_was_due() -> None:
    now, _ = run(EVERY, state(at(0)), at(0))
    assert waits(EVERY, now, at(0.5)) == 1.0
    # Somewhat late it keeps its beat; much too late it begins again.
    now, begin = run(EVERY, now, at(1.2))
    assert begin == (at(1).wall_s, 0)
    assert waits(EVERY, now, at(1.3)) == 2.0
    now, begin = run(EVERY, now, at(5.7))
    assert begin.missed == 3
    assert waits(EVERY, now, at(5.8)) == pytest.approx(6.7)


def test_a_clock_that_steps_does_not_move_an_interval() -> None:
    now, _ = run(EVERY, state(at(0)), at(0))
    stepped = at(0.5)._replace(wall_s=at(1.5).wall_s)
    assert waits(EVERY, now, stepped) == 2.0
    back = at(1.0)._replace(wall_s=at(0).wall_s)
    assert isinstance(decide(EVERY, now, back).move, BeginRun)


def test_over_a_reboot_the_wall_clock_counts_but_never_less_than_since_then() -> None:
    now, _ = run(EVERY, state(at(0)), at(0))
    assert waits(EVERY, now, ClockReading(at(0.9).wall_s, 10.0, "b")) == pytest.approx(1.0)
    assert isinstance(decide(EVERY, now, ClockReading(at(1.0).wall_s, 10.0, "b")).move, BeginRun)
    wrong = ClockReading(at(-5).wall_s, HOUR_S, "b")
    assert isinstance(decide(EVERY, now, wrong).move, BeginRun)
    # From then on it is counted in the new boot: a clock that is put right moves nothing.
    seen = decide(EVERY, now, ClockReading(at(0.9).wall_s, 10.0, "b")).state
    assert waits(EVERY, seen, ClockReading(at(7).wall_s, 20.0, "b")) == pytest.approx(7.1, abs=0.01)


def test_what_was_missed_is_made_up_for_once() -> None:
    now, begin = run(HOURLY, state(at(0.5)), at(4.5))
    assert begin == (at(4).wall_s, 3)
    assert waits(HOURLY, now, at(4.6)) == 5.0


def test_or_not_at_all() -> None:
    for timing in (HOURLY, EVERY):
        skips = replace(timing, catch_up=CatchUp.SKIP)
        before = replace(state(at(0.5)), anchor=at(0))
        decision = decide(skips, before, at(4.5))
        assert isinstance(decision.move, Wait), timing
        assert decision.notes == ("4 missed, and not made up for",)
        # What is only somewhat late is run.
        decision = decide(skips, before, at(1 + (GRACE_S - 1) / HOUR_S))
        assert isinstance(decision.move, BeginRun)


def test_a_clock_that_goes_back_has_nothing_run_twice() -> None:
    now, _ = run(HOURLY, state(at(0.5)), at(2.1))
    assert waits(HOURLY, now, at(1.1)) == 3.0
    assert waits(HOURLY, now, at(2.0)) == 3.0


def test_a_clock_that_was_years_ahead_stops_nothing() -> None:
    far = ScheduleState(1, at(0).wall_s + 2 * MOST_BACK_S, None)
    decision = decide(HOURLY, far, at(0.5))
    assert decision.state.last_due_s == at(0.5).wall_s
    assert "went back" in decision.notes[0]
    assert waits(HOURLY, far, at(0.5)) == 1.0


def test_runs_begin_within_the_window_only() -> None:
    nightly = replace(EVERY, when=Every(HOUR_S, NIGHT))
    assert waits(nightly, state(at(12)), at(12)) == 22.0
    now, begin = run(nightly, state(at(12)), at(22))
    assert begin.due_s == at(22).wall_s
    for hour in range(23, 30):
        now, _ = run(nightly, now, at(hour))
    assert waits(nightly, now, at(30.5)) == 46.0
    # What it would have done by day was not missed.
    assert decide(nightly, now, at(46)).move == BeginRun(at(46).wall_s, 0)
    # A calendar's late run waits for the window.
    by_calendar = replace(HOURLY, when=Calendar("0 5 * * *", NIGHT))
    assert waits(by_calendar, state(at(0)), at(7)) == 22.0
    assert decide(by_calendar, state(at(0)), at(22)).move == BeginRun(at(5).wall_s, 0)


def test_jitter_is_the_same_whoever_asks() -> None:
    jittered = replace(HOURLY, jitter_s=1800.0)
    (first,) = islice(upcoming(jittered, state(at(0.9)), at(0.9)), 1)
    assert 0 <= first - at(1).wall_s < 1800
    early = ClockReading(first - 1, 0.0, "b")
    assert isinstance(decide(jittered, state(at(0.9)), early).move, Wait)
    late = decide(jittered, state(at(0.9)), ClockReading(first + 0.001, 0.0, "c"))
    assert late.move == BeginRun(at(1).wall_s, 0)
    assert next(upcoming(replace(jittered, salt="other"), state(at(0.9)), at(0.9))) != first


def test_a_run_that_was_cut_off_is_looked_after_and_one_that_failed_later() -> None:
    begun = claim(HOURLY, state(at(0.5)), BeginRun(at(1).wall_s, 0), at(1))
    assert decide(HOURLY, begun, at(1.2)).move == Settle(MayTake.YES, at(1).wall_s, 0)
    tried = failed(begun, "no", at(1.2))
    assert isinstance(decide(HOURLY, tried, at(1.205)).move, Wait)
    assert isinstance(decide(HOURLY, tried, at(1.3)).move, Settle)
    # By the time of the next one it stands for that too.
    settle = decide(HOURLY, tried, at(3.5)).move
    assert settle == Settle(MayTake.YES, at(3).wall_s, 2)
    assert isinstance(settle, Settle)
    after = ended(claim_again(HOURLY, tried, settle, at(3.5)))
    assert waits(HOURLY, after, at(3.5)) == 4.0
    assert after.number == begun.number
    skips = replace(HOURLY, catch_up=CatchUp.SKIP)
    found = decide(skips, tried, at(1.9)).move
    assert isinstance(found, Settle)
    assert found.may_take is MayTake.NO


def test_what_was_cut_off_is_not_made_outside_the_window() -> None:
    nightly = replace(EVERY, when=Every(HOUR_S, NIGHT))
    begun = claim(nightly, state(at(5.9)), BeginRun(at(5.9).wall_s, 0), at(5.9))
    found = decide(nightly, begun, at(6.1)).move
    assert isinstance(found, Settle)
    assert found.may_take is MayTake.LATER
    tried = failed(begun, "no", at(6.1))
    assert waits(nightly, tried, at(8)) == 22.0


TIMINGS = [
    HOURLY,
    EVERY,
    replace(HOURLY, jitter_s=1500.0),
    replace(EVERY, jitter_s=1500.0),
    Timing(Every(900.0, NIGHT), 100.0, CatchUp.ONCE, "x"),
    Timing(Calendar("*/20 * * * *", NIGHT), 100.0, CatchUp.SKIP, "x"),
]


@pytest.mark.parametrize("number", range(len(TIMINGS)))
def test_what_is_told_to_come_comes(number: int) -> None:
    """A machine that is always up begins runs exactly when `upcoming` said."""
    timing, now = TIMINGS[number], at(20.3)
    told = list(islice(upcoming(timing, state(now), now), 12))
    assert all(a < b for a, b in pairwise(told))
    happened: list[float] = []
    current = state(now)
    while len(happened) < 12:
        move = decide(timing, current, now).move
        if isinstance(move, Wait):
            assert move.until_s is not None
            rest_s = move.until_s - now.wall_s + 1e-4
            now = ClockReading(now.wall_s + rest_s, now.boot_s + rest_s, "a")
            continue
        current, _ = run(timing, current, now)
        happened.append(now.wall_s)
    assert happened == pytest.approx(told, abs=0.01)


steps = st.lists(
    st.tuples(st.sampled_from(["pass", "step", "boot"]), st.floats(-1.0, 3.0)), max_size=12
)


# tests/contract/test_schedule_histories.py plays whole machines.
@settings(max_examples=15)
@given(steps, st.sampled_from(range(4)))
def test_no_due_time_is_claimed_twice(happens: list[tuple[str, float]], number: int) -> None:
    timing, now = TIMINGS[number], at(0.5)
    current, claimed = state(now), list[float]()
    for what, hours in happens:
        if what == "step":
            now = now._replace(wall_s=now.wall_s + max(-1.0, min(1.0, hours)) * HOUR_S)
        else:
            up_s = abs(hours) * HOUR_S
            boot = f"{now.boot_id}." if what == "boot" else now.boot_id
            since_s = up_s / 2 if what == "boot" else now.boot_s + up_s
            now = ClockReading(now.wall_s + up_s, since_s, boot)
        decision = decide(timing, current, now)
        if isinstance(decision.move, BeginRun):
            current, begin = run(timing, current, now)
            claimed.append(begin.due_s)
            # Nothing is due twice at one moment.
            assert isinstance(decide(timing, current, now).move, Wait)
        else:
            current = decision.state
    if isinstance(timing.when, Calendar):
        assert claimed == sorted(set(claimed))
