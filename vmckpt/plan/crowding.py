"""How much moves that go at once are in one another's way, learned from those that were."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from vmckpt.plan.fleet import Move
from vmckpt.plan.timetable import COMMON_SPREAD, play

_TRIED = [step / 20 for step in range(41)]


# What moves take beside the link is told by so many drains, the last ones.
LATEST = 3


class Past(NamedTuple):
    """Moves that were begun in this order, so many at once, and were over after `took_s`.

    Their costs are what each of them did take.
    """

    moves: tuple[Move, ...]
    at_once: int
    took_s: float


class Learned(NamedTuple):
    """`crowding` as `timetable.play` takes it; `spread` is what is left unexplained, of 1."""

    crowding: float
    spread: float


def learn(past: Sequence[Past], unknown: float) -> Learned:
    """What explains the past best; `unknown`, and more doubt, where there is none that could."""
    telling = [one for one in past if one.at_once > 1 and len(one.moves) > 1 and one.took_s > 0]
    if not telling:
        return Learned(unknown, 2 * COMMON_SPREAD)
    errors = {crowding: [_off(one, crowding) for one in telling] for crowding in _TRIED}
    best = min(_TRIED, key=lambda crowding: sum(error**2 for error in errors[crowding]))
    left = math.hypot(*errors[best]) / math.sqrt(len(telling))
    return Learned(best, max(left, COMMON_SPREAD * (1 + 1 / len(telling))))


def around(past: Sequence[Past]) -> tuple[float, float] | None:
    """What moves took before their memory went, and after it, in the middle; None: nobody knows."""
    costs = [move.cost for one in past[-LATEST:] for move in one.moves]
    if not costs:
        return None
    return median(cost.fixed_s for cost in costs), median(cost.end_s for cost in costs)


def _off(one: Past, crowding: float) -> float:
    spans = play(one.moves, one.at_once, crowding)
    return math.log(one.took_s / max(span.end_s for span in spans.values()))
