"""Migrations, from their run records, as metrics. Pure.

The counters count the records that there are: they fall when somebody removes records, as counters
do when a process starts anew.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vmckpt.events.record import RunRecord
from vmckpt.forecast.learned import CALIBRATION, pause_ms
from vmckpt.forecast.score import scored, unforeseen
from vmckpt.metrics.exposition import Family, Kind

DURATIONS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
PAUSES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
ERRORS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def migrations(records: Iterable[RunRecord]) -> list[Family]:
    """How many there were and how they ended, how long they took, what they cost, when the last."""
    moves = [record for record in records if record.operation == "migrate" and _counts(record)]
    total = Family("vmckpt_migrations_total", Kind.COUNTER, "Migrations, by how they ended.")
    outcomes = Counter((str(m.result["outcome"]), _method(m)) for m in moves if m.result)
    for (outcome, method), count in sorted(outcomes.items()):
        total.add(count, outcome=outcome, method=method)
    unfinished = Family(
        "vmckpt_migrations_unfinished",
        Kind.GAUGE,
        "Migrations whose end is not recorded here: under way, or their command was killed.",
    )
    if moves:
        unfinished.add(sum(move.result is None for move in moves))
    done = [move for move in moves if (move.result or {}).get("outcome") == "completed"]
    took = Family(
        "vmckpt_migration_duration_seconds",
        Kind.HISTOGRAM,
        "How long completed migrations took, all in all.",
    )
    _by_method(took, done, lambda result: result.get("total_time_s"), DURATIONS_S)
    pauses = Family(
        "vmckpt_migration_downtime_seconds",
        Kind.HISTOGRAM,
        "How long guests stood still: as their heartbeats show it, else by QEMU's word.",
    )
    _by_method(pauses, done, _pause_s, PAUSES_S)
    sent = Family(
        "vmckpt_migration_sent_bytes_total", Kind.COUNTER, "Memory sent by completed migrations."
    )
    for method in sorted({_method(move) for move in done}):
        amounts = (m.result or {} for m in done if _method(m) == method)
        sent.add(sum(one.get("transferred_bytes", 0) for one in amounts), method=method)
    last = Family(
        "vmckpt_migration_last_begun_timestamp_seconds",
        Kind.GAUGE,
        "When the VM's last migration began.",
    )
    latest = {str(move.request.get("vm")): move.began_unix_s for move in moves}
    for vm, began_unix_s in sorted(latest.items()):
        last.add(began_unix_s, vm=vm)
    return [total, unfinished, took, pauses, sent, last, *forecasts(moves)]


def forecasts(records: Sequence[RunRecord]) -> list[Family]:
    """How right the forecasts of completed migrations were."""
    moves = scored(records)
    error = Family(
        "vmckpt_forecast_duration_error_ratio",
        Kind.HISTOGRAM,
        "How far off forecast durations were, as parts of them, signs left out.",
    )
    pause_error = Family(
        "vmckpt_forecast_downtime_error_seconds",
        Kind.HISTOGRAM,
        "How far off forecast downtimes were, signs left out.",
    )
    total = Family("vmckpt_forecasts_total", Kind.COUNTER, "Forecasts that were put to the test.")
    inside = Family(
        "vmckpt_forecasts_inside_total",
        Kind.COUNTER,
        "Forecasts whose duration came out between p10 and p90.",
    )
    for way in sorted({move.way for move in moves}):
        ours = [move for move in moves if move.way is way]
        error.observe([abs(move.total_error) for move in ours], ERRORS, way=way)
        missed = [abs(e) for move in ours if (e := move.pause_error_s) is not None]
        if missed:
            pause_error.observe(missed, PAUSES_S, way=way)
        total.add(len(ours), way=way)
        inside.add(sum(move.forecast.total_s.holds(move.total_s) for move in ours), way=way)
    wrong = Family(
        "vmckpt_forecasts_wrong_end_total",
        Kind.COUNTER,
        "Migrations that ended, or did not, against their forecast.",
    )
    if moves:
        wrong.add(len(unforeseen(records)))
    return [error, pause_error, total, inside, wrong]


def _by_method(
    family: Family,
    moves: Sequence[RunRecord],
    figure: Callable[[dict[str, Any]], float | None],
    bounds: Sequence[float],
) -> None:
    for method in sorted({_method(move) for move in moves}):
        results = (dict(move.result or {}) for move in moves if _method(move) == method)
        values = [value for result in results if (value := figure(result)) is not None]
        if values:
            family.observe(values, bounds, method=method)


def _pause_s(result: dict[str, Any]) -> float | None:
    pause = pause_ms(result)
    return None if pause is None else pause / 1e3


def _counts(record: RunRecord) -> bool:
    """Whether it was a guest of somebody's, not one of `host calibrate`'s."""
    return not str(record.request.get("vm")).startswith(CALIBRATION)


def _method(record: RunRecord) -> str:
    """What QEMU did, else what was asked for."""
    return str((record.result or {}).get("method") or record.request.get("method", "unknown"))
