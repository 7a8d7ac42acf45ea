"""The record of a drain, for continuing and undoing it: written before each migration.

STATE/drains/HOST.json on the operator's machine, from the start of the drain until all VMs are
back. STATE/drains/past/RUN.json: its duration, for later forecasts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vmckpt.forecast.drain.crowding import Past, PastMove
from vmckpt.forecast.drain.fleet import MoveCost, PlannedMove
from vmckpt.forecast.drain.timetable import MoveSpan
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.state.documents import Documents, Schema

# Older ones say little about the present.
PAST_KEPT = 20


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """A host that is or is being drained: where each of its VMs was taken.

    `moving` are those whose move had begun and may not have ended. `reason`: why it was drained, if
    that was said.
    """

    host: str
    run: str
    began_unix_s: float
    away: Mapping[str, str] = field(default_factory=dict)
    moving: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def begins(self, vm: str, destination: str) -> "DrainRecord":
        """A move from the host has begun."""
        return replace(self, moving={**self.moving, vm: destination})

    def ends(self, vm: str, where: str) -> "DrainRecord":
        """The VM is certainly on `where`."""
        moving = {name: destination for name, destination in self.moving.items() if name != vm}
        away = {name: destination for name, destination in self.away.items() if name != vm}
        return replace(
            self, moving=moving, away=away if where == self.host else {**away, vm: where}
        )

    def forgets(self, vm: str) -> "DrainRecord":
        """Drop the VM: it will not come back."""
        return self.ends(vm, self.host)


@dataclass(frozen=True, slots=True)
class PastRecord:
    """A finished drain, as `keep_past` writes it: each move's VM, hosts, cost and times."""

    taken: tuple[tuple[str, str, str, MoveCost, MoveSpan], ...]
    at_once: int
    took_s: float
    here: bool


_DRAIN = Schema(DrainRecord, "see `vmckpt vm list` for where VMs are, and remove the file")
_PAST = Schema(PastRecord, "remove it: later forecasts of drains do without it")


def drains_dir() -> Path:
    """The directory of this operator's drains."""
    return state_dir() / "drains"


def save(record: DrainRecord) -> DrainRecord:
    """Write the record durably. Raises StorageError."""
    _drains().save(record.host, record)
    return record


def load(host: str) -> DrainRecord | None:
    """The host's drain, None if there is none. Raises StorageError on a damaged file."""
    return _drains().load(host)


def load_all() -> list[DrainRecord]:
    """Every recorded drain, without damaged files: only their own host's commands report those."""
    return list(_drains().load_all().records.values())


def forget(host: str) -> None:
    """Remove the record: the host's VMs are all back."""
    _drains().remove(host)


def keep_past(run: str, past: Past, *, here: bool) -> None:
    """Keep it for the next forecast; `here`: all of its hosts are parts of this machine.
    StorageError.
    """
    taken = tuple(
        (*one.move, MoveSpan(*(round(at_s, 4) for at_s in one.span))) for one in past.moves
    )
    kept = _past()
    kept.save(run, PastRecord(taken, past.at_once, past.took_s, here))
    for old in kept.names()[:-PAST_KEPT]:
        kept.remove(old)


def load_past(*, here: bool) -> list[Past]:
    """The durations of drains, oldest first; unreadable files are skipped."""
    return [
        Past(
            tuple(
                PastMove(PlannedMove(vm, a, b, cost), span) for vm, a, b, cost, span in one.taken
            ),
            one.at_once,
            one.took_s,
        )
        for one in _past().load_all().records.values()
        if one.here is here
    ]


def _drains() -> Documents[DrainRecord]:
    return Documents(drains_dir(), _DRAIN)


def _past() -> Documents[PastRecord]:
    return Documents(drains_dir() / "past", _PAST)
