"""What keeps a VM protected does next, and when its window is."""

from datetime import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import UsageError
from vmckpt.replicate.operator.keeping import DailyWindow, KeepingMove, KeepingView, decide

HOSTS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("home", "answering", "up", "is_time", "expected"),
    [
        ("a", "", "abc", True, (KeepingMove.PROTECT, "b")),
        ("b", "", "abc", True, (KeepingMove.PROTECT, "a")),  # after a failover: by the old host
        ("a", "", "ac", True, (KeepingMove.PROTECT, "c")),  # the preferred standby is down
        ("a", "", "abc", False, (KeepingMove.GOOD, "")),
        ("a", "primary standby", "abc", True, (KeepingMove.GOOD, "")),
        ("a", "primary standby", "abc", False, (KeepingMove.STOP, "")),
        ("a", "primary", "a", False, (KeepingMove.STOP, "")),
        ("", "standby", "b", False, (KeepingMove.GOOD, "")),  # it is about to take over
    ],
)
def test_what_is_due(
    home: str, answering: str, up: str, is_time: bool, expected: tuple[KeepingMove, str]
) -> None:
    view = KeepingView(home, frozenset(answering.split()), frozenset(up), is_time)
    assert decide(view, HOSTS) == expected


@pytest.mark.parametrize(("home", "up"), [("a", "a"), ("", "abc"), ("", "")])
def test_without_two_hosts_and_the_vm_it_waits(home: str, up: str) -> None:
    move, why = decide(KeepingView(home, frozenset(), frozenset(up), is_time=True), HOSTS)
    assert move is KeepingMove.WAIT
    assert why


@pytest.mark.parametrize(
    ("answering", "up", "is_time", "expected"),
    [
        ("", "abc", True, KeepingMove.FREE),
        ("", "abc", False, KeepingMove.FREE),
        ("", "ab", True, KeepingMove.WAIT),  # c may have it, or boots more slowly
        ("standby", "abc", True, KeepingMove.GOOD),  # it is about to take over
    ],
)
def test_one_whose_hosts_were_both_off_may_be_started_once_all_are_back(
    answering: str, up: str, is_time: bool, expected: KeepingMove
) -> None:
    roles = frozenset(answering.split())
    view = KeepingView("", roles, frozenset(up), is_time, is_cut_down=True)
    assert decide(view, HOSTS)[0] is expected


@given(st.times(), st.times(), st.times())
def test_it_is_either_in_a_window_or_in_the_rest_of_the_day(a: time, b: time, now: time) -> None:
    if a != b:
        assert DailyWindow(a, b).has(now) != DailyWindow(b, a).has(now)
        assert DailyWindow(a, b).has(a)
        assert not DailyWindow(a, b).has(b)


def test_a_window_is_two_times_of_day() -> None:
    night = DailyWindow.parse("22:00-06:00")
    assert [night.has(time(hour)) for hour in (21, 22, 0, 5, 6)] == [False, True, True, True, False]
    for text in ("22:00", "22-06-07", "25:00-06:00", "06:00-06:00", "", "always"):
        with pytest.raises(UsageError):
            DailyWindow.parse(text)
