"""Schedules, as `vmckpt schedule list --json` has them, as metrics. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vmckpt.metrics.exposition import Family, Kind

Status = Mapping[str, Any]


class _Figure(NamedTuple):
    """One family, and what it is of a schedule's status; None: there is none."""

    name: str
    kind: Kind
    help: str
    of: Callable[[Status], float | None]


def _of_interval(key: str) -> Callable[[Status], float | None]:
    return lambda status: status["interval"] and status["interval"][key]


_FIGURES = (
    _Figure(
        "last_success_timestamp_seconds",
        Kind.GAUGE,
        "When a run last ended well.",
        lambda status: status["last_done_unix_s"],
    ),
    _Figure(
        "next_due_timestamp_seconds",
        Kind.GAUGE,
        "When the next run begins; of one that is due, now.",
        lambda status: status["next_unix_s"],
    ),
    _Figure(
        "runs_total", Kind.COUNTER, "Runs that ended well.", lambda status: status["runs_done"]
    ),
    _Figure(
        "failures_total", Kind.COUNTER, "Tries that failed.", lambda status: status["runs_failed"]
    ),
    _Figure(
        "failures_in_a_row",
        Kind.GAUGE,
        "Tries that failed since a run ended well.",
        lambda status: status["failures"],
    ),
    _Figure(
        "interval_seconds",
        Kind.GAUGE,
        "How often --every auto has a checkpoint taken now.",
        _of_interval("every_s"),
    ),
    _Figure(
        "assumed_mtbf_seconds",
        Kind.GAUGE,
        "What --every auto takes for the mean time between failures now.",
        _of_interval("mtbf_s"),
    ),
)


def schedules(statuses: Iterable[Status]) -> list[Family]:
    """All that are known where this is asked."""
    families = [Family(f"vmckpt_schedule_{f.name}", f.kind, f.help) for f in _FIGURES]
    for status in statuses:
        labels = {"schedule": str(status["schedule"]), "vm": str(status["vm"])}
        for family, figure in zip(families, _FIGURES, strict=True):
            family.add(figure.of(status), **labels)
    return families
