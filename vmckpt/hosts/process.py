"""Processes that outlive the command that started them, named so that a reused pid is never mistaken."""

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid together with the kernel's start time of the process, in clock ticks since boot."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that has `pid` now; None when there is none or it has ended (zombies count as ended)."""
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
