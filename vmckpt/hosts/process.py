"""Processes that outlive the command that started them; a reused pid is never mistaken for one."""

import os
import select
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PRIVATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid together with the kernel's start time of the process, in clock ticks since boot."""

    pid: int
    start_ticks: int


def spawn(argv: list[str], stderr_path: Path) -> ProcessId:
    """Start a process in a session of its own, its output appended to a file (mode 0600).

    It gets no other descriptor: one that this process inherited could be somebody's lock. It is
    reaped if it ends while this process lives. Raises OSError.
    """
    log_fd = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
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


def _inheritable() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                fds.append(int(name))
    return fds


def identify(pid: int) -> ProcessId | None:
    """The process that has `pid` now; None when there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets; fields count from the last ')'.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return ProcessId(pid, int(fields[19]))


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs."""
    return identify(process.pid) == process


def kill(process: ProcessId, signal_number: int = signal.SIGKILL, *, wait_s: float = 5.0) -> bool:
    """Send a signal to exactly this process and wait for its end; True when it is gone.

    Safe against pid reuse: the signal goes through a pidfd opened before the identity is checked.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not is_alive(process):
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal_number)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))
    finally:
        os.close(pidfd)


def find_by_argument(text: str) -> list[ProcessId]:
    """Processes with `text` somewhere in their command line, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command_line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in command_line and (process := identify(int(entry.name))):
            found.append(process)
    return found
