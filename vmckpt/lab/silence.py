"""Computes silences from heartbeats: arithmetic on arrival times and sequence numbers."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_LONG_GAP_NS = 20 * 10**6


class LongGap(NamedTuple):
    """A gap as it is reported: when it began (CLOCK_MONOTONIC) and how long it was."""

    began_ns: int
    length_ms: float


class Gap(NamedTuple):
    """A silence: when it began (CLOCK_MONOTONIC) and how long it was."""

    began_ns: int
    length_ns: int


@dataclass(frozen=True, slots=True)
class GuestSilence:
    """The heartbeats received from one guest within a window.

    `lost`: sequence numbers never seen between the first and the last one. `reordered`: beats that
    arrived after a later one. `duplicated`: numbers seen more than once: two copies of the guest
    ran, or it was reset to an earlier state. `dropped`: datagrams of any guest that this process
    was too slow to read since it started; while that grows, `lost` proves nothing.
    """

    received: int
    lost: int
    reordered: int
    duplicated: int
    dropped: int
    longest_gap_ms: float
    gap_began_ns: int
    gaps_over_20ms: list[LongGap]
    first_ns: int | None
    last_ns: int | None


def gaps(
    arrivals_ns: Sequence[int], since_ns: int, until_ns: int, *, heard_before: bool = False
) -> list[Gap]:
    """The silences within [since_ns, until_ns], oldest first, bounded by the arrivals in it.

    Silence up to `until_ns` counts. Silence from `since_ns` to the first arrival counts only if the
    guest was `heard_before`: otherwise it had not begun to beat. `arrivals_ns` is ascending.
    """
    inside = arrivals_ns[bisect_left(arrivals_ns, since_ns) : bisect_right(arrivals_ns, until_ns)]
    bounds = [since_ns] if heard_before else []
    bounds += inside
    if bounds:
        bounds.append(until_ns)
    pairs = pairwise(bounds)
    return [Gap(began, ended - began) for began, ended in pairs if ended > began]


def summarise(
    arrivals_ns: Sequence[int],
    sequence_numbers: Sequence[int],
    since_ns: int,
    until_ns: int,
    *,
    heard_before: bool,
    dropped: int = 0,
) -> GuestSilence:
    """Summarise the window; both sequences hold its beats in order of arrival."""
    silences = gaps(sorted(arrivals_ns), since_ns, until_ns, heard_before=heard_before)
    longest = max(silences, key=lambda gap: gap.length_ns, default=Gap(since_ns, 0))
    lost = reordered = duplicated = 0
    for life in _lives(sequence_numbers):
        distinct = set(life)
        lost += max(life) - min(life) + 1 - len(distinct)
        duplicated += len(life) - len(distinct)
        reordered += _behind(life) - (len(life) - len(distinct))
    return GuestSilence(
        received=len(arrivals_ns),
        lost=lost,
        reordered=reordered,
        duplicated=duplicated,
        dropped=dropped,
        longest_gap_ms=longest.length_ns / 1e6,
        gap_began_ns=longest.began_ns,
        gaps_over_20ms=[
            LongGap(gap.began_ns, gap.length_ns / 1e6)
            for gap in silences
            if gap.length_ns > _LONG_GAP_NS
        ],
        first_ns=min(arrivals_ns, default=None),
        last_ns=max(arrivals_ns, default=None),
    )


def _lives(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Split `numbers` where counting restarted (at 0 or 1), as after a reboot of the guest."""
    cuts = [
        at
        for at in range(1, len(numbers))
        if numbers[at] <= 1 and numbers[at] < numbers[at - 1] and numbers[at - 1] > 1
    ]
    edges = [0, *cuts, len(numbers)]
    return [numbers[a:b] for a, b in pairwise(edges) if b > a]


def _behind(numbers: Sequence[int]) -> int:
    """How many of `numbers` do not exceed an earlier one."""
    count, highest = 0, -1
    for number in numbers:
        if number <= highest:
            count += 1
        else:
            highest = number
    return count
