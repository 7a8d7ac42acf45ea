"""Decides whether the remaining pages fit the allowed pause, or more is copied while the guest
runs.

Pure: times in, decisions out.
"""

from dataclasses import dataclass, field

# The newest measurement's weight in the running mean.
_WEIGHT = 0.2
# A pass that leaves more than this share gains nothing: the guest writes just as fast.
_GAIN = 0.7
MOST_PASSES = 8
# The share of a pause that copying may always take, however long the rest of it takes.
_LEAST_SHARE = 0.25


@dataclass(slots=True)
class Budget:
    """What a pause costs, learned from pauses: a fixed time, and a time per page."""

    max_pause_s: float
    fixed_s: float = 0.004
    page_s: float = 2e-6
    _left: list[int] = field(default_factory=list)

    def wants_pass(self, pages: int) -> bool:
        """Whether to copy `pages` while the guest runs before an epoch. Call before each pass."""
        before, self._left = self._left, [*self._left, pages]
        # The fixed part, which no pass shortens, may alone be too long.
        allowed_s = max(self.max_pause_s - self.fixed_s, _LEAST_SHARE * self.max_pause_s)
        if pages * self.page_s <= allowed_s:
            return False
        gains = not before or pages <= _GAIN * before[-1]
        return gains and len(before) < MOST_PASSES

    def paused(self, pages: int, total_s: float, copy_s: float) -> None:
        """An epoch of so many pages has been captured; copying them took `copy_s`."""
        self._left = []
        self.fixed_s += _WEIGHT * (total_s - copy_s - self.fixed_s)
        if pages:
            self.page_s += _WEIGHT * (copy_s / pages - self.page_s)
