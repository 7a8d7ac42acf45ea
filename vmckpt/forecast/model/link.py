"""The cost of moving between two hosts, learned from past migrations only."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt
from statistics import fmean, median, quantiles
from typing import NamedTuple

from vmckpt.forecast.model.least_squares import Row, not_negative

# The least error of a forecast, however well it fits the past.
LEAST_SPREAD = 0.06
# Pages that take less time than this do not count towards a downtime.
FEW_PAGES_S = 0.02
# Moves that differ by this many pages sent during the downtime show what such a page costs, once
# there are this many pairs of them.
FAR_PAGES, FEW_SLOPES = 5000, 6
# Up to this many moves there is more uncertainty.
FEW_MOVES = 3
# The noise in the duration of any move, however short.
NOISE_S = 0.5
# Until it is known how long the guest waits for a page in post-copy: any part of its slow phase.
# The wait is hardly longer than all missing pages take to arrive, which may be twice the forecast.
UNKNOWN_WAITING, MOST_WAITING = (0.0, 0.5, 1.0), (0.5, 1.0, 2.0)
# The distance from the median to p10 and p90, in standard deviations.
_TENTH = 1.28


class Moved(NamedTuple):
    """A past migration: pages sent, and how long things took.

    `stalled_s` is the guest's downtime (None: unknown, or stopped throughout), `last_pages` an
    upper bound of the pages sent meanwhile (None: unknown); `felt`: measured by clients of the
    guest, not by QEMU. `copied_bytes` of disks took `copying_s`. `similarity`: how similar its
    guest is to the one asked about; what moves take besides sending is learned from the most
    similar alone. Negative: another program migrated it, which shows nothing but the cost of pages
    if there are others. `slow_s` is how long post-copy fetched pages while the guest ran;
    `stalled_s` is then its total downtime. `limited`: a bandwidth limit held it back, so it does
    not show how fast pages go. `waited_s`: how long it took until QEMU checked whether it may end.
    `weight`: its weight for the cost of a page. `squeezed`: the number of pages whose bytes
    compression saved. `holes`: the number of zero pages that were not in the source's memory file.
    """

    pages: float
    zero_pages: float
    transfer_s: float
    total_s: float
    stalled_s: float | None
    last_pages: float | None = 0.0
    felt: bool = False
    similarity: int = 0
    slow_s: float = 0.0
    copied_bytes: int = 0
    copying_s: float = 0.0
    limited: bool = False
    waited_s: float = 0.0
    weight: float = 1.0
    squeezed: float = 0.0
    holes: float = 0.0


class PageCosts(NamedTuple):
    """Seconds per non-zero page, per zero page, and per page sent of any kind.

    `squeezed_s`: the extra cost of a page of which compression leaves nothing; `hole_s`: the extra
    cost of a zero page that the source's memory file does not hold. `look_s`: the source's share of
    a zero page's cost.
    """

    page_s: float
    zero_page_s: float
    start_s: float
    squeezed_s: float = 0.0
    hole_s: float = 0.0
    look_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A pair of hosts, in one direction, for one way of sending.

    `fixed_s` is what a migration takes besides sending; `switch_s` how long the guest is stopped,
    besides the pages sent meanwhile. `spread` is the standard deviation of a forecast, as a
    fraction; `fixed_spread_s` and `switch_spread_s` those of the two. `disk_bytes_per_s` is None if
    no disk was copied yet. `waiting_s`: how long the guest waits for pages in post-copy's slow
    phase, p10, median and p90, if that phase is long: it fetches what it needs most first. None:
    not known yet. `stopped_share`: the cost of a page while the guest is stopped, as a fraction of
    its usual cost: nothing competes for the processors, and the destination has had the page
    before.
    """

    costs: PageCosts
    fixed_s: float
    switch_s: float
    spread: float
    switch_spread_s: float
    moves: int
    disk_bytes_per_s: float | None = None
    waiting_s: tuple[float, float, float] | None = None
    fixed_spread_s: float = 0.0
    stopped_share: float = 1.0

    def waits_s(self, slow_s: float, scenario: int) -> float:
        """How long the guest waits for pages in a slow phase of this length; `scenario`: -1 for the
        good 10th percentile, 0 for the median, 1 for the bad one.
        """
        if self.waiting_s is None:
            return UNKNOWN_WAITING[scenario + 1] * slow_s
        return min(self.waiting_s[scenario + 1], MOST_WAITING[scenario + 1] * slow_s)

    @property
    def bytes_per_s(self) -> float:
        """The throughput of non-zero pages."""
        return 4096 / self.costs.page_s if self.costs.page_s else 0.0


