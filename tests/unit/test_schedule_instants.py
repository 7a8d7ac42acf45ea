"""A calendar's times and parts of the day, across the hours that come twice or not at all."""

from datetime import UTC, datetime
from itertools import islice

import pytest

from vmckpt.errors import UsageError
from vmckpt.fleet.schedule.instants import Calendar, Day, parse_zone
from vmckpt.replicate.operator.keeping import DailyWindow

BERLIN = parse_zone("Europe/Berlin")
ALWAYS = Day(None, BERLIN)


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def said(times: list[float]) -> list[str]:
    return [datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M") for at in times]


def first(calendar: Calendar, after: str, count: int) -> list[str]:
    return said(list(islice(calendar.after(unix(after)), count)))


def test_times_are_those_of_the_zone() -> None:
    daily = Calendar.parse("30 3 * * *", ALWAYS)
    assert first(daily, "2026-07-01T00:00+00:00", 2) == ["07-01 01:30", "07-02 01:30"]
    assert first(daily, "2026-12-01T00:00+00:00", 1) == ["12-01 02:30"]
    # Strictly later: the one that was last is never its own next one.
    assert first(daily, "2026-12-01T02:30+00:00", 1) == ["12-02 02:30"]


@pytest.mark.parametrize(
    ("expression", "begin", "found"),
    [
        # 2:00 to 3:00 is left out on 2026-03-29; what was due then is due when it is over.
        ("30 2 * * *", "2026-03-28T12:00+00:00", ["03-29 01:00", "03-30 00:30"]),
        # 2:00 to 3:00 comes twice on 2026-10-25: what is due at a time of day is due once,
        ("30 2 * * *", "2026-10-24T12:00+00:00", ["10-25 00:30", "10-26 01:30"]),
        # what is due each hour, each hour.
        ("0 * * * *", "2026-10-24T23:30+00:00", ["10-25 00:00", "10-25 01:00", "10-25 02:00"]),
    ],
)
def test_clocks_that_are_changed_leave_nothing_out(
    expression: str, begin: str, found: list[str]
) -> None:
    calendar = Calendar.parse(expression, ALWAYS)
    assert first(calendar, begin, len(found)) == found


def test_an_hour_that_comes_twice_gives_no_time_before_where_it_is_looked_from() -> None:
    calendar = Calendar.parse("45 2 * * *", ALWAYS)
    for begin in ("2026-10-25T00:50+00:00", "2026-10-25T01:40+00:00"):
        assert first(calendar, begin, 1) == ["10-26 01:45"]


@pytest.mark.parametrize("expression", ["*/15 * * * *", "0 3 * * *", "30 2 1 * *", "0 4 29 2 *"])
@pytest.mark.parametrize("until", ["2026-10-25T01:20+00:00", "2026-03-29T01:00+00:00"])
def test_the_newest_time_is_the_last_one_before(expression: str, until: str) -> None:
    calendar, until_s = Calendar.parse(expression, ALWAYS), unix(until)
    found = calendar.newest(0.0, until_s)
    assert found is not None
    assert found <= until_s < next(calendar.after(found))
    assert calendar.newest(found, until_s) is None
    assert calendar.newest(found - 1, until_s) == found


def test_a_window_leaves_out_what_is_not_in_it() -> None:
    night = Day(DailyWindow.parse("22:00-06:00"), BERLIN)
    calendar = Calendar.parse("0 */4 * * *", night)
    assert first(calendar, "2026-07-01T12:00+00:00", 3) == [
        "07-01 22:00",
        "07-02 02:00",
        "07-02 22:00",
    ]
    assert list(Calendar.parse("0 12 * * *", night).after(unix("2026-07-01T12:00+00:00"))) == []
    noon, late = unix("2026-07-01T10:00+00:00"), unix("2026-07-01T22:30+00:00")
    assert (night.has(noon), night.has(late)) == (False, True)
    assert said([night.opens_s(noon)]) == ["07-01 20:00"]
    assert night.opens_s(late) == late
    opened = night.opened_s(late)
    assert opened is not None
    assert said([opened]) == ["07-01 20:00"]
    assert ALWAYS.opened_s(noon) is None


@pytest.mark.parametrize(
    "expression", ["", "nonsense", "61 * * * *", "* * * *", "0 0 0 * * *", "0 0 31 2 *"]
)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(UsageError, match="is not a calendar expression"):
        Calendar.parse(expression, ALWAYS)


@pytest.mark.parametrize("name", ["Mars/Olympus", "../etc/passwd", ""])
def test_what_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="there is no time zone"):
        parse_zone(name)
