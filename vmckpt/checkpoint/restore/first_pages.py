"""Preload the pages that a guest needs first when it is restored.

The host notes, per VM, each page that a restored guest waits for in its first moments. The VM's
next restore puts these pages, and those loaded along with them, into its RAM file during the
checks, so that the guest finds them. Pages that the guest then does not use are dropped from the
note, for a guest with random writes waits for other pages each time. The note is a hint: contents
come from the checkpoint that is restored. (REAP, ASPLOS 2021, does so for functions.)
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

# Each brings some tens of others; loading all takes as long as QEMU needs to start. Loading more
# once the guest runs takes processors from it: it answers later, not sooner.
MOST_NOTED = 512


def read_noted(path: Path) -> list[int]:
    """The pages noted for a VM, in order; none if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        return [number for number in found if isinstance(number, int)]
    except (OSError, ValueError, TypeError):
        return []


def next_noted(noted: Sequence[int], waited_for: Iterable[int], used: Collection[int]) -> list[int]:
    """The next note: preloaded pages that were `used`, then those that the guest waited for."""
    found = [*(number for number in noted if number in used), *waited_for]
    return list(dict.fromkeys(found))[:MOST_NOTED]


def note(path: Path, pages: Sequence[int]) -> None:
    """Write the note. If that fails, only the next restore is slower."""
    with suppress(StorageError):
        write_durably(path, json.dumps(pages))


def put_first(ram_file: Path, area: Area, numbers: Sequence[int]) -> NDArray[np.bool_]:
    """Put pages into an unused RAM file, created if it is missing; returns the pages present.

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
    """Runs of chosen indices with consecutive page numbers: (index, length)."""
    if not len(chosen):
        return
    apart = (np.diff(chosen) != 1) | (np.diff(numbers[chosen]) != 1)
    starts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(chosen)]
    for start, end in itertools.pairwise(starts):
        yield int(chosen[start]), end - start
