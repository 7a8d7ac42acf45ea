"""Run records as the planner's teachers and judges."""

from typing import Any

import pytest

from vmckpt.events.record import RunRecord
from vmckpt.forecast.learned import learned, moved
from vmckpt.forecast.model.forecast import Band, Forecast, TransferMode
from vmckpt.forecast.model.rounds import HELD_S
from vmckpt.forecast.score import in_company as in_company_of
from vmckpt.forecast.score import score, scored, unforeseen
from vmckpt.migrate.calibrate import _copied_mib
from vmckpt.ui.run_charts import figure

pytestmark = pytest.mark.unit


def sample(at_s: float, status: str, pages: int, zero_pages: int) -> dict[str, Any]:
    counted = {"normal_pages": pages, "zero_pages": zero_pages, "throttle_percent": 0, "round": 2}
    figures = ("remaining_bytes", "transferred_bytes", "throughput_bytes_per_s")
    rest = dict.fromkeys((*figures, "dirty_rate_bytes_per_s"), 1 << 20)
    return {"at_s": at_s, "status": status} | counted | rest


def run(
    pages: int = 50_000,
    zero_pages: int = 10_000,
    *,
    request: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
    forecast: dict[str, Any] | None = None,
) -> RunRecord:
    """A move that took 10 us a page, 2 us a zero page, and 0.3 s besides."""
    took_s = pages * 1e-5 + zero_pages * 2e-6 + HELD_S
    came = {
        "outcome": "completed",
        "method": "precopy",
        "transfer_time_s": took_s,
        "total_time_s": took_s + 0.3,
        "guest_downtime_ms": None,
        "downtime_ms": 25,
        "rounds": 4,
        "transferred_bytes": pages * 4104,
    }
    record = RunRecord(
        "20260101-000000-abcd",
        "migrate",
        {"vm": "web", "source": "a", "target": "b"} | (request or {}),
        result=came | (result or {}),
        forecast=forecast,
    )
    record.events = [
        {"event": "PhaseBegan", "at_s": 0.1, "phase": "mirror"},
        {"event": "PhaseBegan", "at_s": 2.1, "phase": "transfer"},
    ]
    record.samples = [
        sample(0.2, "active", pages - 100, zero_pages),
        sample(0.3, "completed", pages, zero_pages),
    ]
    return record


MOVES = [run(), run(5_000, 60_000), run(30_000, 30_000)]


def test_costs_are_learned_by_pair_direction_and_way_of_sending() -> None:
    compressed = run(request={"compression": "zstd"})
    back, safe = run(request={"source": "b", "target": "a"}), run(result={"encryption": "x509"})
    links = learned([*MOVES, compressed, back, safe], "a", "b")
    assert set(links) == {"plain", "zstd", "plain, encrypted"}
    plain = links["plain"]
    assert plain.moves == 4  # the one back counts too, a little
    assert plain.costs == pytest.approx((1e-5, 2e-6, 0.0, 0.0, 0.0, 2e-6), rel=1e-6, abs=1e-9)
    assert plain.fixed_s == pytest.approx(0.3)
    assert plain.switch_s == pytest.approx(0.025)
    assert learned(MOVES, "b", "a") == {}
    assert learned([*MOVES, back], "b", "a")["plain"].moves == 4


@pytest.mark.parametrize("result", [{"outcome": "undone"}, {"transfer_time_s": 0}])
def test_some_moves_teach_nothing(result: dict[str, Any]) -> None:
    assert moved(run(result=result)) is None


def test_a_move_held_to_a_bandwidth_teaches_all_but_how_fast_pages_go() -> None:
    held = [
        run(
            request={"bandwidth_bytes_per_s": 10**6},
            result={"transfer_time_s": 200.0, "total_time_s": 201.0, "downtime_ms": 75},
        )
        for _ in range(5)
    ]
    assert learned(held, "a", "b") == {}
    free, all_ = (learned(runs, "a", "b")["plain"] for runs in (MOVES, [*MOVES, *held]))
    assert all_.costs == free.costs
    assert all_.spread == free.spread
    assert (all_.fixed_s, all_.switch_s) == pytest.approx((1.0, 0.074))


def test_an_idle_guest_and_a_stopped_one_teach_nothing_about_the_switch() -> None:
    for result in ({"rounds": 2}, {"method": "stop"}):
        one = moved(run(result=result))
        assert one is not None
        assert one.stalled_s is None


def test_what_the_guest_felt_counts_before_qemus_word() -> None:
    felt = [run(result={"guest_downtime_ms": 60.0}) for _ in range(2)]
    assert learned([*MOVES, *felt], "a", "b")["plain"].switch_s == pytest.approx(0.06)


