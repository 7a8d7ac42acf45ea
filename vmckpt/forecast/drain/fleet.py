"""A fleet as numbers: the hosts' capacity, the VMs' requirements, the cost of each move."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class MoveCost(NamedTuple):
    """The cost of one move between two hosts when nothing else moves there.

    `fixed_s` is the time before memory and disks are sent, `work_s` while they are sent, `end_s`
    after that. `spread_s` is the standard deviation of the total.
    """

    fixed_s: float
    work_s: float
    end_s: float
    spread_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Total duration without concurrent moves."""
        return self.fixed_s + self.work_s + self.end_s


@dataclass(frozen=True, slots=True)
class Mover:
    """A VM that has to leave `source`.

    `costs` has the hosts that it may move to, `closed` the reasons against the others. Two VMs that
    share a word of `apart` never get the same host; all VMs that share a word of `together` do.
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
    """What a host can take besides the VMs that stay there; the words are those of these VMs."""

    name: str
    memory_bytes: int
    vcpus: int
    vms: int
    apart: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()


class PlannedMove(NamedTuple):
    """A VM and its destination host."""

    vm: str
    source: str
    destination: str
    cost: MoveCost
