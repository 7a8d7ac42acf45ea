"""Policies: read from TOML, and decided from rounds alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import UsageError
from vmckpt.migrate.options import Options
from vmckpt.migrate.policy_file import parse_policy
from vmckpt.plan.policy import Act, Pilot, Policy, Rule, replay, stalled_rounds

pytestmark = pytest.mark.unit

TEXT = """\
stall_percent = 95

[[when]]
stalls = 2
do = "raise-downtime"
by_percent = 100
most = "1s"

[[when]]
stalls = 6
do = "postcopy"
"""
RAISE, POSTCOPY = Rule(2, Act.RAISE_DOWNTIME, 100, 1000), Rule(6, Act.POSTCOPY)
POLICY = Policy((RAISE, POSTCOPY), stall_percent=95)


def test_a_policy_is_read_and_survives_its_record() -> None:
    found = parse_policy(TEXT, "p.toml")
    assert found == POLICY
    assert Policy.from_json(found.to_json()) == found
    assert found.may_postcopy
    assert Options(policy=found).may_postcopy
    assert not Options(policy=found, observe_only=True).may_postcopy
    assert not Options(policy=Policy((RAISE,))).may_postcopy


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("stalls = 6", "stalls = 0", "line 10"),
        ("stalls = 6\n", "", "stalls"),
        ('do = "postcopy"', 'do = "hope"', "line 11"),
        ('do = "postcopy"', "", "do"),
        ('most = "1s"', 'most = "1"', "line 7"),
        ('most = "1s"', 'most = "1h"', "line 7"),
        ('most = "1s"', "", "most"),
        ("stalls = 6", "stalls = 6\nmoon = 1", "moon"),
        ("stall_percent", "[stall_percent", "no TOML"),
    ],
)
def test_a_wrong_policy_is_told_by_line(old: str, new: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_policy(TEXT.replace(old, new), "p.toml")
    with pytest.raises(UsageError, match="at least one rule"):
        parse_policy("", "p.toml")


@pytest.mark.parametrize(
    ("left", "stalled"),
    [
        ([], 0),
        ([100], 0),
        ([100, 50], 0),
        ([100, 50, 20], 0),
        ([100, 50, 49], 1),
        ([100, 50, 49, 60, 50], 3),
        ([100, 50, 49, 60, 10], 0),
    ],
)
def test_a_round_stalls_that_gains_nothing(left: list[int], stalled: int) -> None:
    assert stalled_rounds(left, 96) == stalled


def seen(left: list[int], policy: Policy = POLICY) -> list[tuple[int, Act, int]]:
    pilot = Pilot(policy, 300)
    found = []
    for number, bytes_left in enumerate(left, start=1):
        if decision := pilot.see(number, bytes_left):
            found.append((number, decision.act, decision.downtime_ms))
        assert pilot.see(number, 0) is None  # the same round once more
    return found


def test_the_standstill_is_raised_stepwise_to_its_limit_then_comes_the_next_rule() -> None:
    assert seen([100, 50, 50, 50, 50, 50, 50, 50, 50, 50]) == [
        (4, Act.RAISE_DOWNTIME, 600),
        (5, Act.RAISE_DOWNTIME, 1000),
        (8, Act.POSTCOPY, 1000),
    ]
    assert seen([100, 50, 40, 30, 20, 10]) == []


def test_an_act_waits_for_a_good_round_but_not_for_ever() -> None:
    policy = Policy((Rule(2, Act.PAUSE),))
    assert seen([100, 50, 80, 80, 51, 50], policy) == [(5, Act.PAUSE, 300)]
    assert seen([100, 50, 80, 80, 80, 80, 80], policy) == [(6, Act.PAUSE, 300)]


@given(st.lists(st.integers(0, 1 << 40), max_size=60))
def test_the_standstill_is_never_raised_over_its_limit(left: list[int]) -> None:
    raised = [ms for _, act, ms in seen(left) if act is Act.RAISE_DOWNTIME]
    assert raised == sorted(set(raised))
    assert all(300 < ms <= 1000 for ms in raised)


def test_a_run_is_replayed_from_its_samples() -> None:
    def sample(at_s: float, number: int, left: int, status: str = "active") -> dict[str, Any]:
        return {"at_s": at_s, "round": number, "remaining_bytes": left, "status": status}

    samples = [
        sample(0.0, 1, 100, "setup"),
        *(sample(number / 10, number, 50) for number in range(1, 6)),
        sample(0.9, 9, 50, "completed"),
    ]
    found = replay(POLICY, 300, samples)
    assert [(at_s, one.act) for at_s, one in found] == [
        (0.4, Act.RAISE_DOWNTIME),
        (0.5, Act.RAISE_DOWNTIME),
    ]
