"""Choose a host for each VM of a fleet: within every limit, so that the links finish earliest.

Greedy, hardest VM first, in two variants: spread out and packed. A VM that then has no host may
take the room of another that fits elsewhere. No limit is ever violated; a VM may be left without a
host where only exchanging three or more would have found one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vmckpt.forecast.drain.fleet import HostRoom, Mover, PlannedMove
from vmckpt.units import format_size

# Hosts whose link loads differ by less than this fraction are equal: the one with more room is
# chosen.
ALIKE = 0.02


class DrainPlacement(NamedTuple):
    """Every VM is either among `moves` or, with the reason, among `stay`."""

    moves: tuple[PlannedMove, ...]
    stay: Mapping[str, str]


def place(movers: Sequence[Mover], rooms: Sequence[HostRoom]) -> DrainPlacement:
    """Find a host for as many of the VMs as possible."""
    units, stay = _units(movers, rooms)
    best: _State | None = None
    for packed in (False, True):
        state = _State(rooms, units)
        for unit in state.hardest_first:
            state.put_or_exchange(unit, packed=packed)
        if best is None or state.placed > best.placed:
            best = state
        if best.placed == len(units):
            break
    where = best.where if best is not None else {}
    moves = []
    for unit in units:
        if unit.key in where:
            destination = where[unit.key]
            moves += [
                PlannedMove(one.name, one.source, destination, one.costs[destination])
                for one in unit.movers
            ]
        elif best is not None:
            reason = best.against(unit)
            stay |= {one.name: reason for one in unit.movers}
    order = {one.name: number for number, one in enumerate(movers)}
    return DrainPlacement(tuple(sorted(moves, key=lambda move: order[move.vm])), stay)


@dataclass(frozen=True, slots=True)
class _Unit:
    """VMs that have to be placed on one host."""

    key: int
    movers: tuple[Mover, ...]
    candidates: tuple[str, ...]
    memory_bytes: int
    vcpus: int
    apart: frozenset[str]
    closed: Mapping[str, str]

    def work_s(self, destination: str) -> float:
        return sum(one.costs[destination].work_s for one in self.movers)


def _units(
    movers: Sequence[Mover], rooms: Sequence[HostRoom]
) -> tuple[list[_Unit], dict[str, str]]:
    """Group the VMs that have to be together; also return those that cannot move at all."""
    units, stay = list[_Unit](), dict[str, str]()
    for number, group in enumerate(_groups(movers)):
        words = [word for one in group for word in one.apart]
        if twice := sorted({word for word in words if words.count(word) > 1}):
            reason = f"it must be both together with and apart from a VM ({twice[0]})"
            stay |= {one.name: _whose(reason, group) for one in group}
            continue
        together = frozenset(word for one in group for word in one.together)
        homes = [
            {room.name for room in rooms if word in room.together} for word in sorted(together)
        ]
        closed = {host: reason for one in group for host, reason in one.closed.items()}
        candidates = []
        for room in rooms:
            if any(room.name not in one.costs for one in group):
                closed.setdefault(room.name, "it is not allowed there")
            elif away := next((there for there in homes if there and room.name not in there), None):
                closed[room.name] = f"those it must be with are on {', '.join(sorted(away))}"
            else:
                candidates.append(room.name)
        memory_bytes = sum(one.memory_bytes for one in group)
        vcpus = sum(one.vcpus for one in group)
        units.append(_Unit(number, group, tuple(candidates), memory_bytes, vcpus,
                           frozenset(words), closed))  # fmt: skip
    return units, stay


def _groups(movers: Sequence[Mover]) -> Iterable[tuple[Mover, ...]]:
    """Movers connected by words of `together`, directly or through others."""
    leader = {one.name: one.name for one in movers}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    first = dict[str, str]()
    for one in movers:
        for word in one.together:
            leader[find(one.name)] = find(first.setdefault(word, one.name))
    groups = dict[str, list[Mover]]()
    for one in movers:
        groups.setdefault(find(one.name), []).append(one)
    return [tuple(group) for group in groups.values()]


def _whose(reason: str, group: Sequence[Mover]) -> str:
    return reason if len(group) == 1 else f"{reason}; with {', '.join(o.name for o in group)}"


@dataclass(slots=True)
class _Space:
    """A host's remaining capacity, and the VMs placed on it."""

    room: HostRoom
    memory_bytes: int
    vcpus: int
    vms: int
    units: dict[int, _Unit] = field(default_factory=dict)
    in_s: float = 0.0

    def lacks(self, unit: _Unit, without: _Unit | None = None) -> str:
        """Why the unit does not fit here, optionally with another one removed; empty if it fits."""
        gone = without
        free = self.memory_bytes + (gone.memory_bytes if gone else 0)
        if unit.memory_bytes > free:
            return f"{format_size(free)} free, {format_size(unit.memory_bytes)} needed"
        if unit.vcpus > (cpus := self.vcpus + (gone.vcpus if gone else 0)):
            return f"room for {cpus} vCPUs, {unit.vcpus} needed"
        if len(unit.movers) > self.vms + (len(gone.movers) if gone else 0):
            return "as many VMs as allowed"
        there = [one.apart for one in self.units.values() if one is not gone]
        if words := sorted(unit.apart & self.room.apart.union(*there)):
            return f"a VM is there that it must be apart from ({words[0]})"
        return ""

    def take(self, unit: _Unit) -> None:
        self._count(unit, 1)
        self.units[unit.key] = unit

    def give(self, unit: _Unit) -> None:
        self._count(unit, -1)
        del self.units[unit.key]

    def _count(self, unit: _Unit, sign: int) -> None:
        self.memory_bytes -= sign * unit.memory_bytes
        self.vcpus -= sign * unit.vcpus
        self.vms -= sign * len(unit.movers)
        self.in_s += sign * unit.work_s(self.room.name)

    @property
    def full(self) -> float:
        """The used fraction of the host's capacity."""
        memory = 1 - self.memory_bytes / max(self.room.memory_bytes, 1)
        return max(memory, 1 - self.vcpus / max(self.room.vcpus, 1))


