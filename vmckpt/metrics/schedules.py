"""Metrics of schedules, from `vmckpt schedule list --json`. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vmckpt.metrics.families import add

Status = Mapping[str, Any]


class _ScheduleFamily(NamedTuple):
    """A metric family, and how its value is read from a schedule's status (None: not available)."""

    name: str
    kind: type[GaugeMetricFamily | CounterMetricFamily]
    help: str
    of: Callable[[Status], float | None]


def _of_interval(key: str) -> Callable[[Status], float | None]:
    return lambda status: status["interval"] and status["interval"][key]


_FIGURES = (
    _ScheduleFamily(
        "last_success_timestamp_seconds",
        GaugeMetricFamily,
        "When a run last succeeded.",
        lambda status: status["last_done_unix_s"],
    ),
    _ScheduleFamily(
        "next_due_timestamp_seconds",
        GaugeMetricFamily,
        "When the next run begins; the present time if one is due.",
        lambda status: status["next_unix_s"],
    ),
    _ScheduleFamily(
        "runs_total",
        CounterMetricFamily,
        "Runs that succeeded.",
        lambda status: status["runs_done"],
    ),
    _ScheduleFamily(
        "failures_total",
        CounterMetricFamily,
        "Attempts that failed.",
        lambda status: status["runs_failed"],
    ),
    _ScheduleFamily(
        "failures_in_a_row",
        GaugeMetricFamily,
        "Attempts that failed since a run succeeded.",
        lambda status: status["failures"],
    ),
    _ScheduleFamily(
        "interval_seconds",
        GaugeMetricFamily,
        "The present interval of --every auto.",
        _of_interval("every_s"),
    ),
    _ScheduleFamily(
        "assumed_mtbf_seconds",
        GaugeMetricFamily,
        "Mean time between failures that --every auto assumes at present.",
        _of_interval("mtbf_s"),
    ),
)


def schedules(statuses: Iterable[Status]) -> list[Metric]:
    """The metrics of all schedules known on this machine."""
    families = [
        figure.kind(f"vmckpt_schedule_{figure.name}", figure.help, labels=("schedule", "vm"))
        for figure in _FIGURES
    ]
    for status in statuses:
        labels = (str(status["schedule"]), str(status["vm"]))
        for family, figure in zip(families, _FIGURES, strict=True):
            add(family, labels, figure.of(status))
    return [*families]
