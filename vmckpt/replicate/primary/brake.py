"""How fast a protected guest may write while an epoch is on its way to the standby. Pure.

A guest that writes faster than the link takes would make each epoch larger than the last, up to all
of its memory. So once its new writes would take the link longer than BACKLOG_S, it runs only for
part of each slot: until it has written half of what the link takes in that time, and always for a
tenth. It is never stopped for longer than a slot: excess writes are compensated over several.
"""

import math
from dataclasses import dataclass

# An epoch that is safe within GRACE_S slows nothing. One that is not safe within STALL_S shows how
# fast the link is now.
GRACE_S, STALL_S, BACKLOG_S = 0.05, 0.5, 0.3
SLOT_S, LEAST_RUN_S = 0.1, 0.01
# How long the result of one measurement is applied before the next one.
MOST_OWED_S = 5.0
# The share of the link's rate for new writes, so that the next epoch is smaller.
SHARE = 0.5
# Fewer pages say nothing about the link.
TELLING_PAGES, _WEIGHT = 1024, 0.3
# For how long an unslowed guest is watched to measure its write rate, and the maximum share of the
# time that scans may take.
WATCHED_S, _LOOK_SHARE = 0.25, 0.1


@dataclass(slots=True)
class Brake:
    """`pages_per_s`: the link's measured rate, packed; 0: not measured yet.

    `most_pages`: the limit of an epoch; half of that is too much for new writes.
    """

    most_pages: float = math.inf
    pages_per_s: float = 0.0

    def took(self, pages: int, seconds: float) -> None:
        """An epoch of `pages` pages was safe after this time."""
        if pages >= TELLING_PAGES and seconds > 0:
            seen = pages / seconds
            weight = _WEIGHT if self.pages_per_s else 1.0
            self.pages_per_s += weight * (seen - self.pages_per_s)

    def takes_pages_per_s(self, under_way: int, for_s: float) -> float:
        """The link's rate, at most, given that `under_way` pages have been on it for this long."""
        learned = self.pages_per_s or math.inf
        return min(learned, under_way / for_s) if under_way and for_s > STALL_S else learned

    def is_due(self, dirty_pages: int, takes_pages_per_s: float) -> bool:
        """Whether to slow the guest now."""
        return dirty_pages > min(takes_pages_per_s * BACKLOG_S, self.most_pages / 2)

    def allowance(self, takes_pages_per_s: float) -> float:
        """How many pages it may write in a slot before it is stopped for the rest of it."""
        return min(SHARE * takes_pages_per_s * SLOT_S, self.most_pages / 32)

    def owed_s(self, written_pages: float, ran_s: float, takes_pages_per_s: float) -> float:
        """For how long to stop the guest, repeatedly, after it wrote so many pages in `ran_s`.

        So its average stays within the allowance, even if it ran for longer than intended because
        this machine is busy or scanning its memory takes long.
        """
        allowed_s = SLOT_S * written_pages / max(self.allowance(takes_pages_per_s), 1e-9)
        return min(max(0.0, allowed_s - ran_s), MOST_OWED_S)


@dataclass(slots=True)
class Writing:
    """How fast an unslowed guest writes, in pages, counted while everything is copied.

    Pages that are written twice count once, so the first moments are the most accurate, and the
    fastest rate is kept. `pages_per_s` of 0: not measured yet.
    """

    pages_per_s: float = 0.0
    _since_s: float = -math.inf
    _before: int = 0
    _due_s: float = -math.inf

    def is_due(self, now_s: float) -> bool:
        """Whether to count now."""
        return now_s >= self._due_s

    def found(self, dirty_pages: int, began_s: float, ended_s: float) -> None:
        """A count that took this time found so many pages written."""
        if self._since_s > -math.inf:
            rate = (dirty_pages - self._before) / (began_s - self._since_s)
            self.pages_per_s = max(self.pages_per_s, rate)
        self._since_s, self._before = began_s, dirty_pages
        self._due_s = began_s + max(WATCHED_S, (ended_s - began_s) / _LOOK_SHARE)
