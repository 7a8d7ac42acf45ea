"""Scheduling priorities on a busy processor.

A guest's vCPUs must not be delayed by the threads that copy, compress and send their state.

If the kernel groups threads by session (`sched_autogroup_enabled`, with processes in no cgroup of
their own), niceness counts only within a session; between sessions their own niceness counts.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A niceness: about a thirtieth of the usual share.
_LAST = 15
# Session niceness: a tenth of the usual share, so that its work ends even on a processor that is
# never idle; while a guest is paused for it, ten times the share if permitted, otherwise the usual
# one.
_SESSION_LAST, _SESSION_FIRST, _SESSION_USUAL = 10, -10, 0
_SESSION = Path("/proc/self/autogroup")
# All users except root may together change it ten times a second.
_CHANGE_S, _TRY_S = 0.5, 0.02
# Policies of threads that share a processor by time slices.
_SHARING = (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE)
# A real-time policy that child processes do not inherit; others are unlikely to use this priority.
_REAL_TIME, _LOWEST = os.SCHED_RR | os.SCHED_RESET_ON_FORK, 1


def batch_priority() -> None:
    """From now on this thread does not preempt others when it wakes up (SCHED_BATCH).

    For work that can wait for some milliseconds. Child processes inherit it. A thread with another
    policy keeps that.
    """
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def low_priority() -> None:
    """Run this thread, and those that it starts, at low priority from now on.

    For work on a VM beside which other VMs are about to be paused briefly.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _LAST)  # of the calling thread only


class _Session:
    """This process's session: whether it has low priority now, or had it long enough; its previous
    processors; and whether its threads use SCHED_IDLE at low priority.
    """

    def __init__(self) -> None:
        self.is_last, self.has_waited, self.processors = False, False, set[int]()
        self.idles = False


_session = _Session()


def session_low_priority() -> None:
    """Run this process's whole session at low priority from now on.

    Only if the process leads its session, so that its caller's is not affected. Where sessions are
    not groups it keeps its usual share. Its threads use SCHED_IDLE if they may return to normal: a
    processor without other threads then counts as free to all that wake up or wait. If they may
    not, one processor is left to others, the same one by all low-priority sessions.
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
    """The number of this process's processors, including the one that it leaves to others."""
    return len(_session.processors | os.sched_getaffinity(0))


def end_session_low_priority() -> None:
    """End the session's low priority permanently, with all of its threads.

    On a host that is never idle its work must end too.
    """
    if not _session.processors:
        return
    was_last, _session.is_last, _session.has_waited = _session.is_last, False, True
    if was_last:
        _have(_SESSION_USUAL)
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended
            os.sched_setaffinity(int(thread), _session.processors)
            if _session.idles and os.sched_getscheduler(int(thread)) == os.SCHED_IDLE:
                _share_again(int(thread), os.SCHED_OTHER)


def share_processor() -> None:
    """Give this thread normal priority in a low-priority process."""
    with suppress(PermissionError):
        _change(os.SCHED_IDLE, os.SCHED_OTHER)


def _may_idle_for_a_while() -> bool:
    """Whether threads may return from SCHED_IDLE: it takes CAP_SYS_NICE, or a limit.

    Tested by a thread that ends then.
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
def session_high_priority() -> Iterator[None]:
    """Raise the priority of a low-priority session for the block: a guest is paused for it.

    This thread may use any processor.
    """
    if not _session.is_last:
        yield
        return
    _session.is_last = False
    if _session.idles:
        _change(os.SCHED_IDLE, os.SCHED_OTHER)
    _raise_session()
    os.sched_setaffinity(0, _session.processors)
    try:
        yield
    finally:
        session_low_priority()


def _raise_session() -> None:
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

    For the milliseconds of a guest's pause. Without permission (CAP_SYS_NICE) nothing changes; a
    thread that has a real-time policy or a deadline keeps it. Threads and processes started
    meanwhile have normal policies.
    """
    before = list[tuple[int, int]]()
    # This thread is raised first, so that it does not wait for the others, and lowered last.
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


def end_real_time(pid: int) -> None:
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


def normal_priority() -> None:
    """Undo `batch_priority`."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


@contextmanager
def high_priority() -> Iterator[None]:
    """For the block, in which a guest is paused: run at high priority."""
    normal_priority()
    try:
        yield
    finally:
        batch_priority()


def _change(before: int, after: int) -> None:
    if os.sched_getscheduler(0) == before:
        os.sched_setscheduler(0, after, os.sched_param(0))
