"""U(t): how many distinct pages a guest dirties within t seconds, from measured points.

Never a rate times t: a page dirtied twice is sent once. The true U is monotone and concave; the
points are made monotone before use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean
from typing import NamedTuple, Self

# The fraction of the spread that remains when a point rests on few samples.
LEAST_SPREAD = 0.03
# Points closer than this are merged.
SAME_TIME = 0.01


class DirtyPoint(NamedTuple):
    """U at one t: the 10th percentile, the mean and the 90th percentile of the samples."""

    t_s: float
    low_pages: float
    pages: float
    high_pages: float


_ORIGIN = DirtyPoint(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DirtyCurve:
    """U(t) between and beyond its points, which are in order of t; never over `total_pages`."""

    points: tuple[DirtyPoint, ...]
    total_pages: int

    @classmethod
    def measured(cls, samples: Iterable[Sequence[tuple[float, float]]], total_pages: int) -> Self:
        """Build the curve from samples (t, pages); those with about the same t are merged."""
        points = sorted(_point(group) for group in samples if group)
        rising: list[DirtyPoint] = []
        for point in points:
            before = rising[-1] if rising else _ORIGIN
            if rising and point.t_s < rising[-1].t_s * (1 + SAME_TIME):
                rising.pop()
            raised = (max(new, old) for new, old in zip(point[1:], before[1:], strict=True))
            rising.append(DirtyPoint(point.t_s, *raised))
        return cls(tuple(rising), total_pages)

    def within(self, t_s: float, quantile: float = 0.5) -> float:
        """U(t), in pages. `quantile` 0.1, 0.5 and 0.9 are measured, others interpolated."""
        if not self.points or t_s <= 0:
            return 0.0
        if t_s <= self.points[0].t_s:
            return self._before_all(t_s, quantile)
        for n, after in enumerate(self.points):
            if t_s <= after.t_s:
                return self._between(self.points[n - 1], after, t_s, quantile)
        # Beyond the last point it continues as between the last two, and no faster than on average.
        before, last = (_ORIGIN, *self.points)[-2:]
        at_last = _at(last, quantile)
        slope = (last.pages - before.pages) / (last.t_s - before.t_s)
        slope = min(slope, last.pages / last.t_s)
        # Other quantiles in proportion: with slopes of their own they could cross.
        slope *= at_last / last.pages if last.pages else 1.0
        return min(at_last + (t_s - last.t_s) * slope, self.total_pages)

    def _before_all(self, t_s: float, quantile: float) -> float:
        """Up to the first point: a power of t, as between the first two."""
        first = self.points[0]
        power = 1.0
        if len(self.points) > 1 and first.pages > 0:
            second = self.points[1]
            power = log(second.pages / first.pages) / log(second.t_s / first.t_s)
        part: float = (t_s / first.t_s) ** min(max(power, 0.0), 1.0)
        return min(part * _at(first, quantile), self.total_pages)

    def _between(self, first: DirtyPoint, last: DirtyPoint, t_s: float, quantile: float) -> float:
        low, high = _at(first, quantile), _at(last, quantile)
        part = (t_s - first.t_s) / (last.t_s - first.t_s)
        return min(max(low + part * (high - low), 0.0), self.total_pages)

    @property
    def working_set_pages(self) -> float:
        """Distinct pages in the longest time measured."""
        return self.points[-1].pages if self.points else 0.0


def _point(group: Sequence[tuple[float, float]]) -> DirtyPoint:
    values = sorted(pages for _, pages in group)
    mean = fmean(values)
    # One sample has no spread of its own; ten have most of it.
    doubt = LEAST_SPREAD * mean * (1 + 3 / len(values))
    low, high = (values[round(part * (len(values) - 1))] for part in (0.1, 0.9))
    return DirtyPoint(
        fmean(t_s for t_s, _ in group), min(low, mean - doubt), mean, max(high, mean + doubt)
    )


def _at(point: DirtyPoint, quantile: float) -> float:
    if quantile == 0.5:
        return point.pages
    if quantile < 0.5:
        part = max(quantile - 0.1, 0.0) / 0.4
        return point.low_pages + part * (point.pages - point.low_pages)
    part = min(quantile - 0.5, 0.4) / 0.4
    return point.pages + part * (point.high_pages - point.pages)
