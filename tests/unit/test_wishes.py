"""What may be wished of a migration, and what cannot be meant: told in words that help."""

from datetime import UTC, datetime

import pytest

from vmckpt.cli.arguments import intent, look_s, seconds_until
from vmckpt.errors import UsageError
from vmckpt.plan.choose import Intent

pytestmark = pytest.mark.unit


def wished(**words: str) -> Intent:
    options = dict.fromkeys(("max_pause", "finish_within", "finish_by", "max_slowdown"))
    return intent(**(options | words), never_risk_postcopy=False)


def test_wishes_are_taken() -> None:
    assert wished() == Intent()
    found = wished(max_pause="200ms", finish_within="10m", max_slowdown="20%")
    assert found == Intent(0.2, 600.0, 0.2)
    assert wished(max_slowdown="0%").max_slowdown == 0


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        ({"max_pause": "200"}, "'200' is not a duration", "200ms"),
        ({"finish_within": "1.5"}, "'1.5' is not a duration", "1.5s"),
        ({"max_pause": "-1s"}, "'-1s' is not a duration", "300ms"),
        ({"max_pause": "0ms"}, "--max-pause is no time at all", "--max-pause 300ms"),
        ({"finish_within": "0s"}, "--finish-within is no time at all", "--finish-within"),
        ({"max_pause": "1h"}, "--max-pause 1h is too long", "leave it out"),
        ({"max_slowdown": "20"}, "'20' is no slowdown", "20%"),
        ({"max_slowdown": "120%"}, "'120%' is no slowdown", "20%"),
        ({"max_slowdown": "-5%"}, "'-5%' is no slowdown", "20%"),
        ({"max_slowdown": "much"}, "'much' is no slowdown", "20%"),
        ({"finish_by": "25:00"}, "'25:00' is no time of day", "02:00"),
        ({"finish_by": "2:5"}, "'2:5' is no time of day", "02:00"),
        ({"finish_by": "noon"}, "'noon' is no time of day", "02:00"),
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


@pytest.mark.parametrize("text", ["2", "100ms", "2h", "-1s", ""])
def test_a_look_takes_a_time_that_can_be_measured(text: str) -> None:
    with pytest.raises(UsageError):
        look_s(text)
