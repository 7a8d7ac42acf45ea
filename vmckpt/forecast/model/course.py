"""When a guest dirties its pages: the observations from any moment of the measurement on.

No single migration meets the mean over bursts. So a pre-copy is simulated from several moments of
the measurement, and the outcomes are the forecast.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor
from statistics import fmean
from typing import NamedTuple, Protocol, Self

from vmckpt.forecast.model.dirtying import DirtyCurve

# The number of moments, at most, from which a migration is simulated.
STARTS = 8
# Delay between the request for a migration and its first byte.
BEGINS_S = 0.4
# A guest has a rhythm if its rates are like those one period before (LIKE) and unlike those some
# time before that (UNLIKE), both as fractions of their mean deviation; VARIES is the least mean
# deviation, as a fraction of the mean.
LIKE, UNLIKE, VARIES = 0.55, 1.0, 0.2
# The number of periods to try, up to this fraction of the measurement: most of a period has to be
# seen twice.
RHYTHMS, LONGEST = 96, 0.6
# The number of cells in which the measurement is compared with the earlier one.
CELLS = 40
# Less than this fraction of all pages dirtied does not show how busy the guest was.
TELLING = 0.01


class WorkProfile(NamedTuple):
    """The work done by each moment, as the time it takes on average; both start at 0."""

    moments_s: Sequence[float]
    done_s: Sequence[float]

    def by(self, at_s: float) -> float:
        """How much it had done by then."""
        after = min(max(bisect_left(self.moments_s, at_s), 1), len(self.moments_s) - 1)
        begin_s, end_s = self.moments_s[after - 1], self.moments_s[after]
        before_s, after_s = self.done_s[after - 1], self.done_s[after]
        return before_s + (at_s - begin_s) / (end_s - begin_s) * (after_s - before_s)


class DirtyProfile(NamedTuple):
    """Consecutive spans, by their ends; `pages[i][n]`: distinct pages in spans i to i + n.

    `curve` is the guest's average, for times beyond the last span or within one. `work` says how
    busy it was, `done_s` how much of it was done at the start of each span and at the end. A guest
    with a rhythm repeats what it did in its first `rhythm_s`; 0: no rhythm.
    """

    ends_s: Sequence[float]
    pages: Sequence[Sequence[int]]
    curve: DirtyCurve
    work: WorkProfile
    done_s: Sequence[float]
    rhythm_s: float = 0.0

    @classmethod
    def seen(
        cls,
        ends_s: Sequence[float],
        pages: Sequence[Sequence[int]],
        counts: Sequence[Sequence[tuple[float, int]]],
        curve: DirtyCurve,
    ) -> Self:
        """Build the profile and detect its rhythm. `counts`: intermediate counts of the spans."""
        moments_s, done_s, spans_s = [0.0], [0.0], [0.0]
        for begin_s, end_s, row, parts in zip((0.0, *ends_s), ends_s, pages, counts, strict=False):
            for t_s, work_s in _work([*parts, (end_s - begin_s, row[0])], curve):
                moments_s.append(begin_s + t_s)
                done_s.append(done_s[-1] + work_s)
            spans_s.append(done_s[-1])
        course = cls(ends_s, pages, curve, WorkProfile(moments_s, done_s), spans_s)
        return course._replace(rhythm_s=_rhythm_s(course))

    def now_s(self) -> float | None:
        """The moment that matches a migration that starts now; None without a rhythm."""
        if not self.rhythm_s:
            return None
        return (self.ends_s[-1] + BEGINS_S) % self.rhythm_s

    def starts_s(self) -> list[float]:
        """Moments in the first half of the measurement, so that enough of it follows each."""
        half_s = self.ends_s[-1] / 2 if self.ends_s else 0.0
        return [half_s * n / STARTS for n in range(STARTS)]

    def between(self, from_s: float, to_s: float) -> float:
        """Distinct pages that are dirtied between two moments of the measurement."""
        if to_s <= from_s:
            return 0.0
        end_s = self.ends_s[-1] if self.ends_s else 0.0
        if self.rhythm_s:
            return self._in_rhythm(from_s % self.rhythm_s, to_s - from_s)
        if to_s <= end_s:
            return self._seen(from_s, to_s)
        mean = self.curve.within(to_s - from_s)
        if from_s >= end_s:
            return mean
        seen = self._seen(from_s, end_s)
        return seen + max(mean - self.curve.within(end_s - from_s), 0.0)

    def _in_rhythm(self, from_s: float, length_s: float) -> float:
        """As `between`, from a moment of the first period, about which most is known."""
        left_s = self.rhythm_s - from_s
        if length_s <= left_s:
            return self._seen(from_s, from_s + length_s)
        if length_s >= self.rhythm_s:
            return self._seen(0.0, min(length_s, self.ends_s[-1]))
        # Pages dirtied both before and after the turn count twice, but the sum is at most all of
        # them.
        parts = self._seen(from_s, self.rhythm_s) + self._seen(0.0, length_s - left_s)
        return min(parts, self._seen(0.0, self.rhythm_s))

    def _seen(self, from_s: float, to_s: float) -> float:
        first, last = self._span(from_s), self._span(to_s)
        if first == last:
            return self._within(first, from_s, to_s)
        gone = self._gone(first, from_s)
        with_first = self._from(first, last, to_s)
        return (1 - gone) * with_first + gone * self._from(first + 1, last, to_s)

    def _from(self, first: int, last: int, to_s: float) -> float:
        """From the beginning of one span to a moment in another, or in the same."""
        if first == last:
            return self._within(last, self.ends_s[last - 1] if last else 0.0, to_s)
        row = self.pages[first]
        before, after = row[last - first - 1 : last - first + 1]
        return before + self._gone(last, to_s) * (after - before)

    def _within(self, span: int, from_s: float, to_s: float) -> float:
        """Between two moments of a span."""
        whole = self.curve.within(self.done_s[span + 1] - self.done_s[span])
        part = self.curve.within(self.work.by(to_s) - self.work.by(from_s))
        return min(part / whole, 1.0) * self.pages[span][0] if whole else 0.0

    def _gone(self, span: int, at_s: float) -> float:
        """The fraction of the span's work that is done by then."""
        begin_s, end_s = self.done_s[span], self.done_s[span + 1]
        return (self.work.by(at_s) - begin_s) / (end_s - begin_s) if end_s > begin_s else 0.0

    def _span(self, at_s: float) -> int:
        return min(bisect_left(self.ends_s, at_s), len(self.ends_s) - 1)


