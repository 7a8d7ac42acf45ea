"""How much concurrent moves slow each other down, learned from past drains."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from vmckpt.forecast.drain.fleet import PlannedMove
from vmckpt.forecast.drain.timetable import COMMON_SPREAD, MoveSpan, play

# Use only the last drains: they show what moves take now.
LATEST = 3
_TRIED = [step / 20 for step in range(41)]
# Regularization: of two explanations that fit the drains equally well, prefer the one nearer to the
# default. In squared relative errors, for each 1 of crowding by which it differs.
_DOUBT = 1e-3


class PastMove(NamedTuple):
    """A past move, timed from the drain's start; its cost is what was expected of it alone."""

    move: PlannedMove
    span: MoveSpan


class Past(NamedTuple):
    """A past drain: its moves in starting order, how many at once, and their duration `took_s`."""

    moves: tuple[PastMove, ...]
    at_once: int
    took_s: float


class LearnedCrowding(NamedTuple):
    """What past drains show.

    `crowding` is as `timetable.play` takes it; `spread` is the unexplained error, as a fraction.
    `around_s`: what a move alone takes before and after sending; None: no drain has shown it.
    `work`: the factor by which sending takes longer than expected. `at_once`: how many moved at
    once the last time, if several.
    """

    crowding: float
    spread: float
    around_s: tuple[float, float] | None = None
    work: float = 1.0
    at_once: int | None = None


class _Crowd(NamedTuple):
    """A part of a move: its duration with so many others active at the busier of its hosts."""

    seconds: dict[int, float]

    def alone_s(self, crowding: float) -> float:
        return sum(s / (1 + crowding * others) for others, s in self.seconds.items())


class _Parts(NamedTuple):
    move: PlannedMove
    fixed: _Crowd
    work: _Crowd
    end: _Crowd


def learn(past: Sequence[Past], unknown: float) -> LearnedCrowding:
    """The best explanation of the last drains; without drains `unknown`, with more uncertainty.

    With the right crowding value, parts take as long in a crowd as alone once its effect is
    removed.
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
    """Forecast the duration of the past drain's moves from what was learned."""
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
    """Median times before and after sending, and the ratio of sending to the expected work."""
    every = [one for parts in past for one in parts]
    worked = sum(one.work.alone_s(crowding) for one in every)
    expected = sum(one.move.cost.work_s for one in every)
    return (
        median(one.fixed.alone_s(crowding) for one in every),
        median(one.end.alone_s(crowding) for one in every),
        worked / expected if expected > 0 else 1.0,
    )


def _off(past: Sequence[Sequence[_Parts]], crowding: float, unknown: float) -> float:
    """The squared deviation of the parts from their expected durations, relative to their total."""
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
    """Each move's parts, with how many others were active meanwhile. Waiting moves do not count."""
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
    return ("out", move.source), ("in", move.destination)
