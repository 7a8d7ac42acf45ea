"""A schedule's file: the request, the progress, and the results of its last runs.

STATE/schedules/NAME.json on the operator's machine, replaced durably before each step begins.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.fleet.schedule.due import ClockReading, Every, ScheduleState, Timing
from vmckpt.fleet.schedule.instants import Calendar, Day, parse_zone
from vmckpt.fleet.schedule.learned import Interval, LearnedCosts, interval
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.replicate.operator.keeping import DailyWindow
from vmckpt.state.documents import Documents, Listing, Schema
from vmckpt.vm.paths import file_name

MOST_RUNS = 50
# The interval of `auto` until the first checkpoint has shown the cost.
UNKNOWN_EVERY_S = 900.0


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """The result of a run. Times are Unix seconds; `outcome` is done, skipped or missed."""

    number: int
    due_s: float
    began_s: float
    ended_s: float
    outcome: str
    checkpoint: str | None = None
    why: str = ""
    missed: int = 0
    tries: int = 1


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """What is known of the claimed run's checkpoint before it is complete.

    `id`: its id, the same for every process and attempt; `place`: its store; `host`: where it is
    taken; None before the start.
    """

    id: str
    place: str | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule. `failures`: failed tries since a run succeeded; `why`: the last failure.

    `checked`: how many parts of each store's content were read (`--check`).
    """

    name: str
    uid: str
    request: ScheduleRequest
    added: ClockReading
    state: ScheduleState
    learned: LearnedCosts
    making: PendingCheckpoint | None = None
    runs: tuple[ScheduleRun, ...] = ()
    places: tuple[str, ...] = ()
    failures: int = 0
    failed_total: int = 0
    done_total: int = 0
    last_done_s: float | None = None
    why: str = ""
    checked: Mapping[str, int] = field(default_factory=dict)

    @property
    def vm(self) -> str:
        """The schedule's VM."""
        return self.request.vm

    @property
    def interval(self) -> Interval | None:
        """The present interval of an `auto` schedule; None: nothing is known yet."""
        return interval(self.learned, self.request.mtbf_s, self.request.rpo_s)

    @property
    def timing(self) -> Timing:
        """When it is due. Raises UsageError if its time zone no longer exists."""
        request = self.request
        day = Day(
            DailyWindow.parse(request.window) if request.window else None, parse_zone(request.zone)
        )
        when: Calendar | Every
        if request.cron is not None:
            when = Calendar.parse(request.cron, day)
        elif request.when is When.AUTO:
            now = self.interval
            unknown_s = min(UNKNOWN_EVERY_S, request.rpo_s or UNKNOWN_EVERY_S)
            when = Every(now.every_s if now else unknown_s, day)
        else:
            when = Every(request.every_s or UNKNOWN_EVERY_S, day)
        return Timing(when, request.jitter_s, request.catch_up, self.uid)

    def ended(self, run: ScheduleRun, **changes: Any) -> "ScheduleRecord":
        """The record after the end of a run."""
        return replace(self, runs=(*self.runs, run)[-MOST_RUNS:], **changes)


_SCHEMA = Schema(
    ScheduleRecord,
    "remove it and add the schedule again; its checkpoints have the tag schedule={name}",
)


def new_record(name: str, request: ScheduleRequest, now: ClockReading) -> ScheduleRecord:
    """A new schedule: one with intervals is due at once."""
    uid = secrets.token_hex(8)
    return ScheduleRecord(
        name, uid, request, now, ScheduleState(0, now.wall_s, None), LearnedCosts()
    )


def schedules_dir() -> Path:
    """The directory of this operator's schedules."""
    return state_dir() / "schedules"


def scheduler_lock_path() -> Path:
    """Held by the only process that runs due schedules."""
    return schedules_dir() / "scheduler"


def lock_path(name: str) -> Path:
    """Held while the schedule runs or is changed."""
    return schedules_dir() / f"{file_name(name, 'schedule')}.lock"


def add(record: ScheduleRecord) -> None:
    """Write a new schedule. Raises RefusedError (the name is in use), StorageError."""
    path = _schedules().path(file_name(record.name, "schedule"))
    if path.exists():
        raise RefusedError(
            f"there is a schedule '{record.name}' already",
            why=f"it is in {path}",
            remedy=f"choose another --name, or remove it: vmckpt schedule rm {record.name}",
        )
    save(record)


def save(record: ScheduleRecord) -> ScheduleRecord:
    """Write it durably. Raises StorageError."""
    _schedules().save(record.name, record)
    return record


def load(name: str) -> ScheduleRecord:
    """The schedule of that name. Raises NotFoundError, StorageError (damaged)."""
    found = _schedules().load(file_name(name, "schedule"))
    if found is None:
        raise NotFoundError(
            f"there is no schedule '{name}'",
            why=f"{_schedules().path(name)} is not there",
            remedy="see `vmckpt schedule list`; schedules are recorded where they were added",
        )
    return found


def load_all() -> Listing[ScheduleRecord]:
    """Every recorded schedule, by name, and the unreadable files."""
    return _schedules().load_all()


def forget(name: str) -> None:
    """Remove its file; its checkpoints stay."""
    _schedules().remove(file_name(name, "schedule"))


def _schedules() -> Documents[ScheduleRecord]:
    return Documents(schedules_dir(), _SCHEMA)
