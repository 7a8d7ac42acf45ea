"""When a guest dirties its pages: what was seen from any moment of the measurement on.

A mean over bursts is what no single migration meets. So a pre-copy is played from several moments
of what was seen, and their outcomes are the forecast.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vmckpt.plan.dirtying import DirtyCurve

# From so many moments, at most, a migration is played.
STARTS = 12


class Course(NamedTuple):
    """Spans one after the other, by their ends; `pages[i][n]`: distinct pages in spans i to i + n.

    `curve` is the guest on average, for what lies beyond the last span or within one.
    """

    ends_s: Sequence[float]
    pages: Sequence[Sequence[int]]
    curve: DirtyCurve

    def starts_s(self) -> list[float]:
        """Moments of the first half of what was seen; enough of them follows each."""
        half_s = self.ends_s[-1] / 2 if self.ends_s else 0.0
        begins = [0.0, *(end_s for end_s in self.ends_s if end_s <= half_s)]
        step = -(-len(begins) // STARTS)
        return begins[::step]

    def between(self, from_s: float, to_s: float) -> float:
        """Distinct pages that are dirtied between two moments of the measurement."""
        if to_s <= from_s:
            return 0.0
        end_s = self.ends_s[-1] if self.ends_s else 0.0
        mean = self.curve.within(to_s - from_s)
        if from_s >= end_s:
            return mean
        if to_s <= end_s:
            return self._seen(from_s, to_s)
        seen = self._seen(from_s, end_s)
        return seen + max(mean - self.curve.within(end_s - from_s), 0.0)

    def _seen(self, from_s: float, to_s: float) -> float:
        first, last = self._span(from_s), self._span(to_s)
        begin_s = self.ends_s[first - 1] if first else 0.0
        length_s = self.ends_s[first] - begin_s
        if first == last:
            whole = self.curve.within(length_s)
            part = self.curve.within(to_s - from_s) / whole if whole else 0.0
            return min(part, 1.0) * self.pages[first][0]
        gone = (from_s - begin_s) / length_s
        with_first = self._from(first, last, to_s)
        return (1 - gone) * with_first + gone * self._from(first + 1, last, to_s)

    def _from(self, first: int, last: int, to_s: float) -> float:
        """From the beginning of one span to a moment in another."""
        begin_s = self.ends_s[last - 1] if last else 0.0
        part = (to_s - begin_s) / (self.ends_s[last] - begin_s)
        row = self.pages[first]
        before = row[last - first - 1] if last > first else 0
        return before + part * (row[last - first] - before)

    def _span(self, at_s: float) -> int:
        return min(bisect_left(self.ends_s, at_s), len(self.ends_s) - 1)


class Load(Protocol):
    """What a guest dirties while it moves; moments count from the beginning of that."""

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """Distinct pages that are dirtied between two moments."""


class OnAverage(NamedTuple):
    """As it did on average, at any moment."""

    curve: DirtyCurve

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """See `Load`."""
        return self.curve.within(to_s - from_s, quantile)


class From(NamedTuple):
    """As it did from a moment of the measurement on. No luck is left in it."""

    course: Course
    start_s: float

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """See `Load`."""
        del quantile
        return self.course.between(self.start_s + from_s, self.start_s + to_s)
