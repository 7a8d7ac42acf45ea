"""The status of schedules, for lists and monitoring."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from vmckpt.errors import StorageError, UsageError
from vmckpt.fleet.schedule.due import ClockReading, upcoming
from vmckpt.fleet.schedule.record import ScheduleRecord, load_all
from vmckpt.fleet.schedule.request import When
from vmckpt.fleet.schedule.run import clock
from vmckpt.units import format_duration


def status(record: ScheduleRecord, now: ClockReading) -> dict[str, Any]:
    """The full status as JSON. `next_unix_s` of a due schedule is now; None: never."""
    why = record.why
    try:
        next_s = next(upcoming(record.timing, record.state, now), None)
    except UsageError as exc:
        next_s, why = None, str(exc)
    found = record.interval if record.request.when is When.AUTO else None
    held = record.state.claim
    return {
        "schedule": record.name,
        "vm": record.vm,
        "when": when(record),
        "next_unix_s": next_s,
        "last_done_unix_s": record.last_done_s,
        "runs_done": record.done_total,
        "runs_failed": record.failed_total,
        "failures": record.failures,
        "why": why,
        "begun": None
        if held is None
        else {"due_unix_s": held.due_s, "missed": held.missed, "tries": held.tries},
        "interval": None
        if found is None
        else {
            "every_s": found.every_s,
            "by": found.by,
            "cost_s": found.cost_s,
            "mtbf_s": found.mtbf_s,
            "observed_up_s": record.learned.up_s,
            "observed_failures": record.learned.failures,
        },
    }


class Now(NamedTuple):
    """Every known schedule, and the unreadable files."""

    statuses: list[dict[str, Any]]
    damaged: list[StorageError]


def all_now() -> Now:
    """The present status of all."""
    now, known = clock(), load_all()
    return Now([status(record, now) for record in known.records.values()], known.damaged)


def next_by_vm(all_of_them: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each VM the schedule, in the format of `status`, with the earliest run."""
    found: dict[str, dict[str, Any]] = {}
    for one in all_of_them:
        before = found.get(one["vm"])
        if one["next_unix_s"] is not None and (
            before is None or one["next_unix_s"] < before["next_unix_s"]
        ):
            found[one["vm"]] = one
    return found


def when(record: ScheduleRecord) -> str:
    """When it is due, in words."""
    request = record.request
    if request.cron is not None:
        words = f"{request.cron} ({request.zone})"
    elif request.when is When.AUTO:
        now = record.interval
        words = f"auto, every {format_duration(now.every_s)} now" if now else "auto"
    else:
        words = f"every {format_duration(request.every_s or 0.0)}"
    if request.window:
        words += f", {request.window}" + ("" if request.cron is not None else f" ({request.zone})")
    return words
