"""When a guest dirties its pages: what was seen from any moment of the measurement on.

A mean over bursts is what no single migration meets. So a pre-copy is played from several moments
of what was seen, and their outcomes are the forecast.
"""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, Protocol, Self

from vmckpt.plan.dirtying import DirtyCurve

# From so many moments, at most, a migration is played.
STARTS = 12
# One that is asked for now begins to send so much later.
BEGINS_S = 0.4
# A guest has a rhythm that is as it was a period before, and was not in between: by so much of what
# its moments differ from their mean, and they by so much of that.
LIKE, UNLIKE, VARIES = 0.55, 1.0, 0.2
# So many periods are tried, up to this part of what was seen: most of it was to be seen twice.
RHYTHMS, LONGEST = 60, 0.6


class Course(NamedTuple):
    """Spans one after the other, by their ends; `pages[i][n]`: distinct pages in spans i to i + n.

    `curve` is the guest on average, for what lies beyond the last span or within one. One with a
    rhythm does again and again what it did in its first `rhythm_s`; 0: it has none.
    """

    ends_s: Sequence[float]
    pages: Sequence[Sequence[int]]
    curve: DirtyCurve
    rhythm_s: float = 0.0

    @classmethod
    def seen(
        cls, ends_s: Sequence[float], pages: Sequence[Sequence[int]], curve: DirtyCurve
    ) -> Self:
        """With the rhythm that it shows."""
        course = cls(ends_s, pages, curve)
        return course._replace(rhythm_s=_rhythm_s(course))

    def now_s(self) -> float | None:
        """The moment like that in which a migration would begin now; of one without rhythm None."""
        if not self.rhythm_s:
            return None
        return (self.ends_s[-1] + BEGINS_S) % self.rhythm_s

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
        if self.rhythm_s:
            return self._in_rhythm(from_s % self.rhythm_s, to_s - from_s)
        mean = self.curve.within(to_s - from_s)
        if from_s >= end_s:
            return mean
        if to_s <= end_s:
            return self._seen(from_s, to_s)
        seen = self._seen(from_s, end_s)
        return seen + max(mean - self.curve.within(end_s - from_s), 0.0)

    def _in_rhythm(self, from_s: float, length_s: float) -> float:
        """From a moment of the first period, of which more is known than of later ones."""
        left_s = self.rhythm_s - from_s
        if length_s <= left_s:
            return self._seen(from_s, from_s + length_s)
        if length_s >= self.rhythm_s:
            return self._seen(0.0, min(length_s, self.ends_s[-1]))
        # What is dirtied both before and after the turn counts twice, but no more than all.
        parts = self._seen(from_s, self.rhythm_s) + self._seen(0.0, length_s - left_s)
        return min(parts, self._seen(0.0, self.rhythm_s))

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


def _rhythm_s(course: Course) -> float:
    """The shortest period that fits about as well as any; 0 where none does."""
    spans = list(zip((0.0, *course.ends_s), course.ends_s, strict=False))
    rates = [
        row[0] / (end_s - begin_s)
        for row, (begin_s, end_s) in zip(course.pages, spans, strict=True)
    ]
    if _varies(rates) <= VARIES * fmean(rates or [0.0]):
        return 0.0
    was_unlike, fit = False, dict[float, float]()
    for step in range(1, RHYTHMS + 1):
        period_s = step / RHYTHMS * LONGEST * spans[-1][1]
        later = [(n, *span) for n, span in enumerate(spans) if span[0] >= period_s]
        if not later:  # the last span is a long one
            break
        differs = fmean(
            abs(rates[n] - course.between(begin_s - period_s, end_s - period_s) / (end_s - begin_s))
            for n, begin_s, end_s in later
        )
        was_unlike = was_unlike or differs > UNLIKE * _varies(rates)
        if was_unlike and differs < LIKE * _varies([rates[n] for n, _, _ in later]):
            fit[period_s] = differs
    best = min(fit.values(), default=0.0)
    return next((period_s for period_s, differs in fit.items() if differs <= 1.1 * best), 0.0)


def _varies(rates: Sequence[float]) -> float:
    """How far they are from their mean, on average."""
    mean = fmean(rates or [0.0])
    return fmean([abs(rate - mean) for rate in rates] or [0.0])


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


class Slowed(NamedTuple):
    """As by `load` until a moment, and from there on at `speed` times that."""

    load: Load
    since_s: float
    speed: float

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """See `Load`."""
        return self.load.between(self._as_if_s(from_s), self._as_if_s(to_s), quantile)

    def _as_if_s(self, at_s: float) -> float:
        return min(at_s, self.since_s) + max(at_s - self.since_s, 0.0) * self.speed
