"""Policies: read from TOML, and decided from rounds alone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.codec import builtins, convert
from vmckpt.errors import UsageError
from vmckpt.forecast.limits import limits, within
from vmckpt.forecast.model.pilot import Pilot, PrecopySample, replay, stalled_rounds
from vmckpt.forecast.model.rounds import NOT_HELD
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.options.policy_file import parse_policy
from vmckpt.preflight.migration.method import resolve_method

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
RAISE, POSTCOPY = PolicyRule(2, Act.RAISE_DOWNTIME, 100, 1000), PolicyRule(6, Act.POSTCOPY)
POLICY = Policy((RAISE, POSTCOPY), stall_percent=95)


def test_a_policy_is_read_and_survives_its_record() -> None:
    found = parse_policy(TEXT, "p.toml")
    assert found == POLICY
    assert convert(Policy, builtins(found)) == found
    assert found.may_postcopy
    assert MigrationOptions(policy=found).may_postcopy
    assert not MigrationOptions(policy=found, observe_only=True).may_postcopy
    assert not MigrationOptions(policy=Policy((RAISE,))).may_postcopy


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
        ("stall_percent", "[stall_percent", "not valid TOML"),
        ('do = "postcopy"', 'do = "throttle"', "by_percent"),
        ('do = "postcopy"', 'do = "throttle"\nby_percent = 5', "most_percent"),
        ('do = "postcopy"', 'do = "throttle"\nby_percent = 5\nmost_percent = 100', "line 13"),
        ("stalls = 6", "passes = 0", "line 10"),
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
        if decision := pilot.see(PrecopySample(float(number), number, bytes_left)):
            found.append((number, decision.act, decision.downtime_ms))
        assert (
            pilot.see(PrecopySample(float(number), number, 0)) is None
        )  # the same round once more
    return found


def test_the_standstill_is_raised_stepwise_to_its_limit_then_comes_the_next_rule() -> None:
    assert seen([100, 50, 50, 50, 50, 50, 50, 50, 50, 50]) == [
        (4, Act.RAISE_DOWNTIME, 600),
        (5, Act.RAISE_DOWNTIME, 1000),
        (8, Act.POSTCOPY, 1000),
    ]
    assert seen([100, 50, 40, 30, 20, 10]) == []


def test_an_act_waits_for_a_good_round_but_not_for_ever() -> None:
    policy = Policy((PolicyRule(2, Act.PAUSE),))
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


THROTTLE = PolicyRule(2, Act.THROTTLE, 20, most_percent=50)
MORE = """\
[[when]]
stalls = 2
do = "throttle"
by_percent = 20
most_percent = 50

