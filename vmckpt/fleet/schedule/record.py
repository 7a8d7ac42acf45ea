"""A schedule's file: what was asked for, how far it has come, what its last runs came to.

STATE/schedules/NAME.json on the operator's machine, replaced durably before each step is begun.
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
from vmckpt.hosts.inventory.inventory import state_dir
from vmckpt.replicate.operator.keeping import DailyWindow
from vmckpt.state.documents import Documents, Listing, Schema
from vmckpt.vm.paths import file_name

MOST_RUNS = 50
# By `auto`, until a checkpoint has said what one costs, which the first one does.
UNKNOWN_EVERY_S = 900.0


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """What a run came to. Times are Unix seconds; `outcome` is done, skipped or missed."""

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

    `id`: its id, the same for every process and try; `place`: its store; `host`: where it is taken;
    None before the start.
    """

    id: str
    place: str | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule. `failures` is how many tries failed since a run was well, `why` the last one.

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
        """The VM that it is for."""
        return self.request.vm

    @property
    def interval(self) -> Interval | None:
        """Of a schedule by `auto`, how often it is now; None: nothing is known yet."""
        return interval(self.learned, self.request.mtbf_s, self.request.rpo_s)

    @property
    def timing(self) -> Timing:
        """When it is due. Raises UsageError: its time zone is not there any more."""
        asked = self.request
        day = Day(DailyWindow.parse(asked.window) if asked.window else None, parse_zone(asked.zone))
        when: Calendar | Every
        if asked.cron is not None:
            when = Calendar.parse(asked.cron, day)
        elif asked.when is When.AUTO:
            now = self.interval
            unknown_s = min(UNKNOWN_EVERY_S, asked.rpo_s or UNKNOWN_EVERY_S)
            when = Every(now.every_s if now else unknown_s, day)
        else:
            when = Every(asked.every_s or UNKNOWN_EVERY_S, day)
        return Timing(when, asked.jitter_s, asked.catch_up, self.uid)

    def ended(self, run: ScheduleRun, **changes: Any) -> "ScheduleRecord":
        """After the end of a run."""
        return replace(self, runs=(*self.runs, run)[-MOST_RUNS:], **changes)


_SCHEMA = Schema(
    ScheduleRecord,
    "remove it and add the schedule again; its checkpoints have the tag schedule={name}",
)


def new_record(name: str, request: ScheduleRequest, now: ClockReading) -> ScheduleRecord:
    """A schedule that begins now: one by intervals is due at once."""
    uid = secrets.token_hex(8)
    return ScheduleRecord(
        name, uid, request, now, ScheduleState(0, now.wall_s, None), LearnedCosts()
    )


def schedules_dir() -> Path:
    """Where this operator's schedules are."""
    return state_dir() / "schedules"


def scheduler_lock_path() -> Path:
    """Held by the one process that runs what is due."""
    return schedules_dir() / "scheduler"


def lock_path(name: str) -> Path:
    """Held while a run of the schedule is under way, or it is changed."""
    return schedules_dir() / f"{file_name(name, 'schedule')}.lock"


def add(record: ScheduleRecord) -> None:
    """Write a new schedule down. Raises RefusedError: there is one of that name; StorageError."""
    path = _schedules().path(file_name(record.name, "schedule"))
    if path.exists():
        raise RefusedError(
            f"there is a schedule '{record.name}' already",
            why=f"it is in {path}",
            remedy=f"choose another --name, or remove it: vmckpt schedule rm {record.name}",
        )
    save(record)


def save(record: ScheduleRecord) -> ScheduleRecord:
    """Write it down; it is on the disk when this returns. Raises StorageError."""
    _schedules().save(record.name, record)
    return record


def load(name: str) -> ScheduleRecord:
    """The schedule of that name. Raises NotFoundError, StorageError (damaged)."""
    found = _schedules().load(file_name(name, "schedule"))
    if found is None:
        raise NotFoundError(
            f"there is no schedule '{name}'",
            why=f"{_schedules().path(name)} is not there",
            remedy="see `vmckpt schedule list`; schedules are known where they were added",
        )
    return found


def load_all() -> Listing[ScheduleRecord]:
    """Every schedule that is written down, by name, and which cannot be read."""
    return _schedules().load_all()


def forget(name: str) -> None:
    """Remove its file; its checkpoints stay."""
    _schedules().remove(file_name(name, "schedule"))


def _schedules() -> Documents[ScheduleRecord]:
    return Documents(schedules_dir(), _SCHEMA)
