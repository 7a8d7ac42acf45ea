"""A guest as the planner sees it: its pages, what they hold, how fast it dirties them."""

from dataclasses import dataclass

from vmckpt.plan.dirtying import DirtyCurve

PAGE_BYTES = 4096
# A page in QEMU's stream: its content and a header; one of zeroes is a header and a byte.
SENT_PAGE_BYTES, SENT_ZERO_BYTES = PAGE_BYTES + 8, 9


@dataclass(frozen=True, slots=True)
class Guest:
    """Shares are of 1. `ratio` is what compression leaves of a page that is not zero.

    `dirtied_*` are of the pages that it dirties. `disk_bytes` have to be copied. `busy`: of its
    processors' time, how much it uses: throttling slows it only beyond the rest.
    """

    total_pages: int
    zero_share: float
    ratio: float
    dirtied_zero_share: float
    dirtied_ratio: float
    curve: DirtyCurve
    disk_bytes: int = 0
    busy: float = 1.0

    def speed(self, throttle: float) -> float:
        """How fast it gets on, of 1, when it is kept from running for that part of the time."""
        return min((1 - throttle) / self.busy, 1.0)

    @property
    def zero_pages(self) -> float:
        """Pages of zeroes at the beginning."""
        return self.total_pages * self.zero_share
