"""Which checkpoints a rule keeps."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.checkpoint.retention import Candidate, Rule, plan
from vmckpt.errors import UsageError

NOW_S = datetime(2026, 11, 22, 12, 0, tzinfo=UTC).timestamp()
HOUR_S = 3600.0


def at(hours_ago: float, added_bytes: int = 1) -> Candidate:
    return Candidate(f"{hours_ago:g}h", NOW_S - hours_ago * HOUR_S, added_bytes)


def kept(candidates: list[Candidate], rule: Rule) -> list[str]:
    found = plan(candidates, rule, now_unix_s=NOW_S)
    return [one.id for one in candidates if found[one.id].keep]


def test_the_newest_few_are_kept() -> None:
    assert kept([at(3), at(1), at(2)], Rule(keep_last=2)) == ["1h", "2h"]


def test_of_each_hour_the_newest_is_kept() -> None:
    every_quarter = [at(n / 4) for n in range(12)]
    assert kept(every_quarter, Rule(hourly=3)) == ["0h", "0.25h", "1.25h"]


def test_of_each_day_and_week_the_newest_is_kept() -> None:
    every_half_day = [at(12 * n) for n in range(30)]
    # 2026-11-22 is a Sunday: its week began on the 16th.
    assert kept(every_half_day, Rule(daily=2, weekly=2)) == ["0h", "24h", "168h"]


def test_age_and_size_take_away_what_others_keep() -> None:
    four = [at(n, added_bytes=10) for n in range(4)]
    assert kept(four, Rule(keep_last=9, max_age_s=1.5 * HOUR_S)) == ["0h", "1h"]
    assert kept(four, Rule(max_bytes=25)) == ["0h", "1h"]


def test_the_newest_stays_whatever_the_rule_says() -> None:
    assert kept([at(9), at(8)], Rule(max_age_s=1.0)) == ["8h"]


def test_a_rule_that_says_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        plan([at(1)], Rule(), now_unix_s=NOW_S)


@given(
    st.lists(st.floats(0, 5000), max_size=40, unique=True),
    st.builds(Rule, *[st.integers(0, 5)] * 4).filter(any),
)
def test_applied_again_a_rule_takes_nothing_more(hours: list[float], rule: Rule) -> None:
    candidates = [Candidate(str(n), NOW_S - h * HOUR_S, 1) for n, h in enumerate(hours)]
    once = kept(candidates, rule)
    assert kept([one for one in candidates if one.id in once], rule) == once
    assert bool(once) == bool(candidates)
