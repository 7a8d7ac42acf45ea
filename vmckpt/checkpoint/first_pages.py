"""The pages that a guest wants first when it comes back: noted once, there beforehand next time.

Each page that a restored guest waits for in its first moments is noted, by VM, on the host. At the
VM's next restore these pages, and what is had along with them, are put into its RAM file while all
is checked, so that it finds them; those that it then does not look at are noted no more, for a
guest that writes here and there waits for other pages each time. The note is a hint: contents come
from the checkpoint that is restored. (REAP, ASPLOS 2021, does so for functions.)
"""

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.memory.ram_file import PAGE_BYTES, open_fd
from vmckpt.store.area import Area, Chunks

# Each is had with some tens of others.
MOST_NOTED = 4096
# These are put there however fast all else is ready: it takes as long as a QEMU takes to begin.
AT_LEAST = 512


def read_noted(path: Path) -> list[int]:
    """The pages noted for a VM, in their order; none of a file that is not there or damaged."""
    try:
        found = json.loads(path.read_text())
        return [number for number in found if isinstance(number, int)]
    except (OSError, ValueError, TypeError):
        return []


def next_noted(
    noted: Sequence[int],
    waited_for: Iterable[int],
    *,
    there: Collection[int],
    used: Collection[int],
) -> list[int]:
    """What is to be noted now, the surest first.

    Of what was noted: those that were `there` beforehand stay if they were `used`; of the others
    nobody knows.
    """
    found = [number for number in noted if number in used]
    found += waited_for
    found += [number for number in noted if number not in there]
    return list(dict.fromkeys(found))[:MOST_NOTED]


def note(path: Path, pages: Sequence[int]) -> None:
    """Note pages. Where that fails the next restore takes longer."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(pages))
        part.rename(path)


class Ahead:
    """Pages of an area that are noted, each to be put there before it is wanted."""

    def __init__(self, area: Area, noted: Sequence[int]) -> None:
        self._area = area
        self.noted = [number for number in noted if 0 <= number < area.chunk_count]
        self._coming = iter(self.noted)

    def next(self, left: NDArray[np.bool_]) -> Chunks | None:
        """The next one that is `left`, with what is had along; None: that was all. DamagedError."""
        for number in self._coming:
            if left[number]:
                return self._area.read_around(number)
        return None

    def put_into(
        self, ram_file: Path, is_enough: Callable[[int], bool], left: NDArray[np.bool_]
    ) -> None:
        """Put pages into a RAM file that nobody uses yet, until it is enough.

        The file is made if need be. `is_enough` is told how often something was put there; what
        was is `left` no more. Raises DamagedError, OSError.
        """
        if not self.noted:
            return
        with open_fd(os.open(ram_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
            os.truncate(fd, self._area.size_bytes)
            times = 0
            while not is_enough(times) and (found := self.next(left)) is not None:
                for first, count in runs(found.numbers, np.arange(len(found.numbers))):
                    data = found.contents[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
                    os.pwrite(fd, data, int(found.numbers[first]) * PAGE_BYTES)
                left[found.numbers] = False
                times += 1


def runs(numbers: NDArray[np.int64], chosen: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where chosen places lie beside one another, and so do their numbers: (place, how many)."""
    if not len(chosen):
        return
    apart = (np.diff(chosen) != 1) | (np.diff(numbers[chosen]) != 1)
    starts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(chosen)]
    for start, end in itertools.pairwise(starts):
        yield int(chosen[start]), end - start
