"""What may be requested of a migration, and what cannot be meant: told in words that help."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from vmckpt.cli.options.arguments import TimeLimits, measure_s, seconds_until
from vmckpt.errors import UsageError
from vmckpt.forecast.model.choose import Intent
from vmckpt.options.declared import read
from vmckpt.options.migration import MigrationOptions

pytestmark = pytest.mark.unit


def wished(**words: str) -> Intent:
    given = {"max_downtime_ms": words.pop("max_downtime", None)}
    options = read(MigrationOptions, {"never_risk_postcopy": False} | given)
    return TimeLimits(**words).intent(options)


def test_wishes_are_taken() -> None:
    assert wished() == Intent()
    found = wished(max_downtime="200ms", finish_within="10m", max_slowdown="20%")
    assert found == Intent(0.2, 600.0, 0.2)
    assert wished(max_slowdown="0%").max_slowdown == 0


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        ({"max_downtime": "200"}, "'200' is not a duration", "200ms"),
        ({"finish_within": "1.5"}, "'1.5' is not a duration", "1.5s"),
        ({"max_downtime": "-1s"}, "'-1s' is not a duration", "300ms"),
        ({"max_downtime": "0ms"}, "--max-downtime 0ms is too short", "--max-downtime 300ms"),
        ({"finish_within": "0s"}, "--finish-within is too short", "--finish-within"),
        ({"max_downtime": "1h"}, "--max-downtime 1h is too long", "leave it out"),
        ({"max_slowdown": "20"}, "'20' is not a slowdown", "20%"),
        ({"max_slowdown": "120%"}, "'120%' is not a slowdown", "20%"),
        ({"max_slowdown": "-5%"}, "'-5%' is not a slowdown", "20%"),
        ({"max_slowdown": "much"}, "'much' is not a slowdown", "20%"),
        ({"finish_by": "25:00"}, "'25:00' is not a time of day", "02:00"),
        ({"finish_by": "2:5"}, "'2:5' is not a time of day", "02:00"),
        ({"finish_by": "noon"}, "'noon' is not a time of day", "02:00"),
        ({"finish_within": "5m", "finish_by": "02:00"}, "both given", "leave one"),
    ],
)
def test_what_cannot_be_meant_is_told_with_a_way_out(
    words: dict[str, str], what: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as caught:
        wished(**words)
    assert what in caught.value.what
    assert caught.value.why
    assert remedy in caught.value.remedy


def test_a_time_of_day_is_the_next_one() -> None:
    now = datetime(2026, 11, 22, 23, 30, tzinfo=UTC)
    assert seconds_until("23:45", now) == 900
    assert seconds_until("00:30", now) == 3600
    assert seconds_until("23:30", now) == 86400


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In 2026 its clocks are put forward on 8 March at 02:00, and back on 1 November at 02:00."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("new_york")
@pytest.mark.parametrize(
    ("clock", "now", "again", "hours"),
    [
        ("06:00", "2026-03-07 23:00", 0, 6),
        ("06:00", "2026-10-31 23:00", 0, 8),
        ("06:00", "2026-06-01 23:00", 0, 7),
        # One that the clock leaves out is not later than it says.
        ("02:30", "2026-03-08 00:30", 0, 1),
        ("02:30", "2026-03-08 01:45", 0, 0.75),
        # It says this twice: the next time counts.
        ("01:30", "2026-11-01 01:00", 0, 0.5),
        ("01:30", "2026-11-01 01:45", 0, 0.75),
        ("01:30", "2026-11-01 01:45", 1, 23.75),
    ],
)
def test_a_clock_that_is_put_forward_or_back_is_reckoned_with(
    clock: str, now: str, again: int, hours: float
) -> None:
    moment = datetime.fromisoformat(now).replace(fold=again)
    assert seconds_until(clock, moment) == 3600 * hours


@pytest.mark.parametrize("text", ["2", "100ms", "2h", "-1s", ""])
def test_a_look_takes_a_time_that_can_be_measured(text: str) -> None:
    with pytest.raises(UsageError):
        measure_s(text)
