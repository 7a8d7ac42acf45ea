"""Who comes first on a busy processor: this thread, or those that it would interrupt.

A guest's vCPUs have no shorter turns for what copies, compresses and sends their state beside them.

Where the kernel has groups by session (`sched_autogroup_enabled`, and processes in no cgroup of
their own) niceness counts among the threads of one session alone, and among sessions their own.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A niceness: about a thirtieth of what others get.
_LAST = 15
# A session's: a tenth, so that its work comes to an end on a processor that is never idle; and
# while a guest is paused for it, ten times as much as others if permitted, or as much.
_SESSION_LAST, _SESSION_FIRST, _SESSION_USUAL = 10, -10, 0
_SESSION = Path("/proc/self/autogroup")
# It may be changed ten times a second, by all together who are not root.
_CHANGE_S, _TRY_S = 0.5, 0.02
# Policies of threads that share a processor by turns.
_SHARING = (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE)
# A real-time policy that ends with the thread; others are unlikely to use this priority.
_REAL_TIME, _LOWEST = os.SCHED_RR | os.SCHED_RESET_ON_FORK, 1


def give_way() -> None:
    """From now on this thread does not preempt others when it wakes up (SCHED_BATCH).

    For work that can wait for some milliseconds. Child processes inherit it. A thread with another
    policy keeps that.
    """
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def come_last() -> None:
    """From here on this thread, and those that it starts, get little where others want the time.

    For work of a VM beside which other VMs are about to be stopped for a moment.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _LAST)  # of the calling thread alone


class _Session:
    """This process's: whether it comes last now, or has for long enough, which processors it had
    before, and whether its threads are idle ones while it comes last.
    """

    def __init__(self) -> None:
        self.is_last, self.has_waited, self.processors = False, False, set[int]()
        self.idles = False


_session = _Session()


def session_comes_last() -> None:
    """From here on all of this process's session gets little where others want the time.

    Only that of a process that leads its own session, not its caller's. Where sessions are no
    groups it has its usual share. Its threads are idle ones (SCHED_IDLE) where they may be usual
    ones again: a processor that has no other thread counts as free then, for all that wake up or
    wait. Where they may not, one processor is left to others, by all low sessions the same one.
    """
    if os.getsid(0) != os.getpid():
        return
    if _session.has_waited:
        _have(_SESSION_USUAL)
        return
    if not _session.processors:
        _session.idles = os.sched_getscheduler(0) == os.SCHED_OTHER and _may_idle_for_a_while()
    _session.is_last = True
    _session.processors |= os.sched_getaffinity(0)
    _have(_SESSION_LAST)
    if _session.idles:
        _change(os.SCHED_OTHER, os.SCHED_IDLE)
    elif len(_session.processors) > 1:  # of this thread, and of those that it will start
        os.sched_setaffinity(0, _session.processors - {min(_session.processors)})


def own_processors() -> int:
    """How many this process may have, the one that it leaves to others included."""
    return len(_session.processors | os.sched_getaffinity(0))


def session_has_waited() -> None:
    """It comes last no more, nor ever again, if it did: on a host that is never idle its work comes
    to an end too. With all of its threads.
    """
    if not _session.processors:
        return
    was_last, _session.is_last, _session.has_waited = _session.is_last, False, True
    if was_last:
        _have(_SESSION_USUAL)
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # one that has ended
            os.sched_setaffinity(int(thread), _session.processors)
            if _session.idles and os.sched_getscheduler(int(thread)) == os.SCHED_IDLE:
                _share_again(int(thread), os.SCHED_OTHER)


def take_turns() -> None:
    """Give this thread normal priority in a low-priority process."""
    with suppress(PermissionError):
        _change(os.SCHED_IDLE, os.SCHED_OTHER)


def _may_idle_for_a_while() -> bool:
    """To be a usual one afterwards is what not everybody may: it takes CAP_SYS_NICE, or a limit.

    Tried out by a thread that ends then.
    """
    returned = list[bool]()

    def idle() -> None:
        with suppress(OSError):
            _change(os.SCHED_OTHER, os.SCHED_IDLE)
            _change(os.SCHED_IDLE, os.SCHED_OTHER)
            returned.append(True)

    thread = threading.Thread(target=idle)
    thread.start()
    thread.join()
    return bool(returned)


def _have(niceness: int) -> None:
    with suppress(OSError):
        _SESSION.write_text(str(niceness))


@contextmanager
def session_prompt() -> Iterator[None]:
    """Raise the priority of a low-priority session for the block: a guest is paused for it.

    On any processor: this thread.
    """
    if not _session.is_last:
        yield
        return
    _session.is_last = False
    if _session.idles:
        _change(os.SCHED_IDLE, os.SCHED_OTHER)
    _session_comes_first()
    os.sched_setaffinity(0, _session.processors)
    try:
        yield
    finally:
        session_comes_last()


def _session_comes_first() -> None:
    given_up_s, niceness = time.monotonic() + _CHANGE_S, _SESSION_FIRST
    while time.monotonic() < given_up_s:
        try:
            _SESSION.write_text(str(niceness))
        except PermissionError:
            niceness = _SESSION_USUAL
        except BlockingIOError:
            time.sleep(_TRY_S)
        except OSError:
            return
        else:
            return


@contextmanager
def in_real_time(pid: int | None = None) -> Iterator[None]:
    """For the block this thread, and all of process `pid`, preempt threads of normal policies.

    For the milliseconds of a guest's pause. As before where that may not be had (it takes
    CAP_SYS_NICE); a thread that has a real-time policy or a deadline keeps it. Threads
    and processes that these start meanwhile are usual ones.
    """
    before = list[tuple[int, int]]()
    # This thread is the first, lest it waits over the others, and the last to be a usual one.
    threads = [0, *(_threads(pid) if pid is not None else ())]
    try:
        for thread in threads:
            with suppress(OSError):  # it has ended, or may not be changed
                policy = os.sched_getscheduler(thread)
                if policy == _REAL_TIME and thread:
                    policy = os.SCHED_OTHER  # left by a killed process whose guard was killed too
                if policy in _SHARING:
                    os.sched_setscheduler(thread, _REAL_TIME, os.sched_param(_LOWEST))
                    before.append((thread, policy))
        yield
    finally:
        for thread, policy in reversed(before):
            _share_again(thread, policy)


def real_time_is_over(pid: int) -> None:
    """Reset real-time threads to normal after the process that raised them died."""
    for thread in _threads(pid):
        with suppress(OSError):
            if os.sched_getscheduler(thread) == _REAL_TIME:
                _share_again(thread, os.SCHED_OTHER)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def _share_again(thread: int, policy: int) -> None:
    with suppress(OSError):  # it has ended
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def be_prompt() -> None:
    """Undo `give_way`."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


@contextmanager
def prompt() -> Iterator[None]:
    """For the block, in which a guest is paused: run at high priority."""
    be_prompt()
    try:
        yield
    finally:
        give_way()


def _change(before: int, after: int) -> None:
    if os.sched_getscheduler(0) == before:
        os.sched_setscheduler(0, after, os.sched_param(0))
