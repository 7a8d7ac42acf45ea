"""How fast a protected guest may write while an epoch is on its way to the standby. Pure.

A guest that writes faster than the link takes would make each epoch larger than the last, up to all
of its memory. So once what it has written anew takes the link longer than BACKLOG_S, it runs for a
part of each slot only: until it has written half of what the link takes in that time, and always
for a tenth. It is never stopped for longer than a slot: what it wrote too much is made up for in
several.
"""

import math
from dataclasses import dataclass

# An epoch that is safe within GRACE_S slows nothing. One that is not within STALL_S shows how fast
# the link is now.
GRACE_S, STALL_S, BACKLOG_S = 0.05, 0.5, 0.3
SLOT_S, LEAST_RUN_S = 0.1, 0.01
# What one look finds is made up for in so long, before the next.
MOST_OWED_S = 5.0
# Of what the link takes, for what is written meanwhile: so the next epoch is smaller.
SHARE = 0.5
# Fewer pages say nothing about the link.
TELLING_PAGES, _WEIGHT = 1024, 0.3
# How long a guest that nothing slows is watched, for how fast it writes; and for which part of the
# time at most it is looked for pages.
WATCHED_S, _LOOK_SHARE = 0.25, 0.1


@dataclass(slots=True)
class Brake:
    """`pages_per_s`: what the link was seen to take, packed; 0: not seen yet.

    `most_pages`: what an epoch may have; half of that is too much to be written anew.
    """

    most_pages: float = math.inf
    pages_per_s: float = 0.0

    def took(self, pages: int, seconds: float) -> None:
        """An epoch of so many pages was safe after so long."""
        if pages >= TELLING_PAGES and seconds > 0:
            seen = pages / seconds
            weight = _WEIGHT if self.pages_per_s else 1.0
            self.pages_per_s += weight * (seen - self.pages_per_s)

    def takes_pages_per_s(self, under_way: int, for_s: float) -> float:
        """What the link takes, at most, while `under_way` pages have been on it for so long."""
        learned = self.pages_per_s or math.inf
        return min(learned, under_way / for_s) if under_way and for_s > STALL_S else learned

    def is_due(self, dirty_pages: int, takes_pages_per_s: float) -> bool:
        """Whether the guest is to be slowed now."""
        return dirty_pages > min(takes_pages_per_s * BACKLOG_S, self.most_pages / 2)

    def allowance(self, takes_pages_per_s: float) -> float:
        """How many pages it may write in a slot before it is stopped for the rest of that."""
        return min(SHARE * takes_pages_per_s * SLOT_S, self.most_pages / 32)

    def owed_s(self, written_pages: float, ran_s: float, takes_pages_per_s: float) -> float:
        """For how long to stop it, again and again, after it wrote so many pages in `ran_s`.

        So that on average it writes what is allowed, also where it ran for longer than it was to,
        because this machine is busy or scanning its memory takes long.
        """
        allowed_s = SLOT_S * written_pages / max(self.allowance(takes_pages_per_s), 1e-9)
        return min(max(0.0, allowed_s - ran_s), MOST_OWED_S)


@dataclass(slots=True)
class Writing:
    """How fast a guest writes that nothing slows yet, in pages: by counts while all is copied.

    Pages that are written twice count once: so what the first moments tell is nearest, and the
    fastest of all is kept. `pages_per_s` of 0: not seen yet.
    """

    pages_per_s: float = 0.0
    _since_s: float = -math.inf
    _before: int = 0
    _due_s: float = -math.inf

    def is_due(self, now_s: float) -> bool:
        """Whether to count now."""
        return now_s >= self._due_s

    def found(self, dirty_pages: int, began_s: float, ended_s: float) -> None:
        """So many were found written, by a count that took this time."""
        if self._since_s > -math.inf:
            rate = (dirty_pages - self._before) / (began_s - self._since_s)
            self.pages_per_s = max(self.pages_per_s, rate)
        self._since_s, self._before = began_s, dirty_pages
        self._due_s = began_s + max(WATCHED_S, (ended_s - began_s) / _LOOK_SHARE)
