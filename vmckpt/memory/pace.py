"""How fast this host's processors are just now: what it costs them to copy memory.

It changes with whoever else is on the machine, and what a migration costs changes with it.
"""

import time
from statistics import median

# More than the caches next to one processor hold, and soon done. A look takes a few milliseconds.
COPIED_BYTES = 16 << 20
LOOK_EVERY_S = 0.25


class Pace:
    """Looks at it now and then, where somebody measures for a while anyway."""

    def __init__(self) -> None:
        self._source = memoryview(bytearray(b"\xa5") * COPIED_BYTES)
        self._target = bytearray(self._source)
        self._next_s, self._seen_s = 0.0, list[float]()

    def look(self) -> None:
        """Look again, if the last time is long enough ago."""
        if time.monotonic() < self._next_s:
            return
        began_s = time.thread_time()
        self._target[:] = self._source
        self._seen_s.append(time.thread_time() - began_s)
        self._next_s = time.monotonic() + LOOK_EVERY_S

    @property
    def copying_s(self) -> float | None:
        """Processor seconds that copying a GiB takes, the median; None before the first look."""
        return median(self._seen_s) * 2**30 / COPIED_BYTES if self._seen_s else None
