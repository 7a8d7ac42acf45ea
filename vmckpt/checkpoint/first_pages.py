"""The pages that a guest wants first when it comes back: noted once, there beforehand next time.

Each page that a restored guest waits for in its first moments is noted, by VM, on the host. At the
VM's next restore these pages, and what is had along with them, are put into its RAM file while all
is checked, so that it finds them. The note is a hint: contents come from the checkpoint that is
restored. (REAP, ASPLOS 2021, does so for functions.)
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.memory.ram_file import PAGE_BYTES, open_fd
from vmckpt.store.area import Area

# Each is had with some tens of others.
MOST_NOTED = 512


def read_noted(path: Path) -> list[int]:
    """The pages noted for a VM, the latest first; none of a file that is not there or damaged."""
    try:
        found = json.loads(path.read_text())
        return [number for number in found if isinstance(number, int)]
    except (OSError, ValueError, TypeError):
        return []


def note(path: Path, waited_for: Sequence[int]) -> None:
    """Note pages, before those that are noted. Where that fails the next restore takes longer."""
    pages = list(dict.fromkeys([*waited_for, *read_noted(path)]))[:MOST_NOTED]
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(pages))
        part.rename(path)


def put_first(ram_file: Path, area: Area, numbers: Sequence[int]) -> NDArray[np.bool_]:
    """Put pages into a RAM file that nobody uses yet, and is made if need be: which are there.

    Raises DamagedError, OSError.
    """
    there = np.zeros(area.size_bytes // PAGE_BYTES, bool)
    wanted = [number for number in numbers if 0 <= number < len(there)]
    if not wanted:
        return there
    with open_fd(os.open(ram_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
        os.truncate(fd, area.size_bytes)
        for number in wanted:
            if there[number]:
                continue
            around = area.read_around(number)
            contents = memoryview(around.contents)
            for place, one in enumerate(around.numbers.tolist()):
                page = contents[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]
                os.pwrite(fd, page, one * PAGE_BYTES)
            there[around.numbers] = True
    return there
