"""The order in which VMs move, how many at once, and the total duration.

A host sends and receives one VM at a time: a guest that shares the link has its pages sent again
more often. What a move does before and after sending does not use the link, so concurrent moves
hide that time. The number of concurrent moves counts for each host separately.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from vmckpt.forecast.drain.fleet import Mover, PlannedMove

# The numbers of concurrent moves to try. More do not hide more: the link is the limit.
AT_ONCE = (1, 2, 3, 4, 6, 8)
# Fewer concurrent moves are preferred if as fast within this fraction: they burden the guests less.
ALIKE = 0.01
# Change the number that the last drains used only if the gain exceeds the forecast's error:
# crowding was measured with that number.
SURPRISE = 0.06
# How often to retry with the moves that were last in an order put first.
BOOSTS = 6
# Error of a whole timetable that no move's own forecast explains. Used if the deviation is not
# known better.
COMMON_SPREAD = 0.06
_TENTH = 1.28


class MoveSpan(NamedTuple):
    """When a move begins, is ready to send, starts sending, has sent, and ends."""

    begin_s: float
    ready_s: float
    sends_s: float
    sent_s: float
    end_s: float


class Timetable(NamedTuple):
    """Moves in their order. No known order can finish before `bound_s`."""

    moves: tuple[PlannedMove, ...]
    at_once: int
    spans: Mapping[str, MoveSpan]
    total_s: float
    bound_s: float

    def band_s(self, spread: float = COMMON_SPREAD) -> tuple[float, float, float]:
        """The 10th, 50th and 90th percentile; `spread`: the common error of all moves."""
        if not self.moves:
            return 0.0, 0.0, 0.0
        # Independent errors average out over many moves.
        alone_s = sum(move.cost.alone_s for move in self.moves)
        own = math.hypot(*(move.cost.spread_s for move in self.moves)) / alone_s if alone_s else 0.0
        off_s = _TENTH * math.hypot(spread, own) * self.total_s
        return max(self.total_s - off_s, 0.0), self.total_s, self.total_s + off_s


def timetable(
    moves: Sequence[PlannedMove],
    most_at_once: int = AT_ONCE[-1],
    crowding: float = 0.0,
    usual: int | None = None,
) -> Timetable:
    """The fastest of the orders tried. `crowding`: see `play`.

    `usual`: how many moved at once the last time.
    """
    numbers = [n for n in AT_ONCE if n < most_at_once] + [most_at_once]
    bound_s = bound(moves, most_at_once, crowding)
    best = _best(moves, numbers, crowding, bound_s)
    if usual is not None and usual in numbers and usual != best.at_once:
        known = _best(moves, [usual], crowding, bound_s)
        if best.total_s > known.total_s * (1 - SURPRISE):
            return known
    return best


def _best(
    moves: Sequence[PlannedMove], numbers: Sequence[int], crowding: float, bound_s: float
) -> Timetable:
    """The best order with one of `numbers` as the number of concurrent moves."""
    best = Timetable((), 1, {}, 0.0, bound_s)
    for at_once in numbers:
        for first in _orders(moves):
            order: list[PlannedMove] | None = first
            for _ in range(BOOSTS):
                if order is None:
                    break
                spans = play(order, at_once, crowding)
                total_s = max((span.end_s for span in spans.values()), default=0.0)
                if not best.moves or total_s < best.total_s * (1 - ALIKE):
                    best = Timetable(tuple(order), at_once, spans, total_s, bound_s)
                if best.total_s <= bound_s * (1 + ALIKE):
                    return best
                order = _boosted(order, spans)
    return best


def _boosted(
    order: Sequence[PlannedMove], spans: Mapping[str, MoveSpan]
) -> list[PlannedMove] | None:
    """The same order with the moves of the host that finished last put first; None if unchanged."""
    last = max(order, key=lambda move: spans[move.vm].end_s)
    moves = [(move.source == last.source, move.destination == last.destination) for move in order]
    at = 0 if sum(one[0] for one in moves) >= sum(one[1] for one in moves) else 1
    boosted = [move for move, ends in zip(order, moves, strict=True) if ends[at]]
    boosted += [move for move, ends in zip(order, moves, strict=True) if not ends[at]]
    return None if boosted == list(order) else boosted


def bound(moves: Sequence[PlannedMove], most_at_once: int, crowding: float = 0.0) -> float:
    """A lower bound for every order of these moves.

    For each host: its link carries the work of all its moves, and something comes before and after
    that; `most_at_once` slots hold all their time, which grows with crowding; and no move is
    shorter than it is alone.
    """
    longest_s = max((move.cost.alone_s for move in moves), default=0.0)
    ends = dict[tuple[str, str], list[PlannedMove]]()
    for move in moves:
        ends.setdefault(("out", move.source), []).append(move)
        ends.setdefault(("in", move.destination), []).append(move)
    return max([longest_s, *(_end_bound_s(of, most_at_once, crowding) for of in ends.values())])


def bound_anywhere(movers: Sequence[Mover], hosts: int, most_at_once: int) -> float:
    """A lower bound for every placement on that many hosts, in any order."""
    able = [one for one in movers if one.costs]
    if not able:
        return 0.0
    fixed_s = min(cost.fixed_s for one in able for cost in one.costs.values())
    end_s = min(cost.end_s for one in able for cost in one.costs.values())
    work_s, alone_s = dict[str, float](), dict[str, float]()
    for one in able:
        least_s = min(cost.work_s for cost in one.costs.values())
        work_s[one.source] = work_s.get(one.source, 0.0) + least_s
        shortest_s = min(cost.alone_s for cost in one.costs.values())
        alone_s[one.source] = alone_s.get(one.source, 0.0) + shortest_s
    busiest_s = max([*work_s.values(), sum(work_s.values()) / max(hosts, 1)])
    longest_s = max(min(cost.alone_s for cost in one.costs.values()) for one in able)
    slots_s = max([*alone_s.values(), sum(alone_s.values()) / max(hosts, 1)]) / most_at_once
    return max(fixed_s + busiest_s + end_s, longest_s, slots_s)


def _end_bound_s(moves: Sequence[PlannedMove], most_at_once: int, crowding: float) -> float:
    costs = [move.cost for move in moves]
    link_s = min(cost.fixed_s for cost in costs) + sum(cost.work_s for cost in costs)
    link_s += min(cost.end_s for cost in costs)
    # Combined speed of that many moves: with crowding of 1 or more, no faster than one.
    together = max(most_at_once / (1 + crowding * (most_at_once - 1)), 1.0)
    return max(link_s, sum(cost.alone_s for cost in costs) / together)


def _orders(moves: Sequence[PlannedMove]) -> Iterable[list[PlannedMove]]:
    """Orders to try: moves with much to do after sending go early, those with little go last.

    The rule for three machines in a row of which the first and the last are never the bottleneck:
    by the time before sending, then by the time after (Johnson 1954).
    """
    short = sorted(
        (m for m in moves if m.cost.fixed_s <= m.cost.end_s), key=lambda m: m.cost.fixed_s
    )
    rest = sorted((m for m in moves if m.cost.fixed_s > m.cost.end_s), key=lambda m: -m.cost.end_s)
    yield _by_load(moves, sorted(moves, key=lambda move: -move.cost.alone_s))
    yield _by_load(moves, [*short, *rest])


def _by_load(moves: Sequence[PlannedMove], order: list[PlannedMove]) -> list[PlannedMove]:
    """In this order, but moves between busier pairs of hosts first."""
    load_s = dict[tuple[str, str], float]()
    for move in moves:
        for end in (("out", move.source), ("in", move.destination)):
            load_s[end] = load_s.get(end, 0.0) + move.cost.work_s

    def key(move: PlannedMove) -> float:
        return -max(load_s["out", move.source], load_s["in", move.destination])

    return sorted(order, key=key)


def play(order: Sequence[PlannedMove], at_once: int, crowding: float = 0.0) -> dict[str, MoveSpan]:
    """Simulate the moves: each begins as soon as its hosts have free slots.

    A move is slower by `crowding` for each other move at the busier of its hosts that does not
    merely wait for the link: 0 where hosts have processors to spare, 1 where they have only one.
    """
    return _Play(order, at_once, crowding).run()


End = tuple[str, str]


class _MovePart(Enum):
    FIXED = "fixed"
    WAITING = "waiting"
    SENDING = "sending"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class _Under:
    """A move in progress. `left_s` of its current part remained at `seen_s`, at `speed`."""

    move: PlannedMove
    rank: int
    part: _MovePart
    left_s: float
    seen_s: float
    speed: float = 0.0
    version: int = 0
    instants: list[float] = field(default_factory=list)

    @property
    def ends(self) -> tuple[End, End]:
        return ("out", self.move.source), ("in", self.move.destination)


class _Play:
    def __init__(self, order: Sequence[PlannedMove], at_once: int, crowding: float) -> None:
        self._at_once, self._crowding = at_once, crowding
        self._waiting = dict[str, dict[int, PlannedMove]]()
        self._comers = dict[str, set[str]]()
        for rank, move in enumerate(order):
            self._waiting.setdefault(move.source, {})[rank] = move
            self._comers.setdefault(move.destination, set()).add(move.source)
        self._at = dict[End, dict[int, _Under]]()
        self._busy = set[End]()
        self._ready = list[_Under]()
        self._events: list[tuple[float, int, int, _Under]] = []
        self._spans = dict[str, MoveSpan]()
        self._now_s = 0.0

    def run(self) -> dict[str, MoveSpan]:
        """Run the simulation to the end."""
        self._begin(list(self._waiting))
        while self._events:
            at_s, _, version, under = heappop(self._events)
            if version == under.version:
                self._now_s = at_s
                self._part_is_over(under)
        return self._spans

    def _part_is_over(self, under: _Under) -> None:
        cost = under.move.cost
        match under.part:
            case _MovePart.FIXED:
                under.part, under.speed = _MovePart.WAITING, 0.0
                under.instants.append(self._now_s)
                under.version += 1
                self._ready.append(under)
                self._retime(under.ends)
            case _MovePart.SENDING:
                self._busy.difference_update(under.ends)
                self._enter(under, _MovePart.ENDING, cost.end_s)
            case _:
                under.version += 1
                begin_s, ready_s, sends_s, sent_s = under.instants
                self._spans[under.move.vm] = MoveSpan(
                    begin_s, ready_s, sends_s, sent_s, self._now_s
                )
                for end in under.ends:
                    del self._at[end][under.rank]
                self._retime(under.ends)
                self._begin({under.move.source, *self._comers[under.move.destination]})
        self._send()

    def _send(self) -> None:
        """Start sending the move that has been ready longest, of those with both links free."""
        for under in list(self._ready):
            if not self._busy.intersection(under.ends):
                self._ready.remove(under)
                self._busy.update(under.ends)
                self._enter(under, _MovePart.SENDING, under.move.cost.work_s)
                self._retime(under.ends)

    def _begin(self, sources: Iterable[str]) -> None:
        """Begin all moves whose hosts have free slots."""
        offers = {s: offer for s in sources if (offer := self._offer(s)) is not None}
        while offers:
            source, rank = min(offers.items(), key=lambda one: one[1])
            move = self._waiting[source].pop(rank)
            under = _Under(move, rank, _MovePart.FIXED, 0.0, self._now_s)
            for end in under.ends:
                self._at.setdefault(end, {})[rank] = under
            self._enter(under, _MovePart.FIXED, move.cost.fixed_s)
            self._retime(under.ends)
            for touched in self._comers[move.destination].intersection(offers) | {source}:
                offers.pop(touched)
                if (offer := self._offer(touched)) is not None:
                    offers[touched] = offer

    def _offer(self, source: str) -> int | None:
        """The rank of the move that the source would begin next."""
        if len(self._at.get(("out", source), ())) >= self._at_once:
            return None
        for rank, move in self._waiting[source].items():
            if len(self._at.get(("in", move.destination), ())) < self._at_once:
                return rank
        return None

    def _enter(self, under: _Under, part: _MovePart, left_s: float) -> None:
        under.part, under.left_s, under.seen_s = part, left_s, self._now_s
        under.instants.append(self._now_s)
        under.speed = self._speed(under)
        self._expect(under)

    def _retime(self, ends: Iterable[End]) -> None:
        """Update the moves at these hosts to their current speed."""
        if not self._crowding:
            return
        for end in ends:
            for under in self._at.get(end, {}).values():
                if under.part is _MovePart.WAITING:
                    continue
                if (speed := self._speed(under)) != under.speed:
                    under.left_s -= (self._now_s - under.seen_s) * under.speed
                    under.seen_s, under.speed = self._now_s, speed
                    self._expect(under)

    def _expect(self, under: _Under) -> None:
        under.version += 1
        end_s = self._now_s + max(under.left_s, 0.0) / under.speed
        heappush(self._events, (end_s, under.rank, under.version, under))

    def _speed(self, under: _Under) -> float:
        if not self._crowding:
            return 1.0
        crowd = max(
            sum(other.part is not _MovePart.WAITING for other in self._at[end].values())
            for end in under.ends
        )
        return 1 / (1 + self._crowding * (crowd - 1))
