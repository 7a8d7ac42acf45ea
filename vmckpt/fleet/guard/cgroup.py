"""A control group (version 2) that holds a guard's command with all processes it starts.

A process cannot take itself or its children out of one: not by a double fork, nor by a new session.
`make` returns None if this user may not create one.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from vmckpt.hosts.processes.process import identify
from vmckpt.hosts.processes.process import kill as kill_process

# The unified hierarchy, and the one beside version 1's (cgroups(7)).
MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_POLL_S = 0.01


def make(name: str) -> Path | None:
    """Create an empty group below this process's own; None if that is not possible."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
        [path] = [line.removeprefix("0::/") for line in own if line.startswith("0::/")]
        [mount] = [one for one in MOUNTS if (one / "cgroup.controllers").exists()]
        group = mount / path / name
        group.mkdir()
    except (OSError, ValueError):
        return None
    if (group / "cgroup.events").exists() and _can_be_entered(group):
        return group
    dissolve(group)
    return None


def _can_be_entered(group: Path) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            enter(group)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def enter(group: Path) -> None:
    """Move this process there. Raises OSError."""
    (group / "cgroup.procs").write_text("0")


def kill_all(group: Path, within_s: float) -> list[int]:
    """SIGKILL all processes in it; returns those still there after `within_s`. Raises OSError."""
    given_up_s = time.monotonic() + within_s
    while found := members(group):
        try:
            (group / "cgroup.kill").write_text("1")
        except OSError:  # before Linux 5.14, or not ours
            for pid in found:
                if process := identify(pid):
                    with suppress(PermissionError):
                        kill_process(process, signal.SIGKILL, wait_s=0)
        if time.monotonic() > given_up_s:
            return found
        time.sleep(_POLL_S)
    return []


def members(group: Path) -> list[int]:
    """The processes in it and in the groups below it, without zombies."""
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        with suppress(FileNotFoundError):  # a group that was just removed
            found += map(int, (Path(folder) / "cgroup.procs").read_text().split())
    return [pid for pid in found if identify(pid)]


def dissolve(group: Path) -> None:
    """Remove it; processes still in it continue in its parent group."""
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            for pid in (Path(folder) / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            Path(folder).rmdir()
