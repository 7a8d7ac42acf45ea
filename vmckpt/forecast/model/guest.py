"""A guest as the planner sees it: its pages, what they hold, how fast it dirties them."""

from dataclasses import dataclass

from vmckpt.forecast.model.course import DirtyProfile, From, Load, OnAverage
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.forecast.model.first_pass import Stretch

PAGE_BYTES = 4096
# A page in QEMU's stream is its content and a header; a zero page is a header and a byte.
SENT_PAGE_BYTES, SENT_ZERO_BYTES = PAGE_BYTES + 8, 9


@dataclass(frozen=True, slots=True)
class Guest:
    """Shares are fractions. `ratio` is what compression leaves of a non-zero page.

    `dirtied_*` describe the pages that it dirties. `disk_bytes` have to be copied. `busy` is the
    used fraction of its processors' time: throttling slows it only beyond the idle rest. `layout`
    is its memory in page order, `course` when it dirtied what; without them memory and time are
    uniform. `moves_now`: the migration starts right after the measurement.
    """

    total_pages: int
    zero_share: float
    ratio: float
    dirtied_zero_share: float
    dirtied_ratio: float
    curve: DirtyCurve
    disk_bytes: int = 0
    busy: float = 1.0
    layout: tuple[Stretch, ...] = ()
    course: DirtyProfile | None = None
    moves_now: bool = False

    def speed(self, throttle: float) -> float:
        """The guest's speed, as a fraction, if it is stopped for that fraction of the time."""
        return min((1 - throttle) / self.busy, 1.0)

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Its memory in page order; one stretch if no more is known."""
        zero = self.zero_pages
        return self.layout or (Stretch(self.total_pages - zero, zero, ratio=self.ratio),)

    @property
    def loads(self) -> list[Load]:
        """The possible loads during the migration, all equally likely."""
        if self.course is None:
            return [OnAverage(self.curve)]
        return [From(self.course, start_s) for start_s in self.course.starts_s()]

    @property
    def load_now(self) -> Load | None:
        """What it will dirty if it moves now; None if it moves later or has no rhythm."""
        if not self.moves_now or self.course is None or (now_s := self.course.now_s()) is None:
            return None
        return From(self.course, now_s)

    @property
    def zero_pages(self) -> float:
        """Zero pages at the start of the migration."""
        return self.total_pages * self.zero_share
