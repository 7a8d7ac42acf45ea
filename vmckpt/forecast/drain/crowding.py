"""How much moves that go at once are in one another's way, learned from those that were."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from vmckpt.forecast.drain.fleet import PlannedMove
from vmckpt.forecast.drain.timetable import COMMON_SPREAD, MoveSpan, play

# So many drains tell what moves take now, the last ones.
LATEST = 3
_TRIED = [step / 20 for step in range(41)]
# What is not told by the drains themselves is taken as where nothing is known: of two that explain
# them as well, the nearer to it. In squares of parts off, for each 1 of crowding that it differs.
_DOUBT = 1e-3


class PastMove(NamedTuple):
    """A move that was, since the drain's beginning; its cost is what was expected of it alone."""

    move: PlannedMove
    span: MoveSpan


class Past(NamedTuple):
    """Moves that were begun in this order, so many at once, and were over after `took_s`."""

    moves: tuple[PastMove, ...]
    at_once: int
    took_s: float


class LearnedCrowding(NamedTuple):
    """What drains have told.

    `crowding` is as `timetable.play` takes it; `spread` what is left unexplained, of 1. `around_s`:
    what a move takes before and after it sends, alone; None: no drain has told. `work`: so many
    times as long as expected it sends. `at_once`: so many went the last time, of several.
    """

    crowding: float
    spread: float
    around_s: tuple[float, float] | None = None
    work: float = 1.0
    at_once: int | None = None


class _Crowd(NamedTuple):
    """A part of a move: how long it took with so many others active at the busier of its hosts."""

    seconds: dict[int, float]

    def alone_s(self, crowding: float) -> float:
        return sum(s / (1 + crowding * others) for others, s in self.seconds.items())


class _Parts(NamedTuple):
    move: PlannedMove
    fixed: _Crowd
    work: _Crowd
    end: _Crowd


def learn(past: Sequence[Past], unknown: float) -> LearnedCrowding:
    """What explains the last drains best; `unknown`, and more doubt, where there were none.

    With the right crowding the same parts took as long in a crowd as alone, once that is taken out.
    """
    latest = [one for one in past if one.moves and one.took_s > 0][-LATEST:]
    if not latest:
        return LearnedCrowding(unknown, 2 * COMMON_SPREAD)
    parts = [_parts(one) for one in latest]
    best = min(_TRIED, key=lambda crowding: _off(parts, crowding, unknown))
    fixed_s, end_s, work = _alone(parts, best)
    chosen = [one.at_once for one in latest if len(one.moves) > 1]
    learned = LearnedCrowding(best, 0.0, (fixed_s, end_s), work, chosen[-1] if chosen else None)
    errors = [math.log(one.took_s / forecast_s(one, learned)) for one in latest]
    left = math.hypot(*errors) / math.sqrt(len(errors))
    return learned._replace(spread=max(left, COMMON_SPREAD * (1 + 1 / len(latest))))


def forecast_s(one: Past, learned: LearnedCrowding) -> float:
    """How long its moves would take by what was learned."""
    fixed_s, end_s = learned.around_s or (0.0, 0.0)
    moves = [
        taken.move._replace(
            cost=taken.move.cost._replace(
                fixed_s=fixed_s, work_s=taken.move.cost.work_s * learned.work, end_s=end_s
            )
        )
        for taken in one.moves
    ]
    spans = play(moves, one.at_once, learned.crowding)
    return max(span.end_s for span in spans.values())


def _alone(past: Sequence[Sequence[_Parts]], crowding: float) -> tuple[float, float, float]:
    """What comes before and after sending, in the middle, and the part of the expected work."""
    every = [one for parts in past for one in parts]
    worked = sum(one.work.alone_s(crowding) for one in every)
    expected = sum(one.move.cost.work_s for one in every)
    return (
        median(one.fixed.alone_s(crowding) for one in every),
        median(one.end.alone_s(crowding) for one in every),
        worked / expected if expected > 0 else 1.0,
    )


def _off(past: Sequence[Sequence[_Parts]], crowding: float, unknown: float) -> float:
    """By how much parts differ from what they are to be, squared, of all that they took."""
    fixed_s, end_s, work = _alone(past, crowding)
    every = [one for parts in past for one in parts]
    off = all_s = 0.0
    for one in every:
        for part, usual_s in (
            (one.fixed, fixed_s),
            (one.work, one.move.cost.work_s * work),
            (one.end, end_s),
        ):
            alone_s = part.alone_s(crowding)
            if usual_s > 0 and alone_s > 0:
                off += alone_s * math.log(alone_s / usual_s) ** 2
                all_s += alone_s
    return (off / all_s if all_s else 0.0) + _DOUBT * (crowding - unknown) ** 2


def _parts(one: Past) -> list[_Parts]:
    """Each move's parts, with how many others were active meanwhile. Who waits is not."""
    found = [_Parts(taken.move, _Crowd({}), _Crowd({}), _Crowd({})) for taken in one.moves]
    instants = sorted({at_s for taken in one.moves for at_s in taken.span})
    for begin_s, end_s in pairwise(instants):
        active = list[tuple[_Parts, _Crowd]]()
        there = dict[tuple[str, str], int]()
        for taken, parts in zip(one.moves, found, strict=True):
            part = _part_at(taken.span, parts, begin_s)
            if part is not None:
                active.append((parts, part))
                for end in _ends(taken.move):
                    there[end] = there.get(end, 0) + 1
        for parts, part in active:
            others = max(there[end] for end in _ends(parts.move)) - 1
            part.seconds[others] = part.seconds.get(others, 0.0) + end_s - begin_s
    return found


def _part_at(span: MoveSpan, parts: _Parts, at_s: float) -> _Crowd | None:
    if span.begin_s <= at_s < span.ready_s:
        return parts.fixed
    if span.sends_s <= at_s < span.sent_s:
        return parts.work
    if span.sent_s <= at_s < span.end_s:
        return parts.end
    return None


def _ends(move: PlannedMove) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("out", move.source), ("in", move.target)
