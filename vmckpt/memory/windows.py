"""From pages dirtied in short windows: distinct pages dirtied within longer and longer ones."""

from collections.abc import Mapping
from typing import NamedTuple

from vmckpt.memory.dirty_pages import PageSet


class Dirtied(NamedTuple):
    """So many distinct pages were dirtied within `t_s` seconds."""

    t_s: float
    pages: int


class Windows:
    """Windows of doubling length: two neighbours, joined, are one of the next length.

    Level n stands for 2^n ticks. Windows come in time order; their level may rise, never fall.
    """

    def __init__(self) -> None:
        self._samples: dict[int, list[Dirtied]] = {}
        self._waiting: dict[int, tuple[float, PageSet]] = {}
        self._length_s, self.all = 0.0, PageSet(0)

    def add(self, level: int, length_s: float, pages: PageSet) -> None:
        """A window has ended."""
        self._length_s += length_s
        self.all |= pages
        for lower in [n for n in self._waiting if n < level]:
            del self._waiting[lower]  # its neighbour is in a longer window
        while True:
            self.note(level, length_s, pages.count)
            before = self._waiting.pop(level, None)
            if before is None:
                self._waiting[level] = (length_s, pages)
                return
            level, length_s, pages = level + 1, length_s + before[0], pages | before[1]

    def note(self, level: int, length_s: float, pages: int) -> None:
        """What the first part of a window has come to."""
        self._samples.setdefault(level, []).append(Dirtied(length_s, pages))

    def samples(self) -> Mapping[int, list[Dirtied]]:
        """All that was seen, by level; the longest is the whole time."""
        found = {level: list(seen) for level, seen in sorted(self._samples.items())}
        longest = max((one.t_s for seen in found.values() for one in seen), default=0.0)
        if self._length_s > 1.2 * longest:
            found[max(found) + 1] = [Dirtied(self._length_s, self.all.count)]
        return found
