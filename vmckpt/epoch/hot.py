"""Finds runs of pages that a guest writes all the time. Pure: spans in, spans out.

A protected page costs the guest a fault when it writes it. One that it writes in every
epoch is copied in every epoch anyway: left unprotected for a while it costs nothing, and counts as
written until it is protected again. What did not change in it is not sent.
"""

from collections.abc import Iterable, Sequence

from vmckpt.memory.ram_file import Span

# Runs shorter than this are not worth a separate scan.
LEAST_BYTES = 64 << 12
MOST_RUNS = 16
# How many passes in a row they must have been written; and for how many they are then spared.
CONFIRMED_PASSES, SPARED_PASSES = 3, 13


class HotRuns:
    """What to spare, learned from the result of each pass."""

    def __init__(self) -> None:
        self._runs: list[Span] | None = None
        self._passes = 0

    @property
    def spared(self) -> Sequence[Span]:
        """Spans that the next pass must not protect; ascending and disjoint."""
        is_spared = CONFIRMED_PASSES <= self._passes < CONFIRMED_PASSES + SPARED_PASSES
        return self._runs or () if is_spared else ()

    def found(self, spans: Iterable[Span]) -> None:
        """Learn what a pass found written."""
        if self._passes >= CONFIRMED_PASSES + SPARED_PASSES:
            self._runs, self._passes = None, 0  # all pages were protected: start over
        self._passes += 1
        if self._passes > CONFIRMED_PASSES:
            return
        long = [span for span in spans if span[1] - span[0] >= LEAST_BYTES]
        self._runs = long if self._runs is None else list(_common(self._runs, long))
        if len(self._runs) > MOST_RUNS:
            longest = sorted(self._runs, key=lambda span: span[0] - span[1])[:MOST_RUNS]
            self._runs = sorted(longest)


def _common(ours: Sequence[Span], theirs: Sequence[Span]) -> Iterable[Span]:
    """The runs in both that are long enough; both ascending."""
    at = 0
    for start, end in ours:
        while at < len(theirs) and theirs[at][1] <= start:
            at += 1
        for other in theirs[at:]:
            if other[0] >= end:
                break
            span = (max(start, other[0]), min(end, other[1]))
            if span[1] - span[0] >= LEAST_BYTES:
                yield span
