"""The first pass sends all of memory once, in page order: two hosts that work concurrently.

The source checks a page, finds it zero or sends it; the destination receives it, which costs about
as much for a page of zeroes as for any other. A stretch of zeroes costs the link almost nothing:
the source runs ahead of the destination through it, then waits for it once the sockets are full.
Under a bandwidth limit a window's bytes go at its start, and the bytes not used in a window of
zeroes cannot be used later (migration_rate_limit; ram.c, ram_find_and_save_block).
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

# The length of a window of the bandwidth limit.
WINDOW_S = 0.1
# The capacity of the sockets of both sides.
SOCKETS_BYTES = 6e6
# If compression leaves nothing of a page, its index in the packet is sent: 8 bytes.
LEAST_PART = 8 / 4104


class Stretch(NamedTuple):
    """A piece of memory: its non-zero pages, its zero pages, and how many of these are holes.

    `ratio` is what compression leaves of a non-zero page.
    """

    pages: float
    zero_pages: float
    hole_pages: float = 0.0
    ratio: float = 1.0


class BandwidthLimit(NamedTuple):
    """A bandwidth limit.

    QEMU checks after every `at_once_bytes` of memory whether it is reached; `in_hand` times as many
    are in flight then.
    """

    bytes_per_s: float
    at_once_bytes: float
    in_hand: float

    def window_bytes(self, part: float) -> float:
        """The bytes sent in a window if `part` of memory's bytes goes over the link."""
        at_once = self.at_once_bytes * max(part, LEAST_PART)
        return (ceil(self.bytes_per_s * WINDOW_S / at_once) + self.in_hand) * at_once


class TransferPace(NamedTuple):
    """Seconds per page at each end, bytes on the link, and the limit on these (None: no limit).

    `sent_s` and `taken_s` are for non-zero pages; for a zero page `scanned_s` is the source's share
    and `zero_s` the destination's; a hole costs the source `hole_s` more. With `compresses` the
    source takes as long per page as the destination, and both take `squeezed_s` more for a page of
    which nothing is left.
    """

    sent_s: float
    taken_s: float
    scanned_s: float
    zero_s: float
    hole_s: float
    page_bytes: float
    zero_bytes: float
    held: BandwidthLimit | None = None
    squeezed_s: float = 0.0
    compresses: bool = False

    def sent_part(self, stretch: Stretch) -> float:
        """The fraction of a page's bytes that goes over the link."""
        return stretch.ratio if self.compresses else 1.0


@lru_cache(maxsize=64)
def play(stretches: tuple[Stretch, ...], pace: TransferPace) -> float:
    """Seconds until the destination has received all of it."""
    ends = _Ends(pace)
    for stretch in stretches:
        ends.go(stretch)
    return max(ends.source_s, ends.target_s)


class _Ends:
    """The progress of both ends, in seconds since the start."""

    def __init__(self, pace: TransferPace) -> None:
        self.source_s = self.target_s = 0.0
        # The start of the last window, and the fraction of its bytes that is left.
        self._pace, self._window_s, self._left = pace, 0.0, 1.0

    def go(self, stretch: Stretch) -> None:
        """Add one stretch, zeroes and other pages mixed."""
        pace, left = self._pace, 1.0
        zero_pages, holes = stretch.zero_pages, stretch.hole_pages
        sent_part = pace.sent_part(stretch)
        taken_s = pace.taken_s + pace.squeezed_s * (1 - sent_part)
        sent_s = taken_s if pace.compresses else pace.sent_s
        busy_s = stretch.pages * sent_s + zero_pages * pace.scanned_s + holes * pace.hole_s
        takes_s = stretch.pages * taken_s + zero_pages * pace.zero_s
        sends = stretch.pages * pace.page_bytes * sent_part + zero_pages * pace.zero_bytes
        windows = sends / pace.held.window_bytes(sent_part) if pace.held else 0.0
        while left > 1e-9:
            part = min(left, self._in_window(busy_s, windows)) if pace.held else 1.0
            began_s = self.source_s
            self.source_s += part * busy_s
            self._left -= part * windows
            self.target_s = max(self.target_s, began_s) + part * takes_s
            left -= part
        if sends:
            # The queue is at most what the sockets hold.
            self.source_s = max(self.source_s, self.target_s - takes_s * SOCKETS_BYTES / sends)

    def _in_window(self, busy_s: float, windows: float) -> float:
        """The fraction of a stretch that fits into the window; starts a new one if it is used up.

        `windows`: how many windows the stretch's bytes fill.
        """
        ends_s = self._window_s + WINDOW_S
        if self._left <= 1e-6 or self.source_s >= ends_s - 1e-9:
            # The next one begins when this one ends, or when QEMU checks next.
            self.source_s = max(self.source_s, ends_s)
            self._window_s, self._left = self.source_s, 1.0
        by_bytes = self._left / windows if windows else 1.0
        by_time = (self._window_s + WINDOW_S - self.source_s) / busy_s if busy_s else 1.0
        return max(min(by_bytes, by_time), 1e-6)
