"""Computes distinct pages dirtied within longer and longer windows from those in short ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vmckpt.memory.dirty_pages import PageSet

# A span of at least this share of its length counts as complete.
WHOLE = 0.99


class Dirtied(NamedTuple):
    """So many distinct pages were dirtied within `t_s` seconds."""

    t_s: float
    pages: int


@dataclass(frozen=True, slots=True)
class DirtyHistory:
    """Consecutive spans of time, by when they end; how many pages were dirtied in each.

    `pages[i][n]`: how many distinct ones from the beginning of span i to the end of span i + n.
    `counts[i]`: the counts of the first parts of span i, if they were sampled.
    """

    ends_s: tuple[float, ...]
    pages: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[Dirtied, ...], ...]


class _Span(NamedTuple):
    end_s: float
    pages: PageSet
    counts: tuple[Dirtied, ...]


class Windows:
    """Windows of doubling length: two neighbours, joined, are one of the next length.

    Level n stands for 2^n ticks. Windows come in time order; their level may rise, never fall.
    Dirtied pages are kept by spans of at least `span_s`; a window as long as that is one.
    """

    def __init__(self, span_s: float = math.inf) -> None:
        self._samples: dict[int, list[Dirtied]] = {}
        self._waiting: dict[int, tuple[float, PageSet]] = {}
        self._length_s, self.all = 0.0, PageSet(0)
        self._span_s, self._spans = span_s, list[_Span]()

    def add(
        self, level: int, length_s: float, pages: PageSet, counts: Sequence[Dirtied] = ()
    ) -> None:
        """A window has ended. `counts`: those of its first parts."""
        began_s = self._spans[-2].end_s if len(self._spans) > 1 else 0.0
        is_short = length_s < self._span_s * WHOLE
        self._length_s += length_s
        if is_short and self._spans and self._spans[-1].end_s - began_s < self._span_s * WHOLE:
            last = self._spans.pop()
            self._spans.append(_Span(self._length_s, last.pages | pages, ()))
        else:
            self._spans.append(_Span(self._length_s, pages, () if is_short else tuple(counts)))
        self.all |= pages
        for lower in [n for n in self._waiting if n < level]:
            del self._waiting[lower]  # its neighbour is in a longer window
        while True:
            self.note(level, length_s, pages.count)
            before = self._waiting.pop(level, None)
            if before is None:
                self._waiting[level] = (length_s, pages)
                return
            level, length_s, pages = level + 1, length_s + before[0], pages | before[1]

    def note(self, level: int, length_s: float, pages: int) -> None:
        """Note the count of the first part of a window."""
        self._samples.setdefault(level, []).append(Dirtied(length_s, pages))

    def course(self) -> DirtyHistory:
        """Pages dirtied from each span to each later one. Costs the square of their number."""
        rows = []
        for first in range(len(self._spans)):
            together, row = PageSet(0), []
            for span in self._spans[first:]:
                together |= span.pages
                row.append(together.count)
            rows.append(tuple(row))
        return DirtyHistory(
            tuple(span.end_s for span in self._spans),
            tuple(rows),
            tuple(span.counts for span in self._spans),
        )

    def samples(self) -> Mapping[int, list[Dirtied]]:
        """All samples, by level; the longest is the whole time."""
        found = {level: list(seen) for level, seen in sorted(self._samples.items())}
        longest = max((one.t_s for seen in found.values() for one in seen), default=0.0)
        if self._length_s > 1.2 * longest:
            found[max(found) + 1] = [Dirtied(self._length_s, self.all.count)]
        return found