[[when]]
passes = 5
do = "abort"
"""


def steps(pilot: Pilot, *, follows: bool) -> list[tuple[int, int]]:
    """In which rounds of one that stalls forever the guest is slowed, and by how much."""
    found, now = [], 0
    for number in range(1, 16):
        look = PrecopySample(
            float(number), number, 100 if number == 1 else 50, throttle_percent=now
        )
        if decision := pilot.see(look):
            assert (decision.act, decision.downtime_ms) == (Act.THROTTLE, 300)
            found.append((number, decision.throttle_percent))
        if follows:
            now = pilot.throttle_percent
    return found


def test_the_guest_is_slowed_by_steps_each_after_the_last_was_seen_to_be_too_little() -> None:
    assert parse_policy(MORE, "p.toml").rules == (THROTTLE, PolicyRule(0, Act.ABORT, passes=5))
    assert steps(Pilot(Policy((THROTTLE,)), 300), follows=True) == [(4, 20), (6, 40), (8, 50)]
    # A QEMU that has not done the first step is not told the next.
    assert steps(Pilot(Policy((THROTTLE,)), 300), follows=False) == [(4, 20)]


def test_a_deadline_counts_in_what_sending_memory_once_takes() -> None:
    pilot = Pilot(Policy((PolicyRule(0, Act.ABORT, passes=5),)), 300)
    looks = [(10.0, 1), (12.0, 2), (19.9, 30), (20.0, 31), (21.0, 32)]
    acts = [pilot.see(PrecopySample(at_s, number, 100 - number)) for at_s, number in looks]
    assert [decision is not None for decision in acts] == [False, False, False, True, False]
    assert "5 times" in next(decision.why for decision in acts if decision)
    slower = Pilot(Policy((PolicyRule(0, Act.ABORT, passes=5),)), 300)
    assert not any(
        slower.see(PrecopySample(at_s, n, 50)) for at_s, n in [(0.0, 1), (9.0, 2), (44.0, 50)]
    )


def test_a_policy_keeps_what_was_promised() -> None:
    pause, postcopy = PolicyRule(9, Act.PAUSE), PolicyRule(9, Act.POSTCOPY)
    policy = Policy((RAISE, THROTTLE, pause, postcopy))
    assert policy.within(None, None) == policy
    assert policy.within(400, 30).rules == (
        PolicyRule(2, Act.RAISE_DOWNTIME, 100, 400),
        PolicyRule(2, Act.THROTTLE, 20, most_percent=30),
    )
    assert policy.within(None, 0).rules == (RAISE, pause, postcopy)
    # What is left out is not asked of the hosts either.
    assert MigrationOptions(policy=policy).may_postcopy
    assert not MigrationOptions(policy=policy, most_downtime_ms=400).may_postcopy


def test_what_steers_a_migration_is_the_policy_within_its_promises() -> None:
    policy = Policy((RAISE, THROTTLE))
    asked = MigrationOptions(policy=policy, most_throttle_percent=30)
    assert asked.steers is not None
    assert [rule.most_percent for rule in asked.steers.rules] == [0, 30]
    assert asked.throttles_at_will
    assert asked.settings().throttle_at_will
    assert not replace(asked, observe_only=True).throttles_at_will
    # Auto-converge slows the guest by itself; other ways have no rounds to steer by.
    assert not replace(asked, auto_converge=True).throttles_at_will
    assert replace(asked, auto_converge=True).settings().most_throttle_percent == 30
    assert replace(asked, method=Method.HYBRID).steers is None
    assert not resolve_method(asked, loses_pages=False).auto_converge
    assert resolve_method(
        MigrationOptions(policy=Policy((RAISE,))), loses_pages=False
    ).auto_converge


def test_a_planned_migration_may_do_all_that_was_allowed_and_nothing_else() -> None:
    assert within(None, None) is None
    found = within(400, None)
    assert found is not None
    assert [(rule.act, rule.most_ms) for rule in found.rules] == [(Act.RAISE_DOWNTIME, 400)]
    found = within(None, 20)
    assert found is not None
    assert [(rule.act, rule.most_percent) for rule in found.rules] == [(Act.THROTTLE, 20)]


def test_steps_of_a_throttle_are_replayed() -> None:
    samples = [
        {"at_s": n / 10, "round": n, "remaining_bytes": 100 if n == 1 else 50, "status": "active"}
        for n in range(1, 12)
    ]
    found = replay(parse_policy(MORE, "p.toml"), 300, samples)
    assert [(one.act, one.throttle_percent) for _, one in found] == [
        (Act.THROTTLE, 20),
        (Act.THROTTLE, 40),
        (Act.ABORT, 40),
        (Act.THROTTLE, 50),
    ]


def test_a_forecast_goes_by_the_limits_that_qemu_is_given() -> None:
    usual = MigrationOptions(max_downtime_ms=200, bandwidth_bytes_per_s=10**8)
    assert limits(usual) == (0.2, 1e8, 2, 0.99, NOT_HELD)
    for percent, most in ((40, 0.4), (0, 0.01), (100, 0.99)):
        assert limits(replace(usual, most_throttle_percent=percent)).most_throttle == most
