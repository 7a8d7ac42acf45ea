"""Who comes first on a busy processor: this thread, or those that it would interrupt.

A guest's vCPUs have no shorter turns for what copies, compresses and sends their state beside them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# A niceness: about a thirtieth of what others get.
_LAST = 15


def give_way() -> None:
    """From here on this thread interrupts nobody when it wakes up; it has as large a share.

    For work that can wait for some milliseconds. Processes that it starts inherit that. A thread
    that somebody gave another policy keeps it.
    """
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def come_last() -> None:
    """From here on this thread, and those that it starts, get little where others want the time.

    For work of a VM beside which other VMs are about to be stopped for a moment.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _LAST)  # of the calling thread alone


def be_prompt() -> None:
    """Undo `give_way`."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


@contextmanager
def prompt() -> Iterator[None]:
    """For the block: a guest stands still for what is done there. Then it gives way again."""
    be_prompt()
    try:
        yield
    finally:
        give_way()


def _change(before: int, after: int) -> None:
    if os.sched_getscheduler(0) == before:
        os.sched_setscheduler(0, after, os.sched_param(0))
