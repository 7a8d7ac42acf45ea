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
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import StorageError
from vmckpt.memory.ram_file import PAGE_BYTES, open_fd
from vmckpt.state.durable import write_durably
from vmckpt.store.area import Area

# Each is had with some tens of others; all take as long as a QEMU takes to begin. Put there later,
# when the guest runs, more of them took the processors from it: it answered later, not sooner.
MOST_NOTED = 512


def read_noted(path: Path) -> list[int]:
    """The pages noted for a VM, in their order; none of a file that is not there or damaged."""
    try:
        found = json.loads(path.read_text())
        return [number for number in found if isinstance(number, int)]
    except (OSError, ValueError, TypeError):
        return []


def next_noted(noted: Sequence[int], waited_for: Iterable[int], used: Collection[int]) -> list[int]:
    """What is to be noted now: of what was there beforehand what was `used`, then what was not."""
    found = [*(number for number in noted if number in used), *waited_for]
    return list(dict.fromkeys(found))[:MOST_NOTED]


def note(path: Path, pages: Sequence[int]) -> None:
    """Note pages. Where that fails the next restore takes longer."""
    with suppress(StorageError):
        write_durably(path, json.dumps(pages))


def put_first(ram_file: Path, area: Area, numbers: Sequence[int]) -> NDArray[np.bool_]:
    """Put pages into an unused RAM file, created if it is missing; returns which are there.

    Raises DamagedError, OSError.
    """
    there = np.zeros(area.chunk_count, bool)
    wanted = [number for number in numbers if 0 <= number < len(there)]
    if not wanted:
        return there
    with open_fd(os.open(ram_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
        os.truncate(fd, area.size_bytes)
        for number in wanted:
            if there[number]:
                continue
            around = area.read_around(number)
            for first, count in runs(around.numbers, np.arange(len(around.numbers))):
                data = around.contents[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
                os.pwrite(fd, data, int(around.numbers[first]) * PAGE_BYTES)
            there[around.numbers] = True
    return there


def runs(numbers: NDArray[np.int64], chosen: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where chosen places lie beside one another, and so do their numbers: (place, how many)."""
    if not len(chosen):
        return
    apart = (np.diff(chosen) != 1) | (np.diff(numbers[chosen]) != 1)
    starts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(chosen)]
    for start, end in itertools.pairwise(starts):
        yield int(chosen[start]), end - start