def learn(
    moved: Sequence[Moved],
    misses: Sequence[float] = (),
    sent_otherwise: Sequence[Moved] = (),
    look_s: float | None = None,
) -> LinkModel | None:
    """Fit the constants to the past migrations; None if they explain nothing.

    `misses` are the relative errors of this pair's forecasts. The cost of a page can be separated
    from that of a zero page only if migrations differed in the two. What a migration takes besides
    sending, and the switchover, are learned from `sent_otherwise` too. `look_s` is the source's
    share of a zero page's cost: all of it, if unknown.
    """
    unlimited = [one for one in moved if not one.limited]
    costs = _fit(unlimited)
    if not unlimited or costs is None or costs.page_s <= 0:
        return None
    zero_s = costs.zero_page_s
    costs = costs._replace(look_s=zero_s if look_s is None else min(look_s, zero_s))
    most = max(one.weight for one in unlimited)
    telling = [one for one in unlimited if one.weight == most]
    errors = [_off_s(costs, one) / (one.transfer_s + NOISE_S) for one in telling]
    doubt = LEAST_SPREAD * (1 + FEW_MOVES / len(telling))
    spread = max(doubt, _deviation(errors), _deviation(misses))
    all_ = [*moved, *sent_otherwise]
    everything = [one for one in all_ if one.similarity >= 0] or all_
    around = [one.total_s - one.transfer_s - one.copying_s for one in _nearest(everything)]
    stopped_share = _stopped_share(everything, costs)
    stalls = _switches_s(everything, costs.page_s * stopped_share)
    copied = [one.copied_bytes / one.copying_s for one in moved if one.copied_bytes]
    return LinkModel(
        costs=costs,
        fixed_s=median(around),
        fixed_spread_s=_spread_s(around),
        stopped_share=stopped_share,
        switch_s=median(stalls) if stalls else 0.0,
        spread=spread,
        switch_spread_s=_spread_s(stalls),
        moves=len(moved),
        disk_bytes_per_s=median(copied) if copied else None,
        waiting_s=_waiting_s(everything, median(stalls) if stalls else 0.0),
    )


def _nearest(moved: Sequence[Moved]) -> list[Moved]:
    """The moves of the most similar guests."""
    nearest = max(one.similarity for one in moved)
    return [one for one in moved if one.similarity == nearest]


def _stopped_share(moved: Sequence[Moved], costs: PageCosts) -> float:
    """The fraction of a page's cost that remains while the guest is stopped.

    The median of all slopes; all of it while too few moves had many more pages left than others.
    """
    stalls = [
        (one.last_pages, one.stalled_s)
        for one in _felt(moved)
        if one.stalled_s is not None and one.last_pages is not None
    ]
    slopes = [
        (long_s - short_s) / (many - few)
        for few, short_s in stalls
        for many, long_s in stalls
        if many - few >= FAR_PAGES
    ]
    if len(slopes) < FEW_SLOPES:
        return 1.0
    return min(max(median(slopes) / costs.page_s, 0.0), 1.0)


def _felt(moved: Sequence[Moved]) -> Sequence[Moved]:
    """Moves without post-copy; if any of these waited, only those."""
    stopped = [one for one in moved if not one.slow_s]
    felt = [one for one in stopped if one.felt]
    return felt if len(felt) > 1 else stopped


def _switches_s(moved: Sequence[Moved], page_s: float) -> list[float]:
    """How long the switchovers took, without the pages sent in them."""
    stalls = [
        ((one.last_pages or 0.0) * page_s, one.stalled_s)
        for one in _felt(moved)
        if one.stalled_s is not None
    ]
    return [max(stalled_s - pages_s, 0.0) for pages_s, stalled_s in stalls]


def _waiting_s(moved: Sequence[Moved], switch_s: float) -> tuple[float, float, float] | None:
    waits = [
        max(one.stalled_s - switch_s, 0.0)
        for one in moved
        if one.stalled_s is not None and one.slow_s >= FEW_PAGES_S
    ]
    if len(waits) < FEW_MOVES:
        return None
    tenths = quantiles(waits, n=10, method="inclusive")
    return tenths[0], median(waits), tenths[-1]


def _off_s(costs: PageCosts, one: Moved) -> float:
    """By how much a move took longer than its costs explain."""
    explained_s = costs.page_s * one.pages + costs.zero_page_s * one.zero_pages + costs.start_s
    explained_s += costs.squeezed_s * one.squeezed + costs.hole_s * one.holes
    return one.transfer_s - one.waited_s - explained_s


def _fit(moved: Sequence[Moved]) -> PageCosts | None:
    """The costs that explain whole moves best.

    The unknowns are the cost of any page, and the extra cost of a non-zero one: otherwise
    migrations that hardly differ in the two would show that zeroes cost more. A short move is off
    by the noise, a long one by a fraction of its length.
    """
    rows = list[Row]()
    for one in moved:
        if one.transfer_s > one.waited_s and one.pages > 0:
            scale = one.weight / (one.transfer_s + NOISE_S)
            facts = (one.pages, one.pages + one.zero_pages, 1.0, one.squeezed, one.holes)
            scaled = tuple(fact * scale for fact in facts)
            rows.append((scaled, (one.transfer_s - one.waited_s) * scale))
    found = not_negative(rows, needed={0, 1})
    if found is None:
        return None
    more_s, any_s, start_s, squeezed_s, hole_s = found
    return PageCosts(any_s + more_s, any_s, start_s, squeezed_s, hole_s)


def _deviation(errors: Sequence[float]) -> float:
    """The standard deviation of errors, around 0 and not their mean.

    An outlier counts no more than six times the 80th percentile: smaller errors are what a varying
    link looks like.
    """
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return 0.0
    rank = 0.8 * (len(sizes) - 1)
    below, above = sizes[floor(rank)], sizes[ceil(rank)]
    most = 6 * (below + (rank - floor(rank)) * (above - below))
    return sqrt(fmean(min(size, most) ** 2 for size in sizes))


def _spread_s(stalls: Sequence[float]) -> float:
    if len(stalls) < 3:
        return 0.5 * max(stalls, default=0.0)
    tenths = quantiles(stalls, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / (2 * _TENTH)
