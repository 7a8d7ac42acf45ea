"""The judge of benchmarks/forecast."""

from typing import Any

import pytest

from benchmarks.forecast_verdict import breaks, near_best, verdict

pytestmark = pytest.mark.unit


def row(way: str, took_s: float, forecast_s: float, **more: Any) -> dict[str, Any]:
    band = [0.9 * forecast_s, forecast_s, 1.1 * forecast_s]
    return {
        "cell": "a", "way": way, "outcome": "completed", "judged": True, "total_time_s": took_s,
        "guest_downtime_ms": 50.0, "downtime_ms": 5, "forecast_ends": True, "chosen": "precopy",
        "forecast_ms": 2.0, "forecast": {"total_s": band, "downtime_s": [0.04, 0.05, 0.06]},
    } | more  # fmt: skip


def found(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {aim["aim"]: aim for aim in verdict(rows)["aims"]}


def test_only_judged_runs_count_and_right_ones_meet_the_aims() -> None:
    rows = [row("precopy", 1.0, 1.02), row("multifd", 1.05, 1.0), row("postcopy", 0.9, 5.0)]
    rows[-1]["judged"] = False
    aims = found(rows)
    assert verdict(rows)["compared"] == 2
    assert aims["total time, median error"]["met"]
    assert aims["downtime, median error (ms, or part)"]["found"] == [0.0, 0.0]
    assert not aims["total times within p10-p90"]["met"]  # all of them are too many: 90 % at most


def test_what_does_not_end_as_forecast_is_counted() -> None:
    endless = row("hybrid", 1.0, 1.0, outcome="timed-out")
    aims = found([row("precopy", 1.0, 1.0), endless])
    assert aims["ends, or not, against the forecast"]["found"] == 0.5
    impatient = found([row("precopy", 1.0, 1.0), endless | {"give_up_s": 1.0}])
    assert impatient["ends, or not, against the forecast"]["found"] == 0.0


def test_post_copy_is_no_better_than_what_is_safe() -> None:
    rows = [row("precopy", 1.0, 1.0), row("multifd", 0.95, 1.0), row("postcopy", 0.5, 1.0)]
    assert list(near_best(rows)) == [True]
    assert list(near_best([rows[0], row("multifd", 0.8, 1.0)])) == [False]


@pytest.mark.parametrize(
    ("more", "broken"),
    [
        ({}, False),
        ({"total_time_s": 3.1}, True),
        ({"guest_downtime_ms": 61.0}, True),
        ({"outcome": "refused"}, False),
        ({"outcome": "timed-out"}, True),
    ],
)
def test_a_broken_intent_is_one_that_was_not_refused(more: dict[str, Any], broken: bool) -> None:
    wishes = ["--max-pause", "60ms", "--finish-within", "3s"]
    assert breaks(row("intent", 1.0, 1.0, intent=wishes) | more) is broken
