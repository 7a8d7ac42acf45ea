"""What a guard has to know to be ended by somebody else: written down before each of its steps.

STATE/guards/RUN.json on the operator's machine. It outlives the command, its dead-man's switch and
the machine's reboot; it goes when the checkpoint that it is about has expired.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import NotFoundError, StorageError
from vmckpt.events.durable import write_durably
from vmckpt.fleet.schedule.due import Moment
from vmckpt.hosts.inventory import state_dir
from vmckpt.vm.paths import file_name


class Phase(StrEnum):
    """How far a guard is. The value is what people read."""

    PREPARING = "taking and proving its checkpoint"
    COMMAND = "running its command"
    WATCHING = "watching the VM"
    ROLLING_BACK = "rolling back"
    OPEN = "open: commit or roll back"
    KEPT = "kept"
    ROLLED_BACK = "rolled back"

    @property
    def is_over(self) -> bool:
        """Whether the guard has come to one of its two ends."""
        return self in (Phase.KEPT, Phase.ROLLED_BACK)


class Where(StrEnum):
    """Where the command of a guard is run."""

    HERE = "here"
    HOST = "host"
    GUEST = "guest"


class OnFailure(StrEnum):
    """What is done when the command or the VM's health fails."""

    ROLL_BACK = "roll-back"
    ASK = "ask"


class Proof(StrEnum):
    """How the checkpoint is proved to be restorable.

    `run`: a copy of it runs, cut off from the network, and is removed; `read`: all of it is read
    and compared with its checksums, which `run` does too.
    """

    RUN = "run"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Request:
    """What the operator asked for. `address`: where checks of a port find the guest."""

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
    proof: Proof
    keep_s: float
    max_pause_s: float
    after_rollback: tuple[str, ...]
    store: str | None


@dataclass(frozen=True, slots=True)
class Worker:
    """Where the process that runs a guard's command is, and its directory, which it is known by."""

    host: str
    directory: str


@dataclass(frozen=True, slots=True)
class Record:
    """A guard, as far as it has come. Times are Unix seconds; None: not yet.

    The watch lasts by `watch_began`, and the checkpoint stays by `over_since`, whatever the wall
    clock is set to meanwhile; `watch_until_unix_s` and `expires_unix_s` are for people, and for
    guards of an older vmckpt.
    """

    run: str
    request: Request
    phase: Phase
    began_unix_s: float
    checkpoint: str | None = None
    host: str | None = None
    command_unix_s: float | None = None
    watch_until_unix_s: float | None = None
    expires_unix_s: float | None = None
    worker: Worker | None = None
    why: str = ""
    watch_began: Moment | None = None
    over_since: Moment | None = None

    @property
    def vm(self) -> str:
        """The VM that it guards."""
        return self.request.vm

    def has_expired(self, now: Moment) -> bool:
        """Whether it ended so long ago that its checkpoint goes."""
        if not self.phase.is_over:
            return False
        if self.over_since is None:  # an older vmckpt ended it
            return (self.expires_unix_s or 0) <= now.wall_s
        return now.since(self.over_since) >= self.request.keep_s

    def to_json(self) -> dict[str, Any]:
        """For its file, and for programs."""
        return {"vm": self.vm, **asdict(self), "phase": self.phase.name.lower()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse."""
        asked, worker = dict(data["request"]), data["worker"]
        moments = ("watch_began", "over_since")
        for name in ("command", "checks", "after_rollback"):
            asked[name] = tuple(asked[name])
        asked |= {
            "where": Where(asked["where"]),
            "on_failure": OnFailure(asked["on_failure"]),
            "proof": Proof(asked["proof"]),
        }
        more = {
            "request": Request(**asked),
            "phase": Phase[data["phase"].upper()],
            "worker": worker and Worker(worker["host"], worker["directory"]),
            **{name: (at := data.get(name)) and Moment(*at) for name in moments},
        }
        return cls(**{name: value for name, value in data.items() if name != "vm"} | more)


def guards_dir() -> Path:
    """Where guards of this operator are written down."""
    return state_dir() / "guards"


def save(record: Record, **changes: Any) -> Record:
    """Write the record with `changes` down, so that a reboot does not lose it. StorageError."""
    now = replace(record, **changes)
    write_durably(_path(record.run), json.dumps(now.to_json()))
    return now


def forget(record: Record) -> None:
    """Remove its files."""
    for name in (f"{record.run}.json", f"{record.run}.recovery.log"):
        (guards_dir() / name).unlink(missing_ok=True)


def ended(record: Record, phase: Phase, now: Moment) -> dict[str, Any]:
    """What is to be written down of a guard that comes to one of its two ends."""
    return {
        "phase": phase,
        "over_since": now,
        "expires_unix_s": now.wall_s + record.request.keep_s,
    }


def load_all() -> list[Record]:
    """Every guard that is written down, oldest first. Raises StorageError on a damaged file."""
    found = []
    for path in sorted(guards_dir().glob("*.json")):
        with suppress(FileNotFoundError):  # it has expired meanwhile
            found.append(_load(path))
    return found


def load(run: str) -> Record:
    """The guard of that run. Raises NotFoundError, StorageError."""
    if not is_run(run):
        raise NotFoundError(
            f"there is no guard '{run}'",
            why=f"{_path(run)} is not there",
            remedy="see vmckpt guard list",
        )
    return _load(_path(run))


def is_run(text: str) -> bool:
    """Whether it is the run of a guard that is written down. Raises UsageError: it is no name."""
    return _path(text).exists()


def _path(run: str) -> Path:
    return guards_dir() / f"{file_name(run, 'guard')}.json"


def of_vm(vm: str) -> Record:
    """A VM's guard: the one that is not over, else the newest. Raises NotFoundError."""
    found = [record for record in load_all() if record.vm == vm]
    if not found:
        raise NotFoundError(
            f"'{vm}' has no guard",
            why="none is written down on this machine",
            remedy="see vmckpt guard list; guards are known where they were begun",
        )
    return next((record for record in found if not record.phase.is_over), found[-1])


def _load(path: Path) -> Record:
    try:
        return Record.from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as exc:
        raise StorageError(
            f"{path} is damaged",
            why=f"{type(exc).__name__}: {exc}",
            remedy="see `vmckpt checkpoint list` for the guard's checkpoint, and remove the file",
        ) from exc
