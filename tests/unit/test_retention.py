"""Which checkpoints a rule keeps."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.checkpoint.catalogue.retention import (
    Candidate,
    RetentionRule,
    contradictions,
    dates,
    plan,
)
from vmckpt.errors import UsageError

NOW_S = datetime(2026, 11, 22, 12, 0, tzinfo=UTC).timestamp()
HOUR_S = 3600.0


def at(hours_ago: float, added_bytes: int = 1) -> Candidate:
    return Candidate(f"{hours_ago:g}h", NOW_S - hours_ago * HOUR_S, added_bytes)


def kept(candidates: list[Candidate], rule: RetentionRule) -> list[str]:
    """Those that are kept, in the order given; they were taken in the order of their clocks."""
    in_order = sorted(candidates, key=lambda one: one.taken_unix_s)
    found = plan(in_order, rule, now_unix_s=NOW_S)
    return [one.id for one in candidates if found[one.id].keep]


def test_the_newest_few_are_kept() -> None:
    assert kept([at(3), at(1), at(2)], RetentionRule(keep_last=2)) == ["1h", "2h"]


@pytest.mark.parametrize("years", [10, -10])
def test_a_clock_that_has_jumped_makes_nothing_old_for_a_schedule(years: int) -> None:
    """The operator's went ten years ahead, or the host's back: all but two would have gone."""
    jump_s = years * 365 * 24 * HOUR_S
    now_s = NOW_S + max(0.0, jump_s)
    before = [at(hours) for hours in (5, 4, 3, 2, 1)]
    new = at(0)._replace(taken_unix_s=NOW_S + min(0.0, jump_s))
    rule = RetentionRule(max_age_s=24 * HOUR_S)
    found = plan([*before, new], rule, now_unix_s=now_s, just_taken=[new.id])
    assert all(verdict.keep for verdict in found.values())
    old = at(30)
    found = plan([old, *before, at(0)], rule, now_unix_s=NOW_S, just_taken=["0h"])
    assert [key for key, verdict in found.items() if not verdict.keep] == ["30h"]


def test_of_each_hour_the_newest_is_kept() -> None:
    every_quarter = [at(n / 4) for n in range(12)]
    assert kept(every_quarter, RetentionRule(hourly=3)) == ["0h", "0.25h", "1.25h"]


def test_of_each_day_and_week_the_newest_is_kept() -> None:
    every_half_day = [at(12 * n) for n in range(30)]
    # 2026-11-22 is a Sunday: its week began on the 16th.
    assert kept(every_half_day, RetentionRule(daily=2, weekly=2)) == ["0h", "24h", "168h"]


def test_age_and_size_take_away_what_others_keep() -> None:
    four = [at(n, added_bytes=10) for n in range(4)]
    assert kept(four, RetentionRule(keep_last=9, max_age_s=1.5 * HOUR_S)) == ["0h", "1h"]
    assert kept(four, RetentionRule(max_bytes=25)) == ["0h", "1h"]


def test_a_clock_that_is_behind_does_not_make_the_newest_the_oldest() -> None:
    """What was just taken on a host that is a day behind stays, and is the newest."""
    taken = [at(3), at(2), at(1), at(24)]
    found = plan(taken, RetentionRule(keep_last=2), now_unix_s=NOW_S)
    assert [one.id for one in taken if found[one.id].keep] == ["1h", "24h"]
    assert [one.id for one in contradictions(taken, now_unix_s=NOW_S)] == ["24h"]


def test_a_clock_that_was_ahead_once_ages_only_its_own() -> None:
    """One host's clock was a year ahead, once: the others are dated by what they say."""
    ahead = Candidate("ahead", NOW_S + 365 * 24 * HOUR_S, 1)
    taken = [at(30), at(26), ahead, at(2), at(1)]
    assert dates([one.taken_unix_s for one in taken], now_unix_s=NOW_S) == [
        at(30).taken_unix_s, at(26).taken_unix_s, *[at(2).taken_unix_s] * 2, at(1).taken_unix_s,
    ]  # fmt: skip
    found = plan(taken, RetentionRule(max_age_s=24 * HOUR_S), now_unix_s=NOW_S)
    assert [one.id for one in taken if found[one.id].keep] == ["ahead", "2h", "1h"]
    assert contradictions(taken, now_unix_s=NOW_S) == [ahead]


def test_no_clock_that_is_wrong_takes_what_its_own_host_says_is_young() -> None:
    found = plan([at(1), at(9999)], RetentionRule(max_age_s=2 * HOUR_S), now_unix_s=NOW_S)
    assert all(verdict.keep for verdict in found.values())


def test_what_was_just_taken_stays() -> None:
    """A restore to an older checkpoint, in a store that another host has gone on in."""
    taken = [at(3), at(2), at(1)]
    found = plan(taken, RetentionRule(keep_last=1), now_unix_s=NOW_S, just_taken=["2h"])
    assert [one.id for one in taken if found[one.id].keep] == ["2h", "1h"]
    assert found["2h"].why == "just taken"


def test_the_newest_stays_whatever_the_rule_says() -> None:
    assert kept([at(9), at(8)], RetentionRule(max_age_s=1.0)) == ["8h"]


def test_a_rule_that_says_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        plan([at(1)], RetentionRule(), now_unix_s=NOW_S)


@given(st.lists(st.floats(-5000, 5000), max_size=40))
def test_dates_never_fall_and_change_nothing_that_agrees(hours: list[float]) -> None:
    said = [NOW_S - h * HOUR_S for h in hours]
    found = dates(said, now_unix_s=NOW_S)
    assert found == sorted(found)
    assert dates(found, now_unix_s=NOW_S) == found
    assert dates(sorted(said), now_unix_s=NOW_S) == sorted(said)


@given(
    st.lists(st.floats(-5000, 5000), min_size=1, max_size=40),
    st.builds(
        RetentionRule,
        *[st.integers(0, 5)] * 4,
        st.none() | st.floats(0, 9e6),
        st.none() | st.just(5),
    ).filter(lambda rule: not rule.is_empty),
)
def test_whatever_clocks_say_the_newest_stays(hours: list[float], rule: RetentionRule) -> None:
    taken = [Candidate(str(n), NOW_S - h * HOUR_S, 1) for n, h in enumerate(hours)]
    assert plan(taken, rule, now_unix_s=NOW_S)[taken[-1].id].keep


@given(
    st.lists(st.floats(0, 5000), max_size=40, unique=True),
    st.builds(RetentionRule, *[st.integers(0, 5)] * 4).filter(lambda rule: not rule.is_empty),
)
def test_applied_again_a_rule_takes_nothing_more(hours: list[float], rule: RetentionRule) -> None:
    candidates = [Candidate(str(n), NOW_S - h * HOUR_S, 1) for n, h in enumerate(hours)]
    once = kept(candidates, rule)
    assert kept([one for one in candidates if one.id in once], rule) == once
    assert bool(once) == bool(candidates)
