"""All of memory, sent once, in the order of its pages: two ends that work side by side.

The source looks at a page, finds it zero or sends it; the target takes it in, which for a page of
zeroes costs about as much as for any other. A stretch of zeroes costs the link next to nothing: the
source runs ahead of the target through it, and then waits for it when the sockets are full. Under a
bandwidth limit a window's bytes go at its beginning, and in a window in which only zeroes are
looked at nothing goes that could be made up for later (migration_rate_limit; ram.c,
ram_find_and_save_block).
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

# How long a window of the bandwidth limit is.
WINDOW_S = 0.1
# What the sockets of both sides hold.
SOCKETS_BYTES = 6e6
# Where compression leaves nothing of a page its place in the packet goes: 8 bytes.
LEAST_PART = 8 / 4104


class Stretch(NamedTuple):
    """A piece of memory: pages that are not zero, zero pages, those of them that are holes.

    `ratio` is what compression leaves of a page that is not zero.
    """

    pages: float
    zero_pages: float
    hole_pages: float = 0.0
    ratio: float = 1.0


class BandwidthLimit(NamedTuple):
    """A bandwidth limit: whether it is reached QEMU asks after `at_once_bytes` of memory each time,
    and of these `in_hand` more are under way then.
    """

    bytes_per_s: float
    at_once_bytes: float
    in_hand: float

    def window_bytes(self, part: float) -> float:
        """What really goes in a window, if `part` of memory's bytes goes over the link."""
        at_once = self.at_once_bytes * max(part, LEAST_PART)
        return (ceil(self.bytes_per_s * WINDOW_S / at_once) + self.in_hand) * at_once


class TransferPace(NamedTuple):
    """Seconds a page at each end, bytes on the link, and what holds these back (None: nothing).

    `sent_s` and `taken_s` are of pages that are not zero, `looked_s` is the source's part of one
    that is, `zero_s` the target's; a hole takes the source `hole_s` more. One that `compresses` is
    as busy with a page as the target, and both `squeezed_s` longer if nothing were left of it.
    """

    sent_s: float
    taken_s: float
    looked_s: float
    zero_s: float
    hole_s: float
    page_bytes: float
    zero_bytes: float
    held: BandwidthLimit | None = None
    squeezed_s: float = 0.0
    compresses: bool = False

    def sent_part(self, stretch: Stretch) -> float:
        """What of a page's bytes goes over the link."""
        return stretch.ratio if self.compresses else 1.0


@lru_cache(maxsize=64)
def play(stretches: tuple[Stretch, ...], pace: TransferPace) -> float:
    """How many seconds it takes until the target has all of it."""
    ends = _Ends(pace)
    for stretch in stretches:
        ends.go(stretch)
    return max(ends.source_s, ends.target_s)


class _Ends:
    """Where both ends stand, in seconds since the beginning."""

    def __init__(self, pace: TransferPace) -> None:
        self.source_s = self.target_s = 0.0
        # When the last window began, and what part of what it lets through is left.
        self._pace, self._window_s, self._left = pace, 0.0, 1.0

    def go(self, stretch: Stretch) -> None:
        """One more stretch, zeroes and others mixed."""
        pace, left = self._pace, 1.0
        zero_pages, holes = stretch.zero_pages, stretch.hole_pages
        sent_part = pace.sent_part(stretch)
        taken_s = pace.taken_s + pace.squeezed_s * (1 - sent_part)
        sent_s = taken_s if pace.compresses else pace.sent_s
        busy_s = stretch.pages * sent_s + zero_pages * pace.looked_s + holes * pace.hole_s
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
            # What is queued is at most what the sockets hold.
            self.source_s = max(self.source_s, self.target_s - takes_s * SOCKETS_BYTES / sends)

    def _in_window(self, busy_s: float, windows: float) -> float:
        """What part of a stretch the window still has room for; a new one begins if none.

        `windows`: so many the stretch fills with what it sends.
        """
        ends_s = self._window_s + WINDOW_S
        if self._left <= 1e-6 or self.source_s >= ends_s - 1e-9:
            # The next begins when this one is over, or when QEMU is next there to see.
            self.source_s = max(self.source_s, ends_s)
            self._window_s, self._left = self.source_s, 1.0
        by_bytes = self._left / windows if windows else 1.0
        by_time = (self._window_s + WINDOW_S - self.source_s) / busy_s if busy_s else 1.0
        return max(min(by_bytes, by_time), 1e-6)
