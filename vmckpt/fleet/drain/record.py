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
from vmckpt.hosts.inventory.inventory import state_dir
from vmckpt.state.documents import Documents, Schema

# Older ones were on another day.
PAST_KEPT = 20


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """A host that is drained, or is being drained: where each of its VMs was taken.

    `moving` are those whose move had begun and may not have ended.
    """

    host: str
    run: str
    began_unix_s: float
    away: Mapping[str, str] = field(default_factory=dict)
    moving: Mapping[str, str] = field(default_factory=dict)

    def begins(self, vm: str, target: str) -> "DrainRecord":
        """A move from the host is begun."""
        return replace(self, moving={**self.moving, vm: target})

    def ends(self, vm: str, where: str) -> "DrainRecord":
        """The VM is `where` for certain."""
        moving = {name: target for name, target in self.moving.items() if name != vm}
        away = {name: target for name, target in self.away.items() if name != vm}
        return replace(
            self, moving=moving, away=away if where == self.host else {**away, vm: where}
        )

    def forgets(self, vm: str) -> "DrainRecord":
        """The VM is none that could come back."""
        return self.ends(vm, self.host)


@dataclass(frozen=True, slots=True)
class PastRecord:
    """A drain that is over, as `keep_past` writes it: each move's VM, hosts, cost and times."""

    taken: tuple[tuple[str, str, str, MoveCost, MoveSpan], ...]
    at_once: int
    took_s: float
    here: bool


_DRAIN = Schema(DrainRecord, "see `vmckpt vm list` for where VMs are, and remove the file")
_PAST = Schema(PastRecord, "remove it: later forecasts of drains do without it")


def drains_dir() -> Path:
    """Where this operator's drains are written down."""
    return state_dir() / "drains"


def save(record: DrainRecord) -> DrainRecord:
    """Write it down, so that a reboot does not lose it. Raises StorageError."""
    _drains().save(record.host, record)
    return record


def load(host: str) -> DrainRecord | None:
    """The host's drain, None when there is none. Raises StorageError on a damaged file."""
    return _drains().load(host)


def load_all() -> list[DrainRecord]:
    """Every drain that is written down, but for damaged files: of those only their own host's
    commands can tell.
    """
    return list(_drains().load_all().records.values())


def forget(host: str) -> None:
    """The host's VMs are all back."""
    _drains().remove(host)


def keep_past(run: str, past: Past, *, here: bool) -> None:
    """For the next forecast; `here`: all of its hosts are parts of this machine. StorageError."""
    taken = tuple(
        (*one.move, MoveSpan(*(round(at_s, 4) for at_s in one.span))) for one in past.moves
    )
    kept = _past()
    kept.save(run, PastRecord(taken, past.at_once, past.took_s, here))
    for old in kept.names()[:-PAST_KEPT]:
        kept.remove(old)


def load_past(*, here: bool) -> list[Past]:
    """How long drains took, oldest first; files that cannot be read teach nothing."""
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
