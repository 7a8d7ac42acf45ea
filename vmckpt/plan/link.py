"""What moving costs between two hosts, learned from what it has cost; nothing is assumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median, quantiles
from typing import NamedTuple

# So far forecasts may be off, however well the past fits.
LEAST_SPREAD = 0.04
# Pages that take less than this do not count in a standstill.
FEW_PAGES_S = 0.02
# So many moves are few: there is more doubt.
FEW_MOVES = 3
# Until it is known what part of post-copy's slow phase the guest stands still: any of it.
UNKNOWN_WAITING = (0.0, 0.5, 1.0)
# Of p10 to p90, in standard deviations on each side.
_TENTH = 1.28


class Moved(NamedTuple):
    """A migration that was: pages sent over an unlimited link, and how long things took.

    `stalled_s` is how long the guest stood still (None: not known, or it was stopped throughout),
    `last_pages` at most how many pages went meanwhile; `felt`: by whoever waited for the guest, not
    by QEMU. `copied_bytes` of disks took `copying_s`. What a guest of another kind took besides
    sending does not count (`fixed_counts`). `slow_s` is how long post-copy fetched pages while the
    guest ran; `stalled_s` is then how long it stood still in all.
    """

    pages: float
    zero_pages: float
    transfer_s: float
    total_s: float
    stalled_s: float | None
    last_pages: float = 0.0
    felt: bool = False
    fixed_counts: bool = True
    slow_s: float = 0.0
    copied_bytes: int = 0
    copying_s: float = 0.0


class Costs(NamedTuple):
    """Seconds a page that is not zero, a zero page, and whatever was sent."""

    page_s: float
    zero_page_s: float
    start_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """A pair of hosts, one way, and one way of sending.

    `fixed_s` is what a migration takes besides sending; `switch_s` how long the guest stands still
    besides the pages sent meanwhile. `spread` is the standard deviation of a forecast, of 1;
    `switch_spread_s` that of `switch_s`. `disk_bytes_per_s` is None where no disk was copied yet.
    `waiting`: what part of post-copy's slow phase the guest stands still, p10, median and p90.
    """

    costs: Costs
    fixed_s: float
    switch_s: float
    spread: float
    switch_spread_s: float
    moves: int
    disk_bytes_per_s: float | None = None
    waiting: tuple[float, float, float] = UNKNOWN_WAITING

    @property
    def bytes_per_s(self) -> float:
        """How fast pages that are not zero go."""
        return 4096 / self.costs.page_s if self.costs.page_s else 0.0


def learn(moved: Sequence[Moved], misses: Sequence[float] = ()) -> Link | None:
    """The constants that explain the migrations that were; None when they explain nothing.

    `misses` are what forecasts of this pair were off by, of 1. The cost of a page can only be told
    from that of a zero page when migrations differed in the two.
    """
    costs = _fit(moved)
    if costs is None or costs.page_s <= 0:
        return None
    errors = [_explained(costs, one) / one.transfer_s - 1 for one in moved]
    doubt = LEAST_SPREAD * (1 + FEW_MOVES / len(moved))
    spread = max(doubt, _deviation(errors), _deviation(misses))
    around = [one for one in moved if one.fixed_counts] or moved
    stalls = _switches_s(moved, costs)
    copied = [one.copied_bytes / one.copying_s for one in moved if one.copied_bytes]
    return Link(
        costs=costs,
        fixed_s=median(one.total_s - one.transfer_s - one.copying_s for one in around),
        switch_s=median(stalls) if stalls else 0.0,
        spread=spread,
        switch_spread_s=_spread_s(stalls),
        moves=len(moved),
        disk_bytes_per_s=median(copied) if copied else None,
        waiting=_waiting(moved, median(stalls) if stalls else 0.0),
    )


def _switches_s(moved: Sequence[Moved], costs: Costs) -> list[float]:
    """How long the switch took where few pages went in it; without such moves, less the pages."""
    felt = [one for one in moved if one.felt and not one.slow_s]
    stalls = [
        (one.last_pages * costs.page_s, one.stalled_s)
        for one in (felt if len(felt) > 1 else moved)
        if one.stalled_s is not None and not one.slow_s
    ]
    clean = [stalled_s for pages_s, stalled_s in stalls if pages_s <= FEW_PAGES_S]
    return clean or [max(stalled_s - pages_s, 0.0) for pages_s, stalled_s in stalls]


def _waiting(moved: Sequence[Moved], switch_s: float) -> tuple[float, float, float]:
    parts = [
        min(max((one.stalled_s - switch_s) / one.slow_s, 0.0), 1.0)
        for one in moved
        if one.stalled_s is not None and one.slow_s >= FEW_PAGES_S
    ]
    if len(parts) < FEW_MOVES:
        return UNKNOWN_WAITING
    tenths = quantiles(parts, n=10, method="inclusive")
    return tenths[0], median(parts), tenths[-1]


def _explained(costs: Costs, one: Moved) -> float:
    return costs.page_s * one.pages + costs.zero_page_s * one.zero_pages + costs.start_s


def _fit(moved: Sequence[Moved]) -> Costs | None:
    """The least relative squares with no cost below zero: the best of all subsets of costs."""
    rows = [
        ((one.pages / one.transfer_s, one.zero_pages / one.transfer_s, 1 / one.transfer_s), 1.0)
        for one in moved
        if one.transfer_s > 0 and one.pages > 0
    ]
    best: tuple[float, Costs] | None = None
    for used in (set(c) for n in (1, 2, 3) for c in combinations(range(3), n)):
        if 0 not in used or len(rows) < len(used):
            continue
        found = _least_squares(rows, sorted(used))
        if found is None or min(found) < 0:
            continue
        values = dict(zip(sorted(used), found, strict=True))
        costs = Costs(*(values.get(n, 0.0) for n in range(3)))
        error = sum((sum(x * c for x, c in zip(row, costs, strict=True)) - y) ** 2
                    for row, y in rows)  # fmt: skip
        if best is None or error < best[0] * (1 - 1e-9):
            best = (error, costs)
    return best[1] if best else None


def _least_squares(
    rows: Sequence[tuple[tuple[float, float, float], float]], used: Sequence[int]
) -> list[float] | None:
    """By the normal equations, scaled; None when the rows cannot tell the columns apart."""
    scale = {n: max(abs(row[n]) for row, _ in rows) for n in used}
    if not all(scale.values()):
        return None
    matrix = [
        [_product(rows, a, b) / (scale[a] * scale[b]) for b in used]
        + [sum(row[a] * y for row, y in rows) / scale[a]]
        for a in used
    ]
    size = len(used)
    for at in range(size):
        pivot = max(range(at, size), key=lambda n: abs(matrix[n][at]))
        if abs(matrix[pivot][at]) < 1e-6:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        matrix[at] = [value / matrix[at][at] for value in matrix[at]]
        for other in range(size):
            if other != at:
                factor = matrix[other][at]
                matrix[other] = [
                    value - factor * own
                    for value, own in zip(matrix[other], matrix[at], strict=True)
                ]
    return [matrix[n][size] / scale[used[n]] for n in range(size)]


def _product(rows: Sequence[tuple[tuple[float, float, float], float]], a: int, b: int) -> float:
    return sum(row[a] * row[b] for row, _ in rows)


def _deviation(errors: Sequence[float]) -> float:
    return fmean(error * error for error in errors) ** 0.5 if errors else 0.0


def _spread_s(stalls: Sequence[float]) -> float:
    if len(stalls) < 3:
        return 0.5 * max(stalls, default=0.0)
    tenths = quantiles(stalls, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / (2 * _TENTH)
