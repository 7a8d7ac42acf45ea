"""What a drain has to know to be gone on with, and undone: written down before each of its moves.

STATE/drains/HOST.json on the operator's machine, from the drain's beginning until all that it moved
is back. STATE/drains/past/RUN.json: how long it took, which teaches the next forecast.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import StorageError
from vmckpt.events.durable import write_durably
from vmckpt.hosts.inventory import state_dir
from vmckpt.plan.crowding import Past, Taken
from vmckpt.plan.fleet import Cost, Move
from vmckpt.plan.timetable import Span

# Older ones were on another day.
PAST_KEPT = 20


@dataclass(frozen=True, slots=True)
class Record:
    """A host that is drained, or is being drained: where each of its VMs was taken.

    `moving` are those whose move had begun and may not have ended.
    """

    host: str
    run: str
    began_unix_s: float
    away: Mapping[str, str] = field(default_factory=dict)
    moving: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For its file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse."""
        return cls(**data)

    def begins(self, vm: str, target: str) -> "Record":
        """A move from the host is begun."""
        return replace(self, moving={**self.moving, vm: target})

    def ends(self, vm: str, where: str) -> "Record":
        """The VM is `where` for certain."""
        moving = {name: target for name, target in self.moving.items() if name != vm}
        away = {name: target for name, target in self.away.items() if name != vm}
        return replace(
            self, moving=moving, away=away if where == self.host else {**away, vm: where}
        )

    def forgets(self, vm: str) -> "Record":
        """The VM is none that could come back."""
        return self.ends(vm, self.host)


def drains_dir() -> Path:
    """Where this operator's drains are written down."""
    return state_dir() / "drains"


def save(record: Record) -> Record:
    """Write it down, so that a reboot does not lose it. Raises StorageError."""
    write_durably(_path(record.host), json.dumps(record.to_json()))
    return record


def load(host: str) -> Record | None:
    """The host's drain, None when there is none. Raises StorageError on a damaged file."""
    path = _path(host)
    try:
        return Record.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise StorageError(
            f"{path} is damaged",
            why=f"{type(exc).__name__}: {exc}",
            remedy="see `vmckpt vm list` for where VMs are, and remove the file",
        ) from exc


def load_all() -> list[Record]:
    """Every drain that is written down. Raises StorageError on a damaged file."""
    found = [load(path.stem) for path in sorted(drains_dir().glob("*.json"))]
    return [record for record in found if record is not None]


def forget(host: str) -> None:
    """The host's VMs are all back."""
    _path(host).unlink(missing_ok=True)


def keep_past(run: str, past: Past, *, here: bool) -> None:
    """For the next forecast; `here`: all of its hosts are parts of this machine. StorageError."""
    directory = drains_dir() / "past"
    moves = [
        [*taken.move[:3], list(taken.move.cost), [round(at_s, 4) for at_s in taken.span]]
        for taken in past.moves
    ]
    facts = {"taken": moves, "at_once": past.at_once, "took_s": past.took_s, "here": here}
    write_durably(directory / f"{run}.json", json.dumps(facts))
    for old in sorted(directory.glob("*.json"))[:-PAST_KEPT]:
        old.unlink(missing_ok=True)


def load_past(*, here: bool) -> list[Past]:
    """How long drains took, oldest first; files that cannot be read teach nothing."""
    found = []
    for path in sorted((drains_dir() / "past").glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_text())
            if data["here"] is here:
                moves = tuple(
                    Taken(Move(vm, a, b, Cost(*cost)), Span(*span))
                    for vm, a, b, cost, span in data["taken"]
                )
                found.append(Past(moves, data["at_once"], data["took_s"]))
    return found


def _path(host: str) -> Path:
    return drains_dir() / f"{host}.json"
