"""The judge of benchmarks/forecast."""

from typing import Any

import pytest

from benchmarks.forecast_replay import of_others
from benchmarks.forecast_verdict import breaks, errors, near_best, verdict
from vmckpt.events.record import RunRecord

pytestmark = pytest.mark.unit


def row(mode: str, took_s: float, forecast_s: float, **more: Any) -> dict[str, Any]:
    band = [0.9 * forecast_s, forecast_s, 1.1 * forecast_s]
    return {
        "cell": "a", "way": mode, "outcome": "completed", "judged": True, "total_time_s": took_s,
        "guest_downtime_ms": 50.0, "downtime_ms": 5, "forecast_ends": True, "chosen": "precopy",
        "forecast_ms": 2.0, "forecast": {"total_s": band, "downtime_s": [0.04, 0.05, 0.06]},
        "turn": 0,
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


def test_a_way_is_judged_by_its_middle_run_too() -> None:
    aims = found([row("precopy", took_s, 1.0, turn=n) for n, took_s in enumerate((1.5, 1.01, 0.9))])
    assert aims["total time, median error"]["found"] == 0.1
    assert aims["total time, p90 error"]["found"] == 0.5
    assert aims["total time, p90 error, a way's middle run"]["found"] == 0.01


def test_what_differs_between_runs_of_one_way_is_told() -> None:
    rows = [
        row("precopy", took_s, 9.9, turn=n, guest_downtime_ms=50.0 + 5 * n)
        for n, took_s in enumerate((1.5, 1.0, 0.9))
    ]
    # Of ways that went less often no one knows it.
    told = verdict([*rows, row("multifd", 1.0, 1.0)])["unforeseeable"]
    assert told == {
        "runs": 3, "total_time_median": 0.1, "total_time_p90": 0.5, "downtime_median_ms": 5.0,
    }  # fmt: skip


def test_each_turn_s_choice_is_judged_by_what_all_turns_took() -> None:
    slow = [row("precopy", took_s, 1.0, turn=n) for n, took_s in enumerate((0.9, 1.2, 1.2))]
    fast = [
        row("multifd", took_s, 1.0, turn=n, chosen="multifd")
        for n, took_s in enumerate((1.0, 1.0, 1.3))
    ]
    # In the last turn the benchmark went the other way first, whose measurement chose itself.
    assert list(near_best([slow[0], fast[0], slow[1], fast[1], fast[2], slow[2]])) == [
        False, False, True,
    ]  # fmt: skip


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


def test_errors_are_told_of_what_ended_without_aims() -> None:
    ended = [row("precopy", 1.1, 1.0, judged=False), row("zstd", 2.0, 1.0, guest_downtime_ms=90.0)]
    endless = row("precopy", 9.0, 1.0, outcome="timed-out")
    assert errors([*ended, endless]) == {
        "runs": 2, "total_time_median": 0.55, "total_time_p90": 1.0, "downtime_median_ms": 20.0,
        "total_times_inside": 0.5, "downtimes_inside": 0.5,
    }  # fmt: skip
    assert errors([endless]) == {}


def test_a_cell_that_is_left_out_teaches_none_of_its_own_runs() -> None:
    rows = [row(mode, 1, 1, run=run) for mode, run in (("precopy", "1"), ("zstd", "2"))]
    rows += [row("zstd", 1, 1, run="3", cell="b"), row("hybrid", 1, 1, outcome="timed-out")]
    records = [RunRecord(name, "migrate", {}) for name in ("calibration", "1", "2", "3")]
    assert [one.run for one in of_others(rows[0], rows, records)] == ["calibration", "3"]
    assert [one.run for one in of_others(rows[2], rows, records)] == ["calibration", "1", "2"]