class _State:
    """One attempt to place all units."""

    def __init__(self, rooms: Sequence[HostRoom], units: Sequence[_Unit]) -> None:
        self._spaces = {
            room.name: _Space(room, room.memory_bytes, room.vcpus, room.vms) for room in rooms
        }
        self.where: dict[int, str] = {}
        memory = max(sum(room.memory_bytes for room in rooms), 1)
        vcpus = max(sum(room.vcpus for room in rooms), 1)

        def size(unit: _Unit) -> float:
            return max(unit.memory_bytes / memory, unit.vcpus / vcpus)

        self.hardest_first = sorted(units, key=lambda unit: (len(unit.candidates), -size(unit)))
        self._horizon_s = _horizon_s(units, len(rooms))

    @property
    def placed(self) -> int:
        """How many units have a host."""
        return len(self.where)

    def put_or_exchange(self, unit: _Unit, *, packed: bool) -> None:
        """Place the unit, if necessary by moving another one elsewhere."""
        if destination := self._best(unit, packed=packed):
            self._put(unit, destination)
            return
        for name in unit.candidates:
            space = self._spaces[name]
            for other in sorted(space.units.values(), key=lambda one: one.memory_bytes):
                if space.lacks(unit, other):
                    continue
                self._take_back(other)
                self._put(unit, name)
                if elsewhere := self._best(other, packed=True):
                    self._put(other, elsewhere)
                    return
                self._take_back(unit)
                self._put(other, name)

    def against(self, unit: _Unit) -> str:
        """Why the unit does not fit, host by host."""
        reasons = dict[str, list[str]]()
        for name, reason in unit.closed.items():
            reasons.setdefault(reason, []).append(name)
        for name in unit.candidates:
            reasons.setdefault(self._spaces[name].lacks(unit), []).append(name)
        words = "; ".join(
            f"{', '.join(sorted(names))}: {reason}" for reason, names in reasons.items()
        )
        return _whose(words or "there is no host that it may go to", unit.movers)

    def _put(self, unit: _Unit, destination: str) -> None:
        self._spaces[destination].take(unit)
        self.where[unit.key] = destination

    def _take_back(self, unit: _Unit) -> None:
        self._spaces[self.where.pop(unit.key)].give(unit)

    def _best(self, unit: _Unit, *, packed: bool) -> str | None:
        open_ = [name for name in unit.candidates if not self._spaces[name].lacks(unit)]
        if not open_:
            return None
        work_s = {name: unit.work_s(name) for name in open_}
        least_s = min(work_s.values())

        def key(name: str) -> tuple[float, int, float]:
            space = self._spaces[name]
            late_s = max(space.in_s + work_s[name] - self._horizon_s, 0.0)
            slower = int((work_s[name] / least_s - 1) / ALIKE) if least_s else 0
            return late_s, slower, -space.full if packed else space.full

        return min(open_, key=key)


def _horizon_s(units: Sequence[_Unit], hosts: int) -> float:
    """How long outgoing links are busy at best; incoming links busy for as long cost nothing."""
    out_s = dict[str, float]()
    for unit in units:
        if unit.candidates:
            part_s = min(unit.work_s(name) for name in unit.candidates) / len(unit.movers)
            for one in unit.movers:
                out_s[one.source] = out_s.get(one.source, 0.0) + part_s
    return max([*out_s.values(), sum(out_s.values()) / max(hosts, 1)], default=0.0)