def test_what_goes_last_on_a_fast_link_mostly_goes_while_the_guest_runs() -> None:
    held, free = (moved(run(request={"bandwidth_bytes_per_s": limit})) for limit in (10**9, 0))
    assert held is not None
    assert free is not None
    assert (held.last_pages, free.last_pages) == (100, 0)


def test_what_a_vm_takes_besides_is_its_own() -> None:
    other = run(request={"vm": "slow"}, result={"total_time_s": 10.57})
    assert learned([*MOVES, other], "a", "b", "slow")["plain"].fixed_s == pytest.approx(10.0)
    assert learned([*MOVES, other], "a", "b", "web")["plain"].fixed_s == pytest.approx(0.3)


def test_what_an_agent_takes_is_told_by_guests_with_one() -> None:
    unseen = learned(MOVES, "a", "b", "db", agent=True)["plain"]
    assert unseen.fixed_s == pytest.approx(0.3 + 0.5)
    assert unseen.fixed_spread_s >= 0.3
    clocked = run(request={"vm": "mail", "guest_agent": True}, result={"total_time_s": 1.27})
    seen = learned([*MOVES, clocked], "a", "b", "db", agent=True)["plain"]
    assert seen.fixed_s == pytest.approx(1.27 - 0.57)
    assert learned([*MOVES, clocked], "a", "b", "db")["plain"].fixed_s == pytest.approx(0.3)


def test_copied_disks_teach_how_fast_they_go() -> None:
    result = {"total_time_s": 2.87}
    one = run(request={"disk_bytes": 4 << 20}, result=result)
    found = learned([one], "a", "b")["plain"]
    assert found.disk_bytes_per_s == 2 << 20
    assert found.fixed_s == pytest.approx(0.3)


def test_how_long_a_guest_waits_for_a_page_in_post_copy_is_learned() -> None:
    def postcopy(felt_ms: float | None) -> RunRecord:
        result = {"method": "postcopy", "guest_downtime_ms": felt_ms, "downtime_ms": 2}
        record = run(result=result)
        record.events[0]["phase"] = "drain"  # for 2 s
        return record

    moves = [*MOVES, *(postcopy(25 + waits_ms) for waits_ms in (100, 200, 300))]
    link = learned(moves, "a", "b")["plain"]
    # Not longer than what it waits for takes to come.
    assert [link.waits_s(slow_s, 0) for slow_s in (2.0, 0.5, 0.1)] == pytest.approx([0.2, 0.2, 0.1])
    assert link.waits_s(2.0, -1) < 0.2 < link.waits_s(2.0, 1)
    few = [*MOVES, postcopy(2025), postcopy(None), postcopy(None)]
    # Nothing is known yet: it may be any part of the slow phase.
    unknown = learned(few, "a", "b")["plain"]
    assert [unknown.waits_s(2.0, scenario) for scenario in (-1, 0, 1)] == [0.0, 1.0, 2.0]
    assert unknown.switch_s == pytest.approx(0.025)


def planned(
    total_s: float, pause_s: float, way: TransferMode = TransferMode.PRECOPY
) -> dict[str, Any]:
    def around(value: float) -> Band:
        return Band(0.9 * value, value, 1.1 * value)

    one = Forecast(
        way, True, around(total_s), around(pause_s), around(2e8), Band(0.0, 0.0, 0.0), 3
    )  # fmt: skip
    return {"forecast": one.to_json(), "reason": "it keeps all"}


def test_forecasts_are_held_against_outcomes() -> None:
    good = run(forecast=planned(0.8, 0.025))
    late = run(forecast=planned(0.41, 0.025, TransferMode.MULTIFD))
    moves = scored([good, late, run()])
    assert [round(move.total_error, 3) for move in moves] == [0.088, 1.122]
    multifd, precopy, everything = score(moves)
    assert (multifd.way, multifd.total_inside, multifd.pause_inside) == ("multifd", 0.0, 1.0)
    assert (precopy.way, precopy.moves, precopy.total_inside) == ("precopy", 1, 1.0)
    assert (everything.way, everything.moves, everything.total_inside) == ("all", 2, 0.5)
    assert score([]) == []
    assert learned([good, late], "a", "b")["plain"].spread > 0.5


def test_what_ends_against_its_forecast_is_named() -> None:
    endless = planned(1.0, 1.0)
    endless["forecast"]["ends"] = False
    gave_up = run(forecast=planned(1.0, 1.0), result={"outcome": "timed-out"})
    assert (
        len(unforeseen([run(forecast=endless), gave_up, run(), run(forecast=planned(1, 1))])) == 2
    )


