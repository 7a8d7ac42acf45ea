"""How much of the machine other people's processes use while something is measured."""

import os
import time
from pathlib import Path

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# Their parent.
_KERNEL_THREADS = 2


class Others:
    """From its making on: what processes use that are not ours.

    Ours are this process with its descendants, and those that name `mark` in their command line.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._began_s, self._before = time.monotonic(), _ticks(mark)

    def busy_percent(self) -> float:
        """Of all processors, so far."""
        took_s = time.monotonic() - self._began_s
        used = _ticks(self._mark) - self._before
        return 100.0 * used / _CLOCK_TICKS / took_s / (os.cpu_count() or 1)


def _ticks(mark: str) -> int:
    """Processor time of all processes that are not ours.

    With that of their dead children: who ends meanwhile is counted on with whoever waited for it.
    """
    parents, ticks = dict[int, int](), dict[int, int]()
    ours = {os.getpid()}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        pid = int(path.name)
        parents[pid], ticks[pid] = int(stat[1]), sum(int(word) for word in stat[11:15])
        if mark.encode() in words or parents[pid] == _KERNEL_THREADS:
            ours.add(pid)  # the kernel's own threads work for everybody
    return sum(used for pid, used in ticks.items() if not _descends(pid, parents, ours))


def _descends(pid: int, parents: dict[int, int], ours: set[int]) -> bool:
    while pid and pid not in ours:
        pid = parents.get(pid, 0)
    return pid in ours
