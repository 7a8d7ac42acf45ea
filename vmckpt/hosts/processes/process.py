"""Processes that outlive the command that started them; a reused pid is never mistaken for one."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from vmckpt.errors import OutcomeUnknownError
from vmckpt.procfs import read_text, status_fields
from vmckpt.state.documents import Schema

KILL_TIMEOUT_S = 5.0
_POLL_S = 0.001
# In /proc/PID/stat: the thread has left user code permanently (include/linux/sched.h).
_PF_EXITING = 0x4
# More than execve(2) accepts as a command line, and more than most are.
_MOST_BYTES, _PIECE_BYTES = 8 << 20, 256 << 10
# Never through another user's symbolic link.
APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid together with the kernel's start time of the process, in clock ticks since boot."""

    pid: int
    start_ticks: int


# process.json of a job or a service: its process.
PROCESS = Schema(ProcessId, "see that the process has ended, and remove the file")


def spawn(argv: list[str], stderr_path: Path) -> ProcessId:
    """Start a process in its own session, with output appended to a file (mode 0600).

    It inherits no other descriptor, which could hold a lock. It is reaped if it ends while this
    process lives. Raises OSError.
    """
    log_fd = os.open(stderr_path, APPENDED, 0o600)
    null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    streams = [(os.POSIX_SPAWN_DUP2, *pair) for pair in ((null_fd, 0), (log_fd, 1), (log_fd, 2))]
    closed = [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()]
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=closed + streams, setsid=True)
    finally:
        os.close(null_fd)
        os.close(log_fd)
    spawned = identify(pid) or ProcessId(pid, 0)
    threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
    return spawned


def own_command() -> list[str]:
    """The command line that runs this vmckpt."""
    return [sys.executable, "-m", "vmckpt.cli.entry"]


def _inheritable() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                fds.append(int(name))
    return fds


def identify(pid: int) -> ProcessId | None:
    """The process that has `pid` now; None if there is none, or none of its threads still runs.

    Only ENOENT and ESRCH from the kernel mean "none". Raises OutcomeUnknownError if /proc cannot be
    read (no free descriptor, no memory): the process may well run.
    """
    try:
        stat = read_text(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as exc:
        raise unknown(pid, exc) from exc
    found = from_stat(pid, stat)
    return None if found and _is_flagged(_fields(stat)) and is_exiting(pid) else found


def unknown(pid: int | str, exc: OSError) -> OutcomeUnknownError:
    """The error for a process whose state the kernel does not report."""
    return OutcomeUnknownError(
        f"cannot tell whether process {pid} runs",
        why=f"the kernel does not answer: {exc.strerror or exc}",
        remedy="nothing was concluded from it: free descriptors or memory, then run this again",
    )


def from_stat(pid: int, stat: str) -> ProcessId | None:
    """The process with `pid`, by its /proc/PID/stat; None if it is a zombie or there is none.

    A process of which only the first thread has ended looks like a zombie, but other threads run.
    """
    fields = _fields(stat)
    if not fields or (fields[0] in "ZX" and int(fields[17]) <= 1):
        return None
    return ProcessId(pid, int(fields[19]))


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs. Raises as `identify` does."""
    return identify(process.pid) == process


def kill(
    process: ProcessId,
    signal_number: int = signal.SIGKILL,
    *,
    wait_s: float = KILL_TIMEOUT_S,
) -> bool:
    """Send a signal to exactly this process and wait for its end; True when it is gone."""
    with _signalled(process, signal_number) as pidfd:
        return pidfd is None or _ended(pidfd, wait_s)


def interrupt(process: ProcessId) -> bool:
    """SIGTERM to exactly this process; False when it has ended."""
    with _signalled(process, signal.SIGTERM) as pidfd:
        return pidfd is not None


def stop_for_good(process: ProcessId, *, wait_s: float = KILL_TIMEOUT_S) -> bool:
    """SIGKILL exactly this process and wait until none of its threads runs.

    Unlike after `kill`, the kernel may still be closing its files and freeing its memory, which
    takes 0.3 s per GiB. False if a thread still runs after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    with _signalled(process, signal.SIGKILL) as pidfd:
        while not (pidfd is None or _ended(pidfd, _POLL_S) or is_exiting(process.pid)):
            if time.monotonic() > deadline:
                return False
    return True


def wait_for_end(pid: int, wait_s: float) -> bool:
    """Wait until a process has completely ended: all files closed, and all locks free.

    False if it has not after `wait_s`. Raises OutcomeUnknownError as `kill` does.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError as exc:
        raise unknown(pid, exc) from exc
    try:
        return _ended(pidfd, wait_s)
    finally:
        os.close(pidfd)


@contextmanager
def _signalled(process: ProcessId, signal_number: int) -> Iterator[int | None]:
    """The pidfd of a process that was sent a signal; None if the process is gone.

    Safe against pid reuse: the signal goes through a pidfd opened before the identity is checked.
    Raises OutcomeUnknownError if there is no pidfd to be had: nothing was sent.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    except OSError as exc:
        raise unknown(process.pid, exc) from exc
    try:
        if not is_alive(process):
            yield None
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal_number)
        yield pidfd
    finally:
        os.close(pidfd)


