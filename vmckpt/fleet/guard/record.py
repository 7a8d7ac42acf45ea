"""The record of a guard, written before each step, from which another process can complete it.

STATE/guards/RUN.json on the operator's machine. It outlives the command, its dead-man's switch and
a reboot; it is removed when its checkpoint has expired.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from vmckpt.codec import builtins
from vmckpt.errors import NotFoundError, StorageError
from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.state.documents import Documents, Listing, Schema
from vmckpt.state.durable import part_of, reserve
from vmckpt.vm.paths import file_name

ROOM_BYTES = 256 << 10


class GuardPhase(StrEnum):
    """The phase of a guard."""

    PREPARING = "preparing"
    COMMAND = "command"
    WATCHING = "watching"
    ROLLING_BACK = "rolling_back"
    OPEN = "open"
    KEPT = "kept"
    ROLLED_BACK = "rolled_back"

    @property
    def is_over(self) -> bool:
        """Whether the guard has ended, either way."""
        return self in (GuardPhase.KEPT, GuardPhase.ROLLED_BACK)

    @property
    def words(self) -> str:
        """The phase in words."""
        return {
            GuardPhase.PREPARING: "taking and proving its checkpoint",
            GuardPhase.COMMAND: "running its command",
            GuardPhase.WATCHING: "watching the VM",
            GuardPhase.ROLLING_BACK: "rolling back",
            GuardPhase.OPEN: "open: commit or roll back",
            GuardPhase.KEPT: "succeeded",
            GuardPhase.ROLLED_BACK: "rolled back",
        }[self]


class Where(StrEnum):
    """Where a guard's command runs."""

    HERE = "here"
    HOST = "host"
    GUEST = "guest"


class OnFailure(StrEnum):
    """What to do if the command or the VM's health fails."""

    ROLL_BACK = "roll-back"
    ASK = "ask"


class GuardProof(StrEnum):
    """How to prove that the checkpoint can be restored.

    `run`: run a copy of it, cut off from networks, and remove it; `read`: read all of it and
    compare checksums, which `run` does too.
    """

    RUN = "run"
    READ = "read"


@dataclass(frozen=True, slots=True)
class GuardRequest:
    """The operator's request. `address`: the guest's address for checks of a port."""

    vm: str
    command: tuple[str, ...]
    where: Where
    checks: tuple[str, ...]
    address: str | None
    watch_s: float
    every_s: float
    failures: int
    command_timeout_s: float | None
    on_failure: OnFailure
    proof: GuardProof
    keep_s: float
    max_pause_s: float
    after_rollback: tuple[str, ...]
    store: str | None


@dataclass(frozen=True, slots=True)
class GuardWorker:
    """The location of the process that runs a guard's command, and its directory, which identifies
    it.
    """

    host: str
    directory: str


@dataclass(frozen=True, slots=True)
class GuardRestore:
    """The restore job that rolls the VM back: its host and run id, recorded before it begins."""

    host: str
    run: str


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """A guard's progress. Times are Unix seconds; None: not yet.

    `is_domain`: the VM is libvirt's. The watch is timed by `watch_began`, and the checkpoint's
    lifetime by `over_since`, independent of the wall clock; `watch_until_unix_s` and
    `expires_unix_s` are for people, and for guards of an older vmckpt.
    """

    run: str
    request: GuardRequest
    phase: GuardPhase
    began_unix_s: float
    checkpoint: str | None = None
    host: str | None = None
    command_unix_s: float | None = None
    watch_until_unix_s: float | None = None
    expires_unix_s: float | None = None
    worker: GuardWorker | None = None
    why: str = ""
    watch_began: ClockReading | None = None
    over_since: ClockReading | None = None
    restore: GuardRestore | None = None
    is_domain: bool = False

    @property
    def vm(self) -> str:
        """The VM that it guards."""
        return self.request.vm

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"vm": self.vm, **builtins(self)}

    def has_expired(self, now: ClockReading) -> bool:
        """Whether it ended long enough ago to remove its checkpoint."""
        if not self.phase.is_over:
            return False
        if self.over_since is None:  # ended by an older vmckpt
            return (self.expires_unix_s or 0) <= now.wall_s
        return now.since(self.over_since) >= self.request.keep_s


_SCHEMA = Schema(
    GuardRecord, "see `vmckpt checkpoint list` for the guard's checkpoint, and remove the file"
)


def guards_dir() -> Path:
    """The directory of this operator's guards."""
    return state_dir() / "guards"


def save(record: GuardRecord, **changes: Any) -> GuardRecord:
    """Write the record with `changes`, durably. Raises StorageError."""
    now = replace(record, **changes)
    try:
        _guards().save(record.run, now)
    except StorageError:
        room = part_of(_room(record.run))
        if not room.exists():
            raise
        room.unlink()
        _guards().save(record.run, now)
    if now.phase.is_over:
        _free_room(record)
    return now


def keep_room(record: GuardRecord) -> None:
    """Reserve space to record the guard's end, in case the disk fills up. Raises StorageError.

    Without that record `resume` would repeat a rollback.
    """
    reserve(_room(record.run), ROOM_BYTES)


def _free_room(record: GuardRecord) -> None:
    with suppress(OSError):
        part_of(_room(record.run)).unlink(missing_ok=True)


def _room(run: str) -> Path:
    return guards_dir() / f"{run}.room"


def forget(record: GuardRecord) -> None:
    """Remove its files."""
    _free_room(record)
    _guards().remove(record.run)
    (guards_dir() / f"{record.run}.recovery.log").unlink(missing_ok=True)


def ended(record: GuardRecord, phase: GuardPhase, now: ClockReading) -> dict[str, Any]:
    """The record's changes for a guard that ends, either way."""
    return {
        "phase": phase,
        "over_since": now,
        "expires_unix_s": now.wall_s + record.request.keep_s,
    }


def load_all() -> Listing[GuardRecord]:
    """Every recorded guard, oldest first, and the damage of unreadable files."""
    return _guards().load_all()


def find(text: str) -> GuardRecord:
    """Find a guard by run, else by VM. Raises NotFoundError, StorageError."""
    return load(text) if is_run(text) else of_vm(text)


def load(run: str) -> GuardRecord:
    """The guard of that run. Raises NotFoundError, StorageError."""
    found = _guards().load(file_name(run, "guard"))
    if found is None:
        raise NotFoundError(
            f"there is no guard '{run}'",
            why=f"{_guards().path(run)} is not there",
            remedy="see vmckpt guard list",
        )
    return found


def is_run(text: str) -> bool:
    """Whether it is the run of a recorded guard. Raises UsageError if it is not a valid name."""
    return _guards().path(file_name(text, "guard")).exists()


def of_vm(vm: str) -> GuardRecord:
    """A VM's guard: the unfinished one, otherwise the newest.

    Raises NotFoundError; StorageError if a damaged file may be a newer one's.
    """
    known = load_all()
    found = [record for record in known.records.values() if record.vm == vm]
    if open_ := next((record for record in found if not record.phase.is_over), None):
        return open_
    known.require_sound()  # an unreadable record may be this VM's, and newer
    if not found:
        raise NotFoundError(
            f"'{vm}' has no guard",
            why="none is recorded on this machine",
            remedy="see vmckpt guard list; guards are recorded where they were started",
        )
    return found[-1]


def _guards() -> Documents[GuardRecord]:
    return Documents(guards_dir(), _SCHEMA)