def _work(parts: Sequence[tuple[float, float]], curve: DirtyCurve) -> Iterator[tuple[float, float]]:
    """When each part of a span ends, and how long its work takes on average.

    Where hardly any new pages come on average, their absence shows nothing.
    """
    before_s, before, worked_s = 0.0, 0.0, 0.0
    least = TELLING * curve.working_set_pages
    for t_s, pages in parts:
        work_s = t_s - before_s
        if work_s <= 0:  # as rounded, at the same moment
            continue
        usual = curve.within(worked_s + work_s) - curve.within(worked_s)
        if usual > least:
            work_s *= (pages - before) / usual
        yield t_s, work_s
        worked_s += work_s
        before_s, before = t_s, pages


def _rhythm_s(course: DirtyProfile) -> float:
    """The shortest period that fits about as well as the best; 0 if none fits."""
    if not course.ends_s:
        return 0.0
    whole_s = course.ends_s[-1]
    cell_s = whole_s / CELLS
    rates = [course.between(n * cell_s, (n + 1) * cell_s) for n in range(CELLS)]
    if _varies(rates) <= VARIES * fmean(rates):
        return 0.0
    was_unlike, fit = False, dict[float, float]()
    for step in range(1, RHYTHMS + 1):
        back = step / RHYTHMS * LONGEST * CELLS
        later = range(ceil(back), CELLS)
        differs = fmean(abs(rates[n] - _before(rates, n - back)) for n in later)
        was_unlike = was_unlike or differs > UNLIKE * _varies(rates)
        if was_unlike and differs < LIKE * _varies(rates[later.start :]):
            fit[back * cell_s] = differs
    return _best(fit)


def _before(rates: Sequence[float], at: float) -> float:
    """The rate at a fractional cell index, interpolated."""
    first = floor(at)
    after = rates[first + 1] if first + 1 < len(rates) else rates[first]
    return rates[first] + (at - first) * (after - rates[first])


def _best(fit: Mapping[float, float]) -> float:
    """The shortest period of about the best fit, or a slightly longer one that fits better."""
    least = min(fit.values(), default=0.0)
    shortest = next((period_s for period_s, differs in fit.items() if differs <= 1.1 * least), 0.0)
    alike = [period_s for period_s in fit if shortest <= period_s <= 1.1 * shortest]
    return min(alike, key=lambda period_s: fit[period_s], default=0.0)


def _varies(rates: Sequence[float]) -> float:
    """Their mean deviation from their mean."""
    mean = fmean(rates)
    return fmean(abs(rate - mean) for rate in rates)


class Load(Protocol):
    """What a guest dirties during a migration; moments count from the migration's start."""

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """Distinct pages that are dirtied between two moments."""


class OnAverage(NamedTuple):
    """The guest's average, at any moment."""

    curve: DirtyCurve

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """See `Load`."""
        return self.curve.within(to_s - from_s, quantile)


class From(NamedTuple):
    """What it did from one moment of the measurement on. Leaves nothing to chance."""

    course: DirtyProfile
    start_s: float

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """See `Load`."""
        del quantile
        return self.course.between(self.start_s + from_s, self.start_s + to_s)


class Slowed(NamedTuple):
    """As `load` until a moment, and at `speed` times that from there on."""

    load: Load
    since_s: float
    speed: float

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        """See `Load`."""
        return self.load.between(self._as_if_s(from_s), self._as_if_s(to_s), quantile)

    def _as_if_s(self, at_s: float) -> float:
        return min(at_s, self.since_s) + max(at_s - self.since_s, 0.0) * self.speed
