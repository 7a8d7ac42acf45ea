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
        self._began_s, self._before = time.monotonic(), _ticks_by_pid(mark)

    def busy_percent(self) -> float:
        """Of all processors, so far."""
        took_s = time.monotonic() - self._began_s
        now = _ticks_by_pid(self._mark)
        used = sum(ticks - self._before.get(pid, 0) for pid, ticks in now.items())
        return 100.0 * used / _CLOCK_TICKS / took_s / (os.cpu_count() or 1)


def _ticks_by_pid(mark: str) -> dict[int, int]:
    """Processor time of every process that is not ours, without its dead children's.

    Those would count in full when they are waited for, ours too when that is init.
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
        parents[pid], ticks[pid] = int(stat[1]), sum(int(word) for word in stat[11:13])
        if mark.encode() in words or parents[pid] == _KERNEL_THREADS:
            ours.add(pid)  # the kernel's own threads work for everybody
    return {pid: used for pid, used in ticks.items() if not _descends(pid, parents, ours)}


def _descends(pid: int, parents: dict[int, int], ours: set[int]) -> bool:
    while pid and pid not in ours:
        pid = parents.get(pid, 0)
    return pid in ours
