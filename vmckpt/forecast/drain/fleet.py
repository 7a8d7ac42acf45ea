"""A fleet as numbers: what hosts have room for, what VMs ask of them, what each move costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class MoveCost(NamedTuple):
    """One move between two hosts when nothing else moves there.

    `fixed_s` is what it takes before memory and disks go, `work_s` while they go, `end_s` after
    that. `spread_s` is the standard deviation of all of it.
    """

    fixed_s: float
    work_s: float
    end_s: float
    spread_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """From beginning to end, with nothing beside it."""
        return self.fixed_s + self.work_s + self.end_s


@dataclass(frozen=True, slots=True)
class Mover:
    """A VM that is to leave `source`.

    `costs` are those of the hosts that it may go to, `closed` says why not to the others. No two
    VMs with a word of `apart` in common come to be on one host; all with a word of `together` do.
    """

    name: str
    source: str
    memory_bytes: int
    vcpus: int
    costs: Mapping[str, MoveCost]
    apart: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()
    closed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What a host can take besides what stays there; the words are those of the VMs that stay."""

    name: str
    memory_bytes: int
    vcpus: int
    vms: int
    apart: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()


class PlannedMove(NamedTuple):
    """A VM with the host it goes to."""

    vm: str
    source: str
    target: str
    cost: MoveCost