def _ended(pidfd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_s * 1e3))


def is_exiting(pid: int) -> bool:
    """Whether every thread of a process has left user code permanently, or there is none.

    The kernel may still be freeing its memory then, and keeps its files open until that is done.

    False as well if that cannot be read: eventually the pidfd tells.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return all(_has_left(thread / "stat") for thread in threads)


def _has_left(stat: Path) -> bool:
    try:
        fields = _fields(read_text(stat))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return _is_flagged(fields)


def _is_flagged(fields: list[str]) -> bool:
    return bool(int(fields[6]) & _PF_EXITING)


def _fields(stat: str) -> list[str]:
    """The fields of /proc/.../stat from the state on: the name before may contain spaces and
    brackets.
    """
    return stat.rpartition(")")[2].split()


def find_by_argument(text: str, users: Collection[int] | None = None) -> list[ProcessId]:
    """Processes with `text` in their command line, except this one.

    Any user can put it there: with `users` only processes that run purely as one of these count.
    Raises OutcomeUnknownError if /proc cannot be read: an empty list is proof.
    """
    wanted = text.encode()
    found = _found("cmdline", lambda command_line: wanted in command_line, users)
    return found if users is None else [one for one in found if _is_of(one.pid, users)]


def _is_of(pid: int, users: Collection[int]) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError as exc:
        raise unknown(pid, exc) from exc
    return all(user in users for user in _users(status))


def find_by_user(uid: int) -> list[ProcessId]:
    """Processes with this user as any of their ids, as long as they run any user code.

    Raises OutcomeUnknownError if /proc cannot be read: an empty list is proof.
    """
    found = _found("status", lambda status: uid in _users(status))
    return [process for process in found if not is_exiting(process.pid)]


def _users(status: bytes) -> list[int]:
    return [int(uid) for uid in status_fields(status.decode(errors="replace")).get("Uid", [])]


def file_of(pid: int, file_name: str, users: Collection[int] | None = None) -> bytes:
    """The content of /proc/PID/cmdline, environ or status, within limits. Raises OSError.

    A process can make the first two as long as it likes (PR_SET_MM, prctl(2)). With `users`, at
    most one piece is read of a process that does not run purely as one of these.
    """
    output = b""
    with FileIO(f"/proc/{pid}/{file_name}") as file:
        while len(output) < _MOST_BYTES and (more := file.read(_PIECE_BYTES)):
            output += more
            if len(output) >= _PIECE_BYTES and users is not None and not _is_of(pid, users):
                break
    return output


def _found(
    file_name: str, is_wanted: Callable[[bytes], bool], users: Collection[int] | None = None
) -> list[ProcessId]:
    found = []
    try:
        names = os.listdir("/proc")
    except OSError as exc:
        raise unknown("any of the host's", exc) from exc
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            output = file_of(int(name), file_name, users)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is hidden (hidepid): then it is not ours
        except OSError as exc:
            raise unknown(int(name), exc) from exc
        if is_wanted(output) and (process := identify(int(name))):
            found.append(process)
    return found
