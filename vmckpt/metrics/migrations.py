"""Migrations, from their run records, as metrics. Pure.

Counters count the existing records: they drop when records are removed, like counters after a
restart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from vmckpt.events.record import RunRecord
from vmckpt.forecast.learned import CALIBRATION, pause_ms
from vmckpt.forecast.score import scored, unforeseen
from vmckpt.metrics.families import add, observe

DURATIONS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
PAUSES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
ERRORS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def migrations(records: Iterable[RunRecord]) -> list[Metric]:
    """Count, results, durations, cost and last time of migrations."""
    moves = [record for record in records if record.operation == "migrate" and _counts(record)]
    total = CounterMetricFamily(
        "vmckpt_migrations_total", "Migrations by outcome.", labels=("outcome", "method")
    )
    outcomes = Counter((str(m.result["outcome"]), _method(m)) for m in moves if m.result)
    for (outcome, method), count in sorted(outcomes.items()):
        add(total, (outcome, method), count)
    unfinished = GaugeMetricFamily(
        "vmckpt_migrations_unfinished",
        "Migrations whose end is not recorded here: under way, or their command was killed.",
    )
    if moves:
        add(unfinished, (), sum(move.result is None for move in moves))
    done = [move for move in moves if (move.result or {}).get("outcome") == "completed"]
    took = HistogramMetricFamily(
        "vmckpt_migration_duration_seconds",
        "Total duration of completed migrations.",
        labels=("method",),
    )
    _by_method(took, done, lambda result: result.get("total_time_s"), DURATIONS_S)
    pauses = HistogramMetricFamily(
        "vmckpt_migration_downtime_seconds",
        "Downtime of guests: by their heartbeats if available, otherwise QEMU's figure.",
        labels=("method",),
    )
    _by_method(pauses, done, _pause_s, PAUSES_S)
    sent = CounterMetricFamily(
        "vmckpt_migration_sent_bytes_total",
        "Memory sent by completed migrations.",
        labels=("method",),
    )
    for method in sorted({_method(move) for move in done}):
        amounts = (m.result or {} for m in done if _method(m) == method)
        add(sent, (method,), sum(one.get("transferred_bytes", 0) for one in amounts))
    last = GaugeMetricFamily(
        "vmckpt_migration_last_begun_timestamp_seconds",
        "When the VM's last migration began.",
        labels=("vm",),
    )
    latest = {str(move.request.get("vm")): move.began_unix_s for move in moves}
    for vm, began_unix_s in sorted(latest.items()):
        add(last, (vm,), began_unix_s)
    return [total, unfinished, took, pauses, sent, last, *forecasts(moves)]


def forecasts(records: Sequence[RunRecord]) -> list[Metric]:
    """The accuracy of the forecasts of completed migrations."""
    moves = scored(records)
    error = HistogramMetricFamily(
        "vmckpt_forecast_duration_error_ratio",
        "Relative error of forecast durations, without sign.",
        labels=("way",),
    )
    pause_error = HistogramMetricFamily(
        "vmckpt_forecast_downtime_error_seconds",
        "Error of forecast downtimes, without sign.",
        labels=("way",),
    )
    total = CounterMetricFamily(
        "vmckpt_forecasts_total",
        "Forecasts compared with their migration.",
        labels=("way",),
    )
    inside = CounterMetricFamily(
        "vmckpt_forecasts_inside_total",
        "Forecasts whose duration was between p10 and p90.",
        labels=("way",),
    )
    for mode in sorted({move.mode for move in moves}):
        ours = [move for move in moves if move.mode is mode]
        observe(error, (mode,), [abs(move.total_error) for move in ours], ERRORS)
        missed = [abs(e) for move in ours if (e := move.pause_error_s) is not None]
        if missed:
            observe(pause_error, (mode,), missed, PAUSES_S)
        add(total, (mode,), len(ours))
        add(inside, (mode,), sum(move.forecast.total_s.holds(move.total_s) for move in ours))
    wrong = CounterMetricFamily(
        "vmckpt_forecasts_wrong_end_total",
        "Migrations that completed, or did not, contrary to their forecast.",
    )
    if moves:
        add(wrong, (), len(unforeseen(records)))
    return [error, pause_error, total, inside, wrong]


def _by_method(
    family: HistogramMetricFamily,
    moves: Sequence[RunRecord],
    figure: Callable[[dict[str, Any]], float | None],
    bounds: Sequence[float],
) -> None:
    for method in sorted({_method(move) for move in moves}):
        results = (dict(move.result or {}) for move in moves if _method(move) == method)
        values = [value for result in results if (value := figure(result)) is not None]
        if values:
            observe(family, (method,), values, bounds)


def _pause_s(result: dict[str, Any]) -> float | None:
    pause = pause_ms(result)
    return None if pause is None else pause / 1e3


def _counts(record: RunRecord) -> bool:
    """Whether it moved a user's guest, not one of `host calibrate`."""
    return not str(record.request.get("vm")).startswith(CALIBRATION)


def _method(record: RunRecord) -> str:
    """The method that QEMU used, otherwise the requested one."""
    return str((record.result or {}).get("method") or record.request.get("method", "unknown"))