def test_dd_says_what_it_copied() -> None:
    assert _copied_mib("3+1 records in\n3+1 records out\n3500000 bytes copied") == 4
    for odd in ("dd: failed to open", "many records out", f"{'9' * 5000}+0 records out"):
        assert _copied_mib(odd) == 0


def test_a_run_is_drawn_with_and_without_a_forecast() -> None:
    for record in (run(), run(forecast=planned(0.8, 0.025))):
        memory, *_ = figure(record).axes
        labels = {str(line.get_label()) for line in memory.get_lines()}
        assert {"left", "sent", "end"} <= labels


def test_what_was_done_on_the_way_is_drawn_and_company_on_the_link_teaches_nothing() -> None:
    record = run()
    assert moved(record) is not None
    note = {"event": "Note", "at_s": 0.5, "text": "another migration uses the link: continuing"}
    record.events.append(note | {"code": "shared-link"})
    _, rates, *_ = figure(record).axes
    assert [text.get_text() for text in rates.texts] == ["another migration uses the link"]
    assert moved(record) is None


def test_moves_in_turn_teach_such_moves_alone_and_waiting_for_others_does_not_count() -> None:
    in_turn, alone = run(request={"in_turn": True}), run()
    assert alone.result is not None
    in_turn.result = {**alone.result, "total_time_s": alone.result["total_time_s"] + 4.0}
    in_turn.events = [
        {"event": "PhaseBegan", "at_s": 0.2, "phase": "turn"},
        {"event": "PhaseBegan", "at_s": 4.2, "phase": "transfer"},
    ]
    (one,) = [found for found in [moved(in_turn)] if found is not None]
    assert one.total_s - one.transfer_s == pytest.approx(0.3)
    assert learned([in_turn], "a", "b") == {}
    assert learned([*MOVES, in_turn], "a", "b", in_turn=True)["plain"].moves == 1


def in_company(**facts: Any) -> RunRecord:
    record = run(**facts)
    record.events.append({"event": "Note", "at_s": 0.5, "code": "shared-link", "text": "another"})
    return record


def test_a_forecast_of_a_move_on_a_shared_link_is_not_judged_and_widens_no_other() -> None:
    late = {"total_time_s": 9.0}
    shared = in_company(forecast=planned(0.87, 0.025), result=late)
    assert learned([*MOVES, shared], "a", "b")["plain"].spread == pytest.approx(0.12)
    gave_up = in_company(forecast=planned(1.0, 1.0), result={"outcome": "timed-out"})
    assert scored([shared]) == []
    assert unforeseen([gave_up]) == []
    assert in_company_of([run(), shared, gave_up]) == [shared.run, gave_up.run]


def test_one_forecast_that_was_far_off_does_not_widen_all_later_ones() -> None:
    good = [run(forecast=planned(0.87, 0.025)) for _ in range(9)]
    bad = run(forecast=planned(0.87, 0.025), result={"total_time_s": 87.0})
    with_bad = [*MOVES, *good, bad]
    assert learned(with_bad, "a", "b")["plain"].spread < 0.1
    # Until there are others it is all that is known.
    assert learned([*MOVES, bad], "a", "b")["plain"].spread > 10


@pytest.mark.parametrize(
    "result",
    [
        {"total_time_s": 0.1},
        {"total_time_s": None},
        {"transfer_time_s": float("nan")},
        {"transferred_bytes": 0},
    ],
)
def test_figures_that_cannot_be_teach_nothing(result: dict[str, Any]) -> None:
    odd = run(result=result, forecast=planned(0.87, 0.025))
    assert moved(odd) is None
    assert learned([*MOVES, odd], "a", "b") == learned(MOVES, "a", "b")


@pytest.mark.parametrize("code", ["link", "figures"])
def test_a_move_whose_link_broke_or_whose_last_figures_are_missing_teaches_nothing(
    code: str,
) -> None:
    record = run()
    record.events.append({"event": "Note", "at_s": 0.5, "code": code, "text": "why"})
    assert moved(record) is None


def test_a_record_that_does_not_say_how_long_disks_were_copied_teaches_nothing() -> None:
    record = run(request={"disk_bytes": 4 << 20})
    del record.events[1:]
    assert moved(record) is None
    assert learned([*MOVES, record], "a", "b")["plain"].disk_bytes_per_s is None


def test_moves_that_auto_made_over_channels_teach_what_channels_cost() -> None:
    records = [run(pages, result={"channels": 2}) for pages in (30_000, 50_000, 70_000)]
    assert set(learned(records, "a", "b")) == {"multifd"}
    assert set(learned([run(result={"channels": 1}) for _ in range(3)], "a", "b")) == {"plain"}
