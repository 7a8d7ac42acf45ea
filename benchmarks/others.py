"""How much of the machine other people's processes use while something is measured."""

import os
import time
from pathlib import Path

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# Their parent.
_KERNEL_THREADS = 2


class Others:
    """From its making on: what processes use that are not ours.

    Ours are this process with its descendants, and those that name `mark` in their command line;
    once ours, a process stays so: one that is ending has neither a command line nor its parent.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._began_s = time.monotonic()
        self._before, self._ours = _ticks_by_pid(mark)

    def busy_percent(self) -> float:
        """Of all processors, so far."""
        took_s = time.monotonic() - self._began_s
        now, _ = _ticks_by_pid(self._mark)
        others = now.keys() - self._ours
        used = sum(now[pid] - self._before.get(pid, 0) for pid in others)
        return 100.0 * used / _CLOCK_TICKS / took_s / (os.cpu_count() or 1)


def _ticks_by_pid(mark: str) -> tuple[dict[int, int], set[int]]:
    """Processor time of every process that is not ours, without its dead children's; ours.

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
    ours |= {pid for pid in ticks if _descends(pid, parents, ours)}
    return {pid: used for pid, used in ticks.items() if pid not in ours}, ours


def _descends(pid: int, parents: dict[int, int], ours: set[int]) -> bool:
    while pid and pid not in ours:
        pid = parents.get(pid, 0)
    return pid in ours
