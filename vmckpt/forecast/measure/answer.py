"""A dirty-rate measurement received from another host or read from a file, and its validation.

Forecasts divide by its times and take logarithms of its pages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vmckpt.codec import require_within
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.foreign import MalformedError
from vmckpt.memory.content import Content
from vmckpt.memory.observe import DirtyWindow
from vmckpt.memory.windows import DirtyHistory

# Upper bounds: no memory has more pages or bytes, and no measurement takes more seconds.
MOST_PAGES, MOST_BYTES, MOST_S = 1 << 44, 1 << 56, float(1 << 30)
# The largest result of zstd for a page, as a fraction of it; the tolerance for sums of shares.
_MOST_RATIO, _OFF = 2.0, 1e-3
# The least fraction that counts as busy, rounded.
_LEAST_BUSY = 1e-3


@dataclass(frozen=True, slots=True)
class Answer:
    """`DirtyRate` as JSON; a piece of `layout` is its hole, then the fields of its content."""

    source: str
    why: str
    took_s: float
    ram_bytes: int
    curve: DirtyCurve
    windows: tuple[DirtyWindow, ...]
    faults_per_s: float
    ram: Content | None
    dirtied: Content | None
    busy: float = 1.0
    ended_unix_s: float = 0.0
    layout: tuple[tuple[float, float, float, float, float], ...] = ()
    course: DirtyHistory | None = None

    def __post_init__(self) -> None:
        require_within("took_s", self.took_s, MOST_S)
        require_within("ram_bytes", self.ram_bytes, MOST_BYTES)
        require_within("faults_per_s", self.faults_per_s, MOST_PAGES)
        require_within("busy", self.busy, 1, least=_LEAST_BUSY)
        require_within("ended_unix_s", self.ended_unix_s)
        _require_curve(self.curve)
        for window in self.windows:
            _require_all("windows", window[:2], MOST_S)
            require_within("windows", window.pages, MOST_PAGES)
        for content in (self.ram, self.dirtied):
            if content is not None:
                _require_content(content)
        for hole, *parts in self.layout:
            _require_share(hole)
            _require_content(Content(*parts))
        if self.course is not None:
            _require_course(self.course)


def _require_curve(curve: DirtyCurve) -> None:
    require_within("total_pages", curve.total_pages, MOST_PAGES)
    for point in curve.points:
        require_within("curve", point.t_s, MOST_S)
        _require_all("curve", point[1:], MOST_PAGES)
    times = (0.0, *(point.t_s for point in curve.points))
    if any(after <= before for before, after in pairwise(times)):
        raise MalformedError("the times of curve do not rise")
    for name in ("low_pages", "pages", "high_pages"):
        _require_rising(f"{name} of curve", [getattr(point, name) for point in curve.points])


def _require_content(content: Content) -> None:
    for share in (content.zero, content.compressible, content.incompressible):
        _require_share(share)
    require_within("ratio", content.ratio, _MOST_RATIO)


def _require_share(share: float) -> None:
    require_within("share", share, 1 + _OFF, least=-_OFF)


def _require_course(course: DirtyHistory) -> None:
    spans = len(course.ends_s)
    lengths = [len(row) for row in course.pages]
    if lengths != list(range(spans, 0, -1)) or len(course.counts) != spans:
        raise MalformedError(f"course has {spans} ends, and pages or counts of others")
    _require_all("ends_s", course.ends_s, MOST_S)
    _require_rising("ends_s", course.ends_s)
    for row in course.pages:
        _require_all("course", row, MOST_PAGES)
        _require_rising("pages of course", row)
    for counts in course.counts:
        for t_s, pages in counts:
            require_within("counts", t_s, MOST_S)
            require_within("counts", pages, MOST_PAGES)


def _require_all(name: str, values: Iterable[float], most: float) -> None:
    for value in values:
        require_within(name, value, most)


def _require_rising(name: str, values: Sequence[float]) -> None:
    if any(after < before for before, after in pairwise(values)):
        raise MalformedError(f"{name} fall")
